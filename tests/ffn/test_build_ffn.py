"""build_ffn: a block from a mapping, a name, a config or a custom class, and its errors."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ffn import ConfigError, FFNConfig, TokenContext, build_ffn
from moe_ffn.config.errors import UseCase
from moe_ffn.ffn import DenseConfig

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


# ---------------------------------------------------------------------------- a custom class


def test_an_own_class_is_built_by_path(own_file: Path) -> None:
    ffn = build_ffn({"type": f"{own_file}:ScaleConfig", "factor": 3.0}, d_model=8)
    assert ffn(torch.ones(2, 8)).hidden.tolist() == [[3.0] * 8] * 2
    assert build_ffn(f"{own_file}:ScaleConfig", d_model=8)(torch.ones(8)).hidden.sum() == 16


def test_an_own_class_serves_as_a_shared_expert(own_file: Path) -> None:
    own = {"type": f"{own_file}:ScaleConfig", "factor": 0.0}
    ffn = build_ffn({"type": "moe", "shared_expert": own}, d_model=8)
    assert ffn(torch.ones(2, 8)).hidden.shape == (2, 8)


def test_a_failing_custom_file_reports_the_cause_and_can_be_fixed(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("1 / 0\n")
    with pytest.raises(
        ConfigError, match=r"^type: importing '.*broken\.py' failed: ZeroDivisionError"
    ):
        build_ffn(f"{path}:ScaleConfig", d_model=8)
    path.write_text(textwrap.dedent(OWN_FFN) + "# longer, so that no cached bytecode is taken\n")
    assert build_ffn(f"{path}:ScaleConfig", d_model=8)(torch.ones(8)).hidden.sum() == 16


# -- the questions that every block and its config answer, whatever their kind


D_MODEL = 8
CPU_EXPERTS = {"type": "swiglu", "backend": "cpu"}
ON_CUDA = "experts.backend (cpu) runs on cpu, but this run is on cuda; use auto"

BLOCKS: dict[str, Any] = {
    **{member: member for member in FFNConfig.members},
    "moe in depths": {"type": "mixture_of_depths", "ffn": "moe"},
    "conv in depths": {"type": "mixture_of_depths", "ffn": "conv"},
    "shared": {"type": "moe", "shared_expert": "dense", "zero_computation": {"num_copy": 2}},
}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_config_block_and_output_name_the_same_routings(block: Any) -> None:
    config, built = FFNConfig.model_validate(block), build_ffn(block, D_MODEL)
    context = TokenContext(token_ids=torch.zeros(2, 6, dtype=torch.int64))
    output = built(torch.randn(2, 6, D_MODEL), context)
    infos = config.router_infos()
    assert list(infos) == list(built.routers()) == list(output.routings)
    for name, routing in output.routings.items():
        assert infos[name].num_experts == routing.num_experts
        assert len(infos[name].expert_names()) == routing.num_experts


def test_router_infos_give_the_path_of_inner_routers() -> None:
    config = FFNConfig.model_validate(BLOCKS["moe in depths"])
    infos = config.router_infos()
    assert {name: info.path for name, info in infos.items()} == {"routing": "", "inner": "ffn"}
    assert infos["routing"].selects_tokens
    assert not infos["inner"].selects_tokens


@pytest.mark.parametrize(
    ("block", "rejection"),
    [
        ({"type": "moe", "experts": CPU_EXPERTS}, ON_CUDA),
        ({"type": "soft_moe", "experts": CPU_EXPERTS}, ON_CUDA),
        (
            {"type": "mixture_of_depths", "ffn": {"type": "moe", "experts": CPU_EXPERTS}},
            f"ffn.{ON_CUDA}",
        ),
        (
            {"type": "moe", "shared_expert": {"type": "soft_moe", "experts": CPU_EXPERTS}},
            f"shared_expert.{ON_CUDA}",
        ),
    ],
    ids=["moe", "soft_moe", "inside", "shared"],
)
def test_a_backend_is_rejected_on_another_device_wherever_it_stands(
    block: Any, rejection: str
) -> None:
    config = FFNConfig.model_validate(block)
    assert str(config.unsupported(UseCase(device="cuda"))) == rejection
    assert config.unsupported(UseCase(device="cpu")) is None


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_a_block_as_it_comes_runs_on_any_device(block: Any) -> None:
    config = FFNConfig.model_validate(block)
    assert (
        config.unsupported(UseCase(device="cpu"))
        is config.unsupported(UseCase(device="cuda"))
        is None
    )
