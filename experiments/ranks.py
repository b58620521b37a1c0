"""Which of several processes this is, before torch is imported."""

from __future__ import annotations

import os


def is_first_rank() -> bool:
    """Whether this process is alone, or the first of its ranks, as torchrun and Lightning number them."""
    return os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0"
