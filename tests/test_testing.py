"""Public checks of custom parts: the package's own parts pass them, and broken built blocks do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_ffn import ConfigError, FFNBlock, FFNConfig, FFNOutput, TokenContext, build_ffn
from moe_ffn.config.errors import UseCase
from moe_ffn.experts import Experts, ExpertsConfig
from moe_ffn.outputs import Plan, Routing, VariableKRouting
from moe_ffn.routing import (
    LinearRouter,
    LinearTopKConfig,
    Router,
    TopKRouterConfig,
    routing_of_pairs,
)
from moe_ffn.testing import check_experts, check_ffn, check_router
from tests.helpers.every_router import ROUTERS, is_causal

D_MODEL = 16
AHEAD = "so a causal model could see the tokens it must predict"


@pytest.mark.parametrize("ffn", FFNConfig.members)
def test_every_block_of_the_package_passes_and_is_rejected_in_a_causal_model_where_it_is_not(
    ffn: str,
) -> None:
    causal = FFNConfig.model_validate(ffn).unsupported(UseCase(causal=True)) is None
    for part in (ffn, build_ffn(ffn, D_MODEL)):
        check_ffn(part, D_MODEL, causal=causal, seq_len=32)
        if not causal:
            with pytest.raises(ConfigError, match=AHEAD):
                check_ffn(part, D_MODEL, seq_len=32)


@pytest.mark.parametrize(
    "inner",
    [
        "moe",
        "chain_of_experts",
        {"type": "swiglu", "dropout": 0.1},
        {"type": "moe", "router": "noisy_top_k"},
    ],
    ids=["moe", "chain", "dropout", "noise"],
)
def test_a_block_that_gets_only_some_tokens_passes(inner: Any) -> None:
    depths = {"type": "mixture_of_depths", "router": {"type": "relu", "k": 0.5}, "ffn": inner}
    check_ffn({"type": "biased", "ffn": depths}, D_MODEL, seq_len=32)


ONE_OF_EACH = {options["type"]: options for options in reversed(ROUTERS.values())}


@pytest.mark.parametrize("router", ONE_OF_EACH.values(), ids=ONE_OF_EACH)
def test_every_router_of_the_package_passes_alone_and_in_a_block(router: dict[str, Any]) -> None:
    causal = is_causal(router)
    check_router(router, D_MODEL, 4, causal=causal, seq_len=32)
    ffn = build_ffn({"type": "moe", "num_experts": 4, "router": router}, D_MODEL)
    check_ffn(ffn, causal=causal, seq_len=32)
    if not causal:
        with pytest.raises(ConfigError, match=rf"{AHEAD}; use 'top_k', or pass causal=False$"):
            check_router(router, D_MODEL, 4)
        with pytest.raises(
            ConfigError, match=rf"^MoEFFN: router.type .*, {AHEAD}; use 'top_k', or"
        ):
            check_ffn(ffn)


@pytest.mark.parametrize("experts", ExpertsConfig.members)
def test_all_experts_of_the_package_pass(experts: str) -> None:
    options = {"type": experts} | ({"width": 4} if experts == "latent" else {})
    check_experts(options, D_MODEL, 4)


class Leaking(FFNBlock):
    """Adds to each token the one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x: Tensor, context: TokenContext | None = None) -> FFNOutput:
        return FFNOutput(self.up(x + x.roll(-1, dims=1)))


def test_a_built_block_that_looks_ahead_is_rejected_only_in_a_causal_model() -> None:
    with pytest.raises(
        ConfigError,
        match=rf"^Leaking: its output at position 255 changes .*, {AHEAD}; .*, or pass causal=False$",
    ):
        check_ffn(Leaking(), D_MODEL)
    check_ffn(Leaking(), D_MODEL, causal=False)


