"""The wheel, installed in a fresh environment, is all that a user needs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import moe_ffn

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a copy, since building leaves folders in the source."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("moe_ffn", "experiments", "configs", "tests"):
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "_*_cache")
        )
    built = tmp_path_factory.mktemp("wheel")
    pip(sys.executable, "wheel", "--no-deps", "--no-build-isolation", "-w", str(built), str(source))
    (path,) = built.glob("*.whl")
    return path


def pip(python: str | Path, *argv: str) -> None:
    command = [str(python), "-m", "pip", "-q", "--disable-pip-version-check", *argv]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel, which sees the other packages of this one but not the clone."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    pip(python, "install", "--no-deps", "--no-index", str(wheel))
    own = sysconfig.get_path("purelib", vars={"base": str(folder)})
    # Its packages come first. That of this clone is in none of these folders: it is installed by a
    # .pth file, which Python reads only in an environment's own folder.
    packages = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    (Path(own) / "the_packages_of_the_tests.pth").write_text("\n".join(packages) + "\n")
    return folder


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(environment: Path, tmp_path: Path) -> Run:
    """Run a command of the environment in an empty folder; all that it may write is in `tmp_path`."""
    home = tmp_path / "home"
    work = tmp_path / "work"
    for folder in (home, work):
        folder.mkdir()
    variables = {
        "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(home),
        "TMPDIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(environment / "bin" / argv[0]), *argv[1:]],
            cwd=work,
            env=variables,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())

    assert {name.split("/")[0] for name in names} == {
        "moe_ffn",
        f"moe_ffn-{moe_ffn.__version__}.dist-info",
    }
    missing = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "moe_ffn").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    } - names
    assert missing == set()


def clone() -> set[Path]:
    """Return the files of the clone in folders that a program might write to."""
    folders = [ROOT / name for name in ("moe_ffn", "experiments", "configs", "runs", "build")]
    inside = {path for folder in folders for path in folder.rglob("*")}
    return {*ROOT.iterdir(), *(path for path in inside if "__pycache__" not in path.parts)}


def test_an_installed_user_trains_reads_the_report_and_generates(
    run: Run, environment: Path, tmp_path: Path
) -> None:
    imported = run("python", "-c", "import moe_ffn; print(moe_ffn.__file__)")
    assert imported.stdout.startswith(str(environment)), imported.stderr
    work = tmp_path / "work"
    words = ["the cat ", "sat on ", "a mat.\n", "def f(x):\n", "    return x\n"]
    text = "".join(words[(3 * place + place * place // 7) % 5] for place in range(900))
    (work / "text.txt").write_text(text)
    (work / "tiny.yaml").write_text(
        "model: {d_model: 16, num_layers: 2, attention: {num_heads: 2}}\n"
        "data: {corpus: {type: text, paths: [text.txt]}, seq_len: 16, batch_size: 4,\n"
        "       validation_tokens: 160, cache_dir: cache}\n"
        "trainer: {max_steps: 4, accelerator: cpu, precision: 32-true}\n"
        "logging: {wandb: {mode: disabled}}\n"
        "sample: {num_tokens: 8}\n"
    )
    before = clone()

    trained = run("moe-ffn", "train", "--config", "tiny.yaml", "--run.name", "mine")
    assert trained.returncode == 0, trained.stderr
    assert "validation loss" in trained.stdout
    assert (work / "runs" / "mine" / "summary.json").is_file()

    reported = run("moe-ffn", "report", "runs/mine")
    assert (reported.returncode, reported.stdout) == (0, "runs/mine/report.html\n"), reported.stderr
    page = (work / "runs" / "mine" / "report.html").read_text()
    assert "<style>" in page
    assert re.search(r"<h\d>mine", page)

    generated = run("moe-ffn", "generate", "runs/mine", "--prompt", "the ", "--num-tokens", "5")
    assert generated.returncode == 0, generated.stderr
    assert re.fullmatch(r"5 tokens in .* tokens/s\n", generated.stderr)
    assert generated.stdout.startswith("the ")

    compared = run(
        *("moe-ffn", "sweep", "tiny.yaml", "--name", "all", "--trainer.max_steps", "2"),
        *("--sample.num_tokens", "0"),
    )
    assert compared.returncode == 0, compared.stdout + compared.stderr
    compared = run("moe-ffn", "compare", "runs/all")
    assert compared.returncode == 0, compared.stdout + compared.stderr

    again = run("moe-ffn", "train", "--resume", "runs/mine")
    assert again.returncode == 2
    assert again.stderr.splitlines()[-1].startswith("error: 'runs/mine' is finished; raise ")

    assert {path.name for path in work.iterdir()} == {"text.txt", "tiny.yaml", "cache", "runs"}
    of_home = [path for path in (tmp_path / "home").rglob("*") if path.is_file()]
    # The kernels, compiled once: `generate` says no word of it.
    cache = tmp_path / "home" / ".cache"
    assert {path.parent for path in of_home} <= {cache / "moe_ffn"}
    assert {path.suffix for path in (cache / "moe_ffn").glob("*")} <= {".so", ".lock"}
    assert clone() == before
