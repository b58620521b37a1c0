"""Compilation on first use, once and atomically; `cpu` where it fails; the shares of 2 to 64 threads.

Most compilers here are shell scripts, and what they write is no library: nothing but `load_library` sees it.
The code that divides the backward pass says what it would give to each of so many threads.
"""

from __future__ import annotations

import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from heapq import heapreplace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from moe_ffn.kernels import cpu as choice
from moe_ffn.kernels.base import ExpertWeights
from moe_ffn.kernels.native import __main__ as native_main
from moe_ffn.kernels.native import build
from moe_ffn.kernels.native.build import Kind
from moe_ffn.kernels.torch_products import loop
from moe_ffn.outputs import Plan

SAID = "compiling the CPU kernels, once (10 to 40 s)"
WRITES = 'echo "a library" > "$target"'
FAILS = 'echo "In file included" >&2; echo "experts.cpp:3:7: error: no vector" >&2; exit 1'

LOAD_LIBRARY = torch.ops.load_library

Compiler = Callable[..., None]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(build.VARIABLE, raising=False)
    cache = tmp_path / "cache" / "moe_ffn"
    monkeypatch.setattr(build, "row_file", lambda: cache / "cpu_kernels.json")
    return cache


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The libraries that were to be loaded."""
    libraries: list[Path] = []
    monkeypatch.setattr(torch.ops, "load_library", libraries.append)
    return libraries


@pytest.fixture
def compiler(
    folder: Path, loaded: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Compiler:
    """Make a compiler that does what is written in shell; `$target` is to be made.

    The cache is empty, and no library is loaded.
    """
    script = tmp_path / "c++"
    monkeypatch.setenv("CXX", str(script))

    def make(body: str, version: str = "1") -> None:
        script.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && echo "c++ {version}" && exit\n'
            f"echo >> {tmp_path}/calls\n"
            f'while [ "$1" != -o ]; do shift; done; target=$2\n{body}\n'
        )
        script.chmod(0o755)

    return make


def calls(tmp_path: Path) -> int:
    path = tmp_path / "calls"
    return len(path.read_text()) if path.exists() else 0


def library_of(compiler: str | Path) -> Path:
    return build._command([str(compiler)])[1]


def test_it_is_compiled_once(
    folder: Path,
    compiler: Compiler,
    loaded: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    compiler(WRITES)
    assert build.unavailable_reason.__wrapped__() is None
    assert capsys.readouterr() == ("", f"{SAID}\n")
    assert build.unavailable_reason.__wrapped__() is None
    assert capsys.readouterr() == ("", "")
    assert calls(tmp_path) == 1
    assert sorted(path.suffix for path in folder.iterdir()) == [".lock", ".so"]
    (library,) = folder.glob("*.so")
    assert loaded == [library, library]
    assert library.read_text() == "a library\n"


def test_it_can_be_turned_off(
    folder: Path,
    compiler: Compiler,
    loaded: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    compiler(WRITES)
    monkeypatch.setenv("MOE_FFN_NATIVE", "0")
    assert build.unavailable_reason.__wrapped__() == "is turned off by MOE_FFN_NATIVE=0"
    assert (capsys.readouterr(), loaded, folder.exists()) == (("", ""), [], False)


FAILED, LOST = "could not be compiled: ", "could not be compiled and loaded: "
ERROR = "experts.cpp:3:7: error: no vector"
FAILURES: dict[str, tuple[str, str, str | None]] = {
    "absent": ("", "needs a C++ compiler: neither g++ nor clang++ was found", None),
    "misnamed": ("", f"{LOST}[Errno 2] No such file or directory: '/nowhere/c++'", "/nowhere/c++"),
    "misquoted": ("", f"{LOST}No closing quotation", 'g++ "'),
    "fails": (FAILS, FAILED + ERROR, ""),
    "is killed": ("exit 4", f"{FAILED}exit code 4", ""),
    "no library": (WRITES, LOST + "{}: file too short", ""),
    "no folder": (WRITES, LOST + "[Errno 17] File exists: '{}'", ""),
}
"""Shell code of the compiler, the reason, and $CXX: None if unset, empty for that compiler."""


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_is_logged_once_and_cpu_still_computes(
    failure: str,
    folder: Path,
    compiler: Compiler,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    body, why, cxx = FAILURES[failure]
    compiler(body)
    monkeypatch.setattr(torch.ops, "load_library", LOAD_LIBRARY)
    if cxx:
        monkeypatch.setenv("CXX", cxx)
    elif cxx is None:
        monkeypatch.setenv("PATH", "/nowhere")
        monkeypatch.delenv("CXX")
    if failure == "no folder":
        folder.parent.mkdir()
        folder.write_text("")

    monkeypatch.setattr(choice, "unavailable_reason", cache(build.unavailable_reason.__wrapped__))
    x_TD, up = torch.randn(3, 2), torch.randn(1, 4, 2)
    weights = ExpertWeights("silu", up.requires_grad_(), torch.randn(1, 2, 4))
    ids_N = torch.arange(3)
    plan = Plan(ids_N, torch.ones(3), torch.tensor([3], dtype=torch.int32), ids_N)
    for _ in range(2):
        torch.testing.assert_close(
            choice.cpu(x_TD, plan, weights), loop(x_TD, plan, weights), rtol=1e-5, atol=1e-5
        )

    why = why.format(next(folder.glob("*.so"), folder))
    out, err = capsys.readouterr()
    assert [line for line in err.splitlines() if line != SAID] == [
        f"the C++ kernel {why}; the slower loop over experts is used"
    ]
    assert out == ""


def test_a_failure_is_not_remembered(compiler: Compiler, folder: Path, tmp_path: Path) -> None:
    compiler(FAILS)
    assert build.load() == FAILED + ERROR
    assert not list(folder.glob("*.so"))
    compiler(WRITES)
    assert build.load() is None
    assert calls(tmp_path) == 2


@pytest.mark.parametrize(("kind", "has_bfloat16"), build.SHIPPED)
def test_a_wheel_has_a_library_for_each_kind_of_cpu(
    kind: str,
    has_bfloat16: bool,
    compiler: Compiler,
    loaded: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler(WRITES)
    shutil.copytree(build.HERE, tmp_path / "wheel", ignore=shutil.ignore_patterns("*.so"))
    monkeypatch.setattr(build, "HERE", tmp_path / "wheel")
    libraries = dict(zip(build.SHIPPED, build.ship(), strict=True))
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: kind)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_bfloat16})
    monkeypatch.setattr(torch, "__version__", torch.__version__.partition("+")[0] + "+cu130")
    assert build.load() is None
    assert loaded == [libraries[kind, has_bfloat16]]

    def refuse(library: Path) -> None:
        if library in libraries.values():
            raise OSError(f"{library}: version `GLIBC_9.99' not found")
        loaded.append(library)

    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    monkeypatch.setattr(torch.ops, "load_library", refuse)
    assert build.load() is None
    assert loaded[1:] == [library_of(tmp_path / "c++")], "compiled here"


CHANGES: dict[str, Callable[[pytest.MonkeyPatch, Path], Any]] = {
    "torch": lambda patch, _: patch.setattr(torch, "__version__", "2.99.0"),
    "flags": lambda patch, _: patch.setattr(build, "FLAGS", build.FLAGS + " -g"),
    "vectors": lambda patch, _: patch.setattr(
        torch.backends.cpu, "get_cpu_capability", lambda: "AVX2"
    ),
    "bfloat16": lambda patch, _: patch.setattr(torch.cpu, "get_capabilities", dict),
    "source": lambda _, sources: (sources / "passes.h").write_text("changed"),
    "compiler": lambda _, sources: (sources.parent / "c++").write_text("#!/bin/sh\necho 2"),
    "machine": lambda patch, _: patch.setattr(platform, "machine", lambda: "another"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_each_source_compiler_and_cpu_has_its_own_library(
    change: Callable[[pytest.MonkeyPatch, Path], Any],
    folder: Path,
    compiler: Compiler,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler(WRITES)
    sources = tmp_path / "sources"
    shutil.copytree(build.HERE, sources)
    monkeypatch.setattr(build, "HERE", sources)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    before = library_of(tmp_path / "c++")
    assert before.parent == folder
    assert library_of(tmp_path / "c++") == before
    change(monkeypatch, sources)
    assert library_of(tmp_path / "c++") != before


SIZES = ("ONEDNN", "PANEL", "TILE", "COPIED_ROWS", "ROW_COST")


@pytest.mark.parametrize(
    ("kind", "taken", "sizes"),
    [
        ("AVX512", "AVX512", (1, 64, 64, 256, 1)),
        ("AVX2", "AVX2", (1, 32, 96, 64, 2)),
        ("SVE256", "DEFAULT", (1, 64, 64, 256, 1)),
        ("NO AVX", "DEFAULT", (1, 64, 64, 256, 1)),
    ],
)
def test_a_library_is_for_every_cpu_of_its_kind(
    kind: str, taken: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: kind)
    flags = build._flags(is_clang=False)
    assert not [flag for flag in flags if flag.startswith(("-march", "-mtune", "-mcpu"))]
    assert f"-DCPU_CAPABILITY_{taken}" in flags
    wanted = {f"-DMOE_FFN_{name}={size}" for name, size in zip(SIZES, sizes, strict=True)}
    assert {flag for flag in flags if flag.startswith("-DMOE_FFN_")} == wanted


def test_a_row_changes_only_if_another_is_faster_by_more_than_noise(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(rows: Sequence[Kind]) -> list[float]:
        """Tiles of 128 rows save 1 %, panels of 32 columns 10 %; torch's products cost 30 %."""
        factors = {32: 0.9}, {128: 0.99}
        return [
            factors[0].get(row.panel, 1.0)
            * factors[1].get(row.tile, 1.0)
            * (1 if row.onednn else 1.3)
            for row in rows
        ]

    monkeypatch.setattr(native_main, "measure", measure)
    assert native_main.tune(Kind("-mfma")) == Kind("-mfma", panel=32)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "{'onednn': 0, 'panel': 256, 'tile': 128}: 1.287 of the time"
    assert lines[1:3] == ["{'panel': 16}: 1.000 of the time", "{'panel': 32}: 0.900 of the time"]


