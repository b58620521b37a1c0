"""Continue a prompt with the best weights of a run, or with a model folder.

moe-ffn generate runs/NAME --prompt "def " [--trace]

The text is printed token by token; the speed is logged to stderr. A prompt may have up to data.seq_len
tokens, the length of the training sequences. Beyond that length, each new token is predicted from the last
data.seq_len tokens. They are recomputed every time, which is slow.

A terminal shows control characters as escapes; a file or a pipe gets the text unchanged.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from moe_ffn.cli.parser import Parser, whole
from moe_ffn.config.base import help_texts
from moe_ffn.config.errors import ConfigError, command, printable
from moe_ffn.config.option_tree import show_value
from moe_ffn.config.yaml_files import parse_value, validate
from moe_ffn.kernels.native.build import compile_kernels
from moe_ffn.model.decoder import DecoderOutput
from moe_ffn.report.trace import check_routes, trace_of_decoder
from moe_ffn.report.trace_view import table
from moe_ffn.runs.folder import SAMPLES_FILE
from moe_ffn.training.monitoring.json_lines import Sample, read_lines
from moe_ffn.training.sampling import SampleConfig, encode_text, stream_texts
from moe_ffn.weights.open_model import open_model

log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog=command("generate"), description=__doc__)
    parser.add("run FOLDER", "folder of a run with a best checkpoint, or model folder")
    parser.add_trust()
    meaning = "seed for sampling (default: 0)"
    parser.add("--seed SEED", meaning, type=whole(most=2**63 - 1), default=0)
    parser.add("--prompt PROMPT", "text to continue (default: prompt of the run's samples)")
    meaning = "stop before this text; may be given several times"
    parser.add("--stop TEXT", meaning, action="append", default=[])
    parser.add("--trace", "print the experts of every token at the end")
    helps = help_texts(SampleConfig)
    numeric = [name for name in SampleConfig.model_fields if name not in ("prompt", "stop")]
    for name in numeric:
        default = show_value(SampleConfig.model_fields[name].default)
        parser.add(f"--{name.replace('_', '-')} {name.upper()}", helps[name], default=default)
    args = parser.parse_args(argv)
    folder, prompt = args.run, args.prompt
    # A prompt such as `12` or `null` is text; the other values are numbers or null.
    values = {name: parse_value(getattr(args, name), f"--{name}") for name in numeric}
    sample = validate(SampleConfig, {**values, "prompt": prompt, "stop": args.stop})
    model = open_model(folder, trust_code=args.trust_code)
    decoder, tokenizer = model.decoder, model.tokenizer
    if prompt is None:
        prompt = latest_prompt(folder)
    if not decoder.config.causal:
        raise ConfigError(
            f"'{folder}' was trained with model.causal (false): it predicts masked tokens and cannot "
            "continue a text; use a run with causal: true"
        )
    ids = encode_text(tokenizer, prompt, decoder.max_seq_len, "--prompt")
    outputs: list[tuple[DecoderOutput, int]] = []

    def record(output: DecoderOutput, num_new: int) -> None:
        check_routes(folder, decoder.config, output.routings)
        outputs.append((output, num_new))

    if decoder.routers():
        compile_kernels()
    observe = record if args.trace else None
    start = time.perf_counter()
    pieces = stream_texts(decoder, tokenizer, [ids], sample, args.seed, observe)
    new_ids: list[int] = []
    for _, token_id, piece in pieces:
        _print_text(piece if new_ids else prompt + piece)
        new_ids.append(token_id)
    seconds = time.perf_counter() - start
    _print_text("\n" if new_ids else f"{prompt}\n")
    if new_ids:
        speed = len(new_ids) / seconds
        log.info("%d tokens in %.2f s, %.1f tokens/s", len(new_ids), seconds, speed)
    if outputs:
        console = Console(highlight=False)
        trace = trace_of_decoder(folder, decoder.config, tokenizer, ids + new_ids, outputs)
        console.print()
        console.print(table(trace, console.width))
    return 0


def _print_text(text: str) -> None:
    print(printable(text, also="\n\t") if sys.stdout.isatty() else text, end="", flush=True)


def latest_prompt(folder: Path) -> str:
    """Return the prompt of a run's latest sample; ConfigError without samples, or for a model folder."""
    prompts = [sample.prompt for sample in read_lines(folder / SAMPLES_FILE, Sample)]
    if not prompts:
        raise ConfigError(f"--prompt: is required, since '{folder}' has no samples")
    return prompts[-1]
