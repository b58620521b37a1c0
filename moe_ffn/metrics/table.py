"""Tables of all metrics, with the key, definition, healthy values and computation of each.

Rows, wandb, the report, the dashboard, the results at the end of a run and docs/reference/metrics.md read
these tables. A new routing metric needs an entry in `LAYER_METRICS`, and usually a function in
`metrics.functional`.

T tokens, E experts, B sequences
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from moe_ffn.balancing.losses import load_balancing_loss, router_z_loss
from moe_ffn.balancing.pairs_only import entropy_from_pairs, num_used, usage_kl
from moe_ffn.balancing.sums import token_entropy
from moe_ffn.metrics.functional import (
    churn,
    coactivation,
    load_cv,
    logit_max,
    max_violation,
    nonfinite_tokens,
    top1_margin,
)
from moe_ffn.metrics.measures import (
    CHOSEN_TOGETHER,
    DROPPED,
    NUM_PAIRS,
    PAIRS,
    SEQUENCES,
    TOKENS,
    TOTAL_CAPACITY,
    Measure,
    RowEnd,
    Statistic,
    averaged,
    capacity_used,
    count_of,
    entropy_of_mean,
    load_from_counts,
    of_choices,
    per_token,
    row_rank_violation,
    shared_share_times_tokens,
)

Measured = Literal["every batch", "last step", "validation", "row", "probe"]

WHERE: dict[Measured, str] = {
    "every batch": "T V",
    "last step": "L V",
    "validation": "V",
    "row": "T",
    "probe": "P",
}
"""Batches that a metric of a sparse layer covers: all training steps (T), the last step of a row (L), a probe
batch (P), validation (V). Cheap metrics cover every batch. Per-token metrics would cost several percent of a
small model's step on every batch, so they cover only the last step of a row."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Key, presentation, healthy values and computation of a metric."""

    key: str
    """Last part of the name in rows: `routing/layer_03/KEY` of a sparse layer, `train/KEY` of the model."""
    title: str
    quantity: str = ""
    """Title of an axis, without the unit."""
    unit: str = ""
    """Unit of the logged value; pages show shares in percent."""
    formula: str
    """Definition in one line of Markdown: E experts, k experts per token, p a token's normalised scores."""
    healthy: str
    healthy_range: tuple[float, float] | None = None
    """Lowest and highest healthy value; None if no range holds for every run."""
    source: str = ""
    """Link to the source, in Markdown."""
    requires: str = ""
    """Part that a layer or run needs to have this metric; empty if every layer has it."""
    per: Literal["layer", "expert", "pair"] = "layer"
    """Number of values: one per sparse layer, per expert, or per pair of experts."""
    measured: Measured = "last step"
    """Batches that a metric of a sparse layer covers, see `WHERE`."""
    rows: tuple[Literal["train", "validation"], ...] = ()
    """Rows that contain a metric of the whole model."""
    measure: Measure | None = None
    """Its computation from routings with tables; None for a metric of the model or with a `row_end`."""
    pairs_only_measure: Measure | None = None
    """Its computation from a `PairsOnlyRouting`; None if it has none."""
    row_end: Callable[[RowEnd], Tensor | None] | None = None
    """Its computation at the end of a row; returns None if the metric does not apply to the layer."""
    label: str = ""
    """Short name in a line or table of results."""

    @property
    def is_share(self) -> bool:
        return self.unit == "share"

    @property
    def form(self) -> str:
        """Python format of a value in a table of results."""
        return {"share": ".1%", "count": "g"}.get(self.unit, ".2f")

    @property
    def sentence(self) -> str:
        """The formula as plain text."""
        text = self.formula.replace("`", "")
        return f"{text[0].upper()}{text[1:]}."

    def axis(self, unit: str | None = None) -> str:
        """Return the title of an axis, in the unit of the metric or another one."""
        unit = self.unit if unit is None else unit
        return f"{self.quantity} ({unit})" if self.quantity and unit else self.quantity or unit


def _table(*metrics: Metric) -> dict[str, Metric]:
    return {metric.key: metric for metric in metrics}


PAIRS_ONLY = "a router that lists pairs (`product_key`)"


def _for_both(measure: Measure) -> dict[str, Any]:
    """Return the options of a metric with the same computation for both kinds of routing."""
    return {"measure": measure, "pairs_only_measure": measure}


def _value_of(statistic: Statistic) -> Measure:
    return Measure(torch.clone, (statistic,))


