"""Checkpoints that are lost, of another run, or of a state that training cannot load."""

from __future__ import annotations

import errno
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_ffn.config.errors import ConfigError
from moe_ffn.runs.reader import load_model
from moe_ffn.training.recovery import checkpoint_keeper
from tests.helpers.copied_run import resume, rewrite, start_of
from tests.helpers.own_disk import ALONE, mounting
from tests.helpers.same_run import differences
from tests.helpers.tiny_runs import (
    NEWEST,
    OLDER,
    WITH_ALARMS,
    finish,
    options,
    run_here,
    start_command,
    trained,
    unfinished_copy,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return unfinished_copy(tmp_path)


def another_run(folder: Path) -> None:
    for name in (NEWEST, "best.ckpt"):
        rewrite(
            folder / "checkpoints" / name,
            lambda values: values["identity"].update(run_id="f" * 16),
        )


def test_a_checkpoint_of_another_run_is_skipped(folder: Path) -> None:
    another_run(folder)
    said = f"{NEWEST} was made with run_id ffffffffffffffff, but this run has "

    assert (start := start_of(folder)).step == 8
    assert said in start.describe(folder)
    (folder / "checkpoints" / OLDER).unlink()
    with pytest.raises(ConfigError, match=said) as resumed:
        start_of(folder)
    with pytest.raises(ConfigError, match=r"best\.ckpt was made with run_id f+, but"):
        load_model(folder)
    assert str(resumed.value).endswith("; put back what was there, or start a new run")


def without_guard(values: dict[str, Any]) -> None:
    del values["guard"]


def with_old_guard(values: dict[str, Any]) -> None:
    del values["guard"]["losses"]


def with_old_keeper(values: dict[str, Any]) -> None:
    del values["callbacks"]["CheckpointKeeper"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_guard, "lacks 'guard', so no run can be resumed from it"),
        (with_old_guard, "holds a state that this version cannot load (KeyError('losses'))"),
        (
            with_old_keeper,
            "holds a state that this version cannot load (KeyError('CheckpointKeeper'))",
        ),
    ],
)
def test_a_state_that_training_cannot_load_is_skipped(
    folder: Path, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    rewrite(folder / "checkpoints" / NEWEST, change)

    assert start_of(folder).skipped == (f"{NEWEST} {said}",)


def test_a_run_whose_checkpoints_are_lost_restarts_and_ends_the_same(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints")

    done = resume(folder)

    assert done.code == 0, done.stderr
    assert f"resuming {folder} from the start: it has no checkpoint" in done.stdout
    assert differences(trained(), folder) == []


def test_a_run_gets_its_id_back(folder: Path) -> None:
    run_id = json.loads((folder / "facts.json").read_text())["run_id"]
    (folder / "facts.json").unlink()

    done = resume(folder)

    assert done.code == 0, done.stderr
    assert f"'{folder / 'facts.json'}' is missing or damaged; it is recreated" in done.stderr
    assert json.loads((folder / "facts.json").read_text())["run_id"] == run_id


@pytest.mark.slow
def test_a_rate_may_be_changed_again_and_again(folder: Path) -> None:
    """Each time from the checkpoint of step 8, made with the first of them."""
    for rate in ("0.007", "0.02", "0.01"):
        (folder / "checkpoints" / NEWEST).unlink()
        (folder / "summary.json").unlink(missing_ok=True)
        done = resume(folder, "--optimizer.learning_rate", rate)
        assert done.code == 0, done.stderr
        assert f"from {OLDER}" in done.stdout

    assert not [d for d in differences(trained(), folder) if "alarms" not in d]


# -- disks that take no checkpoint


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """No checkpoint can be written any more, until it is called."""
    write = checkpoint_keeper.write_checkpoint

    def fail(values: dict[str, Any], path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_keeper, "write_checkpoint", fail)
    return lambda: monkeypatch.setattr(checkpoint_keeper, "write_checkpoint", write)


def test_after_a_disk_too_small_for_any_checkpoint_the_advice_works(
    tmp_path: Path, full: Callable[[], None]
) -> None:
    done = run_here(*options(tmp_path, run__name="run", **WITH_ALARMS))
    folder = tmp_path / "runs" / "run"
    assert done.code == 1
    assert done.stderr.splitlines()[-1] == (
        "error: the weights of step 12 are not saved (No space left on device); fix that, then: moe-ffn "
        f"train --resume {folder}"
    )
    full()

    done = resume(folder)

    assert done.code == 0, done.stderr
    assert f"resuming {folder} from the start: it has no checkpoint" in done.stdout
    assert differences(trained(), folder) == []


ROOMS = {
    "not for a row of weights": "100k",
    "for the best alone": "300k",
    "for all but a byte": "440k",
}


@pytest.mark.slow
@pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS)
def test_once_there_is_room_on_a_real_disk_the_advice_works(tmp_path: Path, room: str) -> None:
    """A file system of its own for the runs, which is made larger after the first end."""
    runs = tmp_path / "runs"
    runs.mkdir()
    train = f"{sys.executable} -m experiments.train"
    script = (
        f'{mounting(runs, room)}; {train} "$@"; echo "ended $?"; mount -o remount,size=64m \'{runs}\'; '
        f"{train} --resume '{runs}/run'; code=$?; cp -a '{runs}' '{tmp_path}/copied'; exit $code"
    )
    command = [*ALONE, script, "sh", *options(tmp_path, run__name="run", **WITH_ALARMS)]
    done = finish(start_command(command), timeout=300)

    assert "ended 1\n" in done.stdout, done.stderr
    assert f"fix that, then: moe-ffn train --resume {runs}/run\n" in done.stderr
    assert done.code == 0, done.stderr
    assert f"resuming {runs}/run from the start: it has no checkpoint" in done.stdout
    assert differences(trained(), tmp_path / "copied" / "run") == []
