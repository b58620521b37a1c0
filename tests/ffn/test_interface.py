"""The questions that every block and its config answer, whatever their kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_ffn import FFNConfig, TokenContext, build_ffn
from moe_ffn.config.errors import UseCase

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


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_inner_blocks_stand_in_the_options_of_their_names(block: Any) -> None:
    config = FFNConfig.model_validate(block)
    for option, inner in config.inner_blocks().items():
        assert getattr(config, option) is inner
    held = [option for option, value in config if isinstance(value, FFNConfig)]
    assert held == list(config.inner_blocks())


def test_a_router_inside_a_block_says_where() -> None:
    config = FFNConfig.model_validate(BLOCKS["moe in depths"])
    infos = config.router_infos()
    assert {name: info.path for name, info in infos.items()} == {"routing": "", "inner": "ffn"}
    assert infos["routing"].selects_tokens
    assert not infos["inner"].selects_tokens


@pytest.mark.parametrize(
    ("block", "refusal"),
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
def test_a_backend_is_refused_on_another_device_wherever_it_stands(
    block: Any, refusal: str
) -> None:
    config = FFNConfig.model_validate(block)
    assert str(config.unsupported(UseCase(device="cuda"))) == refusal
    assert config.unsupported(UseCase(device="cpu")) is None


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_a_block_as_it_comes_runs_on_any_device(block: Any) -> None:
    config = FFNConfig.model_validate(block)
    assert (
        config.unsupported(UseCase(device="cpu"))
        is config.unsupported(UseCase(device="cuda"))
        is None
    )
