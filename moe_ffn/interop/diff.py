"""Compare two models on a text: weights, logits, and the experts of each token.

    difference = moe_ffn.diff("models/base", "models/adapter", text)
    print(difference.verdict)

B windows of S tokens, V vocabulary, E experts
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_ffn.config.errors import ConfigError, first_line, nearest_or_all, show
from moe_ffn.experts.matrices import MatrixExperts
from moe_ffn.ffn.base import FFNBlock
from moe_ffn.files import kind_of
from moe_ffn.interop.load_models import (
    encode_utf8,
    is_adapter_folder,
    is_transformers_folder,
    load_adapter,
    load_hf_model,
    load_hf_tokenizer,
    max_length_of,
    require_known_ids,
    wrong_base,
)
from moe_ffn.interop.replaying import (
    count_experts,
    read_experts,
    recorded_layers,
    replay,
    unable_to_replay,
)
from moe_ffn.interop.routings import routing_modules, watch
from moe_ffn.interop.transformers import register
from moe_ffn.kernels.select import BACKENDS
from moe_ffn.model.decoder import Decoder, is_inner, layer_number, short_name
from moe_ffn.outputs import Routing, dtype_name
from moe_ffn.runs.folder import is_run
from moe_ffn.runs.reader import load_run
from moe_ffn.weights.from_transformers import load_transformers
from moe_ffn.weights.pretrained import (
    TOKENIZER_FILE,
    distinct_tensors,
    is_model_folder,
    load_pretrained,
    load_tokenizer,
    no_tokenizer,
)

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}

THEIR_EXPERTS = ("eager", "batched_mm", "grouped_mm", "moe_ffn")
"""Implementations of the experts in transformers."""

MAX_LENGTH, TOKENS_PER_PASS, LOGITS_PER_PASS = 512, 2048, 2**27
"""Maximum number of tokens of a window, by default, and limits on a pass: tokens, and numbers in its
logits."""


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
        """Fraction of the KL that vanishes if B computes with the experts of A.

        None if there is no KL, or if the experts come from a record and not from A.
        """
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
            return (
                f"{_capital(weights)}, and the logits of {' and '.join(self.first_not_finite)} are not "
                f"finite in {self.not_finite:,} of {self.num_tokens:,} tokens, first at token "
                f"{min(self.first_not_finite.values()):,}."
            )
        if not self.largest_logit:
            return f"{_capital(weights)}, and so are the logits of all {self.num_tokens:,} tokens."
        if self.kl < ROUNDING:
            return (
                f"{_capital(weights)}, and the predictions differ only by rounding: the KL is {self.kl:.1g} "
                f"nats per token (logits by up to {self.largest_logit:.1g})."
            )
        return (
            f"{_capital(weights)}, and the predictions differ by a KL of {short(self.kl)} nats per token "
            f"(logits by up to {short(self.largest_logit)})."
        )

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
        replayed = f"{flips}; with the experts of {whose} the KL is {short(self.kl_replayed)}"
        share = self.routing_share
        if share is None:
            return f"{replayed}."
        result = f"{share:.0%} of the difference is routing"
        if share <= 0:
            result = "routing does not explain the difference"
        return f"{replayed}: {result}."


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

    Each is a run, a model folder of moe_ffn or transformers, or a folder with an adapter of peft, which is
    merged into the other model.

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
    folders = (Path(a), Path(b))
    options = (_Options(dtype_a, experts_a, "a"), _Options(dtype_b, experts_b, "b"))
    one, two = (
        _load(folder, other, chosen, trust_code=trust_code)
        for folder, other, chosen in zip(folders, folders[::-1], options, strict=True)
    )
    _require_same_shape(one, two)
    ids = _encode((one, two), text.encode() if isinstance(text, str) else text)
    weights = _compare_tensors(one, two)
    record = None
    if recorded is not None:
        record = read_experts(recorded, torch.ones(1, len(ids)))
        num_tokens = window = len(ids)
    windows = _windows(ids, min(one.max_length, two.max_length), num_tokens, window)
    for side in (one, two):
        side.model.to(device)
    outputs = _compare_outputs(one, two, windows.to(device), record)
    notes = weights.pop("notes") + outputs.pop("notes")
    return ModelDifference(
        a=str(a), b=str(b), num_tokens=windows.numel(), window=windows.shape[1],
        notes=notes, recorded=None if recorded is None else str(recorded), **weights, **outputs,
    )  # fmt: skip


# -- the models


@dataclass(frozen=True)
class _Options:
    dtype: str | None
    experts: str | None
    side: str
    """`a` or `b`; messages name the options."""

    def __post_init__(self) -> None:
        if self.dtype not in (None, *DTYPES):
            raise ConfigError(
                f"--dtype-{self.side}: {show(self.dtype)} is unknown{nearest_or_all(self.dtype, DTYPES)}"
            )

    def require_experts(self, known: Any) -> None:
        if self.experts not in (None, *known):
            raise ConfigError(
                f"--experts-{self.side}: {show(self.experts)} is unknown for this model"
                f"{nearest_or_all(self.experts, known)}"
            )


@dataclass(frozen=True)
class _Side:
    """One of the two models."""

    folder: Path
    options: _Options
    model: Any
    encode: Callable[[bytes], list[int]] | None
    """Tokenizer; None if the folder has none."""
    vocab_size: int
    max_length: int
    is_merged: bool = False
    modules: Mapping[str, str] = field(default_factory=dict)
    """Layer -> path of each sparse block, as in `routing_modules`."""

    def logits(self, ids_BS: Tensor) -> Tensor:
        if isinstance(self.model, Decoder):
            return self.model(ids_BS).logits
        return self.model(input_ids=ids_BS, use_cache=False).logits

    @property
    def num_layers(self) -> int:
        if isinstance(self.model, Decoder):
            return len(self.model.layers)
        return self.model.config.get_text_config().num_hidden_layers


def _load(folder: Path, other: Path, options: _Options, *, trust_code: bool) -> _Side:
    """Load the model in a folder; an adapter is merged into the model in `other`."""
    if is_adapter_folder(folder):
        if is_adapter_folder(other):
            raise ConfigError(
                f"'{folder}' and '{other}' are both adapters; give the base model of one of them, or merge "
                "both"
            )
        return _merge(folder, _load(other, folder, options, trust_code=trust_code))
    if is_run(folder) or is_model_folder(folder):
        side = _load_ours(folder, options, trust_code=trust_code)
    elif is_transformers_folder(folder):
        side = _load_theirs(folder, options)
    else:
        raise ConfigError(
            f"'{folder}' is {kind_of(folder) or 'not there'}; give a run, a model folder of moe_ffn or of "
            "transformers, or an adapter of peft"
        )
    return replace(side, modules=_sparse_modules(side.model))


def _sparse_modules(model: nn.Module) -> dict[str, str]:
    try:
        modules = routing_modules(model)
    except ConfigError:
        return {}
    found = {name: model.get_submodule(path) for name, path in modules.items()}
    return {
        name: modules[name]
        for name, module in found.items()
        if not isinstance(module, FFNBlock) or module.routers()
    }


def _load_ours(folder: Path, options: _Options, *, trust_code: bool) -> _Side:
    options.require_experts(["auto", *BACKENDS])
    tokenizer = None
    if is_run(folder):
        saved = load_run(folder, trust_code=trust_code).saved_model
        decoder, tokenizer = saved.decoder, saved.tokenizer
    else:
        decoder = load_pretrained(folder, trust_code=trust_code)
        if kind_of(folder / TOKENIZER_FILE) is not None:
            tokenizer = load_tokenizer(folder)
    if options.dtype is not None:
        decoder.to(DTYPES[options.dtype])
    if options.experts is not None:
        for module in decoder.modules():
            if isinstance(module, MatrixExperts):
                module.config = module.config.model_copy(update={"backend": options.experts})
    return _Side(
        folder,
        options,
        decoder,
        None if tokenizer is None else lambda text: tokenizer.encode(text).tolist(),
        decoder.embedding.num_embeddings,
        decoder.max_seq_len,
    )


def _load_theirs(folder: Path, options: _Options) -> _Side:
    options.require_experts(THEIR_EXPERTS)
    chosen: dict[str, Any] = {}
    if options.dtype is not None:
        chosen["dtype"] = DTYPES[options.dtype]
    if options.experts is not None:
        chosen["experts_implementation"] = options.experts
    if options.experts == "moe_ffn":
        register()
    model = load_hf_model(folder, **chosen)
    if options.dtype == "float64" and options.experts is None and _sparse_modules(model):
        model.set_experts_implementation("eager")  # other implementations lack float64
    encode = None
    if kind_of(folder / TOKENIZER_FILE) is not None:
        encode = partial(encode_utf8, load_hf_tokenizer(folder)[0])
    vocab_size = model.get_input_embeddings().num_embeddings
    return _Side(folder, options, model, encode, vocab_size, max_length_of(model) or MAX_LENGTH)


def _merge(folder: Path, base: _Side) -> _Side:
    """Merge an adapter of peft into its base."""
    adapted = load_adapter(folder, base.model, base.folder)
    if adapted.unused:
        raise wrong_base(folder, base.folder, f"which has no place for {adapted.unused[0]}")
    if adapted.missing:
        raise wrong_base(folder, base.folder, f"for which it lacks {adapted.missing[0]}")
    merged = adapted.model.merge_and_unload()
    return replace(base, folder=folder, model=merged.eval(), is_merged=True)


def _require_same_shape(a: _Side, b: _Side) -> None:
    """Raise ConfigError if the models have other vocabularies, layers or experts."""
    both = "A and B must be versions of one model, but"
    if a.vocab_size != b.vocab_size:
        raise ConfigError(
            f"{both} A has a vocabulary of {a.vocab_size:,} tokens and B of {b.vocab_size:,}"
        )
    if a.num_layers != b.num_layers:
        raise ConfigError(f"{both} A has {a.num_layers} layers and B has {b.num_layers}")
    if not (a.modules and b.modules):
        return
    if a.modules.keys() != b.modules.keys():
        name = min(a.modules.keys() ^ b.modules.keys())
        sparse, dense = ("A", "B") if name in a.modules else ("B", "A")
        raise ConfigError(
            f"{both} layer {short_name(name)} is sparse in {sparse} and dense in {dense}"
        )
    for name in a.modules:
        counts = [count_experts(side.model.get_submodule(side.modules[name])) for side in (a, b)]
        if counts[0] != counts[1]:
            raise ConfigError(
                f"{both} layer {short_name(name)} has {counts[0]} experts in A and {counts[1]} in B"
            )


# -- the text


def _encode(sides: tuple[_Side, _Side], text: bytes) -> Tensor:
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


# -- the weights


def _compare_tensors(a: _Side, b: _Side) -> dict[str, Any]:
    try:
        ours, theirs = _tensors(a, b), _tensors(b, a)
    except ConfigError as error:
        return {
            "num_tensors": 0, "tensors": (), "only_a": (), "only_b": (), "rounding": None,
            "notes": (f"tensors are not compared: {error}",),
        }  # fmt: skip
    common = [name for name in ours if name in theirs]
    found: list[TensorDifference] = []
    rounding = None
    for name in common:
        one, two = ours[name], theirs[name]
        if one.shape != two.shape:
            raise ConfigError(
                f"A and B must be versions of one model, but {name} is {tuple(one.shape)} in A and "
                f"{tuple(two.shape)} in B"
            )
        if one.dtype != two.dtype:
            coarse = max((one.dtype, two.dtype), key=lambda dtype: torch.finfo(dtype).eps)
            one, two = one.to(coarse), two.to(coarse)
            rounding = dtype_name(coarse)
        if not torch.equal(one, two):
            found.append(_tensor_difference(name, one, two))
    found.sort(key=lambda tensor: -tensor.relative)
    return {
        "num_tensors": len(common),
        "tensors": tuple(found),
        "only_a": tuple(name for name in ours if name not in theirs),
        "only_b": tuple(name for name in theirs if name not in ours),
        "rounding": rounding,
        "notes": (),
    }


def _tensors(side: _Side, other: _Side) -> dict[str, Tensor]:
    """Return the tensors of a model; if only the other is ours, by our names and in our layout."""
    if isinstance(side.model, Decoder):
        return distinct_tensors(side.model)
    if isinstance(other.model, Decoder):
        if side.is_merged:
            raise ConfigError(
                "the adapter's base is a model of transformers, the other model is not"
            )
        return distinct_tensors(load_transformers(side.folder))
    named: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in side.model.state_dict().items():
        named.setdefault(tensor.data_ptr(), (name, tensor))  # tied tensors once
    return dict(named.values())


def _tensor_difference(name: str, one: Tensor, two: Tensor) -> TensorDifference:
    dtype = torch.promote_types(one.dtype, torch.float32)
    one, two = one.to(dtype), two.to(dtype)
    distance = (two - one).abs()
    largest = float(distance.max())
    rows = distance.flatten(1).amax(1) if distance.ndim > 1 else distance.flatten()
    scale = float(one.abs().max())
    return TensorDifference(
        name,
        largest,
        largest / scale if scale and math.isfinite(largest) else math.inf,
        rows=int((rows != 0).sum()),
        num_rows=len(rows),
    )


# -- the outputs


class _Positions:
    """Sums over the tokens at each position of a window."""

    def __init__(self, length: int) -> None:
        self.num_tokens = torch.zeros(length, dtype=torch.int64)
        self.kl = torch.zeros(length, dtype=torch.float64)
        self.kl_replayed = torch.zeros(length, dtype=torch.float64)
        self.largest_logit = torch.zeros(length, dtype=torch.float64)
        self.first_not_finite: dict[str, int] = {}
        self.num_seen = 0

    def add(self, a_SV: Tensor, b_SV: Tensor, replayed_SV: Tensor | None) -> None:
        """Add the logits of a window."""
        a_SV, b_SV = a_SV.double(), b_SV.double()
        finite = {"A": a_SV.isfinite().all(dim=-1), "B": b_SV.isfinite().all(dim=-1)}
        for side, finite_S in finite.items():
            if not finite_S.all():
                first = self.num_seen + int(finite_S.long().argmin())
                self.first_not_finite.setdefault(side, first)
        real_S = finite["A"] & finite["B"]
        self.num_seen += len(a_SV)
        distance_S = (b_SV - a_SV).abs().amax(dim=-1).masked_fill(~real_S, 0)
        self.num_tokens += real_S.cpu()
        self.largest_logit = torch.maximum(self.largest_logit, distance_S.cpu())
        self.kl += _kl(a_SV, b_SV).masked_fill(~real_S, 0).cpu()
        if replayed_SV is not None:
            self.kl_replayed += _kl(a_SV, replayed_SV.double()).masked_fill(~real_S, 0).cpu()

    def between(self, first: int, last: int, *, replayed: bool) -> PositionDifference:
        """Return the means over the positions from `first` to `last`."""
        part = slice(first, last + 1)
        count = int(self.num_tokens[part].sum())
        mean = max(count, 1)
        return PositionDifference(
            first,
            last,
            count,
            float(self.kl[part].sum()) / mean,
            float(self.largest_logit[part].max()),
            float(self.kl_replayed[part].sum()) / mean if replayed else None,
        )


def _kl(a_SV: Tensor, b_SV: Tensor) -> Tensor:
    """Return KL(A || B) of each token, float64 (S,)."""
    log_a_SV, log_b_SV = a_SV.log_softmax(dim=-1), b_SV.log_softmax(dim=-1)
    return (log_a_SV.exp() * (log_a_SV - log_b_SV)).sum(dim=-1).clamp(min=0)


@torch.no_grad()
def _compare_outputs(a: _Side, b: _Side, windows: Tensor, record: Tensor | None) -> dict[str, Any]:
    length = windows.shape[1]
    positions = _Positions(length)
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
            replayed_BSV, _ = _run(b, ids_BS, given)
        for row in range(len(ids_BS)):
            again_SV = None if replayed_BSV is None else replayed_BSV[row]
            positions.add(a_BSV[row], b_BSV[row], again_SV)
        flipped_T = torch.zeros(ids_BS.numel(), dtype=torch.bool, device=ids_BS.device)
        for name in routings_a.keys() & routings_b.keys():
            if not is_inner(name):
                changed_T = _changed(routings_a[name], routings_b[name])
                flips[name] = flips.get(name, 0) + int(changed_T.sum())
                flipped_T |= changed_T
        num_flipped += int(flipped_T.sum())
    has_replay = bool(replayed_layers)
    every = positions.between(0, length - 1, replayed=has_replay)
    return {
        "kl": every.kl,
        "largest_logit": every.largest_logit,
        "kl_replayed": every.kl_replayed,
        "not_finite": windows.numel() - every.num_tokens,
        "first_not_finite": dict(sorted(positions.first_not_finite.items())),
        "positions": tuple(
            positions.between(first, min(last, length - 1), replayed=has_replay)
            for first, last in _buckets(length)
        ),
        "flips": {n: flips[n] / windows.numel() for n in sorted(flips, key=layer_number)},
        "flipped": num_flipped / windows.numel() if flips else None,
        "notes": notes,
    }


def _buckets(length: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of positions: 0 to 3, 4 to 15, 16 to 63 and so on."""
    first, end = 0, 4
    while first < length:
        yield first, end - 1
        first, end = end, 4 * end


def _replayable(a: _Side, b: _Side) -> tuple[list[str], tuple[str, ...]]:
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
    side: _Side, ids_BS: Tensor, given: Mapping[str, Routing] | None = None
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


def _recorded(side: _Side, record: Tensor, routings: Mapping[str, Routing]) -> dict[str, Routing]:
    """Return the routings of a model with recorded experts instead of its own."""
    found: dict[str, Routing] = {}
    for name, ids in recorded_layers(side.model, record).items():
        own_N, ids_N = (
            routings[name].expert_ids_N,
            ids.reshape(-1).to(routings[name].expert_ids_N.device),
        )
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


def short(number: float) -> str:
    """Return a number with two digits."""
    return f"{number:#.2g}".rstrip(".")


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
