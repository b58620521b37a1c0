"""The Transformer, a causal decoder or a bidirectional encoder, around any `FFNBlock`.

B batch, S sequence, V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from traceback import extract_tb
from typing import Annotated, Any, Literal, cast

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_ffn.config.base import MAX_COUNT, Config, require_count
from moe_ffn.config.errors import ConfigError, Unsupported, UseCase, first_unsupported
from moe_ffn.config.sizes import linear_flops
from moe_ffn.ffn import FFNConfig, MoEConfig, WidthMatch, solve_widths
from moe_ffn.ffn.base import FFNBlock, RouterInfo, layer_name, prefix_names, short_name
from moe_ffn.model.attention import AttentionConfig
from moe_ffn.model.cache import KVCache, LayerCache
from moe_ffn.model.norm import NormConfig, RMSNormConfig
from moe_ffn.model.parametrization import (
    LAYERS,
    ParameterScale,
    ParametrizationConfig,
    StandardConfig,
)
from moe_ffn.model.positions import PositionEncoding, PositionsConfig, RotaryConfig
from moe_ffn.outputs import FFNOutput, Routing, TokenContext, brief
from moe_ffn.routing.base import Router


def _string_keys(value: Any) -> Any:
    """Convert keys to strings, since YAML reads the key `0:` as a number."""
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else value


class DecoderConfig(Config, frozen=True):
    """A Transformer over tokens: a causal decoder, or a bidirectional encoder."""

    d_model: int = Field(default=128, ge=1, le=MAX_COUNT)
    """Width of the residual stream."""
    num_layers: int = Field(default=4, ge=1, le=10_000)
    """Number of layers, each with attention and a feed-forward block."""
    causal: bool = True
    """Predict the next token from earlier tokens; false: predict masked tokens from tokens on both sides."""
    ffn: FFNConfig = MoEConfig()
    """The feed-forward block of every layer."""
    ffn_at: Annotated[dict[str, FFNConfig], BeforeValidator(_string_keys)] = Field(default={})
    """Blocks of some layers, by Python slice: {"0": {type: dense}, "1::2": {type: moe}}; the last match
    wins."""
    attention: AttentionConfig = AttentionConfig()
    """Self-attention."""
    positions: PositionsConfig = RotaryConfig()
    """The position encoding."""
    norm: NormConfig = RMSNormConfig()
    """Normalisation of activations."""
    norm_placement: Literal["pre", "post"] = "pre"
    """pre: norm before each sublayer, x + f(norm(x)); post: norm after the sum, norm(x + f(x)), as in the
    original Transformer."""
    parametrization: ParametrizationConfig = StandardConfig()
    """Rule that sets initial weights and learning rates from the sizes of the model."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of dropping a unit of the embeddings and of each sublayer's output in training."""
    tie_embeddings: bool = True
    """Use the token embeddings as the output matrix."""
    scale_embeddings: bool = False
    """Multiply token embeddings by sqrt(d_model), as in the original Transformer."""
    activation_checkpointing: Literal["ffn", "block"] | bool = False
    """Activations to recompute in the backward pass, to save memory. ffn: those of the feed-forward blocks,
    which are the largest part; block or true: all of each layer except its input."""

    @model_validator(mode="after")
    def _check_parts_fit_together(self) -> DecoderConfig:
        if self.attention.head_dim is None and self.d_model % self.attention.num_heads:
            raise ValueError(
                f"attention.num_heads ({self.attention.num_heads}) must divide d_model ({self.d_model}), "
                "or set attention.head_dim"
            )
        self.positions.check_widths(self.d_model, self.head_dim)
        self.layer_windows()
        if reason := self.parametrization.unsupported_reason(self):
            raise ValueError(f"parametrization.type ('{self.parametrization.type}') {reason}")
        for layer, ffn in enumerate(self.layer_ffns()):
            if self.causal and (unsupported := ffn.unsupported(UseCase(causal=True))):
                raise ValueError(
                    f"layer {layer} ('{ffn.type}') is not causal: {unsupported}, or set model.causal: false"
                )
        return self

    @property
    def head_dim(self) -> int:
        """Width of each head that rotary positions rotate."""
        return self.attention.rotated_width(self.d_model)

    def layer_windows(self) -> list[int | None]:
        """Return the attention window of each layer; None if its tokens attend to all tokens."""
        windowed = {
            layer
            for layers in self.attention.window_at.split(",")
            for layer in self._layers_at(layers, "attention.window_at")
        }
        return [self.attention.window if n in windowed else None for n in range(self.num_layers)]

    def _layers_at(self, layers: str, option: str) -> range:
        """Return the layers of a Python slice; raise ValueError if there are none."""
        found = range(self.num_layers)[parse_slice(layers, option)]
        if not found:
            raise ValueError(
                f"{option} '{layers}' names none of the {self.num_layers} layers "
                f"(0 to {self.num_layers - 1})"
            )
        return found

    def layer_ffns(self) -> list[FFNConfig]:
        """Return the feed-forward config of each layer."""
        return [ffn for _, ffn in self.ffns_by_option()]

    def ffns_by_option(self) -> list[tuple[str, FFNConfig]]:
        """Return (option, config) of each layer's block; options are such as `ffn` or `ffn_at.1::2`."""
        ffns = [("ffn", self.ffn)] * self.num_layers
        for layers, ffn in self.ffn_at.items():
            for index in self._layers_at(layers, "ffn_at"):
                ffns[index] = (f"ffn_at.{layers}", ffn)
        return ffns

    def with_solved_widths(
        self, seq_len: int, prefix: str = ""
    ) -> tuple[DecoderConfig, tuple[WidthMatch, ...]]:
        """Return the config with a number for each `d_ff: {match: ..., of: ...}`, and the matches.
        ConfigError, whose paths begin with `prefix`, if a width cannot be solved.
        """
        blocks = {"ffn": self.ffn} | {f"ffn_at.{key}": ffn for key, ffn in self.ffn_at.items()}
        solved = {
            option: solve_widths(ffn, self.d_model, seq_len, prefix + option)
            for option, ffn in blocks.items()
        }
        matches = tuple(match for _, match in solved.values() if match is not None)
        if not matches:
            return self, ()
        ffn_at = {key: solved[f"ffn_at.{key}"][0] for key in self.ffn_at}
        return self.model_copy(update={"ffn": solved["ffn"][0], "ffn_at": ffn_at}), matches

    def router_infos(self) -> dict[str, RouterInfo]:
        """Return the routers of all layers, named as in `DecoderOutput.routings`."""
        routers: dict[str, RouterInfo] = {}
        for layer, (option, ffn) in enumerate(self.ffns_by_option()):
            of_layer = {name: info.inside(option) for name, info in ffn.router_infos().items()}
            routers |= prefix_names(layer_name(layer), of_layer)
        return routers

    def with_k(self, k_at: Mapping[str, int], option: str = "k_at") -> DecoderConfig:
        """Return the config for evaluation with k by layers, as in `ffn_at`: {":": 4, "0": 1}. Raise
        ValueError, which names `option`, if k exceeds the experts or no router there has a k.
        """
        ffns = self.layer_ffns()
        for layers, k in k_at.items():
            require_count(k, f"{option} '{layers}'")
            indices = self._layers_at(layers, option)
            routers = [info.router for n in indices for info in ffns[n].router_infos().values()]
            if not any(router.with_k(k) for router in routers):
                types = ", ".join(sorted({f"'{router.type}'" for router in routers})) or "none"
                raise ValueError(
                    f"{option} '{layers}': no router of these layers chooses k experts by score, as 'top_k' "
                    f"does (routers: {types}); name other layers, or evaluate another model"
                )
            for n in indices:
                ffns[n] = ffns[n].with_k(k, self.d_model)
        changed = self.model_copy(update={"ffn_at": {str(n): ffn for n, ffn in enumerate(ffns)}})
        for name, info in changed.router_infos().items():
            try:
                info.router.check_num_experts(info.num_experts)
            except ValueError as error:
                reason = str(error).partition(";")[0]
                raise ValueError(
                    f"{option}: layer {short_name(name)}: {reason}; lower k"
                ) from error
        return changed

    def unsupported(self, use_case: UseCase) -> Unsupported | None:
        """Return the first reason why the model does not support a use case; None if it does."""
        if use_case.cached and not self.causal:
            return Unsupported("causal (false) lets a token see later ones", "set causal: true")
        return first_unsupported(
            {"positions": self.positions, **dict(self.ffns_by_option())}, use_case
        )

    def build(
        self,
        vocab_size: int,
        max_seq_len: int,
        on_layer: Callable[[DecoderLayer], None] | None = None,
    ) -> Decoder:
        """Return a new module for up to `max_seq_len` tokens; `on_layer` gets each layer once built."""
        return Decoder(self, vocab_size, max_seq_len, on_layer)

    def build_empty(self, vocab_size: int, max_seq_len: int) -> Decoder:
        """Return the module on the meta device; ConfigError names a line that reads values when built."""
        try:
            with torch.device("meta"):
                return self.build(vocab_size, max_seq_len)
        except RuntimeError as error:
            if "meta" not in str(error):
                raise
            torch_folder = str(Path(torch.__file__).parent)
            frames = extract_tb(error.__traceback__)
            culprit = [f for f in frames if not f.filename.startswith(torch_folder)][-1]
            raise ConfigError(
                f"{culprit.filename}, line {culprit.lineno}, reads the values of a tensor, but "
                "parallel.shard, parallel.expert and moe-ffn plan build the model without values first "
                f"({str(error).splitlines()[0]}); compute it from plain Python numbers"
            ) from error

    def num_params(self, vocab_size: int, max_seq_len: int) -> int:
        """Return the number of parameters, including embeddings."""
        ffn = sum(ffn.num_params(self.d_model) for ffn in self.layer_ffns())
        return ffn + self._params_without_ffn(vocab_size, max_seq_len)

    def num_active_params(self, vocab_size: int, max_seq_len: int) -> int:
        """Return the number of parameters that one token uses, including embeddings."""
        ffn = sum(ffn.num_active_params(self.d_model) for ffn in self.layer_ffns())
        return ffn + self._params_without_ffn(vocab_size, max_seq_len)

    def flops_per_token(self, vocab_size: int, seq_len: int) -> int:
        """Return the forward FLOPs of matrix products per token."""
        ffn = sum(ffn.flops_per_token(self.d_model, seq_len) for ffn in self.layer_ffns())
        attention = sum(
            self.attention.flops_per_token(self.d_model, seq_len, self.causal, window)
            for window in self.layer_windows()
        )
        return ffn + attention + linear_flops(self.d_model, vocab_size)

    def num_norm_params(self) -> int:
        """Return the number of parameters of all norms: two per layer, and with pre-norm a final one."""
        num_norms = 2 * self.num_layers + (self.norm_placement == "pre")
        return num_norms * self.norm.num_params(self.d_model)

    def _params_without_ffn(self, vocab_size: int, max_seq_len: int) -> int:
        return (
            vocab_size * self.d_model * (1 if self.tie_embeddings else 2)
            + (0 if self.causal else self.d_model)  # the mask embedding
            + self.positions.num_params(self.d_model, max_seq_len)
            + self.num_layers * self.attention.num_params(self.d_model, self.norm)
            + self.num_norm_params()
        )


