"""Every kernel, compiled for kinds of GPU that need not be there, at the sizes of published models.

    python -m tests.kernels.compile_kernels [--gpu 80 90 ...] [--only WORD ...] [--table]

Prints one JSON line per kernel: what ptxas says of registers and spills, shared memory, programs that share a
multiprocessor, and the tensor-core instructions. `--table` prints the table of docs/performance instead.
Triton's interpreter, under which the other tests run, proves none of this, and must be off.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
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


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU, from NVIDIA's table of compute capabilities."""

    name: str
    shared: int
    """Bytes of shared memory that one program may have."""
    multiprocessor: int
    """Bytes of shared memory of a multiprocessor."""


GPUS = {
    80: Gpu("A100", 163 << 10, 164 << 10),
    89: Gpu("RTX 4090", 99 << 10, 100 << 10),
    90: Gpu("H100, H200", 227 << 10, 228 << 10),
    100: Gpu("B200", 227 << 10, 228 << 10),
    120: Gpu("RTX 5090", 99 << 10, 100 << 10),
}
REGISTERS = 65_536
"""Of a multiprocessor of all of them."""

TENSOR_CORES = {
    80: "mma.sync",
    89: "mma.sync",
    90: "wgmma.mma_async",
    100: "tcgen05.mma",
    120: "mma.sync",
}
"""PTX instruction of each GPU's fastest products."""

MODELS = {
    "OLMoE 1B-7B": (32768, 2048, 1024, 64, 8),
    "Qwen3 30B-A3B": (32768, 2048, 768, 128, 8),
    "Qwen3 235B-A22B": (8192, 4096, 1536, 128, 8),
    "Mixtral 8x7B": (16384, 4096, 14336, 8, 2),
    "DeepSeek-V3": (16384, 7168, 2048, 256, 8),
    "DeepSeek-V2-Lite": (16384, 2048, 1408, 64, 6),
    "gpt-oss 120B": (16384, 2880, 2880, 128, 4),
    "Phi-3.5-MoE": (16384, 4096, 6400, 16, 2),
    "Llama 4 Scout": (32768, 5120, 8192, 16, 1),
    "DBRX": (16384, 6144, 10752, 16, 4),
    "Qwen1.5-MoE": (32768, 2048, 1408, 60, 4),
    "Granite 3.0 1B": (8192, 1024, 512, 32, 8),
}
"""Published models -> T, D, F, E, K."""

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
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

SWIGLU = {"ACTIVATION": "silu", "GATED": True}
PLAIN: dict[str, Any] = {"bias_ptr": None, "dropout_ptr": None, "added_ptr": None}


KERNELS: dict[str, Any] = {
    "hidden": hidden_kernel,
    "hidden_gradient": hidden_gradient_kernel,
    "product": product_kernel,
    "up_gradient": weight_gradient_kernel,
    "down_gradient": weight_gradient_kernel,
    "bias_gradient": bias_gradient_kernel,
    "combine": combine_kernel,
}
"""Name of a kernel in the tables of tiles -> the kernel."""


@dataclass(frozen=True)
class Job:
    """A kernel to compile; two models may ask for the same one."""

    gpu: int
    kernel: str
    variant: str
    dtype: str
    constants: dict[str, Any]
    tile: launch.Tile | None

    @property
    def key(self) -> str:
        return repr(
            (
                self.gpu,
                self.kernel,
                self.dtype,
                sorted(self.constants.items(), key=str),
                self.tile,
            )
        )


