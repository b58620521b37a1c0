"""The loss of a model on a whole text, in which every token but the first is predicted once."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from moe_ffn.model.decoder import Decoder, DecoderConfig
from moe_ffn.training.evaluation import evaluate, strided_batches
from moe_ffn.training.objective import IGNORED_TARGET

SEQ_LEN = 8


def build(**ffn: object) -> Decoder:
    torch.manual_seed(0)
    config = DecoderConfig.model_validate(
        {
            "d_model": 16,
            "num_layers": 2,
            "attention": {"num_heads": 2},
            "ffn": {"type": "moe", "num_experts": 4, **ffn},
        }
    )
    decoder = config.build(vocab_size=32, max_seq_len=SEQ_LEN).eval()
    with torch.no_grad():  # decided, so that losses differ
        decoder.embedding.weight.mul_(20)
    return decoder


def tokens_of(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(32, size=count).astype(np.uint16)


@pytest.mark.parametrize("stride", [1, 3, SEQ_LEN])
@pytest.mark.parametrize("count", [2, 8, 9, 10, 17, 40])
def test_every_token_but_the_first_is_predicted_once(count: int, stride: int) -> None:
    tokens, predicted = tokens_of(count), []
    for batch in strided_batches(tokens, SEQ_LEN, stride, batch_size=3):
        assert len(batch.input_ids) <= 3
        for inputs, targets in zip(batch.input_ids, batch.target_ids, strict=True):
            new = targets != IGNORED_TARGET
            place = len(predicted)
            predicted += targets[new].tolist()
            # What stands before a token is the text before it, and as much as the stride leaves.
            context = len(inputs) - int(new.sum()) + 1
            assert context >= min(place + 1, SEQ_LEN - stride + 1)
            end = len(predicted)
            assert inputs.tolist() == tokens[end - len(inputs) : end].tolist()

    assert predicted == tokens[1:].tolist()


@pytest.mark.parametrize("stride", [2, SEQ_LEN])
def test_the_figures_equal_a_loop_over_tokens_in_float64(stride: int) -> None:
    """With a stride of S each window stands alone; with a smaller one a token sees S - stride tokens more."""
    decoder, tokens = build().double(), tokens_of(29)
    lengths = np.arange(32) % 5
    nats = []
    for place in range(1, len(tokens)):
        # The window that predicts it first: they begin at multiples of the stride, but for the last one.
        start = max(0, -(-(place - SEQ_LEN) // stride)) * stride
        start = min(start, len(tokens) - 1 - SEQ_LEN)
        seen = torch.tensor(tokens[start:place].astype(int))[None]
        with torch.no_grad():
            scores_V = decoder(seen).logits[0, -1].log_softmax(-1)
        nats.append(-scores_V[int(tokens[place])].item())

    batches = strided_batches(tokens, SEQ_LEN, stride, batch_size=2)
    found = evaluate(decoder, batches, lengths)

    assert found.loss == pytest.approx(np.mean(nats), rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(np.mean(nats)), rel=1e-5)
    num_bytes = int(lengths[tokens[1:]].sum())
    assert found.bits_per_byte == pytest.approx(sum(nats) / math.log(2) / num_bytes, rel=1e-6)
    assert (found.num_tokens, found.num_bytes) == (28, num_bytes)


def test_routing_is_counted_over_every_batch() -> None:
    decoder, tokens = build(capacity={"factor": 1.0, "eval_factor": 0.5}), tokens_of(33)
    ids = torch.tensor(tokens[:-1].astype(int)).view(4, SEQ_LEN)

    found = evaluate(decoder, strided_batches(tokens, SEQ_LEN, SEQ_LEN, 2), np.ones(32, int))

    with torch.no_grad():
        routings = [decoder(part).routings["layer_01"] for part in ids.split(2)]
    chosen = torch.cat([routing.expert_ids_N for routing in routings])
    load_E = torch.bincount(chosen, minlength=4) / len(chosen)
    values = found.routing["layer_01"]
    torch.testing.assert_close(values["load"].float(), load_E)
    entropy = -(load_E * load_E.log()).sum() / math.log(4)
    assert values["load_entropy"].item() == pytest.approx(entropy.item(), rel=1e-6)
    dropped = torch.cat([routing.dropped_N for routing in routings]).double().mean()
    assert 0.3 < values["dropped_fraction"].item() == pytest.approx(dropped.item())
    assert found.to_dict()["routing"]["layer_01"]["load"] == pytest.approx(load_E.tolist())
