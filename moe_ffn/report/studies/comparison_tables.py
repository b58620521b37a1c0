"""Tables of a comparison, for the terminal, the page and Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from moe_ffn.config.errors import printable
from moe_ffn.config.numbers import NONE, compact, number
from moe_ffn.ffn.match import MAX_MISMATCH
from moe_ffn.report.studies.markdown import escape_markdown, markdown_table
from moe_ffn.report.tables import plain_table
from moe_ffn.studies.comparison import Arm, Comparison, TimeToBaseline, p_text
from moe_ffn.studies.statistics import MIN_SEEDS, Interval


@dataclass(frozen=True)
class Table:
    """Table of text; all columns but the first contain numbers."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    legend: Sequence[str]
    """Definitions of columns, one each, and remarks."""


def tables(comparison: Comparison) -> list[Table]:
    """Return the tables of a comparison, the most important first."""
    arms = comparison.arms
    shown = [_losses(comparison), _costs(comparison)]
    if any(arm.mean("max_violation") is not None or arm.alarms for arm in arms):
        shown.append(_routing(arms))
    if len(arms) > 1:
        shown.append(_reached(comparison))
    return shown


def _losses(comparison: Comparison) -> Table:
    kinds = {"seeds": "seeds (Student's t)", "windows": "windows of the text (bootstrap)"}
    intervals = sorted({arm.interval_over for arm in comparison.arms if arm.interval})
    over = " or ".join(map(kinds.__getitem__, intervals))
    headers = ["arm", "seeds", "loss", "sd"]
    margin = f", ± its 95 % interval over {over}" if over else ""
    legend = [f"loss: final validation loss, nats per token{margin}"]
    if any(arm.sd is not None for arm in comparison.arms):
        legend.append("sd: standard deviation over seeds")
    if len(comparison.arms) > 1:
        headers += ["difference", "p", "detectable"]
        legend += [
            f"difference: from {comparison.baseline}, paired, ± its 95 % interval",
            "p: two-sided t-test of the difference, after Holm's correction, which intervals do not have",
            "detectable: true difference that these seeds find with 80 % power",
        ]
    if any(1 < len(arm.losses) < MIN_SEEDS for arm in comparison.arms):
        legend.append("a loss of two seeds has no interval")
    rows: list[list[str]] = []
    for arm in comparison.arms:
        loss = _with_margin(arm.loss, arm.interval)
        row = [arm.name, str(len(arm.results)), loss, number(arm.sd)]
        if paired := arm.difference:
            difference = _with_margin(paired.mean, paired.interval, "+.4f")
            row += [difference, p_text(paired.p_value), number(paired.detectable)]
        rows.append(row + [NONE] * (len(headers) - len(row)))
    return Table("Loss", headers, rows, legend)


def _with_margin(value: float, interval: Interval | None, form: str = ".4f") -> str:
    if interval is None:
        return format(value, form)
    return f"{value:{form}} ±{interval.margin:.4f}"


def _costs(comparison: Comparison) -> Table:
    arms = comparison.arms
    rows = [
        [
            arm.name,
            compact(arm.budget.model.params),
            compact(arm.budget.model.active_params),
            compact(arm.budget.model.flops_per_token),
            _speed(arm, comparison.base_of(arm)),
            NONE if memory is None else f"{memory / 1e6:,.0f} MB",
        ]
        for arm, memory in ((arm, arm.mean("peak_memory_bytes")) for arm in arms)
    ]
    speed = (
        "timed separately from the runs"
        if any(arm.timed_step_seconds for arm in arms)  # then all that have seconds
        else "of the runs, which other programs on the machine slow down"
    )
    return Table(
        "Cost",
        ["arm", "params", "active", "FLOPs", "tokens/s", "memory"],
        rows,
        [
            "active: parameters that a token uses",
            "FLOPs: forward, per token",
            f"tokens/s: at the median step, {speed}; in brackets relative to {comparison.baseline}",
            "memory: peak of the process, or of its tensors on a GPU",
        ],
    )


