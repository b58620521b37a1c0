"""Signature of the backends, weights of experts, and functions that backends share.

T tokens, D model width, E experts, F hidden width, N (token, expert) pairs, H rows of the first matrix: F
without a gate; 2 F with one, the F gate rows first, then the F up rows; R rank of an adapter
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from moe_ffn.kernels.activations import ACTIVATIONS, Activation, GateFunction
from moe_ffn.outputs import Plan, summarize

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def on_this_rank(tensor: Tensor) -> Tensor:
    """Return this rank's part of a distributed tensor; return any other tensor unchanged."""
    return tensor.to_local() if is_distributed(tensor) else tensor


def is_distributed(value: object) -> TypeGuard[DTensor]:
    """Return True for a tensor that is divided among ranks."""
    if type(value) in (Tensor, nn.Parameter) or not isinstance(value, Tensor):
        return False
    # Imported here, because it takes seconds. `hasattr(value, "to_local")` would fail under torch.compile.
    from torch.distributed.tensor import DTensor

    return isinstance(value, DTensor)


# -- weights and signature

PARAMETERS = (
    *("up_EHD", "down_EDF", "up_bias_EH", "down_bias_ED"),
    *("up_a_ERD", "up_b_EHR", "down_a_ERF", "down_b_EDR"),
)
"""Names of the tensors of `ExpertWeights`."""

ADAPTERS = "_moe_ffn_adapters"
"""Attribute of an experts module: the factors in `ExpertWeights` of its active adapters, by name."""


