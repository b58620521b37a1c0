"""Checkpoints: written atomically, checked, read without running code; and the source of a NaN in a step."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_ffn.training.objective import Objective
from moe_ffn.training.recovery import guard
from moe_ffn.training.recovery.checkpoint_file import (
    CheckpointError,
    read_checkpoint,
    verify,
    write_checkpoint,
)
from moe_ffn.training.recovery.guard import find_nan_source, nonfinite_name

VALUES: dict[str, Any] = {
    "large": torch.zeros(300_000),  # more than the megabyte that is read at once
    "weights": torch.arange(6.0).view(2, 3),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "plain": {"step": 3, "names": ["a", "b"], "pair": (1, 2.5), "none": None},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A good checkpoint."""
    path = tmp_path / "checkpoints" / "step_00000001.ckpt"
    write_checkpoint(VALUES, path)
    return path


class Hostile:
    """An object that makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.marker}'",)


def test_a_checkpoint_is_read_as_it_was_written(path: Path) -> None:
    verify(path)
    values = read_checkpoint(path)

    assert values["plain"] == VALUES["plain"]
    for name in ("weights", "half", "large"):
        assert torch.equal(values[name], VALUES[name])
        assert values[name].dtype == VALUES[name].dtype


def test_torch_and_zip_read_it_too(path: Path) -> None:
    assert torch.equal(torch.load(path, weights_only=True)["weights"], VALUES["weights"])
    assert zipfile.ZipFile(path).testzip() is None


def test_a_flipped_bit_anywhere_is_noticed(path: Path) -> None:
    good = path.read_bytes()
    places = range(0, len(good), len(good) // 15)
    # All of the end: the comment of the archive, which begins with its own length.
    for place in [*places, *range(len(good) - 90, len(good))]:
        damaged = bytearray(good)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        for read in (read_checkpoint, verify):
            with pytest.raises(CheckpointError, match=r"checksum|cut short"):
                read(path)


@pytest.mark.parametrize("cut", [0.01, 0.5, 0.99])
def test_a_truncated_file_is_rejected(path: Path, cut: float) -> None:
    os.truncate(path, int(path.stat().st_size * cut))
    with pytest.raises(CheckpointError, match=r"^does not end in its checksum: it was cut short"):
        read_checkpoint(path)


def test_an_empty_file_is_rejected(path: Path) -> None:
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"^is empty$"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("missing", "cannot be read (No such file or directory)"),
        ("a folder", "cannot be read (not a file, but a folder)"),
        ("a pipe", "cannot be read (not a file, but a pipe)"),
    ],
)
def test_anything_but_a_file_is_rejected_without_waiting(
    path: Path, kind: str, problem: str
) -> None:
    path.unlink()
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)

    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)

    assert str(caught.value) == problem


def test_code_in_it_is_not_run(path: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    pickle.loads(pickle.dumps(Hostile(marker)))
    assert marker.exists()
    marker.unlink()
    write_checkpoint({"weights": Hostile(marker)}, path)

    verify(path)
    with pytest.raises(CheckpointError, match=r"^is not a checkpoint of tensors and plain values$"):
        read_checkpoint(path)

    assert not marker.exists()


def test_a_full_disk_keeps_the_checkpoint_before(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (0, 1000, 20_000, 40_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        try:
            with pytest.raises(OSError, match="File too large"):
                write_checkpoint({"weights": torch.zeros(100, 128)}, path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert path.read_bytes() == before
    assert [found.name for found in path.parent.iterdir()] == [path.name]


def test_other_errors_are_raised(path: Path) -> None:
    anything: Any = {"function": lambda: None}
    with pytest.raises((AttributeError, pickle.PicklingError)):
        write_checkpoint(anything, path)
    assert read_checkpoint(path)["plain"] == VALUES["plain"]


# -- the first value of a step that is not finite is named, and nothing is left behind


class Residual(nn.Module):
    """x + f(x), whose sum may overflow where neither part does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), Residual(), nn.Linear(2, 1))


