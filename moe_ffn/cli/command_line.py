"""Options by path: YAML files and `--model.ffn.type moe` become one config; also the pages of `--help`.

argparse parses the flags of a program, PyYAML parses files and values, and pydantic validates the merged
options. argparse cannot know all options, since a `type` may name a class in a user's file.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from moe_ffn.cli.parser import Parser, wrap
from moe_ffn.config import errors
from moe_ffn.config.base import Config, json_schema
from moe_ffn.config.errors import ConfigError, did_you_mean
from moe_ffn.config.option_tree import (
    Option,
    first_sentence,
    members_of,
    merge,
    nearest_options,
    nest_options,
    option_tree,
    show_value,
)
from moe_ffn.config.yaml_files import RootConfig, parse_value, read_yaml, to_yaml, validate

EVERYTHING = "all"
"""Argument of `--help` that shows all sections."""

HOW_TO_SET = """\
Options by path, with their current values. Each is both a key of the YAML file and a flag:
--model.ffn.num_experts 16 is `model: {ffn: {num_experts: 16}}`. Values are parsed as YAML. A new
`type` drops the options of the old type."""

COMMON_OPTIONS = (
    "method.type",
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
"""Options on the short help page, if the selected types have them."""


def parse_config(
    argv: Sequence[str],
    root: type[RootConfig],
    command: str,
    add_flags: Callable[[Parser], object] = lambda parser: None,
) -> RootConfig:
    """Return the config of `parse_flags`, without the flags."""
    return parse_flags(argv, root, command, add_flags)[1]


def parse_flags(
    argv: Sequence[str], root: type[RootConfig], command: str, add_flags: Callable[[Parser], object]
) -> tuple[Namespace, RootConfig]:
    """Return the flags, and the config merged from defaults, `--config` files and dotted overrides.

    `--help`, `--version`, `--print-config` and `--print-schema` print their answer and exit. `add_flags` adds
    the program's own flags. Raises ConfigError with one line per mistake.
    """
    parser = Parser(
        prog=command,
        usage=f"{command} [--config FILE ...]\n       [--SECTION.OPTION VALUE ...]",
        epilog=HOW_TO_SET,
        add_help=False,
    )
    parser.add(
        "--config FILE",
        "YAML files, merged left to right over the defaults",
        type=str,
        action="extend",
        nargs="+",
        default=[],
    )
    add_flags(parser)
    parser.add("--print-config", "print the resolved YAML and stop")
    parser.add("--print-schema", "print the JSON schema of the YAML for editors, and stop")
    parser.add_argument(
        "-h",
        "--help",
        nargs="?",
        const="",
        metavar="SECTION",
        help="show this page, the options of a section such as optimizer, or those of an option such as "
        f"model.ffn.router; --help {EVERYTHING} shows every option",
    )
    flags, rest = parser.parse_known_args(argv)
    if flags.print_schema:
        print(json.dumps(json_schema(root), indent=2))
        raise SystemExit(0)
    options = root().to_dict()
    for path in flags.config:
        from_file = read_yaml(Path(path), where=f"--config {path}")
        if {"arms", "grid"} & {*from_file} - {*root.model_fields}:
            sweep = errors.command("sweep", "--config", path)
            raise ConfigError(f"--config {path}: is a study; its runs are trained by {sweep}")
        options = merge(options, from_file)
    options = merge(options, overrides_of(rest, root, parser))
    if flags.help is not None:
        print_help(option_tree(root, options), parser.format_help(), flags.help)
        raise SystemExit(0)
    config = validate(root, options)
    if flags.print_config:
        for note in config.notes():
            print(f"# {note}")
        print(to_yaml(config), end="")
        raise SystemExit(0)
    return flags, config


def overrides_of(arguments: Sequence[str], root: type[Config], parser: Parser) -> dict[str, Any]:
    """Parse the dotted overrides, which argparse has left.

    Raises ConfigError if an argument is not an option, and is similar to a flag or has no value.
    """
    for argument, following in zip(arguments, [*arguments[1:], "--"], strict=False):
        name, has_value, _ = argument.partition("=")
        if not name.startswith("--") or name[2:].partition(".")[0] in root.model_fields:
            continue
        hint = did_you_mean(name, parser.flags, cutoff=0.8)
        if not hint and not has_value and following.startswith("--"):
            hint = nearest_options(name[2:], option_tree(root, root().to_dict()))
            hint = hint or "; --help lists the options"
        if hint:
            raise ConfigError(f"{name}: unknown{hint}")
    return parse_overrides(arguments)


def parse_overrides(arguments: Sequence[str]) -> dict[str, Any]:
    """Parse `["--model.ffn.num_experts", "16"]` into nested mappings; values are parsed as YAML."""
    overrides: list[tuple[str, Any]] = []
    remaining = list(arguments)
    while remaining:
        flag = remaining.pop(0)
        path, has_value, value = flag.removeprefix("--").partition("=")
        if not flag.startswith("--") or not all(path.split(".")):
            is_file = flag.endswith((".yaml", ".yml"))
            hint = f"--config {flag}" if is_file else "an option such as --model.ffn.type swiglu"
            if overrides and not is_file and not flag.startswith("-"):
                hint += "; write a list as one value: --data.corpus.paths '[README.md, docs]'"
            raise ConfigError(f"'{flag}': expected {hint}")
        if not has_value:
            if not remaining or remaining[0].startswith("--"):
                raise ConfigError(f"--{path}: needs a value: --{path} VALUE")
            value = remaining.pop(0)
        overrides.append((path, parse_value(value, where=f"--{path}")))
    return nest_options(overrides)


# -- help pages

Line = tuple[str, str]
"""Unwrapped text and its rich style."""


def print_help(tree: Option, usage: str, section: str = "") -> None:
    """Print the short page, or a `section` (a path, or `all`) with the values in `tree`, below the usage.

    Raises ConfigError if a `type` or the section is unknown; nothing is printed.
    """
    if section not in ("", EVERYTHING):
        usage, option = "", tree.find(section)
        if option is None:
            known = ", ".join([*(child.name for child in tree.children()), EVERYTHING])
            hint = nearest_options(section, tree) or f"; known: {known}"
            raise ConfigError(f"--help {section}: unknown{hint}")
        lines = _section_page(option.switched_on())
    elif section:
        lines = [line for child in tree.children() for line in (*_section(child), ("", ""))]
    else:
        lines = _overview(tree)
    console = Console(highlight=False)
    if usage:
        console.print(Text(usage), soft_wrap=True)  # argparse has wrapped it
    for text, style in lines:
        console.print(Text(wrap(text, console.width), style=style), soft_wrap=True)


def _overview(tree: Option) -> list[Line]:
    """Return the sections and the common options."""
    common = [option for path in COMMON_OPTIONS if (option := tree.find(path)) is not None]
    width = max(len(option.path) for option in tree.children())
    sections = [f"  {option.path:{width}}   {option.meaning}" for option in tree.children()]
    return [
        ("Sections", "bold"),
        *((line, "") for line in sections),
        ("\nSet most often", "bold"),
        *_options(common),
    ]


def _section(option: Option) -> list[Line]:
    """Return a section with all its options, or a single option."""
    title = (f"{option.path}: {option.meaning}", "bold")
    leaves = list(option.leaves())
    if leaves == [option]:
        return [title, *_options([replace(option, meaning="")])]  # the title has the meaning
    return [title, *_options(leaves)]


def _section_page(option: Option) -> list[Line]:
    """Return a section, and its possible types with their options."""
    lines = _section(option)
    if option.family is not None:
        choice = f"Types and their options; --{option.path}.type NAME selects one"
        lines.append((f"\n{choice}", "bold"))
        for member, names in members_of(option.family).items():
            options = replace(option, value={"type": names[0]}).options_of(member)
            defaults = [f"{o.name} {_short_value(o)}" for o in options if o.name != "type"]
            lines.append((f"  {', '.join(names)}", "cyan"))
            lines.append((f"      {first_sentence(member)}", "dim"))
            if defaults:
                lines.append((f"      Options: {', '.join(defaults)}.", "dim"))
    if families := [below.path for below in option.descendants() if below.family is not None]:
        lines.append(("\nSections with several types", "bold"))
        lines += [(f"  --help {path}", "") for path in families]
    return lines


def _short_value(option: Option) -> str:
    """Format a value; for a section, only its type."""
    if isinstance(option.value, Mapping) and option.config is not None:
        return str(option.value.get("type", "(a section)"))
    return show_value(option.value)


def _options(options: Iterable[Option]) -> list[Line]:
    lines: list[Line] = []
    for option in options:
        lines.append((f"  --{option.path} {show_value(option.value)}", "cyan"))
        if option.meaning:
            lines.append((f"      {option.meaning}", "dim"))
    return lines
