"""How fast the layers and a training step are, beside the dense block and other libraries.

    python -m experiments.benchmark --help

This file has the options and runs the suites; each writes its tables, and a run one folder.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import torch

import moe_ffn
from experiments.benchmark import suites
from experiments.benchmark.generation import generation
from experiments.benchmark.live_models import live_models
from experiments.benchmark.peers import PEERS
from experiments.benchmark.session import Session, write_files
from experiments.benchmark.shapes import parse_shape
from experiments.benchmark.training import training
from moe_ffn.cli.exit import exit_on_bad_input
from moe_ffn.cli.parser import Parser, whole
from moe_ffn.config.errors import ConfigError, expand_path
from moe_ffn.files import reason
from moe_ffn.kernels.native.build import unavailable_reason
from moe_ffn.kernels.select import BACKENDS

SUITES: dict[str, Callable[[Session], None]] = {
    "rows": suites.rows,
    "experts": suites.experts,
    "skew": suites.skew,
    "decoding": suites.decoding,
    "generation": generation,
    "live_models": live_models,
    "training": training,
    "memory": suites.memory,
    "gpu": suites.gpu,
}
"""The suites by name; the first line of the docstring of each says what it times."""

PATIENCE = 30.0
"""Seconds of timed rounds after which a table gets fewer of them, unless `--rounds` is given."""


def main(argv: Sequence[str]) -> int:
    given = _parser().parse_args(argv)
    shapes = [parse_shape(text) for text in given.shape]
    chosen = given.suite or ([] if shapes else list(SUITES))
    device = _device(given.device)
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    patience = PATIENCE if given.rounds is None else math.inf
    backends = given.backends or list(BACKENDS)
    session = Session(backends, device, given.rounds or 9, given.warmup, patience)
    folder = _new_folder(given.output)

    machine = describe_machine(device)
    session.say(", ".join(f"{name} {value}" for name, value in machine.items()))
    found = {peer.package: peer.version for peer in PEERS.values() if peer.is_installed}
    absent = sorted({peer.package for peer in PEERS.values()} - found.keys())
    session.say(
        f"beside: {', '.join(f'{name} {value}' for name, value in found.items()) or 'none'}"
    )
    if absent:
        session.say(f"not installed: {', '.join(absent)}")
    try:
        if shapes:
            session.begin("shape")
            suites.time_shapes(session, shapes)
        for suite in chosen:
            session.begin(suite)
            SUITES[suite](session)
    finally:  # what was measured before a suite failed, or was interrupted, is not lost
        if session.promises:
            session.begin("promises")
            session.summarize()
        write_files(session, folder, machine)
        session.say(f"\nwritten: {folder}/")
    return 0


def describe_machine(device: torch.device) -> dict[str, str]:
    """The columns that every line of the results shares."""
    is_gpu = device.type == "cuda"
    compiled = not is_gpu and unavailable_reason() is None
    return {
        "device": device.type,
        "machine": torch.cuda.get_device_name(device) if is_gpu else processor_name(),
        "threads": str(torch.get_num_threads()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "moe_ffn": moe_ffn.__version__,
        "cpu_kernels": "compiled" if compiled else "not compiled",
    }


def processor_name() -> str:
    """The name of the processor; `platform.processor` is empty on Linux."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


# ------------------------------------------------------------------------------------- options


def _parser() -> Parser:
    listed = "\n".join(
        f"  {name:11} {(suite.__doc__ or '').partition(chr(10))[0]}"
        for name, suite in SUITES.items()
    )
    parser = Parser(
        prog="python -m experiments.benchmark",
        description="Time this library's layers and training step beside the dense block and every "
        "other library that is installed, in turns, and check what is promised of them.",
        epilog=f"suites:\n{listed}\n\nThe exit code is 0 when everything ran, kept promises or not.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--suite",
        action="extend",
        nargs="+",
        choices=list(SUITES),
        metavar="NAME",
        help="what to time, of the suites below; default: all",
    )
    add(
        "--shape",
        action="append",
        default=[],
        metavar="T,D,F,E,K,dtype",
        help="time a layer of your own: tokens, model width, expert width, experts, experts per "
        "token, fp32, bf16 or fp16; may be repeated; without --suite, nothing else is timed",
    )
    add(
        "--rounds",
        type=whole(1),
        metavar="N",
        help="timed turns of each candidate; default: 9, and at least 3 where they take long",
    )
    add("--warmup", type=whole(0), default=1, metavar="N", help="turns before them; default: 1")
    add("--threads", type=whole(1, 4096), metavar="N", help="threads of torch; default: its choice")
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        metavar="NAME",
        help="auto, cpu or cuda; auto prefers cuda",
    )
    add(
        "--backends",
        action="extend",
        nargs="+",
        choices=list(BACKENDS),
        metavar="NAME",
        help="backends beside auto; default: all",
    )
    add("--output", metavar="FOLDER", help="a new folder; default: runs/benchmark-DATE-TIME")
    return parser


def _device(given: str) -> torch.device:
    found = torch.cuda.is_available()
    if given == "cuda" and not found:
        raise ConfigError(
            f"--device (cuda) needs a GPU, but torch {torch.__version__} finds none; use --device cpu"
        )
    return torch.device("cuda" if found and given != "cpu" else "cpu")


def _new_folder(given: str | None) -> Path:
    folder = Path("runs") / f"benchmark-{datetime.now():%Y-%m-%d-%H%M%S}"
    if given is not None:
        folder = expand_path(given, key="--output")
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(
            f"--output '{folder}' exists already; name a new folder, or remove it"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"--output: '{folder}' cannot be written ({reason(error)}); choose another folder"
        ) from error
    return folder


if __name__ == "__main__":
    raise SystemExit(exit_on_bad_input(main))
