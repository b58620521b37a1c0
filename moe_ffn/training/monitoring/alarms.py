"""Alarms: rules on the metrics of a run, and advice for each kind of alarm."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from statistics import median
from typing import Any, Literal, Protocol

from torch import Tensor

from moe_ffn.ffn.base import RouterInfo
from moe_ffn.model.decoder import DecoderConfig
from moe_ffn.training.config import ROWS_BEFORE_SPIKES, AlarmsConfig, TrainerConfig
from moe_ffn.training.monitoring.json_lines import Alarm
from moe_ffn.training.objective import ObjectiveConfig
from moe_ffn.training.optimizer import OptimizerConfig
from moe_ffn.training.recovery import Checkpointed
from moe_ffn.training.recovery.guard import SkippedStep

AlarmKind = Literal[
    "collapse",
    "dead_experts",
    "nonfinite_logits",
    "exploding_logits",
    "dropped",
    "loss_spike",
    "skipped_step",
]

LASTING: tuple[AlarmKind, ...] = ("collapse", "dropped")
"""Kinds that are reported only if they last `after_steps` steps, since they are normal at the start."""

ROWS_OF_MEDIAN = 10
"""Number of earlier rows whose median loss a row's loss is compared with."""

RoutingValues = Mapping[str, Tensor]
"""Metrics of one layer from a `RoutingRowSums`."""

_Problem = tuple[AlarmKind, str | None]
"""Kind of alarm, and layer."""


def summarize_alarms(alarms: Iterable[Alarm]) -> Iterator[tuple[Alarm, str]]:
    """Yield the first alarm of each kind, and a sentence that also names the layers of the other alarms."""
    by_kind = sorted(alarms, key=lambda alarm: alarm.kind)
    for _, group in groupby(by_kind, key=lambda alarm: alarm.kind):
        first, *others = group
        also = f" (and {', '.join(str(alarm.layer) for alarm in others)})" if others else ""
        yield first, f"{first}{also}"


class AlarmAdviser(Protocol):
    """Advice for each kind of alarm."""

    def against(self, kind: AlarmKind, layer: str | None) -> str:
        """Return options to change, with their current values; `layer` is named as in the keys of metrics."""
        ...


def advice_against(
    kind: AlarmKind, *, balance: str, capacity: str, router_z: str, rate: str, warmup: str
) -> str:
    """Combine the actions that a training program offers into advice against one kind of alarm."""
    return {
        "collapse": balance,
        "dead_experts": f"{balance}, or take fewer experts or a larger batch",
        "nonfinite_logits": f"an earlier layer produced NaN or infinity; {rate}",
        "exploding_logits": f"{router_z}, or {rate}",
        "dropped": f"{capacity}, or balance better: {balance}",
        "loss_spike": f"{rate}, or {warmup}",
        "skipped_step": f"if it recurs, {rate}",
    }[kind]


@dataclass(frozen=True)
class Advice:
    """Advice for a run of the training program: options to change, as paths in the YAML."""

    model: DecoderConfig
    objective: ObjectiveConfig
    optimizer: OptimizerConfig
    trainer: TrainerConfig

    def against(self, kind: AlarmKind, layer: str | None) -> str:
        info = self.model.router_infos().get(layer or "")
        capacity = "the block's capacity"
        if info is not None:
            factor = info.capacity.factor
            now = "" if factor is None else f" (now {factor:g})"
            capacity = f"model.{info.path}.capacity.factor{now}"
        clipping = "set trainer.gradient_clip_val"
        if clip := self.trainer.gradient_clip_val:
            clipping = f"lower trainer.gradient_clip_val (now {clip:g})"
        rate = f"lower optimizer.learning_rate (now {self.optimizer.learning_rate:g}) or {clipping}"
        return advice_against(
            kind,
            balance=self._balance(info),
            capacity=f"raise {capacity}",
            router_z=f"raise objective.router_z (now {self.objective.router_z:g})",
            rate=rate,
            warmup=f"raise optimizer.schedule.{self.optimizer.schedule.warmup_option}",
        )

    def _balance(self, info: RouterInfo | None) -> str:
        """Return options against imbalance; `info` is None if the block does not list its router."""
        raise_loss = f"raise objective.load_balance (now {self.objective.load_balance:g})"
        if info is None:
            return raise_loss
        router, option = info.router, f"model.{info.path}.router.type"
        if not router.learns:
            return f"choose another {option} than '{router.type}', which has nothing to learn"
        if (fixing := router.option_that_fixes_choice) is not None:
            return f"remove model.{info.path}.router.{fixing}, which fixes where tokens go"
        if router.has_correction_bias:
            return self.objective.bias_rule.advice or raise_loss
        return f"{raise_loss}, or use {option} 'sigmoid_top_k', which balances with a bias"


