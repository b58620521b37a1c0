"""What `python -m experiments.benchmark` can be told; torch-free, so that a mistake is answered at once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

from experiments.benchmark.shapes import Shape, parse_shape
from moe_ffn.cli.parser import MAX_COUNT, Parser, whole_number
from moe_ffn.errors import ConfigError, did_you_mean, expand_path, reason
from moe_ffn.experts.gated import GatedExpertsConfig

SUITES = {
    "rows": "the layer at published sizes, forward and backward, beside every library found",
    "experts": "8 to 256 experts of the same total active width",
    "tokens": "256 to 16,384 tokens",
    "width": "experts 64 to 1,024 wide",
    "skew": "the same tokens spread evenly, by Zipf's law, or all on one expert",
    "decoding": "1 to 16 tokens, forward alone",
    "training": "whole training steps of the default model, on real text",
    "memory": "bytes the layer keeps for its backward pass",
    "blocks": "the dense and swiglu blocks beside plain linear layers",
    "profile": "where the time of a layer goes, operator by operator; on a CPU",
    "gpu": "64 experts in bfloat16, as a share of one dense product; needs CUDA",
}
"""Name -> what it times."""


@dataclass(frozen=True)
class Options:
    """The command line, checked as far as that goes without torch."""

    suites: tuple[str, ...]
    shapes: tuple[Shape, ...]
    rounds: int | None
    """None: `timing.Rounds` knows, and that a slow table may have fewer."""
    warmup: int
    threads: int | None
    device: str
    backends: tuple[str, ...] | None
    """None: all there are."""
    output: Path


def parse_options(argv: Sequence[str]) -> Options:
    """The options of a command line; answers `--help` itself, and exits.

    Raises:
        ConfigError: one sentence that names the option.
    """
    given = _parser().parse_args(argv)
    rounds, warmup, threads = (
        _number(name, getattr(given, name), least, most)
        for name, least, most in (
            ("rounds", 1, MAX_COUNT),
            ("warmup", 0, MAX_COUNT),
            ("threads", 1, 4096),
        )
    )
    shapes = tuple(parse_shape(text) for text in given.shape)
    suites = _known("--suite", given.suite, SUITES) if given.suite else ()
    if not suites and not shapes:
        suites = tuple(SUITES)
    backends = None
    if given.backends:
        backends = _known("--backends", given.backends, backend_names())
    return Options(
        suites=suites,
        shapes=shapes,
        rounds=rounds,
        warmup=warmup or 0,
        threads=threads,
        device=_device(given.device),
        backends=backends,
        output=_new_folder(given.output),
    )


def backend_names() -> tuple[str, ...]:
    """The backends that a config may name, `auto` aside, which is always timed."""
    choices = get_args(GatedExpertsConfig.model_fields["backend"].annotation)
    return tuple(name for name in choices if name != "auto")


def _parser() -> argparse.ArgumentParser:
    suites = "\n".join(f"  {name:9} {what}" for name, what in SUITES.items())
    parser = Parser(
        prog="python -m experiments.benchmark",
        description="Time this library's layers and training step beside the dense block and every "
        "other library that is installed, in turns, and check what is promised of them.",
        epilog=f"suites:\n{suites}\n\nThe exit code is 0 when everything ran, kept promises or not.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--suite",
        action="extend",
        nargs="+",
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
        metavar="NAME",
        help="backends beside auto; default: all",
    )
    add("--output", metavar="FOLDER", help="a new folder; default: runs/benchmark-DATE-TIME")
    return parser


def _number(name: str, given: str | None, least: int, most: int) -> int | None:
    if given is None:
        return None
    number = whole_number(given, least, most)
    if number is None:
        raise ConfigError(f"--{name} ({given}) must be a whole number from {least} to {most}")
    return number


def _known(option: str, given: Sequence[str], known: Sequence[str] | dict[str, str]) -> Any:
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(f"{option} '{name}' is not one of {', '.join(known)}{hint}")
    return tuple(dict.fromkeys(given))


def _device(given: str) -> str:
    if given not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device '{given}' is not one of auto, cpu, cuda; a GPU is cuda")
    return given


def _new_folder(given: str | None) -> Path:
    if given is None:
        return Path("runs") / f"benchmark-{datetime.now():%Y-%m-%d-%H%M%S}"
    folder = expand_path(given, key="--output")
    try:
        folder.lstat()
    except FileNotFoundError:
        return folder
    except OSError as error:
        raise ConfigError(
            f"--output: '{folder}' cannot be written ({reason(error)}); choose another folder"
        ) from error
    raise ConfigError(f"--output '{folder}' exists already; name a new folder, or remove it")
