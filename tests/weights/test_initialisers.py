"""Models initialised from trained ones match the theory, in float64."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any, cast

import pytest
import torch
from torch import Generator, Tensor

from moe_ffn import ConfigError, DecoderConfig, build_ffn
from moe_ffn.ffn.base import FFNBlock
from moe_ffn.ffn.moe import MoEConfig, MoEFFN
from moe_ffn.ffn.networks import hidden_units, networks
from moe_ffn.model.decoder import Decoder
from moe_ffn.weights import (
    CarveConfig,
    InitialiserConfig,
    MergeConfig,
    MixConfig,
    PruneConfig,
    UpcycleConfig,
    carve,
    merge_experts,
    prune_experts,
    upcycle,
)
from moe_ffn.weights.carve import most_active, partition_units
from moe_ffn.weights.initialiser import block_inputs
from moe_ffn.weights.prune import group_experts, observe_use

D, F, E, VOCAB, LENGTH = 8, 24, 8, 32, 16

DENSE: dict[str, dict[str, Any]] = {
    "dense": {"type": "dense", "d_ff": F, "bias": True},
    "swiglu": {"type": "swiglu", "d_ff": F},
    "geglu": {"type": "geglu", "d_ff": F, "bias": True},
}

RENORMALISED: dict[str, dict[str, Any]] = {
    "renormalised": {"type": "top_k", "k": 4, "renormalize": True},
    "after": {"type": "top_k", "k": 4, "softmax": "after", "scale": 2.5},
    "sigmoid": {"type": "sigmoid_top_k", "k": 4, "scale": 2.5},
    "noisy": {"type": "noisy_top_k", "k": 4},
}


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def as_moe(block: Any) -> MoEFFN:
    assert isinstance(block, MoEFFN)
    return block


def block_of(options: dict[str, Any], seed: int = 0) -> FFNBlock:
    torch.manual_seed(seed)
    return build_ffn(options, D).double().eval()


def tokens(count: int = 64, seed: int = 1) -> Tensor:
    return torch.randn(1, count, D, dtype=torch.float64, generator=seeded(seed))


def moe_options(dense: dict[str, Any], router: dict[str, Any], shards: int = 1) -> MoEConfig:
    experts: dict[str, Any] = {**dense, "d_ff": F // shards}
    if dense["type"] == "dense":
        experts |= {"type": "mlp"}
    return MoEConfig.model_validate({"num_experts": E, "router": router, "experts": experts})


def decoder_of(ffn: Any, seed: int = 0, num_layers: int = 2, **options: Any) -> Decoder:
    torch.manual_seed(seed)
    sizes = {"d_model": D, "num_layers": num_layers, "attention": {"num_heads": 2}}
    config = DecoderConfig.model_validate({**sizes, "ffn": ffn, **options})
    return config.build(VOCAB, LENGTH).double().eval()


def ids(count: int = 6, seed: int = 3) -> Tensor:
    return torch.randint(VOCAB, (count, LENGTH), generator=seeded(seed))


def logits(decoder: Decoder) -> Tensor:
    with torch.no_grad():
        return decoder(ids()).logits


def assert_same(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


# -- upcycling


@pytest.mark.parametrize(
    ("dense", "router", "shards"),
    [
        *product(DENSE, ["renormalised"], [1, 2, 4]),
        *(("geglu", router, 2) for router in [*RENORMALISED][1:]),
    ],
)
def test_an_upcycled_block_computes_what_the_dense_one_does(
    dense: str, router: str, shards: int
) -> None:
    source = block_of(DENSE[dense])
    config = moe_options(DENSE[dense], RENORMALISED[router], shards)
    made = upcycle([source], config, D, seeded())

    output = made(tokens())

    assert_same(output.hidden, source(tokens()).hidden)
    assert output.routing is not None
    chosen_TK = output.routing.expert_ids_N.view(-1, 4).sort(dim=-1).values
    whole_TK = (chosen_TK[:, ::shards, None] + torch.arange(shards)).flatten(1)
    assert torch.equal(chosen_TK, whole_TK), "a token does not go to whole copies"
    assert len(chosen_TK.unique()) == E, "no token goes to some of the experts"


def test_weights_that_differ_between_tokens_keep_the_function_in_the_mean() -> None:
    source = block_of(DENSE["swiglu"])
    config = moe_options(DENSE["swiglu"], {"type": "top_k", "k": 2})
    x = tokens(4000)
    wanted, found = source(x).hidden, upcycle([source], config, D, seeded())(x).hidden

    assert (found - wanted).norm() > 0.05 * wanted.norm()
    times_T = (found * wanted).sum(-1) / wanted.square().sum(-1)
    assert times_T.mean().item() == pytest.approx(1, abs=0.02)


def test_upcycling_takes_a_token_table_of_any_vocabulary() -> None:
    router = {"type": "top_k", "k": 2, "renormalize": True, "token_table": {"vocab_size": VOCAB}}
    source = decoder_of(DENSE["swiglu"])
    method = UpcycleConfig.model_validate({"num_experts": 4, "router": router})
    assert_same(logits(method.initialise([source], None, seeded())), logits(source))


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_drop_upcycling_redraws_a_share_of_the_units(share: float) -> None:
    width = 400
    dense = {"type": "swiglu", "d_ff": width}
    source = block_of(dense)
    with torch.no_grad():
        source.get_parameter("up.weight").add_(0.5)
    router = RENORMALISED["renormalised"]
    config = MoEConfig.model_validate({"num_experts": 4, "router": router, "experts": dense})
    experts: Any = as_moe(upcycle([source], config, D, seeded(), share)).experts

    kept_by_expert: list[Tensor] = []
    for expert in range(4):
        kept = []
        for name in ("gate", "up", "down"):
            units_FD = getattr(experts, name)[expert]
            old_FD = source.get_parameter(f"{name}.weight")
            kept.append((units_FD == old_FD).all(dim=0 if name == "down" else 1))
            assert units_FD.mean().item() == pytest.approx(old_FD.mean().item(), abs=0.02)
            assert units_FD.std().item() == pytest.approx(old_FD.std().item(), rel=0.06)
        assert torch.equal(kept[0], kept[1])
        assert torch.equal(kept[0], kept[2])
        assert int(kept[0].sum()) == round((1 - share) * width)
        kept_by_expert.append(kept[0])
    if share == 0.25:
        assert not torch.equal(kept_by_expert[0], kept_by_expert[1]), "experts drop the same units"


def test_the_layers_that_are_named_become_sparse_and_the_source_stays() -> None:
    source = decoder_of(DENSE["swiglu"], num_layers=4)
    before = copy.deepcopy(source.state_dict())
    made = UpcycleConfig(layers="1::2", granularity=2, num_experts=6).initialise(
        [source], None, seeded()
    )

    assert [ffn.type for ffn in made.config.layer_ffns()] == ["swiglu", "moe", "swiglu", "moe"]
    assert_same(logits(made), logits(source))
    rebuilt = made.config.build(VOCAB, LENGTH).double()
    rebuilt.load_state_dict(made.state_dict())
    assert_same(logits(rebuilt.eval()), logits(made))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
    for name, value in source.state_dict().items():
        assert torch.equal(value, before[name]), f"{name} of the source was changed"


# -- mixing


def test_mixing_copies_of_one_model_is_that_model() -> None:
    source = decoder_of(DENSE["geglu"])
    made = MixConfig().initialise([source] * 3, None, seeded())

    assert_same(logits(made), logits(source))


def test_mixing_takes_experts_from_each_and_the_mean_of_the_rest() -> None:
    sources = [decoder_of(DENSE["dense"], seed) for seed in range(3)]
    made = MixConfig().initialise(sources, None, seeded())

    state = made.state_dict()
    for expert, source in enumerate(sources):
        own = source.state_dict()
        for matrix in ("up", "down"):
            experts = state[f"layers.1.ffn.experts.{matrix}"]
            assert torch.equal(experts[expert], own[f"layers.1.ffn.{matrix}.weight"])
    for name in ("embedding.weight", "layers.0.attention.query.weight", "layers.1.ffn_norm.weight"):
        mean = sum(source.state_dict()[name] for source in sources) / 3
        torch.testing.assert_close(state[name], mean)


def test_mixing_takes_the_mean_of_layers_that_are_sparse_already() -> None:
    sparse = {"type": "moe", "num_experts": 4}
    sources = [decoder_of(DENSE["swiglu"], seed, ffn_at={"1": sparse}) for seed in range(2)]
    state = MixConfig().initialise(sources, None, seeded()).state_dict()

    assert state["layers.0.ffn.experts.down"].shape[0] == 2
    name = "layers.1.ffn.experts.down"
    torch.testing.assert_close(state[name], sum(s.state_dict()[name] for s in sources) / 2)
    with pytest.raises(ConfigError, match="no layer of these models has a dense or a gated block"):
        MixConfig().initialise([decoder_of(sparse)] * 2, None, seeded())


# -- carving


def carved_with(k: int, num_shared: int) -> CarveConfig:
    return CarveConfig(num_experts=4, num_shared=num_shared, k=k, active_units=4)


@pytest.mark.parametrize("num_shared", [0, 2])
def test_a_carved_block_with_every_expert_on_is_the_dense_one(num_shared: int) -> None:
    source = decoder_of(DENSE["swiglu"])
    every = carved_with(4, num_shared).initialise([source], ids(), seeded())
    some = carved_with(1, num_shared).initialise([source], ids(), seeded())

    assert_same(logits(every), logits(source))
    assert (logits(some) - logits(source)).abs().max() > 1e-4
    per_layer = 3 * D * F  # units are shared out, none twice; a router has two rows and a slope
    assert sum(p.numel() for p in every.parameters()) == sum(
        p.numel() for p in source.parameters()
    ) + 2 * 4 * (2 * D + 1)
    assert every.config.ffn.num_params(D) == per_layer + 4 * (2 * D + 1)


def test_the_router_of_a_carved_block_is_a_unit_of_each_expert() -> None:
    dense = block_of(DENSE["swiglu"])
    (units,) = hidden_units(dense, tokens())
    partition = partition_units(most_active(units.activations_NF, 4), 4, 2)
    config = carved_with(2, 2).target(dense.config, D, 0)  # pyright: ignore[reportArgumentType]
    routing = carve(dense, config, D, partition, seeded())(tokens()).routing

    assert routing is not None
    assert routing.logits_TE is not None
    units_TE = units.activations_NF[:, partition.experts_EM[:, 0]].abs()
    torch.testing.assert_close(routing.logits_TE, units_TE)
    chosen = routing.expert_ids_N.view(-1, 2).sort().values
    assert torch.equal(chosen, units_TE.topk(2).indices.sort().values)
    assert torch.equal(routing.weights_N, torch.ones_like(routing.weights_N))


def test_units_that_are_active_together_are_one_expert_and_those_always_active_shared() -> None:
    # Units 0, 5 for all tokens; of the rest, those of a class for the tokens of that class.
    classes = {0: (1, 6, 9), 1: (2, 3, 11), 2: (4, 7, 10)}
    active_TF = torch.zeros(30, 11 + 1, dtype=torch.bool)
    active_TF[:, [0, 5, 8]] = True
    for token in range(30):
        active_TF[token, list(classes[token % 3])] = True
    partition = partition_units(active_TF, num_experts=3, num_shared=1)

    assert sorted(partition.shared.tolist()) == [0, 5, 8]
    found = sorted(tuple(sorted(units)) for units in partition.experts_EM.tolist())
    assert found == sorted(classes.values())
    assert most_active(torch.tensor([[0.1, -3.0, 2.0, 0.0]]), 2).tolist() == [
        [False, True, True, False]
    ]


# -- pruning


def moe_of(router: dict[str, Any], bias: Tensor | None = None, **more: Any) -> MoEFFN:
    experts = {"type": "swiglu", "d_ff": 6, "bias": True}
    router = {**router, "bias": True}
    block = as_moe(
        block_of({"type": "moe", "num_experts": 6, "router": router, "experts": experts, **more})
    )
    with torch.no_grad():
        block.router.get_parameter("projection.bias").copy_(
            torch.zeros(len(block.router.expert_rows()["projection.bias"]))
            if bias is None
            else bias
        )
    return block


def with_experts(block: MoEFFN, num_experts: int, router: Any) -> MoEConfig:
    options = {"num_experts": num_experts, "router": router, "experts": block.experts.config}
    return MoEConfig.model_validate(options)


NEVER = torch.tensor([0.0, -50.0, 0.0, 0.0, -50.0, 0.0])
"""Bias of the router's logits that keeps experts 1 and 4 from being chosen."""


