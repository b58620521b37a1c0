"""The runs of a study, trained several at a time; what is done is not repeated."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from moe_ffn.cli import sweep
from moe_ffn.config.numbers import format_duration
from moe_ffn.config.yaml_files import parse_value, to_yaml
from moe_ffn.runs.budget import Budget
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.folder import is_finished, locked
from moe_ffn.studies.config import StudyConfig
from moe_ffn.studies.gather import read_timing
from moe_ffn.studies.sweep import Sweep, training_command
from moe_ffn.studies.timing import StepTime
from tests.helpers.tiny_runs import ForkedTraining, cli

program = cli("sweep")

STUDY = """
question: Which?
seeds: [0, 1]
arms:
  dense: {model.ffn: {type: dense, d_ff: 32}}
  moe: {model.ffn: {type: moe, num_experts: 4, router: {type: top_k, k: 1}}}
"""
# 3 float32 are 12 bytes: what only the backend itself knows, so it is told when the run starts.
BROKEN = "{type: moe, experts: {backend: grouped_mm, d_ff: 3}}"


@pytest.fixture(autouse=True)
def _study(tiny_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny study, gating.yaml in the current folder."""
    import_module("moe_ffn.runs.train.run")  # which each copy of this process has then
    monkeypatch.setattr("moe_ffn.studies.sweep.Popen", ForkedTraining)
    tiny = tiny_yaml.read_text(encoding="utf-8")
    (tmp_path / "tiny.yaml").write_text(tiny, encoding="utf-8")
    write_study(tmp_path, STUDY)


def write_study(folder: Path, text: str) -> None:
    tiny = (folder / "tiny.yaml").read_text(encoding="utf-8")
    cache = f"data.cache_dir: {folder / 'cache'}"
    indented = "\n".join(f"  {line}" for line in [*tiny.splitlines(), cache])
    (folder / "gating.yaml").write_text(f"config:\n{indented}\n{text}", encoding="utf-8")


def runs(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if (path / "config.yaml").exists())


ALL = ["dense-seed0", "dense-seed1", "moe-seed0", "moe-seed1"]


def test_every_run_is_trained_once_and_the_next_call_trains_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ForkedTraining, "has_page", True)
    import_module("moe_ffn.report.plots")  # plotly, which each copy of this process has then
    code, out, err = program("--config", "gating.yaml", "--jobs", "2")

    assert (code, err) == (0, "")
    folder = tmp_path / "runs/gating"
    assert runs(folder) == ALL
    assert all(is_finished(folder / name) for name in ALL)
    for name in ALL:  # whose plots are drawn by one script
        assert len((folder / name / "report.html").read_bytes()) < 1e6
        assert '<script src="../plotly.min.js"' in (folder / name / "report.html").read_text()
    assert out.startswith(
        "4 runs in runs/gating/, 0 of them done\ndense-seed0: training (1 of 4)\n"
    )
    assert re.search(r"^moe-seed1: \d+ s, loss \d\.\d{4}$", out, re.MULTILINE)
    assert re.search(r"^\S+: \d+ s, loss \d\.\d{4}; 2 left, about \d+ s$", out, re.MULTILINE)
    assert out.endswith("\ncompare them: moe-ffn compare runs/gating\n")
    kept = StudyConfig.read(folder / "study.yaml")
    assert kept == StudyConfig.read(tmp_path / "gating.yaml")
    assert [run.folder for run in kept.planned_runs()] == [
        Path("runs/gating") / f"{arm}-seed{seed}" for seed in (0, 1) for arm in ("dense", "moe")
    ]
    trained_at = {name: (folder / name / "summary.json").stat().st_mtime_ns for name in ALL}

    code, out, err = program("--config", "gating.yaml", "--jobs", "2")

    assert (code, err) == (0, "")
    assert "training" not in out
    assert out.startswith("4 runs in runs/gating/, 4 of them done\n")
    assert trained_at == {name: (folder / name / "summary.json").stat().st_mtime_ns for name in ALL}

    code, out, err = program("--config", "gating.yaml", "--trainer.max_steps", "8")
    assert (code, out) == (2, "")
    assert err == (
        "error: 'runs/gating/dense-seed0' holds a run with other options (trainer.max_steps was 6, is 8); "
        "give the old options, or choose another --name\n"
    )


