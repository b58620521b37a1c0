"""Every Triton kernel compiles for a GPU, and well, which the interpreter cannot prove.

Triton compiles for a target that is not there with what its package brings along.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed here")

REPOSITORY = Path(__file__).parents[2]
HOPPER_SHARED_MEMORY = 227 * 1024  # bytes that one program may have


@pytest.mark.slow  # some forty compilations take about two minutes on one core
def test_every_kernel_compiles_for_hopper_without_spilling(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    environment.pop("TRITON_INTERPRET", None)
    finished = subprocess.run(
        [sys.executable, Path(__file__).with_name("compile_for_hopper.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    variants = [json.loads(line) for line in finished.stdout.splitlines()]
    assert len(variants) > 30
    for variant in variants:
        assert variant["spilled"] <= 64, variant
        assert variant["shared"] <= HOPPER_SHARED_MEMORY, variant
        # The tensor cores of Hopper run at full speed by this instruction alone.
        multiplies = variant["kernel"] not in ("combine_kernel", "bias_gradient_kernel")
        full_precision = variant["variant"] == "float32"
        assert (variant["wgmma"] > 0) == (multiplies and not full_precision), variant
        # Loads that run ahead of the products.
        assert (variant["cp.async"] > 0) == multiplies, variant
