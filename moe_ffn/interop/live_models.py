"""Models and tokenizers of transformers, read from a folder, and how a model routes a text."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_ffn.config.errors import ConfigError, first_line, import_optional, show
from moe_ffn.config.files import kind_of, read_object
from moe_ffn.data.tokenizer import bytes_of_token
from moe_ffn.interop.kernels import NEED_TRANSFORMERS
from moe_ffn.interop.routings import is_experts, routing_modules, watch
from moe_ffn.outputs import Routing
from moe_ffn.weights.pretrained import (
    MODEL_CONFIG_FILE,
    MODEL_TYPE,
    TOKENIZER_FILE,
    naming_failures,
    no_tokenizer,
    open_weights,
    require_fitting,
    require_floating,
    require_known_ids,
    weight_files,
)


@dataclass(frozen=True)
class RoutedPrompt:
    """Routing decisions of a model for a text."""

    tokens: Sequence[bytes]
    """Bytes of each token, or the name of a special token."""
    routings: dict[str, Routing]
    """Layer -> routing."""
    num_layers: int
    predictions: Sequence[tuple[bytes, float]]
    """Most probable next token after each token, and its probability."""


def route_text(folder: Path, text: bytes) -> RoutedPrompt:
    """Run the model in a folder of transformers on a text, as one sequence; no code of the folder runs.
    ConfigError without transformers or a router, for a damaged folder, pickles, or a text too long or not
    UTF-8.
    """
    model = load_hf_model(folder)
    try:
        routing_modules(model)
    except ConfigError as error:
        raise ConfigError(f"'{folder}': {error}; give a sparse model") from error
    tokenizer, is_byte_level = load_hf_tokenizer(folder)
    ids = encode_utf8(tokenizer, text)
    max_length = max_length_of(model) or len(ids)
    if not 0 < len(ids) <= max_length:
        raise ConfigError(
            f"--text: has {len(ids)} tokens, but '{folder}' accepts 1 to {max_length}; give another text"
        )
    require_known_ids(ids, model.get_input_embeddings().num_embeddings, folder)

    def token_bytes(token_id: int) -> bytes:
        token = tokenizer.convert_ids_to_tokens(token_id)
        if token is None:  # the embedding may have unused rows
            return f"<{token_id}>".encode()
        special = token_id in tokenizer.all_special_ids
        return token.encode() if special else bytes_of_token(token, byte_level=is_byte_level)

    with watch(model) as passes, torch.no_grad():
        logits_BSV: Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits
    probabilities, best_ids = logits_BSV[0].float().softmax(dim=-1).max(dim=-1)
    return RoutedPrompt(
        tokens=list(map(token_bytes, ids)),
        routings=passes[0],
        num_layers=model.config.get_text_config().num_hidden_layers,
        predictions=[
            (token_bytes(best_id), probability)
            for best_id, probability in zip(best_ids.tolist(), probabilities.tolist(), strict=True)
        ],
    )


def is_transformers_folder(folder: Path) -> bool:
    """Return True if a folder has a config.json that names an architecture of another library."""
    values = read_object(folder / MODEL_CONFIG_FILE) or {}
    return values.get("model_type", MODEL_TYPE) != MODEL_TYPE


def encode_utf8(tokenizer: Any, text: bytes) -> list[int]:
    """Return the token ids of a text; raise ConfigError if it is not UTF-8."""
    try:
        return tokenizer(text.decode())["input_ids"]
    except UnicodeDecodeError as error:
        raise ConfigError(
            "--text: is not UTF-8, which the tokenizers of transformers need"
        ) from error


def load_hf_model(folder: Path, **options: Any) -> Any:
    """Load a language model in evaluation mode; see `load_with_info`, and for errors `route_text`."""
    model, info = load_with_info(folder, **options)
    if missing := sorted(info["missing_keys"]):  # transformers initialises them at random
        raise ConfigError(
            f"'{folder}' has no weight {show(missing[0])}, which its {MODEL_CONFIG_FILE} requires; "
            "download the folder again"
        )
    mismatched = sorted(info["mismatched_keys"])
    expected = {name: shape for name, _, shape in mismatched}
    require_fitting(folder, "this model", expected, {name: shape for name, shape, _ in mismatched})
    return model.eval()


def max_length_of(model: Any) -> int | None:
    """Return the maximum number of tokens that a model reads; None if its config has no limit."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def load_with_info(
    folder: Path, *, accepts_encoder: bool = False, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """Return a language model, read from config.json and safetensors only, and transformers'
    `output_loading_info`, such as `missing_keys`; for errors see `route_text`, but weights that are missing
    or of another shape raise nothing. `options` go to `from_pretrained`; `accepts_encoder` also loads an
    encoder with a decoder.
    """
    transformers = import_optional("transformers", NEED_TRANSFORMERS)
    config = read_object(folder / MODEL_CONFIG_FILE) or {}
    has_encoder = accepts_encoder and config.get("is_encoder_decoder")
    kind: Any = (
        transformers.AutoModelForSeq2SeqLM if has_encoder else transformers.AutoModelForCausalLM
    )
    weight_files(folder)  # rejects pickles
    if "quantization_config" not in config:  # else transformers reads the scales, too
        with open_weights(folder) as slices:
            stored = {name: slices[name].get_dtype() for name in slices if name.endswith("weight")}
        require_floating(folder, stored)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model, info = kind.from_pretrained(
            folder,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # else the error names no tensor
            **options,
        )
    except Exception as error:  # any type: a damaged file raises many
        if "CONVERSION" in str(error):
            _require_equal_experts(folder)
        raise ConfigError(
            f"'{folder}' cannot be read as a language model of type {show(config.get('model_type'))} "
            f"({first_line(error)})"
        ) from error
    if info["mismatched_keys"]:
        _require_equal_experts(folder)
    counts = (
        getattr(module, "num_experts", None) for module in model.modules() if is_experts(module)
    )
    num_experts = next(counts, None)
    k = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    if num_experts is not None and isinstance(k, int) and k > num_experts:
        raise ConfigError(
            f"'{folder / MODEL_CONFIG_FILE}': num_experts_per_tok ({k}) must not exceed the number of "
            f"experts ({num_experts}); lower it"
        )
    return model, info


