"""Ranks that share a model take the step of one process: every gradient, its norm, and the weights after.

Gradients are compared before the optimizer, since AdamW hides a factor of two.
"""

from __future__ import annotations

import os
import random
import string
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

import moe_ffn
from moe_ffn import DecoderConfig
from moe_ffn.data.prepare import prepare
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.planner import DEVICES, plan_layouts
from moe_ffn.training.distillation import Answers, digests_of, write_answers
from moe_ffn.training.parallel.layout import Layout
from moe_ffn.training.parallel.sharding import full_tensor
from tests.helpers.first_gradient import first_gradient, fit
from tests.helpers.fitted import MakeConfig
from tests.helpers.memory import pages_above
from tests.helpers.ranks import Sent, on_ranks

Steps = dict[str, dict[str, Tensor]]

BATCH = 4

LAYOUTS = {
    "DDP 2": Layout(data=2),
    "FSDP 2": Layout(shard=2),
    "EP 2": Layout(expert=2),
    "EP 4": Layout(expert=4),
    "EP 2 x FSDP 2": Layout(shard=2, expert=2),
    "EP 2 x DDP 2": Layout(data=2, expert=2),
}

MOE: dict[str, Any] = {"type": "moe", "num_experts": 4, "router": {"type": "top_k", "k": 2}}
TWO: dict[str, Any] = {"num_experts": 2, "router": {"type": "top_k", "k": 1}}
NORMED = {"type": "normed", "input": {}, "each": {}, "experts": "swiglu"}
ONE_OF_ALL = {"type": "sigmoid_top_k", "k": 1, "renormalize": False}

BLOCKS: dict[str, dict[str, Any]] = {
    "capacity": MOE | {"capacity": {"factor": 1.0}},
    "dropless": MOE,
    "sigmoid": MOE | {"router": "sigmoid_top_k", "experts": {"type": "swiglu", "bias": True}},
    "shared": MOE | {"router": {"type": "top_k", "k": 1}, "shared_expert": "swiglu"},
    "nested": MOE | {"experts": {"type": "latent", "width": 16, "experts": NORMED}},
    "relu": MOE | {"router": {"type": "relu", "k": 2}},
    "threshold": MOE | {"router": {"type": "expert_threshold", "k": 2}},
    "chain": {"type": "chain_of_experts", "ffn": MOE | {"router": ONE_OF_ALL}},
    "elastic": MOE | {"router": {"type": "elastic_top_k", "k_max": 4}, "capacity": {"factor": 1.0}},
    "few": MOE | TWO | {"experts": {"type": "fake_quantized"}},
    "two": MOE | TWO,
    "kimi": MOE
    | {
        "router": "sigmoid_top_k",
        "experts": {"type": "latent", "width": 16, "experts": {"type": "normed", "output": {}}},
        "shared_expert": "swiglu",
    },
}
"""A layer of each kind; `few` and `two` have fewer experts than there may be ranks."""

MODEL = "capacity sigmoid shared nested few threshold chain elastic"
"""Blocks of the layers; `dropless` and `relu` differ from some of them in nothing that a rank does."""

# Unlike signs, quantiles show how many batches and ranks their sum is divided by.
OBJECTIVE: dict[str, Any] = {"load_balance_global": 0.1, "bias_rule": "quantile"}
COUPLED = "kimi sigmoid"
OF_COUPLED: dict[str, Any] = {"bias_rule": "global_quantile", "coupling": {"alpha": 0.5}}
"""Blocks of a model with a special objective: a histogram of all ranks, a loss of weights, and stored
answers of a teacher."""

# Sums of some hundred float32 products, added up in another order.
FLOAT32 = 1e-5


COMPLETEP = {"type": "completep", "base": {"d_model": 8, "num_layers": 1}}
SGD = {"type": "sgd", "learning_rate": 0.1, "momentum": 0.0}


def step_of(
    make_config: MakeConfig,
    blocks: str,
    num_ranks: int,
    num_parts: int,
    optimizer: dict[str, Any] = SGD,
    device: str = "cpu",
    teacher: str | None = None,
    parametrization: Any = "standard",
) -> TrainConfig:
    """Config of one step on `num_parts` batches by `num_ranks` ranks, with a layer per block."""
    ffn, *others = [BLOCKS[block] for block in blocks.split()]
    ffn_at = {str(layer): other for layer, other in enumerate(others, start=1)}
    return make_config(
        model={
            "num_layers": 1 + max(1, len(others)),
            "ffn": ffn,
            "ffn_at": ffn_at,
            "parametrization": parametrization,
        },
        objective={
            **(OF_COUPLED if blocks == COUPLED else OBJECTIVE),
            "distill": teacher and {"teacher": teacher},
        },
        data={"batch_size": BATCH * num_ranks},
        optimizer=optimizer,
        trainer={
            "max_steps": 1,
            "accumulate_grad_batches": num_parts // num_ranks,
            "devices": num_ranks,
            "accelerator": device,
        },
    )


