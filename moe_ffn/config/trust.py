"""Trust in custom code of a run's folder: the user trained with it before, or gave `--trust-code`.

A run's folder may come from another person, and reading its `config.yaml` runs the code that the file names.
Therefore the sha256 of each code file that the user has trained with is stored outside the runs. One file per
hash needs no lock.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from moe_ffn.config.errors import ConfigError
from moe_ffn.config.import_path import PACKAGE, Code, permitting_imports

FLAG = "--trust-code"
HELP = (
    "run custom code that the folder names, even if you have never trained with it; read it first"
)

_accepting: ContextVar[bool] = ContextVar("_accepting", default=False)


class UntrustedCodeError(ConfigError):
    """A run's folder names code that this user has neither run nor trusted."""


@contextmanager
def accepting_code(accept: bool = True) -> Iterator[None]:
    """Trust and remember all code that a run's folder names, as `--trust-code` asks."""
    token = _accepting.set(accept or _accepting.get())
    try:
        yield
    finally:
        _accepting.reset(token)


@contextmanager
def only_trusted_code(folder: Path) -> Iterator[None]:
    """Import only trusted code while the run in `folder` is read; UntrustedCodeError for other code."""
    untrusted: list[Code] = []

    def permit(code: Code) -> None:
        if is_trusted(code):
            return
        if _accepting.get():
            trust([code])
            return
        untrusted.append(code)
        raise ConfigError(f"'{code.where}' is not trusted")

    try:
        with permitting_imports(permit):
            yield
    except ConfigError as error:
        if not untrusted:
            raise
        names = ", ".join(
            f"'{code.where}' (sha256 {code.sha256[:16]}...)" for code in dict.fromkeys(untrusted)
        )
        raise UntrustedCodeError(
            f"'{folder}' names code that none of your runs started with: {names}; read it, and if you "
            f"trust it add {FLAG}"
        ) from error


def is_trusted(code: Code) -> bool:
    folder = _folder()
    try:
        return code.path is not None and folder is not None and (folder / code.sha256).is_file()
    except OSError:
        return False


def trust(codes: Iterable[Code]) -> None:
    """Remember code as trusted; if the disk rejects that, the next run needs `--trust-code` again."""
    folder = _folder()
    for code in codes:
        if folder is None or code.path is None:
            continue
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / code.sha256).write_text(f"{code.path.resolve()}\n", encoding="utf-8")


def _folder() -> Path | None:
    """Return the folder of the trusted hashes (XDG base directories); None for a user without a home."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    try:
        if not state.is_absolute():
            state = Path.home() / ".local" / "state"
    except RuntimeError:
        return None
    return state / PACKAGE / "trusted_code"
