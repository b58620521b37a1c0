"""Text that cannot be read, or is not what it was, is refused by the name of its file; text larger than
memory is not.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_ffn.config.errors import ConfigError
from moe_ffn.data import prepare as prepare_module
from moe_ffn.data.prepare import DataConfig, prepare
from tests.helpers.nobody import nobody, open_place
from tests.helpers.tiny_runs import finish, start_command, write_corpus


def prepared(folder: Path, *given: Path) -> Any:
    """The data of a corpus, with its cache in `folder`."""
    corpus = {"type": "text", "paths": [str(path) for path in given]}
    config = {"corpus": corpus, "seq_len": 8, "cache_dir": str(folder / "cache")}
    return prepare(DataConfig.model_validate(config))


def check_refused(folder: Path, given: Path, *named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        prepared(folder, given)
    assert "\n" not in str(refused.value)
    for name in named:
        assert name in str(refused.value)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (bytes(range(256)), "not UTF-8 text"),
        (b"\x89PNG\r\n\x1a\n\0\0", "not UTF-8 text"),
        ("text".encode("utf-16"), "not UTF-8 text"),
        ("text é".encode()[:-1], "not UTF-8 text"),
        (b"short", "data.seq_len"),
    ],
    ids=["empty", "binary", "a picture", "UTF-16", "cut within a character", "one short line"],
)
def test_a_file_that_is_no_text(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "mine.txt").write_bytes(content)

    check_refused(tmp_path, tmp_path / "mine.txt", why, "" if "seq_len" in why else "mine.txt")


@pytest.mark.parametrize(
    ("name", "mode"), [("7.txt", 0), ("inner", 0), ("inner", 0o444)], ids=["file", "folder", "list"]
)
def test_what_may_not_be_read(name: str, mode: int) -> None:
    """A file; a folder; one whose names can be read, and whose files not even looked at."""
    with open_place() as place:
        corpus = write_corpus(place / "corpus")
        write_corpus(corpus / "inner")
        prepared(place / "before", corpus)  # so that nothing has to be imported as nobody
        (corpus / name).chmod(mode)
        try:
            with nobody():
                check_refused(place, corpus, name, "cannot be read")
        finally:
            (corpus / name).chmod(0o700)


@pytest.mark.parametrize("change", [Path.unlink, lambda path: os.truncate(path, 100)])
def test_what_changes_while_it_is_read(
    tmp_path: Path, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first pass over the text and before the second."""
    corpus = write_corpus(tmp_path / "corpus")
    build = prepare_module._build

    def build_from_changed(*args: Any) -> None:
        change(corpus / "7.txt")
        build(*args)

    monkeypatch.setattr(prepare_module, "_build", build_from_changed)
    with pytest.raises(ConfigError, match=r"\.txt' "):
        prepared(tmp_path, corpus)
    assert not list((tmp_path / "cache").glob("[!.]*")), "a cache was left"


# -- larger than memory

LARGE = """
import json, resource, sys
import numpy as np
from moe_ffn.data.batches import TrainBatches
from moe_ffn.data.prepare import DataConfig, prepare
from moe_ffn.metrics import unigram_loss

path, cache = sys.argv[1:3]
size, limit = map(int, sys.argv[3:])


def private_bytes():
    # What `RLIMIT_DATA` counts: heap and private memory, and not the pages of mapped files.
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(fields["VmData"].split()[0]) << 10


before = private_bytes()
resource.setrlimit(resource.RLIMIT_DATA, (before + limit, before + limit))
try:
    np.ones(size, dtype=np.uint8)
except MemoryError:
    pass
else:
    raise SystemExit("the limit does not hold: an array of the file's size fits")
corpus = dict(type="text", paths=[path])
data = prepare(
    DataConfig.model_validate(dict(corpus=corpus, cache_dir=cache, seq_len=256))
)
batches = TrainBatches(data.train, seq_len=256, batch_size=16, seed=0)
for index in range(100):
    batches[index * 997]
unigram_loss(data.train, data.validation[:100_000], 257)
assert type(data.train) is np.memmap and data.train.nbytes > size
print(json.dumps(dict(tokens=len(data.train), grown=private_bytes() - before)))
"""
LINES = b"".join(b"%06d: a line of a text that is larger than memory\n" % i for i in range(20_000))


@pytest.mark.slow
@pytest.mark.parametrize(("size_mb", "limit_mb"), [(32, 24), (2048, 256)])
def test_a_text_larger_than_memory(
    tmp_path: Path, record_property: Callable[[str, object], None], size_mb: int, limit_mb: int
) -> None:
    """It is prepared and read by a process that may grow by `limit_mb`."""
    size, free = size_mb << 20, shutil.disk_usage(tmp_path).free
    if free < 4 * size:  # the text, its tokens of two bytes, and room to spare
        pytest.skip(f"needs {4 * size / 1e9:.0f} GB of disk, {free / 1e9:.0f} are free")
    path, cache = tmp_path / "large.txt", tmp_path / "cache"
    try:
        with path.open("wb") as file:
            while file.tell() < size:
                file.write(LINES)

        places = (str(path), str(cache), str(size), str(limit_mb << 20))
        done = finish(start_command([sys.executable, "-c", LARGE, *places]), timeout=900)

        assert done.code == 0, done.stderr[-500:]
        grown = json.loads(done.stdout)["grown"] / (1 << 20)
        record_property("measured", f"{size_mb} MB within {limit_mb} MB: {grown:.0f} MB at the end")
    finally:  # pytest keeps the folders of three sessions
        path.unlink(missing_ok=True)
        shutil.rmtree(cache, ignore_errors=True)
