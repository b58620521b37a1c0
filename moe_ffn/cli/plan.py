"""Plan the training of a model on several GPUs: memory per GPU, traffic and time of a step, for each layout.

moe-ffn plan --model.d_model 4096 --model.num_layers 32 --data.batch_size 64 --gpus 64 --gpu h100
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, astuple, replace

from rich.console import Console
from rich.table import Table

from moe_ffn.cli.command_line import parse_flags
from moe_ffn.cli.exit import EXIT_FAILED
from moe_ffn.cli.parser import Parser, page_file, positive, whole, write_output
from moe_ffn.config.errors import ConfigError, command, nearest_or_all
from moe_ffn.config.numbers import compact
from moe_ffn.runs.budget import Budget
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.planner import DEVICES, EFFICIENCY, Device, LayoutPlan, plan_layouts
from moe_ffn.weights.open_model import model_of_source

MAX_RANKS = 2**16
MAX_TOO_LARGE = 3
"""Maximum number of layouts to show that do not fit; those that need the least memory are shown."""


def main(argv: Sequence[str]) -> int:
    flags, config = parse_flags(argv, TrainConfig, command("plan"), _add_flags)
    cost = Budget.of(config).model
    device = device_of(flags)
    teacher = None
    distill = config.objective.distill
    if distill is not None and not distill.is_stored:
        teacher = model_of_source(distill.teacher, "objective.distill.teacher")
    plans = plan_layouts(config, flags.gpus, device, flags.efficiency, teacher)
    say = Console().print
    say(
        f"{compact(cost.params)} parameters, {compact(cost.active_params)} of them active; "
        f"{flags.gpus} x {device.name}, {compact(plans[0].tokens)} tokens per step",
        highlight=False,
    )
    if teacher is not None:
        count = compact(teacher.num_params(*config.data.text_sizes))
        say(f"and a teacher of {count}, whole on each GPU, in weights, activ and s/step")
    say(plan_table(plans, flags.efficiency))
    if num_hidden := len(plans) - len(shown(plans)):
        say(f"{num_hidden} more layouts do not fit")
    say(verdict(plans), highlight=False, soft_wrap=True)
    if flags.plot is not None:
        write_output("--plot", flags.plot, _page(plans))
    return 0 if plans[0].fits else EXIT_FAILED


def _add_flags(parser: Parser) -> None:
    parser.description = __doc__
    meaning = "number of GPUs, each with one process (%(default)s)"
    parser.add("--gpus N", meaning, type=whole(1, MAX_RANKS), default=8)
    parser.add("--gpu NAME", f"{', '.join(DEVICES)} (%(default)s)", default="h100")
    for name, (field, _, meaning) in _OVERRIDES.items():
        parser.add(f"--{name} NUMBER", meaning, dest=field, type=positive(1e9))
    parser.add("--per-machine NUMBER", "GPUs per machine", type=whole(1))
    parser.add(
        "--efficiency FRACTION",
        "fraction of the published FLOPs and bandwidths that is reached in practice (%(default)s)",
        type=positive(1.0),
        default=EFFICIENCY,
    )
    meaning = "also write a page with a bar chart of the memory of each layout"
    parser.add("--plot FILE", meaning, type=page_file)


_OVERRIDES = {
    "memory-gb": (
        "memory_bytes",
        1e9,
        "memory of a GPU in 1e9 bytes, instead of the published figure",
    ),
    "tflops": ("flops", 1e12, "its dense bfloat16 speed in 1e12 FLOPs per second"),
    "link-gb-s": ("link", 1e9, "its bandwidth to GPUs of the same machine in 1e9 bytes per second"),
    "network-gb-s": ("network", 1e9, "its bandwidth to other machines in 1e9 bytes per second"),
}
"""Flag -> the field of `Device` that it overrides, the unit, and the help text."""


def device_of(flags: Namespace) -> Device:
    """Return the named device; given flags override its published figures."""
    if flags.gpu not in DEVICES:
        raise ConfigError(f"--gpu: unknown '{flags.gpu}'{nearest_or_all(flags.gpu, DEVICES)}")
    units = {field: unit for field, unit, _ in _OVERRIDES.values()} | {"per_machine": 1}
    given = {field: getattr(flags, field) for field in units}
    return replace(
        DEVICES[flags.gpu],
        **{field: value * units[field] for field, value in given.items() if value is not None},
    )


def shown(plans: Sequence[LayoutPlan]) -> list[LayoutPlan]:
    """Return the layouts that fit, and the first few that do not."""
    fitting = [plan for plan in plans if plan.fits]
    return [*fitting, *[plan for plan in plans if not plan.fits][:MAX_TOO_LARGE]]


def plan_table(plans: Sequence[LayoutPlan], efficiency: float) -> Table:
    """Return a table of the `shown` layouts."""
    device = plans[0].device
    table = Table(
        caption="mesh: data x shard x expert. Memory: GB (1e9 bytes) per GPU at the peak of a step; whole: "
        "weights and gradients while they are gathered; grads is 0 if the peak is before the first gradient. "
        "Traffic: GB that a GPU sends in a step, to gather weights, to reduce gradients, and as tokens to "
        "experts and back. s/step: the longer of the products and the traffic of weights and gradients, plus "
        "the traffic of tokens. Published or given figures: a GPU has "
        f"{device.memory_bytes / 1e9:.3g} GB, computes {device.flops / 1e12:.0f} TFLOP/s, and sends "
        f"{device.link / 1e9:.0f} GB/s to the {device.per_machine} GPUs of its machine and "
        f"{device.network / 1e9:.0f} GB/s to others; {efficiency:.0%} of these speeds is reached",
        caption_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    for name in (
        *("mesh", "weights", "grads", "optim", "whole", "activ", "GB"),
        *("gather", "reduce", "tokens", "s/step"),
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for plan in shown(plans):
        sent = plan.traffic
        table.add_row(
            " x ".join(map(str, astuple(plan.layout))),
            *(f"{part / 1e9:.1f}" for part in astuple(plan.memory)),
            f"{plan.memory.total / 1e9:.1f}",
            f"{sent.weights / 1e9:.1f}",
            f"{(sent.gradients + sent.copies) / 1e9:.1f}",
            f"{sent.tokens / 1e9:.1f}",
            f"{plan.seconds:.3g}" if plan.fits else "too large",
            style="" if plan.fits else "dim",
        )
    return table


def verdict(plans: Sequence[LayoutPlan]) -> str:
    """Name the fastest layout that fits, its bottleneck, and the memory of an unsharded layout."""
    best, limit = plans[0], plans[0].device.memory_bytes
    if not best.fits:
        return (
            f"none fits: the smallest takes {best.memory.total / 1e9:.1f} of {limit / 1e9:.0f} GB; give more "
            "--gpus, a smaller data.batch_size, or model.activation_checkpointing block if it is not set"
        )
    layout = best.layout
    option = f"parallel: {{data: {layout.data}, shard: {layout.shard}, expert: {layout.expert}}}"
    bottleneck = "the products"
    if best.overlapped_seconds > best.compute_seconds:
        bottleneck = (
            f"the traffic of weights and gradients ({best.overlapped_seconds:.3g} s, the products take "
            f"{best.compute_seconds:.3g})"
        )
    tokens = f", {best.token_seconds:.3g} s for the traffic of tokens" if best.token_seconds else ""
    unsharded = next((p for p in plans if not p.layout.is_sharded), None)
    note = ""
    if unsharded is not None and not unsharded.fits:
        note = f"; a whole copy on each GPU would take {unsharded.memory.total / 1e9:.0f} GB"
    return (
        f"{option}: {best.seconds:.3g} s per step, bound by {bottleneck}{tokens}; "
        f"{best.tokens_per_second:,.0f} tokens/s; {best.memory.total / 1e9:.1f} of "
        f"{limit / 1e9:.0f} GB{note}"
    )


def _page(plans: Sequence[LayoutPlan]) -> str:
    """Return a page with the memory of each layout as a bar."""
    # Imported here, since the tables do not need plotly.
    from moe_ffn.report.figures import memory_of_layouts
    from moe_ffn.report.plots import figures_page

    bars = {
        " x ".join(map(str, astuple(plan.layout))): {
            part: size / 1e9 for part, size in asdict(plan.memory).items()
        }
        for plan in shown(plans)
    }
    return figures_page("Layouts", [memory_of_layouts(bars, plans[0].device.memory_bytes / 1e9)])
