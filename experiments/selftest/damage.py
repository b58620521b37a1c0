"""Checkpoints and run files that are damaged, of something else, or hostile."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from experiments.run_folder import (
    ALARMS_FILE,
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    FACTS_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    SUMMARY_FILE,
    TOKENIZER_FILE,
)
from experiments.selftest.case import Case, Chapter
from experiments.selftest.same_run import differences
from experiments.selftest.scene import Finished, options, run
from moe_ffn.errors import ConfigError

OLDER, NEWEST, BEST = "step_00000008.ckpt", "step_00000012.ckpt", "best.ckpt"
NUM_TRUNCATIONS, NUM_BIT_FLIPS = 10, 100


@dataclass(frozen=True)
class Damage:
    """Something done to a checkpoint."""

    name: str
    do: Callable[[Path], object]
    reason: str
    """A part of what has to be said of it."""
    weights_are_good: bool = False
    """Whether only what a run needs to go on is damaged, and the model can be used still."""


# -- the run that is damaged


@cache
def _finished_run() -> Path:
    """A tiny run with checkpoints of steps 8 and 12, made once; nobody writes to it."""
    folder = Path(_kept_folder().name)
    done = run(*options(folder, run__name="run", logging__alarms__router_logit="0.01"))
    assert done.code == 0, done.stderr
    found = folder / "runs" / "run"
    names = sorted(path.name for path in (found / CHECKPOINTS_FOLDER).iterdir())
    assert names == [BEST, OLDER, NEWEST], names
    return found


@cache
def _kept_folder() -> tempfile.TemporaryDirectory[str]:
    """Removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="selftest-damage-")


@cache
def _expected() -> tuple[dict[str, Any], dict[str, Any]]:
    """What that run has to agree in with a checkpoint: its identity, and the state of its model."""
    from experiments.assemble import build_module
    from experiments.command_line import read_config
    from experiments.config import TrainConfig
    from experiments.resuming.identity import identity
    from moe_ffn.data.prepare import prepare

    config = read_config(_finished_run() / CONFIG_FILE, TrainConfig)
    data = prepare(config.data, progress=False)
    return identity(config, data), build_module(config, data).state_dict()


def _copy(folder: Path) -> Path:
    """The run, in a folder of the case's own."""
    copied = folder / "run"
    shutil.copytree(_finished_run(), copied)
    return copied


# -- damages


def _damages(marker: Path) -> list[Damage]:
    """All but the bit flips.

    Args:
        marker: what the code in a hostile file would make.
    """
    return [
        *[_truncation(number) for number in range(NUM_TRUNCATIONS)],
        Damage("empty", lambda path: path.write_bytes(b""), "is empty"),
        Damage("garbage of the same size", _garbage, "does not end in its checksum"),
        Damage("zeros of the same size", _zeros, "does not end in its checksum"),
        Damage("one byte more", lambda path: path.write_bytes(path.read_bytes() + b"x"), "checksum"),
        Damage("of a model of other sizes", _other_sizes, "model.d_model 32, but this run has 16"),
        Damage("of a model of the same sizes", _other_model, "model.ffn.router.k 1, but"),
        Damage("of another vocabulary", _other_vocabulary, "data.tokenizer.sha256"),
        Damage(
            "of another corpus", _other_corpus, "data.corpus.sha256", weights_are_good=True
        ),
        *[
            Damage(f"without '{key}'", _without(key), f"lacks '{key}'", key not in ("state_dict", "identity"))
            for key in (
                "state_dict", "identity", "optimizer_states", "lr_schedulers", "loops", "callbacks",
                "epoch", "global_step",
            )
        ],
        Damage("without a weight", _without_weight, "lacks the weight"),
        Damage("with a weight too many", _weight_too_many, "which this model lacks"),
        Damage("with a weight of another shape", _reshaped, "in another shape"),
        Damage("with a weight of whole numbers", _rounded, "as torch.int64"),
        Damage("with NaN in a weight", _nan, "holds NaN"),
        Damage("a list in the place of the state", _a_list, "holds a list"),
        Damage("a pickle that runs code", _pickle(marker), "does not end in its checksum"),
        Damage("an archive that runs code", _archive(marker), "does not end in its checksum"),
        Damage("a sealed archive that runs code", _sealed(marker), "GLOBAL posix.system"),
        Damage("a sealed pickle that runs code", _sealed_pickle(marker), "is no checkpoint of"),
        Damage("a folder", _folder, "is no file"),
        Damage("a pipe", _pipe, "is no file"),
        Damage("a link to a device without end", _link("/dev/zero"), "is no file"),
        Damage("a link to nothing", _link("nowhere"), "No such file"),
        Damage("a link to itself", lambda path: _link(path.name)(path), "symbolic links"),
    ]  # fmt: skip


