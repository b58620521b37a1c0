"""Kernels that this machine has not compiled yet are compiled before a program measures its speed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_ffn.cli import generate
from moe_ffn.kernels.native import build
from moe_ffn.training.monitoring import callbacks
from tests.helpers.tiny_runs import run_here

COMPILING_SECONDS = 1000.0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The clock when the kernels were compiled, which takes long; looking at the clock takes a moment."""
    now, found = [0.0], []

    def look() -> float:
        now[0] += 0.001
        return now[0]

    def load() -> str:
        found.append(now[0])
        now[0] += COMPILING_SECONDS
        return "is not what this test is about"

    for module in (generate, callbacks):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=look))
    monkeypatch.setattr(build, "load", load)
    build.unavailable_reason.cache_clear()
    yield found
    build.unavailable_reason.cache_clear()


@pytest.mark.parametrize(
    "ffn", ["{type: moe, num_experts: 4}", "{type: soft_moe, num_experts: 4}", "dense"]
)
def test_training_does_not_measure_the_compiler(
    run_train: Callable[..., Any], tmp_path: Path, compiled: list[float], ffn: str
) -> None:
    objective = ["--model.causal", "false"] if "soft" in ffn else []
    run = run_train(tmp_path, "--model.ffn", ffn, *objective)
    assert run.code == 0, run.stderr
    assert len(compiled) == (ffn != "dense"), "once, and for experts alone"
    seconds = [row["train/seconds"] for row in run.rows if "train/seconds" in row]
    assert 0 < seconds[-1] < 1


def test_generation_does_not_measure_the_compiler(moe_run: Any, compiled: list[float]) -> None:
    done = run_here(
        str(moe_run.folder), "--prompt", "a", "--num-tokens", "3", program="moe_ffn.cli.generate"
    )
    assert len(compiled) == 1
    assert re.search(r"^3 tokens in 0\.00 s", done.stderr, re.MULTILINE), done.stderr
