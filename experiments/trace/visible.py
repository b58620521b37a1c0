"""Tokens as characters that can be seen, one way for each token."""

from __future__ import annotations

import unicodedata

END_OF_DOCUMENT = "<end>"


def visible(token: bytes) -> str:
    r"""A space as `␣`, a newline as `\n`, a byte that is no UTF-8 as `\xc3`, a backslash doubled.

    What would join its neighbours or not be seen at all, such as an accent alone, is escaped too.
    """
    if not token:
        return END_OF_DOCUMENT
    text = token.replace(b"\\", b"\\\\").decode("utf-8", errors="backslashreplace")
    return "".join(map(_visible_character, text))


def _visible_character(character: str) -> str:
    if character == " ":
        return "␣"
    if character.isprintable() and not unicodedata.category(character).startswith("M"):
        return character
    return character.encode("unicode_escape").decode("ascii")
