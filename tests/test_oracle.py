"""THE oracle: a double loop over tokens and their pairs, compared with every way to compute an MoE.

The registries drive the parameters, so a newly registered router, kind of experts or backend is
tested by being registered. Routers, limits and experts meet only in the plan, so the quick suite crosses
limits with experts, and a router of each shape of plan with both; `make test-slow` crosses all three.
Backends share one result of the oracle, which is slow.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ffn import TokenContext
from moe_ffn.experts.base import ExpertsConfig
from moe_ffn.experts.matrices import MatrixExpertsConfig
from moe_ffn.ffn import CombineConfig
from moe_ffn.ffn.moe import MoEFFN
from moe_ffn.kernels.activations import GATE_ACTIVATIONS
from moe_ffn.kernels.select import BACKENDS
from moe_ffn.outputs import VariableKRouting
from tests.helpers.every_router import ROUTERS

D_MODEL, NUM_EXPERTS = 8, 4  # of `build_moe`

EXPERTS_ARGUMENTS: dict[str, dict[str, dict[str, Any]]] = {
    "mlp": {
        "mlp-gelu": {"activation": "gelu"},
        "mlp-gelu_tanh": {"activation": "gelu_tanh"},
        "mlp-relu_squared": {"activation": "relu_squared"},
        "mlp-sigmoid-bias": {"activation": "sigmoid", "bias": True},
    },
    "swiglu": {"swiglu": {}, "swiglu-bias": {"bias": True}},
    # sigmoid(0) is not 0: what stands in rows that nobody computes would show.
    "glu": {"glu-bias": {"bias": True}},
    # A limit at which about half of the values are clamped.
    "clamped_swiglu": {
        "clamped_swiglu-bias": {"limit": 0.3, "bias": True},
        "clamped_swiglu-after": {"limit": 0.2, "alpha": 1.0, "added": 0.0, "clamp": "after"},
        "clamped_swiglu-silu": {"limit": 0.3, "alpha": 1.0, "added": 0.5},
    },
    "soft_capped_swiglu": {"soft_capped_swiglu": {"gate_cap": 0.3, "up_cap": 0.5}},
}
"""type -> id -> arguments. A member that is missing here is tested with its defaults."""

NEAR_ANOTHER = {"clamped_swiglu-after", "clamped_swiglu-silu", "soft_capped_swiglu", "geglu_tanh"}
"""Experts that differ from others only in `ExpertWeights.activate`: quick with everything else usual."""

NO_KERNEL = {("triton", name) for name in NEAR_ANOTHER - {"geglu_tanh"}}
"""Backends that reject experts by name."""


EXPERTS: dict[str, dict[str, Any]] = {
    name: {"type": member, **given}
    for member, cls in ExpertsConfig.members.items()
    if issubclass(cls, MatrixExpertsConfig)  # rows of tables: tests/ffn/test_product_keys.py
    for name, given in EXPERTS_ARGUMENTS.get(member, {member: {}}).items()
}


@dataclass(frozen=True)
class Limit:
    factor: float | None = None
    padded: bool = False
    drop: str = "position"
    renormalize: bool = False

    @property
    def capacity(self) -> dict[str, Any]:
        return {"factor": self.factor, "drop": self.drop, "renormalize": self.renormalize}


LIMITS = {
    "dropless": Limit(),
    "capacity_0.5": Limit(0.5),
    "capacity_1": Limit(1.0),
    "padding": Limit(padded=True),
    "padding_and_capacity_0.5": Limit(0.5, padded=True),
    "by_probability": Limit(0.5, padded=True, drop="probability"),
    "by_choice_renormalized": Limit(0.5, padded=True, drop="choice", renormalize=True),
    "at_random_renormalized": Limit(0.5, padded=True, drop="random", renormalize=True),
}

HARDEST = "padding_and_capacity_0.5"

BACKEND_GROUPS = {"cpu": [name for name in BACKENDS if name != "triton"], "triton": ["triton"]}
"""Backends that a test compares with one result of the oracle."""

every_backend = pytest.mark.parametrize("backends", BACKEND_GROUPS.values(), ids=BACKEND_GROUPS)

# float64 rounds at 1e-16 and float32 at 1e-7; both sums here have tens of terms of size one.
PRECISION = {torch.float64: 1e-12, torch.float32: 1e-5}


# ---------------------------------------------------------------------------------- the oracle

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda z: torch.where(z > 0, z, 0),
    "gelu": lambda z: z * (1 + torch.erf(z / math.sqrt(2))) / 2,
    "gelu_tanh": lambda z: z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2,
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
    if config.type == "clamped_swiglu":
        limit = config.limit
        gate, up = linear("gate", x_D), linear("up", x_D).clamp(-limit, limit)
        if config.clamp == "before":
            gate = gate.clamp(max=limit)
        gate = gate / (1 + torch.exp(-config.alpha * gate))
        return linear("down", (up + config.added) * gate.clamp(max=limit))
    if config.type == "soft_capped_swiglu":
        gate, up = linear("gate", x_D), linear("up", x_D)
        up = config.up_cap * torch.tanh(up / config.up_cap)
        capped = config.gate_cap * torch.tanh(gate / config.gate_cap)
        return linear("down", capped / (1 + torch.exp(-gate)) * up)
    if config.type in GATE_ACTIVATIONS:
        act = ACTIVATIONS[GATE_ACTIVATIONS[config.type]]
        return linear("down", act(linear("gate", x_D)) * linear("up", x_D))
    return linear("down", ACTIVATIONS[config.activation](linear("up", x_D)))


def one_zero_computation_expert(x_D: Tensor, experts: Any, e: int) -> Tensor:
    """Experts without a network: first those that return 0, then copies, then constants."""
    if e < experts.num_zero:
        return torch.zeros_like(x_D)
    if e < experts.num_zero + experts.num_copy:
        return x_D
    c = e - experts.num_zero - experts.num_copy
    first, second = (experts.mix_C2D[c] @ x_D).softmax(0)
    return first * x_D + second * experts.vector_CD[c]


TOKEN_IDS = torch.arange(15).view(3, 5) * 7 % 11
SEED = 11


def oracle(moe: MoEFFN, x_BSD: Tensor, mask_BS: Tensor, limit: Limit) -> tuple[Tensor, list[int]]:
    """Outputs, and the indices of the pairs that were computed.

    Only the router's own choice is taken from the code under test; queues, drops, networks and sums
    are written out.
    """
    batch, length, _ = x_BSD.shape
    tokens = list(x_BSD.reshape(batch * length, -1))
    mask = mask_BS.flatten()
    torch.manual_seed(SEED)
    routing = moe.router(
        torch.stack(tokens),
        TokenContext(mask, TOKEN_IDS[:batch, :length].flatten(), sequence_length=length),
    )
    token_ids, expert_ids = routing.token_indices_N.tolist(), routing.expert_ids_N.tolist()
    num_experts = routing.num_experts

    chosen, capacity_k = [True] * len(token_ids), None
    if isinstance(routing, VariableKRouting):
        chosen, capacity_k = routing.selected_N.tolist(), routing.capacity_k
    real = [n for n, t in enumerate(token_ids) if mask[t] and chosen[n]]
    places_left = [len(real)] * num_experts
    if limit.factor is not None:
        pairs = Fraction(len(real))
        if capacity_k is not None:
            pairs = sum(mask.tolist()) * Fraction(str(capacity_k))
        places = math.ceil(Fraction(str(limit.factor)) * pairs / num_experts)
        places_left = [places] * num_experts
    weights = routing.weights_N.tolist()
    lots = torch.rand(len(token_ids)).tolist()
    first_served: dict[str, Callable[[int], Any]] = {
        "position": lambda n: (token_ids[n] % length, n),
        "probability": lambda n: (-weights[n], n),
        # The pairs of its token that weigh more, and of those that weigh as much the ones listed before it.
        "choice": lambda n: (
            sum((-weights[m], m) < (-weights[n], n) for m in real if token_ids[m] == token_ids[n]),
            n,
        ),
        "random": lambda n: lots[n],
    }

    computed = []
    for n in sorted(real, key=first_served[limit.drop]):
        if places_left[expert_ids[n]] > 0:
            places_left[expert_ids[n]] -= 1
            computed.append(n)

    outputs = [torch.zeros_like(token) for token in tokens]
    for t in range(len(tokens)):
        mine = [n for n in computed if token_ids[n] == t]
        scale = torch.ones(())
        if limit.renormalize and mine:
            before = torch.stack([routing.weights_N[n] for n in real if token_ids[n] == t]).sum()
            scale = before / torch.stack([routing.weights_N[n] for n in mine]).sum()
        for n in mine:
            e = expert_ids[n]
            if e < moe.num_experts:
                y_D = one_expert(tokens[t], moe.experts, e)
            else:
                y_D = one_zero_computation_expert(
                    tokens[t], moe.zero_computation, e - moe.num_experts
                )
            outputs[t] = outputs[t] + scale * routing.weights_N[n] * y_D
    y_BSD = torch.stack(outputs).view_as(x_BSD)
    if moe.shared_expert is not None:
        clean_BSD = x_BSD * mask_BS.unsqueeze(-1)  # what padding holds is nobody's business
        y_BSD = combined(moe, y_BSD, plain_dense(moe.shared_expert, clean_BSD), clean_BSD)
    return y_BSD, sorted(computed)


def combined(moe: Any, routed: Tensor, shared: Tensor, x: Tensor) -> Tensor:
    """Compute `ffn.combine` in plain formulas, by the name of its class."""
    kind = type(moe.combine).__name__
    if kind == "SigmoidGate":
        return routed + shared / (1 + torch.exp(-(x @ moe.combine.gate.weight.T)))
    if kind == "Average":
        return (2 * routed + shared) / 3  # of the default k = 2
    if kind == "Residual":
        z = x @ moe.combine.coefficient.weight.T + moe.combine.coefficient.bias
        first = 1 / (1 + torch.exp(z[..., 1:] - z[..., :1]))
        return first * routed + (1 - first) * shared
    assert kind == "Sum"
    return routed + shared


def plain_dense(ffn: Any, x: Tensor) -> Tensor:
    """A shared expert written out: gated where it has a gate, with SiLU, otherwise with GELU."""
    if hasattr(ffn, "gate"):
        hidden = ACTIVATIONS["silu"](x @ ffn.gate.weight.T) * (x @ ffn.up.weight.T)
    else:
        hidden = ACTIVATIONS["gelu"](x @ ffn.up.weight.T)
    return hidden @ ffn.down.weight.T


# ------------------------------------------------------------------------------ the comparison


@pytest.fixture
def check_against_oracle(gradients: Any) -> Callable[..., None]:
    """Compare outputs, gradients and computed pairs of equal layers, one per backend, with the oracle's."""

    def check(moes: dict[str, MoEFFN], limit: Limit, x: Tensor, mask: Tensor) -> None:
        reference = copy.deepcopy(next(iter(moes.values()))).double()
        x_reference = x.double().requires_grad_()
        expected, computed = oracle(reference, x_reference, mask, limit)
        expected_gradients = gradients(reference, x_reference, expected)
        for backend, moe in moes.items():
            dtype = next(moe.parameters()).dtype
            x_backend = x.to(dtype, copy=True).requires_grad_()
            torch.manual_seed(SEED)
            token_ids = TOKEN_IDS[: x.shape[0], : x.shape[1]]
            output = moe(x_backend, TokenContext(mask if limit.padded else None, token_ids))
            got_gradients = gradients(moe, x_backend, output.hidden)

            assert output.routing is not None
            assert output.routing.computed_N.nonzero().flatten().tolist() == computed, backend
            assert_near(output.hidden, expected, f"y of {backend}", PRECISION[dtype])
            assert set(got_gradients) == set(expected_gradients), backend
            for name, gradient in got_gradients.items():
                assert gradient is not None, (backend, name)
                wanted = expected_gradients[name]
                wanted = torch.zeros_like(gradient).double() if wanted is None else wanted
                assert_near(gradient, wanted, f"d/d {name} of {backend}", PRECISION[dtype])

    return check


