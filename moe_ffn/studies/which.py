"""Find the feed-forward block that suits a corpus, by training candidates within a given time.

Three rounds halve the candidates: all of them in short runs, then the better half in longer ones, and at last
the best dense block against the best mixture of experts, at full length. The last round has fresh seeds, so
that the choice of the two does not bias their difference. All arms of a seed read the same text.

Short runs favour dense blocks and few experts, which learn faster at first. So a candidate is ranked by where
its loss is heading; and if the gap is still shrinking at the end of training, no winner is declared.
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
from moe_ffn.config.errors import ConfigError
from moe_ffn.config.yaml_files import to_yaml, validate
from moe_ffn.data.prepare import prepare
from moe_ffn.files import write_whole
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.folder import CONFIG_FILE, explaining
from moe_ffn.studies.comparison import Arm, Comparison, p_text
from moe_ffn.studies.config import STUDY_FILE, PlannedRun, StudyConfig
from moe_ffn.studies.gather import Gathered, gather
from moe_ffn.studies.result import RunResult
from moe_ffn.studies.statistics import mean_interval, seeds_needed
from moe_ffn.studies.sweep import Sweep, in_words, write_study
from moe_ffn.studies.timing import time_arms

QUESTION_FILE = "which.yaml"
"""The question, and how its runs are sized, in the folder of the rounds."""
PAGE_FILE = "which.html"

_FLOPS = {"match": "flops_per_token", "of": {"type": "dense", "activation": "gelu"}}


def _experts(num_experts: int, k: int) -> dict[str, Any]:
    router = {"type": "top_k", "k": k, "scale": 0.25}
    return {
        "type": "moe",
        "num_experts": num_experts,
        "router": router,
        "experts": {"type": "swiglu", "d_ff": _FLOPS},
    }


DENSE: dict[str, Any] = {
    "gelu": {"type": "dense", "activation": "gelu"},
    "swiglu": {"type": "swiglu", "d_ff": _FLOPS},
}
SPARSE: dict[str, Any] = {
    "moe_8_top2": _experts(8, 2),
    "moe_32_top2": _experts(32, 2),
    "moe_32_top4": _experts(32, 4),
    "moe_64_top4": _experts(64, 4),
}
BLOCKS = DENSE | SPARSE
"""Candidates: name -> block. All have equal FLOPs per token; granularity and number of experts differ."""

SEQ_LEN, BATCH_SIZE, VOCAB_SIZE, NUM_LAYERS = 128, 16, 2048, 4
TOKENS_PER_STEP = SEQ_LEN * BATCH_SIZE
NUM_VALIDATIONS, VALIDATION_TOKENS = 8, 16384
WIDTHS = (32, 48, 64, 96, 128, 192, 256, 384, 512)
TOKENS_PER_PARAMETER = 4
"""Training tokens for each active parameter; wider models would end before they have learned to differ."""
MIN_STEPS = 400
"""Fewest steps in the last round for which results are trusted. The first round has a quarter of them; with
fewer, the loss does not yet show which block will lead."""
MAX_DOUBLINGS = 2.0
"""No winner is declared if the order of two blocks would change within so many doublings of training."""
MAX_PASSES = 4
"""Passes over the text; later ones teach much less (Muennighoff et al. 2023, arXiv:2305.16264)."""
OVERHEAD_SECONDS = 25.0
"""Seconds of a run outside its training, on two slow cores: imports, data, checkpoints, page."""
RESERVE = 0.9
"""Share of the time that is planned."""


@dataclass(frozen=True)
class Round:
    """Candidates that are trained with the same seeds for the same number of steps."""

    num_dense: int
    num_sparse: int
    seeds: tuple[int, ...]
    share: float
    """Share of the steps of the last round."""

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


def core_seconds(rounds: Sequence[Round], step_seconds: Mapping[str, float]) -> tuple[float, float]:
    """Return the seconds of rounds, one run at a time: the fixed ones, and those of a step of the last round.

    Args:
        step_seconds: candidate -> seconds of a step. The slowest are assumed to stay.
    """
    # A validation has a third of the work of training on its tokens: no backward pass.
    validating = NUM_VALIDATIONS * VALIDATION_TOKENS / (3 * TOKENS_PER_STEP)
    fixed = per_step = 0.0
    for each in rounds:
        fixed += each.num_runs * OVERHEAD_SECONDS
        for known, number in ((DENSE, each.num_dense), (SPARSE, each.num_sparse)):
            slowest = sorted(step_seconds[arm] for arm in step_seconds if arm in known)
            of_arms = len(each.seeds) * sum(slowest[-number:])
            per_step += each.share * of_arms
            fixed += validating * of_arms
    return fixed, per_step


def full_steps(
    seconds: float, rounds: Sequence[Round], step_seconds: Mapping[str, float], jobs: int
) -> int:
    """Return the number of steps of the last round with which these rounds take `seconds`.

    Args:
        step_seconds: as in `core_seconds`.
        jobs: number of runs that are trained at the same time.
    """
    fixed, per_step = core_seconds(rounds, step_seconds)
    return max(0, int((seconds * jobs - fixed) / per_step))


class Question(Config, frozen=True):
    """Text and time of a search, and its sizes, which are measured once and kept when it is resumed."""

    data: list[str] = Field(min_length=1)
    """Text files, folders or globs."""
    minutes: float = Field(gt=0)
    """Time for all runs."""
    jobs: int = Field(ge=1)
    """Number of runs that are trained at the same time."""
    width: int
    """d_model of all candidates."""
    step_seconds: dict[str, float]
    """Candidate -> seconds of a training step, measured before the first round."""
    max_steps: int
    """Steps of `MAX_PASSES` passes over the training text."""

    @classmethod
    def measured(
        cls, data: Sequence[str], minutes: float, jobs: int, say: Callable[[str], None]
    ) -> Question:
        """Choose the width by timing steps: the largest whose runs read enough tokens within the time.

        Raises:
            ConfigError: the time is too short, or the text cannot be used.
        """
        text = prepare(_config(data, WIDTHS[0], {}).data)
        max_steps = MAX_PASSES * len(text.train) // TOKENS_PER_STEP
        if max_steps < MIN_STEPS:
            raise ConfigError(
                f"--data: {len(text.train):,} tokens are too few: {MAX_PASSES} passes over them are "
                f"{max_steps} steps, and at least {MIN_STEPS} are needed; give more text"
            )
        chosen = 0
        for width in WIDTHS:
            pair = _timed(data, width, ("gelu", "moe_64_top4"))
            steps = min(full_steps(RESERVE * 60 * minutes, ROUNDS, pair, jobs), max_steps)
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
                fixed, per_step = core_seconds(ROUNDS, pair)
                needed = (fixed + MIN_STEPS * per_step) / jobs / 60 / RESERVE
                raise ConfigError(
                    f"--minutes: {minutes:g} minutes leave {steps} steps for the longest runs of the "
                    f"smallest models, and {MIN_STEPS} are the least; give at least {math.ceil(needed)}"
                )
            chosen = width
            if not is_enough:
                break
        say(f"timing {len(BLOCKS)} candidates at width {chosen}")
        return cls(
            data=[*data],
            minutes=minutes,
            jobs=jobs,
            width=chosen,
            step_seconds=_timed(data, chosen, BLOCKS),
            max_steps=max_steps,
        )

    def study(
        self, name: str, arms: Sequence[str], seeds: Sequence[int], steps: int, folder: Path
    ) -> StudyConfig:
        """Return the runs of a round as a study, in the subfolder `name` of `folder`."""
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
        """Seconds that are planned."""
        return RESERVE * 60 * self.minutes


def _options(data: Sequence[str], width: int) -> dict[str, Any]:
    """Return the options of all candidates, which are those of the studies in `configs/studies`."""
    return {
        "data": {
            "corpus": {"type": "text", "paths": [*data]},
            "tokenizer": {"type": "bpe", "vocab_size": VOCAB_SIZE},
            "seq_len": SEQ_LEN,
            "batch_size": BATCH_SIZE,
            "validation_tokens": VALIDATION_TOKENS,
        },
        "model": {"d_model": width, "num_layers": NUM_LAYERS, "scale_embeddings": True},
        # The best rates at widths of 24 to 96, dense and sparse, are within a factor of 1.5 of this
        # (docs/studies: isoflop, experts_rate, noise).
        "optimizer": {"type": "muon", "learning_rate": round(0.02 * math.sqrt(48 / width), 4)},
        "sample": {"num_tokens": 1},
        "logging": {"every_n_steps": 20, "wandb": {"mode": "disabled"}},
    }


def _config(data: Sequence[str], width: int, block: Mapping[str, Any]) -> TrainConfig:
    options = _options(data, width)
    return validate(TrainConfig, options | {"model": options["model"] | {"ffn": block or "dense"}})


def _timed(data: Sequence[str], width: int, arms: Iterable[str]) -> dict[str, float]:
    """Return the median seconds of a step of each arm, timed in turns."""
    runs = [PlannedRun(arm, 0, _config(data, width, BLOCKS[arm]), arm) for arm in arms]
    return {arm: time.seconds_per_step for arm, time in time_arms(runs, rounds=3).items()}


# -- the rounds


@dataclass(frozen=True)
class Answer:
    """The answer to a question, and the runs that support it."""

    folder: Path
    """Folder of the rounds, with the config of the chosen block."""
    gathered: Gathered
    """Runs of the last round."""
    comparison: Comparison
    """Comparison of the last round, with the answer as its verdicts."""
    chosen: Arm


class Search:
    """The rounds that answer a question, in a folder; finished runs are not repeated."""

    def __init__(self, question: Question, folder: Path, say: Callable[[str], None]) -> None:
        self.question, self.folder, self.say = question, folder, say

    def run(self) -> Answer:
        """Train all rounds and return the answer.

        Raises:
            ConfigError: a run failed, or a file cannot be written.
        """
        arms: Sequence[str] = [*BLOCKS]
        step_seconds: Mapping[str, float] = self.question.step_seconds
        notes: list[str] = []
        spent = 0.0
        for index, following in enumerate(ROUNDS[1:]):
            found = self._train(index, arms, step_seconds, spent).compare()
            arms = survivors(found, following, doublings=-math.log2(ROUNDS[index].share))
            step_seconds = {a.name: a.step_seconds or step_seconds[a.name] for a in found.arms}
            spent += _spent_seconds(found, self.question.jobs)
            losses = ", ".join(f"{arm.name} {arm.loss:.3f}" for arm in ranked(found.arms))
            steps, seeds = found.arms[0].steps, len(found.arms[0].results)
            notes.append(f"Round {index + 1}, {steps:.0f} steps and {seeds} seeds: {losses}.")
            self.say(notes[-1])
        last = self._train(len(ROUNDS) - 1, arms, step_seconds, spent)
        return answer(self.question, self.folder, last, notes)

    def _train(
        self, index: int, arms: Sequence[str], step_seconds: Mapping[str, float], spent: float
    ) -> Gathered:
        """Train the runs of a round that are not finished."""
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
        """Return the study of a round: as it was begun, or sized for the time that is left."""
        each, name = ROUNDS[index], f"round_{index + 1}"
        place = self.folder / name
        if (place / STUDY_FILE).is_file():
            return StudyConfig.read(place / STUDY_FILE)
        left = self.question.seconds - spent
        full = full_steps(left, ROUNDS[index:], step_seconds, self.question.jobs)
        full = max(MIN_STEPS, min(full, self.question.max_steps))
        study = self.question.study(name, arms, each.seeds, each.steps(full), self.folder)
        write_study(study, place)
        return study


def _spent_seconds(found: Comparison, jobs: int) -> float:
    walls = [result.outcome.wall_seconds or 0.0 for arm in found.arms for result in arm.results]
    return (sum(walls) + OVERHEAD_SECONDS * len(walls)) / jobs


def ranked(arms: Iterable[Arm], doublings: float = 0.0) -> list[Arm]:
    """Sort arms by their loss, the lowest first.

    Args:
        doublings: how often the steps would still be doubled. The loss is continued so far, at the rate of
            the second half of the runs.
    """
    return sorted(
        arms, key=lambda arm: arm.loss + doublings * fmean(map(last_doubling, arm.results))
    )


def survivors(found: Comparison, following: Round, doublings: float = 0.0) -> list[str]:
    """Return the best dense blocks and mixtures of a round, as many as the next round trains.

    Args:
        doublings: as in `ranked`.
    """
    names = [arm.name for arm in ranked(found.arms, doublings)]
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
    """Return how many doublings of the training would turn the difference of two arms around.

    The difference is continued at its rate over the second half of the runs. Infinite if it does not shrink,
    according to the 95 % interval of its change over seeds.
    """
    of_base = {result.seed: last_doubling(result) for result in base.results}
    changes = [last_doubling(r) - of_base[r.seed] for r in arm.results if r.seed in of_base]
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
    """Return the answer that the runs of the last round support, and write the config of the chosen block."""
    found = gathered.compare()
    dense, sparse = found.arm(found.baseline), next(arm for arm in found.arms if arm.base)
    difference = sparse.difference
    is_claimed = difference is not None and difference.is_claimed
    doublings = doublings_to_reversal(sparse, dense)
    is_reversing = is_claimed and doublings <= MAX_DOUBLINGS
    chosen = sparse if is_claimed and not is_reversing and sparse.loss < dense.loss else dense
    verdict = (
        _reversal(question, dense, sparse, doublings)
        if is_reversing
        else _verdict(question, found, dense, sparse, is_claimed)
    )
    sentences = [verdict, _cost(dense, sparse), _sureness(dense, sparse)]
    options = {k: v for k, v in chosen.results[0].config.items() if k not in ("seed", "run")}
    with explaining(f"'{folder / CONFIG_FILE}' cannot be written"):
        write_whole(folder / CONFIG_FILE, to_yaml(validate(TrainConfig, options)))
    comparison = replace(found, answer=sentences, notes=[*found.notes, *notes])
    return Answer(folder, gathered, comparison, chosen)


def _verdict(
    question: Question, found: Comparison, dense: Arm, sparse: Arm, is_claimed: bool
) -> str:
    assert sparse.difference is not None
    assert sparse.difference.interval is not None
    mean, low, high = sparse.difference.interval
    if not is_claimed:
        return (
            f"Cannot tell {sparse.name} from {dense.name} within this time: the difference is {mean:+.4f} "
            f"[{low:+.4f}, {high:+.4f}] nats per token; "
            f"{_time_needed(question, found.seed_differences(sparse))} would. Until then train {dense.name}, "
            "the simpler one."
        )
    better, other = (sparse, dense) if mean < 0 else (dense, sparse)
    ends = sorted((abs(low), abs(high)))
    return (
        f"Use {better.name}: it ends {abs(mean):.4f} [{ends[0]:.4f}, {ends[1]:.4f}] nats per token below "
        f"{other.name}{_time(sparse, dense) if mean < 0 else ''}."
    )


def _reversal(question: Question, dense: Arm, sparse: Arm, doublings: float) -> str:
    assert sparse.difference is not None
    mean = sparse.difference.mean
    better, other = (sparse, dense) if mean < 0 else (dense, sparse)
    at_half = abs(mean) * (1 + 1 / doublings)
    needed = in_words(60 * question.minutes * 2 ** (doublings + 1))
    return (
        f"Cannot tell {sparse.name} from {dense.name} within this time: {better.name} ends {abs(mean):.4f} "
        f"nats per token below {other.name}, but was {at_half:.4f} below at half of the training, so that "
        f"longer runs may reverse the order; {needed} would show it. Until then train {dense.name}, the "
        "simpler one."
    )


def _time(sparse: Arm, dense: Arm) -> str:
    """Describe when the mixture reaches the loss of the dense block, relative to the time of that block."""
    reached, whole = sparse.reached, dense.training_seconds
    if reached is None or reached.seconds is None or not whole:
        return ""
    ratio = reached.seconds / whole
    return f", {'and' if ratio < 1 else 'but'} reaches its loss in {ratio:.0%} of the time"


def _time_needed(question: Question, differences: Sequence[float]) -> str:
    """Return the time in which as many seeds could be trained as would show the mean of these differences."""
    needed = seeds_needed(stdev(differences), max(abs(fmean(differences)), 0.005))
    seeds = max(needed, len(differences) + 1)
    return in_words(60 * question.minutes * seeds / len(differences))


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


def _sureness(dense: Arm, sparse: Arm) -> str:
    assert sparse.difference is not None
    return (
        f"This rests on {sparse.difference.num_pairs} seeds of each (p {p_text(sparse.difference.p_value)}), "
        f"models of {dense.budget.model.active_params / 1e6:.2f} M active parameters and "
        f"{dense.budget.tokens / 1e6:.1f} M tokens; shorter runs chose these two among {len(BLOCKS)}, and "
        "larger or longer ones may order them otherwise."
    )
