"""A text that cannot be read is rejected by its name."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moe_ffn.config.errors import ConfigError
from moe_ffn.data import prepare as prepare_module
from moe_ffn.data.prepare import DataConfig, prepare
from tests.helpers.cases import cases
from tests.helpers.tiny_runs import write_corpus


def prepared(folder: Path, given: Path) -> Any:
    corpus = {"type": "text", "paths": [str(given)]}
    config = {"corpus": corpus, "seq_len": 8, "cache_dir": str(folder / "cache")}
    return prepare(DataConfig.model_validate(config))


TEXTS: dict[str, tuple[str, bytes, str]] = {
    "cut within a character": ("mine.txt", "text é".encode()[:-1], "not UTF-8 text"),
    "one short line": ("mine.txt", b"short", "data.seq_len"),
    "a NUL at the end": ("mine.txt", b"text " * 99 + b"\0", "mine.txt"),
    "compressed, by its name": ("a.TXT.GZ", b"text" * 99, "a.TXT.GZ"),
    "a name of two lines": ("a\nb.txt", b"\0", "b.txt"),
}


@pytest.mark.parametrize(("name", "content", "said"), cases(TEXTS, quick=1))
def test_a_bad_text_is_rejected(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)

    with pytest.raises(ConfigError) as rejected:
        prepared(tmp_path, tmp_path / name)

    assert said in str(rejected.value)
    assert not list((tmp_path / "cache").rglob("*.unfinished"))


@pytest.mark.parametrize(
    "content",
    [b" \n\t" * 500, b"a\rb\r\nc\n\x0b\x0c\xe2\x80\xa8" * 99],
    ids=["spaces alone", "line ends of every kind"],
)
def test_an_odd_text_is_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(content)

    assert prepared(tmp_path, tmp_path / "a.txt").train_size.num_tokens > 0


@pytest.mark.parametrize("change", [Path.unlink, lambda path: os.truncate(path, 100)])
def test_a_text_that_changes_while_it_is_read_is_rejected(
    tmp_path: Path, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It changes after the first pass over the text and before the second."""
    corpus = write_corpus(tmp_path / "corpus")
    build = prepare_module._build

    def build_from_changed(*args: Any) -> None:
        change(corpus / "7.txt")
        build(*args)

    monkeypatch.setattr(prepare_module, "_build", build_from_changed)
    with pytest.raises(ConfigError, match=r"\.txt' "):
        prepared(tmp_path, corpus)
    assert not list((tmp_path / "cache").glob("[!.]*")), "a cache was left"


# -- disks without room for the prepared data

ROOMS = (0, 1, 20, 160, 600, 2500)
"""Bytes that one file may have; `tokenizer.json` has 20, `train.bin` 5,142."""


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """Limit the length of a file, as a full disk does to the file that meets its end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_without_room_is_named_and_used_once_there_is_room(tmp_path: Path) -> None:
    corpus, cache = write_corpus(tmp_path / "corpus"), tmp_path / "cache"
    for num_bytes in ROOMS:
        with room_for(num_bytes), pytest.raises(ConfigError) as rejected:
            prepared(tmp_path, corpus)

        assert str(rejected.value) == (
            f"data.cache_dir: '{cache}' cannot be written (File too large); make room, or name another "
            "folder"
        ), num_bytes
        assert not list(cache.iterdir()), f"{num_bytes}: something half-written was left"

    assert prepared(tmp_path, corpus).train_size.num_documents > 0
