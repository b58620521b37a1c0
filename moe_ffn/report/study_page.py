"""The page of a study as Markdown: what was asked, how, what came of it, and what it does not show.

Numbers, tables and figures are computed from the results of its runs; the prose is the study file's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev

from moe_ffn.errors import ConfigError
from moe_ffn.files import read_text, write_whole
from moe_ffn.report import study_figures as figures
from moe_ffn.report.html import NONE, compact, finite
from moe_ffn.report.study_figures import Line
from moe_ffn.report.study_tables import (
    markdown,
    markdown_row,
    markdown_table,
    tables,
    tuning_tables,
)
from moe_ffn.runs.folder import explaining
from moe_ffn.studies.budget import TRAINING_FLOPS
from moe_ffn.studies.comparison import Arm, Comparison, block_of
from moe_ffn.studies.config import StudyConfig
from moe_ffn.studies.fits import (
    CLARK,
    GRANULARITY,
    LEVERAGE_LIMITS,
    Curve,
    Fit,
    Law,
    fit,
    fit_isoflop,
    fit_parabola,
    leverage,
    power_law,
)
from moe_ffn.studies.result import RunResult
from moe_ffn.studies.statistics import Interval, detectable_difference

SUMMARY_FILE = "README.md"
"""The table of all studies, beside their pages."""

AXIS_NAMES = {
    "params": "parameters",
    "active_params": "active parameters",
    "flops_per_token": "forward FLOPs per token",
    "expansion": "parameters of the feed-forward blocks over those that a token uses",
}
"""Axes that are no option of a run."""


@dataclass
class StudyPage:
    """The files of a study's page."""

    name: str
    markdown: str = ""
    figures: dict[str, str] = field(default_factory=dict)
    """Name of a file in the study's folder -> SVG."""
    summary: str = ""
    """Its row in the table of all studies."""

    def write(self, folder: Path) -> Path:
        """Write `NAME.md` and `NAME/*.svg`, and its row of the table of all studies; returns the page.

        Raises:
            ConfigError: a file cannot be written.
        """
        page = folder / f"{self.name}.md"
        table = folder / SUMMARY_FILE
        with explaining(f"'{page}' cannot be written", "choose another folder"):
            (folder / self.name).mkdir(parents=True, exist_ok=True)
            for name, svg in self.figures.items():
                write_whole(folder / self.name / name, svg)
            for old in (folder / self.name).glob("*.svg"):
                if old.name not in self.figures:
                    old.unlink()
            write_whole(page, self.markdown)
            before = read_text(table) if table.is_file() else ""
            write_whole(table, with_row(before, self.summary))
        return page


def study_page(
    study: StudyConfig,
    results: Sequence[RunResult],
    step_seconds: Mapping[str, float] | None = None,
) -> StudyPage:
    """The page of a study from the results of its runs, all of them finished.

    Args:
        step_seconds: arm -> seconds of a step, where they were measured apart from the runs.

    Raises:
        ConfigError: none of them is of an arm of the study, or they do not compare.
    """
    names = study.arm_names
    ours = [result for result in results if result.main_arm in names]
    if not ours:
        raise ConfigError(
            f"{study.name}: none of the results is of one of its arms, {', '.join(names)}"
        )
    known = {name for result in ours for name in (result.arm, result.arm.partition(",")[0])}
    baseline = study.baseline if study.baseline in known else None
    comparison = Comparison.of(ours, baseline=baseline, arms=names, step_seconds=step_seconds)
    arms = comparison.arms
    fitted = _without_seeds(arms)
    page = StudyPage(study.name)
    sections = {
        "": _head(study),
        "Design": _design(comparison),
        "Result": _result(page, study, comparison),
        "Tuning": _tuning(page, comparison),
        **{title: show(page, study, fitted) for title, show in map(FITS.__getitem__, study.fit)},
        "What would change our mind": study.would_change_our_mind.strip(),
        "What this does not show": _limits(arms),
        "How it was made": _machine(study, ours),
    }
    page.markdown = "\n\n".join(
        f"## {title}\n\n{text}" if title else text for title, text in sections.items() if text
    )
    page.markdown += "\n"
    answer = study.answer.strip() or _short_verdict(comparison)
    cells = [f"[{study.name}]({study.name}.md)", study.question, study.published, answer]
    page.summary = markdown_row(cells)
    return page


