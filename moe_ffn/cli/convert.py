"""Convert a run or a model folder to a folder of transformers, or a folder of transformers to a model folder.

    moe-ffn convert runs/NAME models/exported
    moe-ffn convert runs/NAME models/exported.gguf
    moe-ffn convert models/qwen models/imported
    moe-ffn convert runs/NAME models/packed --packed

SOURCE decides the direction. A TARGET that ends in .gguf is a file for llama.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_ffn.cli.parser import Parser
from moe_ffn.config.errors import ConfigError, command
from moe_ffn.data.tokenizer import Tokenizer
from moe_ffn.hf.from_transformers import architecture_of, load_transformers
from moe_ffn.hf.to_gguf import SUFFIX, export_gguf
from moe_ffn.hf.to_transformers import export_transformers, require_absent
from moe_ffn.model.decoder import Decoder
from moe_ffn.outputs import dtype_name
from moe_ffn.runs.folder import is_run
from moe_ffn.weights.init_from import export_report
from moe_ffn.weights.open_model import read_source
from moe_ffn.weights.pretrained import (
    is_model_folder,
    load_tokenizer,
    require_replaceable,
    save_pretrained,
)


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog=command("convert"), description=__doc__)
    meaning = "folder of a run, model folder of moe_ffn, or model folder of transformers"
    parser.add("source SOURCE", meaning, type=Path)
    parser.add("target TARGET", "folder or .gguf file to write", type=Path)
    parser.add(
        "--packed",
        "store experts of type fake_quantized as low-precision elements and scales, in the format of "
        "compressed-tensors, instead of as rounded floating-point numbers",
    )
    parser.add_trust()
    args = parser.parse_args(argv)
    is_ours = is_run(args.source) or is_model_folder(args.source)
    if args.packed and (args.target.suffix == SUFFIX or not is_ours):
        raise ConfigError(
            "--packed exports a run or a model folder of moe_ffn to a folder of transformers, "
            f"not '{args.source}' to '{args.target}'; leave it out"
        )
    if is_ours or args.target.suffix == SUFFIX:
        _export(args, is_ours=is_ours)
    else:
        _import(args.source, args.target)
    return 0


def _export(args: Any, *, is_ours: bool) -> None:
    """Write a folder of transformers or a GGUF file, and describe it."""
    target, is_gguf = args.target, args.target.suffix == SUFFIX
    require_absent(target, "file" if is_gguf else "folder")  # before a large model is read
    decoder, tokenizer, problem = _read(args.source, is_ours=is_ours, trust_code=args.trust_code)
    if not is_gguf:
        export = export_transformers(decoder, target, tokenizer, packed=args.packed)
        kind = f"{export.family.architecture} of transformers"
    elif tokenizer is None:
        raise ConfigError(f"'{target}' needs a tokenizer; {problem or 'the model has none'}")
    else:
        export = export_gguf(decoder, target, tokenizer)
        kind = f"{export.family.model_type} for llama.cpp"
    print(f"written: '{target}', {kind}")
    for note in export.notes:
        print(f"  {note}")


def _import(source: Path, target: Path) -> None:
    replaces = require_replaceable(target.absolute())
    decoder, tokenizer, problem = _read(source, is_ours=False)
    save_pretrained(decoder, target, tokenizer)
    if problem:
        print(f"without a tokenizer: {problem}")
    print("\n".join(export_report(target, decoder, tokenizer, replaces=replaces)))


def _read(
    source: Path, *, is_ours: bool, trust_code: bool = False
) -> tuple[Decoder, Tokenizer | None, str]:
    """Read and describe a model; return its decoder, its tokenizer, and why a folder has none."""
    tokenizer, problem = None, ""
    if is_ours:
        model = read_source(str(source), "SOURCE", trust_code=trust_code)
        decoder, tokenizer, kind = model.decoder, model.found_tokenizer, "moe_ffn"
    else:
        decoder, kind = load_transformers(source), f"{architecture_of(source)} of transformers"
        try:
            tokenizer = load_tokenizer(source)
        except ConfigError as error:
            problem = str(error)
    config = decoder.config
    count = sum(parameter.numel() for parameter in decoder.parameters())
    dtype = dtype_name(decoder.embedding.weight.dtype)
    blocks = ", ".join(dict.fromkeys(ffn.describe() for ffn in config.layer_ffns()))
    print(f"read: '{source}', {kind}, {count:,} parameters in {dtype}")
    print(f"  {config.num_layers} layers of width {config.d_model}: {blocks}")
    if tokenizer is not None:
        print(f"  a tokenizer of {tokenizer.vocab_size:,} tokens")
    return decoder, tokenizer, problem
