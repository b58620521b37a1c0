"""Write the numbers of the README anew: those of the default run, as it is now.

    python -m experiments.readme

The default run takes minutes. So that a test can tell whether its numbers are old, the record of it holds its
options and the losses of the first three steps of the default model on LICENSE, a text that never changes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from moe_ffn.cli import train
from moe_ffn.cli.exit import exit_on_bad_input
from moe_ffn.cli.parser import Parser
from moe_ffn.errors import ConfigError
from moe_ffn.files import write_whole
from moe_ffn.report.tables import flatten
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.folder import FACTS_FILE, METRICS_FILE, SUMMARY_FILE, git_revision
from moe_ffn.runs.rows import Rows
from moe_ffn.training.monitoring.json_lines import Row, read_lines

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RECORD = ROOT / "docs" / "default_run.json"
COMMAND = "python -m experiments.train"
ON_CPU = ("--trainer.accelerator", "cpu", "--trainer.devices", "1")
"""So that the numbers are the same on a machine with GPUs."""
BEGIN, END = "<!-- written by `make readme` -->\n", "<!-- end of what `make readme` writes -->\n"

NUM_FIRST_STEPS = 3


def main(argv: Sequence[str]) -> int:
    Parser(prog="python -m experiments.readme", description=__doc__).parse_args(argv)
    record = default_run()
    text = with_block(README.read_text(encoding="utf-8"), readme_block(record))
    write_whole(RECORD, json.dumps(record, indent=2) + "\n")
    write_whole(README, text)
    print(readme_block(record))
    return 0


def default_run() -> dict[str, Any]:
    """Train it, and what is worth keeping of it."""
    name = f"readme-{datetime.now():%Y%m%d-%H%M%S}"
    start = time.monotonic()
    done = subprocess.run(
        [*COMMAND.replace("python", sys.executable, 1).split(), *ON_CPU, "--run.name", name],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    seconds = time.monotonic() - start
    folder = ROOT / TrainConfig().run.output_dir / name
    facts = json.loads((folder / FACTS_FILE).read_text(encoding="utf-8"))
    summary = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
    return {
        "command": COMMAND,
        "date": f"{datetime.now():%B %Y}",
        "git_revision": git_revision(),
        **{key: facts[key] for key in ("precision", "num_threads", "corpus_sha256", "versions")},
        "seconds": round(seconds),
        "tokens_per_second": round(summary["tokens_per_second"]),
        "validation_loss": summary["validation_loss"],
        "screen": results_of(done.stdout),
        "first_losses": first_steps(),
        "options": flatten(TrainConfig().to_dict()),
    }


def first_steps() -> list[float]:
    """The losses of the default model's first steps on LICENSE."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        corpus = f"{{type: text, paths: [{ROOT / 'LICENSE'}]}}"
        arguments = [
            *("--data.corpus", corpus, "--data.cache_dir", f"{folder}/cache"),
            *("--data.validation_tokens", "1", "--sample.num_tokens", "0"),
            *("--trainer.max_steps", str(NUM_FIRST_STEPS), "--logging.every_n_steps", "1"),
            *ON_CPU,
            *("--logging.wandb.mode", "disabled", "--run.output_dir", folder, "--run.name", "run"),
        ]
        train.main(arguments)
        rows = Rows(read_lines(Path(folder) / "run" / METRICS_FILE, Row))
    return list(rows.column("train/loss").values)


def results_of(screen: str) -> str:
    """From the losses to the last line before the sample, or before the list of files."""
    found = re.search(r"^validation loss .*?(?=\n\n(?:Sample:|Results in ))", screen, re.M | re.S)
    if found is None:
        raise ConfigError("the run printed no results; run it by hand: " + COMMAND)
    return "\n".join(line.rstrip() for line in found[0].splitlines())


def readme_block(record: Mapping[str, Any]) -> str:
    """What stands between the two comments of the README."""
    minutes, seconds = divmod(record["seconds"], 60)
    threads = record["num_threads"]
    return (
        f"{BEGIN}```text\n{record['screen']}\n```\n\n"
        f"That took {minutes} min {seconds} s on {threads} CPU core{'s' * (threads > 1)} "
        f"({record['tokens_per_second']:,} tokens/s), in {record['precision']}, with torch "
        f"{record['versions']['torch'].partition('+')[0]}, in {record['date']}.\n{END}"
    )


def with_block(readme: str, block: str) -> str:
    """The README with this block in the place of the one it has."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ConfigError(f"README.md has no lines '{BEGIN.strip()}' and '{END.strip()}'")
    return before + block + after


if __name__ == "__main__":
    raise SystemExit(exit_on_bad_input(main))
