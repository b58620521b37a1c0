"""Find the feed-forward block that suits a corpus, by training candidates for a given time.

Three rounds train 6, 3 and 2 candidates: short runs of all, longer runs of the best dense block and the two
best mixtures, and at full length the best dense block against the best Mixture of Experts. The last round
has fresh seeds, so that the selection does not bias the difference. All arms of a seed read the same text.

Short runs favour dense blocks and few experts, which learn faster at first. So candidates are ranked by their
extrapolated loss, and no winner is declared if longer training may reverse the order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from pydantic import Field

from moe_ffn.config.base import Config
from moe_ffn.config.errors import ConfigError, explaining
from moe_ffn.config.files import write_atomically
from moe_ffn.config.numbers import format_duration
from moe_ffn.config.yaml_files import to_yaml, validate
from moe_ffn.data.prepare import prepare
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.folder import CONFIG_FILE
from moe_ffn.studies.comparison import Arm, Comparison, p_text
from moe_ffn.studies.config import STUDY_FILE, PlannedRun, StudyConfig
from moe_ffn.studies.gather import Gathered, gather
from moe_ffn.studies.result import RunResult
from moe_ffn.studies.statistics import mean_interval, seeds_needed
from moe_ffn.studies.sweep import Sweep, write_study
from moe_ffn.studies.timing import time_arms

QUESTION_FILE = "which.yaml"
"""File of the question and the sizes of its runs, in the folder of the rounds."""
PAGE_FILE = "which.html"

_FLOPS = {"match": "flops_per_token", "of": {"type": "dense", "activation": "gelu"}}

DENSE: dict[str, Any] = {
    "gelu": {"type": "dense", "activation": "gelu"},
    "swiglu": {"type": "swiglu", "d_ff": _FLOPS},
}
SPARSE: dict[str, Any] = {
    f"moe_{num_experts}_top{k}": {
        "type": "moe",
        "num_experts": num_experts,
        "router": {"type": "top_k", "k": k, "scale": 0.25},
        "experts": {"type": "swiglu", "d_ff": _FLOPS},
    }
    for num_experts, k in ((8, 2), (32, 2), (32, 4), (64, 4))
}
BLOCKS = DENSE | SPARSE
"""Candidate -> block. All have equal FLOPs per token, but differ in granularity and number of experts."""

SEQ_LEN, BATCH_SIZE, VOCAB_SIZE, NUM_LAYERS = 128, 16, 2048, 4
TOKENS_PER_STEP = SEQ_LEN * BATCH_SIZE
NUM_VALIDATIONS, VALIDATION_TOKENS = 8, 16384
WIDTHS = (32, 48, 64, 96, 128, 192, 256, 384, 512)
TOKENS_PER_PARAMETER = 4
"""Minimum training tokens per active parameter; with fewer, blocks hardly differ yet."""
MIN_STEPS = 400
"""Minimum steps in the last round. The first round has a quarter of them; with fewer, the loss does not yet
show which block will lead."""
MAX_DOUBLINGS = 2.0
"""No winner is declared if the order of two blocks would change within this many doublings of training."""
MAX_PASSES = 4
"""Passes over the text; later ones teach much less (Muennighoff et al. 2023, arXiv:2305.16264)."""
OVERHEAD_SECONDS = 25.0
"""Estimated seconds of a run besides training steps, on 2 CPU cores: imports, data, checkpoints, page."""
PLANNED_SHARE = 0.9
"""Share of the given time for which runs are planned."""


@dataclass(frozen=True)
class Round:
    """Runs of some candidates, with the same seeds and the same number of steps."""

    num_dense: int
    num_sparse: int
    seeds: tuple[int, ...]
    share: float
    """Steps, as a share of the last round's."""

    @property
    def num_runs(self) -> int:
        return (self.num_dense + self.num_sparse) * len(self.seeds)

    def steps(self, full: int) -> int:
        return max(1, round(self.share * full))


ROUNDS = (
    Round(len(DENSE), len(SPARSE), (0, 1), 1 / 4),
    Round(1, 2, (0, 1), 1 / 2),
    Round(1, 1, (2, 3, 4, 5, 6), 1),
)


