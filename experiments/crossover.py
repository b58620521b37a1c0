"""`python -m experiments.crossover --help`; the program itself is `moe_ffn.cli.crossover`."""

from moe_ffn.cli.crossover import main
from moe_ffn.cli.exit import exit_on_bad_input

if __name__ == "__main__":
    raise SystemExit(exit_on_bad_input(main))
