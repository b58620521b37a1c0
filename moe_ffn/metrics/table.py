"""Every metric of a run, once: its key, what it is, what is healthy, and how it is measured.

Rows, wandb, the page, the dashboard, the tables at the end of a run and docs/observing.md read these
tables. A new metric of routing is written here alone: an entry in `LAYER_METRICS` and, where
`metrics.functional` lacks it, its function.

T tokens, E experts, B sequences
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from moe_ffn.balancing.losses import (
    load_times_scores,
    normalized_scores,
    pairs_per_expert,
    pairs_per_sequence,
    real_only,
    router_z_loss,
    token_entropy,
)
from moe_ffn.metrics.functional import (
    coactivation,
    coactivation_counts,
    load_cv,
    logit_max,
    max_violation,
    nonfinite_tokens,
    top1_margin,
)
from moe_ffn.outputs import Routing

# -- how a metric is measured

Axes = Literal["", "E", "EE"]


class Batch:
    """The routing of one layer in one batch, and what several statistics need of it, computed once.

    Args:
        shared_share: the layer's in `FFNOutput.shared_shares`; None without a shared expert.
    """

    def __init__(self, routing: Routing, shared_share: Tensor | None = None) -> None:
        self.routing = routing
        self.shared_share = shared_share

    @cached_property
    def num_tokens(self) -> Tensor:
        return self.routing.num_real_tokens

    @cached_property
    def pairs_BE(self) -> Tensor:
        return pairs_per_sequence(self.routing)

    @cached_property
    def scores_TE(self) -> Tensor:
        """Normalised, 0 for padding."""
        return real_only(normalized_scores(self.routing, "TokenMetrics"), self.routing)


@dataclass(frozen=True)
class Statistic:
    """What is added up over batches and ranks."""

    name: str
    of: Callable[[Batch], Tensor]
    axes: Axes = ""
    dtype: torch.dtype = torch.float32
    reduce: Literal["sum", "max"] = "sum"

    def zeros(self, num_experts: int) -> Tensor:
        """What it is before the first batch."""
        return torch.zeros([num_experts] * len(self.axes), dtype=self.dtype)

    def add(self, before: Tensor, batch: Batch) -> Tensor:
        """Its value with one more batch."""
        value = self.of(batch).to(before.dtype)
        return before.maximum(value) if self.reduce == "max" else before + value


@dataclass(frozen=True)
class Measure:
    """A metric as a function of statistics."""

    value: Callable[..., Tensor]
    """Of `statistics`, in their order. nan says that it does not exist, such as the capacity of a dropless
    layer."""
    statistics: tuple[Statistic, ...]


def _num_dropped(batch: Batch) -> Tensor:
    return (batch.routing.dropped_N & batch.routing.real_N).sum()


def _num_places(batch: Batch) -> Tensor:
    capacity = batch.routing.capacity
    if capacity is None:
        return torch.zeros_like(batch.num_tokens)
    return capacity * batch.routing.num_experts


def _shared_shares(batch: Batch) -> Tensor:
    return batch.num_tokens * (torch.nan if batch.shared_share is None else batch.shared_share)


def _load_balance(batch: Batch) -> Tensor:
    pairs_E, scores_E = batch.pairs_BE.sum(dim=0), batch.scores_TE.sum(dim=0)
    return load_times_scores(pairs_E, scores_E, batch.num_tokens) * batch.num_tokens


def _mean(total: Tensor, num: Tensor) -> Tensor:
    return total / num.clamp(min=1)


def _load(pairs_E: Tensor) -> Tensor:
    return pairs_E / pairs_E.sum().clamp(min=1)


def _capacity_used(pairs_E: Tensor, num_dropped: Tensor, num_places: Tensor) -> Tensor:
    used = (pairs_E.sum() - num_dropped) / num_places
    return used.where(num_places > 0, torch.nan)


def _entropy_of_mean(scores_E: Tensor) -> Tensor:
    total = scores_E.sum().clamp(min=torch.finfo(scores_E.dtype).tiny)
    return token_entropy(scores_E / total)


def _coactivation_max(counts_EE: Tensor) -> Tensor:
    return coactivation(counts_EE).fill_diagonal_(0).max()


def _counted(name: str, of: Callable[[Batch], Tensor], axes: Axes = "") -> Statistic:
    return Statistic(name, of, axes, torch.int64)


PAIRS = _counted("pairs_E", lambda b: pairs_per_expert(b.routing), "E")
DROPPED = _counted("num_dropped", _num_dropped)
PLACES = _counted("num_places", _num_places)
TOKENS = _counted("num_tokens", lambda b: b.num_tokens)
NONFINITE = _counted("num_nonfinite", lambda b: nonfinite_tokens(b.routing))
SEQUENCES = _counted("num_sequences", lambda b: b.pairs_BE.any(dim=-1).sum())
CHOSEN_TOGETHER = _counted("counts_EE", lambda b: coactivation_counts(b.routing), "EE")

SCORES = Statistic("scores_E", lambda b: b.scores_TE.sum(dim=0), "E")
ENTROPIES = Statistic("entropies", lambda b: token_entropy(b.scores_TE).sum())
MARGINS = Statistic("top1_margins", lambda b: top1_margin(b.scores_TE).sum())
SHARED = Statistic("shared_shares", _shared_shares)
BALANCE = Statistic("load_balance", _load_balance)
VIOLATIONS = Statistic(
    "sequence_violations", lambda b: max_violation(b.pairs_BE.float()).clamp(min=0).sum()
)
LARGEST_LOGIT = Statistic("logit_max", lambda b: logit_max(b.routing), reduce="max")


def per_token(name: str, function: Callable[[Routing], Tensor]) -> Measure:
    """The mean over all real tokens of what `function` gives as a mean over those of one batch."""
    total = Statistic(name, lambda batch: function(batch.routing) * batch.num_tokens)
    return Measure(_mean, (total, TOKENS))


# -- the tables

Measured = Literal["every batch", "last step", "validation", "row", "probe", "run"]

WHERE: dict[Measured, str] = {
    "every batch": "training, validation",
    "last step": "training (the last step of a row), validation",
    "validation": "validation",
    "row": "training",
    "probe": "training (a probe batch)",
}
"""Of which batches a metric of a sparse layer is measured. What costs little is of all that a row covers;
what looks at single tokens would cost several percent of a small model's step, and is of its last step."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """What every reader of a metric needs to know."""

    key: str
    """As in rows: `routing/layer_03/KEY` of a sparse layer, `train/KEY` or `validation/KEY` of the model."""
    title: str
    quantity: str = ""
    """What stands at an axis before the unit."""
    unit: str = ""
    """Of the logged value; pages show a share as percent."""
    formula: str
    """One line of Markdown, E experts, k of them for a token, p its scores divided by their sum."""
    healthy: str
    source: str = ""
    """A link in Markdown."""
    requires: str = ""
    """What a layer or run has that is measured at all; empty where all of them are."""
    per: Literal["layer", "expert", "pair"] = "layer"
    """One number of a sparse layer, of each of its experts, or of each two of them."""
    measured: Measured
    """Of which batches; `run` for a metric of the whole model."""
    rows: tuple[Literal["train", "validation"], ...] = ()
    """Of a metric of the whole model: in which rows it stands."""
    measure: Measure | None = None
    """None where a routing does not tell it; `RoutingWindow` and `StepLogger` measure those."""
    label: str = ""
    """Its short name in a line or table of results."""

    @property
    def is_share(self) -> bool:
        return self.unit == "share"

    @property
    def form(self) -> str:
        """Python's format of a value in a table of results."""
        forms = {"share": ".1%", "count": "g"}
        return forms.get(self.unit, ".2f")

    @property
    def sentence(self) -> str:
        """The formula as plain text."""
        text = self.formula.replace("`", "")
        return f"{text[0].upper()}{text[1:]}."

    def axis(self, unit: str | None = None) -> str:
        """The title of an axis of such values, in their unit or another."""
        unit = self.unit if unit is None else unit
        return f"{self.quantity} ({unit})" if self.quantity and unit else self.quantity or unit


