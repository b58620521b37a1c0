"""The comparison of two runs, which other tests here rely on, sees every difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ffn.runs.folder import METRICS_FILE, SAMPLES_FILE, SUMMARY_FILE
from moe_ffn.training.recovery.checkpoint_file import read_checkpoint, write_checkpoint
from tests.helpers.same_run import differences, differing
from tests.helpers.tiny_runs import NEWEST, finished_copy, trained


def test_durations_are_no_difference(tmp_path: Path) -> None:
    other = finished_copy(tmp_path)
    summary = json.loads((other / SUMMARY_FILE).read_text())
    summary["tokens_per_second"] += 1
    (other / SUMMARY_FILE).write_text(json.dumps(summary))

    assert differences(trained(), other) == []


@pytest.mark.parametrize("part", ["state_dict", "optimizer_states", "callbacks"])
def test_another_state_is_a_difference(tmp_path: Path, part: str) -> None:
    other = finished_copy(tmp_path)
    path = other / "checkpoints" / NEWEST
    values = read_checkpoint(path)
    if part == "state_dict":
        weight = next(iter(values[part].values()))
        weight.view(-1)[3] = weight.view(-1)[3].nextafter(weight.new_tensor(9.0))
    else:
        del values[part]
    write_checkpoint(values, path)

    assert differences(trained(), other)[0].startswith(f"{NEWEST}/{part}")


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
