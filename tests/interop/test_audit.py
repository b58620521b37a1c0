"""`moe_ffn.audit`: defects planted into live models are found by the right check; healthy models pass."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import moe_ffn
from moe_ffn import audit
from moe_ffn.cli.demo import MODEL
from moe_ffn.cli.train import parse
from moe_ffn.config.errors import ConfigError
from moe_ffn.hf import export_transformers
from moe_ffn.interop.audit import behaviour
from moe_ffn.interop.audit.order import check_order
from moe_ffn.interop.audit.probe import Probe
from moe_ffn.training.objective import ObjectiveConfig
from tests.helpers.transformers_models import FAMILIES, LATENT, model_of

peft: Any = pytest.importorskip("peft", reason="peft is not installed here")

EIGHT = dict.fromkeys(
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8
)


WITH_A_LOSS = {
    *("ernie4_5_moe", "gpt_oss", "granitemoe", "jamba", "minimax_m2", "mixtral", "olmoe", "phimoe"),
    *("flex_olmo", "qwen2_moe", "qwen3_moe"),
}
"""Families whose classes compute a balancing loss."""


pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:(transformers|peft)"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),
]


def healthy(family: str = "qwen3_moe", **options: Any) -> Any:
    """A small model of transformers whose routers spread random tokens over 8 experts."""
    model = model_of(
        family, {**FAMILIES.get(family, {}), **EIGHT, "tie_word_embeddings": False, **options}
    )
    with torch.no_grad():
        torch.manual_seed(2)
        model.get_input_embeddings().weight.normal_()  # tokens that differ
        for name, parameter in model.named_parameters():
            is_router = "gate" in name or "router" in name
            if is_router and "expert" not in name and "bias" not in name and parameter.ndim == 2:
                parameter.normal_(std=0.1)
    return model


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids_BS = torch.randint(3, 64, (2, 72), generator=generator)
    mask_BS = torch.ones_like(ids_BS)
    mask_BS[0, -9:] = 0
    return {"input_ids": ids_BS, "attention_mask": mask_BS}


def problems(report: Any) -> dict[str, set[str]]:
    """Check -> places where it fails or warns."""
    found: dict[str, set[str]] = {}
    for finding in (*report.failures, *report.warnings):
        found.setdefault(finding.check, set()).add(finding.place)
    return found


@dataclass
class Case:
    """A model with a defect, and how it is audited."""

    model: Any
    batch: Mapping[str, Any] = field(default_factory=batch)
    optimizer: Any = None
    options: dict[str, Any] = field(default_factory=dict)


# -- healthy models


LIKE_OTHERS = {
    *("dots1", "exaone_moe", "glm4_moe", "solar_open"),  # as in DeepSeek-V3
    *("cohere2_moe", "flex_olmo", "hunyuan_v1_moe", "minimax_m2", "mixtral", "olmoe", "phimoe"),
}
"""Families whose routers and experts are those of DeepSeek-V3, or softmax routers as in Qwen3."""


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=pytest.mark.slow if family in LIKE_OTHERS else [])
        for family in FAMILIES
    ],
)
def test_no_healthy_family_is_accused(family: str) -> None:
    options = {"output_router_logits": True, "router_aux_loss_coef": 0.01}
    model = healthy(family, **(options if family in WITH_A_LOSS else {}))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs = batch()
    report = audit(model, inputs)

    assert not problems(report), report
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    hooks = [
        getattr(hook, "func", hook)
        for module in model.modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]
    assert not [hook for hook in hooks if hook.__module__.startswith("moe_ffn")]


@pytest.mark.parametrize(
    ("family", "options", "skipped"),
    [
        ("jetmoe", {}, {"balancing", "kernels", "health", "order"}),  # experts of other classes
        ("llama4_text", {}, {"balancing", "kernels", "health", "order"}),
        (
            "laguna",
            {"moe_routed_scaling_factor": 2.5},
            {"balancing", "order"},
        ),  # scales the experts' output
        (
            "longcat_flash",
            LATENT,
            {"balancing", "kernels", "health", "order"},
        ),  # rows without an expert
        (
            "zaya",
            {"num_experts_per_tok": 1},
            {"balancing", "order"},
        ),  # routers with arguments by name
    ],
)
def test_no_family_with_other_experts_is_accused(
    family: str, options: dict[str, Any], skipped: set[str]
) -> None:
    inputs = {name: value[:4, :24] for name, value in batch().items()}
    report = audit(healthy(family, **options), inputs)
    assert not problems(report), report
    assert len(set(report.layers)) == len(report.layers)
    assert {finding.check for finding in report.findings if finding.verdict == "skip"} == skipped


SIDES: dict[str, dict[str, Any]] = {
    "switch_transformers": {
        **dict.fromkeys(("num_sparse_encoder_layers", "num_sparse_decoder_layers"), 2),
        **dict.fromkeys(("num_layers", "num_decoder_layers"), 2),
        "num_heads": 4,
        "d_kv": 8,
        "d_ff": 24,
    },
    "nllb-moe": {
        **dict.fromkeys(("encoder_sparse_step", "decoder_sparse_step"), 1),
        **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 24),
    },
}


def encoder_decoder(family: str = "switch_transformers") -> Case:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "d_model": 32, "num_experts": 4}
    options = {**sizes, "decoder_start_token_id": 0, **SIDES[family]}
    config = CONFIG_MAPPING[family](**options)
    model = AutoModelForSeq2SeqLM.from_config(config)
    nn.init.normal_(model.lm_head.weight, std=0.02)
    return Case(model)


@pytest.mark.parametrize("has_labels", [True, False])
@pytest.mark.parametrize("family", SIDES)
def test_both_sides_of_an_encoder_decoder_are_audited(family: str, has_labels: bool) -> None:
    case = encoder_decoder(family)
    labels = {"labels": batch()["input_ids"][:, :60].contiguous()} if has_labels else {}
    report = audit(case.model, {**batch(), **labels})
    # NLLB-MoE of transformers 5.23 sends all tokens to experts 0 and 1.
    assert not problems(report).keys() - ({"health"} if family == "nllb-moe" else set()), report
    assert report.facts["experts"] == "4, ? per token"
    assert report.facts["batch"] == f"2 sequences of {60 if has_labels else 72} tokens"
    sides = {name.removeprefix("model.").partition(".")[0] for name in report.layers}
    learning = {finding.place for finding in report.findings if finding.check == "learning"}
    assert sides == {"encoder", "decoder"}
    assert learning == set(report.layers)


def a_decoder_that_sees_later_tokens() -> Case:
    case = encoder_decoder()
    attention = case.model.decoder.block[0].layer[0].SelfAttention
    original = attention.forward
    attention.forward = lambda *args, **kwargs: original(*args, **{**kwargs, "mask": None})
    return case


def an_encoder_whose_experts_do_not_learn() -> Case:
    case = encoder_decoder()
    experts = case.model.encoder.block[1].layer[1].mlp.experts
    experts.register_forward_hook(lambda module, args, output: output.detach())
    return case


def test_a_layer_that_no_token_reaches_is_not_accused() -> None:
    model = healthy()
    model.prediction = healthy().model.layers[
        1
    ]  # as layers for images, or for the token after the next
    report = audit(model, batch())
    assert set(problems(report)) == {"structure"}, report  # the config does not declare the layer
    unreached = [f.place for f in report.findings if "reaches this layer" in f.sentence]
    assert unreached == ["prediction.mlp"]


def modules_to_save() -> Any:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["experts"])
    return peft.get_peft_model(healthy(), config)


def one_expert() -> Any:
    return healthy(**dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok"), 1))


def noisy_in_training() -> Any:
    return healthy("phimoe", router_jitter_noise=0.3).train()


def checkpointed() -> Any:
    model = healthy()
    mlp = model.model.layers[0].mlp
    mlp.forward = partial(checkpoint, mlp.forward, use_reentrant=True)
    return model


@pytest.mark.parametrize("build", [modules_to_save, one_expert, noisy_in_training, checkpointed])
def test_no_healthy_setting_is_accused(build: Callable[[], Any]) -> None:
    inputs = {name: value[:4, :24] for name, value in batch().items()}
    inputs["attention_mask"][1] = 0  # a sequence of padding
    model = build()
    state = torch.get_rng_state()
    report = audit(model, inputs)
    assert not problems(report), report
    assert torch.equal(torch.get_rng_state(), state)


def test_a_compiled_model_is_audited_without_its_compiler() -> None:
    case = our_demo()
    compiled: Any = torch.compile(case.model, backend="eager")
    report = audit(compiled, case.batch)
    assert report.model == "Decoder"
    assert not problems(report), report


def test_other_tensors_of_a_batch_are_no_obstacle() -> None:
    case = with_loss()
    positions = torch.arange(72).expand(2, 72)
    report = audit(case.model, {**batch(), "position_ids": positions})
    assert not problems(report), report
    assert "cannot be padded, because it has position_ids" in str(report)


def test_an_optimizer_in_the_backward_pass_does_not_run() -> None:
    model = healthy()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: p.data.sub_(p.grad))
    before = [parameter.clone() for parameter in model.parameters()]
    audit(model, batch())
    assert all(map(torch.equal, model.parameters(), before))


def test_ids_in_32_bits_are_audited_like_others() -> None:
    case, ids_BS = with_loss(), batch()["input_ids"]
    assert str(audit(case.model, ids_BS.int())) == str(audit(case.model, ids_BS))


def test_bad_batches_are_one_sentence() -> None:
    model = healthy()
    ids = batch()["input_ids"]
    with pytest.raises(ConfigError, match="no token to predict: all labels are -100"):
        audit(model, {"input_ids": ids, "labels": torch.full_like(ids, -100)})
    model.register_forward_hook(lambda module, args, output: output.logits[:, -1:])
    with pytest.raises(ConfigError, match=r"logits for each token of input_ids \[2, 72\]"):
        audit(model, ids)


def test_a_module_that_takes_no_input_ids_is_told_what_to_do() -> None:
    class Own(nn.Module):
        def __init__(self, *layers: nn.Module) -> None:
            super().__init__()
            self.layers = nn.Sequential(*layers)

        def forward(self, token_ids: Tensor) -> Tensor:
            return self.layers(token_ids)

    ffn = moe_ffn.build_ffn("moe", 8)
    ffn.register_forward_hook(lambda module, args, output: output.hidden)
    model = Own(nn.Embedding(64, 8), ffn, nn.Linear(8, 64))
    with pytest.raises(
        ConfigError,
        match=r"^audit: Own.forward cannot be called with input_ids \(missing a required argument: "
        r"'token_ids'\); audit a module whose forward\(input_ids\) returns the logits, such as one "
        r"that calls this model$",
    ):
        audit(model, batch()["input_ids"])


def test_a_large_model_without_numbers_is_checked_in_shape() -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 5, "head_dim": 128,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
    }  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["mixtral"](**sizes))
        ids_BS = torch.zeros(2, 8, dtype=torch.long)
    model.model.layers[2].mlp.experts.down_proj.requires_grad_(requires_grad=False)
    report = audit(model, ids_BS)
    assert sum(p.numel() for p in model.parameters()) > 7e9
    assert problems(report) == {"learning": {"layer_02"}}
    assert "down_proj" in str(report)
    total = sum(p.numel() for p in model.parameters())
    expert = 3 * 4096 * 14336
    assert report.facts["parameters"].endswith(f" {total - 5 * 6 * expert:,} active")
    assert [finding.check for finding in report.findings if finding.verdict == "skip"] == [
        "numbers"
    ]


# -- planted defects


def plain(**options: Any) -> Case:
    return Case(healthy(**options))


def edited(case: Case, change: Callable[[Case], object]) -> Case:
    """Change a case in place, and return it."""
    with torch.no_grad():
        change(case)
    return case


def with_loss(**options: Any) -> Case:
    return Case(healthy(output_router_logits=True, router_aux_loss_coef=0.01, **options))


def experts_of(case: Case, layer: int = 1) -> Any:
    return case.model.model.layers[layer].mlp.experts


def router_of(case: Case, layer: int = 1) -> Any:
    return case.model.model.layers[layer].mlp.gate


def shrink(case: Case, name: str, size: int, dim: int) -> None:
    experts = experts_of(case)
    setattr(experts, name, nn.Parameter(getattr(experts, name).data.narrow(dim, 0, size).clone()))


def fewer_experts_than_declared() -> Case:
    case = plain()
    for name in ("gate_up_proj", "down_proj"):
        shrink(case, name, 4, 0)
    experts_of(case).num_experts = 4
    router = router_of(case)
    router.weight = nn.Parameter(router.weight.data[:4].clone())
    return case


def narrower_experts_than_declared() -> Case:
    case = plain()
    shrink(case, "gate_up_proj", 24, 1)
    shrink(case, "down_proj", 12, 2)
    return case


def a_dense_layer_in_the_place_of_a_sparse_one() -> Case:
    case = plain()
    mlp = nn.Sequential(nn.Linear(32, 24), nn.SiLU(), nn.Linear(24, 32))
    case.model.model.layers[0].mlp = mlp
    return case


def alike(experts: Any) -> None:
    """Make all experts the first."""
    for tensor in experts.parameters():
        tensor.copy_(tensor[:1].expand_as(tensor))


def swap_gates(gate_up: Tensor) -> None:
    gate_up.copy_(gate_up.roll(gate_up.shape[1] // 2, 1))


def scaled(**options: Any) -> Case:
    """A model whose config scales the weights by 2.5, which the router of layer 1 does not do."""
    case = plain(family="glm4_moe", routed_scaling_factor=2.5, **options)
    router_of(case).routed_scaling_factor = 1.0
    return case


# adapters and quantisers


def lora(**options: Any) -> Case:
    config = peft.LoraConfig(r=2, **{"target_modules": ["q_proj"], **options})
    return Case(peft.get_peft_model(healthy(), config))


BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapters_loaded_for_inference() -> Case:
    case = lora(target_parameters=BOTH)
    for name, parameter in case.model.named_parameters():
        parameter.requires_grad_("q_proj.lora" in name)
    return case


def adapters_that_are_zero_on_both_sides() -> Case:
    case = lora(target_parameters=BOTH)
    with torch.no_grad():
        for name, parameter in case.model.named_parameters():
            if "experts" in name and "lora_" in name:
                parameter.zero_()
    return case


def an_optimizer_built_before_the_adapter() -> Case:
    model = healthy()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=BOTH)
    return Case(peft.get_peft_model(model, config), optimizer=optimizer)


class Linear8bit(nn.Module):
    """A linear layer with a weight in 8 bits, as quantisers put in place of `nn.Linear`."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.scale = linear.weight.abs().max() / 127
        self.register_buffer("weight", (linear.weight / self.scale).round().to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.float() * self.scale).t()