def break_output(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output * torch.inf


def batch(
    model: nn.Module, x: Tensor | None = None, loss: Callable[[Tensor], Tensor] = Tensor.mean
) -> Callable[[], Objective]:
    x = torch.ones(3, 2) if x is None else x

    def forward() -> Objective:
        y = x
        for part in model.children():
            y = part(y)
        return Objective(loss(y), y.detach().mean(), {"router_z": torch.tensor(1.0)})

    return forward


Broken = list[Callable[[], Objective]]


def in_parameter(model: nn.Module) -> Broken:
    with torch.no_grad():
        model.get_parameter("1.inner.weight")[0, 1] = torch.nan
    return [batch(model)]


def in_innermost_module(model: nn.Module) -> Broken:
    model.get_submodule("1.inner").register_forward_hook(break_output)
    return [batch(model)]


def between_submodules(model: nn.Module) -> Broken:
    """Return a batch of 2 and 2 quarters of the largest number, then 2 + 4 of them."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
        model.get_parameter("0.bias").zero_()
        model.get_parameter("1.inner.weight").copy_(torch.eye(2) * 1.5)
    return [batch(model, torch.full((1, 2), torch.finfo(torch.float32).max / 4))]


def in_part_of_loss(model: nn.Module) -> Broken:
    def forward() -> Objective:
        losses = batch(model)()
        parts = {"z": losses.total * torch.inf}
        return Objective(losses.total * torch.nan, losses.cross_entropy, parts)

    return [forward]


def in_gradient(model: nn.Module) -> Broken:
    model.get_parameter("0.weight").register_hook(lambda g: g * torch.inf)
    model.get_parameter("1.inner.weight").register_hook(lambda g: g * torch.nan)
    return [batch(model)]


SOURCES: dict[str, tuple[Callable[[nn.Module], Broken], str | None]] = {
    "nothing": (lambda model: [batch(model), batch(model)], None),
    "parameter": (in_parameter, "the parameter 1.inner.weight"),
    "innermost module": (in_innermost_module, "1.inner"),
    "between submodules": (between_submodules, "1"),
    "input of the second batch": (
        lambda model: [batch(model), batch(model, torch.full((1, 2), torch.inf))],
        "the input of 0",
    ),
    "loss": (
        lambda model: [batch(model, loss=lambda y: y.mean() * torch.nan)],
        "the objective's total",
    ),
    "part of the loss": (in_part_of_loss, "the objective's z"),
    "gradient that backward reaches first": (in_gradient, "the gradient of 1.inner.weight"),
    "derivative that does not exist": (
        lambda model: [batch(model, loss=lambda y: (y - y).abs().sum().sqrt())],
        "the gradient of 2.bias",
    ),
}


@pytest.mark.parametrize(("spoil", "source"), SOURCES.values(), ids=SOURCES)
def test_the_source_of_a_nan_is_named(
    model: nn.Module, spoil: Callable[[nn.Module], Broken], source: str | None
) -> None:
    assert find_nan_source(model, spoil(model)) == source


class Masked(nn.Module):
    """Hands a mask of -inf inward, as attention does; all that comes out is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Softmax()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, torch.tensor([0.0, -torch.inf]))


class Softmax(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return (x + mask).softmax(-1)


def test_a_mask_of_infinities_is_not_blamed_for_what_breaks_later(model: nn.Module) -> None:
    masked = nn.Sequential(Masked(), *model.children())
    assert find_nan_source(masked, [batch(masked)]) is None
    broken = batch(masked, loss=lambda y: y.mean() * torch.nan)
    assert find_nan_source(masked, [broken]) == "the objective's total"
    masked.get_parameter("2.inner.weight").register_hook(lambda g: g * torch.nan)
    assert find_nan_source(masked, [batch(masked)]) == "the gradient of 2.inner.weight"
    masked.get_submodule("2.inner").register_forward_hook(break_output)
    assert find_nan_source(masked, [batch(masked)]) == "2.inner"


def test_a_gradient_that_only_its_scale_makes_overflow(model: nn.Module) -> None:
    assert find_nan_source(model, [batch(model)], gradient_scale=1e38) is None
    steep = batch(model, loss=lambda y: y.mean() * 1e3)
    assert find_nan_source(model, [steep], gradient_scale=1e38) is not None


@pytest.mark.parametrize("place", range(3), ids=["parameters", "forward", "backward"])
def test_the_find_of_another_rank_ends_the_search(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    answers = iter([None] * place + ["elsewhere"])
    monkeypatch.setattr(guard, "first_over_ranks", lambda name: name or next(answers))
    assert find_nan_source(model, [batch(model)]) == "elsewhere"
    assert next(answers, None) is None


@pytest.mark.parametrize("fails", [False, True], ids=["found", "fails"])
def test_nothing_is_left_behind(model: nn.Module, fails: bool) -> None:
    def forward() -> Objective:
        losses = batch(model, loss=lambda y: y.mean() * (1 if fails else torch.inf))()
        if fails:
            raise ValueError("in the middle")
        return losses

    if fails:
        with pytest.raises(ValueError, match="in the middle"):
            find_nan_source(model, [forward])
    else:
        find_nan_source(model, [forward])
        find_nan_source(model, [batch(model)])

    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    for parameter in model.parameters():
        assert parameter.grad is None
        assert not parameter._backward_hooks
    assert model.training


def test_nonfinite_name_ignores_integers() -> None:
    state = {"count": torch.tensor(3), "ratio": torch.tensor([1.0, torch.inf]), "none": None}
    assert nonfinite_name(state) == "ratio"
    assert nonfinite_name({"count": torch.tensor(3)}) is None
