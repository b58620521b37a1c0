"""Any MoE layer and any batch for it, drawn by hypothesis.

B sequences, S tokens of a sequence, D model width, T = B*S tokens
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from moe_ffn import TokenContext, build_ffn
from moe_ffn.experts.base import ExpertsConfig
from moe_ffn.experts.matrices import MatrixExpertsConfig
from moe_ffn.ffn import CombineConfig
from moe_ffn.ffn.base import flatten_tokens
from moe_ffn.ffn.moe import MoEFFN
from moe_ffn.kernels.activations import Activation
from moe_ffn.kernels.select import BACKENDS
from moe_ffn.outputs import FFNOutput, Routing
from moe_ffn.routing import RouterConfig
from moe_ffn.routing.expert_threshold import ExpertThresholdRouter

SOME = settings(max_examples=settings().max_examples // 2)
FEW = settings(max_examples=settings().max_examples // 10)
"""Fractions of the examples of the profile in `tests/conftest.py`."""

D_MODEL = 8
Options = dict[str, Any]

DTYPES = {
    "loop": (torch.float64, torch.float32, torch.bfloat16),
    "cpu": (torch.float64, torch.float32, torch.bfloat16),
    "grouped_mm": (torch.float32, torch.bfloat16),
}
"""Dtypes of each backend; `triton`, which is interpreted on a CPU, is in tests/kernels."""
assert DTYPES.keys() == BACKENDS.keys() - {"triton"}

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Error over the largest value: sums of tens of terms, rounded at 1e-16, 1e-7 and, about five times, 4e-3."""


@dataclass(frozen=True)
class AnyMoE:
    """A layer, a batch for it, and what was drawn to make them."""

    config: Options
    dtype: torch.dtype
    training: bool
    shape: tuple[int, ...]
    """Shape of the batch, without D."""
    padding: tuple[bool, ...] | None
    seed: int

    @property
    def router_type(self) -> str:
        return self.config["router"]["type"]

    @property
    def num_routable(self) -> int:
        return self.config["num_experts"] + sum(self.config["zero_computation"].values())

    def layer(self) -> MoEFFN:
        torch.manual_seed(self.seed)
        layer = build_ffn({"type": "moe", **self.config}, D_MODEL)
        assert isinstance(layer, MoEFFN)
        with torch.no_grad():  # decided and lopsided, as a trained router is
            for parameter in layer.router.parameters():
                parameter.mul_(3)
            if layer.router.correction_bias_E is not None:
                layer.router.correction_bias_E.uniform_(-0.3, 0.3)
            if isinstance(layer.router, ExpertThresholdRouter):
                layer.router.num_updates_E.fill_(1)  # its thresholds are 0, and hold
        return layer.to(self.dtype).train(self.training)

    def tokens(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1)
        x = torch.randn(*self.shape, D_MODEL, generator=generator, dtype=torch.float64)
        return x.to(self.dtype)

    def context(self) -> TokenContext:
        generator = torch.Generator().manual_seed(self.seed + 2)
        mask = None
        if self.padding is not None:
            mask = ~torch.tensor(self.padding, dtype=torch.bool).view(self.shape)
        return TokenContext(mask, torch.randint(1000, self.shape, generator=generator))

    def call(
        self, layer: MoEFFN, x: Tensor, context: TokenContext | None = None
    ) -> tuple[FFNOutput, Routing]:
        """Call the layer with torch's generator in the same state every time."""
        torch.manual_seed(self.seed + 3)
        output = layer(x, self.context() if context is None else context)
        assert output.routing is not None
        return output, output.routing

    def promised(self, layer: MoEFFN, x: Tensor) -> Routing:
        """Return the choice of the router, before any capacity."""
        x_TD, context = flatten_tokens(x, self.context())
        torch.manual_seed(self.seed + 3)
        return layer.router(x_TD, context)


def assert_close(got: Tensor, wanted: Tensor, tolerance: float) -> None:
    """Equal to `tolerance` times the largest value that is wanted."""
    assert got.shape == wanted.shape
    if wanted.numel():
        error = (got.double() - wanted.double()).abs().max()
        assert error <= tolerance * max(wanted.double().abs().max().item(), 1), error.item()


# ------------------------------------------------------------------------------------- routers


