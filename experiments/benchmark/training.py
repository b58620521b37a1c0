"""The suite of whole training steps: the default model beside a dense one with as many active parameters.

A step is forward, objective, backward, clipping and AdamW, each as `experiments.train` configures it, on
the source of Python's standard library, byte by byte.

B batch, S sequence
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from experiments.benchmark.layers import AUTO
from experiments.benchmark.peers import REFERENCE, SAME
from experiments.benchmark.session import Candidate, Session
from experiments.benchmark.shapes import Shape
from moe_ffn.data.corpus import StdlibConfig
from moe_ffn.data.prepare import DataConfig
from moe_ffn.ffn.moe import MoEConfig
from moe_ffn.model.decoder import DecoderConfig
from moe_ffn.training.config import TrainerConfig, resolve_precision
from moe_ffn.training.objective import ObjectiveConfig, objective
from moe_ffn.training.optimizer import AdamWConfig

CASE = "default model"
DENSE_MODEL = "dense swiglu"

MIN_RATIO = 0.75
"""Tokens per second over those of the dense model."""

VOCAB_SIZE = 257
"""A byte, or the end of a document: the default tokenizer's vocabulary."""

MORE_ROUNDS = 2


class Training:
    """A model, its optimizer and where it is in the text."""

    def __init__(self, config: DecoderConfig, text: Tensor, device: torch.device, bf16: bool):
        torch.manual_seed(0)
        data = DataConfig()
        self.clip = TrainerConfig().gradient_clip_val
        self.objective = ObjectiveConfig()
        self.model = config.build(VOCAB_SIZE, data.seq_len).to(device)
        self.optimizer = AdamWConfig().build(self.model)
        self.batches = batches(text, data, device)
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


def training(session: Session) -> None:
    """Whole training steps of the default model, on real text."""
    precision = resolve_precision("auto", session.device.type)
    data, moe = DataConfig(), DecoderConfig()
    ffn, width = moe_of(moe)
    dense = dense_counterpart(moe)
    models = {DENSE_MODEL: dense, AUTO: moe}
    for backend in session.backends:
        experts = ffn.experts.to_dict() | {"backend": backend}
        models[f"moe_ffn {backend}"] = with_ffn(moe, ffn.to_dict() | {"experts": experts})
    tokens = data.batch_size * data.seq_len
    active = [config.num_active_params(VOCAB_SIZE, data.seq_len) for config in (moe, dense)]
    session.say(
        f"{data.batch_size} x {data.seq_len} tokens a step, {precision}; active parameters: "
        f"{active[0]:,} with experts, {active[1]:,} dense"
    )
    sizes = (width, ffn.num_experts, int(ffn.experts_per_token))
    shape = Shape(tokens, moe.d_model, *sizes, dtype=precision)
    text = corpus(session.rounds * MORE_ROUNDS + session.warmup, data)
    candidates: list[Candidate] = []
    for name, config in models.items():
        trained = Training(config, text, session.device, precision == "bf16-mixed")
        try:
            trained.step()
        except ValueError as error:
            session.note(f"skipped: {name}: {error}")
            continue
        computes = REFERENCE if config is dense else SAME
        candidates.append(Candidate(CASE, name, shape, trained.step, computes=computes))
    results = session.time(candidates, DENSE_MODEL, more=MORE_ROUNDS, tokens=tokens)
    session.show(results, (DENSE_MODEL,))
    claim, mine, plain = f"tokens/s / {DENSE_MODEL}", (CASE, AUTO), (CASE, DENSE_MODEL)
    session.promise(claim, MIN_RATIO, results, mine, plain, at_most=False)


def dense_counterpart(moe: DecoderConfig) -> DecoderConfig:
    """The same Transformer with SwiGLU blocks as wide as the experts of one token together."""
    ffn, width = moe_of(moe)
    return with_ffn(moe, {"type": "swiglu", "d_ff": round(ffn.experts_per_token * width)})


def moe_of(config: DecoderConfig) -> tuple[MoEConfig, int]:
    """The options of its blocks, and the width of one expert."""
    assert isinstance(config.ffn, MoEConfig)
    experts: Any = config.ffn.experts  # of whatever kind; those there are have a width
    return config.ffn, experts.width(config.d_model, config.ffn.experts_per_token)


def with_ffn(config: DecoderConfig, ffn: dict[str, Any]) -> DecoderConfig:
    return DecoderConfig.model_validate(config.to_dict() | {"ffn": ffn})


def corpus(num_steps: int, data: DataConfig) -> Tensor:
    """uint8: enough of the standard library's source for that many steps, where it is long enough."""
    needed = (num_steps + 2) * data.batch_size * (data.seq_len + 1)
    text = bytearray()
    for document in StdlibConfig().documents():
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
