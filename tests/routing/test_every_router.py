"""Properties of every registered router: sizes, gradients, dtypes, padding, causality, broken tokens."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moe_ffn.config.errors import UseCase
from moe_ffn.metrics.functional import nonfinite_tokens
from moe_ffn.outputs import Routing, VariableKRouting
from moe_ffn.routing import ElasticTopKRouterConfig, RouterConfig
from tests.helpers.every_router import (
    BATCH,
    D_MODEL,
    LENGTH,
    MODES,
    NUM_EXPERTS,
    NUM_TOKENS,
    ROUTERS,
    Batch,
    build_layer,
    call_layer,
    check_well_formed,
    config_of,
    every_router,
    is_causal,
    make_batch,
    padded_mask,
    pairs_by_token,
    route_batch,
    scores_of,
)


def assert_same_routing(routing: Routing, expected: Routing) -> None:
    for name in ("token_indices_N", "expert_ids_N", "weights_N", "active_N", *scores_of(expected)):
        assert torch.equal(getattr(routing, name), getattr(expected, name)), name


def test_every_registered_router_is_here() -> None:
    assert {router["type"] for router in ROUTERS.values()} == set(RouterConfig.members)


@every_router
def test_the_config_describes_itself_and_goes_to_a_dict_and_back(router: dict[str, Any]) -> None:
    config = config_of(router)
    assert config.describe().split()[0] == router["type"]
    assert RouterConfig.model_validate(config.to_dict()) == config


@MODES
@every_router
def test_k_of_all_experts_and_a_single_expert_are_served(
    router: dict[str, Any], training: bool
) -> None:
    for num_experts in (1, NUM_EXPERTS):
        options = {**router, "groups": None} if "groups" in router else router
        for key in ("k", "max_k"):
            if key in type(config_of(router)).model_fields:
                options = {**options, key: num_experts}
        try:
            config = config_of(options)
            config.check_num_experts(num_experts)
        except ValueError:
            # Rejected: a single expert would have a constant weight, a table has fewer sub-keys.
            assert num_experts == 1 or config_of(router).is_pairs_only
            continue
        built = config.build(D_MODEL, num_experts).train(training)
        check_well_formed(route_batch(built, make_batch()), NUM_TOKENS, num_experts)


# ----------------------------------------------------------------------------------------- sizes


@every_router
def test_the_config_counts_the_parameters_and_the_matrix_products_of_a_training_step(
    router: dict[str, Any],
) -> None:
    config = config_of(router)
    for d_model, num_experts in ((D_MODEL, NUM_EXPERTS), (24, 16)):
        built = config.build(d_model, num_experts)
        counted = sum(parameter.numel() for parameter in built.parameters())
        assert config.num_params(d_model, num_experts) == counted
    built = config.build(D_MODEL, NUM_EXPERTS).train()
    with FlopCounterMode(display=False) as counter:
        route_batch(built, make_batch())
    flops = config.flops_per_token(D_MODEL, NUM_EXPERTS)
    assert counter.get_total_flops() == flops * NUM_TOKENS


@MODES
@every_router
def test_experts_per_token_is_the_mean_number_of_chosen_pairs(
    router: dict[str, Any], training: bool
) -> None:
    config = config_of(router)
    told = config.experts_per_token(NUM_EXPERTS)
    routing = route_batch(build_layer(router).router.train(training), make_batch())
    mean = routing.active_N.sum().item() / NUM_TOKENS
    if isinstance(routing, VariableKRouting) and routing.capacity_k is not None:
        assert told == routing.capacity_k  # the aim of a rule, or the most there can be
        assert mean < told or config.type != "top_p"
    elif training and isinstance(config, ElasticTopKRouterConfig):
        assert mean in range(config.k_min, config.k_max + 1)  # drawn: test_router_options
    else:
        assert mean == told


# ------------------------------------------------------------------------------------ randomness


@every_router
def test_evaluation_draws_nothing_and_training_repeats_itself_from_the_same_seed(
    router: dict[str, Any],
) -> None:
    built = build_layer(router).router.eval()
    first = route_batch(built, make_batch(), seed=0)
    before = torch.random.get_rng_state()
    route_batch(built, make_batch(), seed=0)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert_same_routing(route_batch(built, make_batch(), seed=1), first)
    built.train()
    first, second = (route_batch(built, make_batch(), seed=3) for _ in range(2))
    assert_same_routing(second, first)


# ------------------------------------------------------------------------------------- gradients


@MODES
@every_router
def test_every_parameter_of_the_router_learns_from_the_output(
    router: dict[str, Any], training: bool
) -> None:
    layer = build_layer(router).train(training)
    output, _ = call_layer(layer, make_batch())
    output.hidden.square().sum().backward()
    for name, parameter in layer.router.named_parameters():
        if name == "noise.weight" and not training:
            continue  # there is no noise
        assert parameter.grad is not None, name
        assert parameter.grad.norm() > 1e-4, name


@MODES
@every_router
def test_weights_and_scores_have_the_gradient_of_finite_differences(
    router: dict[str, Any], training: bool
) -> None:
    if training and router["type"] == "sparse_mixer":
        pytest.skip("its gradient in training is that of more than it returns: test_router_options")
    built = build_layer(router).router.train(training).double()
    batch = make_batch(batch=1, length=4)
    x = batch.x_BSD.double().requires_grad_()

    def smooth(x_BSD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        routing = route_batch(built, Batch(x_BSD, batch.token_ids_BS))
        more = ("scores_TE", "selection_probs_TE", "logits_N")
        values = [getattr(routing, name, None) for name in more]
        values.insert(0, routing.weights_N[routing.active_N])
        return tuple(value for value in values if value is not None and value.requires_grad)

    if not smooth(x):
        assert list(built.parameters()) == []
        return
    assert torch.autograd.gradcheck(smooth, x, fast_mode=True)


# ---------------------------------------------------------------------------------------- dtypes


@MODES
@every_router
def test_a_layer_of_another_dtype_keeps_wide_logits(router: dict[str, Any], training: bool) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        layer = build_layer({**router}).train(training).to(dtype)
        batch = make_batch(mask=padded_mask())
        output, routing = call_layer(layer, replace(batch, x_BSD=batch.x_BSD.to(dtype)))
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert {value.dtype for value in scores_of(routing).values()} == {wide}
        assert routing.weights_N.dtype == wide
        assert output.hidden.dtype == dtype
        check_well_formed(routing, NUM_TOKENS)


@MODES
@every_router
def test_autocast_changes_no_bit_of_the_routing(router: dict[str, Any], training: bool) -> None:
    built = build_layer(router).router.train(training)
    expected = route_batch(built, make_batch())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing = route_batch(built, make_batch())
    assert {value.dtype for value in scores_of(routing).values()} == {torch.float32}
    assert_same_routing(routing, expected)


# --------------------------------------------------------------------------------------- padding


@MODES
@every_router
def test_padding_is_never_computed_and_its_content_changes_nothing(
    router: dict[str, Any], training: bool
) -> None:
    layer, mask = build_layer(router).train(training), padded_mask()
    batch = make_batch(mask=mask)
    output, routing = call_layer(layer, batch)
    check_well_formed(routing, NUM_TOKENS)
    assert not (routing.computed_N & ~mask.flatten()[routing.token_indices_N]).any()
    assert output.hidden[~mask].count_nonzero() == 0
    for filling in (1e3, torch.nan, torch.inf):
        x_BSD = batch.x_BSD.masked_fill(~mask.unsqueeze(-1), filling)
        ids_BS = batch.token_ids_BS.masked_fill(~mask, -100)
        other_output, other_routing = call_layer(layer, Batch(x_BSD, ids_BS, mask))
        assert pairs_by_token(other_routing) == pairs_by_token(routing)
        assert torch.equal(other_output.hidden, output.hidden)


@MODES
@every_router
def test_real_tokens_go_where_they_go_without_any_padding(
    router: dict[str, Any], training: bool
) -> None:
    built = build_layer(router).router.train(training)
    other_seed = route_batch(built, make_batch(), seed=1)
    if pairs_by_token(other_seed) != pairs_by_token(route_batch(built, make_batch())):
        pytest.skip("the noise of a token depends on how many stand before it")
    mask = padded_mask()
    padded = pairs_by_token(route_batch(built, make_batch(mask=mask)))
    kept = [pairs for pairs, real in zip(padded, mask.flatten().tolist(), strict=True) if real]

    whole = make_batch()
    config = config_of(router)
    if getattr(config, "among", None) == "sequence":  # whose groups are the sequences
        sequences = [[0], [1]]
    else:
        sequences = [[0, 1]]
    expected = []
    for rows in sequences:
        x = whole.x_BSD[rows][mask[rows]].unsqueeze(0)
        ids = whole.token_ids_BS[rows][mask[rows]].unsqueeze(0)
        expected += pairs_by_token(route_batch(built, Batch(x, ids)))
    for got, wanted in zip(kept, expected, strict=True):
        assert got == pytest.approx(wanted, rel=1e-5)  # products of other shapes round otherwise


# ------------------------------------------------------------------------------------- causality


def futures_that_change_the_past(router: dict[str, Any], training: bool) -> list[int]:
    """The positions from which on other tokens change an earlier token's pairs or weights."""
    built = build_layer(router).router.train(training)
    batch = make_batch()
    before = pairs_by_token(route_batch(built, batch))
    found = []
    for start in range(1, LENGTH):
        for seed in (1, 2):
            other = make_batch(seed=seed)
            x_BSD, token_ids_BS = batch.x_BSD.clone(), batch.token_ids_BS.clone()
            x_BSD[:, start:] = 3 * other.x_BSD[:, start:]
            token_ids_BS[:, start:] = other.token_ids_BS[:, start:]
            after = pairs_by_token(route_batch(built, Batch(x_BSD, token_ids_BS)))
            earlier = [t for t in range(NUM_TOKENS) if t % LENGTH < start]
            if any(before[t] != after[t] for t in earlier):
                found.append(start)
    return found


