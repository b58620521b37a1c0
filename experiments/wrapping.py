"""Text for a terminal of any width; words stay whole."""

from __future__ import annotations

import re
import textwrap

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
