"""Page of a study in Markdown: question, design, results and limits; its figures are on a separate page.

Numbers, tables and figures are computed from the results of the runs. The file of the study adds prose.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import stdev
from typing import Any

from moe_ffn.config.errors import ConfigError, explaining
from moe_ffn.config.files import read_text, write_atomically
from moe_ffn.config.numbers import NONE, compact
from moe_ffn.report.html import render, write_page
from moe_ffn.report.plots import figures_page, shared_script
from moe_ffn.report.studies.arm_figures import (
    SizedLine,
    axes_of,
    differences,
    frontier,
    losses,
    over_sizes,
    tuning,
)
from moe_ffn.report.studies.comparison_tables import (
    arms_by_block,
    arms_of_size,
    markdown,
    tables,
    tables_by_size,
    tuning_tables,
)
from moe_ffn.report.studies.fits import (
    AXIS_NAMES,
    FITS,
    Paragraphs,
    axis_name,
    axis_of,
    image_over,
    lines_over,
    loss_by_all_flops,
    size_of,
    without_seeds,
)
from moe_ffn.report.studies.markdown import markdown_row, markdown_table
from moe_ffn.runs.options_in_words import block_of
from moe_ffn.studies.comparison import Arm, Comparison
from moe_ffn.studies.config import STUDY_FILE, StudyConfig
from moe_ffn.studies.differences import differing, in_words
from moe_ffn.studies.result import RESULTS_FILE, RunResult
from moe_ffn.studies.statistics import detectable_difference

SUMMARY_FILE = "README.md"
"""File with the table of all studies, in the folder of their pages."""

FIGURES_FILE = "figures.html"
"""Page with all figures of a study, in the folder of the study."""

_CENTRED = (
    "Here the common effect of each seed is subtracted from the final losses, which changes neither minima "
    "nor slopes. The losses, and the points of a figure, therefore scatter less than the measured ones."
)


@dataclass
class StudyPage:
    """Page of a study, its figures, and its row in the table of all studies."""

    name: str
    pictures: Sequence[str]
    """Pictures that the page shows, such as `axis.svg`."""
    markdown: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    """Name -> plotly figure."""
    summary: str = ""
    """Row for the table of all studies."""

    def image(self, name: str, figure: Any, alt: str) -> str:
        """Store a figure and return its Markdown, which is empty if the page does not show it."""
        self.figures[name] = figure
        return f"![{alt}]({self.name}/{name}.svg)" if f"{name}.svg" in self.pictures else ""

    def write(self, folder: Path) -> list[Path]:
        """Write `NAME.md`, `NAME/figures.html` and the study's row in the table of all studies."""
        page, figures = folder / f"{self.name}.md", folder / self.name / FIGURES_FILE
        table = folder / SUMMARY_FILE
        with explaining(f"'{page}' cannot be written", "choose another folder"):
            figures.parent.mkdir(parents=True, exist_ok=True)
            drawn, script = [*self.figures.values()], shared_script(figures)
            write_page(figures, figures_page(f"Figures of {self.name}", drawn, script))
            write_atomically(page, self.markdown)
            old_table = read_text(table) if table.is_file() else ""
            write_atomically(table, with_row(old_table, self.summary))
        return [page, figures, table]


