"""LoRA on the experts through `peft`: what is trained, left alone and merged, and the same on our kernels."""

from __future__ import annotations

import copy
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, MixtralConfig

import moe_ffn
from moe_ffn import ConfigError, DecoderConfig, build_ffn
from moe_ffn.interop import fuse_adapters, register
from tests.helpers.transformers_models import model_of

peft: Any = pytest.importorskip("peft", reason="peft is not installed here")
pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)

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


@pytest.mark.parametrize("kind", MODELS)
def test_experts_are_adapted_and_merged(kind: str, tmp_path: Path) -> None:
    model, ids_BS = adapted(kind, tmp_path), torch.arange(32).view(2, 16)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    base = {name: p.clone() for name, p in model.named_parameters() if name not in trained}
    # r (d_in + d_out) of each matrix of each expert; gate and up are one.
    per_expert = RANK * (D_MODEL + 2 * D_FF) + RANK * (D_FF + D_MODEL)
    assert sum(p.numel() for p in trained.values()) == NUM_LAYERS * NUM_EXPERTS * per_expert
    assert all("experts" in name and "lora_" in name for name in trained)

    random_adapters(model).eval()
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


# -- the adapters on our kernels

OURS: dict[str, dict[str, Any]] = {
    "gated": {"type": "swiglu"},
    "plain with biases": {"type": "mlp", "bias": True},
    "without a compiled kernel": {"type": "soft_capped_swiglu"},
}
FAMILIES = ("mixtral", "gpt_oss", "nemotron_h", "qwen3_moe")
"""Gated; interleaved, transposed and with biases; plain; and many small experts."""


def with_lora(model: nn.Module, names: list[str], **options: Any) -> Any:
    config = peft.LoraConfig(
        **{"r": RANK, "lora_alpha": 8, "target_modules": [], "target_parameters": names, **options}
    )
    return random_adapters(peft.get_peft_model(model, config))


def random_adapters(model: Any) -> Any:
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter) / 4
    return model


def block(experts: dict[str, Any]) -> Any:
    """Adapters in a block of 8 experts, the last two of which get none of `inputs_of`."""
    torch.manual_seed(0)
    router = {"type": "forced", "k": 2}
    ffn = build_ffn(
        {"type": "moe", "num_experts": 8, "router": router, "experts": {"d_ff": D_FF, **experts}},
        d_model=D_MODEL,
    ).double()
    names = ["experts.up" if experts["type"] == "mlp" else "experts.gate_up", "experts.down"]
    return with_lora(ffn, names)


def live(family: str) -> Any:
    register()
    model = model_of(family, {}).double()
    model.set_experts_implementation("moe_ffn")
    first = "up_proj" if family == "nemotron_h" else "gate_up_proj"
    return with_lora(model, [f"experts.{first}", "experts.down_proj"])


def step(model: Any) -> dict[str, Tensor]:
    """The output and every gradient."""
    model.zero_grad()
    generator = torch.Generator().manual_seed(1)
    if hasattr(model.base_model.model, "lm_head"):
        y = model(
            input_ids=torch.randint(3, 64, (2, 9), generator=generator), use_cache=False
        ).logits
        x = torch.zeros((), requires_grad=True)
    else:
        x = torch.randn(1, 3, D_MODEL, generator=generator).double().requires_grad_()
        y = model(x).hidden
    y.square().mean().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), **({} if x.grad is None else {"x": x.grad}), **grads}


def assert_same(model: Any, reference: Any) -> dict[str, Tensor]:
    found, expected = step(model), step(reference)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    return found


