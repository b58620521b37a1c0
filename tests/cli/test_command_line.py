from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe_ffn.cli.command_line import parse_config, parse_overrides
from moe_ffn.cli.exit import exit_on_bad_input
from moe_ffn.config.errors import ConfigError
from moe_ffn.config.yaml_files import merge, read_yaml, to_yaml
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


def test_a_file_may_be_empty_or_only_comments(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")

    assert parse("--config", str(tmp_path / "empty.yaml")) == TrainConfig()


def test_another_type_carries_no_same_named_argument_over() -> None:
    dense = parse("--model.ffn", "{type: dense, d_ff: 40, bias: true, dropout: 0.5}")
    assert dense.model.ffn.to_dict()["d_ff"] == 40

    swapped = parse_overrides(["--model.ffn.type", "swiglu"])
    options = merge(dense.to_dict(), swapped)

    assert options["model"]["ffn"] == {"type": "swiglu"}
    ffn = TrainConfig.model_validate(options).model.ffn.to_dict()
    assert (ffn["d_ff"], ffn["bias"], ffn["dropout"]) == (None, False, 0.0)


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
def test_every_way_to_swap_the_block_gives_the_same_config(argv: list[str]) -> None:
    assert parse(*argv) == TrainConfig.model_validate({"model": {"ffn": {"type": "swiglu"}}})


@pytest.mark.parametrize(
    "argv",
    [
        ["--model.ffn", "swiglu", "--model.ffn.d_ff", "64"],
        ["--model.ffn.d_ff", "64", "--model.ffn", "swiglu"],
        ["--model.ffn.type", "swiglu", "--model.ffn.d_ff", "64"],
        ["--model.ffn.d_ff", "64", "--model.ffn.type", "swiglu"],
    ],
    ids=" ".join,
)
def test_no_order_of_flags_loses_an_option(argv: list[str]) -> None:
    wanted = {"model": {"ffn": {"type": "swiglu", "d_ff": 64}}}

    assert parse(*argv) == TrainConfig.model_validate(wanted)


def test_naming_the_type_that_is_there_already_loses_no_option() -> None:
    config = parse("--model.ffn.num_experts", "16", "--model.ffn.type", "moe")

    assert config.model.ffn.to_dict()["num_experts"] == 16


def test_options_of_the_old_type_are_refused_and_not_dropped() -> None:
    with pytest.raises(ConfigError, match=r"^model\.ffn\.num_experts: unknown"):
        parse("--model.ffn.num_experts", "16", "--model.ffn.type", "swiglu")


def test_a_flag_given_twice_the_last_wins() -> None:
    assert parse("--seed", "1", "--seed", "2").seed == 2


# -- values


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E5", 1e5),
        ("-2e+1", -20.0),
        ("1.5e-3", 1.5e-3),
        ("0.5", 0.5),
        ("16", 16),
        ("-1", -1),
        ("true", True),
        ("null", None),
        ("~", None),
        ("[0.9, 0.95]", [0.9, 0.95]),
        ("{a: 1}", {"a": 1}),
        ("'16'", "16"),
        ("swiglu", "swiglu"),
        ("1e-3x", "1e-3x"),
        ("a=b", "a=b"),
        ("def f(x): ", "def f(x): "),
        ("- x", "- x"),
        ("2026-11-21", "2026-11-21"),
        ("1:30", "1:30"),
        ("1:30.5", "1:30.5"),
        ("012", "012"),
        (".5", 0.5),
    ],
    ids=str,
)
@pytest.mark.parametrize("equals_sign", [False, True], ids=["space", "equals"])
def test_values_are_yaml(text: str, value: object, equals_sign: bool) -> None:
    arguments = [f"--a.b={text}"] if equals_sign else ["--a.b", text]

    parsed = parse_overrides(arguments)

    assert parsed == {"a": {"b": value}}
    assert type(parsed["a"]["b"]) is type(value)


def test_values_reach_the_config() -> None:
    config = parse(
        "--optimizer.learning_rate", "1e-3",
        "--optimizer.adamw_betas", "[0.8, 0.9]",
        "--model.tie_embeddings", "false",
        "--sample.top_k", "null",
        "--trainer.devices=2",
    )  # fmt: skip

    assert config.optimizer == MuonConfig(learning_rate=1e-3, adamw_betas=(0.8, 0.9))
    assert config.model.tie_embeddings is False
    assert config.sample.top_k is None
    assert config.trainer.lightning_arguments() == {"devices": 2}


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