def _table(*metrics: Metric) -> dict[str, Metric]:
    return {metric.key: metric for metric in metrics}


LAYER_METRICS = _table(
    Metric(
        key="load",
        title="Load",
        unit="share",
        per="expert",
        formula="each expert's share of the (token, expert) pairs, before dropping",
        healthy="1 / E each",
        measured="every batch",
        measure=Measure(_load, (PAIRS,)),
    ),
    Metric(
        key="max_violation",
        title="MaxVio",
        quantity="MaxVio",
        unit="dimensionless",
        formula="the busiest expert over the even share, minus 1",
        healthy="0 is balance; below 1, E / k - 1 at worst",
        source="[2024](https://arxiv.org/abs/2408.15664)",
        measured="every batch",
        measure=Measure(lambda pairs_E: max_violation(_load(pairs_E)), (PAIRS,)),
        label="MaxVio",
    ),
    Metric(
        key="load_cv",
        title="Variation of the load",
        quantity="CV",
        unit="dimensionless",
        formula="standard deviation of the experts' loads over their mean",
        healthy="near 0, sqrt(E - 1) at worst",
        measured="every batch",
        measure=Measure(lambda pairs_E: load_cv(_load(pairs_E)), (PAIRS,)),
    ),
    Metric(
        key="dropped_fraction",
        title="Dropped",
        quantity="dropped pairs",
        unit="share",
        formula="share of the (token, expert) pairs whose expert was full",
        healthy="0 to 0.1",
        measured="every batch",
        measure=Measure(
            lambda pairs_E, num_dropped: num_dropped / pairs_E.sum().clamp(min=1), (PAIRS, DROPPED)
        ),
        label="dropped",
    ),
    Metric(
        key="entropy",
        title="Entropy per token",
        quantity="entropy",
        unit="nats",
        formula="entropy of p, the router's distribution over experts, mean over tokens: low where it is "
        "sure",
        healthy="falls from log E as the router decides",
        measured="last step",
        measure=Measure(_mean, (ENTROPIES, TOKENS)),
        label="entropy",
    ),
    Metric(
        key="entropy_of_mean",
        title="Entropy of the mean",
        quantity="entropy",
        unit="nats",
        formula="entropy of the mean of that distribution over all tokens",
        healthy="log E: together the tokens use everything",
        measured="last step",
        measure=Measure(_entropy_of_mean, (SCORES,)),
    ),
    Metric(
        key="dead_experts",
        title="Dead experts",
        quantity="dead experts",
        unit="count",
        formula="experts without a token for `logging.alarms.after_steps` steps",
        healthy="0",
        measured="row",
        label="dead experts",
    ),
    Metric(
        key="churn",
        title="Churn",
        quantity="changed tokens",
        unit="share",
        formula="share of the probe's tokens whose experts changed since the last look, "
        "`logging.churn_every_n_steps` or more steps before",
        healthy="falls towards 0; what stays is called saturation",
        source="[OLMoE](https://arxiv.org/abs/2409.02060)",
        measured="probe",
    ),
    Metric(
        key="logit_max",
        title="Largest router logit",
        quantity="largest absolute logit",
        unit="nats",
        formula="largest absolute router logit",
        healthy="below 20 or so; growth without end comes before instability",
        measured="last step",
        measure=Measure(lambda largest: largest, (LARGEST_LOGIT,)),
    ),
    Metric(
        key="top1_margin",
        title="Top-1 margin",
        quantity="margin",
        unit="scores",
        formula="best minus second best of a token's normalised scores, mean over tokens",
        healthy="grows from 0 as the router decides",
        requires="at least two experts",
        measured="last step",
        measure=Measure(_mean, (MARGINS, TOKENS)),
    ),
    Metric(
        key="shared_share",
        title="Shared share",
        quantity="norm share",
        unit="share",
        formula="norm of the shared expert's output over the sum of both norms, mean over tokens",
        healthy="neither 0 nor 1",
        requires="a shared expert",
        measured="last step",
        measure=Measure(_mean, (SHARED, TOKENS)),
    ),
    Metric(
        key="capacity_used",
        title="Capacity used",
        quantity="places filled",
        unit="share",
        formula="share of the experts' places that are taken",
        healthy="near 1 / capacity factor",
        requires="a capacity",
        measured="every batch",
        measure=Measure(_capacity_used, (PAIRS, DROPPED, PLACES)),
    ),
    Metric(
        key="experts_per_token",
        title="Experts per token",
        unit="experts per token",
        formula="mean over tokens, before dropping",
        healthy="k; for top-p and ReLU routers what they were steered to",
        measured="every batch",
        measure=Measure(lambda pairs_E, num: pairs_E.sum() / num.clamp(min=1), (PAIRS, TOKENS)),
        label="experts",
    ),
    Metric(
        key="sequence_max_violation",
        title="MaxVio within sequences",
        quantity="MaxVio",
        unit="dimensionless",
        formula="each sequence's own MaxVio, mean over sequences",
        healthy="higher than MaxVio where experts specialise by text",
        measured="last step",
        measure=Measure(_mean, (VIOLATIONS, SEQUENCES)),
    ),
    Metric(
        key="rank_max_violation",
        title="MaxVio over ranks",
        quantity="MaxVio",
        unit="dimensionless",
        formula="MaxVio of what each rank would compute if the experts were split over them in order",
        healthy="near 0; a step with expert parallelism takes 1 + this times as long",
        requires="several ranks",
        measured="row",
    ),
    Metric(
        key="coactivation",
        title="Co-activation",
        quantity="tokens of expert i that also went to j",
        unit="share",
        per="pair",
        formula="the share of expert i's tokens that also chose expert j, a matrix: in `summary.json` "
        "alone, up to 64 experts",
        healthy="even off the diagonal",
        measured="validation",
        measure=Measure(coactivation, (CHOSEN_TOGETHER,)),
    ),
    Metric(
        key="coactivation_max",
        title="Strongest pair of experts",
        quantity="co-activation",
        unit="share",
        formula="largest share of one expert's tokens that also went to one other, on the validation split",
        healthy="below 1: two experts that always come together are one",
        measured="validation",
        measure=Measure(_coactivation_max, (CHOSEN_TOGETHER,)),
    ),
    Metric(
        key="bias_spread",
        title="Spread of the correction bias",
        quantity="bias range",
        unit="scores",
        formula="largest minus smallest bias that balancing without a loss adds to the scores",
        healthy="settles",
        requires="a correction bias",
        measured="row",
    ),
    Metric(
        key="load_balance",
        title="Load-balancing loss",
        quantity="loss",
        unit="dimensionless",
        formula="the Switch loss of the layer before its weight, of each batch and rank by itself",
        healthy="1",
        measured="last step",
        measure=Measure(_mean, (BALANCE, TOKENS)),
    ),
    Metric(
        key="router_z",
        title="Router z-loss",
        quantity="loss",
        unit="squared nats",
        formula="mean of logsumexp(logits)² before its weight",
        healthy="does not grow",
        source="[2022](https://arxiv.org/abs/2202.08906)",
        measured="last step",
        measure=per_token("router_z", router_z_loss),
    ),
    Metric(
        key="nonfinite_tokens",
        title="Tokens without a finite score",
        quantity="tokens",
        unit="count",
        formula="tokens that reached the router with NaN or infinity",
        healthy="0",
        measured="every batch",
        measure=Measure(lambda num: num, (NONFINITE,)),
    ),
)
"""What is measured of each sparse layer, in the order in which pages show it."""

