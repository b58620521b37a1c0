"""Continue a prompt with a trained run's best weights.

moe-ffn generate runs/NAME --prompt "def "

A terminal is shown control characters of the text as escapes; a file or a pipe gets the text as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from moe_ffn.cli.parser import Parser, whole_number
from moe_ffn.config_files import parse_value, validate
from moe_ffn.errors import ConfigError, command, printable
from moe_ffn.runs.folder import SAMPLES_FILE, check_has_weights
from moe_ffn.runs.reader import load_model
from moe_ffn.training.monitoring.json_lines import Sample, read_lines
from moe_ffn.training.sampling import SampleConfig, sample_text
from moe_ffn.trust import accepting_code


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog=command("generate"), description=__doc__)
    parser.add_run()
    parser.add_argument("--seed", default="0", help="another seed, another text")
    parser.add_argument("--prompt", help="what to start from; by default what the run itself did")
    for name, field in SampleConfig.model_fields.items():
        if name != "prompt":
            flag = f"--{name.replace('_', '-')}"
            parser.add_argument(flag, default=str(field.default), help=field.description)
    options = vars(parser.parse_args(argv))
    folder, seed, prompt, trust_code = (
        options.pop(name) for name in ("run", "seed", "prompt", "trust_code")
    )
    number = whole_number(seed, most=2**63 - 1)
    if number is None:
        raise ConfigError(f"--seed: must be a whole number from 0 to 2**63 - 1, got '{seed}'")
    values = {name: parse_value(value, f"--{name}") for name, value in options.items()}
    # A prompt is text whatever it looks like; the rest are numbers or null.
    sample = validate(SampleConfig, {**values, "prompt": prompt})
    check_has_weights(folder)
    if prompt is None:
        prompt = own_prompt(folder)
    with accepting_code(trust_code):
        run = load_model(folder)
    if not run.config.model.causal:
        raise ConfigError(
            f"'{folder}' was trained with model.causal (false): it guesses masked tokens and cannot "
            "continue a text; use a run with causal: true"
        )
    text = prompt + sample_text(run.decoder, run.tokenizer, prompt, sample, number)
    print(printable(text, also="\n\t") if sys.stdout.isatty() else text)
    return 0


def own_prompt(folder: Path) -> str:
    """The prompt of a run's own samples.

    Raises:
        ConfigError: it wrote none.
    """
    prompts = [sample.prompt for sample in read_lines(folder / SAMPLES_FILE, Sample)]
    if not prompts:
        raise ConfigError(f"--prompt: is needed, since '{folder}' has no sample of its own")
    return prompts[-1]
