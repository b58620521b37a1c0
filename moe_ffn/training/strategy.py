"""Lightning strategy for a model that `moe_ffn.training.parallel` shards over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from moe_ffn.training.parallel.sharding import empty_shard_like, shard_like
from moe_ffn.training.recovery.checkpoint_file import SavedTensors


class ShardedStrategy(ModelParallelStrategy):
    """Strategy for a model that shards itself in `configure_model`.

    Each rank writes and reads only its part of a checkpoint, which any number of ranks can load.
    """

    def __init__(self, num_ranks: int) -> None:
        # Lightning builds a mesh of these sizes, but the model uses its own.
        super().__init__(data_parallel_size=num_ranks, tensor_parallel_size=1)

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return super(ModelParallelStrategy, self).optimizer_state(optimizer)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        weights = checkpoint["state_dict"]
        if isinstance(weights, SavedTensors):
            weights.read_into(self.lightning_module.state_dict())
        else:
            options = StateDictOptions(full_state_dict=True, strict=strict)
            set_model_state_dict(self.lightning_module, dict(weights), options=options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            sharded = _sharded_state(state["state"], parameters)
            optimizer.load_state_dict({**state, "state": sharded})

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return self.checkpoint_io.load_checkpoint(checkpoint_path)


def _sharded_state(saved: Mapping[int, Any], parameters: Sequence[Tensor]) -> dict[int, Any]:
    """Return index of a parameter -> optimizer state, sharded like the parameter."""
    is_in_shards = isinstance(saved, SavedTensors)
    shard = empty_shard_like if is_in_shards else shard_like
    sharded = {
        index: tree_map(lambda value, p=parameters[index]: shard(value, p), state)
        for index, state in (saved.described if is_in_shards else saved).items()
    }
    if is_in_shards:
        saved.read_into(sharded)
    return sharded
