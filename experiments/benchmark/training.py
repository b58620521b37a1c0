"""Whole training steps of the default model against those of a dense one with as many active parameters.

A step is forward, objective, backward, clipping and AdamW, each as `experiments.train` configures it, on
the source of Python's standard library, byte by byte.

B batch, S sequence
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from experiments.benchmark.layers import AUTO, REFERENCE, SAME, ours
from experiments.benchmark.report import Row, ratio, spread, table, times
from experiments.benchmark.session import Session, version_of
from experiments.benchmark.timing import Timed
from moe_ffn.data.corpus import stdlib_documents
from moe_ffn.data.prepare import DataConfig
from moe_ffn.ffn.moe import MoEConfig
from moe_ffn.model.decoder import DecoderConfig
from moe_ffn.training.config import TrainerConfig, resolve_precision
from moe_ffn.training.objective import ObjectiveConfig, objective
from moe_ffn.training.optimizer import AdamWConfig

DENSE_MODEL = "dense swiglu"

LEAST = 0.75
"""Tokens per second over those of the dense model."""

NUM_VALUES = 257
"""A byte, or the end of a document: the default tokenizer's vocabulary."""

MORE_ROUNDS = 2


class Training:
    """A model, its optimizer and where it is in the text."""

    def __init__(self, config: DecoderConfig, text: Tensor, device: torch.device, bf16: bool):
        torch.manual_seed(0)
        self.data = DataConfig()
        self.clip = TrainerConfig().gradient_clip_val
        self.objective = ObjectiveConfig()
        self.model = config.build(NUM_VALUES, self.data.seq_len).to(device)
        self.optimizer = AdamWConfig().build(self.model)
        self.batches = batches(text, self.data, device)
        self.device, self.bf16 = device, bf16

    def step(self) -> None:
        input_ids_BS, target_ids_BS = next(self.batches)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            output = self.model(input_ids_BS)
            loss = objective(output.logits, target_ids_BS, output.routings, self.objective).total
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


def run(session: Session) -> None:
    precision = resolve_precision("auto", session.device.type)
    data, moe = DataConfig(), DecoderConfig()
    dense = dense_counterpart(moe)
    tokens = data.batch_size * data.seq_len
    active = [config.num_active_params(NUM_VALUES, data.seq_len) for config in (moe, dense)]
    session.say(
        f"{data.batch_size} x {data.seq_len} tokens a step, {precision}; active parameters: "
        f"{active[0]:,} with experts, {active[1]:,} dense"
    )
    text = corpus(session.rounds.timed * MORE_ROUNDS + session.rounds.warmup, data)
    models = {DENSE_MODEL: dense, AUTO: moe}
    models |= {ours(backend): with_backend(moe, backend) for backend in session.backends}
    candidates: dict[str, Timed] = {}
    for name, config in models.items():
        training = Training(config, text, session.device, precision == "bf16-mixed")
        try:
            training.step()
        except ValueError as error:
            session.skip(name, str(error))
            continue
        candidates[name] = Timed(training.step)
    timings = session.time(candidates, more=MORE_ROUNDS)
    rows = [
        [
            name,
            f"{tokens / timing.median:,.0f}",
            spread(timing),
            times(ratio(timings, DENSE_MODEL, name)),
        ]
        for name, timing in timings.items()
    ]
    headers = ["model", "tokens/s", "quartiles of a step", f"/ {DENSE_MODEL}"]
    session.say(table(headers, rows))
    pair = (DENSE_MODEL, AUTO)
    claim = f"tokens/s / {DENSE_MODEL}"
    session.promise_ratio("training", "", claim, LEAST, timings, pair, at_most=False)
    ffn = _moe(moe)
    for name, timing in timings.items():
        lower, upper = timing.quartiles
        session.rows.append(
            Row(
                suite="training",
                case="default model",
                candidate=name,
                version=version_of(name),
                computes=REFERENCE if name == DENSE_MODEL else SAME,
                unit="token/s",
                median=tokens / timing.median,
                lower_quartile=tokens / upper,
                upper_quartile=tokens / lower,
                rounds=len(timing.seconds),
                ratio=ratio(timings, DENSE_MODEL, name),
                ratio_to=DENSE_MODEL,
                num_tokens=tokens,
                d_model=moe.d_model,
                d_ff=width_of_expert(moe),
                num_experts=ffn.num_experts,
                k=int(ffn.experts_per_token),
                dtype=precision,
            )
        )


def dense_counterpart(moe: DecoderConfig) -> DecoderConfig:
    """The same Transformer with SwiGLU blocks as wide as the experts of one token together."""
    width = round(_moe(moe).experts_per_token * width_of_expert(moe))
    options = moe.to_dict() | {"ffn": {"type": "swiglu", "d_ff": width}}
    return DecoderConfig.model_validate(options)


def with_backend(moe: DecoderConfig, backend: str) -> DecoderConfig:
    options = moe.to_dict()
    options["ffn"]["experts"]["backend"] = backend
    return DecoderConfig.model_validate(options)


def width_of_expert(moe: DecoderConfig) -> int:
    ffn = _moe(moe)
    experts: Any = ffn.experts  # of whatever kind; those there are have a width
    return experts.width(moe.d_model, ffn.experts_per_token)


def _moe(config: DecoderConfig) -> MoEConfig:
    assert isinstance(config.ffn, MoEConfig)
    return config.ffn


def corpus(num_steps: int, data: DataConfig) -> Tensor:
    """uint8: enough of the standard library's source for that many steps, where it is long enough."""
    needed = (num_steps + 2) * data.batch_size * (data.seq_len + 1)
    text = bytearray()
    for document in stdlib_documents():
        for block in document.blocks:
            text += block
        if len(text) >= needed:
            break
    return torch.frombuffer(text, dtype=torch.uint8)


def batches(
    text: Tensor, data: DataConfig, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets, int64 (B, S): one stretch of the text after the other, for ever."""
    length = data.seq_len + 1
    size = data.batch_size * length
    while True:
        for part in text[: len(text) // size * size].split(size):
            rows_BS = part.view(data.batch_size, length).long().to(device)
            yield rows_BS[:, :-1].contiguous(), rows_BS[:, 1:].contiguous()
