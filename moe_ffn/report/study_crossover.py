"""Losses over the FLOPs of all training, for runs that begin with a trained model, and where arms cross."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from statistics import fmean

from moe_ffn.report.arm_sizes import SizedLine, over_sizes
from moe_ffn.report.html import NONE, compact
from moe_ffn.report.markdown import markdown_table, with_interval
from moe_ffn.report.study_fits import Image
from moe_ffn.studies.comparison import Arm
from moe_ffn.studies.config import StudyConfig
from moe_ffn.studies.crossover import Point, crossover, gaps, loss_by_flops
from moe_ffn.studies.statistics import mean_interval

Lines = Mapping[str, Sequence[Point]]
"""Arm, up to the first comma of its name -> its points."""


def loss_by_all_flops(image: Image, study: StudyConfig, arms: Sequence[Arm]) -> str:
    """Return the section; empty where the study does not give `initial_flops`."""
    if study.initial_flops is None:
        return ""
    runs = [run for arm in arms for run in arm.results]
    lines = loss_by_flops(runs, study.initial_flops)
    seeds = [
        loss_by_flops([run for run in runs if run.seed == seed], study.initial_flops)
        for seed in dict.fromkeys(run.seed for run in runs)
    ]
    drawn = [
        SizedLine(name, {point.flops: point.losses for point in points})
        for name, points in lines.items()
    ]
    title = "Final loss over the FLOPs of all training"
    losses = [
        [name, compact(point.flops), f"{point.loss:.4f}"]
        for name, points in lines.items()
        for point in points
    ]
    crossings = [
        _crossing(lines, seeds, one, other)
        for one, other in itertools.combinations(lines, 2)
        if gaps(lines[one], lines[other])
    ]
    head = "arm|beside|at or below it from|by seeds alone|difference at the fewest|and at the most FLOPs"
    parts = [
        f"The model that runs began with (`init_from`) had taken {compact(study.initial_flops)} FLOPs; "
        "here they are counted. Above, each run's own training is compared alone.",
        image("all-flops", over_sizes(drawn, "FLOPs of all training", title=title), title),
        markdown_table(["arm", "FLOPs of all training", "loss"], losses),
        markdown_table(head.split("|"), crossings, num_texts=2),
        "Between points the loss is a line in log FLOPs. Differences: of the loss, at the fewest and at the "
        "most FLOPs that both arms have, paired by seed, with the 95 % interval (Student's t); beyond those "
        "nothing was measured. All seeds began with one model, so that the scatter is that of the second "
        "training alone.",
    ]
    return "\n\n".join(filter(None, parts))


def _crossing(lines: Lines, seeds: Sequence[Lines], one: str, other: str) -> list[str]:
    """Return the row of two arms; the first is the one that is lower at the most FLOPs that both have."""
    if gaps(lines[one], lines[other])[-1][1] > 0:
        one, other = other, one
    found = crossover(lines[one], lines[other])
    pairs = [
        (seed[one], seed[other])
        for seed in seeds
        if all(_places(seed.get(arm, ())) == _places(lines[arm]) for arm in (one, other))
    ]
    by_seed = sorted(x for pair in pairs if (x := crossover(*pair)) is not None)
    ends = " to ".join(dict.fromkeys(map(compact, (by_seed[0], by_seed[-1])))) if by_seed else NONE
    return [
        other,
        one,
        NONE if found is None else compact(found),
        f"{ends} ({len(by_seed)} of {len(pairs)} seeds)",
        *(_difference(pairs, end) for end in (0, -1)),
    ]


def _places(points: Sequence[Point]) -> list[float]:
    return [point.flops for point in points]


def _difference(pairs: Sequence[tuple[Sequence[Point], Sequence[Point]]], end: int) -> str:
    if not pairs:
        return NONE
    ends = [gaps(*pair)[end] for pair in pairs]
    values = [gap for _, gap in ends]
    cell = with_interval(mean_interval(values), "{:+.4f}".format, fmean(values))
    return f"{cell} at {compact(ends[0][0])}"
