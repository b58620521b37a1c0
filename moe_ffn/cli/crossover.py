"""Show final losses against the FLOPs of all training, and from where one arm is below another.

moe-ffn crossover runs/upcycling --base runs/upcycling_dense

To runs that began with a folder (`init_from`) the training of that model is added, `--base`. Arms are told by
their names up to the first comma, so that a grid of lengths is one line.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from moe_ffn.cli.parser import Parser
from moe_ffn.config.errors import ConfigError, command, printable
from moe_ffn.runs.reader import read_run
from moe_ffn.studies.crossover import Point, crossover, loss_by_flops
from moe_ffn.studies.gather import gather
from moe_ffn.studies.result import RunResult

log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog=command("crossover"), description=__doc__)
    parser.add_argument("paths", type=Path, nargs="+", metavar="FOLDER", help="a study, or runs")
    parser.add_argument(
        "--base",
        type=Path,
        metavar="RUN",
        required=True,
        help="folder of the run that trained the model which others begin with",
    )
    given = parser.parse_args(argv)
    base = RunResult.of_run(read_run(given.base))
    found = gather(given.paths)
    if not any(result.option("init_from") for result in found.results):
        raise ConfigError(
            "none of these runs has init_from, so that nothing is added to any; use "
            f"{command('compare')}"
        )
    arms = loss_by_flops(found.results, base.budget.training_flops)
    console = Console(highlight=False)
    console.print(_table(arms))
    for (one, ours), (other, theirs) in itertools.permutations(arms.items(), 2):
        if (flops := crossover(ours, theirs)) is not None:
            console.print(f"{other} is at or below {one} from {flops:.3g} FLOPs of training on")
    for why in found.left_out.values():
        log.warning("left out: %s", printable(why))
    return 1 if found.left_out else 0


def _table(arms: Mapping[str, Sequence[Point]]) -> Table:
    table = Table(title="final validation loss, nats per token")
    for title in ("arm", "FLOPs of all training", "loss"):
        table.add_column(title, justify="left" if title == "arm" else "right")
    for arm, points in arms.items():
        for point in points:
            sd = "" if point.sd is None else f" ± {point.sd:.4f}"
            table.add_row(arm, f"{point.flops:.3g}", f"{point.loss:.4f}{sd}")
    return table
