"""`trainer.precision: fastest`, with clocks that say what a test wants them to."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_ffn.cli import fastest_precision as room
from moe_ffn.cli.fastest_precision import Step, fastest_precision
from moe_ffn.config.errors import ConfigError
from moe_ffn.config.yaml_files import validate
from moe_ffn.data.prepare import prepare
from moe_ffn.kernels.base import is_autocast_on
from moe_ffn.runs.config import TrainConfig
from moe_ffn.studies.config import StudyConfig
from moe_ffn.training.module import LanguageModel
from tests.helpers.same_run import differences
from tests.helpers.tiny_runs import Finished, options, run_here

FASTER, SLOWER = [(2.0,), (1.0,)], [(1.0,), (1.0,)]
"""Seconds of steps in 32-true and in bf16-mixed, of which the second is worth a change or not."""

PROBE = torch.empty(0)

timed = room.timed


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[tuple[float, ...]]], list[str]]:
    """Have measurements take each step three times, and find these seconds; returns what is timed."""
    seen: list[str] = []
    monkeypatch.setattr(room, "product_dtype_on_cpu", lambda dtype: dtype)
    monkeypatch.setattr(room, "MAX_SHARE", 1.0)
    monkeypatch.setattr(room, "PATIENCE", 0.0)

    def instead(seconds: list[tuple[float, ...]]) -> list[str]:
        def find(steps: Sequence[Step]) -> list[tuple[float, ...]]:
            assert [len(values) for values in timed(steps)] == [3, 3]
            seen.extend(step.precision for step in steps)
            return seconds

        monkeypatch.setattr(room, "timed", find)
        return seen

    return instead


def train(folder: Path, precision: str = "fastest", **changes: str) -> Finished:
    """A tiny run whose parts remember, draw numbers and move buffers in every step."""
    block = "{type: moe, num_experts: 4, router: {type: noisy_top_k, k: 2}}"
    changes = {"model__dropout": "0.1", "objective__bias_rule__type": "sign", **changes}
    changes = {"model__ffn": block, "trainer__max_steps": "8", "run__name": precision, **changes}
    done = run_here(*options(folder, trainer__precision=precision, **changes))
    assert done.code == 0, done.stderr
    return done


def config_of(folder: Path, **changes: str) -> TrainConfig:
    from moe_ffn.cli.command_line import parse_config

    argv = options(folder, trainer__precision="fastest", **changes)
    return parse_config(argv, TrainConfig, "train")


def precision_of(folder: Path) -> str:
    return json.loads((folder / "facts.json").read_text())["precision"]


@pytest.mark.parametrize(
    ("plain", "mixed", "chosen"),
    [
        ((1.1, 1.11, 9.0), (1.0, 0.5, 1.0), "bf16-mixed"),
        ((1.09, 1.0, 1.2), (1.0, 1.0, 1.0), "32-true"),
        ((1.0, 1.0, 1.0), (30.0, 30.0, 30.0), "32-true"),
    ],
    ids=["faster", "as fast", "slower"],
)
def test_bfloat16_is_taken_where_the_median_step_is_clearly_faster(
    tmp_path: Path,
    say: Callable[..., list[str]],
    plain: tuple[float, ...],
    mixed: tuple[float, ...],
    chosen: str,
) -> None:
    config = config_of(tmp_path)
    seen = say([plain, mixed])

    precision, why = fastest_precision(config, prepare(config.data))

    assert (precision, seen) == (chosen, ["32-true", "bf16-mixed"])
    times = [f"{sorted(seconds)[1] * 1e3:,.1f} ms in" for seconds in (mixed, plain)]
    assert why == f"a step takes {times[0]} bf16-mixed, {times[1]} 32-true"


def test_what_is_timed_is_forward_and_backward_pass_in_each_format(
    tmp_path: Path, say: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    say(SLOWER)
    steps: list[Step] = []
    monkeypatch.setattr(room, "timed", lambda given: steps.extend(given) or SLOWER)
    fastest_precision(config, prepare(config.data))
    formats: list[str | None] = []
    forward = LanguageModel.training_step

    def training_step(module: LanguageModel, *batch: Any) -> Any:
        formats.append(str(torch.get_autocast_dtype("cpu")) if is_autocast_on(PROBE) else None)
        return forward(module, *batch)

    monkeypatch.setattr(LanguageModel, "training_step", training_step)
    for step in steps:
        weights = [weight for weight in step.module.parameters() if weight.requires_grad]
        step.run()
        assert all(weight.grad is not None for weight in weights)
        step.reset()
        assert all(weight.grad is None for weight in weights)
    assert formats == [None, "torch.bfloat16"]


def test_batches_that_are_accumulated_are_batches_of_the_run(
    tmp_path: Path, say: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"trainer__max_steps": "20", "trainer__accumulate_grad_batches": "4"}
    config = config_of(tmp_path, **changes)
    say(FASTER)
    monkeypatch.setattr(room, "MAX_SHARE", 0.1)
    assert fastest_precision(config, prepare(config.data))[0] == "bf16-mixed"


def test_a_run_that_was_measured_is_the_one_that_was_not_to_the_bit(
    tmp_path: Path, say: Callable[..., list[str]]
) -> None:
    train(tmp_path, "32-true")
    say(SLOWER)
    done = train(tmp_path)

    assert "precision 32-true (a step takes 1,000.0 ms in bf16-mixed, 1,000.0 ms in 32-true)" in (
        done.stdout
    )
    found = differences(tmp_path / "runs/32-true", tmp_path / "runs/fastest")
    assert not [line for line in found if "/trainer/precision: '32-true' and" not in line]


def test_no_generator_has_moved(tmp_path: Path, say: Callable[..., list[str]]) -> None:
    config = config_of(tmp_path, model__dropout="0.5")
    data = prepare(config.data)
    say(FASTER)
    torch.manual_seed(7)
    state, others = torch.get_rng_state(), (random.getstate(), str(np.random.get_state()))  # noqa: NPY002

    fastest_precision(config, data)

    assert torch.equal(torch.get_rng_state(), state)
    assert (random.getstate(), str(np.random.get_state())) == others  # noqa: NPY002


def test_a_resumed_run_keeps_what_was_measured_and_measures_nothing(
    tmp_path: Path, say: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = say(FASTER)
    train(tmp_path)
    folder = tmp_path / "runs/fastest"
    assert precision_of(folder) == "bf16-mixed"
    assert seen
    monkeypatch.delattr(room, "fastest_precision")
    done = run_here("--resume", str(folder), "--trainer.max_steps", "12")

    assert done.code == 0, done.stderr
    assert "precision bf16-mixed\n" in done.stdout
    assert precision_of(folder) == "bf16-mixed"


def fail(*_: Any) -> Any:
    raise RuntimeError("no kernel for it\nand so on")


BROKEN: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "no kernel for it": lambda m: m.setattr(room, "autocast_of", fail),
    "the loss is nan": lambda m: m.setattr(
        "moe_ffn.training.module.LanguageModel.training_step",
        lambda *_: {"loss": torch.tensor(torch.nan, requires_grad=True) * 1},
    ),
    "this CPU has no arithmetic in bfloat16": lambda m: m.setattr(
        room, "product_dtype_on_cpu", lambda dtype: torch.float32
    ),
    "8 steps are too many beside a run of 79": lambda m: m.setattr(room, "MAX_SHARE", 0.1),
}


@pytest.mark.parametrize("why", BROKEN)
def test_what_cannot_be_measured_is_float32_and_says_why(
    tmp_path: Path, say: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    config = config_of(tmp_path, trainer__max_steps="79")
    data = prepare(config.data)
    say(FASTER)
    BROKEN[why](monkeypatch)

    assert fastest_precision(config, data) == ("32-true", f"not measured: {why}")


@pytest.mark.parametrize(
    ("changes", "beside"),
    [
        ({"trainer__compile": "true"}, "trainer.compile"),
        ({"trainer__devices": "2"}, "2 processes"),
    ],
)
def test_several_processes_and_compiled_models_are_refused(
    tmp_path: Path, changes: dict[str, str], beside: str
) -> None:
    done = run_here(*options(tmp_path, trainer__precision="fastest", **changes))

    assert done.code == 2
    assert done.own_lines[-1] == (
        "error: trainer.precision (fastest) times eager steps in one process, which does not go with "
        f"{beside}; use auto, 32-true or bf16-mixed"
    )
    assert not (tmp_path / "runs").exists()


def test_a_study_is_refused() -> None:
    study = validate(
        StudyConfig,
        {"name": "s", "arms": {"a": {}}, "config": {"trainer": {"precision": "fastest"}}},
    )
    with pytest.raises(ConfigError, match=r"trainer.precision \(fastest\) is timed for each run"):
        study.planned_runs()
