"""Configs that miscount their parameters are rejected before a run begins."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_ffn.config.errors import ConfigError
from moe_ffn.model.decoder import DecoderConfig
from moe_ffn.runs.custom_parts import check_num_params
from tests.helpers.cases import python_with

OWN = """
import torch
from torch import nn
from moe_ffn import FFNBlock, FFNConfig, FFNOutput
from moe_ffn.model.norm import NormConfig
from moe_ffn.routing.top_k import LinearTopKConfig
from moe_ffn.model.positions import Positions, PositionsConfig

class Miscounts(FFNConfig, frozen=True):
    told: int = 7
    def build(self, d_model): return Scale(d_model)
    def num_params(self, d_model): return self.told
    def flops_per_token(self, d_model, seq_len): return 0

class Scale(FFNBlock):
    def __init__(self, d_model):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(d_model))
    def forward(self, x, context=None): return FFNOutput(x * self.scale)

class Shares(Miscounts, frozen=True):
    def build(self, d_model):
        block = Scale(d_model)
        block.scale = scales.setdefault(d_model, block.scale)
        return block
scales = {}

class Norm(NormConfig, frozen=True):
    def build(self, d_model): return nn.LayerNorm(d_model)
    def num_params(self, d_model): return 1

class OfHeads(NormConfig, frozen=True):
    def build(self, d_model): return nn.LayerNorm(d_model)
    def num_params(self, d_model): return 16

class Route(LinearTopKConfig, frozen=True):
    def build(self, d_model, num_experts): return None
    def num_params(self, d_model, num_experts): return "many"

class Where(PositionsConfig, frozen=True):
    def build(self, d_model, head_dim, max_seq_len): return Table(d_model, max_seq_len)

class Table(Positions):
    def __init__(self, d_model, max_seq_len):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(max_seq_len, d_model))

class Uncounted(Where, frozen=True):
    def num_params(self, d_model, max_seq_len): return {}
"""

REJECTED: dict[str, tuple[dict[str, Any], str]] = {
    "block": (
        {"ffn_at": {"1": "own.py:Miscounts"}},
        "model.ffn_at.1 ('own.py:Miscounts') of layer 1: num_params returns 7, but the module "
        "has 8 parameters",
    ),
    "block that shares": (
        {"ffn": {"type": "own.py:Shares", "told": 8}},
        "model.ffn ('own.py:Shares') of layer 1: num_params returns 8, but the module has 0 parameters",
    ),
    "experts": (
        {"ffn": {"type": "moe", "num_experts": 4, "experts": "less.py:AdaptedConfig"}},
        "model.ffn ('moe') of layer 0: num_params returns 8,480, but the module has 12,576 "
        "parameters, because params_per_expert and shared_params of its experts ('less.py:AdaptedConfig') "
        "give 8,448, but they have 12,544; ",
    ),
    "norm": (
        {"norm": "own.py:Norm"},
        "model.norm ('own.py:Norm') of layer 0: num_params returns 1, but the module has 16 parameters",
    ),
    "norm of heads": (  # 4 * 8 * 8, and two norms of width 4, which have 8 parameters each
        {"norm": "own.py:OfHeads", "attention": {"num_heads": 2, "norm_qk": "head"}},
        "model.attention of layer 0: num_params returns 288, but the module has 272 parameters",
    ),
    "positions": (
        {"positions": "own.py:Where"},
        "model.positions ('own.py:Where'): num_params returns 0, but the module has 24 parameters",
    ),
}


@pytest.fixture(autouse=True)
def _own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    code = python_with("AdaptedConfig")
    Path("less.py").write_text(code.replace("def shared_params", "def shared_parameters"))


@pytest.mark.parametrize(("options", "message"), REJECTED.values(), ids=REJECTED)
def test_a_part_that_counts_wrongly_is_named_with_both_numbers(
    options: dict[str, Any], message: str
) -> None:
    sizes = {"d_model": 8, "num_layers": 2, "attention": {"num_heads": 2}}
    decoder = DecoderConfig.model_validate(sizes | options).build(vocab_size=9, max_seq_len=3)
    with pytest.raises(ConfigError, match="^" + re.escape(message)) as rejected:
        check_num_params(decoder)
    assert str(rejected.value).endswith(
        "; correct num_params, which the model table, facts.json and matched widths rely on"
    )
    assert "\n" not in str(rejected.value)


def test_a_layer_that_uses_the_weights_of_another_counts_none() -> None:
    shares = {"ffn": {"type": "own.py:Shares", "told": 8}, "ffn_at": {"1:": {"told": 0}}}
    shares["ffn_at"]["1:"]["type"] = "own.py:Shares"
    model = DecoderConfig.model_validate({"d_model": 8, "attention": {"num_heads": 2}} | shares)
    decoder = model.build(vocab_size=9, max_seq_len=3)
    check_num_params(decoder)
    assert model.num_params(9, 3) == sum(parameter.numel() for parameter in decoder.parameters())


MOE = "{{type: moe, shared_expert: swiglu, {}}}"

NO_NUMBERS = {
    "block": (
        "ffn",
        "none.py:Miscounts",
        "model.ffn ('none.py:Miscounts'): num_params returned None, but ",
    ),
    "error": (
        "ffn",
        MOE.format("experts: 'odd.py:AdaptedConfig'"),
        "model.ffn ('moe') failed: AttributeError: "
        "'AdaptedConfig' object has no attribute 'dff' (odd.py, line 29, in shared_flops_per_token)",
    ),
    "router": (
        "ffn",
        MOE.format("router: 'none.py:Route'"),
        "model.ffn ('moe') failed: TypeError: ",
    ),
    "positions": ("positions", "none.py:Uncounted", "model failed: TypeError: "),
}


@pytest.mark.parametrize(("flag", "value", "message"), NO_NUMBERS.values(), ids=NO_NUMBERS)
def test_nonnumeric_counts_are_rejected_before_summing(
    flag: str, value: str, message: str, reject: Callable[..., str]
) -> None:
    Path("none.py").write_text(OWN.replace("return self.told", "return None"))
    line = "return 2 * d_model * self.d_ff  # up x, once for a token"
    code = python_with("AdaptedConfig")
    assert line in code
    Path("odd.py").write_text(code.replace(line, "return d_model * self.dff"))
    assert reject(f"--model.{flag}", value).startswith(message)


def test_wrong_parameter_counts_are_rejected_once_the_model_is_built(
    run_train: Callable[..., Any], tmp_path: Path
) -> None:
    run = run_train(tmp_path, "--model.norm.type", "own.py:Norm")
    assert run.code == 2
    assert run.stderr.splitlines()[-1] == (
        "error: model.norm ('own.py:Norm') of layer 0: num_params returns 1, but the module has 32 "
        "parameters; correct num_params, which the model table, facts.json and matched widths rely on"
    )
    assert not (tmp_path / "runs").exists()
