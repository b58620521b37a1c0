"""Table of transformers architectures: names of options and weights, for reading and writing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from moe_ffn.hf.layouts import (
    TensorLayout,
    gate_up_down,
    interleaved,
    linear,
    named,
    rotary,
    stacked,
    transposed,
)
from moe_ffn.hf.options import (
    GROUPS,
    WINDOW,
    HFConfig,
    LlamaCpp,
    OptionMapping,
    accept_only,
    constant,
    gated,
    layer_windows,
    read_equal_heads,
    read_qwen_layers,
    read_whole_heads,
    renamed,
    require_kv_heads,
    rope,
    write_qwen_layers,
)
from moe_ffn.hf.rewrites import (
    ALL_BIASES,
    CORRECTION_BIAS,
    GATED_SHARED_EXPERT,
    OUTPUT_BIAS,
    QKV_BIASES,
    SEPARATE_OUTPUT,
    SHARED_EXPERT,
    Rewrite,
)

UNTIED = (
    renamed("hidden_size", "d_model"),
    renamed("num_hidden_layers", "num_layers"),
    renamed("num_attention_heads", "attention.num_heads"),
    renamed("attention_dropout", "attention.dropout"),
    renamed("rms_norm_eps", "norm.eps", 1e-6),
    constant({"norm.type": "rms_norm"}),
)
TIE = renamed("tie_word_embeddings", "tie_embeddings")
NEVER_TIED = OptionMapping(TIE.read, lambda options: {"tie_word_embeddings": False})
"""Reads tied embeddings too; other libraries than transformers need a separate output matrix."""
ROPE = rope()
DECODER = (*UNTIED, ROPE, TIE)
SEPARATE = (*UNTIED, ROPE, NEVER_TIED)
KV_HEADS = renamed("num_key_value_heads", "attention.num_kv_heads")
HEADS = (KV_HEADS, renamed("head_dim", "attention.head_dim"))
LATER_WINDOWS = layer_windows(lambda layer, max_layers: layer >= max_layers)
DENSE = (
    constant({"sparse_layers": []}),
    renamed("intermediate_size", "dense.d_ff", 1),
    gated("dense.type"),
)
SOFTMAX_TOP_K = constant({"sparse.type": "moe", "sparse.router.type": "top_k"})
RENORMALIZE = renamed("norm_topk_prob", "sparse.router.renormalize", False)
K = renamed("num_experts_per_tok", "sparse.router.k", 1)
# Transformers needs a width even if no layer is dense.
DENSE_WIDTH = OptionMapping(
    lambda hf: {"dense.d_ff": hf["intermediate_size"]},
    lambda options: {
        "intermediate_size": options.get("dense.d_ff") or options.get("sparse.experts.d_ff") or 1
    },
)
ALL_LAYERS = OptionMapping(lambda hf: {"sparse_layers": list(hf.layers())})
ALL_SPARSE = (
    ALL_LAYERS,
    renamed("intermediate_size", "sparse.experts.d_ff", 1),
    gated("sparse.experts.type"),
    K,
    SOFTMAX_TOP_K,
)
SIGMOID_TOP_K = (
    OptionMapping(
        lambda hf: {"sparse_layers": [*hf.layers()[hf.count("first_k_dense_replace", 0) :]]},
        lambda options: {"first_k_dense_replace": min(options["sparse_layers"], default=0)},
    ),
    DENSE_WIDTH,
    renamed("n_routed_experts", "sparse.num_experts", 1),
    renamed("moe_intermediate_size", "sparse.experts.d_ff", 1),
    OptionMapping(
        lambda hf: {
            "sparse.shared_expert.d_ff": (
                hf.count("n_shared_experts") * hf.count("moe_intermediate_size")
            )
        },
        lambda options: {
            "n_shared_experts": round(
                options.get("sparse.shared_expert.d_ff", 1) / options.get("sparse.experts.d_ff", 1)
            )
            or 1
        },
    ),
    gated("sparse.experts.type", "dense.type", "sparse.shared_expert.type"),
    OptionMapping(
        lambda hf: {"sparse.router.groups": hf.groups()},
        lambda options: {
            theirs: options.get(f"sparse.router.groups.{ours}", 1)
            for ours, theirs in GROUPS.items()
        },
    ),
    renamed("routed_scaling_factor", "sparse.router.scale", 1.0),
    K,
    RENORMALIZE,
    constant(
        {
            "sparse.type": "moe",
            "sparse.router.type": "sigmoid_top_k",
            "sparse.router.correction_bias": True,
        }
    ),
)
QWEN_LAYERS = (
    OptionMapping(read_qwen_layers, write_qwen_layers),
    DENSE_WIDTH,
    renamed("num_experts", "sparse.num_experts", 1),
    renamed("moe_intermediate_size", "sparse.experts.d_ff", 1),
    K,
    RENORMALIZE,
    SOFTMAX_TOP_K,
)

OUTSIDE_LAYERS = {
    "embedding.weight": named("model.embed_tokens.weight"),
    "final_norm.weight": named("model.norm.weight"),
    "unembedding.weight": named("lm_head.weight"),
}
"""Names of the weights outside the layers."""

DENSE_LAYER = gate_up_down("ffn", "mlp") | linear(
    attention__query="self_attn.q_proj",
    attention__key="self_attn.k_proj",
    attention__value="self_attn.v_proj",
    attention__output="self_attn.o_proj",
    attention__query_norm="self_attn.q_norm",
    attention__key_norm="self_attn.k_norm",
    attention_norm="input_layernorm",
    ffn_norm="post_attention_layernorm",
)
SPARSE_LAYER = {
    **DENSE_LAYER,
    **linear(ffn__router__projection="mlp.gate"),
    "ffn.experts.gate_up": stacked(
        "mlp.experts.gate_up_proj",
        "mlp.experts.{}.gate_proj.weight",
        "mlp.experts.{}.up_proj.weight",
    ),
    "ffn.experts.down": stacked("mlp.experts.down_proj", "mlp.experts.{}.down_proj.weight"),
}
SIGMOID_LAYER = {
    **SPARSE_LAYER,
    **gate_up_down("ffn.shared_expert", "mlp.shared_experts"),
    "ffn.router.correction_bias_E": named("mlp.gate.e_score_correction_bias"),
}


@dataclass(frozen=True)
class Family:
    """An architecture of transformers."""

    model_type: str
    decoder: tuple[OptionMapping, ...]
    """Options of everything but the feed-forward blocks."""
    ffn: tuple[OptionMapping, ...]
    defaults: Mapping[str, Any]
    """Defaults of transformers for options that a config leaves out."""
    names: Mapping[str, TensorLayout] = field(default_factory=lambda: SPARSE_LAYER)
    """Our name of a weight in a layer -> its layout in transformers."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of options in config files."""
    rewrites: Mapping[str, Rewrite] = field(default_factory=dict)
    """Our option -> its rewrite for an export, in addition to the rewrites of all architectures."""
    replaces_tokenizer: bool = False
    """Transformers replaces the splitting rule of every tokenizer by the architecture's own."""
    llama_cpp: LlamaCpp = field(kw_only=True)
    """The architecture in llama.cpp."""
    ignores_scaling_in_mlx: bool = False
    """mlx-lm computes scaled rotary positions as if they were not."""
    has_experts_in_one_tensor: bool = False
    """Transformers reads all experts from one tensor, which mlx-lm reads only if it is quantised."""

    @property
    def architecture(self) -> str:
        """Class name in transformers, such as `Qwen3MoeForCausalLM`."""
        return f"{self.model_type.title().replace('_', '')}ForCausalLM"

    @property
    def is_sparse(self) -> bool:
        return self.names is not DENSE_LAYER

    def complete(self, hf: HFConfig) -> HFConfig:
        """Return options with the defaults of this architecture; an option may have one of its aliases."""
        renamed = {name: hf[alias] for alias, name in self.aliases.items() if alias in hf}
        return replace(hf, defaults={**hf.defaults, **self.defaults, **renamed})


