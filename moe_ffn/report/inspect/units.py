"""Hidden units as key-value memories: inputs that activate them, tokens that they promote, explanations.

Geva et al. 2021 (arXiv:2012.14913), and 2022 (arXiv:2203.14680) for the promoted tokens.

T tokens of a text, N tokens that came to a network, F its hidden units, U units of a layer, k inputs kept of
each, D model width, V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moe_ffn.ffn.networks import Memory
from moe_ffn.model.decoder import Decoder
from moe_ffn.report.inspect.text import Text

AGREE = 0.8
"""Smallest share of a unit's top inputs that an explanation covers."""

MAX_SUFFIX_LENGTH = 8
"""Tokens."""

NEAR = 16
"""Positions within 1 / NEAR of a sequence are near each other."""

NUM_PROMOTED = 5
CHUNK = 1024
"""Value vectors in a batch of the unembedding."""

KINDS = ("suffix", "token", "position in line", "position in sequence")
"""Explanations; the first one that fits is a unit's kind, or `none`."""


class TopInputs:
    """The k inputs that activate each unit of a network most, gathered batch by batch.

    Both signs are kept, since a gated unit is as large below zero as above.
    """

    def __init__(self, k: int) -> None:
        self.k = k
        self.values_2Fk: Tensor | None = None
        self.tokens_2Fk = torch.empty(0)
        self.seen: list[Tensor] = []
        """Tokens that came to the network, a tensor per batch."""
        self.values_FD = torch.empty(0)

    def add(self, memory: Memory, first: int) -> None:
        """Add a batch whose tokens are numbered from `first` on."""
        places_N = memory.token_ids_N.cpu() + first
        self.seen.append(places_N.to(torch.int32))
        self.values_FD = memory.values_FD
        activations_FN = memory.activations_NF.t().float()
        num_units = len(activations_FN)
        if self.values_2Fk is None:
            self.values_2Fk = torch.full((2, num_units, self.k), -math.inf)
            self.tokens_2Fk = torch.full((2, num_units, self.k), -1, dtype=torch.int64)
        for sign, signed_FN in enumerate((activations_FN, -activations_FN)):
            best = signed_FN.topk(min(self.k, signed_FN.shape[1]))
            values = torch.cat([self.values_2Fk[sign], best.values.cpu()], dim=1)
            tokens = torch.cat([self.tokens_2Fk[sign], places_N[best.indices.cpu()]], dim=1)
            kept = values.topk(self.k)
            self.values_2Fk[sign] = kept.values
            self.tokens_2Fk[sign] = tokens.gather(1, kept.indices)

    def of_main_sign(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return signed activations (F, k), largest first, their tokens, and each unit's sign, (F,).

        The sign is that of the larger mean. Missing inputs have activation 0 and token -1.
        """
        assert self.values_2Fk is not None
        values = torch.where(self.values_2Fk > 0, self.values_2Fk, 0)
        sign_F = (values[1].sum(dim=1) > values[0].sum(dim=1)).long()
        units = torch.arange(len(sign_F))
        found, tokens = values[sign_F, units], self.tokens_2Fk[sign_F, units]
        signs = 1 - 2 * sign_F
        is_active = found > 0
        return (
            (found * signs[:, None]).numpy(),
            torch.where(is_active, tokens, -1).numpy(),
            signs.numpy(),
        )


@dataclass(frozen=True, eq=False)
class LayerUnits:
    """Hidden units of a layer, of all its networks one after another."""

    layer: int
    networks: tuple[str, ...]
    """Names of the networks; a single empty one where the block has one network."""
    network_U: np.ndarray
    """Index in `networks`."""
    number_U: np.ndarray
    """Number of the unit in its network."""
    activations_Uk: np.ndarray
    """Largest absolute value first; negative where the unit's sign is, 0 beyond its active inputs."""
    tokens_Uk: np.ndarray
    """Tokens of the text with these activations; -1 for none."""
    promoted_Up: np.ndarray
    """Ids of the tokens that the unit promotes most, at the sign of its activations."""
    judged_U: np.ndarray
    """bool: active at k inputs or more; shares count only these."""
    suffix_U: np.ndarray
    """Largest n such that AGREE of the top inputs have the same last n tokens; 0 for none."""
    explained: Mapping[str, np.ndarray]
    """Kind -> bool (U,), True where it explains the unit; several may."""
    chance: Mapping[str, float]
    """Kind -> share of units that it explains with random inputs."""
    next_agreement: float | None
    """Share of judged units whose first promoted token follows the top input; None in a model that sees both
    sides."""
    next_chance: float | None
    """The same with values shuffled among the layer's units."""

    def __len__(self) -> int:
        return len(self.suffix_U)

    @property
    def num_judged(self) -> int:
        return int(self.judged_U.sum())

    def share(self, kind: str) -> float:
        """Return the share of the judged units that `kind` explains; nan where none is judged."""
        return _mean(self.explained[kind][self.judged_U])

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
    layer: int, networks: Mapping[str, TopInputs], text: Text, decoder: Decoder
) -> LayerUnits:
    """Return the common properties of the top inputs of a layer's units, and of random inputs.

    Random inputs are k different tokens that came to the unit's network: otherwise all units of an expert
    for newlines would count as explained by the token.
    """
    found = [inputs.of_main_sign() for inputs in networks.values()]
    activations, tokens = (np.concatenate([one[i] for one in found]) for i in (0, 1))
    k = tokens.shape[1]
    random = np.random.default_rng([0, layer])
    drawn: list[np.ndarray] = []
    for inputs, (_, of_network, _) in zip(networks.values(), found, strict=True):
        seen = torch.cat(inputs.seen).numpy()
        drawn += [
            seen[random.choice(len(seen), k, replace=False, shuffle=False)]
            for _ in range(len(of_network) if len(seen) >= k else 0)
        ]
    judged = tokens.min(axis=1) >= 0
    explained, suffix = _explained(tokens, text)
    at_random, _ = _explained(np.array(drawn, dtype=np.int64).reshape(-1, k), text)
    for values in explained.values():
        values &= judged
    among = np.union1d(text.ids_T, text.next_T)
    promoted = np.concatenate(
        [
            promoted_tokens(decoder, inputs.values_FD, torch.from_numpy(one[2]), among)
            for inputs, one in zip(networks.values(), found, strict=True)
        ]
    )
    agreement = chance = None
    if decoder.config.causal and judged.any():
        firsts, nexts = promoted[judged, 0], text.next_T[tokens[judged, 0]]
        agreement = _mean(firsts == nexts)
        size = text.tokenizer.vocab_size
        counts = [np.bincount(ids, minlength=size) / len(ids) for ids in (firsts, nexts)]
        chance = float(counts[0] @ counts[1])
    sizes = [len(one[2]) for one in found]
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


