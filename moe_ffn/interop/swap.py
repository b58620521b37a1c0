"""Replace FFNs of a live dense model of transformers by our blocks."""

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
from moe_ffn.interop.kernels import activation_of
from moe_ffn.kernels.activations import GATE_ACTIVATIONS, GatedType

log = logging.getLogger(__name__)

GATED, PLAIN = ("gate_proj", "up_proj", "down_proj"), ("c_fc", "c_proj")
"""Names of an FFN's matrices: gate, up and down in Llama and Qwen, up and down in GPT-2."""

MAX_ERROR = {torch.float32: 1e-4, torch.float64: 1e-6}
"""Dtype -> maximum relative difference that rounding explains; 0.05 for other dtypes."""


class SwappedFFN(nn.Module):
    """One of our blocks, with the interface of an FFN of transformers: it returns a tensor."""

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

    It replaces FFNs like those of Llama, Qwen and GPT-2. A dense or gated block gets the weights of the FFN
    and computes the same; you need not give its width, biases and activation. The experts of an MoE are
    copies of the FFN (`moe_ffn.weights.upcycle`). They compute the same if all tokens have the same sum of
    weights, as with `renormalize: true` in the router; otherwise a warning gives the difference of the
    outputs. Any other block starts with random weights.

    The model trains and generates as before, and `watch` records the routing. Padding is routed too, as in
    transformers' sparse models. A block that reads earlier positions (`conv`) needs `use_cache=False`.
    `from_pretrained` may not read the changed model after `save_pretrained`: save its `state_dict` instead,
    and call `swap_ffn` before you load it.

    Args:
        layers: numbers of layers, from 0.

    Raises:
        ConfigError: a layer has no such FFN, or the block cannot replace it; the model is not changed.
    """
    paths = _ffns(model)
    try:
        target = FFNConfig.model_validate(config)
    except ValidationError as error:
        raise ConfigError("\n".join(f"config.{line}" for line in explain(error))) from error
    if (why := target.unsupported(UseCase(causal=True))) is not None:
        raise ConfigError(f"swap_ffn: the model is causal, but config.{why}")
    new_ffns: dict[str, SwappedFFN] = {}
    changes: dict[int, float] = {}
    for layer in layers:
        if layer not in paths:
            known = ", ".join(map(str, paths))
            raise ConfigError(
                f"swap_ffn: layer {layer} of {type(model).__name__} has no dense FFN that can be swapped "
                f"(made of {' and '.join(GATED)}, or of {' and '.join(PLAIN)}); "
                + (f"these layers have one: {known}" if known else "no layer has one")
            )
        ffn = model.get_submodule(paths[layer])
        new_ffns[paths[layer]], changes[layer] = _swapped(ffn, target, f"layer {layer}")
    for path, swapped in new_ffns.items():
        model.set_submodule(path, swapped)
    if isinstance(target, MoEConfig) and (changed := [n for n in changes if changes[n] > 0]):
        log.warning(
            "swap_ffn: the experts of layer %s are copies of the FFN, but change its output by up to %.2g of "
            "its largest value; %s",
            ", ".join(map(str, changed)),
            max(changes.values()),
            _advice(target),
        )


def _advice(config: MoEConfig) -> str:
    """Return advice on options with which the copied experts compute the same as the FFN."""
    # With one expert a token's weight would be constant, and the router would never learn.
    renormalizes = getattr(config.router, "renormalize", None)
    several = config.router.experts_per_token(config.num_routable) > 1
    options = ["config.router.renormalize: true"] * (renormalizes is False and several)
    options += ["config.capacity.eval_factor: null"] * (config.capacity.eval_factor is not None)
    keep = f"set {' and '.join(options)} to keep it, or " if options else ""
    return f"{keep}train the model before you use it"


def _ffns(model: nn.Module) -> dict[int, str]:
    """Return layer -> path of its dense FFN, a direct child of the layer, which excludes shared experts."""
    paths: dict[int, str] = {}
    for path, module in model.named_modules():
        number = re.search(r"(?:^|\.)(\d+)\.\w+$", path)
        if number is None or _matrices(module) is None:
            continue
        if int(number[1]) in paths:
            raise ConfigError(
                f"swap_ffn: '{path}' of {type(model).__name__} is the second FFN of layer {number[1]}; pass "
                "the submodule that is a single stack of layers"
            )
        paths[int(number[1])] = path
    return paths


def _matrices(ffn: nn.Module) -> dict[str, tuple[Tensor, Tensor | None]] | None:
    """Return the weight, (out, in), and bias of each of our matrices; None if `ffn` is not a known FFN."""
    from transformers.pytorch_utils import Conv1D

    for theirs, ours in ((GATED, ("gate", "up", "down")), (PLAIN, ("up", "down"))):
        linears: list[Any] = [getattr(ffn, name, None) for name in theirs]
        # Exact types: a subclass may be quantised or have adapters.
        for linear_type, is_transposed in ((nn.Linear, False), (Conv1D, True)):
            if all(type(linear) is linear_type for linear in linears):
                return {
                    name: (linear.weight.t() if is_transposed else linear.weight, linear.bias)
                    for name, linear in zip(ours, linears, strict=True)
                }
    return None


@torch.no_grad()
def _swapped(ffn: nn.Module, target: FFNConfig, where: str) -> tuple[SwappedFFN, float]:
    """Return the new block, and the relative change of outputs if experts are copies; 0 within rounding."""
    own, block, weight = _as_block(ffn, where)
    change = 0.0
    if isinstance(target, DenseConfig | GatedConfig):
        weights = block.state_dict()
        block = _complete_from(own, target, where).build(weight.shape[1])
        block.load_state_dict(weights)
    elif isinstance(target, MoEConfig):
        from moe_ffn.weights.upcycle import as_experts, upcycle  # needs YAML, which is optional

        generator = Generator().manual_seed(int(torch.randint(2**62, ())))
        experts = as_experts(own, weight.shape[1])
        assert experts is not None
        config = _with_experts_like(experts, target)
        dense, block = block, upcycle([block], config, weight.shape[1], generator).to(weight.dtype)
        x = _random_tokens(weight)
        change = _difference(dense.eval()(x).hidden, block.eval()(x).hidden)
    else:
        block = target.build(weight.shape[1])
    swapped = SwappedFFN(block, getattr(ffn, "dropout", nn.Identity()))
    is_rounding = change <= MAX_ERROR.get(weight.dtype, 0.05)
    return swapped.to(weight.device, weight.dtype).train(ffn.training), 0 if is_rounding else change


def _random_tokens(weight: Tensor) -> Tensor:
    """Return random inputs for an FFN with this up matrix."""
    return torch.randn(8, weight.shape[1], generator=Generator().manual_seed(0)).to(weight.dtype)


def _difference(expected: Tensor, found: Tensor) -> float:
    """Return the largest difference of two outputs, divided by the largest value of the first."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def _as_block(ffn: nn.Module, where: str) -> tuple[DenseConfig | GatedConfig, FFNBlock, Tensor]:
    """Return our config of an FFN, our block with its weights on the CPU, and its up matrix; ConfigError if
    no block computes the same.
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
            "dense and gated blocks do not have; choose another layer"
        )
    block = config.build(weight.shape[1]).to(weight.dtype)
    for name, (values, bias) in matrices.items():
        linear = cast("nn.Linear", block.get_submodule(name))
        linear.weight.copy_(values)
        if bias is not None:
            linear.bias.copy_(bias)
    x = _random_tokens(weight)
    was_training = ffn.training
    expected = ffn.eval()(x.to(weight.device)).cpu()
    ffn.train(was_training)
    if not _difference(expected, block(x).hidden) <= MAX_ERROR.get(weight.dtype, 0.05):
        raise ConfigError(
            f"swap_ffn: the FFN of {where}, {type(ffn).__name__}, computes more than its matrices and "
            "activation, so that no block of ours can replace it; choose another layer"
        )
    return config, block, weight


def _complete_from(
    own: DenseConfig | GatedConfig, target: DenseConfig | GatedConfig, where: str
) -> DenseConfig | GatedConfig:
    """Return `target` with missing options of the FFN; ConfigError if one does not fit its weights."""
    given = {name: getattr(target, name) for name in {"type", *target.model_fields_set}}
    for name, value in own.to_dict().items():
        if name in given and name not in _FREE and given[name] != value:
            raise ConfigError(
                f"swap_ffn: config.{name} is {show(given[name])}, but the FFN of {where} has {show(value)}; "
                f"{'give that' if name == 'type' else 'leave it out'}"  # a config needs a type
            )
    return own.model_copy(update={name: given[name] for name in _FREE & given.keys()})


_FREE = {"dropout", "multiple_of"}
"""Options of a block that do not depend on its weights."""


def _with_experts_like(experts: ExpertsConfig, target: MoEConfig) -> MoEConfig:
    """Return `target` with missing options of its experts taken from `experts`."""
    given = target.experts
    if "experts" in target.model_fields_set:
        options = {n: v for n, v in experts.to_dict().items() if n in type(given).model_fields}
        options |= {name: getattr(given, name) for name in {"type", *given.model_fields_set}}
        experts = type(given).model_validate(options)
    return target.model_copy(update={"experts": experts})