def _short_verdict(comparison: Comparison) -> str:
    """What is said of the arm that is the furthest below its baseline."""
    found = [arm for arm in comparison.arms if arm.base]
    below = [arm.loss - comparison.base_of(arm).loss for arm in found]
    return comparison.verdicts[below.index(min(below)) if below else 0]


# -- what the runs say


def _line(arm: Arm) -> str:
    """Its name up to the first comma: arms that agree in it are one line of a figure."""
    return arm.name.partition(",")[0]


def _numbers(arms: Sequence[Arm]) -> dict[str, int]:
    """Line -> its number, which chooses colour and marker, the same in all figures."""
    lines = dict.fromkeys(map(_line, arms))
    return {line: number for number, line in enumerate(lines)}


def _drawn(
    arms: Sequence[Arm], points: Mapping[str, Mapping[float, Sequence[float]]]
) -> list[Line]:
    """Arm -> its points as lines of the colour of its line, told apart by dashes."""
    numbers = _numbers(arms)
    ends = list(dict.fromkeys(arm.name.partition(",")[2] for arm in arms))
    return [
        Line(
            arm.name, points[arm.name], numbers[_line(arm)], ends.index(arm.name.partition(",")[2])
        )
        for arm in arms
        if len(points.get(arm.name, {})) > 1
    ]


def _loss(run: RunResult) -> float:
    return run.outcome.validation_loss or math.nan


def _size(run: RunResult, axis: str) -> float:
    """Its place on an axis; NaN where it has none."""
    model, ffn = run.budget.model, run.budget.ffn
    if axis == "expansion":
        value = ffn.params / ffn.active_params if ffn.active_params else None
    elif axis in AXIS_NAMES:
        value = getattr(model, axis)
    else:
        value = run.option(axis)
    number = finite(value)
    return float(number) if number is not None and number > 0 else math.nan


def _without_seeds(arms: Sequence[Arm]) -> list[Arm]:
    """The arms with losses less what their seed does to all alike, which moves no minimum and no slope.

    As they are where not all arms have the same seeds, or there is one arm.
    """
    seeds = arms[0].seeds
    if len(arms) == 1 or any(arm.seeds != seeds for arm in arms):
        return list(arms)
    means = {seed: fmean(arm.losses[seed] for arm in arms) for seed in seeds}
    whole = fmean(means.values())
    # The means that are taken off took their share of the scatter, of A arms 1 / A of the variance.
    scale = math.sqrt(len(arms) / (len(arms) - 1))

    def moved(run: RunResult, arm: Arm) -> RunResult:
        loss = arm.loss + (_loss(run) - means[run.seed] + whole - arm.loss) * scale
        outcome = run.outcome.model_copy(update={"validation_loss": loss})
        return run.model_copy(update={"outcome": outcome})

    return [replace(arm, results=[moved(run, arm) for run in arm.results]) for arm in arms]


def _sizes(runs: Sequence[RunResult], axis: str) -> list[float]:
    return [_size(run, axis) for run in runs]


def _axis(study: StudyConfig) -> str | None:
    numeric = [
        key
        for key, values in study.grid.items()
        if len(values) > 1 and all(isinstance(value, int | float) for value in values)
    ]
    return study.axis or (numeric[0] if len(numeric) == 1 else None)


def _axis_name(axis: str) -> str:
    return AXIS_NAMES.get(axis, axis)


# -- sections


def _head(study: StudyConfig) -> str:
    parts = [f"# {study.question.strip() or study.name}"]
    if study.answer.strip():
        parts.append(f"**{study.answer.strip()}**")
    if study.published.strip():
        parts.append(f"Published: {study.published.strip()}")
    return "\n\n".join(parts)


