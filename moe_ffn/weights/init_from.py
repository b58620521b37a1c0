"""Start a model from the weights of a trained model: all of them, or those that fit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_ffn.config.errors import ConfigError, command, expand_path, show
from moe_ffn.config.option_tree import differences, flatten, show_value
from moe_ffn.config.trust import accepting_code
from moe_ffn.config.yaml_files import flag_value
from moe_ffn.data.prepare import DataConfig
from moe_ffn.data.tokenizer import FileTokenizerConfig, Tokenizer
from moe_ffn.files import kind_of
from moe_ffn.model.decoder import Decoder, DecoderConfig
from moe_ffn.runs.config import TrainConfig, saved_config
from moe_ffn.runs.folder import CONFIG_FILE, MODEL_FOLDER, is_run, of_library
from moe_ffn.runs.reader import load_model
from moe_ffn.weights.pretrained import (
    TOKENIZER_FILE,
    distinct_tensors,
    is_model_folder,
    load_pretrained,
    load_tokenizer,
    no_tokenizer,
)


@dataclass(frozen=True)
class Source:
    """A trained model, from a model folder or a run."""

    option: str
    """Option that named the folder; messages begin with it."""
    folder: Path
    decoder: Decoder
    """The decoder, in evaluation mode, on the CPU."""
    tokenizer: Tokenizer | None
    """The tokenizer, or None if the folder has none."""
    data: DataConfig | None
    """Data options of the run; None for a model folder."""

    @property
    def tokenizer_config(self) -> FileTokenizerConfig:
        """Config of the tokenizer.

        Raises:
            ConfigError: the folder has no tokenizer.
        """
        path = self.folder / TOKENIZER_FILE
        if self.tokenizer is None:
            raise ConfigError(f"{self.option}: {no_tokenizer(self.folder)}")
        return FileTokenizerConfig(path=str(path))

    def require_same_tokens(self, tokenizer: Tokenizer) -> None:
        """Raise ConfigError if a token id means another text in `tokenizer`."""
        known, ours = self.decoder.embedding.num_embeddings, tokenizer.vocab_size
        advice = "use a folder of the same tokenizer"
        if self.tokenizer is not None:
            advice = (
                "use its own: --data.tokenizer '{type: file, path: "
                f"{self.folder / TOKENIZER_FILE}}}'"
            )
        if known != ours:
            raise ConfigError(
                f"{self.option}: '{self.folder}' knows {known:,} tokens, and the tokenizer of this run has "
                f"{ours:,}; {advice}"
            )
        if self.tokenizer is None:
            return
        pairs = zip(self.tokenizer.token_bytes, tokenizer.token_bytes, strict=True)
        for number, (theirs, mine) in enumerate(pairs):
            if theirs != mine:
                raise ConfigError(
                    f"{self.option}: token {number} is {theirs!r:.40} in the tokenizer of '{self.folder}' "
                    f"but {mine!r:.40} in that of this run, so the embeddings would belong to other tokens; "
                    f"{advice}"
                )


def read_source(folder: str, option: str, *, trust_code: bool = False) -> Source:
    """Read the model of a model folder, or the best weights of a run.

    Args:
        option: option that named the folder, for messages.

    Raises:
        ConfigError: the folder is neither a model nor a run, is damaged, or names untrusted code.
    """
    path = expand_path(folder, option)
    if kind_of(path) != "a folder":
        what = kind_of(path) or "not there"
        raise ConfigError(f"{option}: '{path}' is {what}; give the folder of a model or of a run")
    try:
        with accepting_code(trust_code):
            data = saved_config(path / CONFIG_FILE).data if is_run(path) else None
            place = path if data is None else path / MODEL_FOLDER
            if is_model_folder(place):
                decoder = load_pretrained(place, trust_code=trust_code)
                has_one = kind_of(place / TOKENIZER_FILE) is not None
                tokenizer = load_tokenizer(place) if has_one else None
                return Source(option, path, decoder, tokenizer, data)
            if data is not None:
                saved = load_model(path)
                return Source(option, path, saved.decoder, saved.tokenizer, data)
    except ConfigError as error:
        raise type(error)(f"{option}: {error}") from error
    fix = "give one that `moe_ffn.save_pretrained` or a training run has written"
    raise ConfigError(
        f"{option}: '{path}' is neither the folder of a model of ours nor of a run; "
        f"{of_library(path) or fix}"
    )


def fit_weights(source: Source, decoder: Decoder) -> tuple[dict[str, Tensor], list[str]]:
    """Return the weights from which a decoder can start, by name, and a report in lines.

    A part whose `type` differs keeps its own initial weights, even if the names are equal.

    Args:
        decoder: the model to start; only names and shapes of its weights are read.

    Raises:
        ConfigError: a weight has the same name and another shape.
    """
    found, wanted = source.decoder.state_dict(), distinct_tensors(decoder)
    other = tuple(_parts_of_another_type(source.decoder.config, decoder.config))
    taken = {name: found[name] for name in wanted if name in found and not name.startswith(other)}
    if wrong := [name for name, value in taken.items() if value.shape != wanted[name].shape]:
        name, more = wrong[0], f", and {len(wrong) - 1} more do not fit" if wrong[1:] else ""
        differ = _changes_of_one_type(source.decoder, decoder)
        values = (
            f"{k} is {show_value(old)} there and {show_value(new)} here"
            for k, (old, new) in differ.items()
        )
        flags = (f"--{k} {flag_value(old)}" for k, (old, _) in differ.items())
        fix = f": {', '.join(values)}; give {' '.join(flags)}" if differ else ""
        raise ConfigError(
            f"{source.option}: {name} is {tuple(found[name].shape)} in '{source.folder}' and "
            f"{tuple(wanted[name].shape)} in this model{more}{fix}"
        )
    new = [name for name in wanted if name not in taken]
    left = [name for name in distinct_tensors(source.decoder) if name not in taken]
    lines = [
        f"{source.option}: of {len(taken) + len(new)} tensors {len(taken)} are those of {source.folder}, "
        f"{sum(value.numel() for value in taken.values()):,} numbers"
    ]
    lines += [f"  new:  {name}" for name in _by_layer(new)]
    lines += [f"  left: {name}" for name in _by_layer(left)]
    lines += [
        f"  {key} is {show(new)} (was {show(old)})"
        for key, (old, new) in _changes(source.decoder, decoder).items()
    ]
    if source.tokenizer is None:
        lines.append(f"  it has no {TOKENIZER_FILE}: its token ids may mean other text")
    return taken, lines


def _parts_of_another_type(before: DecoderConfig, now: DecoderConfig) -> Iterator[str]:
    """Yield the prefix of weight names of each part whose `type` differs."""
    old, new = before.layer_ffns(), now.layer_ffns()
    for layer, (ours, theirs) in enumerate(zip(old, new, strict=False)):
        yield from _of_another_type(ours.to_dict(), theirs.to_dict(), f"layers.{layer}.ffn.")
    yield from _of_another_type(before.positions.to_dict(), now.positions.to_dict(), "positions.")


def _changes_of_one_type(source: Decoder, decoder: Decoder) -> dict[str, tuple[Any, Any]]:
    """Return the options in which two models differ, without parts whose `type` differs."""
    other = tuple(_of_another_type(source.config.to_dict(), decoder.config.to_dict(), ""))
    other = tuple(f"model.{prefix}" for prefix in other)
    return {k: v for k, v in _changes(source, decoder).items() if not k.startswith(other)}


def _of_another_type(old: Any, new: Any, prefix: str) -> Iterator[str]:
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return
    if old.get("type") != new.get("type"):
        yield prefix
        return
    for key in old.keys() & new.keys():
        yield from _of_another_type(old[key], new[key], f"{prefix}{key}.")


def _changes(source: Decoder, decoder: Decoder) -> dict[str, tuple[Any, Any]]:
    """Return the options in which two models differ: dotted name -> (old, new)."""
    old, new = (
        flatten({"model": model.config.to_dict(), "data": {"seq_len": model.max_seq_len}})
        for model in (source, decoder)
    )
    return differences(old, new)


def _by_layer(names: Iterable[str]) -> list[str]:
    """Join the names of several layers, as in `layers.0,1,2.ffn.up.weight`."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        before, number, after = re.fullmatch(r"(layers\.)?(?(1)(\d+)|)(.*)", name).groups("")  # pyright: ignore[reportOptionalMemberAccess]
        groups.setdefault((before, after), []).append(number)
    return [before + ",".join(numbers) + after for (before, after), numbers in groups.items()]


