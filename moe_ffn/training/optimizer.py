"""Optimizers and their options, which a resumed run may change.

Options have the names of `torch.optim`, except `learning_rate` for `lr`; some are left out or have other
defaults. `torch.optim.Muon` takes only two-dimensional parameters, but here one parameter holds the matrices
of all experts, with the gate matrix above the up matrix. Our Muon orthogonalises each matrix separately.

M matrices, O rows (out), I columns (in)
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from einops import rearrange
from pydantic import Field, model_validator
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from moe_ffn.config.base import Config, TaggedConfig
from moe_ffn.kernels.base import on_this_rank, product_dtype_on_cpu
from moe_ffn.kernels.routing import has_compiled_tiles
from moe_ffn.model.parametrization import (
    LAYERS,
    ParameterScale,
    Part,
    is_matrix,
    num_fused,
    parts_of,
)
from moe_ffn.training.schedule import CosineConfig, ScheduleConfig

MAX_RATE = 1e9
"""Largest learning rate, which fits float32 even after multiplication by a schedule or a scale."""

Rate = Annotated[float, Field(gt=0, le=MAX_RATE)]
_FullRate = Annotated[Rate, Field(description="Peak learning rate, at the end of the warm-up.")]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Betas = Annotated[tuple[Fraction, Fraction], Field(strict=False)]
_Eps = Annotated[float, Field(gt=0, description="Added to the denominator of an update.")]
DecoupledDecay = Annotated[
    float,
    Field(
        ge=0,
        description="Decoupled weight decay of every matrix, an untied output matrix included; norms, "
        "biases and embeddings have none.",
    ),
]


class GroupConfig(Config, frozen=True):
    """Options of one part of a model."""

    learning_rate_factor: float = Field(default=1.0, gt=0, le=MAX_RATE)
    """Factor of the learning rate, multiplied by that of `model.parametrization`."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Weight decay of all parameters of the part, including norms and biases; null:
    `optimizer.weight_decay` for matrices, none for norms, biases and embeddings."""


class OptimizerConfig(TaggedConfig, frozen=True):
    """The optimizer; Muon by default.

    Weight decay applies to matrices (experts, attention, routers and an untied output matrix), and never to
    norms, biases and embeddings.
    """

    learning_rate: _FullRate
    weight_decay: float = Field(default=0.0, ge=0)
    """Weight decay of every matrix; norms, biases and embeddings have none."""
    schedule: ScheduleConfig = CosineConfig()
    """Change of the learning rate over the run."""

    takes_shards: ClassVar[bool] = True
    """True if the optimizer can update weights that are sharded over ranks."""

    def learning_rate_factor(self, scale: ParameterScale, group: Mapping[str, Any]) -> float | None:
        """Return the factor by which a parametrization scales the learning rate of a parameter in `group`.

        None means that the optimizer has no rule; `model.parametrization` must then be `standard`.
        """
        return None

    @classmethod
    def _as_mapping(cls, data: Any) -> Mapping[Any, Any]:
        data = super()._as_mapping(data)
        if cls.is_family_root() and "type" not in data:
            return {"type": "muon", **data}
        return data

    @abstractmethod
    def build(self, model: nn.Module) -> Optimizer:
        """Return a new optimizer for all parameters of `model`.

        Parameter groups must hold only options, since a resumed run replaces them; values that change from
        step to step belong in the state. The learning rate of the first group is logged.
        """


class GroupedConfig(OptimizerConfig, frozen=True):
    """An optimizer with options for parts of a model; its `build` passes its groups to `refined_groups`."""

    groups: dict[Part, GroupConfig] = Field(default={})
    """Options of parts of the model: {router: {learning_rate_factor: 0.1}, ffn_down: {weight_decay: 0}}. The
    parts: embeddings, attention, router, ffn_up, ffn_down (experts, shared experts and dense blocks), norms,
    output (an untied output matrix), other. A part that the model lacks is ignored."""


class _TorchConfig(GroupedConfig, frozen=True):
    """An optimizer of `torch.optim`; fields that a subclass adds are arguments of `torch_class`."""

    torch_class: ClassVar[Callable[..., Optimizer]]
    weight_decay: float = Field(default=0.0, ge=0)
    """L2 decay: this factor times a matrix is added to its gradient; norms, biases and embeddings have no
    decay."""

    def build(self, model: nn.Module) -> Optimizer:
        options = self.model_dump(exclude=set(GroupedConfig.model_fields))
        groups = refined_groups(decay_groups(model, self.weight_decay), model, self)
        return self.torch_class(groups, lr=self.learning_rate, **options)


class _AdamConfig(_TorchConfig, frozen=True):
    learning_rate: _FullRate = 3e-3
    betas: Betas = (0.9, 0.95)
    """Decay rates of the running means of the gradient and of its square."""
    eps: _Eps = 1e-8


class AdamWConfig(_AdamConfig, frozen=True):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2017)."""

    torch_class = optim.AdamW
    type: Literal["adamw"] = "adamw"
    weight_decay: DecoupledDecay = 0.1

    def learning_rate_factor(self, scale: ParameterScale, group: Mapping[str, Any]) -> float:
        return _adamw_factor(scale)


