"""The bytes a layer keeps from its forward pass for its backward pass.

Each distinct piece of memory counts once; parameters and the input are there anyway and do not count.
Counted, not timed, by the hooks that autograd calls on every tensor it saves: what a function keeps by
other means would not be seen.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.benchmark.layers import AUTO, DENSE, Layer
from experiments.benchmark.peers import HF_EAGER, HF_GROUPED
from experiments.benchmark.report import Promise, Row, table, times
from experiments.benchmark.session import Session, version_of
from experiments.benchmark.shapes import Shape

SHAPES = (
    Shape(2048, 512, 512, 8, 2, "fp32"),
    Shape(4096, 256, 128, 32, 4, "fp32"),
    Shape(2048, 512, 512, 8, 2, "bf16"),
)

LIMIT = 0.5
"""Of what the more frugal of Hugging Face's two keeps."""


def run(session: Session) -> None:
    for number, shape in enumerate(SHAPES):
        if number:
            session.say()
        session.say(f"{shape}, kept for the backward pass")
        kept, layers = measure(session, shape)
        dense = kept[DENSE]
        rows = [
            [
                layer.name,
                _mebibytes(kept[layer.name]),
                times(kept[layer.name] / dense),
                layer.computes,
            ]
            for layer in layers
        ]
        session.say(table(["layer", "MiB", f"/ {DENSE}", "computes"], rows))
        session.rows += [_row(shape, layer, kept[layer.name], dense) for layer in layers]
        peers = [kept[name] for name in (HF_EAGER, HF_GROUPED) if name in kept]
        why = "" if peers else "no transformers here"
        for layer in layers:
            if layer.name in (AUTO, HF_EAGER, HF_GROUPED) and not layer.is_comparable:
                why = f"{layer.name} {layer.computes}"
        promise = Promise(
            suite="memory",
            case=str(shape),
            claim="bytes / those of HF eager or grouped_mm",
            limit=LIMIT,
            figure=None if why else kept[AUTO] / min(peers),
            why_unmeasured=why,
        )
        session.promise(promise)


def measure(session: Session, shape: Shape) -> tuple[dict[str, int], list[Layer]]:
    """Bytes by the name of the layer."""
    case = session.case(shape)
    layers = session.layers(case, (HF_EAGER, HF_GROUPED))
    return {layer.name: saved_bytes(layer.module, case.tokens.x_BSD) for layer in layers}, layers


def saved_bytes(module: nn.Module, x: Tensor) -> int:
    """Bytes of the storages that autograd holds once the forward pass is over."""
    uncounted = {_address(tensor) for tensor in (x, *module.parameters())}
    # The tensors themselves are held, so that no address is given out a second time.
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved.setdefault(_address(tensor), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x)
    sizes = {
        address: tensor.untyped_storage().nbytes()
        for address, tensor in saved.items()
        if address not in uncounted
    }
    return sum(sizes.values())


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f}"


def _row(shape: Shape, layer: Layer, num_bytes: int, dense: int) -> Row:
    return Row(
        suite="memory",
        case=str(shape),
        candidate=layer.name,
        version=version_of(layer.name),
        computes=layer.computes,
        unit="B",
        median=num_bytes,
        lower_quartile=num_bytes,
        upper_quartile=num_bytes,
        rounds=1,
        ratio=num_bytes / dense,
        ratio_to=DENSE,
        num_tokens=shape.num_tokens,
        d_model=shape.d_model,
        d_ff=shape.d_ff,
        num_experts=shape.num_experts,
        k=shape.k,
        dtype=shape.dtype,
    )
