"""`moe_ffn.metrics` gives every measure by name, and those that need torchmetrics say so without it."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest
import torch

import moe_ffn
import moe_ffn.metrics as metrics

ROOM = Path(metrics.__file__).parent
CLASSES = {
    *("CoactivationMetrics", "LanguageMetrics", "ListMetrics"),
    *("LoadMetrics", "TokenMetrics"),
}


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


def test_without_torchmetrics_the_functions_work_and_the_classes_say_what_they_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A None in the place of a module stops every import of it.
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    for name in [name for name in sys.modules if name.startswith("moe_ffn.metrics")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(moe_ffn, "metrics", metrics)  # as it was, once this test is over
    anew = importlib.import_module("moe_ffn.metrics")

    assert anew is not metrics
    assert anew.max_violation(torch.tensor([0.5, 0.5])).item() == 0
    for name in metrics.__all__:
        if name not in CLASSES:
            assert getattr(anew, name).__name__ == name
            continue
        with pytest.raises(ModuleNotFoundError) as raised:
            getattr(anew, name)
        assert str(raised.value) == (
            f"moe_ffn.metrics.{name} needs torchmetrics; install with: pip install '.[train]' (the "
            "functions of moe_ffn.metrics.functional need only torch)"
        )
