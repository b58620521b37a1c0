"""No terminal, environment variable or full log ends a run, or changes what it does unsaid."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moe_ffn.cli.exit import exit_on_bad_input, prepare_streams
from moe_ffn.config.environment import (
    VARIABLES,
    check_environment,
    check_number_of_processes,
    is_first_rank,
)
from moe_ffn.config.errors import ConfigError, printable
from moe_ffn.training.monitoring.json_lines import Row, read_lines
from tests.helpers.programs import python_words
from tests.helpers.tiny_runs import (
    REPOSITORY,
    Finished,
    environment,
    finished_copy,
    lasting_folder,
    options,
    run,
    run_here,
    start,
)

MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
JOB = {"SLURM_JOB_ID": "1234", "SLURM_JOB_NAME": "train"}
TASK = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}
SHORT = {
    "trainer__max_steps": "3",
    "trainer__validate_every_n_steps": "2",
    "logging__every_n_steps": "1",
    "run__name": "run",
}


@pytest.fixture(autouse=True)
def _of_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may be inside a job of SLURM's."""
    for name in os.environ:
        if name in VARIABLES or name.startswith("SLURM_"):
            monkeypatch.delenv(name)


# -- variables of launchers


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK is '1' in the environment, but lightning sets"),
        ({"LOCAL_RANK": "1"}, "but lightning sets WORLD_SIZE and MASTER_ADDR and MASTER_PORT too;"),
        ({"LOCAL_RANK": "1"}, "or unset LOCAL_RANK"),
        ({"LOCAL_RANK": "0"}, "unset LOCAL_RANK"),
        ({"LOCAL_RANK": "1", "RANK": "1"}, "unset RANK LOCAL_RANK"),
        ({"RANK": "0"}, "torchrun sets WORLD_SIZE and LOCAL_RANK and MASTER_ADDR and"),
        ({"RANK": "banana"}, "RANK is 'banana' in the environment, but a launcher"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK is '' in the environment"),
        ({"LOCAL_RANK": "-1"}, "unset LOCAL_RANK"),
        ({"WORLD_SIZE": "two"}, "unset WORLD_SIZE"),
        ({"NODE_RANK": "0.5"}, "unset NODE_RANK"),
        ({"NODE_RANK": "1"}, "NODE_RANK is '1' in the environment, but trainer.num_nodes is 1"),
        ({"GROUP_RANK": "3"}, "GROUP_RANK is '3' in the environment, but trainer.num_nodes is 1"),
        ({"MASTER_PORT": "http"}, "unset MASTER_PORT"),
        ({"TORCHELASTIC_RUN_ID": "none"}, "unset TORCHELASTIC_RUN_ID"),
        (
            {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2", **MEETING},
            "RANK has to be less than WORLD",
        ),
        (
            {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", **MEETING},
            "but this run trains in 1 process; give --trainer.devices and --trainer.num_nodes whose "
            "product is 2, or unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT",
        ),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "4", **MEETING}, "trains in 1 process; give"),
        ({"SLURM_PROCID": "banana"}, "unset SLURM_PROCID"),
        ({"SLURM_PROCID": "3"}, "SLURM_PROCID is '3' in the environment, but this run trains in 1"),
        ({**JOB, "SLURM_NTASKS": "4"}, "srun sets SLURM_PROCID and SLURM_LOCALID and SLURM_NODEID"),
        (
            {**JOB, **TASK, "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"},
            "but this run trains in 1 process; give",
        ),
        ({**JOB, "SLURM_NTASKS": "1", "RANK": "1"}, "unset RANK"),
    ],
    ids=str,
)
def test_what_no_launcher_says_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    done = run_here(*options(tmp_path))

    assert (done.code, done.stdout) == (2, ""), done
    (line,) = done.own_lines
    assert line.startswith("error: ")
    assert said in line
    assert not (tmp_path / "runs").exists()


