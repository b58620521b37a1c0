"""The top of the page: what the run is, how far it came, and whether anything is wrong with it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence

from pydantic import ValidationError

from moe_ffn.data.prepare import WORSE_THAN_UNIGRAM
from moe_ffn.layer_names import short_name
from moe_ffn.report.markup import number, short, spread, text
from moe_ffn.runs.documents import Alarm
from moe_ffn.runs.reader import Run, Sample
from moe_ffn.training.config import AlarmsConfig

STATES = {
    "waiting": ("warn", "waiting for the first row"),
    "training": ("accent", "training"),
    "interrupted": ("bad", "interrupted"),
    "finished": ("good", "finished"),
}


def headline(run: Run) -> str:
    """The name, the state, and a tile for each number a reader asks for first."""
    tiles = [
        ("validation loss", number(validation_loss(run)), "nats per token" + _best(run)),
        ("bits per byte", number(bits_per_byte(run)), ""),
        ("unigram model", number(run.summary.unigram_loss), "nats per token"),
        (
            "parameters",
            short(run.fact("num_params")),
            f"{short(run.fact('num_active_params'))} active",
        ),
        ("throughput", number(tokens_per_second(run), ",.0f"), f"tokens per second{_span(run)}"),
        ("FLOPs", short(run.fact("flops_per_token")), "per token, forward"),
    ]
    drawn = "".join(
        f"<div><dt>{name}</dt><dd>{value}</dd><dd class=quiet>{below}</dd></div>"
        for name, value, below in tiles
    )
    return (
        f"<header><h1>{text(run.name)}</h1>\n<p>{_state(run)}</p>\n"
        f'<dl class="tiles">{drawn}</dl>\n'
        f'<p class="quiet small">code {_revision(run)}, corpus sha256 {_short_hash(run)}, precision '
        f"{text(run.fact('precision') or 'unknown')}; page of {time.strftime('%Y-%m-%d %H:%M:%S')}"
        "</p></header>\n"
    )


def alarms(runs: Sequence[Run]) -> str:
    """Every alarm with its advice, what is wrong without one, and what could not be judged; the sentence that
    all is well only where it could.
    """
    rows = [(run, row) for run in runs for row in _concerns(run)]
    drawn = "".join(
        f'<p class="{kind}">{text(f"{run.name}: " if len(runs) > 1 else "")}{text(sentence)}</p>\n'
        for run, (kind, sentence) in rows
    )
    number_of_alarms = sum(len(run.alarms) for run in runs)
    if not number_of_alarms:
        return drawn or '<p class="good calm">No alarm was raised.</p>\n'
    items = "".join(
        _entry(same, run.name if len(runs) > 1 else "") for run in runs for same in _grouped(run)
    )
    count = f"{number_of_alarms} alarm{'s' if number_of_alarms > 1 else ''}"
    section = f'<section class="alarms" aria-label="alarms"><h2>{count}</h2>\n<ul>{items}</ul></section>\n'
    return drawn + section


def _concerns(run: Run) -> Iterator[tuple[str, str]]:
    """A class of the style sheet, and what is wrong, or cannot be known yet."""
    loss, unigram = validation_loss(run), run.summary.unigram_loss
    # What is not finite is null in a summary.
    is_null = run.summary.has("validation_loss") and run.summary.validation_loss is None
    if is_null or (loss is not None and not math.isfinite(loss)):
        yield "bad", "The validation loss is not a finite number: training has diverged."
    elif loss is not None and unigram is not None and loss > unigram:
        yield "bad", f"The validation loss is {WORSE_THAN_UNIGRAM}."
    try:
        rules = AlarmsConfig(after_steps=run.option("logging.alarms.after_steps"))
    except ValidationError:  # it is absent, or damaged
        rules = AlarmsConfig()
    losses = run.series("train/loss")
    sentences = rules.not_judged(
        int(losses.steps[-1]) if losses else 0,
        sum(map(math.isfinite, losses.values)),
        is_routed=bool(run.layers),
    )
    for sentence in sentences:
        yield "warn", f"Not judged yet: {sentence}."


def ffn_type(run: Run) -> str:
    """The type of the feed-forward block, its experts, and the types of layers that differ."""
    ffn = run.option("model.ffn")
    if not isinstance(ffn, dict):
        return "unknown block"
    name = str(ffn.get("type", "unknown block"))
    if isinstance(ffn.get("num_experts"), int):
        name += f", {ffn['num_experts']} experts"
    router = ffn.get("router")
    if isinstance(router, dict):
        k = f" k = {router['k']}" if "k" in router else ""
        name += f", {router.get('type', 'unknown')}{k}"
    others = run.option("model.ffn_at")
    if isinstance(others, dict) and others:
        name += "; differs in layers " + ", ".join(map(str, others))
    return name


def validation_loss(run: Run) -> float | None:
    """The final one, or the last so far."""
    final = run.summary.validation_loss
    return final if final is not None else run.series("validation/loss").last


def bits_per_byte(run: Run) -> float | None:
    final = run.summary.validation_bits_per_byte
    return final if final is not None else run.series("validation/bits_per_byte").last


def tokens_per_second(run: Run) -> float | None:
    final = run.summary.tokens_per_second
    return final if final is not None else run.series("train/tokens_per_second").last


def progress(run: Run) -> str:
    """`240 of 600`; the whole is not known of a run without its options."""
    planned = run.option("trainer.max_steps")
    done = f"{run.step or 0:,}"
    return f"{done} of {planned:,}" if isinstance(planned, int) and planned > 0 else done


def _state(run: Run) -> str:
    kind, word = STATES[run.state]
    return (
        f'<strong class="{kind}">{word}</strong>, step {progress(run)} · {text(ffn_type(run))}'
        f"{_layers(run)}"
    )


def _layers(run: Run) -> str:
    layers, width = run.option("model.num_layers"), run.option("model.d_model")
    return f" · {text(layers)} layers of width {text(width)}" if layers and width else ""


def _span(run: Run) -> str:
    """Of what part of the run the throughput is: the curve beside it has every row."""
    if run.summary.tokens_per_second is not None:
        return ", mean of the run"
    return ", last row" if run.series("train/tokens_per_second") else ""


def _best(run: Run) -> str:
    values = [value for value in run.series("validation/loss").values if value == value]
    last = validation_loss(run)
    if not values or last is None or min(values) >= last - 5e-5:
        return ""
    return f", best {min(values):.4f}"


def _revision(run: Run) -> str:
    revision = str(run.fact("git_revision") or "unknown")
    commit, dash, rest = revision.partition("-")
    return f'<code title="{text(revision)}">{text(commit[:12] + dash + rest)}</code>'


def _short_hash(run: Run) -> str:
    sha = str(run.fact("corpus_sha256") or "unknown")
    return f'<code title="{text(sha)}">{text(sha[:12])}</code>'


def _grouped(run: Run) -> Iterable[list[Alarm]]:
    """The alarms of one kind at one step together, whichever their layers."""
    groups: dict[tuple[int, str], list[Alarm]] = {}
    for alarm in run.alarms:
        groups.setdefault((alarm.step, alarm.kind), []).append(alarm)
    return groups.values()


def _entry(alarms: Sequence[Alarm], run_name: str) -> str:
    """One item: the message and the advice of the first, and the layers of all."""
    first = alarms[0]
    layers = [short_name(alarm.layer) for alarm in alarms if alarm.layer]
    place = f", layer{'s' if len(layers) > 1 else ''} {', '.join(layers)}" if layers else ""
    whose = f"{run_name}, " if run_name else ""
    return (
        f"<li><strong>{text(first.kind.replace('_', ' '))}</strong> "
        f'<span class="quiet">{text(whose)}step {first.step:,}{text(place)}</span><br>'
        f"{text(first.message)}<br><em>{text(first.advice)}</em></li>\n"
    )


OPEN_SAMPLES = 3
"""The last so many are open; the first is too, to compare them with."""

MOST_SAMPLES = 40
"""Of a long run: the first, the last, and evenly between them."""


def samples(run: Run) -> str:
    """From the first text to the last; the prompt is bold."""
    if not run.samples:
        return ""
    shown = spread(run.samples, MOST_SAMPLES)
    hidden = len(run.samples) - len(shown)
    note = (
        f"<p class=quiet>{len(shown)} of {len(run.samples)}, evenly chosen.</p>" if hidden else ""
    )
    items = "".join(
        _sample(sample, is_open=place == 0 or place >= len(shown) - OPEN_SAMPLES)
        for place, sample in enumerate(shown)
    )
    return note + items


def options(run: Run) -> str:
    """The resolved config and the facts that stand beside it."""
    facts = run.facts.model_dump(exclude_unset=True, exclude=set(run.options))
    parts = [
        ("config.yaml", run.config_text.strip()),
        ("facts.json, beyond the options", json.dumps(facts, indent=2) if facts else ""),
    ]
    return "".join(
        f"<details><summary>{name}</summary><pre>{text(content)}</pre></details>\n"
        for name, content in parts
        if content
    )


def _sample(sample: Sample, *, is_open: bool) -> str:
    return (
        f"<details{' open' if is_open else ''}><summary>step {sample.step:,}</summary>"
        f"<pre><b>{text(sample.prompt)}</b>{text(sample.text)}</pre></details>\n"
    )
