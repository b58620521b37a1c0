"""A run that lost its checkpoints is not begun anew, and one that never had any is."""

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
from moe_ffn.runs.json_files import Saved
from moe_ffn.training.recovery import checkpoint_keeper
from tests.helpers.copied_run import Do, lose, resume, start_of
from tests.helpers.own_disk import ALONE, mounting
from tests.helpers.same_run import differences
from tests.helpers.snapshot import snapshot
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


def without_checkpoints(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints")


def best_alone(folder: Path) -> None:
    for name in (OLDER, NEWEST):
        (folder / "checkpoints" / name).unlink()


def renamed_all(folder: Path) -> None:
    for path in (folder / "checkpoints").iterdir():
        path.rename(path.with_name(f"{path.name}.skipped"))


def saved(text: str) -> Do:
    return lambda folder: (folder / "saved.json").write_text(text)


def saved_step(step: Any) -> Do:
    def do(folder: Path) -> None:
        run_id = json.loads((folder / "facts.json").read_text())["run_id"]
        (folder / "saved.json").write_text(
            json.dumps({"run_id": run_id}).replace("}", f', "last_saved_step": {step}}}')
        )

    return do


SAID = f"though saved.json says that {NEWEST} was saved; put it back, or start a new run"
GUESSED = (
    "though the run came further than its first, and saved.json, which says whether that was saved, is "
    "missing or damaged; put them back, or start a new run"
)
LOST: dict[str, tuple[list[Do], str]] = {
    "the folder": ([without_checkpoints], f"has no checkpoint to go on from, {SAID}"),
    "all but the best": (
        [best_alone], f"has no checkpoint to go on from (best.ckpt holds weights alone), {SAID}"
    ),
    "all passed over": ([renamed_all], SAID),
    "and the rows": ([without_checkpoints, lose("metrics.jsonl")], SAID),
    "and the facts": ([without_checkpoints, lose("facts.json")], SAID),
    "and saved.json": ([without_checkpoints, lose("saved.json")], GUESSED),
    **{
        f"and saved.json has {step}": ([without_checkpoints, saved_step(step)], GUESSED)
        for step in (
            "-1", "true", '"12"', "12.0", "1e400", "NaN", "[12]", "{}", "9" * 400, "9" * 5000, "1000000001"
        )
    },
    **{
        f"and saved.json is {text[:20]!r}": ([without_checkpoints, saved(text)], GUESSED)
        for text in ("", "{", "null", "[]", "12", "\0", "[" * 99_000, '{"last_saved_step": 12}')
    },
    "and saved.json is another run's": (
        [without_checkpoints, saved('{"run_id": "ffffffffffffffff", "last_saved_step": null}')], GUESSED
    ),
    "and saved.json is a folder": (
        [without_checkpoints, lose("saved.json"), lambda folder: (folder / "saved.json").mkdir()], GUESSED
    ),
}  # fmt: skip


@pytest.mark.parametrize(("do", "said"), LOST.values(), ids=LOST)
def test_a_run_that_lost_its_checkpoints_is_not_begun_anew(
    folder: Path, do: list[Do], said: str
) -> None:
    for change in do:
        change(folder)
    before = snapshot(folder, ".lock")

    with pytest.raises(ConfigError) as error:
        start_of(folder)

    assert said in str(error.value)
    assert str(error.value).startswith(f"'{folder}/checkpoints' ")
    assert "\n" not in str(error.value)
    assert snapshot(folder, ".lock") == before


def test_the_program_refuses_it_and_touches_nothing(folder: Path) -> None:
    without_checkpoints(folder)
    before = snapshot(folder, ".lock")

    done = resume(folder)

    assert done.code == 2
    assert done.own_lines == [
        f"error: '{folder}/checkpoints' has no checkpoint to go on from, {SAID}"
    ]
    assert snapshot(folder, ".lock") == before


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
    assert (
        f"resuming {folder} from the start: no checkpoint was saved before it ended" in done.stdout
    )
    assert differences(trained(), folder) == []


@pytest.mark.slow
def test_a_record_that_the_disk_does_not_take_is_written_at_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, tried = checkpoint_keeper.write_file, []

    def fail_twice(folder: Path, name: str, text: str) -> None:
        tried.append(name)
        if len(tried) < 3:
            raise OSError(errno.EIO, "Input/output error")
        write(folder, name, text)

    monkeypatch.setattr(checkpoint_keeper, "write_file", fail_twice)
    done = run_here(*options(tmp_path, run__name="run", checkpoints__every_n_steps="3"))

    assert done.code == 0, done.stderr
    folder = tmp_path / "runs" / "run"
    found = Saved.read(folder / "saved.json")
    assert found.is_whole
    assert found.last_saved_step == 12
    assert [line for line in done.stderr.splitlines() if line.startswith("disk: ")] == [
        f"disk: '{folder}' cannot be written (Input/output error); training goes on and tries again",
        f"disk: '{folder}' is written again",
    ]


@pytest.mark.parametrize("removed", ["saved.json", "facts.json"])
def test_a_file_that_comes_back_claims_what_was_saved(tmp_path: Path, removed: str) -> None:
    kept = checkpoint_keeper.KeptFiles(tmp_path, {"saved.json": "null", "facts.json": "{}"})
    kept.put_back()
    kept.change("saved.json", "8")
    (tmp_path / removed).unlink()

    kept.put_back()

    assert (tmp_path / "saved.json").read_text() == "8"
    assert (tmp_path / "facts.json").read_text() == "{}"


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
    assert f"fix that, then: python -m experiments.train --resume {runs}/run\n" in done.stderr
    assert done.code == 0, done.stderr
    assert f"resuming {runs}/run from the start: no checkpoint was saved" in done.stdout
    assert differences(trained(), tmp_path / "copied" / "run") == []
