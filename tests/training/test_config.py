from __future__ import annotations

import inspect

import pytest
from lightning import Trainer
from pydantic import ValidationError

from moe_ffn.config.errors import explain
from moe_ffn.training.config import TrainerConfig


def test_what_is_not_given_is_as_lightning_has_it() -> None:
    arguments = inspect.signature(Trainer).parameters
    ours = {"max_steps", "accumulate_grad_batches", "gradient_clip_val", "precision"}
    for name in (TrainerConfig.model_fields.keys() & arguments) - ours:
        assert TrainerConfig.model_fields[name].default in (arguments[name].default, "auto"), name


@pytest.mark.parametrize(
    ("argument", "value", "words"),
    [
        ("detect_anomaly", "no", "true or false"),
        ("deterministic", "x", "true, false, null or 'warn'"),
        ("num_nodes", "x", "a whole number"),
        ("profiler", "pytorch", "one of 'simple' or 'advanced'"),
        ("strategy", "ddp_spawn", "one of 'auto', 'ddp' or 'ddp_find_unused_parameters_true'"),
        ("strategy", "ddp_fork", "one of 'auto', 'ddp' or 'ddp_find_unused_parameters_true'"),
        ("devices", 1.5, "a whole number, text or a list of whole numbers"),
    ],
)
def test_what_lightning_would_take_in_silence_is_refused(
    argument: str, value: object, words: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        TrainerConfig.model_validate({argument: value})
    assert explain(refused.value) == [f"{argument}: must be {words}, got {value!r}"]


def test_what_lightning_takes_is_passed_on() -> None:
    given = {
        "deterministic": "warn",
        "devices": [0, 1],
        "max_time": {"hours": 1},
        "benchmark": True,
    }
    assert TrainerConfig.model_validate(given).lightning_arguments() == given
