"""Compiling on first use: once, whole or not at all, and never a reason for `cpu` not to run.

Most compilers here are shell scripts, and what they write is no library: nothing but `load_library` sees it.
"""

from __future__ import annotations

import os
import platform
import resource
import runpy
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from moe_ffn.kernels import cpu as choice
from moe_ffn.kernels.base import ExpertWeights
from moe_ffn.kernels.native import build
from moe_ffn.kernels.torch_products import loop
from moe_ffn.outputs import Plan

SAID = ["compiling the CPU kernels, once (10 to 20 s)", "compiled the CPU kernels in 0 s"]
WRITES = 'echo "a library" > "$target"'
FAILS = 'echo "experts.cpp:3:7: error: no such vector" >&2; exit 1'
NAMES_MEMORY = 'echo "experts.cpp:3:7: error: no memory_format in x" >&2; exit 1'
ENDS = "compilation terminated."
FULL_DISK = (
    f'echo "c.s: fatal error: error writing to c.s: No space left on device\n{ENDS}" >&2; exit 1'
)
KILLED = f'echo "g++: fatal error: Killed signal terminated program cc1plus\n{ENDS}" >&2; exit 1'

LOAD_LIBRARY = torch.ops.load_library

Compiler = Callable[..., None]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(build.VARIABLE, raising=False)
    return tmp_path / "cache" / "moe_ffn"


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
    """Make a compiler that does what is written in shell; `$target` is to be made, `$call` begins with 1.

    The cache is empty, and no library is loaded.
    """
    script = tmp_path / "c++"
    monkeypatch.setenv("CXX", str(script))

    def make(body: str, version: str = "1") -> None:
        script.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && echo "c++ {version}" && exit\n'
            f"echo >> {tmp_path}/calls; call=$(wc -l < {tmp_path}/calls)\n"
            f'while [ "$1" != -o ]; do shift; done; target=$2\n{body}\n'
        )
        script.chmod(0o755)

    return make


def calls(tmp_path: Path) -> int:
    path = tmp_path / "calls"
    return len(path.read_text()) if path.exists() else 0


def kinds(folder: Path) -> list[str]:
    return sorted(path.suffix or path.name for path in folder.iterdir())


def place_of(compiler: str | Path) -> Path:
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
    assert capsys.readouterr().err.splitlines() == SAID
    assert build.unavailable_reason.__wrapped__() is None
    assert capsys.readouterr() == ("", "")
    assert calls(tmp_path) == 1
    assert kinds(folder) == [".lock", ".so"]
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


REMEMBERED = "could not be compiled, as '{}' says; remove that file to try again"
LOST = "could not be compiled and loaded: "