def steps_on_a_rank(
    rank: int, configs: dict[str, TrainConfig], layout: Layout, folder: Path
) -> Steps:
    return {name: first_gradient(config, folder, layout) for name, config in configs.items()}


def require_the_step_of_one_process(
    make_config: MakeConfig,
    folder: Path,
    name: str,
    accumulated: int,
    models: list[str],
    device: str = "cpu",
) -> None:
    """Check that tensors of ranks differ by at most float32 rounding, relative to their largest number."""
    layout = LAYOUTS[name]
    num_parts = accumulated * layout.num_ranks
    teacher, answers = str(folder / "teacher"), folder / "answers.safetensors"
    moe_ffn.save_pretrained(DecoderConfig(d_model=8, num_layers=1).build(257, 16), teacher)
    data = prepare(make_config().data)
    about, num_positions = digests_of(data.tokenizer, data.train), len(data.train) - 1
    logits = torch.randn(num_positions, 257, generator=torch.Generator().manual_seed(0))
    write_answers(answers, num_positions, 4, about, [Answers.of(logits, 4)])

    def step(blocks: str, num_ranks: int) -> TrainConfig:
        given = str(answers) if blocks == COUPLED else teacher
        return step_of(make_config, blocks, num_ranks, num_parts, device=device, teacher=given)

    given = {blocks: step(blocks, layout.num_ranks) for blocks in models}, layout, folder
    of_ranks = on_ranks(layout.num_ranks, folder, steps_on_a_rank, *given, device=device)
    found: dict[str, float] = {}
    for blocks in models:
        wanted = first_gradient(step(blocks, 1), folder)
        assert len(wanted) > 2 * 9 * len(blocks.split())
        for steps in of_ranks:
            assert steps[blocks].keys() == wanted.keys()
            for key, value in wanted.items():
                difference = (steps[blocks][key] - value).abs().max()
                relative = (difference / value.abs().max().clamp(min=1e-3)).item()
                found[f"{blocks}: {key}"] = max(found.get(f"{blocks}: {key}", 0.0), relative)
    assert max(found.values()) < FLOAT32, max(found.items(), key=lambda item: item[1])


@pytest.mark.parametrize(
    ("name", "models"),
    [
        ("DDP 2", ["capacity sigmoid threshold elastic"]),
        ("EP 2 x FSDP 2", ["capacity sigmoid shared nested few chain", COUPLED]),
    ],
)
def test_ranks_take_the_step_of_one_process(
    name: str, models: list[str], make_config: MakeConfig, tmp_path: Path
) -> None:
    require_the_step_of_one_process(make_config, tmp_path, name, 2, models)


class CountSent(Callback):
    """Counts what this rank sends while it trains."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self.sent = Sent(layout, rank)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.sent.__enter__()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.sent.__exit__(None, None, None)


def sent_on_a_rank(
    rank: int, config: TrainConfig, layouts: list[Layout], folder: Path
) -> list[dict[str, int]]:
    counts = [CountSent(layout, rank) for layout in layouts]
    for count, layout in zip(counts, layouts, strict=True):
        fit(config, folder, layout, count)
    return [dict(count.sent.bytes) for count in counts]


def test_gradients_are_added_up_over_ranks_once_a_step(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    layouts = [LAYOUTS["FSDP 2"], LAYOUTS["EP 2"]]
    config = make_config(
        model={"ffn": BLOCKS["dropless"]},
        data={"batch_size": BATCH * 2},
        trainer={"max_steps": 1, "accumulate_grad_batches": 2, "devices": 2},
    )
    planned = {plan.layout: plan.traffic for plan in plan_layouts(config, 2, DEVICES["h100"])}

    for of_layouts in on_ranks(2, tmp_path, sent_on_a_rank, config, layouts, tmp_path):
        for layout, counted in zip(layouts, of_layouts, strict=True):
            assert counted["scattered"] == planned[layout].gradients > 0
            assert counted["gathered"] == planned[layout].weights > 2 * planned[layout].gradients


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def test_every_layout_takes_the_step_of_one_process(
    device: str, name: str, accumulated: int, make_config: MakeConfig, tmp_path: Path
) -> None:
    there, needed = torch.cuda.device_count(), LAYOUTS[name].num_ranks
    if device == "cuda" and there < needed:
        pytest.skip(f"a rank has a GPU of its own: {name} needs {needed}, this machine has {there}")
    model = MODEL.replace("few ", "") if name == "EP 4" else MODEL
    models = [model, "dropless relu", COUPLED]
    require_the_step_of_one_process(make_config, tmp_path, name, accumulated, models, device)


class KeepFirstWeights(Callback):
    """Copies the weights with which a fit begins; there are no gradients once a step is over."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.weights = {n: full_tensor(p.detach()).clone() for n, p in pl_module.named_parameters()}

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step:
            assert all(p.grad is None for p in pl_module.parameters())


