"""A chain of experts: names, routers and memories of its rounds; its output is in `test_compositions`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

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


def test_recorded_experts_are_those_of_the_first_round() -> None:
    chain, x = built().eval(), tokens(1, 6, D)
    chosen = torch.tensor([[[3, 1]] * 6])
    routings = chain(x, TokenContext(expert_ids=chosen)).routings
    assert torch.equal(routings["routing"].expert_ids_N.view(1, 6, 2), chosen)
    assert not torch.equal(routings["round_2"].expert_ids_N.view(1, 6, 2), chosen)


def test_the_identity_and_its_memories_are_the_output() -> None:
    chain, x = built().eval(), tokens(2, 6, D)
    output = chain(x)
    assert list(output.routings) == NAMES
    sums = x.flatten(0, 1).clone()
    found = iter(memories(chain, x))
    for routing in output.routings.values():
        for expert in range(NUM_EXPERTS):
            memory = next(found)
            assert memory.name == f"expert {expert}"
            weights_N = routing.weights_N[routing.expert_ids_N == expert]
            added_ND = weights_N[:, None] * (memory.activations_NF @ memory.values_FD)
            sums.index_add_(0, memory.token_indices_N, added_ND)
    assert next(found, None) is None
    torch.testing.assert_close(sums.view_as(x), output.hidden)


def test_routers_are_told_by_round_with_the_option_of_their_block() -> None:
    infos = FFNConfig.model_validate(SHARED).router_infos()
    assert list(infos) == NAMES
    assert {replace(info, path="") for info in infos.values()} == {
        replace(infos["routing"], path="")
    }
    assert infos["round_3"].path == "ffn"
    chain = built()
    assert len({id(router) for router in chain.routers().values()}) == ROUNDS
