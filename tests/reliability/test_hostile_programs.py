"""Whatever an option or a word of any program is: it works, or three lines at most say why not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cases import cases
from tests.helpers.hostile import LONG, MANY_DIGITS, check_answer
from tests.helpers.snapshot import snapshot
from tests.helpers.tiny_runs import finished_copy


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    def train(*_: Any, **__: Any) -> None:
        raise AssertionError("was accepted")

    monkeypatch.setattr("moe_ffn.cli.sweep.train", train)


# -- options

OPTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "a path that ends in a dot": (("--model.ffn.", "moe"), "model.ffn."),
    "a path that begins with a dot": (("--.seed", "1"), "'--.seed'"),
    "a path of dots": (("--...", "1"), "--..."),
    "two dots": (("--model..d_model", "8"), "model."),
    "no path": (("--=3",), "'--=3'"),
    "two dashes alone": (("--", "3"), "--"),
    "no value after an equals sign": (("--seed=",), "seed"),
    "a dash of print": (("\u2013\u2013seed", "1"), "seed"),
    "a long dash": (("\u2014seed", "1"), "seed"),
    "an option as a value": (("--seed", "--data.seq_len", "8"), "--seed"),
    "a number with underscores": (("--trainer.max_steps", "1_000"), "trainer.max_steps"),
    "capital letters": (("--SEED", "1"), "SEED"),
    "colours in a path": (("--\x1b[31mseed", "1"), "seed"),
    "colours in a path without a value": (("--\x1b[31mseed",), "seed"),
    "colours in a word": (("\x1b[31mseed",), "seed"),
    "bytes that are no text": (("--run.name", "a\udcff"), "run.name"),
    "bytes that are no text, in a path": (("--a\udcff", "1"), "a"),
    "a long path": (("--" + LONG, "1"), "xxx..."),
    "a long path without a value": (("--" + LONG,), "--xxx"),
    "a long word": ((LONG,), "xxx"),
    "a deep path": (("--" + ".".join("a" * 3_000), "1"), "a: unknown"),
    "no file": (("--config", ""), "--config"),
    "a file twice, once damaged": (("--config", "/dev/null", "--config", "/no"), "--config /no"),
    "a device without end": (("--config", "/dev/zero"), "--config /dev/zero"),
    "a file with colours": (("--config", "\x1b[31m.yaml"), "--config"),
    "a file with a long name": (("--config", LONG), "--config"),
    "a value for a flag": (("--print-config=yes",), "--print-config"),
    "help of nothing there": (("--help", "model.nope"), "model.nope"),
    "help with colours": (("--help", "\x1b[31m"), "help"),
    "to resume two": (("--resume", "a", "b"), "'a'"),
}


@pytest.mark.parametrize(("argv", "named"), cases(OPTIONS, quick=6))
def test_an_option(argv: tuple[str, ...], named: str) -> None:
    check_answer("train", *argv, named=named)


REPEATED: dict[str, tuple[tuple[str, ...], str]] = {
    "the same file twice": (("--config", "a.yaml", "--config", "a.yaml"), "seed: 3"),
    "a value that holds equals signs": (("--run.name=a=b=c",), "name: a=b=c"),
    "the last of two": (("--seed", "1", "--seed", "2"), "seed: 2"),
    "a negative number": (("--sample.prompt='-5'",), "prompt: '-5'"),
    "an empty value": (("--sample.prompt", ""), "prompt: null"),
    "a document mark at both ends": (("--config", "marks.yaml"), "seed: 4"),
}


@pytest.mark.parametrize(("argv", "shown"), cases(REPEATED, quick=4))
def test_what_looks_odd_and_is_right(argv: tuple[str, ...], shown: str) -> None:
    Path("a.yaml").write_text("seed: 3")
    Path("marks.yaml").write_text("--- # first\nseed: 4\n...\n")

    done = check_answer("train", *argv, "--print-config", named=None)

    assert shown in done.stdout


# -- other programs: what they are told

_RUN = "no-such-run"
_TINY = ("benchmark", "--shape", "8,8,8,2,1,fp32", "--rounds", "1", "--output", "o")
PROGRAMS: dict[str, tuple[tuple[str, ...], str]] = {
    "rounds of many digits": (("benchmark", "--rounds", MANY_DIGITS), "--rounds"),
    "threads beyond any machine": ((*_TINY, "--threads", "9" * 12), "--threads"),
    "a shape of many digits": (("benchmark", "--shape", f"{MANY_DIGITS},1,1,1,1,fp32"), "--shape"),
    "a shape beyond any memory": (("benchmark", "--shape", "8,999999999,999999999,8,2,bf16"), "--shape"),
    "a shape with colours": (("benchmark", "--shape", "\x1b[31m"), "--shape"),
    "a shape of Arabic digits": (("benchmark", "--shape", "\u0663,1,1,1,1,fp32"), "--shape"),
    "a long suite": (("benchmark", "--suite", LONG), "--suite"),
    "a long device": (("benchmark", "--device", LONG), "--device"),
    "output below a file": ((*_TINY[:-1], "mine.txt/o"), "--output"),
    "output with a long name": (("benchmark", "--output", LONG), "--output"),
    "a project with colours": (("dashboard", "--entity", "e", "--project", "\x1b[31m"), "--project"),
    "a seed of Arabic digits": (("generate", _RUN, "--seed", "\u0663"), "--seed"),
    "rounds below 1": (("overhead", "--rounds", "0"), "rounds"),
    "rounds that are text": (("overhead", "--rounds", "many"), "rounds"),
    "steps beyond any patience": (("overhead", "--steps", "-1"), "steps"),
    "overhead of half a word": (("overhead", "--stepz", "3"), "steps"),
    "a seed of many digits": (("generate", _RUN, "--seed", MANY_DIGITS), "--seed"),
    "no tokens": (("generate", _RUN, "--num-tokens", "-1"), "num_tokens"),
    "a temperature of nothing": (("generate", _RUN, "--temperature", ".nan"), "temperature"),
    "a long run": (("generate", LONG), "xxx"),
    "a long run to trace": (("trace", LONG, "--text", "a"), "xxx"),
    "a long run to report": (("report", LONG), "xxx"),
    "a run with colours": (("generate", "\x1b[31m"), "[31m"),
    "every of infinity": (("report", _RUN, "--every", "inf", "--watch"), "--every"),
    "every with colours": (("report", _RUN, "--every", "\x1b[31m"), "--every"),
    "a sweep above its folder": (("sweep", "mine.yaml", "--name", ".."), "name"),
    "a sweep elsewhere": (("sweep", "mine.yaml", "--name", "/tmp/elsewhere"), "name"),
    "a sweep below": (("sweep", "mine.yaml", "--name", "a/b"), "name"),
    "a sweep without a name": (("sweep", "mine.yaml", "--name", ""), "name"),
    "a sweep with colours": (("sweep", "mine.yaml", "--name", "\x1b[31m"), "name"),
    "a sweep of a long name": (("sweep", "mine.yaml", "--name", LONG), "name"),
    "a comparison of a folder": (("compare", "folder"), "folder"),
    "a sweep of a file of two lines": (("sweep", "a\nb.yaml"), "a\\nb"),
    "two configs of one stem": (("sweep", "mine.yaml", "mine.yml"), "mine"),
    "a sweep of a resumed run": (("sweep", "mine.yaml", "--resume", "x"), "resume"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "named"), cases(PROGRAMS, quick=8))
def test_a_word_for_another_program(words: tuple[str, ...], named: str) -> None:
    Path("folder").mkdir()
    for name in ("mine.txt", "mine.yaml", "mine.yml", "a\nb.yaml"):
        Path(name).write_text("trainer: {max_steps: 1}\n")
    Path("summary.json").write_text('{\n  "validation_loss": 1.0\n}\n')

    check_answer(*words, named=named)


# -- a trained run

TRACED: dict[str, tuple[tuple[str, ...], str | None]] = {
    "nothing": (("--text", ""), "--text"),
    "a NUL and colours": (("--text", "a\x1b[31m\x07b"), None),
    "a face": (("--text", "\U0001f600"), None),
    "bytes that are no text": (("--text", "a\udcffb"), None),
    "as long as it can be": (("--text", "a" * 16), None),
    "a token longer": (("--text", "a" * 17), "--text"),
    "a megabyte": (("--text", "a" * 1_000_000), "--text"),
    "layers of many digits": (("--text", "a", "--layers", MANY_DIGITS), "--layers"),
    "no layers": (("--text", "a", "--layers", ""), "--layers"),
    "a layer twice": (("--text", "a", "--layers", "0,0"), None),
    "a layer with colours": (("--text", "a", "--layers", "\x1b[31m"), "--layers"),
    "a page over its config": (("--text", "a", "--html", "run/config.yaml"), "--html"),
    "a page over its weights": (("--text", "a", "--html", "run/checkpoints/best.ckpt"), "--html"),
    "a page into a device": (("--text", "a", "--html", "/dev/null"), "--html"),
}
GENERATED: dict[str, tuple[tuple[str, ...], str | None]] = {
    "an empty prompt": (("--prompt", "", "--num-tokens", "2"), "prompt"),
    "bytes that are no text": (("--prompt", "a\udcff", "--num-tokens", "2"), "prompt"),
    "a prompt longer than a sequence": (("--prompt", "a" * 3_000, "--num-tokens", "2"), "--prompt"),
    "a seed beyond 64 bits": (("--seed", "9" * 30, "--num-tokens", "2"), "--seed"),
    "a negative seed": (("--seed=-9223372036854775809", "--num-tokens", "2"), "--seed"),
    "no tokens": (("--num-tokens", "0"), None),
    "more tokens to choose from than there are": (("--top-k", "999999999", "--num-tokens", "2"), None),
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Iterator[str]:
    """A trained run as `run`, of which nothing is changed."""
    folder = finished_copy(tmp_path)
    before = snapshot(folder)
    yield "run"
    assert snapshot(folder) == before


@pytest.mark.parametrize(("argv", "named"), cases(TRACED))
def test_a_text_to_trace(run: str, argv: tuple[str, ...], named: str | None) -> None:
    done = check_answer("trace", run, *argv, named=named)

    assert not set("\x1b\x07\0") & set(done.stdout)


@pytest.mark.parametrize(("argv", "named"), cases(GENERATED))
def test_a_prompt(run: str, argv: tuple[str, ...], named: str | None) -> None:
    check_answer("generate", run, *argv, named=named)
