"""Comparison of the arms of a study: losses with intervals, differences from a baseline, and cost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean, stdev

from moe_ffn.config.errors import ConfigError, nearest_or_all, show
from moe_ffn.ffn.match import MAX_MISMATCH
from moe_ffn.runs.budget import Budget
from moe_ffn.studies.differences import option_differences, require_comparable, require_same_options
from moe_ffn.studies.result import RunResult, compared_with_ngrams, first_at
from moe_ffn.studies.statistics import (
    EQUALITY_MARGIN,
    MIN_SEEDS,
    SMALL_DIFFERENCE,
    Interval,
    Over,
    PairedDifference,
    bootstrap_interval,
    mean_interval,
    paired_differences,
)


@dataclass(frozen=True)
class TimeToBaseline:
    """Cost until an arm's validation loss reached the baseline's final loss, as means over its seeds."""

    num_reached: int
    """Number of seeds that reached it; the costs are None unless all seeds did."""
    num_seeds: int
    steps: float | None = None
    interval: Interval | None = None
    """Interval of `steps` over seeds; None with fewer than `MIN_SEEDS`."""
    flops: float | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Arm:
    """An arm of a study: runs that differ only in their seed, and their statistics."""

    name: str
    results: Sequence[RunResult]
    """One run per seed, sorted by seed."""
    base: str | None = None
    """Arm that this arm is compared with; None for a baseline."""
    differs: Sequence[str] = ()
    """Options that differ from the base arm, one line each."""
    difference: PairedDifference | None = None
    """Difference from the base arm; None if they share no seed that allows one."""
    reached: TimeToBaseline | None = None
    timed_step_seconds: float | None = None
    """Seconds of a step, if measured separately from the runs."""
    on_frontier: Mapping[str, bool] = field(default_factory=dict)
    """Kind of cost, a key of `COSTS` -> whether no other arm is better in both loss and cost."""

    @property
    def seeds(self) -> list[int]:
        return [result.seed for result in self.results]

    @cached_property
    def losses(self) -> Mapping[int, float]:
        """Seed -> final validation loss."""
        losses = {r.seed: r.outcome.validation_loss for r in self.results}
        return {seed: loss for seed, loss in losses.items() if loss is not None}

    @property
    def loss(self) -> float:
        """Mean final validation loss, in nats per token."""
        return fmean(self.losses.values())

    @property
    def sd(self) -> float | None:
        """Standard deviation over the seeds; None for one seed."""
        return stdev(self.losses.values()) if len(self.losses) > 1 else None

    @cached_property
    def interval(self) -> Interval | None:
        """Interval of the mean over seeds, or over the validation windows of a single seed.

        None with two seeds, which is less than `MIN_SEEDS`, or if window losses are missing.
        """
        if len(self.losses) > 1:
            return mean_interval(list(self.losses.values()))
        windows = [loss for loss in self.results[0].window_losses if loss is not None]
        return bootstrap_interval(windows) if len(windows) > 1 else None

    @property
    def interval_over(self) -> Over:
        return "seeds" if len(self.losses) > 1 else "windows"

    @property
    def task(self) -> str:
        """Kind of tokens that the model predicts; losses of different tasks are not comparable."""
        first = self.results[0]
        if first.option("model.causal") is not False:
            return "next tokens"
        return f"masked tokens ({first.option('objective.masked_fraction')} of them)"

    @cached_property
    def budget(self) -> Budget:
        """Budget of a run, with the mean of the tokens, since seeds may stop at different steps."""
        tokens = fmean(result.budget.tokens for result in self.results)
        return replace(self.results[0].budget, tokens=round(tokens))

    @property
    def steps(self) -> float:
        return fmean(result.outcome.step for result in self.results)

    @property
    def step_seconds(self) -> float | None:
        """Seconds of a step, timed separately or else in the runs."""
        return self.timed_step_seconds or self.mean("step_seconds")

    @property
    def tokens_per_second(self) -> float | None:
        if self.timed_step_seconds:
            return self.budget.tokens / self.steps / self.timed_step_seconds
        return self.mean("tokens_per_second")

    @property
    def training_flops(self) -> float:
        """FLOPs of all forward and backward passes of a run."""
        return self.budget.training_flops

    @property
    def training_seconds(self) -> float | None:
        """Seconds of all steps of a run, at `step_seconds` each."""
        return None if self.step_seconds is None else self.steps * self.step_seconds

    def mean(self, key: str) -> float | None:
        """Return the mean of a field of `Outcome` over the runs that have it."""
        values = [getattr(result.outcome, key) for result in self.results]
        known = [float(value) for value in values if value is not None]
        return fmean(known) if known else None

    @property
    def alarms(self) -> Mapping[str, int]:
        """Kind of alarm -> number of alarms in all runs."""
        return sum((Counter(result.outcome.alarms) for result in self.results), Counter[str]())


COSTS = {
    "FLOPs": lambda arm: arm.training_flops,
    "seconds": lambda arm: arm.training_seconds,
    "parameters": lambda arm: arm.budget.model.params,
}
"""Kind of cost -> function that returns the cost of an arm's run, or None if it is unknown."""