class LeakingInTraining(Leaking):
    """Looks ahead only in training, where dropout makes each output another."""

    def forward(self, x: Tensor, context: TokenContext | None = None) -> FFNOutput:
        if not self.training:
            return FFNOutput(self.up(x))
        return FFNOutput(nn.functional.dropout(self.up(x + x.roll(-1, dims=1)), 0.1))


def test_dropout_does_not_hide_a_block_that_looks_ahead() -> None:
    with pytest.raises(
        ConfigError, match=r"^LeakingInTraining: .* do \(in training\), so a causal"
    ):
        check_ffn(LeakingInTraining(), D_MODEL)


class DroppingExperts(Experts):
    """Experts whose dropout draws numbers in the order of the plan."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.scale_E = nn.Parameter(torch.ones(num_experts))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x_TD: Tensor, plan: Plan) -> Tensor:
        rows_ND = self.dropout(x_TD[plan.token_indices_N] * plan.weights_N.unsqueeze(-1))
        return torch.zeros_like(x_TD).index_add(0, plan.token_indices_N, rows_ND)


def test_dropout_of_experts_is_no_look_ahead() -> None:
    # Later tokens move the pairs of earlier ones in the plan, and so the random number of each.
    moe: dict[str, Any] = {"type": "moe", "num_experts": 4}
    check_ffn({**moe, "experts": {"type": "swiglu", "dropout": 0.5}}, D_MODEL)
    block: Any = build_ffn(moe, D_MODEL)
    block.experts = DroppingExperts(4)
    check_ffn(block)


def test_a_router_that_draws_k_learns_by_its_largest_k() -> None:
    # Of 1 expert per token the weight is 1, which has no gradient; of 2 and 3 it has one.
    router = {"type": "elastic_top_k", "k_min": 1, "k_max": 3, "renormalize": True}
    for seed in range(4):
        torch.manual_seed(seed)
        check_router(router, D_MODEL, 4)
        check_ffn({"type": "moe", "num_experts": 4, "router": router}, D_MODEL)


class InPlace(Leaking):
    """Overwrites its input, which the residual connection still needs."""

    def forward(self, x: Tensor, context: TokenContext | None = None) -> FFNOutput:
        return FFNOutput(self.up(x.mul_(0.5)))


def test_a_block_that_overwrites_its_input_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"^InPlace: forward changes x in place, which belongs"):
        check_ffn(InPlace(), D_MODEL)


class MatrixConfig(ExpertsConfig, frozen=True):
    """One matrix for each expert, and the mistakes that one can make in adding up their outputs."""

    mistake: str = ""

    def build(self, d_model: int, num_experts: int, experts_per_token: float) -> Experts:
        return Matrices(self, d_model, num_experts)

    def params_per_expert(self, d_model: int, experts_per_token: float) -> int:
        return d_model**2

    def flops_per_pair(self, d_model: int, experts_per_token: float) -> int:
        return 2 * d_model**2


class Matrices(Experts):
    def __init__(self, config: MatrixConfig, d_model: int, num_experts: int) -> None:
        super().__init__()
        self.mistake = config.mistake
        self.weight_EDD = nn.Parameter(torch.randn(num_experts, d_model, d_model))

    def forward(self, x_TD: Tensor, plan: Plan) -> Tensor:
        if self.mistake == "in_place":
            x_TD.mul_(2)
        end_N = torch.arange(len(plan.token_indices_N))
        ids_N = torch.searchsorted(plan.offsets_E, end_N, right=True)
        ids_N = ids_N.clamp(
            max=len(self.weight_EDD) - 1
        )  # pairs that are not computed have weight 0
        y_ND = (self.weight_EDD[ids_N] @ x_TD[plan.token_indices_N].unsqueeze(-1)).squeeze(-1)
        weighted_ND = plan.weights_N[:, None] * y_ND
        if self.mistake == "rounded":
            weighted_ND = weighted_ND.bfloat16().to(x_TD.dtype)
        if self.mistake == "nan_for_two" and len(plan.token_indices_N) > len(x_TD):
            return torch.full_like(x_TD, torch.nan)
        if self.mistake == "last":
            return torch.zeros_like(x_TD).index_copy(0, plan.token_indices_N, weighted_ND)
        sums_TD = torch.zeros_like(x_TD).index_add(0, plan.token_indices_N, weighted_ND)
        return x_TD + sums_TD if self.mistake == "residual" else sums_TD


NOT_THE_SUM = "the output of its experts for two pairs of a token is not the sum of those for one"


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("in_place", "forward changes x_TD in place, which belongs to the model"),
        ("last", NOT_THE_SUM),
        ("residual", NOT_THE_SUM),
        ("nan_for_two", "experts for two pairs of a token contains NaN or infinity"),
    ],
)
def test_experts_that_do_not_return_the_weighted_sum_are_rejected(
    mistake: str, message: str
) -> None:
    check_experts(MatrixConfig.model_validate({}), D_MODEL, 4)
    check_experts(MatrixConfig.model_validate({}), D_MODEL, 1)
    check_experts(MatrixConfig.model_validate({"mistake": "rounded"}), D_MODEL, 4)
    with pytest.raises(ConfigError, match=message):
        check_experts(MatrixConfig.model_validate({"mistake": mistake}), D_MODEL, 4)


class Deaf(FFNBlock):
    """Returns a routing whose weights nothing is multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.router = TopKRouterConfig().build(D_MODEL, 4)
        self.up = nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x: Tensor, context: TokenContext | None = None) -> FFNOutput:
        routing = self.router(x.flatten(0, -2), TokenContext(sequence_length=x.shape[-2]))
        return FFNOutput(self.up(x), {"routing": routing})

    def routers(self) -> dict[str, Any]:
        return {"routing": self.router}


