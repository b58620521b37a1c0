"""`d_ff: {match: ..., of: ...}`: the solved block costs what the other one does, counted on what is built."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from moe_ffn import ConfigError, FFNConfig, TokenContext, build_ffn, solve_widths
from moe_ffn.config.sizes import CostKind
from moe_ffn.ffn import WidthMatch
from moe_ffn.runs.config import TrainConfig
from moe_ffn.studies.config import StudyConfig

DOCS = Path(__file__).parents[2] / "docs/howto/equal_budgets.md"
D_MODEL, SEQ_LEN = 32, 24
BUDGETS = get_args(CostKind)
DENSE = {"type": "dense", "d_ff": 400}
HERE = "HERE"
"""Stands where a width is to be solved."""

MOE = {"type": "moe", "num_experts": 4, "experts": {"type": "swiglu", "d_ff": HERE}}
BLOCKS: dict[str, dict[str, Any]] = yaml.safe_load("""
dense: {type: dense, d_ff: HERE}
dense-bias: {type: dense, d_ff: HERE, bias: true}
gated: {type: geglu, d_ff: HERE, multiple_of: 64}
conv: {type: conv, kernel_size: 3, d_ff: HERE}
moe: {type: moe, num_experts: 4, experts: {type: swiglu, d_ff: HERE}}
moe-k1-bias: {type: moe, num_experts: 3, router: {type: top_k, k: 1}, experts: {type: mlp,
  bias: true, d_ff: HERE}}
moe-noisy: {type: moe, num_experts: 4, experts: {type: swiglu, d_ff: HERE}, router: noisy_top_k}
moe-hash: {type: moe, num_experts: 4, experts: {type: swiglu, d_ff: HERE}, router: hash}
moe-shared: {type: moe, num_experts: 4, experts: {type: swiglu, d_ff: HERE},
  shared_expert: {type: swiglu, d_ff: 16}, combine: sigmoid_gate}
moe-shared-as-wide: {type: moe, num_experts: 4, experts: {type: swiglu, d_ff: HERE},
  shared_expert: {type: dense, d_ff: HERE}, combine: residual}
moe-shared-alone: {type: moe, num_experts: 4, experts: {type: mlp, d_ff: 8},
  shared_expert: {type: dense, d_ff: HERE}}