def study_page(
    study: StudyConfig,
    results: Sequence[RunResult],
    step_seconds: Mapping[str, float] | None = None,
    file: str = "",
) -> StudyPage:
    """Return the page of a study, with the path of its `file`, from the results of its finished runs.

    `step_seconds` (arm -> seconds per step) are timed separately from the runs. Raises ConfigError if no
    result belongs to an arm, the results cannot be compared, or the study shows a figure that is not drawn.
    """
    names = study.arm_names
    own_results = [result for result in results if result.main_arm in names]
    if not own_results:
        raise ConfigError(
            f"{study.name}: no result belongs to one of its arms, {', '.join(names)}; give the "
            "folder of its runs"
        )
    known = {name for result in own_results for name in (result.arm, result.arm.partition(",")[0])}
    baseline = study.baseline if study.baseline in known else None
    comparison = Comparison.of(
        own_results,
        baseline=baseline,
        baselines=study.baselines,
        arms=names,
        step_seconds=step_seconds,
        margin=study.equality_margin,
    )
    arms = comparison.arms
    fitted = without_seeds(arms)
    page = StudyPage(study.name, study.figures)
    result = _result(page, study, comparison)
    all_flops = loss_by_all_flops(page.image, study, arms)
    tuned = _tuning(page, comparison)
    fits = {
        title: [*section(page.image, study, fitted), "" if fitted is arms else _CENTRED]
        for title, section in map(FITS.__getitem__, study.fit)
    }
    drawn = [f"{name}.svg" for name in page.figures]
    if absent := set(study.figures) - {*drawn}:
        raise ConfigError(f"figures: {min(absent)} is not drawn; there are {', '.join(drawn)}")
    compared = [run for arm in arms for run in arm.results]
    initial_models = {run.option("init_from") for run in own_results} - {None}
    page.markdown = render(
        "study.md",
        study=study,
        comparison=comparison,
        published=re.sub(
            r"arXiv:(\d{4}\.\d{5})", r"[\g<0>](https://arxiv.org/abs/\1)", study.published.strip()
        ),
        same=_same(compared),
        design=_design(comparison),
        pairing=_pairing([arm.results[0] for arm in arms]),
        result=result,
        tables=map(markdown, tables(comparison)) if study.sizes else [],
        covered=_covered(arms),
        all_flops=all_flops,
        tuning=tuned,
        fits=fits,
        sizes=_range(run.budget.model.params for run in compared),
        tokens=_range(run.budget.tokens for run in compared),
        file=file or f"configs/studies/{study.name}.yaml",
        needs_model=any(not m.startswith(f"runs/{study.name}/") for m in initial_models),
        facts=_facts(own_results),
        figures=page.figures,
        RESULTS_FILE=RESULTS_FILE,
        FIGURES_FILE=FIGURES_FILE,
        STUDY_FILE=STUDY_FILE,
    )
    answer = study.answer.strip() or _short_verdict(comparison)
    question = f"[{study.question.strip() or study.name}]({study.name}.md)"
    page.summary = markdown_row([question, re.split(r"(?<=\.)\s", answer)[0]])
    return page


def _covered(arms: Sequence[Arm]) -> str:
    """Return sentences on what the intervals of arms cover, and what was not tried."""
    kinds = {arm.interval_over for arm in arms if arm.interval}
    kinds |= {found.over for arm in arms if (found := arm.difference) and found.interval}
    if not kinds:
        return "No loss has an interval; other corpora and other learning rates were not tried."
    if "seeds" not in kinds:
        covered = "windows of this text, not seeds,"
    elif len(kinds) > 1:
        covered = "seeds, or windows of this text for arms of one seed, not"
    else:
        covered = "seeds, not"
    return (
        f"The intervals cover only {covered} other corpora or learning rates that were not tried."
    )


def _short_verdict(comparison: Comparison) -> str:
    """Return the verdict on the arm with the largest improvement over its baseline."""
    gaps = [arm.loss - comparison.base_of(arm).loss for arm in comparison.arms if arm.base]
    return comparison.verdicts[gaps.index(min(gaps)) if gaps else 0]


# -- sections


def _design(comparison: Comparison) -> str:
    options = _options(comparison)

    def cost(arm: Arm, part: str, key: str) -> str:
        value, base = (
            getattr(getattr(a.budget, part), key) for a in (arm, comparison.base_of(arm))
        )
        change = f" ({value / base - 1:+.1%})" if base and value != base else ""
        return f"{compact(value)}{change}"

    rows = [
        [
            arm.name,
            arm.base or NONE,
            "<br>".join(options[arm.name]) or NONE,
            cost(arm, "ffn", "params"),
            cost(arm, "ffn", "active_params"),
            cost(arm, "ffn", "flops_per_token"),
            cost(arm, "model", "flops_per_token"),
            compact(arm.budget.tokens),
            ", ".join(map(str, arm.seeds)),
        ]
        for arm in comparison.arms
    ]
    head = "arm|compared with|options|FFN params|FFN active|FFN FLOPs/token|model FLOPs/token|tokens|seeds"
    return markdown_table(head.split("|"), rows, num_texts=3)


