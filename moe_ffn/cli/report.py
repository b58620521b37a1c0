"""Write the page of a run, or a comparison of several runs, as one file that opens from disk.

    moe-ffn report runs/NAME              # writes runs/NAME/report.html
    moe-ffn report runs/a runs/b          # compares the runs in runs/report.html
    moe-ffn report --watch runs/NAME      # updates the page until the run has ended

Runs that differ only in their seeds form one arm.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from moe_ffn.cli.parser import Parser, page_file
from moe_ffn.config.errors import ConfigError, command
from moe_ffn.report.page import follow_runs, write_report
from moe_ffn.runs.folder import REPORT_FILE


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog=command("report"), description=__doc__)
    parser.add("runs RUN", "folder of a run", type=Path, nargs="+")
    parser.add(
        "--output FILE",
        "page to write (default: report.html in the run, or for several runs next to the first one)",
        type=page_file,
    )
    meaning = "rewrite the page every few seconds, until all runs have ended"
    parser.add("--watch", meaning)
    meaning = "seconds between two pages of --watch (default: 10)"
    parser.add("--every SECONDS", meaning, type=float)
    args = parser.parse_args(argv)
    if args.every is not None and not args.watch:
        raise ConfigError("--every: needs --watch; add it, or leave --every out")
    every = 10 if args.every is None else args.every
    if not 0.1 <= every <= 86_400:
        raise ConfigError(f"--every: must be from 0.1 to 86400 seconds, got {every}")
    from moe_ffn.report.studies.comparison_page import html_of_runs  # loads plotly

    first, is_one = args.runs[0], len({folder.resolve() for folder in args.runs}) == 1
    output = args.output or (first if is_one else first.resolve().parent) / REPORT_FILE
    if args.watch:
        say = partial(print, flush=True)
        follow_runs(html_of_runs, args.runs, output, every, say)
        return 0
    write_report(html_of_runs, args.runs, output)
    print(output)
    return 0
