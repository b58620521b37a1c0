"""A run that is resumed from a checkpoint is the unbroken run, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from moe_ffn.data.batches import TrainBatches
from moe_ffn.data.prepare import PreparedData
from moe_ffn.runs.config import TrainConfig
from tests.helpers.fitted import Fitted, MakeConfig
from tests.helpers.same_run import assert_same

MODELS = {
    "dropout, a bias, jitter and a capacity": {
        "ffn": {
            "type": "moe",
            "num_experts": 4,
            "router": {"type": "sigmoid_top_k", "jitter": 0.1},
            "experts": {"type": "swiglu", "dropout": 0.1},
            "capacity": {"factor": 1.0},
        },
        "ffn_at": {"1": {"type": "dense", "dropout": 0.1}},
        "dropout": 0.1,
    },
    "relu router with its sparsity rule, and thresholds": {
        "ffn": {"type": "moe", "num_experts": 4, "router": "relu"},
        "ffn_at": {
            "1": {
                "type": "moe",
                "num_experts": 4,
                "router": {"type": "expert_threshold", "warmup_steps": 3},
            }
        },
    },
    "a drawn k": {
        "ffn": {"type": "moe", "num_experts": 4, "router": {"type": "elastic_top_k", "k_max": 4}},
    },
    "masked tokens, noise and random drops": {
        "causal": False,
        "ffn": {
            "type": "moe",
            "num_experts": 4,
            "router": "noisy_top_k",
            "capacity": {"factor": 1.0, "drop": "random"},
        },
    },
    "a histogram of scores, and rows of routers with noise": {
        "ffn": {"type": "moe", "num_experts": 4, "router": "sigmoid_top_k"}
    },
}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "a histogram of scores, and rows of routers with noise": {
        "bias_rule": "global_quantile",
        "coupling": {"alpha": 0.5},
    }
}


VALIDATE_EVERY, MAX_STEPS = 4, 8
CUTS = (4, 5)
"""Steps after a validation and between two validations."""


class Recorder(Callback):
    """Keeps what the run computed; saves after the steps of `CUTS`, and their validation, into a folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.losses: dict[int, Tensor] = {}
        self.gradient_norms: dict[int, Tensor] = {}
        self.validations: dict[int, Tensor] = {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses[batch["index"]] = outputs["objective"].total
        if trainer.fit_loop._should_accumulate():
            return
        self.gradient_norms[trainer.global_step] = pl_module.gradient_norm  # pyright: ignore[reportArgumentType]
        if trainer.global_step % VALIDATE_EVERY:
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validations[trainer.global_step] = trainer.callback_metrics["validation/loss"]
        self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        if self.folder is not None and trainer.global_step in CUTS:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def run(
    config: TrainConfig,
    data: PreparedData,
    folder: Path,
    recorder: Recorder,
    resume_from: Path | None = None,
) -> tuple[dict[str, Any], Any]:
    """Fit as the program does; returns weights and the optimizer's state."""
    folder.mkdir(exist_ok=True)
    done = Fitted(config, data, folder, recorder, resume_from=resume_from)
    return done.module.state_dict(), done.trainer.optimizers[0].state_dict()


@pytest.mark.parametrize(
    "accumulate", [pytest.param(1, marks=pytest.mark.slow), 3], ids=["plain", "accumulating 3"]
)
@pytest.mark.parametrize("model", MODELS)
def test_resuming_is_exact(
    make_config: MakeConfig,
    prepared: PreparedData,
    tmp_path: Path,
    model: str,
    accumulate: int,
) -> None:
    config = make_config(
        model=MODELS[model],
        objective=OBJECTIVES.get(model, {}),
        data={"batch_size": 24},
        trainer={
            "max_steps": MAX_STEPS,
            "validate_every_n_steps": VALIDATE_EVERY,
            "accumulate_grad_batches": accumulate,
            "accelerator": "cpu",
        },
    )
    unbroken, num_batches = Recorder(tmp_path), MAX_STEPS * accumulate

    weights, optimizer = run(config, prepared, tmp_path / "unbroken", unbroken)

    assert list(unbroken.losses) == list(range(num_batches))
    assert list(unbroken.validations) == [4, 8]
    for cut in CUTS:
        _assert_epochs_end_on_both_sides(config, prepared, cut * accumulate, num_batches)
        second, saved = Recorder(), tmp_path / f"{cut}.ckpt"
        resumed_weights, resumed_optimizer = run(
            config, prepared, tmp_path / f"{cut}", second, resume_from=saved
        )
        assert list(second.losses) == list(range(cut * accumulate, num_batches))
        assert list(second.gradient_norms) == list(range(cut + 1, MAX_STEPS + 1))
        assert list(second.validations) == [8]
        for kept in ("losses", "gradient_norms", "validations"):
            resumed, whole = getattr(second, kept), getattr(unbroken, kept)
            assert_same(resumed, {number: whole[number] for number in resumed}, kept)
        assert_same(resumed_weights, weights, "weights")
        assert_same(resumed_optimizer, optimizer, "optimizer")


def _assert_epochs_end_on_both_sides(
    config: TrainConfig, data: PreparedData, cut: int, end: int
) -> None:
    """A pass over the data ends within a batch before the cut, and another one after it."""
    batches = TrainBatches(data.train, seq_len=16, batch_size=config.data.batch_size, seed=0)
    per_epoch = batches.windows_per_epoch / config.data.batch_size
    assert per_epoch % 1
    assert 0 < per_epoch < cut
    assert per_epoch * (cut // per_epoch + 1) < end
