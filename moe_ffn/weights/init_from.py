"""Start a model from the weights of a trained model: all of them, or those that fit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_ffn.config.errors import ConfigError, command, show
from moe_ffn.config.option_tree import differences, flatten, show_value
from moe_ffn.config.yaml_files import flag_value
from moe_ffn.data.tokenizer import Tokenizer
from moe_ffn.model.decoder import Decoder, DecoderConfig
from moe_ffn.runs.config import TrainConfig
from moe_ffn.weights.open_model import OpenModel
from moe_ffn.weights.pretrained import TOKENIZER_FILE, distinct_tensors


def fit_weights(source: OpenModel, decoder: Decoder) -> tuple[dict[str, Tensor], list[str]]:
    """Return the weights from which a decoder, whose own are not read, can start, and a report in lines. A
    part whose `type` differs keeps its initial weights; ConfigError if equal names have different shapes.
    """
    theirs, ours = source.decoder.state_dict(), distinct_tensors(decoder)
    retyped = tuple(_retyped_weights(source.decoder.config, decoder.config))
    taken = {name: theirs[name] for name in ours if name in theirs and not name.startswith(retyped)}
    was, now = (
        flatten({"model": model.config.to_dict(), "data": {"seq_len": model.max_seq_len}})
        for model in (source.decoder, decoder)
    )
    changes = differences(was, now)
    if misfits := [name for name, value in taken.items() if value.shape != ours[name].shape]:
        name, more = misfits[0], f", and {len(misfits) - 1} more do not fit" if misfits[1:] else ""
        old, new = source.decoder.config.to_dict(), decoder.config.to_dict()
        sections = tuple(_retyped(old, new, "model."))
        causes = {k: values for k, values in changes.items() if not k.startswith(sections)}
        values = (
            f"{k} is {show_value(old)} there and {show_value(new)} here"
            for k, (old, new) in causes.items()
        )
        flags = (f"--{k} {flag_value(old)}" for k, (old, _) in causes.items())
        fix = f": {', '.join(values)}; give {' '.join(flags)}" if causes else ""
        raise ConfigError(
            f"{source.option}: {name} is {tuple(theirs[name].shape)} in '{source.folder}' and "
            f"{tuple(ours[name].shape)} in this model{more}{fix}"
        )
    new = [name for name in ours if name not in taken]
    left = [name for name in distinct_tensors(source.decoder) if name not in taken]
    lines = [
        f"{source.option}: {len(taken)} of {len(ours)} tensors come from {source.folder} "
        f"({sum(value.numel() for value in taken.values()):,} numbers)"
    ]
    lines += [f"  new:  {name}" for name in _with_joined_layers(new)]
    lines += [f"  left: {name}" for name in _with_joined_layers(left)]
    lines += [f"  {key} is {show(new)} (was {show(old)})" for key, (old, new) in changes.items()]
    if source.found_tokenizer is None:
        lines.append(f"  it has no {TOKENIZER_FILE}: its token ids may stand for other text")
    return taken, lines


def _retyped_weights(before: DecoderConfig, now: DecoderConfig) -> Iterator[str]:
    """Yield the prefix of weight names of each part whose `type` differs."""
    for layer, (old, new) in enumerate(zip(before.layer_ffns(), now.layer_ffns(), strict=False)):
        yield from _retyped(old.to_dict(), new.to_dict(), f"layers.{layer}.ffn.")
    yield from _retyped(before.positions.to_dict(), now.positions.to_dict(), "positions.")


def _retyped(old: Any, new: Any, prefix: str) -> Iterator[str]:
    """Yield the path, with a dot at its end, of each section of options whose `type` differs."""
    if not (isinstance(old, Mapping) and isinstance(new, Mapping)):
        return
    if old.get("type") != new.get("type"):
        yield prefix
        return
    for key in old.keys() & new.keys():
        yield from _retyped(old[key], new[key], f"{prefix}{key}.")


def _with_joined_layers(names: Iterable[str]) -> list[str]:
    """Join the names of several layers, as in `layers.0,1,2.ffn.up.weight`."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        before, number, after = re.fullmatch(r"(layers\.)?(?(1)(\d+)|)(.*)", name).groups("")  # pyright: ignore[reportOptionalMemberAccess]
        groups.setdefault((before, after), []).append(number)
    return [before + ",".join(numbers) + after for (before, after), numbers in groups.items()]


# -- how to start a run from a model folder


def export_report(
    folder: Path, decoder: Decoder, tokenizer: Tokenizer | None, *, replaces: bool
) -> list[str]:
    """Report a model folder that was written, and the command that starts a run from it."""
    replacing = ", replacing the model that was there" if replaces else ""
    lines = [f"written: '{folder}', a model folder of moe_ffn{replacing}"]
    default = TrainConfig().data.tokenizer.build(())
    own = default if tokenizer is None else tokenizer
    if own.vocab_size != decoder.embedding.num_embeddings:
        has = f"its tokenizer has {own.vocab_size:,}" if tokenizer else "it has no tokenizer"
        return [
            *lines,
            f"no run can start from it: it has {decoder.embedding.num_embeddings:,} tokens, but {has}",
        ]
    options: dict[str, Any] = {"init_from": str(folder)}
    options |= {f"model.{key}": value for key, value in decoder.config.to_short_dict().items()}
    if any(True for _ in decoder.positions.parameters()):  # learned positions
        options["data.seq_len"] = decoder.max_seq_len
    if own.token_bytes != default.token_bytes:
        options["data.tokenizer"] = {"type": "file", "path": str(folder / TOKENIZER_FILE)}
    flags = (f"--{key} {flag_value(value)}" for key, value in options.items())
    return [*lines, f"start a run from it:\n  {command('train')} {' '.join(flags)}"]
