"""Import of custom classes, `my_file.py:MyConfig`, and a record of the code that was run.

A file is read once, so the bytes that are hashed and permitted are the bytes that run. Cached bytecode is
ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TypeVar

from pydantic import ValidationError

from moe_ffn.config.errors import ConfigError, did_you_mean, explain, first_line
from moe_ffn.config.files import reason

log = logging.getLogger(__name__)

Class = TypeVar("Class")

PACKAGE = "moe_ffn"


@dataclass(frozen=True)
class Code:
    """File or module that a `type` names, read before it is run."""

    where: str
    """Part of the tag before the colon: a path that ends in `.py`, or the name of a module."""

    path: Path | None
    """Source file; None for a module without one."""

    content: bytes
    """Bytes of the file; empty without a file."""

    @property
    def is_file(self) -> bool:
        """True for a path, False for the name of a module."""
        return self.where.endswith(".py")

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def module_name(self) -> str:
        """Key in `sys.modules`; for a file it contains the hash, so that all processes use the same key."""
        if not self.is_file:
            return self.where
        stem = re.sub(r"\W", "_", Path(self.where).stem)
        return f"{PACKAGE}_user_{stem}_{self.sha256[:16]}"


_run: dict[str, Code] = {}
"""Module name -> code that was run, even if it raised an error."""

_imported: dict[str, Code] = {}
"""Part of the tag before the colon -> code of its latest import."""

_permit: ContextVar[Callable[[Code], None]] = ContextVar("_permit", default=lambda code: None)


@contextmanager
def permitting_imports(permit: Callable[[Code], None]) -> Iterator[None]:
    """Call `permit`, which may raise ConfigError, before `import_class` first runs a module or file."""
    token = _permit.set(permit)
    try:
        yield
    finally:
        _permit.reset(token)


class FileTag(str):
    """`my_file.py:ClassName` in a YAML file, whose relative paths start at the folder of that file."""

    __slots__ = ("resolved",)

    resolved: str
    """The tag with its path relative to the current folder."""

    def __new__(cls, text: str, folder: Path) -> FileTag:
        tag = super().__new__(cls, text)
        where, _, name = text.rpartition(":")
        tag.resolved = f"{folder / where}:{name}"
        return tag


def is_file_tag(text: str) -> bool:
    """Return True for text that names a class in a file."""
    return re.fullmatch(r".+\.py:\w+", text) is not None


def import_class(tag: str, family: type[Class]) -> type[Class]:
    """Import the subclass of `family` that a tag names, with a warning and output to stderr; its code runs
    unless `permitting_imports` forbids it. ConfigError if that fails, or the class is another or abstract.
    """
    where, _, name = tag.rpartition(":")
    code = find_code(where)
    with explaining_custom_errors(f"importing '{where}'"), contextlib.redirect_stdout(sys.stderr):
        module = (_import_file if code.is_file else _import_module)(code)
        cls = getattr(module, name, None)
    _imported[where] = code
    if cls is None:
        raise ConfigError(f"'{where}' has no '{name}'{did_you_mean(name, vars(module))}")
    if not (isinstance(cls, type) and issubclass(cls, family)):
        raise ConfigError(f"'{tag}' must be a subclass of {family.__name__}, got {cls!r}")
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
        raise ConfigError(f"'{tag}' must define {missing}")
    return cls


def find_code(where: str) -> Code:
    """Read the code that a tag names, without running it; ConfigError if the file cannot be read."""
    if not where.endswith(".py"):
        path = file_of_module(where)
        try:
            return Code(where, path, b"" if path is None else path.read_bytes())
        except OSError:
            return Code(where, None, b"")
    path = Path(where)
    if path.exists() and not path.is_file():
        raise ConfigError(f"importing '{where}' failed: it is not a file")
    try:
        return Code(where, path, path.read_bytes())
    except OSError as error:
        why = reason(error)
        if isinstance(error, FileNotFoundError):
            why += "; a relative path starts at the folder of the YAML file that names it, or, in an option, "
            why += "at the current folder"
        raise ConfigError(f"importing '{where}' failed: {type(error).__name__}: {why}") from error


def file_of_module(name: str) -> Path | None:
    """Return the source file of a module, without importing its parent packages."""
    try:
        dotted, *rest = name.split(".")
        spec = importlib.util.find_spec(dotted)
        for part in rest:
            dotted = f"{dotted}.{part}"
            folders = None if spec is None else spec.submodule_search_locations
            spec = importlib.machinery.PathFinder.find_spec(dotted, folders or [])
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.has_location or spec.origin is None:
        return None
    return Path(spec.origin)


def _import_module(code: Code) -> ModuleType:
    name = code.where
    if name not in sys.modules:
        _permit_and_warn(code)
    if name.partition(".")[0] != PACKAGE:
        _run.setdefault(name, code)
    return importlib.import_module(name)


def _import_file(code: Code) -> ModuleType:
    name = code.module_name
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, code.where)
    assert spec is not None, "a path that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    _permit_and_warn(code)
    sys.modules[name] = module
    _run[name] = code
    try:
        exec(compile(code.content, code.where, "exec", dont_inherit=True), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _permit_and_warn(code: Code) -> None:
    _permit.get()(code)
    log.warning("importing %r, which runs its code", code.where)


# -- imported code


def is_custom_class(cls: type) -> bool:
    """Return True for a class of another package."""
    return cls.__module__.partition(".")[0] != PACKAGE


def imported_code(tag: str) -> Code | None:
    """Return the code that a tag ran; None if it ran none, or names a class of this package."""
    where = tag.rpartition(":")[0]
    return None if where.partition(".")[0] == PACKAGE else _imported.get(where)


def tag_of(cls: type) -> str:
    """Return the `type` that imports a class."""
    code = _run.get(cls.__module__)
    return f"{cls.__module__ if code is None else code.where}:{cls.__qualname__}"


# -- errors in custom code


@contextmanager
def explaining_custom_errors(culprit: str = "") -> Iterator[None]:
    """Turn an error of custom code, `sys.exit` included, into a ConfigError that names its file and line.
    Raise exits by signal unchanged, and without a `culprit`, the subject of the message, also errors without
    custom code in their traceback.
    """
    try:
        yield
    except GeneratorExit:
        raise
    except BaseException as error:
        if isinstance(error, ConfigError) and not isinstance(error.__cause__, ValidationError):
            raise
        frame = _custom_frame(error.__traceback__)
        culprit = culprit or (f"'{frame.filename}'" if frame else "")
        if _is_signal_exit(error) or not culprit:
            raise
        raise ConfigError(f"{culprit} failed: {_describe(error)}") from error


def _describe(error: BaseException) -> str:
    """Format an error as `ZeroDivisionError: division by zero (own.py, line 3, in build)`."""
    kind = type(error).__name__
    if isinstance(error, ValidationError):
        text = explain(error)[0]
    elif isinstance(error, ConfigError):
        text = first_line(error)
    else:
        text = f"{kind}: {first_line(error)}" if str(error) else kind
    if isinstance(error, SyntaxError):  # its text has the line
        return text
    frame = _custom_frame(error.__traceback__)
    if frame is None:
        return text
    function = "" if frame.name == "<module>" else f", in {frame.name}"
    return f"{text} ({Path(frame.filename).name}, line {frame.lineno}{function})"


def _custom_frame(trace: TracebackType | None) -> traceback.FrameSummary | None:
    """Return the innermost line of custom code in a traceback."""
    innermost = None
    for frame, line in traceback.walk_tb(trace):
        code = _run.get(str(frame.f_globals.get("__name__")))
        if code is not None:
            innermost = traceback.FrameSummary(code.where, line, frame.f_code.co_name)
    return innermost


def _is_signal_exit(error: BaseException) -> bool:
    """Return True for Ctrl-C, or an exit after a signal, whose code is above 128."""
    exited = isinstance(error, SystemExit) and isinstance(error.code, int) and error.code > 128
    return exited or isinstance(error, KeyboardInterrupt)
