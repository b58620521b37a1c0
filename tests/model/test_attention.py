"""Attention against a triple loop, its masks and its shared heads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from moe_ffn.kernels.native.build import unavailable_reason
from moe_ffn.model.attention import (
    AttentionConfig,
    SelfAttention,
    SinkAttention,
    _CompiledAttention,
)
from moe_ffn.model.norm import LayerNormConfig, NormConfig, RMSNormConfig
from moe_ffn.model.positions import Positions, RotaryConfig

D_MODEL = 16


def attention(seed: int = 0, causal: bool = True, **config: Any) -> SelfAttention:
    torch.manual_seed(seed)
    parsed = AttentionConfig.model_validate(config)
    module = parsed.build(D_MODEL, causal, RMSNormConfig(), parsed.window)
    assert isinstance(module, SelfAttention)
    if isinstance(module, SinkAttention):
        torch.nn.init.normal_(module.sink_H)
    return module.double()


def tokens(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, D_MODEL, generator=generator, dtype=torch.float64)


def naive(module: SelfAttention, x_SD: Tensor, mask_S: Tensor, positions: Positions) -> Tensor:
    """Head by head, token by token: a weighted mean of what each token may see."""
    length, head_dim = len(x_SD), module.query.out_features // module.num_heads

    def heads(projected_SD: Tensor) -> Tensor:
        return projected_SD.view(length, -1, head_dim).transpose(0, 1)

    query = positions.rotate(heads(module.query(x_SD))[None])[0]
    key = positions.rotate(heads(module.key(x_SD))[None])[0]
    value = heads(module.value(x_SD))
    group = module.num_heads // module.num_kv_heads
    mixed = torch.zeros(length, module.num_heads, head_dim, dtype=x_SD.dtype)
    for h in range(module.num_heads):
        for s in range(length):
            seen = [t for t in range(s + 1 if module.causal else length) if mask_S[t] or t == s]
            seen = [t for t in seen if abs(t - s) < (module.window or length)]
            scores = [query[h, s] @ key[h // group, t] / math.sqrt(head_dim) for t in seen]
            sink = [module.sink_H[h]] if isinstance(module, SinkAttention) else []
            weights = torch.stack([*scores, *sink]).softmax(0)
            for weight, t in zip(weights[: len(seen)], seen, strict=True):
                mixed[s, h] += weight * value[h // group, t]
    return module.output(mixed.flatten(1))


@pytest.mark.parametrize("rotated", [False, True], ids=["plain", "rope"])
@pytest.mark.parametrize("bias", [False, True, "qkv"], ids=["no_bias", "bias", "qkv"])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("head_dim", [4, 6], ids=["d_model", "wider"])
def test_attention_equals_the_loops(
    num_kv_heads: int, bias: bool | str, rotated: bool, head_dim: int
) -> None:
    width: dict[str, Any] = {} if head_dim == D_MODEL // 4 else {"head_dim": head_dim}
    module = attention(num_heads=4, num_kv_heads=num_kv_heads, bias=bias, **width)
    assert (module.query.bias is not None) == bool(bias)
    assert (module.output.bias is not None) == (bias is True)
    positions = RotaryConfig().build(D_MODEL, head_dim, 8) if rotated else Positions()
    x = tokens(2, 6)
    mask = torch.ones(2, 6, dtype=torch.bool)
    wanted = torch.stack([naive(module, x_SD, mask[0], positions) for x_SD in x])
    # float64, apart from the float32 tables, which both use
    torch.testing.assert_close(module(x, positions, None), wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(module(x, positions, mask), wanted, rtol=0, atol=1e-12)
    mask[0, 4:] = False
    mask[1, :2] = False
    wanted = torch.stack([naive(module, *pair, positions) for pair in zip(x, mask, strict=True)])
    torch.testing.assert_close(module(x, positions, mask), wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("window", [1, 3, 6, 9])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both sides"])
def test_windows_and_sinks_match_the_loops_and_the_counted_flops(
    window: int, causal: bool, sinks: bool
) -> None:
    module = attention(num_heads=4, num_kv_heads=2, window=window, causal=causal, sinks=sinks)
    positions, x = RotaryConfig().build(D_MODEL, 4, 8), tokens(2, 6).requires_grad_()
    mask = torch.tensor([[True] * 6, [False] * 2 + [True] * 4])
    wanted = [naive(module, *pair, positions) for pair in zip(x, mask, strict=True)]
    gradients = [
        torch.autograd.grad(outputs.square().sum(), [x, *module.parameters()], retain_graph=True)
        for outputs in (torch.stack(wanted), module(x, positions, mask))
    ]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)
    torch.testing.assert_close(module(x, positions, mask), torch.stack(wanted), rtol=0, atol=1e-12)
    torch.testing.assert_close(module(x[:1], positions, None)[0], wanted[0], rtol=0, atol=1e-12)

    config = AttentionConfig(num_heads=4)
    pairs = [(s, t) for s in range(6) for t in range(6) if abs(s - t) < window]
    attended = len([pair for pair in pairs if pair[1] <= pair[0] or not causal]) / 6
    matrices = config.flops_per_token(D_MODEL, 6, False) - 2 * 4 * 8 * 6
    expected = matrices + round(2 * 4 * 8 * attended)
    assert config.flops_per_token(D_MODEL, 6, causal, window) == expected


def test_padding_only_is_finite() -> None:
    module = attention(num_heads=2)
    x = tokens(1, 4).requires_grad_()
    output = module(x, Positions(), torch.zeros(1, 4, dtype=torch.bool))
    output.sum().backward()
    assert output.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("latent", [None, {"kv_rank": 7, "rotated_dim": 2}])
def test_dropout_is_for_training_only(latent: dict[str, int] | None) -> None:
    def build(dropout: float) -> torch.nn.Module:
        torch.manual_seed(0)
        options = {"num_heads": 2, "dropout": dropout, "latent": latent}
        config = AttentionConfig.model_validate(options)
        return config.build(D_MODEL, causal=True, norm=RMSNormConfig()).double()

    module, x = build(0.5), tokens(1, 6)
    torch.manual_seed(2)
    assert not torch.equal(module(x, Positions(), None), module(x, Positions(), None))
    module.eval()
    assert torch.equal(module(x, Positions(), None), build(0.0)(x, Positions(), None))


LATENT = {"kv_rank": 7, "query_rank": 5, "rotated_dim": 2, "value_dim": 3}


@pytest.mark.parametrize("norm", [RMSNormConfig(), LayerNormConfig()], ids=lambda norm: norm.type)
@pytest.mark.parametrize(
    "options",
    [
        *({"num_kv_heads": n, "bias": bias} for n in (1, 2, 4) for bias in (False, True, "qkv")),
        *({"num_kv_heads": 2, "head_dim": 6, "norm_qk": which} for which in ("head", "all")),
        {"sinks": True},
        *(
            {"head_dim": 6, "latent": LATENT | {"query_rank": rank, "value_dim": width}}
            for rank in (5, None)
            for width in (3, None)
        ),
    ],
    ids=str,
)
def test_parameters_and_flops_are_those_of_the_built_module(
    options: dict[str, Any], norm: NormConfig
) -> None:
    config = AttentionConfig.model_validate({"num_heads": 4, **options})
    module = config.build(D_MODEL, causal=True, norm=norm)
    assert config.num_params(D_MODEL, norm) == sum(p.numel() for p in module.parameters())
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        module.double()(tokens(2, 9), Positions(), None)
    expected = config.flops_per_token(D_MODEL, seq_len=9, causal=False)
    assert counter.get_total_flops() == 2 * 9 * expected


def test_padding_changes_nothing_of_latent_attention_before_it() -> None:
    config = AttentionConfig.model_validate({"num_heads": 4, "head_dim": 6, "latent": LATENT})
    module = config.build(D_MODEL, causal=True, norm=RMSNormConfig()).double()
    x = tokens(1, 6)
    mask = torch.tensor([[True] * 4 + [False] * 2])
    positions = RotaryConfig().build(D_MODEL, 2, 8)
    padded = module(x, positions, mask)
    torch.testing.assert_close(padded[:, :4], module(x[:, :4], positions, None))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_kv_heads": 2},
            r"num_kv_heads \(2\) cannot be combined with latent, which derives keys",
        ),
        ({"norm_qk": "head"}, r"norm_qk \(head\) cannot be combined"),
        ({"bias": True}, r"bias \(True\) cannot be combined"),
        ({"sinks": True}, r"sinks \(True\) cannot be combined"),
    ],
)
def test_options_that_contradict_latent_attention_are_rejected(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionConfig.model_validate({"num_heads": 4, "latent": {}, **options})


def test_heads_must_divide() -> None:
    with pytest.raises(ValueError, match=r"num_kv_heads \(3\) must divide num_heads \(4\)"):
        AttentionConfig(num_heads=4, num_kv_heads=3)


needs_compiler = pytest.mark.skipif(
    unavailable_reason() is not None, reason="needs the compiled kernels"
)


@needs_compiler
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both sides"])
@pytest.mark.parametrize(
    ("length", "num_heads", "num_kv_heads", "head_dim"),
    [(1, 1, 1, 1), (64, 2, 2, 8), (100, 4, 2, 24), (129, 3, 1, 5), (600, 2, 2, 40)],
    ids=str,
)
def test_the_compiled_kernel_equals_float64(
    length: int, num_heads: int, num_kv_heads: int, head_dim: int, causal: bool
) -> None:
    torch.manual_seed(0)
    heads = [num_heads, num_kv_heads, num_kv_heads]
    inputs = [
        torch.randn(2, length, n * head_dim).unflatten(-1, (n, head_dim)).transpose(1, 2)
        for n in heads
    ]
    grad = torch.randn(2, num_heads, length, head_dim)
    scale = 3 / math.sqrt(head_dim)  # the largest weight of a row is about 0.9

    def attend(dtype: torch.dtype, compiled: bool) -> list[Tensor]:
        leaves = [x.to(dtype).detach().requires_grad_() for x in inputs]
        if compiled:
            y = _CompiledAttention.apply(*leaves, causal, scale)
        else:
            y = torch.nn.functional.scaled_dot_product_attention(
                leaves[0], leaves[1], leaves[2], is_causal=causal, scale=scale, enable_gqa=True
            )
        return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(dtype))]

    exact, torchs = attend(torch.float64, False), attend(torch.float32, False)
    found = attend(torch.float32, True)
    torch.set_num_threads(3)
    try:
        by_three = attend(torch.float32, True)
    finally:
        torch.set_num_threads(1)

    assert all(map(torch.equal, found, by_three))
    largest = max(float(expected.norm()) for expected in exact)
    for value, of_torch, expected in zip(found, torchs, exact, strict=True):
        error, allowed = (float((v - expected).norm()) for v in (value, of_torch))
        assert error <= 1.5 * allowed + 2**-23 * largest


@needs_compiler
def test_the_compiled_kernel_trains_float32_without_masks() -> None:
    module, positions, x = attention().float(), Positions(), tokens(2, 6).float()

    def is_compiled(mask: Tensor | None = None) -> bool:
        attended: list[Tensor] = []
        hook = module.output.register_forward_pre_hook(lambda _, inputs: attended.extend(inputs))
        module(x, positions, mask).sum().backward()
        hook.remove()
        names, node = "", attended[0].grad_fn
        while node is not None:
            names, node = names + node.name(), next((n for n, _ in node.next_functions if n), None)
        return "_CompiledAttention" in names

    assert is_compiled()
    assert not is_compiled(torch.ones(2, 6, dtype=torch.bool))
    with sdpa_kernel(SDPBackend.MATH):
        assert not is_compiled()
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_compiled()
    module.dropout = 0.1
    assert not is_compiled()
    module.dropout, x = 0.0, x.double()
    module.double()
    assert not is_compiled()


@needs_compiler
def test_the_compiled_kernel_leaves_values_wider_than_keys_to_torch() -> None:
    latent = LATENT | {"value_dim": 9}  # keys have 6 + 2
    config = AttentionConfig.model_validate({"num_heads": 2, "head_dim": 6, "latent": latent})
    module = config.build(D_MODEL, causal=True, norm=RMSNormConfig())
    positions, x = RotaryConfig().build(D_MODEL, 2, 8), tokens(2, 6).float()
    trained = module(x, positions, None)
    with torch.no_grad():
        torch.testing.assert_close(trained, module(x, positions, None))


@needs_compiler
def test_the_compiled_kernel_has_no_second_derivative() -> None:
    module = attention().float()
    attended = module(tokens(1, 5).float(), Positions(), None).sum()
    advice = r"use torch\.nn\.attention\.sdpa_kernel\(SDPBackend\.MATH\)"
    with pytest.raises(
        RuntimeError, match=f"supports neither create_graph nor is_grads_batched; {advice}"
    ):
        torch.autograd.grad(attended, module.query.weight, create_graph=True)
