"""What is in a folder, to be compared with what is in it later."""

from __future__ import annotations

from pathlib import Path


def snapshot(folder: Path, *ignored: str) -> dict[str, bytes | str | None]:
    """Every path below a folder, relative to it: a file's bytes, a link's target, None of anything else.

    Args:
        ignored: names that do not count, wherever they are.
    """
    return {
        str(path.relative_to(folder)): _content(path)
        for path in sorted(folder.rglob("*"))
        if path.name not in ignored
    }


def _content(path: Path) -> bytes | str | None:
    if path.is_symlink():
        return str(path.readlink())
    return path.read_bytes() if path.is_file() else None
