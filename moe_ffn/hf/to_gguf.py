"""Export our decoder to a GGUF file, which llama.cpp and programs around it read.

    moe_ffn.hf.export_gguf(decoder, "model.gguf", tokenizer)

The converter of llama.cpp cannot do this: it recognises a tokenizer by a hash of the ids of a text, and
therefore rejects every new vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from moe_ffn.config.errors import ConfigError, import_optional, show
from moe_ffn.config.files import make_folder, replacing
from moe_ffn.data.tokenizer import Tokenizer
from moe_ffn.hf.options import Options
from moe_ffn.hf.to_transformers import Export, choose_architecture, hf_tensors, require_absent
from moe_ffn.model.attention import AttentionConfig
from moe_ffn.model.decoder import Decoder
from moe_ffn.model.positions import RotaryConfig, RotaryScalingConfig, YarnConfig, yarn_mscale
from moe_ffn.weights.pretrained import naming_failures

SUFFIX = ".gguf"

_KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
"""Name of a weight of one expert in transformers; a GGUF file has one tensor for all experts."""

_EXPERTS = re.compile(r"(.+\.experts)\.(gate_up|down)_proj(_bias)?")
"""Name of a weight or bias of all experts in transformers, as in GPT-OSS."""


def export_gguf(decoder: Decoder, path: str | Path, tokenizer: Tokenizer) -> Export:
    """Write a decoder as a GGUF file, in its own dtype; vectors and routers are float32.

    Raises:
        ConfigError: llama.cpp cannot compute this model or its tokens, `path` exists or cannot be written, or
            the gguf package is not installed; nothing is written.
    """
    path = Path(path).absolute()
    gguf = import_optional("gguf", f"a {SUFFIX} file needs gguf")
    export = choose_architecture(decoder, has_tokenizer=True)
    llama = export.family.llama_cpp
    if problem := llama.problem(export.ours):
        raise ConfigError(
            f"llama.cpp requires {problem} in {export.family.model_type}; train with that"
        )
    writer = gguf.GGUFWriter(None, llama.architecture)
    _add_options(gguf, writer, export, decoder.max_seq_len)
    _add_tokenizer(writer, tokenizer, decoder.embedding.num_embeddings)
    tensors = _tensors(gguf, decoder, export)
    for name, tensor in tensors.items():
        value = tensor()
        kind = gguf.GGMLQuantizationType[_KINDS[value.dtype]]
        array = value.view(torch.uint8).numpy()
        writer.add_tensor_info(name, array.shape, array.dtype, array.nbytes, kind)
    with naming_failures(path, "written", "make room, or fix its permissions"):
        require_absent(path, "file")
        make_folder(path.parent)
        with replacing(path) as file:
            writer.fout, writer.state = [file], gguf.gguf_writer.WriterState.EMPTY
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor in tensors.values():
                writer.write_tensor_data(tensor().view(torch.uint8).numpy())
    return export


def _add_options(gguf: Any, writer: Any, export: Export, max_seq_len: int) -> None:
    ours, theirs = export.ours, export.options
    writer.add_block_count(ours["num_layers"])
    writer.add_context_length(max_seq_len)
    writer.add_embedding_length(ours["d_model"])
    writer.add_head_count(ours["attention.num_heads"])
    _add_attention(writer, export, max_seq_len)
    writer.add_rope_freq_base(theirs["rope_theta"])
    _add_scaling(gguf, writer, _rotary(export).scaling, export.config.model.attention)
    writer.add_layer_norm_rms_eps(theirs["rms_norm_eps"])
    writer.add_feed_forward_length(theirs["intermediate_size"])
    if ours["sparse_layers"]:
        writer.add_expert_count(ours["sparse.num_experts"])
        writer.add_expert_used_count(ours["sparse.router.k"])
    if export.family.has_experts_in_one_tensor:
        writer.add_expert_feed_forward_length(theirs["intermediate_size"])
    if "moe_intermediate_size" in theirs:
        writer.add_expert_feed_forward_length(theirs["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in theirs:
        writer.add_expert_shared_feed_forward_length(theirs["shared_expert_intermediate_size"])
    if ours.get("sparse.router.type") == "sigmoid_top_k":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_shared_count(theirs["n_shared_experts"])
        writer.add_leading_dense_block_count(theirs["first_k_dense_replace"])
        writer.add_expert_weights_norm(theirs["norm_topk_prob"])
        writer.add_expert_weights_scale(theirs["routed_scaling_factor"])
        if theirs["topk_group"] < theirs["n_group"]:
            writer.add_expert_group_count(theirs["n_group"])
            writer.add_expert_group_used_count(theirs["topk_group"])


def _add_attention(writer: Any, export: Export, max_seq_len: int) -> None:
    ours, model = export.ours, export.config.model
    attention, head_dim = model.attention, ours["attention.head_dim"]
    rotated_dim = _rotary(export).rotated_width(attention.rotated_width(model.d_model))
    writer.add_rope_dimension_count(rotated_dim)
    if (latent := attention.latent) is None:
        writer.add_head_count_kv(ours["attention.num_kv_heads"])
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    else:  # all heads read one key, the latent vector and the rotated key, and project it later
        writer.add_head_count_kv(1)
        writer.add_key_length(latent.kv_rank + rotated_dim)
        writer.add_value_length(latent.kv_rank)
        writer.add_key_length_mla(head_dim + rotated_dim)
        writer.add_value_length_mla(ours["attention.latent.value_dim"])
        writer.add_kv_lora_rank(latent.kv_rank)
        writer.add_q_lora_rank(latent.query_rank or 0)
    if attention.sinks:  # llama.cpp needs a layer with a window
        windows = model.layer_windows() if attention.window else [max_seq_len] * model.num_layers
        writer.add_sliding_window(attention.window or max_seq_len)
        writer.add_sliding_window_pattern([window is not None for window in windows])


def _rotary(export: Export) -> RotaryConfig:
    return cast("RotaryConfig", export.config.model.positions)


def _add_scaling(
    gguf: Any, writer: Any, scaling: RotaryScalingConfig | None, attention: AttentionConfig
) -> None:
    if scaling is None or scaling.type == "llama3":  # a tensor holds the frequencies of llama3
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType(scaling.type))
    writer.add_rope_scaling_factor(scaling.factor)
    if isinstance(scaling, YarnConfig):
        writer.add_rope_scaling_orig_ctx_len(scaling.original())
        if attention.latent is not None and scaling.score_mscale:
            # A tenth, because llama.cpp divides it by a tenth for this architecture.
            writer.add_rope_scaling_yarn_log_mul(0.1 * scaling.score_mscale)
        else:
            # llama.cpp multiplies by YaRN's own factor.
            writer.add_rope_scaling_attn_factors(scaling.magnitude / yarn_mscale(scaling.factor))


def _add_tokenizer(writer: Any, tokenizer: Tokenizer, vocab_size: int) -> None:
    """Add a byte-level BPE; ConfigError if it splits text by another rule than GPT-2."""
    definition = tokenizer.to_hugging_face() or {}
    splitting = definition.get("pre_tokenizer") or {}
    model = definition.get("model", {})
    merges = model.get("merges")
    if splitting.get("type") != "ByteLevel" or (merges and not splitting.get("use_regex", True)):
        raise ConfigError(
            f"a {SUFFIX} file needs a byte-level BPE that splits text as GPT-2 does; this tokenizer has "
            f"pre_tokenizer {show(splitting.get('type'))}"
        )
    end = tokenizer.end_of_document
    tokens = {index: token for token, index in model["vocab"].items()}
    tokens |= {token["id"]: token["content"] for token in definition.get("added_tokens", ())}
    normal, control, unused = 1, 3, 5
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens.get(index, f"[PAD{index}]") for index in range(vocab_size)])
    writer.add_token_types(
        [control if i == end else normal if i in tokens else unused for i in range(vocab_size)]
    )
    pairs = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    # llama.cpp needs at least one; no text has this pair.
    writer.add_token_merges(pairs or [f"{tokens[end]} {tokens[end]}"])
    writer.add_add_bos_token(False)
    for add in (writer.add_eos_token_id, writer.add_pad_token_id, writer.add_bos_token_id):
        add(end)


def _tensors(gguf: Any, decoder: Decoder, export: Export) -> dict[str, Callable[[], Tensor]]:
    """Return functions that make the tensors of the file, by name."""
    ours, name_in_file = export.ours, export.family.llama_cpp.architecture
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == name_in_file)
    names = gguf.get_tensor_name_map(architecture, ours["num_layers"])
    heads: dict[str, int] = {}
    if name_in_file == "llama":  # rotates neighbouring units, as in DeepSeek-V3
        heads["q_proj"] = ours["attention.num_heads"]
        heads["k_proj"] = ours["attention.num_kv_heads"]
    parts: dict[str, list[Callable[[], Tensor]]] = {}
    listed: set[str] = set()
    for name, make in hf_tensors(decoder, export)[1].items():
        if match := _EXPERT.fullmatch(name):
            listed.add(name := f"{match[1]}.{match[3]}")
        for part, make_part in _split(name, make, ours):
            parts.setdefault(part, []).append(make_part)

    def tensor(name: str) -> Tensor:
        made = [make() for make in parts[name]]
        value = torch.stack(made) if name in listed else made[0]
        if (count := heads.get(name.split(".")[-2])) is not None:
            value = value.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
        is_small = value.ndim == 1 or re.search(
            r"mlp\.(gate|router)\.|moe\.gate\.|expert_gate\.|bias$", name
        )
        dtype = torch.float32 if is_small or value.dtype == torch.float64 else value.dtype
        return value.to(dtype).contiguous()

    tensors: dict[str, Callable[[], Tensor]] = {
        names.get_name(name, try_suffixes=(".weight", ".bias")): partial(tensor, name)
        for name in parts
    }
    scaling = _rotary(export).scaling
    if scaling is not None and scaling.type == "llama3":
        frequencies_F = _rotary(export).frequencies(ours["attention.head_dim"])
        divisors_F = frequencies_F / scaling.scale(frequencies_F, ours["positions.base"])
        tensors["rope_freqs.weight"] = lambda: divisors_F.float()
    return tensors


def _split(
    name: str, make: Callable[[], Tensor], ours: Options
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield names and makers of the tensors in which llama.cpp stores one of transformers."""
    if name.endswith("kv_b_proj.weight"):  # of keys, transposed, and of values, by head
        heads, key_dim = ours["attention.num_heads"], ours["attention.head_dim"]
        yield name.replace("kv_b", "k_b"), lambda: make().unflatten(0, (heads, -1))[:, :key_dim].mT
        yield name.replace("kv_b", "v_b"), lambda: make().unflatten(0, (heads, -1))[:, key_dim:]
    elif match := _EXPERTS.fullmatch(name):  # rows of gate and up alternate
        experts, stem, bias = match.groups()
        kind = "bias" if bias else "weight"
        made = make if bias else lambda: make().mT
        for i, half in enumerate(("gate", "up") if stem == "gate_up" else ()):
            yield f"{experts}.{half}_proj.{kind}", lambda i=i: made()[:, i::2]
        if stem == "down":
            yield f"{experts}.down_proj.{kind}", made
    elif name.endswith("sinks"):
        yield f"{name}.weight", make
    else:
        yield name.replace("score_correction_bias", "score_correction.bias"), make
