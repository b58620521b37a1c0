"""A block amid hostile tokens and surroundings computes what it does without, or refuses in one sentence."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from moe_ffn import FFNBlock, FFNOutput, TokenContext
from tests.helpers.hostile_blocks import (
    BLOCKS,
    D_MODEL,
    REAL,
    SHAPE,
    assert_all_close,
    build,
    build_on,
    context,
    every_backend,
    every_block,
    gradients,
    run,
    tokens,
)

# ------------------------------------------------------------------------- tokens that are broken


@pytest.mark.parametrize("value", [math.nan, math.inf, 3e38, 1e-44], ids=str)
@every_backend
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # of triton's interpreter
def test_one_broken_token_changes_nothing_of_the_others(backend: str, value: float) -> None:
    block = build_on(backend)
    found: list[tuple[Tensor, Tensor]] = []
    for first in (0.5, value):
        x = tokens()
        x[0, 3] = first
        hidden = block(x.requires_grad_()).hidden
        (grad,) = torch.autograd.grad(hidden.square().sum(), x)
        found.append((hidden.detach(), grad))
    others = torch.ones(SHAPE, dtype=torch.bool)
    others[0, 3] = False
    for whole, broken in zip(*found, strict=True):
        torch.testing.assert_close(broken[others], whole[others], rtol=1e-5, atol=1e-6)


@every_backend
def test_an_expert_of_nan_spoils_its_own_tokens_alone(backend: str) -> None:
    block, x = build_on(backend), tokens().requires_grad_()
    whole = block(x)
    with torch.no_grad():
        block.experts.down[1] = math.nan
    hidden = block(x).hidden
    ids_N = whole.routing.token_ids_N[whole.routing.expert_ids_N == 1]
    mine_T = torch.zeros(12, dtype=torch.bool).index_fill(0, ids_N, True)
    assert 0 < len(ids_N) < 12
    others = ~mine_T.view(SHAPE)
    torch.testing.assert_close(hidden[others], whole.hidden[others])
    assert hidden[~others].isnan().all()
    (grad,) = torch.autograd.grad(hidden[others].square().sum(), x)
    assert grad[others].isfinite().all()


@every_block
def test_a_nan_in_the_padding_reaches_no_gradient(name: str) -> None:
    block = build(BLOCKS[name])
    found: list[dict[str, Tensor]] = []
    for padding in (0.0, math.nan):
        x = tokens().masked_fill(~REAL.unsqueeze(-1), padding).requires_grad_()
        found.append(gradients(block, x, run(block, x, context(REAL))[REAL]))
        found[-1]["x"] = found[-1]["x"][REAL]
    assert_all_close(found[1], found[0])


class Squares(FFNBlock):
    """A block of somebody's own, which knows nothing of padding."""

    def forward(self, x: Tensor, context: TokenContext | None = None) -> FFNOutput:
        return FFNOutput(x * x)


@pytest.mark.parametrize("inner", ["swiglu", "dense", "conv", "moe", "own"])
def test_what_overflows_in_a_block_that_it_does_not_pass_stays_zero(inner: str) -> None:
    block: Any = build({"type": "mixture_of_depths", "ffn": "dense" if inner == "own" else inner})
    if inner == "own":
        block.ffn = Squares()
    x, mask = tokens(), torch.ones(SHAPE, dtype=torch.bool)
    mask[1, 3:] = False  # so that the second sequence is filled up with tokens that were not chosen
    x[1, 2] = 1e38 * block.get_parameter("router.projection.weight")[0].detach().sign().neg()
    torch.manual_seed(0)
    output = block(x.requires_grad_(), TokenContext(mask))
    assert (output.hidden[1, 2] == 0).all()
    assert all(grad.isfinite().all() for grad in gradients(block, x, output.hidden).values())


@every_block
def test_sequences_flattened_by_the_caller_stay_apart(name: str) -> None:
    block, x = build(BLOCKS[name]), tokens()
    for mask in (None, REAL):
        flat_mask = None if mask is None else mask.flatten()
        flat = TokenContext(flat_mask, torch.arange(12), sequence_length=6)
        apart = run(block, x, context(mask))
        together = run(block, x.flatten(0, 1), flat).view_as(apart)
        torch.testing.assert_close(together[REAL], apart[REAL])


