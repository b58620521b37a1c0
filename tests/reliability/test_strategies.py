"""A run in any precision, by any strategy and on any number of ranks that is taken resumes to the bit, or is
refused in a sentence.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from experiments.saved_run import load_run
from experiments.selftest.resume import Cut, cutting
from experiments.selftest.same_run import differences
from experiments.selftest.scene import options, run_here
from moe_ffn.training.checkpoint_file import read_checkpoint
from moe_ffn.training.config import PRECISIONS

BLOCKS = {
    "dense": "{type: dense, dropout: 0.1}",
    "swiglu": "{type: swiglu, dropout: 0.1}",
    "top_k": "{type: moe, num_experts: 4, experts: {type: swiglu, dropout: 0.1}, router: {type: top_k, "
    "jitter: 0.1}}",
    "noisy_top_k": "{type: moe, num_experts: 4, router: noisy_top_k}",
    "biased": "{type: moe, num_experts: 4, router: {type: sigmoid_top_k, correction_bias: true}}",
    "relu": "{type: moe, num_experts: 4, router: relu}",
    "expert_choice": "{type: moe, num_experts: 4, router: expert_choice}",
    "soft_moe": "{type: soft_moe, num_experts: 4}",
}
MASKED = ("expert_choice", "soft_moe")
"""Blocks that a causal model refuses."""


def changes_of(block: str, precision: str, **changes: str) -> dict[str, str]:
    """Options of a tiny run of seven steps, with a row every two and a validation every four."""
    return {
        "model__ffn": BLOCKS[block],
        "model__causal": str(block not in MASKED).lower(),
        "model__dropout": "0.1",
        "trainer__precision": precision,
        "trainer__max_steps": "7",
        "sample__num_tokens": "2",
        **changes,
    }


# ------------------------------------------------------------------------------------- precisions

OPTIMIZERS = ("adam", "nadam", "radam", "adamax", "adagrad", "adadelta", "rmsprop", "sgd")
ON_CPU = [name for name in PRECISIONS if name != "16-mixed"]


def precision_cases() -> Iterator[object]:
    """Every block, and every optimizer, in every precision of a CPU; two of them in the default suite."""
    for precision in ON_CPU:
        for block in BLOCKS:
            for more in ({}, {"trainer__accumulate_grad_batches": "4"}):
                yield _case(precision, block, "adamw", **more)
        for optimizer in (*OPTIMIZERS, "adafactor", "muon"):
            yield _case(precision, "top_k", optimizer)
        clipped = {
            "trainer__gradient_clip_algorithm": "value",
            "trainer__gradient_clip_val": "0.01",
        }
        yield _case(precision, "biased", "muon", **clipped)
    yield pytest.param("64-true", "biased", "nadam", {}, id="64-true-default")


def _case(precision: str, block: str, optimizer: str, **more: str) -> object:
    name = "-".join([precision, block, optimizer, *(more and ["with " + " ".join(more.values())])])
    return pytest.param(precision, block, optimizer, more, id=name, marks=pytest.mark.slow)


@pytest.mark.parametrize(("precision", "block", "optimizer", "more"), list(precision_cases()))
def test_a_run_in_a_precision_is_resumed_to_the_bit(
    tmp_path: Path, precision: str, block: str, optimizer: str, more: dict[str, str]
) -> None:
    changes = changes_of(block, precision, optimizer=f"{{type: {optimizer}}}", **more)
    train(*options(tmp_path, run__name="whole", **changes))
    with cutting(Cut("asked to end between two rows", 5)):
        train(*options(tmp_path, run__name="cut", **changes), code=128 + signal.SIGTERM)

    train("--resume", str(tmp_path / "runs/cut"))

    assert differences(tmp_path / "runs/whole", tmp_path / "runs/cut") == []
    check_best_weights(tmp_path / "runs/cut")


def check_best_weights(run_folder: Path) -> None:
    """They are read without a digit less, and the programs that read them run."""
    best = read_checkpoint(run_folder / "checkpoints/best.ckpt")["state_dict"]
    loaded = load_run(run_folder)
    for name, value in loaded.decoder.state_dict().items():
        assert torch.equal(value.double(), best[f"decoder.{name}"].double()), name
    if loaded.config.model.causal:
        generate = (str(run_folder), "--num-tokens", "2")
        assert run_here(*generate, program="experiments.generate").code == 0
    if loaded.decoder.routers():
        trace = (str(run_folder), "--text", "the cat")
        assert run_here(*trace, program="experiments.trace").code == 0


def train(*argv: str, code: int = 0) -> str:
    """The program, in this process; returns what it printed on stderr."""
    done = run_here(*argv)
    assert done.code == code, (done.code, done.stderr)
    return done.stderr


@pytest.mark.parametrize(
    ("precision", "sentence"),
    [
        ("16-mixed", "trainer.precision (16-mixed) needs a GPU; on a CPU use bf16-mixed"),
        *(
            (name, f"trainer.precision: must be one of 'auto', '64-true', '32-true', 'bf16-mixed', "
             f"'bf16-true' or '16-mixed', got '{name}'")
            for name in ("16-true", "transformer-engine", "transformer-engine-float16", "bf16")
        ),
    ],
)  # fmt: skip
def test_another_precision_is_refused(tmp_path: Path, precision: str, sentence: str) -> None:
    lines = train(*options(tmp_path, trainer__precision=precision), code=2).splitlines()

    assert lines[-1] == f"error: {sentence}"
    assert not (tmp_path / "runs").exists()
