"""Every block rejects inputs that it cannot transform in one sentence."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from moe_ffn import ConfigError, FFNBlock, FFNConfig, TokenContext, build_ffn

D_MODEL = 16
BLOCKS: dict[str, Any] = {
    **{member: {"type": member} for member in FFNConfig.members},
    "soft_moe": {"type": "soft_moe", "num_experts": 2, "slots_per_expert": 3},
    "moe-hash": {"type": "moe", "router": "hash"},
    "moe-shared": {"type": "moe", "shared_expert": "dense"},
    "moe-latent": {"type": "moe", "experts": {"type": "latent", "width": 8}},
    **{
        f"moe-{experts}": {
            "type": "moe",
            "num_experts": 16,
            "router": "product_key",
            "experts": experts,
        }
        for experts in ("single_neuron", "value")
    },
    "mixture_of_depths-identity": {"type": "mixture_of_depths", "ffn": "identity"},
}
every_block = pytest.mark.parametrize("config", BLOCKS.values(), ids=BLOCKS)
WEIGHTLESS = ("identity", "mixture_of_depths-identity")
DTYPES = [
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float16),
    (torch.float64, torch.float32),
    (torch.float32, torch.float64),
]
"""Dtypes of tokens and of weights."""


def build(config: Any) -> FFNBlock:
    torch.manual_seed(0)
    return build_ffn(config, D_MODEL)


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, D_MODEL, generator=torch.Generator().manual_seed(1))


def some_ids(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


X = tokens(2, 6)
IDS = some_ids(2, 6)
MASK = torch.ones(2, 6, dtype=torch.bool)

REJECTED: dict[str, dict[str, Any]] = {
    "x must be floating point, but is torch.int64; a block takes embedded tokens, not their ids": {
        "x": X.long()
    },
    "x has width 8, but this block was built for d_model 16; x must be (..., 16)": {
        "x": X[..., :8]
    },
    "x must be (..., 16), but is a scalar": {"x": torch.tensor(1.0)},
    "x must have at least 16 bits, but is torch.float8_e4m3fn, in which torch cannot compute; use ": {
        "x": X.to(torch.float8_e4m3fn)
    },
    "x must be a dense (..., 16), but is of the layout torch.sparse_coo; pad it to one shape, and ": {
        "x": X.to_sparse()
    },
    "x must be a dense (..., 16), but is a nested tensor; pad it to one shape, and mark the real ": {
        "x": torch.nested.nested_tensor([X[0], X[1, :3]], layout=torch.jagged)
    },
    "x must be a torch.Tensor, but is of type list": {"x": X.tolist()},
    "context must be a TokenContext, but is of type Tensor; use TokenContext(mask=..., ": {
        "context": MASK
    },
    "TokenContext.mask is on meta, but x is on cpu; use mask.to(x.device)": {
        "mask": MASK.to("meta")
    },
    "TokenContext.mask must have the leading shape of x, (2, 6), but has (1, 6)": {
        "mask": MASK[:1]
    },
    "TokenContext.mask must be a torch.Tensor, but is of type list": {"mask": MASK.tolist()},
    "TokenContext.mask must be bool, True for real tokens, but is torch.int64; use mask.bool()": {
        "mask": MASK.long()
    },
    "TokenContext.token_ids must have the leading shape of x, (2, 6), but has (2, 5)": {
        "token_ids": IDS[:, :5]
    },
    "TokenContext.token_ids must be integers, but is torch.float32; use token_ids.long()": {
        "token_ids": IDS.float()
    },
    "TokenContext.token_ids must be integers, but is torch.bool; use token_ids.long()": {
        "token_ids": IDS > 3
    },
    "TokenContext.sequence_length must be at least 1, but is 0; leave it out if x is ": {
        "sequence_length": 0
    },
    "TokenContext.sequence_length (5) must divide the number of tokens in x (12)": {
        "sequence_length": 5
    },
    "TokenContext.sequence_length must be an int, but is of type float": {"sequence_length": 6.0},
}
"""Sentences, and what differs from a call that is right."""
EVERYWHERE = ("x has width", "context must be")
"""Messages tested on every block; all blocks call one function, so one block is tested with all messages."""


@pytest.mark.parametrize(
    ("name", "message"),
    [(n, m) for n in BLOCKS for m in REJECTED if n == "moe" or m.startswith(EVERYWHERE)],
)
def test_inputs_that_do_not_match_are_rejected_in_one_sentence(name: str, message: str) -> None:
    block, named = build(BLOCKS[name]), ""

    def transform() -> None:
        nonlocal named
        given = {"x": X, "context": None, **REJECTED[message]}
        x, context = given.pop("x"), given.pop("context")
        context = TokenContext(**given) if given else context  # some are rejected here, by no block
        named = f"{type(block).__name__}: "
        block(x, context)

    with pytest.raises((TypeError, ValueError)) as caught:
        transform()
    assert caught.type is (TypeError if "is of type" in message else ValueError)
    assert str(caught.value).startswith(named + message)
    assert "\n" not in str(caught.value)


@every_block
def test_matching_inputs_are_accepted(config: Any) -> None:
    block = build(config)
    for dtype in (torch.int64, torch.int32, torch.uint8):
        context = TokenContext(mask=MASK, token_ids=IDS.to(dtype), sequence_length=6)
        assert block(X, context).hidden.shape == X.shape
        flat = TokenContext(MASK.flatten(), IDS.flatten().to(dtype), sequence_length=6)
        assert block(X.flatten(0, 1), flat).hidden.shape == (12, D_MODEL)


def test_experts_are_replayed_for_a_single_vector() -> None:
    block = build_ffn({"type": "moe", "num_experts": 4}, D_MODEL)
    context = TokenContext(expert_ids=torch.tensor([3, 1]))
    routing = block(torch.randn(D_MODEL), context).routing
    assert routing is not None
    assert routing.expert_ids_N.tolist() == [3, 1]


def test_a_context_may_be_rebuilt_around_anything() -> None:
    # As torch does, which maps its tensors to other things and back.
    context = TokenContext(MASK, IDS, sequence_length=6)
    kinds = pytree.tree_map(type, context)
    assert (kinds.mask, kinds.token_ids, kinds.sequence_length) == (Tensor, Tensor, int)


# ---------------------------------------------------------------------------------------- dtypes


def sentence(x: torch.dtype, weights: torch.dtype) -> str:
    text = f"x is {x}, but this block's weights are {weights}; use x.to({weights})"
    if torch.float64 not in (x, weights):
        text += ", or torch.autocast, which converts both"
    return f"^{re.escape(text)}$"


def both_ways(block: nn.Module, x: Tensor) -> list[Tensor]:
    """A step of training, and the continuation of one sequence by one token."""
    trained = block.train()(x, TokenContext(token_ids=some_ids(*x.shape[:-1]))).hidden
    with torch.no_grad():
        decoded = block.eval()(x[:1, :1], TokenContext(token_ids=some_ids(1, 1))).hidden
    return [trained, decoded]


@pytest.mark.parametrize("decodes", [False, True], ids=["training", "decoding"])
@pytest.mark.parametrize("name", [name for name in BLOCKS if name not in WEIGHTLESS])
def test_tokens_of_another_dtype_than_the_weights_are_rejected(name: str, decodes: bool) -> None:
    x = X[:1, :1] if decodes else X
    context = TokenContext(token_ids=some_ids(*x.shape[:-1]))
    for x_dtype, weights in DTYPES:
        block = build(BLOCKS[name]).to(weights).train(not decodes)
        with (
            torch.set_grad_enabled(not decodes),
            pytest.raises(ValueError, match=sentence(x_dtype, weights)),
        ):
            block(x.to(x_dtype), context)


@every_block
def test_autocast_takes_both(config: Any) -> None:
    for weights in (torch.float32, torch.bfloat16):
        block = build(config).to(weights)
        for x_dtype in (torch.float32, torch.bfloat16):
            with torch.autocast("cpu", torch.bfloat16):
                for hidden in both_ways(block, X.to(x_dtype)):
                    assert hidden.dtype == x_dtype
                    assert hidden.isfinite().all()


@pytest.mark.parametrize("config", ["swiglu", "moe"])
def test_float64_under_autocast_is_rejected(config: str) -> None:
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ValueError, match=sentence(torch.float64, torch.float32)),
    ):
        build(config)(X.double())


def test_integer_weights_have_separate_dtype_rules() -> None:
    class Quantised(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.scale = 100
            weight = (linear.weight.detach() * self.scale).round().to(torch.int8)
            self.weight = nn.Parameter(weight, requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.weight.to(x.dtype).T / self.scale)

    block: Any = build("dense")
    expected = block(X).hidden
    block.up, block.down = Quantised(block.up), Quantised(block.down)
    torch.testing.assert_close(block(X).hidden, expected, rtol=0, atol=0.1)
    assert block(X.bfloat16()).hidden.dtype == torch.bfloat16


# ---------------------------------------------------------------------------------------- widths


@pytest.mark.parametrize(
    ("d_model", "message"),
    [
        ("16", "d_model must be a whole number, got '16'"),
        (True, "d_model must be a whole number, got True"),
        (0, "d_model must be at least 1, got 0"),
        (10**12, "d_model must be at most 1000000000, got 1000000000000"),
    ],
    ids=str,
)
def test_invalid_widths_are_rejected(d_model: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        build_ffn("moe", d_model)
