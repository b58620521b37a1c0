"""build_ffn: a block from a mapping, a name, a config or a class of one's own; and its refusals."""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ffn import ConfigError, FFNConfig, build_ffn
from moe_ffn.ffn import DenseConfig
from moe_ffn.ffn.moe import MoEFFN

OWN_FFN = """
from torch import Tensor, nn

from moe_ffn import FFNBlock, FFNConfig, FFNOutput


class ScaleConfig(FFNConfig, frozen=True):
    factor: float = 2.0

    def build(self, d_model: int) -> FFNBlock:
        return Scale(self.factor)

    def num_params(self, d_model: int) -> int:
        return 0

    def flops_per_token(self, d_model: int, seq_len: int) -> int:
        return 0


class Scale(FFNBlock):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor, context=None) -> FFNOutput:
        return FFNOutput(self.factor * x)


class Unfinished(FFNConfig, frozen=True):
    def num_params(self, d_model: int) -> int:
        return 0


class NotAConfig:
    pass
"""


@pytest.fixture
def own_file(tmp_path: Path) -> Path:
    path = tmp_path / "own_blocks.py"
    path.write_text(OWN_FFN)
    return path


@pytest.mark.parametrize(
    "config",
    ["dense", {"type": "dense"}, DenseConfig(), {"type": "dense", "d_ff": 32}],
    ids=["name", "mapping", "config", "with_options"],
)
def test_every_way_to_name_a_block_builds_it(config: Any) -> None:
    ffn = build_ffn(config, d_model=8)
    assert sum(parameter.numel() for parameter in ffn.parameters()) == 2 * 8 * 32


def test_nested_options_reach_their_parts() -> None:
    config = {
        "type": "moe",
        "num_experts": 3,
        "router": {"type": "top_k", "k": 1},
        "experts": {"type": "mlp", "d_ff": 5},
        "capacity": {"factor": 1.25},
        "shared_expert": "swiglu",
    }
    ffn = build_ffn(config, d_model=8)
    assert isinstance(ffn, MoEFFN)
    assert ffn.get_parameter("experts.up").shape == (3, 5, 8)
    assert ffn.capacity.factor == 1.25
    assert ffn(torch.zeros(2, 8)).routing is not None


# ---------------------------------------------------------------------------- a class of one's own


def test_an_own_class_is_built_by_path(own_file: Path) -> None:
    ffn = build_ffn({"type": f"{own_file}:ScaleConfig", "factor": 3.0}, d_model=8)
    assert ffn(torch.ones(2, 8)).hidden.tolist() == [[3.0] * 8] * 2
    assert build_ffn(f"{own_file}:ScaleConfig", d_model=8)(torch.ones(8)).hidden.sum() == 16


def test_an_own_class_is_built_by_module(own_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(own_file.parent)
    try:
        ffn = build_ffn({"type": "own_blocks:ScaleConfig"}, d_model=8)
        assert ffn(torch.ones(8)).hidden.sum() == 16
    finally:
        sys.modules.pop("own_blocks", None)


def test_an_own_class_serves_as_a_shared_expert(own_file: Path) -> None:
    own = {"type": f"{own_file}:ScaleConfig", "factor": 0.0}
    ffn = build_ffn({"type": "moe", "shared_expert": own}, d_model=8)
    assert ffn(torch.ones(2, 8)).hidden.shape == (2, 8)


def test_own_class_goes_to_a_dict_and_back(own_file: Path) -> None:
    config = FFNConfig.model_validate({"type": f"{own_file}:ScaleConfig", "factor": 3.0})
    plain = config.to_dict()
    assert plain == {"type": f"{own_file}:ScaleConfig", "factor": 3.0}
    assert FFNConfig.model_validate(plain) == config


def test_own_options_are_checked_too(own_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"^facter: unknown; did you mean 'factor'\?$"):
        build_ffn({"type": f"{own_file}:ScaleConfig", "facter": 3.0}, d_model=8)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ScaleConfg", "has no 'ScaleConfg'; did you mean 'ScaleConfig'?"),
        ("NotAConfig", "must be a subclass of FFNConfig, got <class"),
        ("Unfinished", ":Unfinished' must define build, flops_per_token"),
    ],
)
def test_an_own_class_that_cannot_serve_is_refused(own_file: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_ffn(f"{own_file}:{name}", d_model=8)


def test_own_file_that_fails_says_why_and_can_be_mended(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("1 / 0\n")
    with pytest.raises(
        ConfigError, match=r"^type: importing '.*broken\.py' failed: ZeroDivisionError"
    ):
        build_ffn(f"{path}:ScaleConfig", d_model=8)
    path.write_text(textwrap.dedent(OWN_FFN) + "# longer, so that no cached bytecode is taken\n")
    assert build_ffn(f"{path}:ScaleConfig", d_model=8)(torch.ones(8)).hidden.sum() == 16


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ("missing.py:C", "type: importing 'missing.py' failed: FileNotFoundError"),
        ("no_such_module:C", "type: importing 'no_such_module' failed: ModuleNotFoundError"),
        ("math:pi", "type: 'math:pi' must be a subclass of FFNConfig, got 3.14"),
        ("math:tau_config", "type: 'math' has no 'tau_config'"),
        (":C", "type: importing '' failed: ValueError: Empty module name"),
        ("moe_ffn.ffn:FFNConfig", "must define build, flops_per_token, num_params"),
        (
            "moe_ffn.routing:TopKRouterConfig",
            "must be a subclass of FFNConfig, got <class 'moe_ffn.routing.top_k.TopKRouterConfig'>",
        ),
    ],
)
def test_import_paths_that_lead_nowhere_are_told(tag: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_ffn(tag, d_model=8)