def test_a_dry_run_prints_the_error_of_a_solved_width(tmp_path: Path) -> None:
    match = "{match: total_params, of: {type: dense, d_ff: 32}}"
    write_study(
        tmp_path,
        f"arms: {{relu: {{model.ffn: {{type: dense, d_ff: 32}}}}, "
        f"swiglu: {{model.ffn: {{type: swiglu, d_ff: {match}}}}}}}",
    )

    code, out, err = program("--config", "gating.yaml", "--dry-run")

    assert (code, err) == (0, "")
    # 2 matrices of 16 x 32, and 3 of 16 x 21; said once for the arm and not for each seed
    said = "swiglu: model.ffn.d_ff: 21 gives 1,008 parameters where 1,024 are wanted (-1.56%)"
    assert " ".join(out.split()).count(said) == 1


def test_a_dry_run_shows_budgets_and_states_of_runs(tmp_path: Path) -> None:
    sizes = "data.batch_size: 5, trainer.accumulate_grad_batches: 25"
    ffn = "model.ffn: {type: dense, d_ff: 32}"
    write_study(tmp_path, f"arms: {{a: {{{ffn}, {sizes}}}, b: {{}}, c: {{{ffn}}}}}")
    a, b, c = StudyConfig.read(tmp_path / "gating.yaml").planned_runs()
    for run in (b, c):
        run.folder.mkdir(parents=True)
        (run.folder / "config.yaml").write_text(to_yaml(run.config))
    (c.folder / "summary.json").touch()

    _, out, _ = program("--config", "gating.yaml", "--dry-run")

    budget = Budget.of(a.config)
    # Two layers of two matrices of 16 x 32; 6 steps of 25 batches of 5 sequences of 16 tokens.
    (line,) = re.findall(r"^0 +(a-seed0 .*?) *$", out, re.MULTILINE)
    cells = line.split()[1:]
    model = [budget.model.params, budget.model.active_params, budget.model.flops_per_token]
    assert [*map(number, cells[:3])] == pytest.approx(model, rel=5e-3)
    assert cells[3:7] == ["2.05k", "2.05k", "4.1k", "12k"]
    assert number(cells[7]) == pytest.approx(budget.training_flops, rel=5e-3)
    assert re.search(r"^1 +b-seed0 +begun ", out, re.MULTILINE)
    assert re.search(r"^2 +c-seed0 +done ", out, re.MULTILINE)
    total = re.findall(r"3 runs, 1 of them done; (\S+) FLOPs of training in all", out)
    flops = sum(Budget.of(run.config).training_flops for run in (a, b, c))
    assert [*map(number, total)] == [pytest.approx(flops, rel=5e-3)]


def number(text: str) -> float:
    """`2.05k` is 2050."""
    return float(text.rstrip("kMGT")) * 1000 ** ("kMGT".find(text[-1]) + 1)


def test_numbers_are_short_in_thousands() -> None:
    given = (0, 999, 999.6, 1024, 999_499, 999_500, 2**30, 1e18)
    shown = ["0", "999", "1k", "1.02k", "999k", "1M", "1.07G", "1E"]
    assert [sweep.si_format(value) for value in given] == shown


