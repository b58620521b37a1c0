"""Plant bugs one at a time, and count those that no test notices.

    python -m coverage run -m pytest                           # in TREE: notes which tests reach a line
    python -m tests.planted_bugs draw TREE OTHER > bugs.jsonl  # bugs whose line stands once in both
    python -m tests.planted_bugs plant TREE < bugs.jsonl       # changes files of TREE, and restores them

`TREE` and `OTHER` are checkouts. `plant` prints each bug with `died`: true if a test failed, false if none of
up to 150 that reach the line did, null if the line is not there.
"""

from __future__ import annotations

import ast
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coverage import CoverageData

NUM_BUGS = 150
MAX_TESTS = 150
"""Number of test functions to run for one bug."""
SECONDS = 240
"""Limit of one run of tests; a bug that hangs them is noticed."""
OPERATORS = (
    "Lt < <=, LtE <= <, Gt > >=, GtE >= >, Eq == !=, NotEq != ==, Is is is_not, In in not_in, "
    "Add + -, Sub - +, Mult * /, Div / *, And and or, Or or and"
)
SWAPS = {
    kind: (old, new.replace("_", " ")) for kind, old, new in map(str.split, OPERATORS.split(", "))
}
"""Operators by the name that `ast` gives them, as they are and as a bug has them."""


def bugs_of(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the line number, the line and the line with a bug, for each place of a file that can have one."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for function in ast.walk(ast.parse("\n".join(lines))):
        if not isinstance(function, ast.FunctionDef) or function.name.endswith("repr__"):
            continue
        for node in ast.walk(function):
            match node:
                case ast.Compare(left=left, ops=[op], comparators=[right]):
                    pass
                case ast.BinOp(left=left, op=op, right=right):
                    pass
                case ast.BoolOp(op=op, values=[left, right]):
                    pass
                case _:
                    continue
            if type(op).__name__ not in SWAPS or left.end_lineno != right.lineno:
                continue
            old, new = SWAPS[type(op).__name__]
            line = lines[right.lineno - 1]
            text = line.encode()
            start, end = left.end_col_offset or 0, right.col_offset
            changed = text[start:end].replace(old.encode(), new.encode(), 1)
            yield right.lineno, line, (text[:start] + changed + text[end:]).decode()


def place_of(tree: Path, line: str) -> Path | None:
    """Return the one file of a checkout in which a line stands, and stands once."""
    found = [
        path
        for path in (tree / "moe_ffn").rglob("*.py")
        if line in (text := path.read_text(encoding="utf-8")).splitlines() and text.count(line) == 1
    ]
    return found[0] if len(found) == 1 else None


def draw(trees: list[Path]) -> Iterator[dict[str, str]]:
    """Yield bugs of the first checkout, at most one of each function's line, over all its rooms by size."""
    files = [
        path for path in sorted((trees[0] / "moe_ffn").rglob("*.py")) if "triton" not in path.parts
    ]
    found = [(line, bug) for path in files for _, line, bug in bugs_of(path) if line != bug]
    random.Random(0).shuffle(found)
    drawn: set[str] = set()
    for line, bug in found:
        if (
            len(drawn) < NUM_BUGS
            and line not in drawn
            and all(place_of(tree, line) for tree in trees)
        ):
            drawn.add(line)
            yield {"line": line, "bug": bug}


def tests_of(tree: Path, contexts: list[str]) -> list[str]:
    """Return the names that pytest knows tests by, of the functions that coverage names."""
    names = []
    for context in sorted(filter(None, contexts)):
        parts = context.split(".")
        for end in range(1, len(parts)):
            file = Path(*parts[:end]).with_suffix(".py")
            if (tree / file).is_file():
                names.append("::".join([file.as_posix(), *parts[end:]]))
    return random.Random(0).sample(names, min(len(names), MAX_TESTS))


def plant(tree: Path, bug: dict[str, str], data: CoverageData) -> dict[str, Any]:
    """Change one line, run the tests that reach it, and restore it."""
    path = place_of(tree, bug["line"])
    if path is None:
        return {**bug, "died": None}
    text = path.read_text(encoding="utf-8")
    number = text.splitlines().index(bug["line"]) + 1
    tests = tests_of(tree, data.contexts_by_lineno(str(path)).get(number, []))
    env = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    path.write_text(text.replace(bug["line"], bug["bug"]), encoding="utf-8")
    try:
        done = subprocess.run(
            command, cwd=tree, env=env, capture_output=True, timeout=SECONDS, check=False
        )
        code = done.returncode if tests else 0
    except subprocess.TimeoutExpired:
        code = 1
    finally:
        path.write_text(text, encoding="utf-8")
    where = path.relative_to(tree).as_posix()
    return {**bug, "file": where, "tests": len(tests), "died": code != 0}


if __name__ == "__main__":
    task, *trees = sys.argv[1:]
    folders = [Path(tree).resolve() for tree in trees]
    if task == "draw":
        for found in draw(folders):
            print(json.dumps(found))
    else:
        coverage = CoverageData(str(folders[0] / ".coverage"))
        coverage.read()
        for line in sys.stdin:
            print(json.dumps(plant(folders[0], json.loads(line), coverage)), flush=True)
