"""`--resume`: which run, with which options, from which checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from moe_ffn.cli.train import NEWEST, find_resume, take_flags
from moe_ffn.config.errors import ConfigError
from moe_ffn.config.option_tree import differences
from moe_ffn.config.yaml_files import to_yaml
from moe_ffn.data.prepare import prepare
from moe_ffn.data.split import Documents
from moe_ffn.runs.config import Resume, TrainConfig
from moe_ffn.runs.folder import saved_config
from moe_ffn.runs.identity import checkpoint_identity
from moe_ffn.runs.json_files import Facts
from moe_ffn.runs.resume import ResumePoint, problem_of_weights, rewind
from moe_ffn.runs.texts import check_documents
from moe_ffn.training.monitoring.json_lines import JsonLines, Line, Row, read_lines
from moe_ffn.training.recovery.checkpoint_file import (
    read_checkpoint,
    step_name,
    write_checkpoint,
)
from tests.helpers.same_run import require_same
from tests.helpers.tiny_runs import Finished, run_here

MakeRun = Callable[..., Path]

FACTS = json.dumps({**TrainConfig().to_dict(), "precision": "32-true"}, indent=2) + "\n"

# -- which run


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """`make_run("a", written=5)`: a run of the default options, last written at that second."""

    def make(name: str, written: int, finished: bool = False) -> Path:
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(to_yaml(TrainConfig()))
        if finished:
            (folder / "summary.json").write_text("{}")
        for path in folder.iterdir():
            os.utime(path, (written, written))
        return folder

    return make


def find(run: str, *argv: str) -> Resume:
    return find_resume(run, argv)


@pytest.mark.parametrize(
    ("argv", "run", "rest"),
    [
        (["--seed", "1"], None, ["--seed", "1"]),
        (["--resume"], NEWEST, []),
        (["--resume", "runs/a", "--seed", "1"], "runs/a", ["--seed", "1"]),
        (["--resume=runs/a"], "runs/a", []),
        (["--resume", "--seed", "1"], NEWEST, ["--seed", "1"]),
        (["--seed", "1", "--resume"], NEWEST, ["--seed", "1"]),
    ],
)
def test_resume_may_name_a_run(argv: list[str], run: str | None, rest: list[str]) -> None:
    flags, others = take_flags(argv)
    assert (flags.resume, others) == (run, rest)


def test_without_a_name_it_is_the_unfinished_run_that_was_written_last(make_run: MakeRun) -> None:
    make_run("oldest", written=1)
    middle = make_run("middle", written=2)
    make_run("newest", written=3, finished=True)

    assert find(NEWEST).folder.resolve() == middle.resolve()
    assert find(NEWEST, "--run.name", "oldest").folder == Path("runs/oldest")

    checkpoints = Path("runs/oldest/checkpoints")
    checkpoints.mkdir()
    (checkpoints / "step_00000001.ckpt").touch()
    assert find(NEWEST).folder == Path("runs/oldest"), "a checkpoint was written now"


def test_resume_without_a_run_is_an_error(make_run: MakeRun) -> None:
    with pytest.raises(ConfigError, match=r"^--resume: 'runs' has no run; name one"):
        find(NEWEST)
    make_run("done", written=1, finished=True)
    with pytest.raises(
        ConfigError,
        match=r"^--resume: 'runs' has no unfinished run \(except runs training now\); name one",
    ):
        find(NEWEST)
    with pytest.raises(ConfigError, match=r"^'runs/other' does not exist; give the folder"):
        find("runs/other")
    with pytest.raises(ConfigError, match=r"^'runs' is not a run: .*; it holds runs; .*runs/done"):
        find("runs")


def test_a_finished_run_resumes_only_to_more_steps(make_run: MakeRun) -> None:
    folder = str(make_run("done", written=1, finished=True))

    with pytest.raises(
        ConfigError,
        match=r"is finished, but its page was not written: moe-ffn report .*runs/done; raise",
    ):
        find(folder)
    (Path(folder) / "report.html").touch()
    with pytest.raises(ConfigError, match=r"is finished; raise trainer.max_steps \(now 400\)"):
        find(folder)
    with pytest.raises(ConfigError, match="is finished"):
        find(folder, "--trainer.max_steps", "300")

    found = find(folder, "--trainer.max_steps", "500")
    assert found.config.trainer.max_steps == 500
    assert found.changes == {"trainer.max_steps": (400, 500)}


def test_a_folder_in_a_command_is_quoted(make_run: MakeRun) -> None:
    folder = make_run("my run", written=1, finished=True)
    with pytest.raises(ConfigError, match=r": moe-ffn report '.*runs/my run'; raise"):
        find(str(folder))


def test_a_config_that_was_cut_short_is_rejected(make_run: MakeRun) -> None:
    folder = make_run("cut", written=1)
    path = folder / "config.yaml"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))

    lost = r"is from an older version without its facts.json; restore the original file$"
    with pytest.raises(ConfigError, match=rf"lacks sample\.\w+, so it was cut short or {lost}"):
        find(str(folder))
    (folder / "facts.json").write_text(FACTS)
    with pytest.raises(
        ConfigError, match=r"config.yaml' lacks sample\.\w+, so it was cut short; r"
    ):
        find(str(folder))
    path.write_text("")
    with pytest.raises(ConfigError, match=r"config.yaml' lacks seed and \d+ more, so it was cut "):
        find(str(folder))


def test_differences_are_named_by_their_dotted_keys() -> None:
    before = {"a": 1, "b": {"c": 2, "d": 3}, "e": {"f": 4}}
    now = {"a": 1, "b": {"c": 5, "d": 3, "g": 6}, "e": 7}
    assert differences(before, now) == {"b.c": (2, 5), "b.g": (None, 6), "e": ({"f": 4}, 7)}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[" * 100_000, '{"corpus_sha256": "a", "count": Infinity, "digests": null}'],
    ids=["empty", "half", "deep", "infinite"],
)
def test_a_damaged_list_of_documents_is_left_to_the_checkpoint(tmp_path: Path, text: str) -> None:
    (tmp_path / "documents.json").write_text(text)
    check_documents(tmp_path, Documents("b", 1, None))


# -- from which checkpoint


STATE = {"weight": torch.zeros(2, 3), "count": torch.zeros(3, dtype=torch.int64)}


class Model(torch.nn.Module):
    """Model with a small state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2, 3))
        self.register_buffer("count", torch.ones(3, dtype=torch.int64))