@pytest.fixture
def _untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program writes its study, and trains nothing."""
    monkeypatch.setattr(sweep, "train_sweep", lambda *given: 0)


@pytest.mark.usefixtures("_untrained")
def test_seeds_are_added_without_the_runs_of_tuning(tmp_path: Path) -> None:
    tuning = "tuning: {seeds: [0], grid: {optimizer.learning_rate: [0.001, 0.1]}}"
    write_study(tmp_path, f"{STUDY}\n{tuning}\n")

    code, out, _ = program("--config", "gating.yaml", "--seeds", "1", "5", "--dry-run")
    assert code == 0
    assert re.findall(r"^ *\d+ (\S+-seed\d)", out, re.MULTILINE) == [
        *("dense-seed1", "moe-seed1", "dense-seed5", "moe-seed5")
    ]

    assert program("--config", "gating.yaml", "--seeds", "5", "--only", "dense-seed5")[0] == 0
    kept = StudyConfig.read(tmp_path / "runs/gating/study.yaml")
    assert kept.seeds == [0, 1, 5], "beside those of the file"
    assert kept.tuning is not None


def test_a_run_that_fails_ends_no_other_and_is_tried_again(tmp_path: Path) -> None:
    write_study(tmp_path, f"arms: {{broken: {{model.ffn: {BROKEN}}}, dense: {{model.ffn: dense}}}}")

    code, out, err = program("--config", "gating.yaml")

    assert code == 1
    assert "multiple of 16 bytes" in out, "the last lines of what it printed"
    assert err == (
        "broken-seed0: failed (exit code 1); its output is in runs/gating/logs/broken-seed0.log\n"
    )
    assert is_finished(tmp_path / "runs/gating/dense-seed0")
    assert "compare them: moe-ffn compare runs/gating" in out
    code, out, _ = program("--config", "gating.yaml", "--only", "broken-seed0")
    assert code == 1
    assert "compare them" not in out, "nothing is there to compare"

    code, out, _ = program("--config", "gating.yaml")
    assert code == 1
    assert re.search(r"^broken-seed0: (training|resuming) \(1 of 1\)$", out, re.MULTILINE)
    assert "dense-seed0: training" not in out


@pytest.mark.usefixtures("_untrained")
def test_config_files_are_the_arms_of_a_study(tmp_path: Path) -> None:
    tiny = (tmp_path / "tiny.yaml").read_text(encoding="utf-8")
    for name, ffn in (("switch", "{type: moe, num_experts: 4}"), ("plain", "dense")):
        text = tiny.replace("model: {", f"model: {{ffn: {ffn}, ")
        (tmp_path / f"{name}.yaml").write_text(text, encoding="utf-8")
    given = ("switch.yaml", "plain.yaml", "--name", "all", "--data.cache_dir", "cache")

    code, out, err = program(*given, "--seeds", "1", "2", "--dry-run")

    assert (code, err) == (0, "")
    assert not (tmp_path / "runs").exists(), "a dry run writes nothing"
    assert re.findall(r"^ *\d+ (\S+-seed\d)", out, re.MULTILINE) == [
        *("switch-seed1", "plain-seed1", "switch-seed2", "plain-seed2")
    ]
    assert program(*given)[::2] == (0, "")
    read = StudyConfig.read(tmp_path / "runs/all/study.yaml").planned_runs()
    assert [(run.name, run.config.model.ffn.type) for run in read] == [
        ("switch-seed0", "moe"),
        ("plain-seed0", "dense"),
    ]


# -- what is there already


@pytest.fixture
def only() -> Sweep:
    """A sweep of one run."""
    study = StudyConfig.read(Path("gating.yaml"), {"seeds": [0]})
    return Sweep([run for run in study.planned_runs() if run.arm == "dense"])


def test_an_interrupted_run_is_resumed(only: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    run = only.jobs[0].run
    run.folder.mkdir(parents=True)
    elsewhere = {"run": {"name": "dense-seed0", "output_dir": "/another/path/to/it"}}
    (run.folder / "config.yaml").write_text(to_yaml(run.config.to_dict() | elsewhere))
    commands: list[list[str]] = []

    def start(command: list[str], **options: Any) -> None:
        commands.append(command)

    monkeypatch.setattr("moe_ffn.studies.sweep.Popen", start)

    assert [*only.advance()] == ["dense-seed0: resuming (1 of 1)"]
    assert commands[0][1:] == [
        *("-P", "-m", "moe_ffn.cli", "train", "--resume", "runs/gating/dense-seed0")
    ]


def test_an_unfinished_run_with_other_options_is_moved_away(
    only: Sweep, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = only.jobs[0].run.folder
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("precious")
    monkeypatch.setattr("moe_ffn.studies.sweep.Popen", lambda *args, **options: None)

    assert [*only.advance()] == ["dense-seed0: training (1 of 1)"]

    (aside,) = folder.parent.glob("unfinished/dense-seed0-*")
    assert not folder.exists()
    assert (aside / "metrics.jsonl").read_text() == "precious"
    assert capsys.readouterr().out == (
        f"dense-seed0: an unfinished run with other options was moved to {aside}\n"
    )


def test_a_process_that_cannot_be_started_fails_only_its_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(command: list[str], **given: Any) -> ForkedTraining:
        if "dense-seed0" in str(command):
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return ForkedTraining(command, **given)

    monkeypatch.setattr("moe_ffn.studies.sweep.Popen", start)
    code, out, err = program("--config", "gating.yaml", "--seeds", "0")
    assert code == 1
    assert "moe-seed0: training" in out
    assert err == (
        "dense-seed0: its process cannot be started (Resource temporarily unavailable); give fewer --jobs\n"
    )


def test_a_run_that_another_process_trains_is_waited_for(only: Sweep) -> None:
    run = only.jobs[0].run
    run.folder.mkdir(parents=True)
    (run.folder / "config.yaml").write_text(to_yaml(run.config))
    with locked(run.folder):
        assert [*only.advance()] == [
            "dense-seed0: is being trained by another process; waiting for it"
        ]
        assert [*only.advance()] == [], "said once"
        assert not only.is_done
        (run.folder / "summary.json").write_text("{}")
    assert [*only.advance()] == ["dense-seed0: was trained by another process"]
    assert only.is_done


# -- the processes


def test_a_run_is_given_all_its_options(only: Sweep) -> None:
    run = only.jobs[0].run
    odd = 'a: b\t"c" \\ \N{SNOWMAN} \N{GRINNING FACE} \x85 \u2028 \\ud83d\\ude00 1e-3'
    sample = run.config.sample.model_copy(update={"prompt": odd})
    object.__setattr__(run, "config", run.config.model_copy(update={"sample": sample}))

    python, *program, _, _ = [*training_command(run, False, False)][:7]
    words = training_command(run, False, False)[5:]

    assert [python, *program] == [sys.executable, "-P", "-m", "moe_ffn.cli", "train"]
    keys, values = words[::2], words[1::2]
    options = {key[2:]: parse_value(value, key) for key, value in zip(keys, values, strict=True)}
    assert TrainConfig.model_validate(options) == run.config


@pytest.mark.parametrize(("given", "expected"), [(None, "3"), ("5", "5")])
def test_processes_share_the_cores_and_a_group_of_wandb(
    only: Sweep, monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr("moe_ffn.studies.sweep.num_cores", lambda: 7)
    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)
    found: list[tuple[str, str]] = []

    def start(command: list[str], *, env: dict[str, str], **options: Any) -> None:
        found.append((env["OMP_NUM_THREADS"], env["WANDB_RUN_GROUP"]))

    monkeypatch.setattr("moe_ffn.studies.sweep.Popen", start)
    assert [*Sweep([only.jobs[0].run], num_at_once=2).advance()]
    assert found == [(expected, only.jobs[0].run.folder.parent.name)]


@pytest.mark.parametrize("name", ["", "mine"])
def test_an_interrupted_sweep_of_files_is_resumed_by_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --name, the time names the folder, so the same command would begin another."""

    def interrupt(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Sweep, "run", interrupt)
    (tmp_path / "dense.yaml").write_text("model: {ffn: dense}\n")
    code, out, _ = program("dense.yaml", *(["--name", name] if name else []))

    (folder,) = (tmp_path / "runs").iterdir()
    assert code == 130
    more = "" if name else f" with --name {folder.name}"
    assert out.endswith(f"0 of 1 runs are done; the same command{more} resumes the rest\n")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_runs_after_their_step(tmp_path: Path, signum: signal.Signals) -> None:
    steps = ("--trainer.max_steps", "3000", "--jobs", "2", "--seeds", "0")
    folder = tmp_path / "runs/gating"

    def interrupt() -> None:
        metrics = [folder / name / "metrics.jsonl" for name in ("dense-seed0", "moe-seed0")]
        while not all(path.exists() and path.stat().st_size for path in metrics):
            time.sleep(0.05)
        os.kill(os.getpid(), signum)

    waiting = threading.Thread(target=interrupt, daemon=True)
    waiting.start()
    code, out, err = program("--config", "gating.yaml", *steps)
    waiting.join()

    assert code == 128 + signum
    assert out.endswith("0 of 2 runs are done; the same command resumes the rest\n")
    assert err == ("interrupted\n" if signum == signal.SIGINT else "")
    for name in ("dense-seed0", "moe-seed0"):
        assert "SIGTERM after step" in (folder / f"logs/{name}.log").read_text()
        assert list((folder / name / "checkpoints").glob("step*.ckpt"))


