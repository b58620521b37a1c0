"""Parts of the reference that are written from the code.

They are in the pages themselves, so that a code host shows them: from a comment such as
`<!-- generated: options data -->` to `<!-- end -->`. Counts of blocks and routers stand in sentences.
`python docs/_ext/generated.py` writes them, and a test compares them with the code.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from inspect import Parameter, Signature, cleandoc
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

import moe_ffn
from moe_ffn.cli.__main__ import PROGRAMS
from moe_ffn.cli.initialise import InitialiseConfig
from moe_ffn.cli.parser import Parser
from moe_ffn.config.base import Config, TaggedConfig
from moe_ffn.config.option_tree import (
    REQUIRED,
    Option,
    first_sentence,
    members_of,
    option_tree,
    show_value,
)
from moe_ffn.ffn import FFNConfig
from moe_ffn.metrics.table import LAYER_METRICS, RUN_METRICS, WHERE, Metric
from moe_ffn.routing import RouterConfig
from moe_ffn.runs.config import TrainConfig
from moe_ffn.studies.config import StudyConfig

ROOTS: dict[str, type[Config]] = {
    "train": TrainConfig,
    "initialise": InitialiseConfig,
    "study": StudyConfig,
}
"""Config that the options of a page belong to."""

OWN_PAGES = {"FFNConfig": "ffn", "RouterConfig": "router", "ExpertsConfig": "experts"}
"""Families with a page of their own, to which other pages link."""

OWN_PATHS = ["model.ffn", "model.ffn.router", "model.ffn.experts"]
"""Sections of these families."""

DOCS = Path(__file__).parents[1]
REFERENCE = DOCS / "reference"
OPTIONS = REFERENCE / "options"

NAMES = r"(?<!\S)--[a-z][\w.-]*\w|(?<![\w./-])(?:[a-z]\w*\.)*[a-z]+(?:_[a-z0-9]+)+(?:\.\w+)*"
"""Flags, and names with an underscore, in plain text."""

LINKED = re.compile(r"\]\((\w+|\w+/index|studies/README|\.\./performance/[\w-]+)\.(?:md|ipynb)\)")
"""Link to a page of the same folder, or to the index of a folder in it."""


# -- Markdown


def table(headers: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(headers)]
    lines += [["---"] * len(lines[0]), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def prose(text: str) -> str:
    """Return plain text as Markdown for a cell: names as code, linked papers, no accidental markup."""
    text = outside_code(NAMES, r"`\g<0>`", " ".join(text.split()))
    text = outside_code(r"[*_<\[]", r"\\\g<0>", text)
    text = re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
    return text.replace("|", r"\|")


def outside_code(pattern: str, replacement: str, text: str) -> str:
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = (re.sub(pattern, replacement, part) for part in parts[::2])
    return "".join(parts)


def code(value: Any) -> str:
    return f"`{show_value(value)}`".replace("|", r"\|")


# -- options


def options(path: str, root: str = "train") -> str:
    """Return the options at and below a path, one table for each type that the section can have."""
    config = ROOTS[root]
    tree = option_tree(config, {} if root == "study" else config().to_dict())
    return "\n".join(section(tree if path == "all" else find(tree, path), 2))


def find(tree: Option, path: str) -> Option:
    option = tree.find(path)
    assert option is not None, path
    return option.switched_on()


def section(option: Option, level: int) -> Iterator[str]:
    families: list[Option] = []
    if option.family is None:
        yield options_table(option_rows_of(option.children(), option.path, families))
    else:
        yield from member_sections(option, families, level)
    for family in families:
        yield f"{'#' * level} `{family.path}`\n\n{prose(family.meaning)}\n"
        yield from section(family, level + 1)


def member_sections(option: Option, families: list[Option], level: int) -> Iterator[str]:
    """Options that most types of a family have, then a section for each type with its other options."""
    assert option.family is not None
    members = members_of(option.family)
    rows = {
        member: option_rows_of(replace(option, value={}).options_of(member), option.path, families)
        for member in members
    }
    having = {tuple(row): {m for m in rows if row in rows[m]} for m in rows for row in rows[m]}
    most = [found for found in having.values() if 2 * len(found) > len(members) > 2]
    for common in dict.fromkeys(map(frozenset, most)):
        missing = [f"`{members[member][0]}`" for member in members if member not in common]
        but = f" but {', '.join(missing)}" if missing else ""
        yield f"All types{but} have these options:\n"
        yield options_table([list(row) for row, found in having.items() if found == common])
    for member, names in members.items():
        yield f"{'#' * level} {', '.join(f'`{name}`' for name in names)}\n"
        yield f"{prose(first_sentence(member))}\n"
        if own := [row for row in rows[member] if having[tuple(row)] not in most]:
            yield options_table(own)


def options_table(rows: Iterable[Iterable[str]]) -> str:
    return table(["option", "default", "effect"], rows)


def option_rows_of(
    listed: Iterable[Option], prefix: str, families: list[Option]
) -> list[list[str]]:
    return [row for option in listed for row in option_rows(option, prefix, families)]


def option_rows(option: Option, prefix: str, families: list[Option]) -> Iterator[list[str]]:
    """Rows of an option and of those below it; families found on the way are added to `families`."""
    name = option.path.removeprefix(f"{prefix}.") if prefix else option.path
    if option.name == "type":
        return
    effect, default = prose(option.meaning), option.value
    if option.family is not None:
        page = OWN_PAGES.get(option.family.__name__)
        known = {other.family: other for other in families}
        if page is None and option.family not in known:
            families.append(option)
        path = known.get(option.family, option).path
        target = f"{page}.md" if page else f"#{path.replace('.', '')}"
        default, effect = option.type, f"{effect} See [its types]({target}).".lstrip()
    is_section = option.declared is not None and option.family is None
    if is_section and issubclass(option.declared or Config, TaggedConfig):  # one class of a family
        is_section, default = False, option.type
        effect = f"{effect} Its options are those of [`{default}`](#{default}).".lstrip()
    below = option.switched_on().children() if is_section else []
    if not below or option.value is None:
        shown = "required" if default == REQUIRED else code(default)
        yield [f"`{name}`", shown, effect]
    for child in below:
        yield from option_rows(child, prefix, families)


PAGES = {
    **{path: path.rpartition(".")[2] for path in OWN_PATHS},
    "parallel": "trainer",
    "checkpoints": "run",
    "logging": "run",
    "sample": "run",
}
"""Section -> the page with its options, if it has another name."""


def sections() -> str:
    """Return what each section configures, and the command that lists its options."""
    tree = option_tree(TrainConfig, TrainConfig().to_dict())
    names = list(TrainConfig.model_fields)
    after_model = names.index("model") + 1
    names[after_model:after_model] = OWN_PATHS
    rows = []
    for name in names:
        page = PAGES.get(name, name)
        exists = (OPTIONS / f"{page}.md").is_file()
        shown = f"[`{name}`]({page}.md)" if exists else f"`{name}`"
        rows.append([shown, prose(find(tree, name).meaning), f"`moe-ffn train --help {name}`"])
    return table(["section", "what it configures", "command that lists its options"], rows)


# -- programs


class _FoundError(Exception):
    """The parser of a program, caught when it is about to print its help."""


def parser_of(module: str) -> Parser:
    def stop(parser: Parser) -> str:
        raise _FoundError(parser)

    with patch.object(Parser, "format_help", stop):
        try:
            import_module(module).main(["--help"])
        except _FoundError as found:
            return found.args[0]
    raise AssertionError(module)


def program(name: str) -> str:
    """Return the purpose and the options of a program."""
    module = name if "." in name else f"moe_ffn.cli.{name}"
    parser = parser_of(
        "experiments.benchmark.__main__" if name == "experiments.benchmark" else module
    )
    command = f"python -m {name}" if "." in name else f"moe-ffn {name}"
    summary = parser.description or import_module(module).__doc__ or ""
    lines = [f"## {command}", "", *description(summary)]
    rows = []
    for action in parser._actions:
        flags = action.option_strings
        if {"--help", "--version", "--verbose", "--quiet"} & set(flags):
            continue
        value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
        words = [f"`{flag} {value}`".replace(" `", "`") for flag in flags] or [f"`{value}`"]
        text = (action.help or "") % (vars(action) | {"prog": command})
        rows.append([", ".join(words), prose(text)])
    return "\n".join([*lines, table(["argument", "meaning"], rows)])


def description(text: str) -> Iterator[str]:
    """Split a description into prose and indented blocks of commands."""
    for block in text.strip().split("\n\n"):
        if block.startswith(("    ", "moe-ffn ", "python -m ")):
            block = re.sub("^    ", "", block, flags=re.MULTILINE)
            is_command = block.startswith(("moe-ffn ", "python -m "))
            language = "yaml" if not is_command else "text" if " [--" in block else "bash"
            yield f"```{language}\n{block}\n```\n"
        else:
            yield prose(block).replace(r"\|", "|") + "\n"


def program_table() -> str:
    return table(["program", "what it does"], ([f"`moe-ffn {n}`", m] for n, m in PROGRAMS.items()))


def arguments(*names: str) -> str:
    return "\n".join(program(name) for name in names)


# -- metrics


def cells(metric: Metric, *keys: str) -> list[str]:
    formula = f"{metric.formula} ({metric.source})" if metric.source else metric.formula
    shown = ", ".join(f"`{key}`" for key in keys)
    return [shown, metric.title, metric.unit or "-", formula, metric.healthy]


HEADERS = ["key", "title", "unit", "what it is", "healthy"]


def metrics(kind: str) -> str:
    if kind == "run":
        of_runs = RUN_METRICS.values()
        return table(HEADERS, (cells(m, *(f"{row}/{m.key}" for row in m.rows)) for m in of_runs))
    rows = (
        [*cells(m, m.key), WHERE[m.measured], m.requires or "-"] for m in LAYER_METRICS.values()
    )
    return table([*HEADERS, "batches", "needs"], rows)


# -- the API


class _Default:
    """Default of an argument, as a signature shows it."""

    def __init__(self, value: Any) -> None:
        self.value = getattr(value, "type", ...) if isinstance(value, Config) else value

    def __repr__(self) -> str:
        if isinstance(self.value, type):
            return self.value.__name__
        return "..." if self.value is ... or repr(self.value) == "<factory>" else repr(self.value)


def signature(obj: Any) -> str:
    """Return arguments with defaults, without their types; empty if there are none to know."""
    is_class = isinstance(obj, type)
    if is_class and issubclass(obj, Config):
        fields = {name: field for name, field in obj.model_fields.items() if name != "type"}
        listed = [
            Parameter(
                name,
                Parameter.KEYWORD_ONLY,
                default=_Default(field.get_default(call_default_factory=True)),
            )
            for name, field in fields.items()
        ]
        return str(Signature(listed)) if listed else ""
    found = Signature() if is_class and issubclass(obj, Exception) else inspect.signature(obj)
    if not found.parameters or "args" in found.parameters:
        return ""
    listed = [
        each.replace(
            annotation=each.empty,
            default=each.empty if each.default is each.empty else _Default(each.default),
        )
        for each in found.parameters.values()
    ]
    return str(Signature(listed)) + ("" if is_class else f" -> {found.return_annotation}")


BASES = ("BaseModel", "Config", "Exception", "Module", "TaggedConfig")
"""Classes whose own members are not listed with those of a public class."""


def members(cls: type) -> str:
    """Return public methods with their arguments, and properties, for readers of a code host."""
    listed: dict[str, str] = {}
    for base in cls.__mro__:
        if base.__name__ in BASES or not base.__module__.startswith("moe_ffn"):
            continue
        for name, member in vars(base).items():
            value = getattr(cls, name)
            if name.startswith("_") or name in listed or not inspect.getdoc(value):
                continue
            if isinstance(member, property | cached_property):
                listed[name] = f"`{name}`"
            elif inspect.isroutine(value):
                arguments = [each for each in inspect.signature(value).parameters if each != "self"]
                listed[name] = f"`{name}({', '.join(arguments)})`"
    return f"Methods and properties: {', '.join(listed.values())}.\n" if listed else ""


def docstrings(*paths: str) -> str:
    """Return the signature, the first paragraph and the methods of names, for readers of a code host."""
    lines: list[str] = []
    for path in paths:
        obj = resolve_name(path)
        paragraph = cleandoc(obj.__doc__ or "").split("\n\n")[0]
        lines.append(f"`{path.rpartition('.')[2]}{signature(obj)}`: {prose(paragraph)}\n")
        if isinstance(obj, type) and (listed := members(obj)):
            lines.append(listed)
    return "\n".join(lines)


def parameters(path: str) -> str:
    """Return the arguments of a function with their meaning, for readers of a code host."""
    _, _, text = cleandoc(resolve_name(path).__doc__).partition("Args:\n")
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text, flags=re.MULTILINE)
    return table(
        ["argument", "meaning"], ([f"`{name}`", prose(text.rstrip("."))] for name, text in found)
    )


def names(module: str) -> str:
    """Return the public names of a module with the first line of their docstrings, for a code host."""
    public = import_module(module)
    return table(
        ["name", "meaning"],
        ([f"`{n}`", prose(first_sentence(getattr(public, n)))] for n in public.__all__),
    )


def with_full_docstrings(text: str) -> str:
    """Replace signatures and first paragraphs by directives for whole docstrings, for the site."""
    # Sphinx lists these itself.
    tables = r"^<!-- generated: (?:parameters|names) .+? -->\n.*?^<!-- end -->$"
    text = re.sub(tables, "", text, flags=re.MULTILINE | re.DOTALL)

    def directives(found: re.Match[str]) -> str:
        lines: list[str] = []
        for path in found[1].split():
            obj = resolve_name(path)
            kind = "function"
            if isinstance(obj, type):
                kind = "exception" if issubclass(obj, Exception) else "class"
            members = f"   :members:\n   :inherited-members: {', '.join(BASES)}\n"
            lines.append(f".. auto{kind}:: {path}\n{members if kind == 'class' else ''}")
        return "```{eval-rst}\n" + "\n".join(lines) + "```"

    pattern = r"^<!-- generated: docstrings (.+?) -->\n.*?^<!-- end -->$"
    return re.sub(pattern, directives, text, flags=re.MULTILINE | re.DOTALL)


# -- all pages


def title(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = json.loads(text)["cells"][0]["source"][0]
    return text.partition("\n")[0].removeprefix("# ")


PARTS = {
    "tutorials/index.md": ["tutorials/*.md"],
    "notebooks/index.md": ["notebooks/*.ipynb"],
    "howto/index.md": ["howto/*.md"],
    "reference/index.md": ["reference/*.md"],
    "reference/options/index.md": ["reference/options/*.md"],
    "explanation/index.md": ["explanation/*.md", "performance/*.md"],
    "studies/README.md": ["studies/*.md", "leaderboard.md"],
}
"""Page that introduces a part of the documentation -> the pages of that part."""


def pages() -> str:
    """Return links to all pages, by title."""
    rows: list[list[str]] = []
    for introduction, patterns in PARTS.items():
        found = {path for pattern in patterns for path in DOCS.glob(pattern)}
        links = sorted(
            f"[{title(path)}]({path.relative_to(DOCS)})" for path in found - {DOCS / introduction}
        )
        rows += [[link, title(DOCS / introduction)] for link in links]
    return table(["page", "part"], rows)


# -- Sphinx


KINDS: dict[str, Callable[..., str]] = {
    "arguments": arguments,
    "docstrings": docstrings,
    "metrics": metrics,
    "names": names,
    "options": options,
    "pages": pages,
    "parameters": parameters,
    "programs": program_table,
    "sections": sections,
}


def with_generated_parts(text: str) -> str:
    """Replace what is between each pair of comments by what the first one names."""
    return re.sub(
        r"^(<!-- generated: (\w+) ?(.*?) -->\n\n)(?:.*\n)*?(<!-- end -->)$",
        lambda found: f"{found[1]}{KINDS[found[2]](*found[3].split())}\n{found[4]}",
        text,
        flags=re.MULTILINE,
    )


def with_counts(text: str) -> str:
    """Replace the numbers of blocks, of routers and of their kinds in sentences and tables."""
    blocks, routers = (
        [name for names in members_of(family).values() for name in names]
        for family in (FFNConfig, RouterConfig)
    )
    # As docs/reference/libraries.md counts them for every library.
    kinds = {"top_k" if name.endswith("top_k") else name for name in routers} - {"forced"}
    for pattern, names in {
        r"\d+(?=\s\[blocks\])": blocks,
        r"\d+(?=\s\[routers\])|(?<=By names it is )\d+": routers,
        r"\d+(?=, with expert choice)": kinds,
    }.items():
        text = re.sub(pattern, str(len(names)), text)
    return text


def tables_of_contents(text: str, folder: Path) -> str:
    """Return the pages of the sidebar below an index page: those that it links to, by their last heading."""
    captions: dict[str, str] = {}
    for section in text.split("\n## "):
        heading = section.partition("\n")[0]
        for page in LINKED.findall(section):
            option = "" if heading.startswith("# ") else f":caption: {heading}\n"
            captions.pop(page, None)
            captions[page] = option
    return "".join(
        f"\n```{{toctree}}\n:hidden:\n{caption}\n"
        + "".join(sidebar_entry(folder, p) for p in captions if captions[p] == caption)
        + "```\n"
        for caption in dict.fromkeys(captions.values())
    )


def sidebar_entry(folder: Path, page: str) -> str:
    """Return a line of a table of contents, in which `How do I resume a run?` is `Resume a run`."""
    file = folder / f"{page}.md"
    asked = re.match(r"How do I (.)(.*)\?$", title(file)) if file.is_file() else None
    return f"{asked[1].upper()}{asked[2]} <{page}>\n" if asked else f"{page}\n"


def on_source_read(_app: Any, docname: str, source: list[str]) -> None:
    source[0] = with_full_docstrings(source[0])
    if docname.endswith(("index", "README", "reference/api")):
        source[0] += tables_of_contents(source[0], (DOCS / docname).parent)


def on_docstring(_app: Any, what: str, _name: str, _obj: Any, _opts: Any, lines: list[str]) -> None:
    """Mark indented code of a docstring as code; escape bars, which reStructuredText would substitute."""
    if what == "module":  # up to its first list of files in columns
        del lines[next((i for i, line in enumerate(lines) if "  " in line), len(lines)) :]
    if what in ("attribute", "property"):
        lines[:0] = ["..", ""]  # or napoleon would take words before a colon for a type
    header, before, converted = "", "x", []
    for line in lines:
        is_indented = line.startswith("    ")
        if is_indented and not before and not re.fullmatch(r"[A-Z]\w+:", header):
            converted += [".. code-block:: python", ""]
            header = "Code:"
        elif line and not is_indented:
            header = line
        converted.append(line if is_indented else outside_code(r"\|", r"\\|", line))
        before = line.strip()
    lines[:] = converted


def on_signature(
    _app: Any, _what: str, _name: str, obj: Any, _opts: Any, arguments: str | None, _returns: Any
) -> tuple[str, None] | None:
    """Show classes without pydantic's validators, `<factory>` of a dataclass and `*args` of a module."""
    hides = r"<factory>|^\(\*args"
    if isinstance(obj, type) and (issubclass(obj, Config) or re.search(hides, arguments or "")):
        return signature(obj), None
    return None


def on_skip_member(
    _app: Any, what: str, name: str, obj: Any, _skip: bool, _opts: Any
) -> bool | None:
    """Skip names of a module that come from other libraries, or that have a page with an example."""
    origin = getattr(obj, "__module__", None) or "moe_ffn"
    is_elsewhere = name in moe_ffn.__all__ or not origin.startswith("moe_ffn")
    return True if what == "module" and is_elsewhere else None


def on_build_finished(app: Any, _error: Any) -> None:
    """Write `index.html`, which leads to the first page, README.html."""
    leads = '<meta http-equiv="refresh" content="0; url=README.html">\n'
    (Path(app.outdir) / "index.html").write_text(leads, encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", on_source_read)
    app.connect("build-finished", on_build_finished)
    app.connect("autodoc-process-docstring", on_docstring, priority=100)  # before napoleon
    app.connect("autodoc-process-signature", on_signature)
    app.connect("autodoc-skip-member", on_skip_member)
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    for path in (DOCS.parent / "README.md", DOCS / "README.md", *REFERENCE.rglob("*.md")):
        text = with_generated_parts(path.read_text(encoding="utf-8"))
        path.write_text(with_counts(text), encoding="utf-8")
