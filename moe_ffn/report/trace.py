"""Follows a text through a run's layers.

T tokens, E experts, N (token, expert) pairs, V vocabulary
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe_ffn.balancing.losses import normalized_scores
from moe_ffn.errors import ConfigError
from moe_ffn.ffn import FFNConfig
from moe_ffn.ffn.base import RouterInfo
from moe_ffn.layer_names import layer_number, short_name
from moe_ffn.outputs import Routing
from moe_ffn.runs.saved_model import SavedModel, load_model


@dataclass(frozen=True)
class Choice:
    """One expert that a token was sent to."""

    expert: int
    weight: float
    """What the expert's output is multiplied by."""
    score: float
    """What the router gave this expert, after its normalisation."""
    dropped: bool
    """True where the expert was full, so that it never saw the token."""


@dataclass(frozen=True)
class Visit:
    """What one router decided about one token."""

    choices: tuple[Choice, ...]
    """The heaviest first; none where the router chose no expert."""
    entropy: float | None
    """Of the token's normalised scores, in nats; None where nothing is weighed against anything."""


@dataclass(frozen=True)
class Prediction:
    """The token that the model held to be the most probable next one."""

    token: str
    probability: float


@dataclass(frozen=True)
class TokenTrace:
    position: int
    token: str
    """As it can be shown: see `visible.py`."""
    visits: Mapping[str, Visit | None]
    """By the name of the layer; None where the token did not come to the router: it is padding, or it
    passed by the mixture of depths that the router is inside of."""
    prediction: Prediction | None
    """None in a model that sees both sides."""


@dataclass(frozen=True)
class Layer:
    """A router, and what it chooses from."""

    name: str
    """`layer_03`, and `layer_03/inner` inside a mixture of depths."""
    experts: tuple[str, ...]
    """What each expert is called: its number, after a word where it is none with a network."""
    capacity: str
    """How many tokens an expert took: `dropless`, or the factor and the places it comes to."""
    shared_expert: str | None = None
    """The type of the block that every token passes through beside its experts."""
    is_gate: bool = False
    """True for the router of a mixture of depths, which lets a token through a block or past it."""

    @property
    def title(self) -> str:
        """`layer_03/inner` as `layer 3 inner`."""
        return f"layer {short_name(self.name)}"


@dataclass(frozen=True)
class TextTrace:
    """A text, and what the routers of a run decided about each of its tokens."""

    run: str
    layers: tuple[Layer, ...]
    tokens: tuple[TokenTrace, ...]
    unrouted: Mapping[str, str]
    """Layers that route nothing, by title, and the type of their block."""

    def visits(self, layer: Layer) -> list[Visit]:
        """Those of the tokens that came to the layer's router."""
        found = (token.visits[layer.name] for token in self.tokens)
        return [visit for visit in found if visit is not None]


def follow(
    folder: Path, text: bytes, layers: Sequence[int] | None = None, *, trust_code: bool = False
) -> TextTrace:
    """Trace `text` through the run in `folder`, in evaluation, with its best weights.

    Args:
        layers: show these alone; None shows all that route.
        trust_code: run the code that the folder names, whoever's it is.

    Raises:
        ConfigError: no run with a checkpoint, a run that routes nothing, a text that is too long for
            it, or a layer that it does not route in.
    """
    run = load_model(folder, trust_code=trust_code)
    output = run.run(text, who="--text")
    ids = run.tokenizer.encode(text).tolist()
    unrouted = unrouted_layers(run.config.model.layer_ffns(), output.routings)
    if not output.routings:
        types = ", ".join(f"'{name}'" for name in dict.fromkeys(unrouted.values()))
        raise ConfigError(
            f"'{folder}' routes no token: its feed-forward blocks are of type {types}; give a run "
            "with model.ffn.type 'moe' or 'mixture_of_depths'"
        )
    shown = _chosen(output.routings, layers, folder)
    infos = run.config.model.routers()
    gates = [name for name, info in infos.items() if info.is_gate]
    visits = visits_by_layer(output.routings, gates)
    predictions: Sequence[Prediction | None] = [None] * len(ids)
    if run.config.model.causal:
        predictions = _predictions(output.logits[0], run)
    return TextTrace(
        run=folder.resolve().name,
        layers=tuple(_layer(name, output.routings[name], infos.get(name)) for name in shown),
        tokens=tuple(
            TokenTrace(
                position=position,
                token=visible(run.tokenizer.token_bytes[token_id]),
                visits={name: visits[name][position] for name in shown},
                prediction=predictions[position],
            )
            for position, token_id in enumerate(ids)
        ),
        unrouted=unrouted if layers is None else {},
    )


