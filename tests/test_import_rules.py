"""Import rules between modules, and the cost of `import moe_ffn`, from the source and subprocesses."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

import moe_ffn
from moe_ffn.cli.__main__ import main as console

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "moe_ffn"

# What every package may use: options and their messages, files, the values of a layer, and its arithmetic.
FOUNDATION = {"config", "notebook_cards", "kernels", "outputs"}

MAY_IMPORT: dict[str, set[str]] = {
    # The foundation.
    "config": set(),
    "notebook_cards": set(),
    "outputs": {"notebook_cards"},
    "kernels": {"config", "outputs"},
    # Level 1: the layers. Routing and experts never import each other.
    "routing": FOUNDATION,
    "experts": FOUNDATION,
    "balancing": FOUNDATION,
    "ffn": FOUNDATION | {"routing", "experts"},
    # Checks of a custom block, router or kind of expert; training calls them too.
    "testing": FOUNDATION | {"routing", "experts", "ffn"},
    # Level 2: a model, its training, a run's folder and what is read back from it.
    "model": FOUNDATION | {"experts", "ffn", "routing"},
    "metrics": FOUNDATION | {"balancing"},
    "data": FOUNDATION,
    "training": FOUNDATION | {"balancing", "metrics", "model", "data", "ffn", "routing", "experts"},
}
for _package, _below in {
    "runs": {"training", "testing", "experts", "ffn"},
    # Level 3: model folders, other libraries, many runs as one question, programs.
    "weights": {"runs"},
    "hf": {"weights"},
    "interop": {"hf"},
    "studies": {"runs"},
    # Pages of one run, and pages of several as one question.
    "report": {"runs"},
    "report/studies": {"report", "studies"},
    # Training starts from weights, and ends with a page.
    "runs/train": {"weights", "report"},
    "cli": {"runs/train", "report/studies", "interop"},
}.items():
    MAY_IMPORT[_package] = set().union(_below, *(MAY_IMPORT[name] for name in _below))
MAY_IMPORT["__init__"] = FOUNDATION | {
    "balancing",
    "routing",
    "experts",
    "ffn",
    "model",
    # When a name of theirs is asked for: `check_ffn`, `load_run`, `TrainingError`, `diff`, ...
    "testing",
    "runs",
    "runs/train",
    "training",
    "weights",
    "hf",
    "interop",
}
"""Package or file of `moe_ffn` -> what it may import of `moe_ffn`."""

ONLY_PLACES = {
    "lightning": {"moe_ffn/training", "moe_ffn/runs", "experiments"},
    "wandb": {"moe_ffn/training/monitoring/loggers.py", "moe_ffn/report/dashboard"},
    "torchmetrics": {"moe_ffn/metrics", "moe_ffn/training", "moe_ffn/runs"},
    "yaml": {"moe_ffn/config/yaml_files.py"},
    "tokenizers": {"moe_ffn/data"},
    "safetensors": {
        "moe_ffn/weights",
        "moe_ffn/hf",
        "moe_ffn/interop",
        "moe_ffn/training/recovery",
        "moe_ffn/training/distillation.py",
    },
    "transformers": {
        "moe_ffn/interop/kernels.py",
        "moe_ffn/interop/live_models.py",
        "moe_ffn/interop/swap.py",
        "moe_ffn/interop/trainer.py",
        "experiments/benchmark",
        "experiments/overhead.py",
    },
    "datasets": {"moe_ffn/data"},
    "lm_eval": {"moe_ffn/interop/lm_eval.py"},
    "triton": {"moe_ffn/kernels/triton", "experiments/benchmark/new_gpu.py"},
    "plotly": {
        "moe_ffn/report",
        "moe_ffn/metrics/plotting.py",
        "moe_ffn/training/monitoring/loggers.py",
    },
    "scipy": {"moe_ffn/studies", "moe_ffn/weights"},
    "wandb_workspaces": {"moe_ffn/report/dashboard"},
}
"""A library that not everybody has -> the only places that may import it."""


@cache
def imports(path: Path) -> list[tuple[str, list[str]]]:
    """Imports of a file as (module, names), including those inside functions and for types."""
    found: list[tuple[str, list[str]]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.append((node.module or "", [alias.name for alias in node.names]))
    return found


def sources(folder: str) -> list[Path]:
    return sorted((REPOSITORY / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def package_of(path: Path) -> str:
    return package_named(path.relative_to(PACKAGE).with_suffix("").parts)


def package_named(parts: Sequence[str]) -> str:
    folder = "/".join(parts[:2])
    return folder if folder in MAY_IMPORT else parts[0]


def test_packages_import_only_packages_below_them() -> None:
    of_files = [(path, *found) for path in sources("moe_ffn") for found in imports(path)]
    for path, module, names in of_files:
        package = package_of(path)
        assert package in MAY_IMPORT, f"say in MAY_IMPORT what the new '{package}' may import"
        if module.split(".")[0] != "moe_ffn":
            assert module.split(".")[0] != "experiments", f"{path}: experiments stand on top"
            continue
        paths = [f"{module}.{name}".split(".") for name in names] or [module.split(".")]
        for target in (package_named(parts[1:]) for parts in paths if len(parts) > 1):
            allowed = target == package or target in MAY_IMPORT[package]
            assert allowed, f"{name_of(path)} ({package}) must not import moe_ffn.{target}"


def test_the_packages_form_no_cycle() -> None:
    finished: set[str] = set()

    def visit(package: str, above: tuple[str, ...]) -> None:
        assert package not in above, f"cycle: {' -> '.join([*above, package])}"
        for below in MAY_IMPORT[package] - finished:
            visit(below, (*above, package))
        finished.add(package)

    for package in MAY_IMPORT:
        visit(package, ())


@pytest.mark.parametrize("library", ONLY_PLACES)
def test_libraries_stay_in_their_packages(library: str) -> None:
    for path in [*sources("moe_ffn"), *sources("experiments")]:
        if any(module.split(".")[0] == library for module, _ in imports(path)):
            place = name_of(path)
            allowed = [home for home in ONLY_PLACES[library] if place.startswith(home)]
            assert allowed, f"{place} must not import {library}"


# --------------------------------------------------------------------------------- subprocesses

QUIETLY = """
import gc, json, sys, time

