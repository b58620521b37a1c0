"""Distillation: a trained model, the teacher, whose predictions a run learns beside the text.

B batch, S sequence, V vocabulary
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from moe_ffn.config.base import Config


class DistillConfig(Config, frozen=True):
    """A teacher, and the share of its predictions in the objective (Hinton et al. 2015, arXiv:1503.02531).

    The objective becomes (1 - weight) * cross-entropy + weight * distillation loss + balancing losses.
    """

    teacher: str = Field(min_length=1)
    """Folder of a model or a run with the same tokenizer; it may have any architecture."""
    weight: float = Field(default=0.5, gt=0, le=1)
    """Share of the distillation loss; 1 leaves the text's own next tokens out."""
    temperature: float = Field(default=1.0, ge=0.01, le=100)
    """Divisor of the logits of teacher and student; above 1, unlikely tokens count for more."""


def distillation_loss(
    logits_BSV: Tensor,
    teacher_logits_BSV: Tensor,
    is_predicted_BS: Tensor,
    temperature: float = 1.0,
) -> Tensor:
    """Return temperature^2 * KL(teacher || student) in nats per predicted token, in float32 or wider.

    The square keeps the size of the gradient when the temperature changes (Hinton et al. 2015, section 2).

    Args:
        teacher_logits_BSV: logits of the teacher, which get no gradient.
        is_predicted_BS: true at the positions whose next token counts.
    """
    dtype = torch.promote_types(logits_BSV.dtype, torch.float32)

    def log_probs(logits_BSV: Tensor) -> Tensor:
        return (logits_BSV[is_predicted_BS].to(dtype) / temperature).log_softmax(-1)

    ours, theirs = log_probs(logits_BSV), log_probs(teacher_logits_BSV.detach())
    return temperature**2 * (theirs.exp() * (theirs - ours)).sum(-1).mean()
