"""The loss of a model on a whole text, in which every token but the first is predicted once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_ffn.ffn import FFNConfig
from moe_ffn.model.decoder import Decoder, DecoderConfig
from moe_ffn.outputs import FFNOutput
from moe_ffn.training.config import resolve_precision
from moe_ffn.training.evaluation import StridedBatches, evaluate
from moe_ffn.training.objective import IGNORED_TARGET, ObjectiveConfig, objective

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
    for batch in StridedBatches(tokens, SEQ_LEN, stride, batch_size=3):
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
    """A stride of S makes windows independent; a smaller one adds S - stride tokens of context."""
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

    batches = StridedBatches(tokens, SEQ_LEN, stride, batch_size=2)
    found = evaluate(decoder, batches, lengths)

    assert found.loss == pytest.approx(np.mean(nats), rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(np.mean(nats)), rel=1e-5)
    num_bytes = int(lengths[tokens[1:]].sum())
    assert found.bits_per_byte == pytest.approx(sum(nats) / math.log(2) / num_bytes, rel=1e-6)
    assert (found.num_tokens, found.num_bytes) == (28, num_bytes)


def test_routing_is_counted_over_every_batch() -> None:
    decoder, tokens = build(capacity={"factor": 1.0, "eval_factor": 0.5}), tokens_of(33)
    ids = torch.tensor(tokens[:-1].astype(int)).view(4, SEQ_LEN)

    found = evaluate(decoder, StridedBatches(tokens, SEQ_LEN, SEQ_LEN, 2), np.ones(32, int))

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


def test_the_load_of_a_single_expert_is_a_list_of_one() -> None:
    decoder = build(num_experts=1, router={"type": "top_k", "k": 1})

    found = evaluate(decoder, StridedBatches(tokens_of(33), SEQ_LEN, SEQ_LEN, 2), np.ones(32, int))

    assert found.to_dict()["routing"]["layer_01"]["load"] == [1.0]


# -- which number format `auto` stands for, and what bf16-mixed leaves in float32


@pytest.mark.parametrize(
    ("precision", "device", "has_bfloat16", "resolved"),
    [
        ("auto", "cpu", True, "32-true"),
        ("auto", "mps", True, "32-true"),
        ("auto", "cuda", True, "bf16-mixed"),
        ("auto", "cuda", False, "32-true"),
        *((name, "cpu", True, name) for name in ("64-true", "32-true", "bf16-mixed", "bf16-true")),
        ("16-mixed", "cuda", True, "16-mixed"),
    ],
)
def test_auto_is_resolved_by_the_kind_of_device(
    monkeypatch: pytest.MonkeyPatch, precision: str, device: str, has_bfloat16: bool, resolved: str
) -> None:
    def supported(including_emulation: bool = True) -> bool:
        return has_bfloat16 or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)

    assert resolve_precision(precision, device) == resolved


MIXED_MODELS: dict[str, dict[str, Any]] = {
    "swiglu": {"type": "swiglu"},
    # Evenly weighted experts at fixed places: where rounding changes a choice, the gradient jumps.
    "moe": {"type": "moe", "num_experts": 4, "router": {"type": "hash", "k": 2}},
}


@pytest.mark.parametrize("name", MIXED_MODELS)
def test_a_gradient_in_bf16_mixed_is_that_of_float64_but_for_rounding(name: str) -> None:
    """8 bits of mantissa leave about 1 % of noise and no bias: nothing else is lost on the way."""
    torch.manual_seed(0)
    ffn = FFNConfig.model_validate(MIXED_MODELS[name])
    model = DecoderConfig(d_model=64, num_layers=2, ffn=ffn).build(vocab_size=64, max_seq_len=64)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(2)  # away from the even scores of fresh weights
    tokens = torch.randint(64, (8, 65))

    def gradients(dtype: torch.dtype) -> dict[str, Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            output = model(tokens[:, :-1])
            losses = objective(output.logits, tokens[:, 1:], output.routings, ObjectiveConfig())
        losses.total.backward()
        return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}

    mixed, whole = gradients(torch.bfloat16), gradients(torch.float32)
    model.double()
    exact = gradients(torch.float64)

    assert mixed.keys() == exact.keys()
    for parameter, expected in exact.items():
        noise = (mixed[parameter] - expected).norm() / expected.norm()
        scale = (mixed[parameter] * expected).sum() / expected.square().sum()
        assert noise < 0.03, parameter
        assert scale.item() == pytest.approx(1, abs=0.01), parameter
        assert (whole[parameter] - expected).norm() < 1e-4 * expected.norm(), parameter


def test_bf16_mixed_keeps_stream_norms_router_and_optimizer_in_float32() -> None:
    model = DecoderConfig(d_model=32, num_layers=2).build(vocab_size=16, max_seq_len=8)
    optimizer = torch.optim.AdamW(model.parameters())
    seen: dict[str, torch.dtype] = {}

    def watch(name: str) -> Any:
        def hook(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, FFNOutput):
                output = output.hidden
            if isinstance(output, Tensor):
                seen[name] = output.dtype

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(watch(name))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(torch.randint(16, (2, 8))).logits
    logits.float().square().mean().backward()
    optimizer.step()

    assert seen["layers.0.attention"] == torch.bfloat16  # autocast was on
    wide = ("embedding", "layers.0", "layers.1", "layers.0.attention_norm", "layers.0.ffn_norm")
    wide += ("final_norm", "layers.0.ffn.router.projection")
    assert {name: seen[name] for name in wide} == dict.fromkeys(wide, torch.float32)
    states = [state for values in optimizer.state.values() for state in values.values()]
    assert {state.dtype for state in states} == {torch.float32}
