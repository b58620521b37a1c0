"""Measure the loss of a model as experts are removed: by importance, at random, or by merging.

moe-ffn pruning --source runs/sparse --num_experts '[6, 4, 2]'
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from rich.console import Console
from rich.table import Table

from moe_ffn.cli.command_line import parse_flags
from moe_ffn.cli.parser import Parser, json_file, write_json
from moe_ffn.config.base import MAX_COUNT
from moe_ffn.config.errors import ConfigError, command
from moe_ffn.data.prepare import validation_batches
from moe_ffn.model.decoder import Decoder
from moe_ffn.training.evaluation import evaluate
from moe_ffn.weights import MergeConfig, PruneConfig
from moe_ffn.weights.initialiser import CalibrationConfig
from moe_ffn.weights.open_model import read_source

Method = Literal["reap", "frequency", "random", "merge"]


class PruningConfig(CalibrationConfig, frozen=True):
    """Numbers of experts to keep, and the methods that choose them."""

    num_experts: Annotated[list[Annotated[int, Field(ge=1, le=MAX_COUNT)]], Field(min_length=1)] = (
        Field(default=[6, 4, 2])
    )
    """Numbers of experts to keep in each layer; each gets a row of the table."""
    methods: Annotated[list[Method], Field(min_length=1)] = Field(
        default=["reap", "frequency", "merge", "random"]
    )
    """Methods that choose or merge experts; each gets a column of the table."""
    num_draws: int = Field(default=5, ge=1, le=MAX_COUNT)
    """Number of draws of the random method; the table shows their mean and standard deviation."""


def main(argv: Sequence[str]) -> int:
    flags, config = parse_flags(argv, PruningConfig, command("pruning"), _add_flags)
    if flags.source is None:
        raise ConfigError("--source FOLDER is required: a model or a run with experts")
    source = read_source(flags.source, "--source", trust_code=flags.trust_code)
    if not source.decoder.config.causal:
        raise ConfigError(
            f"--source: '{source.folder}' predicts masked tokens (model.causal: false), so its loss depends "
            "on the mask; use a run with causal: true"
        )
    data_config, data = config.prepared(source)
    ids_BS = config.ids(data_config, data)
    batches = validation_batches(data_config, data)

    def loss_of(decoder: Decoder) -> float:
        return evaluate(decoder, batches, data.tokenizer.byte_lengths).loss

    def losses_of(name: Method, num_experts: int) -> list[float]:
        """Return the loss with this number of experts, of each draw."""
        method = (
            MergeConfig(num_experts=num_experts)
            if name == "merge"
            else PruneConfig(num_experts=num_experts, by=name)
        )
        seeds = range(config.seed, config.seed + (config.num_draws if name == "random" else 1))
        generators = (torch.Generator().manual_seed(seed) for seed in seeds)
        return [loss_of(method.initialise([source.decoder], ids_BS, g)) for g in generators]

    losses: dict[int, dict[str, list[float]]] = {
        num_experts: {name: losses_of(name, num_experts) for name in config.methods}
        for num_experts in config.num_experts
    }
    source_loss = loss_of(source.decoder)
    stacks = [ffn.expert_stack for ffn in source.decoder.config.layer_ffns()]
    all_experts = max(stack.num_experts for stack in stacks if stack is not None)
    Console(highlight=False).print(_table(source_loss, all_experts, losses))
    if flags.json is not None:
        results = {"num_experts": all_experts, "loss": source_loss, "losses": losses}
        write_json(flags.json, results)
    return 0


def _add_flags(parser: Parser) -> None:
    parser.description = __doc__
    parser.add("--source FOLDER", "model folder or folder of a run", type=str)
    parser.add("--json FILE", "also write the losses to a JSON file", type=json_file)
    parser.add_trust()


def _table(
    source_loss: float, all_experts: int, losses: dict[int, dict[str, list[float]]]
) -> Table:
    title = f"validation loss, nats per token; {source_loss:.4f} with all {all_experts} experts"
    table = Table(title=title)
    for column in ("experts", "removed", *next(iter(losses.values()))):
        table.add_column(column, justify="right")
    for num_experts, by_method in losses.items():
        removed = f"{1 - num_experts / all_experts:.0%}"
        table.add_row(str(num_experts), removed, *map(_mean_and_deviation, by_method.values()))
    return table


def _mean_and_deviation(losses: list[float]) -> str:
    mean = f"{statistics.fmean(losses):.4f}"
    return mean if len(losses) == 1 else f"{mean} ± {statistics.stdev(losses):.4f}"
