"""A disk without room for the prepared data is told by the name of the option, at whatever byte it ends."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moe_ffn.config.errors import ConfigError
from moe_ffn.data.prepare import DataConfig, prepare
from tests.helpers.own_disk import ALONE, mounting
from tests.helpers.tiny_runs import finish, start_command, write_corpus

ROOMS = (0, 1, 19, 20, 21, 160, 307, 308, 309, 600, 661, 662, 1000, 2500, 4096, 5000, 5141)
"""Bytes that one file may have; of the files, `tokenizer.json` has 20, `train.bin` 5,142."""


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """No file may be longer than that: what a full disk does to the file that meets its end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_every_size_is_refused_in_a_sentence_and_taken_when_there_is_room(tmp_path: Path) -> None:
    corpus, cache = write_corpus(tmp_path / "corpus"), tmp_path / "cache"
    config = DataConfig.model_validate(
        {
            "corpus": {"type": "text", "paths": [str(corpus)]},
            "seq_len": 16,
            "cache_dir": str(cache),
        }
    )
    for num_bytes in ROOMS:
        with room_for(num_bytes), pytest.raises(ConfigError) as refused:
            prepare(config)

        assert str(refused.value) == (
            f"data.cache_dir: '{cache}' cannot be written (File too large); make room, or name another "
            "folder"
        ), num_bytes
        assert not list(cache.iterdir()), f"{num_bytes}: something half-written was left"

    assert prepare(config).train_size.num_documents > 0


_ON_A_SMALL_DISK = """
import subprocess, sys
from pathlib import Path
folder, beside = map(Path, sys.argv[1:])
sys.path.insert(0, str(beside))
from moe_ffn.cli.command_line import parse_config
from moe_ffn.data.prepare import prepare
from moe_ffn.runs.config import TrainConfig
from tests.helpers.tiny_runs import options, run_here

cache = folder / "cache"
argv = options(folder, trainer__max_steps="1")
for pages in range(1, 12):
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={4 * pages}k", "none", cache], check=True)
    done = run_here(*argv)
    if done.code == 0:
        break
    print(done.code, len(done.own_lines), len(list(cache.iterdir())), done.own_lines[0])
    assert not (folder / "runs").exists(), "a run was left"
    subprocess.run(["mount", "-o", "remount,size=1m", cache], check=True)
    prepare(parse_config(argv, TrainConfig, "train").data)
    subprocess.run(["umount", "-l", cache], check=True)
else:
    raise SystemExit("never enough")
"""


@pytest.mark.slow
def test_a_real_disk_that_fills_up(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    able_to = mounting(cache, "4k")
    python = (sys.executable, "-c", _ON_A_SMALL_DISK, str(tmp_path), str(Path(__file__).parent))

    done = finish(start_command([*ALONE, f'{able_to} && exec "$@"', "sh", *python]))

    assert done.code == 0, done.stderr
    refused = [line.split(" ", 3) for line in done.stdout.splitlines()]
    assert len(refused) > 2, done.stdout
    for code, num_lines, num_left, said in refused:
        assert (code, num_lines, num_left) == ("2", "1", "0"), said
        assert said.startswith(f"error: data.cache_dir: '{cache}' cannot be written (No")
