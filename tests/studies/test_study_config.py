"""A study file, the runs that it plans, and a sweep of them with fake processes that a test ends."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from moe_ffn.config.errors import ConfigError
from moe_ffn.config.trust import FLAG
from moe_ffn.config.yaml_files import parse_yaml, to_yaml, validate
from moe_ffn.runs.budget import Budget
from moe_ffn.studies import sweep as sweep_module
from moe_ffn.studies.config import PlannedRun, StudyConfig
from moe_ffn.studies.sweep import Job, Sweep

SMALL = {"model": {"d_model": 16, "num_layers": 2, "attention.num_heads": 2}}


def study(text: str) -> StudyConfig:
    options = parse_yaml(text, where="study")
    return validate(StudyConfig, {"name": "gating", "config": SMALL, **options})


def planned(text: str) -> dict[str, PlannedRun]:
    return {run.name: run for run in study(text).planned_runs()}


def unsupported(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        planned(text)
    return str(caught.value)


def test_every_arm_is_run_with_every_seed_and_every_value_of_the_grid() -> None:
    runs = planned("""
        seeds: [0, 7]
        arms: {relu: {model.ffn: {type: dense, activation: relu}}, swiglu: {model.ffn: swiglu}}
        grid: {model.ffn.d_ff: [32, 48], optimizer.learning_rate: [0.001]}
    """)

    names = [
        f"{arm},d_ff={d_ff},learning_rate=0.001" for arm in ("relu", "swiglu") for d_ff in (32, 48)
    ]
    assert [*runs] == [f"{name}-seed{seed}" for seed in (0, 7) for name in names], "seed by seed"
    run = runs["relu,d_ff=48,learning_rate=0.001-seed7"]
    assert (run.arm, run.seed, run.config.seed) == ("relu,d_ff=48,learning_rate=0.001", 7, 7)
    assert run.folder == Path("runs/gating/relu,d_ff=48,learning_rate=0.001-seed7")
    ffn: Any = run.config.model.ffn
    assert (ffn.type, ffn.activation, ffn.d_ff) == ("dense", "relu", 48)
    assert run.config.optimizer.learning_rate == 0.001
    assert run.config.model.d_model == 16
    assert not run.tuning


def test_dotted_and_nested_options_mean_the_same_and_later_layers_win() -> None:
    dotted = planned("""
        config: {model.ffn: {type: moe, num_experts: 4}, trainer.max_steps: 5}
        arms: {a: {model.ffn.router.k: 1, trainer: {max_steps: 6}}, b: , c: {model.ffn: dense}}
    """)
    nested = planned("""
        config: {model: {ffn: {type: moe, num_experts: 4}}, trainer: {max_steps: 5}}
        arms: {a: {model: {ffn: {router: {k: 1}}}, trainer.max_steps: 6}, b: {}, c: {model: {ffn: dense}}}
    """)
    assert dotted == nested
    assert dotted["a-seed0"].config.trainer.max_steps == 6
    assert dotted["b-seed0"].config.trainer.max_steps == 5
    assert dotted["c-seed0"].config.model.ffn.type == "dense", (
        "without the options of the shared block"
    )


def test_an_option_with_two_values_in_one_arm_is_an_error() -> None:
    """The dotted key comes through `<<`, and would override the rate that the arm gives."""
    with pytest.raises(ConfigError) as error:
        planned("""
            arms:
              muon: &muon {optimizer.learning_rate: 0.08, trainer.max_steps: 5}
              adamw: {<<: *muon, optimizer: {type: adamw, learning_rate: 0.03}, trainer: {max_steps: 5}}
        """)
    assert str(error.value) == (
        "arms.adamw.optimizer.learning_rate: has two values, 0.08 and 0.03, by a dotted key and inside a "
        "mapping, perhaps through `<<`; give it once"
    )
    with pytest.raises(ConfigError, match=r"arms.a.model.ffn: has two values, .*moe.* and .*dense"):
        planned("arms: {a: {model.ffn.type: moe, model: {ffn: dense}}}")


def test_the_seed_is_substituted_in_option_texts() -> None:
    runs = planned("""
        seeds: [0, 12]
        arms: {cut: {init_from: "models/cut-seed{seed}", objective.distill: {teacher: "runs/{seed}"}}}
    """)
    assert {run.config.init_from for run in runs.values()} == {
        "models/cut-seed0",
        "models/cut-seed12",
    }
    distill = runs["cut-seed12"].config.objective.distill
    assert distill is not None
    assert distill.teacher == "runs/12"


def test_tuning_adds_runs_and_repeats_none() -> None:
    runs = planned("""
        config: {optimizer.learning_rate: 0.001}
        seeds: [0, 1, 2]
        arms: {relu: {model.ffn: dense}}
        tuning: {grid: {optimizer.learning_rate: [0.0005, 1e-3]}, seeds: [0, 1]}
    """)
    tuned = ["relu,learning_rate=0.0005-seed0", "relu,learning_rate=0.0005-seed1"]
    assert [*runs] == ["relu-seed0", "relu-seed1", "relu-seed2", *tuned]
    run = runs[tuned[0]]
    assert run.tuning == {"optimizer.learning_rate": 0.0005}
    assert run.main_arm == "relu"
    assert run.config.optimizer.learning_rate == 0.0005


def test_a_run_of_tuning_that_equals_another_arm_is_run_for_its_own() -> None:
    runs = planned("""
        arms: {slow: {optimizer.learning_rate: 0.001}, fast: {optimizer.learning_rate: 0.002}}
        tuning: {grid: {optimizer.learning_rate: [0.001, 0.002]}, seeds: [0]}
    """)
    assert [name for name, run in runs.items() if run.tuning] == [
        "slow,learning_rate=0.002-seed0",
        "fast,learning_rate=0.001-seed0",
    ]


def test_keys_of_a_grid_that_end_alike_are_given_in_full() -> None:
    grid = "{model.ffn.type: [dense], model.norm.type: [rms_norm], model.d_model: [16]}"
    assert study(f"grid: {grid}").arm_names == [
        "model.ffn.type=dense,model.norm.type=rms_norm,d_model=16"
    ]


def test_the_baseline_of_a_grid_may_be_named_without_its_values() -> None:
    given = "{arms: {a: {}, b: {model.ffn: moe}}, grid: {model.d_model: [16]}, baseline: a}"
    assert study(given).baseline == "a"


def test_tuning_can_be_of_some_arms() -> None:
    given = """
        arms: {relu: {model.ffn: dense}, moe: {model.ffn: moe}}
        grid: {model.d_model: [16, 32]}
        tuning: {arms: ["moe,d_model=16"], grid: {optimizer.learning_rate: [0.5]}, seeds: [0]}
    """
    tuned = "moe,d_model=16,learning_rate=0.5"
    assert [name for name, run in planned(given).items() if run.tuning] == [f"{tuned}-seed0"]
    assert [*study(given).tuned_arms] == [tuned]


def test_command_line_options_override_everything(tmp_path: Path) -> None:
    file = tmp_path / "gating.yaml"
    file.write_text(
        "arms: {a: {trainer.max_steps: 5}, b: {trainer.max_steps: 6, model.ffn: dense}}"
    )
    read = StudyConfig.read(file, {"seeds": [3]}, {"trainer": {"max_steps": 7}})

    assert read.name == "gating"
    assert [(run.name, run.config.trainer.max_steps) for run in read.planned_runs()] == [
        ("a-seed3", 7),
        ("b-seed3", 7),
    ]

    kept = tmp_path / "study.yaml"
    kept.write_text(to_yaml(read))
    assert StudyConfig.read(kept) == read, "the copy beside the runs is the same study"
    again = StudyConfig.read(kept, None, {"trainer": {"max_steps": 8}})
    assert again.planned_runs()[0].config.trainer.max_steps == 8, "over what was given to the copy"


def test_the_name_is_the_stem_of_any_file(tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_text("arms: {a: {}}")
    assert StudyConfig.read(file).name == "study"


def test_a_class_in_a_file_is_found_from_the_copy_too(tmp_path: Path) -> None:
    (tmp_path / "gating.yaml").write_text("arms: {own: {model.ffn: {type: own_block.py:Config}}}")
    read = StudyConfig.read(tmp_path / "gating.yaml")
    (tmp_path / "runs").mkdir()
    copied = tmp_path / "runs/study.yaml"
    copied.write_text(to_yaml(read))
    assert (
        StudyConfig.read(copied).arms["own"]["model.ffn"]["type"]
        == f"{tmp_path}/own_block.py:Config"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seeds: [0]", "an empty study: give arms, a grid, or both"),
        ("{arms: {a: {}}, seeds: []}", "seeds: must not be empty, got []"),
        ("{arms: {a: {}}, seeds: [-1]}", "seeds.0: must be at least 0, got -1"),
        (
            "{arms: {relu: {}}, baseline: rleu}",
            "baseline: there is no arm 'rleu'; did you mean 'relu'?",
        ),
        (
            "{arms: {x_s_relu: {}, moe: {}}, sizes: [x_s, m]}",
            "sizes: 'moe' begins with none of x_s, m and an underscore; rename the arm, or add its size",
        ),
        (
            "{arms: {relu: {}, moe: {}}, baselines: {moe: rleu}}",
            "baselines.moe: there is no arm 'rleu'; did you mean 'relu'?",
        ),
        (
            "{arms: {relu: {model.ffn: {type: dense, activatoin: relu}}}}",
            "arms.relu.model.ffn.activatoin: unknown; did you mean 'activation'?",
        ),
        (
            "{config: {model: {ffn: {type: dense, d_ff: 0}}}, arms: {relu: {}}}",
            "config.model.ffn.d_ff: must be at least 1, got 0",
        ),
        (
            "{arms: {relu: {}}, grid: {optimizer.learning_rat: [1.0]}}",
            "grid.optimizer.learning_rat: unknown; did you mean 'learning_rate'?",
        ),
        (
            "{arms: {relu: {}}, tuning: {seeds: [0], grid: {optimizer.learning_rate: [-1]}}}",
            "tuning.grid.optimizer.learning_rate: must be greater than 0.0, got -1",
        ),
        (
            "{arms: {a: {trainer.max_steps: 5}, b: {}}, config: {trainer.max_steps: 5}}",
            "arms: 'a' and 'b' have the same options (an empty arm is the default model); change one of them",
        ),
        (
            "{arms: {a/b: {}}}",
            "arms: an arm must be the name of one folder, up to 200 bytes, got 'a/b-seed0'; name it "
            "under `arms`",
        ),
        (
            "{arms: {a: {}}, grid: {model.d_model: [16]}, tuning: {seeds: [0], grid: {model.d_model: [8]}}}",
            "tuning.grid.model.d_model: is in grid too; give it in one of them",
        ),
        (
            "{arms: {relu: {}}, tuning: {seeds: [0], arms: [rleu], grid: {model.d_model: [8]}}}",
            "tuning.arms: there is no arm 'rleu'; did you mean 'relu'?",
        ),
    ],
)
def test_a_mistake_is_one_sentence_with_its_place_in_the_file(text: str, message: str) -> None:
    assert unsupported(text) == message


def test_arms_of_a_seed_begin_with_the_same_weights_outside_their_ffns() -> None:
    runs = planned("""
        seeds: [0, 1]
        arms:
          dense: {model.ffn: {type: dense, d_ff: 32}}
          moe: {model.ffn: {type: moe, num_experts: 4, shared_expert: {type: dense, d_ff: 8}}}
          mixed: {model.ffn: dense, model.ffn_at: {"1": moe}}
    """)

    def weights(run: PlannedRun) -> dict[str, torch.Tensor]:
        torch.manual_seed(run.config.seed)
        state = run.config.model.build(vocab_size=32, max_seq_len=8).state_dict()
        return {name: value for name, value in state.items() if ".ffn." not in name}

    first = weights(runs["dense-seed0"])
    assert any("attention" in name for name in first)
    for name in ("moe-seed0", "mixed-seed0"):
        torch.testing.assert_close(weights(runs[name]), first, rtol=0, atol=0)
    other = weights(runs["dense-seed1"])
    same = {key for key, value in other.items() if torch.equal(value, first[key])}
    assert all("norm" in key for key in same), "another seed begins with other weights"


def test_base_is_a_path_relative_to_the_study_and_overridden_by_config(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text("model: {d_model: 32, num_layers: 2}\n")
    study = tmp_path / "studies" / "mine.yaml"
    study.parent.mkdir()
    study.write_text(
        "base: ../small.yaml\nconfig: {model.num_layers: 3}\narms: {dense: {model.ffn: dense}}\n"
    )
    read = StudyConfig.read(study)
    assert read.config == {"model": {"d_model": 32, "num_layers": 3}}
    assert read.base is None


def test_a_base_that_is_not_a_file_is_rejected_by_name(tmp_path: Path) -> None:
    study = tmp_path / "mine.yaml"
    study.write_text("base: nothing.yaml\narms: {dense: {}}\n")
    with pytest.raises(ConfigError, match=r"nothing\.yaml: No such file or directory"):
        StudyConfig.read(study)
    study.write_text("base: [a.yaml]\narms: {dense: {}}\n")
    with pytest.raises(ConfigError, match="base: must be the path of a config file"):
        StudyConfig.read(study)


@pytest.mark.parametrize(
    ("steps", "solved"), [(100.4, 100), (100.6, 101), (49.5, 50), (0.6, None), (1.4, None)]
)
def test_training_flops_give_the_nearest_whole_step(steps: float, solved: int | None) -> None:
    arms = "arms: {a: {model.ffn: dense}}"
    one = planned(f"{arms}\nconfig: {{model.d_model: 32, trainer.max_steps: 1}}")["a-seed0"]
    flops = Budget.of(one.config).training_flops * steps
    text = f"{arms}\nconfig: {{model.d_model: 32}}\ntraining_flops: {flops}"

    if solved is None:
        assert f" are {steps:.2f} steps of the arm 'a'" in unsupported(text)
    else:
        assert planned(text)["a-seed0"].config.trainer.max_steps == solved


@pytest.mark.parametrize("section", ["overrides", "arms.a", "grid", "tuning.grid"])
def test_steps_beside_training_flops_are_rejected(section: str) -> None:
    given = {"overrides": 5, "arms.a": 5, "grid": [5, 6], "tuning.grid": [5]}[section]
    options: dict[str, Any] = {"arms": {"a": {}}, "training_flops": 1e12}
    if section == "tuning.grid":
        options["tuning"] = {"seeds": [0], "grid": {}}
    nested = options
    for key in section.split("."):
        nested = nested.setdefault(key, {})
    nested["trainer.max_steps"] = given
    study = validate(StudyConfig, options)

    option = f"{section}.trainer.max_steps".replace("overrides.", "--")
    with pytest.raises(ConfigError, match=rf"^{option} \(5\).*training_flops \(1e\+12\)"):
        study.planned_runs()


def test_the_study_in_the_docs_is_one(tmp_path: Path) -> None:
    repository = Path(__file__).parents[2]
    text = (repository / "docs/howto/study.md").read_text(encoding="utf-8")
    block = re.findall(r"```yaml\n(question.*?)```", text, re.DOTALL)[0]
    (tmp_path / "studies").mkdir()
    (tmp_path / "small.yaml").write_text((repository / "configs/small.yaml").read_text())
    (tmp_path / "studies/gating.yaml").write_text(block)

    read = StudyConfig.read(tmp_path / "studies/gating.yaml")
    runs = read.planned_runs()

    assert len([run for run in runs if not run.tuning]) == 2 * 2 * 5
    assert {run.seed for run in runs if run.tuning} == {0, 1}
    assert "swiglu,d_model=64-seed0" in {run.name for run in runs}
    assert all(run.config.trainer.max_steps == 1000 for run in runs)


# -- the runs of a sweep: number, order, progress and leftovers


STUDY = """
name: gating
config: {model: {d_model: 16, num_layers: 1, attention.num_heads: 2}, trainer.max_steps: 10}
arms: {short: {}, long: {trainer.max_steps: 20}}
"""


class Process:
    """Fake process of a run."""

    started: ClassVar[list[Process]] = []

    def __init__(self, command: Sequence[str], **given: Any) -> None:
        self.command, self.log = command, Path(given["stdout"].name)
        self.code: int | None = None
        Process.started.append(self)

    def poll(self) -> int | None:
        return self.code


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    Process.started.clear()
    monkeypatch.setattr(sweep_module, "Popen", Process)


def sweep_of(text: str, **given: Any) -> Sweep:
    return Sweep(validate(StudyConfig, parse_yaml(text, "study")).planned_runs(), **given)


def begin(job: Job, *steps: int) -> None:
    """Write what a run leaves that has come to its last of `steps`."""
    job.run.folder.mkdir(parents=True, exist_ok=True)
    (job.run.folder / "config.yaml").write_text(to_yaml(job.run.config))
    rows = "".join(f'{{"step": {step}, "train/loss": 2.0}}\n' for step in steps)
    (job.run.folder / "metrics.jsonl").write_text(rows)


def end(job: Job, process: Process, code: int = 0) -> None:
    begin(job)
    if code == 0:
        (job.run.folder / "summary.json").write_text('{"validation_loss": 2.0}')
    process.code = code


def test_a_sweep_trains_the_requested_number_of_runs_at_once() -> None:
    study = (
        f"{STUDY}seeds: [0, 1]\ntuning: {{seeds: [0], grid: {{optimizer.learning_rate: [0.5]}}}}"
    )
    sweep = sweep_of(study, num_at_once=2)
    names = [job.name for job in sweep.jobs]
    assert len(names) == 6

    assert len([*sweep.advance()]) == 2
    assert [*sweep.advance()] == []
    assert [job.name for job in sweep.jobs_in("training")] == names[:2]
    end(sweep.jobs[1], Process.started[1])
    lines = [*sweep.advance()]
    assert lines[0].startswith(f"{names[1]}: 0 s, loss 2.0000; 5 left")
    assert lines[1] == f"{names[2]}: training (3 of 6)"
    assert [job.state for job in sweep.jobs] == [
        *("training", "finished", "training", "waiting", "waiting", "waiting")
    ]
    while not sweep.is_done:
        for job, process in zip(sweep.jobs, Process.started, strict=False):
            end(job, process)
        list(sweep.advance())
    assert [process.log for process in Process.started] == [
        Path(f"runs/gating/logs/{name}.log") for name in names
    ]


def test_a_process_that_ends_well_and_leaves_no_result_has_failed() -> None:
    sweep = sweep_of(STUDY)
    list(sweep.advance())
    Process.started[0].code = 0

    lines = [*sweep.advance()]

    problem = "failed (exit code 0); its output is in runs/gating/logs/short-seed0.log"
    assert lines[0].startswith(f"short-seed0: {problem}")
    assert (sweep.jobs[0].state, sweep.jobs[0].problem) == ("failed", problem)


def test_the_time_left_is_at_the_speed_of_this_sweep_in_flops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(sweep_module, "time", SimpleNamespace(monotonic=lambda: now))
    sweep = sweep_of(STUDY)
    short, long = sweep.jobs
    begin(short, 1, 2, 4)
    assert [*sweep.advance()] == ["short-seed0: resuming (1 of 2)"]
    assert sweep.seconds_left is None, "it has no speed yet"

    begin(short, 1, 2, 4, 5, 6)
    now += 20

    # Two steps of the short run took 20 seconds; 4 of 10 are left of it, and all 20 of the long one.
    assert short.step == 6
    assert sweep.seconds_left == pytest.approx((4 + 20) * 10)
    assert sweep.progress == "short-seed0: step 6 of 10; about 4 min left"
    end(short, Process.started[0])
    now += 20
    # Six steps took 40 seconds, and twenty are left: 133 seconds.
    assert next(sweep.advance()).endswith("; 1 left, about 2 min")
    list(sweep.advance())
    assert long.state == "training"


def test_runs_abandoned_by_another_sweep_wait_for_a_free_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(sweep_module, "time", SimpleNamespace(monotonic=lambda: now))
    is_held = True
    monkeypatch.setattr(
        sweep_module.run_folder,
        "is_training",
        lambda folder: is_held and folder.name == "short-seed0",
    )
    sweep = sweep_of(STUDY)

    assert [line.partition(":")[0] for line in sweep.advance()] == ["short-seed0", "long-seed0"]
    assert [job.state for job in sweep.jobs] == ["elsewhere", "training"]
    is_held = False
    now += 10
    assert [*sweep.advance()] == []
    assert [job.state for job in sweep.jobs] == ["elsewhere", "training"]
    end(sweep.jobs[1], Process.started[0])
    now += 10
    list(sweep.advance())
    assert [job.state for job in sweep.jobs] == ["training", "finished"]


def test_a_resumed_run_is_trusted_as_the_sweep_is() -> None:
    for trusts in (True, False):
        sweep = sweep_of(STUDY, trust_code=trusts)
        begin(sweep.jobs[0], 1)
        list(sweep.advance())
        assert "--resume" in Process.started[-1].command
        assert (FLAG in Process.started[-1].command) == trusts