@every_router
def test_a_router_is_called_causal_exactly_when_no_later_token_changes_an_earlier_one(
    router: dict[str, Any],
) -> None:
    changed = [futures_that_change_the_past(router, training) for training in (True, False)]
    why = config_of(router).unsupported(UseCase(causal=True))
    if why is None:
        assert changed == [[], []]
        return
    match = re.fullmatch(r"type '(\w+)' .+; use '(\w+)'", str(why))
    assert match is not None, why
    assert match[1] == router["type"]
    assert is_causal({"type": match[2]})
    if getattr(config_of(router), "k", None) == NUM_EXPERTS:
        assert not any(changed)  # the kind says so; with k of all experts none is skipped
    else:
        assert any(changed)


# ----------------------------------------------------------------------- no tokens, and one token


@MODES
@every_router
def test_no_tokens_and_only_padding_pass_and_leave_zero_gradients(
    router: dict[str, Any], training: bool
) -> None:
    layer = build_layer(router).train(training)
    for batch, length in ((0, 5), (2, 0), (0, 0), (2, 3)):
        mask = torch.zeros(batch, length, dtype=torch.bool)
        output, routing = call_layer(layer, make_batch(batch, length, mask=mask))
        assert output.hidden.shape == (batch, length, D_MODEL)
        assert output.hidden.count_nonzero() == 0
        check_well_formed(routing, batch * length)
        assert routing.num_real_tokens == 0
        layer.zero_grad()
        (output.hidden * 2).sum().backward()
        for name, parameter in layer.named_parameters():
            if name == "router.noise.weight" and not training:
                continue
            assert parameter.grad is not None, name
            assert parameter.grad.count_nonzero() == 0, name


