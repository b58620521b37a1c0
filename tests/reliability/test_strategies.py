"""A run in any precision, by any strategy and on any number of ranks that is taken resumes to the bit, or is
refused in a sentence.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from moe_ffn.runs.reader import load_model
from moe_ffn.training.config import PRECISIONS
from moe_ffn.training.recovery.checkpoint_file import read_checkpoint
from tests.helpers.cut import Cut, cutting
from tests.helpers.rank_group import CRASHED, RankGroup, rank_group
from tests.helpers.same_run import differences
from tests.helpers.tiny_runs import (
    Finished,
    finish,
    losses,
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
    loaded = load_model(run_folder)
    for name, value in loaded.decoder.state_dict().items():
        assert torch.equal(value.double(), best[f"decoder.{name}"].double()), name
    if loaded.config.model.causal:
        generate = (str(run_folder), "--num-tokens", "2")
        assert run_here(*generate, program="moe_ffn.cli.generate").code == 0
    if loaded.decoder.routers():
        trace = (str(run_folder), "--text", "the cat")
        assert run_here(*trace, program="moe_ffn.cli.trace").code == 0


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
            (name, f"trainer.precision: must be one of 'auto', '64-true', '32-true', "
             f"'bf16-mixed', 'bf16-true' or '16-mixed', got '{name}'")
            for name in ("16-true", "transformer-engine", "transformer-engine-float16", "bf16")
        ),
    ],
)  # fmt: skip
def test_another_precision_is_refused(tmp_path: Path, precision: str, sentence: str) -> None:
    lines = train(*options(tmp_path, trainer__precision=precision), code=2).splitlines()

    assert lines[-1] == f"error: {sentence}"
    assert not (tmp_path / "runs").exists()


# ------------------------------------------------------------------------------------- strategies


@pytest.mark.parametrize(
    "strategy",
    ["ddp_spawn", "ddp_fork", "ddp_notebook", "fsdp", "deepspeed", "deepspeed_stage_2", "xla", "ddp_", ""],
)  # fmt: skip
def test_another_strategy_is_refused(tmp_path: Path, strategy: str) -> None:
    lines = train(*options(tmp_path, trainer__strategy=strategy or '""'), code=2).splitlines()

    assert lines[-1] == (
        "error: trainer.strategy: must be one of 'auto', 'ddp' or 'ddp_find_unused_parameters_true', "
        f"got '{strategy}'"
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("strategy", ["auto", "ddp", "ddp_find_unused_parameters_true"])
@pytest.mark.slow
def test_one_rank_by_any_strategy_is_resumed_to_the_bit(
    groups: Callable[[int], RankGroup], tmp_path: Path, strategy: str
) -> None:
    check_ranks(groups(1), tmp_path, BETWEEN, "top_k", strategy, "32-true", "1")


# ------------------------------------------------------------------------------------- ranks

BETWEEN = Cut("asked to end between two rows", 5)
WITHIN = Cut("asked to end in an accumulation window", 3)
VALIDATING = Cut("asked to end in a validation", 4, within="validation_step")
CRASH = Cut("died between two rows", 7, is_crash=True)
CUTS = (BETWEEN, WITHIN, VALIDATING, CRASH)
UNUSED = "ddp_find_unused_parameters_true"

RANKS = [
    *((2, block, "ddp", "32-true", "1", BETWEEN) for block in BLOCKS),
    *((2, "biased", "ddp", "32-true", batches, cut) for batches in ("1", "4") for cut in CUTS),
    *((2, "top_k", "auto", precision, "2", BETWEEN) for precision in ON_CPU),
    *((2, "top_k", UNUSED, "32-true", batches, WITHIN) for batches in ("1", "4")),
    *((3, "biased", "ddp", precision, "1", BETWEEN) for precision in ON_CPU),
    *((3, block, "ddp", "32-true", "1", BETWEEN) for block in ("dense", "top_k", "soft_moe")),
    *((3, "biased", "ddp", "32-true", batches, cut) for batches in ("1", "4") for cut in CUTS[1:]),
    *((3, "top_k", strategy, "32-true", "4", BETWEEN) for strategy in ("auto", UNUSED)),
    *((4, block, "ddp", "32-true", "2", BETWEEN) for block in ("dense", "biased")),
]  # fmt: skip


@pytest.fixture(scope="module")
def groups() -> Iterator[Callable[[int], RankGroup]]:
    """So many ranks, which stay until others are asked for: processes that import torch."""
    found: list[tuple[int, RankGroup, contextlib.ExitStack]] = []

    def group_of(num_ranks: int) -> RankGroup:
        if found and (found[0][0] != num_ranks or found[0][1].is_over):
            found.pop()[2].close()
        if not found:
            stack = contextlib.ExitStack()
            found.append((num_ranks, stack.enter_context(rank_group(num_ranks)), stack))
        return found[0][1]

    yield group_of
    for _, _, stack in found:
        stack.close()


@pytest.mark.parametrize(
    ("num_ranks", "block", "strategy", "precision", "batches", "cut"),
    RANKS,
    ids=["-".join([*map(str, case[:-1]), case[-1].name]) for case in RANKS],
)
@pytest.mark.slow
def test_a_run_on_ranks_is_resumed_to_the_bit(
    groups: Callable[[int], RankGroup],
    tmp_path: Path,
    num_ranks: int,
    block: str,
    strategy: str,
    precision: str,
    batches: str,
    cut: Cut,
) -> None:
    check_ranks(groups(num_ranks), tmp_path, cut, block, strategy, precision, batches)


DIVIDED = [
    *((2, "biased", "{expert: 2}", "32-true", batches, cut) for batches in ("1", "4") for cut in CUTS),
    *((2, block, "{shard: 2}", "32-true", "1", BETWEEN) for block in BLOCKS),
    *((2, block, "{expert: 2}", "32-true", "1", BETWEEN) for block in ("top_k", "noisy_top_k", "relu")),
    *((2, "top_k", "{expert: 2}", precision, "2", BETWEEN) for precision in ("bf16-mixed", "bf16-true")),
    *((4, "biased", layout, "32-true", "2", cut)
      for layout in ("{expert: 4}", "{shard: 2, expert: 2}", "{data: 2, expert: 2}")
      for cut in (BETWEEN, CRASH)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("num_ranks", "block", "parallel", "precision", "batches", "cut"),
    DIVIDED,
    ids=["-".join([*map(str, case[:-1]), case[-1].name]) for case in DIVIDED],
)
@pytest.mark.slow
def test_a_run_of_a_sharded_model_is_resumed_to_the_bit(
    groups: Callable[[int], RankGroup],
    tmp_path: Path,
    num_ranks: int,
    block: str,
    parallel: str,
    precision: str,
    batches: str,
    cut: Cut,
) -> None:
    check_ranks(groups(num_ranks), tmp_path, cut, block, "auto", precision, batches, parallel)


def check_ranks(
    group: RankGroup,
    folder: Path,
    cut: Cut,
    block: str,
    strategy: str,
    precision: str,
    batches: str,
    parallel: str = "null",
) -> None:
    changes = changes_of(
        block,
        precision,
        data__batch_size="12",
        trainer__devices=str(len(group.processes)),
        trainer__strategy=strategy,
        trainer__accumulate_grad_batches=batches,
        parallel=parallel,
    )
    expect(group.train(*options(folder, run__name="whole", **changes)), 0)
    ended = group.train(*options(folder, run__name="cut", **changes), cut=cut)
    expect(ended, CRASHED if cut.is_crash else 128 + signal.SIGTERM)

    expect(group.train("--resume", str(folder / "runs/cut")), 0)

    assert differences(folder / "runs/whole", folder / "runs/cut") == []


def expect(done: Finished, code: int) -> None:
    assert done.code == code, (done.code, done.stderr[-1000:])


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (3, 2), (2, 3)])
@pytest.mark.slow
def test_another_number_of_ranks_goes_on_with_the_same_data(
    groups: Callable[[int], RankGroup], tmp_path: Path, before: int, after: int
) -> None:
    """Between two rows: what the row has of the other ranks counts for it too."""
    changes = changes_of("dense", "32-true", data__batch_size="12", model__dropout="0.0")
    changes |= {"model__ffn": "dense", "trainer__max_steps": "12"}
    whole = options(tmp_path, run__name="whole", **changes)
    expect(groups(1).train(*whole), 0)
    several = {"trainer__devices": str(before), "trainer__strategy": "ddp"}
    argv = options(tmp_path, run__name="cut", **changes, **several)
    expect(groups(before).train(*argv, cut=BETWEEN), 128 + signal.SIGTERM)

    resume = ("--resume", str(tmp_path / "runs/cut"), "--trainer.devices", str(after))
    expect(groups(after).train(*resume), 0)

    found, expected = (losses(tmp_path / "runs" / name) for name in ("cut", "whole"))
    assert list(found) == list(expected) == [2, 4, 6, 8, 10, 12]
    assert found == pytest.approx(expected, rel=1e-4)


# ------------------------------------------------------------------------------------- processes


LONG = changes_of("top_k", "32-true", trainer__max_steps="40", data__batch_size="12")


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
@pytest.mark.slow
def test_ranks_that_the_program_starts_end_with_it_and_go_on(
    tmp_path: Path, num_ranks: int, signum: signal.Signals
) -> None:
    """At any moment, whichever it is; the signal reaches the first rank alone."""
    changes = LONG | {"trainer__devices": str(num_ranks), "trainer__strategy": "ddp"}
    expect(run(*options(tmp_path, run__name="whole", **changes)), 0)
    process = start(*options(tmp_path, run__name="cut", **changes))
    wait_for_row(tmp_path / "runs/cut", 10, process)
    process.send_signal(signum)
    expect(finish(process), -signum if signum == signal.SIGKILL else 128 + signum)

    resumed = run("--resume", str(tmp_path / "runs/cut"))

    expect(resumed, 0)
    assert differences(tmp_path / "runs/whole", tmp_path / "runs/cut") == []


@pytest.mark.parametrize("parallel", ["null", "{expert: 2}"])
@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_and_the_run_goes_on(tmp_path: Path, parallel: str) -> None:
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
    assert differences(tmp_path / "runs/whole", tmp_path / "runs/cut") == []


@pytest.mark.parametrize("parallel", ["{expert: 2}", "{shard: 2}"])
@pytest.mark.slow
def test_a_rank_that_is_killed_in_a_save_costs_no_good_checkpoint(
    tmp_path: Path, parallel: str
) -> None:
    """Each rank in turn, at once or some milliseconds after ranks have begun to write their parts."""
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

    assert differences(tmp_path / "runs/whole", folder) == []
