"""Type of an entry in the table of sparse blocks of transformers, and helpers that entries share.

An entry has a template of our options, and the names of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch

from moe_ffn.hf.families import FAMILIES
from moe_ffn.hf.from_transformers import sparse_options
from moe_ffn.hf.layouts import (
    TensorLayout,
    WeightSlice,
    gate_up_down,
    interleaved,
    linear,
    named,
    rows_of,
    stacked,
    transposed,
)
from moe_ffn.hf.options import ACTIVATIONS, HFConfig

# -- an entry

Template = Mapping[str, Any] | Callable[[Any], Any]
"""Our options as in YAML. A value `=NAME` is an option of the config of transformers, and a function computes
a value from this config."""


@dataclass(frozen=True)
class BlockEntry:
    """A sparse feed-forward block of transformers, described by our options and tensors."""

    class_name: str
    """Class in the model's file; a decoder layer if the experts have no block class."""
    ffn: Template
    """Config of our block."""
    names: Mapping[str, TensorLayout] = field(default_factory=dict)
    """Our name of a tensor -> its layout in the block, for tensors that are not in `NAMES`."""
    config_name: str = ""
    """Config class; by default the text config whose name shares the longest prefix with `class_name`."""
    small: Mapping[str, Any] = field(default_factory=dict)
    """Their options for a small block, in addition to `SMALL` of `experiments.published_blocks`."""
    supported: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Their option that `ffn` does not read -> the values for which this entry is correct."""
    unused: tuple[str, ...] = ()
    """Regular expressions of tensors in their class that do not belong to the block."""
    in_training: Template | None = None
    """Config of our block in training, for blocks with noise or a capacity; empty if it does not differ."""
    note: str = ""
    """Remark for readers of the table."""
    bug: str = ""
    """Difference between their code and its paper; ours follows the paper."""

    def with_changes(self, options: Template | None = None, **changes: Any) -> BlockEntry:
        """Return the entry of a similar model, with some of our options and other fields changed."""
        if options is not None:
            changes["ffn"] = lambda config: merged(
                resolve(self.ffn, config), resolve(options, config)
            )
        return replace(self, **changes)


class LiveOptions(Mapping[str, Any]):
    """Options of a live config of transformers, by name or alias, with defaults for missing options."""

    def __init__(self, config: Any, defaults: Mapping[str, Any]) -> None:
        self.config, self.defaults = config, defaults

    def __getitem__(self, key: str) -> Any:
        if hasattr(self.config, key):
            return getattr(self.config, key)
        return self.defaults[key]

    def __contains__(self, key: object) -> bool:
        return hasattr(self.config, str(key)) or key in self.defaults

    def __iter__(self) -> Iterator[str]:
        return iter({*vars(self.config), *self.defaults})

    def __len__(self) -> int:
        return len({*vars(self.config), *self.defaults})


def translated(values: Mapping[str, str], name: str) -> Callable[[Any], str]:
    """Return a function that maps the value of their option to ours; it rejects a value not in `values`."""

    def translate(config: Any) -> str:
        theirs = config
        for part in name.split("."):
            theirs = theirs[part] if isinstance(theirs, Mapping) else getattr(theirs, part)
        HFConfig(type(config).__name__, {name: theirs}).require(name, *values)
        return values[theirs]

    return translate


def resolve(template: Any, config: Any) -> Any:
    """Return the options of a template as plain values, for a config of transformers."""
    if callable(template):
        return resolve(template(config), config)
    if isinstance(template, str) and template.startswith("="):
        return attrgetter(template[1:])(config)
    if isinstance(template, Mapping):
        return {key: resolve(value, config) for key, value in template.items()}
    return template


def merged(template: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge changes into a template, also in nested mappings; a change to None removes the key."""
    result = dict(template)
    for key, value in changes.items():
        inner = result.get(key)
        if isinstance(value, Mapping) and isinstance(inner, Mapping):
            value = merged(inner, value)
        result[key] = value
    return {key: value for key, value in result.items() if value is not None}


