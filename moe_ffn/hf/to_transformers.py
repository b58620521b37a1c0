"""Export our decoder to a folder of transformers, in the architecture with the same routing.

    moe_ffn.hf.export_transformers(decoder, "models/exported", tokenizer)

An export reads its own options back, which finds every option that transformers cannot express. `rewrites.py`
folds some of them into the weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from moe_ffn.config.errors import ConfigError
from moe_ffn.config.files import kind_of, replacing_folder, write_file
from moe_ffn.config.option_tree import differences, flatten
from moe_ffn.data.tokenizer import Tokenizer
from moe_ffn.experts.low_precision import (
    COMPRESSED,
    FakeQuantizedExperts,
    FakeQuantizedExpertsConfig,
    Format,
    pack,
)
from moe_ffn.experts.matrices import MatrixExpertsConfig
from moe_ffn.ffn.base import FFNConfig
from moe_ffn.ffn.dense import HiddenWidthConfig
from moe_ffn.ffn.moe import MoEConfig
from moe_ffn.ffn.wrappers import JitteredConfig
from moe_ffn.hf.families import FAMILIES, Family
from moe_ffn.hf.from_transformers import config_of, layout_of
from moe_ffn.hf.layouts import WeightSlice
from moe_ffn.hf.options import HFConfig, Options
from moe_ffn.hf.rewrites import COMMON, Rewrite, added_weight
from moe_ffn.model.decoder import Decoder, DecoderConfig
from moe_ffn.outputs import dtype_name
from moe_ffn.weights.pretrained import (
    MODEL_CONFIG_FILE,
    TOKENIZER_FILE,
    PretrainedConfig,
    distinct_tensors,
    entries_of,
    naming_failures,
    save_tensors,
)


@dataclass(frozen=True, repr=False)
class Export:
    """Description of our model for transformers."""

    family: Family
    ours: Options
    """Our options, without those that act only in training."""
    config: PretrainedConfig
    """Our config, read back from `options`."""
    options: Mapping[str, Any]
    """Options of transformers, for `config.json`."""
    rewrites: Sequence[Rewrite]
    """Changes that the architecture needs."""
    notes: tuple[str, ...] = ()
    """Remarks: options left out, rewrites, and what other programs ignore or require."""
    packed: Format | None = None
    """Format in which the matrices of the experts are stored; None to store their values."""

    def __repr__(self) -> str:
        return f"Export({self.family.architecture}: {'; '.join(self.notes)})"

    def factor(self, name: str) -> float:
        """Return the factor of one of our tensors."""
        return math.prod(rewrite.factor(name, self.ours) for rewrite in self.rewrites)


def export_transformers(
    decoder: Decoder,
    folder: str | Path,
    tokenizer: Tokenizer | None = None,
    *,
    packed: bool = False,
) -> Export:
    """Write a decoder as a folder that `AutoModelForCausalLM.from_pretrained` reads, with equal logits.

    Each expert has its own tensors.

    Args:
        packed: write the low-precision elements and scales of rounded experts, as compressed-tensors does,
            instead of their rounded values.

    Raises:
        ConfigError: transformers cannot express an option, there are no rounded experts to pack, or `folder`
            exists or cannot be written; nothing is written.
    """
    folder = Path(folder).absolute()
    export = choose_architecture(decoder, has_tokenizer=tokenizer is not None, packed=packed)
    sizes, makers = hf_tensors(decoder, export)
    config = {
        **export.options,
        "model_type": export.family.model_type,
        "architectures": [export.family.architecture],
        "dtype": dtype_name(decoder.embedding.weight.dtype),
        "bos_token_id": None,
        "eos_token_id": None if tokenizer is None else tokenizer.end_of_document,
        "pad_token_id": None,
    }
    if export.packed is not None:
        config["quantization_config"] = _quantization_config(export.packed)
    texts = {MODEL_CONFIG_FILE: config, **_their_tokenizer(tokenizer, decoder.max_seq_len)}
    with naming_failures(folder, "written", "make room, or fix its permissions"):
        require_absent(folder)
        with replacing_folder(folder) as unfinished:
            for name, content in texts.items():
                text = json.dumps(content, indent=2, ensure_ascii=False)
                write_file(unfinished, name, text + "\n")
            save_tensors(unfinished, sizes, lambda name: makers[name]())
    return export


def require_absent(path: Path, what: str = "folder") -> None:
    """Raise ConfigError if `path` exists, except as an empty folder where a folder is to be written."""
    kind = kind_of(path)
    if kind is not None and ((kind, what) != ("a folder", "folder") or entries_of(path)):
        raise ConfigError(f"'{path}' already exists; give a new {what}")


def choose_architecture(
    decoder: Decoder, *, has_tokenizer: bool = False, packed: bool = False
) -> Export:
    """Choose the architecture in `FAMILIES` that gives all options back, after they are written and read,
    with the fewest rewrites; with `has_tokenizer`, not one for which transformers replaces it. ConfigError if
    none does, naming an option that the nearest lacks, or if experts cannot be `packed`.
    """
    stored = _format_to_pack(decoder.config) if packed else None
    ours, left_out = options_of(decoder.config)
    sizes = {
        "vocab_size": decoder.embedding.num_embeddings,
        "max_position_embeddings": decoder.max_seq_len,
    }
    attempts: list[tuple[Export, list[tuple[str, Any, Any]]]] = []
    problem = ""
    for family in FAMILIES:
        if family.is_sparse != bool(ours["sparse_layers"]):
            continue
        try:
            attempts.append(_attempt(family, ours, sizes))
        except ConfigError as error:
            problem = str(error)
    if not attempts:
        raise ConfigError(
            f"no architecture of transformers has all options of this model: {problem}"
        )
    equal = [export for export, different in attempts if not different]
    replaced = [a for a in equal if has_tokenizer and a.family.replaces_tokenizer]
    if len(equal) == len(replaced):
        differing = (attempt for attempt in attempts if attempt[1])
        nearest, different = min(differing, key=lambda attempt: len(attempt[1]))
        path, value, theirs = different[0]
        raise ConfigError(
            f"model.{path} ({json.dumps(value)}) has no counterpart in transformers: "
            f"{nearest.family.model_type}, the nearest architecture, has {json.dumps(theirs)}; train with "
            "that value"
        )
    chosen = min((a for a in equal if a not in replaced), key=lambda a: len(a.rewrites))
    notes = [f"{path} acts only in training and is left out" for path in left_out]
    formats = {part.format for part in decoder.modules() if isinstance(part, FakeQuantizedExperts)}
    how = "written rounded to" if stored is None else "packed as"
    notes += [f"the weights of the experts are {how} {f}" for f in formats if f]
    if stored is not None and stored not in READ_BY_TRANSFORMERS:
        notes += [
            f"transformers 5.23 cannot read experts packed as {stored}; compressed-tensors itself can"
        ]
    notes += [rewrite.note(ours) for rewrite in chosen.rewrites]
    notes += [
        f"{a.family.model_type} would fit, but transformers replaces its tokenizer"
        for a in replaced
    ]
    notes += [*_mlx_notes(chosen), *_llama_cpp_notes(chosen.family, ours)]
    if stored is not None and chosen.family.has_experts_in_one_tensor:
        raise ConfigError(
            f"{chosen.family.model_type} has all experts in one tensor, so they cannot be packed as "
            f"{stored}; convert without --packed"
        )
    if stored is not None and (scale := chosen.factor("layers.0.ffn.experts.down")) != 1:
        raise ConfigError(
            f"model.ffn.router.scale ({scale:g}) multiplies the rounded down projections of "
            f"{chosen.family.model_type}, so they cannot be packed as {stored}; convert without --packed"
        )
    return replace(chosen, notes=tuple(notes), packed=stored)


READ_BY_TRANSFORMERS: frozenset[Format] = frozenset(("mxfp4", "int4", "int8", "fp8"))
"""Formats of packed experts that transformers 5.23 reads, with compressed-tensors 0.20."""


def _format_to_pack(config: DecoderConfig) -> Format:
    """Return the format of all sparse layers' experts; ConfigError if one has none, or two differ."""
    formats: dict[int, Format | None] = {}
    for layer, ffn in enumerate(config.layer_ffns()):
        block = ffn.ffn if isinstance(ffn, JitteredConfig) else ffn
        experts = block.experts if isinstance(block, MoEConfig) else None
        if ffn.router_infos():
            is_rounded = isinstance(experts, FakeQuantizedExpertsConfig)
            formats[layer] = experts.format if is_rounded else None
    first = min(formats, default=0)
    for layer in formats or (0,):
        if (name := formats.get(layer)) is None:
            raise ConfigError(
                f"--packed stores rounded experts, but layer {layer} has none; train with experts: "
                "{type: fake_quantized, format: ...}, or convert without --packed"
            )
        if name != formats[first]:
            raise ConfigError(
                f"--packed stores one format, but the experts of layer {first} are {formats[first]} and "
                f"those of layer {layer} {name}; convert without --packed"
            )
    return cast("Format", formats[first])


