"""Routing metrics and alarms in runs of `transformers.Trainer`, under the names that our own runs have."""

from __future__ import annotations

import inspect
import json
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from moe_ffn.config.base import require_count
from moe_ffn.config.errors import ConfigError
from moe_ffn.config.yaml_files import validate
from moe_ffn.interop.routings import Watcher
from moe_ffn.outputs import Routing
from moe_ffn.runs.rows import flat
from moe_ffn.training.config import AlarmsConfig, LoggingConfig
from moe_ffn.training.monitoring.alarms import (
    AlarmKind,
    AlarmRules,
    advice_against,
    summarize_alarms,
)
from moe_ffn.training.monitoring.json_lines import Alarm
from moe_ffn.training.monitoring.row_sums import (
    ByLayer,
    RoutingByLayer,
    RoutingRowSums,
    num_ranks,
    routing_row,
)

log = logging.getLogger(__name__)

STATE_KEY = "moe_ffn.RoutingCallback"
"""Key of the callback's state in `trainer_state.json`, under `stateful_callbacks`."""


class RoutingCallback(TrainerCallback):
    """Log the routing of each sparse layer during training, and raise alarms.

        trainer = Trainer(model, args, train_dataset=data, callbacks=[RoutingCallback()])

    Outputs, gradients and random numbers do not change. Rows go wherever the Trainer logs: metrics of
    training as `routing/layer_03/max_violation`, and of each evaluation as `eval_routing/layer_03/...`.
    Padding in `attention_mask` does not count; a token whose label is -100 does. Alarms are logged as
    warnings.

    Args:
        every: optimizer steps between rows of metrics; None: the Trainer's `logging_steps`. A row covers all
            steps since the previous row.
        per_expert: log the load of each expert too, `routing/layer_03/load/expert_07`.
        alarms: options of `AlarmsConfig`, such as `{"after_steps": 20}`.

    Raises:
        ConfigError: an option is invalid. When training begins: the model has no sparse layers that `watch`
            can record.
    """

    def __init__(
        self,
        every: int | None = None,
        *,
        per_expert: bool = True,
        alarms: Mapping[str, Any] | None = None,
    ) -> None:
        if every is not None:
            require_count(every, "every")
        self.every = every
        self.per_expert = per_expert
        self.limits = validate(AlarmsConfig, alarms or {}, "alarms")
        self.alarms: list[Alarm] = []
        """Alarms raised so far."""
        self._trainer: Trainer | None = None
        self._rules: AlarmRules | None = None
        self._window = RoutingRowSums(LoggingConfig())
        self._evaluation = RoutingByLayer("every batch", "last step", "validation")
        self._hooks = ExitStack()
        self._every = 0
        self._last_row_step = 0
        self._ends_row = False
        """True during the optimizer step that ends a row."""
        self._evaluated: dict[str, Routing] = {}
        """Routings of the newest pass in evaluation mode, which count if the Trainer reports a prediction."""

    # -- hooks

    def on_init_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self._trainer = trainer = _trainer_of_event()
        train = trainer.train

        @wraps(train)
        def train_then_remove_hooks(*args: Any, **kwargs: Any) -> Any:
            with self._hooks:  # the Trainer has no event for a training that raises
                return train(*args, **kwargs)

        trainer.train = train_then_remove_hooks

    def on_train_begin(
        self, args: Any, state: TrainerState, control: Any, model: Any = None, **_: Any
    ) -> None:
        if self._trainer is None:
            raise ConfigError(
                "RoutingCallback was added too late; pass callbacks=[RoutingCallback()] when you create the "
                "Trainer"
            )
        if args.n_gpu > 1:
            raise ConfigError(
                "RoutingCallback cannot watch a model in torch.nn.DataParallel; start one process for each "
                "GPU with torchrun"
            )
        self._hooks.close()  # after a smaller batch size was chosen, training begins again
        self._every = self.every or int(state.logging_steps)
        self._last_row_step = state.global_step
        self._window = RoutingRowSums(LoggingConfig(alarms=self.limits))
        self._rules = AlarmRules(self.limits, _Advice(args, model))
        self._load(state)
        try:
            Watcher(model, self._hooks, lambda routings: self._receive(model, routings))
        except ConfigError as error:
            raise ConfigError(f"{error}; remove RoutingCallback to train this model") from error

    def _receive(self, model: nn.Module, routings: Callable[[], dict[str, Routing]]) -> None:
        """Count a forward pass of training; keep one of evaluation until the Trainer reports a prediction."""
        if model.training != torch.is_grad_enabled():  # generation, or a reference model
            return
        with torch.no_grad():
            if model.training:
                by_layer = routings()
                if self._rules is not None:
                    self._rules.num_always = {
                        name: routing.num_experts - routing.num_choices
                        for name, routing in by_layer.items()
                    }
                self._window.update(by_layer, self._ends_row)
            else:
                self._evaluated = routings()

    # -- rows

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        step = state.global_step + 1
        self._ends_row = step % self._every == 0 or step == state.max_steps

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if self._ends_row:
            self._end_row(state, control)
        if self._ends_row or control.should_save:
            self._save(state)

    def on_epoch_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        self._save(state)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if state.global_step > self._last_row_step:  # stopped early, between two rows
            self._end_row(state, control)

    def on_prediction_step(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        if self._evaluated:
            with torch.no_grad():
                self._evaluation.update(self._evaluated)
            self._evaluated = {}

    def on_evaluate(
        self, args: Any, state: TrainerState, control: Any, metrics: Any = None, **_: Any
    ) -> None:
        # The Trainer has a prefix for each evaluation set: `eval_code_runtime`.
        prefixes = (
            key.removesuffix("runtime") for key in metrics or () if key.endswith("_runtime")
        )
        self._log(self._evaluation.close(), next(prefixes, "eval_"), control)

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: Any = None, **_: Any
    ) -> None:
        if logs is not None and "loss" in logs:
            self._check(state, int(state.logging_steps), logs["loss"], {})
            self._save(state)

    def _end_row(self, state: TrainerState, control: TrainerControl) -> None:
        step, num_steps = state.global_step, state.global_step - self._last_row_step
        self._last_row_step = step
        routing = self._window.close(step, num_steps, None, num_ranks())
        if not routing:
            log.warning(
                "no routing in %d steps: the loss does not call the model itself", num_steps
            )
        self._log(routing, "", control)
        self._check(state, num_steps, math.nan, routing)

    def _log(self, values: ByLayer, prefix: str, control: TrainerControl) -> None:
        """Send a row to everything that the Trainer logs to, except the terminal."""
        row: dict[str, Any] = {**routing_row(values, prefix)}
        if not self.per_expert:
            row = {key: value for key, value in row.items() if not isinstance(value, list)}
        trainer = self._trainer
        if not row or trainer is None:
            return
        handler, should_log = trainer.callback_handler, control.should_log
        callbacks = handler.callbacks
        handler.callbacks = [c for c in callbacks if not isinstance(c, _PRINTERS)]
        try:
            # Not `trainer.log`: trainers of TRL override it, and would add their pending metrics.
            Trainer.log(trainer, dict[str, Any](flat(row)))
        finally:
            handler.callbacks = callbacks
            control.should_log = should_log  # logging has reset it

    # -- alarms

    def _check(self, state: TrainerState, num_steps: int, loss: float, routing: ByLayer) -> None:
        if self._rules is None or not state.is_world_process_zero:
            return
        alarms = self._rules.check(state.global_step, num_steps, loss, routing)
        self.alarms += alarms
        for _, sentence in summarize_alarms(alarms):
            log.warning("alarm: %s", sentence)

    # -- checkpoints

    def _save(self, state: TrainerState) -> None:
        """Put everything that later rows depend on into the Trainer's state, as JSON. A collective."""
        if self._rules is not None:
            saved = {
                "step": state.global_step,
                "last_row_step": self._last_row_step,
                "window": self._window.state_dict(),
                "rules": self._rules.state_dict(),
            }
            states: Any = state.stateful_callbacks  # the annotation says a list
            # Not as an `ExportableState`, whose state the Trainer reads only on rank 0.
            states[STATE_KEY] = json.loads(json.dumps(saved, default=Tensor.tolist))

    def _load(self, state: TrainerState) -> None:
        states: Any = state.stateful_callbacks
        saved = states.get(STATE_KEY)
        if saved is None or self._rules is None:
            return
        window = dict(saved["window"])
        window["idle_steps"] = {e: torch.tensor(steps) for e, steps in window["idle_steps"].items()}
        if saved["step"] == state.global_step:
            self._last_row_step = saved["last_row_step"]
            window["load"] = {
                layer: {name: torch.tensor(value) for name, value in sums.items()}
                for layer, sums in window["load"].items()
            }
        else:  # another callback asked for the checkpoint later: the row begins anew
            window["load"] = {}
        self._window.load_state_dict(window)
        self._rules.load_state_dict(saved["rules"])


