"""A class in anybody's file, by its import path."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from moe_ffn.errors import ConfigError, did_you_mean

Class = TypeVar("Class")

_tell: ContextVar[Callable[[str], None]] = ContextVar("_tell", default=lambda where: None)


@contextmanager
def telling_imports(tell: Callable[[str], None]) -> Iterator[None]:
    """Within this, `tell` is given each module or file before `import_class` first runs its code."""
    token = _tell.set(tell)
    try:
        yield
    finally:
        _tell.reset(token)


def import_class(tag: str, family: type[Class]) -> type[Class]:
    """The subclass of `family` that `module:ClassName` or `path/to/file.py:ClassName` names.

    Importing runs the code of that module; `telling_imports` says so before.

    Raises:
        ConfigError: it cannot be imported, or is no such class, or lacks a method.
    """
    where, _, name = tag.rpartition(":")
    module = _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
    found = getattr(module, name, None)
    if found is None:
        raise ConfigError(f"'{where}' has no '{name}'{did_you_mean(name, vars(module))}")
    if not (isinstance(found, type) and issubclass(found, family)):
        raise ConfigError(f"'{tag}' must be a subclass of {family.__name__}, got {found!r}")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
        raise ConfigError(f"'{tag}' must define {missing}")
    return found


def _import_module(name: str) -> ModuleType:
    if name not in sys.modules and _is_there(name):
        _tell.get()(name)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a user's module may fail in any way
        raise _failed(name, error) from error


def _import_file(path: Path) -> ModuleType:
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]
    module_name = f"moe_ffn_user_{path.stem}_{digest}"  # the same in every process, for pickling
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"'{path}' is not a Python file")
    module = importlib.util.module_from_spec(spec)
    if path.is_file():
        _tell.get()(str(path))
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # as above
        del sys.modules[module_name]
        raise _failed(str(path), error) from error
    return module


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False


def _failed(where: str, error: BaseException) -> ConfigError:
    return ConfigError(f"importing '{where}' failed: {type(error).__name__}: {error}")
