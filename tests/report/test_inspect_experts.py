"""Tokens of experts and the features that routing follows, on examples with a known answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from moe_ffn.outputs import Routing
from moe_ffn.report.expert_tokens import NOT_REACHED, Assignment, expert_tokens, text_positions
from moe_ffn.report.inspect import experts, inspect_model, text_of_tokens
from moe_ffn.report.inspect.experts import Attribute, agreement, entropy, mutual_information
from tests.helpers.synthetic_run import BYTES, LETTERS, axis, decoder_of, random_text

MakeRouting = Callable[..., Routing]


def moe(**options: Any) -> dict[str, Any]:
    return {"type": "moe", "num_experts": 4, "experts": {"type": "mlp", "d_ff": 4}} | options


# -- mutual information


def test_mutual_information_by_hand() -> None:
    """Joint counts 2, 1 / 0, 1 of four: H(a) = ln 2, H(b) = ln 2, ..."""
    a, b = np.array([0, 0, 0, 1]), np.array([0, 0, 1, 1])
    joint = -(0.5 * math.log(0.5) + 2 * 0.25 * math.log(0.25))
    of_a = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))

    assert entropy(a) == pytest.approx(of_a)
    assert mutual_information(a, b) == pytest.approx(of_a + math.log(2) - joint)
    assert mutual_information(a, a) == pytest.approx(of_a)
    assert mutual_information(np.array([], dtype=int), np.array([], dtype=int)) == 0


def test_random_labels_agree_as_much_as_chance() -> None:
    random = np.random.default_rng(0)
    labels = random.integers(0, 200, 4000)
    found = agreement(random.integers(0, 8, 4000), labels)
    assert found.chance > 0.05, "with 200 labels much is known of 4,000 tokens by chance"
    assert abs(found.above_chance) < 0.01


def test_without_a_choice_there_is_no_agreement() -> None:
    found = agreement(np.zeros(10, dtype=int), np.arange(10))
    assert math.isnan(found.share)
    assert math.isnan(found.above_chance)


# -- models whose routing is known


@pytest.mark.parametrize("k", [1, 2])
def test_a_hash_router_agrees_with_the_token_alone(k: int) -> None:
    router = {"type": "hash", "k": k}
    found = inspect_model(decoder_of(moe(router=router), LETTERS), random_text(LETTERS))
    one = found.routers["layer_00"]

    assert one.agreement["token"].share == pytest.approx(1)
    assert one.agreement["token"].above_chance == pytest.approx(1)
    assert one.agreement["token"].chance < 0.01
    assert one.agreement["previous token"].above_chance < 0.01
    assert one.agreement["position in sequence"].above_chance < 0.01


def test_an_expert_that_takes_exactly_the_newline() -> None:
    """Expert 1 takes newlines, all of them and nothing else."""
    letters = b"ab1\n"
    router = {"type": "top_k", "k": 1, "renormalize": False}
    decoder: Any = decoder_of(moe(num_experts=2, router=router), letters)
    with torch.no_grad():
        weight = decoder.layers[0].ffn.router.projection.weight
        weight.zero_()
        weight[1, letters.index(b"\n")] = 1
        weight[0, : letters.index(b"\n")] = 1
    found = inspect_model(decoder, random_text(letters))
    assignment = found.routers["layer_00"].assignment
    by_class = next(a for a in found.attributes if a.name == "byte class")
    counts = experts.profile(assignment, by_class)
    newline = by_class.names.index("newline")
    share = (found.text.ids_T == ord("\n")).mean()

    assert counts[1].nonzero()[0].tolist() == [newline]
    assert counts[0, newline] == 0
    lift = experts.lift(counts)
    assert lift[1, newline] == pytest.approx(1 / share)
    assert lift[0, by_class.names.index("digit")] == pytest.approx(1 / (1 - share))
    others, own = expert_tokens(found.routed, "layer_00")
    (top,) = own.most_typical
    assert (top.token, top.share, top.lift) == (r"\n", 1, pytest.approx(1 / share))
    assert own.share == pytest.approx(share)
    assert {token.token for token in others.most_typical} == {"a", "b", "1"}
    column = found.routers["layer_00"].agreement["position in line"]
    assert 0 < column.above_chance < 0.5, (
        "a newline stands behind a line, never long after its start"
    )


def test_inside_a_mixture_of_depths_tokens_are_those_that_were_let_through() -> None:
    """The gate takes the upper half by its score, so that the letters f, e and d come inside."""
    depths = {
        "type": "mixture_of_depths",
        "router": {"type": "relu", "k": 0.5},
        "ffn": moe(router={"type": "hash"}),
    }
    decoder: Any = decoder_of(depths, LETTERS)
    with torch.no_grad():
        weight = decoder.layers[0].ffn.router.projection.weight
        weight.zero_()
        weight[0] = axis("d") + axis("e") + axis("f") - axis("a") - axis("b") - axis("c")
    found = inspect_model(decoder, random_text(LETTERS))
    gate, inner = found.routers["layer_00"], found.routers["layer_00/inner"]
    let_through = np.isin(found.text.ids_T, list(b"def"))

    assert gate.selects_tokens
    assert not inner.selects_tokens
    assert (gate.assignment.first_T == np.where(let_through, 0, 1)).all()
    assert (inner.assignment.reached_T == let_through).all()
    assert inner.agreement["token"].share == pytest.approx(1)
    (units,) = found.units
    top = found.text.ids_T[units.tokens_Uk[units.judged_U]]
    assert set(top.ravel().tolist()) <= set(b"def")


def test_padding_inside_a_mixture_of_depths_belongs_to_no_expert(make_routing: MakeRouting) -> None:
    """Two sequences of two, of which one and two tokens come inside."""
    gate = make_routing(
        [[0]] * 4, 1, dropped_N=torch.tensor([True, False, False, False]), sequence_length=2
    )
    inner = make_routing(
        [[0], [1], [2], [3]], 4, mask_T=torch.tensor([True, False, True, True]), sequence_length=2
    )
    routings = {"layer_00": gate, "layer_00/inner": inner}

    found = [text_positions(routings, name, ["layer_00"], first=100) for name in routings]

    assert found[0].tolist() == [100, 101, 102, 103]
    assert found[1].tolist() == [101, NOT_REACHED, 102, 103]


# -- counts by hand


def test_the_first_choice_is_the_heaviest(make_routing: MakeRouting) -> None:
    weights = torch.tensor([0.2, 0.8, 0.7, 0.3, 0.5, 0.5])
    found = Assignment("layer_00", ("0", "1", "2"), 3)
    found.add(make_routing([[0, 1], [0, 1], [2, 1]], 3, weights_N=weights), np.arange(3))
    assert found.first_T.tolist() == [1, 0, 2], "of equal ones the first in the list"


def test_a_token_without_experts_differs_from_one_that_was_never_routed(
    make_routing: MakeRouting,
) -> None:
    routing = make_routing([[0], [1]], 2, selected_N=torch.tensor([True, False]))
    found = Assignment("layer_00", ("0", "1"), 3)
    found.add(routing, np.array([0, 2]))
    assert found.first_T.tolist() == [0, NOT_REACHED, 2]
    assert found.reached_T.tolist() == [True, False, True]


def test_the_largest_documents_have_a_label_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "MAX_DOCUMENTS", 1)
    end = BYTES.end_of_document
    ids = np.array([97, end, *[98] * 20, end, 99, end])
    text = text_of_tokens(ids, BYTES, 4, 100)
    documents: Attribute = experts.attributes(text)[-1]

    assert documents.names == ("document 1", "all others")
    assert (documents.labels_T == (text.document_T != 1)).all()


def test_positions_and_columns_have_the_names_of_their_bounds() -> None:
    known = {a.name: a for a in experts.attributes(random_text(b"ab\n", seq_len=16))}

    position = known["position in sequence"]
    assert position.names[:2] == ("0 to 1", "2 to 3")
    assert position.labels_T[:5].tolist() == [0, 0, 1, 1, 2]
    line = known["position in line"]
    text = random_text(b"ab\n", seq_len=16)
    assert line.names == ("0", "1", "2 to 3", "4 to 7", "8 to 15", "16 to 31", "32 to 63", "64 on")
    assert {line.names[i] for i in line.labels_T[text.column_T == 3]} == {"2 to 3"}