@dataclass(frozen=True)
class Tuning:
    """Final losses for each value of a tuned option, which show whether the optimum differs between arms."""

    option: str
    """Dotted path; commas join options that were tuned together."""
    values: Sequence[str]
    by_seed: Mapping[str, Mapping[str, Mapping[int, float]]]
    """Arm -> value -> seed -> final loss, for the seeds that all values of the arm have."""
    own: Mapping[str, str]
    """Arm -> its value in the comparison."""

    @property
    def losses(self) -> Mapping[str, Mapping[str, float]]:
        """Arm -> value -> mean final loss."""
        return {
            arm: {value: fmean(losses.values()) for value, losses in by_value.items()}
            for arm, by_value in self.by_seed.items()
        }

    @property
    def best(self) -> Mapping[str, str]:
        """Arm -> value with the lowest mean."""
        return {arm: min(losses, key=losses.__getitem__) for arm, losses in self.losses.items()}

    @property
    def at_an_end(self) -> list[str]:
        """Arms whose best value has the lowest or highest number that the arm tried of an option."""
        return [arm for arm, value in self.best.items() if _is_at_an_end(value, self.losses[arm])]

    @property
    def verdicts(self) -> Sequence[str]:
        """Sentences on the best values, and on what arms gain at them."""
        best = self.best
        arms = {
            value: ", ".join(arm for arm, its_best in best.items() if its_best == value)
            for value in self.values
            if value in best.values()
        }
        if len(arms) == 1:
            optima = f"The lowest mean of every arm is at {next(iter(arms))}"
        else:
            each = "; ".join(f"{value} for {names}" for value, names in arms.items())
            optima = f"The lowest mean is at {each}"
        gains = [self._gain(arm) for arm, value in best.items() if value != self.own[arm]]
        if not gains:
            optima += ", as in the compared runs"
        return [f"{optima}.", *gains]

    def _gain(self, arm: str) -> str:
        """Describe how much lower the lowest mean of an arm is than that of its compared runs."""
        own = self.own[arm]
        lowest = self.by_seed[arm][self.best[arm]]
        gains = [loss - lowest[seed] for seed, loss in self.by_seed[arm][own].items()]
        interval = mean_interval(gains)
        if interval is None:
            many = f"the mean of {len(gains)} seeds, too few to judge"
            seeds = "one seed" if len(gains) == 1 else many
            return f"There the loss of {arm} is {fmean(gains):.4f} lower than at {own}, in {seeds}."
        gain, low, high = interval
        doubt = "" if low > 0 else f", not distinguishable from 0 with {len(gains)} seeds"
        where = f"[{low:.4f}, {high:.4f}] lower than at {own}"
        return f"There the loss of {arm} is {gain:.4f} {where}{doubt}."


