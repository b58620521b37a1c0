"""From YAML files and dotted overrides to one config, and from mistakes to exit code 2.

pydantic-settings would build the arguments from closed types. The families here are open (a `type`
may name a class in a user's own file), so what is left is small and stands here: argparse takes the
named flags, PyYAML reads files and values alike, pydantic judges the merged result.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_ffn.cli.help import FLAGS, print_help
from moe_ffn.cli.parser import Parser
from moe_ffn.config import json_schema
from moe_ffn.config_files import RootConfig, merge, parse_value, read_yaml, to_yaml, validate
from moe_ffn.errors import ConfigError, did_you_mean
from moe_ffn.option_tree import did_you_mean_option, option_tree, same_name


def parse_config(
    argv: Sequence[str],
    root: type[RootConfig],
    command: str,
    also: Mapping[str, str] | None = None,
) -> RootConfig:
    """The config that defaults, `--config` files and dotted overrides make, later ones winning.

    Answers `--help`, `--version`, `--print-config` and `--print-schema` itself, and exits.

    Args:
        also: the flags that the caller has taken out of `argv`, with their meaning.

    Raises:
        ConfigError: one line per mistake.
    """
    parser = Parser(prog=command, add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action="extend", nargs="+", default=[])
    parser.add_argument("--print-config", action="store_true")
    parser.add_argument("--print-schema", action="store_true")
    parser.add_argument("-h", "--help", nargs="?", const="")
    named, rest = parser.parse_known_args(argv)
    if named.print_schema:
        print(json.dumps(json_schema(root), indent=2))
        raise SystemExit(0)
    options = root().to_dict()
    for path in named.config:
        options = merge(options, read_yaml(Path(path), where=f"--config {path}"))
    overrides = parse_overrides(rest)
    flags = _names([*FLAGS, *(also or {})])
    for key, value in overrides.items():
        if key not in root.model_fields and not isinstance(value, Mapping):
            tree = option_tree(root, options)
            hint = (
                same_name(key, tree, prefix="--")
                or did_you_mean(f"--{key}", flags, cutoff=0.8)
                or did_you_mean_option(key, tree, prefix="--")
            )
            if hint:
                raise ConfigError(f"--{key}: unknown{hint}")
    options = merge(options, overrides)
    if named.help is not None:
        print_help(root, options, command, also or {}, named.help)
        raise SystemExit(0)
    config = validate(root, options)
    if named.print_config:
        print(to_yaml(config), end="")
        raise SystemExit(0)
    return config


def _names(flags: Iterable[str]) -> list[str]:
    """`--resume` of `--resume [RUN]`."""
    return [flag.split()[0] for flag in flags]


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """`["--model.ffn.num_experts", "16"]` as nested mappings; values are read as YAML.

    What is set inside a mapping wins over the mapping, in whichever order they are typed:
    `--model.ffn.d_ff 64 --model.ffn swiglu` loses neither.
    """
    overrides: list[tuple[list[str], Any]] = []
    remaining = list(arguments)
    while remaining:
        flag = remaining.pop(0)
        path, has_value, value = flag.removeprefix("--").partition("=")
        if not flag.startswith("--") or not all(path.split(".")):
            is_file = flag.endswith((".yaml", ".yml"))
            hint = f"--config {flag}" if is_file else "an option such as --model.ffn.type swiglu"
            if overrides and not is_file and not flag.startswith("-"):
                hint += "; a list is one value, as in --data.corpus.paths '[README.md, docs]'"
            raise ConfigError(f"'{flag}': expected {hint}")
        if not has_value:
            if not remaining or remaining[0].startswith("--"):
                raise ConfigError(f"--{path}: needs a value, as in --{path} VALUE")
            value = remaining.pop(0)
        overrides.append((path.split("."), parse_value(value, where=f"--{path}")))
    options: dict[str, Any] = {}
    for keys, override in sorted(overrides, key=lambda item: len(item[0])):
        for key in reversed(keys):
            override = {key: override}
        options = merge(options, override)
    return options