def a_quantiser_that_replaces_only_linear_layers() -> Case:
    case = plain()
    for layer in case.model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(
                layer.self_attn,
                name,
                Linear8bit(getattr(layer.self_attn, name).requires_grad_(False)),
            )
    return case


# learning


def one_frozen_tensor() -> Case:
    case = plain()
    experts_of(case).down_proj.requires_grad_(requires_grad=False)
    return case


def patched_router(change: Callable[[Any, Any, Any], Any], case: Case | None = None) -> Case:
    """Replace what the router of layer 1 returns: logits, weights and ids."""
    case = case or plain()
    router_of(case).register_forward_hook(lambda module, args, output: change(*output))
    return case


def with_shared_expert() -> Case:
    return with_loss(family="qwen2_moe")


def shared_expert_of(case: Case) -> Any:
    return case.model.model.layers[1].mlp.shared_expert


@pytest.mark.parametrize("names", [("down",), ("gate", "up", "down")])
def test_a_shared_expert_that_begins_at_zero_is_not_accused(names: tuple[str, ...]) -> None:
    case = with_shared_expert()
    with torch.no_grad():
        for name in names:
            getattr(shared_expert_of(case), f"{name}_proj").weight.zero_()
    assert "learning" not in problems(audit(case.model, case.batch))