@pytest.mark.parametrize("router", RENORMALISED)
def test_pruning_experts_that_are_never_chosen_leaves_the_function(router: str) -> None:
    block = moe_of({**RENORMALISED[router], "k": 2}, NEVER)
    config = with_experts(block, 4, block.router.config)
    made = prune_experts(block, config, D, torch.tensor([0, 2, 3, 5]), seeded())

    assert_same(made(tokens()).hidden, block(tokens()).hidden)


MOE = {
    "type": "moe",
    "num_experts": 6,
    "router": {"type": "top_k", "k": 2, "renormalize": True},
    "experts": {"type": "swiglu", "d_ff": 6},
    "shared_expert": {"type": "swiglu", "d_ff": 4},
    "zero_computation": {"num_zero": 1, "num_constant": 1},
}


@pytest.mark.parametrize(
    "method", [PruneConfig(num_experts=6), MergeConfig(num_experts=6)], ids=["prune", "merge"]
)
def test_methods_that_keep_every_expert_change_nothing(method: InitialiserConfig) -> None:
    source = decoder_of(MOE)
    made = method.initialise([source], ids(), seeded())

    assert_same(logits(made), logits(source))


def test_experts_keep_a_default_width() -> None:
    source = decoder_of({"type": "moe", "num_experts": 6, "zero_computation": {"num_copy": 2}})
    made = PruneConfig(num_experts=4).initialise([source], ids(), seeded())

    widths = [networks(as_moe(layer.ffn)) for d in (source, made) for layer in d.layers]
    assert len({weights.d_ff for weights in widths if weights is not None}) == 1


