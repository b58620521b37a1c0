"""Cost of a training step on a layout of ranks: memory of each rank, bytes sent, seconds.

torch's memory tracker follows a step of the model on fake tensors, without computing it. Arithmetic then
divides the results among the ranks of a layout.

B sequences, S sequence, D model width, L layers, E experts, T steps
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from moe_ffn.config.errors import UseCase
from moe_ffn.data.batches import require_equal_shares
from moe_ffn.model.decoder import Decoder, DecoderConfig, DecoderLayer
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.memory import optimizer_bytes
from moe_ffn.training.objective import cross_entropy_of
from moe_ffn.training.parallel.layout import SHARDED_PRECISIONS, Layout

# -- devices


@dataclass(frozen=True)
class Device:
    """An accelerator, with the numbers that its maker publishes."""

    name: str
    memory_bytes: float
    flops: float
    """FLOPs per second of dense bfloat16 matrix products."""
    link: float
    """Bytes per second that it sends to devices on the same machine."""
    network: float
    """Bytes per second that it sends to other machines."""
    per_machine: int = 8


DEVICES = {
    device.name: device
    for device in (
        Device("a100", 80e9, 312e12, 300e9, 25e9),
        Device("h100", 80e9, 989e12, 450e9, 50e9),
        Device("h200", 141e9, 989e12, 450e9, 50e9),
        Device("b200", 180e9, 2250e12, 900e9, 50e9),
    )
}
"""SXM modules, from NVIDIA's data sheets. FLOPs are without sparsity; link is half of the NVLink bandwidth,
which NVIDIA counts in both directions; network is for one GPU in a DGX (200 Gb/s, later 400 Gb/s)."""

EFFICIENCY = 0.4
"""Fraction of the published FLOPs and bandwidth that a step reaches."""


# -- the model


@dataclass(frozen=True)
class Weight:
    """A parameter and its optimizer state."""

    shape: torch.Size
    state_bytes: int
    is_expert: bool
    """True if expert parallelism divides the parameter."""

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def share(self, layout: Layout) -> float:
        """Return the largest fraction of the parameter that a rank holds."""
        rows, shards = self.shape[0], layout.shard * layout.expert
        if self.is_expert and layout.shards_each_expert(rows):
            return 1 / shards
        return math.ceil(rows / shards) / rows

    def sent(self, layout: Layout) -> float:
        """Return the elements that a rank sends to gather the weight or reduce-scatter its gradient."""
        num_shards = layout.shard if self.is_expert else layout.shard * layout.expert
        return self.numel * self.share(layout) * (num_shards - 1)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model's parameters, by layer."""

    layers: tuple[tuple[Weight, ...], ...]
    outside: tuple[Weight, ...]
    """Parameters outside of layers: embeddings, the final norm, the output matrix."""

    @classmethod
    def of(cls, config: TrainConfig) -> Sizes:
        decoder = config.model.build_empty(*config.data.text_sizes)
        state = optimizer_bytes(config, decoder)
        experts = _expert_parameters(decoder)

        def weights(parameters: Iterable[nn.Parameter]) -> tuple[Weight, ...]:
            return tuple(Weight(p.shape, state[id(p)], id(p) in experts) for p in parameters)

        layers = tuple(weights(layer.parameters()) for layer in decoder.layers)
        in_layers = set(map(id, decoder.layers.parameters()))
        return cls(layers, weights(p for p in decoder.parameters() if id(p) not in in_layers))

    @cached_property
    def all(self) -> tuple[Weight, ...]:
        return (*self.outside, *(weight for layer in self.layers for weight in layer))


def _expert_parameters(decoder: Decoder) -> set[int]:
    """Return the `id` of each parameter that expert parallelism divides."""
    ids: set[int] = set()

    def collect(experts: nn.Module, num_experts: int) -> Any:
        ids.update(map(id, experts.parameters()))

    for layer in decoder.layers:
        cast("DecoderLayer", layer).ffn.place_experts(collect)
    return ids


