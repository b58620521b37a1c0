"""The optimizers and their options; torch-free (see `moe_ffn.config`).

Those of `torch.optim` that train a language model are here under their own names and with their own
arguments. Its LBFGS calls the loss several times a step, SparseAdam needs sparse gradients, Rprop whole-batch
gradients, and ASGD's average would be read by nobody.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from moe_ffn.config import TaggedConfig
from moe_ffn.training.schedule_config import CosineConfig, ScheduleConfig

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

_Betas = Annotated[tuple[float, float], Field(strict=False)]

MAX_RATE = 1e9
"""What float32 holds, with room for what it is multiplied by."""

_Rate = Annotated[float, Field(gt=0, le=MAX_RATE)]
_FullRate = Annotated[_Rate, Field(description="The full rate, before the schedule.")]

_DecoupledDecay = Annotated[
    float,
    Field(
        ge=0,
        description="Decoupled decay of every matrix, an untied output matrix among them; norms, biases "
        "and embeddings have none.",
    ),
]


class OptimizerConfig(TaggedConfig, frozen=True):
    """The rule by which gradients move the weights; AdamW where no type is given.

    Weight decay concerns matrices (of experts, attention, routers, and an output matrix that is not tied),
    and never norms, biases and embeddings.
    """

    learning_rate: _FullRate
    weight_decay: float = Field(default=0.0, ge=0)
    """Decay of every matrix; norms, biases and embeddings have none."""
    schedule: ScheduleConfig = CosineConfig()
    """How the learning rate moves."""

    @classmethod
    def _as_mapping(cls, data: Any) -> Mapping[Any, Any]:
        data = super()._as_mapping(data)
        if cls.is_family_root() and "type" not in data:
            return {"type": "adamw", **data}
        return data

    @abstractmethod
    def build(self, model: nn.Module) -> Optimizer:
        """A fresh optimizer of all parameters of `model`.

        What is in its groups, but for the rate, is taken for options, which a resumed run may change; what
        is remembered from step to step belongs into its state. Its first group's rate is the one that is
        logged.
        """


class _TorchOptimizerConfig(OptimizerConfig, frozen=True):
    """A class of `torch.optim`, whose arguments are the fields that a subclass adds."""

    in_torch: ClassVar[str]
    """Its name in `torch.optim`."""
    always: ClassVar[Mapping[str, Any]] = {}
    """Arguments that are no options here."""

    def build(self, model: nn.Module) -> Optimizer:
        from torch import optim

        from moe_ffn.training.optimizer import decay_groups

        arguments = self.model_dump(exclude=set(OptimizerConfig.model_fields))
        groups = decay_groups(model, self.weight_decay)
        return getattr(optim, self.in_torch)(
            groups, lr=self.learning_rate, **arguments, **self.always
        )


class _AdamConfig(_TorchOptimizerConfig, frozen=True):
    """What Adam and its descendants share."""

    betas: _Betas = (0.9, 0.95)
    """Decay of the running mean and of the running square."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator."""

    @model_validator(mode="after")
    def _check_betas(self) -> _AdamConfig:
        _require_below_one("betas", self.betas)
        return self


class _DecoupledAdamConfig(_AdamConfig, frozen=True):
    weight_decay: _DecoupledDecay = 0.1


class _CoupledConfig(_TorchOptimizerConfig, frozen=True):
    weight_decay: float = Field(default=0.0, ge=0)
    """Times the weight, added to the gradient of every matrix (L2, not decoupled); norms, biases and
    embeddings have none."""