def _options(comparison: Comparison) -> Mapping[str, Sequence[str]]:
    """Return the options of each arm: what it changes, and its values of what arms compared with it change.

    A baseline also has its block, and its differences from the first baseline.
    """
    values: dict[str, dict[str, str]] = {
        arm.name: {} if arm.base else {"model.ffn": block_of(arm.results[0].config.get("model"))}
        for arm in comparison.arms
    }
    first = next(arm for arm in comparison.arms if not arm.base)
    for arm in comparison.arms:
        base = comparison.base_of(arm) if arm.base else first
        old_config, config = base.results[0].config, arm.results[0].config
        changes = [*differing(old_config, config)]
        # Another type brings options of its own, which the description of the whole block shows.
        if whole := any(
            path.startswith("model.ffn.") and (isinstance(old, Mapping) or isinstance(new, Mapping))
            for path, old, new in changes
        ):
            values[arm.name]["model.ffn"] = block_of(config.get("model"))
        for path, old, new in changes:
            if not (whole and path.startswith("model.ffn.")):
                values[arm.name][path] = in_words(path, new, config)
                values[base.name].setdefault(path, in_words(path, old, old_config))
    blocks = {name: of_arm.pop("model.ffn", "") for name, of_arm in values.items()}
    return {
        name: [
            *filter(None, [blocks[name]]),
            *(f"`{path.removeprefix('model.ffn.')} {value}`" for path, value in of_arm.items()),
        ]
        for name, of_arm in values.items()
    }


def _pairing(runs: Sequence[RunResult]) -> str:
    """Return a sentence on what the runs of a seed share."""
    if len(runs) == 1:
        return ""
    orders = {(run.option("data.batch_size"), run.option("data.seq_len")) for run in runs}
    models = [run.config.get("model", {}) for run in runs]
    outside = [{k: v for k, v in m.items() if k not in ("ffn", "ffn_at")} for m in models]
    initial_models = {run.option("init_from") for run in runs}
    shared = ["read the same data in the same order"] if len(orders) == 1 else []
    if len(initial_models) == 1 and all(options == outside[0] for options in outside):
        shared.append("begin with the same weights outside their feed-forward blocks")
    return f"Within a seed all arms {' and '.join(shared)}." if shared else ""


_SHARED_OPTIONS = {
    "corpus": "data.corpus.type",
    "d_model": "model.d_model",
    "layers": "model.num_layers",
    "tokenizer": "data.tokenizer.type",
    "vocabulary": "data.tokenizer.vocab_size",
    "sequence length": "data.seq_len",
    "batch size": "data.batch_size",
    "steps": "trainer.max_steps",
    "optimizer": "optimizer.type",
    "learning rate": "optimizer.learning_rate",
}
"""Name -> option that the page shows if all runs share it."""


def _same(runs: Sequence[RunResult]) -> str:
    """Return the options that all runs share, as `d_model 64, layers 4`."""
    shared: list[str] = []
    for name, path in _SHARED_OPTIONS.items():
        values = {run.option(path) for run in runs}
        if len(values) == 1 and (value := values.pop()) is not None:
            shared.append(f"{name} {value}")
    return ", ".join(shared)


def _result(page: StudyPage, study: StudyConfig, comparison: Comparison) -> Paragraphs:
    arms = comparison.arms
    if study.sizes:
        title = "Difference from the baseline of each size"
        lines = _lines_by_block(comparison, study.sizes)
        figure = over_sizes(lines, "active parameters", title, "loss minus that of the baseline")
        parts = [*map(markdown, tables_by_size(comparison, study.sizes))]
        parts.insert(1, page.image("sizes", figure, title))
    else:
        parts = ["\n".join(f"- {verdict}" for verdict in comparison.verdicts)]
    if any(arm.difference for arm in arms):
        title = f"Difference from {comparison.baseline}"
        parts.append(page.image("differences", differences(comparison), title))
    parts.append(page.image("cost", frontier(comparison), "Final loss over training FLOPs"))
    if not study.sizes:
        parts += map(markdown, tables(comparison))
    if len(arms) == 1 and len(arms[0].losses) > 2:
        parts.append(_detectable(list(arms[0].losses.values())))
    axis = axis_of(study)
    if axis is not None:
        runs = [run for arm in arms for run in arm.results]
        if study.axis is not None and all(math.isnan(size_of(run, axis)) for run in runs):
            raise ConfigError(
                f"axis ({axis}): no run has such a positive number; give a dotted option, such as "
                f"model.d_model, or {', '.join(AXIS_NAMES)}"
            )
        title = f"Final loss against {axis_name(axis)}"
        lines = lines_over(arms, axis)
        parts.append(image_over(page.image, "axis", lines, axis_name(axis), title))
    over = "tokens" if len({arm.budget.model.flops_per_token for arm in arms}) == 1 else "FLOPs"
    if over in axes_of(arms, "validation"):
        title = f"Validation loss over training {over}"
        by_size = [arms_of_size(arms, size) for size in study.sizes]
        largest = [*filter(None, [arms, *by_size])][-1]
        parts.append(page.image("curves", losses(largest, over), title))
    return parts


