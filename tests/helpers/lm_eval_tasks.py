"""Two tiny tasks of lm-eval in a folder: a choice among continuations, and the perplexity of texts."""

from __future__ import annotations

import json
from pathlib import Path

CHOICES = (
    {"question": "the cat sat on", "choices": [" a mat.", " qqqq"], "answer": 0},
    {"question": "def f(x):\n    return", "choices": [" zz", " x\n", " é"], "answer": 1},
)
TEXTS = ({"text": "the cat sat on a mat.\nthe cat sat on a mat.\n"}, {"text": "def f(x):\n"})


def write_tasks(folder: Path) -> None:
    """Write `tiny_choice` and `tiny_rolling` with their data."""
    folder.mkdir()
    for name, rows in (("choices", CHOICES), ("texts", TEXTS)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)
    common = (
        "dataset_path: json\ntest_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {folder}/%s.jsonl}}, cache_dir: {folder}/cache}}\n"
    )
    (folder / "choice.yaml").write_text(
        "task: tiny_choice\noutput_type: multiple_choice\n"
        + common % "choices"
        + """\
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
    )
    (folder / "rolling.yaml").write_text(
        "task: tiny_rolling\noutput_type: loglikelihood_rolling\n"
        + common % "texts"
        + """\
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
"""
    )
