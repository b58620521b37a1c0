"""The suite of whole training steps: the default model beside a dense one with as many active parameters.

A step is forward, objective, backward, clipping and AdamW, each as `experiments.train` configures it, on
the text that it trains on by default: the source of Python's standard library, byte by byte.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from experiments.benchmark.layers import AUTO
from experiments.benchmark.peers import REFERENCE, SAME
from experiments.benchmark.session import Candidate, Session, profiled
from experiments.benchmark.shapes import Shape
from moe_ffn.data.batches import TrainBatches
from moe_ffn.data.prepare import DataConfig, prepare
from moe_ffn.ffn.moe import MoEConfig
from moe_ffn.model.decoder import DecoderConfig
from moe_ffn.runs.config import TrainConfig
from moe_ffn.studies.timing import Training
from moe_ffn.training.config import resolve_precision

CASE = "default model"
DENSE_MODEL = "dense swiglu"

MIN_RATIO = 0.9
"""Smallest promised ratio of tokens per second to those of the dense model."""

VOCAB_SIZE = 257
"""The vocabulary of the default tokenizer: all bytes, and the end of a document."""

MORE_ROUNDS = 2

PARTS = ("forward", "backward", "clipping", "optimizer")
PROFILED_STEPS = 4


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
    text = prepare(data).train
    batches = TrainBatches(text, seq_len=data.seq_len, batch_size=data.batch_size, seed=0)
    candidates: list[Candidate] = []
    for name, config in models.items():
        options = TrainConfig(model=config)
        bf16 = precision == "bf16-mixed"
        trained = Training(options, VOCAB_SIZE, batches, session.device, bf16)
        try:
            trained.step()
        except ValueError as error:
            session.note(f"skipped: {name}: {error}")
            continue
        computes = REFERENCE if config is dense else SAME
        candidates.append(Candidate(CASE, name, shape, trained.step, computes=computes))
    results = session.time(candidates, DENSE_MODEL, more=MORE_ROUNDS, tokens=tokens)
    session.show(results, (DENSE_MODEL,))
    if session.device.type == "cpu":
        watched = (one for one in candidates if one.name in (AUTO, DENSE_MODEL))
        shares = {one.name: shares_of_step(one.run) for one in watched}
        rows = [[part, *(f"{of[part]:.1%}" for of in shares.values())] for part in PARTS]
        session.table(["part of a step", *shares], rows)
    claim, mine, plain = f"tokens/s / {DENSE_MODEL}", (CASE, AUTO), (CASE, DENSE_MODEL)
    session.promise(claim, MIN_RATIO, results, mine, plain, at_most=False)


def shares_of_step(step: Callable[[], object]) -> dict[str, float]:
    """The parts of a step -> their share of the time of all, over some steps."""
    found = {event.key: event.cpu_time_total for event in profiled(step, PROFILED_STEPS)}
    whole = sum(found[f"step: {part}"] for part in PARTS)
    return {part: found[f"step: {part}"] / whole for part in PARTS}


def dense_counterpart(moe: DecoderConfig) -> DecoderConfig:
    """The Transformer with dense SwiGLU blocks, as wide as the experts of one token together."""
    ffn, width = moe_of(moe)
    return with_ffn(moe, {"type": "swiglu", "d_ff": round(ffn.experts_per_token * width)})


def moe_of(config: DecoderConfig) -> tuple[MoEConfig, int]:
    """The config of the blocks of a decoder, and the width of one expert."""
    assert isinstance(config.ffn, MoEConfig)
    experts: Any = config.ffn.experts  # of whatever kind; those there are have a width
    return config.ffn, experts.width(config.d_model, config.ffn.experts_per_token)


def with_ffn(config: DecoderConfig, ffn: dict[str, Any]) -> DecoderConfig:
    return DecoderConfig.model_validate(config.to_dict() | {"ffn": ffn})
