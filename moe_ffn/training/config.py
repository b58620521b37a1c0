"""The options of the Trainer, of checkpoints and of logging; it imports no lightning."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from moe_ffn.config.base import MAX_COUNT, Config
from moe_ffn.config.environment import processes_here
from moe_ffn.config.errors import show
from moe_ffn.training.recovery.guard import GuardConfig


def _must_be(kinds: str) -> WrapValidator:
    """One message for a union, for which pydantic has one for each of its members."""

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
"""The precisions in which a run may be trained."""


class _LoopConfig(Config, frozen=True):
    max_steps: int = Field(default=400, ge=1, le=MAX_COUNT)
    """Optimizer steps of the whole run."""
    accumulate_grad_batches: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Batches whose gradients make up one optimizer step."""
    gradient_clip_val: float = Field(default=1.0, ge=0)
    """Largest gradient norm, to which a larger gradient is scaled down; 0: no clipping."""
    precision: Precision = "auto"
    """Number format of weights and products. auto: 32-true on a CPU, bf16-mixed on a GPU that has it
    natively."""
    compile: bool = False
    """Compile the model with torch.compile; on a CPU that needs a C++ compiler."""
    validate_every_n_steps: int = Field(default=200, ge=1, le=MAX_COUNT)
    """Optimizer steps between validations; there is always one at the end."""
    early_stopping: EarlyStoppingConfig | None = None
    """Stop when the validation loss no longer falls; off by default."""
    guard: GuardConfig = GuardConfig()
    """Limits of the steps that are skipped, and of how many in a row end the run."""


class TrainerConfig(_LoopConfig, frozen=True):
    """The training loop; from `accelerator` on, arguments of `lightning.Trainer` and their defaults there."""

    # Lightning looks at some of them late or never: `detect_anomaly: "no"` would detect anomalies.

    accelerator: str = "auto"
    """Device to train on: auto, cpu, gpu or cuda, mps."""
    benchmark: bool | None = None
    """Let cuDNN time its algorithms for convolutions and take the fastest."""
    detect_anomaly: bool = False
    """End the run, with torch's traceback, at the first NaN in a backward pass; slow. When false, the guard
    reports where a NaN began and skips the step."""
    deterministic: Annotated[
        bool | Literal["warn"] | None, _must_be("true, false, null or 'warn'")
    ] = None
    """true: torch refuses operations that are not reproducible to the bit; warn: it warns of them."""
    devices: Annotated[
        int | str | list[int], _must_be("a whole number, text or a list of whole numbers")
    ] = "auto"
    """Number of processes that train, or the list of GPUs to use."""
    gradient_clip_algorithm: Literal["norm", "value"] | None = None
    """The quantity that gradient_clip_val limits: norm of the whole gradient (default), or each value."""
    inference_mode: bool = True
    """Validate under torch.inference_mode; when false, under torch.no_grad."""
    max_time: Annotated[
        str | dict[str, int] | None, _must_be("text, a mapping of whole numbers or null")
    ] = None
    """End the run, with a last validation, after this time: DD:HH:MM:SS or {hours: 2}."""
    num_nodes: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Number of machines; start the program on each with torchrun or srun."""
    profiler: Literal["simple", "advanced"] | None = None
    """Write where the time went into profile.txt; simple: by callback and hook, advanced: by function."""
    # Strategies that start processes of their own (`ddp_spawn`) would leave what is measured in them behind.
    strategy: Literal["auto", "ddp", "ddp_find_unused_parameters_true"] = "auto"
    """Strategy of several processes. auto: ddp; ddp_find_unused_parameters_true: ddp for a custom block that
    does not use all its weights in each step."""

    def lightning_arguments(self) -> dict[str, Any]:
        """Return the arguments of `lightning.Trainer` that differ from its defaults."""
        arguments = self.model_dump(exclude=set(_LoopConfig.model_fields), exclude_defaults=True)
        if self.devices == "auto" and (count := processes_here()):
            arguments["devices"] = count  # torchrun has started so many
        return arguments


class WandbConfig(Config, frozen=True):
    """Weights & Biases. Without an account or a network the run is kept offline, on disk."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: WANDB_MODE if set, else online where there is an API key, else offline."""
    project: str = Field(default="moe_ffn", min_length=1)
    """wandb project of the run."""
    entity: str | None = None
    """wandb user or team that owns the run; null: your default."""
    group: str | None = Field(default=None, min_length=1)
    """Runs that belong together; null: WANDB_RUN_GROUP, which a sweep sets to its name, or none."""
    tags: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Labels of the run; the FFN type is always one of them."""


ROWS_BEFORE_SPIKES = 5
"""A row's loss is a spike against the rows before it, once there are so many."""


