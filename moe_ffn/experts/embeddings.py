"""Experts that are rows of embedding tables: single neurons (PEER), and values (product-key memories).

T tokens, D model width, E experts, N (token, expert) pairs
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from moe_ffn.config.errors import Unsupported, UseCase
from moe_ffn.config.process_memory import require_table_memory
from moe_ffn.config.sizes import linear_flops
from moe_ffn.experts.base import Experts, ExpertsConfig
from moe_ffn.kernels.activations import ACTIVATIONS, Activation
from moe_ffn.kernels.base import check_dtype, without_autocast
from moe_ffn.outputs import Plan


class EmbeddingExpertsConfig(ExpertsConfig, frozen=True):
    """Experts of one or two vectors each, for the router `product_key`, which chooses among very many.

    A token reads only the rows of its own experts. Gradients are dense and as large as the tables, because
    the optimizers here do not support sparse gradients. Like other embeddings, the tables have no weight
    decay, and AdamW updates them if the optimizer is Muon.
    """

    num_tables: ClassVar[int]

    def params_per_expert(self, d_model: int, experts_per_token: float) -> int:
        return self.num_tables * d_model

    def flops_per_pair(self, d_model: int, experts_per_token: float) -> int:
        return self.num_tables * linear_flops(d_model, 1)

    def unsupported(self, use_case: UseCase) -> Unsupported | None:
        if use_case.num_ranks == 1:
            return None
        return Unsupported(
            f"type '{self.type}' looks up table rows for each token, and cannot compute the tokens of "
            "other ranks",
            "set parallel.expert to 1; parallel.shard divides the tables",
        )


class EmbeddingExperts(Experts):
    """Experts that are table rows, looked up for each pair."""

    are_embeddings: bool = True
    config: Any

    def __init__(self, config: EmbeddingExpertsConfig, d_model: int, num_experts: int) -> None:
        super().__init__()
        require_table_memory(
            num_experts * config.num_tables,
            d_model,
            f"num_experts ({num_experts}): experts of type '{config.type}' and width {d_model}",
            "lower num_experts or d_model",
        )
        self.config = config

    def extra_repr(self) -> str:
        return f"activation={self.config.activation}" if self.config.reads_input else ""


class SingleNeuronExpertsConfig(EmbeddingExpertsConfig, frozen=True):
    """PEER's experts of one hidden unit, e_i(x) = act(u_i . x) v_i.

    He 2024, "Mixture of A Million Experts" (arXiv:2407.04153), section 2. In the paper, 8 queries per token
    choose 16 of 1,024^2 experts each; at 6e18 and 2e19 FLOPs this beats dense blocks and larger experts.
    """

    num_tables: ClassVar[int] = 2

    type: Literal["single_neuron"] = "single_neuron"
    activation: Activation = "gelu"
    """Activation function of the hidden unit."""

    def build(self, d_model: int, num_experts: int, experts_per_token: float) -> Experts:
        return SingleNeuronExperts(self, d_model, num_experts, experts_per_token)


class SingleNeuronExperts(EmbeddingExperts):
    """y_t = sum over the pairs (t, i) of weight * act(up_i . x_t) * down_i; `up` and `down` are (E, D)."""

    def __init__(
        self,
        config: SingleNeuronExpertsConfig,
        d_model: int,
        num_experts: int,
        experts_per_token: float,
    ) -> None:
        super().__init__(config, d_model, num_experts)
        # Initialise like one network whose width is the number of experts per token.
        self.up = _table(num_experts, d_model, bound=d_model**-0.5)
        self.down = _table(num_experts, d_model, bound=experts_per_token**-0.5)

    def forward(self, x_TD: Tensor, plan: Plan) -> Tensor:
        check_dtype(x_TD, self.up.weight)
        ids_N = expert_of_each_pair(plan, self.up.num_embeddings)
        hidden_N = dot_with_token(self.up(ids_N), plan, x_TD)
        weights_N = plan.weights_N * ACTIVATIONS[self.config.activation](hidden_N)
        return weighted_sum(self.down(ids_N), weights_N, plan, x_TD)


class ValueExpertsConfig(EmbeddingExpertsConfig, frozen=True):
    """Values of a product-key memory: e_i(x) = v_i, independent of x.

    Lample et al. 2019, "Large Memory Layers with Product Keys" (arXiv:1907.05242), section 3.1.
    """

    num_tables: ClassVar[int] = 1
    reads_input: ClassVar[bool] = False

    type: Literal["value"] = "value"

    def build(self, d_model: int, num_experts: int, experts_per_token: float) -> Experts:
        return ValueExperts(self, d_model, num_experts)


class ValueExperts(EmbeddingExperts):
    """y_t = sum over the pairs (t, i) of weight * values_i; `values` is (E, D), drawn from N(0, 1 / D)."""

    def __init__(self, config: ValueExpertsConfig, d_model: int, num_experts: int) -> None:
        super().__init__(config, d_model, num_experts)
        self.values = _table(num_experts, d_model, std=d_model**-0.5)

    def forward(self, x_TD: Tensor, plan: Plan) -> Tensor:
        check_dtype(x_TD, self.values.weight)
        ids_N = expert_of_each_pair(plan, self.values.num_embeddings)
        return weighted_sum(self.values(ids_N), plan.weights_N, plan, x_TD)


def expert_of_each_pair(plan: Plan, num_experts: int) -> Tensor:
    """Return int64 (N,), the expert of each pair of a sorted or an unsorted plan."""
    if plan.expert_ids_N is not None:
        return plan.expert_ids_N
    ranks_N = torch.arange(len(plan.token_indices_N), device=plan.token_indices_N.device)
    ids_N = torch.searchsorted(plan.offsets_E.long(), ranks_N, right=True)
    return ids_N.clamp(max=num_experts - 1)  # for pairs after the last offset, which have weight 0


def dot_with_token(rows_ND: Tensor, plan: Plan, x_TD: Tensor) -> Tensor:
    """Return (N,), the dot product of each pair's row with its token."""
    if plan.pairs_per_token is not None:  # avoids one copy of the token per pair
        rows_TKD = rows_ND.unflatten(0, (-1, plan.pairs_per_token))
        return torch.einsum("tkd,td->tk", rows_TKD, x_TD).flatten()
    return torch.einsum("nd,nd->n", rows_ND, x_TD.index_select(0, plan.token_indices_N))


