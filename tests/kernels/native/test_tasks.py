"""However unequal the loads are, no thread of 2 to 64 waits for long: counted, since few machines have 64.

The code that divides the backward pass says what it would give to each of so many threads.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from heapq import heapreplace
from pathlib import Path

import pytest
import torch

from moe_ffn.kernels.native import build

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(build.unavailable_reason() is not None, reason="needs a C++ compiler"),
]

D_MODEL, D_FF, NUM_ROWS, NUM_EXPERTS = 512, 512, 16384, 8
LOADS = {
    "one expert": [1.0] + [0.0] * 7,
    "half on one": [0.5] + [0.5 / 7] * 7,
    "halves": [2.0**-i for i in range(1, 8)] + [2.0**-7],
    "even": [1 / 8] * 8,
}

Tasks = Callable[[torch.Tensor, int, int, int], tuple[list[int], list[int]]]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Tasks:
    library = tmp_path_factory.mktemp("tasks") / "tasks.so"
    source = Path(__file__).with_name("tasks.cpp")
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or "clang++"]
    words = [word for word in build._command(compiler)[0] if word != "-O3"]
    command = [*words, f"-I{build.HERE}", source, "-o", library, "-ltorch_cpu", "-lc10"]
    subprocess.run(command, check=True)
    torch.ops.load_library(library)
    return torch.ops.moe_ffn_tests.tasks


def time_of(rows_alone: list[int], counts: list[int], threads: int) -> float:
    """Until the last thread is done, in rows of one thread; a thread takes the next task when it is free.

    A row takes half of its time in its tile, and half in the gradients of matrices. Copies are not counted:
    they are the same for all loads.
    """
    num_groups = len(counts) // 4
    free = sorted(float(rows) for rows in rows_alone)
    for group in range(num_groups):
        _, tiles, blocks = counts[3 * group : 3 * group + 3]
        rows = counts[3 * num_groups + group]
        for num_tasks in (tiles, blocks):
            for _ in range(num_tasks):
                heapreplace(free, free[0] + rows / 2 / num_tasks)
            free = [max(free)] * threads
    return max(free)


@pytest.mark.parametrize("loads", LOADS)
def test_no_thread_waits_for_long(
    tasks: Tasks, loads: str, capsys: pytest.CaptureFixture[str]
) -> None:
    loads_E = (torch.tensor(LOADS[loads]) * NUM_ROWS).int()
    offsets_E = loads_E.cumsum(0, dtype=torch.int32)
    assert int(offsets_E[-1]) in range(NUM_ROWS - 8, NUM_ROWS + 1)
    over = {}
    for threads in (2, 3, 4, 8, 16, 32, 64):
        before = torch.get_num_threads()
        try:
            rows_alone, counts = tasks(offsets_E, D_MODEL, D_FF, threads)
        finally:
            torch.set_num_threads(before)
        assert sum(rows_alone) + sum(counts[len(counts) * 3 // 4 :]) == offsets_E[-1]
        over[threads] = time_of(rows_alone, counts, threads) / (int(offsets_E[-1]) / threads)
    with capsys.disabled():
        print(
            f"\n{loads}: time over an even share, by threads:",
            {n: round(t, 2) for n, t in over.items()},
        )
    assert max(over.values()) < 1.25
