"""The two models of a comparison, A and B: their folders, tokenizers and tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from moe_ffn.config.errors import ConfigError, nearest_or_all, show
from moe_ffn.config.files import kind_of
from moe_ffn.config.option_tree import differences, flatten
from moe_ffn.experts.matrices import MatrixExperts
from moe_ffn.ffn.base import short_name
from moe_ffn.hf.from_transformers import load_transformers
from moe_ffn.interop.diff.difference import TensorDifference
from moe_ffn.interop.kernels import register
from moe_ffn.interop.live_models import (
    base_of_adapter,
    encode_utf8,
    is_adapter_folder,
    is_transformers_folder,
    load_adapter,
    load_hf_model,
    load_hf_tokenizer,
    max_length_of,
    wrong_base,
)
from moe_ffn.interop.replaying import count_experts
from moe_ffn.interop.routings import sparse_modules
from moe_ffn.kernels.select import BackendName
from moe_ffn.model.decoder import Decoder
from moe_ffn.outputs import dtype_name
from moe_ffn.weights.open_model import open_model
from moe_ffn.weights.pretrained import MODEL_CONFIG_FILE, TOKENIZER_FILE, distinct_tensors

DTYPE_FLAGS = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}

THEIR_EXPERTS = ("eager", "batched_mm", "grouped_mm", "moe_ffn")
"""Implementations of the experts in transformers."""

MAX_LENGTH = 512
"""Default maximum number of tokens of a window."""


@dataclass(frozen=True)
class LoadOptions:
    dtype: str | None
    experts: str | None
    side: str
    """`a` or `b`; messages name the options."""

    def __post_init__(self) -> None:
        if self.dtype not in (None, *DTYPE_FLAGS):
            raise ConfigError(
                f"--dtype-{self.side}: {show(self.dtype)} is unknown{nearest_or_all(self.dtype, DTYPE_FLAGS)}"
            )

    def require_experts(self, known: Any) -> None:
        if self.experts not in (None, *known):
            raise ConfigError(
                f"--experts-{self.side}: {show(self.experts)} is unknown for this model"
                f"{nearest_or_all(self.experts, known)}"
            )


@dataclass(frozen=True)
class ComparedModel:
    """One of the two models."""

    folder: Path
    options: LoadOptions
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


def load(folder: Path, other: Path, options: LoadOptions, *, trust_code: bool) -> ComparedModel:
    """Load the model in a folder; an adapter is merged into its base, or into `other` if that is not here."""
    if is_adapter_folder(folder):
        base = Path(base_of_adapter(folder) or other)
        if kind_of(base / MODEL_CONFIG_FILE) is None or is_adapter_folder(base):
            base = other
        if is_adapter_folder(base):
            raise ConfigError(
                f"'{folder}' and '{other}' are both adapters; give the base model of one of them, or merge "
                "both"
            )
        side = load(base, folder, options, trust_code=trust_code)
        adapted = load_adapter(folder, side.model, base)
        if adapted.unused:
            raise wrong_base(folder, base, f", which has no place for {adapted.unused[0]}")
        if adapted.missing:
            raise wrong_base(folder, base, f", for which it lacks {adapted.missing[0]}")
        merged = adapted.model.merge_and_unload().eval()
        return replace(side, folder=folder, model=merged, is_merged=True)
    if is_transformers_folder(folder):
        side = _load_theirs(folder, options)
    else:
        side = _load_ours(folder, options, trust_code=trust_code)
    return replace(side, modules=_sparse_modules(side.model))


def _sparse_modules(model: nn.Module) -> dict[str, str]:
    try:
        return sparse_modules(model)
    except ConfigError:
        return {}


def _load_ours(folder: Path, options: LoadOptions, *, trust_code: bool) -> ComparedModel:
    wanted = "a run, a model or an adapter of peft"
    model = open_model(folder, trust_code=trust_code, wanted=wanted)
    options.require_experts(get_args(BackendName))
    decoder, tokenizer = model.decoder, model.found_tokenizer
    if options.dtype is not None:
        decoder.to(DTYPE_FLAGS[options.dtype])
    if options.experts is not None:
        for module in decoder.modules():
            if isinstance(module, MatrixExperts):
                module.config = module.config.model_copy(update={"backend": options.experts})
    return ComparedModel(
        folder,
        options,
        decoder,
        None if tokenizer is None else lambda text: tokenizer.encode(text).tolist(),
        decoder.embedding.num_embeddings,
        decoder.max_seq_len,
    )


def _load_theirs(folder: Path, options: LoadOptions) -> ComparedModel:
    options.require_experts(THEIR_EXPERTS)
    if options.experts == "moe_ffn":
        register()
    chosen = {
        "dtype": DTYPE_FLAGS.get(options.dtype or ""),
        "experts_implementation": options.experts,
    }
    model = load_hf_model(folder, **{key: value for key, value in chosen.items() if value})
    if options.dtype == "float64" and options.experts is None and _sparse_modules(model):
        model.set_experts_implementation("eager")  # other implementations lack float64
    encode = None
    if kind_of(folder / TOKENIZER_FILE) is not None:
        encode = partial(encode_utf8, load_hf_tokenizer(folder)[0])
    vocab_size = model.get_input_embeddings().num_embeddings
    return ComparedModel(
        folder, options, model, encode, vocab_size, max_length_of(model) or MAX_LENGTH
    )


def require_same_shape(a: ComparedModel, b: ComparedModel) -> None:
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


# -- the weights


def compare_tensors(a: ComparedModel, b: ComparedModel) -> dict[str, Any]:
    ours, theirs, notes = dict[str, Tensor](), dict[str, Tensor](), ()
    try:
        ours, theirs = _tensors(a, b), _tensors(b, a)
    except ConfigError as error:
        notes = (f"tensors are not compared: {error}",)
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
        "notes": notes,
    }


def differing_options(a: ComparedModel, b: ComparedModel) -> tuple[str, ...]:
    """Return a note on the options that differ between the configs of two models of one library.

    If a section has another `type`, the options that only one of the types has are left out.
    """
    is_ours = isinstance(a.model, Decoder)
    if is_ours != isinstance(b.model, Decoder):
        return ()
    configs = (side.model.config for side in (a, b))
    ours, theirs = (flatten(c.to_dict() if is_ours else c.to_diff_dict()) for c in configs)
    found = differences(ours, theirs)
    other_type = tuple(name.removesuffix("type") for name in found if name.endswith(".type"))
    differing = [
        f"{name} ({show(in_a)} in A, {show(in_b)} in B)"
        for name, (in_a, in_b) in found.items()
        if name not in _NOT_OF_THE_MODEL
        and not (name.startswith(other_type) and None in (in_a, in_b))
    ]
    return (f"options differ: {', '.join(differing)}",) if differing else ()


_NOT_OF_THE_MODEL = {"_name_or_path", "dtype", "transformers_version", "architectures", "use_cache"}
"""Options of a transformers config that do not change what the model computes in its dtype."""


def _tensors(side: ComparedModel, other: ComparedModel) -> dict[str, Tensor]:
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
