"""The suite of decoding: tokens written with kept keys and values, beside whole sequences computed again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from experiments.benchmark.peers import REFERENCE, SAME
from experiments.benchmark.session import Candidate, Session
from experiments.benchmark.shapes import Shape
from experiments.benchmark.training import VOCAB_SIZE, moe_of
from moe_ffn.model.decoder import Decoder, DecoderConfig

CONTEXT = 512
"""Tokens that the last new one has before it, with itself."""

NUM_NEW = 8

CACHED, WHOLE = "moe_ffn with a cache", "moe_ffn without"

MODELS: dict[str, dict[str, Any]] = {
    "default model": {},
    "latent attention": {"attention": {"latent": {"kv_rank": 64, "rotated_dim": 16}}},
    "D 512, 6 layers": {"d_model": 512, "num_layers": 6, "attention": {"num_heads": 8}},
}

MIN_RATIO = 5.0
"""Smallest promised ratio of tokens per second."""


def generation(session: Session) -> None:
    """Tokens per second at 512 tokens of context, with a cache of keys and values and without."""
    session.say(f"tokens {CONTEXT - NUM_NEW + 1} to {CONTEXT} of one sequence, greedy, float32")
    candidates: list[Candidate] = []
    for case, options in MODELS.items():
        config = DecoderConfig.model_validate(options)
        ffn, width = moe_of(config)
        sizes = (config.d_model, width, ffn.num_experts, int(ffn.experts_per_token))
        torch.manual_seed(0)
        model = config.build(VOCAB_SIZE, CONTEXT).to(session.device).eval()
        candidates += _both(case, model, Shape(CONTEXT, *sizes, dtype="fp32"), session.device)
    results = session.time(candidates, WHOLE, tokens=NUM_NEW)
    for case in MODELS:
        session.say(case)
        session.show({key: value for key, value in results.items() if key[0] == case}, (WHOLE,))
        claim = f"tokens/s / {WHOLE}"
        keys = (case, CACHED), (case, WHOLE)
        session.promise(claim, MIN_RATIO, results, *keys, at_most=False, anywhere=True)


@torch.no_grad()
def _both(case: str, model: Decoder, shape: Shape, device: torch.device) -> list[Candidate]:
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
        Candidate(case, CACHED, shape, with_cache, forget, computes=SAME),
        Candidate(case, WHOLE, shape, without, computes=REFERENCE),
    ]


def _best(logits_BSV: Tensor) -> Tensor:
    return logits_BSV[:, -1:].argmax(dim=-1)
