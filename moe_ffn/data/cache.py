"""Cache folders that are written atomically and contain checksums of their files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moe_ffn.config.errors import explaining
from moe_ffn.config.files import UNFINISHED, kind_of, open_file, read_object, sha256_of

_META = "meta.json"

_DIGEST = "sha256"
"""Key of the digest of all other keys."""

_WRITTEN_NS = 946_684_800 * 10**9
"""Modification time that `seal` sets, 2000-01-01; a later write changes it."""

_ABANDONED_SECONDS = 86_400
"""Time since the last write after which an unfinished folder counts as abandoned."""


@contextlib.contextmanager
def building(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `folder` unless the block raises; ConfigError if that fails. The
    block must call `seal` at its end, and write inside `writing`. An intact folder of a faster process is
    kept.
    """
    built = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        with writing(built):
            folder.parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(folder.parent)
            built.mkdir()
        yield built
        with writing(built):
            _publish(built, folder)
    finally:
        shutil.rmtree(built, ignore_errors=True)


def writing(built: Path) -> contextlib.AbstractContextManager[None]:
    """Turn an OSError, such as a full disk, into a ConfigError that names the option."""
    problem = f"data.cache_dir: '{built.parent}' cannot be written"
    return explaining(problem, "make room, or name another folder")


def seal(folder: Path, meta: dict[str, Any]) -> None:
    """Write `meta` with digests of itself and of the files in `folder`."""
    paths = list(folder.iterdir())
    values = {
        **meta,
        "files": {path.name: sha256_of(path) for path in paths},
        "sizes": {path.name: path.stat().st_size for path in paths},
    }
    for path in paths:
        os.utime(path, ns=(_WRITTEN_NS, _WRITTEN_NS))
    write_cache_json(folder / _META, {**values, _DIGEST: _digest(values)})


def read_meta(folder: Path, only: str | None = None) -> dict[str, Any] | None:
    """Return the metadata that `seal` wrote, after checking all files, or `only` one; None if missing or
    changed. A file is hashed only if its size or modification time has changed.
    """
    meta = read_object(folder / _META)
    try:
        if meta is None or meta.pop(_DIGEST) != _digest(meta):
            return None
        digests = meta["files"] if only is None else {only: meta["files"][only]}
        intact = all(
            _is_unchanged(folder / name, meta["sizes"][name]) or sha256_of(folder / name) == digest
            for name, digest in digests.items()
        )
    except (OSError, KeyError):
        return None
    return meta if intact else None


def write_cache_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, ensure_ascii=False, indent=1, sort_keys=True), "utf-8")


def _remove_abandoned(cache_dir: Path) -> None:
    """Remove the temporary folders of processes that were killed."""
    for folder in cache_dir.glob(f".*{UNFINISHED}"):
        with contextlib.suppress(OSError):  # another process has just removed it
            last_written = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            if time.time() - last_written > _ABANDONED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _publish(built: Path, folder: Path) -> None:
    # No fsync is needed: after a power cut, `read_meta` finds the damage and the folder is built again.
    try:
        built.replace(folder)
    except OSError:
        if kind_of(folder) != "a folder":
            raise
        # Another process was faster, or the folder is damaged. Files are replaced one by one, so that the
        # folder always exists. Two processes may do this at once, since both built the same files.
        if read_meta(folder) is None:
            for file in sorted(built.iterdir(), key=lambda file: file.name == _META):
                file.replace(folder / file.name)


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _is_unchanged(path: Path, size: int) -> bool:
    with open_file(path) as file:
        stat = os.fstat(file.fileno())
    return stat.st_size == size and stat.st_mtime_ns == _WRITTEN_NS