def _quantization_config(name: Format) -> dict[str, Any]:
    """Return the description of packed experts for `config.json`, in the words of compressed-tensors."""
    kind, arguments = COMPRESSED[name]
    experts = {
        "targets": [r"re:.*\.experts\.\d+\..*"],
        "weights": {**arguments, "symmetric": True, "dynamic": False},
        "format": kind,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": experts},
        "ignore": [],
        # Makes transformers read packed experts. For other formats it would ignore a scale, or fail.
        **({"dequantize": True} if name in READ_BY_TRANSFORMERS else {}),
    }


def _mlx_notes(export: Export) -> list[str]:
    """Return notes on options that mlx-lm ignores."""
    family, ours, rope = export.family, export.ours, export.options["rope_parameters"]
    if family.has_experts_in_one_tensor:
        return [f"mlx-lm reads {family.model_type} only with quantised experts"]
    ignored = {
        "attention.window": "attention.window" in ours,
        "positions.scaling": family.ignores_scaling_in_mlx and "positions.scaling.type" in ours,
        "positions.scaling.attention_factor": "attention_factor" in rope,
        "positions.scaling.truncate": ours.get("positions.scaling.truncate") is False,
        "the default positions.scaling.attention_factor beside score_mscale": (
            "mscale_all_dim" in rope and not {"mscale", "attention_factor"} & {*rope}
        ),
    }
    return [
        f"mlx-lm ignores {option} in {family.model_type}" for option in ignored if ignored[option]
    ]


