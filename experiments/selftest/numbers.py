"""Numbers that go wrong: steps that are skipped and explained, and a run that diverges."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.selftest.case import Case, Chapter
from experiments.selftest.scene import options, run

if TYPE_CHECKING:
    from moe_ffn.runs.config import TrainConfig

FFNS = {
    "dense": "dense",
    "moe": "{type: moe, num_experts: 4, router: {type: sigmoid_top_k, k: 2}}",
}
GRADIENT = "layers.1.attention_norm.weight"
PLACES = {
    "loss": "the objective's total",
    GRADIENT: f"the gradient of decoder.{GRADIENT}",
    "embedding": "decoder.embedding",
    "into:layers.1": "the input of decoder.layers.1",
    "layers.1.ffn.router.projection": "decoder.layers.1.ffn.router.projection",
}
"""Where a number breaks -> what the run has to name."""
NAMES = {
    GRADIENT: "one gradient",
    "into:layers.1": "a hidden state",
    "layers.1.ffn.router.projection": "router logits",
}
SKIPPED = 8
"""The optimizer step, of twelve, in which it breaks."""


def _cases() -> Iterator[Case]:
    for accumulate, (ffn, place) in product((1, 4), product(FFNS, PLACES)):
        if ffn == "dense" and "router" in place:
            continue
        for value in (math.nan, math.inf, *((100.0,) if place == "loss" else ())):
            what = (
                "a loss 100 times too high"
                if value == 100
                else f"{value} in {NAMES.get(place, place)}"
            )
            short = (ffn, accumulate) == ("moe", 1) and math.isnan(value)
            yield Case(
                f"{what}, {ffn}, accumulation {accumulate}",
                lambda folder, at=(ffn, place, value, accumulate): _skips_once(folder, *at),
                short=short and place in (GRADIENT, "layers.1.ffn.router.projection"),
            )
    for limit in (1, 3, 10):
        yield Case(
            f"every step breaks, at most {limit} in a row",
            lambda folder, limit=limit: _ends_the_run(folder, limit),
        )
    yield Case(
        "every step breaks on one of two ranks", lambda folder: _ends_the_run(folder, 3, ranks=2)
    )
    for dtype, how in product(("float16", "bfloat16"), ("weights too", "autocast")):
        yield Case(
            f"huge activations in every router, {dtype}, {how}",
            lambda _, dtype=dtype, autocast=how == "autocast": _routes_the_huge(dtype, autocast),
            short=True,
        )


CHAPTER = Chapter(
    "numbers",
    "A step with a NaN, an infinity or a loss far too high is skipped, counted and explained; too many in a "
    "row end the run.",
    _cases,
)


def _skips_once(folder: Path, ffn: str, place: str, value: float, accumulate: int) -> None:
    """One batch of step 8 breaks; all else is as if that step had been left out."""
    import torch

    from experiments.selftest.faults import Fault, Fit, LeaveOut

    config = _config(folder, ffn, accumulate)
    broken = (SKIPPED - 1) * accumulate + accumulate // 2
    fault = Fault(place, value, range(broken, broken + 1))

    faulty = Fit(config, folder / "faulty", fault)
    expected = Fit(config, folder / "expected", LeaveOut(SKIPPED))

    assert fault.num_strikes, "nothing was broken"
    guard, steps = faulty.module.guard, faulty.trainer.global_step
    assert guard.num_skipped == 1, f"{guard.num_skipped} steps were skipped, not 1"
    assert steps == config.trainer.max_steps, f"the run ended at step {steps}"
    for name, tensor in faulty.state.items():
        assert tensor.isfinite().all(), f"{name} is not finite"
        assert torch.equal(tensor, expected.state[name]), f"{name} is not as without the step"
    alarms = map(json.loads, (faulty.folder / "alarms.jsonl").read_text().splitlines())
    (alarm,) = (alarm for alarm in alarms if alarm["kind"] == "skipped_step")
    assert alarm["step"] == SKIPPED, f"step {alarm['step']} is said to be skipped, not {SKIPPED}"
    if math.isfinite(value):
        assert "times the median" in alarm["message"], alarm["message"]
    else:
        named = alarm["message"].partition(", which began in ")[2]
        assert named == PLACES[place], f"it began in {PLACES[place]}; named was: {alarm['message']}"


def _config(folder: Path, ffn: str, accumulate: int) -> TrainConfig:
    from moe_ffn.cli.command_line import parse_config
    from moe_ffn.runs.config import TrainConfig

    given = options(
        folder,
        model__ffn=FFNS[ffn],
        trainer__accumulate_grad_batches=str(accumulate),
        trainer__validate_every_n_steps="12",
        sample__num_tokens="0",
    )
    return parse_config(given, TrainConfig, command="selftest")


BREAKS = '''
import os

import torch
from moe_ffn import FFNBlock, FFNConfig, FFNOutput


class BreaksConfig(FFNConfig, frozen=True):
    """Returns its input, and from the seventh batch of training on NaN; on the last rank alone."""

    last_rank: str

    def build(self, d_model):
        return Breaks(self.last_rank)

    def num_params(self, d_model):
        return 0

    def flops_per_token(self, d_model, seq_len):
        return 0


class Breaks(FFNBlock):
    def __init__(self, last_rank):
        super().__init__()
        self.breaks = os.environ.get("LOCAL_RANK", "0") == last_rank
        self.num_batches = 0

    def forward(self, x, context=None):
        self.num_batches += self.training
        return FFNOutput(x * torch.nan if self.breaks and self.num_batches > 6 else x)
'''


def _ends_the_run(folder: Path, limit: int, ranks: int = 1) -> None:
    """A block of somebody's own breaks for good: the program ends, and says all that is needed."""
    import torch

    (folder / "breaks.py").write_text(BREAKS)
    block = f"{{type: '{folder / 'breaks.py'}:BreaksConfig', last_rank: '{ranks - 1}'}}"
    done = run(
        *options(
            folder,
            model__ffn_at=f"{{'1': {block}}}",
            trainer__devices=str(ranks),
            trainer__strategy="auto" if ranks == 1 else "ddp",
            trainer__guard__max_skipped_in_a_row=str(limit),
            trainer__max_steps="40",
            run__name="broken",
        )
    )
    runs = folder / "runs" / "broken"
    assert done.code == 3, f"exit code {done.code}: {done.stderr[-500:]}"
    assert "Traceback" not in done.stderr, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("diverged: ")]
    assert len(said) == 2, done.stderr
    assert said[0].startswith(f"diverged: step {6 + limit}: "), said[0]
    assert said[0].endswith("began in decoder.layers.1.ffn"), said[0]
    assert str(runs / "checkpoints") in said[1], said[1]
    assert "optimizer.learning_rate" in said[1], said[1]
    alarms = [line for line in done.stderr.splitlines() if line.startswith("alarm: ")]
    assert len(alarms) == 1, f"one line for a row of skipped steps, got {alarms}"
    assert (runs / "report.html").is_file(), "no page was made"
    for path in (runs / "checkpoints").glob("*.ckpt"):
        for name, tensor in torch.load(path, weights_only=True)["state_dict"].items():
            assert tensor.isfinite().all(), f"{name} in {path.name} is not finite"