@dataclass(frozen=True)
class Comparison:
    """The arms of a study, or of any comparable runs, with the baseline first."""

    arms: Sequence[Arm]
    baseline: str
    """Name of the baseline: `gelu`, or `gelu at the same d_model`."""
    notes: Sequence[str] = ()
    """Remarks about the runs, one sentence each."""
    tuning: Sequence[Tuning] = ()
    question: str = ""
    answer: Sequence[str] = ()
    """Sentences that replace the computed verdicts."""

    def __repr__(self) -> str:
        return f"Comparison({', '.join(arm.name for arm in self.arms)}, with {self.baseline} as baseline)"

    def base_of(self, arm: Arm) -> Arm:
        """Return the arm that `arm` is compared with; for a baseline, the arm itself."""
        return self.arm(arm.base or arm.name)

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    def seed_differences(self, arm: Arm) -> list[float]:
        """Return the loss of an arm minus that of its baseline, for each shared seed."""
        base = self.base_of(arm).losses
        return [loss - base[seed] for seed, loss in arm.losses.items() if seed in base]

    @property
    def verdicts(self) -> list[str]:
        """Conclusions that the intervals support, one sentence per arm."""
        if self.answer:
            return [*self.answer]
        if not any(arm.base for arm in self.arms):
            return [*map(_alone, self.arms)]
        return [
            _verdict(arm, self.base_of(arm), self.seed_differences(arm))
            for arm in self.arms
            if arm.base
        ]

    @property
    def compared_with_ngrams(self) -> str:
        """Sentence that compares all runs with 5-gram models of the tokens they read; empty if unknown."""
        return compared_with_ngrams(run for arm in self.arms for run in arm.results)

    @classmethod
    def of(
        cls,
        results: Sequence[RunResult],
        *,
        baseline: str | None = None,
        baselines: Mapping[str, str | None] = {},
        arms: Sequence[str] = (),
        step_seconds: Mapping[str, float] | None = None,
        question: str = "",
        margin: float = EQUALITY_MARGIN,
    ) -> Comparison:
        """Compare finished runs.

        The `baseline` is by default the first arm with the most common prediction task. For arms of a grid,
        such as `gelu,d_model=64`, it may be the part before the first comma: then each arm is compared with
        that arm at the same grid values. `baselines` (arm -> arm, or None) replace it. Arms are shown in the
        order of `arms`, then of the runs. `step_seconds` are measured separately from the runs.

        Raises ConfigError if the runs differ in data, tokenizer or validation windows, runs of one arm differ
        in their options, or no arm has the name of the baseline.
        """
        require_comparable(results)
        groups: dict[str, list[RunResult]] = {name: [] for name in arms}
        for result in results:
            if not result.tuning:
                groups.setdefault(result.arm, []).append(result)
        groups = {name: sorted(g, key=lambda r: r.seed) for name, g in groups.items() if g}
        if not groups:
            raise ConfigError("all runs are tuning runs; add the runs that they are tuned for")
        for name in groups:
            require_same_options(name, groups[name])
        baseline = baseline or _default_baseline(groups)
        bases = _bases(baseline, groups)
        bases |= {arm: b if b in groups else None for arm, b in baselines.items() if arm in groups}
        names = sorted(groups, key=lambda name: name != baseline)
        seconds = step_seconds or {}
        with_seconds = {result.arm for result in results if result.outcome.step_seconds}
        untimed = [name for name in names if name in with_seconds - seconds.keys()]
        if untimed:  # times of a busy and an idle machine are not comparable
            seconds = {}
        plain = [Arm(n, groups[n], bases[n], timed_step_seconds=seconds.get(n)) for n in names]
        by_name = {arm.name: arm for arm in plain}
        pairs = [(arm, by_name[arm.base]) for arm in plain if arm.base]
        paired = paired_differences(
            {arm.name: (arm.losses, base.losses) for arm, base in pairs if arm.task == base.task},
            margin,
        )
        compared = [
            replace(
                arm,
                difference=paired.get(arm.name) or _over_windows(arm, base),
                reached=_reached(arm, base),
                differs=option_differences(base.results[0].config, arm.results[0].config),
                on_frontier={kind: _is_on_frontier(arm, plain, kind) for kind in COSTS},
            )
            for arm in plain
            for base in [by_name[arm.base or arm.name]]
        ]
        notes = _notes(compared)
        if step_seconds and untimed:
            notes.append(
                "Seconds are measured in the runs, because not all arms were timed separately "
                f"({', '.join(untimed)})."
            )
        label = baseline
        if baseline not in groups:
            first = next(name for name in groups if name.startswith(f"{baseline},"))
            # A value may have commas of its own: `router={type:top_k,k:1}`.
            keys = [part.partition("=")[0] for part in first.split(",")[1:] if "=" in part]
            label = f"{baseline} at the same {' and '.join(keys)}"
        if baselines:
            label += ", or the arm's own baseline"
        return cls(compared, label, notes, _tunings(results, names), question)


