"""A checkpoint of another run, whatever it has in common with this one, is never loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_ffn.config.errors import ConfigError
from moe_ffn.config.yaml_files import read_config
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.reader import load_model
from moe_ffn.runs.resume import Start, find_start
from tests.helpers.cases import cases
from tests.helpers.copied_run import Do, expected, lose, resume, rewrite, start_of
from tests.helpers.same_run import differences
from tests.helpers.snapshot import snapshot
from tests.helpers.tiny_runs import NEWEST, OLDER, run_here, trained, unfinished_copy


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return unfinished_copy(tmp_path)


def with_identity(change: Callable[[dict[str, Any]], object]) -> Do:
    def do(folder: Path) -> None:
        for path in (folder / "checkpoints").iterdir():
            rewrite(path, lambda values: change(values["identity"]))

    return do


def option(key: str, value: Any) -> Callable[[dict[str, Any]], object]:
    def change(identity: dict[str, Any]) -> None:
        *parts, last = key.split(".")
        place = identity["changeable"]
        for part in parts:
            place = place[part]
        assert place[last] != value
        place[last] = value

    return change


def another_id(identity: dict[str, Any]) -> None:
    identity["run_id"] = "f" * 16


FORGOTTEN = lose("facts.json", "saved.json")
OTHER_OPTIONS: dict[str, Any] = {
    "optimizer.learning_rate": 0.007,
    "optimizer.weight_decay": 0.0,
    "optimizer.adamw_betas": [0.9, 0.99],
    "optimizer.schedule.type": "constant",
    "objective.load_balance": 0.0,
    "objective.masked_fraction": 0.5,
    "trainer.max_steps": 24,
    "trainer.validate_every_n_steps": 6,
    "trainer.gradient_clip_val": 0.0,
    "trainer.precision": "64-true",
    "trainer.guard.max_loss_ratio": None,
    "trainer.early_stopping": {"patience": 3, "min_delta": 0.0},
    "trainer.gradient_clip_algorithm": "value",
    "data.validation_tokens": 320,
}
STRANGERS: dict[str, tuple[list[Do], str]] = {
    "another id": ([with_identity(another_id)], "is of another run (ffffffffffffffff, this one is "),
    "another id, facts lost": ([with_identity(another_id), lose("facts.json")], "is of another run ("),
    "another id, saved.json lost": (
        [with_identity(another_id), lose("saved.json")], "is of another run ("
    ),
    "without an id": ([with_identity(lambda i: i.pop("run_id"))], "does not say of which run it is"),
    "an id that is a number": (
        [with_identity(lambda i: i.update(run_id=3))], "does not say of which run it is"
    ),
    "without options": (
        [with_identity(lambda i: i.pop("changeable"))], "does not say of which run it is"
    ),
    "options in a circle": (
        [with_identity(lambda i: i["changeable"].update(data=i["changeable"]))],
        "is malformed: identity.changeable.data.data.",
    ),
    "a list in a circle": (
        [with_identity(lambda i: i["changeable"].update(data=(x := [], x.append(x))[0]))],
        "is malformed: identity.changeable.data.0.0.",
    ),
    "a copy that went on with another rate": (
        [with_identity(option("optimizer.learning_rate", 0.007))],
        "was made with optimizer.learning_rate 0.007, but this run has 0.01 in config.yaml and no other in "
        "resumes.jsonl",
    ),
    **{
        f"other {key}, nothing known of the run": (
            [FORGOTTEN, with_identity(option(key, value))], f"was made with {key}"
        )
        for key, value in OTHER_OPTIONS.items()
    },
}  # fmt: skip


FEW_STRANGERS = {
    "another id",
    "a copy that went on with another rate",
    "options in a circle",
    "other optimizer.learning_rate, nothing known of the run",
}


@pytest.mark.parametrize(("do", "said"), cases(STRANGERS, FEW_STRANGERS))
def test_a_checkpoint_of_another_run_is_refused(folder: Path, do: list[Do], said: str) -> None:
    for change in do:
        change(folder)

    with pytest.raises(ConfigError) as resumed:
        start_of(folder)
    with pytest.raises(ConfigError) as loaded:
        load_model(folder)

    for error, name in ((resumed, NEWEST), (loaded, "best.ckpt")):
        assert f"{name} {said}" in str(error.value)
        assert "\n" not in str(error.value)
    assert str(resumed.value).endswith("; put back what was there, or start a new run")
    assert str(loaded.value).endswith("; put back what was there, or give another run")


SIBLINGS = {
    "rate": {"optimizer__learning_rate": "0.007"},
    "seed": {"seed": "3"},
    "nothing": {"logging__every_n_steps": "3"},
    "corpus": {"data__corpus": "{type: text, paths: [README.md]}"},
    "clipping": {"trainer__gradient_clip_val": "0.5"},
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", SIBLINGS.values(), ids=SIBLINGS)
def test_the_checkpoints_of_a_sibling_are_refused_by_every_program(
    folder: Path, changes: dict[str, str]
) -> None:
    shutil.rmtree(folder / "checkpoints")
    shutil.copytree(trained(**changes) / "checkpoints", folder / "checkpoints")
    before = snapshot(folder, ".lock")

    for program, *argv in (
        ("experiments.train", "--resume", str(folder)),
        ("experiments.generate", str(folder)),
        ("experiments.trace", str(folder), "--text", "the cat"),
    ):
        done = run_here(*argv, program=program)
        assert done.code == 2, done.stderr
        (line,) = done.own_lines
        assert "is of another run (" in line or "was made with " in line

    assert snapshot(folder, ".lock") == before, "something was changed"


@pytest.mark.slow
def test_one_of_a_sibling_is_passed_over_for_its_own(folder: Path) -> None:
    rewrite(folder / "checkpoints" / NEWEST, lambda values: another_id(values["identity"]))
    rewrite(folder / "checkpoints" / "best.ckpt", lambda values: another_id(values["identity"]))

    done = resume(folder)

    assert done.code == 0, done.stderr
    assert (
        f"after step 8, from {OLDER}: passed over, since {NEWEST} is of another run ("
        in done.stdout
    )
    assert differences(trained(), folder) == []
    assert (folder / "checkpoints" / f"{NEWEST}.skipped").exists()


# -- options that a run has had


def with_rate(folder: Path, rate: str) -> None:
    """As if `--resume` had been given another learning rate, and had died before it saved anything."""
    for name, before in (("config.yaml", "learning_rate: "), ("facts.json", '"learning_rate": ')):
        text = (folder / name).read_text()
        assert f"{before}0.01" in text
        (folder / name).write_text(text.replace(f"{before}0.01", f"{before}{rate}"))
    line = {"step": 8, "changes": {"optimizer.learning_rate": [0.01, float(rate)]}}
    (folder / "resumes.jsonl").write_text(json.dumps(line) + "\n")


def own_start(folder: Path) -> Start:
    _, data, module = expected()
    return find_start(folder, read_config(folder / "config.yaml", TrainConfig), data, module)


def test_checkpoints_from_before_an_option_was_changed_are_the_runs_own(folder: Path) -> None:
    with_rate(folder, "0.007")
    assert own_start(folder).step == 12
    assert load_model(folder).config.optimizer.learning_rate == 0.007

    (folder / "resumes.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"0\.01, but this run has 0\.007 in config\.yaml and no"):
        own_start(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "content", ["{", '{"step": 1, "changes": 3}', '{"step": 1, "changes": {"a": 1}}']
)
def test_damaged_lines_of_resumes_say_nothing(folder: Path, content: str) -> None:
    (folder / "resumes.jsonl").write_text(content + "\n")

    assert start_of(folder).step == 12


@pytest.mark.slow
def test_a_rate_may_be_changed_again_and_again(folder: Path) -> None:
    """Each time from the checkpoint of step 8, made with the first of them."""
    for rate in ("0.007", "0.02", "0.01"):
        (folder / "checkpoints" / NEWEST).unlink()
        (folder / "summary.json").unlink(missing_ok=True)
        done = resume(folder, "--optimizer.learning_rate", rate)
        assert done.code == 0, done.stderr
        assert f"from {OLDER}" in done.stdout

    assert not [d for d in differences(trained(), folder) if "alarms" not in d]


@pytest.mark.slow
def test_an_edited_config_does_not_lose_the_run(folder: Path) -> None:
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(
        text.replace("gradient_clip_val: 1.0", "gradient_clip_val: 0.5")
    )

    assert resume(folder).code == 0
    (line,) = (folder / "resumes.jsonl").read_text().splitlines()
    assert json.loads(line)["changes"] == {"trainer.gradient_clip_val": [1.0, 0.5]}
    (folder / "summary.json").unlink()
    assert own_start(folder).step == 12, "made with 1.0, which only resumes.jsonl knows by now"


# -- facts that are lost


FORGETTING = {
    "facts": (["facts.json"],),
    "what is saved": (["saved.json"],),
    "both": (["facts.json", "saved.json"],),
}


@pytest.mark.parametrize("lost", cases(FORGETTING, {"facts"}))
def test_a_run_gets_its_id_back(folder: Path, lost: list[str]) -> None:
    run_id = json.loads((folder / "facts.json").read_text())["run_id"]
    for name in lost:
        (folder / name).unlink()

    done = resume(folder)

    assert done.code == 0, done.stderr
    for name in lost:
        assert f"'{folder / name}' is missing or empty; it is written anew" in done.stderr
    assert json.loads((folder / "facts.json").read_text())["run_id"] == run_id
    assert json.loads((folder / "saved.json").read_text()) == {
        "run_id": run_id,
        "last_saved_step": 12,
    }


@pytest.mark.slow
def test_the_precision_comes_back_from_the_checkpoint(folder: Path) -> None:
    """What `auto` was on the machine where the run began, where facts.json had it."""
    lose("facts.json")(folder)
    config = (folder / "config.yaml").read_text().replace("precision: 32-true", "precision: auto")
    (folder / "config.yaml").write_text(config)

    def on_another_machine(values: dict[str, Any]) -> None:
        values["identity"]["changeable"]["trainer"]["precision"] = "auto"
        values["identity"]["precision"] = "bf16-mixed"

    for name in (OLDER, NEWEST):
        rewrite(folder / "checkpoints" / name, on_another_machine)
    done = resume(folder)

    assert done.code == 0, done.stderr
    assert "precision bf16-mixed\n" in done.stdout
    assert json.loads((folder / "facts.json").read_text())["precision"] == "bf16-mixed"
