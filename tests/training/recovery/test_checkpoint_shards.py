"""Checkpoints of a sharded model: each rank writes its parts, and any number of ranks reads them."""

from __future__ import annotations

import errno
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from moe_ffn.model.decoder import DecoderConfig
from moe_ffn.training.parallel.layout import Layout
from moe_ffn.training.parallel.sharding import empty_shard_like, full_tensor
from moe_ffn.training.recovery import checkpoint_file
from moe_ffn.training.recovery.checkpoint_file import (
    CheckpointError,
    read_checkpoint,
    remove_unused_shards,
    verify,
    write_checkpoint,
)
from tests.helpers.memory import peak_above
from tests.helpers.ranks import on_ranks, parallelize

MODEL = DecoderConfig.model_validate(
    {
        "d_model": 16,
        "num_layers": 1,
        "attention": {"num_heads": 2},
        "ffn": {"type": "moe", "num_experts": 4, "router": {"type": "top_k", "k": 2}},
    }
)


def write_on_a_rank(rank: int, layout: Layout, path: Path) -> dict[str, Tensor]:
    """Write a model and AdamW's moments after a step; returns the weights, whole."""
    torch.manual_seed(0)
    decoder = MODEL.build(vocab_size=33, max_seq_len=8)
    parallelize(decoder, layout)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=0.1, fused=True)  # one operator
    ids_BS = torch.arange(16).view(2, 8)
    decoder(ids_BS).logits.square().mean().backward()
    optimizer.step()
    values = {
        "state_dict": decoder.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "global_step": 1,
        "note": {"path": [1, 2.5, None]},
    }
    write_checkpoint(values, path)
    parameters = dict(decoder.named_parameters())
    moments = {
        f"{name} moment": full_tensor(optimizer.state[parameter]["exp_avg"])
        for name, parameter in parameters.items()
    }
    return {name: full_tensor(p.detach()) for name, p in parameters.items()} | moments


LAYOUTS = [Layout(shard=2), Layout(expert=2), Layout(data=2, expert=2), Layout(shard=2, expert=2)]

Written = dict[Layout, tuple[Path, dict[str, Tensor]]]