@pytest.fixture
def without_adapted_weights(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make peft's own way, which computes all experts' adapted weights, fail for fused models."""
    from peft.tuners.lora.layer import ParamWrapper

    usual = ParamWrapper._activate_lora

    def activate(self: Any, names: list[str]) -> Any:
        assert type(self) is ParamWrapper
        return usual(self, names)

    monkeypatch.setattr(ParamWrapper, "_activate_lora", activate)


@pytest.mark.usefixtures("without_adapted_weights")
@pytest.mark.parametrize("kind", OURS)
def test_our_kernels_compute_what_peft_does(kind: str) -> None:
    reference = block(OURS[kind])
    found = assert_same(fuse_adapters(copy.deepcopy(reference)), reference)
    adapters = {name: grad for name, grad in found.items() if "lora_A" in name}
    assert len(adapters) == 2
    for grad in adapters.values():
        assert torch.equal(grad.view(8, -1).any(dim=1), torch.arange(8) < 6)


WRAPPED: dict[str, Any] = {
    "latent": {"type": "moe", "experts": {"type": "latent", "width": 8}},
    "normed": {"type": "moe", "experts": {"type": "normed", "input": {}, "each": {}}},
    "soft": "soft_moe",
    "rounded": {"type": "moe", "experts": {"type": "fake_quantized"}},
}


@pytest.mark.parametrize("kind", WRAPPED)
@pytest.mark.parametrize("fused", [False, True], ids=["peft", "fused"])
def test_experts_inside_other_parts_are_adapted_and_merged(kind: str, fused: bool) -> None:
    block = build_ffn(WRAPPED[kind], D_MODEL).double().eval()
    model = with_lora(block, ["experts.gate_up", "experts.down"])
    if fused:
        fuse_adapters(model)
    x = torch.randn(1, 3, D_MODEL, dtype=torch.float64)
    y = model(x).hidden
    assert not torch.allclose(y, disabled(model, x))
    torch.testing.assert_close(model.merge_and_unload()(x).hidden, y)


@pytest.mark.parametrize("kind", ["latent", "soft"])
def test_experts_may_be_trained_as_a_whole(kind: str) -> None:
    ffn = {"type": "biased", "ffn": WRAPPED[kind]}
    block = nn.ModuleDict({"ffn": build_ffn(ffn, D_MODEL), "head": nn.Linear(D_MODEL, D_MODEL)})
    config = peft.LoraConfig(target_modules=["head"], modules_to_save=["ffn.experts"])
    model: Any = peft.get_peft_model(block, config).base_model.model["ffn"]
    x = torch.randn(1, 3, D_MODEL)
    before = model(x).hidden
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "experts" in name:
                parameter.mul_(2)
    assert not torch.allclose(model(x).hidden, before)


def disabled(model: Any, x: Tensor) -> Tensor:
    with model.disable_adapter():
        return model(x).hidden


@pytest.mark.usefixtures("without_adapted_weights")
@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers_compute_what_peft_does(family: str) -> None:
    reference = live(family)
    model = fuse_adapters(copy.deepcopy(reference))
    found = assert_same(model, reference)
    assert any("lora_B" in name and grad.any() for name, grad in found.items())


def test_other_implementations_of_a_fused_model_are_adapted_too() -> None:
    reference = live("mixtral")
    model = fuse_adapters(copy.deepcopy(reference))
    for each in (model, reference):
        each.set_experts_implementation("eager")
    assert_same(model, reference)


@pytest.mark.usefixtures("without_adapted_weights")
def test_adapters_are_switched_added_disabled_saved_and_merged(tmp_path: Path) -> None:
    reference = block(OURS["gated"])
    model = fuse_adapters(copy.deepcopy(reference))
    names = reference.peft_config["default"].target_parameters
    both = (model, reference)
    more = peft.LoraConfig(r=3, use_rslora=True, target_modules=[], target_parameters=names)
    for each in both:
        each.add_adapter("second", more)
        random_adapters(each)
    outputs = []
    for active in ("default", "second", ["default", "second"]):
        for each in both:
            each.base_model.set_adapter(active)
        outputs.append(assert_same(model, reference)["y"])
    with model.disable_adapter(), reference.disable_adapter():
        outputs.append(step(model)["y"])
        torch.testing.assert_close(outputs[-1], step(reference)["y"])
    assert all(not torch.equal(a, b) for i, a in enumerate(outputs) for b in outputs[:i])

    for each in both:
        each.set_adapter("second")
    model.save_pretrained(tmp_path)
    torch.manual_seed(0)
    base = copy.deepcopy(reference).unload()
    for again in (
        peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "second", is_trainable=True),
        fuse_adapters(peft.PeftModel.from_pretrained(base, tmp_path / "second", is_trainable=True)),
    ):
        torch.testing.assert_close(step(again)["y"], outputs[1])

    merged, expected = (each.merge_and_unload() for each in both)
    assert merged.state_dict().keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert torch.equal(merged.state_dict()[name], value), name


@pytest.mark.parametrize("options", [{"lora_dropout": 0.1}, {"use_dora": True}], ids=str)
def test_peft_itself_rejects_dropout_and_dora(options: dict[str, Any]) -> None:
    ffn = build_ffn({"type": "moe", "num_experts": 4}, d_model=D_MODEL)
    with pytest.raises(ValueError, match="does not work with"):
        with_lora(ffn, ["experts.down"], **options)


def test_experts_without_an_adapter_are_named(tmp_path: Path) -> None:
    model = with_lora(ours(tmp_path), [], target_modules=["query"])
    message = (
        "2 of 2 layers have experts without an adapter, of which the first is layers.0.ffn.experts; add "
        "target_parameters=['experts.gate_up', 'experts.down'] to LoraConfig to adapt them"
    )
    with pytest.warns(UserWarning, match=re.escape(message)):
        fuse_adapters(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fuse_adapters(adapted("ours", tmp_path / "other"))


def test_models_whose_experts_we_do_not_compute_are_rejected() -> None:
    with pytest.raises(ConfigError, match="has no experts with stacked matrices"):
        fuse_adapters(nn.Linear(2, 2))
    model = live("mixtral")
    model.set_experts_implementation("grouped_mm")
    with pytest.raises(ConfigError) as caught:
        fuse_adapters(model)
    assert str(caught.value) == (
        "transformers runs MixtralExperts on 'grouped_mm'; call moe_ffn.interop.register() and "
        "model.set_experts_implementation('moe_ffn') first"
    )
