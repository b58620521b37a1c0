"""Decoding with kept keys and values against whole sequences; and recorded experts replayed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from moe_ffn import Decoder, DecoderConfig, TokenContext
from moe_ffn.config.errors import UseCase
from moe_ffn.model.cache import KVCache
from moe_ffn.model.generate import Sampling, generate_batch
from moe_ffn.routing import RouterConfig
from tests.helpers.every_router import ROUTERS, is_causal

VOCAB, MAX_LEN = 13, 12

POSITIONS = ("rope", "sinusoidal", "learned")

SHARPER = {"type": "yarn", "factor": 4.0, "original_seq_len": 4, "score_mscale": 2.0}
SCALED = {"positions": {"type": "rope", "fraction": 0.5, "scaling": SHARPER}}

ATTENTION: dict[str, dict[str, Any]] = {
    "heads": {},
    "grouped": {"num_kv_heads": 2, "norm_qk": "head", "bias": True},
    "latent": {"latent": {"kv_rank": 6, "rotated_dim": 4, "query_rank": 8, "value_dim": 3}},
    "sinks": {"num_kv_heads": 2, "sinks": True},
}

WINDOWED: dict[str, dict[str, Any]] = {
    "window": {"window": 3, "num_kv_heads": 2},
    "window in a layer": {"window": 3, "window_at": "-1"},
    "latent window": {**ATTENTION["latent"], "window": 3},
    "window of one": {"window": 1},
    "sinks in a window": {"window": 3, "num_kv_heads": 2, "sinks": True},
}

FFNS: dict[str, dict[str, Any]] = yaml.safe_load("""
dense: {type: dense}
top_k: {type: moe, num_experts: 4}
training capacity: {type: moe, num_experts: 4, capacity: {factor: 0.5}}
shared: {type: moe, num_experts: 4, shared_expert: swiglu}
sigmoid: {type: moe, num_experts: 4, router: {type: sigmoid_top_k}}
copies: {type: moe, num_experts: 4, zero_computation: {num_copy: 2}}
hash: {type: moe, num_experts: 4, router: hash}
relu: {type: moe, num_experts: 4, router: relu}
top_p: {type: moe, num_experts: 4, router: top_p}
threshold: {type: moe, num_experts: 4, router: expert_threshold}
chain: {type: chain_of_experts, ffn: {num_experts: 4}}
depths: {type: mixture_of_depths, ffn: {type: moe, num_experts: 4}, router: {type: relu, k: 0.5}}
ngrams: {type: ngram_memory, num_rows: 97}
ngrams in a shared expert: {type: moe, num_experts: 4, shared_expert: {type: ngram_memory,
  num_rows: 97, ffn: {type: ngram_memory, num_rows: 97, max_order: 4, ffn: identity}}}
