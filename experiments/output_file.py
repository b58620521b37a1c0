"""Files that an option names: written whole or not at all, and never over a file of another kind."""

from __future__ import annotations

import tempfile
from pathlib import Path

from moe_ffn.errors import ConfigError, reason
from moe_ffn.files import write_whole


def check_output(option: str, path: Path, opening: str) -> None:
    """Look whether `write_output` could write this file; writes nothing.

    Args:
        opening: how such a file begins. What begins otherwise is somebody else's, as a run's own files are.

    Raises:
        ConfigError: it could not, or something else would be lost.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "Is a directory")
        if path.exists() and not path.is_file():  # it would be replaced, /dev/null too
            raise ConfigError(f"{option}: '{path}' is no regular file; choose another file")
        if path.exists() and not _begins(path, opening):
            raise ConfigError(
                f"{option}: '{path}' exists and was not made by this program; choose another file, or "
                "remove it"
            )
        # Only trying tells: root may write anywhere, except where the file system says no.
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise _cannot_write(option, path, error) from error


def write_output(option: str, path: Path, text: str) -> None:
    """Put a file in its place; ConfigError that names the option where it cannot be written."""
    try:
        write_whole(path, text.encode(errors="backslashreplace"))  # of a name that is not UTF-8
    except OSError as error:
        raise _cannot_write(option, path, error) from error


def _begins(path: Path, opening: str) -> bool:
    """Whether the file begins so, or is empty."""
    with path.open("rb") as file:
        return file.read(len(opening)) in (b"", opening.encode())


def _cannot_write(option: str, path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{option}: '{path}' cannot be written ({reason(error)}); choose another file"
    )
