"""Hidden units of models made by hand, the text that a model is looked at with, and tokens of experts."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from moe_ffn.data.prepare import DataConfig
from moe_ffn.data.tokenizer import train_bpe
from moe_ffn.ffn.networks import HiddenUnits
from moe_ffn.model.decoder import Decoder
from moe_ffn.outputs import Routing
from moe_ffn.report.expert_tokens import NOT_REACHED, Assignment, expert_tokens, text_positions
from moe_ffn.report.inspect import Inspection, experts, inspect_model, text_of_tokens
from moe_ffn.report.inspect import text as text_module
from moe_ffn.report.inspect.experts import (
    Agreement,
    Attribute,
    agreement,
    entropy,
    mutual_information,
)
from moe_ffn.report.inspect.page import findings
from moe_ffn.report.inspect.text import (
    BYTE_CLASSES,
    SYNTAX_CLASSES,
    TokenizedText,
    syntax_of,
    text_of_file,
)
from moe_ffn.report.inspect.units import (
    KINDS,
    LayerUnits,
    TopInputs,
    agree,
    examples,
    explanation,
    layer_units,
)
from tests.helpers.synthetic_run import BYTES, LETTERS, D, S, axis, decoder_of, random_text

DENSE = {"type": "dense", "activation": "relu", "d_ff": 4, "bias": True}


def with_units(decoder: Decoder, keys: Tensor, biases: Tensor, values: Tensor) -> Any:
    ffn = cast("Any", decoder.layers[0]).ffn
    with torch.no_grad():
        ffn.up.weight.copy_(keys)
        ffn.up.bias.copy_(biases)
        ffn.down.weight.copy_(values.t())
    return ffn


def units_of(decoder: Decoder, letters: bytes = LETTERS) -> LayerUnits:
    """Return the units of the only layer, on random letters."""
    (units,) = inspect_model(decoder, random_text(letters)).units
    return units


def token_ids(units: LayerUnits) -> str:
    """Return the token that each unit promotes most, as text."""
    return "".join(map(chr, units.promoted_Up[:, 0]))


@pytest.fixture(scope="module")
def found() -> Inspection:
    """Units: fires at b, promotes d; fires at all but b, promotes a; never fires; fires at c, demotes e."""
    decoder = decoder_of(DENSE, LETTERS)
    noise = torch.randn(D, generator=torch.Generator().manual_seed(0)) * 0.01
    keys = torch.stack([axis("b") + noise, axis("b", -1.0), torch.zeros(D), axis("c") + noise])
    values = torch.stack([axis("d"), axis("a"), axis("a"), axis("e", -1.0) + axis("f")])
    with_units(decoder, keys, torch.tensor([0.0, 1.0, -1.0, 0.0]), values)
    return inspect_model(decoder, random_text(LETTERS))


def test_a_unit_that_fires_at_one_byte_is_found_as_such(found: Inspection) -> None:
    (units,) = found.units

    assert {found.text.token(i) for i in found.text.ids_T[units.tokens_Uk[0]]} == {"b"}
    assert units.explained["token"][0]
    assert units.kind_U[0] == "token"
    assert explanation(units, 0, found.text) == "b"
    assert explanation(units, 3, found.text) == "c"
    assert not units.explained["suffix"].any(), "what stands before is random"


def test_it_promotes_the_token_that_its_value_points_at(found: Inspection) -> None:
    (units,) = found.units
    promoted = [found.text.token(ids[0]) for ids in units.promoted_Up]
    assert promoted == ["d", "a", "a", "f"]
    assert "e" not in {found.text.token(int(i)) for i in units.promoted_Up[3]}, "the one it demotes"


def test_a_unit_that_never_fires_is_not_judged(found: Inspection) -> None:
    (units,) = found.units
    assert units.judged_U.tolist() == [True, True, False, True]
    assert units.tokens_Uk[2].tolist() == [-1] * 10
    assert units.num_judged == 3
    assert units.share("token") == pytest.approx(2 / 3)
    assert 2 not in examples(units)


def test_chance_is_that_of_random_inputs(found: Inspection) -> None:
    """8 of 10 letters of six the same: 6 * (C(10, 8) 5^2 + C(10, 9) 5 + 1) / 6^10, hardly ever."""
    (units,) = found.units
    assert all(units.chance[kind] == 0 for kind in KINDS)
    assert units_of(decoder_of(DENSE, b"a"), b"a").chance["token"] == 1


def test_the_chance_of_an_expert_s_units_is_that_of_the_expert_s_own_tokens() -> None:
    """An expert that takes only one letter: its units respond to that letter by necessity."""
    moe = {
        "type": "moe",
        "num_experts": 2,
        "experts": {"type": "mlp", "activation": "relu", "d_ff": 8, "bias": True},
        "router": {"type": "top_k", "k": 1, "renormalize": False},
    }
    decoder = decoder_of(moe, LETTERS)
    ffn: Any = decoder.layers[0].ffn
    with torch.no_grad():
        ffn.router.projection.weight.zero_()
        ffn.router.projection.weight[1] = axis("b")
        ffn.router.projection.weight[0] = -axis("b")
        ffn.experts.up_bias.fill_(1.0)  # every unit fires
    units = units_of(decoder)

    of_second = units.network_U == 1
    assert units.networks == ("expert 0", "expert 1")
    assert units.name(9) == "expert 1, unit 1"
    assert units.explained["token"][of_second].all()
    assert units.chance["token"] == pytest.approx(of_second.mean())


def test_a_large_negative_gated_unit_promotes_the_opposite_of_its_value() -> None:
    decoder = decoder_of({"type": "swiglu", "d_ff": 2}, LETTERS)
    ffn: Any = decoder.layers[0].ffn
    with torch.no_grad():
        ffn.gate.weight.copy_(torch.stack([axis("b"), axis("b")]))
        ffn.up.weight.copy_(torch.stack([axis("b"), axis("b", -1)]))
        ffn.down.weight.copy_(torch.stack([axis("d"), axis("d", -1) + 0.1 * axis("a")]).t())
    units = units_of(decoder)

    assert (units.activations_Uk[0] > 0).all()
    assert (units.activations_Uk[1] < 0).all()
    assert token_ids(units) == "dd"


def test_a_unit_that_answers_to_a_suffix_is_found_as_such() -> None:
    """relu(c now + a before - 1): the two together alone, by a convolution over two positions."""
    conv = {"type": "conv", "kernel_size": 2, "activation": "relu", "d_ff": 1, "bias": True}
    decoder = decoder_of(conv, LETTERS)
    ffn: Any = decoder.layers[0].ffn
    size = math.sqrt(D)  # of a one-hot vector after the norm
    with torch.no_grad():
        ffn.up.linear.weight.copy_(torch.cat([axis("a"), axis("c")])[None])
        ffn.up.linear.bias.fill_(-1.5 * size)
    found = inspect_model(decoder, random_text(LETTERS))
    (units,) = found.units

    assert units.suffix_U.tolist() == [2]
    assert units.kind_U.tolist() == ["suffix"]
    assert explanation(units, 0, found.text) == "ac"
    assert (units.share("suffix"), units.chance["suffix"]) == (1, 0)


def test_a_unit_that_answers_to_a_position_is_found_as_such() -> None:
    """Learned positions: the embedding of position 5 is a separate axis."""
    decoder: Any = decoder_of(DENSE, LETTERS, positions={"type": "learned"})
    (table,) = decoder.positions.parameters()
    keys = torch.zeros(4, D)
    keys[0, D - 1] = 1
    with torch.no_grad():
        table.zero_()
        table[5, D - 1] = 5
    with_units(decoder, keys, torch.zeros(4), torch.zeros(4, D))
    found = inspect_model(decoder, random_text(LETTERS, seq_len=64))
    (units,) = found.units

    assert units.kind_U[0] == "position in sequence"
    assert explanation(units, 0, found.text) == "position in sequence: 5"
    assert not units.explained["position in line"][0], "all is one line"


def test_a_unit_that_answers_to_a_position_in_the_line() -> None:
    """Inputs set by hand: the third token of each line, whose letters and positions differ."""
    lines = b"".join(bytes([97 + i % 5]) * (4 + i % 7) + b"\n" for i in range(400))
    text = text_of_tokens(BYTES.encode(lines).numpy(), BYTES, 64, 2000)
    (thirds,) = np.nonzero(text.column_T == 2)
    chosen = thirds[:: len(thirds) // 10][:10]
    inputs = TopInputs(10)
    activations = torch.full((len(text), 1), 0.1)
    activations[torch.from_numpy(chosen)] = 1
    inputs.add(HiddenUnits("", torch.arange(len(text)), activations, torch.zeros(1, D)), first=0)
    units = layer_units(3, {"": inputs}, text, decoder_of(DENSE, LETTERS))

    assert units.kind_U.tolist() == ["position in line"]
    assert explanation(units, 0, text) == "position in line: 2"
    assert units.name(0) == "unit 0"


def test_values_go_through_the_scale_of_a_final_norm_and_not_its_bias() -> None:
    """The scale hides the axis that the value points at most; the bias alone would promote a."""
    decoder = decoder_of(DENSE, LETTERS, norm={"type": "layer_norm"})
    value = axis("b", 2.0) + axis("c")
    with_units(decoder, torch.zeros(4, D), torch.ones(4), value.expand(4, D))
    norm = cast("nn.LayerNorm", decoder.final_norm)
    with torch.no_grad():
        norm.weight[LETTERS.index(b"b")] = 0.1
        norm.bias[LETTERS.index(b"a")] = 100
    assert token_ids(units_of(decoder)) == "cccc"

    post_norm = decoder_of(DENSE, LETTERS, norm_placement="post")
    with_units(post_norm, torch.zeros(4, D), torch.ones(4), value.expand(4, D))
    assert token_ids(units_of(post_norm)) == "bbbb", "it has no final norm"


def test_the_next_token_is_promoted_by_units_that_learned_it() -> None:
    """A text in which b follows a, c follows b and so on, and units that know this."""
    ids = np.tile(np.array(list(LETTERS)), 400)
    text = text_of_tokens(ids, BYTES, S, 1000)
    decoder = decoder_of({**DENSE, "d_ff": 6}, LETTERS)
    keys = torch.eye(D)[:6]
    with_units(decoder, keys, torch.zeros(6), keys.roll(-1, dims=0))
    (units,) = inspect_model(decoder, text).units

    assert units.next_agreement == 1
    assert units.next_chance == pytest.approx(1 / 6)
    both_sides = units_of(decoder_of(DENSE, LETTERS, causal=False))
    assert both_sides.next_agreement is None


@pytest.mark.parametrize(
    ("row", "need", "within", "expected"),
    [
        ([3, 3, 3, 3, 9], 4, 0, True),
        ([3, 3, 3, 8, 9], 4, 0, False),
        ([9, 3, 7, 3, 3], 3, 0, True),
        ([10, 14, 11, 12, 90], 4, 3, False),
        ([10, 13, 11, 12, 90], 4, 3, True),
        ([5], 1, 0, True),
    ],
)
def test_agreement_of_most(row: list[int], need: int, within: int, expected: bool) -> None:
    assert agree(np.array([row]), need, within).tolist() == [expected]


# -- kept while batches pass


def test_the_top_inputs_are_those_of_all_batches_together() -> None:
    torch.manual_seed(0)
    everything = torch.randn(300, 7)
    inputs = TopInputs(5)
    for start in range(0, 300, 60):
        ids = torch.arange(0, 60, 2)  # every second token came to this network
        part = everything[start : start + 60][ids]
        inputs.add(HiddenUnits("", ids, part, torch.zeros(7, D)), first=start)
    activations, tokens, signs = inputs.of_main_sign()

    came = torch.arange(0, 300, 2)
    for unit in range(7):
        mine = everything[came, unit]
        best = mine.topk(5), (-mine).topk(5)
        sign = int(best[1].values.sum() > best[0].values.sum())
        assert tokens[unit].tolist() == came[best[sign].indices].tolist()
        assert signs[unit] == 1 - 2 * sign
        np.testing.assert_allclose(activations[unit], mine[best[sign].indices])
    assert torch.cat(inputs.seen).tolist() == came.tolist()


def test_a_network_that_saw_fewer_tokens_than_are_kept_has_none_for_the_rest() -> None:
    inputs = TopInputs(5)
    inputs.add(HiddenUnits("", torch.tensor([1, 4]), torch.ones(2, 3), torch.zeros(3, D)), first=0)
    inputs.add(
        HiddenUnits("", torch.tensor([], dtype=torch.int64), torch.ones(0, 3), torch.zeros(3, D)), 9
    )
    activations, tokens, _ = inputs.of_main_sign()

    assert sorted(tokens[0].tolist()) == [-1, -1, -1, 1, 4]
    assert activations[0].tolist() == [1, 1, 0, 0, 0]


# -- the text that a model is looked at with: windows, columns, documents, suffixes, bytes and syntax


def tokens_of(*documents: bytes) -> np.ndarray:
    ids = [np.append(BYTES.encode(document), BYTES.end_of_document) for document in documents]
    return np.concatenate(ids)


def read(
    *documents: bytes, seq_len: int = 8, num_tokens: int = 10**6, **options: Any
) -> TokenizedText:
    return text_of_tokens(tokens_of(*documents), BYTES, seq_len, num_tokens, **options)


def test_windows_are_spread_evenly_and_know_what_follows() -> None:
    text = read(bytes(range(65, 65 + 26)), seq_len=4, num_tokens=9)

    assert text.windows.tolist() == [
        list(range(65, 69)),
        list(range(74, 78)),
        list(range(83, 87)),
    ]
    assert text.next_T.reshape(-1, 4)[:, -1].tolist() == [69, 78, 87]
    assert text.position_T.tolist() == [0, 1, 2, 3] * 3


@pytest.mark.parametrize(
    ("name", "reason"),
    [("mine.py", ""), ("mine.txt", "the name of 'mine.txt' does not end in .py")],
)
def test_a_file_is_python_by_its_name(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("x = 1\n")
    run: Any = SimpleNamespace(tokenizer=BYTES, config=SimpleNamespace(data=DataConfig(seq_len=8)))

    text = text_of_file(run, tmp_path / name, 8)

    assert (text.no_syntax, text.syntax_T is None) == (reason, bool(reason))


def test_a_text_shorter_than_a_sequence_is_one_window() -> None:
    assert read(b"abc", seq_len=100).windows.tolist() == [list(b"abc")]


def test_columns_count_from_the_start_of_the_line_across_windows_and_not_across_documents() -> None:
    text = read(b"ab\nlong line", b"x\ny", seq_len=4)

    rows = text.column_T.reshape(-1, 4).tolist()
    shown = ["".join(map(text.token, row.tolist())) for row in text.windows]
    assert dict(zip(shown, rows, strict=True)) == {
        r"ab\nl": [0, 1, 2, 0],
        "ng␣l": [2, 3, 4, 5],
        r"e<end>x\n": [8, 9, 0, 1],
    }


def test_documents_have_the_names_of_what_they_hold() -> None:
    names = {hashlib.sha256(b"second").hexdigest(): "b.py"}
    text = read(b"first one", b"second", seq_len=5, names=names)
    assert text.documents == ("document 0", "b.py")
    assert text.document_T.reshape(-1, 5).tolist() == [[0] * 5, [0, 0, 1, 1, 1]]


def test_a_document_too_long_to_read_is_read_around_its_windows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = b"x = 1\n" * 40
    whole = read(source, seq_len=16, num_tokens=64)
    monkeypatch.setattr(text_module, "MAX_DOCUMENT", 32)
    parts = read(source, seq_len=16, num_tokens=64)

    assert parts.column_T.tolist() == whole.column_T.tolist()
    assert whole.syntax_T is not None
    assert parts.syntax_T is not None
    assert set(parts.syntax_T) == {SYNTAX_CLASSES.index("unknown")}
    assert SYNTAX_CLASSES.index("number") in whole.syntax_T


def test_suffixes_are_equal_where_the_last_tokens_are_and_the_window_holds_them() -> None:
    text = read(b"abcab" + b"cabc", seq_len=4)
    first, second, third = text.suffixes(3)

    assert text.windows.tolist() == [list(b"abca"), list(b"cabc")]
    assert first.tolist() == list(b"abcacabc")
    bc = [2, 7]  # "bc" and "abc" end there in both windows
    assert second[bc[0]] == second[bc[1]]
    assert third[bc[0]] == third[bc[1]]
    assert second[1] == second[6]
    assert third[1] != third[6], "the first window holds no 'cab'"
    assert len({*second[[0, 4]].tolist()}) == 2, "a window's first token has no suffix of two"


def test_byte_classes() -> None:
    text = read("a1 \n(é\t_".encode(), seq_len=9)
    classes = [BYTE_CLASSES[c] for c in text.byte_class_T]
    assert classes == [
        *("letter", "digit", "space", "newline", "punctuation", "non-ASCII", "non-ASCII"),
        *("space", "punctuation"),
    ]


def test_the_first_nonspace_byte_decides_the_class_of_a_token() -> None:
    bpe = train_bpe([b" def def def def  def 12 12 12 12"] * 50, 512)
    ids = np.append(bpe.encode(b"x def 12"), bpe.end_of_document)
    text = text_of_tokens(ids, bpe, 100, 100)

    assert text.syntax_T is not None
    classes = zip(text.ids_T, text.byte_class_T, text.syntax_T, strict=True)
    found = {text.token(i): (BYTE_CLASSES[b], SYNTAX_CLASSES[s]) for i, b, s in classes}
    assert found["␣def"] == ("letter", "keyword")
    assert found["␣12"][0] == "digit"


SOURCE = b'''def f(x):
    """Doc."""
    return x + 1  # why

'''


def test_syntax_is_that_of_python_s_own_tokenizer() -> None:
    found = [SYNTAX_CLASSES[c] for c in syntax_of(SOURCE)]

    def of(part: bytes) -> set[str]:
        start = SOURCE.index(part)
        return set(found[start : start + len(part)])

    assert of(b"def") == of(b"return") == {"keyword"}
    assert of(b"f(") == {"name", "operator"}
    assert of(b'"""Doc."""') == {"string"}
    assert of(b'    """') == {"indentation", "string"}
    assert of(b"1") == {"number"}
    assert of(b"# why") == {"comment"}
    assert of(b" +") == {"space", "operator"}
    assert found[-1] == "newline"
    assert len(found) == len(SOURCE)


