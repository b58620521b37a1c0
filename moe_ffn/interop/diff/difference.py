"""The difference between two models on a text: numbers and a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from moe_ffn.ffn.base import short_name

ROUNDING = 1e-9
"""Divergence, in nats per token, below which a difference counts as rounding of float32."""


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that differs, by its name in both models."""

    name: str
    largest: float
    """Largest absolute difference of two elements."""
    relative: float
    """Largest difference divided by the largest absolute value in A; infinite if that is 0 or not finite."""
    rows: int
    """Number of entries of the first axis that differ; these are experts if experts are stacked."""
    num_rows: int

    @property
    def share(self) -> str:
        """The relative difference as text."""
        if math.isfinite(self.relative):
            return f"{self.relative:.2%}"
        return "from zero" if math.isfinite(self.largest) else "not finite"


@dataclass(frozen=True)
class PositionDifference:
    """Mean difference of the predictions at a range of positions."""

    first: int
    last: int
    num_tokens: int
    kl: float
    largest_logit: float
    kl_replayed: float | None = None
    """KL if B computes with the experts of A; None if nothing is replayed."""


@dataclass(frozen=True)
class ModelDifference:
    """Difference between two models, A and B, on a text. Divergences are in nats per token."""

    a: str
    b: str
    num_tokens: int
    window: int
    """Tokens of a window; each window is a sequence."""
    num_tensors: int
    """Number of tensors that both models have."""
    tensors: tuple[TensorDifference, ...]
    """Tensors that differ, the largest relative difference first."""
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    rounding: str | None
    """Dtype to which tensors were rounded before they were compared; None if their dtypes are equal."""
    kl: float
    """Mean of KL(A || B) of the next token."""
    largest_logit: float
    """Largest absolute difference of two logits."""
    not_finite: int
    """Number of tokens with a NaN or infinite logit in A or B; all other measures leave them out."""
    first_not_finite: Mapping[str, int]
    """`A` or `B` -> index of its first token with a NaN or infinite logit."""
    positions: tuple[PositionDifference, ...]
    flips: Mapping[str, float]
    """Layer -> fraction of tokens whose set of experts differs; empty if there is no routing to compare."""
    flipped: float | None
    """Fraction of tokens whose experts differ in any layer."""
    kl_replayed: float | None
    """KL if B computes with the experts of A; None if nothing was replayed."""
    recorded: str | None = None
    """File of recorded experts, which take the place of the experts of A; None without one."""
    notes: tuple[str, ...] = ()
    """Parts of the comparison that were left out, and why."""

    @property
    def first_flip(self) -> str | None:
        """First layer in which the experts of a token differ."""
        return next((name for name, share in self.flips.items() if share), None)

    @property
    def routing_share(self) -> float | None:
        """Fraction of the KL that vanishes with the experts of A; None without KL, or for a record."""
        if self.kl_replayed is None or self.recorded or not self.kl > 0:
            return None
        return 1 - self.kl_replayed / self.kl

    @property
    def verdict(self) -> str:
        """Two sentences: how far apart the models are, and how much of it is routing."""
        return self._numbers() if self.not_finite else f"{self._numbers()} {self._routing()}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        found = {"first_flip": self.first_flip, "routing_share": self.routing_share}
        return {"verdict": self.verdict, **asdict(self), **found}

    def _numbers(self) -> str:
        rounded = f" after rounding to {self.rounding}" if self.rounding else ""
        weights = f"{self.num_tensors} tensors are equal{rounded}"
        if self.tensors:
            worst = self.tensors[0]
            count = f"{len(self.tensors)} of {self.num_tensors} tensors"
            weights = f"{count} differ{rounded}, {worst.name} the most ({worst.share})"
        elif not self.num_tensors:
            weights = "the tensors were not compared"
        if self.only_a or self.only_b:
            weights += f", {len(self.only_a)} are only in A and {len(self.only_b)} only in B"
        if self.not_finite:
            outputs = (
                f"the logits of {' and '.join(self.first_not_finite)} are not finite in "
                f"{self.not_finite:,} of {self.num_tokens:,} tokens, first at token "
                f"{min(self.first_not_finite.values()):,}"
            )
        elif not self.largest_logit:
            outputs = f"so are the logits of all {self.num_tokens:,} tokens"
        elif self.kl < ROUNDING:
            outputs = (
                f"the predictions differ only by rounding: the KL is {self.kl:.1g} nats per token (logits by "
                f"up to {self.largest_logit:.1g})"
            )
        else:
            outputs = (
                f"the predictions differ by a KL of {two_digits(self.kl)} nats per token (logits by up to "
                f"{two_digits(self.largest_logit)})"
            )
        return f"{weights[0].upper()}{weights[1:]}, and {outputs}."

    def _routing(self) -> str:
        if self.flipped is None:
            return "There is no routing to compare."
        if self.first_flip is None:
            why = ", so the difference is not routing" if self.largest_logit else ""
            return f"No token changes its experts{why}."
        where = short_name(self.first_flip)
        flips = f"{self.flipped:.2%} of the tokens change experts, first in layer {where}"
        if self.kl_replayed is None:
            return f"{flips}."
        whose = "the record" if self.recorded else "A"
        replayed = f"{flips}; with the experts of {whose} the KL is {two_digits(self.kl_replayed)}"
        share = self.routing_share
        if share is None:
            return f"{replayed}."
        result = f"{share:.0%} of the difference is routing"
        if share <= 0:
            result = "routing does not explain the difference"
        return f"{replayed}: {result}."


def two_digits(number: float) -> str:
    """Return a number with two digits."""
    return f"{number:#.2g}".rstrip(".")