LAYER_METRICS = _table(
    Metric(
        key="load",
        title="Load",
        unit="share",
        per="expert",
        formula="each expert's share of the (token, expert) pairs, before dropping",
        healthy="1 / E each",
        measured="every batch",
        measure=Measure(load_from_counts, (PAIRS,)),
    ),
    Metric(
        key="max_violation",
        title="MaxVio",
        quantity="MaxVio",
        unit="dimensionless",
        formula="the busiest expert over the even share, minus 1",
        healthy="0 at perfect balance; healthy below 1; at most E / k - 1",
        healthy_range=(0, 1),
        source="[2024](https://arxiv.org/abs/2408.15664)",
        measured="every batch",
        measure=of_choices(lambda pairs_E: max_violation(load_from_counts(pairs_E))),
        label="MaxVio",
    ),
    Metric(
        key="load_cv",
        title="Variation of the load",
        quantity="CV",
        unit="dimensionless",
        formula="standard deviation of the experts' loads over their mean",
        healthy="near 0; at most sqrt(E / k - 1)",
        measured="every batch",
        measure=of_choices(lambda pairs_E: load_cv(load_from_counts(pairs_E))),
    ),
    Metric(
        key="dropped_fraction",
        title="Dropped",
        quantity="dropped pairs",
        unit="share",
        formula="share of the (token, expert) pairs whose expert was full",
        healthy="0 to 0.1",
        healthy_range=(0, 0.1),
        measured="every batch",
        measure=Measure(
            lambda pairs_E, num_dropped: num_dropped / pairs_E.sum().clamp(min=1), (PAIRS, DROPPED)
        ),
        pairs_only_measure=Measure(
            lambda num_pairs, num_dropped: num_dropped / num_pairs.clamp(min=1),
            (NUM_PAIRS, DROPPED),
        ),
        label="dropped",
    ),
    Metric(
        key="entropy",
        title="Entropy per token",
        quantity="entropy",
        unit="nats",
        formula="entropy of p, the router's distribution over experts, mean over tokens: low if the "
        "router is sure",
        healthy="falls from log E as the router decides",
        measure=averaged("entropies", lambda b: token_entropy(b.scores_TE).sum()),
        pairs_only_measure=per_token("entropies", entropy_from_pairs),
        label="entropy",
    ),
    Metric(
        key="entropy_of_mean",
        title="Entropy of the mean",
        quantity="entropy",
        unit="nats",
        formula="entropy of the mean of p over all tokens",
        healthy="log E: together, the tokens use all experts",
        measure=Measure(
            entropy_of_mean, (Statistic("scores_E", lambda b: b.scores_TE.sum(dim=0), "E"),)
        ),
    ),
    Metric(
        key="dead_experts",
        title="Dead experts",
        quantity="dead experts",
        unit="count",
        formula="experts without a token for `logging.alarms.after_steps` steps",
        healthy="0",
        healthy_range=(0, 0),
        measured="row",
        row_end=lambda row: (row.idle_steps_E >= row.dead_after_steps).sum(),
        label="dead experts",
    ),
    Metric(
        key="churn",
        title="Churn",
        quantity="changed tokens",
        unit="share",
        formula="share of the probe batch's tokens whose experts changed since the previous probe, at least "
        "`logging.churn_every_n_steps` steps earlier",
        healthy="falls towards 0; the unchanged share is called saturation",
        source="[OLMoE](https://arxiv.org/abs/2409.02060)",
        measured="probe",
        row_end=lambda row: None if row.probe_choices is None else churn(*row.probe_choices),
    ),
    Metric(
        key="logit_max",
        title="Largest router logit",
        quantity="largest absolute logit",
        unit="dimensionless",
        formula="largest absolute router logit",
        healthy="below about 20; unbounded growth precedes instability",
        healthy_range=(0, 20),
        **_for_both(
            _value_of(Statistic("logit_max", lambda b: logit_max(b.routing), reduce="max"))
        ),
    ),
    Metric(
        key="top1_margin",
        title="Top-1 margin",
        quantity="margin",
        unit="dimensionless",
        formula="best minus second best of a token's normalised scores, mean over tokens",
        healthy="grows from 0 as the router decides",
        requires="at least two experts",
        measure=averaged("top1_margins", lambda b: top1_margin(b.scores_TE).sum()),
    ),
    Metric(
        key="shared_share",
        title="Shared share",
        quantity="norm share",
        unit="share",
        formula="norm of the shared expert's output over the sum of both norms, mean over tokens",
        healthy="neither 0 nor 1",
        requires="a shared expert",
        **_for_both(averaged("shared_shares", shared_share_times_tokens)),
    ),
    Metric(
        key="capacity_used",
        title="Capacity used",
        quantity="capacity used",
        unit="share",
        formula="computed pairs / (num_experts * expert capacity)",
        healthy="near 1 / capacity factor",
        requires="a capacity",
        measured="every batch",
        measure=of_choices(capacity_used, DROPPED, TOTAL_CAPACITY),
        pairs_only_measure=Measure(capacity_used, (NUM_PAIRS, DROPPED, TOTAL_CAPACITY)),
    ),
    Metric(
        key="experts_per_token",
        title="Experts per token",
        unit="experts per token",
        formula="mean over tokens, before dropping",
        healthy="k; for top-p and ReLU routers, their target",
        measured="every batch",
        measure=Measure(lambda pairs_E, num: pairs_E.sum() / num.clamp(min=1), (PAIRS, TOKENS)),
        pairs_only_measure=Measure(
            lambda num_pairs, num: num_pairs / num.clamp(min=1), (NUM_PAIRS, TOKENS)
        ),
        label="experts",
    ),
    Metric(
        key="sequence_max_violation",
        title="MaxVio within sequences",
        quantity="MaxVio",
        unit="dimensionless",
        formula="MaxVio of each sequence, mean over sequences",
        healthy="higher than MaxVio if experts specialise by text",
        measure=averaged(
            "sequence_violations",
            lambda b: max_violation(b.pairs_BE.float()).clamp(min=0).sum(),
            count=SEQUENCES,
        ),
    ),
    Metric(
        key="rank_max_violation",
        title="MaxVio over ranks",
        quantity="MaxVio",
        unit="dimensionless",
        formula="MaxVio over ranks; the load of a rank is the sum over its experts, which are split in order",
        healthy="near 0; with expert parallelism, the experts take 1 + this times as long",
        requires="several ranks",
        measured="row",
        row_end=row_rank_violation,
    ),
    Metric(
        key="coactivation",
        title="Co-activation",
        quantity="tokens of expert i that also went to j",
        unit="share",
        per="pair",
        formula="share of expert i's tokens that also chose expert j, a matrix; only in `summary.json`, "
        "up to 64 experts",
        healthy="even off the diagonal",
        measured="validation",
        measure=Measure(coactivation, (CHOSEN_TOGETHER,)),
    ),
    Metric(
        key="coactivation_max",
        title="Strongest pair of experts",
        quantity="co-activation",
        unit="share",
        formula="largest share of an expert's tokens that also chose one other expert",
        healthy="below 1: two experts that are always chosen together act as one",
        measured="validation",
        measure=Measure(
            lambda counts_EE: coactivation(counts_EE).fill_diagonal_(0).max(), (CHOSEN_TOGETHER,)
        ),
    ),
    Metric(
        key="bias_spread",
        title="Spread of the correction bias",
        quantity="bias range",
        formula="largest minus smallest correction bias of the experts",
        healthy="settles",
        requires="a correction bias",
        measured="row",
        row_end=lambda row: None if row.bias_E is None else row.bias_E.max() - row.bias_E.min(),
    ),
    Metric(
        key="load_balance",
        title="Load-balancing loss",
        quantity="loss",
        unit="dimensionless",
        formula="Switch loss of the layer before its weight, computed for each batch and rank",
        healthy="1",
        **_for_both(per_token("load_balance", load_balancing_loss)),
    ),
    Metric(
        key="router_z",
        title="Router z-loss",
        quantity="loss",
        unit="dimensionless",
        formula="mean of logsumexp(logits)² before its weight",
        healthy="does not grow",
        source="[2022](https://arxiv.org/abs/2202.08906)",
        **_for_both(per_token("router_z", router_z_loss)),
    ),
    Metric(
        key="nonfinite_tokens",
        title="Tokens with non-finite logits",
        quantity="tokens",
        unit="count",
        formula="tokens with a NaN or infinite router logit",
        healthy="0",
        healthy_range=(0, 0),
        measured="every batch",
        **_for_both(_value_of(count_of("num_nonfinite", lambda b: nonfinite_tokens(b.routing)))),
    ),
    Metric(
        key="experts_used",
        title="Experts used",
        quantity="experts used",
        unit="share",
        formula="share of the experts that some token of a batch chose, mean over batches",
        healthy="near min(1, pairs / E)",
        source="[2019](https://arxiv.org/abs/1907.05242)",
        requires=PAIRS_ONLY,
        pairs_only_measure=per_token("experts_used", lambda r: num_used(r) / r.num_experts),
        label="experts used",
    ),
    Metric(
        key="usage_kl",
        title="Divergence from uniform usage",
        quantity="KL divergence",
        unit="nats",
        formula="KL divergence of the experts' shares of a batch's weights from 1 / E, mean over batches",
        healthy="small compared with log E; at least log(E / pairs) if pairs are fewer than experts",
        source="[2019](https://arxiv.org/abs/1907.05242)",
        requires=PAIRS_ONLY,
        pairs_only_measure=per_token("usage_kl", usage_kl),
    ),
)
"""Metrics of each sparse layer, in the order of the pages."""

