"""A checkpoint under another name is known by the step in it, one of another run is never loaded, and a run
that lost its checkpoints is not begun anew.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from experiments import kept_files
from experiments.command_line import read_config
from experiments.config import TrainConfig
from experiments.resuming.run_record import read_saved
from experiments.resuming.start import Start, find_start
from experiments.saved_run import load_run
from experiments.selftest.same_run import differences
from experiments.selftest.scene import Finished, lasting_folder, options, run_here
from moe_ffn.errors import ConfigError
from moe_ffn.training import checkpoint_keeper
from moe_ffn.training.checkpoint_file import read_checkpoint, write_checkpoint
from moe_ffn.training.checkpoint_folder import step_name
from moe_ffn.training.checkpoint_steps import newest_first, put_names_right, step_inside

OLDER, NEWEST, FAR = step_name(8), step_name(12), step_name(99_999_999)
LONGEST = f"step_{'9' * 245}.ckpt"
"""As long as a file system takes it."""

Do = Callable[[Path], object]
"""Changes a folder of checkpoints, or of a run."""


# -- one finished run, of which every case has a copy


@cache
def scene() -> Path:
    return lasting_folder()


@cache
def trained(**changes: str) -> Path:
    """A run with checkpoints of steps 8 and 12; nobody writes to it."""
    name = "-".join(["run", *changes.values()])
    done = run_here(*options(scene(), **{"run__name": name, **changes}))
    assert done.code == 0, done.stderr
    return scene() / "runs" / name


@cache
def expected() -> tuple[TrainConfig, dict[str, Any], Mapping[str, Tensor]]:
    """What the run has to agree in with a checkpoint."""
    from experiments.assemble import build_module
    from experiments.resuming.identity import identity
    from moe_ffn.data.prepare import prepare

    config = read_config(trained() / "config.yaml", TrainConfig)
    data = prepare(config.data, progress=False)
    return config, identity(config, data), build_module(config, data).state_dict()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the run, as if its process had died just before its end."""
    copied = Path(shutil.copytree(trained(), tmp_path / "run"))
    (copied / "summary.json").unlink()
    return copied


def start_of(folder: Path) -> Start:
    return find_start(folder, *expected())


def resume(folder: Path, *argv: str) -> Finished:
    return run_here("--resume", str(folder), *argv)


