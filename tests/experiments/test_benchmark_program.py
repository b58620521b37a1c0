"""The benchmark as a person types it, and what observing a model costs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import moe_ffn
from experiments.benchmark import __main__ as program
from experiments.benchmark.__main__ import main
from experiments.overhead import MAX_OBSERVING
from experiments.overhead import main as measure_overhead
from moe_ffn.cli.exit import exit_on_bad_input
from moe_ffn.runs.config import TrainConfig

REPOSITORY = Path(__file__).parents[2]
TINY = "64,16,8,4,2,fp32"


def test_a_tiny_run_from_end_to_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--shape", TINY, "--rounds", "1", "--backends", "loop", "--device", "cpu"]
    monkeypatch.setattr(program, "unavailable_reason", lambda: "needs a compiler")
    monkeypatch.setattr(sys, "argv", ["benchmark", *argv])

    assert exit_on_bad_input(main) == 0

    printed = capsys.readouterr()
    assert printed.err == ""
    assert "cpu kernels not compiled" in printed.out
    assert "T 64, D 16, F 8, E 4, K 2, fp32, forward and backward" in printed.out
    lines = [line.strip() for line in printed.out.splitlines()]
    assert all(name in printed.out for name in ("dense FFN", "moe_ffn auto", "moe_ffn loop"))
    assert next(line for line in lines if line.startswith("moe_ffn loop")).endswith("same")


def test_the_model_of_the_kernels_is_printed_and_nothing_is_timed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--model", "--shape", "32768,2048,1024,64,8,bf16"]) == 0

    first, head, *kernels, total = capsys.readouterr().out.splitlines()
    assert first == "T 32768, D 2048, F 1024, E 64, K 8, bf16: 9.90 TFLOP"
    assert head.split() == ["kernel", "TFLOP", "GB", "H200,", "at", "least"]
    # 4 T K D F / 709e12, and 2 (T D + 2 E D F + 3 T K F) bytes
    assert kernels[0].split() == ["hidden", "2.199", "2.28", "3.10", "ms"]
    assert total.split() == ["all", "14.5", "ms"]


# ----------------------------------------------------------------------------------- subprocesses


def run(code: str) -> subprocess.CompletedProcess[str]:
    # Triton's interpreter, which the tests of its kernels ask for, needs NumPy.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        check=False,
    )


WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
for name in {absent}:
    assert name not in sys.modules, name
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in {absent} else real(name, *rest)
from experiments.benchmark.__main__ import main
try:
    main(["--help"])
except SystemExit:
    print("loaded:", sorted({{"lightning", "transformers", "wandb"}} & set(sys.modules)))
raise SystemExit(main({argv}))
"""

ABSENT = {"wandb", "datasets", "pandas", "transformers"}


@pytest.mark.slow
def test_every_suite_runs_without_other_libraries_and_help_loads_no_lightning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where the suite of training steps keeps the standard library's tokens, as training does.
    monkeypatch.setenv("HOME", str(tmp_path))
    answer = run(WITHOUT.format(absent=ABSENT, argv=["--rounds", "1"]))

    assert answer.returncode == 0, answer.stderr
    for part in ("--suite NAME", "loaded: []", "other libraries: none", "== targets =="):
        assert part in answer.stdout
    assert "not measured" in answer.stdout  # without Hugging Face


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["null", "swiglu"], ids=["moe", "moe with a shared expert"])
def test_observing_costs_less_than_promised(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, shared: str
) -> None:
    measure_overhead(
        [
            *("--rounds", "1", "--logging.wandb.mode", "disabled"),
            *("--model.ffn.shared_expert", shared, "--data.cache_dir", str(tmp_path / "cache")),
        ]
    )

    found = re.search(r"^observing takes ([\d.]+)% of a step", capsys.readouterr().out, re.M)
    assert found is not None
    assert 0 < float(found[1]) / 100 < MAX_OBSERVING


@pytest.mark.slow
def test_the_callback_of_the_trainer_costs_less_than_promised(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed here")
    measure_overhead(["--callback", "true", "--rounds", "1", "--steps", "10"])

    found = re.search(r"^its own code takes ([\d.]+)% of a step", capsys.readouterr().out, re.M)
    assert found is not None
    assert 0 < float(found[1]) / 100 < MAX_OBSERVING


# -- `moe_ffn.load_run`: a run in a notebook


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


def test_reprs_of_a_run_fit_on_one_line(moe_run: Any) -> None:
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
    assert module.__all__ == sorted(module.__all__)
    assert not hasattr(module, "lode_run")
    for name in module.__all__:
        assert getattr(module, name).__name__ == name


def test_the_models_of_run_files_declare_every_written_field(moe_run: Any) -> None:
    run = moe_ffn.load_run(moe_run.folder)

    for document in (run.facts, run.summary):
        assert document.model_fields_set >= type(document).model_fields.keys()
    assert not run.summary.model_extra
    assert all(not sample.model_extra for sample in run.samples)


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
    assert [routing.num_tokens for routing in run.routing("").values()] == [0, 0]


def test_impossible_requests_raise_one_sentence(moe_run: Any, tmp_path: Path) -> None:
    run = moe_ffn.load_run(moe_run.folder)
    with pytest.raises(moe_ffn.ConfigError) as rejected:
        run.routing("a" * 17)
    assert str(rejected.value) == (
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
