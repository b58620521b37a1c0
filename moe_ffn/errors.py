"""Mistakes a person can mend, one sentence each: the key, what is wrong, and the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError


class ConfigError(ValueError):
    """Input that a person can mend: one line per mistake, each naming the key or the file."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'num_experts'?"` for a near miss, otherwise the empty string."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def explain(error: ValidationError) -> list[str]:
    """One sentence per mistake, `model.ffn.num_experts: must be at least 1, got 0`."""
    lines: list[str] = []
    for item in error.errors(include_url=False):
        path = ".".join(str(part) for part in item["loc"])
        rule = _RULES.get(item["type"])
        if rule is None:
            message = item["msg"].removeprefix("Value error, ")
        else:
            message = rule.format(**item.get("ctx", {}))
            if item["type"] != "missing":
                message += f", got {_shorten(repr(item['input']))}"
        lines.append(f"{path}: {message}" if path else message)
    return lines


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it has none."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def reason(error: OSError) -> str:
    """`No space left on device`, without the number and the path."""
    return error.strerror or first_line(error)


def expand_path(path: str, key: str) -> Path:
    """`path` with `~` replaced, or a ConfigError that names the key."""
    try:
        expanded = Path(path).expanduser()
    except RuntimeError as error:  # `~somebody` who does not exist
        raise ConfigError(f"{key}: '{path}': {first_line(error)}") from error
    if "\0" in path:
        raise ConfigError(f"{key}: {path!r} holds a NUL character, which no path can")
    return expanded


_RULES = {
    "missing": "missing; this option has no default",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "string_type": "must be text (in YAML, put quotes around it)",
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
    "too_short": "must have at least {min_length} entries",
    "string_too_short": "must not be empty",
}


def _shorten(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
