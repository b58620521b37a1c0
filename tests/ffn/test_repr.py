"""Text of a block and of its output: sizes and options in a few lines, and no tensor's values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from moe_ffn import DecoderConfig, FFNConfig, TokenContext, build_ffn
from moe_ffn.ffn.dispatch import make_plan

D_MODEL = 16
LONGEST_LINE = 200
WITH_CAPACITY: dict[str, Any] = {
    "type": "moe",
    "num_experts": 4,
    "router": {"type": "forced", "k": 2, "skew": 1.0},
    "capacity": {"factor": 1.0},
    "experts": {"type": "swiglu", "backend": "grouped_mm"},
}
"""12 tokens choose experts 0 and 1, each of which takes ceil(24 / 4) = 6: half of the pairs are dropped."""


def output_of(config: Any, mask: Tensor | None = None) -> Any:
    torch.manual_seed(0)
    block = build_ffn(config, D_MODEL)
    ids = torch.arange(12).view(2, 6)
    return block(torch.randn(2, 6, D_MODEL), TokenContext(mask=mask, token_ids=ids))


# --------------------------------------------------------------------------------- values


@pytest.mark.parametrize("config", FFNConfig.members)
def test_an_output_is_one_to_three_short_lines(config: str) -> None:
    lines = repr(output_of(config)).splitlines()
    assert 1 <= len(lines) <= 3
    assert lines[0].startswith("FFNOutput(hidden=float32[2, 6, 16] on cpu")
    assert all(len(line) < LONGEST_LINE for line in lines)
    assert "tensor(" not in "".join(lines)


def test_output_repr_shows_the_dropped_share() -> None:
    assert repr(output_of(WITH_CAPACITY)).splitlines() == [
        "FFNOutput(hidden=float32[2, 6, 16] on cpu,",
        "    routing=Routing(num_tokens=12, sequence_length=6, num_experts=4, num_pairs=24, "
        "dropped=50.0%, float32 on cpu))",
    ]


def test_output_repr_shows_the_number_of_real_pairs() -> None:
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, 1:] = False  # 7 real tokens, 14 pairs, C = ceil(14 / 4) = 4: 8 of 14 are computed
    assert "num_pairs=24, num_real_tokens=7, num_real_pairs=14, dropped=42.9%, " in repr(
        output_of(WITH_CAPACITY, mask)
    )
    assert "num_pairs=24, dropped=0.0%, " in repr(output_of({**WITH_CAPACITY, "capacity": {}}))


def test_output_repr_gives_an_inner_block_its_own_line() -> None:
    text = repr(output_of({"type": "mixture_of_depths", "ffn": "moe"}))
    first, routing, inner = text.splitlines()
    assert first == "FFNOutput(hidden=float32[2, 6, 16] on cpu,"
    assert routing.startswith(
        "    routing=VariableKRouting(num_tokens=12, sequence_length=6, num_experts=1, "
    )
    assert inner.startswith("    inner=Routing(num_tokens=6, sequence_length=3, num_experts=8, ")


def test_a_context_and_a_plan_name_their_tensors() -> None:
    context = TokenContext(mask=torch.ones(2, 6, dtype=torch.bool), sequence_length=6)
    assert repr(context) == "TokenContext(mask=bool[2, 6] on cpu, sequence_length=6)"
    assert repr(TokenContext()) == "TokenContext()"
    assert repr(make_plan(output_of(WITH_CAPACITY).routing)) == (
        "Plan(token_indices_N=int64[24] on cpu, weights_N=float32[24] on cpu, offsets_E=int32[4] on cpu, "
        "pair_ids_N=int64[24] on cpu)"
    )


def test_the_output_of_a_model_names_its_routings() -> None:
    config = {"d_model": 16, "num_layers": 6, "ffn": "moe", "ffn_at": {"1": "dense"}}
    ids = torch.zeros(2, 6, dtype=torch.int64)
    output = DecoderConfig.model_validate(config).build(11, 6)(ids)
    assert repr(output) == (
        "DecoderOutput(logits=float32[2, 6, 11] on cpu, 5 routings: layer_00, layer_02, ..., layer_05)"
    )
    dense = DecoderConfig.model_validate({**config, "ffn": "dense"}).build(11, 6)(ids)
    assert repr(dense) == "DecoderOutput(logits=float32[2, 6, 11] on cpu, no routings)"


# What has no values is printed without what is counted.
SIZES = "Routing(num_tokens=12, sequence_length=6, num_experts=4, num_pairs=24"


def test_an_output_on_the_meta_device_has_only_sizes() -> None:
    output = pytree.tree_map_only(Tensor, lambda t: t.to("meta"), output_of(WITH_CAPACITY))
    assert f"{SIZES}, float32 on meta)" in repr(output)


@pytest.mark.parametrize("shapes", [None, ShapeEnv()], ids=["fake", "symbolic"])
def test_an_output_of_fake_tensors_has_only_sizes(shapes: ShapeEnv | None) -> None:
    with FakeTensorMode(shape_env=shapes), torch.autocast("cpu", torch.bfloat16):
        assert f"{SIZES}, float32 on cpu)" in repr(output_of(WITH_CAPACITY))


@pytest.mark.filterwarnings("ignore")  # what torch's own tracing warns of
def test_printing_does_not_disturb_torch_compile() -> None:
    block = build_ffn("moe", D_MODEL)
    x = torch.randn(2, 6, D_MODEL)

    def run(x: Tensor) -> tuple[Tensor, str]:
        output = block(x)
        return output.hidden, repr(output)

    hidden, text = torch.compile(run, backend="eager")(x)
    torch.testing.assert_close(hidden, block(x).hidden)
    assert text == repr(block(x))


# --------------------------------------------------------------------------------- modules

PRINTED: dict[str, tuple[Any, list[str]]] = {
    "identity": ("identity", ["IdentityFFN(d_model=16)"]),
    "dense": ("dense", ["d_model=16, d_ff=64, type=dense, activation=gelu"]),
    "gated": ({"type": "reglu", "d_ff": 24}, ["d_model=16, d_ff=24, type=reglu"]),
    "conv": (
        {"type": "conv", "causal": False},
        ["d_model=16, d_ff=64, type=conv, kernel_size=3, activation=gelu"],
    ),
    "moe": (
        "moe",
        [
            "num_experts=8, d_model=16, dropless",
            "(router): TopKRouter(",
            "k=2, scale=1.0, softmax=before",
            "(projection): RouterLinear(d_model=16, num_experts=8, bias=False)",
            "(experts): GatedExperts(num_experts=8, d_model=16, d_ff=24, activation=silu, type=swiglu, "
            "backend=auto)",
        ],
    ),
    "moe_with_everything": (
        {
            "type": "moe",
            "num_experts": 4,
            "capacity": {"factor": 1.25, "drop": "probability"},
            "router": {"type": "sigmoid_top_k", "groups": {"num_groups": 3, "keep": 2}},
            "experts": {"type": "mlp", "bias": True, "backend": "loop"},
            "zero_computation": {"num_zero": 1, "num_copy": 1},
            "shared_expert": "dense",
            "combine": "average",
        },
        [
            "num_experts=4, d_model=16, capacity=(factor=1.25, drop=probability)",
            "k=2, renormalize=True, scale=1.0, groups=(num_groups=3, keep=2, score_top=2), "
            "correction_bias=True",
            "(experts): MLPExperts(num_experts=4, d_model=16, d_ff=48, activation=gelu, type=mlp, "
            "bias=True, backend=loop)",
            "(zero_computation): ZeroComputationExperts(num_zero=1, num_copy=1)",
            "(combine): Average(experts_per_token=1.33333)",
        ],
    ),
    "clamped": (
        {"type": "moe", "experts": "clamped_swiglu"},
        ["activation=silu, type=clamped_swiglu, backend=auto, alpha=1.702, limit=7.0"],
    ),
    "soft_moe": ("soft_moe", ["num_experts=8, slots_per_expert=32, d_model=16"]),
    "ngram_memory": (
        {"type": "ngram_memory", "ffn": "dense"},
        [
            "(ffn): DenseFFN(",
            "max_order=3, num_heads=8, num_rows=4096, rate_scale=5.0",
            "kernel_size=4, dilation=3",
        ],
    ),
    "mixture_of_depths": (
        "mixture_of_depths",
        ["d_model=16", "k=0.5, among=sequence, score=sigmoid"],
    ),
}


@pytest.mark.parametrize(("config", "expected"), PRINTED.values(), ids=PRINTED)
def test_a_block_prints_its_sizes_and_options(config: Any, expected: list[str]) -> None:
    text = repr(build_ffn(config, D_MODEL))
    for part in expected:
        assert part in text