def test_print_config_of_the_defaults_names_every_section(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse("--print-config")

    assert list(yaml.safe_load(capsys.readouterr().out)) == list(TrainConfig.model_fields)


def test_print_schema_is_json_whose_references_all_lead_somewhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse("--print-schema")

    schema = json.loads(capsys.readouterr().out)
    assert stopped.value.code == 0
    assert set(schema["properties"]) == set(TrainConfig.model_fields)
    references = set(_references(schema))
    assert "#/$defs/FFNConfig" in references
    assert references <= {f"#/$defs/{name}" for name in schema["$defs"]}


def _references(node: Any) -> list[str]:
    if isinstance(node, list):
        return [found for item in node for found in _references(item)]
    if not isinstance(node, dict):
        return []
    here = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
    return here + [found for item in node.values() for found in _references(item)]


def test_help_names_every_section_and_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        parse("--help", "all")

    printed = capsys.readouterr().out
    for path in _paths(TrainConfig().to_dict()):
        assert f"  --{path} " in printed, path
    for title in TrainConfig.model_fields:
        assert f"\n{title}: " in printed, title
    # The choices of the family, and the meaning of an option.
    assert f"One of: {', '.join(FFNConfig.members)}" in " ".join(printed.split())
    assert "Optimizer steps between validations" in printed
    assert "--config FILE" in printed
    assert not [line for line in printed.splitlines() if len(line) > 100]


@pytest.mark.parametrize("columns", [60, 80])
def test_help_fits_the_terminal_and_ends_no_line_in_spaces(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        parse("--help", "all")

    printed = capsys.readouterr().out
    assert "\n  --model.ffn.type moe\n" in printed
    assert [line for line in printed.splitlines() if line != line.rstrip()] == []
    assert max(map(len, printed.splitlines())) <= columns


def _paths(options: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in options.items():
        nested = isinstance(value, dict) and value
        found += _paths(value, f"{prefix}{key}.") if nested else [f"{prefix}{key}"]
    return found


def test_help_shows_the_options_of_the_chosen_type(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse("--help", "all", "--model.ffn.type", "swiglu", "--data.corpus.type", "text")

    printed = capsys.readouterr().out
    assert stopped.value.code == 0
    assert "--model.ffn.multiple_of 8" in printed
    assert "--data.corpus.paths" in printed, "help is what somebody needs who lacks an option"
    assert "num_experts 8" not in printed
    assert "--model.ffn.router" not in printed


def test_help_shows_the_values_that_files_and_flags_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text("seed: 7\n")

    with pytest.raises(SystemExit):
        parse("--help", "all", "--config", str(tmp_path / "a.yaml"), "--model.ffn.router.k", "3")

    printed = capsys.readouterr().out
    assert "--seed 7\n" in printed
    assert "--model.ffn.router.k 3\n" in printed


def test_help_goes_below_a_block_inside_a_block(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help", "all", "--model.ffn.shared_expert", "swiglu")

    assert "--model.ffn.shared_expert.d_ff null" in capsys.readouterr().out


def test_help_of_an_unknown_type_is_a_mistake() -> None:
    with pytest.raises(
        ConfigError, match=r"^model\.ffn\.type: unknown 'swiglo'; did you mean 'swiglu'\?"
    ):
        parse("--help", "all", "--model.ffn.type", "swiglo")


def test_a_config_of_this_program_is_read_back_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(TrainConfig()), encoding="utf-8")

    assert read_yaml(path, "mine") == TrainConfig().to_dict()


def test_help_says_which_values_an_option_takes_and_which_it_requires(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse("--data.corpus.type", "text", "--help", "all")

    shown = " ".join(capsys.readouterr().out.split())
    assert "--data.corpus.paths (required)" in shown
    assert "One of: auto, loop, cpu, grouped_mm, triton." in shown
    assert "PydanticUndefined" not in shown
    assert "--trainer.accelerator auto" in shown


def test_an_interrupt_before_training_is_one_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.argv", ["train"])
    assert exit_on_bad_input(interrupted) == 130
    assert capsys.readouterr().err == "interrupted\n"


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


def test_a_match_follows_the_model_around_it() -> None:
    small = parse(*MATCHED, "--model.d_model", "64")
    assert small.matches[0].wanted == 2 * 64 * 256
    assert abs(small.matches[0].mismatch) < 0.02


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


def test_a_config_that_is_validated_again_keeps_what_it_knows_of_its_widths() -> None:
    config = parse(*MATCHED)
    matches = config.matches
    assert len(matches) == 2
    assert TrainConfig.model_validate(config).matches == matches
    assert config.model_copy(update={"seed": 3}).matches == matches
