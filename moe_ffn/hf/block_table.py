"""Table of the sparse blocks in transformers: model -> our config and the names of its weights."""

from __future__ import annotations

from typing import Any

from moe_ffn.hf.block_parts import (
    BlockEntry,
    experts_by_number,
    fused_shared_expert,
    gate,
    if_set,
    merged,
    moe,
    of_family,
    shared,
    translated,
    with_shared,
)
from moe_ffn.hf.layouts import (
    gate_up_down,
    halves,
    linear,
    named,
    rows_of,
    transposed,
    zero_centered,
)
from moe_ffn.hf.options import HFConfig

# -- parts of entries

K = "=num_experts_per_tok"
INTERMEDIATE, MOE_INTERMEDIATE = ("=intermediate_size", "=moe_intermediate_size")
SOFTMAX = {"type": "top_k", "k": K}
RENORMALIZED = {**SOFTMAX, "renormalize": True}
SOFTMAX_OF_CHOSEN = {**SOFTMAX, "softmax": "after"}
SIGMOID = {"type": "sigmoid_top_k", "k": K}
BIASED = {**SIGMOID, "scale": "=routed_scaling_factor"}
BIASED_GROUPS = {**BIASED, "renormalize": "=norm_topk_prob", "groups": HFConfig.groups}
TRANSPOSED = {f"experts.{name}": transposed(f"experts.{name}_proj") for name in ("gate_up", "down")}
EPS = {"eps": "=rms_norm_eps"}
SCORE = translated("scoring_func", {"sigmoid": "sigmoid", "sqrtsoftplus": "sqrt_softplus"})
CLAMPED = {
    "type": translated("hidden_act", dict.fromkeys(("silu", "swish"), "clamped_swiglu")),
    "alpha": 1.0,
    "limit": "=swiglu_limit",
    "added": 0.0,
}


def step_experts(hf: HFConfig, option: str) -> dict[str, Any]:
    """Return the experts of Step-3.7's first layer; their `option` has each layer's limit, 0 for none."""
    limit = (hf[option] or [0])[0]
    gated = {**CLAMPED, "limit": limit, "clamp": "after"} if limit else {"type": "swiglu"}
    return {"d_ff": MOE_INTERMEDIATE, **gated}


# -- blocks that several models share