def _explained(tokens_Uk: np.ndarray, text: Text) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return kind -> True where it explains a unit, and the longest common suffix of each unit."""
    need = max(math.ceil(AGREE * tokens_Uk.shape[1] - 1e-9), 1)
    suffix = np.zeros(len(tokens_Uk), dtype=np.int64)
    for n, labels_T in enumerate(text.suffixes(MAX_SUFFIX_LENGTH), start=1):
        suffix[agree(labels_T[tokens_Uk], need)] = n
    near = max(text.seq_len // NEAR, 1) - 1
    return {
        "suffix": suffix >= 2,
        "token": suffix >= 1,
        "position in line": agree(text.column_T[tokens_Uk], need),
        "position in sequence": agree(text.position_T[tokens_Uk], need, near),
    }, suffix


def agree(values_Uk: np.ndarray, need: int, within: int = 0) -> np.ndarray:
    """Return True for each row with `need` of its k values equal, or at most `within` apart, (U,)."""
    ordered = np.sort(values_Uk, axis=1)
    spans = ordered[:, need - 1 :] - ordered[:, : ordered.shape[1] - need + 1]
    return spans.min(axis=1) <= within


@torch.no_grad()
def promoted_tokens(
    decoder: Decoder, values_FD: Tensor, sign_F: Tensor, among: np.ndarray
) -> np.ndarray:
    """Return the ids whose logits each value vector, times its sign, raises most, highest first, (F, p).

    Only the ids `among` are ranked: a model learns little about tokens that hardly occur.

    The vector alone goes through the final norm, without the norm's bias, and through the unembedding. The
    norm's scale ranks nothing. Layers above, and the norms of a post-norm model, are left out.
    """
    found: list[np.ndarray] = []
    num = min(NUM_PROMOTED, len(among))
    for values, signs in zip(values_FD.split(CHUNK), sign_F.split(CHUNK), strict=True):
        size = values.square().mean(dim=-1, keepdim=True).sqrt().clamp(min=1e-30)
        unit = values / size * signs[:, None].to(values)
        through = decoder.final_norm(unit) - decoder.final_norm(torch.zeros_like(unit))
        logits = decoder.unembedding(through)[:, torch.from_numpy(among).to(through.device)]
        found.append(among[logits.topk(num).indices.cpu().numpy()])
    return np.concatenate(found)


def examples(units: LayerUnits) -> list[int]:
    """Return units to show of each kind, `none` included: the longest suffix first, then the strongest."""
    strength = np.abs(units.activations_Uk).mean(axis=1)
    order = np.lexsort((-strength, -units.suffix_U))
    kinds = units.kind_U
    chosen: list[int] = []
    for kind in (*KINDS, "none"):
        chosen += [u for u in order.tolist() if kinds[u] == kind and units.judged_U[u]][:3]
    return chosen


def explanation(units: LayerUnits, unit: int, text: Text) -> str:
    """Return the common property of a unit's top inputs in a few words."""
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
