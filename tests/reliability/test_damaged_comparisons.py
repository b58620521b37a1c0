"""Finished runs whose files are damaged are left out of a comparison by name, and the others are compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe_ffn.runs.folder import CONFIG_FILE, FACTS_FILE, METRICS_FILE, SUMMARY_FILE
from moe_ffn.studies.gather import gather
from tests.helpers.arms import write_arm
from tests.helpers.cases import cases
from tests.helpers.tiny_runs import Finished, run_here


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Two seeds of `good`, two of `hurt`."""
    for arm in ("good", "hurt"):
        write_arm(tmp_path / "all", arm, [2.0, 2.1], experts=4)
    return tmp_path / "all"


def _compared(study: Path) -> Finished:
    return run_here(str(study), program="experiments.compare")


def _row(done: Finished, arm: str) -> list[str]:
    return next(line.split()[1:] for line in done.stdout.splitlines() if line.startswith(f"{arm} "))


NO_SUMMARY = "'{}' has lost its results: summary.json is damaged"
NO_LOSS = "'{}' has no finite validation loss"
NO_DATA = "'{}' does not have its sizes: facts.json is damaged"
NO_OPTIONS = "'{}' does not say its seed: config.yaml is damaged"
DEEP = "[" * 99_000

DAMAGES: dict[str, tuple[str, str | bytes | None, str]] = {
    "summary empty": (SUMMARY_FILE, "", NO_SUMMARY),
    "summary cut in two": (SUMMARY_FILE, '{"validation_loss": 1.2', NO_SUMMARY),
    "summary binary": (SUMMARY_FILE, bytes(range(256)), NO_SUMMARY),
    "summary a list": (SUMMARY_FILE, "[1, 2]", NO_SUMMARY),
    "summary a thousand lists": (SUMMARY_FILE, DEEP, NO_SUMMARY),
    "summary of other types": (SUMMARY_FILE, '{"validation_loss": [1], "num_alarms": 0}', NO_LOSS),
    "a loss of 400 digits": (
        SUMMARY_FILE,
        f'{{"validation_loss": {10**400}, "num_alarms": 0}}',
        NO_LOSS,
    ),
    "facts missing": (FACTS_FILE, None, NO_DATA),
    "facts of other types": (FACTS_FILE, '{"corpus_sha256": {"a": 1}, "num_params": "many"}', NO_DATA),
    "facts of colours": (FACTS_FILE, '{"corpus_sha256": "[red]\\u001b[31m", "tokenizer_sha256": 3}', NO_DATA),
    "config missing": (CONFIG_FILE, None, NO_OPTIONS),
    "config cut in two": (CONFIG_FILE, "model: {ffn: ", NO_OPTIONS),
    "config of another version": (CONFIG_FILE, "sed: 1", NO_OPTIONS),
    "config binary": (CONFIG_FILE, bytes(range(256)), NO_OPTIONS),
}  # fmt: skip
"""What is put in the place of a file, None for nothing, and what is then said of the run."""


@pytest.mark.parametrize(("file", "content", "said"), cases(DAMAGES, quick=6))
def test_a_damaged_run_is_left_out_and_named(
    study: Path, file: str, content: str | bytes | None, said: str
) -> None:
    _damage(study / "hurt-seed1" / file, content)

    done = _compared(study)

    assert done.code == 1
    assert done.stderr == f"left out: {said.format(study / 'hurt-seed1')}\n"
    assert _row(done, "good")[:2] == ["2", "2.0500"]
    assert _row(done, "hurt")[:2] == ["1", "2.0000"]
    assert "\x1b" not in done.stdout


METRICS: dict[str, str | bytes | None] = {
    "missing": None,
    "empty": "",
    "half a line": '{"step": 10, "validation/lo',
    "junk": '{"step": "x", "validation/loss": 3}\n{"step": 2, "validation/loss": "low"}\n, \n',
    "binary": bytes(range(256)) * 4,
    "one number": '{"step": 1, "validation/loss": ' + "9" * 300_000 + "}\n",
    "a thousand levels": '{"step": 1, "validation/loss": ' + DEEP + "}\n",
}


@pytest.mark.parametrize("content", cases(METRICS, quick=3))
def test_without_its_rows_a_run_has_its_loss_and_no_curve(
    study: Path, content: str | bytes | None
) -> None:
    for seed in range(2):
        _damage(study / f"hurt-seed{seed}" / METRICS_FILE, content)

    done = _compared(study)

    assert (done.code, done.stderr) == (0, "")
    assert _row(done, "hurt")[:2] == ["2", "2.0500"]
    assert "not reached" in done.stdout


RESULTS: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "Invalid JSON"),
    "cut in two": ('{"arm": "hurt", "seed"', "Invalid JSON"),
    "another's": ('{"name": "package", "version": "1.0.0"}', "arm: missing"),
    "other types": ('{"arm": 3, "seed": "x"}', "arm: must be text"),
    "binary": (bytes(range(256)), "Invalid JSON"),
    "deep": (DEEP, "Invalid JSON"),
}


@pytest.mark.parametrize(("content", "said"), cases(RESULTS, quick=2))
def test_a_damaged_result_is_left_out_and_named(
    study: Path, tmp_path: Path, content: str | bytes, said: str
) -> None:
    results = tmp_path / "results"
    gather([study]).write(results)
    table = results / "results.jsonl"
    lines = table.read_bytes().splitlines()
    assert lines[3].startswith(b'{"arm":"hurt","seed":1')
    hurt = content if isinstance(content, bytes) else content.encode()
    table.write_bytes(b"\n".join([*lines[:3], hurt.translate(None, b"\r\n"), b""]))

    done = _compared(results)

    assert done.code == 1
    assert done.stderr.startswith(
        f"left out: '{results}/results.jsonl:4' is no result of a run: {said}"
    )
    assert len(done.stderr.splitlines()) == 1
    assert _row(done, "good")[:2] == ["2", "2.0500"]


def test_a_damaged_study_file_is_refused(study: Path) -> None:
    (study / "study.yaml").write_text(json.dumps({"arms": {"good": {}}, "baseline": "best"}))

    done = _compared(study)

    assert done.code == 2
    assert done.stderr.startswith("error: baseline: there is no arm 'best'; the arms are good")


def _damage(file: Path, content: str | bytes | None) -> None:
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
