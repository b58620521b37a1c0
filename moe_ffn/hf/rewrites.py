"""Rewrites: other options and weights with the same outputs, for options that an architecture lacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_ffn.hf.options import Options


@dataclass(frozen=True)
class Rewrite:
    """A change of options, with factors of the weights that keep the outputs equal."""

    options: Callable[[Options], Options]
    """Returns the options to change; empty if this model needs no rewrite."""
    note: Callable[[Options], str]
    """Describes the rewrite of a model with these options."""
    factor: Callable[[str, Options], float] = lambda name, options: 1.0
    """Returns the factor of a tensor, from the options before the rewrite."""


COMMON = {
    "scale_embeddings": Rewrite(
        lambda options: (
            {"scale_embeddings": False, "tie_embeddings": False}
            if options["scale_embeddings"]
            else {}
        ),
        lambda options: (
            f"scale_embeddings: the token embeddings are multiplied by sqrt({options['d_model']}), and the "
            "output matrix is separate"
        ),
        lambda name, options: options["d_model"] ** 0.5 if name == "embedding.weight" else 1.0,
    ),
    "sparse.router.scale": Rewrite(
        lambda options: {"sparse.router.scale": 1.0} if "sparse.router.scale" in options else {},
        lambda options: (
            "ffn.router.scale: the down projections of the routed experts are multiplied by "
            f"{options['sparse.router.scale']:g}"
        ),
        lambda name, options: options["sparse.router.scale"] if ".experts.down" in name else 1.0,
    ),
}
"""Option -> its rewrite, for every architecture."""

SEPARATE_OUTPUT = {
    "tie_embeddings": Rewrite(
        lambda options: {"tie_embeddings": False},
        lambda options: "tie_embeddings: the output matrix is written separately",
    )
}
"""For architectures with a separate output matrix in llama.cpp or mlx-lm."""

OUTPUT_BIAS = {
    "attention.bias": Rewrite(
        lambda options: {"attention.bias": True} if options["attention.bias"] == "qkv" else {},
        lambda options: "attention.bias: the output projection gets a bias of zeros",
    )
}
"""For architectures with biases in all attention projections or in none."""

QKV_BIASES = {
    "attention.bias": Rewrite(
        lambda options: {} if options["attention.bias"] else {"attention.bias": "qkv"},
        lambda options: "attention.bias: queries, keys and values get biases of zeros",
    )
}
"""For architectures that have these biases in mlx-lm always."""


def _zeros(path: str, what: str) -> dict[str, Rewrite]:
    """Return the rewrite that adds biases of zeros to a part that has none."""
    return {
        path: Rewrite(
            lambda options: {} if options.get(path) is True else {path: True},
            lambda options: f"{path.replace('sparse.', 'ffn.')}: {what} of zeros",
        )
    }


CORRECTION_BIAS = _zeros("sparse.router.correction_bias", "the routers get correction biases")
"""For architectures whose sigmoid routers always have a correction bias."""

ALL_BIASES = {
    **_zeros("attention.bias", "queries, keys, values and outputs get biases"),
    **_zeros("sparse.router.bias", "the routers get biases"),
    **_zeros("sparse.experts.bias", "the experts get biases"),
}
"""For architectures with biases everywhere."""


def _add_shared_expert(d_ff: int | None, combine: str, units: str) -> dict[str, Rewrite]:
    """Return the rewrite that adds a shared expert of `d_ff` units, or of as many as a routed one."""

    def changed(options: Options) -> dict[str, Any]:
        if "sparse.shared_expert.type" in options:
            return {}
        return {
            "sparse.shared_expert.type": options.get("sparse.experts.type"),
            "sparse.shared_expert.d_ff": d_ff or options.get("sparse.experts.d_ff"),
            "sparse.shared_expert.bias": False,
            "sparse.combine.type": combine,
        }

    note = f"ffn.shared_expert: the export adds one of {units}, whose output is zero"
    return {"sparse.shared_expert.type": Rewrite(changed, lambda options: note)}


# 32 units are the fewest that llama.cpp packs.
GATED_SHARED_EXPERT = _add_shared_expert(32, "sigmoid_gate", "32 units")
SHARED_EXPERT = _add_shared_expert(None, "sum", "the width of a routed expert")
"""For architectures that always have a shared expert, with a gate or without."""


def added_weight(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return zeros for an added weight, but ones for the gate of a shared expert: llama.cpp computes
    sigmoid(x) as silu(x) / x, NaN for 0.
    """
    fill = torch.ones if name.endswith("combine.gate.weight") else torch.zeros
    return fill(shape, dtype=dtype)