def files_of(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what is in a checkpoint, whose checksum is right again."""
    values = read_checkpoint(path)
    change(values)
    write_checkpoint(values, path)


# -- names


def swap(checkpoints: Path) -> None:
    (checkpoints / NEWEST).rename(checkpoints / "aside")
    (checkpoints / OLDER).rename(checkpoints / NEWEST)
    (checkpoints / "aside").rename(checkpoints / OLDER)


def rename(before: str, now: str) -> Do:
    return lambda checkpoints: (checkpoints / before).rename(checkpoints / now)


def copy(before: str, now: str) -> Do:
    return lambda checkpoints: shutil.copy(checkpoints / before, checkpoints / now)


def damage(name: str) -> Do:
    return lambda checkpoints: (checkpoints / name).write_bytes(
        (checkpoints / name).read_bytes()[:-1] + b"!"
    )


def put(name: str, content: bytes) -> Do:
    return lambda checkpoints: (checkpoints / name).write_bytes(content)


def folder_at(name: str) -> Do:
    return lambda checkpoints: (checkpoints / name).mkdir()


HOLDS = "holds step 12, not 99999999"
NAMES: dict[str, tuple[list[Do], str, int, str]] = {
    "nothing": ([], NEWEST, 12, f"from {NEWEST}: its newest checkpoint, and good"),
    "the newest, copied": ([copy(NEWEST, FAR)], NEWEST, 12, f"passed over {FAR} {HOLDS};"),
    "an older one, copied": ([copy(OLDER, FAR)], NEWEST, 12, "its newest checkpoint, and good"),
    "an older one, copied behind it": ([copy(OLDER, step_name(10))], NEWEST, 12, "and good"),
    "the newest, renamed": ([rename(NEWEST, FAR)], FAR, 12, f"from {FAR}, which {HOLDS}: its newest"),
    "the newest, as the first step": (
        [rename(NEWEST, step_name(1))], step_name(1), 12, "which holds step 12, not 1: its newest"
    ),
    "swapped": ([swap], OLDER, 12, f"from {OLDER}, which holds step 12, not 8: its newest"),
    "each named as the other's later": (
        [rename(OLDER, FAR), rename(NEWEST, OLDER)], OLDER, 12, "which holds step 12, not 8"
    ),
    "an endless number": ([copy(NEWEST, LONGEST)], NEWEST, 12, "holds step 12, not 99999"),
    "an endless number alone": ([rename(NEWEST, LONGEST)], LONGEST, 12, "which holds step 12"),
    "an endless number, empty": ([put(LONGEST, b"")], NEWEST, 12, f"passed over {LONGEST} is empty"),
    "more zeros": (
        [copy(NEWEST, "step_000000000012.ckpt")], NEWEST, 12, "passed over step_000000000012.ckpt holds"
    ),
    "digits of another script": (
        [copy(NEWEST, "step_٠٠٠٠٠٠٩٩.ckpt")], NEWEST, 12, "its newest checkpoint, and good"
    ),
    "a folder": ([folder_at(FAR)], NEWEST, 12, f"passed over {FAR} is no file"),
    "a folder in its place": (
        [rename(NEWEST, FAR), folder_at(NEWEST)], FAR, 12, f"passed over {NEWEST} is no file"
    ),
    "garbage of a later step": ([put(FAR, b"PK\3\4")], NEWEST, 12, f"passed over {FAR} does not end in"),
    "the weights of the best": ([copy("best.ckpt", FAR)], NEWEST, 12, "passed over"),
    "damaged, and a copy is good": (
        [copy(NEWEST, FAR), damage(NEWEST)], FAR, 12, f"passed over {NEWEST} does not match its checksum"
    ),
    "a damaged copy": ([copy(NEWEST, FAR), damage(FAR)], NEWEST, 12, "passed over"),
    "the newest is gone": (
        [lambda checkpoints: (checkpoints / NEWEST).unlink()], OLDER, 8, f"passed over {NEWEST} is missing;"
    ),
    "an older one in the newest's place": (
        [rename(OLDER, NEWEST)], NEWEST, 8, f"passed over {NEWEST} is missing; the newest good one"
    ),
}  # fmt: skip
"""What is done, which file is gone on from, its step, and a part of what is said."""


@pytest.mark.parametrize(("do", "name", "step", "said"), NAMES.values(), ids=NAMES)
def test_the_step_inside_decides(
    folder: Path, do: list[Do], name: str, step: int, said: str
) -> None:
    checkpoints = folder / "checkpoints"
    for change in do:
        change(checkpoints)

    start = start_of(folder)

    assert start.checkpoint == checkpoints / name
    assert start.step == step
    assert said in start.describe(folder)
    assert load_run(folder).decoder is not None


SHORT = {"swapped", "the newest, copied"}


@pytest.mark.parametrize(
    "do",
    [
        pytest.param(do, id=name, marks=[] if name in SHORT else pytest.mark.slow)
        for name, (do, *_) in NAMES.items()
    ],
)
def test_a_run_with_other_names_ends_as_the_unbroken_one(folder: Path, do: list[Do]) -> None:
    for change in do:
        change(folder / "checkpoints")

    done = resume(folder)

    assert done.code == 0, done.stderr
    assert differences(trained(), folder) == []
    steps = {path.name: step_inside(path) for path in newest_first(folder / "checkpoints")}
    assert steps.pop(NEWEST) == 12
    assert steps in ({OLDER: 8}, {}), "misnamed still, or lost"


RENAMED = {
    "in a row": {8: 12, 9: 8, 12: 9},
    "two of one step": {8: 12, 12: 8, 20: 12, 30: 12},
    "a damaged one in the place": {8: 12, 12: None, 20: 20},
    "all far away": {1: 100, 2: 200, 3: 300},
}
"""Number in the name -> step inside, None of a damaged file."""


@pytest.mark.parametrize("died_after", range(8))
@pytest.mark.parametrize("steps", RENAMED.values(), ids=RENAMED)
def test_who_dies_while_renaming_leaves_nothing_in_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: dict[int, int | None], died_after: int
) -> None:
    for number, step in steps.items():
        write_checkpoint({"global_step": step, "number": number}, tmp_path / step_name(number))
        if step is None:
            damage(step_name(number))(tmp_path)
    inside = {step for step in steps.values() if step is not None}
    plain, count = Path.rename, 0

    def die(path: Path, place: Path) -> Path:
        nonlocal count
        count += 1
        if count > died_after:
            raise KeyboardInterrupt
        return plain(path, place)

    monkeypatch.setattr(Path, "rename", die)
    try:
        put_names_right(tmp_path)
    except KeyboardInterrupt:
        found = {step_inside(path) for path in newest_first(tmp_path)} - {None}
        assert found == inside, "a step is lost"
    monkeypatch.setattr(Path, "rename", plain)
    put_names_right(tmp_path)

    good = {path.name: step_inside(path) for path in newest_first(tmp_path)}
    assert good == {step_name(step): step for step in inside}
    assert len(list(tmp_path.iterdir())) == len(steps), "a file is lost"


# -- of another run


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


def lose(*names: str) -> Do:
    def do(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return do


FORGOTTEN = lose("facts.json", "saved.json")
OTHER_OPTIONS: dict[str, Any] = {
    "optimizer.learning_rate": 0.01,
    "optimizer.weight_decay": 0.0,
    "optimizer.betas": [0.9, 0.99],
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
        "holds no options under 'changeable'",
    ),
    "a list in a circle": (
        [with_identity(lambda i: i["changeable"].update(data=(x := [], x.append(x))[0]))],
        "holds no options under 'changeable'",
    ),
    "a copy that went on with another rate": (
        [with_identity(option("optimizer.learning_rate", 0.007))],
        "was made with optimizer.learning_rate 0.007, but this run has 0.003 in config.yaml and no other in "
        "resumes.jsonl",
    ),
    **{
        f"other {key}, nothing known of the run": (
            [FORGOTTEN, with_identity(option(key, value))], f"was made with {key}"
        )
        for key, value in OTHER_OPTIONS.items()
    },
}  # fmt: skip


@pytest.mark.parametrize(("do", "said"), STRANGERS.values(), ids=STRANGERS)
def test_a_checkpoint_of_another_run_is_refused(folder: Path, do: list[Do], said: str) -> None:
    for change in do:
        change(folder)

    with pytest.raises(ConfigError) as resumed:
        start_of(folder)
    with pytest.raises(ConfigError) as loaded:
        load_run(folder)

    for error, name in ((resumed, NEWEST), (loaded, "best.ckpt")):
        assert f"{name} {said}" in str(error.value)
        assert "\n" not in str(error.value)
    assert str(resumed.value).endswith("; put back what was there, or start a new run")


SIBLINGS = {
    "rate": {"optimizer__learning_rate": "0.01"},
    "seed": {"seed": "3"},
    "nothing": {"run__name": "twin"},
    "corpus": {"data__corpus": "{type: text, paths: [README.md]}"},
    "clipping": {"trainer__gradient_clip_val": "0.5"},
}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(changes, id=name, marks=[] if name == "rate" else pytest.mark.slow)
        for name, changes in SIBLINGS.items()
    ],
)
def test_the_checkpoints_of_a_sibling_are_refused_by_every_program(
    folder: Path, changes: dict[str, str]
) -> None:
    shutil.rmtree(folder / "checkpoints")
    shutil.copytree(trained(**changes) / "checkpoints", folder / "checkpoints")
    before = files_of(folder)

    for program, *argv in (
        ("experiments.train", "--resume", str(folder)),
        ("experiments.generate", str(folder)),
        ("experiments.trace", str(folder), "--text", "the cat"),
    ):
        done = run_here(*argv, program=program)
        assert done.code == 2, done.stderr
        (line,) = done.own_lines
        assert "is of another run (" in line or "was made with " in line

    assert files_of(folder) == before, "something was changed"


def test_one_of_a_sibling_is_passed_over_for_its_own(folder: Path) -> None:
    rewrite(folder / "checkpoints" / NEWEST, lambda values: another_id(values["identity"]))
    rewrite(folder / "checkpoints" / "best.ckpt", lambda values: another_id(values["identity"]))

    done = resume(folder)

    assert done.code == 0, done.stderr
    assert f"after step 8, from {OLDER}: passed over {NEWEST} is of another run (" in done.stdout
    assert differences(trained(), folder) == []
    assert (folder / "checkpoints" / f"{NEWEST}.passed-over").exists()


# -- options that a run has had


def with_rate(folder: Path, rate: str) -> None:
    """As if `--resume` had been given another learning rate, and had died before it saved anything."""
    for name, before in (("config.yaml", "learning_rate: "), ("facts.json", '"learning_rate": ')):
        text = (folder / name).read_text()
        assert f"{before}0.003" in text
        (folder / name).write_text(text.replace(f"{before}0.003", f"{before}{rate}"))
    line = {"step": 8, "changes": {"optimizer.learning_rate": [0.003, float(rate)]}}
    (folder / "resumes.jsonl").write_text(json.dumps(line) + "\n")


def own_start(folder: Path) -> Start:
    _, identity, state = expected()
    return find_start(folder, read_config(folder / "config.yaml", TrainConfig), identity, state)


def test_checkpoints_from_before_an_option_was_changed_are_the_runs_own(folder: Path) -> None:
    with_rate(folder, "0.01")
    assert own_start(folder).step == 12
    assert load_run(folder).config.optimizer.learning_rate == 0.01

    (folder / "resumes.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"0\.003, but this run has 0\.01 in config\.yaml and no"):
        own_start(folder)


@pytest.mark.parametrize(
    "content", ["{", '{"step": 1, "changes": 3}', '{"step": 1, "changes": {"a": 1}}']
)
def test_damaged_lines_of_resumes_say_nothing(folder: Path, content: str) -> None:
    (folder / "resumes.jsonl").write_text(content + "\n")

    assert start_of(folder).step == 12


@pytest.mark.slow
def test_a_rate_may_be_changed_again_and_again(folder: Path) -> None:
    """Each time from the checkpoint of step 8, made with the first of them."""
    for rate in ("0.01", "0.02", "0.003"):
        (folder / "checkpoints" / NEWEST).unlink()
        (folder / "summary.json").unlink(missing_ok=True)
        done = resume(folder, "--optimizer.learning_rate", rate)
        assert done.code == 0, done.stderr
        assert f"from {OLDER}" in done.stdout

    assert not [d for d in differences(trained(), folder) if "alarms" not in d]


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


@pytest.mark.parametrize("lost", [["facts.json"], ["saved.json"], ["facts.json", "saved.json"]])
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


# -- lost checkpoints


def without_checkpoints(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints")


def best_alone(folder: Path) -> None:
    for name in (OLDER, NEWEST):
        (folder / "checkpoints" / name).unlink()


def a_file_in_their_place(folder: Path) -> None:
    without_checkpoints(folder)
    (folder / "checkpoints").write_text("")


def renamed_all(folder: Path) -> None:
    for path in (folder / "checkpoints").iterdir():
        path.rename(path.with_name(f"{path.name}.passed-over"))


def saved(text: str) -> Do:
    return lambda folder: (folder / "saved.json").write_text(text)


def saved_step(step: Any) -> Do:
    def do(folder: Path) -> None:
        run_id = json.loads((folder / "facts.json").read_text())["run_id"]
        (folder / "saved.json").write_text(
            json.dumps({"run_id": run_id}).replace("}", f', "last_saved_step": {step}}}')
        )

    return do


def ended(folder: Path) -> None:
    shutil.copy(trained() / "summary.json", folder)


SAID = f"though saved.json says that {NEWEST} was saved; put it back, or start a new run"
GUESSED = (
    "though the run came further than its first, and saved.json, which says whether that was saved, is "
    "missing or damaged; put them back, or start a new run"
)
LOST: dict[str, tuple[list[Do], str]] = {
    "the folder": ([without_checkpoints], f"has no checkpoint to go on from, {SAID}"),
    "all but the best": (
        [best_alone], f"has no checkpoint to go on from (best.ckpt holds weights alone), {SAID}"
    ),
    "a file in their place": ([a_file_in_their_place], SAID),
    "all passed over": ([renamed_all], SAID),
    "and the rows": ([without_checkpoints, lose("metrics.csv")], SAID),
    "and the facts": ([without_checkpoints, lose("facts.json")], SAID),
    "and saved.json": ([without_checkpoints, lose("saved.json")], GUESSED),
    "and nothing saved, though it has ended": (
        [without_checkpoints, saved_step("null"), ended], "though the run has ended; put them back"
    ),
    **{
        f"and saved.json has {step}": ([without_checkpoints, saved_step(step)], GUESSED)
        for step in (
            "-1", "true", '"12"', "12.0", "1e400", "NaN", "[12]", "{}", "9" * 400, "9" * 5000, "1000000001"
        )
    },
    **{
        f"and saved.json is {text[:20]!r}": ([without_checkpoints, saved(text)], GUESSED)
        for text in ("", "{", "null", "[]", "12", "\0", "[" * 99_000, '{"last_saved_step": 12}')
    },
    "and saved.json is another run's": (
        [without_checkpoints, saved('{"run_id": "ffffffffffffffff", "last_saved_step": null}')], GUESSED
    ),
    "and saved.json is a folder": (
        [without_checkpoints, lose("saved.json"), lambda folder: (folder / "saved.json").mkdir()], GUESSED
    ),
}  # fmt: skip


@pytest.mark.parametrize(("do", "said"), LOST.values(), ids=LOST)
def test_a_run_that_lost_its_checkpoints_is_not_begun_anew(
    folder: Path, do: list[Do], said: str
) -> None:
    for change in do:
        change(folder)
    before = files_of(folder)

    with pytest.raises(ConfigError) as error:
        start_of(folder)

    assert said in str(error.value)
    assert str(error.value).startswith(f"'{folder}/checkpoints' ")
    assert "\n" not in str(error.value)
    assert files_of(folder) == before


def test_the_program_refuses_it_and_touches_nothing(folder: Path) -> None:
    without_checkpoints(folder)
    before = files_of(folder)

    done = resume(folder)

    assert done.code == 2
    assert done.own_lines == [
        f"error: '{folder}/checkpoints' has no checkpoint to go on from, {SAID}"
    ]
    assert files_of(folder) == before


# -- disks that take no checkpoint


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """No checkpoint can be written any more, until it is called."""
    write = checkpoint_keeper.write_checkpoint

    def fail(values: dict[str, Any], path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_keeper, "write_checkpoint", fail)
    return lambda: monkeypatch.setattr(checkpoint_keeper, "write_checkpoint", write)


def test_after_a_disk_too_small_for_any_checkpoint_the_advice_works(
    tmp_path: Path, full: Callable[[], None]
) -> None:
    done = run_here(*options(tmp_path, run__name="run"))
    folder = tmp_path / "runs" / "run"
    assert done.code == 1
    assert done.stderr.splitlines()[-1] == (
        "error: the weights of step 12 are not saved (No space left on device); mend that, then: python -m "
        f"experiments.train --resume {folder}"
    )
    full()

    done = resume(folder)

    assert done.code == 0, done.stderr
    assert (
        f"resuming {folder} from the start: no checkpoint was saved before it ended" in done.stdout
    )
    assert differences(trained(), folder) == []


def test_a_record_that_the_disk_does_not_take_is_written_at_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, tried = kept_files.write_whole, []

    def fail_twice(path: Path, text: str) -> None:
        tried.append(path.name)
        if len(tried) < 3:
            raise OSError(errno.EIO, "Input/output error")
        write(path, text)

    monkeypatch.setattr(kept_files, "write_whole", fail_twice)
    done = run_here(*options(tmp_path, run__name="run", checkpoints__every_n_steps="3"))

    assert done.code == 0, done.stderr
    folder = tmp_path / "runs" / "run"
    found = read_saved(folder / "saved.json")
    assert found is not None
    assert found.step == 12
    assert [line for line in done.stderr.splitlines() if line.startswith("disk: ")] == [
        f"disk: '{folder}' cannot be written (Input/output error); training goes on and tries again",
        f"disk: '{folder}' is written again",
    ]


@pytest.mark.parametrize("removed", ["saved.json", "facts.json"])
def test_a_file_that_comes_back_claims_what_was_saved(tmp_path: Path, removed: str) -> None:
    kept = kept_files.KeptFiles(tmp_path, {"saved.json": "null", "facts.json": "{}"})
    kept.put_back()
    kept.change("saved.json", "8")
    (tmp_path / removed).unlink()

    kept.put_back()

    assert (tmp_path / "saved.json").read_text() == "8"
    assert (tmp_path / "facts.json").read_text() == "{}"
