"""The stopwatch, the check that candidates compute the same, and what is kept and shown."""

from __future__ import annotations

import csv
import itertools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plotly.graph_objects import Figure
from torch import Tensor, nn

from experiments.benchmark import suites, training
from experiments.benchmark.layers import (
    DENSE,
    OTHER,
    SAME,
    Case,
    Layer,
    PlainSwiGLU,
    Tokens,
    checked,
    dense_layer,
    moe_layer,
    our_layers,
    outcome,
    peer_layers,
    same_function,
    share_that_differs,
    weights_of,
)
from experiments.benchmark.peers import HF_BATCHED, HF_EAGER, HF_GROUPED, PEERS, Peer, Weights
from experiments.benchmark.resources import saved_bytes
from experiments.benchmark.session import (
    Promise,
    Row,
    Session,
    chart,
    duration,
    plots_page,
    ratio,
    spread,
    write_promises,
    write_rows,
)
from experiments.benchmark.shapes import Shape
from experiments.benchmark.timing import Rounds, Timed, Timing, interleave, order
from moe_ffn.kernels.select import BACKENDS
from moe_ffn.model.decoder import DecoderConfig

CPU = torch.device("cpu")
SMALL = Shape(64, 16, 8, 4, 2, "fp32")


def unheard(name: str, reason: str) -> None:
    pytest.fail(f"{name} was skipped: {reason}")


# ------------------------------------------------------------------------------------ stopwatch


def fake_clock(seconds: dict[str, list[float]], seen: list[str]) -> Callable[..., float]:
    """A clock that reads `seconds[name]` in turn, of runs that return their name."""

    def clock(run: Callable[[], object]) -> float:
        name = str(run())
        seen.append(name)
        return seconds[name].pop(0)

    return clock


def named(names: str, calls: int = 1) -> dict[str, Timed]:
    return {name: Timed(lambda name=name: name, calls=calls) for name in names}


def test_each_round_runs_everyone_once() -> None:
    seen: list[str] = []

    interleave(named("abc"), Rounds(4, warmup=2), fake_clock({n: [1.0] * 6 for n in "abc"}, seen))

    rounds = [seen[start : start + 3] for start in range(0, len(seen), 3)]
    assert len(rounds) == 6
    assert all(sorted(turn) == ["a", "b", "c"] for turn in rounds)


def test_everybody_starts_about_equally_often_and_follows_everybody() -> None:
    turns = [order("abcdefghij", turn) for turn in range(200)]

    assert turns == [order("abcdefghij", turn) for turn in range(200)]
    assert all(sorted(turn) == list("abcdefghij") for turn in turns)
    starts = Counter(turn[0] for turn in turns)
    assert all(10 <= starts[name] <= 30 for name in "abcdefghij")
    followers = {pair for turn in turns for pair in itertools.pairwise(turn)}
    assert followers == set(itertools.permutations("abcdefghij", 2))


def test_warmup_is_thrown_away_and_calls_divide() -> None:
    seconds = {"a": [99.0, 2.0, 4.0], "b": [99.0, 6.0, 8.0]}

    timings = interleave(named("ab", calls=2), Rounds(2, warmup=1), fake_clock(seconds, []))

    assert timings == {"a": Timing((1.0, 2.0)), "b": Timing((3.0, 4.0))}
    assert ratio(timings, "b", "a") == 3.5 / 1.5
    assert ratio(timings, "b", "c") is None


def test_reset_follows_every_run_and_is_not_timed() -> None:
    seen: list[str] = []
    candidate = Timed(lambda: seen.append("run"), lambda: seen.append("reset"))

    def clock(run: Callable[[], object]) -> float:
        run()
        seen.append("stop")
        return 1.0

    interleave({"a": candidate}, Rounds(2, warmup=0), clock)

    assert seen == ["run", "stop", "reset"] * 2


def test_patience_ends_after_three_rounds_and_not_before() -> None:
    def clock(run: Callable[[], object]) -> float:
        return 10.0

    def done(patience: float | None) -> int:
        rounds = Rounds(9, warmup=0, patience=patience)
        return len(interleave(named("a"), rounds, clock)["a"].values)

    assert [done(1.0), done(55.0), done(None)] == [3, 6, 9]


def test_quartiles() -> None:
    assert Timing((5.0,)).quartiles == (5.0, 5.0)
    assert Timing((1.0, 2.0, 3.0, 4.0, 5.0)).quartiles == (2.0, 4.0)
    assert Timing((3.0, 1.0, 2.0)).median == 2.0


def test_a_busy_machine_is_remarked_on(capsys: pytest.CaptureFixture[str]) -> None:
    session = Session(Rounds(3, warmup=0), (), CPU)
    pauses = itertools.cycle([0.0, 0.004, 0.008])
    session.time({"a": Timed(lambda: time.sleep(next(pauses)))})
    assert "is this machine busy?" in capsys.readouterr().out


