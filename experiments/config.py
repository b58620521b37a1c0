"""Everything `python -m experiments.train` can be told; torch-free."""

from __future__ import annotations

from pydantic import Field

from moe_ffn.config import Config
from moe_ffn.data.config import DataConfig
from moe_ffn.model.config import DecoderConfig
from moe_ffn.training.config import (
    LoggingConfig,
    ObjectiveConfig,
    OptimizerConfig,
    SampleConfig,
    TrainerConfig,
)


class RunConfig(Config, frozen=True):
    """Where a run is written."""

    name: str | None = Field(default=None, min_length=1, pattern=r"^[^/\\]+$")
    """Folder of this run; made of the FFN type and the time when null. Never overwritten."""
    output_dir: str = Field(default="runs", min_length=1)
    """Folder that holds the runs."""


class TrainConfig(Config, frozen=True):
    """One training run: an 8-expert top-2 Mixture of Experts unless told otherwise."""

    seed: int = Field(default=0, ge=0)
    """Of the initial weights, the data order, dropout and sampling."""
    run: RunConfig = RunConfig()
    """Where the run is written."""
    model: DecoderConfig = DecoderConfig()
    """The Transformer, and its feed-forward block."""
    data: DataConfig = DataConfig()
    """What it reads."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """What is minimised."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """How it is minimised."""
    trainer: TrainerConfig = TrainerConfig()
    """The training loop; further arguments of lightning.Trainer may be given here."""
    logging: LoggingConfig = LoggingConfig()
    """What is written while training."""
    sample: SampleConfig = SampleConfig()
    """The text that the trained model writes at the end."""
