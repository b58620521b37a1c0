"""A checkpoint under another name is known by the step in it, and nothing is lost for its name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from moe_ffn.runs.reader import load_model
from moe_ffn.training.recovery import checkpoint_keeper
from moe_ffn.training.recovery.checkpoint_file import (
    fix_names,
    newest_first,
    step_inside,
    step_name,
    write_checkpoint,
)
from tests.helpers.cases import cases
from tests.helpers.copied_run import Do, resume, start_of
from tests.helpers.same_run import differences
from tests.helpers.tiny_runs import NEWEST, OLDER, finish, options, start, trained, unfinished_copy

FAR = step_name(99_999_999)
LONGEST = f"step_{'9' * 245}.ckpt"
"""As long as a file system takes it."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return unfinished_copy(tmp_path)


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


OVER = "passed over, since"
HOLDS = "holds step 12, not 99999999"
NAMES: dict[str, tuple[list[Do], str, int, str]] = {
    "nothing": ([], NEWEST, 12, f"from {NEWEST}: its newest checkpoint, and good"),
    "the newest, copied": ([copy(NEWEST, FAR)], NEWEST, 12, f"{OVER} {FAR} {HOLDS};"),
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
    "an endless number, empty": ([put(LONGEST, b"")], NEWEST, 12, f"{OVER} {LONGEST} is empty"),
    "more zeros": (
        [copy(NEWEST, "step_000000000012.ckpt")], NEWEST, 12, f"{OVER} step_000000000012.ckpt holds"
    ),
    "digits of another script": (
        [copy(NEWEST, "step_٠٠٠٠٠٠٩٩.ckpt")], NEWEST, 12, "its newest checkpoint, and good"
    ),
    "a folder": ([folder_at(FAR)], NEWEST, 12, f"{OVER} {FAR} is no file"),
    "a folder in its place": (
        [rename(NEWEST, FAR), folder_at(NEWEST)], FAR, 12, f"{OVER} {NEWEST} is no file"
    ),
    "garbage of a later step": ([put(FAR, b"PK\3\4")], NEWEST, 12, f"{OVER} {FAR} does not end in"),
    "the weights of the best": ([copy("best.ckpt", FAR)], NEWEST, 12, "passed over"),
    "damaged, and a copy is good": (
        [copy(NEWEST, FAR), damage(NEWEST)], FAR, 12, f"{OVER} {NEWEST} does not match its checksum"
    ),
    "a damaged copy": ([copy(NEWEST, FAR), damage(FAR)], NEWEST, 12, "passed over"),
    "the newest is gone": (
        [lambda checkpoints: (checkpoints / NEWEST).unlink()], OLDER, 8, f"{OVER} {NEWEST} is missing;"
    ),
    "an older one in the newest's place": (
        [rename(OLDER, NEWEST)], NEWEST, 8, f"{OVER} {NEWEST} is missing; the newest good one"
    ),
}  # fmt: skip
"""What is done, which file is gone on from, its step, and a part of what is said."""


FEW_NAMES = {
    "the newest, copied",
    "swapped",
    "an endless number alone",
    "the newest is gone",
    "a folder",
}


@pytest.mark.parametrize(("do", "name", "step", "said"), cases(NAMES, FEW_NAMES))
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
    assert load_model(folder).decoder is not None


@pytest.mark.parametrize("do", cases({name: row[:1] for name, row in NAMES.items()}, {"swapped"}))
def test_a_run_with_other_names_ends_as_the_unbroken_one(folder: Path, do: list[Do]) -> None:
    for change in do:
        change(folder / "checkpoints")

    done = resume(folder)

    assert done.code == 0, done.stderr
    assert differences(trained(), folder) == []
    steps = {path.name: step_inside(path) for path in newest_first(folder / "checkpoints")}
    assert steps.pop(NEWEST) == 12
    assert steps in ({OLDER: 8}, {}), "misnamed still, or lost"


@pytest.mark.slow
def test_who_dies_before_the_names_are_right_can_go_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swap(folder / "checkpoints")
    shutil.copy(folder / "checkpoints" / OLDER, folder / "checkpoints" / FAR)

    def die(checkpoints: Path) -> list[tuple[str, str]]:
        raise SystemError("power cut")

    with monkeypatch.context() as cut:
        cut.setattr(checkpoint_keeper, "fix_names", die)
        with pytest.raises(SystemError):
            resume(folder)
    assert (folder / "checkpoints" / OLDER).exists() != (folder / "checkpoints" / FAR).exists()
    done = resume(folder)

    assert done.code == 0, done.stderr
    assert differences(trained(), folder) == []


@pytest.mark.slow
def test_two_ranks_go_on_from_the_same_step(tmp_path: Path) -> None:
    """The second reads the file while the first puts the names right."""
    argv = options(tmp_path, run__name="run", trainer__devices="2", trainer__strategy="ddp")
    done = finish(start(*argv), timeout=300)
    assert done.code == 0, done.stderr
    unbroken = tmp_path / "runs" / "run"
    copied = Path(shutil.copytree(unbroken, tmp_path / "copied"))
    (copied / "summary.json").unlink()
    (copied / "checkpoints" / NEWEST).unlink()
    (copied / "checkpoints" / OLDER).rename(copied / "checkpoints" / step_name(9))
    (copied / "checkpoints" / OLDER).mkdir()

    done = finish(start("--resume", str(copied)), timeout=300)

    assert done.code == 0, done.stderr
    assert f"from {step_name(9)}, which holds step 8, not 9: passed over" in done.stdout
    assert differences(unbroken, copied) == []


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
        fix_names(tmp_path)
    except KeyboardInterrupt:
        found = {step_inside(path) for path in newest_first(tmp_path)} - {None}
        assert found == inside, "a step is lost"
    monkeypatch.setattr(Path, "rename", plain)
    fix_names(tmp_path)

    good = {path.name: step_inside(path) for path in newest_first(tmp_path)}
    assert good == {step_name(step): step for step in inside}
    assert len(list(tmp_path.iterdir())) == len(steps), "a file is lost"
