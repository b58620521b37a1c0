"""`moe_ffn.metrics` gives every measure by name, and those that need torchmetrics say so without it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import moe_ffn.metrics as metrics

ROOM = Path(metrics.__file__).parent
CLASSES = {"CoactivationMetrics", "LanguageMetrics", "LoadMetrics", "TokenMetrics"}
# An install without the package: a None in its place stops every import of it.
WITHOUT_TORCHMETRICS = "import sys; sys.modules['torchmetrics'] = None; import moe_ffn.metrics as m"


def run(code: str) -> str:
    command = [sys.executable, "-c", f"{WITHOUT_TORCHMETRICS}\n{code}"]
    finished = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOM.parents[1], check=False
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_every_public_measure_of_the_room_is_exported() -> None:
    defined = {
        node.name
        for name in ("functional", "modular")
        for node in ast.parse((ROOM / f"{name}.py").read_text()).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
    }
    assert set(metrics.__all__) == defined
    assert metrics.__all__ == sorted(metrics.__all__) == dir(metrics)
    for name in metrics.__all__:
        assert getattr(metrics, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(
        AttributeError, match=r"module 'moe_ffn\.metrics' has no attribute 'maxvio'"
    ):
        _ = metrics.maxvio


def test_without_torchmetrics_the_functions_work_and_the_classes_say_what_they_need() -> None:
    code = (
        "import torch\n"
        "from moe_ffn.metrics import max_violation\n"
        "print(max_violation(torch.tensor([0.5, 0.5])).item())\n"
        "for name in m.__all__:\n"
        "    try: getattr(m, name)\n"
        "    except ModuleNotFoundError as error: print(error)\n"
    )
    first, *sentences = run(code).splitlines()
    assert first == "0.0"
    assert sentences == [
        f"moe_ffn.metrics.{name} needs torchmetrics; install with: pip install '.[train]' (the functions "
        "of moe_ffn.metrics.functional need torch alone)"
        for name in sorted(CLASSES)
    ]