def _speed(arm: Arm, base: Arm) -> str:
    speed, base_speed = arm.tokens_per_second, base.tokens_per_second
    ratio = f" ({speed / base_speed:.2f})" if speed and base_speed and arm is not base else ""
    return f"{number(speed, ',.0f')}{ratio}"


def _routing(arms: Sequence[Arm]) -> Table:
    rows = [
        [
            arm.name,
            number(arm.mean("max_violation"), ".2f"),
            number(arm.mean("dropped_fraction"), ".1%"),
            number(arm.mean("dead_experts"), ".1f"),
            ", ".join(f"{count} {kind}" for kind, count in arm.alarms.items()) or "0",
        ]
        for arm in arms
    ]
    return Table(
        "Routing",
        ["arm", "MaxVio", "dropped", "dead experts", "alarms"],
        rows,
        [
            "MaxVio: load of the busiest expert over the even share, minus 1",
            "dropped: share of the (token, expert) pairs",
            "dead experts: without a token, summed over layers",
            "alarms: summed over seeds",
            "all others: at the last validation, mean over seeds and layers",
        ],
    )


def _reached(comparison: Comparison) -> Table:
    rows: list[list[str]] = []
    for arm in comparison.arms:
        base = comparison.base_of(arm)
        rows.append(
            [
                arm.name,
                _reached_cell(arm, base, "steps", "{:,.0f}".format),
                _reached_cell(arm, base, "flops", compact),
                _reached_cell(arm, base, "seconds", "{:,.0f}".format),
                " ".join(cost for cost, is_on in arm.on_frontier.items() if is_on) or NONE,
            ]
        )
    return Table(
        f"To the final loss of {comparison.baseline}",
        ["arm", "steps", "FLOPs", "seconds", "frontier of"],
        rows,
        [
            "steps: ± the 95 % interval of the mean over seeds",
            "FLOPs: forward and backward",
            "seconds: these steps at the median step time",
            f"in brackets: relative to the whole training of {comparison.baseline}",
            "frontier of: costs for which no arm with a lower loss costs the same or less, within "
            f"{MAX_MISMATCH:.0%}",
        ],
    )


def _reached_cell(arm: Arm, base: Arm, key: str, text: Callable[[Any], str]) -> str:
    reached = arm.reached
    if reached is None or reached.num_reached < reached.num_seeds:
        return _not_reached(reached)
    value = getattr(reached, key)
    whole = getattr(base, "steps" if key == "steps" else f"training_{key}")
    if value is None:
        return NONE
    share = f" ({value / whole:.2f})" if whole else ""
    if key == "steps" and arm.base and (interval := reached.interval):
        return f"{text(value)} ±{interval.margin:,.0f}{share}"
    return f"{text(value)}{share}"


def _not_reached(reached: TimeToBaseline | None) -> str:
    if reached is None:
        return NONE
    count = f" ({reached.num_reached} of {reached.num_seeds})" if reached.num_reached else ""
    return f"not reached{count}"


def tables_by_size(comparison: Comparison, sizes: Sequence[str]) -> list[Table]:
    """Return tables with a row for each block and a column for each size, of arms named SIZE_BLOCK."""
    blocks = arms_by_block(comparison.arms, sizes)
    shown = [size for size in sizes if any(size in arms for arms in blocks.values())]
    examples = [next(arms[size] for arms in blocks.values() if size in arms) for size in shown]
    headers = ["block"] + [
        f"{size}: {compact(arm.budget.model.active_params)} active, {compact(arm.budget.tokens)} tokens"
        for size, arm in zip(shown, examples, strict=True)
    ]

    def table(title: str, cell: Callable[[Arm, Arm], str], legend: Sequence[str]) -> Table:
        rows = [
            [block]
            + [cell(a, comparison.base_of(a)) if (a := arms.get(s)) else NONE for s in shown]
            for block, arms in blocks.items()
        ]
        return Table(title, headers, rows, legend)

    return [
        table(
            "Difference from the baseline of each size",
            _difference_cell,
            [
                "nats per token, paired by seed; of a baseline, its loss",
                "±: 95 % interval, over windows of the text with one seed, otherwise over seeds",
            ],
        ),
        table(
            "Training to the final loss of the baseline",
            _shares_cell,
            [
                "steps, and seconds where they are known, as shares of the whole training of the baseline",
            ],
        ),
    ]