MIXTRAL = of_family("mixtral", "MixtralSparseMoeBlock").with_changes(in_training={})
DEEPSEEK = of_family("deepseek_v3", "DeepseekV3MoE")
QWEN2 = of_family("qwen2_moe", "Qwen2MoeSparseMoeBlock")
QWEN3 = of_family("qwen3_moe", "Qwen3MoeSparseMoeBlock")
OLMOE = of_family("olmoe", "OlmoeSparseMoeBlock")
GPT_OSS = of_family("gpt_oss", "GptOssMLP")
DEEPSEEK_V2 = BlockEntry(
    "DeepseekV2Moe",
    moe(
        {
            **SOFTMAX,
            "scale": "=routed_scaling_factor",
            "groups": lambda hf: (
                None
                if hf["topk_method"] == "greedy"
                else {"num_groups": hf["n_group"], "keep": hf["topk_group"], "score_top": 1}
            ),
        },
        count="n_routed_experts",
        shared_expert=shared("moe_intermediate_size", "n_shared_experts", bias="=mlp_bias"),
    ),
    supported={"topk_method": ("greedy", "group_limited_greedy")},
    # A group scores as its best expert, so two chosen groups always contain the best two experts.
    small={"topk_method": "group_limited_greedy", "topk_group": 1},
)
DEEPSEEK_V4 = BlockEntry(
    "DeepseekV4SparseMoeBlock",
    moe(
        {**BIASED, "score": SCORE},
        INTERMEDIATE,
        "num_local_experts",
        experts=CLAMPED,
        shared_expert={**CLAMPED, "d_ff": INTERMEDIATE, "bias": "=mlp_bias"},
    ),
    small={"mlp_layer_types": ["moe", "moe"]},
)
MISTRAL = BlockEntry(
    "MistralLarge4TextMoE",
    moe(
        {
            **SOFTMAX,
            "renormalize": True,
            "scale": "=routed_scaling_factor",
            "groups": HFConfig.groups,
        },
        count="n_routed_experts",
        shared_expert=shared("moe_intermediate_size", "n_shared_experts"),
    ),
)
GRANITE = BlockEntry(
    "GraniteMoeMoE",
    moe(SOFTMAX_OF_CHOSEN, INTERMEDIATE, "num_local_experts"),
    note="the decoder applies its residual multiplier",
)
GRANITE_LAYER = GRANITE.with_changes(
    options={"shared_expert": shared("shared_intermediate_size")},
    names={
        "experts.gate_up": named("block_sparse_moe.experts.gate_up_proj"),
        "experts.down": named("block_sparse_moe.experts.down_proj"),
        "router.projection.weight": named("block_sparse_moe.router.weight"),
        **fused_shared_expert("shared_mlp.input_linear", "shared_mlp.output_linear"),
    },
    unused=("self_attn.*", ".*layernorm.*", "mamba.*"),
)
GEMMA = BlockEntry(
    "Gemma4TextDecoderLayer",
    {
        "type": "normed",
        "output": EPS,
        "ffn": {
            "type": "moe",
            "num_experts": "=num_experts",
            "router": {
                "type": "top_k",
                "k": "=top_k_experts",
                "renormalize": True,
                "learned_scale": "expert",
                "input_norm": EPS,
                "logit_scale": lambda hf: hf["hidden_size"] ** -0.5,
            },
            "experts": {
                "type": "normed",
                "input": EPS,
                "output": EPS,
                "experts": {"type": gate("hidden_activation"), "d_ff": MOE_INTERMEDIATE},
            },
            "shared_expert": {
                "type": "normed",
                "input": EPS,
                "output": EPS,
                "ffn": {"type": gate("hidden_activation"), "d_ff": INTERMEDIATE},
            },
        },
    },
    {
        **gate_up_down("shared_expert.ffn", "mlp"),
        "router.input_norm.weight": named("router.scale"),
        "router.weight_scale": named("router.per_expert_scale"),
        **linear(
            router__projection="router.proj",
            experts__input="pre_feedforward_layernorm_2",
            experts__output="post_feedforward_layernorm_2",
            shared_expert__input="pre_feedforward_layernorm",
            shared_expert__output="post_feedforward_layernorm_1",
            output="post_feedforward_layernorm",
        ),
    },
    supported={"enable_moe_block": (True,)},
    small={"enable_moe_block": True, "top_k_experts": 2, "hidden_size_per_layer_input": 0},
    unused=("self_attn.*", "input_layernorm.*", "post_attention_layernorm.*", "layer_scalar"),
    note="the block reads the residual stream; the norm before the layer's FFN is the shared expert's",
)
SWITCH_FFN = moe(
    {"type": "top_k", "k": 1, "bias": "=router_bias", "jitter": "=router_jitter_noise"},
    "=d_ff",
    experts={"type": "mlp", "activation": "=dense_act_fn", "dropout": "=dropout_rate"},
    capacity={"per_sequence": "=expert_capacity"},
)
SWITCH = BlockEntry(
    "SwitchTransformersSparseMLP",
    SWITCH_FFN,
    experts_by_number("wi", "wo"),
    small={"expert_capacity": 2, "dropout_rate": 0.0},
    in_training=merged(SWITCH_FFN, {"jitter": "=router_jitter_noise", "router": {"jitter": 0.0}}),
    bug="in float32 its jitter multiplies the block's input in place and reaches the experts, but in "
    "the paper only the router's input has jitter (arXiv:2101.03961, appendix F)",
)
MINIMAX_GATE = {
    "type": "clamped_swiglu",
    "alpha": "=swiglu_alpha",
    "limit": "=swiglu_limit",
    "added": 1.0,
}
NEMOTRON_EXPERTS = {"type": "mlp", "activation": "relu_squared", "d_ff": MOE_INTERMEDIATE}

