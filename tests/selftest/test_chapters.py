"""The short version of every chapter; `python -m experiments.selftest` tries them all."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.selftest.case import Case
from experiments.selftest.chapters import CHAPTERS

SHORT = [
    pytest.param(case, id=f"{chapter.name}: {case.name}")
    for chapter in CHAPTERS
    for case in chapter.cases()
    if case.short
]


@pytest.mark.parametrize("case", SHORT)
def test_kept(case: Case, tmp_path: Path) -> None:
    case.check(tmp_path)
