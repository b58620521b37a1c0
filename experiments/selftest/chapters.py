"""The chapters, in the order of docs/reliability.md."""

from __future__ import annotations

from experiments.selftest import offline, properties, together
from experiments.selftest.case import Chapter

CHAPTERS: tuple[Chapter, ...] = (properties.CHAPTER, together.CHAPTER, offline.CHAPTER)