def _llama_cpp_notes(family: Family, ours: Options) -> list[str]:
    """Return notes on what llama.cpp computes differently."""
    llama = family.llama_cpp
    if problem := llama.problem(ours):
        require = "and mlx-lm require" if llama.is_same_in_mlx else "requires"
        return [f"llama.cpp {require} {problem} in {family.model_type}"]
    if llama.converter_eps not in (None, ours["norm.eps"]):
        return [
            f"the converter of llama.cpp sets norm.eps to {llama.converter_eps:g}; convert to a .gguf file "
            f"here keeps {ours['norm.eps']:g}"
        ]
    return []


def _attempt(
    family: Family, ours: Options, sizes: Mapping[str, int]
) -> tuple[Export, list[tuple[str, Any, Any]]]:
    """Write options for an architecture, with rewrites until none helps, and return the remaining
    `_differences`; ConfigError if it lacks one.
    """
    options = ours
    available = {**COMMON, **family.rewrites}
    applied: list[Rewrite] = []
    while True:
        written: dict[str, Any] = {**sizes}
        for part in (*family.decoder, *family.ffn):
            written |= part.write(options)
        config = config_of(family, family.complete(HFConfig(family.model_type, written)))
        read, _ = options_of(config.model)
        found = [available.pop(path) for path in differences(options, read) if path in available]
        useful = [rewrite for rewrite in found if rewrite.options(options)]
        if not useful:
            export = Export(family, ours, config, written, applied)
            return export, _differences(options, read)
        applied += useful
        for rewrite in useful:
            options = {**options, **rewrite.options(options)}


