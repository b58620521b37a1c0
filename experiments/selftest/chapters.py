"""The chapters, in the order of docs/reliability.md."""

from __future__ import annotations

from experiments.selftest import kills, offline, properties, resume, together
from experiments.selftest.case import Chapter

CHAPTERS: tuple[Chapter, ...] = (
    resume.CHAPTER,
    kills.CHAPTER,
    properties.CHAPTER,
    together.CHAPTER,
    offline.CHAPTER,
)
