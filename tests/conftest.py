"""Routings made by hand and by the real router, for every room's tests; layers and tokens for MoEs."""

from __future__ import annotations

import atexit
import copy
import functools
import gc
import importlib.metadata
import logging
import os
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import settings
from torch import Tensor, nn

from moe_ffn import build_ffn
from moe_ffn.cli.exit import set_up_logging
from moe_ffn.ffn.moe import MoEFFN
from moe_ffn.kernels.native import build
from moe_ffn.kernels.native.build import unavailable_reason
from moe_ffn.outputs import (
    AlwaysRouting,
    NoisyRouting,
    Routing,
    SparsityTargetRouting,
    VariableKRouting,
)
from moe_ffn.routing import TopKRouterConfig
from tests.helpers import every_router
from tests.helpers.every_router import decide

pytest_plugins = ["tests.helpers.programs_in_process"]

# The same examples every time, however slow the machine; `--hypothesis-profile many` tries thousands.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("many", settings.get_profile("repeatable"), max_examples=2000)
settings.load_profile("repeatable")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a shell has it for what it starts in the background; what tests start would ignore Ctrl-C too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():
    # Triton reads it once, when it is imported, which a library under test may do before a kernel's
    # own test. It changes nothing for torch, whose compiler uses Triton only on GPUs.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # `torch.manual_seed` would write down its whole stack for each kind of device that is not there,
    # which takes most of the time of a small test.
    for absent in (torch.cuda, torch.xpu, torch.mtia):
        vars(absent)["manual_seed_all"] = lambda seed: None

# Each trainer of Lightning looks for its plugins among all packages that are installed.
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)

# pytest gives two handlers to each logger that does not propagate, and takes them back, three times a test.
for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.")]:
    logging.getLogger(name).propagate = True

# No test cuts the power, and a tiny run would wait for the disk for a quarter of its time.
os.fsync = lambda fd: None

load_yaml, load_text_once = yaml.load, functools.cache(yaml.load)


def load_once(stream: Any, Loader: Any) -> Any:
    """Parse a text once: the config of a run is read a dozen times."""
    if isinstance(stream, str):
        return copy.deepcopy(load_text_once(stream, Loader))
    return load_yaml(stream, Loader)


yaml.load = load_once


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Skip garbage collection, which takes a quarter of the time, and ignore these objects from then on."""
    gc.disable()
    collected = yield
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # some libraries look at exit for what has leaked
    return collected


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests of every backend as slow for `triton`, which is interpreted on a CPU.

    `tests/kernels` is exempt: it picks its own default tests, and runs them all on a GPU.
    """
    for item in items:
        if getattr(item, "callspec", None) is None or "kernels" in item.path.parts:
            continue
        params = item.callspec.params  # pyright: ignore[reportAttributeAccessIssue]
        if params.get("backend") == "triton" or params.get("backends") == ["triton"]:
            item.add_marker("slow")
            on_gpu = torch.cuda.is_available()
            item.add_marker(pytest.mark.skipif(on_gpu, reason="these layers are on the CPU"))


# Models this small are slower on several threads, most of all where tests share the cores.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Reset to one thread before every test: a fork of a process with several threads deadlocks."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _logging() -> None:
    """Log lines go to stderr, as in a program, where `capsys` sees them."""
    set_up_logging()


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(request: pytest.FixtureRequest) -> None:
    """Programs are run, and studies trained, where they may write."""
    if request.path.parent.name in ("cli", "experiments", "report", "runs", "studies"):
        request.getfixturevalue("stay_in_tmp_path")


@pytest.fixture(scope="session", autouse=True)
def _separate_user_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests neither read nor change the code that the user of this machine trusts.

    They share the compiled kernels of the user, since compiling takes long.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    kernels = (given if given.is_absolute() else Path.home() / ".cache") / "moe_ffn"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        cache = tmp_path_factory.mktemp("cache")
        kernels.mkdir(parents=True, exist_ok=True)
        (cache / "moe_ffn").symlink_to(kernels)
        patch.setenv("XDG_CACHE_HOME", str(cache))
        patch.setattr(build, "row_file", lambda: cache / "cpu_kernels.json")  # not the user's sizes
        unavailable_reason()  # compile and warn before a test reads the output
        yield


