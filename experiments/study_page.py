"""`python -m experiments.study_page --help`; the program itself is `moe_ffn.cli.study_page`."""

from moe_ffn.cli.exit import exit_on_bad_input
from moe_ffn.cli.study_page import main

if __name__ == "__main__":
    raise SystemExit(exit_on_bad_input(main))
