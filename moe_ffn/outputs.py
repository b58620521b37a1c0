"""Inputs and outputs of every feed-forward block, as frozen dataclasses registered as pytrees.

T tokens (batch and sequence flattened), E experts, N (token, expert) pairs, S sequence length
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NoReturn, Protocol, Self

import torch
from torch import Tensor, nn

from moe_ffn import notebook_cards


def summarize(value: Any) -> str:
    """Describe a dataclass on one line, without None or values: `TokenContext(mask=bool[2, 16] on cpu)`."""
    items = ((field.name, getattr(value, field.name)) for field in fields(value))
    shown = (f"{name}={brief(item)}" for name, item in items if item is not None)
    return f"{type(value).__name__}({', '.join(shown)})"


def brief(value: object) -> str:
    """Return `float32[2, 16, 64] on cpu` for a tensor, `repr` for anything else."""
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{dtype_name(value.dtype)}{list(value.shape)} on {value.device}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_DTYPES = {
    "mask": ((torch.bool,), "bool, True for real tokens", "bool"),
    "token_ids": (_INTEGERS, "integers", "long"),
    "expert_ids": ((torch.int64,), "int64", "long"),
}
"""Field of a context -> valid dtypes, their description, and the tensor method that converts to them."""


class TokenHistory(Protocol):
    """Values of earlier tokens, which a decoder stores to compute only the new ones; see `KVCache`."""

    def window(self, owner: nn.Module, new: Tensor, reach: int) -> Tensor:
        """Return the values of the previous `reach` tokens followed by `new` (B, S, ...), and store these:
        (B, reach + S, ...), zero before the first token. Each call of a module `owner` in a pass has its own
        buffer.
        """
        ...


@dataclass(frozen=True)
class TokenContext:
    """Padding mask, token ids and other inputs that some blocks need besides the vectors."""

    mask: Tensor | None = None
    """bool, the leading shape of `x`: True for real tokens, False for padding. Routing, counts and losses
    ignore padding. None: every token is real."""

    token_ids: Tensor | None = None
    """Vocabulary ids, integers of the leading shape of `x`; None when unknown."""

    sequence_length: int | None = None
    """S, for an `x` with flattened batch and sequence axes (token t has position t % S). None: the last
    leading axis of `x`."""

    expert_ids: Tensor | None = None
    """int64, the leading shape of `x`, then K: experts of each token, for routers with `replays`. None:
    routers choose."""

    history: TokenHistory | None = None
    """Values of earlier tokens, if `x` (B, S, d_model) continues sequences. None: sequences start in `x`."""

    def __repr__(self) -> str:
        return summarize(self)

    def __post_init__(self) -> None:
        # `check_input` rejects other types: torch rebuilds contexts from placeholder objects.
        for name, (dtypes, description, method) in _DTYPES.items():
            value = getattr(self, name)
            if isinstance(value, Tensor) and value.dtype not in dtypes:
                raise ValueError(
                    f"TokenContext.{name} must be {description}, but is {value.dtype}; "
                    f"use {name}.{method}()"
                )
        if isinstance(self.sequence_length, bool):
            raise TypeError("TokenContext.sequence_length must be an int, but is of type bool")
        if isinstance(self.sequence_length, int) and self.sequence_length < 1:
            raise ValueError(
                f"TokenContext.sequence_length must be at least 1, but is {self.sequence_length}; "
                "leave it out if x is (batch, seq, d_model)"
            )


@dataclass(frozen=True)
class Routing:
    """The experts of each token as N weighted (token, expert) pairs, and the scores of the router.

    Pairs are in token-major order. Only weights, logits, scores and probabilities carry gradients. A router
    with further outputs returns a subclass, such as `NoisyRouting`.

    Five masks sort the pairs:

        selected_N     chosen by the router; a VariableKRouting lists other pairs too
        active_N       chosen for a real token, so counted in the load
        dropped_N      beyond the capacity of their expert
        computed_N     active and not dropped: an expert computes them
        uncomputed_N   all other pairs
    """

    token_indices_N: Tensor
    """int64, the token of each pair, in [0, T)."""

    expert_ids_N: Tensor
    """int64, the expert of each pair, in [0, E)."""

    weights_N: Tensor
    """float32 (or wider), the factor that multiplies the expert's output."""

    dropped_N: Tensor
    """bool, True for pairs that exceed the capacity of their expert; they are not computed."""

    num_tokens: int
    """T, including padding."""

    num_experts: int
    """E, including experts without a network."""

    sequence_length: int
    """S; the position of token t in its sequence is t % S."""

    mask_T: Tensor | None = None
    """bool, True for real tokens; None if all are real. Padding has pairs too, so that shapes do not depend
    on the data, but they are neither computed nor counted."""

    logits_TE: Tensor | None = None
    """float32 (or wider), the router's scores before any normalisation. None if there are too many experts
    for a (T, E) table; see `PairsOnlyRouting`."""

    scores_TE: Tensor | None = None
    """float32 (or wider), the normalised scores, non-negative. None if `logits_TE` is None."""

    def __repr__(self) -> str:
        """One line of sizes and, if the tensors have values (not on `meta`, not in a trace), of counts."""
        if not isinstance(self.token_indices_N, Tensor) or not isinstance(self.weights_N, Tensor):
            return summarize(self)
        parts = [
            f"num_tokens={self.num_tokens}",
            f"sequence_length={self.sequence_length}",
            f"num_experts={self.num_experts}",
            f"num_pairs={len(self.token_indices_N)}",
        ]
        with suppress(RuntimeError):  # a fake tensor, or one on the meta device, has no values
            if self.mask_T is not None:
                parts.append(f"num_real_tokens={int(self.num_real_tokens)}")
            num_real = int(self.active_N.sum())
            if num_real < len(self.token_indices_N):
                parts.append(f"num_real_pairs={num_real}")
            share = int((self.dropped_N & self.active_N).sum()) / max(num_real, 1)
            parts.append(f"dropped={share:.1%}")
        parts.append(f"{dtype_name(self.weights_N.dtype)} on {self.weights_N.device}")
        return f"{type(self).__name__}({', '.join(parts)})"

    def _repr_html_(self) -> str | None:
        """Experts of the first tokens and load of each expert, drawn for a notebook; None without values."""
        try:
            active_N = self.active_N
            shown_N = active_N & (self.token_indices_N < notebook_cards.MAX_TOKENS)
            columns = (self.token_indices_N, self.expert_ids_N, self.weights_N, self.dropped_N)
            pairs = list(zip(*(column[shown_N].tolist() for column in columns), strict=True))
            counts_E = torch.bincount(self.expert_ids_N[active_N], minlength=self.num_experts)
            load_E = (counts_E / counts_E.sum().clamp(min=1)).tolist()
            dropped = int((self.dropped_N & active_N).sum())
        except RuntimeError:  # a fake tensor, or one on the meta device, has no values
            return None
        facts = {
            "tokens": f"{self.num_tokens:,}",
            "experts": f"{self.num_experts:,}",
            "pairs": f"{int(counts_E.sum()):,}",
            "dropped": f"{dropped:,}",
        }
        drawing = notebook_cards.routing_map(pairs, load_E)
        return notebook_cards.card(type(self).__name__, facts, drawing)

    @property
    def num_real_tokens(self) -> Tensor:
        """int64 scalar, the number of tokens without padding."""
        if self.mask_T is None:
            return torch.tensor(self.num_tokens, device=self.token_indices_N.device)
        return self.mask_T.sum()

    @property
    def active_N(self) -> Tensor:
        """bool, True for the pairs that the router chose for real tokens."""
        if self.mask_T is None:
            return torch.ones_like(self.dropped_N)
        return self.mask_T[self.token_indices_N]

    @property
    def computed_N(self) -> Tensor:
        """bool, True for the pairs that an expert computes: real and not dropped."""
        return ~self.uncomputed_N

    @property
    def uncomputed_N(self) -> Tensor:
        """bool, True for the pairs that no expert computes: dropped, padding, or not chosen."""
        return self.dropped_N if self.mask_T is None else self.dropped_N | ~self.active_N

    @property
    def num_choices(self) -> int:
        """Number of experts that a token may choose; others process every token."""
        return self.num_experts

    def choices(self) -> Self:
        """Return the routing to the chosen experts, without experts that process every token."""
        return self

    def require(self, name: Literal["logits_TE", "scores_TE"], needed_by: str) -> Tensor:
        """Return `logits_TE` or `scores_TE`; ValueError, naming the loss or metric, if there is none."""
        table_TE = getattr(self, name)
        if table_TE is None:
            raise ValueError(
                f"{needed_by} needs {name}, a number for each expert and token, which this router does "
                f"not return for its {self.num_experts} experts"
            )
        return table_TE

    def detach(self) -> Self:
        """Return a copy with detached tensors, which metrics may store."""
        tensors = {
            field.name: value.detach()
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **tensors)


