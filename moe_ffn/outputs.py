"""Values that every feed-forward block reads and returns: frozen, and pytrees to torch.

T tokens (batch and sequence flattened), E experts, N (token, expert) pairs, S sequence length
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NoReturn, Protocol, Self

import torch
from torch import Tensor, nn


def summarize(value: Any) -> str:
    """One line for a frozen value: `TokenContext(mask=bool[2, 16] on cpu)`. Tensors are named by dtype, shape
    and device, and what is None is left out. It reads no tensor.
    """
    items = [(field.name, getattr(value, field.name)) for field in fields(value)]
    parts = [f"{name}={brief(item)}" for name, item in items if item is not None]
    return f"{type(value).__name__}({', '.join(parts)})"


def brief(value: object) -> str:
    """`float32[2, 16, 64] on cpu` for a tensor, `repr` for anything else."""
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{_dtype_name(value)}{list(value.shape)} on {value.device}"


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
"""The dtypes a token's id may have."""

_DTYPES = {
    "mask": ((torch.bool,), "bool, True for real tokens", "bool"),
    "token_ids": (INTEGERS, "integers", "long"),
    "expert_ids": ((torch.int64,), "int64", "long"),
}
"""Dtypes of a context's tensors, in words, and the method that makes them so."""


class TokenHistory(Protocol):
    """Values that blocks keep of earlier tokens, while a decoder computes new ones alone; see `KVCache`."""

    def window(self, owner: nn.Module, new: Tensor, reach: int) -> Tensor:
        """Values of new tokens (B, S, ...) behind those of the `reach` tokens before them, which are kept.

        Args:
            owner: the module whose values they are; if it asks again in a pass, they are others.

        Returns:
            (B, reach + S, ...), zero where there is no token.
        """
        ...


@dataclass(frozen=True)
class TokenContext:
    """Padding mask, token ids and other inputs that some blocks need besides the vectors."""

    mask: Tensor | None = None
    """bool, the leading shape of `x`: True where a token is real, False where it is padding. Padded
    tokens are never routed, counted or in a loss. None: every token is real."""

    token_ids: Tensor | None = None
    """Vocabulary ids, integers of the leading shape of `x`; None when unknown."""

    sequence_length: int | None = None
    """S, for an `x` whose batch and sequence axes are flattened already (token t has position t % S).
    None: the last leading axis of `x`."""

    expert_ids: Tensor | None = None
    """int64, the leading shape of `x` and K: the experts of each token, which a router that `replays` takes
    instead of choosing. None: routers choose."""

    history: TokenHistory | None = None
    """Store in which blocks keep what they read of earlier tokens; `x` (B, S, d_model) then follows those.
    None: each sequence begins in `x`."""

    def __repr__(self) -> str:
        return summarize(self)

    def __post_init__(self) -> None:
        # torch rebuilds these values around anything; `check_input` refuses what is no tensor or no int.
        for name, (dtypes, wanted, method) in _DTYPES.items():
            value = getattr(self, name)
            if isinstance(value, Tensor) and value.dtype not in dtypes:
                raise ValueError(
                    f"TokenContext.{name} must be {wanted}, but is {value.dtype}; use {name}.{method}()"
                )
        if isinstance(self.sequence_length, bool):
            raise TypeError("TokenContext.sequence_length must be an int, but is of type bool")
        if isinstance(self.sequence_length, int) and self.sequence_length < 1:
            raise ValueError(
                f"TokenContext.sequence_length must be at least 1, but is {self.sequence_length}; "
                "leave it out where x is (batch, seq, d_model)"
            )


