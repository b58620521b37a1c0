"""A log on a full disk ends no run and changes nothing that it computes; the end says what the log lacks."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TextIO

import pytest

from moe_ffn.cli.exit import EXIT_BAD_INPUT, EXIT_FAILED, exit_on_bad_input
from moe_ffn.files import WriteFailures
from tests.helpers.own_disk import ALONE, mounting
from tests.helpers.programs import python_words
from tests.helpers.same_run import require_same
from tests.helpers.tiny_runs import (
    finish,
    finished_copy,
    lasting_folder,
    options,
    run,
    run_here,
    start_command,
)

FULL = "No space left on device; not all that was printed is there"
ALL_OF_IT = '>> "$DISK/log" 2>&1'
OUT, ERR = '>> "$DISK/log"', '2>> "$DISK/log"'
FILLED = 'cat /dev/zero > "$DISK/filler" 2> /dev/null; '
"""Not a byte is left from the beginning; otherwise 4096 of them."""


def alone(
    disk: Path, redirect: str, program: str, *argv: str, before: str = FILLED, size: str = "4k"
) -> subprocess.Popen[str]:
    """The command line of a program whose log is on a disk of its own, which nobody else sees."""
    disk.mkdir(exist_ok=True)
    script = (
        f'{mounting(disk, size)} && {before} "$@" {redirect}; code=$?; cat "$DISK/log"; exit $code'
    )
    command = [*ALONE, script, "sh", sys.executable, *python_words(program), *argv]
    return start_command(command, DISK=str(disk))


@cache
def plain_run() -> Path:
    """A run whose log is read."""
    folder = lasting_folder()
    done = run_here(*options(folder, run__name="run"))
    assert done.code == 0, done.stderr
    return folder / "runs" / "run"


def test_what_is_said_of_a_disk_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full: TextIO
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        monkeypatch.setattr(sys, "__stderr__", full)

        def complains(_: object) -> int:
            failures = WriteFailures(Path("metrics.jsonl"))
            failures.failed(OSError(28, "No space left on device"))
            failures.succeeded()
            return 0

        assert exit_on_bad_input(complains) == EXIT_FAILED
    assert capsys.readouterr().out == f"error: standard error: {FULL}\n"


CASES = {
    "both": (ALL_OF_IT, FILLED, ()),
    "both, after some lines": (ALL_OF_IT, 'head -c 3500 /dev/zero > "$DISK/log"; ', ()),
    "standard error": (ERR, FILLED, ()),
    "standard error, after some lines": (ERR, 'head -c 3900 /dev/zero > "$DISK/log"; ', ()),
    "standard output": (OUT, FILLED, ()),
    "unbuffered": (f"{ALL_OF_IT}", f"{FILLED} PYTHONUNBUFFERED=1; export PYTHONUNBUFFERED; ", ()),
    "alarms and wandb": (
        ALL_OF_IT,
        FILLED,
        ("--logging.alarms.router_logit", "0.01", "--logging.wandb.mode", "offline"),
    ),
    "two processes": (ALL_OF_IT, FILLED, ("--trainer.devices", "2", "--trainer.strategy", "ddp")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_training_comes_to_its_end(tmp_path: Path, name: str) -> None:
    redirect, before, more = CASES[name]
    argv = (*options(tmp_path, run__name="run"), *more)

    done = finish(alone(tmp_path / "disk", redirect, "experiments.train", *argv, before=before))

    assert done.code == EXIT_FAILED, done
    folder = tmp_path / "runs" / "run"
    if not more:
        require_same(plain_run(), folder)
    assert (folder / "summary.json").is_file()
    assert (folder / "report.html").is_file()
    said = {OUT: f"error: standard output: {FULL}", ERR: f"error: standard error: {FULL}"}
    assert said.get(redirect, "") in done.stderr + done.stdout


@pytest.mark.slow
def test_a_run_on_the_same_full_disk_goes_on_in_a_good_place(tmp_path: Path) -> None:
    argv = options(tmp_path, run__output_dir=str(tmp_path / "disk" / "runs"), run__name="run")
    copied = tmp_path / "copied"
    # Its checkpoints, and then its log, find no room.
    script = f"{ALL_OF_IT}; code=$?; cp -a \"$DISK/runs/run\" '{copied}'; (exit $code)"

    process = alone(tmp_path / "disk", script, "experiments.train", *argv, before="", size="500k")
    done = finish(process)

    assert done.code == EXIT_FAILED, done
    resumed = run("--resume", str(copied))
    assert resumed.code == 0, resumed.stderr
    require_same(plain_run(), copied)


@pytest.mark.slow
def test_a_disk_with_room_again_has_the_end_of_the_log(tmp_path: Path) -> None:
    script = '(while [ ! -e "$DISK/../runs/run/checkpoints" ]; do sleep 0.05; done; rm "$DISK/filler") & '

    done = finish(
        alone(
            tmp_path / "disk", ALL_OF_IT, "experiments.train", *options(tmp_path, run__name="run"),
            before=FILLED + script, size="64k",
        )
    )  # fmt: skip

    assert done.code == EXIT_FAILED
    assert "Results in " in done.stdout
    assert f"error: standard error: {FULL}" in done.stdout
    require_same(plain_run(), tmp_path / "runs" / "run")


PROGRAMS = {
    "a text": (("generate", "RUN", "--prompt", "a"), EXIT_FAILED),
    "a trace": (("trace", "RUN", "--text", "a", "--html", "page.html"), EXIT_FAILED),
    "a page": (("report", "RUN", "--output", "page.html"), EXIT_FAILED),
    "a comparison": (("compare", "RUN", "--markdown", "page.html"), EXIT_FAILED),
    "a watched page": (("report", "--watch", "RUN", "--output", "page.html"), EXIT_FAILED),
    "a mistake": (("train", "--sed", "1"), EXIT_BAD_INPUT),
    "a mistake in a run": (("generate", "RUN/checkpoints", "--prompt", "a"), EXIT_BAD_INPUT),
    "a finished run": (("train", "--resume", "RUN"), EXIT_BAD_INPUT),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_other_programs_do_their_work(tmp_path: Path, name: str) -> None:
    (program, *argv), code = PROGRAMS[name]
    folder, page = finished_copy(tmp_path), tmp_path / "page.html"
    argv = [word.replace("RUN", str(folder)).replace("page.html", str(page)) for word in argv]

    done = finish(alone(tmp_path / "disk", ALL_OF_IT, f"moe_ffn.cli.{program}", *argv))

    assert (done.code, done.stderr) == (code, "")
    assert page.is_file() == (str(page) in argv)


RAISING = """
from moe_ffn.cli.exit import exit_on_bad_input

def main(argv):
    print("a line")
    raise RuntimeError("of the program")

raise SystemExit(exit_on_bad_input(main))
"""


@pytest.mark.parametrize(
    "redirect",
    [
        ">/dev/full 2>/dev/full",
        *(pytest.param(one, marks=pytest.mark.slow) for one in (">/dev/full", "2>/dev/full")),
    ],
)
def test_a_traceback_that_cannot_be_written_is_the_same_end(redirect: str) -> None:
    command = ["sh", "-c", f'exec "$@" {redirect}', "sh", sys.executable, "-c", RAISING]

    done = finish(start_command(command))

    assert done.code == EXIT_FAILED
    assert ("RuntimeError: of the program" in done.stderr) == ("2>" not in redirect)