def test_reap_is_the_mean_of_weight_times_norm_over_the_tokens_of_an_expert() -> None:
    source = decoder_of(MOE, num_layers=1)
    block = as_moe(source.layers[0].ffn)
    x_TD = torch.cat([x for x, _ in block_inputs(source, 0, ids())]).flatten(0, 1)
    sums, counts = torch.zeros(6, dtype=torch.float64), torch.zeros(6)
    experts: Any = block.experts
    for x in x_TD:
        routing = block(x[None, None]).routing
        assert routing is not None
        for expert, weight in zip(routing.expert_ids_N, routing.weights_N, strict=True):
            if expert < 6:
                hidden = torch.nn.functional.silu(experts.gate[expert] @ x) * (
                    experts.up[expert] @ x
                )
                sums[expert] += weight * (experts.down[expert] @ hidden).norm()
                counts[expert] += 1

    counts_E, reap_E = observe_use(source, 0, block, ids())

    assert counts_E.tolist() == counts.tolist()
    assert_same(reap_E, sums / counts.clamp(min=1))
    for by, score in (("reap", reap_E), ("frequency", counts_E)):
        made = PruneConfig.model_validate({"num_experts": 4, "by": by}).initialise(
            [source], ids(), seeded()
        )
        kept = score.topk(4).indices.sort().values
        left: Any = as_moe(made.layers[0].ffn).experts
        assert torch.equal(left.down, experts.down[kept]), by


