"""Read a model folder of transformers as our decoder, or a single feed-forward block from it.

    decoder = moe_ffn.hf.load_transformers("models/theirs")

transformers need not be installed. Tensors are read one by one, and experts one expert at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_ffn.config.base import Config
from moe_ffn.config.errors import ConfigError, nearest_or_all, show
from moe_ffn.config.option_tree import nest_options
from moe_ffn.config.yaml_files import validate
from moe_ffn.ffn.base import FFNBlock, FFNConfig
from moe_ffn.hf.families import BY_TYPE, OUTSIDE_LAYERS, Family
from moe_ffn.hf.layouts import WeightSlice
from moe_ffn.hf.options import HFConfig, OptionMapping, jittered
from moe_ffn.model.decoder import Decoder
from moe_ffn.weights.pretrained import (
    MODEL_CONFIG_FILE,
    MODEL_TYPE,
    SAFETENSORS_DTYPES,
    PretrainedConfig,
    assign_weights,
    distinct_tensors,
    open_weights,
    read_config_json,
    require_fitting,
    require_floating,
)


def load_transformers(folder: str | Path) -> Decoder:
    """Load the decoder in a folder of transformers, in evaluation mode, on the CPU, in its own dtype.

    `moe_ffn.load_tokenizer` reads the tokenizer in the same folder.

    Raises:
        ConfigError: the folder is damaged, or our decoder does not support its architecture or one of its
            options.
    """
    folder = Path(folder)
    family, hf = _read_hf_config(folder)
    config = config_of(family, hf)
    decoder = config.model.build_empty(config.vocab_size, config.max_seq_len)
    weights = _read_tensors(folder, family, hf, distinct_tensors(decoder))
    assign_weights(decoder, weights)
    # Position tables are computed, not loaded.
    decoder.positions = config.model.positions.build(
        config.model.d_model, config.model.head_dim, config.max_seq_len
    ).to(decoder.embedding.weight.dtype)
    return decoder.eval()


def sparse_options(family: Family, hf: HFConfig) -> dict[str, Any]:
    """Return the options of the sparse block, as in YAML, of a model that may have no width of dense blocks;
    for errors see `load_transformers`.
    """
    hf = family.complete(replace(hf, defaults={"intermediate_size": None}))
    return _read_options(family.ffn, hf)["sparse"]


def _read_options(parts: Iterable[OptionMapping], hf: HFConfig) -> dict[str, Any]:
    """Return nested options of the decoder, with `sparse_layers` and its `sparse` and `dense` block."""
    options: dict[str, Any] = {}
    for part in parts:
        options |= part.read(hf)
    return nest_options(options.items())


class _BlockConfig(Config, frozen=True):
    ffn: FFNConfig


def load_ffn(folder: str | Path, layer: int) -> FFNBlock:
    """Load the feed-forward block of one layer from a folder of transformers; see `load_transformers`."""
    folder = Path(folder)
    family, hf = _read_hf_config(folder)
    if layer not in hf.layers():
        raise ConfigError(f"layer must be in [0, {len(hf.layers())}), got {layer}")
    options = _read_options(family.ffn, hf)
    kind = "sparse" if layer in options["sparse_layers"] else "dense"
    config = validate(_BlockConfig, {"ffn": jittered(options[kind])}, hf.where)
    with torch.device("meta"):
        block = config.ffn.build(hf.count("hidden_size"))
    ours = f"layers.{layer}.ffn."
    expected = {ours + name: value for name, value in block.state_dict().items()}
    theirs = tuple(f"model.layers.{layer}.{name}." for name in ("mlp", "block_sparse_moe"))
    weights = _read_tensors(folder, family, hf, expected, theirs)
    state = {name.removeprefix(ours): value for name, value in weights.items()}
    block.load_state_dict(state, assign=True)
    return block.eval()


def architecture_of(folder: Path) -> str:
    """Return the architecture of a folder, such as `qwen3_moe`; raise ConfigError if we do not support it."""
    return _read_hf_config(folder)[0].model_type


def _read_hf_config(folder: Path) -> tuple[Family, HFConfig]:
    path, values = folder / MODEL_CONFIG_FILE, read_config_json(folder)
    model_type = values.get("model_type")
    if model_type == MODEL_TYPE:
        raise ConfigError(f"'{folder}' is a model folder of moe_ffn; use moe_ffn.load_pretrained")
    family = BY_TYPE.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        hint = nearest_or_all(str(model_type), BY_TYPE)
        raise ConfigError(f"'{path}': model_type {show(model_type)} is not supported{hint}")
    hf = family.complete(HFConfig(f"'{path}'", values))
    if hf.get("quantization_config"):
        raise hf.error("quantization_config is given", "weights in a floating-point dtype")
    return family, hf


def config_of(family: Family, hf: HFConfig) -> PretrainedConfig:
    """Return our config of a model of transformers; for errors see `load_transformers`."""
    model = _read_options((*family.decoder, *family.ffn), hf)
    sparse_layers, sparse, dense = (
        model.pop(key, None) for key in ("sparse_layers", "sparse", "dense")
    )
    model["ffn"] = jittered(sparse) if sparse_layers else dense
    if sparse_layers:
        model["ffn_at"] = {str(n): dense for n in hf.layers() if n not in sparse_layers}
    sizes = {"vocab_size": hf["vocab_size"], "max_seq_len": hf["max_position_embeddings"]}
    return validate(PretrainedConfig, {**sizes, "model": model}, hf.where)


def _read_tensors(
    folder: Path,
    family: Family,
    hf: HFConfig,
    expected: Mapping[str, Tensor],
    prefixes: tuple[str, ...] = ("",),
) -> dict[str, Tensor]:
    """Read tensors by our names, shaped as `expected`; all tensors with one of the prefixes must be used."""
    with open_weights(folder) as slices:
        pieces: dict[str, list[WeightSlice]] = {}
        for name, value in expected.items():
            forms = layout_of(family, name)(value.shape, hf)
            stored = (form for form in forms if any(piece.name in slices for piece in form))
            pieces[name] = next(stored, forms[0])
        shapes = {
            piece.name: piece.part(expected[name]).shape
            for name, form in pieces.items()
            for piece in form
        }
        require_fitting(
            folder,
            family.model_type,
            dict(sorted(shapes.items())),
            {
                name: tuple(slices[name].get_shape())
                for name in sorted(slices)
                if name in shapes
                or (name.startswith(prefixes) and not _is_ignored(name, hf, slices))
            },
        )
        stored = {name: slices[name].get_dtype() for name in shapes}
        require_floating(folder, stored)
        largest = pieces[max(expected, key=lambda name: expected[name].numel())][0].name
        dtype = SAFETENSORS_DTYPES[stored[largest]]
        return {
            # Correction biases (names end with the axis E) are float32 in every model.
            name: _assemble(
                slices, pieces[name], value.shape, torch.float32 if name.endswith("_E") else dtype
            )
            for name, value in expected.items()
        }


def layout_of(
    family: Family, name: str
) -> Callable[[torch.Size, HFConfig], list[list[WeightSlice]]]:
    """Return the layout of one of our tensors, by its name in a decoder."""
    if name in OUTSIDE_LAYERS:
        return partial(OUTSIDE_LAYERS[name], "")
    _, layer, in_layer = name.split(".", 2)
    in_layer = in_layer.replace("ffn.ffn.", "ffn.", 1)  # a jittered block contains a block
    return partial(family.names[in_layer], f"model.layers.{layer}.")


def _is_ignored(name: str, hf: HFConfig, slices: Mapping[str, Any]) -> bool:
    """Return True if transformers, too, ignores a tensor."""
    if name == "lm_head.weight" and hf.get("tie_word_embeddings"):
        embedding = slices.get("model.embed_tokens.weight")
        return embedding is not None and torch.equal(embedding[:], slices[name][:])
    if hf.get("num_nextn_predict_layers"):  # modules that predict a second token
        prefix, _, rest = name.partition("model.layers.")
        number = rest.partition(".")[0]
        if not prefix and number.isdecimal() and int(number) not in hf.layers():
            return True
    return name.endswith("rotary_emb.inv_freq")


def _assemble(
    slices: Mapping[str, Any], pieces: list[WeightSlice], shape: torch.Size, dtype: torch.dtype
) -> Tensor:
    """Assemble one of our tensors from pieces in the files, one expert at a time."""
    first = pieces[0]
    if len(pieces) == 1 and first.order is None and first.part is WeightSlice.part:
        return slices[first.name][...].to(dtype)
    ours = torch.empty(shape, dtype=dtype)
    for piece in pieces:
        target, stored = piece.part(ours), slices[piece.name]
        if target.ndim == 3:
            for expert, matrix in enumerate(target):
                matrix.copy_(piece.from_hf(stored[expert : expert + 1][0]))
        else:
            target.copy_(piece.from_hf(stored[:]))
    return ours
