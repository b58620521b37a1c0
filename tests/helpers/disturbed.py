"""The training program, with something done to its disk after some of its steps.

python tests/helpers/disturbed.py SEEN DISTURBANCE RUN [OPTION...]

Writes into the file SEEN, as JSON, what a reader saw who opened the files of RUN again and again.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moe_ffn.cli.exit import exit_on_bad_input
from moe_ffn.cli.train import main as train
from moe_ffn.runs.folder import CHECKPOINTS_FOLDER, METRICS_FILE
from moe_ffn.training.monitoring.json_lines import Row, num_damaged
from moe_ffn.training.recovery import checkpoint_keeper
from moe_ffn.training.recovery.checkpoint_file import CheckpointError, read_checkpoint

BEGIN, END = 5, 9
"""The optimizer steps after which a disturbance begins and ends."""

_fsync = os.fsync


def fill(run: Path) -> None:
    with (run.parent / "filler").open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


def forbid(run: Path) -> None:
    """Put the same folder over itself, read-only: what is open for writing stays so."""
    place = str(run.parent)
    subprocess.run(["mount", "--bind", place, place], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", place], check=True)


def allow(run: Path) -> None:
    subprocess.run(["mount", "-o", "remount,bind,rw", str(run.parent)], check=True)


def fail(descriptor: int) -> None:
    raise OSError(errno.EIO, "Input/output error")


def sync_with(sync: Callable[[int], None]) -> Callable[[Path], None]:
    def replace(run: Path) -> None:
        os.fsync = sync

    return replace


DISTURBANCES: dict[str, dict[int, Callable[[Path], object]]] = {
    "full": {BEGIN: fill, END: lambda run: (run.parent / "filler").unlink()},
    "full to the end": {BEGIN: fill},
    "read-only": {BEGIN: forbid, END: allow},
    "read-only to the end": {BEGIN: forbid},
    "failing": {BEGIN: sync_with(fail), END: sync_with(_fsync)},
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
    seen, name, run, *options = argv
    events, folder, reader = DISTURBANCES[name], Path(run), Reader(Path(run))
    keeper = checkpoint_keeper.CheckpointKeeper
    step_end = keeper.on_train_batch_end

    def disturbed(self: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step in events:
            events[trainer.global_step](folder)
        step_end(self, trainer, *args, **kwargs)

    keeper.on_train_batch_end = disturbed
    reader.start()
    try:
        return train(options)
    finally:
        reader.stop()
        litter = [str(path.relative_to(folder)) for path in folder.rglob("*.unfinished")]
        found = {"looks": reader.num_looks, "unreadable": reader.unreadable, "litter": litter}
        Path(seen).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(exit_on_bad_input(main))