class AdamConfig(_AdamConfig, frozen=True):
    """Adam (Kingma & Ba 2014), with L2 decay in the gradient."""

    torch_class = optim.Adam
    type: Literal["adam"] = "adam"


class SGDConfig(_TorchConfig, frozen=True):
    """Stochastic gradient descent with momentum."""

    torch_class = optim.SGD
    type: Literal["sgd"] = "sgd"
    learning_rate: _FullRate = 0.3
    momentum: Fraction = 0.9
    """Decay factor of the running sum of gradients; 0: no momentum."""
    nesterov: bool = False
    """Use Nesterov momentum."""

    @model_validator(mode="after")
    def _check_nesterov(self) -> SGDConfig:
        if self.nesterov and not self.momentum:
            raise ValueError(
                "nesterov (true) needs a momentum above 0, got momentum 0; give one, such as 0.9"
            )
        return self


class AdafactorConfig(_TorchConfig, frozen=True):
    """Adafactor: saves memory with squared gradients per row and column (Shazeer & Stern 2018)."""

    torch_class = optim.Adafactor
    takes_shards = False  # it needs whole rows and columns
    type: Literal["adafactor"] = "adafactor"
    learning_rate: Rate = 3e-2
    """Peak step size, relative to the size of the weights; the paper uses 0.01."""
    weight_decay: DecoupledDecay = 0.0
    beta2_decay: float = Field(default=-0.8, le=0)
    """Exponent of the decay rate of the mean of squared gradients, 1 - step ** beta2_decay."""
    d: float = Field(default=1.0, ge=1)
    """Largest root mean square of an update before it is multiplied by the step size."""


class MuonConfig(GroupedConfig, frozen=True):
    """Orthogonalised momentum for matrices in layers, AdamW for other parameters (Jordan et al. 2024).

    Each matrix of each expert is orthogonalised by itself, the gate and up matrices separately. AdamW updates
    embeddings, an untied output matrix, norms and biases.
    """

    type: Literal["muon"] = "muon"
    learning_rate: _FullRate = 1e-2
    weight_decay: DecoupledDecay = 0.1
    momentum: Fraction = 0.95
    """Decay rate of the running mean of the gradients."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    ns_steps: int = Field(default=5, ge=1, lt=100)
    """Newton-Schulz iterations that make a matrix orthogonal."""
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Scale of the learning rate of a matrix (out, in). match_rms_adamw: 0.2 sqrt(max(out, in)), steps as
    large as AdamW's (Moonlight, arXiv:2502.16982); original: sqrt(max(1, out / in)), for rates such as
    0.02."""
    adamw_learning_rate: float | None = Field(default=None, gt=0, le=MAX_RATE)
    """Peak learning rate of the parameters that AdamW updates; null: learning_rate."""
    adamw_betas: Betas = (0.9, 0.95)
    """AdamW's decay rates of the running means of the gradient and of its square."""
    adamw_eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator of AdamW's update."""

    def build(self, model: nn.Module) -> Optimizer:
        decayed, undecayed = split_by_decay(model)
        by_num_fused: dict[int, list[nn.Parameter]] = {1: []}
        outside_layers: list[nn.Parameter] = []
        for name, parameter in decayed.items():
            if name.startswith(LAYERS):
                by_num_fused.setdefault(num_fused(name), []).append(parameter)
            else:
                outside_layers.append(parameter)
        muon_options = self.model_dump(
            include={"weight_decay", "momentum", "nesterov", "ns_steps", "adjust_lr_fn"}
        )
        muon_options["lr"] = self.learning_rate
        adamw_rate = self.adamw_learning_rate or self.learning_rate
        groups = [
            *(
                {**muon_options, "num_fused": count, "params": matrices}
                for count, matrices in by_num_fused.items()
            ),
            {"params": outside_layers, "weight_decay": self.weight_decay, "lr": adamw_rate},
            {"params": list(undecayed.values()), "weight_decay": 0.0, "lr": adamw_rate},
        ]
        return Muon(
            refined_groups(groups, model, self),
            lr=adamw_rate,
            betas=self.adamw_betas,
            eps=self.adamw_eps,
        )

    def learning_rate_factor(self, scale: ParameterScale, group: Mapping[str, Any]) -> float:
        if "num_fused" not in group:
            return _adamw_factor(scale)
        # All singular values of the update equal the factor of `adjust_lr_fn`. They should be
        # proportional to sqrt(out / in) (Yang et al. 2023, arXiv:2310.17813, condition 1).
        adjustment = partial(_adjustment, self.adjust_lr_fn)
        return scale.multiplier * scale.growth(
            lambda out, into: math.sqrt(out / into) / adjustment(out, into)
        )


