"""Running out of memory is reported in one sentence with the bytes that were needed."""

from __future__ import annotations

import errno
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_ffn import build_ffn, load_pretrained
from moe_ffn.cli.exit import EXIT_FAILED, exit_on_bad_input
from moe_ffn.config import process_memory
from moe_ffn.config.errors import ConfigError
from moe_ffn.config.process_memory import (
    gigabytes,
    memory_limit,
    out_of_memory,
    require_table_memory,
)
from moe_ffn.config.yaml_files import validate
from moe_ffn.runs import memory
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.memory import check_fits
from tests.helpers.fitted import OWN_BLOCK
from tests.helpers.tiny_runs import finished_copy

RunTrain = Callable[..., Any]


def _error(ask: Callable[[], object]) -> BaseException:
    with pytest.raises((MemoryError, RuntimeError)) as raised:
        ask()
    return raised.value


NOT_HAD = {
    "torch": (
        lambda: _error(lambda: torch.empty(2**58)),
        "1,152,921,505 GB more, and this process ",
    ),
    "python": (lambda: _error(lambda: bytearray(2**62)), "the requested memory, and this process "),
    "numpy": (lambda: _error(lambda: np.empty(2**58)), "the requested memory, and this process "),
    "the system": (
        lambda: OSError(errno.ENOMEM, "Cannot allocate memory"),
        "the requested memory, ",
    ),
    "a GPU": (
        lambda: torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.81 GiB of "
            "which 1.00 GiB is free."
        ),
        "the requested memory, and the GPU has 139.81 GiB",
    ),
}


@pytest.mark.parametrize(("make", "said"), NOT_HAD.values(), ids=NOT_HAD)
def test_an_error_about_memory_is_known(make: Callable[[], BaseException], said: str) -> None:
    assert out_of_memory(make()).startswith(f"out of memory: could not allocate {said}")


@pytest.mark.parametrize(
    "error",
    [RuntimeError("shapes differ"), OSError(errno.ENOSPC, "No space"), ValueError("out of memory")],
    ids=repr,
)
def test_other_errors_are_not(error: Exception) -> None:
    assert out_of_memory(error) == ""

    def fails(argv: Sequence[str]) -> int:
        raise error

    with pytest.raises(type(error)):
        exit_on_bad_input(fails)


def test_out_of_memory_in_training_reports_what_the_model_needs(
    run_train: RunTrain, tmp_path: Path
) -> None:
    in_training = "if x.shape[0] == 4: torch.empty(2**58)"  # not where it is tried before
    (tmp_path / "own.py").write_text(OWN_BLOCK % in_training)

    run = run_train(tmp_path, "--model.ffn.type", "own.py:Config")

    assert run.code == EXIT_FAILED
    assert "Traceback" not in run.stderr
    # 257 x 16 embeddings, 2 layers of 4 x 16 x 16, 5 norms of 16; twice, of four bytes.
    assert re.fullmatch(
        r"error: out of memory: could not allocate .+, and this process may have [\d.,]+ GB; "
        r"6,240 parameters and their gradients take 0\.05 MB, the token ids of a batch 0\.00051 MB; the "
        r"optimizer's states and the activations come on top: lower data\.batch_size \(4\), "
        r"data\.seq_len \(16\), model\.num_layers \(2\) or model\.d_model \(16\)",
        run.stderr.splitlines()[-1],
    )
    assert (run.folder / "config.yaml").exists()


def test_a_machine_without_containers_has_what_it_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setattr(process_memory, "_CGROUP_LIMITS", (tmp_path / "memory.max",))
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: unlimited)
    assert memory_limit() == machine

    (tmp_path / "memory.max").write_text("max\n")
    assert memory_limit() == machine
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory_limit() == 1000

    monkeypatch.setattr(resource, "getrlimit", lambda _: (500, resource.RLIM_INFINITY))
    assert memory_limit() == 500


def test_tables_larger_than_the_memory_of_their_device_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_memory, "memory_limit", lambda: 100 * 3 * 4)
    require_table_memory(100, 3, "a table", "advice")
    with torch.device("meta"):
        require_table_memory(10**9, 3, "a table", "advice")
    for dtype, num_rows in ((torch.float32, 101), (torch.float64, 100)):
        monkeypatch.setattr(torch, "get_default_dtype", lambda dtype=dtype: dtype)
        with pytest.raises(ConfigError, match=r"^a table take .*; advice$"):
            require_table_memory(num_rows, 3, "a table", "advice")


ON_GPU = {"trainer": {"accelerator": "gpu"}}