@dataclass(frozen=True, kw_only=True, repr=False)
class VariableKRouting(Routing):
    """Routing whose experts per token depend on the data; lists the maximum, for constant shapes."""

    selected_N: Tensor
    """bool, False for listed pairs that the router did not choose."""

    capacity_k: float | None = None
    """Experts per token to assume when capacities are computed. The actual count depends on later tokens, so
    a causal router sets a fixed number here. None: use the actual count."""

    @property
    def active_N(self) -> Tensor:
        if self.mask_T is None:
            return self.selected_N
        # Not `super().active_N`, a property that torch.compile cannot trace.
        return self.selected_N & self.mask_T[self.token_indices_N]

    @property
    def uncomputed_N(self) -> Tensor:
        return self.dropped_N | ~self.active_N


@dataclass(frozen=True, kw_only=True, repr=False)
class AlwaysRouting(VariableKRouting):
    """Routing whose last experts process every token, besides the chosen ones. These have no capacity, and no
    rule or loss balances them.
    """

    num_always: int
    """Number of the last experts that process every token."""

    @property
    def num_choices(self) -> int:
        return self.num_experts - self.num_always

    def choices(self) -> Self:
        num_experts, num_listed = self.num_choices, self.expert_ids_N.shape[0]
        k = num_listed // max(self.num_tokens, 1)
        is_always_TK = (self.expert_ids_N >= num_experts).view(self.num_tokens, k)
        # Replayed experts may come in any order. A sort keeps shapes independent of the data.
        order_TK = is_always_TK.to(torch.uint8).argsort(dim=1, stable=True)
        chosen_TK = order_TK[:, : k - self.num_always]
        parts = {
            field.name: value[:, :num_experts]
            if field.name.endswith("_TE")
            else value.reshape(self.num_tokens, k).gather(1, chosen_TK).flatten()
            for field in fields(self)
            if field.name.endswith(("_N", "_TE"))
            and isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **parts, num_experts=num_experts, num_always=0)