def _adamw_factor(scale: ParameterScale) -> float:
    """Return the factor of the learning rate under AdamW, whose updates ignore the gradient's size.

    The changes that all inputs make to an output add up, so r times the inputs need 1 / r of the learning
    rate (Yang et al. 2022, arXiv:2203.03466, table 3).
    """
    return scale.multiplier / scale.growth(lambda out, into: into)


def _adjustment(adjust_lr_fn: str, num_rows: int, num_columns: int) -> float:
    """Return the factor of the learning rate of a matrix under Muon; see `MuonConfig.adjust_lr_fn`."""
    if adjust_lr_fn == "original":
        return math.sqrt(max(1, num_rows / num_columns))
    return 0.2 * math.sqrt(max(num_rows, num_columns))


def build_schedule(optimizer: Optimizer, config: OptimizerConfig, max_steps: int) -> LambdaLR:
    """Return the learning rate schedule, which depends only on the step and therefore resumes exactly."""
    return LambdaLR(optimizer, lambda step: config.schedule.multiplier(step, max_steps))


def replace_options(
    checkpoint: dict[str, Any], model: nn.Module, config: OptimizerConfig, max_steps: int
) -> None:
    """Put the optimizer options of a resumed run into its checkpoint, in place.

    torch would silently restore the learning rates and decays that the checkpoint was saved with.
    """
    (optimizer,), (schedule,) = checkpoint["optimizer_states"], checkpoint["lr_schedulers"]
    multiplier = config.schedule.multiplier(schedule["last_epoch"], max_steps)
    new_groups = config.build(model).state_dict()["param_groups"]
    optimizer["param_groups"] = [
        {**group, "initial_lr": group["lr"], "lr": group["lr"] * multiplier} for group in new_groups
    ]
    schedule["base_lrs"] = [group["lr"] for group in new_groups]
    schedule["_last_lr"] = [group["lr"] for group in optimizer["param_groups"]]


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer: one with weight decay and one without."""
    decayed, undecayed = split_by_decay(model)
    return [
        {"params": list(decayed.values()), "weight_decay": weight_decay},
        {"params": list(undecayed.values()), "weight_decay": 0.0},
    ]


def refined_groups(
    groups: Sequence[Mapping[str, Any]], model: nn.Module, config: GroupedConfig
) -> list[dict[str, Any]]:
    """Split parameter groups by `config.groups` and by the learning rates of the model's parametrization.

    A parametrization does not change the weight decay per step, which is learning rate times weight decay. A
    group whose learning rate is scaled stores the factor as `lr_factor`; a group without `lr` has that of
    `config`.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    scales: Mapping[str, ParameterScale] = getattr(model, "scales", {})
    parts = parts_of(model)
    refined: list[dict[str, Any]] = []
    for group in groups:
        # Keyed by what no option of the optimizer changes: a resumed run keeps the order of parameters.
        members: dict[tuple[Part | None, ParameterScale | None], list[nn.Parameter]] = {}
        for parameter in group["params"]:
            name = names[id(parameter)]
            part = parts[name] if parts[name] in config.groups else None
            members.setdefault((part, scales.get(name)), []).append(parameter)
        for (part, scale), parameters in members.items() or [((None, None), [])]:
            options = GroupConfig() if part is None else config.groups[part]
            factor = (scale and config.learning_rate_factor(scale, group)) or 1.0
            decay = group["weight_decay"] if options.weight_decay is None else options.weight_decay
            own = {**group, "params": parameters, "weight_decay": decay / factor}
            if (total := factor * options.learning_rate_factor) != 1:
                rate = group.get("lr", config.learning_rate)
                own |= {"lr": rate * total, "lr_factor": total}
            refined.append(own)
    return refined