# -- merging


def permuted_copies(block: MoEFFN, groups: list[list[int]], *, rows: bool) -> None:
    """Make the experts of each group the first of it with its units in another order."""
    weights = networks(block)
    assert weights is not None
    with torch.no_grad():
        for group in groups:
            for expert in group[1:]:
                order = torch.randperm(weights.d_ff, generator=seeded(expert))
                both = torch.cat([order, order + weights.d_ff])
                for value in weights.without_adapters:
                    assert value is not None
                    value[expert] = value[group[0]]
                weights.up_EHD[expert] = weights.up_EHD[group[0]][both]
                assert weights.up_bias_EH is not None
                weights.up_bias_EH[expert] = weights.up_bias_EH[group[0]][both]
                weights.down_EDF[expert] = weights.down_EDF[group[0]][:, order]
                if rows:
                    for row in block.router.expert_rows().values():
                        row[expert] = row[group[0]]


@pytest.mark.parametrize(
    ("groups", "k", "rows"),
    [([[0, 1, 2, 3, 4, 5]], 2, False), ([[0, 3], [1, 5], [2, 4]], 1, True)],
    ids=["all equal", "k per group"],
)
def test_merging_equal_experts_leaves_the_function(
    groups: list[list[int]], k: int, rows: bool
) -> None:
    block = moe_of({"type": "top_k", "k": 4, "softmax": "after"})
    permuted_copies(block, groups, rows=rows)
    merged = [[0, 2, 4], [1, 3, 5]] if len(groups) == 1 else groups
    router = {"type": "top_k", "k": 2, "bias": True, "softmax": "after"}
    config = with_experts(block, len(merged), router)
    made = merge_experts(block, config, D, merged, torch.arange(6), seeded())

    assert_same(made(tokens()).hidden, block(tokens()).hidden)