gc.disable()  # a pass over torch's objects may fall into either import
start = time.process_time()
import torch

of_torch = time.process_time() - start
import einops, pydantic, pydantic.json_schema

class Warm(pydantic.BaseModel):  # pydantic imports half of itself here
    x: int = 1

before, start = {*sys.modules}, time.process_time()
import moe_ffn

share = (time.process_time() - start) / of_torch
moe_ffn.build_ffn({"type": "moe", "shared_expert": "conv"}, d_model=8)
loaded = [*({*sys.modules} - before)]
from moe_ffn.interop import register, swap_ffn, watch

print(json.dumps([share, loaded, [*sys.modules]]))

sys.modules["yaml"] = None  # no import finds it
try:
    moe_ffn.train
except ModuleNotFoundError as error:
    print(error)
from moe_ffn import *
"""


def import_package() -> subprocess.CompletedProcess[str]:
    """Import in a new process, which prints on its first line:

    processor time as a share of torch's, to fit any processor; modules that were loaded; all modules once
    the functions for live models are imported too.
    """
    return subprocess.run(
        [sys.executable, "-c", QUIETLY],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},  # kept for the second import
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        check=False,
    )


@pytest.fixture(scope="module")
def imported() -> subprocess.CompletedProcess[str]:
    return import_package()


def test_importing_the_package_is_quick_and_loads_nothing_but_torch_einops_and_pydantic(
    imported: subprocess.CompletedProcess[str],
) -> None:
    share, loaded, with_live_models = json.loads(imported.stdout.splitlines()[0])
    shares = [share]
    while (
        min(shares) >= 0.12 and len(shares) < 5
    ):  # bytecode was compiled, or other work disturbed it
        share, loaded, _ = json.loads(import_package().stdout.splitlines()[0])
        shares.append(share)
    assert min(shares) < 0.12, shares
    assert not {"transformers", "yaml"} & set(with_live_models)
    # `_sysconfigdata_...`, named after the platform, belongs to the standard library too.
    libraries = {name.split(".")[0] for name in loaded if not name.startswith("_sysconfigdata")}
    libraries -= set(sys.stdlib_module_names)
    ours = {"moe_ffn", "torch", "einops", "pydantic", "pydantic_core"}
    assert libraries <= ours | {"annotated_types", "typing_extensions", "typing_inspection"}


# ----------------------------------------------------------------------------- missing packages


def test_programs_without_their_packages_print_the_install_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "yaml" else found(n))

    for main in (console, lambda: runpy.run_path(str(REPOSITORY / "experiments/__init__.py"))):
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        message = "the programs need yaml; install with: pip install -e '.[train]'"
        assert capsys.readouterr().err == f"error: {message}\n"
    with pytest.raises(ModuleNotFoundError) as raised:
        moe_ffn.train({})
    assert str(raised.value) == message


def test_a_missing_package_ends_no_interpreter(imported: subprocess.CompletedProcess[str]) -> None:
    need = "needs yaml: pip install -e '.[train]'"
    assert imported.stdout.splitlines()[1:] == [f"moe_ffn.train {need}"]
    assert imported.stderr.splitlines()[-1].startswith("ModuleNotFoundError: moe_ffn.")
    assert imported.stderr.endswith(f"{need}\n")