def test_overhead_refuses_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")

    done = run_here(program="experiments.overhead")

    assert (done.code, done.stdout) == (2, "")
    assert "unset LOCAL_RANK" in done.stderr


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            {"LOCAL_RANK": "1", "WORLD_SIZE": "4", **MEETING},
            "trains in 2 processes; give --trainer",
        ),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "trains in 2 processes; give"),
        ({**JOB, "SLURM_NTASKS": "1"}, "unset SLURM_NTASKS"),
        ({"SLURM_PROCID": "2"}, "unset SLURM_PROCID"),
    ],
    ids=str,
)
def test_processes_that_could_never_meet_are_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    check_environment(num_nodes=1)

    with pytest.raises(ConfigError) as refused:
        check_number_of_processes(num_devices=2, num_nodes=1)

    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("variables", "devices", "nodes", "is_first"),
    [
        ({}, 1, 1, True),
        ({}, 2, 1, True),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}, 1, 1, True),
        ({"MASTER_ADDR": "localhost"}, 2, 1, True),
        ({"RANK": "0", "WORLD_SIZE": "1"}, 1, 1, True),
        ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", **MEETING}, 2, 1, False),
        ({"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "GROUP_RANK": "1", **MEETING}, 2, 2, False),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "0", **MEETING}, 2, 1, False),
        ({"NODE_RANK": "1", "MASTER_ADDR": "first-machine"}, 2, 2, False),
        ({"NODE_RANK": "0", "MASTER_ADDR": "first-machine"}, 2, 2, True),
        ({**JOB, **TASK, "SLURM_NTASKS": "2"}, 2, 1, False),
        ({**JOB, **TASK, "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "LOCAL_RANK": "0"}, 2, 1, True),
        ({"SLURM_JOB_NAME": "interactive", "SLURM_NTASKS": "8"}, 2, 1, True),
        ({"SLURM_JOB_NAME": "bash", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, 1, 1, True),
        ({**JOB, "SLURM_NTASKS": "1"}, 1, 1, True),
        (
            {**JOB, "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "TORCHELASTIC_RUN_ID": "x"}
            | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", **MEETING},
            2,
            2,
            True,
        ),
    ],
    ids=str,
)  # fmt: skip
def test_what_launchers_say_is_taken(
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    devices: int,
    nodes: int,
    is_first: bool,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    check_environment(nodes)
    check_number_of_processes(devices, nodes)

    assert is_first_rank() is is_first


# -- terminals


@pytest.mark.parametrize(
    ("encoding", "errors", "shown"),
    [
        ("ascii", "strict", rb"\xe9\u2423\ufffd\udcff"),
        ("ascii", "surrogateescape", rb"\xe9\u2423\ufffd\udcff"),
        ("latin-1", "strict", b"\xe9\\u2423\\ufffd\\udcff"),
        ("cp1252", "strict", b"\xe9\\u2423\\ufffd\\udcff"),
        ("utf-8", "strict", "é␣\ufffd".encode() + rb"\udcff"),
    ],
)
def test_a_character_that_an_encoding_lacks_is_an_escape(
    monkeypatch: pytest.MonkeyPatch, encoding: str, errors: str, shown: bytes
) -> None:
    read, write = os.pipe()
    with os.fdopen(read, "rb") as reader, os.fdopen(write, "w", encoding=encoding) as own:
        own.reconfigure(errors=errors)
        monkeypatch.setattr(sys, "stdout", own)
        monkeypatch.setattr(sys, "__stdout__", own)
        prepare_streams()
        print("é␣\ufffd\udcff", end="", flush=True)
        assert os.read(reader.fileno(), 100) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2J\x07b", r"a\x1b[2J\x07b"),
        ("a\r\x08b\x7f", r"a\r\x08b\x7f"),
        ("\x9b31m", r"\x9b31m"),
        ("\u202eabc\u2066", r"\u202eabc\u2066"),
        ("line\n\tnext", "line\n\tnext"),
        ("\u3000wide\xa0é", "\u3000wide\xa0é"),
        ("\udcff", r"\udcff"),
    ],
)
def test_text_that_a_model_wrote_does_nothing_to_a_terminal(text: str, shown: str) -> None:
    assert printable(text, also="\n\t") == shown


def test_a_terminal_without_columns_is_printed_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    monkeypatch.setenv("LINES", "00")

    def prints(_: object) -> int:
        Console().print("a table")
        return 0

    assert exit_on_bad_input(prints) == 0
    assert capsys.readouterr().out == "a table\n"


@pytest.mark.parametrize(
    ("option", "said"), [("--prompt", "UTF-8 text"), ("--temperature", "a number")]
)
def test_an_option_that_is_no_utf_8_is_refused(tmp_path: Path, option: str, said: str) -> None:
    done = run_here(str(tmp_path), option, "\udcff", program="moe_ffn.cli.generate")

    assert done.code == 2
    assert len(done.stderr.splitlines()) == 1
    assert re.fullmatch(rf"error: \w+: must be {said}, got .*\n", done.stderr)


def test_a_mistake_quotes_no_control_character(tmp_path: Path) -> None:
    done = run_here(str(tmp_path / "a\x1b[2Jb"), program="moe_ffn.cli.report")

    assert done.code == 2
    assert r"a\x1b[2Jb' does not exist" in done.stderr
    assert "\x1b" not in done.stderr


# -- whole programs


@cache
def plain_rows(compiled: bool = True) -> list[dict[str, str]]:
    """What the run says of itself in an ordinary environment, with compiled kernels or without."""
    folder = lasting_folder()
    variables = {} if compiled else {"MOE_FFN_NATIVE": "0"}
    done = shell("", "experiments.train", *options(folder, **SHORT), variables=variables)
    assert done.code == 0, done.stderr
    return rows(folder)


def rows(folder: Path) -> list[dict[str, Any]]:
    """The metrics of the run in `folder`, but for how long it took."""
    return [
        {key: value for key, value in row if not re.search("second|memory", key)}
        for row in read_lines(folder / "runs" / "run" / "metrics.jsonl", Row)
    ]


def shell(
    script: str, program: str, *argv: str, variables: dict[str, str], unset: str = ""
) -> Finished:
    """A program of the project behind a line of shell, in an environment with other variables."""
    own = environment(**variables)
    for name in unset.split():
        own.pop(name, None)
    done = subprocess.run(
        [
            "/bin/sh",
            "-c",
            f'{script}\nexec "$@"',
            "sh",
            sys.executable,
            *python_words(program),
            *argv,
        ],
        cwd=REPOSITORY,
        env=own,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=300,
        check=False,
    )
    return Finished(done.returncode, done.stdout.decode("latin-1"), done.stderr.decode("latin-1"))


NOWHERE = "/nowhere/at/all"
LIMITED = "ulimit -n 24; ulimit -v 4000000; ulimit -s 512; umask 077; renice -n 10 $$ > /dev/null"

UNSAID = {
    "nothing to write to": {
        "variables": {"HOME": NOWHERE, "TMPDIR": NOWHERE, "XDG_STATE_HOME": "/dev/null/x"}
        | {"XDG_CACHE_HOME": "relative", "GIT_DIR": NOWHERE, "PATH": ""},
    },
    "no home": {"variables": {}, "unset": "HOME XDG_STATE_HOME XDG_CACHE_HOME USER LOGNAME TERM"},
    "python -OO, warnings are errors": {
        "variables": {"PYTHONOPTIMIZE": "2", "PYTHONHASHSEED": "7", "PYTHONWARNINGS": "error"},
    },
    "no UTF-8": {
        "variables": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        | {"TZ": "Nowhere/Junk", "LANGUAGE": "zz", "COLUMNS": "10", "TERM": "dumb"},
    },
    "ascii": {"variables": {"PYTHONIOENCODING": "ascii", "COLUMNS": "0", "LINES": "junk"}},
    "latin-1": {
        "variables": {"PYTHONIOENCODING": "latin-1:strict", "COLUMNS": "1", "HOME": "/dev/null"},
    },
    "cp1252": {"variables": {"PYTHONIOENCODING": "cp1252", "COLUMNS": "junk", "NO_COLOR": "1"}},
    "utf-16": {"variables": {"PYTHONIOENCODING": "utf-16", "COLUMNS": "-5"}},
    "colours": {"variables": {"FORCE_COLOR": "1", "TERM": "junk", "COLORTERM": "truecolor"}},
    "of other programs": {
        "variables": {"CUDA_VISIBLE_DEVICES": "banana,7,-1", "MKL_NUM_THREADS": "junk"}
        | {"PL_GLOBAL_SEED": "9", "PL_SEED_WORKERS": "1", "LT_DEVICES": "4", "LT_CLI_USED": "1"}
        | {"WORLD_SIZE": "4", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}
        | {"SLURM_JOB_NAME": "interactive", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "x"},
    },
    "no standard output": {"variables": {}, "script": "exec >&-"},
    "no streams": {"variables": {}, "script": "exec <&- >&- 2>&-"},
    "limits": {"variables": {}, "script": LIMITED},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNSAID)
def test_training_is_the_same(tmp_path: Path, name: str) -> None:
    case = {"script": "", **UNSAID[name]}

    done = shell(case.pop("script"), "experiments.train", *options(tmp_path, **SHORT), **case)

    assert done.code == 0, done.stderr
    assert "Traceback" not in done.stderr
    # Without PATH there is no compiler.
    assert rows(tmp_path) == plain_rows(compiled="PATH" not in case["variables"])
    assert (tmp_path / "runs" / "run" / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["banana", "0", "-1"])
def test_threads_that_are_no_number_are_left_to_torch(tmp_path: Path, threads: str) -> None:
    done = shell(
        "", "experiments.train", *options(tmp_path, **SHORT), variables={"OMP_NUM_THREADS": threads}
    )

    assert done.code == 0, done.stderr
    for mine, plain in zip(rows(tmp_path), plain_rows(), strict=True):
        assert mine["train/loss"][:6] == plain["train/loss"][:6]  # another order of sums


@pytest.mark.parametrize(
    "program",
    [
        "moe_ffn.cli.train",
        "experiments.overhead",
        "moe_ffn.cli.generate",
        "moe_ffn.cli.trace",
        "experiments.benchmark",
    ],
)
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ('mkdir "$GONE" && cd "$GONE" && rmdir "$GONE"', "error: the current folder was removed"),
        ("ulimit -f 0", "error: TMPDIR: no folder for temporary files can be written"),
    ],
    ids=["folder removed", "no file may be written"],
)
@pytest.mark.slow
def test_where_torch_cannot_be_imported_that_is_said(
    tmp_path: Path, program: str, script: str, said: str
) -> None:
    needed = {
        "moe_ffn.cli.generate": [str(finished_copy(tmp_path)), "--prompt", "a"],
        "moe_ffn.cli.trace": [str(tmp_path / "run"), "--text", "a"],
        "experiments.benchmark": ["--shape", "4,4,4,4,2,fp32"],
    }
    variables = {"GONE": str(tmp_path / "gone"), "PYTHONPATH": str(REPOSITORY)}
    variables |= {"TMPDIR": NOWHERE}
    argv = needed.get(program, ["--run.output_dir", str(tmp_path / "runs")])

    done = shell(script, program, *argv, variables=variables)

    assert done.code == 2, done.stderr
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == 1


LAUNCHER = {"LOCAL_RANK": "1", "RANK": "banana"}
NARROW = {"PYTHONIOENCODING": "ascii", "COLUMNS": "1", "TMPDIR": NOWHERE}
PYTHON = {"PYTHONOPTIMIZE": "2", "PYTHONWARNINGS": "error", "COLUMNS": "0", "HOME": NOWHERE}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "variables"),
    [
        (("moe_ffn.cli.generate", "RUN", "--prompt", "é"), LAUNCHER),
        (("moe_ffn.cli.generate", "RUN", "--prompt", "é"), PYTHON | NARROW),
        (("moe_ffn.cli.trace", "RUN", "--text", "é\udcff"), NARROW),
        (("moe_ffn.cli.trace", "RUN", "--text", "é\udcff"), LAUNCHER | PYTHON),
        (("moe_ffn.cli.report", "RUN"), LAUNCHER | NARROW),
        (("moe_ffn.cli.report", "--watch", "RUN"), PYTHON),
        (("moe_ffn.cli.dashboard", "--help"), LAUNCHER | NARROW),
        (
            ("experiments.benchmark", "--shape", "2,4,4,2,1,fp32", "--rounds", "1"),
            LAUNCHER | PYTHON,
        ),
    ],
    ids=lambda value: " ".join(value).encode("unicode_escape").decode(),
)
def test_what_does_not_train_cares_for_none_of_it(
    tmp_path: Path, argv: tuple[str, ...], variables: dict[str, str]
) -> None:
    run = str(finished_copy(tmp_path)) if "RUN" in argv else ""

    words = [run if word == "RUN" else word for word in argv]
    done = shell("", *words, variables=variables)

    assert done.code == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout


