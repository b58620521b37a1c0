"""Layers and plans for the kernels' tests, and what must not be in them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ffn.kernels.base import ExpertWeights
from moe_ffn.outputs import Plan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session", autouse=True)
def _interpreter_prepares_a_kernel_once() -> Iterator[None]:
    """Halve the interpreter's time: it replaces `triton.language` at every call of a function inside a
    kernel, although the kernel has replaced it already."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    interpreter: Any = pytest.importorskip("triton.runtime.interpreter")
    replace, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    replaced: set[str] = set()

    def replace_once(function: Any) -> Any:
        languages = {name for name in function.__globals__ if name in ("tl", "core")}
        if replaced and languages <= replaced:
            return None  # of a call inside a kernel, which doesn't look at it
        replaced.update(languages)
        return replace(function)

    def run_anew(executor: Any, *arguments: Any, **named: Any) -> Any:
        replaced.clear()
        return run(executor, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", replace_once)
        patch.setattr(interpreter.GridExecutor, "__call__", run_anew)
        yield


@pytest.fixture
def make_weights() -> Callable[..., ExpertWeights]:
    """Widths that are no multiple of a tile, each wider than one; leaves that take gradients."""

    def make(
        num_experts: int = 3,
        d_model: int = 20,
        d_ff: int = 18,
        *,
        gated: bool = True,
        bias: bool = True,
        activation: Any = "silu",
        dtype: torch.dtype = torch.float32,
        rank: int = 0,
        **more: Any,
    ) -> ExpertWeights:
        generator = torch.Generator().manual_seed(4)
        rows = 2 * d_ff if gated else d_ff

        def leaf(*shape: int) -> Tensor:
            drawn = torch.randn(shape, generator=generator) / (1 if len(shape) == 2 else 4)
            return drawn.to(DEVICE, dtype).requires_grad_()

        adapters = {
            "up_a_ERD": (rank, d_model),
            "up_b_EHR": (rows, rank),
            "down_a_ERF": (rank, d_ff),
            "down_b_EDR": (d_model, rank),
        }
        more |= {name: leaf(num_experts, *shape) for name, shape in adapters.items() if rank}
        return ExpertWeights(
            activation=activation,
            up_EHD=leaf(num_experts, rows, d_model),
            down_EDF=leaf(num_experts, d_model, d_ff),
            gated=gated,
            up_bias_EH=leaf(num_experts, rows) if bias else None,
            down_bias_ED=leaf(num_experts, d_model) if bias else None,
            **more,
        )

    return make


@pytest.fixture
def make_plan_of() -> Callable[[list[list[int | None]], int], Plan]:
    """The plan in which token t goes to the experts of `experts[t]`; None is a pair not computed."""

    def make(experts: list[list[int | None]], num_experts: int) -> Plan:
        generator = torch.Generator().manual_seed(5)
        pairs = [(token, e) for token, mine in enumerate(experts) for e in mine]
        keys = torch.tensor([num_experts if e is None else e for _, e in pairs], dtype=torch.long)
        order = keys.argsort(stable=True)
        weights = torch.rand(len(pairs), generator=generator).masked_fill(keys == num_experts, 0)
        counts = torch.bincount(keys, minlength=num_experts + 1)[:num_experts]
        tokens = torch.tensor([token for token, _ in pairs], dtype=torch.long)
        return Plan(
            token_indices_N=tokens[order].to(DEVICE),
            weights_N=weights[order].to(DEVICE).requires_grad_(),
            offsets_E=counts.cumsum(0).to(DEVICE, torch.int32),
            pair_ids_N=order.to(DEVICE),
        )

    return make
