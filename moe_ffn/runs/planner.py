"""Cost of a step on ranks that share a model: memory of each rank, bytes sent, seconds.

Nothing is run. The model is built without numbers, and torch's own tracker follows a step of it; what a
layout divides is divided by arithmetic.

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

from moe_ffn.config.errors import Situation
from moe_ffn.data.batches import require_equal_shares
from moe_ffn.model.decoder import Block, Decoder, DecoderConfig
from moe_ffn.parallel.layout import SHARDED_PRECISIONS, Layout
from moe_ffn.runs.config import TrainConfig
from moe_ffn.training.objective import cross_entropy_of

# -- devices


@dataclass(frozen=True)
class Device:
    """One accelerator, by what its maker publishes."""

    name: str
    memory_bytes: float
    flops: float
    """Dense bfloat16 products, FLOPs a second."""
    link: float
    """Bytes a second that it sends to devices of its machine."""
    network: float
    """Bytes a second that it sends to other machines."""
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
"""SXM modules, by NVIDIA's data sheets: FLOPs without sparsity; half of what NVLink counts in two directions;
of the network what a DGX has for each GPU (200 Gb/s, then 400 Gb/s)."""

EFFICIENCY = 0.4
"""Share of the published FLOPs that a step reaches; of bandwidth too."""


# -- the model


@dataclass(frozen=True)
class Weight:
    """A parameter, and what the optimizer keeps of it."""

    shape: torch.Size
    state_bytes: int
    is_expert: bool
    """Divided among the ranks that share the experts."""

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def share(self, layout: Layout) -> float:
        """The largest part of it that a rank has."""
        rows, shards = self.shape[0], layout.shard * layout.expert
        if self.is_expert and layout.shards_each_expert(rows):
            return 1 / shards
        return math.ceil(rows / shards) / rows


@dataclass(frozen=True)
class Sizes:
    """A model without numbers: its parameters by layer, and what a step keeps for its backward pass."""

    layers: tuple[tuple[Weight, ...], ...]
    outside: tuple[Weight, ...]
    """The parameters of no layer: embeddings, the last norm, the output."""

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
    """Return the bytes of the optimizer's state by the parameter's id, from a step without numbers."""
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
    """Bytes that the forward pass of one rank keeps for the backward pass."""

    outside: float
    """Beside the layers, with the logits and their gradient: the peak of a step is where these are made."""
    by_layer: tuple[float, ...]
    recomputed: float
    """Bytes to compute one layer again, if its activations are not kept."""

    def with_more(self, of_layer: float, *, is_kept: bool) -> Activations:
        """With so many bytes more of each layer, which are kept, or computed again."""
        if is_kept:
            return replace(self, by_layer=tuple(size + of_layer for size in self.by_layer))
        return replace(self, recomputed=self.recomputed + of_layer)

    @property
    def total(self) -> float:
        return sum(self.peak_with(0.0, [0.0] * len(self.by_layer)))

    def peak_with(self, outside: float, by_layer: Sequence[float]) -> tuple[float, float]:
        """(gradients, activations) at the moment of the backward pass when their sum is largest.

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
    """Followed on a model of one layer of each kind, and of two: equal layers keep equally much."""
    model = config.model
    ffns = model.layer_ffns()
    kept = model.activation_checkpointing
    kinds = {ffn.model_dump_json(): ffn for ffn in ffns}

    def followed(*chosen: Any, checkpointing: Any = kept) -> float:
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
        one = followed(ffn)
        of_kind[name] = followed(ffn, ffn) - one
        outside = max(outside, one - of_kind[name])
        if kept:
            whole = followed(ffn, ffn, checkpointing=False) - followed(ffn, checkpointing=False)
            # Beside a block that is computed again attention has kept its own.
            recomputed = max(recomputed, whole - of_kind[name] if kept == "ffn" else whole)
    return Activations(outside, tuple(of_kind[f.model_dump_json()] for f in ffns), recomputed)