MODEL = Model()
IDENTITY = {
    "seed": 1,
    "model": {"d_model": 16, "ffn_at": {"0": {"type": "dense"}}},
    "data": {"seq_len": 8, "batch_size": 4, "tokenizer": {"sha256": "a" * 64}},
}
CHECKPOINT: dict[str, Any] = {"state_dict": STATE, "identity": IDENTITY}
OF_WEIGHTS = {
    "model": {"d_model": 16, "ffn_at": {"0": {"type": "dense"}}},
    "data": {"seq_len": 8, "tokenizer": {"sha256": "a" * 64}},
}


def test_a_good_checkpoint_is_accepted() -> None:
    assert problem_of_weights(CHECKPOINT, IDENTITY, MODEL) is None
    assert problem_of_weights(CHECKPOINT, OF_WEIGHTS, MODEL) is None


def with_identity(**changed: Any) -> dict[str, Any]:
    return {**CHECKPOINT, "identity": {**IDENTITY, **changed}}


def with_weights(**changed: Tensor) -> dict[str, Any]:
    kept = {name: value for name, value in STATE.items() if name != "weight"}
    return {**CHECKPOINT, "state_dict": {**kept, **changed}}


REJECTED: dict[str, tuple[dict[str, Any], str, bool]] = {
    "no weights": ({"identity": IDENTITY}, "is not a checkpoint of a run", False),
    "no identity": ({**CHECKPOINT, "identity": "text"}, "is not a checkpoint of a run", False),
    "seed": (with_identity(seed=2), "was made with seed 2, but this run has 1", True),
    "model": (
        with_identity(model={"d_model": 32}),
        "was made with model.d_model 32, but this run has 16",
        False,
    ),
    "batch size": (
        with_identity(data={**IDENTITY["data"], "batch_size": 8}),
        "was made with data.batch_size 8, but this run has 4",
        True,
    ),
    "tokenizer": (
        with_identity(data={**IDENTITY["data"], "tokenizer": {"sha256": "b" * 64}}),
        "was made with data.tokenizer.sha256 bbbbbbbbbbbb..., but this run has aaaaaaaaaaaa...",
        False,
    ),
    "shape": (
        with_weights(weight=torch.zeros(3, 2)),
        "has 'weight' of shape (3, 2), not (2, 3)",
        False,
    ),
    "weight": (with_weights(), "lacks the weight 'weight'", False),
    "a layer's block": (
        with_identity(model={"d_model": 16, "ffn_at": {}}),
        "was made with model.ffn_at.0 None, but this run has {'type': 'dense'}",
        False,
    ),
}
"""Name -> checkpoint, the reason why no run is resumed from it, and whether its weights can be used."""


