"""Compare existing runs: losses with intervals, differences from a baseline, cost, and differing options.

    moe-ffn compare runs/gating                  # the runs of a study, or of any folder
    moe-ffn compare runs/a runs/b                # runs, grouped into arms by their options
    moe-ffn compare docs/studies/gating          # a folder with a table of results, or the table
    moe-ffn compare runs/gating --html gating.html

Nothing is trained; use moe-ffn sweep for that. Unfinished and damaged runs are listed and left out, and the
exit code is then 1.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rich.console import Console

from moe_ffn.cli.parser import Parser, page_file, positive, write_output
from moe_ffn.config.errors import ConfigError, command, printable
from moe_ffn.config.numbers import counted
from moe_ffn.report.studies.comparison_tables import print_comparison
from moe_ffn.studies.comparison import Comparison
from moe_ffn.studies.gather import Gathered, gather
from moe_ffn.studies.statistics import EQUALITY_MARGIN

log = logging.getLogger(__name__)

EXIT_LEFT_OUT = 1


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog=command("compare"), description=__doc__)
    meaning = "folder of a run, folder that holds runs or a results.jsonl, or a results.jsonl"
    parser.add("paths FOLDER", meaning, nargs="+")
    parser.add(
        "--baseline ARM",
        "arm to compare the other arms with (default: the study's baseline, or the first arm)",
    )
    parser.add(
        "--margin NATS",
        "call arms equal if tests show that they differ by less (default: the study's margin, or "
        f"{EQUALITY_MARGIN:g} nats per token)",
        type=positive(unit="nats"),
    )
    parser.add("--html FILE", "also write a page with plots, which opens from disk", type=page_file)
    args = parser.parse_args(argv or ["--help"])
    gathered = gather(args.paths)
    comparison = compare(gathered, args.baseline, args.margin)
    print_comparison(Console(), comparison)
    if args.html is not None:
        # Imported here, since the tables do not need plotly.
        from moe_ffn.report.studies.comparison_page import comparison_html

        write_output("--html", args.html, comparison_html(gathered, comparison, args.html))
    for why in gathered.left_out.values():
        log.warning("left out: %s", printable(why))
    return EXIT_LEFT_OUT if gathered.left_out else 0


def compare(
    gathered: Gathered, baseline: str | None = None, margin: float | None = None
) -> Comparison:
    """Return the comparison; an error message says how many runs are left out, and why the first is."""
    try:
        return gathered.compare(baseline, margin)
    except ConfigError as error:
        reasons = [*gathered.left_out.values()]
        if not reasons:
            raise
        verb = "is" if len(reasons) == 1 else "are"
        raise ConfigError(
            f"{error}; {counted(len(reasons), 'run')} {verb} left out, the first since {reasons[0]}"
        ) from error
