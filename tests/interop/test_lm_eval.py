"""Answers of our models to lm-eval: log-likelihoods as a plain loop has them, and greedy answers."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_ffn import ConfigError, Decoder, DecoderConfig
from moe_ffn.data.tokenizer import BytesTokenizer
from moe_ffn.model.generate import generate
from tests.helpers.tiny_runs import CHOICES, TEXTS, write_tasks

pytest.importorskip("lm_eval", reason="lm-eval is not installed here")

from moe_ffn.interop.lm_eval import HarnessModel, evaluate_tasks

LENGTH = 24
TOKENIZER = BytesTokenizer()
END = TOKENIZER.end_of_document


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "num_layers": 2, "attention": {"num_heads": 2}}
    config = DecoderConfig.model_validate({**sizes, "ffn": {"type": "moe", "num_experts": 4}})
    built = config.build(257, LENGTH).double().eval()
    with torch.no_grad():  # decided, so that answers differ
        built.embedding.weight.mul_(20)
    return built


def log_likelihood(decoder: Decoder, context: list[int], continuation: list[int]) -> float:
    """Token by token, each behind as much as the model takes."""
    total, seen = 0.0, list(context)
    for token in continuation:
        with torch.no_grad():
            scores_V = decoder(torch.tensor([seen[-LENGTH:]])).logits[0, -1].log_softmax(-1)
        total += float(scores_V[token])
        seen.append(token)
    return total


def request(*args: Any) -> Any:
    return SimpleNamespace(args=args)


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_continuations_equal_a_loop_over_tokens(decoder: Decoder, batch_size: int) -> None:
    """Continuations of several lengths, with a context longer than the model takes, and with none."""
    pairs = [
        ("the cat", " sat"),
        ("x", "yz"),
        ("", "abc"),
        ("a long context" * 4, "q"),
        ("é", "!"),
    ]
    found = HarnessModel(decoder, TOKENIZER, batch_size).loglikelihood([request(*p) for p in pairs])

    for (context, continuation), (value, is_greedy) in zip(pairs, found, strict=True):
        before = [*context.encode()] or [END]
        ids = [*continuation.encode()]
        expected = log_likelihood(decoder, before[-(LENGTH + 1 - len(ids)) :], ids)
        assert value == pytest.approx(expected, abs=1e-9)
        best = generate(decoder, torch.tensor(before[-LENGTH:]), len(ids), temperature=0)
        assert is_greedy == (best.tolist() == ids)
    greedy = TOKENIZER.decode(generate(decoder, torch.tensor([*b"the"]), 1, temperature=0).tolist())
    model = HarnessModel(decoder, TOKENIZER)
    if greedy.isascii():
        assert model.loglikelihood([request("the", greedy)])[0][1]


def test_a_choice_of_one_empty_text_is_certain(decoder: Decoder) -> None:
    assert HarnessModel(decoder, TOKENIZER)._loglikelihood_tokens([(None, [1], [])]) == [
        (0.0, True)
    ]


@pytest.mark.parametrize("length", [1, LENGTH, LENGTH + 1, 2 * LENGTH + 5])
def test_of_a_whole_text_every_token_counts_once(decoder: Decoder, length: int) -> None:
    """Windows as long as the model takes, side by side; the last one reaches back for context."""
    text = ("the cat sat on a mat. " * 4)[:length]
    ids, expected = [END, *text.encode()], 0.0
    for first in range(0, length, LENGTH):
        end = min(first + LENGTH, length)
        start = max(end - LENGTH, 0)
        expected += log_likelihood(decoder, ids[start : first + 1], ids[first + 1 : end + 1])

    (found,) = HarnessModel(decoder, TOKENIZER).loglikelihood_rolling([request(text)])

    assert found == pytest.approx(expected, abs=1e-9)


def test_an_answer_ends_before_a_stop_string_or_after_its_tokens(decoder: Decoder) -> None:
    model = HarnessModel(decoder, TOKENIZER)
    ids = generate(decoder, torch.tensor([*b"the cat"]), 12, temperature=0).tolist()
    whole = TOKENIZER.decode(ids[: ids.index(END)] if END in ids else ids)
    assert len(whole) > 4
    stop = whole[3]

    answers = model.generate_until(
        [
            request("the cat", {"until": [], "max_gen_toks": 12}),
            request("the cat", {"until": [stop, "\0never"], "max_gen_toks": 12}),
            request("the cat", {"until": "", "max_gen_toks": 2, "do_sample": False}),
        ]
    )

    assert answers[0] == whole
    assert answers[1] == whole[: whole.index(stop)]
    assert answers[2] == TOKENIZER.decode(ids[:2])


@pytest.mark.parametrize("limit", [{"top_k": 1}, {"top_p": 1e-6}])
def test_a_task_may_limit_the_tokens_to_sample_from(
    decoder: Decoder, limit: dict[str, float]
) -> None:
    options = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 2.0}
    greedy = request("the cat", {"until": [], "max_gen_toks": 12, "top_k": 2**40, "top_p": 0.0})
    limited = request("the cat", {**options, **limit})
    free = request("the cat", {**options, "top_k": -1})
    answers = HarnessModel(decoder, TOKENIZER).generate_until([greedy, limited, free])
    assert answers[0] == answers[1] != answers[2]


def test_tasks_of_local_files(decoder: Decoder, tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks")
    model = HarnessModel(decoder, TOKENIZER, batch_size=2)

    found = evaluate_tasks(model, [str(tmp_path / "tasks")])

    right = 0
    for row in CHOICES:
        question = [*row["question"].encode()]
        scores = [log_likelihood(decoder, question, [*c.encode()]) for c in row["choices"]]
        right += scores.index(max(scores)) == row["answer"]
    assert found["tiny_choice"]["acc"] == right / len(CHOICES)
    bits = num_bytes = 0.0
    for row in TEXTS:
        (nats,) = model.loglikelihood_rolling([request(row["text"])])
        bits -= nats / math.log(2)
        num_bytes += len(row["text"].encode())
    assert found["tiny_rolling"]["bits_per_byte"] == pytest.approx(bits / num_bytes)
    alone = evaluate_tasks(model, [str(tmp_path / "tasks"), "tiny_choice"])
    assert alone == {"tiny_choice": found["tiny_choice"]}


def test_the_task_of_the_documentation_runs(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs/howto/evaluate.md").read_text(encoding="utf-8")
    Path("my_tasks").mkdir()
    for language, name in (("yaml", "indent.yaml"), ("json", "indent.jsonl")):
        (block,) = re.findall(rf"^```{language}\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
        Path("my_tasks", name).write_text(block, encoding="utf-8")

    found = evaluate_tasks(HarnessModel(decoder, TOKENIZER), ["my_tasks"])
    assert 0 <= found["indent"]["acc"] <= 1


def test_what_cannot_be_asked_is_said(decoder: Decoder, tmp_path: Path) -> None:
    model = HarnessModel(decoder, TOKENIZER)
    with pytest.raises(
        ConfigError, match=r"a continuation of 25 tokens, but the model reads at most 24"
    ):
        model.loglikelihood([request("a", "b" * 25)])
    (tmp_path / "lost.yaml").write_text(
        "task: lost\ndataset_path: json\ndataset_kwargs: {data_files: {test: nowhere.jsonl}}\n"
    )
    with pytest.raises(ConfigError, match=r"--tasks: lm-eval cannot run them: .*nowhere\.jsonl"):
        evaluate_tasks(model, [str(tmp_path)])
    masked = decoder.config.model_copy(update={"causal": False}).build(257, LENGTH)
    with pytest.raises(ConfigError, match=r"model\.causal is false: the model predicts masked"):
        HarnessModel(masked, TOKENIZER)
