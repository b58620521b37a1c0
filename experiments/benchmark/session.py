"""One run of the benchmark: what it was told, and what it has measured so far."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

import moe_ffn
from experiments.benchmark.layers import (
    DENSE,
    REFERENCE,
    SAME,
    Case,
    Layer,
    dense_layer,
    moe_layer,
    our_layers,
    peer_layers,
)
from experiments.benchmark.peers import PEERS
from experiments.benchmark.plot import Plot
from experiments.benchmark.report import Promise, Row, duration, ratio, spread, table, times
from experiments.benchmark.shapes import Shape
from experiments.benchmark.timing import Rounds, Timed, Timing, clock_for, interleave

NOISY = 0.1
"""Quartiles this far apart, as a part of the median, are worth a word."""


@dataclass
class Session:
    """Passed from suite to suite; prints as it goes."""

    rounds: Rounds
    backends: Sequence[str]
    device: torch.device
    rows: list[Row] = field(default_factory=list)
    promises: list[Promise] = field(default_factory=list)
    plots: dict[str, Plot] = field(default_factory=dict)
    """By the name of the suite."""
    _skipped: set[tuple[str, str]] = field(default_factory=set)
    _computes: dict[str, str] = field(default_factory=dict)
    """By the name of a timing, for those that `keep` was told."""

    @property
    def limits_apply(self) -> bool:
        """Those of times, but in the suite `gpu`, were set for CPUs."""
        return self.device.type == "cpu"

    def say(self, text: str = "") -> None:
        print(text, flush=True)

    def skip(self, name: str, reason: str) -> None:
        """Says why a candidate is left out, once."""
        if (name, reason) not in self._skipped:
            self._skipped.add((name, reason))
            self.say(f"  skipped: {name}: {reason}")

    def case(self, shape: Shape) -> Case:
        """Fresh weights and tokens, the same in every run."""
        torch.manual_seed(0)
        return Case.of(shape, moe_layer(shape, "loop", self.device), self.device)

    def sparse_layers(self, case: Case, peers: Sequence[str]) -> list[Layer]:
        """Ours in every backend, and those of `peers` that are there."""
        mine = our_layers(case, self.backends, self.skip)
        return [*mine, *peer_layers(case, peers, self.skip)]

    def layers(self, case: Case, peers: Sequence[str]) -> list[Layer]:
        """The dense block first, then the sparse ones."""
        return [dense_layer(case.shape, self.device), *self.sparse_layers(case, peers)]

    def time(self, candidates: Mapping[str, Timed], *, more: int = 1) -> dict[str, Timing]:
        """In turns; `more` times as many rounds where a ratio has to be known more exactly."""
        rounds = replace(self.rounds, timed=more * self.rounds.timed)
        timings = interleave(candidates, rounds, clock_for(self.device))
        done = min((len(timing.seconds) for timing in timings.values()), default=rounds.timed)
        if done < rounds.timed:
            self.say(f"  {done} rounds instead of {rounds.timed}, which would take long")
        noise = statistics.median(timing.noise for timing in timings.values()) if timings else 0
        if noise > NOISY:
            self.say(
                f"  noisy: the quartiles lie {noise:.0%} of the median apart; is this machine busy?"
            )
        return timings

    def promise(self, promise: Promise) -> None:
        """Kept for the summary, and shown under the table it comes from."""
        self.promises.append(promise)
        goal = "" if promise.goal is None else f", goal {promise.goal:g}"
        self.say(
            f"  {promise.verdict:7} {promise.claim}: {promise.shown_figure}, "
            f"promised {promise.shown_limit}{goal}"
        )

    def promise_ratio(
        self,
        suite: str,
        case: str,
        claim: str,
        limit: float,
        timings: Mapping[str, Timing],
        pair: tuple[str, str],
        *,
        at_most: bool = True,
        goal: float | None = None,
    ) -> None:
        """A promise of one median over another, once `keep` was told what both compute."""
        if self.limits_apply:
            figure, why = self.comparison(timings, pair)
            self.promise(Promise(suite, case, claim, limit, figure, at_most, goal, why))

    def comparison(
        self, timings: Mapping[str, Timing], pair: tuple[str, str]
    ) -> tuple[float | None, str]:
        """One median over another; None and the reason where one is missing or computes something else."""
        for name in pair:
            if name not in timings:
                return None, f"no '{name}' here"
            if (computes := self._computes.get(name, SAME)) not in (SAME, REFERENCE):
                return None, f"{name} {computes}"
        return ratio(timings, *pair), ""

    def keep(
        self,
        suite: str,
        case: str,
        shape: Shape,
        layers: Sequence[Layer],
        timings: Mapping[str, Timing],
        *,
        to: str = DENSE,
        label: str = "",
    ) -> None:
        """Rows of the CSV; `label` is what follows a layer's name in the names of the timings."""
        for layer in layers:
            timing = timings[layer.name + label]
            self._computes[layer.name + label] = layer.computes
            lower, upper = timing.quartiles
            self.rows.append(
                Row(
                    suite=suite,
                    case=case,
                    candidate=layer.name,
                    version=version_of(layer.name),
                    computes=layer.computes,
                    unit="s",
                    median=timing.median,
                    lower_quartile=lower,
                    upper_quartile=upper,
                    rounds=len(timing.seconds),
                    ratio=ratio(timings, layer.name + label, to + label),
                    ratio_to=to,
                    num_tokens=shape.num_tokens,
                    d_model=shape.d_model,
                    d_ff=shape.d_ff,
                    num_experts=shape.num_experts,
                    k=shape.k,
                    dtype=shape.dtype,
                )
            )

    def show(
        self, layers: Sequence[Layer], timings: Mapping[str, Timing], against: Sequence[str]
    ) -> None:
        """A table of one case, with a column of ratios for each name in `against` that was timed."""
        columns = [name for name in against if name in timings]
        rows = [
            [
                layer.name,
                duration(timings[layer.name].median),
                spread(timings[layer.name]),
                *(times(ratio(timings, layer.name, to)) for to in columns),
                layer.computes,
            ]
            for layer in layers
        ]
        headers = ["layer", "median", "quartiles", *(f"/ {name}" for name in columns), "computes"]
        self.say(table(headers, rows))


def version_of(candidate: str) -> str:
    if candidate in PEERS:
        return PEERS[candidate].version
    plain = candidate == DENSE or candidate.startswith("plain ")
    return torch.__version__ if plain else moe_ffn.__version__
