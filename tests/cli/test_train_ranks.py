"""The program on several ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import moe_ffn
from tests.helpers.ranks import on_ranks
from tests.helpers.tiny_runs import Finished, losses, options, run, run_here

RunTrain = Callable[..., Any]


@pytest.mark.slow
@pytest.mark.parametrize("validation_tokens", [160, 64], ids=["3 batches", "1 batch"])
def test_two_processes_do_what_one_does(
    run_train: RunTrain, tiny_yaml: Path, tmp_path: Path, validation_tokens: int
) -> None:
    given = [
        *("--data.validation_tokens", str(validation_tokens), "--logging.every_n_steps", "1"),
        *("--objective.load_balance", "0.0", "--optimizer.learning_rate", "1e-3"),
    ]
    (tmp_path / "one").mkdir()
    one = run_train(tmp_path / "one", *given)
    where = (
        "--data.cache_dir",
        str(tmp_path / "cache"),
        "--run.output_dir",
        str(tmp_path / "runs"),
    )
    ranks = ("--trainer.devices", "2", "--trainer.strategy", "ddp")
    done = run("--config", str(tiny_yaml), *where, *ranks, *given)

    assert done.code == 0, done.stderr
    two = type(one)(0, done.stdout, done.stderr, one.args, tmp_path)
    assert len(two.rows) == len(one.rows) == 8
    assert done.stdout.count("Results in ") == 1
    # Both have the same global batch.
    first, of_two = one.rows[0], two.rows[0]
    assert of_two["train/loss"] == pytest.approx(first["train/loss"], abs=1e-5)
    # What ranks measure of routing is of the whole batch too. Only several have an imbalance between them.
    between_ranks = {f"routing/layer_0{layer}/rank_max_violation" for layer in range(2)}
    assert of_two.keys() - first.keys() == between_ranks
    # The balancing loss is of each batch and rank by itself, and so another number.
    measured = {
        key for key in first if key.startswith("routing/") and not key.endswith("/load_balance")
    }
    assert len(measured) > 2 * 15
    for key in measured:
        assert of_two[key] == pytest.approx(first[key], abs=1e-4), key
    for mine, theirs in zip(one.rows, two.rows, strict=True):
        assert mine.keys() == theirs.keys() - between_ranks
        for name in mine.keys() & {"train/loss", "validation/loss", "validation/bits_per_byte"}:
            assert theirs[name] == pytest.approx(mine[name], abs=1e-3), name
    # The windows of a validation are in their order, whichever rank had them.
    ours, theirs = (json.loads((found.folder / "summary.json").read_text()) for found in (one, two))
    assert len(set(ours["window_losses"])) > 2
    assert theirs["window_losses"] == pytest.approx(ours["window_losses"], abs=1e-3)
    assert theirs["num_tokens"] == ours["num_tokens"]
    assert "sync_dist" not in done.stderr


def program_on_a_rank(rank: int, argv: list[str]) -> Finished:
    return run_here(*argv)


ALONE = {"devices": 1, "parallel": "null"}
EXPERT_2 = {"devices": 2, "parallel": "{shard: 1, expert: 2}"}
EXPERT_4 = {"devices": 4, "parallel": "{shard: 1, expert: 4}"}
BOTH = {"devices": 4, "parallel": "{data: 2, shard: 1, expert: 2}"}
SHARD_2 = {"devices": 2, "parallel": "{data: 1, shard: 2, expert: 1}"}
SHARD_4 = {"devices": 4, "parallel": "{data: 1, shard: 4, expert: 1}"}


def words(stage: dict[str, Any]) -> list[str]:
    return ["--trainer.devices", str(stage["devices"]), "--parallel", stage["parallel"]]


@pytest.mark.parametrize(
    "stages",
    [
        pytest.param([EXPERT_2, ALONE], id="EP 2, 1"),
        pytest.param([EXPERT_2, ALONE, EXPERT_4], id="EP 2, 1, EP 4", marks=pytest.mark.slow),
        pytest.param(
            [SHARD_4, BOTH, SHARD_2], id="FSDP 4, EP 2 x DDP 2, FSDP 2", marks=pytest.mark.slow
        ),
    ],
)
def test_a_run_is_resumed_with_any_number_of_ranks(
    stages: list[dict[str, Any]], tmp_path: Path
) -> None:
    alike = {
        "model__ffn": "{type: moe, num_experts: 4, shared_expert: swiglu}",
        "objective__load_balance": "0.0",
        "optimizer__learning_rate": "1e-3",
        "trainer__precision": "32-true",
        "data__batch_size": "4",
    }
    for number, stage in enumerate(stages):
        steps = ("--trainer.max_steps", str(4 * (number + 1)))
        for name in ("ranks", "one"):
            argv = ["--resume", str(tmp_path / "runs" / name), *steps]
            if number == 0:
                argv = [*options(tmp_path, run__name=name, **alike), *steps]
            if name == "one" or stage == ALONE:
                done, others = run_here(*argv, *words(ALONE)), []
            else:
                folder = tmp_path / f"stage{number}"
                argv += words(stage)
                done, *others = on_ranks(stage["devices"], folder, program_on_a_rank, argv)
            assert done.code == 0, done.stderr
            assert "Results in" in done.stdout
            assert [other.stdout for other in others] == [""] * len(others)

    found, expected = (losses(tmp_path / "runs" / name) for name in ("ranks", "one"))
    assert list(found) == list(expected) == list(range(2, 4 * len(stages) + 1, 2))
    assert found == pytest.approx(expected, rel=1e-5)
    models = [
        moe_ffn.load_pretrained(tmp_path / "runs" / name / "model") for name in ("ranks", "one")
    ]
    for mine, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
