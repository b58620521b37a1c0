"""A checkpoint whose checksum is right and whose content is malformed is passed over with the reason, and
nothing is touched; one that the program wrote is never refused.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ffn.config.errors import ConfigError
from moe_ffn.runs.reader import load_model
from moe_ffn.training.optimizer import OptimizerConfig
from moe_ffn.training.recovery.checkpoint_file import newest_first, read_checkpoint
from moe_ffn.training.schedule import ScheduleConfig
from tests.helpers.cases import cases
from tests.helpers.resealed import BEST, OPTIONS, Scene, places, put, train, unfinished
from tests.helpers.same_run import differences
from tests.helpers.snapshot import snapshot
from tests.helpers.tiny_runs import options, run_here
from tests.helpers.tiny_runs import run as in_a_process

INF, NAN = math.inf, math.nan
OF_CPU = ("bf16-mixed", "bf16-true", "64-true")
W = "state_dict/decoder.layers.0.attention.query.weight"
MOMENT = "optimizer_states/0/state/0/exp_avg"
COUNT = "optimizer_states/0/state/0/step"
GROUP = "optimizer_states/0/param_groups/0"
LOOP = "loops/fit_loop"
STEPS = "callbacks/StepLogger"
SEEN = "callbacks/ValidationLogger"
KEEPER = "callbacks/CheckpointKeeper"

OVERLAPPING = torch.zeros(2 * 10**6, dtype=torch.int64).as_strided((10**6, 10**6), (1, 1))
"""A small file, and a tensor of 8,000 GB if somebody took its shape at its word."""


def deep(levels: int, innermost: Any = None) -> Any:
    nested: Any = innermost
    for _ in range(levels):
        nested = {"x": nested}
    return nested


def filled(value: float) -> Callable[[Tensor], Tensor]:
    """With `value` as its last number."""

    def fill(tensor: Tensor) -> Tensor:
        tensor.view(-1)[-1:].fill_(value)
        return tensor

    return fill


def shared(values: dict[str, Any]) -> None:
    state = values["optimizer_states"][0]["state"]
    state[1]["exp_avg"] = state[0]["exp_avg"]


def quantized(tensor: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that these will be gone one day
        return torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)


Case = tuple[str, Any, str]
"""A path, what is put there, and a part of the reason; or a name, a function of all values, and the same."""

WEIGHTS: list[Case] = [
    ("state_dict", [], "lacks 'state_dict'"),
    ("state_dict", {}, "lacks the weight"),
    ("identity", None, "lacks 'identity'"),
    ("identity", deep(900), "identity.x.x.x"),
    ("identity/model", {1: 2}, "identity.model: must have keys of text, got 1"),
    ("identity/model/d_model", torch.ones(2, 3), "must be a plain value, got a tensor (2, 3)"),
    ("identity/model/d_model", 10**70, "must be a plain value, got 1000000000"),
    ("identity/model/norm", "a\n\x1b[31mb", "was made with model.norm a\\n\\x1b[31mb, but"),
    ("identity/model/ffn", deep(30), "was made with"),
    ("state_dict/decoder.unembedding.weight", filled(0.5), "has other numbers in 'decoder.unemb"),
    (W, filled(INF), "holds infinity in"),
    (W, filled(-INF), "holds infinity in"),
    (W, filled(NAN), "holds NaN in"),
    (W, lambda t: t.double() * 1e300, "holds infinity in"),
    (W, Tensor.tolist, "in another shape"),
    (W, lambda t: t[:0], "in another shape than (16, 16)"),
    (W, lambda t: torch.zeros(1).expand(10**12), "in another shape"),
    (W, Tensor.to_sparse, "must be a plain tensor, got a sparse"),
    (W, quantized, "as torch.qint8"),
    (W, lambda t: t.to(torch.complex64), "as torch.complex64"),
    (W, lambda t: t.to(torch.float8_e4m3fn), "must hold ordinary numbers, got float8_e4m3fn"),
    (W, lambda t: t.to("meta"), "must hold values, got a tensor without any"),
    (W, lambda t: t.requires_grad_(), "must be a plain tensor, got a Tensor with a gradient"),
    (W, torch.nn.Parameter, "must be a plain tensor, got a Parameter with a gradient"),
    (W, lambda t: t.bool(), "as torch.bool"),
]
"""What a model is read from too."""

TRAINING: list[Case] = [
    ("global_step", -5, "global_step: must be a whole number of at least 0, got -5"),
    ("global_step", True, "global_step: must be"),
    ("global_step", 7.0, "global_step: must be a whole number of at least 0, got 7.0"),
    ("global_step", 10**70, "global_step: must be"),
    ("global_step", 10**9, "optim_progress.optimizer.step.total.completed: must be a w"),
    ("epoch", -1, "epoch: must be"),
    ("epoch", "x", "epoch: must be a whole number"),
    ("pytorch-lightning_version", 2, "pytorch-lightning_version: must be text"),
    ("pytorch-lightning_version", "x", "must be a version from 2.6 on, got 'x'"),
    ("pytorch-lightning_version", "1.0.0", "must be a version from 2.6 on, got '1.0.0'"),
    ("pytorch-lightning_version", "9" * 5000, "must be a version from 2.6 on"),
    ("optimizer_states", [], "optimizer_states: must not be empty"),
    ("optimizer_states", [1], "optimizer_states.0: must be a mapping, got 1"),
    ("optimizer_states/0", {}, "optimizer_states.0: lacks 'state'"),
    ("optimizer_states/0/state", [], "optimizer_states.0.state: must be a mapping"),
    ("optimizer_states/0/state", {}, "is empty after 7 steps"),
    ("optimizer_states/0/state", {"0": {}}, "must be a whole number"),
    ("optimizer_states/0/state", {99: {}}, "is of a parameter that this run does not have"),
    ("optimizer_states/0/state/0", {}, "optimizer_states.0.state.0: lacks 'step'"),
    ("optimizer_states/0/state/0", None, "optimizer_states.0.state.0: must be a mapping"),
    (MOMENT, lambda t: t[1:], "must be a tensor (16, 16), got a tensor (15, 16)"),
    (MOMENT, filled(INF), "holds infinity in 'optimizer_states.0.state.0.exp_avg'"),
    (MOMENT, filled(NAN), "holds NaN in 'optimizer_states.0.state.0.exp_avg'"),
    (MOMENT, lambda t: t.long(), "must hold floating-point numbers, got int64"),
    (MOMENT, lambda t: t[:1].expand(16, 16), "has several numbers in one place"),
    (MOMENT, lambda t: t.as_strided((16, 16), (1, 1)), "has several numbers in one place"),
    (MOMENT, Tensor.to_sparse, "must be a plain tensor, got a sparse"),
    (MOMENT, lambda t: t.to("meta"), "must hold values"),
    ("a shared moment", shared, "shares its place with another tensor"),
    (COUNT, filled(1000.0), "counts 1000 steps, but 7 were taken"),
    (COUNT, filled(-1.0), "steps, but 7 were taken"),
    (COUNT, filled(2.5), "steps, but 7 were taken"),
    ("optimizer_states/0/param_groups", [], "param_groups: must be a list of 2"),
    (f"{GROUP}/lr", "x", "lr: must be a finite number, got 'x'"),
    (f"{GROUP}/betas", [0.5], "betas: must be a list of 2, got a list of 1"),
    (f"{GROUP}/params", [5], "params: must be a list of"),
    ("lr_schedulers", ["x"], "lr_schedulers.0: must be a mapping, got 'x'"),
    ("lr_schedulers", [], "lr_schedulers: must be a list of 1"),
    ("lr_schedulers/0/last_epoch", -1, "last_epoch: must be a whole number"),
    ("lr_schedulers/0/last_epoch", 10**6, "last_epoch: must be a whole number from 7 to 7"),
    ("lr_schedulers/0/base_lrs", [], "base_lrs: must be a list of 2"),
    ("loops", {}, "loops.fit_loop: must be a mapping, got None"),
    ("loops", None, "loops: must be a mapping, got None"),
    ("loops", {"fit_loop": "x"}, "loops.fit_loop: must be a mapping, got 'x'"),
    (LOOP, deep(900), "loops.fit_loop: lacks"),
    (f"{LOOP}/epoch_loop.batch_progress", 3, "batch_progress: must be a mapping, got 3"),
    (f"{LOOP}/epoch_loop.batch_progress/total/ready", -1, "total.ready: must be a whole number"),
    (f"{LOOP}/epoch_loop.batch_progress/total/increment_ready", 1, "which does not belong there"),
    (f"{LOOP}/epoch_loop.batch_progress/is_last_batch", 1, "is_last_batch: must be true or false"),
    (f"{LOOP}/state_dict", {"combined_loader": [{}, {}]}, "fit_loop.state_dict: has 'combined_loader'"),
    ("callbacks", {}, "callbacks.SampleLog: must be a mapping, got None"),
    ("a key that is no text", lambda v: v["callbacks"].update({1: {}}), "callbacks"),
    (STEPS, {}, "callbacks.StepLogger: lacks 'window'"),
    (STEPS, "x", "callbacks.StepLogger"),
    (f"{STEPS}/window/tokens", -1, "window.tokens: must be a whole number of at least 0, got -1"),
    (f"{STEPS}/window/sums/loss", torch.ones(2, 2), "window.sums.loss: must be a tensor ("),
    (f"{STEPS}/window/sums/loss", torch.tensor(1.0), "must be a tensor (1,), got a tensor ()"),
    (f"{STEPS}/window/sums/loss", torch.ones(0), "must be a tensor (1,), got a tensor (0,)"),
    (f"{STEPS}/window/sums/loss", filled(INF), "holds infinity in 'callbacks.StepLogger.window"),
    (f"{STEPS}/routing/load/layer_00", {}, "routing.load.layer_00: lacks "),
    (f"{STEPS}/routing/load/layer_00/pairs_E", torch.ones(9), "pairs_E: must be a tensor (8,)"),
    (f"{STEPS}/window/seconds", INF, "window.seconds: must be a finite number"),
    (f"{STEPS}/routing/idle_steps/layer_00", torch.zeros(2, 4), "idle_steps.layer_00: must be a tensor (8,)"),
    (f"{STEPS}/routing/probe/layer_00", torch.ones(3), "probe.layer_00: must"),
    (f"{STEPS}/routing/last_look", 10**6, "routing.last_look: is 1000000, but"),
    (f"{STEPS}/rules/lasted", [["x", None, 1]], "rules.lasted.0.0: must be one of"),
    (f"{STEPS}/last_row_step", 10, "last_row_step: must be a whole number from 0 to 7"),
    (f"{STEPS}/last_row_step", 10**6, "last_row_step: must be a whole number from 0 to 7, got 1"),
    (f"{STEPS}/routing/idle_steps", {"x": OVERLAPPING}, "idle_steps.x: has several numbers in one place"),
    (f"{STEPS}/routing/probe", {"x": OVERLAPPING}, "probe.x: has several numbers in one place"),
    (f"{SEEN}/last_step", 10, "last_step: must be a whole number from -1 to 7, got 10"),
    (f"{SEEN}/last_step", 10**6, "last_step: must be a whole number from -1 to 7, got 1000000"),
    (f"{SEEN}/last_step", -2, "last_step: must be at least -1, got -2"),
    (f"{SEEN}/last", {}, "ValidationLogger.last: has 0 values"),
    (f"{SEEN}/routing/layer_00/load", torch.ones(7), "load: must be a tensor (8,), got a tensor (7,)"),
    (f"{SEEN}/routing/layer_00", {"load": torch.ones(8)}, "routing.layer_00: lacks 'max_violation'"),
    (f"{KEEPER}/best_loss", -1.0, "best_loss: must be at least 0.0, got -1.0"),
    (f"{KEEPER}/best_loss", NAN, "best_loss: must be"),
    (f"{KEEPER}/best_loss", INF, "best_loss: must be at most 5."),
    (f"{KEEPER}/should_stop", "no", "should_stop: must be true or false"),
    ("callbacks/EarlyStoppingByOptions{}", {"patience": 1}, "EarlyStoppingByOptions: lacks 'wait_count'"),
    ("callbacks/StepTimer", {}, "StepTimer: lacks 'time_elapsed'"),
    ("guard", [], "guard: must be a mapping"),
    ("guard/losses", ["x"], "guard.losses.0: must be a number"),
    ("guard/losses", [1.0] * 33, "guard.losses"),
    ("guard/num_skipped", 10, "guard.num_skipped: must be a whole number from 0 to 7, got 10"),
    ("MixedPrecision", {}, "MixedPrecision: lacks 'scale'"),
    ("native_amp_scaling_state", 1, "native_amp_scaling_state: must be a mapping, got 1"),
]  # fmt: skip
"""What only a run that goes on is read from."""


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(train(tmp_path_factory.mktemp("scene")), 2)


def changed(scene: Scene, path: str, value: Any) -> dict[str, Any]:
    """The values of a case."""
    values = scene.fresh_values()
    if " " in path:
        value(values)
    else:
        put(values, path, value)
    return values


@contextmanager
def deeper():
    """Room to write what is nested deeper than Python goes by itself."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def named(rows: list[Case]) -> list[tuple[str, Case]]:
    return [(f"{row[0].rpartition('/')[2]}: {row[2]}", row) for row in rows]


