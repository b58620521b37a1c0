"""Compare two models on a text: weights, logits, and the experts of each token.

    difference = moe_ffn.diff("models/base", "models/adapter", text)
    print(difference.verdict)

B windows of S tokens, V vocabulary, E experts
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise, starmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_ffn.config.errors import ConfigError, first_line
from moe_ffn.ffn.base import is_inner, layer_number, short_name
from moe_ffn.interop.diff.difference import ModelDifference, PositionDifference, two_digits
from moe_ffn.interop.diff.models import (
    DTYPE_FLAGS,
    MAX_LENGTH,
    ComparedModel,
    LoadOptions,
    compare_tensors,
    differing_options,
    load,
    require_same_shape,
)
from moe_ffn.interop.replaying import read_experts, recorded_layers, replay, unable_to_replay
from moe_ffn.interop.routings import watch
from moe_ffn.outputs import Routing
from moe_ffn.weights.pretrained import no_tokenizer, require_known_ids

__all__ = ["DTYPE_FLAGS", "ModelDifference", "diff", "two_digits"]

TOKENS_PER_PASS, LOGITS_PER_PASS = 2048, 2**27
"""Limits on a pass: tokens, and numbers in its logits."""


def diff(
    a: str | Path,
    b: str | Path,
    text: str | bytes,
    *,
    dtype_a: str | None = None,
    dtype_b: str | None = None,
    experts_a: str | None = None,
    experts_b: str | None = None,
    recorded: str | Path | None = None,
    num_tokens: int = 4096,
    window: int | None = None,
    device: str | torch.device = "cpu",
    trust_code: bool = False,
) -> ModelDifference:
    """Compare two models on a text.

    Each is a run, a model folder of moe_ffn or transformers, or a folder with an adapter of peft. An adapter
    is merged into the base that it names, or into the other model if that base is not a folder here.

    Args:
        dtype_a, dtype_b: `float64`, `float32`, `bfloat16` or `float16`; by default that of the files.
        experts_a, experts_b: implementation of the experts: `experts.backend` of our models,
            `experts_implementation` of transformers.
        recorded: file of the experts that another engine recorded for this text, which take the place of the
            experts of A; see `moe_ffn.interop.read_experts`. The text is then one sequence.
        num_tokens: maximum number of tokens to read.
        window: tokens of a sequence; by default as many as both models accept, at most 512.
        trust_code: run the code that a moe_ffn folder names.

    Raises:
        ConfigError: a folder cannot be read, an optional library is missing, or the models differ in
            vocabulary, layers or experts, so that they are not two versions of one model.
    """
    a, b = Path(a), Path(b)
    one = load(a, b, LoadOptions(dtype_a, experts_a, "a"), trust_code=trust_code)
    two = load(b, a, LoadOptions(dtype_b, experts_b, "b"), trust_code=trust_code)
    require_same_shape(one, two)
    ids = _encode((one, two), text.encode() if isinstance(text, str) else text)
    weights = compare_tensors(one, two)
    record = None
    if recorded is not None:
        record = read_experts(recorded, torch.ones(1, len(ids)))
        num_tokens = window = len(ids)
    windows = _windows(ids, min(one.max_length, two.max_length), num_tokens, window)
    for side in (one, two):
        side.model.to(device)
    outputs = _compare_outputs(one, two, windows.to(device), record)
    notes = differing_options(one, two) + weights.pop("notes") + outputs.pop("notes")
    return ModelDifference(
        a=str(a), b=str(b), num_tokens=windows.numel(), window=windows.shape[1],
        notes=notes, recorded=None if recorded is None else str(recorded), **weights, **outputs,
    )  # fmt: skip


# -- the text


def _encode(sides: tuple[ComparedModel, ComparedModel], text: bytes) -> Tensor:
    encoded = [(side, side.encode(text)) for side in sides if side.encode is not None]
    if not encoded:
        raise no_tokenizer(sides[0].folder)
    ids = encoded[0][1]
    if any(other != ids for _, other in encoded):
        raise ConfigError(
            "A and B must be versions of one model, but their tokenizers split the text differently"
        )
    if not ids:
        raise ConfigError("--text: is empty; give some text")
    require_known_ids(ids, sides[0].vocab_size, encoded[0][0].folder)
    return torch.tensor(ids)


def _windows(ids: Tensor, longest: int, num_tokens: int, window: int | None) -> Tensor:
    """Return whole windows of at most `longest` tokens from the beginning of the text, (B, S)."""
    if window is not None and window > longest:
        raise ConfigError(f"--window ({window}) must not exceed the {longest} tokens of the model")
    length = min(window or min(longest, MAX_LENGTH), len(ids), num_tokens)
    count = min(len(ids), num_tokens) // length
    return ids[: count * length].view(count, length)


# -- the outputs


def _measures(a_SV: Tensor, b_SV: Tensor, replayed_SV: Tensor | None) -> Tensor:
    """Return numbers of each token of a window, float64 (5, S): 1 if its logits are finite in A, the same for
    B, and, if both are, the largest difference of two logits, the KL, and the KL with the experts of A.
    """
    a_SV, b_SV = a_SV.double(), b_SV.double()
    finite_2S = torch.stack([logits.isfinite().all(dim=-1) for logits in (a_SV, b_SV)])
    kl_S = _kl(a_SV, b_SV)
    replayed_S = kl_S if replayed_SV is None else _kl(a_SV, replayed_SV.double())
    measured_3S = torch.stack([(b_SV - a_SV).abs().amax(dim=-1), kl_S, replayed_S])
    return torch.cat([finite_2S, measured_3S.masked_fill(~finite_2S.all(dim=0), 0)]).cpu()


def _between(measures_5BS: Tensor, first: int, end: int, *, replayed: bool) -> PositionDifference:
    """Return the means over the positions from `first` to `end` - 1."""
    finite_a, finite_b, largest, kl, kl_replayed = measures_5BS[..., first:end]
    count = int((finite_a * finite_b).sum())
    mean = max(count, 1)
    return PositionDifference(
        first,
        end - 1,
        count,
        float(kl.sum()) / mean,
        float(largest.max()),
        float(kl_replayed.sum()) / mean if replayed else None,
    )


def _kl(a_SV: Tensor, b_SV: Tensor) -> Tensor:
    """Return KL(A || B) of each token, float64 (S,)."""
    log_a_SV, log_b_SV = a_SV.log_softmax(dim=-1), b_SV.log_softmax(dim=-1)
    return (log_a_SV.exp() * (log_a_SV - log_b_SV)).sum(dim=-1).clamp(min=0)


@torch.no_grad()
def _compare_outputs(
    a: ComparedModel, b: ComparedModel, windows: Tensor, record: Tensor | None
) -> dict[str, Any]:
    length = windows.shape[1]
    measures: list[Tensor] = []
    replayed_layers, notes = _replayable(a, b)
    flips: dict[str, int] = {}
    num_flipped = 0
    per_pass = max(1, min(TOKENS_PER_PASS, LOGITS_PER_PASS // a.vocab_size) // length)
    for ids_BS in windows.split(per_pass):
        a_BSV, routings_a = _run(a, ids_BS)
        b_BSV, routings_b = _run(b, ids_BS)
        if record is not None and b.modules:
            routings_a = _recorded(b, record, routings_b)
        replayed_BSV = None
        if replayed_layers:
            given = {name: routings_a[name] for name in replayed_layers}
            try:
                replayed_BSV, _ = _run(b, ids_BS, given)
            except ConfigError as error:  # such as another number of experts for each token
                if record is not None:
                    raise
                replayed_layers, notes = [], (*notes, f"the experts of A are not replayed: {error}")
        for row in range(len(ids_BS)):
            again_SV = None if replayed_BSV is None else replayed_BSV[row]
            measures.append(_measures(a_BSV[row], b_BSV[row], again_SV))
        flipped_T = torch.zeros(ids_BS.numel(), dtype=torch.bool, device=ids_BS.device)
        for name in routings_a:
            if name in routings_b and not is_inner(name):
                changed_T = _changed(routings_a[name], routings_b[name])
                flips[name] = flips.get(name, 0) + int(changed_T.sum())
                flipped_T |= changed_T
        num_flipped += int(flipped_T.sum())
    between = partial(_between, torch.stack(measures, dim=1), replayed=bool(replayed_layers))
    every = between(0, length)
    finite = {side: torch.cat([rows[i] for rows in measures]) for i, side in enumerate("AB")}
    edges = [0, *(4**n for n in range(1, length.bit_length()) if 4**n < length), length]
    return {
        "kl": every.kl,
        "largest_logit": every.largest_logit,
        "kl_replayed": every.kl_replayed,
        "not_finite": windows.numel() - every.num_tokens,
        "first_not_finite": {s: int(ok_N.argmin()) for s, ok_N in finite.items() if not ok_N.all()},
        "positions": tuple(starmap(between, pairwise(edges))),
        "flips": {n: flips[n] / windows.numel() for n in sorted(flips, key=layer_number)},
        "flipped": num_flipped / windows.numel() if flips else None,
        "notes": notes,
    }


def _replayable(a: ComparedModel, b: ComparedModel) -> tuple[list[str], tuple[str, ...]]:
    """Return the layers of A whose experts B can replay, and notes on the others."""
    if not a.modules or not b.modules:
        dense = [side for side, found in (("A", a.modules), ("B", b.modules)) if not found]
        note = f"routing is not compared: {' and '.join(dense)} {'have' if len(dense) > 1 else 'has'} no "
        return [], (note + "sparse layers whose routing can be watched",)
    layers, others = [], []
    for name, path in b.modules.items():
        can = unable_to_replay(b.model.get_submodule(path)) is None
        (layers if can else others).append(name)
    if not others:
        return layers, ()
    numbers = ", ".join(map(short_name, others))
    return layers, (f"layers with routers that cannot replay choose again: {numbers}",)


def _run(
    side: ComparedModel, ids_BS: Tensor, given: Mapping[str, Routing] | None = None
) -> tuple[Tensor, Mapping[str, Routing]]:
    """Return the logits and the routings of a pass."""
    try:
        with (
            watch(side.model) if side.modules else nullcontext([{}]) as passes,
            replay(side.model, given) if given else nullcontext(),
        ):
            logits_BSV = side.logits(ids_BS)
    except ConfigError:
        raise
    except (ValueError, RuntimeError, NotImplementedError) as error:
        options = {"dtype": side.options.dtype, "experts": side.options.experts}
        flags = [
            f"--{name}-{side.options.side} {value}" for name, value in options.items() if value
        ]
        if not flags:
            raise
        raise ConfigError(
            f"'{side.folder}' cannot be computed with {' and '.join(flags)} ({first_line(error)})"
        ) from error
    return logits_BSV, passes[-1]


def _recorded(
    side: ComparedModel, record: Tensor, routings: Mapping[str, Routing]
) -> dict[str, Routing]:
    """Return the routings of a model with recorded experts instead of its own."""
    found: dict[str, Routing] = {}
    for name, ids in recorded_layers(side.model, record).items():
        own_N = routings[name].expert_ids_N
        ids_N = ids.flatten().to(own_N.device)
        if own_N.shape != ids_N.shape:
            raise ConfigError(
                f"--recorded: the record has {ids.shape[-1]} experts per token, but layer {short_name(name)} "
                f"has {len(own_N) // routings[name].num_tokens}"
            )
        found[name] = replace(routings[name], expert_ids_N=torch.where(ids_N < 0, own_N, ids_N))
    return found


def _changed(a: Routing, b: Routing) -> Tensor:
    """Return bool (T,), True for tokens that other experts compute in B."""
    width = max(a.num_experts, b.num_experts)
    pairs = [
        (routing.token_indices_N * width + routing.expert_ids_N)[routing.computed_N]
        for routing in (a, b)
    ]
    changed_T = torch.zeros(a.num_tokens, dtype=torch.bool, device=a.token_indices_N.device)
    for ours, theirs in (pairs, pairs[::-1]):
        changed_T[ours[~torch.isin(ours, theirs)] // width] = True
    return changed_T
