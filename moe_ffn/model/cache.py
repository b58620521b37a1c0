"""Memory of earlier tokens for attention and feed-forward blocks, so that only new tokens are computed.

B batch, H heads, C capacity, S new tokens, L tokens so far, the new ones included, R tokens before, d width
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class NewTokens:
    """Places of the tokens of one forward pass in their sequences."""

    positions: slice | Tensor
    """Positions of all rows; or those of each row, int64 (B, S), if rows have different lengths."""
    end: int
    """L of the longest row."""
    is_first: bool
    """True if nothing was kept before: the pass computes whole sequences."""
    seen: Tensor | None
    """Tokens that each new token may attend to, bool (B or 1, 1, S, L); None: one token, which sees all."""


_Call = tuple[nn.Module, int]
"""A module, and its number of earlier calls in a pass: one that runs twice keeps both values."""


class LayerCache:
    """The keys and values of one layer, and the last few values that its feed-forward block reads again."""

    new: NewTokens

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._kept: list[Tensor] = []
        self._last: dict[_Call, Tensor] = {}
        self._windows: dict[_Call, Tensor] = {}

    def begin(self, new: NewTokens) -> None:
        self.new = new
        self._windows.clear()  # of a pass that failed

    def extend(self, *new: Tensor) -> list[Tensor]:
        """Write (B, H, S, d) after the kept values; return views of all of them, (B, H, L, d)."""
        if not self._kept:
            # Zeros: what is not seen has the weight 0, and 0 times a NaN of old memory is NaN.
            self._kept = [x.new_zeros(*x.shape[:2], self.capacity, x.shape[-1]) for x in new]
        positions, end = self.new.positions, self.new.end
        for kept_BHCd, x_BHSd in zip(self._kept, new, strict=True):
            if isinstance(positions, slice):
                kept_BHCd[:, :, positions] = x_BHSd
            else:
                rows_B1 = torch.arange(len(positions), device=positions.device).unsqueeze(-1)
                kept_BHCd[rows_B1, :, positions] = x_BHSd.transpose(1, 2)
        return [kept_BHCd[:, :, :end] for kept_BHCd in self._kept]

    def window(self, owner: nn.Module, new: Tensor, reach: int) -> Tensor:
        """See `TokenHistory`; what is kept moves on with `end`."""
        call = (owner, sum(other is owner for other, _ in self._windows))
        if call not in self._last:
            self._last[call] = new.new_zeros(len(new), reach, *new.shape[2:])
        self._windows[call] = torch.cat([self._last[call], new], dim=1)
        return self._windows[call]

    def end(self, counts: Sequence[int]) -> None:
        """Keep the first `counts` tokens of each row; padding follows them."""
        for call, window in self._windows.items():
            rows_B1 = torch.arange(len(window), device=window.device).unsqueeze(-1)
            ends_B1 = torch.tensor(counts, device=window.device).unsqueeze(-1)
            before_R = torch.arange(self._last[call].shape[1], device=window.device)
            self._last[call] = window[rows_B1, ends_B1 + before_R]
        self._windows.clear()

    def keep(self, rows: Tensor) -> None:
        self._kept = [kept_BHCd[rows.to(kept_BHCd.device)] for kept_BHCd in self._kept]
        self._last = {call: last[rows.to(last.device)] for call, last in self._last.items()}


class KVCache:
    """Keys and values of every layer, in memory that is taken once; of latent attention its narrow vectors.

        cache = decoder.new_cache(batch_size=2, capacity=512)
        decoder(prompts_BS, mask_BS, cache=cache)  # shorter prompts are padded behind their last token
        decoder(next_B1, cache=cache)

    The token in place j of a row has position j, whatever the lengths of the others.
    """

    def __init__(self, num_layers: int, batch_size: int, capacity: int) -> None:
        self.capacity = capacity
        self.lengths = [0] * batch_size
        """Number of kept tokens of each row."""
        self.layers = [LayerCache(capacity) for _ in range(num_layers)]
        self._counts = [0] * batch_size

    def begin(self, token_ids: Tensor, mask: Tensor | None) -> NewTokens:
        """Return the positions of new tokens (B, S); `end` counts them, once all layers have kept them.

        Raises:
            ValueError: they do not fit, or padding stands before a real token.
        """
        num_rows, num_new = token_ids.shape
        if num_rows != len(self.lengths):
            raise ValueError(
                f"token_ids has {num_rows} rows, but the cache was made for a batch of {len(self.lengths)}"
            )
        longest = max(self.lengths, default=0)
        end = longest + num_new
        if end > self.capacity:
            raise ValueError(
                f"{num_new} tokens after {longest} do not fit into the cache, whose capacity is "
                f"{self.capacity}"
            )
        self._counts = [num_new] * num_rows
        if mask is not None:
            counts_B1 = mask.sum(dim=-1, keepdim=True)
            if not torch.equal(mask, torch.arange(num_new, device=mask.device) < counts_B1):
                raise ValueError(
                    "mask must have each row's real tokens first and its padding behind them, where there "
                    "is a cache"
                )
            self._counts = counts_B1.flatten().tolist()
        new = self._place(longest, end, token_ids.device)
        for layer in self.layers:
            layer.begin(new)
        return new

    def _place(self, longest: int, end: int, device: torch.device) -> NewTokens:
        is_first, num_new = longest == 0, end - longest
        if all(length == longest for length in self.lengths):
            positions_S = torch.arange(longest, end, device=device)
            seen = None if is_first or num_new == 1 else _seen(positions_S, end)[None, None]
            return NewTokens(slice(longest, end), end, is_first, seen)
        lengths_B1 = torch.tensor(self.lengths, device=device).unsqueeze(-1)
        positions_BS = lengths_B1 + torch.arange(num_new, device=device)
        return NewTokens(positions_BS, end, False, _seen(positions_BS, end).unsqueeze(1))

    def end(self) -> None:
        """Count the tokens of `begin`, which all layers have kept."""
        counted = zip(self.lengths, self._counts, strict=True)
        self.lengths = [length + count for length, count in counted]
        for layer in self.layers:
            layer.end(self._counts)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows alone, in this order."""
        self.lengths = [self.lengths[row] for row in rows]
        for layer in self.layers:
            layer.keep(torch.tensor(rows, dtype=torch.int64))


def _seen(positions: Tensor, end: int) -> Tensor:
    """Return the positions up to each one, bool (..., L)."""
    return torch.arange(end, device=positions.device) <= positions.unsqueeze(-1)
