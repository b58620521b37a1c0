"""`--help`: every option by the path that sets it, its value, and its meaning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from rich.console import Console
from rich.text import Text

from moe_ffn.config import Config, TaggedConfig
from moe_ffn.errors import ConfigError, explain

USAGE = """\
usage: {command} [--config FILE ...] [--SECTION.OPTION VALUE ...]

  --config FILE ...   YAML files, merged left to right over the defaults
{also}  --print-config      print the resolved YAML and stop
  --print-schema      print the JSON schema of the YAML, for editors, and stop
  --help              this page; with other options, for what they choose:
                      {command} --model.ffn.type swiglu --help

Options by path, with their values here. Each is a key of the YAML file and a flag alike:
--model.ffn.num_experts 16 is `model: {{ffn: {{num_experts: 16}}}}`. Values are read as YAML. Choosing
another `type` drops the options of the old one.
"""


def print_help(
    root: type[Config], options: Mapping[str, Any], command: str, also: str = ""
) -> None:
    """Print the usage, then the options of `root` with the values in `options`.

    Args:
        also: lines of the usage about what this command alone takes.

    Raises:
        ConfigError: a `type` is unknown; nothing is printed then.
    """
    console = Console(highlight=False)
    sections = [
        (f"{name}: {field.description}", list(_rows(field.annotation, options.get(name), name)))
        for name, field in root.model_fields.items()
    ]
    print(USAGE.format(command=command, also=also))
    for title, rows in sections:
        _print_indented(console, Text(title, style="bold"), 0)
        for path, value, text in rows:
            _print_indented(console, Text.assemble((f"--{path} ", "cyan"), str(value)), 2)
            if text:
                _print_indented(console, Text(text, style="dim"), 6)
        console.print()


def _print_indented(console: Console, text: Text, indent: int) -> None:
    """Without the spaces with which rich fills the lines of a text that it wraps."""
    for line in text.wrap(console, console.width - indent):
        line.rstrip()
        console.print(Text(" " * indent).append_text(line))


def _rows(
    annotation: Any, value: Any, path: str, meaning: str = ""
) -> Iterator[tuple[str, str, str]]:
    """(path, value, meaning) of every option at and below `path`."""
    if (tag := _outside_tag(annotation, value)) is not None:
        text = "Its own options are not listed, since --help runs nobody's code; --print-config has them."
        yield f"{path}.type", tag, f"{meaning} {text}".lstrip()
        return
    try:
        config = _config_class(annotation, value)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{path}.{line}" for line in explain(error))) from error
    if config is None:
        yield path, _show(value), meaning
        return
    further = [key for key in config.known_keys() if key not in config.model_fields]
    if further:
        yield f"{path}.NAME", "VALUE", f"Further names: {', '.join(further)}."
    for name, field in config.model_fields.items():
        below = value.get(name) if isinstance(value, Mapping) else None
        if below is None:
            below = "(required)" if field.is_required() else field.get_default()
        below = below.to_dict() if isinstance(below, Config) else below
        here = f"{path}.{name}"
        if name == "type" and issubclass(config, TaggedConfig):
            family = next(base for base in config.__mro__ if _is_root(base))
            choices = ", ".join([*family.members, "module:ClassName"])
            yield here, _show(below), f"{_first_line(config)} One of: {choices}."
        else:
            meaning = " ".join((field.description or "").split())
            if get_origin(field.annotation) is Literal:
                meaning += f" One of: {', '.join(map(str, get_args(field.annotation)))}."
            yield from _rows(field.annotation, below, here, meaning)


def _outside_tag(annotation: Any, value: Any) -> str | None:
    """The `type` at a field of a family, where it names a class from outside the package."""
    tag = value.get("type") if isinstance(value, Mapping) else value
    families = [
        family for family in get_args(annotation) or [annotation] if isinstance(family, type)
    ]
    is_outside = isinstance(tag, str) and ":" in tag and any(map(_is_root, families))
    return tag if is_outside else None


def _is_root(cls: type) -> bool:
    return issubclass(cls, TaggedConfig) and TaggedConfig in cls.__bases__


def _config_class(annotation: Any, value: Any) -> type[Config] | None:
    """The config that describes `value` at a field with this annotation; None for plain values."""
    if value is None:
        return None
    is_union = get_origin(annotation) in (Union, UnionType)
    for candidate in get_args(annotation) if is_union else [annotation]:
        if isinstance(candidate, type) and issubclass(candidate, Config):
            if not _is_root(candidate):
                return candidate
            value = {"type": value} if isinstance(value, str) else value
            return candidate.class_for(value) if isinstance(value, Mapping) else None
    return None


def _first_line(config: type[Config]) -> str:
    return (config.__doc__ or "").strip().splitlines()[0].rstrip(".") + "."


def _show(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
