"""The result of a run as a small value, and the table of results that a study commits."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moe_ffn.config.errors import ConfigError, explain, reading
from moe_ffn.config.files import read_bytes, write_atomically
from moe_ffn.config.numbers import finite
from moe_ffn.config.option_tree import flatten, lookup
from moe_ffn.ffn.base import is_inner, without_round
from moe_ffn.runs.budget import Budget, Cost
from moe_ffn.runs.folder import CONFIG_FILE, FACTS_FILE, SUMMARY_FILE
from moe_ffn.runs.reader import Run
from moe_ffn.runs.rows import Series
from moe_ffn.studies.config import StudyConfig
from moe_ffn.training.monitoring.json_lines import STEP_SECONDS, TRAIN_SECONDS, VALIDATION_LOSS

RESULTS_FILE = "results.jsonl"
"""Results of the runs of a study, one line each, in the order of their names."""

MAX_POINTS = 200
"""Maximum number of points of a curve; longer curves are thinned."""

TRAIN_LOSS, BITS_PER_BYTE = "train/loss", "validation/bits_per_byte"
ROW_KEYS = (TRAIN_LOSS, TRAIN_SECONDS, STEP_SECONDS, VALIDATION_LOSS, BITS_PER_BYTE)
"""Keys that a result reads from the log of a run."""

_SEED = re.compile(r"-seed\d+$")


class _Value(BaseModel):
    """Base of plain values; it rejects numbers that are not finite, which are stored as null."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Curve(_Value):
    """A loss over training; the lists have equal lengths."""

    steps: list[int] = []
    tokens: list[int] = []
    """Training tokens so far."""
    seconds: list[float | None] = []
    """Seconds of the training steps so far, without validations."""
    losses: list[float | None] = []
    """Nats per token; a training loss is the mean since the previous point."""


class Outcome(_Value):
    """Losses, cost and health of a run."""

    is_finished: bool = False
    step: int = 0
    validation_loss: float | None = None
    """Last validation loss, in nats per token."""
    bits_per_byte: float | None = None
    ngram_loss: float | None = None
    """Loss of a 5-gram model of the tokens that the run has read, in nats per token."""
    step_seconds: float | None = None
    """Median over log rows of the median step time in each row."""
    tokens_per_second: float | None = None
    train_seconds: float | None = None
    """Seconds of all training steps."""
    wall_seconds: float | None = None
    """Seconds from the first step to the end, with validations and checkpoints."""
    peak_memory_bytes: int | None = None
    """Peak memory of the tensors on a GPU, otherwise of the process."""
    max_violation: float | None = None
    """MaxVio in the last validation, mean of the sparse layers; null without sparse layers."""
    dropped_fraction: float | None = None
    """Share of (token, expert) pairs dropped in the last validation, mean of the sparse layers."""
    dead_experts: int | None = None
    """Number of experts, in all layers, without a token in the last validation."""
    alarms: dict[str, int] = {}
    """Kind of alarm -> number of alarms."""
    num_skipped_steps: int | None = None


