"""Evaluate a trained model on a text or on tasks of lm-eval. On a text: loss (in nats, as perplexity and in
bits per byte), and the routing of the sparse layers.

    moe-ffn evaluate runs/NAME [--data FILE] [--stride N] [--json FILE]
    moe-ffn evaluate runs/NAME [runs/OTHER ...] --k 1..8 [--html FILE]

The default text is the run's validation split, in the windows of its validations. The text of --data is read
whole, and each token except the first is predicted once. To evaluate on another validation split, name its
corpus (--data.corpus.type text --data.corpus.paths books) or a config that names it (--data config.yaml).

--k evaluates with other numbers of experts per token, and prints loss and cost of each.

    moe-ffn evaluate runs/TEACHER --store-answers FILE.safetensors [--top N]

--store-answers stores the likeliest next tokens at each position of the training split, as predicted by this
model. Other runs on the same text learn from the file: --objective.distill.teacher FILE.safetensors.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeGuard

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from moe_ffn.cli.command_line import parse_overrides
from moe_ffn.cli.parser import (
    Parser,
    json_file,
    page_file,
    whole,
    whole_number,
    whole_numbers,
    write_json,
    write_output,
)
from moe_ffn.config.base import Config
from moe_ffn.config.errors import ConfigError, command, install
from moe_ffn.config.numbers import number
from moe_ffn.config.option_tree import merge
from moe_ffn.config.yaml_files import read_yaml, validate
from moe_ffn.data.batches import Batch
from moe_ffn.data.prepare import DataConfig, PreparedData, prepare, validation_batches
from moe_ffn.ffn.base import short_name
from moe_ffn.metrics.load_summary import percent
from moe_ffn.metrics.table import LAYER_METRICS
from moe_ffn.report.tables import plain_table
from moe_ffn.runs.json_files import plain_values
from moe_ffn.runs.texts import prepare_data, tokens_of_path
from moe_ffn.training.distillation import ANSWERS_SUFFIX, StoredAnswers, digests_of, write_answers
from moe_ffn.training.evaluation import Evaluation, StridedBatches, evaluate, top_answers
from moe_ffn.training.objective import ObjectiveConfig
from moe_ffn.weights.open_model import OpenModel, open_model, sha256_of_weights
from moe_ffn.weights.pretrained import is_model_folder, naming_failures

_DATA_CONFIG_KEYS = ("corpus", "validation_percent", "validation_tokens", "cache_dir")
"""Options that `--data config.yaml` sets; tokenizer and window length come from the model."""


_EXAMPLES = {"--k": "--k, such as --k 1..8", "--store-answers": "--store-answers FILE"}


class _Options(Config, frozen=True):
    """Root of the dotted options."""

    data: DataConfig = DataConfig()


@contextmanager
def with_progress(what: str, batches: Iterable[Batch]) -> Iterator[Iterable[Batch]]:
    """Count the batches in a line of standard error, which disappears at the end; only on a terminal."""
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    options: Any = {"console": Console(stderr=True), "disable": not sys.stderr.isatty()}
    with Progress(*columns, transient=True, redirect_stdout=False, **options) as bars:
        yield bars.track(batches, description=what)


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog=command("evaluate"), description=__doc__)
    meaning = "folder of a run with a best checkpoint, or model folder; several with --k"
    parser.add("folders FOLDER", meaning, nargs="+")
    parser.add_trust()
    parser.add(
        "--data FILE",
        "text, folder of texts or file of tokens (.bin, .npy), read whole; or a config (.yaml); "
        "--data.seq_len, --data.batch_size and so on work as in training",
    )
    parser.add(
        "--stride N",
        "tokens between the starts of two windows, 1 to data.seq_len (default: data.seq_len); a smaller "
        "stride gives each token more context and takes longer",
        type=whole(1),
    )
    meaning = "tasks of lm-eval, separated by commas: names or folders of task files"
    parser.add("--tasks NAMES", meaning)
    parser.add(
        "--k NUMBERS",
        "experts per token to evaluate with, such as 1..8 or 1,2,4, in all layers whose router has a "
        "whole k",
        type=whole_numbers,
    )
    parser.add(
        "--k-at LAYERS=K",
        "with --k: another k for some layers, by Python slice: 0=4 or 1::2=1; may be repeated",
        action="append",
        default=[],
    )
    parser.add("--html FILE", "with --k: also draw loss over FLOPs per token", type=page_file)
    parser.add(
        "--store-answers FILE",
        "store the likeliest next tokens at each position of the training split in a .safetensors file, "
        "for objective.distill.teacher; windows overlap by half",
    )
    meaning = "with --store-answers: number of tokens to store at each position (16)"
    parser.add("--top N", meaning, type=whole(1))
    parser.add_device()
    parser.add("--json FILE", "also write the results to a JSON file", type=json_file)
    flags, dotted_options = _split(argv)
    args = parser.parse_args(flags)
    overrides = parse_overrides(dotted_options).get("data", {})
    if args.tasks is not None and importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(f"--tasks: lm-eval is not installed: {install('eval')}")
    _check_together(args)
    console = Console(highlight=False)
    if args.store_answers is not None:
        model, config = _read(args, args.folders[0], overrides)
        results = _store_answers(args.store_answers, args.top or 16, model, config)
        console.print(f"written: {args.store_answers}, {results['positions']:,} positions")
    elif args.k is None:
        model, config = _read(args, args.folders[0], overrides)
        results = _evaluate_once(args, model, config, "corpus" in overrides, console)
    else:
        models = [_read(args, folder, overrides) for folder in args.folders]
        results = _evaluate_each_k(args, models, console)
    if args.json is not None:
        write_json(args.json, plain_values(results))
    return 0


def _check_together(args: Any) -> None:
    """Raise ConfigError for options that exclude or need each other."""

    def given(option: str) -> bool:
        return getattr(args, option[2:].replace("-", "_")) not in (None, [])

    for option, other in {"--k-at": "--k", "--html": "--k", "--top": "--store-answers"}.items():
        if given(option) and not given(other):
            raise ConfigError(
                f"{option}: needs {other}; add {_EXAMPLES[other]}, or leave {option} out"
            )
    if args.store_answers is not None and args.data is not None and not is_config(args.data):
        raise ConfigError(
            f"--data: --store-answers reads a training split, which '{args.data}' does not have; give a "
            "config (.yaml) that names a corpus, or --data.corpus"
        )
    for option in ("--k", "--tasks", "--stride"):
        if args.store_answers is not None and given(option):
            raise ConfigError(
                f"{option}: cannot be used with --store-answers, which reads a training split; leave one of "
                "them out"
            )
    if args.k is not None and args.tasks is not None:
        raise ConfigError("--tasks: cannot be used with --k; leave one of them out")
    if args.k is None and len(args.folders) > 1:
        raise ConfigError(
            f"'{args.folders[1]}' is a second folder, which needs --k; evaluate one at a time, or give --k"
        )


def _read(args: Any, folder: Path, overrides: Mapping[str, Any]) -> tuple[OpenModel, DataConfig]:
    names_text = args.data is not None or "corpus" in overrides or args.tasks is not None
    if is_model_folder(folder) and not names_text:  # before a large model is read
        which = "--data" if args.store_answers is None else "--data.corpus or --data config.yaml"
        raise ConfigError(
            f"'{folder}' is a model folder, which does not name a text; give one with {which}"
        )
    model = open_model(folder, trust_code=args.trust_code)
    if model.run is None and not model.decoder.config.causal:
        raise ConfigError(
            f"'{folder}' has model.causal (false), but no masked fraction (objective.masked_fraction); give "
            "the run that it comes from"
        )
    dtypes = {"bf16-true": torch.bfloat16, "16-true": torch.float16}  # of a run, stored as float32
    model.decoder.to(args.device, None if model.run is None else dtypes.get(model.precision))
    return model, data_config(model, args.data, overrides)


def _evaluate_once(
    args: Any, model: OpenModel, config: DataConfig, names_corpus: bool, console: Console
) -> dict[str, Any]:
    """Print loss and routing on a text, or the results of tasks; return them for JSON."""
    results: dict[str, Any] = {"model": str(model.folder)}
    if args.data is not None or names_corpus or args.tasks is None:
        description, batches = windows_of_text(model, config, args.data, args.stride)
        evaluation = evaluate_model(model, batches)
        print_evaluation(console, f"{description}; {setting_of(model)}", evaluation)
        results |= {"data": description, "precision": model.precision, **evaluation.to_dict()}
    if args.tasks is not None:
        from moe_ffn.interop.lm_eval import HarnessModel, evaluate_tasks

        harness = HarnessModel(model.decoder, model.tokenizer, config.batch_size)
        results["tasks"] = evaluate_tasks(harness, args.tasks.split(","))
        console.print(task_table(results["tasks"]))
    return results


def _store_answers(path: Path, top: int, model: OpenModel, config: DataConfig) -> dict[str, Any]:
    """Write a model's predictions on the training split; return their number and source for JSON."""
    vocab_size = model.decoder.embedding.num_embeddings
    if path.suffix != ANSWERS_SUFFIX:
        raise ConfigError(
            f"--store-answers: '{path}' must end in {ANSWERS_SUFFIX}, by which objective.distill.teacher "
            "recognises it; rename it"
        )
    if path.exists():
        try:
            StoredAnswers(path, "--store-answers")
        except ConfigError as error:
            raise ConfigError(
                f"--store-answers: '{path}' exists and is not a file of stored answers; choose another name"
            ) from error
    if top > vocab_size:
        raise ConfigError(
            f"--top ({top}) must not exceed the {vocab_size} tokens of '{model.folder}'; lower it"
        )
    if not model.decoder.config.causal:
        raise ConfigError(
            f"--store-answers: '{model.folder}' predicts masked tokens (model.causal: false), which differ "
            "in every batch; use its folder as the teacher"
        )
    data = _data_of(model, config)
    about = {
        "teacher": sha256_of_weights(model.decoder),
        **digests_of(model.tokenizer, data.train),
        "seq_len": str(config.seq_len),
        "top": str(top),
        "precision": model.precision,
    }
    stride = max(1, config.seq_len // 2)
    batches = StridedBatches(data.train, config.seq_len, stride, config.batch_size)
    with (
        with_progress("predicting", batches) as shown,
        naming_failures(path, "written", "make room, or fix its permissions"),
    ):
        answers = top_answers(model.decoder, shown, top, model.precision)
        write_answers(path, len(data.train) - 1, top, about, answers)
    return {"answers": str(path), "positions": len(data.train) - 1, **about}


def _data_of(model: OpenModel, config: DataConfig) -> PreparedData:
    if model.run is not None and _is_same_text(config, model.run.config.data):
        return prepare_data(model.run, "give a text with --data", config)
    return prepare(config)


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split off `--data.KEY VALUE`, since argparse would read the value as the folder."""
    flags: list[str] = []
    dotted_options: list[str] = []
    remaining = list(argv)
    while remaining:
        argument = remaining.pop(0)
        if not argument.startswith("--data."):
            flags.append(argument)
            continue
        dotted_options.append(argument)
        if "=" not in argument and remaining and not remaining[0].startswith("--"):
            dotted_options.append(remaining.pop(0))
    return flags, dotted_options


# -- the model


def evaluate_model(model: OpenModel, batches: Iterable[Batch]) -> Evaluation:
    objective = ObjectiveConfig() if model.run is None else model.run.config.objective
    with with_progress("evaluating", batches) as shown:
        return evaluate(
            model.decoder,
            shown,
            model.tokenizer.byte_lengths,
            masked_fraction=objective.masked_fraction,
            precision=model.precision,
        )


def setting_of(model: OpenModel) -> str:
    """Return the precision and the device, such as `32-true on cpu`."""
    return f"{model.precision} on {model.decoder.embedding.weight.device}"


# -- the text


def data_config(model: OpenModel, path: Path | None, overrides: Mapping[str, Any]) -> DataConfig:
    """Return the data options of the run, updated by the config at `path` and then by `overrides`."""
    if "tokenizer" in overrides:
        raise ConfigError("--data.tokenizer: comes from the model; leave it out")
    if path is not None and "corpus" in overrides:
        raise ConfigError("--data and --data.corpus name two texts; give only one of them")
    seq_len = model.decoder.max_seq_len
    options: dict[str, Any] = (
        {"seq_len": seq_len} if model.run is None else model.run.config.data.to_dict()
    )
    if is_config(path):
        section = read_yaml(path, where=f"--data {path}").get("data", {})
        other = validate(_Options, {"data": section}).data.to_dict()
        options |= {key: other[key] for key in _DATA_CONFIG_KEYS}
    config = validate(_Options, {"data": merge(options, overrides)}).data
    if config.seq_len > seq_len:
        raise ConfigError(
            f"data.seq_len ({config.seq_len}) must not exceed the model's {seq_len} tokens; lower it"
        )
    if model.run is not None and _is_same_text(config, model.run.config.data):
        return config
    return config.model_copy(update={"tokenizer": model.tokenizer_config})


def is_config(path: Path | None) -> TypeGuard[Path]:
    return path is not None and path.suffix in (".yaml", ".yml")


def _is_same_text(one: DataConfig, other: DataConfig) -> bool:
    return (one.corpus, one.validation_percent) == (other.corpus, other.validation_percent)


def windows_of_text(
    model: OpenModel, config: DataConfig, path: Path | None, stride: int | None
) -> tuple[str, Iterable[Batch]]:
    """Return a description and the windows of the text in `path`, or of the validation split of the corpus.

    Raises ConfigError if the text cannot be read or is too short, or the model does not support the windows.
    """
    step = config.seq_len if stride is None else stride
    if step > config.seq_len:
        raise ConfigError(f"--stride ({step}) must not exceed data.seq_len ({config.seq_len})")
    if stride is not None and not model.decoder.config.causal:
        raise ConfigError(
            "--stride: cannot be used with a model that predicts masked tokens (model.causal: false); leave "
            "it out"
        )
    if path is not None and not is_config(path):
        tokens, description = tokens_of_path(path, model.tokenizer, "--data"), f"{path}"
    else:
        data = _data_of(model, config)
        description = "validation split"
        if stride is None:
            description += f", at most {config.validation_tokens:,} tokens, as in training"
            return description, validation_batches(config, data)
        tokens = data.validation[:]
    length = min(config.seq_len, len(tokens) - 1)
    description += f", windows of {length} tokens, stride {min(step, length)}"
    return description, StridedBatches(tokens, config.seq_len, step, config.batch_size)


# -- output


def print_evaluation(console: Console, title: str, evaluation: Evaluation) -> None:
    console.print(
        f"{title}\n"
        f"loss           {evaluation.loss:.4f} nats per token\n"
        f"perplexity     {number(evaluation.perplexity, '.4g')}\n"
        f"bits per byte  {evaluation.bits_per_byte:.4f}\n"
        f"predicted      {evaluation.num_tokens:,} tokens, {evaluation.num_bytes:,} bytes of text",
        markup=False,
        soft_wrap=True,
    )
    if evaluation.routing:
        console.print()
        console.print(routing_table(evaluation.routing))


def routing_table(routing: Mapping[str, Mapping[str, Tensor]]) -> Table:
    """Return a table with a row per sparse layer; a cell is empty if the layer does not have the value."""
    used = LAYER_METRICS["experts_used"]
    columns: dict[str, Callable[[Mapping[str, Tensor]], str]] = {
        "experts": lambda values: str(len(values["load"])),
        "load entropy": lambda values: f"{values['load_entropy']:.3f}",
        LAYER_METRICS["max_violation"].label: lambda values: f"{values['max_violation']:.2f}",
        LAYER_METRICS["dropped_fraction"].label: lambda values: (
            f"{percent(values['dropped_fraction'].item())}%"
        ),
        LAYER_METRICS["entropy"].label: lambda values: f"{values['entropy']:.2f}",
        "dead experts": lambda values: str(int((values["load"] == 0).sum())),
        f"{used.label} (of a batch)": lambda values: f"{values[used.key]:{used.form}}",
    }
    if not any(used.key in values for values in routing.values()):
        columns.popitem()
    table = plain_table(["layer", *columns], num_texts=0)
    for layer, values in routing.items():
        cells = [""] * len(columns)
        for index, format_cell in enumerate(columns.values()):
            with suppress(KeyError):
                cells[index] = format_cell(values)
        table.add_row(short_name(layer), *cells)
    return table


# -- other numbers of experts per token


def _evaluate_each_k(
    args: Any, models: Sequence[tuple[OpenModel, DataConfig]], console: Console
) -> dict[str, Any]:
    """Evaluate every model with every k; print a table, write the page, and return the results for JSON."""
    k_at = dict(map(_layers_and_k, args.k_at))
    for model, _ in models:  # before the first evaluation
        try:
            for k in args.k:
                model.decoder.config.with_k({":": k, **k_at}, "--k-at" if k_at else "--k")
        except ValueError as error:
            raise ConfigError(f"'{model.folder}': {error}") from error
    results: dict[str, Any] = {"models": {}}
    for model, config in models:
        description, batches = windows_of_text(model, config, args.data, args.stride)
        windows = list(batches)
        console.print(
            f"{model.folder}: {description}; {setting_of(model)}", markup=False, soft_wrap=True
        )
        table = plain_table(["k", "loss", "perplexity", "FLOPs per token"], num_texts=0)
        points: list[dict[str, Any]] = []
        for k in args.k:
            decoder = model.decoder
            decoder.set_k({":": k, **k_at})
            evaluation = evaluate_model(model, windows)
            sizes = decoder.embedding.num_embeddings, config.seq_len
            flops = decoder.config.flops_per_token(*sizes)
            points.append({"k": k, "flops_per_token": flops, **evaluation.to_dict()})
            perplexity = number(evaluation.perplexity, ".4g")
            table.add_row(f"{k}", f"{evaluation.loss:.4f}", perplexity, f"{flops:,}")
        console.print(table)
        results["models"][str(model.folder)] = {"data": description, "k": points}
    if args.html is not None:
        write_output("--html", args.html, _page_of_curves(results["models"]))
    return results | {"k_at": k_at}


def _layers_and_k(text: str) -> tuple[str, int]:
    """Parse `1::2=4`."""
    layers, _, k = text.rpartition("=")
    parsed = whole_number(k, 1)
    if parsed is None or not layers:
        raise ConfigError(f"--k-at: must be LAYERS=K, such as 0=4 or 1::2=1, got '{text}'")
    return layers, parsed


def _page_of_curves(models: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a page with the loss of each model over the FLOPs per token."""
    # Imported here, since the tables do not need plotly.
    from moe_ffn.report.plots import figures_page
    from moe_ffn.report.studies.arm_figures import SizedLine, over_sizes

    lines: list[SizedLine] = []
    for folder, model in models.items():
        losses = {point["flops_per_token"]: [point["loss"]] for point in model["k"]}
        names = {point["flops_per_token"]: f"k = {point['k']}" for point in model["k"]}
        lines.append(SizedLine(folder, losses, labels={} if lines else names))
    title = "Loss by experts per token"
    figure: Any = over_sizes(lines, "forward FLOPs per token", title)
    figure.update_layout(meta={**figure.layout.meta, "note": "A line is a model, a point one k."})
    return figures_page("Experts per token in evaluation", [figure])


# -- tasks of lm-eval


def task_table(tasks: Mapping[str, Mapping[str, float]]) -> Table:
    """Return a table with a row per metric of each task, with lm-eval's standard error."""
    table = plain_table(["task", "metric", "value", "standard error"], num_texts=2)
    for task, values in tasks.items():
        for key, value in values.items():
            if "_stderr" not in key:
                name, comma, filter_name = key.partition(",")
                error = values.get(f"{name}_stderr{comma}{filter_name}")
                table.add_row(task, key, f"{value:.4f}", "" if error is None else f"{error:.4f}")
    return table
