"""Custom code of a run: the copy in the run's folder, and the original file.

`config.yaml` names the copy by a relative path, `type: code/my_blocks.py:MyConfig`. Programs that resume a
run or load its model therefore use the code that the run began with.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, count
from pathlib import Path
from typing import Any

from moe_ffn.config.base import Config, TaggedConfig, children
from moe_ffn.config.errors import ConfigError
from moe_ffn.config.files import sha256_of
from moe_ffn.config.import_path import Code, imported_code
from moe_ffn.runs.folder import CODE_FILE, CODE_FOLDER
from moe_ffn.runs.json_files import CodeEntries, CodeEntry

log = logging.getLogger(__name__)


def portable_options(config: Config) -> dict[str, Any]:
    """Return plain options for a run's `config.yaml`, where types name the copies of custom code."""
    copies = _copy_names(named_code(config))
    return with_renamed_types(config, lambda name, code: f"{copies[code.sha256]}:{name}")


def code_files(config: Config, known: Mapping[str, CodeEntry] | None = None) -> dict[str, str]:
    """Return name in the run's folder -> text, for copies of custom code and `code.json`; empty without code.

    Entries in `known`, of a resumed run's `code.json`, name the original files. Raises ConfigError if a file
    is not UTF-8.
    """
    codes = named_code(config)
    if not codes:
        return {}
    copies, entries, files = _copy_names(codes), dict[str, Any](), dict[str, str]()
    for code in codes:
        path = "" if code.path is None else str(code.path.resolve())
        name = copies[code.sha256] if code.is_file else code.where
        entries[name] = {"path": path, "sha256": code.sha256, "copied": code.is_file}
        if code.is_file:
            try:
                files[name] = code.content.decode()
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"'{code.where}' is not UTF-8, so the run cannot keep a copy of it; save it as UTF-8"
                ) from error
    entries |= {
        name: entry.model_dump() for name, entry in (known or {}).items() if name in entries
    }
    return {**files, CODE_FILE: json.dumps(entries, indent=2) + "\n"}


def describe_code(config: Config, folder: Path) -> Iterator[str]:
    """Yield lines about the custom code of a new run: copied files, and modules without a copy."""
    codes = named_code(config)
    copied = [Path(name).name for name in _copy_names(codes).values()]
    modules = [code.where for code in codes if not code.is_file]
    if copied:
        yield f"code: {folder}/ keeps a copy of {', '.join(copied)}"
    if modules:
        yield (
            f"code: {folder}/ keeps no copy of {', '.join(modules)}, only the sha256; do not move it while "
            "the run is in use"
        )


def warn_if_code_changed(folder: Path) -> None:
    """Warn about each file of custom code that has changed since the run in `folder` began."""
    for name, entry in CodeEntries.read(folder / CODE_FILE).entries.items():
        try:
            now = sha256_of(Path(entry.path))
        except OSError:  # missing or not readable
            continue
        if now == entry.sha256:
            continue
        effect = "there is no copy, so the run uses the changed file"
        if entry.copied:
            effect = f"the run uses its copy, '{folder / name}'"
        log.warning(
            "'%s' has changed since '%s' began (sha256 %s..., now %s...); %s",
            entry.path,
            folder,
            entry.sha256[:12],
            now[:12],
            effect,
        )


def _copy_names(codes: list[Code]) -> dict[str, str]:
    """Return sha256 of a file -> name of its copy; a second file with the same name gets a number."""
    names: dict[str, str] = {}
    for code in codes:
        if code.is_file and code.sha256 not in names:
            stem = f"{CODE_FOLDER}/{Path(code.where).stem}"
            candidates = chain([f"{stem}.py"], (f"{stem}_{number}.py" for number in count(2)))
            names[code.sha256] = next(n for n in candidates if n not in names.values())
    return names


KeyPath = tuple[str | int, ...]
"""Nested keys of one part in the plain options."""


def tagged_parts(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, TaggedConfig]]:
    """Yield the path and the value of every part of a config that has a `type`, outer parts first."""
    if isinstance(value, TaggedConfig):
        yield path, value
    for key, item in children(value):
        yield from tagged_parts(item, (*path, str(key) if isinstance(value, Mapping) else key))


def named_code(config: Config) -> list[Code]:
    """Return the code that types in a config name, in order and without duplicates, as it was imported."""
    codes = (imported_code(part.type) for _, part in tagged_parts(config) if ":" in part.type)
    return list(dict.fromkeys(code for code in codes if code is not None))


def with_renamed_types(config: Config, rename: Callable[[str, Code], str]) -> dict[str, Any]:
    """Return plain options in which `rename(class name, code)` replaces each type that names a file."""
    options = config.to_dict()
    for path, part in tagged_parts(config):
        code = imported_code(part.type)
        if code is None or not code.is_file:
            continue
        part_options: Any = options
        for key in path:
            part_options = part_options[key]
        part_options["type"] = rename(part.type.rpartition(":")[2], code)
    return options


def comparable_options(config: Config) -> dict[str, Any]:
    """Return plain options to compare: the class name and the file's hash replace each type in a file."""
    return with_renamed_types(config, lambda name, code: f"{name} (code {code.sha256[:16]})")
