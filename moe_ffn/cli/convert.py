"""Convert a run or a model folder to a folder of transformers, or a folder of transformers to a model folder.

    moe-ffn convert runs/NAME models/exported
    moe-ffn convert models/qwen models/imported

SOURCE decides the direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moe_ffn.cli.parser import Parser
from moe_ffn.config import trust
from moe_ffn.config.errors import ConfigError, command
from moe_ffn.data.tokenizer import Tokenizer
from moe_ffn.model.decoder import Decoder
from moe_ffn.runs.folder import is_run
from moe_ffn.weights.from_transformers import architecture_of, load_transformers
from moe_ffn.weights.init_from import export_report, read_source
from moe_ffn.weights.pretrained import (
    is_model_folder,
    load_tokenizer,
    require_replaceable,
    save_pretrained,
)
from moe_ffn.weights.to_transformers import export_transformers, require_absent


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog=command("convert"), description=__doc__)
    parser.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="folder of a run, model folder of moe_ffn, or model folder of transformers",
    )
    parser.add_argument("target", type=Path, metavar="TARGET", help="folder to write")
    parser.add_argument(trust.FLAG, action="store_true", help=trust.HELP)
    args = parser.parse_args(argv)
    if is_run(args.source) or is_model_folder(args.source):
        _export(args.source, args.target, trust_code=args.trust_code)
    else:
        _import(args.source, args.target)
    return 0


def _export(source: Path, target: Path, *, trust_code: bool) -> None:
    require_absent(target)  # before a large model is read
    model = read_source(str(source), "SOURCE", trust_code=trust_code)
    _print_source(source, "moe_ffn", model.decoder, model.tokenizer)
    export = export_transformers(model.decoder, target, model.tokenizer)
    print(f"written: '{target}', {export.family.architecture} of transformers")
    for note in export.notes:
        print(f"  {note}")


def _import(source: Path, target: Path) -> None:
    replaces = require_replaceable(target.absolute())
    decoder = load_transformers(source)
    tokenizer, problem = None, ""
    try:
        tokenizer = load_tokenizer(source)
    except ConfigError as error:
        problem = f"without a tokenizer: {error}"
    _print_source(source, f"{architecture_of(source)} of transformers", decoder, tokenizer)
    save_pretrained(decoder, target, tokenizer)
    if problem:
        print(problem)
    print("\n".join(export_report(target, decoder, tokenizer, replaces=replaces)))


def _print_source(
    source: Path, model_type: str, decoder: Decoder, tokenizer: Tokenizer | None
) -> None:
    config = decoder.config
    count = sum(parameter.numel() for parameter in decoder.parameters())
    dtype = str(decoder.embedding.weight.dtype).removeprefix("torch.")
    blocks = ", ".join(dict.fromkeys(ffn.describe() for ffn in config.layer_ffns()))
    print(f"read: '{source}', {model_type}, {count:,} parameters in {dtype}")
    print(f"  {config.num_layers} layers of width {config.d_model}: {blocks}")
    if tokenizer is not None:
        print(f"  a tokenizer of {tokenizer.vocab_size:,} tokens")
