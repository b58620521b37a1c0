"""Disks that are full, read-only, slow, failing, or taken away in the middle of a run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import SkipTest

from experiments.selftest.case import Case, Chapter
from experiments.selftest.same_run import require_same
from experiments.selftest.scene import Finished, finish, lasting_folder, options, run, start_command
from moe_ffn.runs.folder import CHECKPOINTS_FOLDER, CONFIG_FILE, FACTS_FILE, TOKENIZER_FILE

SAVE_OFTEN = {"checkpoints__every_n_steps": "2", "run__name": "run"}


@dataclass(frozen=True)
class Disturbed:
    """A run whose disk was disturbed, and what a reader saw of it meanwhile."""

    done: Finished
    folder: Path
    """A copy, where the disk itself is gone."""
    looks: int

    @property
    def lines(self) -> list[str]:
        """What was said of disks and checkpoints."""
        return [line for line in self.done.stderr.splitlines() if line.startswith("disk: ")]


@cache
def _undisturbed() -> Path:
    """The same run on a good disk, made once."""
    folder = lasting_folder()
    done = run(*options(folder, **SAVE_OFTEN))
    assert done.code == 0, done.stderr
    return folder / "runs" / "run"


def _disturb(folder: Path, disturbance: str, megabytes: int | None = None) -> Disturbed:
    """Train with a disturbance.

    Args:
        megabytes: of a disk of its own for the runs, which nobody else sees; None for the folder's.
    """
    runs, copied, report = folder / "runs", folder / "copied", folder / "seen.json"
    runs.mkdir()
    argv = [
        sys.executable, "-m", "experiments.selftest.disturbed",
        str(report), disturbance, str(runs / "run"),
        *options(folder, **SAVE_OFTEN),
    ]  # fmt: skip
    if megabytes is None:
        done, left = finish(start_command(argv)), runs / "run"
    else:
        mount = f"mount -t tmpfs -o size={megabytes}m none '{runs}'"
        require_able_to(mount)
        script = f"{mount} && \"$@\"; code=$?; cp -a '{runs}' '{copied}'; exit $code"
        done, left = finish(start_command([*ALONE, script, "sh", *argv])), copied / "run"
    assert report.exists(), done.stderr
    seen = json.loads(report.read_text(encoding="utf-8"))
    assert "Traceback" not in done.stderr, done.stderr
    assert not seen["unreadable"], f"a reader met {seen['unreadable'][:3]}"
    assert not seen["litter"], f"left behind: {seen['litter']}"
    assert seen["looks"], "nobody looked"
    found = Disturbed(done, left, seen["looks"])
    _require_said_once(found)
    return found


ALONE = ("unshare", "-rm", "sh", "-c")
"""Runs a script whose mounts nobody else sees."""


def require_able_to(mount: str) -> None:
    """SkipTest where this machine does not permit it."""
    try:
        subprocess.run([*ALONE, mount], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", None) or str(error)
        raise SkipTest(
            f"this machine gives no disk of one's own ({why.splitlines()[0]})"
        ) from error


def _require_said_once(found: Disturbed) -> None:
    """One line for each file that cannot be written, and one when it can again."""
    for what in ("cannot be written", "is written again"):
        said = [m[1] for line in found.lines if (m := re.match(rf"disk: '(.+)' {what}", line))]
        assert len(said) == len(set(said)), f"said more than once: {found.lines}"


def _for_a_while(disturbance: str, megabytes: int | None, why: str) -> Callable[[Path], str]:
    """It ends as the undisturbed run, to the bit, once the disk is good again."""

    def check(folder: Path) -> str:
        found = _disturb(folder, disturbance, megabytes)
        assert found.done.code == 0, found.done.stderr
        assert any(f"{CHECKPOINTS_FOLDER}' cannot be written ({why})" in x for x in found.lines), (
            f"not said: {found.done.stderr}"
        )
        assert any(f"{CHECKPOINTS_FOLDER}' is written again" in x for x in found.lines), found.lines
        require_same(_undisturbed(), found.folder)
        return f"{len(found.lines)} lines; {found.looks} looks by a reader, all good; ends the same"

    return check


def _to_the_end(disturbance: str, why: str) -> Callable[[Path], str]:
    """Trained to the last step; said and exit code 1; what is left can go on when there is room."""

    def check(folder: Path) -> str:
        found = _disturb(folder, disturbance, megabytes=16)
        done = found.done
        assert done.code == 1, f"exit code {done.code}: {done.stderr}"
        assert "step 12/12" in done.stderr, "training did not go on"
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, done.stderr
        assert f"the weights of step 12 are not saved ({why})" in errors[0], errors
        resumed = run("--resume", str(found.folder))
        assert resumed.code == 0, resumed.stderr
        require_same(_undisturbed(), found.folder)
        return "exit code 1, and resumed in a good place it ends the same"

    return check


def _removed(disturbance: str) -> Callable[[Path], str]:
    """The folder comes back, so that a person can use what is in it."""

    def check(folder: Path) -> str:
        found = _disturb(folder, disturbance)
        assert found.done.code == 0, found.done.stderr
        for name in (CONFIG_FILE, FACTS_FILE, TOKENIZER_FILE):
            assert (found.folder / name).exists(), f"{name} did not come back"
        told = [line for line in found.lines if "written again" in line and CONFIG_FILE in line]
        assert len(told) == 1, found.done.stderr
        _require_same_weights(found.folder)
        text = run(str(found.folder), program="experiments.generate")
        assert text.code == 0, text.stderr
        return f"{told[0].replace(str(folder), 'FOLDER')}; its weights are the undisturbed run's"

    return check


def _without_checkpoints(folder: Path) -> str:
    found = _disturb(folder, "without its checkpoints")
    assert found.done.code == 0, found.done.stderr
    require_same(_undisturbed(), found.folder)
    return "they come back; ends the same"


def _slow(folder: Path) -> str:
    found = _disturb(folder, "slow")
    assert found.done.code == 0, found.done.stderr
    told = [line for line in found.lines if "a checkpoint took" in line]
    assert len(told) == 1, found.done.stderr
    require_same(_undisturbed(), found.folder)
    return "one line; ends the same"


def _two_ranks(folder: Path) -> str:
    """The one that writes cannot, and the other does not wait for ever."""
    script = 'ulimit -f 200; exec "$@"'  # blocks of 512 or 1024 bytes; a checkpoint has 340 KB
    argv = [
        sys.executable, "-m", "experiments.train", *options(folder, **SAVE_OFTEN),
        "--trainer.devices", "2", "--trainer.strategy", "ddp",
    ]  # fmt: skip
    done = finish(start_command(["sh", "-c", script, "sh", *argv]))
    assert done.code == 1, f"exit code {done.code}: {done.stderr}"
    assert "step 12/12" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    checkpoints = folder / "runs" / "run" / CHECKPOINTS_FOLDER
    told = [line for line in done.stderr.splitlines() if "cannot be written" in line]
    assert len([line for line in told if CHECKPOINTS_FOLDER in line]) == 1, done.stderr
    assert not list(checkpoints.iterdir()), "something was left"
    return "12 steps on both, one line, exit code 1"


def _require_same_weights(folder: Path) -> None:
    import torch

    from moe_ffn.training.recovery.checkpoint_file import read_checkpoint

    name = Path(CHECKPOINTS_FOLDER) / "step_00000012.ckpt"
    one, other = (read_checkpoint(place / name)["state_dict"] for place in (_undisturbed(), folder))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one), "other weights"


def _fits_in_part(folder: Path) -> str:
    """Whatever part of a checkpoint there is room for, the one before stands, and nothing beside it."""
    import resource

    import torch

    from moe_ffn.training.recovery.checkpoint_file import read_checkpoint, write_checkpoint

    path = folder / "step_00000001.ckpt"
    values: dict[str, Any] = {"weights": [torch.full((1000,), float(n)) for n in range(20)]}
    write_checkpoint({"before": 1}, path)
    before = path.read_bytes()
    write_checkpoint(values, folder / "whole.ckpt")
    size = (folder / "whole.ckpt").stat().st_size
    (folder / "whole.ckpt").unlink()
    num_rooms = 20
    rooms = [size * part // num_rooms for part in range(num_rooms)] + [size - 1]
    for room in rooms:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        try:
            write_checkpoint(values, path)
            failed = False
        except OSError:
            failed = True
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert failed, f"{size} bytes were written where {room} may be"
        assert path.read_bytes() == before, f"with room for {room} bytes the one before is lost"
        assert [p.name for p in folder.iterdir()] == [path.name], "something was left"
    assert read_checkpoint(path) == {"before": 1}
    return f"{len(rooms)} sizes of the rest of the disk"


def _cases() -> Iterable[Case]:
    yield Case("a checkpoint for which there is room in part", _fits_in_part, short=True)
    full, read_only = "No space left on device", "Read-only file system"
    yield Case("full for a while", _for_a_while("full", 16, full))
    yield Case("full to the end", _to_the_end("full to the end", full))
    yield Case("read-only for a while", _for_a_while("read-only", 16, read_only))
    yield Case("read-only to the end", _to_the_end("read-only to the end", read_only))
    yield Case("no large files for a while", _for_a_while("limited", None, "File too large"))
    yield Case("errors for a while", _for_a_while("failing", None, "Input/output error"))
    yield Case("folder removed", _removed("removed"))
    yield Case("folder removed at the last step", _removed("removed at the last step"))
    yield Case("checkpoints removed", _without_checkpoints)
    yield Case("slow", _slow)
    yield Case("two ranks, no large files", _two_ranks)


CHAPTER = Chapter(
    "disks",
    "On a disk that is full, read-only, failing, slow or taken away training goes on, says so once, tries "
    "again, and no unreadable file ever stands at a final name.",
    _cases,
)
