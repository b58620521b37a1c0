"""A synthetic run and its page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.synthetic_run import Written, write_run


@pytest.fixture
def moe(tmp_path: Path) -> Path:
    return write_run(tmp_path / "runs" / "moe")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that no test changes, with its page."""
    return write_run(tmp_path_factory.mktemp("runs") / "moe")


@pytest.fixture(scope="module")
def page(folder: Path) -> Written:
    return Written(folder)
