"""Train the runs of a study: a grid over any options, arms that differ in several, and seeds.

    moe-ffn sweep --config configs/studies/gating.yaml
    moe-ffn sweep configs/routers/*.yaml --name routers --seeds 0 1 2

Further options are those of moe-ffn train, for all runs. The runs are in runs/NAME/; given the same command
again, finished runs are not repeated, those that were interrupted are resumed and those that failed are
tried again; what an unfinished run with other options left is set aside.
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentTypeError
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from moe_ffn.cli.command_line import parse_overrides
from moe_ffn.cli.parser import Parser, whole_number
from moe_ffn.config_files import read_yaml, validate
from moe_ffn.errors import ConfigError, command, printable
from moe_ffn.runs import folder as run_folder
from moe_ffn.studies.budget import Budget, Cost
from moe_ffn.studies.config import StudyConfig
from moe_ffn.studies.sweep import Job, Sweep, in_words, write_study
from moe_ffn.trust import FLAG, HELP, accepting_code

_SECONDS_BETWEEN_POLLS = 0.2


def main(argv: Sequence[str]) -> int:
    parser = _parser()
    flags, rest = parser.parse_known_args(argv or ["--help"])
    # As a positional of argparse they would take the value of an option that is not its own.
    files = [Path(word) for word in takewhile(lambda word: not word.startswith("-"), rest)]
    study = read_study(flags, files, parse_overrides(rest[len(files) :]))
    runs = study.planned_runs()
    with accepting_code(flags.trust_code):
        sweep = Sweep(runs, flags.jobs, flags.trust_code)
        if flags.dry_run:
            print_plan(sweep)
            return 0
        write_study(study, runs[0].folder.parent)
        return train(sweep)


def _parser() -> Parser:
    name = command("sweep")
    parser = Parser(
        prog=name,
        usage=f"{name} --config STUDY [--SECTION.OPTION VALUE ...]\n"
        f"       {name} FILE ... [--name NAME] [--seeds N ...] [--SECTION.OPTION VALUE ...]",
        description=__doc__,
    )
    parser.add_argument(
        "--config", type=Path, metavar="STUDY", help="the study, a YAML file as in configs/studies"
    )
    parser.add_argument(
        "--name",
        help="folder of the runs in run.output_dir; by default the stem of the study's file",
    )
    parser.add_argument(
        "--seeds", nargs="+", type=_whole, metavar="N", help="run each arm once with each of these"
    )
    parser.add_argument(
        "--jobs",
        type=partial(_whole, least=1, most=1000),
        default=1,
        metavar="N",
        help="train so many runs at a time",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print every run with its budget, and train none"
    )
    parser.add_argument(FLAG, action="store_true", help=HELP)
    return parser


def _whole(text: str, least: int = 0, most: int = 2**63 - 1) -> int:
    number = whole_number(text, least, most)
    if number is None:
        raise ArgumentTypeError(f"must be a whole number, at least {least}, got '{text}'")
    return number


def read_study(flags: Any, files: Sequence[Path], overrides: dict[str, Any]) -> StudyConfig:
    """The study that a command line asks for.

    Raises:
        ConfigError: there is none, or it is wrong.
    """
    if bool(files) == bool(flags.config):
        raise ConfigError(
            f"give one study, {command('sweep')} --config configs/studies/gating.yaml, or the config files "
            f"of its arms first: {command('sweep')} configs/routers/*.yaml"
        )
    given = {"name": flags.name, "seeds": flags.seeds}
    given = {key: value for key, value in given.items() if value is not None}
    if flags.config:
        return StudyConfig.read(flags.config, given, overrides)
    arms: dict[str, Any] = {}
    for file in files:
        if file.stem in arms:
            raise ConfigError(
                f"two config files are called '{file.stem}'; an arm is named by its file"
            )
        arms[file.stem] = options = read_yaml(file, where=f"--config {file}")
        if {"arms", "grid"} & {*options}:
            raise ConfigError(f"'{file}' is a study; give it as --config {file}")
    options = {"name": f"sweep-{datetime.now():%Y%m%d-%H%M%S}", "arms": arms, **given}
    return validate(StudyConfig, options | {"overrides": overrides})


# -- the plan


_LEGEND = (
    "active: parameters that one token passes through; FLOPs: forward, for one token; FLOPs of training: "
    "three times that, for all tokens"
)


def print_plan(sweep: Sweep) -> None:
    """Every run with its budget; how near the widths that were solved come to theirs."""
    names = ("params", "active", "FLOPs")
    columns: dict[str, list[str]] = {"": [], "run": [], " ": []}
    columns |= {f"{part}\n{name}": [] for part in ("model", "FFNs") for name in names}
    columns |= {"train\ntokens": [], "train\nFLOPs": []}
    notes: dict[str, None] = {}
    for index, job in enumerate(sweep.jobs):
        config, budget = job.run.config, Budget.of(job.run.config)
        notes |= {f"{job.run.arm}: {note}": None for note in config.notes()}
        cells = [str(index), job.name, _state(job), *_cells(budget.model), *_cells(budget.ffn)]
        cells += [short(budget.tokens), short(budget.training_flops)]
        for column, cell in zip(columns.values(), cells, strict=True):
            column.append(cell)
    if not any(columns[" "]):
        del columns[" "]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), collapse_padding=True)
    for name in columns:
        is_text = name in ("run", " ")
        justify = "left" if is_text else "right"
        table.add_column(name, justify=justify, no_wrap=name != "run", overflow="fold")
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, cells))
    console = Console(highlight=False)
    console.print(table)
    for line in (_LEGEND, *notes):
        console.print(Text(line, style="dim"))
    total = sum(job.flops for job in sweep.jobs)
    num_done = len([*sweep.of("finished")])
    console.print(
        f"{len(sweep.jobs)} runs, {num_done} of them done; {short(total)} FLOPs of training in all"
    )


def _cells(cost: Cost) -> list[str]:
    return [short(cost.params), short(cost.active_params), short(cost.flops_per_token)]


def _state(job: Job) -> str:
    if job.state != "waiting":
        return "done" if job.state == "finished" else job.state
    return "begun" if run_folder.is_run(job.run.folder) else ""


def short(number: float) -> str:
    """`1.25M`: three digits and a letter for the thousands."""
    letters = iter("kMGTPE")
    letter = ""
    while abs(number) >= 999.5:
        number, letter = number / 1000, next(letters)
    return f"{number:.3g}{letter}"


# -- training


def train(sweep: Sweep) -> int:
    """Train what is not finished; the exit code."""
    folder = sweep.jobs[0].run.folder.parent
    num_done = len([*sweep.of("finished")])
    print(f"{len(sweep.jobs)} runs in {folder}/, {num_done} of them done", flush=True)
    display = Display(sweep)
    try:
        with display:
            while not sweep.is_done:
                for line in sweep.advance():
                    display.say(line)
                if not sweep.is_done:
                    time.sleep(_SECONDS_BETWEEN_POLLS)
    except BaseException:
        sweep.stop()
        num_done = len([job for job in sweep.jobs if run_folder.is_finished(job.run.folder)])
        print(
            f"{num_done} of {len(sweep.jobs)} runs are done; the same command goes on with the rest"
        )
        raise
    failed = [*sweep.of("failed")]
    for job in failed:
        print(printable(f"{job.name}: {job.problem}"), file=sys.stderr)
    if len(failed) < len(sweep.jobs):
        print(f"\ncompare them: {command('compare')} {folder}")
    return 1 if failed else 0


class Display:
    """What is trained now, and the time left; on lines that stay in place where this is a terminal."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        console = Console(highlight=False)
        self._live = Live(
            get_renderable=self._frame,
            console=console,
            transient=True,
            auto_refresh=console.is_terminal,
        )

    def __enter__(self) -> Display:
        if self._live.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live.console.is_terminal:
            self._live.stop()

    def say(self, line: str) -> None:
        self._live.console.print(Text(printable(line)), soft_wrap=True)
        self._live.console.file.flush()

    def _frame(self) -> Group:
        sweep = self._sweep
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        table.add_column(width=20)
        table.add_column(justify="right", no_wrap=True)
        for job in sweep.of("training"):
            done = job.step / job.max_steps
            steps = f"{job.step}/{job.max_steps}"
            table.add_row(Text(job.name), ProgressBar(completed=done, total=1, width=20), steps)
        left = sweep.seconds_left
        num_done = len([*sweep.of("finished")])
        table.add_row(
            Text(f"{num_done} of {len(sweep.jobs)} runs", style="bold"),
            ProgressBar(completed=sweep.share_done, total=1, width=20),
            "" if left is None else f"{in_words(left)} left",
        )
        return Group(table)
