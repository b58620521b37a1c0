"""Wrong calls of the library are rejected in one sentence: batches, samples, ids and tokenizers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from moe_ffn import DecoderConfig
from moe_ffn.data.tokenizer import BPEConfig, Tokenizer, train_bpe
from moe_ffn.model.generate import generate
from moe_ffn.training.optimizer import OptimizerConfig
from tests.helpers.cases import refuses

# -- models

IDS = torch.arange(12).view(2, 6)
REAL = torch.ones(2, 6, dtype=torch.bool)
BAD_BATCHES: list[tuple[Any, Any, type[Exception], str]] = [
    (IDS[0], None, ValueError, "token_ids must be (batch, sequence), but has (6,)"),
    ([[1]], None, TypeError, "token_ids must be a torch.Tensor, but is of type list"),
    (IDS, REAL[:, :5], ValueError, "mask must have the shape of token_ids, (2, 6), but"),
]


@pytest.mark.parametrize(("ids", "mask", "error", "message"), BAD_BATCHES)
def test_bad_ids_are_rejected(ids: Any, mask: Any, error: type[Exception], message: str) -> None:
    refuses(lambda: DecoderConfig(d_model=8).build(17, 10)(ids, mask), message, error)


def test_a_model_with_nan_generates_no_text() -> None:
    model = DecoderConfig(d_model=8).build(17, 10)
    with torch.no_grad():
        model.embedding.weight.fill_(torch.nan)
    message = "the model's largest logit is nan: there is no next token"
    refuses(lambda: generate(model, IDS[0], 2), message, RuntimeError)


# -- data


@cache
def tokenizer() -> Tokenizer:
    return train_bpe([b"the cat sat on the mat " * 50], 300)


def test_ids_outside_a_vocabulary_are_not_decoded() -> None:
    refuses(lambda: tokenizer().decode([3, 10**6]), "ids must lie in [0, ", ValueError)


def set_at(*path: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(stored: dict[str, Any]) -> None:
        for key in path[:-1]:
            stored = stored[key]
        stored[path[-1]] = to

    return change


FOREIGN_TOKENIZERS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "no definition": (lambda stored: stored.pop("tokenizer"), "cannot be read: "),
    "a gap": (set_at("tokenizer", "model", "vocab", "Ġthe", to=9999), "must number its "),
    "another alphabet": (
        set_at("tokenizer", "model", "vocab", "中", to=269),
        "has the token '中', which is not byte-level",
    ),
    "lower case": (set_at("tokenizer", "normalizer", to={"type": "Lowercase"}), "loses text: "),
}


@pytest.mark.parametrize(("change", "message"), FOREIGN_TOKENIZERS.values(), ids=FOREIGN_TOKENIZERS)
def test_a_tokenizer_that_loses_text_is_rejected(
    change: Callable[[dict[str, Any]], None], message: str
) -> None:
    stored = json.loads(json.dumps(tokenizer().to_dict()))
    change(stored)
    prefix = "data.tokenizer: the stored tokenizer of type 'bpe' "
    refuses(lambda: BPEConfig().restore(stored), prefix + message)


# -- optimizers


SHAPES = {"scalar": (), "vector": (3,), "matrix_1x1": (1, 1), "stack": (5, 1, 3)}


@pytest.mark.parametrize("member", OptimizerConfig.members)
def test_parameters_of_any_shape_are_optimized(member: str) -> None:
    model: Any = nn.Module()
    model.layers = nn.ParameterDict({name: torch.ones(shape) for name, shape in SHAPES.items()})
    model.layers["zero_matrix"] = torch.zeros(3, 4)
    model.layers["frozen"] = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    model.layers["unused"] = torch.ones(2, 2)
    optimizer = OptimizerConfig.model_validate({"type": member}).build(model)
    optimizer.step()  # before there is any gradient
    for _ in range(2):
        optimizer.zero_grad()
        used = [value.square().sum() for name, value in model.layers.items() if name != "unused"]
        torch.stack(used).sum().backward()
        optimizer.step()
    assert all(value.isfinite().all() for value in model.parameters())
    for name in ("frozen", "unused"):
        assert (model.layers[name] == 1).all()
    assert all((model.layers[name] < 1).all() for name in SHAPES)
    assert (model.layers["zero_matrix"] == 0).all()
