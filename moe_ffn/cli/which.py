"""Find the feed-forward block that suits a corpus, within a given time.

    moe-ffn which --data my_texts/ --minutes 60
    moe-ffn which --resume runs/which

Two dense blocks and four mixtures of experts with equal FLOPs per token are trained on the text in three
rounds. The first round keeps the best dense block and the two best mixtures, the second the best of each; the
last one compares these over five seeds. The answer names the block to use, its gain with an interval, its
cost, and a config for moe-ffn train. It is printed and written to which.html in the folder of the runs.
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
from moe_ffn.config.errors import ConfigError, command, explaining
from moe_ffn.config.files import make_folder, write_atomically
from moe_ffn.config.numbers import format_duration
from moe_ffn.config.yaml_files import read_yaml, to_yaml, validate
from moe_ffn.data.corpus import read_text_documents
from moe_ffn.report.studies.comparison_tables import print_comparison
from moe_ffn.runs.config import folder_name_problem
from moe_ffn.runs.folder import CONFIG_FILE
from moe_ffn.studies.which import PAGE_FILE, QUESTION_FILE, ROUNDS, Answer, Question, Search
from moe_ffn.training.monitoring.hardware import num_cores


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv or ["--help"])
    say = partial(print, flush=True)
    folder, question = _begin(args)
    if question is None:
        for _ in read_text_documents(args.data, "--data"):
            pass  # its messages name the flag
        jobs = args.jobs or (1 if torch.cuda.is_available() else num_cores())
        use_threads_of_a_run(jobs)
        say("timing the candidates to choose their width")
        question = Question.measured(args.data, args.minutes, jobs, say, args.seed or 0)
        with explaining(f"'{folder}' cannot be written", "choose another --name"):
            make_folder(folder)
            write_atomically(folder / QUESTION_FILE, to_yaml(question))
    num_runs = sum(each.num_runs for each in ROUNDS)
    duration = format_duration(60 * question.minutes)
    say(
        f"{num_runs} runs of width {question.width} in {folder}/, {question.jobs} at a time, about "
        f"{duration}; Ctrl-C stops them; to resume: {command('which', '--resume', folder)}"
    )
    share_plotly(folder)
    print_answer(Search(question, folder, say).run())
    return 0


def _parser() -> Parser:
    name = command("which")
    parser = Parser(
        prog=name,
        usage=f"{name} --data PATH ... --minutes M [--name NAME] [--jobs N] [--seed N]\n"
        f"       {name} --resume FOLDER",
        description=__doc__,
    )
    parser.add("--data PATH", "text files, folders or globs", nargs="+")
    meaning = "time for all runs on this machine"
    parser.add("--minutes M", meaning, type=whole(1, 100_000))
    parser.add("--name NAME", "folder of the runs in runs/ (default: which)")
    parser.add(
        "--jobs N",
        "number of runs to train at once (default: one per core, or one with a GPU)",
        type=whole(1, 1000),
    )
    meaning = "seed of the first run (default: 0); the others of a search are N+1 to N+6"
    parser.add("--seed N", meaning, type=whole(0, 1_000_000))
    parser.add("--resume FOLDER", "resume a search")
    return parser


def _begin(args: Any) -> tuple[Path, Question | None]:
    """Return the folder of the runs, and the question to resume; ConfigError for a mistake in the flags."""
    if args.resume is not None:
        if args.data or args.minutes or args.seed is not None:
            raise ConfigError(
                "--resume: the search has its text, time and seed; remove --data, --minutes and --seed"
            )
        for flag in ("name", "jobs"):
            if getattr(args, flag) is not None:
                raise ConfigError(f"--{flag}: is that of the resumed search; remove it")
        file = args.resume / QUESTION_FILE
        if not file.is_file():
            raise ConfigError(
                f"--resume: '{args.resume}' has no {QUESTION_FILE}; give the folder of a search, such as "
                "runs/which"
            )
        return args.resume, validate(Question, read_yaml(file, f"'{file}'"), f"'{file}'")
    for flag in ("data", "minutes"):
        if not getattr(args, flag):
            raise ConfigError(
                f"--{flag}: is required: {command('which')} --data my_texts/ --minutes 60"
            )
    name = "which" if args.name is None else args.name
    if problem := folder_name_problem(name):
        raise ConfigError(f"--name: {problem}")
    folder = Path("runs", name)
    if folder.exists():
        raise ConfigError(
            f"--name: '{folder}' exists; resume it with --resume {folder}, or choose another name"
        )
    return folder, None


def print_answer(answer: Answer) -> None:
    """Print the answer and write its page."""
    # Imported here, since only the page needs plotly.
    from moe_ffn.report.studies.comparison_page import comparison_html

    page = answer.folder / PAGE_FILE
    print()
    print_comparison(Console(), answer.comparison)
    html = comparison_html(answer.gathered, answer.comparison, page)
    write_output("--name", page, html, label="\npage")
    print(f"train it: {command('train', '--config', answer.folder / CONFIG_FILE)}")