def _kept_bytes(
    config: TrainConfig, model: DecoderConfig, num_sequences: int, precision: str
) -> float:
    """At the peak up to where the gradient of the logits is there, beside the weights."""
    decoder = model.build_empty(*config.data.text_sizes)
    if precision == "bf16-true":
        decoder = decoder.bfloat16()
    with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of products in two formats, which are not computed
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


# -- what a layout takes


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the peak of a step, by what they hold then."""

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    """Weights and gradients that are whole for a moment: what is outside of layers, and two layers."""
    activations: float

    @property
    def total(self) -> float:
        return sum(astuple(self))


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in a step, by why."""

    weights: float
    """Gathered before use, those of layers again in the backward pass."""
    gradients: float
    """Added up over the ranks that shard a weight."""
    copies: float
    """Added up over copies of the model."""
    tokens: float
    """To their experts and back, and their gradients: as many as in perfect balance."""

    @property
    def total(self) -> float:
        return sum(astuple(self))


@dataclass(frozen=True)
class LayoutPlan:
    """A run on a layout of its ranks."""

    layout: Layout
    device: Device
    memory: Memory
    traffic: Traffic
    compute_seconds: float
    """Seconds of the products of a step."""
    beside_seconds: float
    """Seconds to send weights and gradients, at the same time as the products."""
    between_seconds: float
    """Seconds to send tokens, which the products wait for."""
    tokens: int
    """Tokens of a step, of all ranks."""

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.device.memory_bytes

    @property
    def seconds(self) -> float:
        """Seconds of a step in perfect balance."""
        return max(self.compute_seconds, self.beside_seconds) + self.between_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def layouts(config: TrainConfig, num_ranks: int) -> Iterator[Layout]:
    """Every layout of so many ranks that the model, its precision and its optimizer allow."""
    if _precision(config) not in SHARDED_PRECISIONS or not config.optimizer.takes_shards:
        yield Layout(num_ranks)
        return
    empty = config.model.build_empty(*config.data.text_sizes)
    for expert in _divisors(num_ranks):
        if expert > 1 and (
            not config.model.router_infos() or config.model.refusal(Situation(num_ranks=expert))
        ):
            continue
        for shard in _divisors(num_ranks // expert):
            layout = Layout(num_ranks // expert // shard, shard, expert)
            if layout.refusal_of(empty) is None:
                yield layout


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def plan_layouts(
    config: TrainConfig, num_ranks: int, device: Device, efficiency: float = EFFICIENCY
) -> list[LayoutPlan]:
    """A plan for every layout, the fastest that fits first, then those that do not, the smallest first.

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
    sent = 2 if precision == "bf16-mixed" else item  # a number of a token between experts
    data, model, num_batches = config.data, config.model, config.trainer.accumulate_grad_batches
    tokens = num_batches * (data.batch_size // layout.num_ranks) * data.seq_len
    traffic = _traffic(config, sizes, layout, item, sent, tokens)
    if layout.expert > 1:
        # A rank keeps the tokens that its experts received, its own among them.
        numbers = _numbers_received(config, layout, tokens // num_batches) / model.num_layers
        is_kept = not model.activation_checkpointing
        activations = activations.with_more(sent * numbers, is_kept=is_kept)

    def pace(num_neighbours: int) -> float:
        """Return the bytes per second between `num_neighbours` ranks, on one machine or across machines."""
        return device.link if num_neighbours <= device.per_machine else device.network

    beside = (traffic.weights + traffic.gradients) / pace(layout.shard * layout.expert)
    beside += traffic.copies / pace(layout.num_ranks)
    ffns = model.layer_ffns()
    forward = model.flops_per_token(*config.data.text_sizes)
    of_ffns = sum(ffn.flops_per_token(model.d_model, data.seq_len) for ffn in ffns)
    # Backward is twice forward, and what is not kept is computed once more.
    again = {"ffn": of_ffns, False: 0}.get(model.activation_checkpointing, forward)
    per_flop = tokens / device.flops / efficiency
    return LayoutPlan(
        layout,
        device,
        _memory(sizes, layout, item, activations, num_batches),
        traffic,
        compute_seconds=per_flop * (3 * forward + again),
        beside_seconds=beside / efficiency,
        between_seconds=traffic.tokens / pace(layout.expert) / efficiency,
        tokens=tokens * layout.num_ranks,
    )


def _memory(
    sizes: Sizes, layout: Layout, item: int, activations: Activations, num_batches: int
) -> Memory:
    """Return the memory of a rank; numbers have `item` bytes."""
    local = item * _local(sizes.all, layout)
    state = item / 4 * sum(w.state_bytes * w.share(layout) for w in sizes.all)
    outside = item * _gathered(sizes.outside, layout)
    layers = [item * _gathered(layer, layout) for layer in sizes.layers]
    if num_batches > 1:  # they are added up whole, until the last one
        gradients, kept = outside + sum(layers), activations.total
    else:
        by_layer = [item * _local(layer, layout) for layer in sizes.layers]
        gradients, kept = activations.peak_with(item * _local(sizes.outside, layout), by_layer)
    if not layout.is_sharded:  # the buckets in which DistributedDataParallel adds gradients up
        buckets = local if layout.num_ranks > 1 else 0.0
        return Memory(local, gradients, state, buckets, kept)
    # What is outside of layers stays; the next layer is gathered beside one, whose gradient is whole too.
    return Memory(local, gradients, state, 2 * outside + 3 * max(layers), kept)


def _traffic(
    config: TrainConfig, sizes: Sizes, layout: Layout, item: int, sent: int, tokens: int
) -> Traffic:
    """Return the traffic of a rank; numbers have `item` bytes, and `sent` bytes in tokens."""
    sharded = item * sum(_moved_once(w, layout) for w in sizes.all)
    of_layers = item * sum(_moved_once(w, layout) for layer in sizes.layers for w in layer)
    numbers_sent = _numbers_received(config, layout, tokens) * (1 - 1 / layout.expert)
    # There and back, their gradients, and what is not kept travels once more.
    times = 6 if config.model.activation_checkpointing else 4
    return Traffic(
        weights=config.trainer.accumulate_grad_batches * (sharded + of_layers),
        gradients=sharded,
        copies=2 * item * _local(sizes.all, layout) * (1 - 1 / layout.data),
        tokens=times * sent * numbers_sent,
    )


def _local(weights: Iterable[Weight], layout: Layout) -> float:
    """Numbers of these weights that one rank has, at the most."""
    return sum(weight.numel * weight.share(layout) for weight in weights)


def _gathered(weights: Iterable[Weight], layout: Layout) -> float:
    """Numbers of these weights that one rank holds while it computes with them."""
    return sum(w.numel / layout.expert if w.is_expert else w.numel for w in weights)


def _moved_once(weight: Weight, layout: Layout) -> float:
    """Numbers that a rank sends when the parts of a weight are gathered, or its gradient is scattered."""
    num_shards = layout.shard if weight.is_expert else layout.shard * layout.expert
    return weight.numel * weight.share(layout) * (num_shards - 1)


def _numbers_received(config: TrainConfig, layout: Layout, tokens: int) -> float:
    """Numbers of all layers that the experts of a rank receive: a token once, however many of them it visits.

    In perfect balance, k experts drawn from E: a rank has none of them with the probability of drawing all of
    them from those elsewhere, or from those without a network.
    """
    numbers, ranks = 0.0, layout.expert
    for info in config.model.router_infos().values():
        num = info.num_experts
        chosen = round(info.router.experts_per_token(num))
        none = math.comb(num - info.num_networks // ranks, chosen) / math.comb(num, chosen)
        d_model = config.model.d_model
        width = d_model if info.experts is None else info.experts.dispatch_width(d_model)
        numbers += tokens * info.share * ranks * (1 - none) * width
    return numbers
