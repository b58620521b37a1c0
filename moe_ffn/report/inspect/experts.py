"""Tokens of each expert, and token attributes that explain the choice of a router.

T tokens of a text, N (token, expert) pairs, E experts, A labels of an attribute
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moe_ffn.report.expert_tokens import Assignment
from moe_ffn.report.inspect.text import BYTE_CLASSES, SYNTAX_CLASSES, TokenizedText

NUM_PERMUTATIONS = 5
"""Number of permutations of the labels; their mean mutual information is the chance level."""

MAX_DOCUMENTS = 16
"""Number of largest documents that have their own label; the others share one."""


@dataclass(frozen=True)
class Attribute:
    """Label of each token that may explain the routing."""

    name: str
    labels_T: np.ndarray
    names: tuple[str, ...] = ()
    """Names of the labels; empty if there are too many for a profile, such as token ids."""


def attributes(text: TokenizedText) -> list[Attribute]:
    """Return the attributes of the tokens of a text that do not depend on the model."""
    ids, position, column = text.ids_T, text.position_T, text.column_T
    previous = np.where(position > 0, np.roll(ids, 1), -1)
    listed = [
        Attribute("token", ids),
        Attribute("previous token", previous + 1),
        Attribute("byte class", text.byte_class_T, BYTE_CLASSES),
    ]
    if text.syntax_T is not None:
        listed.append(Attribute("syntax class", text.syntax_T, SYNTAX_CLASSES))
    edges = np.linspace(0, text.seq_len, min(8, text.seq_len) + 1).astype(int).tolist()
    listed.append(_ranges("position in sequence", position, edges))
    listed.append(_ranges("position in line", column, [0, 1, 2, 4, 8, 16, 32, 64], "64 on"))
    sizes = np.bincount(text.document_T)
    largest = np.argsort(-sizes, kind="stable")[:MAX_DOCUMENTS]
    label = np.full(len(sizes), len(largest))
    label[largest] = np.arange(len(largest))
    names = tuple(text.documents[d] for d in largest)
    names += ("all others",) if len(sizes) > len(largest) else ()
    listed.append(Attribute("document", label[text.document_T], names))
    return listed


def _ranges(name: str, values_T: np.ndarray, edges: Sequence[int], *last: str) -> Attribute:
    """Return an attribute whose labels are ranges of a number; `last` names an open range."""
    names = [f"{a} to {b - 1}" if b > a + 1 else f"{a}" for a, b in itertools.pairwise(edges)]
    labels_T = np.searchsorted(edges, values_T, side="right") - 1
    return Attribute(name, labels_T, (*names, *last))


# -- agreement


def mutual_information(a_N: np.ndarray, b_N: np.ndarray) -> float:
    """Return the mutual information I(a; b) in nats, of non-negative integers, estimated from counts."""
    if not len(a_N):
        return 0.0
    width = int(b_N.max()) + 1
    counts = np.unique(a_N.astype(np.int64) * width + b_N, return_counts=True)[1]
    return max(entropy(a_N) + entropy(b_N) - _entropy_of(counts), 0.0)


def entropy(a_N: np.ndarray) -> float:
    """Return the entropy H(a) in nats, estimated from counts."""
    return _entropy_of(np.bincount(a_N)) if len(a_N) else 0.0


def _entropy_of(counts: np.ndarray) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


@dataclass(frozen=True)
class Agreement:
    """Share of a router's first choice that an attribute explains: I(expert; attribute) / H(expert)."""

    share: float
    """1 if the attribute determines the choice; nan if H is 0."""
    chance: float
    """The same share with permuted labels; above 0 if there are many labels."""

    @property
    def above_chance(self) -> float:
        """Return (share - chance) / (1 - chance): 0 at chance, 1 if the attribute determines the choice."""
        return (self.share - self.chance) / (1 - self.chance) if self.chance < 1 else math.nan


def agreement(expert_N: np.ndarray, label_N: np.ndarray) -> Agreement:
    """Return the share of the expert choices that the labels explain; both are non-negative integers."""
    choice = entropy(expert_N)
    if choice <= 1e-12:
        return Agreement(math.nan, math.nan)
    random = np.random.default_rng(0)
    _, label_N = np.unique(label_N, return_inverse=True)
    permuted = [
        mutual_information(expert_N, random.permutation(label_N)) for _ in range(NUM_PERMUTATIONS)
    ]
    return Agreement(
        mutual_information(expert_N, label_N) / choice, float(np.mean(permuted)) / choice
    )


# -- profiles


def profile(assignment: Assignment, attribute: Attribute) -> np.ndarray:
    """Return the number of pairs of each expert with each label, (E, A)."""
    tokens, experts = assignment.pairs
    counts = np.zeros((assignment.num_experts, len(attribute.names)), dtype=np.int64)
    np.add.at(counts, (experts, attribute.labels_T[tokens]), 1)
    return counts


def lift(counts_EA: np.ndarray) -> np.ndarray:
    """Return P(label | expert) / P(label): 1 if the expert has an even share, nan without pairs."""
    counts = counts_EA.astype(float)
    with np.errstate(divide="ignore", invalid="ignore"):
        return (
            counts
            * counts.sum()
            / (counts.sum(axis=1, keepdims=True) * counts.sum(axis=0, keepdims=True))
        )
