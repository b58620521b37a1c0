"""Continue a prompt with a trained run's best weights.

python -m experiments.generate runs/NAME --prompt "def "
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from experiments.command_line import exit_on_bad_input
from moe_ffn.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.generate", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("--prompt", default="def ", help="what to start from")
    parser.add_argument("--num-tokens", type=int, default=256, help="how many tokens to add")
    parser.add_argument("--temperature", type=float, default=0.7, help="0: the most probable token")
    parser.add_argument("--top-k", type=int, default=40, help="choose among this many")
    parser.add_argument("--seed", type=int, default=0, help="another seed, another text")
    options = parser.parse_args(argv)
    if not options.prompt:
        raise ConfigError("--prompt must not be empty")
    if options.num_tokens < 0 or options.temperature < 0 or options.top_k < 1:
        raise ConfigError(
            "--num-tokens and --temperature must be at least 0 and --top-k at least 1, got "
            f"{options.num_tokens}, {options.temperature} and {options.top_k}"
        )
    from experiments.sampling import sample_text
    from experiments.saved_run import load_run

    run = load_run(options.run)
    text = sample_text(
        run.decoder,
        run.tokenizer,
        options.prompt,
        num_tokens=options.num_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
    )
    print(options.prompt + text)
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_on_bad_input(main))
