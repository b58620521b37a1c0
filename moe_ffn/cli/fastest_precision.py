"""`trainer.precision: fastest`: the training step itself, timed in both formats before a run begins."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_ffn.config.errors import first_line
from moe_ffn.data.batches import TrainBatches
from moe_ffn.data.prepare import PreparedData
from moe_ffn.kernels.base import product_dtype_on_cpu
from moe_ffn.runs.assemble import build_module
from moe_ffn.runs.config import TrainConfig
from moe_ffn.studies.timing import MIN_ROUNDS, interleave
from moe_ffn.training.evaluation import autocast_of
from moe_ffn.training.module import LanguageModel, LoadedBatch

PLAIN, MIXED = "32-true", "bf16-mixed"

MIN_SPEEDUP = 1.1
"""The speedup that bf16-mixed must reach; medians of the same step differ by some percent."""

ROUNDS, PATIENCE = 7, 1.0
"""Steps of each format that are timed, and the seconds after which `MIN_ROUNDS` of them are enough."""

MAX_SHARE = 0.1
"""The share of a run's batches that the shortest measurement may cost."""


@dataclass(frozen=True)
class Step:
    """Forward pass, objective and backward pass of a batch in one format, as a candidate to be timed."""

    precision: str
    module: LanguageModel
    batch: LoadedBatch
    calls: int = 1

    def run(self) -> None:
        with autocast_of(self.precision, torch.device("cpu")):
            loss = self.module.training_step(self.batch, 0)["loss"]
        loss.backward()
        if not math.isfinite(loss.item()):
            raise ArithmeticError(f"the loss is {loss.item()}")

    def reset(self) -> None:
        self.module.zero_grad(set_to_none=True)


def timed(steps: Sequence[Step]) -> list[tuple[float, ...]]:
    """Seconds of each step, in turns, after one that warms up."""
    return interleave(steps, ROUNDS, patience=PATIENCE)


def fastest_precision(config: TrainConfig, data: PreparedData) -> tuple[str, str]:
    """The format in which the model of a run trains faster on this CPU, and why, in brackets.

    bf16-mixed where its step is `MIN_SPEEDUP` times as fast, and otherwise 32-true. The optimizer, whose
    weights are float32 in both, is not part of the step. A second model is built for this and given up, on
    the first batch of the run, and the random state is put back.
    """
    if product_dtype_on_cpu(torch.bfloat16) is not torch.bfloat16:
        return PLAIN, "not measured: this CPU has no arithmetic in bfloat16"
    num_steps = 2 * (MIN_ROUNDS + 1)
    num_batches = config.trainer.max_steps * config.trainer.accumulate_grad_batches
    if num_steps > MAX_SHARE * num_batches:
        return PLAIN, f"not measured: {num_steps} steps are too many beside a run of {num_batches}"
    try:
        plain, mixed = _medians(config, data)
    except Exception as error:  # one that is no matter of the format, the run reports itself
        return PLAIN, f"not measured: {first_line(error)}"
    finally:
        gc.collect()  # the second model
    chosen = MIXED if plain >= MIN_SPEEDUP * mixed else PLAIN
    return (
        chosen,
        f"a step takes {mixed * 1e3:,.1f} ms in {MIXED}, {plain * 1e3:,.1f} ms in {PLAIN}",
    )


def _medians(config: TrainConfig, data: PreparedData) -> list[float]:
    """The median seconds of a step in each format."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        module = build_module(config, data)
        shape = config.data
        batch = TrainBatches(
            data.train, seq_len=shape.seq_len, batch_size=shape.batch_size, seed=config.seed
        )[0]
        loaded = LoadedBatch(index=0, input_ids=batch.input_ids, target_ids=batch.target_ids)
        steps = [Step(precision, module, loaded) for precision in (PLAIN, MIXED)]
        return [statistics.median(seconds) for seconds in timed(steps)]
