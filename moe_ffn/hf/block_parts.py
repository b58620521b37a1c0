"""Type of an entry in the table of sparse blocks of transformers, and helpers that entries share.

An entry has a template of our options, and the names of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from moe_ffn.hf.families import BY_TYPE
from moe_ffn.hf.from_transformers import sparse_options
from moe_ffn.hf.layouts import (
    TensorLayout,
    WeightSlice,
    gate_up_down,
    linear,
    named,
    rows_of,
    stacked,
)
from moe_ffn.hf.options import ACTIVATIONS, HFConfig, jittered

# -- an entry

Template = Mapping[str, Any] | Callable[[HFConfig], Any]
"""Our options as in YAML. A value `=NAME` is an option of the config of transformers, and a function computes
a value from this config. A block may have the option `jitter`, as in `jittered`."""


class LiveOptions(Mapping[str, Any]):
    """Options of a live config of transformers, by name, alias or dotted path."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def __getitem__(self, path: str) -> Any:
        value = self.config
        for part in path.split("."):
            if isinstance(value, Mapping):
                value = value[part]
            elif hasattr(value, part):
                value = getattr(value, part)
            else:
                raise KeyError(path)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self.config))

    def __len__(self) -> int:
        return len(vars(self.config))


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
            changes["ffn"] = lambda hf: merged(resolve(self.ffn, hf), resolve(options, hf))
        return replace(self, **changes)

    def hf(self, config: Any) -> HFConfig:
        """Return the options of a live config of transformers."""
        return HFConfig(self.class_name, LiveOptions(config))

    def options(self, config: Any, *, training: bool = False) -> dict[str, Any]:
        """Return the config of our block; ConfigError if none of our blocks computes the same."""
        hf = self.hf(config)
        for option, values in self.supported.items():
            hf.require(option, *values)
        return jittered(resolve((training and self.in_training) or self.ffn, hf))


def resolve(template: Any, hf: HFConfig) -> Any:
    """Return the options of a template as plain values, for a config of transformers."""
    if callable(template):
        return resolve(template(hf), hf)
    if isinstance(template, str) and template.startswith("="):
        return hf[template[1:]]
    if isinstance(template, Mapping):
        return {key: resolve(value, hf) for key, value in template.items()}
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


def translated(option: str, values: Mapping[str, str]) -> Any:
    """Return a function that maps the value of their option to ours; it rejects a value not in `values`."""
    return lambda hf: hf.translate(option, values)


def gate(option: str = "hidden_act") -> Any:
    """Return a function that maps their activation to the type of our gated block."""
    return translated(option, ACTIVATIONS)


def if_set(option: str, template: Template, otherwise: Any = None) -> Any:
    """Return a template that applies only if their option is neither 0 nor null."""
    return lambda hf: template if hf[option] else otherwise


def moe(
    router: Any, width: Any = "=moe_intermediate_size", count: str = "num_experts", **options: Any
) -> dict[str, Any]:
    """Return the template of a Mixture of Experts; their option `count` has the number of experts."""
    experts = {"type": gate(), "d_ff": width}
    base = {"type": "moe", "num_experts": f"={count}", "router": router, "experts": experts}
    return merged(base, options)


def shared(width: str, count: str | None = None, **options: Any) -> Template:
    """Return the template of a gated shared expert, whose width is the product of their options."""
    d_ff = (lambda hf: hf[width] * hf[count]) if count else f"={width}"
    return {"type": gate(), "d_ff": d_ff, **options}


# -- names of weights

Names = Mapping[str, TensorLayout]


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
    """Return the entry of an architecture that `families.py` describes."""
    family = BY_TYPE[model_type]
    names = {
        name.removeprefix("ffn."): partial(_without_module, layout)
        for name, layout in family.names.items()
        if name.startswith("ffn.")
    }
    return BlockEntry(class_name, partial(sparse_options, family), names)


def _without_module(layout: TensorLayout, *arguments: Any) -> list[list[WeightSlice]]:
    """Return the forms of a layout without the name of their block, such as `mlp.`."""
    return [
        [replace(piece, name=piece.name.partition(".")[2]) for piece in form]
        for form in layout(*arguments)
    ]
