"""`python -m experiments.evaluate --help`; the program itself is `moe_ffn.cli.evaluate`."""

from moe_ffn.cli.evaluate import main
from moe_ffn.cli.exit import exit_on_bad_input

if __name__ == "__main__":
    raise SystemExit(exit_on_bad_input(main))
