"""Suites that time whole models: training steps, decoding, and a sparse model of transformers.

A training step is forward, objective, backward, clipping and AdamW, configured as in `experiments.train`, on
its default text: the source of Python's standard library, byte by byte.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from experiments.benchmark.layers import AUTO
from experiments.benchmark.peers import HF_BATCHED, HF_EAGER, HF_GROUPED, PEERS, REFERENCE, SAME
from experiments.benchmark.session import Candidate, Session
from moe_ffn.data.prepare import DataConfig, prepare
from moe_ffn.ffn.moe import MoEConfig
from moe_ffn.interop.kernels import NAME, register
from moe_ffn.model.decoder import Decoder, DecoderConfig
from moe_ffn.runs.config import TrainConfig
from moe_ffn.studies.timing import Training
from moe_ffn.training.config import resolve_precision

VOCAB_SIZE = 257
"""Vocabulary of the default tokenizer: all bytes, and the end of a document."""

# ------------------------------------------------------------------------------ training steps

CASE = "default model"
DENSE_MODEL = "dense swiglu"

MIN_TRAINING_RATIO = 0.9
"""Minimum ratio of tokens per second to the dense model's."""


def training(session: Session) -> None:
    """Training steps of the default model and of a dense model with as many active parameters."""
    precision = resolve_precision("auto", session.device.type)
    data, moe = DataConfig(), DecoderConfig()
    assert isinstance(moe.ffn, MoEConfig)
    experts: Any = moe.ffn.experts  # the default kind has a width
    k = moe.ffn.experts_per_token
    width = round(k * experts.width(moe.d_model, k))  # of the experts of a token together
    dense = with_ffn(moe, {"type": "swiglu", "d_ff": width})
    models = {DENSE_MODEL: dense, AUTO: moe}
    for backend in session.backends:
        with_backend = {"experts": experts.to_dict() | {"backend": backend}}
        models[f"moe_ffn {backend}"] = with_ffn(moe, moe.ffn.to_dict() | with_backend)
    active = [config.num_active_params(VOCAB_SIZE, data.seq_len) for config in (moe, dense)]
    session.say(
        f"{data.batch_size} x {data.seq_len} tokens per step, {precision}; active parameters: "
        f"{active[0]:,} with experts, {active[1]:,} dense"
    )
    text = prepare(data)
    candidates: list[Candidate] = []
    for name, config in models.items():
        trained = Training(TrainConfig(model=config, data=data), text, session.device)
        try:
            trained.step()
        except ValueError as error:
            session.say(f"  skipped: {name}: {error}")
            continue
        computes = REFERENCE if config is dense else SAME
        candidates.append(Candidate(CASE, name, trained.step, computes=computes))
    results = session.time(candidates, more=2, tokens=data.batch_size * data.seq_len)
    session.show(results, (DENSE_MODEL,))
    claim, ours, dense_key = f"tokens/s / {DENSE_MODEL}", (CASE, AUTO), (CASE, DENSE_MODEL)
    session.check_target(claim, MIN_TRAINING_RATIO, results, ours, dense_key, at_most=False)


def with_ffn(config: DecoderConfig, ffn: dict[str, Any]) -> DecoderConfig:
    return DecoderConfig.model_validate(config.to_dict() | {"ffn": ffn})


# ------------------------------------------------------------------------------------ decoding

CONTEXT = 512
"""Length of the sequence, with all new tokens."""

NUM_NEW = 8

CACHED, WHOLE = "moe_ffn with a cache", "moe_ffn without"

MODELS: dict[str, dict[str, Any]] = {
    "default model": {},
    "latent attention": {"attention": {"latent": {"kv_rank": 64, "rotated_dim": 16}}},
    "D 512, 6 layers": {"d_model": 512, "num_layers": 6, "attention": {"num_heads": 8}},
}

MIN_CACHE_SPEEDUP = 5.0
"""Minimum ratio of tokens per second, with a cache to without."""