def _truncation(number: int) -> Damage:
    """To a tenth of its size, two tenths and on; the last one lacks a byte."""
    tenths = number + 1

    def cut(path: Path) -> None:
        size = path.stat().st_size
        os.truncate(
            path, size * tenths // NUM_TRUNCATIONS if tenths < NUM_TRUNCATIONS else size - 1
        )

    name = (
        f"cut to {tenths}/{NUM_TRUNCATIONS}"
        if tenths < NUM_TRUNCATIONS
        else "without its last byte"
    )
    return Damage(name, cut, "does not end in its checksum: it was cut short")


def _garbage(path: Path) -> None:
    import random

    path.write_bytes(random.Random(0).randbytes(path.stat().st_size))


def _zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _rewritten(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """A checkpoint whose checksum is right."""

    def rewrite(path: Path) -> None:
        from moe_ffn.training.checkpoint_file import read_checkpoint, write_checkpoint

        values = read_checkpoint(path)
        change(values)
        write_checkpoint(values, path)

    return rewrite


def _other_sizes(path: Path) -> None:
    def change(values: dict[str, Any]) -> None:
        values["identity"]["model"]["d_model"] = 32
        state = values["state_dict"]
        values["state_dict"] = {name: value.repeat(2, *[1] * (value.ndim - 1)) if value.ndim else value
                                for name, value in state.items()}  # fmt: skip

    _rewritten(change)(path)


def _other_model(path: Path) -> None:
    def change(values: dict[str, Any]) -> None:
        values["identity"]["model"]["ffn"]["router"]["k"] = 1

    _rewritten(change)(path)


def _other_vocabulary(path: Path) -> None:
    def change(values: dict[str, Any]) -> None:
        values["identity"]["data"]["tokenizer"]["sha256"] = "0" * 64

    _rewritten(change)(path)


def _other_corpus(path: Path) -> None:
    def change(values: dict[str, Any]) -> None:
        values["identity"]["data"]["corpus"]["sha256"] = "0" * 64

    _rewritten(change)(path)


def _without(key: str) -> Callable[[Path], None]:
    return _rewritten(lambda values: values.pop(key))


def _weights(change: Callable[[dict[str, Any], str], object]) -> Callable[[Path], None]:
    """The first matrix of the decoder is changed."""

    def on_values(values: dict[str, Any]) -> None:
        state = values["state_dict"]
        change(state, next(name for name, value in state.items() if value.ndim > 1))

    return _rewritten(on_values)


def _without_weight(path: Path) -> None:
    _weights(lambda state, name: state.pop(name))(path)


def _weight_too_many(path: Path) -> None:
    _weights(lambda state, name: state.update({f"{name}_2": state[name]}))(path)


def _reshaped(path: Path) -> None:
    _weights(lambda state, name: state.update({name: state[name][1:].clone()}))(path)


def _rounded(path: Path) -> None:
    _weights(lambda state, name: state.update({name: state[name].long()}))(path)


def _nan(path: Path) -> None:
    _weights(lambda state, name: state[name].view(-1)[-1:].fill_(float("nan")))(path)


def _a_list(path: Path) -> None:
    from moe_ffn.training.checkpoint_file import write_checkpoint

    anything: Any = [1, 2, 3]
    write_checkpoint(anything, path)


class _Hostile:
    """Whoever unpickles it runs a command."""

    def __init__(self, marker: Path) -> None:
        self.command = f"touch '{marker}'"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def _pickle(marker: Path) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(pickle.dumps({"state_dict": _Hostile(marker)}))


def _archive(marker: Path) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        import torch

        torch.save({"state_dict": _Hostile(marker)}, path)

    return write


def _sealed(marker: Path) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        from moe_ffn.training.checkpoint_file import write_checkpoint

        write_checkpoint({"state_dict": _Hostile(marker)}, path)

    return write


def _sealed_pickle(marker: Path) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        import hashlib

        content = pickle.dumps({"state_dict": _Hostile(marker)})
        path.write_bytes(content + b"sha256:" + hashlib.sha256(content).hexdigest().encode())

    return write


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _link(target: str) -> Callable[[Path], None]:
    def link(path: Path) -> None:
        path.unlink()
        path.symlink_to(target)

    return link


# -- what has to come of it


def _checkpoint_case(damage: Damage) -> Callable[[Path], str | None]:
    def check(folder: Path) -> str:
        marker = folder / "code was run"
        mine = next(d for d in _damages(marker) if d.name == damage.name)
        found = _require_passed_over(_copy(folder), mine)
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
    said = _require_start(folder, damage)
    damage.do(checkpoints / BEST)
    loaded, line = _load(folder)
    if damage.weights_are_good:
        assert not line, f"it can be used, but: {line}"
    else:
        assert _same_weights(loaded, checkpoints / OLDER), "other weights were loaded, silently"
        for name in (BEST, NEWEST):
            assert f"{name} " in line, f"'{name}' is not named: {line}"
        assert damage.reason in line, f"the reason is not given: {line}"
    damage.do(checkpoints / OLDER)
    _require_refused(lambda: _start(folder), damage, NEWEST)
    if not damage.weights_are_good:
        _require_refused(lambda: _load(folder), damage, BEST)
    return said


def _require_start(folder: Path, damage: Damage) -> str:
    start = _start(folder)
    assert start.checkpoint is not None
    assert start.checkpoint.name == OLDER, f"went on from {start.checkpoint.name}"
    (said,) = start.passed_over
    assert said.startswith(f"{NEWEST} "), said
    assert damage.reason in said, f"the reason is not given: {said}"
    assert "\n" not in said, said
    return said


def _require_refused(read: Callable[[], object], damage: Damage, name: str) -> None:
    try:
        read()
    except ConfigError as error:
        said = str(error)
        assert "\n" not in said, said
        assert f"{name} " in said, said
        assert damage.reason in said, said
    else:
        raise AssertionError("all are damaged, and one was loaded")


def _start(folder: Path) -> Any:
    from experiments.resuming.start import find_start

    return find_start(folder, *_expected())


def _load(folder: Path) -> tuple[Any, str]:
    """The model of a run, and what was said of it."""
    from experiments.saved_run import load_run

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        return load_run(folder).decoder.state_dict(), said.getvalue()


def _same_weights(state: Any, checkpoint: Path) -> bool:
    import torch

    from moe_ffn.training.checkpoint_file import read_checkpoint

    values = read_checkpoint(checkpoint)["state_dict"]
    return all(torch.equal(value, values[f"decoder.{name}"]) for name, value in state.items())


def _bit_flips(folder: Path) -> str:
    """Spread over the whole file, the last byte among them."""
    from moe_ffn.training.checkpoint_file import CheckpointError, read_checkpoint

    copied = _copy(folder)
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
                _require_start(copied, Damage("", _zeros, "checksum"))
    assert refused == NUM_BIT_FLIPS, f"{NUM_BIT_FLIPS - refused} flips were loaded silently"
    return f"{refused} of {NUM_BIT_FLIPS} refused"


def _unreadable(folder: Path) -> str:
    """Nobody's permission; who is root becomes somebody else for it."""
    damage = Damage("", lambda path: path.chmod(0), "cannot be read (Permission denied)")
    with tempfile.TemporaryDirectory(prefix="selftest-") as open_to_all:
        Path(open_to_all).chmod(0o755)
        copied = _copy(Path(open_to_all))
        _load(copied)  # so that nothing has to be imported as somebody else
        _start(copied)
        damage.do(copied / CHECKPOINTS_FOLDER / NEWEST)
        with _nobody():
            return _require_start(copied, damage)


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
    copied = _unfinished(folder)
    os.truncate(copied / CHECKPOINTS_FOLDER / NEWEST, 1000)
    done = run("--resume", str(copied))
    assert done.code == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("resuming ")]
    assert len(lines) == 1, done.stdout
    assert f"from {OLDER}: passed over {NEWEST} does not end in its checksum" in lines[0], lines
    found = differences(_finished_run(), copied)
    assert not found, f"the run ends otherwise than the unbroken one: {found[:3]}"
    return "ends as the unbroken run"