# -- on many machines, and the clock


def test_only_trains_the_named_run_and_prints_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_ffn.studies.sweep._SECONDS_BETWEEN_LINES", 0.0)
    code, out, err = program("--config", "gating.yaml", "--only=moe-seed1")

    assert (code, err) == (0, "")
    assert runs(tmp_path / "runs/gating") == ["moe-seed1"]
    assert len(StudyConfig.read(tmp_path / "runs/gating/study.yaml").planned_runs()) == 4
    found = re.findall(r"^moe-seed1: step (\d) of 6(?:; about \d+ s left)?$", out, re.MULTILINE)
    assert found == sorted(found)
    assert found[0] == "0"

    logged = ("--logging.every_n_steps", "7", "--dry-run")
    code, out, _ = program("--config", "gating.yaml", "--only=moe-seed1", *logged)
    assert code == 0
    assert "1 run, 1 of them done" in out, "what is logged makes no other run"

    code, _, err = program("--config", "gating.yaml", "--only", "moe-sed1")
    assert code == 2
    assert err == "error: --only: there is no run 'moe-sed1'; did you mean 'moe-seed1'?\n"
    code, _, err = program("--config", "gating.yaml", "--only", "moe")
    assert code == 2
    assert err.endswith("no run 'moe'; the runs of that arm are moe-seed0, moe-seed1\n")