BLOCKS: dict[str, BlockEntry | str] = {
    "afmoe": BlockEntry(
        "AfmoeSparseMoeBlock",
        moe(
            {**SIGMOID, "scale": "=route_scale"},
            shared_expert=shared("moe_intermediate_size", "num_shared_experts"),
        ),
    ),
    "aria": BlockEntry(
        "AriaTextMoELayer",
        moe(
            {**SOFTMAX_OF_CHOSEN, "k": "=moe_topk"},
            INTERMEDIATE,
            "moe_num_experts",
            experts={"type": "swiglu"},
            shared_expert=shared("intermediate_size", "moe_num_shared_experts", bias="=mlp_bias"),
        ),
        TRANSPOSED,
    ),
    "axk1": DEEPSEEK.with_changes(
        class_name="AXK1MoE",
        ffn={"type": "normed", "output": EPS, "ffn": DEEPSEEK.ffn},
        names=linear(output="post_mlp_layernorm"),
    ),
    "axk2": DEEPSEEK.with_changes(
        class_name="AXK2MoE",
        bug="experts of other groups are masked by 0, not by -inf, so the router prefers them to experts "
        "whose score and bias add up to less than 0 (DeepSeek-V3, arXiv:2412.19437)",
    ),
    "bailing_hybrid": DEEPSEEK.with_changes(class_name="BailingHybridMoE"),
    "beam": BlockEntry("BeamMoE", moe(BIASED_GROUPS)),
    "cohere2_moe": BlockEntry(
        "Cohere2MoeSparseMoeBlock",
        moe(
            lambda hf: (
                SOFTMAX_OF_CHOSEN
                if hf["expert_selection_fn"] == "softmax"
                else {**SIGMOID, "renormalize": hf["norm_topk_prob"], "correction_bias": False}
            ),
            INTERMEDIATE,
            shared_expert=if_set(
                "num_shared_experts", shared("intermediate_size", "num_shared_experts")
            ),
            combine=lambda hf: (
                {"type": "average", "k": 1.0}
                if hf["num_shared_experts"]
                and hf["shared_expert_combination_strategy"] == "average"
                else {"type": "sum"}
            ),
        ),
        supported={
            "expert_selection_fn": ("softmax", "sigmoid"),
            "shared_expert_combination_strategy": ("average", "sum"),
        },
        small={"expert_selection_fn": "sigmoid"},
    ),
    "dbrx": BlockEntry(
        "DbrxFFN",
        moe(
            {
                "type": "top_k",
                "k": "=ffn_config.moe_top_k",
                "renormalize": lambda hf: hf["ffn_config.moe_normalize_expert_weights"] is not None,
                "renormalize_p": lambda hf: float(
                    hf["ffn_config.moe_normalize_expert_weights"] or 1
                ),
            },
            "=ffn_config.ffn_hidden_size",
            "ffn_config.moe_num_experts",
            experts={"type": gate("ffn_config.ffn_act_fn.name")},
            jitter="=ffn_config.moe_jitter_eps",
        ),
        {
            "experts.gate_up": halves("experts.mlp.w1", "experts.mlp.v1"),
            "experts.down": transposed("experts.mlp.w2"),
        },
        config_name="DbrxConfig",
        small={
            "ffn_config": {
                "hidden_size": 16,
                "ffn_hidden_size": 12,
                "moe_num_experts": 6,
                "moe_top_k": 2,
                "moe_normalize_expert_weights": 2.0,
                "moe_jitter_eps": 0.1,
            }
        },
        in_training={},
    ),
    "deepseek_ocr2": DEEPSEEK_V2.with_changes(class_name="DeepseekOcr2TextMoe"),
    "deepseek_v2": DEEPSEEK_V2.with_changes(
        note="transformers never reads `norm_topk_prob`, which is false in the published configs"
    ),
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32": DEEPSEEK.with_changes(class_name="DeepseekV32MoE"),
    "deepseek_v4": DEEPSEEK_V4,
    "deepseek_v4 hash": DEEPSEEK_V4.with_changes(
        {"router": {"correction_bias": False, "token_table": {"vocab_size": "=vocab_size"}}},
        names={"router.table_VK": named("gate.tid2eid")},
        small={"mlp_layer_types": ["hash_moe", "moe"]},
        note="used in the first layers only",
    ),
    "diffusion_gemma": GEMMA.with_changes(class_name="DiffusionGemmaDecoderTextLayer"),
    "diffusion_gemma encoder": GEMMA.with_changes(class_name="DiffusionGemmaEncoderTextLayer"),
    "doge": BlockEntry(
        "DogeCDMoE",
        moe(
            {"type": "product_key", "k": K, "d_query": 0},
            None,
            experts={"type": "single_neuron", "activation": "=hidden_act"},
            shared_expert=shared("intermediate_size", bias="=mlp_bias"),
        ),
        {
            "router.sub_keys": named("router_gate.weight"),
            "experts.up.weight": named("down_embed.weight"),
            "experts.down.weight": named("up_embed.weight"),
            **linear(
                shared_expert__gate="gate_proj",
                shared_expert__up="up_proj",
                shared_expert__down="down_proj",
            ),
        },
        supported={"norm_topk_prob": (False,)},
        small={"num_experts": 9},
        bug="with several tokens it confuses the token axis with the axis of the two key tables, so tokens "
        "get each other's experts. Ours treats every token as theirs treats a single token (CDMoE, "
        "arXiv:2412.11834)",
    ),
    "dots1": of_family("dots1", "Dots1MoE"),
    "dots3_note": DEEPSEEK.with_changes(
        {"shared_expert": shared("shared_experts_intermediate_size", "n_shared_experts")},
        class_name="Dots3NoteTextMoE",
    ),
    "dots3_note vision": BlockEntry(
        "Dots3NoteVisionMoE",
        moe({**SIGMOID, "scale": "=router_scaling_factor"}, count="num_local_experts"),
        small={"adapter_in_dim": 16, "mlp_layer_types": ["sparse"] * 2, "mlp_bias": False},
        note="block for image tokens; the number of experts per layer is in `per_layer_config`",
    ),
    "ernie4_5_moe": BlockEntry(
        "Ernie4_5_MoeSparseMoeBlock",
        moe(
            {**RENORMALIZED, "correction_bias": True},
            shared_expert=if_set(
                "moe_num_shared_experts",
                shared("moe_intermediate_size", "moe_num_shared_experts", bias="=use_bias"),
            ),
        ),
    ),
    "ernie4_5_vl_moe": BlockEntry(
        "Ernie4_5_VLMoeMoeBlock",
        moe(
            {**RENORMALIZED, "correction_bias": True},
            lambda hf: hf["moe_intermediate_size"][0],
            shared_expert={
                "type": gate(),
                "d_ff": lambda hf: hf["moe_intermediate_size"][0] * hf["moe_num_shared_experts"],
                "bias": "=use_bias",
            },
        ),
        {
            "experts.gate_up": named("text_moe.experts.gate_up_proj"),
            "experts.down": named("text_moe.experts.down_proj"),
            **linear(router__projection="text_moe.gate"),
            "router.correction_bias_E": named("text_moe.gate.moe_statics.e_score_correction_bias"),
        },
        small={"moe_intermediate_size": [12, 8]},
        unused=("vision_moe.*",),
        note="experts for text; images have separate experts of the same kind, another block here",
    ),
    "exaone_moe": BlockEntry(
        "ExaoneMoeSparseMoEBlock",
        moe(BIASED_GROUPS, shared_expert=shared("moe_intermediate_size", "num_shared_experts")),
    ),
    "flex_olmo": OLMOE.with_changes(class_name="FlexOlmoSparseMoeBlock"),
    "flint": BlockEntry(
        "FlintSparseMoeBlock",
        moe(
            {**SIGMOID, "renormalize": "=norm_topk_prob", "correction_bias": False},
            shared_expert=shared("shared_expert_intermediate_size"),
        ),
    ),
    "gemma4": GEMMA,
    "glm4_moe": of_family("glm4_moe", "Glm4MoeMoE"),
    "glm4_moe_lite": DEEPSEEK.with_changes(class_name="Glm4MoeLiteMoE"),
    "glm4v_moe": DEEPSEEK.with_changes(class_name="Glm4vMoeTextMoE"),
    "glm5_next": DEEPSEEK.with_changes(
        {"experts": CLAMPED, "shared_expert": CLAMPED}, class_name="Glm5NextTextMoE"
    ),
    "glm_moe_dsa": DEEPSEEK.with_changes(class_name="GlmMoeDsaMoE"),
    "gpt_oss": GPT_OSS,
    "granitemoe": GRANITE,
    "granitemoe_swa": GRANITE_LAYER.with_changes(class_name="GraniteMoeSWADecoderLayer"),
    "granitemoehybrid": GRANITE_LAYER.with_changes(
        class_name="GraniteMoeHybridDecoderLayer", small={"mamba_n_heads": 2, "mamba_d_head": 16}
    ),
    "granitemoeshared": GRANITE_LAYER.with_changes(class_name="GraniteMoeSharedDecoderLayer"),
    "hunyuan_v1_moe": BlockEntry(
        "HunYuanMoEV1Moe",
        moe(
            {**RENORMALIZED, "k": "=moe_topk"},
            INTERMEDIATE,
            shared_expert=shared("intermediate_size"),
        ),
    ),
    "hy_v3": BlockEntry(
        "HYV3MoE",
        moe(
            {**SIGMOID, "scale": "=router_scaling_factor"},
            shared_expert=shared("moe_intermediate_size", "num_shared_experts", bias="=mlp_bias"),
        ),
    ),
    "hy_v4": DEEPSEEK.with_changes(class_name="HYV4MoE", options={"experts": CLAMPED}),
    "inkling": BlockEntry(
        "InklingMoE",
        moe(
            {
                **SIGMOID,
                "scale": "=route_scale",
                "learned_scale": "global",
                "num_always": "=n_shared_experts",
            },
            num_experts=lambda hf: hf["n_routed_experts"] + hf["n_shared_experts"],
        ),
        {
            "router.weight_scale": named("gate.global_scale"),
            "router.correction_bias_E": with_shared("gate.e_score_correction_bias"),
            "experts.gate_up": with_shared(
                "experts.gate_up_proj", "shared_experts.gate_proj", "shared_experts.up_proj"
            ),
            "experts.down": with_shared("experts.down_proj", "shared_experts.down_proj"),
        },
        note="its shared experts are the last experts of our block (`num_always`)",
    ),
    "inkling2": BlockEntry(
        "Inkling2SparseMoeBlock",
        moe(
            {**BIASED, "score": SCORE},
            count="num_local_experts",
            experts={
                "type": "soft_capped_swiglu",
                "gate_cap": "=mlp_gate_softcap",
                "up_cap": "=mlp_up_softcap",
            },
        ),
    ),
    "jamba": BlockEntry("JambaSparseMoeBlock", moe(SOFTMAX, INTERMEDIATE)),
    "jetmoe": BlockEntry(
        "JetMoeMoE",
        {
            "type": "biased",
            "ffn": moe(
                SOFTMAX_OF_CHOSEN,
                INTERMEDIATE,
                "num_local_experts",
                experts={"type": gate("activation_function")},
            ),
        },
        {
            "experts.gate_up": named("input_linear.weight"),
            "experts.down": named("output_linear.weight"),
            "bias": named("bias"),
        },
        note="its mixture of attention heads is not a feed-forward block",
    ),
    "kimi_linear": DEEPSEEK.with_changes(class_name="KimiLinearMoE"),
    "kolibri1": BlockEntry(
        "Kolibri1SparseMoeBlock",
        moe(
            {**SIGMOID, "renormalize": "=norm_topk_prob", "select_by": "logit"},
            shared_expert=shared("shared_expert_intermediate_size"),
        ),
    ),
    "laguna": BlockEntry(
        "LagunaSparseMoeBlock",
        moe(
            {
                **SIGMOID,
                "scale": "=moe_routed_scaling_factor",
                "logit_cap": lambda hf: hf["moe_router_logit_softcapping"] or None,
            },
            shared_expert=shared("shared_expert_intermediate_size"),
        ),
    ),
    "lfm2_moe": BlockEntry(
        "Lfm2MoeSparseMoeBlock",
        moe(
            {
                **BIASED,
                "renormalize": "=norm_topk_prob",
                "renormalize_eps": lambda hf: 1e-6 if hf["norm_topk_prob"] else 0.0,
                "correction_bias": "=use_expert_bias",
            },
            experts={"type": "swiglu"},
        ),
    ),
    "llama4": BlockEntry(
        "Llama4TextMoe",
        moe(
            {**SIGMOID, "renormalize": False, "correction_bias": False},
            count="num_local_experts",
            experts={
                "type": "input_weighted",
                "d_ff": None,
                "experts": {"type": gate(), "d_ff": INTERMEDIATE},
            },
            shared_expert=shared("intermediate_size"),
        ),
        TRANSPOSED,
    ),
    "longcat_flash": BlockEntry(
        "LongcatFlashMoE",
        moe(
            {
                **SOFTMAX,
                "k": "=moe_topk",
                "scale": "=routed_scaling_factor",
                "bias": lambda hf: hf.get("router_bias", False),
                "correction_bias": True,
            },
            "=expert_ffn_hidden_size",
            "n_routed_experts",
            zero_computation=if_set("zero_expert_num", {"num_copy": "=zero_expert_num"}, {}),
        ),
        # Its remaining rows belong to zero-computation experts.
        {"experts.gate_up": rows_of("experts.gate_up_proj")},
    ),
    "mellum": QWEN3.with_changes(class_name="MellumSparseMoeBlock"),
    "mimo_v2_flash": BlockEntry("MiMoV2FlashMoE", moe(BIASED_GROUPS, count="n_routed_experts")),
    "minimax": MIXTRAL.with_changes(class_name="MiniMaxSparseMoeBlock"),
    "minimax_m2": BlockEntry(
        "MiniMaxM2SparseMoeBlock",
        moe(SIGMOID, INTERMEDIATE, "num_local_experts", jitter="=router_jitter_noise"),
        in_training={},
    ),
    "minimax_m3_vl": BlockEntry(
        "MiniMaxM3VLSparseMoeBlock",
        moe(
            BIASED,
            INTERMEDIATE,
            "num_local_experts",
            experts=MINIMAX_GATE,
            shared_expert={**MINIMAX_GATE, "d_ff": "=shared_intermediate_size"},
        ),
        fused_shared_expert("shared_experts.gate_up_proj", "shared_experts.down_proj"),
    ),
    "mistral4": MISTRAL.with_changes(
        {"router": {"renormalize": "=norm_topk_prob"}}, class_name="Mistral4MoE"
    ),
    "mistral_large4": MISTRAL,
    "mixtral": MIXTRAL,
    "muse_spark": BlockEntry(
        "MuseSparkMoE",
        moe(
            {**BIASED, "logit_scale": "=output_multiplier"},
            count="num_local_experts",
            experts={
                "type": "latent",
                "d_ff": None,
                "width": "=moe_hidden_size",
                "experts": {
                    "type": "normed",
                    "input": EPS,
                    "each": {"eps": "=post_norm_eps", "scale": "before"},
                    "experts": {"type": gate(), "d_ff": MOE_INTERMEDIATE},
                },
            },
        ),
        {
            **linear(experts__into="pre_expert_proj", experts__out_of="post_expert_proj"),
            "experts.experts.input.weight": zero_centered("pre_expert_norm.weight"),
            "experts.experts.each.weight": zero_centered("experts.post_expert_norm.weight"),
        },
    ),
    "nemotron_h": BlockEntry(
        "NemotronHMoE",
        moe(
            BIASED_GROUPS,
            count="n_routed_experts",
            experts=if_set(
                "moe_latent_size",
                {
                    "type": "latent",
                    "width": "=moe_latent_size",
                    "bias": "=mlp_bias",
                    "experts": NEMOTRON_EXPERTS,
                },
                NEMOTRON_EXPERTS,
            ),
            shared_expert={
                "type": "dense",
                "activation": "relu_squared",
                "d_ff": "=moe_shared_expert_intermediate_size",
                "bias": "=mlp_bias",
            },
        ),
        linear(experts__into="fc1_latent_proj", experts__out_of="fc2_latent_proj"),
        supported={"mlp_hidden_act": ("relu2",)},
    ),
    "nllb_moe": BlockEntry(
        "NllbMoeSparseMLP",
        moe(
            {"type": "top_k", "k": 2, "renormalize": True, "bias": "=router_bias"},
            "=encoder_ffn_dim",
            experts={
                "type": "mlp",
                "activation": "=activation_function",
                "bias": True,
                "dropout": "=activation_dropout",
            },
            capacity={
                "factor": 1.0,
                "drop": "choice",
                "renormalize": lambda hf: not hf["normalize_router_prob_before_dropping"],
            },
        ),
        experts_by_number("fc1", "fc2"),
        supported={
            "second_expert_policy": ("all",),
            "batch_prioritized_routing": (False,),
            "moe_eval_capacity_token_fraction": (1.0,),
        },
        small={"expert_capacity": 4},
        in_training={},
        note="compared with the paper's formula, computed with this model's experts and router, without "
        "token dropout, and with the paper's capacity 2 T / E (transformers uses the constant "
        "`expert_capacity`)",
        bug="it uses the 0/1 mask of first choices as expert indices, so that experts 0 and 1 "
        "compute every token and the other experts none. The paper sends a token to its two best experts "
        "(arXiv:2207.04672, section 6.2)",
    ),
    "olmoe": OLMOE,
    "openai_privacy_filter": GPT_OSS.with_changes(
        class_name="OpenAIPrivacyFilterMLP", names=TRANSPOSED
    ),
    "phimoe": BlockEntry(
        "PhimoeSparseMoeBlock",
        moe(
            {"type": "sparse_mixer", "k": 2, "threshold": lambda hf: 2 * hf["router_jitter_noise"]},
            INTERMEDIATE,
            "num_local_experts",
            jitter="=input_jitter_noise",
        ),
        supported={"num_experts_per_tok": (2,)},  # `sparsemixer` always chooses two
        small={"router_jitter_noise": 0.3, "input_jitter_noise": 0.0},
        note="compared in training without `jitter`",
        in_training={},
        bug="in training the router multiplies the tokens by noise a second time, in place, so that the "
        "experts see it too; the published model applies noise once",
    ),
    "qwen2_moe": QWEN2,
    "qwen3_5_moe": QWEN2.with_changes(
        {"router": {"renormalize": True}}, class_name="Qwen3_5MoeSparseMoeBlock"
    ),
    "qwen3_moe": QWEN3,
    "qwen3_next": QWEN2.with_changes(class_name="Qwen3NextSparseMoeBlock"),
    "qwen3_omni_moe": QWEN3.with_changes(
        class_name="Qwen3OmniMoeThinkerTextSparseMoeBlock", config_name="Qwen3OmniMoeTextConfig"
    ),
    "qwen3_omni_moe talker": QWEN2.with_changes(class_name="Qwen3OmniMoeTalkerTextSparseMoeBlock"),
    "qwen3_vl_moe": QWEN3.with_changes(
        {"router": {"renormalize": True}}, class_name="Qwen3VLMoeTextSparseMoeBlock"
    ),
    "qwen4_exp": QWEN2.with_changes(class_name="Qwen4ExpTextSparseMoeBlock"),
    "solar_open": DEEPSEEK.with_changes(class_name="SolarOpenMoE"),
    "step3p7": BlockEntry(
        "Step3p7SparseMoeBlock",
        moe(
            {**SIGMOID, "scale": "=moe_router_scaling_factor"},
            count="num_local_experts",
            experts=lambda hf: step_experts(hf, "swiglu_limits"),
            shared_expert=lambda hf: {
                **step_experts(hf, "swiglu_limits_shared"),
                "d_ff": "=share_expert_dim",
                "bias": "=mlp_bias",
            },
        ),
        supported={"hidden_act": ("silu", "swish")},
        small={
            "swiglu_limits": [0.5, 0.5],
            "swiglu_limits_shared": [0.3, 0.3],
            "share_expert_dim": 20,
        },
    ),
    "switch_transformers": SWITCH,
    "unlimited_ocr": DEEPSEEK_V2.with_changes(class_name="UnlimitedOcrTextMoe"),
    "vitpose_backbone": "it has no router: the data set of an image chooses its expert, which computes a "
    "part of the output's units",
    "zaya": "from its second layer on, the router adds the output of the previous layer's router, which a "
    "block here does not see; the first layer is `zaya first`",
    "zaya first": BlockEntry(
        "ZayaSparseMoeBlock",
        moe(
            {
                **SOFTMAX,
                "correction_bias": True,
                "mlp": {"width": "=router_hidden_size", "depth": 2, "eps": "=rms_norm_eps"},
            },
            zero_computation={"num_zero": 1},
        ),
        linear(
            router__mlp__into="gate.down_proj",
            router__mlp__norm="gate.router_mlp.norm",
            router__mlp__layers__0="gate.router_mlp.fc1",
            router__mlp__layers__1="gate.router_mlp.fc2",
            router__projection="gate.router_mlp.out_proj",
        ),
        small={"num_experts_per_tok": 1},
        note="used in the first layer only",
    ),
}
"""Model (and block, if it has several) -> its entry, or the reason why none of our blocks matches."""

NO_BLOCK = {
    "bamba": "dense: it sets the number of its experts to 1",
    "granite_docling": "its router weighs tiles of an image",
}
"""Models whose files mention experts or routers but have no sparse feed-forward block -> reason."""