@pytest.mark.slow
@every_block
def test_memory_that_x_shares_or_skips_changes_nothing(name: str) -> None:
    block = build(BLOCKS[name]).eval()
    wide = tokens(2, 6, seed=3).repeat_interleave(2, dim=-1)
    kinds = {
        "stride 2": wide[..., ::2],
        "expanded": tokens(1, 1).expand(*SHAPE, -1),
        "negative": torch.complex(wide, wide).conj().imag[..., ::2],
        "transposed": tokens(6, 2).transpose(0, 1),
    }
    for kind, x in kinds.items():
        plain = x.clone(memory_format=torch.contiguous_format).resolve_neg()
        torch.testing.assert_close(run(block, x), run(block, plain), msg=kind)
    one = tokens(1, 1).requires_grad_()
    hidden = run(block, one.expand(*SHAPE, -1))
    many = one.detach().expand(*SHAPE, -1).clone().requires_grad_()
    wanted = gradients(block, many, run(block, many))
    assert_all_close(
        gradients(block, one, hidden), {**wanted, "x": wanted["x"].sum((0, 1), keepdim=True)}
    )


# ----------------------------------------------------------------- what happens between the calls


@pytest.mark.slow
@every_backend
def test_an_output_may_be_written_into(backend: str) -> None:
    block, x = build_on(backend), tokens().requires_grad_()
    written = block(x).hidden
    written += x
    written *= 2
    assert_all_close(gradients(block, x, written), gradients(block, x, (block(x).hidden + x) * 2))


@every_backend
def test_tokens_that_were_overwritten_before_backward_are_noticed(backend: str) -> None:
    block, leaf = build_on(backend), tokens().requires_grad_()
    x = leaf * 1
    hidden = block(x).hidden
    with torch.no_grad():
        x.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(block, leaf, hidden)


FROZEN = ("router.projection.weight", "experts.gate_up", "experts.down", "experts.down_bias")


@pytest.mark.slow
@every_backend
def test_whatever_is_frozen_the_rest_gets_its_gradient(backend: str) -> None:
    whole, x = build_on("loop"), tokens().requires_grad_()
    wanted = gradients(whole, x, run(whole, x))
    for frozen in itertools.product([False, True], repeat=len(FROZEN) + 1):
        block = build_on(backend)
        x = tokens().requires_grad_(not frozen[-1])
        for name, is_frozen in zip(FROZEN, frozen, strict=False):
            block.get_parameter(name).requires_grad_(not is_frozen)
        run(block, x).square().sum().backward()  # the other bias always learns
        got = {"x": x.grad, **{name: p.grad for name, p in block.named_parameters()}}
        for name, is_frozen in zip((*FROZEN, "x"), frozen, strict=True):
            assert (got[name] is None) == is_frozen, (name, frozen)
        learned = {name: grad for name, grad in got.items() if grad is not None}
        assert_all_close(learned, {name: wanted[name] for name in learned})


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
@every_backend
def test_checkpointing_draws_the_same_again(backend: str, reentrant: bool) -> None:
    block = build_on(
        backend,
        router={"type": "noisy_top_k", "k": 2, "jitter": 0.3},
        capacity={"factor": 0.7, "drop": "random"},
        experts={"dropout": 0.3},
    )
    found: list[dict[str, Tensor]] = []
    for recompute in (False, True):
        block.zero_grad()
        x = tokens().requires_grad_()
        torch.manual_seed(4)
        hidden: Any = (
            checkpoint(lambda x: block(x).hidden, x, use_reentrant=reentrant)
            if recompute
            else block(x).hidden
        )
        hidden.square().sum().backward()
        found.append({name: p.grad.clone() for name, p in block.named_parameters()})
        found[-1]["x"] = x.grad  # pyright: ignore[reportArgumentType]
    for name, grad in found[0].items():
        assert torch.equal(found[1][name], grad), name


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "cpu", "grouped_mm", "loop"])
def test_threads_on_one_layer_do_not_meet(backend: str) -> None:
    block = build_on(backend)

    def step(seed: int) -> list[Tensor]:
        x = tokens(3, 7, seed=seed).requires_grad_()
        hidden = block(x).hidden
        grads = torch.autograd.grad(hidden.square().sum(), [x, block.experts.down])
        return [hidden.detach(), *grads]

    alone = [step(seed) for seed in range(16)]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(step, range(16)))
    for one, other in zip(alone, together, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.slow
@every_block
def test_what_is_not_random_draws_nothing(name: str) -> None:
    for training in (False, True):
        block = build(BLOCKS[name]).train(training)
        before = torch.get_rng_state()
        block(tokens(), context())
        draws = not torch.equal(before, torch.get_rng_state())
        assert draws == (training and name in ("moe-noisy_top_k", "moe-sparse_mixer"))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "cpu", "grouped_mm", "loop"])
