"""Reading a run from its folder; missing or damaged files leave empty fields."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from moe_ffn import notebook_cards
from moe_ffn.config.errors import ConfigError, first_line, reading
from moe_ffn.config.files import read_text
from moe_ffn.config.import_path import explaining_custom_errors
from moe_ffn.config.option_tree import lookup
from moe_ffn.config.trust import accepting_code
from moe_ffn.config.yaml_files import parse_yaml
from moe_ffn.data.tokenizer import Tokenizer
from moe_ffn.ffn.base import ROUTING_SUFFIX, short_name
from moe_ffn.metrics.load_summary import summarize_load
from moe_ffn.model.decoder import Decoder, DecoderOutput
from moe_ffn.outputs import Routing
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.custom_code import warn_if_code_changed
from moe_ffn.runs.folder import (
    ALARMS_FILE,
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    FACTS_FILE,
    METRICS_FILE,
    REPORT_FILE,
    SAMPLES_FILE,
    SUMMARY_FILE,
    TOKENIZER_FILE,
    check_has_weights,
    check_is_run,
    is_training,
    saved_config,
)
from moe_ffn.runs.identity import identity_of_weights
from moe_ffn.runs.json_files import Facts, Summary
from moe_ffn.runs.resume import first_usable, problem_of_weights
from moe_ffn.runs.rows import Rows, Series
from moe_ffn.training.monitoring.json_lines import Alarm, AnyLine, Row, Sample, read_lines
from moe_ffn.training.recovery.checkpoint_file import BEST_NAME, SavedTensors, newest_first
from moe_ffn.training.sampling import encode_text

log = logging.getLogger(__name__)

WATCHED = (CONFIG_FILE, FACTS_FILE, METRICS_FILE, SUMMARY_FILE, SAMPLES_FILE, ALARMS_FILE)
"""Files that the page of a run shows."""

IN_SUMMARY = {
    "validation/loss": "validation_loss",
    "validation/bits_per_byte": "validation_bits_per_byte",
    "train/tokens_per_second": "tokens_per_second",
}
"""Column of the rows -> field of the summary with its final value."""

State = Literal["waiting", "training", "interrupted", "finished"]

PATIENCE_SECONDS, PATIENCE_ROWS = 120, 10
"""A run counts as interrupted if it has written nothing for this many seconds and for the usual time of this
many rows."""

LAYER_KEY = re.compile(rf"routing/(layer_\d{{1,9}}{ROUTING_SUFFIX})/(.+)")
EXPERT_KEY = re.compile(r"load/expert_(\d{1,9})")


@dataclass(frozen=True)
class SavedModel:
    """The best model of a run, in evaluation mode, with its tokenizer."""

    folder: Path
    config: TrainConfig
    tokenizer: Tokenizer
    decoder: Decoder

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self.decoder.parameters())
        return f"SavedModel('{self.folder}', {count:,} parameters)"

    def run(self, text: str | bytes) -> DecoderOutput:
        """Return the output for a text; ConfigError if it is longer than a training sequence."""
        ids = encode_text(self.tokenizer, text, self.decoder.max_seq_len, "text")
        with torch.no_grad():
            return self.decoder(torch.tensor([ids], dtype=torch.int64))


@dataclass(frozen=True)
class Run:
    """A run, read from its folder. Fields are empty if their files are missing or damaged."""

    folder: Path
    name: str
    """Name that is unique among the runs read together."""
    state: State
    rows: Rows
    """Table of `metrics.jsonl`."""
    facts: Facts
    """Code revision, corpus, precision, sizes."""
    summary: Summary
    """Results of a finished run; empty before the end."""
    samples: Sequence[Sample]
    """Texts that the model generated at each validation."""
    alarms: Sequence[Alarm]
    options: Mapping[str, Any]
    """Every option as plain values; `config` is the typed form."""
    config_text: str
    trust_code: bool = False

    def __repr__(self) -> str:
        loss, count = self.summary.validation_loss, self.facts.num_params
        known = [
            self.state,
            None if self.step is None else f"step {self.step}",
            self.option("model.ffn.type"),
            None if count is None else f"{count:,} parameters",
            None if loss is None else f"validation loss {loss:.4f}",
        ]
        return f"Run('{self.folder}', {', '.join(str(text) for text in known if text is not None)})"

    def _repr_html_(self) -> str:
        """Return loss, cost, load of the experts and a link to the page, for a notebook."""
        counts = {
            "parameters": self.facts.num_params,
            "used by a token": self.facts.num_active_params,
            "FLOPs per token": self.facts.flops_per_token,
            "step": self.step,
            "tokens per second": self.summary.tokens_per_second,
        }
        losses = {
            "validation loss": self.summary.validation_loss or self.series("validation/loss").last,
            "bits per byte": self.summary.validation_bits_per_byte,
            "unigram model": self.summary.unigram_loss,
            "5-gram model": self.summary.ngram_loss,
        }
        facts = {name: f"{loss:.4f}" for name, loss in losses.items() if loss is not None}
        facts |= {name: f"{count:,.0f}" for name, count in counts.items() if count is not None}
        facts["alarms"] = str(len(self.alarms))
        loads = {
            f"layer {short_name(layer)}": load
            for layer, values in self.validated.items()
            if summarize_load(load := values.get("load") or []) is not None
        }
        page = self.folder / REPORT_FILE
        parts = [
            notebook_cards.curve(self.series("train/loss").values, "training loss"),
            notebook_cards.load_heatmap(loads) if loads else "",
            notebook_cards.link(str(page), "report") if page.is_file() else "",
        ]
        block = self.option("model.ffn.type")
        return notebook_cards.card(f"{self.name}: {block}, {self.state}", facts, *parts)

    @cached_property
    def saved_model(self) -> SavedModel:
        """Best model with its config and tokenizer. Raises ConfigError if there is no intact checkpoint."""
        with accepting_code(self.trust_code):
            return load_model(self.folder)

    @cached_property
    def config(self) -> TrainConfig:
        """Options of the run. Raises ConfigError if one is missing, or names code that is not trusted."""
        with accepting_code(self.trust_code):
            return saved_config(self.folder)

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the run, from `saved_model`."""
        return self.saved_model.tokenizer

    @property
    def model(self) -> Decoder:
        """Decoder with the best weights, in evaluation mode, on the CPU, from `saved_model`."""
        return self.saved_model.decoder

    def routing(self, text: str | bytes) -> Mapping[str, Routing]:
        """Return the routing of a text by layer name, such as `layer_03`.

        Raises ConfigError if the text is longer than a training sequence, or as `saved_model` does.
        """
        return self.saved_model.run(text).routings

    def series(self, key: str) -> Series:
        """Return a column of `rows`; an empty series if it does not exist."""
        return self.rows.column(key)

    def final(self, key: str) -> float | None:
        """Return the final value of a key of `IN_SUMMARY` (NaN if not finite), or the last one so far."""
        name = IN_SUMMARY[key]
        if self.summary.has(name):
            value = getattr(self.summary, name)
            return math.nan if value is None else value
        return self.series(key).last

    def option(self, path: str) -> Any:
        """Return an option by its dotted path, such as `model.ffn.type`; None if absent."""
        return lookup(self.options or self.facts.model_extra or {}, path)

    @property
    def is_running(self) -> bool:
        return self.state in ("waiting", "training")

    @property
    def step(self) -> int | None:
        """Last optimizer step in the log; None without rows."""
        return max((series.steps[-1] for series in self.rows.columns.values()), default=None)

    @cached_property
    def layers(self) -> Mapping[str, Mapping[str, Series]]:
        """Sparse layer -> metric -> series of the training rows."""
        return _columns_of_layers(self.rows.columns, "")

    @cached_property
    def validated_layers(self) -> Mapping[str, Mapping[str, Series]]:
        """Sparse layer -> metric -> series of the validation rows."""
        return _columns_of_layers(self.rows.columns, "validation/")

    @cached_property
    def loads(self) -> Mapping[str, Sequence[Series]]:
        """Sparse layer -> load series of each expert over the training rows."""
        return {
            layer: loads
            for layer, metrics in self.layers.items()
            if (loads := _expert_loads(metrics))
        }

    @cached_property
    def validated(self) -> Mapping[str, Mapping[str, Any]]:
        """Sparse layer -> metric -> last value on the validation split."""
        if self.summary.routing:
            return self.summary.routing
        return {
            layer: {
                **{key: series.last for key, series in metrics.items()},
                "load": [series.last for series in _expert_loads(metrics)],
            }
            for layer, metrics in self.validated_layers.items()
        }


