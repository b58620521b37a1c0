"""Train a Transformer language model whose feed-forward block is one word of YAML.

python -m experiments.train --help
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.command_line import exit_on_bad_input, parse_config
from experiments.config import TrainConfig


def main(argv: Sequence[str]) -> int:
    config = parse_config(argv, TrainConfig, command="python -m experiments.train")
    # Only now: a mistake in the options should not wait for torch and lightning.
    from experiments.training_run import train

    train(config)
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_on_bad_input(main))
