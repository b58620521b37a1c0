"""Tokens that each expert processes on the validation split, with their contexts.

    run = moe_ffn.load_run("runs/x")
    routed = route_validation(run)
    expert_tokens(routed, "layer_03")

T tokens, N (token, expert) pairs, E experts
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch

from moe_ffn.config.errors import ConfigError, first_line
from moe_ffn.data.batches import spread_starts
from moe_ffn.data.prepare import cached_validation
from moe_ffn.model.decoder import Decoder
from moe_ffn.outputs import Routing
from moe_ffn.report.trace import expert_names, origin, visible, with_all_scores
from moe_ffn.runs.reader import Run

MAX_FLOPS = 2e10
"""Maximum FLOPs of the forward passes: one or two seconds on two cores."""

MAX_TOKENS, BATCH_TOKENS = 32_768, 4096

NUM_TOKENS = 8
"""Maximum tokens listed per expert."""

MIN_COUNT = 5
"""Minimum count at an expert of a typical token."""

CONTEXT = 24
"""Bytes of text before a token; half as many after it."""


# -- experts that tokens chose

NOT_REACHED = -1
"""Value in `first_T` of a token that did not reach this router."""


@dataclass
class Assignment:
    """Experts that each token chose at one router."""

    name: str
    """Name of the router, such as `layer_03` or `layer_03/inner`."""
    expert_names: tuple[str, ...]
    num_tokens: int
    """T"""
    first_T: np.ndarray = field(init=False)
    """Expert with the largest weight; E if the router chose none, NOT_REACHED if it did not see the token."""
    _pairs: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.first_T = np.full(self.num_tokens, NOT_REACHED, dtype=np.int32)

    def add(self, routing: Routing, positions: np.ndarray, *, with_dropped: bool = True) -> None:
        """Add the pairs of a batch, whose tokens have these positions in the text, or NOT_REACHED."""
        added_N = routing.active_N if with_dropped else routing.computed_N
        tokens = positions[routing.token_indices_N[added_N].cpu().numpy()].astype(np.int32)
        experts = routing.expert_ids_N[added_N].cpu().numpy().astype(np.int32)
        weights = routing.weights_N[added_N].detach().float().cpu().numpy()
        self.first_T[positions[positions >= 0]] = routing.num_experts
        # The expert with the largest weight is written last; among equals, the first one listed.
        order = np.lexsort((-np.arange(len(weights)), weights))
        self.first_T[tokens[order]] = experts[order]
        self._pairs.append((tokens, experts))

    @property
    def num_experts(self) -> int:
        """E"""
        return len(self.expert_names)

    @property
    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return token and expert of each pair, (N,)."""
        tokens, experts = zip(*self._pairs, strict=True)
        return np.concatenate(tokens), np.concatenate(experts)

    @property
    def reached_T(self) -> np.ndarray:
        return self.first_T != NOT_REACHED


