"""Time training steps of all arms in turns, so that a busy machine slows all arms equally."""

from __future__ import annotations

import gc
import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.profiler import record_function
from torch.utils.benchmark import timer

from moe_ffn.balancing.losses import count_step
from moe_ffn.config.errors import ConfigError
from moe_ffn.config.process_memory import keep_freed_memory
from moe_ffn.data.batches import TrainBatches
from moe_ffn.data.prepare import PreparedData, prepare
from moe_ffn.runs.config import TrainConfig
from moe_ffn.studies.config import PlannedRun
from moe_ffn.training.config import resolve_precision
from moe_ffn.training.monitoring.hardware import describe_hardware
from moe_ffn.training.objective import (
    add_coupling_gradient,
    inputs_and_targets,
    needs_step_totals,
    objective,
)
from moe_ffn.training.optimizer import build_schedule

MIN_ROUNDS = 3


class Timed(Protocol):
    """A candidate that `interleave` can time."""

    @property
    def calls(self) -> int:
        """Number of calls in one `run`, because a single call may be too short for the clock."""
        ...

    def run(self) -> object: ...

    def reset(self) -> object:
        """Called after each run, with the clock stopped."""


def interleave(
    candidates: Sequence[Timed],
    rounds: int,
    warmup: int = 1,
    patience: float = math.inf,
    clock: Callable[[], float] = timer,
) -> list[tuple[float, ...]]:
    """Run all candidates once per round; return for each candidate the seconds per call in each round.

    A busy machine then slows all candidates equally. Garbage collection is off while the `clock`, which waits
    for the GPU, runs. The `warmup` rounds do not count; after `patience` seconds `MIN_ROUNDS` rounds are
    enough.
    """
    seconds: list[list[float]] = [[] for _ in candidates]
    spent = 0.0
    for index in range(-warmup, rounds):
        if index >= MIN_ROUNDS and spent > patience:
            break
        # Caches and heap depend on the previous candidate, so the order is shuffled, with a fixed seed.
        for number in random.Random(index).sample(range(len(candidates)), len(candidates)):
            candidate = candidates[number]
            gc.collect(1)
            gc.disable()
            try:
                start = clock()
                candidate.run()
                elapsed = clock() - start
            finally:
                gc.enable()
            candidate.reset()
            if index >= 0:
                spent += elapsed
                seconds[number].append(elapsed / candidate.calls)
    return [tuple(values) for values in seconds]


class Training:
    """A hand-written training loop, whose parts have names in a profile, such as `step: forward`."""

    def __init__(self, config: TrainConfig, data: PreparedData, device: torch.device) -> None:
        """Build model and optimizer; ConfigError for a teacher, or a precision that is not supported."""
        precision = resolve_precision(config.trainer.precision, device.type)
        if precision not in ("32-true", "bf16-mixed"):
            raise ConfigError(
                f"trainer.precision ({precision}): the timed loop supports only 32-true and bf16-mixed"
            )
        if (distill := config.objective.distill) is not None:
            raise ConfigError(
                f"objective.distill ({distill.teacher}): the timed loop has no teacher; set it to null, or "
                "leave its arms out"
            )
        torch.manual_seed(config.seed)
        self.clip = config.trainer.gradient_clip_val or torch.inf
        self.objective = config.objective
        self.accumulate = config.trainer.accumulate_grad_batches
        seq_len, batch_size = config.data.seq_len, config.data.batch_size
        self.model = config.model.build(data.tokenizer.vocab_size, seq_len).to(device)
        if config.trainer.compile:
            self.model.compile()
        self.optimizer = config.optimizer.build(self.model)
        self.schedule = build_schedule(self.optimizer, config.optimizer, config.trainer.max_steps)
        self.batches = TrainBatches(
            data.train, seq_len=seq_len, batch_size=batch_size, seed=config.seed
        )
        self.device, self.bf16 = device, precision == "bf16-mixed"
        self.num_batches = 0

    def step(self) -> None:
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)
        batches = [self._next_batch() for _ in range(self.accumulate)]
        totals = None
        if needs_step_totals(self.objective) and self.accumulate > 1:
            with record_function("step: counting"), autocast, torch.no_grad():
                totals = count_step(self.model(input_ids).routings for input_ids, _ in batches)
        for input_ids, target_ids in batches:
            with record_function("step: forward"), autocast:
                output = self.model(input_ids)
                terms = objective(
                    output.logits, target_ids, output.routings, self.objective, step_totals=totals
                )
            with record_function("step: backward"):
                (terms.total / self.accumulate).backward()
        if (coupling := self.objective.coupling) is not None:
            with record_function("step: coupling"):
                add_coupling_gradient(self.model, coupling, self.num_batches)
        with record_function("step: clipping"):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        with record_function("step: optimizer"):
            self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def _next_batch(self) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the next batch."""
        batch = self.batches[self.num_batches]
        self.num_batches += 1
        input_ids, target_ids = (ids.to(self.device) for ids in (batch.input_ids, batch.target_ids))
        fraction = self.objective.masked_fraction
        return inputs_and_targets(self.model, input_ids, target_ids, fraction)


# -- the arms of a study


@dataclass(frozen=True)
class StepTime:
    """Speed of an arm's training step."""

    seconds_per_step: float
    """Median over the rounds."""
    tokens_per_second: float
    num_steps: int
    quartiles: tuple[float, float]
    """Lower and upper quartile over the rounds, in seconds per step."""


