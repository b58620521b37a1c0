"""Custom code: the copies that a run keeps, and the permission to run the code of a run folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe_ffn.cli.command_line import parse_config
from moe_ffn.config.errors import ConfigError
from moe_ffn.config.import_path import find_code
from moe_ffn.config.trust import UntrustedCodeError, accepting_code, only_trusted_code, trust
from moe_ffn.config.yaml_files import read_config
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.custom_code import (
    code_files,
    comparable_options,
    portable_options,
    warn_if_code_changed,
)
from moe_ffn.runs.folder import make_run_folder
from moe_ffn.runs.json_files import CodeEntries
from moe_ffn.runs.reader import load_run
from moe_ffn.studies.sweep import has_begun
from tests.helpers.tiny_runs import Finished, run_here

Program = Callable[..., Finished]

OWN = """
import sys
from moe_ffn import FFNConfig
from moe_ffn.ffn import DenseConfig
%s
class Own(FFNConfig, frozen=True):
    rank: int = 4
    def build(self, d_model): return DenseConfig(d_ff=self.rank, activation="relu").build(d_model)
    def num_params(self, d_model): return DenseConfig(d_ff=self.rank).num_params(d_model)
    def flops_per_token(self, d_model, seq_len): return 2 * self.num_params(d_model)
"""
MARKS = "__import__('pathlib').Path('ran').write_text('x')"
"""Leaves a file behind where it was run."""


def parse(*argv: str) -> TrainConfig:
    return parse_config(argv, TrainConfig, "train")


@pytest.fixture(autouse=True)
def _trusts_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A custom block in a file that differs in every test, because a process runs the same code once."""
    path = tmp_path / "own.py"
    path.write_text(OWN % f"# {tmp_path}")
    return path


# -- where a relative path begins


