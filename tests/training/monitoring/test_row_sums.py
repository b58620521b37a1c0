"""The routing of every layer over batches, cuts and ranks, and what a row tells beyond its batches."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from moe_ffn.data.prepare import PreparedData
from moe_ffn.metrics.table import LAYER_METRICS, Metric
from moe_ffn.runs.assemble import build_module
from moe_ffn.training.config import LoggingConfig
from moe_ffn.training.module import LanguageModel, LoadedBatch
from moe_ffn.training.monitoring import row_sums
from moe_ffn.training.monitoring.row_sums import (
    RoutingByLayer,
    RoutingRowSums,
    all_gather_scalar,
    probe,
    scalar_of_this_rank,
)
from tests.helpers.fitted import Fit, MakeConfig

MOE = {"type": "moe", "num_experts": 4}
Build = Callable[[Any], LanguageModel]


@pytest.fixture
def build(make_config: MakeConfig, prepared: PreparedData) -> Build:
    """A model of two layers, whose batch 0 is four sequences of sixteen tokens."""

    def make(ffn: Any) -> LanguageModel:
        torch.manual_seed(0)
        module = build_module(make_config(model={"ffn": ffn}), prepared)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(len(module.byte_lengths), (4, 16), generator=generator)
        module.batch_at = lambda index: LoadedBatch(index=index, input_ids=ids, target_ids=ids)
        return module

    return make


@pytest.fixture
def module(build: Build) -> LanguageModel:
    return build(MOE)


def reroute(module: LanguageModel) -> None:
    """Change the experts of every token in layer 1 only."""
    router = module.decoder.get_parameter("layers.1.ffn.router.projection.weight")
    with torch.no_grad():
        router.copy_(-router)


# -- churn


def test_churn_is_of_the_tokens_of_batch_0_since_the_last_look(module: LanguageModel) -> None:
    window = RoutingRowSums(LoggingConfig.model_validate({"churn_every_n_steps": 10}))
    first = values_of(module, window, 10)
    assert "churn" not in first["layer_00"], "the first look has nothing to compare with"
    same = values_of(module, window, 20)
    assert [same[f"layer_0{layer}"]["churn"] for layer in range(2)] == [0, 0]
    before_TE = probe(module)["layer_01"]
    assert before_TE.shape == (16, 4), "a quarter of the batch"
    reroute(module)

    found = values_of(module, window, 30)

    # The two best of four turn into the two worst: nobody keeps an expert.
    assert [found[f"layer_0{layer}"]["churn"] for layer in range(2)] == [0, 1]
    assert torch.equal(probe(module)["layer_01"], ~before_TE)


def test_a_look_leaves_no_trace(module: LanguageModel) -> None:
    module.train()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)

    probe(module)

    assert torch.equal(torch.rand(2), expected)
    assert all(part.training for part in module.decoder.modules())
    assert all(p.grad is None for p in module.parameters())


def test_a_dense_model_is_not_looked_at(build: Build) -> None:
    dense = build("dense")
    dense.batch_at = lambda index: pytest.fail("nothing is routed here")
    assert probe(dense) == {}


def test_churn_is_measured_at_the_requested_interval(fit: Fit) -> None:
    fitted = fit(
        model={"ffn": MOE},
        logging={"every_n_steps": 1, "churn_every_n_steps": 2},
        trainer={"max_steps": 7},
    )

    rows = fitted.logger.named("train")
    # Looks at 1, 3, 5, 7; each but the first has one before it.
    told = [step for step, row in rows if "routing/layer_00/churn" in row]
    assert told == [3, 5, 7]
    assert all(0 <= row["routing/layer_01/churn"] <= 1 for step, row in rows if step in told)


def test_a_metric_across_batches_is_one_entry(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    metric = Metric(
        key="longest_idle",
        title="Longest idle",
        unit="steps",
        formula="steps since the expert that waits longest had a token",
        healthy="0",
        measured="row",
        row_end=lambda row: row.idle_steps_E.max() if row.num_networks == 4 else None,
    )
    monkeypatch.setitem(LAYER_METRICS, metric.key, metric)
    fitted = fit(
        model={"ffn": MOE, "ffn_at": {"1": MOE | {"num_experts": 2}}},
        logging={"every_n_steps": 1},
        trainer={"max_steps": 2},
    )

    for _, row in fitted.logger.named("train"):
        assert row["routing/layer_00/longest_idle"] >= 0
        assert "routing/layer_01/longest_idle" not in row


# -- the batches of a window


def test_tokens_are_measured_in_the_last_step_and_load_in_all(fit: Fit) -> None:
    fitted = fit(
        model={"ffn": MOE}, logging={"every_n_steps": 3}, trainer={"accumulate_grad_batches": 2}
    )

    for (step, row), first in zip(fitted.logger.named("train"), (0, 6), strict=True):
        of_window = fitted.spy.outputs[first : first + 6]
        of_last_step = [output["routings"]["layer_01"] for output in of_window[4:]]
        largest = max(routing.logits_TE.abs().max().item() for routing in of_last_step)
        assert row["routing/layer_01/logit_max"] == pytest.approx(largest), step
        ids = torch.cat([output["routings"]["layer_01"].expert_ids_N for output in of_window])
        shares = torch.bincount(ids, minlength=4) / len(ids)
        assert row["routing/layer_01/load"] == pytest.approx(shares.tolist()), step


def test_a_window_that_ends_early_has_no_values_of_tokens(module: LanguageModel) -> None:
    window = RoutingRowSums(LoggingConfig())
    assert "entropy" in values_of(module, window, 10)["layer_00"]
    assert module.batch_at is not None
    window.update(module.decoder(module.batch_at(0)["input_ids"]).routings, in_last_step=False)
    found = window.close(13, 3, module, 1)["layer_00"]
    assert "entropy" not in found
    assert found["load"].sum().item() == pytest.approx(1)


# -- dead experts, biases, ranks


def values_of(module: LanguageModel, window: RoutingRowSums, step: int, ranks: int = 1) -> Any:
    assert module.batch_at is not None
    window.update(module.decoder(module.batch_at(0)["input_ids"]).routings, in_last_step=True)
    return window.close(step, 10, module, ranks)


def test_an_expert_is_dead_after_enough_steps_without_a_token(module: LanguageModel) -> None:
    window = RoutingRowSums(LoggingConfig.model_validate({"alarms": {"after_steps": 20}}))
    router = module.decoder.get_parameter("layers.1.ffn.router.projection.weight")
    alive = router.detach().clone()
    with torch.no_grad():
        router.zero_()  # ties go to the first two of the four
    assert values_of(module, window, 10)["layer_01"]["dead_experts"] == 0
    assert values_of(module, window, 20)["layer_01"]["dead_experts"] == 2
    assert values_of(module, window, 30)["layer_01"]["dead_experts"] == 2
    with torch.no_grad():
        router.copy_(alive)
    assert values_of(module, window, 40)["layer_01"]["dead_experts"] == 0
    assert values_of(module, window, 50)["layer_00"]["dead_experts"] == 0


def test_a_resumed_window_remembers_earlier_steps(module: LanguageModel) -> None:
    config = LoggingConfig.model_validate({"alarms": {"after_steps": 20}})
    first, second = RoutingRowSums(config), RoutingRowSums(config)
    with torch.no_grad():
        module.decoder.get_parameter("layers.1.ffn.router.projection.weight").zero_()
    values_of(module, first, 10)

    second.load_state_dict(first.state_dict())
    found = values_of(module, second, 30)["layer_01"]

    assert found["dead_experts"] == 2
    assert found["churn"] == 0


def test_a_resumed_window_keeps_its_load_and_probe(module: LanguageModel) -> None:
    """Half of its pairs are of before; and the next look is due when it was."""
    config = LoggingConfig.model_validate({"churn_every_n_steps": 20})
    first, second = RoutingRowSums(config), RoutingRowSums(config)
    values_of(module, first, 10)  # the first look
    assert module.batch_at is not None
    before = module.decoder(module.batch_at(0)["input_ids"]).routings
    first.update(before, in_last_step=False)
    second.load_state_dict(first.state_dict())
    reroute(module)

    found = values_of(module, second, 20)["layer_01"]

    after = module.decoder(module.batch_at(0)["input_ids"]).routings
    ids = torch.cat([before["layer_01"].expert_ids_N, after["layer_01"].expert_ids_N])
    assert found["load"].tolist() == pytest.approx((torch.bincount(ids) / len(ids)).tolist())
    assert "churn" not in found, "ten steps after a look"
    assert "churn" in values_of(module, second, 30)["layer_01"]


def test_the_spread_of_a_bias_and_the_imbalance_of_ranks(
    build: Build, module: LanguageModel
) -> None:
    other = build(MOE | {"router": "sigmoid_top_k"})
    bias_E = other.decoder.routers()["layer_00"].correction_bias_E
    assert isinstance(bias_E, Tensor)
    bias_E.copy_(torch.tensor([0.0, 0.2, -0.3, 0.1]))

    alone = values_of(other, RoutingRowSums(LoggingConfig()), 10)["layer_00"]
    two = values_of(module, RoutingRowSums(LoggingConfig()), 10, ranks=2)["layer_00"]

    assert alone["bias_spread"].item() == pytest.approx(0.5)
    assert "rank_max_violation" not in alone
    halves = two["load"].view(2, 2).sum(dim=-1)
    assert two["rank_max_violation"].item() == pytest.approx(2 * halves.max().item() - 1)
    assert "bias_spread" not in two


def test_experts_without_a_network_are_on_no_rank(build: Build) -> None:
    found = values_of(
        build(MOE | {"zero_computation": {"num_zero": 4}}),
        RoutingRowSums(LoggingConfig()),
        10,
        ranks=2,
    )["layer_00"]

    halves = found["load"][:4].view(2, 2).sum(dim=-1)
    expected = 2 * halves.max() / halves.sum() - 1
    assert found["load"].shape == (8,)
    assert found["rank_max_violation"].item() == pytest.approx(expected.item())


# -- layers over batches, cuts and ranks


def rank_of_two(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Fake a second rank that sends the same values to a sum, and values greater by one to a gather."""

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
    monkeypatch.setattr(row_sums, "distributed", fake)


