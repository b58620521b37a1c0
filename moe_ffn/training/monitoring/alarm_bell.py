"""Where alarms go: the console, wandb, and the run's folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from lightning.pytorch.loggers import Logger

from moe_ffn.training.monitoring.alarms import Alarm
from moe_ffn.training.monitoring.json_lines import JsonLines
from moe_ffn.training.monitoring.wandb import alert


class AlarmBell:
    """Says each alarm aloud and keeps it; counts them for the results."""

    def __init__(self, path: Path) -> None:
        """A bell that appends to `path`, one JSON object a line; the file appears with the first alarm."""
        self.num_alarms = 0
        self.file = JsonLines(path)

    def ring(self, alarms: Sequence[Alarm], loggers: Sequence[Logger]) -> None:
        """One line for each kind, however many layers it concerns; the file has them all."""
        self.num_alarms += len(alarms)
        in_order = sorted(alarms, key=lambda alarm: alarm.kind)
        for kind, group in groupby(in_order, key=lambda alarm: alarm.kind):
            first, *others = group
            text = str(first)
            if others:
                text += f" (and {', '.join(str(alarm.layer) for alarm in others)})"
            print(f"alarm: {text}", file=sys.stderr)
            title = kind.replace("_", " ")
            # wandb keeps back what comes under the same title too soon.
            alert(loggers, title if first.layer is None else f"{title}, {first.layer}", text)
        self.file.add(alarm.to_dict() for alarm in alarms)
