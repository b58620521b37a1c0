"""The layout of a model that was downloaded from the hub: files that are links into a folder of blobs."""

from __future__ import annotations

import hashlib
from pathlib import Path


def to_snapshot(folder: Path) -> Path:
    """Move the files of a model folder into `blobs/`, and link them from `snapshots/REVISION`."""
    cache = folder.with_name(f"models--{folder.name}")
    snapshot, blobs = cache / "snapshots" / "0123abc", cache / "blobs"
    for place in (snapshot, blobs):
        place.mkdir(parents=True)
    for path in folder.iterdir():
        blob = blobs / hashlib.sha256(path.name.encode()).hexdigest()
        path.rename(blob)
        (snapshot / path.name).symlink_to(Path("../..") / "blobs" / blob.name)
    return snapshot
