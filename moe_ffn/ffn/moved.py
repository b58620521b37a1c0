"""Old options of a mixture that are kinds of experts or blocks now, and where to write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MOVED = {
    "latent": "experts: {type: latent, VALUE, experts: {...}}",
    "weights_at": "experts: {type: input_weighted, experts: {...}}",
    "jitter": "{type: jittered, jitter: VALUE, ffn: {type: moe, ...}}",
    "output_bias": "{type: biased, ffn: {type: moe, ...}}",
    "norms.experts_input": "experts: {type: normed, input: {VALUE}, experts: {...}}",
    "norms.each_expert": "experts: {type: normed, each: {VALUE}, experts: {...}}",
    "norms.routed": "experts: {type: normed, output: {VALUE}, experts: {...}}",
    "norms.shared_input": "shared_expert: {type: normed, input: {VALUE}, ffn: {...}}",
    "norms.shared": "shared_expert: {type: normed, output: {VALUE}, ffn: {...}}",
    "norms.output": "{type: normed, output: {VALUE}, ffn: {type: moe, ...}}",
}
"""Old option -> what to write."""

_OLD_DEFAULTS = (None, False, "output")
"""Records of older runs hold the old names with these values, or 0."""


def without_moved(options: Mapping[Any, Any]) -> tuple[dict[Any, Any], dict[str, str]]:
    """Take the old names out of the options of a mixture.

    Returns:
        The other options, and a sentence for each old name that has no default value.
    """
    kept, sentences = dict(options), dict[str, str]()
    found = {name: kept.pop(name) for name in _MOVED if name in kept}
    norms = kept.pop("norms", None)
    if isinstance(norms, Mapping):
        found |= {f"norms.{place}": norm for place, norm in norms.items()}
    elif norms is not None:
        found["norms.experts_input"] = norms
    for name, value in found.items():
        if name in _MOVED and value not in _OLD_DEFAULTS:
            is_shown = isinstance(value, Mapping) or name == "jitter"
            fix = _MOVED[name].replace("VALUE", _text(value) if is_shown else "...")
            sentences[name] = f"has moved; write {fix}"
    return kept, sentences


def _text(value: Any) -> str:
    """A value as YAML writes it on one line, a mapping without its braces."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_text(inner)}" for key, inner in value.items())
    return str(value).lower() if isinstance(value, bool) else str(value)
