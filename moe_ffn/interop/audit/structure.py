"""Checks of an audit that run nothing: structure, and what adapters or quantisers left out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from moe_ffn.experts.base import without_adapters
from moe_ffn.interop.audit.findings import LEFT_OUT, STRUCTURE, Finding, places
from moe_ffn.interop.audit.layers import SparseLayer
from moe_ffn.interop.audit.probe import Probe
from moe_ffn.interop.swap import SwappedFFN
from moe_ffn.model.decoder import Decoder

K_OPTIONS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
"""Names of options in configs of transformers for the experts per token."""

SAMPLE = 4096
"""Evenly spaced numbers of a tensor by which experts are compared."""

SMALL_SHARE = 0.01
"""Share of the parameters below which a tensor that was left out is not worth a warning."""


def option_of(config: Any, names: tuple[str, ...], kind: Any = int) -> Any:
    """Return the first of these options that the config has, as a number; None if it has none."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, kind)), None)


def check_structure(probe: Probe) -> Iterator[Finding]:
    """Compare shapes of the model with those that its config builds."""
    expected = _declared_shapes(probe)
    if expected is None:
        yield STRUCTURE.skips("no config from which to build the model again")
        return
    actual = {_plain_name(n): tuple(p.shape) for n, p in _own_parameters(probe)}
    # Neither packed weights nor our blocks have the shapes of the config.
    replaced = _quantised_modules(probe.base)
    if not isinstance(probe.base, Decoder):
        replaced |= {n for n, part in probe.base.named_modules() if isinstance(part, SwappedFFN)}
        replaced |= {layer.path for layer in probe.layers if layer.kind == "moe_ffn"}
    actual, expected = (
        {name: shape for name, shape in shapes.items() if not _is_in(name, replaced)}
        for shapes in (actual, expected)
    )
    common = actual.keys() & expected.keys()
    problems = (
        (expected.keys() - common, "the config declares {}, which the model lacks"),
        (actual.keys() - common, "the model has {}, which the config does not declare"),
        (
            {name for name in common if actual[name] != expected[name]},
            "{} differ in shape from what the config declares",
        ),
    )
    for wrong, what in problems:
        if wrong:
            yield STRUCTURE.fails(
                what.format(places(sorted(wrong))),
                "load weights that belong to this config, or correct the config",
            )
    if not any(wrong for wrong, _ in problems):
        total = sum(torch.Size(shape).numel() for shape in actual.values())
        yield STRUCTURE.passes(
            f"{len(actual)} tensors, {total:,} parameters, have the shapes that the config declares"
        )


