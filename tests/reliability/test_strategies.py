"""A run in any precision, strategy and number of ranks is resumed to the bit, or rejected in a sentence."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from moe_ffn.runs.reader import load_model
from moe_ffn.training.config import PRECISIONS
from moe_ffn.training.recovery.checkpoint_file import read_checkpoint
from tests.helpers.cut import Crash, Cut, cutting
from tests.helpers.ranks import torchrun_variables
from tests.helpers.same_run import require_same
from tests.helpers.tiny_runs import (
    Finished,
    finish,
    fork_all,
    options,
    run,
    run_here,
    start,
    wait_for_row,
)

BLOCKS = {
    "dense": "{type: dense, dropout: 0.1}",
    "swiglu": "{type: swiglu, dropout: 0.1}",
    "top_k": "{type: moe, num_experts: 4, experts: {type: swiglu, dropout: 0.1}, router: {type: top_k, "
    "jitter: 0.1}}",
    "noisy_top_k": "{type: moe, num_experts: 4, router: noisy_top_k}",
    "elastic_top_k": "{type: moe, num_experts: 4, router: elastic_top_k}",
    "biased": "{type: moe, num_experts: 4, router: {type: sigmoid_top_k, correction_bias: true}}",
    "relu": "{type: moe, num_experts: 4, router: relu}",
    "expert_choice": "{type: moe, num_experts: 4, router: expert_choice}",
    "soft_moe": "{type: soft_moe, num_experts: 4}",
}
MASKED = ("expert_choice", "soft_moe")
"""Blocks that a causal model rejects."""
ON_CPU = [name for name in PRECISIONS if name != "16-mixed"]


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


# -- precisions

OPTIMIZERS = ("adam", "sgd", "adafactor", "muon")


def precision_cases() -> Iterator[object]:
    """Blocks and optimizers in every precision of a CPU; only one is in the default suite."""
    for precision in ON_CPU:
        for block, optimizer in [
            *((block, "adamw") for block in BLOCKS),
            *(("top_k", o) for o in OPTIMIZERS),
        ]:
            name = f"{precision}-{block}-{optimizer}"
            yield pytest.param(precision, block, optimizer, id=name, marks=pytest.mark.slow)
    yield pytest.param("64-true", "biased", "adafactor", id="default")


@pytest.mark.parametrize(("precision", "block", "optimizer"), list(precision_cases()))
def test_a_run_in_a_precision_is_resumed_to_the_bit(
    tmp_path: Path, precision: str, block: str, optimizer: str
) -> None:
    changes = changes_of(block, precision, optimizer=f"{{type: {optimizer}}}")
    expect(run_here(*options(tmp_path, run__name="whole", **changes)), 0)
    with cutting(BETWEEN):
        done = run_here(*options(tmp_path, run__name="cut", **changes))
    expect(done, 128 + signal.SIGTERM)

    expect(run_here("--resume", str(tmp_path / "runs/cut")), 0)

    require_same(tmp_path / "runs/whole", tmp_path / "runs/cut")
    check_best_weights(tmp_path / "runs/cut")


def check_best_weights(run_folder: Path) -> None:
    """The best weights are read without losing a digit, and programs can use them."""
    best = read_checkpoint(run_folder / "checkpoints/best.ckpt")["state_dict"]
    loaded = load_model(run_folder)
    for name, value in loaded.decoder.state_dict().items():
        assert torch.equal(value.double(), best[f"decoder.{name}"].double()), name
    if loaded.config.model.causal:
        generate = (str(run_folder), "--num-tokens", "2")
        expect(run_here(*generate, program="moe_ffn.cli.generate"), 0)
    if loaded.decoder.routers():
        trace = (str(run_folder), "--text", "the cat")
        expect(run_here(*trace, program="moe_ffn.cli.trace"), 0)


def expect(done: Finished, code: int) -> None:
    assert done.code == code, (done.code, done.stderr[-1000:])


# -- ranks

CRASHED = 9
BETWEEN = Cut("asked to end between two rows", 5)
WITHIN = Cut("asked to end in an accumulation window", 3)
VALIDATING = Cut("asked to end in a validation", 4, within="validation_step")
CRASH = Cut("died between two rows", 7, is_crash=True)
CUTS = (BETWEEN, WITHIN, VALIDATING, CRASH)


def train_on_ranks(num_ranks: int, *argv: str, cut: Cut | None = None) -> int | None:
    """Train a run in copies of this process, one per rank; returns the exit code of the first.

    Args:
        cut: the place where the run ends: a signal reaches only the last rank, a crash all ranks.
    """
    importlib.import_module("torch._dynamo")  # once, and not in each rank
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def work(rank: int) -> None:
        os.environ |= torchrun_variables(rank, num_ranks, port)
        has_cut = cut is not None and (cut.is_crash or rank == num_ranks - 1)
        try:
            with cutting(cut if has_cut else None):
                done = run_here(*argv)
        except Crash:
            os._exit(CRASHED)
        os.write(2, done.stderr.encode())
        raise SystemExit(done.code)

    return fork_all(partial(work, rank) for rank in range(num_ranks))[0]


RANKS = [
    *((2, block, "ddp", "null", "32-true", 1, BETWEEN) for block in BLOCKS),
    *((2, "biased", "ddp", "null", "32-true", batches, cut) for batches in (1, 4) for cut in CUTS),
    *((2, "top_k", "auto", "null", precision, 2, BETWEEN) for precision in ON_CPU),
    (1, "top_k", "ddp", "null", "32-true", 1, BETWEEN),
    (2, "top_k", "ddp_find_unused_parameters_true", "null", "32-true", 4, WITHIN),
    *((3, "biased", "ddp", "null", "32-true", 4, cut) for cut in CUTS),
    (4, "biased", "ddp", "null", "32-true", 2, BETWEEN),
    *((2, "biased", "auto", "{expert: 2}", "32-true", batches, cut) for batches in (1, 4) for cut in CUTS),
    *((2, block, "auto", "{shard: 2}", "32-true", 1, BETWEEN) for block in BLOCKS),
    *((2, block, "auto", "{expert: 2}", "32-true", 1, BETWEEN) for block in ("top_k", "noisy_top_k", "relu")),
    *((2, "top_k", "auto", "{expert: 2}", bf16, 2, BETWEEN) for bf16 in ("bf16-mixed", "bf16-true")),
    *((4, "biased", "auto", layout, "32-true", 2, cut)
      for layout in ("{expert: 4}", "{shard: 2, expert: 2}", "{data: 2, expert: 2}")
      for cut in (BETWEEN, CRASH)),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "block", "strategy", "parallel", "precision", "batches", "cut"),
    RANKS,
    ids=["-".join([*map(str, case[:-1]), case[-1].name]) for case in RANKS],
)
def test_a_run_on_ranks_is_resumed_to_the_bit(
    tmp_path: Path,
    num_ranks: int,
    block: str,
    strategy: str,
    parallel: str,
    precision: str,
    batches: int,
    cut: Cut,
) -> None:
    changes = changes_of(
        block,
        precision,
        data__batch_size="12",
        trainer__devices=str(num_ranks),
        trainer__strategy=strategy,
        trainer__accumulate_grad_batches=str(batches),
        parallel=parallel,
    )
    assert train_on_ranks(num_ranks, *options(tmp_path, run__name="whole", **changes)) == 0
    ended = train_on_ranks(num_ranks, *options(tmp_path, run__name="cut", **changes), cut=cut)
    assert ended == (CRASHED if cut.is_crash else 128 + signal.SIGTERM)

    assert train_on_ranks(num_ranks, "--resume", str(tmp_path / "runs/cut")) == 0

    require_same(tmp_path / "runs/whole", tmp_path / "runs/cut")


# -- processes

LONG = changes_of("top_k", "32-true", trainer__max_steps="40", data__batch_size="12")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.slow
def test_ranks_end_with_the_first_and_are_resumed(tmp_path: Path, signum: signal.Signals) -> None:
    changes = LONG | {"trainer__devices": "3", "trainer__strategy": "ddp"}
    expect(run(*options(tmp_path, run__name="whole", **changes)), 0)
    process = start(*options(tmp_path, run__name="cut", **changes))
    wait_for_row(tmp_path / "runs/cut", 10, process)
    process.send_signal(signum)
    expect(finish(process), -signum if signum == signal.SIGKILL else 128 + signum)

    expect(run("--resume", str(tmp_path / "runs/cut")), 0)

    require_same(tmp_path / "runs/whole", tmp_path / "runs/cut")


@pytest.mark.parametrize("parallel", ["null", "{expert: 2}"])
@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_run_is_resumed(tmp_path: Path, parallel: str) -> None:
    changes = LONG | {"trainer__devices": "2", "parallel": parallel}
    expect(run(*options(tmp_path, run__name="whole", **changes)), 0)
    process = start(*options(tmp_path, run__name="cut", **changes))
    wait_for_row(tmp_path / "runs/cut", 10, process)
    (other,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(other), signal.SIGKILL)
    ended = finish(process, timeout=60)

    expect(ended, 1)
    said = ended.stderr.splitlines()[-1]
    assert said.startswith("error: rank 1 was killed by signal 9, at step "), said
    assert said.endswith(f"--resume {tmp_path / 'runs/cut'}")
    expect(run("--resume", str(tmp_path / "runs/cut")), 0)
    require_same(tmp_path / "runs/whole", tmp_path / "runs/cut")


@pytest.mark.parametrize("parallel", ["{expert: 2}", "{shard: 2}"])
@pytest.mark.slow
def test_a_rank_killed_while_saving_costs_no_good_checkpoint(tmp_path: Path, parallel: str) -> None:
    """Ranks die in turn, up to some milliseconds after they began to write their shards."""
    changes = LONG | {"trainer__devices": "2", "parallel": parallel}
    changes |= {"checkpoints__every_n_steps": "1"}
    expect(run(*options(tmp_path, run__name="whole", **changes)), 0)
    folder = tmp_path / "runs/cut"
    argv = options(tmp_path, run__name="cut", **changes)
    for kill, delay in enumerate((0.0, 0.005, 0.02, 0.06)):
        process = start(*argv)
        seen = set((folder / "checkpoints").glob("*.shards")) if kill else set[Path]()
        while len(set((folder / "checkpoints").glob("*.shards")) - seen) < 2:
            assert process.poll() is None, finish(process).stderr
            time.sleep(0.0005)
        time.sleep(delay)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(process.pid if kill % 2 else int(children[0]), signal.SIGKILL)
        assert finish(process, timeout=60).code != 0
        argv = ["--resume", str(folder)]

    expect(run(*argv), 0)

    require_same(tmp_path / "runs/whole", folder)