def time_model(rounds: Sequence[Round], step_seconds: Mapping[str, float]) -> tuple[float, float]:
    """Return (a, b): run one by one, the rounds take a + b * steps seconds, with `steps` in the last round.

    The slowest candidates, by their seconds of a step, are assumed to survive.
    """
    # Without a backward pass, validation takes a third of the time of training on its tokens.
    validation_steps = NUM_VALIDATIONS * VALIDATION_TOKENS / (3 * TOKENS_PER_STEP)
    fixed = per_step = 0.0
    for round_ in rounds:
        fixed += round_.num_runs * OVERHEAD_SECONDS
        for family, number in ((DENSE, round_.num_dense), (SPARSE, round_.num_sparse)):
            fastest_first = sorted(step_seconds[arm] for arm in step_seconds if arm in family)
            seconds = len(round_.seeds) * sum(fastest_first[-number:])
            per_step += round_.share * seconds
            fixed += validation_steps * seconds
    return fixed, per_step


def full_steps(
    seconds: float, rounds: Sequence[Round], step_seconds: Mapping[str, float], jobs: int
) -> int:
    """Return the steps of the last round with which these rounds, `jobs` runs at a time, take `seconds`."""
    fixed, per_step = time_model(rounds, step_seconds)
    return max(0, int((seconds * jobs - fixed) / per_step))


class Question(Config, frozen=True):
    """Text and time of a search, and measured sizes, which a resumed search reuses."""

    data: list[str] = Field(min_length=1)
    """Text files, folders or globs."""
    minutes: float = Field(gt=0)
    """Time for all runs."""
    jobs: int = Field(ge=1)
    """Number of runs at a time."""
    seed: int = Field(default=0, ge=0)
    """Seed of the first run; those of the rounds count from it."""
    width: int
    """d_model of all candidates."""
    step_seconds: dict[str, float]
    """Candidate -> seconds of a training step, measured before the first round."""
    max_steps: int
    """Steps that make `MAX_PASSES` passes over the training text."""

    @classmethod
    def measured(
        cls,
        data: Sequence[str],
        minutes: float,
        jobs: int,
        say: Callable[[str], None],
        seed: int = 0,
    ) -> Question:
        """Time steps; choose the largest width whose runs read enough text, ConfigError if none does."""
        text = prepare(_config(data, WIDTHS[0], {}).data)
        max_steps = MAX_PASSES * len(text.train) // TOKENS_PER_STEP
        if max_steps < MIN_STEPS:
            raise ConfigError(
                f"--data: {len(text.train):,} tokens are too few: {MAX_PASSES} passes over them are "
                f"{max_steps} steps, but at least {MIN_STEPS} are needed; give more text"
            )
        chosen = 0
        for width in WIDTHS:
            pair = _timed(data, width, ("gelu", "moe_64_top4"))
            steps = min(full_steps(PLANNED_SHARE * 60 * minutes, ROUNDS, pair, jobs), max_steps)
            active = _config(data, width, SPARSE["moe_64_top4"]).model.num_active_params(
                VOCAB_SIZE, SEQ_LEN
            )
            say(f"width {width}: {1000 * pair['moe_64_top4']:.0f} ms per step, {steps} steps")
            is_enough = (
                steps >= MIN_STEPS and steps * TOKENS_PER_STEP >= TOKENS_PER_PARAMETER * active
            )
            if chosen and not is_enough:
                break
            if steps < MIN_STEPS:
                fixed, per_step = time_model(ROUNDS, pair)
                needed = (fixed + MIN_STEPS * per_step) / jobs / 60 / PLANNED_SHARE
                raise ConfigError(
                    f"--minutes: {minutes:g} minutes leave {steps} steps for the longest runs of the "
                    f"smallest models, but {MIN_STEPS} are needed; give at least {math.ceil(needed)}"
                )
            chosen = width
            if not is_enough:
                break
        say(f"timing {len(BLOCKS)} candidates at width {chosen}")
        return cls(
            data=[*data],
            minutes=minutes,
            jobs=jobs,
            seed=seed,
            width=chosen,
            step_seconds=_timed(data, chosen, BLOCKS),
            max_steps=max_steps,
        )

    def study(
        self, name: str, arms: Sequence[str], seeds: Sequence[int], steps: int, folder: Path
    ) -> StudyConfig:
        """Return a round as a study, with its runs in the subfolder `name` of `folder`."""
        options = _options(self.data, self.width) | {"run": {"output_dir": str(folder)}}
        options["trainer"] = {
            "max_steps": steps,
            "validate_every_n_steps": math.ceil(steps / NUM_VALIDATIONS),
        }
        return StudyConfig(
            name=name,
            question=f"Which feed-forward block for {', '.join(self.data)}?",
            config=options,
            arms={arm: {"model.ffn": BLOCKS[arm]} for arm in arms},
            seeds=[*seeds],
            baseline=next(arm for arm in arms if arm in DENSE),
        )

    @property
    def seconds(self) -> float:
        """Seconds for which runs are planned."""
        return PLANNED_SHARE * 60 * self.minutes


