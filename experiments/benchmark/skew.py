"""The same tokens spread over the experts in three ways; k = 1, so that one expert can have them all.

T tokens, D model width, E experts
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from experiments.benchmark.layers import AUTO, Case, Layer, moe_layer, our_layers
from experiments.benchmark.report import duration, ratio, spread, table, times
from experiments.benchmark.session import Session
from experiments.benchmark.shapes import Shape
from experiments.benchmark.timing import Timed
from moe_ffn.outputs import Routing, TokenContext
from moe_ffn.routing import TopKRouterConfig
from moe_ffn.routing.base import LinearRouter, routing_of_pairs

SHAPE = Shape(8192, 256, 512, 8, 1, "fp32")

LOADS = {
    "balanced": [1.0] * SHAPE.num_experts,
    "zipf": [1 / rank for rank in range(1, SHAPE.num_experts + 1)],
    "one hot": [1.0] + [0.0] * (SHAPE.num_experts - 1),
}
"""Name -> how much of the tokens each expert gets, in proportion."""


class LoadRouter(LinearRouter):
    """Sends given shares of the tokens to the experts, in a random order; weights are learned as ever."""

    def __init__(self, shape: Shape, shares_E: Sequence[float]) -> None:
        super().__init__(TopKRouterConfig(k=1), shape.d_model, shape.num_experts)
        generator = torch.Generator().manual_seed(2)
        ends_E = torch.tensor(shares_E).cumsum(0) / sum(shares_E)
        places_T = (torch.randperm(shape.num_tokens, generator=generator) + 0.5) / shape.num_tokens
        expert_ids_T = torch.searchsorted(ends_E, places_T).clamp(max=shape.num_experts - 1)
        self.register_buffer("expert_ids_TK", expert_ids_T.unsqueeze(-1), persistent=False)

    expert_ids_TK: Tensor

    def forward(self, x_TD: Tensor, context: TokenContext) -> Routing:
        logits_TE = self.logits(x_TD)
        scores_TE = logits_TE.softmax(dim=-1)
        weights_TK = scores_TE.gather(-1, self.expert_ids_TK)
        return routing_of_pairs(weights_TK, self.expert_ids_TK, logits_TE, scores_TE, context)


def run(session: Session) -> None:
    session.say(f"{SHAPE}, tokens spread in three ways, forward and backward")
    torch.manual_seed(0)
    candidates: dict[str, Timed] = {}
    layers: dict[str, list[Layer]] = {}
    for load, shares_E in LOADS.items():
        source = moe_layer(SHAPE, "loop", session.device)
        source.router = LoadRouter(SHAPE, shares_E).to(session.device)
        case = Case.of(SHAPE, source, session.device)
        layers[load] = our_layers(case, session.backends, session.skip)
        for layer in layers[load]:
            candidates[f"{layer.name} {load}"] = layer.training_pass(case.tokens)
    timings = session.time(candidates)
    rows: list[list[str]] = []
    for load in LOADS:
        session.keep("skew", load, SHAPE, layers[load], timings, to=AUTO, label=f" {load}")
        for layer in layers[load]:
            timing = timings[f"{layer.name} {load}"]
            to_balanced = ratio(timings, f"{layer.name} {load}", f"{layer.name} balanced")
            median = duration(timing.median)
            rows.append(
                [layer.name, load, median, spread(timing), times(to_balanced), layer.computes]
            )
    headers = ["layer", "load", "median", "quartiles", "/ balanced", "computes"]
    session.say(table(headers, sorted(rows, key=lambda row: row[0])))
    pair = (f"{AUTO} one hot", f"{AUTO} balanced")
    claim = "time on one expert / balanced"
    session.promise_ratio("skew", "", claim, 1.0, timings, pair)
