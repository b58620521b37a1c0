"""Mistakes of the user, one sentence each: the key, what is wrong, and the fix, as it is typed."""

from __future__ import annotations

import difflib
import reprlib
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError


class ConfigError(ValueError):
    """Wrong input: one line per mistake, each naming the key or the file."""


@dataclass(frozen=True)
class Refusal:
    """Reason why a config does not fit its surroundings, and advice."""

    reason: str
    """Option at fault and reason: `drop 'random' lets later tokens displace earlier ones`."""
    advice: str
    """Fix: `use 'position'`."""

    def __str__(self) -> str:
        return f"{self.reason}; {self.advice}"

    def inside(self, option: str) -> Refusal:
        """Prefix the refusal with `option.`: `capacity.drop ...`."""
        return replace(self, reason=f"{option}.{self.reason}")


@dataclass(frozen=True)
class Situation:
    """Use of a config that some members of its family cannot serve; see `refusal` of each config."""

    causal: bool = False
    """The model is causal: no output may depend on later tokens."""
    cached: bool = False
    """A decoder in evaluation computes new tokens alone, after those that it keeps in a cache."""
    history: bool = True
    """The tokens before are there in `TokenContext.history`, where `cached`."""
    device: str | None = None
    """Kind of device that computes, `cpu` or `cuda`; None: unknown."""
    num_ranks: int = 1
    """Ranks among which the experts are divided."""


class Refusing(Protocol):
    """A config, or another value, that may refuse a situation."""

    def refusal(self, situation: Situation) -> Refusal | None: ...


def first_refusal(parts: Mapping[str, Refusing], situation: Situation) -> Refusal | None:
    """Return the first refusal among the parts of a config, given by the option that holds each."""
    for option, part in parts.items():
        if refusal := part.refusal(situation):
            return refusal.inside(option)
    return None


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name that is most like `name`; None if none is as alike as `cutoff`, from 0 to 1."""
    near = difflib.get_close_matches(name, list(dict.fromkeys(known)), n=1, cutoff=cutoff)
    return near[0] if near else None


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`"; did you mean 'num_experts'?"` for a near miss, otherwise the empty string."""
    near = nearest(name, known, cutoff)
    return suggest([near] if near else [])


def suggest(names: Sequence[str]) -> str:
    """Format `"; did you mean 'k' or 'top_k'?"` with the first three names; empty without a name."""
    return f"; did you mean {any_of(names)}?" if names else ""


def any_of(names: Sequence[str]) -> str:
    """`"'a' or 'b'"`, of at most three names."""
    return " or ".join(f"'{name}'" for name in names[:3])


def nearest_or_all(name: str, known: Iterable[str], these: str = "known:") -> str:
    """`did_you_mean`, or all names if none is near: `"; known: train, report"`."""
    known = list(known)
    return did_you_mean(name, known) or f"; {these} {', '.join(known)}"


UNKNOWN_KEY = "unknown_key"
"""Type of a pydantic error about an unknown key."""


def explain(
    error: ValidationError, unknown: Callable[[str, str], str] = lambda path, message: message
) -> list[str]:
    """One sentence per mistake, `model.ffn.num_experts: must be at least 1, got 0`.

    Args:
        unknown: (path of an unknown key, message of its config) -> the message to show.
    """
    lines: list[str] = []
    for item in error.errors(include_url=False):
        path = ".".join(str(part) or "''" for part in item["loc"])
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
    """Value as code would write it, shortened to sixty characters; quick for huge values."""
    try:
        return shorten(_repr.repr(value))
    except ValueError:  # of more digits than Python writes
        return "a huge number"


def shorten(text: str, limit: int = 60) -> str:
    """`text` with its middle replaced by dots if longer than `limit`; its end often tells what is wrong."""
    half = (limit - 3) // 2
    return text if len(text) <= limit else f"{text[:half]}...{text[-half:]}"


def printable(text: str, also: str = "") -> str:
    r"""`text` with escapes such as `\x1b` for invisible characters, which could reprogram a terminal.

    Spaces of any width, and the characters in `also`, stay.
    """
    return "".join(
        c if c.isprintable() or c in also or unicodedata.category(c) == "Zs" else escaped(c)
        for c in text
    )


def escaped(character: str) -> str:
    r"""Character as Python's code would name it, `\x1b`, in ASCII."""
    return character.encode("unicode_escape").decode("ascii")


def first_line(error: BaseException) -> str:
    """First line of an error's text, or its type if it has none."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def expand_path(path: str, key: str) -> Path:
    """Replace `~` in a path; ConfigError that names the key if that fails."""
    if "\0" in path:
        raise ConfigError(f"{key}: {path!r} holds a NUL character, which no path can")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # `~somebody` who does not exist
        raise ConfigError(f"{key}: '{path}': {first_line(error)}") from error


_ROOT = Path(__file__).resolve().parents[2]
"""Folder of the clone or of the installed packages."""


def command(program: str) -> str:
    """Command line of a program, `moe-ffn train`."""
    return f"moe-ffn {program}"


def install(extra: str) -> str:
    """Command that installs an extra, `pip install 'moe_ffn[train]'`, or with `'.[train]'` in a clone."""
    name = "." if (_ROOT / "pyproject.toml").is_file() else "moe_ffn"
    return f"pip install '{name}[{extra}]'"


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
"""Maximum length of a message; a custom class may raise one of any length."""

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 200
