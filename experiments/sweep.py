"""The program `moe-ffn sweep` in a clone: `python -m experiments.sweep`."""

from moe_ffn.cli.exit import exit_on_bad_input
from moe_ffn.cli.sweep import main

if __name__ == "__main__":
    raise SystemExit(exit_on_bad_input(main))