def test_merged_weights_are_the_mean_by_how_often_experts_were_chosen() -> None:
    block = moe_of({"type": "top_k", "k": 2, "renormalize": True})
    weights, router = networks(block), block.router.expert_rows()["projection.weight"]
    assert weights is not None
    with torch.no_grad():  # alike enough for units to keep their places
        weights.up_EHD[1:] = weights.up_EHD[0] + torch.arange(1, 6).double().view(-1, 1, 1) * 1e-3
        weights.down_EDF[1:] = weights.down_EDF[0]
    target = with_experts(block, 2, block.router.config)
    counts = torch.tensor([3, 1, 0, 0, 0, 0])
    made = as_moe(merge_experts(block, target, D, [[0, 1], [2, 3, 4, 5]], counts, seeded()))

    found = networks(made)
    assert found is not None
    assert_same(found.up_EHD[0], 0.75 * weights.up_EHD[0] + 0.25 * weights.up_EHD[1])
    assert_same(found.up_EHD[1], weights.up_EHD[2:].mean(dim=0))
    rows = made.router.expert_rows()["projection.weight"]
    assert_same(rows[0], 0.75 * router[0] + 0.25 * router[1])


def test_experts_follow_the_one_that_the_router_scores_alike() -> None:
    logits_TE = torch.tensor([[1.0, 0, 0.9, 0.1], [2, 0, 2.1, 0], [0, 3, 0.1, 2.0]]).double()
    groups = group_experts(torch.tensor([9, 8, 1, 2]), logits_TE.t() @ logits_TE, 2)

    assert groups == [[0, 2], [1, 3]]


# -- mistakes


GROUPS = {"num_groups": 3, "keep": 2}


