"""A damaged or missing file of a run is named: a checkpoint is skipped for the newest intact one, a log is
repaired, and a config is rejected.
"""

from __future__ import annotations

import errno
import io
import os
import random
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ffn.config.errors import ConfigError
from moe_ffn.config.yaml_files import read_config
from moe_ffn.data.prepare import PreparedData, prepare
from moe_ffn.runs.assemble import build_module
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.folder import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    FACTS_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    SUMMARY_FILE,
    TOKENIZER_FILE,
)
from moe_ffn.runs.reader import load_model
from moe_ffn.runs.resume import ResumePoint, find_resume_point
from moe_ffn.training.module import LanguageModel
from moe_ffn.training.recovery import checkpoint_keeper
from moe_ffn.training.recovery.checkpoint_file import read_checkpoint, write_checkpoint
from tests.helpers.cases import cases
from tests.helpers.same_run import differences, require_same
from tests.helpers.tiny_runs import (
    BEST,
    NEWEST,
    OLDER,
    WITH_ALARMS,
    finished_copy,
    options,
    run_here,
    trained,
    unfinished_copy,
)

Damage = Callable[[Path], object]


def cut(parts: float) -> Damage:
    return lambda path: os.truncate(path, int(path.stat().st_size * parts))


def holding(content: bytes) -> Damage:
    return lambda path: path.write_bytes(content)


def garbage(path: Path) -> None:
    path.write_bytes(random.Random(0).randbytes(path.stat().st_size))


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the values of a checkpoint, whose checksum is right again."""
    values = read_checkpoint(path)
    change(values)
    write_checkpoint(values, path)


# -- checkpoints


@cache
def expected() -> tuple[TrainConfig, PreparedData, LanguageModel]:
    """The config, data and model that a checkpoint of the run has to match."""
    config = read_config(trained() / CONFIG_FILE, TrainConfig)
    data = prepare(config.data)
    return config, data, build_module(config, data)


def start_of(folder: Path) -> ResumePoint:
    config, data, module = expected()
    return find_resume_point(folder, config, data, module, config.trainer)


MARKER = "code-was-run"


class Hostile:
    """An object that runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {MARKER}",)


HOSTILE: Any = {"state_dict": Hostile()}


def another_run(path: Path) -> None:
    rewrite(path, lambda values: values["identity"].update(run_id="f" * 16))


DAMAGES: dict[str, tuple[Damage, str, bool]] = {
    "cut to a half": (cut(0.5), "does not end in its checksum: it was cut short", False),
    "garbage": (garbage, "does not end in its checksum", False),
    "missing": (lambda p: (p.unlink(), p.symlink_to("nowhere")), "No such file", False),
    "an archive that runs code": (
        lambda p: torch.save(HOSTILE, p), "does not end in its checksum", False
    ),
    "a sealed archive that runs code": (
        lambda p: write_checkpoint(HOSTILE, p), "is not a checkpoint of", False
    ),
    "of another run": (another_run, "was made with run_id ffffffffffffffff, but this run has ", False),
    "without its loops": (
        lambda p: rewrite(p, lambda values: values.pop("loops", None)), "lacks 'loops'", True
    ),
    "of another version": (
        lambda p: rewrite(p, lambda values: values.get("guard", {}).pop("losses", None)),
        "holds a state that this version cannot load (KeyError('losses'))",
        True,
    ),
}  # fmt: skip
"""The damage, the reason that is logged, and whether the weights can still be used."""
QUICK = ("cut to a half", "a sealed archive that runs code", "of another run", "of another version")