def parse_slice(text: str, option: str) -> slice:
    """Parse `"1::2"` as a slice, and `"3"` as a slice of one layer; a ValueError names `option`."""
    try:
        numbers = [int(part) if part.strip() else None for part in text.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) == 1 and numbers[0] is not None:
        first = numbers[0]
        return slice(first, first + 1 or None)
    if len(numbers) not in (2, 3) or numbers[2:] == [0]:
        raise ValueError(
            f"{option} '{text}' must be a layer or a Python slice, such as '0' or '1::2'"
        )
    return slice(*numbers)


@torch.no_grad()
def _rescale(module: nn.Module, scales: Mapping[str, ParameterScale], prefix: str = "") -> None:
    """Multiply the initial weights of a module by the factors of its parametrization."""
    for name, parameter in module.named_parameters():
        if (factor := scales.get(prefix + name, ParameterScale()).init) != 1:
            parameter.mul_(factor)


def _build_with_own_seed(ffn: FFNConfig, d_model: int) -> FFNBlock:
    """Build a block from a separate random generator, so that two models with the same seed differ only in
    their feed-forward blocks, however many numbers these draw.
    """
    seed = int(torch.randint(2**63 - 1, (), device="cpu"))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return ffn.build(d_model)


class DecoderLayer(nn.Module):
    """A layer: attention and a feed-forward block, each added to the residual stream.

    Pre-norm is x + f(norm(x)) and leaves the residual stream unnormalised (Xiong et al. 2020); post-norm is
    norm(x + f(x)) (Vaswani et al. 2017).
    """

    def __init__(self, config: DecoderConfig, ffn: FFNConfig, window: int | None) -> None:
        super().__init__()
        self.pre_norm = config.norm_placement == "pre"
        self.attention = config.attention.build(config.d_model, config.causal, config.norm, window)
        self.attention_norm = config.norm.build(config.d_model)
        self.ffn = _build_with_own_seed(ffn, config.d_model)
        self.ffn_norm = config.norm.build(config.d_model)
        self.recomputes_ffn = config.activation_checkpointing == "ffn"
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        positions: PositionEncoding,
        context: TokenContext,
        cache: LayerCache | None = None,
    ) -> FFNOutput:
        """Return the residual stream after this layer, and the routings of its feed-forward block."""
        if self.pre_norm:
            attended = self.attention(self.attention_norm(x), positions, context.mask, cache)
            x = x + self.dropout(attended)
            ffn = self._run_ffn(self.ffn_norm(x), context)
            return replace(ffn, hidden=x + self.dropout(ffn.hidden))
        attended = self.dropout(self.attention(x, positions, context.mask, cache))
        x = self.attention_norm(x + attended)
        ffn = self._run_ffn(x, context)
        return replace(ffn, hidden=self.ffn_norm(x + self.dropout(ffn.hidden)))

    def _run_ffn(self, x: Tensor, context: TokenContext) -> FFNOutput:
        return _recomputed(self.ffn, x, context) if self.recomputes_ffn else self.ffn(x, context)


