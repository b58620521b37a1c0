"""Timing in turns, the check that candidates compute the same, and tables and targets."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experiments.benchmark import models, new_gpu, suites
from experiments.benchmark.layers import (
    AUTO,
    DENSE,
    Case,
    Layer,
    PlainSwiGLU,
    Tokens,
    compare,
    dense_layer,
    in_evaluation,
    moe_layer,
    outcome,
    sparse_layers,
)
from experiments.benchmark.peers import (
    HF_BATCHED,
    HF_EAGER,
    HF_GROUPED,
    PEERS,
    SAME,
    Peer,
    Weights,
)
from experiments.benchmark.session import Candidate, Results, Session, amount, ratio, result
from experiments.benchmark.shapes import Shape, kernel_costs
from experiments.benchmark.tiles import time_tiles
from moe_ffn.config.errors import ConfigError
from moe_ffn.kernels.select import BACKENDS
from moe_ffn.studies.timing import interleave

CPU = torch.device("cpu")
SMALL = Shape(64, 16, 8, 4, 2, "fp32")


def unheard(remark: str) -> None:
    pytest.fail(remark)


# ------------------------------------------------------------------------------------ stopwatch


def recorded(names: str, seen: list[str], calls: int = 1) -> list[Candidate]:
    """Candidates that append their name to `seen`."""
    return [Candidate("", name, lambda name=name: seen.append(name), calls=calls) for name in names]


def clock_of(seconds: Sequence[float]) -> Callable[[], float]:
    """A clock by which runs take so long, one after the other."""
    ticks = iter([tick for length in seconds for tick in (0.0, length)])
    return lambda: next(ticks)


def test_each_round_runs_every_candidate_once_in_random_order() -> None:
    runs: list[list[str]] = [[], []]
    for seen in runs:
        interleave(recorded("abcdefghij", seen), rounds=198, warmup=2)

    assert runs[0] == runs[1]  # the same in every run
    turns = [runs[0][start : start + 10] for start in range(0, 2000, 10)]
    assert all(sorted(turn) == list("abcdefghij") for turn in turns)
    starts = Counter(turn[0] for turn in turns)
    assert all(10 <= starts[name] <= 30 for name in "abcdefghij")
    followers = {pair for turn in turns for pair in itertools.pairwise(turn)}
    assert followers == set(itertools.permutations("abcdefghij", 2))


def test_warmup_is_thrown_away_and_calls_divide() -> None:
    candidates = recorded("a", [], calls=2)
    assert interleave(candidates, 2, 1, clock=clock_of([99.0, 2.0, 4.0])) == [(1.0, 2.0)]


def test_reset_follows_every_run_and_is_not_timed() -> None:
    seen: list[str] = []
    candidate = Candidate("", "a", lambda: seen.append("run"), lambda: seen.append("reset"))

    def clock() -> float:
        seen.append("clock")
        return 1.0

    interleave([candidate], 2, 0, clock=clock)

    assert seen == ["clock", "run", "clock", "reset"] * 2


@pytest.mark.parametrize(("patience", "rounds"), [(1.0, 3), (55.0, 6), (math.inf, 9)])
def test_patience_ends_after_three_rounds_and_not_before(patience: float, rounds: int) -> None:
    (values,) = interleave(recorded("a", []), 9, 0, patience, clock_of([10.0] * 9))
    assert len(values) == rounds


def measured(name: str, *values: float, computes: str = SAME) -> Results:
    return {("a, b", name): result(values, computes=computes)}


def test_ratios_are_of_medians_and_quartiles_are_inclusive() -> None:
    results = measured("a", 5.0) | measured("b", 1.0, 2.0, 4.0, 4.0, 5.0)
    found = results["a, b", "b"]
    assert (found.lower_quartile, found.median, found.upper_quartile) == (2.0, 4.0, 4.0)
    assert ratio(results, ("a, b", "a"), ("a, b", "b")) == "1.25x"
    assert ratio(results, ("a, b", "a"), ("a, b", "c")) == "-"


# ----------------------------------------------------------------------------------- same function


@pytest.fixture
def tokens() -> Tokens:
    return Tokens.of(SMALL, CPU)


@pytest.fixture
def case() -> Case:
    return Case.of(SMALL, CPU)


def test_every_backend_and_block_of_hugging_face_computes_the_same(case: Case) -> None:
    pytest.importorskip("transformers")
    peers = [HF_EAGER, HF_GROUPED, HF_BATCHED]

    # Triton's interpreter takes seconds, and tests/kernels compares it with the loop.
    backends = [name for name in BACKENDS if name != "triton"]

    layers = sparse_layers(case, backends, peers, unheard)

    ours = [f"moe_ffn {name}" for name in ("auto", *backends)]
    assert [layer.name for layer in layers] == [*ours, *peers]
    assert {layer.computes for layer in layers} == {SAME}


@pytest.mark.parametrize("wrong", ["gate_EFD", "up_EFD", "down_EDF", "router_ED"])
def test_a_wrong_peer_is_found_out(wrong: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    right = PEERS[HF_EAGER].build

    def build(weights: Weights, shape: Shape) -> nn.Module:
        return right(replace(weights, **{wrong: getattr(weights, wrong).flip(0)}), shape)

    monkeypatch.setitem(PEERS, HF_EAGER, Peer("transformers", build))
    said: list[str] = []
    _, layer = sparse_layers(case, (), [HF_EAGER], said.append)

    assert layer.computes.startswith("DIFFERS on ")
    assert said == [f"HF eager {layer.computes} at {SMALL}"]


def test_a_layer_that_goes_another_way_without_gradients_is_found_out(case: Case) -> None:
    class Other(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return case.source(x).hidden * (1 if torch.is_grad_enabled() else 2)

    assert in_evaluation(Layer("ours", case.source), case).computes == SAME
    found = in_evaluation(Layer("other", Other()), case).computes
    assert found == "DIFFERS on 100% of the tokens without gradients"


def test_a_router_in_bfloat16_may_choose_other_experts_for_some_tokens() -> None:
    case = Case.of(replace(SMALL, dtype="bf16"), CPU)

    class Other(nn.Module):
        def __init__(self, num_different: int) -> None:
            super().__init__()
            self.num_different = num_different

        def forward(self, x: Tensor) -> Tensor:
            hidden = case.source(x).hidden
            hidden[0, : self.num_different] *= 2
            return hidden

    assert in_evaluation(Layer("rounds", Other(5)), case).computes == SAME  # 8 % of 64
    assert in_evaluation(Layer("differs", Other(6)), case).computes.startswith("DIFFERS on 9%")


def test_the_share_that_differs_counts_tokens_and_nan(tokens: Tokens) -> None:
    right = outcome(PlainSwiGLU(SMALL.d_model, SMALL.active_width), tokens)
    hidden_TD = right.hidden_TD.clone()
    hidden_TD[0] *= 1.1
    hidden_TD[1] *= 1.0001  # within the tolerance
    hidden_TD[2] = torch.nan

    assert compare(right, right) == SAME
    found = compare(right._replace(hidden_TD=hidden_TD), right)
    assert found == "DIFFERS on 3% of the tokens"  # 2 of 64
    assert compare(right._replace(grad_x_TD=0 * right.grad_x_TD), right).startswith("DIFFERS on ")
    for length in (0.9 * right.grad_norm, math.nan):
        assert "times ours" in compare(right._replace(grad_norm=length), right)


def test_a_peer_that_breaks_is_skipped_with_its_reason(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rejecting(weights: object, shape: Shape) -> nn.Module:
        raise ValueError("takes no such width")

    def broken(weights: object, shape: Shape) -> nn.Module:
        raise RuntimeError("no kernel for this machine\nand more")

    peers = {
        "rejecting": Peer("torch", rejecting),
        "broken": Peer("torch", broken),
        "absent": Peer("no_such_package", broken),
        "for GPUs": Peer("torch", broken, gpu_only=True),
    }
    for name, peer in peers.items():
        monkeypatch.setitem(PEERS, name, peer)
    notes: list[str] = []

    assert len(sparse_layers(case, (), list(peers), notes.append)) == 1
    assert notes == [
        "skipped: rejecting: takes no such width",
        "skipped: broken: RuntimeError: no kernel for this machine",
    ]


def test_weights_are_shared_with_ours_and_gradients_are_not(case: Case) -> None:
    first, second = sparse_layers(case, ["loop"], (), unheard)

    candidate = Candidate.training(first, case.tokens, "")
    candidate.run()

    for mine, other in zip(
        first.module.get_submodule("experts").parameters(),
        second.module.get_submodule("experts").parameters(),
        strict=True,
    ):
        assert mine.data_ptr() == other.data_ptr()
        assert mine.grad is not None
        assert other.grad is None
    candidate.reset()
    assert case.tokens.x_BSD.grad is None
    assert all(parameter.grad is None for parameter in first.module.parameters())


def test_the_dense_block_is_as_wide_as_the_experts_of_a_token() -> None:
    module = dense_layer(SMALL, CPU).module
    assert sum(p.numel() for p in module.parameters()) == 3 * 16 * (2 * 8)
    assert SMALL.flops == 3 * 6 * 64 * 16 * (2 * 8)  # 6 per weight and token: 2 forward, 4 backward


# ------------------------------------------------------------------------------------ each suite


def test_loads_are_what_they_are_called() -> None:
    loads: dict[str, list[int]] = {}
    for name, share in suites.SKEWS.items():
        shape = Shape(64, 16, 8, 4, 1, "fp32")
        case = Case.of(shape, CPU, type="forced", k=1, skew=share)
        routing = case.source(case.tokens.x_BSD).routing
        assert routing is not None
        loads[name] = torch.bincount(routing.expert_ids_N, minlength=4).tolist()
    assert loads == {"balanced": [16] * 4, "half": [40, 8, 8, 8], "one hot": [64, 0, 0, 0]}


def test_saved_bytes_of_the_dense_block(tokens: Tokens) -> None:
    layer = dense_layer(SMALL, CPU)
    # gate x, silu(gate x), up x and their product, 64 x 16 floats each; neither x nor a parameter.
    assert suites.saved_bytes(layer.module, tokens.x_BSD) == 4 * 64 * 16 * 4


def test_adapters_are_compared_with_peft(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    monkeypatch.setattr(suites, "ADAPTED", SMALL)
    monkeypatch.setattr(suites, "TOKENS", (64,))
    session = Session((), CPU, rounds=1)
    suites.adapters(session)
    bases = "peft on HF grouped_mm", "peft on our kernels"
    claims = [f"{what} / {base}, T 64" for what in ("time", "peak memory") for base in bases]
    assert [row[2] for row in session.targets] == claims
    assert {row[-1].split(",")[0] for row in session.targets} <= {"reached", "MISSED"}
    printed = capsys.readouterr().out
    assert "MiB" in printed
    assert "DIFFERS" not in printed


def test_peak_bytes_counts_tensors_alive_at_once() -> None:
    def run() -> None:
        one, two = torch.empty(1000), torch.empty(500)
        del one
        assert len(torch.empty(250)) + len(two) == 750

    assert suites.peak_bytes(Candidate("", "", run), CPU) == 4 * 1500


# ------------------------------------------------------------------------------------- targets


@pytest.mark.parametrize("noisy", ["ours", DENSE])
def test_a_target_of_a_noisy_result_is_marked(
    noisy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    session = Session((), CPU)
    calm = measured("ours", 1.0) | measured(DENSE, 1.0)
    disturbed = calm | measured(noisy, 0.9, 1.0, 3.0)
    ours, dense = ("a, b", "ours"), ("a, b", DENSE)

    session.check_target("relative time", 1.2, calm, ours, dense)
    session.check_target("relative time", 1.2, disturbed, ours, dense)
    session.check_target("relative time", 0.9, disturbed, ours, dense)
    session.check_target("faster", 1.1, calm, ours, dense, at_most=False)

    verdicts = ["reached", "reached, noisy", "MISSED, noisy", "MISSED"]
    assert [row[-1] for row in session.targets] == verdicts
    assert "  reached, noisy relative time: 1.000, target at most 1.2" in capsys.readouterr().out


def test_limits_set_on_a_cpu_hold_on_no_gpu() -> None:
    session = Session((), torch.device("cuda"))
    results, key = measured("ours", 1.0), ("a, b", "ours")
    session.check_target("relative time", 1.2, results, key, key)
    session.check_target("bytes", 1.2, results, key, key, anywhere=True)
    assert [row[2] for row in session.targets] == ["bytes"]


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [(0.1234, "s", "123 ms"), (0.000056, "s", "56.0 us"), (3 * 2**19, "B", "1.5 MiB")],
)
def test_amounts_have_a_unit(value: float, unit: str, shown: str) -> None:
    assert amount(value, unit) == shown


# ------------------------------------------------------------------------------- live_models


def test_each_implementation_is_timed_and_a_text_that_differs_is_marked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    tiny = {"hidden_size": 32, "num_experts": 4, "num_hidden_layers": 1}
    monkeypatch.setattr(models, "QWEN3_MOE", models.QWEN3_MOE | tiny)
    monkeypatch.setattr(models, "NEW_TOKENS", 3)
    generate, wrong = models._generate, "none"

    def other(model: object, prompt: Tensor, implementation: str) -> Tensor:
        return generate(model, prompt, implementation) + (implementation == wrong)

    monkeypatch.setattr(models, "_generate", other)
    session = Session((), CPU, rounds=1)
    models.live_models(session)
    assert [row[1] for row in session.targets] == ["batch 1", "batch 16"]
    assert {row[-1].split(",")[0] for row in session.targets} <= {"reached", "MISSED"}
    printed = capsys.readouterr().out
    assert all(printed.count(f"  {name}") >= 2 for name in (HF_EAGER, HF_GROUPED, HF_BATCHED, AUTO))
    assert "DIFFERS" not in printed

    wrong = "moe_ffn"
    models.live_models(session)
    assert [row[-1] for row in session.targets[2:]] == ["not measured"] * 2
    assert "moe_ffn auto DIFFERS" in capsys.readouterr().out


# ------------------------------------------------------------------------------------- model


def test_the_model_of_the_kernels_counts_the_tensors_that_they_are_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launch = pytest.importorskip("moe_ffn.kernels.triton.launch")
    given: list[int] = []

    def record(*arguments: object, **named: object) -> None:
        tensors = [each for each in (*arguments, *named.values()) if isinstance(each, Tensor)]
        given.append(sum(each.nbytes for each in tensors if each.dtype == torch.bfloat16))

    for name in ("hidden", "product", "combine", "hidden_gradient", "weight_gradient"):
        monkeypatch.setattr(launch, f"_{name}_kernel", defaultdict(lambda: record))
    shape = Shape(24, 16, 40, 5, 3, "bf16")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    outcome(moe_layer(shape, "triton", device), Tokens.of(shape, device))

    costs = kernel_costs(shape)
    assert given == [cost.num_bytes for cost in costs]
    assert sum(cost.flops for cost in costs if "combine" not in cost.kernel) == shape.flops


def test_the_least_time_is_that_of_the_flops_or_of_the_bytes() -> None:
    hidden, *_ = kernel_costs(Shape(24, 16, 40, 5, 3, "bf16"))
    assert hidden.flops == 4 * 24 * 3 * 16 * 40
    assert hidden.seconds(flops_per_second=hidden.flops / 2, bytes_per_second=hidden.num_bytes) == 2
    assert hidden.seconds(flops_per_second=hidden.flops, bytes_per_second=hidden.num_bytes / 3) == 3


# ---------------------------------------------------------------------------------- first hour


def test_the_first_hour_writes_what_each_section_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(report: new_gpu.GPUReport) -> list[str]:
        raise RuntimeError("no kernel for this GPU\nand more")

    monkeypatch.setitem(new_gpu.SECTIONS, "profile", breaks)
    monkeypatch.delitem(new_gpu.BACKENDS, "triton")  # its interpreter takes half a minute
    sections = ["machine", "exactness", "mixed-precision", "profile", "tests", "sanitizer"]
    code = new_gpu.main(["--output", str(tmp_path), "--patience", "1", "--only", *sections])

    assert code == 0
    said = capsys.readouterr().out.splitlines()
    assert [
        line.partition(":")[0] for line in said if line.partition(":")[0] in sections
    ] == sections
    page = (tmp_path / "cpu.md").read_text()
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert headings == [
        *("## Machine", "## Exactness", "## Mixed precision", "## Profile", "## Tests"),
        *("## Sanitizer", "## What to do next"),
    ]
    assert "\n**Failed**: RuntimeError: no kernel for this GPU\n" in page
    assert "- The section profile failed." in page
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| fp32 | ")]
    assert [row[1] for row in rows] == list(BACKENDS)
    assert all(float(error) < 1e-6 for row in rows for error in row[2:7])
    assert {row[8] for row in rows} == {"yes |"}


def test_an_inexact_backend_is_something_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def sloppy(x_TD: Tensor, plan: Any, weights: Any) -> Tensor:
        return 1.001 * BACKENDS["loop"].run(x_TD, plan, weights)

    monkeypatch.setitem(new_gpu.BACKENDS, "cpu", replace(BACKENDS["cpu"], run=sloppy))
    monkeypatch.delitem(new_gpu.BACKENDS, "triton")
    report = new_gpu.GPUReport(CPU, Session((), CPU))
    new_gpu.exactness(report)
    (found,) = [line for line in report.todo if "fp32" in line]
    assert re.match(r"cpu in fp32 is \d{4}\.\d times as inexact as `loop`\.", found)


def test_each_tile_of_each_kernel_is_timed() -> None:
    pytest.importorskip("triton", reason="triton is not installed here")
    case = Case.of(Shape(4, 16, 16, 2, 1, "fp32"), CPU)
    seconds = iter([2.0, 1.0, 3.0, 4.0, 5.0, 6.0, 7.0])

    def seconds_of(run: Callable[[], object]) -> float:
        run()
        return next(seconds)

    candidates = {"hidden": [(16, 24, 16, 1, 1), (16, 32, 16, 1, 1)]}  # 24 is no power of 2
    rows = time_tiles(*new_gpu.arguments_of(case), seconds_of, candidates)
    assert [row[:2] for row in rows[:2]] == [
        ["hidden", "16, 32, 16, 1, 1"],
        ["hidden", "as chosen"],
    ]
    assert rows[2][:2] == ["hidden", "16, 24, 16, 1, 1"]
    assert str(rows[2][2]).startswith("fails: ")
    others = ["product", "hidden_gradient", "up_gradient", "down_gradient"]
    assert [row[0] for row in rows[3:]] == others
    # 4 pairs, 16 wide: gate and up are twice the work of down.
    assert rows[0][2:] == ["1000.000", "4.1e-09"]
    assert rows[3][2:] == ["3000.000 and 4000.000", "8.78e-10"]


def test_an_existing_page_is_not_replaced(tmp_path: Path) -> None:
    page = tmp_path / "cpu.md"
    page.write_text("by hand")
    with pytest.raises(ConfigError) as rejected:
        new_gpu.main(["--output", str(tmp_path), "--only", "machine"])
    assert (
        str(rejected.value) == f"--output: {page} exists; give another folder, or remove that page"
    )
    assert page.read_text() == "by hand"


def test_a_folder_that_cannot_be_written_is_rejected_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as rejected:
        new_gpu.main(["--output", str(tmp_path / "file"), "--only", "machine"])
    said = f"--output: '{tmp_path}/file' cannot be written ("
    assert str(rejected.value).startswith(said)
    assert str(rejected.value).endswith("); choose another folder")
    assert capsys.readouterr().out == ""
