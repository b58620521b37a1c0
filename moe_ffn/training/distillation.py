"""Distillation: a trained model, the teacher, whose predictions a run learns beside the text.

B batch, S sequence, V vocabulary, P positions of a text, N likeliest tokens, T tokens of a batch
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moe_ffn.config.base import Config
from moe_ffn.config.errors import ConfigError
from moe_ffn.data.tokenizer import Tokenizer
from moe_ffn.files import kind_of

ANSWERS_SUFFIX = ".safetensors"
"""End of the name of a file of stored answers; other teachers are folders."""


class DistillConfig(Config, frozen=True):
    """A teacher, and the share of its predictions in the objective (Hinton et al. 2015, arXiv:1503.02531).

    The objective becomes (1 - weight) * cross-entropy + weight * distillation loss + balancing losses.
    """

    teacher: str = Field(min_length=1)
    """Folder of a model or a run with the same tokenizer, of any architecture; or a file of its stored
    answers (`moe-ffn evaluate --store-answers`)."""
    weight: float = Field(default=0.5, gt=0, le=1)
    """Share of the distillation loss; 1 leaves the text's own next tokens out."""
    temperature: float = Field(default=1.0, ge=0.01, le=100)
    """Divisor of the logits of teacher and student; above 1, unlikely tokens count for more."""


def distillation_loss(
    logits_BSV: Tensor,
    teacher_logits_BSV: Tensor,
    is_predicted_BS: Tensor,
    temperature: float = 1.0,
) -> Tensor:
    """Return temperature^2 * KL(teacher || student) in nats per predicted token, in float32 or wider.

    The square keeps the size of the gradient when the temperature changes (Hinton et al. 2015, section 2).

    Args:
        teacher_logits_BSV: logits of the teacher, which get no gradient.
        is_predicted_BS: true at the positions whose next token counts.
    """
    dtype = torch.promote_types(logits_BSV.dtype, torch.float32)

    def log_probs(logits_BSV: Tensor) -> Tensor:
        return (logits_BSV[is_predicted_BS].to(dtype) / temperature).log_softmax(-1)

    ours, theirs = log_probs(logits_BSV), log_probs(teacher_logits_BSV.detach())
    return temperature**2 * (theirs.exp() * (theirs - ours)).sum(-1).mean()


# -- stored answers


@dataclass(frozen=True)
class Answers:
    """A teacher's likeliest next tokens at some positions (...), and the probability of all others."""

    token_ids: Tensor
    """(..., N) int32."""
    log_probs: Tensor
    """(..., N)"""
    log_rest: Tensor
    """(...), logarithm of the sum of the other probabilities; -inf for N = V."""

    @classmethod
    def of(cls, logits_TV: Tensor, top: int) -> Answers:
        """Return the `top` likeliest tokens of each row."""
        log_probs_TV = logits_TV.float().log_softmax(-1)
        log_probs_TN, token_ids_TN = log_probs_TV.topk(top)
        log_rest_T = log_probs_TV.scatter(-1, token_ids_TN, -torch.inf).logsumexp(-1)
        return cls(token_ids_TN.int(), log_probs_TN, log_rest_T)


def stored_distillation_loss(
    logits_BSV: Tensor, answers: Answers, is_predicted_BS: Tensor
) -> Tensor:
    """Return KL(teacher || student) over the N stored tokens and one bin for all others, in nats per token.

    sum_i p_i (log p_i - log q_i) + p_rest (log p_rest - log q_rest), with q_rest the sum of the student's
    other probabilities. It is at most the divergence over the vocabulary, and equal to it for N = V.

    Args:
        is_predicted_BS: true at the positions whose next token counts.
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
    """Return sha256 digests of a tokenizer and of the token ids of a text, for `write_answers`."""
    digest = hashlib.sha256()
    for first in range(0, len(tokens), 1 << 20):
        digest.update(np.ascontiguousarray(tokens[first : first + (1 << 20)], "<u4").data)
    vocabulary = hashlib.sha256(repr(tokenizer.token_bytes).encode())
    return {"tokenizer": vocabulary.hexdigest(), "tokens": digest.hexdigest()}


def write_answers(
    path: Path, num_positions: int, top: int, about: Mapping[str, str], parts: Iterable[Answers]
) -> None:
    """Write a safetensors file part by part, in little memory; it appears atomically.

    Args:
        about: strings to store in its header, with those of `digests_of`.
        parts: answers at consecutive positions, (T, N), in order; `num_positions` in total.
    """
    kinds = {"token_ids": ("I32", [top]), "log_probs": ("F32", [top]), "log_rest": ("F32", [])}
    header: dict[str, Any] = {"__metadata__": dict(about)}
    ends = [0]
    for name, (dtype, row) in kinds.items():
        ends.append(ends[-1] + 4 * num_positions * math.prod(row))
        header[name] = {"dtype": dtype, "shape": [num_positions, *row], "data_offsets": ends[-2:]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            places = [8 + len(text) + end for end in ends]
            for part in parts:
                for index, values in enumerate(astuple(part)):
                    file.seek(places[index])
                    places[index] += file.write(values.cpu().numpy().tobytes())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


class StoredAnswers:
    """Answers of a teacher at each position of a training split, read from a file when they are needed."""

    def __init__(self, path: Path, option: str) -> None:
        """Open a file.

        Args:
            option: option that names the file, for messages.

        Raises:
            ConfigError: it is not a file of stored answers.
        """
        self.path, self.option = path, option
        make = "write one with moe-ffn evaluate RUN --store-answers FILE"
        if kind_of(path) != "a file":
            raise ConfigError(f"{option}: '{path}' is {kind_of(path) or 'not there'}; {make}")
        try:
            with path.open("rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(min(size, 1 << 20)))
            self.about: dict[str, str] = header["__metadata__"]
            self._rows = [
                np.memmap(
                    path,
                    dtype,
                    "r",
                    8 + size + header[name]["data_offsets"][0],
                    tuple(header[name]["shape"]),
                )
                for name, dtype in (("token_ids", "<i4"), ("log_probs", "<f4"), ("log_rest", "<f4"))
            ]
        except (struct.error, ValueError, KeyError) as error:
            raise ConfigError(f"{option}: '{path}' holds no stored answers; {make}") from error
        self.num_positions, self.top = self._rows[0].shape

    @property
    def sha256(self) -> str:
        """Digest of all that determines the answers."""
        return hashlib.sha256(json.dumps(self.about, sort_keys=True).encode()).hexdigest()

    def require_text(self, tokenizer: Tokenizer, tokens: Any) -> None:
        """Raise ConfigError unless the answers are those at the positions of this text."""
        now = digests_of(tokenizer, tokens)
        for key, what in {
            "tokenizer": "tokens of another tokenizer than data.tokenizer",
            "tokens": f"those to another training split of {self.num_positions + 1:,} tokens; this run has "
            f"{len(tokens):,}",
        }.items():
            if (stored := self.about.get(key, "none")) != now[key]:
                raise ConfigError(
                    f"{self.option}: the answers in '{self.path}' are {what} (sha256 {stored[:12]}, not "
                    f"{now[key][:12]}); store them again with the options --data.* of this run"
                )

    def at(self, starts_B: Tensor, seq_len: int) -> Answers:
        """Return the answers of windows that begin at these tokens, (B, S, N), on their device."""
        windows = starts_B.cpu().numpy()[:, None] + np.arange(seq_len)
        return Answers(
            *(torch.from_numpy(rows[windows]).to(starts_B.device) for rows in self._rows)
        )
