"""Write the page of a study, its figures, and its row in the table of all studies.

    moe-ffn study_page gating.yaml --runs runs/gating
    moe-ffn study_page studies/*.yaml
    moe-ffn study_page --leaderboard leaderboard.md

The result of each run becomes a line of docs/studies/NAME/results.jsonl. The page, docs/studies/NAME.md, is
made from this table and the study's file, so it can be rewritten without the runs. All figures are in
docs/studies/NAME/figures.html. The table of studies, docs/studies/README.md, gets a row. --output replaces
docs/studies by another folder. --leaderboard writes a page that ranks the arms of all studies in that folder,
with a table for each training budget.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from moe_ffn.cli.parser import Parser
from moe_ffn.config.errors import ConfigError, command, explaining, printable, show
from moe_ffn.config.files import write_atomically
from moe_ffn.config.option_tree import flatten
from moe_ffn.report.studies.leaderboard import leaderboard
from moe_ffn.report.studies.study_page import study_page
from moe_ffn.studies.config import StudyConfig
from moe_ffn.studies.differences import differing
from moe_ffn.studies.gather import Gathered, gather, write_portable_study

log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog=command("study_page"), description=__doc__)
    parser.add("studies STUDY", "file of a study", type=Path, nargs="*")
    meaning = "first add the results of the finished runs in this folder to the table"
    parser.add("--runs FOLDER", meaning)
    meaning = "folder of the pages (default: docs/studies)"
    parser.add("--output FOLDER", meaning, default="docs/studies")
    meaning = "also write a page that ranks the arms of all studies in the folder of the pages"
    parser.add("--leaderboard FILE", meaning)
    args = parser.parse_args(argv)
    if not args.studies and args.leaderboard is None:
        raise ConfigError("give the file of a study, or --leaderboard FILE")
    if args.runs is not None and len(args.studies) != 1:
        raise ConfigError(f"--runs: needs exactly one study, got {len(args.studies)}; give one")
    for file in args.studies:
        study = StudyConfig.read(file)
        folder = args.output / study.name
        if args.runs is not None:
            add_study(args.runs, study, file, folder)
        if not folder.is_dir():
            raise ConfigError(
                f"'{folder}' does not exist: there are no results of '{study.name}' yet; train its runs, "
                f"{command('sweep', '--config', file)}, and give --runs runs/{study.name}"
            )
        gathered = gather([folder])
        require_planned(study, file, gathered)
        # Other people read the page, so it must not contain the path of this clone.
        here, path = Path.cwd().resolve(), file.resolve()
        shown = path.relative_to(here) if path.is_relative_to(here) else file
        page = study_page(study, gathered.results, gathered.step_seconds, shown.as_posix())
        overrides = gathered.study.overrides if gathered.study else {}
        with explaining(f"'{folder}' cannot be written", "choose another folder"):
            write_portable_study(study.model_copy(update={"overrides": overrides}), folder)
        for path in page.write(args.output):
            print(f"written: {path}")
    if args.leaderboard is not None:
        write_leaderboard(args.output, args.leaderboard)
    return 0


def write_leaderboard(studies: Path, page: Path) -> None:
    """Write the leaderboard of the studies in a folder, with links; ConfigError if it cannot be written."""
    link = os.path.relpath(studies, page.parent).replace(os.sep, "/")
    text = leaderboard(studies, link)
    with explaining(f"'{page}' cannot be written", "choose another file"):
        write_atomically(page, text)
    print(f"written: {page}")


def require_planned(study: StudyConfig, file: Path, gathered: Gathered) -> None:
    """Raise a ConfigError if a result has other options than the study plans.

    Overrides of the sweep's command line, stored in the study next to the results, count as planned. An
    option that a result lacks was added in a later version, and is ignored.
    """
    seeds = dict.fromkeys([*study.seeds, *(result.seed for result in gathered.results)])
    overrides = gathered.study.overrides if gathered.study else {}
    runs = study.model_copy(update={"seeds": [*seeds], "overrides": overrides}).planned_runs()
    planned = {(run.arm, run.seed): run.config.to_dict() for run in runs}
    for result in gathered.results:
        now = planned.get((result.arm, result.seed), result.config)
        for path, old, new in differing(result.config, now):
            if old is not None or path in flatten(result.config):
                raise ConfigError(
                    f"'{file}' plans {path}: {show(new)}, but the result of {result.name} has "
                    f"{show(old)}; train it again, or restore the file or its base"
                )


def add_study(runs: Path, study: StudyConfig, file: Path, folder: Path) -> None:
    """Add the results of the finished runs of a study to the table in `folder`, replacing older ones.

    Raises:
        ConfigError: no run belongs to the study, or a run has other options than planned; nothing is written.
    """
    gathered = gather([runs])
    arms = study.arm_names
    results = [result for result in gathered.results if result.main_arm in arms]
    others = [result.name for result in gathered.results if result.main_arm not in arms]
    if not results:
        raise ConfigError(
            f"--runs: '{runs}' holds no run of '{file}': {others[0]} belongs to none of its arms, "
            f"{', '.join(arms)}; give the folder of its runs"
        )
    ours = replace(gathered, results=results)
    require_planned(study, file, ours)
    not_of_study = [f"{name} belongs to no arm of '{file}'" for name in others]
    for why in (*gathered.left_out.values(), *not_of_study):
        log.warning("left out: %s", printable(why))
    ours.write(folder)
