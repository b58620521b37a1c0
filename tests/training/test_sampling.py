"""Text from tokens: whole characters, stop strings, and prompts that fit."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch

from moe_ffn import ConfigError, DecoderConfig
from moe_ffn.data.corpus import TextConfig
from moe_ffn.data.prepare import DataConfig, prepare
from moe_ffn.data.tokenizer import BytesTokenizer
from moe_ffn.model.generate import Sampling
from moe_ffn.training.sampling import (
    SampleConfig,
    TextStream,
    encode_text,
    first_words,
    run_prompt,
    sample_text,
    stream_texts,
)

TOKENIZER = BytesTokenizer()


def pieces(text: bytes, *stop: str) -> list[str]:
    stream = TextStream(TOKENIZER, stop)
    found = []
    for token_id in text:
        found.append(stream.add(token_id))
        if stream.has_stopped:
            return found
    return [*found, stream.end()]


def test_a_character_of_several_tokens_comes_whole() -> None:
    assert pieces("aé€b".encode()) == ["a", "", "é", "", "", "€", "b", ""]
    assert pieces("a€".encode()[:-1]) == ["a", "", "", "\ufffd"]
    assert pieces(b"a\xffb") == ["a", "\ufffd", "b", ""]


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one\n\ntwo", ("\n\n",), ["o", "n", "e", "", ""]),
        ("a\nb", ("\n\n",), ["a", "", "\nb", ""]),
        ("ababac", ("abac",), ["", "", "", "ab", "", ""]),  # a second start within the first
        ("xend", ("y", "end"), ["x", "", "", ""]),
        ("xen", ("end",), ["x", "", "", "en"]),
        ("xabc", ("bc", "abcd"), ["x", "", "", "a"]),  # the one that is there first
        ("end", ("end",), ["", "", ""]),
        ("xab", ("b", "ab"), ["x", "", ""]),
    ],
)
def test_the_text_ends_before_a_stop_string(
    text: str, stop: tuple[str, ...], expected: list[str]
) -> None:
    assert pieces(text.encode(), *stop) == expected


def test_pieces_are_the_text_up_to_the_first_stop_string() -> None:
    """Random bytes, some of them characters of several, against decoding and searching the whole."""
    draw = random.Random(0)
    alphabet = [*b"ab", *"é€😀".encode(), 0xFF]
    num_stopped = 0
    for _ in range(300):
        text = bytes(draw.choices(alphabet, k=12))
        stop = draw.choice([(), ("ab",), ("aa", "b"), ("é",), ("\ufffda",)])
        whole = TOKENIZER.decode(text)
        ends = [whole.index(s) for s in stop if s in whole]
        num_stopped += bool(ends)
        assert "".join(pieces(text, *stop)) == whole[: min(ends, default=None)], (text, stop)
    assert 50 < num_stopped < 250


def test_rows_end_with_their_own_stop_strings() -> None:
    torch.manual_seed(0)
    model = DecoderConfig.model_validate(
        {"d_model": 16, "num_layers": 1, "attention": {"num_heads": 2}, "ffn": "dense"}
    ).build(257, 32)
    with torch.no_grad():
        model.embedding.weight.mul_(20)
    prompts = [list(b"one"), list(b"of these"), list(b"x")]
    free = SampleConfig(num_tokens=12, temperature=0)
    texts = [sample_text(model, TOKENIZER, bytes(ids).decode(), free, 0) for ids in prompts]
    stop = texts[1][4:6]
    wanted = [text[: text.index(stop)] if stop in text else text for text in texts]
    assert wanted[1] != texts[1]
    assert texts[0] in wanted

    got = ["", "", ""]
    stopping = free.model_copy(update={"stop": (stop,)})
    num_tokens = [0, 0, 0]
    for row, _, piece in stream_texts(model, TOKENIZER, prompts, stopping, 0):
        got[row] += piece
        num_tokens[row] += 1

    assert got == wanted
    assert num_tokens[0] == 12
    assert num_tokens[1] < 12
    assert model.training


def test_every_option_and_the_seed_reach_the_texts() -> None:
    options = SampleConfig(temperature=0.5, top_k=3, top_p=0.25)
    assert options.sampling == Sampling(temperature=0.5, top_k=3, top_p=0.25)
    torch.manual_seed(0)
    model = DecoderConfig.model_validate(
        {"d_model": 16, "num_layers": 1, "attention": {"num_heads": 2}, "ffn": "dense"}
    ).build(257, 32)
    free = SampleConfig(num_tokens=12, temperature=1)
    texts = [sample_text(model, TOKENIZER, "one", free, seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    # An observer is shown every token, the last one too.
    num_new: list[int] = []
    prompts = [list(b"one")]
    list(stream_texts(model, TOKENIZER, prompts, free, 1, lambda output, num: num_new.append(num)))
    assert num_new == [3] + 12 * [1]
    # What may have been the beginning of a stop string comes at the end.
    waiting = free.model_copy(update={"stop": (texts[0][-1] + "\0",)})
    assert sample_text(model, TOKENIZER, "one", waiting, 1) == texts[0]


def test_the_prompt_of_a_run_is_cut_to_a_sequence(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be or not " * 100)
    config = DataConfig(
        corpus=TextConfig(paths=(str(tmp_path / "a.txt"),)), seq_len=8, cache_dir=str(tmp_path)
    )
    data = prepare(config)
    words = first_words(data)
    assert len(words) > 8
    for seq_len in (len(words) + 1, len(words), len(words) - 1, 1):
        assert run_prompt(SampleConfig(), data, seq_len) == words[:seq_len]
    given = SampleConfig(prompt="abcde")
    assert run_prompt(given, data, 5) == "abcde"
    with pytest.raises(ConfigError, match=r"^sample\.prompt: has 5 tokens, but the model takes"):
        run_prompt(given, data, 4)


def test_a_prompt_that_does_not_fit_is_rejected() -> None:
    assert encode_text(TOKENIZER, b"abcd", 4, "--prompt") == list(b"abcd")
    message = (
        "--prompt: has 5 tokens, but the model takes sequences of 4 (data.seq_len); "
        "give a shorter text"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        encode_text(TOKENIZER, b"abcde", 4, "--prompt")
