"""The command: options in, suites run, results written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.benchmark.options import Options, parse_options
from moe_ffn.cli.exit import announce_import, exit_on_bad_input
from moe_ffn.errors import ConfigError, reason
from moe_ffn.files import write_whole

if TYPE_CHECKING:
    from experiments.benchmark.session import Session


PATIENCE = 30.0
"""Seconds that a table may take before it makes do with fewer rounds, unless they were asked for."""


def main(argv: Sequence[str]) -> int:
    options = parse_options(argv)
    # Only now: a mistake in the options should not wait for torch.
    announce_import("torch")
    import torch

    from experiments.benchmark.machine import choose_device, describe_machine
    from experiments.benchmark.session import Session
    from experiments.benchmark.timing import Rounds
    from moe_ffn.kernels.select import BACKENDS

    device = choose_device(options.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    backends = options.backends or tuple(BACKENDS)
    with _writing_to(options.output):
        options.output.mkdir(parents=True)
    rounds = Rounds(warmup=options.warmup, patience=PATIENCE)
    if options.rounds is not None:
        rounds = Rounds(options.rounds, options.warmup)
    session = Session(rounds, backends, device)
    machine = describe_machine(device)
    session.say(", ".join(f"{name} {value}" for name, value in machine.items()))
    for name, peer in _peers_found():
        session.say(f"{name} {peer}")
    try:
        run_suites(session, options)
    finally:  # what was measured before a suite failed, or was interrupted, is not lost
        write(session, options, machine)
    return 0


def run_suites(session: Session, options: Options) -> None:
    from experiments.benchmark import (
        blocks,
        decoding,
        gpu,
        memory,
        profile,
        rows,
        skew,
        sweeps,
        training,
    )

    runs: dict[str, Callable[[Session], None]] = {
        "rows": rows.run,
        "experts": sweeps.run_experts,
        "tokens": sweeps.run_tokens,
        "width": sweeps.run_width,
        "skew": skew.run,
        "decoding": decoding.run,
        "training": training.run,
        "memory": memory.run,
        "blocks": blocks.run,
        "profile": profile.run,
        "gpu": gpu.run,
    }
    if options.shapes:
        session.say("\n== shape ==\n")
        rows.run_shapes(session, "shape", options.shapes)
    for suite in options.suites:
        session.say(f"\n== {suite} ==\n")
        runs[suite](session)


def write(session: Session, options: Options, machine: dict[str, str]) -> None:
    """The summary on the screen; tables and plots in the folder."""
    from experiments.benchmark.plot import svg
    from experiments.benchmark.report import (
        PROMISE_HEADERS,
        PROMISES_FILE,
        RESULTS_FILE,
        table,
        write_promises,
        write_rows,
    )

    if session.promises:
        session.say("\n== promises ==\n")
        session.say(table(PROMISE_HEADERS, [promise.cells() for promise in session.promises]))
    with _writing_to(options.output):
        write_rows(options.output / RESULTS_FILE, session.rows, machine)
        write_promises(options.output / PROMISES_FILE, session.promises)
        for name, plot in session.plots.items():
            write_whole(options.output / f"{name}.svg", svg(plot))
    session.say(f"\nwritten: {options.output}/")


@contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"--output: '{folder}' cannot be written ({reason(error)}); choose another folder"
        ) from error


def _peers_found() -> list[tuple[str, str]]:
    """What is installed, and what would be timed if it were."""
    from experiments.benchmark.peers import PEERS

    found = {peer.package: peer.version for peer in PEERS.values() if peer.is_installed}
    absent = sorted({peer.package for peer in PEERS.values()} - found.keys())
    lines = [
        ("beside:", ", ".join(f"{name} {version}" for name, version in found.items()) or "none")
    ]
    return lines + ([("not installed:", ", ".join(absent))] if absent else [])


if __name__ == "__main__":
    raise SystemExit(exit_on_bad_input(main))
