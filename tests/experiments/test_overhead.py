"""Cost of observing the default model, measured by the program that promises it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from experiments.overhead import MAX_OBSERVING, main


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

    found = re.search(r"^observing takes ([\d.]+)% of a step", capsys.readouterr().out, re.M)
    assert found is not None
    assert 0 < float(found[1]) / 100 < MAX_OBSERVING


@pytest.mark.slow
def test_the_callback_of_the_trainer_costs_less_than_promised(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed here")
    main(["--callback", "true", "--rounds", "1", "--steps", "10"])

    found = re.search(r"^its own code takes ([\d.]+)% of a step", capsys.readouterr().out, re.M)
    assert found is not None
    assert 0 < float(found[1]) / 100 < MAX_OBSERVING
