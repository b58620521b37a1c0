"""Train the runs of a study: a grid over any options, arms that differ in several, and seeds.

    moe-ffn sweep --config study.yaml
    moe-ffn sweep dense.yaml moe.yaml --name first --seeds 0 1 2

A study is a YAML file with `arms` (name: options of moe-ffn train by dotted path), a `grid` (option: values),
or both:

    arms: {dense: {model.ffn: dense}, moe: {model.ffn: moe}}
    grid: {optimizer.learning_rate: [0.001, 0.003]}
    seeds: [0, 1, 2]

Other options of moe-ffn train apply to all runs. The runs are in runs/NAME/. If you repeat the command, it
skips finished runs, resumes interrupted runs and retries failed runs. An unfinished run with other options is
moved to runs/NAME/unfinished/.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moe_ffn.cli.command_line import overrides_of
from moe_ffn.cli.parser import Parser, whole
from moe_ffn.config.errors import ConfigError, command, did_you_mean, explaining, printable, show
from moe_ffn.config.files import write_atomically
from moe_ffn.config.numbers import counted, si_format
from moe_ffn.config.trust import accepting_code
from moe_ffn.config.yaml_files import read_yaml, validate
from moe_ffn.report.tables import plain_table
from moe_ffn.runs import folder as run_folder
from moe_ffn.runs.budget import Budget, Cost
from moe_ffn.runs.config import TrainConfig
from moe_ffn.studies.config import PlannedRun, StudyConfig
from moe_ffn.studies.gather import TIMING_FILE
from moe_ffn.studies.sweep import Job, Sweep, threads_of_a_run, write_study
from moe_ffn.studies.timing import time_arms, timing_file

log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    parser = _parser()
    flags, rest = parser.parse_known_args(argv or ["--help"])
    # As argparse positionals, the files would swallow the value of an option that argparse does not know.
    files = [Path(argument) for argument in takewhile(lambda text: not text.startswith("-"), rest)]
    study = read_study(flags, files, overrides_of(rest[len(files) :], TrainConfig, parser))
    runs = select_runs(study.planned_runs(), flags.seeds, flags.only)
    for corpus in {repr(c): c for c in (run.config.data.corpus for run in runs)}.values():
        corpus.require_files()  # once, before any run starts
    with accepting_code(flags.trust_code):
        sweep = Sweep(runs, flags.jobs, flags.trust_code)
        if flags.dry_run:
            print_plan(sweep)
            return 0
        write_study(study, runs[0].folder.parent)
        if flags.time:
            use_threads_of_a_run(sweep.num_at_once)
            return time_study(study, runs)
        share_plotly(runs[0].folder.parent)
        is_named = flags.config is not None or flags.name is not None
        return train_sweep(sweep, "" if is_named else f" with --name {study.name}")


def _parser() -> Parser:
    name = command("sweep")
    parser = Parser(
        prog=name,
        usage=f"{name} --config STUDY [--SECTION.OPTION VALUE ...]\n"
        f"       {name} FILE ... [--name NAME] [--seeds N ...] [--SECTION.OPTION VALUE ...]",
        description=__doc__,
    )
    parser.add("--config STUDY", "YAML file of the study, as above", type=Path)
    meaning = (
        "folder of the runs in run.output_dir (default: name of the study's file, or the time)"
    )
    parser.add("--name NAME", meaning)
    parser.add(
        "--seeds N",
        "run each arm only with these seeds, and without tuning runs",
        nargs="+",
        type=whole(most=2**63 - 1),
    )
    parser.add("--only RUN", "train only these runs, ARM-seedN", nargs="+")
    meaning = "number of runs to train at once (default: 1)"
    parser.add("--jobs N", meaning, type=whole(1, 1000), default=1)
    parser.add("--dry-run", "print every run with its budget; train nothing")
    parser.add(
        "--time",
        "do not train; time the steps of all arms in alternation, with as many threads as a run has",
    )
    parser.add_trust()
    return parser


def select_runs(
    runs: Sequence[PlannedRun], seeds: Sequence[int] | None, names: Sequence[str] | None
) -> list[PlannedRun]:
    """Return the runs with these seeds (no tuning runs) and names; ConfigError for an unknown name."""
    if seeds is not None:
        runs = [run for run in runs if run.seed in seeds and not run.tuning]
    by_name = {run.name: run for run in runs}
    for name in names or ():
        if name not in by_name:
            of_arm = [run.name for run in runs if run.arm == name]
            hint = f"; the runs of that arm are {', '.join(of_arm)}" if of_arm else ""
            hint = hint or did_you_mean(name, by_name) or "; --dry-run lists the runs"
            raise ConfigError(f"--only: there is no run {show(name)}{hint}")
    return [run for run in runs if names is None or run.name in names]


def read_study(flags: Any, files: Sequence[Path], overrides: dict[str, Any]) -> StudyConfig:
    """Return the study of a command line; ConfigError if there is none, or it has a mistake."""
    if bool(files) == bool(flags.config):
        raise ConfigError(
            f"give one study, {command('sweep')} --config study.yaml, or the config files of its arms, "
            f"{command('sweep')} dense.yaml moe.yaml; --help shows a study"
        )
    from_flags = {} if flags.name is None else {"name": flags.name}
    seeds: list[int] = flags.seeds or []
    if len({*seeds}) < len(seeds):
        raise ConfigError(f"--seeds: {statistics.mode(seeds)} is given twice")
    if flags.config:
        study = StudyConfig.read(flags.config, from_flags, overrides)
        # The seeds of the file are kept, so that the study in the folder lists all seeds.
        return study.model_copy(update={"seeds": [*dict.fromkeys([*study.seeds, *seeds])]})
    if seeds:
        from_flags["seeds"] = seeds
    arms: dict[str, Any] = {}
    for file in files:
        if file.stem in arms:
            raise ConfigError(
                f"two config files are called '{file.stem}'; an arm is named after its file; rename one"
            )
        arms[file.stem] = options = read_yaml(file, where=f"'{file}'")
        if {"arms", "grid"} & {*options}:
            raise ConfigError(f"'{file}' is a study; give it as --config {file}")
    options = {"name": f"sweep-{datetime.now():%Y%m%d-%H%M%S}", "arms": arms, **from_flags}
    return validate(StudyConfig, options | {"overrides": overrides})


# -- the plan

_LEGEND = (
    "active: parameters that one token uses; FLOPs: forward, for one token; train FLOPs: three times that, "
    "for all tokens"
)


def print_plan(sweep: Sweep) -> None:
    """Print every run with its budget, and how close matched widths come to their target."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), collapse_padding=True)
    costs = [
        f"{part}\n{cost}" for part in ("model", "FFNs") for cost in ("params", "active", "FLOPs")
    ]
    for name in ("", "run", "state", *costs, "train\ntokens", "train\nFLOPs"):
        justify = "left" if name in ("run", "state") else "right"
        table.add_column(name, justify=justify, no_wrap=name != "run", overflow="fold")
    notes: dict[str, None] = {}
    for index, job in enumerate(sweep.jobs):
        config, budget = job.run.config, Budget.of(job.run.config)
        notes |= {f"{job.run.arm}: {note}": None for note in config.notes()}
        cells = [str(index), job.name, _state(job), *_cells(budget.model), *_cells(budget.ffn)]
        cells += [si_format(budget.tokens), si_format(budget.training_flops)]
        table.add_row(*map(Text, cells))
    console = Console(highlight=False)
    console.print(table)
    for line in (_LEGEND, *notes):
        console.print(Text(line, style="dim"))
    total = sum(job.flops for job in sweep.jobs)
    num_done = len(sweep.jobs_in("finished"))
    console.print(
        f"{counted(len(sweep.jobs), 'run')}, {num_done} of them done; {si_format(total)} FLOPs of training "
        "in all"
    )


