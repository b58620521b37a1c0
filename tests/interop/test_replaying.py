"""`replay`: given experts in live models, weighed by the model's own router; records of other engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ffn import ConfigError, DecoderConfig
from moe_ffn.interop import read_experts, replay, swap_ffn, watch
from tests.helpers.transformers_models import (
    FAMILIES,
    IDS_BS,
    MASK_BS,
    SIGMOID,
    model_of,
    record_arguments,
    routed,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")

NOT_RENORMALISED = {"dots1", "flex_olmo", "jamba", "olmoe", "qwen2_moe", "qwen3_moe"}
"""Families whose weights are the probabilities of all experts, unless their configs say otherwise."""

BATCH = {"input_ids": IDS_BS, "attention_mask": MASK_BS, "use_cache": False}
GENERATION = {
    "input_ids": IDS_BS, "attention_mask": MASK_BS, "max_new_tokens": 4, "min_new_tokens": 4,
    "do_sample": False, "pad_token_id": 0,
}  # fmt: skip


def some(*quick: str) -> list[Any]:
    """All families; those that differ in nothing that a test looks at are slow."""
    slow = pytest.mark.slow
    return [pytest.param(name, marks=[] if name in quick else slow) for name in FAMILIES]


def others(routings: Any, seed: int = 2) -> dict[str, Tensor]:
    """Other experts for each token: two of four at random."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(routing.num_tokens, 4, generator=generator).argsort(dim=1)[:, :2]
        for name, routing in routings.items()
    }


def logits_and_gradients(model: Any) -> list[Tensor]:
    model.zero_grad()
    logits = model(**BATCH).logits
    F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS_BS[:, 1:].flatten()).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return [logits.detach(), *(grad.clone() for grad in grads)]


