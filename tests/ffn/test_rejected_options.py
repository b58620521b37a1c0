"""Impossible options are rejected when their block is built, with the key, the values and the fix."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml

from moe_ffn import ConfigError, build_ffn
from moe_ffn.config.errors import show
from moe_ffn.routing import RouterConfig
from tests.helpers.cases import answers

OUT_OF_RANGE: list[tuple[str, str | None, Any, str]] = [
    ("num_experts", "moe", 0, "at least 1"),
    ("d_ff", "dense", 0, "at least 1"),
    ("d_ff", "swiglu", -8, "at least 1"),
    ("d_ff", "conv", 8.0, "a whole number"),
    ("experts.d_ff", "mlp", 0, "at least 1"),
    ("kernel_size", "conv", 0, "at least 1"),
    ("multiple_of", "swiglu", 0, "at least 1"),
    ("capacity.factor", None, 0.0, "greater than 0.0"),
    ("capacity.eval_factor", None, -1.0, "greater than 0.0"),
    ("capacity.factor", None, math.nan, "a finite number"),
    ("capacity.eval_factor", None, math.inf, "a finite number"),
    ("capacity.factor", None, 1e308, "at most 1000000000.0"),
    ("capacity.eval_factor", None, 4600000000000000.0, "at most 1000000000.0"),
    ("dropout", "dense", 1.0, "less than 1.0"),
    ("dropout", "dense", -0.1, "at least 0.0"),
    (
        "activation",
        "dense",
        "gelo",
        "one of 'relu', 'gelu', 'gelu_tanh', 'silu', 'relu_squared', 'sigmoid' or 'identity'",
    ),
    ("experts.backend", "mlp", "bmm", "one of 'auto', 'loop', 'cpu', 'grouped_mm' or 'triton'"),
    ("router.scale", "top_k", 0, "greater than 0.0"),
    ("router.softmax", "top_k", "none", "one of 'before' or 'after'"),
    ("router.max_k", "top_p", 0, "at least 1"),
    ("router.p", "top_p", 0.0, "greater than 0.0"),
    ("router.p", "top_p", 1.5, "at most 1.0"),
    ("router.among", "expert_choice", "tokens", "one of 'sequence' or 'batch'"),
    ("router.score", "expert_choice", "relu", "one of 'softmax' or 'sigmoid'"),
    ("router.tolerance", "sinkhorn", 0.0, "greater than 0.0"),
    ("router.max_iterations", "sinkhorn", 0, "at least 1"),
    ("router.seed", "hash", -1, "at least 0"),
    ("router.seed", "hash", 2**31, "less than 2147483648"),
    ("router.skew", "forced", 1.5, "at most 1.0"),
    ("router.k", "sinkhorn", 1.5, "a whole number"),
    ("router.bias", "balanced_assignment", 1, "true or false"),
    ("router.ema", "expert_threshold", 1.0, "less than 1.0"),
    ("router.warmup_steps", "expert_threshold", 0, "at least 1"),
    ("rounds", "chain_of_experts", 0, "at least 1"),
    ("max_order", "ngram_memory", 1, "at least 2"),
    ("num_heads", "ngram_memory", 0, "at least 1"),
    ("num_rows", "ngram_memory", 0, "at least 1"),
    ("rate_scale", "ngram_memory", 0.0, "greater than 0.0"),
]
"""Option, type of the part that has it, value, and the rule."""

WITH_K = [name for name, cls in RouterConfig.members.items() if "k" in cls.model_fields]
MEANS = ("expert_choice", "expert_threshold", "relu")
"""Routers whose k is a mean, which may be below 1."""
for _name, _cls in RouterConfig.members.items():
    if _name in WITH_K:
        _rule = "greater than 0.0" if _name in MEANS else "at least 1"
        OUT_OF_RANGE.append(("router.k", _name, 0, _rule))
    if "jitter" in _cls.model_fields:  # which could turn a token round
        OUT_OF_RANGE.append(("router.jitter", _name, 1.0, "less than 1.0"))
        OUT_OF_RANGE.append(("router.jitter", _name, -0.1, "at least 0.0"))


@pytest.mark.parametrize(("option", "kind", "value", "rule"), OUT_OF_RANGE, ids=str)
def test_a_value_out_of_range(option: str, kind: str | None, value: Any, rule: str) -> None:
    *parts, name = option.split(".")
    config: dict[str, Any] = {name: value} if kind is None else {"type": kind, name: value}
    for part in reversed(parts):
        config = {part: config}
    assert unsupported({"type": "moe", **config}) == f"{option}: must be {rule}, got {show(value)}"


def unsupported(config: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build_ffn(config, d_model=8)
    return str(caught.value)


@pytest.mark.parametrize("name", [name for name in WITH_K if name != "product_key"])
def test_more_experts_per_token_than_experts(name: str) -> None:
    message = "router.k (9) must not exceed num_experts (8); lower router.k or raise num_experts"
    assert unsupported({"type": "moe", "router": {"type": name, "k": 9}}) == message


REJECTED = r"""
swigl
    type: unknown 'swigl'; did you mean 'swiglu'?; known: biased, bilinear, ...