def test_experts_of_two_layers_and_of_a_formula_get_the_sum_of_both(backend: str) -> None:
    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    one, x = build_on(backend), tokens().requires_grad_()
    two: Any = copy.deepcopy(one)
    two.experts = one.experts
    parametrize.register_parametrization(one.experts, "down", Doubled())
    hidden = one(two(x).hidden).hidden
    (grad,) = torch.autograd.grad(hidden.square().sum(), one.experts.parametrizations.down.original)

    plain: Any = build_on("loop")
    with torch.no_grad():
        plain.experts.down.mul_(2)
    hidden = plain(plain(x).hidden).hidden
    (wanted,) = torch.autograd.grad(hidden.square().sum(), plain.experts.down)
    torch.testing.assert_close(grad, 2 * wanted, rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------------------------ torch around them


@pytest.mark.slow
@every_backend
def test_memory_that_nobody_wrote_is_not_read(backend: str) -> None:
    block = build_on(backend, capacity={"factor": 0.6})
    x = tokens().requires_grad_()
    wanted = gradients(block, x, run(block, x, context(REAL)))
    torch.use_deterministic_algorithms(True)  # which fills all new memory with NaN
    try:
        assert torch.empty(3).isnan().all()
        assert_all_close(gradients(block, x, run(block, x, context(REAL))), wanted)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.slow
@every_block
def test_the_default_device_of_torch_is_not_asked(name: str) -> None:
    block, x = build(BLOCKS[name]), tokens().requires_grad_()
    given = context(REAL)
    wanted = gradients(block, x, run(block, x, given))
    with torch.device("meta"):
        assert_all_close(gradients(block, x, run(block, x, given)), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("router", ["sigmoid_top_k", "top_k"])
def test_the_default_dtype_of_torch_does_not_narrow_a_router(
    router: str, dtype: torch.dtype
) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        block = build({"type": "moe", "router": {"type": router, "correction_bias": True}})
        routing = block(tokens().to(dtype)).routing
    finally:
        torch.set_default_dtype(before)
    assert block.get_buffer("router.correction_bias_E").dtype == torch.float32
    assert routing is not None
    assert routing.logits_TE is not None
    assert routing.logits_TE.dtype == torch.promote_types(dtype, torch.float32)


ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "relu_squared", "sigmoid", "identity")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BLOCKS, "bilinear", *ACTIVATIONS])
def test_a_block_that_has_worked_is_copied_and_pickled(name: str) -> None:
    plain = {"type": "dense", "activation": name} if name in ACTIVATIONS else name
    block, x = build(BLOCKS.get(name, plain)), tokens().requires_grad_()
    run(block, x).sum().backward()
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert torch.equal(run(other, x), run(block, x))
        other.load_state_dict(block.state_dict())


@pytest.mark.parametrize(("name", "other"), [("sigmoid_top_k", "top_k"), ("top_k", "noisy_top_k")])
def test_the_state_of_a_router_with_other_parts_is_refused_by_key(name: str, other: str) -> None:
    one, two = build(BLOCKS[f"moe-{name}"]), build(BLOCKS[f"moe-{other}"])
    for source, target in ((one, two), (two, one)):
        with pytest.raises(RuntimeError, match=r'"router\.(correction_bias_E|noise\.weight)"'):
            target.load_state_dict(source.state_dict())


# ---------------------------------------------------------------------------------- what is refused

X = tokens()
REFUSED: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "length_true": (
        X,
        {"sequence_length": True},
        TypeError,
        "TokenContext.sequence_length must be",
    ),
    "mask_elsewhere": (
        X,
        {"mask": REAL.to("meta")},
        ValueError,
        "TokenContext.mask is on meta, but x is on cpu; use mask.to(x.device)",
    ),
    "ids_elsewhere": (
        X,
        {"token_ids": torch.arange(12).view(SHAPE).to("meta")},
        ValueError,
        "TokenContext.token_ids is on meta, but x is on cpu; use token_ids.to(x.device)",
    ),
    "sparse": (X.to_sparse(), {}, ValueError, "x must be a dense (..., 8), but is of the layout "),
    "jagged": (
        torch.nested.nested_tensor([X[0], X[1, :3]], layout=torch.jagged),
        {},
        ValueError,
        "x must be a dense (..., 8), but is a nested tensor; pad it to one shape",
    ),
    "float8": (X.to(torch.float8_e4m3fn), {}, ValueError, "x must have at least 16 bits, but "),
    "uint16_ids": (
        X,
        {"token_ids": torch.arange(12).view(SHAPE).to(torch.uint16)},
        ValueError,
        "TokenContext.token_ids must be integers, but is torch.uint16; use token_ids.long()",
    ),
}


@pytest.mark.parametrize(("x", "options", "error", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("name", ["dense", "swiglu", "conv", "soft_moe", "moe-hash", "depths"])
def test_what_no_block_can_take_is_refused_in_one_sentence(
    name: str, x: Any, options: Any, error: type[Exception], message: str
) -> None:
    block = build(BLOCKS[name])
    with pytest.raises(error, match=r"^(\w+: )?" + re.escape(message)) as caught:
        block(x, TokenContext(**options))
    assert "\n" not in str(caught.value)
    assert block(X, context()).hidden.shape == (*SHAPE, D_MODEL)
