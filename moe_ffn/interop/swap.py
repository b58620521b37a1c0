"""Replace the FFNs of a live dense model of transformers by our blocks."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from pydantic import ValidationError
from torch import Generator, Tensor, nn

from moe_ffn.config.errors import ConfigError, UseCase, explain, show
from moe_ffn.experts import ExpertsConfig
from moe_ffn.ffn.base import FFNBlock, FFNConfig
from moe_ffn.ffn.dense import DenseConfig, GatedConfig
from moe_ffn.ffn.moe import MoEConfig
from moe_ffn.interop.transformers import activation_of
from moe_ffn.kernels.activations import GATE_ACTIVATIONS, GatedType

log = logging.getLogger(__name__)

GATED, PLAIN = ("gate_proj", "up_proj", "down_proj"), ("c_fc", "c_proj")
"""Names of the matrices of an FFN: gate, up and down in Llama and Qwen, up and down in GPT-2."""

MAX_ERROR = {torch.float32: 1e-4, torch.float64: 1e-6}
"""Maximum relative difference that rounding explains, by dtype; 0.05 for narrower dtypes."""


class SwappedFFN(nn.Module):
    """One of our blocks in the place of an FFN of transformers; it returns a tensor."""

    def __init__(self, block: FFNBlock, dropout: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.dropout = dropout
        """Dropout of the output, as in GPT-2."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.dropout(self.block(hidden_states).hidden)


def swap_ffn(
    model: nn.Module, layers: Sequence[int], config: Mapping[str, Any] | str | FFNConfig
) -> None:
    """Replace the FFNs of a dense model of transformers by our blocks, in place.

        router = {"type": "top_k", "k": 2, "renormalize": True}
        swap_ffn(model, [1, 3], {"type": "moe", "num_experts": 8, "router": router})

    FFNs as in Llama, Qwen and GPT-2 can be replaced. A dense or gated block gets the weights of the FFN and
    computes the same; its width, biases and activation are those of the FFN, and need not be given. The
    experts of an MoE are copies of the FFN (`moe_ffn.weights.upcycle`). They compute the same if the weights
    of every token have the same sum, as with `renormalize: true` in the router; otherwise a warning gives the
    difference of the outputs. Any other block starts with random weights.

    The model trains and generates as before, and `watch` records the routing. Padding is routed too, as in
    transformers' sparse models. A block that reads earlier positions (`conv`) needs `use_cache=False`.
    `from_pretrained` may not read what `save_pretrained` of the changed model writes: save the `state_dict`,
    and call `swap_ffn` before you load it.

    Args:
        layers: numbers of layers, from 0.

    Raises:
        ConfigError: a layer has no such FFN, or the block cannot replace it; the model is not changed.
    """
    found = _ffns(model)
    try:
        target = FFNConfig.model_validate(config)
    except ValidationError as error:
        raise ConfigError("\n".join(f"config.{line}" for line in explain(error))) from error
    if (why := target.unsupported(UseCase(causal=True))) is not None:
        raise ConfigError(f"swap_ffn: the model is causal, but config.{why}")
    made: dict[str, SwappedFFN] = {}
    changes: dict[int, float] = {}
    for layer in layers:
        if layer not in found:
            known = ", ".join(map(str, found))
            raise ConfigError(
                f"swap_ffn: layer {layer} of {type(model).__name__} has no dense FFN that can be swapped "
                f"(one made of {' and '.join(GATED)}, or of {' and '.join(PLAIN)}); "
                + (f"layers with one: {known}" if known else "no layer has one")
            )
        path = found[layer]
        ffn = model.get_submodule(path)
        made[path], changes[layer] = _swapped(ffn, target, f"layer {layer}")
    for path, swapped in made.items():
        model.set_submodule(path, swapped)
    if isinstance(target, MoEConfig) and (changed := [n for n in changes if changes[n] > 0]):
        layers_changed = ", ".join(map(str, changed))
        log.warning(
            "swap_ffn: the experts of layer %s are copies of the FFN, but change its output by up to %.2g of "
            "its largest value; %s",
            layers_changed,
            max(changes.values()),
            _how_to_keep(target),
        )


def _how_to_keep(config: MoEConfig) -> str:
    """Return advice on options with which the copied experts compute the same as the FFN."""
    # With one expert a token's weight would be constant, and the router would never learn.
    renormalizes = getattr(config.router, "renormalize", None)
    several = config.router.experts_per_token(config.num_routable) > 1
    options = ["config.router.renormalize: true"] * (renormalizes is False and several)
    options += ["config.capacity.eval_factor: null"] * (config.capacity.eval_factor is not None)
    if not options:
        return "train the model before you use it"
    return f"set {' and '.join(options)} to keep it, or train the model before you use it"


def _ffns(model: nn.Module) -> dict[int, str]:
    """Return layer -> path of its dense FFN; a direct child of the layer, so that no shared expert is one."""
    found: dict[int, str] = {}
    for path, module in model.named_modules():
        number = re.search(r"(?:^|\.)(\d+)\.\w+$", path)
        if number is None or _matrices(module) is None:
            continue
        if int(number[1]) in found:
            raise ConfigError(
                f"swap_ffn: '{path}' of {type(model).__name__} is the second FFN of layer {number[1]}; pass "
                "the submodule that is a single stack of layers"
            )
        found[int(number[1])] = path
    return found


