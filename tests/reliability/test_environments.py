"""A mistake in the environment is one sentence; terminals, encodings and limits change no result."""

from __future__ import annotations

import os
import re
import signal
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from moe_ffn.cli.exit import prepare_streams
from moe_ffn.config.environment import (
    VARIABLES,
    check_environment,
    check_number_of_processes,
    is_first_rank,
)
from moe_ffn.config.errors import ConfigError, printable
from moe_ffn.training.monitoring.json_lines import Row, read_lines
from tests.helpers.tiny_runs import (
    Finished,
    finish,
    finished_copy,
    lasting_folder,
    on_terminal,
    options,
    python_words,
    run,
    run_here,
    start,
    start_command,
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
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests themselves may run inside a SLURM job."""
    for name in os.environ:
        if name in VARIABLES or name.startswith("SLURM_"):
            monkeypatch.delenv(name)


# -- variables of launchers


def check(devices: int, nodes: int) -> None:
    check_environment(nodes)
    check_number_of_processes(devices, nodes)


REJECTED: list[tuple[dict[str, str], int, str]] = [
    ({"LOCAL_RANK": "1"}, 1, "but lightning sets WORLD_SIZE and MASTER_ADDR and MASTER_PORT too;"),
    ({"RANK": "0"}, 1, "torchrun sets WORLD_SIZE and LOCAL_RANK and MASTER_ADDR and"),
    ({"RANK": "banana"}, 1, "RANK is 'banana' in the environment, but a launcher"),
    ({"LOCAL_RANK": "1", "RANK": "1"}, 1, "unset RANK LOCAL_RANK"),
    ({"NODE_RANK": "1"}, 1, "NODE_RANK is '1' in the environment, but trainer.num_nodes is 1"),
    ({"MASTER_PORT": "http"}, 1, "unset MASTER_PORT"),
    ({"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2", **MEETING}, 1, "RANK must be less than WORLD"),
    (
        {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", **MEETING},
        1,
        "but this run trains in 1 process; give --trainer.devices and --trainer.num_nodes whose "
        "product is 2, or unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT",
    ),
    ({**JOB, "SLURM_NTASKS": "4"}, 1, "srun sets SLURM_PROCID and SLURM_LOCALID and SLURM_NODEID"),
    ({**JOB, **TASK, "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}, 1, "trains in 1 process; give"),
    ({"LOCAL_RANK": "1", "WORLD_SIZE": "4", **MEETING}, 2, "trains in 2 processes; give --trainer"),
    ({**JOB, "SLURM_NTASKS": "1"}, 2, "unset SLURM_NTASKS"),
]  # fmt: skip


@pytest.mark.parametrize(("variables", "devices", "said"), REJECTED, ids=str)
def test_variables_of_a_launcher_under_which_processes_never_meet_are_rejected(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], devices: int, said: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(ConfigError) as rejected:
        check(devices, 1)

    assert said in str(rejected.value)


@pytest.mark.parametrize("row", [0, 7], ids=["before lightning", "after"])
def test_rejected_variables_stop_a_run_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: int
) -> None:
    variables, _, said = REJECTED[row]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    done = run_here(*options(tmp_path))

    assert (done.code, done.stdout) == (2, ""), done
    assert said in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("variables", "devices", "nodes", "is_first"),
    [
        ({}, 2, 1, True),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}, 1, 1, True),
        ({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", **MEETING}, 2, 1, False),
        ({"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "GROUP_RANK": "1", **MEETING}, 2, 2, False),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "0", **MEETING}, 2, 1, False),
        ({"NODE_RANK": "1", "MASTER_ADDR": "first-machine"}, 2, 2, False),
        ({"NODE_RANK": "0", "MASTER_ADDR": "first-machine"}, 2, 2, True),
        ({**JOB, **TASK, "SLURM_NTASKS": "2"}, 2, 1, False),
        ({**JOB, **TASK, "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "LOCAL_RANK": "0"}, 2, 1, True),
        ({"SLURM_JOB_NAME": "interactive", "SLURM_NTASKS": "8"}, 2, 1, True),
    ],
    ids=str,
)  # fmt: skip
def test_complete_variables_of_a_launcher_are_used(
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    devices: int,
    nodes: int,
    is_first: bool,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    check(devices, nodes)

    assert is_first_rank() is is_first


# -- terminals


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("ascii", rb"\xe9\u2423\ufffd\udcff"),
        ("latin-1", b"\xe9\\u2423\\ufffd\\udcff"),
        ("utf-8", "é␣\ufffd".encode() + rb"\udcff"),
    ],
)
def test_a_character_that_an_encoding_lacks_is_an_escape(
    monkeypatch: pytest.MonkeyPatch, encoding: str, shown: bytes
) -> None:
    read, write = os.pipe()
    with os.fdopen(read, "rb") as reader, os.fdopen(write, "w", encoding=encoding) as own:
        monkeypatch.setattr(sys, "stdout", own)
        monkeypatch.setattr(sys, "__stdout__", own)
        prepare_streams()
        print("é␣\ufffd\udcff", end="", flush=True)
        assert os.read(reader.fileno(), 100) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2J\r\x7f\u202e\u2066", r"a\x1b[2J\r\x7f\u202e\u2066"),
        ("line\n\tnext \u3000wide\xa0é", "line\n\tnext \u3000wide\xa0é"),
    ],
)
def test_control_characters_of_a_text_are_escaped(text: str, shown: str) -> None:
    assert printable(text, also="\n\t") == shown


def test_an_error_quotes_no_control_character(tmp_path: Path) -> None:
    done = run_here(str(tmp_path / "a\x1b[2Jb"), program="moe_ffn.cli.report")

    assert done.code == 2
    assert r"a\x1b[2Jb' does not exist" in done.stderr
    assert "\x1b" not in done.stderr


@pytest.mark.slow
def test_control_characters_are_escaped_only_on_a_terminal(tmp_path: Path) -> None:
    argv = (str(finished_copy(tmp_path)), "--prompt", "\x1b[2Ja", "--num-tokens", "4")

    code, sent = on_terminal("moe_ffn.cli.generate", *argv)
    piped = run(*argv, program="moe_ffn.cli.generate")

    assert code == piped.code == 0
    assert "\\x1b[2Ja" in sent
    assert "\x1b" not in sent
    assert piped.stdout.startswith("\x1b[2Ja")


# -- whole programs


@cache
def plain_rows(compiled: bool = True) -> list[dict[str, Any]]:
    """The rows of the run in an ordinary environment, with compiled kernels or without."""
    folder = lasting_folder()
    variables = {} if compiled else {"MOE_FFN_NATIVE": "0"}
    done = run_in_shell("", "experiments.train", *options(folder, **SHORT), variables=variables)
    assert done.code == 0, done.stderr
    return rows(folder)


def rows(folder: Path) -> list[dict[str, Any]]:
    """The metrics of the run in `folder`, without durations and memory."""
    return [
        {key: value for key, value in row if not re.search("second|memory", key)}
        for row in read_lines(folder / "runs" / "run" / "metrics.jsonl", Row)
    ]


def run_in_shell(
    script: str, program: str, *argv: str, variables: dict[str, str], unset: str = ""
) -> Finished:
    """Run a program of the project after a line of shell, with other environment variables."""
    env = ["/usr/bin/env", *(f"--unset={name}" for name in unset.split())]
    shell = ["/bin/sh", "-c", f'{script}\nexec "$@"', "sh"]
    command = [*env, *shell, sys.executable, *python_words(program), *argv]
    return finish(start_command(command, **variables), timeout=300)


NOWHERE = "/nowhere/at/all"
LIMITED = "ulimit -n 24; ulimit -v 4000000; ulimit -s 512; umask 077; renice -n 10 $$ > /dev/null"

ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "no folder to write to": {
        "variables": {"HOME": NOWHERE, "TMPDIR": NOWHERE, "XDG_STATE_HOME": "/dev/null/x", "PATH": ""}
    },
    "no home": {"variables": {}, "unset": "HOME XDG_STATE_HOME XDG_CACHE_HOME USER LOGNAME TERM"},
    "python -OO, warnings are errors": {
        "variables": {"PYTHONOPTIMIZE": "2", "PYTHONHASHSEED": "7", "PYTHONWARNINGS": "error"},
    },
    "no UTF-8": {
        "variables": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "TERM": "dumb"}
    },
    "variables of other programs": {
        "variables": {"CUDA_VISIBLE_DEVICES": "banana,7,-1", "PL_GLOBAL_SEED": "9"}
        | {"WORLD_SIZE": "4", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}
        | {"SLURM_JOB_NAME": "interactive", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "x"},
    },
    "no standard output": {"variables": {}, "script": "exec >&-"},
    "limits": {"variables": {}, "script": LIMITED},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_training_gives_the_same_numbers(tmp_path: Path, name: str) -> None:
    case = {"script": "", **ENVIRONMENTS[name]}

    done = run_in_shell(
        case.pop("script"), "experiments.train", *options(tmp_path, **SHORT), **case
    )

    assert done.code == 0, done.stderr
    assert "Traceback" not in done.stderr
    # Without PATH there is no compiler.
    assert rows(tmp_path) == plain_rows(compiled="PATH" not in case["variables"])
    assert (tmp_path / "runs" / "run" / "report.html").is_file()


# -- processes of one run


@pytest.mark.slow
def test_two_processes_of_torchrun_train_one_run(tmp_path: Path) -> None:
    changes = {"trainer__devices": "2", "trainer__strategy": "ddp", **SHORT}
    argv = ("torch.distributed.run", "--nproc_per_node", "2", "-m", "experiments.train")

    done = run_in_shell("", *argv, *options(tmp_path, **changes), variables={})

    assert done.code == 0, done.stderr
    assert done.stdout.count("Results in ") == 1
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_waiting_for_other_ranks_can_be_stopped(tmp_path: Path, number: int) -> None:
    """Rank 1 is started by hand, and rank 0 never comes."""
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
def test_more_processes_than_the_run_has_are_rejected_once(tmp_path: Path) -> None:
    argv = ("torch.distributed.run", "--nproc_per_node", "2", "-m", "experiments.train")

    done = run_in_shell("", *argv, *options(tmp_path, trainer__devices="1", **SHORT), variables={})

    assert done.code != 0
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert line == (
        "error: torchrun started 2 processes, but this run trains in 1 process (trainer.devices, which a "
        "resumed run keeps); give --trainer.devices auto"
    )
    assert not (tmp_path / "runs").exists()
