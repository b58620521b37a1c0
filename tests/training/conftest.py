"""A run of a few steps in this process: config, data, model, and a logger that remembers."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.callbacks import Callback

from moe_ffn.data.prepare import PreparedData, prepare
from moe_ffn.runs.config import TrainConfig
from tests.helpers.fitted import Fit, Fitted, MakeConfig


def quiet_lightning() -> None:
    warnings.filterwarnings("ignore", message="`isinstance\\(treespec, LeafSpec\\)` is deprecated")
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")


@pytest.fixture(autouse=True)
def _quiet_lightning() -> None:
    quiet_lightning()


@pytest.fixture(scope="session")
def make_config(tmp_path_factory: pytest.TempPathFactory) -> MakeConfig:
    """`make_config(model=..., trainer=...)`: a tiny run with these options laid over it."""
    folder = tmp_path_factory.mktemp("training")
    texts = folder / "texts"
    texts.mkdir()
    letters = np.random.default_rng(0).choice(list("abcde \n"), size=(10, 200))
    for number, text in enumerate(letters):
        (texts / f"{number}.txt").write_text("".join(text))

    def make(**sections: dict[str, Any]) -> TrainConfig:
        options: dict[str, Any] = {
            "model": {"d_model": 16, "num_layers": 2, "attention": {"num_heads": 2}},
            "data": {
                "corpus": {"type": "text", "paths": str(texts)},
                "cache_dir": str(folder / "cache"),
                "seq_len": 16,
                "batch_size": 4,
                "validation_tokens": 96,
                "validation_percent": 20,
            },
            "sample": {"num_tokens": 0},
            "trainer": {"max_steps": 12, "validate_every_n_steps": 4, "precision": "32-true"},
        }
        for name, section in sections.items():
            options[name] = {**options.get(name, {}), **section}
        return TrainConfig.model_validate(options)

    return make


@pytest.fixture(scope="session")
def prepared(make_config: MakeConfig) -> PreparedData:
    return prepare(make_config().data)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture
def nobodys_wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A wandb without settings or a key, in the folder of the test."""
    for name in [name for name in os.environ if name.startswith("WANDB_") or name == "NETRC"]:
        monkeypatch.delenv(name)
    # It is set by the code under test, and so that it is unset at the end.
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    # As where the environment is activated: wandb's program is found by its name.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def fit(make_config: MakeConfig, prepared: PreparedData, tmp_path: Path) -> Fit:
    """`fit(callback, model=...)`: six steps of a tiny run with these options, watched by the callback.

    With `resume_from` those that are left after a checkpoint.
    """

    def run(*more: Callback, resume_from: Path | None = None, **sections: dict[str, Any]) -> Fitted:
        sections["trainer"] = SIX_STEPS | sections.get("trainer", {})
        return Fitted(make_config(**sections), prepared, tmp_path, *more, resume_from=resume_from)

    return run


SIX_STEPS = {"max_steps": 6, "validate_every_n_steps": 3, "accelerator": "cpu"}


@pytest.fixture(scope="session")
def moe_fit(
    make_config: MakeConfig, prepared: PreparedData, tmp_path_factory: pytest.TempPathFactory
) -> Fitted:
    """Six steps of a Mixture of Experts, for tests that only look at what was seen of them."""
    quiet_lightning()
    config = make_config(model={"ffn": {"type": "moe", "num_experts": 4}}, trainer=SIX_STEPS)
    return Fitted(config, prepared, tmp_path_factory.mktemp("moe_fit"))
