"""The step that is timed is the step of training; what is made of the seconds, by a clock that is given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ffn.config.yaml_files import parse_yaml, validate
from moe_ffn.data.prepare import PreparedData, prepare
from moe_ffn.runs.config import TrainConfig
from moe_ffn.studies import timing
from moe_ffn.studies.config import StudyConfig
from moe_ffn.studies.timing import Training, time_arms
from moe_ffn.training.recovery.checkpoint_file import newest_first, read_checkpoint


def test_six_timed_steps_are_a_run_of_six_steps(
    run_train: Callable[..., Any], tmp_path: Path
) -> None:
    """Accumulated, clipped and on its schedule: the weights are equal."""
    # Steps of SGD are as long as the gradient, and some gradients here are longer than 1 and some are not.
    sgd = "{type: sgd, learning_rate: 0.5, schedule: {type: cosine, warmup_steps: 4}}"
    flags = ["--trainer.accumulate_grad_batches", "3", "--trainer.gradient_clip_val", "1.0"]
    flags += ["--trainer.max_steps", "6", "--optimizer", sgd, "--seed", "5"]
    done = run_train(tmp_path, *flags)
    assert done.code == 0, done.stderr
    saved = read_checkpoint(newest_first(done.folder / "checkpoints")[0])["state_dict"]
    config = validate(TrainConfig, parse_yaml((done.folder / "config.yaml").read_text(), "it"))

    training = Training(config, prepare(config.data), torch.device("cpu"))
    for _ in range(6):
        training.step()

    for name, value in training.model.state_dict().items():
        torch.testing.assert_close(saved[f"decoder.{name}"], value, msg=name)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("32-true", torch.float32), ("bf16-mixed", torch.bfloat16)]
)
def test_a_timed_step_has_the_precision_of_the_run(
    precision: str, dtype: torch.dtype, tiny_yaml: Path, tmp_path: Path
) -> None:
    options = parse_yaml(tiny_yaml.read_text(), "tiny")
    options["data"]["cache_dir"] = str(tmp_path)
    options["trainer"]["precision"] = precision
    config = validate(TrainConfig, options)
    training = Training(config, prepare(config.data), torch.device("cpu"))
    seen: list[torch.dtype] = []
    training.model.register_forward_hook(lambda *given: seen.append(given[-1].logits.dtype))

    training.step()

    assert seen == [dtype]


TIMED = """
name: timed
config: {model: {d_model: 16, num_layers: 1, attention.num_heads: 2}, trainer.precision: 32-true}
seeds: [0, 1]
arms:
  quick: {model.ffn: {type: dense, d_ff: 16}}
  slow: {model.ffn: {type: dense, d_ff: 32}, trainer.accumulate_grad_batches: 2}
  long: {model.ffn: {type: dense, d_ff: 48}, data.batch_size: 2}
tuning: {seeds: [0], grid: {optimizer.learning_rate: [0.5]}}
"""


def test_an_arm_s_seconds_tokens_and_rounds(
    tiny_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = parse_yaml(tiny_yaml.read_text(), "tiny")["data"] | {"cache_dir": str(tmp_path)}
    options = parse_yaml(TIMED, "study")
    options["config"]["data"] = tiny
    runs = validate(StudyConfig, options).planned_runs()
    now = 0.0
    steps = dict.fromkeys((16, 32, 48), 0)
    prepared: list[int] = []

    def step(training: Training) -> None:
        nonlocal now
        ffn: Any = training.model.config.ffn
        d_ff = ffn.d_ff
        steps[d_ff] += 1
        # The slow arm takes 0.1 s, and far more in its fifth round: three steps a turn, two before.
        is_hurt = d_ff == 32 and 2 + 3 + 4 * 3 < steps[d_ff] <= 2 + 3 + 5 * 3
        now += 10.0 if is_hurt else {16: 0.001, 32: 0.1, 48: 0.2}[d_ff]

    def counted(data: Any) -> PreparedData:
        prepared.append(data.batch_size)
        return prepare(data)

    monkeypatch.setattr(Training, "step", step)
    monkeypatch.setattr(timing, "prepare", counted)

    found = time_arms(runs, rounds=9, clock=lambda: now)

    assert [*found] == ["quick", "slow", "long"], "no seed twice, and no run of tuning"
    assert prepared == [4, 2], "each data once"
    quick, slow, long = found.values()
    assert slow.seconds_per_step == pytest.approx(0.1), "the median, not the mean"
    assert slow.tokens_per_second == pytest.approx(2 * 4 * 16 / 0.1)
    assert long.tokens_per_second == pytest.approx(2 * 16 / 0.2)
    # A turn takes 0.3 seconds, or twenty steps.
    assert [t.num_steps for t in (quick, slow, long)] == [9 * 20, 9 * 3, 9 * 2]
    assert [*steps.values()] == [2 + 10 * 20, 2 + 10 * 3, 2 + 10 * 2], "a round to warm up"


def test_quartiles_are_of_the_rounds() -> None:
    config = TrainConfig()
    found = timing._step_time(config, 1, [5.0, 1.0, 2.0, 3.0, 4.0])
    assert found.quartiles == (2.0, 4.0)
