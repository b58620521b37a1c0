"""The program `moe-ffn demo` in a clone: `python -m experiments.demo`."""

from moe_ffn.cli.demo import main
from moe_ffn.cli.exit import exit_on_bad_input

if __name__ == "__main__":
    raise SystemExit(exit_on_bad_input(main))
