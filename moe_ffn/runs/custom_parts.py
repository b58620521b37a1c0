"""Checks of custom parts before training: their counts, and one trial of each on a few random tokens.

A trial builds the part once more, leaves the random state as it is, and compares what the part returns with
the promises of its base class. In a causal model no output may change with later tokens.

B sequences, S positions, D model width
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moe_ffn.balancing.bias_rules import BiasRuleConfig
from moe_ffn.config.base import TaggedConfig
from moe_ffn.config.errors import ConfigError, Situation, show
from moe_ffn.config.import_path import explaining_outside_errors, is_outside
from moe_ffn.data.corpus import CorpusConfig, Document
from moe_ffn.experts.base import ExpertsConfig
from moe_ffn.ffn import FFNConfig
from moe_ffn.ffn.shared_expert import Combine, CombineConfig
from moe_ffn.model.decoder import Block, Decoder
from moe_ffn.model.norm import NormConfig
from moe_ffn.model.positions import Positions, PositionsConfig
from moe_ffn.routing.base import RouterConfig
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.outside_code import tagged_parts
from moe_ffn.testing import Trial, miscounted, show_value, undisturbed
from moe_ffn.training.optimizer import OptimizerConfig
from moe_ffn.training.schedule import ScheduleConfig

_LENGTH = 8
"""Tokens of the vocabulary, and of the sequences, of the model that an optimizer is tried on."""

# -- counts

_COUNTS: dict[type[TaggedConfig], dict[str, tuple[str, ...]]] = {
    FFNConfig: {
        "num_params": ("d_model",),
        "num_active_params": ("d_model",),
        "flops_per_token": ("d_model", "seq_len"),
    },
    ExpertsConfig: {
        "params_per_expert": ("d_model", "num_experts"),
        "shared_params": ("d_model", "num_experts"),
        "flops_per_pair": ("d_model", "num_experts"),
        "shared_flops_per_token": ("d_model", "num_experts"),
        "flops_around_dispatch": ("d_model",),
    },
    RouterConfig: {
        "num_params": ("d_model", "num_experts"),
        "flops_per_token": ("d_model", "num_experts"),
    },
    CombineConfig: {"num_params": ("d_model",), "flops_per_token": ("d_model",)},
    NormConfig: {"num_params": ("d_model",)},
    PositionsConfig: {"num_params": ("d_model", "seq_len")},
}
"""Family -> its methods that count parameters or FLOPs, and their arguments."""


def check_counts(config: TrainConfig) -> None:
    """Call the counts of every custom part, before tables and budgets add them up.

    Raises:
        ConfigError: a count is no number of 0 or more; one sentence with the part's path.
    """
    d_model = config.model.d_model
    sizes: dict[str, Any] = {"d_model": d_model, "seq_len": config.data.seq_len, "num_experts": 2}
    for path, part in reversed(list(tagged_parts(config))):  # what is inside first
        if not is_outside(type(part)):
            continue
        name = f"{'.'.join(map(str, path))} ('{part.type}')"
        for family, methods in _COUNTS.items():
            for method, arguments in methods.items() if isinstance(part, family) else ():
                with explaining_outside_errors(name):
                    found = getattr(part, method)(*(sizes[argument] for argument in arguments))
                if not isinstance(found, int | float) or not 0 <= found < math.inf:
                    raise ConfigError(
                        f"{name}: {method} returned {show(found)}, but has to return a number of 0 or more"
                    )


def check_num_params(decoder: Decoder) -> None:
    """Compare the parameters that each config counts with those that are built of it.

    Tables, facts and equal budgets use the counts. A parameter that layers share belongs to the first.

    Raises:
        ConfigError: they differ; one sentence with the layer and both numbers.
    """
    seen: set[int] = set()
    for name, told, module, ffn in _counted_parts(decoder):
        new = [parameter for parameter in module.parameters() if id(parameter) not in seen]
        seen.update(map(id, new))
        if (found := sum(parameter.numel() for parameter in new)) != told:
            raise miscounted(name, told, found, ffn, decoder.config.d_model)


def _counted_parts(decoder: Decoder) -> Iterator[tuple[str, int, nn.Module, FFNConfig | None]]:
    """Yield (name, counted parameters, module, config of a feed-forward block) of each part of a model."""
    model = decoder.config
    d_model, norm = model.d_model, model.norm
    of_norm = norm.num_params(d_model)
    for layer, (option, ffn) in enumerate(model.ffns_by_option()):
        block, where = cast("Block", decoder.layers[layer]), f"of layer {layer}"
        yield f"model.{option} ('{ffn.type}') {where}", ffn.num_params(d_model), block.ffn, ffn
        told = model.attention.num_params(d_model, norm)
        yield f"model.attention {where}", told, block.attention, None
        for module in (block.attention_norm, block.ffn_norm):
            yield f"model.norm ('{norm.type}') {where}", of_norm, module, None
    if model.norm_placement == "pre":
        yield f"model.norm ('{norm.type}') of the output", of_norm, decoder.final_norm, None
    positions = model.positions
    told = positions.num_params(d_model, decoder.max_seq_len)
    yield f"model.positions ('{positions.type}')", told, decoder.positions, None


# -- trials


def check_custom_parts(config: TrainConfig, device: torch.device) -> None:
    """Try every custom part of a config, and every part that holds one.

    Args:
        device: the device of the run.

    Raises:
        ConfigError: one sentence: the part, what it did, what is expected.
    """
    # Inner parts first: their mistakes would look like those of the block around them.
    for path, part in reversed(list(tagged_parts(config))):
        outside = [p.type for _, p in tagged_parts(part) if is_outside(type(p))]
        if not outside:
            continue
        within = "" if is_outside(type(part)) else f" with '{outside[0]}'"
        name = f"{'.'.join(map(str, path))} ('{part.type}'{within})"
        trial = _Trial(
            name,
            config.model.d_model,
            config.data.seq_len,
            config.model.causal,
            "set model.causal: false",
            device,
            config=config,
        )
        with undisturbed(device), explaining_outside_errors(name):
            for family, check in _CHECKS.items():
                if isinstance(part, family):
                    check(trial, part)


@dataclass(frozen=True)
class _Trial(Trial):
    """One part of a run under test."""

    config: TrainConfig = field(kw_only=True)

    def outside_ffn(self, config: FFNConfig) -> None:
        layers = [n for n, ffn in enumerate(self.config.model.layer_ffns()) if ffn is config]
        self.ffn(config, f" of layer {layers[0]}" if layers else "")

    def outside_router(self, config: RouterConfig) -> None:
        infos = self.config.model.routers().values()
        num_experts = next((info.num_experts for info in infos if info.router is config), None)
        # None where the block around it does not say that it has a router.
        if num_experts is not None:
            self.router(config, num_experts)

    def combine(self, config: CombineConfig) -> None:
        x = self.x()
        combine = self.built(config.build(self.d_model, 1.0), Combine)
        for part in self.require(combine(x, x, x), tuple, "forward"):
            self.require_like(part, x, "a part of what forward returns")

    def norm(self, config: NormConfig) -> None:
        norm = self.built(config.build(self.d_model), nn.Module)
        self.require_like(norm(self.x()), self.x(), "what forward returns")
        self.require_blind_to_future(norm, lambda x, ids: norm(x))

    def positions(self, config: PositionsConfig) -> None:
        model, x = self.config.model, self.x()
        x_BHSd = self.random(*x.shape[:2], model.attention.num_heads, model.head_dim).transpose(
            1, 2
        )
        built = config.build(self.d_model, model.head_dim, self.config.data.seq_len)
        positions = self.built(built, Positions)
        self.require_like(positions.embed(x), x, "what embed returns")
        self.require_like(positions.rotate(x_BHSd), x_BHSd, "what rotate returns")
        self.require_blind_to_future(positions, lambda x, ids: positions.embed(x))
        if config.refusal(Situation(cached=True)) is None:
            backwards_1S = torch.arange(self.length, device=self.device).flip(0)[None]
            alone = [positions.at(slice(place, place + 1)) for place in range(self.length)]
            embedded = [at.embed(x_1) for at, x_1 in zip(alone, x[:1].split(1, 1), strict=True)]
            turned = [at.rotate(x_1) for at, x_1 in zip(alone, x_BHSd[:1].split(1, 2), strict=True)]
            rows = positions.at(backwards_1S)
            for made in (torch.cat(embedded, 1), rows.embed(x[:1].flip(1)).flip(1)):
                self.require_equal(positions.embed(x), made)
            for made in (torch.cat(turned, 2), rows.rotate(x_BHSd[:1].flip(2)).flip(2)):
                whole = positions.rotate(x_BHSd).transpose(1, 2)
                self.require_equal(whole, made.transpose(1, 2))

    def optimizer(self, config: OptimizerConfig) -> None:
        one_layer = self.config.model.model_copy(update={"num_layers": 1, "ffn_at": {}})
        model = one_layer.build(vocab_size=_LENGTH, max_seq_len=_LENGTH).to(self.device)
        optimizer = self.require(config.build(model), Optimizer, "build")
        held = [id(p) for group in optimizer.param_groups for p in group["params"]]
        if sorted(held) != sorted(map(id, model.parameters())):
            raise self.refuse(
                f"its groups hold {len(held)} parameters of a model with {len(list(model.parameters()))}; "
                "each has to be in one group, and in one alone"
            )
        for parameter in model.parameters():
            parameter.grad = self.random(*parameter.shape)
        optimizer.step()
        config.build(model).load_state_dict(optimizer.state_dict())
        for name, parameter in model.named_parameters():
            if not parameter.isfinite().all():
                raise self.refuse(
                    f"its first step makes NaN or infinity of '{name}', though its gradient is random of "
                    "size 1"
                )

    def schedule(self, config: ScheduleConfig) -> None:
        max_steps = self.config.trainer.max_steps
        for step in (0, max_steps - 1, max_steps):
            rate = config.multiplier(step, max_steps)
            if not isinstance(rate, int | float) or not math.isfinite(rate):
                raise self.refuse(
                    f"the multiplier of step {step} is {show_value(rate)}, but has to be a finite number"
                )

    def bias_rule(self, config: BiasRuleConfig) -> None:
        self.require(config.update(torch.zeros(4), torch.ones(4), 1), Tensor, "update")

    def corpus(self, config: CorpusConfig) -> None:
        for document in config.documents():
            self.require(document, Document, "documents")
            return


_CHECKS: dict[type[TaggedConfig], Callable[[_Trial, Any], None]] = {
    FFNConfig: _Trial.outside_ffn,
    RouterConfig: _Trial.outside_router,
    CombineConfig: _Trial.combine,
    NormConfig: _Trial.norm,
    PositionsConfig: _Trial.positions,
    OptimizerConfig: _Trial.optimizer,
    ScheduleConfig: _Trial.schedule,
    BiasRuleConfig: _Trial.bias_rule,
    CorpusConfig: _Trial.corpus,
}
"""Family -> its trial. Experts are tried with the block that holds them."""
