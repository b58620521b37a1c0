"""The objective of a step (cross-entropy, distillation, balancing losses), the gradient of the coupling loss,
and updates without gradients.

B batch, S sequence, V vocabulary, E experts, D model width, F hidden width
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from moe_ffn.balancing.bias_rules import (
    BiasRuleConfig,
    SignRuleConfig,
    SparsityRuleConfig,
    sparsity_weight_after,
)
from moe_ffn.balancing.losses import (
    BALANCING_LOSSES,
    BalancingWeights,
    StepTotals,
    coupling_loss,
    pairs_per_expert,
    proxy_tokens,
)
from moe_ffn.config.base import Config
from moe_ffn.experts.matrices import MatrixExpertsConfig
from moe_ffn.ffn.base import RouterInfo
from moe_ffn.ffn.moe import MoEFFN
from moe_ffn.model.decoder import Decoder, DecoderOutput
from moe_ffn.outputs import Routing, SparsityTargetRouting
from moe_ffn.routing import LinearRouterConfig
from moe_ffn.routing.base import LinearRouter, Router
from moe_ffn.training.distillation import DistillConfig

IGNORED_TARGET = -100
"""Target of positions that do not contribute to a loss, such as padding."""

SHOWN_AS_MASK, SHOWN_AS_IS = 0.8, 0.1
"""Fractions of the predicted tokens that become the mask or stay unchanged; the rest become random."""


class CouplingConfig(Config, frozen=True):
    """Loss that couples each row of a router with its expert (expert-router coupling, ERC).

    Lv et al. 2025 (arXiv:2512.23447), equation 3: each row, times noise, is a proxy token to which
    its own expert must respond most; see `coupling_loss`. The loss depends only on weights, so its gradient
    is added once per optimizer step, at a cost of 2 E^2 F D FLOPs per layer.
    """

    weight: float = Field(default=1.0, gt=0)
    """Weight of the loss, the mean over the sparse layers."""
    alpha: float = Field(default=1.0, ge=0, le=1)
    """An expert's response to other proxy tokens may reach this fraction of the response to its own; smaller
    values make experts more specialised. The best was 1 for 64 experts and 0.5 for 256."""
    noise: bool = True
    """Multiply the rows by noise, so that they represent the tokens around them."""

    def unsupported_reason(self, infos: Mapping[str, RouterInfo]) -> str | None:
        """Return the reason why a model with these routers cannot have the loss; None if it can."""
        mixtures = {layer: info for layer, info in infos.items() if info.experts is not None}
        if not mixtures:
            return "couples routers with experts, but no layer has both; use model.ffn.type 'moe'"
        for layer, info in mixtures.items():
            router, experts = info.router, info.experts
            if "round_" in layer:
                return (
                    f"needs experts with one router, but those of layer {layer} have several; use type "
                    "'moe'"
                )
            if not isinstance(router, LinearRouterConfig) or router.mlp or router.input_norm:
                return (
                    "needs rows that are tokens, from a router without mlp and input_norm, but the router of "
                    f"layer {layer} is '{router.describe()}'; use router.type 'top_k'"
                )
            if experts is None or not isinstance(experts.innermost, MatrixExpertsConfig):
                return f"needs experts with hidden units, but those of layer {layer} have none"
        return None


class ObjectiveConfig(BalancingWeights, frozen=True):
    """Weights of the balancing losses, which are added to the cross-entropy, and rules without a gradient.

    Each balancing loss is a mean over the sparse layers, except `load_balance_pooled`, which pools counts.
    docs/reference/balancing.md compares them.
    """

    sparsity_rule: SparsityRuleConfig = SparsityRuleConfig()
    """Rule that brings routers of type 'relu' to k experts per token; other routers ignore it."""
    bias_rule: BiasRuleConfig = SignRuleConfig()
    """Rule that updates the bias of routers with correction_bias; other routers ignore it."""
    coupling: CouplingConfig | None = None
    """Loss that couples each row of a router with its expert (ERC); null: none."""
    masked_fraction: float = Field(default=0.15, gt=0, lt=1)
    """Fraction of the tokens to predict if `model.causal` is false."""
    distill: DistillConfig | None = None
    """Teacher whose predictions the model learns in addition to the text; null: no teacher."""


@dataclass(frozen=True)
class Objective:
    """Loss of a batch, and its terms."""

    total: Tensor
    """Scalar to differentiate."""

    cross_entropy: Tensor
    """Scalar, nats per token."""

    balancing: dict[str, Tensor]
    """Balancing losses by name, unweighted; means over the sparse layers, except `load_balance_pooled`."""

    distillation: Tensor | None = None
    """Distillation loss, scalar, unweighted; None without a teacher."""

    @property
    def other_terms(self) -> dict[str, Tensor]:
        """Terms in addition to the cross-entropy, by name, unweighted."""
        terms = {} if self.distillation is None else {"distillation": self.distillation}
        return terms | self.balancing

    def detach(self) -> Objective:
        balancing = {name: value.detach() for name, value in self.balancing.items()}
        distillation = None if self.distillation is None else self.distillation.detach()
        return Objective(self.total.detach(), self.cross_entropy.detach(), balancing, distillation)


def cross_entropy_of(
    logits_BSV: Tensor, target_ids_BS: Tensor, reduction: Literal["mean", "none"] = "mean"
) -> Tensor:
    """Return the cross-entropy in nats, in float32 or wider: the mean, or one value per target, (B * S,)."""
    wide_BSV = logits_BSV.to(torch.promote_types(logits_BSV.dtype, torch.float32))
    return F.cross_entropy(
        wide_BSV.flatten(0, 1),
        target_ids_BS.flatten(),
        ignore_index=IGNORED_TARGET,
        reduction=reduction,
    )


def objective(
    logits_BSV: Tensor,
    target_ids_BS: Tensor,
    routings: Mapping[str, Routing],
    weights: ObjectiveConfig,
    *,
    sparsity_weight: Tensor | None = None,
    step_totals: StepTotals | None = None,
    distillation: Tensor | None = None,
) -> Objective:
    """Return the cross-entropy, or its average with a distillation loss, plus weighted balancing losses.

    A loss of weight 0 is computed only if it is `logged_at_zero_weight`. `sparsity_weight`, of
    `relu_sparsity`, comes from `BalanceUpdater`; None: the initial weight. Without `step_totals` this batch
    is the whole step. The teacher of `weights.distill` computes `distillation`.
    """
    cross_entropy = cross_entropy_of(logits_BSV, target_ids_BS)
    if sparsity_weight is None:
        sparsity_weight = cross_entropy.new_tensor(weights.sparsity_rule.initial_weight)
    balancing: dict[str, Tensor] = {}
    total = cross_entropy
    if weights.distill is not None and distillation is not None:
        total = torch.lerp(cross_entropy, distillation, weights.distill.weight)
    for name, loss in BALANCING_LOSSES.items():
        weight = sparsity_weight if loss.weight_set_by_rule else getattr(weights, name)
        if not (loss.logged_at_zero_weight or weight):
            continue
        value = loss.value(routings, step_totals)
        if value is not None:
            balancing[name] = value
            total = total + weight * value
    return Objective(total, cross_entropy, balancing, distillation)


def needs_step_totals(weights: ObjectiveConfig) -> bool:
    """Return True if a balancing loss counts all batches and ranks of an optimizer step."""
    return any(
        loss.scope == "step" and getattr(weights, name) for name, loss in BALANCING_LOSSES.items()
    )


def mask_tokens(
    token_ids_BS: Tensor,
    fraction: float,
    mask_token_id: int,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Mask tokens for masked language modelling (Devlin et al. 2018, BERT, section 3.1).

    Returns inputs and targets, int64 (B, S); a token that is not predicted has the target `IGNORED_TARGET`. A
    `fraction` of each sequence is predicted, at least one token, so the loss of a batch is the mean of the
    losses of its equal parts. `mask_token_id` is V; the `generator` is by default torch's global one.
    """
    batch, length = token_ids_BS.shape

    def uniform() -> Tensor:
        # float32 even in a bf16 model, whose default dtype has 256 values between 0 and 1.
        return torch.rand(
            batch, length, generator=generator, dtype=torch.float32, device=token_ids_BS.device
        )

    num_predicted = max(round(fraction * length), 1)
    is_predicted_BS = uniform().argsort(dim=1).argsort(dim=1) < num_predicted
    draw_BS = uniform()
    random_ids_BS = (uniform() * mask_token_id).long().clamp(max=mask_token_id - 1)
    shown_BS = torch.where(draw_BS < SHOWN_AS_MASK, mask_token_id, random_ids_BS)
    shown_BS = torch.where(draw_BS >= 1 - SHOWN_AS_IS, token_ids_BS, shown_BS)
    inputs_BS = torch.where(is_predicted_BS, shown_BS, token_ids_BS)
    return inputs_BS, token_ids_BS.masked_fill(~is_predicted_BS, IGNORED_TARGET)


