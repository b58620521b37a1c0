"""Model folders: config, weights as safetensors, and tokenizer; written atomically.

    moe_ffn.save_pretrained(decoder, "models/mine", tokenizer)
    decoder = moe_ffn.load_pretrained("models/mine")

Large weights are split into several files with an index, named as on Hugging Face.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moe_ffn.config.base import MAX_COUNT, Config
from moe_ffn.config.errors import ConfigError, command, first_line, show
from moe_ffn.config.files import (
    kind_of,
    read_object,
    reason,
    replacing_folder,
    split_into_files,
    write_file,
)
from moe_ffn.config.process_memory import memory_errors_as_config_errors
from moe_ffn.config.trust import accepting_code, only_trusted_code
from moe_ffn.config.yaml_files import read_config
from moe_ffn.data.tokenizer import Tokenizer, read_tokenizer
from moe_ffn.ffn.base import short_name
from moe_ffn.model.decoder import Decoder, DecoderConfig
from moe_ffn.routing import RouterConfig
from moe_ffn.runs.custom_code import code_files, portable_options
from moe_ffn.runs.folder import CODE_FILE, CODE_FOLDER, MODEL_FOLDER

MODEL_TYPE = "moe_ffn"
MODEL_CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Supported dtypes of safetensors; quantised weights have others, and their scales are separate tensors."""

MIN_FILE_BYTES, WEIGHTS_SHARE = 2**28, 1 / 8
"""Maximum size of a weight file: bytes or share of all weights, whichever is larger. One file is in memory at
a time."""


class PretrainedConfig(Config, frozen=True):
    """The content of `config.json` in a model folder."""

    model_type: Literal["moe_ffn"] = "moe_ffn"
    """Name of this library, so that other libraries reject the folder."""
    vocab_size: int = Field(ge=1, le=MAX_COUNT)
    """Number of tokens in the vocabulary."""
    max_seq_len: int = Field(ge=1, le=MAX_COUNT)
    """Maximum number of tokens in a sequence."""
    model: DecoderConfig
    """Options of the decoder."""

    def build(self) -> Decoder:
        return self.model.build(self.vocab_size, self.max_seq_len)


# -- writing


def save_pretrained(
    decoder: Decoder, folder: str | Path, tokenizer: Tokenizer | None = None
) -> None:
    """Write a decoder and its tokenizer as a model folder, replacing a model folder that exists.

    Raises:
        ConfigError: the folder holds other files or cannot be written, or the model is no Decoder, has
            adapters of peft or a k that its config rejects; then nothing changes.
    """
    if any(type(module).__module__.split(".")[0] == "peft" for module in decoder.modules()):
        raise ConfigError(
            "the model has adapters of peft, which a model folder cannot contain; save what "
            "merge_and_unload() returns"
        )
    if not isinstance(decoder, Decoder):
        raise ConfigError(
            f"save_pretrained writes a Decoder, but got a {type(decoder).__name__}; save your own model with "
            "torch.save: its state_dict(), and the options of its blocks"
        )
    for name, info in decoder.config.router_infos().items():
        _require_readable(name, info.router)
    write_model_folder(Path(folder), decoder, decoder.state_dict(), tokenizer)


def _require_readable(name: str, router: RouterConfig) -> None:
    """Raise ConfigError for a router with a k of `Decoder.set_k` that its config rejects."""
    try:
        type(router)(**router.to_dict())
    except ConfigError as error:
        reason = str(error).partition(";")[0]
        raise ConfigError(
            f"layer {short_name(name)}: {reason}, and no model folder may hold it; call set_k with a larger "
            "k before you save"
        ) from error