def assert_near(got: Tensor, wanted: Tensor, name: str, tolerance: float) -> None:
    torch.testing.assert_close(
        got.double(), wanted, rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}"
    )


@pytest.fixture
def compare(build_moe: Any, tokens_and_mask: Any, check_against_oracle: Any) -> Callable[..., None]:
    """Compare a layer with these backends, limit and options, on two short sequences, with the oracle."""

    def compare(backends: list[str], limit: Limit, **options: Any) -> None:
        moes = {name: build_moe(name, capacity=limit.capacity, **options) for name in backends}
        for moe in moes.values():
            if moe.router.correction_bias_E is not None:
                moe.router.correction_bias_E += torch.tensor([0.125, -0.25, 0.0, 0.375])
        x, mask = tokens_and_mask(torch.float32, limit.padded)
        check_against_oracle(moes, limit, x, mask)

    return compare


@pytest.fixture(autouse=True)
def _same_noise_in_every_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch draws other numbers in float64 than in float32 from the same seed."""
    normal, uniform = torch.randn_like, Tensor.uniform_

    def uniform_(x: Tensor, *given: Any, **options: Any) -> Tensor:
        return x.copy_(uniform(torch.empty_like(x, dtype=torch.float64), *given, **options))

    monkeypatch.setattr(torch, "randn_like", lambda x: normal(x, dtype=torch.float64).to(x.dtype))
    monkeypatch.setattr(Tensor, "uniform_", uniform_)


USUAL = ("top_k-k2", HARDEST, "mlp-sigmoid-bias")
SHAPES_OF_PLANS = {"top_k-k1", "hash-k2", "expert_choice", "relu", "top_p"}
"""Routers of one expert per token, of equal weights, of equally many tokens per expert, and of any number."""


def is_quick(router: str, limit: str, experts: str) -> bool:
    """True if one of the three is the usual one, two where a router, a limit or experts are like others."""
    unusual = [a != b for a, b in zip((router, limit, experts), USUAL, strict=True)]
    is_like_others = experts in NEAR_ANOTHER or (unusual[0] and router not in SHAPES_OF_PLANS)
    is_like_others |= all(unusual[1:]) and limit not in ("dropless", "by_choice_renormalized")
    return sum(unusual) <= (1 if is_like_others else 2)


CROSSED = [
    (*names, group)
    for *names, group in itertools.product(ROUTERS, LIMITS, EXPERTS, BACKEND_GROUPS)
    if (group, names[2]) not in NO_KERNEL
]
QUICK = [names for names in CROSSED if is_quick(*names[:3])]


@pytest.mark.parametrize(
    ("router", "limit", "experts", "backends"),
    [pytest.param(*names[:3], BACKEND_GROUPS[names[3]], id="-".join(names)) for names in QUICK],
)
def test_output_and_every_gradient_equal_the_double_loop(
    router: str, limit: str, experts: str, backends: list[str], compare: Any
) -> None:
    compare(backends, LIMITS[limit], router=ROUTERS[router], experts=EXPERTS[experts])


@pytest.mark.slow
@every_backend
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("limit", LIMITS)
def test_every_other_crossing_equals_the_double_loop(
    router: str, limit: str, backends: list[str], compare: Any
) -> None:
    for *names, group in CROSSED:
        is_of_test = names[:2] == [router, limit] and BACKEND_GROUPS[group] == backends
        if is_of_test and not is_quick(*names):
            experts = EXPERTS[names[2]]
            compare(backends, LIMITS[limit], router=ROUTERS[router], experts=experts)


@every_backend
@pytest.mark.parametrize(
    ("shared", "combine", "limit"),
    [
        pytest.param(*case, marks=[] if HARDEST in case or "residual" in case else pytest.mark.slow)
        for case in itertools.product(["dense", "swiglu"], CombineConfig.members, LIMITS)
    ],
)
def test_a_shared_expert_joins_the_routed_ones_at_every_token(
    shared: str, combine: str, limit: str, backends: list[str], compare: Any
) -> None:
    compare(backends, LIMITS[limit], shared_expert=shared, combine=combine)


@every_backend
@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("router", ["top_k", "relu", "expert_choice"])
def test_zero_computation_experts_work_next_to_other_experts(
    router: str, limit: Limit, backends: list[str], compare: Any
) -> None:
    kinds = {"num_zero": 1, "num_copy": 2, "num_constant": 2}
    options = {"type": router, "k": 3}
    compare(backends, limit, num_experts=2, router=options, zero_computation=kinds)


@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_the_capacity_of_the_cases_above_does_drop_pairs(
    factor: float, build_moe: Any, tokens_and_mask: Any
) -> None:
    x, _ = tokens_and_mask(torch.float64, padded=False)
    routing = build_moe("loop", capacity={"factor": factor})(x).routing
    assert routing is not None
    assert routing.dropped_N.any()
    assert not routing.dropped_N.all()


# -------------------------------------------------------------------------------- the extremes

EXTREMES: dict[str, tuple[Limit, dict[str, Any]]] = {
    "one_expert": (Limit(), {"num_experts": 1, "router": {"type": "top_k", "k": 1}}),
    "k_is_all_experts": (Limit(), {"router": {"type": "top_k", "k": NUM_EXPERTS}}),
    "more_experts_than_pairs": (Limit(), {"num_experts": 64, "router": {"type": "top_k", "k": 1}}),
    "capacity_below_one": (Limit(0.01), {}),
    "capacity_above_all": (Limit(100.0), {}),
}


@every_backend
@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_layers_equal_the_double_loop(name: str, backends: list[str], compare: Any) -> None:
    limit, options = EXTREMES[name]
    compare(backends, limit, **options)


@every_backend
def test_one_token_equals_the_double_loop(
    backends: list[str], build_moe: Any, tokens_and_mask: Any, check_against_oracle: Any
) -> None:
    x, mask = tokens_and_mask(torch.float32, padded=False)
    moes = {name: build_moe(name) for name in backends}
    check_against_oracle(moes, Limit(), x[:1, :1], mask[:1, :1])


@every_backend
def test_an_expert_without_tokens_gets_a_zero_gradient_not_a_missing_one(
    backends: list[str], build_moe: Any, dtype_of: Any, check_against_oracle: Any
) -> None:
    options = {"router": {"type": "top_k", "k": 1}, "experts": {"bias": True}}
    moes = {name: build_moe(name, **options) for name in backends}
    x = torch.rand(3, 4, D_MODEL) + 0.1
    for backend, moe in moes.items():
        with torch.no_grad():  # positive tokens: expert 2 has the only positive logit
            (weight,) = moe.router.parameters()
            weight.fill_(-1)[2] = 1
        output = moe(x.to(dtype_of(backend)))
        assert output.routing is not None
        assert output.routing.expert_ids_N.unique().tolist() == [2]
    check_against_oracle(moes, Limit(), x, torch.ones(3, 4, dtype=torch.bool))
    for backend, moe in moes.items():
        for name, parameter in moe.experts.named_parameters():
            assert parameter.grad is not None, (backend, name)
            idle = parameter.grad[[0, 1, 3]]
            assert idle.count_nonzero() == 0, (backend, name)
            assert parameter.grad[2].count_nonzero() > 0, (backend, name)
