"""Compiles the C++ of this folder, once for a machine, and loads its operators.

Nothing is compiled at installation. What is compiled is kept by all that it depends on: the sources, torch,
the compiler and its flags, so that a folder which several machines share holds one file for each kind:

    native-KEY-DIGEST.so   the library; the digest is that of its bytes
    native-KEY.failed      what the compiler said instead; while this is there it is not asked again
    native-KEY.lock        held by the process that compiles
    .native-KEY-*          the folder in which it does
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import torch

from moe_ffn.config.environment import is_first_here

HERE = Path(__file__).parent
SOURCES = ("experts.cpp", "backward.h", "layer.h", "passes.h", "routing.h")

VARIABLE = "MOE_FFN_NATIVE"
"""Environment variable; 0 turns the compiled kernels off."""

INSTRUCTION_SETS = {
    "AVX512": "-mavx512f -mavx512dq -mavx512vl -mavx512bw -mavx2 -mfma -mf16c",
    "AVX2": "-mavx2 -mfma -mf16c",
    "DEFAULT": "-DAT_BUILD_ARM_VEC256_WITH_SLEEF",
}
"""Flags of each kind of CPU that at::vec has vectors for.

They are named one by one, so that a library never holds an instruction that another CPU of the kind lacks.
The last one serves every ARM with NEON and torch's vector exponential; SVE would need its own flags.
"""

FLAGS = "-O3 -std=c++20 -shared -fPIC -fno-math-errno -fno-trapping-math -DAT_PER_OPERATOR_HEADERS"
FLAGS_OF_GCC = (
    "-fno-ipa-cp-clone -fno-unswitch-loops -fno-split-loops -pipe --param=ggc-min-heapsize=1000000"
)
"""Flags that skip slow passes without gain, and garbage collection below 1 GB; Clang lacks them."""
TIMEOUT_SECONDS = 300
_TRANSIENT = re.compile(
    r"^.*(?:no space left|quota exceeded|input/output error|killed|terminated program|out of memory"
    r"|memory exhausted|cannot allocate memory).*$",
    re.IGNORECASE | re.MULTILINE,
)
"""Line of a compiler that failed for a reason that may be gone next time; it is not remembered."""
VERSION_TIMEOUT_SECONDS = 30


@cache
def unavailable_reason() -> str | None:
    """Return why the operators are not available, as the rest of a sentence; None once they are loaded.

    Compiles them if need be. The first process of a machine logs a failure, unless the user turned them off.
    """
    if os.environ.get(VARIABLE) == "0":
        return f"is turned off by {VARIABLE}=0"
    why = load()
    if why is not None and is_first_here():
        _say(f"the compiled CPU kernel {why}; the slower loop over experts is used")
    return why


def load() -> str | None:
    """Compile the operators, unless that was done before, and load them; return why that failed."""
    if sys.platform == "win32":
        return "is not compiled on Windows"
    try:
        compiler = shlex.split(os.environ.get("CXX", ""))  # it may be `ccache g++`
        compiler = compiler or [name for name in ("g++", "clang++") if shutil.which(name)][:1]
        if not compiler:
            return "needs a C++ compiler: neither g++ nor clang++ was found"
        command, place = _command(compiler)
        failure = place.with_suffix(".failed")
        library = _library(place)
        if library is None and not failure.exists():
            library = _build(command, place, failure)
        if library is None:
            return f"could not be compiled, as '{failure}' says; remove that file to try again"
        torch.ops.load_library(library)
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
        return f"could not be compiled and loaded: {error.__cause__ or error}"
    return None


def _command(compiler: list[str]) -> tuple[list[str], Path]:
    """Return the compiler's command without files, and the beginning of the library's path."""
    version = _run([*compiler, "--version"], VERSION_TIMEOUT_SECONDS)
    command = [*compiler, *_flags(is_clang="clang" in version)]
    parts = [torch.__version__, platform.machine(), version, *command]
    parts += [(HERE / name).read_text() for name in SOURCES]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    cache_home = given if given.is_absolute() else Path.home() / ".cache"
    return command, cache_home / "moe_ffn" / f"native-{key}"


def _flags(is_clang: bool) -> list[str]:
    torch_folder = Path(torch.__file__).parent
    kind = torch.backends.cpu.get_cpu_capability()
    kind = kind if kind in INSTRUCTION_SETS else "DEFAULT"  # torch says "NO AVX", or "SVE256"
    flags = [*FLAGS.split(), *([] if is_clang else FLAGS_OF_GCC.split())]
    flags += [f"-DCPU_CAPABILITY={kind}", f"-DCPU_CAPABILITY_{kind}"]
    flags += INSTRUCTION_SETS[kind].split()
    if kind == "AVX512" and torch.cpu.get_capabilities().get("avx512_bf16"):
        flags.append("-mavx512bf16")
    flags += [f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"]
    return [*flags, f"-I{torch_folder / 'include/torch/csrc/api/include'}"]


def _library(place: Path) -> Path | None:
    """The library, if its bytes are intact: loading a damaged one would end the process."""
    for path in sorted(place.parent.glob(f"{place.name}-*.so")):
        if path.name == _name(place, path.read_bytes()):
            return path
    return None


def _name(place: Path, content: bytes) -> str:
    return f"{place.name}-{hashlib.sha256(content).hexdigest()[:16]}.so"


def _build(command: list[str], place: Path, failure: Path) -> Path | None:
    """Compile the library, or write what the compiler said; wait for another process that does so."""
    import fcntl  # not on Windows

    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        library = _library(place)
        if library is not None or failure.exists():
            return library
        prefix = f".{place.name}-"
        for folder in place.parent.glob(f"{prefix}*"):  # left by a process that was killed
            shutil.rmtree(folder, ignore_errors=True)
        _say("compiling the CPU kernels, once (10 to 20 s)")
        start = time.monotonic()
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=prefix) as folder:
            library = _compile(command, Path(folder) / "native.so", place, failure)
        if library is not None:
            _say(f"compiled the CPU kernels in {time.monotonic() - start:.0f} s")
        return library


def _compile(command: list[str], target: Path, place: Path, failure: Path) -> Path | None:
    """Run the compiler; the library, or `failure` with what the compiler said, appears atomically.

    Raises:
        RuntimeError: it failed for a reason that may be gone the next time.
    """
    whole = [*command, str(HERE / SOURCES[0]), "-o", str(target), "-ltorch_cpu", "-lc10"]
    try:
        _run(whole, TIMEOUT_SECONDS)
    except subprocess.CalledProcessError as error:
        found = _TRANSIENT.search(error.output)
        if found or not error.output.strip():
            why = found[0].strip() if found else f"exit code {error.returncode}"
            raise RuntimeError(f"the compiler ended with '{why}'") from None
        target.write_text(f"{shlex.join(whole)}\n\n{error.output}\n", encoding="utf-8")
        target.replace(failure)
        return None
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"the compiler was not done after {error.timeout:g} s") from None
    return target.replace(place.with_name(_name(place, target.read_bytes())))


def _run(command: list[str], timeout: float) -> str:
    """Return a program's stdout; CalledProcessError, with stderr, where it fails."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"LC_ALL": "C"},
        text=True,
        errors="replace",
        start_new_session=True,  # g++ starts other programs, which end with it
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:  # it takes too long, or the user interrupts it
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, out + err)
    return out


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