soft_moe: {type: soft_moe, num_experts: 2, slots_per_expert: 12, experts: {type: mlp, d_ff: HERE}}
mixture_of_depths: {type: mixture_of_depths, ffn: {type: swiglu, d_ff: HERE}}
""")
every_block = pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
every_budget = pytest.mark.parametrize("match", BUDGETS)


def asking(block: Any, match: str, of: Any = DENSE) -> Any:
    """`block` with a match in place of each HERE."""
    if block == HERE:
        return {"match": match, "of": of}
    if isinstance(block, dict):
        return {key: asking(value, match, of) for key, value in block.items()}
    return block


def solve(block: Any, d_model: int = D_MODEL) -> tuple[FFNConfig, WidthMatch]:
    ffn, match = solve_widths(block, d_model, SEQ_LEN)
    assert match is not None
    return ffn, match


def counted(ffn: FFNConfig, budget: str, d_model: int = D_MODEL) -> float:
    """The budget of the built block: its parameters, less those of idle experts, or what torch counts."""
    block = ffn.build(d_model).train()  # a noisy router makes its noise in training
    if budget == "flops_per_token":
        ids = torch.arange(2 * SEQ_LEN).reshape(2, SEQ_LEN)
        with FlopCounterMode(display=False) as counter:
            block(torch.randn(2, SEQ_LEN, d_model), TokenContext(token_ids=ids))
        return counter.get_total_flops() / (2 * SEQ_LEN)
    total = sum(parameter.numel() for parameter in block.parameters())
    if budget == "total_params" or not bool(ffn.router_infos()):
        return total
    if ffn.type == "mixture_of_depths":  # half of the tokens pass
        return total - sum(p.numel() for p in block.get_submodule("ffn").parameters()) / 2
    stack = ffn.expert_stack
    assert stack is not None
    experts = sum(parameter.numel() for parameter in block.get_submodule("experts").parameters())
    idle = stack.num_experts - round(stack.experts_per_token)
    return total - experts // stack.num_experts * idle


@every_budget
@every_block
def test_the_built_block_has_the_budget(block: dict[str, Any], match: str) -> None:
    ffn, result = solve(asking(block, match))
    wanted = counted(FFNConfig.model_validate(DENSE), match)
    got = counted(ffn, match)
    assert (result.wanted, result.got) == (wanted, got)
    assert abs(got / wanted - 1) <= 0.02
    assert result.mismatch == got / wanted - 1
    assert re.search("'d_ff': [0-9]", str(ffn.to_dict()))
    assert "match" not in str(ffn.to_dict())


WIDTHS = st.integers(1, 3000)
EXPERTS = st.sampled_from(["mlp", "swiglu", "clamped_swiglu"])


@st.composite
def blocks(draw: st.DrawFn) -> dict[str, Any]:
    """A block with one width to be solved, or two that are one."""
    bias = draw(st.booleans())
    plain = st.sampled_from(["dense", "swiglu", "conv"])
    dense = {"type": draw(plain), "d_ff": HERE, "bias": bias}
    kind = draw(st.sampled_from(["dense", "moe", "shared", "soft_moe", "depths"]))
    num_experts = draw(st.integers(2, 16))
    experts = {"type": draw(EXPERTS), "d_ff": HERE, "bias": bias}
    moe = {
        "type": "moe",
        "num_experts": num_experts,
        "router": {"type": "sigmoid_top_k", "k": draw(st.integers(2, num_experts))},
        "experts": experts,
    }
    return {
        "dense": dense,
        "moe": moe,
        "shared": {**moe, "shared_expert": dense},
        "soft_moe": {"type": "soft_moe", "num_experts": 2, "experts": experts},
        "depths": {"type": "mixture_of_depths", "ffn": draw(st.sampled_from([dense, moe]))},
    }[kind]


@settings(max_examples=60)
@given(blocks(), st.sampled_from(BUDGETS), WIDTHS, st.sampled_from([8, 48, 512]))
def test_no_other_width_comes_nearer(
    block: dict[str, Any], match: Any, d_ff: int, d_model: int
) -> None:
    def cost(width: int | None) -> int:
        of = {"type": "dense", "d_ff": d_ff}
        asked = of if width is None else with_width(block, width)
        config = FFNConfig.model_validate(asked)
        return {
            "total_params": config.num_params(d_model),
            "active_params": config.num_active_params(d_model),
            "flops_per_token": config.flops_per_token(d_model, SEQ_LEN),
        }[match]

    wanted = cost(None)
    asked = asking(block, match, {"type": "dense", "d_ff": d_ff})
    try:
        ffn, result = solve(asked, d_model)
    except ConfigError as error:
        width, is_rejected = int(str(error).split("the nearest, ")[1].split(",")[0]), True
    else:
        width, is_rejected = result.width, False
        assert ffn == FFNConfig.model_validate(with_width(block, width))
        assert (result.wanted, result.got) == (wanted, cost(width))
    assert is_rejected == (abs(cost(width) / wanted - 1) > 0.02)
    misses = {w: abs(cost(w) - wanted) for w in range(max(width - 9, 1), width + 10)}
    if width % 8 == 0 and misses[width] <= 0.005 * wanted:
        assert misses[width] == min(miss for w, miss in misses.items() if w % 8 == 0)
    else:
        assert misses[width] == min(misses.values())
        assert all(miss > 0.005 * wanted for w, miss in misses.items() if w % 8 == 0)


def with_width(block: Any, width: int) -> Any:
    if block == HERE:
        return width
    if isinstance(block, dict):
        return {key: with_width(value, width) for key, value in block.items()}
    return block


def test_a_match_reports_the_wanted_and_the_reached_count() -> None:
    # The dense block has 2 matrices of 32 x 133 at 2 FLOPs a weight; the MoE for each token 2 experts of 3
    # matrices of 32 x 44, which are 16,896, and the router, 2 * 32 * 4.
    _, match = solve(asking(MOE, "flops_per_token", {"type": "dense", "d_ff": 133}))
    assert match == WidthMatch(("experts.d_ff",), "flops_per_token", 44, 17024, 17152)
    assert str(match) == (
        "experts.d_ff: 44 gives 17,152 FLOPs per token where 17,024 are wanted (+0.75%)"
    )


def test_widths_that_match_the_same_share_one_number() -> None:
    ffn, match = solve(asking(BLOCKS["moe-shared-as-wide"], "active_params"))
    options = ffn.to_dict()
    assert options["experts"]["d_ff"] == options["shared_expert"]["d_ff"] == match.width
    assert match.options == ("experts.d_ff", "shared_expert.d_ff")


def test_the_other_block_may_be_matched_itself() -> None:
    chain = asking(MOE, "active_params", asking(BLOCKS["gated"], "total_params"))
    assert solve(chain)[1].wanted == solve(asking(BLOCKS["gated"], "total_params"))[1].got


def test_a_block_without_a_match_is_left_as_it_is() -> None:
    ffn, match = solve_widths("moe", D_MODEL, SEQ_LEN)
    assert (ffn, match) == (FFNConfig.model_validate("moe"), None)


def test_an_unsolved_width_raises_with_how_to_solve_it() -> None:
    said = (
        "d_ff: matches the total_params of 'dense', but is not solved yet; "
        "`ffn, match = moe_ffn.solve_widths(ffn, d_model, seq_len)` replaces it by a number"
    )
    for block in (BLOCKS["gated"], BLOCKS["moe"]):
        config = FFNConfig.model_validate(asking(block, "total_params"))
        for use in (lambda c=config: c.num_params(8), lambda c=config: build_ffn(c, 8)):
            with pytest.raises(ConfigError) as raised:
                use()
            assert str(raised.value) == said


REJECTED: dict[str, tuple[Any, str]] = {
    "no block to match": (
        asking(MOE, "active_params", "identity"),
        "model.ffn.experts.d_ff.of: 'identity' has no active parameters to match; give another block",
    ),
    "the router costs more by itself": (
        asking({**MOE, "num_experts": 64}, "flops_per_token", {"type": "dense", "d_ff": 8}),
        # 2 * 32 * 64 of the router, and 2 experts of 3 * 2 * 32
        "model.ffn.experts.d_ff: no width gives about 1,024 FLOPs per token: the nearest, 1, gives 4,480 "
        "(+337.5%, at most 2% is accepted); match a larger block in model.ffn.experts.d_ff.of, or give this "
        "one fewer experts or a smaller shared expert",
    ),
    "one unit of width is too coarse": (
        asking({**MOE, "num_experts": 64}, "total_params", {"type": "dense", "d_ff": 144}),
        # 64 of the router's columns of 32, and 64 * 3 * 32 a unit of width
        "model.ffn.experts.d_ff: no width gives about 9,216 parameters: the nearest, 1, gives 8,192 "
        "(-11.1%, at most 2% is accepted); match a larger block in model.ffn.experts.d_ff.of, or give this "
        "one fewer experts or a smaller shared expert",
    ),
    "two budgets": (
        {**asking(MOE, "total_params"), "shared_expert": asking(BLOCKS["dense"], "active_params")},
        "model.ffn.shared_expert.d_ff and model.ffn.experts.d_ff have different budgets, but a block has "
        "only one; give both the same `match` and `of`, or set one of them to a number",
    ),
    "a typing error": (
        asking(BLOCKS["dense"], "params"),
        "d_ff.match: must be one of 'total_params', 'active_params' or 'flops_per_token', got 'params'",
    ),
}


@pytest.mark.parametrize(("block", "said"), REJECTED.values(), ids=REJECTED)
def test_a_budget_that_cannot_be_met_is_one_sentence(block: Any, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        solve_widths(block, D_MODEL, SEQ_LEN, "model.ffn")
    assert str(raised.value) == said


def test_the_examples_of_the_docs_are_true(capsys: pytest.CaptureFixture[str]) -> None:
    section = DOCS.read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    study, options = re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)
    exec(code, {})
    assert f"print(match)\n# {capsys.readouterr().out}" in code
    planned = StudyConfig.model_validate({"name": "fair", **yaml.safe_load(study)}).planned_runs()
    assert len(planned) == 2 * 5 + 2 * 3
    (match,) = TrainConfig.model_validate(yaml.safe_load(options)).matches
    assert match.options == ("model.ffn.experts.d_ff",)