def _matrices(ffn: nn.Module) -> dict[str, tuple[Tensor, Tensor | None]] | None:
    """Return the weight, (out, in), and bias of each of our matrices; None if `ffn` is no known FFN."""
    from transformers.pytorch_utils import Conv1D

    for theirs, ours in ((GATED, ("gate", "up", "down")), (PLAIN, ("up", "down"))):
        parts = [getattr(ffn, name, None) for name in theirs]
        # Exact types: a subclass may be quantised or have adapters.
        if all(type(part) is nn.Linear for part in parts):
            return {n: (p.weight, p.bias) for n, p in zip(ours, cast("Any", parts), strict=True)}
        if all(type(part) is Conv1D for part in parts):
            return {
                n: (p.weight.t(), p.bias) for n, p in zip(ours, cast("Any", parts), strict=True)
            }
    return None


@torch.no_grad()
def _swapped(ffn: nn.Module, target: FFNConfig, where: str) -> tuple[SwappedFFN, float]:
    """Return the new block, and the relative change of outputs by copied experts; 0 within rounding."""
    own, block, weight = _as_block(ffn, where)
    change = 0.0
    if isinstance(target, DenseConfig | GatedConfig):
        kept = block.state_dict()
        block = _like(own, target, where).build(weight.shape[1])
        block.load_state_dict(kept)
    elif isinstance(target, MoEConfig):
        from moe_ffn.weights.upcycle import as_experts, upcycle  # needs YAML, which is optional

        generator = Generator().manual_seed(int(torch.randint(2**62, ())))
        experts = as_experts(own, weight.shape[1])
        assert experts is not None
        config = _with_experts_like(experts, target)
        dense, block = block, upcycle([block], config, weight.shape[1], generator).to(weight.dtype)
        probe = _probe(weight)
        change = _difference(dense.eval()(probe).hidden, block.eval()(probe).hidden)
    else:
        block = target.build(weight.shape[1])
    swapped = SwappedFFN(block, getattr(ffn, "dropout", nn.Identity()))
    is_rounding = change <= MAX_ERROR.get(weight.dtype, 0.05)
    return swapped.to(weight.device, weight.dtype).train(ffn.training), 0 if is_rounding else change


def _probe(weight: Tensor) -> Tensor:
    """Return random tokens for an FFN with this matrix."""
    return torch.randn(8, weight.shape[1], generator=Generator().manual_seed(0)).to(weight.dtype)


def _difference(expected: Tensor, found: Tensor) -> float:
    """Return the largest difference of two outputs, divided by the largest value of the first."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def _as_block(ffn: nn.Module, where: str) -> tuple[DenseConfig | GatedConfig, FFNBlock, Tensor]:
    """Return the config of an FFN, our block with copies of its weights on the CPU, and one of its matrices.

    Raises:
        ConfigError: no block of ours computes the same as the FFN.
    """
    matrices = _matrices(ffn)
    assert matrices is not None
    function = getattr(ffn, "act_fn", None) or getattr(ffn, "act", None)
    activation = None if function is None else activation_of(function)
    weight, bias = matrices["up"]
    sizes: dict[str, Any] = {"d_ff": weight.shape[0], "bias": bias is not None}
    gates: dict[str, GatedType] = {name: gate for gate, name in GATE_ACTIVATIONS.items()}
    config = None
    if "gate" not in matrices and activation is not None:
        config = DenseConfig(activation=activation, **sizes)
    elif activation in gates:
        config = GatedConfig(type=gates[activation], **sizes)
    if config is None:
        raise ConfigError(
            f"swap_ffn: the FFN of {where}, {type(ffn).__name__}, has the activation {function}, which our "
            "dense and gated blocks do not have"
        )
    block = config.build(weight.shape[1]).to(weight.dtype)
    for name, (values, bias) in matrices.items():
        linear = cast("nn.Linear", block.get_submodule(name))
        linear.weight.copy_(values)
        if bias is not None:
            linear.bias.copy_(bias)
    probe = _probe(weight)
    was_training = ffn.training
    expected = ffn.eval()(probe.to(weight.device)).cpu()
    ffn.train(was_training)
    if not _difference(expected, block(probe).hidden) <= MAX_ERROR.get(weight.dtype, 0.05):
        raise ConfigError(
            f"swap_ffn: the FFN of {where}, {type(ffn).__name__}, gives other outputs than its matrices and "
            "activation alone, so it cannot be swapped exactly; choose another layer"
        )
    return config, block, weight


def _like(
    own: DenseConfig | GatedConfig, target: DenseConfig | GatedConfig, where: str
) -> DenseConfig | GatedConfig:
    """Return `target` with missing options taken from the FFN.

    Raises:
        ConfigError: a given option differs from the FFN, so that the weights do not fit.
    """
    given = {
        "type": target.type,
        **{name: getattr(target, name) for name in target.model_fields_set},
    }
    for name, value in own.to_dict().items():
        if name in given and name not in _FREE and given[name] != value:
            raise ConfigError(
                f"swap_ffn: config.{name} is {show(given[name])}, but the FFN of {where} has {show(value)}; "
                "leave it out"
            )
    return own.model_copy(update={name: given[name] for name in _FREE & given.keys()})


_FREE = {"dropout", "multiple_of"}
"""Options of a block that do not depend on its weights."""


def _with_experts_like(experts: ExpertsConfig, target: MoEConfig) -> MoEConfig:
    """Return `target` with missing options of its experts taken from `experts`."""
    given = target.experts
    if "experts" in target.model_fields_set:
        said = {name: getattr(given, name) for name in given.model_fields_set}
        known = {n: v for n, v in experts.to_dict().items() if n in type(given).model_fields}
        experts = type(given).model_validate({**known, "type": given.type, **said})
    return target.model_copy(update={"experts": experts})