def test_a_block_whose_output_does_not_teach_its_router_is_rejected() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^Deaf: hidden has no gradient with respect to the parameters of its router;",
    ):
        check_ffn(Deaf(), D_MODEL)


class CosineConfig(LinearTopKConfig, frozen=True):
    """A custom router with a learned temperature, and the mistakes that one can make in it."""

    mistake: str = ""

    def build(self, d_model: int, num_experts: int) -> Router:
        return CosineRouter(self, d_model, num_experts)

    def num_params(self, d_model: int, num_experts: int) -> int:
        return super().num_params(d_model, num_experts) + (self.mistake != "miscounted")


class CosineRouter(LinearRouter):
    def __init__(self, config: CosineConfig, d_model: int, num_experts: int) -> None:
        super().__init__(config, d_model, num_experts)
        self.log_temperature = nn.Parameter(torch.tensor(-1.0))

    def forward(self, x_TD: Tensor, context: TokenContext) -> Routing:
        mistake, temperature = self.config.mistake, self.log_temperature.exp()
        if mistake == "detached":
            temperature = temperature.detach()
        if mistake == "in_place":
            x_TD.mul_(2)
        if mistake == "no_mask":
            context = TokenContext(sequence_length=context.sequence_length)
        if mistake == "no_length":
            context = TokenContext(mask=context.mask)
        x_TD = nn.functional.normalize(x_TD, dim=-1)
        if mistake == "raises":
            x_TD = x_TD @ x_TD
        logits_TE = self.logits(x_TD) / (1 if mistake == "auxiliary" else temperature)
        scores_TE = logits_TE.softmax(dim=-1)
        weights_TK, ids_TK = scores_TE.topk(self.config.k, dim=-1)
        if mistake == "nan":
            weights_TK = weights_TK / (ids_TK > 0)
        if mistake == "auxiliary":  # the temperature learns only from the balancing losses
            scores_TE = (logits_TE / temperature).softmax(dim=-1)
        if mistake == "nan_scores":
            scores_TE = scores_TE * torch.nan
        routing = routing_of_pairs(weights_TK, ids_TK, logits_TE, scores_TE, context)
        if mistake == "by_expert":
            order_N = routing.expert_ids_N.argsort()
            names = ("token_indices_N", "expert_ids_N", "weights_N")
            routing = replace(routing, **{name: getattr(routing, name)[order_N] for name in names})
        if mistake == "selected_by_weight":
            fields = {**vars(routing), "selected_N": routing.weights_N}
            routing = VariableKRouting(**fields)
        return routing


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (
            "miscounted",
            r"num_params returns 64, but the module has 65 parameters; correct num_params, which .*",
        ),
        (
            "detached",
            "its parameter log_temperature gets no gradient; compute the tensors of its routing from it, "
            r"without detach\(\) or no_grad\(\), or set its requires_grad to False",
        ),
        ("nan", "its routing has weights_N that are NaN or infinite, although x is finite"),
        ("nan_scores", "its routing has scores_TE that are NaN or infinite, although x is finite"),
        ("in_place", "forward changes x_TD in place, which belongs to the model"),
        (
            "no_mask",
            "its routing has another mask_T than context.mask, so padding would reach experts and losses; "
            "pass context to routing_of_pairs",
        ),
        ("no_length", "its routing has sequence_length 16, expected 8"),
        (
            "by_expert",
            "its routing has token_indices_N that decrease, but the pairs of a token must follow those of "
            "earlier tokens; sort the pairs by token",
        ),
        (
            "selected_by_weight",
            "its routing has selected_N of torch.float32, expected torch.bool",
        ),
    ],
)
def test_a_router_that_breaks_a_promise_is_rejected(mistake: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^'tests.test_testing:CosineConfig': {message}$"):
        check_router(CosineConfig.model_validate({"mistake": mistake}), D_MODEL, 4)


def test_a_router_that_chooses_more_experts_than_there_are_is_rejected() -> None:
    message = r"^router\.k \(5\) must not exceed num_experts \(4\); lower router.k or raise "
    with pytest.raises(ConfigError, match=message):
        check_router(CosineConfig.model_validate({"k": 5}), D_MODEL, 4)


def test_a_good_router_passes_and_an_exception_in_it_keeps_its_traceback() -> None:
    for good in ({}, {"mistake": "auxiliary"}):
        check_router(CosineConfig.model_validate(good), D_MODEL, 4)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied") as raised:
        check_router(CosineConfig.model_validate({"mistake": "raises"}), D_MODEL, 4)
    assert raised.traceback[-1].name == "forward"


def test_the_parameter_without_a_row_for_each_expert_is_named() -> None:
    router = CosineConfig.model_validate({}).build(D_MODEL, 4)
    with pytest.raises(
        ConfigError,
        match=r"^CosineRouter has no row for each expert in log_temperature, so its experts cannot be "
        r"pruned, merged or copied; let your own expert_rows\(\) return only rows, or use router.type",
    ):
        router.expert_rows()


def test_a_check_leaves_the_block_and_the_random_state_as_they_are() -> None:
    block = build_ffn({"type": "jittered", "jitter": 0.1}, D_MODEL).bfloat16().train()
    before = {name: value.clone() for name, value in block.state_dict().items()}
    state = torch.random.get_rng_state()
    check_ffn(block)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert block.training
    assert all(parameter.grad is None for parameter in block.parameters())
    after = block.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert {value.dtype for value in after.values()} == {torch.bfloat16}


def test_what_a_check_cannot_know_is_asked_for_and_mistakes_in_options_are_named() -> None:
    with pytest.raises(
        ConfigError, match=r"^check_ffn needs d_model, the width of the tokens of Leaking$"
    ):
        check_ffn(Leaking())
    with pytest.raises(ConfigError, match=r"^router.k: must be at least 1, got 0$"):
        check_ffn({"type": "moe", "router": {"type": "top_k", "k": 0}}, D_MODEL)
