"""Options of a run in words, for pages and for differences between runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from moe_ffn.config.base import Config
from moe_ffn.config.errors import ConfigError
from moe_ffn.config.trust import only_trusted_code
from moe_ffn.config.yaml_files import validate
from moe_ffn.model.decoder import DecoderConfig


def block_of(model: Any) -> str:
    """Describe the feed-forward block in the section `model` of plain options.

    Empty if its class is in untrusted code, or if this version cannot read the options.
    """
    with suppress(ConfigError), only_trusted_code(Path()):
        ffn = validate(DecoderConfig, model).ffn
        return ", ".join([ffn.describe(), *_non_default_options(ffn)])
    return ""


_SHOWN_ELSEWHERE = frozenset({"type", "num_experts", "k", "p", "d_ff", "backend"})
"""Options of a block that its short description or its cost shows, and `backend`, which changes no result."""


def _non_default_options(config: Config, prefix: str = "") -> Iterator[str]:
    """Yield the options without their default value, as `router.scale 0.25`."""
    for name, option in type(config).model_fields.items():
        value, path = getattr(config, name), f"{prefix}{name}"
        default = option.get_default(call_default_factory=True, validated_data={})
        if isinstance(value, Config) and isinstance(default, Config):
            yield from _non_default_options(value, f"{path}.")
        elif name not in _SHOWN_ELSEWHERE and value != default:
            plain = value.to_dict() if isinstance(value, Config) else value
            yield f"{path} {value_in_words(plain)}"


def value_in_words(value: Any) -> str:
    """Return a plain value as text; for a section with a `type`, only that."""
    if isinstance(value, Mapping) and value.get("type"):
        return str(value["type"])
    return value if isinstance(value, str) else json.dumps(value, default=str, skipkeys=True)
