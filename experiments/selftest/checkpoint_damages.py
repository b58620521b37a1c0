"""What is done to a checkpoint, and what has to be said of it."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUM_TRUNCATIONS = 10


@dataclass(frozen=True)
class Damage:
    """Something done to a checkpoint."""

    name: str
    do: Callable[[Path], object]
    reason: str
    """A part of what has to be said of it."""
    weights_are_good: bool = False
    """Whether only what a run needs to go on is damaged, and the model can be used still."""


def damages(marker: Path) -> list[Damage]:
    """All of them but flipped bits.

    Args:
        marker: what the code in a hostile file would make.
    """
    return [
        *[_truncation(number) for number in range(NUM_TRUNCATIONS)],
        Damage("empty", lambda path: path.write_bytes(b""), "is empty"),
        Damage("garbage of the same size", garbage, "does not end in its checksum"),
        Damage("zeros of the same size", _zeros, "does not end in its checksum"),
        Damage("one byte more", lambda path: path.write_bytes(path.read_bytes() + b"x"), "checksum"),
        Damage("of a model of other sizes", _other_sizes, "model.d_model 32, but this run has 16"),
        Damage("of a model of the same sizes", _other_model, "model.ffn.router.k 1, but"),
        Damage("of another vocabulary", _other_vocabulary, "data.tokenizer.sha256"),
        Damage(
            "of another corpus", _other_corpus, "data.corpus.sha256", weights_are_good=True
        ),
        *[
            Damage(f"without '{key}'", _without(key), f"lacks '{key}'", key not in ("state_dict", "identity"))
            for key in (
                "state_dict", "identity", "optimizer_states", "lr_schedulers", "loops", "callbacks",
                "epoch", "global_step",
            )
        ],
        Damage("without a weight", _without_weight, "lacks the weight"),
        Damage("with a weight too many", _weight_too_many, "which this model lacks"),
        Damage("with a weight of another shape", _reshaped, "in another shape"),
        Damage("with a weight of whole numbers", _rounded, "as torch.int64"),
        Damage("with NaN in a weight", _nan, "holds NaN"),
        Damage("a list in the place of the state", _a_list, "holds a list"),
        Damage("a pickle that runs code", _pickle(marker), "does not end in its checksum"),
        Damage("an archive that runs code", _archive(marker), "does not end in its checksum"),
        Damage("a sealed archive that runs code", sealed_archive(marker), "GLOBAL posix.system"),
        Damage("a sealed pickle that runs code", _sealed_pickle(marker), "is no checkpoint of"),
        Damage("a folder", _folder, "is no file"),
        Damage("a pipe", _pipe, "is no file"),
        Damage("a link to a device without end", _link("/dev/zero"), "is no file"),
        Damage("a link to nothing", _link("nowhere"), "a symbolic link"),
        Damage("a link to itself", lambda path: _link(path.name)(path), "a symbolic link"),
    ]  # fmt: skip


def _truncation(number: int) -> Damage:
    """To a tenth of its size, two tenths and on; the last one lacks a byte."""
    tenths = number + 1

    def cut(path: Path) -> None:
        size = path.stat().st_size
        os.truncate(
            path, size * tenths // NUM_TRUNCATIONS if tenths < NUM_TRUNCATIONS else size - 1
        )

    name = (
        f"cut to {tenths}/{NUM_TRUNCATIONS}"
        if tenths < NUM_TRUNCATIONS
        else "without its last byte"
    )
    return Damage(name, cut, "does not end in its checksum: it was cut short")


def garbage(path: Path) -> None:
    """As much as was there."""
    import random

    path.write_bytes(random.Random(0).randbytes(path.stat().st_size))


def _zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def _rewritten(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """A checkpoint whose checksum is right."""

    def rewrite(path: Path) -> None:
        from moe_ffn.training.recovery.checkpoint_file import read_checkpoint, write_checkpoint

        values = read_checkpoint(path)
        change(values)
        write_checkpoint(values, path)

    return rewrite


def _other_sizes(path: Path) -> None:
    def change(values: dict[str, Any]) -> None:
        values["identity"]["model"]["d_model"] = 32
        state = values["state_dict"]
        values["state_dict"] = {name: value.repeat(2, *[1] * (value.ndim - 1)) if value.ndim else value
                                for name, value in state.items()}  # fmt: skip

    _rewritten(change)(path)


def _other_model(path: Path) -> None:
    def change(values: dict[str, Any]) -> None:
        values["identity"]["model"]["ffn"]["router"]["k"] = 1

    _rewritten(change)(path)


def _other_vocabulary(path: Path) -> None:
    def change(values: dict[str, Any]) -> None:
        values["identity"]["data"]["tokenizer"]["sha256"] = "0" * 64

    _rewritten(change)(path)


def _other_corpus(path: Path) -> None:
    def change(values: dict[str, Any]) -> None:
        values["identity"]["data"]["corpus"]["sha256"] = "0" * 64

    _rewritten(change)(path)


def _without(key: str) -> Callable[[Path], None]:
    return _rewritten(lambda values: values.pop(key, None))


def _weights(change: Callable[[dict[str, Any], str], object]) -> Callable[[Path], None]:
    """The first matrix of the decoder is changed."""

    def on_values(values: dict[str, Any]) -> None:
        state = values["state_dict"]
        change(state, next(name for name, value in state.items() if value.ndim > 1))

    return _rewritten(on_values)


def _without_weight(path: Path) -> None:
    _weights(lambda state, name: state.pop(name))(path)


def _weight_too_many(path: Path) -> None:
    _weights(lambda state, name: state.update({f"{name}_2": state[name]}))(path)


def _reshaped(path: Path) -> None:
    _weights(lambda state, name: state.update({name: state[name][1:].clone()}))(path)


def _rounded(path: Path) -> None:
    _weights(lambda state, name: state.update({name: state[name].long()}))(path)


def _nan(path: Path) -> None:
    _weights(lambda state, name: state[name].view(-1)[-1:].fill_(float("nan")))(path)


def _a_list(path: Path) -> None:
    from moe_ffn.training.recovery.checkpoint_file import write_checkpoint

    anything: Any = [1, 2, 3]
    write_checkpoint(anything, path)


class _Hostile:
    """Whoever unpickles it runs a command."""

    def __init__(self, marker: Path) -> None:
        self.command = f"touch '{marker}'"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def _pickle(marker: Path) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(pickle.dumps({"state_dict": _Hostile(marker)}))


def _archive(marker: Path) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        import torch

        torch.save({"state_dict": _Hostile(marker)}, path)

    return write


def sealed_archive(marker: Path) -> Callable[[Path], object]:
    """An archive that runs code, and whose checksum is right."""

    def write(path: Path) -> None:
        from moe_ffn.training.recovery.checkpoint_file import write_checkpoint

        write_checkpoint({"state_dict": _Hostile(marker)}, path)

    return write


def _sealed_pickle(marker: Path) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        import hashlib

        content = pickle.dumps({"state_dict": _Hostile(marker)})
        path.write_bytes(content + b"sha256:" + hashlib.sha256(content).hexdigest().encode())

    return write


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _link(target: str) -> Callable[[Path], None]:
    def link(path: Path) -> None:
        path.unlink()
        path.symlink_to(target)

    return link
