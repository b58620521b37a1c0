"""Find the feed-forward block that suits a corpus, within a given time.

    moe-ffn which --data my_corpus/ --minutes 60
    moe-ffn which --resume runs/which

Two dense blocks and four mixtures of experts with equal FLOPs per token are trained on the text in three
rounds. After each round the better half stays; the last round compares the best dense block with the best
mixture over five seeds. The answer names the block to use, its gain with an interval, its cost, and a config
for moe-ffn train. It is printed and written to which.html in the folder of the runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from moe_ffn.cli.parser import Parser, whole, write_output
from moe_ffn.cli.sweep import share_plotly, use_threads_of_a_run
from moe_ffn.config.errors import ConfigError, command
from moe_ffn.config.yaml_files import read_yaml, to_yaml, validate
from moe_ffn.files import make_folder, write_whole
from moe_ffn.report.comparison_tables import print_comparison
from moe_ffn.runs.config import not_a_folder_name
from moe_ffn.runs.folder import CONFIG_FILE, explaining
from moe_ffn.studies.statistics import t_quantile
from moe_ffn.studies.sweep import in_words
from moe_ffn.studies.which import PAGE_FILE, QUESTION_FILE, ROUNDS, Answer, Question, Search
from moe_ffn.training.monitoring.hardware import num_cores


def main(argv: Sequence[str]) -> int:
    flags = _parser().parse_args(argv or ["--help"])
    t_quantile(0.975, 4)  # raises now, not after an hour, if scipy is missing
    say = partial(print, flush=True)
    folder, question = _begin(flags)
    if question is None:
        use_threads_of_a_run(flags.jobs)
        say("timing candidates to choose their width")
        question = Question.measured(flags.data, flags.minutes, flags.jobs, say)
        with explaining(f"'{folder}' cannot be written", "choose another --name"):
            make_folder(folder)
            write_whole(folder / QUESTION_FILE, to_yaml(question))
    runs = sum(each.num_runs for each in ROUNDS)
    say(
        f"{runs} runs of width {question.width} in {folder}/, {question.jobs} at a time, about "
        f"{in_words(60 * question.minutes)}; Ctrl-C stops them, {command('which')} --resume {folder} goes on"
    )
    share_plotly(folder)
    found = Search(question, folder, say).run()
    show(found)
    return 0


def _parser() -> Parser:
    name = command("which")
    parser = Parser(
        prog=name,
        usage=f"{name} --data PATH ... --minutes M [--name NAME] [--jobs N]\n       {name} --resume FOLDER",
        description=__doc__,
    )
    parser.add_argument("--data", nargs="+", metavar="PATH", help="text files, folders or globs")
    parser.add_argument(
        "--minutes", type=whole(1, 100_000), metavar="M", help="time for all runs, on this machine"
    )
    parser.add_argument(
        "--name", default="which", help="folder of the runs in runs/ (default: which)"
    )
    parser.add_argument(
        "--jobs",
        type=whole(1, 1000),
        default=1 if torch.cuda.is_available() else num_cores(),
        metavar="N",
        help="number of runs to train at a time (default: one for each core, or one with a GPU)",
    )
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="resume a search")
    return parser


def _begin(flags: Any) -> tuple[Path, Question | None]:
    """Return the folder of the runs, and the question if there is one to resume.

    Raises:
        ConfigError: the flags do not fit together, or the folder is taken.
    """
    if flags.resume is not None:
        if flags.data or flags.minutes:
            raise ConfigError("--resume: gives the text and the time; remove --data and --minutes")
        if not (flags.resume / QUESTION_FILE).is_file():
            raise ConfigError(
                f"--resume: '{flags.resume}' has no {QUESTION_FILE}; give the folder of a search, such as "
                "runs/which"
            )
        where = f"'{flags.resume / QUESTION_FILE}'"
        options = read_yaml(flags.resume / QUESTION_FILE, where)
        return flags.resume, validate(Question, options, where)
    for flag in ("data", "minutes"):
        if not getattr(flags, flag):
            raise ConfigError(
                f"--{flag}: required; {command('which')} --data my_corpus/ --minutes 60"
            )
    if problem := not_a_folder_name(flags.name):
        raise ConfigError(f"--name: {problem}")
    folder = Path("runs", flags.name)
    if folder.exists():
        raise ConfigError(
            f"--name: '{folder}' exists; resume it with --resume {folder}, or choose another name"
        )
    return folder, None


def show(found: Answer) -> None:
    """Print the answer and write its page."""
    from moe_ffn.report.comparison_page import comparison_html  # plotly, which only the page needs

    page = found.folder / PAGE_FILE
    write_output("--name", page, comparison_html(found.gathered, found.comparison, page))
    print()
    print_comparison(Console(), found.comparison)
    print(f"\npage: {page}\ntrain it: {command('train')} --config {found.folder / CONFIG_FILE}")
