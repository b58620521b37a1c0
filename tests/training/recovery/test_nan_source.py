"""The first thing of a step that is not finite is named, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from moe_ffn.training.objective import Objective
from moe_ffn.training.recovery import guard
from moe_ffn.training.recovery.guard import find_nan_source, nonfinite_name


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
    monkeypatch.setattr(guard, "first_not_none", lambda name: name or next(answers))
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