QWEN_DEFAULTS = {
    "head_dim": None,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "default_theta": 10_000.0,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "has_window_switch": True,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "max_position_embeddings": 32_768,
}
QWEN_MOE = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": False}
LLAMA = {
    **QWEN_DEFAULTS,
    "num_key_value_heads": None,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
}
SIGMOID_DEFAULTS = {
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}
BIAS = renamed("attention_bias", "attention.bias", False)

FAMILIES = (
    Family(
        "llama",
        (*DECODER, *HEADS, BIAS, OptionMapping(read_whole_heads)),
        (*DENSE, renamed("mlp_bias", "dense.bias", False)),
        LLAMA,
        DENSE_LAYER,
        rewrites=OUTPUT_BIAS,
        llama_cpp=LlamaCpp("llama", has_biases=True),
    ),
    Family(
        "mistral",
        (*DECODER, *HEADS, WINDOW),
        DENSE,
        {
            **QWEN_DEFAULTS,
            "num_key_value_heads": 8,
            "has_window_switch": False,
            "max_position_embeddings": 131_072,
        },
        DENSE_LAYER,
        llama_cpp=LlamaCpp("llama"),
    ),
    Family(
        "qwen2",
        (*DECODER, *HEADS, LATER_WINDOWS, constant({"attention.bias": "qkv"})),
        DENSE,
        QWEN_DEFAULTS,
        DENSE_LAYER,
        replaces_tokenizer=True,
        llama_cpp=LlamaCpp("qwen2", has_biases=True),
    ),
    Family(
        "qwen3",
        (*DECODER, *HEADS, LATER_WINDOWS, BIAS, constant({"attention.norm_qk": "head"})),
        DENSE,
        {**QWEN_DEFAULTS, "head_dim": 128},
        DENSE_LAYER,
        rewrites=OUTPUT_BIAS,
        llama_cpp=LlamaCpp("qwen3"),
    ),
    Family(
        "mixtral",
        (*DECODER, *HEADS, WINDOW),
        (
            *ALL_SPARSE,
            renamed("num_local_experts", "sparse.num_experts", 1),
            renamed("router_jitter_noise", "sparse.jitter", 0.0),
            constant({"sparse.router.renormalize": True}),
        ),
        {
            **QWEN_DEFAULTS,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "default_theta": 1e6,
            "has_window_switch": False,
            "sliding_window": None,
            "max_position_embeddings": 131_072,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "router_jitter_noise": 0.0,
        },
        {
            **SPARSE_LAYER,
            "ffn.router.projection.weight": named(
                "block_sparse_moe.gate.weight", "mlp.gate.weight"
            ),
            "ffn.experts.gate_up": stacked(
                "mlp.experts.gate_up_proj",
                "block_sparse_moe.experts.{}.w1.weight",
                "block_sparse_moe.experts.{}.w3.weight",
            ),
            "ffn.experts.down": stacked(
                "mlp.experts.down_proj", "block_sparse_moe.experts.{}.w2.weight"
            ),
        },
        llama_cpp=LlamaCpp("llama", renormalizes=True),
        ignores_scaling_in_mlx=True,
    ),
    Family(
        "qwen3_moe",
        (*DECODER, *HEADS, WINDOW, BIAS, constant({"attention.norm_qk": "head"})),
        (*QWEN_LAYERS, gated("sparse.experts.type", "dense.type")),
        {**QWEN_DEFAULTS, **QWEN_MOE, "num_key_value_heads": 4},
        aliases={"num_local_experts": "num_experts"},
        rewrites=OUTPUT_BIAS,
        llama_cpp=LlamaCpp("qwen3moe", renormalizes=True),
        ignores_scaling_in_mlx=True,
    ),
    Family(
        "olmoe",
        (
            *SEPARATE,
            KV_HEADS,
            OptionMapping(read_equal_heads),
            BIAS,
            accept_only("clip_qkv", None),
            constant({"attention.norm_qk": "all"}),
        ),
        (*ALL_SPARSE, renamed("num_experts", "sparse.num_experts", 1), RENORMALIZE),
        {
            **LLAMA,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 8,
            "num_experts": 64,
            "norm_topk_prob": False,
        },
        aliases={"num_local_experts": "num_experts"},
        rewrites={**OUTPUT_BIAS, **SEPARATE_OUTPUT},
        llama_cpp=LlamaCpp("olmoe", renormalizes=False, has_groups=False, converter_eps=1e-5),
    ),
    Family(
        "deepseek_v3",
        (
            *UNTIED,
            rope(has_score_factor=True),
            NEVER_TIED,
            accept_only("attention_bias", False),
            accept_only("rms_norm_eps", 1e-6),  # the norms in its attention always use it
            renamed("kv_lora_rank", "attention.latent.kv_rank", 1),
            renamed("q_lora_rank", "attention.latent.query_rank"),
            renamed("qk_nope_head_dim", "attention.head_dim"),
            renamed("qk_rope_head_dim", "attention.latent.rotated_dim", 1),
            renamed("v_head_dim", "attention.latent.value_dim"),
            OptionMapping(
                require_kv_heads,
                lambda options: {"num_key_value_heads": options["attention.num_heads"]},
            ),
            OptionMapping(lambda hf: {}, lambda options: {"rope_interleave": True}),
        ),
        (
            *SIGMOID_TOP_K,
            # Transformers has no other; llama.cpp and mlx-lm have.
            accept_only("scoring_func", "sigmoid"),
            accept_only("topk_method", "noaux_tc"),
        ),
        {
            **LLAMA,
            "q_lora_rank": 1536,
            "rope_interleave": True,
            "max_position_embeddings": 4096,
            "n_group": 8,
            "topk_group": 4,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 3,
        },
        {
            **SIGMOID_LAYER,
            **linear(
                attention__query__1="self_attn.q_a_layernorm",
                attention__kv_norm="self_attn.kv_a_layernorm",
                attention__kv_up="self_attn.kv_b_proj",
            ),
            "attention.query.0.weight": lambda prefix, shape, hf: (
                named("self_attn.q_a_proj.weight")
                if hf["q_lora_rank"]
                else rotary("self_attn.q_proj", "num_attention_heads", "qk_nope_head_dim")
            )(prefix, shape, hf),
            "attention.query.2.weight": rotary(
                "self_attn.q_b_proj", "num_attention_heads", "qk_nope_head_dim"
            ),
            "attention.kv_down.weight": rotary(
                "self_attn.kv_a_proj_with_mqa", None, "kv_lora_rank"
            ),
        },
        aliases={"num_local_experts": "n_routed_experts"},
        rewrites={**SEPARATE_OUTPUT, **CORRECTION_BIAS, **SHARED_EXPERT},
        llama_cpp=LlamaCpp("deepseek2"),
    ),
    Family(
        "qwen2_moe",
        (
            *SEPARATE,
            *HEADS,
            layer_windows(lambda layer, max_layers: layer % 2 == 0 and layer < max_layers),
            OptionMapping(
                lambda hf: {"attention.bias": "qkv" if hf["qkv_bias"] else False},
                lambda options: {"qkv_bias": True},
            ),
        ),
        (
            *QWEN_LAYERS,
            renamed("shared_expert_intermediate_size", "sparse.shared_expert.d_ff", 1),
            gated("sparse.experts.type", "dense.type", "sparse.shared_expert.type"),
            constant({"sparse.combine.type": "sigmoid_gate"}),
        ),
        {**QWEN_DEFAULTS, **QWEN_MOE, "num_key_value_heads": 16, "qkv_bias": True},
        {
            **SPARSE_LAYER,
            **gate_up_down("ffn.shared_expert", "mlp.shared_expert"),
            **linear(ffn__combine__gate="mlp.shared_expert_gate"),
        },
        aliases={"num_local_experts": "num_experts"},
        rewrites={**SEPARATE_OUTPUT, **GATED_SHARED_EXPERT, **QKV_BIASES},
        llama_cpp=LlamaCpp(
            "qwen2moe", renormalizes=False, has_biases=True, has_head_dim=False, is_same_in_mlx=True
        ),
    ),
    Family(
        "dots1",
        (*SEPARATE, *HEADS, LATER_WINDOWS, BIAS, constant({"attention.norm_qk": "head"})),
        SIGMOID_TOP_K,
        {
            **QWEN_DEFAULTS,
            **SIGMOID_DEFAULTS,
            "has_window_switch": False,
            "max_window_layers": 62,
            "max_position_embeddings": 2048,
            "first_k_dense_replace": 0,
            "norm_topk_prob": False,
        },
        SIGMOID_LAYER,
        aliases={"num_local_experts": "n_routed_experts"},
        rewrites={**OUTPUT_BIAS, **SEPARATE_OUTPUT, **CORRECTION_BIAS, **SHARED_EXPERT},
        llama_cpp=LlamaCpp("dots1", has_groups=False),
    ),
    Family(
        "glm4_moe",
        (
            *UNTIED,
            rope(has_fraction=True),
            NEVER_TIED,
            *HEADS,
            OptionMapping(
                lambda hf: {"attention.bias": "qkv" if hf["attention_bias"] else False},
                lambda options: {"attention_bias": bool(options["attention.bias"])},
            ),
            OptionMapping(
                lambda hf: {"attention.norm_qk": "head" if hf["use_qk_norm"] else None},
                lambda options: {"use_qk_norm": "attention.norm_qk" in options},
            ),
        ),
        SIGMOID_TOP_K,
        {
            **QWEN_DEFAULTS,
            **SIGMOID_DEFAULTS,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": False,
            "max_position_embeddings": 131_072,
            "num_nextn_predict_layers": 1,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 1,
        },
        SIGMOID_LAYER,
        aliases={"num_local_experts": "n_routed_experts"},
        rewrites={**SEPARATE_OUTPUT, **CORRECTION_BIAS, **SHARED_EXPERT},
        llama_cpp=LlamaCpp("glm4moe", has_biases=True),
        ignores_scaling_in_mlx=True,
    ),
    Family(
        "gpt_oss",
        (
            *SEPARATE,
            *HEADS,
            # Transformers needs a window even if no layer has it.
            layer_windows(lambda layer, max_layers: layer % 2 == 0, otherwise=128),
            OptionMapping(BIAS.read, lambda options: {"attention_bias": True}),
            constant({"attention.sinks": True}),
        ),
        (
            ALL_LAYERS,
            renamed("num_local_experts", "sparse.num_experts", 1),
            renamed("intermediate_size", "sparse.experts.d_ff", 1),
            renamed("swiglu_alpha", "sparse.experts.alpha", 1.702),
            renamed("swiglu_limit", "sparse.experts.limit", 7.0),
            K,
            constant(
                {
                    "sparse.type": "moe",
                    "sparse.router.type": "top_k",
                    "sparse.router.softmax": "after",
                    "sparse.router.bias": True,
                    "sparse.experts.type": "clamped_swiglu",
                    "sparse.experts.bias": True,
                }
            ),
        ),
        {
            "head_dim": 64,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "default_theta": 150_000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
            "attention_dropout": 0.0,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "has_window_switch": False,
            "sliding_window": 128,
            "max_window_layers": 0,  # it has no such option
            "max_position_embeddings": 131_072,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "num_experts_per_tok": 4,
            "num_local_experts": 128,
        },
        {
            **DENSE_LAYER,
            "attention.sink_H": named("self_attn.sinks"),
            **linear(ffn__router__projection="mlp.router"),
            "ffn.experts.gate_up": interleaved("mlp.experts.gate_up_proj"),
            "ffn.experts.gate_up_bias": interleaved("mlp.experts.gate_up_proj_bias"),
            "ffn.experts.down": transposed("mlp.experts.down_proj"),
            "ffn.experts.down_bias": named("mlp.experts.down_proj_bias"),
        },
        aliases={"num_experts": "num_local_experts"},
        rewrites={**SEPARATE_OUTPUT, **ALL_BIASES},
        llama_cpp=LlamaCpp(
            "gpt-oss",
            renormalizes=True,
            has_biases=True,
            has_windows=True,
            experts={"type": "clamped_swiglu", "alpha": 1.702, "limit": 7.0},
        ),
        has_experts_in_one_tensor=True,
    ),
)
"""Architectures, in order of preference for an export."""

BY_TYPE = {family.model_type: family for family in FAMILIES}
"""Name in transformers -> its architecture."""
