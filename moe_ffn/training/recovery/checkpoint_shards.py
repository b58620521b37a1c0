"""Tensors of a checkpoint that are sharded over ranks: in a folder beside its file, which names it.

Every rank writes its own parts, as safetensors, and none gathers them. The file of the checkpoint is written
after them and holds their SHA-256: a folder that no file names is nothing, and is removed.
"""

from __future__ import annotations

import errno
import math
import re
import secrets
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten_with_path, tree_map_only

from moe_ffn.files import kind_of, sha256_of, split_into_files, sync_folder

SHARDS = "shards"
"""The key of the folder and the digests of its files, in the values of a checkpoint."""

FOLDER = re.compile(r"[0-9a-f]{16}\.shards")
_FILE = re.compile(r"shard-[0-9]{5}-model-[0-9]{5}-of-[0-9]{5}\.safetensors")

MAX_FILE_BYTES = 2**26
"""Of a rank, or what its largest tensor has more: each file is made in memory before it is written."""


class CheckpointError(Exception):
    """Why a checkpoint cannot be used: a phrase that goes after the name of its file."""


def is_sharded(values: Mapping[str, Any]) -> bool:
    """Whether the weights in the values of a checkpoint are on several ranks."""
    weights = values.get("state_dict")
    return isinstance(weights, Mapping) and any(isinstance(w, DTensor) for w in weights.values())


def write_shards(values: dict[str, Any], parent: Path) -> dict[str, Any]:
    """Write the parts of this rank into a folder in `parent`, together with all other ranks.

    Args:
        parent: that of the first rank counts, which alone knows the folder of the run.

    Returns:
        `values` with shapes in place of the tensors that were written, and `SHARDS`.

    Raises:
        OSError: on every rank, where one could not write, or wrote on another disk.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    is_first = dist.get_rank() == 0
    folder = _of_first(parent.absolute() / f"{secrets.token_hex(8)}.shards")
    tensors: dict[str, Tensor] = {}
    shapes: dict[Any, Tensor] = {}
    for path, value in tree_flatten_with_path(values)[0]:
        if isinstance(value, DTensor) and _memory(value) not in shapes:
            # One object for a tensor that has several names, which `torch.save` keeps as one.
            shapes[_memory(value)] = torch.empty(value.shape, dtype=value.dtype, device="meta")
            tensors[_name(path)] = value
    mine: dict[str, str] | OSError
    try:
        # It makes the folder too, where an error of one rank is one of all.
        writer = HuggingFaceStorageWriter(
            str(folder), _file_numbers(tensors), save_distributed=True
        )
        save(tensors, storage_writer=writer)
        own = f"shard-{dist.get_rank() + 1:05d}-"
        mine = {p.name: sha256_of(p) for p in folder.iterdir() if p.name.startswith(own)}
    except OSError as error:
        mine = error
    except CheckpointException as error:
        mine = _disk_error(error)
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)
    problems = [found for found in of_ranks if isinstance(found, OSError)]
    digests = {} if problems else {k: v for found in of_ranks for k, v in found.items()}
    if not problems and not _of_first(all((folder / name).exists() for name in digests)):
        problems = [OSError(errno.ENOENT, "a rank wrote on a disk of its own", str(folder))]
    if problems:
        if is_first:
            shutil.rmtree(folder, ignore_errors=True)
        raise problems[0]
    if is_first:
        sync_folder(folder)
        sync_folder(parent)
    described = tree_map_only(DTensor, lambda value: shapes[_memory(value)], values)
    return {**described, SHARDS: {"folder": folder.name, "sha256": digests}}


def _file_numbers(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The number of the file of each tensor, from 1 on; the same on every rank."""
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    files = split_into_files(sizes, MAX_FILE_BYTES * dist.get_world_size())
    return {name: number for number, names in enumerate(files, start=1) for name in names}


def _of_first(value: Any) -> Any:
    """What the first rank gave."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def _disk_error(error: Any) -> OSError:
    """The error of a disk behind one of torch's; any other is raised again."""
    for failure, _ in error.failures.values():
        if isinstance(failure, OSError):
            return failure
    raise error


