"""The values that blocks return: their names, trees and graphs, and a Routing without tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ffn import FFNOutput, Router, TokenContext, build_ffn, routing_of_pairs
from moe_ffn.balancing.bias_rules import (
    GlobalQuantileRuleConfig,
    QuantileRuleConfig,
    SignRuleConfig,
)
from moe_ffn.balancing.losses import (
    global_load_balancing_loss,
    importance_cv2_loss,
    load_balancing_loss,
    pairs_per_expert,
    pairs_per_sequence,
    pooled_load_balancing_loss,
    relu_sparsity_loss,
    router_entropy_loss,
    router_z_loss,
    sequence_load_balancing_loss,
)
from moe_ffn.metrics.functional import chosen_experts, logit_max, nonfinite_tokens
from moe_ffn.outputs import Routing
from moe_ffn.report.trace import visits_of

D_MODEL = 8


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, D_MODEL, generator=torch.Generator().manual_seed(0))


# ------------------------------------------------------------------------------------- routings


def test_a_routing_without_a_name_is_rejected() -> None:
    routing = build_ffn("moe", D_MODEL)(tokens(2, 6)).routing
    wrong: Any = routing
    with pytest.raises(TypeError, match=r"routings is a mapping; use \{'routing': routing\}"):
        FFNOutput(tokens(2, 6), wrong)


@pytest.mark.filterwarnings("ignore")  # what torch's own tracing warns of
def test_a_compiled_caller_reads_the_routing() -> None:
    block, x = build_ffn("moe", D_MODEL), tokens(2, 6)

    def weights(x: Tensor) -> Tensor:
        routing = block(x).routing
        assert routing is not None
        return routing.weights_N

    torch.testing.assert_close(torch.compile(weights, backend="eager")(x), weights(x))


# ------------------------------------------------------------------------------- without tables


@pytest.fixture
def tableless(make_routing: Callable[..., Routing]) -> Routing:
    """Routing of a router that has too many experts for a table."""
    routing = make_routing([[0, 1], [2, 1], [0, 3]], 4, target_k=1.0)
    return replace(routing, logits_TE=None, scores_TE=None)


NEEDING: dict[str, tuple[str, Callable[[Routing], object]]] = {
    "load_balance_pooled": ("scores_TE", lambda r: pooled_load_balancing_loss([r, r])),
    "load_balance_global": (
        "scores_TE",
        lambda r: global_load_balancing_loss(r, pairs_per_expert(r), r.num_real_tokens),
    ),
    "load_balance": ("scores_TE", load_balancing_loss),
    "load_balance_sequence": ("scores_TE", sequence_load_balancing_loss),
    "router_entropy": ("scores_TE", router_entropy_loss),
    "router_z": ("logits_TE", router_z_loss),
    "relu_sparsity": ("scores_TE", relu_sparsity_loss),
    "objective.bias_rule 'quantile'": (
        "scores_TE",
        lambda r: QuantileRuleConfig().observe(r, torch.zeros(4)),
    ),
    "objective.bias_rule 'global_quantile'": (
        "scores_TE",
        lambda r: GlobalQuantileRuleConfig().observe(r, torch.zeros(4)),
    ),
    "logit_max": ("logits_TE", logit_max),
    "nonfinite_tokens": ("logits_TE", nonfinite_tokens),
    "a trace": ("scores_TE", visits_of),
}


@pytest.mark.parametrize("name", NEEDING)
def test_functions_that_need_a_table_name_it(tableless: Routing, name: str) -> None:
    table, use = NEEDING[name]
    with pytest.raises(ValueError, match=r"^.+$") as rejected:
        use(tableless)
    assert str(rejected.value) == (
        f"{name} needs {table}, a number for each expert and token, which this router does not return for "
        "its 4 experts"
    )


def test_counting_pairs_needs_no_table(tableless: Routing) -> None:
    assert repr(tableless) == (
        "SparsityTargetRouting(num_tokens=3, sequence_length=3, num_experts=4, num_pairs=6, dropped=0.0%, "
        "float32 on cpu)"
    )
    assert pairs_per_expert(tableless).tolist() == [2, 2, 1, 1]
    assert pairs_per_sequence(tableless).tolist() == [[2, 2, 1, 1]]
    assert chosen_experts(tableless).sum() == 6
    assert importance_cv2_loss(tableless) > 0
    assert SignRuleConfig().observe(tableless, torch.zeros(4)).tolist() == [2, 2, 1, 1]


class Tableless(Router):
    """Router of every token to expert 1, without tables."""

    def forward(self, x_TD: Tensor, context: TokenContext) -> Routing:
        ids_T1 = torch.ones(len(x_TD), 1, dtype=torch.int64)
        weights_T1 = torch.ones(len(x_TD), 1)
        return routing_of_pairs(weights_T1, ids_T1, None, None, context, num_experts=4)


def test_a_layer_works_without_tables() -> None:
    config = {"type": "moe", "num_experts": 4, "capacity": {"factor": 2.0}}
    layer: Any = build_ffn(config, D_MODEL)
    layer.router = Tableless()
    output = layer(tokens(2, 6))
    assert layer.capacity.expert_capacity(output.routing, training=True) == 6  # ceil(2 * 12 / 4)
    assert (output.hidden.flatten(0, 1).abs().sum(dim=-1) > 0).sum() == 6


def test_the_number_of_experts_is_asked_for_where_no_table_has_it() -> None:
    ids = torch.zeros(3, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="routing_of_pairs without logits_TE needs num_experts"):
        routing_of_pairs(torch.ones(3, 1), ids, None, None, TokenContext())


def test_a_router_that_lists_its_pairs_in_another_shape_gets_both_shapes() -> None:
    scores_TE = torch.ones(3, 4)
    largest_T, ids_T = scores_TE.max(dim=-1)
    with pytest.raises(ValueError, match=r"of one shape \(T, K\), but got \(3,\) and \(3,\)$"):
        routing_of_pairs(largest_T, ids_T, scores_TE, scores_TE, TokenContext())
    with pytest.raises(ValueError, match=r"of one shape \(T, K\), but got \(3, 4\) and \(3, 1\)$"):
        routing_of_pairs(scores_TE, ids_T[:, None], scores_TE, scores_TE, TokenContext())


def test_an_output_used_as_a_tensor_names_hidden() -> None:
    x, ffn = torch.zeros(2, 3, 8), build_ffn("swiglu", d_model=8)
    uses: list[Callable[[Any], Any]] = [
        lambda output: x + output,
        lambda output: output + x,
        lambda output: output + ffn(x),
        torch.nn.functional.dropout,
        torch.nn.LayerNorm(8),
        lambda output: torch.cat([x, output]),
    ]
    for use in uses:
        with pytest.raises(
            TypeError, match=r"is not a tensor; use its \.hidden, as in x \+ ffn\(x\)\.hidden$"
        ):
            use(ffn(x))
