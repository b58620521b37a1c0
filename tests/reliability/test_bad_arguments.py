"""Wrong calls of the library are answered briefly; links and pipes are read, and never written through."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moe_ffn import DecoderConfig
from moe_ffn.config.errors import ConfigError
from moe_ffn.config.yaml_files import read_yaml
from moe_ffn.data.prepare import DataConfig, prepare
from moe_ffn.data.tokenizer import BPEConfig, Tokenizer, train_bpe
from moe_ffn.model.generate import generate
from moe_ffn.runs.folder import CHECKPOINTS_FOLDER, METRICS_FILE
from moe_ffn.training.optimizer import OptimizerConfig
from tests.helpers.cases import rejects
from tests.helpers.tiny_runs import finished_copy, run_here

pytestmark = pytest.mark.usefixtures("stay_in_tmp_path")


# -- models

IDS = torch.arange(12).view(2, 6)
REAL = torch.ones(2, 6, dtype=torch.bool)
BAD_BATCHES: list[tuple[Any, Any, type[Exception], str]] = [
    (IDS[0], None, ValueError, "token_ids must be (batch, sequence), but has (6,)"),
    ([[1]], None, TypeError, "token_ids must be a torch.Tensor, but is of type list"),
    (IDS, REAL[:, :5], ValueError, "mask must have the shape of token_ids, (2, 6), but"),
]


@pytest.mark.parametrize(("ids", "mask", "error", "message"), BAD_BATCHES)
def test_bad_ids_are_rejected(ids: Any, mask: Any, error: type[Exception], message: str) -> None:
    rejects(lambda: DecoderConfig(d_model=8).build(17, 10)(ids, mask), message, error)


def test_a_model_with_nan_generates_no_text() -> None:
    model = DecoderConfig(d_model=8).build(17, 10)
    with torch.no_grad():
        model.embedding.weight.fill_(torch.nan)
    message = "the model's largest logit is nan: there is no next token"
    rejects(lambda: generate(model, IDS[0], 2), message, RuntimeError)


# -- data


@cache
def tokenizer() -> Tokenizer:
    return train_bpe([b"the cat sat on the mat " * 50], 300)


def test_ids_outside_a_vocabulary_are_not_decoded() -> None:
    rejects(lambda: tokenizer().decode([3, 10**6]), "ids must lie in [0, ", ValueError)


def set_at(*path: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(stored: dict[str, Any]) -> None:
        for key in path[:-1]:
            stored = stored[key]
        stored[path[-1]] = to

    return change


FOREIGN_TOKENIZERS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "no definition": (lambda stored: stored.pop("tokenizer"), "cannot be read: "),
    "a gap": (set_at("tokenizer", "model", "vocab", "Ġthe", to=9999), "must number its "),
    "another alphabet": (
        set_at("tokenizer", "model", "vocab", "中", to=269),
        "has the token '中', which is not byte-level",
    ),
    "lower case": (set_at("tokenizer", "normalizer", to={"type": "Lowercase"}), "loses text: "),
}


@pytest.mark.parametrize(("change", "message"), FOREIGN_TOKENIZERS.values(), ids=FOREIGN_TOKENIZERS)
def test_a_tokenizer_that_loses_text_is_rejected(
    change: Callable[[dict[str, Any]], None], message: str
) -> None:
    stored = json.loads(json.dumps(tokenizer().to_dict()))
    change(stored)
    prefix = "data.tokenizer: the stored tokenizer of type 'bpe' "
    rejects(lambda: BPEConfig().restore(stored), prefix + message)


# -- optimizers


SHAPES = {"scalar": (), "vector": (3,), "matrix_1x1": (1, 1), "stack": (5, 1, 3)}


@pytest.mark.parametrize("member", OptimizerConfig.members)
def test_parameters_of_any_shape_are_optimized(member: str) -> None:
    model: Any = nn.Module()
    model.layers = nn.ParameterDict({name: torch.ones(shape) for name, shape in SHAPES.items()})
    model.layers["zero_matrix"] = torch.zeros(3, 4)
    model.layers["frozen"] = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    model.layers["unused"] = torch.ones(2, 2)
    optimizer = OptimizerConfig.model_validate({"type": member}).build(model)
    optimizer.step()  # before there is any gradient
    for _ in range(2):
        optimizer.zero_grad()
        used = [value.square().sum() for name, value in model.layers.items() if name != "unused"]
        torch.stack(used).sum().backward()
        optimizer.step()
    assert all(value.isfinite().all() for value in model.parameters())
    for name in ("frozen", "unused"):
        assert (model.layers[name] == 1).all()
    assert all((model.layers[name] < 1).all() for name in SHAPES)
    assert (model.layers["zero_matrix"] == 0).all()


# -- links and pipes


def test_links_to_runs_and_their_folders_are_followed(tmp_path: Path) -> None:
    """`checkpoints/` was moved to another disk, and the run is linked into a folder of results."""
    run = finished_copy(tmp_path)
    elsewhere = (run / CHECKPOINTS_FOLDER).rename(tmp_path / "other-disk")
    (run / CHECKPOINTS_FOLDER).symlink_to(elsewhere)
    (run / METRICS_FILE).rename(tmp_path / "metrics")
    (run / METRICS_FILE).symlink_to(tmp_path / "metrics")
    rows = (tmp_path / "metrics").read_text()
    link = tmp_path / "latest"
    link.symlink_to(run)

    for program in ("generate", "report", "compare"):
        done = run_here(str(link), program=f"moe_ffn.cli.{program}")
        assert done.code == 0, (program, done.stderr)
    done = run_here("--resume", str(link), "--trainer.max_steps", "14")
    assert done.code == 0, done.stderr

    assert (elsewhere / "step_00000014.ckpt").is_file()
    assert (run / CHECKPOINTS_FOLDER).is_symlink()
    assert not (run / METRICS_FILE).is_symlink(), "rows are added to a copy"
    assert (tmp_path / "metrics").read_text() == rows


def test_checkpoints_on_an_unmounted_disk_are_named(tmp_path: Path) -> None:
    run = finished_copy(tmp_path)
    (run / CHECKPOINTS_FOLDER).rename(tmp_path / "other-disk")
    (run / CHECKPOINTS_FOLDER).symlink_to(tmp_path / "unmounted")

    done = run_here(str(run), program="moe_ffn.cli.generate")

    (line,) = done.own_lines
    assert line == (
        f"error: '{run / CHECKPOINTS_FOLDER}' is a link to '{tmp_path / 'unmounted'}', which does not exist; "
        "mount its disk, or restore it"
    )


def test_a_config_in_a_pipe_is_read() -> None:
    """`--config <(command)` names such a pipe."""
    end, start = os.pipe()
    with os.fdopen(end), os.fdopen(start, "w") as writer:
        writer.write("seed: 7\n")
        writer.close()
        assert read_yaml(Path(f"/dev/fd/{end}"), "--config") == {"seed": 7}


def test_a_corpus_in_a_pipe_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "pipe.txt"
    os.mkfifo(path)
    config = DataConfig.model_validate({"corpus": {"type": "text", "paths": [str(path)]}})

    with pytest.raises(ConfigError, match=r"data\.corpus\.path.*pipe\.txt"):
        prepare(config)
