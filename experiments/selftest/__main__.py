"""Try what the project promises of its reliability, and count.

python -m experiments.selftest --help
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from experiments.selftest.case import Chapter, Outcome, try_case
from experiments.selftest.chapters import CHAPTERS
from moe_ffn.cli.exit import EXIT_FAILED, exit_on_bad_input
from moe_ffn.cli.parser import Parser
from moe_ffn.errors import ConfigError, did_you_mean


def main(argv: Sequence[str]) -> int:
    options = _parse(argv)
    chapters = _chosen(options.chapters)
    console = Console(soft_wrap=True)
    if options.list:
        for chapter in chapters:
            console.print(f"{chapter.name:10} {chapter.promise}", highlight=False)
        return 0
    outcomes = {chapter: _try(chapter, options.short, console) for chapter in chapters}
    console.print(_table(outcomes))
    if options.markdown:
        console.print(_markdown(outcomes), highlight=False, markup=False)
    return EXIT_FAILED if any(o.failure for found in outcomes.values() for o in found) else 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m experiments.selftest",
        description="Try what docs/reliability.md promises, on this machine, and count.",
        epilog="Exit code: 0 if every promise was kept, 1 if one was broken.",
    )
    names = ", ".join(chapter.name for chapter in CHAPTERS)
    parser.add_argument("chapters", nargs="*", metavar="CHAPTER", help=f"of {names}; all of them")
    parser.add_argument("--short", action="store_true", help="a few cases of each, in minutes")
    parser.add_argument("--list", action="store_true", help="say what is promised, and stop")
    parser.add_argument("--markdown", action="store_true", help="the table for docs/reliability.md")
    return parser.parse_args(argv)


def _chosen(names: Sequence[str]) -> list[Chapter]:
    known = {chapter.name: chapter for chapter in CHAPTERS}
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(f"no chapter '{name}'{hint}; known: {', '.join(known)}")
    return [chapter for chapter in CHAPTERS if not names or chapter.name in names]


def _try(chapter: Chapter, short: bool, console: Console) -> list[Outcome]:
    cases = [case for case in chapter.cases() if case.short or not short]
    console.print(f"\n{chapter.name}: {chapter.promise}", highlight=False)
    outcomes = []
    for case in cases:
        outcome = try_case(case)
        outcomes.append(outcome)
        text = outcome.failure or outcome.hindrance or outcome.figure
        line = f"  {outcome.verdict:9} {case.name} ({outcome.seconds:.1f} s)  {text}".rstrip()
        console.print(line, highlight=False, markup=False)
    return outcomes


def _table(outcomes: dict[Chapter, list[Outcome]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("chapter")
    for name in ("kept", "broken", "not tried", "s"):
        table.add_column(name, justify="right")
    for chapter, found in outcomes.items():
        table.add_row(chapter.name, *_counts(found))
    return table


def _markdown(outcomes: dict[Chapter, list[Outcome]]) -> str:
    lines = [
        "| chapter | what is promised | kept | broken | not tried | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for chapter, found in outcomes.items():
        cells = [f"`{chapter.name}`", chapter.promise, *_counts(found)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _counts(found: list[Outcome]) -> list[str]:
    verdicts = [outcome.verdict for outcome in found]
    seconds = sum(outcome.seconds for outcome in found)
    counts = [verdicts.count(verdict) for verdict in ("kept", "BROKEN", "NOT TRIED")]
    return [*map(str, counts), f"{seconds:.0f}"]


if __name__ == "__main__":
    raise SystemExit(exit_on_bad_input(main))
