"""A disk of a process's own, which nobody else sees."""

from __future__ import annotations

import subprocess

import pytest

ALONE = ("unshare", "-rm", "sh", "-c")
"""Runs a script whose mounts nobody else sees."""


def mounting(folder: object, size: str) -> str:
    """The command that mounts an empty disk of this size at `folder`; the test is skipped, and says why,
    where this machine does not permit it.
    """
    command = f"mount -t tmpfs -o size={size} none '{folder}'"
    try:
        subprocess.run([*ALONE, command], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", None) or str(error)
        pytest.skip(f"this machine gives no disk of one's own ({why.splitlines()[0]})")
    return command
