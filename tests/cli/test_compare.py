"""Several configs trained and printed side by side; finished runs are not repeated."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_ffn.cli import compare
from moe_ffn.cli.exit import exit_on_bad_input
from moe_ffn.config_files import to_yaml
from moe_ffn.errors import ConfigError
from moe_ffn.report.comparison import (
    COLUMNS,
    LEGEND,
    Result,
    comparison_table,
    in_order,
    read_result,
    write_markdown,
)
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.folder import locked
from moe_ffn.training.monitoring.json_lines import JsonLines
from tests.helpers.tiny_runs import train_in_this_process


@pytest.fixture
def run_compare(
    tiny_yaml: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str, str]]:
    """Exit code, stdout and stderr of the program on tiny copies of configs."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(subprocess, "run", train_in_this_process)
    tiny = tiny_yaml.read_text(encoding="utf-8")

    def run(configs: dict[str, str], *options: str) -> tuple[int, str, str]:
        for name, ffn in configs.items():
            text = tiny.replace("model: {", f"model: {{ffn: {ffn}, ")
            (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
        files = [f"{name}.yaml" for name in configs]
        args = [*files, *options, "--data.cache_dir", str(tmp_path / "cache")]
        monkeypatch.setattr(sys, "argv", ["compare.py", *args])
        code = exit_on_bad_input(compare.main)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


SWITCH = "{type: moe, num_experts: 4, router: {type: top_k, k: 1}, capacity: {factor: 0.5}}"


BROKEN = "{type: moe, experts: {backend: grouped_mm, d_ff: 3}}"


def test_results_stand_side_by_side_and_are_kept(
    run_compare: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    # 3 float32 are 12 bytes: what only the backend itself knows, so it is told when the run starts.
    configs = {"switch": SWITCH, "broken": BROKEN, "plain": "dense"}
    options = ("--name", "all", "--trainer.precision", "auto")
    code, out, err = run_compare(configs, *options)

    assert code == 1
    assert "multiple of 16 bytes" in err
    assert "failed: broken.yaml; what it said is above" in err
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    assert lines["config"] == [
        *("config", "guesses", "precision"),
        *("loss", "MaxVio", "experts", "dropped", "MFLOPs", "tokens/s"),
    ]
    assert lines["switch"][1] == "next"
    assert lines["switch"][2] == "32-true", "what auto stood for"
    assert 0 <= float(lines["switch"][4]) <= 3
    assert lines["switch"][5] == "1.00"
    # Of four experts with a factor of 0.5, at least half of the pairs find theirs full.
    assert float(lines["switch"][6].rstrip("%")) >= 50
    assert lines["plain"][4:7] == ["-", "-", "-"]
    assert "| switch | next | 32-true |" in (tmp_path / "runs/all/comparison.md").read_text()

    del configs["broken"]
    again, out, _ = run_compare(configs, *options)
    assert again == 0
    assert "training (" not in out
    assert lines["switch"] in [line.split() for line in out.splitlines()]

    code, _, err = run_compare(configs, *options, "--seed", "1")
    assert code == 2
    assert err == (
        "error: 'runs/all/switch' holds a run with other options (seed was 0, is 1); give the options "
        "it had, or choose another --name\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--trainer.max_steps", "3"],
            "give the config files first: moe-ffn compare configs/routers/*.yaml",
        ),
        (["a.yaml", "--name"], "argument --name: expected one argument"),
        (["a.yaml", "b/a.yaml"], "two config files are called 'a'; a run is named by its file"),
        (["nowhere.yaml"], "--config nowhere.yaml: No such file or directory"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["compare.py", *arguments])
    assert exit_on_bad_input(compare.main) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.parametrize("before", [["--trust-code"], ["--name", "all"], []])
def test_flags_of_its_own_may_stand_before_the_files(before: list[str]) -> None:
    files, _, overrides, trust_code = compare.parse_arguments([*before, "a.yaml", "--seed", "1"])

    assert (files, overrides) == ([Path("a.yaml")], ["--seed", "1"])
    assert trust_code == ("--trust-code" in before)


def test_a_misspelt_option_stops_before_anything_is_trained(
    run_compare: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    code, _, err = run_compare({"plain": "dense"}, "--trainer.max_step", "3")
    assert code == 2
    assert "trainer.max_step: unknown; did you mean 'max_steps'?" in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("code", [0, 3])
def test_a_run_gets_the_options_and_of_one_that_failed_the_last_lines_are_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: int,
) -> None:
    config = TrainConfig.model_validate({"run": {"name": "plain", "output_dir": str(tmp_path)}})
    lines = [f"line {number}" for number in range(12)]
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, code, "\n".join(lines))

    monkeypatch.setattr(subprocess, "run", run)

    assert compare.train(Path("plain.yaml"), config, ["--seed", "7"], begun=False) is (code == 0)

    (command,) = commands
    assert command[1:] == [
        *("-P", "-m", "moe_ffn.cli", "train", "--config", "plain.yaml", "--seed", "7"),
        *("--run.output_dir", str(tmp_path), "--run.name", "plain"),
    ]
    assert capsys.readouterr().err.splitlines() == (lines[2:] if code else [])


def test_an_unfinished_run_that_is_being_trained_stays_where_it_is(tmp_path: Path) -> None:
    config = TrainConfig.model_validate({"run": {"name": "plain", "output_dir": str(tmp_path)}})
    (tmp_path / "plain").mkdir()

    with (
        locked(tmp_path / "plain"),
        pytest.raises(ConfigError, match="is being trained by another"),
    ):
        compare.has_begun(config)

    assert [path.name for path in tmp_path.iterdir() if path.name != "home"] == ["plain"]


