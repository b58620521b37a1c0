"""How well a language model predicts, as a torchmetrics Metric."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torchmetrics import Metric


class LanguageMetrics(Metric):
    """Cross-entropy per token and bits per byte, over all batches and ranks.

    Bits per byte divides by the bytes of text that the predicted tokens stand for, so it compares
    tokenizers; tokens that stand for no text, such as the end of a document, still cost their bits.
    """

    full_state_update = False
    nats: Tensor
    num_tokens: Tensor
    num_bytes: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("nats", "num_tokens", "num_bytes"):
            # float64: a float32 sum over a long validation would lose its last digits.
            self.add_state(name, torch.zeros((), dtype=torch.float64), "sum")

    def update(self, nats: Tensor, num_bytes: Tensor) -> None:
        """Add one batch.

        Args:
            nats: the cross-entropy of each predicted token, any shape.
            num_bytes: the bytes of text each of those tokens stands for, the same shape.
        """
        if nats.shape != num_bytes.shape:
            raise ValueError(
                f"num_bytes must have the shape of nats, {tuple(nats.shape)}, but has "
                f"{tuple(num_bytes.shape)}"
            )
        self.nats += nats.sum()
        self.num_tokens += nats.numel()
        self.num_bytes += num_bytes.sum()

    @property
    def loss_so_far(self) -> Tensor:
        """Scalar, nats per token on this rank since the last reset, without waiting for other ranks; nan
        before the first batch.
        """
        return (self.nats / self.num_tokens).float()

    def compute(self) -> dict[str, Tensor]:
        """`loss` in nats per token, and `bits_per_byte`."""
        bits = self.nats / math.log(2)
        return {"loss": self.loss_so_far, "bits_per_byte": (bits / self.num_bytes).float()}
