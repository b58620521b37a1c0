"""The masked-token objective of models that see both sides.

B batch, S sequence, V vocabulary
"""

from __future__ import annotations

import torch
from torch import Tensor

IGNORED_TARGET = -100
"""The target of positions that are in no loss, such as padding."""

SHOWN_AS_MASK, SHOWN_AS_IS = 0.8, 0.1
"""Of the tokens to guess: shown as the mask, and shown as they are; the rest as some other token."""


def mask_tokens(
    token_ids_BS: Tensor,
    fraction: float,
    mask_token_id: int,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """What the model is shown, and what it has to say where (Devlin et al. 2018, BERT, section 3.1).

    Every sequence has equally many tokens to guess, so that the loss of a batch is the mean of its
    parts' losses however it is divided.

    Args:
        token_ids_BS: int64 (B, S), below `mask_token_id`.
        fraction: share of the tokens to guess, at least one of each sequence.
        mask_token_id: stands for a hidden token; V.
        generator: of the same device; torch's own when None.

    Returns:
        inputs and targets, int64 (B, S); `IGNORED_TARGET` where there is nothing to guess.
    """
    batch, length = token_ids_BS.shape

    def uniform() -> Tensor:
        return torch.rand(batch, length, generator=generator, device=token_ids_BS.device)

    num_guessed = max(round(fraction * length), 1)
    guessed_BS = uniform().argsort(dim=1).argsort(dim=1) < num_guessed
    lot_BS = uniform()
    others_BS = (uniform() * mask_token_id).long().clamp(max=mask_token_id - 1)
    shown_BS = torch.where(lot_BS < SHOWN_AS_MASK, mask_token_id, others_BS)
    shown_BS = torch.where(lot_BS >= 1 - SHOWN_AS_IS, token_ids_BS, shown_BS)
    inputs_BS = torch.where(guessed_BS, shown_BS, token_ids_BS)
    return inputs_BS, token_ids_BS.masked_fill(~guessed_BS, IGNORED_TARGET)
