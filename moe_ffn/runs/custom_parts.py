"""Checks of custom parts before training: parameter counts, and a trial of each part on random tokens.

Blocks, routers and experts pass the checks of `moe_ffn.testing`. Other parts are tried in a model of one
layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import cast

import torch
from torch import nn
from torch.optim import Optimizer

from moe_ffn.config.errors import ConfigError, show
from moe_ffn.config.import_path import explaining_custom_errors, is_custom_class
from moe_ffn.data.corpus import CorpusConfig, Document
from moe_ffn.ffn import FFNConfig, IdentityConfig
from moe_ffn.model.decoder import Decoder, DecoderLayer
from moe_ffn.model.norm import NormConfig
from moe_ffn.model.parametrization import StandardConfig
from moe_ffn.model.positions import Positions, PositionsConfig
from moe_ffn.routing.base import RouterConfig
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.custom_code import tagged_parts
from moe_ffn.testing import PartChecks, describe_value, isolated_rng, miscounted
from moe_ffn.training.optimizer import OptimizerConfig
from moe_ffn.training.schedule import ScheduleConfig

VOCAB_SIZE = 2
"""Vocabulary size of the trial model."""


def check_counts(config: TrainConfig) -> None:
    """Check the counts of every feed-forward block and of the model.

    Raises ConfigError if one is negative, infinite or no number; the message names the part and the method.
    """
    model, seq_len = config.model, config.data.seq_len
    for option, ffn in dict(model.ffns_by_option()).items():
        name = f"model.{option} ('{ffn.type}')"
        _require_number(name, ffn.num_params, model.d_model)
        _require_number(name, ffn.num_active_params, model.d_model)
        _require_number(name, ffn.flops_per_token, model.d_model, seq_len)
    for count in (model.num_params, model.num_active_params, model.flops_per_token):
        _require_number("model", count, *config.data.text_sizes)


def _require_number(name: str, count: Callable[..., object], *arguments: int) -> None:
    with explaining_custom_errors(name):
        value = count(*arguments)
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(
            f"{name}: {count.__name__} returned {show(value)}, but has to return a number of 0 or more"
        )


def check_num_params(decoder: Decoder) -> None:
    """Raise ConfigError, with both numbers, if `num_params` of a config differs from its module's.

    Tables, facts and equal budgets rely on `num_params`. A shared parameter counts in its first layer.
    """
    seen: set[int] = set()
    for name, counted, module, ffn in _counted_parts(decoder):
        new = [parameter for parameter in module.parameters() if id(parameter) not in seen]
        seen.update(map(id, new))
        if (actual := sum(parameter.numel() for parameter in new)) != counted:
            raise miscounted(name, counted, actual, ffn, decoder.config.d_model)


def _counted_parts(decoder: Decoder) -> Iterator[tuple[str, int, nn.Module, FFNConfig | None]]:
    """Yield (name, `num_params`, module, config if it is a feed-forward block) of each part of a model."""
    model = decoder.config
    d_model, norm = model.d_model, model.norm
    norm_params = norm.num_params(d_model)
    for layer, (option, ffn) in enumerate(model.ffns_by_option()):
        block, where = cast("DecoderLayer", decoder.layers[layer]), f"of layer {layer}"
        yield f"model.{option} ('{ffn.type}') {where}", ffn.num_params(d_model), block.ffn, ffn
        counted = model.attention.num_params(d_model, norm)
        yield f"model.attention {where}", counted, block.attention, None
        for module in (block.attention_norm, block.ffn_norm):
            yield f"model.norm ('{norm.type}') {where}", norm_params, module, None
    if model.norm_placement == "pre":
        yield f"model.norm ('{norm.type}') of the output", norm_params, decoder.final_norm, None
    positions = model.positions
    counted = positions.num_params(d_model, decoder.max_seq_len)
    yield f"model.positions ('{positions.type}')", counted, decoder.positions, None


def check_custom_parts(config: TrainConfig, device: torch.device) -> None:
    """Try every custom part of a config, and every block that contains one, on the run's device.

    Raises ConfigError if a part fails; the message names the part, what it did, and what is expected.
    """
    model = config.model
    # Inner parts first; otherwise their mistakes would be reported for the block around them.
    for path, part in reversed(list(tagged_parts(config))):
        custom_types = [p.type for _, p in tagged_parts(part) if is_custom_class(type(p))]
        if not custom_types:
            continue
        inner = "" if is_custom_class(type(part)) else f" with '{custom_types[0]}'"
        name = f"{'.'.join(map(str, path))} ('{part.type}'{inner})"
        advice = "set model.causal: false"
        checks = PartChecks(name, model.d_model, config.data.seq_len, model.causal, advice, device)
        with isolated_rng(device), explaining_custom_errors(name):
            if isinstance(part, FFNConfig):
                layers = [layer for layer, ffn in enumerate(model.layer_ffns()) if ffn is part]
                checks.ffn(part, f" of layer {layers[0]}" if layers else "")
            elif isinstance(part, RouterConfig):
                for info in model.router_infos().values():
                    if info.router is part:
                        checks.router(part, info.num_experts)
                        break
            elif isinstance(part, CorpusConfig):
                for document in part.documents():
                    checks.require(document, Document, "documents")
                    break
            elif isinstance(part, ScheduleConfig):
                _check_schedule(part, config.trainer.max_steps, checks)
            elif isinstance(part, NormConfig | PositionsConfig):
                _check_module(part, config, checks)
                decoder = _small_model(config, checks, ffn=IdentityConfig())
                checks.require_causal_outputs(decoder, lambda _, ids, d=decoder: d(ids).logits)
            elif isinstance(part, OptimizerConfig):
                _check_optimizer(part, _small_model(config, checks), checks)


def _small_model(config: TrainConfig, checks: PartChecks, **changes: object) -> Decoder:
    """Return a model of one layer, after one forward pass."""
    attention = config.model.attention.model_copy(update={"window_at": ":"})
    one_layer = config.model.model_copy(
        update={
            "num_layers": 1,
            "ffn_at": {},
            "attention": attention,
            "parametrization": StandardConfig(),  # its base may not fit one layer
            **changes,
        }
    )
    decoder = one_layer.build(VOCAB_SIZE, config.data.seq_len).to(checks.device)
    if not decoder(checks.token_ids_BS()).logits.isfinite().all():
        raise checks.error("a model with it returns NaN or infinity")
    return decoder


def _check_module(
    part: NormConfig | PositionsConfig, config: TrainConfig, checks: PartChecks
) -> None:
    """Require that a norm, or `embed` of positions, returns a tensor like its input."""
    model, x = config.model, checks.x()
    if isinstance(part, NormConfig):
        norm = checks.built(part.build(model.d_model), nn.Module)
        checks.require_like(norm(x), x, "what forward returns")
    else:
        built = part.build(model.d_model, model.head_dim, config.data.seq_len)
        checks.require_like(checks.built(built, Positions).embed(x), x, "what embed returns")


def _check_schedule(schedule: ScheduleConfig, max_steps: int, checks: PartChecks) -> None:
    for step in (0, max_steps - 1, max_steps):
        rate = schedule.multiplier(step, max_steps)
        if not isinstance(rate, int | float) or not math.isfinite(rate):
            raise checks.error(
                f"the multiplier of step {step} is {describe_value(rate)}, but has to be a finite number"
            )


def _check_optimizer(config: OptimizerConfig, model: nn.Module, checks: PartChecks) -> None:
    """Require that each parameter is in one group, take a step, and load the state."""
    optimizer = checks.require(config.build(model), Optimizer, "build")
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if sorted(grouped) != sorted(map(id, model.parameters())):
        raise checks.error(
            f"its groups hold {len(grouped)} parameters of a model with {len(list(model.parameters()))}; "
            "each has to be in exactly one group"
        )
    for parameter in model.parameters():
        parameter.grad = checks.random(*parameter.shape)
    optimizer.step()
    config.build(model).load_state_dict(optimizer.state_dict())
