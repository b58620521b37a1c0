"""Environment of a process: folders that torch needs, and variables that a launcher sets.

Import this before torch, which would crash without those folders; this module ends with a sentence.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from dataclasses import dataclass

from moe_ffn.config.errors import ConfigError
from moe_ffn.files import reason


def _require_folders_of_torch() -> None:
    """Exit with code 2 without a current folder or a folder for temporary files."""
    problem = "the current folder was removed, and torch cannot be imported in it; cd to another"
    try:
        os.getcwd()  # noqa: PTH109 - Path.cwd() is the same
        problem = (
            "TMPDIR: no folder for temporary files can be written, and torch cannot be imported without; "
            "make room in /tmp, or set TMPDIR to another folder"
        )
        tempfile.gettempdir()
    except FileNotFoundError:
        print(f"error: {problem}", file=sys.stderr)
        raise SystemExit(2) from None


_require_folders_of_torch()


class LaunchError(ConfigError):
    """Variables of a launcher are missing or wrong, so this process may be the only one."""


@dataclass(frozen=True)
class Launcher:
    """Program that starts several processes, and the variables that it sets for each."""

    name: str
    rank: str
    size: str
    """Variable with the number of processes."""
    further: tuple[str, ...]

    @property
    def variables(self) -> tuple[str, ...]:
        return (self.rank, self.size, *self.further)


TORCHRUN = Launcher("torchrun", "RANK", "WORLD_SIZE", ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))
SLURM = Launcher("srun", "SLURM_PROCID", "SLURM_NTASKS", ("SLURM_LOCALID", "SLURM_NODEID"))
LIGHTNING = Launcher("lightning", "LOCAL_RANK", "WORLD_SIZE", ("MASTER_ADDR", "MASTER_PORT"))

_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")
"""Variables of a rank; Lightning takes the first one that is set, whichever launcher it found."""
VARIABLES = {
    *(name for launcher in (TORCHRUN, SLURM) for name in launcher.variables),
    *("NODE_RANK", "GROUP_RANK", "STANDALONE_PORT", "TORCHELASTIC_RUN_ID"),
}
_NUMBERS = VARIABLES - {"MASTER_ADDR", "TORCHELASTIC_RUN_ID"}
_TRAINER = "PL_TRAINER_"
"""Prefix of variables that Lightning's Trainer takes for missing arguments."""


def is_first_rank() -> bool:
    """Return True for the only process, or the first of all machines."""
    launcher = _launcher()
    names = ("LOCAL_RANK", _node_rank()) if launcher in (None, LIGHTNING) else (launcher.rank,)
    return all(os.environ.get(name, "0") == "0" for name in names)


def is_first_here() -> bool:
    """Return True for the only process, or the first of its machine."""
    return all(os.environ.get(name, "0") == "0" for name in ("LOCAL_RANK", "SLURM_LOCALID"))


def is_under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def check_environment(num_nodes: int) -> None:
    """Check the variables that Lightning would take for a launcher's; call it before importing lightning.

    Args:
        num_nodes: number of machines of the run.

    Raises:
        ConfigError: a variable has a value that no launcher sets, or lacks others that it would set too.
    """
    for name, value in os.environ.items():
        if name.startswith(_TRAINER):
            option = f"--trainer.{name.removeprefix(_TRAINER).lower()}"
            raise _refusal(f"Lightning would silently use it; give {option}", name)
        if name in _NUMBERS and not (value.isascii() and value.isdigit() and len(value) < 10):
            raise _refusal("a launcher of processes sets a whole number; set one", name)
    launcher, node = _launcher(), _node_rank()
    if launcher in (None, LIGHTNING) and _number(node) >= max(num_nodes, 1):
        raise _refusal(f"trainer.num_nodes is {num_nodes}; give another", node)
    if launcher is None:
        return
    missing = [name for name in launcher.variables if name not in os.environ]
    if missing and os.environ.get(launcher.size) != "1":
        raise _stray(
            launcher, f"{launcher.name} sets {' and '.join(missing)} too; start it with that"
        )
    if _number(launcher.rank) >= _number(launcher.size):
        raise _stray(launcher, f"{launcher.rank} has to be less than {launcher.size}; set it so")


def processes_here() -> int | None:
    """Number of processes that torchrun started on this machine; None without torchrun."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(count) if _launcher() is TORCHRUN and count.isdigit() else None


def check_number_of_processes(num_devices: int, num_nodes: int) -> None:
    """Check that the launcher started one process for each device.

    Args:
        num_devices: devices of each machine.
        num_nodes: number of machines.

    Raises:
        ConfigError: there are more or fewer, or they cannot connect at MASTER_ADDR and MASTER_PORT.
    """
    launcher, num_processes = _launcher(), num_devices * num_nodes
    train = f"this run trains in {num_processes} process{'es' if num_processes > 1 else ''}"
    if launcher is not None and _number(launcher.size) != num_processes:
        size = os.environ[launcher.size]
        if is_under_torchrun():
            raise ConfigError(
                f"torchrun started {size} processes, but {train} (trainer.devices, which a run that is "
                "resumed keeps); give --trainer.devices auto"
            )
        give = f"give --trainer.devices and --trainer.num_nodes whose product is {size}"
        raise _stray(launcher, f"{train}; {give}")
    first = next((name for name in _RANKS if name in os.environ), None)
    if first is not None and _number(first) >= num_processes:
        raise _refusal(train, first)
    starts_others = launcher is None and num_nodes == 1
    is_met = launcher is TORCHRUN and not is_under_torchrun() and is_first_rank()
    if num_processes > 1 and (starts_others or is_met):
        _check_meeting_place()


def _launcher() -> Launcher | None:
    """Launcher of this process, as Lightning judges; None without one."""
    if is_under_torchrun():
        return TORCHRUN
    is_interactive = os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    if "SLURM_NTASKS" in os.environ and not is_interactive:
        return SLURM
    if "RANK" in os.environ:
        return TORCHRUN
    return LIGHTNING if "LOCAL_RANK" in os.environ else None


def _node_rank() -> str:
    """Variable from which Lightning takes the number of this machine."""
    return "NODE_RANK" if "NODE_RANK" in os.environ else "GROUP_RANK"


def _number(name: str) -> int:
    return int(os.environ.get(name, "0"))


def _check_meeting_place() -> None:
    """Raise ConfigError if the processes could not connect to this one."""
    names = ("MASTER_ADDR", "MASTER_PORT")
    if not {*names} & {*os.environ}:
        return
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        family, kind, *_, place = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as tried:
            tried.bind((place[0], _number("MASTER_PORT")))
    except (OSError, OverflowError, UnicodeError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise _refusal(
            f"the processes of this run cannot meet there ({why}); set others", *names
        ) from error


def _stray(launcher: Launcher, why: str) -> ConfigError:
    """Error of a process that looks like one of several."""
    of_elastic = ("TORCHELASTIC_RUN_ID",) if launcher is TORCHRUN else ()
    return _refusal(why, *launcher.variables, *_RANKS, *of_elastic)


def _refusal(why: str, *names: str) -> LaunchError:
    """Error that shows the values of those variables `names` that are set."""
    given = [name for name in dict.fromkeys(names) if name in os.environ]
    values = ", ".join(f"{name} is '{os.environ[name]}'" for name in given)
    return LaunchError(f"{values} in the environment, but {why}, or unset {' '.join(given)}")
