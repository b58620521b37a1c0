"""The stopwatch: candidates take turns, so that a busy machine slows all of them alike."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Clock = Callable[[Callable[[], object]], float]
"""Runs what it is given, and returns the seconds that took."""


@dataclass(frozen=True)
class Timed:
    """A candidate to time."""

    run: Callable[[], object]
    reset: Callable[[], object] = lambda: None
    """Called after every run, off the clock."""
    calls: int = 1
    """Calls within one `run`; a single one may be too short for the clock."""


@dataclass(frozen=True)
class Timing:
    """The measurements of one candidate, one a round."""

    values: tuple[float, ...]
    """Seconds, unless said otherwise."""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def noise(self) -> float:
        """The distance between the quartiles, as a part of the median."""
        lower, upper = self.quartiles
        return (upper - lower) / self.median

    @property
    def quartiles(self) -> tuple[float, float]:
        """The lower and the upper one."""
        if len(self.values) == 1:
            return self.values[0], self.values[0]
        lower, _, upper = statistics.quantiles(self.values, n=4, method="inclusive")
        return lower, upper


@dataclass(frozen=True)
class Rounds:
    """How often every candidate takes its turn."""

    timed: int = 9
    warmup: int = 1
    """Rounds before them, thrown away."""
    patience: float | None = None
    """Seconds of timed rounds after which `FEWEST_ROUNDS` are enough; None: all rounds, however long."""


FEWEST_ROUNDS = 3


def interleave(candidates: Mapping[str, Timed], rounds: Rounds, clock: Clock) -> dict[str, Timing]:
    """Every round runs each candidate once. No garbage is collected while the clock runs."""
    names = list(candidates)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    spent = 0.0
    for turn in range(-rounds.warmup, rounds.timed):
        if rounds.patience is not None and turn >= FEWEST_ROUNDS and spent > rounds.patience:
            break
        for name in order(names, turn):
            gc.collect(1)
            gc.disable()
            try:
                elapsed = clock(candidates[name].run)
            finally:
                gc.enable()
            candidates[name].reset()
            if turn >= 0:
                spent += elapsed
                seconds[name].append(elapsed / candidates[name].calls)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def order(names: Sequence[str], turn: int) -> list[str]:
    """The order of a round: shuffled, the same way in every run.

    A candidate finds the caches and the heap as the one before it left them; so it should not always be
    the same one.
    """
    return random.Random(turn).sample(list(names), len(names))


def clock_for(device: torch.device) -> Clock:
    return cuda_clock if device.type == "cuda" else cpu_clock


def cpu_clock(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def cuda_clock(run: Callable[[], object]) -> float:
    """By events on the stream, since a kernel's launch returns before the kernel does."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000