@dataclass(frozen=True)
class Routing:
    """The experts of each token: N (token, expert, weight) pairs, and the scores they came from.

    Pairs stand in token-major order. Only weights, logits, scores and probabilities carry gradients. A router
    that knows more returns a subclass, such as `NoisyRouting`.
    """

    token_ids_N: Tensor
    """int64, the token of each pair, in [0, T)."""

    expert_ids_N: Tensor
    """int64, the expert of each pair, in [0, E)."""

    weights_N: Tensor
    """float32 (or wider), what the expert's output is multiplied by."""

    dropped_N: Tensor
    """bool, True where the expert was full, so that the pair is not computed."""

    num_tokens: int
    """T, padding included."""

    num_experts: int
    """E, those without a network included."""

    sequence_length: int
    """S; the position of token t in its sequence is t % S."""

    mask_T: Tensor | None = None
    """bool, True where a token is real; None when all are. Pairs of padded tokens are in the list, so
    that shapes don't depend on data, but they are neither computed nor counted."""

    logits_TE: Tensor | None = None
    """float32 (or wider), the router's scores before any normalisation. None from a router with too many
    experts for such a table; see `ListedRouting`."""

    scores_TE: Tensor | None = None
    """float32 (or wider), after normalisation; each row is non-negative. None where `logits_TE` is."""

    def __repr__(self) -> str:
        """One line of sizes and, where tensors hold values (not on `meta`, nor in a trace), of counts."""
        if not isinstance(self.token_ids_N, Tensor) or not isinstance(self.weights_N, Tensor):
            return summarize(self)
        parts = [
            f"num_tokens={self.num_tokens}",
            f"sequence_length={self.sequence_length}",
            f"num_experts={self.num_experts}",
            f"num_pairs={len(self.token_ids_N)}",
            *self._counted(),
            f"{_dtype_name(self.weights_N)} on {self.weights_N.device}",
        ]
        return f"{type(self).__name__}({', '.join(parts)})"

    def _counted(self) -> list[str]:
        """The counts in `__repr__`; reads the values of the tensors."""
        parts: list[str] = []
        try:
            if self.mask_T is not None:
                parts.append(f"num_real_tokens={int(self.num_real_tokens)}")
            num_real = int(self.real_N.sum())
            if num_real < len(self.token_ids_N):
                parts.append(f"num_real_pairs={num_real}")
            share = int((self.dropped_N & self.real_N).sum()) / max(num_real, 1)
            parts.append(f"dropped={share:.1%}")
        except RuntimeError:  # there are no values: a fake tensor, or one on the meta device
            pass
        return parts

    @property
    def is_listed(self) -> bool:
        """True where experts are too many for a number of each: the routing has the listed pairs alone."""
        return self.scores_TE is None

    @property
    def num_real_tokens(self) -> Tensor:
        """int64 scalar: T without padding."""
        if self.mask_T is None:
            return torch.tensor(self.num_tokens, device=self.token_ids_N.device)
        return self.mask_T.sum()

    @property
    def real_N(self) -> Tensor:
        """bool: True for the pairs that the router chose for real tokens."""
        if self.mask_T is None:
            return torch.ones_like(self.dropped_N)
        return self.mask_T[self.token_ids_N]

    @property
    def computed_N(self) -> Tensor:
        """bool: pairs that an expert computes, real and not dropped."""
        return ~self.left_out_N

    @property
    def left_out_N(self) -> Tensor:
        """bool: pairs that no expert computes: dropped, of padding, or not chosen."""
        return self.dropped_N if self.mask_T is None else self.dropped_N | ~self.real_N

    def require(self, table: Literal["logits_TE", "scores_TE"], needed_by: str) -> Tensor:
        """The table called `table`.

        Raises:
            ValueError: the router returns none; the sentence begins with `needed_by`, a loss or a metric.
        """
        found = self.logits_TE if table == "logits_TE" else self.scores_TE
        if found is None:
            raise ValueError(
                f"{needed_by} needs {table}, a number for each expert and token, which this router does "
                f"not return for its {self.num_experts} experts"
            )
        return found

    def detach(self) -> Self:
        """A copy whose tensors are cut from the graph, which metrics may keep."""
        tensors = {
            field.name: value.detach()
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **tensors)


@dataclass(frozen=True, kw_only=True, repr=False)
class ChosenRouting(Routing):
    """Routing of a router that chooses a number of experts that depends on the data.

    The router lists the most pairs that there can be, so that shapes do not depend on the data.
    """

    chosen_N: Tensor
    """bool, False for pairs that the router listed and did not choose."""

    capacity_k: float | None = None
    """Experts per token that a capacity assumes, since counting the pairs would leak later tokens to earlier
    ones. None: the pairs are counted."""

    @property
    def real_N(self) -> Tensor:
        return self.chosen_N if self.mask_T is None else self.chosen_N & super().real_N

    @property
    def left_out_N(self) -> Tensor:
        return self.dropped_N | ~self.real_N


