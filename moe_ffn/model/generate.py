"""Autoregressive generation of tokens.

R rows, S sequence, V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from pydantic import Field
from torch import Tensor

from moe_ffn.config.base import MAX_COUNT, Config
from moe_ffn.config.errors import UseCase
from moe_ffn.model.decoder import Decoder, DecoderOutput


class Sampling(Config, frozen=True):
    """Options for sampling the next token from the logits."""

    temperature: float = Field(default=0.8, ge=0)
    """Divisor of the logits; 0: always take the most probable token."""
    top_k: int | None = Field(default=50, ge=1, le=MAX_COUNT)
    """Number of most probable tokens to sample from; None: all."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus sampling (Holtzman et al. 2019, arXiv:1904.09751, section 3.1): after `top_k`, sample from the
    smallest set of most probable tokens with at least this total probability; None: from all."""

    def choose(self, logits_RV: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Sample the next token of each row, int64 (R,); RuntimeError if its largest logit is not finite."""
        logits_RV = logits_RV.float()
        best_R1, ids_R1 = logits_RV.max(dim=-1, keepdim=True)
        if not best_R1.isfinite().all():
            largest = best_R1[~best_R1.isfinite()][0]
            raise RuntimeError(f"the model's largest logit is {largest}: there is no next token")
        if self.temperature == 0:
            return ids_R1.squeeze(-1)
        if self.top_k is not None and self.top_k < logits_RV.shape[-1]:
            least_R1 = logits_RV.topk(self.top_k).values[:, -1:]
            logits_RV = logits_RV.masked_fill(logits_RV < least_R1, -torch.inf)
        # Subtract the largest logit first, and divide in float64: a tiny temperature would make logits
        # infinite, and their softmax NaN.
        scaled_RV = (logits_RV - best_R1).double() / self.temperature
        probs_RV = scaled_RV.float().softmax(-1)
        if self.top_p is not None and self.top_p < 1:
            sorted_RV, order_RV = probs_RV.sort(dim=-1, descending=True, stable=True)
            more_probable_RV = sorted_RV.cumsum(-1) - sorted_RV
            sorted_RV = sorted_RV.masked_fill(more_probable_RV >= self.top_p, 0)
            probs_RV = probs_RV.scatter(-1, order_RV, sorted_RV)
        return torch.multinomial(probs_RV, 1, generator=generator).squeeze(-1)


