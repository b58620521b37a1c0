"""No registered router sees padding or the future, or lets one broken token spoil others."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_ffn.config.errors import Situation
from moe_ffn.metrics.functional import nonfinite_tokens
from moe_ffn.outputs import SteeredRouting
from moe_ffn.routing import RouterConfig
from moe_ffn.routing.base import Router
from tests.helpers.every_router import (
    BATCH,
    D_MODEL,
    LENGTH,
    MODES,
    NUM_EXPERTS,
    NUM_TOKENS,
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


def is_random(router: Router) -> bool:
    """Return True if another seed gives another routing."""
    first, second = (pairs_by_token(route_batch(router, make_batch(), seed)) for seed in (0, 1))
    return first != second


# --------------------------------------------------------------------------------------- padding


@MODES
@every_router
def test_padding_is_never_computed_and_gets_nothing(router: dict[str, Any], training: bool) -> None:
    layer, mask = build_layer(router).train(training), padded_mask()
    output, routing = call_layer(layer, make_batch(mask=mask))
    padding_N = ~mask.flatten()[routing.token_ids_N]
    assert not (routing.computed_N & padding_N).any()
    assert output.hidden[~mask].count_nonzero() == 0


@MODES
@every_router
def test_what_stands_in_padding_changes_nothing(router: dict[str, Any], training: bool) -> None:
    layer, mask = build_layer(router).train(training), padded_mask()
    batch = make_batch(mask=mask)
    output, routing = call_layer(layer, batch)
    for filling in (1e3, torch.nan, torch.inf):
        other = replace(
            batch,
            x_BSD=batch.x_BSD.masked_fill(~mask.unsqueeze(-1), filling),
            token_ids_BS=batch.token_ids_BS.masked_fill(~mask, -100),
        )
        other_output, other_routing = call_layer(layer, other)
        assert pairs_by_token(other_routing) == pairs_by_token(routing)
        assert torch.equal(other_output.hidden, output.hidden)


@MODES
@every_router
def test_real_tokens_go_where_they_go_without_any_padding(
    router: dict[str, Any], training: bool
) -> None:
    built = build_layer(router).router.train(training)
    if is_random(built):
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
    if is_causal(router):
        assert changed == [[], []]
    elif getattr(config_of(router), "k", None) == NUM_EXPERTS:
        assert not any(changed)  # the kind says so; with k of all experts nobody is passed over
    else:
        assert any(changed)


@every_router
def test_why_a_router_is_not_causal_names_one_that_is(router: dict[str, Any]) -> None:
    why = config_of(router).refusal(Situation(causal=True))
    if why is None:
        return
    match = re.fullmatch(r"type '(\w+)' .+; use '(\w+)'", str(why))
    assert match is not None, why
    assert match[1] == router["type"]
    assert RouterConfig.model_validate(match[2]).refusal(Situation(causal=True)) is None


# ----------------------------------------------------------------------- no tokens, and one token


@MODES
@pytest.mark.parametrize(("batch", "length"), [(0, 5), (2, 0), (0, 0)])
@every_router
def test_no_tokens_pass_and_leave_zero_gradients(
    router: dict[str, Any], batch: int, length: int, training: bool
) -> None:
    layer = build_layer(router).train(training)
    output, routing = call_layer(layer, make_batch(batch, length))
    assert output.hidden.shape == (batch, length, D_MODEL)
    check_well_formed(routing, 0)
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
    logits = next(iter(scores_of(routing).values()))
    positive = (logits > 0).any().item()
    assert routing.real_N.any() or (isinstance(routing, SteeredRouting) and not positive)


@MODES
@every_router
def test_padding_alone_passes(router: dict[str, Any], training: bool) -> None:
    layer = build_layer(router).train(training)
    mask = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    output, routing = call_layer(layer, make_batch(mask=mask))
    check_well_formed(routing, NUM_TOKENS)
    assert output.hidden.count_nonzero() == 0
    assert routing.num_real_tokens == 0


# ---------------------------------------------------------------------------------------- a NaN


def with_broken_token(batch: Batch, value: float) -> tuple[Batch, torch.Tensor]:
    """A batch in which one value of one token is broken, and the mask of the others."""
    x_BSD = batch.x_BSD.clone()
    x_BSD[0, 3, 1] = value
    others_BS = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    others_BS[0, 3] = False
    return replace(batch, x_BSD=x_BSD), others_BS


@MODES
@every_router
def test_shapes_do_not_depend_on_the_data(router: dict[str, Any], training: bool) -> None:
    built = build_layer(router).router.train(training)
    masks = (None, padded_mask(), torch.zeros(BATCH, LENGTH, dtype=torch.bool))
    batches = [make_batch(seed=seed, mask=mask) for seed in (0, 1) for mask in masks]
    assert len({route_batch(built, batch).weights_N.shape for batch in batches}) == 1


@MODES
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
@every_router
def test_one_broken_token_changes_no_other_token(
    router: dict[str, Any], value: float, training: bool
) -> None:
    layer = build_layer(router).train(training)
    broken, others_BS = with_broken_token(make_batch(), value)
    output, routing = call_layer(layer, broken)
    # Where tokens are compared, a broken one stands aside as padding does.
    clean = make_batch() if is_causal(router) else replace(broken, mask_BS=others_BS)
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
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
@every_router
def test_nothing_but_broken_tokens_ends_with_experts_in_range(
    router: dict[str, Any], value: float, training: bool
) -> None:
    layer = build_layer(router).train(training)
    batch = make_batch()
    output, routing = call_layer(layer, replace(batch, x_BSD=torch.full_like(batch.x_BSD, value)))
    assert output.hidden.shape == batch.x_BSD.shape
    assert ((routing.expert_ids_N >= 0) & (routing.expert_ids_N < NUM_EXPERTS)).all()
    assert (routing.token_ids_N.diff() >= 0).all()


@MODES
@every_router
def test_tokens_that_are_all_alike_are_served(router: dict[str, Any], training: bool) -> None:
    layer = build_layer(router).train(training)
    for value in (0.0, 1.0, 1e30):
        batch = make_batch()
        alike = replace(batch, x_BSD=torch.full_like(batch.x_BSD, value))
        check_well_formed(route_batch(layer.router, alike), NUM_TOKENS)
