"""Expert choice takes each expert's ceil(k * tokens / E) best tokens, of a sequence or of the batch."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from moe_ffn.routing import ExpertChoiceRouterConfig
from tests.helpers.identity_router import load_of, random_logits, real_pairs, route


def scores_of(row: list[float], score: str) -> list[float]:
    if score == "sigmoid":
        return [1 / (1 + math.exp(-z)) for z in row]
    total = sum(math.exp(z) for z in row)
    return [math.exp(z) / total for z in row]


def naive(
    config: ExpertChoiceRouterConfig, logits_TE: Tensor, length: int, mask: list[bool]
) -> list[list[tuple[int, float]]]:
    """Return the experts and weights of each token, by a loop over groups of tokens and experts."""
    scores = [scores_of(row, config.score) for row in logits_TE.tolist()]
    num_tokens, num_experts = logits_TE.shape
    size = length if config.among == "sequence" else num_tokens
    pairs: list[list[tuple[int, float]]] = [[] for _ in range(num_tokens)]
    for start in range(0, num_tokens, size):
        group = [t for t in range(start, start + size) if mask[t]]
        count = math.ceil(Fraction(str(config.k)) * len(group) / num_experts)
        for e in range(num_experts):
            for t in sorted(group, key=lambda t: -scores[t][e])[:count]:
                pairs[t].append((e, scores[t][e]))
    return pairs


MASKS = {
    "unpadded": [True] * 21,
    # Right, left, and a whole sequence.
    "padded": [True] * 4 + [False] * 3 + [False] * 2 + [True] * 5 + [False] * 7,
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("among", ["sequence", "batch"])
@pytest.mark.parametrize("k", [0.3, 1.0, 1.1, 2.0, 4.0])
def test_it_equals_a_loop_over_groups_and_experts(
    k: float, among: str, score: str, mask: list[bool], training: bool
) -> None:
    config = ExpertChoiceRouterConfig.model_validate({"k": k, "among": among, "score": score})
    logits = random_logits(21, 4)
    routing = route(config, logits, mask=torch.tensor(mask), sequence_length=7, training=training)
    expected = naive(config, logits, 7, mask)
    for got, wanted in zip(real_pairs(routing), expected, strict=True):
        assert [e for e, _ in sorted(got)] == [e for e, _ in wanted]
        assert [w for _, w in sorted(got)] == pytest.approx([w for _, w in wanted])


# 0.3 * 50 is a little more than 15 where 0.3 is taken for what the float stands for.
@pytest.mark.parametrize(
    ("k", "num_tokens", "num_experts", "each"),
    [
        (1.25, 16, 8, 3),
        (0.3, 50, 1, 15),
        (8.0, 5, 8, 5),
        (4e-7, 50, 4, 1),
    ],
)
def test_every_expert_takes_exactly_its_share_rounded_up(
    k: float, num_tokens: int, num_experts: int, each: int
) -> None:
    config = ExpertChoiceRouterConfig(k=k, score="sigmoid")
    assert load_of(route(config, random_logits(num_tokens, num_experts))) == [each] * num_experts


def test_equal_scores_leave_every_expert_its_exact_share() -> None:
    assert load_of(route(ExpertChoiceRouterConfig(k=2), torch.zeros(12, 4))) == [6] * 4