class RunResult(_Value):
    """The options, cost and outcome of a run."""

    arm: str
    """Name of the run's folder without `-seedN`; runs of an arm differ only in their seeds."""
    seed: int
    main_arm: str
    """Name of the arm without values of the tuning."""
    tuning: dict[str, Any] = {}
    """Dotted option -> value for a tuning run; empty for a compared run."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Options of the run, without paths of files."""
    budget: Budget
    train: Curve = Curve()
    validation: Curve = Curve()
    outcome: Outcome = Outcome()
    window_losses: list[float | None] = []
    """Mean loss of each window in the last validation, in nats per token."""
    machine: dict[str, str | int | None] = {}
    """Circumstances of the run: precision, threads, processor, versions, revision of the code, date."""
    fingerprints: dict[str, str | None] = {}
    """sha256 of the corpus, of the tokenizer, and of the validation windows."""
    display_name: str = Field(default="", exclude=True)
    """Name of the run's folder, or `name` for a line of a table; the path if two names are equal."""

    @property
    def name(self) -> str:
        """Name of the run's folder in a study, such as `swiglu-seed0`."""
        return f"{self.arm}-seed{self.seed}"

    @property
    def shown_name(self) -> str:
        """Name in messages; `name` for a result that was not read from a file."""
        return self.display_name or self.name

    def option(self, path: str) -> Any:
        """Return an option by its dotted path; None if it is absent."""
        return lookup(self.config, path)

    @classmethod
    def of_run(cls, run: Run, study: StudyConfig | None = None) -> Self:
        """Read the result of a run, finished or not; missing values are None. ConfigError without budget."""
        arm = _SEED.sub("", run.folder.resolve().name)
        main_arm, tuning = (study and study.tuned_arms.get(arm)) or (arm, {})
        summary, facts = run.summary, run.facts
        step, tokens_per_step = run.step or 0, _tokens_per_step(run)
        seconds = run.series(TRAIN_SECONDS)
        step_seconds = _median(run.series(STEP_SECONDS).values)
        speed = tokens_per_step / step_seconds if step_seconds else summary.tokens_per_second
        return cls(
            arm=arm,
            main_arm=main_arm,
            seed=run.options["seed"],
            tuning=dict(tuning),
            config=_without_paths(run.options),
            budget=_budget(run, step * tokens_per_step),
            train=_curve(run.series(TRAIN_LOSS), seconds, tokens_per_step, is_mean=True),
            validation=_curve(run.series(VALIDATION_LOSS), seconds, tokens_per_step),
            outcome=Outcome(
                is_finished=run.state == "finished",
                step=step,
                validation_loss=_rounded(run.final(VALIDATION_LOSS)),
                bits_per_byte=_rounded(run.final(BITS_PER_BYTE)),
                ngram_loss=_rounded(summary.ngram_loss),
                step_seconds=_rounded(step_seconds, 6),
                tokens_per_second=_rounded(speed, 1),
                train_seconds=_rounded(summary.train_seconds, 3),
                wall_seconds=_rounded(summary.wall_seconds, 3),
                peak_memory_bytes=summary.peak_memory_bytes,
                max_violation=_layer_mean(run, "max_violation"),
                dropped_fraction=_layer_mean(run, "dropped_fraction"),
                dead_experts=_dead_experts(run),
                alarms=dict(Counter(alarm.kind for alarm in run.alarms)),
                num_skipped_steps=summary.num_skipped_steps,
            ),
            window_losses=summary.window_losses,
            machine={
                "precision": facts.precision,
                "threads": facts.num_threads,
                **facts.versions,
                **facts.hardware,
                "git_revision": facts.git_revision,
                "date": _date(run.folder / SUMMARY_FILE),
            },
            fingerprints={
                "corpus": facts.corpus_sha256,
                "tokenizer": facts.tokenizer_sha256,
                "validation": facts.validation_sha256,
            },
        )

    @classmethod
    def of_line(cls, line: bytes, place: Path) -> Self:
        """Parse a line of a table; a ConfigError names its `place`."""
        try:
            return cls.model_validate_json(line)
        except ValidationError as error:
            raise ConfigError(
                f"'{place}' is not the result of a run: {explain(error)[0]}"
            ) from error

    def to_line(self) -> str:
        """Return one line of JSON, under 30 kB; equal runs give equal lines."""
        return json.dumps(self.model_dump(mode="json"), separators=(",", ":")) + "\n"


def lines_of(table: Path) -> Iterator[tuple[Path, bytes]]:
    """Yield the place, `results.jsonl:3`, and content of each line; raise ConfigError if not readable."""
    with reading(table):
        lines = read_bytes(table).splitlines()
    return ((Path(f"{table}:{number}"), line) for number, line in enumerate(lines, 1))


def add_results(folder: Path, results: Iterable[RunResult]) -> None:
    """Add results to the table of a folder; each replaces an older one with the same arm and seed.

    Raises ConfigError if the existing table is damaged, and OSError if it cannot be written.
    """
    table = folder / RESULTS_FILE
    older = lines_of(table) if table.exists() else ()
    by_name = {r.name: r for r in (RunResult.of_line(line, place) for place, line in older)}
    by_name |= {result.name: result for result in results}
    write_atomically(
        table, "".join(by_name[name].to_line() for name in sorted(by_name, key=natural))
    )


def natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key with which `seed2` precedes `seed10`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def compared_with_ngrams(runs: Iterable[RunResult]) -> str:
    """Return how many runs beat a 5-gram model of the tokens that they read; empty if unknown."""
    pairs = [(run.outcome.validation_loss, run.outcome.ngram_loss) for run in runs]
    known = [(loss, ngrams) for loss, ngrams in pairs if loss is not None and ngrams is not None]
    if not known:
        return ""
    losses = [ngrams for _, ngrams in known]
    where = " to ".join(dict.fromkeys(f"{end(losses):.3f}" for end in (min, max)))
    num_lower = sum(loss < ngrams for loss, ngrams in known)
    return (
        f"{num_lower} of {len(known)} runs beat a 5-gram model of the tokens that they read ({where} "
        "nats per token)."
    )


