"""Logs of one JSON object a line, on good disks and bad ones; the display of a run's progress."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from torch import Tensor

from moe_ffn.runs.assemble import make_token_data
from moe_ffn.training.monitoring import progress
from moe_ffn.training.monitoring.json_lines import (
    JsonLines,
    Line,
    Row,
    cut_lines,
    num_damaged,
    read_lines,
)
from moe_ffn.training.monitoring.progress import ProgressBar, ProgressLines, routing_health, status
from tests.helpers.fitted import Fit, Fitted


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "alarms.jsonl"


def steps(path: Path) -> list[int]:
    return [line.step for line in read_lines(path, Line)]


def text(*found: int) -> str:
    return "".join(f'{{"step": {step}}}\n' for step in found)


def test_the_file_appears_with_the_first_object(path: Path) -> None:
    file = JsonLines(path)
    file.add([])
    assert not path.parent.exists()

    file.add([{"step": 1}, {"step": 2}])
    file.add([{"step": 3}])

    assert path.read_text() == text(1, 2, 3)


def test_lines_are_appended(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The growing log is never rewritten, even when a line has new keys."""
    file = JsonLines(path)
    file.add([{"step": 1}])
    identity = path.stat().st_ino
    written: list[int] = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: written.append(len(data)) or write(fd, data))

    for step in (2, 3, 4):
        file.add([{"step": step, f"key {step}": [0.5, 1.5]}])

    assert path.stat().st_ino == identity
    assert sum(written) == path.stat().st_size - len(text(1))
    assert steps(path) == [1, 2, 3, 4]


FULL = OSError(errno.ENOSPC, "No space left on device")


def fail(*_: object) -> int:
    raise FULL


def take_three_bytes() -> Callable[[int, bytes], int]:
    """A disk that becomes full in the middle of a line."""
    write, is_full = os.write, [False]

    def half(descriptor: int, data: bytes) -> int:
        if is_full[0]:
            raise FULL
        is_full[0] = True
        return write(descriptor, bytes(data[:3]))

    return half


@pytest.mark.parametrize(
    ("name", "failing"),
    [("fsync", lambda: fail), ("write", take_three_bytes), ("write", lambda: fail)],
    ids=["not synced", "half a line", "nothing"],
)
def test_lines_that_a_full_disk_rejects_are_written_later(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    failing: Callable[[], Callable[..., int]],
) -> None:
    file = JsonLines(path)
    file.add([{"step": 1}])

    for step in (2, 3):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, failing())
            file.add([{"step": step}])
        assert path.read_text() == text(1), "half a line is none"
    assert not file.is_complete

    file.add([{"step": 4}])

    assert file.is_complete
    assert path.read_text() == text(1, 2, 3, 4)


@pytest.mark.parametrize("num_taken", [0, 1, 2])
def test_lines_that_a_failing_disk_has_taken_are_not_written_twice(
    path: Path, monkeypatch: pytest.MonkeyPatch, num_taken: int
) -> None:
    """The disk writes some lines, fails, and then rejects truncation too."""
    file = JsonLines(path)
    file.add([{"step": 1}])
    write = os.write
    taken = text(2, 3, 3)[: num_taken * len(text(2)) + 4].encode()

    def take_some(descriptor: int, data: bytes) -> int:
        write(descriptor, taken)
        raise FULL

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", take_some)
        patch.setattr(os, "truncate", fail)
        file.add([{"step": 2}, {"step": 3}])
    assert path.read_bytes() == text(1).encode() + taken

    file.add([{"step": 4}])

    assert path.read_text() == text(1, 2, 3, 4)


@pytest.mark.parametrize("what", ["the file", "its folder"])
def test_lines_that_only_could_not_be_synced_are_not_written_twice(
    path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    file = JsonLines(path)
    with monkeypatch.context() as patch:
        if what == "the file":
            patch.setattr(os, "fsync", fail)
            patch.setattr(os, "truncate", fail)
        else:
            patch.setattr("moe_ffn.training.monitoring.json_lines.sync_folder", fail)
        file.add([{"step": 4}])
    assert steps(path) == [4]
    file.add([{"step": 6}])

    assert file.is_complete
    assert steps(path) == [4, 6]


def test_a_removed_folder_is_recreated(path: Path) -> None:
    file = JsonLines(path)
    file.add([{"step": 2}])
    path.unlink()
    path.parent.rmdir()

    file.add([{"step": 4}])

    assert path.read_text() == text(4)


def test_after_half_a_line_of_a_process_that_died_another_begins(path: Path) -> None:
    JsonLines(path).add([{"step": 2}])
    with path.open("a") as file:
        file.write('{"step": 4')
    JsonLines(path).add([{"step": 4}])
    assert path.read_text() == text(2, 4)


@pytest.mark.parametrize("is_synced", [True, False])
def test_lines_are_synced_by_add_or_by_sync(
    path: Path, monkeypatch: pytest.MonkeyPatch, is_synced: bool
) -> None:
    file = JsonLines(path, is_synced=is_synced)
    file.add([{"step": 2}])
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))

    file.add([{"step": 4}])
    assert synced == ([path.stat().st_size] if is_synced else [])

    file.sync()
    assert synced[-1:] == [path.stat().st_size]