def test_every_arm_is_timed_and_compared_with_the_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_ffn.studies.timing._SECONDS_PER_RUN", 0.005)
    code, _, err = program("--config", "gating.yaml", "--time")

    assert code == 0
    assert "timing 2 arms in turns" in err
    found = json.loads((tmp_path / "runs/gating/timing.json").read_text())
    assert [*found] == ["machine", "arms"]
    for arm in found["arms"].values():
        seconds, (low, high) = arm["seconds_per_step"], arm["quartiles"]
        assert arm["tokens_per_second"] == pytest.approx(16 * 4 / seconds)
        assert arm["num_steps"] >= 15
        assert 0 < low < seconds < high
    assert read_timing(tmp_path / "runs/gating") == {
        arm: found["arms"][arm]["seconds_per_step"] for arm in ("dense", "moe")
    }

    write_study(tmp_path, f"{STUDY}baseline: moe\n")
    times = {
        "dense": StepTime(0.5, 300.0, 9, (0.4, 0.6)),
        "moe": StepTime(1.0, 200.0, 9, (0.9, 1.1)),
    }
    monkeypatch.setattr(sweep, "time_arms", lambda *args, **given: times)
    _, out, _ = program("--config", "gating.yaml", "--name", "other", "--time")
    assert [line.split() for line in out.splitlines()[:3]] == [
        ["arm", "ms/step", "quartiles", "tokens/s", "speed"],
        ["dense", "500.0", "400.0", "to", "600.0", "300", "1.50"],
        ["moe", "1,000.0", "900.0", "to", "1,100.0", "200", "1.00"],
    ]
    assert "relative to 'moe'" in out


def test_time_in_words() -> None:
    assert [format_duration(seconds) for seconds in (4.2, 130, 3600, 7 * 3600)] == [
        *("4 s", "2 min", "60 min", "7.0 h")
    ]