def load_run(folder: str | Path, *, trust_code: bool = False) -> Run:
    """Read a run, finished or not, from its folder.

        run = moe_ffn.load_run("runs/x")
        run.rows.column("train/loss").values
        run.routing("import os")["layer_00"]

    The weights are loaded at the first use of `tokenizer`, `model` or `routing`.

    Args:
        trust_code: run the code that the folder names, even if none of your runs started with it.

    Raises:
        ConfigError: the folder holds no run, or its log cannot be read.
    """
    return replace(read_run(Path(folder)), trust_code=trust_code)


def read_runs(folders: Sequence[Path], *, has_ended: bool = False) -> list[Run]:
    """Read runs without duplicates. A run has the name of its folder, or its path if two names are equal."""
    distinct: dict[Path, Path] = {}
    for folder in folders:
        distinct.setdefault(folder.resolve(), folder)
    names = [path.name for path in distinct]
    return [
        read_run(folder, str(folder) if names.count(name) > 1 else name, has_ended=has_ended)
        for folder, name in zip(distinct.values(), names, strict=True)
    ]


def read_run(
    folder: Path,
    name: str | None = None,
    *,
    has_ended: bool = False,
    keys: Collection[str] | None = None,
) -> Run:
    """Read the current state of a run, and only these `keys` of its log, if given; see `load_run`.

    Training has certainly ended if `has_ended`; otherwise locks and file times decide.
    """
    check_is_run(folder)
    text = _text(folder / CONFIG_FILE)
    with reading(folder / METRICS_FILE):
        rows = Rows(read_lines(folder / METRICS_FILE, Row), keys)
    summary = Summary.read(folder / SUMMARY_FILE)
    return Run(
        folder=folder,
        name=name or folder.resolve().name,
        state=_state(folder, rows, is_finished=bool(summary), has_ended=has_ended),
        rows=rows,
        facts=Facts.read(folder / FACTS_FILE),
        summary=summary,
        samples=_lines(folder / SAMPLES_FILE, Sample),
        alarms=_lines(folder / ALARMS_FILE, Alarm),
        options=_yaml_mapping(text),
        config_text=text,
    )


