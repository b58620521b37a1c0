"""Checkpoints that are damaged, of something else, or hostile."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from experiments.selftest.case import Case, Chapter
from experiments.selftest.checkpoint_damages import Damage, damages, sealed_archive
from experiments.selftest.finished_run import (
    BEST,
    NEWEST,
    OLDER,
    finished_copy,
    finished_run,
    unfinished_copy,
)
from experiments.selftest.same_run import differences
from experiments.selftest.scene import run
from moe_ffn.errors import ConfigError
from moe_ffn.runs.folder import CHECKPOINTS_FOLDER, CONFIG_FILE

NUM_BIT_FLIPS = 100


def _checkpoint_case(damage: Damage) -> Callable[[Path], str | None]:
    def check(folder: Path) -> str:
        marker = folder / "code was run"
        mine = next(d for d in damages(marker) if d.name == damage.name)
        found = _require_passed_over(finished_copy(folder), mine)
        assert not marker.exists(), "code in the file was run"
        return found

    return check


def _require_passed_over(folder: Path, damage: Damage) -> str:
    """One good checkpoint is found behind the damaged ones, and said to be; none is loaded where none is.

    Returns:
        what was said of it.
    """
    checkpoints = folder / CHECKPOINTS_FOLDER
    damage.do(checkpoints / NEWEST)
    said = _require_start(folder, damage.reason)
    damage.do(checkpoints / BEST)
    loaded, line = _load(folder)
    if damage.weights_are_good:
        assert not line, f"it can be used, but: {line}"
    else:
        assert _same_weights(loaded, checkpoints / OLDER), "other weights were loaded, silently"
        for name in (BEST, NEWEST):
            assert f"{name} " in line, f"'{name}' is not named: {line}"
        assert damage.reason in line, f"the reason is not given: {line}"
        _require_no_advice(line)
    damage.do(checkpoints / OLDER)
    _require_refused(lambda: _start(folder), damage, NEWEST)
    if not damage.weights_are_good:
        _require_refused(lambda: _load(folder), damage, BEST)
    return said


def _require_start(folder: Path, reason: str) -> str:
    start = _start(folder)
    assert start.checkpoint is not None
    assert start.checkpoint.name == OLDER, f"went on from {start.checkpoint.name}"
    (said,) = start.passed_over
    assert said.startswith(f"{NEWEST} "), said
    assert reason in said, f"the reason is not given: {said}"
    assert "\n" not in said, said
    _require_no_advice(said)
    return said


def _require_no_advice(said: str) -> None:
    """Of how to load a file with the code in it, which is what torch says of one."""
    assert "weights_only" not in said, said
    assert "safe_globals" not in said, said


def _require_refused(read: Callable[[], object], damage: Damage, name: str) -> None:
    try:
        read()
    except ConfigError as error:
        said = str(error)
        assert "\n" not in said, said
        assert f"{name} " in said, said
        assert damage.reason in said, said
        _require_no_advice(said)
    else:
        raise AssertionError("all are damaged, and one was loaded")


@cache
def _expected() -> tuple[Any, dict[str, Any], Any]:
    """What that run has to agree in with a checkpoint: options, identity, and its module."""
    from moe_ffn.config_files import read_config
    from moe_ffn.data.prepare import prepare
    from moe_ffn.runs.assemble import build_module
    from moe_ffn.runs.config import TrainConfig
    from moe_ffn.runs.record import identity

    config = read_config(finished_run() / CONFIG_FILE, TrainConfig)
    data = prepare(config.data, progress=False)
    return config, identity(config, data), build_module(config, data)


def _start(folder: Path) -> Any:
    from moe_ffn.runs.start import find_start

    return find_start(folder, *_expected())


def _load(folder: Path) -> tuple[Any, str]:
    """The model of a run, and what was said of it."""
    from moe_ffn.runs.saved_model import load_model

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        return load_model(folder).decoder.state_dict(), said.getvalue()


def _same_weights(state: Any, checkpoint: Path) -> bool:
    import torch

    from moe_ffn.training.recovery.checkpoint_file import read_checkpoint

    values = read_checkpoint(checkpoint)["state_dict"]
    return all(torch.equal(value, values[f"decoder.{name}"]) for name, value in state.items())


def _bit_flips(folder: Path) -> str:
    """Spread over the whole file, the last byte among them."""
    from moe_ffn.training.recovery.checkpoint_file import CheckpointError, read_checkpoint

    copied = finished_copy(folder)
    path = copied / CHECKPOINTS_FOLDER / NEWEST
    good = path.read_bytes()
    refused = 0
    for number in range(NUM_BIT_FLIPS):
        damaged = bytearray(good)
        place = (len(good) - 1) * number // (NUM_BIT_FLIPS - 1)
        damaged[place] ^= 1 << number % 8
        path.write_bytes(damaged)
        try:
            read_checkpoint(path)
        except CheckpointError:
            refused += 1
            if number % 10 == 0:
                _require_start(copied, "checksum")
    assert refused == NUM_BIT_FLIPS, f"{NUM_BIT_FLIPS - refused} flips were loaded silently"
    return f"{refused} of {NUM_BIT_FLIPS} refused"


def _unreadable(folder: Path) -> str:
    """Nobody's permission; who is root becomes somebody else for it."""
    with tempfile.TemporaryDirectory(prefix="selftest-") as open_to_all:
        Path(open_to_all).chmod(0o755)
        copied = finished_copy(Path(open_to_all))
        _load(copied)  # so that nothing has to be imported as somebody else
        _start(copied)
        (copied / CHECKPOINTS_FOLDER / NEWEST).chmod(0)
        with _nobody():
            return _require_start(copied, "cannot be read (Permission denied)")


