"""`--help` of a page, a section or an option, and `--version`."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from moe_ffn.cli import __main__ as console
from moe_ffn.cli.command_line import COMMON_OPTIONS, parse_config
from moe_ffn.cli.exit import exit_on_bad_input
from moe_ffn.cli.parser import wrap
from moe_ffn.cli.train import parse
from moe_ffn.config.base import help_texts
from moe_ffn.config.errors import ConfigError
from moe_ffn.config.option_tree import ALSO_CALLED, flatten, option_tree
from moe_ffn.ffn import FFNConfig
from moe_ffn.routing import RouterConfig
from moe_ffn.runs.config import TrainConfig
from moe_ffn.studies.config import StudyConfig

Show = Callable[..., str]


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Show:
    """Return the output of the training program as one line; its exit code is 0."""

    def printed(*argv: str, columns: int = 80) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as stopped:
            parse(argv)
        assert stopped.value.code == 0
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= columns
        return " ".join(out.split())

    return printed


def test_short_help_lists_every_section_and_the_common_options(show: Show) -> None:
    printed = show("--help")

    for name, text in help_texts(TrainConfig).items():
        assert f" {name} {' '.join(text.split())}" in printed
    assert {*COMMON_OPTIONS} - {*flatten(TrainConfig().to_dict())} == {"method.type"}
    for path in {*COMMON_OPTIONS} - {"method.type"}:  # of `initialise`
        assert f"--{path} " in printed
    for flag in ("--config FILE", "--resume [RUN]", "--help [SECTION]", "--version", "--help all"):
        assert flag in printed
    assert "--optimizer.adamw_eps" not in printed
    assert len(printed) < 3600, "it has to stay short"


def test_a_section_has_only_its_own_options(show: Show) -> None:
    printed = show("--help", "optimizer")

    assert printed.startswith(
        "optimizer: The optimizer and its learning rate. --optimizer.type muon "
    )
    assert "--optimizer.learning_rate 0.01 Peak learning rate" in printed
    assert "--optimizer.schedule.type cosine Cosine decay from the peak rate" in printed
    assert "--trainer" not in printed
    assert printed.endswith("Sections with several types --help optimizer.schedule")


@pytest.mark.parametrize(
    ("path", "family"), [("model.ffn", FFNConfig), ("model.ffn.router", RouterConfig)]
)
def test_a_family_has_all_its_types_with_what_they_take(
    show: Show, path: str, family: type[FFNConfig | RouterConfig]
) -> None:
    printed = show("--help", path)

    _, _, types = printed.partition(f"Types and their options; --{path}.type NAME selects one")
    for member in set(family.members.values()):
        names = [name for name, named in family.members.items() if named is member]
        _, found, of_type = types.partition(f" {', '.join(names)} ")
        assert found
        takes = of_type.partition(" Options: ")[2]
        keys = set(member.known_keys()) - {"type"} - member.rejected_options
        for key in keys:
            assert f"{key} " in takes.partition(". ")[0] + takes, (names, key)


def test_options_that_a_type_rejects_are_not_listed(show: Show) -> None:
    printed = show("--help", "model.ffn.router")

    assert "neuron_top_k Top-k of |silu(gate x) * up x|" in printed
    assert " Options: bias false, jitter 0.0, k 2, correction_bias false. noisy_top_k" in printed


def test_one_option_and_sections_that_are_off(show: Show) -> None:
    assert show("--help", "trainer.max_steps") == (
        "trainer.max_steps: Optimizer steps of the whole run. --trainer.max_steps 400"
    )
    off = show("--help", "trainer.early_stopping")
    assert "--trainer.early_stopping.patience 3 Validations" in off
    assert " swiglu, geglu, " in show("--help", "model.ffn.shared_expert")


@pytest.mark.parametrize(
    ("section", "hint"),
    [
        ("optimzer", "; did you mean 'optimizer'?"),
        ("router", "; did you mean 'model.ffn.router'?"),
        ("lr", "; did you mean 'optimizer.learning_rate'?"),
        ("zzz", f"; known: {', '.join(TrainConfig.model_fields)}, all"),
    ],
)
def test_an_unknown_section_is_answered_with_the_nearest(section: str, hint: str) -> None:
    with pytest.raises(ConfigError) as rejected:
        parse_config(["--help", section], TrainConfig, "train")
    assert str(rejected.value) == f"--help {section}: unknown{hint}"


def test_synonyms_lead_to_existing_options() -> None:
    tree = option_tree(TrainConfig, TrainConfig().to_dict())

    assert set(ALSO_CALLED.values()) <= {option.name for option in tree.descendants()}
    # `top_k` of a sample is an option, and still another name for the `k` of a router.
    paths = {option.path for option in tree.leaves()}
    for path in paths:
        section, _, name = path.rpartition(".")
        assert f"{section}.{ALSO_CALLED.get(name)}" not in paths, f"{path} is an option itself"


@pytest.mark.parametrize(
    "name",
    [
        *(f"moe_ffn.cli.{name}" for name in console.PROGRAMS),
        "experiments.corpora",
        "experiments.overhead",
        "experiments.benchmark.__main__",
    ],
)
def test_help_splits_no_word_and_fits(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def words(width: int) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr(sys, "argv", ["program", "--help"])
        assert exit_on_bad_input(import_module(name).main) == 0
        # How argparse breaks the usage is its own.
        usage, _, after_usage = capsys.readouterr().out.partition("\n\n")
        assert max(map(len, after_usage.splitlines())) <= width
        if name.startswith("moe_ffn"):
            assert f"moe-ffn {name.rpartition('.')[2]}" in usage
            # The wheel has no `configs/` and no `docs/`; `study_page` writes to a folder of the user's own.
            own = after_usage.replace("docs/studies", "")
            assert "experiments" not in usage + own
            assert re.findall(r"(?:configs|docs|tests)/[\w/*.]*", own) == []
        return after_usage.split()

    assert words(60) == words(1000)


@pytest.mark.parametrize("name", console.PROGRAMS)
def test_help_has_the_purpose_and_each_example_on_a_line_of_its_own(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    purpose, *text = (import_module(f"moe_ffn.cli.{name}").__doc__ or "").splitlines()
    with pytest.raises(SystemExit):
        console.run([name, "--help"])

    printed = [line.strip() for line in capsys.readouterr().out.splitlines()]

    assert any(line.startswith(purpose) for line in printed)
    assert {line.strip() for line in text if line.strip().startswith(f"moe-ffn {name} ")} <= {
        *printed
    }


def test_the_help_of_initialise_shows_its_methods(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        console.run(["initialise", "--help"])
    assert "--method.type upcycle" in capsys.readouterr().out.partition("Set most often")[2]


def test_the_study_that_the_help_of_sweep_shows_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        console.run(["sweep", "--help"])
    shown = re.findall(r"^    ((?:arms|grid|seeds): .*)$", capsys.readouterr().out, re.MULTILINE)
    (tmp_path / "study.yaml").write_text("\n".join(shown))

    study = StudyConfig.read(tmp_path / "study.yaml")

    assert len(study.planned_runs()) == 2 * 2 * 3


def test_a_program_prints_its_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["program", "--version"])
    assert exit_on_bad_input(import_module("moe_ffn.cli.train").main) == 0
    assert capsys.readouterr().out == (
        f"moe_ffn {importlib.metadata.version('moe_ffn')}, torch "
        f"{importlib.metadata.version('torch')}, Python {platform.python_version()}\n"
    )


WRAPPED = {
    "short": ("a line", "a line"),
    "prose is joined": ("one two three four five six\nseven", "one two three four five six\nseven"),
    "indented": ("    one two three four five six", "    one two three four five\n    six"),
    "two columns": (
        "  -x   one two three four five six seven",
        "  -x   one two three four five six\n       seven",
    ),
    "no room for two columns": (
        "  --a-name   one two three four five six",
        "  --a-name\n      one two three four five six",
    ),
    "no word is split": ("one " + 40 * "x" + " two", "one\n" + 40 * "x" + "\ntwo"),
    "nor at a hyphen": ("one two three four five six-seven", "one two three four five\nsix-seven"),
    "an empty line": ("one\n\ntwo", "one\n\ntwo"),
}


@pytest.mark.parametrize(("text", "wrapped"), WRAPPED.values(), ids=WRAPPED)
def test_wrapping(text: str, wrapped: str) -> None:
    assert wrap(text, 37 if "-" in text.split()[0] else 30) == wrapped