class SavedTensors(Mapping[Any, Any]):
    """Values whose tensors are in shards, and are read when they are asked for: one value at a time."""

    def __init__(
        self,
        described: Mapping[Any, Any],
        names: Mapping[int, str],
        parts: Mapping[str, list[tuple[Any, Path]]],
    ) -> None:
        """
        Args:
            described: the same values, with tensors of the meta device for those in shards.
            names: of these in the shards, by their `id`.
            parts: the place of each part in its tensor, and its file, by name.
        """
        self.described = described
        self._names = names
        self._parts = parts

    def __getitem__(self, key: Any) -> Any:
        return tree_map_only(Tensor, self._read, self.described[key])

    def __iter__(self) -> Iterator[Any]:
        return iter(self.described)

    def __len__(self) -> int:
        return len(self.described)

    def _read(self, shape: Tensor) -> Tensor:
        from safetensors import safe_open

        name = self._names.get(id(shape))
        if name is None:
            return shape  # it is in no shard
        whole = torch.empty(shape.shape, dtype=shape.dtype)
        for offsets, path in self._parts[name]:
            with safe_open(path, framework="pt") as file:
                part = file.get_tensor(name)
            place = (slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))
            whole[tuple(place)] = part
        return whole

    def under(self, prefix: str) -> SavedTensors:
        """The tensors whose names begin with `prefix`, without it."""
        described = {
            name.removeprefix(prefix): shape
            for name, shape in self.described.items()
            if str(name).startswith(prefix)
        }
        return SavedTensors(described, self._names, self._parts)

    def read_into(self, tensors: Mapping[Any, Any]) -> None:
        """Fill tensors with what is saved under their keys; of those that are sharded the part on this rank.

        Args:
            tensors: nested as the values are.
        """
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        wanted: dict[str, Tensor] = {}
        for path, mine in tree_flatten_with_path(dict(tensors))[0]:
            found: Any = self.described
            for key in path:
                found = found[_key(key)]
            if not isinstance(mine, Tensor):
                continue
            if (name := self._names.get(id(found))) is None:
                mine.copy_(found)
            else:
                wanted[name] = mine  # of several names of one tensor any will do
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            (folder,) = {path.parent for parts in self._parts.values() for _, path in parts}
            # Every rank reads for itself, and none waits for another.
            load(wanted, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


def read_shards(values: Mapping[str, Any], parent: Path) -> dict[str, Any]:
    """What `write_shards` was given, the weights and the optimizer's state of them as `SavedTensors`.

    Raises:
        CheckpointError: the folder is not what was written.
        OSError: a file cannot be read.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    folder = verify_shards(values, parent)
    described = {k: v for k, v in values.items() if k != SHARDS}
    written = HuggingFaceStorageReader(str(folder)).read_metadata()
    names: dict[int, str] = {}
    for path, value in tree_flatten_with_path(described)[0]:
        if isinstance(value, Tensor) and value.is_meta and id(value) not in names:
            name = names[id(value)] = _name(path)
            # Before memory is taken: the sizes that a file claims cost nothing.
            _require_parts(name, value, written.state_dict_metadata.get(name))
    parts: dict[str, list[tuple[Any, Path]]] = {name: [] for name in names.values()}
    for index, info in written.storage_data.items():
        if index.fqn in parts:
            parts[index.fqn].append((index.offset, folder / Path(info.relative_path).name))

    if isinstance(states := described.get("optimizer_states"), list):
        described["optimizer_states"] = [{**s} if isinstance(s, dict) else s for s in states]
    for holder, key in _of_parameters(described):
        holder[key] = SavedTensors(holder[key], names, parts)
    return described


def read_all(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a checkpoint with all their tensors, in place."""
    for holder, key in _of_parameters(values):
        holder[key] = dict(holder[key])
    return values


def _of_parameters(values: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Where the tensors are that may be sharded: mappings, each as what holds it and its key there."""
    optimizers = values.get("optimizer_states")
    holders = [(values, "state_dict")]
    holders += [(o, "state") for o in optimizers] if isinstance(optimizers, list) else []
    for holder, key in holders:
        if isinstance(holder, dict) and isinstance(holder.get(key), Mapping):
            yield holder, key


def _require_parts(name: str, shape: Tensor, written: Any) -> None:
    """CheckpointError unless the parts in the files make a whole tensor."""
    if written is None:
        raise CheckpointError(f"lacks the parts of '{name}'")
    filled = sum(math.prod(chunk.sizes) for chunk in written.chunks)
    if (
        written.size != shape.shape
        or filled != shape.numel()
        or written.properties.dtype != shape.dtype
    ):
        raise CheckpointError(
            f"has parts of '{name}' that do not make a {tuple(shape.shape)} of it"
        )


def verify_shards(values: Mapping[str, Any], parent: Path) -> Path:
    """The folder with the parts, each file of which matches its checksum.

    Raises:
        CheckpointError: one does not.
        OSError: it cannot be read.
    """
    found = values[SHARDS]
    name, digests = (
        (found.get("folder"), found.get("sha256")) if isinstance(found, Mapping) else (None, None)
    )
    if not (isinstance(name, str) and FOLDER.fullmatch(name) and isinstance(digests, Mapping)):
        raise CheckpointError(f"is malformed: {SHARDS}: must name a folder and its files")
    folder = parent / name
    if (kind := kind_of(folder)) != "a folder":
        raise CheckpointError(f"lacks its tensors: '{name}' is {kind or 'missing'}")
    there = sorted(path.name for path in folder.iterdir())
    if there != sorted(digests) or not all(map(_FILE.fullmatch, there)):
        raise CheckpointError(f"has other files in '{name}' than were written")
    for file, digest in digests.items():
        if (kind := kind_of(folder / file)) != "a file":
            raise CheckpointError(f"has no file '{name}/{file}', but {kind}")
        if sha256_of(folder / file) != digest:
            raise CheckpointError(f"does not match the checksum of '{name}/{file}': it was damaged")
    return folder


def remove_shards_except(folder: Path, kept: Iterable[str | None]) -> None:
    """Remove the folders of shards in `folder` but for these, and no file in them that is no shard."""
    kept = set(kept)
    for place in list(folder.iterdir()):
        if not FOLDER.fullmatch(place.name) or place.name in kept:
            continue
        with suppress(OSError):  # of one that holds something else
            if kind_of(place) == "a folder":
                for file in place.iterdir():
                    if _FILE.fullmatch(file.name):
                        file.unlink()
                place.rmdir()


def _memory(tensor: DTensor) -> tuple[Any, ...]:
    """Where the part on this rank lies: equal for names of one tensor."""
    local = tensor.to_local()
    return local.untyped_storage()._cdata, local.storage_offset(), local.shape, tensor.shape


def _name(path: Any) -> str:
    """`state_dict.decoder.norm.weight` of a path through nested values."""
    return ".".join(str(_key(key)) for key in path)


def _key(step: Any) -> Any:
    """The key of a mapping, or the place in a list, that a step of such a path leads through."""
    return getattr(step, "key", getattr(step, "idx", step))
