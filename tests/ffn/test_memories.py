"""Hidden units as key-value memories, whose activations times values are the output of a block.

Also a chain of experts: names, routers and hidden units of its rounds; its output is in `test_compositions`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from moe_ffn import FFNConfig, TokenContext, build_ffn
from moe_ffn.ffn import FFNBlock
from moe_ffn.ffn.networks import hidden_units

D, B, S = 8, 2, 6

BLOCKS: dict[str, Any] = yaml.safe_load("""
dense: dense
swiglu: swiglu
conv of one position: {type: conv, kernel_size: 1}
moe: {type: moe, num_experts: 4, experts: {type: mlp}}
hash: {type: moe, num_experts: 4, router: {type: hash, k: 2}}
full experts: {type: moe, num_experts: 4, capacity: {factor: 0.5, eval_factor: 0.5}}
shared expert: {type: moe, num_experts: 4, shared_expert: dense}
clamped: {type: moe, num_experts: 2, experts: {type: clamped_swiglu}}
rounded experts: {type: moe, num_experts: 4, experts: {type: fake_quantized, format: fp8, inputs: fp8,
  experts: {type: swiglu, d_ff: 32}}}
experts without a network: {type: moe, num_experts: 4, zero_computation: {num_zero: 2}}
mixture of depths: {type: mixture_of_depths, ffn: swiglu}
mixture of depths around an moe: {type: mixture_of_depths, ffn: {type: moe, num_experts: 4}}
""")


def built(config: Any) -> FFNBlock:
    torch.manual_seed(0)
    return build_ffn(config, D).double().eval()


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", BLOCKS)
def test_the_output_is_the_sum_of_activations_times_values(name: str, padded: bool) -> None:
    """The sum runs over networks, weighted by the router and by the router of mixture of depths."""
    ffn = built(BLOCKS[name])
    x = torch.randn(B, S, D, dtype=torch.float64)
    mask = torch.ones(B, S, dtype=torch.bool)
    mask[1, 4:] = not padded
    context = TokenContext(mask=mask, token_ids=torch.randint(0, 50, (B, S)))
    with torch.no_grad():
        output = ffn(x, context)
        found = hidden_units(ffn, x, context)

    sums = torch.zeros(B * S, D, dtype=torch.float64)
    for units in found:
        weights = torch.ones(len(units.token_indices_N), dtype=torch.float64)
        routings: list[Any] = list(output.routings.values()) or [None]
        *outer, inner = routings
        if units.name.startswith("expert"):
            chosen = inner.computed_N & (inner.expert_ids_N == int(units.name.split()[1]))
            weights = inner.weights_N[chosen]
        gates = outer if units.name.startswith("expert") else [r for r in [inner] if r is not None]
        for gate in gates if name.startswith("mixture") else []:
            of_token = torch.zeros(B * S, dtype=torch.float64)
            of_token[gate.token_indices_N] = gate.weights_N
            weights = weights * of_token[units.token_indices_N]
        added = weights[:, None] * (units.activations_NF @ units.values_FD)
        sums.index_add_(0, units.token_indices_N, added)
        assert mask.flatten()[units.token_indices_N].all(), "padding came to a network"

    real = mask.flatten()
    torch.testing.assert_close(sums[real], output.hidden.reshape(-1, D)[real])


@pytest.mark.parametrize(("causal", "own"), [(True, 2), (False, 1)])
def test_a_convolution_s_value_is_what_a_unit_adds_at_its_own_position(
    causal: bool, own: int
) -> None:
    ffn: Any = built({"type": "conv", "kernel_size": 3, "causal": causal})
    values_FD = hidden_units(ffn, torch.randn(1, S, D, dtype=torch.float64))[0].values_FD
    hidden = torch.zeros(1, S, 4 * D, dtype=torch.float64)
    hidden[0, 3, 5] = 1

    with torch.no_grad():
        torch.testing.assert_close(ffn.down(hidden, None)[0, 3], values_FD[5])
    assert ffn.down.padding[0] == own


def test_blocks_without_token_units_have_no_memories() -> None:
    x: Tensor = torch.randn(B, S, D, dtype=torch.float64)

    assert hidden_units(built("identity"), x) == []
    assert hidden_units(built("soft_moe"), x) == []


def test_dropout_is_not_part_of_an_activation() -> None:
    ffn = built({"type": "dense", "dropout": 0.5}).train()
    x = torch.randn(B, S, D, dtype=torch.float64)

    torch.testing.assert_close(
        hidden_units(ffn, x)[0].activations_NF, hidden_units(ffn.eval(), x)[0].activations_NF
    )


def test_memories_are_named_after_their_network() -> None:
    ffn = built({"type": "moe", "num_experts": 2, "shared_expert": "dense"})

    found = hidden_units(ffn, torch.randn(B, S, D, dtype=torch.float64))

    assert [units.name for units in found] == ["expert 0", "expert 1", "shared expert"]


# -- a chain of experts

NUM_EXPERTS, ROUNDS = 4, 3
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


def built_chain() -> Any:
    torch.manual_seed(0)
    chain = build_ffn(CHAIN, D).double()
    with torch.no_grad():
        for router in chain.routers().values():
            router.get_parameter("projection.weight").mul_(3)  # decided
    return chain


def tokens(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_recorded_experts_are_those_of_the_first_round() -> None:
    chain, x = built_chain().eval(), tokens(1, 6, D)
    chosen = torch.tensor([[[3, 1]] * 6])
    routings = chain(x, TokenContext(expert_ids=chosen)).routings
    assert torch.equal(routings["routing"].expert_ids_N.view(1, 6, 2), chosen)
    assert not torch.equal(routings["round_2"].expert_ids_N.view(1, 6, 2), chosen)


def test_the_identity_and_its_memories_are_the_output() -> None:
    chain, x = built_chain().eval(), tokens(2, 6, D)
    output = chain(x)
    assert list(output.routings) == NAMES
    sums = x.flatten(0, 1).clone()
    found = iter(hidden_units(chain, x))
    for routing in output.routings.values():
        for expert in range(NUM_EXPERTS):
            units = next(found)
            assert units.name == f"expert {expert}"
            weights_N = routing.weights_N[routing.expert_ids_N == expert]
            added_ND = weights_N[:, None] * (units.activations_NF @ units.values_FD)
            sums.index_add_(0, units.token_indices_N, added_ND)
    assert next(found, None) is None
    torch.testing.assert_close(sums.view_as(x), output.hidden)


def test_routers_are_named_by_round_with_the_path_of_their_block() -> None:
    infos = FFNConfig.model_validate(SHARED).router_infos()
    assert list(infos) == NAMES
    assert {replace(info, path="") for info in infos.values()} == {
        replace(infos["routing"], path="")
    }
    assert infos["round_3"].path == "ffn"
    chain = built_chain()
    assert len({id(router) for router in chain.routers().values()}) == ROUNDS
