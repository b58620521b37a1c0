"""Cost of a training step on a layout of ranks: memory of each rank, bytes sent, seconds.

Nothing is computed. torch's memory tracker follows a step of the model on fake tensors, and the results are
then divided among the ranks of a layout by arithmetic.

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
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from moe_ffn.config.errors import UseCase
from moe_ffn.data.batches import require_equal_shares
from moe_ffn.model.decoder import Block, Decoder, DecoderConfig
from moe_ffn.parallel.layout import SHARDED_PRECISIONS, Layout
from moe_ffn.runs.config import TrainConfig
from moe_ffn.training.objective import cross_entropy_of

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
which NVIDIA counts in both directions; network is that of one GPU in a DGX (200 Gb/s, later 400 Gb/s)."""

EFFICIENCY = 0.4
"""Share of the published FLOPs and bandwidth that a step reaches."""


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


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model's parameters, by layer."""

    layers: tuple[tuple[Weight, ...], ...]
    outside: tuple[Weight, ...]
    """Parameters outside of layers: embeddings, the final norm, the output matrix."""

    @classmethod
    def of(cls, config: TrainConfig) -> Sizes:
        decoder = config.model.build_empty(*config.data.text_sizes)
        state = _state_bytes(config, decoder)
        experts = _expert_parameters(decoder)

        def weights(parameters: Iterable[nn.Parameter]) -> tuple[Weight, ...]:
            return tuple(Weight(p.shape, state[id(p)], id(p) in experts) for p in parameters)

        layers = tuple(weights(layer.parameters()) for layer in decoder.layers)
        inside = {id(p) for layer in decoder.layers for p in layer.parameters()}
        return cls(layers, weights(p for p in decoder.parameters() if id(p) not in inside))

    @cached_property
    def all(self) -> tuple[Weight, ...]:
        return (*self.outside, *(weight for layer in self.layers for weight in layer))


def _state_bytes(config: TrainConfig, decoder: Decoder) -> dict[int, int]:
    """Return `id` of a parameter -> bytes of its optimizer state, from a step on the meta device."""
    optimizer = config.optimizer.build(decoder)
    for parameter in decoder.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    return {
        id(parameter): sum(
            value.numel() * value.element_size()
            for value in optimizer.state[parameter].values()
            if isinstance(value, Tensor) and value.ndim
        )
        for parameter in decoder.parameters()
    }


def _expert_parameters(decoder: Decoder) -> set[int]:
    found: set[int] = set()

    def note(experts: nn.Module, num_experts: int) -> Any:
        found.update(id(parameter) for parameter in experts.parameters())

    for layer in decoder.layers:
        cast("Block", layer).ffn.place_experts(note)
    return found


@dataclass(frozen=True)
class Activations:
    """Bytes of activations that the forward pass of a rank saves for the backward pass."""

    outside: float
    """Bytes outside of layers, including the logits and their gradient, which exist at the peak of a step."""
    by_layer: tuple[float, ...]
    recomputed: float
    """Bytes to recompute one layer, with activation checkpointing."""

    def with_more(self, of_layer: float, *, is_kept: bool) -> Activations:
        """Return a copy with `of_layer` more bytes per layer, which are saved, or else recomputed."""
        if is_kept:
            return replace(self, by_layer=tuple(size + of_layer for size in self.by_layer))
        return replace(self, recomputed=self.recomputed + of_layer)

    @property
    def total(self) -> float:
        return sum(self.peak_with(0.0, [0.0] * len(self.by_layer)))

    def peak_with(self, outside: float, by_layer: Sequence[float]) -> tuple[float, float]:
        """Return bytes of (gradients, activations) at the time in the backward pass when their sum peaks.

        Args:
            outside, by_layer: bytes of the gradients.
        """
        left = sum(self.by_layer)
        moments, made = [(0.0, self.outside + left)], outside
        for kept, gradient in reversed(list(zip(self.by_layer, by_layer, strict=True))):
            made += gradient
            moments.append((made, left + self.recomputed))
            left -= kept
        return max(moments, key=sum)


