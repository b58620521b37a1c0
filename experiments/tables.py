"""The tables that `experiments.train` prints."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

from rich.table import Table
from rich.text import Text
from torch import Tensor

from experiments.config import TrainConfig
from moe_ffn.data.prepare import PreparedData
from moe_ffn.ffn.config import FFNConfig
from moe_ffn.layer_names import short_name
from moe_ffn.sizes import linear_flops

MOST_EXPERT_COLUMNS = 8
"""More experts than this have no columns of their own: a terminal has 80."""


def model_table(config: TrainConfig, vocab_size: int) -> Table:
    """What will be trained: layers, FFN types, parameters, FLOPs and tokens per step."""
    model, seq_len = config.model, config.data.seq_len
    total = model.num_params(vocab_size, seq_len)
    active = model.num_active_params(vocab_size, seq_len)
    flops = model.flops_per_token(vocab_size, seq_len)
    batches = config.trainer.accumulate_grad_batches
    tokens = config.data.batch_size * seq_len * batches
    table = Table(title="Model", title_justify="left", show_header=True, box=None, pad_edge=False)
    table.add_column("part")
    table.add_column("what")
    for name in ("parameters", "active", "FLOPs/token"):
        table.add_column(name, justify="right")
    embeddings = vocab_size * model.d_model * (1 if model.tie_embeddings else 2)
    embeddings += 0 if model.causal else model.d_model  # of the mask
    tied = "tied" if model.tie_embeddings else "untied"
    output_flops = linear_flops(model.d_model, vocab_size)  # looking an embedding up costs none
    table.add_row(
        "embeddings, output",
        f"{vocab_size} x {model.d_model}, {tied}",
        *_counts(embeddings, embeddings, output_flops),
    )
    attention = model.attention.num_params(model.d_model)
    heads = f"{model.attention.num_heads} heads, {model.attention.kv_heads} key-value"
    attention_flops = model.attention.flops_per_token(model.d_model, seq_len, model.causal)
    table.add_row(
        f"attention x {model.num_layers}",
        heads,
        *_counts(
            model.num_layers * attention,
            model.num_layers * attention,
            model.num_layers * attention_flops,
        ),
    )
    for ffn, layers in _runs(model.layer_ffns()):
        table.add_row(
            f"ffn {_span(layers)}",
            ffn.describe(),
            *_counts(
                len(layers) * ffn.num_params(model.d_model),
                len(layers) * ffn.num_active_params(model.d_model),
                len(layers) * ffn.flops_per_token(model.d_model, seq_len),
            ),
        )
    rest = model.num_norm_params() + model.positions.num_params(model.d_model, seq_len)
    table.add_row(
        "norms, positions", f"{model.norm.type}, {model.positions.type}", *_counts(rest, rest, 0)
    )
    table.add_section()
    table.add_row("total", f"{tokens:,} tokens per step", *_counts(total, active, flops))
    return table


def describe_data(data: PreparedData) -> str:
    """One line: how much text, cut into how many tokens, and which text it was."""
    sizes = data.train_size, data.validation_size
    train, validation = (f"{_short(size.num_tokens)} tokens" for size in sizes)
    return (
        f"data: {train} to train on, {validation} to validate on, "
        f"vocabulary {data.tokenizer.vocab_size}\ncorpus sha256 {data.corpus_sha256[:12]}"
    )


def load_table(routing: Mapping[str, Mapping[str, Tensor]]) -> Table:
    """How the validation's tokens spread over the experts: percent of the pairs, layer by layer."""
    num_experts = max(len(values["load"]) for values in routing.values())
    in_columns = num_experts <= MOST_EXPERT_COLUMNS
    table = Table(
        title="Load of each expert on the validation split, percent of its pairs",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("layer", justify="right")
    for expert in range(num_experts if in_columns else 0):
        table.add_column(str(expert), justify="right")
    if not in_columns:
        table.add_column(f"experts 0 to {num_experts - 1}, in order")
    for name in ("MaxVio", "entropy", "dropped"):
        table.add_column(name, justify="right")
    for layer, values in routing.items():
        load = values["load"].tolist()
        cells = [_shade(share, 1 / len(load)) for share in load]
        if in_columns:
            cells += [Text("")] * (num_experts - len(load))
        else:
            cells = [Text(" ").join(cells)]
        table.add_row(
            short_name(layer),
            *cells,
            f"{values['max_violation'].item():.2f}",
            f"{values['entropy'].item():.2f}",
            f"{_percent(values['dropped_fraction'].item())}%",
        )
    return table


def _shade(share: float, fair: float) -> Text:
    """Green near the fair share, yellow beyond a factor 1.5 either way, red beyond 3."""
    ratio = max(share / fair, fair / share) if share > 0 else float("inf")
    style = "green" if ratio < 1.5 else "yellow" if ratio < 3 else "bold red"
    return Text(f"{_percent(share):>4}", style=style)


def _percent(share: float) -> str:
    """`<0.1` where there is something that would round to nothing."""
    text = f"{100 * share:.1f}"
    return "<0.1" if share > 0 and text == "0.0" else text


def _counts(total: int, active: int, flops: int) -> list[str]:
    return [_short(total), _short(active), _short(flops)]


def _short(count: float) -> str:
    for size, suffix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if count >= size:
            return f"{count / size:.2f}{suffix}"
    return f"{count:.0f}"


def _span(layers: list[int]) -> str:
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"


def _runs(ffns: list[FFNConfig]) -> list[tuple[FFNConfig, list[int]]]:
    """Neighbouring layers with the same block, together."""
    groups = groupby(enumerate(ffns), key=lambda item: item[1].to_dict())
    runs = [list(items) for _, items in groups]
    return [(items[0][1], [layer for layer, _ in items]) for items in runs]
