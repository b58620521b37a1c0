"""Audit of a live mixture of experts: are its experts there, trained, balanced and computed correctly?

    report = moe_ffn.audit(model, batch, optimizer)
    assert report.ok, report

The model is of moe_ffn or of transformers (also with adapters of peft), or any module that returns logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from moe_ffn.config.errors import ConfigError
from moe_ffn.ffn.base import FFNBlock, FFNConfig
from moe_ffn.interop.audit.balancing import check_balancing, check_objective
from moe_ffn.interop.audit.behaviour import check_behaviour
from moe_ffn.interop.audit.findings import NUMBERS, AuditReport, Finding
from moe_ffn.interop.audit.layers import SparseLayer
from moe_ffn.interop.audit.learning import check_gradients, check_optimizer, check_requires_grad
from moe_ffn.interop.audit.numerics import check_kernels, check_precision, record
from moe_ffn.interop.audit.order import check_order
from moe_ffn.interop.audit.probe import Probe, checked_batch, mode
from moe_ffn.interop.audit.structure import (
    K_OPTIONS,
    check_expert_weights,
    check_left_out,
    check_structure,
    option_of,
)
from moe_ffn.outputs import dtype_name
from moe_ffn.training.objective import ObjectiveConfig

__all__ = ["AuditReport", "Finding", "audit"]


def audit(
    model: nn.Module,
    batch: Tensor | Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    accumulation: int = 1,
    objective: ObjectiveConfig | None = None,
    num_steps: int | None = None,
) -> AuditReport:
    """Check a mixture of experts for silent defects.

    The model, its gradients and the random states stay as they are.

    Args:
        model: a language model that returns logits; on the meta device only shapes are checked.
        batch: token ids (B, S), or the keyword arguments of the model with `input_ids`. Take two or more
            sequences of real text.
        optimizer: the optimizer that will train the model; None if the model is only to be used.
        accumulation: batches per optimizer step.
        objective: balancing of a moe_ffn run; None for other training loops.
        num_steps: optimizer steps that the model was trained for. Balance is not judged before step 50, as
            by the alarms of a run. None: unknown, so it is judged.

    Raises:
        ConfigError: the model has no sparse layer, or the batch does not hold token ids.
    """
    if accumulation < 1:
        raise ConfigError(f"audit: accumulation must be 1 or more, but is {accumulation}")
    probe = Probe(model, checked_batch(batch), num_steps)
    findings = [*check_structure(probe), *check_left_out(probe), *check_requires_grad(probe)]
    if optimizer is not None:
        findings += check_optimizer(probe, optimizer)
    if any(parameter.is_meta for parameter in model.parameters()):
        findings.append(NUMBERS.skips("the model is on the meta device, which has no numbers"))
    else:
        unreached = [layer.name for layer in probe.layers if layer not in probe.reached]
        why = "no token of this batch reaches this layer"
        findings += [NUMBERS.at(name).skips(why) for name in unreached]
        findings += [*check_expert_weights(probe), *check_gradients(probe)]
        if objective is None:
            trains = optimizer is not None
            findings += check_balancing(probe, trains=trains, accumulation=accumulation)
        else:
            findings += check_objective(probe, objective)
        recorded = record(probe)
        with mode(probe.model, training=False):
            for layer in probe.reached:
                findings += check_precision(layer, recorded[layer.name])
                findings += check_kernels(layer, recorded[layer.name])
        findings += [*check_behaviour(probe), *check_order(probe)]
    return AuditReport(
        type(probe.base).__name__,
        facts(probe),
        tuple(layer.name for layer in probe.layers),
        tuple(findings),
    )


def facts(probe: Probe) -> dict[str, str]:
    """Return what is audited, as text."""
    layers = probe.layers
    total = sum(parameter.numel() for parameter in probe.model.parameters())
    in_experts = sum(layer.num_parameters for layer in layers)
    uses = [use for layer in layers if (use := use_of(probe, layer)) is not None]
    ks = ", ".join(f"{k:g}" for k in sorted({k for k, _ in uses}))
    active = round(total - sum(idle for _, idle in uses))
    kinds = {
        "moe_ffn": "blocks of moe_ffn",
        "fused": "fused experts",
        "listed": "experts in a list",
    }
    counts = sorted({layer.num_experts for layer in layers})
    dtypes = sorted({dtype_name(p.dtype) for p in probe.model.parameters()})
    return {
        "sparse layers": f"{len(layers)} ({', '.join(sorted({kinds[layer.kind] for layer in layers}))})",
        "experts": f"{', '.join(map(str, counts))}, {ks or '?'} per token",
        "shared expert": "yes" if any(layer.shared for layer in layers) else "no",
        "parameters": f"{total:,}, {in_experts / max(total, 1):.0%} in experts"
        + (f", {active:,} active" if len(uses) == len(layers) else ""),
        "dtype": ", ".join(dtypes),
        "batch": f"{probe.ids_BS.shape[0]} sequences of {probe.ids_BS.shape[1]} tokens",
    }


def use_of(probe: Probe, layer: SparseLayer) -> tuple[float, float] | None:
    """Return the experts per token and the number of parameters that a token does not use, as the config of a
    layer declares them; None if it does not.
    """
    if not isinstance(layer.block, FFNBlock):
        k = option_of(probe.config, K_OPTIONS)
        return None if k is None else (k, layer.num_parameters * (1 - k / layer.num_experts))
    config, d_model = (getattr(layer.block, name, None) for name in ("config", "d_model"))
    if not isinstance(config, FFNConfig) or not isinstance(d_model, int):
        return None
    infos = [info for info in config.router_infos().values() if not info.selects_tokens]
    if not infos:  # a soft mixture
        return None
    k = sum(
        info.token_fraction
        * info.router.experts_per_token(info.num_experts)
        * (info.num_networks / info.num_experts)
        for info in infos
    )
    return k, config.num_params(d_model) - config.num_active_params(d_model)
