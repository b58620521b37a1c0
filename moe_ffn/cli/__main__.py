"""Entry point of the console command `moe-ffn` and of `python -m moe_ffn.cli`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from importlib import import_module

from moe_ffn.cli import exit_without_packages
from moe_ffn.cli.exit import exit_on_bad_input
from moe_ffn.cli.parser import versions, wrap
from moe_ffn.config.errors import ConfigError, did_you_mean, nearest_or_all, show

PROGRAMS = {
    "demo": "show where each token of a text goes, with a small trained model",
    "train": "train a Transformer language model; one word of YAML chooses its feed-forward block",
    "initialise": "make a model from trained ones: a sparse one from dense ones, or one with fewer experts",
    "pruning": "measure the loss of a model as experts are removed",
    "generate": "continue a prompt with a run's best weights",
    "evaluate": "measure a trained model on a text, or on tasks of lm-eval",
    "report": "write the page of a run, or a page that compares several runs",
    "which": "find the feed-forward block that suits a corpus, within a given time",
    "compare": "compare existing runs: losses with intervals, differences, cost",
    "sweep": "train the runs of a study, several at a time, or resume them",
    "study_page": "write the page of a study from the results of its runs",
    "coordinates": "check whether a learning rate transfers to other sizes of a model",
    "plan": "compare the layouts of a model on several GPUs",
    "trace": "show which experts each token of a text goes to, layer by layer",
    "audit": "check a mixture of experts for silent defects, also one of transformers or peft",
    "inspect": "show what the feed-forward blocks of a run store, unit by unit and expert by expert",
    "diff": "compare two models on a text: weights, predictions, and the experts of each token",
    "convert": "convert a model to transformers or llama.cpp (GGUF), or from transformers",
    "dashboard": "make a wandb workspace for the runs of a project",
}
"""Program, a module of this package -> its line in the help."""


def main() -> int:
    """Run the program that the command line names."""
    exit_without_packages()
    # `type: my_module:MyConfig` finds a module in the current folder, as with `python -m`.
    sys.path.append("")
    return exit_on_bad_input(run)


def run(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(wrap(help_page(), shutil.get_terminal_size().columns))
        return 0
    if argv[0] == "--version":
        print(versions())
        return 0
    name, *rest = argv
    if name not in PROGRAMS:
        hint = did_you_mean(name, ["--version", "--help"]) or nearest_or_all(name, PROGRAMS)
        raise ConfigError(f"unknown program {show(name)}{hint}")
    return import_module(f"moe_ffn.cli.{name}").main(rest)


def help_page() -> str:
    programs = "\n".join(f"  {name:11}  {meaning}" for name, meaning in PROGRAMS.items())
    return f"""usage:  moe-ffn PROGRAM ...

{programs}

  --version   print the versions of this package, torch and Python, and stop

moe-ffn PROGRAM --help shows the options of a program."""


if __name__ == "__main__":
    raise SystemExit(main())