def _design(comparison: Comparison) -> str:
    arms = comparison.arms

    def cost(arm: Arm, part: str, key: str) -> str:
        value, other = (
            getattr(getattr(a.budget, part), key) for a in (arm, comparison.base_of(arm))
        )
        return _beside(value, other)

    rows = [
        [
            arm.name,
            ", ".join(f"`{line}`" for line in arm.differs)
            or block_of(arm.results[0].config)
            or NONE,
            cost(arm, "ffn", "params"),
            cost(arm, "ffn", "active_params"),
            cost(arm, "ffn", "flops_per_token"),
            cost(arm, "model", "flops_per_token"),
            compact(arm.budget.tokens),
            ", ".join(map(str, arm.seeds)),
        ]
        for arm in arms
    ]
    head = "arm|what differs|FFN params|FFN active|FFN FLOPs/token|model FLOPs/token|tokens|seeds"
    same = _same(
        [run for arm in arms for run in arm.results],
        {
            "d_model": "model.d_model",
            "layers": "model.num_layers",
            "tokenizer": "data.tokenizer.type",
            "vocabulary": "data.tokenizer.vocab_size",
            "sequence length": "data.seq_len",
            "batch size": "data.batch_size",
            "steps": "trainer.max_steps",
            "optimizer": "optimizer.type",
            "learning rate": "optimizer.learning_rate",
        },
    )
    beside = f"In percent: beside {comparison.baseline}. " if len(arms) > 1 else ""
    note = (
        f"{beside}FLOPs are of the forward pass; training takes three times as many. "
        f"{_pairing([arm.results[0] for arm in arms])}"
    ).rstrip()
    table = markdown_table(head.split("|"), rows, num_texts=2)
    return "\n\n".join([*([f"All runs: {same}."] if same else []), table, note])


def _pairing(runs: Sequence[RunResult]) -> str:
    """What runs of one seed have in common."""
    if len(runs) == 1:
        return ""
    orders = {(run.option("data.batch_size"), run.option("data.seq_len")) for run in runs}
    models = [run.config.get("model", {}) for run in runs]
    outside = [{k: v for k, v in m.items() if k not in ("ffn", "ffn_at")} for m in models]
    shared = ["read the same data in the same order"] if len(orders) == 1 else []
    if all(options == outside[0] for options in outside):
        shared.append("begin with the same weights outside their feed-forward blocks")
    return f"Within a seed all arms {' and '.join(shared)}." if shared else ""


def _beside(value: int, other: int) -> str:
    if not other or value == other:
        return compact(value)
    return f"{compact(value)} ({value / other - 1:+.1%})"


def _same(runs: Sequence[RunResult], options: Mapping[str, str]) -> str:
    """`d_model 64, layers 4`: those options that all runs share."""
    found: list[str] = []
    for name, path in options.items():
        values = {run.option(path) for run in runs}
        if len(values) == 1 and (value := values.pop()) is not None:
            found.append(f"{name} {value}")
    return ", ".join(found)


def _result(page: StudyPage, study: StudyConfig, comparison: Comparison) -> str:
    arms, numbers = comparison.arms, _numbers(comparison.arms)
    forest = figures.forest(arms, [numbers[_line(arm)] for arm in arms])
    parts = [
        "\n".join(f"- {verdict}" for verdict in comparison.verdicts),
        _image(page, "losses", forest, "Final loss of each arm"),
    ]
    parts += map(markdown, tables(comparison))
    parts += [f"Note: {note}" for note in comparison.notes]
    if len(arms) == 1 and len(arms[0].losses) > 2:
        parts.append(_detectable(list(arms[0].losses.values())))
    axis = _axis(study)
    if axis is not None and (lines := _lines(arms, axis)):
        svg = figures.against(lines, _axis_name(axis))
        parts.append(_image(page, "axis", svg, f"Final loss against {_axis_name(axis)}"))
    same_cost = len({arm.budget.model.flops_per_token for arm in arms}) == 1
    by, label = ("tokens", "training tokens") if same_cost else ("flops", "training FLOPs")
    if lines := _curves(arms, by):
        svg = figures.curves(lines, label)
        parts.append(_image(page, "curves", svg, f"Validation loss over {label}"))
    return "\n\n".join(parts)


