"""Train a Transformer language model whose feed-forward block is one word of YAML.

python -m experiments.train --help
"""

from __future__ import annotations

from collections.abc import Sequence

from moe_ffn.cli.command_line import parse_config
from moe_ffn.cli.exit import announce_import, exit_on_bad_input, undisturbed
from moe_ffn.cli.model_size import check_fits, saying_what_it_needs
from moe_ffn.cli.resume import FLAGS, find_resume, take_resume
from moe_ffn.errors import ConfigError
from moe_ffn.import_path import explaining_outside_errors
from moe_ffn.ranks import check_environment, is_first_rank
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.folder import check_run_folder
from moe_ffn.trust import FLAG, take_trust

COMMAND = "python -m experiments.train"


def main(argv: Sequence[str]) -> int:
    trust_code, argv = take_trust(argv)
    run, options = take_resume(argv)
    if run is None:
        if trust_code:
            raise ConfigError(
                f"{FLAG}: goes with --resume; a class that you name here is yours, and runs unasked"
            )
        resume, config = None, parse_config(options, TrainConfig, COMMAND, FLAGS)
    else:
        resume = find_resume(run, options, command=COMMAND, trust_code=trust_code)
        config = resume.config
    check_environment(config.trainer.lightning_arguments().get("num_nodes", 1))
    if resume is None and is_first_rank():  # which makes the folder
        check_run_folder(config)
    with explaining_outside_errors():
        check_fits(config)
    # Only now: a mistake in the options should not wait for torch and lightning.
    announce_import("torch", "lightning")
    with saying_what_it_needs(config):
        with undisturbed():
            from moe_ffn.cli.training_run import train

        train(config, resume)
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_on_bad_input(main))
