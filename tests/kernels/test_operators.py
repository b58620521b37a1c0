"""The custom torch operators: `opcheck` for each, and the CPU operator compared with `cpu`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from moe_ffn.kernels import cpu as cpu_operator
from moe_ffn.kernels.activations import ClampedGate, ClampedSwiGLU, SoftCappedSwiGLU
from moe_ffn.kernels.cpu import cpu
from moe_ffn.routing import balanced_assignment, sinkhorn
from tests.kernels.derivatives import leaves_of

EXPERTS = [[0, 2], [0, None], [1, 2]]
GATES = {
    "none": None,
    "clamped_swiglu": ClampedSwiGLU(1.7, 2.0),
    "clamped": ClampedGate(1.0, 2.0, 0.5, after=True),
    "soft_capped": SoftCappedSwiGLU(3.0, 2.0),
}
slow = pytest.mark.slow
TRACED = "test_aot_dispatch_dynamic"
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", TRACED)
every_check = pytest.mark.parametrize(
    "check", [pytest.param(check, marks=slow if check == TRACED else ()) for check in CHECKS]
)


def called(module: Any, name: str, call: Callable[[], object]) -> tuple[Any, ...]:
    """The arguments with which a module calls its operator."""
    found: list[tuple[Any, ...]] = []
    operator = getattr(module, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, lambda *given: found.append(given) or operator(*given))
        call()
    return tuple(
        given.detach().clone().requires_grad_(given.requires_grad)
        if isinstance(given, Tensor)
        else given
        for given in found[-1]
    )


@every_check
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.filterwarnings("ignore")  # what torch's own tracing warns of
def test_the_operators_of_the_cpu_are_what_torch_asks_for(
    gate: str, check: str, make_weights: Any, make_plan_of: Any
) -> None:
    weights, plan = make_weights(gate_function=GATES[gate], dropout=0.2), make_plan_of(EXPERTS, 3)
    x_TD = torch.randn(3, 20, requires_grad=True)
    run = lambda: cpu_operator.run_operator(x_TD, plan, weights)  # noqa: E731
    opcheck(cpu_operator.experts, called(cpu_operator, "experts", run), test_utils=check)
    arguments = called(cpu_operator, "experts", run)
    tensors, options = arguments[:14], arguments[14:19]
    y_TD, pre_activation_NH = (value.detach() for value in cpu_operator.experts(*arguments))
    tensors = [None if value is None else value.detach() for value in tensors]
    for wanted in ([True] * 10, [False, True, True, *[False] * 7]):
        given = (torch.randn_like(y_TD), *tensors, pre_activation_NH, *options, wanted)
        opcheck(cpu_operator.experts_backward, given, test_utils=check)


def test_under_autocast_the_first_product_has_its_dtype(
    make_weights: Any, make_plan_of: Any
) -> None:
    x_TD, plan, weights = (
        torch.randn(3, 20, requires_grad=True),
        make_plan_of(EXPERTS, 3),
        make_weights(),
    )
    with torch.autocast("cpu", torch.bfloat16):
        arguments = called(
            cpu_operator, "experts", lambda: cpu_operator.run_operator(x_TD, plan, weights)
        )
    assert torch.bfloat16 in arguments
    opcheck(cpu_operator.experts, arguments, test_utils="test_faketensor")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [*({"gate_function": gate} for gate in GATES.values()), {"interleaved": True}, {"rank": 2}],
    ids=[*GATES, "interleaved", "adapted"],
)
def test_the_operator_computes_what_cpu_does(
    options: dict[str, Any], dtype: torch.dtype, make_weights: Any, make_plan_of: Any
) -> None:
    weights = make_weights(**options, dtype=dtype)
    plan = make_plan_of(EXPERTS, 3)
    x_TD = torch.randn(3, 20).to(dtype).requires_grad_()
    leaves = list(leaves_of(x_TD, plan, weights).values())
    found: list[list[Tensor]] = []
    for run in (cpu, cpu_operator.run_operator):
        y_TD = run(x_TD, plan, weights)
        found.append([y_TD, *torch.autograd.grad(y_TD.float().square().sum(), leaves)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_the_operator_has_no_second_derivative(make_weights: Any, make_plan_of: Any) -> None:
    x_TD = torch.randn(3, 20, requires_grad=True)
    y_TD = cpu_operator.run_operator(x_TD, make_plan_of(EXPERTS, 3), make_weights())
    (grad_TD,) = torch.autograd.grad(y_TD.square().sum(), x_TD, create_graph=True)
    with pytest.raises(RuntimeError, match=r"'cpu' has no second derivative.*to 'loop', which has"):
        grad_TD.sum().backward()


@slow
@pytest.mark.filterwarnings("ignore")  # what torch's own tracing warns of
def test_the_operators_of_triton_are_what_torch_asks_for(
    make_weights: Any, make_plan_of: Any
) -> None:
    pytest.importorskip("triton", reason="triton is not installed here")
    from moe_ffn.kernels.triton import backend as triton
    from moe_ffn.kernels.triton import launch

    # Every pair is computed: of others nobody writes the rows that are kept, nor reads them.
    plan, weights = make_plan_of([[0, 2], [0, 1], [1, 2]], 3), make_weights(d_model=16, d_ff=16)
    x_TD = torch.randn(3, 16, device=plan.offsets_E.device, requires_grad=True)
    arguments = called(launch, "experts", lambda: triton.triton(x_TD, plan, weights))
    opcheck(launch.experts, arguments)
    tensors = [None if value is None else value.detach() for value in arguments[:15]]
    y_TD, pre_NH = (value.detach() for value in launch.experts(*arguments))
    for wanted in ([True] * 10, [False, True, True, *[False] * 7]):
        given = (torch.randn_like(y_TD), *tensors, pre_NH, *arguments[15:20], wanted)
        opcheck(launch.experts_backward, given)


@every_check
def test_the_operators_of_routers_are_what_torch_asks_for(check: str) -> None:
    values_TE, counted_T = torch.randn(6, 4), torch.tensor([True] * 5 + [False])
    for given in (
        (values_TE, counted_T, 1e-4, 20),
        (values_TE, counted_T & False, 1e-4, 20),
        (values_TE.bfloat16(), counted_T, 1e-4, 20),
    ):
        opcheck(sinkhorn.sinkhorn_operator, given, test_utils=check)
    ids_T = torch.zeros(6, dtype=torch.int64)
    given = (values_TE, ids_T, counted_T)
    opcheck(balanced_assignment.assign_operator, given, test_utils=check)
