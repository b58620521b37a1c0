"""JSON files of a run's folder, each as a pydantic model; a damaged file counts as empty."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from moe_ffn.config.files import read_object
from moe_ffn.training.config import PRECISIONS, Precision

Count = Annotated[int, Field(ge=0, le=2**63)]
Value = float | None | list[float | None] | list[list[float | None]]
"""A metric: one number, one per expert, or one per pair of experts; None if not finite."""


class JsonFile(BaseModel):
    """A JSON object; false if it is empty."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow", allow_inf_nan=False)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file; return an empty object if the file cannot be read or is not of this kind."""
        try:
            return cls.model_validate(read_object(path) or {})
        except ValidationError:
            return cls()

    def __bool__(self) -> bool:
        return bool(self.model_fields_set)

    def has(self, key: str) -> bool:
        """Return True if the file has this key; its value may be null."""
        return key in self.model_fields_set


class Facts(JsonFile):
    """`facts.json`: options of a run, and facts about its code, data and model."""

    run_id: str = Field(default="", min_length=1)
    precision: Precision | None = None
    """Precision of the training; a complete file never has `auto`."""
    git_revision: str | None = None
    corpus_sha256: str | None = None
    tokenizer_sha256: str | None = None
    validation_sha256: str | None = None
    """Hash of the validation windows."""
    teacher_sha256: str | None = None
    """Hash of the teacher's weights; null without a teacher."""
    num_params: Count | None = None
    num_active_params: Count | None = None
    flops_per_token: Count | None = None
    ffn_params: Count | None = None
    """Number of parameters of all feed-forward blocks."""
    ffn_active_params: Count | None = None
    ffn_flops_per_token: Count | None = None
    num_threads: Count | None = None
    versions: dict[str, str] = {}
    """Versions of Python and torch."""
    hardware: dict[str, str | int | None] = {}
    """Processor, cores, GPU."""

    @property
    def is_whole(self) -> bool:
        """True if the file holds the precision, which a resumed run needs."""
        return self.precision in PRECISIONS


class Summary(JsonFile):
    """`summary.json`: results of a finished run; a number that is not finite is null."""

    validation_loss: float | None = None
    """Nats per token."""
    validation_bits_per_byte: float | None = None
    unigram_loss: float | None = None
    """Loss of a model that knows only the frequencies of tokens, in nats per token."""
    ngram_loss: float | None = None
    """Loss of a 5-gram model of the tokens that the run has read, in nats per token; None for masked ones."""
    tokens_per_second: float | None = None
    num_tokens: Count | None = None
    """Training tokens, summed over ranks; steps that a resumed run repeated count once."""
    train_seconds: float | None = None
    """Seconds of training steps, without validations."""
    wall_seconds: float | None = None
    """Seconds of training steps, validations and checkpoints, including the run before a resume."""
    peak_memory_bytes: Count | None = None
    """Peak on rank 0, of tensors on a GPU or of the process on a CPU, including the run before a resume."""
    window_losses: list[float | None] = []
    """Mean loss of each window of the last validation, in nats per token; if there are very many, means over
    adjacent windows."""
    num_alarms: Count | None = None
    num_skipped_steps: Count | None = None
    routing: dict[str, dict[str, Value]] = {}
    """Sparse layer -> metric -> value on the validation split."""


class CodeEntry(BaseModel):
    """Origin of a file or module of custom code."""

    model_config = ConfigDict(strict=True, frozen=True)

    path: str
    sha256: str
    copied: bool


class CodeEntries(JsonFile):
    """`code.json`: name of a copy in the run's folder, or of a module -> origin."""

    __pydantic_extra__: dict[str, CodeEntry]  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def entries(self) -> Mapping[str, CodeEntry]:
        return self.__pydantic_extra__


# -- writing

MAX_COACTIVATION_EXPERTS = 64
"""Maximum number of experts of a layer whose co-activation matrix is in the summary."""


def plain_values(value: Any) -> Any:
    """Return a value for JSON: null for NaN and infinity, matrices rounded to four decimals.

    Matrices of more than `MAX_COACTIVATION_EXPERTS` rows are left out.
    """
    if isinstance(value, Mapping):
        return {
            key: plain_values(item)
            for key, item in value.items()
            if not isinstance(item, Tensor)
            or item.ndim < 2
            or len(item) <= MAX_COACTIVATION_EXPERTS
        }
    if isinstance(value, Tensor):
        return plain_values(
            (value if value.ndim < 2 else value.double().round(decimals=4)).tolist()
        )
    if isinstance(value, list):
        return [plain_values(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
