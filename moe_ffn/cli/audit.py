"""Check a mixture of experts for silent defects: experts that are not trained, not adapted, not balanced, not
loaded, in another order, or computed wrong.

moe-ffn audit TARGET [--text FILE] [--html FILE] [--json FILE]

TARGET is a run, a model folder of moe_ffn or of transformers, or a folder with an adapter of peft. The exit
code is 1 if a check fails.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moe_ffn.cli.exit import EXIT_FAILED
from moe_ffn.cli.parser import Parser, check_output, versions, whole, write_output
from moe_ffn.config import trust
from moe_ffn.config.errors import command
from moe_ffn.config.trust import accepting_code
from moe_ffn.interop.audit.findings import AuditReport, Verdict
from moe_ffn.report.html import OPENING, render

STYLES: dict[Verdict, str] = {"fail": "bold red", "warn": "yellow", "pass": "green", "skip": "dim"}
"""Verdict -> style in the terminal."""


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog=command("audit"), description=__doc__)
    parser.add_argument(
        "target", type=Path, metavar="TARGET", help="folder of a run, a model or an adapter"
    )
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="text to run the model on (default: the validation split of a run, else some Python source)",
    )
    parser.add_argument(
        "--tokens",
        type=whole(4, 1 << 20),
        default=1024,
        metavar="N",
        help="number of tokens of the text (default: %(default)s)",
    )
    parser.add_argument(
        "--base", type=Path, metavar="FOLDER", help="model that an adapter belongs to"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the findings as JSON")
    parser.add_argument(trust.FLAG, action="store_true", help=trust.HELP)
    args = parser.parse_args(argv)
    check_output("--html", args.html, OPENING)
    check_output("--json", args.json, "{")
    # Imported here, so that a mistake in the options is reported before these libraries load.
    from moe_ffn.cli.audit_target import load_target
    from moe_ffn.interop.audit import audit

    with accepting_code(args.trust_code):
        target = load_target(
            args.target, args.text, args.tokens, base=args.base, trust_code=args.trust_code
        )
        report = audit(
            target.model, target.ids_BS, objective=target.objective, num_steps=target.num_steps
        )
    facts = {"text": target.text, "versions": versions("transformers", "peft")}
    report = replace(
        report, findings=(*target.findings, *report.findings), facts={**report.facts, **facts}
    )
    show(report, Console(highlight=False))
    if args.html is not None:
        write_output("--html", args.html, page(report, args.target.resolve().name))
        print(f"written: {args.html}")
    if args.json is not None:
        write_output("--json", args.json, json.dumps(report.to_dict(), indent=2) + "\n")
        print(f"written: {args.json}")
    return 0 if report.ok else EXIT_FAILED


def show(report: AuditReport, console: Console) -> None:
    """Print the verdict, what was audited, and a table of the findings."""
    console.print(report.summary, markup=False, style="bold")
    facts = (f"{name}: {value}" for name, value in report.facts.items())
    console.print(f"{'; '.join((report.model, *facts))}\n", markup=False, style="dim")
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for name in ("verdict", "check", "place"):
        table.add_column(name, no_wrap=name != "place", max_width=24, overflow="fold")
    table.add_column("finding", ratio=1, overflow="fold")
    for row in report.rows():
        finding = Text(row.sentence)
        if row.advice:
            finding.append(f"\n-> {row.advice}", style="bold")
        table.add_row(Text(row.verdict, STYLES[row.verdict]), row.check, row.place, finding)
    console.print(table)


def page(report: AuditReport, target: str) -> str:
    """Return the HTML page of an audit."""
    return render("audit.html", report=report, target=target)
