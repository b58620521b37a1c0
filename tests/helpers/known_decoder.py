"""Decoders of one layer, made by hand so that what their units and routers do is known; texts for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_ffn import DecoderConfig
from moe_ffn.data.tokenizer import BytesConfig
from moe_ffn.model.decoder import Decoder
from moe_ffn.report.inspect import TokenizedText, text_of_tokens

BYTES = BytesConfig().build([])
D, S = 32, 16


def random_text(letters: bytes, size: int = 4000, seq_len: int = S) -> TokenizedText:
    ids = np.random.default_rng(0).choice(list(letters), size)
    return text_of_tokens(np.append(ids, BYTES.end_of_document), BYTES, seq_len, size)


def decoder_of(ffn: Any, letters: bytes, **config: Any) -> Decoder:
    """Decoder of one layer with one axis per letter and an attention that adds nothing."""
    torch.manual_seed(0)
    options = {"d_model": D, "num_layers": 1, "tie_embeddings": False, "ffn": ffn} | config
    options.setdefault("attention", {"num_heads": 2})
    decoder: Any = DecoderConfig.model_validate(options).build(BYTES.vocab_size, 64).eval()
    with torch.no_grad():
        for layer in decoder.layers:
            layer.attention.output.weight.zero_()
        decoder.embedding.weight.zero_()
        decoder.unembedding.weight.zero_()
        for place, letter in enumerate(letters):
            decoder.embedding.weight[letter, place] = 1
            decoder.unembedding.weight[letter, place] = 1
    return decoder


LETTERS = b"abcdef"


def axis(letter: str, sign: float = 1.0) -> Tensor:
    return sign * torch.eye(D)[LETTERS.index(letter.encode())]