@pytest.mark.parametrize(
    "argv",
    [
        ("moe_ffn.cli.train", "--help"),
        ("moe_ffn.cli.train", "--help", "model"),
        ("moe_ffn.cli.compare",),
    ],
)
@pytest.mark.slow
def test_help_needs_no_docstrings(argv: tuple[str, ...]) -> None:
    done = shell("", *argv, variables={"PYTHONOPTIMIZE": "2"})

    assert done.code == 0, done.stderr
    assert len(done.stdout.splitlines()) > 3


def test_a_misspelt_option_needs_no_docstrings() -> None:
    argv = ("experiments.train", "--model.ffn.num_expert", "4")

    done = shell("", *argv, variables={"PYTHONOPTIMIZE": "2"})

    assert (done.code, done.stdout) == (2, "")
    assert "did you mean 'num_experts'?" in done.stderr


# -- terminals of any size


def on_terminal(lines: int, columns: int, program: str, *argv: str) -> tuple[int, str]:
    """Exit code of a program, and what its terminal of this size was sent."""
    own, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    variables = environment(TERM="xterm")
    del variables["COLUMNS"]
    process = subprocess.Popen(
        [sys.executable, *python_words(program), *argv],
        cwd=REPOSITORY, env=variables, stdin=its, stdout=its, stderr=its,
    )  # fmt: skip
    os.close(its)
    sent = bytearray()

    def read() -> None:
        try:
            while block := os.read(own, 4096):
                sent.extend(block)
        except OSError:  # the last process on it has ended
            pass

    reader = threading.Thread(target=read)
    reader.start()
    code = process.wait(timeout=300)
    reader.join()
    os.close(own)
    return code, sent.decode()


