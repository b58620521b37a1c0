"""Leaderboard in Markdown: the arms of all studies, in one table for each training budget."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moe_ffn.config.errors import ConfigError
from moe_ffn.config.files import read_object
from moe_ffn.config.numbers import NONE, compact, counted, number
from moe_ffn.ffn.match import MAX_MISMATCH
from moe_ffn.report.html import render
from moe_ffn.report.studies.markdown import escape_markdown, markdown_table, with_interval
from moe_ffn.studies.comparison import Arm, Comparison, p_text
from moe_ffn.studies.differences import VALIDATION_OPTIONS, identity
from moe_ffn.studies.gather import gather
from moe_ffn.studies.result import RESULTS_FILE, RunResult, compared_with_ngrams
from moe_ffn.studies.statistics import MIN_SEEDS, SIGNIFICANT, Interval, paired_differences


@dataclass(frozen=True)
class Board:
    """The arms of one budget, with the lowest loss first."""

    comparison: Comparison
    """Compares each arm, named STUDY/ARM, with the dense baseline."""

    @property
    def arms(self) -> Sequence[Arm]:
        return self.comparison.arms

    @property
    def base(self) -> Arm:
        return self.comparison.arm(self.comparison.baseline)

    @property
    def winner(self) -> Arm:
        return _best(self.arms)

    @property
    def cost(self) -> tuple[int, int]:
        """FLOPs per token, and tokens."""
        return self.base.budget.model.flops_per_token, self.base.budget.tokens

    @property
    def title(self) -> str:
        budget = self.base.budget
        flops = compact(budget.model.flops_per_token)
        return f"{compact(budget.tokens)} tokens, {flops} FLOPs per token"

    @property
    def num_rivals(self) -> int:
        """Number of other arms that do not differ significantly from the winner."""
        others = {a.name: (a.losses, self.winner.losses) for a in self.arms if a is not self.winner}
        return len(others) - sum(d.is_claimed for d in paired_differences(others).values())

    def speed(self, arm: Arm) -> float | None:
        """Return the tokens per second over those of the best dense block timed in the same session."""
        session = [a for a in self.arms if a.timed_step_seconds and _study(a) == _study(arm)]
        dense = [*filter(_is_dense, session)]
        speed, dense_speed = (
            a.tokens_per_second if a in session else None for a in (arm, _best(dense or [arm]))
        )
        return speed / dense_speed if dense and speed and dense_speed else None

    def flops_speed_up(self, arm: Arm) -> str:
        """Return the baseline's training FLOPs over those in which the arm reaches its loss."""
        reached = arm.reached
        if reached is None or not reached.flops or not reached.steps:
            return "not reached" if reached else NONE
        ratio, ends = self.base.training_flops / reached.flops, reached.interval
        # An interval of few seeds may reach below 0 steps, which no run can take.
        ratios = ends and [
            ratio * reached.steps / steps if steps > 0 else math.inf
            for steps in (ends.high, ends.low)
        ]
        return with_interval(Interval(ratio, *ratios) if ratios else None, "{:.2f}".format, ratio)

    def seconds_speed_up(self, arm: Arm) -> float | None:
        """Return the baseline's seconds over those in which the arm reaches its loss."""
        reached, speed = arm.reached, self.speed(arm)
        if reached is None or not reached.steps or not speed:
            return None
        return speed * self.base.budget.tokens / (arm.budget.tokens * reached.steps / arm.steps)


