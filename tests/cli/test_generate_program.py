"""`moe-ffn generate`: text as it is written, its speed, and where its tokens went."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ffn.model.generate import generate
from moe_ffn.report.trace import trace_text
from moe_ffn.runs.reader import load_model
from tests.helpers.tiny_runs import Finished, run_here, trained

LENGTH = 16  # data.seq_len of the tiny runs


def program(*argv: object) -> Finished:
    return run_here(*map(str, argv), program="moe_ffn.cli.generate")


def rows_of(shown: str) -> list[str]:
    """The rows of the tokens; a line of the legend begins with a pair."""
    return [line for line in shown.splitlines() if re.match(r" *\d+  ", line)]


def test_the_text_is_that_of_generate_and_its_speed_is_on_stderr() -> None:
    done = program(trained(), "--prompt", "the ", "--num-tokens", 30, "--temperature", 0)
    run = load_model(trained())
    ids = generate(run.decoder, torch.tensor(list(b"the ")), 30, temperature=0)
    assert done.code == 0
    assert done.stdout == f"the {run.tokenizer.decode(ids.tolist())}\n"
    assert re.fullmatch(r"30 tokens in [\d.]+ s, [\d.]+ tokens/s", done.own_lines[-1])


def test_it_ends_before_a_stop_string() -> None:
    argv = (trained(), "--prompt", "the ", "--num-tokens", 12, "--top-p", 0.9)
    text = program(*argv).stdout.removesuffix("\n").removeprefix("the ")
    stop = text[3:5]
    stopped = program(*argv, "--stop", "\x00\x00", "--stop", stop)
    assert stopped.stdout == f"the {text[: text.index(stop)]}\n"


@pytest.mark.parametrize("length", [6, 12], ids=["in the context", "beyond the context"])
def test_the_trace_has_the_experts_of_every_token(length: int) -> None:
    argv = (trained(), "--prompt", "a mat ", "--num-tokens", length, "--temperature", 0)
    done = program(*argv, "--trace")

    text, shown = done.stdout.split("\n\n", 1)
    rows = rows_of(shown)
    written = text.encode()
    ends = range(
        LENGTH + 1, 7 + length
    )  # beyond the context, each is the last of what the model saw
    tokens = [
        *trace_text(trained(), written[:LENGTH]).tokens,
        *(trace_text(trained(), written[end - LENGTH : end]).tokens[-1] for end in ends),
    ]
    assert len(rows) == 6 + length
    for row, token in zip(rows, tokens, strict=True):
        visits = [visit for visit in token.visits.values() if visit is not None]
        experts = [str(choice.expert) for visit in visits for choice in visit.choices]
        assert re.findall(r"(\d) [.\d]+ ", row.split(token.token, 1)[1])[: len(experts)] == experts


def test_a_long_prompt_of_a_config_is_refused_before_there_is_a_run(
    run_train: Any, tmp_path: Path
) -> None:
    done = run_train(tmp_path, "--sample.prompt", "a" * 17)
    assert done.code == 2
    assert "error: sample.prompt: has 17 tokens, but the model takes sequences of 16" in done.stderr
    assert not (tmp_path / "runs").exists()