@pytest.mark.parametrize("family", some("deepseek_v3", "gpt_oss", "mixtral", "phimoe"))
def test_own_experts_give_the_same_logits_and_gradients(family: str) -> None:
    model = routed(family)
    with watch(model) as passes:
        expected = logits_and_gradients(model)
    with replay(model, passes[0]), watch(model) as again:
        found = logits_and_gradients(model)

    assert len(expected) == len(found) > 10
    assert torch.equal(found[0], expected[0])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
    for name, routing in passes[0].items():
        assert torch.equal(again[0][name].weights_N, routing.weights_N)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_experts_have_the_weights_of_a_plain_formula(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = routed(family)
    given = record_arguments(model, monkeypatch)
    with watch(model) as passes, torch.no_grad():
        plain = model(**BATCH).logits
    ids = others(passes[0])
    given.clear()
    with replay(model, ids), watch(model) as again:
        logits = model(**BATCH).logits

    assert (logits - plain).abs().max() > 1e-5
    for name, (ids_TK, weights_TK), routing in zip(ids, given, again[0].values(), strict=True):
        assert torch.equal(ids_TK, ids[name])
        own_TE = routing.require("logits_TE", "")
        logits_TE = own_TE.detach().double().requires_grad_()
        expected_TK = formula(family, logits_TE, ids_TK, model.config)
        torch.testing.assert_close(weights_TK.double(), expected_TK, rtol=1e-5, atol=1e-7)
        (grad_TE,) = torch.autograd.grad((expected_TK**2).sum(), logits_TE)
        options: Any = {"allow_unused": True, "retain_graph": True}
        weights = [p for p in model.parameters() if p.requires_grad]
        found = torch.autograd.grad((routing.weights_N**2).sum(), weights, **options)
        expected = torch.autograd.grad(own_TE, weights, grad_TE.float(), **options)
        assert sum(grad is not None for grad in found) > 1
        for ours, theirs in zip(found, expected, strict=True):
            if ours is not None:
                assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def formula(family: str, logits_TE: Tensor, ids_TK: Tensor, config: Any) -> Tensor:
    """The weights of given experts in float64."""
    if family == "phimoe":
        return sparse_mixer(logits_TE, ids_TK, config.router_jitter_noise)
    scores_TE = logits_TE.sigmoid() if family in SIGMOID else logits_TE.softmax(dim=-1)
    weights_TK = scores_TE.gather(1, ids_TK)
    if family not in NOT_RENORMALISED:
        weights_TK = weights_TK / weights_TK.sum(dim=1, keepdim=True)
    scale = getattr(config, "routed_scaling_factor", None) or getattr(config, "route_scale", 1.0)
    return weights_TK * scale


def sparse_mixer(logits_TE: Tensor, ids_TK: Tensor, jitter: float) -> Tensor:
    """Softmax over the experts that are not far below the given one, the second without the first."""
    weights = []
    for rank in range(2):
        ids_T1 = ids_TK[:, rank : rank + 1]
        rest_TE = logits_TE if rank == 0 else logits_TE.scatter(1, ids_TK[:, :1], -torch.inf)
        best_T1 = rest_TE.gather(1, ids_T1).detach()
        far_TE = (best_T1 - logits_TE) / logits_TE.abs().clamp(min=best_T1) > 2 * jitter
        weights.append(rest_TE.masked_fill(far_TE, -torch.inf).softmax(dim=1).gather(1, ids_T1))
    return torch.cat(weights, dim=1)


@pytest.mark.parametrize("family", some("deepseek_v3", "jamba", "mixtral", "nemotron_h"))
def test_a_generation_is_replayed_by_position(family: str) -> None:
    attention = {"attn_layer_offset": 1, "attn_layer_period": 2} if family == "jamba" else {}
    if family == "nemotron_h":
        attention = {"layers_block_type": ["moe", "attention", "moe", "mamba"]}
    one, two = (routed(family, seed, **attention) for seed in (1, 5))
    with watch(one) as passes:
        one.generate(**GENERATION)
    with replay(two, passes), watch(two) as again:
        two.generate(**GENERATION)
    assert [next(iter(p.values())).num_tokens for p in again] == [12, 2, 2, 2]
    for layers, expected in zip(again, passes, strict=True):
        for name, routing in layers.items():
            assert torch.equal(routing.expert_ids_N, expected[name].expert_ids_N)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_adapters_of_peft_and_checkpointing_do_not_matter() -> None:
    peft: Any = pytest.importorskip("peft", reason="peft is not installed here")
    model = routed("mixtral").train()
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["experts.down_proj"])
    adapted = peft.get_peft_model(model, config)
    ids = others(first_routings(adapted))
    found: list[list[Tensor]] = []
    for checkpointing in (False, True):
        if checkpointing:
            model.activation_checkpointing_enable()
        with replay(adapted, ids), watch(adapted) as passes:
            found.append(logits_and_gradients(adapted))
        for name, routing in passes[0].items():
            assert torch.equal(routing.expert_ids_N, ids[name].flatten())
    for plain, checkpointed in zip(*found, strict=True):
        torch.testing.assert_close(checkpointed, plain)


def first_routings(model: Any) -> Any:
    with watch(model) as passes, torch.no_grad():
        model(**BATCH)
    return passes[0]


SPARSE = {"num_hidden_layers": 4, "mlp_only_layers": [0, 2], "decoder_sparse_step": 1}


@pytest.mark.parametrize("num_layers", [2, 4], ids=["sparse layers", "all layers"])
@pytest.mark.parametrize("batched", [True, False])
def test_arrays_have_sparse_layers_or_all(num_layers: int, batched: bool) -> None:
    model = routed("qwen3_moe", **SPARSE)
    ids = others(first_routings(model))
    assert list(ids) == ["layer_01", "layer_03"]
    layers = list(ids.values())
    if num_layers == 4:
        zeros = torch.zeros(12, 2, dtype=torch.long)
        layers = [zeros, layers[0], zeros, layers[1]]
    array = torch.stack(layers, dim=1).to(torch.int16).numpy()
    if batched:
        array = array.reshape(2, 6, num_layers, 2)
    with replay(model, array), watch(model) as passes, torch.no_grad():
        model(**BATCH)
    for name, routing in passes[0].items():
        assert torch.equal(routing.expert_ids_N, ids[name].flatten())