def options_of(config: DecoderConfig) -> tuple[dict[str, Any], list[str]]:
    """Return the flat options of a model, as `families.py` names them, with widths for null, and the paths of
    those left out because they act only in training. ConfigError if two sparse or two dense layers differ.
    """
    attention = config.attention
    head_dim = attention.head_width(config.d_model)
    flat = flatten({k: v for k, v in config.to_dict().items() if k not in ("ffn", "ffn_at")})
    flat |= {"attention.num_kv_heads": attention.kv_heads, "attention.head_dim": head_dim}
    windowed = [layer for layer, window in enumerate(config.layer_windows()) if window]
    flat["attention.window_at"] = windowed or None
    if attention.latent is not None:
        flat["attention.latent.value_dim"] = attention.latent.value_dim or head_dim
    seen: dict[str, tuple[int, dict[str, Any]]] = {}
    sparse: list[int] = []
    for layer, ffn in enumerate(config.layer_ffns()):
        kind = "sparse" if ffn.router_infos() else "dense"
        block = _block_options(ffn, config.d_model)
        first_layer, first_block = seen.setdefault(kind, (layer, block))
        if different := _differences(first_block, block):
            path, one, other = different[0]
            raise ConfigError(
                f"model.ffn.{path} is {json.dumps(one)} in layer {first_layer} and {json.dumps(other)} in "
                f"layer {layer}, but transformers has one block for all {kind} layers; train with one value"
            )
        if kind == "sparse":
            sparse.append(layer)
        flat |= {f"{kind}.{path}": value for path, value in block.items()}
    exported = {
        path: value
        for path, value in flat.items()
        if value is not None and not _is_training_only(path)
    }
    left_out = [
        _path(path)
        for path, value in flat.items()
        if value and _is_training_only(path) and _last(path) in ("dropout", "jitter", "factor")
    ]
    return {**exported, "sparse_layers": sparse}, left_out


def _block_options(ffn: FFNConfig, d_model: int) -> dict[str, Any]:
    if isinstance(ffn, JitteredConfig):
        return {**_block_options(ffn.ffn, d_model), "jitter": ffn.jitter}
    experts = ffn.experts if isinstance(ffn, MoEConfig) else None
    if isinstance(experts, FakeQuantizedExpertsConfig) and experts.inputs is None:
        ffn = ffn.model_copy(
            update={"experts": experts.experts}
        )  # the weights are exported rounded
    flat = flatten(ffn.to_dict())
    if isinstance(ffn, HiddenWidthConfig):
        flat["d_ff"] = ffn.width(d_model)
    if isinstance(ffn, MoEConfig):
        if isinstance(ffn.experts, MatrixExpertsConfig):
            flat["experts.d_ff"] = ffn.experts.width(d_model, ffn.experts_per_token)
        if isinstance(ffn.shared_expert, HiddenWidthConfig):
            flat["shared_expert.d_ff"] = ffn.shared_expert.width(d_model)
        if flat.get("router.type") == "elastic_top_k":  # in evaluation, it is top_k
            flat |= {"router.type": "top_k", "router.softmax": "before"}
        if flat.get("router.softmax") == "after":  # equals a softmax over all experts, renormalised
            flat |= {"router.softmax": "before", "router.renormalize": True}
    return {path: value for path, value in flat.items() if value is not None}


_TRAINING_ONLY = {
    *("dropout", "jitter", "backend", "multiple_of", "activation_checkpointing", "k_min", "k_max")
}
"""Last parts of option paths that do not change outputs in evaluation."""