def test_a_balancing_loss_of_zero_is_reported_when_batches_are_accumulated() -> None:
    case = adamw(with_loss())
    with other_loss(lambda loss: lambda *args: torch.zeros(())):
        report = audit(case.model, case.batch, case.optimizer, accumulation=4)
    assert "balancing" in problems(report)


def hooked_shared_expert(change: Callable[[Tensor], Tensor]) -> Case:
    case = with_shared_expert()
    shared_expert_of(case).register_forward_hook(lambda module, args, output: change(output))
    return case


def a_dropped_shared_expert_of_ours() -> Case:
    ffn = {"type": "moe", "shared_expert": "swiglu"}
    options = {"num_layers": 2, "d_model": 16, "ffn": ffn}
    model = moe_ffn.DecoderConfig.model_validate(options).build(64, 72)
    shared: Any = model.get_submodule("layers.1.ffn.shared_expert")
    shared.register_forward_hook(
        lambda module, args, output: replace(output, hidden=torch.zeros_like(output.hidden))
    )
    return Case(model)


def patched_experts(change: Callable[..., Any], **options: Any) -> Case:
    """Compute the experts of all layers by an implementation with a defect."""

    def implementation(experts: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return change(ALL_EXPERTS_FUNCTIONS["grouped_mm"], experts, hidden, ids, weights)

    ALL_EXPERTS_FUNCTIONS.register("planted", implementation)
    case = plain(**options)
    case.model.set_experts_implementation("planted")
    return case


def gradient_hook(change: Callable[[Tensor], Tensor]) -> Case:
    case = plain()
    experts_of(case).gate_up_proj.register_hook(change)
    experts_of(case).down_proj.register_hook(change)
    return case


def gradients_of_the_next_expert() -> Case:
    case = gradient_hook(lambda grad: grad.roll(1, 0))
    with torch.no_grad():
        router_of(case).weight[5] = 0
        router_of(case).weight[5] -= 10 * router_of(case).weight.mean(0)  # nobody chooses expert 5
    return patched_router(
        lambda logits, weights, ids: (logits, weights, torch.where(ids == 5, 4, ids)), case
    )


def adamw(case: Case, keep: Callable[[str], bool] = lambda name: True, **options: Any) -> Case:
    named = [(name, p) for name, p in case.model.named_parameters() if keep(name)]
    case.optimizer = torch.optim.AdamW([p for _, p in named], **{"weight_decay": 0, **options})
    return case


def experts_with_a_rate(rate: float) -> Case:
    case = with_loss()
    experts = [p for name, p in case.model.named_parameters() if "experts" in name]
    others = [p for name, p in case.model.named_parameters() if "experts" not in name]
    case.optimizer = torch.optim.AdamW(
        [{"params": others}, {"params": experts, "lr": rate}], lr=1e-3
    )
    return case


# balancing losses


@contextmanager
def other_loss(change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as module

    original = module.load_balancing_loss_func
    module.load_balancing_loss_func = change(original)
    try:
        yield
    finally:
        module.load_balancing_loss_func = original


# As in trl#7222, transformers#48886 and #45120, Automodel#1408 and Megatron-LM#1984.
LOSSES: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "scaled by k once more": lambda f: lambda logits, E, k, mask: k * f(logits, E, k, mask),
    "without the factor E": lambda f: lambda logits, E, k, mask: f(logits, E, k, mask) / E,
    "padding counts": lambda f: lambda logits, E, k, mask: f(logits, E, k, None),
    "only the last layer": lambda f: lambda logits, E, k, mask: f(logits[-1:], E, k, mask),
    "without a gradient": lambda f: lambda *args: f(*args).detach(),
    "of one expert per token": lambda f: lambda logits, E, k, mask: f(logits, E, 1, mask),
}


# kernels


def a_model_in_bfloat16() -> Case:
    case = plain()
    case.model.bfloat16()
    return case


def _scaled_gradient(value: Tensor, factor: float) -> Tensor:
    return value * factor + (value * (1 - factor)).detach()


def biased_experts_without_their_bias() -> Case:
    def change(compute: Any, experts: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = compute(experts, hidden, ids, weights)
        return out - (experts.down_proj_bias[ids] * weights.unsqueeze(-1)).sum(1)

    case = patched_experts(change, family="gpt_oss")
    with torch.no_grad():
        for layer in case.model.model.layers:
            layer.mlp.experts.down_proj_bias.normal_()
    return case


# causality and determinism


def rerouted(change: Callable[[Tensor], Tensor]) -> Case:
    """Change the logits, of (B, S, E), from which the router of layer 1 chooses."""

    def choose(logits: Tensor, weights: Tensor, ids: Tensor) -> Any:
        length = 72 if len(logits) % 72 == 0 else 96
        logits = change(logits.view(-1, length, logits.shape[1])).flatten(0, 1)
        scores, ids = logits.softmax(-1).topk(ids.shape[1])
        return logits, scores / scores.sum(-1, keepdim=True), ids

    return patched_router(choose)


def attention_to_later_tokens() -> Case:
    case = plain()
    for layer in case.model.model.layers:
        original = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, original=original, **kwargs: original(
            *args, **{**kwargs, "attention_mask": None}
        )
    return case


# health


def a_router_with_one_favourite() -> Case:
    def choose(logits: Tensor, weights: Tensor, ids: Tensor) -> Any:
        return logits, weights, torch.stack([torch.zeros_like(ids[:, 0]), 1 + ids[:, 1] % 7], 1)

    return patched_router(choose)


def test_padding_is_checked_if_the_batch_is_as_long_as_the_model() -> None:
    options = {"output_router_logits": True, "router_aux_loss_coef": 0.01}
    model = healthy(**options, max_position_embeddings=72)
    (found,) = (f for f in audit(model, batch()).findings if "padding tokens" in f.sentence)
    assert found.sentence.startswith("with 24 padding tokens per sequence aux_loss is ")
    assert found.verdict == "pass"


# Less than a collapse may be how the model was trained.
def test_an_uneven_load_is_a_warning() -> None:
    def choose(logits: Tensor, weights: Tensor, ids: Tensor) -> Any:
        token_T = torch.arange(len(ids))
        busy_T = (1 + token_T % 7).masked_fill(token_T % 10 < 7, 0)  # 0 in 7 of 10 tokens
        return logits, weights, torch.stack([busy_T, 1 + (token_T + 3) % 7], 1)

    case = patched_router(choose)
    health = [f for f in audit(case.model, case.batch).findings if f.check == "health"]
    found = next(f for f in health if "MaxVio 1.8" in f.sentence)
    assert (found.verdict, found.advice) == ("warn", "the load is uneven: raise the balancing loss")


def test_balance_is_not_judged_after_few_steps() -> None:
    case = a_router_with_one_favourite()
    assert "health" in problems(audit(case.model, case.batch, num_steps=50))
    assert "health" not in problems(audit(case.model, case.batch, num_steps=49))


# order of converted weights


def our_demo() -> Case:
    tokenizer = moe_ffn.load_tokenizer(MODEL)
    text = Path(torch.__file__).parent / "include/cpuinfo.h"  # C, as the model was trained on
    ids = torch.as_tensor(tokenizer.encode(text.read_bytes())).long()[: 4 * 128]
    return Case(moe_ffn.load_pretrained(MODEL).float(), {"input_ids": ids.view(4, 128)})


# As in Megatron-LM#5844, transformers#47031 and DeepSpeed#8147.
def test_one_sequence_does_not_tell_the_order() -> None:
    case = experts_in_another_order()
    report = audit(case.model, {name: value[:1] for name, value in case.batch.items()})
    (found,) = (finding for finding in report.findings if finding.check == "order")
    assert (found.verdict, found.place) == ("skip", "model")
    assert "give two or more" in found.sentence


# After little training, experts do similar work, and noise could accuse a healthy model.
@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe", "gpt_oss"])
def test_a_briefly_trained_family_is_not_accused_on_any_text(family: str) -> None:
    library = Path(statistics.__file__).parent
    names = ("argparse", "ast", "bdb", "calendar", "code", "csv", "dis", "enum", "ftplib", "gzip")
    texts = [torch.tensor([*(library / f"{name}.py").read_bytes()]) for name in names]
    sizes = {"vocab_size": 257, "max_position_embeddings": 256}
    model = model_of(family, {**FAMILIES.get(family, {}), **EIGHT, **sizes})
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    read = torch.cat(texts)
    for _ in range(200):
        starts = torch.randint(len(read) - 64, (16,))
        ids_BS = torch.stack([read[start : start + 64] for start in starts])
        model(input_ids=ids_BS, labels=ids_BS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    verdicts = Counter[str]()
    for text in texts:
        inputs = {"input_ids": text[:1024].view(4, 256)}
        verdicts += Counter(finding.verdict for finding in check_order(Probe(model, inputs)))
    assert verdicts.total() >= 2 * len(texts)
    assert verdicts["fail"] == 0


# A healthy model of little training is not accused of noise.
@pytest.mark.parametrize(("share", "verdict"), [(1, "pass"), (0.3, "pass"), (0.1, "skip")])
def test_experts_of_similar_work_are_not_accused(share: float, verdict: str) -> None:
    case = our_demo()
    with torch.no_grad():
        for tensor in case.model.layers[1].ffn.experts.parameters():
            tensor.lerp_(tensor.mean(0), 1 - share)
    few = {"input_ids": case.batch["input_ids"][:, :16]}
    found = {f.place: f for f in audit(case.model, few).findings if f.check == "order"}
    assert found["layer_01"].verdict == verdict, found["layer_01"].sentence
    assert "fail" not in {finding.verdict for finding in found.values()}


def experts_in_another_order() -> Case:
    case = our_demo()
    with torch.no_grad():
        for tensor in case.model.layers[1].ffn.experts.parameters():
            tensor.copy_(tensor.flip(0))
    return case


def exported_demo() -> Case:
    """The same model in transformers."""
    case = our_demo()
    with TemporaryDirectory() as folder:
        export_transformers(case.model, f"{folder}/demo")
        case.model = AutoModelForCausalLM.from_pretrained(f"{folder}/demo")
    return case


DEFECTS: dict[str, dict[str, Callable[[], Case]]] = {
    "structure": {
        "fewer experts than declared": fewer_experts_than_declared,
        "narrower experts than declared": narrower_experts_than_declared,
        "a dense layer in the place of a sparse one": a_dense_layer_in_the_place_of_a_sparse_one,
        "fewer experts per token than declared": lambda: edited(
            plain(num_experts_per_tok=3), lambda case: setattr(router_of(case), "top_k", 2)
        ),
        "weights that are not renormalised": lambda: edited(
            plain(norm_topk_prob=True), lambda case: setattr(router_of(case), "norm_topk_prob", False)
        ),
        "two layers with the same experts": lambda: edited(
            plain(), lambda case: setattr(case.model.model.layers[1].mlp, "experts", experts_of(case, 0))
        ),
        "one expert that was not loaded": lambda: edited(
            plain(), lambda case: experts_of(case).down_proj[3].zero_()
        ),
        "one expert loaded into all places": lambda: edited(plain(), lambda case: alike(experts_of(case))),
        "a scaling factor that is ignored": lambda: scaled(),
        "a scaling factor that is ignored without renormalising": lambda: scaled(norm_topk_prob=False),
        "weights that sum to a half": lambda: patched_router(
            lambda logits, weights, ids: (logits, weights / 2, ids), plain(norm_topk_prob=True)
        ),
    },
    "left out": {
        # As in peft#3009 and unsloth PR#6936.
        "names of modules that fused experts lack": lambda: lora(target_modules=["q_proj", "w1", "w2", "w3"]),
        "an adapter on only attention": lambda: lora(),
        "a router to save by another name": lambda: lora(target_parameters=BOTH, modules_to_save=["router"]),
        "disabled adapters": lambda: edited(
            lora(target_parameters=BOTH), lambda case: case.model.base_model.disable_adapter_layers()
        ),
        "an adapter on one matrix of the experts": lambda: lora(target_parameters=BOTH[:1]),
        "a quantiser that replaces only linear layers": a_quantiser_that_replaces_only_linear_layers,
    },
    "learning": {
        "adapters loaded for inference": adapters_loaded_for_inference,
        "adapters that are zero on both sides": adapters_that_are_zero_on_both_sides,
        "an optimizer built before the adapter": an_optimizer_built_before_the_adapter,
        "one frozen tensor": one_frozen_tensor,
        "experts that are all frozen": lambda: edited(
            plain(), lambda case: [experts_of(case, n).requires_grad_(False) for n in (0, 1)]
        ),
        "a frozen router": lambda: edited(plain(), lambda case: router_of(case).requires_grad_(False)),
        # As in minimind PR#859.
        "a router whose weights are detached": lambda: patched_router(
            lambda logits, weights, ids: (logits, weights.detach(), ids)
        ),
        "one expert per token with a weight of one": lambda: plain(
            num_experts_per_tok=1, norm_topk_prob=True
        ),
        "experts computed without gradient": lambda: patched_experts(
            lambda compute, *given: compute(*given).detach()
        ),
        "one expert without a gradient": lambda: gradient_hook(
            lambda grad: grad * (torch.arange(len(grad)) != 3).view(-1, 1, 1)
        ),
        "a gradient of nan": lambda: gradient_hook(lambda grad: grad * torch.nan),
        "gradients of the next expert": gradients_of_the_next_expert,
        "an optimizer without the experts": lambda: adamw(with_loss(), lambda name: "experts" not in name),
        "an optimizer without the routers": lambda: adamw(
            with_loss(), lambda name: "gate.weight" not in name
        ),
        "experts with a rate of zero": lambda: experts_with_a_rate(0.0),
        "experts with a tiny rate": lambda: experts_with_a_rate(1e-12),
        "a frozen shared expert": lambda: edited(
            with_shared_expert(), lambda case: shared_expert_of(case).requires_grad_(False)
        ),
        "a shared expert times zero": lambda: hooked_shared_expert(lambda output: output * 0),
        "a shared expert that is dropped": lambda: hooked_shared_expert(torch.zeros_like),
        "a dropped shared expert of ours": a_dropped_shared_expert_of_ours,
        "an optimizer without the shared expert": lambda: adamw(
            with_shared_expert(), lambda name: "shared_expert." not in name
        ),
        "an encoder whose experts do not learn": an_encoder_whose_experts_do_not_learn,
        "a frozen model with an optimizer": lambda: edited(
            adamw(with_loss()), lambda case: case.model.requires_grad_(False)
        ),
        "decay on the biases of experts": lambda: adamw(with_loss(family="gpt_oss"), weight_decay=0.1),
    },
    "balancing": {
        "training without a balancing loss": lambda: adamw(plain()),
        "a balancing loss of weight zero": lambda: edited(
            adamw(with_loss()), lambda case: setattr(case.model.config, "router_aux_loss_coef", 0.0)
        ),
        "a bias that nothing updates": lambda: adamw(plain(family="deepseek_v3")),
        "an option that the model ignores": lambda: adamw(with_loss(family="deepseek_v3")),
        "a loss that does not reach the total": lambda: edited(
            with_loss(), lambda case: setattr(case.model, "router_aux_loss_coef", 0.0)
        ),
        "a loss that counts once per batch": lambda: edited(
            adamw(with_loss()), lambda case: case.options.update(accumulation=4)
        ),
        "a run without balancing": lambda: edited(
            our_demo(), lambda case: case.options.update(objective=ObjectiveConfig(load_balance=0.0))
        ),
    },
    "precision": {
        "a model in bfloat16": a_model_in_bfloat16,
        "a router of zeros": lambda: edited(plain(), lambda case: router_of(case).weight.zero_()),
    },
    "kernels": {
        # As in Liger-Kernel PR#1413.
        "half the gradient": lambda: patched_experts(
            lambda compute, *given: _scaled_gradient(compute(*given), 0.5)
        ),
        "no gradient of tokens": lambda: patched_experts(
            lambda compute, experts, hidden, *given: compute(experts, hidden.detach(), *given)
        ),
        "no gradient of weights": lambda: patched_experts(
            lambda compute, *given: compute(*given[:-1], _scaled_gradient(given[-1], 0.1))
        ),
        "last expert missing": lambda: patched_experts(
            lambda compute, experts, hidden, ids, weights: compute(
                experts, hidden, ids, weights * (ids != experts.num_experts - 1)
            )
        ),
        "last token missing": lambda: patched_experts(
            lambda compute, *given: nn.functional.pad(compute(*given)[:-1], (0, 0, 0, 1))
        ),
        "second choice missing": lambda: patched_experts(
            lambda compute, *given: compute(*given[:2], *(value[:, :1] for value in given[2:]))
        ),
        "biased experts without their bias": biased_experts_without_their_bias,
    },
    "causality": {
        "a router that sees later tokens": lambda: rerouted(
            lambda logits_BSE: logits_BSE + 5 * logits_BSE.mean(1, keepdim=True)
        ),
        "attention to later tokens": attention_to_later_tokens,
        "a decoder that sees later tokens": a_decoder_that_sees_later_tokens,
    },
    "determinism": {
        "a router that compares sequences": lambda: rerouted(
            lambda logits_BSE: logits_BSE - logits_BSE.mean((0, 1), keepdim=True) * 3
        ),
        "noise in evaluation": lambda: rerouted(lambda logits_BSE: logits_BSE + torch.randn_like(logits_BSE)),
    },
    "health": {
        "a router with one favourite": a_router_with_one_favourite,
        "experts that nobody chooses": lambda: patched_router(
            lambda logits, weights, ids: (logits, weights, ids % 6)
        ),
        "logits that explode": lambda: edited(plain(), lambda case: router_of(case).weight.mul_(1000)),
        "a head that is upside down": lambda: edited(
            plain(), lambda case: case.model.lm_head.weight.mul_(-100)
        ),
        "a weight of nan": lambda: edited(
            plain(), lambda case: experts_of(case).down_proj[2].fill_(torch.nan)
        ),
    },
    "order": {
        "swapped gates": lambda: edited(
            our_demo(), lambda case: swap_gates(case.model.layers[1].ffn.experts.gate_up)
        ),
        "experts in another order": experts_in_another_order,
        "experts that are all alike": lambda: edited(
            our_demo(), lambda case: alike(case.model.layers[1].ffn.experts)
        ),
        "a swapped gate in transformers": lambda: edited(
            exported_demo(), lambda case: swap_gates(experts_of(case).gate_up_proj)
        ),
        "rows of the router in another order": lambda: edited(
            exported_demo(), lambda case: router_of(case).weight.copy_(router_of(case).weight.flip(0))
        ),
    },
}  # fmt: skip
"""Check -> defects that it has to find; `LOSSES` has further ones of balancing."""


WORDS = {
    "experts with a tiny rate": "a learning rate of 1e-12, others of 0.001",
    "a scaling factor that is ignored": "sum to 1, but the config scales them by 2.5",
    "weights that sum to a half": "sum to 0.5, but the config scales them by 1",
}
"""Both values, in the sentence of a failure."""


FOUND_LIKE_OTHERS = {
    "a shared expert that is dropped", "a swapped gate in transformers", "an option that the model ignores",
    "an optimizer without the routers", "an optimizer without the shared expert",
    "experts with a rate of zero", "last token missing", "second choice missing",
}  # fmt: skip
"""Defects in whose place another one is found by the same comparison."""


@pytest.mark.parametrize(
    ("check", "name"),
    [
        pytest.param(check, name, marks=pytest.mark.slow if name in FOUND_LIKE_OTHERS else [])
        for check, plants in DEFECTS.items()
        for name in plants
    ],
)
def test_a_planted_defect_is_found_by_its_check(check: str, name: str) -> None:
    case = DEFECTS[check][name]()
    report = audit(case.model, case.batch, case.optimizer, **case.options)
    assert check in problems(report), report
    found = [f.sentence for f in (*report.failures, *report.warnings) if f.check == check]
    assert any(WORDS.get(name, "") in sentence for sentence in found), report


@pytest.mark.parametrize(
    "defect",
    [pytest.param(name, marks=pytest.mark.slow) for name in list(LOSSES)[:2]] + list(LOSSES)[2:],
)
def test_a_wrong_balancing_loss_is_found(defect: str) -> None:
    case = with_loss()
    with torch.no_grad():
        router_of(case).weight.mul_(10)  # layers that differ
    with other_loss(LOSSES[defect]):
        report = audit(case.model, case.batch)
    assert set(problems(report)) == {"balancing"}, report


def test_a_loss_that_ignores_accumulation_counts_as_often_as_there_are_batches() -> None:
    case = adamw(with_loss())
    report = audit(case.model, case.batch, case.optimizer, accumulation=4)
    assert "in a step of 4 batches the balancing loss counts 4 times" in str(report)


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: Listed(), "the model has neither a balancing loss nor a correction bias"),
        (lambda: healthy("deepseek_v3"), "routers have a correction bias"),
        (lambda: healthy("dots1", output_router_logits=True), "routers have a correction bias"),
    ],
)
def test_a_forward_pass_without_a_balancing_loss_is_reported(
    build: Callable[[], Any], sentence: str
) -> None:
    assert sentence in str(audit(build(), batch()))


