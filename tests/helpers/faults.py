"""Numbers that go wrong in some batches of a real fit, and the alarms and blocks that tests break."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from moe_ffn.model.decoder import DecoderConfig
from moe_ffn.training.config import AlarmsConfig, TrainerConfig
from moe_ffn.training.module import LanguageModel
from moe_ffn.training.monitoring.alarms import Advice, AlarmRules
from moe_ffn.training.objective import Objective, ObjectiveConfig
from moe_ffn.training.optimizer import AdamWConfig


class Fault(Callback):
    """Breaks batches of the run whenever they pass: also when one is repeated to find the fault."""

    def __init__(self, place: str, value: float, batches: range) -> None:
        """A fault in the batches of these numbers.

        Args:
            place: `loss`; or a module of the decoder, whose output breaks, such as `embedding`; `into:` and
                a module, whose input breaks; or a parameter, whose gradient breaks.
            value: what becomes of one value of it; of a loss what it is multiplied by.
        """
        self.place, self.value, self.batches = place, value, batches
        self.num_strikes = 0
        self._ids: list[Tensor] = []
        self._now = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, LanguageModel)
        assert pl_module.batch_at is not None
        decoder, batch_at = pl_module.decoder, pl_module.batch_at
        self._ids = [batch_at(index)["input_ids"] for index in self.batches]
        # Known by its tokens, so that a repetition is broken too, and a validation is not.
        decoder.embedding.register_forward_pre_hook(self._recognize)
        name = self.place.removeprefix("into:")
        modules = dict(decoder.named_modules())
        if self.place.startswith("into:"):
            modules[name].register_forward_pre_hook(self._break_input)
        elif name in modules:
            modules[name].register_forward_hook(self._break_output)
        elif name != "loss":
            decoder.get_parameter(name).register_hook(self._broken)

    def objective(self, real: Callable[..., Objective]) -> Callable[..., Objective]:
        """`real`, whose total breaks if the loss is the place."""

        def broken(*args: Any, **kwargs: Any) -> Objective:
            losses = real(*args, **kwargs)
            if self.place != "loss" or not self._now:
                return losses
            self.num_strikes += 1
            return replace(losses, total=losses.total * self.value)

        return broken

    def _recognize(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._now = any(torch.equal(args[0], ids) for ids in self._ids)

    def _break_input(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._broken(args[0]), *args[1:])

    def _break_output(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return self._broken(output)

    def _broken(self, values: Tensor) -> Tensor:
        if not self._now:
            return values
        self.num_strikes += 1
        values = values.clone()
        values.view(-1)[0] = self.value
        return values


RATE = "lower optimizer.learning_rate (now 0.003) or lower trainer.gradient_clip_val (now 1)"


def make_rules(model: dict[str, Any] | None = None, **trainer: Any) -> AlarmRules:
    decoder = DecoderConfig.model_validate(model or {"ffn": "moe"})
    advice = Advice(decoder, ObjectiveConfig(), AdamWConfig(), TrainerConfig(**trainer))
    return AlarmRules(AlarmsConfig(after_steps=20), advice)


OWN_BLOCK = """
import torch
from moe_ffn import FFNBlock, FFNConfig, FFNOutput
class Config(FFNConfig, frozen=True):
    def build(self, d_model): return Block()
    def num_params(self, d_model): return 0
    def flops_per_token(self, d_model, seq_len): return 0
class Block(FFNBlock):
    def forward(self, x, context=None):
        %s
        return FFNOutput(x)
"""
