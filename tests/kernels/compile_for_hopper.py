"""Every kernel compiled ahead for a GPU of compute capability 9.0, on a machine without one.

Prints one JSON line per variant: what ptxas says of registers and spills, shared memory, and whether
the products became `wgmma`. The interpreter, under which the other tests run, proves none of this.
Run by `test_triton.py`, in a process of its own: the interpreter must be off.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moe_ffn.kernels.triton import launch
from moe_ffn.kernels.triton.backward import (
    bias_gradient_kernel,
    hidden_gradient_kernel,
    weight_gradient_kernel,
)
from moe_ffn.kernels.triton.forward import combine_kernel, hidden_kernel, product_kernel

D, F, E, RANK = 1024, 1408, 64, 16
POINTERS = {
    "offsets_ptr": "*i32",
    "total_ptr": "*i32",
    "token_ids_ptr": "*i64",
    "output_ids_ptr": "*i64",
    "input_ids_ptr": "*i64",
    "ranks_ptr": "*i64",
    "starts_ptr": "*i64",
    "weights_ptr": "*fp32",
    "d_weights_ptr": "*fp32",
}
NUMBERS = {"alpha": "fp32", "limit": "fp32"}


def compiled(kernel: Any, dtype: str, constants: dict[str, Any], **options: int) -> Any:
    """`kernel` as a launch with these constants would compile it; every other size divides by 16."""
    signature, divisible = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        if name.endswith("_ptr"):
            signature[name] = POINTERS.get(name, f"*{dtype}")
        else:
            signature[name] = NUMBERS.get(name, "i32")
        if signature[name] != "fp32":
            divisible[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, divisible)
    return triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={**options, "enable_fp_fusion": True}
    )


def numbers(log: str) -> dict[str, int]:
    """Parse ptxas -v: "Used 168 registers", "0 bytes stack frame, 0 bytes spill stores, ..."."""

    def before(what: str) -> int:
        return int(re.findall(rf"(\d+) {what}", log)[-1])

    spilled = before("bytes spill stores") + before("bytes spill loads")
    return {"registers": before("registers"), "spilled": spilled}


def variants() -> Iterator[tuple[str, Any, str, dict[str, Any], list[triton.Config]]]:
    """(name, kernel, dtype, constants, configs) of what is to be compiled."""
    swiglu = {"ACTIVATION": "silu", "GATED": True}
    epilogues = {
        "swiglu": swiglu,
        "gelu": {**swiglu, "ACTIVATION": "gelu", "GATED": False},
        "gelu_tanh": {**swiglu, "ACTIVATION": "gelu_tanh", "GATED": False},
        "geglu": {**swiglu, "ACTIVATION": "gelu"},
        "clamped": {**swiglu, "ACTIVATION": "clamped_swiglu"},
        "relu_squared": {**swiglu, "ACTIVATION": "relu_squared", "GATED": False},
        "reglu": {**swiglu, "ACTIVATION": "relu"},
        "glu": {**swiglu, "ACTIVATION": "sigmoid"},
        "bilinear": {**swiglu, "ACTIVATION": "identity"},
    }
    where = {"E": E, "GROUP": launch.GROUP, "PRECISION": "ieee"}
    without: dict[str, Any] = {"bias_ptr": None}
    dropless: dict[str, Any] = {"dropout_ptr": None, "added_ptr": None}
    for name, epilogue in epilogues.items():
        widths = {"D": D, "F": F, **where, **epilogue}
        for kernel, tiles in (
            (hidden_kernel, launch.HIDDEN),
            (hidden_gradient_kernel, launch.HIDDEN_GRADIENT),
        ):
            some = tiles if name in ("swiglu", "gelu") else tiles[:1]
            yield name, kernel, "bf16", {**widths, **without, **dropless}, some
            if name == "clamped":
                yield "clamped, bias, dropout and adapter", kernel, "bf16", widths, tiles[:1]
    odd = {"D": 1000, "F": 1400, **where, **swiglu, **without, **dropless}
    yield "odd widths", hidden_kernel, "bf16", odd, launch.HIDDEN[:1]
    yield "odd widths", hidden_gradient_kernel, "bf16", odd, launch.HIDDEN_GRADIENT[:1]
    yield "float32", hidden_kernel, "fp32", odd, launch.FLOAT32
    yield "tf32", hidden_gradient_kernel, "fp32", {**odd, "PRECISION": "tf32"}, launch.FLOAT32
    yield "fp16", hidden_kernel, "fp16", odd, launch.HIDDEN[:1]

    down = {"IN": F, "OUT": D, **where, **without, "in_stride": 1}
    yield "down", product_kernel, "bf16", down, launch.PRODUCT
    transposed = {"IN": 2 * F, "OUT": D, **where, **without, "out_stride": 1}
    yield "gradient of tokens", product_kernel, "bf16", transposed, launch.PRODUCT

    low = {**down, "OUT": RANK}
    yield "A of an adapter", product_kernel, "bf16", low, launch.PRODUCT
    yield "B of an adapter", product_kernel, "bf16", {**down, "IN": RANK}, launch.PRODUCT
    low = {**transposed, "OUT": RANK}
    yield "gradient by B of an adapter", product_kernel, "bf16", low, launch.PRODUCT
    low = {**transposed, "IN": RANK}
    yield "gradient by A of an adapter", product_kernel, "bf16", low, launch.PRODUCT

    sizes = {"IN": D, "OUT": 2 * F, "PRECISION": "ieee"}
    up = {**sizes, "output_ids_ptr": None}
    yield "up", weight_gradient_kernel, "bf16", up, launch.WEIGHT_GRADIENT
    down = {**sizes, "IN": F, "OUT": D, "input_ids_ptr": None}
    yield "down", weight_gradient_kernel, "bf16", down, launch.WEIGHT_GRADIENT
    low = {**up, "OUT": RANK}
    yield "A of an adapter", weight_gradient_kernel, "bf16", low, launch.WEIGHT_GRADIENT
    low = {**down, "IN": RANK}
    yield "B of an adapter", weight_gradient_kernel, "bf16", low, launch.WEIGHT_GRADIENT

    blocks = [triton.Config({"BLOCK_O": 128, "BLOCK_K": 32}, num_warps=4)]
    yield "down", bias_gradient_kernel, "bf16", {"OUT": D}, blocks
    yield "y", combine_kernel, "bf16", {"D": D}, [triton.Config({"BLOCK_D": 1024}, num_warps=4)]


def main(chosen: list[str]) -> None:
    knobs.compilation.always_compile = True
    knobs.nvidia.dump_ptxas_log = True
    for name, kernel, dtype, constants, tiles in variants():
        if chosen and not any(word in f"{kernel.__name__} {name}" for word in chosen):
            continue
        for config in tiles:
            log = io.StringIO()
            with contextlib.redirect_stdout(log):
                binary = compiled(
                    kernel,
                    dtype,
                    {**constants, **config.kwargs},
                    num_warps=config.num_warps,
                    num_stages=config.num_stages,
                )
            ptx = binary.asm["ptx"]
            found = {
                "kernel": kernel.__name__,
                "variant": name,
                "dtype": dtype,
                "config": [*config.kwargs.values(), config.num_stages, config.num_warps],
                "wgmma": ptx.count("wgmma.mma_async"),
                "cp.async": ptx.count("cp.async.cg") + ptx.count("cp.async.ca"),
                "shared": binary.metadata.shared,
                **numbers(log.getvalue()),
            }
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