def generation(session: Session) -> None:
    """Decoding at 512 tokens of context, with and without a cache of keys and values."""
    session.say(f"tokens {CONTEXT - NUM_NEW + 1} to {CONTEXT} of one sequence, greedy, float32")
    candidates: list[Candidate] = []
    for case, options in MODELS.items():
        torch.manual_seed(0)
        config = DecoderConfig.model_validate(options)
        model = config.build(VOCAB_SIZE, CONTEXT).to(session.device).eval()
        candidates += _with_and_without_cache(case, model, session.device)
    results = session.time(candidates, tokens=NUM_NEW)
    for case in MODELS:
        session.say(case)
        session.show({key: value for key, value in results.items() if key[0] == case}, (WHOLE,))
        keys = (case, CACHED), (case, WHOLE)
        claim = f"tokens/s / {WHOLE}"
        session.check_target(claim, MIN_CACHE_SPEEDUP, results, *keys, at_most=False, anywhere=True)


@torch.no_grad()
def _with_and_without_cache(case: str, model: Decoder, device: torch.device) -> list[Candidate]:
    generator = torch.Generator().manual_seed(0)
    prompt_ids = torch.randint(VOCAB_SIZE, (1, CONTEXT - NUM_NEW), generator=generator).to(device)
    cache = model.new_cache(1)
    first = _best(model(prompt_ids, cache=cache).logits)
    lengths = cache.lengths

    @torch.no_grad()
    def with_cache() -> None:
        new = first
        for _ in range(NUM_NEW):
            new = _best(model(new, cache=cache).logits)

    def forget() -> None:
        cache.lengths = lengths

    @torch.no_grad()
    def without() -> None:
        ids = torch.cat([prompt_ids, first], dim=1)
        for _ in range(NUM_NEW):
            ids = torch.cat([ids, _best(model(ids[:, -CONTEXT:]).logits)], dim=1)

    return [
        Candidate(case, CACHED, with_cache, forget),
        Candidate(case, WHOLE, without, computes=REFERENCE),
    ]


def _best(logits_BSV: Tensor) -> Tensor:
    return logits_BSV[:, -1:].argmax(dim=-1)


# ---------------------------------------------------------------- a sparse model of transformers

IMPLEMENTATIONS = {
    HF_EAGER: "eager",
    HF_GROUPED: "grouped_mm",
    HF_BATCHED: "batched_mm",
    AUTO: NAME,
}
"""Candidate -> its `experts_implementation` in transformers."""

PROMPT, NEW_TOKENS = 16, 64

QWEN3_MOE = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "norm_topk_prob": True,
    "max_position_embeddings": PROMPT + NEW_TOKENS,
}

MIN_SPEEDUP = {1: 1.0, 16: 1.0}
"""Batch size -> minimum ratio of tokens per second to batched_mm's."""


def live_models(session: Session) -> None:
    """Generation with a small Qwen3-MoE of transformers, with each implementation of its experts."""
    if not PEERS[HF_BATCHED].is_installed:
        session.say("not timed: transformers is not installed")
        return
    register()
    transformers = import_module("transformers")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3MoeConfig(**QWEN3_MOE))
    model = model.eval().to(session.device)
    session.say(f"a small Qwen3-MoE; {NEW_TOKENS} new tokens after {PROMPT}")
    for batch, speedup in MIN_SPEEDUP.items():
        case = f"batch {batch}"
        generator = torch.Generator().manual_seed(1)
        prompt = torch.randint(3, QWEN3_MOE["vocab_size"], (batch, PROMPT), generator=generator)
        run = partial(_generate, model, prompt.to(session.device))
        expected = run("eager")
        candidates = [
            Candidate(
                case,
                name,
                partial(run, implementation),
                computes=SAME if torch.equal(run(implementation), expected) else "DIFFERS",
            )
            for name, implementation in IMPLEMENTATIONS.items()
        ]
        results = session.time(candidates, tokens=batch * NEW_TOKENS)
        session.say(f"\n{case}")
        session.show(results, (HF_EAGER, HF_GROUPED, HF_BATCHED))
        ours, peer = (case, AUTO), (case, HF_BATCHED)
        session.check_target(
            f"tokens/s / {HF_BATCHED}", speedup, results, ours, peer, at_most=False
        )


def _generate(model: Any, prompt_BS: Tensor, implementation: str) -> Tensor:
    model.set_experts_implementation(implementation)
    return model.generate(
        input_ids=prompt_BS,
        attention_mask=torch.ones_like(prompt_BS),
        min_new_tokens=NEW_TOKENS,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