@dataclass(frozen=True)
class Activations:
    """Bytes of activations that the forward pass of a rank saves for the backward pass."""

    outside: float
    """Bytes outside of layers, including the logits and their gradient, which exist at the peak of a step."""
    by_layer: tuple[float, ...]
    recomputed: float
    """Bytes that activation checkpointing recomputes at a time: those of one layer."""

    @property
    def total(self) -> float:
        return sum(self.peak_with(0.0, [0.0] * len(self.by_layer)))

    def peak_with(self, outside: float, by_layer: Sequence[float]) -> tuple[float, float]:
        """Return bytes of (gradients, activations) when their sum peaks, given the bytes of gradients."""
        saved, gradients = sum(self.by_layer), outside
        candidates = [(0.0, self.outside + saved)]
        for activation, gradient in reversed(list(zip(self.by_layer, by_layer, strict=True))):
            gradients += gradient
            candidates.append((gradients, saved + self.recomputed))
            saved -= activation
        return max(candidates, key=sum)


def activations_of(
    config: TrainConfig, num_sequences: int, precision: str, teacher: DecoderConfig | None = None
) -> Activations:
    """Trace models with one and two layers of each distinct block; the difference is one layer.

    A teacher (of `objective.distill`) adds its forward pass, and its loss, outside of layers.
    """
    model = config.model
    ffns = model.layer_ffns()
    checkpointing = model.activation_checkpointing
    distinct = {ffn.model_dump_json(): ffn for ffn in ffns}

    def traced(*ffns: Any, checkpointing: Any = checkpointing) -> float:
        smaller = {
            **model.to_dict(),
            "attention": {**model.attention.to_dict(), "window_at": ":"},
            "parametrization": "standard",  # the base of another may not fit these blocks
            "num_layers": len(ffns),
            "ffn": ffns[0].to_dict(),
            "ffn_at": {str(layer): ffn.to_dict() for layer, ffn in enumerate(ffns)},
            "activation_checkpointing": checkpointing,
        }
        return _saved_bytes(config, type(model).model_validate(smaller), num_sequences, precision)

    layer_bytes: dict[str, float] = {}
    recomputed = outside = 0.0
    for key, ffn in distinct.items():
        one = traced(ffn)
        layer_bytes[key] = traced(ffn, ffn) - one
        outside = max(outside, one - layer_bytes[key])
        if checkpointing:
            whole = traced(ffn, ffn, checkpointing=False) - traced(ffn, checkpointing=False)
            # If only the feed-forward block is recomputed, the activations of attention are saved already.
            recomputed = max(
                recomputed, whole - layer_bytes[key] if checkpointing == "ffn" else whole
            )
    by_layer = tuple(layer_bytes[ffn.model_dump_json()] for ffn in ffns)
    if teacher is not None:
        forward = _saved_bytes(config, teacher, num_sequences, precision, False)
        tokens, vocab_size = num_sequences * config.data.seq_len, config.data.text_sizes[0]
        outside += max(forward, _LOGITS_OF_DISTILLATION * 4 * tokens * vocab_size)
    return Activations(outside, by_layer, recomputed)


_LOGITS_OF_DISTILLATION = 3
"""Number of float32 tensors of the size of the logits that `distillation_loss` adds to the peak of a step.

It holds five, after the teacher's logits are freed; at the peak without it, the gradient of the
cross-entropy holds two."""


def _saved_bytes(
    config: TrainConfig,
    model: DecoderConfig,
    num_sequences: int,
    precision: str,
    is_trained: bool = True,
) -> float:
    """Return the peak bytes without weights, from the forward pass to the gradient of the logits."""
    decoder = model.build_empty(*config.data.text_sizes)
    if precision == "bf16-true":
        decoder = decoder.bfloat16()
    with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about matrix products of mixed dtypes
        decoder.to_empty(device="cpu")
        ids_BS = torch.zeros(num_sequences, config.data.seq_len, dtype=torch.long)
        tracker = MemTracker()
        tracker.track_external(decoder, ids_BS)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed")
        with tracker, autocast, torch.set_grad_enabled(is_trained):
            output = decoder(ids_BS)
            if is_trained:
                loss = cross_entropy_of(output.logits, ids_BS)
                torch.autograd.grad(loss, output.logits)
        (peak,) = (
            snapshot
            for device, snapshot in tracker.get_tracker_snapshot("peak").items()
            if device.type == "cpu"
        )
    by_kind = {str(getattr(kind, "value", kind)): value for kind, value in peak.items()}
    return by_kind["Total"] - by_kind["Parameter"] - by_kind["Buffer"]


# -- the cost of a layout


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of a rank at the peak of a step."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    """Temporary whole weights and gradients: those outside of layers, and those of two layers."""
    activations: float

    @property
    def total(self) -> float:
        return sum(astuple(self))


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends in a step."""

    weights: float
    """Weights to gather before use; weights in layers are gathered again in the backward pass."""
    gradients: float
    """Gradients to sum over the ranks that shard a weight."""
    copies: float
    """Gradients to sum over copies of the model."""
    tokens: float
    """Tokens sent to their experts and back, and their gradients, with perfectly balanced experts."""

    @property
    def total(self) -> float:
        return sum(astuple(self))


