from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest

from moe_ffn.data.corpus import TextConfig
from moe_ffn.data.prepare import DataConfig, prepare
from moe_ffn.data.tokenizer import BPEConfig


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    for index in range(40):
        (tmp_path / f"{index}.txt").write_text(f"{index}\n" * 1_000)
    return DataConfig(
        corpus=TextConfig(paths=(str(tmp_path),)),
        tokenizer=BPEConfig(vocab_size=512),
        validation_percent=15,  # which these names come near to
        cache_dir=str(tmp_path / ".cache"),
    )


def test_without_a_terminal_a_line_for_reading_and_one_where_there_is_more_to_do(
    config: DataConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    prepare(config)
    assert capfd.readouterr() == ("", "data: reading the corpus\ndata: preparing 0.1 MB of text\n")
    prepare(config)
    assert capfd.readouterr() == ("", "data: reading the corpus\n")


def test_nothing_is_printed_without_progress(
    config: DataConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    prepare(config, progress=False)
    assert capfd.readouterr() == ("", "")


def test_a_terminal_shows_a_bar(
    config: DataConfig, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    prepare(config)
    output, shown = capfd.readouterr()
    assert output == ""
    assert "encoding" in shown
    assert "110.0 kB" in shown


def test_a_function_is_told_each_stage_from_start_to_end(config: DataConfig) -> None:
    reports: list[tuple[str, int, int | None]] = []
    prepare(config, progress=lambda *report: reports.append(report))
    stages = list(dict.fromkeys(stage for stage, _, _ in reports))
    assert stages == ["reading", "training the tokenizer", "encoding"]
    for stage in stages:
        done = [report[1] for report in reports if report[0] == stage]
        totals = {report[2] for report in reports if report[0] == stage}
        assert all(before < after for before, after in pairwise(done))
        assert done[-1] == 40 * 1_000 * 3 - 10 * 1_000  # two digits and a line end, one for 0..9
        assert totals == ({None} if stage == "reading" else {done[-1]})