def activations_of(config: TrainConfig, num_sequences: int, precision: str) -> Activations:
    """Trace models of one and two layers of each kind; the difference is one layer."""
    model = config.model
    ffns = model.layer_ffns()
    kept = model.activation_checkpointing
    kinds = {ffn.model_dump_json(): ffn for ffn in ffns}

    def traced(*chosen: Any, checkpointing: Any = kept) -> float:
        smaller = {
            **model.to_dict(),
            "num_layers": len(chosen),
            "ffn": chosen[0].to_dict(),
            "ffn_at": {str(place): ffn.to_dict() for place, ffn in enumerate(chosen)},
            "activation_checkpointing": checkpointing,
        }
        return _kept_bytes(config, type(model).model_validate(smaller), num_sequences, precision)

    of_kind: dict[str, float] = {}
    recomputed = outside = 0.0
    for name, ffn in kinds.items():
        one = traced(ffn)
        of_kind[name] = traced(ffn, ffn) - one
        outside = max(outside, one - of_kind[name])
        if kept:
            whole = traced(ffn, ffn, checkpointing=False) - traced(ffn, checkpointing=False)
            # If only the feed-forward block is recomputed, the activations of attention are saved already.
            recomputed = max(recomputed, whole - of_kind[name] if kept == "ffn" else whole)
    return Activations(outside, tuple(of_kind[f.model_dump_json()] for f in ffns), recomputed)


def _kept_bytes(
    config: TrainConfig, model: DecoderConfig, num_sequences: int, precision: str
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
        with tracker, torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            output = decoder(ids_BS)
            loss = cross_entropy_of(output.logits, ids_BS)
            torch.autograd.grad(loss, output.logits)
        (parts,) = (
            of_device
            for device, of_device in tracker.get_tracker_snapshot("peak").items()
            if device.type == "cpu"
        )
    named = {str(getattr(kind, "value", kind)): value for kind, value in parts.items()}
    return named["Total"] - named["Parameter"] - named["Buffer"]


# -- the cost of a layout


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank at the peak of a step."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    """Weights and gradients that are whole temporarily: those outside of layers, and those of two layers."""
    activations: float

    @property
    def total(self) -> float:
        return sum(astuple(self))


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends in a step."""

    weights: float
    """Weights to gather before use; those of layers are gathered again in the backward pass."""
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
    memory: Memory
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
    config: TrainConfig, num_ranks: int, device: Device, efficiency: float = EFFICIENCY
) -> list[LayoutPlan]:
    """Return a plan for every layout: first those that fit, fastest first; then the others, smallest first.

    Raises:
        ConfigError: the batch cannot be divided among the ranks.
    """
    require_equal_shares(config.data.batch_size, num_ranks)
    precision = _precision(config)
    sizes = Sizes.of(config)
    num_sequences = config.data.batch_size // num_ranks
    activations = activations_of(config, num_sequences, precision)
    plans = [
        _plan(config, sizes, layout, device, activations, precision, efficiency)
        for layout in layouts(config, num_ranks)
    ]
    return sorted(
        plans, key=lambda p: (not p.fits, p.seconds if p.fits else p.memory.total, p.memory.total)
    )


def _precision(config: TrainConfig) -> str:
    precision = config.trainer.precision
    return "bf16-mixed" if precision == "auto" else precision


