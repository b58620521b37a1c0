"""Differences between the options of runs, in words, and checks that losses are comparable."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from moe_ffn.config.errors import ConfigError, show
from moe_ffn.config.option_tree import flatten
from moe_ffn.config.trust import only_trusted_code
from moe_ffn.config.yaml_files import validate
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.options_in_words import block_of, value_in_words
from moe_ffn.studies.result import RunResult

UNCOMPARED = ("seed", "run", "data.cache_dir", "logging", "checkpoints", "sample")
"""Options that do not change the trained model, and the seed."""
VALIDATION_OPTIONS = ("seq_len", "validation_percent", "validation_tokens")
"""Options under `data` that choose the validation windows."""


def option_differences(base: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the options that differ from `base`, one line each: `model.d_model: 128 -> 256`.

    A section whose `type` differs is one line: `model.ffn: swiglu -> moe, 8 experts (swiglu), top-2`.
    """
    return [
        f"{path}: {in_words(path, old, base)} -> {in_words(path, new, other)}"
        for path, old, new in differing(base, other)
    ]


def differing(base: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, value in `base`, value in `other`) of each differing option that affects training."""
    base, other = _with_defaults(base, other)
    yield from _differing(base, other, "")


def _with_defaults(*runs: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the options of runs, with defaults for options that an older version did not have.

    If this version cannot read the options of a run, or they name untrusted code, nothing changes.
    """
    with suppress(ConfigError), only_trusted_code(Path()):
        return [_completed(_without_seed(run)) for run in runs]
    return runs


def _without_seed(run: Mapping[str, Any]) -> str:
    """Return options as JSON, with `{seed}` for the seed in folders of other runs, `runs/moe-seed7`."""
    options = json.dumps({**run, "seed": 0, "run": {}}, default=str)
    return re.sub(rf"-seed{run.get('seed')}\b", "-seed{seed}", options)


@cache
def _completed(options: str) -> dict[str, Any]:
    """Return options in JSON with all defaults; many runs of a study have equal ones."""
    return validate(TrainConfig, json.loads(options)).to_dict()


def _differing(
    base: Mapping[str, Any], other: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, Any, Any]]:
    for key in dict.fromkeys([*base, *other]):
        path, old, new = f"{prefix}{key}", base.get(key), other.get(key)
        if path in UNCOMPARED or old == new:
            continue
        if (
            isinstance(old, Mapping)
            and isinstance(new, Mapping)
            and old.get("type") == new.get("type")
        ):
            yield from _differing(old, new, f"{path}.")
        else:
            yield path, old, new


def in_words(path: str, value: Any, options: Mapping[str, Any]) -> str:
    """Return the value that an option has among the `options` of a run, in words."""
    block = block_of(options.get("model")) if path == "model.ffn" else ""
    return block or value_in_words(value)


def identity(result: RunResult) -> str:
    """Return a text that is equal for runs with the same training apart from seeds, also of other runs."""
    (options,) = _with_defaults(result.config)
    compared = {k: v for k, v in options.items() if k not in UNCOMPARED and v is not None}
    return re.sub(r"-seed\d+\b", "-seed{seed}", json.dumps(compared, sort_keys=True))


def few_words(base: RunResult, other: RunResult) -> str:
    """Name a run by its differences from `base`: `moe,learning_rate=0.001`; empty if there are none."""
    parts: list[str] = []
    for path, _, new in differing(base.config, other.config):
        text = value_in_words(new)
        is_type = isinstance(new, Mapping) and new.get("type")
        key = path.rpartition(".")[2]
        parts.append(text.rpartition("/")[2] if is_type else f"{key}={text}")
    return ",".join(parts)


# -- checks that runs are comparable


def require_comparable(results: Sequence[RunResult]) -> None:
    """Raise ConfigError unless losses are comparable: equal data, tokenizer and validation windows."""
    have_windows = all(result.fingerprints.get("validation") for result in results)
    for problem, fact in {
        "were trained on different text (data.corpus)": lambda r: r.fingerprints.get("corpus"),
        "have different tokenizers (data.tokenizer)": lambda r: r.fingerprints.get("tokenizer"),
        "use different validation windows": lambda r: (
            r.fingerprints.get("validation") if have_windows else None,
            *(r.option(f"data.{key}") for key in VALIDATION_OPTIONS),
        ),
    }.items():
        groups: dict[Any, list[RunResult]] = {}
        for result in results:
            groups.setdefault(fact(result), []).append(result)
        if len(groups) > 1:
            one, other = list(groups.values())[:2]
            raise ConfigError(
                f"the runs {problem}, so their losses cannot be compared: {_data_difference(one, other)}"
            )


def _data_difference(one: Sequence[RunResult], other: Sequence[RunResult]) -> str:
    """Return `data.seq_len is 128 in a, 256 in c`, or the fingerprints if the options are the same."""
    ours, theirs = flatten(one[0].config), flatten(other[0].config)
    # A text may have two paths, and a tokenizer two files.
    equal = [
        f"data.{key}"
        for key in ("corpus", "tokenizer")
        if one[0].fingerprints.get(key) == other[0].fingerprints.get(key) is not None
    ]
    for key in ours | theirs:
        is_of_data = key.startswith("data.") and not key.startswith(("data.batch_size", *equal))
        if is_of_data and ours.get(key) != theirs.get(key):
            old, new = show(ours.get(key)), show(theirs.get(key))
            return f"{key} is {old} in {_names(one)}, {new} in {_names(other)}"
    for key in one[0].fingerprints:
        old, new = (str(runs[0].fingerprints.get(key)) for runs in (one, other))
        if old != new:
            return (
                f"the sha256 of the {key} is {old[:12]} in {_names(one)}, {new[:12]} in "
                f"{_names(other)}"
            )
    return f"{_names(one)} and {_names(other)}"


def _names(results: Sequence[RunResult]) -> str:
    first = results[0].shown_name
    return first if len(results) == 1 else f"{first} and {len(results) - 1} more"


def require_same_options(arm: str, results: Sequence[RunResult]) -> None:
    """Raise ConfigError if the runs of an arm differ in more than their seeds."""
    first = results[0]
    for other in results[1:]:
        for path, old, new in differing(first.config, other.config):
            if first.option(path) == other.option(path):
                continue  # all seeds use the run of one seed
            raise ConfigError(
                f"the runs of arm '{arm}' have different options: {path} is {show(old)} in "
                f"{first.shown_name}, {show(new)} in {other.shown_name}; name the arms differently"
            )