def _options(data: Sequence[str], width: int) -> dict[str, Any]:
    """Return the options of all candidates, with the settings of the studies in `configs/studies`."""
    return {
        "data": {
            "corpus": {"type": "text", "paths": [*data]},
            "tokenizer": {"type": "bpe", "vocab_size": VOCAB_SIZE},
            "seq_len": SEQ_LEN,
            "batch_size": BATCH_SIZE,
            "validation_tokens": VALIDATION_TOKENS,
        },
        "model": {"d_model": width, "num_layers": NUM_LAYERS, "scale_embeddings": True},
        # The best rates of dense and sparse models with widths from 24 to 96 are within a factor of 1.5
        # of this one (docs/studies: isoflop, experts_rate, noise), the best that was tried at 192 (ladder).
        "optimizer": {"type": "muon", "learning_rate": round(0.02 * math.sqrt(48 / width), 4)},
        "sample": {"num_tokens": 1},
        "logging": {"every_n_steps": 20, "wandb": {"mode": "disabled"}},
    }


def _config(data: Sequence[str], width: int, block: Mapping[str, Any]) -> TrainConfig:
    options = _options(data, width)
    return validate(TrainConfig, options | {"model": options["model"] | {"ffn": block or "dense"}})


def _timed(data: Sequence[str], width: int, arms: Iterable[str]) -> dict[str, float]:
    """Return arm -> median seconds of a step, timed in turns."""
    runs = [PlannedRun(arm, 0, _config(data, width, BLOCKS[arm]), arm) for arm in arms]
    return {arm: time.seconds_per_step for arm, time in time_arms(runs, rounds=3).items()}


# -- the rounds


@dataclass(frozen=True)
class Answer:
    """The chosen block, and the runs that support the choice."""

    folder: Path
    """Folder of the rounds, with the config of the chosen block."""
    gathered: Gathered
    """Runs of the last round."""
    comparison: Comparison
    """Comparison of the last round; its verdicts are the answer."""
    chosen: Arm


class Search:
    """The rounds that answer a question, in a folder; it does not repeat finished runs."""

    def __init__(self, question: Question, folder: Path, say: Callable[[str], None]) -> None:
        self.question, self.folder, self.say = question, folder, say

    def run(self) -> Answer:
        """Train all rounds and return the answer; ConfigError if a run fails, or a file cannot be written."""
        arms: Sequence[str] = [*BLOCKS]
        step_seconds: Mapping[str, float] = self.question.step_seconds
        notes: list[str] = []
        spent = 0.0
        for index, following in enumerate(ROUNDS[1:]):
            compared = self._train(index, arms, step_seconds, spent).compare()
            arms = survivors(compared, following, doublings=-math.log2(ROUNDS[index].share))
            step_seconds = {a.name: a.step_seconds or step_seconds[a.name] for a in compared.arms}
            spent += _spent_seconds(compared, self.question.jobs)
            losses = ", ".join(f"{arm.name} {arm.loss:.3f}" for arm in ranked(compared.arms))
            steps, seeds = compared.arms[0].steps, len(compared.arms[0].results)
            notes.append(f"Round {index + 1}, {steps:.0f} steps and {seeds} seeds: {losses}.")
            self.say(notes[-1])
        last = self._train(len(ROUNDS) - 1, arms, step_seconds, spent)
        return answer(self.question, self.folder, last, notes)

    def _train(
        self, index: int, arms: Sequence[str], step_seconds: Mapping[str, float], spent: float
    ) -> Gathered:
        """Train the unfinished runs of a round, and return all its results."""
        runs = self._study(index, arms, step_seconds, spent).planned_runs()
        self.say(
            f"round {index + 1} of {len(ROUNDS)}: {', '.join(arms)}; {len(runs)} runs of "
            f"{runs[0].config.trainer.max_steps} steps"
        )
        sweep = Sweep(runs, self.question.jobs)
        sweep.run(self.say)
        if failed := sweep.jobs_in("failed"):
            raise ConfigError(
                f"{failed[0].name}: {failed[0].problem}; --resume {self.folder} retries"
            )
        return gather([runs[0].folder.parent])

    def _study(
        self, index: int, arms: Sequence[str], step_seconds: Mapping[str, float], spent: float
    ) -> StudyConfig:
        """Return the study of a round: the one in its folder, or a new one that fits the remaining time."""
        round_, name = ROUNDS[index], f"round_{index + 1}"
        folder = self.folder / name
        if (folder / STUDY_FILE).is_file():
            return StudyConfig.read(folder / STUDY_FILE)
        left = self.question.seconds - spent
        full = full_steps(left, ROUNDS[index:], step_seconds, self.question.jobs)
        full = max(MIN_STEPS, min(full, self.question.max_steps))
        seeds = [self.question.seed + seed for seed in round_.seeds]
        study = self.question.study(name, arms, seeds, round_.steps(full), self.folder)
        write_study(study, folder)
        return study