def test_lines_after_a_step_are_cut(path: Path) -> None:
    JsonLines(path).add([{"step": step} for step in (2, 4, 6)])
    with path.open("a") as file:
        file.write('{"step": 8')  # the process died within a line

    cut_lines(path, Line, lambda line: line.step <= 4)
    assert path.read_text() == text(2, 4)

    cut_lines(path, Line, lambda line: False)
    cut_lines(path, Line, lambda line: False)
    assert not path.exists()
    assert num_damaged(path, Line) == 0


DAMAGES = {
    "bytes": b"\xff\xfe\x00",
    "half": b"{",
    "a step of text": b'{"step": "4"}',
    "a number without end": b'{"step": ' + b"9" * 200_000 + b"}",
    "nested": b"[" * 100_000,
    "a loss of text": b'{"step": 6, "loss": "low"}',
}


@pytest.mark.parametrize("line", DAMAGES.values(), ids=DAMAGES)
def test_damaged_lines_are_counted_and_left_out(path: Path, line: bytes) -> None:
    JsonLines(path).add([{"step": 2}, {"step": 4}])
    with path.open("ab") as file:
        file.write(line + b'\n{"step": 8}\n')

    assert num_damaged(path, Row) == 1
    assert [value.step for value in read_lines(path, Row)] == [2, 4, 8]
    cut_lines(path, Row, lambda value: value.step <= 4)
    assert path.read_text() == text(2, 4)


def test_a_row_may_hold_nonfinite_numbers(path: Path) -> None:
    values = {"loss": float("nan"), "other": None, "load": [float("inf"), None]}
    JsonLines(path).add([{"step": 2, **values}])
    (row,) = read_lines(path, Row)
    assert num_damaged(path, Row) == 0
    assert str(dict(row.values)) == str(values)


# -- the display of progress, validations and health


def values(load: list[float], **replaced: float) -> dict[str, Tensor]:
    healthy = {"max_violation": max(load) * len(load) - 1, "dropped_fraction": 0, "dead_experts": 0}
    scalars = {name: torch.tensor(value) for name, value in (healthy | replaced).items()}
    return {"load": torch.tensor(load), **scalars}


EVEN, ONE_HAS_ALL = values([0.25] * 4), values([1.0, 0.0, 0.0, 0.0], dead_experts=3)


def test_health_names_the_worst_layer_drops_and_dead_experts() -> None:
    assert routing_health({}) == []
    assert routing_health({"layer_00": EVEN}) == ["MaxVio 0.00 (layer 0)"]
    worse = values([0.25] * 4, dropped_fraction=0.125, dead_experts=1)
    assert routing_health({"layer_00": worse, "layer_07/inner": ONE_HAS_ALL}) == [
        "MaxVio 3.00 (layer 7 inner)",
        "dropped 12.5%",
        "dead experts 4",
    ]


def test_layers_without_loads_are_ranked_by_used_experts() -> None:
    routing = {
        f"layer_{n:02d}": {
            "experts_used": torch.tensor(used),
            "dropped_fraction": torch.tensor(0.0),
        }
        for n, used in enumerate((0.75, 0.25, 0.5))
    }
    assert routing_health(routing) == ["experts used 25.0% (layer 1)"]


def test_the_status_is_of_the_newest_row(moe_fit: Fitted) -> None:
    steps = moe_fit.watchers.steps
    loss = steps.last_row["train/loss"]
    text = "  ".join(status(steps))
    assert text.startswith(f"loss {loss:.3f}  MaxVio ")
    assert text.endswith(f" {steps.tokens_per_second:,.0f} tokens/s")
    assert "  ".join(status(steps, steps.last_row_step)) == text
    assert status(steps, 99)[0] == f"loss {loss:.3f} (step {steps.last_row_step})"


