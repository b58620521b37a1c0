"""One run as a value, read back from its folder; whatever the folder lacks is absent."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from moe_ffn.config_files import parse_yaml
from moe_ffn.errors import ConfigError, reason
from moe_ffn.files import parse_object, read_text
from moe_ffn.runs.folder import (
    ALARMS_FILE,
    CONFIG_FILE,
    FACTS_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    SUMMARY_FILE,
    check_is_run,
)
from moe_ffn.runs.lock import is_trained_here
from moe_ffn.runs.rows import Rows, Series
from moe_ffn.training.monitoring.json_lines import Row, read_lines

WATCHED = (CONFIG_FILE, FACTS_FILE, METRICS_FILE, SUMMARY_FILE, SAMPLES_FILE, ALARMS_FILE)
"""What the page is made of: where none of these changed, the page would be the same."""

State = Literal["waiting", "training", "interrupted", "finished"]

PATIENCE_SECONDS, PATIENCE_ROWS = 120, 10
"""A run without an end that wrote nothing for so long, and for the time of so many rows, is dead."""

LAYER_KEY = re.compile(r"routing/(layer_\d{1,9}(?:/inner)*)/(.+)")
EXPERT_KEY = re.compile(r"load/expert_(\d{1,9})")


@dataclass(frozen=True)
class Sample:
    """What the model wrote at an optimizer step, after the prompt."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True)
class Alarm:
    step: int
    kind: str
    layer: str | None
    message: str
    advice: str


@dataclass(frozen=True)
class Run:
    """`name` is unique among the runs of a page; the mappings are empty where a file is absent."""

    folder: Path
    name: str
    state: State
    rows: Rows
    config: Mapping[str, Any]
    config_text: str
    facts: Mapping[str, Any]
    summary: Mapping[str, Any]
    samples: Sequence[Sample] = ()
    alarms: Sequence[Alarm] = ()

    def series(self, key: str) -> Series:
        """A column of the rows; an empty one where it is absent."""
        return self.rows.column(key)

    def option(self, path: str) -> Any:
        """An option of the config by its dotted path, such as `model.ffn.type`; None if absent."""
        value: Any = self.config or self.facts
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    @property
    def is_going_on(self) -> bool:
        return self.state in ("waiting", "training")

    def fact(self, key: str) -> Any:
        return self.facts.get(key)

    @property
    def step(self) -> int | None:
        """The last optimizer step of which something is known."""
        steps = [series.steps[-1] for series in self.rows.columns.values()]
        return max(steps, default=None)

    @cached_property
    def layers(self) -> Mapping[str, Mapping[str, Series]]:
        """Sparse layer -> measure -> its series of the training rows."""
        return _by_layer(self.rows.columns, "")

    @cached_property
    def validated_layers(self) -> Mapping[str, Mapping[str, Series]]:
        """The same of the validation rows."""
        return _by_layer(self.rows.columns, "validation/")

    @cached_property
    def loads(self) -> Mapping[str, Sequence[Series]]:
        """Sparse layer -> the load of each expert over the training rows."""
        return {layer: loads for layer, found in self.layers.items() if (loads := _experts(found))}

    @cached_property
    def validated(self) -> Mapping[str, Mapping[str, Any]]:
        """Sparse layer -> measure -> its value on the validation split, the last known."""
        routing = self.summary.get("routing")
        if isinstance(routing, Mapping) and routing:
            return {layer: v for layer, v in routing.items() if isinstance(v, Mapping)}
        return {
            layer: {
                **{key: series.last for key, series in found.items()},
                "load": [series.last for series in _experts(found)],
            }
            for layer, found in self.validated_layers.items()
        }


def read_runs(folders: Sequence[Path], *, has_ended: bool = False) -> list[Run]:
    """The runs, each once and under a name of its own: its folder's, or its path where two are the same."""
    distinct: dict[Path, Path] = {}
    for folder in folders:
        distinct.setdefault(folder.resolve(), folder)
    folders = list(distinct.values())
    names = [folder.resolve().name for folder in folders]
    return [
        read_run(folder, str(folder) if names.count(name) > 1 else name, has_ended=has_ended)
        for folder, name in zip(folders, names, strict=True)
    ]