class AlarmsConfig(Config, frozen=True):
    """When a run says that something goes wrong: a line, a wandb alert, and a line of alarms.jsonl."""

    after_steps: int = Field(default=50, ge=1, le=MAX_COUNT)
    """Steps before imbalance or dropping is reported, and before an idle expert counts as dead."""
    max_violation_share: float = Field(default=0.5, gt=0, le=1)
    """MaxVio above which a router has collapsed, as a share of the largest possible, num_experts / k - 1."""
    router_logit: float = Field(default=50.0, gt=0)
    """Absolute router logit, at the last step of a row, above which logits are exploding."""
    dropped_fraction: float = Field(default=0.2, ge=0, lt=1)
    """Share of dropped (token, expert) pairs above which dropping is reported."""
    loss_spike: float = Field(default=1.3, gt=1)
    """Ratio of a row's loss to the median of the ten rows before it, above which it is a spike."""

    def not_judged(self, num_steps: int, num_rows: int, *, is_routed: bool) -> list[str]:
        """Sentences about alarms that could not have been raised in so short a run.

        Args:
            num_steps: optimizer steps that the rows of training cover.
            num_rows: rows that have a loss.
            is_routed: some block routes tokens.
        """
        sentences: list[str] = []
        if is_routed and num_steps < self.after_steps:
            sentences.append(
                f"imbalance, drops and dead experts need {self.after_steps} steps, this run has {num_steps}"
            )
        if num_rows <= ROWS_BEFORE_SPIKES:
            sentences.append(
                f"jumps of the loss need {ROWS_BEFORE_SPIKES + 1} rows of metrics, this run has {num_rows}"
            )
        return sentences


class CheckpointsConfig(Config, frozen=True):
    """Checkpoints that a run is resumed from; those of the lowest validation loss are kept too."""

    every_n_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps between checkpoints; null saves at every validation."""
    keep_last: int = Field(default=2, ge=1)
    """Number of the newest checkpoints that are kept."""


class LoggingConfig(Config, frozen=True):
    """The log that is written while training."""

    every_n_steps: int = Field(default=10, ge=1, le=MAX_COUNT)
    """Optimizer steps between two rows of metrics; a row covers all steps since the one before."""
    churn_every_n_steps: int = Field(default=20, ge=1, le=MAX_COUNT)
    """Smallest number of optimizer steps between two measurements of churn, the share of a fixed batch's
    tokens whose experts have changed since the last measurement."""
    alarms: AlarmsConfig = AlarmsConfig()
    """Limits above which the run raises an alarm."""
    wandb: WandbConfig = WandbConfig()
    """Weights & Biases, beside the log that is always written."""


def resolve_precision(precision: str, device: str) -> str:
    """Return the format that `auto` chooses for a kind of device, and any other name unchanged.

    A GPU that multiplies bfloat16 natively gets bf16-mixed, every other device float32. Nothing is timed,
    because the format changes the result of a run.

    Args:
        precision: `auto`, or a name that `lightning.Trainer` takes.
        device: `torch.device.type`.
    """
    if precision != "auto":
        return precision
    if device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16-mixed"
    return "32-true"
