"""A model of transformers, of moe_ffn or any module that returns logits, with a batch to run it on.

B sequences, S positions, V vocabulary, T = B * S tokens
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from moe_ffn.config.errors import ConfigError
from moe_ffn.interop.audit.layers import (
    SparseLayer,
    sparse_layers,
    without_parallel_wrappers,
    without_peft,
)
from moe_ffn.interop.routings import watch
from moe_ffn.model.decoder import Decoder
from moe_ffn.outputs import Routing, dtype_name
from moe_ffn.training.config import AlarmsConfig
from moe_ffn.training.objective import IGNORED_TARGET, cross_entropy_of

_IDS, _MASK, _LABELS = "input_ids", "attention_mask", "labels"
_DECODER_IDS, _DECODER_MASK = f"decoder_{_IDS}", f"decoder_{_MASK}"


@dataclass(frozen=True)
class Outputs:
    """One forward pass."""

    logits_BSV: Tensor
    routings: dict[str, Routing]
    """Routing of each layer that can be watched."""
    output: Any
    """Return value of the model."""


class Probe:
    """The audited model and a batch: finds the sparse layers, and runs the model on the batch."""

    def __init__(
        self, model: nn.Module, batch: Mapping[str, Any], num_steps: int | None = None
    ) -> None:
        """Take `num_steps`, optimizer steps that the model was trained for; None: unknown."""
        self.num_steps = num_steps
        self.model = model = without_parallel_wrappers(model)
        config: Any = getattr(self.base, "config", None)
        self.has_encoder = bool(getattr(config, "is_encoder_decoder", False))
        """True for an encoder with a decoder; ids, mask and labels are then those of the decoder."""
        self.batch = batch
        if self.has_encoder and _DECODER_IDS not in batch:
            start = getattr(config, "decoder_start_token_id", None) or 0
            self.batch = _with_decoder_inputs(batch, start)
        if not self.ids_BS.is_meta and bool((self.labels_BS == IGNORED_TARGET).all()):
            raise ConfigError(
                "audit: the batch has no token to predict: all labels are -100, or all tokens are padding"
            )
        self.layers = sparse_layers(model)
        self.unwatched = ""
        """Reason why routings cannot be recorded, which `reached` finds out; empty if they can."""

    def too_early(self, subject: str) -> str:
        """Return a message that `subject` needs more training steps; empty if it can be judged."""
        needed = AlarmsConfig().after_steps
        if self.num_steps is None or self.num_steps >= needed:
            return ""
        return f"{subject} need {needed} steps of training, this model has {self.num_steps}"

    @property
    def base(self) -> nn.Module:
        return without_peft(self.model)

    @property
    def config(self) -> Any:
        """Config of the language model inside a model of transformers; None for others."""
        config: Any = getattr(self.base, "config", None)
        return config.get_text_config() if hasattr(config, "get_text_config") else None

    @cached_property
    def reached(self) -> list[SparseLayer]:
        """Sparse layers that the batch reaches, without those for images or for multi-token prediction."""
        called: set[str] = set()
        with mode(self.model, training=False), torch.no_grad(), ExitStack() as hooks:
            for layer in self.layers:
                note = partial(lambda name, module, args: called.add(name), layer.name)
                hooks.enter_context(layer.block.register_forward_pre_hook(note))
            try:
                self.run(labels=None)
            except ConfigError as error:  # experts in a list, or routers without logits
                self.unwatched = str(error)
                self.logits(labels=None)
        return [layer for layer in self.layers if layer.name in called]

    @property
    def ids_BS(self) -> Tensor:
        return self.batch[self.ids_name]

    @property
    def ids_name(self) -> str:
        return _DECODER_IDS if self.has_encoder else _IDS

    @property
    def mask_BS(self) -> Tensor:
        """bool, True for real tokens."""
        mask = self.batch.get(_DECODER_MASK if self.has_encoder else _MASK)
        return torch.ones_like(self.ids_BS, dtype=torch.bool) if mask is None else mask.bool()

    @property
    def unshifted_labels_BS(self) -> Tensor:
        """The labels of the batch, as transformers takes them: by default each real token itself."""
        given_BS = self.batch.get(_LABELS)
        if given_BS is not None:
            return given_BS
        return self.ids_BS.masked_fill(~self.mask_BS, IGNORED_TARGET)

    @property
    def labels_BS(self) -> Tensor:
        """The token to predict at each position, or `IGNORED_TARGET`."""
        if self.has_encoder and _LABELS in self.batch:
            return self.batch[_LABELS]  # transformers has shifted the inputs
        return F.pad(self.unshifted_labels_BS[:, 1:], (0, 1), value=IGNORED_TARGET)

    def run(self, **changes: Any) -> Outputs:
        """Run the model on the batch; `changes` replace entries of it, None removes one."""
        with nullcontext([{}]) if self.unwatched else watch(self.model) as passes:
            output, logits_BSV = self._call(changes)
        return Outputs(logits_BSV, passes[-1], output)

    def logits(self, **changes: Any) -> Tensor:
        """Return the logits, as `run` does, without recording the routing."""
        return self._call(changes)[1]

    def _call(self, changes: Mapping[str, Any]) -> tuple[Any, Tensor]:
        """Return the output of the model and its logits."""
        batch = {k: v for k, v in {**self.batch, **changes}.items() if v is not None}
        if isinstance(self.base, Decoder):
            mask = batch.get(_MASK)
            output = self.model(batch[_IDS], None if mask is None else mask.bool())
        elif self.config is not None:
            output = self.model(**{"use_cache": False, **batch})
        else:
            try:
                with suppress(ValueError):  # a compiled module may have no signature
                    inspect.signature(self.model.forward).bind(**batch)
            except TypeError as error:
                raise ConfigError(
                    f"audit: {type(self.model).__name__}.forward cannot be called with {', '.join(batch)} "
                    f"({error}); audit a module whose forward({_IDS}) returns the logits, such as one that "
                    "calls this model"
                ) from error
            output = self.model(**batch)
        logits_BSV = getattr(output, "logits", output)
        if not isinstance(logits_BSV, Tensor) or logits_BSV.ndim != 3:
            raise ConfigError(
                "audit: the model must return logits (batch, sequence, vocabulary), or an object with "
                f"`.logits`, but it returned {type(output).__name__}"
            )
        ids_BS = batch[self.ids_name]
        if logits_BSV.shape[:2] != ids_BS.shape:
            raise ConfigError(
                f"audit: the model must return logits for each token of {self.ids_name} {[*ids_BS.shape]}, "
                f"but their shape is {[*logits_BSV.shape]}; audit a causal language model"
            )
        return output, logits_BSV

    def cross_entropy(self, logits_BSV: Tensor) -> Tensor:
        """Return the mean cross-entropy of the labels in nats, without any other loss."""
        return cross_entropy_of(logits_BSV, self.labels_BS)


def _with_decoder_inputs(batch: Mapping[str, Any], start: int) -> dict[str, Any]:
    """Return a batch whose decoder reads the labels, or without labels the text, shifted right by one."""
    ids_BS, mask_BS, labels_BS = batch[_IDS], batch.get(_MASK), batch.get(_LABELS)
    if labels_BS is not None:
        ids_BS, mask_BS = labels_BS.clamp(min=0), labels_BS != IGNORED_TARGET
    inputs = {_DECODER_IDS: F.pad(ids_BS[:, :-1], (1, 0), value=start)}
    if mask_BS is not None:
        inputs[_DECODER_MASK] = F.pad(mask_BS[:, :-1].long(), (1, 0), value=1)
    return {**batch, **inputs}


@contextmanager
def mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Set training or evaluation, without gradient checkpointing, which runs layers twice; then restore each
    module's mode and torch's random state. Do not train in another thread meanwhile: `CheckpointFunction` is
    replaced for the whole process.
    """
    before = [(module, module.training) for module in model.modules()]
    recomputing: list[Any] = [
        m for m in model.modules() if getattr(m, "gradient_checkpointing", False)
    ]
    devices = {p.device for p in model.parameters() if p.is_cuda}
    try:
        # `torch.autograd.grad` does not reach the parameters inside a checkpoint with `use_reentrant=True`.
        without_checkpoints = patch.object(CheckpointFunction, "apply", _run_once)
        with torch.random.fork_rng(list(devices)), without_checkpoints:
            torch.manual_seed(0)
            model.train(training)
            for module in recomputing:
                module.gradient_checkpointing = False
            yield
    finally:
        for module, was_training in before:
            module.training = was_training
        for module in recomputing:
            module.gradient_checkpointing = True


def _run_once(function: Callable[..., Any], preserve_rng_state: bool, *arguments: Any) -> Any:
    """Replace `CheckpointFunction.apply`: run a function that stores its activations."""
    return function(*arguments)


def checked_batch(batch: Any) -> Mapping[str, Any]:
    """Return token ids (B, S), or a mapping with `input_ids`, as a mapping; ConfigError for anything else."""
    if isinstance(batch, Tensor):
        batch = {_IDS: batch}
    if not isinstance(batch, Mapping) or not isinstance(batch.get(_IDS), Tensor):
        raise ConfigError(
            f"audit: the batch must be token ids (batch, sequence) or a mapping with '{_IDS}', but is of "
            f"type {type(batch).__name__}"
        )
    ids = batch[_IDS]
    if ids.ndim != 2 or ids.is_floating_point() or ids.shape[1] < 2:
        raise ConfigError(
            f"audit: {_IDS} must be integers (batch, sequence) with two or more positions, but are "
            f"{dtype_name(ids.dtype)}{list(ids.shape)}"
        )
    return {**batch, _IDS: ids.long()}  # a cross-entropy takes no others
