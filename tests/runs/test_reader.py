"""A run, its rows and its JSON files read back: whole, half written, damaged, or of an older program."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moe_ffn.config import files
from moe_ffn.runs.folder import locked
from moe_ffn.runs.json_files import CodeEntries, Facts, JsonFile, Summary
from moe_ffn.runs.reader import Sample, read_run, read_runs
from moe_ffn.runs.rows import Rows, flat
from moe_ffn.training.monitoring.json_lines import Alarm, JsonLines, Row, read_lines
from tests.helpers.synthetic_run import age, raise_alarms, write_metrics, write_run


def test_a_finished_run(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", layers=2, experts=4))

    assert (run.name, run.state, run.step) == ("a", "finished", 600)
    assert run.option("model.ffn.router.k") == 2
    assert run.option("model.ffn.router.k.deeper") is None
    assert list(run.layers) == ["layer_00", "layer_01"]
    assert len(run.loads["layer_00"]) == 4
    assert len(run.loads["layer_00"][0]) == 60
    assert len(run.validated["layer_01"]["load"]) == 4
    assert run.validated["layer_01"]["coactivation"][0][0] == 0
    assert run.samples[0].prompt == "def "
    assert run.alarms == []


def test_experts_are_in_numerical_order(tmp_path: Path) -> None:
    load = [expert / 1000 for expert in range(101)]
    write_metrics(tmp_path / "metrics.jsonl", [{"step": 1, "routing/layer_00/load": load}])
    assert [series.last for series in read_run(tmp_path).loads["layer_00"]] == load


def test_an_inner_block_is_a_separate_layer(tmp_path: Path) -> None:
    values = {"routing/layer_00/max_violation": 0.5, "routing/layer_00/inner/load": [1.0]}
    write_metrics(tmp_path / "metrics.jsonl", [{"step": 1, **values}])
    run = read_run(tmp_path)
    assert list(run.layers) == ["layer_00", "layer_00/inner"]
    assert list(run.loads) == ["layer_00/inner"]


def test_a_run_may_have_a_config_and_a_few_columns(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    write_metrics(tmp_path / "metrics.jsonl", [{"step": 1, "train/loss": 2.0}])

    run = read_run(tmp_path)

    assert not run.facts
    assert not run.summary
    assert run.samples == run.alarms == []
    assert run.series("train/loss").last == 2.0
    assert len(run.series("train/gradient_norm")) == 0


def test_until_the_summary_the_experts_are_those_of_the_last_validation(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", layers=2, experts=4, is_finished=False))

    key = "validation/routing/layer_01/"
    value = [row for row in run.rows if f"{key}max_violation" in row][-1]
    assert value["step"] == 300
    loads = [value[f"{key}load/expert_{expert:02d}"] for expert in range(4)]
    assert run.validated["layer_01"]["load"] == loads
    assert sum(loads) == pytest.approx(1)
    assert run.validated["layer_01"]["max_violation"] == value[f"{key}max_violation"]


def test_partial_files_count_as_absent(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    (folder / "summary.json").write_text('{"validation_loss": 1.')
    (folder / "config.yaml").write_text("model: {ffn: [")
    (folder / "facts.json").write_text("[1, 2]")
    lines = [{"step": 1, "prompt": "a", "text": "b"}, {"step": 2}, {"step": math.nan}]
    text = "\n".join(["not json", *map(json.dumps, lines), '{"step": 3, "te'])
    (folder / "samples.jsonl").write_text(text)

    run = read_run(folder)

    assert run.state == "training"
    assert run.options == {}
    assert not run.facts
    assert not run.summary
    assert run.samples == [Sample(step=1, prompt="a", text="b"), Sample(step=2)]


def test_unreadable_files_count_as_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "a", experts=0)
    requiring = files._require_file

    def reject(path: Path, *rest: Any) -> None:
        if path.name in ("samples.jsonl", "alarms.jsonl", "facts.json"):
            raise PermissionError(13, "Permission denied")
        requiring(path, *rest)

    monkeypatch.setattr(files, "_require_file", reject)
    run = read_run(folder)

    assert (run.samples, run.alarms, run.facts, run.state) == ([], [], Facts(), "finished")


def test_duplicate_runs_are_read_once(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", experts=0), write_run(tmp_path / "b", experts=0)
    again = tmp_path / "b" / ".." / "a"
    assert [(run.name, run.folder) for run in read_runs([a, b, again])] == [("a", a), ("b", b)]


def test_alarms(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    raise_alarms(folder)

    first, second = read_run(folder).alarms

    assert (first.step, first.kind, first.layer) == (300, "collapse", "layer_01")
    assert second == Alarm(
        step=420,
        kind="loss_spike",
        layer=None,
        message="The loss rose from 1.61 to 2.90 within 10 steps.",
        advice="Lower optimizer.learning_rate (0.003) or gradient_clip_val (1.0).",
    )


def test_a_run_without_an_end_is_training_until_it_has_been_silent_for_long(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", is_finished=False)
    assert read_run(folder).state == "training"
    age(folder, 100)
    assert read_run(folder).state == "training"
    age(folder, 130)
    assert read_run(folder).state == "interrupted"


def test_the_process_that_trains_it_is_believed_more_than_the_clock(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", is_finished=False)
    with locked(folder):
        age(folder, 5_000)
        assert read_run(folder).state == "training"
    age(folder, 0)
    assert read_run(folder).state == "interrupted"


def test_a_slow_run_is_given_the_time_of_ten_rows(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", is_finished=False)  # 30 rows
    age(folder, 3_000 + 600)
    then = time.time() - 600
    os.utime(folder / "metrics.jsonl", (then, then))  # a row took 100 s
    assert read_run(folder).state == "training"
    age(folder, 3_000 + 1_100)
    then = time.time() - 1_100
    os.utime(folder / "metrics.jsonl", (then, then))
    assert read_run(folder).state == "interrupted"


def test_a_run_without_rows_is_waiting(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("trainer: {max_steps: 5}\n")
    run = read_run(tmp_path)
    assert (run.state, run.step) == ("waiting", None)


def test_runs_of_one_name_are_named_by_their_paths(tmp_path: Path) -> None:
    folders = [tmp_path / "x" / "a", tmp_path / "y" / "a", tmp_path / "y" / "b"]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("{}")
    assert [run.name for run in read_runs(folders)] == [str(folders[0]), str(folders[1]), "b"]


MANY = "9" * 5_000


def written(folder: Path, content: str | bytes) -> Path:
    path = folder / "document.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


NOTHING = {
    "empty": "",
    "half": '{"run_id": "a"',
    "a list": "[1]",
    "a wrong type": '{"num_params": "low", "validation_loss": "low", "code/own.py": 1}',
    "bytes": b"\xff\xfe\x00",
    "a number without end": f'{{"num_params": {MANY}}}',
    "a thousand levels": '{"a": ' * 2_000 + "1" + "}" * 2_000,
}


@pytest.mark.parametrize("content", NOTHING.values(), ids=NOTHING)
@pytest.mark.parametrize("kind", [Facts, Summary, CodeEntries])
def test_invalid_json_reads_as_an_empty_document(
    tmp_path: Path, kind: type[JsonFile], content: str | bytes
) -> None:
    document = kind.read(written(tmp_path, content))
    assert not document
    assert document == kind()


def test_pipes_and_devices_read_as_empty_documents_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name in ("missing", "pipe", "link", "."):
        assert not Facts.read(tmp_path / name)


def test_null_is_a_value(tmp_path: Path) -> None:
    summary = Summary.read(written(tmp_path, '{"validation_loss": null}'))
    assert summary
    assert summary.has("validation_loss")
    assert summary.validation_loss is None


def test_facts_are_whole_where_the_precision_is_known(tmp_path: Path) -> None:
    for precision, is_whole in {"32-true": True, "auto": False, "33": False}.items():
        facts = Facts.read(written(tmp_path, json.dumps({"precision": precision, "num_params": 3})))
        assert facts.is_whole == is_whole


def table(path: Path, *rows: dict[str, Any]) -> Rows:
    JsonLines(path / "metrics.jsonl").add(rows)
    return Rows(read_lines(path / "metrics.jsonl", Row))


def columns(rows: Rows) -> dict[str, tuple[list[int], list[float]]]:
    return {key: (list(s.steps), list(s.values)) for key, s in rows.columns.items()}


def test_a_list_is_one_column_per_expert() -> None:
    assert flat({"train/loss": 2.5, "routing/layer_03/load": [0.25, 0.75]}) == {
        "train/loss": 2.5,
        "routing/layer_03/load/expert_00": 0.25,
        "routing/layer_03/load/expert_01": 0.75,
    }


def test_each_key_is_a_column_of_the_rows_that_have_it(tmp_path: Path) -> None:
    rows = table(
        tmp_path,
        {"step": 2, "train/loss": 3.5},
        {"step": 4, "train/loss": 3.0, "other": None},
        {"step": 4, "validation/loss": 2.5, "load": [0.25, 0.75]},
    )

    assert columns(rows) == {
        "train/loss": ([2, 4], [3.5, 3.0]),
        "validation/loss": ([4], [2.5]),
        "load/expert_00": ([4], [0.25]),
        "load/expert_01": ([4], [0.75]),
    }
    assert len(rows) == 2
    assert list(rows) == [
        {"step": 2, "train/loss": 3.5},
        {
            "step": 4,
            "train/loss": 3.0,
            "validation/loss": 2.5,
            "load/expert_00": 0.25,
            "load/expert_01": 0.75,
        },
    ]
    assert rows.column("validation/loss").last == 2.5
    assert len(rows.column("nothing")) == 0


def test_a_run_without_rows_has_an_empty_table(tmp_path: Path) -> None:
    for rows in (Rows(), Rows(read_lines(tmp_path / "metrics.jsonl", Row))):
        assert (rows.columns, list(rows)) == ({}, [])


def test_repeated_steps_replace_earlier_ones(tmp_path: Path) -> None:
    steps = [(1, 1.0), (2, 2.0), (3, 3.0), (2, 2.5), (3, 3.5)]
    rows = table(tmp_path, *({"step": step, "x": value} for step, value in steps))
    assert columns(rows) == {"x": ([1, 2, 3], [1.0, 2.5, 3.5])}


def test_the_table_in_pandas(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    frame = table(tmp_path, {"step": 2, "a": 1.0}, {"step": 4, "b": 2.0}).to_pandas()

    assert frame.index.name == "step"
    assert list(frame.index) == [2, 4]
    assert frame["a"].dropna().to_dict() == {2: 1.0}
    assert frame["b"].dropna().to_dict() == {4: 2.0}


def test_without_pandas_there_is_no_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pandas"):
        Rows().to_pandas()
