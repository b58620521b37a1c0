"""The planner matches real runs: parameters, shards on ranks, memory of a step; and its program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from moe_ffn.config.errors import ConfigError
from moe_ffn.config.numbers import compact
from moe_ffn.config.yaml_files import read_config
from moe_ffn.kernels.base import on_this_rank
from moe_ffn.model.decoder import DecoderConfig
from moe_ffn.runs import planner
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.planner import (
    DEVICES,
    Activations,
    Device,
    LayoutPlan,
    Sizes,
    Traffic,
    activations_of,
    layouts,
    plan_layouts,
)
from moe_ffn.training.distillation import DecoderTeacher
from moe_ffn.training.objective import ObjectiveConfig, cross_entropy_of, objective
from moe_ffn.training.parallel.layout import Layout
from moe_ffn.weights.pretrained import save_pretrained
from tests.helpers.ranks import Sent, on_ranks, parallelize
from tests.helpers.tiny_runs import run_here

MODELS = Path(__file__).parents[2] / "configs/models"
MOE = {
    "type": "moe",
    "num_experts": 4,
    "router": {"type": "top_k", "k": 2},
    "shared_expert": "swiglu",
}
GATE = {"type": "expert_choice", "score": "sigmoid"}


def config_of(**changes: Any) -> TrainConfig:
    model = {"d_model": 32, "num_layers": 3, "attention": {"num_heads": 4}, "ffn": MOE}
    data = {"seq_len": 64, "batch_size": 4}
    return TrainConfig.model_validate(
        {
            "optimizer": {"type": "adamw"},
            "model": {**model, **changes.pop("model", {})},
            "data": {**data, **changes.pop("data", {})},
            **changes,
        }
    )


def plans_of(
    num_ranks: int, device: Device = DEVICES["h100"], efficiency: float = 0.4, **changes: Any
) -> dict[Layout, LayoutPlan]:
    plans = plan_layouts(config_of(**changes), num_ranks, device, efficiency)
    return {plan.layout: plan for plan in plans}


@pytest.fixture(scope="module", autouse=True)
def _traced_once() -> Iterator[None]:
    """Many plans need the same trace, which takes most of the time of a plan."""
    saved_bytes, found = planner._saved_bytes, dict[Any, float]()

    def once(config: TrainConfig, model: DecoderConfig, *of: Any) -> float:
        key = (model.model_dump_json(), *config.data.text_sizes, config.data.seq_len, *of)
        if key not in found:
            found[key] = saved_bytes(config, model, *of)
        return found[key]

    with patch.object(planner, "_saved_bytes", once):
        yield


@pytest.mark.parametrize(
    "name",
    [pytest.param("deepseek_v3", marks=pytest.mark.slow), "gpt_oss_120b", "olmoe_1b_7b"],
)
def test_a_published_model_is_as_large_without_numbers(name: str) -> None:
    config = read_config(MODELS / f"{name}.yaml", TrainConfig)
    planned = Sizes.of(config)
    vocab_size, seq_len = config.data.tokenizer.max_vocab_size, config.data.seq_len
    assert sum(w.numel for w in planned.all) == config.model.num_params(vocab_size, seq_len)
    assert len(planned.layers) == config.model.num_layers
    # AdamW's two moments, in float32.
    assert sum(w.state_bytes for w in planned.all) == 8 * sum(w.numel for w in planned.all)


@pytest.fixture
def _no_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Following a step takes most of the time of a plan, and this test asks for none of it."""

    def nothing(config: TrainConfig, num_sequences: int, *of: Any) -> Activations:
        return Activations(0, (0,) * config.model.num_layers, 0)

    monkeypatch.setattr(planner, "activations_of", nothing)


without_activations = pytest.mark.usefixtures("_no_activations")


Cases = list[tuple[TrainConfig, Layout]]


def local_numbers(rank: int, cases: Cases) -> list[int]:
    found: list[int] = []
    for config, layout in cases:
        decoder = config.model.build(vocab_size=257, max_seq_len=64)
        parallelize(decoder, layout)
        found.append(sum(on_this_rank(p).numel() for p in decoder.parameters()))
    return found