def _state(folder: Path, rows: Rows, *, is_finished: bool, has_ended: bool) -> State:
    if is_finished:
        return "finished"
    is_trained = False if has_ended else is_training(folder)
    if is_trained is False:
        return "interrupted"
    if is_trained is None:  # perhaps on another machine, so use the modification times
        files = [folder / name for name in WATCHED]
        written = [path.stat().st_mtime for path in files if path.is_file()]
        longest = max(map(len, rows.columns.values()), default=0)
        seconds_per_row = (max(written) - min(written)) / max(longest, 1)
        silence = time.time() - max(written)
        if silence > max(PATIENCE_SECONDS, PATIENCE_ROWS * seconds_per_row):
            return "interrupted"
    return "training" if rows.columns else "waiting"


def _columns_of_layers(columns: Mapping[str, Series], prefix: str) -> dict[str, dict[str, Series]]:
    layers: dict[str, dict[str, Series]] = {}
    for key, series in columns.items():
        match = LAYER_KEY.fullmatch(key.removeprefix(prefix)) if key.startswith(prefix) else None
        if match:
            layers.setdefault(match[1], {})[match[2]] = series
    return dict(sorted(layers.items()))


def _expert_loads(metrics: Mapping[str, Series]) -> list[Series]:
    """Return the load series sorted by expert number, which is not alphabetical beyond expert 99."""
    numbered = {int(m[1]): s for key, s in metrics.items() if (m := EXPERT_KEY.fullmatch(key))}
    return [numbered[expert] for expert in sorted(numbered)]


