"""Several ranks that train what they are told to, one run after the other, in processes that stay.

To import torch and to find each other takes ranks longer than a tiny run.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from threading import Timer
from typing import IO, Any

from torch import distributed

from tests.helpers.cut import Crash, Cut, cutting
from tests.helpers.tiny_runs import REPOSITORY, Finished, environment, run_here

CRASHED = -9
"""The code of a run that died where it was to be cut."""


@dataclass(frozen=True)
class RankGroup:
    """Processes that wait for work, by rank."""

    processes: Sequence[subprocess.Popen[str]]
    stderr: IO[str]
    """Of all of them together: what libraries say, and how they die."""

    def train(self, *argv: str, cut: Cut | None = None, timeout: float = 240) -> Finished:
        """A run of the program, with all ranks of the group; what the first rank says of it.

        Args:
            cut: where it is to end: a signal reaches the last rank alone, a crash all of them.

        Raises:
            RuntimeError: a rank raised something, or did not answer in time; no rank is left then.
        """
        last = len(self.processes) - 1
        for rank, process in enumerate(self.processes):
            has_cut = cut is not None and (cut.is_crash or rank == last)
            work = {"argv": argv, "cut": asdict(cut) if cut and has_cut else None}
            _pipe(process.stdin).write(json.dumps(work) + "\n")
            _pipe(process.stdin).flush()
        timer = Timer(timeout, self.kill)
        timer.start()
        try:
            answers = [_pipe(process.stdout).readline() for process in self.processes]
        finally:
            timer.cancel()
        found: list[dict[str, Any]] = [
            json.loads(answer) if answer else {"error": "no answer"} for answer in answers
        ]
        errors = [f"rank {rank}: {a['error']}" for rank, a in enumerate(found) if "error" in a]
        if errors:
            self.kill()
            self.stderr.seek(0)
            raise RuntimeError("\n".join([*errors, self.stderr.read()[-2000:]]))
        return Finished(**found[0])

    @property
    def is_over(self) -> bool:
        """Whether a process has ended, so that no other run can be trained."""
        return any(process.poll() is not None for process in self.processes)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()


@contextmanager
def rank_group(num_ranks: int) -> Iterator[RankGroup]:
    """So many ranks on this machine's CPU, until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # As torchrun says it.
    alike = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "reliability",
    }
    with tempfile.TemporaryFile("w+") as stderr:
        processes = [
            subprocess.Popen(
                [sys.executable, __file__],
                cwd=REPOSITORY,
                env=environment(**alike, RANK=str(rank), LOCAL_RANK=str(rank)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
            for rank in range(num_ranks)
        ]
        group = RankGroup(processes, stderr)
        try:
            yield group
        finally:
            group.kill()
            for process in processes:
                process.communicate()


def _pipe(file: IO[str] | None) -> IO[str]:
    assert file is not None
    return file


def _work() -> None:
    """One rank: a line of work in, a line of answer out."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # where libraries print
        for line in sys.stdin:
            print(json.dumps(_answer(**json.loads(line))), file=answers, flush=True)


def _answer(argv: list[str], cut: dict[str, Any] | None) -> dict[str, Any]:
    try:
        with cutting(Cut(**cut) if cut else None):
            answer = run_here(*argv)._asdict()
        if distributed.is_initialized():
            distributed.barrier()  # the next run may go on with this one
    except Crash:
        answer = Finished(CRASHED, "", "")._asdict()
    except BaseException:  # of which the other ranks know nothing
        answer = {"error": traceback.format_exc()}
    return answer


if __name__ == "__main__":
    _work()