def test_a_rank_has_its_share_of_each_weight(tmp_path: Path) -> None:
    layouts = [Layout(shard=2, expert=2), Layout(data=2, expert=2), Layout(shard=4)]
    ffns = [{**MOE, "num_experts": number} for number in (4, 2)]
    configs = [config_of(model={"ffn": ffn, "num_layers": 2}) for ffn in ffns]
    cases = [*product(configs, layouts)]
    of_ranks = on_ranks(4, tmp_path, local_numbers, cases)
    for (config, layout), *found in zip(cases, *of_ranks, strict=True):
        assert max(found) == sum(w.numel * w.share(layout) for w in Sizes.of(config).all), layout


def kept(config: TrainConfig, precision: str) -> float:
    """Bytes that a forward pass with numbers keeps, up to the gradient of the logits.

    The tracker is a dispatch mode, under which the backend `cpu` would take its loop, which keeps more.
    """
    decoder = config.model.build(vocab_size=257, max_seq_len=64)
    ids_BS = torch.randint(0, 257, (4, 64))
    if precision == "bf16-true":
        decoder = decoder.bfloat16()
    tracker = MemTracker()
    tracker.track_external(decoder, ids_BS)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed")
    with patch("moe_ffn.kernels.cpu.is_dispatch_mode_on", lambda: False), tracker, autocast:
        output = decoder(ids_BS)
        torch.autograd.grad(cross_entropy_of(output.logits, ids_BS), output.logits)
    return tracked(tracker)


def tracked(tracker: MemTracker) -> float:
    """Bytes at the peak without weights."""
    (parts,) = tracker.get_tracker_snapshot("peak").values()
    named = {str(getattr(kind, "value", kind)): value for kind, value in parts.items()}
    return named["Total"] - named["Parameter"] - named["Buffer"]


@pytest.mark.parametrize(
    ("model", "precision"),
    [
        ({"ffn": "swiglu"}, "32-true"),
        ({"ffn": "swiglu"}, "bf16-true"),
        ({"ffn": "swiglu"}, "bf16-mixed"),
        ({"ffn": MOE, "ffn_at": {"0": "dense"}}, "32-true"),
        ({"ffn": "swiglu", "attention": {"num_heads": 4, "latent": {"kv_rank": 8}}}, "32-true"),
        (
            {"ffn": "swiglu", "attention": {"num_heads": 4, "num_kv_heads": 2, "norm_qk": "head"}},
            "32-true",
        ),
    ],
    ids=["swiglu", "bf16", "mixed bf16", "two kinds", "latent", "grouped"],
)
def test_planned_activations_are_those_of_a_real_step(
    model: dict[str, Any], precision: str
) -> None:
    config = config_of(model={**model, "num_layers": 2})
    planned = activations_of(config, num_sequences=4, precision=precision).total
    assert planned == pytest.approx(kept(config, precision), rel=0.05)


TEACHER = DecoderConfig.model_validate(
    {"d_model": 64, "num_layers": 2, "attention": {"num_heads": 4}, "ffn": "swiglu"}
)


def test_the_activations_of_a_teacher_are_those_of_a_real_step() -> None:
    config = config_of(model={"ffn": "swiglu", "num_layers": 2})
    planned = activations_of(config, 4, "32-true", TEACHER).total
    decoder, teacher = (model.build(257, 64) for model in (config.model, TEACHER))
    ids_BS = torch.randint(0, 257, (4, 64))
    weights = ObjectiveConfig.model_validate({"distill": {"teacher": "any"}})
    tracker = MemTracker()
    tracker.track_external(decoder, teacher, ids_BS)
    with patch("moe_ffn.kernels.cpu.is_dispatch_mode_on", lambda: False), tracker:
        output = decoder(ids_BS)
        theirs = DecoderTeacher(teacher).loss(output.logits, ids_BS, None, ids_BS >= 0)
        loss = objective(output.logits, ids_BS, {}, weights, distillation=theirs)
        torch.autograd.grad(loss.total, output.logits)
    assert planned == pytest.approx(tracked(tracker), rel=0.05)


