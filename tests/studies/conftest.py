"""Studies are trained where they may write."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(stay_in_tmp_path: None) -> None: ...
