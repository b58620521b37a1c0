"""`moe-ffn trace` of a real run and `moe-ffn demo`, on the screen and as a page."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from playwright.sync_api import Browser
from rich.console import Console

from moe_ffn.cli.demo import MODEL
from moe_ffn.cli.demo import TEXT as DEMO_TEXT
from moe_ffn.report.trace import (
    Choice,
    Layer,
    Prediction,
    TextTrace,
    TokenTrace,
    Visit,
    trace_text,
    visible,
)
from moe_ffn.report.trace_view import colour_of, findings, legend, page, table
from moe_ffn.runs.reader import load_model
from moe_ffn.weights.pretrained import load_pretrained, load_tokenizer
from tests.helpers.browser import PHONE, opened
from tests.helpers.tiny_runs import cli

trace = cli("trace", columns=80)
demo = cli("demo")
TEXT = "def f(x):\n"


def test_a_folder_is_rejected_before_standard_input_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)  # reading it would raise AttributeError
    done = trace(tmp_path / "nowhere", "--text", "-")
    assert done.code == 2
    assert "nowhere" in done.stderr


# -- the values


def test_the_way_is_that_of_the_run_s_own_scores_and_the_next_token_the_most_probable(
    moe_run: Any,
) -> None:
    """Top-2 and a capacity, recomputed from the scores token by token."""
    run = load_model(moe_run.folder)
    way = trace_text(run.folder, run.decoder, run.tokenizer, TEXT.encode())
    ids = list(TEXT.encode())
    with torch.no_grad():
        output = run.decoder(torch.tensor([ids]))

    assert [token.token for token in way.tokens] == [*"def", "␣", *"f(x):", r"\n"]
    assert [layer.name for layer in way.layers] == ["layer_00", "layer_01"]
    places = len(ids) * 2 // 4  # factor 1.0: 10 tokens, 2 pairs each, 4 experts
    num_dropped = 0
    for layer in way.layers:
        taken: Counter[int] = Counter()
        scores = output.routings[layer.name].scores_TE.tolist()
        for token, row in zip(way.tokens, scores, strict=True):
            best = sorted(range(4), key=lambda expert: -row[expert])[:2]
            expected = []
            for expert in best:
                expected.append(Choice(expert, row[expert], row[expert], taken[expert] >= places))
                taken[expert] += 1
            visit = token.visits[layer.name]
            assert visit is not None
            assert visit.choices == tuple(expected)
            num_dropped += sum(choice.dropped for choice in expected)
        assert layer.capacity == "factor 1.0, at most 5 pairs per expert"
        assert layer.experts == ("0", "1", "2", "3")
    assert num_dropped > 0, "a text in which nothing is dropped shows nothing of dropping"
    best = output.logits[0].double().softmax(dim=-1).max(dim=-1)
    for token, probability, following in zip(way.tokens, best.values, best.indices, strict=True):
        assert token.prediction is not None
        assert token.prediction.probability == pytest.approx(probability.item(), rel=1e-5)
        assert token.prediction.token == visible(bytes([int(following)]))


def test_a_token_comes_inside_a_mixture_of_depths_if_it_is_let_through(depths_run: Path) -> None:
    text = "abcdefghij"
    run = load_model(depths_run)
    way = trace_text(run.folder, run.decoder, run.tokenizer, text.encode())
    seen: list[Any] = []
    inside = cast("Any", run.decoder.layers[1]).ffn.ffn
    inside.register_forward_hook(lambda module, args, output: seen.append((args[1], output)))
    with torch.no_grad():
        run.decoder(torch.tensor([list(text.encode())]))

    gate, inner = way.layers[1:]
    assert (gate.name, gate.selects_tokens, gate.experts) == ("layer_01", True, ("through",))
    assert (inner.name, inner.selects_tokens, inner.experts) == (
        "layer_01/inner",
        False,
        ("0", "1", "2", "3"),
    )
    ((context, output),) = seen
    # By the letters that the block inside was given; it sees no positions.
    experts_of = {
        chr(letter): sorted(row.topk(2).indices.tolist())
        for letter, row in zip(context.token_ids[0], output.routing.scores_TE, strict=True)
    }
    assert len(experts_of) == 5
    for token in way.tokens:
        passed, visit = token.visits["layer_01"], token.visits["layer_01/inner"]
        assert passed is not None
        assert bool(passed.choices) == (token.token in experts_of)
        found = None if visit is None else sorted(choice.expert for choice in visit.choices)
        assert found == experts_of.get(token.token)
        assert token.prediction is None, "a model that sees both sides predicts no next token"


# -- the terminal


def choice(expert: int, weight: float, *, dropped: bool = False) -> Choice:
    return Choice(expert, weight, weight, dropped)


def small_way() -> TextTrace:
    first, second, inner = (
        Layer("layer_00", ("0", "1", "2", "zero3"), "factor 1.0, 1 place per expert", "swiglu"),
        Layer("layer_02", ("through",), "dropless", selects_tokens=True),
        Layer("layer_02/inner", ("0", "1"), "dropless"),
    )
    tokens = (
        TokenTrace(
            0,
            "a",
            {
                first.name: Visit((choice(2, 0.62), choice(3, 0.38)), 0.5),
                second.name: Visit((choice(0, 0.7),), None),
                inner.name: Visit((choice(1, 1.25),), 0.25),
            },
            Prediction("␣", 0.3),
        ),
        TokenTrace(
            1,
            "<b>",
            {
                first.name: Visit((choice(2, 0.5, dropped=True),), 0.6),
                second.name: Visit((), None),
                inner.name: None,
            },
            Prediction(r"\n", 0.25),
        ),
    )
    return TextTrace("tiny", (first, second, inner), tokens, {"layer 1": "dense"})


def shown(way: TextTrace, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    console.print(table(way, width))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_the_table_and_its_legend() -> None:
    assert shown(small_way(), 80) == [
        "   token    layer 0                layer 2       layer 2 inner  next",
        "0  a            2 .62  zero3 .38   through .70   1 1.2          ␣ .30",
        "1  <b>          2 .50x             past          -              \\n .25",
        "   entropy  0.55                                 0.25",
        "",
        "2 .62: sent to expert 2, whose output is multiplied by 0.62; the largest weight",
        "first. Expert 2 of another layer is a different expert.",
        "x: dropped; the expert was full and did not process the token.",
        "through .70: passes through the layer's block, whose output is multiplied by",
        "0.70.",
        "past: skips the layer's block.",
        "-: did not reach this router.",
        "Experts without a network: zero returns 0, copy returns the token, const mixes",
        "in a learned vector.",
        "Capacity in evaluation: factor 1.0, 1 place per expert (layer 0).",
        "Capacity in evaluation: dropless (layer 2 inner).",
        "Every token also passes through a shared expert: swiglu (layer 0).",
        "Nothing is routed: dense (layer 1).",
        "entropy: mean over tokens of the entropy of the scores in nats; 0 if the router",
        "is certain, 0.69 among 2 experts, 1.39 among 4 experts if all scores are equal.",
        "next: the most probable next token, and its probability.",
    ]


def test_the_legend_explains_that_rounds_share_their_experts() -> None:
    rounds = [Layer(name, ("0", "1"), "dropless") for name in ("layer_00", "layer_00/round_2")]
    visits: dict[str, Visit | None] = {one.name: Visit((choice(1, 0.5),), 0.5) for one in rounds}
    chain = TextTrace("chain", tuple(rounds), (TokenTrace(0, "a", visits, None),), {})

    assert "Each round of a layer has its own router; all rounds share the experts." in legend(
        chain
    )
    assert "1 of 2 experts get a token." in findings(chain)
    assert not any("rounds" in line for line in legend(small_way()))


def test_layers_too_wide_for_one_table_go_into_a_second() -> None:
    table = shown(small_way(), 50)[:9]

    assert table == [
        "   token    layer 0                layer 2",
        "0  a            2 .62  zero3 .38   through .70",
        "1  <b>          2 .50x             past",
        "   entropy  0.55",
        "",
        "   token    layer 2 inner  next",
        "0  a        1 1.2          ␣ .30",
        "1  <b>      -              \\n .25",
        "   entropy  0.25",
    ]


def wide_way(num_layers: int, k: int, first: int = 40) -> TextTrace:
    layers = tuple(
        Layer(f"layer_{n:02d}", tuple(map(str, range(64))), "dropless") for n in range(num_layers)
    )
    visit = Visit(tuple(choice(first + place, 0.12) for place in range(k)), 4.0)
    visits = {layer.name: visit for layer in layers}
    return TextTrace("wide", layers, (TokenTrace(0, "token", visits, Prediction("next", 0.5)),), {})


@pytest.mark.parametrize(("num_layers", "k"), [(4, 2), (12, 2), (12, 8), (3, 24)])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_many_layers_and_many_experts_fit_any_terminal(num_layers: int, k: int, width: int) -> None:
    lines = shown(wide_way(num_layers, k), width)
    assert max(map(len, lines)) <= width
    pairs = [pair for line in lines for pair in re.findall(r"\b\d\d \.12", line)]
    assert len(pairs) == num_layers * k
    assert sum(line.count("layer ") for line in lines if "token  " in line) == num_layers


def test_neighbouring_layers_are_named_by_the_first_and_the_last() -> None:
    assert "Capacity in evaluation: dropless (layers 0-11)." in shown(wide_way(12, 2), 80)


def test_an_expert_has_one_colour_and_a_dropped_one_none() -> None:
    console = Console(
        width=80, file=io.StringIO(), force_terminal=True, color_system="truecolor", no_color=False
    )
    console.print(table(small_way(), 80))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()

    red, green, blue = (int(colour_of(2)[at : at + 2], 16) for at in (1, 3, 5))
    assert re.findall(rf"48;2;{red};{green};{blue}m *(\S+ \S+)\x1b", text) == ["2 .62"]
    assert re.findall(r"\x1b\[9m *(\S+ \S+)\x1b\[0mx", text) == ["2 .50"]


def test_a_pipe_gets_plain_text_and_the_page_is_written(moe_run: Any) -> None:
    code, out, err = trace(moe_run.folder, "--text", TEXT, "--html", "way.html")

    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert re.search(r"^ *token +layer 0 +layer 1 +next *$", out, re.MULTILINE)
    assert "Capacity in evaluation: factor 1.0, at most 5 pairs per expert (layers 0, 1)." in out
    assert out.endswith("\nwritten: way.html\n")
    assert Path("way.html").read_text().count("<tr>") == 2 + len(TEXT)


def test_the_text_may_come_through_a_pipe(moe_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff")))
    code, out, _ = trace(moe_run.folder, "--text", "-")
    assert code == 0
    assert re.findall(r"^(\d  \S+)", out, re.MULTILINE) == ["0  a", r"1  \xff"]


# -- the page


def test_the_page_shows_every_detail_of_a_cell(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "way.html"
    path.write_text(page(small_way()), encoding="utf-8")

    with opened(browser, path) as found:
        first, second = (found.page.locator("tbody tr").nth(row) for row in (0, 1))
        assert second.locator("th").inner_text() == "1<b>"
        assert first.locator("td").all_inner_texts() == [
            "2.62zero3.38",
            "through.70",
            "11.2",
            "␣ .30",
        ]
        assert second.locator("td").all_inner_texts() == ["2.50x", "past", "-", "\\n .25"]
        assert second.locator("td").first.get_attribute("title") == (
            "token 1 <b>, layer 0\nexpert 2: weight 0.5000, score 0.5000, dropped\nentropy 0.600 nats"
        )
        pairs = first.locator(".pair")
        red, green, blue = (int(colour_of(2)[at : at + 2], 16) for at in (1, 3, 5))
        colour = "e => getComputedStyle(e).backgroundColor"
        assert pairs.first.evaluate(colour) == f"rgb({red}, {green}, {blue})"
        assert second.locator(".dropped").evaluate(colour) == "rgba(0, 0, 0, 0)"


# -- mistakes


def test_a_run_that_routes_nothing_is_named(dense_run: Path) -> None:
    said = (
        f"error: '{dense_run}' has no router: its feed-forward blocks are of type 'swiglu'; choose a run "
        "with model.ffn.type 'moe' or 'mixture_of_depths'\n"
    )
    assert trace(dense_run, "--text", "a") == (2, "", said)
    assert cli("generate")(dense_run, "--prompt", "a", "--trace") == (2, "", said)


def test_every_token_is_named_and_the_page_opens(tmp_path: Path, browser: Browser) -> None:
    done = demo()

    assert (done.code, done.stderr) == (0, "")
    tokenizer = load_tokenizer(MODEL)
    for token_id in tokenizer.encode(DEMO_TEXT).tolist():
        assert visible(tokenizer.token_bytes[token_id]) in done.stdout
    assert done.stdout.count("moe-ffn") == 4
    with opened(browser, tmp_path / "demo.html", width=PHONE) as page:
        assert (page.errors, page.overflow) == ([], 0)
        assert page.page.locator(".trace tbody tr").count() == len(tokenizer.encode(DEMO_TEXT))


def test_the_model_card_describes_the_shipped_model() -> None:
    card = (MODEL / "README.md").read_text(encoding="utf-8")
    decoder = load_pretrained(MODEL)
    count = sum(weights.numel() for weights in decoder.parameters())
    vocab_size = json.loads((MODEL / "config.json").read_text())["vocab_size"]

    assert f"{count:,} parameters" in card
    assert f"{vocab_size:,} tokens" in card
    assert re.search(r"validation loss of \d\.\d{3}", card)
    assert sum(os.path.getsize(path) for path in MODEL.iterdir()) < 6_000_000  # noqa: PTH202
