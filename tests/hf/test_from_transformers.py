"""A transformers folder loads as a decoder with the same logits, or is rejected in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_ffn import ConfigError
from moe_ffn.hf import export_transformers, load_ffn, load_transformers
from moe_ffn.model.generate import Sampling, generate_batch
from tests.helpers.memory import peak_above
from tests.helpers.ranks import on_ranks
from tests.helpers.theirs import EXPERTS, GPT_OSS, IDS_BS, MODELS, SIZES, change, logits, make, save

WEIGHTS = "model.safetensors"


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert theirs.abs().max() > 1  # so that 1e-4 is little
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def with_weights(folder: Path, change_them: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / WEIGHTS)
    change_them(weights)
    save_file(weights, folder / WEIGHTS)


def leave_out(folder: Path, *keys: str) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({key: values[key] for key in values.keys() - {*keys}}))


FUSED = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss")


@pytest.mark.parametrize("name", ["llama-tied-heads", *FUSED])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Checkpoints with all experts in one tensor; one tensor per expert is tested with the export."""
    theirs = save(name, tmp_path, save_original_format=False)

    ours = load_transformers(tmp_path)

    assert not ours.training
    assert_close(logits(ours), logits(theirs))
    count = ours.config.num_params(SIZES["vocab_size"], SIZES["max_position_embeddings"])
    assert count == theirs.num_parameters() == sum(p.numel() for p in ours.parameters())
    tied = ours.config.tie_embeddings
    assert tied == (ours.unembedding.weight is ours.embedding.weight)
    assert tied == theirs.config.tie_word_embeddings


def test_noninterleaved_positions_are_loaded_unchanged(tmp_path: Path) -> None:
    _, options = MODELS["deepseek_v3"]
    theirs = make("deepseek_v3", {**options, "rope_interleave": False})
    theirs.save_pretrained(tmp_path)
    assert_close(logits(load_transformers(tmp_path)), logits(theirs))


@pytest.mark.parametrize(
    "name",
    [
        *("mistral-window", "qwen3-chosen-windows", "dots1-biases-groups-window"),
        *("glm4_moe", "qwen3-yarn", "deepseek_v3-sharper", "gpt_oss"),
    ],
)
def test_windows_and_scaled_positions_in_generation(name: str, tmp_path: Path) -> None:
    theirs = save(name, tmp_path)
    ours, prompt_ids = load_transformers(tmp_path), IDS_BS[0, :5]
    (continued,) = generate_batch(ours, [prompt_ids], 20, Sampling(temperature=0))
    both = {"input_ids": prompt_ids[None], "attention_mask": torch.ones(1, 5)}
    expected = theirs.generate(**both, max_new_tokens=20, do_sample=False)
    assert continued.tolist() == expected[0, 5:].tolist()


def test_several_files_with_an_index(tmp_path: Path) -> None:
    theirs = save("qwen3_moe", tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3

    assert_close(logits(load_transformers(tmp_path)), logits(theirs))


def test_weights_keep_their_dtype_but_for_the_correction_bias(tmp_path: Path) -> None:
    model = make(*MODELS["deepseek_v3"]).bfloat16()
    model.save_pretrained(tmp_path)
    key = "model.layers.1.mlp.gate.e_score_correction_bias"
    # As some folders have it.
    with_weights(tmp_path, lambda w: w.update({key: w[key].bfloat16()}))

    ours = load_transformers(tmp_path)

    dtypes = {name: value.dtype for name, value in ours.state_dict().items()}
    biases = {name for name in dtypes if name.endswith("correction_bias_E")}
    assert len(biases) == 2
    assert {dtypes[name] for name in biases} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if name not in biases} == {torch.bfloat16}
    assert logits(ours).isfinite().all()


def test_options_missing_from_a_config_have_the_default_of_transformers(tmp_path: Path) -> None:
    theirs = make("mixtral", {**MODELS["mixtral"][1], "rope_theta": 1e6, "num_key_value_heads": 2})
    theirs.save_pretrained(tmp_path)
    leave_out(
        tmp_path, "rope_parameters", "rms_norm_eps", "num_experts_per_tok", "tie_word_embeddings"
    )
    change(tmp_path, rope_scaling=None)
    assert_close(logits(load_transformers(tmp_path)), logits(theirs))


def test_a_gpt_oss_without_positions_and_windows_has_those_of_transformers(tmp_path: Path) -> None:
    theirs = make("gpt_oss", {**GPT_OSS, "rope_theta": 150_000.0})
    theirs.save_pretrained(tmp_path)
    leave_out(tmp_path, "rope_parameters", "layer_types", "sliding_window")

    ours = load_transformers(tmp_path)

    assert ours.config.layer_windows() == [128, None, 128]
    assert_close(logits(ours), logits(theirs))


