"""Replay recorded experts in a live model, and read the records of vLLM and SGLang.

T tokens, E experts, K experts per token, B batch, S sequence, L recorded sequence
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_ffn.config.errors import ConfigError, first_line, import_optional, nearest_or_all
from moe_ffn.ffn.base import OWN_ROUTING, FFNBlock, layer_number
from moe_ffn.interop.routings import (
    call_arguments,
    inputs_of_experts,
    number_of_layers,
    routing_modules,
    sibling_modules,
    sparse_modules,
)
from moe_ffn.outputs import Routing, TokenContext

Record = Any
"""Recorded experts: a mapping from layers to ids or routings, the passes of `watch`, or an array; see
`replay`."""

_TOKENS = ("input_ids", "inputs_embeds", "token_ids", "hidden_states")
_CACHES = ("past_key_values", "cache")
"""Names of arguments that contain the tokens of a pass, and the cache of earlier ones."""

_LAST = "; engines record no experts for the last token that they generate: see read_experts"


@contextmanager
def replay(model: nn.Module, experts: Record) -> Iterator[None]:
    """Compute with given experts; the model's own router weighs them, with gradient (arXiv:2510.11370).

        with watch(model) as passes:
            model(**batch)
        with replay(other, passes[-1]):
            other(**batch).loss.backward()

    It is the counterpart of `watch`, for the same models. Each router scores the tokens as always, and its
    own code turns the scores of the given experts into weights: only the choice is replaced. Layers that are
    not given choose their own experts; so do tokens whose ids are negative. Our blocks need a router with
    `replays`. With activation checkpointing, the backward pass belongs inside the `with` block too.

    Generation with a cache continues in the record by position, and chooses freely after its end.

    Args:
        model: the module that is called.
        experts: a mapping from layers (`layer_03`) to integers (T, K) or (B, S, K), or to a `Routing`; a list
            of such mappings, one for each pass of a generation, as from `watch`; or an array (T, layers, K)
            or (B, S, layers, K), as from `read_experts`, of all layers of the model or of the sparse ones.

    Raises:
        ConfigError: the record does not fit the model or, later, the tokens of a pass; or a router cannot
            replay.
    """
    with ExitStack() as hooks:
        _Replay(model, experts, hooks)
        yield


class _Replay:
    """The hooks of `replay`, and the given experts of the current pass."""

    def __init__(self, model: nn.Module, experts: Record, hooks: ExitStack) -> None:
        self._signature = inspect.signature(model.forward)
        self._ids: dict[str, Tensor] = {}
        """Layer -> given experts (T, K) of the current pass. They are kept after the pass, because activation
        checkpointing runs its layers again."""
        modules = routing_modules(model)
        self._records = recorded_layers(model, experts)
        for name in self._records:
            module: Any = model.get_submodule(modules[name])
            before: Any = self._before_block
            if not isinstance(module, FFNBlock):
                before = self._before_experts
                for router in sibling_modules(model, modules[name]):
                    choice = _GivenChoice(partial(self._given, name), module.num_experts)
                    hooks.enter_context(router.register_forward_pre_hook(choice.enter))
                    left = router.register_forward_hook(choice.leave, always_call=True)
                    hooks.enter_context(left)
            before = partial(before, name)
            hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
        hooks.enter_context(model.register_forward_pre_hook(self._begin, with_kwargs=True))

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = call_arguments(self._signature, args, kwargs)
        tokens = next(value for name in _TOKENS if (value := arguments.get(name)) is not None)
        cache = next((c for name in _CACHES if (c := arguments.get(name)) is not None), None)
        starts_B = None if cache is None else _cached_lengths(cache, arguments, tokens)
        self._ids = {
            name: _of_pass(name, record, tokens, starts_B) for name, record in self._records.items()
        }

    def _given(self, name: str) -> Tensor:
        if name not in self._ids:
            raise ConfigError(
                f"replay: {name} ran outside a pass of the given model; give replay the module that is called"
            )
        return self._ids[name]

    def _before_experts(
        self, name: str, experts: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Check that the experts receive the given ids, or weight 0 where the router skips them."""
        _, received_TK, weights_TK = inputs_of_experts(args, kwargs)
        given_TK = self._given(name)
        if received_TK.shape != given_TK.shape:
            raise ConfigError(
                f"replay: {name} has {_experts_of_tokens(received_TK)}, but the record has "
                f"{_experts_of_tokens(given_TK)}"
            )
        given_TK = given_TK.to(received_TK.device)
        is_skipped_TK = (given_TK >= experts.num_experts) & (weights_TK == 0)
        if not bool(((received_TK == given_TK) | (given_TK < 0) | is_skipped_TK).all()):
            raise ConfigError(
                f"replay: the router before {type(experts).__name__} does not choose its experts by topk or "
                "max, so that its choice cannot be replaced; leave this layer out of the record"
            )

    def _before_block(
        self, name: str, block: FFNBlock, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given_to_block: tuple[Any, ...] = (*args, *kwargs.values(), None)
        x, context = given_to_block[:2]
        given = self._given(name).to(x.device)
        if len(given) != x.shape[:-1].numel():
            raise ConfigError(
                f"replay: {name} has {x.shape[:-1].numel()} tokens, but the record has {len(given)}"
            )
        if bool((given < 0).any()):
            with torch.no_grad():
                own = block.forward(x, context).routings[OWN_ROUTING].expert_ids_N.view_as(given)
            given = torch.where(given < 0, own, given)
        ids = given.view(*x.shape[:-1], -1)
        return (x, replace(context or TokenContext(), expert_ids=ids)), {}


class _GivenChoice(TorchFunctionMode):
    """Replaces the result of `topk` over the experts by the given ones and their scores, and that of `max`,
    which Phi-MoE takes twice, masking the first expert by `scatter` in between.
    """

    def __init__(self, given: Any, num_experts: int) -> None:
        super().__init__()
        self.given = given
        self.num_experts = num_experts
        self.num_masked = 0

    def enter(self, *_: Any) -> None:
        self.num_masked = 0
        self.__enter__()

    def leave(self, *_: Any) -> None:
        self.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        self.num_masked += name == "scatter"
        if name not in ("topk", "max") or not isinstance(output, tuple):
            return output
        scores_TE, (_, own) = args[0], output
        given_TK = self.given().to(own.device)
        *leading, num_scores = scores_TE.shape
        # ZAYA's router may also skip a token.
        if math.prod(leading) != len(given_TK) or num_scores - self.num_experts not in (0, 1):
            return output  # the scores of groups of experts
        first = self.num_masked if name == "max" else 0
        k = own.shape[-1] if own.ndim == scores_TE.ndim else 1
        if given_TK.shape[1] < first + k:
            return output  # `_before_experts` explains
        given_Tk = given_TK[:, first : first + k]
        ids_Tk = torch.where(given_Tk < 0, own.view(-1, k), given_Tk)
        values = scores_TE.reshape(-1, num_scores).gather(1, ids_Tk).view_as(own)
        return type(output)((values, ids_Tk.view_as(own)))


# -- records


def recorded_layers(model: nn.Module, experts: Record) -> dict[str, Tensor]:
    """Return layer -> recorded experts, integers (T, K) or (B, L, K); see `replay`."""
    modules = routing_modules(model)
    records = _record_of_layers(model, modules, experts)
    for name, record in records.items():
        module = model.get_submodule(modules[name])
        if (kind := unable_to_replay(module)) is not None:
            raise ConfigError(
                f"replay: {name} has {kind}, which cannot replay; leave it out of the record"
            )
        if record.is_floating_point() or record.dtype == torch.bool:
            raise ConfigError(
                f"replay: the experts of {name} must be integers, but are {record.dtype}"
            )
        siblings = sibling_modules(model, modules[name])  # ZAYA's router may also skip a token
        classes = (getattr(sibling, "num_router_classes", 0) for sibling in siblings)
        num_experts = max(count_experts(module), *classes)
        if record.numel() and (largest := int(record.max())) >= num_experts:
            raise ConfigError(
                f"replay: {name} has {num_experts} experts, but the record has the id {largest}; give the "
                "record of this model"
            )
    return records


def _record_of_layers(
    model: nn.Module, modules: Mapping[str, str], experts: Record
) -> dict[str, Tensor]:
    if isinstance(experts, Mapping):
        experts = [experts]
    if isinstance(experts, list | tuple):
        return _of_mappings(modules, experts)
    table = torch.as_tensor(experts)
    if table.ndim not in (3, 4):
        raise ConfigError(
            "replay: an array of experts must be (tokens, layers, k) or (batch, tokens, layers, k), but has "
            f"{tuple(table.shape)}"
        )
    num_layers, given = number_of_layers(model, modules), table.shape[-2]
    sparse = sparse_modules(model)
    if not sparse:
        raise ConfigError("replay: the model has no sparse layers; give the model of this record")
    if given not in (num_layers, len(sparse)):
        raise ConfigError(
            f"replay: the record has {given} layers, but the model has {num_layers}, of which {len(sparse)} "
            "are sparse; give the record of this model"
        )
    places = {
        name: layer_number(name) if given == num_layers else place
        for place, name in enumerate(sparse)
    }
    return {name: _check_filled(name, table.select(-2, place)) for name, place in places.items()}


def _of_mappings(modules: Mapping[str, str], passes: Sequence[Any]) -> dict[str, Tensor]:
    """Return layer -> recorded experts of one or more passes, the later ones after the earlier ones."""
    records: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for layers in passes for name in layers):
        if "/" in name:  # inner blocks and later rounds choose again, as in `Decoder.forward`
            continue
        if name not in modules:
            raise ConfigError(
                f"replay: '{name}' is not a sparse layer of the model{nearest_or_all(name, modules)}"
            )
        pieces = [_ids_of(name, layers[name], alone=len(passes) == 1) for layers in passes]
        records[name] = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
    return records


