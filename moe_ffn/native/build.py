"""Compiles the C++ of this folder, once for a machine, and loads its operators.

Nothing is compiled at installation. What is compiled is kept by all that it depends on: the sources, torch,
the compiler and its flags, so that a folder which several machines share holds one file for each kind:

    native-KEY-DIGEST.so   the library; the digest is that of its bytes
    native-KEY.failed      what the compiler said instead, which is not asked again while this is there
    native-KEY.lock        held by the process that compiles
    .native-KEY-*          the folder in which it does
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

from moe_ffn.environment import is_first_here

HERE = Path(__file__).parent
SOURCES = ("experts.cpp", "backward.h", "layer.h", "passes.h", "routing.h")

VARIABLE = "MOE_FFN_NATIVE"
"""Set to 0, this variable of the environment turns the compiled kernels off."""

VECTORS = {
    "AVX512": "-mavx512f -mavx512dq -mavx512vl -mavx512bw -mavx2 -mfma -mf16c",
    "AVX2": "-mavx2 -mfma -mf16c",
    "DEFAULT": "-DAT_BUILD_ARM_VEC256_WITH_SLEEF",
}
"""The flags of each kind of CPU that at::vec has vectors for. Named one by one, so that a file never holds an
instruction which another CPU of the same kind lacks. Every ARM has NEON, which is in the last, with torch's
exponential function of vectors."""

FLAGS = "-O3 -std=c++20 -shared -fPIC -fno-math-errno -fno-trapping-math -DAT_PER_OPERATOR_HEADERS"
GCC_FLAGS = (
    "-fno-ipa-cp-clone -fno-unswitch-loops -fno-split-loops -pipe --param=ggc-min-heapsize=1000000"
)
"""Without the passes that take long and gain nothing, and without looking for memory to use again below 1 GB.
clang refuses flags that it does not know."""
TIMEOUT_SECONDS = 300


@cache
def why_not() -> str | None:
    """Load the operators, compiled first where they are not yet; or why that cannot be, in a sentence's rest.

    What the user did not ask for is said on stderr, once in a process; of several on a machine by the first.
    """
    if os.environ.get(VARIABLE) == "0":
        return f"is turned off by {VARIABLE}=0"
    why = load()
    if why is not None and is_first_here():
        _say(f"the compiled CPU kernel {why}; the slower ones of torch are used")
    return why


def load() -> str | None:
    """The same, which says nothing but that it compiles, and does not ask for the variable."""
    if sys.platform == "win32":
        return "is not compiled on Windows"
    compiler = shlex.split(os.environ.get("CXX", ""))  # it may be `ccache g++`
    compiler = compiler or [name for name in ("g++", "clang++") if shutil.which(name)][:1]
    if not compiler:
        return "needs a C++ compiler: neither g++ nor clang++ was found"
    try:
        place = _place(compiler)
        failure = place.with_suffix(".failed")
        library = _library(place)
        if library is None and not failure.exists():
            library = _build(compiler, place, failure)
        if library is None:
            return f"could not be compiled, as '{failure}' says; remove that file to try again"
        torch.ops.load_library(library)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:  # RuntimeError: no home
        return f"could not be compiled and loaded: {error.__cause__ or error}"
    return None


def _place(compiler: list[str]) -> Path:
    """Folder and beginning of the name of what is kept for this machine."""
    parts = [torch.__version__, platform.machine(), *compiler, _version(compiler)]
    parts += _flags(compiler)
    parts += [(HERE / name).read_text() for name in SOURCES]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    cache_home = given if given.is_absolute() else Path.home() / ".cache"
    return cache_home / "moe_ffn" / f"native-{key}"


def _version(compiler: list[str]) -> str:
    command = [*compiler, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=True)
    return done.stdout


def _flags(compiler: list[str]) -> list[str]:
    torch_folder = Path(torch.__file__).parent
    kind = torch.backends.cpu.get_cpu_capability()
    kind = kind if kind in VECTORS else "DEFAULT"  # torch says "NO AVX", or "SVE256"
    flags = [*FLAGS.split(), f"-DCPU_CAPABILITY={kind}", f"-DCPU_CAPABILITY_{kind}"]
    flags += [] if "clang" in _version(compiler) else GCC_FLAGS.split()
    flags += VECTORS[kind].split()
    if kind == "AVX512" and torch.cpu.get_capabilities().get("avx512_bf16"):
        flags.append("-mavx512bf16")
    flags += [f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"]
    return [*flags, f"-I{torch_folder / 'include/torch/csrc/api/include'}"]


def _library(place: Path) -> Path | None:
    """The library, if it is whole: to load a part of one (a full disk, a copy cut short) ends the process."""
    for path in sorted(place.parent.glob(f"{place.name}-*.so")):
        if path.name == _name(place, path.read_bytes()):
            return path
    return None


def _name(place: Path, content: bytes) -> str:
    return f"{place.name}-{hashlib.sha256(content).hexdigest()[:16]}.so"


def _build(compiler: list[str], place: Path, failure: Path) -> Path | None:
    """Make the library, or the file with what the compiler said. Another process may do so just now."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(place.with_suffix(".lock")) as alone:
        library = _library(place)
        if library is not None or failure.exists():
            return library
        prefix = f".{place.name}-"
        if alone:  # what a killed process has left
            for folder in place.parent.glob(f"{prefix}*"):
                shutil.rmtree(folder, ignore_errors=True)
        _say("compiling the CPU kernels, once (10 to 20 s)")
        start = time.monotonic()
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=prefix) as folder:
            target = Path(folder) / "native.so"
            source = str(HERE / SOURCES[0])
            command = [*compiler, *_flags(compiler), source, "-o", str(target)]
            command += ["-ltorch_cpu", "-lc10"]
            words = _run(command)
            if words is None and target.exists():
                library = place.with_name(_name(place, target.read_bytes()))
                target.replace(library)  # whole or not there, whoever else looks
                _say(f"compiled the CPU kernels in {time.monotonic() - start:.0f} s")
                return library
            target.write_text(f"{shlex.join(command)}\n\n{words}\n", encoding="utf-8")
            target.replace(failure)
            return None


def _run(command: list[str]) -> str | None:
    """What the compiler says where it fails."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it was not done after {TIMEOUT_SECONDS} s"
    return done.stdout + done.stderr if done.returncode else None


def _say(what: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr is full, or closed
        print(what, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _one_at_a_time(lock: Path) -> Iterator[bool]:
    """Wait for others. False where a file system has no locks: two may do the same work, unharmed."""
    import fcntl  # not on Windows

    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True