def test_layers_and_tokens_that_are_not_given_choose_their_own_experts() -> None:
    model = routed("qwen3_moe")
    own = first_routings(model)
    ids_TK = others(own)["layer_00"]
    ids_TK[::2] = -1
    with replay(model, {"layer_00": ids_TK}), watch(model) as passes, torch.no_grad():
        model(**BATCH)
    found_TK = passes[0]["layer_00"].expert_ids_N.view(12, 2)
    assert torch.equal(found_TK[1::2], ids_TK[1::2])
    assert torch.equal(found_TK[::2], own["layer_00"].expert_ids_N.view(12, 2)[::2])


def test_zaya_replays_the_experts_of_another_model_and_its_skipped_tokens() -> None:
    model = model_of("zaya", {"num_experts_per_tok": 1})
    routers = [layer.mlp.gate for layer in model.model.layers]
    torch.manual_seed(3)
    for router in routers:
        router.router_mlp.out_proj.weight.data.normal_()
        router.balancing_biases[-1] = 0.0  # so that some tokens choose no expert
    with watch(model) as passes, torch.no_grad():
        expected = model(**BATCH).logits
    for name, routing in passes[0].items():
        assert set(routing.expert_ids_N.tolist()) > {4}, name
    for router in routers:  # they change choices, not weights
        router.balancing_biases.copy_(torch.tensor([0.0, 0.4, 0.0, 0.3, 0.2]))
    with torch.no_grad():
        assert (model(**BATCH).logits - expected).abs().max() > 1e-5
        with replay(model, passes[0]), watch(model) as again:
            assert torch.equal(model(**BATCH).logits, expected)
    for name, routing in passes[0].items():
        assert torch.equal(again[0][name].expert_ids_N, routing.expert_ids_N)
    with pytest.raises(ConfigError, match="layer_00 has 5 experts, but the record has the id 5"):
        replay(model, {"layer_00": torch.full((12, 1), 5)}).__enter__()


# -- our own blocks


def ours(**router: Any) -> Any:
    torch.manual_seed(0)
    ffn = {"type": "moe", "num_experts": 4, "router": {"type": "top_k", "k": 2, **router}}
    blocks: Any = {"d_model": 16, "num_layers": 2, "ffn": ffn, "ffn_at": {"0": "swiglu"}}
    return DecoderConfig.model_validate(blocks).build(64, 12).eval()


def test_our_decoder_replays_with_and_without_a_cache() -> None:
    model = ours(renormalize=True)
    ids = others({"layer_01": model(IDS_BS).routings["layer_01"]})
    expected = model(IDS_BS, replay={"layer_01": ids["layer_01"].view(2, 6, 2)}).logits
    with replay(model, ids):
        assert torch.equal(model(IDS_BS).logits, expected)
    cache = model.new_cache(2)
    with replay(model, {"layer_01": ids["layer_01"].view(2, 6, 2)}), torch.no_grad():
        pieces = [model(IDS_BS[:, a:b], cache=cache).logits for a, b in ((0, 4), (4, 5), (5, 6))]
        after = model(IDS_BS[:, :1], cache=cache).routings["layer_01"]
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected)
    assert (after.weights_N > 0).all()


def test_arrays_have_the_sparse_layers_of_our_decoder_or_all() -> None:
    options: Any = {"d_model": 16, "num_layers": 3, "ffn": "moe", "ffn_at": {"0": "swiglu"}}
    decoder = DecoderConfig.model_validate(options).build(64, 6)
    ids_BS = torch.arange(12).view(2, 6)
    with watch(decoder) as passes:
        expected = decoder(ids_BS).logits
    ids = [passes[0][f"layer_0{n}"].expert_ids_N.view(2, 6, 2).flip(-1) for n in (1, 2)]
    for layers in (ids, [torch.zeros_like(ids[0]), *ids]):
        with replay(decoder, torch.stack(layers, dim=2)), watch(decoder) as again:
            torch.testing.assert_close(decoder(ids_BS).logits, expected)
        assert torch.equal(again[0]["layer_01"].expert_ids_N, ids[0].flatten())


def test_blocks_of_swap_ffn_replay() -> None:
    model = model_of("llama", {"experts_implementation": None})
    swap_ffn(model, [1], {"type": "moe", "num_experts": 4, "router": {"type": "sigmoid_top_k"}})
    ids = others(first_routings(model))
    with replay(model, ids), watch(model) as passes, torch.no_grad():
        model(**BATCH)
    assert torch.equal(passes[0]["layer_01"].expert_ids_N, ids["layer_01"].flatten())