def test_weights_ignored_by_transformers_are_ignored(tmp_path: Path) -> None:
    theirs = save("deepseek_v3", tmp_path)
    left_out = "model.layers.3.eh_proj.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"
    with_weights(tmp_path, lambda w: w.update({name: torch.ones(3) for name in left_out}))
    assert_close(logits(load_transformers(tmp_path)), logits(theirs))


def test_a_tied_matrix_may_be_there_twice_but_not_be_another(tmp_path: Path) -> None:
    theirs = save("qwen2", tmp_path)
    head = "lm_head.weight"
    with_weights(tmp_path, lambda w: w.update({head: w["model.embed_tokens.weight"].clone()}))
    assert_close(logits(load_transformers(tmp_path)), logits(theirs))

    with_weights(tmp_path, lambda w: w.update({head: w[head] + 1}))
    with pytest.raises(ConfigError, match=r"has 'lm_head.weight', which qwen2 lacks: "):
        load_transformers(tmp_path)


# -- one block


@pytest.mark.parametrize("name", [name for name in MODELS if "-" not in name])
def test_a_single_block_matches_transformers(name: str, tmp_path: Path) -> None:
    theirs = save(name, tmp_path)
    x_BSD = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    for layer in (0, 2):
        block = load_ffn(tmp_path, layer)
        with torch.no_grad():
            hidden = theirs.model.layers[layer].mlp(x_BSD)
            assert_close(block(x_BSD).hidden, hidden[0] if isinstance(hidden, tuple) else hidden)


def test_a_block_needs_nothing_of_the_model_around_it(tmp_path: Path) -> None:
    save("deepseek_v3", tmp_path)
    change(tmp_path, rope_scaling={"type": "yarn", "factor": 40}, rms_norm_eps=1e-5)
    assert load_ffn(tmp_path, 1).routers()
    with pytest.raises(ConfigError, match=r"layer must be in \[0, 3\), got 3"):
        load_ffn(tmp_path, 3)
    with_weights(tmp_path, lambda w: w.update({"model.layers.1.mlp.more.weight": torch.ones(3)}))
    with pytest.raises(
        ConfigError, match=r"has 'model.layers.1.mlp.more\S+, which deepseek_v3 lacks"
    ):
        load_ffn(tmp_path, 1)
    assert load_ffn(tmp_path, 2).routers()


# -- what is rejected


LENGTH = "original_max_position_embeddings"
YARN_SCALES = {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0}
OPTIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    **{
        f"{kind} positions": (
            "llama", {"rope_scaling": {"rope_type": kind, "factor": 8.0}},
            f"rope_scaling.rope_type is '{kind}', which our model does not support; supported: 'default', "
            "'linear', 'llama3', 'yarn'",
        )
        for kind in ("dynamic", "longrope")
    },
    "rope factor": (
        "llama", {"rope_scaling": {"rope_type": "linear", "factor": 0.5}},
        "model.positions.scaling.factor: must be at least 1.0, got 0.5",
    ),
    "rope by layer": (
        "llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "supported: one mapping for all layers",
    ),
    "partial rotary": ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, which"),
    "layer types": (
        "qwen3", {"sliding_window": 7, "use_sliding_window": True, "layer_types": ["chunked_attention"] * 3},
        "supported: a list of full_attention or sliding_attention for each of the 3 layers",
    ),
    "too few layer types": (
        "qwen3", {"sliding_window": 7, "use_sliding_window": True, "layer_types": ["sliding_attention"]},
        "layer_types is ['sliding_attention'], which",
    ),
    "layer types in lists": (
        "qwen3", {"sliding_window": 7, "use_sliding_window": True, "layer_types": [["x"]] * 3},
        "for each of the 3 layers",
    ),
    **{
        f"{key} {value}": ("llama", {"rope_scaling": {**YARN_SCALES, key: value}}, message)
        for key, value, message in (
            ("factor", "x", "rope_scaling.factor is 'x', which our model does not support"),
            ("factor", 0, "model.positions.scaling.factor: must be at least 1"),
            ("mscale", "1", "rope_scaling.mscale is '1', which"),
            (LENGTH, "x", f"rope_scaling.{LENGTH} is 'x', which"),
        )
    },
    "window": ("mixtral", {"sliding_window": "x"}, "model.attention.window: must be a whole number, got 'x'"),
    "clip_qkv": ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0, which"),
    "bias": ("deepseek_v3", {"attention_bias": True}, "attention_bias is True, which"),
    "eps": ("deepseek_v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05, which"),
    "kv heads": ("deepseek_v3", {"num_key_value_heads": 2}, "supported: None or 4"),
    "activation": ("qwen3", {"hidden_act": "relu2"}, "hidden_act is 'relu2', which"),
    "quantised": ("llama", {"quantization_config": {"bits": 4}}, "quantization_config is given"),
    "no number": ("llama", {"hidden_size": "wide"}, "hidden_size is 'wide'; give a whole number from 1"),
    "endless": ("olmoe", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; give at"),
    "no list": ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers is 1, which our model does"),
    "no rotation": ("qwen2", {"rope_parameters": {"rope_theta": "x"}}, "positions.base: must be a"),
    "too many": ("olmoe", {"num_experts_per_tok": 9}, "router.k (9) must not exceed num_experts"),
    "unknown": (
        "llama", {"model_type": "lama"}, "model_type 'lama' is not supported; did you mean 'llama'?"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "options", "message"), OPTIONS.values(), ids=OPTIONS)