@pytest.mark.parametrize(("path", "value", "reason"), cases(named(WEIGHTS + TRAINING), quick=11))
def test_it_is_passed_over_for_the_older_one(
    scene: Scene, tmp_path: Path, path: str, value: Any, reason: str
) -> None:
    values = changed(scene, path, value)
    with deeper():
        run = unfinished(
            scene.run, tmp_path, {scene.newest.name: values, scene.older.name: scene.older}
        )

    start = scene.start(run)

    assert start.checkpoint is not None
    assert start.checkpoint.name == scene.older.name
    (said,) = start.passed_over
    assert said.startswith(f"{scene.newest.name} "), said
    assert reason in said
    assert said.isprintable(), said
    assert len(said) < 400, said


def test_the_reason_that_the_documentation_quotes_is_given(scene: Scene) -> None:
    reason = scene.refuse(changed(scene, "guard/num_skipped", -1))
    text = Path(__file__).parents[2].joinpath("docs", "reliability.md").read_text()
    assert f"`{reason}`" in " ".join(text.split())


@pytest.mark.parametrize(("path", "value", "reason"), cases(named(WEIGHTS), quick=15))
def test_no_model_is_read_from_it(
    scene: Scene,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    path: str,
    value: Any,
    reason: str,
) -> None:
    values = changed(scene, path, value)
    with deeper():
        run = unfinished(scene.run, tmp_path, {BEST: values, scene.older.name: scene.older})

    load_model(run)

    line = capsys.readouterr().err
    assert f"{BEST} " in line
    assert reason.replace("decoder.", "").partition(" in")[0] in line
    assert line.rstrip("\n").isprintable()
    (run / "checkpoints" / scene.older.name).unlink()
    with pytest.raises(ConfigError, match="has no good checkpoint"):
        load_model(run)


