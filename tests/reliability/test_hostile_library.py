"""What is no config, no batch of ids, no measure and no sample is refused in one sentence, never computed."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from moe_ffn import (
    ConfigError,
    Decoder,
    DecoderConfig,
    DenseConfig,
    FFNConfig,
    TopKRouterConfig,
    build_ffn,
)
from moe_ffn.balancing.losses import pairs_per_expert
from moe_ffn.metrics import LanguageMetrics, LoadMetrics, churn, load_cv, max_violation, top1_margin
from moe_ffn.metrics.functional import rank_max_violation
from moe_ffn.metrics.modular import CoactivationMetrics, TokenMetrics
from moe_ffn.model.generate import generate
from moe_ffn.training.optimizer import OptimizerConfig
from moe_ffn.training.schedule import ScheduleConfig
from tests.helpers.refusing import refuses

# ---------------------------------------------------------------------------------------- configs

MOE = {"type": "moe"}
BAD_CONFIGS: list[tuple[Any, str]] = [
    (None, "must be a mapping of options, got None"),
    ([], "must be a mapping of options, got []"),
    ("", "type: unknown ''; known: biased, bilinear, "),
    ({1: 2}, "type: missing; one of: biased, bilinear, "),
    ({"type": True}, "type: must be a name, got True; known: "),
    ({"type": ["moe"]}, "type: must be a name, got ['moe']; known: "),
    ({"type": " moe"}, "type: unknown ' moe'; did you mean 'moe'?; known: "),
    ({**MOE, 1: 2}, "1: unknown; known: type, num_experts, "),
    ({**MOE, "num_experts": True}, "num_experts: must be a whole number, got True"),
    ({**MOE, "num_experts": 8.0}, "num_experts: must be a whole number, got 8.0"),
    ({**MOE, "num_experts": 2**70}, "num_experts: must be at most 1000000000, got 11805916"),
    ({**MOE, "num_experts": np.int64(4)}, "num_experts: must be a whole number, got np.int64(4)"),
    ({**MOE, "num_experts": torch.tensor(4)}, "num_experts: must be a whole number, got tensor(4)"),
    ({**MOE, "router": DenseConfig()}, "router: "),
    ({**MOE, "router": "swiglu"}, "router.type: unknown 'swiglu'; known: balanced_assignment, "),
    ({**MOE, "experts": TopKRouterConfig()}, "experts: "),
    ({**MOE, "capacity": {"factor": True}}, "capacity.factor: must be a number, got True"),
    ({**MOE, "capacity": 1.0}, "capacity: must be a mapping of options, got 1.0"),
    (
        {**MOE, "router": {"type": "top_k", "scale": 1e300}},
        "router.scale: must be at most 1000000000.0, got 1e+300",
    ),
    (
        {**MOE, "experts": {"type": "clamped_swiglu", "alpha": 1e300}},
        "experts.alpha: must be at most 1000000000.0, got 1e+300",
    ),
    (
        {**MOE, "experts": {"type": "clamped_swiglu", "limit": 1e300}},
        "experts.limit: must be at most 1000000000.0, got 1e+300",
    ),
    (
        {**MOE, "router": {"type": "relu", "k": 5e-324}},
        "d_ff: the hidden width would be inf by default, for which there is no memory; set d_ff, or ",
    ),
    (
        {**MOE, "router": {"type": "expert_choice", "k": 1e-300}},
        "d_ff: the hidden width would be 2.13e+301 by default, for which there is no memory; set ",
    ),
]


@pytest.mark.parametrize(("config", "message"), BAD_CONFIGS, ids=[text for _, text in BAD_CONFIGS])
def test_what_is_no_config_is_refused(config: Any, message: str) -> None:
    refuses(lambda: build_ffn(config, 8), message)


def test_a_config_shares_nothing_with_what_it_was_made_of() -> None:
    router: dict[str, Any] = {"type": "top_k", "k": 2}
    config: Any = FFNConfig.model_validate({**MOE, "router": router})
    router["k"] = 4
    config.to_dict()["router"]["k"] = 4
    assert config.router.k == 2
    assert FFNConfig.model_validate(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_a_norm_of_a_zero_vector_is_no_nan(norm: str) -> None:
    with pytest.raises(ValueError, match=r"norm\.eps"):
        DecoderConfig.model_validate({"norm": {"type": norm, "eps": 1e-300}})
    config = DecoderConfig.model_validate({"norm": {"type": norm, "eps": 1e-30}})
    assert (config.norm.build(8)(torch.zeros(3, 8)) == 0).all()


# ------------------------------------------------------------------------------- decoder and text


@cache
def decoder(causal: bool = True) -> Decoder:
    torch.manual_seed(0)
    options = {"d_model": 8, "num_layers": 1, "attention": {"num_heads": 2}, "causal": causal}
    return DecoderConfig.model_validate(options).build(vocab_size=17, max_seq_len=10).eval()


IDS = torch.arange(12).view(2, 6)
REAL = torch.ones(2, 6, dtype=torch.bool)
BAD_BATCHES: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "negative": (
        IDS - 3,
        None,
        ValueError,
        "token_ids must lie in [0, 17), but reach from -3 to 8",
    ),
    "beyond": (IDS + 9, None, ValueError, "token_ids must lie in [0, 17), but reach from 9 to 20"),
    "one_axis": (IDS[0], None, ValueError, "token_ids must be (batch, sequence), but has (6,)"),
    "no_axis": (IDS[0, 0], None, ValueError, "token_ids must be (batch, sequence), but has ()"),
    "three_axes": (
        IDS[None],
        None,
        ValueError,
        "token_ids must be (batch, sequence), but has (1, ",
    ),
    "list": ([[1]], None, TypeError, "token_ids must be a torch.Tensor, but is of type list"),
    "float": (IDS.float(), None, ValueError, "TokenContext.token_ids must be integers, but is "),
    "short_mask": (
        IDS,
        REAL[:, :5],
        ValueError,
        "mask must have the shape of token_ids, (2, 6), but",
    ),
    "flat_mask": (IDS, REAL[0], ValueError, "mask must have the shape of token_ids, (2, 6), but "),
    "one_mask": (IDS, REAL[:1], ValueError, "mask must have the shape of token_ids, (2, 6), but "),
    "list_mask": (IDS, [[True]], TypeError, "mask must be a torch.Tensor, but is of type list"),
}


@pytest.mark.parametrize(("ids", "mask", "error", "message"), BAD_BATCHES.values(), ids=BAD_BATCHES)
@pytest.mark.parametrize("causal", [True, False])
def test_what_is_no_batch_of_the_vocabulary_is_refused(
    causal: bool, ids: Any, mask: Any, error: type[Exception], message: str
) -> None:
    message = message if causal else message.replace("[0, 17)", "[0, 18)")  # there is a mask's id
    refuses(lambda: decoder(causal)(ids, mask), message, error)


@pytest.mark.parametrize("beyond", [18, 99, -1])
def test_only_the_id_of_the_mask_stands_behind_a_vocabulary(beyond: int) -> None:
    model = decoder(causal=False)
    assert model(torch.tensor([[model.mask_token_id, 3]])).logits.isfinite().all()
    message = f"token_ids must lie in [0, 18), but reach from {min(3, beyond)} to {max(3, beyond)}"
    refuses(lambda: model(torch.tensor([[beyond, 3]])), message, ValueError)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32], ids=str)
def test_narrow_ids_are_ids(dtype: torch.dtype) -> None:
    assert torch.equal(decoder()(IDS.to(dtype)).logits, decoder()(IDS).logits)


@pytest.mark.parametrize("size", [0, -3, "17", True, 2.0, None, 2**70], ids=str)
@pytest.mark.parametrize("name", ["vocab_size", "max_seq_len"])
def test_a_model_of_no_size_is_refused(name: str, size: Any) -> None:
    sizes = {"vocab_size": 17, "max_seq_len": 10, name: size}
    refuses(lambda: DecoderConfig().build(**sizes), f"{name} must be ")


@pytest.mark.parametrize("temperature", [1e-6, 1e-45, 1e-300])
def test_a_tiny_temperature_takes_the_most_probable_token(temperature: float) -> None:
    greedy = generate(decoder(), IDS[0], 4, temperature=0)
    assert torch.equal(generate(decoder(), IDS[0], 4, temperature=temperature), greedy)


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_a_broken_model_writes_no_text(temperature: float) -> None:
    model = DecoderConfig(d_model=8).build(17, 10)
    with torch.no_grad():
        model.embedding.weight.fill_(torch.nan)
    message = "the model's largest logit is nan: there is no next token"
    refuses(lambda: generate(model, IDS[0], 2, temperature), message, RuntimeError)
    assert model.training


# ------------------------------------------------------------------------------------------ metrics

IMPOSSIBLE: list[Any] = [0, -2, 2.0, "4", True, None]
COUNTS = torch.tensor([6, 2, 0, 0])
ROUTING: Any = build_ffn({**MOE, "num_experts": 4}, 8)(torch.randn(2, 6, 8)).routing
BAD_MEASURES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    **{
        f"ranks_{value}": (
            lambda value=value: rank_max_violation(COUNTS, value),
            ConfigError,
            "num_ranks must be ",
        )
        for value in IMPOSSIBLE
    },
    **{
        f"{metric.__name__}_{value}": (
            lambda metric=metric, value=value: metric(value),
            ConfigError,
            "num_experts must be ",
        )
        for metric in (LoadMetrics, TokenMetrics, CoactivationMetrics)
        for value in IMPOSSIBLE
    },
    "a_list": (
        lambda: max_violation([1.0, 2.0]),  # pyright: ignore[reportArgumentType]
        TypeError,
        "max_violation takes tensors, but got a value of type list; use torch.tensor(...)",
    ),
    "churn_of_others": (
        lambda: churn(torch.ones(3, 4).bool(), torch.ones(1, 4).bool()),
        ValueError,
        "churn compares two looks at the same tokens and experts, got (3, 4) and (1, 4)",
    ),
    "bytes_of_others": (
        lambda: LanguageMetrics().update(torch.ones(2, 3), torch.ones(3)),
        ValueError,
        "num_bytes must have the shape of nats, (2, 3), but has (3,)",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), BAD_MEASURES.values(), ids=BAD_MEASURES)
def test_what_measures_nothing_is_refused(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    refuses(call, message, error)


def test_counts_are_measured_as_shares_are() -> None:
    for measure in (max_violation, load_cv, lambda load: rank_max_violation(load, 2)):
        torch.testing.assert_close(measure(COUNTS).float(), measure(COUNTS / 8))
    assert max_violation(pairs_per_expert(ROUTING)) >= 0
    assert top1_margin(torch.ones(1)).isnan()


def test_measures_do_not_depend_on_torchs_default_dtype() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        metric = TokenMetrics(4)
    finally:
        torch.set_default_dtype(torch.float32)
    wanted = TokenMetrics(4)
    for _ in range(40):
        metric.update(ROUTING)
        wanted.update(ROUTING)
    assert metric.compute()["entropy"] == wanted.compute()["entropy"]


def test_two_metrics_merge_into_one_of_all_batches_and_a_reset_forgets_them() -> None:
    together, one, other = LoadMetrics(4), LoadMetrics(4), LoadMetrics(4)
    for metric in (one, other, together, together):
        metric.update(ROUTING)
    one.merge_state(other)
    assert str(one.compute()) == str(together.compute())
    one.reset()
    one.update(ROUTING)
    assert str(one.compute()) == str(other.compute())


# -------------------------------------------------------------------------------------- optimizers


@pytest.mark.parametrize("max_steps", [0, 1, 10])
@pytest.mark.parametrize("warmup", [{}, {"warmup_steps": 50}, {"warmup_fraction": 0.999}], ids=str)
@pytest.mark.parametrize("member", ScheduleConfig.members)
def test_a_run_shorter_than_its_warm_up_has_rates(
    member: str, warmup: dict[str, Any], max_steps: int
) -> None:
    schedule = ScheduleConfig.model_validate({"type": member, **warmup})
    rates = [schedule.multiplier(step, max_steps) for step in range(60)]
    assert all(0 <= rate <= 1 for rate in rates)
    assert rates[0] > 0
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])


class OddModel(nn.Module):
    """Parameters of every odd shape, one of them frozen and one never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterDict(
            {
                "scalar": nn.Parameter(torch.tensor(1.0)),
                "vector": nn.Parameter(torch.ones(3)),
                "matrix_1x1": nn.Parameter(torch.ones(1, 1)),
                "zero_matrix": nn.Parameter(torch.zeros(3, 4)),
                "stack": nn.Parameter(torch.ones(5, 1, 3)),
                "frozen": nn.Parameter(torch.ones(2, 2), requires_grad=False),
                "unused": nn.Parameter(torch.ones(2, 2)),
            }
        )


@pytest.mark.parametrize("member", OptimizerConfig.members)
def test_odd_parameters_are_moved_or_left_alone(member: str) -> None:
    model = OddModel()
    optimizer = OptimizerConfig.model_validate({"type": member}).build(model)
    optimizer.step()  # before there is any gradient
    for _ in range(2):
        optimizer.zero_grad()
        used = [value for name, value in model.layers.items() if name != "unused"]
        sum(value.square().sum() for value in used).backward()  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.step()
    assert all(value.isfinite().all() for value in model.parameters())
    for name in ("frozen", "unused"):
        assert (model.layers[name] == 1).all()
    assert all(
        (model.layers[name] < 1).all() for name in ("scalar", "vector", "matrix_1x1", "stack")
    )
    assert (model.layers["zero_matrix"] == 0).all()


def test_muon_takes_no_sparse_gradient() -> None:
    model = nn.Embedding(5, 4, sparse=True)
    optimizer = OptimizerConfig.model_validate({"type": "muon"}).build(model)
    model(torch.tensor([1, 2])).sum().backward()
    refuses(optimizer.step, "Adam does not support sparse gradients", RuntimeError)
