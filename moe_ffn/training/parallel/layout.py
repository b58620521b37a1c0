"""Division of a run among processes: options, and the sizes of the mesh."""

from __future__ import annotations

import math
from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field, model_validator

from moe_ffn.config.base import MAX_COUNT, Config
from moe_ffn.config.errors import ConfigError

if TYPE_CHECKING:
    from moe_ffn.experts.base import Experts
    from moe_ffn.model.decoder import Decoder, DecoderLayer

REST = -1
"""Value of an option that means all remaining processes."""


class ParallelConfig(Config, frozen=True):
    """A mesh of processes, data x shard x expert; each process reads its own part of a batch.

    The weights of an expert are on one rank along `expert`, and are sharded along `shard`. All other weights
    are sharded over shard x expert. The `data` dimension holds copies.
    """

    data: int = Field(default=REST, ge=REST, le=MAX_COUNT)
    """Copies of the model, each on shard x expert processes; -1: all remaining processes. With shard and
    expert at 1, this is DistributedDataParallel."""
    shard: int = Field(default=1, ge=REST, le=MAX_COUNT)
    """Processes over which weights, gradients and optimizer state are sharded (FSDP2); -1: all remaining
    processes."""
    expert: int = Field(default=1, ge=REST, le=MAX_COUNT)
    """Processes that divide the experts of a layer among them, and exchange tokens; -1: all remaining
    processes."""

    @model_validator(mode="after")
    def _check_sizes(self) -> ParallelConfig:
        sizes = self.to_dict()
        if 0 in sizes.values():
            name = next(name for name, size in sizes.items() if size == 0)
            raise ValueError(f"{name} must be at least 1, or -1 for the rest, got 0")
        if list(sizes.values()).count(REST) > 1:
            names = " and ".join(name for name, size in sizes.items() if size == REST)
            raise ValueError(
                f"{names} are all -1 (the remaining processes), but only one of them may be; set the others "
                "to numbers (the default of data is -1; try data: 1)"
            )
        return self

    def layout(self, num_ranks: int) -> Layout:
        """Return the mesh sizes for `num_ranks` processes; ConfigError if no product of them fits."""
        sizes = self.to_dict()
        known = math.prod(size for size in sizes.values() if size != REST)
        rest, remainder = divmod(num_ranks, known)
        layout = Layout(**{name: rest if size == REST else size for name, size in sizes.items()})
        if remainder or layout.num_ranks != num_ranks:
            shown = " x ".join(f"{name} ({size})" for name, size in sizes.items() if size != REST)
            multiple = "a multiple of " if REST in sizes.values() else ""
            raise ConfigError(
                f"parallel: {shown} needs {multiple}{known} processes, and this run has {num_ranks}; give "
                f"--trainer.devices {known}, start it with torchrun --nproc-per-node {known}, or change "
                "one of them"
            )
        return layout


SHARDED_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")
"""Precisions in which a sharded model can be trained."""


@dataclass(frozen=True)
class Layout:
    """Number of processes along each dimension of the mesh."""

    data: int = 1
    shard: int = 1
    expert: int = 1

    @property
    def num_ranks(self) -> int:
        return math.prod(astuple(self))

    def describe(self) -> str:
        """Return `4 processes: data 2 x shard 1 x expert 2`."""
        sizes = " x ".join(f"{name} {size}" for name, size in asdict(self).items())
        return f"{self.num_ranks} processes: {sizes}"

    def shards_each_expert(self, num_experts: int) -> bool:
        """Return True if FSDP shards each expert, because there are fewer experts per rank than shards.

        Without expert parallelism, FSDP divides the list of experts, and some ranks may have none.
        """
        return self.expert > 1 and num_experts // self.expert < self.shard

    @property
    def is_sharded(self) -> bool:
        """True if no rank has all weights."""
        return self.shard * self.expert > 1

    def unsupported_reason(self, decoder: Decoder) -> str | None:
        """Return the reason why this cannot shard a decoder, perhaps on the meta device; None if it can."""
        reasons: list[str] = []

        def collect_reasons(experts: Experts, num_experts: int) -> Any:
            for name, weight in experts.named_parameters():
                if self.expert > 1 and weight.shape[:1] != (num_experts,):
                    reasons.append(
                        f"parallel.expert ({self.expert}) divides weights whose first axis counts the "
                        f"{num_experts} experts, but these share '{name}' of shape {tuple(weight.shape)}; "
                        "set parallel.expert to 1"
                    )
                elif self.shards_each_expert(num_experts) and weight.shape[1] % self.shard:
                    reasons.append(
                        f"parallel.shard ({self.shard}) must divide the {weight.shape[1]} rows of an "
                        f"expert's '{name}', because parallel.expert ({self.expert}) leaves "
                        f"{num_experts // self.expert} of {num_experts} experts to {self.shard} ranks; "
                        "change one of them"
                    )

        for layer in decoder.layers:
            cast("DecoderLayer", layer).ffn.place_experts(collect_reasons)
        return reasons[0] if reasons else None


SINGLE_PROCESS = Layout()