@pytest.fixture
def layers(make_routing: Any) -> dict[str, Any]:
    """Two layers: one of three tokens to expert 0, and one to expert 1; the other way round."""
    logits = torch.tensor([[4.0, 1.0]] * 4)
    return {
        "layer_00": make_routing([[0], [0], [0], [1]], 2, logits_TE=logits),
        "layer_01": make_routing([[1], [1], [1], [0]], 2, logits_TE=-2 * logits),
    }


def plain(values: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Any]]:
    """Values as lists, without NaN, which equals nothing."""
    return {
        layer: {k: v.tolist() for k, v in found.items() if not v.isnan().any()}
        for layer, found in values.items()
    }


def pairs(found: RoutingByLayer) -> list[int]:
    """Pairs per expert of the first layer, on this rank."""
    return found.sums["layer_00"]["pairs_E"].tolist()


def test_closing_begins_a_new_window(layers: dict[str, Any]) -> None:
    found = RoutingByLayer("every batch")
    found.update(layers)
    assert plain(found.close())["layer_01"]["load"] == [0.25, 0.75]
    found.update({"layer_00": layers["layer_00"], "layer_01": layers["layer_00"]})
    assert plain(found.close())["layer_01"]["load"] == [0.75, 0.25]


def test_two_ranks_with_the_same_batch_measure_the_same_as_one_and_exchange_once(
    layers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums are doubled and a maximum is not, so that every ratio stays what it was."""
    one, two = (RoutingByLayer("every batch", "last step", "validation") for _ in range(2))
    one.update(layers)
    two.update(layers)
    expected = plain(one.close())
    rank_of_two(monkeypatch, rank=0)
    exchanged: list[Any] = []
    reduce = row_sums.distributed.all_reduce

    def all_reduce(value: Tensor, operation: Any) -> None:
        exchanged.append(operation)
        reduce(value, operation)

    monkeypatch.setattr(row_sums.distributed, "all_reduce", all_reduce)

    assert plain(two.close()) == expected
    assert expected["layer_00"]["load"] == [0.75, 0.25]
    assert expected["layer_01"]["logit_max"] == 8
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
    """A run may be stopped, resumed and stopped again before its next batch."""
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
    assert (alone.tolist(), scalar_of_this_rank(alone)) == ([2], 2)
    for rank in (0, 1):
        rank_of_two(monkeypatch, rank)
        values_R = all_gather_scalar(torch.tensor(2.0 + rank))
        assert values_R.tolist() == [2, 3]
        assert scalar_of_this_rank(values_R) == values_R[rank]
        assert scalar_of_this_rank(torch.tensor([1.0, 2.0, 6.0])) == 3, "of three ranks before"
