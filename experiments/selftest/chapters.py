"""The chapters, in the order of docs/reliability.md."""

from __future__ import annotations

from experiments.selftest import endurance, kills, numbers, resume
from experiments.selftest.case import Chapter

CHAPTERS: tuple[Chapter, ...] = (
    resume.CHAPTER,
    kills.CHAPTER,
    numbers.CHAPTER,
    endurance.CHAPTER,
)