@torch.no_grad()
def route_windows(
    decoder: Decoder, windows_WS: np.ndarray, *, with_dropped: bool = True
) -> dict[str, Assignment]:
    """Return router -> its choices for windows of token ids, read one after the other.

    Routings without all scores are skipped, because they have too many experts to show each one.
    """
    infos = decoder.config.router_infos()
    token_selectors = [name for name, info in infos.items() if info.selects_tokens]
    device = decoder.embedding.weight.device
    assignments: dict[str, Assignment] = {}
    first = 0
    for ids_BS in torch.from_numpy(windows_WS).split(max(BATCH_TOKENS // windows_WS.shape[1], 1)):
        routings = decoder(ids_BS.to(device)).routings
        for name, routing in with_all_scores(routings).items():
            if name not in assignments:
                names = expert_names(routing, infos.get(name))
                assignments[name] = Assignment(name, names, windows_WS.size)
            positions = text_positions(routings, name, token_selectors, first)
            assignments[name].add(routing, positions, with_dropped=with_dropped)
        first += ids_BS.numel()
    return assignments


def text_positions(
    routings: Mapping[str, Routing], name: str, token_selectors: Sequence[str], first: int
) -> np.ndarray:
    """Return the position in the text of each token of a routing; the batch begins at token `first`."""
    in_batch = origin(routings, name, token_selectors)
    if in_batch is None:
        return np.arange(routings[name].num_tokens) + first
    positions = in_batch.cpu().numpy()
    return np.where(positions < 0, NOT_REACHED, positions + first)


@dataclass(frozen=True, eq=False)
class RoutedText:
    """Tokens in windows of equal length, and the experts of each layer that they chose."""

    vocabulary: tuple[bytes, ...]
    ids_T: np.ndarray
    """Token ids, window after window."""
    seq_len: int
    """Tokens per window."""
    layers: Mapping[str, Assignment]
    """Name of a router, such as `layer_03` or `layer_03/inner` -> its choices."""

    def text(self, start: int, end: int) -> bytes:
        return b"".join(self.vocabulary[token] for token in self.ids_T[start:end])


def route_validation(run: Run) -> RoutedText:
    """Route windows spread over the validation split with the best weights of a run, in evaluation mode.

    Raises ConfigError if the run has no intact checkpoint, or its validation text is no longer cached.
    """
    saved = run.saved_model
    data, decoder = saved.config.data, saved.decoder
    tokens = cached_validation(data, run.facts.corpus_sha256 or "")
    if tokens is None:
        raise ConfigError(
            f"the validation text of '{run.folder}' is no longer in data.cache_dir '{data.cache_dir}'"
        )
    num_tokens = int(min(MAX_TOKENS, MAX_FLOPS / max(run.facts.flops_per_token or 0, 1)))
    starts = spread_starts(len(tokens), data.seq_len, max(num_tokens // data.seq_len, 1))
    ids_WS = np.stack([tokens[start : start + data.seq_len] for start in starts]).astype(np.int64)
    layers = route_windows(decoder, ids_WS, with_dropped=False)
    return RoutedText(saved.tokenizer.token_bytes, ids_WS.reshape(-1), data.seq_len, layers)


# -- tokens of an expert


@dataclass(frozen=True)
class TopToken:
    """Statistics of one token of the vocabulary at one expert."""

    token: str
    """Text from `visible`."""
    count: int
    """Number of times that the expert computed the token."""
    share: float
    """Its share of the tokens that the expert computed."""
    lift: float
    """Its share at the expert over its share in the text; above 1, it is more frequent than by chance."""
    contexts: tuple[tuple[str, str, str], ...]
    """Examples from the text: (text before, token, text after)."""


@dataclass(frozen=True)
class ExpertTokens:
    """Tokens that one expert of a layer computes."""

    expert: str
    share: float
    """Share of the pairs that the experts of the layer computed."""
    most_frequent: tuple[TopToken, ...]
    most_typical: tuple[TopToken, ...]
    """Tokens with the largest share x log lift, the token's term of the KL divergence from the text.
    Each has a count of at least `MIN_COUNT` and a lift above 1."""


def expert_tokens(routed: RoutedText, layer: str, num_contexts: int = 3) -> list[ExpertTokens]:
    """Return the most frequent and the most typical tokens of each expert of a layer in `routed.layers`.

    Each token has up to `num_contexts` examples from the text, evenly spread.
    """
    tokens_N, experts_N = routed.layers[layer].pairs
    vocab_size = len(routed.vocabulary)
    base_V = np.bincount(routed.ids_T, minlength=vocab_size) / len(routed.ids_T)
    found: list[ExpertTokens] = []
    for expert, name in enumerate(routed.layers[layer].expert_names):
        positions = np.sort(tokens_N[experts_N == expert])
        counts_V = np.bincount(routed.ids_T[positions], minlength=vocab_size)
        shares_V = counts_V / max(len(positions), 1)
        lifts_V = np.divide(shares_V, base_V, out=np.zeros(vocab_size), where=base_V > 0)
        surplus_V = shares_V * np.log(np.maximum(lifts_V, 1))

        def top_token(
            token_id: int, positions: np.ndarray = positions, counts: np.ndarray = counts_V
        ) -> TopToken:
            examples = _evenly_spaced(positions[routed.ids_T[positions] == token_id], num_contexts)
            share = float(counts[token_id] / len(positions))
            return TopToken(
                visible(routed.vocabulary[token_id]),
                int(counts[token_id]),
                contexts=tuple(context(routed, int(position)) for position in examples),
                share=share,
                lift=share / float(base_V[token_id]),
            )

        frequent = [v for v in np.argsort(-counts_V, kind="stable") if counts_V[v]]
        typical = [
            v
            for v in np.argsort(-surplus_V, kind="stable")
            if surplus_V[v] > 0 and counts_V[v] >= MIN_COUNT
        ]
        found.append(
            ExpertTokens(
                name,
                len(positions) / max(len(tokens_N), 1),
                tuple(map(top_token, frequent[:NUM_TOKENS])),
                tuple(map(top_token, typical[:NUM_TOKENS])),
            )
        )
    return found


def _evenly_spaced(items: np.ndarray, max_items: int) -> np.ndarray:
    count = min(max_items, len(items))
    return items[(2 * np.arange(count) + 1) * len(items) // max(2 * count, 1)]


def context(routed: RoutedText, position: int) -> tuple[str, str, str]:
    """Return the text before a token, the token, and the text after, within its window."""
    start = position - position % routed.seq_len
    end = min(start + routed.seq_len, position + CONTEXT)
    before = routed.text(max(start, position - CONTEXT), position)[-CONTEXT:]
    after = routed.text(position + 1, end)[: CONTEXT // 2]
    token = visible(routed.vocabulary[routed.ids_T[position]])
    return visible(before) if before else "", token, visible(after) if after else ""


def stretches(routed: RoutedText, layer: str, window: int) -> list[tuple[int, str]]:
    """Return a window as (expert, text), split where the first expert changes; -1 for no expert."""
    tokens = slice(window * routed.seq_len, (window + 1) * routed.seq_len)
    assignment = routed.layers[layer]
    first_T = np.where(assignment.first_T < assignment.num_experts, assignment.first_T, NOT_REACHED)
    pairs = zip(first_T[tokens].tolist(), routed.ids_T[tokens].tolist(), strict=True)
    return [
        (
            expert,
            b"".join(routed.vocabulary[token] for _, token in group).decode(
                "utf-8", "backslashreplace"
            ),
        )
        for expert, group in groupby(pairs, key=lambda pair: pair[0])
    ]


# -- for a page

MAX_LAYERS, MAX_EXPERTS, TEXT_TOKENS = 8, 32, 768
"""Maximum layers (evenly chosen), experts per layer (the busiest), and tokens of running text on a page."""


def text_for_page(run: Run) -> RoutedText | str | None:
    """Return the routed text, or a reason why none is shown; None in training or without sparse layers."""
    if not run.layers or run.is_running:
        return None
    try:
        routed = route_validation(run)
    except Exception as error:  # custom code may raise any error; the page has other sections
        return first_line(error)
    return routed if routed.layers else "its routers have too many experts to show each one"


def windows(routed: RoutedText, layer: str) -> list[list[tuple[int, str]]]:
    """Return the `stretches` of the first windows."""
    num_windows = min(max(TEXT_TOKENS // routed.seq_len, 1), len(routed.ids_T) // routed.seq_len)
    return [stretches(routed, layer, window) for window in range(num_windows)]


def busiest(routed: RoutedText, layer: str) -> list[tuple[int, ExpertTokens]]:
    """Return (index, tokens) of the busiest experts, in the order of their indices."""
    experts = enumerate(expert_tokens(routed, layer, num_contexts=1))
    return sorted(sorted(experts, key=lambda indexed: -indexed[1].share)[:MAX_EXPERTS])