@pytest.mark.parametrize(
    ("options", "tensors"),
    [
        ({"optimizer": {"type": "adamw"}}, 4),  # two means
        ({"optimizer": {"type": "sgd"}}, 3),
        ({"optimizer": {"type": "adamw"}, "trainer": {"precision": "bf16-true"}}, 2),
        ({"optimizer": {"type": "adamw"}, "trainer": {"precision": "64-true"}}, 8),
    ],
)
def test_cpu_training_is_rejected_when_its_states_exceed_memory(
    options: dict[str, Any], tensors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = validate(TrainConfig, options)
    num_params = config.model.num_params(257, config.data.seq_len)
    needed, kind = 4 * tensors * num_params, config.optimizer.type
    monkeypatch.setattr(memory, "memory_limit", lambda: needed)
    check_fits(config)
    monkeypatch.setattr(memory, "memory_limit", lambda: needed - 1)
    with pytest.raises(ConfigError) as raised:
        check_fits(config)
    own = gigabytes({2: 2, 8: 8}.get(tensors, 4) * num_params)
    assert str(raised.value) == (
        f"model: {num_params:,} parameters take {own}, and {gigabytes(needed)} with gradients and the state "
        f"of optimizer.type '{kind}', but this process may have {gigabytes(needed - 1)} of memory; "
        "make the model smaller, its largest tables first, or train on a machine with more"
    )


def test_cpu_training_is_rejected_when_its_teacher_exceeds_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = validate(TrainConfig, {"optimizer": {"type": "sgd"}})
    needed = 12 * config.model.num_params(257, config.data.seq_len)
    monkeypatch.setattr(memory, "memory_limit", lambda: needed + 10**9)
    check_fits(config, teacher_bytes=10**9)
    said = f" 'sgd', {gigabytes(10**9 + 1)} of them for objective.distill.teacher, but this process may"
    with pytest.raises(ConfigError, match=said):
        check_fits(config, teacher_bytes=10**9 + 1)


def test_a_model_larger_than_the_memory_limit_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    config = validate(TrainConfig, ON_GPU)
    num_bytes = 4 * config.model.num_params(257, config.data.seq_len)
    monkeypatch.setattr(memory, "memory_limit", lambda: num_bytes)
    check_fits(config)
    monkeypatch.setattr(memory, "memory_limit", lambda: num_bytes - 1)

    with pytest.raises(
        ConfigError, match=rf"^model: .* parameters .* have {gigabytes(num_bytes - 1)} of memory$"
    ):
        check_fits(config)


def test_the_block_that_has_most_parameters_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {"type": "ngram_memory", "num_rows": 10**8, "ffn": "dense"}
    config = validate(TrainConfig, {"model": {"num_layers": 2, "ffn_at": {"1": tables}}})
    monkeypatch.setattr(memory, "memory_limit", lambda: 10**9)
    largest = config.model.ffn_at["1"].num_params(config.model.d_model)

    with pytest.raises(
        ConfigError,
        match=rf"lower model\.ffn_at\.1, which has {largest:,} of them, data\.batch_size ",
    ):
        check_fits(config)


def _nested(depth: int) -> Any:
    config: Any = "dense"
    for _ in range(depth):
        config = {"type": "ngram_memory", "ffn": config}
    return config


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"type": "moe", "num_experts": 10**9},
            "the block: out of memory: could not allocate ",
        ),
        (_nested(2000), "the block: is nested too deep; nest fewer blocks in each other"),
    ],
    ids=["experts", "nested"],
)
def test_a_block_of_absurd_size_is_one_sentence(config: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}") as rejected:
        build_ffn(config, d_model=4096)
    assert "\n" not in str(rejected.value)


def test_a_model_folder_of_absurd_size_is_one_sentence(tmp_path: Path) -> None:
    path = finished_copy(tmp_path) / "model" / "config.json"
    path.write_text(path.read_text().replace('"vocab_size": 257', '"vocab_size": 1000000000'))
    with pytest.raises(ConfigError, match=f"^'{re.escape(str(path))}': out of memory: "):
        load_pretrained(path.parent)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_reused_without_new_pages() -> None:
    """Count the page faults of the same tensors, allocated repeatedly, of 1 MB and of 64."""
    code = """
import resource, torch
from moe_ffn.config.process_memory import keep_freed_memory
for prepare in (lambda: None, keep_freed_memory):
    prepare()
    for megabytes in (1, 64):
        for _ in range(6):  # the heap grows in the first rounds, because a tensor is aligned
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            tensors = [torch.ones(2**20 * megabytes // 4) for _ in range(64 // megabytes)]
            del tensors
            pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        print(pages)
"""
    printed = subprocess.check_output([sys.executable, "-c", code]).split()
    small, large, small_kept, large_kept = map(int, printed)
    assert small_kept <= small / 4
    assert large_kept <= large / 4
