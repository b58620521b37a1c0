"""The dense blocks beside the same composition written out by hand: the interface must cost nothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.benchmark.layers import Layer, PlainSwiGLU, Tokens
from experiments.benchmark.session import Session
from experiments.benchmark.shapes import Shape
from moe_ffn import build_ffn

WIDTH = 1024
SHAPE = Shape(2048, 256, WIDTH, 1, 1, "fp32")

LIMIT = 1.03
"""What the machine's noise leaves of a ratio of 1."""

MORE_ROUNDS = 5
"""Times as many as elsewhere, since the ratio has to be known to a few percent."""


class PlainDense(nn.Module):
    """down(gelu(up x))."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def run(session: Session) -> None:
    session.say(
        f"T {SHAPE.num_tokens}, D {SHAPE.d_model}, d_ff {WIDTH}, fp32, forward and backward"
    )
    torch.manual_seed(0)
    tokens = Tokens.of(SHAPE, session.device)
    plain = {"dense": PlainDense, "swiglu": PlainSwiGLU}
    layers: list[Layer] = []
    for name, module in plain.items():
        by_hand = module(SHAPE.d_model, WIDTH).to(session.device)
        block = build_ffn({"type": name, "d_ff": WIDTH}, d_model=SHAPE.d_model).to(session.device)
        block.load_state_dict(by_hand.state_dict())
        layers += [Layer(f"plain {name}", by_hand), Layer(f"moe_ffn {name}", block)]
    passes = {layer.name: layer.training_pass(tokens) for layer in layers}
    timings = session.time(passes, more=MORE_ROUNDS)
    for number, name in enumerate(plain):
        if number:
            session.say()
        pair = [layer for layer in layers if layer.name.endswith(f" {name}")]
        session.show(pair, timings, (f"plain {name}",))
        session.keep("blocks", name, SHAPE, pair, timings, to=f"plain {name}")
        names = (f"moe_ffn {name}", f"plain {name}")
        session.promise_ratio("blocks", name, f"time / plain {name}", LIMIT, timings, names)