@pytest.mark.slow
@pytest.mark.parametrize("size", [(1, 1), (3, 20), (0, 0)], ids=str)
def test_a_terminal_of_any_size_is_drawn_on(tmp_path: Path, size: tuple[int, int]) -> None:
    code, sent = on_terminal(*size, "experiments.train", *options(tmp_path, **SHORT))

    assert code == 0, sent
    assert rows(tmp_path) == plain_rows()


@pytest.mark.slow
def test_a_text_with_control_characters_is_escaped_on_a_terminal_alone(tmp_path: Path) -> None:
    argv = (str(finished_copy(tmp_path)), "--prompt", "\x1b[2Ja", "--num-tokens", "4")

    code, sent = on_terminal(24, 80, "moe_ffn.cli.generate", *argv)
    piped = run(*argv, program="moe_ffn.cli.generate")

    assert code == piped.code == 0
    assert "\\x1b[2Ja" in sent
    assert "\x1b" not in sent
    assert piped.stdout.startswith("\x1b[2Ja")


@pytest.mark.slow
def test_standard_input_that_is_closed_is_no_text(tmp_path: Path) -> None:
    argv = ("moe_ffn.cli.trace", str(finished_copy(tmp_path)), "--text", "-")

    done = shell("exec <&-", *argv, variables={})

    assert (done.code, done.stderr) == (
        2,
        "error: --text: is empty; give some text, as in --text 'import os'\n",
    )


