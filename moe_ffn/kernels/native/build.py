"""Compilation of the C++ in this folder, once per machine, and loading of its operators.

Nothing is compiled at installation. KEY in `native-KEY.so` is a hash of sources, torch version, compiler and
flags, so different machines can share a cache. A process locks `native-KEY.lock` while it compiles.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

from moe_ffn.files import write_atomically

log = logging.getLogger(__name__)

HERE = Path(__file__).parent
SOURCES = ("experts.cpp", "backward.h", "layer.h", "passes.h", "routing.h")

VARIABLE = "MOE_FFN_NATIVE"
"""Environment variable; `0` turns the compiled kernels off."""

INSTRUCTION_SETS = {
    "AVX512": "-mavx512f -mavx512dq -mavx512vl -mavx512bw -mavx2 -mfma -mf16c",
    "AVX2": "-mavx2 -mfma -mf16c",
    "DEFAULT": "-DAT_BUILD_ARM_VEC256_WITH_SLEEF",
}
"""Compiler flags for each kind of CPU that at::vec supports.

They name instruction sets instead of `-march=native`, so that a library runs on every CPU of its kind. The
flag of DEFAULT enables torch's vector exponential on ARM with NEON; SVE would need its own flags.
"""

FLAGS = "-O3 -std=c++20 -shared -fPIC -fno-math-errno -fno-trapping-math -DAT_PER_OPERATOR_HEADERS"
FLAGS_OF_GCC = (
    "-fno-ipa-cp-clone -fno-unswitch-loops -fno-split-loops -pipe --param=ggc-min-heapsize=1000000"
)
"""Flags that only GCC has; they skip slow passes without gain, and garbage collection below 1 GB."""


@cache
def unavailable_reason() -> str | None:
    """Load the operators unless the environment forbids it; return why they are not available, or None.

    The reason completes the sentence `the C++ kernel ...`. A failure is logged.
    """
    if os.environ.get(VARIABLE) == "0":
        return f"is turned off by {VARIABLE}=0"
    reason = load()
    if reason is not None:
        log.warning("the C++ kernel %s; the slower loop over experts is used", reason)
    return reason


def load() -> str | None:
    """Compile the operators if necessary, and load them; return why that failed, or None."""
    if sys.platform == "win32":
        return "is not compiled on Windows"
    try:
        compiler = shlex.split(os.environ.get("CXX", ""))  # several words, such as `ccache g++`
        compiler = compiler or [name for name in ("g++", "clang++") if shutil.which(name)][:1]
        if not compiler:
            return "needs a C++ compiler: neither g++ nor clang++ was found"
        command, library = _command(compiler)
        if not library.exists():
            _build(command, library)
        torch.ops.load_library(library)
    except subprocess.CalledProcessError as error:
        log.debug("%s\n%s", shlex.join(error.cmd), error.stderr)
        lines = error.stderr.splitlines()
        message = next((line for line in lines if "error" in line), f"exit code {error.returncode}")
        return f"could not be compiled: {message.strip()}"
    except (OSError, RuntimeError, ValueError) as error:
        return f"could not be compiled and loaded: {error.__cause__ or error}"
    return None


def _command(compiler: list[str]) -> tuple[list[str], Path]:
    """Return the compiler command without files, and the path of the library."""
    version = _run([*compiler, "--version"])
    command = [*compiler, *_flags(is_clang="clang" in version)]
    inputs = [torch.__version__, platform.machine(), version, *command]
    inputs += [(HERE / name).read_text() for name in SOURCES]
    key = hashlib.sha256("\0".join(inputs).encode()).hexdigest()[:16]
    cache_home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    cache_home = cache_home if cache_home.is_absolute() else Path.home() / ".cache"
    return command, cache_home / "moe_ffn" / f"native-{key}.so"


def _flags(is_clang: bool) -> list[str]:
    torch_folder = Path(torch.__file__).parent
    kind = torch.backends.cpu.get_cpu_capability()
    kind = kind if kind in INSTRUCTION_SETS else "DEFAULT"  # for "NO AVX" and "SVE256"
    flags = [*FLAGS.split(), *([] if is_clang else FLAGS_OF_GCC.split())]
    flags += [f"-DCPU_CAPABILITY={kind}", f"-DCPU_CAPABILITY_{kind}"]
    flags += INSTRUCTION_SETS[kind].split()
    flags += os.environ.get("MOE_TUNE", "").split()
    if kind == "AVX512" and torch.cpu.get_capabilities().get("avx512_bf16"):
        flags.append("-mavx512bf16")
    flags += [f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"]
    return [*flags, f"-I{torch_folder / 'include/torch/csrc/api/include'}"]


def _build(command: list[str], library: Path) -> None:
    """Compile the library, or wait until another process has compiled it."""
    import fcntl  # not on Windows

    library.parent.mkdir(parents=True, exist_ok=True)
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
        if library.exists():
            return
        log.warning("compiling the CPU kernels, once (10 to 20 s)")
        with tempfile.TemporaryDirectory() as folder:
            compiled = Path(folder) / library.name
            _run([*command, str(HERE / SOURCES[0]), "-o", str(compiled), "-ltorch_cpu", "-lc10"])
            write_atomically(library, compiled.read_bytes())


def _run(command: list[str]) -> str:
    """Return the standard output of a program; raise CalledProcessError if it fails."""
    environment = os.environ | {"LC_ALL": "C"}
    return subprocess.run(
        command, capture_output=True, check=True, env=environment, text=True, errors="replace"
    ).stdout
