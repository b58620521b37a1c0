"""The chapters, in the order of docs/reliability.md."""

from __future__ import annotations

from experiments.selftest import configs, damaged_runs, data
from experiments.selftest.case import Chapter

CHAPTERS: tuple[Chapter, ...] = (configs.CHAPTER, data.CHAPTER, damaged_runs.CHAPTER)