# -- parts of templates


def gate(option: str = "hidden_act") -> Any:
    """Return a function that maps their activation to the type of our gated block."""
    return translated(ACTIVATIONS, option)


def product_of(first: str, second: str) -> Any:
    return lambda config: getattr(config, first) * getattr(config, second)


def groups(config: Any) -> dict[str, int] | None:
    if config.n_group in (None, config.topk_group):
        return None
    return {"num_groups": config.n_group, "keep": config.topk_group}


def if_set(option: str, template: Template, otherwise: Any = None) -> Any:
    """Return a template that applies only if their option is neither 0 nor null."""
    return lambda config: template if getattr(config, option) else otherwise


K = "=num_experts_per_tok"
INTERMEDIATE, MOE_INTERMEDIATE = ("=intermediate_size", "=moe_intermediate_size")
SOFTMAX = {"type": "top_k", "k": K}
RENORMALIZED = {**SOFTMAX, "renormalize": True}
SOFTMAX_OF_CHOSEN = {**SOFTMAX, "softmax": "after"}
QWEN = {**SOFTMAX, "renormalize": "=norm_topk_prob"}
GROUPED = {**QWEN, "scale": "=routed_scaling_factor", "groups": groups}
SIGMOID = {"type": "sigmoid_top_k", "k": K}
BIASED = {**SIGMOID, "scale": "=routed_scaling_factor"}
BIASED_GROUPS = {**BIASED, "renormalize": "=norm_topk_prob", "groups": groups}


def moe(
    router: Any, width: Any = MOE_INTERMEDIATE, count: str = "num_experts", **options: Any
) -> dict[str, Any]:
    """Return the template of a Mixture of Experts; their option `count` has the number of experts."""
    experts = {"type": gate(), "d_ff": width}
    base = {"type": "moe", "num_experts": f"={count}", "router": router, "experts": experts}
    return merged(base, options)


def jittered_template(ffn: Template, option: str) -> Template:
    """Return a template with noise on the block's input, if their option is not 0."""
    return lambda config: (
        {"type": "jittered", "jitter": noise, "ffn": ffn}
        if (noise := attrgetter(option)(config))
        else ffn
    )


def shared(width: str, count: str | None = None, **options: Any) -> Template:
    """Return the template of a gated shared expert, whose width is the product of their options."""
    d_ff = product_of(width, count) if count else f"={width}"
    return {"type": gate(), "d_ff": d_ff, **options}


# -- names of weights

Names = Mapping[str, TensorLayout]


TRANSPOSED: Names = {
    f"experts.{name}": transposed(f"experts.{name}_proj") for name in ("gate_up", "down")
}
NAMES: Names = {
    **linear(
        router__projection=(
            *("gate", "router", "gate.wg", "router.gate", "router.layer", "router.classifier"),
        ),
        combine__gate="shared_expert_gate",
    ),
    **gate_up_down("shared_expert", "shared_experts", "shared_expert", "shared_mlp"),
    "router.correction_bias_E": named(
        "gate.e_score_correction_bias",
        "e_score_correction_bias",
        "expert_bias",
        "gate.moe_statics.e_score_correction_bias",
        "router.e_score_correction_bias",
        "gate.balancing_biases",
    ),
    **{
        f"experts.{name}{suffix}": named(f"experts.{name}_proj{suffix}")
        for name in ("gate_up", "up", "down")
        for suffix in ("", "_bias")
    },
}
"""Our name of a tensor -> its layout in most blocks."""


def fused_shared_expert(gate_up: str, down: str) -> Names:
    """Return the layouts of a shared expert whose gate and up are one matrix, gate first."""
    return {
        "shared_expert.gate.weight": rows_of(f"{gate_up}.weight"),
        "shared_expert.up.weight": rows_of(f"{gate_up}.weight", 1),
        **linear(shared_expert__down=down),
    }


