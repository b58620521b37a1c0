"""Experts that each token of a text is routed to, layer by layer.

T tokens, E experts, N (token, expert) pairs
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from moe_ffn.balancing.losses import normalized_scores
from moe_ffn.config.errors import ConfigError, escaped
from moe_ffn.config.numbers import counted
from moe_ffn.data.tokenizer import Tokenizer
from moe_ffn.ffn import FFNConfig
from moe_ffn.ffn.base import RouterInfo, layer_number
from moe_ffn.model.decoder import Decoder, DecoderConfig, DecoderOutput
from moe_ffn.outputs import AlwaysRouting, PairsOnlyRouting, Routing
from moe_ffn.report.html import layer_title
from moe_ffn.training.sampling import encode_text


@dataclass(frozen=True)
class Choice:
    """One expert that a token was sent to."""

    expert: int
    weight: float
    """Factor of the expert's output."""
    score: float
    """Normalised router score of this expert."""
    dropped: bool
    """True if the expert was full and did not process the token."""


@dataclass(frozen=True)
class Visit:
    """Choices of one router for one token."""

    choices: tuple[Choice, ...]
    """Largest weight first; empty if the router chose no expert."""
    entropy: float | None
    """Entropy of the normalised scores in nats; None for a single expert, or if all scores are 0."""


@dataclass(frozen=True)
class Prediction:
    """Most probable next token."""

    token: str
    probability: float


@dataclass(frozen=True)
class TokenTrace:
    position: int
    token: str
    """Text from `visible`."""
    visits: Mapping[str, Visit | None]
    """Name of a router -> visit; None for padding, and for a token that an outer router skipped."""
    prediction: Prediction | None
    """Prediction of the next token; None in a model that is not causal."""


@dataclass(frozen=True)
class Layer:
    """A router and its experts."""

    name: str
    """`layer_03`, or `layer_03/inner` inside a mixture of depths."""
    experts: tuple[str, ...]
    """Name of each expert: its index, preceded by a word such as `zero` if it has no network."""
    capacity: str
    """`dropless`, or the capacity factor and the maximum number of pairs per expert, as text."""
    shared_expert: str | None = None
    """Type of the shared expert; None without one."""
    selects_tokens: bool = False
    """True for the router of a mixture of depths, which sends tokens through a block or around it."""

    @property
    def title(self) -> str:
        return layer_title(self.name)


@dataclass(frozen=True)
class TextTrace:
    """A text, and the choices of all routers for its tokens."""

    run: str
    layers: tuple[Layer, ...]
    tokens: tuple[TokenTrace, ...]
    unrouted: Mapping[str, str]
    """Title of each layer without a router -> type of its block."""

    @property
    def predicts(self) -> bool:
        return any(token.prediction for token in self.tokens)

    def visits(self, layer: Layer) -> list[Visit]:
        visits = (token.visits[layer.name] for token in self.tokens)
        return [visit for visit in visits if visit is not None]

    def mean_entropy(self, layer: Layer) -> float | None:
        """Return the mean entropy of the tokens at a router in nats; None if no token has an entropy."""
        entropies = [v.entropy for v in self.visits(layer) if v.entropy is not None]
        return fmean(entropies) if entropies else None


def trace_text(
    folder: Path,
    decoder: Decoder,
    tokenizer: Tokenizer,
    text: bytes,
    layers: Sequence[int] | None = None,
) -> TextTrace:
    """Trace `text` through a decoder in evaluation mode, in all layers with a router or only in these.

    Raises ConfigError, naming the folder of the decoder, if it or one of the layers has no router, or the
    text is too long.
    """
    ids = encode_text(tokenizer, text, decoder.max_seq_len, "--text")
    with torch.no_grad():
        outputs = [(decoder(torch.tensor([ids])), len(ids))]
    return trace_of_decoder(folder, decoder.config, tokenizer, ids, outputs, layers)


def check_routes(folder: Path, model: DecoderConfig, routings: Mapping[str, Routing]) -> None:
    """Raise a ConfigError if no routing of the model in `folder` has a score per expert."""
    if with_all_scores(routings):
        return
    if routings:
        raise ConfigError(
            f"'{folder}' cannot be traced: its routers, like router.type 'product_key', do not score every "
            "expert; moe-ffn report shows the share of experts used"
        )
    unrouted = unrouted_layers(model.layer_ffns(), routings)
    types = ", ".join(f"'{name}'" for name in dict.fromkeys(unrouted.values()))
    raise ConfigError(
        f"'{folder}' has no router: its feed-forward blocks are of type {types}; choose a run "
        "with model.ffn.type 'moe' or 'mixture_of_depths'"
    )


