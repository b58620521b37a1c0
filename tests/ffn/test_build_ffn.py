"""build_ffn: a block from a mapping, a name, a config or a class of one's own; and its problems."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ffn import ConfigError, build_ffn
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


def test_an_own_class_serves_as_a_shared_expert(own_file: Path) -> None:
    own = {"type": f"{own_file}:ScaleConfig", "factor": 0.0}
    ffn = build_ffn({"type": "moe", "shared_expert": own}, d_model=8)
    assert ffn(torch.ones(2, 8)).hidden.shape == (2, 8)


def test_own_file_that_fails_says_why_and_can_be_mended(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("1 / 0\n")
    with pytest.raises(
        ConfigError, match=r"^type: importing '.*broken\.py' failed: ZeroDivisionError"
    ):
        build_ffn(f"{path}:ScaleConfig", d_model=8)
    path.write_text(textwrap.dedent(OWN_FFN) + "# longer, so that no cached bytecode is taken\n")
    assert build_ffn(f"{path}:ScaleConfig", d_model=8)(torch.ones(8)).hidden.sum() == 16