""")

NOT_CACHED: dict[str, tuple[dict[str, Any], str]] = {
    "capacity": (
        {"type": "moe", "num_experts": 4, "capacity": {"eval_factor": 1.0}},
        r"ffn.capacity.eval_factor \(1\) lets tokens displace each other; set it to null",
    ),
    "forced": (
        {"type": "moe", "num_experts": 4, "router": "forced"},
        "ffn.router.type 'forced' routes by position; use 'top_k'",
    ),
    "conv": ({"type": "conv"}, r"ffn.kernel_size \(3\) looks at earlier tokens; use kernel_size 1"),
    "inside a shared expert": (
        {"type": "moe", "num_experts": 4, "shared_expert": "conv"},
        r"ffn.shared_expert.kernel_size \(3\) looks at earlier tokens",
    ),
    "inside a mixture of depths": (
        {**FFNS["depths"], "ffn": FFNS["ngrams in a shared expert"]},
        r"ffn.ffn.shared_expert.type 'ngram_memory' reads earlier tokens, which a mixture of depths may "
        "skip; put the mixture of depths inside 'ngram_memory'",
    ),
}

CASES = [
    *((positions, kind, "top_k") for positions in POSITIONS for kind in ATTENTION),
    *(("rope", "heads", ffn) for ffn in FFNS if ffn != "top_k"),
    ("learned", "latent", "shared"),
    ("sinusoidal", "grouped", "depths"),
]


def decoder(
    positions: str | Mapping[str, Any] = "rope",
    attention: Mapping[str, Any] | None = None,
    ffn: Mapping[str, Any] | None = None,
    **config: Any,
) -> Decoder:
    torch.manual_seed(0)
    options = {
        "d_model": 16,
        "num_layers": 2,
        "attention": {"num_heads": 4, **(attention or {})},
        "positions": positions,
        "ffn": ffn or FFNS["top_k"],
        **config,
    }
    model = DecoderConfig.model_validate(options).build(VOCAB, MAX_LEN).double().eval()
    with torch.no_grad():
        model.embedding.weight.mul_(20)  # decided, so that tokens do not tie
        for name, parameter in model.named_parameters():
            if "tables" in name or "taps" in name:  # hardly anything at first
                parameter.normal_()
    return model


def token_ids(*shape: int) -> Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(1))


def greedy(model: Decoder, prompt_ids: Tensor, num_tokens: int) -> list[int]:
    """The most probable token each time, from the last tokens as a whole."""
    ids = prompt_ids
    with torch.no_grad():
        for _ in range(num_tokens):
            ids = torch.cat([ids, model(ids[None, -MAX_LEN:]).logits[0, -1].argmax()[None]])
    return ids[len(prompt_ids) :].tolist()


@pytest.mark.parametrize(("positions", "kind", "ffn"), CASES, ids=map("-".join, CASES))
def test_token_by_token_equals_the_whole_sequence(positions: str, kind: str, ffn: str) -> None:
    check_token_by_token(decoder(positions, ATTENTION[kind], FFNS[ffn]))


@pytest.mark.parametrize("attention", [*ATTENTION.values(), *WINDOWED.values()], ids=str)
def test_windows_and_scaled_positions_token_by_token(attention: dict[str, Any]) -> None:
    check_token_by_token(model := decoder(attention=attention, **SCALED))
    plain = decoder(attention={**attention, "window": MAX_LEN}, **SCALED)
    plain.load_state_dict(model.state_dict())
    ids = token_ids(1, MAX_LEN)
    differs = (plain(ids).logits - model(ids).logits).abs().amax(-1)[0] > 1e-9
    # A token sees what its window hides from the layers below, so the first difference is the window's.
    window = attention.get("window", MAX_LEN)
    assert differs.tolist() == [position >= window for position in range(MAX_LEN)]


@torch.no_grad()
def check_token_by_token(model: Decoder) -> None:
    ids = token_ids(2, MAX_LEN)
    whole = model(ids)
    cache = model.new_cache(2)
    parts = [model(part, cache=cache) for part in ids.split([5, 1, 1, 3, 2], dim=1)]

    torch.testing.assert_close(
        torch.cat([part.logits for part in parts], dim=1), whole.logits, rtol=0, atol=1e-5
    )  # the tables of positions are float32
    assert torch.equal(parts[0].logits, model(ids[:, :5]).logits)  # as without a cache, to the bit
    for name, expert_ids in model.recorded_experts(whole).items():
        assert torch.equal(
            torch.cat([model.recorded_experts(part)[name] for part in parts], dim=1), expert_ids
        )


@pytest.mark.parametrize(
    ("positions", "kind", "ffn"),
    [
        *(("rope", kind, "top_k") for kind in ATTENTION),
        *(
            pytest.param(
                positions, kind, "top_k", marks=[] if kind == "heads" else pytest.mark.slow
            )
            for positions in POSITIONS[1:]
            for kind in ATTENTION
        ),
        *(("rope", "heads", ffn) for ffn in FFNS if "ngrams" in ffn),
    ],
)
def test_rows_of_different_lengths_equal_each_alone(positions: str, kind: str, ffn: str) -> None:
    check_rows_alone(decoder(positions, ATTENTION[kind], FFNS[ffn]))


@pytest.mark.parametrize("attention", WINDOWED.values(), ids=WINDOWED)
def test_rows_of_different_lengths_equal_each_alone_with_windows(attention: dict[str, Any]) -> None:
    check_rows_alone(decoder(attention=attention, **SCALED))


def check_rows_alone(model: Decoder) -> None:
    prompts = [token_ids(9)[:length] for length in (9, 1, 9)]
    alone = [greedy(model, prompt_ids, 5) for prompt_ids in prompts]  # two outgrow the context

    together = generate_batch(model, prompts, 5, Sampling(temperature=0))

    assert [ids.tolist() for ids in together] == alone
    assert len({tuple(ids) for ids in alone}) > 1


@torch.no_grad()
def test_a_pass_that_fails_adds_nothing_to_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = decoder(ffn=FFNS["ngrams"]), token_ids(1, 6)
    cache = model.new_cache(1)
    model(ids[:, :5], cache=cache)
    with monkeypatch.context() as patch:
        patch.setattr(model.layers[1], "forward", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids[:, :1], cache=cache)
    got = model(ids[:, 5:], cache=cache).logits
    torch.testing.assert_close(got[0, -1], model(ids).logits[0, -1], rtol=0, atol=1e-5)


def test_a_module_run_twice_in_a_pass_has_two_histories() -> None:
    cache, owner, other = KVCache(1, 1, capacity=9), nn.Identity(), nn.Identity()
    (layer,), ids = cache.layers, token_ids(1, 2)
    seen: list[list[float]] = []
    for number in (1.0, 2.0):
        cache.begin(ids, None)
        for module, sign in ((owner, 1), (other, 10), (owner, -1)):
            values = torch.tensor([[[number], [number + 0.5]]]) * sign
            seen.append(layer.window(module, values, reach=1).flatten().tolist())
        cache.end()
    assert seen == [
        [0, 1, 1.5],
        [0, 10, 15],
        [0, -1, -1.5],
        [1.5, 2, 2.5],
        [15, 20, 25],
        [-1.5, -2, -2.5],
    ]


@pytest.mark.parametrize("ffn", ["top_k", "ngrams"])
@torch.no_grad()
def test_rows_of_different_lengths_continue_by_several_tokens(ffn: str) -> None:
    model, ids = decoder(attention=ATTENTION["grouped"], ffn=FFNS[ffn]), token_ids(2, 9)
    cache = model.new_cache(2)
    mask = torch.tensor([[True] * 4, [True] * 2 + [False] * 2])
    model(ids[:, :4], mask, cache=cache)
    first, second = ids[0, 4:7], ids[1, 2:5]
    got = model(torch.stack([first, second]), cache=cache).logits

    for row, length in ((0, 7), (1, 5)):
        wanted = model(ids[row : row + 1, :length]).logits[0, -3:]
        torch.testing.assert_close(got[row], wanted, rtol=0, atol=1e-5)
    assert cache.lengths == [7, 5]


@pytest.mark.parametrize(("ffn", "why"), NOT_CACHED.values(), ids=NOT_CACHED)
def test_blocks_that_look_at_other_tokens_are_recomputed(ffn: dict[str, Any], why: str) -> None:
    model = decoder(ffn=ffn)
    with pytest.raises(ValueError, match=f"^the model takes no cache: {why}"):
        model.new_cache(1)
    prompts = [token_ids(5)[:length] for length in (5, 2)]

    got = generate_batch(model, prompts, 4, Sampling(temperature=0))

    assert [ids.tolist() for ids in got] == [greedy(model, prompt, 4) for prompt in prompts]


def test_generation_computes_one_token_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, shapes = decoder(), []
    forward = model.layers[0].forward

    def noting(x: Tensor, *given: Any) -> Any:
        shapes.append(tuple(x.shape[:2]))
        return forward(x, *given)

    monkeypatch.setattr(model.layers[0], "forward", noting)
    generate_batch(model, [token_ids(4), token_ids(2)], 9, Sampling(temperature=0))

    # The longer row outgrows the 12 tokens with its last one; the shorter never does.
    assert shapes == [(2, 4), *[(2, 1)] * 8]
    shapes.clear()
    generate_batch(model, [token_ids(10), token_ids(4)], 5, Sampling(temperature=0))
    assert shapes == [(2, 10), *[(2, 1)] * 2, *[(1, 1), (1, MAX_LEN)] * 2]


@pytest.mark.parametrize("router", RouterConfig.members)
@torch.no_grad()
def test_a_router_is_decoded_with_the_cache_exactly_where_it_routes_by_token(router: str) -> None:
    """Compare `is_tokenwise` with the outputs of tokens alone, and count what a decoder computes."""
    variants = [options for options in ROUTERS.values() if options["type"] == router]
    causal = all(map(is_causal, variants))
    torch.manual_seed(0)
    x, ids = torch.randn(2, MAX_LEN, 16, dtype=torch.float64), token_ids(2, MAX_LEN)
    changed, is_tokenwise = 0.0, RouterConfig.model_validate(router).is_tokenwise
    for options in variants:
        model = decoder(ffn={"type": "moe", "num_experts": 4, "router": options}, causal=causal)
        ffn: Any = model.layers[0].ffn
        parts = zip(x.split(1, 1), ids.split(1, 1), strict=True)
        alone = torch.cat([ffn(x, TokenContext(token_ids=ids)).hidden for x, ids in parts], 1)
        whole = ffn(x, TokenContext(token_ids=ids)).hidden
        changed = max(changed, (alone - whole).abs().max().item())
        assert (model.config.unsupported(UseCase(cached=True)) is None) == (causal and is_tokenwise)
        if not causal:
            continue
        counts: list[int] = []
        ffn.register_forward_pre_hook(
            lambda _, given, counts=counts: counts.append(len(given[0][0]))
        )
        (got,) = generate_batch(model, [ids[0, :4]], 5, Sampling(temperature=0))
        assert sum(counts) == (4 + 4 if is_tokenwise else sum(range(4, 4 + 5)))
        assert got.tolist() == greedy(model, ids[0, :4], 5)
    assert is_tokenwise == (changed < 1e-12)


def test_tokens_that_do_not_fit_a_cache_are_rejected() -> None:
    model, ids = decoder(), token_ids(1, 4)
    with pytest.raises(ValueError, match=r"^a cache has no gradient: call .* torch.no_grad\(\)"):
        model(ids, cache=model.new_cache(1))
    with torch.no_grad():
        cache = model.new_cache(1, capacity=6)
        model(ids, cache=cache)
        with pytest.raises(ValueError, match=r"^4 tokens after 4 do not fit .* capacity is 6$"):
            model(ids, cache=cache)
        with pytest.raises(ValueError, match=r"^token_ids has 1 rows, but .* a batch of 2$"):
            model(ids, cache=model.new_cache(2))
        mask = torch.tensor([[False, True, True, True]])
        with pytest.raises(
            ValueError, match=r"^mask: with a cache, the real tokens of each row must come first"
        ):
            model(ids, mask, cache=model.new_cache(1))
    both = decoder(causal=False)
    with pytest.raises(
        ValueError, match=r"takes no cache: causal \(false\) lets a token see later"
    ):
        both.new_cache(1)


# -- replay


REPLAYED = {
    "top_k": {"type": "top_k"},
    "after": {"type": "top_k", "softmax": "after"},
    "sigmoid": {"type": "sigmoid_top_k"},
}


@pytest.mark.parametrize("router", REPLAYED.values(), ids=REPLAYED)
def test_recorded_experts_can_be_replayed(router: dict[str, Any]) -> None:
    model = decoder(ffn={"type": "moe", "num_experts": 4, "router": router}).float()
    ids = token_ids(2, 8)
    output = model(ids)
    recorded = model.recorded_experts(output)
    assert {name: tuple(found.shape) for name, found in recorded.items()} == {
        "layer_00": (2, 8, 2),
        "layer_01": (2, 8, 2),
    }
    assert torch.equal(model(ids, replay=recorded).logits, output.logits)

    with torch.no_grad():  # the router has moved since, as that of a trainer has
        for built in model.routers().values():
            (weight,) = built.parameters()
            weight.add_(torch.randn(4, 16))
    moved = model(ids)
    assert not torch.equal(model.recorded_experts(moved)["layer_00"], recorded["layer_00"])
    replayed = model(ids, replay=recorded)
    assert not torch.equal(replayed.logits, moved.logits)
    for name, expert_ids in model.recorded_experts(replayed).items():
        assert torch.equal(expert_ids, recorded[name])
    weights = replayed.routings["layer_00"].weights_N
    scores_TE = replayed.routings["layer_00"].scores_TE
    assert scores_TE is not None
    if router == REPLAYED["top_k"]:  # its own scores of those experts
        assert torch.equal(
            weights, scores_TE.gather(1, recorded["layer_00"].flatten(0, 1)).flatten()
        )
    replayed.logits.square().sum().backward()
    for built in model.routers().values():
        (weight,) = built.parameters()
        assert weight.grad is not None
        assert weight.grad.abs().sum() > 0


@torch.no_grad()
def test_experts_of_cached_decoding_are_replayed_as_a_sequence() -> None:
    model, ids = decoder(), token_ids(1, 8)
    cache = model.new_cache(1)
    parts = [model(part, cache=cache) for part in ids.split([3, 1, 1, 1, 1, 1], dim=1)]
    steps = [model.recorded_experts(part) for part in parts]
    recorded = {name: torch.cat([step[name] for step in steps], dim=1) for name in steps[0]}
    assert torch.equal(model(ids, replay=recorded).logits, model(ids).logits)


def test_experts_that_cannot_be_replayed_are_rejected() -> None:
    model, ids = decoder(ffn_at={"1": FFNS["depths"]}), token_ids(1, 3)
    recorded = model.recorded_experts(model(ids))
    assert list(recorded) == ["layer_00"]
    for name in ("layer_01", "layer_01/inner", "layer_7"):
        with pytest.raises(
            ValueError,
            match=f"^replay: '{name}' has no router that can replay; routers that can: layer_00$",
        ):
            model(ids, replay={name: recorded["layer_00"]})
    with pytest.raises(
        ValueError, match=r"'layer_00' must lie in \[0, 4\), but range from 1 to 4$"
    ):
        model(ids, replay={"layer_00": torch.tensor([[[1, 4]] * 3])})
    with pytest.raises(ValueError, match=r"expert_ids must have the leading shape of x, \(1, 3\)"):
        model(ids, replay={"layer_00": recorded["layer_00"][:, 1:]})
    with pytest.raises(ValueError, match=r"expert_ids must be int64, but is torch\.int32"):
        model(ids, replay={"layer_00": recorded["layer_00"].int()})
