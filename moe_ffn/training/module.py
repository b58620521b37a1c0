"""The LightningModule: a decoder, its objective and its optimizer.

B batch, S sequence, V vocabulary
"""

from __future__ import annotations

from typing import Any, TypedDict

import numpy as np
import torch
import torch.nn.functional as F
from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import Optimizer

from moe_ffn.metrics.language import LanguageMetrics
from moe_ffn.model.config import DecoderConfig
from moe_ffn.outputs import Routing
from moe_ffn.training.config import ObjectiveConfig, OptimizerConfig
from moe_ffn.training.objective import IGNORED_TARGET, Objective, objective
from moe_ffn.training.optimizer import build_optimizer, build_schedule


class LoadedBatch(TypedDict):
    """What the loaders hand over: token ids (B, S), and which batch of the run this is."""

    index: int
    input_ids: Tensor
    target_ids: Tensor


class TrainStepOutput(TypedDict):
    """What callbacks see of a training step; all but `loss` is detached."""

    loss: Tensor
    objective: Objective
    routings: dict[int, Routing]


class LanguageModel(LightningModule):
    """Next-token prediction. It logs nothing itself: `training.callbacks` reads what steps return."""

    byte_lengths: Tensor

    def __init__(
        self,
        model: DecoderConfig,
        optimizer: OptimizerConfig,
        objective: ObjectiveConfig,
        *,
        byte_lengths: Tensor,
        max_seq_len: int,
        max_steps: int,
        seed: int,
    ) -> None:
        """A decoder with fresh weights, and what it is trained by.

        Args:
            byte_lengths: (V,), the bytes of text each token stands for; its length is the vocabulary.
            max_steps: optimizer steps the schedule spans.
            seed: of everything random inside a step, such as dropout.
        """
        super().__init__()
        self.decoder = model.build(vocab_size=len(byte_lengths), max_seq_len=max_seq_len)
        self.optimizer_config = optimizer
        self.objective_config = objective
        self.max_steps = max_steps
        self.seed = seed
        self.register_buffer("byte_lengths", byte_lengths, persistent=False)
        self.validation_metrics = LanguageMetrics()
        self.gradient_norm = torch.zeros(())
        # Plain values only, so that the checkpoint loads with weights_only=True.
        self.save_hyperparameters(
            {
                "model": model.to_dict(),
                "optimizer": optimizer.to_dict(),
                "objective": objective.to_dict(),
                "vocab_size": len(byte_lengths),
                "max_seq_len": max_seq_len,
                "max_steps": max_steps,
                "seed": seed,
            },
            logger=False,
        )

    def on_train_batch_start(self, batch: LoadedBatch, batch_idx: int) -> None:
        # The randomness of a step depends on which step it is and on nothing before it, so a resumed
        # run repeats the unbroken one to the bit without any generator state in the checkpoint.
        entropy = [self.seed, batch["index"], self.global_rank]
        torch.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]))

    def training_step(self, batch: LoadedBatch, batch_idx: int) -> TrainStepOutput:
        output = self.decoder(batch["input_ids"])
        losses = objective(
            output.logits, batch["target_ids"], output.routings, self.objective_config
        )
        return TrainStepOutput(
            loss=losses.total,
            objective=losses.detach(),
            routings={layer: routing.detach() for layer, routing in output.routings.items()},
        )

    def validation_step(self, batch: LoadedBatch, batch_idx: int) -> dict[str, dict[int, Routing]]:
        output = self.decoder(batch["input_ids"])
        targets = batch["target_ids"].flatten()
        nats = F.cross_entropy(
            output.logits.flatten(0, 1).float(),
            targets,
            ignore_index=IGNORED_TARGET,
            reduction="none",
        )
        counted = targets != IGNORED_TARGET
        self.validation_metrics.update(nats[counted], self.byte_lengths[targets[counted]])
        return {"routings": output.routings}

    def on_validation_epoch_end(self) -> None:
        values = self.validation_metrics.compute()
        self.validation_metrics.reset()
        # Only for the checkpoint and early-stopping callbacks to read. The values are the same on every
        # rank already, but Lightning warns where nobody says so.
        self.log_dict(
            {f"validation/{name}": value for name, value in values.items()},
            logger=False,
            sync_dist=True,
        )

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        # The norm is wanted for the log, also where nothing is clipped.
        if gradient_clip_algorithm not in (None, "norm"):
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
            self.gradient_norm = torch.nn.utils.get_total_norm(gradients).detach()
            return super().configure_gradient_clipping(
                optimizer, gradient_clip_val, gradient_clip_algorithm
            )
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val or torch.inf)
        self.gradient_norm = norm.detach()
        return None

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = build_optimizer(self.decoder, self.optimizer_config)
        schedule = build_schedule(optimizer, self.optimizer_config, self.max_steps)
        scheduler: Any = {"scheduler": schedule, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}