def _cells(cost: Cost) -> list[str]:
    return [*map(si_format, (cost.params, cost.active_params, cost.flops_per_token))]


def _state(job: Job) -> str:
    if job.state != "waiting":
        return "done" if job.state == "finished" else job.state
    return "begun" if run_folder.is_run(job.run.folder) else ""


# -- time


def use_threads_of_a_run(num_at_once: int) -> None:
    """Use as many threads here as a run of such a sweep has, so that step times are comparable."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_of_a_run(num_at_once))


def time_study(study: StudyConfig, runs: Sequence[PlannedRun]) -> int:
    """Time the training step of each arm and write `timing.json`, which comparisons read."""
    times = time_arms(runs, on_round=log.info)
    if not times:
        raise ConfigError("--time: tuning runs are not timed; select other runs")
    baseline = times.get(study.baseline or "") or next(iter(times.values()))
    table = plain_table(["arm", "ms/step", "quartiles", "tokens/s", "speed"])
    for arm, timing in times.items():
        speed = timing.tokens_per_second
        ratio = speed / baseline.tokens_per_second
        low, high = (f"{seconds * 1000:,.1f}" for seconds in timing.quartiles)
        cells = [f"{timing.seconds_per_step * 1000:,.1f}", f"{low} to {high}"]
        cells += [f"{speed:,.0f}", f"{ratio:.2f}"]
        table.add_row(*map(Text, [arm, *cells]))
    console = Console(highlight=False)
    console.print(table)
    name = next(arm for arm, timing in times.items() if timing is baseline)
    path = runs[0].folder.parent / TIMING_FILE
    with explaining(f"'{path}' cannot be written"):
        write_atomically(path, json.dumps(timing_file(times), indent=2) + "\n")
    legend = f"ms/step: median and quartiles of the rounds; speed: tokens/s relative to '{name}'"
    console.print(Text(f"{legend}; written: {path}"))
    return 0


# -- training


def share_plotly(folder: Path) -> None:
    """Write plotly's script next to the runs, so that the pages need not contain it."""
    from moe_ffn.report.plots import share_script

    with explaining(f"'{folder}' cannot be written"):
        share_script(folder)


def train_sweep(sweep: Sweep, more_flags: str) -> int:
    """Train the unfinished runs; return the exit code. `more_flags` are for the command that resumes."""
    folder = sweep.jobs[0].run.folder.parent
    num_done = len(sweep.jobs_in("finished"))
    print(f"{counted(len(sweep.jobs), 'run')} in {folder}/, {num_done} of them done", flush=True)
    try:
        sweep.run(partial(print, flush=True))
    except BaseException:
        num_done = len([job for job in sweep.jobs if run_folder.is_finished(job.run.folder)])
        print(
            f"{num_done} of {len(sweep.jobs)} runs are done; the same command{more_flags} resumes the rest"
        )
        raise
    failed = sweep.jobs_in("failed")
    for job in failed:
        log.warning("%s: %s", job.name, printable(job.problem))
    if len(failed) < len(sweep.jobs):
        print(f"\ncompare them: {command('compare', folder)}")
    return 1 if failed else 0
