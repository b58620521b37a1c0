"""Train several configs, one after the other, and print their results side by side.

    moe-ffn compare configs/routers/*.yaml --trainer.max_steps 300 [--name NAME]

Further options are those of moe-ffn train, for all of them. The runs are in runs/NAME/; given the same
NAME again, finished runs are not repeated and the one that was interrupted is resumed; what an
unfinished run with other options left is set aside.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

from rich.console import Console

from moe_ffn.cli.command_line import parse_config
from moe_ffn.cli.parser import Parser
from moe_ffn.config_files import validate
from moe_ffn.errors import ConfigError, command, first_line, is_from_clone, printable, reason, show
from moe_ffn.report.comparison import Result, comparison_table, read_result, write_markdown
from moe_ffn.runs import folder as run_folder
from moe_ffn.runs.config import TrainConfig, differences, not_a_folder_name, own_config
from moe_ffn.runs.outside_code import comparable_options
from moe_ffn.trust import FLAG, HELP, UntrustedCodeError, accepting_code


class UnreadableRunError(ConfigError):
    """The options of a run cannot be read; the other runs are compared all the same."""


def main(argv: Sequence[str]) -> int:
    files, name, overrides, trust_code = parse_arguments(argv or ["--help"])
    configs = {file: resolve(file, name, overrides) for file in files}
    with accepting_code(trust_code):
        return compare(configs, overrides, [FLAG] if trust_code else [])


def compare(
    configs: Mapping[Path, TrainConfig], overrides: Sequence[str], resume_flags: Sequence[str]
) -> int:
    """Train what is not finished, and print the table; the exit code."""
    todo: list[Path] = []
    problems: dict[Path, str] = {}
    for file, config in configs.items():
        try:
            if not is_finished(config):
                todo.append(file)
        except UnreadableRunError as error:
            problems[file] = str(error)
    results: list[Result] = []
    for file, config in configs.items():
        if file in problems:
            continue
        if file in todo:
            begun = has_begun(config)
            how = "resuming" if begun else "training"
            print(f"{file.stem}: {how} ({todo.index(file) + 1} of {len(todo)})", flush=True)
            argv = [*overrides, *resume_flags] if begun else overrides
            if not train(file, config, argv, begun):
                problems[file] = f"failed: {file}; what it said is above"
                continue
        try:
            result = read_result(file.stem, config)
        except ConfigError as error:
            problems[file] = str(error)
            continue
        results.append(result)
        if result.lost:
            problems[file] = f"'{run_folder.named_run_folder(config)}': {result.lost}"
    path = run_folder.output_dir(next(iter(configs.values()))) / "comparison.md"
    Console().print(comparison_table(results))
    if results:
        try:
            write_markdown(results, path)
            print(f"\nThe runs, and this table as {path.name}, are in {path.parent}/")
        except OSError as error:
            problems[path] = f"'{path}' cannot be written ({reason(error)})"
    for problem in problems.values():
        print(printable(problem), file=sys.stderr)
    return 1 if problems else 0


def parse_arguments(argv: Sequence[str]) -> tuple[list[Path], str, list[str], bool]:
    """The config files, the name of the comparison, options for every run, and `--trust-code`."""
    parser = Parser(
        prog=command("compare"),
        usage=f"{command('compare')} FILE ... [--name NAME]\n       [--SECTION.OPTION VALUE ...]",
        description=__doc__,
    )
    parser.add_argument("--name", help="folder of the comparison in run.output_dir")
    parser.add_argument(FLAG, action="store_true", help=HELP)
    # As a positional of argparse they would take the value of an option that is not its own.
    given, rest = parser.parse_known_args(argv)
    files = [Path(word) for word in takewhile(lambda word: not word.startswith("-"), rest)]
    if not files:
        raise ConfigError(
            f"give the config files first: {command('compare')} configs/routers/*.yaml"
        )
    if given.name is not None and (problem := not_a_folder_name(given.name)):
        raise ConfigError(f"--name: {problem}")
    stems = [file.stem for file in files]
    for stem in stems:
        if stems.count(stem) > 1:
            raise ConfigError(f"two config files are called '{stem}'; a run is named by its file")
    name = given.name or f"comparison-{datetime.now():%Y%m%d-%H%M%S}"
    return files, name, rest[len(files) :], given.trust_code


def resolve(file: Path, name: str, overrides: Sequence[str]) -> TrainConfig:
    """The config of one run, which goes into the comparison's folder under its file's name."""
    config = parse_config(["--config", str(file), *overrides], TrainConfig, command("compare"))
    options = config.to_dict()
    options["run"] = {"name": file.stem, "output_dir": str(Path(config.run.output_dir) / name)}
    return validate(TrainConfig, options)


def is_finished(config: TrainConfig) -> bool:
    """Whether this very run was done before.

    Raises:
        UnreadableRunError: the options of the finished run cannot be read.
        ConfigError: its folder holds a finished run with other options, or something else than files.
    """
    folder = run_folder.named_run_folder(config)
    run_folder.check_entries(folder)
    if not run_folder.is_finished(folder):
        return False
    for key, (before, now) in _differences(folder, config).items():
        raise ConfigError(
            f"'{folder}' holds a run with other options ({key} was {show(before)}, is {show(now)}); give the "
            "options it had, or choose another --name"
        )
    return True


def has_begun(config: TrainConfig) -> bool:
    """Whether this very run was begun and can be resumed.

    An unfinished run with other options is renamed, so that nothing of it is lost or written over.
    """
    folder = run_folder.named_run_folder(config)
    if not folder.exists():
        return False
    with suppress(UnreadableRunError):  # damaged, or of another version
        if not _differences(folder, config):
            return True
    aside = folder.with_name(f"{folder.name}-unfinished-{datetime.now():%Y%m%d-%H%M%S}")
    with run_folder.locked(folder):
        folder.rename(aside)
    print(f"{folder.name}: an unfinished run with other options is now {aside}")
    return False


def _differences(folder: Path, config: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """The options, or code behind them, in which the run in `folder` differs, as `differences` names them.

    Raises:
        UntrustedCodeError: its options name code that is not trusted.
        UnreadableRunError: its options cannot be read.
    """
    try:
        own = own_config(folder / run_folder.CONFIG_FILE)
    except UntrustedCodeError:
        raise
    except ConfigError as error:
        raise UnreadableRunError(first_line(error)) from error
    return differences(comparable_options(own), comparable_options(config))


def train(file: Path, config: TrainConfig, overrides: Sequence[str], begun: bool) -> bool:
    """Train in a process of its own, so that no run finds the memory or threads of another."""
    start = time.monotonic()
    # -P: a folder called moe_ffn in the current one is not taken for this package.
    installed = ["-P", "-m", "moe_ffn.cli", "train"]
    done = subprocess.run(
        [
            *(sys.executable, *(["-m", "experiments.train"] if is_from_clone() else installed)),
            *("--config", str(file), *overrides),
            *("--run.output_dir", config.run.output_dir, "--run.name", str(config.run.name)),
            *(["--resume", str(run_folder.named_run_folder(config))] if begun else []),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        print("\n".join(done.stdout.splitlines()[-10:]), file=sys.stderr)
        return False
    print(f"{file.stem}: {time.monotonic() - start:.0f} s")
    return True