@contextlib.contextmanager
def _nobody() -> Iterator[None]:
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


# -- the program


def _program_goes_on(folder: Path) -> str:
    copied = unfinished_copy(folder)
    os.truncate(copied / CHECKPOINTS_FOLDER / NEWEST, 1000)
    done = run("--resume", str(copied))
    assert done.code == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("resuming ")]
    assert len(lines) == 1, done.stdout
    assert f"from {OLDER}: passed over {NEWEST} does not end in its checksum" in lines[0], lines
    found = differences(finished_run(), copied)
    assert not found, f"the run ends otherwise than the unbroken one: {found[:3]}"
    return "ends as the unbroken run"


def _program_refuses(folder: Path) -> str:
    copied = unfinished_copy(folder)
    marker = folder / "code was run"
    for path in (copied / CHECKPOINTS_FOLDER).iterdir():
        sealed_archive(marker)(path)
    for program, *argv in (
        ("experiments.train", "--resume", str(copied)),
        ("experiments.generate", str(copied)),
        ("experiments.trace", str(copied), "--text", "the cat"),
    ):
        done = run(*argv, program=program)
        assert done.code == 2, f"{program}: exit code {done.code}: {done.stderr}"
        assert len(done.own_lines) == 1, f"{program}: {done.stderr}"
        assert done.own_lines[0].startswith("error: "), done.stderr
    assert not marker.exists(), "code in the file was run"
    return "train, generate and trace: exit code 2, one line each, no code run"


_SHORT = {
    "cut to 5/10",
    "without its last byte",
    "empty",
    "of another vocabulary",
    "without 'loops'",
    "a sealed archive that runs code",
    "a pipe",
}


def _cases() -> Iterable[Case]:
    for damage in damages(Path()):
        yield Case(f"checkpoint: {damage.name}", _checkpoint_case(damage), damage.name in _SHORT)
    yield Case(f"checkpoint: {NUM_BIT_FLIPS} flipped bits", _bit_flips, short=True)
    yield Case("checkpoint: unreadable", _unreadable, short=True)
    yield Case("program: the newest is damaged", _program_goes_on)
    yield Case("program: all are hostile", _program_refuses)


CHAPTER = Chapter(
    "damage",
    "A damaged, foreign or hostile checkpoint is refused in one line with its name and the reason, or passed "
    "over for the newest good one; none is loaded silently, and no code in it is run.",
    _cases,
)
