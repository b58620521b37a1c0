"""The rule that brings a ReLU router to its number of experts per token."""

from __future__ import annotations

from torch import Tensor


def sparsity_weight_after(weight: Tensor, density: Tensor, factor: float) -> Tensor:
    """The weight of `relu_sparsity_loss` for the next step (ReMoE, arXiv:2412.14711, equation 8).

    Args:
        weight: of the step that ended.
        density: experts per token over `Routing.target_k`, the mean of that step's batches, ranks and
            layers; above 1 the sparsity is below its target, 1 - k / E.
        factor: multiplies the weight where the density is above 1, and divides it below.
    """
    return weight * factor ** (density - 1).sign()
