"""Continue a prompt with a trained run's best weights.

python -m experiments.generate runs/NAME --prompt "def "
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.announce import announce_import
from experiments.command_line import parse_value, validate
from experiments.exit import exit_on_bad_input
from experiments.outside.trust import FLAG
from experiments.outside.trust import HELP as TRUST_HELP
from experiments.parser import Parser
from experiments.run_folder import check_has_weights
from moe_ffn.errors import ConfigError
from moe_ffn.training.config import SampleConfig


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="python -m experiments.generate", description=__doc__)
    parser.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        help="folder of a run, finished or interrupted, with a best checkpoint",
    )
    parser.add_argument("--seed", type=int, default=0, help="another seed, another text")
    for name, field in SampleConfig.model_fields.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, default=str(field.default), help=field.description)
    parser.add_argument(FLAG, action="store_true", help=TRUST_HELP)
    options = vars(parser.parse_args(argv))
    folder, seed, trust_code = (options.pop(name) for name in ("run", "seed", "trust_code"))
    # A prompt is text whatever it looks like; the rest are numbers or null.
    values = {k: v if k == "prompt" else parse_value(v, f"--{k}") for k, v in options.items()}
    sample = validate(SampleConfig, values)
    check_has_weights(folder)
    # Only now: a mistake in the options should not wait for torch.
    announce_import("torch")
    from experiments.sampling import sample_text
    from experiments.saved_run import load_run

    run = load_run(folder, trust_code=trust_code)
    if not run.config.model.causal:
        raise ConfigError(
            f"'{folder}' was trained with model.causal (false): it guesses masked tokens and cannot "
            "continue a text; use a run with causal: true"
        )
    print(sample.prompt + sample_text(run.decoder, run.tokenizer, sample, seed))
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_on_bad_input(main))