def experts_by_number(up: str, down: str) -> Names:
    """Return the layouts of experts that are numbered modules."""
    return {
        f"experts.{name}{suffix}": stacked(name, f"experts.expert_{{}}.{stem}.{kind}")
        for name, stem in (("up", up), ("down", down))
        for suffix, kind in (("", "weight"), ("_bias", "bias"))
    }


def with_shared(routed: str, *shared: str) -> TensorLayout:
    """Return the layout of routed experts followed by shared experts, which may have gate and up apart."""

    def layout(prefix: str, shape: torch.Size, hf: HFConfig) -> list[list[WeightSlice]]:
        num_routed = hf["n_routed_experts"]
        last = [
            WeightSlice(name, lambda ours, i=i: ours[num_routed:].chunk(len(shared), 1)[i])
            for i, name in enumerate(shared)
        ]
        return [[WeightSlice(routed, lambda ours: ours[:num_routed]), *last]]

    return layout


# -- blocks of architectures that we also read from folders


def of_family(model_type: str, class_name: str) -> BlockEntry:
    """Return the entry of an architecture that `weights.families` describes."""
    family = next(family for family in FAMILIES if family.model_type == model_type)

    def template(config: Any) -> dict[str, Any]:
        return sparse_options(family, HFConfig(class_name, LiveOptions(config, family.defaults)))

    return BlockEntry(class_name, template)


SCORE = translated({"sigmoid": "sigmoid", "sqrtsoftplus": "sqrt_softplus"}, "scoring_func")


def step_experts(config: Any, option: str) -> dict[str, Any]:
    """Return the experts of Step-3.7's first layer; their `option` has each layer's limit, 0 for none."""
    limit = (getattr(config, option) or [0])[0]
    clamp = {"alpha": 1.0, "limit": limit, "added": 0.0, "clamp": "after"} if limit else {}
    return {
        "type": "clamped_swiglu" if limit else "swiglu",
        "d_ff": config.moe_intermediate_size,
        **clamp,
    }


# -- blocks that several models share