@pytest.mark.parametrize(("values", "reason", "has_weights"), REJECTED.values(), ids=REJECTED)
def test_a_checkpoint_of_something_else_is_rejected(
    values: dict[str, Any], reason: str, has_weights: bool
) -> None:
    assert problem_of_weights(values, IDENTITY, MODEL) == reason
    assert problem_of_weights(values, OF_WEIGHTS, MODEL) == (None if has_weights else reason)


def test_bfloat16_weights_go_into_a_float32_model() -> None:
    state = {**STATE, "weight": STATE["weight"].bfloat16()}
    assert problem_of_weights({**CHECKPOINT, "state_dict": state}, OF_WEIGHTS, MODEL) is None


# -- the program


def test_options_that_are_newer_than_a_run_take_their_defaults(
    moe_run: Any, unfinished: Path
) -> None:
    config = yaml.safe_load((unfinished / "config.yaml").read_text())
    facts = json.loads((unfinished / "facts.json").read_text())
    for options in (config, facts):
        del options["model"]["attention"]["window_at"]
    (unfinished / "config.yaml").write_text(to_yaml(config))
    (unfinished / "facts.json").write_text(json.dumps(facts))
    path = unfinished / "checkpoints" / "step_00000004.ckpt"
    checkpoint = read_checkpoint(path)
    del checkpoint["identity"]["model"]["attention"]["window_at"]
    write_checkpoint(checkpoint, path)
    warning = f"'{unfinished}/config.yaml' is older than these options, which take their defaults: "

    done = resume(str(unfinished))

    assert f"{warning}model.attention.window_at :" in done.stderr.splitlines()
    require_same(moe_run.folder, unfinished)
    assert saved_config(unfinished).model.attention.window_at == ":"


@pytest.fixture
def unfinished(moe_run: Any, tmp_path: Path) -> Path:
    """The run of six steps, as it was after the fourth."""
    folder = tmp_path / "runs" / "mine"
    shutil.copytree(moe_run.folder, folder)
    (folder / "summary.json").unlink()
    (folder / "checkpoints" / "step_00000006.ckpt").unlink()
    return folder


def resume(*argv: str) -> Finished:
    return run_here("--resume", *argv, program="moe_ffn.cli.train")


def test_a_changed_model_is_rejected_with_both_values(unfinished: Path) -> None:
    before = {path: path.read_bytes() for path in unfinished.rglob("*") if path.is_file()}

    done = resume(str(unfinished), "--model.d_model", "32")

    assert done.code == 2
    assert done.stderr.splitlines()[-1] == (
        f"error: model.d_model: is 16 in '{unfinished}' and cannot become 32; leave it out, or start "
        "a new run"
    )
    after = {path: path.read_bytes() for path in before}
    assert after == before, "something was changed"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.unlink(), "'3.txt' was removed"),
        (lambda text: text.write_text("other words\n"), "'3.txt' has changed"),
        (lambda text: text.with_name("a.txt").write_text("more\n"), "'a.txt' is new"),
    ],
    ids=["removed", "changed", "new"],
)
def test_a_corpus_that_changed_is_rejected_by_the_name_of_the_file(
    unfinished: Path, corpus: Path, tmp_path: Path, change: Callable[[Path], Any], said: str
) -> None:
    moved = Path(shutil.copytree(corpus, tmp_path / "moved"))
    change(moved / "3.txt")

    done = resume(str(unfinished), "--data.corpus.paths", f"['{moved}']")

    assert done.code == 2
    assert done.stderr.splitlines()[-1] == (
        f"error: data.corpus: {said}, since '{unfinished}' began; restore it, or start a new run"
    )


