"""Blocks that wrap another block, and add input noise, norms or a learned output vector."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from moe_ffn.config.errors import Unsupported, UseCase, first_unsupported
from moe_ffn.experts.wrappers import InnerNormConfig, build_norm
from moe_ffn.ffn.base import (
    FFNBlock,
    FFNConfig,
    RouterInfo,
    check_input,
    inner_configs,
    without_padding,
)
from moe_ffn.ffn.moe import MoEConfig
from moe_ffn.outputs import FFNOutput, TokenContext
from moe_ffn.routing import LinearRouterConfig
from moe_ffn.routing.base import Router, jittered


class WrapperConfig(FFNConfig, frozen=True):
    """Config of a block that wraps another block; routings keep their names."""

    ffn: FFNConfig = MoEConfig()
    """The inner block."""

    def own_params(self, d_model: int) -> int:
        """Return the number of parameters of the wrapper itself."""
        return 0

    def unsupported(self, use_case: UseCase) -> Unsupported | None:
        return first_unsupported(inner_configs(self), use_case)

    def router_infos(self) -> dict[str, RouterInfo]:
        return {name: info.inside("ffn") for name, info in self.ffn.router_infos().items()}

    def num_params(self, d_model: int) -> int:
        return self.ffn.num_params(d_model) + self.own_params(d_model)

    def num_active_params(self, d_model: int) -> int:
        return self.ffn.num_active_params(d_model) + self.own_params(d_model)

    def flops_per_token(self, d_model: int, seq_len: int) -> int:
        return self.ffn.flops_per_token(d_model, seq_len)

    def describe(self) -> str:
        return f"{self.type} ({self.ffn.describe()})"


class WrapperFFN(FFNBlock):
    """after(f(before(x))), by default f(x)."""

    def __init__(self, config: WrapperConfig, d_model: int) -> None:
        super().__init__()
        self.config = config
        self.d_model = d_model
        self.ffn = config.ffn.build(d_model)

    def before(self, x: Tensor) -> Tensor:
        """Return the input of the inner block; padding in `x` is zero."""
        return x

    def after(self, y: Tensor) -> Tensor:
        """Return the output from the output of the inner block."""
        return y

    def forward(self, x: Tensor, context: TokenContext | None = None) -> FFNOutput:
        check_input(x, context, self.d_model, self)
        output = self.ffn(self.before(without_padding(x, context)), context)
        return replace(output, hidden=self.after(output.hidden))

    def routers(self) -> dict[str, Router]:
        return self.ffn.routers()

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}"


class JitteredConfig(WrapperConfig, frozen=True):
    """Noise on the input of a whole block, in training (Mixtral in transformers)."""

    type: Literal["jittered"] = "jittered"
    jitter: float = Field(default=0.01, ge=0, lt=1)
    """Multiply the input by noise from U(1 - jitter, 1 + jitter); `router.jitter` affects the router only."""

    @model_validator(mode="after")
    def _reject_jitter_of_routers(self) -> JitteredConfig:
        for info in self.router_infos().values():
            router = info.router
            if self.jitter and isinstance(router, LinearRouterConfig) and router.jitter:
                raise ValueError(
                    f"jitter ({self.jitter:g}) also reaches the router, which has {info.path}.router.jitter "
                    f"({router.jitter:g}); set one of them to 0"
                )
        return self

    def build(self, d_model: int) -> FFNBlock:
        return JitteredFFN(self, d_model)


class JitteredFFN(WrapperFFN):
    """f(x * noise) in training, f(x) in evaluation."""

    def __init__(self, config: JitteredConfig, d_model: int) -> None:
        super().__init__(config, d_model)
        self.jitter = config.jitter

    def before(self, x: Tensor) -> Tensor:
        if not (self.training and self.jitter):
            return x
        return jittered(x, self.jitter).to(x.dtype)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}, jitter={self.jitter:g}"


class BiasedConfig(WrapperConfig, frozen=True):
    """A learned vector added to the output of a block (JetMoE)."""

    type: Literal["biased"] = "biased"

    def own_params(self, d_model: int) -> int:
        return d_model

    def build(self, d_model: int) -> FFNBlock:
        return BiasedFFN(self, d_model)


class BiasedFFN(WrapperFFN):
    """f(x) + b; b is initialised to zero."""

    def __init__(self, config: BiasedConfig, d_model: int) -> None:
        super().__init__(config, d_model)
        self.bias = nn.Parameter(torch.zeros(d_model))

    def after(self, y: Tensor) -> Tensor:
        return y + self.bias.to(y.dtype)


class NormedConfig(WrapperConfig, frozen=True):
    """A block between RMS norms; both are off by default, and `{}` is a norm with default options.

    A.X K1 and Gemma 4 have such norms around the mixture, Gemma 4 also around its shared expert.
    """

    type: Literal["normed"] = "normed"
    input: InnerNormConfig | None = None
    """Norm of the input of the block."""
    output: InnerNormConfig | None = None
    """Norm of the output of the block."""

    def own_params(self, d_model: int) -> int:
        return sum(norm is not None for norm in (self.input, self.output)) * d_model

    def build(self, d_model: int) -> FFNBlock:
        return NormedFFN(self, d_model)


class NormedFFN(WrapperFFN):
    """norm(f(norm(x)))."""

    def __init__(self, config: NormedConfig, d_model: int) -> None:
        super().__init__(config, d_model)
        self.input = build_norm(config.input, d_model)
        self.output = build_norm(config.output, d_model)

    def before(self, x: Tensor) -> Tensor:
        return self.input(x)

    def after(self, y: Tensor) -> Tensor:
        return self.output(y)
