"""What the model writes, as it learns: a text at every validation."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from moe_ffn.data.tokenizer import Tokenizer
from moe_ffn.errors import first_line
from moe_ffn.training.module import LanguageModel
from moe_ffn.training.monitoring.json_lines import JsonLines
from moe_ffn.training.sampling import SampleConfig, sample_text


class SampleLog(Callback):
    """Continues the prompt at every validation, always with the same seed, and keeps what came of it."""

    def __init__(
        self, path: Path, tokenizer: Tokenizer, options: SampleConfig, prompt: str, seed: int
    ) -> None:
        """A log that appends to `path`, one JSON object a line."""
        self.prompt = prompt
        self.tokenizer = tokenizer
        self.options = options
        self.seed = seed
        self.file = JsonLines(path)
        self.last = ""
        """The newest text, without the prompt; empty where the model can write none."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, LanguageModel)
        self.last = ""
        # A model that has diverged has no probabilities to draw from, and one that sees both sides
        # writes no text from left to right.
        loss = trainer.callback_metrics["validation/loss"].item()
        writes = pl_module.decoder.config.causal and self.options.num_tokens and math.isfinite(loss)
        if not (writes and trainer.is_global_zero):
            return
        try:
            # Of every length there is once: nothing that a compiled model should be compiled for.
            with torch.compiler.set_stance("force_eager"):
                self.last = sample_text(
                    pl_module.decoder, self.tokenizer, self.prompt, self.options, self.seed
                )
        except RuntimeError as error:  # a temperature, or logits, that make no probabilities
            print(
                f"sample: no text at step {trainer.global_step}: {first_line(error)}",
                file=sys.stderr,
            )
            return
        line: dict[str, Any] = {
            "step": trainer.global_step,
            "prompt": self.prompt,
            "text": self.last,
        }
        self.file.add([line])

    def state_dict(self) -> dict[str, Any]:
        return {"last": self.last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last = state_dict["last"]