MIXTRAL = of_family("mixtral", "MixtralSparseMoeBlock").with_changes(in_training={})
DEEPSEEK = of_family("deepseek_v3", "DeepseekV3MoE")
QWEN2 = of_family("qwen2_moe", "Qwen2MoeSparseMoeBlock")
QWEN3 = of_family("qwen3_moe", "Qwen3MoeSparseMoeBlock")
OLMOE = of_family("olmoe", "OlmoeSparseMoeBlock")
GPT_OSS = of_family("gpt_oss", "GptOssMLP").with_changes(
    names={
        "experts.gate_up": interleaved("experts.gate_up_proj"),
        "experts.gate_up_bias": interleaved("experts.gate_up_proj_bias"),
        "experts.down": transposed("experts.down_proj"),
    }
)
GATED_SHARED = {
    "shared_expert": shared("shared_expert_intermediate_size"),
    "combine": {"type": "sigmoid_gate"},
}
DEEPSEEK_V2 = BlockEntry(
    "DeepseekV2Moe",
    moe(
        {
            **SOFTMAX,
            "scale": "=routed_scaling_factor",
            "groups": lambda c: (
                None
                if c.topk_method == "greedy"
                else {"num_groups": c.n_group, "keep": c.topk_group, "score_top": 1}
            ),
        },
        count="n_routed_experts",
        shared_expert=shared("moe_intermediate_size", "n_shared_experts", bias="=mlp_bias"),
    ),
    supported={"topk_method": ("greedy", "group_limited_greedy")},
    # A group scores as its best expert, so two chosen groups always contain the best two experts.
    small={"topk_method": "group_limited_greedy", "topk_group": 1},
)
CLAMPED = {
    "type": translated(dict.fromkeys(("silu", "swish"), "clamped_swiglu"), "hidden_act"),
    "alpha": 1.0,
    "limit": "=swiglu_limit",
    "added": 0.0,
}
DEEPSEEK_V4 = BlockEntry(
    "DeepseekV4SparseMoeBlock",
    moe(
        {**BIASED, "score": SCORE},
        INTERMEDIATE,
        "num_local_experts",
        experts=CLAMPED,
        shared_expert={**CLAMPED, "d_ff": INTERMEDIATE, "bias": "=mlp_bias"},
    ),
    small={"mlp_layer_types": ["moe", "moe"]},
)
MISTRAL = BlockEntry(
    "MistralLarge4TextMoE",
    moe(
        {**GROUPED, "renormalize": True},
        count="n_routed_experts",
        shared_expert=shared("moe_intermediate_size", "n_shared_experts"),
    ),
)
GRANITE = BlockEntry(
    "GraniteMoeMoE",
    moe(SOFTMAX_OF_CHOSEN, INTERMEDIATE, "num_local_experts"),
    note="the decoder applies its residual multiplier",
)
GRANITE_LAYER = GRANITE.with_changes(
    options={"shared_expert": shared("shared_intermediate_size")},
    names={
        "experts.gate_up": named("block_sparse_moe.experts.gate_up_proj"),
        "experts.down": named("block_sparse_moe.experts.down_proj"),
        "router.projection.weight": named("block_sparse_moe.router.weight"),
        **fused_shared_expert("shared_mlp.input_linear", "shared_mlp.output_linear"),
    },
    unused=("self_attn.*", ".*layernorm.*", "mamba.*"),
)
EPS = {"eps": "=rms_norm_eps"}
GEMMA = BlockEntry(
    "Gemma4TextDecoderLayer",
    {
        "type": "normed",
        "output": EPS,
        "ffn": {
            "type": "moe",
            "num_experts": "=num_experts",
            "router": {
                "type": "top_k",
                "k": "=top_k_experts",
                "renormalize": True,
                "learned_scale": "expert",
                "input_norm": EPS,
                "logit_scale": lambda c: c.hidden_size**-0.5,
            },
            "experts": {
                "type": "normed",
                "input": EPS,
                "output": EPS,
                "experts": {"type": gate("hidden_activation"), "d_ff": MOE_INTERMEDIATE},
            },
            "shared_expert": {
                "type": "normed",
                "input": EPS,
                "output": EPS,
                "ffn": {"type": gate("hidden_activation"), "d_ff": INTERMEDIATE},
            },
        },
    },
    {
        **gate_up_down("shared_expert.ffn", "mlp"),
        "router.input_norm.weight": named("router.scale"),
        "router.weight_scale": named("router.per_expert_scale"),
        **linear(
            router__projection="router.proj",
            experts__input="pre_feedforward_layernorm_2",
            experts__output="post_feedforward_layernorm_2",
            shared_expert__input="pre_feedforward_layernorm",
            shared_expert__output="post_feedforward_layernorm_1",
            output="post_feedforward_layernorm",
        ),
    },
    supported={"enable_moe_block": (True,)},
    small={"enable_moe_block": True, "top_k_experts": 2, "hidden_size_per_layer_input": 0},
    unused=("self_attn.*", "input_layernorm.*", "post_attention_layernorm.*", "layer_scalar"),
    note="the block reads the residual stream; the norm before the layer's FFN is the shared expert's",
)
SWITCH_FFN = moe(
    {"type": "top_k", "k": 1, "bias": "=router_bias", "jitter": "=router_jitter_noise"},
    "=d_ff",
    experts={"type": "mlp", "activation": "=dense_act_fn", "dropout": "=dropout_rate"},
    capacity={"per_sequence": "=expert_capacity"},
)
SWITCH = BlockEntry(
    "SwitchTransformersSparseMLP",
    SWITCH_FFN,
    experts_by_number("wi", "wo"),
    small={"expert_capacity": 2, "dropout_rate": 0.0},
    in_training=jittered_template(
        merged(SWITCH_FFN, {"router": {"jitter": 0.0}}), "router_jitter_noise"
    ),
    bug="in float32 its jitter multiplies the block's input in place and reaches the experts, but in "
    "the paper only the router's input has jitter (arXiv:2101.03961, appendix F)",
)