def visits_by_layer(
    routings: Mapping[str, Routing], gates: Sequence[str] = ()
) -> dict[str, list[Visit | None]]:
    """What each router decided about each token of one sequence, (T,) for every layer.

    A block inside a mixture of depths sees the tokens that were let through, moved together in their
    order; here they stand where they came from.

    Args:
        gates: the routings of mixtures of depths.
    """
    visits: dict[str, list[Visit | None]] = {}
    for name, routing in routings.items():
        here = visits_of(routing)
        gate = next((gate for gate in gates if name.startswith(f"{gate}/")), None)
        if gate is not None:
            outer = routings[gate]
            came_from = outer.token_ids_N[outer.computed_N].tolist()
            moved = dict(zip(came_from, here, strict=True))
            here = [moved.get(token) for token in range(outer.num_tokens)]
        visits[name] = here
    return visits


def visits_of(routing: Routing) -> list[Visit | None]:
    """What a router decided about each of its tokens, (T,); None for padding."""
    scores_TE = routing.require("scores_TE", "a trace")
    choices: list[list[Choice]] = [[] for _ in range(routing.num_tokens)]
    pairs = zip(
        routing.token_ids_N.tolist(),
        routing.expert_ids_N.tolist(),
        routing.weights_N.tolist(),
        scores_TE[routing.token_ids_N, routing.expert_ids_N].tolist(),
        routing.dropped_N.tolist(),
        routing.real_N.tolist(),
        strict=True,
    )
    for token, expert, weight, score, dropped, real in pairs:
        if real:
            choices[token].append(Choice(expert, weight, score, dropped))
    mask_T = routing.mask_T
    real_T = [True] * routing.num_tokens if mask_T is None else mask_T.tolist()
    entropies = _entropies(routing)
    return [
        Visit(tuple(sorted(listed, key=lambda choice: -choice.weight)), entropy) if real else None
        for listed, entropy, real in zip(choices, entropies, real_T, strict=True)
    ]


def unrouted_layers(ffns: Sequence[FFNConfig], routings: Mapping[str, Routing]) -> dict[str, str]:
    """The title of each layer that returned no routing, and the type of its block."""
    routed = set(map(layer_number, routings))
    return {f"layer {index}": ffn.type for index, ffn in enumerate(ffns) if index not in routed}


def _entropies(routing: Routing) -> list[float | None]:
    if routing.num_experts == 1:
        return [None] * routing.num_tokens
    scores_TE = normalized_scores(routing)
    entropy_T = torch.special.entr(scores_TE).sum(dim=-1)
    # A token that every expert scored 0, as ReLU may, has no distribution.
    scored_T = scores_TE.sum(dim=-1) > 0
    return [
        value if scored else None
        for value, scored in zip(entropy_T.tolist(), scored_T.tolist(), strict=True)
    ]


def _predictions(logits_TV: Tensor, run: SavedModel) -> list[Prediction]:
    best = logits_TV.float().softmax(dim=-1).max(dim=-1)
    return [
        Prediction(visible(run.tokenizer.token_bytes[token_id]), probability)
        for token_id, probability in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def _chosen(
    routings: Mapping[str, Routing], layers: Sequence[int] | None, folder: Path
) -> list[str]:
    """The names of the layers to show, in the model's order."""
    if layers is None:
        return list(routings)
    numbers = {name: layer_number(name) for name in routings}
    for layer in layers:
        if layer not in numbers.values():
            known = ", ".join(map(str, dict.fromkeys(numbers.values())))
            raise ConfigError(
                f"--layers: '{folder}' routes nothing in layer {layer}; it routes in {known}"
            )
    return [name for name, number in numbers.items() if number in layers]


def _layer(name: str, routing: Routing, info: RouterInfo | None) -> Layer:
    """`info` is None for a router that its block does not name."""
    if info is None:
        return Layer(name, tuple(map(str, range(routing.num_experts))), _capacity(routing, None))
    return Layer(
        name,
        ("through",) if info.is_gate else info.expert_names(),
        _capacity(routing, info.capacity.eval_factor),
        shared_expert=None if info.shared_expert is None else info.shared_expert.type,
        is_gate=info.is_gate,
    )


def _capacity(routing: Routing, factor: float | None) -> str:
    if routing.capacity is None:
        return "dropless"
    places = int(routing.capacity)
    text = f"{places} place{'' if places == 1 else 's'} per expert"
    return text if factor is None else f"factor {factor}, {text}"


END_OF_DOCUMENT = "<end>"


def visible(token: bytes) -> str:
    r"""A space as `␣`, a newline as `\n`, a byte that is no UTF-8 as `\xc3`, a backslash doubled.

    What would join its neighbours or not be seen at all, such as an accent alone, is escaped too.
    """
    if not token:
        return END_OF_DOCUMENT
    text = token.replace(b"\\", b"\\\\").decode("utf-8", errors="backslashreplace")
    return "".join(map(_visible_character, text))


def _visible_character(character: str) -> str:
    if character == " ":
        return "␣"
    if character.isprintable() and not unicodedata.category(character).startswith("M"):
        return character
    return character.encode("unicode_escape").decode("ascii")