RUN_METRICS = _table(
    Metric(
        key="loss",
        title="Loss",
        quantity="loss",
        unit="nats per token",
        formula="cross-entropy of the tokens to predict; in training the mean over the steps taken",
        healthy="below that of the unigram model, and falling",
        measured="run",
        rows=("train", "validation"),
        label="validation loss",
    ),
    Metric(
        key="bits_per_byte",
        title="Bits per byte",
        unit="bits per byte",
        formula="the loss in bits over the bytes of text predicted, so that tokenizers compare",
        healthy="falls",
        measured="run",
        rows=("validation",),
    ),
    Metric(
        key="tokens_per_second",
        title="Throughput",
        unit="tokens per second",
        formula="tokens of the row over its seconds, all ranks together, validations left out",
        healthy="steady",
        measured="run",
        rows=("train",),
    ),
    Metric(
        key="learning_rate",
        title="Learning rate",
        quantity="learning rate",
        formula="the optimizer's, at the row's last step",
        healthy="as the schedule has it",
        measured="run",
        rows=("train",),
    ),
    Metric(
        key="gradient_norm",
        title="Gradient norm",
        quantity="gradient norm",
        unit="L2",
        formula="of all parameters before clipping, at the row's last step",
        healthy="settles",
        measured="run",
        rows=("train",),
    ),
    Metric(
        key="objective",
        title="Objective",
        quantity="objective",
        unit="nats per token",
        formula="what is minimised: the loss and the weighted balancing losses",
        healthy="falls with the loss",
        measured="run",
        rows=("train",),
    ),
    Metric(
        key="skipped_steps",
        title="Skipped steps",
        quantity="optimizer steps",
        unit="count",
        formula="optimizer steps of the row that were not taken",
        healthy="0",
        measured="run",
        rows=("train",),
    ),
)
"""What is measured of the whole model, beside each balancing loss, `train/NAME` in `BALANCING_LOSSES`."""


def layer_measures() -> list[Metric]:
    """The metrics that are one number of a layer."""
    return [metric for metric in LAYER_METRICS.values() if metric.per == "layer"]


RESULT_COLUMNS = ("max_violation", "entropy", "dropped_fraction")
"""The keys of what has a column in tables of layers at the end of a run, and a panel of its validations."""


def result_columns() -> list[Metric]:
    return [LAYER_METRICS[key] for key in RESULT_COLUMNS]


def measured_in(*measured: Measured) -> list[Metric]:
    """The metrics of a layer that routings tell, of these batches."""
    return [m for m in LAYER_METRICS.values() if m.measured in measured and m.measure is not None]


def statistics_of(metrics: Iterable[Metric]) -> list[Statistic]:
    """What has to be added up for them, each once."""
    measures = [metric.measure for metric in metrics if metric.measure is not None]
    return list(dict.fromkeys(s for measure in measures for s in measure.statistics))


def compute(metrics: Iterable[Metric], sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The value of each metric from the sums of its statistics, by their names."""
    return {
        metric.key: metric.measure.value(*(sums[s.name] for s in metric.measure.statistics))
        for metric in metrics
        if metric.measure is not None
    }