def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Redirect the display to an 80-column terminal and return its text."""
    screen = io.StringIO()
    made = Console(file=screen, force_terminal=True, width=80)
    monkeypatch.setattr(progress, "Console", lambda **_: made)
    return screen


def test_the_bar_shows_the_routing_and_a_frame_between_rows_reads_no_statistics(
    moe_fit: Fitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames are drawn by a thread of rich, for which statistics on a GPU would have to be waited for."""
    screen = terminal(monkeypatch)
    bar = ProgressBar(moe_fit.watchers.steps, moe_fit.watchers.validation)
    trainer: Any = SimpleNamespace(is_global_zero=True, max_steps=6, global_step=6)
    module: Any = None
    bar.on_train_start(trainer, module)
    bar.on_train_batch_end(trainer)

    monkeypatch.setattr(progress, "status", lambda *_: pytest.fail("statistics were read"))
    bar._live.refresh()
    bar.on_train_end(trainer, module)

    assert "MaxVio" in screen.getvalue()


class Frames(Callback):
    """Text of the bar after each batch and at the end of each validation, without colours."""

    def __init__(self, screen: io.StringIO) -> None:
        self.screen = screen
        self.seen: list[str] = []

    def look(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        (bar,) = (callback for callback in trainer.callbacks if isinstance(callback, ProgressBar))
        if bar._live.is_started:
            self.screen.seek(0)
            self.screen.truncate()
            bar._live.refresh()
            self.seen.append(re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", self.screen.getvalue()))

    on_train_batch_end = on_validation_batch_end = on_validation_end = look


@pytest.mark.parametrize("validate_every", [3, 100], ids=["in the fit", "after the fit"])
def test_the_bar_shows_a_validation_and_keeps_its_loss(
    fit: Fit, monkeypatch: pytest.MonkeyPatch, validate_every: int
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    frames = Frames(terminal(monkeypatch))
    done = fit(
        frames,
        model={"ffn": {"type": "moe", "num_experts": 32}},
        trainer={"validate_every_n_steps": validate_every, "max_steps": 4},
    )
    if validate_every == 100:
        frames.seen.clear()
        done.trainer.validate(done.module, datamodule=make_token_data(done.config, done.data))

    loss = done.watchers.validation.last["loss"]
    validating = [frame for frame in frames.seen if "validating" in frame]
    if validate_every == 100:
        assert len(validating) == len(frames.seen) == 2
        assert "training" not in validating[0]
    else:
        # Three steps, two batches, the end of the validation, and a step.
        assert ["validating" in frame for frame in frames.seen] == [False] * 3 + [True] * 2 + [
            False
        ] * 2
        assert "3/4" in validating[0]
        shown = " ".join(frames.seen[-1].split())
        assert f"validation loss {loss:.3f} (step 3)" in shown
    assert "1/2" in validating[0]
    assert "2/2" in validating[1]
    assert all(len(line) <= 80 for frame in frames.seen for line in frame.splitlines())


def test_the_time_left_leaves_out_the_first_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    steps: Any = SimpleNamespace(last_row={})
    validation: Any = None
    lines = ProgressLines(steps, validation)
    trainer: Any = SimpleNamespace(is_global_zero=True, max_steps=10, global_step=4)
    module: Any = None

    lines.on_train_start(trainer, module)  # resumed after step 4
    for seconds, step in ((63, 5), (20, 6), (40, 7), (20, 8), (20, 10)):
        now, trainer.global_step = now + seconds, step
        lines.on_train_batch_end(trainer)

    assert capsys.readouterr().err.splitlines() == [
        "step 5/10",
        "step 6/10  80 s left",
        "step 7/10  90 s left",
        "step 8/10  53 s left",
        "step 10/10",
    ]


def validation_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("validation at ")]


def test_without_a_terminal_each_validation_has_a_line_with_its_loss(
    fit: Fit, capsys: pytest.CaptureFixture[str]
) -> None:
    done = fit(trainer={"validate_every_n_steps": 4, "max_steps": 6})
    losses = [row["validation/loss"] for _, row in done.logger.named("validation")]
    assert validation_lines(capsys.readouterr().err) == [
        f"validation at step 4: loss {losses[0]:.4f}"
    ]

    done.trainer.validate(done.module, datamodule=make_token_data(done.config, done.data))

    losses = [row["validation/loss"] for _, row in done.logger.named("validation")]
    assert validation_lines(capsys.readouterr().err) == [
        f"validation at step 6: loss {losses[1]:.4f}"
    ]