def _is_training_only(path: str) -> bool:
    if path.startswith("sparse.capacity."):
        return _last(path) not in ("eval_factor", "per_sequence")
    if path.startswith("parametrization."):
        return True
    # Attention of transformers has dropout too.
    return path != "attention.dropout" and _last(path) in _TRAINING_ONLY


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _differences(ours: Options, theirs: Options) -> list[tuple[str, Any, Any]]:
    """Return (path, our value, their value) of each difference; different layers and types come first."""
    values = differences(ours, theirs)
    paths = sorted(values, key=lambda path: (path != "sparse_layers", not path.endswith("type")))
    return [(_path(path), *values[path]) for path in paths]


def _path(path: str) -> str:
    """Return the path of an option as the user types it."""
    kind, dot, rest = path.partition(".")
    if path == "sparse_layers":
        return "ffn_at (sparse layers)"
    return f"ffn{dot}{rest}" if kind in ("sparse", "dense") else path


def hf_tensors(
    decoder: Decoder, export: Export
) -> tuple[dict[str, int], dict[str, Callable[[], Tensor]]]:
    """Return the sizes of their tensors in bytes, and functions that make them."""
    config, family = export.config, export.family
    hf = family.complete(HFConfig(family.model_type, export.options))
    empty = config.model.build_empty(config.vocab_size, config.max_seq_len)
    dtype = decoder.embedding.weight.dtype
    state = dict(decoder.state_dict())
    for path, part in decoder.named_modules():
        if isinstance(part, FakeQuantizedExperts):
            rounded = part.rounded() if export.packed is None else {}
            inner = {**part.experts.state_dict(), **rounded}
            state |= {f"{path}.{name}": value for name, value in inner.items()}
    # A jittered block contains the block to export.
    ours = {name.replace(".ffn.ffn.", ".ffn.", 1): value for name, value in state.items()}
    sizes: dict[str, int] = {}
    makers: dict[str, Callable[[], Tensor]] = {}
    for name, shape in distinct_tensors(empty).items():
        tensor = ours[name] if name in ours else added_weight(name, shape.shape, dtype)
        for piece in layout_of(family, name)(shape.shape, hf)[0]:
            if export.packed is not None and shape.ndim == 3:  # matrices of experts
                stem = piece.name.removesuffix("weight")
                for key, stored in pack(piece.part(shape), export.packed).items():
                    sizes[stem + key] = stored.numel() * stored.element_size()
                    makers[stem + key] = partial(_packed, piece, tensor, export.packed, key)
                continue
            sizes[piece.name] = piece.part(shape).numel() * tensor.element_size()
            makers[piece.name] = partial(_part, piece, tensor, export.factor(name))
    return sizes, makers


def _packed(piece: WeightSlice, ours: Tensor, name: Format, key: str) -> Tensor:
    """Return one of the tensors that store the matrix of an expert in a format."""
    of_matrix = None
    if name == "nvfp4":
        # Gate and up are halves of one of our matrices, and share its scale.
        expert_ids = torch.arange(len(ours)).view(-1, 1, 1).expand(ours.shape)
        matrix_OI = ours.detach()[piece.part(expert_ids)[0, 0]]
        of_matrix = matrix_OI.abs().amax().view(1, 1, 1)
    return pack(piece.part(ours.detach()), name, of_matrix)[key]


def _part(piece: WeightSlice, ours: Tensor, factor: float) -> Tensor:
    theirs = piece.to_hf(piece.part(ours.detach()))
    return theirs if factor == 1 else theirs * factor


def _their_tokenizer(tokenizer: Tokenizer | None, max_seq_len: int) -> dict[str, Any]:
    """Return the files of a tokenizer: name -> content."""
    definition = None if tokenizer is None else tokenizer.to_hugging_face()
    if tokenizer is None or definition is None:
        return {}
    special = {token["id"]: token["content"] for token in definition.get("added_tokens", ())}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": special.get(tokenizer.end_of_document),
        "pad_token": special.get(tokenizer.end_of_document),
        "padding_side": "left",  # generation appends on the right
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_seq_len,
    }
    return {TOKENIZER_FILE: definition, "tokenizer_config.json": settings}