def weighted_sum(rows_ND: Tensor, weights_N: Tensor, plan: Plan, x_TD: Tensor) -> Tensor:
    """Return (T, D), the weighted sum of each token's rows, computed in at least float32, like `x_TD`."""
    rows_ND = rows_ND.to(weights_N.dtype)
    with without_autocast(x_TD):
        if plan.pairs_per_token is not None:
            # Not `len(x_TD)`: torch.export would fix the number of tokens.
            table = (-1, plan.pairs_per_token)
            rows_TKD, weights_TK = rows_ND.unflatten(0, table), weights_N.unflatten(0, table)
            return torch.einsum("tk,tkd->td", weights_TK, rows_TKD).to(x_TD.dtype)
        weighted_ND = (weights_N[:, None, None] @ rows_ND.unsqueeze(1)).squeeze(1)
    sums_TD = torch.zeros(x_TD.shape, dtype=weights_N.dtype, device=x_TD.device)
    return sums_TD.index_add(0, plan.token_indices_N, weighted_ND).to(x_TD.dtype)


def _table(num_experts: int, d_model: int, *, bound: float = 0.0, std: float = 0.0) -> nn.Embedding:
    """Return a table (E, D) drawn from U(-bound, bound), or from N(0, std^2) if `std` is given."""
    table = nn.Embedding(num_experts, d_model, _weight=torch.empty(num_experts, d_model))
    with torch.no_grad():
        _ = table.weight.normal_(std=std) if std else table.weight.uniform_(-bound, bound)
    return table