def _text(path: Path) -> str:
    """Return the text of a file; empty if it is absent or cannot be read, so that a page is still made."""
    with suppress(OSError):
        return read_text(path, errors="replace")
    return ""


def _lines(path: Path, kind: type[AnyLine]) -> list[AnyLine]:
    """Return the lines of a log; empty if the file is absent or cannot be read."""
    with suppress(OSError):
        return list(read_lines(path, kind))
    return []


def _yaml_mapping(text: str) -> dict[str, Any]:
    """Return the mapping in a YAML text; empty if there is none."""
    with suppress(ConfigError):
        value = parse_yaml(text, where=CONFIG_FILE)
        return value if isinstance(value, dict) else {}
    return {}


# -- the model


def load_model(folder: Path) -> SavedModel:
    """Load the config, the tokenizer and the best weights of a run.

    Raises ConfigError if the folder holds no run, no intact checkpoint or a damaged file, or names untrusted
    code.
    """
    check_has_weights(folder)
    config = saved_config(folder)
    warn_if_code_changed(folder)
    tokenizer = _read_tokenizer(folder / TOKENIZER_FILE, config)
    with explaining_custom_errors():
        decoder = config.model.build(tokenizer.vocab_size, config.data.seq_len)
    weights = read_weights(folder, config, tokenizer, decoder)
    # The decoder is float32, which represents the weights of every precision but 64-true exactly.
    if any(weights[name].dtype == torch.float64 for name, _ in decoder.named_parameters()):
        decoder.double()
    decoder.load_state_dict(weights)
    return SavedModel(folder, config, tokenizer, decoder.eval())


def read_weights(
    folder: Path, config: TrainConfig, tokenizer: Tokenizer, decoder: Decoder
) -> Mapping[str, Tensor]:
    """Return the best weights of a run, or the newest ones if the best are damaged.

    The `decoder` has the expected names and shapes. Raises ConfigError if the run has no intact checkpoint.
    """
    checkpoints, run_id = folder / CHECKPOINTS_FOLDER, Facts.read(folder / FACTS_FILE).run_id
    expected = identity_of_weights(config, tokenizer, run_id or None)

    def problem_of(values: Mapping[str, Any]) -> str | None:
        weights = _decoder_weights(values)
        return problem_of_weights({**values, "state_dict": weights}, expected, decoder)

    with reading(checkpoints):
        best, steps = checkpoints / BEST_NAME, newest_first(checkpoints)
    has_best = os.path.lexists(best)  # a dangling link counts
    usable, skipped = first_usable([best, *steps] if has_best else steps, problem_of)
    if steps and not has_best:
        skipped = [f"there is no {BEST_NAME}", *skipped]
    problems = "; ".join(skipped)
    if usable is None:
        raise ConfigError(
            f"'{checkpoints}' has no usable checkpoint: {problems}; restore one, or give another run"
            if problems
            else f"'{checkpoints}' has no checkpoint, so no model to load; give a run that has reached its "
            "first validation"
        )
    path, values = usable
    if problems:
        log.warning("%s: %s; using %s", checkpoints, problems, path.name)
    return _decoder_weights(values)


def _decoder_weights(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return name in the decoder -> weight, from the values of a checkpoint."""
    state = values.get("state_dict", {})
    if isinstance(state, SavedTensors):
        return state.under("decoder.")
    prefix = "decoder."
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def _read_tokenizer(path: Path, config: TrainConfig) -> Tokenizer:
    try:
        values = json.loads(read_text(path))
        return config.data.tokenizer.restore(values)
    except Exception as error:  # of any type: the file is damaged
        raise ConfigError(
            f"'{path}' is not the tokenizer that this run was trained with: {first_line(error)}"
        ) from error
