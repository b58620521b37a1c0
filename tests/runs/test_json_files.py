"""The JSON files of a run's folder as typed models, whole and damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path

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
    "a wrong type": '{"num_params": "low", "validation_loss": "low", "code/own.py": 1}',
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


def test_null_is_a_value(tmp_path: Path) -> None:
    summary = Summary.read(written(tmp_path, '{"validation_loss": null}'))
    assert summary
    assert summary.has("validation_loss")
    assert summary.validation_loss is None


def test_facts_are_whole_where_the_precision_is_known(tmp_path: Path) -> None:
    for precision, is_whole in {"32-true": True, "auto": False, "33": False}.items():
        facts = Facts.read(written(tmp_path, json.dumps({"precision": precision, "num_params": 3})))
        assert facts.is_whole == is_whole
