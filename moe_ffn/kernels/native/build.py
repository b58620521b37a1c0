"""Compilation of the C++ in this folder, once per machine, and loading of its operators.

Nothing is compiled at installation. A wheel of `make release` brings libraries for x86-64 and one version of
torch. KEY in `native-KEY.so` is a hash of sources, torch version, compiler and flags, so different machines
can share a cache. A process locks `native-KEY.lock` while it compiles.
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
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from moe_ffn.config.files import read_object, write_atomically

log = logging.getLogger(__name__)

HERE = Path(__file__).parent
SOURCES = (
    *("experts.cpp", "attention.h", "backward.h", "layer.h", "newton_schulz.h", "passes.h"),
    "routing.h",
)

VARIABLE = "MOE_FFN_NATIVE"
"""Environment variable; `0` turns the compiled kernels off."""

NO_COMPILER = "needs a C++ compiler: neither g++ nor clang++ was found"


@dataclass(frozen=True)
class Kind:
    """Compiler flags and sizes of the kernels for one kind of CPU; the sizes are macros in C++."""

    flags: str
    """Instruction sets instead of `-march=native`, so that a library runs on every CPU of its kind."""
    onednn: int = 1
    """1 if oneDNN multiplies tiles; 0 for torch's `mm`, which also runs if oneDNN is missing or off."""
    panel: int = 64
    """Columns of a panel of the second operand."""
    tile: int = 64
    """Maximum rows of an expert that one thread takes at a time."""
    copied_rows: int = 256
    """Rows of an expert from which on the backward pass copies its float32 matrices into panels."""
    row_cost: int = 1
    """Cost of transposing a number of a row, and of the products with it; that of a matrix costs 1."""

    @property
    def macros(self) -> list[str]:
        return [f"-DMOE_FFN_{n.upper()}={v}" for n, v in vars(self).items() if n != "flags"]


# `python -m moe_ffn.kernels.native --tune` measures a row for `row_file`. Speeds are those of one thread.
KINDS = {
    # Zen 4: other panels and tiles are equal or up to 8 % slower.
    "AVX512": Kind("-mavx512f -mavx512dq -mavx512vl -mavx512bw -mavx2 -mfma -mf16c"),
    # Zen 3, products of 64 x 1024 x 512: 80 to 94 GFLOP/s with panels of 32 columns, 74 to 96 with 16, 74 to
    # 83 with 64, 63 to 79 by MKL. Layers with MKL take 1.18 to 1.45 times as long.
    "AVX2": Kind("-mavx2 -mfma -mf16c", panel=32, tile=96, copied_rows=64, row_cost=2),
    # Not measured. The flag enables torch's vector exponential on ARM with NEON; SVE needs other flags.
    "DEFAULT": Kind("-DAT_BUILD_ARM_VEC256_WITH_SLEEF"),
}
"""A row for each kind of CPU that at::vec supports."""

SHIPPED = (("AVX2", False), ("AVX512", False), ("AVX512", True))
"""Kinds of CPU that a wheel has libraries for, and whether they multiply bfloat16."""

FLAGS = "-O3 -std=c++20 -shared -fPIC -fno-math-errno -fno-trapping-math -DAT_PER_OPERATOR_HEADERS"
FLAGS_OF_GCC = (
    "-fno-ipa-cp-clone -fno-unswitch-loops -fno-split-loops -pipe --param=ggc-min-heapsize=1000000"
)
"""Flags that only GCC has; they skip slow passes without gain, and garbage collection below 1 GB."""


def activations() -> list[str]:
    """Return the activations that have a kernel, in the order of their codes: the enum in passes.h."""
    _, _, names = (HERE / "passes.h").read_text().partition("enum class Activation : int64_t { ")
    return names.partition(" }")[0].split(", ")


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


def compile_kernels() -> None:
    """Compile and load the operators now, so that no timed step waits for it."""
    unavailable_reason()


