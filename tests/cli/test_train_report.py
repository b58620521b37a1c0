"""The page that a run leaves behind, however the run ends; and a run that can have no page."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from moe_ffn.cli import training_run
from moe_ffn.training.module import LanguageModel

RunTrain = Callable[..., Any]
REPOSITORY = Path(__file__).parents[2]


def head_of_page(where: Path) -> str:
    """The text at the top of the page of the only run in `where`."""
    (page,) = where.glob("runs/*/report.html")
    html = page.read_text()
    head = html[html.index("<header>") : html.index("</header>")]
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", head)))


def test_the_page_of_a_finished_run(moe_run: Any) -> None:
    assert "finished , step 6 of 6" in head_of_page(moe_run.where)
    assert "report.html: " not in moe_run.stderr


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ArithmeticError("no such number")])
def test_a_run_that_failed_has_a_page_that_says_interrupted(
    run_train: RunTrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    step = LanguageModel.training_step

    def fail(module: LanguageModel, *args: Any, **options: Any) -> Any:
        if module.global_step == 3:
            raise error
        return step(module, *args, **options)

    monkeypatch.setattr(LanguageModel, "training_step", fail)
    if isinstance(error, KeyboardInterrupt):
        assert run_train(tmp_path).code == 130
    else:
        with pytest.raises(ArithmeticError, match="no such number"):
            run_train(tmp_path)

    assert "interrupted , step 2 of 6" in head_of_page(tmp_path)


def test_a_finished_run_is_not_lost_to_a_page_that_cannot_be_made(
    run_train: RunTrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: Any, **_options: Any) -> None:
        raise ZeroDivisionError("in the page\nand more")

    monkeypatch.setattr(training_run, "write_report", fail)
    run = run_train(tmp_path, "--trainer.max_steps", "2")

    assert run.code == 0
    assert "report.html: in the page" in run.stderr.splitlines()
    assert (run.folder / "summary.json").exists()
    assert "Results in" in run.stdout
