"""Where alarms go: the console, wandb, and the run's folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch.loggers import Logger

from moe_ffn.training.alarms import Alarm
from moe_ffn.training.loggers import alert


class AlarmBell:
    """Says each alarm aloud and keeps it; counts them for the results."""

    def __init__(self, path: Path) -> None:
        """A bell that appends to `path`, one JSON object a line; the file appears with the first alarm."""
        self.path = path
        self.num_alarms = 0

    def ring(self, alarms: Sequence[Alarm], loggers: Sequence[Logger]) -> None:
        """Never raises: a run is not lost because its alarm could not be written."""
        for alarm in alarms:
            self.num_alarms += 1
            print(f"alarm: {alarm}", file=sys.stderr)
            alert(loggers, title=alarm.kind.replace("_", " "), text=str(alarm))
        if alarms:
            try:
                with self.path.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(alarm.to_dict()) + "\n" for alarm in alarms)
            except OSError as error:
                print(f"alarm: '{self.path}' cannot be written ({error.strerror})", file=sys.stderr)
