"""Wrong arguments of programs and wrong calls of the library are answered briefly, and nothing is written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moe_ffn import DecoderConfig
from moe_ffn.config.errors import ConfigError
from moe_ffn.config.yaml_files import read_yaml
from moe_ffn.data.prepare import DataConfig, prepare
from moe_ffn.data.tokenizer import BPEConfig, Tokenizer, train_bpe
from moe_ffn.model.generate import generate
from moe_ffn.runs.folder import CHECKPOINTS_FOLDER, METRICS_FILE
from moe_ffn.training.optimizer import OptimizerConfig
from tests.helpers.cases import cases, rejects
from tests.helpers.same_run import snapshot
from tests.helpers.tiny_runs import Finished, finished_copy, run_here

LONG = "x" * 5_000
MANY_DIGITS = "9" * 5_000


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    def train(*_: Any, **__: Any) -> None:
        raise AssertionError("was accepted")

    monkeypatch.setattr("moe_ffn.cli.sweep.train_sweep", train)


def check_answer(program: str, *argv: str, named: str | None) -> Finished:
    """The program names `named` and writes nothing, or succeeds if it is None."""
    before = snapshot(Path())
    done = run_here(*argv, program=f"moe_ffn.cli.{program}")
    if named is None:
        assert done.code == 0, done.stderr
        return done
    assert done.code == 2, done
    assert 1 <= len(done.own_lines) <= 3, done.stderr
    assert named in done.stderr, done.stderr
    assert max(map(len, done.own_lines)) < 700, done.stderr[:900]
    assert all(line.isprintable() for line in done.own_lines), repr(done.stderr)
    assert snapshot(Path()) == before, "something was left"
    return done


ARGUMENTS: dict[str, tuple[tuple[str, ...], str]] = {
    "a path that begins with a dot": (("train", "--.seed", "1"), "'--.seed'"),
    "two dots": (("train", "--model..d_model", "8"), "model."),
    "no path": (("train", "--=3"), "'--=3'"),
    "no value after an equals sign": (("train", "--seed="), "seed"),
    "a long dash": (("train", "\u2014seed", "1"), "seed"),
    "an option as a value": (("train", "--seed", "--data.seq_len", "8"), "--seed"),
    "capital letters": (("train", "--SEED", "1"), "SEED"),
    "colours in a path": (("train", "--\x1b[31mseed", "1"), "seed"),
    "bytes that are not text": (("train", "--run.name", "a\udcff"), "run.name"),
    "a long path": (("train", "--" + LONG, "1"), "xxx..."),
    "no file": (("train", "--config", ""), "--config"),
    "a device without end": (("train", "--config", "/dev/zero"), "--config /dev/zero"),
    "a value for a flag": (("train", "--print-config=yes"), "--print-config"),
    "help of an unknown option": (("train", "--help", "model.nope"), "model.nope"),
    "two runs to resume": (("train", "--resume", "a", "b"), "'a'"),
    "a seed of many digits": (("generate", "no-run", "--seed", MANY_DIGITS), "--seed"),
    "a negative number of tokens": (("generate", "no-run", "--num-tokens", "-1"), "num_tokens"),
    "a temperature of NaN": (("generate", "no-run", "--temperature", ".nan"), "temperature"),
    "bytes in a prompt": (("generate", "no-run", "--prompt", "\udcff"), "UTF-8 text"),
    "a long run": (("report", LONG), "xxx"),
    "an infinite interval": (("report", "no-run", "--every", "inf", "--watch"), "--every"),
    "a sweep above its folder": (("sweep", "mine.yaml", "--name", ".."), "name"),
    "a sweep without a name": (("sweep", "mine.yaml", "--name", ""), "name"),
    "a comparison of an empty folder": (("compare", "folder"), "folder"),
    "a sweep of a resumed run": (("sweep", "mine.yaml", "--resume", "x"), "resume"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "named"), cases(ARGUMENTS, quick=4))
def test_a_bad_argument(words: tuple[str, ...], named: str) -> None:
    Path("folder").mkdir()
    Path("mine.yaml").write_text("trainer: {max_steps: 1}\n")

    check_answer(*words, named=named)


REPEATED: dict[str, tuple[tuple[str, ...], str]] = {
    "a value that holds equals signs": (("--run.name=a=b=c",), "name: a=b=c"),
    "the last of two": (("--seed", "1", "--seed", "2"), "seed: 2"),
    "a negative number": (("--sample.prompt='-5'",), "prompt: '-5'"),
    "an empty value": (("--sample.prompt", ""), "prompt: null"),
}


@pytest.mark.parametrize(("argv", "shown"), cases(REPEATED, quick=2))
def test_odd_but_valid_arguments_are_accepted(argv: tuple[str, ...], shown: str) -> None:
    assert shown in check_answer("train", *argv, "--print-config", named=None).stdout


ON_A_RUN: dict[str, tuple[tuple[str, ...], str | None]] = {
    "no text": (("trace", "run", "--text", ""), "--text"),
    "a text of control characters": (("trace", "run", "--text", "a\x1b[31m\x07b"), None),
    "a text as long as a sequence": (("trace", "run", "--text", "a" * 16), None),
    "a text one token longer": (("trace", "run", "--text", "a" * 17), "--text"),
    "no layers": (("trace", "run", "--text", "a", "--layers", ""), "--layers"),
    "a page over its config": (("trace", "run", "--text", "a", "--html", "run/config.yaml"), "--html"),
    "an empty prompt": (("generate", "run", "--prompt", "", "--num-tokens", "2"), "prompt"),
    "a prompt longer than a sequence": (
        ("generate", "run", "--prompt", "a" * 3_000, "--num-tokens", "2"), "--prompt"
    ),
    "a seed beyond 64 bits": (("generate", "run", "--seed", "9" * 30, "--num-tokens", "2"), "--seed"),
    "more choices than tokens": (
        ("generate", "run", "--top-k", "999999999", "--num-tokens", "2"), None
    ),
    "a page over the run's own rows": (("report", "run", "--output", "run/metrics.jsonl"), "--output"),
    "a page over a note of the user": (("report", "run", "--output", "notes.md"), "--output"),
    "a page below a file": (("report", "run", "--output", "notes.md/page.html"), "--output"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "named"), cases(ON_A_RUN, quick=4))
def test_an_argument_for_a_trained_run(
    tmp_path: Path, words: tuple[str, ...], named: str | None
) -> None:
    folder = finished_copy(tmp_path)
    Path("notes.md").write_text("mine")
    before = snapshot(folder)

    done = check_answer(*words, named=named)

    assert not set("\x1b\x07\0") & set(done.stdout)
    assert snapshot(folder) == before


# -- wrong calls of the library: batches, samples, ids and tokenizers


# -- models

IDS = torch.arange(12).view(2, 6)
REAL = torch.ones(2, 6, dtype=torch.bool)
BAD_BATCHES: list[tuple[Any, Any, type[Exception], str]] = [
    (IDS[0], None, ValueError, "token_ids must be (batch, sequence), but has (6,)"),
    ([[1]], None, TypeError, "token_ids must be a torch.Tensor, but is of type list"),
    (IDS, REAL[:, :5], ValueError, "mask must have the shape of token_ids, (2, 6), but"),
]


@pytest.mark.parametrize(("ids", "mask", "error", "message"), BAD_BATCHES)
def test_bad_ids_are_rejected(ids: Any, mask: Any, error: type[Exception], message: str) -> None:
    rejects(lambda: DecoderConfig(d_model=8).build(17, 10)(ids, mask), message, error)


def test_a_model_with_nan_generates_no_text() -> None:
    model = DecoderConfig(d_model=8).build(17, 10)
    with torch.no_grad():
        model.embedding.weight.fill_(torch.nan)
    message = "the model's largest logit is nan: there is no next token"
    rejects(lambda: generate(model, IDS[0], 2), message, RuntimeError)


# -- data


@cache
def tokenizer() -> Tokenizer:
    return train_bpe([b"the cat sat on the mat " * 50], 300)


def test_ids_outside_a_vocabulary_are_not_decoded() -> None:
    rejects(lambda: tokenizer().decode([3, 10**6]), "ids must lie in [0, ", ValueError)


def set_at(*path: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(stored: dict[str, Any]) -> None:
        for key in path[:-1]:
            stored = stored[key]
        stored[path[-1]] = to

    return change


FOREIGN_TOKENIZERS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "no definition": (lambda stored: stored.pop("tokenizer"), "cannot be read: "),
    "a gap": (set_at("tokenizer", "model", "vocab", "Ġthe", to=9999), "must number its "),
    "another alphabet": (
        set_at("tokenizer", "model", "vocab", "中", to=269),
        "has the token '中', which is not byte-level",
    ),
    "lower case": (set_at("tokenizer", "normalizer", to={"type": "Lowercase"}), "loses text: "),
}


@pytest.mark.parametrize(("change", "message"), FOREIGN_TOKENIZERS.values(), ids=FOREIGN_TOKENIZERS)
def test_a_tokenizer_that_loses_text_is_rejected(
    change: Callable[[dict[str, Any]], None], message: str
) -> None:
    stored = json.loads(json.dumps(tokenizer().to_dict()))
    change(stored)
    prefix = "data.tokenizer: the stored tokenizer of type 'bpe' "
    rejects(lambda: BPEConfig().restore(stored), prefix + message)


# -- optimizers


SHAPES = {"scalar": (), "vector": (3,), "matrix_1x1": (1, 1), "stack": (5, 1, 3)}


@pytest.mark.parametrize("member", OptimizerConfig.members)
def test_parameters_of_any_shape_are_optimized(member: str) -> None:
    model: Any = nn.Module()
    model.layers = nn.ParameterDict({name: torch.ones(shape) for name, shape in SHAPES.items()})
    model.layers["zero_matrix"] = torch.zeros(3, 4)
    model.layers["frozen"] = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    model.layers["unused"] = torch.ones(2, 2)
    optimizer = OptimizerConfig.model_validate({"type": member}).build(model)
    optimizer.step()  # before there is any gradient
    for _ in range(2):
        optimizer.zero_grad()
        used = [value.square().sum() for name, value in model.layers.items() if name != "unused"]
        torch.stack(used).sum().backward()
        optimizer.step()
    assert all(value.isfinite().all() for value in model.parameters())
    for name in ("frozen", "unused"):
        assert (model.layers[name] == 1).all()
    assert all((model.layers[name] < 1).all() for name in SHAPES)
    assert (model.layers["zero_matrix"] == 0).all()


# -- links are followed when reading and never written through; a pipe is read or rejected at once


def test_links_to_runs_and_their_folders_are_followed(tmp_path: Path) -> None:
    """`checkpoints/` was moved to another disk, and the run is linked into a folder of results."""
    run = finished_copy(tmp_path)
    elsewhere = (run / CHECKPOINTS_FOLDER).rename(tmp_path / "other-disk")
    (run / CHECKPOINTS_FOLDER).symlink_to(elsewhere)
    (run / METRICS_FILE).rename(tmp_path / "metrics")
    (run / METRICS_FILE).symlink_to(tmp_path / "metrics")
    rows = (tmp_path / "metrics").read_text()
    link = tmp_path / "latest"
    link.symlink_to(run)

    for program in ("generate", "report", "compare"):
        done = run_here(str(link), program=f"moe_ffn.cli.{program}")
        assert done.code == 0, (program, done.stderr)
    done = run_here("--resume", str(link), "--trainer.max_steps", "14")
    assert done.code == 0, done.stderr

    assert (elsewhere / "step_00000014.ckpt").is_file()
    assert (run / CHECKPOINTS_FOLDER).is_symlink()
    assert not (run / METRICS_FILE).is_symlink(), "rows are added to a copy"
    assert (tmp_path / "metrics").read_text() == rows


def test_checkpoints_on_an_unmounted_disk_are_named(tmp_path: Path) -> None:
    run = finished_copy(tmp_path)
    (run / CHECKPOINTS_FOLDER).rename(tmp_path / "other-disk")
    (run / CHECKPOINTS_FOLDER).symlink_to(tmp_path / "unmounted")

    done = run_here(str(run), program="moe_ffn.cli.generate")

    (line,) = done.own_lines
    assert line == (
        f"error: '{run / CHECKPOINTS_FOLDER}' is a link to '{tmp_path / 'unmounted'}', which does not exist; "
        "mount its disk, or restore it"
    )


def test_a_config_in_a_pipe_is_read() -> None:
    """`--config <(command)` names such a pipe."""
    end, start = os.pipe()
    with os.fdopen(end), os.fdopen(start, "w") as writer:
        writer.write("seed: 7\n")
        writer.close()
        assert read_yaml(Path(f"/dev/fd/{end}"), "--config") == {"seed": 7}


def test_a_corpus_in_a_pipe_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "pipe.txt"
    os.mkfifo(path)
    config = DataConfig.model_validate({"corpus": {"type": "text", "paths": [str(path)]}})

    with pytest.raises(ConfigError, match=r"data\.corpus\.path.*pipe\.txt"):
        prepare(config)