def test_what_an_unfinished_run_with_other_options_left_is_set_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = TrainConfig.model_validate({"run": {"name": "plain", "output_dir": str(tmp_path)}})
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("precious")

    assert not compare.has_begun(config)

    (aside,) = tmp_path.glob("plain-unfinished-*")
    assert not folder.exists()
    assert (aside / "metrics.jsonl").read_text() == "precious"
    assert capsys.readouterr().out == (
        f"plain: an unfinished run with other options is now {aside}\n"
    )
    assert not compare.has_begun(config)
    assert capsys.readouterr().out == "", "nothing there, nothing said"


def test_an_interrupted_run_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig.model_validate({"run": {"name": "plain", "output_dir": str(tmp_path)}})
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/config.yaml").write_text(to_yaml(config))
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "")

    monkeypatch.setattr(subprocess, "run", run)

    begun = compare.has_begun(config)
    assert compare.train(Path("plain.yaml"), config, ["--seed", "0"], begun)

    assert begun
    assert commands[0][-2:] == ["--resume", str(tmp_path / "plain")]


DROPPED = "routing/layer_{}/dropped_fraction"
METRICS = [
    {"step": step, "train/tokens_per_second": speed}
    | {DROPPED.format(layer): share for layer, share in dropped.items()}
    for step, speed, dropped in (
        (2, 1000.0, {"00": 0.9, "01": 0.9, "01/inner": 0.0}),
        (4, 3000.0, {"00": 0.125, "01": 0.375, "01/inner": 1.0}),
    )
]
METRICS.append({"step": 4, f"validation/{DROPPED.format('00')}": 0.75, "validation/loss": 1.25})


@pytest.fixture
def finished(tmp_path: Path) -> TrainConfig:
    """The config of a run of two layers, one of them with a block inside its block."""
    folder = tmp_path / "depths"
    folder.mkdir()
    JsonLines(folder / "metrics.jsonl").add(METRICS)
    (folder / "facts.json").write_text(
        json.dumps({"flops_per_token": 2_500_000, "precision": "bf16-mixed"})
    )
    routing = {
        layer: {"max_violation": violation, "experts_per_token": experts, "dropped_fraction": 0.75}
        for layer, violation, experts in (
            ("layer_00", 0.25, 2.0),
            ("layer_01", 0.75, 0.5),
            ("layer_01/inner", 7.0, 8.0),
        )
    }
    summary = {"validation_loss": 1.25, "unigram_loss": 3.0, "tokens_per_second": 2000.0}
    (folder / "summary.json").write_text(json.dumps({**summary, "routing": routing}))
    options = {"run": {"name": "depths", "output_dir": str(tmp_path)}}
    return TrainConfig.model_validate(options)


def test_a_result_is_of_the_layers_the_last_row_and_the_fastest(finished: TrainConfig) -> None:
    numbers = {
        "loss": 1.25,
        "MaxVio": 0.5,
        "experts": 1.25,
        "dropped": 0.25,
        "MFLOPs": 2.5,
        "tokens/s": 3000.0,
    }
    expected = Result("depths", True, "bf16-mixed", numbers, unigram_loss=3.0)
    assert read_result("depths", finished) == expected


def test_the_cells_of_a_result_have_the_units_of_their_columns(
    finished: TrainConfig, tmp_path: Path
) -> None:
    routed = read_result("depths", finished)
    numbers = {name: routed.numbers[name] for name in ("MFLOPs", "tokens/s")}
    diverged = replace(routed, name="broken", causal=False, numbers=numbers)
    expected = {
        "config": ("depths", "broken"),
        "guesses": ("next", "masked"),
        "precision": ("bf16-mixed", "bf16-mixed"),
        "loss": ("1.2500", "-"),
        "MaxVio": ("0.50", "-"),
        "experts": ("1.25", "-"),
        "dropped": ("25.0%", "-"),
        "MFLOPs": ("2.50", "2.50"),
        "tokens/s": ("3,000", "3,000"),
    }
    found = dict(
        zip(list[str](COLUMNS), zip(routed.cells(), diverged.cells(), strict=True), strict=True)
    )
    assert {name: found[name] for name in expected} == expected

    write_markdown([diverged, routed], tmp_path / "comparison.md")

    header, kinds, *rows = (tmp_path / "comparison.md").read_text().splitlines()
    cells = [line.strip("| ").split(" | ") for line in (header, kinds, *rows[:2])]
    texts = ["---"] * COLUMNS.index("loss")
    right = ["---:"] * (len(COLUMNS) - len(texts))
    assert cells == [[*COLUMNS], texts + right, routed.cells(), diverged.cells()]
    assert rows[2:] == ["", LEGEND]


def test_next_tokens_come_first_and_lower_losses_before_higher_ones() -> None:
    def result(name: str, causal: bool, loss: float | None) -> Result:
        return Result(name, causal, "32-true", {"loss": loss}, unigram_loss=1.5)

    results = [
        result("masked", False, 0.1),
        result("diverged", True, None),
        result("worse", True, 2.0),
        result("better", True, 1.0),
    ]
    assert [r.name for r in in_order(results)] == ["better", "worse", "diverged", "masked"]
    assert comparison_table(results).row_count == 4
    worse = "; worse than the unigram model, which only counts tokens: too short, or broken: worse"
    assert str(comparison_table(results).caption) == LEGEND + worse
    assert str(comparison_table(results[-1:]).caption) == LEGEND
