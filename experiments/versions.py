"""Which versions this is, said without importing what they are of."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version


def versions() -> str:
    """`moe_ffn 0.1.0, torch 2.13.0, Python 3.11.4`."""
    packages = ", ".join(f"{name} {_version(name)}" for name in ("moe_ffn", "torch"))
    return f"{packages}, Python {platform.python_version()}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "(not installed)"
