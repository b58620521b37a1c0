"""Every impossible router is refused when its layer is built: the key, the values and the way out."""

from __future__ import annotations

from typing import Any

import pytest

from moe_ffn import ConfigError, build_ffn
from moe_ffn.routing import RouterConfig

WITH_K = [name for name, cls in RouterConfig.members.items() if "k" in cls.model_fields]
WITH_JITTER = [name for name, cls in RouterConfig.members.items() if "jitter" in cls.model_fields]


def refusal(router: Any, num_experts: int = 8) -> str:
    with pytest.raises(ConfigError) as caught:
        build_ffn({"type": "moe", "num_experts": num_experts, "router": router}, d_model=8)
    return str(caught.value)


@pytest.mark.parametrize("name", [name for name in WITH_K if name != "product_key"])
def test_more_experts_per_token_than_experts(name: str) -> None:
    message = "router.k (9) must not exceed num_experts (8); lower router.k or raise num_experts"
    assert refusal({"type": name, "k": 9}) == message


@pytest.mark.parametrize("name", WITH_K)
def test_no_experts_per_token(name: str) -> None:
    # Where k is a mean it may be below 1.
    means = ("expert_choice", "expert_threshold", "relu")
    rule = "greater than 0.0" if name in means else "at least 1"
    assert refusal({"type": name, "k": 0}) == f"router.k: must be {rule}, got 0"


@pytest.mark.parametrize("name", WITH_JITTER)
def test_jitter_that_could_turn_a_token_round(name: str) -> None:
    for jitter, rule in ((1.0, "less than 1.0"), (1.5, "less than 1.0"), (-0.1, "at least 0.0")):
        message = f"router.jitter: must be {rule}, got {jitter}"
        assert refusal({"type": name, "jitter": jitter}) == message


def test_hash_sees_no_token_that_could_be_jittered() -> None:
    assert (
        refusal({"type": "hash", "jitter": 0.1}) == "router.jitter: unknown; known: type, k, seed"
    )


# ---------------------------------------------------------------------- routers that never learn

NEVER_LEARN: dict[str, tuple[dict[str, Any], str]] = {
    "renormalize_k1": (
        {"type": "top_k", "k": 1, "renormalize": True},
        "router: renormalize (true) with k (1) makes every weight a constant 1, so the router would "
        "never learn; set renormalize: false or k >= 2",
    ),
    "sigmoid_k1_by_default": (
        {"type": "sigmoid_top_k", "k": 1},
        "router: renormalize (true) with k (1) makes every weight a constant 1, so the router would "
        "never learn; set renormalize: false or k >= 2",
    ),
    "softmax_after_k1": (
        {"type": "top_k", "k": 1, "softmax": "after"},
        "router: softmax (after) with k (1) makes every weight a constant 1, so the router would "
        "never learn; set softmax: before or k >= 2",
    ),
    "noisy_k1": (
        {"type": "noisy_top_k", "k": 1},
        "router: k (1) makes every weight a constant 1, the softmax over a single expert, so the router "
        "would never learn; set k >= 2",
    ),
    "top_p_max_k1": (
        {"type": "top_p", "max_k": 1, "renormalize": True},
        "router: renormalize (true) with max_k (1) makes every weight a constant 1, so the router "
        "would never learn; set renormalize: false or max_k >= 2",
    ),
    "top_p_that_one_expert_always_reaches": (
        {"type": "top_p", "p": 0.125, "renormalize": True},
        "router.renormalize (true) with router.p (0.125) not above 1 / num_experts (1 / 8) gives "
        "every token a single expert with a constant weight 1, so the router would never learn; set "
        "router.renormalize: false or raise router.p",
    ),
}


@pytest.mark.parametrize(("router", "message"), NEVER_LEARN.values(), ids=NEVER_LEARN)
def test_a_router_that_would_never_learn(router: dict[str, Any], message: str) -> None:
    assert refusal(router) == message


def test_softmax_over_a_single_expert_that_chooses() -> None:
    assert refusal({"type": "expert_choice", "k": 1}, num_experts=1) == (
        "router.score (softmax) with a single expert makes every weight a constant 1, so the router "
        "would never learn; set router.score: sigmoid"
    )


MENDED = [
    {"type": "top_k", "k": 1},
    {"type": "sigmoid_top_k", "k": 1, "renormalize": False},
    {"type": "top_k", "softmax": "after"},
    {"type": "top_p", "max_k": 1},
    {"type": "top_p", "p": 0.126, "renormalize": True},
    {"type": "top_p", "p": 0.1},
]


@pytest.mark.parametrize("router", MENDED, ids=str)
def test_what_the_messages_advise_is_taken(router: dict[str, Any]) -> None:
    build_ffn({"type": "moe", "num_experts": 8, "router": router}, d_model=8)
    single = {"type": "expert_choice", "k": 1, "score": "sigmoid"}
    build_ffn({"type": "moe", "num_experts": 1, "router": single}, d_model=8)


# ----------------------------------------------------------------------------------------- groups