@pytest.mark.parametrize(("damage", "reason", "weights_are_good"), cases(DAMAGES, QUICK))
def test_the_newest_intact_checkpoint_is_used(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Damage,
    reason: str,
    weights_are_good: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = finished_copy(tmp_path)
    checkpoints = folder / CHECKPOINTS_FOLDER

    damage(checkpoints / NEWEST)
    start = start_of(folder)
    assert start.checkpoint == checkpoints / OLDER
    (skipped,) = start.skipped
    check_reason(skipped, NEWEST, reason)

    damage(checkpoints / BEST)
    with redirect_stderr(io.StringIO()) as logged:
        loaded = load_model(folder).decoder.state_dict()
    if weights_are_good:
        assert not logged.getvalue()
    else:
        values = read_checkpoint(checkpoints / OLDER)["state_dict"]
        assert all(torch.equal(value, values[f"decoder.{name}"]) for name, value in loaded.items())
        check_reason(logged.getvalue(), BEST, reason)

    damage(checkpoints / OLDER)
    with pytest.raises(ConfigError) as rejected:
        start_of(folder)
    check_reason(str(rejected.value), NEWEST, reason)
    assert not (tmp_path / MARKER).exists(), "code in the file was run"


def check_reason(said: str, name: str, reason: str) -> None:
    assert "\n" not in said.removesuffix("\n"), said
    assert name in said, said
    assert reason in said, said
    assert "weights_only" not in said, f"torch's advice to run the code: {said}"


# -- disks without room for a checkpoint


def test_a_run_on_a_full_disk_explains_how_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(values: dict[str, Any], path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_keeper, "write_checkpoint", fail)
        done = run_here(*options(tmp_path, run__name="run", **WITH_ALARMS))
    folder = tmp_path / "runs" / "run"
    assert done.code == 1
    assert done.stderr.splitlines()[-1] == (
        "error: the weights of step 12 are not saved (No space left on device); fix that, then: moe-ffn "
        f"train --resume {folder}"
    )

    done = run_here("--resume", str(folder))

    assert done.code == 0, done.stderr
    require_same(trained(), folder)


# -- other files


def another_rate(path: Path) -> None:
    text = path.read_text()
    assert "learning_rate: 0.01" in text
    path.write_text(text.replace("learning_rate: 0.01", "learning_rate: 0.007"))


ACCIDENTS: dict[str, Damage] = {
    "cut in two": cut(0.5),
    "empty": holding(b""),
    "garbage": garbage,
    "removed": Path.unlink,
}
RESUMED = (CONFIG_FILE, FACTS_FILE, TOKENIZER_FILE, METRICS_FILE, SAMPLES_FILE)
FILES = {
    **{f"{name}, {what}": (name, damage) for name, (what, damage) in product(RESUMED, ACCIDENTS.items())},
    "another rate": (CONFIG_FILE, another_rate),
}  # fmt: skip


@pytest.mark.parametrize(("name", "damage"), cases(FILES, [f"{FACTS_FILE}, cut in two"]))
def test_a_run_with_a_damaged_file_is_resumed(tmp_path: Path, name: str, damage: Damage) -> None:
    """The file is rejected by its name or repaired with a warning, or nothing is missing in the end."""
    folder = unfinished_copy(tmp_path)
    (folder / CHECKPOINTS_FOLDER / NEWEST).unlink()
    damage(folder / name)

    done = run_here("--resume", str(folder))

    if done.code == 2:
        (line,) = done.own_lines
        assert name in line or str(folder) in line, done.stderr
        return
    assert done.code == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if name in line]
    assert len(said) <= 1, said
    lost = differences(trained(), folder)
    assert said or not lost, f"silently, {lost[:2]}"


READERS: dict[str, tuple[str, ...]] = {
    "generate": ("--num-tokens", "2"),
    "trace": ("--text", "import os"),
    "report": (),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", ACCIDENTS)
@pytest.mark.parametrize("name", [CONFIG_FILE, TOKENIZER_FILE, FACTS_FILE, SUMMARY_FILE])
def test_a_run_with_a_damaged_file_is_read(tmp_path: Path, name: str, what: str) -> None:
    """Programs work without the file or name it; the page is always made."""
    folder = finished_copy(tmp_path)
    ACCIDENTS[what](folder / name)

    for program, argv in READERS.items():
        done = run_here(str(folder), *argv, program=f"moe_ffn.cli.{program}")

        assert done.code in ((0,) if program == "report" else (0, 2)), (program, done)
        if done.code == 2:
            assert len(done.stderr.splitlines()) <= 3, done.stderr
            assert name in done.stderr
