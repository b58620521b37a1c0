"""Training of one run: `train`, which a program and `moe_ffn.train` call.

run.py        from the options to the trained model
teacher.py    the teacher of a run that learns from another model
ending.py     the results, or why there are none
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_ffn.config.environment import (
    announce_import,
    check_environment,
    is_first_rank,
    require_packages,
)
from moe_ffn.config.errors import printable
from moe_ffn.config.import_path import explaining_custom_errors
from moe_ffn.config.numbers import compact, counted
from moe_ffn.config.option_tree import merge
from moe_ffn.config.yaml_files import read_yaml, validate
from moe_ffn.runs.budget import Budget
from moe_ffn.runs.config import Resume, TrainConfig
from moe_ffn.runs.reader import Run, load_run

log = logging.getLogger(__name__)

DEFAULT_TIME = "about 3 minutes on 2 CPU cores"
"""Duration of the default run, as measured in docs/performance/default_run.json."""

DECIDES_TIME = ("init_from", "model", "data", "objective", "optimizer", "trainer", "parallel")
"""Sections of the config that determine how long a run takes."""


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
    folder = start(validate(TrainConfig, merge(TrainConfig().to_dict(), options)), None)
    if not is_first_rank():
        raise SystemExit(0)
    return load_run(folder)


def start(config: TrainConfig, resume: Resume | None) -> Path:
    """Check the environment and the config, import Lightning, and train; see `run_training`."""
    # Before the import of Lightning, which reads the same variables.
    check_environment(config.trainer.num_nodes)
    with explaining_custom_errors():
        log.info("%s", describe_run(config, resume))
    announce_import("lightning")
    from moe_ffn.runs.train.run import run_training

    return run_training(config, resume)


def describe_run(config: TrainConfig, resume: Resume | None = None) -> str:
    """Return a description of the run to train, with its duration if it is the default run."""
    model, trainer = config.model, config.trainer
    cost = Budget.of(config).model
    blocks = " and ".join(dict.fromkeys(ffn.describe() for ffn in model.layer_ffns()))
    layers = f"{counted(model.num_layers, 'layer')} with {blocks}"
    active = compact(cost.active_params)
    used = f" ({active} used by a token)" if cost.active_params != cost.params else ""
    default = TrainConfig()
    is_default = all(getattr(config, part) == getattr(default, part) for part in DECIDES_TIME)
    time = DEFAULT_TIME if is_default and resume is None else "the first steps show the time left"
    verb = "training" if resume is None else f"resuming {resume.folder}"
    return printable(
        f"{verb}: {layers}; {compact(cost.params)} parameters{used}; {counted(trainer.max_steps, 'step')} of "
        f"{config.tokens_per_step:,} tokens (corpus {config.data.corpus.type}); {time}"
    )