def _program_refuses(folder: Path) -> str:
    copied = _unfinished(folder)
    marker = folder / "code was run"
    for path in (copied / CHECKPOINTS_FOLDER).iterdir():
        _sealed(marker)(path)
    for program, *argv in (
        ("experiments.train", "--resume", str(copied)),
        ("experiments.generate", str(copied)),
        ("experiments.trace", str(copied), "--text", "the cat"),
    ):
        done = run(*argv, program=program)
        errors = [line for line in done.stderr.splitlines() if not line.startswith("data: ")]
        assert done.code == 2, f"{program}: exit code {done.code}: {done.stderr}"
        assert len(errors) == 1, f"{program}: {done.stderr}"
        assert errors[0].startswith("error: "), done.stderr
    assert not marker.exists(), "code in the file was run"
    return "train, generate and trace: exit code 2, one line each, no code run"


def _unfinished(folder: Path) -> Path:
    copied = _copy(folder)
    (copied / SUMMARY_FILE).unlink()
    return copied


# -- the other files of a run


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _noise(path: Path) -> None:
    _garbage(path)


def _noise_in_the_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 8] = b'\x00\xff"\n\xfe{[\x80'[: len(content) - middle]
    path.write_bytes(content)


def _nested(path: Path) -> None:
    path.write_bytes(b"[" * 100_000 + b"\n")


