"""Going on with a run: which run, from which of its checkpoints, and whether that may be."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from moe_ffn.cli.command_line import parse_config
from moe_ffn.errors import ConfigError, reason
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.folder import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    check_can_be_read,
    check_is_run,
    is_run,
    named_run_folder,
    output_dir,
)
from moe_ffn.runs.lock import is_trained_here
from moe_ffn.runs.outside_code import comparable_options
from moe_ffn.runs.record import differences, fixed_options
from moe_ffn.runs.resume import Resume, _without_page, is_finished, own_config

FLAGS = {
    "--resume [RUN]": "go on with the run in this folder, or with the newest unfinished one, from its "
    "newest good checkpoint and with its own options",
    "--trust-code": "beside --resume: run the code that the run's folder names, though no run of yours "
    "began with it; read it before",
}
"""The flags of the training program that are taken here, with their meaning."""

NEWEST = ""
"""What `--resume` without a run stands for."""


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


def find_resume(run: str, argv: Sequence[str], command: str, *, trust_code: bool = False) -> Resume:
    """The run to go on with, its options, and over them those that were given.

    Args:
        run: its folder, or NEWEST: the run of `run.name`, or else of `run.output_dir` the unfinished run
            that was written last.
        trust_code: run the code that its folder names, whoever's it is.

    Raises:
        ConfigError: there is no such run, or it is finished, or names code that nobody trusts.
    """
    folder = Path(run).expanduser() if run else _newest(parse_config(argv, TrainConfig, command))
    check_is_run(folder)
    check_can_be_read(folder)
    # In one word, or what stands first in `argv` would be another file.
    given = [f"--config={folder / CONFIG_FILE}", *argv]
    if any(word.partition("=")[0] in ("-h", "--help") for word in argv):
        parse_config(given, TrainConfig, command, FLAGS)  # which exits, and runs nobody's code
    own = own_config(folder / CONFIG_FILE, trust_code=trust_code)
    config = parse_config(given, TrainConfig, command, FLAGS)
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
