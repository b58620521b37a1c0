"""Every block on every backend under what torch does with a module: it holds, or one sentence says what does.

All of it: `python -m pytest -m "slow or not slow" tests/ffn/test_torch_around_blocks.py`.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradgradcheck
from torch.func import functional_call, grad, hessian, jvp, vmap
from torch.utils.checkpoint import checkpoint

from moe_ffn import FFNBlock, FFNConfig, FFNOutput, RouterConfig, TokenContext, build_ffn
from moe_ffn.experts.base import ExpertsConfig
from moe_ffn.experts.embeddings import EmbeddingExpertsConfig
from moe_ffn.experts.matrices import MatrixExpertsConfig
from moe_ffn.ffn import CombineConfig
from moe_ffn.ffn.moe import MoEFFN
from moe_ffn.kernels.select import BACKENDS, BackendName
from moe_ffn.routing.base import RouterLinear
from tests.helpers.every_router import build_layer, every_router, make_batch

D_MODEL, SHAPE = 8, (2, 6)


def moe(**options: Any) -> dict[str, Any]:
    return {"type": "moe", "num_experts": 4, **options}


OF_TABLES = [
    name for name, kind in ExpertsConfig.members.items() if issubclass(kind, EmbeddingExpertsConfig)
]
"""The kinds of experts that no backend computes, and `vmap` goes through."""

SPARSE: dict[str, dict[str, Any]] = {
    "chain": {"type": "chain_of_experts", "ffn": moe()},
    "ngrams": {"type": "ngram_memory", "num_rows": 50, "ffn": moe()},
    "moe": moe(shared_expert="swiglu", capacity={"factor": 1.0, "eval_factor": 1.0}),
    "soft_moe": {"type": "soft_moe", "num_experts": 2, "slots_per_expert": 3},
    "depths-moe": {"type": "mixture_of_depths", "ffn": moe()},
    "moe-sequences": moe(capacity={"per_sequence": 2}),
    "moe-zero": moe(zero_computation={"num_zero": 1, "num_copy": 1, "num_constant": 1}),
    "moe-nested": {
        "type": "normed",
        "output": {},
        "ffn": moe(
            experts={
                "type": "input_weighted",
                "experts": {
                    "type": "latent",
                    "width": 8,
                    "experts": {"type": "normed", "each": {}, "experts": {"type": "swiglu"}},
                },
            }
        ),
    },
    **{f"moe-{router}": moe(router=router) for router in RouterConfig.members},
    **{
        f"moe-{experts}": moe(experts={"type": experts, "d_ff": 8, "bias": True})
        for experts, kind in ExpertsConfig.members.items()
        if issubclass(kind, MatrixExpertsConfig)
    },
    **{
        f"moe-{combine}": moe(shared_expert="swiglu", combine=combine)
        for combine in CombineConfig.members
    },
}
"""Blocks whose experts a backend computes; `on` sets the backend."""

BLOCKS: dict[str, dict[str, Any]] = {
    **{member: {"type": member} for member in FFNConfig.members},
    **{f"moe-{experts}": moe(experts={"type": experts}) for experts in OF_TABLES},
    "depths-relu": {"type": "mixture_of_depths", "router": {"type": "relu", "k": 0.5}},
    "moe-always": moe(
        router={"type": "top_k", "num_always": 1}, capacity={"factor": 1.0, "eval_factor": 1.0}
    ),
    **SPARSE,
}


def on(backend: str, config: Any) -> Any:
    """The config with its experts, wherever they are, on a backend."""
    if not isinstance(config, dict):
        return config
    found = {name: on(backend, value) for name, value in config.items()}
    if "num_experts" in found:
        found.setdefault("experts", {"type": "swiglu", "d_ff": 8, "backend": backend})
    kind = ExpertsConfig.members.get(found.get("type", ""))
    if kind is not None and "backend" in kind.model_fields and "num_experts" not in found:
        found["backend"] = backend
    return found


def build(name: str, backend: str) -> FFNBlock:
    torch.manual_seed(0)
    return build_ffn(on(backend, BLOCKS[name]) if name in SPARSE else BLOCKS[name], D_MODEL)


def tokens(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(*(shape or SHAPE), D_MODEL, generator=torch.Generator().manual_seed(1))
    return x.to(dtype)


def ids_of(x: Tensor) -> Tensor:
    return torch.arange(x.shape[:-1].numel(), device=x.device).view(x.shape[:-1])


def run(block: nn.Module, x: Tensor, ids: Tensor | None = None) -> Tensor:
    """The hidden values, drawn alike every time."""
    torch.manual_seed(2)
    return block(x, TokenContext(token_ids=ids_of(x) if ids is None else ids)).hidden


def gradients(block: nn.Module, x: Tensor, hidden: Tensor) -> list[Tensor | None]:
    wanted = [x, *block.parameters()]
    return list(torch.autograd.grad(hidden.square().sum(), wanted, allow_unused=True))


def assert_close(got: Any, wanted: Any) -> None:
    # Fused steps round otherwise; sums of tens of terms.
    tolerance = 1e-4 if wanted[0].dtype != torch.bfloat16 else 5e-2
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------------------------- what is tried


def compiled(block: FFNBlock, x: Tensor, backend: str) -> None:
    torch.compiler.reset()
    whole: Any = torch.compile(block, backend="aot_eager", fullgraph=True)
    wanted = gradients(block, x, run(block, x))
    assert_close(gradients(block, x, run(whole, x)), wanted)


def exported(block: FFNBlock, x: Tensor, backend: str) -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block.eval()

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return self.block(x, TokenContext(token_ids=ids)).hidden

    x = x.detach()
    batch = {0: torch.export.Dim("batch", max=64)}
    program = torch.export.export(Module(), (x, ids_of(x)), dynamic_shapes=(batch, batch))
    loaded = loaded_again(program)
    for size in (2, 5):
        x = tokens(size, 6, dtype=x.dtype)
        assert_close([loaded(x, ids_of(x))], [run(block, x)])


def loaded_again(program: torch.export.ExportedProgram) -> nn.Module:
    file = io.BytesIO()
    torch.export.save(program, file)
    return torch.export.load(io.BytesIO(file.getvalue())).module()


def differentiated(block: FFNBlock, x: Tensor, backend: str) -> None:
    got = grad(lambda x: run(block, x).square().sum())(x.detach())
    assert_close([got], gradients(block, x, run(block, x))[:1])


def forward_differentiated(block: FFNBlock, x: Tensor, backend: str) -> None:
    block, x = block.eval().double(), x.detach().double()
    step = torch.ones_like(x).cumsum(0)
    got = jvp(lambda x: run(block, x), (x,), (step,))[1]
    wanted = (run(block, x + 1e-6 * step) - run(block, x - 1e-6 * step)) / 2e-6
    assert_close([got], [wanted.detach()])


def mapped(block: FFNBlock, x: Tensor, backend: str) -> None:
    x = x.detach()
    both, ids = torch.stack([x, 2 * x]), TokenContext(token_ids=ids_of(x))
    got = vmap(lambda x: block(x, ids).hidden, randomness="same")(both)
    assert_close(list(got), [run(block, x) for x in both])


def mapped_over_parameters(block: FFNBlock, x: Tensor, backend: str) -> None:
    x, ids = x.detach(), TokenContext(token_ids=ids_of(x))
    twice = {name: torch.stack([p, 2 * p]).detach() for name, p in block.named_parameters()}
    if not twice:
        return
    call = vmap(lambda values: functional_call(block, values, (x, ids)).hidden, randomness="same")
    got = call(twice)
    assert_close([got[0]], [run(block, x)])


def called_functionally(block: FFNBlock, x: Tensor, backend: str) -> None:
    wanted = run(block, x)
    values = {name: p.detach().clone() for name, p in block.named_parameters()}
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.zero_()
    torch.manual_seed(2)
    context = TokenContext(token_ids=ids_of(x))
    assert_close([functional_call(block, values, (x, context)).hidden], [wanted])


def without_numbers(name: str, backend: str, device: str) -> None:
    with torch.device(device):
        block = build(name, backend)
    x = torch.empty(*SHAPE, D_MODEL, device=device, requires_grad=True)
    hidden = run(block, x)
    assert (hidden.shape, hidden.dtype, hidden.device.type) == (x.shape, x.dtype, device)
    if hidden.requires_grad:
        hidden.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape


def copied(block: FFNBlock, x: Tensor, backend: str) -> None:
    run(block, x).sum().backward()
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert torch.equal(run(other, x), run(block, x))


def checkpointed(block: FFNBlock, x: Tensor, backend: str) -> None:
    found: list[list[Tensor | None]] = []
    for again in (False, True):
        x.grad = None
        block.zero_grad()
        hidden: Any = checkpoint(run, block, x, use_reentrant=True) if again else run(block, x)
        hidden.square().sum().backward()
        found.append([x.grad, *(p.grad for p in block.parameters())])
    assert_close(found[1], found[0])


WHAT: dict[str, Callable[[FFNBlock, Tensor, str], None]] = {
    "`torch.compile(fullgraph=True)`": compiled,
    "`torch.export`, dynamic batch": exported,
    "`torch.func.grad`": differentiated,
    "`torch.func.jvp`": forward_differentiated,
    "`torch.func.vmap`": mapped,
    "`torch.func.vmap` over parameters": mapped_over_parameters,
    "`torch.func.functional_call`": called_functionally,
    "`copy.deepcopy`, `pickle`": copied,
    "`checkpoint(use_reentrant=True)`": checkpointed,
}
DEVICES = {"FakeTensor": "cpu", "device `meta`": "meta"}

# ---------------------------------------------------------------------------- what is rejected, how

LEADING_AXIS = (
    r"^torch.func.vmap does not work with (experts|a mixture of depths), because .*; "
    "add a leading axis to x instead$"
)
USE_LOOP = (
    r"^experts.backend '{}' (has|does not support) .*; set experts.backend to 'loop', "
    r"which (supports them|has one)$"
)
USE_AUTO = r"experts.backend '{}' copies the loads of the experts to the host.*; set .* to 'auto'"

REJECTED: dict[str, dict[str, tuple[str, str]]] = {
    "`torch.compile(fullgraph=True)`": {"loop": ("`auto`", USE_AUTO)},
    "`torch.export`, dynamic batch": {"loop": ("`auto`", USE_AUTO)},
    "`torch.func.grad`": dict.fromkeys(("cpu", "triton"), ("`loop`", USE_LOOP)),
    "`torch.func.jvp`": dict.fromkeys(("cpu", "grouped_mm", "triton"), ("`loop`", USE_LOOP)),
    **dict.fromkeys(
        ("`torch.func.vmap`", "`torch.func.vmap` over parameters"),
        dict.fromkeys(("auto", *BACKENDS), ("a leading axis", LEADING_AXIS)),
    ),
}
"""Feature of torch -> backend -> what to use instead, and the sentence that names it."""

NO_KERNEL = {
    ("moe-soft_capped_swiglu", "triton"): ("`auto`", "has no kernel for the gate .*; use 'auto'")
}
"""Experts that a backend never computes."""

IN_BFLOAT16 = {"`torch.compile(fullgraph=True)`", "`torch.export`, dynamic batch"}
"""Features that `grouped_mm` supports only in bfloat16; for other dtypes it names `auto`."""

QUICK = {
    ("dense", "auto"),
    ("moe", "auto"),
    ("moe", "loop"),
    ("moe", "cpu"),
    ("depths-moe", "auto"),
}
QUICK_IN_GRAPHS = {("dense", "auto"), ("moe", "auto"), ("moe", "loop"), ("moe-always", "auto")}


def every(*whats: str) -> Any:
    cases: list[Any] = []
    for what in whats:
        quick = QUICK_IN_GRAPHS if what in IN_BFLOAT16 else QUICK
        for name in BLOCKS:
            for backend in ("auto", *BACKENDS) if name in SPARSE else ("auto",):
                marks = () if (name, backend) in quick else pytest.mark.slow
                case = f"{what.replace('`', '')}-{name}-{backend}"
                cases.append(pytest.param(what, name, backend, marks=marks, id=case))
    return pytest.mark.parametrize(("what", "name", "backend"), cases)


@every(*WHAT)
@pytest.mark.filterwarnings("ignore")  # what torch's own tracing and transforms warn of
def test_a_torch_feature_works_or_names_a_backend_that_supports_it(
    what: str, name: str, backend: str
) -> None:
    block, x = build(name, backend), tokens()
    if what in IN_BFLOAT16 and backend == "grouped_mm":
        block, x = block.bfloat16(), x.bfloat16()
    rejected = REJECTED.get(what, {}).get(backend)
    if "vmap" not in what:
        rejected = NO_KERNEL.get((name, backend), rejected)
    if rejected is None or not is_sparse(name):
        WHAT[what](block, x.requires_grad_(), backend)
        return
    with pytest.raises((ValueError, RuntimeError)) as caught:
        WHAT[what](block, x.requires_grad_(), backend)
    sentence = rejected[1].format(backend)
    if isinstance(caught.value, ValueError):
        assert "\n" not in str(caught.value)
    assert caught.match(sentence)


def is_sparse(name: str) -> bool:
    """Return True if a block routes, even if to one dense block, or has experts of matrices."""
    experts = BLOCKS[name].get("experts", {}).get("type")
    config = FFNConfig.model_validate(BLOCKS[name])
    return experts not in OF_TABLES and (bool(config.router_infos()) or name == "soft_moe")


@every(*DEVICES)
def test_tensors_without_numbers_have_shapes_all_the_same(
    what: str, name: str, backend: str
) -> None:
    if what == "FakeTensor":
        with FakeTensorMode():
            without_numbers(name, backend, "cpu")
    else:
        without_numbers(name, backend, "meta")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize("transform", ["grad", "jvp"])
def test_a_compiled_transform_does_not_lose_the_experts(transform: str) -> None:
    block, x = build("moe", "auto"), tokens()

    def derivative(x: Tensor) -> Tensor:
        if transform == "jvp":
            return jvp(lambda x: block(x).hidden, (x,), (torch.ones_like(x),))[1]
        return grad(lambda x: block(x).hidden.square().sum())(x)

    torch.compiler.reset()
    whole: Any = torch.compile(derivative, backend="eager", fullgraph=True)
    with pytest.raises(
        RuntimeError, match=r"under a torch\.func transform .* without fullgraph=True"
    ):
        whole(x)
    torch.compiler.reset()
    parts: Any = torch.compile(derivative, backend="aot_eager")
    assert_close([parts(x)], [derivative(x)])


@pytest.mark.filterwarnings("ignore")
def test_grouped_mm_in_a_graph_of_another_dtype_suggests_auto() -> None:
    block, x = build("moe", "grouped_mm"), tokens()
    sentence = (
        r"^experts.backend 'grouped_mm' takes torch.bfloat16 .* got torch.float32 .*; use 'auto'$"
    )
    with pytest.raises(ValueError, match=sentence):
        exported(block, x, "grouped_mm")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    ["moe", *(pytest.param(name, marks=pytest.mark.slow) for name in BLOCKS if name != "moe")],
)
def test_all_that_a_block_returns_is_exported_saved_and_loaded(name: str) -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = build(name, "auto").eval()

        def forward(self, x: Tensor, ids: Tensor) -> FFNOutput:
            return self.block(x, TokenContext(token_ids=ids))

    module, given = Module(), (tokens(), ids_of(tokens()))
    loaded: Any = loaded_again(torch.export.export(module, given))
    output, wanted = loaded(*given), module(*given)
    assert_close([output.hidden], [wanted.hidden])
    assert list(output.routings) == list(wanted.routings)
    for key, routing in wanted.routings.items():
        assert torch.equal(output.routings[key].expert_ids_N, routing.expert_ids_N)
        assert output.routings[key].num_experts == routing.num_experts
    torch.testing.assert_close(output.shared_shares, wanted.shared_shares)


@pytest.mark.filterwarnings("ignore")
def test_a_capacity_is_fixed_in_a_graph_that_leaves_sizes_open() -> None:
    """`dynamic=True` leaves floats open too, which have no exact share: the factor, and the k of a router."""
    torch.compiler.reset()
    torch.manual_seed(0)
    block = build_ffn(moe(router={"type": "relu", "k": 2}, capacity={"factor": 0.3}), D_MODEL)
    whole: Any = torch.compile(block, backend="eager", fullgraph=True, dynamic=True)
    for batch in (2, 3):
        x = tokens(batch, 5)
        wanted, got = block(x), whole(x)
        dropped_N = wanted.routings["routing"].dropped_N
        assert dropped_N.any()
        assert torch.equal(got.routings["routing"].dropped_N, dropped_N)
        assert_close([got.hidden], [wanted.hidden])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["moe", "moe-relu", "mixture_of_depths"])
def test_a_compiled_block_leaves_padding_out(name: str) -> None:
    torch.compiler.reset()
    block, x = build(name, "auto"), tokens()
    context = TokenContext(mask=torch.arange(SHAPE[1]) < torch.tensor([[6], [3]]))
    whole: Any = torch.compile(block, backend="eager", fullgraph=True)
    assert_close([whole(x, context).hidden], [block(x, context).hidden])


EXPERT_CHOICE = {
    "type": "moe",
    "num_experts": 4,
    "router": {"type": "expert_choice", "k": 1, "among": "batch"},
}


@pytest.mark.filterwarnings("ignore")
def test_an_exported_mixture_takes_sequences_of_any_length() -> None:
    block, x = build("moe", "auto").eval(), tokens()
    lengths = {1: torch.export.Dim("length", min=2, max=64)}
    whole = torch.export.export(block, (x,), dynamic_shapes={"x": lengths}).module()
    more = tokens(SHAPE[0], 9)
    assert_close([whole(more).hidden], [block(more).hidden])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ffn", ["soft_moe", "mixture_of_depths", EXPERT_CHOICE])
def test_unnamed_dimensions_export_a_block_whose_sizes_follow_the_tokens(ffn: Any) -> None:
    torch.manual_seed(0)
    block, x = build_ffn(ffn, D_MODEL).eval(), tokens()
    unnamed = {"x": dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC)}
    whole = torch.export.export(block, (x,), dynamic_shapes=unnamed).module()
    more = tokens(5, 9)
    assert_close([whole(more).hidden], [block(more).hidden])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_another_process_runs_an_exported_block(tmp_path: Path) -> None:
    block, x = build("moe", "cpu").eval(), tokens()
    shapes = {"x": {0: torch.export.Dim("batch")}}
    torch.export.save(
        torch.export.export(block, (x,), dynamic_shapes=shapes), tmp_path / "block.pt2"
    )
    more = tokens(5, 6)
    torch.save(more, tmp_path / "x.pt")
    program = (
        "import torch, moe_ffn; x = torch.load('x.pt'); "
        "torch.save(torch.export.load('block.pt2').module()(x).hidden, 'y.pt')"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True)
    assert_close([torch.load(tmp_path / "y.pt")], [block(more).hidden])


def test_the_documented_table_is_this_one() -> None:
    columns = get_args(BackendName)
    rows = ["| operation | " + " | ".join(f"`{backend}`" for backend in columns) + " |"]
    rows.append("|---" * (len(columns) + 1) + "|")
    for what in (*WHAT, *DEVICES):
        cells = [REJECTED.get(what, {}).get(backend, ("yes",))[0] for backend in columns]
        if what in IN_BFLOAT16:
            cells[columns.index("grouped_mm")] = "bfloat16"
        rows.append(f"| {what} | " + " | ".join(cells) + " |")
    page = (Path(__file__).parents[2] / "docs/howto/backend.md").read_text()
    assert "\n".join(rows) in page, "\n".join(rows)


# -- derivatives of a whole layer, router included, against finite differences; and second derivatives


@every_router
def test_gradients_of_gradients_of_a_layer_are_those_of_finite_differences(
    router: dict[str, Any],
) -> None:
    """Training mode, except for `sparse_mixer`, whose gradient in training is not that of its output."""
    layer = build_layer(router, backend="loop").double()
    layer.train(router["type"] != "sparse_mixer")
    batch = make_batch(batch=1, length=3)
    names = [name for name, _ in layer.named_parameters()]

    def hidden(x_BSD: Tensor, *parameters: Tensor) -> Tensor:
        torch.manual_seed(0)  # the same noise
        values = dict(zip(names, parameters, strict=True))
        return functional_call(layer, values, (x_BSD, batch.context)).hidden

    inputs = (batch.x_BSD.double().requires_grad_(), *layer.parameters())
    assert gradgradcheck(hidden, inputs, fast_mode=True)


# --------------------------------------------------------------------- every backend, one by one

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    # Of a linear one, the gradient that reaches the layer is a constant, and the second derivative
    # is not 0 all the same.
    "linear": lambda y: y.sum(),
    "quadratic": lambda y: y.square().sum(),
}


def second_derivatives(layer: MoEFFN, x: Tensor, mask: Tensor, loss: str) -> list[Tensor]:
    """d/d(everything) of the squared gradient of a loss, as a gradient penalty has it."""
    x = x.detach().requires_grad_()
    hidden = layer(x, TokenContext(mask)).hidden
    (gradient,) = torch.autograd.grad(LOSSES[loss](hidden), x, create_graph=True)
    return list(torch.autograd.grad(gradient.square().sum(), [x, *layer.parameters()]))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_derivative_is_right_or_rejected(
    backend: str, loss: str, build_moe: Any, tokens_and_mask: Any, dtype_of: Any
) -> None:
    options = {"experts": {"bias": True}, "capacity": {"factor": 1.0}}
    layer = build_moe(backend, **options)
    x, mask = tokens_and_mask(dtype_of(backend), padded=True)
    if backend in ("cpu", "triton"):
        message = rf"experts\.backend '{backend}' has no second derivative.*set experts\.backend to 'loop'"
        with pytest.raises(RuntimeError, match=message):
            second_derivatives(layer, x, mask, loss)
        return
    reference = build_moe("loop", **options).double()
    wanted = second_derivatives(reference, x.double(), mask, loss)
    tolerance = 1e-12 if x.dtype == torch.float64 else 1e-4  # of sums of squares of sums
    for one, other in zip(second_derivatives(layer, x, mask, loss), wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


def test_a_second_derivative_through_a_bfloat16_router_is_right(
    build_moe: Any, tokens_and_mask: Any
) -> None:
    layer = build_moe("loop").bfloat16()
    x, mask = tokens_and_mask(torch.bfloat16, padded=True)
    got = second_derivatives(layer, x, mask, "quadratic")
    wanted = second_derivatives(layer.double(), x.double(), mask, "quadratic")
    for one, other in zip(got, wanted, strict=True):
        error = (one.double() - other).abs().max() / other.abs().max()
        assert error < 5e-2  # 8 bits, rounded some ten times


def gradient(function: Callable[..., Tensor], x: Tensor, w: Tensor) -> object:
    return grad(function, argnums=(0, 1))(x, w)


def gradient_per_sequence(function: Callable[..., Tensor], x: Tensor, w: Tensor) -> object:
    return vmap(grad(function), in_dims=(0, None))(torch.stack([x, 2 * x]), w)


def directional_derivative(function: Callable[..., Tensor], x: Tensor, w: Tensor) -> object:
    return jvp(function, (x, w), (torch.ones_like(x), torch.ones_like(w)))


def second_gradient(function: Callable[..., Tensor], x: Tensor, w: Tensor) -> object:
    return hessian(function)(x, w)


# torch's own jvp loads rules that are written with it.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "transform", [gradient, gradient_per_sequence, directional_derivative, second_gradient]
)
def test_transforms_of_torch_func_go_through_a_router_of_bfloat16_tokens(
    transform: Callable[..., Any],
) -> None:
    torch.manual_seed(0)
    projection = RouterLinear(d_model=6, num_experts=4, bias=True)
    x_TD, weight_ED = torch.randn(5, 6).bfloat16(), torch.randn(4, 6)

    def ours(x: Tensor, w: Tensor) -> Tensor:
        values = {"weight": w, "bias": w[:, 0]}
        return functional_call(projection, values, (x,)).sin().sum()

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.linear(x.float(), w, w[:, 0]).sin().sum()

    got, wanted = (transform(function, x_TD, weight_ED) for function in (ours, plain))
    torch.testing.assert_close(got, wanted)
