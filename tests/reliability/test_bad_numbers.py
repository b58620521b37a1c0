"""A step with a NaN, an infinity or a loss far too high is skipped, counted and explained; too many in a row
end the run.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from moe_ffn.cli.command_line import parse_config
from moe_ffn.data.prepare import prepare
from moe_ffn.runs.assemble import quiet_libraries
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.folder import ALARMS_FILE
from moe_ffn.training import module as module_file
from moe_ffn.training.module import LanguageModel
from moe_ffn.training.recovery.checkpoint_file import read_checkpoint
from tests.helpers.cases import cases
from tests.helpers.fitted import OWN_BLOCK, Fault, Fitted
from tests.helpers.tiny_runs import options, run

# -- one step is skipped

FFNS = {
    "dense": "dense",
    "moe": "{type: moe, num_experts: 4, router: {type: sigmoid_top_k, k: 2}}",
}
GRADIENT = "layers.1.attention_norm.weight"
ROUTER = "layers.1.ffn.router.projection"
PLACES = {
    "the loss": ("loss", "the objective's total"),
    "one gradient": (GRADIENT, f"the gradient of decoder.{GRADIENT}"),
    "an embedding": ("embedding", "decoder.embedding"),
    "a hidden state": ("into:layers.1", "the input of decoder.layers.1"),
    "router logits": (ROUTER, f"decoder.{ROUTER}"),
}
"""Places where a number breaks: as a fault names them, and as the run has to name them."""
SKIPPED = 8
"""The optimizer step, of twelve, in which it breaks."""
QUICK = [
    f"{math.nan} in {place}, moe, accumulation {accumulate}"
    for place, accumulate in (("one gradient", 1), ("a hidden state", 4), ("router logits", 1))
]


def faults() -> Iterator[tuple[str, tuple[Any, ...]]]:
    for accumulate, ffn, place in product((1, 4), FFNS, PLACES):
        if ffn == "dense" and place == "router logits":
            continue
        for value in (math.nan, math.inf, *((100.0,) if place == "the loss" else ())):
            what = "a loss 100 times too high" if value == 100 else f"{value} in {place}"
            yield f"{what}, {ffn}, accumulation {accumulate}", (ffn, place, value, accumulate)


class LeaveOut(Callback):
    """Takes the gradients of one optimizer step away, and what steers its routers."""

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        assert isinstance(pl_module, LanguageModel)
        if trainer.global_step + 1 == SKIPPED:
            pl_module.zero_grad(set_to_none=True)
            pl_module.balance_updater.reset()


@pytest.mark.parametrize(("ffn", "place", "value", "accumulate"), cases(faults(), QUICK))
def test_a_step_that_breaks(
    tmp_path: Path, ffn: str, place: str, value: float, accumulate: int
) -> None:
    """One bad batch skips the step; everything else is as if the step had been left out."""
    config = config_of(tmp_path, ffn, accumulate)
    broken = (SKIPPED - 1) * accumulate + accumulate // 2
    where, named = PLACES[place]
    fault = Fault(where, value, range(broken, broken + 1))

    with patch.object(module_file, "objective", fault.objective(module_file.objective)):
        faulty = fit(config, tmp_path / "faulty", fault)
    expected = state_of(fit(config, tmp_path / "expected", LeaveOut()))

    assert fault.num_strikes, "nothing was broken"
    assert faulty.module.guard.num_skipped == 1
    assert faulty.trainer.global_step == config.trainer.max_steps
    for name, tensor in state_of(faulty).items():
        assert tensor.isfinite().all(), f"{name} is not finite"
        assert torch.equal(tensor, expected[name]), f"{name} is not as without the step"
    alarms = map(json.loads, (tmp_path / "faulty" / ALARMS_FILE).read_text().splitlines())
    (alarm,) = (alarm for alarm in alarms if alarm["kind"] == "skipped_step")
    assert alarm["step"] == SKIPPED
    if math.isfinite(value):
        assert "times the median" in alarm["message"]
    else:
        assert alarm["message"].partition(", which began in ")[2] == named


def config_of(folder: Path, ffn: str, accumulate: int) -> TrainConfig:
    given = options(
        folder,
        model__ffn=FFNS[ffn],
        trainer__accumulate_grad_batches=str(accumulate),
        trainer__validate_every_n_steps="12",
        sample__num_tokens="0",
    )
    return parse_config(given, TrainConfig, command="train")


def fit(config: TrainConfig, folder: Path, watcher: Callback) -> Fitted:
    folder.mkdir()
    with warnings.catch_warnings():
        quiet_libraries()
        return Fitted(config, prepare(config.data), folder, watcher)


def state_of(fitted: Fitted) -> dict[str, Any]:
    """State that training changes: parameters, biases and the optimizer's moments and counts."""
    moments = fitted.trainer.optimizers[0].state_dict()["state"]
    return {
        **fitted.module.state_dict(),
        **{f"{p}/{name}": value for p, of in moments.items() for name, value in of.items()},
    }


# -- every step breaks

# From the seventh batch of training on, and only on the last rank.
BREAKS = """self.num_batches = getattr(self, "num_batches", 0) + self.training
        import os
        if os.environ.get("LOCAL_RANK", "0") == "%s" and self.num_batches > 6:
            x = x * torch.nan"""


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "parallel"), [(1, "null"), (2, "null"), (2, "{shard: 2}")])
def test_too_many_in_a_row(tmp_path: Path, ranks: int, parallel: str) -> None:
    (tmp_path / "breaks.py").write_text(OWN_BLOCK % (BREAKS % (ranks - 1)))
    block = f"{{type: '{tmp_path / 'breaks.py'}:Config'}}"

    done = run(
        *options(
            tmp_path,
            model__ffn_at=f"{{'1': {block}}}",
            trainer__devices=str(ranks),
            parallel=parallel,
            trainer__guard__max_skipped_in_a_row="3",
            trainer__max_steps="40",
            run__name="broken",
        )
    )

    folder = tmp_path / "runs" / "broken"
    assert done.code == 3, f"exit code {done.code}: {done.stderr[-500:]}"
    assert "Traceback" not in done.stderr, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("diverged: ")]
    assert len(said) == 2, done.stderr
    assert said[0].startswith("diverged: step 9: "), said[0]
    assert said[0].endswith("began in decoder.layers.1.ffn"), said[0]
    assert str(folder / "checkpoints") in said[1], said[1]
    assert "optimizer.learning_rate" in said[1], said[1]
    alarms = [line for line in done.stderr.splitlines() if line.startswith("alarm: ")]
    assert len(alarms) == 1, f"one line for a row of skipped steps, got {alarms}"
    assert (folder / "report.html").is_file(), "no page was made"
    for path in (folder / "checkpoints").glob("*.ckpt"):
        for name, tensor in read_checkpoint(path)["state_dict"].items():
            assert tensor.isfinite().all(), f"{name} in {path.name} is not finite"
