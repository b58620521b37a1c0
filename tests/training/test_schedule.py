"""Every schedule by numbers worked by hand, and by those of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.optim.lr_scheduler import LambdaLR
from transformers import optimization

from moe_ffn.config.errors import explain
from moe_ffn.training.optimizer import AdamWConfig
from moe_ffn.training.schedule import ScheduleConfig

NUM_STEPS = 100
"""Of a run, of which 9 are warm-up here: the tenth step has the peak rate."""


def schedule(**options: Any) -> ScheduleConfig:
    return ScheduleConfig.model_validate({"warmup_steps": 9, **options})


@pytest.mark.parametrize(
    ("options", "step", "expected"),
    [
        # 91 steps after warm-up. After 13 of them a seventh of 0.9 has gone.
        ({"type": "linear"}, 0, 0.1),
        ({"type": "linear"}, 8, 0.9),
        ({"type": "linear"}, 9, 1.0),
        ({"type": "linear"}, 22, 1 - 0.9 / 7),
        ({"type": "linear"}, 99, 1 - 0.9 * 90 / 91),
        ({"type": "linear"}, 100, 0.1),
        ({"type": "linear"}, 150, 0.1),
        ({"type": "inverse_sqrt", "warmup_steps": 0}, 3, 0.5),
        ({"type": "cosine", "warmup_steps": 0}, 0, 1.0),
        ({"type": "cosine", "final_fraction": 0.1}, 130, 0.1),
        ({"type": "cosine", "final_fraction": 1.0}, 100, 1.0),
        # Falls in the last fifth of 100 steps, from step 80 to 1/10.
        ({"type": "wsd", "warmup_steps": 0, "decay_fraction": 0.2}, 80, 1.0),
        ({"type": "wsd", "warmup_steps": 0, "decay_fraction": 0.2}, 90, 0.55),
        ({"type": "wsd", "warmup_steps": 0, "decay_fraction": 0.2}, 130, 0.1),
        ({"type": "wsd", "warmup_steps": 0, "decay_fraction": 1.0}, 50, 0.55),
    ],
    ids=str,
)
def test_the_multiplier_is_the_one_worked_by_hand(
    options: dict[str, Any], step: int, expected: float
) -> None:
    assert schedule(**options).multiplier(step, NUM_STEPS) == pytest.approx(expected)


def hugging_face(make: Callable[..., LambdaLR], **options: Any) -> Callable[[int], float]:
    """That of transformers, in which step 0 is made at rate 0: ours are those from its step 1 on."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    (multiplier,) = make(optimizer, num_warmup_steps=10, **options).lr_lambdas
    return lambda step: multiplier(step + 1)


WHOLE = {"num_training_steps": NUM_STEPS + 1}


@pytest.mark.parametrize(
    ("ours", "make", "options"),
    [
        ({"type": "constant"}, optimization.get_constant_schedule_with_warmup, {}),
        ({"type": "inverse_sqrt"}, optimization.get_inverse_sqrt_schedule, {}),
        (
            {"type": "linear", "final_fraction": 0.0},
            optimization.get_linear_schedule_with_warmup,
            WHOLE,
        ),
        (
            {"type": "cosine", "final_fraction": 0.0},
            optimization.get_cosine_schedule_with_warmup,
            WHOLE,
        ),
        (
            {"type": "cosine", "final_fraction": 0.1},
            optimization.get_cosine_with_min_lr_schedule_with_warmup,
            {**WHOLE, "min_lr_rate": 0.1},
        ),
        (
            # 13 of the 91 steps after warm-up.
            {"type": "wsd", "decay_fraction": 1 / 7, "final_fraction": 0.0},
            optimization.get_wsd_schedule,
            {**WHOLE, "num_decay_steps": 13, "decay_type": "linear"},
        ),
    ],
    ids=["constant", "inverse_sqrt", "linear", "cosine", "cosine to a tenth", "wsd"],
)
def test_the_multiplier_is_that_of_transformers(
    ours: dict[str, Any], make: Callable[..., LambdaLR], options: dict[str, Any]
) -> None:
    theirs = hugging_face(make, **options)
    for step in range(NUM_STEPS):
        assert schedule(**ours).multiplier(step, NUM_STEPS) == pytest.approx(theirs(step)), step


def test_steps_of_warm_up_do_not_depend_on_the_length_of_the_run() -> None:
    assert schedule(type="constant").multiplier(4, max_steps=10**6) == pytest.approx(0.5)
    fraction = ScheduleConfig.model_validate({"type": "constant", "warmup_fraction": 0.09})
    assert [fraction.num_warmup_steps(n) for n in (100, 1000)] == [9, 90]
    # The nearest number: 0.09 * 30 is 2.7, and in float64 0.29 * 100 is 28.999999999999996.
    assert fraction.num_warmup_steps(30) == 3
    larger = ScheduleConfig.model_validate({"type": "linear", "warmup_fraction": 0.29})
    assert larger.num_warmup_steps(100) == 29
    assert schedule(type="constant").warmup_option == "warmup_steps (now 9)"
    assert fraction.warmup_option == "warmup_fraction (now 0.09)"


@pytest.mark.parametrize("tag", ScheduleConfig.members)
def test_warm_up_in_steps_and_as_a_part_is_refused(tag: str) -> None:
    assert mistake(type=tag, warmup_steps=9, warmup_fraction=0.1) == (
        "schedule: warmup_steps (9) and warmup_fraction (0.1) both set the length of the warm-up; leave "
        "warmup_steps null, or warmup_fraction at 0.05"
    )


def test_a_schedule_without_an_end_has_no_final_rate() -> None:
    assert mistake(type="constant", final_fraction=0.5).startswith("schedule.final_fraction: unkn")


def mistake(**options: Any) -> str:
    with pytest.raises(ValidationError) as refused:
        AdamWConfig.model_validate({"schedule": options})
    (line,) = explain(refused.value)
    return line