# -- the differences


def _default_baseline(groups: Mapping[str, Sequence[RunResult]]) -> str:
    """Return the first arm with the most common prediction task."""
    tasks = {name: Arm(name, group).task for name, group in groups.items()}
    ((most_common, _),) = Counter(tasks.values()).most_common(1)
    return next(name for name, task in tasks.items() if task == most_common)


def _bases(baseline: str, arms: Iterable[str]) -> dict[str, str | None]:
    """Return arm -> the arm it is compared with (None for a baseline); ConfigError for an unknown one."""
    known = set(arms)
    if baseline in known:
        return {arm: None if arm == baseline else baseline for arm in arms}
    bases = {arm: f"{baseline},{arm.partition(',')[2]}" for arm in arms}
    if known.isdisjoint(bases.values()):
        hint = nearest_or_all(baseline, arms, "the arms are")
        raise ConfigError(f"baseline: there is no finished run of an arm {show(baseline)}{hint}")
    # An arm is compared with nothing if the baseline has no run at its grid values.
    return {arm: base if base in known - {arm} else None for arm, base in bases.items()}


def _over_windows(arm: Arm, base: Arm) -> PairedDifference | None:
    """Compare the single seed that both arms share, window by window; None without one."""
    if arm is base or arm.task != base.task:
        return None
    base_windows = {result.seed: result.window_losses for result in base.results}
    for result in arm.results:
        pairs = zip(result.window_losses, base_windows.get(result.seed, ()), strict=False)
        gaps = [ours - theirs for ours, theirs in pairs if ours is not None and theirs is not None]
        if len(gaps) > 1:
            interval = bootstrap_interval(gaps)
            return PairedDifference(interval.value, "windows", len(gaps), interval)
    return None


def _verdict(arm: Arm, base: Arm, by_seed: Sequence[float]) -> str:
    found, baseline = arm.difference, base.name
    if arm.task != base.task:
        tasks = f"{arm.name} predicts {arm.task} and {baseline} {base.task}"
        return f"{tasks}, so their losses are not comparable."
    if found is None:
        shared = set(arm.losses) & set(base.losses)
        why = "have one seed in common" if shared else "have no seed in common"
        return f"{arm.name} and {baseline} {why}, so no difference is given."
    needed = found.seeds_needed or 0
    enough = f"about {needed:,} seeds" if needed <= 1000 else "over 1,000 seeds"
    if found.interval is None:
        each = " and ".join(f"{value:+.4f}" for value in by_seed)
        return (
            f"{arm.name} minus {baseline}: {each} nats per token in {found.num_pairs} seeds, too few for an "
            f"interval; if seeds differ as these do, {enough} detect {SMALL_DIFFERENCE:g} with 80 % "
            "power."
        )
    mean, low, high = found.interval
    ends = sorted((abs(low), abs(high)))
    better = "better" if mean < 0 else "worse"
    size = f"by {abs(mean):.4f} [{ends[0]:.4f}, {ends[1]:.4f}] nats per token"
    signed = f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]"
    if found.over == "windows":
        where = "on this text with one shared seed"
        if low <= 0 <= high:
            return (
                f"{arm.name} and {baseline} differ by {signed} {where}: no difference seen, no conclusion "
                "about other seeds."
            )
        return f"{arm.name} is {better} than {baseline} {size} {where}: no conclusion about other seeds."
    seen = f"{found.num_pairs} seeds, p {p_text(found.p_value)}"
    equality = f"{found.margin:g} nats per token"
    if found.is_claimed:
        but = f"; still, they are equal within {equality}" if found.is_equal else ""
        return f"{arm.name} is {better} than {baseline} {size} ({seen}){but}."
    if found.is_equal:
        return (
            f"{arm.name} equals {baseline} within {equality}: {signed} ({found.num_pairs} seeds, two "
            f"one-sided tests, p {p_text(found.p_equal)})."
        )
    small = f"with 80 % power, these seeds detect {found.detectable:.4f}"
    if found.seeds_needed and found.seeds_needed > found.num_pairs:
        small += f", and {enough} {SMALL_DIFFERENCE:g}"
    if not low <= 0 <= high:  # significant alone, but not after Holm's correction
        return (
            f"{arm.name} may be {better} than {baseline}, {signed} ({seen} after Holm's correction); "
            f"{small}."
        )
    return (
        f"{arm.name} or {baseline}: undecided, {signed} nats per token ({found.num_pairs} seeds; p "
        f"{p_text(found.p_value)} for a difference, {p_text(found.p_equal)} for equality within "
        f"{found.margin:g}); {small}."
    )