# -- processes that somebody did start


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["lightning", "torchrun"])
def test_two_processes_train_one_run(tmp_path: Path, launcher: str) -> None:
    changes = {"trainer__devices": "2", "trainer__strategy": "ddp", **SHORT}
    torchrun = ["torch.distributed.run", "--nproc_per_node", "2", "-m"]
    before = torchrun if launcher == "torchrun" else []
    variables = {"MASTER_ADDR": "localhost"} if launcher == "lightning" else {}

    done = shell(
        "", *before, "experiments.train", *options(tmp_path, **changes), variables=variables
    )

    assert done.code == 0, done.stderr
    assert done.stdout.count("Results in ") == 1
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_waits_for_others_can_be_ended(tmp_path: Path, number: int) -> None:
    """Rank 1, started by hand; rank 0 never comes."""
    variables = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", **MEETING}
    process = start(*options(tmp_path, trainer__devices="2", **SHORT), **variables)
    assert process.stderr is not None
    line = next(line for line in process.stderr if line.startswith("waiting"))
    assert line == "waiting for the other processes of 2 at 127.0.0.1:29500\n"

    process.send_signal(number)

    assert process.wait(timeout=10) == -number
    process.communicate()
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_more_processes_than_the_run_has_are_refused_once(tmp_path: Path) -> None:
    argv = ("torch.distributed.run", "--nproc_per_node", "2", "-m", "experiments.train")

    done = shell("", *argv, *options(tmp_path, trainer__devices="1", **SHORT), variables={})

    assert done.code != 0
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert line == (
        "error: torchrun started 2 processes, but this run trains in 1 process (trainer.devices, which a run "
        "that is resumed keeps); give --trainer.devices auto"
    )
    assert not (tmp_path / "runs").exists()
