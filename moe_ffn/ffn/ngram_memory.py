"""N-gram memory: adds table rows, looked up by a hash of the last few tokens, to the output of another block.

B sequences, S tokens per sequence, L = S + earlier tokens, D model width, N length of the longest n-gram,
H tables for each n, M total width of a token's rows
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import accumulate, count, islice
from random import Random
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field
from torch import Tensor, nn

from moe_ffn.config.base import MAX_COUNT, describe_options
from moe_ffn.config.errors import Unsupported, UseCase
from moe_ffn.config.process_memory import require_table_memory
from moe_ffn.config.sizes import linear_flops, linear_params
from moe_ffn.ffn.base import FFNBlock, check_input, flatten_tokens
from moe_ffn.ffn.wrappers import WrapperConfig, WrapperFFN
from moe_ffn.kernels.base import check_dtype
from moe_ffn.outputs import FFNOutput, TokenContext, TokenHistory
from moe_ffn.routing.base import Float32RMSNorm

_EPS = 1e-6


class NgramMemoryConfig(WrapperConfig, frozen=True):
    """A memory of hashed n-grams, added to another block (Engram, Cheng et al. 2026, arXiv:2601.07372).

    In the paper a model of 27 B parameters scores 3.4 points more on MMLU, 5.0 on BBH and 3.0 on HumanEval
    than a mixture of experts with equal parameters and FLOPs.

    The block needs token ids. It differs from the paper in two ways: it does not merge the ids of tokens that
    differ only in case or accents, and it adds the memory to the output of `ffn`, not before attention.
    """

    type: Literal["ngram_memory"] = "ngram_memory"
    max_order: int = Field(default=3, ge=2, le=32)
    """N, the length of the longest n-gram; each length from 2 to N has its own tables."""
    num_heads: int = Field(default=8, ge=1, le=1024)
    """Tables for each length; n-grams that collide in one table rarely collide in the others."""
    num_rows: int = Field(default=4096, ge=1, le=MAX_COUNT)
    """Minimum number of rows of a table. The sizes of the tables are the first primes from this number on."""
    row_width: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Width of a row; d_model / (2 * num_heads) by default, as in the paper."""
    kernel_size: int = Field(default=4, ge=1, le=1024)
    """Tokens in the kernel of the convolution: the current one, and every N-th one before it."""
    rate_scale: float = Field(default=5.0, gt=0, le=1e6)
    """Factor that multiplies the table rows; with Adam, the tables learn faster by this factor."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the hash function; layers with equal seeds share the function."""

    def unsupported(self, use_case: UseCase) -> Unsupported | None:
        if use_case.cached and not use_case.history:
            return Unsupported(
                f"type '{self.type}' reads earlier tokens, which a mixture of depths may skip",
                "put the mixture of depths inside 'ngram_memory'",
            )
        return super().unsupported(use_case)

    @property
    def num_tables(self) -> int:
        return (self.max_order - 1) * self.num_heads

    @property
    def table_sizes(self) -> tuple[int, ...]:
        """Number of rows of each table, 2-grams first."""
        return primes_from(self.num_rows, self.num_tables)

    def width_of_row(self, d_model: int) -> int:
        return self.row_width or max(1, d_model // (2 * self.num_heads))

    def memory_width(self, d_model: int) -> int:
        """Return M, the total width of a token's rows."""
        return self.num_tables * self.width_of_row(d_model)

    def build(self, d_model: int) -> FFNBlock:
        return NgramMemoryFFN(self, d_model)

    def num_params(self, d_model: int) -> int:
        tables = sum(self.table_sizes) * self.width_of_row(d_model)
        return tables + self._params_without_tables(d_model) + self.ffn.num_params(d_model)

    def num_active_params(self, d_model: int) -> int:
        """Return the number of parameters that a token uses, with one row of each table."""
        read = self.memory_width(d_model)
        return read + self._params_without_tables(d_model) + self.ffn.num_active_params(d_model)

    def flops_per_token(self, d_model: int, seq_len: int) -> int:
        projections = 2 * linear_flops(self.memory_width(d_model), d_model)
        return projections + self.ffn.flops_per_token(d_model, seq_len)

    def describe(self) -> str:
        memory = f"{self.max_order}-gram memory, {self.num_rows} rows"
        return f"{memory}, added to {self.ffn.describe()}"

    def _params_without_tables(self, d_model: int) -> int:
        """Return the number of parameters of keys, values, three norms and the convolution."""
        projections = 2 * linear_params(self.memory_width(d_model), d_model, bias=False)
        return projections + 3 * d_model + self.kernel_size * d_model


class NgramMemoryFFN(WrapperFFN):
    """y = f(x) + v + SiLU(conv(RMSNorm(v))) with v = sigmoid(RMSNorm(x) . RMSNorm(W_K e) / sqrt(D)) W_V e.

    Cheng et al. 2026 (arXiv:2601.07372), section 2.3. e is the output of `NgramTables` for the token, and the
    convolution is initialised to zero. The authors' demo also takes the signed square root of the score.
    """

    def __init__(self, config: NgramMemoryConfig, d_model: int) -> None:
        super().__init__(config, d_model)
        self.tables = NgramTables(config, d_model)
        width = config.memory_width(d_model)
        self.key = nn.Linear(width, d_model, bias=False)
        self.value = nn.Linear(width, d_model, bias=False)
        self.query_norm = Float32RMSNorm(d_model, eps=_EPS)
        self.key_norm = Float32RMSNorm(d_model, eps=_EPS)
        self.conv = ShortConv(d_model, config.kernel_size, dilation=config.max_order)

    def forward(self, x: Tensor, context: TokenContext | None = None) -> FFNOutput:
        """Add the memory to the output of the inner block; ValueError if the context has no token ids."""
        check_input(x, context, self.d_model, self)
        if context is None or context.token_ids is None:
            raise ValueError(
                "type 'ngram_memory' looks up the last tokens by their ids: call the block with "
                "TokenContext(token_ids=...)"
            )
        check_dtype(x, self.key.weight)
        output = self.ffn(x, context)
        memory = self.read(x, context).to(x.dtype).view_as(x)
        return replace(output, hidden=output.hidden + memory)

    def read(self, x: Tensor, context: TokenContext) -> Tensor:
        """Return the output of the memory, (B, S, D), zero for padding."""
        x_TD, flat = flatten_tokens(x, context)
        by_sequence, history = {"s": flat.sequence_length or 1}, context.history
        assert flat.token_ids is not None
        ids_T = flat.token_ids.long() + 1  # 0: no token
        if flat.mask is not None:
            ids_T = ids_T.masked_fill(~flat.mask, 0)
        ids_BS = rearrange(ids_T, "(b s) -> b s", **by_sequence)
        x_BSD = rearrange(x_TD, "(b s) d -> b s d", **by_sequence)
        rows_BSM = self.tables(ids_BS, history)
        key_BSD = self.key_norm(self.key(rows_BSM))
        score_BS1 = (key_BSD * self.query_norm(x_BSD)).sum(dim=-1, keepdim=True)
        gate_BS1 = (score_BS1 / math.sqrt(self.d_model)).sigmoid().to(x.dtype)
        padding_BS1 = (ids_BS == 0).unsqueeze(-1)
        value_BSD = (gate_BS1 * self.value(rows_BSM)).masked_fill(padding_BS1, 0)
        return (value_BSD + self.conv(value_BSD, history)).masked_fill(padding_BS1, 0)


class NgramTables(nn.Module):
    """Looks up a token's n-grams, n = 2 .. N, in H tables each, and concatenates the rows.

    An n-gram reads row (XOR over i < n of a_i * id_(t - i)) mod P of a table with P rows. P is prime, and the
    odd factors a_i are drawn with the seed (arXiv:2601.07372, section 2.2). Ids count from 1; 0 is padding.
    """

    def __init__(self, config: NgramMemoryConfig, d_model: int) -> None:
        super().__init__()
        self.config = config
        self.sizes = config.table_sizes
        # Python guarantees that `random()` reproduces its numbers. A factor below 2**31 times an id below
        # 2**32 fits into int64.
        draw = Random(config.seed).random
        self.factors = tuple(2 * int(draw() * 2**30) + 1 for _ in range(config.max_order))
        num_rows, width = sum(self.sizes), config.width_of_row(d_model)
        require_table_memory(
            num_rows,
            width,
            f"num_rows ({config.num_rows}): {len(self.sizes)} tables of rows of width {width}",
            "lower num_rows, num_heads or row_width",
        )
        self.rows = nn.Embedding(num_rows, width)
        nn.init.normal_(self.rows.weight, std=0.02 / config.rate_scale)

    def forward(self, ids_BS: Tensor, history: TokenHistory | None) -> Tensor:
        """Return the rows of each token, (B, S, M); ids count from 1, and 0 is padding."""
        rows_BSM = self.rows(self.row_ids(ids_BS, history)).flatten(-2)
        return self.config.rate_scale * rows_BSM

    def row_ids(self, ids_BS: Tensor, history: TokenHistory | None) -> Tensor:
        """Return the rows to read, int64 (B, S, (N - 1) H), as indices into the concatenated tables."""
        reach, length = len(self.factors) - 1, ids_BS.shape[1]
        ids_BL = _window(self, ids_BS, reach, history)
        hash_BS = self.factors[0] * ids_BS
        tables = zip(self.sizes, accumulate(self.sizes, initial=0), strict=False)
        row_ids: list[Tensor] = []
        for back in range(1, reach + 1):
            hash_BS = hash_BS ^ (self.factors[back] * ids_BL.narrow(1, reach - back, length))
            heads = islice(tables, self.config.num_heads)
            row_ids += [hash_BS.remainder(size) + first for size, first in heads]
        return torch.stack(row_ids, dim=-1)

    def extra_repr(self) -> str:
        return describe_options(self.config, without=["type", "ffn", "row_width", "kernel_size"])


class ShortConv(nn.Module):
    """SiLU(sum over i < K of w_i * RMSNorm(v)_(t - i N)): a causal depthwise convolution."""

    def __init__(self, d_model: int, kernel_size: int, dilation: int) -> None:
        super().__init__()
        self.norm = Float32RMSNorm(d_model, eps=_EPS)
        self.taps_KD = nn.Parameter(torch.zeros(kernel_size, d_model))
        self.dilation = dilation

    def forward(self, v_BSD: Tensor, history: TokenHistory | None) -> Tensor:
        reach, length = (len(self.taps_KD) - 1) * self.dilation, v_BSD.shape[1]
        v_BLD = _window(self, self.norm(v_BSD).to(v_BSD.dtype), reach, history)
        terms = [
            tap_D * v_BLD.narrow(1, reach - back * self.dilation, length)
            for back, tap_D in enumerate(self.taps_KD)
        ]
        return F.silu(sum(terms[1:], terms[0]))

    def extra_repr(self) -> str:
        return f"kernel_size={len(self.taps_KD)}, dilation={self.dilation}"


def _window(owner: nn.Module, new: Tensor, reach: int, history: TokenHistory | None) -> Tensor:
    """Return `TokenHistory.window`; without a history, zeros followed by the new tokens."""
    if history is not None:
        return history.window(owner, new, reach)
    # Not `len(new)`: torch.export would record it as a constant.
    zeros = new.new_zeros(new.shape[0], reach, *new.shape[2:])
    return torch.cat([zeros, new], dim=1)


@cache
def primes_from(minimum: int, num_primes: int) -> tuple[int, ...]:
    """Return the first `num_primes` primes that are at least `minimum`."""

    def is_prime(number: int) -> bool:
        return all(number % divisor for divisor in range(2, math.isqrt(number) + 1))

    return tuple(islice(filter(is_prime, count(max(minimum, 2))), num_primes))
