"""Learning rate schedules."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Literal

from pydantic import Field, model_validator

from moe_ffn.config.base import MAX_COUNT, TaggedConfig

_WARMUP_FRACTION = 0.05


class ScheduleConfig(TaggedConfig, frozen=True):
    """The learning rate schedule: a linear warm-up from zero, then a curve that depends on the type."""

    warmup_fraction: float = Field(default=_WARMUP_FRACTION, ge=0, lt=1)
    """Fraction of trainer.max_steps in which the learning rate rises linearly to its peak."""
    warmup_steps: int | None = Field(default=None, ge=0, le=MAX_COUNT)
    """Number of optimizer steps of warm-up, instead of warmup_fraction."""

    @model_validator(mode="after")
    def _check_warmup_is_given_once(self) -> ScheduleConfig:
        if self.warmup_steps is not None and self.warmup_fraction != _WARMUP_FRACTION:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) and warmup_fraction ({self.warmup_fraction:g}) both set "
                f"the length of the warm-up; leave warmup_steps null, or warmup_fraction at "
                f"{_WARMUP_FRACTION}"
            )
        return self

    def multiplier(self, step: int, max_steps: int) -> float:
        """Return the factor of the peak learning rate at optimizer step `step`, counted from 0."""
        warmup_steps = self.num_warmup_steps(max_steps)
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)  # a step at rate 0 would be wasted
        return self.after_warmup(step, warmup_steps, max_steps)

    def num_warmup_steps(self, max_steps: int) -> int:
        """Return the number of optimizer steps before the first step at the peak rate."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return round(self.warmup_fraction * max_steps)

    @property
    def warmup_option(self) -> str:
        """Option that sets the length of the warm-up, with its value."""
        if self.warmup_steps is not None:
            return f"warmup_steps (now {self.warmup_steps})"
        return f"warmup_fraction (now {self.warmup_fraction:g})"

    @abstractmethod
    def after_warmup(self, step: int, warmup_steps: int, max_steps: int) -> float:
        """Return the multiplier at `step`, which is at least `warmup_steps` and may exceed `max_steps`."""


class ConstantConfig(ScheduleConfig, frozen=True):
    """The peak rate until the end."""

    type: Literal["constant"] = "constant"

    def after_warmup(self, step: int, warmup_steps: int, max_steps: int) -> float:
        return 1.0


class InverseSqrtConfig(ScheduleConfig, frozen=True):
    """A rate that falls with the inverse square root of the step (Vaswani et al. 2017)."""

    type: Literal["inverse_sqrt"] = "inverse_sqrt"

    def after_warmup(self, step: int, warmup_steps: int, max_steps: int) -> float:
        # Steps count from 0 here and from 1 in the paper, where step `warmup_steps` has the peak rate.
        return math.sqrt((warmup_steps + 1) / (step + 1))


class _FallingConfig(ScheduleConfig, frozen=True):
    """A fall from the peak rate to a final rate, which is reached at trainer.max_steps."""

    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the end, as a fraction of its peak."""

    def after_warmup(self, step: int, warmup_steps: int, max_steps: int) -> float:
        progress = (step - warmup_steps) / max(max_steps - warmup_steps, 1)
        return 1 - (1 - self.final_fraction) * self.fallen(min(progress, 1.0))

    @abstractmethod
    def fallen(self, progress: float) -> float:
        """Return the completed fraction of the fall, 0 to 1, at a fraction of the steps after warm-up."""


class LinearConfig(_FallingConfig, frozen=True):
    """A linear fall from the peak rate to the final rate (BERT, Devlin et al. 2018)."""

    type: Literal["linear"] = "linear"

    def fallen(self, progress: float) -> float:
        return progress


class CosineConfig(_FallingConfig, frozen=True):
    """Half a cosine from the peak rate to the final rate (Loshchilov & Hutter 2016)."""

    type: Literal["cosine"] = "cosine"

    def fallen(self, progress: float) -> float:
        return (1 - math.cos(math.pi * progress)) / 2


class WSDConfig(_FallingConfig, frozen=True):
    """Warm-up, stable, decay: the peak rate, then a linear fall at the end (Hu et al. 2024, MiniCPM)."""

    type: Literal["wsd"] = "wsd"
    decay_fraction: float = Field(default=0.2, gt=0, le=1)
    """Fraction of the steps after warm-up in which the learning rate falls."""

    def fallen(self, progress: float) -> float:
        return max(0.0, (progress - (1 - self.decay_fraction)) / self.decay_fraction)
