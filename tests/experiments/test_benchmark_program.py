"""The benchmark as a person types it, and what observing a model costs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.benchmark import __main__ as program
from experiments.benchmark.__main__ import main
from experiments.overhead import MAX_OBSERVING
from experiments.overhead import main as measure_overhead
from moe_ffn.cli.exit import exit_on_bad_input

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
