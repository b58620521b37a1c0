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
        """Return the learning rate at optimizer step `step`, counted from 0, relative to its peak."""
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
    """A constant rate after the warm-up."""

    type: Literal["constant"] = "constant"

    def after_warmup(self, step: int, warmup_steps: int, max_steps: int) -> float:
        return 1.0


class InverseSqrtConfig(ScheduleConfig, frozen=True):
    """Decay with the inverse square root of the step (Vaswani et al. 2017)."""

    type: Literal["inverse_sqrt"] = "inverse_sqrt"

    def after_warmup(self, step: int, warmup_steps: int, max_steps: int) -> float:
        # Steps count from 0 here and from 1 in the paper, where step `warmup_steps` has the peak rate.
        return math.sqrt((warmup_steps + 1) / (step + 1))


class _DecayingConfig(ScheduleConfig, frozen=True):
    """Decay from the peak rate to a final rate, which is reached at trainer.max_steps."""

    final_fraction: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the end, as a fraction of its peak."""

    def after_warmup(self, step: int, warmup_steps: int, max_steps: int) -> float:
        progress = (step - warmup_steps) / max(max_steps - warmup_steps, 1)
        return 1 - (1 - self.final_fraction) * self.decayed(min(progress, 1.0))

    @abstractmethod
    def decayed(self, progress: float) -> float:
        """Return the completed fraction of the decay, given the fraction of the steps after warm-up."""


class LinearConfig(_DecayingConfig, frozen=True):
    """Linear decay from the peak rate to the final rate (BERT, Devlin et al. 2018)."""

    type: Literal["linear"] = "linear"

    def decayed(self, progress: float) -> float:
        return progress


class CosineConfig(_DecayingConfig, frozen=True):
    """Cosine decay from the peak rate to the final rate (Loshchilov & Hutter 2016)."""

    type: Literal["cosine"] = "cosine"

    def decayed(self, progress: float) -> float:
        return (1 - math.cos(math.pi * progress)) / 2


class WSDConfig(_DecayingConfig, frozen=True):
    """Warm-up, stable, decay: the peak rate, then linear decay at the end (Hu et al. 2024, MiniCPM)."""

    type: Literal["wsd"] = "wsd"
    decay_fraction: float = Field(default=0.2, gt=0, le=1)
    """Fraction of the steps after warm-up in which the learning rate decays."""

    def decayed(self, progress: float) -> float:
        return max(0.0, (progress - (1 - self.decay_fraction)) / self.decay_fraction)
