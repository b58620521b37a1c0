"""The comparison of two runs, on which these chapters rest, sees a difference wherever there is one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ffn.runs.folder import METRICS_FILE, SAMPLES_FILE, SUMMARY_FILE
from tests.helpers.copied_run import rewrite
from tests.helpers.same_run import differences, differing, require_same
from tests.helpers.tiny_runs import NEWEST, finished_copy, trained


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return finished_copy(tmp_path)


def test_a_run_is_the_same_as_itself(other: Path) -> None:
    assert differences(trained(), other) == []


def test_the_time_it_took_is_no_difference(other: Path) -> None:
    summary = json.loads((other / SUMMARY_FILE).read_text())
    summary["tokens_per_second"] += 1
    (other / SUMMARY_FILE).write_text(json.dumps(summary))

    assert differences(trained(), other) == []


def test_a_weight_that_differs_in_its_last_bit(other: Path) -> None:
    def nudge(values: dict[str, Any]) -> None:
        weight = next(iter(values["state_dict"].values()))
        weight.view(-1)[3] = weight.view(-1)[3].nextafter(weight.new_tensor(9.0))

    rewrite(other / "checkpoints" / NEWEST, nudge)

    first, *_ = differences(trained(), other)  # the output matrix is the embedding, and differs too
    assert first.startswith(f"{NEWEST}/state_dict/decoder.")


@pytest.mark.parametrize("part", ["optimizer_states", "lr_schedulers", "callbacks"])
def test_a_state_that_is_missing(other: Path, part: str) -> None:
    rewrite(other / "checkpoints" / NEWEST, lambda values: values.pop(part))

    assert f"{NEWEST}/{part}" in differences(trained(), other)[0]


@pytest.mark.parametrize(
    ("name", "digit"), [(METRICS_FILE, "0"), (SAMPLES_FILE, "8"), (SUMMARY_FILE, "0")]
)
def test_a_figure_of_a_file(other: Path, name: str, digit: str) -> None:
    text = (other / name).read_text()
    (other / name).write_text(text.replace(digit, "1", 1))

    with pytest.raises(AssertionError, match=rf"^\d+ differences: {name}"):
        require_same(trained(), other)


def test_a_row_too_many(other: Path) -> None:
    with (other / METRICS_FILE).open("a") as file:
        file.write("5\n")

    assert differences(trained(), other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0),
        (1, True),
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