def test_a_teacher_is_whole_on_each_rank_and_computes_only_forward() -> None:
    config = config_of(objective={"distill": {"teacher": "any"}})
    without, with_it = (
        {p.layout: p for p in plan_layouts(config, 2, DEVICES["h100"], 0.4, teacher)}
        for teacher in (None, TEACHER)
    )
    for layout, plan in with_it.items():
        more = plan.memory.weights - without[layout].memory.weights
        assert more == pytest.approx(4 * TEACHER.num_params(257, 64))
        flops = 2 * 64 * TEACHER.flops_per_token(257, 64)
        seconds = plan.compute_seconds - without[layout].compute_seconds
        assert seconds == pytest.approx(flops / DEVICES["h100"].flops / 0.4)


def test_recomputed_layers_keep_only_their_input() -> None:
    kinds = {"ffn": "swiglu", "ffn_at": {"1": MOE}}  # of which the second keeps more
    whole, ffn, block = (
        activations_of(config_of(model={**kinds, "activation_checkpointing": kept}), 4, "32-true")
        for kept in (False, "ffn", "block")
    )
    assert whole.recomputed == 0
    assert whole.by_layer[1] > 1.2 * whole.by_layer[0]
    assert block.recomputed == pytest.approx(whole.by_layer[1])
    assert block.by_layer[0] < 0.2 * whole.by_layer[0]
    # Where only the block is recomputed, attention keeps its activations.
    assert ffn.recomputed == pytest.approx(whole.by_layer[1] - ffn.by_layer[1])
    assert block.total < ffn.total < whole.total


@pytest.mark.parametrize(
    ("outside", "recomputed", "of_outside", "by_layer", "expected"),
    [
        # Kept: 4 by the first layer, 6 by the second. Backward begins at the second.
        (10, 3, 1, [2, 5], (0, 10 + 4 + 6)),  # where the logits are made, without any gradient
        (2, 3, 1, [2, 5], (1 + 5, 4 + 6 + 3)),  # in the second layer
        (2, 0, 1, [20, 5], (1 + 5 + 20, 4)),  # in the first, when the second's are freed
    ],
)
def test_the_peak_is_the_worst_moment(
    outside: float,
    recomputed: float,
    of_outside: float,
    by_layer: list[float],
    expected: tuple[float, float],
) -> None:
    found = Activations(outside, (4, 6), recomputed)
    assert found.peak_with(of_outside, by_layer) == expected
    assert found.total == max(outside + 10, 10 + recomputed)


def test_layouts_are_those_that_the_experts_allow() -> None:
    found = list(layouts(config_of(), 8))
    assert {layout.expert for layout in found} == {1, 2, 4}
    assert all(layout.num_ranks == 8 for layout in found)
    assert {layout.expert for layout in layouts(config_of(model={"ffn": "swiglu"}), 8)} == {1}
    for options in ({"trainer": {"precision": "64-true"}}, {"optimizer": {"type": "adafactor"}}):
        assert list(layouts(config_of(**options), 8)) == [Layout(data=8)], "none is sharded"


@without_activations
@pytest.mark.parametrize(
    ("precision", "item"), [("32-true", 4), ("bf16-mixed", 4), ("bf16-true", 2), ("64-true", 8)]
)
def test_the_memory_of_weights_by_hand(precision: str, item: int) -> None:
    options: dict[str, Any] = {"data": {"batch_size": 8}, "trainer": {"precision": precision}}
    plans = plans_of(4, **options)
    decoder = config_of().model.build(257, 64)

    def numbers(module: Any) -> int:
        return sum(parameter.numel() for parameter in module.parameters())

    whole, layer = numbers(decoder), numbers(decoder.layers[0])
    outside, block = whole - 3 * layer, decoder.layers[0]
    experts = numbers(cast("Any", block).ffn.experts)
    copies = plans[Layout(data=4)].memory
    assert (copies.weights, copies.optimizer) == (item * whole, 2 * item * whole), "two moments"
    assert copies.gathered == item * whole, "the buckets in which gradients are added up"
    assert plans_of(1, **options)[Layout()].memory.gathered == 0
    if item == 8:  # divides no model
        return
    # Outside of layers weights and gradients stay; two layers are whole, and the gradient of one.
    shards, spread = plans[Layout(shard=4)].memory, plans[Layout(expert=4)].memory
    assert shards.gathered == item * (2 * outside + 3 * layer)
    assert spread.gathered == item * (2 * outside + 3 * (layer - experts * 3 / 4))