def split_by_decay(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Return the parameters with and without weight decay, by name; a tied parameter appears once.

    Embeddings are identified by their module, stacked biases (E, F) by their name.
    """
    embeddings = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
    }
    decayed: dict[str, nn.Parameter] = {}
    undecayed: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        has_decay = is_matrix(name, parameter) and id(parameter) not in embeddings
        group = decayed if has_decay else undecayed
        group[name] = parameter
    return decayed, undecayed


_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7

MAX_TOGETHER = 2**24
"""Numbers from which on waiting parameters of one shape are updated, which limits the memory of copies."""


class Muon(optim.AdamW):
    """Muon (Jordan et al. 2024) for parameter groups with `num_fused`, AdamW for other groups.

    Both use the formulas of `torch.optim`. A parameter (..., num_fused * O, I) holds matrices (O, I).
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        for group in groups:
            if "num_fused" in group:
                self._step_matrices(group)
        try:
            self.param_groups = [group for group in groups if "num_fused" not in group]
            super().step()
        finally:
            self.param_groups = groups
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        Optimizer.__setstate__(self, state)  # Adam's version requires a step count in every state

    def _step_matrices(self, group: dict[str, Any]) -> None:
        """Update a group; orthogonalise matrices of equal shape together.

        In C++ one thread computes a matrix, so a few large matrices do not occupy all threads.
        """
        together: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            update = self._averaged(parameter, parameter.grad, group)
            if on_this_rank(parameter) is not parameter:
                # Imported here, since the import takes half a second.
                from moe_ffn.training.parallel.sharding import on_whole_matrices

                function = partial(_orthogonal, group=group)
                _add(parameter, on_whole_matrices(function, update, parameter), group)
                continue
            alike = together.setdefault(parameter.shape[-2:], [])
            alike.append((parameter, update))
            if sum(update.numel() for _, update in alike) >= MAX_TOGETHER:
                _step_alike(together.pop(parameter.shape[-2:]), group)
        for alike in together.values():
            _step_alike(alike, group)

    def _averaged(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """Update the momentum; return this rank's part of the update before it is orthogonalised."""
        state, momentum = self.state[parameter], group["momentum"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        update = on_this_rank(gradient)
        buffer = on_this_rank(state["momentum_buffer"]).lerp_(update, 1 - momentum)
        return update.lerp(buffer, momentum) if group["nesterov"] else buffer


def _step_alike(alike: Sequence[tuple[Tensor, Tensor]], group: Mapping[str, Any]) -> None:
    """Update parameters with matrices of equal shape, given with their averaged gradients."""
    stacks = [update.reshape(-1, *update.shape[-2:]) for _, update in alike]
    together = torch.cat(stacks) if len(stacks) > 1 else stacks[0]
    orthogonal = _orthogonal(together, group).split([len(stack) for stack in stacks])
    for (parameter, _), part in zip(alike, orthogonal, strict=True):
        _add(parameter, part.reshape(parameter.shape), group)


def _add(parameter: Tensor, orthogonal: Tensor, group: Mapping[str, Any]) -> None:
    """Decay this rank's part of a parameter, and add its orthogonalised update."""
    num_rows, num_columns = parameter.shape[-2] // group["num_fused"], parameter.shape[-1]
    factor = _adjustment(group["adjust_lr_fn"], num_rows, num_columns)
    local = on_this_rank(parameter)
    local.mul_(1 - group["lr"] * group["weight_decay"])
    local.add_(orthogonal, alpha=-group["lr"] * factor)


def _orthogonal(update: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Orthogonalise each matrix in the update of a parameter."""
    matrices_MOI = rearrange(update, "... (m o) i -> (... m) o i", m=group["num_fused"])
    return orthogonalize(matrices_MOI, group["ns_steps"]).reshape(update.shape)


def orthogonalize(matrices_MOI: Tensor, num_steps: int) -> Tensor:
    """Bring the singular values of each matrix near 1; return bfloat16 (M, O, I). A zero matrix stays zero.

    This is the quintic Newton-Schulz iteration of `torch.optim.Muon` for a batch of matrices. A CPU that is
    slower in bfloat16 computes the products in float32 and rounds them, so results differ by rounding only.
    """
    dtype = torch.bfloat16
    if matrices_MOI.device.type == "cpu":
        dtype = product_dtype_on_cpu(dtype)
    if dtype == torch.float32 and has_compiled_tiles(matrices_MOI):
        return torch.ops.moe_ffn_cpu.newton_schulz(matrices_MOI, num_steps, *_COEFFICIENTS, _EPS)
    a, b, c = _COEFFICIENTS
    is_tall = matrices_MOI.shape[-2] > matrices_MOI.shape[-1]
    x = matrices_MOI.bfloat16()
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(num_steps):
        factor = x.to(dtype)
        gram = (factor @ factor.mT).to(x.dtype).to(dtype)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c).to(x.dtype).to(dtype)
        x = torch.baddbmm(factor, polynomial, factor, beta=a).to(x.dtype)
    return x.mT if is_tall else x
