"""`moe_ffn.load_run`: a run in a notebook."""

from __future__ import annotations

import shutil
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import moe_ffn
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.json_files import AlarmLine
from moe_ffn.training.monitoring import alarms

TEXT = "def f(x):"


def test_a_run_has_all_that_its_folder_holds(moe_run: Any, config_of: Any) -> None:
    run = moe_ffn.load_run(str(moe_run.folder))

    assert (run.name, run.state, run.step) == (moe_run.folder.name, "finished", 6)
    assert isinstance(run.config, TrainConfig)
    assert run.config == config_of(moe_run.args)
    assert run.option("model.ffn.num_experts") == 4
    assert list(run.rows.column("train/loss").steps) == [2, 4, 6]
    assert [row["step"] for row in run.rows] == [2, 4, 6]
    assert run.facts.precision == "32-true"
    assert run.facts.num_params == sum(p.numel() for p in run.model.parameters())
    assert run.summary.validation_loss == pytest.approx(run.series("validation/loss").last)
    assert [sample.step for sample in run.samples] == [4, 6]
    assert run.alarms == []
    assert not run.model.training
    assert run.model is run.model


def test_what_a_notebook_prints_of_a_run_is_a_line(moe_run: Any) -> None:
    run = moe_ffn.load_run(moe_run.folder)

    count, loss = f"{run.facts.num_params:,}", f"{run.summary.validation_loss:.4f}"
    assert repr(run) == (
        f"Run('{moe_run.folder}', finished, step 6, moe, {count} parameters, validation loss {loss})"
    )
    assert repr(run.saved_model) == f"SavedModel('{moe_run.folder}', {count} parameters)"
    assert repr(run.rows) == f"Rows(3 rows, {len(run.rows.columns)} columns)"
    series = run.series("train/loss")
    assert repr(series) == f"Series(3 values, steps 2 to 6, last {series.last:.6g})"
    assert repr(run.series("no/such")) == "Series(no values)"


FAMILIES = ("balancing", "experts", "ffn", "interop", "metrics", "routing", "weights")


@pytest.mark.parametrize("package", ["", *(f".{family}" for family in FAMILIES)])
def test_every_public_name_is_listed_and_there(package: str) -> None:
    """Tab completion reads `dir`, of names that are imported on first use too."""
    module = import_module(f"moe_ffn{package}")
    assert set(module.__all__) <= set(dir(module))
    assert not hasattr(module, "lode_run")
    for name in module.__all__:
        assert getattr(module, name) is not None


def test_the_models_of_the_files_have_what_is_written(moe_run: Any) -> None:
    run = moe_ffn.load_run(moe_run.folder)

    for document in (run.facts, run.summary):
        assert document.model_fields_set >= type(document).model_fields.keys()
    assert not run.summary.model_extra
    assert all(not sample.model_extra for sample in run.samples)
    assert {field.name for field in fields(alarms.Alarm)} == AlarmLine.model_fields.keys()


def test_the_routing_of_a_text(moe_run: Any) -> None:
    run = moe_ffn.load_run(moe_run.folder)

    routings = run.routing(TEXT)

    assert list(routings) == ["layer_00", "layer_01"]
    with torch.no_grad():
        expected = run.model(run.tokenizer.encode(TEXT)[None]).routings
    for layer, routing in routings.items():
        assert routing.num_tokens == len(TEXT)
        assert torch.equal(routing.expert_ids_N, expected[layer].expert_ids_N)
    assert run.routing(TEXT.encode()).keys() == routings.keys()


def test_what_cannot_be_is_a_sentence(moe_run: Any, tmp_path: Path) -> None:
    run = moe_ffn.load_run(moe_run.folder)
    with pytest.raises(moe_ffn.ConfigError) as refused:
        run.routing("a" * 17)
    assert str(refused.value) == (
        "text: has 17 tokens, but the model takes sequences of 16 (data.seq_len); give a "
        "shorter text"
    )
    with pytest.raises(moe_ffn.ConfigError, match="does not exist; give the folder of a run"):
        moe_ffn.load_run(tmp_path / "nothing")


def test_a_run_without_weights_has_all_the_rest(moe_run: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(moe_run.folder, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")

    run = moe_ffn.load_run(folder)

    assert len(run.rows) == 3
    assert run.config.seed == 0
    with pytest.raises(moe_ffn.ConfigError, match="has no checkpoints, so no model to load"):
        _ = run.model
