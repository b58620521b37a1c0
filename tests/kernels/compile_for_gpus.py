"""Compile every kernel at the launches of real models, for three kinds of GPUs, without a GPU.

Both operators run on tensors without data, and a launch compiles its kernel instead of running it. The
interpreter, under which the other tests run, shows none of what is printed here: one JSON line per compiled
kernel, or with `--table` the table of docs/performance/compiled.md. `test_triton.py` runs it in a process
of its own.

    python -m tests.kernels.compile_for_gpus [--table] [WORD of "sm_90 OLMoE 1B-7B bfloat16" ...]

T tokens, D model width, E experts, F hidden width, K experts per token, N = T K pairs
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import multiprocessing
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from moe_ffn.kernels.activations import ClampedSwiGLU
from moe_ffn.kernels.autograd import encode_gate
from moe_ffn.kernels.triton import launch

SHARED_MEMORY = {80: 163, 89: 99, 90: 227, 100: 227, 120: 99}
"""Compute capability -> KiB that one program may have; a multiprocessor has one more."""
ARCHITECTURES = (80, 90, 100)
TENSOR_CORES = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")
KERNELS = (
    "round",
    "hidden",
    "hidden_gradient",
    "product",
    "weight_gradient",
    "bias_gradient",
    "combine",
)


@dataclass(frozen=True)
class Model:
    """The experts of a published model, and the tokens of a step."""

    name: str
    T: int
    D: int
    F: int
    E: int
    K: int
    dtypes: tuple[str, ...] = ("bfloat16",)
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    clamp: tuple[float, float] | None = None
    dropout: bool = False
    rank: int | None = None
    training: bool = True

    def run(self, dtype: torch.dtype) -> None:
        """Launch the kernels of a forward and a backward pass."""
        T, D, F, E, N = self.T, self.D, self.F, self.E, self.T * self.K
        H = 2 * F if self.gated else F

        def empty(*shape: Any, like: torch.dtype = dtype, given: bool = True) -> Tensor | None:
            return torch.empty(shape, dtype=like, device="meta") if given else None

        x_TD, weights_N = empty(T, D), empty(N, like=torch.float32)
        biases = empty(E, H, given=self.bias), empty(E, D, given=self.bias)
        shapes = ((E, self.rank, D), (E, H, self.rank), (E, self.rank, F), (E, D, self.rank))
        adapters = [empty(*shape, given=self.rank is not None) for shape in shapes]
        indices = [empty(N, like=torch.int64), empty(E, like=torch.int32)]
        indices += [empty(N, like=torch.int64), empty(T + 1, like=torch.int64)]
        tensors = [x_TD, weights_N, empty(E, H, D), empty(E, D, F), *biases, *adapters, *indices]
        tensors += [empty(N, F, given=self.dropout)]
        gate = None if self.clamp is None else ClampedSwiGLU(*self.clamp)
        options = self.activation, encode_gate(gate), self.gated, False, dtype
        _, pre_NH = launch.experts._init_fn(*tensors, *options, self.training)
        if self.training:
            launch.experts_backward._init_fn(x_TD, *tensors, pre_NH, *options, [True] * 10)


FLOAT32 = ("bfloat16", "float32", "tf32")
MODELS = (
    Model("OLMoE 1B-7B", 32768, 2048, 1024, 64, 8, ("float16", *FLOAT32)),
    Model("Mixtral 8x7B", 16384, 4096, 14336, 8, 2),
    Model("Qwen3 30B-A3B", 8192, 2048, 768, 128, 8, ("bfloat16", "tf32")),
    Model("Qwen3 30B-A3B, decoding", 16, 2048, 768, 128, 8, training=False),
    Model("Qwen3 235B-A22B", 32768, 4096, 1536, 128, 8),
    Model("DeepSeek-V3", 32768, 7168, 2048, 256, 8),
    Model("DeepSeekMoE 16B, dropout", 16384, 2048, 1408, 64, 6, dropout=True),
    Model("DBRX", 16384, 6144, 10752, 16, 4),
    Model("Phi-3.5-MoE, LoRA", 8192, 4096, 6400, 16, 2, rank=16),
    Model("Llama 4 Maverick", 8192, 5120, 8192, 128, 1),
    Model("GLM-4.5-Air", 16384, 4096, 1408, 128, 8),
    Model("gpt-oss-20b", 8192, 2880, 2880, 32, 4, FLOAT32, bias=True, clamp=(1.702, 7.0)),
    Model(
        "Nemotron 3 Nano", 8192, 2688, 1856, 128, 6, FLOAT32, activation="relu_squared", gated=False
    ),
)


class NoGPU:
    """A driver of Triton that has no GPU and compiles for `architecture`."""

    architecture = 90

    def get_current_device(self) -> int:
        return self.architecture  # Triton keeps the compiled kernels of each device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)


class Compiler:
    """Stands for a kernel in `launch`: a launch compiles it, unless it is compiled already."""

    def __init__(self, kernel: Any, found: list[dict[str, Any]]) -> None:
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_it(*args: Any, **options: Any) -> None:
            log = io.StringIO()
            with contextlib.redirect_stdout(log):
                binary = self.kernel.warmup(*args, grid=grid, **options)
            if log.getvalue():
                blocks = [size for name, size in options.items() if name.startswith("BLOCK")]
                tile = (*blocks, options.get("num_stages"), options["num_warps"])
                self.found.append({"tile": tile, **measured(binary, log.getvalue(), tile[-1])})

        return compile_it


def measured(binary: Any, log: str, warps: int) -> dict[str, Any]:
    """Sizes of a compiled kernel; "Used 168 registers, ... 0 bytes spill stores" is from ptxas -v."""

    def before(what: str) -> int:
        return int(re.findall(rf"(\d+) {what}", log)[-1])

    ptx, shared = binary.asm["ptx"], binary.metadata.shared
    buffers = re.findall(r"local_alloc : .*memdesc<(\d+)x\d+x\d+x", binary.asm["ttgir"])
    instructions = [name for name in TENSOR_CORES if name in ptx]
    registers = before("registers")
    per_warp = -(-registers * 32 // 256) * 256
    memory = (SHARED_MEMORY[binary.metadata.target.arch] + 1) * 1024
    return {
        "registers": registers,
        "spilled": before("bytes spill stores") + before("bytes spill loads"),
        "shared": shared,
        "programs": min(65536 // (per_warp * warps), memory // (shared + 1024), 64 // warps),
        "instruction": instructions[-1] if instructions else None,
        "buffers": min(map(int, buffers), default=None),
        "waits": max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", ptx)), default=None),
    }


def compiled(job: tuple[int, Model, str]) -> list[dict[str, Any]]:
    """Compile the kernels that this model launches on this architecture in this dtype."""
    architecture, model, dtype = job
    NoGPU.architecture = architecture
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    rows = []
    for name in KERNELS:
        found: list[dict[str, Any]] = []
        setattr(launch, f"_{name}_kernel", Compiler(getattr(launch, f"{name}_kernel"), found))
        rows.append((name, found))
    model.run(torch.float32 if dtype == "tf32" else getattr(torch, dtype))
    where = {"architecture": architecture, "model": model.name, "dtype": dtype}
    return [{**where, "kernel": name, **row} for name, found in rows for row in found]


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Lines of a Markdown table with a row per tile: the worst of all models on each GPU."""
    yield f"| dtype | kernel | tile | {' | '.join(f'sm_{arch}' for arch in ARCHITECTURES)} |"
    yield "|---" * (3 + len(ARCHITECTURES)) + "|"
    tiles: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if len(row["tile"]) == 5:
            dtype = "16 bits" if row["dtype"].endswith("16") else row["dtype"]
            tiles[dtype, row["kernel"], *row["tile"]].append(row)
    for (dtype, kernel, *tile), found in sorted(tiles.items()):
        cells = [dtype, kernel, ", ".join(map(str, tile))]
        for architecture in ARCHITECTURES:
            same = [row for row in found if row["architecture"] == architecture]
            most = [max(row[name] for row in same) for name in ("registers", "shared") if same]
            least = [
                min(row[name] or 99 for row in same) for name in ("programs", "buffers") if same
            ]
            cells += [f"{most[0]}, {most[1] // 1024}, {least[0]}, {least[1]}" if same else ""]
        yield f"| {' | '.join(cells)} |"


def main(words: list[str]) -> None:
    knobs.compilation.always_compile = True
    knobs.nvidia.dump_ptxas_log = True
    no_gpu: Any = NoGPU()
    driver.set_active(no_gpu)
    names = [word for word in words if word != "--table"]
    jobs = [(arch, m, dtype) for m in MODELS for dtype in m.dtypes for arch in ARCHITECTURES]
    jobs = [j for j in jobs if all(n in f"sm_{j[0]} {j[1].name} {j[2]}" for n in names)]
    num_processes = min(len(jobs), len(os.sched_getaffinity(0)))
    with multiprocessing.get_context("fork").Pool(num_processes) as pool:
        rows = itertools.chain.from_iterable(pool.imap_unordered(compiled, jobs))
        for line in table(list(rows)) if "--table" in words else map(json.dumps, rows):
            print(line, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