# -- mistakes


ONE_ID = torch.tensor([[0, 1]])
MISTAKES: dict[str, tuple[Any, str]] = {
    "layer": ({"layer_07": ONE_ID}, "'layer_07' is not a sparse layer of the model; did you mean"),
    "batch": (
        {"layer_00": ONE_ID.expand(10, 2)},
        r"the record of layer_00 has 10 tokens, but the pass has 12 \(2 x 6\); give the record of this batch",
    ),
    "last": ({"layer_00": ONE_ID.expand(2, 5, 2)}, "engines record no experts for the last token"),
    "rows": ({"layer_00": ONE_ID.expand(3, 4, 2)}, "has 12 tokens, but the pass has 12"),
    "k": ({"layer_00": torch.tensor([[0, 1, 2]]).expand(12, 3)}, "2 experts for each of 12 tokens, but"),
    "id": ({"layer_00": 4 * ONE_ID.expand(12, 2)}, "layer_00 has 4 experts, but the record has the id 4"),
    "twice": (torch.zeros(12, 2, 2, dtype=torch.long), "lists an expert twice, as in a record that was"),
    "float": ({"layer_00": ONE_ID.expand(12, 2).float()}, "must be integers, but are torch.float32"),
    "layers": (ONE_ID.expand(12, 3, 2), "has 3 layers, but the model has 2, of which 2 are sparse"),
    "axes": (ONE_ID, r"must be \(tokens, layers, k\) or .* but has \(1, 2\)"),
    "shape": ({"layer_00": ONE_ID[0]}, r"must be \(tokens, k\) or \(batch, tokens, k\), but have \(2,\)"),
}  # fmt: skip


def test_an_array_for_a_model_without_sparse_layers_is_rejected() -> None:
    dense = DecoderConfig.model_validate({"d_model": 16, "ffn": "dense"}).build(64, 12)
    record = torch.zeros(12, 4, 2, dtype=torch.long)
    with pytest.raises(ConfigError, match="no sparse layers"), replay(dense, record):
        dense(IDS_BS)


