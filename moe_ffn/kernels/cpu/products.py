"""One stacked weight on a CPU: its products and its gradient, expert by expert, into given buffers.

E experts, N rows of one expert, O out, I in
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ffn.kernels.cpu.gradient_memory import empty_gradient


class Products:
    """Multiplies in `dtype`; a weight of another dtype is converted while its expert is at work."""

    def __init__(self, weight_EOI: Tensor, bias_EO: Tensor | None, dtype: torch.dtype) -> None:
        self.weight_E = weight_EOI.unbind()
        self.transposed_E = weight_EOI.mT.unbind()
        self.bias_E = None if bias_EO is None else bias_EO.to(dtype).unbind()
        self.converted = None if weight_EOI.dtype == dtype else _Converted(self.weight_E, dtype)

    def linear(self, expert: int, input_NI: Tensor, out_NO: Tensor) -> None:
        converted = self.converted
        weight_IO = self.transposed_E[expert] if converted is None else converted.of(expert).t()
        if self.bias_E is None:
            torch.mm(input_NI, weight_IO, out=out_NO)
        else:
            torch.addmm(self.bias_E[expert], input_NI, weight_IO, out=out_NO)

    def input_gradient(self, expert: int, grad_NO: Tensor, out_NI: Tensor) -> None:
        converted = self.converted
        weight_OI = self.weight_E[expert] if converted is None else converted.of(expert)
        torch.mm(grad_NO, weight_OI, out=out_NI)


class WeightGradient:
    """The gradient of a stacked weight and its bias; zero for experts that got no rows."""

    def __init__(self, weight_EOI: Tensor, bias_EO: Tensor | None, dtype: torch.dtype) -> None:
        self._weight_EOI = empty_gradient(weight_EOI)
        self._weight_E = self._weight_EOI.unbind()
        self._bias_EO = None if bias_EO is None else torch.zeros_like(bias_EO)
        self._idle = set(range(len(self._weight_E)))
        self._sum_OI = None
        if dtype != weight_EOI.dtype:
            self._sum_OI = torch.empty(weight_EOI.shape[1:], dtype=dtype, device="cpu")

    def add(self, expert: int, grad_NO: Tensor, input_NI: Tensor, continues: bool) -> None:
        """`continues`: the call before was this expert's too, and this one adds to it."""
        weight_OI = self._weight_E[expert]
        sum_OI = weight_OI if self._sum_OI is None else self._sum_OI
        if continues:
            sum_OI.addmm_(grad_NO.t(), input_NI)
        else:
            torch.mm(grad_NO.t(), input_NI, out=sum_OI)
        if self._sum_OI is not None:
            weight_OI.copy_(self._sum_OI)
        self._idle.discard(expert)

    def add_bias(self, expert: int, grad_O: Tensor) -> None:
        if self._bias_EO is not None:
            self._bias_EO[expert] += grad_O

    def finish(self) -> tuple[Tensor, Tensor | None]:
        """Of the weight and of the bias."""
        for expert in self._idle:
            self._weight_E[expert].zero_()
        return self._weight_EOI, self._bias_EO


class _Converted:
    """The weight of one expert at a time in `dtype`, in one buffer."""

    def __init__(self, weight_E: Sequence[Tensor], dtype: torch.dtype) -> None:
        self.weight_E = weight_E
        self.expert: int | None = None
        self.buffer_OI = torch.empty(weight_E[0].shape, dtype=dtype, device="cpu")

    def of(self, expert: int) -> Tensor:
        if self.expert != expert:
            self.expert = expert
            self.buffer_OI.copy_(self.weight_E[expert])
        return self.buffer_OI
