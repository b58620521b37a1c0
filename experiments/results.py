"""What a run says at its end, on the screen and in `summary.json`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from torch import Tensor

from experiments.config import TrainConfig
from experiments.run_folder import ALARMS_FILE, CHECKPOINTS_FOLDER, SUMMARY_FILE
from experiments.tables import expert_use, load_table
from moe_ffn.data.prepare import WORSE_THAN_UNIGRAM
from moe_ffn.errors import printable
from moe_ffn.files import write_whole
from moe_ffn.training.alarms import Advice
from moe_ffn.training.checkpoint_folder import step_checkpoints
from moe_ffn.training.guard import Diverged


@dataclass(frozen=True)
class Results:
    """The results of one run."""

    folder: Path
    loss: float
    """Of the final weights on the validation split, in nats per token."""
    bits_per_byte: float
    """The same per byte of text, so that tokenizers compare."""
    unigram_loss: float
    """What a model that knows only the frequencies scores there, in nats per token."""
    tokens_per_second: float
    num_alarms: int
    not_judged: Sequence[str]
    """What no alarm could have rung for, since the run is too short; a sentence each."""
    num_skipped_steps: int
    """Optimizer steps that were not taken, because their numbers had gone wrong."""
    routing: Mapping[str, Mapping[str, Tensor]]
    """For each sparse layer, what was measured of it on the validation split."""
    sample: str
    """What the model made of `sample_prompt`."""
    sample_prompt: str
    profile: str
    """Where the time went, of a run with trainer.profiler; empty without."""

    def print(self, console: Console) -> None:
        say, warn = _plain_printer(console), _plain_printer(console, style="yellow")
        say(
            f"\nvalidation loss {self.loss:.4f} nats per token, {self.bits_per_byte:.3f} bits per byte\n"
            f"unigram model   {self.unigram_loss:.4f} nats per token\n"
            f"throughput      {self.tokens_per_second:,.0f} tokens/s"
        )
        if not math.isfinite(self.loss):
            warn(
                "training has diverged: lower optimizer.learning_rate or trainer.gradient_clip_val"
            )
        if self.loss > self.unigram_loss:
            warn(WORSE_THAN_UNIGRAM)
        if self.num_skipped_steps:
            say(f"skipped steps   {self.num_skipped_steps}")
        if self.num_alarms:
            warn(f"alarms          {self.num_alarms}; see {self.folder / ALARMS_FILE}")
        for sentence in self.not_judged:
            warn(f"not judged yet: {sentence}")
        if self.routing:
            console.print()
            console.print(load_table(self.routing, console.width))
            say(expert_use(self.routing))
            say(_LEGEND)
        if self.sample:
            say("\nSample:")
            prompt = Text(printable(self.sample_prompt, also="\n\t"), style="bold")
            console.print(prompt + Text(printable(self.sample, also="\n\t")))
        say(f"\nResults in {self.folder}/")
        for pattern, meaning in _FILES.items():
            for path in sorted(self.folder.glob(pattern))[-1:]:
                name = path.relative_to(self.folder).as_posix()
                say(f"  {name:31} {meaning}")

    def write(self) -> None:
        """Write the sample, the profile and `summary.json`, which says that the run is finished.

        Raises:
            OSError: they cannot be written.
        """
        summary = {
            "validation_loss": self.loss,
            "validation_bits_per_byte": self.bits_per_byte,
            "unigram_loss": self.unigram_loss,
            "tokens_per_second": self.tokens_per_second,
            "num_alarms": self.num_alarms,
            "num_skipped_steps": self.num_skipped_steps,
            "routing": {
                layer: {
                    name: _rounded(value)
                    for name, value in values.items()
                    if value.ndim < 2 or len(value) <= MOST_COACTIVATION
                }
                for layer, values in self.routing.items()
            },
        }
        if self.sample:
            write_whole(self.folder / "sample.txt", self.sample_prompt + self.sample)
        if self.profile:
            write_whole(self.folder / "profile.txt", self.profile)
        else:  # one that was resumed may have had it before
            (self.folder / "profile.txt").unlink(missing_ok=True)
        text = json.dumps(_without_nan(summary), indent=2)
        write_whole(self.folder / SUMMARY_FILE, text + "\n")


def say_diverged(error: Diverged, config: TrainConfig, folder: Path) -> None:
    """On stderr: what happened and where it began, what is left, and what to try."""
    saved = step_checkpoints(folder / CHECKPOINTS_FOLDER)
    left = f"the last good checkpoint is {saved[0]}" if saved else "no checkpoint was saved before"
    advice = Advice(config.model, config.objective, config.optimizer, config.trainer)
    what_to_try = advice.against("loss_spike", None)
    print(f"diverged: {error}\ndiverged: {left}; {what_to_try}", file=sys.stderr)


MOST_COACTIVATION = 64
"""Of more experts than this the summary keeps no matrix of who comes with whom; it would be a megabyte."""


def _rounded(value: Tensor) -> Any:
    """As it is, but a matrix to four digits, which is what a picture of it shows."""
    if value.ndim < 2:
        return value.tolist()
    return [[round(share, 4) for share in row] for row in value.tolist()]


_LEGEND = "MaxVio: the busiest expert over the even share, minus 1; entropy in nats"

_FILES = {
    "report.html": "all of this as a page; open it in a browser",
    "config.yaml": "the resolved options; --config takes it again",
    "facts.json": "corpus, code revision, sizes, precision",
    "metrics.csv": "every logged value, by step",
    "summary.json": "the numbers above",
    "sample.txt": "the text above",
    "profile.txt": "where the time went (trainer.profiler)",
    "samples.jsonl": "the texts of every validation",
    "alarms.jsonl": "what went wrong, and what to try",
    "tokenizer.json": "how text became tokens",
    "documents.json": "the documents it read, with their sha256",
    "saved.json": "which step was saved last",
    "checkpoints/best.ckpt": "weights of the lowest validation loss, alone",
    "checkpoints/step_*.ckpt": "what --resume goes on from",
    "wandb": "the run for wandb",
}


def _plain_printer(console: Console, style: str = "") -> Callable[[str], None]:
    """Prints text as it is: brackets in it are no markup."""
    return lambda text: console.print(Text(text, style=style), soft_wrap=True)


def _without_nan(value: Any) -> Any:
    """NaN says that a value does not exist; JSON's word for that is null, and for infinity too."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