# -- how to start a run from a model folder


def written_lines(
    folder: Path, decoder: Decoder, tokenizer: Tokenizer | None, *, replaces: bool
) -> list[str]:
    """Report a model folder that was written, and the command that starts a run from it."""
    instead = ", in place of the model that was there" if replaces else ""
    lines = [f"written: '{folder}', a model folder of moe_ffn{instead}"]
    default = TrainConfig().data.tokenizer.build(())
    own = default if tokenizer is None else tokenizer
    if own.vocab_size != decoder.embedding.num_embeddings:
        has = f"its tokenizer has {own.vocab_size:,}" if tokenizer else "it has no tokenizer"
        return [
            *lines,
            f"no run begins with it: it knows {decoder.embedding.num_embeddings:,} tokens, and {has}",
        ]
    options: dict[str, Any] = {"init_from": str(folder)}
    options |= {f"model.{key}": value for key, value in decoder.config.to_short_dict().items()}
    if any(True for _ in decoder.positions.parameters()):  # learned positions
        options["data.seq_len"] = decoder.max_seq_len
    if own.token_bytes != default.token_bytes:
        options["data.tokenizer"] = {"type": "file", "path": str(folder / TOKENIZER_FILE)}
    flags = (f"--{key} {flag_value(value)}" for key, value in options.items())
    return [*lines, f"a run begins with it by:\n  {command('train')} {' '.join(flags)}"]