def _ids_of(name: str, value: Any, *, alone: bool) -> Tensor:
    if isinstance(value, Routing):
        if len(value.expert_ids_N) % value.num_tokens:
            raise ConfigError(f"replay: the tokens of {name} have different numbers of experts")
        return value.expert_ids_N.view(
            -1, value.sequence_length, len(value.expert_ids_N) // value.num_tokens
        )
    ids = torch.as_tensor(value)
    if ids.ndim not in ((2, 3) if alone else (3,)):
        shapes = "(tokens, k) or (batch, tokens, k)" if alone else "(batch, tokens, k)"
        raise ConfigError(
            f"replay: the experts of {name} must be {shapes}, but have {tuple(ids.shape)}"
        )
    return _check_filled(name, ids)


def count_experts(module: Any) -> int:
    """Return the number of experts of a module of `routing_modules`."""
    if not isinstance(module, FFNBlock):
        return module.num_experts
    config: Any = module.config
    return config.router_infos()[OWN_ROUTING].num_experts


def unable_to_replay(module: nn.Module) -> str | None:
    """Return why a module of `routing_modules` cannot replay; None if it can."""
    router = module.routers().get(OWN_ROUTING) if isinstance(module, FFNBlock) else None
    if not isinstance(module, FFNBlock) or (router is not None and router.replays):
        return None
    return "no router" if router is None else f"the router {type(router).__name__}"