def _detectable(losses: Sequence[float]) -> str:
    """Of one arm alone: what its scatter means for studies with several."""
    sd = stdev(losses)
    rows = [
        [str(n), f"{detectable_difference(sd * math.sqrt(2), n):.4f}"] for n in (2, 3, 5, 10, 20)
    ]
    return (
        f"Runs that differ in nothing but their seed end {sd:.4f} nats apart (standard deviation of "
        f"{len(losses)} runs). At 95 % confidence and with a chance of 80 %, a study of two such arms finds "
        "a difference of\n\n"
        + markdown_table(["seeds of each arm", "nats per token"], rows)
        + "\n\nif what a seed does to one arm says nothing of the other. As far as it moves both alike, "
        "pairs of one seed show smaller ones."
    )


def _lines(arms: Sequence[Arm], axis: str) -> list[Line]:
    """Their final losses over an axis; none where all are at one place of it, or at none.

    A line is what an arm's name begins with, or, where that is what moves along the axis, what is behind its
    first comma.
    """
    every = {arm.name: _size(arm.results[0], axis) for arm in arms}
    places = {name: x for name, x in every.items() if not math.isnan(x)}
    if len(set(places.values())) < 2:
        return []

    def spread(part: int) -> float:
        groups: dict[str, list[float]] = {}
        for name, x in places.items():
            groups.setdefault(name.partition(",")[part], []).append(x)
        return max(max(found) / min(found) for found in groups.values())

    part = 0 if spread(0) >= spread(2) else 2
    found: dict[str, dict[float, list[float]]] = {}
    for arm in arms:
        if arm.name in places:
            points = found.setdefault(arm.name.partition(",")[part], {})
            points.setdefault(places[arm.name], []).extend(arm.losses.values())
    return [Line(name or "all arms", points, k) for k, (name, points) in enumerate(found.items())]


def _curves(arms: Sequence[Arm], by: str) -> list[Line]:
    """Their validations over training, where all seeds have them at the same tokens."""
    found: dict[str, dict[float, list[float]]] = {}
    for arm in arms:
        points: dict[float, list[float]] = {}
        for run in arm.results:
            for x, loss in zip(*_curve(run, by), strict=True):
                points.setdefault(x, []).append(loss)
        found[arm.name] = {x: y for x, y in points.items() if len(y) == len(arm.results)}
    return _drawn(arms, found)


def _curve(run: RunResult, by: str = "flops") -> Curve:
    """Its validations: training FLOPs, or tokens, and losses."""
    per_token = TRAINING_FLOPS * run.budget.model.flops_per_token if by == "flops" else 1
    pairs = [
        (float(tokens * per_token), loss)
        for tokens, loss in zip(run.validation.tokens, run.validation.losses, strict=True)
        if tokens > 0 and loss is not None
    ]
    return [x for x, _ in pairs], [loss for _, loss in pairs]


def _tuning(page: StudyPage, comparison: Comparison) -> str:
    """Whether the optimum of what was tuned moves between arms."""
    parts: list[str] = []
    for tuning, table in zip(comparison.tuning, tuning_tables(comparison), strict=True):
        ends = (tuning.values[0], tuning.values[-1])
        at_an_end = [name for name, best in tuning.best.items() if best in ends]
        if at_an_end:
            parts.append(f"The best value is at an end of those tried: {', '.join(at_an_end)}.")
        with suppress(ValueError):  # not of numbers
            points = {
                name: {float(x): [loss] for x, loss in losses.items() if float(x) > 0}
                for name, losses in tuning.losses.items()
            }
            if lines := _drawn(comparison.arms, points):
                name = f"tuning-{tuning.option.rpartition('.')[2]}"
                svg = figures.against(lines, tuning.option)
                parts.append(_image(page, name, svg, f"Final loss by {tuning.option}"))
        parts.append(markdown(table))
    return "\n\n".join(parts)


