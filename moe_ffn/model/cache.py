"""KV cache, which also stores values of earlier tokens for feed-forward blocks; only new tokens are computed.

B batch, H heads, C capacity, S new tokens, L tokens including the new ones, R earlier tokens, d width
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class NewTokens:
    """Positions of the tokens of a forward pass in their sequences."""

    positions: slice | Tensor
    """A slice for all rows, or int64 (B, S) if rows have different lengths."""
    end: int
    """L of the longest row."""
    is_first: bool
    """True if the cache was empty, so that the forward pass computes whole sequences."""
    attn_mask: Tensor | None
    """True where a new token may attend, bool (B or 1, 1, S, L); None if no mask is needed."""

    def attn_mask_within(self, window: int | None, device: torch.device) -> Tensor | None:
        """Return `attn_mask`, limited to the last `window` tokens up to each new one."""
        if window is None or window >= self.end:
            return self.attn_mask
        positions = self.positions
        if isinstance(positions, slice):
            positions = torch.arange(positions.start, positions.stop, device=device).unsqueeze(0)
        near = torch.arange(self.end, device=device) > positions.unsqueeze(-1) - window
        return near[:, None] if self.attn_mask is None else near[:, None] & self.attn_mask


_Call = tuple[nn.Module, int]
"""A module, and the number of its earlier calls in the same forward pass, since it may run twice."""


class LayerCache:
    """Keys and values of one layer, and the most recent values that its feed-forward block reads again."""

    new: NewTokens

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._cached: list[Tensor] = []
        self._last: dict[_Call, Tensor] = {}
        self._windows: dict[_Call, Tensor] = {}

    def begin(self, new: NewTokens) -> None:
        self.new = new
        self._windows.clear()  # a failed forward pass may have left some

    def extend(self, *new: Tensor) -> list[Tensor]:
        """Append tensors (B, H, S, d) to the cached ones; return views of all tokens, (B, H, L, d)."""
        if not self._cached:
            # Zeros, not uninitialised memory: masked tokens have weight 0, but 0 times NaN would be NaN.
            self._cached = [x.new_zeros(*x.shape[:2], self.capacity, x.shape[-1]) for x in new]
        positions, end = self.new.positions, self.new.end
        for cached_BHCd, x_BHSd in zip(self._cached, new, strict=True):
            if isinstance(positions, slice):
                cached_BHCd[:, :, positions] = x_BHSd
            else:
                rows_B1 = torch.arange(len(positions), device=positions.device).unsqueeze(-1)
                cached_BHCd[rows_B1, :, positions] = x_BHSd.transpose(1, 2)
        return [cached_BHCd[:, :, :end] for cached_BHCd in self._cached]

    def window(self, owner: nn.Module, new: Tensor, reach: int) -> Tensor:
        """See `TokenHistory`; `end` discards the values that are no longer needed."""
        call = (owner, sum(other is owner for other, _ in self._windows))
        if call not in self._last:
            self._last[call] = new.new_zeros(len(new), reach, *new.shape[2:])
        self._windows[call] = torch.cat([self._last[call], new], dim=1)
        return self._windows[call]

    def end(self, counts: Sequence[int]) -> None:
        """Store the last values of each row up to its last real token; padding comes after it."""
        for call, window in self._windows.items():
            rows_B1 = torch.arange(len(window), device=window.device).unsqueeze(-1)
            ends_B1 = torch.tensor(counts, device=window.device).unsqueeze(-1)
            before_R = torch.arange(self._last[call].shape[1], device=window.device)
            self._last[call] = window[rows_B1, ends_B1 + before_R]
        self._windows.clear()

    def keep(self, rows: Tensor) -> None:
        self._cached = [cached_BHCd[rows.to(cached_BHCd.device)] for cached_BHCd in self._cached]
        self._last = {call: last[rows.to(last.device)] for call, last in self._last.items()}


class KVCache:
    """Preallocated keys and values of every layer, or latent vectors for latent attention.

        cache = decoder.new_cache(batch_size=2, capacity=512)
        decoder(prompts_BS, mask_BS, cache=cache)  # shorter prompts are padded on the right
        decoder(next_B1, cache=cache)

    Real token j of a row has position j, independent of the other rows.
    """

    def __init__(self, num_layers: int, batch_size: int, capacity: int) -> None:
        self.capacity = capacity
        self.lengths = [0] * batch_size
        """Number of cached tokens of each row."""
        self.layers = [LayerCache(capacity) for _ in range(num_layers)]
        self._counts = [0] * batch_size

    def begin(self, token_ids: Tensor, mask: Tensor | None) -> NewTokens:
        """Start a forward pass over new tokens (B, S); `end` follows after all layers have cached them.
        ValueError if the tokens do not fit, or padding comes before a real token.
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
                    "mask: with a cache, the real tokens of each row must come first; pad on the right"
                )
            self._counts = counts_B1.flatten().tolist()
        new = self._new_tokens(longest, end, token_ids.device)
        for layer in self.layers:
            layer.begin(new)
        return new

    def _new_tokens(self, longest: int, end: int, device: torch.device) -> NewTokens:
        is_first, num_new = longest == 0, end - longest
        if all(length == longest for length in self.lengths):
            positions_S = torch.arange(longest, end, device=device)
            needs_mask = not is_first and num_new > 1
            attn_mask = _causal_mask(positions_S, end)[None, None] if needs_mask else None
            return NewTokens(slice(longest, end), end, is_first, attn_mask)
        lengths_B1 = torch.tensor(self.lengths, device=device).unsqueeze(-1)
        positions_BS = lengths_B1 + torch.arange(num_new, device=device)
        return NewTokens(positions_BS, end, False, _causal_mask(positions_BS, end).unsqueeze(1))

    def end(self) -> None:
        """Add the tokens of `begin` to the lengths, after all layers have cached them."""
        self.lengths = [
            length + count for length, count in zip(self.lengths, self._counts, strict=True)
        ]
        for layer in self.layers:
            layer.end(self._counts)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        self.lengths = [self.lengths[row] for row in rows]
        for layer in self.layers:
            layer.keep(torch.tensor(rows, dtype=torch.int64))


def _causal_mask(positions: Tensor, end: int) -> Tensor:
    """Return the causal mask of tokens at `positions`, bool (..., L)."""
    return torch.arange(end, device=positions.device) <= positions.unsqueeze(-1)
