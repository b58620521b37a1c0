"""Parametrizations: rules that set initial weights and learning rates from the sizes of a model.

No rule changes the forward pass: a factor of a weight is folded into its initial values and its learning
rate, so that a trained model is exported like any other.
"""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import nn

from moe_ffn.config.base import TaggedConfig, require_count
from moe_ffn.config.errors import ConfigError, first_line, show
from moe_ffn.config.option_tree import merge, nest_options
from moe_ffn.experts.matrices import MatrixExpertsConfig
from moe_ffn.ffn.base import FFNConfig
from moe_ffn.ffn.dense import ConvConfig, HiddenWidthConfig, IdentityConfig
from moe_ffn.ffn.moe import MoEConfig
from moe_ffn.model.norm import LayerNormConfig, RMSNormConfig
from moe_ffn.routing.base import LinearRouterConfig

if TYPE_CHECKING:
    from moe_ffn.model.decoder import DecoderConfig

# -- the parts of a model

LAYERS = "layers."
"""Prefix of parameter names in the layers of a decoder."""

Part = Literal[
    "embeddings", "attention", "router", "ffn_up", "ffn_down", "norms", "output", "other"
]
"""Part of a model that may have its own learning rate. `ffn_up` and `ffn_down` are the matrices into and out
of the hidden units of experts, shared experts and dense blocks; `output` is an untied output matrix."""

_FUSED = {"gate_up": 2}
"""Name of a parameter or its module -> number of matrices that the parameter concatenates."""

_FFN_PARTS: dict[str, Part] = {
    "up": "ffn_up",
    "gate": "ffn_up",
    "gate_up": "ffn_up",
    "down": "ffn_down",
}


def part_of(name: str, owner: nn.Module) -> Part:
    """Return the part of a parameter, such as `layers.0.ffn.experts.down`, which the module `owner` holds."""
    words = [word.removesuffix("_bias") for word in name.split(".")]
    if "Norm" in type(owner).__name__:
        return "norms"
    if "router" in words or "later_routers" in words:
        return "router"
    if "attention" in words:
        return "attention"
    if "combine" in words:  # the gate of a shared expert's output
        return "other"
    for word in words if name.startswith(LAYERS) else ():
        if word in _FFN_PARTS:
            return _FFN_PARTS[word]
    if isinstance(owner, nn.Embedding) or words[0] == "mask_embedding":
        return "embeddings"
    return "output" if words[0] == "unembedding" else "other"


