from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_ffn import Decoder, DecoderConfig
from moe_ffn.model.decoder import DecoderOutput
from moe_ffn.model.generate import Decoding, Sampling, generate

VOCAB, MAX_LEN = 7, 6


def decoder(**config: Any) -> Decoder:
    torch.manual_seed(0)
    small = {"d_model": 16, "num_layers": 1, "attention": {"num_heads": 2}, **config}
    model = DecoderConfig.model_validate(small).build(VOCAB, MAX_LEN)
    with torch.no_grad():
        model.embedding.weight.mul_(20)  # decided, so that tokens do not tie
    return model


class Fixed(nn.Module):
    """Answers with given logits, and notes what it was shown."""

    max_seq_len = 4
    config = SimpleNamespace(unsupported=lambda _: "it keeps nothing")

    def __init__(self, logits_V: list[float]) -> None:
        super().__init__()
        self.logits_V = torch.tensor(logits_V)
        self.shown: list[list[int]] = []

    def forward(self, ids_BS: Tensor) -> DecoderOutput:
        assert not self.training
        self.shown.append(ids_BS[0].tolist())
        return DecoderOutput(self.logits_V.expand(*ids_BS.shape, -1), {})


def sample(model: Any, num_tokens: int = 400, seed: int = 0, **options: Any) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids = generate(model, torch.tensor([0]), num_tokens, generator=generator, **options)
    return ids.tolist()


def test_the_model_sees_the_last_max_seq_len_tokens() -> None:
    model: Any = Fixed([0, 0, 5, 0])
    assert generate(model, torch.tensor([0, 1]), 4, temperature=0).tolist() == [2, 2, 2, 2]
    assert model.shown == [[0, 1], [0, 1, 2], [0, 1, 2, 2], [1, 2, 2, 2]]


def test_an_observer_receives_the_number_of_new_tokens() -> None:
    model: Any = Fixed([0, 0, 5, 0])
    seen: list[tuple[int, int]] = []
    decoding = Decoding(
        model,
        [torch.tensor([0, 1])],
        4,
        Sampling(temperature=0),
        observe=lambda output, num_new: seen.append((output.logits.shape[1], num_new)),
    )
    assert len(list(decoding)) == 4
    decoding.read()
    # The prompt of two, then one more each time, also where the last four are computed again.
    assert seen == [(2, 2), (3, 1), (4, 1), (4, 1), (4, 1)]


def test_top_k_chooses_among_the_k_best() -> None:
    model = Fixed([1.0, 3.0, 2.0, 0.0])
    assert set(sample(model, temperature=1.0, top_k=2)) == {1, 2}
    assert set(sample(model, temperature=1.0, top_k=1)) == {1}
    assert set(sample(model, temperature=2.0, top_k=None)) == {0, 1, 2, 3}
    assert set(sample(model, temperature=2.0, top_k=99)) == {0, 1, 2, 3}


def test_top_p_chooses_among_the_fewest_that_have_it_together() -> None:
    model = Fixed([math.log(share) for share in (0.1, 0.5, 0.15, 0.25)])
    for top_p, expected in (
        (1e-9, {1}),
        (0.5, {1}),
        (0.51, {1, 3}),
        (0.74, {1, 3}),
        (0.89, {1, 2, 3}),
        (0.91, {0, 1, 2, 3}),
        (1, {0, 1, 2, 3}),
    ):
        assert set(sample(model, temperature=1.0, top_p=top_p)) == expected
    # At temperature 0.5 the shares are squared, and the first has 0.725 of their sum.
    assert set(sample(model, temperature=0.5, top_p=0.7)) == {1}
    # Among the two that top_k leaves the first has 2 / 3.
    assert set(sample(model, temperature=1.0, top_k=2, top_p=0.6)) == {1}


@pytest.mark.parametrize("value", [0, -0.1, 1.1, "a", float("nan")])
def test_a_top_p_outside_its_range_is_rejected(value: Any) -> None:
    with pytest.raises(ValueError, match=r"top_p"):
        sample(Fixed([0.0]), top_p=value)


def test_temperature_divides_the_logits() -> None:
    # Logits (0, ln 3): probabilities 1/4 and 3/4. At temperature 0.5, (0, 2 ln 3): 1/10 and 9/10.
    model = Fixed([0.0, 1.0986123])
    for temperature, expected in ((1.0, 0.75), (0.5, 0.9)):
        drawn = sample(model, num_tokens=2000, temperature=temperature, top_k=None)
        # Deviation of a mean of 2000 draws: sqrt(.75 * .25 / 2000) = 0.0097; four of them.
        assert sum(drawn) / 2000 == pytest.approx(expected, abs=0.04)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_the_mode_is_as_before(training: bool) -> None:
    model = decoder(dropout=0.5).train(training)
    assert generate(model, torch.tensor([1]), 0).shape == (0,)
    with pytest.raises(ValueError, match="token_ids must lie in"):
        generate(model, torch.tensor([VOCAB]), 2)
    assert model.training == training
    generate(model, torch.tensor([1]), 2)
    assert all(module.training == training for module in model.modules())


def test_a_prompt_longer_than_the_context_is_rejected() -> None:
    message = (
        r"^prompt_ids has 7 tokens, but the model was built for max_seq_len \(6\); give a shorter "
        "prompt, such as its last 6 tokens$"
    )
    with pytest.raises(ValueError, match=message):
        generate(decoder(), torch.zeros(7, dtype=torch.int64), 1)
    assert generate(decoder(), torch.zeros(6, dtype=torch.int64), 2).shape == (2,)


@pytest.mark.parametrize("shape", [(0,), (1, 3), ()], ids=str)
def test_an_empty_prompt_or_a_batch_is_rejected(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"prompt_ids must be \(S,\) with S >= 1, got \("):
        generate(decoder(), torch.zeros(shape, dtype=torch.int64), 2)
