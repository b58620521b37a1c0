"""What a run is begun with, put back where its folder was removed while it trains."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from experiments.run_folder import write_file
from moe_ffn.training.outage import Outage


class KeptFiles(Callback):
    """Looks at every checkpoint whether the files without which nobody can use it are there."""

    def __init__(self, folder: Path, files: Mapping[str, str]) -> None:
        """Files of `folder`, by their names, each with its text."""
        self.folder = folder
        self.files = dict(files)
        self._outage = Outage(folder)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.is_global_zero:
            self.put_back()

    def put_back(self) -> None:
        """Write those that are missing, and say so."""
        with self._outage.expected():
            missing = [name for name in self.files if not (self.folder / name).exists()]
            if not missing:
                return
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in missing:
                write_file(self.folder, name, self.files[name])
            names = ", ".join(missing)
            print(
                f"disk: '{self.folder}' had lost {names}; written again",
                file=sys.stderr,
                flush=True,
            )
