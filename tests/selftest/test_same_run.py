"""The comparison that the self-test rests on sees a difference wherever there is one."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.selftest.same_run import differences, require_same
from experiments.selftest.scene import options
from moe_ffn.cli.train import main
from moe_ffn.training.recovery.checkpoint_file import read_checkpoint, write_checkpoint

LAST = "checkpoints/step_00000004.ckpt"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scene")
    changes = {"model__ffn": "{type: moe, num_experts: 4}", "trainer__max_steps": "4"}
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert main(options(folder, run__name="one", **changes)) == 0
    return folder / "runs/one"


@pytest.fixture
def other(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "other"))


def _change(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))


def _change_checkpoint(path: Path, change: Callable[[dict], None]) -> None:
    values = read_checkpoint(path)
    change(values)
    write_checkpoint(values, path)


def test_a_run_is_the_same_as_itself(run: Path, other: Path) -> None:
    assert differences(run, other) == []


def test_the_time_it_took_is_no_difference(run: Path, other: Path) -> None:
    summary = json.loads((other / "summary.json").read_text())
    summary["tokens_per_second"] += 1
    (other / "summary.json").write_text(json.dumps(summary))

    assert differences(run, other) == []


def test_a_weight_that_differs_in_its_last_bit(run: Path, other: Path) -> None:
    def nudge(values: dict) -> None:
        weight = next(iter(values["state_dict"].values()))
        weight.view(-1)[3] = weight.view(-1)[3].nextafter(weight.new_tensor(9.0))

    _change_checkpoint(other / LAST, nudge)

    first, *_ = differences(run, other)  # the output matrix is the embedding, and differs too
    assert first.startswith("step_00000004.ckpt/state_dict/decoder.")


@pytest.mark.parametrize("part", ["optimizer_states", "lr_schedulers", "callbacks"])
def test_a_state_that_is_missing(run: Path, other: Path, part: str) -> None:
    _change_checkpoint(other / LAST, lambda values: values.pop(part))

    assert f"step_00000004.ckpt/{part}" in differences(run, other)[0]


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "summary.json"])
def test_a_figure_of_a_file(run: Path, other: Path, name: str) -> None:
    _change(other / name, "0", "1")

    with pytest.raises(AssertionError, match=rf"^\d+ differences: {name}"):
        require_same(run, other)


def test_a_row_too_many(run: Path, other: Path) -> None:
    with (other / "metrics.jsonl").open("a") as file:
        file.write("5\n")

    assert differences(run, other)
