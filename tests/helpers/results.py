"""Results of runs, made of a few numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cache
from typing import Any

from moe_ffn.config.option_tree import merge, nest_options
from moe_ffn.config.yaml_files import validate
from moe_ffn.runs.budget import Budget, Cost
from moe_ffn.runs.config import TrainConfig
from moe_ffn.studies.result import Curve, Outcome, RunResult

SHA = {"corpus": "c" * 64, "tokenizer": "t" * 64, "validation": "v" * 64}


@cache
def _defaults() -> dict[str, Any]:
    return validate(TrainConfig, {"optimizer": {"type": "adamw"}}).to_dict()


def make_result(
    arm: str,
    seed: int = 0,
    loss: float | None = 2.0,
    *,
    options: dict[str, Any] | None = None,
    tuning: dict[str, Any] | None = None,
    main_arm: str | None = None,
    steps: int = 100,
    curve: list[float] | None = None,
    flops_per_token: int = 1000,
    params: int = 500,
    step_seconds: float = 0.5,
    windows: Sequence[float] = (),
    fingerprints: Mapping[str, str] = SHA,
    machine: dict[str, Any] | None = None,
    **outcome: Any,
) -> RunResult:
    """A finished run with validations evenly spread over its steps, of 10 tokens each.

    Args:
        options: by dotted keys, over the defaults.
        curve: its validation losses; the last is replaced by `loss`.
    """
    config = merge(deepcopy(_defaults()), nest_options((options or {}).items()))
    config |= {"seed": seed}
    del config["run"]
    losses: list[float | None] = [*(curve or [4.0, 3.0])[:-1], loss]
    places = [round(steps * (place + 1) / len(losses)) for place in range(len(losses))]
    points = Curve(
        steps=places,
        tokens=[step * 10 for step in places],
        seconds=[step * step_seconds for step in places],
        losses=losses,
    )
    return RunResult(
        arm=arm,
        seed=seed,
        main_arm=main_arm or arm,
        tuning=tuning or {},
        config=config,
        budget=Budget(
            Cost(params, params // 2, flops_per_token), Cost(params // 2, 9, 9), tokens=steps * 10
        ),
        train=points,
        validation=points,
        outcome=Outcome(
            **{
                "is_finished": True,
                "step": steps,
                "validation_loss": loss,
                "step_seconds": step_seconds,
                "tokens_per_second": 10 / step_seconds,
                "peak_memory_bytes": 600_000_000,
                **outcome,
            }
        ),
        window_losses=list(windows),
        machine=machine or {"precision": "32-true"},
        fingerprints=dict(fingerprints),
    )
