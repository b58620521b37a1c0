"""A damaged, foreign or hostile checkpoint is refused in one line with its name and the reason, or passed
over for the newest good one; none is loaded silently, and no code in it is run.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ffn.config.errors import ConfigError
from moe_ffn.runs.folder import CHECKPOINTS_FOLDER
from moe_ffn.runs.reader import load_model
from moe_ffn.training.recovery.checkpoint_file import (
    read_checkpoint,
    write_checkpoint,
)
from tests.helpers.cases import cases
from tests.helpers.copied_run import Do, rewrite, start_of
from tests.helpers.damages import cut, garbage, holding
from tests.helpers.nobody import nobody, open_place
from tests.helpers.same_run import require_same
from tests.helpers.tiny_runs import (
    BEST,
    NEWEST,
    OLDER,
    finished_copy,
    run_here,
    trained,
    unfinished_copy,
)

MARKER = "code-was-run"
"""What the code in a hostile file makes, in the current folder."""


@pytest.fixture(autouse=True)
def _no_code_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / MARKER).exists(), "code in the file was run"


# -- what is done to a checkpoint


class Hostile:
    """Whoever unpickles it runs a command."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {MARKER}",)


HOSTILE: Any = {"state_dict": Hostile()}


def instead(make: Do) -> Do:
    """Something that is no file."""

    def do(path: Path) -> None:
        path.unlink()
        make(path)

    return do


def with_identity(path: str, value: Any) -> Do:
    """Of another model or other data; its checksum is right."""
    *parts, last = path.split(".")

    def change(values: dict[str, Any]) -> None:
        place = values["identity"]
        for part in parts:
            place = place[part]
        place[last] = value

    return lambda path: rewrite(path, change)


CUT_SHORT = "does not end in its checksum: it was cut short"
UNSEALED = "does not end in its checksum"
WEIGHTS_ARE_GOOD = True
"""Only what a run needs to go on is damaged, and the model can be used still."""
DAMAGES: dict[str, tuple[Do, str, bool]] = {
    **{f"cut to {tenths}/10": (cut(tenths / 10), CUT_SHORT, False) for tenths in (1, 5, 9)},
    "without its last byte": (cut(1), CUT_SHORT, False),
    "empty": (holding(b""), "is empty", False),
    "garbage of the same size": (garbage, UNSEALED, False),
    "zeros of the same size": (lambda p: p.write_bytes(bytes(p.stat().st_size)), UNSEALED, False),
    "one byte more": (lambda p: p.write_bytes(p.read_bytes() + b"x"), "checksum", False),
    "of a model of other sizes": (
        with_identity("model.d_model", 32), "model.d_model 32, but this run has 16", False
    ),
    "of a model of the same sizes": (
        with_identity("model.ffn.router.k", 1), "model.ffn.router.k 1, but", False
    ),
    "of another vocabulary": (
        with_identity("data.tokenizer.sha256", "0" * 64), "data.tokenizer.sha256", False
    ),
    "of another corpus": (
        with_identity("data.corpus.sha256", "0" * 64), "data.corpus.sha256", WEIGHTS_ARE_GOOD
    ),
    "without its loops": (
        lambda p: rewrite(p, lambda values: values.pop("loops", None)), "lacks 'loops'", WEIGHTS_ARE_GOOD
    ),
    "a pickle that runs code": (holding(pickle.dumps(HOSTILE)), UNSEALED, False),
    "an archive that runs code": (lambda p: torch.save(HOSTILE, p), UNSEALED, False),
    "a sealed archive that runs code": (
        lambda p: write_checkpoint(HOSTILE, p), "is no checkpoint of", False
    ),
    "a folder": (instead(Path.mkdir), "no file, but", False),
    "a pipe": (instead(os.mkfifo), "no file, but", False),
    "a link to a device without end": (instead(lambda p: p.symlink_to("/dev/zero")), "no file, but", False),
    "a link to nothing": (instead(lambda p: p.symlink_to("nowhere")), "No such file", False),
    "a link to itself": (instead(lambda p: p.symlink_to(p.name)), "symbolic links", False),
}  # fmt: skip
"""What is done, a part of what is said of it, and whether the model can be used still."""
QUICK = (
    "cut to 5/10",
    "of another vocabulary",
    "without its loops",
    "a sealed archive that runs code",
)


