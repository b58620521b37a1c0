"""The base of every config: strict, frozen, every mistake named by its path; and its JSON schema."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from pydantic import Field

from moe_ffn import FFNConfig
from moe_ffn.cli.exit import exit_on_bad_input
from moe_ffn.config.base import Config, TaggedConfig, children, help_texts, json_schema
from moe_ffn.config.errors import ConfigError
from moe_ffn.data.corpus import CorpusConfig
from moe_ffn.data.tokenizer import TokenizerConfig
from moe_ffn.experts.base import ExpertsConfig
from moe_ffn.model.norm import NormConfig
from moe_ffn.model.positions import PositionsConfig
from moe_ffn.routing import RouterConfig
from moe_ffn.runs.config import TrainConfig
from tests.helpers.cases import answers
from tests.helpers.shape_family import Drawing, mistakes

REJECTED = """
{3: 1}
    3: unknown; known: title, shape, shapes, options
{options: {required: 1, cuont: 3}}
    options.cuont: unknown; did you mean 'count'?
{shape: {type: circle, inner: {type: square, sied: 3.0}}}
    shape.inner.sied: unknown; did you mean 'side'?
{"{x}": 1}
    {x}: unknown; known: title, shape, shapes, options
{shape: {side: 3.0}}
    shape.type: missing; one of: circle, ellipse, square, or my_file.py:ClassName
{shape: {tpye: circle}}
    shape.type: missing, but there is 'tpye'; one of: circle, ellipse, square, or my_file.py:ClassName
{shape: {type: sqare}}
    shape.type: unknown 'sqare'; did you mean 'square'?; known: circle, ellipse, square
{shape: own.py}
    shape.type: 'own.py' is a file; name a class in it: own.py:ClassName
{shape: {type: [circle]}}
    shape.type: must be a name, got ['circle']; known: circle, ellipse, square
{shape: 3}
    shape: must be a mapping of options, got 3
{options: {}}
    options.required: missing; this option has no default
{options: {required: true}}
    options.required: must be a whole number, got True
{options: {required: 16.0}}
    options.required: must be a whole number, got 16.0
{options: {required: 1, rate: "1e-3"}}
    options.rate: must be a number, got '1e-3'
{options: {required: 1, rate: .nan}}
    options.rate: must be a finite number, got nan
{options: {required: 1, flag: 1}}
    options.flag: must be true or false, got 1
{options: {required: 1, count: 9}}
    options.count: must be at most 8, got 9
{shape: {type: square, side: 0.0}}
    shape.side: must be greater than 0.0, got 0.0
{options: {required: 1, sizes: []}}
    options.sizes: must not be empty, got []
{shape: {type: "tests.helpers.shape_family:Named", name: ""}}
    shape.name: must not be empty, got ''
{title: a}
    title ('a') must differ from options.label
"""


@pytest.mark.parametrize(("options", "line"), answers(REJECTED))
def test_a_bad_value_is_rejected_by_path(options: str, line: str) -> None:
    assert mistakes(Drawing, yaml.safe_load(options)) == [line]


def test_a_part_of_a_value_is_named_and_a_long_value_shortened() -> None:
    (line,) = mistakes(Drawing, {"options": {"required": 1, "sizes": [1, "2x"]}})
    assert line.startswith("options.sizes.1: ")
    (line,) = mistakes(Drawing, {"options": {"required": "9" * 500}})
    assert line == f"options.required: must be a whole number, got '{'9' * 27}...{'9' * 27}'"


def test_every_mistake_has_its_line() -> None:
    data = {"shape": {"type": "squar"}, "options": {"required": 0.5, "count": 0}, "title": 1}
    assert mistakes(Drawing, data) == [
        "title: must be text (in YAML, put quotes around it), got 1",
        "shape.type: unknown 'squar'; did you mean 'square'?; known: circle, ellipse, square",
        "options.count: must be at least 1, got 0",
        "options.required: must be a whole number, got 0.5",
    ]
    with pytest.raises(ConfigError) as rejected:
        Drawing(**data)  # a constructor raises the same lines
    assert str(rejected.value).splitlines() == mistakes(Drawing, data)


def test_defaults_are_checked_too() -> None:
    class Wrong(Config, frozen=True):
        size: int = Field(default=0, ge=1)

    assert mistakes(Wrong, {}) == ["size: must be at least 1, got 0"]


# -- folders that torch needs at its import, and processes that wait or stay silent


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            'mkdir "$GONE" && cd "$GONE" && rmdir "$GONE"',
            "error: the current folder was removed, and torch cannot be imported in it; cd to another one\n",
        ),
        (
            "ulimit -f 0",
            "error: TMPDIR: no folder for temporary files is writable, and torch needs one; make room in "
            "/tmp, or set TMPDIR to another folder\n",
        ),
    ],
    ids=["folder removed", "no file may be written"],
)
def test_a_sentence_comes_before_torch(tmp_path: Path, script: str, said: str) -> None:
    variables = {"GONE": str(tmp_path / "gone"), "PYTHONPATH": str(ROOT), "TMPDIR": "/nowhere"}
    done = subprocess.run(
        ["bash", "-c", f'{script}; exec "$0" -m moe_ffn.cli --help', sys.executable],
        cwd=tmp_path,
        env={**os.environ, **variables, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


TORCHRUN = {"TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.parametrize(
    ("variables", "is_first", "num_waits"),
    [
        ({}, True, 0),
        ({"LOCAL_RANK": "0", "RANK": "4"}, True, 0),  # of the second machine
        ({"LOCAL_RANK": "1", "RANK": "1"}, False, 0),
        ({"SLURM_LOCALID": "1", "SLURM_PROCID": "1"}, False, 0),
        ({"LOCAL_RANK": "0", **TORCHRUN}, True, 0),
        ({"LOCAL_RANK": "1", **TORCHRUN}, False, 1),
    ],
)
def test_a_mistake_is_reported_once_on_each_machine_and_torchrun_does_not_end_first(
    variables: dict[str, str],
    is_first: bool,
    num_waits: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    slept: list[float] = []
    monkeypatch.setattr("moe_ffn.cli.exit.time.sleep", slept.append)

    def mistaken(argv: object) -> int:
        raise ConfigError("model.ffn: unknown")

    assert exit_on_bad_input(mistaken) == 2
    assert capfd.readouterr().err == ("error: model.ffn: unknown\n" if is_first else "")
    assert len(slept) == num_waits


# -- plain values and the JSON schema of every member


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


def test_a_walk_enters_mappings_lists_and_tuples() -> None:
    given = {"key": 1}, [2], (3,), "text"
    assert [[*children(value)] for value in given] == [[("key", 1)], [(0, 2)], [(0, 3)], []]
