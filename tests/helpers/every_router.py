"""All registered routers, with the options that matter; a small layer and a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from moe_ffn import build_ffn
from moe_ffn.config.errors import UseCase
from moe_ffn.ffn.base import flatten_tokens
from moe_ffn.ffn.moe import MoEFFN
from moe_ffn.outputs import FFNOutput, PairsOnlyRouting, Routing, TokenContext
from moe_ffn.routing import RouterConfig
from moe_ffn.routing.base import Router
from moe_ffn.routing.expert_threshold import ExpertThresholdRouter

BATCH, LENGTH, D_MODEL, NUM_EXPERTS = 2, 8, 8, 4
NUM_TOKENS = BATCH * LENGTH

ROUTERS: dict[str, dict[str, Any]] = yaml.safe_load("""
elastic_top_k: {type: elastic_top_k}
elastic_top_k-options: {type: elastic_top_k, k: 3, k_min: 2, renormalize: true, bias: true, jitter: 0.1}
expert_choice: {type: expert_choice}
expert_choice-batch: {type: expert_choice, among: batch, score: sigmoid, k: 1.0, jitter: 0.1}
expert_choice-all: {type: expert_choice, k: 4}
expert_threshold: {type: expert_threshold}
expert_threshold-warm_up: {type: expert_threshold, warmup_steps: 2}
forced: {type: forced}
forced-skewed: {type: forced, k: 1, skew: 0.3}
hash-k1: {type: hash}
hash-k2: {type: hash, k: 2, seed: 3}
neuron_top_k: {type: neuron_top_k}
neuron_top_k-k1: {type: neuron_top_k, k: 1, correction_bias: true, bias: true}
noisy_top_k: {type: noisy_top_k}
noisy_top_k-all: {type: noisy_top_k, k: 4, bias: true}
product_key: {type: product_key, d_query: 4, num_heads: 2, query_norm: {}}
product_key-per_head: {type: product_key, d_query: 6, num_heads: 3, keys: per_head, score: sigmoid, k: 1}
relu: {type: relu}
relu-bias: {type: relu, bias: true, jitter: 0.1}
sinkhorn-k1: {type: sinkhorn}
sinkhorn-k2: {type: sinkhorn, k: 2, bias: true}
sparse_mixer: {type: sparse_mixer, threshold: 1.5}
sparse_mixer-all: {type: sparse_mixer, k: 4}
top_k-k1: {type: top_k, k: 1}
top_k-k2: {type: top_k, k: 2}
top_k-renormalized: {type: top_k, renormalize: true, bias: true}
top_k-after: {type: top_k, softmax: after, bias: true, jitter: 0.1}
top_k-all: {type: top_k, k: 4, correction_bias: true}
sigmoid_top_k: {type: sigmoid_top_k}
sigmoid_top_k-k1: {type: sigmoid_top_k, k: 1, renormalize: false}
sigmoid_top_k-groups: {type: sigmoid_top_k, groups: {num_groups: 2, keep: 1}, scale: 2.5}
top_p: {type: top_p}
top_p-renormalized: {type: top_p, p: 0.6, max_k: 3, renormalize: true}
""")
"""The warm-up is half over, see `decide`. A router that is missing here is tested with its defaults."""
_given = {router["type"] for router in ROUTERS.values()}
ROUTERS |= {name: {"type": name} for name in RouterConfig.members if name not in _given}


MODES = pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
every_router = pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)


def config_of(router: dict[str, Any]) -> RouterConfig:
    return RouterConfig.model_validate(router)


def is_causal(router: dict[str, Any]) -> bool:
    return config_of(router).unsupported(UseCase(causal=True)) is None


def build_layer(router: dict[str, Any], seed: int = 0, backend: str = "auto") -> MoEFFN:
    torch.manual_seed(seed)
    experts = {"type": "swiglu", "d_ff": 8, "backend": backend}
    layer = build_ffn(
        {"type": "moe", "num_experts": NUM_EXPERTS, "router": router, "experts": experts}, D_MODEL
    )
    assert isinstance(layer, MoEFFN)
    decide(layer.router)
    return layer


@torch.no_grad()
def decide(router: Router) -> None:
    """Make a router decided and lopsided, as one step of training might."""
    for parameter in router.parameters():
        parameter.mul_(3)
    if isinstance(router, ExpertThresholdRouter):
        router.threshold_E.copy_(torch.linspace(-0.3, 0.3, len(router.threshold_E)))
        router.num_updates_E.fill_(1)


@dataclass(frozen=True)
class Batch:
    """Tokens, and what a router may know of them."""

    x_BSD: Tensor
    token_ids_BS: Tensor
    mask_BS: Tensor | None = None

    @property
    def context(self) -> TokenContext:
        return TokenContext(mask=self.mask_BS, token_ids=self.token_ids_BS)


def make_batch(
    batch: int = BATCH, length: int = LENGTH, seed: int = 0, mask: Tensor | None = None
) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x_BSD = torch.randn(batch, length, D_MODEL, generator=generator)
    token_ids_BS = torch.randint(1000, (batch, length), generator=generator)
    return Batch(x_BSD, token_ids_BS, mask)


def padded_mask() -> Tensor:
    """Three tokens of padding on the right of one sequence, two on the left of the other."""
    mask_BS = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    mask_BS[0, 5:] = False
    mask_BS[1, :2] = False
    return mask_BS


def route_batch(router: Router, batch: Batch, seed: int = 0) -> Routing:
    """Route a batch with torch's generator in a known state."""
    x_TD, context = flatten_tokens(batch.x_BSD, batch.context)
    torch.manual_seed(seed)
    return router(x_TD, context)