def _plan(
    config: TrainConfig,
    sizes: Sizes,
    layout: Layout,
    device: Device,
    activations: Activations,
    precision: str,
    efficiency: float,
) -> LayoutPlan:
    item = {"bf16-true": 2, "64-true": 8}.get(precision, 4)
    sent = 2 if precision == "bf16-mixed" else item  # bytes of one element of a sent token
    data, model, num_batches = config.data, config.model, config.trainer.accumulate_grad_batches
    tokens = num_batches * (data.batch_size // layout.num_ranks) * data.seq_len
    traffic = _traffic(config, sizes, layout, item, sent, tokens)
    if layout.expert > 1:
        # A rank saves the tokens that its experts received, including its own.
        numbers = _numbers_received(config, layout, tokens // num_batches) / model.num_layers
        is_kept = not model.activation_checkpointing
        activations = activations.with_more(sent * numbers, is_kept=is_kept)

    def pace(num_neighbours: int) -> float:
        """Return the bandwidth between `num_neighbours` ranks, on one machine or across machines."""
        return device.link if num_neighbours <= device.per_machine else device.network

    overlapped = (traffic.weights + traffic.gradients) / pace(layout.shard * layout.expert)
    overlapped += traffic.copies / pace(layout.num_ranks)
    ffns = model.layer_ffns()
    forward = model.flops_per_token(*config.data.text_sizes)
    of_ffns = sum(ffn.flops_per_token(model.d_model, data.seq_len) for ffn in ffns)
    # The backward pass costs twice the forward pass, plus what it recomputes.
    again = {"ffn": of_ffns, False: 0}.get(model.activation_checkpointing, forward)
    per_flop = tokens / device.flops / efficiency
    return LayoutPlan(
        layout,
        device,
        _memory(sizes, layout, item, activations, num_batches),
        traffic,
        compute_seconds=per_flop * (3 * forward + again),
        overlapped_seconds=overlapped / efficiency,
        token_seconds=traffic.tokens / pace(layout.expert) / efficiency,
        tokens=tokens * layout.num_ranks,
    )


def _memory(
    sizes: Sizes, layout: Layout, item: int, activations: Activations, num_batches: int
) -> Memory:
    """Return the memory of a rank; `item` is the number of bytes of one element."""
    local = item * _local(sizes.all, layout)
    state = item / 4 * sum(w.state_bytes * w.share(layout) for w in sizes.all)
    outside = item * _gathered(sizes.outside, layout)
    layers = [item * _gathered(layer, layout) for layer in sizes.layers]
    if num_batches > 1:  # gradients accumulate unsharded until the last batch
        gradients, kept = outside + sum(layers), activations.total
    else:
        by_layer = [item * _local(layer, layout) for layer in sizes.layers]
        gradients, kept = activations.peak_with(item * _local(sizes.outside, layout), by_layer)
    if not layout.is_sharded:  # DistributedDataParallel reduces gradients in buckets
        buckets = local if layout.num_ranks > 1 else 0.0
        return Memory(local, gradients, state, buckets, kept)
    # Parameters outside of layers stay gathered, with their gradients. The next layer is gathered while the
    # current layer still has its weights and gradients.
    return Memory(local, gradients, state, 2 * outside + 3 * max(layers), kept)


def _traffic(
    config: TrainConfig, sizes: Sizes, layout: Layout, item: int, sent: int, tokens: int
) -> Traffic:
    """Return the traffic of a rank.

    Args:
        item, sent: bytes of one element of a weight, and of a sent token.
    """
    sharded = item * sum(_moved_once(w, layout) for w in sizes.all)
    of_layers = item * sum(_moved_once(w, layout) for layer in sizes.layers for w in layer)
    numbers_sent = _numbers_received(config, layout, tokens) * (1 - 1 / layout.expert)
    # To the experts and back, forward and backward; recomputing the forward pass sends tokens again.
    times = 6 if config.model.activation_checkpointing else 4
    return Traffic(
        weights=config.trainer.accumulate_grad_batches * (sharded + of_layers),
        gradients=sharded,
        copies=2 * item * _local(sizes.all, layout) * (1 - 1 / layout.data),
        tokens=times * sent * numbers_sent,
    )


def _local(weights: Iterable[Weight], layout: Layout) -> float:
    """Return the largest number of elements of `weights` that a rank stores."""
    return sum(weight.numel * weight.share(layout) for weight in weights)


def _gathered(weights: Iterable[Weight], layout: Layout) -> float:
    """Return the number of elements of `weights` that a rank holds while it computes with them."""
    return sum(w.numel / layout.expert if w.is_expert else w.numel for w in weights)


def _moved_once(weight: Weight, layout: Layout) -> float:
    """Return the elements that a rank sends to gather a weight, or to reduce-scatter its gradient."""
    num_shards = layout.shard if weight.is_expert else layout.shard * layout.expert
    return weight.numel * weight.share(layout) * (num_shards - 1)


def _numbers_received(config: TrainConfig, layout: Layout, tokens: int) -> float:
    """Return the number of elements that the experts of a rank receive, summed over layers.

    A rank receives a token once, even if the token chooses several of its experts. In perfect balance a token
    draws k of E experts. With probability `none` it draws no expert that the rank computes.
    """
    numbers, ranks = 0.0, layout.expert
    for info in config.model.router_infos().values():
        num = info.num_experts
        chosen = round(info.router.experts_per_token(num))
        none = math.comb(num - info.num_networks // ranks, chosen) / math.comb(num, chosen)
        d_model = config.model.d_model
        width = d_model if info.experts is None else info.experts.dispatch_width(d_model)
        numbers += tokens * info.token_fraction * ranks * (1 - none) * width
    return numbers
