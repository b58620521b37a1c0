"""Effects of options on a run; kernels are compiled before a program measures its speed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moe_ffn
from moe_ffn.cli import generate
from moe_ffn.config.errors import UseCase
from moe_ffn.config.yaml_files import read_config
from moe_ffn.ffn import FFNConfig
from moe_ffn.kernels.native import build
from moe_ffn.runs.config import TrainConfig
from moe_ffn.training.monitoring import callbacks
from moe_ffn.training.monitoring.json_lines import Row, read_lines
from tests.helpers.fitted import OWN_BLOCK
from tests.helpers.ranks import on_ranks
from tests.helpers.tiny_runs import Finished, losses, options, run_here

RunTrain = Callable[..., Any]


def test_a_dense_run_has_nothing_of_routing(run_train: RunTrain, tmp_path: Path) -> None:
    dense_run = run_train(tmp_path, "--model.ffn", "dense")
    assert dense_run.code == 0
    assert dense_run.folder.name.startswith("dense-")
    assert not [n for n in dense_run.columns if "rout" in n or "balance" in n or "expert" in n]
    assert json.loads((dense_run.folder / "summary.json").read_text())["routing"] == {}
    assert "expert" not in dense_run.stdout


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "masked"])
def test_every_block_trains(run_train: RunTrain, tmp_path: Path, causal: bool) -> None:
    """One layer per block: the blocks of causal models, or the blocks that only masked models accept."""
    blocks = {name: FFNConfig.model_validate(name) for name in sorted(FFNConfig.members)}
    rejected = {n for n, config in blocks.items() if config.unsupported(UseCase(causal=True))}
    names = [name for name in blocks if (name in rejected) != causal]
    layers = ", ".join(f"{layer}: {name}" for layer, name in enumerate(names))
    run = run_train(
        tmp_path,
        *("--model.causal", str(causal).lower(), "--model.num_layers", str(len(names))),
        *("--model.ffn_at", f"{{{layers}}}", "--trainer.max_steps", "2"),
    )

    assert run.code == 0, run.stderr
    assert ("5-gram model" in run.stdout) is causal  # it predicts next tokens
    losses = [float(row["train/loss"]) for row in run.rows if "train/loss" in row]
    assert 4 < losses[0] < 7  # log 257 = 5.55 at random
    routed = {int(found[0]) for key in run.columns if (found := re.findall(r"layer_(\d\d)", key))}
    assert routed == {layer for layer, name in enumerate(names) if blocks[name].router_infos()}
    shown = re.findall(r"^ffn (\d+) ", run.stdout, re.MULTILINE)
    assert shown == [str(layer) for layer in range(len(names))]


def test_a_width_may_match_another_blocks_budget(run_train: RunTrain, tmp_path: Path) -> None:
    of = "{type: dense, d_ff: 80}"
    match = ("--model.ffn", f"{{type: swiglu, d_ff: {{match: active_params, of: {of}}}}}")
    run = run_train(tmp_path, *match, "--trainer.max_steps", "2")
    assert run.code == 0, run.stderr
    assert re.search(
        r"^model.ffn.d_ff: 53 gives [\d,]+ active parameters where", run.stdout, re.MULTILINE
    )
    assert read_config(run.folder / "config.yaml", TrainConfig).model.ffn.to_dict()["d_ff"] == 53

    # The options of the run have the number, and what it was solved from may be given again.
    more = ("--resume", str(run.folder), "--trainer.max_steps")
    again = run_train(tmp_path, *more, "3", *match)
    assert again.code == 0, again.stderr
    other = run_train(tmp_path, *more, "4", "--model.ffn.d_ff", "64")
    assert (other.code, "model.ffn.d_ff: is 53" in other.stderr) == (2, True), other.stderr


def test_accumulation_counts_optimizer_steps(run_train: RunTrain, tmp_path: Path) -> None:
    run = run_train(tmp_path, "--trainer.accumulate_grad_batches", "3")
    assert [row["step"] for row in run.rows if "train/loss" in row] == [2, 4, 6]
    assert [row["step"] for row in run.rows if "train/loss" not in row] == [4, 6]
    # 4 sequences x 16 tokens x 3 batches.
    assert "192 tokens per step" in run.stdout


def test_early_stopping_stops_and_writes_the_steps_since_the_last_row(
    run_train: RunTrain, tmp_path: Path
) -> None:
    # No validation improves by 100 nats: the first is the best, and the second is one too many.
    run = run_train(
        tmp_path,
        "--trainer.early_stopping", "{patience: 1, min_delta: 100}",
        "--trainer.max_steps", "50",
        "--trainer.validate_every_n_steps", "3",
        "--logging.every_n_steps", "4",
    )  # fmt: skip

    assert run.code == 0
    assert [int(row["step"]) for row in run.rows if "validation/loss" in row] == [3, 6]
    assert [int(row["step"]) for row in run.rows if "train/loss" in row] == [4, 6]
    assert "\nended after step 6 of 50 (trainer.early_stopping)\n" in run.stdout


def test_a_run_that_diverges_ends_with_what_happened_and_what_to_try(
    run_train: RunTrain, tmp_path: Path
) -> None:
    run = run_train(
        tmp_path,
        "--optimizer", "{learning_rate: 1e+9, schedule: {warmup_fraction: 0.0}}",
        "--trainer.gradient_clip_val", "0",
        "--trainer.guard.max_skipped_in_a_row", "5",
        "--trainer.max_steps", "40",
        "--model.norm_placement", "post",
    )  # fmt: skip

    assert run.code == 3, run.stderr
    lines = [line for line in run.stderr.splitlines() if not line.startswith("validation at ")]
    alarm, happened, left = lines[-3:]
    cause = r"its (loss|gradient norm) is (nan|inf), which began in (the gradient of )?decoder\.\S+"
    assert re.match(
        rf"alarm: step \d+: skipped \(1 in a row, 5 end the run\): {cause}; if it", alarm
    )
    assert re.fullmatch(
        rf"diverged: step \d+: 5 steps in a row were skipped; the last because {cause}", happened
    )
    assert re.fullmatch(
        rf"diverged: the last good checkpoint is runs/{run.folder.name}/checkpoints/\w+\.ckpt; lower "
        r"optimizer\.learning_rate \(now 1e\+09\) or set trainer\.gradient_clip_val, or raise "
        r"optimizer\.schedule\.warmup_fraction \(now 0\)",
        left,
    )
    assert sum(float(row.get("train/skipped_steps", 0)) for row in run.rows) == 5
    assert (run.folder / "report.html").exists()
    for path in (run.folder / "checkpoints").glob("*.ckpt"):
        state = torch.load(path, weights_only=True)["state_dict"]
        assert all(value.isfinite().all() for value in state.values())


def test_a_skipped_step_is_in_the_results(run_train: RunTrain, tmp_path: Path) -> None:
    count = "self.calls = getattr(self, 'calls', 0) + self.training"
    breaks = f"{count}; x = x * float('nan') if self.calls == 3 else x"
    (tmp_path / "once.py").write_text(OWN_BLOCK % breaks)

    run = run_train(tmp_path, "--model.ffn.type", "once.py:Config")

    assert run.code == 0, run.stderr
    assert run.folder.name.startswith("Config-"), "a custom block names its run"
    assert json.loads((run.folder / "summary.json").read_text())["num_skipped_steps"] == 1
    assert "skipped steps   1\n" in run.stdout
    assert "its loss is nan, but not when the step was repeated; if it recurs" in run.stderr
    losses = [float(row["train/loss"]) for row in run.rows if "train/loss" in row]
    assert len(losses) == 3
    assert all(math.isfinite(loss) for loss in losses)


# torch's tracer looks at `.grad` of what it traces and is warned by torch.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("ffn", ["swiglu", pytest.param("moe", marks=pytest.mark.slow)])
def test_compiled_training_is_the_same_training(
    run_train: RunTrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ffn: str
) -> None:
    # The eager backend traces as the real one does, and generates no code, which takes minutes.
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self: compile_module(self, backend="eager")
    )
    (tmp_path / "plain").mkdir()
    (tmp_path / "compiled").mkdir()
    options = ["--model.ffn", ffn, "--model.num_layers", "1", "--trainer.max_steps", "2"]
    # Each length of a text and each size of a batch is traced.
    options += ["--sample.num_tokens", "0", "--data.validation_tokens", "64"]

    plain = run_train(tmp_path / "plain", *options)
    compiled = run_train(tmp_path / "compiled", *options, "--trainer.compile", "true")

    assert compiled.code == 0, compiled.stderr
    assert float(compiled.rows[0]["train/loss"]) == pytest.approx(
        float(plain.rows[0]["train/loss"]), rel=1e-6
    )
    weights = torch.load(compiled.folder / "checkpoints/best.ckpt", weights_only=True)["state_dict"]
    assert not any("_orig_mod" in name for name in weights)


COMPILING_SECONDS = 1000.0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The clock when the kernels were compiled, which takes long; looking at the clock takes a moment."""
    now, found = [0.0], []

    def look() -> float:
        now[0] += 0.001
        return now[0]

    def load() -> str:
        found.append(now[0])
        now[0] += COMPILING_SECONDS
        return "is not what this test is about"

    for module in (generate, callbacks):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=look))
    monkeypatch.setattr(build, "load", load)
    build.unavailable_reason.cache_clear()
    yield found
    build.unavailable_reason.cache_clear()