def _routes_the_huge(dtype: str, autocast: bool) -> str:
    """Every router, in training and evaluation, on values up to the largest of float16."""
    import torch

    from moe_ffn.outputs import TokenContext
    from moe_ffn.routing import RouterConfig

    count = 0
    num_tokens, d_model, num_experts = 32, 16, 4
    lowered = getattr(torch, dtype)
    for kind, training, size in product(RouterConfig.members, (True, False), (1e4, 6e4)):
        torch.manual_seed(0)
        router = RouterConfig.model_validate(kind).build(d_model, num_experts).train(training)
        with torch.no_grad():
            for parameter in router.parameters():
                parameter.mul_(30)  # logits far above what float16 holds
        if not autocast:
            router = router.to(lowered)
        x_TD = (size * torch.randn(num_tokens, d_model).sign()).to(lowered).requires_grad_()
        context = TokenContext(token_ids=torch.arange(num_tokens), sequence_length=num_tokens)
        with torch.autocast("cpu", lowered, enabled=autocast):
            routing = router(x_TD, context)
        what = f"{kind}, {'training' if training else 'evaluation'}, x = {size:g}"
        for name in ("weights_N", "logits_TE", "scores_TE"):
            value = getattr(routing, name)
            assert value.isfinite().all(), f"{what}: {name} is not finite"
            assert value.dtype == torch.float32, f"{what}: {name} is {value.dtype}"
        ids_N = routing.expert_ids_N[routing.real_N]
        assert ((ids_N >= 0) & (ids_N < num_experts)).all(), f"{what}: no such expert"
        if routing.weights_N.requires_grad:
            (gradient,) = torch.autograd.grad(routing.weights_N.sum(), x_TD)
            assert gradient.isfinite().all(), f"{what}: the gradient is not finite"
        count += 1
    return f"{count} routings"
