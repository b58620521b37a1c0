"""Properties of every registered router: well-formed routings, honest sizes, gradients and dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moe_ffn.outputs import SteeredRouting
from moe_ffn.routing import RouterConfig
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
    make_batch,
    padded_mask,
    pairs_by_token,
    route_batch,
    scores_of,
)


def test_every_registered_router_is_here() -> None:
    assert {router["type"] for router in ROUTERS.values()} == set(RouterConfig.members)


@MODES
@pytest.mark.parametrize("padded", [False, True], ids=["unpadded", "padded"])
@every_router
def test_the_routing_is_well_formed(router: dict[str, Any], padded: bool, training: bool) -> None:
    layer = build_layer(router).train(training)
    output, routing = call_layer(layer, make_batch(mask=padded_mask() if padded else None))
    check_well_formed(routing, NUM_TOKENS)
    assert routing.sequence_length == LENGTH
    assert output.hidden.shape == (BATCH, LENGTH, D_MODEL)
    assert output.hidden.isfinite().all()


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
            # Refused: a single expert would have a constant weight, a table has fewer sub-keys.
            assert num_experts == 1 or config_of(router).is_listed
            continue
        built = config.build(D_MODEL, num_experts).train(training)
        check_well_formed(route_batch(built, make_batch()), NUM_TOKENS, num_experts)


# ----------------------------------------------------------------------------------------- sizes


@every_router
def test_the_config_counts_the_parameters_of_the_module(router: dict[str, Any]) -> None:
    config = config_of(router)
    for d_model, num_experts in ((D_MODEL, NUM_EXPERTS), (24, 16)):
        built = config.build(d_model, num_experts)
        counted = sum(parameter.numel() for parameter in built.parameters())
        assert config.num_params(d_model, num_experts) == counted


@every_router
def test_the_config_counts_the_matrix_products_of_a_training_step(router: dict[str, Any]) -> None:
    built = config_of(router).build(D_MODEL, NUM_EXPERTS).train()
    with FlopCounterMode(display=False) as counter:
        route_batch(built, make_batch())
    flops = config_of(router).flops_per_token(D_MODEL, NUM_EXPERTS)
    assert counter.get_total_flops() == flops * NUM_TOKENS


@MODES
@every_router
def test_experts_per_token_is_the_mean_number_of_chosen_pairs(
    router: dict[str, Any], training: bool
) -> None:
    config = config_of(router)
    told = config.experts_per_token(NUM_EXPERTS)
    routing = route_batch(build_layer(router).router.train(training), make_batch())
    mean = routing.real_N.sum().item() / NUM_TOKENS
    if isinstance(routing, SteeredRouting):
        assert told == routing.target_k  # what a rule aims at; nothing the router keeps to
    elif config.type == "top_p":
        assert 1 <= mean < told
    else:
        assert mean == told


@every_router
def test_the_description_begins_with_the_type(router: dict[str, Any]) -> None:
    assert config_of(router).describe().split()[0] == router["type"]


@every_router
def test_the_config_goes_to_a_dict_and_back(router: dict[str, Any]) -> None:
    config = config_of(router)
    assert RouterConfig.model_validate(config.to_dict()) == config


@every_router
def test_the_state_goes_to_another_router_of_its_kind(router: dict[str, Any]) -> None:
    layer, other = build_layer(router), build_layer(router, seed=1)
    other.load_state_dict(layer.state_dict())
    (output, _), (repeated, _) = call_layer(layer, make_batch()), call_layer(other, make_batch())
    assert torch.equal(output.hidden, repeated.hidden)


# ------------------------------------------------------------------------------------ randomness


@every_router
def test_evaluation_draws_nothing_and_repeats_itself(router: dict[str, Any]) -> None:
    built = build_layer(router).router.eval()
    first = route_batch(built, make_batch(), seed=0)
    before = torch.random.get_rng_state()
    route_batch(built, make_batch(), seed=0)
    assert torch.equal(torch.random.get_rng_state(), before)
    second = route_batch(built, make_batch(), seed=1)
    names = ("token_ids_N", "expert_ids_N", "weights_N", "real_N", *scores_of(first))
    for name in names:
        assert torch.equal(getattr(first, name), getattr(second, name)), name


@every_router
def test_training_repeats_itself_from_the_same_seed(router: dict[str, Any]) -> None:
    built = build_layer(router).router.train()
    first, second = (route_batch(built, make_batch(), seed=3) for _ in range(2))
    assert pairs_by_token(first) == pairs_by_token(second)


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
        values.insert(0, routing.weights_N[routing.real_N])
        return tuple(value for value in values if value is not None and value.requires_grad)

    if not smooth(x):
        assert list(built.parameters()) == []
        return
    assert torch.autograd.gradcheck(smooth, x)


# ---------------------------------------------------------------------------------------- dtypes


@MODES
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@every_router
def test_a_layer_of_another_dtype_keeps_wide_logits(
    router: dict[str, Any], dtype: torch.dtype, training: bool
) -> None:
    layer = build_layer({**router}).train(training).to(dtype)
    batch = make_batch(mask=padded_mask())
    output, routing = call_layer(
        layer, Batch(batch.x_BSD.to(dtype), batch.token_ids_BS, batch.mask_BS)
    )
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
    scores = scores_of(routing)
    assert {value.dtype for value in scores.values()} == {torch.float32}
    for name in (*scores, "weights_N", "expert_ids_N", "real_N"):
        assert torch.equal(getattr(routing, name), getattr(expected, name)), name