def trace_of_decoder(
    folder: Path,
    model: DecoderConfig,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    outputs: Sequence[tuple[DecoderOutput, int]],
    layers: Sequence[int] | None = None,
) -> TextTrace:
    """Return the trace of tokens that a decoder read at once, or generated one by one; see `trace_text`.

    Each of the `outputs` has the decoder's output for one sequence, and the number of new tokens at its end.
    """
    token_bytes, infos = tokenizer.token_bytes, model.router_infos()
    check_routes(folder, model, outputs[-1][0].routings)
    routings = with_all_scores(outputs[-1][0].routings)
    token_selectors = [name for name, info in infos.items() if info.selects_tokens]
    visits: dict[str, list[Visit | None]] = {name: [] for name in routings}
    predictions: list[Prediction | None] = []
    for output, num_new in outputs:
        for name, all_visits in visits_by_layer(
            with_all_scores(output.routings), token_selectors
        ).items():
            visits[name] += all_visits[-num_new:]
        predictions += _predictions(output.logits[0, -num_new:], token_bytes)
    if not model.causal:
        predictions = [None] * len(ids)
    tokens = [visible(token_bytes[token_id]) for token_id in ids]
    unrouted = unrouted_layers(model.layer_ffns(), routings)
    return trace_of(folder, tokens, routings, visits, predictions, unrouted, infos, layers)


def with_all_scores(routings: Mapping[str, Routing]) -> dict[str, Routing]:
    """Return the routings whose routers score every expert."""
    return {k: r for k, r in routings.items() if not isinstance(r, PairsOnlyRouting)}


def trace_of(
    folder: Path,
    tokens: Sequence[str],
    routings: Mapping[str, Routing],
    visits: Mapping[str, Sequence[Visit | None]],
    predictions: Sequence[Prediction | None],
    unrouted: Mapping[str, str],
    infos: Mapping[str, RouterInfo],
    layers: Sequence[int] | None,
) -> TextTrace:
    """Return the trace of one sequence of tokens, restricted to `layers`; ConfigError without a router."""
    numbers = {name: layer_number(name) for name in routings}
    for layer in layers or ():
        if layer not in numbers.values():
            known = ", ".join(map(str, dict.fromkeys(numbers.values())))
            raise ConfigError(
                f"--layers: '{folder}' routes nothing in layer {layer}; it routes in {known}"
            )
    shown = [name for name, number in numbers.items() if layers is None or number in layers]
    return TextTrace(
        run=folder.resolve().name,
        layers=tuple(_layer(name, routings[name], infos.get(name)) for name in shown),
        tokens=tuple(
            TokenTrace(position, token, {name: visits[name][position] for name in shown}, guess)
            for position, (token, guess) in enumerate(zip(tokens, predictions, strict=True))
        ),
        unrouted=unrouted if layers is None else {},
    )


