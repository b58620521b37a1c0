"""The suite of generation by a sparse model of transformers, with each implementation of its experts.

Greedy generation with the cache, from a prompt of random tokens, of a small model of the shape of Qwen3-MoE.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from experiments.benchmark.layers import AUTO
from experiments.benchmark.peers import HF_BATCHED, HF_EAGER, HF_GROUPED, PEERS, SAME
from experiments.benchmark.session import Candidate, Session
from experiments.benchmark.shapes import Shape
from moe_ffn.interop.transformers import NAME, register

IMPLEMENTATIONS = {
    HF_EAGER: "eager",
    HF_GROUPED: "grouped_mm",
    HF_BATCHED: "batched_mm",
    AUTO: NAME,
}
"""Candidate -> its name in the registry of transformers."""

PROMPT, NEW_TOKENS, NUM_LAYERS, VOCAB_SIZE = 16, 64, 4, 1024

MODEL = Shape(1, 256, 128, 32, 4, "fp32")

MIN_SPEEDUP = {1: 1.0, 16: 1.0}
"""Sequences at a time -> how many times the tokens per second of batched_mm are promised."""


def live_models(session: Session) -> None:
    """Text from a sparse model of transformers, with its experts computed by each implementation."""
    if not PEERS[HF_BATCHED].is_installed:
        session.say("not timed: transformers is not installed")
        return
    register()
    model = _model(session.device)
    session.say(f"{NUM_LAYERS} layers of {MODEL}; {NEW_TOKENS} new tokens after {PROMPT}")
    for batch, speedup in MIN_SPEEDUP.items():
        case = f"batch {batch}"
        generator = torch.Generator().manual_seed(1)
        prompt = torch.randint(3, VOCAB_SIZE, (batch, PROMPT), generator=generator)
        run = partial(_generate, model, prompt.to(session.device))
        expected = run("eager")
        shape = Shape(batch, *list(vars(MODEL).values())[1:])
        candidates = [
            Candidate(
                case,
                name,
                shape,
                partial(run, implementation),
                computes=SAME if torch.equal(run(implementation), expected) else "DIFFERS",
            )
            for name, implementation in IMPLEMENTATIONS.items()
        ]
        results = session.time(candidates, HF_BATCHED, tokens=batch * NEW_TOKENS)
        session.say(f"\n{case}")
        session.show(results, (HF_EAGER, HF_GROUPED, HF_BATCHED))
        mine, peer = (case, AUTO), (case, HF_BATCHED)
        session.promise(f"tokens/s / {HF_BATCHED}", speedup, results, mine, peer, at_most=False)


def _model(device: torch.device) -> Any:
    transformers = import_module("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=MODEL.d_model,
        moe_intermediate_size=MODEL.d_ff,
        num_experts=MODEL.num_experts,
        num_experts_per_tok=MODEL.k,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=MODEL.d_model // 4,
        norm_topk_prob=True,
        max_position_embeddings=PROMPT + NEW_TOKENS,
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval().to(device)


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
