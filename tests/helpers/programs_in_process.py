"""A corpus of a few kilobytes, the smallest model, and the program run on them in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from moe_ffn.cli.command_line import parse_config
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.rows import flat
from moe_ffn.training.monitoring.json_lines import Row, read_lines
from tests.helpers.same_run import snapshot
from tests.helpers.tiny_runs import run_here, write_corpus

if TYPE_CHECKING:  # a GPU's machine has no playwright, and tests only kernels
    from playwright.sync_api import Browser

TINY = """
model: {d_model: 16, num_layers: 2, attention: {num_heads: 2}}
data: {corpus: {type: text, paths: [%(corpus)s]}, seq_len: 16, batch_size: 4, validation_tokens: 160}
run: {output_dir: runs}
logging: {every_n_steps: 2, wandb: {mode: disabled}}
trainer: {max_steps: 6, precision: 32-true, validate_every_n_steps: 4, accelerator: cpu}
sample: {num_tokens: 2}
"""


@dataclass(frozen=True)
class Result:
    """Results of a program; `folder` is the folder of its only run."""

    code: int
    stdout: str
    stderr: str
    args: list[str]
    where: Path

    @property
    def folder(self) -> Path:
        (folder,) = (self.where / "runs").iterdir()
        return folder

    @property
    def rows(self) -> list[dict[str, Any]]:
        """`metrics.jsonl`, with a key for each entry of a list."""
        lines = read_lines(self.folder / "metrics.jsonl", Row)
        return [{"step": line.step, **flat(line.values)} for line in lines]

    @property
    def columns(self) -> set[str]:
        return {name for row in self.rows for name in row}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture(scope="session")
def tiny_yaml(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(TINY % {"corpus": corpus})
    return path


@pytest.fixture(scope="session")
def run_train(tiny_yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Result]:
    """`run_train(folder, "--seed", "1")` runs the program in `folder`, as a command line would."""
    cache = tmp_path_factory.mktemp("cache")

    def run(where: Path, *options: str, has_page: bool = False) -> Result:
        args = ["--config", str(tiny_yaml), "--data.cache_dir", str(cache), *options]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(where)
            patch.setenv("COLUMNS", "200")
            done = run_here(*args, program="moe_ffn.cli.train", has_page=has_page)
        return Result(*done, args, where)

    return run


@pytest.fixture(scope="session")
def config_of() -> Callable[[list[str]], TrainConfig]:
    """The config that the program makes of a command line."""
    return lambda args: parse_config(args, TrainConfig, command="train")


@pytest.fixture(scope="session")
def tiny_moe() -> str:
    return "{type: moe, num_experts: 4, capacity: {factor: 1.0, eval_factor: 1.0}}"


@pytest.fixture(scope="session")
def moe_run(
    run_train: Callable[..., Result], tiny_moe: str, tmp_path_factory: pytest.TempPathFactory
) -> Result:
    """Six steps of a Mixture of Experts with a capacity; validations at 4 and at the end."""
    return run_train(tmp_path_factory.mktemp("moe"), "--model.ffn", tiny_moe, has_page=True)


@pytest.fixture(scope="session")
def short_run(
    run_train: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Return the folder of a run of one step, which is trained once for each command line."""

    @cache
    def run(*options: str) -> Path:
        done = run_train(tmp_path_factory.mktemp("short"), *options, "--trainer.max_steps", "1")
        assert done.code == 0, done.stderr
        return done.folder

    return run


@pytest.fixture(scope="session")
def dense_run(short_run: Callable[..., Path]) -> Path:
    """A run that routes nothing."""
    return short_run("--model.ffn", "swiglu")


@pytest.fixture(scope="session")
def depths_run(short_run: Callable[..., Path]) -> Path:
    """A model that sees both sides, with half of the tokens past its second block."""
    ffn = "{'1': {type: mixture_of_depths, ffn: {type: moe, num_experts: 4}}}"
    return short_run("--model.causal", "false", "--model.ffn_at", ffn)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A headless Chromium, started once."""
    from tests.helpers.browser import chromium

    with chromium() as started:
        yield started


@pytest.fixture
def reject(tiny_yaml: Path, tmp_path: Path) -> Callable[..., str]:
    """Run the program with a mistake, which writes nothing; returns its one line without `error: `."""

    def run(*argv: str, lines: int = 1) -> str:
        before = snapshot(tmp_path)
        args = ["--config", str(tiny_yaml), "--data.cache_dir", str(tmp_path / "cache"), *argv]
        done = run_here(*args, program="moe_ffn.cli.train")
        errors = done.own_lines
        assert done.code == 2
        assert len(errors) == lines <= 6, done.stderr
        assert all(line.startswith("error: ") for line in errors), done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == "", "a run was announced that does not happen"
        assert snapshot(tmp_path) == before, "something was written"
        return "\n".join(line.removeprefix("error: ") for line in errors)

    return run


@pytest.fixture
def stay_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep tests from writing to the home folder, to the checkout or to a wandb account."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("WANDB_") or name == "NETRC":
            monkeypatch.delenv(name)
    yield
    assert not list(home.iterdir()), "a test wrote to the home folder"