def _spent_seconds(compared: Comparison, jobs: int) -> float:
    results = [result for arm in compared.arms for result in arm.results]
    return sum(OVERHEAD_SECONDS + (r.outcome.wall_seconds or 0.0) for r in results) / jobs


def ranked(arms: Iterable[Arm], doublings: float = 0.0) -> list[Arm]:
    """Sort arms by loss, the lowest first, extrapolated to so many doublings of the steps.

    Each doubling is assumed to change the loss as much as the second half of the run did.
    """
    return sorted(
        arms, key=lambda arm: arm.loss + doublings * fmean(map(last_doubling, arm.results))
    )


def survivors(compared: Comparison, following: Round, doublings: float = 0.0) -> list[str]:
    """Return the best dense blocks and mixtures (see `ranked`), as many as the next round trains."""
    names = [arm.name for arm in ranked(compared.arms, doublings)]
    dense = [name for name in names if name in DENSE][: following.num_dense]
    return dense + [name for name in names if name in SPARSE][: following.num_sparse]


def last_doubling(result: RunResult) -> float:
    """Return the change of the validation loss over the second half of a run, in nats per token."""
    curve = result.validation
    at_half = np.interp(
        result.outcome.step / 2, curve.steps, [math.nan if x is None else x for x in curve.losses]
    )
    return (result.outcome.validation_loss or math.nan) - float(at_half)


def doublings_to_reversal(arm: Arm, base: Arm) -> float:
    """Return the number of doublings of training after which the difference of two arms would change sign.

    Each doubling is assumed to change the difference as much as the second half of the runs did. Infinite
    unless the 95 % interval over seeds shows that the difference shrinks.
    """
    base_changes = {result.seed: last_doubling(result) for result in base.results}
    changes = [
        last_doubling(r) - base_changes[r.seed] for r in arm.results if r.seed in base_changes
    ]
    assert arm.difference is not None
    sign = math.copysign(1, arm.difference.mean)
    shrinking = mean_interval([-sign * change for change in changes])
    if shrinking is None or shrinking.low <= 0:
        return math.inf
    return abs(arm.difference.mean) / shrinking.value


# -- the answer


def answer(
    question: Question, folder: Path, gathered: Gathered, notes: Sequence[str] = ()
) -> Answer:
    """Return the answer from the last round, and write the config of the chosen block."""
    compared = gathered.compare()
    dense = compared.arm(compared.baseline)
    sparse = next(arm for arm in compared.arms if arm.base)
    difference = sparse.difference
    is_claimed = difference is not None and difference.is_claimed
    doublings = doublings_to_reversal(sparse, dense)
    is_reversing = is_claimed and doublings <= MAX_DOUBLINGS
    chosen = sparse if is_claimed and not is_reversing and sparse.loss < dense.loss else dense
    verdict = (
        _reversal(question, dense, sparse, doublings)
        if is_reversing
        else _verdict(question, compared, dense, sparse, is_claimed)
    )
    sentences = [verdict, _cost(dense, sparse), _evidence(dense, sparse)]
    options = {k: v for k, v in chosen.results[0].config.items() if k not in ("seed", "run")}
    with explaining(f"'{folder / CONFIG_FILE}' cannot be written"):
        write_atomically(folder / CONFIG_FILE, to_yaml(validate(TrainConfig, options)))
    comparison = replace(compared, answer=sentences, notes=[*compared.notes, *notes])
    return Answer(folder, gathered, comparison, chosen)