class AlarmRules(Checkpointed):
    """Checks rows of metrics in order. A problem raises an alarm when it begins, not while it lasts."""

    in_checkpoint = ("_losses",)

    def __init__(
        self,
        config: AlarmsConfig,
        advice: AlarmAdviser,
        num_always: Mapping[str, int] | None = None,
    ) -> None:
        """Create the rules.

        Args:
            config: limits.
            advice: gives the option to change against each kind of alarm.
            num_always: layer -> number of its last experts, which process every token.
        """
        self.config = config
        self.advice = advice
        self.num_always = num_always or {}
        self._losses: deque[float] = deque(maxlen=ROWS_OF_MEDIAN)
        self._lasted: dict[_Problem, int] = {}
        self._last_seen: dict[_Problem, int] = {}

    def check(
        self, step: int, num_steps: int, loss: float, routing: Mapping[str, RoutingValues]
    ) -> list[Alarm]:
        """Return the alarms of a row of training that ends at `step` and covers `num_steps` steps.

        `loss` is the mean cross-entropy of the steps that were not skipped, nan without any. `routing` has
        the metrics of each sparse layer over these steps.
        """
        problems: dict[_Problem, str] = {("loss_spike", None): self._spike(loss)}
        for layer, values in routing.items():
            messages = dict(self._layer_problems(layer, values))
            for kind in LASTING:
                lasted = self._lasted.get((kind, layer), 0) + num_steps if kind in messages else 0
                self._lasted[kind, layer] = lasted
                is_alarm = lasted >= self.config.after_steps
                messages[kind] = f"{messages[kind]}, for {lasted} steps" if is_alarm else ""
            problems |= {(kind, layer): message for kind, message in messages.items()}
        return [
            Alarm(
                step=step,
                kind=kind,
                layer=layer,
                message=message,
                advice=self.advice.against(kind, layer),
            )
            for (kind, layer), message in problems.items()
            if message and self._begins(step, num_steps, kind, layer)
        ]

    def skipped(self, skipped: SkippedStep, limit: int) -> list[Alarm]:
        """Return an alarm for a skipped step, unless another step was skipped shortly before."""
        if not self._begins(skipped.step, 1, "skipped_step", None):
            return []
        message = f"skipped ({skipped.num_in_a_row} in a row, {limit} end the run): {skipped}"
        advice = skipped.advice or self.advice.against("skipped_step", None)
        return [Alarm(step=skipped.step, kind="skipped_step", message=message, advice=advice)]

    def not_judged(self, num_steps: int, *, is_routed: bool) -> list[str]:
        """Return `AlarmsConfig.not_judged` for the rows checked so far."""
        return self.config.not_judged(num_steps, len(self._losses), is_routed=is_routed)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "lasted": [[*key, steps] for key, steps in self._lasted.items()],
            "last_seen": [[*key, step] for key, step in self._last_seen.items()],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._lasted = {(kind, layer): steps for kind, layer, steps in state_dict["lasted"]}
        self._last_seen = {(kind, layer): step for kind, layer, step in state_dict["last_seen"]}

    def _begins(self, step: int, num_steps: int, kind: AlarmKind, layer: str | None) -> bool:
        """Return True unless this problem occurred shortly before; if it comes and goes, it is one alarm."""
        before = self._last_seen.get((kind, layer))
        self._last_seen[kind, layer] = step
        return before is None or step - before > max(self.config.after_steps, num_steps)

    def _spike(self, loss: float) -> str:
        """Return a message if the loss is far above the median of earlier rows; otherwise an empty string."""
        if math.isnan(loss):  # all steps were skipped, which is another kind of alarm
            return ""
        before = list(self._losses)
        self._losses.append(loss)
        baseline = median(before) if len(before) >= ROWS_BEFORE_SPIKES else 0.0
        if not loss > self.config.loss_spike * baseline > 0:
            return ""
        return (
            f"train/loss {loss:.3f} is {loss / baseline:.2f} times the median of the rows before, "
            f"{baseline:.3f} (limit {self.config.loss_spike:g})"
        )

    def _layer_problems(self, layer: str, values: RoutingValues) -> Iterator[tuple[AlarmKind, str]]:
        limits = self.config
        if broken := int(values["nonfinite_tokens"]):
            yield "nonfinite_logits", f"{broken} tokens reached the router with NaN or infinity"
        # If training ended early, the row has no token metrics.
        largest = values["logit_max"].item() if "logit_max" in values else 0
        if largest > (limit := limits.router_logit):
            yield "exploding_logits", f"a router logit of {largest:.3g} (limit {limit:g})"
        if "load" in values:  # absent for a router that lists pairs
            yield from self._load_problems(values, self.num_always.get(layer, 0))
        dropped = values["dropped_fraction"].item()
        if dropped > (limit := limits.dropped_fraction):
            yield "dropped", f"{dropped:.0%} of the pairs are dropped (limit {limit:.0%})"

    def _load_problems(
        self, values: RoutingValues, num_always: int
    ) -> Iterator[tuple[AlarmKind, str]]:
        limits = self.config
        load, violation = values["load"].tolist(), values["max_violation"].item()
        if dead := int(values["dead_experts"]):
            message = f"{dead} of {len(load)} experts had no token in {limits.after_steps} steps"
            yield "dead_experts", message
        k = values["experts_per_token"].item() - num_always
        chosen = load[: len(load) - num_always]
        if violation > (limit := limits.max_violation(len(chosen), k)):
            busiest = max(range(len(chosen)), key=chosen.__getitem__)
            share = f"expert {busiest} takes {load[busiest]:.0%} of the pairs"
            yield "collapse", f"{share}, MaxVio {violation:.2f} (limit {limit:.2f})"