@dataclass(frozen=True)
class LayoutPlan:
    """Cost of a run on a layout."""

    layout: Layout
    device: Device
    memory: MemoryEstimate
    traffic: Traffic
    compute_seconds: float
    """Seconds of the matrix products of a step."""
    overlapped_seconds: float
    """Seconds to send weights and gradients, which overlaps with the products."""
    token_seconds: float
    """Seconds to send tokens, which does not overlap with the products."""
    tokens: int
    """Tokens of a step, summed over ranks."""

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.device.memory_bytes

    @property
    def seconds(self) -> float:
        """Seconds of a step with perfectly balanced experts."""
        return max(self.compute_seconds, self.overlapped_seconds) + self.token_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def layouts(config: TrainConfig, num_ranks: int) -> Iterator[Layout]:
    """Yield every layout of `num_ranks` ranks that the model, the precision and the optimizer allow."""
    if _precision(config) not in SHARDED_PRECISIONS or not config.optimizer.takes_shards:
        yield Layout(num_ranks)
        return
    empty = config.model.build_empty(*config.data.text_sizes)
    for expert in _divisors(num_ranks):
        if expert > 1 and (
            not config.model.router_infos() or config.model.unsupported(UseCase(num_ranks=expert))
        ):
            continue
        for shard in _divisors(num_ranks // expert):
            layout = Layout(num_ranks // expert // shard, shard, expert)
            if layout.unsupported_reason(empty) is None:
                yield layout


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def plan_layouts(
    config: TrainConfig,
    num_ranks: int,
    device: Device,
    efficiency: float = EFFICIENCY,
    teacher: DecoderConfig | None = None,
) -> list[LayoutPlan]:
    """Return a plan for each layout: those that fit, fastest first; then the others, smallest first.

    Each rank holds the teacher of `objective.distill` whole. Raises ConfigError if the batch cannot be
    divided among the ranks.
    """
    require_equal_shares(config.data.batch_size, num_ranks)
    planner = _Planner(config, num_ranks, device, efficiency, teacher)
    return sorted(
        map(planner.plan, layouts(config, num_ranks)),
        key=lambda p: (not p.fits, p.seconds if p.fits else p.memory.total, p.memory.total),
    )


def _precision(config: TrainConfig) -> str:
    precision = config.trainer.precision
    return "bf16-mixed" if precision == "auto" else precision


class _Planner:
    """The model and the batch of a run, whose cost is planned for one layout after the other."""

    def __init__(
        self,
        config: TrainConfig,
        num_ranks: int,
        device: Device,
        efficiency: float,
        teacher: DecoderConfig | None,
    ) -> None:
        """See `plan_layouts`."""
        self.config, self.model, self.teacher = config, config.model, teacher
        self.device, self.efficiency = device, efficiency
        precision = _precision(config)
        self.item_bytes = {"bf16-true": 2, "64-true": 8}.get(precision, 4)
        """Bytes of one element of a weight."""
        self.token_item_bytes = 2 if precision == "bf16-mixed" else self.item_bytes
        """Bytes of one element of a sent token."""
        num_sequences = config.data.batch_size // num_ranks
        self.sizes = Sizes.of(config)
        self.activations = activations_of(config, num_sequences, precision, teacher)
        self.num_batches = config.trainer.accumulate_grad_batches
        self.tokens = self.num_batches * num_sequences * config.data.seq_len
        """Tokens of a rank in a step."""

    def plan(self, layout: Layout) -> LayoutPlan:
        device, model, text_sizes = self.device, self.model, self.config.data.text_sizes
        traffic = self._traffic(layout)

        def bandwidth(num_ranks: int) -> float:
            """Return the bandwidth between `num_ranks` ranks, on one machine or across machines."""
            return device.link if num_ranks <= device.per_machine else device.network

        overlapped = (traffic.weights + traffic.gradients) / bandwidth(layout.shard * layout.expert)
        overlapped += traffic.copies / bandwidth(layout.num_ranks)
        forward, ffns = model.flops_per_token(*text_sizes), model.layer_ffns()
        of_ffns = sum(ffn.flops_per_token(model.d_model, self.config.data.seq_len) for ffn in ffns)
        # The backward pass costs twice the forward pass, and repeats all or a part of it.
        recomputed = {"ffn": of_ffns, False: 0}.get(model.activation_checkpointing, forward)
        theirs = 0 if self.teacher is None else self.teacher.flops_per_token(*text_sizes)
        seconds_per_flop = self.tokens / device.flops / self.efficiency
        return LayoutPlan(
            layout,
            device,
            self._memory(layout),
            traffic,
            compute_seconds=seconds_per_flop * (3 * forward + recomputed + theirs),
            overlapped_seconds=overlapped / self.efficiency,
            token_seconds=traffic.tokens / bandwidth(layout.expert) / self.efficiency,
            tokens=self.tokens * layout.num_ranks,
        )

    def _memory(self, layout: Layout) -> MemoryEstimate:
        sizes, activations, item_bytes = self.sizes, self.activations, self.item_bytes
        if layout.expert > 1:
            # A rank saves the tokens that its experts received, including its own.
            tokens = self.tokens // self.num_batches
            received = self._received_elements(layout, tokens) / self.model.num_layers
            extra = self.token_item_bytes * received  # in each layer, saved or recomputed
            if self.model.activation_checkpointing:
                activations = replace(activations, recomputed=activations.recomputed + extra)
            else:
                by_layer = tuple(size + extra for size in activations.by_layer)
                activations = replace(activations, by_layer=by_layer)
        local = item_bytes * _stored_elements(sizes.all, layout)
        state = item_bytes / 4 * sum(w.state_bytes * w.share(layout) for w in sizes.all)
        outside, *layers = (
            item_bytes * sum(w.numel / (layout.expert if w.is_expert else 1) for w in weights)
            for weights in (sizes.outside, *sizes.layers)
        )
        if self.num_batches > 1:  # gradients accumulate unsharded until the last batch
            gradients, saved = outside + sum(layers), activations.total
        else:
            gradients, saved = activations.peak_with(
                item_bytes * _stored_elements(sizes.outside, layout),
                [item_bytes * _stored_elements(layer, layout) for layer in sizes.layers],
            )
        # Parameters outside of layers stay gathered, with their gradients. The next layer is gathered while
        # the current layer still has its weights and gradients.
        gathered = 2 * outside + 3 * max(layers)
        if not layout.is_sharded:  # DistributedDataParallel reduces gradients in buckets
            gathered = local if layout.num_ranks > 1 else 0.0
        if self.teacher is not None:
            local += item_bytes * self.teacher.num_params(*self.config.data.text_sizes)
        return MemoryEstimate(local, gradients, state, gathered, saved)

    def _traffic(self, layout: Layout) -> Traffic:
        sizes, item_bytes = self.sizes, self.item_bytes
        once = item_bytes * sum(weight.sent(layout) for weight in sizes.all)
        layers = item_bytes * sum(w.sent(layout) for layer in sizes.layers for w in layer)
        sent = self._received_elements(layout, self.tokens) * (1 - 1 / layout.expert)
        # To the experts and back, forward and backward; recomputing the forward pass sends tokens again.
        num_sends = 6 if self.model.activation_checkpointing else 4
        return Traffic(
            weights=self.num_batches * (once + layers),
            gradients=once,
            copies=2 * item_bytes * _stored_elements(sizes.all, layout) * (1 - 1 / layout.data),
            tokens=num_sends * self.token_item_bytes * sent,
        )

    def _received_elements(self, layout: Layout, tokens: int) -> float:
        """Return the number of elements that the experts of a rank receive, summed over layers.

        A rank receives a token once, even if the token chooses several of its experts. With balanced experts,
        a token draws k of E experts at random, and none of the rank's experts with probability `p_none`.
        """
        elements, num_ranks, d_model = 0.0, layout.expert, self.model.d_model
        for info in self.model.router_infos().values():
            num_experts = info.num_experts
            k = round(info.router.experts_per_token(num_experts))
            num_elsewhere = num_experts - info.num_networks // num_ranks
            p_none = math.comb(num_elsewhere, k) / math.comb(num_experts, k)
            width = d_model if info.experts is None else info.experts.dispatch_width(d_model)
            elements += tokens * info.token_fraction * num_ranks * (1 - p_none) * width
        return elements


def _stored_elements(weights: Iterable[Weight], layout: Layout) -> float:
    """Return the largest number of elements of `weights` that a rank stores."""
    return sum(weight.numel * weight.share(layout) for weight in weights)
