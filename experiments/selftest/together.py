"""Two at once: runs of one name, preparations of one corpus, a run and its report."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from experiments.selftest.case import Case, Chapter
from experiments.selftest.same_run import differences, require_same
from experiments.selftest.scene import (
    Finished,
    finish,
    options,
    run,
    start,
    start_command,
    write_corpus,
)

PROGRAM_SECONDS = 2.0
"""How long one run may be ahead of the other: the time from its start to its first step, about."""


def cases() -> Iterable[Case]:
    for number in range(8):
        ahead = PROGRAM_SECONDS * number / 7
        yield Case(
            f"two runs of one name, one {ahead:.1f} s ahead",
            lambda folder, ahead=ahead: _same_name(folder, ahead),
        )
    yield Case("two runs without a name", _without_a_name)
    for how in ("named", "not named"):
        yield Case(
            f"two processes make folders as fast as they can, {how}",
            lambda folder, how=how: _many_folders(folder, how),
            short=True,
        )
    for number, state in itertools.product((2, 4), ("no cache", "a damaged cache")):
        yield Case(
            f"{number} processes prepare the same data, {state}",
            lambda folder, number=number, state=state: _same_data(folder, number, state),
            short=(number, state) == (2, "no cache"),
        )
    yield Case("two runs prepare the same data", _runs_with_the_same_data)
    for number in range(5):
        yield Case(
            f"one of two that prepare the same data is killed at {number + 1}/5",
            lambda folder, number=number: _one_is_killed(folder, (number + 1) / 5),
        )
    yield Case("a run, and pages of it one after the other", _pages_of_a_run)
    yield Case("a run, and the report's program again and again", _report_program)


CHAPTER = Chapter(
    "together",
    "Two runs of one name, two that prepare the same data, a run and a report of it: nothing is mixed up.",
    cases,
)

# ------------------------------------------------------------------------------------ one name


def _same_name(folder: Path, ahead: float) -> None:
    """One trains as if it were alone, the other is refused."""
    seeds = ("1", "2")
    processes = []
    for seed in seeds:
        processes.append(start(*options(folder, run__name="mine", seed=seed)))
        time.sleep(ahead if seed == seeds[0] else 0)
    ended = dict(zip(seeds, map(finish, processes), strict=True))
    codes = sorted(one.code for one in ended.values())
    assert codes == [0, 2], f"exit codes {codes}: {_last_words(ended.values())}"
    (winner,) = (seed for seed, one in ended.items() if one.code == 0)
    (refused,) = (one for one in ended.values() if one.code == 2)
    (line,) = refused.own_lines
    assert line.startswith("error: run.name: '"), line
    assert "exists and is never overwritten" in line, line
    alone = run(*options(folder, run__name="alone", seed=winner))
    assert alone.code == 0, _last_words([alone])
    runs = folder / "runs"
    assert _files(runs / "mine") == _files(runs / "alone"), (
        "a file more or less than of a run alone"
    )
    require_same(runs / "alone", runs / "mine")
    assert _names(runs) == {"mine", "alone"}


def _without_a_name(folder: Path) -> None:
    options(folder)  # the corpus, before two of them write it
    processes = [start(*options(folder, seed=seed)) for seed in ("1", "2")]
    ended = [finish(process) for process in processes]
    assert [one.code for one in ended] == [0, 0], _last_words(ended)
    folders = sorted((folder / "runs").iterdir())
    assert len(folders) == 2, f"{len(folders)} folders of two runs"
    assert _files(folders[0]) == _files(folders[1])
    assert differences(*folders), "two seeds, one run"


_MAKE_FOLDERS = """
import sys
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.folder import make_run_folder
from moe_ffn.errors import ConfigError
for number in range(200):
    name = {"name": f"run-{number}"} if sys.argv[2] == "named" else {}
    config = TrainConfig.model_validate({"run": {"output_dir": sys.argv[1], **name}})
    try:
        print(make_run_folder(config, {"config.yaml": str(number)}).name)
    except ConfigError as error:
        print(error, file=sys.stderr)
