"""The whole decoder: causality, padding, number of parameters and names of layers."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from moe_ffn import Decoder, DecoderConfig, FFNConfig, TokenContext
from moe_ffn.config.errors import UseCase
from moe_ffn.ffn.base import (
    is_inner,
    layer_name,
    layer_number,
    prefix_names,
    round_name,
    short_name,
)
from moe_ffn.model.decoder import DecoderOutput
from moe_ffn.model.norm import NormConfig
from moe_ffn.model.positions import PositionsConfig
from moe_ffn.outputs import FFNOutput
from moe_ffn.routing import RouterConfig
from moe_ffn.routing.capacity import DROP_POLICIES

VOCAB, MAX_LEN = 11, 12

FFNS: dict[str, Any] = {
    **{member: member for member in FFNConfig.members},
    **{
        f"moe-{router}": {"type": "moe", "num_experts": 4, "router": router}
        for router in RouterConfig.members
    },
    **{
        f"moe-{router}-capacity": {
            "type": "moe",
            "num_experts": 4,
            "router": router,
            "capacity": {"factor": 0.5, "eval_factor": 0.5},
        }
        for router in RouterConfig.members
    },
    **{
        f"moe-drop_{drop}": {
            "type": "moe",
            "num_experts": 4,
            "capacity": {"factor": 0.75, "eval_factor": 0.75, "drop": drop},
        }
        for drop in DROP_POLICIES
    },
    "moe-shared_conv": {"type": "moe", "num_experts": 4, "shared_expert": "conv"},
    "moe-zero_computation": {
        "type": "moe",
        "num_experts": 2,
        "zero_computation": {"num_zero": 1, "num_copy": 1, "num_constant": 1},
    },
    "mixture_of_depths-relu": {
        "type": "mixture_of_depths",
        "ffn": {"type": "moe", "num_experts": 4},
        "router": {"type": "relu", "k": 0.5},
    },
}
CAUSAL = {
    name: ffn
    for name, ffn in FFNS.items()
    if FFNConfig.model_validate(ffn).unsupported(UseCase(causal=True)) is None
}
PADDABLE = {name: ffn for name, ffn in FFNS.items() if "forced" not in name}
"""Blocks without the router that uses a token's place in the batch."""
PLACES = [name for name in PositionsConfig.members if name != "rope"]


