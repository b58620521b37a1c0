"""The command: options in, suites run, results written."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

import torch

import moe_ffn
from experiments.benchmark import resources, suites, training
from experiments.benchmark.peers import PEERS
from experiments.benchmark.session import (
    PLOTS_FILE,
    PROMISES_FILE,
    RESULTS_FILE,
    Session,
    plots_page,
    write_promises,
    write_rows,
)
from experiments.benchmark.shapes import parse_shape
from experiments.benchmark.timing import Rounds
from moe_ffn.cli.exit import exit_on_bad_input
from moe_ffn.cli.parser import Parser, whole_number
from moe_ffn.config import MAX_COUNT
from moe_ffn.errors import ConfigError, did_you_mean, expand_path, reason
from moe_ffn.files import write_whole
from moe_ffn.kernels.select import BACKENDS

SUITES: dict[str, tuple[Callable[[Session], None], str]] = {
    "rows": (
        suites.rows,
        "the layer at published sizes, forward and backward, beside every library found",
    ),
    "experts": (suites.experts, "8 to 256 experts of the same total active width"),
    "tokens": (suites.tokens, "256 to 16,384 tokens"),
    "width": (suites.width, "experts 64 to 1,024 wide"),
    "skew": (suites.skew, "the same tokens spread evenly, by Zipf's law, or all on one expert"),
    "decoding": (suites.decoding, "1 to 16 tokens, forward alone"),
    "training": (training.training, "whole training steps of the default model, on real text"),
    "memory": (resources.memory, "bytes the layer keeps for its backward pass"),
    "blocks": (suites.blocks, "the dense and swiglu blocks beside plain linear layers"),
    "profile": (
        resources.profile,
        "where the time of a layer goes, operator by operator; on a CPU",
    ),
    "gpu": (suites.gpu, "64 experts in bfloat16, as a share of one dense product; needs CUDA"),
}
"""Name -> the suite, and what it times."""

PATIENCE = 30.0
"""Seconds that a table may take before it makes do with fewer rounds, unless they were asked for."""


def main(argv: Sequence[str]) -> int:
    given = _parser().parse_args(argv)
    rounds = Rounds(warmup=_number("warmup", given.warmup, 0, MAX_COUNT), patience=PATIENCE)
    if given.rounds is not None:
        rounds = Rounds(_number("rounds", given.rounds, 1, MAX_COUNT), rounds.warmup)
    if given.threads is not None:
        torch.set_num_threads(_number("threads", given.threads, 1, 4096))
    shapes = [parse_shape(text) for text in given.shape]
    chosen = _known("--suite", given.suite, SUITES) or ([] if shapes else list(SUITES))
    device = _device(given.device)
    backends = _known("--backends", given.backends, BACKENDS) or list(BACKENDS)
    folder = _new_folder(given.output)
    with _writing_to(folder):
        folder.mkdir(parents=True)

    session = Session(rounds, backends, device)
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
            session.say("\n== shape ==\n")
            suites.time_shapes(session, "shape", shapes)
        for suite in chosen:
            session.say(f"\n== {suite} ==\n")
            SUITES[suite][0](session)
    finally:  # what was measured before a suite failed, or was interrupted, is not lost
        write(session, folder, machine)
    return 0


def write(session: Session, folder: Path, machine: dict[str, str]) -> None:
    """The summary on the screen; tables and plots in the folder."""
    if session.promises:
        session.say("\n== promises ==\n")
        session.summarize()
    with _writing_to(folder):
        write_rows(folder / RESULTS_FILE, session.rows, machine)
        write_promises(folder / PROMISES_FILE, session.promises)
        if session.charts:
            write_whole(folder / PLOTS_FILE, plots_page(session.charts))
    session.say(f"\nwritten: {folder}/")


@contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"--output: '{folder}' cannot be written ({reason(error)}); choose another folder"
        ) from error


def describe_machine(device: torch.device) -> dict[str, str]:
    """The columns that every line of the results shares."""
    is_gpu = device.type == "cuda"
    return {
        "device": device.type,
        "machine": torch.cuda.get_device_name(device) if is_gpu else processor_name(),
        "threads": str(torch.get_num_threads()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "moe_ffn": moe_ffn.__version__,
    }


def processor_name() -> str:
    """As the system calls it; `platform.processor` is empty on Linux."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


# ------------------------------------------------------------------------------------- options


def _parser() -> Parser:
    listed = "\n".join(f"  {name:9} {what}" for name, (_, what) in SUITES.items())
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
        default=[],
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
        metavar="N",
        help="timed turns of each candidate; default: 9, and at least 3 where they take long",
    )
    add("--warmup", default="1", metavar="N", help="turns before them; default: 1")
    add("--threads", metavar="N", help="threads of torch; default: torch's own choice")
    add("--device", default="auto", metavar="NAME", help="auto, cpu or cuda; auto prefers cuda")
    add(
        "--backends",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME",
        help="backends beside auto; default: all",
    )
    add("--output", metavar="FOLDER", help="a new folder; default: runs/benchmark-DATE-TIME")
    return parser


def _number(name: str, given: str, least: int, most: int) -> int:
    number = whole_number(given, least, most)
    if number is None:
        raise ConfigError(f"--{name} ({given}) must be a whole number from {least} to {most}")
    return number


def _known(option: str, given: Sequence[str], known: Mapping[str, object]) -> list[str]:
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(f"{option} '{name}' is not one of {', '.join(known)}{hint}")
    return list(dict.fromkeys(given))


def _device(given: str) -> torch.device:
    if given not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device '{given}' is not one of auto, cpu, cuda; a GPU is cuda")
    found = torch.cuda.is_available()
    if given == "cuda" and not found:
        raise ConfigError(
            f"--device (cuda) needs a GPU, but torch {torch.__version__} finds none; use --device cpu"
        )
    return torch.device("cuda" if found and given != "cpu" else "cpu")


def _new_folder(given: str | None) -> Path:
    if given is None:
        return Path("runs") / f"benchmark-{datetime.now():%Y-%m-%d-%H%M%S}"
    folder = expand_path(given, key="--output")
    with _writing_to(folder):
        try:
            folder.lstat()
        except FileNotFoundError:
            return folder
    raise ConfigError(f"--output '{folder}' exists already; name a new folder, or remove it")


if __name__ == "__main__":
    raise SystemExit(exit_on_bad_input(main))