def read_run(folder: Path, name: str | None = None, *, has_ended: bool = False) -> Run:
    """
    Args:
        has_ended: nobody trains it any more; otherwise its files decide, by when they were written.

    Raises:
        ConfigError: this is no folder of a run.
    """
    check_is_run(folder)
    text = _text(folder / CONFIG_FILE)
    try:
        rows = Rows(read_lines(folder / METRICS_FILE, Row))
    except OSError as error:
        raise ConfigError(
            f"'{folder / METRICS_FILE}' cannot be read ({reason(error)}); mend its permissions"
        ) from error
    summary = _mapping(folder / SUMMARY_FILE)
    return Run(
        folder=folder,
        name=name or folder.resolve().name,
        state=_state(folder, rows, is_finished=bool(summary), has_ended=has_ended),
        rows=rows,
        config=_yaml_mapping(text),
        config_text=text,
        facts=_mapping(folder / FACTS_FILE),
        summary=summary,
        samples=[
            Sample(_whole(v.get("step")), str(v.get("prompt", "")), str(v.get("text", "")))
            for v in _lines(folder / SAMPLES_FILE)
        ],
        alarms=[
            Alarm(
                _whole(v.get("step")),
                str(v.get("kind", "")),
                None if v.get("layer") is None else str(v["layer"]),
                str(v.get("message", "")),
                str(v.get("advice", "")),
            )
            for v in _lines(folder / ALARMS_FILE)
        ],
    )


def _state(folder: Path, rows: Rows, *, is_finished: bool, has_ended: bool) -> State:
    if is_finished:
        return "finished"
    is_trained = False if has_ended else is_trained_here(folder)
    if is_trained is False:
        return "interrupted"
    if is_trained:
        return "training" if rows.columns else "waiting"
    # Perhaps on another machine: what is written tells.
    files = [folder / name for name in WATCHED]
    written = [path.stat().st_mtime for path in files if path.is_file()]
    longest = max(map(len, rows.columns.values()), default=0)
    seconds_per_row = (max(written) - min(written)) / max(longest, 1)
    silence = time.time() - max(written)
    if silence > max(PATIENCE_SECONDS, PATIENCE_ROWS * seconds_per_row):
        return "interrupted"
    return "training" if rows.columns else "waiting"


def _by_layer(metrics: Mapping[str, Series], prefix: str) -> dict[str, dict[str, Series]]:
    layers: dict[str, dict[str, Series]] = {}
    for key, series in metrics.items():
        match = LAYER_KEY.fullmatch(key.removeprefix(prefix)) if key.startswith(prefix) else None
        if match:
            layers.setdefault(match[1], {})[match[2]] = series
    return dict(sorted(layers.items()))


def _experts(found: Mapping[str, Series]) -> list[Series]:
    """The loads in the order of their experts, which beyond 99 is not that of their names."""
    numbered = {int(m[1]): s for key, s in found.items() if (m := EXPERT_KEY.fullmatch(key))}
    return [numbered[expert] for expert in sorted(numbered)]


def _text(path: Path) -> str:
    """Empty where the file is absent or cannot be read: the rest of the page does not need it."""
    try:
        return read_text(path, errors="replace")
    except OSError:
        return ""


def _mapping(path: Path) -> dict[str, Any]:
    """A JSON object; empty where the file is absent or only half written."""
    return parse_object(_text(path), finite=True) or {}


def _yaml_mapping(text: str) -> dict[str, Any]:
    try:
        value = parse_yaml(text, where=CONFIG_FILE)
    except ConfigError:
        return {}
    return value if isinstance(value, dict) else {}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, one per line; a line that is none, or half written, is left out."""
    for line in _text(path).split("\n"):
        value = parse_object(line, finite=True)
        if value is not None:
            yield value


def _whole(value: Any) -> int:
    return int(value) if isinstance(value, int | float) and math.isfinite(value) else 0
