"""Finished runs whose files are damaged are compared all the same, and what they lost is told by file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_ffn.cli.compare import resolve
from moe_ffn.config_files import to_yaml
from moe_ffn.report.comparison import Result, write_markdown
from moe_ffn.runs.folder import CONFIG_FILE, FACTS_FILE, METRICS_FILE, SUMMARY_FILE
from tests.helpers.cases import cases
from tests.helpers.tiny_runs import Finished, run_here

ROUTING = {"layer_00": {"max_violation": 0.25, "experts_per_token": 2.0}}
SUMMARY = {
    "validation_loss": 1.25,
    "unigram_loss": 3.0,
    "tokens_per_second": 2000.0,
    "routing": ROUTING,
}
FACTS = {"precision": "32-true", "flops_per_token": 2_500_000}
METRICS = (
    '{"step": 2, "train/tokens_per_second": 1000.0, "routing/layer_00/dropped_fraction": 0.9}\n'
    '{"step": 4, "train/tokens_per_second": 3000.0, "routing/layer_00/dropped_fraction": 0.125}\n'
    '{"step": 4, "validation/loss": 1.25}\n'
)
WHOLE = ["next", "32-true", "1.2500", "0.25", "2.00", "12.5%", "2.50", "3,000"]
"""The cells of an undamaged run, after its name."""


@pytest.fixture
def compared(tmp_path: Path) -> Callable[[], Finished]:
    """Runs `compare` over the finished runs `good` and `hurt` in runs/all; nothing is trained."""
    command = []
    for name in ("good", "hurt"):
        file = tmp_path / f"{name}.yaml"
        file.write_text("model: {num_layers: 1}\n")
        command.append(str(file))
    options = ["--run.output_dir", str(tmp_path / "runs")]
    for file in map(Path, command):
        folder = tmp_path / "runs" / "all" / file.stem
        folder.mkdir(parents=True)
        (folder / CONFIG_FILE).write_text(to_yaml(resolve(file, "all", options)))
        (folder / SUMMARY_FILE).write_text(json.dumps(SUMMARY))
        (folder / FACTS_FILE).write_text(json.dumps(FACTS))
        (folder / METRICS_FILE).write_text(METRICS)
    return lambda: run_here(*command, "--name", "all", *options, program="experiments.compare")


def _row(done: Finished, name: str) -> list[str]:
    rows = [line.split() for line in done.stdout.splitlines()]
    (found,) = [cells[1:] for cells in rows if cells[:1] == [name]]
    return found


def _with(values: dict[str, object], **changes: object) -> str:
    return json.dumps({**values, **changes})


NO_SUMMARY = "summary.json lacks validation_loss, unigram_loss, routing"
NO_FACTS = "facts.json lacks precision, flops_per_token"
NO_METRICS = "metrics.jsonl lacks train/tokens_per_second"

DAMAGES: dict[str, tuple[str, str | bytes | None, str]] = {
    "summary empty": (SUMMARY_FILE, "", NO_SUMMARY),
    "summary cut in two": (SUMMARY_FILE, json.dumps(SUMMARY)[:40], NO_SUMMARY),
    "summary binary": (SUMMARY_FILE, bytes(range(256)), NO_SUMMARY),
    "summary a list": (SUMMARY_FILE, "[1, 2]", NO_SUMMARY),
    "summary a thousand lists": (SUMMARY_FILE, "[" * 99_000, NO_SUMMARY),
    "summary without keys": (SUMMARY_FILE, "{}", NO_SUMMARY),
    "summary of other types": (
        SUMMARY_FILE,
        '{"validation_loss": [1], "unigram_loss": true, "routing": 3}',
        NO_SUMMARY,
    ),
    "routing a list": (
        SUMMARY_FILE,
        _with(SUMMARY, routing=[1]),
        "summary.json lacks routing",
    ),
    "routing of numbers": (
        SUMMARY_FILE,
        _with(SUMMARY, routing={"layer_00": 3, "?": None}),
        "summary.json lacks routing",
    ),
    "routing of text": (
        SUMMARY_FILE,
        _with(SUMMARY, routing={"layer_00": {"max_violation": "high"}}),
        "summary.json lacks routing",
    ),
    "a loss of 400 digits": (
        SUMMARY_FILE,
        _with(SUMMARY, unigram_loss=10**400),
        "summary.json lacks unigram_loss",
    ),
    "facts missing": (FACTS_FILE, None, NO_FACTS),
    "facts of other types": (
        FACTS_FILE,
        '{"precision": {"a": 1}, "flops_per_token": "many"}',
        NO_FACTS,
    ),
    "a precision that is none": (
        FACTS_FILE,
        _with(FACTS, precision="[red]\x1b[31m32"),
        "facts.json lacks precision",
    ),
    "metrics missing": (METRICS_FILE, None, NO_METRICS),
    "metrics empty": (METRICS_FILE, "", NO_METRICS),
    "metrics without the column": (METRICS_FILE, '{"step": 4, "validation/loss": 1.25}\n', NO_METRICS),
    "metrics of half a line": (METRICS_FILE, METRICS.splitlines()[0], NO_METRICS),
    "metrics of junk": (
        METRICS_FILE,
        "".join(
            f'{{"step": {step}, "train/tokens_per_second": {value}}}\n'
            for step, value in [("2", '"fast"'), ('"x"', "3"), ("4", "NaN"), ("", "")]
        ),
        NO_METRICS,
    ),
    "metrics binary": (METRICS_FILE, bytes(range(256)) * 4, NO_METRICS),
    "metrics of one number": (
        METRICS_FILE,
        '{"step": 1, "train/tokens_per_second": ' + "9" * 300_000 + "}\n",
        NO_METRICS,
    ),
    "metrics of a thousand levels": (
        METRICS_FILE,
        '{"step": 1, "train/tokens_per_second": ' + "[" * 1000 + "]" * 1000 + "}\n",
        NO_METRICS,
    ),
}  # fmt: skip
"""What is put in the place of a file, None for nothing, and what is then said of it."""


@pytest.mark.parametrize(("file", "content", "said"), cases(DAMAGES, quick=3))
def test_a_damaged_run_has_its_row_and_a_sentence(
    compared: Callable[[], Finished],
    tmp_path: Path,
    file: str,
    content: str | bytes | None,
    said: str,
) -> None:
    folder = tmp_path / "runs" / "all" / "hurt"
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())

    done = compared()

    assert done.code == 1
    assert done.stderr.splitlines() == [f"'{folder}': {said}"]
    assert _row(done, "good") == WHOLE
    cells = _row(done, "hurt")
    assert [new for new, old in zip(cells, WHOLE, strict=True) if new != old] in (
        [["-"] * n for n in range(5)]
    ), cells
    assert "| hurt | next |" in (tmp_path / "runs/all/comparison.md").read_text()


GONE: dict[str, Callable[[Path], object]] = {
    "config cut in two": lambda folder: (folder / CONFIG_FILE).write_text("model: {ffn: "),
    "config missing": lambda folder: (folder / CONFIG_FILE).unlink(),
    "config of another version": lambda folder: (folder / CONFIG_FILE).write_text("sed: 1"),
}


@pytest.mark.parametrize("damage", GONE.values(), ids=GONE)
def test_of_a_run_without_its_options_a_sentence_names_the_file(
    compared: Callable[[], Finished], tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    folder = tmp_path / "runs" / "all" / "hurt"
    damage(folder)

    done = compared()

    assert done.code == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"'{folder / CONFIG_FILE}'"), line
    assert _row(done, "good") == WHOLE
    assert "hurt" not in (tmp_path / "runs/all/comparison.md").read_text()


def test_a_run_that_ended_before_its_first_row_lacks_nothing(
    compared: Callable[[], Finished], tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "all" / "hurt"
    (folder / SUMMARY_FILE).write_text(_with(SUMMARY, tokens_per_second=0.0))
    (folder / METRICS_FILE).write_text('{"step": 0, "validation/loss": 5.5}\n')

    done = compared()

    assert (done.code, done.stderr) == (0, "")
    assert _row(done, "hurt") == [*WHOLE[:5], "-", "2.50", "-"]


def test_a_table_that_cannot_be_written_is_still_shown(
    compared: Callable[[], Finished], tmp_path: Path
) -> None:
    path = tmp_path / "runs" / "all" / "comparison.md"
    path.mkdir()

    done = compared()

    assert done.code == 1
    assert done.stderr == f"'{path}' cannot be written (no file, but a folder)\n"
    assert _row(done, "hurt") == WHOLE


def test_a_name_does_nothing_in_the_table(tmp_path: Path) -> None:
    names = [
        "a|b",
        "<script>alert(1)</script>",
        "&amp;",
        "[x](javascript:y)",
        "_a_ *b* `c`",
        "a\\|b",
    ]
    results = [
        Result(name, True, "32-true", {"loss": 9.0}, unigram_loss=1.0)
        for name in (*names, "plain_name-1")
    ]

    write_markdown(results, tmp_path / "comparison.md")

    text = (tmp_path / "comparison.md").read_text(encoding="utf-8")
    _, _, *rows, _, legend = text.splitlines()
    assert all(row.count("|") == 10 for row in rows), "other columns"
    assert not set("<>[]`*\\") & set("".join(rows) + legend), text
    assert "| plain_name-1 | next |" in text
    assert legend.endswith("plain_name-1"), "those are worse than the unigram model, by name"