@MODES
@every_router
def test_one_token_goes_to_at_least_one_expert_or_chose_none(
    router: dict[str, Any], training: bool
) -> None:
    layer = build_layer(router).train(training)
    output, routing = call_layer(layer, make_batch(1, 1))
    check_well_formed(routing, 1)
    assert output.hidden.isfinite().all()
    if not routing.active_N.any():
        threshold = getattr(layer.router, "threshold_E", 0)
        assert isinstance(routing, VariableKRouting)
        assert routing.logits_TE is not None
        assert (routing.logits_TE <= threshold).all()


# ---------------------------------------------------------------------------------------- a NaN


@MODES
@every_router
def test_shapes_do_not_depend_on_the_data(router: dict[str, Any], training: bool) -> None:
    built = build_layer(router).router.train(training)
    masks = (None, padded_mask(), torch.zeros(BATCH, LENGTH, dtype=torch.bool))
    batches = [make_batch(seed=seed, mask=mask) for seed in (0, 1) for mask in masks]
    assert len({route_batch(built, batch).weights_N.shape for batch in batches}) == 1


@MODES
@every_router
def test_one_broken_token_changes_no_other_token(router: dict[str, Any], training: bool) -> None:
    layer, batch = build_layer(router).train(training), make_batch()
    others_BS = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    others_BS[0, 3] = False
    for value in (torch.nan, torch.inf, -torch.inf):
        broken = replace(batch, x_BSD=batch.x_BSD.clone())
        broken.x_BSD[0, 3, 1] = value
        output, routing = call_layer(layer, broken)
        # Where tokens are compared, a broken one stands aside as padding does.
        clean = batch if is_causal(router) else replace(broken, mask_BS=others_BS)
        expected, expected_routing = call_layer(layer, clean)
        others = others_BS.flatten().nonzero().flatten().tolist()
        pairs, expected_pairs = pairs_by_token(routing), pairs_by_token(expected_routing)
        assert [pairs[t] for t in others] == [expected_pairs[t] for t in others]
        assert output.hidden[others_BS].isfinite().all()
        # The experts multiply the same rows, in blocks that may differ by one.
        torch.testing.assert_close(output.hidden[others_BS], expected.hidden[others_BS])
        if router["type"] != "hash":  # which has no logits to show it
            assert nonfinite_tokens(routing) == 1


@MODES
@every_router
def test_tokens_that_are_all_alike_are_served(router: dict[str, Any], training: bool) -> None:
    built, batch = build_layer(router).router.train(training), make_batch()
    for value in (0.0, 1.0, 1e30, torch.nan, torch.inf):
        routing = route_batch(built, replace(batch, x_BSD=torch.full_like(batch.x_BSD, value)))
        assert ((routing.expert_ids_N >= 0) & (routing.expert_ids_N < NUM_EXPERTS)).all()
        assert (routing.token_indices_N.diff() >= 0).all()
        if math.isfinite(value):
            check_well_formed(routing, NUM_TOKENS)
