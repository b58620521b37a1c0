"""The JSON files of a run's folder as typed models, whole and damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from moe_ffn.runs.json_files import CodeEntries, Facts, JsonFile, Summary

MANY = "9" * 5_000


def written(folder: Path, content: str | bytes) -> Path:
    path = folder / "document.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


NOTHING = {
    "empty": "",
    "half": '{"run_id": "a"',
    "a list": "[1]",
    "bytes": b"\xff\xfe\x00",
    "a number without end": f'{{"num_params": {MANY}}}',
    "a thousand levels": '{"a": ' * 2_000 + "1" + "}" * 2_000,
}


@pytest.mark.parametrize("content", NOTHING.values(), ids=NOTHING)
@pytest.mark.parametrize("kind", [Facts, Summary, CodeEntries])
def test_what_is_no_json_object_is_an_empty_document(
    tmp_path: Path, kind: type[JsonFile], content: str | bytes
) -> None:
    document = kind.read(written(tmp_path, content))

    assert not document
    assert document == kind()


def test_what_is_no_file_is_an_empty_document_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")

    for name in ("missing", "pipe", "link", "."):
        assert not Facts.read(tmp_path / name)


@pytest.mark.parametrize(
    "value", ["low", True, [1], {}, float("inf"), float("nan"), 10**400], ids=lambda v: str(v)[:9]
)
def test_a_wrong_value_is_as_good_as_absent_and_the_rest_stays(tmp_path: Path, value: Any) -> None:
    content = json.dumps({"validation_loss": value, "unigram_loss": 3, "of_later": [1]})

    summary = Summary.read(written(tmp_path, content))

    assert not summary.has("validation_loss")
    assert (summary.validation_loss, summary.unigram_loss) == (None, 3.0)
    assert summary.model_extra == {"of_later": [1]}


def test_null_is_a_value(tmp_path: Path) -> None:
    summary = Summary.read(written(tmp_path, '{"validation_loss": null}'))

    assert summary
    assert summary.has("validation_loss")
    assert summary.validation_loss is None


def test_a_layer_keeps_what_is_right_in_it(tmp_path: Path) -> None:
    layers = {
        "layer_00": {
            "max_violation": "high",
            "load": [0.5, None],
            "coactivation": [[0, 1], [1, 0]],
        },
        "layer_01": {"load": [[1], "x"], "entropy": 1.5},
    }

    routing = Summary.read(written(tmp_path, json.dumps({"routing": layers}))).routing

    assert {layer: dict(values.measures) for layer, values in routing.items()} == {
        "layer_00": {"load": [0.5, None], "coactivation": [[0, 1], [1, 0]]},
        "layer_01": {"entropy": 1.5},
    }
    assert not Summary.read(written(tmp_path, '{"routing": {"layer_00": [1]}}')).has("routing")


def test_facts_are_whole_where_the_precision_is_known(tmp_path: Path) -> None:
    for precision, is_whole in {
        "32-true": True,
        "auto": False,
        "33": False,
        "[red]": False,
    }.items():
        facts = Facts.read(written(tmp_path, json.dumps({"precision": precision, "num_params": 3})))
        assert (facts.is_whole, facts.num_params) == (is_whole, 3)


def test_entries_of_code_are_read_one_by_one(tmp_path: Path) -> None:
    good = {"path": "/a\udcff.py", "sha256": "0", "copied": True}
    bad = [{**good, "path": "a\0"}, {**good, "path": 3}, {**good, "copied": 1}, {"path": "a"}, []]
    content = json.dumps({"good": good, **{f"bad {n}": entry for n, entry in enumerate(bad)}})

    entries = CodeEntries.read(written(tmp_path, content)).entries

    assert {name: entry.model_dump() for name, entry in entries.items()} == {"good": good}
