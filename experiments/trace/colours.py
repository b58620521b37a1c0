"""A colour for each expert, the same for the same number, whatever it is shown on."""

from __future__ import annotations

import colorsys
from functools import cache

_GOLDEN = 0.618034
"""Steps of this part of the circle leave hues far apart, however many there are."""

_GROUNDS = 0.6, 0.36
"""Relative luminance (WCAG 2) of even and odd experts: hues that lie near each other are often an odd
number apart. Black on either has a contrast of at least 8."""

_MIDDLE = 0.179
"""Relative luminance that has a contrast of 4.58 with black and with white alike."""


@cache
def ground(expert: int) -> str:
    """`#rrggbb`, a ground to write on in black."""
    return _colour(expert, _GROUNDS[expert % 2])


@cache
def ink(expert: int) -> str:
    """`#rrggbb`, to write with on a dark or a light ground."""
    return _colour(expert, _MIDDLE)


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb`, 0 for black and 1 for white, as WCAG 2 defines it."""
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _colour(expert: int, wanted: float) -> str:
    hue, low, high = (0.58 + expert * _GOLDEN) % 1, 0.0, 1.0
    for _ in range(12):  # luminance grows with lightness; 2**-12 is finer than a step of 1 / 255
        lightness = (low + high) / 2
        if luminance(_hex(hue, lightness)) < wanted:
            low = lightness
        else:
            high = lightness
    return _hex(hue, low)


def _hex(hue: float, lightness: float) -> str:
    return "#" + "".join(f"{round(255 * c):02x}" for c in colorsys.hls_to_rgb(hue, lightness, 0.7))
