"""Distillation: a run learns from its text and from the predictions of a trained model, the teacher.

The predictions come from the teacher itself, or from a file of its likeliest next tokens: its stored answers.

B batch, S sequence, V vocabulary, N likeliest tokens, T tokens
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moe_ffn.config.base import Config
from moe_ffn.config.errors import ConfigError
from moe_ffn.config.files import kind_of, replacing
from moe_ffn.data.tokenizer import Tokenizer
from moe_ffn.model.decoder import Decoder

ANSWERS_SUFFIX = ".safetensors"
"""Suffix of a file of stored answers; a teacher without it is a folder."""


class DistillConfig(Config, frozen=True):
    """A teacher and the weight of its predictions in the objective (Hinton et al. 2015, arXiv:1503.02531).

    The objective becomes (1 - weight) * cross-entropy + weight * distillation loss + balancing losses.
    """

    teacher: str = Field(min_length=1)
    """Folder of a model or a run of any architecture with the same tokenizer, or a file of its likeliest next
    tokens (`moe-ffn evaluate --store-answers`)."""
    weight: float = Field(default=0.5, gt=0, le=1)
    """Weight of the distillation loss, from 0 to 1; 1 ignores the next tokens of the text."""
    temperature: float = Field(default=1.0, ge=0.01, le=100)
    """Divisor of the logits of teacher and student; above 1, unlikely tokens count more."""

    @property
    def is_stored(self) -> bool:
        """True if the teacher is a file of stored answers instead of a folder."""
        return self.teacher.endswith(ANSWERS_SUFFIX)


def distillation_loss(
    logits_BSV: Tensor,
    teacher_logits_BSV: Tensor,
    is_predicted_BS: Tensor,
    temperature: float = 1.0,
) -> Tensor:
    """Return temperature^2 * KL(teacher || student) in nats per predicted token, in float32 or wider.

    The factor temperature^2 keeps the size of the gradient when the temperature changes (Hinton et al. 2015,
    section 2). The teacher's logits get no gradient. Only positions in `is_predicted_BS` count.
    """
    dtype = torch.promote_types(logits_BSV.dtype, torch.float32)

    def log_probs(logits_BSV: Tensor) -> Tensor:
        return (logits_BSV[is_predicted_BS].to(dtype) / temperature).log_softmax(-1)

    ours, theirs = log_probs(logits_BSV), log_probs(teacher_logits_BSV.detach())
    return temperature**2 * (theirs.exp() * (theirs - ours)).sum(-1).mean()


@dataclass(frozen=True)
class DecoderTeacher:
    """A trained decoder in evaluation mode."""

    decoder: Decoder
    temperature: float = 1.0

    def loss(
        self, logits_BSV: Tensor, ids_BS: Tensor, starts_B: Tensor | None, predicted_BS: Tensor
    ) -> Tensor:
        """Return the `distillation_loss` of a student's logits for these input ids."""
        with torch.no_grad():
            theirs_BSV = self.decoder(ids_BS).logits
        return distillation_loss(logits_BSV, theirs_BSV, predicted_BS, self.temperature)


# -- stored answers


@dataclass(frozen=True)
class Answers:
    """A teacher's N likeliest next tokens at some positions (...), and the probability of all others."""

    token_ids: Tensor
    """(..., N) int32."""
    log_probs: Tensor
    """(..., N)"""
    log_rest: Tensor
    """(...), logarithm of the total probability of all other tokens; -inf for N = V."""

    @classmethod
    def of(cls, logits_TV: Tensor, top: int) -> Answers:
        """Return the `top` likeliest tokens of each row of logits."""
        log_probs_TV = logits_TV.float().log_softmax(-1)
        log_probs_TN, token_ids_TN = log_probs_TV.topk(top)
        log_rest_T = log_probs_TV.scatter(-1, token_ids_TN, -torch.inf).logsumexp(-1)
        return cls(token_ids_TN.int(), log_probs_TN, log_rest_T)


def stored_distillation_loss(
    logits_BSV: Tensor, answers: Answers, is_predicted_BS: Tensor
) -> Tensor:
    """Return KL(teacher || student) over the N stored tokens and one bin for all others, in nats per token.

    sum_i p_i (log p_i - log q_i) + p_rest (log p_rest - log q_rest), where q_rest is the student's
    probability of all other tokens. It is at most the divergence over the whole vocabulary, and equal to it
    for N = V. Only positions in `is_predicted_BS` count.
    """
    dtype = torch.promote_types(logits_BSV.dtype, torch.float32)
    log_q_TV = logits_BSV[is_predicted_BS].to(dtype).log_softmax(-1)
    ids_TN = answers.token_ids[is_predicted_BS].long()
    log_p_TN = answers.log_probs[is_predicted_BS].to(dtype)
    loss_T = (log_p_TN.exp() * (log_p_TN - log_q_TV.gather(-1, ids_TN))).sum(-1)
    if ids_TN.shape[-1] < log_q_TV.shape[-1]:
        log_rest_T = answers.log_rest[is_predicted_BS].to(dtype)
        log_q_rest_T = log_q_TV.scatter(-1, ids_TN, -torch.inf).logsumexp(-1)
        loss_T = loss_T + log_rest_T.exp() * (log_rest_T - log_q_rest_T)
    return loss_T.mean()