@pytest.mark.parametrize(
    "ffn", ["{type: moe, num_experts: 4}", "{type: soft_moe, num_experts: 4}", "dense"]
)
def test_training_does_not_measure_the_compiler(
    run_train: Callable[..., Any], tmp_path: Path, compiled: list[float], ffn: str
) -> None:
    objective = ["--model.causal", "false"] if "soft" in ffn else []
    run = run_train(tmp_path, "--model.ffn", ffn, *objective, "--trainer.max_steps", "2")
    assert run.code == 0, run.stderr
    assert len(compiled) == 1, "once, also for attention by itself"
    seconds = [row["train/seconds"] for row in run.rows if "train/seconds" in row]
    assert 0 < seconds[-1] < 1


def test_generation_does_not_measure_the_compiler(moe_run: Any, compiled: list[float]) -> None:
    done = run_here(
        str(moe_run.folder), "--prompt", "a", "--num-tokens", "3", program="moe_ffn.cli.generate"
    )
    assert len(compiled) == 1
    assert re.search(r"^3 tokens in 0\.00 s", done.stderr, re.MULTILINE), done.stderr


# -- the program on several ranks


def program_on_a_rank(rank: int, argv: list[str]) -> Finished:
    return run_here(*argv)


ALONE = {"devices": 1, "parallel": "null"}
EXPERT_2 = {"devices": 2, "parallel": "{shard: 1, expert: 2}"}
EXPERT_4 = {"devices": 4, "parallel": "{shard: 1, expert: 4}"}
BOTH = {"devices": 4, "parallel": "{data: 2, shard: 1, expert: 2}"}
DATA_2 = {"devices": 2, "parallel": "{data: 2, shard: 1, expert: 1}"}
SHARD_2 = {"devices": 2, "parallel": "{data: 1, shard: 2, expert: 1}"}
SHARD_4 = {"devices": 4, "parallel": "{data: 1, shard: 4, expert: 1}"}


