"""The result of a run, equal when it is read back, and its budget by hand."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from moe_ffn.config.errors import ConfigError
from moe_ffn.config.option_tree import nest_options
from moe_ffn.config.yaml_files import parse_yaml, validate
from moe_ffn.data.prepare import PreparedData, prepare
from moe_ffn.runs.budget import Budget, Cost
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.reader import read_run
from moe_ffn.runs.rows import Series
from moe_ffn.studies import timing
from moe_ffn.studies.config import StudyConfig
from moe_ffn.studies.gather import gather
from moe_ffn.studies.result import RunResult, add_results, lines_of, thinned
from moe_ffn.studies.timing import Training, time_arms
from moe_ffn.training.monitoring.json_lines import STEP_SECONDS
from moe_ffn.training.recovery.checkpoint_file import newest_first, read_checkpoint
from tests.helpers.synthetic_run import (
    change,
    make_result,
    raise_alarms,
    write_arm,
    write_metrics,
    write_run,
)
from tests.helpers.tiny_runs import finished_copy


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 12 steps of 4 sequences of 16 tokens, with validations each 4."""
    return finished_copy(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def result(folder: Path) -> RunResult:
    return RunResult.of_run(read_run(folder))


def test_the_result_of_a_trained_run_is_complete(folder: Path, result: RunResult) -> None:
    run = read_run(folder)
    summary = json.loads((folder / "summary.json").read_text())

    assert (result.arm, result.main_arm, result.seed) == ("run", "run", 0)
    assert result.budget == Budget.of(run.config, vocab_size=run.saved_model.tokenizer.vocab_size)
    assert result.budget.tokens == 12 * 64
    outcome = result.outcome
    assert outcome.is_finished
    assert outcome.step == 12
    assert outcome.validation_loss == pytest.approx(summary["validation_loss"], abs=1e-5)
    assert outcome.bits_per_byte == pytest.approx(summary["validation_bits_per_byte"], abs=1e-5)
    assert outcome.step_seconds is not None
    assert outcome.tokens_per_second == pytest.approx(64 / outcome.step_seconds, rel=1e-3)
    assert outcome.train_seconds is not None
    assert outcome.wall_seconds is not None
    assert 0 < outcome.train_seconds < outcome.wall_seconds
    assert (outcome.peak_memory_bytes or 0) > 50e6
    assert outcome.max_violation == pytest.approx(
        fmean(layer["max_violation"] for layer in summary["routing"].values()), abs=1e-5
    )
    assert outcome.dead_experts == sum(
        layer["load"].count(0) for layer in summary["routing"].values()
    )
    assert fmean(x for x in result.window_losses if x) == pytest.approx(
        outcome.validation_loss, abs=1e-4
    )
    assert {"precision", "threads", "torch", "processor", "git_revision"} <= result.machine.keys()
    assert all(len(sha or "") == 64 for sha in result.fingerprints.values())
    assert "run" not in result.config, "places are of one machine"
    assert "cache_dir" not in result.config["data"]


def test_a_step_takes_the_median_of_its_rows_and_inner_layers_are_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", layers=2, experts=4, rows=11)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    seconds = iter([5, 1, 9, 2, 3, 7, 4, 8, 6, 10, 110])
    rows = [r | {STEP_SECONDS: next(seconds)} if "train/loss" in r else r for r in rows]
    rows.append({"step": 120, STEP_SECONDS: math.inf})
    write_metrics(folder / "metrics.jsonl", rows)
    summary = json.loads((folder / "summary.json").read_text())
    routing = summary["routing"]
    for number, name in enumerate(("layer_00", "layer_01")):
        routing[name] |= {"max_violation": 1.0 + number, "dropped_fraction": 0.25 * number}
        routing[name]["load"] = [[0.5, 0.0, 0.5, 0.0], [0.0, 1.0, 0.0, 0.0]][number]
    # Rounds of a chain share their experts, of which only expert 3 gets no token in either.
    routing["layer_00/round_2"] = routing["layer_00"] | {"load": [0.5, 0.5, 0.0, 0.0]}
    inner = {"max_violation": 100.0, "dropped_fraction": 1.0, "load": [1.0, 0.0]}
    routing["layer_01/inner"] = routing["layer_01"] | inner
    summary |= {"num_skipped_steps": 7, "num_alarms": 8}
    (folder / "summary.json").write_text(json.dumps(summary))

    outcome = RunResult.of_run(read_run(folder)).outcome

    assert outcome.step_seconds == 6
    assert outcome.max_violation == pytest.approx((1 + 1 + 2) / 3, abs=1e-5)
    assert outcome.dropped_fraction == pytest.approx(0.25 / 3, abs=1e-5)
    assert outcome.dead_experts == 1 + 3 + 1, "of all layers"
    assert outcome.num_skipped_steps == 7


def test_its_curves_have_steps_tokens_and_seconds(folder: Path, result: RunResult) -> None:
    run = read_run(folder)

    assert result.train.steps == [2, 4, 6, 8, 10, 12]
    assert result.validation.steps == [4, 8, 12]
    assert result.validation.tokens == [256, 512, 768]
    seconds = run.series("train/seconds").values
    assert result.train.seconds == pytest.approx(list(seconds), abs=1e-3)
    assert result.validation.seconds == pytest.approx(
        [seconds[1], seconds[3], seconds[5]], abs=1e-3
    )
    assert result.train.losses == pytest.approx(list(run.series("train/loss").values), abs=1e-5)


def test_the_arm_is_the_folder_without_its_seed(folder: Path, tmp_path: Path) -> None:
    run = read_run(folder)
    for name, arm in (
        ("moe-seed12", "moe"),
        ("moe-seed1-seed2", "moe-seed1"),
        ("moe-seed", "moe-seed"),
    ):
        assert RunResult.of_run(replace(run, folder=tmp_path / name)).arm == arm


def test_a_table_reads_back_as_it_was_and_its_order_is_that_of_the_names(
    result: RunResult, tmp_path: Path
) -> None:
    add_results(tmp_path, [make_result("moe", 10), result, make_result("moe", 2)])

    table = tmp_path / "results.jsonl"
    read = [RunResult.of_line(line, place) for place, line in lines_of(table)]
    assert [r.name for r in read] == ["moe-seed2", "moe-seed10", "run-seed0"]
    assert read[2] == result
    assert [json.loads(line) for line in table.read_text().splitlines()] == [
        r.model_dump(mode="json") for r in read
    ]


def test_a_newer_result_replaces_only_that_of_its_arm_and_seed(
    tmp_path: Path,
) -> None:
    add_results(tmp_path, [make_result("dense", seed, 2.0 + seed) for seed in (0, 1)])
    table = tmp_path / "results.jsonl"
    before = table.read_text().splitlines()

    add_results(tmp_path, [make_result("dense", 1, 1.5), make_result("dense", 2, 1.6)])

    losses = {
        (run["arm"], run["seed"]): run["outcome"]["validation_loss"]
        for run in map(json.loads, table.read_text().splitlines())
    }
    assert losses == {("dense", 0): 2.0, ("dense", 1): 1.5, ("dense", 2): 1.6}
    assert table.read_text().splitlines()[0] == before[0]


def test_a_damaged_table_is_not_written_over(tmp_path: Path) -> None:
    add_results(tmp_path, [make_result("dense", seed) for seed in (0, 1)])
    table = tmp_path / "results.jsonl"
    damaged = table.read_text()[:-100]
    table.write_text(damaged)

    with pytest.raises(
        ConfigError, match=r"results\.jsonl:2' is not the result of a run: Invalid JSON"
    ):
        add_results(tmp_path, [make_result("dense", 2)])

    assert table.read_text() == damaged


def test_the_result_of_a_long_run_is_small(tmp_path: Path) -> None:
    write_arm(tmp_path, "long", [2.0], experts=8)
    folder = tmp_path / "long-seed0"
    rows: list[dict[str, Any]] = [
        {"step": step, "train/loss": step / 10**4} for step in range(10, 20_001, 10)
    ]
    rows += [{"step": step, "validation/loss": step / 10**4} for step in range(50, 20_001, 50)]
    write_metrics(folder / "metrics.jsonl", sorted(rows, key=lambda row: row["step"]))
    raise_alarms(folder)
    change(folder / "summary.json", window_losses=[2.12345] * 1024)

    result = RunResult.of_run(read_run(folder))

    assert len(result.to_line()) < 30_000
    for curve, first, loss in ((result.train, 100, 0.0055), (result.validation, 100, 0.01)):
        assert (len(curve.steps), curve.steps[0], curve.steps[-1]) == (200, first, 20_000)
        assert curve.losses[0] == pytest.approx(loss), (
            "training is averaged, validations are left out"
        )
    assert result.outcome.alarms == {"collapse": 1, "loss_spike": 1}


def test_a_thinned_curve_averages_neighbours_and_keeps_the_last_step() -> None:
    series = Series()
    for step in range(1, 8):
        series.put(step, float(step))

    assert thinned(series, 3, is_mean=True) == ([3, 6, 7], [2.0, 5.0, 7.0])
    assert thinned(series, 3, is_mean=False) == ([3, 6, 7], [3.0, 6.0, 7.0])
    assert thinned(series, 7, is_mean=True) == (list(range(1, 8)), [float(n) for n in range(1, 8)])
    assert thinned(Series(), 3, is_mean=True) == ([], [])


def test_the_result_of_an_unfinished_run_is_marked(folder: Path, tmp_path: Path) -> None:
    copy = finished_copy(tmp_path)
    (copy / "summary.json").unlink()
    outcome = RunResult.of_run(read_run(copy, has_ended=True)).outcome
    assert not outcome.is_finished
    assert outcome.validation_loss is not None, "the last that is known"
    assert outcome.train_seconds is None


def test_a_budget_by_hand() -> None:
    swiglu = {"type": "swiglu", "d_ff": 8}
    moe = {"type": "moe", "num_experts": 4, "router": {"type": "top_k", "k": 2}}
    options = {
        "model.d_model": 16,
        "model.num_layers": 2,
        "model.attention.num_heads": 2,
        "model.ffn": {"type": "dense", "d_ff": 32},
        "model.ffn_at": {"1": moe | {"experts": swiglu, "shared_expert": swiglu}},
        "data.seq_len": 16,
        "data.batch_size": 4,
        "trainer.max_steps": 5,
        "trainer.accumulate_grad_batches": 3,
    }
    config = TrainConfig.model_validate(nest_options(options.items()))

    found = Budget.of(config, vocab_size=32)

    # Two matrices of 16 x 32; a router of 16 x 4 and three matrices of 16 x 8 in each of 4 + 1 experts, of
    # which a token passes 2 + 1. A product takes two FLOPs a weight.
    dense, expert = 2 * 16 * 32, 3 * 16 * 8
    active = dense + 16 * 4 + 3 * expert
    assert found.ffn == Cost(dense + 16 * 4 + 5 * expert, active, 2 * active)
    model = config.model.build(32, max_seq_len=16)
    params = sum(parameter.numel() for parameter in model.parameters())
    assert found.model.params == params
    assert found.model.active_params == params - 2 * expert
    assert found.model.flops_per_token == config.model.flops_per_token(32, 16)
    assert found.tokens == 5 * 3 * 4 * 16
    # Backward takes twice what forward does.
    assert found.training_flops == 3 * found.model.flops_per_token * found.tokens
    assert Budget.of(config).model.params == params + (257 - 32) * 16, "the most of a tokenizer"


# -- the step that is timed is the step of training; what is made of the seconds, by a clock that is given


@pytest.mark.parametrize(
    "objective",
    ["{}", "{load_balance_global: 1.0}", "{coupling: {weight: 1.0, alpha: 0.1, noise: false}}"],
)
def test_six_timed_steps_are_a_run_of_six_steps(
    objective: str, run_train: Callable[..., Any], tmp_path: Path
) -> None:
    """Accumulated, clipped and on its schedule: the weights are equal."""
    # Steps of SGD are as long as the gradient, and some gradients here are longer than 1 and some are not.
    sgd = "{type: sgd, learning_rate: 0.5, schedule: {type: cosine, warmup_steps: 4}}"
    flags = ["--trainer.accumulate_grad_batches", "3", "--trainer.gradient_clip_val", "1.0"]
    flags += ["--trainer.max_steps", "6", "--optimizer", sgd, "--seed", "5"]
    flags += ["--objective", objective]
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


def test_a_timed_step_of_a_model_that_is_not_causal_masks_tokens(
    tiny_yaml: Path, tmp_path: Path
) -> None:
    options = parse_yaml(tiny_yaml.read_text(), "tiny")
    options["data"]["cache_dir"] = str(tmp_path)
    options["model"]["causal"] = False
    config = validate(TrainConfig, options)
    training = Training(config, prepare(config.data), torch.device("cpu"))
    read: list[torch.Tensor] = []
    training.model.register_forward_pre_hook(lambda _, given: read.append(given[0]))

    training.step()

    assert (read[0] == training.model.mask_token_id).any()


def test_an_arm_with_a_teacher_is_not_timed_without_it(tiny_yaml: Path, tmp_path: Path) -> None:
    options = parse_yaml(tiny_yaml.read_text(), "tiny")
    options["data"]["cache_dir"] = str(tmp_path)
    options["objective"] = {"distill": {"teacher": "runs/teacher"}}
    config = validate(TrainConfig, options)

    with pytest.raises(ConfigError, match=r"^objective\.distill .*has no teacher"):
        Training(config, prepare(config.data), torch.device("cpu"))


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


# -- the results that folders hold: which are read, of which study, in which order, and what is absent


def write_study(folder: Path, text: str, *results: RunResult) -> Path:
    folder.mkdir()
    (folder / "study.yaml").write_text(text)
    add_results(folder, list(results))
    return folder


def test_results_come_by_their_numbers_and_not_by_their_digits(tmp_path: Path) -> None:
    for width in (128, 64):
        for seed in (10, 9):
            options = {"model.d_model": width}
            add_results(tmp_path, [make_result(f"d_model={width}", seed, options=options)])

    assert [result.name for result in gather([tmp_path]).results] == [
        f"d_model={width}-seed{seed}" for width in (64, 128) for seed in (9, 10)
    ]


def test_results_of_a_table_are_shown_by_their_names_and_by_their_places_where_two_are_alike(
    tmp_path: Path,
) -> None:
    for folder, seed in (("one", 0), ("one", 1), ("two", 1)):
        (tmp_path / folder).mkdir(exist_ok=True)
        options = {"model.d_model": 32 if folder == "one" else 64}
        add_results(tmp_path / folder, [make_result("moe", seed, options=options)])

    assert [r.shown_name for r in gather([tmp_path / "one"]).results] == ["moe-seed0", "moe-seed1"]
    assert [r.shown_name for r in gather([tmp_path / "one", tmp_path / "two"]).results] == [
        "moe-seed0",
        f"{tmp_path}/one/results.jsonl:2",
        f"{tmp_path}/two/results.jsonl:1",
    ]


def test_missing_planned_runs_are_counted_and_the_first_named(
    tmp_path: Path,
) -> None:
    text = "arms: {a: {}, b: {model.ffn: dense}}\nseeds: [0, 1, 2]\n"
    found = [make_result("a", 0), make_result("a", 1, is_finished=False)]
    note = gather([write_study(tmp_path / "s", text, *found)]).compare().notes[-1]
    # Two of six runs exist; one of them is left out, which another note reports.
    assert note == (
        "4 of the 6 runs of the study are missing here: a-seed2, b-seed0, b-seed1 and 1 more."
    )


def test_parts_of_one_study_are_one_study_with_the_seeds_of_all(tmp_path: Path) -> None:
    folders = [
        write_study(
            tmp_path / str(seed),
            f"name: s\narms: {{a: {{}}}}\nseeds: {seeds}\n",
            make_result("a", seed),
        )
        for seed, seeds in ((0, [0, 1]), (5, [1, 5]))
    ]
    study = gather(folders).study
    assert study is not None
    assert study.seeds == [0, 1, 5]


def test_runs_of_tuning_stay_with_the_arm_that_they_tune(tmp_path: Path) -> None:
    tuning = {"optimizer.learning_rate": 0.5}
    own: Any = {"tuning": tuning, "main_arm": "moe"}
    folders = [
        write_study(
            tmp_path / name,
            "arms: {moe: {}}\n",
            make_result("moe", 0, options=(options := {"model.d_model": width})),
            make_result("moe,learning_rate=0.5", 0, options=options | tuning, **own),
        )
        for width, name in ((64, "few"), (128, "many"))
    ]

    found = gather(folders)

    assert [*found.arms.values()] == ["few/moe", "few/moe", "many/moe", "many/moe"]
    assert [r.arm for r in found.results if r.tuning] == [
        f"{name}/moe,learning_rate=0.5" for name in ("few", "many")
    ]
    assert [[*table.losses] for table in found.compare().tuning] == [["few/moe", "many/moe"]]


def test_an_arm_may_share_the_name_of_another_studys_tuning_run(tmp_path: Path) -> None:
    name, tuning = "moe,learning_rate=0.5", {"optimizer.learning_rate": 0.5}
    tuned, grid = tmp_path / "tuned", tmp_path / "grid"
    of_tuning = make_result(name, 0, 2.5, main_arm="moe", tuning=tuning, options=tuning)
    write_study(tuned, "arms: {moe: {}}\n", make_result("moe", 0), of_tuning)
    wide = make_result(name, 0, 1.9, options=tuning | {"model.d_model": 256})
    write_study(grid, f"arms: {{'{name}': {{}}}}\n", wide)

    found = gather([tuned, grid])

    assert [*found.arms.values()] == ["moe", "moe", f"grid/{name}"]
    assert [arm.name for arm in found.compare().arms] == ["moe", f"grid/{name}"]


def test_arms_of_one_name_in_two_studies_keep_their_own_times(tmp_path: Path) -> None:
    for number, name in enumerate(("few", "many"), 1):
        result = make_result("moe", 0, options={"model.ffn.num_experts": 4 * number})
        folder = write_study(tmp_path / name, "arms: {moe: {}}\nseeds: [0]\n", result)
        timing = {"arms": {"moe": {"seconds_per_step": 0.1 * number}}}
        (folder / "timing.json").write_text(json.dumps(timing))

    found = gather([tmp_path / "few", tmp_path / "many"])

    assert not found.left_out, "the times are no result"
    assert found.step_seconds == {"few/moe": 0.1, "many/moe": 0.2}
    compared = found.compare()
    assert [arm.step_seconds for arm in compared.arms] == [0.1, 0.2]
    assert compared.notes[-1] == (
        "The arms were timed in 2 sessions (few, many), which may differ in machine and load: compare "
        "seconds and tokens/s only within one."
    )
    copied = gather([tmp_path / "few", shutil.copytree(tmp_path / "few", tmp_path / "copy")])
    assert not any("sessions" in note for note in copied.compare().notes)
