"""Tokens of each expert, tested on a hand-made routed text and on a trained run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markupsafe import escape
from playwright.sync_api import Browser

import moe_ffn
from moe_ffn.config.errors import ConfigError
from moe_ffn.data.prepare import cached_validation, prepare
from moe_ffn.report import expert_tokens as tokens_module
from moe_ffn.report.expert_tokens import (
    MIN_COUNT,
    NOT_REACHED,
    Assignment,
    RoutedText,
    expert_tokens,
    route_validation,
    stretches,
)
from moe_ffn.report.page import report_html, write_report
from tests.helpers import tiny_runs
from tests.helpers.browser import PHONE, opened
from tests.helpers.synthetic_run import Written

VOCABULARY = (b"a", b"b", b"\n", b"")


def routed(text: str, experts_T: list[int], seq_len: int = 6) -> RoutedText:
    """Text of the letters `ab\\n` with one expert per token; -1 for none."""
    ids_T = np.array(["ab\n".index(c) for c in text])
    first_T = np.array(experts_T)
    places = np.flatnonzero(first_T >= 0)
    layer = Assignment("layer_00", ("0", "1", "zero2"), len(text))
    layer.first_T, layer._pairs = first_T, [(places, first_T[places])]
    return RoutedText(VOCABULARY, ids_T, seq_len, {"layer_00": layer})


def test_tokens_of_an_expert_are_ranked_by_count_and_by_ratio_to_chance() -> None:
    text = "aaaaaaaabbbb" + "bbbbbbbbbbbb"
    found = expert_tokens(routed(text, [0] * 12 + [1] * 12), "layer_00")

    first, second, unused = found
    assert [(t.token, t.count, t.share) for t in first.most_frequent] == [
        ("a", 8, pytest.approx(2 / 3)),
        ("b", 4, pytest.approx(1 / 3)),
    ]
    # a is 2/3 of expert 0 and 1/3 of the text; b is half as frequent here as in the text.
    assert [(t.token, t.lift) for t in first.most_typical] == [("a", pytest.approx(2.0))]
    assert [(t.token, t.lift) for t in second.most_typical] == [("b", pytest.approx(1.5))]
    assert [e.share for e in found] == [0.5, 0.5, 0]
    assert (unused.expert, unused.most_frequent, unused.most_typical) == ("zero2", (), ())


def test_a_token_seen_a_few_times_is_not_called_typical() -> None:
    rare = "a" * (MIN_COUNT - 1)
    typical = expert_tokens(routed(rare + 20 * "b", [0] * len(rare) + [1] * 20), "layer_00")
    assert typical[0].most_typical == ()
    assert [t.token for t in typical[0].most_frequent] == ["a"]


@pytest.mark.parametrize(
    ("text", "seq_len", "contexts"),
    [
        ("bbabb\n" + "babbbb", 6, (("bb", "a", r"bb\n"), ("b", "a", "bbbb"))),
        ("a\n" * 50, 2, (("", "a", r"\n"),) * 3),
    ],
    ids=["within their windows", "of many a few"],
)
def test_contexts_of_a_token(text: str, seq_len: int, contexts: tuple[Any, ...]) -> None:
    experts = [0 if c == "a" else 1 for c in text]
    (token,) = expert_tokens(routed(text, experts, seq_len), "layer_00")[0].most_frequent
    assert (token.count, token.contexts) == (text.count("a"), contexts)


def test_the_running_text_is_cut_where_the_expert_changes() -> None:
    text = routed("aaaaaa" + "aab\nbb", 6 * [0] + [0, 0, 1, NOT_REACHED, 1, 1])
    assert stretches(text, "layer_00", 0) == [(0, "aaaaaa")]
    parts = [(0, "aa"), (1, "b"), (NOT_REACHED, "\n"), (1, "bb")]
    assert stretches(text, "layer_00", 1) == parts


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of depths around an MoE, trained for two steps."""
    folder = tmp_path_factory.mktemp("trained")
    ffn = "{type: mixture_of_depths, ffn: {type: moe, num_experts: 4, router: {type: top_k, k: 2}}}"
    argv = tiny_runs.options(folder, **{"trainer.max_steps": "2"})
    done = tiny_runs.run_here(*argv, "--model.causal", "false", "--model.ffn", ffn)
    assert done.code == 0, done.stderr
    return next(path.parent for path in folder.rglob("facts.json"))