def test_a_path_in_a_yaml_file_begins_at_that_file(own: Path, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    shutil.copy(own, tmp_path / "deep")
    for name, text in {
        "deep/long.yaml": "model: {ffn: {type: 'own.py:Own', rank: 3}}",
        "deep/short.yaml": "model: {ffn: 'own.py:Own', ffn_at: {0: '../own.py:Own'}}",
        "top.yaml": "model: {ffn: 'deep/own.py:Own'}",
        "absolute.yaml": f"model: {{ffn: '{own}:Own'}}",
    }.items():
        (tmp_path / name).write_text(text)

    config = parse("--config", "deep/long.yaml")
    assert config.model.ffn.to_dict() == {"type": "deep/own.py:Own", "rank": 3}
    config = parse("--config", "deep/short.yaml")
    assert config.model.ffn.type == "deep/own.py:Own"
    assert config.model.ffn_at["0"].type == "deep/../own.py:Own"
    assert parse("--config", "top.yaml").model.ffn.type == "deep/own.py:Own"
    assert parse("--config", "absolute.yaml").model.ffn.type == f"{own}:Own"
    assert parse("--model.ffn", "own.py:Own").model.ffn.type == "own.py:Own"
    assert parse("--config", "deep/long.yaml", "--model.ffn.rank", "5").model.ffn.to_dict() == {
        "type": "deep/own.py:Own",
        "rank": 5,
    }


def test_text_that_looks_like_a_path_to_a_class_stays_text(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/mine.yaml").write_text(
        "sample: {prompt: 'own.py:Own'}\nrun: {name: 'a.py:B'}"
    )

    config = parse("--config", "deep/mine.yaml")

    assert (config.sample.prompt, config.run.name) == ("own.py:Own", "a.py:B")
    assert type(config.sample.prompt) is str


def test_a_missing_custom_file_is_reported_with_the_searched_folder(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/mine.yaml").write_text("model: {ffn: 'none.py:Own'}")

    with pytest.raises(ConfigError) as rejected:
        parse("--config", "deep/mine.yaml")

    assert str(rejected.value) == (
        "model.ffn.type: importing 'deep/none.py' failed: FileNotFoundError: No such file or directory; a "
        "relative path starts at the folder of the YAML file that names it, or, in an option, at the current "
        "folder"
    )
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(ConfigError, match=r"importing 'folder.py' failed: it is not a file"):
        parse("--model.ffn", "folder.py:Own")


def test_a_block_that_needs_numbers_to_be_built_cannot_be_built_empty(own: Path) -> None:
    taken = own.read_text().replace(
        "d_ff=self.rank, act", "d_ff=torch.ones(3)[1].int().item(), act"
    )
    own.write_text("import torch" + taken)
    config = parse("--model.ffn", "own.py:Own").model
    config.build(vocab_size=8, max_seq_len=4)
    line = next(n for n, text in enumerate(own.read_text().splitlines(), 1) if ".item()" in text)

    with pytest.raises(ConfigError) as rejected:
        config.build_empty(vocab_size=8, max_seq_len=4)

    assert str(rejected.value) == (
        f"own.py, line {line}, reads the values of a tensor, but parallel.shard, parallel.expert and "
        "moe-ffn plan build the model without values first (Tensor.item() cannot be called on meta tensors); "
        "compute it from plain Python numbers"
    )


# -- what a run keeps


def test_a_run_keeps_a_copy_that_its_config_names(own: Path, tmp_path: Path) -> None:
    config = parse("--model.ffn", "own.py:Own", "--run.name", "mine")
    options = portable_options(config)
    files = {"config.yaml": yaml.safe_dump(options), **code_files(config)}

    folder = make_run_folder(config, files)
    trust([find_code("own.py")])
    kept = read_config(folder / "config.yaml", TrainConfig)

    assert (folder / "code/own.py").read_bytes() == own.read_bytes()
    assert yaml.safe_load(files["config.yaml"])["model"]["ffn"]["type"] == "code/own.py:Own"
    assert kept.model.ffn.type == f"{folder}/code/own.py:Own"
    assert comparable_options(kept) == comparable_options(config)
    assert json.loads(files["code.json"]) == {
        "code/own.py": {"path": str(own), "sha256": find_code("own.py").sha256, "copied": True}
    }
    # The copy is named as it was, so that a run that goes on writes what is there.
    assert portable_options(kept) == options
    assert code_files(
        kept, CodeEntries.model_validate_json(files["code.json"]).entries
    ) == code_files(config)


def test_two_files_of_one_name_are_kept_apart(own: Path, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b/own.py").write_text(own.read_text() + "# another")
    (tmp_path / "b/same.py").write_text(own.read_text())

    config = parse(
        "--model.ffn", "own.py:Own", "--model.ffn_at", "{0: b/own.py:Own, 1: b/same.py:Own}"
    )

    options = portable_options(config)["model"]
    assert options["ffn"]["type"] == options["ffn_at"]["1"]["type"] == "code/own.py:Own"
    assert options["ffn_at"]["0"]["type"] == "code/own_2.py:Own"
    assert set(code_files(config)) == {"code/own.py", "code/own_2.py", "code.json"}


def test_a_config_of_only_this_package_keeps_no_code() -> None:
    assert code_files(TrainConfig()) == {}
    assert portable_options(TrainConfig()) == TrainConfig().to_dict()


def test_an_importable_module_is_recorded_without_a_copy(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "named_module.py").write_text(OWN % "# a module")

    config = parse("--model.ffn", "own.py:Own", "--model.ffn_at", "{0: 'named_module:Own'}")
    entries = json.loads(code_files(config)["code.json"])

    assert {name: entry["copied"] for name, entry in entries.items()} == {
        "code/own.py": True,
        "named_module": False,
    }
    assert portable_options(config)["model"]["ffn_at"]["0"]["type"] == "named_module:Own"


def test_custom_code_that_is_not_utf_8_is_rejected_before_a_run_starts(own: Path) -> None:
    own.write_bytes(b"# -*- coding: latin-1 -*-\n# \xe4\n" + own.read_bytes())
    with pytest.raises(ConfigError, match=r"^'own.py' is not UTF-8, so the run cannot keep a copy"):
        code_files(parse("--model.ffn", "own.py:Own"))


def test_stale_bytecode_is_never_run(own: Path, tmp_path: Path) -> None:
    import py_compile

    good = own.read_text()
    own.write_text(good.replace("rank: int = 4", "rank: int = 5"))
    compiled = py_compile.compile(str(own))
    assert compiled is not None
    size, time = own.stat().st_size, own.stat().st_mtime
    own.write_text(good)
    os.utime(own, (time, time))
    assert own.stat().st_size == size, "python would take the bytecode for that of the file"

    assert parse("--model.ffn", "own.py:Own").model.ffn.to_dict()["rank"] == 4


def test_a_default_of_a_class_in_the_same_file_leads_back_to_it(own: Path, tmp_path: Path) -> None:
    own.write_text(
        own.read_text() + "class Two(Own, frozen=True):\n    inner: FFNConfig = Own(rank=2)\n"
    )
    config = parse("--model.ffn", "own.py:Two")
    assert config.model.ffn.to_dict()["inner"] == {"type": "own.py:Own", "rank": 2}


def test_changed_originals_give_a_warning(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = {
        "code/own.py": {"path": str(own), "sha256": find_code("own.py").sha256, "copied": True},
        "gone": {"path": str(tmp_path / "gone.py"), "sha256": "0", "copied": False},
        "module": {"path": str(own), "sha256": "f" * 64, "copied": False},
    }
    (tmp_path / "code.json").write_text(json.dumps(entries))
    warn_if_code_changed(tmp_path)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"'{own}' has changed since '{tmp_path}' began (sha256 ffffffffffff..., now "
    )
    assert line.endswith("; there is no copy, so the run uses the changed file")

    own.write_text("other")
    warn_if_code_changed(tmp_path)
    first, _ = capsys.readouterr().err.splitlines()
    assert first.endswith(f"; the run uses its copy, '{tmp_path / 'code/own.py'}'")


# -- whose code


def test_a_run_s_code_is_run_once_it_is_trusted(tmp_path: Path) -> None:
    folder = tmp_path / "runs/strange"
    (folder / "code").mkdir(parents=True)
    (folder / "code/evil.py").write_text(OWN % f"{MARKS}  # {tmp_path}")
    (folder / "config.yaml").write_text("model: {ffn: 'code/evil.py:Own'}")
    sha256 = find_code(f"{folder}/code/evil.py").sha256

    def read() -> TrainConfig:
        return read_config(folder / "config.yaml", TrainConfig)

    for _ in range(2):
        with pytest.raises(UntrustedCodeError) as rejected:
            read()
        assert str(rejected.value) == (
            f"'{folder}' names code that none of your runs started with: '{folder}/code/evil.py' (sha256 "
            f"{sha256[:16]}...); read it, and if you trust it add --trust-code"
        )
    assert not Path("ran").exists()
    assert not (tmp_path / "state").exists()

    with accepting_code():
        assert read().model.ffn.type == f"{folder}/code/evil.py:Own"
    assert Path("ran").read_text() == "x"
    assert [path.name for path in (tmp_path / "state/moe_ffn/trusted_code").iterdir()] == [sha256]


def test_a_notebook_trusts_the_code_of_a_run_once(own: Path, tmp_path: Path) -> None:
    config = parse("--model.ffn", "own.py:Own")
    folder = tmp_path / "strange"
    (folder / "code").mkdir(parents=True)
    (folder / "code/own.py").write_text(f"{own.read_text()}{MARKS}\n")
    (folder / "config.yaml").write_text(yaml.safe_dump(portable_options(config)))

    with pytest.raises(UntrustedCodeError):
        _ = load_run(folder).config
    assert not Path("ran").exists()
    assert load_run(folder, trust_code=True).config.model.ffn.type == f"{folder}/code/own.py:Own"
    assert Path("ran").exists()


FAMILIES = {
    "model.ffn": "{type: 'code/evil.py:X'}",
    "model.ffn_at": "{0: 'code/evil.py:X'}",
    "model.ffn.router": "code/evil.py:X",
    "model.ffn.experts": "code/evil.py:X",
    "model.ffn.shared_expert": "code/evil.py:X",
    "model.ffn.combine": "code/evil.py:X",
    "model.norm": "code/evil.py:X",
    "model.positions": "code/evil.py:X",
    "data.corpus": "code/evil.py:X",
    "data.tokenizer": "code/evil.py:X",
    "optimizer": "code/evil.py:X",
    "optimizer.schedule": "code/evil.py:X",
    "objective.bias_rule": "evil_module_of_a_stranger:X",
}


def write_strange_config(tmp_path: Path, place: str) -> None:
    """Write config.yaml, which names marking code, into the current folder."""
    (tmp_path / "code").mkdir()
    for path in ("code/evil.py", "evil_module_of_a_stranger.py"):
        (tmp_path / path).write_text(MARKS)
    text = FAMILIES[place]
    for key in reversed(place.split(".")):
        text = f"{{{key}: {text}}}"
    text = text.replace("{ffn: {", "{ffn: {type: moe, ") if "ffn." in place else text
    (tmp_path / "config.yaml").write_text(text)


@pytest.mark.parametrize("place", FAMILIES)
def test_no_family_runs_untrusted_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    write_strange_config(tmp_path, place)

    with pytest.raises(
        UntrustedCodeError, match=r"^'.*' names code that none of your runs started with"
    ):
        read_config(tmp_path / "config.yaml", TrainConfig)
    assert not Path("ran").exists()


@pytest.mark.parametrize("flag", ["--help", "--print-schema"])
def test_help_and_schema_run_no_untrusted_code(tmp_path: Path, flag: str) -> None:
    write_strange_config(tmp_path, "model.ffn")

    with pytest.raises(SystemExit):
        parse("--config", "config.yaml", flag)
    assert not Path("ran").exists()


def test_help_names_a_custom_class_without_importing_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse("--model.ffn", "no/such/file.py:Own", "--help")
    assert "  --model.ffn.type no/such/file.py:Own\n" in capsys.readouterr().out


@pytest.mark.parametrize("home", ["/proc/none", "relative", ""])
def test_a_state_folder_that_cannot_be_is_no_mistake(
    own: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", home)
    monkeypatch.setenv("HOME", "/proc/none")
    code = find_code(str(own))
    trust([code])

    with pytest.raises(UntrustedCodeError), only_trusted_code(own.parent):
        parse("--model.ffn", f"{own}:Own")
    with accepting_code(), only_trusted_code(own.parent):
        parse("--model.ffn", f"{own}:Own")


def test_a_sweep_does_not_move_a_run_with_untrusted_code(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "strange"
    (folder / "code").mkdir(parents=True)
    (folder / "code/evil.py").write_text(MARKS)
    (folder / "config.yaml").write_text("model: {ffn: 'code/evil.py:X'}")
    config = TrainConfig.model_validate({"run": {"name": "strange"}})

    with pytest.raises(UntrustedCodeError):
        has_begun(config)

    assert folder.is_dir()
    assert not Path("ran").exists()


# -- the programs


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Finished]:
    """`program("train", "--resume", "runs/a")`: exit code, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "300")
    return lambda name, *argv: run_here(*argv, program=f"moe_ffn.cli.{name}")


OWN_OPTIMIZER = """
import torch
from moe_ffn.training.optimizer import OptimizerConfig

class Plain(OptimizerConfig, frozen=True):
    learning_rate: float = 0.1
    def build(self, model): return torch.optim.SGD(model.parameters(), lr=self.learning_rate)
"""


def test_resume_uses_the_runs_copy_of_custom_code_and_asks_before_other_code(
    run_train: Callable[..., Any], program: Program, own: Path, tmp_path: Path
) -> None:
    own.write_text(own.read_text() + OWN_OPTIMIZER)
    parts = ("--model.ffn", "own.py:Own", "--optimizer", "own.py:Plain")
    result = run_train(tmp_path, *parts, "--run.name", "mine")
    assert result.code == 0, result.stderr
    folder = Path("runs/mine")
    assert "code: runs/mine/ keeps a copy of own.py" in result.stdout
    trusted = tmp_path / "state/moe_ffn/trusted_code"
    assert [path.name for path in trusted.iterdir()] == [find_code("own.py").sha256]
    facts = json.loads((folder / "facts.json").read_text())
    assert facts["ffn_type"] == "own.py:Own"
    assert facts["model"]["ffn"]["type"] == "code/own.py:Own"

    # The original changes; the run goes on to the same end as if it had not been cut.
    unbroken = (folder / "metrics.jsonl").read_text()
    own.write_text(own.read_text().replace("relu", "gelu") + f"{MARKS}\n")
    (folder / "summary.json").unlink()
    (folder / "checkpoints/step_00000006.ckpt").unlink()
    (folder / "checkpoints/best.ckpt").unlink()
    code, _, stderr = program("train", "--resume", "runs/mine")
    assert code == 0, stderr
    assert f"'{own}' has changed since 'runs/mine' began (sha256 " in stderr
    assert not Path("ran").exists()
    losses = [
        [list(json.loads(line).items())[:3] for line in text.splitlines()]
        for text in (unbroken, (folder / "metrics.jsonl").read_text())
    ]
    assert losses[0] == losses[1]
    assert (folder / "checkpoints/best.ckpt").exists()
    assert json.loads((folder / "code.json").read_text())["code/own.py"]["path"] == str(own)

    # The new file cannot take the place of the old one.
    code, _, stderr = program(
        "train", "--resume", "runs/mine", "--model.ffn", "own.py:Own", "--trainer.max_steps", "7"
    )
    assert code == 2
    assert "error: model.ffn.type: is Own (code " in stderr
    Path("ran").unlink()

    code, stdout, stderr = program("generate", "runs/mine", "--prompt", "def", "--num-tokens", "2")
    assert (code, stdout[:3]) == (0, "def")
    assert "has changed since" in stderr

    # A moved run keeps its trust; an edited one loses it.
    strange = Path(shutil.move(folder, tmp_path / "strange"))
    assert program("generate", str(strange), "--num-tokens", "2")[0] == 0
    with (strange / "code/own.py").open("a") as file:
        file.write(f"{MARKS}\n")
    for name, *argv in (
        ("generate", str(strange)),
        ("trace", str(strange), "--text", "a"),
        ("train", "--resume", str(strange)),
        ("train", "--resume", str(strange), "--print-config"),
    ):
        code, _, stderr = program(name, *argv)
        assert code == 2, name
        assert (
            f"'{strange}' names code that none of your runs started with: '{strange}/code/own.py'"
            in stderr
        )
    assert program("train", "--resume", str(strange), "--help")[0] == 0
    assert program("report", str(strange))[0] == 0
    assert not Path("ran").exists()
    code, _, stderr = program("generate", str(strange), "--trust-code")
    assert code == 2
    assert "best.ckpt was made with model.ffn.type Own (code " in stderr
    assert Path("ran").exists()


def test_trust_code_is_for_a_folder_that_the_run_reads(
    own: Path, run_train: Callable[..., Any], reject: Callable[..., str], tmp_path: Path
) -> None:
    assert reject("--trust-code") == (
        "--trust-code: applies to the folders of --resume, init_from and objective.distill.teacher, but this "
        "run reads none; leave it out, since a class that you name yourself is trusted"
    )
    assert run_train(tmp_path, "--model.ffn", "own.py:Own", "--run.name", "mine").code == 0
    for number, option in enumerate(("init_from", "objective.distill.teacher")):
        with Path("runs/mine/code/own.py").open("a") as file:
            file.write(f"# edited {number}\n")
        named = ("--model.ffn", "swiglu", f"--{option}", "runs/mine")
        rejected = run_train(tmp_path, *named)
        assert rejected.code == 2
        assert "'runs/mine' names code that none of your runs started with" in rejected.stderr
        accepted = run_train(tmp_path, *named, "--trust-code")
        assert accepted.code == 0, accepted.stderr


def test_prints_of_custom_code_go_to_standard_error(own: Path, program: Program) -> None:
    own.write_text(own.read_text() + "print('hello')\n")
    code, stdout, stderr = program("train", "--model.ffn", "own.py:Own", "--print-config")
    assert (code, stderr) == (0, "importing 'own.py', which runs its code\nhello\n")
    assert yaml.safe_load(stdout)["model"]["ffn"] == {"type": "own.py:Own", "rank": 4}
