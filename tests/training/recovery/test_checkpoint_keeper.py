"""The times of saves, the checkpoints that stay, and the messages about a full disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from moe_ffn.training.config import CheckpointsConfig
from moe_ffn.training.recovery import checkpoint_keeper
from moe_ffn.training.recovery.checkpoint_file import read_checkpoint, step_name
from moe_ffn.training.recovery.checkpoint_keeper import CheckpointKeeper
from tests.helpers.fitted import Fit
from tests.helpers.same_run import assert_same


class FakeTrainer:
    """The part of Lightning's Trainer that the keeper uses, in a run of one process."""

    def __init__(self, keeper: CheckpointKeeper) -> None:
        self.keeper = keeper
        self.global_step = 0
        self.is_global_zero = True
        self.should_stop = False
        self.early_stopping_callbacks: list[Any] = []
        self.accumulate_grad_batches = 1
        self.loggers: list[Any] = []
        self.lightning_module: Any = nn.Linear(2, 2)
        self.state = SimpleNamespace(fn="fit")
        self.callback_metrics: dict[str, float] = {}
        self.strategy = SimpleNamespace(
            broadcast=lambda value: value,
            reduce_boolean_decision=lambda value: value,
            lightning_module_state_dict=lambda: self.lightning_module.state_dict(),
            save_checkpoint=keeper.io.save_checkpoint,
            barrier=lambda: None,
        )

    def save_checkpoint(self, path: Path) -> None:
        self.keeper.io.save_checkpoint({"global_step": self.global_step}, path)

    def step(self, number: int) -> None:
        """The end of an optimizer step, without a validation."""
        self.global_step = number
        module: Any = self.lightning_module
        trainer: Any = self
        self.keeper.on_train_batch_end(trainer, module, None, {"index": number - 1}, number - 1)

    def validate(self, number: int, loss: float) -> None:
        self.global_step = number
        self.callback_metrics["validation/loss"] = loss
        module: Any = self.lightning_module
        trainer: Any = self
        self.keeper.on_validation_end(trainer, module)


