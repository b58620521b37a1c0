"""The suite of text from a model of transformers: every implementation is timed, on the same text."""

from __future__ import annotations

import pytest
import torch

from experiments.benchmark import live_models
from experiments.benchmark.layers import AUTO
from experiments.benchmark.peers import HF_BATCHED, HF_EAGER, HF_GROUPED
from experiments.benchmark.session import Session
from experiments.benchmark.shapes import Shape


def test_each_implementation_writes_the_same_and_is_held_to_batched_mm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live_models, "MODEL", Shape(1, 32, 16, 4, 2, "fp32"))
    monkeypatch.setattr(live_models, "NEW_TOKENS", 3)
    monkeypatch.setattr(live_models, "NUM_LAYERS", 1)
    session = Session((), torch.device("cpu"), rounds=2, warmup=0)

    live_models.live_models(session)

    names = [HF_EAGER, HF_GROUPED, HF_BATCHED, AUTO]
    assert [(r.case, r.candidate) for r in session.results] == [
        (case, name) for case in ("batch 1", "batch 16") for name in names
    ]
    assert {(r.computes, r.unit) for r in session.results} == {("same", "token/s")}
    assert [(p.case, p.limit, p.at_most) for p in session.promises] == [
        ("batch 1", 1.0, False),
        ("batch 16", 1.0, False),
    ]
    assert all(promise.figure is not None for promise in session.promises)
    assert f"tokens/s / {HF_BATCHED}" in capsys.readouterr().out


def test_a_text_that_differs_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_models, "MODEL", Shape(1, 32, 16, 4, 2, "fp32"))
    monkeypatch.setattr(live_models, "NEW_TOKENS", 2)
    monkeypatch.setattr(live_models, "NUM_LAYERS", 1)
    monkeypatch.setattr(live_models, "MIN_SPEEDUP", {1: 1.0})
    write = live_models._generate

    def other(model: object, prompt: torch.Tensor, implementation: str) -> torch.Tensor:
        return write(model, prompt, implementation) + (implementation == "moe_ffn")

    monkeypatch.setattr(live_models, "_generate", other)
    session = Session((), torch.device("cpu"), rounds=1, warmup=0)

    live_models.live_models(session)

    assert [r.computes for r in session.results] == ["same", "same", "same", "DIFFERS"]
    assert session.promises[0].verdict == "not measured"
