"""What calls for attention in a run's rows of metrics, and which options to try: no trainer, no output."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Literal

from torch import Tensor

from moe_ffn.training.config import AlarmsConfig, ObjectiveConfig, OptimizerConfig, TrainerConfig

AlarmKind = Literal[
    "collapse", "dead_experts", "nonfinite_logits", "exploding_logits", "dropped", "loss_spike"
]

RoutingValues = Mapping[str, Tensor]
"""What a `RoutingWindow` says of one layer."""

_Trouble = tuple[AlarmKind, str | None, str]
_LASTING: tuple[AlarmKind, ...] = ("collapse", "dropped")

ROWS_OF_MEDIAN, ROWS_BEFORE_SPIKES = 10, 5
"""A spike is measured against the median of the rows before it, once there are a few."""


@dataclass(frozen=True)
class Alarm:
    """One thing that went wrong, at one place."""

    step: int
    kind: AlarmKind
    layer: str | None
    """As in the keys of metrics; None where it concerns the whole model."""
    message: str
    """What is wrong, with the figure and its limit."""
    advice: str
    """Which options to try, with their values now."""

    def __str__(self) -> str:
        return f"step {self.step}: {self.message}; {self.advice}"

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class Advice:
    """What to try against each kind of alarm, in the names of the YAML."""

    objective: ObjectiveConfig
    optimizer: OptimizerConfig
    trainer: TrainerConfig

    def against(self, kind: AlarmKind) -> str:
        balance = f"raise objective.load_balance (now {self.objective.load_balance:g})"
        rate = f"lower optimizer.learning_rate (now {self.optimizer.learning_rate:g})"
        clip = f"trainer.gradient_clip_val (now {self.trainer.gradient_clip_val:g})"
        warmup = self.optimizer.schedule.warmup_fraction
        return {
            "collapse": f"{balance}, or take router.type 'sigmoid_top_k', whose bias a rule balances",
            "dead_experts": f"{balance}, take fewer experts, or a larger batch",
            "nonfinite_logits": f"something before it broke: {rate} or {clip}",
            "exploding_logits": f"raise objective.router_z (now {self.objective.router_z:g}), or {rate}",
            "dropped": f"raise capacity.factor of the layer's ffn, or {balance}",
            "loss_spike": f"{rate} or {clip}, or raise optimizer.schedule.warmup_fraction (now {warmup:g})",
        }[kind]


class AlarmRules:
    """Reads rows in their order. An alarm rings when a trouble begins, not again while it lasts."""

    def __init__(self, config: AlarmsConfig, advice: Advice) -> None:
        self.config = config
        self.advice = advice
        self._losses: deque[float] = deque(maxlen=ROWS_OF_MEDIAN)
        self._lasted: dict[tuple[AlarmKind, str | None], int] = {}
        self._last_seen: dict[tuple[AlarmKind, str | None], int] = {}

    def check(
        self, step: int, num_steps: int, loss: float, routing: Mapping[str, RoutingValues]
    ) -> list[Alarm]:
        """What begins to be wrong with a row of training.

        Args:
            step: the optimizer step the row was written at.
            num_steps: how many steps it covers.
            loss: their mean cross-entropy.
            routing: what was measured of each sparse layer over them.
        """
        troubles: list[_Trouble] = [("loss_spike", None, text) for text in self._of_loss(loss)]
        for layer, values in routing.items():
            troubles.extend((kind, layer, f"{layer}: {t}") for kind, t in self._at_once(values))
            lasting = dict(self._while_it_lasts(values))
            for kind in _LASTING:
                lasted = self._lasted.get((kind, layer), 0) + num_steps if kind in lasting else 0
                self._lasted[kind, layer] = lasted
                if lasted >= self.config.after_steps:
                    troubles.append((kind, layer, f"{layer}: {lasting[kind]} for {lasted} steps"))
        return [
            Alarm(step, kind, layer, text, self.advice.against(kind))
            for kind, layer, text in troubles
            if self._begins(step, kind, layer)
        ]

    def _begins(self, step: int, kind: AlarmKind, layer: str | None) -> bool:
        """Whether this was not seen for a while; a trouble that comes and goes rings once."""
        before = self._last_seen.get((kind, layer))
        self._last_seen[kind, layer] = step
        return before is None or step - before > self.config.after_steps

    def _of_loss(self, loss: float) -> Iterator[str]:
        if not math.isfinite(loss):
            yield f"train/loss is {loss}"
            return
        if len(self._losses) >= ROWS_BEFORE_SPIKES:
            usual = median(self._losses)
            if loss > self.config.loss_spike * usual:
                yield (
                    f"train/loss {loss:.3f} is {loss / usual:.2f} times the median of the rows before, "
                    f"{usual:.3f} (limit {self.config.loss_spike:g})"
                )
        self._losses.append(loss)

    def _at_once(self, values: RoutingValues) -> Iterator[tuple[AlarmKind, str]]:
        """Troubles of a layer that need not last."""
        if broken := int(values["nonfinite_tokens"]):
            yield "nonfinite_logits", f"{broken} tokens reached the router with NaN or infinity"
        limit = self.config.router_logit
        # Of a window that was interrupted tokens have not been measured.
        size = values["logit_max"].item() if "logit_max" in values else 0
        if size > limit:
            yield "exploding_logits", f"a router logit of {size:.1f} (limit {limit:g})"
        if dead := int(values["dead_experts"]):
            yield (
                "dead_experts",
                f"{dead} of {len(values['load'])} experts had no token in {self.config.after_steps} steps",
            )

    def _while_it_lasts(self, values: RoutingValues) -> Iterator[tuple[AlarmKind, str]]:
        """Troubles of a layer that pass by themselves at the start of a run."""
        load, violation = values["load"].tolist(), values["max_violation"].item()
        # At worst one expert is among those of every token, and has 1 / k of the pairs.
        highest = len(load) / max(values["experts_per_token"].item(), 1e-9) - 1
        limit = self.config.max_violation * highest
        if violation > limit > 0:
            busiest = max(range(len(load)), key=load.__getitem__)
            yield (
                "collapse",
                f"expert {busiest} takes {load[busiest]:.0%} of the pairs, MaxVio {violation:.2f} "
                f"(limit {limit:.2f}),",
            )
        dropped = values["dropped_fraction"].item()
        if dropped > self.config.dropped_fraction:
            yield (
                "dropped",
                f"{dropped:.0%} of the pairs are dropped (limit {self.config.dropped_fraction:.0%}),",
            )
