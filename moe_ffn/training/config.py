"""The options of the Trainer, of checkpoints and of logging; it imports no lightning."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from moe_ffn.config import MAX_COUNT, Config
from moe_ffn.errors import show
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
    """The least fall, in nats per token, that counts as improvement."""


Precision = Literal["auto", "64-true", "32-true", "bf16-mixed", "bf16-true", "16-mixed"]
PRECISIONS = tuple(name for name in get_args(Precision) if name != "auto")
"""What a run may be trained in."""


class _LoopConfig(Config, frozen=True):
    max_steps: int = Field(default=400, ge=1, le=MAX_COUNT)
    """Optimizer steps."""
    accumulate_grad_batches: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Batches whose gradients make up one optimizer step."""
    gradient_clip_val: float = Field(default=1.0, ge=0)
    """Largest gradient norm; 0 does not clip."""
    precision: Precision = "auto"
    """auto: 32-true on a CPU, bf16-mixed on a GPU that multiplies bfloat16 natively."""
    compile: bool = False
    """Compile the model with torch.compile; on a CPU that needs a C++ compiler."""
    validate_every_n_steps: int = Field(default=200, ge=1, le=MAX_COUNT)
    """Optimizer steps between validations; there is always one at the end."""
    early_stopping: EarlyStoppingConfig | None = None
    """Stop when the validation loss no longer falls; off by default."""
    guard: GuardConfig = GuardConfig()
    """Which optimizer steps are skipped, and how many in a row end the run."""


class TrainerConfig(_LoopConfig, frozen=True):
    """The training loop; from `accelerator` on, arguments of `lightning.Trainer` and their defaults there."""

    # Lightning looks at some of them late or never: `detect_anomaly: "no"` would detect anomalies.

    accelerator: str = "auto"
    """What to train on: auto, cpu, gpu or cuda, mps."""
    benchmark: bool | None = None
    """Let cuDNN time its algorithms for convolutions and take the fastest."""
    detect_anomaly: bool = False
    """End with torch's traceback where a backward pass makes a NaN; slow. The guard says where one began,
    and goes on, without it."""
    deterministic: Annotated[
        bool | Literal["warn"] | None, _must_be("true, false, null or 'warn'")
    ] = None
    """Let torch refuse operations that do not repeat to the bit, or warn of them."""
    devices: Annotated[
        int | str | list[int], _must_be("a whole number, text or a list of whole numbers")
    ] = "auto"
    """How many processes train, or on which GPUs."""
    gradient_clip_algorithm: Literal["norm", "value"] | None = None
    """What gradient_clip_val limits: the norm of the whole gradient (the default), or each value."""
    inference_mode: bool = True
    """Validate under torch.inference_mode, or under torch.no_grad."""
    max_time: Annotated[
        str | dict[str, int] | None, _must_be("text, a mapping of whole numbers or null")
    ] = None
    """End after this time, DD:HH:MM:SS or {hours: 2}, with a last validation."""
    num_nodes: int = Field(default=1, ge=1, le=MAX_COUNT)
    """How many machines train; start the program on each with torchrun or srun."""
    profiler: Literal["simple", "advanced"] | None = None
    """Write where the time went into profile.txt: by callback and hook, or by Python function."""
    # Strategies that start processes of their own (`ddp_spawn`) would leave what is measured in them behind.
    strategy: Literal["auto", "ddp", "ddp_find_unused_parameters_true"] = "auto"
    """How several processes work together: auto and ddp; ddp_find_unused_parameters_true where a block of
    yours does not use all of its weights."""

    def lightning_arguments(self) -> dict[str, Any]:
        """The arguments of `lightning.Trainer` that differ from its defaults."""
        return self.model_dump(exclude=set(_LoopConfig.model_fields), exclude_defaults=True)


class WandbConfig(Config, frozen=True):
    """Weights & Biases. Without an account or a network the run is kept offline, on disk."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: WANDB_MODE if set, else online where there is an API key, else offline."""
    project: str = Field(default="moe_ffn", min_length=1)
    """Project the run belongs to."""
    entity: str | None = None
    """User or team; your default one when null."""
    tags: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Labels of the run; the FFN type is always one of them."""


ROWS_BEFORE_SPIKES = 5
"""A row's loss is a spike against the rows before it, once there are so many."""


class AlarmsConfig(Config, frozen=True):
    """When a run says that something goes wrong: a line, a wandb alert, and a line of alarms.jsonl."""

    after_steps: int = Field(default=50, ge=1, le=MAX_COUNT)
    """Optimizer steps that imbalance or dropping has to last, and that an expert has to be without a
    token to count as dead."""
    max_violation_share: float = Field(default=0.5, gt=0, le=1)
    """Imbalance that counts as collapse: MaxVio as a share of the highest possible, num_experts / k - 1."""
    router_logit: float = Field(default=50.0, gt=0)
    """Size of a router's logit, at the last step of a row, that counts as exploding."""
    dropped_fraction: float = Field(default=0.2, ge=0, lt=1)
    """Share of dropped pairs that is too much."""
    loss_spike: float = Field(default=1.3, gt=1)
    """A row's loss over the median of the ten rows before that counts as a spike."""

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
                f"jumps of the loss need {ROWS_BEFORE_SPIKES + 1} rows, this run has {num_rows}"
            )
        return sentences


class CheckpointsConfig(Config, frozen=True):
    """What a run is resumed from; the weights of the lowest validation loss are kept beside it."""

    every_n_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps between checkpoints; null saves at every validation."""
    keep_last: int = Field(default=2, ge=1)
    """How many of them are kept."""


class LoggingConfig(Config, frozen=True):
    """What is written while training."""

    every_n_steps: int = Field(default=10, ge=1, le=MAX_COUNT)
    """Optimizer steps between two rows of metrics; a row covers all steps since the last."""
    churn_every_n_steps: int = Field(default=20, ge=1, le=MAX_COUNT)
    """Least optimizer steps between two looks at a fixed probe batch; churn is the share of its tokens
    whose experts changed in between."""
    alarms: AlarmsConfig = AlarmsConfig()
    """When to call for attention."""
    wandb: WandbConfig = WandbConfig()
    """Weights & Biases, beside the log that is always written."""


def resolve_precision(precision: str, device: str) -> str:
    """The format that `auto` chooses for a kind of device; any other name as it is.

    bfloat16 on a GPU that multiplies it natively, float32 everywhere else. The kind of device decides,
    and never a measurement: the format changes the result of a run, and a timing differs from one
    minute to the next.

    Args:
        precision: `auto`, or a name that `lightning.Trainer` takes.
        device: `torch.device.type`.
    """
    if precision != "auto":
        return precision
    if device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16-mixed"
    return "32-true"