@pytest.fixture
def make_routing() -> Callable[..., Routing]:
    """A Routing in which token t goes to `expert_ids_TK[t]`, each pair with weight 1/K.

    One sequence, no padding, undecided scores, unless `replaced` says otherwise.
    """

    def make(expert_ids_TK: list[list[int]], num_experts: int, **replaced: Any) -> Routing:
        num_tokens, k = len(expert_ids_TK), len(expert_ids_TK[0])
        values: dict[str, Any] = {
            "token_indices_N": torch.arange(num_tokens).repeat_interleave(k),
            "expert_ids_N": torch.tensor(expert_ids_TK).flatten(),
            "weights_N": torch.full((num_tokens * k,), 1 / k),
            "dropped_N": torch.zeros(num_tokens * k, dtype=torch.bool),
            "num_tokens": num_tokens,
            "num_experts": num_experts,
            "logits_TE": torch.zeros(num_tokens, num_experts),
            "scores_TE": torch.full((num_tokens, num_experts), 1 / num_experts),
            "mask_T": None,
            "sequence_length": num_tokens,
        }
        if replaced.keys() & {"target_k", "capacity_k", "num_always"}:
            values["selected_N"] = torch.ones(num_tokens * k, dtype=torch.bool)
        kinds = {
            "target_k": SparsityTargetRouting,
            "capacity_k": VariableKRouting,
            "num_always": AlwaysRouting,
            "selected_N": VariableKRouting,
            "selection_probs_TE": NoisyRouting,
        }
        kind = next((kind for name, kind in kinds.items() if name in replaced), Routing)
        return kind(**{**values, **replaced})

    return make


@pytest.fixture
def route_logits() -> Callable[..., Routing]:
    """The real top-k router on given logits: its projection is the identity."""

    def route(
        logits_TE: Tensor, k: int, renormalize: bool = False, mask: Tensor | None = None
    ) -> Routing:
        config = TopKRouterConfig(k=k, renormalize=renormalize)
        return every_router.route(config, logits_TE, mask=mask)

    return route


@pytest.fixture
def dtype_of() -> Callable[[str], torch.dtype]:
    """The widest dtype that a backend takes."""

    def dtype(backend: str) -> torch.dtype:
        return torch.float32 if backend in ("grouped_mm", "triton") else torch.float64

    return dtype


@pytest.fixture
def build_moe(dtype_of: Callable[[str], torch.dtype]) -> Callable[..., MoEFFN]:
    """A layer of 4 small experts of width 8 in the widest dtype of its backend, unless `config` differs."""

    def build(backend: str, seed: int = 0, **config: Any) -> MoEFFN:
        torch.manual_seed(seed)
        experts = {"type": "swiglu", "d_ff": 8, **config.pop("experts", {}), "backend": backend}
        moe = build_ffn({"type": "moe", "num_experts": 4, **config, "experts": experts}, d_model=8)
        assert isinstance(moe, MoEFFN)
        decide(moe.router)  # so that a capacity has something to drop
        return moe.to(dtype_of(backend))

    return build


@pytest.fixture
def tokens_and_mask() -> Callable[..., tuple[Tensor, Tensor]]:
    """Two sequences of 5 tokens of width 8; `padded` on the right of one and the left of the other."""

    def make(dtype: torch.dtype, padded: bool) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        x_BSD = torch.randn(2, 5, 8, generator=generator, dtype=dtype)
        mask_BS = torch.ones(2, 5, dtype=torch.bool)
        if padded:
            mask_BS[0, 3:] = False  # right
            mask_BS[1, :1] = False  # left
        return x_BSD, mask_BS

    return make


@pytest.fixture
def assert_equal_with_gradients() -> Callable[..., None]:
    """Two outputs are equal, and d/d(everything) of sums of them with fixed, uneven weights."""

    def check(module: nn.Module, x: Tensor, got: Tensor, wanted: Tensor) -> None:
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)
        generator = torch.Generator().manual_seed(2)
        probe = torch.randn(got.shape, generator=generator, dtype=got.dtype)
        over = {"x": x, **dict(module.named_parameters())}
        found, expected = (
            torch.autograd.grad((y * probe).sum(), list(over.values()), materialize_grads=True)
            for y in (got, wanted)
        )
        for name, one, other in zip(over, found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10, msg=name)
            assert one.abs().max() > 0, name

    return check


@pytest.fixture
def gradients() -> Callable[..., dict[str, Tensor | None]]:
    """d/d(everything) of a sum of `y` with fixed, uneven weights."""

    def take(module: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor | None]:
        generator = torch.Generator().manual_seed(2)
        probe = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)
        (y * probe).sum().backward()
        return {"x": x.grad, **{name: p.grad for name, p in module.named_parameters()}}

    return take