class _Steps:
    """Several training steps of an arm, as a candidate for `interleave`."""

    def __init__(self, training: Training, calls: int) -> None:
        self.training, self.calls = training, calls

    def run(self) -> None:
        for _ in range(self.calls):
            self.training.step()

    def reset(self) -> None: ...


_SECONDS_PER_RUN = 0.3
_MAX_CALLS = 20


def time_arms(
    runs: Iterable[PlannedRun],
    rounds: int = 15,
    on_round: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = timer,
) -> dict[str, StepTime]:
    """Time the training step (forward, objective, backward, clipping, optimizer) of every arm in one process.

    Seeds and tuned options do not change the time of a step, so each arm is timed once; `on_round` gets a
    description of what follows. Raises ConfigError if the corpus cannot be used, or the loop does not support
    a precision.
    """
    arms: dict[str, TrainConfig] = {}
    for run in runs:
        if not run.tuning:
            arms.setdefault(run.arm, run.config)
    prepared: dict[str, PreparedData] = {}
    candidates: dict[str, _Steps] = {}
    for arm, config in arms.items():
        on_round(f"building {arm}")
        key = str(config.data.to_dict())
        data = prepared[key] = prepared.get(key) or prepare(config.data)
        is_gpu = config.trainer.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
        if not is_gpu:
            keep_freed_memory()  # as a run does
        training = Training(config, data, torch.device("cuda" if is_gpu else "cpu"))
        training.step()  # the first step is the slowest
        start = clock()
        training.step()
        calls = math.ceil(_SECONDS_PER_RUN / max(clock() - start, 1e-9))
        candidates[arm] = _Steps(training, min(calls, _MAX_CALLS))
    on_round(f"timing {len(candidates)} arms in turns")
    seconds = interleave([*candidates.values()], rounds, warmup=1, clock=clock)
    return {
        arm: _step_time(arms[arm], candidate.calls, values)
        for (arm, candidate), values in zip(candidates.items(), seconds, strict=True)
    }


def _step_time(config: TrainConfig, calls: int, seconds: Sequence[float]) -> StepTime:
    median = statistics.median(seconds)
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return StepTime(median, config.tokens_per_step / median, calls * len(seconds), (low, high))


def timing_file(times: dict[str, StepTime]) -> dict[str, Any]:
    """Return the content of `timing.json`: the machine, and the times of the arms."""
    machine = describe_hardware() | {
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    return {"machine": machine, "arms": {arm: asdict(time) for arm, time in times.items()}}
