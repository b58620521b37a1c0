"""The program `moe-ffn train` in a clone: `python -m experiments.train`."""

from moe_ffn.cli.exit import exit_on_bad_input
from moe_ffn.cli.train import main

if __name__ == "__main__":
    raise SystemExit(exit_on_bad_input(main))
