"""Text that is not there, not text, not the same as before, or larger than memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from experiments.selftest import scene
from experiments.selftest.case import Case, Chapter

_NOBODY = 65_534
_MEGABYTE = 1 << 20


def _prepare(folder: Path, given: str, **changes: Any) -> Any:
    """The data of a config in `folder`."""
    from moe_ffn.data.prepare import DataConfig, prepare

    corpus = {"type": "text", "paths": [given]}
    options = {"corpus": corpus, "seq_len": 8, "cache_dir": str(folder / "cache"), **changes}
    return prepare(DataConfig.model_validate(options), progress=False)


def _refused(folder: Path, given: str, *named: str) -> str:
    """The one sentence with which a corpus is refused."""
    from moe_ffn.errors import ConfigError

    try:
        _prepare(folder, given)
    except ConfigError as error:
        sentence = str(error)
    else:
        raise AssertionError(f"{given} was accepted")
    assert len(sentence.splitlines()) == 1, sentence
    for name in named:
        assert name in sentence, f"no {name!r} in: {sentence}"
    return sentence


# -- what is refused


def _file(content: bytes, *named: str) -> Callable[[Path], str]:
    def check(folder: Path) -> str:
        (folder / "mine.txt").write_bytes(content)
        return _refused(folder, str(folder / "mine.txt"), *named)

    return check


def _link_to_itself(folder: Path) -> str:
    (folder / "loop.txt").symlink_to("loop.txt")
    return _refused(folder, str(folder / "loop.txt"), "loop.txt", "symbolic link")


def _dangling(folder: Path) -> str:
    (folder / "link.txt").symlink_to("no.such")
    return _refused(folder, str(folder / "link.txt"), "link.txt", "symbolic link")


def _pipe(folder: Path) -> str:
    os.mkfifo(folder / "pipe.txt")
    return _refused(folder, str(folder / "pipe.txt"), "pipe.txt")


def _device(folder: Path) -> str:
    return _refused(folder, "/dev/zero", "/dev/zero")


def _removed_while_read(folder: Path) -> str:
    return _changed_while_read(folder, lambda path: path.unlink())


def _shrunk_while_read(folder: Path) -> str:
    return _changed_while_read(folder, lambda path: os.truncate(path, 100))


def _changed_while_read(folder: Path, change: Callable[[Path], None]) -> str:
    """The change comes after the first pass over the text and before the second."""
    from moe_ffn.data.prepare import DataConfig, prepare
    from moe_ffn.errors import ConfigError

    corpus = scene.write_corpus(folder / "corpus")
    victim = corpus / "7.txt"

    def report(stage: str, done: int, total: int | None) -> None:
        if stage == "encoding" and victim.is_file() and victim.stat().st_size > 100:
            change(victim)

    options = {"corpus": {"type": "text", "paths": [str(corpus)]}, "cache_dir": str(folder / "c")}
    try:
        prepare(DataConfig.model_validate({**options, "seq_len": 8}), progress=report)
    except ConfigError as error:
        sentence = str(error)
    else:
        raise AssertionError("a change was not noticed")
    assert not list((folder / "c").glob("[!.]*")), "a cache was left"
    assert ".txt' " in sentence, sentence
    return sentence


def _whole_program(folder: Path) -> str:
    """Nothing of a run is left where its text cannot be read."""
    (folder / "binary.txt").write_bytes(bytes(range(256)))
    done = scene.run(*scene.options(folder, data__corpus__paths=str(folder / "binary.txt")))
    assert done.code == 2, done
    (line,) = done.own_lines
    assert "binary.txt" in line, done.stderr
    assert not (folder / "runs").exists(), "a folder was made"
    return line


def _unreadable_file(folder: Path) -> str:
    corpus = scene.write_corpus(folder / "corpus")
    (corpus / "7.txt").chmod(0)
    return _refused_as_nobody(folder, corpus, "7.txt")


def _unreadable_folder(folder: Path) -> str:
    corpus = scene.write_corpus(folder / "corpus")
    scene.write_corpus(corpus / "inner")
    (corpus / "inner").chmod(0)
    try:
        return _refused_as_nobody(folder, corpus, "inner")
    finally:
        (corpus / "inner").chmod(0o700)


def _folder_that_may_not_be_entered(folder: Path) -> str:
    """Its names can be read, its files not even looked at."""
    corpus = scene.write_corpus(folder / "corpus")
    scene.write_corpus(corpus / "inner")
    (corpus / "inner").chmod(0o444)
    try:
        return _refused_as_nobody(folder, corpus, "inner")
    finally:
        (corpus / "inner").chmod(0o700)


_AS_NOBODY = """
import os, sys
from pathlib import Path
import moe_ffn.data.hf_dataset, moe_ffn.data.prepare, numpy  # where nobody may not look
from experiments.selftest.data import _refused
if os.getuid() == 0:
    os.setgroups([])
    os.setgid({nobody})
    os.setuid({nobody})
