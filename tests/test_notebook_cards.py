"""Cards that a notebook shows: their numbers are right, text is escaped, and they stay small."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import moe_ffn
from moe_ffn import FFNBlock, FFNConfig, FFNOutput, Routing, TokenContext, build_ffn, notebook_cards

D_MODEL = 16
SQUARE = re.compile(r"M(\d+) (\d+)h9v9h-9z")


class _Reader(HTMLParser):
    """Text of a card; its tags must close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        assert tag not in ("script", "b2")
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None: ...

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "


def text_of(html: str | None) -> str:
    assert html is not None
    assert len(html) < 7000
    reader = _Reader()
    reader.feed(html)
    assert not reader.open
    return " ".join(reader.text.split())


def squares(html: str | None) -> set[tuple[int, int]]:
    """(token, expert) of the squares drawn."""
    cell, left = 11, 30
    found = SQUARE.findall(html or "")
    return {((int(x) - left - 1) // cell, (int(y) - 1) // cell) for x, y in found}


# -- routings and outputs


def test_a_routing_draws_each_pair_and_the_load(make_routing: Callable[..., Routing]) -> None:
    dropped = torch.tensor([False, False, False, True])
    routing = make_routing([[0, 1], [1, 1]], 4, dropped_N=dropped)

    html = routing._repr_html_()

    assert squares(html) == {(0, 0), (0, 1), (1, 1)}
    text = text_of(html)
    assert text.startswith(
        "Routing tokens 2 experts 4 pairs 4 dropped 1 0 25.0% 1 75.0% 2 0.0% 3 0.0%"
    )
    assert (html or "").count('fill="none" stroke="#e07b28"') == 1


def test_padding_is_neither_drawn_nor_counted(make_routing: Callable[..., Routing]) -> None:
    routing = make_routing([[0], [1]], 2, mask_T=torch.tensor([True, False]))

    assert squares(routing._repr_html_()) == {(0, 0)}
    assert "pairs 1 dropped 0 0 100.0% 1 0.0%" in text_of(routing._repr_html_())


def test_a_routing_to_many_experts_shows_the_busiest() -> None:
    torch.manual_seed(0)
    ffn = build_ffn(
        {"type": "moe", "num_experts": 512, "router": {"type": "top_k", "k": 8}}, D_MODEL
    )
    routing = ffn(torch.randn(2, 64, D_MODEL)).routing
    assert routing is not None

    text = text_of(routing._repr_html_())

    assert "Rows are the 32 busiest experts, columns the first tokens." in text
    busiest = torch.bincount(routing.expert_ids_N, minlength=512).argmax()
    assert f" {busiest} " in text


def test_an_output_shows_each_routing_by_name() -> None:
    torch.manual_seed(0)
    output = build_ffn({"type": "mixture_of_depths", "ffn": "moe"}, D_MODEL)(torch.randn(2, 6, 16))
    text = text_of(output._repr_html_())
    assert text.startswith(
        "FFNOutput hidden float32[2, 6, 16] on cpu routing VariableKRouting tokens 12"
    )
    assert " inner Routing tokens 6 " in text
    dense = build_ffn("dense", D_MODEL)(torch.randn(2, 6, 16))
    assert text_of(dense._repr_html_()) == "FFNOutput hidden float32[2, 6, 16] on cpu"


def test_a_routing_without_values_is_shown_as_text() -> None:
    output = build_ffn("moe", D_MODEL)(torch.randn(2, 6, D_MODEL))
    meta = pytree.tree_map_only(Tensor, lambda t: t.to("meta"), output)
    assert meta.routing._repr_html_() is None  # a notebook then shows the repr
    assert "Routing(num_tokens=12" in text_of(meta._repr_html_())
    with FakeTensorMode():
        fake = build_ffn("moe", D_MODEL)(torch.randn(2, 6, D_MODEL)).routing
        assert fake is not None
        assert fake._repr_html_() is None


# -- blocks


@pytest.mark.parametrize("name", FFNConfig.members)
def test_a_block_shows_its_size_and_cost(name: str) -> None:
    config = FFNConfig.model_validate(name)
    text = text_of(config.build(D_MODEL)._repr_html_())
    assert text.startswith(config.describe())
    assert f" parameters {config.num_params(D_MODEL):,} " in text
    assert f" active parameters {config.num_active_params(D_MODEL):,} " in text
    assert f" FLOPs per token {config.flops_per_token(D_MODEL, 1024):,} " in text


def test_a_block_without_a_config_shows_its_parameters() -> None:
    class Odd(torch.nn.Linear):
        def extra_repr(self) -> str:
            return "<b2>"

    class Bare(FFNBlock):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Odd(3, 2)

        def forward(self, x: Tensor, context: TokenContext | None = None) -> FFNOutput:
            return FFNOutput(x)

    text = text_of(Bare()._repr_html_())
    assert text.startswith("Bare parameters 8 modules")
    assert "<b2>" in text


# -- runs


def test_a_run_shows_loss_cost_load_and_page(moe_run: Any) -> None:
    run = moe_ffn.load_run(moe_run.folder)
    html = run._repr_html_()
    text = text_of(html)
    assert text.startswith(
        f"{run.name}: moe, finished validation loss {run.summary.validation_loss:.4f}"
    )
    assert f"parameters {run.facts.num_params:,} " in text
    assert f"tokens per second {run.summary.tokens_per_second:,.0f}" in text
    times = " ".join(f"{4 * share:.1f}" for share in run.validated["layer_00"]["load"])
    assert f" layer 0 {times} layer 1 " in text
    assert f'href="{moe_run.folder}/report.html"' in html


def test_a_run_with_little_in_it_is_shown_escaped(moe_run: Any, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {ffn: {type: <b2>}}")
    run = replace(moe_ffn.load_run(tmp_path), name="<b2>&")
    assert text_of(run._repr_html_()).startswith("<b2>&: <b2>, ")
    assert "report" not in run._repr_html_()


def test_deep_models_with_many_experts_stay_small() -> None:
    loads = {f"layer {number}": [1 / 256] * 255 + [0.0] for number in range(96)}
    text = text_of(notebook_cards.load_heatmap(loads))
    assert text.startswith("layer 0 1.0 1.0 ")
    assert " 0.0 layer 95 1.0 " in text
    assert "sorted by load" in text


def test_a_curve_leaves_out_nonfinite_values() -> None:
    text = text_of(notebook_cards.curve([3.0, float("nan"), float("inf"), 1.0], "loss"))
    assert text == "loss: 3.000 to 1.000"
    assert notebook_cards.curve([float("nan")], "loss") == ""
