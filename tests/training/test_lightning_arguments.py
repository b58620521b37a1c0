"""Arguments for `lightning.Trainer` have the effect that `--help trainer` describes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning import Trainer
from pydantic import ValidationError

from moe_ffn.config.environment import LAUNCHER_VARIABLES
from moe_ffn.config.errors import ConfigError, explain
from moe_ffn.runs.assemble import make_token_data
from moe_ffn.runs.config import Resume, TrainConfig
from moe_ffn.runs.json_files import Facts
from moe_ffn.runs.validate import require_valid
from moe_ffn.training.config import TrainerConfig
from tests.helpers.fitted import OWN_BLOCK, Fit, Fitted

RunTrain = Callable[..., Any]

pytestmark = pytest.mark.usefixtures("stay_in_tmp_path")


def test_a_profile_is_a_file_of_the_run(run_train: RunTrain, tmp_path: Path) -> None:
    run = run_train(tmp_path, "--trainer.profiler", "simple", "--trainer.max_steps", "2")

    assert run.code == 0, run.stderr
    text = (run.folder / "profile.txt").read_text()
    assert "LanguageModel.optimizer_step" in text
    assert text.startswith("optimizer steps 1 to 2\n")

    more = ("--resume", str(run.folder), "--trainer.max_steps")
    assert run_train(tmp_path, *more, "3", "--trainer.profiler", "advanced").code == 0
    text = (run.folder / "profile.txt").read_text()
    assert "LanguageModel.optimizer_step" in text
    assert text.startswith("optimizer steps 3 to 3\n")
    assert run_train(tmp_path, *more, "4", "--trainer.profiler", "null").code == 0
    assert not (run.folder / "profile.txt").exists(), "what is there is of this run's last part"


def test_a_plain_run_has_no_profile_and_comes_to_its_end(moe_run: Any) -> None:
    assert not (moe_run.folder / "profile.txt").exists()
    assert "ended after" not in moe_run.stdout


def test_a_run_ends_at_its_time_limit_with_a_message(run_train: RunTrain, tmp_path: Path) -> None:
    run = run_train(tmp_path, "--trainer.max_time", "00:00:00:00")

    assert run.code == 0, run.stderr
    (step,) = re.findall(
        r"^ended after step (\d) of 6 \(trainer\.max_time\)$", run.stdout, re.MULTILINE
    )
    assert int(step) < 6
    assert run.rows[-1]["step"] == int(step)
    assert "validation/loss" in run.rows[-1]


@pytest.fixture
def train_with(fit: Fit, tmp_path: Path) -> Fit:
    """`train_with("assert x.isfinite()", benchmark=True)`: a block that does this, trained."""

    def run(line: str, **arguments: Any) -> Fitted:
        (tmp_path / "own.py").write_text(OWN_BLOCK % line)
        ffn = {"type": f"{tmp_path}/own.py:Config"}
        return fit(model={"ffn": ffn}, trainer={"max_steps": 1, **arguments})

    return run


@pytest.mark.parametrize("inference_mode", [True, False])
def test_validation_is_under_inference_mode_or_not(train_with: Fit, inference_mode: bool) -> None:
    """Only the validation at the end: within a fit, Lightning never uses inference mode."""
    done = train_with(
        f"assert torch.is_inference_mode_enabled() == (not self.training and {inference_mode})",
        inference_mode=inference_mode,
    )
    done.trainer.validate(done.module, datamodule=make_token_data(done.config, done.data))


def test_an_anomaly_ends_the_run_where_it_is_made(train_with: Fit) -> None:
    with (
        pytest.warns(UserWarning, match="Error detected in SqrtBackward0"),
        pytest.raises(RuntimeError, match="Function 'SqrtBackward0' returned nan values"),
    ):
        train_with("return FFNOutput(x + 0 * (x * 0).sqrt())", detect_anomaly=True)


# -- the options


def test_defaults_are_those_of_lightning() -> None:
    arguments = inspect.signature(Trainer).parameters
    ours = {"max_steps", "accumulate_grad_batches", "gradient_clip_val", "precision"}
    for name in (TrainerConfig.model_fields.keys() & arguments) - ours:
        assert TrainerConfig.model_fields[name].default in (arguments[name].default, "auto"), name


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("detect_anomaly", "no", "true or false"),
        ("deterministic", "x", "true, false, null or 'warn'"),
        ("profiler", "pytorch", "one of 'simple' or 'advanced'"),
        ("strategy", "ddp_spawn", "one of 'auto', 'ddp' or 'ddp_find_unused_parameters_true'"),
        ("devices", 1.5, "a whole number, text or a list of whole numbers"),
    ],
)
def test_values_that_lightning_silently_accepts_are_rejected(
    argument: str, value: object, words: str
) -> None:
    with pytest.raises(ValidationError) as rejected:
        TrainerConfig.model_validate({argument: value})
    assert explain(rejected.value) == [f"{argument}: must be {words}, got {value!r}"]


def test_lightning_arguments_are_passed_on() -> None:
    given = {
        "deterministic": "warn",
        "devices": [0, 1],
        "max_time": {"hours": 1},
        "benchmark": True,
    }
    assert TrainerConfig.model_validate(given).lightning_arguments() == given


# Of SLURM Lightning reads more, and checks it.
@pytest.mark.parametrize(
    "variable", [name for name in LAUNCHER_VARIABLES if not name.startswith("SLURM")]
)
def test_num_nodes_is_accepted_under_a_launcher(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    config = TrainConfig.model_validate({"trainer": {"num_nodes": 2, "accelerator": "cpu"}})
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"^trainer\.num_nodes \(2\): .* torchrun "):
        require_valid(config)

    monkeypatch.setenv(variable, "2")
    require_valid(config)


@pytest.mark.parametrize(
    ("given", "began_in", "expected"),
    [
        ("auto", "bf16-mixed", "bf16-mixed"),
        ("auto", None, "32-true"),
        ("64-true", "32-true", "64-true"),
    ],
)
def test_a_resumed_run_keeps_its_precision_unless_another_one_is_given(
    given: str, began_in: Any, expected: str
) -> None:
    options = {"trainer": {"precision": given, "accelerator": "cpu"}}
    config = TrainConfig.model_validate(options)
    resume = Resume(Path("runs/mine"), config, {}, config, Facts(precision=began_in))
    assert require_valid(config, resume).precision == expected