RUN_METRICS = _table(
    Metric(
        key="loss",
        title="Loss",
        quantity="loss",
        unit="nats per token",
        formula="cross-entropy of the tokens to predict; in training, the mean over steps not skipped",
        healthy="below that of the unigram model, and falling",
        rows=("train", "validation"),
        label="validation loss",
    ),
    Metric(
        key="bits_per_byte",
        title="Bits per byte",
        unit="bits per byte",
        formula="loss in bits per byte of predicted text, which compares tokenizers",
        healthy="falls",
        rows=("validation",),
    ),
    Metric(
        key="tokens",
        title="Tokens read",
        quantity="tokens",
        unit="count",
        formula="tokens of all steps so far, all ranks together: the step times `data.batch_size` times "
        "`data.seq_len` times `trainer.accumulate_grad_batches`",
        healthy="grows with the step; an axis for the other metrics",
        rows=("train",),
    ),
    Metric(
        key="tokens_per_second",
        title="Throughput",
        unit="tokens per second",
        formula="tokens of the row over its seconds without validation, all ranks together",
        healthy="steady",
        rows=("train",),
    ),
    Metric(
        key="learning_rate",
        title="Learning rate",
        quantity="learning rate",
        formula="learning rate of the optimizer at the row's last step",
        healthy="follows the schedule",
        rows=("train",),
    ),
    Metric(
        key="gradient_norm",
        title="Gradient norm",
        quantity="gradient norm",
        unit="L2",
        formula="norm of all gradients before clipping, at the row's last step",
        healthy="settles",
        rows=("train",),
    ),
    Metric(
        key="coupling",
        title="Expert-router coupling",
        quantity="loss, before its weight",
        formula="mean over layers and pairs of experts of relu(M_ij - alpha M_ii) + relu(M_ji - alpha M_ii), "
        "M_ij the norm of expert j's response to row i of the router; at the row's last step",
        healthy="near 0; falls within the first steps",
        source="[Lv 2025](https://arxiv.org/abs/2512.23447)",
        rows=("train",),
    ),
    Metric(
        key="objective",
        title="Objective",
        quantity="objective",
        unit="nats per token",
        formula="loss (averaged with a teacher's, if any) plus weighted balancing losses",
        healthy="falls with the loss",
        rows=("train",),
    ),
    Metric(
        key="distillation",
        title="Distillation loss",
        quantity="KL divergence",
        unit="nats per token",
        formula="temperature^2 * KL(teacher, model), a term of the objective of a run with a teacher",
        healthy="falls",
        rows=("train",),
    ),
    Metric(
        key="skipped_steps",
        title="Skipped steps",
        quantity="optimizer steps",
        unit="count",
        formula="optimizer steps of the row that were skipped",
        healthy="0",
        healthy_range=(0, 0),
        rows=("train",),
    ),
)
"""Metrics of the whole model. Rows also have `train/NAME` for each loss of `BALANCING_LOSSES`."""


