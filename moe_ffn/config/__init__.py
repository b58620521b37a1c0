"""Typed options, read from YAML and validated; a mistake is reported in one sentence.

base.py         `Config`, and `TaggedConfig` for families whose `type:` picks the class
errors.py       `ConfigError`, `Unsupported`, and the texts of messages
yaml_files.py   YAML files and `--key value`, merged
option_tree.py  all options with their defaults, as `--help` shows them
import_path.py  classes from a user's file, `type: my_file.py:MyConfig`
trust.py        rejects custom code that the user has not trusted
files.py        atomic writes, checked reads
sizes.py        hidden widths, and counts of parameters and FLOPs
environment.py  variables that torchrun, SLURM and Lightning set for each process
process_memory.py  memory of this process: its limit, and errors for sizes above it
numbers.py      numbers as text
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, names: Mapping[str, str], install: str | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package, for names (public name -> its module) imported on
    first use. An error for a missing package names the command `install`; None raises the original error.
    """

    def get(name: str) -> Any:
        if name in names:
            try:
                return getattr(import_module(names[name]), name)
            except ModuleNotFoundError as error:
                if install is None:
                    raise
                need = f"{package}.{name} needs {error.name}: {install}"
                raise ModuleNotFoundError(need, name=error.name) from error
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    return get, list_names
