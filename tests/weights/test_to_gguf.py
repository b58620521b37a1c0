"""What is written for llama.cpp; `test_clients.py` runs it there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ffn import ConfigError
from moe_ffn.data.tokenizer import BPETokenizer, BytesTokenizer, train_bpe
from moe_ffn.weights import export_gguf
from tests.weights.test_to_transformers import ATTENTION, HEAD_NORMS, decoder_of, moe

TEXT = b"the cat sat on the mat, the cat sat" * 9


def test_weights_are_in_the_dtype_of_the_model_and_vectors_and_routers_in_float32(
    tmp_path: Path,
) -> None:
    gguf = pytest.importorskip("gguf")
    decoder = decoder_of(ffn=moe(router__renormalize=True)).bfloat16()

    export_gguf(decoder, tmp_path / "new/model.gguf", train_bpe([TEXT], 512))

    reader = gguf.GGUFReader(tmp_path / "new/model.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    kinds = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
    assert {name for name, kind in kinds.items() if kind == "F32"} == {
        "output_norm.weight",
        *(
            f"blk.{i}.{name}.weight"
            for i in range(3)
            for name in ("attn_norm", "ffn_norm", "ffn_gate_inp")
        ),
    }
    assert set(kinds.values()) == {"F32", "BF16"}
    down = torch.from_numpy(tensors["blk.2.ffn_down_exps.weight"].data.copy()).view(torch.bfloat16)
    assert torch.equal(down, decoder.state_dict()["layers.2.ffn.experts.down"])


MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "router": (
        {"attention": HEAD_NORMS, "ffn": moe()},
        "llama.cpp requires ffn.router.renormalize: true in qwen3_moe; train with that",
    ),
    "window": (
        {"attention": {**ATTENTION, "window": 7}},
        "llama.cpp requires attention.window: null in mistral; train with that",
    ),
}


@pytest.mark.parametrize(("options", "message"), MODELS.values(), ids=MODELS)
def test_what_llama_cpp_would_compute_differently_is_not_written(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    pytest.importorskip("gguf")
    with pytest.raises(ConfigError) as caught:
        export_gguf(decoder_of(**options), tmp_path / "model.gguf", BytesTokenizer())
    assert str(caught.value) == message
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_with_another_splitting_rule_is_not_written(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    definition = json.loads(json.dumps(train_bpe([TEXT], 512).to_hugging_face()))
    definition["pre_tokenizer"]["use_regex"] = False
    digits = {"type": "Digits", "individual_digits": True}
    both = {"type": "Sequence", "pretokenizers": [digits, definition["pre_tokenizer"]]}
    for splitting in (definition["pre_tokenizer"], both):
        tokenizer = BPETokenizer({**definition, "pre_tokenizer": splitting})
        with pytest.raises(
            ConfigError, match="BPE that splits text as GPT-2 does; this tokenizer has"
        ):
            export_gguf(decoder_of(), tmp_path / "model.gguf", tokenizer)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"^a \.gguf file needs gguf: pip install gguf$"):
        export_gguf(decoder_of(), tmp_path / "model.gguf", BytesTokenizer())
