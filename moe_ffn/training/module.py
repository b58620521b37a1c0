"""The LightningModule: a decoder, its objective and its optimizer.

B batch, S sequence, V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, NotRequired, TypedDict, cast

import numpy as np
import torch
from lightning import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from moe_ffn.balancing.losses import StepTotals, count_step
from moe_ffn.kernels.base import on_this_rank
from moe_ffn.metrics.modular import LanguageMetrics
from moe_ffn.model.decoder import Decoder, DecoderConfig, DecoderLayer, DecoderOutput
from moe_ffn.outputs import Routing
from moe_ffn.training.distillation import DecoderTeacher, Teacher
from moe_ffn.training.objective import (
    IGNORED_TARGET,
    BalanceUpdater,
    Objective,
    ObjectiveConfig,
    add_coupling_gradient,
    inputs_and_targets,
    needs_step_totals,
    objective,
    token_losses,
)
from moe_ffn.training.optimizer import OptimizerConfig, build_schedule, replace_options
from moe_ffn.training.parallel.layout import SINGLE_PROCESS, Layout
from moe_ffn.training.parallel.sharding import Sharder, clip_by_norm_, total_norm
from moe_ffn.training.recovery.guard import GuardConfig, SkippedStep, StepGuard, find_nan_source


class LoadedBatch(TypedDict):
    """A batch from a loader: token ids, (B, S)."""

    index: int
    """Index of the batch in the run."""
    input_ids: Tensor
    target_ids: Tensor
    starts: NotRequired[Tensor]
    """(B,), index of each sequence's first token in its split; it finds the stored answers of a teacher."""


class RoutedOutput(TypedDict):
    """Routing of a batch by layer for callbacks; see `DecoderOutput`."""

    routings: dict[str, Routing]
    shared_shares: dict[str, Tensor]


class ValidationOutput(RoutedOutput):
    """Result of a validation step for callbacks."""

    window_losses: Tensor
    """Mean cross-entropy of each sequence, (B,), in nats per token."""


class TrainStepOutput(RoutedOutput):
    """Result of a training step for callbacks; all tensors but `loss` are detached."""

    loss: Tensor
    objective: Objective


@dataclass(frozen=True)
class ModuleOptions:
    """Options of a run that its `LanguageModel` uses."""

    model: DecoderConfig
    optimizer: OptimizerConfig
    objective: ObjectiveConfig
    guard: GuardConfig
    max_seq_len: int
    max_steps: int
    seed: int
    """Seed of all random numbers inside a step, such as dropout."""
    compiles: bool = False


