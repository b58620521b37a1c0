"""The comparison of two runs, which other tests here rely on, sees every difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ffn.runs.folder import METRICS_FILE, SAMPLES_FILE, SUMMARY_FILE
from moe_ffn.training.recovery.checkpoint_file import read_checkpoint, write_checkpoint
from tests.helpers.same_run import differences, differing
from tests.helpers.synthetic_run import change
from tests.helpers.tiny_runs import NEWEST, finished_copy, trained


def test_a_last_digit_of_a_weight_is_a_difference_and_durations_are_none(tmp_path: Path) -> None:
    other = finished_copy(tmp_path)
    change(other / SUMMARY_FILE, tokens_per_second=1)
    assert differences(trained(), other) == []

    path = other / "checkpoints" / NEWEST
    values = read_checkpoint(path)
    weight = next(iter(values["state_dict"].values()))
    weight.view(-1)[3] = weight.view(-1)[3].nextafter(weight.new_tensor(9.0))
    write_checkpoint(values, path)
    assert differences(trained(), other)[0].startswith(f"{NEWEST}/state_dict")


@pytest.mark.parametrize(
    ("name", "digit"), [(METRICS_FILE, "0"), (SAMPLES_FILE, "8"), (SUMMARY_FILE, "0")]
)
def test_another_digit_is_a_difference(tmp_path: Path, name: str, digit: str) -> None:
    other = finished_copy(tmp_path)
    text = (other / name).read_text()
    (other / name).write_text(text.replace(digit, "1", 1))

    assert differences(trained(), other)[0].startswith(name)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        ({"a": None}, {}),
        ([1], [1, 2]),
        (torch.zeros(2), torch.zeros(1, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.tensor([torch.nan]), torch.tensor([0.5])),
    ],
    ids=repr,
)
def test_values_that_differ(one: Any, other: Any) -> None:
    assert len(differing(one, other, "value")) == 1
    assert differing(one, one, "value") == []