def load() -> str | None:
    """Compile the operators if necessary, and load them; return why that failed, or None."""
    if sys.platform == "win32":
        return "is not compiled on Windows"
    try:
        if _load_shipped():
            return None
        compiler = find_compiler()
        if not compiler:
            return NO_COMPILER
        command, library = _command(compiler)
        if not library.exists():
            _build(command, library)
        torch.ops.load_library(library)
    except (subprocess.CalledProcessError, OSError, RuntimeError, ValueError) as error:
        return reason_of(error)
    return None


def reason_of(error: Exception) -> str:
    """Return why the operators are not available; log what the compiler said."""
    if not isinstance(error, subprocess.CalledProcessError):
        return f"could not be compiled and loaded: {error.__cause__ or error}"
    log.debug("%s\n%s", shlex.join(error.cmd), error.stderr)
    lines = error.stderr.splitlines()
    message = next((line for line in lines if "error" in line), f"exit code {error.returncode}")
    return f"could not be compiled: {message.strip()}"


def ship() -> list[Path]:
    """Compile the operators for the CPUs of `SHIPPED` into this package; return the libraries.

    Raises:
        CalledProcessError: the compiler fails.
        OSError: there is no such compiler, or the folder cannot be written.
    """
    compiler = find_compiler()
    is_clang = "clang" in _run([*compiler, "--version"])
    libraries: list[Path] = []
    for kind, has_bfloat16 in SHIPPED:
        flags = _cpu_flags(KINDS[kind], kind, has_bfloat16)
        libraries.append(_shipped_library(flags))
        libraries[-1].parent.mkdir(exist_ok=True)
        _compile([*compiler, *_general_flags(is_clang), *flags], HERE, libraries[-1])
    return libraries


def _load_shipped() -> bool:
    """Load the library that the wheel has for this CPU and torch; return whether there is one that loads."""
    library = _shipped_library(_own_cpu_flags())
    try:
        if library.exists():
            torch.ops.load_library(library)
            return True
    except (OSError, RuntimeError) as error:  # such as a C++ library older than that of the build
        log.debug("%s", error)
    return False


def _shipped_library(cpu_flags: list[str]) -> Path:
    version, _, _ = torch.__version__.partition("+")  # the same libraries for CPU and CUDA
    return HERE / "compiled" / f"native-{_key([version, platform.machine(), FLAGS, *cpu_flags])}.so"


def load_sizes(row: Kind) -> Any:
    """Compile the kernels with the sizes of a row, next to those of the table; return the operators.

    Raises:
        CalledProcessError: the compiler fails.
    """
    name = "_".join(["moe_ffn", *(str(size) for key, size in vars(row).items() if key != "flags")])
    operators = getattr(torch.ops, f"{name}_cpu")
    if hasattr(operators, "experts_forward"):
        return operators
    with tempfile.TemporaryDirectory() as folder:
        for source in SOURCES:
            text = (HERE / source).read_text().replace("moe_ffn", name)
            (Path(folder) / source).write_text(text)
        library = Path(folder) / f"{name}.so"
        _compile(_command(find_compiler(), row)[0], Path(folder), library)
        torch.ops.load_library(library)
    return operators


def find_compiler() -> list[str]:
    """Return the words of the compiler's name, or nothing."""
    given = shlex.split(os.environ.get("CXX", ""))  # several words, such as `ccache g++`
    return given or [name for name in ("g++", "clang++") if shutil.which(name)][:1]


def _command(compiler: list[str], row: Kind | None = None) -> tuple[list[str], Path]:
    """Return the compiler command without files, and the path of the library; see `_flags`."""
    version = _run([*compiler, "--version"])
    command = [*compiler, *_flags("clang" in version, row)]
    key = _key([torch.__version__, platform.machine(), version, *command])
    return command, _cache_folder() / f"native-{key}.so"