def test_activations_are_those_of_one_ranks_batch() -> None:
    def bytes_of(layout: Layout, batch_size: int, recomputes: bool | str = False) -> float:
        plans = plans_of(
            layout.num_ranks,
            model={"activation_checkpointing": recomputes},
            data={"batch_size": batch_size},
            trainer={"precision": "32-true", "accumulate_grad_batches": 3},
        )
        return plans[layout].memory.activations

    alone = bytes_of(Layout(), 2)
    assert bytes_of(Layout(data=4), 8) == alone
    # By hand: a token of either rank comes to one of its two experts five times in six.
    of_layer = 4 * 32 * (2 * 64) * 2 * 5 / 6
    assert bytes_of(Layout(expert=2), 4) == pytest.approx(alone + 3 * of_layer)
    more = bytes_of(Layout(expert=2), 4, "block") - bytes_of(Layout(), 2, "block")
    assert more <= of_layer, "one layer is computed again at a time"


TOY = Device("toy", 1e9, flops=1e12, link=8e9, network=1e9, per_machine=2)


@pytest.mark.parametrize(
    ("layout", "of_weights", "of_tokens"),
    [
        (Layout(data=4), 8e9, 8e9),
        (Layout(data=2, shard=2), 8e9, 8e9),
        (Layout(shard=4), 1e9, 8e9),
        (Layout(data=2, expert=2), 8e9, 8e9),
        (Layout(shard=2, expert=2), 1e9, 8e9),
        (Layout(expert=4), 1e9, 1e9),
    ],
    ids=str,
)
def test_the_seconds_of_a_step_by_hand(
    toy_plans: dict[Layout, LayoutPlan], layout: Layout, of_weights: float, of_tokens: float
) -> None:
    """Two ranks are one machine; copies are added up over all four, across machines."""
    plan = toy_plans[layout]
    sent = plan.traffic
    assert plan.compute_seconds == pytest.approx(
        3 * 2 * 64 * config_of().model.flops_per_token(257, 64) / 1e12 / 0.5
    )
    beside = (sent.weights + sent.gradients) / of_weights + sent.copies / 1e9
    assert plan.overlapped_seconds == pytest.approx(beside / 0.5)
    assert plan.token_seconds == pytest.approx(sent.tokens / of_tokens / 0.5)
    assert plan.seconds == max(plan.compute_seconds, plan.overlapped_seconds) + plan.token_seconds
    assert plan.tokens_per_second == 8 * 64 / plan.seconds, "of all ranks"


@pytest.fixture(scope="module")
def toy_plans() -> dict[Layout, LayoutPlan]:
    return plans_of(4, TOY, 0.5, data={"batch_size": 8})


def test_the_fastest_that_fits_comes_first_and_then_the_smallest(
    toy_plans: dict[Layout, LayoutPlan],
) -> None:
    seconds = [plan.seconds for plan in toy_plans.values()]
    sizes = sorted(plan.memory.total for plan in toy_plans.values())
    assert seconds == sorted(seconds)
    assert [plan.memory.total for plan in toy_plans.values()] != sizes
    narrow = replace(TOY, memory_bytes=sizes[2])
    found = [*plans_of(4, narrow, 0.5, data={"batch_size": 8}).values()]
    assert [plan.fits for plan in found] == [True] * 3 + [False] * (len(sizes) - 3)
    assert [p.seconds for p in found[:3]] == sorted(p.seconds for p in found[:3])
    assert [p.memory.total for p in found[3:]] == sizes[3:]


def test_batches_that_are_added_up_travel_once() -> None:
    one, three = (
        plans_of(2, trainer={"accumulate_grad_batches": number})[Layout(shard=2)]
        for number in (1, 3)
    )
    assert three.traffic.weights == 3 * one.traffic.weights
    assert three.traffic.gradients == one.traffic.gradients
    assert three.compute_seconds == pytest.approx(3 * one.compute_seconds)
    assert three.tokens == 3 * one.tokens
    assert three.memory.activations == one.memory.activations
    assert three.memory.gradients == pytest.approx(2 * one.memory.weights, rel=0.05), "whole"


