"""THE oracle: a double loop over tokens and their pairs, held against every way to compute an MoE.

The registries drive the parameters, so a newly registered router, kind of experts or backend is
tested by being registered. What a member needs beyond its defaults stands in the tables below.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_ffn import TokenContext, build_ffn
from moe_ffn.activations import GATE_ACTIVATIONS
from moe_ffn.experts.config import ExpertsConfig
from moe_ffn.ffn.moe import MoEFFN
from moe_ffn.kernels.select import BACKENDS
from moe_ffn.routing.config import RouterConfig

D_MODEL, D_FF, NUM_EXPERTS = 8, 8, 4
BATCH, SEQ_LEN = 2, 5

ROUTER_ARGUMENTS: dict[str, dict[str, dict[str, Any]]] = {
    "top_k": {
        "top_k-k1": {"k": 1},
        "top_k-k2": {"k": 2},
        "top_k-k2_renormalized": {"k": 2, "renormalize": True},
    },
}
EXPERTS_ARGUMENTS: dict[str, dict[str, dict[str, Any]]] = {
    "mlp": {
        "mlp-gelu": {"activation": "gelu"},
        "mlp-relu_squared": {"activation": "relu_squared"},
        "mlp-sigmoid-bias": {"activation": "sigmoid", "bias": True},
    },
    "swiglu": {"swiglu": {}, "swiglu-bias": {"bias": True}},
    # sigmoid(0) is not 0: what stands in rows that nobody computes would show.
    "glu": {"glu-bias": {"bias": True}},
}
"""type -> id -> arguments. A member that is missing here is tested with its defaults."""


def variants(
    members: dict[str, Any], arguments: dict[str, dict[str, dict[str, Any]]]
) -> dict[str, dict[str, Any]]:
    return {
        name: {"type": member, **given}
        for member in members
        for name, given in arguments.get(member, {member: {}}).items()
    }


ROUTERS = variants(RouterConfig.members, ROUTER_ARGUMENTS)
EXPERTS = variants(ExpertsConfig.members, EXPERTS_ARGUMENTS)


@dataclass(frozen=True)
class Limit:
    factor: float | None = None
    padded: bool = False


LIMITS = {
    "dropless": Limit(),
    "capacity_0.5": Limit(0.5),
    "capacity_1": Limit(1.0),
    "padding": Limit(padded=True),
    "padding_and_capacity_0.5": Limit(0.5, padded=True),
}

# float64 rounds at 1e-16 and float32 at 1e-7; both sums here have tens of terms of size one.
PRECISION = {torch.float64: 1e-12, torch.float32: 1e-5}


def dtype_of(backend: str) -> torch.dtype:
    """The widest dtype that the backend takes."""
    return torch.float32 if backend == "grouped_mm" else torch.float64


# ---------------------------------------------------------------------------------- the oracle

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda z: torch.where(z > 0, z, 0),
    "gelu": lambda z: z * (1 + torch.erf(z / math.sqrt(2))) / 2,
    "silu": lambda z: z / (1 + torch.exp(-z)),
    "relu_squared": lambda z: torch.where(z > 0, z * z, 0),
    "sigmoid": lambda z: 1 / (1 + torch.exp(-z)),
    "identity": lambda z: z,
}


def one_expert(x_D: Tensor, experts: Any, e: int) -> Tensor:
    """The plain network of expert `e`, on one token."""

    def linear(name: str, input_I: Tensor) -> Tensor:
        bias = getattr(experts, f"{name}_bias")
        output = getattr(experts, name)[e] @ input_I
        return output if bias is None else output + bias[e]

    config = experts.config
    if config.type in GATE_ACTIVATIONS:
        act = ACTIVATIONS[GATE_ACTIVATIONS[config.type]]
        return linear("down", act(linear("gate", x_D)) * linear("up", x_D))
    return linear("down", ACTIVATIONS[config.activation](linear("up", x_D)))


def oracle(
    moe: MoEFFN, x_BSD: Tensor, mask_BS: Tensor, factor: float | None
) -> tuple[Tensor, list[int]]:
    """Outputs, and the indices of the pairs that were computed.

    Only the router's own choice is taken from the code under test; queues, drops, networks and sums
    are written out.
    """
    batch, length, _ = x_BSD.shape
    tokens = list(x_BSD.reshape(batch * length, -1))
    mask = mask_BS.flatten()
    routing = moe.router(torch.stack(tokens), TokenContext(mask=mask, sequence_length=length))
    token_ids, expert_ids = routing.token_ids_N.tolist(), routing.expert_ids_N.tolist()
    num_experts = routing.logits_TE.shape[1]

    real = [n for n, t in enumerate(token_ids) if mask[t]]
    places_left = [len(real)] * num_experts
    if factor is not None:
        places_left = [math.ceil(Fraction(str(factor)) * len(real) / num_experts)] * num_experts

    outputs = [torch.zeros_like(token) for token in tokens]
    computed = []
    for n in sorted(real, key=lambda n: (token_ids[n] % length, n)):  # earlier positions first
        t, e = token_ids[n], expert_ids[n]
        if places_left[e] == 0:
            continue
        places_left[e] -= 1
        computed.append(n)
        outputs[t] = outputs[t] + routing.weights_N[n] * one_expert(tokens[t], moe.experts, e)
    y_BSD = torch.stack(outputs).view_as(x_BSD)
    if moe.shared_expert is not None:
        y_BSD = y_BSD + plain_dense(moe.shared_expert, x_BSD)
    return y_BSD, sorted(computed)


def plain_dense(ffn: Any, x: Tensor) -> Tensor:
    """A shared expert written out: gated where it has a gate, with SiLU, otherwise with GELU."""
    if hasattr(ffn, "gate"):
        hidden = ACTIVATIONS["silu"](x @ ffn.gate.weight.T) * (x @ ffn.up.weight.T)
    else:
        hidden = ACTIVATIONS["gelu"](x @ ffn.up.weight.T)
    return hidden @ ffn.down.weight.T


# ------------------------------------------------------------------------------ the comparison


def build_moe(backend: str, seed: int = 0, **config: Any) -> MoEFFN:
    torch.manual_seed(seed)
    experts = {"type": "swiglu", "d_ff": D_FF, **config.pop("experts", {}), "backend": backend}
    moe = build_ffn(
        {"type": "moe", "num_experts": NUM_EXPERTS, **config, "experts": experts}, d_model=D_MODEL
    )
    assert isinstance(moe, MoEFFN)
    with torch.no_grad():  # decided and lopsided, so that a capacity has something to drop
        for parameter in moe.router.parameters():
            parameter.mul_(3)
    return moe.to(dtype_of(backend))


def tokens_and_mask(dtype: torch.dtype, padded: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x_BSD = torch.randn(BATCH, SEQ_LEN, D_MODEL, generator=generator, dtype=dtype)
    mask_BS = torch.ones(BATCH, SEQ_LEN, dtype=torch.bool)
    if padded:
        mask_BS[0, 3:] = False  # right
        mask_BS[1, :1] = False  # left
    return x_BSD, mask_BS


def gradients(module: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor | None]:
    """d/d(everything) of a sum of `y` with fixed, uneven weights."""
    generator = torch.Generator().manual_seed(2)
    probe = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)
    (y * probe).sum().backward()
    return {"x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}


def check_against_oracle(moe: MoEFFN, limit: Limit, x: Tensor, mask: Tensor) -> None:
    reference = copy.deepcopy(moe).double()
    x_reference = x.detach().double().clone().requires_grad_()
    expected, computed = oracle(reference, x_reference, mask, limit.factor)
    expected_gradients = gradients(reference, x_reference, expected)

    x = x.detach().clone().requires_grad_()
    output = moe(x, TokenContext(mask=mask) if limit.padded else None)
    got_gradients = gradients(moe, x, output.hidden)

    tolerance = PRECISION[x.dtype]
    assert output.routing is not None
    assert output.routing.computed_N.nonzero().flatten().tolist() == computed
    torch.testing.assert_close(
        output.hidden.double(), expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"y: {m}"
    )
    assert set(got_gradients) == set(expected_gradients)
    for name, gradient in got_gradients.items():
        assert gradient is not None, name
        wanted = expected_gradients[name]
        wanted = torch.zeros_like(gradient).double() if wanted is None else wanted
        torch.testing.assert_close(
            gradient.double(),
            wanted,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, name=name: f"d/d {name}: {m}",
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("experts", EXPERTS.values(), ids=EXPERTS)
@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_output_and_every_gradient_equal_the_double_loop(
    router: dict[str, Any], experts: dict[str, Any], limit: Limit, backend: str
) -> None:
    moe = build_moe(backend, router=router, experts=experts, capacity={"factor": limit.factor})
    x, mask = tokens_and_mask(dtype_of(backend), limit.padded)
    check_against_oracle(moe, limit, x, mask)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("shared", ["dense", "swiglu"])
def test_a_shared_expert_is_added_to_every_token(shared: str, limit: Limit, backend: str) -> None:
    moe = build_moe(backend, shared_expert=shared, capacity={"factor": limit.factor})
    x, mask = tokens_and_mask(dtype_of(backend), limit.padded)
    check_against_oracle(moe, limit, x, mask)


@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_the_capacity_of_the_cases_above_does_drop_pairs(factor: float) -> None:
    x, _ = tokens_and_mask(torch.float64, padded=False)
    routing = build_moe("loop", capacity={"factor": factor})(x).routing
    assert routing is not None
    assert routing.dropped_N.any()
    assert not routing.dropped_N.all()


# -------------------------------------------------------------------------------- the extremes

EXTREMES: dict[str, dict[str, Any]] = {
    "one_expert": {"num_experts": 1, "router": {"type": "top_k", "k": 1}},
    "k_is_all_experts": {"router": {"type": "top_k", "k": NUM_EXPERTS}},
    "more_experts_than_pairs": {"num_experts": 64, "router": {"type": "top_k", "k": 1}},
    "capacity_below_one": {"capacity": {"factor": 0.01}},
    "capacity_above_all": {"capacity": {"factor": 100.0}},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("config", EXTREMES.values(), ids=EXTREMES)
def test_extreme_layers_equal_the_double_loop(config: dict[str, Any], backend: str) -> None:
    moe = build_moe(backend, **config)
    x, mask = tokens_and_mask(dtype_of(backend), padded=False)
    check_against_oracle(moe, Limit(config.get("capacity", {}).get("factor")), x, mask)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_token_equals_the_double_loop(backend: str) -> None:
    x, mask = tokens_and_mask(dtype_of(backend), padded=False)
    check_against_oracle(build_moe(backend), Limit(), x[:1, :1], mask[:1, :1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_only_gives_zero_output_and_zero_gradients(backend: str) -> None:
    moe = build_moe(backend, capacity={"factor": 1.0})
    x, mask = tokens_and_mask(dtype_of(backend), padded=False)
    x.requires_grad_()
    output = moe(x, TokenContext(mask=torch.zeros_like(mask)))
    assert output.hidden.count_nonzero() == 0
    for name, gradient in gradients(moe, x, output.hidden).items():
        assert gradient is not None, name
        assert gradient.count_nonzero() == 0, name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, D_MODEL), (2, 0, D_MODEL), (0, 3, D_MODEL)], ids=str)
def test_no_tokens_give_no_output_and_zero_gradients(shape: tuple[int, ...], backend: str) -> None:
    moe = build_moe(backend, capacity={"factor": 1.0})
    output = moe(torch.zeros(shape, dtype=dtype_of(backend)))
    assert output.hidden.shape == shape
    output.hidden.sum().backward()
    for name, parameter in moe.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.count_nonzero() == 0, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_expert_without_tokens_gets_a_zero_gradient_not_a_missing_one(backend: str) -> None:
    moe = build_moe(backend, router={"type": "top_k", "k": 1}, experts={"bias": True})
    with torch.no_grad():  # positive tokens: expert 2 has the only positive logit
        (weight,) = moe.router.parameters()
        weight.fill_(-1)[2] = 1
    x = torch.rand(3, 4, D_MODEL, dtype=dtype_of(backend)) + 0.1
    output = moe(x)
    assert output.routing is not None
    assert output.routing.expert_ids_N.unique().tolist() == [2]
    check_against_oracle(moe, Limit(), x, torch.ones(3, 4, dtype=torch.bool))
    for name, parameter in moe.experts.named_parameters():
        assert parameter.grad is not None, name
        idle = parameter.grad[[0, 1, 3]]
        assert idle.count_nonzero() == 0, name
        assert parameter.grad[2].count_nonzero() > 0, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_expanded_gradient_is_taken(backend: str) -> None:
    # y.sum() hands back one number with strides of 0, which F.grouped_mm itself refuses.
    moe = build_moe(backend)
    x, _ = tokens_and_mask(dtype_of(backend), padded=False)
    x.requires_grad_()
    moe(x).hidden.sum().backward()
    expanded = x.grad
    assert expanded is not None

    x_again = x.detach().clone().requires_grad_()
    moe(x_again).hidden.backward(torch.ones_like(x))
    assert x_again.grad is not None
    torch.testing.assert_close(expanded, x_again.grad, rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_transposed_input_is_taken(backend: str) -> None:
    moe = build_moe(backend)
    x, _ = tokens_and_mask(dtype_of(backend), padded=False)
    transposed = x.transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(moe(transposed).hidden, moe(x).hidden, rtol=0, atol=0)


# ------------------------------------------------------------------------------------- dtypes

# bfloat16 keeps 8 bits and float16 11: each of about five roundings costs 2^-9 or 2^-12 of a value.
REDUCED = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return ((got.double() - wanted.double()).abs().max() / wanted.double().abs().max()).item()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_a_layer_in_half_precision_keeps_its_dtype_and_its_float32_router(
    dtype: torch.dtype, backend: str
) -> None:
    moe = build_moe(backend).to(dtype)
    x = tokens_and_mask(torch.float32, padded=False)[0].to(dtype)
    output = moe(x)
    assert output.hidden.dtype == dtype
    assert output.routing is not None
    assert output.routing.logits_TE.dtype == torch.float32
    assert output.routing.weights_N.dtype == torch.float32
    wanted = copy.deepcopy(moe).float()(x.float()).hidden
    assert relative_error(output.hidden, wanted) < REDUCED[dtype]
    output.hidden.sum().backward()
    assert all(parameter.grad is not None for parameter in moe.parameters())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_lowers_the_experts_but_not_the_router(
    input_dtype: torch.dtype, backend: str
) -> None:
    moe = build_moe(backend, shared_expert="swiglu").float()
    x = tokens_and_mask(torch.float32, padded=False)[0].to(input_dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = moe(x)
    assert output.hidden.dtype == input_dtype
    assert output.routing is not None
    assert output.routing.logits_TE.dtype == torch.float32
    # To the last bit what float32 gives, so no rounding to bfloat16 on the way.
    wanted = moe(x.float())
    assert wanted.routing is not None
    torch.testing.assert_close(output.routing.logits_TE, wanted.routing.logits_TE, rtol=0, atol=0)
    error = relative_error(output.hidden, wanted.hidden)
    assert error < REDUCED[torch.bfloat16]
    assert error > 1e-5  # the products were lowered
    output.hidden.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in moe.parameters())


def test_grouped_mm_refuses_what_it_cannot_compute() -> None:
    moe = build_moe("grouped_mm")
    with pytest.raises(ValueError, match=r"takes torch\.float32, .*got torch\.float64.*'loop'"):
        moe.double()(torch.zeros(3, D_MODEL, dtype=torch.float64))
    # 5 float32 are 20 bytes, not a multiple of 16.
    narrow = build_moe("grouped_mm", experts={"d_ff": 5})
    with pytest.raises(ValueError, match=r"multiple of 16 bytes.*d_model 8 and d_ff 5; use 'loop'"):
        narrow(torch.zeros(3, D_MODEL))


def test_grouped_mm_under_compilation_is_for_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch 2.13 traces it in bfloat16 alone: "Expected inputs of BF16 type".
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(ValueError, match=r"takes torch\.bfloat16 and rows.*got torch\.float32"):
        build_moe("grouped_mm")(torch.zeros(3, D_MODEL))


def test_auto_takes_what_grouped_mm_refuses() -> None:
    moe = build_moe("auto", experts={"d_ff": 5}).double()
    assert moe(torch.zeros(3, D_MODEL, dtype=torch.float64)).hidden.dtype == torch.float64


# -------------------------------------------------------------------- under other machinery


@pytest.mark.parametrize("backend", BACKENDS)
def test_activation_checkpointing_changes_no_gradient(backend: str) -> None:
    moe = build_moe(backend, capacity={"factor": 1.0}, shared_expert="dense")
    x, _ = tokens_and_mask(dtype_of(backend), padded=False)
    plain = gradients(moe, x.requires_grad_(), moe(x).hidden)

    again = copy.deepcopy(moe)
    again.zero_grad()
    x_again = x.detach().clone().requires_grad_()
    output = checkpoint(again, x_again, use_reentrant=False)
    recomputed = gradients(again, x_again, output.hidden)
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient, rtol=0, atol=0)


@pytest.mark.slow  # a compilation takes about half a minute on two cores
@pytest.mark.filterwarnings("ignore")  # what inductor's own imports and tracing warn of
@pytest.mark.parametrize("backend", BACKENDS)
def test_torch_compile_changes_nothing(backend: str) -> None:
    # grouped_mm compiles in bfloat16 alone, where fused steps round less often than separate ones.
    dtype, tolerance = torch.float64, PRECISION[torch.float64]
    if backend == "grouped_mm":
        dtype, tolerance = torch.bfloat16, REDUCED[torch.bfloat16]
    moe = build_moe(backend, capacity={"factor": 1.0}, shared_expert="swiglu").to(dtype)
    x = tokens_and_mask(dtype, padded=False)[0].requires_grad_()
    plain = gradients(moe, x, moe(x).hidden)

    torch.compiler.reset()
    x_again = x.detach().clone().requires_grad_()
    again = copy.deepcopy(moe)
    again.zero_grad()
    compiled = gradients(again, x_again, torch.compile(again)(x_again).hidden)
    for name, gradient in plain.items():
        got = compiled[name]
        assert got is not None, name
        assert gradient is not None, name
        assert relative_error(got, gradient) < tolerance, name


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_in_the_experts_is_for_training_only(backend: str) -> None:
    moe = build_moe(backend, experts={"dropout": 0.5})
    without = build_moe(backend)
    x, _ = tokens_and_mask(dtype_of(backend), padded=False)
    torch.manual_seed(3)
    assert not torch.equal(moe(x).hidden, moe(x).hidden)
    torch.testing.assert_close(moe.eval()(x).hidden, without(x).hidden, rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_keeps_the_mean(backend: str) -> None:
    moe = build_moe(backend, experts={"dropout": 0.5, "d_ff": 512})
    x = tokens_and_mask(dtype_of(backend), padded=False)[0][:1]
    torch.manual_seed(4)
    dropped = torch.stack([moe(x).hidden for _ in range(64)]).mean(0)
    # 64 draws of 512 units: the mean is known to about 1 / sqrt(64) of one draw's deviation.
    spread = torch.stack([moe(x).hidden for _ in range(8)]).std(0).mean()
    error = (dropped - moe.eval()(x).hidden).abs().mean()
    assert error < 3 * spread / math.sqrt(64)


def test_what_stands_in_the_padding_reaches_neither_outputs_nor_gradients() -> None:
    ffn = build_ffn({"type": "moe", "num_experts": 4}, d_model=8)
    x = torch.randn(2, 3, 8)
    x[1, 2] = torch.nan
    mask = torch.ones(2, 3, dtype=torch.bool)
    mask[1, 2] = False

    ffn(x, TokenContext(mask=mask)).hidden[mask].square().sum().backward()

    for name, parameter in ffn.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all(), name
