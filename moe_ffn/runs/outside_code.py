"""The code of a run that comes from outside: a copy in its folder, and what is known of its origin.

`config.yaml` names the copy, `type: code/my_blocks.py:MyConfig`, relative to itself, so that a run that
goes on, or is generated from or traced, runs the code it began with.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from moe_ffn.config.base import Config, TaggedConfig
from moe_ffn.config.environment import is_first_rank
from moe_ffn.config.errors import ConfigError
from moe_ffn.config.import_path import Code, file_of_module, imported_code
from moe_ffn.runs.folder import CODE_FILE, CODE_FOLDER
from moe_ffn.runs.json_files import CodeEntries, CodeEntry

_OURS = {"moe_ffn", "experiments"}
_MAX_BYTES = 10_000_000
"""No source file is longer."""


def portable_options(config: Config) -> dict[str, Any]:
    """The plain options as the config of a run's folder holds them: files are named by their copies."""
    copies = _copies(named_code(config))
    return rewritten(config, lambda name, code: f"{copies[code.sha256]}:{name}")


def code_files(config: Config, known: Mapping[str, CodeEntry] | None = None) -> dict[str, str]:
    """The copies and `code.json`, by their names in the run's folder; nothing where no code is from outside.

    Args:
        known: the entries of a run that goes on, which know where the copies came from.

    Raises:
        ConfigError: a file is not UTF-8.
    """
    codes = named_code(config)
    if not codes:
        return {}
    copies, entries, files = _copies(codes), dict[str, Any](), dict[str, str]()
    for code in codes:
        name = copies.get(code.sha256) if code.is_file else None
        path = "" if code.path is None else str(code.path.resolve())
        is_copied = name is not None
        entries[name or code.where] = {"path": path, "sha256": code.sha256, "copied": is_copied}
        if name is not None:
            files[name] = _text(code)
    for name, path in _helpers(codes).items():
        sha256 = _sha256(path) or ""
        entries[name] = {"path": str(path.resolve()), "sha256": sha256, "copied": False}
    entries |= {
        name: entry.model_dump() for name, entry in (known or {}).items() if name in entries
    }
    return {**files, CODE_FILE: json.dumps(entries, indent=2) + "\n"}


def describe_code(files: Mapping[str, str], folder: Path) -> Iterator[str]:
    """What a new run keeps of the code from outside, and what it does not."""
    entries = CodeEntries.parse(files.get(CODE_FILE, "")).entries
    copied = [name for name, entry in entries.items() if entry.copied]
    others = [name for name, entry in entries.items() if not entry.copied]
    if copied:
        yield f"code: {folder}/ keeps a copy of {', '.join(Path(n).name for n in copied)}"
    if others:
        yield (
            f"code: of {', '.join(others)} only the sha256 is kept, no copy; leave it where it is as long as "
            "the run is used"
        )


def say_changed_code(folder: Path) -> None:
    """A line on stderr for each file that is not what it was when the run in `folder` began."""
    if not is_first_rank():
        return
    for name, entry in CodeEntries.read(folder / CODE_FILE).entries.items():
        now = _sha256(Path(entry.path))
        if now in (None, entry.sha256):
            continue
        what = "there is no copy, so it is run as it is now"
        if entry.copied:
            what = f"the run goes by its copy, '{folder / name}'"
        print(
            f"'{entry.path}' has changed since '{folder}' began (sha256 {entry.sha256[:12]}..., now "
            f"{now[:12]}...); {what}",
            file=sys.stderr,
        )


def _copies(codes: list[Code]) -> dict[str, str]:
    """sha256 of a file -> the name of its copy; two files of one name get a number."""
    names: dict[str, str] = {}
    for code in codes:
        if code.is_file and code.sha256 not in names:
            stem = f"{CODE_FOLDER}/{Path(code.where).stem}"
            free = (name for n in count(2) if (name := f"{stem}_{n}.py") not in names.values())
            first = f"{stem}.py"
            names[code.sha256] = first if first not in names.values() else next(free)
    return names


def _text(code: Code) -> str:
    try:
        return code.content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"'{code.where}' is not UTF-8, so the run cannot keep a copy of it; save it as UTF-8"
        ) from error


def _sha256(path: Path) -> str | None:
    """None where there is no such file, or it is too large for a source file."""
    try:
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return None
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _helpers(codes: list[Code]) -> dict[str, Path]:
    """Modules that the code imports, neither installed nor of this project; found without running it.

    Those that are imported under a name made up at run time stay unknown.
    """
    found: dict[str, Path] = {}
    seen = {code.path.resolve() for code in codes if code.path is not None}
    waiting = [(code.content, "" if code.is_file else code.where) for code in codes]
    while waiting:
        source, module = waiting.pop()
        for name in _imported_names(source, module):
            path = None if name.partition(".")[0] in _OURS else file_of_module(name)
            if (
                path is None
                or path.resolve() in seen
                or path.suffix != ".py"
                or _is_installed(path)
            ):
                continue
            seen.add(path.resolve())
            found[name] = path
            waiting.append((path.read_bytes(), name))
    return found


def _imported_names(source: bytes, module: str) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            try:
                base = importlib.util.resolve_name("." * node.level + (node.module or ""), module)
            except ImportError:
                continue
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")


def _is_installed(path: Path) -> bool:
    homes = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")]
    return any(path.resolve().is_relative_to(home) for home in homes)


KeyPath = tuple[str | int, ...]
"""Keys that lead to a part in the plain options."""


def tagged_parts(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, TaggedConfig]]:
    """Every part of a config that a `type` picks, and where it stands; the outermost first."""
    if isinstance(value, TaggedConfig):
        yield path, value
    for key, item in _items(value):
        yield from tagged_parts(item, (*path, key))


def _items(value: Any) -> Iterator[tuple[str | int, Any]]:
    if isinstance(value, BaseModel):
        yield from ((name, getattr(value, name)) for name in type(value).model_fields)
    elif isinstance(value, Mapping):
        yield from ((str(key), item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from enumerate(value)


def named_code(config: Config) -> list[Code]:
    """The code that the types in a config name, each once, in their order; as it was when it was run."""
    codes = (imported_code(part.type) for _, part in tagged_parts(config) if ":" in part.type)
    return list(dict.fromkeys(code for code in codes if code is not None))


def rewritten(config: Config, rename: Callable[[str, Code], str]) -> dict[str, Any]:
    """The plain options, and `rename(class name, code)` in the place of each type that names a file."""
    options = config.to_dict()
    for path, part in tagged_parts(config):
        code = imported_code(part.type)
        if code is None or not code.is_file:
            continue
        place: Any = options
        for key in path:
            place = place[key]
        place["type"] = rename(part.type.rpartition(":")[2], code)
    return options


def comparable_options(config: Config) -> dict[str, Any]:
    """The plain options, equal for two configs where they name the same classes of files with the same
    content, wherever those are.
    """
    return rewritten(config, lambda name, code: f"{name} (code {code.sha256[:16]})")
