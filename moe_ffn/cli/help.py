"""`--help`: a short page, a section of the options, or every option with its value and its meaning."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.text import Text

from moe_ffn.config import Config
from moe_ffn.errors import ConfigError
from moe_ffn.option_tree import (
    Option,
    did_you_mean_option,
    first_sentence,
    members_of,
    option_tree,
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

SET_MOST = (
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
        lines = [*_section(shown), *_further(shown), *_types(shown), *_families_below(shown)]
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
    found = [option for path in SET_MOST if (option := tree.find(path)) is not None]
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
    passed_on: list[str] = []
    for leaf in option.leaves():
        if leaf is option:  # whose meaning is the title
            lines.append(_flag(leaf))
        elif leaf.is_passed_on:
            passed_on.append(leaf.name)
        else:
            lines += _option(leaf)
    if passed_on:
        lines.append((f"  --{option.path}.NAME VALUE", "cyan"))
        lines.append((f"      Further names: {', '.join(passed_on)}.", "dim"))
    return lines


def _further(option: Option) -> list[Line]:
    """What the options mean that a section passes on to something else."""
    meanings = {leaf.name: leaf.meaning for leaf in option.leaves() if leaf.is_passed_on}
    return [EMPTY, ("Further names", "bold"), *_columns(meanings)] if len(meanings) > 1 else []


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


_MIN_WIDTH = 30
_COLUMN_GAP = re.compile(r"\s*\S.*?\s{2,}(?=\S)")


def wrap(text: str, width: int) -> str:
    """`text`, each line that is too long continued under where its text begins.

    Of a line in two columns (`  --name VALUE   what it means`) that is the second. Lines without indentation
    that follow each other are one paragraph. A word longer than the width stands out.
    """
    return "\n".join(part for line in _paragraphs(text) for part in _wrap_line(line, width))


def _paragraphs(text: str) -> list[str]:
    lines: list[str] = []
    for line in text.splitlines():
        if lines and _is_prose(lines[-1]) and _is_prose(line):
            lines[-1] += f" {line}"
        else:
            lines.append(line)
    return lines


def _is_prose(line: str) -> bool:
    return bool(line) and not line[0].isspace() and not _COLUMN_GAP.match(line)


def _wrap_line(line: str, width: int) -> list[str]:
    indent = len(line) - len(line.lstrip())
    columns = _COLUMN_GAP.match(line)
    hanging = len(columns[0]) if columns else indent
    head, rest = line[:hanging], line[hanging:]
    if hanging + _MIN_WIDTH > width and columns:  # no room for two columns: one under the other
        hanging = indent + 4
        rest = textwrap.fill(
            rest,
            max(width, hanging + _MIN_WIDTH),
            initial_indent=" " * hanging,
            subsequent_indent=" " * hanging,
            break_long_words=False,
            break_on_hyphens=False,
        )
        return [head.rstrip(), *rest.splitlines()]
    wrapped = textwrap.wrap(
        rest,
        max(width - hanging, 1),
        break_long_words=False,
        break_on_hyphens=False,
    )
    if not wrapped:
        return [""]
    return [head + wrapped[0], *(" " * hanging + part for part in wrapped[1:])]