def leaderboard(studies: Path, link: str = "studies") -> str:
    """Return the page of all studies in a folder, to whose pages it links by the path `link`.

    Raises ConfigError if the folder has no budget with a dense block and another arm.
    """
    seconds: dict[str, float] = {}
    timed_on: dict[str, list[str]] = {}
    # Training without its seed -> STUDY/ARM of each study that has it.
    names: dict[str, list[str]] = {}
    by_seed: dict[tuple[str, int], RunResult] = {}
    for folder in sorted(table.parent for table in studies.glob(f"*/{RESULTS_FILE}")):
        study = gather([folder])
        seconds |= {f"{folder.name}/{arm}": value for arm, value in study.step_seconds.items()}
        for path in study.timing_files:
            machine = (read_object(path) or {}).get("machine", {})
            device = str(machine.get("gpu") or machine.get("processor"))
            timed_on.setdefault(device, []).append(folder.name)
        for result in study.results:
            is_taught = result.option("init_from") or result.option("objective.distill")
            if not result.tuning and not is_taught:
                training, name = identity(result), f"{folder.name}/{result.arm}"
                names[training] = [*dict.fromkeys([*names.get(training, []), name])]
                by_seed.setdefault((training, result.seed), result)
    for aliases in names.values():
        aliases.sort(key=lambda name: name not in seconds)  # the first is the name of the row
    results = [r.model_copy(update={"arm": names[key][0]}) for (key, _), r in by_seed.items()]
    boards = [board for group in _budgets(results) if (board := _board(group, seconds))]
    if not boards:
        raise ConfigError(
            f"'{studies}' has no budget with results of a dense block and of another arm"
        )
    boards.sort(key=lambda board: board.cost)
    runs = {training: result for (training, _), result in by_seed.items()}
    links = {
        aliases[0]: " = ".join(
            f"[{study}]({link}/{study}.md): {escape_markdown(_in_words(arm, runs[training]))}"
            for study, _, arm in (name.partition("/") for name in aliases)
        )
        for training, aliases in names.items()
    }
    left_out = Counter(name.partition("/")[0] for name in links)
    left_out.subtract(_study(arm) for board in boards for arm in board.arms)
    alone = _listed(f"{count} of {study}" for study, count in left_out.items() if count)
    machines = _listed(f"{machine} ({_listed(studies)})" for machine, studies in timed_on.items())
    sparse = [board for board in boards if not _is_dense(board.winner)]
    claimed = [b for b in sparse if b.winner.difference and b.winner.difference.is_claimed]
    timed = [ratio for b in sparse if (ratio := b.seconds_speed_up(b.winner))]
    budgets = [arm.budget for board in boards for arm in board.arms]
    every_run = [run for board in boards for arm in board.arms for run in arm.results]
    active, tokens = (
        f"{compact(min(values))} to {compact(max(values))}"
        for values in ([b.model.active_params for b in budgets], [b.tokens for b in budgets])
    )
    return render(
        "leaderboard.md",
        boards=boards,
        sparse=sparse,
        num_claimed=len(claimed),
        num_sooner=sum(ratio > 1 for ratio in timed),
        num_timed=len(timed),
        active=active,
        tokens=tokens,
        compared_with_ngrams=compared_with_ngrams(every_run),
        summary=_summary(boards, links),
        tables=[(board, _table(board, links)) for board in boards if len(board.arms) > 2],
        alone=alone,
        machines=machines,
        MAX_MISMATCH=MAX_MISMATCH,
        MIN_SEEDS=MIN_SEEDS,
        SIGNIFICANT=SIGNIFICANT,
    )


_WORDS = {"d_model": "width {}", "max_steps": "{} steps"}


def _in_words(arm: str, run: RunResult) -> str:
    """Return `32 experts, width 64` for the arm `e32,d_model=64`."""
    name, *grid = arm.split(",")
    num_experts = run.option("model.ffn.num_experts")
    if name == f"e{num_experts}":
        name = counted(num_experts, "expert")
    options = (option.partition("=") for option in grid)
    return ", ".join([name, *(_WORDS.get(k, f"{k}={{}}").format(value) for k, _, value in options)])


def _listed(items: Iterable[str]) -> str:
    return ", ".join(items) or "none"


# -- budgets


def _budgets(results: Iterable[RunResult]) -> Iterable[Sequence[RunResult]]:
    """Return the runs of each budget."""
    groups: dict[str, list[RunResult]] = {}
    for result in results:
        options = [result.option(f"data.{key}") for key in VALIDATION_OPTIONS]
        data = [*result.fingerprints.values(), *options, result.option("model.causal")]
        groups.setdefault(str(data), []).append(result)
    budgets: list[list[RunResult]] = [*groups.values()]
    for cost in (lambda r: r.budget.tokens, lambda r: r.budget.model.flops_per_token):
        budgets = [close for group in budgets for close in _split_by_cost(group, cost)]
    return budgets