def at_positions(ffns: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    """Every block with rotary positions, and one block with every other kind of positions."""
    with_others = {f"moe-{positions}": ("moe", positions) for positions in PLACES}
    return {name: (ffn, "rope") for name, ffn in ffns.items()} | with_others


DRAWS = {
    *("moe-noisy_top_k", "moe-noisy_top_k-capacity", "moe-drop_random"),
    *("moe-sparse_mixer", "moe-sparse_mixer-capacity", "jittered"),
}
"""Blocks that draw a number per place of the batch in training; padding moves the places."""


def build(seed: int = 0, **config: Any) -> Decoder:
    torch.manual_seed(seed)
    small = {"d_model": 16, "num_layers": 2, "attention": {"num_heads": 2}}
    ffn = FFNConfig.model_validate(config.get("ffn", "moe"))
    parsed = DecoderConfig.model_validate(
        {**small, "causal": ffn.unsupported(UseCase(causal=True)) is None, **config}
    )
    return parsed.build(vocab_size=VOCAB, max_seq_len=MAX_LEN)


def some_ids(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def logits_of(model: Decoder, *inputs: Tensor) -> Tensor:
    """Logits with the same noise at every call."""
    torch.manual_seed(3)
    return model(*inputs).logits


# ----------------------------------------------------------------------------------- other k

OTHER_K: dict[str, Any] = {
    "top_k": {"type": "moe", "num_experts": 4, "router": {"type": "top_k", "renormalize": True}},
    "elastic_top_k": {"type": "moe", "num_experts": 4, "router": "elastic_top_k"},
    "sparse_mixer": {"type": "moe", "num_experts": 4, "router": "sparse_mixer"},
    "sigmoid latent": {
        "type": "moe",
        "num_experts": 4,
        "router": "sigmoid_top_k",
        "experts": {"type": "latent", "width": 8, "experts": "swiglu"},
        "shared_expert": "swiglu",
    },
    "average": {
        "type": "moe",
        "num_experts": 4,
        "shared_expert": "swiglu",
        "combine": "average",
    },
    "chain": {"type": "chain_of_experts", "ffn": {"num_experts": 4}},
    "inner": {
        "type": "mixture_of_depths",
        "ffn": {"type": "moe", "num_experts": 4},
        "router": {"type": "relu", "k": 0.5},
    },
}


@pytest.mark.parametrize("ffn", OTHER_K.values(), ids=OTHER_K)
@torch.no_grad()
def test_another_k_is_used_by_layer_and_counted(ffn: Any) -> None:
    model = build(ffn=ffn, num_layers=3).eval()
    before = model(some_ids(2, 8)).logits
    sizes = model.config.num_params(VOCAB, MAX_LEN)
    model.set_k({":": 3, "1": 1})
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        output = model(some_ids(2, 8))
    for name, routing in output.routings.items():
        if not model.config.router_infos()[name].selects_tokens:
            k = 1 if layer_number(name) == 1 else 3
            assert routing.active_N.sum() == k * routing.num_real_tokens, name
    assert model.config.num_params(VOCAB, MAX_LEN) == sizes
    saved = model.config.build(VOCAB, MAX_LEN).eval()
    saved.load_state_dict(model.state_dict())
    assert torch.equal(saved(some_ids(2, 8)).logits, model(some_ids(2, 8)).logits)
    if ffn["type"] == "moe":
        seen, square = (
            model.config.attention.flops_per_token(16, 8, causal) for causal in (True, False)
        )
        told = model.config.flops_per_token(VOCAB, 8) + 3 * (square - seen)
        assert counter.get_total_flops() == 16 * told
    model.set_k({":": 2})
    assert torch.equal(model(some_ids(2, 8)).logits, before)


def test_a_capacity_is_given_for_each_layer_that_limits_it() -> None:
    limited = {"type": "moe", "num_experts": 4, "capacity": {"factor": 1.25}}
    model = build(num_layers=3, ffn=limited, ffn_at={"1": "moe", "2": "swiglu"})
    routings = model(some_ids(2, 8)).routings
    (found,) = model.expert_capacities(routings).items()
    assert found == ("layer_00", 10)  # 1.25 * 16 tokens * 2 experts per token / 4 experts
    assert model.eval().expert_capacities(routings) == {}


TABLE = {"type": "moe", "router": {"type": "top_k", "token_table": {"vocab_size": 11}}}
NO_K = "no router of these layers chooses k experts by score, as 'top_k' does (routers: "


@pytest.mark.parametrize(
    ("ffn", "k_at", "message"),
    [
        ("moe", {":": 9}, "k_at: layer 0: router.k (9) must not exceed num_experts (8); lower k"),
        (
            "moe",
            {":": 2, "1": 9},
            "k_at: layer 1: router.k (9) must not exceed num_experts (8); lower k",
        ),
        ("moe", {":": 0}, "k_at ':' must be at least 1"),
        ("moe", {"5": 2}, "k_at '5' names none of the 2 layers (0 to 1)"),
        ("swiglu", {":": 2}, f"k_at ':': {NO_K}none"),
        ({"type": "moe", "router": "relu"}, {":": 2}, f"k_at ':': {NO_K}'relu'"),
        (TABLE, {"0": 2}, f"k_at '0': {NO_K}'top_k'"),
    ],
)
def test_another_k_that_does_not_fit_is_rejected(ffn: Any, k_at: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        build(ffn=ffn).set_k(k_at)


# -------------------------------------------------------------------------------- the properties


@pytest.mark.parametrize(
    ("ffn", "positions"), at_positions(CAUSAL).values(), ids=at_positions(CAUSAL)
)
def test_later_tokens_change_no_earlier_logits(ffn: Any, positions: str) -> None:
    model = build(ffn=ffn, positions=positions, num_layers=3).double().train()
    ids = some_ids(3, 10)
    before = logits_of(model, ids)
    for position in (1, 5, 9):
        altered = ids.clone()
        altered[:, position:] = (ids[:, position:] + 1) % VOCAB
        after = logits_of(model, altered)
        # float64: only the rounding of products of other shapes may differ.
        torch.testing.assert_close(after[:, :position], before[:, :position], rtol=0, atol=1e-12)
        assert (after[:, position:] - before[:, position:]).abs().amin(-1).max() > 0


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(
    ("ffn", "positions"), at_positions(PADDABLE).values(), ids=at_positions(PADDABLE)
)
def test_right_padding_changes_nothing_for_real_tokens(
    ffn: Any, positions: str, training: bool
) -> None:
    training = training and ffn not in [FFNS[name] for name in DRAWS]
    model = build(ffn=ffn, positions=positions).double().train(training)
    ids = some_ids(2, 6)
    real = logits_of(model, ids)
    padded = torch.cat([ids, some_ids(2, 4, seed=2)], dim=1)
    logits = logits_of(model, padded, torch.arange(10).expand(2, 10) < 6)
    torch.testing.assert_close(logits[:, :6], real, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ffn", PADDABLE.values(), ids=PADDABLE)
def test_left_padding_changes_nothing_where_positions_are_relative(ffn: Any) -> None:
    model = build(ffn=ffn, positions="rope").double().eval()
    ids = some_ids(2, 6)
    padded = torch.cat([some_ids(2, 3, seed=2), ids], dim=1)
    mask = torch.arange(9).expand(2, 9) >= 3
    logits = model(padded, mask).logits[:, 3:]
    # The rotations are float32 tables: shifted products agree to their seven digits.
    torch.testing.assert_close(logits, model(ids).logits, rtol=0, atol=1e-6)


# ---------------------------------------------------------------------------------- the output


def test_output_is_a_pytree() -> None:
    output = build(ffn="moe")(some_ids(2, 5))
    leaves, structure = pytree.tree_flatten(output)
    again = pytree.tree_unflatten(leaves, structure)
    assert isinstance(again, DecoderOutput)
    assert torch.equal(again.logits, output.logits)
    assert again.routings.keys() == output.routings.keys()
    detached = pytree.tree_map_only(Tensor, Tensor.detach, output)
    assert not detached.logits.requires_grad
    assert not detached.routings["layer_00"].weights_N.requires_grad


def test_a_sequence_may_be_as_long_as_the_model_and_no_longer() -> None:
    model = build()
    assert model(some_ids(1, MAX_LEN)).logits.shape == (1, MAX_LEN, VOCAB)
    message = r"the sequence has 13 tokens, but the model was built for max_seq_len \(12\)"
    with pytest.raises(ValueError, match=message):
        model(some_ids(1, MAX_LEN + 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm", NormConfig.members)
@pytest.mark.parametrize("positions", PositionsConfig.members)
def test_half_precision_models_run(positions: str, norm: str, dtype: torch.dtype) -> None:
    model = build(ffn="moe", positions=positions, norm=norm).to(dtype)
    output = model(some_ids(2, 5))
    assert output.logits.dtype == dtype
    assert output.routings["layer_00"].logits_TE.dtype == torch.float32


# ----------------------------------------------------------------------------------- the parts


def a_block_and_its_input(**config: Any) -> tuple[Any, Any, Tensor]:
    model = build(num_layers=1, **config).double()
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(2, 5, 16, generator=generator, dtype=torch.float64)
    return model.layers[0], model.positions, x


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("norm", NormConfig.members)
def test_a_norm_is_of_the_stream_before_a_sublayer_or_of_its_sum(norm: str, placement: str) -> None:
    block, positions, x = a_block_and_its_input(ffn="moe", norm=norm, norm_placement=placement)
    output = block(x, positions, TokenContext())
    if placement == "pre":
        stream = x + block.attention(block.attention_norm(x), positions, None)
        stream = stream + block.ffn(block.ffn_norm(stream)).hidden
    else:
        stream = block.attention_norm(x + block.attention(x, positions, None))
        stream = block.ffn_norm(stream + block.ffn(stream).hidden)
    torch.testing.assert_close(output.hidden, stream, rtol=0, atol=1e-12)
    assert output.routing is not None


def test_norm_formulas_by_hand() -> None:
    # x = (3, 4): mean square 12.5, so 3 / 3.5355 = 0.848528 and 4 / 3.5355 = 1.131371.
    # Layer norm: mean 3.5, deviation 0.5: -1 and 1. The default eps change the fifth digit at most.
    x = torch.tensor([3.0, 4.0])
    rms = NormConfig.model_validate("rms_norm").build(2)(x)
    layer = NormConfig.model_validate("layer_norm").build(2)(x)
    assert rms.tolist() == pytest.approx([0.848528, 1.131371], abs=1e-4)
    assert layer.tolist() == pytest.approx([-1, 1], abs=1e-4)
    # Epsilons are added to the mean square, 12.5 + 3.5 = 4 ** 2, and to the variance, 0.25 + 3.75 = 2 ** 2.
    rms = NormConfig.model_validate({"type": "rms_norm", "eps": 3.5}).build(2)(x)
    layer = NormConfig.model_validate({"type": "layer_norm", "eps": 3.75}).build(2)(x)
    assert rms.tolist() == pytest.approx([3 / 4, 1])
    assert layer.tolist() == pytest.approx([-1 / 4, 1 / 4])


def test_decoder_is_its_parts_in_order() -> None:
    for placement in ("pre", "post"):
        model: Any = build(ffn="dense", positions="learned", norm_placement=placement).double()
        ids = some_ids(2, 5)
        x = model.positions.embed(model.embedding(ids))
        for layer in model.layers:
            x = layer(x, model.positions, TokenContext()).hidden
        if placement == "pre":
            x = model.final_norm(x)
        logits = x @ model.unembedding.weight.T
        torch.testing.assert_close(model(ids).logits, logits, rtol=0, atol=1e-12)


def kept_for_backward(**options: Any) -> int:
    """Bytes that the graph of a forward pass keeps, weights apart, and what is kept to compute again."""
    model = build(num_layers=3, **options)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(some_ids(2, 8))
    assert output.logits.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("norm_placement", ["pre", "post"])
@pytest.mark.parametrize("ffn", ["swiglu", "moe"])
def test_recomputed_parts_are_not_kept(ffn: str, norm_placement: str) -> None:
    options: dict[str, Any] = {"ffn": ffn, "norm_placement": norm_placement}
    nothing, of_ffn, of_block, of_true = (
        kept_for_backward(activation_checkpointing=what, **options)
        for what in (False, "ffn", "block", True)
    )

    assert of_block == of_true < of_ffn < nothing
    # Layers, tokens, gate and up (of a dense block their product too) of 8 / 3 * 16, float32.
    hidden = 3 * 2 * 8 * ((3 if ffn == "swiglu" else 2) * 40) * 4
    assert nothing - of_ffn >= hidden
    model = build(num_layers=3, activation_checkpointing="ffn", **options)
    plain = build(num_layers=3, **options)
    assert torch.equal(model(some_ids(2, 8)).logits, plain(some_ids(2, 8)).logits)


def test_scaled_embeddings_are_multiplied_by_the_root_of_d_model() -> None:
    plain: Any = build(num_layers=1, ffn="identity", scale_embeddings=False)
    scaled: Any = build(num_layers=1, ffn="identity", scale_embeddings=True)
    with torch.no_grad():
        plain.embedding.weight.mul_(math.sqrt(16))
    seen = []
    for model in (plain, scaled):
        model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        model(some_ids(1, 3))
    torch.testing.assert_close(seen[0], seen[1])


@pytest.mark.parametrize("silent", ["attention", "ffn"])
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_dropout_falls_on_each_sublayer_and_not_on_the_stream(placement: str, silent: str) -> None:
    # One sublayer adds nothing, the other 3 to every unit: with p = 1/4 that becomes 0 or 4.
    block, positions, _ = a_block_and_its_input(
        ffn="identity", dropout=0.25, norm_placement=placement
    )
    x = torch.full((50, 5, 16), 10.0, dtype=torch.float64)
    block.attention_norm = block.ffn_norm = torch.nn.Identity()
    added = {"attention": 3.0, "ffn": 3.0, silent: 0.0}
    block.attention.forward = lambda x, *_: torch.full_like(x, added["attention"])
    block.ffn.forward = lambda x, _: FFNOutput(torch.full_like(x, added["ffn"]))
    torch.manual_seed(0)

    hidden = block.train()(x, positions, TokenContext()).hidden

    assert hidden.unique().tolist() == [10.0, 14.0]
    # Of 4000 units 1/4 deviates by 0.007; five times that.
    assert (hidden == 10).double().mean().item() == pytest.approx(0.25, abs=0.035)
    assert block.eval()(x, positions, TokenContext()).hidden.unique().tolist() == [13.0]


def test_dropout_falls_on_the_embeddings_too() -> None:
    model = build(ffn="identity", num_layers=1, dropout=0.25).train()
    seen: list[Tensor] = []
    model.layers[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    ids = some_ids(50, 5)
    torch.manual_seed(0)
    model(ids)
    embedded = model.embedding(ids)
    kept = seen[0] != 0
    torch.testing.assert_close(seen[0][kept], embedded[kept] / 0.75)
    assert (~kept).double().mean().item() == pytest.approx(0.25, abs=0.035)


# ------------------------------------------------------------------------------- what it costs


@pytest.mark.parametrize(
    ("ffn", "positions", "norm", "placement", "tied"),
    [
        ("dense", "learned", "layer_norm", "post", True),
        ("moe", "rope", "rms_norm", "pre", False),
        ("moe", "sinusoidal", "layer_norm", "pre", True),
    ],
)
def test_num_params_counts_the_built_model(
    ffn: str, positions: str, norm: str, placement: str, tied: bool
) -> None:
    sparse = {"type": "moe", "num_experts": 8, "experts": {"type": "swiglu", "d_ff": 40}}
    model = build(
        ffn=sparse if ffn == "moe" else ffn,
        ffn_at={"0": {"type": "swiglu", "bias": True}},
        positions=positions,
        norm=norm,
        norm_placement=placement,
        tie_embeddings=tied,
        attention={"num_heads": 4, "num_kv_heads": 2, "bias": tied},
    )
    total = sum(parameter.numel() for parameter in model.parameters())
    assert model.config.num_params(VOCAB, MAX_LEN) == total
    # Of 8 experts 2 are active and 6 are not, each of three matrices: 3 * 16 * 40 = 1920 parameters.
    idle = 6 * 1920 if ffn == "moe" else 0
    assert model.config.num_active_params(VOCAB, MAX_LEN) == total - idle


@pytest.mark.parametrize(
    "ffn",
    [
        "identity",
        "swiglu",
        {"type": "dense", "d_ff": 40},
        {"type": "moe", "num_experts": 3},
        "conv",
    ],
)
def test_models_of_one_seed_differ_only_in_their_ffn(ffn: Any) -> None:
    one = build(ffn="dense")
    other = build(ffn=ffn).state_dict()
    beside = {name: value for name, value in one.state_dict().items() if ".ffn." not in name}
    assert len(beside) > 10
    for name, value in beside.items():
        assert torch.equal(value, other[name]), name


def test_blocks_of_different_layers_begin_with_different_weights() -> None:
    first, second = (
        build(ffn="dense", num_layers=2).get_parameter(f"layers.{layer}.ffn.up.weight")
        for layer in (0, 1)
    )
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        ("layer_03", "3"),
        ("layer_12", "12"),
        ("layer_00/inner", "0 inner"),
        ("layer_00/inner/step_2", "0 inner step_2"),
        ("layer_03/round_2", "3 round_2"),
        ("encoder/3", "encoder/3"),  # not of a decoder
    ],
)
def test_short_names(layer: str, name: str) -> None:
    assert short_name(layer) == name


def test_names_are_read_as_they_are_given() -> None:
    inner = prefix_names("inner", {"routing": 1, "step_2": 2})
    names = prefix_names(layer_name(7), {"routing": 0} | inner)
    assert names == {"layer_07": 0, "layer_07/inner": 1, "layer_07/inner/step_2": 2}
    assert [layer_number(name) for name in names] == [7, 7, 7]
    assert [is_inner(name) for name in names] == [False, True, True]


def test_a_later_round_of_a_chain_is_no_block_inside_another() -> None:
    assert [round_name(number) for number in range(3)] == ["routing", "round_2", "round_3"]
    assert not is_inner("layer_03/round_2")
    assert is_inner("layer_03/inner/round_2")


def test_other_names_are_rejected() -> None:
    with pytest.raises(
        ValueError, match=r"the name of a layer must be like 'layer_03' .*, got 'layer_x'"
    ):
        layer_number("layer_x")
