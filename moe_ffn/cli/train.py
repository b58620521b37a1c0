"""Train a Transformer language model whose feed-forward block is one word of YAML.

moe-ffn train --help
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from moe_ffn.cli.command_line import parse_config
from moe_ffn.cli.exit import EXIT_FAILED, announce_import, undisturbed
from moe_ffn.cli.memory import check_fits, out_of_memory, training_needs
from moe_ffn.commands import command
from moe_ffn.errors import ConfigError, reason
from moe_ffn.import_path import explaining_outside_errors
from moe_ffn.ranks import check_environment, is_first_rank
from moe_ffn.runs.config import Resume, TrainConfig, differences, own_config
from moe_ffn.runs.folder import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    REPORT_FILE,
    check_can_be_read,
    check_is_run,
    check_run_folder,
    is_finished,
    is_run,
    named_run_folder,
    output_dir,
)
from moe_ffn.runs.lock import is_trained_here
from moe_ffn.runs.outside_code import comparable_options
from moe_ffn.runs.record import fixed_options
from moe_ffn.trust import FLAG as TRUST_CODE
from moe_ffn.trust import take_trust

FLAGS = {
    "--resume [RUN]": "go on with the run in this folder, or with the newest unfinished one, from its "
    "newest good checkpoint and with its own options",
    "--trust-code": "beside --resume: run the code that the run's folder names, though no run of yours "
    "began with it; read it before",
}
"""The flags of the training program that are taken here, with their meaning."""

NEWEST = ""
"""What `--resume` without a run stands for."""


def main(argv: Sequence[str]) -> int:
    trust_code, argv = take_trust(argv)
    run, options = take_resume(argv)
    if run is None:
        if trust_code:
            raise ConfigError(
                f"{TRUST_CODE}: goes with --resume; a class that you name here is yours, and runs unasked"
            )
        resume, config = None, parse_config(options, TrainConfig, command("train"), FLAGS)
    else:
        resume = find_resume(run, options, trust_code=trust_code)
        config = resume.config
    check_environment(config.trainer.num_nodes)
    if resume is None and is_first_rank():  # which makes the folder
        check_run_folder(config)
    with explaining_outside_errors():
        check_fits(config)
    # Only now: a mistake in the options should not wait for lightning.
    announce_import("lightning")
    with _saying_what_it_needs(config):
        with undisturbed():
            from moe_ffn.cli.training_run import train

        train(config, resume)
    return 0


@contextmanager
def _saying_what_it_needs(config: TrainConfig) -> Iterator[None]:
    """Memory that is not to be had ends the block with what the model needs, and exit code 1."""
    try:
        yield
    except Exception as error:
        if not (sentence := out_of_memory(error)):
            raise
        print(f"error: {sentence}; {training_needs(config)}", file=sys.stderr)
        raise SystemExit(EXIT_FAILED) from None


# -- --resume


def take_resume(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """What `--resume` names, None where it is not given; and the other arguments."""
    rest = list(argv)
    places = [i for i, word in enumerate(rest) if word.partition("=")[0] == "--resume"]
    if not places:
        return None, rest
    if len(places) > 1:
        raise ConfigError("--resume: given twice; a process goes on with one run")
    _, has_value, run = rest.pop(places[0]).partition("=")
    if not has_value and len(rest) > places[0] and not rest[places[0]].startswith("--"):
        run = rest.pop(places[0])
    return run or NEWEST, rest


def find_resume(run: str, argv: Sequence[str], *, trust_code: bool = False) -> Resume:
    """The run to go on with, its options, and over them those that were given.

    Args:
        run: its folder, or NEWEST: the run of `run.name`, or else of `run.output_dir` the unfinished run
            that was written last.
        trust_code: run the code that its folder names, whoever's it is.

    Raises:
        ConfigError: there is no such run, or it is finished, or names code that nobody trusts.
    """
    folder = (
        Path(run).expanduser()
        if run
        else _newest(parse_config(argv, TrainConfig, command("train")))
    )
    check_is_run(folder)
    check_can_be_read(folder)
    # In one word, or what stands first in `argv` would be another file.
    given = [f"--config={folder / CONFIG_FILE}", *argv]
    if any(word.partition("=")[0] in ("-h", "--help") for word in argv):
        parse_config(
            given, TrainConfig, command("train"), FLAGS
        )  # which exits, and runs nobody's code
    own = own_config(folder / CONFIG_FILE, trust_code=trust_code)
    config = parse_config(given, TrainConfig, command("train"), FLAGS)
    fixed = differences(fixed_options(own), fixed_options(config))
    for key, (before, now) in fixed.items():
        raise ConfigError(
            f"{key}: is {before} in '{folder}' and cannot become {now}; leave it out, or start a new run"
        )
    if run and config.run != own.run:
        raise ConfigError(
            f"run: '{folder}' keeps its name and place; leave --run.name and --run.output_dir out"
        )
    config = config.model_copy(update={"run": own.run})
    if is_finished(folder) and config.trainer.max_steps <= own.trainer.max_steps:
        raise ConfigError(
            f"'{folder}' is finished{_without_page(folder)}; raise trainer.max_steps (now "
            f"{own.trainer.max_steps}) to train on, or leave --resume out to start a new run"
        )
    changes = differences(comparable_options(own), comparable_options(config))
    return Resume(folder, config, changes, own)


def _without_page(folder: Path) -> str:
    """What is said of a run that died between its summary and its page; empty of others."""
    if (folder / REPORT_FILE).is_file():
        return ""
    return f", but its page was not written: {command('report')} {folder}"


def _newest(config: TrainConfig) -> Path:
    parent = output_dir(config)
    if config.run.name is not None:
        return named_run_folder(config)
    try:
        runs = [path for path in parent.iterdir() if is_run(path)] if parent.exists() else []
    except OSError as error:
        raise ConfigError(f"run.output_dir: '{parent}' cannot be read ({reason(error)})") from error
    unfinished = [p for p in runs if not is_finished(p) and not is_trained_here(p)]
    if not unfinished:
        what = "has no unfinished run that nobody trains" if runs else "has no run"
        raise ConfigError(f"--resume: '{parent}' {what}; name one, as in --resume runs/my-run")
    return max(unfinished, key=_last_written)


def _last_written(folder: Path) -> tuple[float, str]:
    times = [0.0]
    for place in (folder, folder / CHECKPOINTS_FOLDER):
        with suppress(OSError):  # gone by now, or not to be read
            times += [path.lstat().st_mtime for path in place.iterdir()]
    return max(times), folder.name
