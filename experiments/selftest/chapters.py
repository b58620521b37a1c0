"""The chapters, in the order of docs/reliability.md."""

from __future__ import annotations

from experiments.selftest import (
    configs,
    damage,
    damaged_runs,
    data,
    disks,
    endurance,
    kills,
    numbers,
    offline,
    properties,
    resume,
    together,
)
from experiments.selftest.case import Chapter

CHAPTERS: tuple[Chapter, ...] = (
    resume.CHAPTER,
    kills.CHAPTER,
    disks.CHAPTER,
    damage.CHAPTER,
    damaged_runs.CHAPTER,
    numbers.CHAPTER,
    configs.CHAPTER,
    data.CHAPTER,
    properties.CHAPTER,
    endurance.CHAPTER,
    together.CHAPTER,
    offline.CHAPTER,
)
