"""The trace of each token, compared with hand-made routings."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser
from torch import Tensor

from moe_ffn.data.tokenizer import BytesTokenizer
from moe_ffn.ffn import GatedConfig, MoEConfig
from moe_ffn.ffn.base import RouterInfo
from moe_ffn.model.decoder import DecoderConfig
from moe_ffn.outputs import Routing, VariableKRouting
from moe_ffn.report.trace import (
    Choice,
    Layer,
    TextTrace,
    TokenTrace,
    Visit,
    trace_text,
    unrouted_layers,
    visible,
    visits_by_layer,
    visits_of,
)
from moe_ffn.report.trace_view import PALETTE, colour_of, page, weight_text
from tests.helpers.browser import PHONE, opened

SCORES = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.0, 0.0], [0.125, 0.75, 0.125]])


def routing(
    pairs: list[tuple[int, int, float]],
    scores_TE: Tensor = SCORES,
    *,
    dropped: list[int] | None = None,
    not_chosen: list[int] | None = None,
) -> Routing:
    """Routing of (token, expert, weight) pairs; `dropped` and `not_chosen` are indices into `pairs`."""
    places = range(len(pairs))
    routing = Routing(
        token_indices_N=torch.tensor([token for token, _, _ in pairs], dtype=torch.int64),
        expert_ids_N=torch.tensor([expert for _, expert, _ in pairs], dtype=torch.int64),
        weights_N=torch.tensor([weight for _, _, weight in pairs]),
        dropped_N=torch.tensor([place in (dropped or []) for place in places], dtype=torch.bool),
        logits_TE=scores_TE,
        scores_TE=scores_TE,
        num_tokens=len(scores_TE),
        num_experts=scores_TE.shape[1],
        sequence_length=len(scores_TE),
    )
    if not not_chosen:
        return routing
    selected_N = torch.tensor([place not in not_chosen for place in places])
    return VariableKRouting(**vars(routing), selected_N=selected_N)


def choices(visit: Visit | None) -> list[Choice] | None:
    return None if visit is None else list(visit.choices)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (
            routing([(0, 2, 0.25), (0, 0, 0.5), (2, 1, 0.75), (2, 0, 0.125)], dropped=[2]),
            [
                [Choice(0, 0.5, 0.5, False), Choice(2, 0.25, 0.25, False)],
                [],
                [Choice(1, 0.75, 0.75, True), Choice(0, 0.125, 0.125, False)],
            ],
        ),
        (
            routing([(0, 0, 0.5), (0, 1, 0.0), (2, 1, 0.75)], not_chosen=[1, 2]),
            [[Choice(0, 0.5, 0.5, False)], [], []],
        ),
        (
            replace(
                routing([(0, 0, 0.5), (1, 0, 0.0), (2, 1, 0.75)]),
                mask_T=torch.tensor([True, False, False]),
            ),
            [[Choice(0, 0.5, 0.5, False)], None, None],
        ),
    ],
    ids=["the heaviest first", "listed and not chosen", "padding"],
)
def test_each_token_has_its_choices(found: Routing, expected: list[list[Choice] | None]) -> None:
    assert list(map(choices, visits_of(found))) == expected


def test_entropy_is_that_of_each_token_s_own_scores() -> None:
    first, second, _ = visits_of(routing([(0, 0, 0.5)]))
    # 0.5 log 2 + 2 * 0.25 log 4; scores of 0 are no distribution.
    assert first is not None
    assert first.entropy == pytest.approx(1.5 * math.log(2))
    assert second is not None
    assert second.entropy is None


@pytest.mark.parametrize(
    ("gate", "inner", "at_gate", "inside"),
    [
        # Listed out of nobody's order: tokens 1 and 3 go through; 2 was listed and not chosen.
        (
            routing(
                [(1, 0, 0.5), (2, 0, 0.25), (3, 0, 0.75)],
                torch.tensor([[0.1], [0.5], [0.25], [0.75]]),
                not_chosen=[1],
            ),
            routing([(0, 2, 0.25), (1, 1, 0.75)], SCORES[[0, 2]]),
            [[], [0.5], [], [0.75]],
            [None, [2], None, [1]],
        ),
        (
            routing([(0, 0, 0.0), (1, 0, 0.0)], torch.zeros(2, 1), not_chosen=[0, 1]),
            routing([], torch.zeros(0, 3)),
            [[], []],
            [None, None],
        ),
    ],
    ids=["two of four", "nobody"],
)
def test_tokens_inside_a_mixture_of_depths_keep_their_positions(
    gate: Routing, inner: Routing, at_gate: list[Any], inside: list[Any]
) -> None:
    found = visits_by_layer(
        {"layer_00": gate, "layer_00/inner": inner}, token_selectors=["layer_00"]
    )
    outer, within = found["layer_00"], found["layer_00/inner"]
    assert [visit and [choice.weight for choice in visit.choices] for visit in outer] == at_gate
    assert [visit and [choice.expert for choice in visit.choices] for visit in within] == inside


def test_layers_that_route_nothing_are_named_with_their_type() -> None:
    ffns = [GatedConfig(type="swiglu"), MoEConfig()]
    assert unrouted_layers(ffns, {"layer_01": routing([])}) == {"layer 0": "swiglu"}


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        (b"def", "def"),
        (b" x", "␣x"),
        (b"\n\t", r"\n\t"),
        (b"\\n", r"\\n"),
        (b"\xc3", r"\xc3"),
        ("é".encode(), "é"),
        ("e\u0301".encode(), r"e\u0301"),
        ("\u202e".encode(), r"\u202e"),
        (b"a\xff", r"a\xff"),
        (b"\x1b[31m", r"\x1b[31m"),
        (b"", "<end>"),
    ],
)
def test_every_token_can_be_seen(token: bytes, shown: str) -> None:
    assert visible(token) == shown


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0.0, ".00"),
        (0.624, ".62"),
        (0.999, "1.0"),
        (1.26, "1.3"),
        (9.94, "9.9"),
        (9.96, "10"),
        (math.nan, "nan"),
    ],
)
def test_weights_are_short(number: float, text: str) -> None:
    assert weight_text(number) == text


def test_experts_share_the_colours_of_the_palette_in_turn() -> None:
    assert len({colour_of(expert) for expert in range(64)}) == len(PALETTE)
    assert colour_of(3) == colour_of(3 + len(PALETTE))


def test_the_mean_entropy_is_of_the_tokens_that_have_one() -> None:
    layers = tuple(Layer(f"layer_0{n}", ("0", "1"), "dropless") for n in (0, 1))
    entropies = (1.0, None, 0.5)
    tokens = tuple(
        TokenTrace(n, "a", {"layer_00": Visit((), entropy), "layer_01": Visit((), None)}, None)
        for n, entropy in enumerate(entropies)
    )
    trace = TextTrace("run", layers, tokens, {})

    assert [trace.mean_entropy(layer) for layer in layers] == [0.75, None]


def test_experts_without_a_network_are_called_what_they_do() -> None:
    zero_computation = {"num_zero": 1, "num_copy": 2, "num_constant": 1}
    ffn = MoEConfig.model_validate({"num_experts": 2, "zero_computation": zero_computation})
    info = ffn.router_infos()["routing"]
    assert info.expert_names() == ("0", "1", "zero2", "copy3", "copy4", "const5")
    assert RouterInfo(info.router, 3).expert_names() == ("0", "1", "2")


def test_the_capacity_is_not_that_of_experts_of_every_token() -> None:
    ffn = {
        "type": "moe",
        "num_experts": 4,
        "router": {"type": "top_k", "k": 1, "num_always": 1},
        "capacity": {"eval_factor": 1.0},
    }
    model = DecoderConfig.model_validate({"d_model": 8, "num_layers": 1, "ffn": ffn})

    trace = trace_text(Path("run"), model.build(257, 8).eval(), BytesTokenizer(), b"abcdef")

    (layer,) = trace.layers
    assert layer.capacity == "factor 1.0, at most 2 pairs per expert, no limit for expert 3"


def test_the_header_of_a_long_trace_stays_in_sight(browser: Browser, tmp_path: Path) -> None:
    """The token stays in sight too, on a phone narrower than ten layers."""
    layers = tuple(Layer(f"layer_{n:02d}", ("0", "1"), "dropless") for n in range(10))
    visits = {layer.name: Visit((Choice(0, 0.5, 0.5, False),), 0.1) for layer in layers}
    tokens = tuple(TokenTrace(n, f"t{n}", visits, None) for n in range(100))
    (tmp_path / "trace.html").write_text(page(TextTrace("a", layers, tokens, {})))

    with opened(browser, tmp_path / "trace.html", width=PHONE) as found:
        inside = """() => {
            const frame = document.querySelector('.both').getBoundingClientRect();
            return [...document.querySelectorAll('.trace th')]
                .filter(cell => {
                    const box = cell.getBoundingClientRect();
                    const [x, y] = [box.left + 4, box.top + 4];
                    return box.left >= frame.left - 1 && box.top >= frame.top - 1 &&
                        y < innerHeight && cell.contains(document.elementFromPoint(x, y));
                })
                .map(cell => cell.textContent);
        }"""
        found.page.locator(".both").scroll_into_view_if_needed()
        found.page.evaluate(
            "() => { scrollTo(0, 100); const e = document.querySelector('.both');"
            " e.scrollTop = 1200; e.scrollLeft = 400; }"
        )
        seen = found.page.evaluate(inside)
        assert "token" in seen
        assert "layer 7" in seen
        assert "50t50" in seen
        assert "1t1" not in seen
        assert found.overflow == 0
        details = found.page.locator(".details")
        assert not details.is_visible()
        found.page.locator(".trace tbody td").nth(505).click()
        assert details.is_visible(), "what a pointer would say, to a finger"
        assert "t50" in details.inner_text()
        assert "entropy 0.100 nats" in details.inner_text()
        for key, shown in {
            "ArrowDown": "token 51",
            "ArrowLeft": "layer 4",
            "ArrowUp": "token 50",
        }.items():
            found.page.keyboard.press(key)
            assert shown in details.inner_text()
        assert found.overflow == 0
