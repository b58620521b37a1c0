"""Kinds of experts that hold experts, and blocks that hold a block, against plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ffn import ConfigError, FFNBlock, TokenContext, build_ffn
from moe_ffn.ffn import FFNConfig
from moe_ffn.ffn.moe import MoEFFN
from moe_ffn.ffn.networks import hidden_units, networks
from moe_ffn.kernels.select import BACKENDS
from moe_ffn.weights.upcycle import as_experts

D, E = 8, 4
Options = dict[str, Any]
MLP: Options = {"type": "mlp", "d_ff": 12, "bias": True}
DENSE: Options = {"type": "swiglu", "d_ff": 6}
SHARED: Options = {"shared_expert": DENSE}


def moe(experts: Options | None = None, **options: Any) -> Options:
    router = {"type": "top_k", "k": 2}
    return {"type": "moe", "num_experts": E, "router": router, "experts": experts or MLP, **options}


def around(kind: str, experts: Options = MLP, **options: Any) -> Options:
    """Experts of a kind that holds experts."""
    return {"type": kind, "experts": experts, **options}


CONFIGS: dict[str, Options] = {
    "input_weighted": moe(around("input_weighted")),
    "input_weighted-shared": moe(around("input_weighted"), **SHARED),
    "latent": moe(around("latent", width=6)),
    "latent-bias": moe(around("latent", width=6, bias=True), **SHARED),
    "latent-normed": moe(around("latent", around("normed", output={}), width=6), **SHARED),
    "experts-input": moe(around("normed", input={})),
    "experts-each": moe(around("normed", each={"eps": 0.1})),
    "experts-each-before": moe(around("normed", each={"scale": "before", "eps": 0.1})),
    "experts-output": moe(around("normed", output={})),
    "norms-around-latent": moe(
        around("normed", around("latent", width=6), input={}, each={}, output={})
    ),
    "biased": {"type": "biased", "ffn": moe()},
    "normed": {"type": "normed", "ffn": moe(), "input": {}, "output": {"scale": "before"}},
    "gemma": {
        "type": "normed",
        "output": {"eps": 1e-3},
        "ffn": moe(
            around("normed", input={"eps": 1e-3}, output={"eps": 1e-3}),
            shared_expert={"type": "normed", "input": {}, "output": {}, "ffn": DENSE},
        ),
    },
    "average-k1": moe(combine={"type": "average", "k": 1.0}, **SHARED),
    "all": {
        "type": "biased",
        "ffn": {
            "type": "normed",
            "output": {},
            "ffn": moe(
                around(
                    "input_weighted",
                    around("latent", around("normed", input={}, each={}), width=6, bias=True),
                ),
                capacity={"eval_factor": 0.75},
                zero_computation={"num_copy": 1},
                **SHARED,
            ),
        },
    },
}


def normed(norm: Any, x: Tensor) -> Tensor:
    if isinstance(norm, torch.nn.Identity):
        return x
    x = x * norm.weight if norm.scales_first else x
    y = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    return y if norm.scales_first else y * norm.weight


def reference(block: Any, x_TD: Tensor) -> Tensor:
    """The block in plain loops; only the choice of computed pairs is taken from the block."""
    match type(block).__name__:
        case "BiasedFFN":
            return reference(block.ffn, x_TD) + block.bias
        case "NormedFFN":
            return normed(block.output, reference(block.ffn, normed(block.input, x_TD)))
        case "MoEFFN":
            routed_TD = mixture(block, x_TD)
            if block.shared_expert is None:
                return routed_TD
            sum_TD = routed_TD + reference(block.shared_expert, x_TD)
            return sum_TD / 2 if block.config.combine.type == "average" else sum_TD
        case _:
            return block(x_TD).hidden


def mixture(moe: Any, x_TD: Tensor) -> Tensor:
    routing, kinds = moe(x_TD).routing, [moe.experts]
    while hasattr(kinds[-1], "experts"):
        kinds.append(kinds[-1].experts)
    *kinds, mlp = kinds
    names = [type(kind).__name__ for kind in kinds]
    at_input = "InputWeightedExperts" in names
    rows = []
    for t, x_D in enumerate(x_TD):
        inner = x_D
        for kind, name in zip(kinds, names, strict=True):
            inner = kind.into(inner) if name == "LatentExperts" else inner
            inner = normed(kind.input, inner) if name == "NormedExperts" else inner
        y, copied = torch.zeros_like(inner), torch.zeros_like(x_D)
        for n in (routing.token_indices_N == t).nonzero().flatten().tolist():
            e, weight = int(routing.expert_ids_N[n]), routing.weights_N[n]
            if routing.dropped_N[n]:
                continue
            if e == E:
                copied = copied + weight * x_D
                continue
            read = weight * inner if at_input else inner
            hidden = torch.nn.functional.gelu(mlp.up[e] @ read + mlp.up_bias[e])
            returned = mlp.down[e] @ hidden + mlp.down_bias[e]
            for kind, name in zip(kinds, names, strict=True):
                returned = normed(kind.each, returned) if name == "NormedExperts" else returned
            y = y + (returned if at_input else weight * returned)
        for kind, name in reversed([*zip(kinds, names, strict=True)]):
            y = kind.out_of(y) if name == "LatentExperts" else y
            y = normed(kind.output, y) if name == "NormedExperts" else y
        rows.append(y + copied)
    return torch.stack(rows)


def on_backend(options: Any, backend: str) -> Any:
    """The options with their innermost experts on a backend."""
    if not isinstance(options, dict):
        return options
    found = {name: on_backend(value, backend) for name, value in options.items()}
    return {**found, "backend": backend} if options.get("type") == "mlp" else found


def built(config: Options, backend: str = "auto") -> Any:
    torch.manual_seed(0)
    block = build_ffn(on_backend(config, backend), D).double().eval()
    with torch.no_grad():
        for parameter in block.parameters():  # biases and scales too
            parameter.add_(0.2 * torch.randn_like(parameter))
    return block


@pytest.mark.parametrize("backend", ["cpu", "loop"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_output_and_every_gradient_equal_plain_loops(
    config: dict[str, Any], backend: str, assert_equal_with_gradients: Any
) -> None:
    moe, x_TD = built(config, backend), torch.randn(7, D, dtype=torch.float64).requires_grad_()
    assert_equal_with_gradients(moe, x_TD, moe(x_TD).hidden, reference(moe, x_TD))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_parameters_are_counted_and_padding_contents_are_ignored(
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
    has_networks = config == CONFIGS["average-k1"]
    assert (networks(moe) is not None) == has_networks
    shared_alone = config.get("shared_expert") == DENSE
    has_units = has_networks or shared_alone or config == CONFIGS["biased"]
    assert bool(hidden_units(moe, x_BSD)) == has_units


def test_noise_of_the_block_reaches_router_and_experts_alike() -> None:
    moe = built({"type": "jittered", "jitter": 0.3, "ffn": CONFIGS["latent-bias"]}).train()
    x_TD = torch.randn(5, D, dtype=torch.float64)
    torch.manual_seed(3)
    y_TD = moe(x_TD).hidden
    torch.manual_seed(3)
    noisy_TD = x_TD * torch.empty_like(x_TD).uniform_(0.7, 1.3)
    assert torch.equal(moe.eval()(noisy_TD).hidden, y_TD)
    assert not torch.equal(moe(x_TD).hidden, y_TD)


MOVED: dict[str, tuple[Options, str]] = {
    "latent": ({"latent": {"width": 64}}, "experts: {type: latent, width: 64, experts: {...}}"),
    "latent as a number": ({"latent": 16}, "experts: {type: latent, width: 16, experts: {...}}"),
    "weights_at": ({"weights_at": "input"}, "experts: {type: input_weighted, experts: {...}}"),
    "jitter": ({"jitter": 0.1}, "{type: jittered, jitter: 0.1, ffn: {type: moe, ...}}"),
    "output_bias": ({"output_bias": True}, "{type: biased, ffn: {type: moe, ...}}"),
    "norms.each_expert": (
        {"norms": {"each_expert": {"eps": 0.1}, "output": None}},
        "experts: {type: normed, each: {eps: 0.1}, experts: {...}}",
    ),
    "norms.shared": (
        {"norms": {"shared": {}}},
        "shared_expert: {type: normed, output: {}, ffn: {...}}",
    ),
    "norms.output": (
        {"norms": {"output": {}}},
        "{type: normed, output: {}, ffn: {type: moe, ...}}",
    ),
}


@pytest.mark.parametrize("name", MOVED)
def test_an_old_name_is_answered_by_the_new_place(name: str) -> None:
    options, place = MOVED[name]
    with pytest.raises(ConfigError) as caught:
        build_ffn({"type": "chain_of_experts", "ffn": options}, D)
    assert str(caught.value) == f"ffn.{name.split()[0]}: has moved; write {place}"


def test_old_names_with_their_defaults_are_read_from_older_runs() -> None:
    off = {"latent": None, "weights_at": "output", "jitter": 0.0, "output_bias": False}
    older = FFNConfig.model_validate(moe(norms={"each_expert": None}, **off))
    assert older == FFNConfig.model_validate(moe())


def weights(block: FFNBlock) -> Any:
    found = networks(block)
    assert found is not None
    return found.without_adapters


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
def test_a_backend_without_a_kernel_for_a_gate_gives_the_reason(experts: Any, gate: str) -> None:
    moe: Any = build_ffn({"type": "moe", "experts": experts}, D)
    known = networks(moe)
    assert known is not None
    assert BACKENDS["triton"].unsupported_reason(torch.zeros(1, D), known) == (
        f"has no kernel for the gate {gate}; use 'auto'"
    )


def test_the_shared_share_is_of_the_norms_of_both_parts() -> None:
    config = {"type": "moe", "num_experts": 4, "shared_expert": "dense", "combine": "average"}
    moe = build_ffn(config, d_model=8)
    assert isinstance(moe, MoEFFN)
    assert moe.shared_expert is not None
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[1, 3:] = False

    output = moe(x, TokenContext(mask=mask))

    # `average` of two experts and a shared one: each third of the sum is one of them.
    shared_TD = (moe.shared_expert(x).hidden / 3)[mask]
    routed_TD = output.hidden[mask] - shared_TD
    shares_T = shared_TD.norm(dim=-1) / (shared_TD.norm(dim=-1) + routed_TD.norm(dim=-1))
    share = output.shared_shares["routing"]
    torch.testing.assert_close(share, shares_T.mean())
    assert not share.requires_grad


@pytest.mark.parametrize(
    ("around", "names"),
    [("mixture_of_depths", ["inner"]), ("chain_of_experts", ["routing", "round_2"])],
)
def test_a_share_inside_another_block_has_the_name_of_its_routing(
    around: str, names: list[str]
) -> None:
    moe = {"type": "moe", "num_experts": 4, "shared_expert": "dense"}
    block = build_ffn({"type": around, "ffn": moe}, d_model=8)
    output = block(torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0)))
    assert list(output.shared_shares) == names
    assert all(0 < share < 1 for share in output.shared_shares.values())