Beginning = tuple[str, str, dict[str, Tensor]]
"""A layout by its name, a precision, and weights to begin with in place of those drawn."""


def first_weights(
    rank: int, config: TrainConfig, beginnings: list[Beginning], folder: Path
) -> list[dict[str, Tensor]]:
    """Return the weights with which fits begin."""
    found: list[dict[str, Tensor]] = []
    for name, precision, given in beginnings:
        layout = LAYOUTS.get(name, Layout())
        keep = KeepFirstWeights()
        fit(config, folder, layout, keep, precision=precision, weights=given)
        found.append(keep.weights)
    return found


def test_ranks_begin_with_the_weights_of_one_process_or_those_given(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    cases = [
        ("EP 2", "32-true", False),
        ("FSDP 2", "bf16-true", False),
        ("DDP 2", "32-true", True),
        ("EP 2", "32-true", True),
    ]
    rule: dict[str, Any] = {"optimizer": {"type": "adamw"}, "parametrization": COMPLETEP}
    together, alone = (step_of(make_config, "shared", n, 2, **rule) for n in (2, 1))
    precisions = ["32-true", "bf16-true"]
    of_one = first_weights(0, alone, [("1", precision, {}) for precision in precisions], tmp_path)
    drawn = dict(zip(precisions, of_one, strict=True))
    generator = torch.Generator().manual_seed(5)
    given = {
        key.removeprefix("decoder."): torch.randn(value.shape, generator=generator)
        for key, value in drawn["32-true"].items()
        if ".router." not in key  # routers are drawn, as in one process
    }
    assert 10 < len(given) < len(drawn["32-true"])
    beginnings = [(name, precision, given if has else {}) for name, precision, has in cases]

    of_ranks = on_ranks(2, tmp_path, first_weights, together, beginnings, tmp_path)

    for (name, precision, replaced), *found in zip(beginnings, *of_ranks, strict=True):
        expected = drawn[precision]
        for weights in found:
            assert weights.keys() == expected.keys()
            for key, value in weights.items():
                wanted = replaced.get(key.removeprefix("decoder."), expected[key])
                assert torch.equal(value, wanted), (name, key)


def compiled_on_a_rank(rank: int, config: TrainConfig, layout: Layout, folder: Path) -> Any:
    """The step, and how many graphs torch traced for it."""
    compile_module, graphs = torch.nn.Module.compile, []

    def count(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)  # code for it would take minutes to generate
        return graph.forward

    # torch's tracer looks at `.grad` of what it traces, and is warned by torch.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    torch.nn.Module.compile = lambda self: compile_module(self, backend=count)
    return first_gradient(config, folder, layout), len(graphs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DDP 2", "FSDP 2", "EP 2", "EP 2 x FSDP 2"])
def test_compiled_ranks_take_the_step_of_one_process(
    name: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    layout = LAYOUTS[name]
    config = step_of(make_config, "shared", layout.num_ranks, layout.num_ranks)
    trainer = config.trainer.model_copy(update={"compile": True})
    compiled = config.model_copy(update={"trainer": trainer})

    of_ranks = on_ranks(layout.num_ranks, tmp_path, compiled_on_a_rank, compiled, layout, tmp_path)

    wanted = first_gradient(step_of(make_config, "shared", 1, layout.num_ranks), tmp_path)
    for step, num_graphs in of_ranks:
        assert num_graphs > 0
        for key, value in wanted.items():
            torch.testing.assert_close(step[key], value, atol=FLOAT32, rtol=FLOAT32, msg=key)


@pytest.mark.parametrize(
    "parametrization", [COMPLETEP, pytest.param("standard", marks=pytest.mark.slow)], ids=str
)
def test_muon_turns_whole_matrices_that_are_sharded(
    make_config: MakeConfig, parametrization: Any, tmp_path: Path
) -> None:
    """Muon on parts of a matrix would give another matrix, wrong by as much as the whole step."""
    muon = {"type": "muon", "learning_rate": 0.1}
    together, alone = (
        step_of(make_config, "shared two", n, 4, muon, parametrization=parametrization)
        for n in (4, 1)
    )
    layout, start = LAYOUTS["EP 2 x FSDP 2"], KeepFirstWeights()
    first, *_ = on_ranks(4, tmp_path, steps_on_a_rank, {"": together}, layout, tmp_path)

    fit(alone, tmp_path, Layout(), start)
    for key, value in first_gradient(alone, tmp_path).items():
        name = key.removesuffix(" after")
        if name != key and (moved := (value - start.weights[name]).norm()):
            # Its products are in bfloat16, where a gradient's last digit may turn a small direction.
            assert (first[""][key] - value).norm() < 0.05 * moved, key


def peak_of_training(rank: int, config: TrainConfig, layout: Layout, folder: Path) -> int:
    """Bytes at the most while a run trains and saves, above what the process has after a smaller one."""
    small = config.model.model_copy(update={"d_model": 32, "num_layers": 1})
    fit(config.model_copy(update={"model": small}), folder / "small", layout)
    return pages_above(lambda: fit(config, folder / "large", layout))


@pytest.mark.slow
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("name", ["1", *LAYOUTS, "DDP 4", "FSDP 4"])
def test_ranks_use_the_planned_memory(
    name: str, accumulated: int, make_config: MakeConfig, tmp_path: Path
) -> None:
    more = {"1": Layout(), "DDP 4": Layout(data=4), "FSDP 4": Layout(shard=4)}
    layout = (LAYOUTS | more)[name]
    # Of many letters, so that no rank has most of the tokens.
    letters = random.Random(0).choices(string.printable, k=30_000)
    (tmp_path / "text.txt").write_text("".join(letters))
    config = make_config(
        model={
            "d_model": 256,
            "num_layers": 8,
            "attention": {"num_heads": 4},
            "ffn": BLOCKS["shared"] | {"num_experts": 8},
        },
        data={
            "corpus": {"type": "text", "paths": str(tmp_path / "text.txt")},
            "seq_len": 256,
            "batch_size": 2 * layout.num_ranks,
        },
        optimizer={"type": "adamw"},
        trainer={
            "max_steps": 3,
            "accumulate_grad_batches": accumulated,
            "devices": layout.num_ranks,
            "accelerator": "cpu",
        },
    )
    plans = plan_layouts(config, layout.num_ranks, DEVICES["h100"])
    (planned,) = (plan.memory.total for plan in plans if plan.layout == layout)

    taken = on_ranks(layout.num_ranks, tmp_path, peak_of_training, config, layout, tmp_path)

    print(
        f"{name} x {accumulated}: {planned / 1e6:.0f} MB; {', '.join(f'{t / 1e6:.0f}' for t in taken)}"
    )
    # Experts of some ranks have more tokens than those of others, which all together are as planned; loops,
    # loaders and buffers of products take some megabytes, whatever the model.
    assert fmean(taken) == pytest.approx(planned, abs=0.1 * planned + 20e6)
    assert max(taken) < 1.25 * planned


SCRIPT = Path(__file__).parents[2] / "configs/launch/slurm.sh"
STUB = """#!/bin/bash
echo "$(basename "$0") $*" >> calls
exit ${CODE:-0}
"""


def submit(where: Path, *argv: str, code: int = 0) -> tuple[int, list[str]]:
    """The script as `sbatch` runs it, with programs of SLURM that note how they are called."""
    (where / "bin").mkdir()
    for name in ("srun", "scontrol"):
        (where / "bin" / name).write_text(STUB)
        (where / "bin" / name).chmod(0o755)
    given = {"SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "8", "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", SCRIPT, *argv],
        cwd=where,
        env={"PATH": f"{where / 'bin'}:{os.environ['PATH']}", "CODE": str(code), **given},
        capture_output=True,
        text=True,
        check=False,
    )
    calls = where / "calls"
    return done.returncode, calls.read_text().splitlines() if calls.exists() else [done.stderr]


OPTIONS = ("my-run", "--config", "configs/moe.yaml", "--parallel.shard", "8")
GIVEN = "--config configs/moe.yaml --parallel.shard 8 --trainer.num_nodes 2 --trainer.devices 8"


@pytest.mark.parametrize("is_started", [False, True])
def test_a_new_run_is_named_and_a_started_one_resumed(tmp_path: Path, is_started: bool) -> None:
    if is_started:
        (tmp_path / "runs/my-run").mkdir(parents=True)
        (tmp_path / "runs/my-run/config.yaml").touch()
    which = "--resume runs/my-run" if is_started else "--run.name my-run"
    expected = f"srun python -m experiments.train {which} {GIVEN}"
    assert submit(tmp_path, *OPTIONS) == (0, [expected])


@pytest.mark.parametrize(("code", "is_queued_again"), [(143, True), (1, False), (3, False)])
def test_only_a_run_that_was_asked_to_end_is_queued_again(
    tmp_path: Path, code: int, is_queued_again: bool
) -> None:
    found, calls = submit(tmp_path, *OPTIONS, code=code)
    assert found == code
    assert calls[1:] == (["scontrol requeue 7"] if is_queued_again else [])


def test_a_run_without_a_name_is_rejected(tmp_path: Path) -> None:
    code, said = submit(tmp_path)
    assert code != 0
    assert "give the name of the run, then its options" in said[0]
