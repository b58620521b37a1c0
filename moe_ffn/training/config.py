"""The options of the Trainer, of checkpoints and of logging. This module does not import lightning."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from moe_ffn.config.base import MAX_COUNT, Config
from moe_ffn.config.environment import processes_here
from moe_ffn.config.errors import show
from moe_ffn.training.recovery.guard import GuardConfig


def _must_be(kinds: str) -> WrapValidator:
    """Report one error for a union type; pydantic would report one for each member."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(f"must be {kinds}, got {show(value)}") from None

    return WrapValidator(validate)


class EarlyStoppingConfig(Config, frozen=True):
    """Stop when the validation loss no longer falls."""

    patience: int = Field(default=3, ge=1, le=MAX_COUNT)
    """Validations without improvement before stopping."""
    min_delta: float = Field(default=0.0, ge=0)
    """Smallest fall of the validation loss, in nats per token, that counts as improvement."""


Precision = Literal["auto", "64-true", "32-true", "bf16-mixed", "bf16-true", "16-mixed"]
PRECISIONS = tuple(name for name in get_args(Precision) if name != "auto")
"""Precisions in which a run can be trained."""


class _LoopConfig(Config, frozen=True):
    max_steps: int = Field(default=400, ge=1, le=MAX_COUNT)
    """Optimizer steps of the whole run."""
    accumulate_grad_batches: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Batches per optimizer step, which averages their gradients."""
    gradient_clip_val: float = Field(default=1.0, ge=0)
    """Largest gradient norm; a larger gradient is scaled down to this norm; 0: no clipping."""
    precision: Precision = "auto"
    """Number format of weights and matrix products. auto: bf16-mixed on a GPU with native bfloat16, otherwise
    32-true."""
    compile: bool = False
    """Compile the model with torch.compile, which needs a C++ compiler on a CPU."""
    validate_every_n_steps: int = Field(default=200, ge=1, le=MAX_COUNT)
    """Optimizer steps between validations; a run always ends with a validation."""
    early_stopping: EarlyStoppingConfig | None = None
    """Stop when the validation loss no longer falls; off by default."""
    guard: GuardConfig = GuardConfig()
    """When to skip an optimizer step, and how many skipped steps in a row end the run."""


class TrainerConfig(_LoopConfig, frozen=True):
    """Options of the training loop; `accelerator` and the options after it belong to `lightning.Trainer`."""

    # Types are checked here; Lightning checks some late or never, and takes `detect_anomaly: "no"` for true.

    accelerator: str = "auto"
    """Device to train on: auto, cpu, gpu or cuda, mps."""
    benchmark: bool | None = None
    """Let cuDNN time its convolution algorithms and use the fastest."""
    detect_anomaly: bool = False
    """End the run with torch's traceback at the first NaN in a backward pass; slow. If false, the guard skips
    the step and reports where the NaN began."""
    deterministic: Annotated[
        bool | Literal["warn"] | None, _must_be("true, false, null or 'warn'")
    ] = None
    """true: torch raises an error for operations that are not reproducible to the bit; warn: torch warns."""
    devices: Annotated[
        int | str | list[int], _must_be("a whole number, text or a list of whole numbers")
    ] = "auto"
    """Number of processes on this machine, or the list of GPUs to use."""
    gradient_clip_algorithm: Literal["norm", "value"] | None = None
    """Quantity that gradient_clip_val limits: the norm of the whole gradient (default), or each value."""
    inference_mode: bool = True
    """Validate under torch.inference_mode; if false, under torch.no_grad."""
    max_time: Annotated[
        str | dict[str, int] | None, _must_be("text, a mapping of whole numbers or null")
    ] = None
    """End the run after this time, with a last validation: DD:HH:MM:SS or {hours: 2}."""
    num_nodes: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Number of machines; start the program on each with torchrun or srun."""
    profiler: Literal["simple", "advanced"] | None = None
    """Write a profile to profile.txt; simple: seconds per callback and hook, advanced: per function."""
    # `ddp_spawn` and `ddp_fork` train in child processes, whose measurements would be lost.
    strategy: Literal["auto", "ddp", "ddp_find_unused_parameters_true"] = "auto"
    """Strategy for several processes. auto: ddp; ddp_find_unused_parameters_true: ddp for a custom block that
    does not use all its weights in every step."""

    @property
    def early_limits(self) -> list[str]:
        """Options that may end this run before `max_steps`."""
        names = ("early_stopping", "max_time")
        return [f"trainer.{name}" for name in names if getattr(self, name) is not None]

    def lightning_arguments(self) -> dict[str, Any]:
        """Return the arguments of `lightning.Trainer` that differ from its defaults."""
        arguments = self.model_dump(exclude=set(_LoopConfig.model_fields), exclude_defaults=True)
        if self.devices == "auto" and (count := processes_here()):
            arguments["devices"] = count  # the processes that torchrun started
        return arguments