def _predictions(logits_SV: Tensor, token_bytes: Sequence[bytes]) -> list[Prediction]:
    best = logits_SV.float().softmax(dim=-1).max(dim=-1)
    return [
        Prediction(visible(token_bytes[token_id]), probability)
        for token_id, probability in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def visits_by_layer(
    routings: Mapping[str, Routing], token_selectors: Sequence[str] = ()
) -> dict[str, list[Visit | None]]:
    """Return router -> visits, one per token of the sequence.

    A block inside a mixture of depths, whose routings are `token_selectors`, sees only selected tokens; their
    visits move to their positions in the sequence.
    """
    visits: dict[str, list[Visit | None]] = {}
    for name, routing in routings.items():
        visits[name] = visits_of(routing)
        positions = origin(routings, name, token_selectors)
        if positions is not None:
            by_position = dict(zip(positions.tolist(), visits[name], strict=True))
            outer = next(
                selector for selector in token_selectors if name.startswith(f"{selector}/")
            )
            visits[name] = [by_position.get(token) for token in range(routings[outer].num_tokens)]
    return visits


def origin(
    routings: Mapping[str, Routing], name: str, token_selectors: Sequence[str]
) -> Tensor | None:
    """Return the position in the batch of each token of a block inside a mixture of depths; -1 for padding.

    Returns None for other blocks, which see all tokens in order. The routings of mixtures of depths are named
    outer ones first.
    """
    around = [selector for selector in token_selectors if name.startswith(f"{selector}/")]
    if not around:
        return None
    inner, outer = routings[name], routings[around[-1]]
    chosen = outer.token_indices_N[outer.computed_N]
    outer_positions = origin(routings, around[-1], token_selectors)
    chosen = chosen if outer_positions is None else outer_positions[chosen]
    if inner.mask_T is None:
        return chosen
    positions = torch.full_like(inner.mask_T, -1, dtype=torch.int64)
    positions[inner.mask_T] = chosen
    return positions


def visits_of(routing: Routing) -> list[Visit | None]:
    """Return the visit of each token at a router, T entries; None for padding."""
    scores_TE = routing.require("scores_TE", "a trace")
    choices: list[list[Choice]] = [[] for _ in range(routing.num_tokens)]
    pairs = (
        routing.token_indices_N,
        routing.expert_ids_N,
        routing.weights_N,
        scores_TE[routing.token_indices_N, routing.expert_ids_N],
        routing.dropped_N,
    )
    for token, *choice in zip(
        *(values_N[routing.active_N].tolist() for values_N in pairs), strict=True
    ):
        choices[token].append(Choice(*choice))
    normalized_TE = normalized_scores(routing)
    entropies = torch.special.entr(normalized_TE).sum(dim=-1).tolist()
    # A ReLU router may give every expert the score 0; such a token has no entropy.
    has_entropy_T = (normalized_TE.sum(dim=-1) > 0) & (routing.num_experts > 1)
    mask_T = torch.ones_like(has_entropy_T) if routing.mask_T is None else routing.mask_T
    return [
        Visit(tuple(sorted(listed, key=lambda c: -c.weight)), entropy if has_entropy else None)
        if is_real
        else None
        for listed, entropy, has_entropy, is_real in zip(
            choices, entropies, has_entropy_T.tolist(), mask_T.tolist(), strict=True
        )
    ]


def unrouted_layers(ffns: Sequence[FFNConfig], routings: Mapping[str, Routing]) -> dict[str, str]:
    """Return title -> type of block for the layers without a routing."""
    routed = set(map(layer_number, routings))
    return {f"layer {index}": ffn.type for index, ffn in enumerate(ffns) if index not in routed}


def expert_names(routing: Routing, info: RouterInfo | None) -> tuple[str, ...]:
    """Return the name of each expert, see `Layer.experts`; without `info`, its index."""
    if info is None:
        return tuple(map(str, range(routing.num_experts)))
    return ("through",) if info.selects_tokens else info.expert_names()


def _layer(name: str, routing: Routing, info: RouterInfo | None) -> Layer:
    names, capacity = expert_names(routing, info), "dropless"
    if info is None:
        return Layer(name, names, capacity)
    max_pairs = info.capacity.expert_capacity(routing, training=False)
    if max_pairs is not None:
        capacity = f"at most {counted(int(max_pairs), 'pair')} per expert"
        if info.capacity.eval_factor is not None:
            capacity = f"factor {info.capacity.eval_factor}, {capacity}"
        if isinstance(routing, AlwaysRouting):
            capacity += f", no limit for expert {', '.join(names[routing.num_choices :])}"
    shared_expert = None if info.shared_expert is None else info.shared_expert.type
    return Layer(name, names, capacity, shared_expert, info.selects_tokens)


END_OF_DOCUMENT = "<end>"


def visible(token: bytes) -> str:
    r"""Return a token as visible text: space `␣`, newline `\n`, byte outside UTF-8 `\xc3`, backslash `\\`.

    Invisible and combining characters, such as a single accent, are escaped too.
    """
    if not token:
        return END_OF_DOCUMENT
    text = token.replace(b"\\", b"\\\\").decode("utf-8", errors="backslashreplace")
    return "".join(
        c if c.isprintable() and not unicodedata.category(c).startswith("M") else escaped(c)
        for c in text.replace(" ", "␣")
    )