@pytest.mark.parametrize(
    ("router", "needs_a_loss"),
    [
        ("top_k", True), ("top_p", True), ("noisy_top_k", True), ("sigmoid_top_k", False),
        ("relu", False), ("hash", False), ("expert_threshold", False), ("sinkhorn", False),
        ("expert_choice", False), ("balanced_assignment", False),
    ],
)  # fmt: skip
def test_a_router_that_balances_itself_needs_no_loss(router: str, needs_a_loss: bool) -> None:
    options = {
        "num_layers": 1,
        "d_model": 16,
        "causal": False,
        "ffn": {"type": "moe", "router": router},
    }
    decoder = moe_ffn.DecoderConfig.model_validate(options).build(64, 72)
    report = audit(decoder, batch(), objective=ObjectiveConfig(load_balance=0.0))
    assert ("balancing" in problems(report)) is needs_a_loss, report


@pytest.mark.parametrize(
    ("family", "options", "sentence"),
    [
        ("qwen3_moe", {}, "has a gradient, no other has one, and the router learns"),
        ("qwen3_moe", {"target_parameters": BOTH}, "has a gradient, and no other has one"),
        (
            "qwen2_moe",
            {"target_modules": "all-linear"},
            "the shared expert learns; the experts do not",
        ),
    ],
)
def test_only_what_is_trained_is_said_to_learn(
    family: str, options: dict[str, Any], sentence: str
) -> None:
    model = healthy(family)
    if options:
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=2, **{"target_modules": [], **options})
        )
    (learned,) = {f.sentence for f in audit(model, batch()).findings if f.check == "learning"}
    assert learned.endswith(sentence)


