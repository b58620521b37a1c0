"""A chain of experts: rounds over the same experts, held to a loop over tokens, rounds and experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ffn import FFNConfig, TokenContext, build_ffn
from moe_ffn.ffn.networks import memories

D, NUM_EXPERTS, ROUNDS = 8, 4, 3
CHAIN: dict[str, Any] = {
    "type": "chain_of_experts",
    "rounds": ROUNDS,
    "ffn": {
        "num_experts": NUM_EXPERTS,
        "router": {"type": "top_k", "k": 2},
        "experts": {"type": "swiglu", "d_ff": 16},
    },
}
SHARED = {**CHAIN, "ffn": {**CHAIN["ffn"], "shared_expert": {"type": "swiglu", "d_ff": 16}}}
NAMES = ["routing", "round_2", "round_3"]


def built(config: dict[str, Any] = CHAIN) -> Any:
    torch.manual_seed(0)
    chain = build_ffn(config, D).double()
    with torch.no_grad():
        for router in chain.routers().values():
            router.get_parameter("projection.weight").mul_(3)  # decided
    return chain


def tokens(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def swiglu(x_D: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    z = gate @ x_D
    return down @ (z / (1 + torch.exp(-z)) * (up @ x_D))


def loop(chain: Any, x_BSD: Tensor, mask_BS: Tensor) -> tuple[Tensor, list[list[set[int]]]]:
    """Return the output of the chain, 0 for padding, and the experts of each token in each round."""
    moe, outputs, taken = chain.ffn, list[Tensor](), list[list[set[int]]]()
    routers = [moe.router, *chain.later_routers]
    for x_D, real in zip(x_BSD.flatten(0, 1), mask_BS.flatten().tolist(), strict=True):
        if not real:
            outputs.append(torch.zeros_like(x_D))
            taken.append([set() for _ in routers])
            continue
        of_rounds = list[set[int]]()
        for router in routers:
            exp_E = torch.exp(router.projection.weight @ x_D)
            score_E = exp_E / exp_E.sum()
            chosen = sorted(range(NUM_EXPERTS), key=lambda e: -score_E[e].item())[:2]
            y_D = torch.zeros_like(x_D)
            for e in chosen:
                weights = (moe.experts.gate[e], moe.experts.up[e], moe.experts.down[e])
                y_D = y_D + score_E[e] * swiglu(x_D, *weights)
            if moe.shared_expert is not None:
                shared = moe.shared_expert
                y_D = y_D + swiglu(x_D, shared.gate.weight, shared.up.weight, shared.down.weight)
            x_D = x_D + y_D
            of_rounds.append(set(chosen))
        outputs.append(x_D)
        taken.append(of_rounds)
    return torch.stack(outputs).view_as(x_BSD), taken


@pytest.mark.parametrize("config", [CHAIN, SHARED], ids=["plain", "shared"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_output_and_every_gradient_equal_the_loop(
    config: dict[str, Any], padded: bool, gradients: Any
) -> None:
    chain, mask = built(config), torch.ones(2, 6, dtype=torch.bool)
    mask[1, 4:] = not padded
    x_loop = tokens(2, 6, D).requires_grad_()
    expected, taken = loop(chain, x_loop, mask)
    wanted = gradients(chain, x_loop, expected)
    chain.zero_grad()

    x = tokens(2, 6, D).requires_grad_()
    output = chain(x, TokenContext(mask=mask))
    torch.testing.assert_close(output.hidden, expected, rtol=1e-12, atol=1e-12)
    got = gradients(chain, x, output.hidden)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=1e-12, atol=1e-12, msg=name)

    assert list(output.routings) == NAMES
    for number, routing in enumerate(output.routings.values()):
        pairs = zip(
            routing.token_ids_N[routing.real_N].tolist(),
            routing.expert_ids_N[routing.real_N].tolist(),
            strict=True,
        )
        assert set(pairs) == {(t, e) for t, rounds in enumerate(taken) for e in rounds[number]}
    assert any(len(set(map(frozenset, rounds))) > 1 for rounds in taken), "rounds choose alike"
    assert list(output.shared_shares) == (NAMES if config is SHARED else [])


def test_recorded_experts_are_those_of_the_first_round() -> None:
    chain, x = built().eval(), tokens(1, 6, D)
    chosen = torch.tensor([[[3, 1]] * 6])
    routings = chain(x, TokenContext(expert_ids=chosen)).routings
    assert torch.equal(routings["routing"].expert_ids_N.view(1, 6, 2), chosen)
    assert not torch.equal(routings["round_2"].expert_ids_N.view(1, 6, 2), chosen)


def test_the_identity_and_its_memories_are_the_output() -> None:
    chain, x = built().eval(), tokens(2, 6, D)
    output = chain(x)
    sums = x.flatten(0, 1).clone()
    found = iter(memories(chain, x))
    for routing in output.routings.values():
        for expert in range(NUM_EXPERTS):
            memory = next(found)
            assert memory.name == f"expert {expert}"
            weights_N = routing.weights_N[routing.expert_ids_N == expert]
            added_ND = weights_N[:, None] * (memory.activations_NF @ memory.values_FD)
            sums.index_add_(0, memory.token_ids_N, added_ND)
    assert next(found, None) is None
    torch.testing.assert_close(sums.view_as(x), output.hidden)


def test_routers_are_told_by_round_with_the_option_of_their_block() -> None:
    infos = FFNConfig.model_validate(SHARED).routers()
    assert list(infos) == NAMES
    assert {replace(info, path="") for info in infos.values()} == {
        replace(infos["routing"], path="")
    }
    assert infos["round_3"].path == "ffn"
    chain = built()
    assert len({id(router) for router in chain.routers().values()}) == ROUNDS