def inputs_and_targets(
    decoder: Decoder,
    token_ids_BS: Tensor,
    next_ids_BS: Tensor,
    masked_fraction: float,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Return inputs and targets: the next tokens, or the masked tokens if the model is not causal.

    A position whose next id is `IGNORED_TARGET` predicts nothing. For other arguments see `mask_tokens`.
    """
    if decoder.config.causal:
        return token_ids_BS, next_ids_BS
    inputs_BS, targets_BS = mask_tokens(
        token_ids_BS, masked_fraction, decoder.mask_token_id, generator
    )
    return inputs_BS, targets_BS.masked_fill(next_ids_BS == IGNORED_TARGET, IGNORED_TARGET)


def token_losses(
    decoder: Decoder,
    token_ids_BS: Tensor,
    next_ids_BS: Tensor,
    masked_fraction: float,
    batch_index: int,
) -> tuple[DecoderOutput, Tensor, Tensor]:
    """Return the output for a validation batch, the loss of each token in nats, (B, S), and the targets.

    A position without a target has loss 0. `batch_index` is the seed of the masks: every validation masks the
    same tokens, on any number of ranks.
    """
    generator = torch.Generator(token_ids_BS.device).manual_seed(max(batch_index, 0))
    input_ids_BS, targets_BS = inputs_and_targets(
        decoder, token_ids_BS, next_ids_BS, masked_fraction, generator
    )
    output = decoder(input_ids_BS)
    nats_BS = cross_entropy_of(output.logits, targets_BS, "none").view_as(targets_BS)
    return output, nats_BS, targets_BS


class _Coupling(nn.Module):
    """Coupling loss of a mixture; its parameters can be replaced by `torch.func.functional_call`."""

    def __init__(self, mixture: MoEFFN) -> None:
        super().__init__()
        self.router, self.experts = mixture.router, mixture.experts
        self.num_experts = mixture.num_experts

    def forward(self, config: CouplingConfig, generator: torch.Generator) -> Tensor:
        rows_ED = cast("LinearRouter", self.router).projection.weight[: self.num_experts]
        proxies_ED = proxy_tokens(rows_ED, generator) if config.noise else rows_ED
        weights = self.experts.innermost.weights()
        assert weights is not None
        gate_EFD = weights.up_EHD.chunk(2, dim=1)[0] if weights.gated else weights.up_EHD
        # A proxy token takes a token's way to the experts, such as the projection into a narrower space.
        return coupling_loss(self.experts.before_dispatch(proxies_ED), gate_EFD, config.alpha)


def add_coupling_gradient(decoder: nn.Module, config: CouplingConfig, seed: int) -> Tensor:
    """Add the gradient of the weighted coupling loss to `.grad`; return the loss, the mean over layers.

    A sharded model gathers the router and the experts of one layer at a time, so every rank has to call this.
    The `seed` of the noise is equal on all ranks.
    """
    from moe_ffn.training.parallel.sharding import full_tensor, shard_like  # takes seconds

    mixtures = [module for module in decoder.modules() if isinstance(module, MoEFFN)]
    device = next(decoder.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    losses: list[Tensor] = []
    for coupling in map(_Coupling, mixtures):
        used = {
            n: p for n, p in coupling.named_parameters() if not n.endswith((".down", ".down_bias"))
        }
        whole = {
            name: full_tensor(p.detach())
            .to(torch.promote_types(p.dtype, torch.float32))
            .requires_grad_()
            for name, p in used.items()
        }
        with torch.enable_grad():
            loss = torch.func.functional_call(coupling, whole, (config, generator))
            scaled = config.weight / len(mixtures) * loss
        gradients = torch.autograd.grad(scaled, list(whole.values()), allow_unused=True)
        for parameter, gradient in zip(used.values(), gradients, strict=True):
            if gradient is not None and parameter.requires_grad:
                gradient = shard_like(gradient.to(parameter.dtype), parameter)
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        losses.append(loss.detach())
    return torch.stack(losses).mean()


Reduce = Callable[[Tensor], Tensor]
"""Function that sums a tensor over all ranks."""


class BalanceUpdater(nn.Module):
    """Updates router biases, router thresholds and the sparsity loss weight, once per optimizer step.

    An update uses the routing of all batches and ranks of the step. In a checkpoint, biases and thresholds
    are buffers of their routers, and the weight is a buffer of this module.
    """

    sparsity_weight: Tensor

    def __init__(self, config: ObjectiveConfig) -> None:
        super().__init__()
        self.rule = config.bias_rule
        self.factor = config.sparsity_rule.factor
        initial = torch.tensor(config.sparsity_rule.initial_weight)
        self.register_buffer("sparsity_weight", initial)
        self.reset()

    @torch.no_grad()
    def observe(self, routings: Mapping[str, Routing], routers: Mapping[str, Router]) -> None:
        """Add one batch, before the biases that routed it are updated.

        A custom block may return a routing without listing its router; the biases of that layer stay.
        """
        self._num_batches += 1
        for name, routing in routings.items():
            router = routers.get(name)
            if router is not None and (bias_E := router.correction_bias_E) is not None:
                choices = routing.choices()
                observed_E = self.rule.observe(choices, bias_E[: choices.num_experts])
                self._bias_sums[name] = observed_E + self._bias_sums.get(name, 0)
            if router is not None and (observed := router.observe(routing)) is not None:
                self._router_sums[name] = observed + self._router_sums.get(name, 0)
            if isinstance(routing, SparsityTargetRouting):
                target_tokens = pairs_per_expert(routing).sum() / routing.target_k
                counts = torch.stack([target_tokens, routing.num_real_tokens])
                self._density_counts[name] = counts + self._density_counts.get(name, 0)

    @torch.no_grad()
    def step(self, routers: Mapping[str, Router], reduce: Reduce, num_ranks: int = 1) -> None:
        """Update biases, thresholds and the weight. Every rank has to call this before the optimizer step."""
        for name, observed_E in self._bias_sums.items():
            bias_E = routers[name].correction_bias_E
            assert bias_E is not None
            bias_E = bias_E[: len(observed_E)]  # experts that process every token have no bias
            num_batches = self._num_batches * num_ranks
            bias_E.copy_(self.rule.update(bias_E, reduce(observed_E), num_batches))
        for name, observed in self._router_sums.items():
            routers[name].update(reduce(observed))
        if self._density_counts:
            sums = reduce(torch.stack(list(self._density_counts.values())))
            density = (sums[:, 0] / sums[:, 1].clamp(min=1)).mean()
            weight = sparsity_weight_after(self.sparsity_weight, density, self.factor)
            self.sparsity_weight.copy_(weight)
        self.reset()

    def reset(self) -> None:
        """Clear the sums of the batches observed since the last step."""
        self._bias_sums: dict[str, Tensor] = {}
        self._router_sums: dict[str, Tensor] = {}
        self._density_counts: dict[str, Tensor] = {}
        self._num_batches = 0