@without_activations
def test_recomputed_activations_are_counted() -> None:
    narrow, wide = ({"type": "swiglu", "d_ff": d_ff} for d_ff in (24, 48))
    model = {"ffn": narrow, "ffn_at": {"0": wide}}
    none, ffn, block = (
        plans_of(1, model={**model, "activation_checkpointing": kept})[Layout()].compute_seconds
        for kept in (False, "ffn", "block")
    )
    assert block == pytest.approx(none * 4 / 3)
    # By hand: three matrices in each of three layers.
    flops = 4 * 64 * 2 * 3 * 32 * (48 + 24 + 24)
    assert ffn - none == pytest.approx(flops / DEVICES["h100"].flops / 0.4)


def test_a_batch_that_cannot_be_divided_is_rejected() -> None:
    with pytest.raises(
        ConfigError, match=r"data\.batch_size \(4\) must be divisible by the number of ranks"
    ):
        plan_layouts(config_of(), 3, DEVICES["h100"])


def sent_in_steps(rank: int, cases: Cases) -> list[tuple[dict[str, int], int]]:
    return [sent_in_a_step(rank, config, layout) for config, layout in cases]


def sent_in_a_step(rank: int, config: TrainConfig, layout: Layout) -> tuple[dict[str, int], int]:
    """Traffic that a hook counts, and the rows for other ranks according to the routing."""
    torch.manual_seed(0)
    decoder = config.model.build(vocab_size=257, max_seq_len=64)
    parallelize(decoder, layout)
    ids_BS = torch.randint(0, 257, (2, 64), generator=torch.Generator().manual_seed(rank))
    mixed = config.trainer.precision == "bf16-mixed"
    with Sent(layout, rank) as sent, torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        output = decoder(ids_BS)
        cross_entropy_of(output.logits, ids_BS).backward()
    rows = 0
    for routing in output.routings.values():
        of_rank_N = routing.expert_ids_N // (4 // layout.expert)
        pairs = {*zip(routing.token_indices_N.tolist(), of_rank_N.tolist(), strict=True)}
        rows += sum(of_rank != rank % layout.expert for _, of_rank in pairs)
    return dict(sent.bytes), rows


@without_activations
def test_the_planned_traffic_is_what_a_hook_counts(tmp_path: Path) -> None:
    # Layout, precision, what is recomputed, and the bytes of a number of a token.
    cases: list[tuple[Layout, str, Any, int]] = [
        (Layout(shard=4), "32-true", False, 0),
        (Layout(data=2, expert=2), "32-true", "ffn", 6 * 4),
        (Layout(shard=2, expert=2), "32-true", "block", 6 * 4),
        (Layout(data=2, expert=2), "bf16-mixed", False, 4 * 2),  # there, back, and both gradients
    ]
    configs = [
        config_of(
            model={"activation_checkpointing": recomputes, "num_layers": 2},
            data={"batch_size": 2 * 4},
            trainer={"precision": precision},
        )
        for _, precision, recomputes, _ in cases
    ]
    given = [(config, layout) for config, (layout, *_) in zip(configs, cases, strict=True)]
    together = on_ranks(4, tmp_path, sent_in_steps, given)
    for (config, layout), case, *of_ranks in zip(given, cases, *together, strict=True):
        planned = traffic_of(config, layout)
        for counted, _ in of_ranks:
            assert counted.get("gathered", 0) == planned.weights, case
            assert counted.get("scattered", 0) == planned.gradients, case
            assert counted.get("copies", 0) == planned.copies, case
        tokens = sum(counted.get("tokens", 0) for counted, _ in of_ranks)
        assert tokens == sum(rows for _, rows in of_ranks) * 32 * case[-1], case
        # Balance is not perfect in fact.
        assert tokens == pytest.approx(planned.tokens * 4, rel=0.25), case


