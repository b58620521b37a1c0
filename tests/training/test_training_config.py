from __future__ import annotations

import inspect

from lightning import Trainer

from moe_ffn.training.config import (
    LIGHTNING_ARGUMENTS,
    OWNED_LIGHTNING_ARGUMENTS,
    TrainerConfig,
)


def test_every_argument_of_the_trainer_is_passed_on_or_has_a_reason_not_to_be() -> None:
    arguments = set(inspect.signature(Trainer).parameters)
    options = set(TrainerConfig.model_fields) & arguments
    assert set(LIGHTNING_ARGUMENTS) | set(OWNED_LIGHTNING_ARGUMENTS) | options == arguments
    assert not set(LIGHTNING_ARGUMENTS) & set(OWNED_LIGHTNING_ARGUMENTS)