@pytest.mark.parametrize(("experts", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_record_of_something_else_is_rejected(experts: Any, message: str) -> None:
    model = routed("mixtral")
    with pytest.raises(ConfigError, match=message), replay(model, experts):
        model(**BATCH)
    kinds = ("_forward_hooks", "_forward_pre_hooks")
    assert not any(getattr(module, kind) for module in model.modules() for kind in kinds)


def test_a_router_that_cannot_replay_is_named() -> None:
    model = ours()
    model.layers[1].ffn.router.replays = False
    with (
        pytest.raises(ConfigError, match="layer_01 has the router TopKRouter, which cannot replay"),
        replay(model, {"layer_01": ONE_ID}),
    ):
        pass
    model = routed("mixtral")
    for layer in model.model.layers:
        choose = layer.mlp.gate.forward
        ids_TK = ONE_ID.expand(12, 2)
        layer.mlp.gate.forward = lambda x, f=choose, ids=ids_TK: (*f(x)[:2], ids)
    with (
        pytest.raises(
            ConfigError, match="before MixtralExperts does not choose its experts by topk"
        ),
        replay(model, {"layer_00": ONE_ID.expand(12, 2) + 1}),
    ):
        model(**BATCH)


def test_a_pass_of_an_inner_module_is_rejected() -> None:
    model = routed("mixtral")
    with (
        pytest.raises(ConfigError, match="layer_00 ran outside a pass of the given model"),
        replay(model, {"layer_00": ONE_ID.expand(12, 2)}),
    ):
        model.model(input_ids=IDS_BS)


# -- records of other engines


def record(batch: int, tokens: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    scores = generator.random((batch, tokens, 3, 4))
    return scores.argsort(axis=-1)[..., :2].astype(np.uint8)


def save(folder: Path, **arrays: Any) -> Path:
    np.savez(folder / "rollout.npz", **arrays)
    return folder / "rollout.npz"


def test_prompts_and_completions_take_the_places_of_a_batch(tmp_path: Path) -> None:
    whole = record(1, 5)[0]
    path = save(tmp_path, prompt_routed_experts=whole[:3], routed_experts=whole[3:])
    found = read_experts(path)
    assert (found.dtype, found.tolist()) == (torch.int64, [whole.tolist()])

    left = read_experts(
        path, attention_mask=[[0, 0, 1, 1, 1, 1, 1, 1]]
    )  # the last was not computed
    assert left[0, 2:7].tolist() == whole.tolist()
    assert (left[0, :2] == -1).all()
    assert (left[0, 7:] == -1).all()


def test_padding_moves_from_the_right_to_the_left(tmp_path: Path) -> None:
    experts = record(2, 4)
    path = save(tmp_path, routed_experts=experts, attention_mask=np.array([[1, 1, 0, 0], [1] * 4]))
    assert (read_experts(path)[0, 2:] == -1).all()
    found = read_experts(path, torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]))
    assert found[0, 2:].tolist() == experts[0, :2].tolist()
    assert (found[0, :2] == -1).all()
    assert found[1].tolist() == experts[1].tolist()


def test_a_single_array_is_read_and_replayed(tmp_path: Path) -> None:
    model = routed("mixtral")
    ids = others(first_routings(model))
    experts = torch.stack(list(ids.values()), dim=1).view(2, 6, 2, 2)
    np.save(tmp_path / "one.npy", experts[1, :5].numpy().astype(np.int32))
    one = {name: tensor[1:] for name, tensor in BATCH.items() if name != "use_cache"}
    read = read_experts(tmp_path / "one.npy", one["attention_mask"])
    with replay(model, read), watch(model) as passes, torch.no_grad():
        model(**one)
    found_TK = passes[0]["layer_01"].expert_ids_N.view(6, 2)
    assert torch.equal(found_TK[:5], experts[1, :5, 1])


UNREADABLE: dict[str, tuple[dict[str, Any], Any, str]] = {
    "zeros": ({"routed_experts": np.zeros((3, 2, 2), "u1")}, None, "zero everywhere, so the engine recorded"),
    "name": ({"experts": record(1, 2)}, None, r"has no array 'routed_experts' \(it has experts\)"),
    "float": ({"routed_experts": np.ones((3, 2, 2))}, None, r"must be integers .* is float64 \(3, 2, 2\)"),
    "axes": ({"routed_experts": np.ones((3, 2), "i4")}, None, r"batch, tokens, layers, k.*int32 \(3, 2\)"),
    "prompt": (
        {"routed_experts": record(1, 2), "prompt_routed_experts": record(1, 2)[..., :1]},
        None,
        r"prompt_routed_experts \(1, 2, 3, 1\) and routed_experts \(1, 2, 3, 2\) may differ only in",
    ),
    "mask": (
        {"routed_experts": record(1, 2), "attention_mask": np.ones(3, "i8")},
        None,
        r"attention_mask has \(1, 3\) tokens, but routed_experts has \(1, 2\)",
    ),
    "batch": ({"routed_experts": record(1, 2)}, [[1, 1, 1, 1]], r"1 sequences of \[2\] tokens, but the"),
    "rows": ({"routed_experts": record(2, 4)}, [[1, 1, 1, 1]], r"has 2 sequences .* but the batch has 1"),
}  # fmt: skip


@pytest.mark.parametrize(("arrays", "mask", "message"), UNREADABLE.values(), ids=UNREADABLE)
def test_what_is_no_record_is_one_sentence(
    arrays: dict[str, Any], mask: Any, message: str, tmp_path: Path
) -> None:
    path = save(tmp_path, **arrays)
    with pytest.raises(ConfigError, match=message) as raised:
        read_experts(path, mask)
    assert "\n" not in str(raised.value)


def test_a_damaged_or_missing_file_is_one_sentence(tmp_path: Path) -> None:
    path = save(tmp_path, routed_experts=record(1, 9))
    path.write_bytes(path.read_bytes()[:40])
    for file in (path, tmp_path / "none.npz"):
        with pytest.raises(ConfigError, match="cannot be read as a file of arrays"):
            read_experts(file)
    np.save(tmp_path / "pickle.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(ConfigError, match=r"cannot be read .*allow_pickle=False"):
        read_experts(tmp_path / "pickle.npy")
