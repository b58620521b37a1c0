"""What observing costs, measured on the default model by the program that promises it."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
from lightning import Trainer

from experiments.overhead import MAX_OBSERVING, main
from moe_ffn.training.recovery.stopping import Interrupted


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["null", "swiglu"], ids=["moe", "moe with a shared expert"])
def test_observing_costs_less_than_promised(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, shared: str
) -> None:
    main(
        [
            *("--rounds", "1", "--logging.wandb.mode", "disabled"),
            *("--model.ffn.shared_expert", shared, "--data.cache_dir", str(tmp_path / "cache")),
        ]
    )

    found = re.search(r"^observing ([\d.]+)% of the time of a step", capsys.readouterr().out, re.M)
    assert found is not None
    assert 0 < float(found[1]) / 100 < MAX_OBSERVING


def test_ctrl_c_in_the_program_ends_the_measurement_with_a_line(
    tiny_yaml: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise Interrupted(signal.SIGINT, 1)

    monkeypatch.setattr(Trainer, "fit", interrupted)

    options = ["--config", str(tiny_yaml), "--data.cache_dir", str(tmp_path / "cache")]
    with pytest.raises(SystemExit) as stop:
        main([*options, "--rounds", "1", "--steps", "2"])

    assert stop.value.code == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted"