def test_a_run_resumes_to_more_steps_and_prints_its_resume_point(unfinished: Path) -> None:
    (unfinished / "checkpoints" / "step_00000005.ckpt").write_bytes(b"cut")
    (unfinished / "tokenizer.json").write_bytes(b"\xff")

    done = resume(str(unfinished), "--trainer.max_steps", "8")

    assert done.code == 0, done.stderr
    assert (
        f"resuming {unfinished} after step 4, from step_00000004.ckpt; "
        "newer ones cannot be used: step_00000005.ckpt "
        "does not end in its checksum: it was cut short, or is not a checkpoint\n"
    ) in done.stdout
    assert done.stderr.count("tokenizer.json' is missing or damaged; it is recreated") == 1
    assert json.loads((unfinished / "tokenizer.json").read_text()) == {"type": "bytes"}
    assert [row.step for row in read_lines(unfinished / "metrics.jsonl", Row)] == [2, 4, 4, 6, 8, 8]
    assert yaml.safe_load((unfinished / "config.yaml").read_text())["trainer"]["max_steps"] == 8
    (line,) = (unfinished / "resumes.jsonl").read_text().splitlines()
    assert json.loads(line)["changes"] == {"trainer.max_steps": [6, 8]}
    assert (unfinished / "summary.json").exists()


def test_damaged_lines_of_a_log_are_reported_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "samples.jsonl").write_bytes(b"\xff\n")
    files = {"config.yaml": to_yaml(TrainConfig()), "facts.json": FACTS}
    for name, text in files.items():
        (folder / name).write_text(text)

    rewind(Resume(folder, TrainConfig(), {}, TrainConfig(), Facts()), ResumePoint(4), files)

    assert capsys.readouterr().err.splitlines() == [
        f"'{folder}/samples.jsonl' is damaged: 1 of its lines cannot be read and are removed"
    ]
    assert not (folder / "samples.jsonl").exists()