def _check_filled(name: str, ids: Tensor) -> Tensor:
    """Return the ids; raise ConfigError if a token lists an expert twice."""
    sorted_ids = ids.sort(dim=-1).values
    if bool(((sorted_ids[..., 1:] == sorted_ids[..., :-1]) & (sorted_ids[..., 1:] >= 0)).any()):
        raise ConfigError(
            f"replay: a token of {name} lists an expert twice, as in a record that was not filled"
        )
    return ids


# -- passes


def _cached_lengths(cache: Any, arguments: Mapping[str, Any], tokens: Tensor) -> list[int]:
    """Return the number of cached tokens of each row."""
    if hasattr(cache, "lengths"):  # our own
        return list(cache.lengths)
    mask = arguments.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:  # it covers the cached tokens too
        return [mask.shape[1] - tokens.shape[1]] * len(tokens)
    return [int(cache.get_seq_length())] * len(tokens)


def _of_pass(name: str, record: Tensor, tokens: Tensor, starts_B: list[int] | None) -> Tensor:
    """Return the given experts (T, K) of a pass over `tokens`, (B, S) or (B, S, D); -1 where nothing is
    given. `starts_B` counts the cached tokens of each row; None without a cache.
    """
    batch, length = tokens.shape[:2]
    total, k = record.shape[:-1].numel(), record.shape[-1]
    if record.ndim == 2 and total % batch == 0:
        record = record.view(batch, -1, k)
    fits = record.ndim == 3 and len(record) == batch
    if starts_B is None:
        fits = fits and record.shape[1] == length
    elif fits and max(starts_B) == 0:
        fits = record.shape[1] >= length
    if not fits:
        is_shorter = total + batch == batch * length
        raise ConfigError(
            f"replay: the record of {name} has {total} tokens, but the pass has {batch * length} "
            f"({batch} x {length}); give the record of this batch{_LAST if is_shorter else ''}"
        )
    record = record.to(tokens.device).long()
    if starts_B is None:
        return record.reshape(-1, k)
    starts_B1 = torch.tensor(starts_B, device=tokens.device).unsqueeze(-1)
    places_BS = starts_B1 + torch.arange(length, device=tokens.device)
    rows_B1 = torch.arange(batch, device=tokens.device).unsqueeze(-1)
    given_BSK = record[rows_B1, places_BS.clamp(max=record.shape[1] - 1)]
    after_BS1 = (places_BS >= record.shape[1]).unsqueeze(-1)
    return given_BSK.masked_fill(after_BS1, -1).reshape(-1, k)


def _experts_of_tokens(ids_TK: Tensor) -> str:
    return f"{ids_TK.shape[1]} experts for each of {len(ids_TK)} tokens"


# -- records of other engines

_EXPERTS, _PROMPT, _MASK = "routed_experts", "prompt_routed_experts", "attention_mask"


