"""`watch`: the routings of a live model are what its experts were given, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from moe_ffn import ConfigError, DecoderConfig, load_balancing_loss
from moe_ffn.interop import swap_ffn, watch
from tests.helpers.transformers_models import (
    FAMILIES,
    IDS_BS,
    MASK_BS,
    SIGMOID,
    model_of,
    record_arguments,
    routed,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_routing_equals_the_arguments_of_the_experts(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = routed(family)
    given = record_arguments(model, monkeypatch)
    inputs = {"input_ids": IDS_BS, "attention_mask": MASK_BS, "use_cache": False}
    with torch.no_grad():
        plain = model(**inputs).logits
        given.clear()
        with watch(model) as passes:
            logits = model(**inputs).logits

    assert torch.equal(logits, plain)
    (routings,) = passes
    assert len(routings) == len(given) > 0
    assert list(routings)[-1] == "layer_01"
    for routing, (ids_TK, weights_TK) in zip(routings.values(), given, strict=True):
        assert torch.equal(routing.expert_ids_N, ids_TK.flatten())
        assert torch.equal(routing.weights_N, weights_TK.flatten())
        assert torch.equal(routing.token_indices_N.view(12, -1)[:, 0], torch.arange(12))
        assert (routing.num_experts, routing.sequence_length) == (4, 6)
        assert routing.mask_T is not None
        assert torch.equal(routing.mask_T, MASK_BS.flatten().bool())
        logits_TE, scores_TE = routing.require("logits_TE", ""), routing.require("scores_TE", "")
        score = logits_TE.sigmoid() if family in SIGMOID else logits_TE.softmax(dim=-1)
        assert torch.equal(scores_TE, score)
        if family != "phimoe":  # whose second weight leaves the first expert out
            factors_TK = weights_TK / scores_TE.gather(1, ids_TK)
            torch.testing.assert_close(factors_TK, factors_TK[:, :1].expand_as(factors_TK))


def test_a_generation_is_a_pass_for_each_token() -> None:
    model = routed("mixtral")
    with watch(model) as passes:
        ids_BS = model.generate(
            input_ids=IDS_BS, attention_mask=MASK_BS, max_new_tokens=4, min_new_tokens=4,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
    mask_BS = torch.cat([MASK_BS, torch.ones(2, 4, dtype=torch.long)], dim=1)
    with watch(model) as whole, torch.no_grad():
        model(input_ids=ids_BS, attention_mask=mask_BS)

    assert [p["layer_00"].num_tokens for p in passes] == [12, 2, 2, 2]
    for number, routings in enumerate(passes[1:], start=6):
        for name, routing in routings.items():
            assert routing.mask_T is not None
            assert routing.mask_T.tolist() == [True, True]
            at_once = whole[0][name].expert_ids_N.view(2, 10, -1)[:, number]
            assert torch.equal(routing.expert_ids_N.view(2, -1), at_once)


def test_padding_reaches_the_routings_of_our_own_blocks() -> None:
    ffn_at: Any = {"0": "dense", "1": "moe"}
    decoder = DecoderConfig.model_validate({"d_model": 16, "ffn_at": ffn_at}).build(64, 6)
    with watch(decoder) as passes:
        decoder(IDS_BS, MASK_BS.bool())
    mask_T = passes[0]["layer_01"].mask_T
    assert mask_T is not None
    assert torch.equal(mask_T, MASK_BS.flatten().bool())


def test_padding_reaches_every_round_of_a_chain_in_a_model_of_transformers() -> None:
    model = model_of("llama", {"vocab_size": 64})
    swap_ffn(model, [0], {"type": "chain_of_experts", "ffn": {"type": "moe", "num_experts": 4}})
    mask = torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]])
    with watch(model) as passes:
        model(input_ids=torch.arange(12).view(2, 6), attention_mask=mask)
    assert list(passes[-1]) == ["layer_00", "layer_00/round_2"]
    for routing in passes[-1].values():
        assert routing.num_real_tokens == 9


def test_it_leaves_no_hook_behind_whatever_happens() -> None:
    model = routed("deepseek_v3")

    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    with watch(model) as passes:
        model(input_ids=IDS_BS)
        broken = model.lm_head.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="broken"):
            model(input_ids=IDS_BS)
        broken.remove()

    assert len(passes) == 1, "the pass that failed is none"
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    assert not any(getattr(module, kind) for module in model.modules() for kind in kinds)


def test_a_loss_of_ours_trains_a_router_of_theirs_with_checkpointing() -> None:
    model = routed("qwen3_moe").train()
    model.activation_checkpointing_enable()
    with watch(model) as passes:
        output = model(input_ids=IDS_BS, attention_mask=MASK_BS, use_cache=False)
        loss = sum(load_balancing_loss(routing) for routing in passes[0].values())
        (output.logits.mean() + loss).backward()

    assert len(passes) == 1, "layers that are computed again are no pass"
    assert model.model.layers[1].mlp.gate.weight.grad.abs().max() > 0
    assert load_balancing_loss(passes[0]["layer_01"]).grad_fn is not None


@pytest.mark.parametrize("family", ["llama", "llama4_text", "jetmoe"])
def test_a_model_whose_routing_cannot_be_seen_is_named(family: str) -> None:
    message = (
        r"no routing of \w+ForCausalLM can be watched: .* no experts that receive ids and weights"
    )
    with pytest.raises(ConfigError, match=message), watch(model_of(family, {})):
        pass


def test_two_stacks_of_layers_are_rejected() -> None:
    both = nn.ModuleDict({"one": routed("mixtral"), "two": routed("mixtral")})
    with (
        pytest.raises(ConfigError, match=r"'two\.model\.layers\.0\.mlp\.experts' of ModuleDict is"),
        watch(both),
    ):
        pass


def test_a_mask_that_does_not_mark_padding_is_rejected() -> None:
    model = routed("mixtral")
    with (
        pytest.raises(ConfigError, match=r"attention_mask must have the shape \(batch, sequence\)"),
        watch(model),
    ):
        model(input_ids=IDS_BS, attention_mask=torch.zeros(2, 1, 6, 6))


def test_a_router_that_keeps_its_logits_is_named() -> None:
    model = routed("mixtral")
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda m, a, out: (None, *out[1:]))
    with (
        pytest.raises(ConfigError, match="before MixtralExperts does not return its logits"),
        watch(model),
    ):
        model(input_ids=IDS_BS)