@dataclass(frozen=True)
class ExpertWeights:
    """E parallel MLPs: down(act(up x)), or down(act(gate x) * up x) if gated.

    Matrices are (out, in), as in `nn.Linear`. Absent biases are None. Gate and up are one matrix, because one
    large product is faster than two small ones.
    """

    activation: Activation
    up_EHD: Tensor
    down_EDF: Tensor
    gated: bool = False
    up_bias_EH: Tensor | None = None
    down_bias_ED: Tensor | None = None
    dropout: float = 0.0
    """Probability of zeroing an activated hidden unit; 0 in evaluation."""
    gate_function: GateFunction | None = None
    """Function of gate and up that replaces act(gate x) * up x."""
    interleaved: bool = False
    """True if the rows of gate and up alternate, as in GPT-OSS; otherwise all rows of the gate come first."""
    up_a_ERD: Tensor | None = None
    up_b_EHR: Tensor | None = None
    down_a_ERF: Tensor | None = None
    down_b_EDR: Tensor | None = None
    """Factors of a low-rank adapter: B A is added to the matrix. Backends compute B (A x), never B A."""

    def __repr__(self) -> str:
        return summarize(self)

    @property
    def parameters(self) -> tuple[Any, ...]:
        """The matrices, the biases, then the factors of the adapters, in the order of `PARAMETERS`."""
        return tuple(getattr(self, name) for name in PARAMETERS)

    @property
    def without_adapters(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The matrices, then the biases."""
        return self.up_EHD, self.down_EDF, self.up_bias_EH, self.down_bias_ED

    @property
    def first(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Matrix, bias and factors of the first product."""
        return self.up_EHD, self.up_bias_EH, self.up_a_ERD, self.up_b_EHR

    @property
    def second(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Matrix, bias and factors of the second product."""
        return self.down_EDF, self.down_bias_ED, self.down_a_ERF, self.down_b_EDR

    def on_this_rank(self) -> ExpertWeights:
        """Return the experts of this rank, if the weights are distributed tensors."""
        if on_this_rank(self.up_EHD) is self.up_EHD:
            return self
        return self.with_parameters(
            *(None if weight is None else on_this_rank(weight) for weight in self.parameters)
        )

    def to(self, dtype: torch.dtype) -> ExpertWeights:
        """Return the same experts with parameters in `dtype`."""
        if self.up_EHD.dtype == dtype:
            return self
        return self.with_parameters(
            *(None if weight is None else weight.to(dtype) for weight in self.parameters)
        )

    def with_parameters(self, *parameters: Any) -> ExpertWeights:
        """Return the same experts with other tensors, in the order of `parameters`."""
        return replace(self, **dict(zip(PARAMETERS, parameters, strict=True)))

    def with_adapters_of(self, experts: nn.Module) -> ExpertWeights:
        """Return the same experts with the active adapters of a module; see `interop.fuse_adapters`."""
        factors = experts.__dict__.get(ADAPTERS)
        return replace(self, **factors) if factors else self

    @property
    def num_experts(self) -> int:
        return self.up_EHD.shape[0]

    @property
    def d_model(self) -> int:
        return self.up_EHD.shape[2]

    @property
    def d_ff(self) -> int:
        return self.down_EDF.shape[2]

    def activate(self, up_NH: Tensor) -> Tensor:
        """Return the hidden units (N, F) from the first product."""
        act = ACTIVATIONS[self.activation]
        if not self.gated:
            hidden = act(up_NH)
        else:
            if self.interleaved:
                gate, up = up_NH[..., ::2], up_NH[..., 1::2]
            else:
                gate, up = up_NH.chunk(2, dim=-1)
            hidden = act(gate) * up if self.gate_function is None else self.gate_function(gate, up)
        return F.dropout(hidden, self.dropout) if self.dropout else hidden


Backend = Callable[[Tensor, Plan, ExpertWeights], Tensor]
"""(x_TD, plan, weights) -> y_TD, the weighted sums of the experts' outputs, in the dtype of x."""


def combine(y_ND: Tensor, x_TD: Tensor, token_indices_N: Tensor, weights_N: Tensor) -> Tensor:
    """Return the weighted sum of each token's rows of `y_ND`, computed in at least float32."""
    weighted_ND = y_ND * weights_N.unsqueeze(-1)
    if x_TD.shape[0] == 1:  # faster when decoding one token at a time
        return weighted_ND.sum(dim=0, keepdim=True).to(x_TD.dtype)
    sums_TD = torch.zeros(x_TD.shape, dtype=weighted_ND.dtype, device=x_TD.device)
    return sums_TD.index_add_(0, token_indices_N, weighted_ND).to(x_TD.dtype)


# -- derivatives


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Return True if values must be saved for a backward pass."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


NO_TRANSFORMS = (
    "does not support torch.func, forward-mode differentiation or is_grads_batched, because its backward "
    "pass is hand-written; set experts.backend to 'loop', which supports them"
)
"""Error of backends whose derivatives would omit the experts, or fail deep inside torch."""


def reject_vmap(
    x: Tensor,
    parameters: Iterable[Tensor | None],
    reason: str = "experts, because the sizes of their products depend on the data",
) -> None:
    """Raise for tensors batched by torch.func.vmap, before routing fails deep inside torch.

    Args:
        x: input of a sparse block.
        parameters: parameters of the block.
        reason: part of the block that does not support vmap, and why.

    Raises:
        ValueError: `x` or a parameter is batched.
    """
    if torch.compiler.is_compiling():  # the experts run in eager mode and check there
        return
    if any(t is not None and is_batched(t) for t in (x, *parameters)):
        raise ValueError(
            f"torch.func.vmap does not work with {reason}; add a leading axis to x instead"
        )


def no_second_derivative(backend: str) -> RuntimeError:
    """Return the error for differentiating a hand-written backward pass.

    Without this error, torch would silently omit the experts from the second derivative.
    """
    return RuntimeError(
        f"experts.backend '{backend}' has no second derivative, which create_graph=True needs; set "
        "experts.backend to 'loop', which has one"
    )


def reject_more_derivatives(backend: str, grad: Tensor) -> None:
    """Raise in a hand-written backward pass that is differentiated again, or whose gradients are batched.

    `once_differentiable` is not enough: torch skips its error if only d/dx is computed.

    Raises:
        RuntimeError: `create_graph` or `is_grads_batched` is set.
    """
    if torch.is_grad_enabled():
        raise no_second_derivative(backend)
    if is_batched(grad):
        raise RuntimeError(f"experts.backend '{backend}' {NO_TRANSFORMS}")


def dropout_mask(
    num_rows: int, weights: ExpertWeights, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Return the factor of each hidden unit, (N, F): 0, or 1 / (1 - dropout); None without dropout.

    Backends that recompute hidden units in backward need such a mask.
    """
    if not weights.dropout:
        return None
    keep_prob = 1 - weights.dropout
    mask_NF = torch.empty(num_rows, weights.d_ff, dtype=dtype, device=device)
    return mask_NF.bernoulli_(keep_prob).div_(keep_prob)


# -- dtypes


def check_dtype(x: Tensor, weight: Tensor | None) -> None:
    """Raise if the dtypes of `x` and the weights differ, except under autocast, which converts both.

    All blocks and backends use this rule. Quantised weights are not checked.

    Raises:
        ValueError: the dtypes differ.
    """
    if weight is None or x.dtype == weight.dtype or not weight.dtype.is_floating_point:
        return
    advice = f"use x.to({weight.dtype})"
    if torch.float64 not in (x.dtype, weight.dtype):  # autocast leaves float64 as it is
        if is_autocast_on(x):
            return
        advice += ", or torch.autocast, which converts both"
    raise ValueError(f"x is {x.dtype}, but this block's weights are {weight.dtype}; {advice}")


CPU_CAPABILITIES = {
    torch.bfloat16: ("amx_bf16", "avx512_bf16", "bf16"),
    torch.float16: ("amx_fp16", "avx512_fp16"),
}
"""Dtype -> CPU capabilities, any one of which has products in it."""


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of products: autocast's dtype if autocast is on, otherwise the dtype of `x`.

    torch applies autocast neither to `grouped_mm` nor to our operators.
    """
    if x.dtype != torch.float64 and is_autocast_on(x):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def is_emulated_on_cpu(dtype: torch.dtype) -> bool:
    """Return True if this CPU has no instructions for products in `dtype`."""
    return dtype in CPU_CAPABILITIES and not any(
        _capabilities().get(name) for name in CPU_CAPABILITIES[dtype]
    )


def product_dtype_on_cpu(dtype: torch.dtype) -> torch.dtype:
    """Return `dtype`, or float32 if this CPU multiplies it at a fraction of float32's speed."""
    capabilities = _capabilities()
    # Without AMX, a core of a Xeon of 2023 reaches 106 GFLOP/s in bfloat16, and 191 in float32.
    is_slow = (
        dtype == torch.bfloat16
        and str(capabilities.get("cpu_name")).startswith("Intel")
        and not capabilities.get("amx_bf16")
    )
    return torch.float32 if is_slow or is_emulated_on_cpu(dtype) else dtype


@cache
def _capabilities() -> Mapping[str, Any]:
    return torch.cpu.get_capabilities()


# -- state of torch around a call


def is_autocast_on(x: Tensor) -> bool:
    """Return True if torch.autocast is on for the device of `x`; it does not support `meta`."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Turn autocast off, so that products keep the dtype of their factors."""
    return torch.autocast(x.device.type, enabled=False) if is_autocast_on(x) else nullcontext()


def has_no_data(x: Tensor) -> bool:
    """Return True for a tensor without data: on `meta`, or a FakeTensor."""
    # There are no FakeTensors before this module is imported.
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return x.is_meta or (module is not None and isinstance(x, module.FakeTensor))


def needs_static_shapes(x: Tensor) -> bool:
    """Return True if shapes must not depend on data: in a graph, or without data."""
    return torch.compiler.is_compiling() or has_no_data(x)


def is_dispatch_mode_on() -> bool:
    """Return True if a mode such as FlopCounterMode counts torch's operators; our C++ would bypass it."""
    return _get_current_dispatch_mode() is not None


def is_transform_on() -> bool:
    """Return True inside `grad`, `jvp` or `vmap` of `torch.func`, or forward-mode differentiation."""
    # Private, but `torch.autograd.Function.apply` uses it, and there is no public function.
    return torch._C._are_functorch_transforms_active() or is_forward_mode()


def is_forward_mode() -> bool:
    """Return True inside forward-mode differentiation, including `torch.func.jvp`."""
    return forward_ad._current_level >= 0


def is_batched(tensor: Tensor) -> bool:
    """Return True for a tensor batched by `vmap`, or by a backward pass with `is_grads_batched`."""
    functorch: Any = getattr(torch._C, "_functorch")  # noqa: B009  # typed nowhere
    if functorch.is_legacy_batchedtensor(tensor):
        return True
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


@contextmanager
def autograd_in_operators() -> Iterator[None]:
    """Enable gradients inside our operators, where torch turns autograd off."""
    # Private; there is no public function.
    key = torch._C.DispatchKey.AutogradFunctionality
    with torch._C._SetExcludeDispatchKeyGuard(key, False), torch.enable_grad():
        yield


@torch.no_grad()
def init_linear_(weight: Tensor, bias: Tensor | None = None) -> None:
    """Fill (..., out, in) weights, and their bias, from U(-1/sqrt(in), 1/sqrt(in)).

    `nn.Linear` initialises one matrix like this; `nn.init` would count the expert axis as fan-in.
    """
    bound = 1 / math.sqrt(weight.shape[-1])
    nn.init.uniform_(weight, -bound, bound)
    if bias is not None:
        nn.init.uniform_(bias, -bound, bound)
