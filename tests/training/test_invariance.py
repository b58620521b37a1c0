"""One logical batch has one router gradient, however it is divided, recomputed or padded.

The batch of 8 sequences is taken whole, in 4 accumulated micro-batches of 2, with activation checkpointing,
and with padding added; `test_parallel.py` divides it among ranks. Under the global-batch rule all of them
agree. The other rules are per batch, and survive just what docs/reference/balancing.md says.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from moe_ffn import DecoderConfig
from moe_ffn.config.yaml_files import to_yaml
from moe_ffn.runs.config import TrainConfig
from moe_ffn.training.objective import IGNORED_TARGET, ObjectiveConfig, objective
from moe_ffn.training.parallel.layout import SINGLE_PROCESS
from tests.helpers.first_gradient import first_gradient, fit
from tests.helpers.fitted import MakeConfig
from tests.helpers.ranks import on_ranks

# A sum of some hundred float32 products, added up in another order: 1e-7 each, 1e-5 together.
FLOAT32 = 1e-5

OFF = {"load_balance": 0.0, "router_z": 0.0}
RULES: dict[str, dict[str, float]] = {
    "load_balance_global": {"load_balance_global": 1.0},
    "load_balance_sequence": {"load_balance_sequence": 1.0},
    "router_z": {"router_z": 0.1},
    "router_entropy": {"router_entropy": 1.0},
    "load_balance": {"load_balance": 1.0},
    "load_balance_pooled": {"load_balance_pooled": 1.0},
    "importance_cv2": {"importance_cv2": 1.0},
}
SURVIVE_DIVISION = {"load_balance_global", "load_balance_sequence", "router_z", "router_entropy"}


@pytest.fixture
def config_for(make_config: MakeConfig) -> MakeConfig:
    """A rule, the sequences of one batch, and how many batches are accumulated."""

    def make(
        rule: str, *, batch_size: int = 8, batches: int = 1, **sections: dict[str, Any]
    ) -> TrainConfig:
        model = {"ffn": {"type": "moe", "num_experts": 4, "router": {"type": "top_k", "k": 2}}}
        options: dict[str, Any] = {
            "model": {**model, **sections.pop("model", {})},
            "objective": {**OFF, **RULES[rule]},
            "data": {"batch_size": batch_size},
            "trainer": {
                "max_steps": 1,
                "accumulate_grad_batches": batches,
                "accelerator": "cpu",
                **sections.pop("trainer", {}),
            },
        }
        return make_config(**options)

    return make


@pytest.fixture
def gradient_here(run_folder: Path) -> Callable[[TrainConfig], dict[str, Tensor]]:
    """The first gradient of a run of one rank; each config is trained once in this module."""

    def run(config: TrainConfig) -> dict[str, Tensor]:
        key = to_yaml(config)
        if key not in _FOUND:
            _FOUND[key] = first_gradient(config, run_folder)
        return _FOUND[key]

    return run


_FOUND: dict[str, dict[str, Tensor]] = {}


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest relative difference of the routers' gradients over the layers."""
    names = [name for name in one if name.endswith("router.projection.weight")]
    assert len(names) == 2
    return max(((one[name] - other[name]).norm() / one[name].norm()).item() for name in names)


@pytest.mark.parametrize("rule", RULES)
def test_micro_batches_equal_one_batch_for_rules_that_survive_division(
    rule: str, config_for: Any, gradient_here: Any
) -> None:
    whole = gradient_here(config_for(rule))
    parts = gradient_here(config_for(rule, batch_size=2, batches=4))
    if rule in SURVIVE_DIVISION:
        assert difference(whole, parts) < FLOAT32
    else:
        assert difference(whole, parts) > 100 * FLOAT32


DRAWS_K = {
    "ffn": {
        "type": "moe",
        "num_experts": 4,
        "router": {"type": "elastic_top_k", "k_max": 4, "renormalize": True},
    }
}


@pytest.mark.parametrize("model", [{}, DRAWS_K], ids=["plain", "a drawn k"])
def test_checkpointing_and_accumulation_together_change_nothing_under_the_global_rule(
    model: dict[str, Any], config_for: Any, gradient_here: Any
) -> None:
    rule = "load_balance_global"
    whole = gradient_here(config_for(rule, model=model))
    model = {**model, "activation_checkpointing": True}
    parts = gradient_here(config_for(rule, batch_size=2, batches=4, model=model))
    assert difference(whole, parts) < FLOAT32


class DrawnK(Callback):
    """Keeps the experts per token of each batch and layer."""

    def __init__(self) -> None:
        self.of_batches: list[list[float]] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        routings = outputs["routings"].values()
        self.of_batches.append([(r.active_N.sum() / r.num_tokens).item() for r in routings])


