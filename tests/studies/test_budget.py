"""The budget of a run by hand: each layer's own block, shared experts, accumulated batches."""

from __future__ import annotations

from moe_ffn.config.yaml_files import nest_options
from moe_ffn.runs.config import TrainConfig
from moe_ffn.studies.budget import Budget, Cost


def test_a_budget_by_hand() -> None:
    swiglu = {"type": "swiglu", "d_ff": 8}
    moe = {"type": "moe", "num_experts": 4, "router": {"type": "top_k", "k": 2}}
    options = {
        "model.d_model": 16,
        "model.num_layers": 2,
        "model.attention.num_heads": 2,
        "model.ffn": {"type": "dense", "d_ff": 32},
        "model.ffn_at": {"1": moe | {"experts": swiglu, "shared_expert": swiglu}},
        "data.seq_len": 16,
        "data.batch_size": 4,
        "trainer.max_steps": 5,
        "trainer.accumulate_grad_batches": 3,
    }
    config = TrainConfig.model_validate(nest_options(options.items()))

    found = Budget.of(config, vocab_size=32)

    # Two matrices of 16 x 32; a router of 16 x 4 and three matrices of 16 x 8 in each of 4 + 1 experts, of
    # which a token passes 2 + 1. A product takes two FLOPs a weight.
    dense, expert = 2 * 16 * 32, 3 * 16 * 8
    active = dense + 16 * 4 + 3 * expert
    assert found.ffn == Cost(dense + 16 * 4 + 5 * expert, active, 2 * active)
    model = config.model.build(32, max_seq_len=16)
    params = sum(parameter.numel() for parameter in model.parameters())
    assert found.model.params == params
    assert found.model.active_params == params - 2 * expert
    assert found.model.flops_per_token == config.model.flops_per_token(32, 16)
    assert found.tokens == 5 * 3 * 4 * 16
    # Backward takes twice what forward does.
    assert found.training_flops == 3 * found.model.flops_per_token * found.tokens
    assert Budget.of(config).model.params == params + (257 - 32) * 16, "the most of a tokenizer"
