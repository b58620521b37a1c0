"""Values for all loggers, the log of rows and the log of samples."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities import rank_zero_only

from moe_ffn.cli import generate
from moe_ffn.cli.generate import latest_prompt
from moe_ffn.config.errors import ConfigError
from moe_ffn.data.corpus import TextConfig
from moe_ffn.data.prepare import DataConfig, prepare
from moe_ffn.ffn import FFNConfig
from moe_ffn.model.decoder import DecoderConfig
from moe_ffn.training.module import LanguageModel
from moe_ffn.training.monitoring import callbacks
from moe_ffn.training.monitoring.callbacks import SampleLog
from moe_ffn.training.monitoring.json_lines import Sample, read_lines
from moe_ffn.training.monitoring.loggers import MetricsFile, WandbRun, alert, close
from moe_ffn.training.sampling import SampleConfig, first_words
from tests.helpers.fake_wandb import StubRun

pytestmark = pytest.mark.usefixtures("stay_in_tmp_path")


@pytest.fixture
def loggers(run_folder: Path) -> Any:
    """`loggers(StubRun(...), online=True)`: the log of rows, and wandb's with that run."""

    def make(run: StubRun, online: bool) -> list[Logger]:
        return [MetricsFile(run_folder / "metrics.jsonl"), WandbRun(run, online)]

    return make


@pytest.mark.parametrize("online", [True, False])
def test_an_alert_is_sent_where_wandb_is_online(loggers: Any, online: bool) -> None:
    run = StubRun()
    alert(loggers(run, online), "x" * 100, "layer_03 sends all to expert 2")
    cut = "x" * 63  # the longest title that wandb takes
    assert run.alerts == ([(cut, "layer_03 sends all to expert 2")] if online else [])


