"""Options around the experts: what they read and return, in which space, how parts join; by plain loops."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ffn import FFNBlock, TokenContext, build_ffn
from moe_ffn.ffn import FFNConfig
from moe_ffn.ffn.networks import memories, networks
from moe_ffn.kernels.select import refusal
from moe_ffn.weights.upcycle import as_experts
from tests.helpers.refusing import refuses

D, E = 8, 4
SHARED = {"shared_expert": {"type": "swiglu", "d_ff": 6}}
OPTIONS: dict[str, dict[str, Any]] = {
    "weights_at_input": {"weights_at": "input"},
    "weights_at_input_shared": {"weights_at": "input", **SHARED},
    "latent": {"latent": {"width": 6}},
    "latent_bias": {"latent": {"width": 6, "bias": True}, **SHARED},
    "output_bias": {"output_bias": True},
    "experts_input": {"norms": {"experts_input": {}}},
    "each_expert": {"norms": {"each_expert": {"eps": 0.1}}},
    "each_expert_before": {"norms": {"each_expert": {"scale": "before", "eps": 0.1}}},
    "routed_and_output": {"norms": {"routed": {}, "output": {"scale": "before"}}},
    "gemma": {
        "norms": {
            place: {"eps": 1e-3}
            for place in ("experts_input", "routed", "shared_input", "shared", "output")
        },
        **SHARED,
    },
    "average_k1": {"combine": {"type": "average", "k": 1.0}, **SHARED},
    "all": {
        "weights_at": "input",
        "latent": {"width": 6, "bias": True},
        "norms": {"experts_input": {}, "each_expert": {}, "output": {}},
        "output_bias": True,
        "capacity": {"eval_factor": 0.75},
        "zero_computation": {"num_copy": 1},
        **SHARED,
    },
}
CONFIGS = {
    name: {
        "type": "moe",
        "num_experts": E,
        "router": {"type": "top_k", "k": 2},
        "experts": {"type": "mlp", "d_ff": 12, "bias": True},
        **options,
    }
    for name, options in OPTIONS.items()
}


def normed(moe: Any, place: str, x: Tensor) -> Tensor:
    config = getattr(moe.config.norms, place)
    if config is None:
        return x
    scale = getattr(moe.norms, place).weight
    x = x * scale if config.scale == "before" else x
    y = x / (x.square().mean(-1, keepdim=True) + config.eps).sqrt()
    return y if config.scale == "before" else y * scale


def reference(moe: Any, x_TD: Tensor) -> Tensor:
    """The block in plain loops; which pairs are computed is taken from it."""
    routing = moe(x_TD).routing
    config, experts = moe.config, moe.experts
    rows = []
    for t, x_D in enumerate(x_TD):
        inner = x_D if config.latent is None else moe.latent.into(x_D)
        inner = normed(moe, "experts_input", inner)
        y, copied = torch.zeros_like(inner), torch.zeros_like(x_D)
        for n in (routing.token_ids_N == t).nonzero().flatten().tolist():
            e, weight = int(routing.expert_ids_N[n]), routing.weights_N[n]
            if routing.dropped_N[n]:
                continue
            if e == E:
                copied = copied + weight * x_D
                continue
            read = weight * inner if config.weights_at == "input" else inner
            hidden = torch.nn.functional.gelu(experts.up[e] @ read + experts.up_bias[e])
            returned = normed(moe, "each_expert", experts.down[e] @ hidden + experts.down_bias[e])
            y = y + (returned if config.weights_at == "input" else weight * returned)
        y = y if config.latent is None else moe.latent.out_of(y)
        rows.append(normed(moe, "routed", y) + copied)
    y_TD = torch.stack(rows)
    if moe.shared_expert is not None:
        shared = moe.shared_expert(normed(moe, "shared_input", x_TD)).hidden
        shared = normed(moe, "shared", shared)
        y_TD = (y_TD + shared) / 2 if config.combine.type == "average" else y_TD + shared
    y_TD = normed(moe, "output", y_TD)
    return y_TD if moe.output_bias is None else y_TD + moe.output_bias


def built(config: dict[str, Any], backend: str = "auto") -> Any:
    torch.manual_seed(0)
    experts = {**config["experts"], "backend": backend}
    moe = build_ffn({**config, "experts": experts}, D).double().eval()
    with torch.no_grad():
        for parameter in moe.parameters():  # biases and scales too
            parameter.add_(0.2 * torch.randn_like(parameter))
    return moe


@pytest.mark.parametrize("backend", ["cpu", "loop"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_output_and_every_gradient_equal_plain_loops(
    config: dict[str, Any], backend: str, gradients: Any
) -> None:
    moe = built(config, backend)
    other = copy.deepcopy(moe)
    x_TD = torch.randn(7, D, dtype=torch.float64)
    x, x_other = (x_TD.clone().requires_grad_() for _ in range(2))

    y_TD, expected_TD = moe(x).hidden, reference(other, x_other)

    torch.testing.assert_close(y_TD, expected_TD, rtol=0, atol=1e-12)
    found, expected = gradients(moe, x, y_TD), gradients(other, x_other, expected_TD)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-11, msg=name)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_config_knows_its_size_and_what_padding_holds_reaches_nothing(
    config: dict[str, Any],
) -> None:
    moe, validated = built(config), FFNConfig.model_validate(config)
    assert validated.num_params(D) == sum(p.numel() for p in moe.parameters())
    x_BSD = torch.randn(2, 4, D, dtype=torch.float64)
    mask = torch.ones(2, 4, dtype=torch.bool)
    mask[0, 2:] = False
    broken = x_BSD.masked_fill(~mask.unsqueeze(-1), torch.nan)
    moe(broken, TokenContext(mask=mask)).hidden[mask].sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in moe.parameters())
    plain = {"output_bias", "average_k1"}
    has_networks = config in [CONFIGS[name] for name in plain]
    assert (networks(moe) is not None) == has_networks
    assert bool(memories(moe, x_BSD)) == has_networks


def test_a_latent_space_makes_experts_and_their_products_narrower() -> None:
    config = FFNConfig.model_validate(CONFIGS["latent"])
    moe = built(CONFIGS["latent"])
    assert moe.experts.up.shape == (E, 12, 6)
    # The router, two projections, and for two experts two matrices.
    expected = 2 * (D * E + 2 * D * 6 + 2 * 2 * 6 * 12)
    assert config.flops_per_token(D, 16) == expected


def test_noise_of_the_block_reaches_router_and_experts_alike() -> None:
    moe = built({**CONFIGS["output_bias"], "jitter": 0.3}).train()
    x_TD = torch.randn(5, D, dtype=torch.float64)
    torch.manual_seed(3)
    y_TD = moe(x_TD).hidden
    torch.manual_seed(3)
    noisy_TD = x_TD * torch.empty_like(x_TD).uniform_(0.7, 1.3)
    assert torch.equal(moe.eval()(noisy_TD).hidden, y_TD)
    assert not torch.equal(moe(x_TD).hidden, y_TD)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "norm_of_no_shared_expert": (
        {"norms": {"shared": {}}},
        "norms.shared is of a shared expert, but shared_expert is null; give it one, such as 'swiglu', or "
        "leave norms.shared out",
    ),
    "two_noises": (
        {"jitter": 0.1, "router": {"type": "top_k", "jitter": 0.2}},
        "jitter (0.1) reaches the router too, which has router.jitter (0.2) of its own; set one of them "
        "to 0",
    ),
    "two_limits": (
        {"capacity": {"factor": 1.25, "per_sequence": 4}},
        "capacity: factor (1.25) and per_sequence (4) both limit an expert; set one of them to null",
    ),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_options_that_contradict_each_other_are_refused(
    options: dict[str, Any], message: str
) -> None:
    refuses(lambda: build_ffn({"type": "moe", **options}, D), message)


def weights(block: FFNBlock) -> Any:
    found = networks(block)
    assert found is not None
    return found.parameters


@pytest.mark.parametrize("kind", ["clamped_swiglu", "soft_capped_swiglu"])
def test_dense_blocks_have_the_gates_of_experts(kind: str) -> None:
    """One expert of weight 1 is the dense block with its weights."""
    options: dict[str, Any] = {"type": kind, "d_ff": 6, "bias": True}
    options |= {"limit": 0.3, "added": 0.5} if kind[:7] == "clamped" else {"gate_cap": 0.3}
    dense: Any = build_ffn(options, D).double()
    config = FFNConfig.model_validate(options)
    experts = as_experts(config, D)
    assert experts is not None
    assert experts.type == kind
    only = {"type": "moe", "num_experts": 1, "router": {"type": "top_k", "k": 1}}
    moe: Any = build_ffn({**only, "experts": experts.to_dict()}, D).double()
    for ours, theirs in zip(weights(moe), weights(dense), strict=True):
        ours.data.copy_(theirs)
    x_TD = torch.randn(5, D, dtype=torch.float64)
    torch.testing.assert_close(moe(x_TD).hidden, dense(x_TD).hidden, rtol=0, atol=1e-12)
    assert config.num_params(D) == sum(p.numel() for p in dense.parameters())


@pytest.mark.parametrize(
    ("experts", "gate"),
    [
        (
            {"type": "clamped_swiglu", "alpha": 1.0, "limit": 7.0, "added": 0.0},
            "ClampedGate(alpha=1.0, limit=7.0, added=0.0, after=False)",
        ),
        ({"type": "soft_capped_swiglu"}, "SoftCappedSwiGLU(gate_cap=7.0, up_cap=7.0)"),
    ],
)
def test_a_backend_without_a_kernel_for_a_gate_says_so(experts: Any, gate: str) -> None:
    moe: Any = build_ffn({"type": "moe", "experts": experts}, D)
    known = networks(moe)
    assert known is not None
    assert refusal("triton", torch.zeros(1, D), known) == (
        f"has no kernel for the gate {gate}; use 'auto'"
    )
