"""The block of each layer, and the blocks that a causal decoder rejects."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from moe_ffn import DecoderConfig
from moe_ffn.config.errors import UseCase, explain
from tests.helpers.cases import answers


def types(ffn_at: dict[Any, Any], num_layers: int = 5) -> str:
    config = DecoderConfig.model_validate(
        {"num_layers": num_layers, "ffn": "dense", "ffn_at": ffn_at}
    )
    short = {"dense": "d", "moe": "M", "swiglu": "s", "identity": "i"}
    return "".join(short[ffn.type] for ffn in config.layer_ffns())


@pytest.mark.parametrize(
    ("ffn_at", "layers"),
    [
        ({}, "ddddd"),
        ({"0": "moe"}, "Mdddd"),
        ({"-1": "moe"}, "ddddM"),
        ({"-5": "moe"}, "Mdddd"),
        ({"1::2": "moe"}, "dMdMd"),
        ({"::2": "moe"}, "MdMdM"),
        ({":2": "moe"}, "MMddd"),
        ({"2:": "moe"}, "ddMMM"),
        ({"-2:": "moe"}, "dddMM"),
        ({":": "moe"}, "MMMMM"),
        ({"1:100": "moe"}, "dMMMM"),
        ({" 1 : 3 ": "moe"}, "dMMdd"),
        ({"::-2": "moe"}, "MdMdM"),
        ({0: "moe", -1: "swiglu"}, "Mddds"),
        ({"1:": "moe", "2": "swiglu"}, "dMsMM"),
        ({"2": "swiglu", "1:": "moe"}, "dMMMM"),
        ({":": "moe", "0": "dense", "-1": {"type": "identity"}}, "dMMMi"),
    ],
    ids=str,
)
def test_layers_by_slice_and_the_last_wins(ffn_at: dict[Any, Any], layers: str) -> None:
    assert types(ffn_at) == layers


@pytest.mark.parametrize(
    "where", ["one", "", "1.5", "0:1:0", "0:1:2:3", "a:b", "1,2", "None"], ids=repr
)
def test_bad_slices_are_rejected(where: str) -> None:
    message = f"ffn_at '{where}' must be a layer or a Python slice, such as '0' or '1::2'"
    with pytest.raises(ValidationError, match=re.escape(message)):
        types({where: "moe"})


@pytest.mark.parametrize("where", ["5", "-6", "3:2", "7:"], ids=repr)
def test_slices_without_a_layer_are_rejected(where: str) -> None:
    message = f"ffn_at '{where}' names none of the 5 layers (0 to 4)"
    with pytest.raises(ValidationError, match=re.escape(message)):
        types({where: "moe"})


@pytest.mark.parametrize(
    ("window_at", "windows"),
    [
        (":", "wwwww"),
        ("::2", "w-w-w"),
        ("0, -1", "w---w"),
        (1, "-w---"),
        ([0, 3], "w--w-"),
        ("0,2:4", "w-ww-"),
    ],
)
def test_windows_by_slices(window_at: Any, windows: str) -> None:
    attention = {"window": 3, "window_at": window_at}
    config = DecoderConfig.model_validate({"num_layers": 5, "attention": attention})
    assert "".join("w" if window else "-" for window in config.layer_windows()) == windows
    all_windows, none = (
        DecoderConfig.model_validate({"num_layers": 5, "attention": {"window": window}})
        for window in (3, None)
    )
    saved = none.flops_per_token(9, 32) - all_windows.flops_per_token(9, 32)
    saved_here = none.flops_per_token(9, 32) - config.flops_per_token(9, 32)
    assert saved_here * 5 == saved * windows.count("w")


@pytest.mark.parametrize(
    ("window_at", "message"),
    [
        ("5", "attention.window_at '5' names none of the 5 layers (0 to 4)"),
        ("0,a", "attention.window_at 'a' must be a layer or a Python slice, such as '0' or '1::2'"),
    ],
)
def test_bad_windows_are_rejected(window_at: str, message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        DecoderConfig.model_validate(
            {"num_layers": 5, "attention": {"window": 3, "window_at": window_at}}
        )


def test_layers_with_a_window_need_its_size() -> None:
    with pytest.raises(ValidationError) as caught:
        DecoderConfig.model_validate({"attention": {"window_at": [0, 2]}})
    assert explain(caught.value) == [
        "attention: window_at (0,2) needs window, the number of tokens; set window, or leave window_at out"
    ]


def test_options_of_a_layer_are_checked_under_their_path() -> None:
    with pytest.raises(ValidationError) as caught:
        types({"1::2": {"type": "moe", "num_expert": 4}})
    assert explain(caught.value) == ["ffn_at.1::2.num_expert: unknown; did you mean 'num_experts'?"]


REJECTED = """
{ffn: {type: conv, causal: false}}
    layer 0 ('conv') is not causal: causal (false) with kernel_size (3) looks ahead; set
    it to true, or set model.causal: false
{ffn: {type: moe, shared_expert: {type: conv, causal: false}}}
    layer 0 ('moe') is not causal: shared_expert.causal (false) with kernel_size (3)
    looks ahead; set it to true
{ffn: {type: moe, router: expert_choice}}
    layer 0 ('moe') is not causal: router.type 'expert_choice' ranks tokens against
    later ones; use 'top_k', or set model.causal: false
{ffn: {type: moe, capacity: {factor: 1.0, drop: probability}}}
    layer 0 ('moe') is not causal: capacity.drop 'probability' lets later tokens
    displace earlier ones; use 'position', or set model.causal: false
{ffn: soft_moe}
    layer 0 ('soft_moe') is not causal: type 'soft_moe' mixes all tokens of a sequence;
    use 'moe' with router.type 'top_k', or set model.causal: false
{ffn: {type: mixture_of_depths, ffn: {type: moe, capacity: {factor: 1.0}}, router: {type: relu, k: 0.5}}}
    layer 0 ('mixture_of_depths') is not causal: ffn.capacity depends on the number of
    chosen tokens, including later ones; set ffn.capacity.factor and eval_factor to null, or set
    model.causal: false
{ffn: mixture_of_depths}
    layer 0 ('mixture_of_depths') is not causal: router.type 'expert_choice' ranks
    tokens against later ones; use 'relu' or 'expert_threshold', or set model.causal: false
{ffn: {type: mixture_of_depths, ffn: {type: moe, router: sinkhorn}, router: {type: relu, k: 0.5}}}
    layer 0 ('mixture_of_depths') is not causal: ffn.router.type 'sinkhorn' balances
    tokens against later ones; use 'top_k', or set model.causal: false
{d_model: 130}
    attention.num_heads (4) must divide d_model (130)
{attention: {num_heads: 4, num_kv_heads: 3}}
    attention: num_kv_heads (3) must divide num_heads (4)
{num_layers: 0}
    num_layers: must be at least 1, got 0
{dropout: 1.0}
    dropout: must be less than 1.0, got 1.0
{norm_placement: mid}
    norm_placement: must be one of 'pre' or 'post', got 'mid'
{positions: {type: rope, base: 1.0}}
    positions.base: must be greater than 1.0
{norm: {type: rmsnorm}}
    norm.type: unknown 'rmsnorm'; did you mean 'rms_norm'?
{ffn_at: [moe]}
    ffn_at: must be a mapping, got ['moe']
{ffn: {type: moe, router: {type: top_k, k: 9}}}
    ffn: router.k (9) must not exceed num_experts (8)
"""


@pytest.mark.parametrize(("options", "message"), answers(REJECTED))
def test_bad_options_are_rejected_by_path(options: str, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        DecoderConfig.model_validate(yaml.safe_load(options))
    (line,) = explain(caught.value)
    assert line.startswith(message)


def test_yaml_layers_go_to_a_dict_and_back() -> None:
    config = DecoderConfig.model_validate({"ffn_at": {0: {"type": "dense", "d_ff": 8}}})
    plain = config.to_dict()
    assert plain["ffn_at"]["0"]["d_ff"] == 8
    assert DecoderConfig.model_validate(plain) == config


def test_a_backend_of_another_device_is_rejected_by_its_option() -> None:
    moe = {"type": "moe", "experts": {"type": "swiglu", "backend": "cpu"}}
    inside = {"type": "mixture_of_depths", "ffn": moe, "router": {"type": "relu", "k": 0.5}}
    config = DecoderConfig.model_validate({"ffn": "dense", "ffn_at": {"1::2": inside}})
    assert config.unsupported(UseCase(device="cpu")) is None
    assert str(config.unsupported(UseCase(device="cuda"))) == (
        "ffn_at.1::2.ffn.experts.backend (cpu) runs on cpu, but this run is on cuda; use auto"
    )
