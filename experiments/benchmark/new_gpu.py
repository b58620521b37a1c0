"""First checks on a kind of GPU: exactness, waits, speed, memory, and a training run.

    python -m experiments.benchmark.new_gpu [--output docs/performance] [--only SECTION ...]

Writes <output>/<gpu>.md after every section, so an interrupted run keeps what it found. On a machine without
a GPU, small layers try all parts that need none; Triton then runs in its interpreter.

T tokens, D model width, F expert width, E experts, K experts per token, N (token, expert) pairs
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.benchmark.__main__ import describe_machine
from experiments.benchmark.layers import (
    AUTO,
    DENSE,
    Case,
    Layer,
    Tokens,
    dense_layer,
    in_evaluation,
    moe_layer,
    sparse_layers,
)
from experiments.benchmark.peers import TRAINING_PEERS
from experiments.benchmark.session import Candidate, Session, amount
from experiments.benchmark.shapes import FEW_TOKENS, MODELS, Shape
from experiments.benchmark.suites import peak_bytes
from experiments.benchmark.tiles import CANDIDATES, time_tiles
from moe_ffn.cli.exit import exit_on_bad_input
from moe_ffn.cli.parser import Parser, check_output, whole
from moe_ffn.config.errors import ConfigError, explaining, first_line
from moe_ffn.config.files import make_folder, write_atomically
from moe_ffn.ffn.dispatch import make_plan
from moe_ffn.kernels.base import ExpertWeights
from moe_ffn.kernels.select import BACKENDS, run_experts
from moe_ffn.outputs import Plan
from moe_ffn.report.studies.markdown import markdown_table
from moe_ffn.runs.reader import load_run

COMMAND = "python -m experiments.benchmark.new_gpu"

SMALL = {"a small layer": Shape(32, 32, 48, 4, 2, "fp32")}
"""The same for a machine without a GPU."""

EXACT = {"gpu": Shape(4096, 2048, 768, 16, 4, "bf16"), "cpu": Shape(24, 24, 40, 4, 2, "fp32")}
"""Layer whose output and gradients are compared with float64."""

MAX_ERROR = 2.0
"""Largest error of a backend, as a multiple of the error of `loop` in the same dtype."""


@dataclass
class GPUReport:
    """The device, and what was found on it."""

    device: torch.device
    session: Session
    todo: list[str] = field(default_factory=list)
    """Findings to look at next."""

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def backends(self) -> list[str]:
        """Backends for this device; on a CPU, the interpreter may run the GPU's."""
        return [name for name, b in BACKENDS.items() if not (self.on_gpu and b.device == "cpu")]

    @property
    def models(self) -> dict[str, Shape]:
        return MODELS if self.on_gpu else SMALL