def write_model_folder(
    folder: Path,
    decoder: Decoder,
    weights: Mapping[str, Tensor],
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write a model folder, with a copy of the code that its config names; for errors see `save_pretrained`.
    Of the decoder only its config, names and shapes are used; `weights` are read one file at a time.
    """
    folder = folder.absolute()
    config = PretrainedConfig(
        vocab_size=decoder.embedding.num_embeddings,
        max_seq_len=decoder.max_seq_len,
        model=decoder.config,
    )
    texts = {MODEL_CONFIG_FILE: json.dumps(portable_options(config), indent=2) + "\n"}
    if tokenizer is not None and (definition := tokenizer.to_hugging_face()) is not None:
        texts[TOKENIZER_FILE] = json.dumps(definition, ensure_ascii=False) + "\n"
    with naming_failures(folder, "written", "make room, or fix its permissions"):
        require_replaceable(folder)
        with replacing_folder(folder) as unfinished:
            for name, text in {**texts, **code_files(config)}.items():
                write_file(unfinished, name, text)
            sizes = {name: value.nbytes for name, value in distinct_tensors(decoder).items()}
            save_tensors(unfinished, sizes, weights.__getitem__)


@contextmanager
def naming_failures(path: Path, action: str, advice: str) -> Iterator[None]:
    """Turn an OSError or SafetensorError into a ConfigError: `path` cannot be read, or written."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
        why = reason(error) if isinstance(error, OSError) else first_line(error)
        raise ConfigError(f"'{path}' cannot be {action} ({why}); {advice}") from error


def require_replaceable(folder: Path) -> bool:
    """Return True if writing replaces a model folder; raise ConfigError if it would delete other files."""
    if (kind := kind_of(folder)) is None:
        return False
    others = [folder.name]
    if kind == "a folder":
        ours = {TOKENIZER_FILE, INDEX_FILE, CODE_FILE, CODE_FOLDER}
        if is_model_folder(folder):
            ours.add(MODEL_CONFIG_FILE)
        names = {path.name for path in entries_of(folder) if path.suffix != ".safetensors"}
        others = sorted(names - ours)
    if others:
        raise ConfigError(
            f"'{folder}' has '{others[0]}', which is not part of a model folder and would be lost; move it, "
            "or give another folder"
        )
    return bool(entries_of(folder))


def entries_of(folder: Path) -> list[Path]:
    """List a folder; raise ConfigError if it is not readable."""
    with naming_failures(folder, "read", "fix its permissions"):
        return list(folder.iterdir())


def save_tensors(folder: Path, sizes: Mapping[str, int], tensor: Callable[[str], Tensor]) -> None:
    """Write tensors of these sizes in bytes, with an index if they need several files; the tensors of one
    file, which `tensor` returns by name, are in memory at a time.
    """
    from safetensors.torch import save_file

    total = sum(sizes.values())
    files = split_into_files(sizes, max(MIN_FILE_BYTES, total * WEIGHTS_SHARE))
    places: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        file = WEIGHTS_FILE
        if len(files) > 1:
            file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
            places |= dict.fromkeys(names, file)
        # Safetensors rejects tensors that share memory, so each gets its own copy.
        copies = {
            name: tensor(name).detach().clone(memory_format=torch.contiguous_format)
            for name in names
        }
        save_file(copies, folder / file, metadata={"format": "pt"})
        # Safetensors makes the file readable only by its owner.
        shutil.copymode(folder / MODEL_CONFIG_FILE, folder / file)
    if places:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_file(folder, INDEX_FILE, json.dumps(index, indent=2) + "\n")


# -- reading


def is_model_folder(folder: Path) -> bool:
    """Return True if a folder is a model folder of this library."""
    return (read_object(folder / MODEL_CONFIG_FILE) or {}).get("model_type") == MODEL_TYPE


def load_pretrained(folder: str | Path, *, trust_code: bool = False) -> Decoder:
    """Load the decoder of a model folder, in evaluation mode, on the CPU, in the dtype of the files.

    Args:
        trust_code: run the code that `config.json` names, even if none of your runs used it before.

    Raises:
        ConfigError: the folder is not a model folder, is damaged, or has the weights of another model.
    """
    folder = Path(folder)
    config = read_model_config(folder, trust_code=trust_code)
    with _no_init_weights(), memory_errors_as_config_errors(f"'{folder / MODEL_CONFIG_FILE}'"):
        decoder = config.build()
    expected = {name: value.shape for name, value in distinct_tensors(decoder).items()}
    with open_weights(folder) as slices:
        found = {name: part.get_shape() for name, part in slices.items()}
        require_fitting(folder, "this model", expected, found)
        names = (name for name, _ in decoder.named_parameters())
        require_floating(folder, {name: slices[name].get_dtype() for name in names})
        weights = {name: part[...] for name, part in slices.items()}
    assign_weights(decoder, weights)
    return decoder.eval()


def distinct_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """Return the tensors of a decoder by name, tied ones once, under their first name."""
    tied = tied_names(decoder)
    return {name: value for name, value in decoder.state_dict().items() if name not in tied}


def assign_weights(decoder: Decoder, weights: Mapping[str, Tensor]) -> None:
    """Assign tensors to a decoder without copying them; tied weights stay tied."""
    tied = tied_names(decoder)
    aliases = {name: weights[first] for name, first in tied.items()}
    decoder.load_state_dict({**weights, **aliases}, assign=True)
    for name, first in tied.items():  # `assign` makes separate parameters
        owner, _, attribute = name.rpartition(".")
        setattr(decoder.get_submodule(owner), attribute, decoder.get_parameter(first))
    dtype = decoder.embedding.weight.dtype
    for name, buffer in decoder.named_buffers():
        if name not in weights and buffer.is_floating_point():  # computed, not loaded
            owner, _, attribute = name.rpartition(".")
            setattr(decoder.get_submodule(owner), attribute, buffer.to(dtype))


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Load the tokenizer of a model folder.

    Raises:
        ConfigError: the folder has no tokenizer, or a damaged one.
    """
    if (tokenizer := find_tokenizer(folder)) is None:
        raise no_tokenizer(folder)
    return tokenizer


def find_tokenizer(folder: str | Path) -> Tokenizer | None:
    """Load the tokenizer of a model folder; None if it has none, ConfigError if it is damaged."""
    path = Path(folder) / TOKENIZER_FILE
    return None if kind_of(path) is None else read_tokenizer(path, f"'{path}'")


def no_tokenizer(folder: str | Path) -> ConfigError:
    return ConfigError(
        f"'{folder}' has no {TOKENIZER_FILE}, which turns text into tokens; put one there"
    )


def require_known_ids(ids: Sequence[int], vocab_size: int, folder: Path) -> None:
    """Raise ConfigError if the tokenizer in `folder` has an id that the model does not have."""
    if max(ids) >= vocab_size:
        raise ConfigError(
            f"'{folder / TOKENIZER_FILE}' does not fit this model: it has token id {max(ids)}, but the "
            f"vocabulary has {vocab_size} tokens; copy the tokenizer of this model"
        )


def read_config_json(folder: Path) -> dict[str, Any]:
    """Read the `config.json` of a model of any library; raise ConfigError if it is missing or damaged."""
    if kind_of(folder) != "a folder":
        raise ConfigError(
            f"'{folder}' is {kind_of(folder) or 'not there'}; give the folder of a model"
        )
    values = read_object(folder / MODEL_CONFIG_FILE)
    if values is None:
        in_run = folder / MODEL_FOLDER
        hint = f"; the model of this run is in '{in_run}'" if kind_of(in_run) == "a folder" else ""
        raise ConfigError(
            f"'{folder}' is not a model folder: its {MODEL_CONFIG_FILE} is missing or damaged{hint}"
        )
    return values


def read_model_config(folder: Path, *, trust_code: bool = False) -> PretrainedConfig:
    """Read the `config.json` of a model folder; for errors see `load_pretrained`."""
    path = folder / MODEL_CONFIG_FILE
    if (kind := read_config_json(folder).get("model_type")) != MODEL_TYPE:
        raise ConfigError(
            f"'{path}': model_type is {show(kind)}, not '{MODEL_TYPE}'; "
            f"moe_ffn.hf.load_transformers reads models of transformers, and {command('convert')} "
            "converts them"
        )
    with accepting_code(trust_code), only_trusted_code(folder):
        return read_config(path, PretrainedConfig)


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files; raise ConfigError if one is missing, or if all are pickles."""
    if kind_of(folder / WEIGHTS_FILE) == "a file":
        return [folder / WEIGHTS_FILE]
    weight_map = (read_object(folder / INDEX_FILE) or {}).get("weight_map")
    if not isinstance(weight_map, dict):
        pickles = [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]
        why = f"; '{pickles[0].name}' is a pickle, which may run code" if pickles else ""
        raise ConfigError(
            f"'{folder}' has neither {WEIGHTS_FILE} nor an intact {INDEX_FILE}{why}; give weights as "
            "safetensors"
        )
    for name in weight_map.values():
        if Path(str(name)).name != name:
            raise ConfigError(
                f"'{folder / INDEX_FILE}' names {show(name)}, which is not a file in this folder; "
                "copy the folder again"
            )
    files = [folder / name for name in dict.fromkeys(weight_map.values())]
    for file in files:
        if kind_of(file) != "a file":
            raise ConfigError(
                f"'{folder}' lacks '{file.name}', which {INDEX_FILE} names; copy it too"
            )
    return files


@contextmanager
def open_weights(folder: Path) -> Iterator[dict[str, Any]]:
    """Open the weights of a folder: name -> safetensors slice, which reads only the parts you index."""
    from safetensors import safe_open

    slices: dict[str, Any] = {}
    with ExitStack() as stack:
        for path in weight_files(folder):
            stack.enter_context(naming_failures(path, "read", "copy it again"))
            handle = stack.enter_context(safe_open(path, "pt"))
            slices |= {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
        yield slices


def require_fitting(
    folder: Path,
    model: str,
    expected: Mapping[str, Sequence[int]],
    found: Mapping[str, Sequence[int]],
) -> None:
    """Raise ConfigError if names or shapes of the tensors found in a folder differ from those of `model`."""
    for verb, names, where in (
        ("lacks", [name for name in expected if name not in found], ""),
        ("has", [name for name in found if name not in expected], f", which {model} lacks"),
    ):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ConfigError(
                f"'{folder}' {verb} {show(names[0])}{more}{where}: its {MODEL_CONFIG_FILE} belongs to "
                "another model; copy the config and the weights of one model"
            )
    for name, shape in expected.items():
        if tuple(found[name]) != tuple(shape):
            raise ConfigError(
                f"'{folder}' has {show(name)} as {tuple(found[name])}, but its {MODEL_CONFIG_FILE} requires "
                f"{tuple(shape)}; copy the config and the weights of one model"
            )


def require_floating(folder: Path, stored: Mapping[str, str]) -> None:
    """Raise ConfigError if a weight is stored in a dtype other than `SAFETENSORS_DTYPES`."""
    for name, dtype in stored.items():
        if dtype not in SAFETENSORS_DTYPES:
            raise ConfigError(
                f"'{folder}' has quantised weights ({show(name)} is {dtype}); give weights in a "
                "floating-point dtype"
            )


def tied_names(decoder: Decoder) -> dict[str, str]:
    """Map each additional name of a tied parameter to its first name."""
    first: dict[int, str] = {}
    return {
        name: first[id(parameter)]
        for name, parameter in decoder.named_parameters(remove_duplicate=False)
        if first.setdefault(id(parameter), name) != name
    }


@contextmanager
def _no_init_weights() -> Iterator[None]:
    """Skip the initialisation of weights, which are replaced anyway.

    The meta device would not do: buffers such as rotary tables are computed, not loaded.
    """
    deterministic: Any = torch.utils.deterministic
    fill = (
        deterministic.fill_uninitialized_memory
    )  # True: deterministic mode fills tensors with NaN
    deterministic.fill_uninitialized_memory = False
    try:
        with _SkipInit():
            yield
    finally:
        deterministic.fill_uninitialized_memory = fill


class _SkipInit(TorchFunctionMode):
    _FILLS = (Tensor.normal_, Tensor.uniform_)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # A fill with its own generator computes a buffer that is not saved.
        if func in self._FILLS and args and kwargs.get("generator") is None:
            return args[0]
        return func(*args, **kwargs)
