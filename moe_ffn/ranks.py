"""Which of several processes this is, by its environment, and what contradicts it; needs no torch."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from moe_ffn.errors import ConfigError, reason


@dataclass(frozen=True)
class Launcher:
    """What starts several processes, and the variables that it sets for each of them."""

    name: str
    rank: str
    size: str
    """How many processes there are."""
    further: tuple[str, ...]

    @property
    def variables(self) -> tuple[str, ...]:
        return (self.rank, self.size, *self.further)


TORCHRUN = Launcher("torchrun", "RANK", "WORLD_SIZE", ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))
SLURM = Launcher("srun", "SLURM_PROCID", "SLURM_NTASKS", ("SLURM_LOCALID", "SLURM_NODEID"))
LSF = Launcher("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", ("JSM_NAMESPACE_LOCAL_RANK",))
LIGHTNING = Launcher("lightning", "LOCAL_RANK", "WORLD_SIZE", ("MASTER_ADDR", "MASTER_PORT"))

_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
"""Of these Lightning takes the first that is set, whoever set it."""
VARIABLES = {
    *(name for launcher in (TORCHRUN, SLURM, LSF) for name in launcher.variables),
    *("NODE_RANK", "GROUP_RANK", "STANDALONE_PORT", "TORCHELASTIC_RUN_ID"),
}
_NUMBERS = VARIABLES - {"MASTER_ADDR", "TORCHELASTIC_RUN_ID"}
_TRAINER = "PL_TRAINER_"
"""How the variables begin that Lightning's Trainer takes for what it was not told."""


def is_first_rank() -> bool:
    """Whether this process is alone, or the first of all, on all machines."""
    launcher = _launcher()
    names = ("LOCAL_RANK", _node_rank()) if launcher in (None, LIGHTNING) else (launcher.rank,)
    return all(os.environ.get(name, "0") == "0" for name in names)


def check_environment(num_nodes: int) -> None:
    """Call it before lightning is imported, which takes a stray variable for a launcher's.

    Args:
        num_nodes: machines that the run is to be on.

    Raises:
        ConfigError: a variable is none that a launcher sets, or what it sets beside it is not there.
    """
    for name, value in os.environ.items():
        if name.startswith(_TRAINER):
            option = f"--trainer.{name.removeprefix(_TRAINER).lower()}"
            raise _unusable(
                name, f"Lightning would train by it, and nobody would know; say it as {option}"
            )
        if name in _NUMBERS and not (value.isascii() and value.isdigit() and len(value) < 10):
            raise _unusable(name, "no launcher of processes sets that, but a whole number")
    launcher, node = _launcher(), _node_rank()
    if launcher in (None, LIGHTNING) and _number(node) >= max(num_nodes, 1):
        raise _unusable(node, f"trainer.num_nodes is {num_nodes}; give another")
    if launcher is None:
        return
    missing = [name for name in launcher.variables if name not in os.environ]
    if missing and os.environ.get(launcher.size) != "1":
        raise _stray(launcher, f"{launcher.name} sets {' and '.join(missing)} too")
    if _number(launcher.rank) >= _number(launcher.size):
        raise _stray(launcher, f"{launcher.rank} is less than {launcher.size} where both are right")


def check_number_of_processes(num_devices: int, num_nodes: int) -> None:
    """Whether as many processes were started as are to train.

    Args:
        num_devices: of each machine, a process for each.
        num_nodes: machines.

    Raises:
        ConfigError: they are more or fewer, or cannot meet where the environment says.
    """
    launcher, num_processes = _launcher(), num_devices * num_nodes
    train = f"this run trains in {num_processes} process{'es' if num_processes > 1 else ''}"
    if launcher is not None and _number(launcher.size) != num_processes:
        raise _stray(
            launcher,
            f"{train}; give --trainer.devices and --trainer.num_nodes whose product is "
            f"{os.environ[launcher.size]}",
        )
    first = next((name for name in _RANKS if name in os.environ), None)
    if first is not None and _number(first) >= num_processes:
        raise _unusable(first, train)
    if launcher is None and num_processes > num_nodes == 1:
        _check_meeting_place()


def _launcher() -> Launcher | None:
    """Who started this process among others, as Lightning judges; None where nobody did."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return TORCHRUN
    is_interactive = os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    if "SLURM_NTASKS" in os.environ and not is_interactive:
        return SLURM
    if {"LSB_JOBID", "LSB_DJOB_RANKFILE", *LSF.variables[1:]} <= {*os.environ}:
        return LSF
    if "RANK" in os.environ:
        return TORCHRUN
    return LIGHTNING if "LOCAL_RANK" in os.environ else None


def _node_rank() -> str:
    """The variable from which Lightning takes the number of this machine."""
    return "NODE_RANK" if "NODE_RANK" in os.environ else "GROUP_RANK"


def _number(name: str) -> int:
    return int(os.environ.get(name, "0"))


def _check_meeting_place() -> None:
    """ConfigError where the processes that this one is to start, on this machine, would wait for ever."""
    given = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ]
    if not given:
        return
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        family, kind, *_, place = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as tried:
            tried.bind((place[0], _number("MASTER_PORT")))
    except (OSError, OverflowError, UnicodeError) as error:
        why = reason(error) if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"{_values(given)} in the environment, where the processes of this run cannot meet ({why}); "
            f"unset {' '.join(given)}"
        ) from error


def _unusable(name: str, why: str) -> ConfigError:
    return ConfigError(f"{_values([name])} in the environment, but {why}, or unset {name}")


def _stray(launcher: Launcher, why: str) -> ConfigError:
    """That of a process which looks like one of several."""
    names = dict.fromkeys([*launcher.variables, *_RANKS])
    if launcher is TORCHRUN:
        names = dict.fromkeys([*names, "TORCHELASTIC_RUN_ID"])
    given = [name for name in names if name in os.environ]
    return ConfigError(
        f"{_values(given)} in the environment, as if {launcher.name} had started this process among "
        f"others, but {why}, or where nobody did: unset {' '.join(given)}"
    )


def _values(names: list[str]) -> str:
    return ", ".join(f"{name} is '{os.environ[name]}'" for name in names)
