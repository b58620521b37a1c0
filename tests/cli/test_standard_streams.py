"""Output that cannot be written ends no program, and least of all training."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

import pytest

from moe_ffn.cli.exit import EXIT_FAILED, OutputFile, exit_on_bad_input
from moe_ffn.cli.train import main as train
from tests.helpers.programs import PROGRAMS

ROOT = Path(__file__).parents[2]
FULL = Path("/dev/full")

Own = Callable[[str, TextIO | None], None]


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Own]:
    """`own("stdout", file)` makes a file this process's own standard output, as a shell does."""
    files = []

    def put(name: str, file: TextIO | None) -> None:
        files.append(file)
        monkeypatch.setattr(sys, name, file)
        monkeypatch.setattr(sys, f"__{name}__", file)

    yield put
    for file in files:
        if file is not None:
            file.close()


def unread_pipe() -> TextIO:
    """What a program writes to in `program | head` once `head` has ended."""
    read, write = os.pipe()
    os.close(read)
    return os.fdopen(write, "w")


def exit_code(main: Callable[[Sequence[str]], int], *argv: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["program", *argv])
        return exit_on_bad_input(main)


def prints(argv: Sequence[str]) -> int:
    for _ in range(3):
        print("a line", flush=True)
    return 0


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_reader_of_a_help_page_may_go_away(
    name: str, own: Own, capsys: pytest.CaptureFixture[str]
) -> None:
    own("stdout", unread_pipe())

    assert exit_code(import_module(name).main, "--help") == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_help_page_that_no_disk_takes_is_a_failure(
    name: str, own: Own, capsys: pytest.CaptureFixture[str]
) -> None:
    own("stdout", FULL.open("w"))

    assert exit_code(import_module(name).main, "--help") == EXIT_FAILED
    assert capsys.readouterr().err == (
        "error: standard output: No space left on device; not all that was printed is there\n"
    )


def test_the_exit_code_of_a_mistake_stays(own: Own, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(_: Sequence[str]) -> int:
        return prints([]) + 3

    own("stdout", FULL.open("w"))

    assert exit_code(fails) == 3
    assert capsys.readouterr().err.startswith("error: standard output: ")


def test_a_full_standard_error_is_said_on_standard_output(
    own: Own, capsys: pytest.CaptureFixture[str]
) -> None:
    def complains(_: Sequence[str]) -> int:
        print("a line", file=sys.stderr)
        return 0

    own("stderr", FULL.open("w"))

    assert exit_code(complains) == EXIT_FAILED
    assert capsys.readouterr().out == (
        "error: standard error: No space left on device; not all that was printed is there\n"
    )


def test_a_closed_stream_goes_nowhere(own: Own) -> None:
    def asks(_: Sequence[str]) -> int:
        return int(sys.stdout.isatty() or sys.stderr.isatty())

    own("stdout", None)
    own("stderr", None)

    assert exit_code(asks) == 0
    for stream in (sys.stdout, sys.stderr):
        stream.close()


def test_a_reader_that_is_slow_gets_all_of_it() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    got = bytearray()

    def read_slowly() -> None:
        while block := os.read(read, 50_000):
            got.extend(block)
            time.sleep(0.001)

    reader = threading.Thread(target=read_slowly)
    reader.start()
    text = bytes(range(256)) * 2000  # several times what a pipe holds
    file = OutputFile(write)
    assert file.write(text) == len(text)
    os.close(write)
    reader.join()
    os.close(read)

    assert file.problem is None
    assert bytes(got) == text


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_training_ends_well_though_nothing_can_be_printed(
    stream: str, own: Own, tiny_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own(stream, FULL.open("w"))
    options = ["--config", str(tiny_yaml), "--data.cache_dir", str(tmp_path / "cache")]

    code = exit_code(train, *options, "--trainer.max_steps", "2", "--run.name", "mine")

    assert code == EXIT_FAILED
    name = {"stdout": "standard output", "stderr": "standard error"}[stream]
    printed: Any = capsys.readouterr()
    assert (printed.err + printed.out).splitlines()[-1].startswith(f"error: {name}: No space")
    summary = json.loads((tmp_path / "runs" / "mine" / "summary.json").read_text())
    assert summary["validation_loss"] > 0
    assert (tmp_path / "runs" / "mine" / "report.html").exists()


def test_an_unbuffered_stream_stays_one(own: Own) -> None:
    read, write = os.pipe()
    file = io.TextIOWrapper(os.fdopen(write, "wb", buffering=0), write_through=True)  # python -u
    own("stdout", file)

    def prints_half_a_line(_: Sequence[str]) -> int:
        print("half", end="")
        return 0 if os.read(read, 10) == b"half" else 1

    assert exit_code(prints_half_a_line) == 0
    os.close(read)


def test_a_process_whose_reader_went_away_ends_without_a_word() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "experiments.train", "--help"],
        cwd=ROOT,
        stdout=write,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(write)

    assert (done.returncode, done.stderr) == (0, b"")
