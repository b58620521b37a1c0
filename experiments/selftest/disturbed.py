"""The training program, with something done to its disk after some of its steps.

python -m experiments.selftest.disturbed REPORT DISTURBANCE RUN [OPTION...]

Writes into REPORT what a reader saw who opened the files of RUN again and again.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moe_ffn.cli.exit import exit_on_bad_input
from moe_ffn.runs.folder import CHECKPOINTS_FOLDER, METRICS_FILE

BEGIN, END = 5, 9
"""The optimizer steps after which a disturbance begins and ends."""
LIMIT = 100_000
"""Bytes that a file may have under `limited`, fewer than a checkpoint has."""


def _fill(run: Path) -> None:
    """Until there is no room for a byte."""
    with (run.parent / "filler").open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


def _free(run: Path) -> None:
    (run.parent / "filler").unlink()


def _forbid(run: Path) -> None:
    """Put the same folder over itself, read-only: what is open for writing stays so."""
    place = str(run.parent)
    subprocess.run(["mount", "--bind", place, place], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", place], check=True)


def _allow(run: Path) -> None:
    subprocess.run(["mount", "-o", "remount,bind,rw", str(run.parent)], check=True)


def _limit(run: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, resource.RLIM_INFINITY))


def _lift(run: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _break_sync(run: Path) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    os.fsync = fail


_fsync = os.fsync


def _mend_sync(run: Path) -> None:
    os.fsync = _fsync


def _slow_down(run: Path) -> None:
    """A disk that takes a fifth of a second, where a tenth counts as slow."""
    from moe_ffn.training.recovery import checkpoint_keeper

    def crawl(descriptor: int) -> None:
        time.sleep(0.2)
        _fsync(descriptor)

    os.fsync = crawl
    checkpoint_keeper.SLOW_SECONDS = 0.1


def _remove(run: Path) -> None:
    shutil.rmtree(run)


def _remove_checkpoints(run: Path) -> None:
    shutil.rmtree(run / CHECKPOINTS_FOLDER)


DISTURBANCES: dict[str, dict[int, Callable[[Path], object]]] = {
    "none": {},
    "full": {BEGIN: _fill, END: _free},
    "full to the end": {BEGIN: _fill},
    "read-only": {BEGIN: _forbid, END: _allow},
    "read-only to the end": {BEGIN: _forbid},
    "limited": {BEGIN: _limit, END: _lift},
    "failing": {BEGIN: _break_sync, END: _mend_sync},
    "slow": {1: _slow_down},
    "removed": {BEGIN: _remove},
    "removed at the last step": {12: _remove},
    "without its checkpoints": {BEGIN: _remove_checkpoints},
}


class Reader(threading.Thread):
    """Opens the checkpoints and the metrics of a run, over and over, as a person may at any moment."""

    def __init__(self, run: Path) -> None:
        super().__init__(daemon=True)
        self.folder = run
        self.num_looks = 0
        self.unreadable: list[str] = []
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.005):
            self.look()

    def stop(self) -> None:
        self._ended.set()
        self.join()
        self.look()

    def look(self) -> None:
        from moe_ffn.training.monitoring.json_lines import Row, num_damaged
        from moe_ffn.training.recovery.checkpoint_file import CheckpointError, read_checkpoint

        for path in (self.folder / CHECKPOINTS_FOLDER).glob("*.ckpt"):
            try:
                read_checkpoint(path)
                self.num_looks += 1
            except CheckpointError as error:
                if not isinstance(error.__cause__, FileNotFoundError):  # removed in this moment
                    self.unreadable.append(f"{path.name} {error}")
        if damaged := num_damaged(self.folder / METRICS_FILE, Row):
            self.unreadable.append(f"{damaged} lines of {METRICS_FILE}")


def main(argv: Sequence[str]) -> int:
    report, name, run, *options = argv
    from moe_ffn.cli.train import main as train
    from moe_ffn.training.recovery.checkpoint_keeper import CheckpointKeeper

    events, folder, reader = DISTURBANCES[name], Path(run), Reader(Path(run))
    step_end = CheckpointKeeper.on_train_batch_end

    def disturbed(self: CheckpointKeeper, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step in events:
            events[trainer.global_step](folder)
        step_end(self, trainer, *args, **kwargs)

    CheckpointKeeper.on_train_batch_end = disturbed
    reader.start()
    try:
        return train(options)
    finally:
        reader.stop()
        litter = [str(path.relative_to(folder)) for path in folder.rglob("*.unfinished")]
        seen = {"looks": reader.num_looks, "unreadable": reader.unreadable, "litter": litter}
        Path(report).write_text(json.dumps(seen), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(exit_on_bad_input(main))
