"""Package attributes that are imported on first use, because they need optional libraries."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from moe_ffn.config.errors import install


def lazy_names(
    package: str, names: Mapping[str, str], extra: str | None = None, hint: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package whose attributes are imported on first use.

    Args:
        package: its `__name__`.
        names: public name -> the module that defines it.
        extra: extra of this project that installs a missing package; None: the error of the import stays.
        hint: end of the error, such as which names work without the package.
    """

    def get(name: str) -> Any:
        if name in names:
            try:
                return getattr(import_module(names[name]), name)
            except ModuleNotFoundError as error:
                if extra is None:
                    raise
                need = f"{package}.{name} needs {error.name}; install with: {install(extra)}{hint}"
                raise ModuleNotFoundError(need, name=error.name) from error
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    return get, list_names