@pytest.mark.parametrize(
    ("why", "body"),
    [
        ("needs a C++ compiler: neither g++ nor clang++ was found", "no compiler"),
        (LOST + "[Errno 2] No such file or directory: '/nowhere/c++'", "another"),
        (LOST + "No closing quotation", "unreadable"),
        (LOST + "Command '['{cxx}', '--version']' timed out after 0.1 seconds", "no version"),
        (REMEMBERED, FAILS),
        (LOST + "the compiler was not done after 0.1 s", "sleep 60"),
        (LOST + "{}: file too short", WRITES),
        (LOST + "[Errno 17] File exists: '{}'", "no folder"),
        (LOST + "Could not determine home directory.", "no home"),
    ],
    ids=[
        *("absent", "misnamed", "misquoted", "no version", "fails", "slow"),
        *("no library", "no folder", "no home"),
    ],
)
def test_a_failure_is_logged_once_and_cpu_still_computes(
    why: str,
    body: str,
    folder: Path,
    compiler: Compiler,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    compiler(body, "$(sleep 60)" if body == "no version" else "1")
    cxx = os.environ["CXX"]
    monkeypatch.setattr(torch.ops, "load_library", LOAD_LIBRARY)
    if body == "sleep 60":
        monkeypatch.setattr(build, "TIMEOUT_SECONDS", 0.1)
    elif body == "no version":
        monkeypatch.setattr(build, "VERSION_TIMEOUT_SECONDS", 0.1)
    elif body == "no compiler":
        monkeypatch.setenv("PATH", "/nowhere")
        monkeypatch.delenv("CXX")
    elif body == "another":
        monkeypatch.setenv("CXX", "/nowhere/c++")
    elif body == "unreadable":
        monkeypatch.setenv("CXX", 'g++ "')
    elif body == "no folder":
        folder.parent.mkdir()
        folder.write_text("")
    elif body == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(os, "getuid", lambda: 2**31 - 5)

    monkeypatch.setattr(choice, "unavailable_reason", cache(build.unavailable_reason.__wrapped__))
    x_TD, up = torch.randn(3, 2), torch.randn(1, 4, 2)
    weights = ExpertWeights("silu", up.requires_grad_(), torch.randn(1, 2, 4))
    ids_N = torch.arange(3)
    plan = Plan(ids_N, torch.ones(3), torch.tensor([3], dtype=torch.int32), ids_N)
    for _ in range(2):
        torch.testing.assert_close(
            choice.cpu(x_TD, plan, weights), loop(x_TD, plan, weights), rtol=1e-5, atol=1e-5
        )

    suffix = "failed" if why == REMEMBERED else "so"
    path = next(folder.glob(f"*.{suffix}"), folder)
    said = (
        f"the compiled CPU kernel {why.format(path, cxx=cxx)}; the slower loop over experts is used"
    )
    out, err = capsys.readouterr()
    assert [line for line in err.splitlines() if line not in SAID] == [said]
    assert out == ""
    if why == REMEMBERED:
        assert kinds(folder) == [".failed", ".lock"]


def test_of_several_processes_on_a_machine_the_first_one_speaks(
    compiler: Compiler,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    compiler(FAILS)
    assert build.load() is not None
    capsys.readouterr()
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert build.unavailable_reason.__wrapped__() is not None
    assert capsys.readouterr().err == ""


def test_a_failure_is_kept_with_its_words_until_its_file_is_removed(
    folder: Path,
    compiler: Compiler,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    compiler('[ $call -gt 1 ] && echo > "$target" && exit; ' + FAILS)
    first, again = build.load(), build.load()
    assert calls(tmp_path) == 1
    (failure,) = folder.glob("*.failed")
    assert first == again == REMEMBERED.format(failure)
    assert capsys.readouterr().err.splitlines() == SAID[:1]
    assert "experts.cpp" in failure.read_text()
    assert failure.read_text().endswith("\n\nexperts.cpp:3:7: error: no such vector\n\n")

    failure.unlink()
    assert build.load() is None
    assert (calls(tmp_path), kinds(folder)) == (2, [".lock", ".so"])


@pytest.mark.parametrize("failure", [FULL_DISK, KILLED, "exit 4", "sleep 60"])
def test_a_failure_that_may_pass_is_not_remembered(
    failure: str,
    folder: Path,
    compiler: Compiler,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler(f'[ $call -gt 1 ] && echo > "$target" && exit; {failure}')
    with monkeypatch.context() as patch:
        patch.setattr(build, "TIMEOUT_SECONDS", 3 if "sleep" in failure else 60)
        first = build.load()
    assert first is not None
    assert first.startswith(LOST)
    assert ENDS not in first
    assert not list(folder.glob("*.failed"))

    assert build.load() is None
    assert (calls(tmp_path), kinds(folder)) == (2, [".lock", ".so"])


def test_an_error_in_code_that_is_about_memory_is_remembered(
    folder: Path, compiler: Compiler, tmp_path: Path
) -> None:
    compiler(NAMES_MEMORY)

    assert build.load() == build.load() == REMEMBERED.format(*folder.glob("*.failed"))
    assert calls(tmp_path) == 1


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
def test_what_a_library_depends_on_has_one_of_its_own(
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
    before = place_of(tmp_path / "c++")
    assert before.parent == folder
    assert place_of(tmp_path / "c++") == before
    change(monkeypatch, sources)
    assert place_of(tmp_path / "c++") != before


def test_kinds_of_cpu_without_flags_of_their_own_are_compiled_as_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for kind in ("SVE256", "Z VECTOR", "NO AVX", "DEFAULT"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda kind=kind: kind)
        flags = [flag for flag in build._flags(is_clang=False) if flag.startswith(("-m", "-DCPU"))]
        assert flags == ["-DCPU_CAPABILITY=DEFAULT", "-DCPU_CAPABILITY_DEFAULT"]


@pytest.mark.parametrize("kind", ["AVX512", "AVX2"])
def test_a_library_is_for_every_cpu_of_its_kind(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: kind)
    assert not [
        flag
        for flag in build._flags(is_clang=False)
        if flag.startswith(("-march", "-mtune", "-mcpu"))
    ]
    assert f"-DCPU_CAPABILITY_{kind}" in build._flags(is_clang=False)


@pytest.mark.parametrize(
    ("version", "given"), [("g++ (GCC) 12.2.0", True), ("Debian clang version 14.0.6", False)]
)
def test_clang_gets_no_flags_that_it_refuses(
    version: str, given: bool, compiler: Compiler, tmp_path: Path
) -> None:
    compiler(WRITES, version)
    command, _ = build._command([str(tmp_path / "c++")])
    assert {flag in command for flag in build.FLAGS_OF_GCC.split()} == {given}


def test_of_two_at_once_one_compiles_and_the_other_waits(
    folder: Path, compiler: Compiler, loaded: list[Path], tmp_path: Path
) -> None:
    compiler("sleep 0.3; " + WRITES)
    # A lock belongs to whoever has opened its file, so that threads exclude each other as processes do.
    threads = [Thread(target=build.load) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls(tmp_path) == 1
    (library,) = folder.glob("*.so")
    assert loaded == [library] * 3


@pytest.mark.parametrize("damage", [b"", b"a lib", b"another\n"], ids=["empty", "cut", "changed"])
def test_a_damaged_library_is_compiled_again(
    damage: bytes, folder: Path, compiler: Compiler, tmp_path: Path
) -> None:
    compiler(WRITES)
    assert build.load() is None
    (library,) = folder.glob("*.so")
    library.write_bytes(damage)
    assert build.load() is None
    assert library.read_text() == "a library\n"
    assert (calls(tmp_path), kinds(folder)) == (2, [".lock", ".so"])


def test_a_killed_process_leaves_nothing_that_is_loaded_or_stays(
    folder: Path, compiler: Compiler
) -> None:
    compiler(f"{WRITES}; [ $call = 1 ] && kill -9 $PPID; exit 0")
    child = os.fork()
    if child == 0:
        try:
            build.load()
        finally:
            os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    (left,) = folder.glob(".native-*")
    assert [path.name for path in left.iterdir()] == ["native.so"]
    of_another = folder / ".native-0123456789abcdef-x"
    of_another.mkdir()

    assert build.load() is None
    assert kinds(folder) == [".lock", of_another.name, ".so"]


def test_a_cache_is_not_in_the_current_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/a/home")
    for given in ("", "relative"):  # which is to be ignored, says the XDG standard
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert place_of("true").parent == Path("/a/home/.cache/moe_ffn")


@pytest.mark.parametrize("error", [subprocess.TimeoutExpired("c++", 1), KeyboardInterrupt()])
def test_what_a_compiler_has_started_ends_with_it(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "fifo")
    opened: list[int] = []

    def communicate(*_: object, **__: object) -> None:
        opened.append(os.open(tmp_path / "fifo", os.O_RDONLY))  # once the child has opened it, too
        raise error

    monkeypatch.setattr(subprocess.Popen, "communicate", communicate)
    with pytest.raises(type(error)):
        build._run(["sh", "-c", f"sleep 60 > '{tmp_path}/fifo' & wait"], timeout=60)
    assert select.select(opened, [], [], 10)[0] == opened
    assert os.read(opened[0], 1) == b""  # nobody has it open any more
    os.close(opened[0])


@pytest.mark.parametrize("body", [WRITES, FAILS])
def test_it_is_compiled_ahead(
    body: str, compiler: Compiler, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler(body)
    runpy.run_module("moe_ffn.kernels.native", run_name="__main__")
    said = "the CPU kernels are compiled"
    if body == FAILS:
        (failure,) = folder.glob("*.failed")
        said = f"the compiled CPU kernel {REMEMBERED.format(failure)}"
    assert capsys.readouterr().out == f"{said}\n"


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_setting_up_compiles_ahead() -> None:
    root = Path(__file__).parents[3]
    would_run = ["make", "--dry-run", "--always-make", "setup"]
    done = subprocess.run(would_run, cwd=root, capture_output=True, text=True, check=True)
    assert ".venv/bin/python -m moe_ffn.kernels.native" in done.stdout.splitlines()


def test_a_compiler_may_write_any_bytes(folder: Path, compiler: Compiler) -> None:
    compiler(r"printf 'c.h:1:2: error: ung\374ltig' >&2; exit 1", version=r"$(printf '\377')")
    why = build.load()
    (failure,) = folder.glob("*.failed")
    assert why == REMEMBERED.format(failure)
    assert failure.read_text(encoding="utf-8").endswith("\n\nc.h:1:2: error: ung\ufffdltig\n")


def test_a_compiler_may_be_of_several_words(
    compiler: Compiler,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler(WRITES)
    monkeypatch.setenv("CXX", f"env LC_ALL=C '{tmp_path}/c++'")
    assert build.load() is None
    assert calls(tmp_path) == 1


COMPUTES = """
import torch
from pathlib import Path
from moe_ffn.kernels.cpu import cpu
from moe_ffn.kernels.native.build import unavailable_reason
from tests.kernels.test_cpu import *

torch.set_num_threads(2)
assert unavailable_reason() is None
results = (compute(b, inputs(True), gated=True, activation="silu") for b in (cpu, loop))
torch.testing.assert_close(*results)
maps = Path("/proc/self/maps").read_text().splitlines()
assert len({line.split()[-1] for line in maps if "omp.so" in line}) == 1  # a runtime for all
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("clang++") is None, reason="needs clang")
@pytest.mark.usefixtures("folder")
def test_clang_compiles_the_kernels_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "clang++")
    subprocess.run([sys.executable, "-c", COMPUTES], check=True)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
def test_two_processes_compile_the_kernels_in_15_s_and_compute(folder: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    both = [
        subprocess.Popen([sys.executable, "-c", COMPUTES], stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate()[1] for process in both]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert [process.returncode for process in both] == [0, 0], said
    assert sorted(len(lines.splitlines()) for lines in said) == [0, 2]
    assert kinds(folder) == [".lock", ".so"]

    subprocess.run([sys.executable, "-c", COMPUTES], check=True)
    done = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = [usage.ru_utime + usage.ru_stime for usage in (before, after, done)]
    # Without what two processes need that find a library.
    assert seconds[1] - seconds[0] - 2 * (seconds[2] - seconds[1]) < 15