_PRINTERS = (PrinterCallback, ProgressCallback)
"""Callbacks that print each row, which has many values for each layer."""


def _trainer_of_event() -> Trainer:
    """Return the Trainer that calls a callback; the arguments of its events do not include it."""
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer):
            return owner
        frame = frame.f_back
    raise ConfigError("RoutingCallback works only in transformers.Trainer and its subclasses")


@dataclass(frozen=True)
class _Advice:
    """Advice for a run of the Trainer: its arguments, and options of the model's config."""

    args: TrainingArguments
    model: Any

    def against(self, kind: AlarmKind, layer: str | None) -> str:
        clipping = "set max_grad_norm"
        if clip := self.args.max_grad_norm:
            clipping = f"lower max_grad_norm (now {clip:g})"
        return advice_against(
            kind,
            balance=self._balance(),
            capacity="raise the block's capacity",
            router_z="add moe_ffn.router_z_loss to the loss",
            rate=f"lower learning_rate (now {self.args.learning_rate:g}) or {clipping}",
            warmup="raise warmup_steps",
        )

    def _balance(self) -> str:
        config = getattr(self.model, "config", None)
        config = getattr(config, "text_config", config)
        weight = getattr(config, "router_aux_loss_coef", None)
        if weight is None:
            return "add moe_ffn.load_balancing_loss to the loss"
        if not getattr(config, "output_router_logits", False):
            return "set output_router_logits to True in the model's config, which adds its balancing loss"
        return f"raise router_aux_loss_coef in the model's config (now {weight:g})"