def words(stage: dict[str, Any]) -> list[str]:
    return ["--trainer.devices", str(stage["devices"]), "--parallel", stage["parallel"]]


@pytest.mark.parametrize(
    "stages",
    [
        pytest.param([EXPERT_2, ALONE], id="EP 2, 1"),
        pytest.param([EXPERT_2, ALONE, EXPERT_4], id="EP 2, 1, EP 4", marks=pytest.mark.slow),
        pytest.param([DATA_2, ALONE, DATA_2], id="DDP 2, 1, DDP 2", marks=pytest.mark.slow),
        pytest.param(
            [SHARD_4, BOTH, SHARD_2], id="FSDP 4, EP 2 x DDP 2, FSDP 2", marks=pytest.mark.slow
        ),
    ],
)
def test_a_run_is_resumed_with_any_number_of_ranks(
    stages: list[dict[str, Any]], tmp_path: Path
) -> None:
    alike = {
        "model__ffn": "{type: moe, num_experts: 4, shared_expert: swiglu}",
        "objective__load_balance": "0.0",
        "optimizer__learning_rate": "1e-3",
        "trainer__precision": "32-true",
        "data__batch_size": "4",
    }
    for number, stage in enumerate(stages):
        steps = ("--trainer.max_steps", str(4 * (number + 1)))
        for name in ("ranks", "one"):
            argv = ["--resume", str(tmp_path / "runs" / name), *steps]
            if number == 0:
                argv = [*options(tmp_path, run__name=name, **alike), *steps]
            if name == "one" or stage == ALONE:
                done, others = run_here(*argv, *words(ALONE)), []
            else:
                folder = tmp_path / f"stage{number}"
                argv += words(stage)
                done, *others = on_ranks(stage["devices"], folder, program_on_a_rank, argv)
            assert done.code == 0, done.stderr
            assert "Results in" in done.stdout
            assert [other.stdout for other in others] == [""] * len(others)

    found, expected = (losses(tmp_path / "runs" / name) for name in ("ranks", "one"))
    assert list(found) == list(expected) == list(range(2, 4 * len(stages) + 1, 2))
    assert found == pytest.approx(expected, rel=1e-5)
    # What ranks measure of routing is of the whole batch. Only several have an imbalance between them.
    metrics = [tmp_path / "runs" / name / "metrics.jsonl" for name in ("ranks", "one")]
    first, alone = (dict(next(iter(read_lines(path, Row)))) for path in metrics)
    routing = {key for key in alone if key.startswith("routing/")}
    between_ranks = {f"routing/layer_0{layer}/rank_max_violation" for layer in range(2)}
    assert {key for key in first if key.startswith("routing/")} == routing | between_ranks
    assert len(routing) > 2 * 12
    for key in (
        key for key in routing if not key.endswith("/load_balance")
    ):  # of each rank by itself
        assert first[key] == pytest.approx(alone[key], abs=1e-4), key
    # The windows of a validation are in their order, whichever rank had them.
    ours, theirs = (json.loads(path.with_name("summary.json").read_text()) for path in metrics)
    assert len(set(theirs["window_losses"])) > 2
    for key in ("validation_loss", "validation_bits_per_byte", "window_losses", "num_tokens"):
        assert ours[key] == pytest.approx(theirs[key], abs=1e-3), key
    models = [
        moe_ffn.load_pretrained(tmp_path / "runs" / name / "model") for name in ("ranks", "one")
    ]
    for mine, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
