"""Draw the figures of these pages as SVG: `python docs/explanation/figures.py`, from the root of a checkout.

Numbers come from moe_ffn; the figures of a page use the variables of its Python blocks.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch

from moe_ffn import DecoderConfig, build_ffn, load_balancing_loss
from moe_ffn.cli.demo import MODEL
from moe_ffn.ffn.networks import hidden_units
from moe_ffn.report.trace import trace_text
from moe_ffn.studies.comparison import Arm, Comparison
from moe_ffn.studies.gather import gather
from moe_ffn.weights.open_model import open_model

FOLDER = Path(__file__).parent
STUDIES = FOLDER.parent / "studies"

STYLE = """
svg { --paper: #ffffff; --ink: #1f2328; --mute: #656d76; --grid: #d0d7de;
      --blue: #0072b2; --orange: #c2500a; --green: #00805a; --violet: #8250df; }
@media (prefers-color-scheme: dark) {
  svg { --paper: #161b22; --ink: #e6edf3; --mute: #9ea7b3; --grid: #444c56;
        --blue: #58a6ff; --orange: #f0883e; --green: #3fb950; --violet: #bc8cff; }
}
text { font: 14px system-ui, sans-serif; fill: var(--ink); }
.small { font-size: 12px; fill: var(--mute); }
.title { font-weight: 600; }
.dark { fill: #111111; }
"""

Point = tuple[float, float]


class Drawing:
    """An SVG; colours are names of `STYLE`."""

    def __init__(self, width: int, height: int) -> None:
        self.size = f'width="{width}" height="{height}"'
        self.view = f'viewBox="0 0 {width} {height}"'
        self.parts = [f'<rect {self.size} rx="8" fill="var(--paper)"/>']

    def text(self, at: Point, words: str, anchor: str = "start", kind: str = "") -> None:
        place = f'x="{_n(at[0])}" y="{_n(at[1])}" text-anchor="{anchor}" class="{kind}"'
        self.parts.append(f"<text {place}>{escape(words)}</text>")

    def box(self, at: Point, width: float, height: float, fill: str, edge: str = "grid") -> None:
        place = f'x="{_n(at[0])}" y="{_n(at[1])}" width="{_n(width)}" height="{_n(height)}"'
        colour = fill if fill.startswith("#") else f"var(--{fill})"
        self.parts.append(f'<rect {place} rx="2" fill="{colour}" stroke="var(--{edge})"/>')

    def line(self, points: list[Point], colour: str, width: float = 1, dash: str = "") -> None:
        places = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        look = f'stroke="var(--{colour})" stroke-width="{_n(width)}" stroke-dasharray="{dash}"'
        self.parts.append(f'<polyline points="{places}" fill="none" {look}/>')

    def dot(self, at: Point, colour: str, radius: float = 5) -> None:
        place = f'cx="{_n(at[0])}" cy="{_n(at[1])}" r="{_n(radius)}"'
        self.parts.append(f'<circle {place} fill="var(--{colour})"/>')

    def arrow(self, start: Point, end: Point, colour: str, width: float = 2) -> None:
        self.line([start, end], colour, width)
        back = complex(*start) - complex(*end)
        wings = [
            complex(*end) + 8 * back / abs(back) * complex(0.94, turn) for turn in (0.34, -0.34)
        ]
        first, last = ((wing.real, wing.imag) for wing in wings)
        self.line([first, end, last], colour, width)

    def save(self, path: Path, title: str) -> None:
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {self.view} {self.size}>'
        parts = [head, f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", *self.parts]
        path.write_text("\n".join([*parts, "</svg>\n"]), encoding="utf-8")


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def run_page(name: str) -> dict[str, Any]:
    """Run the Python blocks of a page, and return its variables."""
    names: dict[str, Any] = {}
    text = (FOLDER / name).read_text(encoding="utf-8")
    with contextlib.redirect_stdout(io.StringIO()):
        for code in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            exec(compile(code, name, "exec"), names)
    return names


@torch.no_grad()
def positions() -> Drawing:
    """Draw which inputs each output reads, found by changing one input at a time."""
    torch.manual_seed(0)
    config = {"d_model": 16, "num_layers": 1, "attention": {"num_heads": 2}, "ffn": "dense"}
    decoder = DecoderConfig.model_validate(config).build(vocab_size=32, max_seq_len=8)
    layer = decoder.layers[0]
    conv = build_ffn({"type": "conv", "kernel_size": 3}, 16)
    panels = {
        "FFN": lambda x: layer.ffn(x).hidden,
        "two convolutions of size 3": lambda x: conv(x).hidden,
        "causal attention": lambda x: layer.attention(x, decoder.positions, None),
    }
    drawing, x, cell = Drawing(700, 260), torch.randn(1, 8, 16), 22
    for panel, (title, function) in enumerate(panels.items()):
        left = 24 + 234 * panel
        drawing.text((left, 32), title, kind="title")
        for column in range(8):
            other = x.clone()
            other[:, column] += 1
            change_S = (function(other) - function(x))[0].abs().amax(dim=-1)
            for row, change in enumerate(change_S.tolist()):
                corner = (left + cell * column, 48 + cell * row)
                drawing.box(corner, cell, cell, "blue" if change else "paper")
    drawing.text((24, 246), "rows: output positions; columns: input positions", kind="small")
    return drawing


@torch.no_grad()
def memory() -> Drawing:
    """Draw a token of two numbers in a ReLU block of eight units: keys, activations, sum of values."""
    torch.manual_seed(5)
    block = build_ffn({"type": "dense", "activation": "relu", "d_ff": 8}, d_model=2)
    x = torch.tensor([0.9, 0.5])
    (found,) = hidden_units(block, x.unsqueeze(0))
    m, values = found.activations_NF[0], found.values_FD
    drawing = Drawing(750, 290)

    def at(origin: Point, vector: torch.Tensor, scale: float) -> Point:
        return origin[0] + scale * vector[0].item(), origin[1] - scale * vector[1].item()

    drawing.text((24, 32), "keys k and the token x", kind="title")
    for key, active in zip(block.up.weight, m.tolist(), strict=True):
        drawing.arrow((115, 150), at((115, 150), key, 120), "blue" if active else "mute")
    drawing.arrow((115, 150), at((115, 150), x, 110), "orange", 3)
    drawing.text(at((115, 155), x, 122), "x", kind="title")
    drawing.text((270, 32), "activations m = relu(k . x)", kind="title")
    for unit, active in enumerate(m.tolist()):
        y = 48 + 26 * unit
        drawing.text((270, y + 15), f"unit {unit}", kind="small")
        drawing.box((316, y), 120 * active, 20, "blue")
        drawing.text((322 + 120 * active, y + 15), f"{active:.2f}")
    drawing.text((520, 32), "output = sum of m v", kind="title")
    steps = [torch.zeros(2), *(m.unsqueeze(-1) * values)[m > 0].cumsum(dim=0)]
    torch.testing.assert_close(steps[-1], block(x).hidden)
    for start, stop in pairwise(steps):
        drawing.arrow(at((560, 95), start, 560), at((560, 95), stop, 560), "blue")
    drawing.arrow((560, 95), at((560, 95), steps[-1], 560), "orange", 3)
    note = "blue: active units, and what each adds; grey: silent units; orange: the token and the output"
    drawing.text((24, 276), note, kind="small")
    return drawing


def draw_pairs(drawing: Drawing, left: float, tokens: list[str], routing: Any, lit: Any) -> None:
    """Draw the pairs of a routing as lines from tokens to experts; those in `lit` are orange."""
    drops = routing.dropped_N.tolist()
    experts = routing.expert_ids_N.tolist()
    pairs = list(zip(routing.token_indices_N.tolist(), experts, strict=True))
    for pair, weight, dropped in zip(pairs, routing.weights_N.tolist(), drops, strict=True):
        ends = [(left + 56, 62 + 40 * pair[0]), (left + 206, 82 + 54 * pair[1])]
        colour = "orange" if dropped or pair in lit else "blue"
        drawing.line(ends, colour, 1.5 if dropped else 1 + 5 * weight, "5 4" if dropped else "")
    for token, word in enumerate(tokens):
        drawing.box((left, 48 + 40 * token), 56, 28, "paper", "mute")
        drawing.text((left + 28, 67 + 40 * token), word, "middle")
    for expert in range(routing.num_experts):
        number, lost = (
            experts.count(expert),
            sum(d for e, d in zip(experts, drops, strict=True) if e == expert),
        )
        drawing.box((left + 206, 64 + 54 * expert), 96, 36, "paper", "mute")
        count = (
            f"{number - lost} of {number} pairs" if lost else f"{number} pair{'s' * (number > 1)}"
        )
        drawing.text((left + 254, 79 + 54 * expert), f"expert {expert}", "middle")
        drawing.text((left + 254, 94 + 54 * expert), count, "middle", "small")


def routing(page: dict[str, Any]) -> Drawing:
    """Draw top-2 routing without a limit and with a capacity."""
    drawing = Drawing(700, 320)
    drawing.text((24, 32), "top-2 of 4 experts", kind="title")
    draw_pairs(drawing, 24, page["tokens"], page["routing"], ())
    drawing.text((374, 32), "with a capacity of 3 pairs", kind="title")
    draw_pairs(drawing, 374, page["tokens"], page["limited"], ())
    drawing.text((24, 306), "line width: weight; dashed: dropped", kind="small")
    return drawing


def expert_choice(page: dict[str, Any]) -> Drawing:
    """Draw expert choice before and after the last token changes."""
    drawing, tokens = Drawing(700, 320), page["tokens"]
    before, after = (
        {
            (t, e)
            for t, e in zip(r.token_indices_N.tolist(), r.expert_ids_N.tolist(), strict=True)
            if t < 5
        }
        for r in (page["before"], page["after"])
    )
    drawing.text((24, 32), "expert choice, last token mat", kind="title")
    draw_pairs(drawing, 24, tokens, page["before"], before - after)
    drawing.text((374, 32), "the same, last token rug", kind="title")
    draw_pairs(drawing, 374, [*tokens[:5], "rug"], page["after"], after - before)
    drawing.text((24, 306), "orange: what the last token changed for earlier tokens", kind="small")
    return drawing


def loss_scale(page: dict[str, Any]) -> Drawing:
    """Draw the load-balancing loss against the share of tokens that collapsed."""
    drawing = Drawing(620, 340)
    drawing.text((24, 32), "load-balancing loss, E sum f P", kind="title")
    for loss in (0, 1, 4, 8, 16):
        drawing.line([(60, 290 - 15 * loss), (460, 290 - 15 * loss)], "grid")
        drawing.text((50, 295 - 15 * loss), str(loss), "end", "small")
    for share in (0, 0.5, 1):
        drawing.text((60 + 400 * share, 308), f"{share:.0%}", "middle", "small")
    drawing.text(
        (260, 326), "share of the tokens that choose the same k experts", "middle", "small"
    )
    for (num_experts, k), colour in {
        (8, 4): "violet",
        (8, 2): "green",
        (64, 8): "blue",
        (64, 4): "orange",
    }.items():
        routings = [page["collapsed"](step / 20, num_experts, k) for step in range(21)]
        losses = [load_balancing_loss(found).item() for found in routings]
        drawing.line([(60 + 20 * i, 290 - 15 * loss) for i, loss in enumerate(losses)], colour, 2.5)
        drawing.text((468, 295 - 15 * losses[-1]), f"E {num_experts}, k {k}: {losses[-1]:.0f}")
    return drawing


def cost(page: dict[str, Any]) -> Drawing:
    """Draw the parameters, active parameters and FLOPs of the blocks of the page."""
    drawing, d_model = Drawing(760, 250), page["d_model"]
    for row, (name, config) in enumerate(page["configs"].items()):
        drawing.text((24, 75 + 36 * row), name)
        for left, title, colour, value in (
            (150, "parameters", "blue", config.num_params(d_model)),
            (460, "active", "green", config.num_active_params(d_model)),
            (590, "FLOPs per token", "orange", config.flops_per_token(d_model, page["seq_len"])),
        ):
            if row == 0:
                drawing.text((left, 36), title, kind="title")
            width = 3.4e-6 * value if left == 150 else 18e-6 * value
            drawing.box((left, 60 + 36 * row), width, 20, colour, colour)
            drawing.text((left + width + 6, 75 + 36 * row), f"{value / 1e6:.1f} M", kind="small")
    return drawing


EXPERTS = ("#6ec6ca", "#f6cf71", "#f89c74", "#dcb0f2", "#87c55f", "#9eb9f3", "#fe88b1", "#c9db74")
"""Colour of each expert; dark text is readable on all of them."""
SHOWN = {
    "e32": ("32 experts", "blue"),
    "e8": ("8 experts", "green"),
    "e32_hash": ("32, chosen by hash", "violet"),
    "e32_frozen": ("32, random router", "mute"),
    "gelu": ("dense GELU", "orange"),
    "swiglu": ("dense SwiGLU", "orange"),
}
"""Block of the study `ladder` -> label and colour."""
SPARSE = [*SHOWN][:4]


@cache
def ladder() -> Comparison:
    """Return the arms of the study `ladder`: size, `_`, block."""
    return gather([STUDIES / "ladder"]).compare()


def draw_differences(drawing: Drawing, left: float) -> None:
    """Draw the final losses of blocks minus that of the best dense block, with 95 % intervals over seeds."""

    def at(difference: float) -> float:
        return left + 180 + 1250 * (difference + 0.08)

    drawing.text((left, 34), "Loss minus dense SwiGLU, nats per token", kind="title")
    for difference in (-0.08, -0.04, 0, 0.04):
        x = at(difference)
        drawing.line([(x, 62), (x, 206)], "grid" if difference else "mute", 1 if difference else 2)
        drawing.text((x, 222), f"{difference:+g}" if difference else "0", "middle", "small")
    for row, block in enumerate([*SPARSE, "gelu"]):
        found = ladder().arm(f"l_{block}").difference
        assert found is not None, block
        mean, low, high = found.interval
        y, colour = 78 + 29 * row, "blue" if mean < 0 else "orange"
        drawing.text((left, y + 4), SHOWN[block][0], kind="small")
        drawing.text((left + 164, y + 4), f"{mean:+.3f}", "end", "small")
        drawing.line([(at(low), y), (at(high), y)], colour, 2)
        drawing.dot((at(mean), y), colour)
    note = "ladder: equal FLOPs, 2 seeds, pooled 95 % bars"
    drawing.text((left, 246), note, kind="small")


@dataclass
class Panel:
    """Axes in a drawing, with its top left corner; ticks are a value and its label."""

    drawing: Drawing
    corner: Point
    title: str
    x_ticks: Mapping[float, str]
    y_ticks: Mapping[float, str]
    x_title: str
    legend: float = 148
    labels: int = 0

    def __post_init__(self) -> None:
        left, top = self.corner
        self.drawing.text((left, top), self.title, kind="title")
        (first, *_, last), bottom = self.x_ticks, top + 190
        for y, label in self.y_ticks.items():
            self.drawing.line([self.at(first, y), self.at(last, y)], "grid")
            self.drawing.text((left + 36, self.at(first, y)[1] + 4), label, "end", "small")
        for x, label in self.x_ticks.items():
            self.drawing.text((self.at(x, 0)[0], bottom + 18), label, "middle", "small")
        self.drawing.text((left + 161, bottom + 36), self.x_title, "middle", "small")

    def at(self, x: float, y: float) -> Point:
        (x0, *_, x1), (y0, *_, y1), (left, top) = self.x_ticks, self.y_ticks, self.corner
        return left + 44 + 234 * (x - x0) / (x1 - x0), top + 190 - 166 * (y - y0) / (y1 - y0)

    def curve(self, xs: Iterable[float], ys: Iterable[float], colour: str, dash: str = "") -> None:
        """Draw a line through the points that the axes cover."""
        (x0, *_), (*_, y1) = self.x_ticks, self.y_ticks
        points = [self.at(x, y) for x, y in zip(xs, ys, strict=True) if x >= x0 and y <= y1]
        self.drawing.line(points, colour, 2, dash)

    def label(self, text: str, colour: str) -> None:
        """Add a line to the legend, which is `legend` pixels from the left."""
        left, top = self.corner[0] + self.legend, self.corner[1] + 30 + 16 * self.labels
        self.drawing.line([(left, top - 4), (left + 16, top - 4)], colour, 3)
        self.drawing.text((left + 22, top), text, kind="small")
        self.labels += 1


def draw_curves(panel: Panel, seconds: bool) -> None:
    """Draw the validation losses of each seed at the largest size over FLOPs or seconds of training."""
    for block in ("swiglu", "e8", "e32"):
        arm, (label, colour) = ladder().arm(f"l_{block}"), SHOWN[block]
        whole = arm.training_seconds if seconds else arm.training_flops
        assert whole is not None, block
        for run in arm.results:
            steps, losses = run.validation.steps, run.validation.losses
            panel.curve([whole * step / arm.steps for step in steps], losses, colour)
        panel.label(label, colour)


def arms_of(block: str) -> list[Arm]:
    """Return the arms of a block, the smallest first."""
    return [arm for arm in ladder().arms if arm.name.partition("_")[2] == block]


def draw_over_sizes(
    panel: Panel, blocks: Iterable[str], value: Callable[[Arm], Sequence[float] | None]
) -> None:
    """Draw a value of blocks over the size of the model; after it, the ends of its interval."""
    for place, block in enumerate(blocks):
        label, colour = SHOWN[block]
        points = []
        for arm in arms_of(block):
            x = math.log(arm.budget.model.active_params) + 0.06 * place
            if found := value(arm):
                points.append((x, found[0]))
                panel.drawing.line([panel.at(x, y) for y in found[1:]], colour, 1.5)
                panel.drawing.dot(panel.at(*points[-1]), colour, 3.5)
        panel.curve(*zip(*points, strict=True), colour)
        panel.label(label, colour)


@torch.no_grad()
def draw_specialisation(panel: Panel) -> None:
    """Draw how far the loads of experts differ between two texts, for each layer of the shipped model."""
    model = open_model(MODEL)
    code = "".join(p.read_text("utf-8") for p in sorted(Path("moe_ffn/kernels/native").glob("*.h")))
    english = Path("LICENSE").read_text("utf-8")

    def loads(text: str) -> list[torch.Tensor]:
        ids = model.tokenizer.encode(text)[: 8 * 256].view(8, 256)
        routings = model.decoder(ids).routings.values()
        return [
            r.expert_ids_N.bincount(minlength=r.num_experts) / len(r.expert_ids_N) for r in routings
        ]

    ours, same, other = loads(code), loads(code[len(code) // 2 :]), loads(english)
    for name, colour, place, theirs in (
        ("C++ and a licence", "blue", 0.2, other),
        ("C++ and C++", "mute", 0.5, same),
    ):
        for layer, (one, two) in enumerate(zip(ours, theirs, strict=True)):
            distance = 0.5 * (one - two).abs().sum().item()
            corner, foot = panel.at(layer + place, distance), panel.at(layer, 0)
            panel.drawing.box(corner, 17, foot[1] - corner[1], colour, colour)
        panel.label(name, colour)


def claims() -> Drawing:
    """Draw a panel for each claim of the study `ladder`."""
    drawing = Drawing(1000, 560)
    millions = {0.305: "0.31 M", 0.636: "0.64 M", 1.36: "1.36 M", 3.44: "3.44 M"}
    sizes = {math.log(1e6 * size): label for size, label in millions.items()}
    active = "active parameters"

    def ticks(*values: float) -> dict[float, str]:
        return {value: f"{value:.1f}" for value in values}

    losses = ticks(1.7, 1.8, 1.9, 2.0, 2.1)
    flops = {x * 1e14: f"{x / 10:g}" for x in (3, 6, 9, 12)}
    title, unit = "Per FLOP, experts end lower", "10^15 FLOPs of training, largest size"
    draw_curves(Panel(drawing, (24, 34), title, flops, losses, unit), False)
    hours = {x * 3600.0: f"{x}" for x in (2, 3, 4, 5, 6, 7)}
    title, unit = "Seconds, estimated", "hours on one CPU core, largest size"
    draw_curves(Panel(drawing, (356, 34), title, hours, losses, unit), True)
    gains = {-0.15: "-0.15", -0.1: "-0.10", -0.05: "-0.05", 0: "0", 0.05: "+0.05", 0.1: "+0.10"}
    title = "Loss minus that of the best dense"
    panel = Panel(drawing, (688, 34), title, sizes, gains, active)
    draw_over_sizes(panel, SPARSE, lambda arm: arm.difference and arm.difference.interval)
    title, shares = "Share of the cost of the dense loss", ticks(0.7, 0.8, 0.9, 1.0)
    panel = Panel(drawing, (24, 304), title, sizes, shares, active, legend=54)
    for block, kind in product(("e8", "e32"), ("flops", "seconds")):
        (label, colour), points = SHOWN[block], []
        for arm in arms_of(block):
            if getattr(arm.reached, kind, None) is None:
                continue
            whole = getattr(ladder().base_of(arm), f"training_{kind}")
            x = math.log(arm.budget.model.active_params)
            points.append((x, getattr(arm.reached, kind) / whole))
        panel.curve(*zip(*points, strict=True), colour, "" if kind == "flops" else "5 4")
        if kind == "flops":
            panel.label(f"{label}, FLOPs; dashed: time", colour)
    drawing.text((84, 414), "smallest size:", kind="small")
    drawing.text((84, 430), "not reached", kind="small")
    title, loads = "Busiest expert: excess over even load", ticks(0, 0.5, 1.0, 1.5, 2.0)
    panel = Panel(drawing, (356, 304), title, sizes, loads, active, legend=54)
    draw_over_sizes(panel, SPARSE, lambda arm: [arm.mean("max_violation")])
    layers = {0: "", 0.5: "layer 0", 1.5: "1", 2.5: "2", 3.5: "3", 4: ""}
    title, moved = "Pairs at other experts, demo model", ticks(0, 0.2, 0.4, 0.6)
    unit = "share that goes elsewhere in the other text"
    draw_specialisation(Panel(drawing, (688, 304), title, layers, moved, unit, legend=60))
    return drawing


def overview() -> Drawing:
    """Draw the picture of the README: the expert of each token, and losses of blocks."""
    drawing, width, height = Drawing(1000, 262), 42, 36
    text = b"int size; /* the size of the list */ return size;"
    model = open_model(MODEL)
    trace = trace_text(MODEL, model.decoder, model.tokenizer, text)
    drawing.text((24, 34), "Each token's first-choice expert, layer by layer", kind="title")
    for column, token in enumerate(trace.tokens):
        left = 72 + width * column
        drawing.text(
            (left + width / 2, 66), token.token.replace("\\n␣␣␣", "\\n"), "middle", "small"
        )
        for row, layer in enumerate(trace.layers):
            expert = trace.visits(layer)[column].choices[0].expert
            corner = (left, 76 + height * row)
            drawing.box(corner, width, height, EXPERTS[expert], "paper")
            drawing.text((left + width / 2, corner[1] + 23), str(expert), "middle", "dark")
    for row in range(len(trace.layers)):
        drawing.text((24, 99 + height * row), f"layer {row}", kind="small")
    note = "moe-ffn demo shows this for any text: a small model trained on Linux source, 8 experts, top-2"
    drawing.text((24, 246), note, kind="small")
    draw_differences(drawing, 640)
    return drawing


def draw(folder: Path) -> None:
    """Write all figures into a folder."""
    overview().save(
        folder / "overview.svg", "Experts of tokens, and the loss of dense and sparse models"
    )
    claims().save(
        folder / "ladder.svg", "Five results of the study ladder, and experts of the demo"
    )
    how = run_page("how_routing_works.md")
    positions().save(folder / "positions.svg", "Inputs that each output reads")
    memory().save(folder / "memory.svg", "A feed-forward block as a key-value memory")
    routing(how).save(folder / "routing.svg", "Routing of six tokens to four experts")
    expert_choice(how).save(folder / "expert_choice.svg", "Expert choice before and after a change")
    loss_scale(run_page("loss_scales.md")).save(folder / "loss_scale.svg", "Load-balancing loss")
    cost(run_page("cost.md")).save(folder / "cost.svg", "Cost of five feed-forward blocks")


if __name__ == "__main__":
    draw(FOLDER / "figures")
