"""Compiles the C++ of this folder, once for a machine, and loads its operators.

Nothing is compiled at installation. What is compiled is kept by all that it depends on: the sources, torch,
the compiler and its flags, so that a folder which several machines share holds one file for each kind.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

HERE = Path(__file__).parent
SOURCES = ("experts.cpp", "passes.h")

VARIABLE = "MOE_FFN_NATIVE"
"""Set to 0, this variable of the environment turns the compiled kernels off."""

VECTORS = {
    "AVX512": "-mavx512f -mavx512dq -mavx512vl -mavx512bw -mavx2 -mfma -mf16c",
    "AVX2": "-mavx2 -mfma -mf16c",
}
"""The flags of each kind of CPU that torch tells apart. Named one by one, so that a file never holds an
instruction which another CPU of the same kind lacks."""

FLAGS = "-O3 -std=c++20 -shared -fPIC -fopenmp -fno-math-errno -fno-trapping-math -DAT_PER_OPERATOR_HEADERS"
TIMEOUT_SECONDS = 300


@cache
def why_not() -> str | None:
    """Load the operators, compiled first where they are not yet; or why that cannot be, in a sentence's rest.

    It compiles, or fails to, once for all processes, and says so on stderr.
    """
    if os.environ.get(VARIABLE) == "0":
        return f"is turned off by {VARIABLE}=0"
    if sys.platform == "win32":
        return "is not compiled on Windows"
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        return "needs a C++ compiler: neither g++ nor clang++ was found"
    try:
        library, failure = _paths(compiler)
        if not library.exists() and not failure.exists():
            _build(compiler, library, failure)
        if failure.exists():
            return f"could not be compiled, as '{failure}' says; remove that file to try again"
        torch.ops.load_library(library)
    except (OSError, subprocess.SubprocessError) as error:
        return _said(f"could not be compiled: {error}")
    return None


def _paths(compiler: str) -> tuple[Path, Path]:
    """The file that this machine's library is kept in, and that of the compiler's complaint."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    parts = [torch.__version__, platform.machine(), version.stdout, *_command(compiler, "")]
    parts += [(HERE / name).read_text() for name in SOURCES]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    library = Path(home).expanduser() / "moe_ffn" / f"native-{key}.so"
    return library, library.with_suffix(".failed")


def _command(compiler: str, target: str) -> list[str]:
    """The compiler's command line."""
    torch_folder = Path(torch.__file__).parent
    kind = torch.backends.cpu.get_cpu_capability()
    flags = [*FLAGS.split(), f"-DCPU_CAPABILITY={kind}", f"-DCPU_CAPABILITY_{kind}"]
    if kind == "AVX512" and torch.cpu.get_capabilities().get("avx512_bf16"):
        flags.append("-mavx512bf16")
    includes = [
        f"-I{torch_folder / 'include'}",
        f"-I{torch_folder / 'include/torch/csrc/api/include'}",
    ]
    libraries = [f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"]
    source = str(HERE / "experts.cpp")
    return [
        compiler,
        *flags,
        *VECTORS.get(kind, "").split(),
        *includes,
        source,
        "-o",
        target,
        *libraries,
    ]


def _build(compiler: str, library: Path, failure: Path) -> None:
    """Make the library, or the file with what the compiler said. Another process may do so just now."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(library.with_suffix(".lock")):
        if library.exists() or failure.exists():
            return
        print("compiling the CPU kernels, once (10 to 20 s)", file=sys.stderr, flush=True)
        start = time.monotonic()
        with tempfile.TemporaryDirectory(dir=library.parent, prefix=".native-") as folder:
            target = Path(folder) / library.name
            command = _command(compiler, str(target))
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
            )
            if done.returncode == 0:
                target.replace(library)  # whole or not there, whoever else looks
                took = f"compiled the CPU kernels in {time.monotonic() - start:.0f} s"
                print(took, file=sys.stderr, flush=True)
                return
            target.write_text(f"{' '.join(command)}\n\n{done.stderr}")
            target.replace(failure)
        _said(f"could not be compiled; '{failure}' has the compiler's words")


def _said(why: str) -> str:
    print(
        f"the compiled CPU kernel {why}; the slower ones of torch are used",
        file=sys.stderr,
        flush=True,
    )
    return why


@contextlib.contextmanager
def _one_at_a_time(lock: Path) -> Iterator[None]:
    """Wait for other processes; where a file system has no locks, two may do the same work, unharmed."""
    import fcntl  # not on Windows

    with lock.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