@dataclass(frozen=True, kw_only=True, repr=False)
class SparsityTargetRouting(VariableKRouting):
    """Routing of a router whose mean number of experts per token a rule controls (ReLU routing)."""

    target_k: float
    """Experts per token that the sparsity rule aims for."""


@dataclass(frozen=True, kw_only=True, repr=False)
class NoisyRouting(Routing):
    """Routing chosen with noise (noisy top-k in training)."""

    selection_probs_TE: Tensor
    """Probability, over the router's noise, that each expert is among a token's k experts."""


@dataclass(frozen=True, kw_only=True, repr=False)
class PairsOnlyRouting(Routing):
    """Routing with too many experts for (T, E) tables (product keys); losses use the listed pairs."""

    logits_N: Tensor
    """float32 (or wider), the score of each pair before any normalisation."""

    pairs_per_token: int
    """K, the number of pairs of every token; the list is a flattened (T, K) table."""


@dataclass(frozen=True)
class Plan:
    """The (token, expert) pairs to compute, with the input row and the weight of each.

    Pairs are sorted by expert, except in a plan of `dispatch.unsorted_plan`. Pairs that are not computed
    (dropped, or padding) follow `offsets_E[-1]` with weight 0, so that shapes do not depend on the data.
    """

    token_indices_N: Tensor
    """int64, the row of `x_TD` that each pair reads, and the row of the output to which it adds."""

    weights_N: Tensor
    """Factor of each result; carries the router's gradient."""

    offsets_E: Tensor
    """int32, the end of each expert's pairs."""

    pair_ids_N: Tensor
    """int64, the index of each pair in the routing, which is sorted by token."""

    expert_ids_N: Tensor | None = None
    """int64, the expert of each pair, in an `unsorted_plan`; None in a sorted plan, which has `offsets_E`."""

    pairs_per_token: int | None = None
    """K, if an `unsorted_plan` has exactly K pairs for every row of `x_TD`, in row order; otherwise None."""

    def __repr__(self) -> str:
        return summarize(self)


_NOT_A_TENSOR = (
    "a block returns an FFNOutput, which is not a tensor; use its .hidden, as in x + ffn(x).hidden"
)


@dataclass(frozen=True)
class FFNOutput:
    """Output of every feed-forward block."""

    hidden: Tensor
    """The output, with the shape and dtype of the block's input."""

    routings: dict[str, Routing] = field(default_factory=dict)
    """Routings by name: `routing` for the block's own router, `inner` for a sparse block inside a mixture of
    depths, `round_2` and so on for later rounds of a chain of experts. Empty for a dense block."""

    shared_shares: dict[str, Tensor] = field(default_factory=dict)
    """Routing name -> the shared expert's fraction of the output, a scalar in [0, 1]; see
    `ffn.shared_expert.share_of_norms`."""

    def __post_init__(self) -> None:
        if isinstance(self.routings, Routing):
            raise TypeError("FFNOutput.routings is a mapping; use {'routing': routing}")

    @property
    def routing(self) -> Routing | None:
        """The first routing; None for a block without a router."""
        return next(iter(self.routings.values()), None)

    def __repr__(self) -> str:
        routings = (f"{name}={brief(routing)}" for name, routing in self.routings.items())
        lines = ",\n    ".join([f"hidden={brief(self.hidden)}", *routings])
        return f"{type(self).__name__}({lines})"

    def _repr_html_(self) -> str:
        """Shape of `hidden` and a drawing of each routing, for a notebook."""
        parts: list[str] = []
        for name, routing in self.routings.items():
            parts += [
                notebook_cards.note(name),
                routing._repr_html_() or notebook_cards.note(repr(routing)),
            ]
        return notebook_cards.card(type(self).__name__, {"hidden": brief(self.hidden)}, *parts)

    def __add__(self, other: object) -> NoReturn:
        raise TypeError(_NOT_A_TENSOR)

    __radd__ = __add__

    @classmethod
    def __torch_function__(cls, *args: object) -> NoReturn:
        """Raise; torch calls this method if an output is passed to a torch function."""
        raise TypeError(_NOT_A_TENSOR)


for _value in (
    TokenContext,
    Routing,
    VariableKRouting,
    AlwaysRouting,
    SparsityTargetRouting,
    NoisyRouting,
    PairsOnlyRouting,
    Plan,
    FFNOutput,
):
    torch.export.register_dataclass(_value, serialized_type_name=f"moe_ffn.{_value.__name__}")
