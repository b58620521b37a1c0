"""Options by path: merging, values, and the answers that are not a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe_ffn.cli.command_line import parse_config, parse_overrides
from moe_ffn.config.option_tree import flatten, merge
from moe_ffn.config.yaml_files import parse_yaml, to_yaml
from moe_ffn.ffn import FFNConfig
from moe_ffn.runs.config import TrainConfig
from moe_ffn.training.optimizer import MuonConfig

ROOT = Path(__file__).parents[2]


def parse(*argv: str) -> TrainConfig:
    return parse_config(argv, TrainConfig, command="train")


# -- merging


MERGES = {
    "later wins": ("{a: 1, b: 2}", "{b: 3, c: 4}", "{a: 1, b: 3, c: 4}"),
    "deep": ("{a: {b: {c: 1, d: 2}}}", "{a: {b: {d: 3}}}", "{a: {b: {c: 1, d: 3}}}"),
    "lists are replaced": ("{a: [1, 2]}", "{a: [3]}", "{a: [3]}"),
    "null over a mapping": ("{a: {b: 1}}", "{a: null}", "{a: null}"),
    "a mapping over null": ("{a: null}", "{a: {b: 1}}", "{a: {b: 1}}"),
    "another type": ("{f: {type: moe, d_ff: 8}}", "{f: {type: glu}}", "{f: {type: glu}}"),
    "the same type": (
        "{f: {type: moe, k: {a: 1}}}",
        "{f: {type: moe, k: {b: 2}}}",
        "{f: {type: moe, k: {a: 1, b: 2}}}",
    ),
    "no type keeps the type": ("{f: {type: moe, e: 8}}", "{f: {e: 9}}", "{f: {type: moe, e: 9}}"),
    "shorthand of the same type": ("{f: {type: moe, e: 8}}", "{f: moe}", "{f: {type: moe, e: 8}}"),
    "shorthand of another type": ("{f: {type: moe, e: 8}}", "{f: glu}", "{f: glu}"),
    "options over a shorthand": ("{f: glu}", "{f: {d_ff: 64}}", "{f: {type: glu, d_ff: 64}}"),
    "another type over a shorthand": ("{f: glu}", "{f: {type: moe}}", "{f: {type: moe}}"),
    "options over a text that is no type": (
        "{max_time: '00:01:00:00'}",
        "{max_time: {hours: 2}}",
        "{max_time: {hours: 2}}",
    ),
    "options over a path with a colon": (
        "{f: '/a:b/my.py:Own'}",
        "{f: {d_ff: 64}}",
        "{f: {type: '/a:b/my.py:Own', d_ff: 64}}",
    ),
    "a type where none was named": (
        "{f: {d_ff: 64}}",
        "{f: {type: glu}}",
        "{f: {d_ff: 64, type: glu}}",
    ),
}


@pytest.mark.parametrize(("below", "above", "merged"), MERGES.values(), ids=MERGES)
def test_merging_follows_the_rules_and_changes_no_argument(
    below: str, above: str, merged: str
) -> None:
    old, new = yaml.safe_load(below), yaml.safe_load(above)
    assert merge(old, new) == yaml.safe_load(merged)
    assert (old, new) == (yaml.safe_load(below), yaml.safe_load(above)), "an argument was changed"


def test_files_merge_left_to_right_and_flags_win_wherever_they_stand(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("seed: 1\nmodel: {d_model: 32, num_layers: 1}\noptimizer: {momentum: 0.5}\n")
    second.write_text("seed: 2\nmodel: {num_layers: 2}\n")

    config = parse("--optimizer.momentum", "0.25", "--config", str(first), str(second))

    assert (config.seed, config.model.d_model, config.model.num_layers) == (2, 32, 2)
    assert config.optimizer == MuonConfig(momentum=0.25)
    assert parse("--config", str(second), "--config", str(first)).seed == 1
    assert parse("--seed", "1", "--seed", "2").seed == 2


FILES: dict[str, tuple[bytes, dict[str, Any]]] = {
    "empty": (b"", {}),
    "only comments": (b"# nothing yet\n", {}),
    "null": (b"null", {}),
    "a byte order mark": (b"\xef\xbb\xbfseed: 1", {"seed": 1}),
    "old line ends": (b"seed: 1\r\nrun: {name: '12'}\r\n", {"seed": 1, "run": {"name": "12"}}),
    "JSON": (b'{"seed": 3, "run": {"name": null}}', {"seed": 3}),
    "a merge": (
        b"model:\n  ffn_at:\n    0: &f {type: dense, d_ff: 8}\n    1: {<<: *f, d_ff: 9}\n",
        {"model": {"ffn_at": {"0": {"type": "dense", "d_ff": 8}, "1": {"type": "dense", "d_ff": 9}}}},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("content", "options"), FILES.values(), ids=FILES)
def test_odd_but_valid_files_are_read(
    tmp_path: Path, content: bytes, options: dict[str, Any]
) -> None:
    (tmp_path / "mine.yaml").write_bytes(content)
    config = parse("--config", str(tmp_path / "mine.yaml"))
    assert config == TrainConfig.model_validate(options)


@pytest.mark.parametrize(
    "argv",
    [
        ["--model.ffn", "swiglu"],
        ["--model.ffn=swiglu"],
        ["--model.ffn.type", "swiglu"],
        ["--model.ffn", "{type: swiglu}"],
        ["--model", "{ffn: swiglu}"],
    ],
    ids=" ".join,
)
def test_no_way_to_swap_the_block_and_no_order_loses_an_option(argv: list[str]) -> None:
    wanted = TrainConfig.model_validate({"model": {"ffn": {"type": "swiglu", "d_ff": 64}}})
    assert parse(*argv, "--model.ffn.d_ff", "64") == wanted
    assert parse("--model.ffn.d_ff", "64", *argv) == wanted


# -- values


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E-3", 1e-3),
        ("+1e-3", 1e-3),
        ("-2e+1", -20.0),
        ("16", 16),
        ("true", True),
        ("null", None),
        ("~", None),
        ("[0.9, 0.95]", [0.9, 0.95]),
        ("{a: 1}", {"a": 1}),
        ("'16'", "16"),
        ("swiglu", "swiglu"),
        ("a=b", "a=b"),
        ("def f(x): ", "def f(x): "),
        ("- x", "- x"),
        ("2026-11-21", "2026-11-21"),
        ("1:30", "1:30"),
        ("012", "012"),
        (".5", 0.5),
        ("5.", 5.0),
        ("yes", True),
        ("off", False),
        ("", None),
    ],
    ids=str,
)
def test_values_are_yaml(text: str, value: object) -> None:
    for arguments in ([f"--a.b={text}"], ["--a.b", text]):
        parsed = parse_overrides(arguments)
        assert parsed == {"a": {"b": value}}
        assert type(parsed["a"]["b"]) is type(value)


@pytest.mark.parametrize(
    "text", ["1e-3", "1.5e3", ".5", "16", "0x10", "null", "yes", "1:30", "2026-11-21", ""]
)
def test_text_that_looks_like_another_value_is_text_in_a_file(text: str) -> None:
    assert parse_yaml(to_yaml({"name": text}), "run") == {"name": text}


# -- the answers that are not a run


def test_print_config_reads_back_to_the_same_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [
        "--model.ffn", "{type: moe, num_experts: 4, capacity: {factor: 1.25}, shared_expert: glu}",
        "--model.ffn_at", "{0: dense, '1::2': {type: swiglu, d_ff: 8}}",
        "--optimizer.adamw_eps", "1e-9",
        "--sample.prompt", "'é \\n#: '",
        "--trainer.early_stopping", "{patience: 2}",
        "--trainer.max_time", "01:00:00:00",
    ]  # fmt: skip

    with pytest.raises(SystemExit) as stopped:
        parse(*argv, "--print-config")

    printed = capsys.readouterr().out
    (tmp_path / "printed.yaml").write_text(printed, encoding="utf-8")
    assert stopped.value.code == 0
    assert parse("--config", str(tmp_path / "printed.yaml")) == parse(*argv)
    assert to_yaml(parse(*argv)) == printed
    # No tags such as !!python/tuple: any YAML reader reads it.
    assert yaml.safe_load(printed) == parse(*argv).to_dict()


def test_print_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse("--print-schema")
    assert stopped.value.code == 0
    assert set(json.loads(capsys.readouterr().out)["properties"]) == set(TrainConfig.model_fields)


def test_help_names_every_section_and_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        parse("--help", "all")

    printed = capsys.readouterr().out
    for path in (*flatten(TrainConfig().to_dict()), "model.ffn_at"):
        assert f"  --{path} " in printed, path
    for title in TrainConfig.model_fields:
        assert f"\n{title}: " in printed, title
    # The choices of the family, and the meaning of an option.
    assert f"One of: {', '.join(FFNConfig.members)}" in " ".join(printed.split())
    assert "Optimizer steps between validations" in printed
    assert "--config FILE" in printed
    assert not [line for line in printed.splitlines() if len(line) > 100]


def test_help_shows_the_options_of_the_chosen_types_with_their_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    swapped = ("--data.corpus.type", "text", "--model.ffn.shared_expert", "swiglu")
    with pytest.raises(SystemExit):
        parse("--help", "all", "--seed", "7", *swapped)

    printed = " ".join(capsys.readouterr().out.split())
    assert "--seed 7 " in printed
    assert "--data.corpus.paths (required)" in printed, "--help works without a required option"
    assert "--model.ffn.shared_expert.d_ff null" in printed
    assert "One of: auto, loop, cpu, grouped_mm, triton." in printed
    assert "PydanticUndefined" not in printed


# -- widths that are solved


MATCHED = (
    "--model.ffn.experts.d_ff.match", "active_params", "--model.ffn.experts.d_ff.of.type", "dense",
    "--model.ffn_at", "{0: {type: swiglu, d_ff: {match: total_params, of: {type: dense, d_ff: 48}}}}",
)  # fmt: skip


def test_a_width_may_be_matched_by_flags_and_the_config_holds_the_number() -> None:
    config = parse(*MATCHED)

    # 2 experts of 3 matrices instead of 2 of width 512: 170.67, but 168 and the router are 0.8 % short.
    assert config.model.ffn.to_dict()["experts"]["d_ff"] == 169
    assert config.model.ffn_at["0"].to_dict()["d_ff"] == 32
    assert [match.options for match in config.matches] == [
        ("model.ffn.experts.d_ff",),
        ("model.ffn_at.0.d_ff",),
    ]
    assert [match.mismatch for match in config.matches] == [130816 / 131072 - 1, 0]
    assert TrainConfig.model_validate(config).matches == config.matches
    assert config.model_copy(update={"seed": 3}).matches == config.matches


def test_the_printed_config_has_the_number_and_a_comment(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        parse(*MATCHED, "--print-config")

    printed = capsys.readouterr().out
    assert printed.splitlines()[:3] == [
        "# model.ffn.experts.d_ff: 169 gives 130,816 active parameters where 131,072 are wanted (-0.20%)",
        "# model.ffn_at.0.d_ff: 32 gives 12,288 parameters where 12,288 are wanted (+0.00%)",
        "seed: 0",
    ]
    (tmp_path / "printed.yaml").write_text(printed)
    again = parse("--config", str(tmp_path / "printed.yaml"))
    assert again == parse(*MATCHED)
    assert again.matches == ()


def test_a_number_over_a_match_and_a_match_over_a_number(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "model: {ffn: {type: dense, d_ff: {match: total_params, of: glu}}}"
    )
    (tmp_path / "b.yaml").write_text("model: {ffn: {type: dense, d_ff: 99}}")
    a, b = str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml")
    solved = parse("--config", a).model.ffn.to_dict()["d_ff"]
    assert parse("--config", b, a).model.ffn.to_dict()["d_ff"] == solved
    assert parse("--config", a, b).model.ffn.to_dict()["d_ff"] == 99
    assert parse("--config", a, "--model.ffn.d_ff", "null").model.ffn.to_dict()["d_ff"] is None