@pytest.mark.parametrize(
    ("method", "ffn", "message"),
    [
        ({"type": "upcycle"}, "identity", "layer 0 is of type 'identity', which no type of expert"),
        ({"type": "upcycle", "layers": "7"}, "swiglu", r"method.layers \(7\) selects none of the 2"),
        ({"type": "upcycle", "layers": "a"}, "swiglu", "method.layers 'a' must be a layer"),
        ({"type": "upcycle", "granularity": 5}, "swiglu", r"method.granularity \(5\) must .* \(24\)"),
        ({"type": "upcycle", "granularity": 4}, "swiglu", r"method.router.k \(2\) must be .* use 4"),
        ({"granularity": 2, "num_experts": 7}, "swiglu", r"method.num_experts \(7\) must be a multiple of"),
        ({"num_experts": 1}, "swiglu", r"method.router.k \(2\) must not exceed num_experts \(1\)"),
        ({"router": "expert_choice"}, "swiglu", r"method: layer 0 \('moe'\) is not causal: router"),
        ({"type": "carve"}, "dense", "carve needs swiglu .* layer 0 is of type 'dense'"),
        ({"type": "carve", "num_experts": 5}, "swiglu", r"\(5\) and method.num_shared \(2\) .* \(24\)"),
        ({"type": "prune"}, "swiglu", "no layer of this model is of type 'moe'; use upcycle"),
        ({"type": "prune", "num_experts": 7}, "moe", r"method.num_experts \(7\) must not .* \(6\)"),
        ({"type": "prune", "num_experts": 1}, "moe", r"layer 0: router.k .* \(1\); keep another number$"),
        ({"type": "merge", "num_experts": 2}, "groups", "router.k .* .2.; keep another number$"),
        ({"type": "prune", "num_experts": 2}, "hash", "HashRouter has no row for each expert"),
        ({"type": "prune"}, "latent", "type 'latent' in layer 0 have no separate outputs; use random"),
        ({"type": "merge"}, "latent", "type 'latent' have no units that can be aligned; use prune"),
        ({"type": "merge", "num_experts": 4}, "keys", "layer 0, of type 'product_key', scores only a few"),
        ({"type": "prune"}, "chain", "experts of type 'chain_of_experts' cannot be removed"),
    ],
)  # fmt: skip
def test_mistakes_are_named(method: dict[str, Any], ffn: str, message: str) -> None:
    blocks: dict[str, Any] = {
        **DENSE,
        "identity": "identity",
        "moe": {"type": "moe", "num_experts": 6},
        "hash": {"type": "moe", "num_experts": 6, "router": "hash"},
        "keys": {"type": "moe", "num_experts": 9, "router": "product_key"},
        "latent": {"type": "moe", "num_experts": 6, "experts": {"type": "latent", "width": 4}},
        "groups": {
            "type": "moe",
            "num_experts": 9,
            "router": {"type": "top_k", "k": 4, "groups": GROUPS},
        },
        "chain": {"type": "chain_of_experts", "ffn": {"type": "moe", "num_experts": 6}},
    }
    with pytest.raises(ConfigError, match=message):
        InitialiserConfig.model_validate({"type": "upcycle", **method}).initialise(
            [decoder_of(blocks[ffn])], ids(), seeded()
        )


def test_pruning_and_merging_keep_the_experts_that_process_every_token() -> None:
    router = {"type": "top_k", "k": 2, "num_always": 1}
    source: Any = decoder_of({"type": "moe", "num_experts": 6, "router": router})
    for layer in source.layers:
        layer.ffn.experts.down.data[-1] *= 0.01  # the least important by its output
    pruned = PruneConfig(num_experts=4).initialise([source], ids(), seeded())
    for before, after in zip(source.layers, pruned.layers, strict=True):
        assert torch.equal(before.ffn.experts.down[-1], cast("Any", after).ffn.experts.down[-1])
    # Expert 2 is most similar to expert 3, which processes every token.
    logits_TE = torch.tensor([[1.0, 0, 0.9, 1.0], [2, 0, 0.1, 0], [0, 3, 0.1, 0.1]]).double()
    products_EE = logits_TE.t() @ logits_TE
    groups = group_experts(torch.tensor([9, 8, 1, 9]), products_EE, 3, num_always=1)
    assert groups == [[0, 2], [1], [3]]


def test_models_that_differ_are_not_mixed() -> None:
    sources = [decoder_of(DENSE["swiglu"]), decoder_of(DENSE["swiglu"], num_layers=3)]
    with pytest.raises(ConfigError, match="num_layers is 2 in model 1 and 3 in model 2"):
        MixConfig().initialise(sources, None, seeded())
