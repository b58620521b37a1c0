"""Runs of one step that tests share."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def short_run(
    run_train: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Return the folder of a run of one step, which is trained once for each command line."""

    @cache
    def run(*options: str) -> Path:
        done = run_train(tmp_path_factory.mktemp("short"), *options, "--trainer.max_steps", "1")
        assert done.code == 0, done.stderr
        return done.folder

    return run


@pytest.fixture(scope="session")
def dense_run(short_run: Callable[..., Path]) -> Path:
    """A run that routes nothing."""
    return short_run("--model.ffn", "swiglu")


@pytest.fixture(scope="session")
def depths_run(short_run: Callable[..., Path]) -> Path:
    """A model that sees both sides, with half of the tokens past its second block."""
    ffn = "{'1': {type: mixture_of_depths, ffn: {type: moe, num_experts: 4}}}"
    return short_run("--model.causal", "false", "--model.ffn_at", ffn)
