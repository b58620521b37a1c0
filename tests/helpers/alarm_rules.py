"""The rules of the alarms of a run, and the advice that most of them give."""

from __future__ import annotations

from typing import Any

from moe_ffn.model.decoder import DecoderConfig
from moe_ffn.training.config import AlarmsConfig, TrainerConfig
from moe_ffn.training.monitoring.alarms import Advice, AlarmRules
from moe_ffn.training.objective import ObjectiveConfig
from moe_ffn.training.optimizer import AdamWConfig

RATE = "lower optimizer.learning_rate (now 0.003) or lower trainer.gradient_clip_val (now 1)"


def make_rules(model: dict[str, Any] | None = None, **trainer: Any) -> AlarmRules:
    decoder = DecoderConfig.model_validate(model or {"ffn": "moe"})
    advice = Advice(decoder, ObjectiveConfig(), AdamWConfig(), TrainerConfig(**trainer))
    return AlarmRules(AlarmsConfig(after_steps=20), advice)
