"""Time layers and training steps, next to the dense block and other libraries.

python -m experiments.benchmark --help
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Sequence

import torch

import moe_ffn
from experiments.benchmark import models, suites
from experiments.benchmark.peers import PEERS
from experiments.benchmark.session import Session, amount
from experiments.benchmark.shapes import MODELS, Shape, kernel_costs, parse_shape
from moe_ffn.cli.exit import exit_on_bad_input
from moe_ffn.cli.parser import Parser, whole
from moe_ffn.config.errors import ConfigError
from moe_ffn.kernels.native.build import unavailable_reason
from moe_ffn.kernels.select import BACKENDS
from moe_ffn.training.monitoring.hardware import describe_hardware

SUITES: dict[str, Callable[[Session], None]] = {
    "rows": suites.rows,
    "experts": suites.experts,
    "skew": suites.skew,
    "decoding": suites.decoding,
    "generation": models.generation,
    "live_models": models.live_models,
    "training": models.training,
    "memory": suites.memory,
    "adapters": suites.adapters,
}
"""Suites by name; the help shows the first line of each docstring."""

H200_FLOPS = {"bf16": 709e12, "fp16": 709e12, "fp32": 51e12}
"""FLOP/s of a product of 8192 x 8192 matrices, measured on an H200; see docs/performance/nvidia-h200.md."""
H200_BYTES = 4.26e12
"""Bytes per second of a copy, read and written."""

PATIENCE = 30.0
"""Seconds after which a table gets fewer rounds, unless `--rounds` is given."""


def main(argv: Sequence[str]) -> int:
    given = _parser().parse_args(argv)
    shapes = [parse_shape(text) for text in given.shape]
    if given.model:
        for shape in shapes or MODELS.values():
            print(*describe_kernels(shape), sep="\n")
        return 0
    has_gpu = torch.cuda.is_available()
    if given.device == "cuda" and not has_gpu:
        raise ConfigError(
            f"--device (cuda) needs a GPU, but torch {torch.__version__} finds none; use --device cpu"
        )
    device = torch.device("cuda" if has_gpu and given.device != "cpu" else "cpu")
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    patience = PATIENCE if given.rounds is None else math.inf
    session = Session(given.backends or list(BACKENDS), device, given.rounds or 9, patience)
    session.say(describe_machine(device))
    packages = {peer.package: peer.is_installed for peer in PEERS.values()}
    installed = [name for name, is_installed in packages.items() if is_installed]
    session.say(f"other libraries: {', '.join(installed) or 'none'}")
    if missing := sorted(packages.keys() - installed):
        session.say(f"not installed: {', '.join(missing)}")
    if shapes:
        session.begin("shape")
        suites.time_shapes(session, shapes)
    for suite in given.suite or ([] if shapes else SUITES):
        session.begin(suite)
        SUITES[suite](session)
    if session.targets:
        session.begin("targets")
        session.show_targets()
    return 0


def describe_machine(device: torch.device) -> str:
    """Return one line about the processor or GPU, versions and CPU kernels."""
    is_gpu = device.type == "cuda"
    kernels = "compiled" if unavailable_reason() is None else "not compiled"
    return (
        f"{torch.cuda.get_device_name(device) if is_gpu else describe_hardware()['processor']}, "
        f"{torch.get_num_threads()} threads, {platform.system()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, moe_ffn {moe_ffn.__version__}"
        f"{'' if is_gpu else f', cpu kernels {kernels}'}"
    )


def describe_kernels(shape: Shape) -> list[str]:
    """Return a table of the work of each Triton kernel in a training step, and its least time."""
    lines = [
        f"{shape}: {shape.flops / 1e12:.2f} TFLOP",
        f"  {'kernel':30}TFLOP      GB  H200, at least",
    ]
    total = 0.0
    for cost in kernel_costs(shape):
        least = cost.seconds(H200_FLOPS[shape.dtype], H200_BYTES)
        total += least
        work = f"{cost.flops / 1e12:7.3f}{cost.num_bytes / 1e9:8.2f}"
        lines.append(f"  {cost.kernel:28}{work}  {amount(least)}")
    return [*lines, f"  {'all':28}{'':15}  {amount(total)}"]


def _parser() -> Parser:
    listed = "\n".join(
        f"  {name:11} {(suite.__doc__ or '').partition(chr(10))[0]}"
        for name, suite in SUITES.items()
    )
    parser = Parser(
        prog="python -m experiments.benchmark",
        description="Time this library's layers and training step, in turns with the dense block and all "
        "installed libraries, and check the speeds against targets.",
        epilog=f"suites:\n{listed}\n\nThe exit code is 0 when everything ran, even if a target is missed.",
    )
    parser.add(
        "--suite NAME",
        "suites to run, from the list below; default: all",
        action="extend",
        nargs="+",
        choices=list(SUITES),
    )
    parser.add(
        "--shape T,D,F,E,K,dtype",
        "time a layer of this size: tokens, model width, expert width, experts, experts per "
        "token, and fp32, bf16 or fp16; may be repeated; without --suite, nothing else is timed",
        action="append",
        default=[],
    )
    parser.add(
        "--model",
        "time nothing; print FLOPs and bytes of each Triton kernel at the shapes, and the least time "
        "of both on an H200",
    )
    meaning = "timed rounds of each candidate; default: 9, or as few as 3 if they take long"
    parser.add("--rounds N", meaning, type=whole(1))
    parser.add("--threads N", "threads of torch; default: torch's own", type=whole(1, 4096))
    parser.add(
        "--device NAME",
        "auto (the default), cpu or cuda; auto prefers cuda",
        choices=("auto", "cpu", "cuda"),
        default="auto",
    )
    parser.add(
        "--backends NAME",
        "backends to time in addition to auto; default: all",
        action="extend",
        nargs="+",
        choices=list(BACKENDS),
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(exit_on_bad_input(main))
