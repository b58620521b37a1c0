"""Blocks that look up or mix tokens: n-gram memories and soft MoE, each against plain loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ffn import ConfigError, DecoderConfig, FFNConfig, TokenContext, build_ffn
from moe_ffn.config import process_memory
from moe_ffn.config.errors import UseCase
from moe_ffn.ffn.ngram_memory import NgramMemoryConfig, NgramMemoryFFN, NgramTables
from moe_ffn.kernels.select import BACKENDS
from moe_ffn.routing.base import Float32RMSNorm
from moe_ffn.training.optimizer import OptimizerConfig, split_by_decay

D, B, S = 6, 2, 9
SMALL: dict[str, Any] = {
    "type": "ngram_memory",
    "num_heads": 2,
    "num_rows": 10,
    "row_width": 3,
    "kernel_size": 3,
    "rate_scale": 2.0,
}
INSIDE: dict[str, Any] = {
    "dense": "dense",
    "moe": {"type": "moe", "num_experts": 4, "experts": {"type": "swiglu", "d_ff": 4}},
    "identity": "identity",
}


def built(ffn: Any = "dense", **options: Any) -> NgramMemoryFFN:
    """Build a block in float64 with random weights, even where they begin at zero."""
    torch.manual_seed(0)
    block = build_ffn({**SMALL, "ffn": ffn, **options}, D).double()
    assert isinstance(block, NgramMemoryFFN)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    return block


def batch(mask: Tensor | None = None) -> tuple[Tensor, TokenContext]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B, S, D, generator=generator, dtype=torch.float64)
    return x, TokenContext(mask, torch.randint(50, (B, S), generator=generator))


def rms_norm(x_D: Tensor, scale_D: Tensor) -> Tensor:
    return x_D / (x_D.square().mean() + 1e-6).sqrt() * scale_D


def memory_by_hand(
    block: NgramMemoryFFN, x_SD: Tensor, ids: list[int | None], n_max: int
) -> list[Tensor]:
    """Output for one sequence, token by token; None stands for padding."""
    primes = (11, 13, 17, 19, 23, 29, 31, 37)[: 2 * (n_max - 1)]
    values: list[Tensor] = []
    for t, x_D in enumerate(x_SD):
        rows: list[Tensor] = []
        for table, prime in enumerate(primes):
            mixed = 0
            for i in range(2 + table // 2):
                at = ids[t - i] if t >= i else None
                mixed ^= block.tables.factors[i] * (0 if at is None else at + 1)
            rows.append(2.0 * block.tables.rows.weight[sum(primes[:table]) + mixed % prime])
        e_M = torch.cat(rows)
        key_D = rms_norm(block.key.weight @ e_M, block.key_norm.weight)
        gate = (rms_norm(x_D, block.query_norm.weight) @ key_D / math.sqrt(D)).sigmoid()
        values.append(gate * (block.value.weight @ e_M) * (ids[t] is not None))
    read: list[Tensor] = []
    for t, value_D in enumerate(values):
        summed = torch.zeros(D, dtype=torch.float64)
        for i, tap_D in enumerate(block.conv.taps_KD):
            if t >= i * n_max:
                summed = summed + tap_D * rms_norm(values[t - i * n_max], block.conv.norm.weight)
        read.append((value_D + summed * summed.sigmoid()) * (ids[t] is not None))
    return read


@pytest.mark.parametrize("n_max", [2, 3, 5])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("inside", INSIDE)
def test_output_and_gradients_are_those_of_a_loop(
    inside: str, padded: bool, n_max: int, assert_equal_with_gradients: Any
) -> None:
    block = built(INSIDE[inside], max_order=n_max)
    mask = torch.ones(B, S, dtype=torch.bool)
    mask[0, :2] = mask[0, 5] = mask[1, 6:] = not padded
    x, context = batch(mask)
    assert context.token_ids is not None
    x.requires_grad_()
    wanted = block.ffn(x, context).hidden + torch.stack(
        [
            torch.stack(
                memory_by_hand(
                    block,
                    x[row],
                    [token if mask[row, t] else None for t, token in enumerate(ids)],
                    n_max,
                )
            )
            for row, ids in enumerate(context.token_ids.tolist())
        ]
    )
    got = block(x, context).hidden

    assert_equal_with_gradients(block, x, got, wanted)


def test_a_token_is_seen_by_the_n_grams_and_taps_that_hold_it() -> None:
    block, (x, context) = built("identity"), batch()
    assert context.token_ids is not None
    altered = context.token_ids.clone()
    altered[:, 0] += 1
    moved = (block(x, TokenContext(token_ids=altered)).hidden - block(x, context).hidden).abs()
    # N = 3: itself and two more, and each of these again 3 and 6 tokens later.
    assert (moved.amax(dim=(0, 2)) > 1e-6).tolist() == [True] * 9
    block.conv.taps_KD.data.zero_()
    moved = (block(x, TokenContext(token_ids=altered)).hidden - block(x, context).hidden).abs()
    assert (moved.amax(dim=(0, 2)) > 1e-6).tolist() == [True] * 3 + [False] * 6


def test_the_hash_is_that_by_which_saved_tables_were_trained() -> None:
    tables = NgramTables(NgramMemoryConfig(num_heads=1, num_rows=100), D)
    assert tables.factors == (1_813_382_119, 1_627_694_687, 903_170_593)
    assert NgramTables(NgramMemoryConfig(seed=1), D).factors != tables.factors
    assert tables.row_ids(torch.tensor([[5, 8, 3]]), None).tolist() == [
        [[3, 122], [80, 114], [9, 196]]
    ]


def test_by_default_a_row_is_as_wide_as_in_the_paper() -> None:
    # engram_demo_v1.py: 512 for each order, of 8 heads, at a width of 1024.
    config = NgramMemoryConfig()
    assert (config.max_order, config.num_heads, config.kernel_size) == (3, 8, 4)
    assert config.width_of_row(1024) == 64
    assert config.memory_width(1024) == 1024


def test_norms_of_half_precision_are_computed_and_kept_in_float32() -> None:
    norm = Float32RMSNorm(D, eps=1e-6).bfloat16()
    x_TD = batch()[0].flatten(0, 1).bfloat16()
    wanted_TD = torch.stack([rms_norm(x_D, norm.weight.float()) for x_D in x_TD.float()])
    torch.testing.assert_close(norm(x_TD), wanted_TD, rtol=0, atol=1e-6)


def test_initial_reads_are_small_and_the_convolution_is_zero() -> None:
    block: Any = NgramMemoryConfig(rate_scale=5.0).build(64)
    read = block.tables(torch.arange(1000).view(10, 100), None)
    assert read.std().item() == pytest.approx(0.02, rel=0.05)  # as the embeddings of a decoder
    assert block.conv(torch.randn(2, 5, 64), None).count_nonzero() == 0


def test_adam_scales_the_rate_of_table_rows_and_never_decays_them() -> None:
    block, (x, context) = built(rate_scale=5.0), batch()
    decayed, kept = split_by_decay(block)
    assert "tables.rows.weight" in kept
    assert {"conv.taps_KD", "key.weight"} <= set(decayed)
    optimizer = OptimizerConfig.model_validate({"learning_rate": 1e-3}).build(block)
    before = {name: p.detach().clone() for name, p in block.named_parameters()}
    block(x, context).hidden.square().sum().backward()
    optimizer.step()
    moved = (block.tables.rows.weight - before["tables.rows.weight"]).abs()
    was_read = moved.amax(dim=1) > 0
    assert was_read.sum() < len(was_read)
    torch.testing.assert_close(5 * moved[was_read], torch.full_like(moved[was_read], 5e-3))


def test_tables_larger_than_the_machine_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "memory_limit", lambda: 10**12)
    options = {"type": "ngram_memory", "ffn": "dense", "num_rows": 10**9, "row_width": 4096}
    with pytest.raises(ConfigError) as raised:
        build_ffn(options, D)
    assert str(raised.value) == (
        "num_rows (1000000000): 16 tables of rows of width 4096 take 262,144 GB, and this process may have "
        "1,000 GB of memory; lower num_rows, num_heads or row_width"
    )
    with torch.device("meta"):
        build_ffn(options, D)


@pytest.mark.parametrize("context", [None, TokenContext()], ids=["none", "empty"])
def test_tokens_without_ids_are_rejected(context: TokenContext | None) -> None:
    with pytest.raises(
        ValueError,
        match=r"^type 'ngram_memory' looks up the last tokens by their ids: call the block with "
        r"TokenContext\(token_ids=\.\.\.\)$",
    ):
        built()(batch()[0], context)


def test_an_inner_block_that_looks_ahead_is_unsupported() -> None:
    build_ffn({"type": "moe", "shared_expert": SMALL | {"ffn": "dense"}}, D)
    looks_ahead = FFNConfig.model_validate(
        {**SMALL, "ffn": {"type": "conv", "causal": False}}
    ).unsupported(UseCase(causal=True))
    assert str(looks_ahead).startswith("ffn.causal (false) with kernel_size (3) looks ahead")


def test_ids_outside_the_vocabulary_are_rejected() -> None:
    model = DecoderConfig.model_validate({"d_model": 16, "num_layers": 1, "ffn": SMALL})
    with pytest.raises(
        ValueError, match=r"token_ids must lie in \[0, 11\), but range from 0 to 11"
    ):
        model.build(11, 6)(torch.tensor([[0, 11]]))


# -- soft MoE

CONFIG = {"type": "soft_moe", "num_experts": 3, "slots_per_expert": 2}


def build(backend: str) -> Any:
    torch.manual_seed(0)
    experts = {"type": "swiglu", "d_ff": 8, "backend": backend}
    return build_ffn({**CONFIG, "experts": experts}, d_model=8)


def by_loops(ffn: Any, x_SD: Tensor) -> Tensor:
    """One sequence of real tokens: equations 1 to 3, slot by slot and token by token."""
    unit = [x / x.norm() for x in x_SD]
    slots = [ffn.scale * slot / slot.norm() for slot in ffn.slots_PD]
    logits = torch.stack([torch.stack([x @ slot for slot in slots]).squeeze(-1) for x in unit])
    outputs = []
    for p in range(len(slots)):
        shares = logits[:, p].exp() / logits[:, p].exp().sum()
        mean = torch.stack([share * x for share, x in zip(shares, x_SD, strict=True)]).sum(0)
        e = p // 2  # two slots per expert
        gate, up = ffn.experts.gate[e] @ mean, ffn.experts.up[e] @ mean
        outputs.append(ffn.experts.down[e] @ (gate * gate.sigmoid() * up))
    y = []
    for row in logits:
        shares = row.exp() / row.exp().sum()
        y.append(torch.stack([share * y for share, y in zip(shares, outputs, strict=True)]).sum(0))
    return torch.stack(y)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_output_and_gradients_equal_the_loops(
    backend: str, padded: bool, tokens_and_mask: Any, dtype_of: Any, gradients: Any
) -> None:
    dtype = dtype_of(backend)
    ffn, reference = build(backend).to(dtype), build("loop").double()
    reference.load_state_dict(ffn.state_dict())
    x, mask = tokens_and_mask(dtype, padded)
    x_reference = x.double().requires_grad_()
    rows = []
    for sequence, real in zip(x_reference, mask, strict=True):
        y = torch.zeros_like(sequence)
        rows.append(y.index_put((real.nonzero().squeeze(-1),), by_loops(reference, sequence[real])))
    wanted = gradients(reference, x_reference, torch.stack(rows))

    x.requires_grad_()
    hidden = ffn(x, TokenContext(mask=mask)).hidden
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(hidden.double(), torch.stack(rows), rtol=tolerance, atol=tolerance)
    for name, gradient in gradients(ffn, x, hidden).items():
        torch.testing.assert_close(
            gradient.double(), wanted[name], rtol=10 * tolerance, atol=10 * tolerance, msg=name
        )