@pytest.mark.slow
def test_this_cpu_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "row_file", lambda: tmp_path / "cpu_kernels.json")
    monkeypatch.setattr(native_main, "LAYERS", ((64, 32, 16, 4, 2),))
    monkeypatch.setattr(native_main, "CANDIDATES", (({"tile": 40},),))
    monkeypatch.setattr(sys, "argv", ["native", "--tune"])
    native_main.main()
    compiled, changed, _, written = capsys.readouterr().out.splitlines()
    assert compiled == "the CPU kernels are compiled"
    assert re.fullmatch(r"\{'tile': 40\}: [\d.]+ of the time", changed)
    assert written == f"written: {build.row_file()}; delete it to use the table again"
    table = build.KINDS[build.kind_of_cpu()]
    assert replace(build.row_of_cpu(), tile=table.tile) == table


@pytest.mark.slow
@pytest.mark.parametrize("kind", build.KINDS)
def test_the_kernels_compile_for_other_kinds_of_cpu(
    kind: str, folder: Path, loaded: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if platform.machine() != "x86_64" or shutil.which("g++") is None:
        pytest.skip("needs g++ on x86-64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: kind)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    assert build.load() is None
    assert loaded == [*folder.glob("*.so")]


@pytest.mark.parametrize(
    ("version", "given"), [("g++ (GCC) 12.2.0", True), ("Debian clang version 14.0.6", False)]
)
def test_clang_gets_no_flags_that_it_rejects(
    version: str, given: bool, compiler: Compiler, tmp_path: Path
) -> None:
    compiler(WRITES, version)
    command, _ = build._command([str(tmp_path / "c++")])
    assert {flag in command for flag in build.FLAGS_OF_GCC.split()} == {given}


def test_a_second_process_waits_while_the_first_compiles(
    folder: Path, compiler: Compiler, loaded: list[Path], tmp_path: Path
) -> None:
    compiler("sleep 0.3; " + WRITES)
    # A lock belongs to an open file, so threads exclude each other as processes do.
    threads = [Thread(target=build.load) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls(tmp_path) == 1
    (library,) = folder.glob("*.so")
    assert loaded == [library] * 3


def test_a_cache_is_not_in_the_current_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/a/home")
    for given in ("", "relative"):  # which is to be ignored, says the XDG standard
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert library_of("true").parent == Path("/a/home/.cache/moe_ffn")


@pytest.mark.parametrize(
    ("body", "said"),
    [(WRITES, "the CPU kernels are compiled"), (FAILS, f"the C++ kernel {FAILED}{ERROR}")],
)
@pytest.mark.usefixtures("folder")
def test_it_is_compiled_ahead(
    body: str,
    said: str,
    compiler: Compiler,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    compiler(body)
    monkeypatch.setattr(sys, "argv", ["native"])
    monkeypatch.delitem(sys.modules, "moe_ffn.kernels.native.__main__")  # imported above
    runpy.run_module("moe_ffn.kernels.native", run_name="__main__")
    assert capsys.readouterr().out == f"{said}\n"


@pytest.mark.parametrize("flag", ["--tune", "--ship"])
def test_it_says_what_needs_a_compiler(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "argv", ["native", flag])
    with pytest.raises(SystemExit, match="2"):
        native_main.main()
    assert "needs a C++ compiler: neither g++ nor clang++ was found" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("compiler_name", "said"),
    [("/nowhere/c++", f"{LOST}[Errno 2] No such"), ("false", f"{FAILED}exit code 1")],
)
def test_a_wheel_that_cannot_be_compiled_says_why(
    compiler_name: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CXX", compiler_name)
    monkeypatch.setattr(sys, "argv", ["native", "--ship"])
    with pytest.raises(SystemExit, match="2"):
        native_main.main()
    assert f"error: the C++ kernel {said}" in capsys.readouterr().err


def test_a_compiler_may_be_of_several_words(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(WRITES)
    monkeypatch.setenv("CXX", f"env LC_ALL=C '{tmp_path}/c++'")
    assert build.load() is None
    assert calls(tmp_path) == 1


COMPUTES = """
import torch
from pathlib import Path
from moe_ffn import build_ffn
from moe_ffn.kernels.native.build import unavailable_reason

torch.set_num_threads(2)
assert unavailable_reason() is None
results = []
for backend in ("cpu", "loop"):
    torch.manual_seed(0)
    experts = {"type": "swiglu", "backend": backend}
    ffn = build_ffn({"type": "moe", "num_experts": 4, "experts": experts}, d_model=16)
    x_TD = torch.randn(32, 16, requires_grad=True)
    hidden_TD = ffn(x_TD).hidden
    results.append((hidden_TD, *torch.autograd.grad(hidden_TD.sum(), [x_TD, *ffn.parameters()])))
torch.testing.assert_close(*results)
maps = Path("/proc/self/maps").read_text().splitlines()
assert len({line.split()[-1] for line in maps if "omp.so" in line}) == 1  # a runtime for all
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["g++", "clang++"])
@pytest.mark.usefixtures("folder")
def test_a_compiler_compiles_the_kernels_and_they_compute(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which(name) is None:
        pytest.skip(f"needs {name}")
    monkeypatch.setenv("CXX", name)
    subprocess.run([sys.executable, "-c", COMPUTES], check=True)


D_MODEL, D_FF, NUM_ROWS, NUM_EXPERTS = 512, 512, 16384, 8
LOADS = {
    "one expert": [1.0] + [0.0] * 7,
    "half on one": [0.5] + [0.5 / 7] * 7,
    "halves": [2.0**-i for i in range(1, 8)] + [2.0**-7],
    "even": [1 / 8] * 8,
}

Tasks = Callable[[torch.Tensor, int, int, int], tuple[list[int], list[int]]]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Tasks:
    library = tmp_path_factory.mktemp("tasks") / "tasks.so"
    source = Path(__file__).with_name("tasks.cpp")
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or "clang++"]
    words = [word for word in build._command(compiler)[0] if word != "-O3"]
    command = [*words, f"-I{build.HERE}", source, "-o", library, "-ltorch_cpu", "-lc10"]
    subprocess.run(command, check=True)
    torch.ops.load_library(library)
    return torch.ops.moe_ffn_tests.tasks


def time_of(rows_alone: list[int], counts: list[int], threads: int) -> float:
    """Time until the last thread ends, in rows of one thread; a free thread takes the next task.

    A row takes half of its time in its tile, and half in the gradients of matrices. Copies are not counted:
    they are the same for all loads.
    """
    num_groups = len(counts) // 4
    free = sorted(float(rows) for rows in rows_alone)
    for group in range(num_groups):
        _, tiles, blocks = counts[3 * group : 3 * group + 3]
        rows = counts[3 * num_groups + group]
        for num_tasks in (tiles, blocks):
            for _ in range(num_tasks):
                heapreplace(free, free[0] + rows / 2 / num_tasks)
            free = [max(free)] * threads
    return max(free)


@pytest.mark.slow
@pytest.mark.skipif(build.unavailable_reason() is not None, reason="needs a C++ compiler")
@pytest.mark.parametrize("loads", LOADS)
def test_no_thread_waits_for_long(
    tasks: Tasks, loads: str, capsys: pytest.CaptureFixture[str]
) -> None:
    loads_E = (torch.tensor(LOADS[loads]) * NUM_ROWS).int()
    offsets_E = loads_E.cumsum(0, dtype=torch.int32)
    assert int(offsets_E[-1]) in range(NUM_ROWS - 8, NUM_ROWS + 1)
    over = {}
    for threads in (2, 3, 4, 8, 16, 32, 64):
        before = torch.get_num_threads()
        try:
            rows_alone, counts = tasks(offsets_E, D_MODEL, D_FF, threads)
        finally:
            torch.set_num_threads(before)
        assert sum(rows_alone) + sum(counts[len(counts) * 3 // 4 :]) == offsets_E[-1]
        over[threads] = time_of(rows_alone, counts, threads) / (int(offsets_E[-1]) / threads)
    with capsys.disabled():
        print(
            f"\n{loads}: time over an even share, by threads:",
            {n: round(t, 2) for n, t in over.items()},
        )
    assert max(over.values()) < 1.25


def test_sizes_measured_on_this_machine_replace_those_of_the_table(
    folder: Path,
    compiler: Compiler,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    compiler(WRITES)
    kind = build.kind_of_cpu()
    table, of_table = build.KINDS[kind], library_of(os.environ["CXX"])
    monkeypatch.setattr(native_main, "tune", lambda row: replace(row, panel=16))
    monkeypatch.setattr(sys, "argv", ["native", "--tune"])
    native_main.main()
    capsys.readouterr()
    assert build.row_of_cpu() == replace(table, panel=16)
    assert library_of(os.environ["CXX"]) != of_table

    for wrong in (
        '{"%s": {"panels": 16}}',
        '{"%s": {"panel": 0}}',
        '{"%s": {"flags": 1}}',
        "not JSON %s",
    ):
        build.row_file().write_text(wrong % kind)
        reason = build.load()
        assert reason is not None
        assert "cpu_kernels.json' must hold whole numbers for copied_rows, onednn, panel" in reason
        assert reason.endswith("; delete it")
    build.row_file().write_text('{"another kind": {"panel": 16}}')
    assert build.row_of_cpu() == table
