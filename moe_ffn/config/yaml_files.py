"""YAML files and values: read, merged, validated into one config, and written."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError
from yaml.composer import ComposerError

from moe_ffn.config.base import Config, mapped
from moe_ffn.config.errors import ConfigError, explain, first_line, shorten
from moe_ffn.config.files import reason
from moe_ffn.config.import_path import FileTag, explaining_custom_errors, is_file_tag
from moe_ffn.config.option_tree import explain_unknown, option_tree, show_value
from moe_ffn.config.trust import UntrustedCodeError, only_trusted_code

RootConfig = TypeVar("RootConfig", bound=Config)

_MAX_BYTES = 100_000
"""Maximum size of a config; sixty different layers fit."""


def validate(root: type[RootConfig], options: Mapping[str, Any], where: str = "") -> RootConfig:
    """Validate plain options; ConfigError with one line per mistake, which begins with `where`, the file or
    model. A warning is logged before the code of a custom class runs.
    """
    try:
        with explaining_custom_errors():
            return root.model_validate(options)
    except ValidationError as error:

        def unknown(path: str, message: str) -> str:
            return explain_unknown(path, message, option_tree(root, options))

        prefix = f"{where}: " if where else ""
        raise ConfigError("\n".join(prefix + line for line in explain(error, unknown))) from error


def read_yaml(path: Path, where: str) -> dict[str, Any]:
    """Read the mapping in a YAML file; a ConfigError begins with `where`."""
    try:
        with path.open("rb") as file:  # or a pipe, such as `<(command)`
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{where}: {reason(error)}") from error
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{where}: is longer than {_MAX_BYTES} bytes, so it is not a config")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: is not a UTF-8 text file") from error
    options = parse_yaml(text, where)
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise ConfigError(f"{where}: must hold a YAML mapping, got {type(options).__name__}")

    def tagged(leaf: Any) -> Any:
        is_tag = isinstance(leaf, str) and is_file_tag(leaf)
        return FileTag(leaf, path.parent) if is_tag else leaf

    return mapped(options, tagged)


def read_config(path: Path, root: type[RootConfig]) -> RootConfig:
    """Read the config of a run. Each line of a ConfigError names the file; an UntrustedCodeError, raised
    before untrusted code runs, names the code.
    """
    try:
        with only_trusted_code(path.parent):
            return validate(root, read_yaml(path, where=f"'{path}'"))
    except UntrustedCodeError:
        raise
    except ConfigError as error:
        lines = (
            line if line.startswith(f"'{path}'") else f"'{path}': {line}"
            for line in str(error).splitlines()
        )
        raise ConfigError("\n".join(lines)) from error


def to_yaml(options: Config | Mapping[str, Any]) -> str:
    """Format options as YAML that `--config` can read."""
    plain = options.to_dict() if isinstance(options, Config) else dict(options)
    return yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def flag_value(value: Any) -> str:
    """Format a value for the command line, quoted for the shell."""
    if not isinstance(value, Mapping | list | tuple):
        return shlex.quote(show_value(value))
    text = yaml.dump(
        value,
        Dumper=_Dumper,
        default_flow_style=True,
        sort_keys=False,
        allow_unicode=True,
        width=math.inf,
    )
    return shlex.quote(text.strip())


def parse_value(text: str, where: str) -> Any:
    """Parse a flag's value as YAML; without brackets, `def f(x):` is text and not a mapping."""
    if text.lstrip()[:1] in ("{", "[", '"', "'"):
        return parse_yaml(text, where)
    try:
        value = parse_yaml(text, where)
    except ConfigError:
        return text
    return text if isinstance(value, str | dict | list) else value


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML of plain values; for anything else raise a ConfigError that begins with `where`."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark is not None else ""
        problem = getattr(error, "problem", None) or "unreadable"
        raise ConfigError(f"{where}: is not valid YAML{line}: {shorten(problem, 120)}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # PyYAML raises these for a key that is a list, `!!bool maybe`, or a number of ten thousand digits.
        problem = shorten(first_line(error), 120)
        raise ConfigError(f"{where}: is not valid YAML: unreadable value: {problem}") from error


class _Loader(yaml.SafeLoader):
    """YAML 1.1 in which `1e-3` is a number, `1:30` and `2026-11-21` are text, and keys must differ."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        node = super().compose_node(parent, index)
        # The node of an alias has no end yet if the list or mapping that it stands for has not.
        if node is not None and node.end_mark is None:
            problem = "a value contains itself, by an alias (*) inside its own anchor (&)"
            raise ComposerError(None, None, f"{problem}; write it out", node.start_mark)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                problem = f"'{key.value}' is given twice"
                raise ComposerError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` or YAML 1.1 would read as another value."""


_PLAIN = ("null", "bool", "int", "float", "str", "seq", "map")
"""YAML types of values in a config. Other tags, such as `!!python/object`, are rejected."""

_Loader.yaml_constructors = {
    tag: construct
    for tag, construct in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.endswith(tuple(f":{name}" for name in _PLAIN))
}

_YAML_1_1_SURPRISES = ("timestamp", "int", "float")

_Loader.yaml_implicit_resolvers = {
    first: [(tag, rule) for tag, rule in rules if not tag.endswith(_YAML_1_1_SURPRISES)]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# Numbers as in YAML 1.2, where `1:00` is text instead of 60.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9][0-9]*)$"), list("-+0123456789")
)
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(
            r"^[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+|\.inf)$|^\.nan$"
        ),
        list("-+0123456789."),
    )
