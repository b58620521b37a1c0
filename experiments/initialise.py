"""`python -m experiments.initialise --help`; the program itself is `moe_ffn.cli.initialise`."""

from moe_ffn.cli.exit import exit_on_bad_input
from moe_ffn.cli.initialise import main

if __name__ == "__main__":
    raise SystemExit(exit_on_bad_input(main))