"""


def _many_folders(folder: Path, how: str) -> str:
    ended = [finish(p) for p in [_python(_MAKE_FOLDERS, str(folder), how) for _ in range(2)]]
    assert [one.code for one in ended] == [0, 0], _last_words(ended)
    made = [name for one in ended for name in one.stdout.split()]
    refused = [line for one in ended for line in one.stderr.splitlines()]
    assert len(set(made)) == len(made), "two runs were given one folder"
    assert len(made) == (200 if how == "named" else 400)
    assert len(made) + len(refused) == 400
    assert all("exists and is never overwritten" in line for line in refused), refused
    assert _names(folder) == set(made)
    return f"{len(made)} folders, {len(refused)} refused"


# ------------------------------------------------------------------------------------ one corpus

_PREPARE = """
import sys
from moe_ffn.data.prepare import DataConfig
from moe_ffn.data.prepare import prepare
corpus, cache, percent = sys.argv[1:]
data = prepare(DataConfig.model_validate({
    "corpus": {"type": "text", "paths": [corpus]}, "cache_dir": cache, "seq_len": 16,
    "tokenizer": {"type": "bpe", "vocab_size": 512}, "validation_percent": int(percent),
}), progress=False)
print(data.folder, data.corpus_sha256)
"""
_FILES = ("meta.json", "tokenizer.json", "train.bin", "validation.bin")


def _same_data(folder: Path, number: int, state: str) -> None:
    corpus, cache = write_corpus(folder / "corpus", 400), folder / "cache"
    alone = folder / "alone"
    wanted = finish(_preparing(corpus, alone))
    assert wanted.code == 0, _last_words([wanted])
    if state == "a damaged cache":
        shutil.copytree(alone, cache)
        (next(cache.iterdir()) / "train.bin").write_bytes(b"")
    ended = [finish(p) for p in [_preparing(corpus, cache) for _ in range(number)]]
    assert {one.code for one in ended} == {0}, _last_words(ended)
    assert len({one.stdout for one in ended}) == 1, "they disagree on what they prepared"
    _check_cache(cache, alone)


def _check_cache(cache: Path, alone: Path) -> None:
    """To the byte what a process alone leaves, and nothing beside it."""
    (prepared,), (wanted,) = cache.iterdir(), alone.iterdir()
    assert prepared.name == wanted.name
    assert _names(prepared) == set(_FILES), f"left: {_names(prepared)}"
    for name in _FILES:
        assert (prepared / name).read_bytes() == (wanted / name).read_bytes(), name


def _runs_with_the_same_data(folder: Path) -> None:
    options(folder)
    processes = [start(*options(folder, run__name=name)) for name in ("one", "other")]
    ended = [finish(process) for process in processes]
    assert [one.code for one in ended] == [0, 0], _last_words(ended)
    require_same(folder / "runs" / "one", folder / "runs" / "other")
    assert len(list((folder / "cache").iterdir())) == 1


def _one_is_killed(folder: Path, share: float) -> str:
    """At a share of the time that building takes; the other must not notice."""
    corpus, cache, alone = write_corpus(folder / "corpus", 4000), folder / "cache", folder / "alone"
    cache.mkdir()
    first = _preparing(corpus, alone)
    began = _wait_for_building(alone, first)
    assert finish(first).code == 0
    seconds = time.monotonic() - began

    victim, other = (_preparing(corpus, cache) for _ in range(2))
    _wait_for_building(cache, victim)
    time.sleep(share * seconds)
    victim.send_signal(signal.SIGKILL)
    ended, killed = finish(other), finish(victim)
    assert ended.code == 0, _last_words([ended])

    left = _unfinished(cache)
    assert len(left) <= 1, f"left: {left}"
    for path in left:  # as old as that of a process that died two days ago
        two_days_ago = time.time() - 2 * 86_400
        for old in (*path.iterdir(), path):
            os.utime(old, (two_days_ago, two_days_ago))
    again = finish(_preparing(corpus, cache, percent=7))
    assert again.code == 0, _last_words([again])
    assert not _unfinished(cache), "what a killed process left is never swept"
    shutil.rmtree(Path(again.stdout.split()[0]))
    _check_cache(cache, alone)
    return "killed midway" if left else f"it had ended ({killed.code})"


def _wait_for_building(cache: Path, process: subprocess.Popen[str]) -> float:
    """When a folder was first being built there."""
    while process.poll() is None:
        if _unfinished(cache):
            break
        time.sleep(0.001)
    return time.monotonic()


def _unfinished(cache: Path) -> list[Path]:
    return list(cache.glob(".*"))


def _preparing(corpus: Path, cache: Path, percent: int = 5) -> subprocess.Popen[str]:
    return _python(_PREPARE, str(corpus), str(cache), str(percent))


# ------------------------------------------------------------------------------- a run and its page

_LONG = {"trainer__max_steps": "150", "logging__every_n_steps": "1"}


def _pages_of_a_run(folder: Path) -> str:
    """While every value on the page grows, none goes back."""
    from moe_ffn.report.page import write_report
    from moe_ffn.runs.folder import CONFIG_FILE
    from moe_ffn.runs.reader import read_run

    process = start(*options(folder, run__name="read", **_LONG))
    read, page = folder / "runs" / "read", folder / "page.html"
    num_pages = num_rows = 0
    while process.poll() is None:
        if (read / CONFIG_FILE).is_file():
            write_report([read], page)
            num_pages += 1
            _check_page(page.read_text(encoding="utf-8"))
            rows = len(read_run(read).series("train/loss"))
            assert rows >= num_rows, f"{num_rows} rows were there, then {rows}"
            num_rows = rows
    ended = finish(process)
    assert ended.code == 0, _last_words([ended])
    assert num_pages > 1, "the run was over before it was looked at"
    assert _names(folder) == {"corpus", "cache", "runs", "page.html"}
    return f"{num_pages} pages"


def _report_program(folder: Path) -> str:
    process = start(*options(folder, run__name="read", **_LONG))
    read, num_pages = folder / "runs" / "read", 0
    while not (read / "config.yaml").is_file() and process.poll() is None:
        time.sleep(0.01)
    while process.poll() is None:
        ended = run(str(read), program="experiments.report")
        assert (ended.code, ended.stderr) == (0, ""), _last_words([ended])
        _check_page((read / "report.html").read_text(encoding="utf-8"))
        num_pages += 1
    ended = finish(process)
    assert ended.code == 0, _last_words([ended])
    assert num_pages > 1, "the run was over before it was looked at"
    return f"{num_pages} pages"


def _check_page(html: str) -> None:
    assert html.startswith("<!doctype html>"), html[:80]
    assert html.rstrip().endswith("</html>"), html[-80:]
    assert "Traceback" not in html


# ------------------------------------------------------------------------------------- helpers


def _python(code: str, *argv: str) -> subprocess.Popen[str]:
    return start_command([sys.executable, "-c", code, *argv])


def _last_words(ended: Iterable[Finished]) -> str:
    return " | ".join(f"{one.code}: {one.stderr[-300:].strip()}" for one in ended)


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