def _limits(arms: Sequence[Arm]) -> str:
    runs = [run for arm in arms for run in arm.results]
    sizes = _range(run.budget.model.params for run in runs)
    tokens = _range(run.budget.tokens for run in runs)
    return (
        f"Models of {sizes} parameters, trained on {tokens} tokens of one corpus: at other sizes, on other "
        "text and in longer training the order may be another. The intervals are over seeds alone: they hold "
        "neither another corpus nor learning rates that were not tried."
    )


def _machine(study: StudyConfig, runs: Sequence[RunResult]) -> str:
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
        ["runs", f"{len(runs)}, {num_tuned} of them of tuning" if num_tuned else str(len(runs))]
    ]
    for key, name in facts.items():
        values = {run.machine.get(key) for run in runs} - {None}
        if values:
            rows.append([name, ", ".join(sorted(str(value)[:60] for value in values))])
    seconds = [run.outcome.wall_seconds for run in runs]
    if all(value is not None for value in seconds):
        rows.append(["training", f"{sum(filter(None, seconds)) / 3600:.1f} hours of all runs"])
    commands = (
        f"```bash\npython -m experiments.sweep --config configs/studies/{study.name}.yaml\n"
        f"python -m experiments.study_page configs/studies/{study.name}.yaml --runs runs/{study.name}\n```"
    )
    results = (
        f"The result of each run is in [{study.name}/]({study.name}/): config, budget, curves."
    )
    return f"{commands}\n\n{markdown_table(['', ''], rows)}\n\n{results}"


def _range(values: Iterable[int]) -> str:
    found = sorted(values)
    return " to ".join(dict.fromkeys([compact(found[0]), compact(found[-1])]))


# -- fits


def _isoflop(page: StudyPage, study: StudyConfig, arms: Sequence[Arm]) -> str:
    axis = study.axis if study.axis in AXIS_NAMES else "active_params"
    groups: dict[str, list[Line]] = {}
    rows: list[list[str]] = []
    notes: list[str] = []
    for line in dict.fromkeys(_line(arm) for arm in arms):
        runs = [run for arm in arms if _line(arm) == line for run in arm.results]
        flops = [float(run.budget.training_flops) for run in runs]
        found = fit_isoflop(flops, _sizes(runs, axis), [_loss(run) for run in runs])
        for number, budget in enumerate(sorted({*found.parabolas, *found.refusals})):
            parabola = found.parabolas.get(budget)
            minimum = parabola.minimum if parabola else None
            best = _with_interval(minimum, compact)
            rows.append([line, f"{budget:.3g}", best, found.refusals.get(budget, "")])
            if parabola is not None:
                by_size: dict[float, list[float]] = {}
                for size, loss in zip(parabola.sizes, parabola.losses, strict=True):
                    by_size.setdefault(size, []).append(loss)
                groups.setdefault(line, []).append(
                    Line(
                        f"{budget:.2g} FLOPs",
                        by_size,
                        number,
                        curve=parabola.curve,
                        minimum=minimum,
                    )
                )
        if found.exponent is not None:
            k = _with_interval(found.exponent, "{:.2f}".format)
            notes.append(f"{line}: the best size grows as FLOPs to the power {k}. {found.limits}")
        else:
            notes.append(f"{line}: {found.limits}")
    if groups:
        svg = figures.panels(groups, _axis_name(axis))
        picture = _image(page, "isoflop", svg, f"Final loss over {_axis_name(axis)} at each budget")
    else:
        picture = ""
    head = ["line", "training FLOPs", f"best {_axis_name(axis)}", "why none"]
    return "\n\n".join(part for part in (picture, markdown_table(head, rows), *notes) if part)


def _clark(page: StudyPage, study: StudyConfig, arms: Sequence[Arm]) -> str:
    runs = [run for arm in arms for run in arm.results]
    return _fitted(
        {"N": _sizes(runs, "active_params"), "E": _sizes(runs, "expansion")},
        [_loss(run) for run in runs],
        CLARK,
        "N are the active parameters of the model; E the parameters of the feed-forward blocks over those "
        "that a token uses.",
        held=("E_start", "E_max"),
    )