def table(headers: str, rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table with headers like `backend|error`; rows may be shorter."""
    names = headers.split("|")
    padded = [[*map(str, row), *[""] * (len(names) - len(row))] for row in rows]
    return markdown_table(names, padded, num_texts=len(names))


# ------------------------------------------------------------------------------------ sections


def machine(report: GPUReport) -> list[str]:
    """Return the name of the GPU, versions, and the rates of a copy and of a dense product."""
    lines = [describe_machine(report.device) + "."]
    if not report.on_gpu:
        return lines
    import triton

    properties = torch.cuda.get_device_properties(report.device)
    big = torch.empty(2**31, dtype=torch.uint8, device=report.device)
    seconds = seconds_of(big.clone)
    rows: list[tuple[str, str]] = [
        ("triton, CUDA", f"{triton.__version__}, {torch.version.cuda}"),
        ("compute capability", f"{properties.major}.{properties.minor}"),
        ("multiprocessors", str(properties.multi_processor_count)),
        ("memory", f"{properties.total_memory / 2**30:.0f} GiB"),
        ("a copy reads and writes", f"{2 * big.numel() / seconds / 1e12:.2f} TB/s"),
    ]
    del big
    for name, dtype, precision in (
        ("bfloat16", torch.bfloat16, "highest"),
        ("float32 as tf32", torch.float32, "high"),
        ("float32", torch.float32, "highest"),
    ):
        torch.set_float32_matmul_precision(precision)
        a, b = (torch.randn(8192, 8192, device=report.device, dtype=dtype) for _ in range(2))
        seconds = seconds_of(lambda a=a, b=b: a @ b)
        rows.append(
            (f"product of 8192 x 8192, {name}", f"{2 * 8192**3 / seconds / 1e12:.0f} TFLOP/s")
        )
    torch.set_float32_matmul_precision("highest")
    return [*lines, "", table("|", rows)]


def exactness(report: GPUReport) -> list[str]:
    """Compare output and gradients of every backend and dtype with `loop` in float64."""
    shape = EXACT[("cpu", "gpu")[report.on_gpu]]
    dtypes = [("bf16", "highest"), ("fp16", "highest"), ("fp32", "highest")]
    dtypes += [("fp32", "high")] if report.on_gpu else []
    rows: list[list[object]] = []
    for dtype, precision in dtypes:
        torch.set_float32_matmul_precision(precision)
        name = "tf32" if precision == "high" else dtype
        case = Case.of(replace(shape, dtype=dtype), report.device)
        given = arguments_of(case)
        torch.set_float32_matmul_precision("highest")
        x_TD, plan, weights = given
        plan = replace(plan, weights_N=plan.weights_N.double())
        exact = x_TD.double(), plan, weights.to(torch.float64)
        wanted = derivatives("loop", *exact, case.tokens.grad_BSD.double())
        torch.set_float32_matmul_precision(precision)
        of_loop: dict[str, float] = {}
        for backend in report.backends:
            if reason := BACKENDS[backend].unsupported_reason(x_TD, weights):
                rows.append([name, backend, f"not run: it {reason}"])
                continue
            got = derivatives(backend, *given, case.tokens.grad_BSD)
            again = derivatives(backend, *given, case.tokens.grad_BSD)
            errors = {key: relative_error(got[key], wanted[key]) for key in wanted}
            of_loop = of_loop or errors
            worst = max(errors[key] / max(of_loop[key], 1e-9) for key in errors)
            repeats = all(torch.equal(got[key], again[key]) for key in got)
            row = [name, backend, *(f"{e:.1e}" for e in errors.values()), f"{worst:.2f}"]
            rows.append([*row, "yes" if repeats else "**no**"])
            if not worst <= MAX_ERROR:  # NaN too
                report.todo.append(
                    f"{backend} in {name} is {worst:.1f} times as inexact as `loop`."
                )
            if backend == "triton" and not repeats:
                report.todo.append(f"triton in {name} does not repeat its bits.")
    what = "Relative error of the output and of each gradient against `loop` in float64"
    headers = "dtype|backend|y|x|weights|gate and up|down|worst / loop|repeats"
    return [f"{what}, at {shape}:", "", table(headers, rows)]


def arguments_of(case: Case) -> tuple[Tensor, Plan, ExpertWeights]:
    """Return the tokens (T, D), the plan of the layer's router, and the weights, all as leaves."""
    with torch.no_grad():
        routing = case.source(case.tokens.x_BSD).routing
    weights = case.source.experts.weights()
    assert routing is not None
    assert weights is not None
    plan = make_plan(routing)
    leaves = (None if w is None else w.detach().requires_grad_() for w in weights.parameters)
    x_TD = case.tokens.x_BSD.detach().flatten(0, -2).requires_grad_()
    plan = replace(plan, weights_N=plan.weights_N.detach().requires_grad_())
    return x_TD, plan, weights.with_parameters(*leaves)


def derivatives(
    backend: str, x_TD: Tensor, plan: Plan, weights: ExpertWeights, grad: Tensor
) -> dict[str, Tensor]:
    """Return y, and the gradients of x, the pairs' weights and both matrices."""
    y_TD = run_experts(x_TD, plan, weights, backend)
    leaves = {"x": x_TD, "weights": plan.weights_N, "up": weights.up_EHD, "down": weights.down_EDF}
    found = torch.autograd.grad(y_TD, list(leaves.values()), grad.view_as(y_TD))
    return {"y": y_TD.detach(), **dict(zip(leaves, found, strict=True))}


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """Return |got - wanted| / |wanted|."""
    return ((got.double() - wanted).norm() / wanted.norm()).item()


def speed(report: GPUReport) -> list[str]:
    """Time every backend and installed library next to the dense block of equal active width."""
    lines: list[str] = []
    for model, shape in report.models.items():
        case = Case.of(shape, report.device)
        remarks: list[str] = []
        layers = [
            dense_layer(shape, report.device),
            *sparse_layers(case, report.backends, TRAINING_PEERS, remarks.append),
        ]
        training = [Candidate.training(layer, case.tokens, "training") for layer in layers]
        peaks = {each.name: peak_bytes(each, report.device) for each in training}
        for each in training:
            each.reset()
        found = report.session.time(training)
        layers = [layers[0], *(in_evaluation(layer, case) for layer in layers[1:])]
        evaluated = report.session.time(
            [Candidate.evaluation(each, case.tokens, "forward") for each in layers]
        )
        rows: list[list[object]] = []
        dense = found["training", DENSE].median
        for layer in layers:
            step, forward = found["training", layer.name], evaluated["forward", layer.name]
            row = [layer.name, amount(step.median), f"{step.median / dense:.2f}"]
            row.append(f"{shape.flops / step.median / 1e12:.3g}")
            ratio = forward.median / evaluated["forward", DENSE].median
            row += [amount(forward.median), f"{ratio:.2f}", amount(peaks[layer.name], "B")]
            rows.append([*row, layer.computes])
        ours = found["training", AUTO]
        for (_, name), other in found.items():
            if name != DENSE and other.median < 0.97 * ours.median:
                report.todo.append(
                    f"{model}: {name} takes {other.median / ours.median:.2f} of our time."
                )
        headers = "layer|training step|/ dense|TFLOP/s|forward only|/ dense|peak memory|computes"
        lines += [f"### {model}: {shape}", "", table(headers, rows), ""]
        lines += [f"- {remark}" for remark in remarks] + [""] * bool(remarks)
    return lines


def profile(report: GPUReport) -> list[str]:
    """List the GPU kernels of a training step of our layer."""
    if not report.on_gpu:
        return ["Needs a GPU."]
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    lines: list[str] = []
    for model, shape in report.models.items():
        case = Case.of(shape, report.device)
        (layer, *_) = sparse_layers(case, (), (), lines.append)
        step = Candidate.training(layer, case.tokens, model)
        step.run()
        step.reset()
        with profiler(activities=[ProfilerActivity.CUDA]) as recorded:
            step.run()
            torch.cuda.synchronize()
        events: list[Any] = [e for e in recorded.key_averages() if e.self_device_time_total > 0]
        events.sort(key=lambda event: -event.self_device_time_total)
        total = sum(event.self_device_time_total for event in events)
        rows = [
            (e.key[:60], e.count, f"{spent:.0f}", f"{spent / total:.1%}")
            for e, spent in ((e, e.self_device_time_total) for e in events[:12])
        ]
        count = sum(event.count for event in events)
        lines += [f"{model}: {count} kernels, {total / 1e3:.2f} ms", ""]
        lines += [table("kernel|launches|microseconds|share", rows), ""]
    return lines


def tiles(report: GPUReport) -> list[str]:
    """Time each kernel with each tile, for the tables of `kernels/triton/launch.py`."""
    lines: list[str] = []
    for model, shape in report.models.items():
        given = arguments_of(Case.of(shape, report.device))
        candidates = CANDIDATES if report.on_gpu else {}
        rows = time_tiles(*given, seconds_of, candidates)
        headers = "kernel|tile: M, O, K, stages, warps|milliseconds|TFLOP/s"
        lines += [f"### {model}: {shape}", "", table(headers, rows), ""]
    return lines


def seconds_of(run: Callable[[], object]) -> float:
    """Return the median time of a launch; on a GPU, that of the GPU alone."""
    if torch.cuda.is_available():
        from triton import testing

        bench: Any = testing.do_bench
        return bench(run, warmup=10, rep=50, return_mode="median") / 1e3
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def mixed_precision(report: GPUReport) -> list[str]:
    """Time a step with weights in bfloat16, and in float32 under autocast."""
    shape = report.models[FEW_TOKENS if report.on_gpu else "a small layer"]
    candidates: list[Candidate] = []
    for name, dtype in (("bfloat16", "bf16"), ("float32, bf16-mixed", "fp32")):
        of_dtype = replace(shape, dtype=dtype)
        block = moe_layer(of_dtype, "auto", report.device)
        if dtype == "fp32":
            block.forward = torch.autocast(report.device.type, torch.bfloat16)(block.forward)
        layer = Layer(name, block)
        candidates.append(Candidate.training(layer, Tokens.of(of_dtype, report.device), "mixed"))
    found = report.session.time(candidates)
    rows = [
        [each.name, amount(found[each.key].median), amount(peak_bytes(each, report.device), "B")]
        for each in candidates
    ]
    return [f"{shape}:", "", table("weights|training step|peak memory", rows)]


def tests(report: GPUReport) -> list[str]:
    """Run the tests of the kernels, of waits and of several ranks on the GPU."""
    chosen = ["tests/kernels/test_triton.py", "tests/kernels/test_gradient_memory.py"]
    several = torch.cuda.device_count() >= 2
    if several:
        chosen.append("tests/training/test_parallel.py")
    command = ["pytest", "-q", "--tb=line", "-n", "8", "-m", "gpu or not slow", "-W", "default"]
    command += chosen
    if not report.on_gpu:
        return [f"Needs a GPU: `{' '.join(command)}`"]
    done = run_python("-m", *command)
    lines = (done.stdout.strip() or done.stderr.strip()).splitlines()
    failed: list[str] = []
    if done.returncode:
        failed = [f"- {line}" for line in lines if line.startswith(("/", "FAILED", "ERROR"))]
        report.todo.append("Tests failed, or did not run.")
    ranks = "" if several else "Ranks by NCCL need two GPUs, and were not tried."
    return [f"`pytest {' '.join(chosen)}`: {lines[-1]}", "", *failed, "", ranks]


SANITIZED = """
import torch
from moe_ffn import build_ffn
torch.manual_seed(0)
moe = build_ffn({"type": "moe", "num_experts": 5, "router": {"type": "top_k", "k": 2},
                 "experts": {"type": "swiglu", "d_ff": 72, "backend": "triton"}}, d_model=80).cuda()
for dtype in (torch.bfloat16, torch.float32):
    moe.to(dtype)
    moe(torch.randn(2, 75, 80, device="cuda", dtype=dtype).requires_grad_()).hidden.sum().backward()
torch.cuda.synchronize()
"""


def sanitizer(report: GPUReport) -> list[str]:
    """Look for reads and writes outside of tensors, and races, with NVIDIA's compute-sanitizer."""
    program = shutil.which("compute-sanitizer")
    if not report.on_gpu or program is None:
        return ["Needs a GPU and compute-sanitizer, a program of the CUDA toolkit."]
    lines: list[str] = []
    for tool in ("memcheck", "racecheck"):
        under = [program, *f"--tool {tool} --error-exitcode 1".split()]
        done = run_python("-c", SANITIZED, under=under, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        said = [line.strip("= ") for line in done.stdout.splitlines() if "SUMMARY" in line]
        last = said[-1] if said else (done.stderr or done.stdout).strip()[-200:]
        lines.append(f"- {tool}: {last}")
        if done.returncode or "SUMMARY: 0 " not in last:
            report.todo.append(f"compute-sanitizer --tool {tool} found something, or did not run.")
    return lines


def default_run(report: GPUReport) -> list[str]:
    """Train the default model for 60 steps on the GPU and on the CPU; print the losses."""
    steps = 60 if report.on_gpu else 4
    kinds = [("cpu", "32-true")]
    kinds += [("gpu", "32-true"), ("gpu", "bf16-mixed")] if report.on_gpu else []
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory() as folder:
        for accelerator, precision in kinds:
            name = f"{accelerator}-{precision}"
            options = {
                "run.name": name,
                "run.output_dir": folder,
                "trainer.accelerator": accelerator,
                "trainer.precision": precision,
                "trainer.max_steps": steps,
                "trainer.validate_every_n_steps": steps,
                "logging.every_n_steps": steps // 4,
                "logging.wandb.mode": "disabled",
                "sample.num_tokens": 1,
            }
            if not report.on_gpu:
                options |= {"model.d_model": 16, "model.num_layers": 1, "data.batch_size": 2}
            given = [f"--{key}={value}" for key, value in options.items()]
            start = time.perf_counter()
            done = run_python("-m", "experiments.train", *given)
            if done.returncode:
                raise RuntimeError(f"experiments.train: {done.stderr.strip()[-300:]}")
            seconds = time.perf_counter() - start
            run = load_run(Path(folder) / name)
            losses = run.series("train/loss")
            speeds = run.series("train/tokens_per_second")
            training = " ".join(f"{value:.4f}" for value in losses.values)
            validation = f"{run.series('validation/loss').values[-1]:.4f}"
            row = [accelerator, precision, training, validation, f"{speeds.values[-1]:,.0f}"]
            rows.append([*row, f"{seconds:.0f} s"])
    headers = "device|precision|training losses|validation|tokens/s|whole program"
    return [f"`python -m experiments.train`, {steps} steps:", "", table(headers, rows)]


def run_python(
    *arguments: str, under: Sequence[str] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments, perhaps under another program."""
    command, environment = [*under, sys.executable, *arguments], os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


SECTIONS: dict[str, Callable[[GPUReport], list[str]]] = {
    "machine": machine,
    "exactness": exactness,
    "speed": speed,
    "mixed-precision": mixed_precision,
    "tiles": tiles,
    "profile": profile,
    "default-run": default_run,
    "tests": tests,
    "sanitizer": sanitizer,
}


# ----------------------------------------------------------------------------------------- page


def main(argv: Sequence[str]) -> int:
    given = _parser().parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = GPUReport(device, Session((), device, patience=given.patience))
    name = torch.cuda.get_device_name() if report.on_gpu else "cpu"
    path = given.output / f"{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.md"
    if path.exists():
        raise ConfigError(f"--output: {path} exists; give another folder, or remove that page")
    with explaining(f"--output: '{given.output}' cannot be written", "choose another folder"):
        make_folder(given.output)
        check_output(path, "#")
    page = [f"# The first hour on {name}", "", f"Written by `{COMMAND}`."]
    for section in given.only or SECTIONS:
        start = time.perf_counter()
        try:
            lines = SECTIONS[section](report)
        except Exception as error:  # whatever a new GPU does, the other sections run
            lines = [f"**Failed**: {type(error).__name__}: {first_line(error)}"]
            report.todo.append(f"The section {section} failed.")
        torch.set_float32_matmul_precision("highest")  # as before a section that failed
        print(f"{section}: {time.perf_counter() - start:.0f} s")
        page += ["", f"## {section.capitalize().replace('-', ' ')}", "", *lines]
        todo = [f"- {each}" for each in report.todo] or ["Nothing was found."]
        text = "\n".join([*page, "", "## What to do next", "", *todo, ""])
        write_atomically(path, re.sub(r"\n{3,}", "\n\n", text))
    print(f"wrote {path}")
    return 0


def _parser() -> Parser:
    listed = "\n".join(
        f"  {name:12} {(section.__doc__ or '').partition('.')[0]}"
        for name, section in SECTIONS.items()
    )
    parser = Parser(
        prog=COMMAND,
        description="Try the kernels on this GPU: are they exact, do they wait, how fast are they? Without a "
        "GPU, small layers try all parts that need none.",
        epilog=f"sections:\n{listed}",
    )
    meaning = "folder of the page GPU.md (default: docs/performance)"
    parser.add("--output FOLDER", meaning, default="docs/performance")
    meaning = "sections to run, from the list below; default: all"
    parser.add("--only SECTION", meaning, nargs="+", choices=list(SECTIONS))
    meaning = "seconds after which a table of times gets fewer rounds (default: 10)"
    parser.add("--patience SECONDS", meaning, type=whole(1), default=10)
    return parser


if __name__ == "__main__":
    raise SystemExit(exit_on_bad_input(main))
