"""No terminal, environment variable or full log ends a run, or changes what it does unsaid."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from experiments import ranks
from experiments.selftest.scene import (
    options,
    run_here,
)
from experiments.standard_streams import keep_printing
from moe_ffn.errors import ConfigError, printable

ROOT = Path(__file__).parents[2]
MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
JOB = {"SLURM_JOB_ID": "1234", "SLURM_JOB_NAME": "train"}
TASK = {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}
TINY = {
    "trainer__max_steps": "3",
    "trainer__validate_every_n_steps": "2",
    "logging__every_n_steps": "1",
    "run__name": "run",
}


@pytest.fixture(autouse=True)
def _of_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may be inside a job of SLURM's."""
    for name in os.environ:
        if name in ranks.VARIABLES or name.startswith(("SLURM_", "PL_TRAINER_")):
            monkeypatch.delenv(name)


# -- variables of launchers


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK is '1' in the environment, as if lightning had started"),
        ({"LOCAL_RANK": "1"}, "but lightning sets WORLD_SIZE and MASTER_ADDR and MASTER_PORT too,"),
        ({"LOCAL_RANK": "1"}, "or where nobody did: unset LOCAL_RANK"),
        ({"LOCAL_RANK": "0"}, "unset LOCAL_RANK"),
        ({"LOCAL_RANK": "1", "RANK": "1"}, "unset RANK LOCAL_RANK"),
        ({"RANK": "0"}, "torchrun sets WORLD_SIZE and LOCAL_RANK and MASTER_ADDR and"),
        ({"RANK": "banana"}, "RANK is 'banana' in the environment, but no launcher"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK is '' in the environment"),
        ({"LOCAL_RANK": "-1"}, "unset LOCAL_RANK"),
        ({"WORLD_SIZE": "two"}, "unset WORLD_SIZE"),
        ({"NODE_RANK": "0.5"}, "unset NODE_RANK"),
        ({"NODE_RANK": "1"}, "NODE_RANK is '1' in the environment, but trainer.num_nodes is 1"),
        ({"GROUP_RANK": "3"}, "GROUP_RANK is '3' in the environment, but trainer.num_nodes is 1"),
        ({"MASTER_PORT": "http"}, "unset MASTER_PORT"),
        ({"STANDALONE_PORT": "x"}, "unset STANDALONE_PORT"),
        ({"TORCHELASTIC_RUN_ID": "none"}, "unset TORCHELASTIC_RUN_ID"),
        ({"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2", **MEETING}, "RANK is less than WORLD"),
        (
            {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", **MEETING},
            "but this run trains in 1 process; give --trainer.devices and --trainer.num_nodes whose "
            "product is 2, or where nobody did: unset RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT",
        ),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "4", **MEETING}, "trains in 1 process; give"),
        ({"SLURM_PROCID": "banana"}, "unset SLURM_PROCID"),
        ({"SLURM_PROCID": "3"}, "SLURM_PROCID is '3' in the environment, but this run trains in 1"),
        ({**JOB, "SLURM_NTASKS": "4"}, "srun sets SLURM_PROCID and SLURM_LOCALID and SLURM_NODEID"),
        (
            {**JOB, **TASK, "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"},
            "as if srun had started",
        ),
        ({**JOB, "SLURM_NTASKS": "1", "RANK": "1"}, "unset RANK"),
        ({"PL_TRAINER_DETECT_ANOMALY": "1"}, "say it as --trainer.detect_anomaly, or unset PL_TR"),
        ({"PL_TRAINER_FAST_DEV_RUN": "1"}, "unset PL_TRAINER_FAST_DEV_RUN"),
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


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            {"LOCAL_RANK": "1", "WORLD_SIZE": "4", **MEETING},
            "trains in 2 processes; give --trainer",
        ),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "trains in 2 processes; give"),
        ({**JOB, "SLURM_NTASKS": "1"}, "unset SLURM_NTASKS"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT is '99999' in the environment, where"),
        ({"MASTER_ADDR": "192.0.2.1"}, "cannot meet (Cannot assign requested address); unset"),
        ({"MASTER_ADDR": "\n"}, "unset MASTER_ADDR"),
        ({"SLURM_PROCID": "2"}, "unset SLURM_PROCID"),
    ],
    ids=str,
)
def test_processes_that_could_never_meet_are_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ranks.check_environment(num_nodes=1)

    with pytest.raises(ConfigError) as refused:
        ranks.check_number_of_processes(num_devices=2, num_nodes=1)

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

    ranks.check_environment(nodes)
    ranks.check_number_of_processes(devices, nodes)

    assert ranks.is_first_rank() is is_first


# -- terminals


@pytest.mark.parametrize(
    ("encoding", "errors", "shown"),
    [
        ("ascii", "strict", rb"\xe9\u2423\ufffd\udcff"),
        ("ascii", "surrogateescape", rb"\xe9\u2423\ufffd\udcff"),
        ("latin-1", "strict", b"\xe9\\u2423\\ufffd\\udcff"),
        ("cp1252", "strict", b"\xe9\\u2423\\ufffd\\udcff"),
        ("utf-8", "strict", "é␣\ufffd".encode() + rb"\udcff"),
        ("ascii", "replace", b"????"),
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
        keep_printing()
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


def test_a_mistake_quotes_no_control_character(tmp_path: Path) -> None:
    done = run_here(str(tmp_path / "a\x1b[2Jb"), program="experiments.report")

    assert done.code == 2
    assert r"a\x1b[2Jb' does not exist" in done.stderr
    assert "\x1b" not in done.stderr
