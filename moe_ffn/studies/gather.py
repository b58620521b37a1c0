"""Gather results for a comparison from folders of runs and from tables of results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moe_ffn.config.errors import ConfigError, explaining, reading
from moe_ffn.config.files import make_folder, read_bytes, read_object, write_atomically
from moe_ffn.config.yaml_files import to_yaml
from moe_ffn.runs.folder import FACTS_FILE, SUMMARY_FILE, is_run
from moe_ffn.runs.reader import read_run
from moe_ffn.studies.comparison import Comparison
from moe_ffn.studies.config import STUDY_FILE, StudyConfig
from moe_ffn.studies.differences import few_words, identity
from moe_ffn.studies.result import RESULTS_FILE, ROW_KEYS, RunResult, add_results, lines_of, natural
from moe_ffn.studies.statistics import EQUALITY_MARGIN

TIMING_FILE = "timing.json"
"""File in the folder of a study: arm -> seconds of a step, measured on an otherwise idle machine."""


@dataclass(frozen=True)
class Gathered:
    """Results and studies, in the order of the given paths."""

    results: Sequence[RunResult]
    left_out: Mapping[Path, str] = field(default_factory=dict)
    """Run that is not compared -> reason, a sentence."""
    unfit: frozenset[str] = frozenset()
    """Names of results that were read, but are left out."""
    arms: Mapping[Path, str] = field(default_factory=dict)
    """Compared run, or line of a table -> its arm."""
    folders: Mapping[str, Path] = field(default_factory=dict)
    """Shown name of a result -> its run, or its line in a table."""
    study: StudyConfig | None = None
    """The study, if all results belong to one study."""
    baselines: Sequence[str] = ()
    """Distinct baselines of the studies."""
    step_seconds: Mapping[str, float] = field(default_factory=dict)
    """Arm -> seconds of a step, from `timing_files`."""
    timing_files: Sequence[Path] = ()
    """Timing files of the studies; see `TIMING_FILE`."""

    def compare(self, baseline: str | None = None, margin: float | None = None) -> Comparison:
        """Return the comparison of the results, with the arms, baseline, margin and question of their study.

        A given baseline or margin (in nats per token) replaces the study's. Raises ConfigError if the results
        are not comparable, or there is no such arm.
        """
        study = self.study
        found = Comparison.of(
            self.results,
            baseline=baseline or (study and study.baseline),
            baselines=study.baselines if study and baseline is None else {},
            arms=study.arm_names if study else (),
            step_seconds=self.step_seconds,
            question=study.question if study else "",
            margin=margin or (study.equality_margin if study else EQUALITY_MARGIN),
        )
        notes = [*found.notes, *self._missing_runs()]
        if baseline is None and len(self.baselines) > 1:
            notes.append(
                f"The studies have different baselines ({', '.join(self.baselines)}): here all arms are "
                f"compared with {found.baseline}; --baseline chooses another."
            )
        sessions = {read_bytes(path): path.parent.name for path in self.timing_files}
        if len(sessions) > 1 and any(arm.timed_step_seconds for arm in found.arms):
            notes.append(
                f"The arms were timed in {len(sessions)} sessions ({', '.join(sessions.values())}), which "
                "may differ in machine and load: compare seconds and tokens/s only within one."
            )
        return replace(found, notes=notes)

    def _missing_runs(self) -> Iterator[str]:
        """Yield a note on planned runs that were not found, except tuning runs."""
        if self.study is None:
            return
        known = {result.name for result in self.results}
        known |= {path.name for path in self.left_out} | self.unfit
        planned = [f"{arm}-seed{seed}" for arm in self.study.arm_names for seed in self.study.seeds]
        missing = [name for name in planned if name not in known]
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            yield (
                f"{len(missing)} of the {len(planned)} runs of the study are missing here: "
                f"{', '.join(missing[:3])}{more}."
            )

    def write(self, folder: Path) -> None:
        """Write results, study and timing into `folder`, for a commit; ConfigError if that fails."""
        with explaining(f"'{folder}' cannot be written", "choose another folder"):
            make_folder(folder)
            add_results(folder, self.results)
            if self.study is not None:
                write_portable_study(self.study, folder)
            for path in self.timing_files:
                write_atomically(folder / path.name, read_bytes(path))


def write_portable_study(study: StudyConfig, folder: Path) -> None:
    """Write a study without paths of this machine into a folder; raise OSError if that fails."""
    write_atomically(folder / STUDY_FILE, to_yaml(_without_paths(study)))


def _without_paths(study: StudyConfig) -> dict[str, Any]:
    """Return a study without paths of this machine, for a commit."""
    options = study.to_dict()
    for key in ("config", "overrides"):
        options[key] = {name: value for name, value in options[key].items() if name != "run"}
    return options


def _one_study(studies: Sequence[StudyConfig]) -> StudyConfig | None:
    """Return the study if all studies are equal, apart from seeds, overrides and paths; otherwise None."""
    same = {"seeds": [0], "overrides": {}}
    plain = [_without_paths(study.model_copy(update=same)) for study in studies]
    if not plain or any(other != plain[0] for other in plain):
        return None
    seeds = [seed for study in studies for seed in study.seeds]
    return studies[0].model_copy(update={"seeds": [*dict.fromkeys(seeds)]})


def gather(paths: Sequence[Path]) -> Gathered:
    """Read every run and every committed result once, from runs, folders with runs or a table, or tables.

    Raises ConfigError if a path has no results, or no result can be compared.
    """
    sources = {source.path.resolve(): source for path in paths for source in _sources(path)}
    found: list[_Source] = []
    left_out: dict[Path, str] = {}
    unfit: set[str] = set()
    studies = {source.folder: source.study for source in sources.values() if source.study}
    for source in sources.values():
        try:
            source.read()
        except ConfigError as error:
            left_out[source.path] = str(error)
            continue
        if why := _unfit(source.result, source.path):
            left_out[source.path] = f"'{source.path}' {why}"
            unfit.add(source.result.name)
        else:
            found.append(source)
    if not found:
        first, *others = left_out.values()
        more = f"; {len(others)} more cannot be compared either" if others else ""
        raise ConfigError(f"{first}{more}")
    times = {folder: read_timing(folder) for folder in studies}
    seconds = [times.get(source.folder, {}).get(source.result.arm) for source in found]
    _set_shown_names(found)
    _set_arms(found)
    return Gathered(
        results=_each_once(found),
        left_out=left_out,
        unfit=frozenset(unfit),
        arms={source.path: source.result.main_arm for source in found},
        folders={source.result.shown_name: source.path for source in found},
        study=_one_study([*studies.values()]),
        baselines=[*dict.fromkeys(s.baseline for s in studies.values() if s.baseline)],
        step_seconds={s.result.arm: time for s, time in zip(found, seconds, strict=True) if time},
        timing_files=[path for f in studies if (path := f / TIMING_FILE).is_file()],
    )


def _set_shown_names(found: Sequence[_Source]) -> None:
    """Name results by their folders, or as in their table; by their paths if two names are equal."""
    names = [
        source.path.resolve().name if source.line is None else source.result.name
        for source in found
    ]
    for name, source in zip(names, found, strict=True):
        source.update(display_name=name if names.count(name) == 1 else str(source.path))


def _set_arms(found: Sequence[_Source]) -> None:
    """Give each arm a unique name, which all its runs share.

    Runs outside a study are one arm if they differ only in their seeds, even if their folders have different
    names. The name of the parent folder distinguishes different arms with the same name.
    """
    groups: dict[str, list[_Source]] = {}
    for source in found:
        if source.study is None and source.path.is_dir():
            groups.setdefault(identity(source.result), []).append(source)
    firsts = [group[0].result for group in groups.values()]
    named = {source.result.arm: source.result for source in found}
    for first, group in zip(firsts, groups.values(), strict=True):
        seeds_differ = len({source.result.seed for source in group}) == len(group)
        if seeds_differ and len({source.result.arm for source in group}) > 1:
            name = few_words(firsts[0], first) or str(first.option("model.ffn.type"))
            while name in named and identity(named[name]) != identity(first):
                name = f"{name},{few_words(named[name], first)}"
            named[name] = first
            for source in group:
                source.update(arm=name, main_arm=name)
    identities: dict[str, set[str]] = {}
    folders: dict[str, set[str]] = {}
    for source in found:
        identities.setdefault(source.result.arm, set()).add(identity(source.result))
        folders.setdefault(source.result.arm, set()).add(source.folder.name)
    ambiguous = {arm for arm in identities if len(identities[arm]) > 1 and len(folders[arm]) > 1}
    for source in found:
        arm, main_arm, folder = source.result.arm, source.result.main_arm, source.folder.name
        if main_arm in ambiguous:
            source.update(arm=f"{folder}/{arm}", main_arm=f"{folder}/{main_arm}")


def _each_once(found: Sequence[_Source]) -> list[RunResult]:
    """Return one result per arm and seed; a run and its committed result count as one.

    Raises ConfigError if two runs of an arm have the same seed but different results.
    """
    unique: dict[tuple[str, int], _Source] = {}
    for source in found:
        result = source.result
        other = unique.setdefault((result.arm, result.seed), source)
        if other.result.outcome.validation_loss != result.outcome.validation_loss:
            raise ConfigError(
                f"'{other.path}' and '{source.path}' are two runs of arm '{result.arm}' with seed "
                f"{result.seed}; give one of them"
            )
    return [source.result for source in unique.values()]


def read_timing(folder: Path) -> dict[str, float]:
    """Return arm -> seconds of a step, from the `TIMING_FILE` of a study; empty without one."""
    path = folder / TIMING_FILE
    try:
        arms = (read_object(path) or {}).get("arms", {})
        return {arm: values["seconds_per_step"] for arm, values in arms.items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"'{path}' does not hold the times of arms; time them again") from error


def _unfit(result: RunResult, path: Path) -> str:
    """Return the reason why a run cannot be compared, as a verb phrase; empty if it can."""
    outcome = result.outcome
    if not outcome.is_finished:
        if (path / SUMMARY_FILE).exists():
            return f"has no results: its {SUMMARY_FILE} is damaged"
        return (
            f"is not finished: it is at step {outcome.step} of {result.option('trainer.max_steps')}"
        )
    if outcome.validation_loss is None:
        return "has no finite validation loss"
    if None in (result.fingerprints.get("corpus"), result.fingerprints.get("tokenizer")):
        return f"has no fingerprints of its data: its {FACTS_FILE} is damaged"
    return ""


@dataclass
class _Source:
    """A run or a line of a table, and its result."""

    path: Path
    study: StudyConfig | None = None
    """Study in the parent folder."""
    line: bytes | None = None
    """Content of the line; None for a run."""
    result: RunResult = field(init=False)
    """Set by `read`."""

    @property
    def folder(self) -> Path:
        """Folder that contains the run or the table."""
        return self.path.resolve().parent

    def read(self) -> None:
        if self.line is not None:
            self.result = RunResult.of_line(self.line, self.path)
        else:
            self.result = RunResult.of_run(read_run(self.path, keys=ROW_KEYS), self.study)

    def update(self, **names: str) -> None:
        self.result = self.result.model_copy(update=names)


def _sources(path: Path) -> Iterator[_Source]:
    """Yield the run at `path`, or all runs and table lines in it; ConfigError if there are none."""
    if is_run(path):
        yield _Source(path, _study_of(path.resolve().parent))
        return
    if path.is_file():
        table, runs = path, []
    elif path.is_dir():
        table = path / RESULTS_FILE
        with reading(path):
            runs = sorted(filter(is_run, path.iterdir()), key=lambda run: natural(run.name))
    else:
        raise ConfigError(
            f"'{path}' does not exist; give the folder of a run, or a folder with runs"
        )
    study = _study_of(table.parent)
    found = [_Source(run, study) for run in runs]
    if table.is_file():
        found += [_Source(place, study, line) for place, line in lines_of(table)]
    if not found:
        raise ConfigError(
            f"'{path}' has no runs and no {RESULTS_FILE}; give the folder of a run, such as runs/my-run, "
            "or a folder with runs"
        )
    yield from found


def _study_of(folder: Path) -> StudyConfig | None:
    path = folder / STUDY_FILE
    return StudyConfig.read(path) if path.is_file() else None