def launches(
    gpu: int,
    model: str,
    dtype: str = "bf16",
    *,
    precision: str = "ieee",
    rows: int | None = None,
    variant: str = "",
    epilogue: dict[str, Any] = SWIGLU | PLAIN,
) -> Iterator[Job]:
    """The six launches of a training step of a model's layer.

    Args:
        rows: rows per expert; None: as many as the model has.
        epilogue: activation, and the pointers that are absent.
    """
    num_tokens, d_model, d_ff, num_experts, k = MODELS[model]
    rows = num_tokens * k // num_experts if rows is None else rows
    tiles = launch.find_tiles(DTYPES[dtype], (gpu // 10, gpu % 10), precision)
    here = {"PRECISION": precision}
    routed = {**here, "E": num_experts, "GROUP": 8}
    bias = {"bias_ptr": None} if "bias_ptr" in epilogue else {}
    first = 2 * d_ff if epilogue["GATED"] else d_ff
    widths = {"D": d_model, "F": d_ff, **routed, **epilogue}
    down = {"IN": d_ff, "OUT": d_model, **routed, **bias, "in_stride": 1}
    to_tokens = {"IN": first, "OUT": d_model, **routed, "bias_ptr": None, "out_stride": 1}
    up_gradient = {"IN": d_model, "OUT": first, **here, "output_ids_ptr": None}
    down_gradient = {"IN": d_ff, "OUT": d_model, **here, "input_ids_ptr": None}
    for kernel, constants in (
        ("hidden", widths),
        ("hidden_gradient", widths),
        ("product", down),
        ("product", to_tokens),
        ("up_gradient", up_gradient),
        ("down_gradient", down_gradient),
    ):
        tile = launch.tile_for(tiles[kernel], rows)
        yield Job(gpu, kernel, variant or model, dtype, constants, tile)


def variants(gpu: int) -> Iterator[Job]:
    """Other dtypes, few rows per expert, other epilogues, and the kernels without products."""
    model = "DeepSeek-V2-Lite"
    yield from launches(gpu, model, "fp16", variant="fp16")
    yield from launches(gpu, model, "fp32", variant="fp32")
    yield from launches(gpu, model, "fp32", precision="tf32", variant="tf32")
    for rows in (1, 64):
        yield from launches(gpu, model, rows=rows, variant=f"{rows} rows per expert")
    everything = {"ACTIVATION": "clamped_swiglu", "GATED": True}
    yield from launches(gpu, model, variant="clamped, bias, dropout, adapter", epilogue=everything)
    for activation, gated in (
        *(("gelu", False), ("gelu", True), ("gelu_tanh", False), ("relu_squared", False)),
        *(("relu", True), ("sigmoid", True), ("identity", True)),
    ):
        epilogue = {"ACTIVATION": activation, "GATED": gated, **PLAIN}
        name = f"{'gated ' * gated}{activation}"
        yield from list(launches(gpu, model, variant=name, epilogue=epilogue))[:2]
    yield Job(
        gpu,
        "bias_gradient",
        "bias",
        "bf16",
        {"OUT": 2048, "BLOCK_O": 128, "BLOCK_K": 32},
        None,
    )
    yield Job(gpu, "combine", "combine", "bf16", {"D": 2048, "BLOCK_D": 1024}, None)


def jobs(gpus: list[int]) -> list[Job]:
    """Every job once, under the name of the first model that needs it."""
    every = [job for gpu in gpus for model in MODELS for job in launches(gpu, model)]
    every += [job for gpu in gpus for job in variants(gpu)]
    return list({job.key: job for job in reversed(every)}.values())[::-1]


def compile_job(job: Job) -> dict[str, Any]:
    """Compile a kernel as a launch would; every size that is no constant divides by 16."""
    options = {"num_warps": 4} if job.tile is None else job.tile.options
    blocks = {name: options.pop(name) for name in list(options) if name.startswith("BLOCK")}
    constants, kernel = {**job.constants, **blocks}, KERNELS[job.kernel]
    signature, divisible = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        pointer = POINTERS.get(name, f"*{job.dtype}")
        signature[name] = pointer if name.endswith("_ptr") else NUMBERS.get(name, "i32")
        if signature[name] != "fp32":
            divisible[(index,)] = [["tt.divisibility", 16]]
    knobs.compilation.always_compile = True
    knobs.nvidia.dump_ptxas_log = True
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        binary = triton.compile(
            ASTSource(kernel, signature, constants, divisible),
            target=GPUTarget("cuda", job.gpu, 32),
            options={**options, "enable_fp_fusion": True},
        )
    ptx, shared, gpu = binary.asm["ptx"], binary.metadata.shared, GPUS[job.gpu]
    registers = counted(log.getvalue(), "registers")
    threads = 32 * options["num_warps"]
    return {
        "gpu": job.gpu,
        "kernel": job.kernel,
        "variant": job.variant,
        "dtype": "tf32" if job.constants.get("PRECISION") == "tf32" else job.dtype,
        "tile": [*blocks.values(), *options.values()],
        "registers": registers,
        "spilled": counted(log.getvalue(), "bytes spill stores"),
        "shared": shared,
        # A program reserves 1 KB more.
        "programs": min(REGISTERS // (registers * threads), gpu.multiprocessor // (shared + 1024)),
        "tensor_cores": ptx.count(TENSOR_CORES[job.gpu]),
        "async_copies": len(re.findall(r"cp\.async\.c[ag]", ptx)),
    }


def counted(log: str, what: str) -> int:
    """Parse ptxas -v: "Used 168 registers", "0 bytes stack frame, 0 bytes spill stores, ..."."""
    return int(re.findall(rf"(\d+) {what}", log)[-1])


def table(found: list[dict[str, Any]]) -> list[str]:
    """Return a Markdown table with a line per kernel, tile and GPU, and the extremes over the models."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for one in found:
        if one["tile"] and one["dtype"] == "bf16":
            key = (GPUS[one["gpu"]].name, one["kernel"], tuple(one["tile"]))
            groups.setdefault(key, []).append(one)
    lines = [
        "| GPU | kernel | tile: M, O, K, stages, warps | registers | shared | programs at once | spilled |",
        "|---|---|---|---|---|---|---|",
    ]
    for (gpu, kernel, tile), group in groups.items():
        registers = [one["registers"] for one in group]
        programs = sorted({one["programs"] for one in group})
        lines.append(
            f"| {gpu} | {kernel} | {', '.join(map(str, tile))} | {min(registers)} to {max(registers)} "
            f"| {max(one['shared'] for one in group) / 1024:.0f} KB | {' or '.join(map(str, programs))} "
            f"| {max(one['spilled'] for one in group)} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile every kernel for kinds of GPU.")
    parser.add_argument("--gpu", type=int, nargs="+", choices=list(GPUS), default=[80, 90, 100])
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    chosen = [
        job
        for job in jobs(given.gpu)
        if not given.only or any(w in f"{job.kernel} {job.variant}" for w in given.only)
    ]
    found: list[dict[str, Any]] = []
    context = get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        for one in pool.map(compile_job, chosen):
            found.append(one)
            if not given.table:
                print(json.dumps(one), flush=True)
    if given.table:
        print("\n".join(table(found)))


if __name__ == "__main__":
    main()