def refused_by_the_program(run: Path, reason: str, program: str, *argv: str) -> None:
    before = snapshot(run)
    done = run_here(*argv, program=f"moe_ffn.cli.{program}")
    assert done.code == 2, done.stderr
    assert len(done.own_lines) == 1, done.stderr
    assert done.own_lines[0].startswith("error: "), done.stderr
    assert reason in done.own_lines[0]
    assert snapshot(run) == before


@pytest.mark.parametrize(("path", "value", "reason"), cases(named(TRAINING + WEIGHTS), quick=999))
def test_where_all_are_malformed_nothing_is_touched(
    scene: Scene, tmp_path: Path, path: str, value: Any, reason: str
) -> None:
    values = changed(scene, path, value)
    everywhere = dict.fromkeys([scene.newest.name, scene.older.name, BEST], values)
    with deeper():
        run = unfinished(scene.run, tmp_path, everywhere)

    refused_by_the_program(run, reason, "train", "--resume", str(run))
    if path.startswith(("state_dict", "identity")):
        reason = reason.replace("decoder.", "").partition(" in")[0]
        refused_by_the_program(run, reason, "generate", str(run))
        refused_by_the_program(run, reason, "trace", str(run), "--text", "the cat")


# -- what the program itself writes


OWN: dict[str, dict[str, str]] = {
    **{f"optimizer {tag}": {"optimizer": f"{{type: {tag}}}"} for tag in OptimizerConfig.members},
    **{
        f"schedule {tag}": {"optimizer": f"{{type: adamw, schedule: {{type: {tag}}}}}"}
        for tag in ScheduleConfig.members
    },
    **{f"precision {name}": {"trainer__precision": name} for name in OF_CPU},
    "sgd without momentum": {"optimizer": "{type: sgd, momentum: 0.0}"},
    "dense": {"model__ffn": "swiglu"},
    "soft moe": {"model__ffn": "{type: soft_moe, num_experts: 4}", "model__causal": "false"},
    "bias rule": {"model__ffn__router__correction_bias": "true"},
    "untied and no norm of gradients": {"model__tie_embeddings": "false", "trainer__gradient_clip_val": "0"},
    "accumulation": {"trainer__accumulate_grad_batches": "3"},
    "early stopping": {"trainer__early_stopping": "{patience: 1, min_delta: 9.0}"},
    "ended early": {"trainer__max_time": "00:00:00:01", "trainer__max_steps": "100000"},
    "skipped steps": {"trainer__guard": "{max_loss_ratio: 1.0001, max_skipped_in_a_row: 99}"},
    "an end between validations": {"trainer__max_steps": "7", "trainer__validate_every_n_steps": "3"},
    "no step beyond the first": {"trainer__max_steps": "1", "trainer__validate_every_n_steps": "1"},
    "no sample": {"sample__num_tokens": "0"},
    "no rows yet": {"logging__every_n_steps": "100"},
    "more rows than a median": {"trainer__max_steps": "40", "logging__every_n_steps": "1"},
}  # fmt: skip


