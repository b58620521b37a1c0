"""The parts of a config that come from outside the package, and its options with their types rewritten."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from moe_ffn.config import Config, TaggedConfig
from moe_ffn.import_path import Code, imported_code

Path = tuple[str | int, ...]
"""Keys that lead to a part in the plain options."""


def tagged_parts(value: Any, path: Path = ()) -> Iterator[tuple[Path, TaggedConfig]]:
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
