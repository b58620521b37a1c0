"""Checkpoint files: written atomically, and verified by a checksum before they are read.

A checkpoint is a zip archive of `torch.save`, which `torch.load` and `unzip` can read. The comment at the end
of the archive holds the SHA-256 of everything before it. Tensors that are sharded over ranks are in a folder
next to the file, where each rank writes its own parts as safetensors, so no rank gathers them. The file is
written after the folder. It holds the name of the folder and the SHA-256 of each file in the folder.
"""

from __future__ import annotations

import errno
import hashlib
import re
import secrets
import shutil
import struct
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path, tree_map_only

from moe_ffn.config.files import (
    kind_of,
    make_folder,
    open_file,
    reason,
    replacing,
    sha256_of,
    split_into_files,
    sync_folder,
)
from moe_ffn.kernels.base import is_distributed

if TYPE_CHECKING:  # the import takes seconds, and programs that only read a run do not need it
    from torch.distributed.tensor import DTensor

IDENTITY = "identity"
"""Key of the options and data hashes that a checkpoint must share with the run that resumes from it."""

BEST_NAME = "best.ckpt"
"""File with the weights of the lowest validation loss; no run resumes from it."""

MAX_FILE_BYTES = 2**26
"""Maximum size of a shard file of a rank, which is built in memory. A larger tensor has its own file."""

_STEP_NAME = re.compile(r"step_([0-9]{8,})\.ckpt")
_SHARDS = "shards"
"""Key of the name of the shard folder and the digests of its files."""
_FOLDER_NAME = re.compile(r"[0-9a-f]{16}\.shards")

_LABEL = b"sha256:"
_CHECKSUM_BYTES = len(_LABEL) + hashlib.sha256().digest_size * 2
_SHARDS_LABEL = re.compile(rb"shards:(%s) \Z" % _FOLDER_NAME.pattern.encode())
_SHARDS_LABEL_BYTES = len("shards:0123456789abcdef.shards ")
_NO_COMMENT = struct.pack("<H", 0)


class CheckpointError(Exception):
    """A checkpoint cannot be used. The message follows the file name in a sentence: `is empty`."""


def step_name(step: int) -> str:
    return f"step_{step:08d}.ckpt"


def step_of(path: Path) -> int:
    """Return the optimizer step of a checkpoint, from its name."""
    match = _STEP_NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def newest_first(folder: Path) -> list[Path]:
    """Return all checkpoint files but the best, newest first and not verified; empty without a folder."""
    if kind_of(folder) is None:
        return []
    files = [path for path in folder.iterdir() if _STEP_NAME.fullmatch(path.name)]
    return sorted(files, key=step_of, reverse=True)


def rename_skipped(folder: Path, step: int) -> None:
    """Rename checkpoints after `step` to `NAME.skipped`, so that no later resume uses one."""
    for path in newest_first(folder):
        if step_of(path) > step:
            path.replace(path.with_name(f"{path.name}.skipped"))


def write_checkpoint(values: dict[str, Any], path: Path) -> None:
    """Write a checkpoint to `path`, synced to the disk; after an OSError `path` is unchanged.

    If weights are sharded over ranks, every rank has to call this.
    """
    weights = values.get("state_dict")
    if isinstance(weights, Mapping) and any(map(is_distributed, weights.values())):
        values = _write_shards(values, path.parent)
        if dist.get_rank() != 0:
            return
    make_folder(path.parent)
    with replacing(path) as file:
        try:
            torch.save(values, file)
        except RuntimeError as error:  # torch raises it if the disk is full
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise
        _append_checksum(file, values.get(_SHARDS))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU without running code in it; sharded tensors stay in `SavedTensors`.

    Raises CheckpointError if the file cannot be read, or does not match its checksum.
    """
    with _explaining():
        values = _load(path)
        return _read_shards(values, path.parent) if _SHARDS in values else values


def verify(path: Path) -> None:
    """Raise CheckpointError unless a checkpoint file and its shards match their checksums."""
    with _explaining():
        with open_file(path) as file:
            _require_checksum(file)
            shards = _shards_named_in(file)
        if shards:
            _verify_shards(_load(path)[_SHARDS], path.parent)


def remove_unused_shards(folder: Path) -> None:
    """Remove shard folders in `folder` that no checkpoint there refers to."""
    with suppress(OSError):
        entries = list(folder.iterdir())
        unused = {path for path in entries if _FOLDER_NAME.fullmatch(path.name)}
        for path in entries if unused else ():
            if kind_of(path) == "a file":
                with open_file(path) as file:
                    unused.discard(folder / (_shards_named_in(file) or ""))
        for path in unused:
            shutil.rmtree(path)


@contextmanager
def _explaining() -> Iterator[None]:
    """Convert every error of reading a checkpoint to a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot be read ({reason(error)})") from error
    except (CheckpointError, MemoryError):
        raise
    # From pickle, zip or torch, whose message advises to run the code in the file.
    except Exception as error:
        raise CheckpointError("is not a checkpoint of tensors and plain values") from error