def _key(inputs: list[str]) -> str:
    """Return a hash of the inputs and of the sources."""
    inputs = [*inputs, *((HERE / name).read_text() for name in SOURCES)]
    return hashlib.sha256("\0".join(inputs).encode()).hexdigest()[:16]


def _cache_folder() -> Path:
    cache_home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    cache_home = cache_home if cache_home.is_absolute() else Path.home() / ".cache"
    return cache_home / "moe_ffn"


def kind_of_cpu() -> str:
    """Return the key of `KINDS` for this CPU."""
    kind = torch.backends.cpu.get_cpu_capability()
    return kind if kind in KINDS else "DEFAULT"  # for "NO AVX" and "SVE256"


def row_file() -> Path:
    """Return the path of the user's sizes by kind of CPU, such as `{"AVX2": {"panel": 16}}`."""
    return _cache_folder() / "cpu_kernels.json"


def row_of_cpu() -> Kind:
    """Return the row of this CPU in `KINDS`, with the sizes of the user's file, if there is one.

    Raises:
        ValueError: the file does not hold sizes.
    """
    kind, path = kind_of_cpu(), row_file()
    if not path.exists():
        return KINDS[kind]
    content = read_object(path)
    sizes = None if content is None else content.get(kind, {})
    names = vars(KINDS[kind]).keys() - {"flags"}
    if not isinstance(sizes, dict) or not all(
        name in names and isinstance(size, int) and size >= (name != "onednn")
        for name, size in sizes.items()
    ):
        raise ValueError(
            f"'{path}' must hold whole numbers for {', '.join(sorted(names))}, such as "
            f'{{"{kind}": {{"panel": 32}}}}, but holds {sizes}; delete it'
        )
    return replace(KINDS[kind], **sizes)


def _flags(is_clang: bool, row: Kind | None = None) -> list[str]:
    """Return the flags for this CPU, with the sizes of `row` or those of `row_of_cpu`."""
    return [*_general_flags(is_clang), *_own_cpu_flags(row)]


def _general_flags(is_clang: bool) -> list[str]:
    torch_folder = Path(torch.__file__).parent
    flags = [*FLAGS.split(), *([] if is_clang else FLAGS_OF_GCC.split())]
    flags += [f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"]
    return [*flags, f"-I{torch_folder / 'include/torch/csrc/api/include'}"]


def _own_cpu_flags(row: Kind | None = None) -> list[str]:
    has_bfloat16 = torch.cpu.get_capabilities().get("avx512_bf16", False)
    return _cpu_flags(row or row_of_cpu(), kind_of_cpu(), has_bfloat16)


def _cpu_flags(row: Kind, kind: str, has_bfloat16: bool) -> list[str]:
    flags = [
        f"-DCPU_CAPABILITY={kind}",
        f"-DCPU_CAPABILITY_{kind}",
        *row.flags.split(),
        *row.macros,
    ]
    return [*flags, "-mavx512bf16"] if kind == "AVX512" and has_bfloat16 else flags


def _build(command: list[str], library: Path) -> None:
    """Compile the library, or wait until another process has compiled it."""
    import fcntl  # not on Windows

    library.parent.mkdir(parents=True, exist_ok=True)
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed
        if library.exists():
            return
        log.warning("compiling the CPU kernels, once (10 to 40 s)")
        with tempfile.TemporaryDirectory() as folder:
            compiled = Path(folder) / library.name
            _compile(command, HERE, compiled)
            write_atomically(library, compiled.read_bytes())


def _compile(command: list[str], sources: Path, library: Path) -> None:
    _run([*command, str(sources / SOURCES[0]), "-o", str(library), "-ltorch_cpu", "-lc10"])


def _run(command: list[str]) -> str:
    """Return the standard output of a program; raise CalledProcessError if it fails."""
    environment = os.environ | {"LC_ALL": "C"}
    return subprocess.run(
        command, capture_output=True, check=True, env=environment, text=True, errors="replace"
    ).stdout
