"""The rows of a run as a table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from moe_ffn.runs.rows import Rows, flat
from moe_ffn.training.monitoring.json_lines import JsonLines, Row, read_lines


def table(path: Path, *rows: dict[str, Any]) -> Rows:
    JsonLines(path / "metrics.jsonl").add(rows)
    return Rows(read_lines(path / "metrics.jsonl", Row))


def columns(rows: Rows) -> dict[str, tuple[list[int], list[float]]]:
    return {key: (list(s.steps), list(s.values)) for key, s in rows.columns.items()}


def test_a_list_is_one_column_per_expert() -> None:
    assert flat({"train/loss": 2.5, "routing/layer_03/load": [0.25, 0.75]}) == {
        "train/loss": 2.5,
        "routing/layer_03/load/expert_00": 0.25,
        "routing/layer_03/load/expert_01": 0.75,
    }


def test_each_key_is_a_column_of_the_rows_that_have_it(tmp_path: Path) -> None:
    rows = table(
        tmp_path,
        {"step": 2, "train/loss": 3.5},
        {"step": 4, "train/loss": 3.0, "other": None},
        {"step": 4, "validation/loss": 2.5, "load": [0.25, 0.75]},
    )

    assert columns(rows) == {
        "train/loss": ([2, 4], [3.5, 3.0]),
        "validation/loss": ([4], [2.5]),
        "load/expert_00": ([4], [0.25]),
        "load/expert_01": ([4], [0.75]),
    }
    assert len(rows) == 2
    assert list(rows) == [
        {"step": 2, "train/loss": 3.5},
        {
            "step": 4,
            "train/loss": 3.0,
            "validation/loss": 2.5,
            "load/expert_00": 0.25,
            "load/expert_01": 0.75,
        },
    ]
    assert rows.column("validation/loss").last == 2.5
    assert len(rows.column("nothing")) == 0


def test_a_run_without_rows_has_an_empty_table(tmp_path: Path) -> None:
    for rows in (Rows(), Rows(read_lines(tmp_path / "metrics.jsonl", Row))):
        assert (rows.columns, list(rows)) == ({}, [])


def test_steps_that_come_again_take_the_place_of_those_before(tmp_path: Path) -> None:
    steps = [(1, 1.0), (2, 2.0), (3, 3.0), (2, 2.5), (3, 3.5)]
    rows = table(tmp_path, *({"step": step, "x": value} for step, value in steps))
    assert columns(rows) == {"x": ([1, 2, 3], [1.0, 2.5, 3.5])}


def test_the_table_in_pandas(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    frame = table(tmp_path, {"step": 2, "a": 1.0}, {"step": 4, "b": 2.0}).to_pandas()

    assert frame.index.name == "step"
    assert list(frame.index) == [2, 4]
    assert frame["a"].dropna().to_dict() == {2: 1.0}
    assert frame["b"].dropna().to_dict() == {4: 2.0}


def test_without_pandas_there_is_no_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pandas"):
        Rows().to_pandas()