def _lines_by_block(comparison: Comparison, sizes: Sequence[str]) -> list[SizedLine]:
    """Return the differences of each block from the baseline of a size, over its active parameters."""
    blocks = arms_by_block(comparison.arms, sizes)
    places = {
        size: float(comparison.base_of(arm).budget.model.active_params)
        for by_size in blocks.values()
        for size, arm in by_size.items()
    }
    lines: list[SizedLine] = []
    for block, by_size in blocks.items():
        points = {
            x: comparison.seed_differences(by_size[s]) if s in by_size else []
            for s, x in places.items()
        }
        found = {places[size]: arm.difference for size, arm in by_size.items()}
        margins = {
            x: paired.interval.margin for x, paired in found.items() if paired and paired.interval
        }
        if any(points.values()):
            lines.append(SizedLine(block, points, margins=margins))
    return lines


def _detectable(losses: Sequence[float]) -> str:
    """Return the differences that a study can detect, from the scatter of a single arm over seeds."""
    sd = stdev(losses)
    rows = [[str(n), f"{detectable_difference(sd * math.sqrt(2), n):.4f}"] for n in (3, 5, 10, 20)]
    return (
        f"The final losses of {len(losses)} runs that differ only in their seed have a standard deviation of "
        f"{sd:.4f} nats. At 95 % confidence and 80 % power, a study of two such arms detects these "
        "differences, if a seed affects each arm independently:\n\n"
        + markdown_table(["seeds of each arm", "nats per token"], rows)
        + "\n\nIf a seed affects both arms alike, pairing by seed detects smaller differences."
    )


def _tuning(page: StudyPage, comparison: Comparison) -> Paragraphs:
    """Return the losses over the values of each tuned option, and the arms whose best value is at an end."""
    parts: list[str] = []
    for tuned, table in zip(comparison.tuning, tuning_tables(comparison), strict=True):
        if tuned.at_an_end:
            arms = ", ".join(tuned.at_an_end)
            parts.append(f"The best value is the lowest or highest that was tried: {arms}.")
        if any(tuned.losses.values()):
            name = f"tuning-{tuned.option.rpartition('.')[2]}"
            title = f"Final loss by {tuned.option}"
            parts.append(page.image(name, tuning(comparison, tuned), title))
        parts.append(markdown(table))
    return parts


def _facts(runs: Sequence[RunResult]) -> str:
    """Return a table of the number of runs, their machines and their time."""
    facts = {
        "processor": "processor",
        "num_cpus": "cores",
        "gpu": "GPU",
        "threads": "threads",
        "precision": "precision",
        "torch": "torch",
        "python": "Python",
        "git_revision": "revision",
        "date": "date",
    }
    num_tuned = sum(bool(run.tuning) for run in runs)
    rows = [
        ["runs", f"{len(runs)}, {num_tuned} of them for tuning" if num_tuned else str(len(runs))]
    ]
    for key, name in facts.items():
        values = {run.machine.get(key) for run in runs} - {None}
        if values:
            rows.append([name, ", ".join(sorted(str(value)[:60] for value in values))])
    seconds = [run.outcome.wall_seconds for run in runs]
    if all(value is not None for value in seconds):
        total = sum(filter(None, seconds))
        time = f"{total / 3600:.1f} hours" if total >= 3600 else f"{total / 60:.0f} minutes"
        rows.append(["training", f"{time} in all"])
    return markdown_table(["fact", "value"], rows)


def _range(values: Iterable[int]) -> str:
    ordered = sorted(values)
    return " to ".join(dict.fromkeys([compact(ordered[0]), compact(ordered[-1])]))


# -- Markdown


HEAD = "| question | answer |\n|---|---|\n"


def with_row(text: str, row: str) -> str:
    """Return the page of all studies with this row, which replaces the older row of the study."""
    # Git may have checked the page out with the line ends of Windows.
    introduction, _, table = text.replace("\r\n", "\n").partition(HEAD)
    lines = [*table.splitlines(), row]
    by_page = {line.partition(" | ")[0].rpartition("](")[2]: line for line in lines}
    return (introduction or "# Studies\n\n") + HEAD + "\n".join(by_page.values()) + "\n"
