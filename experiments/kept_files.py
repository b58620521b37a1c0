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
        self._changed: set[str] = set()  # since they were written
        self._outage = Outage(folder)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.is_global_zero:
            self.put_back()

    def change(self, name: str, text: str) -> None:
        """Write another text in the place of a file's; what the disk does not take now it is given again."""
        self.files[name] = text
        self._changed.add(name)
        self.put_back()

    def put_back(self) -> None:
        """Write those that are missing, and say so; and those that were changed."""
        with self._outage.expected():
            missing = [name for name in self.files if not (self.folder / name).exists()]
            to_write = [name for name in self.files if name in {*missing, *self._changed}]
            if not to_write:
                return
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in to_write:
                write_file(self.folder, name, self.files[name])
                self._changed.discard(name)
            if missing:
                print(
                    f"disk: '{self.folder}' had lost {', '.join(missing)}; written again",
                    file=sys.stderr,
                    flush=True,
                )
