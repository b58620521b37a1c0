"""Which steps are taken, by their numbers alone; and what is said of those that are not."""

from __future__ import annotations

import math

import pytest

from moe_ffn.training.recovery.guard import Diverged, GuardConfig, SkippedStep, StepGuard
from tests.helpers.alarm_rules import RATE, make_rules


def guard_after(*losses: float, **config: object) -> StepGuard:
    guard = StepGuard(GuardConfig.model_validate(config))
    for loss in losses:
        guard.accept(loss)
    return guard


def test_healthy_numbers_are_taken() -> None:
    guard = guard_after()
    for loss in (5.5, 4.0, 6.0, 0.1, 0.0, -3.0, 2.0):
        assert guard.check(loss, 1e9) is None
        guard.accept(loss)
    assert guard.num_skipped == guard.num_in_a_row == 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_numbers_that_are_none_are_not_taken_from_the_first_step_on(value: float) -> None:
    assert guard_after().check(value, 1.0) == f"its loss is {value}"
    assert guard_after().check(1.0, value) == f"its gradient norm is {value}"


def test_a_loss_is_too_high_beside_the_median_of_the_steps_before() -> None:
    guard = guard_after(9.0, 2.0, 2.0, 2.0, 1.0)
    assert guard.check(19.9, 1.0) is None
    assert guard.check(205.0, 1.0) == (
        "its loss 205 is 102 times the median of the steps before, 2 (limit 10)"
    )


def test_of_few_steps_none_is_too_high() -> None:
    assert guard_after(2.0, 2.0, 2.0, 2.0).check(1e9, 1.0) is None


def test_the_median_forgets() -> None:
    assert guard_after(*[1.0] * 32).check(50.0, 1.0)
    assert guard_after(*[1.0] * 32, *[6.0] * 17).check(50.0, 1.0) is None


def test_a_negative_median_skips_nothing() -> None:
    assert guard_after(*[-1.0] * 9).check(50.0, 1.0) is None


def test_the_limit_is_an_option() -> None:
    assert guard_after(*[2.0] * 5, max_loss_ratio=3.0).check(7.0, 1.0)
    assert guard_after(*[2.0] * 5, max_loss_ratio=None).check(1e30, 1.0) is None
    assert guard_after(*[2.0] * 5, max_loss_ratio=None).check(math.inf, 1.0)


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


def test_one_may_be_too_many() -> None:
    guard = guard_after(max_skipped_in_a_row=1)
    with pytest.raises(
        Diverged, match=r"^step 1: 1 step was skipped; the last because its loss is nan$"
    ):
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
    rules = make_rules(guard={"max_skipped_in_a_row": 3})
    (alarm,) = rules.skipped(SkippedStep(17, "its loss is nan", "decoder.embedding", 1))
    assert (alarm.kind, alarm.layer) == ("skipped_step", None)
    assert str(alarm) == (
        "step 17: skipped (1 in a row, 3 end the run): its loss is nan, which began in "
        f"decoder.embedding; if it comes again, {RATE}"
    )


def test_skips_soon_after_raise_no_alarm() -> None:
    rules = make_rules()  # 20 steps
    told = [
        step
        for step in (17, 18, 30, 50, 71)
        if rules.skipped(SkippedStep(step, "its loss is nan", None, 1))
    ]
    assert told == [17, 71]
