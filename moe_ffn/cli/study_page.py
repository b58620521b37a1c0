"""Write the page of a study, its figures, and its row in the table of all studies.

    moe-ffn study_page gating.yaml --runs runs/gating
    moe-ffn study_page studies/*.yaml
    moe-ffn study_page --leaderboard leaderboard.md

The result of each run becomes a line of docs/studies/NAME/results.jsonl. The page, docs/studies/NAME.md, is
made from this table and the study's file, so that it can be made again without the runs. All figures are in
docs/studies/NAME/figures.html. The table of studies, docs/studies/README.md, gets a row. --output sets
another folder than docs/studies. --leaderboard writes one page on the arms of all studies in that folder,
with a table for each training budget.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from moe_ffn.cli.parser import Parser
from moe_ffn.config.errors import ConfigError, command, printable, show
from moe_ffn.config.option_tree import flatten
from moe_ffn.files import write_whole
from moe_ffn.report.leaderboard import leaderboard
from moe_ffn.report.study_page import study_page
from moe_ffn.runs.folder import explaining
from moe_ffn.studies.config import StudyConfig
from moe_ffn.studies.differences import differing
from moe_ffn.studies.gather import Gathered, gather

log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog=command("study_page"), description=__doc__)
    parser.add_argument("studies", type=Path, nargs="*", metavar="STUDY", help="file of a study")
    parser.add_argument(
        "--runs",
        type=Path,
        metavar="FOLDER",
        help="first add the results of the finished runs in this folder to the table",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("docs/studies"),
        metavar="FOLDER",
        help="folder of the pages (default: docs/studies)",
    )
    parser.add_argument(
        "--leaderboard",
        type=Path,
        metavar="FILE",
        help="then write the page that ranks the arms of all studies in the folder of the pages",
    )
    options = parser.parse_args(argv)
    if not options.studies and options.leaderboard is None:
        parser.error("give the file of a study, or --leaderboard FILE")
    if options.runs is not None and len(options.studies) > 1:
        raise ConfigError("--runs: needs exactly one study, got several; give one")
    for file in options.studies:
        study = StudyConfig.read(file)
        folder = options.output / study.name
        if options.runs is not None:
            keep(options.runs, study, file, folder)
        if not folder.is_dir():
            raise ConfigError(
                f"'{folder}' does not exist: there are no results of '{study.name}' yet; train its runs, "
                f"{command('sweep')} --config {file}, and give --runs runs/{study.name}"
            )
        found = gather([folder])
        require_planned(study, file, found)
        # Other people read the page, so it must not contain the path of this clone.
        here, path = Path.cwd().resolve(), file.resolve()
        seen = path.relative_to(here) if path.is_relative_to(here) else file
        page = study_page(study, found.results, found.step_seconds, seen.as_posix())
        for path in page.write(options.output):
            print(f"written: {path}")
    if options.leaderboard is not None:
        write_leaderboard(options.output, options.leaderboard)
    return 0


def write_leaderboard(studies: Path, page: Path) -> None:
    """Write the leaderboard of the studies in a folder, with links to their pages.

    Raises:
        ConfigError: the page cannot be written; see also `leaderboard`.
    """
    link = os.path.relpath(studies, page.parent).replace(os.sep, "/")
    text = leaderboard(studies, link)
    with explaining(f"'{page}' cannot be written", "choose another file"):
        write_whole(page, text)
    print(f"written: {page}")


def require_planned(study: StudyConfig, file: Path, found: Gathered) -> None:
    """Raise a ConfigError if the options of a result differ from those that the study plans.

    Overrides of the sweep's command line, stored in the study next to the results, count as planned. An
    option that a result lacks was added in a later version, and is ignored.
    """
    seeds = dict.fromkeys([*study.seeds, *(result.seed for result in found.results)])
    overrides = found.study.overrides if found.study else {}
    runs = study.model_copy(update={"seeds": [*seeds], "overrides": overrides}).planned_runs()
    planned = {(run.arm, run.seed): run.config.to_dict() for run in runs}
    for result in found.results:
        now = planned.get((result.arm, result.seed), result.config)
        for path, old, new in differing(result.config, now):
            if old is not None or path in flatten(result.config):
                raise ConfigError(
                    f"'{file}' plans {path}: {show(new)}, but the result of {result.name} has "
                    f"{show(old)}; train it again, or restore the file or its base"
                )


def keep(runs: Path, study: StudyConfig, file: Path, folder: Path) -> None:
    """Add the results of the finished runs of a study to the table in `folder`, replacing older ones.

    Raises:
        ConfigError: no run is of the study, or a run has other options than planned; nothing is written.
    """
    found = gather([runs])
    arms = study.arm_names
    ours = [result for result in found.results if result.main_arm in arms]
    others = [result.name for result in found.results if result.main_arm not in arms]
    if not ours:
        raise ConfigError(
            f"--runs: '{runs}' holds no run of '{file}': {others[0]} belongs to none of its arms, "
            f"{', '.join(arms)}; give the folder of its runs"
        )
    found = replace(found, results=ours)
    require_planned(study, file, found)
    left_out = [
        *found.left_out.values(),
        *(f"{name} belongs to no arm of '{file}'" for name in others),
    ]
    for why in left_out:
        log.warning("left out: %s", printable(why))
    found.write(folder)
