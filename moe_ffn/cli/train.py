"""Train a Transformer language model; one word of YAML chooses its feed-forward block.

moe-ffn train --run.name mine --data.corpus.type text --data.corpus.paths my_texts/
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from moe_ffn.cli.command_line import parse_config
from moe_ffn.cli.exit import EXIT_DIVERGED, EXIT_FAILED, EXIT_SIGNAL
from moe_ffn.cli.parser import Parser
from moe_ffn.config import trust
from moe_ffn.config.errors import ConfigError, command
from moe_ffn.config.files import reason
from moe_ffn.config.process_memory import out_of_memory
from moe_ffn.runs import folder as run_folder
from moe_ffn.runs.config import Resume, TrainConfig
from moe_ffn.runs.identity import resume_with
from moe_ffn.runs.memory import training_needs
from moe_ffn.runs.train import start
from moe_ffn.training.recovery import TrainingError

log = logging.getLogger(__name__)

NEWEST = ""
"""Value of `--resume` without a run."""


def main(argv: Sequence[str]) -> int:
    flags, options = take_flags(argv)
    with trust.accepting_code(flags.trust_code):
        resume = None if flags.resume is None else find_resume(flags.resume, options)
        config = parse(options) if resume is None else resume.config
        if flags.trust_code and resume is None and not reads_a_folder(config):
            raise ConfigError(
                f"{trust.FLAG}: applies to the folders of --resume, init_from and objective.distill.teacher, "
                "but this run reads none; leave it out, since a class that you name yourself is trusted"
            )
        return _run(config, resume)


def reads_a_folder(config: TrainConfig) -> bool:
    """Return True if a new run reads the folder of another model."""
    distill = config.objective.distill
    return config.init_from is not None or (distill is not None and not distill.is_stored)


def _run(config: TrainConfig, resume: Resume | None) -> int:
    """Train, and return the exit code."""
    try:
        start(config, resume)
    except TrainingError as error:
        return exit_code(error)
    except Exception as error:
        if not (sentence := out_of_memory(error)):
            raise
        log.error("%s; %s", sentence, training_needs(config))
        return EXIT_FAILED
    return 0


def exit_code(error: TrainingError) -> int:
    """Return the exit code that docs/reference/files_of_a_run.md lists."""
    from moe_ffn.training.recovery.guard import Diverged
    from moe_ffn.training.recovery.stopping import Interrupted  # imports Lightning

    if isinstance(error, Interrupted):
        return EXIT_SIGNAL + error.signum
    return EXIT_DIVERGED if isinstance(error, Diverged) else EXIT_FAILED


def take_flags(argv: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Return the flags `resume` (None, NEWEST or a folder) and `trust_code`, and the remaining arguments."""
    parser = Parser(add_help=False)
    _add_flags(parser)
    return parser.parse_known_args(argv)


def _add_flags(parser: Parser) -> None:
    parser.description = __doc__
    parser.add(
        "--resume RUN",
        "resume the run in this folder, or the newest unfinished run, with its own options and from its "
        "newest intact checkpoint",
        nargs="?",
        const=NEWEST,
    )
    parser.add(trust.FLAG, f"for --resume, init_from or a teacher: {trust.HELP}")


def parse(argv: Sequence[str]) -> TrainConfig:
    return parse_config(argv, TrainConfig, command("train"), _add_flags)


def find_resume(run: str, argv: Sequence[str]) -> Resume:
    """Return the run to resume, with its own options updated by the given ones.

    For NEWEST this is the run `run.name` if that is given, otherwise the most recently written unfinished run
    in `run.output_dir`. Raises ConfigError if there is no such run, or it is finished, or it names untrusted
    code.
    """
    folder = Path(run).expanduser() if run else _newest(parse(argv))
    run_folder.check_is_run(folder)
    # With `=`, since after `--config FILE` the start of `argv` would be read as another file.
    arguments = [f"--config={folder / run_folder.CONFIG_FILE}", *argv]
    if any(word.partition("=")[0] in ("-h", "--help") for word in argv):
        parse(arguments)  # exits, and runs no custom code
    own = run_folder.saved_config(folder)
    return resume_with(parse(arguments), own, folder, is_named=bool(run))


def _newest(config: TrainConfig) -> Path:
    parent = run_folder.output_dir(config)
    if config.run.name is not None:
        return run_folder.named_run_folder(config)
    try:
        runs = [path for path in parent.iterdir() if run_folder.is_run(path)]
    except FileNotFoundError:
        runs = []
    except OSError as error:
        raise ConfigError(f"run.output_dir: '{parent}' cannot be read ({reason(error)})") from error
    unfinished = [
        p for p in runs if not run_folder.is_finished(p) and not run_folder.is_training(p)
    ]
    if not unfinished:
        problem = "has no unfinished run (except runs training now)" if runs else "has no run"
        raise ConfigError(f"--resume: '{parent}' {problem}; name one: --resume runs/my-run")
    return max(unfinished, key=_last_written)


def _last_written(folder: Path) -> tuple[float, str]:
    times = [0.0]
    for parent in (folder, folder / run_folder.CHECKPOINTS_FOLDER):
        with suppress(OSError):  # removed meanwhile, or not readable
            times += [path.stat().st_mtime for path in parent.iterdir() if path.exists()]
    return max(times), folder.name