def test_failed_rows_and_alerts_are_reported_once(
    loggers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = loggers(StubRun(failing=ConnectionResetError("Connection lost")), online=True)
    alert(failing, "collapse", "once")
    failing[1].log_metrics({"loss": 1.0}, step=1)
    assert capsys.readouterr().err == "wandb: Connection lost; metrics go only to metrics.jsonl\n"


@pytest.mark.parametrize(("status", "exit_code"), [("success", 0), ("failed", 1)])
def test_closing_ends_the_run(loggers: Any, status: str, exit_code: int) -> None:
    run = StubRun()
    close(loggers(run, online=True), status)
    assert run.exit_codes == [exit_code]


def test_closing_prints_how_to_upload_the_rest(
    loggers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    close(loggers(StubRun(failing=TimeoutError("Timed out finishing run.")), online=True))
    assert capsys.readouterr().err == (
        "wandb: Timed out finishing run; "
        "upload the rest with: wandb sync '/somewhere else/wandb/run-1'\n"
    )


class FullDisk(CSVLogger):
    """Cannot write what is pending."""

    def finalize(self, status: str) -> None:
        raise OSError(28, f"No space left on device, {self.root_dir}")


def test_a_logger_that_cannot_end_keeps_no_other_from_ending() -> None:
    run = StubRun()
    with pytest.raises(OSError, match="No space left on device, first"):
        close([FullDisk("first"), WandbRun(run, online=True), FullDisk("second")], "failed")
    assert run.exit_codes == [1]


# -- the log of rows


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "metrics.jsonl"


def test_rows_are_lines_with_the_keys_that_they_have(path: Path) -> None:
    logger = MetricsFile(path)
    logger.log_metrics({"load": [0.25, 0.75]}, step=4)
    logger.log_metrics({"loss": 1.5}, step=5)
    assert path.read_text() == '{"step": 4, "load": [0.25, 0.75]}\n{"step": 5, "loss": 1.5}\n'


def test_only_the_first_rank_writes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger = MetricsFile(path)

    logger.log_metrics({"loss": 1.0}, step=2)
    logger.save()
    logger.finalize("success")

    assert not path.exists()
    assert logger.file.is_complete


def test_saved_rows_are_on_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is made after them, and knows how many there are."""
    logger = MetricsFile(path)
    logger.log_metrics({"loss": 1.0}, step=2)
    logger.log_metrics({"loss": 2.0}, step=4)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))

    logger.save()

    assert synced == [path.stat().st_size]


FIRST_WORDS = "sat on the cat"
"""The first words of the validation text in the test corpus."""


def test_a_text_at_every_validation_and_the_last_is_the_sample(moe_run: Any) -> None:
    lines = (moe_run.folder / "samples.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]

    assert [sample["step"] for sample in samples] == [4, 6]
    # Twelve documents, none drawn: validation is the end of the text, from the start of a line.
    assert {sample["prompt"] for sample in samples} == {FIRST_WORDS}
    assert all(sample["text"] for sample in samples)
    assert (moe_run.folder / "sample.txt").read_text() == FIRST_WORDS + samples[-1]["text"]


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SampleLog:
    """Log whose texts are `text 1`, `text 2`, ... of seed 7."""
    numbers = count(1)
    monkeypatch.setattr(
        callbacks, "sample_text", lambda *given: f"text {next(numbers)} of seed {given[-1]}"
    )
    tokenizer: Any = None
    return SampleLog(tmp_path / "samples.jsonl", tokenizer, SampleConfig(), "def ", seed=7)


def validate(
    log: SampleLog, step: int, loss: float, is_first_rank: bool = True, causal: bool = True
) -> None:
    trainer: Any = SimpleNamespace(
        callback_metrics={"validation/loss": torch.tensor(loss)},
        global_step=step,
        is_global_zero=is_first_rank,
    )
    decoder = SimpleNamespace(
        config=DecoderConfig(causal=causal, ffn=FFNConfig.model_validate("dense"))
    )
    module = Mock(spec=LanguageModel, decoder=decoder)
    log.on_validation_end(trainer, module)


def test_a_model_that_has_diverged_has_no_newest_text(log: SampleLog) -> None:
    validate(log, 4, 2.5)
    assert log.last == "text 1 of seed 7"
    validate(log, 8, math.nan)
    assert log.last == ""
    assert [line.step for line in read_lines(log.file.path, Sample)] == [4]


def test_other_ranks_models_of_both_sides_and_no_tokens_write_no_sample(log: SampleLog) -> None:
    validate(log, 4, 2.5, is_first_rank=False)
    validate(log, 4, 2.5, causal=False)
    log.options = SampleConfig(num_tokens=0)
    validate(log, 4, 2.5)

    assert log.last == ""
    assert not log.file.path.exists()


def test_a_resumed_run_restores_the_newest_text(log: SampleLog, tmp_path: Path) -> None:
    """The restored text is the sample of the results if no validation follows."""
    validate(log, 4, 2.5)
    resumed = SampleLog(log.file.path, log.tokenizer, log.options, log.prompt, seed=7)
    resumed.load_state_dict(log.state_dict())
    assert resumed.last == "text 1 of seed 7"


PROMPTS = {
    "four words": ("to be or not to be", "to be or not"),
    "as it stands": ("\n  to be\n  or not, said he", "\n  to be\n  or not,"),
    "of the first document": ("to be", "to be"),
    "no words": ("\n\n", "\n\n"),
    "no spaces": ("x" * 90, "x" * 40),
    "a character cut in two": ("x" * 5 + " " * 30 + "é" * 90, "x" * 5 + " " * 30 + "é" * 5),
}


@pytest.mark.parametrize(("text", "prompt"), PROMPTS.values(), ids=PROMPTS)
def test_the_default_prompt_is_the_beginning_of_the_validation_text(
    tmp_path: Path, text: str, prompt: str
) -> None:
    (tmp_path / "a.txt").write_text("the end " * 100)
    config = DataConfig(
        corpus=TextConfig(paths=(str(tmp_path / "a.txt"),)), seq_len=8, cache_dir=str(tmp_path)
    )
    data = prepare(config)
    ids = [*text.encode(), data.tokenizer.end_of_document, *b"another"]

    assert first_words(replace(data, validation=np.array(ids, dtype=np.uint16))) == prompt


def test_generate_continues_a_prompt_with_a_model_folder_as_with_its_run(
    moe_run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for folder in (moe_run.folder, moe_run.folder / "model"):
        assert generate.main([str(folder), "--prompt", "def ", "--num-tokens", "4"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("def ")


def test_generate_takes_the_prompt_of_the_run_if_it_had_one(moe_run: Any, tmp_path: Path) -> None:
    assert latest_prompt(moe_run.folder) == FIRST_WORDS
    with pytest.raises(ConfigError, match=r"^--prompt: is required, since '.*' has no sample"):
        latest_prompt(tmp_path)
