"""Options by path: from YAML files and `--model.ffn.type moe` to one config, and the pages of `--help`.

pydantic-settings would build the arguments from closed types. The families here are open (a `type`
may name a class in a user's own file), so what is left is small and stands here: argparse takes the
named flags, PyYAML reads files and values alike, pydantic judges the merged result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.text import Text

from moe_ffn.cli.parser import Parser, wrap
from moe_ffn.config import Config, json_schema
from moe_ffn.config_files import RootConfig, merge, parse_value, read_yaml, to_yaml, validate
from moe_ffn.errors import ConfigError, did_you_mean
from moe_ffn.option_tree import (
    Option,
    did_you_mean_option,
    first_sentence,
    members_of,
    option_tree,
    same_name,
    show_value,
)

EVERYTHING = "all"
"""Stands for every section."""

FLAGS = {
    "--config FILE ...": "YAML files, merged left to right over the defaults",
    "--print-config": "print the resolved YAML and stop",
    "--print-schema": "print the JSON schema of the YAML, for editors, and stop",
    "--help [SECTION]": "this page; with a section, such as optimizer, or the path of an option, such as "
    "model.ffn.router, what it takes; --help all has every option",
    "--version": "print the versions of this package, torch and Python, and stop",
}
"""What is typed beside options by path, with its meaning."""

HOW_TO_SET = """\
Options by path, with their values here. Each is a key of the YAML file and a flag alike:
--model.ffn.num_experts 16 is `model: {ffn: {num_experts: 16}}`. Values are read as YAML. Choosing
another `type` drops the options of the old one."""

COMMON_OPTIONS = (
    "model.ffn.type",
    "model.ffn.num_experts",
    "model.ffn.router.type",
    "model.ffn.router.k",
    "model.d_model",
    "model.num_layers",
    "data.corpus.type",
    "data.seq_len",
    "data.batch_size",
    "optimizer.learning_rate",
    "trainer.max_steps",
    "trainer.precision",
    "run.name",
    "seed",
)
"""The options on the short page, as far as there are with the types that are chosen."""

Line = tuple[str, str]
"""A text that is not wrapped yet, and its style."""

EMPTY: Line = ("", "")


def parse_config(
    argv: Sequence[str],
    root: type[RootConfig],
    command: str,
    also: Mapping[str, str] = MappingProxyType({}),
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
    flags = [flag.split()[0] for flag in (*FLAGS, *also)]
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
        print_help(root, options, command, also, named.help)
        raise SystemExit(0)
    config = validate(root, options)
    if named.print_config:
        print(to_yaml(config), end="")
        raise SystemExit(0)
    return config


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


# -- the pages of --help


def print_help(
    root: type[Config],
    options: Mapping[str, Any],
    command: str,
    also: Mapping[str, str],
    section: str = "",
) -> None:
    """Print the short page or what a section takes, with the values in `options`.

    Args:
        also: the flags that this command alone takes, with their meaning.
        section: a path, `all`, or nothing for the short page.

    Raises:
        ConfigError: a `type` is unknown, or the section; nothing is printed then.
    """
    tree = option_tree(root, options)
    if not section:
        lines = [*_usage(command, also), *_overview(tree)]
    elif section == EVERYTHING:
        lines = _usage(command, also)
        for child in tree.children():
            lines += [*_section(child), EMPTY]
    else:
        option = tree.find(section)
        if option is None:
            known = ", ".join([*(child.name for child in tree.children()), EVERYTHING])
            hint = did_you_mean_option(section, tree) or f"; known: {known}"
            raise ConfigError(f"--help {section}: unknown{hint}")
        shown = option.switched_on()
        lines = [*_section(shown), *_types(shown), *_families_below(shown)]
    console = Console(highlight=False)
    for text, style in lines:
        for part in wrap(text, console.width).split("\n"):
            console.print(Text(part, style=style), soft_wrap=True)


def _usage(command: str, also: Mapping[str, str]) -> list[Line]:
    first, *others = FLAGS
    flags = {first: FLAGS[first], **also, **{flag: FLAGS[flag] for flag in others}}
    return [
        (f"usage:  {command} [--config FILE ...] [--SECTION.OPTION VALUE ...]", ""),
        EMPTY,
        *_columns(flags),
        EMPTY,
        (HOW_TO_SET, ""),
        EMPTY,
    ]


def _overview(tree: Option) -> list[Line]:
    """The sections, what is set most often, and how to read on."""
    found = [option for path in COMMON_OPTIONS if (option := tree.find(path)) is not None]
    return [
        ("Sections", "bold"),
        *_columns({option.path: option.meaning for option in tree.children()}),
        EMPTY,
        ("Set most often", "bold"),
        *(line for option in found for line in _option(option)),
        EMPTY,
        ("More", "bold"),
        *_columns(
            {
                "--help optimizer": "the options of this section, and so of each",
                "--help model.ffn": "the types of the feed-forward block, and what each takes",
                f"--help {EVERYTHING}": "every option",
            }
        ),
    ]


def _section(option: Option) -> list[Line]:
    """A section with every option in it, or one option alone."""
    lines: list[Line] = [(f"{option.path}: {option.meaning}", "bold")]
    for leaf in option.leaves():
        if leaf is option:  # whose meaning is the title
            lines.append(_flag(leaf))
        else:
            lines += _option(leaf)
    return lines


def _types(option: Option) -> list[Line]:
    """The types that a section may be of, and what each takes."""
    if option.family is None:
        return []
    lines = [EMPTY, (f"Types, and what each takes; --{option.path}.type NAME chooses one", "bold")]
    for member, names in members_of(option.family).items():
        of_type = replace(option, value={"type": names[0]})
        takes = [
            f"{child.name} {_in_short(child)}"
            for child in of_type.options_of(member)
            if child.name != "type"
        ]
        lines.append((f"  {', '.join(names)}", "cyan"))
        lines.append((f"      {first_sentence(member)}", "dim"))
        if takes:
            lines.append((f"      Takes: {', '.join(takes)}.", "dim"))
    return lines


def _families_below(option: Option) -> list[Line]:
    """Where to read what the types below this section take."""
    paths = [below.path for below in option.everything() if below.family is not None]
    if not paths:
        return []
    return [EMPTY, ("Types to choose from, and what each takes", "bold")] + [
        (f"  --help {path}", "") for path in paths
    ]


def _in_short(option: Option) -> str:
    """A value, of a section its type alone."""
    if isinstance(option.value, Mapping) and option.config is not None:
        return str(option.value.get("type", "(a section)"))
    return show_value(option.value)


def _option(option: Option) -> list[Line]:
    meaning = [(f"      {option.meaning}", "dim")] if option.meaning else []
    return [_flag(option), *meaning]


def _flag(option: Option) -> Line:
    return f"  --{option.path} {show_value(option.value)}", "cyan"


def _columns(meanings: Mapping[str, str]) -> list[Line]:
    width = max(map(len, meanings))
    return [(f"  {name:{width}}   {meaning}", "") for name, meaning in meanings.items()]
