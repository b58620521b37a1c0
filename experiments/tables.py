"""The tables that `experiments.train` prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from experiments.config import TrainConfig
from moe_ffn.data.prepare import PreparedData
from moe_ffn.ffn import FFNConfig
from moe_ffn.layer_names import short_name
from moe_ffn.load_summary import percent, percent_digits, summarize_load
from moe_ffn.sizes import linear_flops


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


def load_table(routing: Mapping[str, Mapping[str, Tensor]], width: int = 80) -> Table:
    """How the validation's tokens spread over the experts: percent of the pairs, layer by layer.

    Where `width` has no room for every expert: the busiest, the median, the idlest, and how many had no
    token.
    """
    whole = _every_expert(routing)
    fits = Console(width=_UNBOUNDED).measure(whole).maximum <= width
    return whole if fits else _extremes(routing)


_UNBOUNDED = 1_000_000


def _every_expert(routing: Mapping[str, Mapping[str, Tensor]]) -> Table:
    num_experts = max(len(values["load"]) for values in routing.values())
    table = _load_table(map(str, range(num_experts)))
    for layer, values in routing.items():
        load = values["load"].tolist()
        cells = [_shade(share, len(load)) for share in load]
        cells += [Text("")] * (num_experts - len(load))
        table.add_row(short_name(layer), *cells, *_ends(values))
    return table


def _extremes(routing: Mapping[str, Mapping[str, Tensor]]) -> Table:
    table = _load_table(("experts", "busiest", "median", "idlest", "unused"))
    for layer, values in routing.items():
        load = values["load"].tolist()
        summary = summarize_load(load)
        if summary is None:
            cells = [Text("-")] * 4
        else:
            busiest = Text(f"#{summary.busiest} ") + _shade(summary.highest, len(load))
            unused = Text(str(len(summary.unused)), style="bold red" if summary.unused else "")
            others = [_shade(share, len(load)) for share in (summary.median, summary.lowest)]
            cells = [busiest, *others, unused]
        table.add_row(short_name(layer), str(len(load)), *cells, *_ends(values))
    return table


def _load_table(columns: Iterable[str]) -> Table:
    table = Table(
        title="Load of each expert on the validation split, percent of its pairs",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for name in ("layer", *columns, "MaxVio", "entropy", "dropped"):
        table.add_column(name, justify="right")
    return table


def _ends(values: Mapping[str, Tensor]) -> list[str]:
    return [
        f"{values['max_violation'].item():.2f}",
        f"{values['entropy'].item():.2f}",
        f"{percent(values['dropped_fraction'].item())}%",
    ]


MAX_NAMED_EXPERTS = 6


def expert_use(routing: Mapping[str, Mapping[str, Tensor]]) -> str:
    """Which experts had no token on the validation split, a line for each layer that has such experts; a
    layer whose load was not measured is named as that.
    """
    lines: list[str] = []
    for layer, values in routing.items():
        load = values["load"].tolist()
        summary = summarize_load(load)
        if summary is None:
            lines.append(f"  layer {short_name(layer)}: not measured")
        elif summary.unused:
            named = [str(expert) for expert in summary.unused[:MAX_NAMED_EXPERTS]]
            rest = ["..."] if len(summary.unused) > len(named) else []
            count = f"{len(summary.unused)} of {len(load)}"
            lines.append(f"  layer {short_name(layer)}: {count} ({', '.join([*named, *rest])})")
    if lines:
        return "\n".join(["experts without a token on the validation split", *lines])
    return "every expert is used on the validation split" if routing else ""


def _shade(share: float, num_experts: int) -> Text:
    """Green near the even share, yellow beyond a factor 1.5 either way, red beyond 3."""
    ratio = share * num_experts
    ratio = max(ratio, 1 / ratio) if ratio > 0 else float("inf")
    style = "green" if ratio < 1.5 else "yellow" if ratio < 3 else "bold red"
    return Text(f"{percent(share, percent_digits(num_experts)):>4}", style=style)


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