def _granularity(page: StudyPage, study: StudyConfig, arms: Sequence[Arm]) -> str:
    axis = _axis(study)
    if axis is None:
        return "No fit: the study names no `axis` that is the granularity."
    parts: list[str] = []
    rows: list[list[str]] = []
    drawn: list[Line] = []
    for line in _lines(arms, axis):
        pairs = [(x, loss) for x, losses in line.points.items() for loss in losses]
        try:
            found = fit_parabola(*zip(*pairs, strict=True))
        except ConfigError as error:
            rows.append([line.name, NONE, f"{error}"])
            continue
        best = _with_interval(found.minimum, "{:.1f}".format)
        rows.append([line.name, best, found.refusal])
        drawn.append(
            Line(line.name, line.points, line.number, curve=found.curve, minimum=found.minimum)
        )
    if drawn:
        svg = figures.against(drawn, _axis_name(axis))
        parts.append(
            _image(page, "granularity", svg, "Final loss over granularity, with parabolas")
        )
    parts.append(markdown_table(["line", "granularity with the lowest loss", "why none"], rows))
    every = [run for arm in arms for run in arm.results]
    runs = [run for run in every if not math.isnan(_size(run, axis))]
    variables = {
        "G": _sizes(runs, axis),
        "N": _sizes(runs, "params"),
        "D": [float(run.budget.tokens) for run in runs],
    }
    vary = {name: len(set(values)) > 1 for name, values in variables.items()}
    if vary["N"] and vary["D"]:
        law, note = GRANULARITY, "G is the axis; N all parameters; D training tokens."
    else:
        law = power_law("G", "granularity")
        note = "At one size and one number of tokens Krajewski's form is this one in G alone."
        variables = {"G": variables["G"]}
    parts.append(_fitted(variables, [_loss(run) for run in runs], law, note))
    return "\n\n".join(parts)


def _leverage(page: StudyPage, study: StudyConfig, arms: Sequence[Arm]) -> str:
    by_name = {arm.name: arm for arm in arms}
    baseline = next(arm for arm in arms if arm.base is None)
    line = _line(baseline)
    # Final losses over all budgets of the baseline's line: of runs whose learning rate has decayed.
    sizes: dict[int, list[tuple[float, float]]] = {}
    for run in (run for arm in arms if _line(arm) == line for run in arm.results):
        sizes.setdefault(run.seed, []).append((float(run.budget.training_flops), _loss(run)))
    whole = {
        seed: ([flops for flops, _ in sorted(points)], [loss for _, loss in sorted(points)])
        for seed, points in sizes.items()
        if len({flops for flops, _ in points}) == len(points) > 1
    }
    rows: list[list[str]] = []
    drawn: dict[str, dict[float, Sequence[float]]] = {}
    for arm in arms:
        if _line(arm) == line:
            continue
        size = arm.name.partition(",")[2]
        dense = by_name.get(f"{line},{size}", baseline) if size else baseline
        curves = [{run.seed: _curve(run) for run in side.results} for side in (dense, arm)]
        ends = {r.seed: ([float(r.budget.training_flops)], [_loss(r)]) for r in arm.results}
        cells: list[str] = []
        for which, pair in enumerate((curves, (whole, ends)) if whole else (curves,)):
            try:
                found = leverage(*pair)
            except ConfigError as error:
                cells.append(NONE if which else str(error))
                continue
            values = list(found.by_seed.values())
            mean = fmean(values) if len(values) == 1 else None
            cells.append(_with_interval(found.interval, "{:.2f}".format, mean))
            if which == 0:
                x = _size(arm.results[0], "expansion")
                drawn.setdefault(size or "leverage", {})[x] = values
        rows.append([arm.name, dense.name, *cells])
    if not rows:
        return f"No arm beside those of {line}."
    parts: list[str] = []
    lines = [Line(n, points, k) for k, (n, points) in enumerate(drawn.items()) if len(points) > 1]
    if lines:
        svg = figures.against(lines, AXIS_NAMES["expansion"], y_label="leverage")
        parts.append(
            _image(page, "leverage", svg, "Efficiency leverage over the number of experts")
        )
    head = ["arm", "beside", "within the runs", *(["by final losses"] if whole else [])]
    note = (
        "C_dense / C_arm: training FLOPs that the dense model takes over those of the arm, at the same loss "
        "(Tian et al. 2025, arXiv 2507.17702); above 1 the arm saves. Within the runs: where both curves of "
        "a seed come down to the higher of their two final losses."
    )
    if whole:
        note += (
            f" By final losses: beside those of all arms of {line}, between which the FLOPs are read; a "
            "dash where the arm's loss lies beyond them."
        )
    return "\n\n".join([*parts, markdown_table(head, rows, num_texts=2), note, LEVERAGE_LIMITS])


