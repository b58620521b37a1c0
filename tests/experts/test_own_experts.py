"""The custom experts of the README: they compute every pair of their plan and count their parameters.

T tokens, D model width
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from moe_ffn import ConfigError, FFNBlock, FFNConfig, TokenContext
from moe_ffn.config.yaml_files import validate
from moe_ffn.outputs import Plan
from moe_ffn.runs.budget import Budget
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.planner import Sizes
from moe_ffn.runs.validate import check_layout
from tests.helpers.cases import python_with

D_MODEL, D_FF, RANK = 8, 12, 3
SHARED, OWN = 2 * D_MODEL * D_FF, RANK * (D_MODEL + D_FF)
"""Parameters: of `up` and `down`, and of an expert."""

Options = dict[str, Any]


@pytest.fixture
def experts(tmp_path: Path) -> Options:
    path = tmp_path / "my_experts.py"
    path.write_text(python_with("ExpertsConfig"), encoding="utf-8")
    return {"type": f"{path}:AdaptedConfig", "d_ff": D_FF, "rank": RANK}


def moe(experts: Options, **more: Any) -> Options:
    return {"type": "moe", "num_experts": 6, "experts": experts, **more}


def with_zero_computation(experts: Options) -> Options:
    kinds = {"num_zero": 1, "num_copy": 1}
    return moe(experts, zero_computation=kinds, router={"type": "top_k", "k": 4})


BLOCKS: dict[str, tuple[Callable[[Options], Options], float]] = {
    "moe": (moe, 2),
    "moe-k1": (lambda experts: moe(experts, router={"type": "top_k", "k": 1}), 1),
    "moe-zero_computation": (with_zero_computation, 3),
    "soft_moe": (lambda experts: {**moe(experts), "type": "soft_moe", "slots_per_expert": 2}, 6),
    "mixture_of_depths": (lambda experts: {"type": "mixture_of_depths", "ffn": moe(experts)}, 2),
}
"""A block around the experts, and how many of its six a token passes through."""
every_block = pytest.mark.parametrize(("make", "active"), BLOCKS.values(), ids=BLOCKS)


def build(config: FFNConfig | Options) -> FFNBlock:
    """Build a layer whose experts, which begin as equals, differ."""
    torch.manual_seed(0)
    block = FFNConfig.model_validate(config).build(D_MODEL)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if name.endswith("experts.out"):
                parameter.normal_()
    return block.double()


def tokens(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, D_MODEL, generator=generator, dtype=torch.float64)


@every_block
def test_shared_parameters_are_counted_once(
    experts: Options, make: Callable[[Options], Options], active: float
) -> None:
    config = FFNConfig.model_validate(make(experts))
    built = sum(parameter.numel() for parameter in config.build(D_MODEL).parameters())
    assert config.num_params(D_MODEL) == built
    beside = built - SHARED - 6 * OWN
    if config.type == "mixture_of_depths":  # half of the tokens pass, by a router of its own
        gate, inner = D_MODEL, beside - D_MODEL
        assert config.num_active_params(D_MODEL) == gate + (inner + SHARED + 2 * OWN) // 2
    else:
        assert config.num_active_params(D_MODEL) == beside + SHARED + active * OWN


@every_block
def test_products_done_once_for_a_token_are_counted_once(
    experts: Options, make: Callable[[Options], Options], active: float
) -> None:
    config = FFNConfig.model_validate(make(experts))
    ids = torch.arange(24).view(1, 24)
    with FlopCounterMode(display=False) as counter:
        output = build(config)(tokens(1, 24), TokenContext(token_ids=ids))
    told = 24 * config.flops_per_token(D_MODEL, seq_len=24)
    if config.type == "moe" and output.routing is not None:
        # Of the experts without a network any number may have been chosen.
        pairs = (output.routing.expert_ids_N < 6).sum().item()
        told += (pairs - 24 * active) * (2 * OWN + 2 * D_MODEL * D_FF)
    assert counter.get_total_flops() == told


def by_hand(block: Any, x_TD: Tensor, plan: Plan) -> Tensor:
    """A loop over the pairs."""
    experts, y_TD, start = block.experts, torch.zeros_like(x_TD), 0
    for expert, end in enumerate(plan.offsets_E.tolist()):
        for pair in range(start, end):
            token = plan.token_indices_N[pair]
            own = experts.out[expert] @ (experts.into[expert] @ x_TD[token])
            result = experts.down(F.gelu(experts.up(x_TD[token]) + own))
            y_TD = y_TD.index_add(0, token[None], plan.weights_N[pair] * result[None])
        start = end
    return y_TD


@pytest.mark.parametrize("capacity", [None, 0.5])
def test_custom_experts_compute_every_pair_of_their_plan(
    experts: Options, capacity: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    block: Any = build(moe(experts, capacity={"factor": capacity}))
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[1, 6:] = False
    grads: list[dict[str, Tensor]] = []
    outputs: list[Tensor] = []
    for forward in (block.experts.forward, lambda x_TD, plan: by_hand(block, x_TD, plan)):
        monkeypatch.setattr(block.experts, "forward", forward)
        block.zero_grad()
        output = block(tokens(2, 10), TokenContext(mask=mask))
        output.hidden.square().sum().backward()
        outputs.append(output.hidden)
        grads.append({name: p.grad.clone() for name, p in block.named_parameters()})
        assert bool(output.routing.dropped_N.any()) == (capacity is not None)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-12)
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=1e-11)


def test_every_count_of_a_model_holds_them(experts: Options) -> None:
    model = {
        "d_model": D_MODEL,
        "num_layers": 2,
        "attention": {"num_heads": 2},
        "ffn": moe(experts),
    }
    config = validate(TrainConfig, {"model": model, "data": {"seq_len": 16}})
    sizes, budget = Sizes.of(config), Budget.of(config)
    built = sum(weight.numel for weight in sizes.all)
    of_ffns = 2 * (SHARED + 6 * OWN + 6 * D_MODEL)
    assert (budget.model.params, budget.ffn.params) == (built, of_ffns)
    assert budget.model.active_params == built - 2 * 4 * OWN
    assert budget.ffn.active_params == of_ffns - 2 * 4 * OWN


@pytest.mark.parametrize("divides", [False, True])
def test_ranks_do_not_divide_what_experts_share(
    experts: Options, tmp_path: Path, divides: bool
) -> None:
    path = tmp_path / "divided.py"
    said = "    divides_over_ranks = True\n    d_ff: int" if divides else "    d_ff: int"
    path.write_text(python_with("ExpertsConfig").replace("    d_ff: int", said), encoding="utf-8")
    own = {**experts, "type": f"{path}:AdaptedConfig"}
    model = {"d_model": D_MODEL, "num_layers": 1, "attention": {"num_heads": 2}, "ffn": moe(own)}
    config = validate(TrainConfig, {"model": model, "parallel": {"expert": 2}})
    with pytest.raises(ConfigError) as raised:
        check_layout(config, 2, "32-true")
    assert str(raised.value) == (
        "parallel.expert (2) divides weights whose first axis counts the 6 experts, but these share "
        "'up.weight' of shape (12, 8); set parallel.expert to 1"
        if divides
        else f"model.ffn.experts.type '{path}:AdaptedConfig' does not support expert parallelism "
        "(divides_over_ranks is False in its config); set parallel.expert to 1"
    )
