"""Whatever a text, a cache, a run's file or the place of a page is: it works, or one sentence names it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from moe_ffn.config.errors import ConfigError
from moe_ffn.config.yaml_files import to_yaml
from moe_ffn.data.prepare import DataConfig, prepare
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.folder import (
    ALARMS_FILE,
    CONFIG_FILE,
    FACTS_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    SUMMARY_FILE,
)
from tests.helpers.cases import cases
from tests.helpers.hostile import (
    LONG,
    MANY_DIGITS,
    MAX_SECONDS,
    as_printed,
    check_answer,
    check_sentence,
)
from tests.helpers.snapshot import snapshot
from tests.helpers.tiny_runs import write_corpus


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


# -- texts


def read(folder: Path, given: str, **changes: Any) -> Any:
    config: dict[str, Any] = {
        "corpus": {"type": "text", "paths": [given]},
        "seq_len": 8,
        "cache_dir": str(folder / "cache"),
        **changes,
    }
    return prepare(DataConfig.model_validate(config))


def _bpe(size: int) -> dict[str, Any]:
    return {"tokenizer": {"type": "bpe", "vocab_size": size}}


TEXTS: dict[str, tuple[str, bytes, dict[str, Any], str | None]] = {
    "a NUL at the end": ("a.txt", b"text " * 99 + b"\0", {}, "a.txt"),
    "an overlong character": ("a.txt", b"text " * 99 + b"\xc0\xaf", {}, "a.txt"),
    "half a surrogate pair": ("a.txt", b"text " * 99 + b"\xed\xa0\x80", {}, "a.txt"),
    "a byte order mark alone": ("a.txt", b"\xef\xbb\xbf", {}, "data.seq_len"),
    "one character": ("a.txt", b"a", {}, "data"),
    "a name of two lines": ("a\nb.txt", b"\0", {}, "b.txt"),
    "a name with colours": ("\x1b[31ma.txt", b"\0", {}, "a.txt"),
    "a name that is no text": ("a\udcff.txt", b"\0", {}, "a"),
    "a compressed text by its capital name": ("a.TXT.GZ", b"text" * 99, {}, "a.TXT.GZ"),
    "a vocabulary larger than the text": ("a.txt", b"some words " * 4_000, _bpe(60_000), None),
    "spaces alone": ("a.txt", b" \n\t" * 500, {}, None),
    "one character many times": ("a.txt", b"a" * 90_000, _bpe(512), "data.seq_len"),
    "one line of a megabyte": ("a.txt", b"word " * 200_000, {}, None),
    "line ends of every kind": ("a.txt", b"a\rb\r\nc\n\x0b\x0c\xe2\x80\xa8" * 99, {}, None),
    "control characters": ("a.txt", bytes(range(1, 32)) * 40, {}, None),
    "a good text of an odd name": ("a\udcff\n\x1b[1m.txt", b"text " * 200, {}, None),
    "a name like a glob": ("[a].txt", b"text " * 200, {}, None),
}  # fmt: skip


@pytest.mark.parametrize(("name", "content", "changes", "named"), cases(TEXTS, quick=6))
@pytest.mark.parametrize("by", ["file", "folder"])
def test_a_text(
    tmp_path: Path, name: str, content: bytes, changes: dict[str, Any], named: str | None, by: str
) -> None:
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / name).write_bytes(content)
    given = str(tmp_path / "t" / name) if by == "file" else str(tmp_path / "t")
    start = time.process_time()
    if named is None:
        assert read(tmp_path, given, **changes).train_size.num_tokens > 0
    else:
        with pytest.raises(ConfigError) as refused:
            read(tmp_path, given, **changes)
        check_sentence(as_printed(refused.value), named if by == "file" else "data")
        assert not list((tmp_path / "cache").rglob("*.unfinished"))
    assert time.process_time() - start < MAX_SECONDS


PATHS = {
    "a long name": LONG,
    "a long glob": "*" + LONG,
    "stars without end": "/".join(["**"] * 40) + "/no",
    "memory": "/proc/self/mem",
    "colours": "\x1b[31m",
    "bytes that are no text": "a\udcff",
    "a glob that is no pattern": "[!]",
    "below a file": "text.txt/a",
    "a NUL": "a\0b",
}


@pytest.mark.parametrize("given", cases(PATHS, quick=4))
def test_a_path_of_texts(given: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("text")
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, given)

    check_sentence(as_printed(refused.value), "data.corpus")


# -- caches


def _meta(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        meta = json.loads((folder / "meta.json").read_text())
        change(meta)
        (folder / "meta.json").write_text(json.dumps(meta))

    return damage


def _folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


CACHES: dict[str, Callable[[Path], object]] = {
    "no files named": _meta(lambda meta: meta.update(files={})),
    "no splits": _meta(lambda meta: meta.pop("splits")),
    "splits of another version": _meta(lambda meta: meta.update(splits={"train": 3})),
    "sizes that are text": _meta(lambda meta: meta["splits"]["train"].update(num_tokens="many")),
    "sizes that are not true": _meta(lambda meta: meta["splits"]["train"].update(num_tokens=10**9)),
    "notes that are a number": _meta(lambda meta: meta.update(notes=3)),
    "one key more": _meta(lambda meta: meta["splits"]["train"].update(colour=1)),
    "a list": lambda folder: (folder / "meta.json").write_text("[]"),
    "nested too deep": lambda folder: (folder / "meta.json").write_text("[" * 99_000),
    "a file outside": _meta(lambda meta: meta["files"].update({"/dev/zero/x": "0"})),
    "tokens that are a folder": lambda folder: _folder_instead(folder / "train.bin"),
    "a tokenizer that is a folder": lambda folder: _folder_instead(folder / "tokenizer.json"),
    "a file in its place": lambda folder: (shutil.rmtree(folder), folder.write_text("mine")),
    "a link to nowhere": lambda folder: (shutil.rmtree(folder), folder.symlink_to("no.such")),
    "a link to itself": lambda folder: (shutil.rmtree(folder), folder.symlink_to(folder.name)),
}


@pytest.mark.parametrize("damage", cases(CACHES, quick=5))
def test_a_damaged_cache_is_made_anew_or_named(
    damage: Callable[[Path], object], tmp_path: Path
) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    good = read(tmp_path, str(corpus))
    sizes, folder = (good.train_size, good.validation_size), good.folder
    del good
    damage(folder)

    try:
        data = read(tmp_path, str(corpus))
    except ConfigError as error:
        check_sentence(str(error), "data.cache_dir")
    else:
        assert (data.train_size, data.validation_size) == sizes
        assert len(data.train) == sizes[0].num_tokens


# -- pages of runs

LOADS = "routing/layer_00/load/expert_"
KEYS = ("train/loss", "validation/loss", "train/tokens_per_second", f"{LOADS}00")
EVIL = "</script><script>alert(1)</script>\u202e\x1b[31m\0"


def _row(step: object, value: object, *, keys: Iterable[str] = KEYS) -> str:
    """A line with `value` under every key; both are written as they are, whether JSON or not."""
    pairs = [f'"step": {step}', *(f"{json.dumps(key)}: {value}" for key in keys)]
    return f"{{{', '.join(pairs)}}}\n"


def _rows(*values: object) -> str:
    return "".join(_row(step, value) for step, value in enumerate(values))


def _summary(**values: Any) -> str:
    known = {"validation_loss": 1.0, "unigram_loss": 2.0, "tokens_per_second": 3.0, "routing": {}}
    return json.dumps({**known, **values})


def _layers(value: Any, key: str = "layer_00") -> str:
    return _summary(routing={key: value})


_FEW = _rows(3, 2, 1)
RUNS: dict[str, dict[str, str]] = {
    "rows of 1e308": {METRICS_FILE: _rows(*[1.797e308] * 2_000)},
    "rows of infinities and NaN": {METRICS_FILE: _rows("Infinity", "-Infinity", "NaN", "1e999", "-1e999")},
    "rows of fifty digits": {METRICS_FILE: _rows("9" * 50, "9" * 400, "9" * 5_000)},
    "rows of other types": {METRICS_FILE: _rows('"low"', "true", "{}", "[[1]]", '["x", null, 1]', "null")},
    "steps out of order": {METRICS_FILE: _row(9, 1) + _row(3, 1) + _row(3, 2) + _row(-4, 1)},
    "steps that are no steps": {
        METRICS_FILE: "".join(
            _row(step, 1)
            for step in ("Infinity", "NaN", "1e300", "9" * 50, "9" * 5_000, "true", '"1"', "1.5")
        )
    },
    "steps far apart": {METRICS_FILE: "".join(_row(n * 10**12, 1) for n in range(2_000))},
    "a thousand levels": {METRICS_FILE: _FEW + _row(7, "[" * 1_000 + "]" * 1_000) + _row(8, 1)},
    "a line without end": {METRICS_FILE: _FEW + '{"step": ' + "9" * 300_000},
    "a quotation mark": {METRICS_FILE: _FEW + '"\n' + _row(7, 1)},
    "line ends of every kind": {METRICS_FILE: _FEW.replace("\n", "\r\n") + _row("5\r", 1)},
    "a hundred thousand columns": {METRICS_FILE: _row(1, 1, keys=(f"c{n}" for n in range(100_000)))},
    "a load of ten thousand": {
        METRICS_FILE: _row(1, [1] * 10_000, keys=("routing/layer_00/load",))
    },
    "layers and experts of many digits": {
        METRICS_FILE: "".join(
            _row(step, 1, keys=(f"{prefix}{MANY_DIGITS}" for prefix in ("routing/layer_", LOADS)))
            for step in (1, 2)
        )
    },
    "columns of tags": {METRICS_FILE: _row(1, 1, keys=(f"train/{EVIL}", "train/<img src=x>")) * 2},
    "no row": {METRICS_FILE: ""},
    "a summary of other types": {SUMMARY_FILE: _summary(validation_loss=[1], unigram_loss={})},
    "a loss that is text": {SUMMARY_FILE: _summary(validation_loss="low"), METRICS_FILE: _FEW},
    "a loss of 400 digits": {SUMMARY_FILE: _summary(validation_loss=10**400, tokens_per_second=10**400)},
    "routing of other types": {SUMMARY_FILE: _layers([1, 2])},
    "a layer of tags": {SUMMARY_FILE: _layers({"load": [0.5, 0.5]}, EVIL)},
    "a load of other types": {SUMMARY_FILE: _layers({"load": [[1], "x", None, True, 1e308]})},
    "loads of nothing": {SUMMARY_FILE: _layers({"load": []})},
    "pairs that are text": {SUMMARY_FILE: _layers({"coactivation": "abc"})},
    "pairs that are a number": {SUMMARY_FILE: _layers({"coactivation": 3})},
    "pairs of other types": {SUMMARY_FILE: _layers({"coactivation": [["x", None], 3, []]})},
    "pairs without end": {SUMMARY_FILE: _layers({"coactivation": [[1e308, -1], [2]]})},
    "facts of other types": {
        FACTS_FILE: json.dumps({"precision": [1], "corpus_sha256": {"a": 1}, "num_params": "x"})
    },
    "facts of a thousand levels": {FACTS_FILE: '{"a": ' * 900 + "1" + "}" * 900},
    "flops beyond any number": {FACTS_FILE: '{"flops_per_token": 1e307}', METRICS_FILE: _FEW},
    "options of other types": {
        CONFIG_FILE: "model: {ffn: {num_experts: x, router: {k: [1]}}, ffn_at: {null: 1}, num_layers: {}}\n"
        "logging: {alarms: {after_steps: true}}\ntrainer: {max_steps: 1.5}\n"
    },
    "options out of range": {
        CONFIG_FILE: f"logging: {{alarms: {{after_steps: 1{'0' * 300}}}}}\n"
        f"trainer: {{max_steps: 1{'0' * 4_000}}}\n",
        METRICS_FILE: _FEW,
    },
    "options of tags": {CONFIG_FILE: to_yaml({"model": {"ffn": {"type": EVIL}}, EVIL: EVIL})},
    "samples of other types": {
        SAMPLES_FILE: '{"step": 1e400, "prompt": [1], "text": {}}\n{"step": -3}\n'
        '{"step": true, "text": "\\ud800"}\n[]\n3\n'
    },
    "samples of tags": {SAMPLES_FILE: json.dumps({"step": 1, "prompt": EVIL, "text": EVIL}) + "\n"},
    "alarms of other types": {
        ALARMS_FILE: '{"step": "x", "kind": 3, "layer": [1], "message": null}\n{"step": 1e308}\n{}\n'
    },
    "alarms of tags": {
        ALARMS_FILE: json.dumps({"step": 1, "kind": EVIL, "layer": EVIL, "message": EVIL}) + "\n"
    },
}  # fmt: skip


def write_run(folder: Path, files: Mapping[str, str]) -> Path:
    folder.mkdir(parents=True)
    plain = {
        CONFIG_FILE: to_yaml(TrainConfig()),
        SUMMARY_FILE: _summary(),
        FACTS_FILE: "{}",
        METRICS_FILE: _rows(1, 2),
    }
    for name, text in {**plain, **files}.items():
        (folder / name).write_text(text, encoding="utf-8", newline="")
    return folder


@pytest.mark.parametrize("files", cases(RUNS))
def test_a_page(files: dict[str, str], tmp_path: Path) -> None:
    hurt, good = write_run(tmp_path / "hurt", files), write_run(tmp_path / "good", {})

    twin = shutil.copytree(hurt, tmp_path / "twin")
    for argv in ([str(hurt)], [str(hurt), str(good)], [str(hurt), str(twin)]):
        done = check_answer("report", *argv, "--output", "page.html", named=None)

        html = Path("page.html").read_text(encoding="utf-8")
        body = html[html.index("<body>") :]
        assert EVIL[:30] not in body, "a run has ended a script"
        assert not set("\u202e\x1b\0") & set(body), "a character that is not shown"
        assert done.stderr == ""


@pytest.mark.slow
def test_a_page_of_two_hundred_runs(tmp_path: Path) -> None:
    runs = [str(write_run(tmp_path / f"{n} <b>&'\"", {METRICS_FILE: _FEW})) for n in range(200)]

    check_answer("report", *runs, "--output", "page.html", named=None)


OUTPUTS: dict[str, str] = {
    "the run's own config": "run/config.yaml",
    "the run's own rows": "run/metrics.jsonl",
    "a note of the user's": "notes.md",
    "a device": "/dev/null",
    "a device that is full": "/dev/full",
    "a folder": "run",
    "a long name": LONG,
    "below a file": "notes.md/page.html",
    "no name": "",
}


@pytest.mark.parametrize("output", cases(OUTPUTS, quick=8))
def test_a_place_for_a_page(output: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {})
    Path("notes.md").write_text("mine")
    before = snapshot(run)

    check_answer("report", str(run), "--output", output, named="--output")

    assert snapshot(run) == before
    assert Path("notes.md").read_text() == "mine"
    assert Path("/dev/null").is_char_device()