def test_a_run_s_validation_text_is_routed_as_its_model_does(trained: Path) -> None:
    run = moe_ffn.load_run(trained)
    found = route_validation(run)

    text = found.text(0, found.seq_len)
    routing = run.routing(text)["layer_00"]
    gate, inner = found.layers["layer_00"], found.layers["layer_00/inner"]
    assert gate.expert_names == ("through",)
    assert inner.expert_names == ("0", "1", "2", "3")
    at_gate, inside = gate.pairs[0], inner.pairs[0]
    through = at_gate[at_gate < found.seq_len]
    assert sorted(through) == sorted(routing.token_indices_N[routing.computed_N].tolist())
    # A token that goes past the block comes to none of the experts in it.
    assert set(inside.tolist()) == set(at_gate.tolist())
    at_none = np.flatnonzero(~inner.reached_T)
    assert set(at_none.tolist()) == set(range(len(found.ids_T))) - set(at_gate.tolist())
    shares = [expert.share for expert in expert_tokens(found, "layer_00/inner")]
    assert sum(shares) == pytest.approx(1)


def test_a_text_of_many_batches_is_routed_as_one(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = moe_ffn.load_run(trained)
    whole = route_validation(run)
    monkeypatch.setattr(tokens_module, "BATCH_TOKENS", 2 * whole.seq_len)
    parts = route_validation(run)

    assert len(whole.ids_T) > 4 * whole.seq_len, "more than two batches"
    for name, layer in whole.layers.items():
        assert (parts.layers[name].first_T == layer.first_T).all()
        assert (parts.layers[name].pairs[0] == layer.pairs[0]).all()


def test_the_text_comes_only_from_the_cache_and_its_loss_is_one_sentence(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = moe_ffn.load_run(trained)
    data = run.config.data
    sha256 = run.facts.corpus_sha256 or ""
    kept = cached_validation(data, sha256)
    assert kept is not None
    assert kept.tolist() == prepare(data).validation[:].tolist()
    assert cached_validation(data, "another corpus") is None

    cache = Path(data.cache_dir)
    moved = cache.rename(cache.with_name("moved"))
    try:
        with pytest.raises(
            ConfigError, match=r"the validation text of '.*' is no longer in data.cache_dir"
        ):
            route_validation(run)
        shutil.copytree(moved, cache)
        (damaged,) = cache.glob("*/validation.bin")
        damaged.write_bytes(damaged.read_bytes()[:-2])
        assert cached_validation(data, sha256) is None
    finally:
        shutil.rmtree(cache, ignore_errors=True)
        moved.rename(cache)
    assert json.loads((trained / "facts.json").read_text())["corpus_sha256"] == sha256


def test_a_page_shows_what_experts_take_in_colour_and_in_words(trained: Path) -> None:
    page = Written(trained)

    assert '<option value="0">layer 0</option><option value="1">layer 0 inner</option>' in page.body
    first, inner, *_ = page.body.split('<div class="layer-view"')[1:]
    assert first.startswith(">")
    assert inner.startswith(" hidden>")
    found = route_validation(moe_ffn.load_run(trained))
    for expert, text in stretches(found, "layer_00/inner", 0):
        shown = str(escape(text))
        on_ground = f'<i class="g{expert}" data-expert="{expert}">{shown}</i>'
        assert (on_ground if expert != NOT_REACHED else shown) in inner
    for expert in expert_tokens(found, "layer_00/inner"):
        for token in expert.most_frequent:
            cell = f"<code>{escape(token.token)}</code> {100 * token.share:.1f}%"
            assert cell in inner
    assert "tokens of the validation split" in page.text


def test_a_run_that_lost_its_weights_has_its_page_and_one_sentence(
    trained: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(trained, tmp_path / "copy")
    shutil.rmtree(folder / "checkpoints")
    page = Written(folder)
    assert "The tokens of each expert are not shown: " in page.text
    assert "Load of each expert" in page.figures
    assert "layer-view" not in page.body


def test_an_expert_is_seen_alone_and_a_layer_is_chosen(
    browser: Browser, trained: Path, tmp_path: Path
) -> None:
    write_report(
        report_html, [moe_ffn.load_run(trained).folder], tmp_path / "page.html", has_ended=True
    )
    with opened(browser, tmp_path / "page.html", width=PHONE) as found:
        page = found.page
        page.wait_for_selector("html[data-drawn]")
        assert page.locator(".layer-view:visible").count() == 1
        page.select_option("select[data-shows]", label="layer 0 inner")
        view = page.locator(".layer-view:visible")
        assert view.locator("button.expert").all_text_contents() == ["0", "1", "2", "3"]
        texts = view.locator("i[data-expert]")
        expert = texts.first.get_attribute("data-expert")
        view.locator(f"button[data-expert='{expert}']").click()
        shown = view.locator("i:not(.off)").evaluate_all("all => all.map(e => e.dataset.expert)")
        assert {*shown} == {expert}
        view.locator(f"button[data-expert='{expert}']").click()
        assert view.locator("i.off").count() == 0
        assert found.overflow == 0
        assert found.errors == []