def _split_by_cost(
    results: Sequence[RunResult], cost: Callable[[RunResult], int]
) -> list[list[RunResult]]:
    """Split runs into groups whose costs are within `MAX_MISMATCH` of the lowest of the group."""
    groups: list[list[RunResult]] = []
    for result in sorted(results, key=cost):
        if not groups or cost(result) > cost(groups[-1][0]) * (1 + MAX_MISMATCH):
            groups.append([])
        groups[-1].append(result)
    return groups


def _board(results: Sequence[RunResult], seconds: Mapping[str, float]) -> Board | None:
    """Compare the arms of a budget; None without a dense block and another arm."""
    names = {result.arm for result in results}
    arms = [Arm(name, [r for r in results if r.arm == name]) for name in names]
    dense = [*filter(_is_dense, arms)]
    if not dense or len(arms) == 1:
        return None
    comparison = Comparison.of(results, baseline=_best(dense).name)
    timed = [replace(arm, timed_step_seconds=seconds.get(arm.name)) for arm in comparison.arms]
    return Board(replace(comparison, arms=sorted(timed, key=lambda arm: arm.loss)))


def _is_dense(arm: Arm) -> bool:
    return arm.budget.model.params == arm.budget.model.active_params


def _best(arms: Sequence[Arm]) -> Arm:
    """Return the arm with the lowest mean loss, of those with `MIN_SEEDS` seeds if there are any."""
    judged = [arm for arm in arms if len(arm.seeds) >= MIN_SEEDS]
    return min(judged or arms, key=lambda arm: arm.loss)


def _study(arm: Arm) -> str:
    return arm.name.partition("/")[0]


# -- parts of the page


def _summary(boards: Sequence[Board], links: Mapping[str, str]) -> str:
    rows: list[list[str]] = []
    for board in boards:
        winner, paired = board.winner, board.winner.difference
        sure = f"p {p_text(paired.p_value)}, {paired.num_pairs} seeds" if paired else NONE
        rows.append(
            [
                board.title,
                links[winner.name],
                _difference(winner),
                "one seed: not known" if paired and paired.over == "windows" else sure,
                board.flops_speed_up(winner),
                number(board.seconds_speed_up(winner), ".2f"),
                f"{board.num_rivals} of {len(board.arms) - 1}",
            ]
        )
    head = "budget|wins|minus dense|how sure|speed-up, FLOPs|speed-up, seconds"
    head += "|others not significantly different"
    return markdown_table(head.split("|"), rows, num_texts=2)


def _table(board: Board, links: Mapping[str, str]) -> str:
    rows: list[list[str]] = []
    for arm in board.arms:
        model, speed = arm.budget.model, board.speed(arm)
        timed = number(arm.tokens_per_second if arm.timed_step_seconds else None, ",.0f")
        rows.append(
            [
                links[arm.name],
                with_interval(arm.interval, "{:.3f}".format, arm.loss),
                _difference(arm) if arm.base else "baseline",
                str(len(arm.seeds)),
                compact(model.params),
                compact(model.active_params),
                compact(model.flops_per_token),
                f"{timed} ({speed:.2f})" if speed else timed,
                compact(arm.mean("peak_memory_bytes"), "B"),
                board.flops_speed_up(arm) if arm.base else "1",
                number(board.seconds_speed_up(arm), ".2f") if arm.base else "1",
            ]
        )
    option = board.base.results[0].option
    head = "arm|loss|minus dense|seeds|params|active|FLOPs|tokens/s|memory|speed-up, FLOPs|speed-up, seconds"
    about = (
        f"Corpus `{option('data.corpus.type')}`, tokenizer `{option('data.tokenizer.type')}`, windows of "
        f"{option('data.seq_len')} tokens. {board.comparison.compared_with_ngrams}"
    )
    return f"{about.rstrip()}\n\n{markdown_table(head.split('|'), rows)}"


def _difference(arm: Arm) -> str:
    paired = arm.difference
    if paired is None:
        return NONE
    text = with_interval(paired.interval, "{:+.3f}".format, paired.mean)
    return f"{text} \\*" if paired.is_claimed else text