def traffic_of(config: TrainConfig, layout: Layout) -> Traffic:
    plans = plan_layouts(config, layout.num_ranks, DEVICES["h100"])
    (found,) = (plan.traffic for plan in plans if plan.layout == layout)
    return found


@without_activations
def test_only_pairs_for_other_ranks_are_traffic_and_groups_send_less(tmp_path: Path) -> None:
    ffns: list[dict[str, Any]] = [
        # A quarter of the tokens, half of the pairs, a quarter of the width.
        {"type": "mixture_of_depths", "ffn": MOE, "router": {**GATE, "k": 0.25}},
        {**MOE, "zero_computation": {"num_zero": 4}},
        {**MOE, "experts": {"type": "latent", "width": 8, "experts": "swiglu"}},
        {**MOE, "router": {"type": "sigmoid_top_k", "k": 2}},
        {
            **MOE,
            "router": {"type": "sigmoid_top_k", "k": 2, "groups": {"num_groups": 2, "keep": 1}},
        },
    ]
    layout, trainer = Layout(expert=2), {"precision": "32-true"}
    models = [{"ffn": ffn, "causal": False, "num_layers": 2} for ffn in ffns]
    cases = [(config_of(model=model, trainer=trainer), layout) for model in models]
    together = on_ranks(2, tmp_path, sent_in_steps, cases)
    sent = [
        sum(counted["tokens"] for counted, _ in of_ranks)
        for of_ranks in zip(*together, strict=True)
    ]
    for (config, _), ffn, counted in list(zip(cases, ffns, sent, strict=True))[:4]:
        planned = 2 * traffic_of(config, layout).tokens
        assert counted == pytest.approx(planned, rel=0.25), ffn  # balance is not perfect
    # One rank for each token, of two ranks that two experts often lie on.
    assert sent[4] < 0.75 * sent[3]


TINY = (
    *("--model.d_model", "32", "--model.num_layers", "2", "--data.batch_size", "8"),
    *("--data.seq_len", "64", "--model.ffn", "{type: moe, num_experts: 4}"),
)


def plan(*argv: str) -> tuple[int, str]:
    done = run_here(*TINY, *argv, program="moe_ffn.cli.plan")
    return done.code, done.stdout + done.stderr


def test_every_layout_that_fits_has_a_row_and_the_fastest_is_printed() -> None:
    code, said = plan("--gpus", "4")
    assert code == 0
    rows = [line for line in said.splitlines() if line.count(" x ") == 2 and "mesh" not in line]
    assert {row.strip()[:9] for row in rows} >= {"4 x 1 x 1", "1 x 4 x 1", "1 x 1 x 4"}
    assert "parallel: {data: " in said
    assert " s per step, bound by " in said
    assert "a GPU has 80 GB, computes " in " ".join(said.split())


def test_a_teacher_is_read_and_counted(tmp_path: Path) -> None:
    save_pretrained(TEACHER.build(257, 64), tmp_path / "teacher")
    code, said = plan("--gpus", "2", "--objective.distill.teacher", str(tmp_path / "teacher"))
    assert code == 0
    count = compact(TEACHER.num_params(257, 64))
    assert f"and a teacher of {count}, whole on each GPU, in weights, activ and s/step" in said
    code, said = plan("--objective.distill.teacher", str(tmp_path / "nowhere"))
    assert (code, f"objective.distill.teacher: '{tmp_path}/nowhere' is not there" in said) == (
        2,
        True,
    )


def test_device_figures_can_be_given_and_a_model_too_large_is_an_error() -> None:
    code, said = plan("--gpus", "2", "--memory-gb", "0.001")
    assert code == 1
    assert (
        "none fits: the smallest takes 0.0 of 0 GB; give more --gpus, a smaller data.batch_size"
        in said
    )


def test_a_page_shows_the_memory_of_each_layout(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"

    code, said = plan("--gpus", "2", "--plot", str(path))

    assert (code, said.splitlines()[-1]) == (0, f"written: {path}")
    drawn = path.read_text(encoding="utf-8")
    assert drawn.startswith("<!doctype html>")
    for text in ("activations", "80 GB", "1 x 1 x 2"):
        assert text in drawn