# ----------------------------------------------------------------------------------- same function


@pytest.fixture
def tokens() -> Tokens:
    return Tokens.of(SMALL, CPU)


@pytest.fixture
def case() -> Case:
    return Case.of(SMALL, moe_layer(SMALL, "loop", CPU), CPU)


def test_every_backend_and_block_of_hugging_face_computes_the_same(case: Case) -> None:
    pytest.importorskip("transformers")

    ours = our_layers(case, tuple(BACKENDS), unheard)
    theirs = peer_layers(case, (HF_EAGER, HF_GROUPED, HF_BATCHED), unheard)

    assert [layer.name for layer in ours] == [f"moe_ffn {name}" for name in ("auto", *BACKENDS)]
    assert [layer.name for layer in theirs] == [HF_EAGER, HF_GROUPED, HF_BATCHED]
    assert {layer.computes for layer in (*ours, *theirs)} == {SAME}


@pytest.mark.parametrize("wrong", ["gate_EFD", "up_EFD", "down_EDF", "router_ED"])
def test_a_wrong_peer_is_found_out(wrong: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    right = PEERS[HF_EAGER].build

    def build(weights: Weights, shape: Shape) -> nn.Module:
        return right(replace(weights, **{wrong: getattr(weights, wrong).flip(0)}), shape)

    monkeypatch.setitem(PEERS, HF_EAGER, Peer(HF_EAGER, "transformers", build))
    (layer,) = peer_layers(case, [HF_EAGER], unheard)

    assert layer.computes.startswith("DIFFERS on ")
    assert not layer.is_comparable


class Detached(nn.Module):
    """The right output with the wrong gradient of x."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.detach()).hidden + 0 * x


def test_the_gradient_of_x_is_compared_too(case: Case) -> None:
    found = outcome(Layer("detached", Detached(case.source)), case.tokens)

    assert torch.equal(found.hidden_TD, case.expected.hidden_TD)
    assert not same_function(found, case.expected)


class Idle(nn.Module):
    """The right output, and no gradient for the experts."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        frozen = {
            name: p.detach() for name, p in self.inner.named_parameters() if "experts" in name
        }
        return torch.func.functional_call(self.inner, frozen, (x,)).hidden


def test_the_gradient_of_the_parameters_is_compared_too(case: Case) -> None:
    idle = Layer("idle", Idle(case.source))
    layer = checked(idle, case, unheard, Exception)

    assert layer is not None
    assert layer.computes.startswith("DIFFERS in gradients of weights")