def _own_parameters(probe: Probe) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of the model itself, without adapters."""
    for name, parameter in probe.base.named_parameters():
        if "lora_" not in name and "modules_to_save" not in name:
            yield name, parameter


def _plain_name(name: str) -> str:
    """Return the name of a parameter without the wrappers of adapters."""
    name = re.sub(r"\.parametrizations\.(\w+)\.original$", r".\1", name)
    return name.replace("base_layer.", "").replace(".original_module", "")


def _declared_shapes(probe: Probe) -> dict[str, tuple[int, ...]] | None:
    """Return name -> shape of a model built from the config; None if that is impossible."""
    base: Any = probe.base
    try:
        with torch.random.fork_rng([]), torch.device("meta"):
            if isinstance(base, Decoder):
                fresh = base.config.build_empty(base.embedding.num_embeddings, base.max_seq_len)
            elif probe.config is not None:
                fresh = type(base)(base.config)
            else:
                return None
    except (TypeError, ValueError, RuntimeError, AttributeError, ImportError):
        return None  # a model with another constructor, or swapped blocks
    return {name: tuple(parameter.shape) for name, parameter in fresh.named_parameters()}


def check_expert_weights(probe: Probe) -> Iterator[Finding]:
    """Find experts that are equal, or whose matrix is zero while those of other experts are not."""
    for layer in probe.layers:
        samples = samples_of_experts(layer)
        distinct = len(set(samples))
        if distinct < len(samples):
            yield STRUCTURE.at(layer.name).warns(
                f"only {distinct} of {len(samples)} experts are distinct: the model is upcycled, or one "
                "expert was loaded into several places",
                "if it is not upcycled, compare it with its source: moe-ffn diff",
            )
        empty: dict[str, list[int]] = {}
        for tensor in layer.weights:
            parameter = tensor.parameter
            if parameter.ndim == 3 and parameter.is_floating_point():
                used_E = tensor.by_expert(parameter.detach(), layer.num_experts).any(dim=-1)
                if used_E.any() and not used_E.all():
                    empty[tensor.name] = (~used_E).nonzero().flatten().tolist()
        if empty:
            which = "; ".join(
                f"{name}, experts {places(experts)}" for name, experts in empty.items()
            )
            yield STRUCTURE.at(layer.name).warns(
                f"matrices of some experts are all zero: {which}",
                "load the weights again, unless these experts were pruned",
            )


def samples_of_experts(layer: SparseLayer) -> list[bytes]:
    """Return at most SAMPLE numbers of each tensor of each expert."""
    rows: dict[int | None, list[Tensor]] = {}
    for tensor in layer.weights:
        values = tensor.by_expert(tensor.parameter.detach(), layer.num_experts)
        step = max(1, values.shape[1] // SAMPLE)
        rows.setdefault(tensor.expert, []).append(values[:, ::step].float().cpu())
    return [row.numpy().tobytes() for found in rows.values() for row in torch.cat(found, dim=1)]


# -- left out


def check_left_out(probe: Probe) -> Iterator[Finding]:
    """Find experts that a quantiser or an adapter left out."""
    quantised = _quantised_modules(probe.model)
    adapted = {name for layer in probe.layers for name in _adapted_weights(layer)}
    has_adapter = any(".lora_" in name for name, _ in probe.model.named_parameters())
    names = (weight.name for layer in probe.layers for weight in layer.weights)
    if quantised:
        yield _left_out(probe, "quantised", {name for name in names if _is_in(name, quantised)})
    if has_adapter:
        yield _left_out(probe, "adapted", adapted)
        yield from _unmatched_targets(probe)
        yield from _disabled(probe)
    if not quantised and not has_adapter:
        yield LEFT_OUT.passes("no tensor is quantised, and there is no adapter")


def _left_out(probe: Probe, word: str, done: set[str]) -> Finding:
    """Return a finding on the expert tensors that are neither quantised nor adapted."""
    left = [w for layer in probe.layers for w in layer.weights if w.name not in done]
    if not left:
        return LEFT_OUT.passes(f"all expert tensors are {word}")
    total = sum(parameter.numel() for _, parameter in _own_parameters(probe))
    share = sum(weight.parameter.numel() for weight in left) / total
    return LEFT_OUT.requires(
        share <= SMALL_SHARE,
        f"{len(left)} expert tensors, {share:.0%} of the parameters, are not {word}: "
        f"{places(weight.name for weight in left)}",
        _ADVICE[word],
        otherwise="warn",
    )


_ADVICE = {
    "adapted": "if the experts should learn, name their tensors in target_parameters, such as "
    "mlp.experts.gate_up_proj; target_modules does not reach them here",
    "quantised": "if memory matters, use a quantiser that supports fused experts; this one replaced linear "
    "layers only",
}


def _adapted_weights(layer: SparseLayer) -> set[str]:
    """Return the names of expert weights that an adapter changes."""
    if layer.kind == "listed":
        prefixes = {adapter.name.partition(".lora_")[0] for adapter in layer.adapters}
        return {w.name for w in layer.weights if any(w.name.startswith(p) for p in prefixes)}
    names = {weight.name for weight in layer.weights if ".modules_to_save." in weight.name}
    for module in layer.block.modules():
        if hasattr(module, "base_layer") and hasattr(module, "parameter_name"):
            base = without_adapters(module)
            parameter = getattr(base, str(module.parameter_name), None)
            original = getattr(base, "parametrizations", {})
            if str(module.parameter_name) in original:
                parameter = original[str(module.parameter_name)].original
            names |= {weight.name for weight in layer.weights if weight.parameter is parameter}
    return names


def _unmatched_targets(probe: Probe) -> Iterator[Finding]:
    """Yield a failure for targets of an adapter that match nothing: peft ignores them."""
    modules = {_plain_name(f"{name}.")[:-1] for name, _ in probe.base.named_modules() if name}
    for name, config in getattr(probe.model, "peft_config", {}).items():
        for option, advice in (
            ("target_modules", _ADVICE["adapted"]),
            ("modules_to_save", "take the names from model.named_modules()"),
        ):
            targets = getattr(config, option, None)
            if isinstance(targets, str) or not targets:
                continue
            unmatched = sorted(
                target
                for target in targets
                if not any(path == target or path.endswith(f".{target}") for path in modules)
            )
            if unmatched:
                yield LEFT_OUT.fails(
                    f"{option} of adapter '{name}' names {places(unmatched)}, which match no module",
                    advice,
                )


def _disabled(probe: Probe) -> Iterator[Finding]:
    disabled = [
        name
        for name, module in probe.base.named_modules()
        if hasattr(module, "base_layer") and getattr(module, "disable_adapters", False)
    ]
    if disabled:
        yield LEFT_OUT.warns(
            f"the adapters of {len(disabled)} modules are disabled: {places(disabled)}",
            "call enable_adapter_layers() before you train or use the adapter",
        )


def _quantised_modules(model: nn.Module) -> set[str]:
    """Return the paths of modules with weights in 8 bits or fewer, also in a class of tensors of torchao."""
    return {
        path
        for path, module in model.named_modules()
        if re.search("4bit|8bit|Int8|QuantLinear|Quantized|FP8|HQQ", type(module).__name__)
        or any(
            "torchao" in type(value).__module__
            or (value.dtype.itemsize == 1 and value.dtype != torch.bool)
            for value in (*module.parameters(recurse=False), *module.buffers(recurse=False))
            if value.ndim >= 2
        )
    }


def _is_in(name: str, paths: set[str]) -> bool:
    return any(name.startswith(f"{path}.") for path in paths)