def digests_of(tokenizer: Tokenizer, tokens: Any) -> dict[str, str]:
    """Return sha256 digests of a tokenizer and of a text's token ids, which `write_answers` stores."""
    digest = hashlib.sha256()
    for first in range(0, len(tokens), 1 << 20):
        digest.update(np.ascontiguousarray(tokens[first : first + (1 << 20)], "<u4").data)
    vocabulary = hashlib.sha256(repr(tokenizer.token_bytes).encode())
    return {"tokenizer": vocabulary.hexdigest(), "tokens": digest.hexdigest()}


def write_answers(
    path: Path, num_positions: int, top: int, about: Mapping[str, str], parts: Iterable[Answers]
) -> None:
    """Write answers (T, N) at consecutive positions to a safetensors file, which appears when it is complete.

    Parts save memory; they have `num_positions` positions in total. `about`, strings for the file's header,
    includes `digests_of`.
    """
    kinds = {"token_ids": ("I32", [top]), "log_probs": ("F32", [top]), "log_rest": ("F32", [])}
    header: dict[str, Any] = {"__metadata__": dict(about)}
    ends = [0]
    for name, (dtype, row) in kinds.items():
        ends.append(ends[-1] + 4 * num_positions * math.prod(row))
        header[name] = {"dtype": dtype, "shape": [num_positions, *row], "data_offsets": ends[-2:]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        places = [8 + len(text) + end for end in ends]
        for part in parts:
            for index, values in enumerate(astuple(part)):
                file.seek(places[index])
                places[index] += file.write(values.cpu().numpy().tobytes())


class StoredAnswers:
    """A memory-mapped file with the answers of a teacher at each position of a training split."""

    def __init__(self, path: Path, option: str) -> None:
        """Open the file that `option` names; ConfigError if it holds no stored answers."""
        from safetensors import SafetensorError, safe_open  # only stored answers need the package

        self.path, self.option = path, option
        make = "write one with moe-ffn evaluate RUN --store-answers FILE"
        if kind_of(path) != "a file":
            raise ConfigError(f"{option}: '{path}' is {kind_of(path) or 'not there'}; {make}")
        try:
            file = safe_open(path, framework="pt")
            self._rows = [file.get_slice(field.name) for field in fields(Answers)]
            self.about: dict[str, str] = dict(file.metadata())
            self.num_positions, self.top = self._rows[0].get_shape()
        except (SafetensorError, TypeError, ValueError) as error:  # no metadata, or another shape
            raise ConfigError(f"{option}: '{path}' holds no stored answers; {make}") from error

    @property
    def sha256(self) -> str:
        """Digest of everything that determines the answers: teacher, text, tokenizer and options."""
        return hashlib.sha256(json.dumps(self.about, sort_keys=True).encode()).hexdigest()

    def require_text(self, tokenizer: Tokenizer, tokens: Any) -> None:
        """Raise ConfigError unless the answers were stored for this text and tokenizer."""
        now = digests_of(tokenizer, tokens)
        for key, what in {
            "tokenizer": "with another tokenizer than data.tokenizer",
            "tokens": f"for another training split of {self.num_positions + 1:,} tokens; this run has "
            f"{len(tokens):,}",
        }.items():
            if (stored := self.about.get(key, "none")) != now[key]:
                raise ConfigError(
                    f"{self.option}: the answers in '{self.path}' were stored {what} (sha256 {stored[:12]}, "
                    f"not {now[key][:12]}); store them again with the --data options of this run"
                )

    def loss(
        self, logits_BSV: Tensor, ids_BS: Tensor, starts_B: Tensor | None, predicted_BS: Tensor
    ) -> Tensor:
        """Return the `stored_distillation_loss` of a student's logits; `starts_B` is as in `LoadedBatch`."""
        assert starts_B is not None
        answers = self.at(starts_B, ids_BS.shape[1])
        return stored_distillation_loss(logits_BSV, answers, predicted_BS)

    def at(self, starts_B: Tensor, seq_len: int) -> Answers:
        """Return the answers (B, S, N) for windows of `seq_len` tokens, on the device of `starts_B`."""
        starts = starts_B.tolist()
        windows = ([rows[start : start + seq_len] for start in starts] for rows in self._rows)
        return Answers(*(torch.stack(values).to(starts_B.device) for values in windows))


Teacher = DecoderTeacher | StoredAnswers
"""Predictions from which a run learns in addition to its text."""
