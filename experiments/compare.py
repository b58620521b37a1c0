"""The program `moe-ffn compare` in a clone: `python -m experiments.compare`."""

from moe_ffn.cli.compare import main
from moe_ffn.cli.exit import exit_on_bad_input

if __name__ == "__main__":
    raise SystemExit(exit_on_bad_input(main))