Make = Callable[..., FakeTrainer]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """`make(every_n_steps=2)`: a trainer whose keeper writes into `tmp_path/checkpoints`."""

    def build(validate_every_n_steps: int = 1000, **options: Any) -> FakeTrainer:
        config = CheckpointsConfig(**options)
        folder = tmp_path / "checkpoints"
        return FakeTrainer(CheckpointKeeper(folder, config, validate_every_n_steps, {}))

    return build


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def steps(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step_")) for path in folder.glob("step_*.ckpt"))


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Make every write fail with a full disk, until the returned function is called."""
    fsync = os.fsync

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    return lambda: monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize(("keep_last", "kept"), [(1, [10]), (2, [8, 10]), (9, [2, 4, 6, 8, 10])])
def test_the_last_few_and_the_best_are_kept(
    make: Make, folder: Path, keep_last: int, kept: list[int]
) -> None:
    trainer = make(every_n_steps=2, keep_last=keep_last)
    trainer.validate(1, loss=2.0)
    for number in range(2, 11):
        trainer.step(number)

    assert steps(folder) == kept
    assert (folder / "best.ckpt").exists()


def test_the_best_checkpoint_holds_weights_and_identity(fit: Fit) -> None:
    fitted = fit(model={"d_model": 64}, optimizer={"type": "adamw", "learning_rate": 0.01})
    folder = fitted.watchers.checkpoints.folder

    best, last = read_checkpoint(folder / "best.ckpt"), read_checkpoint(folder / step_name(6))

    assert set(best) == {"state_dict", "identity", "global_step", "validation_loss"}
    assert best["global_step"] == 6, "the loss falls on these texts"
    assert best["validation_loss"] == fitted.watchers.validation.last["loss"]
    assert_same(best["state_dict"], last["state_dict"])
    assert_same(best["identity"], last["identity"])
    num_bytes = 4 * sum(p.numel() for p in fitted.module.parameters())
    assert num_bytes < (folder / "best.ckpt").stat().st_size < 1.2 * num_bytes
    assert (folder / step_name(6)).stat().st_size > 3 * num_bytes, "two moments of each weight"


def test_only_a_lower_loss_is_the_best_also_once_resumed(make: Make, folder: Path) -> None:
    before, trainer = make(every_n_steps=100), make(every_n_steps=100)
    before.validate(1, loss=2.0)
    first = (folder / "best.ckpt").read_bytes()
    trainer.keeper.load_state_dict(before.keeper.state_dict())
    for number, loss in enumerate([2.0, 2.5, float("nan")], start=2):
        trainer.validate(number, loss=loss)
    assert (folder / "best.ckpt").read_bytes() == first

    trainer.validate(6, loss=1.5)
    assert (folder / "best.ckpt").read_bytes() != first


@pytest.mark.parametrize(("step", "replaced"), [(5, True), (6, False)])
def test_the_best_of_steps_that_are_trained_again_is_replaced(
    make: Make, folder: Path, step: int, replaced: bool
) -> None:
    """The run was resumed from `step`, perhaps with options under which no loss is as low again."""
    dead, resumed = make(every_n_steps=100), make(every_n_steps=100)
    dead.validate(4, loss=2.0)
    saved = dead.keeper.state_dict()
    dead.validate(6, loss=1.0)
    resumed.keeper.load_state_dict(saved if step < 6 else dead.keeper.state_dict())
    resumed.global_step = step
    trainer: Any = resumed
    resumed.keeper.on_train_start(trainer, trainer.lightning_module)

    resumed.validate(8, loss=3.0)
    assert read_checkpoint(folder / "best.ckpt")["global_step"] == (8 if replaced else 6)
    assert resumed.keeper.best_loss == (2.0 if replaced else 1.0), "as in a run that did not die"
    for number, loss in enumerate((2.5, 2.7), start=9):
        resumed.validate(number, loss=loss)
    assert read_checkpoint(folder / "best.ckpt")["global_step"] == (9 if replaced else 6)


def test_the_best_is_replaced_also_after_a_second_interruption(make: Make, folder: Path) -> None:
    def resumed(state: Any, step: int) -> Any:
        run = make(every_n_steps=100)
        run.keeper.load_state_dict(state)
        run.global_step = step
        trainer: Any = run
        run.keeper.on_train_start(trainer, trainer.lightning_module)
        return run

    dead = make(every_n_steps=100)
    dead.validate(4, loss=2.0)
    saved = dead.keeper.state_dict()
    dead.validate(6, loss=1.0)
    second = resumed(saved, step=5)  # interrupted again at step 7, before a validation
    third = resumed(second.keeper.state_dict(), step=7)
    third.validate(8, loss=3.0)
    assert read_checkpoint(folder / "best.ckpt")["global_step"] == 8
    fourth = resumed(third.keeper.state_dict(), step=8)
    fourth.validate(9, loss=2.5)
    assert read_checkpoint(folder / "best.ckpt")["global_step"] == 9, (
        "2.5 is lower than 3.0 of the file"
    )


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"cut")])
def test_a_lost_best_is_replaced_by_the_next(
    make: Make, folder: Path, damage: Callable[[Path], object]
) -> None:
    dead, resumed = make(every_n_steps=100), make(every_n_steps=100)
    dead.validate(4, loss=2.0)
    damage(folder / "best.ckpt")
    resumed.keeper.load_state_dict(dead.keeper.state_dict())
    resumed.global_step = 4
    trainer: Any = resumed
    resumed.keeper.on_train_start(trainer, trainer.lightning_module)
    resumed.validate(6, loss=2.5)
    assert read_checkpoint(folder / "best.ckpt")["global_step"] == 6
    assert (resumed.keeper.best_loss, resumed.keeper.loss_of_best) == (2.0, 2.5)


@pytest.mark.parametrize("keep_last", [1, 2])
def test_the_good_ones_stay_where_the_newest_is_damaged(
    make: Make, folder: Path, monkeypatch: pytest.MonkeyPatch, keep_last: int
) -> None:
    trainer = make(every_n_steps=2, keep_last=keep_last)
    for number in range(2, 7):
        trainer.step(number)
    good = steps(folder)
    write = checkpoint_keeper.write_checkpoint

    def write_badly(values: dict[str, Any], path: Path) -> None:
        """Write as a disk does that silently loses the end of a file."""
        write(values, path)
        os.truncate(path, path.stat().st_size - 5)

    monkeypatch.setattr(checkpoint_keeper, "write_checkpoint", write_badly)
    trainer.step(8)
    trainer.step(10)

    assert steps(folder) == [*good, 8, 10]


def test_a_save_that_fails_removes_nothing_and_is_tried_again(
    make: Make,
    folder: Path,
    full_disk: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    free, tried = full_disk, []
    trainer = make(every_n_steps=10, keep_last=1)
    folder.mkdir()
    (folder / step_name(5)).touch()
    write = checkpoint_keeper.write_checkpoint

    def recorded(values: dict[str, Any], path: Path) -> None:
        tried.append(values["global_step"])
        write(values, path)

    monkeypatch.setattr(checkpoint_keeper, "write_checkpoint", recorded)
    for number in range(10, 50):
        trainer.step(number)
    # 1, 2, 4 and 8 steps later, and never longer than the 10 between two checkpoints
    assert tried == [10, 11, 13, 17, 25, 35, 45]
    assert steps(folder) == [5]
    assert trainer.keeper.problem == "No space left on device"

    free()
    for number in range(50, 62):
        trainer.step(number)

    assert tried[7:] == [55, 60], "as soon as it is due, and then as always"
    assert steps(folder) == [60]
    assert not trainer.keeper.problem
    assert [path.name for path in folder.iterdir()] == [step_name(60)]
    assert capsys.readouterr().err.splitlines() == [
        f"disk: '{folder}' cannot be written (No space left on device); training continues and tries again",
        f"disk: '{folder}' can be written again",
    ]


def test_best_is_the_lowest_loss_that_was_written(
    make: Make, folder: Path, full_disk: Callable[[], None]
) -> None:
    trainer = make(every_n_steps=100)
    trainer.validate(1, loss=1.0)
    full_disk()

    trainer.validate(2, loss=1.5)

    assert trainer.keeper.best_loss == 1.5
    assert (folder / "best.ckpt").exists()


@pytest.mark.parametrize("where", ["a parameter", "a buffer"])
def test_broken_weights_are_not_saved_and_reported_once(
    make: Make, folder: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    trainer = make(every_n_steps=2)
    module = trainer.lightning_module
    module.register_buffer("mask", torch.tensor([float("-inf"), 0.0]))
    trainer.step(2)
    assert steps(folder) == [2], "a buffer may hold infinities"

    broken = module.weight.data[0] if where == "a parameter" else module.mask
    broken[0] = float("nan")
    for number in range(3, 20):
        trainer.step(number)

    assert steps(folder) == [2]
    name = "weight" if where == "a parameter" else "mask"
    assert capsys.readouterr().err.splitlines() == [
        f"checkpoint: steps from 4 on are not saved while '{name}' holds NaN or infinity; earlier "
        f"checkpoints in '{folder}' are kept"
    ]
    assert trainer.keeper.problem == f"'{name}' holds NaN or infinity"


def test_a_step_is_saved_once(make: Make, folder: Path) -> None:
    trainer = make(every_n_steps=2)
    trainer.step(2)
    before = (folder / step_name(2)).stat().st_mtime_ns
    anything: Any = trainer
    trainer.keeper.on_train_end(anything, anything)

    assert (folder / step_name(2)).stat().st_mtime_ns == before


def test_the_resumed_step_is_already_saved(make: Make, folder: Path) -> None:
    trainer: Any = make(every_n_steps=2)
    trainer.keeper.on_load_checkpoint(trainer, trainer.lightning_module, {"global_step": 4})
    trainer.global_step = 4

    assert trainer.keeper.save(trainer)
    assert not folder.exists()

    trainer.step(6)
    assert steps(folder) == [6]


def test_rows_are_on_the_disk_before_a_checkpoint_that_counts_them(
    make: Make, folder: Path
) -> None:
    trainer = make(every_n_steps=2)
    found: list[list[int]] = []
    trainer.loggers = [SimpleNamespace(save=lambda: found.append(steps(folder)))]

    trainer.step(2)
    trainer.step(4)

    assert found == [[], [2]], "of each step, saved before its checkpoint"


@pytest.mark.parametrize(
    ("index", "step", "is_between"), [(4, 1, False), (5, 2, True), (11, 4, False)]
)
def test_between_steps_is_after_the_last_batch_of_one_without_a_validation(
    make: Make, index: int, step: int, is_between: bool
) -> None:
    trainer: Any = make(validate_every_n_steps=4)
    trainer.accumulate_grad_batches, trainer.global_step = 3, step
    batch: Any = {"index": index}
    assert trainer.keeper.is_between_steps(trainer, batch) == is_between


def test_a_validation_alone_saves_the_best_and_no_step(make: Make, folder: Path) -> None:
    trainer = make(every_n_steps=2)
    trainer.state.fn = "validate"
    trainer.validate(2, loss=1.0)
    assert [path.name for path in folder.iterdir()] == ["best.ckpt"]


@pytest.mark.parametrize(("patience", "stops"), [(1, True), (2, False), (None, False)])
def test_an_early_stop_is_remembered_as_long_as_its_rule_holds(
    make: Make, folder: Path, patience: int | None, stops: bool
) -> None:
    """A run killed afterwards would train further when resumed, without the saved stop."""
    stopped: Any = make(every_n_steps=2)
    stopped.should_stop = True
    stopped.step(2)

    resumed: Any = make(every_n_steps=2)
    if patience is not None:
        resumed.early_stopping_callbacks = [SimpleNamespace(wait_count=1, patience=patience)]
    resumed.keeper.load_state_dict(stopped.keeper.state_dict())
    resumed.keeper.on_train_start(resumed, resumed.lightning_module)

    assert resumed.should_stop is stops


def test_leftovers_of_a_dead_process_are_removed(make: Make, folder: Path) -> None:
    folder.mkdir()
    (folder / ".step_00000002.ckpt.x.unfinished").touch()
    trainer: Any = make()
    trainer.keeper.on_train_start(trainer, trainer.lightning_module)
    assert not list(folder.iterdir())