xyz
    type: unknown 'xyz'; known: biased, bilinear, ...
{d_ff: 8}
    type: missing; one of: biased, bilinear, ...
{type: 3}
    type: must be a name, got 3; known: biased, bilinear, ...
{type: [moe]}
    type: must be a name, got ['moe']; known: biased, bilinear, ...
{type: moe, num_expert: 4}
    num_expert: unknown; did you mean 'num_experts'?
{type: identity, size: 4}
    size: unknown; known: type
{type: moe, experts: {type: swiglu, dff: 3}}
    experts.dff: unknown; did you mean 'd_ff'?
{type: moe, experts: mlpp}
    experts.type: unknown 'mlpp'; did you mean 'mlp'?; known: bilinear, clamped_swiglu, ...
3
    must be a mapping of options, got 3
null
    must be a mapping of options, got None
{type: moe, capacity: 1.25}
    capacity: must be a mapping of options, got 1.25
{type: moe, num_experts: 1}
    router.k (2) must not exceed num_experts (1); lower router.k or raise num_experts
{type: moe, router: {type: top_k, k: 1, renormalize: true}}
    router: renormalize (true) with k (1) makes every weight a constant 1, so the router would never
    learn; set renormalize: false or k >= 2
{type: moe, shared_expert: moe}
    shared_expert.type ('moe') must not be a sparse block: every token passes through a shared expert;
    use 'swiglu' or 'dense'
{type: moe, router: {type: top_k, k: 1, softmax: after}}
    router: softmax (after) with k (1) makes every weight a constant 1, so the router would never learn;
    set softmax: before or k >= 2
{type: moe, router: {type: noisy_top_k, k: 1}}
    router: k (1) makes every weight a constant 1, so the router would never learn; set k >= 2
{type: moe, router: {type: top_p, max_k: 1, renormalize: true}}
    router: renormalize (true) with max_k (1) makes every weight a constant 1, so the router would never
    learn; set renormalize: false or max_k >= 2
{type: moe, router: {type: top_p, p: 0.125, renormalize: true}}
    router.renormalize (true) with router.p (0.125) not above 1 / num_experts (1 / 8) gives every token
    a single expert with a constant weight 1, so the router would never learn; set router.renormalize:
    false or raise router.p
{type: moe, num_experts: 1, router: {type: expert_choice, k: 1}}
    router.score (softmax) with a single expert makes every weight a constant 1, so the router would
    never learn; set router.score: sigmoid
{type: moe, router: {type: top_k, k: 3, groups: {num_groups: 3, keep: 1}}}
    router.groups.num_groups (3) must divide the number of experts (8); use a divisor of it, such as 2
{type: moe, router: {type: top_k, k: 3, groups: {num_groups: 16, keep: 1}}}
    router.groups.num_groups (16) must divide the number of experts (8); use a divisor of it, such as 8
{type: moe, router: {type: top_k, k: 3, groups: {num_groups: 4, keep: 5}}}
    router.groups.keep (5) must not exceed router.groups.num_groups (4); lower router.groups.keep
{type: moe, router: {type: top_k, k: 3, groups: {num_groups: 4, keep: 1}}}
    router.k (3) must not exceed the experts a token may choose from (2: router.groups.keep 1, each
    group of 2); raise router.groups.keep or lower router.k
{type: moe, router: {type: top_k, k: 3, groups: {num_groups: 4, keep: 2, score_top: 3}}}
    router.groups.score_top (3) must not exceed the experts of a group (2); lower
    router.groups.score_top or router.groups.num_groups
{type: moe, router: {type: top_k, k: 3, groups: {num_groups: 4, keep: 4, score_top: null}}}
    router.groups.score_top (null) scores a group by k / keep experts, but router.k (3) is below
    router.groups.keep (4); set router.groups.score_top: 1 or lower router.groups.keep
{type: moe, router: {type: top_k, k: 3, groups: {num_groups: 4, keep: 2, score_top: 0}}}
    router.groups.score_top: must be at least 1, got 0
{type: moe, router: {type: top_k, k: 3, groups: {num_groups: 0, keep: 1}}}
    router.groups.num_groups: must be at least 1, got 0
{type: moe, router: {type: top_k, k: 3, groups: {num_groups: 4, keep: 0}}}
    router.groups.keep: must be at least 1, got 0
{type: moe, router: {type: top_k, k: 3, groups: {num_groups: 4}}}
    router.groups.keep: missing; this option has no default
{type: moe, router: {type: top_k, k: 3, groups: {num_group: 4, keep: 2}}}
    router.groups.num_group: unknown; did you mean 'num_groups'?
{type: moe, router: {type: top_p, max_k: 9}}
    router.max_k (9) must not exceed num_experts (8); lower router.max_k or raise num_experts
{type: moe, router: {type: hash, jitter: 0.1}}
    router.jitter: unknown; known: type, k, seed
{type: moe, router: {type: top_k, renormalize_p: 2.0}}
    router: renormalize_p (2) has no effect, because renormalize is false; set renormalize: true, or
    leave renormalize_p out
{type: moe, router: {type: sigmoid_top_k, renormalize: false, renormalize_eps: 1.0e-06}}
    router: renormalize_eps (1e-06) has no effect, because renormalize is false; set renormalize: true,
    or leave renormalize_eps out
{type: moe, router: {type: sigmoid_top_k, token_table: {vocab_size: 9}}}
    router: correction_bias changes which experts the scores choose, but token_table chooses them by the
    token's id; set correction_bias: false, or remove token_table
{type: moe, router: {type: top_k, token_table: {vocab_size: 9}, groups: {num_groups: 2, keep: 1}}}
    router: groups changes which experts the scores choose, but token_table chooses them by the token's
    id; set groups: null, or remove token_table
{type: moe, num_experts: 6, router: {type: top_k, k: 2, num_always: 5}}
    router.k (2) must not exceed the experts to choose from (1: num_experts 6 minus router.num_always 5);
    lower one of them or raise num_experts
{type: moe, router: {type: elastic_top_k, k_max: 9}}
    router.k_max (9) must not exceed num_experts (8); lower router.k_max or raise num_experts
{type: moe, router: {type: elastic_top_k, k_max: 8, num_always: 1}}
    router.k_max (8) must not exceed the experts to choose from (7: num_experts 8 minus
    router.num_always 1); lower one of them or raise num_experts
{type: moe, router: {type: elastic_top_k, k_min: 0}}
    router.k_min: must be at least 1, got 0
{type: moe, router: {type: elastic_top_k, k_min: 4}}
    router: k_min (4) must not exceed k_max (3); lower k_min or raise k_max
{type: moe, router: {type: elastic_top_k, k_max: 1, renormalize: true}}
    router: renormalize (true) with k_max (1) makes every weight a constant 1, so the router would never
    learn; set renormalize: false or k_max >= 2
{type: moe, router: {type: elastic_top_k, groups: {num_groups: 2, keep: 1}}}
    router: groups chooses among the experts for one k, but elastic_top_k draws k; set groups: null, or
    type: top_k
{type: moe, router: {type: neuron_top_k, mlp: {width: 4}}}
    router: mlp is for routers whose logits are a projection of the token, but the logits of
    'neuron_top_k' are hidden units of the experts; leave mlp out
{type: chain_of_experts, ffn: swiglu}
    ffn.type: must be one of 'moe', got 'swiglu'
{type: chain_of_experts, ffn: {num_experts: 2, router: {type: top_k, k: 3}}}
    ffn: router.k (3) must not exceed num_experts (2); lower router.k or raise num_experts
{type: chain_of_experts, num_experts: 4}
    num_experts: unknown; known: type, ffn, rounds
{type: chain_of_experts, ffn: {type: ngram_memory}}
    ffn.type: must be one of 'moe', got 'ngram_memory'
{type: mixture_of_depths, router: top_k}
    router.type ('top_k') sends every token through the block (2 per token); to skip some, use
    'expert_choice' with score: sigmoid, 'relu' or 'expert_threshold', with k below 1
{type: mixture_of_depths, ffn: mixture_of_depths}
    ffn.type ('mixture_of_depths') must not be another mixture of depths; multiply their router.k
    instead
{type: moe, combine: sigmoid_gate}
    combine.type ('sigmoid_gate') adds a shared expert, but shared_expert is null; set shared_expert:
    swiglu, or leave combine out
{type: moe, router: {type: top_k, k: 11}, zero_computation: {num_copy: 2}}
    router.k (11) must not exceed num_experts (10); lower router.k or raise num_experts; the router
    counts num_experts (8) and zero_computation (2) together
{type: moe, shared_expert: mixture_of_depths}
    shared_expert.type ('mixture_of_depths') must not be a sparse block: every token passes through a
    shared expert; use 'swiglu' or 'dense'
{type: moe, combine: gate}
    combine.type: unknown 'gate'; known: average, residual, sigmoid_gate, sum
{type: moe, shared_expert: {type: ngram_memory, ffn: moe}}
    shared_expert.type ('ngram_memory') must not be a sparse block: every token passes through a shared
    expert; use 'swiglu' or 'dense'
{type: jittered, jitter: 0.1, ffn: {type: moe, router: {type: top_k, jitter: 0.2}}}
    jitter (0.1) also reaches the router, which has ffn.router.jitter (0.2); set one of them to 0
{type: moe, experts: {type: normed, each: {}, experts: {type: latent, width: 4, experts: input_weighted}}}
    experts: each normalises outputs before they are weighted, but experts.type ('input_weighted')
    weights inputs; write {type: input_weighted, experts: {type: normed, ...}}
{type: moe, experts: {type: input_weighted, experts: {type: latent, width: 4, experts: value}}}
    experts: type 'input_weighted' weights the input of experts, but experts of type 'value' ignore their
    input; use 'value' without it
{type: moe, capacity: {factor: 1.25, per_sequence: 4}}
    capacity: factor (1.25) and per_sequence (4) both limit an expert; set one of them to null
{type: ngram_memory, max_ordr: 3}
    max_ordr: unknown; did you mean 'max_order'?
{type: moe, num_experts: 1000, router: {type: product_key}}
    router.type 'product_key' needs a square number of experts, got 1000; use 961 or 1024
{type: moe, num_experts: 16, router: {type: product_key, k: 5}}
    router.k (5) must not exceed the 4 sub-keys of a table, the square root of 16 experts; lower
    router.k or use at least 25 experts
{type: moe, num_experts: 9, router: {type: product_key, d_query: 7}}
    router: d_query (7) must be even, since each table of sub-keys reads half of a query; use 6 or 8
{type: moe, num_experts: 9, router: {type: product_key, k: 1}}
    router: score (softmax) with k (1) makes every weight a constant 1, so the router would never learn;
    set score: sigmoid or k >= 2
{type: moe, num_experts: 9, router: {type: product_key, d_query: 0, num_heads: 2}}
    router: keys (shared) with d_query (0) make the 2 heads choose the same experts; set keys: per_head
    or num_heads: 1
{type: moe, num_experts: 9, router: {type: product_key, d_query: 0, query_norm: {}}}
    router: query_norm normalises queries, but with d_query (0) there are none; set query_norm to null or
    d_query above 0
{type: moe, num_experts: 14, router: product_key, zero_computation: {num_copy: 1}}
    router.type 'product_key' needs a square number of experts, got 15; use 9 or 16; the router counts
    num_experts (14) and zero_computation (1) together
