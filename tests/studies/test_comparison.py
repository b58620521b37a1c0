"""Arms compared by hand-made results: differences, costs, differing options, problems and verdicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_ffn.config.errors import ConfigError
from moe_ffn.report.studies.comparison_tables import tables
from moe_ffn.runs.config import TrainConfig
from moe_ffn.studies.comparison import Comparison, Tuning, first_step_at
from moe_ffn.studies.differences import block_of, identity, option_differences, require_same_options
from moe_ffn.studies.result import RunResult
from tests.helpers.synthetic_run import SHA, make_result

SWIGLU = {"model.ffn": {"type": "swiglu"}}


def gating(num_seeds: int = 5) -> list[RunResult]:
    """gelu at 2.0 and a little more each seed; swiglu 0.1 below it, relu as good in the mean."""
    return [
        make_result(arm, seed, 2.0 + 0.01 * seed + shift + (0.002 if seed % 2 else -0.002) * spread)
        for seed in range(num_seeds)
        for arm, shift, spread in (("gelu", 0, 0), ("swiglu", -0.1, 1), ("relu", 0.0001, 9))
    ]


# -- differences


def test_two_seeds_are_shown_singly_with_the_number_of_seeds_needed() -> None:
    found = Comparison.of(gating(2), baseline="gelu")
    gelu, swiglu, _ = found.arms

    assert gelu.interval is None
    assert gelu.loss == pytest.approx(2.005)
    assert swiglu.difference is not None
    assert (swiglu.difference.interval, swiglu.difference.p_value) == (None, None)
    assert found.verdicts == [
        "swiglu minus gelu: -0.1020 and -0.0980 nats per token in 2 seeds, too few for an interval; if seeds "
        "differ as these do, about 3 seeds detect 0.05 with 80 % power.",
        "relu minus gelu: -0.0179 and +0.0181 nats per token in 2 seeds, too few for an interval; if seeds "
        "differ as these do, about 6 seeds detect 0.05 with 80 % power.",
    ]
    (row, *_), legend = tables(found)[0].rows, tables(found)[0].legend
    assert row == ["gelu", "2", "2.0050", "0.0071", "-", "-", "-"]
    assert tables(found)[0].rows[1][4:] == ["-0.1000", "-", "-"]
    assert legend[-1] == "a loss of two seeds has no interval"
    assert Comparison.of([r for r in gating(2) if r.arm == "gelu"]).verdicts == [
        "gelu: 2.0000 and 2.0100 nats per token in 2 seeds; an interval needs 3."
    ]


def test_an_arm_summarises_all_its_runs_in_order_of_seed() -> None:
    results = [
        make_result("a", 10, steps=100, peak_memory_bytes=3, alarms={"collapse": 1}),
        make_result(
            "a", 2, steps=300, peak_memory_bytes=1, alarms={"collapse": 2, "loss_spike": 1}
        ),
    ]
    (arm,) = Comparison.of(results).arms

    assert arm.seeds == [2, 10]
    assert (arm.steps, arm.mean("peak_memory_bytes")) == (200, 2)
    assert arm.alarms == {"collapse": 3, "loss_spike": 1}


def test_seeds_that_stop_at_other_steps_are_averaged_in_tokens_too() -> None:
    """Of early stopping or a time limit; a step has 10 tokens."""
    results = [make_result("a", seed, steps=steps) for seed, steps in enumerate((100, 300))]
    (arm,) = Comparison.of(results, step_seconds={"a": 0.5}).arms

    assert (arm.steps, arm.budget.tokens, arm.training_flops) == (200, 2000, 3 * 1000 * 2000)
    assert arm.tokens_per_second == 20
    assert arm.reached is not None
    assert arm.reached.flops == 3 * 1000 * 2000


def test_verdicts_follow_from_the_intervals() -> None:
    swiglu, relu = Comparison.of(gating(), baseline="gelu").verdicts

    assert swiglu.startswith("swiglu is better than gelu by 0.1004 [0.09")
    assert swiglu.endswith("] nats per token (5 seeds, p < 0.001).")
    assert relu.startswith(
        "relu or gelu: undecided, -0.0035 [-0.0280, +0.0210] nats per token (5 seeds; p "
    )
    assert "; with 80 % power, these seeds detect 0.0" in relu
    worse = Comparison.of(gating(), baseline="swiglu").verdicts[0]
    assert worse.startswith("gelu is worse than swiglu by 0.1004 [0.09")


@pytest.mark.parametrize(
    ("shift", "margin", "verdict"),
    [
        (
            0.0,
            0.02,
            "b equals a within 0.02 nats per token: +0.0000 [-0.0025, +0.0025] (3 seeds, two",
        ),
        (0.01, 0.02, "; still, they are equal within 0.02 nats per token."),
        (
            0.01,
            0.005,
            "b is worse than a by 0.0100 [0.0075, 0.0125] nats per token (3 seeds, p 0.0033).",
        ),
    ],
)
def test_a_verdict_claims_equality_within_its_margin(
    shift: float, margin: float, verdict: str
) -> None:
    losses = {"a": [0.0, 0.0, 0.0], "b": [shift - 0.001, shift + 0.001, shift]}
    results = [
        make_result(arm, seed, 2.0 + loss)
        for arm in losses
        for seed, loss in enumerate(losses[arm])
    ]
    assert verdict in Comparison.of(results, margin=margin).verdicts[0]


def test_runs_are_compared_with_ngrams_of_their_training_tokens() -> None:
    known = [
        make_result("gelu", seed, loss, ngram_loss=ngrams)
        for seed, loss, ngrams in ((0, 2.0, 2.1), (1, 2.2, 2.14), (2, 2.0, 2.2))
    ]
    unknown = make_result("swiglu", 0, 1.0)
    assert Comparison.of([*known, unknown]).compared_with_ngrams == (
        "2 of 3 runs beat a 5-gram model of the tokens that they read (2.100 to 2.200 nats per token)."
    )
    assert Comparison.of([known[0], unknown]).compared_with_ngrams.endswith(
        "(2.100 nats per token)."
    )
    assert not Comparison.of([unknown]).compared_with_ngrams
    wide = [make_result("gelu", seed, 9.0, ngram_loss=loss) for seed, loss in ((0, 9.8), (1, 10.2))]
    assert Comparison.of(wide).compared_with_ngrams.endswith("(9.800 to 10.200 nats per token).")


def test_differences_lost_to_holms_correction_are_not_called_equal() -> None:
    shifts = {
        "gelu": [0, 0, 0],
        "relu": [0.01, -0.01, 0.0],
        "tanh": [0.01, -0.01, 0.0],
        "silu": [-0.018, -0.02, -0.03],
    }
    results = [
        make_result(arm, seed, 2.0 + shift)
        for arm, found in shifts.items()
        for seed, shift in enumerate(found)
    ]

    # s = 0.00643, t = 6.107 with two degrees of freedom: p = 1 - t / sqrt(t^2 + 2) = 0.0258, times 3.
    assert Comparison.of(results).verdicts[-1] == (
        "silu may be better than gelu, -0.0227 [-0.0386, -0.0067] (3 seeds, p 0.077 after Holm's "
        "correction); with 80 % power, these seeds detect 0.0364."
    )


def test_one_seed_has_no_interval_and_a_note() -> None:
    found = Comparison.of([make_result("gelu", loss=2.0), make_result("swiglu", loss=1.9)])

    assert all(arm.interval is None and arm.sd is None for arm in found.arms)
    (note,) = found.notes
    assert note.startswith(
        "One seed has no interval over seeds, because one run does not show how far"
    )
    assert found.verdicts == ["swiglu and gelu have one seed in common, so no difference is given."]
    assert found.arms[1].difference is None


def test_a_single_arm_reports_the_scatter_of_its_seeds() -> None:
    found = Comparison.of([make_result("gelu", seed, 2 + seed / 100) for seed in range(5)])

    assert found.verdicts == [
        "gelu: 2.0200 [2.0004, 2.0396] nats per token over 5 seeds, whose standard deviation is 0.0158."
    ]
    one = Comparison.of([make_result("gelu")])
    assert one.verdicts == ["gelu: one run with one seed: no conclusion about other seeds."]


# -- cost


def test_a_curve_is_joined_by_lines() -> None:
    result = make_result("moe", loss=1.0, curve=[4.0, 3.0, 2.0, 1.0])  # at steps 25, 50, 75, 100
    assert first_step_at(result, 2.5) == pytest.approx(62.5)
    assert first_step_at(result, 3.0) == 50
    assert first_step_at(result, 5.0) == 25, "known from the first validation on"
    assert first_step_at(result, 0.9) is None


def test_steps_flops_and_seconds_to_the_loss_of_the_baseline() -> None:
    dense = [
        make_result("dense", seed, loss, curve=[4, 3, 2.8, 0])
        for seed, loss in enumerate([2.0, 2.5, 2.5])
    ]
    moe = [
        make_result(
            "moe", seed, 1.0, curve=[4, 3, 2 - seed, 0], flops_per_token=2000, step_seconds=1
        )
        for seed in range(3)
    ]
    short = [make_result("tiny", seed, 2.0 + seed) for seed in range(3)]

    found = Comparison.of([*dense, *moe, *short], baseline="dense")

    base, reached, not_reached = (arm.reached for arm in found.arms)
    assert base is not None
    assert base.steps == 100
    # To the loss of its own seed. 3 at step 50; then 2 at 75; or 1 at 75, and so 2.5 at 56.25; or 0 at 75,
    # and so 2.5 a sixth of the way.
    steps = (75 + 56.25 + 50 + 25 / 6) / 3
    assert reached is not None
    assert reached.steps == pytest.approx(steps)
    assert reached.seconds == pytest.approx(steps)
    assert reached.flops == pytest.approx(steps * 10 * 3 * 2000)
    # Their standard deviation is 11.474; t(0.975, 2) is 4.3027.
    assert reached.interval is not None
    assert reached.interval.high - reached.interval.value == pytest.approx(
        4.3027 * 11.474 / 3**0.5, rel=1e-3
    )
    assert not_reached is not None
    assert (not_reached.num_reached, not_reached.steps) == (1, None)
    # In brackets over all that dense takes, with half the FLOPs and half the seconds of a step.
    table = next(table for table in tables(found) if table.title.startswith("To the final loss"))
    assert [row[1:4] for row in table.rows] == [
        ["100 (1.00)", "3.00 M (1.00)", "50 (1.00)"],
        ["62 ±29 (0.62)", "3.71 M (1.24)", "62 (1.24)"],
        ["not reached (1 of 3)"] * 3,
    ]


def test_a_seed_missing_from_the_baseline_is_compared_with_its_mean() -> None:
    dense = [make_result("dense", seed, 2.0 + seed) for seed in (0, 1)]
    moe = [make_result("moe", seed, 1.0, curve=[4, 3, 2, 0]) for seed in (1, 7)]

    found = Comparison.of([*dense, *moe])

    # Seed 1 to the 3 of its own seed at step 50; seed 7 to the mean, 2.5, between steps 50 and 75.
    reached = found.arm("moe").reached
    assert reached is not None
    assert (reached.num_reached, reached.steps) == (2, (50 + 62.5) / 2)
    assert found.notes == [
        "Not all arms have the same seeds: means are over all seeds of an arm, differences over the seeds "
        "that it shares with the baseline."
    ]


@pytest.mark.parametrize(
    ("arms", "frontier"),
    [
        (
            {"cheap": (3.0, 10), "good": (2.0, 20), "beaten": (2.5, 20), "best": (1.0, 99)},
            {"cheap", "good", "best"},
        ),
        (
            {"wide": (1.0, 1010), "narrow": (2.0, 1000), "equal": (1.0, 1020), "dear": (1.0, 1100)},
            {"wide", "equal"},
        ),
    ],
    ids=["beaten in both", "costs within the rounding of widths are one"],
)
def test_the_frontier(arms: dict[str, tuple[float, int]], frontier: set[str]) -> None:
    results = [
        make_result(name, seed, loss + seed / 100, flops_per_token=flops)
        for seed in range(2)
        for name, (loss, flops) in arms.items()
    ]
    found = Comparison.of(results)

    assert {arm.name for arm in found.arms if arm.on_frontier["FLOPs"]} == frontier
    best = min(arms.values())[0]
    cheapest = {name for name, (loss, _) in arms.items() if loss == best}
    assert {arm.name for arm in found.arms if arm.on_frontier["seconds"]} == cheapest


# -- what differs


def test_a_swap_of_the_block_is_one_line_and_other_options_are_a_line_each() -> None:
    base = make_result("a")
    options = {
        "model.ffn.router.type": "sigmoid_top_k",
        "optimizer.learning_rate": 0.01,
        "model.ffn.capacity.factor": 1.25,
        "logging.every_n_steps": 50,
        "checkpoints.every_n_steps": 50,
        "sample.num_tokens": 50,
    }
    assert option_differences(base.config, make_result("b", options=options).config) == [
        "model.ffn.router: top_k -> sigmoid_top_k",
        "model.ffn.capacity.factor: null -> 1.25",
        "optimizer.learning_rate: 0.003 -> 0.01",
    ]
    assert option_differences(base.config, base.config) == []
    assert option_differences(make_result("dense", options=SWIGLU).config, base.config) == [
        "model.ffn: swiglu -> moe, 8 experts (swiglu), top_k k=2"
    ]


# -- tuning


def test_tuning_runs_are_reported_separately() -> None:
    results = [result for result in gating() if result.arm != "relu"]
    for arm, rate, loss in (
        *(("gelu", 0.001, 2.4), ("gelu", 0.01, 2.3)),
        *(("swiglu", 0.001, 2.5), ("swiglu", 0.01, 1.5)),
    ):
        own: Any = {"main_arm": arm}
        own |= {key: {"optimizer.learning_rate": rate} for key in ("tuning", "options")}
        name = f"{arm},learning_rate={rate}"
        results += [make_result(name, seed, loss, **own) for seed in range(3)]

    found = Comparison.of(results, baseline="gelu")

    assert [arm.name for arm in found.arms] == ["gelu", "swiglu"]
    (table,) = found.tuning
    assert table.values == ["0.001", "0.003", "0.01"]
    # Over only seeds 0 to 2, which the runs of tuning have.
    assert table.losses["gelu"] == pytest.approx({"0.001": 2.4, "0.003": 2.01, "0.01": 2.3})
    assert table.verdicts == [
        "The lowest mean is at 0.003 for gelu; 0.01 for swiglu.",
        "There the loss of swiglu is 0.4093 [0.3838, 0.4348] lower than at 0.003.",
    ]


def test_a_whole_number_and_the_float_that_an_option_stores_are_one_tuned_value() -> None:
    key = "optimizer.weight_decay"
    results = [
        make_result(arm, 0, 2.0, options={key: own}) for arm, own in (("a", 0.0), ("b", 1.0))
    ]
    for arm, other in (("a", 1), ("b", 0)):
        tuned: Any = {"main_arm": arm, "tuning": {key: other}, "options": {key: float(other)}}
        results.append(make_result(f"{arm},weight_decay={other}", 0, 2.1, **tuned))

    (table,) = Comparison.of(results).tuning

    assert table.values == ["0.0", "1.0"]
    assert table.losses == {"a": {"0.0": 2.0, "1.0": 2.1}, "b": {"0.0": 2.1, "1.0": 2.0}}


def grid() -> list[RunResult]:
    """Three seeds; at each width the moe is a little better, and the wider models are much better."""
    return [
        make_result(
            f"{arm},d_model={d_model}",
            seed,
            4 - d_model / 64 - gain + 0.01 * seed + 0.001 * (seed == 1) * len(arm),
            options={"model.d_model": d_model, "model.ffn.type": arm},
        )
        for seed in range(3)
        for d_model in (32, 64)
        for arm, gain in (("dense", 0.0), ("moe", 0.05))
    ]


def test_the_baseline_of_a_grid_is_named_by_its_options_where_their_values_have_commas() -> None:
    results = [
        make_result(f"{arm},router={{type:top_k,k:{k}}}", seed, 2.0)
        for arm in ("dense", "moe")
        for k in (1, 2)
        for seed in (0, 1)
    ]
    assert Comparison.of(results, baseline="dense").baseline == "dense at the same router"


def test_arms_of_a_grid_are_compared_with_the_baseline_at_the_same_values() -> None:
    found = Comparison.of(grid(), baseline="dense")

    assert found.baseline == "dense at the same d_model"
    assert {arm.name: arm.base for arm in found.arms} == {
        "dense,d_model=32": None,
        "moe,d_model=32": "dense,d_model=32",
        "dense,d_model=64": None,
        "moe,d_model=64": "dense,d_model=64",
    }
    assert found.verdicts[0].startswith("moe,d_model=32 is better than dense,d_model=32 by 0.0507")
    assert found.verdicts[1].startswith("moe,d_model=64 is better than dense,d_model=64 by 0.0507")
    small = found.arm("moe,d_model=32")
    assert small.difference is not None
    alone = Comparison.of([r for r in grid() if "32" in r.arm], baseline="dense,d_model=32")
    one = alone.arms[1].difference
    assert one is not None
    assert small.difference.p_value == pytest.approx(2 * (one.p_value or 0)), "of two comparisons"
    assert small.differs == ["model.ffn: dense -> moe, 8 experts (swiglu), top_k k=2"]
    assert not found.arm("dense,d_model=64").differs
    assert small.reached is not None
    assert small.reached.num_reached == 3

    whole = Comparison.of(grid(), baseline="dense,d_model=32")
    assert whole.baseline == "dense,d_model=32"
    assert [arm.base for arm in whole.arms] == [None, *["dense,d_model=32"] * 3]
    lacking = [r for r in grid() if r.arm != "dense,d_model=64"]
    assert Comparison.of(lacking, baseline="dense").arm("moe,d_model=64").base is None


def test_an_arm_may_have_another_baseline_or_none() -> None:
    own = {"relu": "swiglu", "gelu": "absent"}
    found = Comparison.of(gating(), baseline="gelu", baselines=own)

    assert {arm.name: arm.base for arm in found.arms} == {
        "gelu": None,
        "swiglu": "gelu",
        "relu": "swiglu",
    }
    assert found.baseline == "gelu, or the arm's own baseline"
    losses = [found.arm(name).loss for name in ("relu", "swiglu")]
    difference = found.arm("relu").difference
    assert difference is not None
    assert difference.mean == pytest.approx(losses[0] - losses[1])
    assert found.verdicts[1].startswith("relu is worse than swiglu by 0.0969 ")
    assert [arm.base for arm in Comparison.of(gating(), baselines={"relu": None}).arms][2] is None


def test_arms_that_are_compared_with_none_are_described_alone() -> None:
    found = Comparison.of(gating(), baselines={"swiglu": None, "relu": None})

    assert [verdict.partition(" [")[0] for verdict in found.verdicts] == [
        "gelu: 2.0200",
        "swiglu: 1.9196",
        "relu: 2.0165",
    ]


def test_seconds_are_of_one_kind() -> None:
    results = [make_result(arm, 0, 2.0, step_seconds=10.0) for arm in ("a", "b")]
    timed = Comparison.of(results, step_seconds={"a": 0.1, "b": 2.0})
    partly = Comparison.of(results, step_seconds={"a": 0.1})

    assert [arm.step_seconds for arm in timed.arms] == [0.1, 2.0]
    assert (timed.arms[0].training_seconds, timed.arms[0].tokens_per_second) == (10, 100)
    assert [arm.step_seconds for arm in partly.arms] == [10.0, 10.0]
    assert partly.notes[-1] == (
        "Seconds are measured in the runs, because not all arms were timed separately (b)."
    )
    third = make_result("c", 0, 2.0)
    unknown = third.outcome.model_copy(update={"step_seconds": None})
    results.append(third.model_copy(update={"outcome": unknown}))
    known = Comparison.of(results, step_seconds={"a": 0.1, "b": 2.0})
    assert [arm.step_seconds for arm in known.arms] == [0.1, 2.0, None]


def test_one_shared_seed_is_compared_by_its_windows() -> None:
    losses = [2.0, 2.1, 2.2, 2.3]
    results = [
        make_result(arm, seed, 2.1, windows=[shift + loss for loss in losses])
        for arm, shift, seeds in (("a", 0.0, (0, 1)), ("b", 0.5, (1, 2)))
        for seed in seeds
    ]
    found = Comparison.of(results)
    assert found.verdicts[0].startswith(
        "b is worse than a by 0.5000 [0.5000, 0.5000] nats per token on"
    )
    assert "with one shared seed" in found.verdicts[0]
    assert any("over windows of the validation text" in note for note in found.notes)


@pytest.mark.parametrize(
    ("num_seeds", "said"),
    [
        (2, "0.0450 lower than at null, in the mean of 2 seeds, too few to judge."),
        (
            3,
            "0.0700 [-0.0542, 0.1942] lower than at null, not distinguishable from 0 with 3 seeds.",
        ),
    ],
)
def test_few_tuning_seeds_cannot_resolve_a_small_difference(num_seeds: int, said: str) -> None:
    results = [
        make_result(arm, seed, loss + seed * wobble, main_arm="a", tuning=tuning)
        for seed in range(num_seeds)
        for arm, loss, wobble, tuning in (
            ("a", 2.0, 0.05, {}),
            ("a,warmup_steps=10", 2.5, 0.0, {"optimizer.schedule.warmup_steps": 10}),
            ("a,warmup_steps=9", 1.98, 0.0, {"optimizer.schedule.warmup_steps": 9}),
        )
    ]
    (table,) = Comparison.of(results).tuning
    assert table.values == ["9", "10", "null"], "numbers first, by their size"
    assert table.verdicts == [
        "The lowest mean of every arm is at 9.",
        f"There the loss of a is {said}",
    ]


def test_blocks_are_tuned_too() -> None:
    results = [
        make_result(f"a{n}", 0, loss, main_arm="a", tuning=tuning, options=tuning)
        for n, (loss, tuning) in enumerate([(2.0, {}), (1.9, {"model.ffn": {"type": "swiglu"}})])
    ]
    results[0] = results[0].model_copy(update={"arm": "a"})
    (table,) = Comparison.of(results).tuning
    assert [*table.losses["a"].values()] == [1.9, 2.0]
    assert '{"type": "swiglu"}' in table.values
    assert table.verdicts[-1].endswith("in one seed.")


def test_a_block_of_the_compared_runs_has_the_name_that_the_tuning_gives_it() -> None:
    """A tuning run that equals a compared run is not trained, so only its other seeds name the block."""
    short = {k: {"type": "top_k", "k": k} for k in (1, 2)}
    results = [
        make_result(
            f"a,k={k}" if is_tuned else "a",
            seed,
            2.0 - k / 10,
            main_arm="a",
            tuning={"model.ffn.router": short[k]} if is_tuned else {},
            options={"model.ffn.router": short[k] | {"scale": 1.0}},
        )
        for k, seed, is_tuned in [(2, 0, False), (2, 1, True), (1, 0, True), (1, 1, True)]
    ]

    (table,) = Comparison.of(results).tuning

    assert table.own == {"a": '{"k": 2, "type": "top_k"}'}
    assert table.losses == {
        "a": {'{"k": 2, "type": "top_k"}': 1.8, '{"k": 1, "type": "top_k"}': 1.9}
    }


@pytest.mark.parametrize(
    ("values", "best", "is_at_an_end"),
    [
        ("0.01 0.02 0.04", "0.01", True),
        ("0.01 0.02 0.04", "0.02", False),
        ("0.005 0.01 0.02", "0.01", False),
        ("0.02 0.01 0.005", "0.02", True),
        ("dense moe swiglu", "dense", False),
        ("1,0.1 2,0.1 4,0.1", "2,0.1", False),
        ("1,0 1,1 1,2 2,0 2,1 2,2 4,0 4,1 4,2", "2,2", True),
        ("1,0 1,1 1,2 2,0 2,1 2,2 4,0 4,1 4,2", "2,1", False),
        ("cosine,0.1 cosine,0.2 constant,0.1 constant,0.2", "cosine,0.2", True),
        ("null 0.5 1.0", "1.0", True),
        ("null 0.5 1.0", "null", False),
    ],
)
def test_a_best_value_is_at_the_end_of_the_numbers_that_its_arm_tried(
    values: str, best: str, is_at_an_end: bool
) -> None:
    losses = {v.replace(",", ", "): {0: 1.0 if v == best else 2.0} for v in values.split()}
    tuned = Tuning("rate", ["0.001", *losses, "1.0"], {"a": losses}, {"a": best})
    assert tuned.at_an_end == ["a"] * is_at_an_end


# -- problems


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"fingerprints": SHA | {"validation": "w" * 64}},
            "the runs use different validation windows, so their losses cannot be compared: "
            "the sha256 of the "
            "validation is vvvvvvvvvvvv in a-seed0 and 1 more, wwwwwwwwwwww in b-seed0",
        ),
        (
            {"fingerprints": SHA | {"corpus": "d" * 64}},
            "the runs were trained on different text (data.corpus), so their losses cannot be compared: "
            "the sha256 of the "
            "corpus is cccccccccccc in a-seed0 and 1 more, dddddddddddd in b-seed0",
        ),
        (
            {
                "options": {"data.tokenizer": {"type": "bpe", "vocab_size": 512}},
                "fingerprints": SHA | {"tokenizer": "u" * 64},
            },
            "the runs have different tokenizers (data.tokenizer), so their losses cannot be compared: "
            "data.tokenizer.type is 'bytes' in a-seed0 and 1 more, 'bpe' in b-seed0",
        ),
        (
            {
                "options": {
                    "data.corpus": {"type": "text", "paths": ["the same text"]},
                    "data.validation_tokens": 64,
                },
            },
            "the runs use different validation windows, so their losses cannot be compared: "
            "data.validation_tokens is 131072 in a-seed0 and 1 more, 64 in b-seed0",
        ),
    ],
    ids=["windows", "corpus", "tokenizer", "path of the same text"],
)
def test_runs_of_other_data_are_rejected_by_the_key(changes: dict[str, Any], message: str) -> None:
    same = [make_result("a", 0), make_result("a", 1)]
    assert unsupported([*same, make_result("b", 0, **changes)]) == message
    tuned = make_result("b", 0, main_arm="a", tuning={"x": 1}, **changes)
    assert "so their losses cannot be compared" in unsupported([*same, tuned])


def unsupported(results: list[RunResult]) -> str:
    with pytest.raises(ConfigError) as raised:
        Comparison.of(results)
    return str(raised.value)


def test_runs_of_one_arm_have_the_same_options() -> None:
    other = make_result("a", 2, options={"optimizer.learning_rate": 0.01})
    assert unsupported([make_result("a", 0), make_result("a", 1), other]) == (
        "the runs of arm 'a' have different options: optimizer.learning_rate is 0.003 in a-seed0, 0.01 in "
        "a-seed2; name the arms differently"
    )


def test_runs_of_one_arm_may_begin_from_the_runs_of_their_own_seeds() -> None:
    starts = {0: "models/a-seed0", 1: "models/a-seed1", 12: "models/a-seed1"}
    runs = [make_result("a", n, options={"init_from": start}) for n, start in starts.items()]

    require_same_options("a", runs[:2])
    require_same_options("a", runs[1:])
    assert identity(runs[0]) == identity(runs[1]) == identity(runs[2])
    assert identity(runs[0]) != identity(make_result("a"))
    assert option_differences(make_result("b").config, runs[0].config) == [
        "init_from: null -> models/a-seed{seed}"
    ]
    assert unsupported(runs) == (
        "the runs of arm 'a' have different options: init_from is 'models/a-seed{seed}' in "
        "a-seed0, 'models/a-seed1' in a-seed12; name the arms differently"
    )


def test_arms_that_predict_other_tokens_are_listed_but_not_compared() -> None:
    masked = [make_result("bert", seed, 0.1, options={"model.causal": False}) for seed in range(2)]

    found = Comparison.of([*gating(2), *masked], baseline="gelu")

    arm = found.arm("bert")
    assert (arm.difference, arm.reached) == (None, None)
    assert found.verdicts[-1] == (
        "bert predicts masked tokens (0.15 of them) and gelu next tokens, so their losses are not "
        "comparable."
    )
    assert found.arm("swiglu").on_frontier["FLOPs"], "which has the lowest loss of its kind"


def test_by_default_all_are_compared_with_an_arm_of_the_task_that_most_have() -> None:
    masked = [make_result("a", seed, 0.1, options={"model.causal": False}) for seed in range(2)]
    found = Comparison.of([*masked, *gating(2)])
    assert found.baseline == "gelu"
    assert found.arm("relu").difference is not None


def test_arms_without_a_common_seed_have_no_steps_to_a_loss() -> None:
    found = Comparison.of([make_result("a", 0, 2.0), make_result("b", 1, 1.0)])
    reached = next(table for table in tables(found) if table.title == "To the final loss of a")
    assert found.arm("b").reached is None
    assert reached.rows[1][1:4] == ["-", "-", "-"]


@pytest.mark.parametrize(
    ("option", "usual"),
    [("validation_tokens", 131072), ("validation_percent", 5), ("seq_len", 256)],
)
def test_unknown_windows_are_compared_by_their_options(option: str, usual: int) -> None:
    old = {"corpus": SHA["corpus"], "tokenizer": SHA["tokenizer"]}

    Comparison.of([make_result("a"), make_result("b", fingerprints=old)])
    options = {"data.batch_size": 3, f"data.{option}": 9}  # of which the first moves no window
    other = make_result("b", fingerprints=old, options=options)
    assert f"data.{option} is {usual} in a-seed0, 9 in b-seed0" in unsupported(
        [make_result("a"), other]
    )


def test_notes_report_different_token_counts_and_machines() -> None:
    results = [
        make_result("short", steps=50, machine={"threads": 1, "precision": "32-true"}),
        make_result("long", steps=100, machine={"threads": 2, "precision": "bf16-mixed"}),
    ]

    assert {
        "The arms are trained on different numbers of tokens: short on 500, long on 1,000; final losses are "
        "compared as they are.",
        "The runs differ in threads (1, 2): seconds are not comparable, and losses differ slightly.",
        "The runs differ in precision (32-true, bf16-mixed): losses and seconds may depend on it.",
    } <= set(Comparison.of(results).notes)


def test_seconds_that_were_timed_apart_do_not_depend_on_the_machines_of_the_runs() -> None:
    results = [make_result(arm, 0, machine={"gpu": arm}) for arm in ("a", "b")]
    timed = Comparison.of(results, step_seconds={"a": 1.0, "b": 2.0})

    assert (
        "The runs differ in gpu (a, b): seconds are not comparable." in Comparison.of(results).notes
    )
    assert "The runs differ in gpu (a, b): seconds of the runs are not comparable." in timed.notes


def test_code_that_a_result_names_is_not_run(tmp_path: Path) -> None:
    code = tmp_path / "evil.py"
    code.write_text(f"open({str(tmp_path / 'was_run')!r}, 'w').close()\nclass Block: ...\n")
    options = {"model": {"ffn": {"type": f"{code}:Block"}}}

    assert block_of(options) == ""
    assert option_differences({"model": {"ffn": {"type": "dense"}}}, options) == [
        f"model.ffn: dense -> {code}:Block"
    ]
    assert not (tmp_path / "was_run").exists()


def test_options_that_an_older_version_did_not_have_are_no_difference() -> None:
    ffn = {"type": "moe", "num_experts": 8, "router": {"type": "top_k", "k": 2}}
    older = TrainConfig.model_validate({"model": {"ffn": ffn}}).to_dict()
    newer = TrainConfig.model_validate(
        {"model": {"ffn": ffn | {"zero_computation": {"num_zero": 1}}}}
    ).to_dict()
    for option in ("combine", "zero_computation"):
        del older["model"]["ffn"][option]
    older["model"]["ffn"]["latent"] = None  # an option of that version which is gone
    del older["parallel"]

    assert option_differences(older, newer) == ["model.ffn.zero_computation.num_zero: 0 -> 1"]
    now = TrainConfig.model_validate(older).to_dict()
    runs = [make_result("moe").model_copy(update={"config": config}) for config in (older, now)]
    require_same_options("moe", runs)
    assert identity(runs[0]) == identity(runs[1])