@dataclass(frozen=True)
class DecoderOutput:
    """Logits of a decoder, and the routings of its tokens."""

    logits: Tensor
    """Logits of the next token at each position, (B, S, V); if not causal, of the token itself."""
    routings: dict[str, Routing]
    """Name -> routing of each sparse layer: `layer_03`, `layer_03/inner` for a sparse block inside a mixture
    of depths, `layer_03/round_2` for a later round of a chain of experts."""
    shared_shares: dict[str, Tensor] = field(default_factory=dict)
    """Fraction of the output from shared experts, with the names of `routings`; see `FFNOutput`."""

    def __repr__(self) -> str:
        names = list(self.routings)
        if len(names) > 4:
            names = [*names[:2], "...", names[-1]]
        routings = f"{len(self.routings)} routings: {', '.join(names)}" if names else "no routings"
        return f"{type(self).__name__}(logits={brief(self.logits)}, {routings})"


torch.export.register_dataclass(DecoderOutput, serialized_type_name="moe_ffn.DecoderOutput")


class Decoder(nn.Module):
    """Embeddings, `num_layers` blocks, and an output matrix."""

    def __init__(
        self,
        config: DecoderConfig,
        vocab_size: int,
        max_seq_len: int,
        on_layer: Callable[[DecoderLayer], None] | None = None,
    ) -> None:
        super().__init__()
        require_count(vocab_size, "vocab_size")
        require_count(max_seq_len, "max_seq_len")
        positions = config.positions.for_length(max_seq_len)
        config = config.model_copy(update={"positions": positions})
        self.config = config
        self.max_seq_len = max_seq_len
        self.scales = config.parametrization.scales(config, vocab_size, max_seq_len)
        self.embedding = nn.Embedding(vocab_size, config.d_model)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.mask_token_id = vocab_size
        self.mask_embedding = None
        if not config.causal:
            self.mask_embedding = nn.Parameter(torch.empty(config.d_model))
            nn.init.normal_(self.mask_embedding, std=0.02)
        self.embedding_scale = math.sqrt(config.d_model) if config.scale_embeddings else 1.0
        self.positions = config.positions.build(config.d_model, config.head_dim, max_seq_len)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList()
        for ffn, window in zip(config.layer_ffns(), config.layer_windows(), strict=True):
            layer = DecoderLayer(config, ffn, window)
            _rescale(layer, self.scales, f"{LAYERS}{len(self.layers)}.")
            if on_layer is not None:
                on_layer(layer)
            self.layers.append(layer)
        # With post-norm, the output of the last layer is already normalised.
        pre_norm = config.norm_placement == "pre"
        self.final_norm = config.norm.build(config.d_model) if pre_norm else nn.Identity()
        self.unembedding = nn.Linear(config.d_model, vocab_size, bias=False)
        nn.init.normal_(self.unembedding.weight, std=0.02)
        if config.tie_embeddings:
            self.unembedding.weight = self.embedding.weight
        outside = {
            name: scale for name, scale in self.scales.items() if not name.startswith(LAYERS)
        }
        _rescale(self, outside)

    def forward(
        self,
        token_ids: Tensor,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
        replay: Mapping[str, Tensor] | None = None,
    ) -> DecoderOutput:
        """Return logits over the vocabulary at every position.

        Args:
            token_ids: integers (B, S), S at most `max_seq_len`; a model that is not causal also accepts
                `mask_token_id`, which equals the vocabulary size.
            mask: bool (B, S), True for real tokens; None if there is no padding.
            cache: result of `new_cache`; the tokens continue the cached ones and are appended to them.
            replay: routing name -> experts of each token, int64 (B, S, K), as from `recorded_experts`;
                routers compute weights for these experts instead of choosing experts.

        Raises:
            TypeError, ValueError: a shape or a dtype is wrong, the sequence is longer than `max_seq_len`, or
                an id is not in the vocabulary (on a GPU, CUDA raises its own error for that).
        """
        _check_batch(token_ids, mask)
        if token_ids.shape[-1] > self.max_seq_len:
            raise ValueError(
                f"the sequence has {token_ids.shape[-1]} tokens, but the model was built for "
                f"max_seq_len ({self.max_seq_len}); shorten it"
            )
        context = TokenContext(mask=mask, token_ids=token_ids)
        contexts = [context] * len(self.layers)
        if replay is not None:
            contexts = self._replaying(context, replay)
        positions: PositionEncoding = self.positions
        if cache is not None:
            if torch.is_grad_enabled():
                raise ValueError(
                    "a cache has no gradient: call the model inside torch.no_grad(), or without a cache"
                )
            positions = self.positions.at(cache.begin(token_ids, mask).positions)
        x = self.dropout(positions.embed(self._embed(token_ids) * self.embedding_scale))
        routings: dict[str, Routing] = {}
        shared_shares: dict[str, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if cache is None:
                output = self._run(layer, x, contexts[index])
            else:
                layer_cache = cache.layers[index]
                context = replace(contexts[index], history=layer_cache)
                output = layer(x, positions, context, layer_cache)
            x = output.hidden
            routings |= prefix_names(layer_name(index), output.routings)
            shared_shares |= prefix_names(layer_name(index), output.shared_shares)
        if cache is not None:
            cache.end()
        return DecoderOutput(self.unembedding(self.final_norm(x)), routings, shared_shares)

    def new_cache(self, batch_size: int, capacity: int | None = None) -> KVCache:
        """Return an empty KV cache for `forward` of at most `capacity` tokens, by default `max_seq_len`;
        ValueError if the model supports none (`DecoderConfig.unsupported`).
        """
        if unsupported := self.config.unsupported(UseCase(cached=True)):
            raise ValueError(f"the model takes no cache: {unsupported}, or leave the cache out")
        capacity = self.max_seq_len if capacity is None else min(capacity, self.max_seq_len)
        return KVCache(len(self.layers), batch_size, capacity)

    def expert_capacities(self, routings: Mapping[str, Routing]) -> dict[str, Tensor]:
        """Return the capacity for a batch, in pairs per expert, of each layer that limits it."""
        capacities: dict[str, Tensor] = {}
        for name, info in self.config.router_infos().items():
            if name in routings:
                capacity = info.capacity.expert_capacity(routings[name], training=self.training)
                capacities |= {} if capacity is None else {name: capacity}
        return capacities

    def recorded_experts(self, output: DecoderOutput) -> dict[str, Tensor]:
        """Return routing name -> experts of each token, int64 (B, S, K), if the router can replay."""
        shape = output.logits.shape[:2]
        return {
            name: output.routings[name].expert_ids_N.reshape(*shape, -1)
            for name, router in self.routers().items()
            if _can_replay(name, router)
        }

    def _replaying(self, context: TokenContext, replay: Mapping[str, Tensor]) -> list[TokenContext]:
        """Return the context of each layer, with its recorded experts."""
        known = {name for name, router in self.routers().items() if _can_replay(name, router)}
        infos = self.config.router_infos()
        for name, expert_ids in replay.items():
            if name not in known:
                names = ", ".join(sorted(known)) or "none in this model"
                raise ValueError(
                    f"replay: '{name}' has no router that can replay; routers that can: {names}"
                )
            num_experts = infos[name].num_experts
            if expert_ids.numel() and not 0 <= expert_ids.min() <= expert_ids.max() < num_experts:
                raise ValueError(
                    f"replay: the experts of '{name}' must lie in [0, {num_experts}), but range from "
                    f"{int(expert_ids.min())} to {int(expert_ids.max())}"
                )
        names = map(layer_name, range(len(self.layers)))
        return [replace(context, expert_ids=replay.get(name)) for name in names]

    def routers(self) -> dict[str, Router]:
        """Return name -> router, with the names of `DecoderOutput.routings`."""
        routers: dict[str, Router] = {}
        for index, layer in enumerate(self.layers):
            routers |= prefix_names(layer_name(index), cast("DecoderLayer", layer).ffn.routers())
        return routers

    def set_k(self, k_at: Mapping[str, int]) -> None:
        """Use other numbers of experts per token from now on, for evaluation; see `DecoderConfig.with_k`."""
        self.config = self.config.with_k(k_at)
        infos = self.config.router_infos()
        for name, router in cast("dict[str, Any]", self.routers()).items():
            if name in infos and infos[name].router.with_k(1) is not None:
                router.config = infos[name].router

    def _embed(self, token_ids: Tensor) -> Tensor:
        known_ids = token_ids = token_ids.long()  # nn.Embedding rejects narrow integers
        if self.mask_embedding is not None:
            known_ids = token_ids.masked_fill(token_ids == self.mask_token_id, 0)
        try:
            embedded = self.embedding(known_ids)
        except IndexError as error:
            num_ids = self.mask_token_id + (self.mask_embedding is not None)
            raise ValueError(
                f"token_ids must lie in [0, {num_ids}), but range from {int(token_ids.min())} to "
                f"{int(token_ids.max())}"
            ) from error
        if self.mask_embedding is None:
            return embedded
        is_masked = (token_ids == self.mask_token_id).unsqueeze(-1)
        return torch.where(is_masked, self.mask_embedding, embedded)

    def _run(self, layer: nn.Module, x: Tensor, context: TokenContext) -> FFNOutput:
        if self.config.activation_checkpointing in (True, "block"):
            return _recomputed(layer, x, self.positions, context)
        return layer(x, self.positions, context)


def _can_replay(name: str, router: Router) -> bool:
    """Return True if a router can replay; routers of inner blocks and later rounds always choose again."""
    return router.replays and "/" not in name


def _recomputed(module: nn.Module, *inputs: Any) -> FFNOutput:
    """Run a module, and recompute its activations in the backward pass."""
    if torch.is_grad_enabled():
        return cast("FFNOutput", checkpoint(module, *inputs, use_reentrant=False))
    return module(*inputs)


def _check_batch(token_ids: Tensor, mask: Tensor | None) -> None:
    """Raise an error unless both are tensors (B, S); `TokenContext` checks their dtypes."""
    for name, value in (("token_ids", token_ids), ("mask", mask)):
        if value is None and name == "mask":
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, but is of type {type(value).__name__}")
    if token_ids.ndim != 2:
        raise ValueError(f"token_ids must be (batch, sequence), but has {tuple(token_ids.shape)}")
    if mask is not None and mask.shape != token_ids.shape:
        raise ValueError(
            f"mask must have the shape of token_ids, {tuple(token_ids.shape)}, "
            f"but has {tuple(mask.shape)}"
        )