def test_scores_that_only_bfloat16_makes_equal_are_blamed_on_it() -> None:
    case = a_model_in_bfloat16()
    with torch.no_grad():
        weight_ED = router_of(case).weight
        weight_ED[1:] = weight_ED[:1] + weight_ED[1:] / 64  # close scores
    warnings = [f for f in audit(case.model, case.batch).warnings if f.check == "precision"]
    assert "layer_01" in {warned.place for warned in warnings}
    for warned in warnings:
        assert "if the router is computed in another precision" in warned.sentence
        assert warned.advice.startswith("the router is in bfloat16")


# -- experts of other programs


class Listed(nn.Module):
    """A language model as in many repositories: a list of experts, each a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 16)
        self.gate = nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(4)
        )
        self.head = nn.Linear(16, 64)
        self.unused = -1

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        scores, ids = self.gate(x).softmax(-1).topk(2)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            weight = (scores * (ids == number)).sum(-1, keepdim=True)
            chosen = weight.squeeze(-1) > 0
            if number == self.unused:
                chosen = chosen & False
            y[chosen] = y[chosen] + weight[chosen] * expert(x[chosen])
        return self.head(x + y)


def test_experts_that_process_every_token_are_no_collapse(make_routing: Any) -> None:
    routing = make_routing([[token % 4, 4] for token in range(400)], 5, num_always=1)
    (finding,) = behaviour._health_of(behaviour.HEALTH.at("layer"), routing, is_early=False)
    assert finding.verdict == "pass"


def test_experts_in_a_list_are_checked_as_far_as_they_can_be_seen() -> None:
    model: Any = Listed()
    report = audit(model, batch())
    assert not problems(report), report
    assert report.facts["sparse layers"] == "1 (experts in a list)"
    assert report.facts["experts"] == "4, ? per token"
    skipped = {finding.check for finding in report.findings if finding.verdict == "skip"}
    assert skipped == {"balancing", "structure", "kernels", "health", "order"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    assert "learning" not in problems(audit(model, batch(), optimizer)), "equal rates"

    model.experts[2].requires_grad_(requires_grad=False)
    frozen = audit(model, batch())
    assert set(problems(frozen)) == {"learning"}
    assert "4 of 16 expert tensors do not require a gradient: experts.2.0.weight" in str(frozen)

    model = Listed()
    model.unused = 3
    idle = audit(model, batch())
    assert [f.sentence for f in idle.warnings] == ["1 of 4 experts computed no token: 3"]
    few_tokens = {name: values[:, :63] for name, values in batch().items()}
    assert not audit(model, few_tokens).warnings, "an expert may have no token by chance"

    model = Listed()
    model.experts[2][2].register_forward_hook(lambda module, args, output: output * 0)
    assert "experts computed tokens but have a gradient of zero: 2" in str(audit(model, batch()))


@pytest.mark.parametrize("name", ["hash", "mixture_of_depths"])
def test_blocks_of_ours_are_not_accused_and_random_states_stay(name: str) -> None:
    sizes = ["--model.d_model", "16", "--model.num_layers", "2"]
    config = parse(["--config", f"configs/blocks/{name}.yaml", *sizes])
    model = config.model.build(64, 72)
    state = torch.get_rng_state()
    report = audit(model, batch())
    assert set(problems(report)) <= {"health"}, report  # new routers may leave an expert idle
    assert torch.equal(torch.get_rng_state(), state)


def decoder_of(**model: Any) -> Any:
    torch.manual_seed(0)
    return moe_ffn.DecoderConfig(d_model=16, num_layers=2, **model).build(64, 72)


def test_experts_of_any_round_of_a_chain_may_learn() -> None:
    # 288 tokens choose 2 of 128 experts in each round, so some experts are chosen in the second one only.
    chain = {"type": "chain_of_experts", "ffn": {"type": "moe", "num_experts": 128}}
    report = audit(decoder_of(ffn=chain), batch())
    assert set(problems(report)) <= {"health"}, report


def test_active_parameters_are_those_of_the_config_in_every_block() -> None:
    moe = {"type": "moe", "num_experts": 8}
    normed = {"type": "normed", "input": {}, "ffn": moe}
    chain = {"type": "chain_of_experts", "ffn": moe}
    some = {"type": "mixture_of_depths", "router": {"type": "relu", "k": 0.5}, "ffn": moe}
    for ffn, per_token in ((normed, "2"), (chain, "2, 4"), (some, "1, 2")):
        model = decoder_of(ffn=moe, ffn_at={"1": ffn})
        report = audit(model, batch())
        active = model.config.num_active_params(64, 72)
        assert report.facts["parameters"].endswith(f", {active:,} active")
        assert report.facts["experts"] == f"8, {per_token} per token"


def test_a_mixture_of_depths_around_a_dense_block_is_audited() -> None:
    depths = {"type": "mixture_of_depths", "router": {"type": "relu", "k": 0.5}, "ffn": "swiglu"}
    report = audit(decoder_of(ffn=depths), batch())
    assert set(problems(report)) <= {"health"}, report
    assert report.facts["experts"] == "0, ? per token"


def test_our_blocks_in_a_model_of_transformers() -> None:
    dense = model_of("llama", {"vocab_size": 64})
    router = {"type": "top_k", "k": 2, "renormalize": True}
    moe_ffn.interop.swap_ffn(dense, [0, 1], {"type": "moe", "num_experts": 8, "router": router})
    report = audit(dense, batch())
    assert set(problems(report)) <= {"structure", "learning", "health"}, report
    assert report.ok, "equal experts give the router no gradient, until they differ"
    copies = [finding.sentence for finding in report.warnings if finding.check == "structure"]
    assert copies[0].startswith("only 1 of 8 experts are distinct: the model is upcycled")
    assert len(copies) == 2
    assert report.facts["sparse layers"] == "2 (blocks of moe_ffn)"


def test_a_report_is_text_json_and_html() -> None:
    case = one_frozen_tensor()
    report = audit(case.model, case.batch)
    (failure,) = report.failures
    assert (failure.check, failure.place) == ("learning", "layer_01")
    assert not report.ok
    assert report.summary.startswith("1 failure (learning); ")
    assert json.loads(json.dumps(report.to_dict()))["findings"]
    assert failure.sentence in report._repr_html_()
