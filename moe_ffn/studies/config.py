"""The file of a study: arms x grid x seeds, and the runs that it plans."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from moe_ffn.config.base import Config, mapped
from moe_ffn.config.errors import ConfigError, did_you_mean, nearest_or_all, show
from moe_ffn.config.import_path import FileTag
from moe_ffn.config.option_tree import flatten, lookup, merge, nest_options
from moe_ffn.config.yaml_files import read_yaml, validate
from moe_ffn.ffn.match import MAX_MISMATCH
from moe_ffn.runs.budget import Budget
from moe_ffn.runs.config import TrainConfig, folder_name_problem
from moe_ffn.runs.folder import named_run_folder, output_dir
from moe_ffn.studies.statistics import EQUALITY_MARGIN

STUDY_FILE = "study.yaml"
"""File with the planned study, in the folder of its runs."""

Options = dict[str, Any]
"""Options of a run, nested or by dotted keys."""

NullableOptions = Annotated[Options, BeforeValidator(lambda value: {} if value is None else value)]
"""Options in a file, where an empty section is null."""


def _unique(seeds: list[int]) -> list[int]:
    for seed in seeds:
        if seeds.count(seed) > 1:
            raise ValueError(f"{seed} is given twice")
    return seeds


def _one_is_a_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


FitName = Literal["isoflop", "clark", "granularity", "leverage"]
Seeds = Annotated[
    list[Annotated[int, Field(ge=0, lt=2**63)]], Field(min_length=1), AfterValidator(_unique)
]
Grid = dict[str, Annotated[list[Any], Field(min_length=1)]]


class TuningConfig(Config, frozen=True):
    """Additional runs of arms, for example with other learning rates, which are not compared between arms."""

    grid: Grid = Field(min_length=1)
    """Dotted option -> its values; each combination is a run."""
    seeds: Seeds
    """Seeds of these runs."""
    arms: Annotated[list[str], Field(min_length=1)] | None = None
    """Arms to tune; all arms by default."""


class StudyConfig(Config, frozen=True):
    """A question, and the runs that answer it: arms x grid x seeds.

    Within a seed, arms that differ only in their feed-forward blocks read the same data in the same order,
    and start with the same weights outside these blocks.
    """

    name: str = "study"
    """Folder of the runs in run.output_dir; by default the stem of the study's file."""
    question: str = ""
    """Question that the study answers."""
    published: str = ""
    """Published numbers with their source, for the study's page."""
    answer: str = ""
    """Conclusion of the author, whose first paragraph is set in bold; the page also computes a verdict."""
    would_change_our_mind: str = ""
    """Evidence that would change the conclusion, for the page."""
    axis: str | None = None
    """Horizontal axis of the figure of final losses: a dotted option, params, active_params, flops_per_token
    or expansion (total over active parameters of the feed-forward blocks). By default the only numeric option
    of the grid."""
    fit: Annotated[list[FitName], BeforeValidator(_one_is_a_list)] = Field(default=[])
    """Fits that the page shows: isoflop, clark, granularity or leverage."""
    figures: list[str] = Field(default=[])
    """Figures that the page shows, such as losses.svg; the folder of the results gets all figures."""
    base: str | None = None
    """Config file with options of all runs, relative to the study's file; merged into `config`."""
    config: NullableOptions = Field(default={})
    """Options of all runs, over the defaults and `base`; nested, or by dotted keys. `{seed}` in a text is the
    seed of the run, as in `init_from: runs/other/moe-seed{seed}`."""
    seeds: Seeds = Field(default=[0])
    """Seeds; each arm has one run per seed."""
    arms: dict[str, NullableOptions] = Field(default={})
    """Name -> options, over those of `config`; an arm may change several options."""
    grid: Grid = Field(default={})
    """Dotted option -> its values; each arm has runs with every combination of these values."""
    baseline: str | None = None
    """Arm to compare the other arms with. With a grid it may be a name from `arms`: then each arm is compared
    with that arm at the same grid values."""
    baselines: dict[str, str | None] = Field(default={})
    """Arm -> arm to compare it with, in place of `baseline`; null: none."""
    sizes: list[str] = Field(default=[])
    """Sizes of models, the smallest first, if arms are named SIZE_BLOCK: [small, large] for small_moe and
    large_moe. The page then shows the blocks side by side at each size, and the curves of the largest."""
    equality_margin: float = Field(default=EQUALITY_MARGIN, gt=0)
    """Nats per token: arms are equal if tests show that they differ by less. Set it before the runs."""
    training_flops: float | None = Field(default=None, gt=0)
    """Training FLOPs of every run, from which trainer.max_steps is computed, to the nearest step."""
    initial_flops: float | None = Field(default=None, gt=0)
    """FLOPs that trained the model named by init_from; the page then shows the losses over total training
    FLOPs, and where arms cross."""
    tuning: TuningConfig | None = None
    """Additional runs that are not compared between arms."""
    overrides: Options = Field(default={})
    """Options given on the command line, over everything else."""

    @field_validator("name")
    @classmethod
    def _name_one_folder(cls, name: str) -> str:
        if problem := folder_name_problem(name):
            raise ValueError(problem)
        return name

    @model_validator(mode="after")
    def _check_arms(self) -> StudyConfig:
        if not self.arms and not self.grid:
            raise ValueError("an empty study: give arms, a grid, or both")
        arms = self.arm_names
        if self.baseline not in (None, *arms, *(self.arms if self.grid else ())):
            raise ValueError(f"baseline: {_no_arm(self.baseline, arms)}")
        for arm, base in self.baselines.items():
            for name in (arm, base or arm):
                if name not in arms:
                    raise ValueError(f"baselines.{arm}: {_no_arm(name, arms)}")
        for name in arms if self.sizes else ():
            if not name.startswith(tuple(f"{size}_" for size in self.sizes)):
                raise ValueError(
                    f"sizes: {show(name)} begins with none of {', '.join(self.sizes)} and an underscore; "
                    "rename the arm, or add its size"
                )
        if self.tuning is not None:
            for key in self.tuning.grid:
                if key in self.grid:
                    raise ValueError(f"tuning.grid.{key}: is in grid too; give it in one of them")
            for name in self.tuning.arms or ():
                if name not in arms:
                    raise ValueError(f"tuning.arms: {_no_arm(name, arms)}")
        return self

    @property
    def arm_names(self) -> list[str]:
        """Compared arms, in the order of the file."""
        return [arm.name for arm in self._arms()]

    @property
    def tuned_arms(self) -> dict[str, tuple[str, Options]]:
        """Arm of a tuning run -> the compared arm, and the tuned options with their values."""
        return {
            self._arm_name(arm.name, values): (arm.name, values) for arm, values in self._tuned()
        }

    def _arms(self) -> Iterator[_Arm]:
        for name, options in (self.arms or {"": {}}).items():
            for values in _combinations(self.grid):
                layers = {f"arms.{name}.": options, "grid.": values}
                yield _Arm(self._arm_name(name, values), layers)

    def _tuned(self) -> Iterator[tuple[_Arm, Options]]:
        """Yield each arm to tune with each combination of tuned values."""
        if self.tuning is not None:
            chosen = self.tuning.arms or self.arm_names
            arms = [arm for arm in self._arms() if arm.name in chosen]
            yield from itertools.product(arms, _combinations(self.tuning.grid))

    def _arm_name(self, arm: str, values: Mapping[str, Any]) -> str:
        """Return the name of an arm with its values, `swiglu,d_ff=256`; ambiguous keys get a full path."""
        keys = [*self.grid, *(self.tuning.grid if self.tuning else ())]
        short_keys = [key.rpartition(".")[2] for key in keys]
        parts = [arm] if arm else []
        for key, value in values.items():
            short = key.rpartition(".")[2]
            parts.append(f"{short if short_keys.count(short) == 1 else key}={_as_file_name(value)}")
        return ",".join(parts)

    def planned_runs(self) -> list[PlannedRun]:
        """Return every run, seed by seed, with the tuning runs last.

        A tuning run that equals a run of its arm is left out. Raises ConfigError if options of a run are
        wrong, with the path in the study file, or two arms are equal.
        """
        runs: dict[str, PlannedRun] = {}
        for seed in self.seeds:
            for arm in self._arms():
                run = self._planned(arm, {}, seed)
                other = runs.setdefault(run.identity, run)
                if other is not run:
                    raise ConfigError(
                        f"arms: '{other.arm}' and '{arm.name}' have the same options (an empty arm is the "
                        "default model); change one of them"
                    )
        seeds = self.tuning.seeds if self.tuning else ()
        tuned = [
            self._planned(arm, values, seed) for seed in seeds for arm, values in self._tuned()
        ]
        known = {(run.identity, run.main_arm) for run in runs.values()}
        return [*runs.values(), *(r for r in tuned if (r.identity, r.main_arm) not in known)]

    def _planned(self, arm: _Arm, tuning: Options, seed: int) -> PlannedRun:
        layers = {"config.": self.config, **arm.layers}
        layers |= {"tuning.grid.": tuning, "--": self.overrides}
        layers = {section: _nested(layer, section) for section, layer in layers.items()}
        options = TrainConfig().to_dict()
        for section, layer in layers.items():
            if "seed" in layer:
                raise ConfigError(
                    f"{section}seed: a study lists its seeds under `seeds`, or in --seeds 0 1 2"
                )
            if (
                self.training_flops is not None
                and section != "config."  # a base has steps for other studies
                and (steps := lookup(layer, "trainer.max_steps")) is not None
            ):
                raise ConfigError(
                    f"{section}trainer.max_steps ({steps}): the study computes the steps of each run from "
                    f"training_flops ({self.training_flops:g}); leave it out, or change training_flops"
                )
            options = merge(options, _with_seed(layer, seed))
        name = self._arm_name(arm.name, tuning)
        run_name = f"{name}-seed{seed}"
        if problem := folder_name_problem(run_name):
            raise ConfigError(f"arms: an arm {problem}; name it under `arms`")
        try:
            config = validate(TrainConfig, {**options, "seed": seed})
        except ConfigError as error:
            lines = (_with_section(line, layers, arm.name) for line in str(error).splitlines())
            raise ConfigError("\n".join(lines)) from error
        if self.training_flops is not None:
            config = _with_steps(config, self.training_flops, arm.name)
        folder = output_dir(config) / self.name
        run = config.run.model_copy(update={"name": run_name, "output_dir": str(folder)})
        return PlannedRun(name, seed, config.model_copy(update={"run": run}), arm.name, tuning)

    @classmethod
    def read(
        cls,
        path: Path,
        given: Mapping[str, Any] | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> StudyConfig:
        """Read a study; its name is by default the stem of its file.

        A name or seeds in `given` replace those in the file; `overrides` are options of all runs, over
        everything in the file. Raises ConfigError if the file cannot be read, or is not a study.
        """
        options = read_yaml(path, where=f"'{path}'")
        if not (options.get("arms") or options.get("grid")):
            for key in options:
                if key not in cls.model_fields and (near := did_you_mean(key, ("arms", "grid"))):
                    raise ConfigError(f"{key}: unknown{near}")
            if empty := [key for key in ("arms", "grid") if key in options]:
                raise ConfigError(
                    f"'{path}': {' and '.join(empty)} is empty: give arms, a grid, or both"
                )
            raise ConfigError(
                f"'{path}' is not a study: it has neither arms nor a grid; give one of them, or, to compare "
                "config files as arms, name them without --config"
            )
        options = {"name": path.stem, **options, **(given or {})}
        if (base := options.pop("base", None)) is not None:
            if not isinstance(base, str):
                raise ConfigError(f"base: must be the path of a config file, got {show(base)}")
            shared = read_yaml(path.parent / base, where=f"base {path.parent / base}")
            options["config"] = merge(shared, _nested(options.get("config") or {}, "config."))
        if overrides:
            options["overrides"] = merge(
                _nested(options.get("overrides", {}), "overrides."), overrides
            )
        return validate(cls, options)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, with absolute paths in `file.py:ClassName`."""
        free_form = {key: getattr(self, key) for key in ("config", "arms", "grid", "overrides")}
        return mapped(super().to_dict() | free_form, _plain)


@dataclass(frozen=True)
class _Arm:
    name: str
    layers: Mapping[str, Options]
    """Key in the study file -> options under that key."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study."""

    arm: str
    """Name of the arm, including values of the grid and of the tuning."""
    seed: int
    config: TrainConfig
    """Options of the run; `config.run` names its folder."""
    main_arm: str = ""
    """Name of the arm without values of the tuning."""
    tuning: Mapping[str, Any] = field(default_factory=dict)
    """Dotted option -> value for a tuning run; empty for a compared run."""

    @property
    def name(self) -> str:
        """Name of the run's folder, `swiglu,d_ff=256-seed0`."""
        return f"{self.arm}-seed{self.seed}"

    @property
    def folder(self) -> Path:
        return named_run_folder(self.config)

    @property
    def identity(self) -> str:
        """Text that is equal for runs with equal options, even if their names differ."""
        options = self.config.to_dict()
        del options["run"]
        return json.dumps(options, sort_keys=True)


def _with_steps(config: TrainConfig, training_flops: float, arm: str) -> TrainConfig:
    """Return the config with the number of steps that takes these training FLOPs."""
    steps = training_flops / Budget.of(config).training_flops * config.trainer.max_steps
    mismatch = abs(max(1, round(steps)) / steps - 1)
    if mismatch > MAX_MISMATCH:
        raise ConfigError(
            f"training_flops: {training_flops:g} are {steps:.2f} steps of the arm '{arm}', and the nearest "
            f"whole number differs by {mismatch:.1%}, more than {MAX_MISMATCH:.0%}; give more FLOPs, or "
            "lower data.batch_size"
        )
    options = merge(config.to_dict(), {"trainer": {"max_steps": round(steps)}})
    return validate(TrainConfig, options)


def _combinations(grid: Mapping[str, list[Any]]) -> Iterator[Options]:
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def _nested(options: Mapping[Any, Any], section: str) -> Options:
    """Return options with nested mappings for dotted keys, at any depth; ConfigError for an option with two
    values, of which the dotted key would win unnoticed.
    """
    given = {
        str(key): _nested(value, f"{section}{key}.") if isinstance(value, Mapping) else value
        for key, value in options.items()
    }
    nested = nest_options(given.items())
    for key, part in given.items():
        for path, value in flatten({key: part}).items():
            kept = lookup(nested, path)
            kept = kept.get("type") if isinstance(kept, Mapping) else kept
            if show(kept) != show(value):
                raise ConfigError(
                    f"{section}{path}: has two values, {show(kept)} and {show(value)}, by a dotted key and "
                    "inside a mapping, perhaps through `<<`; give it once"
                )
    return nested


def _with_seed(value: Any, seed: int) -> Any:
    """Return options with the seed of a run in place of `{seed}` in their texts."""

    def named(leaf: Any) -> Any:
        has_seed = isinstance(leaf, str) and "{seed}" in leaf
        return leaf.replace("{seed}", str(seed)) if has_seed else leaf

    return mapped(value, named)


def _no_arm(name: str, arms: Sequence[str]) -> str:
    return f"there is no arm {show(name)}{nearest_or_all(name, arms, 'the arms are')}"


def _as_file_name(value: Any) -> str:
    """Return a value as part of a folder's name: `0.001`, `true`, `{type:moe}`."""
    text = value
    if not isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
        text = text.replace('"', "")
    return text.replace("/", "_").replace("\\", "_")


def _with_section(line: str, layers: Mapping[str, Options], arm: str) -> str:
    """Prefix a mistake with the section of the study file that contains it."""
    path = line.partition(": ")[0].split(".")
    for section, options in reversed([*layers.items()]):
        if _sets(options, path):
            return f"{section}{line}"
    return f"arms.{arm}: {line}"


def _sets(options: Any, path: Sequence[str]) -> bool:
    """Return True if `options` sets the option at `path`, or a plain value in place of its section."""
    if not path or not isinstance(options, Mapping):
        return True
    return path[0] in options and _sets(options[path[0]], path[1:])


def _plain(value: Any) -> Any:
    if isinstance(value, FileTag):
        where, _, name = value.resolved.rpartition(":")
        return f"{Path(where).resolve()}:{name}"
    return value
