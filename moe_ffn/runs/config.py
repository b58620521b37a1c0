"""The options of a training run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from moe_ffn.balancing.losses import BALANCING_LOSSES
from moe_ffn.config.base import Config
from moe_ffn.data.prepare import DataConfig
from moe_ffn.ffn import WidthMatch
from moe_ffn.ffn.base import short_name, unfit_width
from moe_ffn.model.decoder import DecoderConfig
from moe_ffn.model.parametrization import ParameterScale
from moe_ffn.runs.json_files import Facts
from moe_ffn.training.config import CheckpointsConfig, LoggingConfig, TrainerConfig
from moe_ffn.training.objective import ObjectiveConfig
from moe_ffn.training.optimizer import MuonConfig, OptimizerConfig
from moe_ffn.training.parallel.layout import ParallelConfig
from moe_ffn.training.sampling import SampleConfig


def folder_name_problem(name: str) -> str | None:
    """Return the reason why a folder cannot have this name; None if it can."""
    is_name = name.isprintable() and not set("/\\") & set(name) and name not in ("", ".", "..")
    if is_name and len(name.encode()) <= 200:
        return None
    return f"must be the name of one folder, up to 200 bytes, got {name!r:.60}"


class RunConfig(Config, frozen=True):
    """The folder of a run."""

    name: str | None = None
    """Name of the run's folder, which is never overwritten; null: the FFN type and the time."""
    output_dir: str = Field(default="runs", min_length=1)
    """Folder that holds the runs."""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str | None) -> str | None:
        if name is not None and (problem := folder_name_problem(name)):
            raise ValueError(problem)
        return name


class TrainConfig(Config, frozen=True):
    """A training run; the default model is a Mixture of Experts with 8 experts and top-2 routing."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the initial weights, the data order, dropout and sampling."""
    run: RunConfig = RunConfig()
    """The folder of the run."""
    init_from: str | None = Field(default=None, min_length=1)
    """Folder of a model or a run with initial weights; missing weights are random. A resumed run reads its
    checkpoint instead."""
    model: DecoderConfig = DecoderConfig()
    """The Transformer and its feed-forward blocks."""
    data: DataConfig = DataConfig()
    """The text to train on."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """The loss that is minimised."""
    optimizer: OptimizerConfig = MuonConfig()
    """The optimizer and its learning rate."""
    trainer: TrainerConfig = TrainerConfig()
    """The training loop, and arguments of lightning.Trainer."""
    parallel: ParallelConfig | None = None
    """Division of the model among processes; null: each process holds the whole model."""
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    """The checkpoints to resume from."""
    logging: LoggingConfig = LoggingConfig()
    """Logging during training."""
    sample: SampleConfig = SampleConfig()
    """The text that the model writes at every validation."""

    @cached_property
    def matches(self) -> tuple[WidthMatch, ...]:
        """Widths solved from `d_ff: {match: ..., of: ...}`, with their distance to the budget.

        Empty in a config read from a run's folder, which stores solved widths only.
        """
        return ()

    @property
    def tokens_per_step(self) -> int:
        """Training tokens of an optimizer step, summed over ranks."""
        return self.data.batch_size * self.data.seq_len * self.trainer.accumulate_grad_batches

    def notes(self) -> tuple[str, ...]:
        return tuple(map(str, self.matches))

    @model_validator(mode="after")
    def _solve_widths(self) -> TrainConfig:
        model, matches = self.model.with_solved_widths(self.data.seq_len, "model.")
        if matches:  # otherwise keep the `matches` of an earlier validation
            # The config is frozen. `matches` is not a field, so files and == leave it out.
            object.__setattr__(self, "model", model)
            object.__setattr__(self, "matches", matches)
        return self

    @model_validator(mode="after")
    def _check_widths_of_experts(self) -> TrainConfig:
        for option, ffn in dict(self.model.ffns_by_option()).items():
            if unfit := unfit_width(ffn, self.model.d_model):
                raise ValueError(f"model.{unfit.inside(option)}")
        return self

    @model_validator(mode="after")
    def _check_objective_against_routers(self) -> TrainConfig:
        infos = {short_name(layer): info for layer, info in self.model.router_infos().items()}
        routers = [(layer, info.router, info.num_experts) for layer, info in infos.items()]
        for name, loss in BALANCING_LOSSES.items():
            weight = 0 if loss.weight_set_by_rule else getattr(self.objective, name)
            if weight and (unsupported_reason := loss.unsupported_reason(routers)):
                raise ValueError(f"objective.{name} ({weight:g}) {unsupported_reason}")
        rule = self.objective.bias_rule
        if reason := rule.unsupported_reason(routers):
            raise ValueError(f"objective.bias_rule.type ('{rule.type}') {reason}")
        coupling = self.objective.coupling
        if coupling and (reason := coupling.unsupported_reason(infos)):
            raise ValueError(f"objective.coupling {reason}")
        return self

    @model_validator(mode="after")
    def _check_optimizer_knows_the_parametrization(self) -> TrainConfig:
        rule, optimizer = self.model.parametrization, self.optimizer
        if rule.type != "standard" and optimizer.learning_rate_factor(ParameterScale(), {}) is None:
            raise ValueError(
                f"model.parametrization.type ('{rule.type}') has no rule for optimizer.type "
                f"('{optimizer.type}'); use adamw or muon, or parametrization standard"
            )
        return self


@dataclass(frozen=True)
class Resume:
    """A run to resume, and its options."""

    folder: Path
    config: TrainConfig
    changes: Mapping[str, tuple[Any, Any]]
    """Options that differ from those in the folder: dotted key -> (value before, value now)."""
    saved: TrainConfig
    """Options that the run began with, from its folder."""
    facts: Facts
    """Facts from the run's folder; empty if they are lost."""