def _load(path: Path) -> dict[str, Any]:
    with open_file(path) as file:
        _require_checksum(file)
        return torch.load(file, map_location="cpu", weights_only=True)


# -- the comment of the archive


def _append_checksum(file: BinaryIO, shards: Any) -> None:
    """Write the archive's comment: the shard folder, if any, and the digest of all bytes before it."""
    label = b"shards:%s " % shards["folder"].encode() if shards else b""
    file.seek(-len(_NO_COMMENT), 2)
    if file.read() != _NO_COMMENT:
        raise RuntimeError("torch.save wrote an archive that does not end in an empty comment")
    file.seek(-len(_NO_COMMENT), 2)
    file.write(struct.pack("<H", len(label) + _CHECKSUM_BYTES) + label)
    digest = _digest(file, file.tell())
    file.write(_LABEL + digest)


def _require_checksum(file: BinaryIO) -> None:
    """Raise CheckpointError unless a file matches its checksum; seek back to the beginning."""
    size = file.seek(0, 2)
    if size == 0:
        raise CheckpointError("is empty")
    file.seek(max(size - _CHECKSUM_BYTES, 0))
    seal = file.read()
    if not seal.startswith(_LABEL):
        raise CheckpointError(
            "does not end in its checksum: it was cut short, or is not a checkpoint"
        )
    if seal != _LABEL + _digest(file, size - len(seal)):
        raise CheckpointError("does not match its checksum: it was damaged")
    file.seek(0)


def _shards_named_in(file: BinaryIO) -> str | None:
    """Return the name of a checkpoint's shard folder without reading its values; None without shards."""
    file.seek(max(file.seek(0, 2) - _CHECKSUM_BYTES - _SHARDS_LABEL_BYTES, 0))
    match = _SHARDS_LABEL.fullmatch(file.read(_SHARDS_LABEL_BYTES))
    return match[1].decode() if match else None


def _digest(file: BinaryIO, size: int) -> bytes:
    """Return the SHA-256 of the first `size` bytes in hexadecimal; leave the file position after them."""
    digest = hashlib.sha256()
    file.seek(0)
    while block := file.read(min(size, 1 << 20)):
        digest.update(block)
        size -= len(block)
    return digest.hexdigest().encode()


# -- shards


def _write_shards(values: dict[str, Any], parent: Path) -> dict[str, Any]:
    """Write this rank's shards into a new folder in rank 0's `parent`. A collective: every rank calls this.

    Returns `values` with meta tensors instead of the sharded tensors, and an entry `_SHARDS`. Raises OSError
    on every rank, if one could not write, or wrote to a disk that rank 0 cannot read.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.tensor import DTensor

    is_first = dist.get_rank() == 0
    folder = _from_first_rank(parent.absolute() / f"{secrets.token_hex(8)}.shards")
    tensors: dict[str, Tensor] = {}
    meta_tensors: dict[Any, Tensor] = {}
    for path, value in tree_flatten_with_path(values)[0]:
        if is_distributed(value) and (key := _memory_key(value)) not in meta_tensors:
            # A tied tensor has several names but one meta tensor, so that `torch.save` keeps it tied.
            meta_tensors[key] = torch.empty(value.shape, dtype=value.dtype, device="meta")
            tensors[_name(path)] = value
    digests: dict[str, str] | OSError | None
    try:
        # The writer creates the folder too, and raises an error of one rank on all ranks.
        writer = HuggingFaceStorageWriter(
            str(folder), _file_numbers(tensors), save_distributed=True
        )
        save(tensors, storage_writer=writer)
        own = f"shard-{dist.get_rank() + 1:05d}-"
        digests = {p.name: sha256_of(p) for p in folder.iterdir() if p.name.startswith(own)}
    except OSError as error:
        digests = error
    except CheckpointException as error:
        failures = [failure for failure, _ in error.failures.values()]
        digests = next((failure for failure in failures if isinstance(failure, OSError)), None)
        if digests is None:
            raise
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, digests)
    problem = next((result for result in gathered if isinstance(result, OSError)), None)
    if problem is None:
        digests = {name: digest for of_rank in gathered for name, digest in of_rank.items()}
        if not _from_first_rank(all((folder / name).exists() for name in digests)):
            problem = OSError(
                errno.ENOENT, "a rank wrote to a disk that rank 0 cannot read", str(folder)
            )
    if problem is not None:
        if is_first:
            shutil.rmtree(folder, ignore_errors=True)
        raise problem
    if is_first:
        sync_folder(folder)
        sync_folder(parent)
    described = tree_map_only(DTensor, lambda value: meta_tensors[_memory_key(value)], values)
    return {**described, _SHARDS: {"folder": folder.name, "sha256": digests}}


def _file_numbers(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return tensor name -> number of its file, from 1; equal on all ranks."""
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    files = split_into_files(sizes, MAX_FILE_BYTES * dist.get_world_size())
    return {name: number for number, names in enumerate(files, start=1) for name in names}