class LanguageModel(LightningModule):
    """Predicts next tokens, or masked tokens. Callbacks log the outputs of its steps."""

    byte_lengths: Tensor
    batch_at: Callable[[int], LoadedBatch]
    """Function that returns the batch of the run with an index; `TokenData` sets it."""

    def __init__(
        self, options: ModuleOptions, byte_lengths: Tensor, layout: Layout = SINGLE_PROCESS
    ) -> None:
        """Build a decoder with weights drawn from torch's global generator.

        `byte_lengths` (V,) are the bytes of text of each token. A sharded decoder is on the meta device until
        `configure_model`.
        """
        super().__init__()
        self.options = options
        model, text_sizes = options.model, (len(byte_lengths), options.max_seq_len)
        self._build = partial(model.build, *text_sizes)
        self.layout = layout
        self._is_configured = False
        self._initial_weights: Mapping[str, Tensor] = {}
        self._generator_state = torch.get_rng_state()
        self._default_dtype = torch.get_default_dtype()
        self.decoder: Decoder = (
            model.build_empty(*text_sizes) if layout.is_sharded else model.build(*text_sizes)
        )
        self.register_buffer("byte_lengths", byte_lengths, persistent=False)
        self.balance_updater = BalanceUpdater(options.objective)
        self._step_totals: StepTotals | None = None
        self.validation_metrics = LanguageMetrics()
        self.gradient_norm = torch.zeros(())
        self.coupling: Tensor | None = None
        """Coupling loss of the last step; None without one."""
        self.guard = StepGuard(options.guard)
        self.skipped_step: SkippedStep | None = None
        """The last optimizer step if it was skipped, otherwise None."""
        self.teacher: Teacher | None = None
        """Teacher of `objective.distill`. It is no module, so no checkpoint holds its weights."""
        self._step_batches: list[LoadedBatch] = []
        self._step_losses: list[Tensor] = []

    def start_from(self, weights: Mapping[str, Tensor]) -> None:
        """Replace initial weights by these (name -> whole tensor), in `configure_model` if sharded."""
        if self.layout.is_sharded:
            self._initial_weights = weights
        else:
            _copy_into(self.decoder, weights)

    def setup(self, stage: str) -> None:
        # Lightning converts the module only after it has read a checkpoint, which would round float64 weights
        # to float32.
        convert = self.trainer.precision_plugin.convert_module
        convert(self)
        if isinstance(self.teacher, DecoderTeacher):
            convert(self.teacher.decoder).to(self.trainer.strategy.root_device)

    def configure_model(self) -> None:
        if self._is_configured:  # Lightning calls this hook again before `trainer.validate`
            return
        self._is_configured = True
        if self.layout.is_sharded:
            # During this hook, Lightning changes the default dtype to that of the precision. With it, the
            # random weights would differ from those of a single process.
            dtype = torch.get_default_dtype()
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self._generator_state)
                torch.set_default_dtype(self._default_dtype)
                self.decoder = self._build_sharded()
            torch.set_default_dtype(dtype)
        if self.options.compiles:
            self.decoder.compile()

    def _build_sharded(self) -> Decoder:
        """Build the sharded decoder with the weights that a single process would draw.

        Peak memory of a rank: its shards, one whole block, and the parameters outside blocks (sharded last).
        """
        sharder = Sharder(self.layout, self.trainer.strategy.root_device.type)
        convert = self.trainer.precision_plugin.convert_module
        weights, layer_numbers = self._initial_weights, count()

        def shard(layer: DecoderLayer) -> None:
            _copy_into(layer, weights, f"layers.{next(layer_numbers)}.")
            sharder.shard_layer(convert(layer))

        decoder = self._build(on_layer=shard)
        _copy_into(decoder, {k: v for k, v in weights.items() if not k.startswith("layers.")})
        self._initial_weights = {}
        sharder.shard_rest(cast("Decoder", convert(decoder)))
        return decoder

    def on_train_start(self) -> None:
        self._reset_step()  # an interrupted fit may have ended within a step
        # With two ranks the order of a sum does not matter.
        if self._num_ranks > 2 and not self.layout.is_sharded:
            self._fix_ddp_buckets()

    def _fix_ddp_buckets(self) -> None:
        """Run one backward pass, after which DistributedDataParallel keeps its gradient buckets.

        The buckets determine the order in which gradients are summed over ranks. Without this pass, the first
        step of a resumed run would be rounded differently from the same step of an uninterrupted run.
        """
        batch = self.transfer_batch_to_device(self.batch_at(0), self.device, 0)
        with self.trainer.precision_plugin.train_step_context():
            output: Any = self.trainer.strategy.training_step(batch, 0)
        output["loss"].backward()
        self.zero_grad(set_to_none=True)
        self._reset_step()

    def on_train_batch_start(self, batch: LoadedBatch, batch_idx: int) -> None:
        self._seed_batch(batch["index"])

    def training_step(self, batch: LoadedBatch, batch_idx: int) -> TrainStepOutput:
        if self._counts_ahead and batch["index"] % self.trainer.accumulate_grad_batches == 0:
            self._step_totals = self._count_ahead(batch["index"])
            self._seed_batch(batch["index"])  # `_count_ahead` has drawn random numbers
        if isinstance(self.decoder, FSDPModule):
            # Reduce gradients over ranks once, after the last batch of a step.
            is_last = (batch["index"] + 1) % self.trainer.accumulate_grad_batches == 0
            self.decoder.set_requires_gradient_sync(is_last)
        input_ids, target_ids = self._inputs_and_targets(batch)
        output = self.decoder(input_ids)
        routings = {layer: routing.detach() for layer, routing in output.routings.items()}
        if needs_step_totals(self.options.objective) and not self._counts_ahead:
            self._step_totals = count_step([routings], self._sum_over_ranks, self._num_ranks)
        losses = self._objective(output, input_ids, target_ids, batch)
        self.balance_updater.observe(routings, self.decoder.routers())
        self._step_batches.append(batch)
        self._step_losses.append(losses.total.detach())
        return TrainStepOutput(
            loss=losses.total,
            objective=losses.detach(),
            routings=routings,
            shared_shares=output.shared_shares,
        )

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        # DistributedDataParallel averages gradients over ranks; a `Sharder` sums them.
        super().backward(
            loss / self._num_ranks if self.layout.is_sharded else loss, *args, **kwargs
        )

    def on_train_batch_end(self, outputs: Any, batch: LoadedBatch, batch_idx: int) -> None:
        # Here, because Lightning calls this hook after the callbacks, which log the skipped step.
        if self.skipped_step is not None:
            self.guard.require_progress(self.skipped_step)

    def validation_step(self, batch: LoadedBatch, batch_idx: int) -> ValidationOutput:
        output, nats_BS, targets_BS = token_losses(
            self.decoder,
            batch["input_ids"],
            batch["target_ids"],
            self.options.objective.masked_fraction,
            batch["index"],
        )
        counted_BS = targets_BS != IGNORED_TARGET
        lengths = self.byte_lengths[targets_BS[counted_BS]]
        self.validation_metrics.update(nats_BS[counted_BS], lengths)
        return ValidationOutput(
            routings=output.routings,
            shared_shares=output.shared_shares,
            window_losses=nats_BS.sum(1) / counted_BS.sum(1).clamp(min=1),
        )

    def on_validation_epoch_end(self) -> None:
        values = self.validation_metrics.compute()
        self.validation_metrics.reset()
        # For the checkpoint and early-stopping callbacks. All ranks have equal values already, but without
        # sync_dist Lightning warns.
        self.log_dict(
            {f"validation/{name}": value for name, value in values.items()},
            logger=False,
            sync_dist=True,
        )

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        # Lightning frees gradients only after the next forward pass, so they would add to its peak memory.
        self.zero_grad(set_to_none=True)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        if (config := self.options.objective.coupling) is not None:
            seed = _seed_of(self.options.seed, self.trainer.global_step, spawn_key=(1,))
            self.coupling = add_coupling_gradient(self.decoder, config, seed)
        norm = total_norm(p.grad for p in self.parameters() if p.grad is not None)
        self.gradient_norm = norm.detach()
        if self._check_step():
            self.balance_updater.step(self.decoder.routers(), self._sum_over_ranks, self._num_ranks)
        else:
            # Without gradients the optimizer changes no parameter, no moment and no step count.
            self.zero_grad(set_to_none=True)
        self._reset_step()

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if not gradient_clip_val or all(p.grad is None for p in self.parameters()):
            return  # a skipped step has no gradients
        if gradient_clip_algorithm == "value":
            super().configure_gradient_clipping(
                optimizer, gradient_clip_val, gradient_clip_algorithm
            )
        else:
            clip_by_norm_(self.parameters(), gradient_clip_val, self.gradient_norm)

    def _check_step(self) -> bool:
        """Return True if the guard accepts the loss (mean over batches and ranks) and the gradient norm."""
        loss = torch.stack(self._step_losses).mean().float()
        loss_and_norm = torch.stack([loss, self.gradient_norm.to(loss)])
        # Averaged over ranks, so that all ranks decide alike. The step waits for the device here.
        mean, norm = (self._sum_over_ranks(loss_and_norm) / self._num_ranks).tolist()
        self.skipped_step = None
        reason = self.guard.check(mean, norm)
        if reason is None:
            self.guard.accept(mean)
            return True
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else scaler.get_scale()
        if scale > 1 and math.isfinite(mean) and not math.isfinite(norm):
            return False  # not an error: the float16 scaler halves its scale until gradients fit
        began_in = None
        if not (math.isfinite(mean) and math.isfinite(norm)) and self.guard.began_in is None:
            # Check the gradients now, since repeating the step overwrites them.
            gradients = (p.grad for p in self.parameters() if p.grad is not None)
            is_finite = all(on_this_rank(gradient).isfinite().all() for gradient in gradients)
            began_in = self._find_nan_source(scale)
            if began_in is None and math.isfinite(mean) and is_finite:
                reason += ", though every gradient is finite: the sum of their squares overflows"
            elif began_in is None:
                reason += ", but not when the step was repeated"
        self.skipped_step = self.guard.skip(self.trainer.global_step + 1, reason, began_in)
        return False

    def _find_nan_source(self, gradient_scale: float) -> str | None:
        """Repeat the step, and return the name of the first NaN or infinite value on any rank."""

        def forward(batch: LoadedBatch) -> Objective:
            self._seed_batch(batch["index"])
            with self.precision_context():
                input_ids, target_ids = self._inputs_and_targets(batch)
                # `_call_impl` is not compiled, so that the hooks of inner modules run; unlike `forward`, it
                # also runs the decoder's own hooks, which gather a sharded model.
                output = cast("DecoderOutput", self.decoder._call_impl(input_ids))
                return self._objective(output, input_ids, target_ids, batch)

        batches = [partial(forward, batch) for batch in self._step_batches]
        # A sharded model holds whole weights only while its hooks run, so no gradient can be computed here.
        scale = None if self.layout.is_sharded else gradient_scale / len(batches)
        with torch.set_grad_enabled(scale is not None):
            source = find_nan_source(self, batches, scale)
        if isinstance(self.decoder, FSDPModule):
            self.decoder.reshard()  # parameters outside of layers would stay gathered
        return source

    def _reset_step(self) -> None:
        self.balance_updater.reset()
        self._step_batches, self._step_losses = [], []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["guard"] = self.guard.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.guard.load_state_dict(checkpoint["guard"])
        replace_options(checkpoint, self.decoder, self.options.optimizer, self.options.max_steps)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = self.options.optimizer.build(self.decoder)
        schedule = build_schedule(optimizer, self.options.optimizer, self.options.max_steps)
        scheduler: Any = {"scheduler": schedule, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def precision_context(self) -> AbstractContextManager[Any]:
        """Return the autocast context of a training step, for forward passes between steps."""
        if self._trainer is None:
            return nullcontext()
        return self.trainer.precision_plugin.forward_context()

    def _seed_batch(self, index: int) -> None:
        # Random numbers depend only on the batch and the rank, so that a resumed run equals an uninterrupted
        # run to the bit, without generator states in the checkpoint.
        torch.manual_seed(_seed_of(self.options.seed, index, self.global_rank))
        step = index // self._batches_per_step
        generator = torch.Generator().manual_seed(_seed_of(self.options.seed, step, spawn_key=(0,)))
        for router in self.decoder.routers().values():
            router.begin_step(generator)

    def _objective(
        self, output: DecoderOutput, input_ids: Tensor, target_ids: Tensor, batch: LoadedBatch
    ) -> Objective:
        distillation = None
        if self.teacher is not None:
            starts, is_predicted = batch.get("starts"), target_ids != IGNORED_TARGET
            distillation = self.teacher.loss(output.logits, input_ids, starts, is_predicted)
        return objective(
            output.logits,
            target_ids,
            output.routings,
            self.options.objective,
            sparsity_weight=self.balance_updater.sparsity_weight,
            step_totals=self._step_totals,
            distillation=distillation,
        )

    def _inputs_and_targets(self, batch: LoadedBatch) -> tuple[Tensor, Tensor]:
        fraction = self.options.objective.masked_fraction
        return inputs_and_targets(self.decoder, batch["input_ids"], batch["target_ids"], fraction)

    @property
    def _counts_ahead(self) -> bool:
        """True if a balancing loss needs the counts of later batches of the step."""
        return needs_step_totals(self.options.objective) and self._batches_per_step > 1

    @property
    def _batches_per_step(self) -> int:
        return 1 if self._trainer is None else self.trainer.accumulate_grad_batches

    @torch.no_grad()
    def _count_ahead(self, first: int) -> StepTotals:
        """Route all batches of the step that begins with batch `first`, and count (token, expert) pairs.

        A loss over the whole step needs these counts before the first backward pass. Each batch has the seed
        of its training step, so noise and dropout are the same.
        """
        routings = []
        for index in range(first, first + self.trainer.accumulate_grad_batches):
            batch = self.transfer_batch_to_device(self.batch_at(index), self.device, 0)
            self._seed_batch(index)
            input_ids, _ = self._inputs_and_targets(batch)
            routings.append(self.decoder(input_ids).routings)
        return count_step(routings, self._sum_over_ranks, self._num_ranks)

    @property
    def _num_ranks(self) -> int:
        return 1 if self._trainer is None else self.trainer.world_size

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        if self._num_ranks == 1:
            return value
        summed = self.trainer.strategy.reduce(value, reduce_op="sum")
        assert isinstance(summed, Tensor)
        return summed


def _seed_of(*entropy: int, spawn_key: tuple[int, ...] = ()) -> int:
    """Return a seed for torch; another `spawn_key` gives independent numbers."""
    sequence = np.random.SeedSequence(entropy, spawn_key=spawn_key)
    return int(sequence.generate_state(1, np.uint64)[0])


@torch.no_grad()
def _copy_into(module: nn.Module, weights: Mapping[str, Tensor], prefix: str = "") -> None:
    """Copy the weights that exist under `prefix` into a module; leave its other weights unchanged."""
    for name, value in module.state_dict().items():
        if (weight := weights.get(prefix + name)) is not None:
            value.copy_(weight)