def test_syntax_counts_bytes_where_characters_are_longer() -> None:
    source = 'é = "ü" + 1\n'.encode()
    found = [SYNTAX_CLASSES[c] for c in syntax_of(source)]
    assert found[:2] == ["name", "name"]
    assert found[source.index(b"1")] == "number"
    assert found[source.index(b'"') : source.index(b'"') + 4] == ["string"] * 4


@pytest.mark.parametrize(
    "source",
    [
        *(b"x = (1\n", b"if x:\n        y\n    z\n", b"\xff\xfe", b"", b"'''never ends", b"\x00"),
        b"a\rb\r\nc",
    ],
)
def test_syntax_is_unknown_after_invalid_python(source: bytes) -> None:
    found = syntax_of(source)
    assert len(found) == len(source)
    if source.startswith(b"x"):
        assert SYNTAX_CLASSES[found[0]] == "name"


def test_a_text_without_syntax_keeps_the_reason() -> None:
    text = read(b"Once upon a time.", no_syntax="this is prose")
    assert text.syntax_T is None
    assert text.no_syntax == "this is prose"


# -- tokens of experts and the features that routing follows


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
def test_a_hash_router_agrees_only_with_the_token(k: int) -> None:
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


def test_agreement_that_chance_explains_as_well_is_left_out_of_the_findings() -> None:
    by_chance, half = Agreement(share=1.0, chance=1.0), Agreement(share=0.5, chance=0.0)
    layers = {
        "layer_00": {"token": by_chance, "document": by_chance, "previous token": half},
        "layer_01": {"token": half, "document": by_chance, "previous token": by_chance},
    }
    inspection: Any = SimpleNamespace(
        routers={
            name: SimpleNamespace(name=name, agreement=found) for name, found in layers.items()
        },
        attributes=[SimpleNamespace(name=name) for name in layers["layer_00"]],
        units=[],
    )
    token, others = findings(inspection)
    assert token == "The token alone explains 50% (layer 1) of the first choice, above chance."
    assert others.endswith("routing depends most on previous token (50%); means over the layers.")
