from __future__ import annotations

import pytest
import torch

from moe_ffn.training import precision
from moe_ffn.training.precision import bfloat16_speedup_on_cpu, resolve_precision


@pytest.mark.parametrize(
    ("speedup", "resolved"),
    [
        (0.2, "32-true"),
        (1.0, "32-true"),
        (1.49, "32-true"),
        (1.5, "bf16-mixed"),
        (6.0, "bf16-mixed"),
    ],
)
def test_auto_on_a_cpu_is_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, speedup: float, resolved: str
) -> None:
    monkeypatch.setattr(precision, "bfloat16_speedup_on_cpu", lambda: speedup)

    assert resolve_precision("auto", "cpu") == resolved


@pytest.mark.parametrize(("native", "resolved"), [(True, "bf16-mixed"), (False, "32-true")])
def test_auto_on_a_gpu_is_bfloat16_where_it_is_not_emulated(
    monkeypatch: pytest.MonkeyPatch, native: bool, resolved: str
) -> None:
    def supported(including_emulation: bool = True) -> bool:
        return native or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)

    assert resolve_precision("auto", "cuda") == resolved


@pytest.mark.parametrize("name", ["64-true", "32-true", "bf16-mixed", "bf16-true", "16-mixed"])
def test_any_other_precision_is_kept_and_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delattr(precision, "bfloat16_speedup_on_cpu")

    assert resolve_precision(name, "cpu") == name


def test_the_measurement_is_a_ratio_of_times() -> None:
    assert 0.001 < bfloat16_speedup_on_cpu(size=64, repeats=2) < 1000