def call_layer(layer: MoEFFN, batch: Batch, seed: int = 0) -> tuple[FFNOutput, Routing]:
    torch.manual_seed(seed)
    output = layer(batch.x_BSD, batch.context)
    assert output.routing is not None
    return output, output.routing


def pairs_by_token(routing: Routing) -> list[dict[int, float]]:
    """Return the real experts of each token, and their weights."""
    found: list[dict[int, float]] = []
    for pairs in real_pairs(routing):
        token: dict[int, float] = {}
        for expert, weight in pairs:
            token[expert] = token.get(expert, 0) + weight
        # The heads of a query may choose the same one.
        assert isinstance(routing, PairsOnlyRouting) or len(token) == len(pairs), "listed twice"
        found.append(token)
    return found


def check_well_formed(routing: Routing, num_tokens: int, num_experts: int = NUM_EXPERTS) -> None:
    """Check the invariants of every Routing."""
    (num_pairs,) = routing.token_indices_N.shape
    for name in ("token_indices_N", "expert_ids_N"):
        assert getattr(routing, name).dtype == torch.int64, name
    for name in ("expert_ids_N", "weights_N", "dropped_N", "active_N"):
        assert getattr(routing, name).shape == (num_pairs,), name
    assert routing.dropped_N.dtype == routing.active_N.dtype == torch.bool
    assert not routing.dropped_N.any()
    shapes = {name: tuple(tensor.shape) for name, tensor in scores_of(routing).items()}
    table = (num_tokens, num_experts)
    assert shapes in ({"logits_TE": table, "scores_TE": table}, {"logits_N": (num_pairs,)})
    assert (routing.token_indices_N.diff() >= 0).all()
    if isinstance(routing, PairsOnlyRouting):
        k = routing.pairs_per_token
        assert routing.token_indices_N.tolist() == [t for t in range(num_tokens) for _ in range(k)]
    assert ((routing.token_indices_N >= 0) & (routing.token_indices_N < num_tokens)).all()
    assert ((routing.expert_ids_N >= 0) & (routing.expert_ids_N < num_experts)).all()
    assert routing.weights_N.isfinite().all()
    assert (routing.weights_N >= 0).all()
    assert routing.scores_TE is None or (routing.scores_TE >= 0).all()
    pairs_by_token(routing)


def scores_of(routing: Routing) -> dict[str, Tensor]:
    """Tables of logits and scores, or the logits of listed pairs."""
    found = {n: getattr(routing, n, None) for n in ("logits_TE", "scores_TE", "logits_N")}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


# -- routers on given logits, and routings as plain Python


def identity_router(config: RouterConfig, num_experts: int) -> Router:
    """Build a router in evaluation mode whose logits are its input, since its projection is the identity."""
    router = config.build(num_experts, num_experts)
    with torch.no_grad():
        router.get_parameter("projection.weight").copy_(torch.eye(num_experts))
    return router.eval()


def route(
    config: RouterConfig,
    logits_TE: Tensor,
    *,
    mask: Tensor | None = None,
    sequence_length: int | None = None,
    training: bool = False,
    bias: list[float] | None = None,
) -> Routing:
    router = identity_router(config, logits_TE.shape[-1]).train(training)
    if bias is not None:
        assert router.correction_bias_E is not None
        router.correction_bias_E.copy_(torch.tensor(bias))
    return router(logits_TE, TokenContext(mask=mask, sequence_length=sequence_length))


def real_pairs(routing: Routing) -> list[list[tuple[int, float]]]:
    """Return the real (expert, weight) pairs of each token, in their order."""
    pairs: list[list[tuple[int, float]]] = [[] for _ in range(routing.num_tokens)]
    for token, expert, weight, real in zip(
        routing.token_indices_N.tolist(),
        routing.expert_ids_N.tolist(),
        routing.weights_N.tolist(),
        routing.active_N.tolist(),
        strict=True,
    ):
        if real:
            pairs[token].append((expert, weight))
    return pairs


def experts_of(routing: Routing) -> list[list[int]]:
    """Return the experts of each token's real pairs, in their order."""
    return [[expert for expert, _ in pairs] for pairs in real_pairs(routing)]


def load_of(routing: Routing) -> list[int]:
    return routing.expert_ids_N[routing.active_N].bincount(minlength=routing.num_experts).tolist()


def random_logits(num_tokens: int, num_experts: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """float64, so that a re-computation in Python floats agrees to rounding."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(num_tokens, num_experts, generator=generator, dtype=torch.float64)