@pytest.mark.parametrize("changes", cases(OWN, {"optimizer adafactor"}))
def test_what_the_program_wrote_is_not_refused(tmp_path: Path, changes: dict[str, str]) -> None:
    run = train(tmp_path, **changes)

    require_all_good(run)


@pytest.mark.slow
def test_nor_where_it_goes_on_with_other_options(tmp_path: Path) -> None:
    """Momentum taken up and given up, more steps, another rate; twice, across ends of what Lightning
    calls an epoch.
    """
    run = train(tmp_path, optimizer="{type: sgd, momentum: 0.0}")
    for steps, momentum in ((14, 0.9), (19, 0.0), (23, 0.5)):
        (run / "summary.json").unlink(missing_ok=True)
        changes = {
            "trainer.max_steps": steps,
            "optimizer.momentum": momentum,
            "optimizer.learning_rate": 0.1,
        }
        argv = [part for key, value in changes.items() for part in (f"--{key}", str(value))]
        done = run_here("--resume", str(run), *argv)
        assert done.code == 0, done.stderr
        assert "passed over" not in done.stdout
        require_all_good(run)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp"])
def test_nor_what_two_processes_wrote(tmp_path: Path, strategy: str) -> None:
    given = {"trainer__devices": "2", "trainer__strategy": strategy}
    done = in_a_process(*options(tmp_path, **OPTIONS, **given))
    assert done.code == 0, done.stderr

    require_all_good(tmp_path / "runs" / "run")