class WandbConfig(Config, frozen=True):
    """Weights & Biases. Without an account or a network, wandb logs to disk, offline."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: WANDB_MODE if set, else online if there is an API key, else offline."""
    project: str = Field(default="moe_ffn", min_length=1)
    """wandb project of the run."""
    entity: str | None = None
    """wandb user or team that owns the run; null: your default."""
    group: str | None = Field(default=None, min_length=1)
    """Group of the run in wandb; null: WANDB_RUN_GROUP, which a sweep sets to its name, or no group."""
    tags: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Tags of the run in wandb, in addition to the FFN type."""


ROWS_BEFORE_SPIKES = 5
"""Rows needed before a loss can count as a spike."""


MIN_COLLAPSE = 0.5
"""Least MaxVio of a collapse. If k is close to num_experts, even the largest possible MaxVio is small."""


def highest_violation(num_experts: int, experts_per_token: float) -> float:
    """Return the MaxVio if every token chooses the same expert, which then has 1 / k of the pairs."""
    return num_experts / max(experts_per_token, 1e-9) - 1


class AlarmsConfig(Config, frozen=True):
    """Limits for alarms. An alarm prints a line, sends a wandb alert and is added to alarms.jsonl."""

    after_steps: int = Field(default=50, ge=1, le=MAX_COUNT)
    """Steps before imbalance or dropping raises an alarm, and before an idle expert counts as dead."""
    max_violation_share: float = Field(default=0.5, gt=0, le=1)
    """MaxVio above which a router has collapsed, as a fraction of its maximum, num_experts / k - 1."""
    router_logit: float = Field(default=50.0, gt=0)
    """Largest absolute router logit, in the last step of a row, that raises no alarm."""
    dropped_fraction: float = Field(default=0.2, ge=0, lt=1)
    """Largest fraction of dropped (token, expert) pairs that raises no alarm."""
    loss_spike: float = Field(default=1.3, gt=1)
    """Ratio of a row's loss to the median of the ten rows before it, above which it is a spike."""

    def max_violation(self, num_experts: int, experts_per_token: float) -> float:
        """Return the MaxVio above which a router has collapsed."""
        highest = highest_violation(num_experts, experts_per_token)
        return max(self.max_violation_share * highest, MIN_COLLAPSE)

    def not_judged(self, num_steps: int, num_rows: int, *, is_routed: bool) -> list[str]:
        """Return one sentence for each kind of alarm that a run this short cannot raise.

        The rows of training cover `num_steps` steps, and `num_rows` of them have a loss.
        """
        sentences: list[str] = []
        if is_routed and num_steps < self.after_steps:
            sentences.append(
                f"collapse, dropped pairs and dead experts need {self.after_steps} steps, this run has "
                f"{num_steps}"
            )
        if num_rows <= ROWS_BEFORE_SPIKES:
            sentences.append(
                f"loss spikes need {ROWS_BEFORE_SPIKES + 1} rows of metrics, this run has {num_rows}"
            )
        return sentences


class CheckpointsConfig(Config, frozen=True):
    """Checkpoints to resume from. The weights with the lowest validation loss are saved as well."""

    every_n_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps between checkpoints; null saves at every validation."""
    keep_last: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep."""


class LoggingConfig(Config, frozen=True):
    """Logging during training."""

    every_n_steps: int = Field(default=10, ge=1, le=MAX_COUNT)
    """Optimizer steps between rows of metrics; a row covers all steps since the previous row."""
    churn_every_n_steps: int = Field(default=20, ge=1, le=MAX_COUNT)
    """Minimum number of optimizer steps between two measurements of churn: the fraction of tokens in a fixed
    batch whose experts have changed since the last measurement."""
    alarms: AlarmsConfig = AlarmsConfig()
    """Limits above which the run raises an alarm."""
    wandb: WandbConfig = WandbConfig()
    """Weights & Biases, in addition to metrics.jsonl, which is always written."""


def resolve_precision(precision: str, device: str) -> str:
    """Return the precision that `auto` selects for a device type; return any other precision unchanged.

    A GPU with native bfloat16 gets bf16-mixed, every other device 32-true. The choice does not depend on
    timings, because the precision changes the result of a run.
    """
    if precision != "auto":
        return precision
    if device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16-mixed"
    return "32-true"
