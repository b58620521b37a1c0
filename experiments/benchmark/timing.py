"""The stopwatch: candidates take turns, so that a busy machine slows all of them alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Clock = Callable[[Callable[[], object]], float]
"""Runs what it is given, and returns the seconds that took."""


def nothing() -> None:
    """What most candidates have to clear away after a run."""


@dataclass(frozen=True)
class Timed:
    """What is timed."""

    run: Callable[[], object]
    reset: Callable[[], object] = nothing
    """Called after every run, off the clock."""
    calls: int = 1
    """How many times `run` does the thing; a single one may be too short for the clock."""


@dataclass(frozen=True)
class Timing:
    """The seconds of one candidate, one value a round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The lower and the upper one."""
        if len(self.seconds) == 1:
            return self.seconds[0], self.seconds[0]
        lower, _, upper = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return lower, upper


def interleave(
    candidates: Mapping[str, Timed], *, rounds: int, warmup: int, clock: Clock
) -> dict[str, Timing]:
    """Every round runs each candidate once, and the next round starts with the next candidate.

    The first `warmup` rounds are thrown away. Nothing is collected while the clock runs.
    """
    names = list(candidates)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-warmup, rounds):
        first = turn % len(names) if names else 0
        for name in names[first:] + names[:first]:
            gc.collect(1)
            gc.disable()
            try:
                elapsed = clock(candidates[name].run)
            finally:
                gc.enable()
            candidates[name].reset()
            if turn >= 0:
                seconds[name].append(elapsed / candidates[name].calls)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


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