def test_a_layer_that_goes_another_way_without_gradients_is_found_out() -> None:
    class Other(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return source(x).hidden * (1 if torch.is_grad_enabled() else 2)

    source = moe_layer(SMALL, "loop", CPU)
    case = Case.of(SMALL, source, CPU)
    assert suites.as_decoding(Layer("ours", source), case).computes == SAME
    assert suites.as_decoding(Layer("other", Other()), case).computes.startswith("DIFFERS")


def test_the_share_that_differs_counts_tokens_and_nan(tokens: Tokens) -> None:
    layer = Layer("plain", PlainSwiGLU(SMALL.d_model, SMALL.active_width))
    right = outcome(layer, tokens)
    hidden_TD = right.hidden_TD.clone()
    hidden_TD[0] *= 1.1
    hidden_TD[1] *= 1.0001  # within the tolerance
    hidden_TD[2] = torch.nan

    assert share_that_differs(right, right) == 0
    found = right._replace(hidden_TD=hidden_TD)
    assert share_that_differs(found, right) == pytest.approx(2 / 64)


def test_a_peer_of_another_function_is_marked_and_one_that_breaks_is_named(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(weights: object, shape: Shape) -> nn.Module:
        raise RuntimeError("no kernel for this machine\nand more")

    def another(weights: object, shape: Shape) -> nn.Module:
        return nn.Linear(shape.d_model, shape.d_model)

    peers = [
        Peer("broken", "torch", broken),
        Peer("another", "torch", another, same_function=False),
        Peer("absent", "no_such_package", another),
        Peer("for GPUs", "torch", another, gpu_only=True),
    ]
    for peer in peers:
        monkeypatch.setitem(PEERS, peer.name, peer)
    skipped: list[tuple[str, str]] = []

    names = [peer.name for peer in peers]
    layers = peer_layers(case, names, lambda *why: skipped.append(why))

    assert [(layer.name, layer.computes) for layer in layers] == [("another", OTHER)]
    assert skipped == [("broken", "RuntimeError: no kernel for this machine")]


def test_weights_are_shared_with_ours_and_gradients_are_not(case: Case) -> None:
    tokens = case.tokens
    first, second = our_layers(case, ["loop"], unheard)

    timed = first.training_pass(tokens)
    timed.run()

    for mine, other in zip(
        first.module.get_submodule("experts").parameters(),
        second.module.get_submodule("experts").parameters(),
        strict=True,
    ):
        assert mine.data_ptr() == other.data_ptr()
        assert mine.grad is not None
        assert other.grad is None
    timed.reset()
    assert tokens.x_BSD.grad is None
    assert all(parameter.grad is None for parameter in first.module.parameters())


def test_the_dense_block_is_as_wide_as_the_experts_of_a_token() -> None:
    module = dense_layer(SMALL, CPU).module
    assert sum(p.numel() for p in module.parameters()) == 3 * 16 * (2 * 8)
    assert SMALL.flops == 3 * 6 * 64 * 16 * (2 * 8)  # 6 per weight and token: 2 forward, 4 backward


# ------------------------------------------------------------------------------------ each suite


def test_loads_are_what_they_are_called() -> None:
    counts = {
        load: torch.bincount(
            suites.LoadRouter(suites.SKEWED, shares).expert_ids_TK.flatten(), minlength=8
        ).tolist()
        for load, shares in suites.LOADS.items()
    }
    assert counts["balanced"] == [1024] * 8
    assert counts["one hot"] == [8192, *[0] * 7]
    # Zipf: 8192 / (1 + 1/2 + ... + 1/8) = 3014 on the first, half of it on the second.
    assert counts["zipf"][:2] == pytest.approx([3014, 1507], abs=1)


def test_saved_bytes_of_the_dense_block() -> None:
    layer = dense_layer(SMALL, CPU)
    x_BSD = Tokens.of(SMALL, CPU).x_BSD
    # gate x, silu(gate x), up x and their product, 64 x 16 floats each; neither x nor a parameter.
    assert saved_bytes(layer.module, x_BSD) == 4 * 64 * 16 * 4


def test_the_dense_model_has_the_active_width_of_the_default() -> None:
    moe = DecoderConfig()
    dense = training.dense_counterpart(moe)
    routers = moe.num_layers * moe.d_model * 8
    active = [config.num_active_params(257, 256) for config in (moe, dense)]
    assert active[0] - active[1] == routers


def test_training_reads_the_text_in_order_and_again() -> None:
    data = training.DataConfig(batch_size=2, seq_len=3)
    stream = training.batches(torch.arange(20, dtype=torch.uint8), data, CPU)

    inputs, targets = next(stream)
    assert inputs.tolist() == [[0, 1, 2], [4, 5, 6]]
    assert targets.tolist() == [[1, 2, 3], [5, 6, 7]]
    next(stream)
    assert next(stream)[0].tolist() == inputs.tolist()  # 20 bytes hold two batches of 8


def test_a_default_training_step_lowers_the_loss_it_is_given() -> None:
    data = training.DataConfig()
    text = training.corpus(1, data)
    config = DecoderConfig(d_model=16, num_layers=1)
    model = training.Training(config, text, CPU, bf16=False)
    before = [parameter.clone() for parameter in model.model.parameters()]

    model.step()

    after = list(model.model.parameters())
    assert all(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert all(parameter.grad is None for parameter in after)


# ---------------------------------------------------------------------------------------- report


def a_row(**changes: object) -> Row:
    values: dict[str, object] = dict.fromkeys(Row.__dataclass_fields__, 1)
    return Row(**(values | {"shape": SMALL} | changes))  # pyright: ignore[reportArgumentType]


def test_csv_holds_a_line_per_row_with_the_machine(tmp_path: Path) -> None:
    write_rows(
        tmp_path / "results.csv", [a_row(case="a, b"), a_row()], {"torch": "2", "threads": "4"}
    )

    with (tmp_path / "results.csv").open() as file:
        first, second = csv.DictReader(file)
    assert list(first) == [
        *("suite", "case", "candidate", "version", "computes", "unit"),
        *("median", "lower_quartile", "upper_quartile", "rounds", "ratio", "ratio_to"),
        *("num_tokens", "d_model", "d_ff", "num_experts", "k", "dtype", "torch", "threads"),
    ]
    assert first["case"] == "a, b"
    assert second["threads"] == "4"


@pytest.mark.parametrize(
    ("figure", "at_most", "verdict"),
    [(1.2, True, "kept"), (1.21, True, "MISSED"), (1.2, False, "kept"), (1.1, False, "MISSED")],
)
def test_verdicts(figure: float, at_most: bool, verdict: str, tmp_path: Path) -> None:
    promise = Promise("rows", "a case", "tax", 1.2, figure, at_most, goal=1.1)

    assert promise.verdict == verdict
    write_promises(tmp_path / "promises.csv", [promise])
    with (tmp_path / "promises.csv").open() as file:
        (line,) = csv.DictReader(file)
    assert (line["limit"], line["goal"], line["verdict"]) == ("1.2", "1.1", verdict)


def test_what_was_not_measured_is_neither_kept_nor_missed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    session = Session(Rounds(), (), CPU)
    odd = Layer(HF_GROUPED, nn.Identity(), "DIFFERS on 50% of the tokens")
    timings = {"ours": Timing((1.0,)), HF_GROUPED: Timing((2.0,))}
    session.keep("rows", "", SMALL, [odd], timings, to="ours")

    session.promise("rows", "", "tax", 1.2, timings, ("ours", DENSE))
    session.promise("rows", "", "faster", 1.2, timings, (HF_GROUPED, "ours"))
    session.promise("gpu", "", "rate", 1.2, timings, ("ours", "ours"), reason="no GPU here")

    assert [promise.verdict for promise in session.promises] == ["not measured"] * 3
    printed = capsys.readouterr().out
    assert "no 'dense FFN' here" in printed
    assert "HF grouped_mm DIFFERS on 50% of the tokens" in printed
    assert "no GPU here" in printed


def test_a_skipped_candidate_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    session = Session(Rounds(), (), CPU)
    for _ in range(2):
        session.skip("MegaBlocks", "no GPU")
    assert capsys.readouterr().out == "  skipped: MegaBlocks: no GPU\n"


def test_tables_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [["a", "9.99 ms", "[b]"], ["longer" * 20, "12.0 ms", "same"]]

    Session(Rounds(), (), CPU).table(["layer", "median", "computes"], rows)

    header, rule, *lines = capsys.readouterr().out.splitlines()
    wide = len("longer" * 20)  # nothing is cut or wrapped, whatever the width of the terminal
    assert header.rstrip() == "  " + "layer".ljust(wide) + "    median   computes"
    assert set(rule) == {" ", "─"}
    assert [line.rstrip() for line in lines] == [
        "  " + "a".ljust(wide) + "   9.99 ms   [b]",
        "  " + "longer" * 20 + "   12.0 ms   same",
    ]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(1.234, "1.23 s"), (0.1234, "123 ms"), (0.01234, "12.3 ms"), (0.000056, "56.0 us")],
)
def test_durations_have_three_digits(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_a_spread_names_a_unit_once_if_it_can() -> None:
    assert spread(Timing((0.010, 0.012, 0.014))) == "11.0 - 13.0 ms"
    assert spread(Timing((0.9, 0.9, 1.2, 1.2, 1.2))) == "900 ms - 1.20 s"


# ----------------------------------------------------------------------------------------- plots


def test_a_chart_has_a_line_for_each_series_over_logarithmic_axes() -> None:
    lines = {f"layer {n}": [(8.0, 1.0 + n), (256.0, 9.0)] for n in range(10)}
    figure = chart("a title", "x", "ms", lines)

    assert [trace["name"] for trace in figure["data"]] == list(lines)
    assert figure["data"][1]["x"] == [8, 256]
    assert figure["data"][1]["y"] == [2, 9]
    assert {trace["mode"] for trace in figure["data"]} == {"lines+markers"}
    assert figure["layout"]["xaxis"]["type"] == figure["layout"]["yaxis"]["type"] == "log"
    assert figure["layout"]["xaxis"]["ticktext"] == ["8", "256"]


def test_a_chart_of_cases_names_them_and_joins_nothing() -> None:
    figure = chart("t", "x", "y", {"a": [(1, 1.0), (2, 3.0)]}, x_names=["first", "second"])

    assert figure["data"][0]["mode"] == "markers"
    assert figure["layout"]["xaxis"]["ticktext"] == ["first", "second"]


def test_the_page_of_plots_opens_without_a_network() -> None:
    figures = {name: chart(name, "x", "y", {"a": [(1, 1.0)]}) for name in ("rows", "experts")}

    page = plots_page(figures)

    assert page.count("Plotly.newPlot(") >= 2
    assert page.count("plotly.js v") == 1  # the script, once
    assert '"text":"experts"' in page.replace(" ", "")
    assert '<script src="http' not in page


def test_every_figure_is_one_that_plotly_draws() -> None:
    cases = chart("t", "x", "y", {"a": [(1, 1.0)]}, x_names=["first"])
    for figure in (chart("t", "x", "y", {"a": [(1, 1.0)]}), cases):
        Figure(figure)  # it refuses a key it does not know


def test_promised_rows_are_those_that_can_be_built() -> None:
    for shape in suites.PROMISED:
        moe_layer(shape, "auto", torch.device("meta"))
    assert weights_of(moe_layer(SMALL, "auto", CPU)).down_EDF.shape == (4, 16, 8)
