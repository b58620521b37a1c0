"""Make a model from trained models without training, and write it as a model folder.

    moe-ffn initialise --source runs/dense --output models/sparse --method.type upcycle

`moe-ffn train --init_from models/sparse` starts a run from this model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Generator, Tensor

from moe_ffn.cli.command_line import parse_flags
from moe_ffn.cli.parser import Parser
from moe_ffn.config.errors import ConfigError, command
from moe_ffn.model.decoder import Decoder
from moe_ffn.weights import InitialiserConfig, UpcycleConfig
from moe_ffn.weights.init_from import export_report
from moe_ffn.weights.initialiser import CalibrationConfig
from moe_ffn.weights.open_model import read_source
from moe_ffn.weights.pretrained import require_replaceable, save_pretrained

_NUM_COMPARED = 8
"""Number of sequences on which the logits of both models are compared."""


class InitialiseConfig(CalibrationConfig, frozen=True):
    """Options for making a model from trained models."""

    method: InitialiserConfig = UpcycleConfig()
    """Method that makes the new model."""


def main(argv: Sequence[str]) -> int:
    flags, config = parse_flags(argv, InitialiseConfig, command("initialise"), _add_flags)
    if not flags.source or flags.output is None:
        raise ConfigError(
            "--source FOLDER and --output FOLDER are required: a model or a run to read, and the folder to "
            "write"
        )
    method = config.method
    if len(flags.source) > 1 and not method.takes_several:
        raise ConfigError(
            f"--source: names {len(flags.source)} folders, but method.type '{method.type}' reads one; "
            "give one, or use mix"
        )
    if flags.output.resolve() in [Path(folder).resolve() for folder in flags.source]:
        raise ConfigError(f"--output: '{flags.output}' is also a source; choose another folder")
    replaces = require_replaceable(flags.output.absolute())
    sources = [
        read_source(folder, "--source", trust_code=flags.trust_code) for folder in flags.source
    ]
    first = sources[0]
    for other in sources[1:]:
        if other.found_tokenizer is not None:
            first.require_same_tokens(other.tokenizer)
    ids_BS = config.ids(*config.prepared(first)) if method.needs_text else None
    with torch.no_grad():
        new_model = method.initialise(
            [source.decoder for source in sources], ids_BS, config.generator
        )
    save_pretrained(new_model, flags.output, first.found_tokenizer)
    for line in (
        *_compare(first.decoder, new_model, ids_BS, config.generator),
        *export_report(flags.output, new_model, first.found_tokenizer, replaces=replaces),
    ):
        print(line)
    return 0


def _add_flags(parser: Parser) -> None:
    parser.description = __doc__
    parser.add(
        "--source FOLDER",
        "trained model: a model folder, or a run (its best weights); several for mix",
        type=str,
        nargs="+",
        action="extend",
        default=[],
    )
    parser.add("--output FOLDER", "model folder to write")
    parser.add_trust()


@torch.no_grad()
def _compare(
    source: Decoder, new_model: Decoder, ids_BS: Tensor | None, generator: Generator
) -> list[str]:
    """Return lines that compare the sizes and the logits of the new model and the first source."""
    sizes = source.embedding.num_embeddings, source.max_seq_len
    old, new = source.config, new_model.config
    if ids_BS is None:
        shape = (_NUM_COMPARED, min(128, sizes[1]))
        ids_BS = torch.randint(sizes[0], shape, generator=generator)
    ids_BS = ids_BS[:_NUM_COMPARED]
    before, after = source(ids_BS).logits, new_model(ids_BS).logits
    return [
        f"parameters         {old.num_params(*sizes):,} -> {new.num_params(*sizes):,}",
        f"active parameters  {old.num_active_params(*sizes):,} -> {new.num_active_params(*sizes):,}",
        f"logits             differ by up to {(after - before).abs().max():.2g}; the source's mean magnitude "
        f"is {before.abs().mean():.2g}",
    ]
