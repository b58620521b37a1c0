"""The chapters, in the order of docs/reliability.md."""

from __future__ import annotations

from experiments.selftest import damage, disks
from experiments.selftest.case import Chapter

CHAPTERS: tuple[Chapter, ...] = (disks.CHAPTER, damage.CHAPTER)