print(_refused(Path({folder!r}), {corpus!r}, {named!r}, "cannot be read"))
"""


def _refused_as_nobody(folder: Path, corpus: Path, named: str) -> str:
    """In a process without the rights of root, who may read anything."""
    folder.chmod(0o755)
    text = _AS_NOBODY.format(nobody=_NOBODY, folder=str(folder), corpus=str(corpus), named=named)
    done = _python(text)
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout.strip()


def _python(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", text],
        cwd=scene.REPOSITORY,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


# -- what is read all the same


def _one_line(folder: Path) -> str:
    (folder / "line.txt").write_text("one line of text, and no end of line " * 20)
    data = _prepare(folder, str(folder / "line.txt"))
    assert data.train_size.num_tokens > 0
    assert data.validation_size.num_tokens > 0
    return f"{data.train_size.num_tokens} and {data.validation_size.num_tokens} tokens"


def _one_line_without_room(folder: Path) -> str:
    (folder / "line.txt").write_text("short")
    return _refused(folder, str(folder / "line.txt"), "data.seq_len")


def _odd_folder(folder: Path) -> str:
    """Loops, dangling links, pipes, binary and empty files beside the texts."""
    corpus = scene.write_corpus(folder / "corpus")
    expected = _prepare(folder, str(corpus)).corpus_sha256
    for number in range(8):
        (corpus / f"loop{number}").symlink_to(corpus, target_is_directory=True)
    (corpus / "self.txt").symlink_to("self.txt")
    (corpus / "dangling.txt").symlink_to("no.such")
    os.mkfifo(corpus / "pipe.txt")
    (corpus / "binary.txt").write_bytes(bytes(range(256)))
    start = time.perf_counter()
    for given in (corpus, corpus / "**", corpus / "**" / "*.txt"):
        found = _prepare(folder, str(given)).corpus_sha256
        assert found == expected, f"{given} is another corpus with them"
    seconds = time.perf_counter() - start
    assert seconds < 10, f"{seconds:.1f} s"
    return f"the twelve texts are found, {seconds / 3:.1f} s"


# -- between two runs


def _between_runs(change: Callable[[Path], object], sentence: str) -> Callable[[Path], str]:
    def check(folder: Path) -> str:
        from moe_ffn.data.documents import Documents, changed

        corpus = scene.write_corpus(folder / "corpus")
        data = _prepare(folder, str(corpus))
        kept = Documents.from_dict(json.loads(json.dumps(data.documents.to_dict())))
        assert changed(kept, _prepare(folder, str(corpus)).documents) is None
        change(corpus)
        said = changed(kept, _prepare(folder, str(corpus)).documents) or "nothing"
        assert said == sentence, f"{said!r}, not {sentence!r}"
        return said

    return check


# -- larger than memory

_LARGE = """
import json, resource, sys
import numpy as np
from moe_ffn.data.batches import TrainBatches
from moe_ffn.data.prepare import DataConfig
from moe_ffn.data.prepare import prepare
from moe_ffn.data.prepare import unigram_loss


def private_bytes():
    # What `RLIMIT_DATA` counts: heap and private memory, and not the pages of mapped files.
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(fields["VmData"].split()[0]) << 10


before = private_bytes()
limit = before + {limit}
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    np.ones({size}, dtype=np.uint8)
except MemoryError:
    pass
else:
    raise SystemExit("the limit does not hold: an array of the file's size fits")
