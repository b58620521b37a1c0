"""`python -m experiments.convert --help`; the program itself is `moe_ffn.cli.convert`."""

from moe_ffn.cli.convert import main
from moe_ffn.cli.exit import exit_on_bad_input

if __name__ == "__main__":
    raise SystemExit(exit_on_bad_input(main))