@pytest.mark.slow
def test_nor_what_code_of_ones_own_keeps(tmp_path: Path) -> None:
    """An optimizer whose state grows with the steps, and has matrices beside a parameter."""
    (tmp_path / "own.py").write_text(OWN_CODE)
    run = train(
        tmp_path, optimizer=f"{{type: '{tmp_path}/own.py:GrowingConfig', learning_rate: 0.01}}"
    )

    require_all_good(run)


OWN_CODE = """
import torch
from torch.optim import Optimizer
from moe_ffn.training.optimizer import decay_groups
from moe_ffn.training.optimizer import OptimizerConfig

class Growing(Optimizer):
    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["norms"] = [*state.get("norms", []), p.grad.norm().item()]
                state["gram"] = p.grad.flatten()[:, None] @ p.grad.flatten()[None, :8]
                if len(state["norms"]) > 3:
                    state["late"] = torch.ones(3, 5)
                p.add_(p.grad, alpha=-group["lr"])
        return loss

class GrowingConfig(OptimizerConfig, frozen=True):
    learning_rate: float = 1e-3

    def build(self, model):
        return Growing(decay_groups(model, self.weight_decay), self.learning_rate)
"""


def require_all_good(run: Path) -> None:
    scene = Scene(run, 0)
    checkpoints = newest_first(run / "checkpoints")
    assert checkpoints
    for path in checkpoints:
        assert scene.refuse(read_checkpoint(path)) is None, path.name
    scene.start(run)
    load_model(run)


# -- every place of a checkpoint


INSTEAD: list[Any] = [None, "x", -1, True, INF, [], {}, torch.ones(2, 3)]
KEPT_KIND = (str, bool, list, dict)
"""Another value of these is not of another kind."""


def replaced(values: dict[str, Any], path: tuple[Any, ...], value: Any) -> Any:
    """Put a value in its place; returns what was there."""
    *parents, last = path
    for part in parents:
        values = values[part]
    before, values[last] = values[last], value
    return before


@pytest.mark.parametrize("every", [97, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("value", INSTEAD, ids=[repr(value)[:9] for value in INSTEAD])
def test_a_value_of_another_kind_is_refused_or_is_never_read(
    scene: Scene, tmp_path: Path, value: Any, every: int
) -> None:
    """At every place of a checkpoint; what is not refused is put in together, and the run ends the same."""
    values, accepted, refused = scene.fresh_values(), [], 0
    for path in list(places(values))[::every]:
        before = replaced(values, path, value)
        if type(before) is not type(value) or not isinstance(value, KEPT_KIND):
            reason = scene.refuse(values)
            if reason is None:
                accepted.append(path)
            else:
                refused += 1
                assert reason.isprintable(), reason
        replaced(values, path, before)
    for path in accepted:
        with suppress(KeyError, IndexError, TypeError):  # inside of what is gone by now
            replaced(values, path, value)
    print(f"{value!r:.12}: {refused} refused, {len(accepted)} never read")
    assert refused > len(accepted), accepted
    if every > 1:
        return
    run = unfinished(scene.run, tmp_path, {scene.newest.name: values, BEST: scene.best})

    done = run_here("--resume", str(run))

    assert done.code == 0, done.stderr
    assert not differences(scene.run, run)
