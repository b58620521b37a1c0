"""Blocks built by config alone compute what Hugging Face's blocks of published models compute.

D model width, F width of an expert, E experts, K experts per token, T tokens
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_v3
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.mixtral import modeling_mixtral as mixtral
from transformers.models.olmoe import modeling_olmoe as olmoe
from transformers.models.qwen2_moe import modeling_qwen2_moe as qwen2_moe
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

from moe_ffn import TokenContext, build_ffn
from moe_ffn.balancing.losses import pooled_load_balancing_loss
from moe_ffn.ffn.moe import MoEFFN
from moe_ffn.kernels.select import BACKENDS
from moe_ffn.outputs import Routing

# All different, so that no transposed or swapped tensor fits by chance.
D, F, SHARED_F, E, K = 16, 12, 20, 8, 3
BATCH, SEQ = 3, 16

# ------------------------------------------------------- layouts: their tensor -> one of our tensors

Sources = dict[str, tuple[str, Callable[[Tensor], Tensor]]]
"""Our name -> their name and the layout that makes ours of theirs. A layout only picks and moves
numbers, so the same function takes a gradient of theirs to the gradient of ours."""


def same(theirs: Tensor) -> Tensor:
    return theirs


def gate_first(alternating: Tensor) -> Tensor:
    return torch.cat([alternating[..., 0::2], alternating[..., 1::2]], dim=-1)


ROUTED: Sources = {
    "router.projection.weight": ("gate.weight", same),
    "experts.gate_up": ("experts.gate_up_proj", same),
    "experts.down": ("experts.down_proj", same),
}
QWEN2_MOE: Sources = {
    **ROUTED,
    "shared_expert.gate.weight": ("shared_expert.gate_proj.weight", same),
    "shared_expert.up.weight": ("shared_expert.up_proj.weight", same),
    "shared_expert.down.weight": ("shared_expert.down_proj.weight", same),
    "combine.gate.weight": ("shared_expert_gate.weight", same),
}
DEEPSEEK_V3: Sources = {
    **ROUTED,
    "router.correction_bias_E": ("gate.e_score_correction_bias", same),
    "shared_expert.gate.weight": ("shared_experts.gate_proj.weight", same),
    "shared_expert.up.weight": ("shared_experts.up_proj.weight", same),
    "shared_expert.down.weight": ("shared_experts.down_proj.weight", same),
}
GPT_OSS: Sources = {  # gate and up alternate, and matrices are (in, out)
    "router.projection.weight": ("router.weight", same),
    "router.projection.bias": ("router.bias", same),
    "experts.gate_up": ("experts.gate_up_proj", lambda theirs: gate_first(theirs).mT),
    "experts.down": ("experts.down_proj", lambda down: down.mT),
    "experts.gate_up_bias": ("experts.gate_up_proj_bias", gate_first),
    "experts.down_bias": ("experts.down_proj_bias", same),
}


# ------------------------------------------------------------------------------ the published blocks

SWIGLU_TOP_K = {
    "type": "moe",
    "num_experts": E,
    "router": {"type": "top_k", "k": K},
    "experts": {"type": "swiglu", "d_ff": F},
}
"""The config that the models differ from, each by its `changes`."""


@dataclass(frozen=True)
class Published:
    block: type[nn.Module]
    their_config: Any
    """A class, called with what all have in common and with `their_options`."""
    their_options: dict[str, Any]
    changes: dict[str, Any]
    """Changes of `SWIGLU_TOP_K`, by dotted key."""
    sources: Sources
    wrong: dict[str, Any]
    """Further changes, each of which has to destroy the agreement."""
    load_balance: Callable[..., Any] | None = None
    scale: dict[str, float] = field(default_factory=dict)
    """Their name -> standard deviation, where it is not `SCALE`."""

    def build_theirs(self, seed: int = 0) -> nn.Module:
        """Every parameter and buffer is drawn anew: some of them stand at zero, some at nothing."""
        config = self.their_config(
            hidden_size=D,
            num_experts_per_tok=K,
            experts_implementation="eager",
            **self.their_options,
        )
        block = self.block(config)
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in block.state_dict().items():
            tensor.normal_(std=self.scale.get(name, SCALE), generator=generator)
        return block

    def build_ours(self, backend: str, **changes: Any) -> MoEFFN:
        """Build the block by config alone; the parameters are still our own."""
        config = copy.deepcopy(SWIGLU_TOP_K)
        # Copied too: a change of "router.groups.keep" goes into the value of "router.groups".
        changes = copy.deepcopy({**self.changes, "experts.backend": backend, **changes})
        for dotted, value in changes.items():
            *parents, key = dotted.split(".")
            place: dict[str, Any] = config
            for parent in parents:
                place = place.setdefault(parent, {})
            place[key] = value
        block = build_ffn(config, d_model=D)
        assert isinstance(block, MoEFFN)
        return block

    def copy_of(self, theirs: nn.Module, backend: str) -> MoEFFN:
        """Ours with the parameters of theirs."""
        ours = self.build_ours(backend)
        ours.load_state_dict(self.in_our_layout(theirs.state_dict()))
        return ours

    def in_our_layout(self, theirs: dict[str, Any]) -> dict[str, Tensor]:
        return {ours: layout(theirs[name]) for ours, (name, layout) in self.sources.items()}


SCALE = 0.5
"""Deviation of a random parameter: logits and hidden units of size 2 are neither undecided nor saturated."""


def mixtral_like(prefix: str, model: Any, config: Any, options: dict[str, Any]) -> Published:
    """Experts of softmax top-k and nothing else; Mixtral itself has no choice but to renormalise."""
    renormalize = options.get("norm_topk_prob", True)
    return Published(
        getattr(model, f"{prefix}SparseMoeBlock"),
        config,
        options,
        {"router.renormalize": renormalize},
        ROUTED,
        wrong={"router.renormalize": not renormalize, "experts.type": "geglu"},
        load_balance=model.load_balancing_loss_func,
    )


def published_blocks() -> Iterator[tuple[str, Published]]:
    yield (
        "mixtral",
        mixtral_like(
            "Mixtral", mixtral, MixtralConfig, {"num_local_experts": E, "intermediate_size": F}
        ),
    )
    for renormalize in (False, True):
        suffix = "-renormalized" if renormalize else ""
        options = {"num_experts": E, "norm_topk_prob": renormalize}
        yield (
            f"olmoe{suffix}",
            mixtral_like("Olmoe", olmoe, OlmoeConfig, {**options, "intermediate_size": F}),
        )
        options["moe_intermediate_size"] = F
        yield f"qwen3_moe{suffix}", mixtral_like("Qwen3Moe", qwen3_moe, Qwen3MoeConfig, options)
        yield (
            f"qwen2_moe{suffix}",
            Published(
                qwen2_moe.Qwen2MoeSparseMoeBlock,
                Qwen2MoeConfig,
                {**options, "shared_expert_intermediate_size": SHARED_F},
                {
                    "router.renormalize": renormalize,
                    "shared_expert": {"type": "swiglu", "d_ff": SHARED_F},
                    "combine.type": "sigmoid_gate",
                },
                QWEN2_MOE,
                wrong={"router.renormalize": not renormalize, "combine.type": "sum"},
                load_balance=qwen2_moe.load_balancing_loss_func,
            ),
        )
    yield (
        "deepseek_v3",
        Published(
            deepseek_v3.DeepseekV3MoE,
            DeepseekV3Config,
            {
                "n_routed_experts": 12,
                "moe_intermediate_size": F,
                "n_group": 4,  # of three experts: the two that are scored are not all of a group
                "topk_group": 2,
                "routed_scaling_factor": 2.5,
                "norm_topk_prob": True,
                "n_shared_experts": 2,
            },
            {
                "num_experts": 12,
                "router.type": "sigmoid_top_k",
                "router.scale": 2.5,
                "router.groups": {"num_groups": 4, "keep": 2},
                "shared_expert": {"type": "swiglu", "d_ff": 2 * F},
            },
            DEEPSEEK_V3,
            # Of scores between 0 and 1: enough to change choices, too little to make all of them.
            scale={"gate.e_score_correction_bias": 0.1},
            wrong={
                "router.correction_bias": False,
                "router.groups": None,
                "router.groups.keep": 3,
                "router.groups.score_top": 1,
                "router.scale": 1.0,
                "router.renormalize": False,
                "combine.type": "average",
            },
        ),
    )
    yield (
        "gpt_oss",
        Published(
            gpt_oss.GptOssMLP,
            GptOssConfig,
            {
                "num_local_experts": E,
                "intermediate_size": F,
                "swiglu_alpha": 1.702,
                "swiglu_limit": 7.0,
            },
            {
                "router.softmax": "after",
                "router.bias": True,
                "experts.type": "clamped_swiglu",
                "experts.bias": True,
                "experts.alpha": 1.702,
                "experts.limit": 7.0,
            },
            GPT_OSS,
            wrong={
                "router.softmax": "before",
                "router.bias": False,
                "experts.bias": False,
                "experts.alpha": 1.0,
                "experts.limit": 100.0,
            },
            load_balance=gpt_oss.load_balancing_loss_func,
            # 16 products of unit normals and these add up to a deviation of 8, so that 7 clamps many.
            # What the wide hidden units come to is kept as small as in the other models.
            scale={"experts.gate_up_proj": 2.0, "experts.down_proj": 0.05},
        ),
    )


PUBLISHED = dict(published_blocks())


# ------------------------------------------------------------------------------------- both sides


class TheirRouting(NamedTuple):
    logits_TE: Tensor
    weights_TK: Tensor
    expert_ids_TK: Tensor


def run_theirs(block: nn.Module, x_BSD: Tensor) -> tuple[Tensor, TheirRouting]:
    seen: list[TheirRouting] = []
    router = block.get_submodule("router" if hasattr(block, "router") else "gate")
    hook = router.register_forward_hook(lambda _module, _x, out: seen.append(TheirRouting(*out)))
    hidden = block(x_BSD)
    hook.remove()
    (routing,) = seen
    return hidden[0] if isinstance(hidden, tuple) else hidden, routing


def our_routing(block: MoEFFN, x_BSD: Tensor, context: TokenContext | None = None) -> Routing:
    routing = block(x_BSD, context).routing
    assert isinstance(routing, Routing)
    return routing


def gradients_of(block: nn.Module) -> dict[str, Tensor]:
    gradients = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    assert gradients.keys() == dict(block.named_parameters()).keys()
    return gradients


def assert_same_numbers(ours: Tensor, theirs: Tensor, what: str) -> None:
    # float32 rounds at 6e-8 of a number. Both sides add up the same terms in different orders, at most
    # 48 at a time (the tokens, in a weight's gradient). A few roundings are below 1e-6 of a sum; where
    # terms of size 10 to 100 cancel, they leave some 1e-6.
    torch.testing.assert_close(
        ours, theirs, rtol=1e-5, atol=1e-5, msg=lambda text: f"{what}: {text}"
    )


@pytest.fixture
def x_BSD() -> Tensor:
    return torch.randn(BATCH, SEQ, D, generator=torch.Generator().manual_seed(7))


each_model = pytest.mark.parametrize("published", PUBLISHED.values(), ids=PUBLISHED)
each_backend = pytest.mark.parametrize("backend", BACKENDS)


# ------------------------------------------------------------------------------------------ facts


@each_model
def test_each_number_of_theirs_becomes_exactly_one_of_ours(published: Published) -> None:
    theirs = published.build_theirs().state_dict()
    first, numbered = 0, {}
    for name, tensor in theirs.items():
        numbered[name] = torch.arange(first, first + tensor.numel()).view(tensor.shape)
        first += tensor.numel()

    ours = published.in_our_layout(numbered)

    assert {name for name, _ in published.sources.values()} == theirs.keys()
    assert ours.keys() == published.build_ours("loop").state_dict().keys()
    together = torch.cat([tensor.flatten() for tensor in ours.values()])
    assert torch.equal(together.sort().values, torch.arange(first))


@each_backend
@each_model
def test_routing_is_that_of_the_published_block(
    published: Published, backend: str, x_BSD: Tensor
) -> None:
    theirs = published.build_theirs()
    _, expected = run_theirs(theirs, x_BSD)
    routing = our_routing(published.copy_of(theirs, backend), x_BSD)

    # Sorted within each token: only the set of its experts is a fact, not their order.
    their_ids_TK, their_order_TK = expected.expert_ids_TK.sort(dim=-1)
    ids_TK = routing.expert_ids_N.view_as(their_ids_TK)
    our_ids_TK, our_order_TK = ids_TK.sort(dim=-1)
    assert torch.equal(our_ids_TK, their_ids_TK)
    assert set(our_ids_TK.flatten().tolist()) == set(range(routing.num_experts))  # none idle
    assert_same_numbers(
        routing.weights_N.view_as(ids_TK).gather(-1, our_order_TK),
        expected.weights_TK.gather(-1, their_order_TK),
        "weights",
    )
    assert routing.logits_TE is not None
    assert_same_numbers(routing.logits_TE, expected.logits_TE, "logits")


@each_backend
@each_model
def test_output_and_every_gradient_are_those_of_the_published_block(
    published: Published, backend: str, x_BSD: Tensor
) -> None:
    theirs = published.build_theirs()
    ours = published.copy_of(theirs, backend)
    probe_BSD = torch.randn(x_BSD.shape, generator=torch.Generator().manual_seed(8))
    their_x, our_x = (x_BSD.clone().requires_grad_() for _ in range(2))

    expected, _ = run_theirs(theirs, their_x)
    hidden = ours(our_x).hidden
    (expected * probe_BSD).sum().backward()
    (hidden * probe_BSD).sum().backward()

    assert_same_numbers(hidden, expected, "output")
    assert their_x.grad is not None
    assert our_x.grad is not None
    assert_same_numbers(our_x.grad, their_x.grad, "gradient of x")
    their_gradients = gradients_of(theirs)
    for name, gradient in gradients_of(ours).items():
        their_name, layout = published.sources[name]
        assert gradient.abs().max() > 0
        assert_same_numbers(gradient, layout(their_gradients[their_name]), f"gradient of {name}")


WRONG = {
    f"{name}-{key}={value}": (published, {key: value})
    for name, published in PUBLISHED.items()
    for key, value in published.wrong.items()
}


@pytest.mark.parametrize(("published", "changes"), WRONG.values(), ids=WRONG)
def test_no_other_config_would_agree(
    published: Published, changes: dict[str, Any], x_BSD: Tensor
) -> None:
    theirs = published.build_theirs()
    expected, _ = run_theirs(theirs, x_BSD)
    ours = published.build_ours("loop", **changes)
    # Not strict: some of the changes leave a parameter out.
    assert not ours.load_state_dict(
        published.in_our_layout(theirs.state_dict()), strict=False
    ).missing_keys

    # A thousandth of the largest output is far beyond what parity tolerates.
    furthest = (ours(x_BSD).hidden - expected).abs().max()
    assert furthest > 1e-3 * expected.abs().max()


def test_the_clamps_of_gpt_oss_bite_on_every_side(x_BSD: Tensor) -> None:
    published = PUBLISHED["gpt_oss"]
    ours = published.copy_of(published.build_theirs(), "loop")
    routing = our_routing(ours, x_BSD)
    x_ND = x_BSD.view(-1, D)[routing.token_ids_N]
    weight_NHD = ours.get_parameter("experts.gate_up")[routing.expert_ids_N]
    bias_NH = ours.get_parameter("experts.gate_up_bias")[routing.expert_ids_N]
    product_NH = torch.einsum("nhd,nd->nh", weight_NHD, x_ND) + bias_NH
    gate_NF, up_NF = product_NH.chunk(2, dim=-1)
    for clamped_NF in (gate_NF > 7, up_NF > 7, up_NF < -7):
        # Of a normal with deviation 8, 19% lie above 7.
        assert 0.1 < clamped_NF.float().mean() < 0.3


with_loss = {name: published for name, published in PUBLISHED.items() if published.load_balance}


@pytest.mark.parametrize("padded", [False, True], ids=["all_real", "padded"])
@pytest.mark.parametrize("published", with_loss.values(), ids=with_loss)
def test_the_published_load_balancing_loss_is_k_times_the_pooled_one(
    published: Published, padded: bool, x_BSD: Tensor
) -> None:
    mask_BS = torch.ones(BATCH, SEQ, dtype=torch.bool)
    mask_BS[0, 9:] = False  # right
    mask_BS[1, :4] = False  # left
    theirs = [published.build_theirs(seed=layer) for layer in range(2)]
    ours = [published.copy_of(block, "loop") for block in theirs]

    assert published.load_balance is not None
    expected = published.load_balance(
        tuple(run_theirs(block, x_BSD)[1].logits_TE for block in theirs),
        E,
        K,
        mask_BS.long() if padded else None,
    )
    context = TokenContext(mask=mask_BS) if padded else None
    loss = K * pooled_load_balancing_loss([our_routing(block, x_BSD, context) for block in ours])
    expected.backward()
    loss.backward()

    assert_same_numbers(loss, expected, "loss")
    for our_block, their_block in zip(ours, theirs, strict=True):
        for name, parameter in our_block.router.named_parameters(prefix="router"):
            their_name, layout = published.sources[name]
            their_gradient = their_block.get_parameter(their_name).grad
            assert parameter.grad is not None
            assert their_gradient is not None
            assert_same_numbers(parameter.grad, layout(their_gradient), f"gradient of {name}")