@pytest.mark.parametrize(("damage", "reason", "weights_are_good"), cases(DAMAGES, QUICK))
def test_a_damaged_checkpoint(
    tmp_path: Path, damage: Do, reason: str, weights_are_good: bool
) -> None:
    """One good checkpoint is found behind the damaged ones, and said to be; none is loaded where none is."""
    folder = finished_copy(tmp_path)
    checkpoints = folder / CHECKPOINTS_FOLDER

    damage(checkpoints / NEWEST)
    check_start(folder, reason)

    damage(checkpoints / BEST)
    loaded, line = load(folder)
    if weights_are_good:
        assert not line, f"it can be used, but: {line}"
    else:
        values = read_checkpoint(checkpoints / OLDER)["state_dict"]
        for name, value in loaded.items():
            assert torch.equal(value, values[f"decoder.{name}"]), "other weights were loaded"
        for name in (BEST, NEWEST):
            check_sentence(line, name, reason)

    damage(checkpoints / OLDER)
    with pytest.raises(ConfigError) as refused:
        start_of(folder)
    check_sentence(str(refused.value), NEWEST, reason)
    if not weights_are_good:
        with pytest.raises(ConfigError) as refused:
            load_model(folder)
        check_sentence(str(refused.value), BEST, reason)


def check_start(folder: Path, reason: str) -> None:
    """It is that of the older checkpoint, and says of the newest why it is not gone on from."""
    start = start_of(folder)
    assert start.checkpoint == folder / CHECKPOINTS_FOLDER / OLDER
    (said,) = start.skipped
    check_sentence(said, NEWEST, reason)


def check_sentence(said: str, name: str, reason: str) -> None:
    assert "\n" not in said.removesuffix("\n"), said
    assert f"{name} " in said, said
    assert reason in said, said
    # Torch's advice on how to load a file with the code in it.
    assert "weights_only" not in said, said
    assert "safe_globals" not in said, said


def load(folder: Path) -> tuple[dict[str, Any], str]:
    """The weights of a run, and what was said of them."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        return load_model(folder).decoder.state_dict(), said.getvalue()


def test_a_checkpoint_that_may_not_be_read() -> None:
    with open_place() as place:
        folder = finished_copy(place)
        load(folder)  # so that nothing has to be imported as nobody
        start_of(folder)
        (folder / CHECKPOINTS_FOLDER / NEWEST).chmod(0)
        with nobody():
            check_start(folder, "cannot be read (Permission denied)")


# -- the programs


@pytest.mark.slow
def test_a_run_goes_on_from_the_one_before_a_damaged_one(tmp_path: Path) -> None:
    folder = unfinished_copy(tmp_path)
    os.truncate(folder / CHECKPOINTS_FOLDER / NEWEST, 1000)

    done = run_here("--resume", str(folder))

    assert done.code == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("resuming "))
    assert f"from {OLDER}; skipped, since {NEWEST} does not end in its checksum" in line
    require_same(trained(), folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "argv"),
    [("train", ("--resume", "RUN")), ("generate", ("RUN",)), ("trace", ("RUN", "--text", "the cat"))],
)  # fmt: skip
def test_where_all_are_hostile_no_program_runs(
    tmp_path: Path, program: str, argv: tuple[str, ...]
) -> None:
    folder = unfinished_copy(tmp_path)
    for path in (folder / CHECKPOINTS_FOLDER).iterdir():
        write_checkpoint(HOSTILE, path)
    words = [str(folder) if word == "RUN" else word for word in argv]

    done = run_here(*words, program=f"moe_ffn.cli.{program}")

    assert done.code == 2, done.stderr
    (line,) = done.own_lines
    assert line.startswith("error: "), line