def test_going_back_leaves_what_was_there_when_the_checkpoint_was_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 8, before the validation of that step: its row and its text are still to come."""
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    for step in (8, 12):
        (folder / "checkpoints" / step_name(step)).touch()
    losses = [("train", 4), ("validation", 4), ("train", 8), ("validation", 8), ("train", 12)]
    JsonLines(folder / "metrics.jsonl").add({"step": n, f"{s}/loss": 1.5} for s, n in losses)
    for name, found in (("samples", (4, 8)), ("alarms", (4, 8, 12))):
        JsonLines(folder / f"{name}.jsonl").add({"step": n, "text": f"text {n}"} for n in found)
    (folder / "summary.json").write_text("{}")
    JsonLines(folder / "resumes.jsonl").add([{"step": 0}])
    start = ResumePoint(8, folder / "checkpoints" / step_name(8), validated_step=4)

    rewind(Resume(folder, TrainConfig(), {}, TrainConfig(), Facts()), start, {"facts.json": FACTS})

    rows = read_lines(folder / "metrics.jsonl", Row)
    assert [(row.step, row.is_validation) for row in rows] == [(4, False), (4, True), (8, False)]
    kept = {
        n: list(read_lines(folder / f"{n}.jsonl", Line)) for n in ("samples", "alarms", "resumes")
    }
    assert {name: [line.step for line in lines] for name, lines in kept.items()} == {
        "samples": [4],
        "alarms": [4, 8],
        "resumes": [0, 8],
    }
    assert not (folder / "summary.json").exists(), "it is unfinished again"
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        step_name(8),
        f"{step_name(12)}.skipped",
    ]
    said = capsys.readouterr().err.splitlines()
    assert said == [f"'{folder}/facts.json' is missing or damaged; it is recreated"]


def test_a_log_without_its_last_row_or_text_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    JsonLines(folder / "metrics.jsonl").add([{"step": 4, "validation/loss": 1.5}])
    files = {"facts.json": FACTS}
    (folder / "facts.json").write_text(FACTS)
    resume = Resume(folder, TrainConfig(), {}, TrainConfig(), Facts.read(folder / "facts.json"))

    rewind(resume, ResumePoint(8, validated_step=8, sampled_step=8), files)
    said = capsys.readouterr().err.splitlines()
    rewind(resume, ResumePoint(4, validated_step=4), files)

    lost = [
        f"'{folder}/{name}.jsonl' lost lines: it has none of step 8"
        for name in ("metrics", "samples")
    ]
    assert said == lost
    assert "lost" not in capsys.readouterr().err, "a run without texts has none to lose"


def test_an_option_that_was_edited_in_the_config_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = TrainConfig().to_dict()
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    (tmp_path / "facts.json").write_text(json.dumps({**config, "precision": "32-true"}))
    saved_config(tmp_path)
    unchanged = capsys.readouterr().err
    (tmp_path / "config.yaml").write_text(to_yaml({**config, "seed": 7}))

    assert saved_config(tmp_path).seed == 7

    assert not unchanged
    assert capsys.readouterr().err == f"'{tmp_path}/config.yaml' was edited: seed is 7 (was 0)\n"


def test_facts_keep_what_was_known_when_the_run_began(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "facts.json").write_text(FACTS)
    config = TrainConfig(seed=3)
    new = {"precision": "bf16-mixed", "validation_sha256": "of the windows from now on"}
    fresh = json.dumps({**config.to_dict(), **new})

    rewind(
        Resume(folder, config, {"seed": (0, 3)}, config, Facts()),
        ResumePoint(),
        {"facts.json": fresh},
    )

    facts = json.loads((folder / "facts.json").read_text())
    assert (facts["seed"], facts["precision"]) == (3, "32-true")
    assert facts["validation_sha256"] == new["validation_sha256"], "of the loss in the summary"


def test_facts_name_the_precision_that_a_resumed_run_changed(tmp_path: Path) -> None:
    (tmp_path / "facts.json").write_text(FACTS)
    changes = {"trainer.precision": ("auto", "bf16-true")}
    resume = Resume(tmp_path, TrainConfig(), changes, TrainConfig(), Facts())

    rewind(resume, ResumePoint(), {"facts.json": json.dumps({"precision": "bf16-true"})})

    assert Facts.read(tmp_path / "facts.json").precision == "bf16-true"


def test_no_run_resumes_from_its_best_weights(moe_run: Any, unfinished: Path) -> None:
    """A run that was killed before its first checkpoint may have come to validations, and to a best."""
    for path in (unfinished / "checkpoints").glob("step_*.ckpt"):
        path.unlink()

    rejected = resume(str(unfinished / "checkpoints" / "best.ckpt"))
    assert rejected.code == 2
    assert rejected.stderr.splitlines()[-1] == (
        f"error: '{unfinished}/checkpoints/best.ckpt' is a file, not the folder of a run; give the folder of "
        "a run, such as runs/my-run"
    )

    run_id = Facts.read(unfinished / "facts.json").run_id
    done = resume(str(unfinished))
    assert done.code == 0
    assert f"resuming {unfinished} from the start: it has no checkpoint" in done.stdout
    assert Facts.read(unfinished / "facts.json").run_id == run_id
    require_same(moe_run.folder, unfinished)


def test_the_identity_leaves_out_what_only_changes_the_computing(
    config_of: Callable[[list[str]], TrainConfig], moe_run: Any
) -> None:
    plain = config_of(moe_run.args)
    data = prepare(plain.data)
    for option, value, same in [
        ("--model.ffn.experts.backend", "loop", True),
        ("--model.ffn.capacity.eval_factor", "2.0", True),
        ("--logging.every_n_steps", "7", True),
        ("--model.ffn.capacity.factor", "2.0", False),
        ("--seed", "7", False),
        ("--optimizer.learning_rate", "7", True),
        ("--optimizer.type", "sgd", False),
    ]:
        other = config_of([*moe_run.args, option, value])
        assert (checkpoint_identity(other, data) == checkpoint_identity(plain, data)) == same, (
            option
        )
