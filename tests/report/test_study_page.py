"""The page of a study, from made-up results: sections, figures, sentences; and the leaderboard of two."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from unittest.mock import patch

import pytest

from moe_ffn.cli.study_page import main
from moe_ffn.config.errors import ConfigError
from moe_ffn.config.yaml_files import parse_yaml, validate
from moe_ffn.report.studies.arm_figures import SizedLine, over_sizes
from moe_ffn.report.studies.fits import axis_of, without_seeds
from moe_ffn.report.studies.study_page import StudyPage, study_page, with_row
from moe_ffn.runs.budget import Budget, Cost
from moe_ffn.studies.comparison import Comparison
from moe_ffn.studies.config import StudyConfig
from moe_ffn.studies.gather import read_timing
from moe_ffn.studies.result import RunResult, add_results
from tests.helpers.synthetic_run import make_result

GATING = """
name: gating
question: Do gates beat activations?
published: ReLU 1.997, SwiGLU 1.944
would_change_our_mind: A larger model.
seeds: [0, 1, 2]
baseline: gelu
arms: {gelu: {model.ffn: {type: dense}}, swiglu: {model.ffn: swiglu}}
"""


def study(text: str) -> StudyConfig:
    return validate(StudyConfig, parse_yaml(text, where="study"))


def gating(**losses: float) -> list[RunResult]:
    """Three seeds of each arm, which move both alike."""
    return [
        make_result(
            arm,
            seed,
            loss + 0.1 * seed + 0.001 * (seed == 1),
            options={"model.ffn.type": "swiglu" if arm == "swiglu" else "dense"},
            curve=[4.0, 3.0, 2.5, 2.2, 0],
            wall_seconds=1800.0,
            machine={"processor": "a fast one", "torch": "2.13.0", "git_revision": "abc"},
        )
        for arm, loss in losses.items()
        for seed in range(3)
    ]


def sections(page: StudyPage) -> dict[str, str]:
    found = re.split(r"^## (.+)$", page.markdown, flags=re.MULTILINE)
    return {"": found[0], **dict(zip(found[1::2], found[2::2], strict=True))}


def lines_of(figure: Any) -> list[str]:
    """Return the names in the legend of a figure."""
    return [trace.meta["name"] for trace in figure.data if trace.showlegend is not False]


def page_of(text: str, results: Sequence[RunResult]) -> dict[str, str]:
    """Return the sections of a page."""
    return sections(study_page(study(text), results))


def test_a_page_of_arms_that_are_compared_with_none_has_a_row() -> None:
    text = f"{GATING}baselines: {{swiglu: null}}\n"
    assert "| gelu: 2.1003 [" in study_page(study(text), gating(gelu=2.0, swiglu=1.9)).summary


DATA = "read the same data in the same order"
WEIGHTS = "begin with the same weights outside their feed-forward blocks"


@pytest.mark.parametrize(
    ("option", "value", "shared"),
    [
        ("model.ffn.type", "moe", f"{DATA} and {WEIGHTS}"),
        ("model.d_model", 96, DATA),
        ("data.batch_size", 3, WEIGHTS),
    ],
)
def test_the_page_lists_what_runs_of_a_seed_share(option: str, value: Any, shared: str) -> None:
    results = [make_result("gelu", 0, 2.0), make_result("swiglu", 0, options={option: value})]
    design = page_of(GATING, results)["Design"]
    assert design.rstrip().endswith(f"times as many. Within a seed all arms {shared}.")


@pytest.fixture(scope="module")
def results() -> list[RunResult]:
    return gating(gelu=2.0, swiglu=1.9)


@pytest.fixture(scope="module")
def page(results: list[RunResult]) -> StudyPage:
    return study_page(study(GATING), results)


def test_the_page_has_question_design_and_result(page: StudyPage) -> None:
    found = sections(page)
    titles = ["What would change our mind", "What this does not show", "Design", "How it was made"]
    assert list(found) == ["", "Result", *titles]
    assert found[""].startswith("# Do gates beat activations?\n\nPublished: ReLU 1.997")
    assert "| gelu | - | dense | 250 |" in found["Design"]
    assert "| swiglu | gelu | swiglu | 250 |" in found["Design"]
    assert "- swiglu is better than gelu by 0.1000 [0.1000, 0.1000]" in found["Result"]
    assert "| swiglu | 3 | 2.0003 " in found["Result"]
    assert found["What would change our mind"].strip() == "A larger model."
    assert "Models of 500 parameters, trained on 1.00 k tokens" in found["What this does not show"]
    assert "The intervals cover only seeds, not other corpora" in found["What this does not show"]
    for said in (
        "moe-ffn sweep --config configs/studies/gating.yaml",
        "| processor | a fast one |",
        "| revision | abc |",
        "| training | 3.0 hours in all |",
    ):
        assert said in found["How it was made"]
    assert set(page.figures) == {"differences", "cost", "curves"}
    assert "\n\n\n" not in page.markdown
    verdict = re.search(r"- (swiglu is better .*)", page.markdown)
    assert verdict is not None
    assert page.summary == f"| [Do gates beat activations?](gating.md) | {verdict[1]} |"


def test_the_design_shows_what_each_arm_changes_and_notes_follow_the_limits() -> None:
    rate, dense = "optimizer.learning_rate", {"model.ffn.type": "dense", "model.d_model": 64}
    results = [
        make_result("few", 0, options={"model.ffn.num_experts": 4, rate: 0.1}),
        make_result("many", 0, options={"model.ffn.num_experts": 16, rate: 0.1}),
        make_result("dense", 0, options=dense | {rate: 0.1}, steps=200),
        make_result("faster", 0, options=dense | {rate: 0.2}),
    ]
    arms = "arms: {few: , many: , dense: , faster: }\n"
    found = page_of(f"{arms}baseline: few\nbaselines: {{dense: null, faster: dense}}", results)

    block = "moe, 4 experts (swiglu), top_k k=2"
    rows = [line.split(" | ")[:3] for line in found["Design"].splitlines() if line[:2] == "| "]
    assert rows[2:] == [
        ["| few", "-", f"{block}<br>`num_experts 4`<br>`model.d_model 128`"],
        ["| many", "few", "`num_experts 16`"],
        ["| dense", "-", f"dense<br>`model.d_model 64`<br>`{rate} 0.1`"],
        ["| faster", "dense", f"`{rate} 0.2`"],
    ]
    limits = found["What this does not show"].strip().splitlines()
    assert limits[2].startswith("- The arms are trained on different numbers of tokens: few on ")
    assert limits[3].startswith("- One seed has no interval over seeds")
    assert "numbers of tokens" not in found["Result"]


def test_blocks_stand_side_by_side_at_each_size() -> None:
    losses = {"s_gelu": 1.9, "s_moe": 2.0, "l_gelu": 1.9, "l_moe": 1.7}
    results = [
        run.model_copy(
            update={"budget": Budget(Cost(active, active, active), Cost(1, 1, 1), tokens)}
        )
        for size, active, tokens in (("s", 1_000_000, 20_000_000), ("l", 3_000_000, 60_000_000))
        for run in gating(**{arm: loss for arm, loss in losses.items() if arm.startswith(size)})
    ]
    results = [run for run in results if (run.arm, run.seed) not in {("s_moe", 0), ("l_moe", 2)}]
    text = """
    arms: {s_gelu: {}, s_moe: {model.ffn: moe}, m_moe: {}, l_gelu: {}, l_moe: {}}
    sizes: [s, m, l]
    baseline: s_gelu
    baselines: {l_gelu: null, l_moe: l_gelu}
    """
    page = study_page(study(text), results)
    result = sections(page)["Result"]

    assert (
        "| block | s: 1.00 M active, 20.00 M tokens | l: 3.00 M active, 60.00 M tokens |" in result
    )
    assert "| gelu | baseline: 2.0003 | baseline: 2.0003 |" in result
    assert "| moe | +0.1000 (2 seeds) | -0.2000 (2 seeds) |" in result
    assert "| moe | not reached | 0.91, 0.91 |" in result
    assert "- s_moe minus" not in result
    assert lines_of(page.figures["sizes"]) == ["gelu", "moe"]
    drawn = page.figures["sizes"].data[2]
    assert (drawn.name, list(drawn.x)) == ("moe", [1e6, 3e6])
    assert list(drawn.y) == pytest.approx([0.1, -0.2])
    assert {line.split()[0] for line in lines_of(page.figures["curves"])} == {"l_gelu", "l_moe"}


def test_a_page_without_intervals_does_not_say_what_they_cover() -> None:
    results = [run for run in gating(gelu=2.0, swiglu=1.9) if run.seed < 2]
    limits = page_of(GATING, results)["What this does not show"]

    assert "cover" not in limits
    assert (
        "No loss has an interval; other corpora and other learning rates were not tried." in limits
    )


def test_a_line_over_sizes_has_gaps_and_given_intervals() -> None:
    line = SizedLine("a", {1.0: [1.0], 2.0: [], 4.0: [3.0]}, margins={1.0: 0.5})
    figure: Any = over_sizes([line], "size", "title")
    drawn = figure.data[0]
    assert list(drawn.y) == [1, None, 3]
    assert list(drawn.error_y.array) == [0.5, 0, 0]
    # Two seeds may share an error with other arms, and have an interval too.
    assert figure.layout.meta["note"] == (
        "Small points are seeds; bars are 95% intervals over windows of the text with one seed, "
        "otherwise over seeds."
    )


def test_the_answer_comes_first_and_results_of_other_arms_are_ignored(
    results: list[RunResult],
) -> None:
    with_another = [*results, make_result("relu", 0)]
    answer = 'answer: "Yes, by 0.1 nats. In short runs.\\n\\nWith 2 seeds."'
    page = study_page(study(GATING + answer), with_another)
    assert "\n\n**Yes, by 0.1 nats. In short runs.**\n\nWith 2 seeds.\n\n" in page.markdown
    assert page.summary.endswith("| Yes, by 0.1 nats. |")
    assert "relu" not in page.markdown
    with pytest.raises(ConfigError, match="gating: no result belongs to one of its arms, gelu"):
        study_page(study(GATING), with_another[-1:])
    one = gating(swiglu=1.9)[0].model_copy(update={"window_losses": [1.8, 2.0]})
    begun = page_of(GATING, [one])
    assert "swiglu: one run with one seed" in begun["Result"]
    assert "cover only windows of this text, not seeds," in begun["What this does not show"]


def test_one_arm_gives_the_differences_that_seeds_can_detect() -> None:
    noise = study("name: noise\nquestion: How far apart?\narms: {swiglu: }")
    page = study_page(noise, [make_result("swiglu", seed, 2 + 0.01 * seed) for seed in range(5)])
    # The standard deviation of 0 to 4 is 1.5811; of two unpaired arms sqrt(2) times as much.
    assert (
        "losses of 5 runs that differ only in their seed have a standard deviation of 0.0158"
        in page.markdown
    )
    rows = dict(re.findall(r"^\| (\d+) \| ([\d.]+) \|$", page.markdown, flags=re.MULTILINE))
    # t(.975) and t(.8) of 9 degrees of freedom are 2.262 and 0.883.
    assert float(rows["10"]) == pytest.approx((2.262 + 0.883) * 0.02236 / math.sqrt(10), abs=1e-4)


def test_a_grid_of_numbers_is_an_axis() -> None:
    widths = study("""
        name: width
        arms: {dense: , moe: }
        grid: {model.d_model: [16, 32]}
        baseline: dense,d_model=16
    """)
    results = [
        make_result(f"{arm},d_model={d}", seed, 2 - d / 100, options={"model.d_model": d})
        for arm in ("dense", "moe")
        for d in (16, 32)
        for seed in range(2)
    ]
    page = study_page(widths, results)
    axis = page.figures["axis"].layout.xaxis
    assert (axis.title.text, axis.ticktext) == ("model.d_model", ("16", "32"))
    assert lines_of(page.figures["axis"]) == ["dense", "moe"]


def test_yes_and_no_are_no_numbers_of_an_axis() -> None:
    values = {"model.d_model": [16, 32], "model.tie_embeddings": [True, False]}
    assert axis_of(StudyConfig(grid=values)) == "model.d_model"


def test_arms_that_differ_along_the_axis_are_one_line() -> None:
    capacity = study("""
        name: capacity
        arms: {dropless: , c1: , c2: }
        axis: model.ffn.capacity.factor
    """)
    results = [make_result("dropless", 0)] + [
        make_result(arm, 0, options={"model.ffn.capacity.factor": factor})
        for arm, factor in (("c1", 1.0), ("c2", 2.0))
    ]
    page = study_page(capacity, results)
    assert lines_of(page.figures["axis"]) == ["all arms"], "though one arm has no place on it"


def test_an_axis_on_which_no_run_has_a_place_is_an_error() -> None:
    text = f"{GATING}axis: d_model\n"
    with pytest.raises(ConfigError, match=r"^axis \(d_model\): no run has such a positive number"):
        study_page(study(text), gating(gelu=2.0, swiglu=1.9))


def test_points_over_the_expansion_have_their_number_of_experts_and_round_ticks() -> None:
    experts = study("""
        name: experts
        arms: {e1: , e8: }
        axis: expansion
    """)
    results: list[RunResult] = []
    for number, params in ((1, 1000), (8, 3911)):
        run = make_result(f"e{number}", 0, options={"model.ffn.num_experts": number})
        cost = Cost(params, 1000, 2000)
        results.append(run.model_copy(update={"budget": Budget(cost, cost, 1000)}))
    figure = study_page(experts, results).figures["axis"]
    assert figure.data[0].text == ("1 expert", "8 experts")
    assert figure.layout.xaxis.ticktext == ("1", "2", "4")


def test_sizes_within_a_power_of_two_are_the_ticks() -> None:
    lines = [SizedLine("model", {182_144: [4.3], 198_272: [4.2], 230_528: [4.1]})]
    layout: Any = over_sizes(lines, "forward FLOPs per token", "").layout
    ticks = layout.xaxis
    assert ticks.tickvals == (182_144, 198_272, 230_528)
    assert ticks.ticktext == ("182.14 k", "198.27 k", "230.53 k")


def test_tuning_shows_the_optimum_and_warns_at_the_edge_of_the_grid(
    results: list[RunResult],
) -> None:
    text = GATING + "tuning: {grid: {optimizer.learning_rate: [0.001, 0.002, 0.004]}, seeds: [0]}"
    rate = "optimizer.learning_rate"
    results = [
        run.model_copy(update={"config": run.config | {"optimizer": {"learning_rate": 0.002}}})
        for run in results
    ]
    for arm, losses in (("gelu", (2.1, 2.2)), ("swiglu", (1.8, 2.0))):
        for value, loss in zip((0.001, 0.004), losses, strict=True):
            own: dict[str, Any] = {"options": {rate: value}, "tuning": {rate: value}}
            name = f"{arm},learning_rate={value}"
            results.append(make_result(name, 0, loss, main_arm=arm, **own))
    page = page_of(text, results)
    assert "The best value is the lowest or highest that was tried: swiglu." in page["Tuning"]
    assert "| gelu | 2.1000 | 2.0000 | 2.2000 |" in page["Tuning"]
    assert "tuning-learning_rate" in page["How it was made"]
    assert "learning_rate=0.001" not in page["Result"], "not mixed with the others"


def sized(arm: str, seed: int, loss: float, *, active: int, tokens: int) -> RunResult:
    """A run whose active parameters are half feed-forward, with two FLOPs each."""
    run = make_result(arm, seed, loss, options={"model.d_model": active})
    cost, ffn = Cost(active, active, 2 * active), Cost(active // 2, active // 2, active)
    return run.model_copy(update={"budget": Budget(cost, ffn, tokens)})


def test_isoflop_gives_a_best_size_for_each_budget_or_a_reason() -> None:
    results: list[RunResult] = []
    for arm, best in (("dense", 1.0), ("sparse", 100.0)):
        for budget in (1, 4):
            for place, factor in enumerate((0.25, 0.5, 1, 2, 4)):
                active = round(10_000 * factor * budget**0.5)
                tokens = 6_000_000 * budget // active
                loss = 3 - 0.2 * budget + 0.05 * math.log(factor / best) ** 2
                for seed in (0, 1):
                    noisy, name = loss + 0.0005 * seed, f"{arm},{budget},{place}"
                    results.append(sized(name, seed, noisy, active=active, tokens=tokens))
    names = ", ".join(f'"{run.arm}": ' for run in results[::2])
    page = study_page(study(f"name: isoflop\narms: {{{names}}}\nfit: isoflop"), results)
    found = sections(page)["Best size at each budget"]
    assert re.search(r"\| dense \| 3.6e\+07 \| 10\.\d\d k \[.+ k, .+ k\] \|  \|", found)
    assert "| sparse | 3.6e+07 | - | the loss is lowest at the largest size" in found
    assert re.search(r"dense: the best size grows as FLOPs to the power 0\.50 \[", found)
    assert "a line through two minima cannot show" in found
    assert "sparse: The fit is valid for budgets from" in found
    assert lines_of(page.figures["isoflop-dense"]) == ["3.6e+07 FLOPs", "1.4e+08 FLOPs"]


def grain(loss_of: Callable[[int, int], float], seeds: int) -> str:
    """Return the fits of losses by granularity and seed."""
    values = (1, 2, 4, 8, 16)
    results = [
        make_result(f"g{g}", seed, loss_of(g, seed), options={"model.ffn.router.k": g})
        for g in values
        for seed in range(seeds)
    ]
    arms = ", ".join(f"g{g}: " for g in values)
    text = f"name: grain\narms: {{{arms}}}\naxis: model.ffn.router.k\nfit: granularity"
    # Thousands of fits to resampled losses, which take a while.
    with patch("moe_ffn.report.studies.fits.fit", side_effect=ConfigError("not here")):
        return page_of(text, results)["Best granularity"]


@pytest.mark.parametrize(
    ("best", "says"),
    [(4, "| all arms | 4.0 [4.0, 4.0] |"), (99, "the loss is lowest at the largest size")],
)
def test_granularity_has_a_best_value_or_none(best: float, says: str) -> None:
    def loss(g: int, seed: int) -> float:
        return 2 + 0.05 * math.log(g / best) ** 2 + 1e-4 * seed

    found = grain(loss, seeds=2)
    assert says in found
    assert "`L = E + A / G^alpha`" in found


def test_an_effect_of_the_seed_on_all_arms_widens_no_interval_of_a_fit() -> None:
    def best(shift: float) -> str:
        def loss(g: int, seed: int) -> float:
            return 2 + 0.05 * math.log(g / 3) ** 2 + 0.001 * ((seed * g) % 3) + shift * seed

        row = re.search(r"\| all arms \| (.+?) \|", grain(loss, seeds=3))
        assert row is not None
        return row[1]

    found = best(0)
    assert found == best(0.3)
    assert "[" in found


def test_a_fit_with_too_few_runs_is_explained_on_the_page(results: list[RunResult]) -> None:
    found = page_of(GATING + "fit: [clark, granularity, leverage, isoflop]", results)
    rejected = "no fit; 6 runs at 1 sizes cannot determine 4 parameters"
    assert rejected in found["Scaling with experts"]
    assert found["Best granularity"].strip().startswith("No fit: set `axis` of the study")
    rejected = "| gelu | 3e+06 | - | 3 runs at 1 sizes cannot determine 3 parameters;"
    assert rejected in found["Best size at each budget"]


def test_flops_of_the_model_that_runs_began_with_are_counted_and_arms_cross_on_the_page() -> None:
    upcycling = study("""
        name: upcycling
        arms: {new: , up: {init_from: models/x}}
        grid: {trainer.max_steps: [50, 100, 200]}
        baseline: new
        initial_flops: 1.5e+6
    """)
    begun = {"new": {}, "up": {"init_from": "models/x"}}
    losses = {"new": (4.0, 3.0, 2.0), "up": (3.5, 2.0, 1.0)}
    results = [
        make_result(
            f"{arm},max_steps={steps}",
            seed,
            loss + (0.1 * seed if arm == "up" else 0),
            steps=steps,
            options=begun[arm] | {"trainer.max_steps": steps},
        )
        for arm in losses
        for steps, loss in zip((50, 100, 200), losses[arm], strict=True)
        for seed in range(3)
    ]
    page = study_page(upcycling, results)
    found = sections(page)["Loss by the FLOPs of all training"]
    # new is measured at 1.5, 3 and 6 M, up at 3, 4.5 and 7.5 M. Gaps of seed 0: 0.5 at 3 M,
    # 2 - (3 - log2 1.5) at 4.5 M, and 2 - log(6 / 4.5) / log(7.5 / 4.5) - 2 at 6 M; of each seed after it
    # each is 0.1 more. They cross at 3 M * 1.5 ** (0.5 / 0.915), (0.6 / 0.915) and (0.7 / 0.915); t(.975) of
    # two degrees of freedom is 4.303.
    assert "| up | 4.50 M | 2.1000 |" in found
    assert (
        "| up | new | 3.91 M | 3.74 M to 4.09 M (3 of 3 seeds) | +0.6000 [+0.3516, +0.8484] at 3.00 M | "
        "-0.4632 [-0.7116, -0.2148] at 6.00 M |"
    ) in found
    assert "all-flops" in page.figures
    assert "begin with the same weights" not in page.markdown
    begins = "First run the commands that make the model of `init_from`"
    assert begins in page.markdown
    own = [{"init_from": f"runs/upcycling/new-seed{result.seed}"} for result in results]
    ours = [
        r.model_copy(update={"config": r.config | o}) for r, o in zip(results, own, strict=True)
    ]
    assert begins not in study_page(upcycling, ours).markdown


def test_a_row_replaces_that_of_the_same_study_and_no_other() -> None:
    text = ""
    for row in ("| [a?](a.md) | 1 |", "| [b?](b.md) | 2 |", "| [A?](a.md) | 3 |"):
        text = with_row(text, row)
    assert text.endswith("\n| [A?](a.md) | 3 |\n| [b?](b.md) | 2 |\n")
    introduced = text.replace("# Studies\n", "# Studies\n\nOurs.\n")
    assert with_row(introduced, "| [A?](a.md) | 3 |") == introduced
    windows = introduced.replace("\n", "\r\n")
    assert with_row(windows, "| [A?](a.md) | 3 |") == introduced


def test_all_figures_are_drawn_and_the_page_shows_those_that_the_study_lists(
    results: list[RunResult], tmp_path: Path
) -> None:
    page = study_page(study(GATING + "figures: [curves.svg]"), results)
    figures = tmp_path / "gating" / "figures.html"
    assert page.write(tmp_path) == [tmp_path / "gating.md", figures, tmp_path / "README.md"]
    drawn = re.findall(r"<h2>(.+?)</h2>", figures.read_text(encoding="utf-8"))
    assert drawn == ["Difference from gelu", "Final loss against cost", "Validation loss"]
    assert re.findall(r"!\[.+\]\((.+)\)", page.markdown) == ["gating/curves.svg"]
    assert "with all figures: differences, cost, curves.\n" in page.markdown
    said = r"^figures: axis.svg is not drawn; there are differences.svg, "
    with pytest.raises(ConfigError, match=said):
        study_page(study(GATING + "figures: [axis.svg]"), results)


def test_removing_the_effect_of_the_seed_keeps_the_scatter() -> None:
    random_ = random.Random(0)
    rows = [[random_.gauss(0, 1) + 5 * seed for seed in range(150)] for _ in range(3)]
    run, results = make_result("a"), list[RunResult]()
    for arm, losses in zip("abc", rows, strict=True):
        for seed, loss in enumerate(losses):
            outcome = run.outcome.model_copy(update={"validation_loss": 100 + loss})
            own = {"arm": arm, "main_arm": arm, "seed": seed, "outcome": outcome}
            results.append(run.model_copy(update=own))
    arms = Comparison.of(results).arms
    found = without_seeds(arms)
    for arm, before in zip(found, arms, strict=True):
        losses = [run.outcome.validation_loss or 0 for run in arm.results]
        assert fmean(losses) == pytest.approx(before.loss)
        assert stdev(losses) == pytest.approx(1, abs=0.15)


def dense(arm: str, seed: int, loss: float) -> RunResult:
    """Return a run of an arm whose tokens use every parameter."""
    run = make_result(arm, seed, loss, curve=[3.0, loss], options={"model.ffn": "swiglu"})
    model = replace(run.budget.model, active_params=run.budget.model.params)
    return run.model_copy(update={"budget": replace(run.budget, model=model)})


def board(studies: Path, results: dict[str, list[RunResult]]) -> str:
    """Return the page that the command makes of studies."""
    for name, runs in results.items():
        (studies / name).mkdir(parents=True, exist_ok=True)
        add_results(studies / name, runs)
    page = studies.parent / "board.md"
    assert main(["--output", str(studies), "--leaderboard", str(page)]) == 0
    return page.read_text(encoding="utf-8")


def rows(page: str) -> dict[str, list[str]]:
    """Return arm -> cells of its row in the tables of budgets."""
    tables = page.partition("\n## ")[2]
    found = [line.strip("| ").split(" | ") for line in tables.splitlines() if line[:3] == "| ["]
    return {cells[0]: cells[1:] for cells in found}


MORE_EXPERTS = {"model.ffn": {"type": "moe", "num_experts": 16}}


def test_only_arms_of_the_same_budget_share_a_table(tmp_path: Path) -> None:
    longer = {"trainer.max_steps": 103}
    tuned = {"optimizer.learning_rate": 0.5}
    page = board(
        tmp_path / "studies",
        {
            "a": [
                *(dense("swiglu", seed, 2 + seed / 100) for seed in range(3)),
                *(make_result("moe", s, 1.5, curve=[2.5, 1.5]) for s in range(3)),
                make_result("more", loss=1.6, options=MORE_EXPERTS),
            ],
            "b": [
                dense("same", 3, 2.03),
                make_result("longer", loss=1.0, options=longer, steps=103),
                make_result("wider", loss=1.0, options={"model.d_model": 32}, flops_per_token=1021),
                make_result("rate", loss=1.0, options=tuned, tuning=tuned, main_arm="moe"),
            ],
        },
    )

    found = rows(page)
    both = "[a](studies/a.md): swiglu = [b](studies/b.md): same"
    assert [*found] == ["[a](studies/a.md): moe", "[a](studies/a.md): more", both]
    assert found[both][2] == "4"
    assert "no other arm has their budget: 2 of b." in page
    assert page.splitlines()[2].startswith(
        "**At 1 of 1 budgets, a sparse block has a significantly lower loss than the best dense block "
        "that was trained**"
    )


def test_a_speed_up_counts_the_steps_to_the_dense_loss_and_their_time(tmp_path: Path) -> None:
    folder = tmp_path / "studies" / "a"
    folder.mkdir(parents=True)
    (folder / "study.yaml").write_text("{name: a, arms: {gelu: {}, moe: {}}}", encoding="utf-8")
    seconds = {"gelu": {"seconds_per_step": 0.5}, "moe": {"seconds_per_step": 0.75}}
    (folder / "timing.json").write_text(json.dumps({"arms": seconds}), encoding="utf-8")
    # From 3 at step 50 to 1 at step 100, the mixture passes the dense loss, 2, at step 75.
    moe = make_result("moe", loss=1.0, curve=[3.0, 1.0], flops_per_token=1010)
    more = make_result("more", loss=1.5, options=MORE_EXPERTS)

    found = rows(board(tmp_path / "studies", {"a": [dense("gelu", 0, 2.0), moe, more]}))

    speed, _, *speed_ups = found["[a](studies/a.md): moe"][-4:]
    assert speed == "13 (0.67)"
    assert speed_ups == ["1.32", "0.89"]  # 100 / 75 / 1.01, 100 / 75 * 0.5 / 0.75


def test_an_interval_of_steps_that_reaches_below_0_gives_no_negative_speed_up(
    tmp_path: Path,
) -> None:
    curves = ([1.9, 1.5], [3.0, 1.99], [1.9, 1.5])  # reach 2 at the steps 50, 99.5 and 50
    moe = [make_result("moe", s, c[-1], curve=c) for s, c in enumerate(curves)]
    moe += [make_result("more", s, 1.5, options=MORE_EXPERTS) for s in range(3)]

    found = rows(board(tmp_path / "studies", {"a": [*(dense("a", s, 2) for s in range(3)), *moe]}))

    assert found["[a](studies/a.md): moe"][-2] == "1.50 (not determined)"


def test_a_file_of_times_without_times_is_named(tmp_path: Path) -> None:
    for arms in ([], {"a": {}}, {"a": None}):
        (tmp_path / "timing.json").write_text(json.dumps({"arms": arms}), encoding="utf-8")
        with pytest.raises(ConfigError, match=r"timing\.json' does not hold the times of arms"):
            read_timing(tmp_path)


def test_a_budget_with_two_arms_has_a_row_among_the_budgets_and_no_table(tmp_path: Path) -> None:
    page = board(tmp_path / "studies", {"a": [dense("gelu", 0, 2.0), make_result("moe", loss=1.0)]})

    assert "| [a](studies/a.md): moe |" in page
    assert re.findall("^## (.*)", page, re.MULTILINE) == ["Add a row"]


def test_a_folder_without_a_dense_block_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no budget with results of a dense block"):
        board(tmp_path / "studies", {"a": [make_result("moe")]})
