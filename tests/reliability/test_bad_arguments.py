"""A wrong argument of any program is answered in at most three printable lines, and nothing is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cases import cases
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

    monkeypatch.setattr("moe_ffn.cli.sweep.train", train)


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