def _long_cell(path: Path) -> None:
    path.write_bytes(b'"' + b"9" * 300_000 + b"\n")


def _another_number(path: Path) -> None:
    text = path.read_text()
    assert "learning_rate: 0.003" in text
    path.write_text(text.replace("learning_rate: 0.003", "learning_rate: 0.007"))


FILE_DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut in two": _cut,
    "empty": lambda path: path.write_bytes(b""),
    "garbage": _noise,
    "garbage in the middle": _noise_in_the_middle,
    "brackets without end": _nested,
    "one word without end": _long_cell,
    "removed": lambda path: path.unlink(),
}
FILES = (CONFIG_FILE, FACTS_FILE, TOKENIZER_FILE, METRICS_FILE, SAMPLES_FILE, ALARMS_FILE)


def _file_case(name: str, damage: Callable[[Path], object]) -> Callable[[Path], str | None]:
    """It is refused by its name, or mended with a line, or nothing is missing in the end."""

    def check(folder: Path) -> str:
        copied = _unfinished(folder)
        (copied / CHECKPOINTS_FOLDER / NEWEST).unlink()
        damage(copied / name)
        done = _run_here("--resume", str(copied))
        if done.code == 2:
            errors = [line for line in done.stderr.splitlines() if not line.startswith("data: ")]
            assert len(errors) == 1, done.stderr
            assert name in errors[0] or str(copied) in errors[0], done.stderr
            return f"refused: {errors[0].removeprefix('error: ').replace(str(copied), 'RUN')}"
        assert done.code == 0, done.stderr
        said = [line for line in done.stderr.splitlines() if name in line]
        assert len(said) <= 1, said
        lost = differences(_finished_run(), copied)
        assert said or not lost, f"silently, {lost[:2]}"
        return f"mended: {said[0].replace(str(copied), 'RUN')}" if said else "nothing is lost"

    return check


def _changed_tokenizer(folder: Path) -> str:
    """One flipped bit in the vocabulary of a BPE makes other text of the same weights."""
    place = folder / "bpe"
    done = run(
        *options(
            place,
            run__name="run",
            data__tokenizer="{type: bpe, vocab_size: 512}",
            trainer__max_steps="4",
        )
    )
    assert done.code == 0, done.stderr
    path = place / "runs" / "run" / TOKENIZER_FILE
    good = path.read_bytes()
    _load(path.parent)
    silent, num_flips = 0, 40
    for number in range(num_flips):
        damaged = bytearray(good)
        damaged[(len(good) - 1) * number // (num_flips - 1)] ^= 1 << number % 7
        path.write_bytes(damaged)
        try:
            _load(path.parent)
        except ConfigError as error:
            said = str(error)
            assert TOKENIZER_FILE in said or "data.tokenizer" in said, said
        else:
            import json

            silent += json.loads(damaged) != json.loads(good)
    assert not silent, f"{silent} of {num_flips} flipped bits were loaded silently"
    return f"{num_flips} of {num_flips} flipped bits refused, or without any effect"


def _run_here(*argv: str) -> Finished:
    """The program in this process, which has imported all it needs."""
    from experiments.exit import exit_on_bad_input
    from experiments.train import main

    stdout, stderr = io.StringIO(), io.StringIO()
    before, sys.argv = sys.argv, ["train.py", *argv]
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            code = exit_on_bad_input(main)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except Exception as error:
        last = "".join(traceback.format_exception_only(error)).strip()
        raise AssertionError(f"a traceback: {last}") from error
    finally:
        sys.argv = before
    return Finished(code, stdout.getvalue(), stderr.getvalue())


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
    for damage in _damages(Path()):
        yield Case(f"checkpoint: {damage.name}", _checkpoint_case(damage), damage.name in _SHORT)
    yield Case(f"checkpoint: {NUM_BIT_FLIPS} flipped bits", _bit_flips, short=True)
    yield Case("checkpoint: unreadable", _unreadable, short=True)
    yield Case("program: the newest is damaged", _program_goes_on)
    yield Case("program: all are hostile", _program_refuses)
    for name in FILES:
        for what, damage in FILE_DAMAGES.items():
            yield Case(f"{name}: {what}", _file_case(name, damage))
    yield Case(f"{CONFIG_FILE}: another number", _file_case(CONFIG_FILE, _another_number))
    yield Case(f"{TOKENIZER_FILE}: flipped bits", _changed_tokenizer)


CHAPTER = Chapter(
    "damage",
    "A damaged, foreign or hostile file is refused in one line with its name and the reason, or passed over "
    "for the newest good one; none is loaded silently, and no code in it is run",
    _cases,
)