def test_an_option_that_ours_does_not_compute_is_named(
    name: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save(name, tmp_path)
    change(tmp_path, **options)
    with pytest.raises(ConfigError) as caught:
        load_transformers(tmp_path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"'{tmp_path}/config.json': ")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mixtral", {"sliding_window": 48}),
        ("qwen3_moe", {"sliding_window": 16, "use_sliding_window": False}),
        ("mistral-window", {"use_sliding_window": False}),
        ("gpt_oss", {"use_sliding_window": False}),
        ("dots1-biases-groups-window", {"use_sliding_window": False}),
        ("llama", {"rope_scaling": None, "partial_rotary_factor": 1.0}),
        ("llama", {"hidden_act": "swish"}),
    ],
)
def test_options_without_effect_are_accepted(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    theirs = save(name, tmp_path)
    change(tmp_path, **options)
    assert_close(logits(load_transformers(tmp_path)), logits(theirs))


Q = "model.layers.1.self_attn.q_proj.weight"
GATE = "model.layers.2.mlp.experts.4.gate_proj.weight"
DAMAGES: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "a missing expert": (lambda w: [w.pop(GATE), w.pop(Q)], f"lacks '{Q}' and 1 more: its config.json"),
    "one too many": (
        lambda w: w.update(more=torch.ones(1)), "has 'more', which olmoe lacks: its config.json"
    ),
    "another shape of an expert": (
        lambda w: w.update({GATE: torch.ones(3, 32)}),
        f"has '{GATE}' as (3, 32), but its config.json requires (40, 32)",
    ),
    "quantised": (
        lambda w: w.update({n: v.to(torch.float8_e4m3fn) for n, v in w.items()}),
        " is F8_E4M3); give weights in a floating-point dtype",
    ),
    "one quantised": (
        lambda w: w.update({GATE: w[GATE].to(torch.int8)}),
        f"has quantised weights ('{GATE}' is I8); give weights in a floating-point dtype",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_folder_is_rejected(
    damage: Callable[[dict[str, Tensor]], object], message: str, tmp_path: Path
) -> None:
    save("olmoe", tmp_path)
    with_weights(tmp_path, damage)
    with pytest.raises(ConfigError) as caught:
        load_transformers(tmp_path)
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


# -- memory


def load_and_export(rank: int, folder: Path, by_expert: bool) -> tuple[int, int, int]:
    """Bytes of the folder, peak of reading, and peak of writing on top of the model."""
    options = {**EXPERTS, "num_hidden_layers": 4, "num_experts": 8, "hidden_size": 256}
    options |= {"moe_intermediate_size": 768, "num_attention_heads": 4, "head_dim": 32}
    make("qwen3_moe", options).save_pretrained(folder, save_original_format=by_expert)

    def read() -> None:
        for parameter in load_transformers(folder).parameters():
            parameter.sum()  # in case it is read only now

    reading = peak_above(read)
    decoder = load_transformers(folder)
    writing = peak_above(lambda: export_transformers(decoder, folder / "exported"))
    return (folder / WEIGHTS).stat().st_size, reading, writing


@pytest.mark.parametrize("by_expert", [True, False], ids=["by_expert", "fused"])
def test_no_more_memory_than_the_model_and_a_little(
    tmp_path: Path, by_expert: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_ffn.weights.pretrained.MIN_FILE_BYTES", 2**20)
    ((size, load, export),) = on_ranks(1, tmp_path / "ranks", load_and_export, tmp_path, by_expert)
    assert size > 50e6
    assert load < 1.3 * size
    assert export < 0.3 * size