"""
"""Options as a user types them, with the answer below; `...` stands for the rest of an answer."""


@pytest.mark.parametrize(("options", "answer"), answers(REJECTED))
def test_impossible_options(options: str, answer: str) -> None:
    got = unsupported(yaml.safe_load(options))
    if answer.endswith("..."):
        assert got.startswith(answer.removesuffix("..."))
        assert "\n" not in got
    else:
        assert got == answer


MENDED = [
    {"type": "top_k", "k": 1},
    {"type": "sigmoid_top_k", "k": 1, "renormalize": False},
    {"type": "top_k", "softmax": "after"},
    {"type": "top_p", "max_k": 1},
    {"type": "top_p", "p": 0.126, "renormalize": True},
    {"type": "top_p", "p": 0.1},
]


@pytest.mark.parametrize("router", MENDED, ids=str)
def test_the_advice_of_messages_works(router: dict[str, Any]) -> None:
    build_ffn({"type": "moe", "num_experts": 8, "router": router}, d_model=8)
    single = {"type": "expert_choice", "k": 1, "score": "sigmoid"}
    build_ffn({"type": "moe", "num_experts": 1, "router": single}, d_model=8)


def test_all_mistakes_are_reported_together() -> None:
    config = {"type": "moe", "num_experts": 0, "experts": {"type": "mlp", "dff": 3}}
    assert unsupported({**config, "kk": 1}).startswith("kk: unknown; known: type, num_experts")
    assert unsupported(config).splitlines() == [
        "num_experts: must be at least 1, got 0",
        "experts.dff: unknown; did you mean 'd_ff'?",
    ]
