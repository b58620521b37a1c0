"""Product-key memories and PEER: exact retrieval, gradients, causality, costs, and nothing of the size of E.

T tokens, D model width, E experts, n = sqrt(E) sub-keys, H heads
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from moe_ffn import ConfigError, FFNConfig, TokenContext, build_ffn
from moe_ffn.balancing.losses import BALANCING_LOSSES
from moe_ffn.config import process_memory
from moe_ffn.config.yaml_files import validate
from moe_ffn.metrics import LoadMetrics, PairsOnlyMetrics
from moe_ffn.outputs import PairsOnlyRouting
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.validate import check_layout

D_MODEL, NUM_EXPERTS = 8, 25

FORMS: dict[str, dict[str, Any]] = yaml.safe_load("""
peer: {router: {k: 3, num_heads: 4, d_query: 6, query_norm: {}}, experts: {type: single_neuron}}
peer-sigmoid: {router: {k: 1, num_heads: 2, d_query: 4, score: sigmoid},
  experts: {type: single_neuron, activation: silu}}
product_key_memory: {router: {k: 5, num_heads: 2, d_query: 4, keys: per_head, query_norm: {}},
  experts: {type: value}}
doge: {router: {k: 2, d_query: 0}, experts: {type: single_neuron, activation: silu},
  shared_expert: {type: swiglu, d_ff: 8}}
