"""Errors in user input, one sentence each: the key or file, the mistake, and the fix."""

from __future__ import annotations

import difflib
import reprlib
import shlex
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError

from moe_ffn.config.files import reason


class ConfigError(ValueError):
    """Wrong input: one line per mistake, each naming the key or the file."""


@dataclass(frozen=True)
class Unsupported:
    """Reason why a config cannot serve a `UseCase`, and the fix."""

    reason: str
    """Option at fault and reason: `drop 'random' lets later tokens displace earlier ones`."""
    advice: str
    """Fix: `use 'position'`."""

    def __str__(self) -> str:
        return f"{self.reason}; {self.advice}"

    def inside(self, option: str) -> Unsupported:
        """Prefix the reason with `option.`: `capacity.drop ...`."""
        return replace(self, reason=f"{option}.{self.reason}")


@dataclass(frozen=True)
class UseCase:
    """Conditions under which a block or router will run; its config returns why not from `unsupported`."""

    causal: bool = False
    """The model is causal: no output may depend on later tokens."""
    cached: bool = False
    """A decoder in evaluation computes only new tokens; earlier ones are in its cache."""
    history: bool = True
    """With `cached`: `TokenContext.history` gives access to earlier tokens."""
    device: str | None = None
    """Device type, `cpu` or `cuda`; None: unknown."""
    num_ranks: int = 1
    """Ranks among which the experts are divided."""


class HasRequirements(Protocol):
    """A config or another value that may not support every use case."""

    def unsupported(self, use_case: UseCase) -> Unsupported | None: ...


def first_unsupported(
    parts: Mapping[str, HasRequirements], use_case: UseCase
) -> Unsupported | None:
    """Return the first reason why a part of a config is unsupported; `parts` maps option -> config."""
    for option, part in parts.items():
        if unsupported := part.unsupported(use_case):
            return unsupported.inside(option)
    return None


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name most similar to `name`; None if none reaches the similarity `cutoff` (0 to 1)."""
    near = difflib.get_close_matches(name, list(dict.fromkeys(known)), n=1, cutoff=cutoff)
    return near[0] if near else None


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return `"; did you mean 'num_experts'?"` for a similar name, otherwise an empty string."""
    near = nearest(name, known, cutoff)
    return suggest([near] if near else [])


def suggest(names: Sequence[str]) -> str:
    """Format `"; did you mean 'k' or 'top_k'?"` with the first three names; empty without a name."""
    return f"; did you mean {any_of(names)}?" if names else ""


def any_of(names: Sequence[str]) -> str:
    """Format `"'a' or 'b'"` with the first three names."""
    return " or ".join(f"'{name}'" for name in names[:3])


def nearest_or_all(name: str, known: Iterable[str], these: str = "known:") -> str:
    """Return `did_you_mean`, or all names if none is similar: `"; known: train, report"`."""
    known = list(known)
    return did_you_mean(name, known) or f"; {these} {', '.join(known)}"


UNKNOWN_KEY = "unknown_key"
"""Type of a pydantic error about an unknown key."""


def explain(
    error: ValidationError, unknown: Callable[[str, str], str] = lambda path, message: message
) -> list[str]:
    """Return one sentence per mistake: `model.ffn.num_experts: must be at least 1, got 0`. `unknown` maps the
    path and message of an unknown key to the message to show.
    """
    lines: list[str] = []
    for item in error.errors(include_url=False):
        path = ".".join(str(part) or "''" for part in item["loc"] if part != "[key]")
        rule = _RULES.get(item["type"])
        if rule is None:
            message = item["msg"].removeprefix("Value error, ")
            if item["type"] == UNKNOWN_KEY:
                message = unknown(path, message)
        else:
            message = rule.format(**item.get("ctx", {}))
            if item["type"] != "missing":
                message += f", got {show(item['input'])}"
        line = f"{path}: {message}" if path else message
        lines.append(shorten(printable(line), _MAX_LINE_LENGTH))
    return lines


def show(value: Any) -> str:
    """Return the repr of a value, shortened to sixty characters; fast for huge values."""
    return shorten(_repr.repr(value))


def shorten(text: str, limit: int = 60) -> str:
    """Replace the middle of `text` by dots if it exceeds `limit`; the end often names the problem."""
    half = (limit - 3) // 2
    return text if len(text) <= limit else f"{text[:half]}...{text[-half:]}"


def printable(text: str, also: str = "") -> str:
    r"""Escape unprintable characters, which could reprogram a terminal, except spaces and those in `also`."""
    return "".join(
        c if c.isprintable() or c in also or unicodedata.category(c) == "Zs" else escaped(c)
        for c in text
    )


def escaped(character: str) -> str:
    r"""Return the ASCII escape of a character in Python code, such as `\x1b`."""
    return character.encode("unicode_escape").decode("ascii")


@contextmanager
def explaining(problem: str, advice: str = "fix its permissions") -> Iterator[None]:
    """Convert an OSError to a ConfigError: `'runs/x' cannot be read (Permission denied); fix ...`."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{problem} ({reason(error)}); {advice}") from error


def reading(path: Path) -> AbstractContextManager[None]:
    """Convert an OSError to a ConfigError that names `path`."""
    return explaining(f"'{path}' cannot be read")


@contextmanager
def prefix_errors(prefix: str) -> Iterator[None]:
    """Prefix the option in a ConfigError, so that it reads as the user typed it."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(f"{prefix}{error}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, with the next one after a colon; its type without a text."""
    first, *others = filter(None, map(str.strip, str(error).splitlines() or [type(error).__name__]))
    return f"{first} {others[0]}" if first.endswith(":") and others else first


def expand_path(path: str, key: str) -> Path:
    """Replace `~` in a path; raise a ConfigError that names the key if that fails."""
    if "\n" in path:
        raise ConfigError(
            f"{key}: {show(path)} is a text of several lines; give a file with this text"
        )
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # `~somebody` who does not exist
        raise ConfigError(f"{key}: '{path}': {first_line(error)}") from error


def import_optional(module: str, need: str) -> Any:
    """Import a module of an optional package; ConfigError, beginning with `need`, if it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"{need}: pip install {module.partition('.')[0]}") from error


_ROOT = Path(__file__).resolve().parents[2]
"""Root of the clone, or the folder of the installed packages."""


def command(program: str, *arguments: object) -> str:
    """Return the command line of a program, `moe-ffn train --resume 'runs/my run'`, for a shell."""
    return shlex.join(["moe-ffn", program, *map(str, arguments)])


def is_clone() -> bool:
    """Return True if this code is in a clone, and not an installed package."""
    return (_ROOT / "pyproject.toml").is_file()


def install(extra: str) -> str:
    """Return the command that installs an extra; in a clone, an install without -e would copy the package."""
    return f"pip install -e '.[{extra}]'" if is_clone() else f"pip install 'moe_ffn[{extra}]'"


_RULES = {
    "missing": "missing; this option has no default",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "string_type": "must be text (in YAML, put quotes around it)",
    "string_unicode": "must be UTF-8 text",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping",
    "finite_number": "must be a finite number",
    "literal_error": "must be one of {expected}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must not be empty",
    "string_too_short": "must not be empty",
}

_MAX_LINE_LENGTH = 480
"""Maximum length of a message, since a custom class may raise one of any length."""

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 200
