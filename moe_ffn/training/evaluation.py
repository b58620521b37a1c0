"""Evaluation of a trained model on a text: loss per token and byte, and routing of the sparse layers.

B sequences in a batch, S tokens in a sequence, E experts
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_ffn.data.batches import Batch
from moe_ffn.data.token_files import TokenSequence
from moe_ffn.metrics.functional import load_entropy
from moe_ffn.metrics.modular import LanguageMetrics
from moe_ffn.metrics.table import LAYER_METRICS
from moe_ffn.model.decoder import Decoder
from moe_ffn.training.distillation import Answers
from moe_ffn.training.monitoring.row_sums import RoutingByLayer
from moe_ffn.training.objective import IGNORED_TARGET, ObjectiveConfig, token_losses


@dataclass(frozen=True)
class Evaluation:
    """Measures of a model on a text."""

    loss: float
    """Nats per predicted token."""
    bits_per_byte: float
    """Total loss in bits, divided by `num_bytes`; infinite for 0 bytes."""
    num_tokens: int
    """Number of predicted tokens."""
    num_bytes: int
    """Bytes of text in the predicted tokens."""
    routing: Mapping[str, Mapping[str, Tensor]]
    """Sparse layer -> metric (see `metrics.table`) or `load_entropy` -> value over all input tokens. A token
    in several overlapping windows counts once for each window."""

    @property
    def perplexity(self) -> float:
        # `exp` overflows above 709; the product keeps NaN.
        return math.exp(self.loss) if self.loss < 700 else self.loss * math.inf

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and lists, for JSON."""
        scalars = ("loss", "perplexity", "bits_per_byte", "num_tokens", "num_bytes")
        routing = {
            layer: {key: value.tolist() for key, value in values.items()}
            for layer, values in self.routing.items()
        }
        return {name: getattr(self, name) for name in scalars} | {"routing": routing}


@dataclass(frozen=True)
class StridedBatches:
    """Windows over a whole text, `stride` apart; every token but the first is predicted exactly once.

    Targets of earlier windows are `IGNORED_TARGET`. A smaller stride, from 1 to `seq_len`, gives each token
    more context. The last window ends at the end of the text, so it may begin less than a stride after the
    window before it. The text has two `tokens` or more; if it is shorter than `seq_len`, it is one window.
    """

    tokens: np.ndarray | TokenSequence
    seq_len: int
    stride: int
    batch_size: int

    @property
    def starts(self) -> np.ndarray:
        """First position of each window."""
        last = max(0, len(self.tokens) - 1 - self.seq_len)
        return np.append(np.arange(0, last, self.stride), last)

    def __len__(self) -> int:
        return -(-len(self.starts) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        seq_len, starts = min(self.seq_len, len(self.tokens) - 1), self.starts
        num_new = np.diff(starts, prepend=-seq_len)
        for first in range(0, len(starts), self.batch_size):
            rows = slice(first, first + self.batch_size)
            windows = np.stack([self.tokens[start : start + seq_len + 1] for start in starts[rows]])
            is_old = np.arange(seq_len) < seq_len - num_new[rows, None]
            windows = torch.from_numpy(windows.astype(np.int64))
            targets = windows[:, 1:].masked_fill(torch.from_numpy(is_old), IGNORED_TARGET)
            yield Batch(windows[:, :-1].contiguous(), targets)


@torch.no_grad()
def top_answers(
    decoder: Decoder, batches: Iterable[Batch], top: int, precision: str
) -> Iterator[Answers]:
    """Yield the `top` likeliest next tokens at each position whose next token is a target."""
    device = decoder.embedding.weight.device
    for batch in batches:
        with autocast_of(precision, device):
            logits_BSV = decoder(batch.input_ids.to(device)).logits
        yield Answers.of(logits_BSV[batch.target_ids.to(device) != IGNORED_TARGET], top)


@torch.no_grad()
def evaluate(
    decoder: Decoder,
    batches: Iterable[Batch],
    byte_lengths: np.ndarray,
    *,
    masked_fraction: float = ObjectiveConfig().masked_fraction,
    precision: str = "32-true",
) -> Evaluation:
    """Return the loss and the routing over all batches, computed like a validation during training.

    Args:
        decoder: in evaluation mode, on the device to compute on.
        byte_lengths: (V,) bytes of text of each token.
        masked_fraction: fraction of tokens to predict if the model is not causal; the same in every call.
        precision: value of `trainer.precision`. For a `-true` precision, the weights must have its dtype.
    """
    device = decoder.embedding.weight.device
    lengths_V = torch.from_numpy(np.array(byte_lengths)).to(device)
    language = LanguageMetrics().to(device)
    layers = RoutingByLayer("every batch", "last step")
    for index, batch in enumerate(batches):
        ids = batch.input_ids.to(device), batch.target_ids.to(device)
        with autocast_of(precision, device):
            output, nats_BS, targets_BS = token_losses(decoder, *ids, masked_fraction, index)
        counted_BS = targets_BS != IGNORED_TARGET
        language.update(nats_BS[counted_BS], lengths_V[targets_BS[counted_BS]])
        capacities = decoder.expert_capacities(output.routings)
        layers.update(output.routings, True, output.shared_shares, capacities)
    language_values = language.compute()
    return Evaluation(
        loss=language_values["loss"].item(),
        bits_per_byte=language_values["bits_per_byte"].item(),
        num_tokens=int(language.num_tokens),
        num_bytes=int(language.num_bytes),
        routing={name: _known(values) for name, values in layers.close().items()},
    )


def autocast_of(precision: str, device: torch.device) -> torch.autocast:
    """Return the autocast context of a `trainer.precision`, which does something if it is mixed."""
    dtype = torch.float16 if precision.startswith("16") else torch.bfloat16
    return torch.autocast(device.type, dtype, enabled=precision.endswith("-mixed"))


def _known(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the metrics that apply to a layer, and the entropy of its load, if it has one."""
    known = {k: v for k, v in values.items() if not (LAYER_METRICS[k].requires and v.isnan())}
    return known | ({"load_entropy": load_entropy(known["load"])} if "load" in known else {})