def _without_paths(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options without paths, which differ between machines."""
    result = {key: value for key, value in options.items() if key != "run"}
    if isinstance(data := result.get("data"), Mapping):
        result["data"] = {key: value for key, value in data.items() if key != "cache_dir"}
    return result


def _tokens_per_step(run: Run) -> int:
    """Return the tokens of a step; raise ConfigError if the options are lost."""
    keys = ("seed", "data.batch_size", "data.seq_len", "trainer.accumulate_grad_batches")
    options = flatten(run.options)
    for key in keys:
        if type(options.get(key)) is not int:
            raise ConfigError(f"'{run.folder}' has no {key}: its {CONFIG_FILE} is damaged")
    return math.prod(options[key] for key in keys[1:])


def _budget(run: Run, tokens: int) -> Budget:
    facts = run.facts
    model = (facts.num_params, facts.num_active_params, facts.flops_per_token)
    ffn = (facts.ffn_params, facts.ffn_active_params, facts.ffn_flops_per_token)
    known = [count for count in (*model, *ffn) if count is not None]
    if len(known) < 6:
        raise ConfigError(f"'{run.folder}' has no model sizes: its {FACTS_FILE} is damaged")
    return Budget(Cost(*known[:3]), Cost(*known[3:]), tokens)


def _curve(
    losses: Series, seconds: Series, tokens_per_step: int, *, is_mean: bool = False
) -> Curve:
    steps, values = thinned(losses, MAX_POINTS, is_mean=is_mean)
    times = np.interp(steps, [0, *seconds.steps], [0, *seconds.values], right=math.nan)
    return Curve(
        steps=steps,
        tokens=[step * tokens_per_step for step in steps],
        seconds=[_rounded(time, 3) for time in times.tolist()],
        losses=[_rounded(value) for value in values],
    )


def thinned(series: Series, max_points: int, *, is_mean: bool) -> tuple[list[int], list[float]]:
    """Replace groups of neighbours by one point each; return its steps and values, at most `max_points`.

    A point has the last step and value of its group, or if each value `is_mean` since the one before, their
    mean.
    """
    size = -(-len(series) // max_points) or 1
    groups = [slice(start, start + size) for start in range(0, len(series), size)]
    values = [series.values[group] for group in groups]
    return (
        [series.steps[group][-1] for group in groups],
        [fmean(group) if is_mean else group[-1] for group in values],
    )


def first_at(xs: Sequence[float], ys: Sequence[float], y: float) -> float | None:
    """Return the x at which the line through the points first reaches `y` from above; None if it never does.

    If the first point is already at or below `y`, return its x.
    """
    reached = np.flatnonzero(np.asarray(ys) <= y)
    if not len(reached):
        return None
    first = int(reached[0])
    before = max(first - 1, 0)
    return float(np.interp(y, [ys[first], ys[before]], [xs[first], xs[before]]))


def _layer_mean(run: Run, key: str) -> float | None:
    """Return the mean of a metric in the last validation over layers that have it, without nested blocks."""
    layers = [metrics for layer, metrics in run.validated.items() if not is_inner(layer)]
    values = [value for metrics in layers if (value := finite(metrics.get(key))) is not None]
    return _rounded(fmean(values)) if values else None


def _dead_experts(run: Run) -> int | None:
    """Return the number of experts without a token in any round of their block; None without routings."""
    rounds: dict[str, list[Sequence[Any]]] = {}
    for layer, metrics in run.validated.items():
        rounds.setdefault(without_round(layer), []).append(metrics.get("load") or [])
    if not rounds:
        return None
    loads = (zip(*of_block, strict=False) for of_block in rounds.values())
    return sum(not any(share != 0 for share in shares) for load in loads for shares in load)


def _date(path: Path) -> str | None:
    """Return the date, in UTC, on which a file was written: `2026-11-22`."""
    try:
        return datetime.fromtimestamp(path.stat().st_mtime, UTC).date().isoformat()
    except OSError:
        return None


def _median(values: Iterable[float]) -> float | None:
    known = [value for value in values if math.isfinite(value)]
    return median(known) if known else None


def _rounded(value: Any, digits: int = 5) -> float | None:
    number = finite(value)
    return None if number is None else round(number, digits)