class AdamWConfig(_DecoupledAdamConfig, frozen=True):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2017)."""

    type: Literal["adamw"] = "adamw"
    learning_rate: _FullRate = 3e-3
    in_torch = "AdamW"


class NAdamConfig(_DecoupledAdamConfig, frozen=True):
    """Adam with Nesterov momentum (Dozat 2016); the decay is decoupled."""

    type: Literal["nadam"] = "nadam"
    learning_rate: _FullRate = 3e-3
    momentum_decay: float = Field(default=4e-3, ge=0)
    """How fast the momentum reaches its full value."""
    in_torch = "NAdam"
    always: ClassVar[Mapping[str, Any]] = {"decoupled_weight_decay": True}


class RAdamConfig(_DecoupledAdamConfig, frozen=True):
    """Adam with a rectified first phase (Liu et al. 2019); the decay is decoupled."""

    type: Literal["radam"] = "radam"
    learning_rate: _FullRate = 3e-3
    in_torch = "RAdam"
    always: ClassVar[Mapping[str, Any]] = {"decoupled_weight_decay": True}


class AdamConfig(_CoupledConfig, _AdamConfig, frozen=True):
    """Adam (Kingma & Ba 2014); weight decay goes through its moments."""

    type: Literal["adam"] = "adam"
    learning_rate: _FullRate = 3e-3
    in_torch = "Adam"


class AdamaxConfig(_CoupledConfig, _AdamConfig, frozen=True):
    """Adam by the largest gradient instead of the mean square (Kingma & Ba 2014)."""

    type: Literal["adamax"] = "adamax"
    learning_rate: _FullRate = 3e-3
    in_torch = "Adamax"


class AdagradConfig(_CoupledConfig, frozen=True):
    """Rates by the sum of all squared gradients so far (Duchi et al. 2011)."""

    type: Literal["adagrad"] = "adagrad"
    learning_rate: _FullRate = 1e-2
    eps: float = Field(default=1e-10, gt=0)
    """Added to the denominator."""
    in_torch = "Adagrad"


class AdadeltaConfig(_CoupledConfig, frozen=True):
    """Steps in the units of the weights (Zeiler 2012)."""

    type: Literal["adadelta"] = "adadelta"
    learning_rate: _Rate = 1.0
    """The full rate, before the schedule; the paper has 1 too."""
    rho: float = Field(default=0.9, ge=0, lt=1)
    """Decay of both running squares."""
    eps: float = Field(default=1e-6, gt=0)
    """Added under both roots; the size of the first step."""
    in_torch = "Adadelta"


class RMSpropConfig(_CoupledConfig, frozen=True):
    """Gradients over their running root mean square (Hinton 2012)."""

    type: Literal["rmsprop"] = "rmsprop"
    learning_rate: _FullRate = 1e-3
    alpha: float = Field(default=0.99, ge=0, lt=1)
    """Decay of the running square."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator."""
    in_torch = "RMSprop"


class SGDConfig(_CoupledConfig, frozen=True):
    """Stochastic gradient descent with momentum."""

    type: Literal["sgd"] = "sgd"
    learning_rate: _FullRate = 0.3
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the running sum of gradients; 0 is without momentum."""
    nesterov: bool = False
    """Look ahead along the momentum."""
    in_torch = "SGD"

    @model_validator(mode="after")
    def _check_nesterov(self) -> SGDConfig:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov (true) needs a momentum, got momentum 0; give one, as 0.9")
        return self


class AdafactorConfig(_TorchOptimizerConfig, frozen=True):
    """Squares by row and column alone, so hardly any memory (Shazeer & Stern 2018)."""

    type: Literal["adafactor"] = "adafactor"
    learning_rate: _Rate = 3e-2
    """Largest step relative to the size of the weights, before the schedule; the paper has 0.01."""
    weight_decay: _DecoupledDecay = 0.0
    beta2_decay: float = Field(default=-0.8, le=0)
    """The running square decays by 1 - step ** beta2_decay."""
    d: float = Field(default=1.0, ge=1)
    """Largest root mean square of an update, before the rate."""
    in_torch = "Adafactor"


class MuonConfig(OptimizerConfig, frozen=True):
    """Orthogonalised momentum for the matrices of the layers, AdamW for all else (Jordan et al. 2024).

    Every expert's matrix is one of its own, and so are gate and up. All else is embeddings, an untied output
    matrix, norms and biases.
    """

    type: Literal["muon"] = "muon"
    learning_rate: _Rate = 1e-2
    """The full rate, before the schedule, and for AdamW's part too."""
    weight_decay: _DecoupledDecay = 0.1
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the running mean of the gradients."""
    nesterov: bool = True
    """Look ahead along the momentum."""
    ns_steps: int = Field(default=5, ge=1, lt=100)
    """Newton-Schulz iterations that make a matrix orthogonal."""
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """The rate of a matrix (out, in): times 0.2 sqrt(max(out, in)), as large as a step of AdamW (Moonlight,
    arXiv:2502.16982), or times sqrt(max(1, out / in)), for rates such as 0.02."""
    adamw_learning_rate: float | None = Field(default=None, gt=0, le=MAX_RATE)
    """The full rate of what AdamW moves; null: learning_rate."""
    adamw_betas: _Betas = (0.9, 0.95)
    """AdamW's decay of the running mean and of the running square."""
    adamw_eps: float = Field(default=1e-8, gt=0)
    """Added to AdamW's denominator."""

    @model_validator(mode="after")
    def _check_betas(self) -> MuonConfig:
        _require_below_one("adamw_betas", self.adamw_betas)
        return self

    def build(self, model: nn.Module) -> Optimizer:
        from moe_ffn.training.muon import Muon, muon_groups

        return Muon(muon_groups(model, self))


def _require_below_one(name: str, betas: tuple[float, float]) -> None:
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"{name} must lie in [0, 1), got {list(betas)}")