def arms_by_block(arms: Sequence[Arm], sizes: Sequence[str]) -> dict[str, dict[str, Arm]]:
    """Return block -> size -> arm, of arms named SIZE_BLOCK; blocks are in the order of the largest size."""
    blocks: dict[str, dict[str, Arm]] = {}
    for size in reversed(sizes):
        for arm in arms_of_size(arms, size):
            blocks.setdefault(arm.name.removeprefix(f"{size}_"), {})[size] = arm
    return blocks


def arms_of_size(arms: Sequence[Arm], size: str) -> list[Arm]:
    return [arm for arm in arms if arm.name.startswith(f"{size}_")]


def _difference_cell(arm: Arm, base: Arm) -> str:
    if arm is base:
        return f"baseline: {arm.loss:.4f}"
    if arm.difference is None:
        return NONE
    text = _with_margin(arm.difference.mean, arm.difference.interval, "+.4f")
    return text if arm.difference.interval else f"{text} ({arm.difference.num_pairs} seeds)"


def _shares_cell(arm: Arm, base: Arm) -> str:
    reached = arm.reached
    if reached is None or reached.num_reached < reached.num_seeds:
        return _not_reached(reached)
    shares = [reached.steps / base.steps] if reached.steps else []
    if reached.seconds and base.training_seconds:
        shares.append(reached.seconds / base.training_seconds)
    return ", ".join(f"{share:.2f}" for share in shares)


def tuning_tables(comparison: Comparison) -> Iterator[Table]:
    """Return a table for each of `comparison.tuning`."""
    for tuning in comparison.tuning:
        rows = [
            [arm, *(number(losses.get(value)) for value in tuning.values)]
            for arm, losses in tuning.losses.items()
        ]
        yield Table(
            f"Final loss by {tuning.option}",
            ["arm", *tuning.values],
            rows,
            ["Means are over the seeds that an arm has for all values.", *tuning.verdicts],
        )


# -- output


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print the tables, the differences between configs, and the verdicts."""

    def say(text: str, style: str = "") -> None:
        console.print(Text(printable(text, also="\n"), style=style))

    if comparison.question:
        say(comparison.question, "bold")
    for table in [*tables(comparison), *tuning_tables(comparison)]:
        say(table.title, "bold")
        shown = plain_table([*map(Text, table.headers)])
        for row in table.rows:
            shown.add_row(*(Text(printable(cell)) for cell in row))
        console.print(shown)
        say("\n".join([*table.legend, ""]), "dim")
    if len(comparison.arms) > 1:
        say(f"What differs from {comparison.baseline}")
        for arm in (arm for arm in comparison.arms if arm.base):
            say(f"  {arm.name}: {'; '.join(arm.differs) or 'nothing'}")
        say("")
    for sentence in comparison.verdicts:
        say(sentence, "bold")
    if comparison.compared_with_ngrams:
        say(comparison.compared_with_ngrams)
    for note in comparison.notes:
        say(f"note: {note}", "yellow")


def markdown(table: Table) -> str:
    """Return a table in Markdown with its title and legend."""
    head, *rows = [[escape_markdown(cell) for cell in row] for row in (table.headers, *table.rows)]
    legend = "\n".join(f"- {escape_markdown(line)}" for line in table.legend)
    return f"**{escape_markdown(table.title)}**\n\n{markdown_table(head, rows)}\n\n{legend}"
