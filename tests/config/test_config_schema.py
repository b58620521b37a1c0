"""Configs as plain values and as a JSON schema of every member."""

from __future__ import annotations

import json
from typing import Annotated, Any

import pytest
from pydantic import Field

from moe_ffn import FFNConfig
from moe_ffn.config.base import Config, TaggedConfig, help_texts, json_schema
from moe_ffn.data.corpus import CorpusConfig
from moe_ffn.data.tokenizer import TokenizerConfig
from moe_ffn.experts.base import ExpertsConfig
from moe_ffn.model.norm import NormConfig
from moe_ffn.model.positions import PositionsConfig
from moe_ffn.routing import RouterConfig
from moe_ffn.runs.config import TrainConfig

FAMILIES: list[type[TaggedConfig]] = [
    FFNConfig,
    RouterConfig,
    ExpertsConfig,
    PositionsConfig,
    NormConfig,
]

# ------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize(
    ("family", "tag"),
    [(family, tag) for family in FAMILIES for tag in family.members],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_every_member_goes_to_a_dict_and_back(family: type[TaggedConfig], tag: str) -> None:
    required = {"width": 8} if tag == "latent" else {}
    config = family.model_validate({"type": tag, **required})
    plain = config.to_dict()
    assert plain["type"] == tag
    assert family.model_validate(plain) == config
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain  # nothing but plain values


def test_a_dump_of_pydantic_has_the_options_of_nested_configs() -> None:
    router = {"type": "top_k", "k": 4}
    inner = {"type": "moe", "router": router, "experts": {"type": "mlp", "d_ff": 24}}
    config = FFNConfig.model_validate(
        {"type": "normed", "ffn": {**inner, "shared_expert": "dense"}}
    )

    dumped = config.model_dump()
    assert (dumped["ffn"]["router"]["k"], dumped["ffn"]["experts"]["d_ff"]) == (4, 24)
    assert FFNConfig.model_validate(dumped) == config
    assert json.loads(config.model_dump_json()) == config.to_dict()
    assert set(config.model_dump(serialize_as_any=False)["ffn"]) == {"type"}, "pydantic's default"


# -------------------------------------------------------------------------------- JSON schema


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return json_schema(TrainConfig)


def nodes(node: Any) -> list[dict[str, Any]]:
    if isinstance(node, list):
        return [found for item in node for found in nodes(item)]
    if isinstance(node, dict):
        return [node, *(found for item in node.values() for found in nodes(item))]
    return []


def test_schema_references_all_lead_somewhere(schema: dict[str, Any]) -> None:
    references = {node["$ref"] for node in nodes(schema) if "$ref" in node}
    assert "#/$defs/FFNConfig" in references
    for reference in references:
        assert reference.startswith("#/$defs/")
        assert schema["$defs"][reference.removeprefix("#/$defs/")], reference
    assert not any("x-family" in node for node in nodes(schema))


@pytest.mark.parametrize(
    "family", [*FAMILIES, CorpusConfig, TokenizerConfig], ids=lambda family: family.__name__
)
def test_the_schema_lists_every_member(schema: dict[str, Any], family: type[TaggedConfig]) -> None:
    branches = schema["$defs"][family.__name__]["anyOf"]
    named = [branch["enum"] for branch in branches if "enum" in branch]
    assert named == [list(family.members)]  # the shorthand
    tags = set()
    for branch in branches:
        tag = branch.get("properties", {}).get("type", {})
        tags |= set(tag.get("enum", [])) | {tag[key] for key in ("const",) if key in tag}
    assert tags == set(family.members)
    # and custom classes, by import path
    assert any(b.get("properties", {}).get("type", {}).get("pattern") == ":" for b in branches)


def test_schema_explains_and_bounds(schema: dict[str, Any]) -> None:
    layers = schema["$defs"]["DecoderConfig"]["properties"]["num_layers"]
    assert layers["minimum"] == 1
    assert layers["description"].startswith("Number of layers")
    assert schema["additionalProperties"] is False


class _Above(Config, frozen=True):
    kept: int = 1
    """Text of the class above,
    on two lines."""

    replaced: int = 2
    """Text of an option that the class below redeclares."""

    said: Annotated[int, Field(description="In its type.")] = 3


class _Below(_Above, frozen=True):
    replaced: int = 4

    own: int = 5
    """Its own."""


def test_the_help_of_an_option_is_of_the_class_that_declares_it() -> None:
    expected = {
        "kept": "Text of the class above,\non two lines.",
        "replaced": "",
        "said": "In its type.",
        "own": "Its own.",
    }
    assert help_texts(_Below) == expected
    properties = _Below.model_json_schema()["properties"]
    assert {name: option.get("description", "") for name, option in properties.items()} == expected


def test_a_class_without_a_source_has_no_help() -> None:
    typed: dict[str, Any] = {"Config": Config, "__name__": "typed_in_a_shell"}
    exec("class Typed(Config, frozen=True):\n    option: int = 1\n    'lost'", typed)
    assert help_texts(typed["Typed"]) == {"option": ""}


def test_schema_takes_a_number_or_a_match_for_a_width(schema: dict[str, Any]) -> None:
    widths = [
        node["properties"]["d_ff"] for node in nodes(schema) if "d_ff" in node.get("properties", {})
    ]
    number = {"minimum": 1, "maximum": 10**9, "type": "integer"}
    kinds = [number, {"$ref": "#/$defs/MatchConfig"}, {"type": "null"}]
    assert [width["anyOf"] for width in widths] == [kinds] * len(widths)
    # Dense, conv and three gated blocks; plain and three gated kinds of experts.
    assert len(widths) == 9
    match = schema["$defs"]["MatchConfig"]
    assert match["properties"]["of"]["$ref"] == "#/$defs/FFNConfig"
    assert match["required"] == ["match", "of"]