def read_experts(path: str | Path, attention_mask: Any = None) -> Tensor:
    """Read the experts that vLLM or SGLang recorded, for `replay`.

        numpy.savez("rollout.npz", routed_experts=output.outputs[0].routed_experts)
        experts = read_experts("rollout.npz", batch["attention_mask"])

    The file has `routed_experts`, integers (tokens, layers, k) or (batch, tokens, layers, k). It may have
    `prompt_routed_experts` for the tokens before them (vLLM 0.21), and `attention_mask`, (tokens) or
    (batch, tokens), with 0 for padding of these arrays. An `.npy` file has only `routed_experts`. SGLang
    returns base64: `numpy.frombuffer(base64.b64decode(text), "int32").reshape(-1, layers, k)`.

    Args:
        attention_mask: mask (B, S) of the batch in which the experts are replayed, with padding on the left
            or on the right. The recorded tokens take the places of its real tokens in order. The last token
            may be absent, since engines do not compute it.

    Returns:
        Ids (B, S, layers, K), int64. Tokens without a record, and padding, have the id -1, so that the model
        chooses. The layers are all of the model, with zeros for dense ones, or the sparse ones.

    Raises:
        ConfigError: the file is not readable, is not such a record or was not filled (zeros everywhere, as
            with some versions of vLLM), or does not fit `attention_mask`.
    """
    arrays = _read_arrays(Path(path))
    experts = _batched(path, arrays, _EXPERTS, 4)
    if _PROMPT in arrays:
        prompt = _batched(path, arrays, _PROMPT, 4)
        if prompt.shape[2:] != experts.shape[2:] or len(prompt) != len(experts):
            raise ConfigError(
                f"'{path}': {_PROMPT} {tuple(prompt.shape)} and {_EXPERTS} {tuple(experts.shape)} may differ "
                "only in the number of tokens"
            )
        experts = torch.cat([prompt, experts], dim=1)
    if not experts.any():
        raise ConfigError(
            f"'{path}': {_EXPERTS} is zero everywhere, so the engine recorded nothing; update it, and check "
            "that its model runner supports routed experts"
        )
    is_real = torch.ones(experts.shape[:2], dtype=torch.bool)
    if _MASK in arrays:
        is_real = _batched(path, arrays, _MASK, 2).bool()
        if is_real.shape != experts.shape[:2]:
            raise ConfigError(
                f"'{path}': {_MASK} has {tuple(is_real.shape)} tokens, but {_EXPERTS} has "
                f"{tuple(experts.shape[:2])}"
            )
    if attention_mask is None:
        return experts.masked_fill(~is_real[..., None, None], -1)
    mask = torch.as_tensor(attention_mask).bool().cpu()
    placed = experts.new_full((*mask.shape, *experts.shape[2:]), -1)
    for row, places in enumerate(mask):
        recorded = experts[row][is_real[row]] if len(mask) == len(experts) else experts[:0]
        missing = int(places.sum()) - len(recorded)
        if missing not in (0, 1):
            raise ConfigError(
                f"'{path}' has {len(experts)} sequences of {is_real.sum(1).tolist()} tokens, but the batch "
                f"has {len(mask)} of {mask.sum(1).tolist()}; give the record of this batch"
            )
        placed[row, places.nonzero()[: len(recorded), 0]] = recorded
    return placed


def _read_arrays(path: Path) -> dict[str, Any]:
    np = import_optional("numpy", "numpy is not installed")
    try:
        with path.open("rb") as file:
            loaded: Any = np.load(file, allow_pickle=False)
            arrays = {_EXPERTS: loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
    except Exception as error:  # of many types: the file is damaged
        raise ConfigError(
            f"'{path}' cannot be read as a file of arrays, .npz or .npy ({first_line(error)})"
        ) from error
    if _EXPERTS not in arrays:
        names = ", ".join(sorted(arrays)) or "no arrays"
        raise ConfigError(
            f"'{path}' has no array '{_EXPERTS}' (it has {names}); save it with numpy.savez(path, "
            f"{_EXPERTS}=...)"
        )
    return arrays


def _batched(path: str | Path, arrays: Mapping[str, Any], name: str, ndim: int) -> Tensor:
    """Return an array of integers with a batch axis."""
    array = arrays[name]
    if array.dtype.kind not in "iub" or array.ndim not in (ndim - 1, ndim):
        axes = "batch, tokens, layers, k" if ndim == 4 else "batch, tokens"
        raise ConfigError(
            f"'{path}': {name} must be integers ({axes}), the batch optional, but is {array.dtype} "
            f"{array.shape}"
        )
    values = torch.as_tensor(array.astype("int64"))
    return values if array.ndim == ndim else values.unsqueeze(0)
