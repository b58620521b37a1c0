"""Check whether a learning rate transfers to larger models: show how activations, and their changes in the
first steps of training, depend on the size of the model.

    moe-ffn coordinates --config FILE [--sizes 64 128 256] [--option model.num_layers] [--html FILE]

Each size is trained for a few steps at the peak learning rate, on the same batches. The slope is the exponent
a of values proportional to size^a. If the changes of the residual stream and of the logits have slopes near
0, the best learning rate of a small model also suits a large one. model.parametrization.type completep sets
initial weights and learning rates to reach such slopes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from moe_ffn.cli.command_line import parse_flags
from moe_ffn.cli.parser import Parser, page_file, whole, write_output
from moe_ffn.config.base import MAX_COUNT
from moe_ffn.config.errors import ConfigError, command
from moe_ffn.report.tables import plain_table
from moe_ffn.runs.config import TrainConfig
from moe_ffn.studies.coordinates import Coordinates, measure_coordinates


def main(argv: Sequence[str]) -> int:
    flags, config = parse_flags(argv, TrainConfig, command("coordinates"), _add_flags)
    if not flags.option.startswith("model."):
        raise ConfigError(
            f"--option ({flags.option}): must be a size of the model; give one, such as model.num_layers"
        )
    if config.init_from is not None:
        raise ConfigError(
            f"init_from ({config.init_from}): each size begins with weights of its own; leave it out"
        )
    sizes = flags.sizes
    if sizes is None:
        if flags.option != "model.d_model":
            raise ConfigError(
                f"--option ({flags.option}): give its values with --sizes, such as --sizes 2 4 8"
            )
        base = getattr(config.model.parametrization, "base", {})
        smallest = base.get("d_model", config.model.d_model)
        sizes = [smallest * factor for factor in (1, 2, 4, 8)]
    if len(set(sizes)) < 2:
        raise ConfigError(f"--sizes ({sizes[0]}): a slope needs two different sizes; give another")
    found = measure_coordinates(config, flags.option, sizes, flags.steps)
    console = Console(highlight=False)
    console.print(
        f"Root mean squares of activations before training, and of their change in {flags.steps} steps, "
        f"{config.optimizer.type}, {config.model.parametrization.type}",
        soft_wrap=True,
    )
    console.print(_table(found))
    console.print(_verdict(found), soft_wrap=True)
    if flags.html is not None:
        write_output("--html", flags.html, _page(found))
    return 0


def _add_flags(parser: Parser) -> None:
    parser.description = __doc__
    parser.add(
        "--option OPTION",
        "option that sets the size, such as model.num_layers or model.ffn.num_experts (%(default)s)",
        default="model.d_model",
    )
    parser.add(
        "--sizes NUMBER",
        "sizes to train, as values of --option (1, 2, 4 and 8 times d_model, the base's if given)",
        type=whole(1, MAX_COUNT),
        nargs="+",
    )
    parser.add("--steps N", "training steps (%(default)s)", type=whole(1, 1000), default=4)
    meaning = "also draw activations and changes against the size, as a page"
    parser.add("--html FILE", meaning, type=page_file)


def _table(found: Coordinates) -> Table:
    table = plain_table(["", *(f"{size:,g}" for size in found.sizes), "slope"])
    for title, rows in (("before", found.activations), ("change", found.updates)):
        for row, values in rows.items():
            cells = (f"{value:.3g}" for value in values)
            table.add_row(f"{row}, {title}", *cells, f"{found.slope(values):+.2f}")
    return table


def _verdict(found: Coordinates) -> str:
    slopes = {
        row: found.slope(found.updates[row])
        for row in ("residual stream", "router logits", "logits")
        if row in found.updates
    }
    if any(map(math.isnan, slopes.values())):
        return "A change is zero or not finite and has no slope; lower optimizer.learning_rate."
    parts = ", ".join(f"{row} {slope:+.2f}" for row, slope in slopes.items())
    return (
        f"Change as a power of {found.option}: {parts}. With slopes of 0, one learning rate fits all sizes. "
        "Outputs of attention and feed-forward blocks may fall as layers are added: only their sum counts."
    )


def _page(found: Coordinates) -> str:
    # Imported here, since the table does not need plotly.
    from moe_ffn.report.drawing import curves_figure, scatter, style_of
    from moe_ffn.report.plots import figures_page

    figures: list[Any] = []
    for title, rows in (
        ("Activations before training", found.activations),
        ("Change of the activations in the first steps", found.updates),
    ):
        traces = [
            scatter(
                row,
                found.sizes,
                values,
                style_of(number),
                "%{y:.3g}<extra>" + row + "</extra>",
                f" {found.slope(values):+.2f}",
                mode="lines+markers",
            )
            for number, (row, values) in enumerate(rows.items())
        ]
        log_axis = {"type": "log", "title": "root mean square"}
        x_axis = {"type": "log", "title": found.option, "tickvals": list(found.sizes)}
        note = "The legend shows the slope of each line, the exponent of the size; 0 is flat."
        figures.append(curves_figure(traces, title, note, x_axis, log_axis))
    return figures_page(f"Activations over {found.option}", figures)