@st.composite
def _top_k(draw: st.DrawFn, num_experts: int, type_: str) -> Options:
    k = draw(st.integers(1, num_experts))
    options: Options = {
        "type": type_,
        "k": k,
        "renormalize": k > 1 and draw(st.booleans()),
        "scale": draw(st.sampled_from([1.0, 2.5])),
        "correction_bias": draw(st.booleans()),
        "bias": draw(st.booleans()),
    }
    if type_ == "top_k" and k > 1:
        options["softmax"] = draw(st.sampled_from(["before", "after"]))
    divisors = [n for n in range(2, num_experts + 1) if num_experts % n == 0]
    if divisors and draw(st.booleans()):
        num_groups = draw(st.sampled_from(divisors))
        size = num_experts // num_groups
        keep = draw(st.integers(-(-k // size), num_groups))
        options["groups"] = {"num_groups": num_groups, "keep": keep, "score_top": min(2, size)}
    return options


@st.composite
def _top_p(draw: st.DrawFn, num_experts: int) -> Options:
    max_k = draw(st.none() | st.integers(1, num_experts))
    p = draw(st.sampled_from([0.2, 0.5, 0.9, 1.0]))
    may_renormalize = max_k != 1 and p * num_experts > 1
    renormalize = may_renormalize and draw(st.booleans())
    return {"type": "top_p", "max_k": max_k, "p": p, "renormalize": renormalize}


def _noisy_top_k(num_experts: int) -> st.SearchStrategy[Options]:
    if num_experts == 1:  # it needs two
        return _top_k(num_experts, "top_k")
    return _options("noisy_top_k", k=st.integers(2, num_experts))


def _expert_choice(num_experts: int) -> st.SearchStrategy[Options]:
    scores = ["softmax", "sigmoid"] if num_experts > 1 else ["sigmoid"]
    return _options(
        "expert_choice",
        k=st.sampled_from([0.5, 1.0, 1.25, float(num_experts)]).filter(lambda k: k <= num_experts),
        among=st.sampled_from(["sequence", "batch"]),
        score=st.sampled_from(scores),
    )


def _product_key(num_experts: int) -> st.SearchStrategy[Options]:
    n = math.isqrt(num_experts)
    if n * n != num_experts:  # it needs a square
        return _top_k(num_experts, "top_k")
    return _options(
        "product_key",
        k=st.integers(1, n),
        num_heads=st.integers(1, 2),
        d_query=st.just(4),
        score=st.just("sigmoid"),
    )


def _options(type_: str, **strategies: st.SearchStrategy[Any]) -> st.SearchStrategy[Options]:
    return st.fixed_dictionaries({"type": st.just(type_), **strategies})


ROUTERS: dict[str, Callable[[int], st.SearchStrategy[Options]]] = {
    "top_k": lambda e: _top_k(e, "top_k"),
    "sigmoid_top_k": lambda e: _top_k(e, "sigmoid_top_k"),
    "noisy_top_k": _noisy_top_k,
    "neuron_top_k": lambda e: _options(
        "neuron_top_k", k=st.integers(1, e), correction_bias=st.booleans()
    ),
    "top_p": _top_p,
    "relu": lambda e: _options("relu", k=st.sampled_from([0.5, 1.0]), bias=st.booleans()),
    "expert_threshold": lambda e: _options("expert_threshold", k=st.sampled_from([0.5, 1.0])),
    "hash": lambda e: _options("hash", k=st.integers(1, e), seed=st.integers(0, 9)),
    "forced": lambda e: _options(
        "forced", k=st.integers(1, e), skew=st.sampled_from([0.0, 0.3, 1])
    ),
    "expert_choice": _expert_choice,
    "sinkhorn": lambda e: _options("sinkhorn", k=st.integers(1, e)),
    "product_key": _product_key,
    "sparse_mixer": lambda e: _options(
        "sparse_mixer", k=st.integers(1, e), threshold=st.sampled_from([0.02, 0.5, 1.9])
    ),
}
"""Options by type, given the number of experts; a router that is missing here is drawn with its defaults."""

PER_TOKEN = tuple(RouterConfig.members.keys() - {"forced", "expert_choice"})
"""Routers whose choice for a token, in evaluation, depends on that token alone; `forced` asks for its
position, and `expert_choice` compares it with others."""


# --------------------------------------------------------------------------------------- layers

MATRICES = sorted(
    name for name, cls in ExpertsConfig.members.items() if issubclass(cls, MatrixExpertsConfig)
)


@st.composite
def _experts(draw: st.DrawFn, backend: str) -> Options:
    type_ = draw(st.sampled_from(MATRICES))
    options: Options = {
        "type": type_,
        "d_ff": 8 * draw(st.integers(1, 2)),  # grouped_mm wants rows of 16 bytes
        "bias": draw(st.booleans()),
        "backend": backend,
    }
    if type_ == "mlp":
        options["activation"] = draw(st.sampled_from(get_args(Activation)))
    return options


@st.composite
def _joined(draw: st.DrawFn) -> Options:
    """A shared expert and how it joins, or neither."""
    shared = draw(st.sampled_from([None, "dense", "swiglu"]))
    if shared is None:
        return {}
    return {
        "shared_expert": shared,
        "combine": draw(st.sampled_from(sorted(CombineConfig.members))),
    }


_NUMBERS_OF_ZERO_COMPUTATION = st.sampled_from([0, 0, 1])
_FACTORS = st.none() | st.sampled_from([0.01, 0.3, 0.5, 1.0, 1.25, 2.0, 100.0])
_CAPACITIES = st.fixed_dictionaries(
    {
        "factor": _FACTORS,
        "eval_factor": _FACTORS,
        "drop": st.sampled_from(["position", "probability", "random"]),
        "renormalize": st.booleans(),
    }
)
_SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 7))
EMPTY_SHAPES = st.sampled_from([(0,), (2, 0), (0, 3), (0, 0), (2, 0, 3)])


@st.composite
def any_moe(
    draw: st.DrawFn,
    *,
    routers: tuple[str, ...] = tuple(RouterConfig.members),
    backends: tuple[str, ...] = tuple(DTYPES),
    dtypes: tuple[torch.dtype, ...] = tuple(TOLERANCE),
    dropless: bool = False,
    training: bool | None = None,
    shapes: st.SearchStrategy[tuple[int, ...]] = _SHAPES,
    padded: bool = True,
) -> AnyMoE:
    """A layer of 1 to 9 experts, and a batch of up to 3 sequences of 7 tokens unless `shapes` differ.

    Args:
        dropless: without any capacity.
        training: whether the layer trains; either when None.
        padded: whether there may be padding.
    """
    backend = draw(st.sampled_from(backends))
    num_experts = draw(st.integers(1, 9))
    zero_computation = {
        name: draw(_NUMBERS_OF_ZERO_COMPUTATION)
        for name in ("num_zero", "num_copy", "num_constant")
    }
    router = draw(st.sampled_from(routers))
    strategy = ROUTERS.get(router, lambda _: _options(router))
    shape = draw(shapes)
    num_tokens = int(torch.Size(shape).numel())
    sizes = st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens).map(tuple)
    return AnyMoE(
        config={
            "num_experts": num_experts,
            "zero_computation": zero_computation,
            "router": draw(strategy(num_experts + sum(zero_computation.values()))),
            "experts": draw(_experts(backend)),
            "capacity": {} if dropless else draw(_CAPACITIES),
            **draw(_joined()),
        },
        dtype=draw(st.sampled_from([d for d in DTYPES[backend] if d in dtypes])),
        training=draw(st.booleans()) if training is None else training,
        shape=shape,
        padding=draw(st.none() | sizes) if padded else None,
        seed=draw(st.integers(0, 2**20)),
    )


# -------------------------------------------------------------------------------------- layouts


def _every_second(x: Tensor) -> Tensor:
    """Return a view with a gap behind each value, and an offset."""
    nobodys = torch.nan if x.is_floating_point() else 1
    spread = torch.full([2 * size + 1 for size in x.shape], nobodys, dtype=x.dtype)
    return spread[tuple(slice(1, None, 2) for _ in x.shape)].copy_(x)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "last axes swapped": lambda x: x.mT.contiguous().mT,
    "first axes swapped": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every second": _every_second,
    "the first for all": lambda x: x[:1].expand_as(x),
}
"""A tensor as a view that is not contiguous."""