def _require_equal_experts(folder: Path) -> None:
    """Raise ConfigError if the files lack a tensor of an expert that another one of its layer has, or have it
    in another shape; transformers stacks experts and names none.
    """
    layers: dict[str, dict[str, dict[int, tuple[int, ...]]]] = {}
    with open_weights(folder) as slices:
        for name in sorted(slices):
            if match := re.fullmatch(r"(.*\.experts\.)(\d+)(\..*)", name):
                shapes = layers.setdefault(match[1], {}).setdefault(match[3], {})
                shapes[int(match[2])] = tuple(slices[name].get_shape())
    for layer, parts in layers.items():
        num_experts = 1 + max(max(shapes) for shapes in parts.values())
        for part, shapes in parts.items():
            usual = max(shapes.values(), key=list(shapes.values()).count)
            for number in range(num_experts):
                name = show(f"{layer}{number}{part}")
                if number not in shapes:
                    raise ConfigError(
                        f"'{folder}' lacks {name}, which its other experts have; copy the weights again"
                    )
                if shapes[number] != usual:
                    raise ConfigError(
                        f"'{folder}' has {name} as {shapes[number]}, but other experts have {usual}; copy "
                        "the weights again"
                    )


def load_hf_tokenizer(folder: Path) -> tuple[Any, bool]:
    """Return the tokenizer, and whether it writes bytes in GPT-2's alphabet."""
    path = folder / TOKENIZER_FILE
    if kind_of(path) is None:
        raise no_tokenizer(folder)
    try:
        transformers = import_optional("transformers", NEED_TRANSFORMERS)
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    except Exception as error:  # `tokenizers` raises nothing more precise
        raise ConfigError(f"'{path}' cannot be read ({first_line(error)})") from error
    return tokenizer, "'ByteLevel'" in str((read_object(path) or {}).get("decoder"))


ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True)
class AdaptedModel:
    """A model with an adapter of peft, and the tensors of the adapter that have no counterpart."""

    model: Any
    """PeftModel"""
    unused: tuple[str, ...]
    """Names in the file that the model does not have."""
    missing: tuple[str, ...]
    """Names in the model that the file does not have."""


def is_adapter_folder(folder: Path) -> bool:
    """Return True if a folder has an adapter of peft."""
    return kind_of(folder / ADAPTER_CONFIG) is not None


def base_of_adapter(folder: Path) -> str | None:
    """Return the name or folder of the model on which an adapter was trained."""
    return (read_object(folder / ADAPTER_CONFIG) or {}).get("base_model_name_or_path")


def load_adapter(
    folder: Path, base: Any, base_folder: Path, *, is_trainable: bool = False
) -> AdaptedModel:
    """Put the adapter in a folder onto a model from `base_folder`; ConfigError without peft or safetensors,
    or if a shape does not fit.
    """
    peft = import_optional("peft", "an adapter needs peft")
    from safetensors import safe_open  # peft brings it

    path = folder / ADAPTER_WEIGHTS
    if kind_of(path) is None:
        raise ConfigError(f"'{folder}' has no {ADAPTER_WEIGHTS}; save the adapter as safetensors")
    with naming_failures(path, "read", "copy it again"), safe_open(path, "pt") as file:
        stored = set(file.keys())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft warns of names, which are compared here
            model: Any = peft.PeftModel.from_pretrained(
                base, str(folder), is_trainable=is_trainable
            )
            expected = set(peft.get_peft_model_state_dict(model))
    except Exception as error:  # of many types: names, shapes or the file do not fit
        raise wrong_base(folder, base_folder, f" ({first_line(error)})") from error
    return AdaptedModel(model, tuple(sorted(stored - expected)), tuple(sorted(expected - stored)))


def wrong_base(folder: Path, base_folder: Path, problem: str) -> ConfigError:
    """Return the error for an adapter that does not belong to a model."""
    name = base_of_adapter(folder)
    trained = f"; it was trained on {show(name)}" if name else ""
    return ConfigError(f"'{folder}' is not an adapter for '{base_folder}'{problem}{trained}")
