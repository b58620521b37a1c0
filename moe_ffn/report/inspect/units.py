"""Hidden units as key-value memories: strongest inputs, promoted tokens, and explanations.

Geva et al. 2021 (arXiv:2012.14913), and 2022 (arXiv:2203.14680) for the promoted tokens.

T tokens of a text, N tokens that reached a network, F its hidden units, U units of a layer, k strongest
inputs of a unit, p promoted tokens, D model width
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_ffn.ffn.networks import HiddenUnits
from moe_ffn.model.decoder import Decoder
from moe_ffn.report.inspect.text import TokenizedText

AGREE = 0.8
"""Minimum share of a unit's top inputs that an explanation must cover."""

MAX_SUFFIX_LENGTH = 8
"""Maximum tokens of a suffix."""

NEAR = 16
"""Positions are near each other if they are within 1 / NEAR of a sequence."""

NUM_PROMOTED = 5
CHUNK = 1024
"""Value vectors per batch of the unembedding."""

KINDS = ("suffix", "token", "position in line", "position in sequence")
"""Kinds of explanation; the kind of a unit is the first that explains it, or `none`."""


class TopInputs:
    """The k strongest inputs of each unit of a network, collected batch by batch.

    Positive and negative activations are collected, because a gated unit can be large on both sides of zero.
    """

    def __init__(self, k: int) -> None:
        self.k = k
        self.values_2Fk: Tensor | None = None
        self.tokens_2Fk = torch.empty(0)
        self.seen: list[Tensor] = []
        """Tokens that reached the network, one tensor per batch."""
        self.values_FD = torch.empty(0)

    def add(self, units: HiddenUnits, first: int) -> None:
        """Add a batch whose tokens are numbered from `first` on."""
        places_N = units.token_indices_N.cpu() + first
        self.seen.append(places_N.to(torch.int32))
        self.values_FD = units.values_FD
        activations_FN = units.activations_NF.t().float()
        num_units = len(activations_FN)
        if self.values_2Fk is None:
            self.values_2Fk = torch.full((2, num_units, self.k), -math.inf)
            self.tokens_2Fk = torch.full((2, num_units, self.k), -1, dtype=torch.int64)
        for sign, signed_FN in enumerate((activations_FN, -activations_FN)):
            best = signed_FN.topk(min(self.k, signed_FN.shape[1]))
            values = torch.cat([self.values_2Fk[sign], best.values.cpu()], dim=1)
            tokens = torch.cat([self.tokens_2Fk[sign], places_N[best.indices.cpu()]], dim=1)
            strongest = values.topk(self.k)
            self.values_2Fk[sign] = strongest.values
            self.tokens_2Fk[sign] = tokens.gather(1, strongest.indices)

    def of_main_sign(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return signed activations (F, k), largest first, their tokens (F, k), and the signs of units (F,).

        A unit has the sign with the larger mean. Missing inputs have activation 0 and token -1.
        """
        assert self.values_2Fk is not None
        values = torch.where(self.values_2Fk > 0, self.values_2Fk, 0)
        sign_F = (values[1].sum(dim=1) > values[0].sum(dim=1)).long()
        units = torch.arange(len(sign_F))
        magnitudes, tokens = values[sign_F, units], self.tokens_2Fk[sign_F, units]
        signs = 1 - 2 * sign_F
        return (
            (magnitudes * signs[:, None]).numpy(),
            torch.where(magnitudes > 0, tokens, -1).numpy(),
            signs.numpy(),
        )


@dataclass(frozen=True, eq=False)
class LayerUnits:
    """Hidden units of all networks of a layer, concatenated."""

    layer: int
    networks: tuple[str, ...]
    """Names of the networks; one empty name if the block has a single network."""
    network_U: np.ndarray
    """Index in `networks`."""
    number_U: np.ndarray
    """Index of the unit in its network."""
    activations_Uk: np.ndarray
    """Activations, largest absolute value first, with the sign of the unit; 0 if there are fewer inputs."""
    tokens_Uk: np.ndarray
    """Positions in the text of the tokens with these activations; -1 for none."""
    promoted_Up: np.ndarray
    """Ids of the tokens that the unit promotes most, with the sign of its activations."""
    judged_U: np.ndarray
    """bool: active on k tokens or more; shares count only these units."""
    suffix_U: np.ndarray
    """Largest n for which a share AGREE of the top inputs has the same last n tokens; 0 if none."""
    explained: Mapping[str, np.ndarray]
    """Kind -> bool (U,): the kind explains the unit; several kinds may."""
    chance: Mapping[str, float]
    """Kind -> share of units that it explains if inputs are random."""
    next_agreement: float | None
    """Share of judged units that promote most the token after their top input; None if not causal."""
    next_chance: float | None
    """The same share with value vectors shuffled among the units of the layer."""

    def __len__(self) -> int:
        return len(self.suffix_U)

    @property
    def num_judged(self) -> int:
        return int(self.judged_U.sum())

    def share(self, kind: str) -> float:
        """Return the share of the judged units that `kind` explains; nan if no unit is judged."""
        return _mean(self.explained[kind][self.judged_U])

    @property
    def unexplained(self) -> float:
        """Share of the judged units that no kind explains; nan if no unit is judged."""
        return _mean((self.kind_U == "none")[self.judged_U])

    @property
    def kind_U(self) -> np.ndarray:
        """Return the first of KINDS that explains each unit, or `none`."""
        kinds = np.full(len(self), "none", dtype=object)
        for kind in reversed(KINDS):
            kinds[self.explained[kind]] = kind
        return kinds

    def name(self, unit: int) -> str:
        """Return `unit 17` or `expert 3, unit 17`."""
        network = self.networks[self.network_U[unit]]
        return f"{network}, unit {self.number_U[unit]}".removeprefix(", ")


def layer_units(
    layer: int, networks: Mapping[str, TopInputs], text: TokenizedText, decoder: Decoder
) -> LayerUnits:
    """Return the common properties of the top inputs of each unit of a layer, and of random inputs.

    Random inputs are k different tokens that reached the network of the unit. With tokens of the whole text,
    every unit of an expert that sees only newlines would count as explained by the token.
    """
    top = [inputs.of_main_sign() for inputs in networks.values()]
    activations, tokens = (np.concatenate([arrays[i] for arrays in top]) for i in (0, 1))
    k = tokens.shape[1]
    random = np.random.default_rng([0, layer])
    drawn: list[np.ndarray] = []
    for inputs, (_, network_tokens, _) in zip(networks.values(), top, strict=True):
        seen = torch.cat(inputs.seen).numpy()
        drawn += [
            seen[random.choice(len(seen), k, replace=False, shuffle=False)]
            for _ in range(len(network_tokens) if len(seen) >= k else 0)
        ]
    judged = tokens.min(axis=1) >= 0
    explained, suffix = _explained(tokens, text)
    at_random, _ = _explained(np.array(drawn, dtype=np.int64).reshape(-1, k), text)
    for values in explained.values():
        values &= judged
    candidates = np.union1d(text.ids_T, text.next_T)
    promoted = np.concatenate(
        [
            promoted_tokens(decoder, inputs.values_FD, torch.from_numpy(signs), candidates)
            for inputs, (_, _, signs) in zip(networks.values(), top, strict=True)
        ]
    )
    agreement = chance = None
    if decoder.config.causal and judged.any():
        firsts, nexts = promoted[judged, 0], text.next_T[tokens[judged, 0]]
        agreement = _mean(firsts == nexts)
        size = text.tokenizer.vocab_size
        counts = [np.bincount(ids, minlength=size) / len(ids) for ids in (firsts, nexts)]
        chance = float(counts[0] @ counts[1])
    sizes = [len(signs) for _, _, signs in top]
    return LayerUnits(
        layer=layer,
        networks=tuple(networks),
        network_U=np.repeat(np.arange(len(sizes)), sizes),
        number_U=np.concatenate([np.arange(size) for size in sizes]),
        activations_Uk=activations,
        tokens_Uk=tokens,
        promoted_Up=promoted,
        judged_U=judged,
        suffix_U=np.where(judged, suffix, 0),
        explained=explained,
        chance={kind: _mean(values) for kind, values in at_random.items()},
        next_agreement=agreement,
        next_chance=chance,
    )


def _explained(
    tokens_Uk: np.ndarray, text: TokenizedText
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return kind -> mask of the units that it explains, (U,), and the longest common suffix of each unit."""
    min_count = max(math.ceil(AGREE * tokens_Uk.shape[1] - 1e-9), 1)
    suffix = np.zeros(len(tokens_Uk), dtype=np.int64)
    for n, labels_T in enumerate(text.suffixes(MAX_SUFFIX_LENGTH), start=1):
        suffix[agree(labels_T[tokens_Uk], min_count)] = n
    near = max(text.seq_len // NEAR, 1) - 1
    return {
        "suffix": suffix >= 2,
        "token": suffix >= 1,
        "position in line": agree(text.column_T[tokens_Uk], min_count),
        "position in sequence": agree(text.position_T[tokens_Uk], min_count, near),
    }, suffix


def agree(values_Uk: np.ndarray, min_count: int, tolerance: int = 0) -> np.ndarray:
    """Return a mask (U,) of the rows in which `min_count` of the k values differ by at most `tolerance`."""
    ordered = np.sort(values_Uk, axis=1)
    spans = ordered[:, min_count - 1 :] - ordered[:, : ordered.shape[1] - min_count + 1]
    return spans.min(axis=1) <= tolerance


@torch.no_grad()
def promoted_tokens(
    decoder: Decoder, values_FD: Tensor, sign_F: Tensor, candidates: np.ndarray
) -> np.ndarray:
    """Return the p ids whose logits each value vector times its sign raises most, highest first, (F, p).

    Only `candidates` are ranked, because a model learns little about rare tokens.

    The vector passes through the final norm, without its bias, and through the unembedding. The scale of the
    input does not change the ranking. Later layers, and the norms of a post-norm model, are left out.
    """
    promoted: list[np.ndarray] = []
    num_promoted = min(NUM_PROMOTED, len(candidates))
    for values, signs in zip(values_FD.split(CHUNK), sign_F.split(CHUNK), strict=True):
        scale = values.square().mean(dim=-1, keepdim=True).sqrt().clamp(min=1e-30)
        vectors = values / scale * signs[:, None].to(values)
        normed = decoder.final_norm(vectors) - decoder.final_norm(torch.zeros_like(vectors))
        logits = decoder.unembedding(normed)[:, torch.from_numpy(candidates).to(normed.device)]
        promoted.append(candidates[logits.topk(num_promoted).indices.cpu().numpy()])
    return np.concatenate(promoted)


def examples(units: LayerUnits) -> list[int]:
    """Return up to three units of each kind, including `none`: longest suffix first, then strongest."""
    strength = np.abs(units.activations_Uk).mean(axis=1)
    order = np.lexsort((-strength, -units.suffix_U))
    kinds = units.kind_U
    chosen: list[int] = []
    for kind in (*KINDS, "none"):
        chosen += [u for u in order.tolist() if kinds[u] == kind and units.judged_U[u]][:3]
    return chosen


def explanation(units: LayerUnits, unit: int, text: TokenizedText) -> str:
    """Return a short text with the common property of the top inputs of a unit."""
    kind = units.kind_U[unit]
    tokens = units.tokens_Uk[unit]
    if kind in ("suffix", "token"):
        n = int(units.suffix_U[unit])
        endings = [tuple(text.ids_T[t - n + 1 : t + 1].tolist()) for t in tokens.tolist()]
        best = max(set(endings), key=endings.count)
        return "".join(map(text.token, best))
    of_kind = {"position in line": text.column_T, "position in sequence": text.position_T}
    return f"{kind}: {int(np.median(of_kind[kind][tokens]))}" if kind in of_kind else ""


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan
