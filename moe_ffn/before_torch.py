"""Ends the process with a sentence where importing torch would end it without one.

torch needs a current folder and one for temporary files; without the first its libraries abort.
"""

import os
import sys
import tempfile


def _problem() -> str:
    try:
        os.getcwd()  # noqa: PTH109 - Path.cwd() is the same
    except FileNotFoundError:
        return "the current folder was removed, and torch cannot be imported in it; cd to another"
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        return (
            "TMPDIR: no folder for temporary files can be written, and torch cannot be imported without; "
            "make room in /tmp, or set TMPDIR to another folder"
        )
    return ""


if problem := _problem():
    print(f"error: {problem}", file=sys.stderr)
    raise SystemExit(2)