GROUPS: dict[str, tuple[dict[str, Any], str]] = {
    "do_not_divide": (
        {"num_groups": 3, "keep": 1},
        "router.groups.num_groups (3) must divide the number of experts (8); use a divisor of it, "
        "such as 2",
    ),
    "more_groups_than_experts": (
        {"num_groups": 16, "keep": 1},
        "router.groups.num_groups (16) must divide the number of experts (8); use a divisor of it, "
        "such as 8",
    ),
    "more_kept_than_there_are": (
        {"num_groups": 4, "keep": 5},
        "router.groups.keep (5) must not exceed router.groups.num_groups (4); lower "
        "router.groups.keep",
    ),
    "k_above_the_experts_kept": (
        {"num_groups": 4, "keep": 1},
        "router.k (3) must not exceed the experts a token may choose from (2: router.groups.keep 1, "
        "each group of 2); raise router.groups.keep or lower router.k",
    ),
    "score_above_a_group": (
        {"num_groups": 4, "keep": 2, "score_top": 3},
        "router.groups.score_top (3) must not exceed the experts of a group (2); lower "
        "router.groups.score_top or router.groups.num_groups",
    ),
    "score_of_k_over_keep_below_1": (
        {"num_groups": 4, "keep": 4, "score_top": None},
        "router.groups.score_top (null) scores a group by k / keep experts, but router.k (3) is below "
        "router.groups.keep (4); set router.groups.score_top: 1 or lower router.groups.keep",
    ),
    "score_0": (
        {"num_groups": 4, "keep": 2, "score_top": 0},
        "router.groups.score_top: must be at least 1, got 0",
    ),
    "no_groups": (
        {"num_groups": 0, "keep": 1},
        "router.groups.num_groups: must be at least 1, got 0",
    ),
    "none_kept": (
        {"num_groups": 4, "keep": 0},
        "router.groups.keep: must be at least 1, got 0",
    ),
    "keep_is_missing": (
        {"num_groups": 4},
        "router.groups.keep: missing; this option has no default",
    ),
    "misspelt": (
        {"num_group": 4, "keep": 2},
        "router.groups.num_group: unknown; did you mean 'num_groups'?",
    ),
}


@pytest.mark.parametrize("name", ["top_k", "sigmoid_top_k"])
@pytest.mark.parametrize(("groups", "message"), GROUPS.values(), ids=GROUPS)
def test_impossible_groups(name: str, groups: dict[str, Any], message: str) -> None:
    assert refusal({"type": name, "k": 3, "groups": groups}) == message


# ------------------------------------------------------------------------- ranges, names and types

OUT_OF_RANGE: dict[str, tuple[dict[str, Any], str]] = {
    "scale": ({"type": "top_k", "scale": 0}, "router.scale: must be greater than 0.0, got 0"),
    "softmax": (
        {"type": "top_k", "softmax": "none"},
        "router.softmax: must be one of 'before' or 'after', got 'none'",
    ),
    "max_k": (
        {"type": "top_p", "max_k": 9},
        "router.max_k (9) must not exceed num_experts (8); lower router.max_k or raise num_experts",
    ),
    "max_k_0": ({"type": "top_p", "max_k": 0}, "router.max_k: must be at least 1, got 0"),
    "p_0": ({"type": "top_p", "p": 0.0}, "router.p: must be greater than 0.0, got 0.0"),
    "p_above_1": ({"type": "top_p", "p": 1.5}, "router.p: must be at most 1.0, got 1.5"),
    "among": (
        {"type": "expert_choice", "among": "tokens"},
        "router.among: must be one of 'sequence' or 'batch', got 'tokens'",
    ),
    "score": (
        {"type": "expert_choice", "score": "relu"},
        "router.score: must be one of 'softmax' or 'sigmoid', got 'relu'",
    ),
    "tolerance": (
        {"type": "sinkhorn", "tolerance": 0.0},
        "router.tolerance: must be greater than 0.0, got 0.0",
    ),
    "max_iterations": (
        {"type": "sinkhorn", "max_iterations": 0},
        "router.max_iterations: must be at least 1, got 0",
    ),
    "seed": ({"type": "hash", "seed": -1}, "router.seed: must be at least 0, got -1"),
    "large_seed": (
        {"type": "hash", "seed": 2**31},
        "router.seed: must be less than 2147483648, got 2147483648",
    ),
    "skew": ({"type": "forced", "skew": 1.5}, "router.skew: must be at most 1.0, got 1.5"),
    "k_not_whole": (
        {"type": "sinkhorn", "k": 1.5},
        "router.k: must be a whole number, got 1.5",
    ),
    "bias_not_a_switch": (
        {"type": "balanced_assignment", "bias": 1},
        "router.bias: must be true or false, got 1",
    ),
}


@pytest.mark.parametrize(("router", "message"), OUT_OF_RANGE.values(), ids=OUT_OF_RANGE)
def test_values_out_of_range(router: dict[str, Any], message: str) -> None:
    assert refusal(router) == message