def _alone(arm: Arm) -> str:
    if arm.sd is None:
        return f"{arm.name}: one run with one seed: no conclusion about other seeds."
    if arm.interval is None:
        each = " and ".join(f"{loss:.4f}" for loss in arm.losses.values())
        return f"{arm.name}: {each} nats per token in {len(arm.losses)} seeds; an interval needs {MIN_SEEDS}."
    low, high = arm.interval[1:]
    return (
        f"{arm.name}: {arm.loss:.4f} [{low:.4f}, {high:.4f}] nats per token over {len(arm.losses)} seeds, "
        f"whose standard deviation is {arm.sd:.4f}."
    )


def p_text(p_value: float | None) -> str:
    """Format a p-value as `0.03` or `< 0.001`; a dash for None."""
    if p_value is None:
        return "-"
    return "< 0.001" if p_value < 0.001 else f"{p_value:.2g}"


# -- cost of reaching the baseline's loss


def _reached(arm: Arm, base: Arm) -> TimeToBaseline | None:
    """Compare each seed with the baseline's loss in the same seed, or with its mean if it lacks the seed.

    None if the arms share no seed or predict different things.
    """
    if arm.task != base.task or {*arm.seeds}.isdisjoint(base.seeds):
        return None
    targets = (base.losses.get(result.seed, base.loss) for result in arm.results)
    reached = map(first_step_at, arm.results, targets)
    steps = [step for step in reached if step is not None]
    num_seeds = len(arm.results)
    if len(steps) < num_seeds:
        return TimeToBaseline(len(steps), num_seeds)
    mean = fmean(steps)
    return TimeToBaseline(
        num_seeds,
        num_seeds,
        steps=mean,
        interval=mean_interval(steps),
        flops=mean / arm.steps * arm.training_flops if arm.steps else None,
        seconds=None if arm.step_seconds is None else mean * arm.step_seconds,
    )


def first_step_at(result: RunResult, loss: float) -> float | None:
    """Return the step at which the interpolated validation curve first reaches this loss; see `first_at`."""
    curve = zip(result.validation.steps, result.validation.losses, strict=True)
    known = [(step, value) for step, value in curve if value is not None]
    return first_at([step for step, _ in known], [value for _, value in known], loss)


def _is_on_frontier(arm: Arm, arms: Sequence[Arm], kind: str) -> bool:
    """Return True if no arm is better in loss and cost; costs within `MAX_MISMATCH` count as equal."""
    cost = COSTS[kind](arm)
    if cost is None:
        return False
    for other in arms:
        other_cost = COSTS[kind](other)
        if other_cost is None or other is arm or other.task != arm.task:
            continue
        is_cheaper = other_cost < cost / (1 + MAX_MISMATCH)
        is_affordable = other_cost <= cost * (1 + MAX_MISMATCH)
        if (other.loss < arm.loss and is_affordable) or (other.loss == arm.loss and is_cheaper):
            return False
    return True


