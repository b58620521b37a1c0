"""Draw the figures of these pages as SVG: `python docs/explanation/figures.py`, from the root of a checkout.

Numbers come from moe_ffn; the figures of a page use the variables of its Python blocks.
"""

from __future__ import annotations

import contextlib
import io
import re
from html import escape
from pathlib import Path
from typing import Any

import torch

from moe_ffn import DecoderConfig, build_ffn, load_balancing_loss
from moe_ffn.ffn.networks import memories

FOLDER = Path(__file__).parent

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
"""


class Drawing:
    """An SVG of a width and a height; colours are names of `STYLE`."""

    def __init__(self, width: int, height: int) -> None:
        self.size = (width, height)
        self.parts = [f'<rect width="{width}" height="{height}" rx="8" fill="var(--paper)"/>']

    def text(self, x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> None:
        place = f'x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}"'
        self.parts.append(f'<text {place} class="{kind}">{escape(words)}</text>')

    def turned(self, x: float, y: float, words: str) -> None:
        turn = f'transform="rotate(-90 {_n(x)} {_n(y)})"'
        self.parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="middle" class="small" {turn}>{words}</text>'
        )

    def box(self, x: float, y: float, w: float, h: float, fill: str, line: str = "grid") -> None:
        place = f'x="{_n(x)}" y="{_n(y)}" width="{_n(w)}" height="{_n(h)}"'
        self.parts.append(f'<rect {place} rx="2" fill="var(--{fill})" stroke="var(--{line})"/>')

    def line(
        self, points: list[tuple[float, float]], colour: str, width: float = 1.5, dash: str = ""
    ) -> None:
        places = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        look = f'fill="none" stroke="var(--{colour})" stroke-width="{_n(width)}"'
        self.parts.append(f'<polyline points="{places}" {look} stroke-dasharray="{dash}"/>')

    def arrow(
        self, start: tuple[float, float], end: tuple[float, float], colour: str, width: float = 2
    ) -> None:
        self.line([start, end], colour, width)
        back = complex(*start) - complex(*end)
        if abs(back) < 8:
            return
        wings = [
            complex(*end) + 8 * back / abs(back) * complex(0.94, side) for side in (0.34, -0.34)
        ]
        self.line(
            [(wings[0].real, wings[0].imag), end, (wings[1].real, wings[1].imag)], colour, width
        )

    def save(self, path: Path, title: str) -> None:
        width, height = self.size
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
        inside = [f"<title>{escape(title)}</title>", f"<style>{STYLE}</style>", *self.parts]
        path.write_text(
            "\n".join([f'{head} height="{height}">', *inside, "</svg>\n"]), encoding="utf-8"
        )


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


# -- what the FFN stores


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
    x, cell, top = torch.randn(1, 8, 16), 22, 50
    drawing = Drawing(720, 270)
    drawing.turned(24, top + 4 * cell, "output position")
    for panel, (title, function) in enumerate(panels.items()):
        left = 44 + 230 * panel
        drawing.text(left, 32, title, kind="title")
        drawing.text(left + 4 * cell, 252, "input position", "middle", "small")
        for j in range(8):
            other = x.clone()
            other[:, j] += 1
            change_S = (function(other) - function(x))[0].abs().amax(dim=-1)
            for i in range(8):
                place = (left + cell * j, top + cell * i, cell, cell)
                drawing.box(*place, "blue" if change_S[i] > 0 else "paper")
    return drawing


@torch.no_grad()
def memory() -> Drawing:
    """Draw a token of two numbers in a ReLU block of eight units: keys, activations, sum of values."""
    torch.manual_seed(5)
    block = build_ffn({"type": "dense", "activation": "relu", "d_ff": 8}, d_model=2)
    x = torch.tensor([0.9, 0.5])
    (found,) = memories(block, x.unsqueeze(0))
    m, values = found.activations_NF[0], found.values_FD
    drawing = Drawing(760, 300)
    drawing.text(24, 32, "keys k and the token x", kind="title")
    centre, scale = (125.0, 165.0), 95 / block.up.weight.norm(dim=1).max().item()

    def at(origin: tuple[float, float], vector: torch.Tensor, scale: float) -> tuple[float, float]:
        return origin[0] + scale * vector[0].item(), origin[1] - scale * vector[1].item()

    for unit in range(8):
        drawing.arrow(
            centre, at(centre, block.up.weight[unit], scale), "blue" if m[unit] > 0 else "grid"
        )
    drawing.arrow(centre, at(centre, x, 100), "orange", 3)
    drawing.text(at(centre, x, 112)[0], at(centre, x, 100)[1], "x", kind="title")
    drawing.text(270, 32, "activations m = relu(k . x)", kind="title")
    for unit in range(8):
        y = 52 + 27 * unit
        drawing.text(270, y + 15, f"unit {unit}", kind="small")
        drawing.box(
            316, y, max(110 * (m[unit] / m.max()).item(), 1), 20, "blue" if m[unit] > 0 else "grid"
        )
        drawing.text(436, y + 15, f"{m[unit]:.2f}")
    drawing.text(510, 32, "output = sum of m v", kind="title")
    end, points = torch.zeros(2), [torch.zeros(2)]
    for unit in m.nonzero().flatten().tolist():
        points.append(points[-1] + m[unit] * values[unit])
    end, path = block(x).hidden, torch.stack(points)
    torch.testing.assert_close(path[-1], end)
    low, high = path.amin(dim=0), path.amax(dim=0)
    scale = 190 / (high - low).max().item()
    origin = (530 - scale * low[0].item(), 255 + scale * low[1].item())
    for start, stop in zip(path, path[1:], strict=False):
        drawing.arrow(at(origin, start, scale), at(origin, stop, scale), "blue")
    drawing.arrow(origin, at(origin, end, scale), "orange", 3)
    drawing.text(24, 284, "blue: active; grey: silent", kind="small")
    return drawing


# -- how routing works


def tokens_and_experts(
    drawing: Drawing,
    left: float,
    tokens: list[str],
    routing: Any,
    lit: set[tuple[int, int]],
    loads: bool,
) -> None:
    """Draw the pairs of a routing as lines; those in `lit` are orange."""

    def token_y(token: int) -> float:
        return 62 + 40 * token

    def expert_y(expert: int) -> float:
        return 82 + 54 * expert

    pairs = zip(
        routing.token_ids_N.tolist(),
        routing.expert_ids_N.tolist(),
        routing.weights_N.tolist(),
        routing.dropped_N.tolist(),
        strict=True,
    )
    counts = [0] * routing.num_experts
    for token, expert, weight, dropped in pairs:
        counts[expert] += 1
        colour = "orange" if dropped or (token, expert) in lit else "blue"
        ends = [(left + 56, token_y(token)), (left + 206, expert_y(expert))]
        drawing.line(ends, colour, 1.5 if dropped else 1 + 5 * weight, "5 4" if dropped else "")
    for token, word in enumerate(tokens):
        drawing.box(left, token_y(token) - 14, 56, 28, "paper", "mute")
        drawing.text(left + 28, token_y(token) + 5, word, "middle")
    for expert, count in enumerate(counts):
        drawing.box(left + 206, expert_y(expert) - 18, 84, 36, "paper", "mute")
        words = (
            f"{expert}: {count} pairs"
            if loads and count != 1
            else f"{expert}: {count} pair"
            if loads
            else ""
        )
        drawing.text(left + 248, expert_y(expert) + 5, words or f"expert {expert}", "middle")


def routing(page: dict[str, Any]) -> Drawing:
    """Draw top-2 routing without a limit and with a capacity of 3."""
    drawing = Drawing(700, 300)
    for left, title, found in (
        (24, "top-2 of 4 experts", page["routing"]),
        (380, "with a capacity of 3 pairs", page["limited"]),
    ):
        drawing.text(left, 32, title, kind="title")
        tokens_and_experts(drawing, left, page["tokens"], found, set(), loads=True)
    return drawing


def expert_choice(page: dict[str, Any]) -> Drawing:
    """Draw expert choice before and after the last token changes; what changed for others is orange."""
    drawing = Drawing(700, 300)
    before, after = (
        set(zip(r.token_ids_N.tolist(), r.expert_ids_N.tolist(), strict=True))
        for r in (page["before"], page["after"])
    )
    last = len(page["tokens"]) - 1
    for left, title, tokens, found, lit in (
        (24, "before", page["tokens"], page["before"], before - after),
        (
            380,
            "after the last token changed",
            [*page["tokens"][:-1], "rug"],
            page["after"],
            after - before,
        ),
    ):
        drawing.text(left, 32, title, kind="title")
        earlier = {pair for pair in lit if pair[0] != last}
        tokens_and_experts(drawing, left, tokens, found, earlier, loads=False)
    return drawing


# -- loss scales


def loss_scale(page: dict[str, Any]) -> Drawing:
    """Draw the load-balancing loss against the share of tokens that collapsed."""
    drawing = Drawing(620, 340)
    drawing.text(24, 32, "load-balancing loss, E sum f P", kind="title")

    def at(share: float, loss: float) -> tuple[float, float]:
        return 60 + 400 * share, 290 - 15 * loss

    for loss in (0, 1, 4, 8, 16):
        drawing.line([at(0, loss), at(1, loss)], "grid", 1)
        drawing.text(50, at(0, loss)[1] + 5, str(loss), "end", "small")
    for share in (0, 0.5, 1):
        drawing.text(at(share, 0)[0], 308, f"{share:.0%}", "middle", "small")
    drawing.text(
        at(0.5, 0)[0], 326, "share of the tokens that choose the same k experts", "middle", "small"
    )
    sizes = {(8, 4): "violet", (8, 2): "green", (64, 8): "blue", (64, 4): "orange"}
    for (num_experts, k), colour in sizes.items():
        shares = [step / 20 for step in range(21)]
        losses = [
            load_balancing_loss(page["collapsed"](share, num_experts, k)).item() for share in shares
        ]
        drawing.line([at(*point) for point in zip(shares, losses, strict=True)], colour, 2.5)
        drawing.text(
            at(1, 0)[0] + 8, at(0, losses[-1])[1] + 5, f"E {num_experts}, k {k}: {losses[-1]:.0f}"
        )
    return drawing


# -- cost


def cost(page: dict[str, Any]) -> Drawing:
    """Draw the parameters, active parameters and FLOPs of the blocks of the page."""
    drawing = Drawing(760, 250)
    d_model, configs = page["d_model"], page["configs"]
    panels = {
        "parameters": [config.num_params(d_model) for config in configs.values()],
        "active": [config.num_active_params(d_model) for config in configs.values()],
        "FLOPs per token": [c.flops_per_token(d_model, page["seq_len"]) for c in configs.values()],
    }
    for row, name in enumerate(configs):
        drawing.text(24, 75 + 36 * row, name)
    colours = ("blue", "green", "orange")
    for (title, values), left, colour in zip(panels.items(), (150, 470, 610), colours, strict=True):
        scale = (230 if title == "parameters" else 70) / max(values)
        drawing.text(left, 36, title, kind="title")
        for row, value in enumerate(values):
            drawing.box(left, 60 + 36 * row, value * scale, 20, colour, colour)
            drawing.text(
                left + value * scale + 6, 75 + 36 * row, f"{value / 1e6:.1f} M", kind="small"
            )
    return drawing


def draw(folder: Path) -> None:
    """Write all figures into a folder."""
    how = run_page("how_routing_works.md")
    figures = {
        "positions": (positions(), "Inputs that each output reads"),
        "memory": (memory(), "A feed-forward block as a key-value memory"),
        "routing": (routing(how), "Routing of six tokens to four experts"),
        "expert_choice": (expert_choice(how), "Expert choice leaks the future"),
        "loss_scale": (loss_scale(run_page("loss_scales.md")), "Load-balancing loss"),
        "cost": (cost(run_page("cost.md")), "Cost of five feed-forward blocks"),
    }
    for name, (drawing, title) in figures.items():
        drawing.save(folder / f"{name}.svg", title)


if __name__ == "__main__":
    draw(FOLDER / "figures")
