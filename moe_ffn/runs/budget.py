"""Cost of a run, computed from its config."""

from __future__ import annotations

from dataclasses import dataclass

from moe_ffn.config.sizes import TRAINING_FLOPS as TRAINING_FLOPS
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.custom_parts import check_counts


@dataclass(frozen=True)
class Cost:
    """Size and cost of a part of the model."""

    params: int
    active_params: int
    """Parameters that a token uses, on average."""
    flops_per_token: int
    """Forward FLOPs of the matrix products."""


@dataclass(frozen=True)
class Budget:
    """Cost of a run: the model, its feed-forward blocks, and training."""

    model: Cost
    ffn: Cost
    tokens: int

    @property
    def training_flops(self) -> int:
        return TRAINING_FLOPS * self.model.flops_per_token * self.tokens

    @classmethod
    def of(cls, config: TrainConfig, vocab_size: int | None = None) -> Budget:
        """Return the budget of a run that reaches its last step, by default for the largest vocabulary.

        Raises ConfigError if a custom part miscounts its parameters or FLOPs; see `check_counts`.
        """
        check_counts(config)
        model, data = config.model, config.data
        sizes = (vocab_size or data.tokenizer.max_vocab_size, data.seq_len)
        ffns = model.layer_ffns()
        return cls(
            model=Cost(
                model.num_params(*sizes),
                model.num_active_params(*sizes),
                model.flops_per_token(*sizes),
            ),
            ffn=Cost(
                sum(ffn.num_params(model.d_model) for ffn in ffns),
                sum(ffn.num_active_params(model.d_model) for ffn in ffns),
                sum(ffn.flops_per_token(model.d_model, data.seq_len) for ffn in ffns),
            ),
            tokens=config.trainer.max_steps * config.tokens_per_step,
        )