def _notes(arms: Sequence[Arm]) -> list[str]:
    """List the weaknesses of a comparison, one sentence each."""
    notes: list[str] = []
    results = [result for arm in arms for result in arm.results]
    tokens = {arm.name: arm.budget.tokens for arm in arms}
    if len(set(tokens.values())) > 1:
        least, most = (f(tokens, key=tokens.__getitem__) for f in (min, max))
        notes.append(
            f"The arms are trained on different numbers of tokens: {least} on {tokens[least]:,}, {most} on "
            f"{tokens[most]:,}; final losses are compared as they are."
        )
    over_windows = any(
        arm.interval_over == "windows" or (arm.difference and arm.difference.over == "windows")
        for arm in arms
    )
    if over_windows:
        notes.append(
            "One seed has no interval over seeds, because one run does not show how far runs with other "
            "seeds differ. Intervals of one seed are over windows of the validation text (bootstrap); they "
            "show how much the text matters, not the training seed."
        )
    if any(arm.difference and arm.difference.is_pooled for arm in arms):
        notes.append(
            "With two seeds, the standard error of a difference is pooled over all arms of a baseline "
            "(randomized blocks), as if every arm varied equally."
        )
    seeds = {tuple(arm.seeds) for arm in arms}
    if len(seeds) > 1 and not over_windows:
        notes.append(
            "Not all arms have the same seeds: means are over all seeds of an arm, differences over the "
            "seeds that it shares with the baseline."
        )
    is_timed = any(arm.timed_step_seconds for arm in arms)
    seconds = f"seconds{' of the runs' if is_timed else ''} are not comparable"
    for key, effect in {
        "precision": "losses and seconds may depend on it",
        "processor": f"{seconds}, and losses of the same seed differ slightly",
        "gpu": seconds,
        "threads": f"{seconds}, and losses differ slightly",
        "torch": f"{seconds}, and losses may depend on it",
        "git_revision": "they may not train the same model",
    }.items():
        values = {str(result.machine.get(key)) for result in results}
        if len(values) > 1:
            notes.append(f"The runs differ in {key} ({', '.join(sorted(values))}): {effect}.")
    return notes


# -- tuning


def _is_at_an_end(best: str, tried: Iterable[str]) -> bool:
    for value, *column in zip(best.split(", "), *(t.split(", ") for t in tried), strict=False):
        own, *numbers = map(_number, (value, *column))
        known = [number for number in numbers if number is not None]  # words have no order
        if own is not None and min(known) < max(known) and own in (min(known), max(known)):
            return True
    return False


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _tunings(results: Sequence[RunResult], arms: Sequence[str]) -> list[Tuning]:
    """Return a `Tuning` for each set of tuned options."""
    tuned: dict[tuple[str, ...], list[RunResult]] = {}
    for result in results:
        if result.tuning:
            tuned.setdefault(tuple(result.tuning), []).append(result)
    tunings = [_tuning(keys, runs, results, arms) for keys, runs in tuned.items()]
    return [tuning for tuning in tunings if tuning.losses]


def _tuning(
    keys: tuple[str, ...],
    tuned: Sequence[RunResult],
    results: Sequence[RunResult],
    arms: Sequence[str],
) -> Tuning:
    def identity_of(key: str, result: RunResult) -> str:
        return json.dumps([key, result.option(key)], sort_keys=True)

    # A study gives a block without its defaults, which the options of a run have.
    shortened = {
        identity_of(key, result): result.tuning[key]
        for result in tuned
        for key in keys
        if isinstance(result.option(key), Mapping)
    }

    def value_of(result: RunResult) -> str:
        used = {key: result.option(key) for key in keys}
        given = {
            key: result.tuning.get(key, shortened.get(identity_of(key, result), value))
            for key, value in used.items()
        }
        # A study may give 1 to an option that stores 1.0; they are one value.
        values = [used[key] if given[key] == used[key] else given[key] for key in keys]
        text = ", ".join(v if isinstance(v, str) else json.dumps(v, sort_keys=True) for v in values)
        # Numbers come before other values, sorted by size.
        ranks[text] = [(0, v, "") if isinstance(v, int | float) else (1, 0, str(v)) for v in values]
        return text

    ranks: dict[str, list[tuple[int, float, str]]] = {}
    losses: dict[str, dict[str, dict[int, float]]] = {}
    compared = [result for result in results if not result.tuning]
    for result in [*tuned, *compared]:
        loss = result.outcome.validation_loss
        if result.main_arm in arms and loss is not None:
            by_value = losses.setdefault(result.main_arm, {})
            by_value.setdefault(value_of(result), {})[result.seed] = loss
    own = {result.arm: value_of(result) for result in compared}
    by_seed: dict[str, dict[str, dict[int, float]]] = {}
    for arm in arms:
        by_value = losses.get(arm, {})
        seeds = set.intersection(*map(set, by_value.values())) if len(by_value) > 1 else set()
        if seeds:
            by_seed[arm] = {v: {seed: loss[seed] for seed in seeds} for v, loss in by_value.items()}
    values = {value for by_value in by_seed.values() for value in by_value}
    return Tuning(
        ", ".join(keys),
        sorted(values, key=ranks.__getitem__),
        by_seed,
        {arm: own[arm] for arm in by_seed},
    )