""")
every_form = pytest.mark.parametrize("form", FORMS)


def config(form: str, num_experts: int = NUM_EXPERTS, **more: Any) -> dict[str, Any]:
    options = FORMS[form]
    router = {"type": "product_key", **options["router"]}
    return {"type": "moe", "num_experts": num_experts, **options, "router": router, **more}


def build(options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return build_ffn(options, D_MODEL).double()


def tokens(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(*shape, D_MODEL, generator=generator, dtype=torch.float64)


# -- the formula


def naive(block: Any, x_D: Tensor) -> tuple[Tensor, list[int]]:
    """One token: scores of all E keys, whole; the k best of a full sort; their experts one by one."""
    router, options = block.router, block.router.config
    n, y_D, chosen = math.isqrt(NUM_EXPERTS), torch.zeros_like(x_D), []
    for head in range(options.num_heads):
        first_nQ, second_nQ = router.sub_keys[head if options.keys == "per_head" else 0]
        if options.d_query:
            size = options.d_query
            query = router.query.weight[head * size : (head + 1) * size] @ x_D
            if options.query_norm is not None:
                norm = (query.square().mean() + options.query_norm.eps).sqrt()
                query = query / norm * router.query_norm.weight
            first, second = query[: size // 2], query[size // 2 :]
        else:
            first = second = x_D
        keys = [(first_nQ[e // n] @ first + second_nQ[e % n] @ second) for e in range(NUM_EXPERTS)]
        scores_E = torch.stack(keys)
        ids = scores_E.sort(descending=True).indices[: options.k].tolist()
        best = scores_E[ids].exp()
        weights = best / best.sum() if options.score == "softmax" else best / (1 + best)
        for e, weight in zip(ids, weights, strict=True):
            y_D = y_D + weight * one_expert(block.experts, e, x_D)
        chosen += ids
    if block.shared_expert is not None:
        y_D = y_D + block.shared_expert(x_D[None]).hidden[0]
    return y_D, chosen


def one_expert(experts: Any, e: int, x_D: Tensor) -> Tensor:
    if experts.config.type == "value":
        return experts.values.weight[e]
    hidden = experts.up.weight[e] @ x_D
    act = {
        "gelu": lambda z: z * (1 + torch.erf(z / math.sqrt(2))) / 2,
        "silu": lambda z: z / (1 + torch.exp(-z)),
    }[experts.config.activation]
    return act(hidden) * experts.down.weight[e]


@every_form
def test_output_and_every_gradient_are_those_of_all_keys(
    form: str, assert_equal_with_gradients: Any
) -> None:
    block, x = build(config(form)), tokens(2, 7).requires_grad_()
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, 4:] = False

    rows = [naive(block, x_D) for x_D in x.flatten(0, 1)]
    expected = torch.stack([y_D for y_D, _ in rows]).view_as(x) * mask.unsqueeze(-1)
    output = block(x, TokenContext(mask=mask))

    assert_equal_with_gradients(block, x, output.hidden, expected)
    pairs = FORMS[form]["router"]
    listed = output.routing.expert_ids_N.view(14, pairs.get("num_heads", 1), pairs["k"])
    for t, (_, ids) in enumerate(rows):
        if mask.flatten()[t]:
            assert listed[t].flatten().tolist() == ids
    assert isinstance(output.routing, PairsOnlyRouting)


@every_form
def test_a_capacity_and_experts_without_a_network_go_with_them(form: str) -> None:
    more = {"capacity": {"factor": 0.5}, "zero_computation": {"num_copy": 2, "num_zero": 7}}
    block = build(config(form, num_experts=NUM_EXPERTS - 9, **more))
    x_BSD = tokens(2, 7)
    output = block(x_BSD)
    routing = output.routing
    assert routing.dropped_N.any()
    expected = torch.zeros_like(x_BSD).flatten(0, 1)
    for n in routing.computed_N.nonzero().flatten().tolist():
        t, e = int(routing.token_indices_N[n]), int(routing.expert_ids_N[n])
        x_D = x_BSD.flatten(0, 1)[t]
        if e < NUM_EXPERTS - 9:
            made = one_expert(block.experts, e, x_D)
        else:
            made = x_D if e >= NUM_EXPERTS - 2 else torch.zeros_like(x_D)
        expected[t] = expected[t] + routing.weights_N[n] * made
    if block.shared_expert is not None:
        expected = expected + block.shared_expert(x_BSD.flatten(0, 1)).hidden
    torch.testing.assert_close(output.hidden.flatten(0, 1), expected, rtol=1e-12, atol=1e-12)


def test_values_are_added_up_in_float32_under_autocast() -> None:
    block, x_TD = build(config("product_key_memory")).float(), tokens(9).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got_TD = block(x_TD).hidden
    torch.testing.assert_close(got_TD, block(x_TD).hidden, rtol=1e-5, atol=1e-6)


def test_experts_of_rows_are_those_of_a_sorted_plan_too() -> None:
    """A soft mixture gives them slots, sorted by expert."""
    torch.manual_seed(0)
    options = {"num_experts": 4, "slots_per_expert": 2, "experts": {"type": "single_neuron"}}
    block: Any = build_ffn({"type": "soft_moe", **options}, D_MODEL).double()
    seen: list[tuple[Tensor, Tensor]] = []
    block.experts.register_forward_hook(lambda _, args, y: seen.append((args[0], y)))
    block(tokens(1, 6))
    slots_ND, got_ND = seen[0]
    rows = [one_expert(block.experts, n // 2, x_D) for n, x_D in enumerate(slots_ND)]
    torch.testing.assert_close(got_ND, torch.stack(rows), rtol=1e-12, atol=1e-12)


# -- costs


@every_form
def test_parameters_and_products_are_those_of_the_built_block(form: str) -> None:
    options = FFNConfig.model_validate(config(form))
    block = build(config(form))
    tables = 1 if form == "product_key_memory" else 2
    assert options.num_params(D_MODEL) == sum(p.numel() for p in block.parameters())
    k = block.router.config.k * block.router.config.num_heads
    idle = (NUM_EXPERTS - k) * tables * D_MODEL
    assert options.num_active_params(D_MODEL) == options.num_params(D_MODEL) - idle
    with FlopCounterMode(display=False) as counter:
        block(tokens(2, 6))
    assert counter.get_total_flops() == 12 * options.flops_per_token(D_MODEL, 6)


def test_a_token_uses_at_most_all_experts() -> None:
    options = config("peer", router={"type": "product_key", "k": 4, "num_heads": 8})
    block = FFNConfig.model_validate(options)
    assert block.num_active_params(D_MODEL) == block.num_params(D_MODEL)


class Sizes(TorchDispatchMode):
    """The largest result of torch whose shape is not one of `allowed`."""

    def __init__(self, allowed: set[torch.Size]) -> None:
        super().__init__()
        self.allowed, self.largest = allowed, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for value in made if isinstance(made, tuple | list) else (made,):
            if isinstance(value, Tensor) and value.shape not in self.allowed:
                self.largest = max(self.largest, value.numel())
        return made


@pytest.mark.parametrize("form", ["peer", "product_key_memory"])
def test_a_step_makes_nothing_of_the_size_of_e_but_gradients(form: str) -> None:
    num_experts = 2**16
    block = build(config(form, num_experts, capacity={"factor": 2.0})).float()
    metrics = PairsOnlyMetrics(num_experts)
    x_BSD = tokens(2, 4).float().requires_grad_()
    names = ("load_balance", "load_balance_sequence", "importance_cv2", "router_z")
    with Sizes({p.shape for p in block.parameters() if len(p) == num_experts}) as step:
        output = block(x_BSD)
        losses = [BALANCING_LOSSES[name].value(output.routings) for name in names]
        assert None not in losses
        (output.hidden.sum() + torch.stack(losses).sum()).backward()  # pyright: ignore
        metrics.update(output.routing)
        metrics.compute()
    num_scores = 2 * 4 * block.router.config.num_heads * 2 * 2**8
    assert step.largest == num_scores, "of 8 tokens' heads, with 2 * 256 sub-keys"
    assert all(p.grad is not None and p.grad.shape == p.shape for p in block.parameters())
    with torch.no_grad(), Sizes(set()) as decoding:  # only rows, of no table
        block(x_BSD[:1, :1])
    assert decoding.largest == max(num_scores // 8, block.router.sub_keys.numel())


@contextmanager
def machine_of(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(process_memory, "memory_limit", lambda: num_bytes)
        yield


def test_a_memory_larger_than_the_machine_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    options = config("peer", 2**14)
    needed = 2**14 * 2 * D_MODEL * 4
    with machine_of(needed, monkeypatch):
        build_ffn(options, D_MODEL)
    with machine_of(needed - 1, monkeypatch):
        with pytest.raises(ConfigError) as raised:
            build_ffn(options, D_MODEL)
        with torch.device("meta"):
            build_ffn(options, D_MODEL)  # to be counted, or put elsewhere
    assert str(raised.value) == (
        "num_experts (16384): experts of type 'single_neuron' and width 8 take 1 MB, and this process may "
        "have 1 MB of memory; lower num_experts or d_model"
    )


def run_of(form: str, **more: Any) -> dict[str, Any]:
    model = {"d_model": D_MODEL, "num_layers": 1, "attention": {"num_heads": 2}}
    return {"model": {**model, "ffn": config(form)}, **more}


@pytest.mark.parametrize("loss", ["load_balance_global", "load_balance_pooled"])
def test_a_loss_over_all_experts_is_rejected_with_the_config(loss: str) -> None:
    with pytest.raises(ConfigError) as raised:
        validate(TrainConfig, run_of("peer", objective={loss: 0.1}))
    assert str(raised.value) == (
        f"objective.{loss} (0.1) needs a score for each expert, but the router 'product_key' of layer 0 "
        "scores only the chosen ones of its 25 experts; use objective.load_balance"
    )


def test_ranks_do_not_divide_rows() -> None:
    with pytest.raises(ConfigError) as raised:
        check_layout(validate(TrainConfig, run_of("peer", parallel={"expert": 5})), 5, "32-true")
    assert str(raised.value) == (
        "model.ffn.experts.type 'single_neuron' looks up table rows for each token, and cannot compute the "
        "tokens of other ranks; set parallel.expert to 1; parallel.shard divides the tables"
    )


def test_metrics_reject_routings_of_the_other_kind() -> None:
    listed, tabled = (
        build(options)(tokens(1, 3)).routing for options in (config("peer"), {"type": "moe"})
    )
    with pytest.raises(
        ValueError,
        match=r"^LoadMetrics takes a routing with .*, but got PairsOnlyRouting; use PairsOnlyMetrics$",
    ):
        LoadMetrics(NUM_EXPERTS).update(listed)
    with pytest.raises(
        ValueError,
        match=r"^PairsOnlyMetrics takes PairsOnlyRouting, .*; use LoadMetrics and TokenMetrics$",
    ):
        PairsOnlyMetrics(8).update(tabled)