data = prepare(
    DataConfig.model_validate(
        dict(corpus=dict(type="text", paths=[{path!r}]), cache_dir={cache!r}, seq_len=256)
    ),
    progress=False,
)
batches = TrainBatches(data.train, seq_len=256, batch_size=16, seed=0)
for index in range(100):
    batches[index * 997]
unigram_loss(data.train, data.validation[:100_000], 257)
assert type(data.train) is np.memmap and data.train.nbytes > {size}
print(json.dumps(dict(tokens=len(data.train), grown=private_bytes() - before)))
"""


def _larger_than_memory(size_mb: int, limit_mb: int) -> Callable[[Path], str]:
    """A file of `size_mb` prepared and read by a process that may grow by `limit_mb`."""

    def check(folder: Path) -> str:
        import shutil

        size = size_mb * _MEGABYTE
        needed = 4 * size  # the text, its tokens of two bytes, and room to spare
        free = shutil.disk_usage(folder).free
        assert free > needed, f"needs {needed / 1e9:.0f} GB of disk, {free / 1e9:.0f} are free"
        line = b"".join(
            b"%06d: a line of a text that is larger than memory\n" % i for i in range(20_000)
        )
        with (folder / "large.txt").open("wb") as file:
            while file.tell() < size:
                file.write(line)
        start = time.perf_counter()
        done = _python(
            _LARGE.format(
                limit=limit_mb * _MEGABYTE,
                size=size,
                path=str(folder / "large.txt"),
                cache=str(folder / "cache"),
            )
        )
        assert done.returncode == 0, done.stderr[-500:]
        seconds = time.perf_counter() - start
        found = json.loads(done.stdout)
        return (
            f"{size_mb} MB of text, {found['tokens']:,} tokens, read and batched in {seconds:.0f} s "
            f"within {limit_mb} MB of private memory, {found['grown'] / _MEGABYTE:.0f} MB at the end"
        )

    return check


def _cases() -> Iterator[Case]:
    for name, check in (
        ("empty file", _file(b"", "mine.txt", "is empty")),
        ("binary file", _file(bytes(range(256)), "mine.txt", "not UTF-8 text")),
        ("a picture", _file(b"\x89PNG\r\n\x1a\n\0\0", "mine.txt", "not UTF-8 text")),
        ("UTF-16", _file("text".encode("utf-16"), "mine.txt", "not UTF-8 text")),
        ("cut within a character", _file("text é".encode()[:-1], "mine.txt", "not UTF-8 text")),
        ("one line", _one_line),
        ("one short line", _one_line_without_room),
        ("link to itself", _link_to_itself),
        ("dangling link", _dangling),
        ("pipe", _pipe),
        ("device without end", _device),
        ("loops, links, pipes and binaries beside texts", _odd_folder),
        ("removed while it is read", _removed_while_read),
        ("shrunk while it is read", _shrunk_while_read),
        ("removed between runs", _between_runs(_remove, "'7.txt' was removed")),
        ("changed between runs", _between_runs(_change, "'7.txt' has changed")),
        ("added between runs", _between_runs(_add, "'new.txt' is new")),
        (
            "three changed between runs",
            _between_runs(_three, "'3.txt' has changed, and 2 other documents differ too"),
        ),
    ):
        yield Case(name, check, short=True)
    for name, check in (
        ("unreadable file", _unreadable_file),
        ("unreadable folder", _unreadable_folder),
        ("folder that may not be entered", _folder_that_may_not_be_entered),
        ("no run is left", _whole_program),
        ("2 GB with 256 MB of memory", _larger_than_memory(2048, 256)),
    ):
        yield Case(name, check)
    yield Case("32 MB with 24 MB of memory", _larger_than_memory(32, 24), short=True)


def _remove(corpus: Path) -> None:
    (corpus / "7.txt").unlink()


def _change(corpus: Path) -> None:
    with (corpus / "7.txt").open("a") as file:
        file.write("x")


def _add(corpus: Path) -> None:
    (corpus / "new.txt").write_text("new")


def _three(corpus: Path) -> None:
    _remove(corpus)
    _add(corpus)
    (corpus / "3.txt").write_text("other")


CHAPTER = Chapter(
    "data",
    "Text that cannot be read, or is not what it was, is refused by the name of its file; text larger "
    "than memory is not.",
    _cases,
)