class Decoding:
    """Generation for several prompts in one batch: `for new_ids in decoding`.

    At temperature 0, each row is continued as it would be alone. With a KV cache, a step computes only the
    new tokens. Without it, every step computes whole sequences again, which is slower: for rows longer than
    `max_seq_len`, which continue from their last `max_seq_len` tokens, and for models that do not support a
    cache (`DecoderConfig.unsupported`), whose rows are computed one by one.
    """

    def __init__(
        self,
        model: Decoder,
        prompts: Sequence[Tensor],
        num_tokens: int,
        sampling: Sampling,
        generator: torch.Generator | None = None,
        observe: Callable[[DecoderOutput, int], None] | None = None,
    ) -> None:
        """Take prompts, integers (S,) with S from 1 to `max_seq_len`, to which `num_tokens` tokens each are
        added. At temperature 0 rows are independent; otherwise they share `generator`, so a row depends on
        the others. `observe` gets every output, and the number of new tokens at its end. ValueError for
        another shape or length.
        """
        for prompt_ids in prompts:
            _check_prompt(prompt_ids, model.max_seq_len)
        self.model, self.num_tokens, self.sampling = model, num_tokens, sampling
        self.generator, self.observe = generator, observe
        self.tokens: list[list[int]] = [prompt_ids.tolist() for prompt_ids in prompts]
        """Token ids of each row so far, including the prompt."""
        self.open = list(range(len(prompts)))
        """Rows that still receive tokens."""
        self._num_read = [0] * len(prompts)
        self._device = prompts[0].device if prompts else torch.device("cpu")
        self._cached_rows: list[int] = []
        self._has_cache = model.config.unsupported(UseCase(cached=True)) is None
        if self._has_cache:
            self._cached_rows = list(self.open)
            longest = max(map(len, self.tokens), default=0)
            self._cache = model.new_cache(len(prompts), longest + num_tokens)

    def __iter__(self) -> Iterator[dict[int, int]]:
        """Yield {row: next token} of the open rows, `num_tokens` times."""
        for _ in range(self.num_tokens):
            if not self.open:
                return
            new_R = self.sampling.choose(self.read(), self.generator)
            new_ids = dict(zip(self.open, new_R.tolist(), strict=True))
            for row, token_id in new_ids.items():
                self.tokens[row].append(token_id)
            yield new_ids

    def close(self, row: int) -> None:
        """Stop adding tokens to a row."""
        self.open.remove(row)

    @torch.no_grad()
    def read(self) -> Tensor:
        """Return the logits of the next token of each open row, (R, V)."""
        max_len = self.model.max_seq_len
        fit = [r for r in self._cached_rows if r in self.open and len(self.tokens[r]) <= max_len]
        if fit != self._cached_rows:
            self._cache.keep([self._cached_rows.index(row) for row in fit])
            self._cached_rows = fit
        others = [row for row in self.open if row not in fit]
        with evaluating(self.model):
            logits: dict[int, Tensor] = {}
            if fit:
                logits |= zip(fit, self._read_new(fit), strict=True)
            if self._has_cache and others:
                logits |= zip(others, self._read_windows(others), strict=True)
            elif others:
                logits |= {row: self._read_windows([row])[0] for row in others}
        return torch.stack([logits[row] for row in self.open])

    def _read_new(self, rows: Sequence[int]) -> Tensor:
        lengths = self._cache.lengths
        new = [self.tokens[row][length:] for row, length in zip(rows, lengths, strict=True)]
        counts = list(map(len, new))
        longest = max(counts)
        ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids in new], device=self._device)
        if min(counts) == longest:
            output = self.model(ids, cache=self._cache)
            self._report(output, rows)
            return output.logits[:, -1]
        counts_R = torch.tensor(counts, device=self._device)
        mask = torch.arange(longest, device=self._device) < counts_R.unsqueeze(-1)
        output = self.model(ids, mask, cache=self._cache)
        self._report(output, rows)
        return output.logits[torch.arange(len(rows), device=self._device), counts_R - 1]

    def _read_windows(self, rows: Sequence[int]) -> Tensor:
        windows = [self.tokens[row][-self.model.max_seq_len :] for row in rows]
        output = self.model(torch.tensor(windows, device=self._device))
        self._report(output, rows)
        return output.logits[:, -1]

    def _report(self, output: DecoderOutput, rows: Sequence[int]) -> None:
        if self.observe is not None:
            self.observe(output, max(len(self.tokens[row]) - self._num_read[row] for row in rows))
        for row in rows:
            self._num_read[row] = len(self.tokens[row])


@contextmanager
def evaluating(model: Decoder) -> Iterator[None]:
    """Put a model into evaluation mode inside the block, then restore its mode."""
    was_training = model.training
    if was_training:
        model.eval()
    try:
        yield
    finally:
        if was_training:
            model.train()


def generate(
    model: Decoder,
    prompt_ids: Tensor,
    num_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    generator: torch.Generator | None = None,
    top_p: float | None = None,
) -> Tensor:
    """Continue a prompt, with the model in evaluation mode.

    Args:
        prompt_ids: integers (S,), with S from 1 to `max_seq_len`.
        num_tokens: number of tokens to add. Each depends on at most the last `max_seq_len` tokens.
        temperature, top_k, top_p: see `Sampling`.

    Raises:
        TypeError, ValueError: the prompt has another dtype or shape, or is too long, or a sampling option is
            invalid.
        RuntimeError: the logits are NaN or infinite.

    Returns:
        int64 (num_tokens,), the new tokens.
    """
    return generate_batch(
        model,
        [prompt_ids],
        num_tokens,
        Sampling(temperature=temperature, top_k=top_k, top_p=top_p),
        generator,
    )[0]


def generate_batch(
    model: Decoder,
    prompts: Sequence[Tensor],
    num_tokens: int,
    sampling: Sampling,
    generator: torch.Generator | None = None,
) -> list[Tensor]:
    """Continue prompts of different lengths in one batch; see `generate`."""
    decoding = Decoding(model, prompts, num_tokens, sampling, generator)
    with evaluating(model):
        for _ in decoding:
            pass
    return [
        torch.tensor(ids[len(prompt_ids) :], dtype=torch.int64, device=prompt_ids.device)
        for ids, prompt_ids in zip(decoding.tokens, prompts, strict=True)
    ]


def _check_prompt(prompt_ids: Tensor, max_seq_len: int) -> None:
    if prompt_ids.ndim != 1 or prompt_ids.numel() == 0:
        raise ValueError(f"prompt_ids must be (S,) with S >= 1, got {tuple(prompt_ids.shape)}")
    if len(prompt_ids) > max_seq_len:
        raise ValueError(
            f"prompt_ids has {len(prompt_ids)} tokens, but the model was built for max_seq_len "
            f"({max_seq_len}); give a shorter prompt, such as its last {max_seq_len} tokens"
        )