def test_k_depends_only_on_the_seed_the_step_and_the_layer(
    config_for: Any, run_folder: Path
) -> None:
    def drawn(batches: int, seed: int = 0) -> list[list[float]]:
        watcher, trainer = DrawnK(), {"max_steps": 8}
        options = {"batch_size": 2, "batches": batches, "model": DRAWS_K, "trainer": trainer}
        config = config_for("router_z", **options).model_copy(update={"seed": seed})
        fit(config, run_folder, SINGLE_PROCESS, watcher)
        return watcher.of_batches

    of_steps = drawn(batches=1)
    first, second = zip(*of_steps, strict=True)
    assert first != second
    assert min(len(set(first)), len(set(second))) > 1
    assert drawn(batches=3) == [step for step in of_steps for _ in range(3)]
    assert drawn(batches=1, seed=1) != of_steps


class Counts(Callback):
    """Keeps of each batch its global balance loss, and of each layer pairs and summed scores per expert."""

    def __init__(self) -> None:
        self.of_batches: dict[int, tuple[float, list[tuple[Tensor, Tensor]]]] = {}

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        counts = [
            (r.expert_ids_N.bincount(minlength=4), r.logits_TE.softmax(-1).sum(0))
            for r in outputs["routings"].values()
        ]
        loss = outputs["objective"].balancing["load_balance_global"].item()
        self.of_batches[batch["index"]] = loss, counts


def counts_on_a_rank(rank: int, configs: list[TrainConfig], folder: Path) -> Any:
    watchers = [Counts() for _ in configs]
    for config, counts in zip(configs, watchers, strict=True):
        fit(config, folder, SINGLE_PROCESS, counts)
    return [counts.of_batches for counts in watchers]


def test_the_global_rule_counts_the_noisy_routing_of_the_step(
    config_for: Any, tmp_path: Path
) -> None:
    """4 * sum_i f_i P_i, f and P of all pairs and tokens of one batch or two on two ranks."""
    router = {"type": "top_k", "k": 2, "jitter": 0.9}
    model = {"ffn": {"type": "moe", "num_experts": 4, "router": router}, "dropout": 0.5}
    trainer = {"max_steps": 2, "devices": 2, "strategy": "ddp"}
    configs = [
        config_for("load_balance_global", batches=batches, model=model, trainer=trainer)
        for batches in (1, 2)
    ]

    of_ranks = on_ranks(2, tmp_path, counts_on_a_rank, configs, tmp_path)

    for batches, step in ((1, 0), (1, 1), (2, 0), (2, 1)):
        numbers = range(step * batches, (step + 1) * batches)
        parts = [found[batches - 1][number] for found in of_ranks for number in numbers]
        layers: list[float] = []
        for of_parts in zip(*(counts for _, counts in parts), strict=True):
            pairs_E, scores_E = (torch.stack(one).sum(0) for one in zip(*of_parts, strict=True))
            share_E = pairs_E / pairs_E.sum()
            layers.append(4 * (share_E * scores_E / scores_E.sum()).sum().item())
        assert fmean(loss for loss, _ in parts) == pytest.approx(fmean(layers), rel=1e-5)


def test_thresholds_of_experts_move_once_per_step_only_in_training(
    config_for: Any, run_folder: Path
) -> None:
    ffn = {"type": "moe", "num_experts": 4, "router": "expert_threshold"}
    trainer = {"max_steps": 2, "validate_every_n_steps": 1}
    found: dict[bool, list[Tensor]] = {}
    for recomputed in (False, True):
        model = {"ffn": ffn, "activation_checkpointing": recomputed}
        config = config_for("router_z", batch_size=2, batches=3, model=model, trainer=trainer)
        buffers = dict(fit(config, run_folder).decoder.named_buffers())
        moved = {name: value for name, value in buffers.items() if name.endswith("_updates_E")}
        assert [value.tolist() for value in moved.values()] == [[2] * 4] * 2
        found[recomputed] = [v for name, v in buffers.items() if name.endswith("threshold_E")]
    assert all(map(torch.equal, found[False], found[True]))


@pytest.mark.parametrize("rule", RULES)
def test_neither_padding_nor_recomputed_activations_change_a_gradient(rule: str) -> None:
    weights = ObjectiveConfig.model_validate({**OFF, **RULES[rule]})
    token_ids = torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(0))

    def gradients(padding: int = 0, checkpointing: bool | str = False) -> dict[str, Tensor]:
        torch.manual_seed(0)
        small = {"d_model": 16, "num_layers": 2, "attention": {"num_heads": 2}}
        options = {**small, "activation_checkpointing": checkpointing}
        decoder = DecoderConfig.model_validate(options).build(vocab_size=11, max_seq_len=16)
        filler = torch.randint(11, (4, padding))
        inputs = torch.cat([token_ids[:, :-1], filler], dim=1)
        targets = torch.cat([token_ids[:, 1:], torch.full_like(filler, IGNORED_TARGET)], dim=1)
        mask = torch.arange(8 + padding).expand(4, -1) < 8
        output = decoder(inputs, mask)
        objective(output.logits, targets, output.routings, weights).total.backward()
        return {n: p.grad for n, p in decoder.named_parameters() if p.grad is not None}

    plain = gradients()
    assert difference(plain, gradients(padding=5)) < FLOAT32
    for checkpointing in (True, "ffn"):
        assert difference(plain, gradients(checkpointing=checkpointing)) < FLOAT32