def _verdict(
    question: Question, compared: Comparison, dense: Arm, sparse: Arm, is_claimed: bool
) -> str:
    assert sparse.difference is not None
    assert sparse.difference.interval is not None
    mean, low, high = sparse.difference.interval
    if not is_claimed and sparse.difference.is_equal:
        return (
            f"{sparse.name} equals {dense.name} within {sparse.difference.margin:g} nats per token, "
            f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]. Train {dense.name}, the simpler block."
        )
    if not is_claimed:
        return (
            f"Cannot tell {sparse.name} from {dense.name} within this time: the difference is {mean:+.4f} "
            f"[{low:+.4f}, {high:+.4f}] nats per token; "
            f"{_time_needed(question, compared.seed_differences(sparse))} would be enough. Until then train "
            f"{dense.name}, the simpler block."
        )
    better, other = (sparse, dense) if mean < 0 else (dense, sparse)
    ends = sorted((abs(low), abs(high)))
    return (
        f"Use {better.name}: its loss is {abs(mean):.4f} [{ends[0]:.4f}, {ends[1]:.4f}] nats per token lower "
        f"than that of {other.name}{_time(dense, sparse) if mean < 0 else ''}."
    )


def _reversal(question: Question, dense: Arm, sparse: Arm, doublings: float) -> str:
    assert sparse.difference is not None
    mean = sparse.difference.mean
    better, other = (sparse, dense) if mean < 0 else (dense, sparse)
    at_half = abs(mean) * (1 + 1 / doublings)
    needed = format_duration(60 * question.minutes * 2 ** (doublings + 1))
    return (
        f"Cannot tell {sparse.name} from {dense.name} within this time: the loss of {better.name} is "
        f"{abs(mean):.4f} nats per token lower than that of {other.name}, but was {at_half:.4f} lower "
        f"halfway through training, so longer runs may reverse the order; {needed} would show it. Until then "
        f"train {dense.name}, the simpler block."
    )


def _time(dense: Arm, sparse: Arm) -> str:
    """Describe the time in which the Mixture of Experts reaches the loss of the dense block."""
    reached, dense_seconds = sparse.reached, dense.training_seconds
    if reached is None or reached.seconds is None or not dense_seconds:
        return ""
    ratio = reached.seconds / dense_seconds
    return f", {'and' if ratio < 1 else 'but'} it reaches that loss in {ratio:.0%} of the time"


def _time_needed(question: Question, differences: Sequence[float]) -> str:
    """Return the time for as many seeds as are needed to detect the mean of these differences."""
    needed = seeds_needed(stdev(differences), max(abs(fmean(differences)), 0.005))
    seeds = max(needed, len(differences) + 1)
    return format_duration(60 * question.minutes * seeds / len(differences))


def _cost(dense: Arm, sparse: Arm) -> str:
    speeds = (sparse.tokens_per_second, dense.tokens_per_second)
    memory = [(arm.mean("peak_memory_bytes") or 0) / 1e6 for arm in (sparse, dense)]
    ratio = sparse.budget.model.params / dense.budget.model.params
    speed = (
        "" if None in speeds else f"{speeds[0]:,.0f} tokens per second against {speeds[1]:,.0f}, "
    )
    return (
        f"{sparse.name} trains at {speed}with {memory[0]:,.0f} MB of memory against {memory[1]:,.0f}, at "
        f"equal FLOPs and with {ratio:.1f} times the parameters."
    )


def _evidence(dense: Arm, sparse: Arm) -> str:
    assert sparse.difference is not None
    return (
        f"This rests on {sparse.difference.num_pairs} seeds of each (p {p_text(sparse.difference.p_value)}), "
        f"models of {dense.budget.model.active_params / 1e6:.2f} M active parameters and "
        f"{dense.budget.tokens / 1e6:.1f} M tokens; shorter runs chose these two blocks from {len(BLOCKS)}, "
        "and larger models or longer runs may order them differently."
    )