def _fitted(
    variables: Mapping[str, Sequence[float]],
    losses: Sequence[float],
    law: Law,
    note: str,
    held: Sequence[str] = (),
) -> str:
    """A table of the parameters of a fit, or why there is none.

    Args:
        held: parameters that are held at their published values where the runs do not determine them.
    """
    fixed = {name: law.published[name] for name in held}
    found = None
    try:
        with suppress(ConfigError) if held else nullcontext():  # too few to determine all
            found = fit(law, variables, losses)
        if found is None or {*held} & {*found.undetermined}:
            note += (
                f" {' and '.join(held)} cannot be told from these runs, and are held as published."
            )
            found = fit(law, variables, losses, fixed=fixed)
    except ConfigError as error:
        return f"`{law.formula}` ({law.source}): no fit; {error}."
    rows = [
        [
            name,
            _with_interval(interval, "{:.3g}".format),
            *([f"{law.published[name]:g}"] if law.published else []),
        ]
        for name, interval in found.parameters.items()
    ]
    return "\n\n".join(
        [
            f"`{law.formula}` ({law.source}). {note}",
            markdown_table(
                ["parameter", "fitted", *(["published"] if law.published else [])], rows
            ),
            f"{_held_out(found)} {found.limits}",
        ]
    )


def _held_out(found: Fit) -> str:
    scatter = math.sqrt(fmean(value**2 for value in found.residuals))
    text = f"Residuals are {scatter:.2%} of the loss;"
    if found.held_out_error is None:
        return f"{text} without the {found.num_held_out} largest runs too few are left to fit."
    return (
        f"{text} fitted without the {found.num_held_out} largest runs, the form is "
        f"{found.held_out_error:.2%} off on those."
    )


FITS: Mapping[str, tuple[str, Callable[[StudyPage, StudyConfig, Sequence[Arm]], str]]] = {
    "isoflop": ("Best size at each budget", _isoflop),
    "clark": ("Scaling with experts", _clark),
    "granularity": ("Best granularity", _granularity),
    "leverage": ("Efficiency leverage", _leverage),
}
"""What a study may ask for in `fit` -> title and text of its section."""


# -- Markdown


def _image(page: StudyPage, name: str, svg: str, alt: str) -> str:
    page.figures[f"{name}.svg"] = svg
    return f"![{alt}]({page.name}/{name}.svg)"


def _with_interval(
    interval: Interval | None, form: Callable[[float], str], value: float | None = None
) -> str:
    """`1.9512 [1.9440, 1.9583]`; the value alone where there is no interval."""
    if interval is None:
        return NONE if value is None else form(value)
    if not math.isfinite(interval.high - interval.low):
        return f"{form(interval.value)} (not determined)"
    return f"{form(interval.value)} [{form(interval.low)}, {form(interval.high)}]"


HEAD = "| study | question | published | found here |\n|---|---|---|---|\n"
TITLE = (
    "# Studies\n\nEach is a file in `configs/studies/`, run as its page says; what every run measured stands "
    "beside its page.\n\n"
)


def with_row(text: str, row: str) -> str:
    """The table of all studies with this row, in the place of the one of the same study."""
    name = row.split("|")[1]
    rows = [line for line in text.splitlines() if line.startswith("| [")]
    rows = [row if line.split("|")[1] == name else line for line in rows]
    if row not in rows:
        rows.append(row)
    return TITLE + HEAD + "\n".join(rows) + "\n"
