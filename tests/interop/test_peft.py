"""LoRA on the experts through `peft`: what is trained, what is left alone, and what is merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, MixtralConfig

import moe_ffn
from moe_ffn import ConfigError, DecoderConfig
from moe_ffn.interop.transformers import register

peft: Any = pytest.importorskip("peft", reason="peft is not installed here")

NUM_EXPERTS, D_MODEL, D_FF, NUM_LAYERS, VOCAB_SIZE, RANK = 4, 16, 8, 2, 32, 2


def ours(tmp_path: Path) -> nn.Module:
    experts = {"type": "swiglu", "d_ff": D_FF}
    ffn = {"type": "moe", "num_experts": NUM_EXPERTS, "experts": experts}
    sizes = {"d_model": D_MODEL, "num_layers": NUM_LAYERS, "attention": {"num_heads": 2}}
    config = DecoderConfig.model_validate({**sizes, "ffn": ffn})
    moe_ffn.save_pretrained(config.build(VOCAB_SIZE, 16), tmp_path / "base")
    return moe_ffn.load_pretrained(tmp_path / "base")


def of_transformers(tmp_path: Path) -> nn.Module:
    """A Mixtral whose experts our kernels compute."""
    register()
    config = MixtralConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=D_MODEL,
        intermediate_size=D_FF,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
    )
    return AutoModelForCausalLM.from_config(config, experts_implementation="moe_ffn")


MODELS = {
    "ours": (ours, ("gate_up", "down")),
    "transformers": (of_transformers, ("gate_up_proj", "down_proj")),
}


def adapted(kind: str, tmp_path: Path) -> Any:
    build, names = MODELS[kind]
    torch.manual_seed(0)
    targets = [f"experts.{name}" for name in names]
    config = peft.LoraConfig(r=RANK, lora_alpha=8, target_modules=[], target_parameters=targets)
    return peft.get_peft_model(build(tmp_path), config)


def logits_of(model: Any, ids_BS: Tensor) -> Tensor:
    return model(ids_BS).logits


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", MODELS)
def test_experts_are_adapted_trained_and_merged(kind: str, tmp_path: Path) -> None:
    model, ids_BS = adapted(kind, tmp_path), torch.arange(32).view(2, 16)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    base = {name: p.clone() for name, p in model.named_parameters() if name not in trained}
    # r (d_in + d_out) of each matrix of each expert; gate and up are one.
    per_expert = RANK * (D_MODEL + 2 * D_FF) + RANK * (D_FF + D_MODEL)
    assert sum(p.numel() for p in trained.values()) == NUM_LAYERS * NUM_EXPERTS * per_expert
    assert all("experts" in name and "lora_" in name for name in trained)

    optimizer = torch.optim.AdamW(trained.values(), lr=0.02)
    losses = []
    for _ in range(8):
        loss = F.cross_entropy(
            logits_of(model, ids_BS)[:, :-1].flatten(0, 1), ids_BS[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.01
    for name, parameter in model.named_parameters():
        if name in base:
            assert torch.equal(parameter, base[name]), name

    model.eval()
    with torch.no_grad():
        expected = logits_of(model, ids_BS)
        merged = model.merge_and_unload()
        torch.testing.assert_close(logits_of(merged, ids_BS), expected, rtol=1e-5, atol=1e-5)
        if kind != "transformers":
            moe_ffn.save_pretrained(merged, tmp_path / "merged")
            again = moe_ffn.load_pretrained(tmp_path / "merged")
            assert torch.equal(logits_of(again, ids_BS), logits_of(merged, ids_BS))
    changed = [
        name for name, p in merged.named_parameters() if not torch.equal(p, unadapted(name, base))
    ]
    assert len(changed) == 2 * NUM_LAYERS


def unadapted(name: str, base: dict[str, Tensor]) -> Tensor:
    """The weight before, whatever the adapters have wrapped it in."""
    (found,) = [
        value
        for key, value in base.items()
        if key.removeprefix("base_model.model.").replace("base_layer.", "") == name
    ]
    return found


def test_a_model_with_adapters_is_not_saved_as_one_without(tmp_path: Path) -> None:
    model = adapted("ours", tmp_path)
    for given in (model, model.base_model.model):
        with pytest.raises(ConfigError, match=r"adapters of peft.*merge_and_unload\(\)"):
            moe_ffn.save_pretrained(given, tmp_path / "new")
    assert not (tmp_path / "new").exists()
