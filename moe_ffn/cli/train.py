"""Train a Transformer language model; one word of YAML chooses its feed-forward block.

moe-ffn train --help
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from moe_ffn.cli import require_packages
from moe_ffn.cli.command_line import parse_config
from moe_ffn.cli.exit import EXIT_DIVERGED, EXIT_FAILED, EXIT_SIGNAL, announce_import
from moe_ffn.cli.parser import Parser
from moe_ffn.config import trust
from moe_ffn.config.environment import check_environment, is_first_rank
from moe_ffn.config.errors import ConfigError, command, printable
from moe_ffn.config.import_path import explaining_custom_errors
from moe_ffn.config.option_tree import merge
from moe_ffn.config.yaml_files import read_yaml, validate
from moe_ffn.files import reason
from moe_ffn.kernels.memory import out_of_memory
from moe_ffn.report.html import compact
from moe_ffn.runs import folder as run_folder
from moe_ffn.runs.budget import Budget
from moe_ffn.runs.config import Resume, TrainConfig
from moe_ffn.runs.identity import resume_with
from moe_ffn.runs.memory import training_needs
from moe_ffn.runs.reader import Run, load_run
from moe_ffn.training.recovery import TrainingError

log = logging.getLogger(__name__)

NEWEST = ""
"""Value of `--resume` without a run."""

DEFAULT_TIME = "about 3 minutes on 2 CPU cores"
"""Duration of the default run, as measured in docs/default_run.json."""

DECIDES_TIME = ("init_from", "model", "data", "objective", "optimizer", "trainer", "parallel")
"""Sections of the config that determine how long a run takes."""


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
        _train(config, resume)
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


def describe_run(config: TrainConfig, resume: Resume | None = None) -> str:
    """Return a description of the run to train, with its duration if it is the default run."""
    model, data, trainer = config.model, config.data, config.trainer
    cost = Budget.of(config).model
    blocks = " and ".join(dict.fromkeys(ffn.describe() for ffn in model.layer_ffns()))
    layers = f"{model.num_layers} layer{'s' * (model.num_layers > 1)} with {blocks}"
    active = compact(cost.active_params)
    used = f" ({active} used by a token)" if cost.active_params != cost.params else ""
    tokens = data.batch_size * data.seq_len * trainer.accumulate_grad_batches
    default = TrainConfig()
    is_default = all(getattr(config, part) == getattr(default, part) for part in DECIDES_TIME)
    time = DEFAULT_TIME if is_default and resume is None else "the first steps show the time left"
    verb = "training" if resume is None else f"resuming {resume.folder}"
    return printable(
        f"{verb}: {layers}; {compact(cost.params)} parameters{used}; {trainer.max_steps:,} steps of "
        f"{tokens:,} tokens (corpus {data.corpus.type}); {time}"
    )


def train(options: Mapping[str, Any] | str | Path) -> Run:
    """Train a run like `moe-ffn train`, and return it.

        ffn = {"type": "moe", "num_experts": 16}
        run = moe_ffn.train({"model": {"ffn": ffn}, "trainer": {"max_steps": 200}})
        run.summary.validation_loss

    With several ranks, only the first returns; the other ranks exit.

    Args:
        options: options nested as in YAML, or the path of a YAML file; other options keep their defaults.

    Raises:
        ConfigError: one line per mistake in the options.
        TrainingError: training failed, diverged or was interrupted.
        ModuleNotFoundError: a package of the extra `train` is missing.
    """
    require_packages()
    if not isinstance(options, Mapping):
        options = read_yaml(Path(options), where=f"'{options}'")
    folder = _train(validate(TrainConfig, merge(TrainConfig().to_dict(), options)), None)
    if not is_first_rank():
        raise SystemExit(0)
    return load_run(folder)


def _train(config: TrainConfig, resume: Resume | None) -> Path:
    """Check the environment and the config, import Lightning, and train; see `training_run.train`."""
    # Before the import of Lightning, which reads the same variables.
    check_environment(config.trainer.num_nodes)
    with explaining_custom_errors():
        log.info("%s", describe_run(config, resume))
    announce_import("lightning")
    from moe_ffn.cli import training_run

    return training_run.train(config, resume)


def take_flags(argv: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Return the flags `resume` (None, NEWEST or a folder) and `trust_code`, and the remaining arguments."""
    parser = Parser(add_help=False)
    _add_flags(parser)
    return parser.parse_known_args(argv)


def _add_flags(parser: Parser) -> None:
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

    Args:
        run: folder of the run, or NEWEST: the run `run.name` if that is given, otherwise the most recently
            written unfinished run in `run.output_dir`.

    Raises:
        ConfigError: there is no such run, or it is finished, or it names untrusted code.
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
