"""`moe-ffn PROGRAM ...`: which programs there are, and that a wrong word is answered."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_ffn.cli import __main__ as console
from moe_ffn.config.errors import install

ROOT = Path(__file__).parents[2]

Answer = tuple[int, str, str]
Run = Callable[..., Answer]


@pytest.fixture
def moe_ffn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Exit code, stdout and stderr of the console command in this process."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*argv: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["/usr/bin/moe-ffn", *argv])
        code = console.main()
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]], ids=str)
def test_help_lists_every_program_and_its_meaning(moe_ffn: Run, argv: list[str]) -> None:
    code, out, err = moe_ffn(*argv)
    assert (code, err) == (0, "")
    for name, meaning in console.PROGRAMS.items():
        assert f"  {name} {meaning}" in " ".join(out.split()).replace(f" {name} ", f"  {name} ")


def test_arguments_reach_the_program_and_its_exit_code_comes_back(
    moe_ffn: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[list[str]] = []

    def main(argv: list[str]) -> int:
        received.append(list(argv))
        return 7

    monkeypatch.setattr("moe_ffn.cli.generate.main", main)

    assert moe_ffn("generate", "run", "--seed", "1") == (7, "", "")
    assert received == [["run", "--seed", "1"]]


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("trian", "; did you mean 'train'?"),
        ("--versoin", "; did you mean '--version'?"),
        ("zzz", f"; known: {', '.join(console.PROGRAMS)}"),
    ],
)
def test_an_unknown_word_is_answered_with_the_nearest(moe_ffn: Run, word: str, hint: str) -> None:
    assert moe_ffn(word) == (2, "", f"error: unknown program '{word}'{hint}\n")


def test_a_module_in_the_current_folder_is_found(
    moe_ffn: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script of a console command has its own folder on the path, `python -m` the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_module_of_mine.py").write_text(
        "from moe_ffn import GatedConfig\nclass Mine(GatedConfig, frozen=True):\n    type: str\n"
    )

    code, out, err = moe_ffn("train", "--model.ffn", "a_module_of_mine:Mine", "--print-config")

    assert (code, err) == (0, "importing 'a_module_of_mine', which runs its code\n")
    assert "type: a_module_of_mine:Mine" in out


def test_what_to_install_is_the_clone_or_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert install("train") == "pip install -e '.[train]'"
    monkeypatch.setattr("moe_ffn.config.errors._ROOT", tmp_path)
    assert install("train") == "pip install 'moe_ffn[train]'"
