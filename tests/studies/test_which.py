"""The search for a block: its time, the candidates that stay, the answer, and one whole search."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest

from moe_ffn.cli.which import main
from moe_ffn.config.errors import ConfigError
from moe_ffn.config.yaml_files import read_yaml, validate
from moe_ffn.runs.config import TrainConfig
from moe_ffn.studies import which
from moe_ffn.studies.comparison import Comparison
from moe_ffn.studies.gather import Gathered
from moe_ffn.studies.result import Curve, RunResult
from moe_ffn.studies.which import (
    BLOCKS,
    DENSE,
    OVERHEAD_SECONDS,
    ROUNDS,
    WIDTHS,
    Question,
    answer,
    full_steps,
    ranked,
    survivors,
)
from tests.helpers.synthetic_run import make_result

ROOT = Path(__file__).parents[2]
STEP_SECONDS = dict.fromkeys(BLOCKS, 0.1) | {"swiglu": 0.2, "moe_32_top2": 0.3}


def question(**options: object) -> Question:
    sizes = {"width": 64, "step_seconds": STEP_SECONDS, "max_steps": 1000}
    return validate(Question, {"data": ["text"], "minutes": 10.0, "jobs": 2, **sizes, **options})


# -- sizes


def test_the_time_is_that_of_all_rounds() -> None:
    # Round 1: both dense and all four sparse, 0.1 + 0.2 + 0.3 + 3 * 0.1, two seeds, a quarter of the steps.
    # Round 2: the slowest dense, the two slowest sparse, two seeds, half of the steps.
    # Round 3: the slowest of each, five seeds.
    seconds_per_step = 0.9 * 2 / 4 + (0.2 + 0.3 + 0.1) * 2 / 2 + 0.5 * 5
    # Eight validations of 16,384 tokens are as much work as 21 1/3 steps of 2,048 tokens.
    validations = (0.9 * 2 + 0.6 * 2 + 0.5 * 5) * 64 / 3
    overhead = (12 + 6 + 10) * OVERHEAD_SECONDS + validations
    seconds = (400 * seconds_per_step + overhead) / 2
    assert full_steps(seconds + 0.1, ROUNDS, STEP_SECONDS, jobs=2) == 400
    assert full_steps(overhead / 2, ROUNDS, STEP_SECONDS, jobs=2) == 0


@pytest.mark.parametrize("width", WIDTHS[:6])
def test_candidates_cost_equal_flops(width: int) -> None:
    flops = {
        arm: which._config(["text"], width, block).model.flops_per_token(
            which.VOCAB_SIZE, which.SEQ_LEN
        )
        for arm, block in BLOCKS.items()
    }
    assert max(flops.values()) <= 1.02 * min(flops.values())


def test_options_are_those_of_the_studies() -> None:
    ours, base = (
        which._config(["text"], 64, DENSE["gelu"]).to_dict(),
        read_yaml(ROOT / "configs/small.yaml", ""),
    )
    of_studies = validate(TrainConfig, base).to_dict()
    ours["optimizer"]["learning_rate"] = of_studies["optimizer"]["learning_rate"]
    ours["data"]["corpus"] = of_studies["data"]["corpus"]
    ours["data"]["validation_tokens"] = of_studies["data"]["validation_tokens"]
    for part in (ours, of_studies):
        del part["trainer"], part["model"]["ffn"]
    assert ours == of_studies


# -- rounds and answer


def test_the_best_of_each_kind_stay() -> None:
    losses = {"gelu": 2.2, "swiglu": 2.1, "moe_8_top2": 1.9, "moe_32_top2": 2.0, "moe_64_top4": 1.8}
    found = Comparison.of([make_result(arm, 0, loss) for arm, loss in losses.items()])
    assert survivors(found, ROUNDS[1]) == ["swiglu", "moe_64_top4", "moe_8_top2"]
    assert survivors(found, ROUNDS[2]) == ["swiglu", "moe_64_top4"]


def test_seeds_of_a_search_count_from_the_given_one(tmp_path: Path) -> None:
    search = which.Search(question(seed=10), tmp_path, print)
    rounds = [
        search._study(index, ["gelu", "moe_8_top2"], STEP_SECONDS, spent=0.0)
        for index in range(len(ROUNDS))
    ]
    assert [study.seeds for study in rounds] == [[10, 11], [10, 11], [12, 13, 14, 15, 16]]
    assert {run.config.seed for run in rounds[2].planned_runs()} == {12, 13, 14, 15, 16}


def ended_at(step: int, result: RunResult) -> RunResult:
    """A run, known as far as a step; the schedule of its rate is still the long one."""
    count = result.validation.steps.index(step) + 1
    curve = Curve(
        steps=result.validation.steps[:count],
        tokens=result.validation.tokens[:count],
        losses=result.validation.losses[:count],
    )
    outcome = result.outcome.model_copy(update={"step": step, "validation_loss": curve.losses[-1]})
    return result.model_copy(update={"validation": curve, "outcome": outcome})


@pytest.mark.parametrize("step", [120, 240])
@pytest.mark.parametrize(
    ("study", "names"),
    [("experts", [f"e{n},d_model={width}" for n in (8, 32)]) for width in (32, 48, 64)]
    + [("gating", ["swiglu", "gelu"])],
)
def test_the_arm_stays_that_leads_at_full_length(study: str, names: list[str], step: int) -> None:
    """The second arm leads at the end, step 600, in both studies; in one the first arm leads at this step."""
    table = ROOT / "docs" / "studies" / study / "results.jsonl"
    results = [RunResult.of_line(line, table) for line in table.read_bytes().splitlines()]
    short = [ended_at(step, result) for result in results if result.arm in names]
    arms = Comparison.of(short, baseline=names[0]).arms
    assert ranked(arms)[0].name == (names[0] if study == "experts" else names[1])
    assert ranked(arms, doublings=math.log2(600 / step))[0].name == names[1]


def last_round(differences: list[float], at_half: float | None = None) -> Gathered:
    """Two blocks whose losses differ so, seed by seed; the mixture has 1.2 times the seconds of a step.

    Args:
        at_half: mean difference at half of the steps, by default that of the end.
    """
    results = []
    for seed, difference in enumerate(differences):
        for arm, loss, seconds in (("gelu", 2.0, 0.2), ("moe_8_top2", 2.0 + difference, 0.24)):
            loss += 0.01 * seed
            curve = [4.0, loss + 0.1, loss]
            if at_half is not None:
                curve = [loss + 0.1 + (at_half - fmean(differences)) * (arm != "gelu"), loss]
            results.append(
                make_result(
                    arm,
                    seed,
                    loss,
                    options={
                        "model.ffn": BLOCKS[arm],
                        "data.tokenizer": {"type": "bpe", "vocab_size": 2048},
                    },
                    curve=curve,
                    step_seconds=seconds,
                    params=1_000_000 if arm == "gelu" else 3_000_000,
                )
            )
    return Gathered(results)


def test_a_better_mixture_is_named_with_its_gain_and_cost(tmp_path: Path) -> None:
    found = answer(question(), tmp_path, last_round([-0.10, -0.11, -0.09, -0.10, -0.10]))
    assert found.chosen.name == "moe_8_top2"
    assert found.comparison.verdicts == [
        "Use moe_8_top2: its loss is 0.1000 [0.0912, 0.1088] nats per token lower than that of gelu, and it "
        "reaches that loss in 81% of the time.",
        "moe_8_top2 trains at 42 tokens per second against 50, with 600 MB of memory against 600, at equal "
        "FLOPs and with 3.0 times the parameters.",
        "This rests on 5 seeds of each (p < 0.001), models of 0.50 M active parameters and 0.0 M tokens; "
        "shorter runs chose these two blocks from 6, and larger models or longer runs may order them "
        "differently.",
    ]
    assert validate(TrainConfig, read_yaml(tmp_path / "config.yaml", "")).model.ffn.type == "moe"


def test_a_better_dense_block_is_named(tmp_path: Path) -> None:
    found = answer(question(), tmp_path, last_round([0.10, 0.11, 0.09, 0.10, 0.10]))
    assert found.comparison.verdicts[0].startswith(
        "Use gelu: its loss is 0.1000 [0.0912, 0.1088] nats per token lower than that of moe_8_top2."
    )
    assert validate(TrainConfig, read_yaml(tmp_path / "config.yaml", "")).model.ffn.type == "dense"


def test_an_unresolved_difference_gives_the_time_that_would_resolve_it(tmp_path: Path) -> None:
    found = answer(question(), tmp_path, last_round([-0.10, 0.11, -0.09, 0.10, -0.10]))
    assert found.chosen.name == "gelu"
    first = found.comparison.verdicts[0]
    assert first.startswith(
        "Cannot tell moe_8_top2 from gelu within this time: the difference is -0.0160 [-0.1"
    )
    # sd 0.1108 and a difference of 0.016 need 379 pairs of runs, where 10 minutes train five.
    assert first.endswith(
        "nats per token; 12.6 h would be enough. Until then train gelu, the simpler block."
    )


def test_blocks_equal_within_the_margin_are_called_equal(tmp_path: Path) -> None:
    found = answer(question(), tmp_path, last_round([0.004, -0.003, 0.002, -0.004, 0.001]))
    assert found.chosen.name == "gelu"
    assert found.comparison.verdicts[0] == (
        "moe_8_top2 equals gelu within 0.02 nats per token, +0.0000 [-0.0042, +0.0042]. Train gelu, the "
        "simpler block."
    )


def test_a_difference_that_shrinks_while_the_runs_last_is_no_answer(tmp_path: Path) -> None:
    ends = [0.05, 0.06, 0.04, 0.05, 0.05]
    found = answer(question(), tmp_path, last_round(ends, at_half=0.1))
    assert found.chosen.name == "gelu"
    # Halved by the last doubling of the steps, so that one more would bring it to zero.
    assert found.comparison.verdicts[0] == (
        "Cannot tell moe_8_top2 from gelu within this time: the loss of gelu is 0.0500 nats per token lower "
        "than that of moe_8_top2, but was 0.1000 lower halfway through training, so longer runs may reverse "
        "the order; 40 min would show it. Until then train gelu, the simpler block."
    )
    kept = answer(question(), tmp_path, last_round(ends, at_half=0.06)).comparison.verdicts[0]
    assert kept.startswith("Use gelu: its loss is 0.0500")


# -- the program


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--minutes", "5"], r"--data: is required: moe-ffn which --data my_texts/ --minutes 60"),
        (["--data", "text"], r"--minutes: is required"),
        (["--data", "none", "--minutes", "5"], r"^--data: 'none' does not exist"),
        (
            ["--data", "rows.csv.txt", "latin.txt", "--minutes", "5"],
            r"^--data: 'latin.txt' is not UTF-8",
        ),
        (
            ["--data", "rows.jsonl", "--minutes", "5"],
            r"^--data: 'rows.jsonl' holds records, .* names; write their text into a .txt file$",
        ),
        (["--data", "text", "--minutes", "0"], r"--minutes: must be a whole number from 1 to"),
        (
            ["--data", "text", "--minutes", "5", "--seed", "-1"],
            r"--seed: must be a whole number from 0 ",
        ),
        (["--data", "text", "--minutes", "5", "--name", "a/b"], r"--name: "),
        (
            ["--data", "text", "--minutes", "5", "--name", "old"],
            r"'runs/old' exists; resume it with --resume",
        ),
        (
            ["--resume", "runs/wrong"],
            r"^'runs/wrong/which.yaml': jobs: .*\n'runs/wrong/which.yaml': width: must be a whole number",
        ),
        (["--resume", "runs/old"], r"'runs/old' has no which.yaml; give the folder of a search"),
        (["--resume", "runs/old", "--minutes", "5"], r"remove --data, --minutes and --seed"),
        (["--resume", "runs/old", "--seed", "0"], r"remove --data, --minutes and --seed"),
        (
            ["--resume", "runs/old", "--jobs", "2"],
            r"^--jobs: is that of the resumed search; remove",
        ),
        (
            ["--resume", "runs/old", "--name", "a"],
            r"^--name: is that of the resumed search; remove",
        ),
    ],
)
def test_a_mistake_is_one_sentence(argv: list[str], message: str, tmp_path: Path) -> None:
    for name in ("old", "wrong"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    mistaken = which.to_yaml(question(jobs=3)).replace("width: 64", "width: wide")
    mistaken = mistaken.replace("jobs: 3", "jobs: 0")
    (tmp_path / "runs" / "wrong" / "which.yaml").write_text(mistaken, encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}')
    (tmp_path / "rows.csv.txt").write_text("one")
    (tmp_path / "latin.txt").write_bytes(b"na\xefve")
    with pytest.raises(ConfigError, match=message):
        main(argv)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"old", "wrong"}
    assert not any((tmp_path / "runs" / "old").iterdir())


def test_the_width_suits_the_text_and_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    text = SimpleNamespace(train=range(50_000))
    monkeypatch.setattr(which, "prepare", lambda config: text)
    with pytest.raises(
        ConfigError, match=r"--data: 50,000 tokens are too few: 4 passes over them are 97 steps"
    ):
        Question.measured(["text"], 60, 2, print)
    text.train = range(10_000_000)
    monkeypatch.setattr(which, "_timed", lambda data, width, arms: dict.fromkeys(arms, 0.05))
    with pytest.raises(
        ConfigError, match=r"2 minutes leave 0 steps .* 400 are needed; give at least \d+$"
    ):
        Question.measured(["text"], 2, 2, print)
    monkeypatch.setattr(
        which, "_timed", lambda data, width, arms: dict.fromkeys(arms, width / 1000)
    )
    chosen = Question.measured(["text"], 60, 2, print, seed=10)
    # Some 3,700 steps read 7.6 M tokens, enough for 1.0 M active parameters; width 192 has 2.1 M.
    assert chosen.width == 128
    assert chosen.max_steps == 4 * 10_000_000 // 2048
    assert chosen.seed == 10


def test_flags_become_the_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    monkeypatch.setattr(Question, "measured", lambda *args: given.extend(args) or question())
    monkeypatch.setattr(which.Search, "run", lambda self: None)
    monkeypatch.setattr("moe_ffn.cli.which.print_answer", lambda answer: None)
    (tmp_path / "text").write_text("one")
    assert main(["--data", "text", "--minutes", "5", "--jobs", "1", "--seed", "3"]) == 0
    assert given[:3] == [["text"], 5, 1]
    assert given[-1] == 3


@pytest.mark.slow
def test_a_whole_search_is_resumed_after_its_first_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "other_home"))
    monkeypatch.setattr(
        which, "ROUNDS", (which.Round(1, 1, (0,), 0.5), which.Round(1, 1, (1, 2, 3), 1))
    )
    monkeypatch.setattr(which, "BLOCKS", {name: BLOCKS[name] for name in ("gelu", "moe_8_top2")})
    monkeypatch.setattr(which, "MIN_STEPS", 8)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    sizes = {"width": 32, "step_seconds": dict.fromkeys(which.BLOCKS, 0.1), "max_steps": 8}
    asked = question(data=[str(ROOT / "moe_ffn")], **sizes)
    folder = tmp_path / "runs" / "which"
    folder.mkdir(parents=True)
    (folder / "which.yaml").write_text(which.to_yaml(asked))

    assert main(["--resume", "runs/which"]) == 0

    shown = capsys.readouterr().out
    assert "round 2 of 2: gelu, moe_8_top2; 6 runs of 8 steps" in shown
    assert "train it: moe-ffn train --config runs/which/config.yaml" in shown
    assert "Which feed-forward block" in (folder / "which.html").read_text(encoding="utf-8")
    assert main(["--resume", "runs/which"]) == 0
    assert "training (" not in capsys.readouterr().out
