"""The metrics of every layer over batches, cuts and ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from moe_ffn.training.monitoring import routing_window as routing_by_layer
from moe_ffn.training.monitoring.routing_window import RoutingByLayer, all_gather_scalar, own_rank


def rank_of_two(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """As if another rank had just the same, or a number that is greater by one, in place of a process."""

    def all_reduce(value: Tensor, operation: Any = ReduceOp.SUM) -> None:
        if operation == ReduceOp.SUM:
            value.mul_(2)

    def all_gather(values: list[Tensor], value: Tensor) -> None:
        for other, found in enumerate(values):
            found.copy_(value + other - rank)

    fake = SimpleNamespace(
        is_initialized=lambda: True,
        get_world_size=lambda: 2,
        get_rank=lambda: rank,
        all_reduce=all_reduce,
        all_gather=all_gather,
        ReduceOp=ReduceOp,
    )
    monkeypatch.setattr(routing_by_layer, "distributed", fake)


@pytest.fixture
def layers(make_routing: Any) -> dict[str, Any]:
    """Two layers: one of three tokens to expert 0, and one to expert 1; the other way round."""
    logits = torch.tensor([[4.0, 1.0]] * 4)
    return {
        "layer_00": make_routing([[0], [0], [0], [1]], 2, logits_TE=logits),
        "layer_01": make_routing([[1], [1], [1], [0]], 2, logits_TE=-2 * logits),
    }


def plain(values: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Any]]:
    """Without those that are nan, which equals nothing."""
    return {
        layer: {k: v.tolist() for k, v in found.items() if not v.isnan().any()}
        for layer, found in values.items()
    }


def pairs(found: RoutingByLayer) -> list[int]:
    """Of the first layer, on this rank."""
    return found.sums["layer_00"]["pairs_E"].tolist()


def test_closing_begins_anew(layers: dict[str, Any]) -> None:
    found = RoutingByLayer("every batch")
    found.update(layers)
    assert plain(found.close())["layer_01"]["load"] == [0.25, 0.75]

    found.update({"layer_00": layers["layer_00"], "layer_01": layers["layer_00"]})

    assert plain(found.close())["layer_01"]["load"] == [0.75, 0.25]


def test_two_ranks_with_the_same_batch_measure_the_same_as_one(
    layers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums are doubled and a maximum is not, so that every ratio stays what it was."""
    one, two = (RoutingByLayer("every batch", "last step") for _ in range(2))
    one.update(layers)
    two.update(layers)
    expected = plain(one.close())
    rank_of_two(monkeypatch, rank=0)

    assert plain(two.close()) == expected
    assert expected["layer_01"]["logit_max"] == 8


def test_ranks_exchange_statistics_once(
    layers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank_of_two(monkeypatch, rank=0)
    exchanged: list[Any] = []
    reduce = routing_by_layer.distributed.all_reduce

    def all_reduce(value: Tensor, operation: Any) -> None:
        exchanged.append(operation)
        reduce(value, operation)

    monkeypatch.setattr(routing_by_layer.distributed, "all_reduce", all_reduce)
    found = RoutingByLayer("every batch", "last step", "validation")
    found.update(layers)

    values = found.close()

    assert values.keys() == layers.keys()
    assert values["layer_00"]["load"].tolist() == [0.75, 0.25]
    assert exchanged == [ReduceOp.SUM, ReduceOp.MAX]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_sums_of_ranks_are_resumed_once(
    layers: dict[str, Any], monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    before, after = RoutingByLayer("every batch"), RoutingByLayer("every batch")
    before.update(layers)
    rank_of_two(monkeypatch, rank)

    state = before.state_dict()
    assert state["layer_00"]["pairs_E"].tolist() == [6, 2], "of both ranks"
    assert pairs(before) == [3, 1], "it asked, and changed nothing"
    after.load_state_dict(state)
    after.update(layers)

    expected = [9, 3] if rank == 0 else [3, 1]
    assert pairs(after) == expected


def test_loaded_sums_are_saved_before_any_batch(layers: dict[str, Any]) -> None:
    """As of a run that is asked to end, resumed, and asked again at once."""
    first, second = RoutingByLayer("every batch"), RoutingByLayer("every batch")
    first.update(layers)
    state = first.state_dict()

    second.load_state_dict(state)

    found = second.state_dict()
    assert found.keys() == state.keys() == {"layer_00", "layer_01"}
    assert found["layer_01"]["pairs_E"].tolist() == [1, 3]


def test_a_number_of_every_rank_comes_back_to_the_rank_that_had_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = all_gather_scalar(torch.tensor(2.0))
    assert (alone.tolist(), own_rank(alone)) == ([2], 2)
    for rank in (0, 1):
        rank_of_two(monkeypatch, rank)
        values_R = all_gather_scalar(torch.tensor(2.0 + rank))
        assert values_R.tolist() == [2, 3]
        assert own_rank(values_R) == values_R[rank]
        assert own_rank(torch.tensor([1.0, 2.0, 6.0])) == 3, "of three ranks before"
