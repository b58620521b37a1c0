"""Which steps are taken, by their numbers alone; and what is said of those that are not."""

from __future__ import annotations

import math

import pytest

from moe_ffn.training.recovery.guard import Diverged, GuardConfig, SkippedStep, StepGuard
from tests.helpers.faults import RATE, make_rules


def guard_after(*losses: float, **config: object) -> StepGuard:
    guard = StepGuard(GuardConfig.model_validate(config))
    for loss in losses:
        guard.accept(loss)
    return guard


@pytest.mark.parametrize(
    ("before", "loss", "options", "reason"),
    [
        ([], 1e9, {}, None),
        ([2.0] * 4, 1e9, {}, None),  # too few steps to compare with
        ([9.0, 2.0, 2.0, 2.0, 1.0], 19.9, {}, None),
        (
            [9.0, 2.0, 2.0, 2.0, 1.0],
            205.0,
            {},
            "its loss 205 is 102 times the median of the steps before, 2 (limit 10)",
        ),
        ([*[1.0] * 32, *[6.0] * 17], 50.0, {}, None),  # the median forgets
        ([-1.0] * 9, 50.0, {}, None),
        (
            [2.0] * 5,
            7.0,
            {"max_loss_ratio": 3.0},
            "its loss 7 is 3.5 times the median of the steps before, 2 (limit 3)",
        ),
        ([2.0] * 5, 1e30, {"max_loss_ratio": None}, None),
        ([2.0] * 5, math.inf, {"max_loss_ratio": None}, "its loss is inf"),
        ([], -math.inf, {}, "its loss is -inf"),
    ],
)
def test_a_step_is_judged_by_its_loss(
    before: list[float], loss: float, options: dict[str, object], reason: str | None
) -> None:
    assert guard_after(*before, **options).check(loss, 1.0) == reason


def test_a_step_is_judged_by_its_gradient() -> None:
    assert guard_after().check(1.0, 1e9) is None
    assert guard_after().check(1.0, math.nan) == "its gradient norm is nan"
    assert str(guard_after().check(math.nan, 1.0)) == "its loss is nan"


def test_a_row_of_skipped_steps_remembers_where_it_began() -> None:
    guard = guard_after(1.0)
    first = guard.skip(2, "its loss is nan", "decoder.embedding")
    second = guard.skip(3, "its loss is 90", None)
    assert str(first) == "its loss is nan, which began in decoder.embedding"
    assert str(second) == "its loss is 90, which began in decoder.embedding"
    assert (second.num_in_a_row, guard.num_in_a_row, guard.num_skipped) == (2, 2, 2)

    guard.accept(1.0)
    third = guard.skip(5, "its loss is inf", None)

    assert str(third) == "its loss is inf"
    assert (third.num_in_a_row, guard.num_skipped) == (1, 3)


def test_too_many_in_a_row_end_the_run() -> None:
    guard = guard_after(max_skipped_in_a_row=2)
    guard.require_progress(guard.skip(4, "its loss is nan", "decoder.embedding"))
    with pytest.raises(
        Diverged,
        match=r"^step 5: 2 steps in a row were skipped; the last because its loss is inf, which began in "
        r"decoder\.embedding$",
    ):
        guard.require_progress(guard.skip(5, "its loss is inf", None))
    guard = guard_after(max_skipped_in_a_row=1)
    with pytest.raises(Diverged, match=r"^step 1: 1 step was skipped; the last because its loss"):
        guard.require_progress(guard.skip(1, "its loss is nan", None))


def test_a_guard_resumes_from_a_saved_state() -> None:
    guard = guard_after(*map(float, range(40)))
    guard.skip(41, "its loss is nan", "decoder.embedding")
    other = guard_after(1.0)

    other.load_state_dict(guard.state_dict())

    assert other.state_dict() == guard.state_dict()
    assert other.state_dict()["losses"] == list(range(8, 40))
    other.accept(40.0)
    assert other.state_dict()["losses"] == list(range(9, 41)), "the median still forgets"
    other.load_state_dict(guard.state_dict())
    assert other.skip(42, "its loss is nan", None) == SkippedStep(
        42, "its loss is nan", "decoder.embedding", 2
    )


# -- what is said


def test_the_first_of_consecutive_skips_is_an_alarm_with_advice() -> None:
    rules = make_rules()
    (alarm,) = rules.skipped(SkippedStep(17, "its loss is nan", "decoder.embedding", 1), limit=3)
    assert (alarm.kind, alarm.layer) == ("skipped_step", None)
    assert str(alarm) == (
        "step 17: skipped (1 in a row, 3 end the run): its loss is nan, which began in "
        f"decoder.embedding; if it recurs, {RATE}"
    )


def test_skips_soon_after_raise_no_alarm() -> None:
    rules = make_rules()  # 20 steps
    told = [
        step
        for step in (17, 18, 30, 50, 71)
        if rules.skipped(SkippedStep(step, "its loss is nan", None, 1), limit=3)
    ]
    assert told == [17, 71]