def write_all_on_a_rank(rank: int, paths: dict[Layout, Path]) -> list[dict[str, Tensor]]:
    return [write_on_a_rank(rank, layout, path) for layout, path in paths.items()]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A checkpoint of each layout, and the weights and moments in it."""
    folder, found = tmp_path_factory.mktemp("shards"), Written()
    for num_ranks in (2, 4):
        paths = {
            layout: folder / f"{number}/step_00000001.ckpt"
            for number, layout in enumerate(LAYOUTS)
            if layout.num_ranks == num_ranks
        }
        values, *_ = on_ranks(num_ranks, folder / f"{num_ranks}", write_all_on_a_rank, paths)
        pairs = zip(paths.values(), values, strict=True)
        found |= dict(zip(paths, pairs, strict=True))
    return found


@pytest.fixture
def path(written: Written, tmp_path: Path) -> Path:
    """A good checkpoint of two ranks, to be damaged."""
    whole, _ = written[Layout(shard=2)]
    return shutil.copytree(whole.parent, tmp_path / "checkpoints") / whole.name


def shards_of(path: Path) -> list[Path]:
    return sorted(path.parent.glob("*.shards/*.safetensors"))


def numbers_in(path: Path) -> int:
    with safe_open(path, framework="pt") as file:
        names = file.keys()
        return sum(math.prod(file.get_slice(name).get_shape()) for name in names)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_checkpoints_of_ranks_are_read_whole(layout: Layout, written: Written) -> None:
    path, expected = written[layout]

    verify(path)
    values = read_checkpoint(path)

    assert values["note"] == {"path": [1, 2.5, None]}
    assert values.keys() == {"state_dict", "optimizer_states", "global_step", "note"}
    (optimizer,) = values["optimizer_states"]
    found = dict(values["state_dict"])
    for number, name in enumerate(list(expected)[: len(expected) // 2]):
        moments = optimizer["state"][number]
        assert moments["step"] == 1
        found[f"{name} moment"] = moments["exp_avg"]
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    # Every rank that has another part wrote it, and each number is there once: weights, two moments.
    sizes = [numbers_in(shard) for shard in shards_of(path)]
    assert len(sizes) == layout.num_ranks
    assert sum(sizes) == 3 * sum(v.numel() for k, v in expected.items() if " " not in k)
    assert max(sizes) < 0.6 * sum(sizes)


def read_on_a_rank(rank: int, layout: Layout, path: Path) -> dict[str, Tensor]:
    """The weights and the moments that are read into a fresh model of another layout, whole."""
    decoder = MODEL.build(vocab_size=33, max_seq_len=8)
    parallelize(decoder, layout)
    values = read_checkpoint(path)
    values["state_dict"].read_into(decoder.state_dict())
    state = values["optimizer_states"][0]["state"]
    parameters = dict(decoder.named_parameters())
    rooms = {
        number: {
            name: empty_shard_like(value, parameter)
            for name, value in state.described[number].items()
        }
        for number, parameter in enumerate(parameters.values())
    }
    state.read_into(rooms)
    assert all(moments["step"] == 1 for moments in rooms.values())
    found = {name: full_tensor(p.detach()) for name, p in parameters.items()}
    moments = zip(parameters, rooms.values(), strict=True)
    return found | {f"{name} moment": full_tensor(room["exp_avg"]) for name, room in moments}


def read_all_on_a_rank(rank: int, layouts: list[Layout], path: Path) -> list[dict[str, Tensor]]:
    return [read_on_a_rank(rank, layout, path) for layout in layouts]


def test_ranks_of_another_layout_read_their_parts(written: Written, tmp_path: Path) -> None:
    path, expected = written[Layout(expert=2)]
    layouts = [Layout(shard=4), Layout(data=2, expert=2)]

    of_ranks = on_ranks(4, tmp_path, read_all_on_a_rank, layouts, path)

    for found in [found for of_layouts in of_ranks for found in of_layouts]:
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


LARGE = DecoderConfig.model_validate({**MODEL.to_dict(), "d_model": 256, "num_layers": 8})


def write_large(rank: int, path: Path) -> int:
    """The peak of writing a divided model into files of about 2 MiB."""
    checkpoint_file.MAX_FILE_BYTES = 2**21
    write_on_a_rank(rank, Layout(shard=2), path.with_name("first.ckpt"))  # what is imported stays
    torch.manual_seed(5)
    decoder = LARGE.build(vocab_size=33, max_seq_len=8)
    parallelize(decoder, Layout(shard=2))
    values = {"state_dict": decoder.state_dict(), "global_step": 1}
    return peak_above(lambda: write_checkpoint(values, path))


def read_large(rank: int, path: Path) -> int:
    """Peak memory of filling an existing sharded model."""
    decoder = LARGE.build(vocab_size=33, max_seq_len=8)
    parallelize(decoder, Layout(shard=4))
    return peak_above(lambda: read_checkpoint(path)["state_dict"].read_into(decoder.state_dict()))


def test_a_rank_writes_file_by_file_and_reads_only_its_part(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints/step_00000001.ckpt"
    writing = on_ranks(2, tmp_path / "before", write_large, path)
    reading = on_ranks(4, tmp_path / "now", read_large, path)

    total = 4 * LARGE.num_params(33, 8)
    assert total > 40e6
    assert max(writing) < 0.3 * total, (
        f"{max(writing) / total:.2f}, and a rank has half of the model"
    )
    # Copies of single tensors, in addition to the mapped files and the existing model.
    assert max(reading) < 0.3 * total, f"{max(reading) / total:.2f}"
    assert len(shards_of(path)) > 12
    values = read_checkpoint(path)
    torch.manual_seed(5)
    expected = LARGE.build(vocab_size=33, max_seq_len=8).state_dict()
    assert values["state_dict"].keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(values["state_dict"][name], value), name


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a flipped bit": (flip, "does not match the checksum of "),
    "an empty file": (lambda p: p.write_bytes(b""), "does not match the checksum of "),
    "a missing file": (lambda p: p.unlink(), "is missing"),
    "a missing folder": (lambda p: p.parent.rename(p.parent.with_suffix(".gone")), "is missing"),
}


@pytest.mark.parametrize(("damage", "problem"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_shards_are_rejected(
    damage: Callable[[Path], Any], problem: str, path: Path
) -> None:
    damage(shards_of(path)[0])
    for read in (read_checkpoint, verify):
        with pytest.raises(CheckpointError) as caught:
            read(path)
        assert problem in str(caught.value)


def test_only_shards_that_no_checkpoint_names_are_removed(path: Path) -> None:
    folder = path.parent
    unused = [folder / (digit * 16 + ".shards") for digit in "0f"]
    for place in unused:
        place.mkdir()
        (place / "shard-00001-model-00001-of-00001.safetensors").touch()
    skipped = path.rename(folder / f"{path.name}.skipped")

    remove_unused_shards(folder)

    assert not any(place.exists() for place in unused)
    read_checkpoint(skipped)


def full(*args: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def gone(file: Path, sha256_of: Callable[[Path], str] = checkpoint_file.sha256_of) -> str:
    """The first rank does not see what another wrote."""
    found = sha256_of(file)
    file.unlink()
    return found


def fail_on_a_rank(rank: int, folder: Path) -> list[str]:
    """Return the messages of both ranks for each method that fails on rank 1."""
    said: list[str] = []
    writer: Any = HuggingFaceStorageWriter
    for place, name, broken in (
        (writer, "prepare_local_plan", full),
        (writer, "write_data", full),
        (checkpoint_file, "sha256_of", gone),
    ):
        method = broken if rank == 1 else getattr(place, name)
        with (
            patch.object(place, name, method),
            pytest.raises(OSError, match=r"No space|a disk") as caught,
        ):
            write_on_a_rank(rank, Layout(shard=2), folder / name / "step_00000001.ckpt")
        said.append(str(caught.value.strerror))
    return said


def test_a_rank_that_cannot_write_where_the_first_reads_stops_all_ranks(tmp_path: Path) -> None:
    said = on_ranks(2, tmp_path / "ranks", fail_on_a_rank, tmp_path / "checkpoints")
    other_disk = "a rank wrote to a disk that rank 0 cannot read"
    assert said == [["No space left on device"] * 2 + [other_disk]] * 2
    assert not [path for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()]