def parts_of(model: nn.Module) -> dict[str, Part]:
    """Return the part of each parameter, by name; a tied parameter appears once."""
    modules = dict(model.named_modules())
    names = (name for name, _ in model.named_parameters())
    return {name: part_of(name, modules[name.rpartition(".")[0]]) for name in names}


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Return True for a matrix or a stack of matrices, but not for stacked biases (E, F), by their names."""
    return parameter.ndim >= 2 and not name.endswith("bias")


def num_fused(name: str) -> int:
    """Return the number of matrices that a parameter concatenates, one above the other."""
    return max(_FUSED.get(word, 1) for word in name.split("."))


# -- rules


@dataclass(frozen=True)
class ParameterScale:
    """Shape of a parameter here and in the base model, which determines its learning rate."""

    multiplier: float = 1.0
    """Factor of the parameter, folded into its initial values and its learning rate."""

    shape: tuple[int, int] | None = None
    """(outputs, inputs) of a matrix; None for a vector, an embedding and an output matrix."""

    base_shape: tuple[int, int] | None = None
    """(outputs, inputs) of the matrix in the base model."""

    def growth(self, function: Callable[[int, int], float]) -> float:
        """Return function(outputs, inputs) divided by its value in the base model; 1 without a shape."""
        if self.shape is None or self.base_shape is None:
            return 1.0
        return function(*self.shape) / function(*self.base_shape)

    @property
    def init(self) -> float:
        """Factor of the standard initial values, which are proportional to 1 / sqrt(inputs).

        A matrix gets a standard deviation proportional to min(1, sqrt(outputs / inputs)) / sqrt(inputs) (Yang
        et al. 2023, arXiv:2310.17813). Router logits therefore start smaller in a wider model.
        """
        return self.multiplier * self.growth(lambda out, into: min(1.0, math.sqrt(out / into)))


class ParametrizationConfig(TaggedConfig, frozen=True):
    """Rule that sets initial weights and learning rates from the sizes of a model."""

    def unsupported_reason(self, model: DecoderConfig) -> str | None:
        """Return why the rule does not cover a model, with an alternative; None if it does."""
        return None

    @abstractmethod
    def scales(
        self, model: DecoderConfig, vocab_size: int, max_seq_len: int
    ) -> dict[str, ParameterScale]:
        """Return name -> scale for each parameter that the rule may change."""


class StandardConfig(ParametrizationConfig, frozen=True):
    """One learning rate for all parameters; weights are initialised as in `torch.nn`."""

    type: Literal["standard"] = "standard"

    def scales(
        self, model: DecoderConfig, vocab_size: int, max_seq_len: int
    ) -> dict[str, ParameterScale]:
        return {}


def _nest_dotted_keys(value: Any) -> Any:
    return nest_options(value.items()) if isinstance(value, dict) else value


class CompletePConfig(ParametrizationConfig, frozen=True):
    """Learning rates and initial weights that transfer from a small model, the base, to a larger one.

    CompleteP (Dey et al. 2025, arXiv:2505.01618) with experts (arXiv:2508.09752, 2601.20205). Under AdamW, a
    matrix with r times the inputs of its counterpart in the base has 1 / r of the learning rate. Under Muon,
    the spectral norm of its update is proportional to sqrt(outputs / inputs) (arXiv:2310.17813). Each
    sublayer's output is divided by the growth of the depth, the logits by the growth of the width, and
    attention scores by the growth of the head width. Weight decay per step does not change. A model with the
    sizes of the base trains bit for bit as with `standard`.

    The number of experts changes nothing: each expert's matrices and each row of the router follow their own
    widths, and the weights of a token's experts sum to about 1. Keep k / num_experts constant, or set
    `renormalize`.
    """

    type: Literal["completep"] = "completep"
    base: Annotated[dict[str, Any], BeforeValidator(_nest_dotted_keys)] = Field(min_length=1)
    """Sizes of the model for which the learning rate was chosen, as options of `model`: {d_model: 64,
    num_layers: 4, ffn.num_experts: 8}. Options left out are those of this model; if this model sets d_ff, set
    it here too."""

    def base_model(self, model: DecoderConfig) -> DecoderConfig:
        """Return the model with the base's sizes but its own depth; ConfigError if that is not valid."""
        if "parametrization" in self.base:
            raise ConfigError(
                "parametrization: cannot be in a base, which lists sizes; leave it out"
            )
        require_count(self.base.get("num_layers", 1), "num_layers")
        options = merge(model.to_dict() | {"parametrization": "standard"}, self.base)
        options["num_layers"] = model.num_layers
        return type(model)(**options)

    def depth_ratio(self, model: DecoderConfig) -> float:
        """Return the number of layers relative to the base."""
        return model.num_layers / self.base.get("num_layers", model.num_layers)

    def unsupported_reason(self, model: DecoderConfig) -> str | None:
        if model.norm_placement != "pre":
            return f"needs norm_placement pre, got {model.norm_placement}; use standard"
        if not isinstance(model.norm, RMSNormConfig | LayerNormConfig):
            return f"has no rule for norm.type '{model.norm.type}'; use standard"
        for layer, ffn in enumerate(model.layer_ffns()):
            if part := next(_uncovered_options(ffn), None):
                return f"has no rule for {part} in layer {layer}; use standard"
        try:
            base = self.base_model(model)
        except (ConfigError, TypeError, ValueError) as error:
            return f"needs another base: {first_line(error)}"
        width = next(_given_widths(model), None)
        if (
            width is not None
            and base.d_model != model.d_model
            and '"d_ff"' not in json.dumps(self.base)
        ):
            return (
                f"needs d_ff in its base: this model has d_ff {show(width)}, which would be that of a "
                f"base of d_model {base.d_model} too; add its own"
            )
        parameters, of_base = self._parameters(model, base, 1, 1)
        if others := sorted(parameters.keys() ^ of_base.keys()):
            return (
                f"needs a base of other sizes only, but its model has other parameters "
                f"({', '.join(others[:2])}); list only sizes"
            )
        return None

    def _parameters(
        self, model: DecoderConfig, base: DecoderConfig, *sizes: int
    ) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
        """Return name -> parameter, without values, of the model and of the base."""
        plain = model.model_copy(update={"parametrization": StandardConfig()})
        # These two models must not advance the generator that draws the model's own weights.
        with torch.random.fork_rng(devices=[]):
            large, small = plain.build_empty(*sizes), base.build_empty(*sizes)
        return dict(large.named_parameters()), dict(small.named_parameters())

    def scales(
        self, model: DecoderConfig, vocab_size: int, max_seq_len: int
    ) -> dict[str, ParameterScale]:
        base = self.base_model(model)
        parameters, of_base = self._parameters(model, base, vocab_size, max_seq_len)
        multipliers = dict(self._multipliers(model, base))
        scales: dict[str, ParameterScale] = {}
        for name, parameter in parameters.items():
            module = name.removesuffix(".weight").removesuffix(".bias").removesuffix("_bias")
            multiplier = multipliers.get(module) or multipliers.get(_within_layer(module), 1.0)
            scales[name] = ParameterScale(multiplier)
            if name.startswith(LAYERS) and is_matrix(name, parameter):
                (*_, out, into), (*_, base_out, base_into) = parameter.shape, of_base[name].shape
                if module.split(".")[-2] == "router":
                    out = base_out = 1  # each row makes one logit, however many experts there are
                fused = num_fused(name)
                shape, base_shape = (out // fused, into), (base_out // fused, base_into)
                scales[name] = ParameterScale(multiplier, shape, base_shape)
        return scales

    def _multipliers(
        self, model: DecoderConfig, base: DecoderConfig
    ) -> Iterator[tuple[str, float]]:
        """Yield (module or parameter, its factor); names in a layer leave out `layers.N.`."""
        width = model.d_model / base.d_model
        # scale_embeddings multiplies by sqrt(d_model); smaller embeddings undo the growth of that factor.
        embedding = width**-0.5 if model.scale_embeddings else 1.0
        yield "embedding", embedding
        yield "mask_embedding", embedding
        yield "final_norm", 1 / width / (embedding if model.tie_embeddings else 1.0)
        for module in (
            "attention.output",
            "ffn.down",
            "ffn.experts.down",
            "ffn.shared_expert.down",
        ):
            yield module, 1 / self.depth_ratio(model)
        attention = model.attention
        query = "attention.query_norm" if attention.norm_qk else "attention.query"
        if attention.latent is not None:
            # With query_rank, a matrix and a norm come before the matrix that makes the queries.
            query = f"attention.query.{0 if attention.latent.query_rank is None else 2}"
        yield (
            query,
            math.sqrt(
                base.attention.score_width(base.d_model) / attention.score_width(model.d_model)
            ),
        )


def _within_layer(module: str) -> str:
    """Return `ffn.experts.down` for `layers.3.ffn.experts.down`; an empty string outside the layers."""
    return module.split(".", 2)[-1] if module.startswith(LAYERS) else ""


def _given_widths(model: DecoderConfig) -> Iterator[Any]:
    """Yield the `d_ff` that options set, rather than d_model."""
    for ffn in model.layer_ffns():
        shared = getattr(ffn, "shared_expert", None)
        for part in (ffn, getattr(ffn, "experts", None), shared):
            if (width := getattr(part, "d_ff", None)) is not None:
                yield width


def _uncovered_options(ffn: FFNConfig) -> Iterator[str]:
    """Yield the options of a block that no rule covers."""
    if isinstance(ffn, HiddenWidthConfig | IdentityConfig) and not isinstance(ffn, ConvConfig):
        return
    if not isinstance(ffn, MoEConfig):
        yield f"type '{ffn.type}'"
        return
    if not isinstance(ffn.experts, MatrixExpertsConfig):
        yield f"experts.type '{ffn.experts.type}'"
    if not isinstance(ffn.router, LinearRouterConfig) and ffn.router.num_params(1, 1):
        yield f"router.type '{ffn.router.type}'"
    if ffn.zero_computation.total:
        yield "zero_computation"
    if ffn.shared_expert is not None:
        yield from (f"shared_expert.{part}" for part in _uncovered_options(ffn.shared_expert))