def _from_first_rank(value: Any) -> Any:
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


class SavedTensors(Mapping[Any, Any]):
    """Mapping whose tensors are in shard files; each value is read when it is accessed."""

    def __init__(
        self,
        described: Mapping[Any, Any],
        names: Mapping[int, str],
        parts: Mapping[str, list[tuple[Any, Path]]],
    ) -> None:
        """`described` has a meta tensor for each sharded tensor; `names` maps its `id` to its name.

        `parts` maps a name to the parts of the tensor: (offsets in the tensor, file) of each.
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

    def _read(self, tensor: Tensor) -> Tensor:
        from safetensors import safe_open

        name = self._names.get(id(tensor))
        if name is None:
            return tensor  # not sharded
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        for offsets, path in self._parts[name]:
            with safe_open(path, framework="pt") as file:
                part = file.get_tensor(name)
            slices = (slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))
            whole[tuple(slices)] = part
        return whole

    def under(self, prefix: str) -> SavedTensors:
        """Return the tensors whose names begin with `prefix`, under their names without it."""
        described = {
            name.removeprefix(prefix): tensor
            for name, tensor in self.described.items()
            if str(name).startswith(prefix)
        }
        return SavedTensors(described, self._names, self._parts)

    def read_into(self, tensors: Mapping[Any, Any]) -> None:
        """Overwrite `tensors`, nested like the checkpoint; read only this rank's part of a sharded tensor."""
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        sharded: dict[str, Tensor] = {}
        for path, target in tree_flatten_with_path(dict(tensors))[0]:
            if not isinstance(target, Tensor):
                continue
            saved: Any = self.described
            for key in path:
                saved = saved[_key(key)]
            if (name := self._names.get(id(saved))) is None:
                target.copy_(saved)
            else:
                sharded[name] = target  # a tied tensor is read once, under one of its names
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            (folder,) = {path.parent for parts in self._parts.values() for _, path in parts}
            # Every rank reads independently, without collectives.
            load(sharded, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


def _read_shards(values: dict[str, Any], parent: Path) -> dict[str, Any]:
    """Replace the weights and optimizer states of a sharded checkpoint with `SavedTensors`."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    folder = _verify_shards(values.pop(_SHARDS), parent)
    names: dict[int, str] = {}
    for path, value in tree_flatten_with_path(values)[0]:
        if isinstance(value, Tensor) and value.is_meta:
            names.setdefault(id(value), _name(path))
    parts: dict[str, list[tuple[Any, Path]]] = {name: [] for name in names.values()}
    metadata = HuggingFaceStorageReader(str(folder)).read_metadata()
    for index, info in metadata.storage_data.items():
        parts[index.fqn].append((index.offset, folder / Path(info.relative_path).name))
    values["state_dict"] = SavedTensors(values["state_dict"], names, parts)
    for state in values.get("optimizer_states", ()):
        state["state"] = SavedTensors(state["state"], names, parts)
    return values


def _verify_shards(shards: Mapping[str, Any], parent: Path) -> Path:
    """Return the shard folder; raise CheckpointError unless each of its files matches its checksum."""
    folder = parent / shards["folder"]
    for name, digest in shards["sha256"].items():
        file = folder / name
        if kind_of(file) is None:
            raise CheckpointError(f"lacks its tensors: '{folder.name}/{name}' is missing")
        if sha256_of(file) != digest:
            raise CheckpointError(
                f"does not match the checksum of '{folder.name}/{name}': it was damaged"
            )
    return folder


def _memory_key(tensor: DTensor) -> tuple[Any, ...]:
    """Return a key for the memory of this rank's part, equal for all names of a tied tensor."""
    local = tensor.to_local()
    return local.untyped_storage()._cdata, local.storage_offset(), local.shape, tensor.shape


def _name(path: Any) -> str:
    """Return `state_dict.decoder.norm.weight` for a path through nested values."""
    return ".".join(str(_key(key)) for key in path)


def _key(step: Any) -> Any:
    """Return the mapping key or the list index of one step of a path."""
    return getattr(step, "key", getattr(step, "idx", step))
