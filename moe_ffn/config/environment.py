"""Environment of a process: folders that torch needs, and variables that a launcher sets.

Import this before torch. If a folder that torch needs is missing, this module prints one sentence and exits,
where torch would crash.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import tempfile
from typing import NamedTuple

from moe_ffn.config.errors import ConfigError, install

log = logging.getLogger(__name__)


def _require_folders_of_torch() -> None:
    """Exit with code 2 if the current folder or every folder for temporary files is missing."""
    problem = (
        "the current folder was removed, and torch cannot be imported in it; cd to another one"
    )
    try:
        os.getcwd()  # noqa: PTH109 - Path.cwd() is the same
        problem = (
            "TMPDIR: no folder for temporary files is writable, and torch needs one; make room in /tmp, or "
            "set TMPDIR to another folder"
        )
        tempfile.gettempdir()
    except FileNotFoundError:
        print(f"error: {problem}", file=sys.stderr)
        raise SystemExit(2) from None


_require_folders_of_torch()


class LaunchError(ConfigError):
    """Variables of a launcher are missing or wrong, so that the rank of this process is unknown."""


class Launcher(NamedTuple):
    """Program that starts several processes, and the variables that it sets for each."""

    name: str
    rank: str
    size: str
    """Variable with the number of processes."""
    other: tuple[str, ...]

    @property
    def variables(self) -> tuple[str, ...]:
        return (self.rank, self.size, *self.other)


TORCHRUN = Launcher("torchrun", "RANK", "WORLD_SIZE", ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))
SLURM = Launcher("srun", "SLURM_PROCID", "SLURM_NTASKS", ("SLURM_LOCALID", "SLURM_NODEID"))
LIGHTNING = Launcher("lightning", "LOCAL_RANK", "WORLD_SIZE", ("MASTER_ADDR", "MASTER_PORT"))

_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")
"""Variables that hold a rank; Lightning reads the first that is set, whichever launcher it detects."""
VARIABLES = {
    *(name for launcher in (TORCHRUN, SLURM) for name in launcher.variables),
    "NODE_RANK",
    "GROUP_RANK",
    "TORCHELASTIC_RUN_ID",
}
_NUMBERS = VARIABLES - {"MASTER_ADDR", "TORCHELASTIC_RUN_ID"}
LAUNCHER_VARIABLES = ("MASTER_ADDR", "SLURM_NTASKS", "LSB_JOBID", "OMPI_COMM_WORLD_SIZE")
"""Environment variables of torchrun, SLURM, LSF and MPI, each of which sets one in its processes."""


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
    """Check the variables from which Lightning detects a launcher; call this before importing lightning.
    Raise ConfigError if one is missing, or has a value that no launcher sets.
    """
    for name in _NUMBERS & os.environ.keys():
        if not (os.environ[name].isdecimal() and len(os.environ[name]) < 10):
            raise _launch_error("a launcher sets a whole number; set one", name)
    launcher, node = _launcher(), _node_rank()
    if launcher in (None, LIGHTNING) and _number(node) >= max(num_nodes, 1):
        raise _launch_error(f"trainer.num_nodes is {num_nodes}; raise it", node)
    if launcher is None:
        return
    missing = [name for name in launcher.variables if name not in os.environ]
    if missing and os.environ.get(launcher.size) != "1":
        why = f"{launcher.name} sets {' and '.join(missing)} too; start the run with it"
        raise _launch_error(why, *launcher.variables, *_RANKS, "TORCHELASTIC_RUN_ID")
    if _number(launcher.rank) >= _number(launcher.size):
        why = f"{launcher.rank} must be less than {launcher.size}; correct it"
        raise _launch_error(why, *launcher.variables, *_RANKS)


def check_launcher(num_nodes: int) -> None:
    """Raise ConfigError if a run on several machines was not started by a launcher."""
    if num_nodes > 1 and not any(name in os.environ for name in LAUNCHER_VARIABLES):
        raise ConfigError(
            f"trainer.num_nodes ({num_nodes}): no launcher has started this program, so it would wait for "
            f"the other machines forever; start it on each with torchrun --nnodes {num_nodes} "
            "--nproc_per_node DEVICES --rdzv_backend c10d --rdzv_endpoint HOST:PORT -m moe_ffn.cli train, or "
            "with srun"
        )


def processes_here() -> int | None:
    """Return the number of processes that torchrun started on this machine; None without torchrun."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(count) if _launcher() is TORCHRUN and count.isdigit() else None


def check_number_of_processes(num_devices: int, num_nodes: int) -> None:
    """Raise ConfigError unless the launcher started one process for each device of each machine."""
    launcher, num_processes = _launcher(), num_devices * num_nodes
    train = f"this run trains in {num_processes} process{'es' if num_processes > 1 else ''}"
    if launcher is not None and _number(launcher.size) != num_processes:
        size = os.environ[launcher.size]
        if is_under_torchrun():
            raise ConfigError(
                f"torchrun started {size} processes, but {train} (trainer.devices, which a resumed run "
                "keeps); give --trainer.devices auto"
            )
        fix = f"give --trainer.devices and --trainer.num_nodes whose product is {size}"
        raise _launch_error(f"{train}; {fix}", *launcher.variables, *_RANKS)
    first = next((name for name in _RANKS if name in os.environ), None)
    if first is not None and _number(first) >= num_processes:
        raise _launch_error(f"{train}; set a smaller rank", first)


def _launcher() -> Launcher | None:
    """Return the launcher that Lightning would detect; None without one."""
    if is_under_torchrun():
        return TORCHRUN
    is_interactive = os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    if "SLURM_NTASKS" in os.environ and not is_interactive:
        return SLURM
    if "RANK" in os.environ:
        return TORCHRUN
    return LIGHTNING if "LOCAL_RANK" in os.environ else None


def _node_rank() -> str:
    """Return the name of the variable that Lightning reads for the rank of this machine."""
    return "NODE_RANK" if "NODE_RANK" in os.environ else "GROUP_RANK"


def _number(name: str) -> int:
    return int(os.environ.get(name, "0"))


def _launch_error(why: str, *names: str) -> LaunchError:
    """Return an error that shows each variable of `names` that is set."""
    given = [name for name in dict.fromkeys(names) if name in os.environ]
    values = ", ".join(f"{name} is '{os.environ[name]}'" for name in given)
    return LaunchError(f"{values} in the environment, but {why}, or unset {' '.join(given)}")


# -- packages of the programs

_NEEDED = ("lightning", "numpy", "plotly", "rich", "tokenizers", "torchmetrics", "yaml")


def require_packages() -> None:
    """Raise ModuleNotFoundError if a package of the programs is missing."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"the programs need {', '.join(missing)}; install with: {install('train')}"
        )


def announce_import(*packages: str) -> None:
    """Log `importing lightning ...` for packages not imported yet; call it after options are checked."""
    if not_imported := [name for name in packages if name not in sys.modules]:
        log.info("importing %s ...", " and ".join(not_imported))