def metrics_per_layer() -> list[Metric]:
    """Return the metrics with one value per layer."""
    return [metric for metric in LAYER_METRICS.values() if metric.per == "layer"]


def result_columns() -> list[Metric]:
    """Return the columns of the results table of layers, which are also the validation panels of wandb."""
    return [LAYER_METRICS[key] for key in ("max_violation", "entropy", "dropped_fraction")]


def measured_in(*measured: Measured, is_pairs_only: bool = False) -> list[Metric]:
    """Return the layer metrics that cover these batches, with the `measure` of the kind of routing."""
    metrics = [metric for metric in LAYER_METRICS.values() if metric.measured in measured]
    if is_pairs_only:
        metrics = [replace(metric, measure=metric.pairs_only_measure) for metric in metrics]
    return [metric for metric in metrics if metric.measure is not None]


def statistics_of(metrics: Iterable[Metric]) -> list[Statistic]:
    """Return the statistics that these metrics need, each once."""
    measures = [metric.measure for metric in metrics if metric.measure is not None]
    return list(dict.fromkeys(s for measure in measures for s in measure.statistics))


def compute(metrics: Iterable[Metric], sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the value of each metric; `sums` maps names of statistics to their sums."""
    return {
        metric.key: metric.measure.value(*(sums[s.name] for s in metric.measure.statistics))
        for metric in metrics
        if metric.measure is not None
    }


def compute_row_end(row: RowEnd) -> dict[str, Tensor]:
    """Return the value of each metric with a `row_end` that applies to the layer."""
    values = {m.key: m.row_end(row) for m in LAYER_METRICS.values() if m.row_end is not None}
    return {key: value for key, value in values.items() if value is not None}