@dataclass(frozen=True, kw_only=True, repr=False)
class SteeredRouting(ChosenRouting):
    """Routing of a router whose number of experts per token a rule steers (ReLU routing)."""

    target_k: float
    """Experts per token that the sparsity rule aims at."""


@dataclass(frozen=True, kw_only=True, repr=False)
class NoisyRouting(Routing):
    """Routing that was chosen with noise (noisy top-k in training)."""

    selection_probs_TE: Tensor
    """Probability, over the router's noise, that each expert is among a token's k."""


@dataclass(frozen=True, kw_only=True, repr=False)
class ListedRouting(Routing):
    """Routing among too many experts for (T, E) tables (product keys); losses are over the listed pairs."""

    logits_N: Tensor
    """float32 (or wider), the score of each pair before any normalisation."""

    listed_k: int
    """K, the pairs of every token, so that the list is a (T, K) table."""


@dataclass(frozen=True)
class Plan:
    """The rows that each expert reads, and the weights by which its results are added up.

    Sorted by expert; pairs that are not computed (dropped, or padding) stand behind `offsets_E[-1]`
    with weight 0, so that shapes don't depend on data. `dispatch.plan_of_list` makes one that
    is not sorted.
    """

    token_ids_N: Tensor
    """int64, the row of `x_TD` each pair reads and adds to."""

    weights_N: Tensor
    """The factor of each result; carries the router's gradient."""

    offsets_E: Tensor
    """int32, where each expert's pairs end."""

    pair_ids_N: Tensor
    """int64, where each pair stands in the routing's own list, which is sorted by token."""

    expert_ids_N: Tensor | None = None
    """int64, the expert of each pair, in a `plan_of_list`; None where `offsets_E` tells."""

    listed_k: int | None = None
    """K, in a `plan_of_list` with exactly K pairs of every row of `x_TD`, in their order; None elsewhere."""

    def __repr__(self) -> str:
        return summarize(self)


_NO_TENSOR = (
    "a block returns an FFNOutput, which is no tensor; use its .hidden, as in x + ffn(x).hidden"
)


@dataclass(frozen=True)
class FFNOutput:
    """Output of every feed-forward block."""

    hidden: Tensor
    """The shape and dtype of the block's input."""

    routings: dict[str, Routing] = field(default_factory=dict)
    """The routings by name: `routing` of the block's own router, `inner` of that of a sparse block inside a
    mixture of depths, `round_2` and so on of later rounds of a chain of experts. Empty for a dense block."""

    shared_shares: dict[str, Tensor] = field(default_factory=dict)
    """Routing name -> the shared expert's fraction of the norm of the block's output, a scalar in [0, 1]; see
    `ffn.shared_expert.share_of_norms`."""

    def __post_init__(self) -> None:
        if isinstance(self.routings, Routing):
            raise TypeError("FFNOutput.routings is a mapping; use {'routing': routing}")

    @property
    def routing(self) -> Routing | None:
        """The first of the routings; None where nothing was routed."""
        return next(iter(self.routings.values()), None)

    def __repr__(self) -> str:
        routings = (f"{name}={brief(routing)}" for name, routing in self.routings.items())
        lines = ",\n    ".join([f"hidden={brief(self.hidden)}", *routings])
        return f"{type(self).__name__}({lines})"

    def __add__(self, other: object) -> NoReturn:
        raise TypeError(_NO_TENSOR)

    __radd__ = __add__

    @classmethod
    def __torch_function__(cls, *given: object) -> NoReturn:
        """Refuse to be the argument of a function of torch, which calls this for every such value."""
        raise TypeError(_NO_TENSOR)


for _value in (
    TokenContext,
    Routing,
    ChosenRouting,
    SteeredRouting,
    NoisyRouting,
    ListedRouting,
    Plan,
    FFNOutput,
):
    torch.export.register_dataclass(_value, serialized_type_name=f"moe_ffn.{_value.__name__}")
