"""What the model wrote, what it was told, and what it was."""

from __future__ import annotations

import json

from experiments.report.bins import spread
from experiments.report.markup import text
from experiments.report.record import Run, Sample

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
    facts = {key: value for key, value in run.facts.items() if key not in run.config}
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
