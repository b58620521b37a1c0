"""The way of each token through the layers: plain values, which the renderers read; torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moe_ffn.layer_names import short_name


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
class Way:
    """A text on its way through a run's layers."""

    run: str
    layers: tuple[Layer, ...]
    tokens: tuple[TokenTrace, ...]
    unrouted: Mapping[str, str]
    """Layers that route nothing, by title, and the type of their block."""

    def visits(self, layer: Layer) -> list[Visit]:
        """Those of the tokens that came to the layer's router."""
        found = (token.visits[layer.name] for token in self.tokens)
        return [visit for visit in found if visit is not None]
