"""Each part from outside the package tried once before training, on a few random tokens.

What it returns is held against what its base class promises, and in a causal model an output may not move
when later tokens change. The parts are built a second time for this, so that nothing of the run is touched,
and the random state is put back.

B sequences, S positions, T = B*S tokens, D model width, E experts, H heads
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moe_ffn.balancing.bias_rules import BiasRuleConfig
from moe_ffn.config import TaggedConfig
from moe_ffn.data.corpus import CorpusConfig, Document
from moe_ffn.dispatch import make_plan, plan_of_list
from moe_ffn.errors import ConfigError, show
from moe_ffn.experts.base import Experts
from moe_ffn.ffn import FFNConfig
from moe_ffn.ffn.base import FFNBlock
from moe_ffn.ffn.shared_expert import Combine, CombineConfig
from moe_ffn.import_path import explaining_outside_errors, is_outside
from moe_ffn.model.cache import LayerCache
from moe_ffn.model.norm import NormConfig
from moe_ffn.model.positions import Positions, PositionsConfig
from moe_ffn.outputs import FFNOutput, Routing, TokenContext
from moe_ffn.routing.base import Router, RouterConfig, routing_of_pairs
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.outside_code import tagged_parts
from moe_ffn.runs.parameter_counts import miscounted
from moe_ffn.training.optimizer import OptimizerConfig
from moe_ffn.training.schedule import ScheduleConfig

Kind = TypeVar("Kind")

_BATCH, _LENGTH = 2, 8
_MAX_LENGTH = 512
"""Length of the sequences that show whether a part looks ahead: some look far, or in chunks."""


def check_outside_parts(config: TrainConfig, device: torch.device) -> None:
    """Try every part of `config` that is not of this package, or holds such a part.

    Args:
        device: where the run will compute.

    Raises:
        ConfigError: one sentence: which part, what it did, what is expected.
    """
    # What is inside first: its mistake would look like one of the block around it.
    for path, part in reversed(list(tagged_parts(config))):
        outside = [p.type for _, p in tagged_parts(part) if is_outside(type(p))]
        if not outside:
            continue
        within = "" if is_outside(type(part)) else f" with '{outside[0]}'"
        name = f"{'.'.join(map(str, path))} ('{part.type}'{within})"
        trial = _Trial(config, device, name)
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.no_grad(), explaining_outside_errors(name):
            for family, check in _CHECKS.items():
                if isinstance(part, family):
                    check(trial, part)


@dataclass(frozen=True)
class _Trial:
    """One part under test, and what it is told of the model around it."""

    config: TrainConfig
    device: torch.device
    name: str

    @property
    def d_model(self) -> int:
        return self.config.model.d_model

    @property
    def length(self) -> int:
        """S, no longer than the run's own sequences."""
        return min(_LENGTH, self.config.data.seq_len)

    def random(self, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn(*shape, generator=generator).to(self.device)

    def x(self) -> Tensor:
        return self.random(_BATCH, self.length, self.d_model)

    def token_ids_BS(self) -> Tensor:
        """They differ, so that a block which keeps the wrong ones is seen."""
        ids_S = torch.arange(self.length, device=self.device) % 2
        return ids_S.expand(_BATCH, self.length)

    # -- what is demanded

    def refuse(self, what: str) -> ConfigError:
        return ConfigError(f"{self.name}: {what}")

    def require(self, found: Any, kind: type[Kind], who: str, hint: str = "") -> Kind:
        if isinstance(found, kind):
            return found
        raise self.refuse(f"{who} returned {_show(found)}, but has to return {_a(kind)}{hint}")

    def built(self, built: Any, kind: type[Kind]) -> Kind:
        module = self.require(built, kind, "build")
        return module.to(self.device) if isinstance(module, nn.Module) else module

    def require_like(self, found: Any, x: Tensor, who: str) -> Tensor:
        """A finite tensor of the shape and dtype of `x`."""
        if not isinstance(found, Tensor) or (found.shape, found.dtype) != (x.shape, x.dtype):
            raise self.refuse(f"{who} is {_show(found)}, but has to be like x, {_show(x)}")
        if not found.isfinite().all():
            raise self.refuse(f"{who} holds NaN or infinity, though x is random of size 1")
        return found

    def require_routing(self, routing: Any, num_experts: int | None = None) -> None:
        """A Routing of the right sizes, over experts that exist."""
        hint = "; `moe_ffn.routing_of_pairs` makes one"
        routing = self.require(routing, Routing, "forward", hint)
        num_tokens, num_experts = _BATCH * self.length, num_experts or routing.num_experts
        N, TE = (len(routing.expert_ids_N),), (num_tokens, num_experts)
        shapes = {
            "token_ids_N": N,
            "weights_N": N,
            "dropped_N": N,
            "logits_TE": TE,
            "scores_TE": TE,
            "logits_N": N,
        }
        for field, shape in shapes.items():
            found = getattr(routing, field)
            # A router of too many experts for a table has none.
            if found is not None and tuple(found.shape) != shape:
                raise self.refuse(
                    f"its routing has {field} of shape {tuple(found.shape)}, expected {shape}"
                )
        if routing.logits_TE is None and routing.logits_N is None:
            field, shape = ("logits_N", N) if routing.is_listed else ("logits_TE", TE)
            raise self.refuse(
                f"its routing has no {field}, its scores before any normalisation, expected of shape {shape}"
            )
        for field, expected in {"num_tokens": num_tokens, "num_experts": num_experts}.items():
            if (found := getattr(routing, field)) != expected:
                raise self.refuse(f"its routing has {field} {_show(found)}, expected {expected}")
        for field, end in {"token_ids_N": num_tokens, "expert_ids_N": num_experts}.items():
            ids = getattr(routing, field)
            if ids.dtype != torch.int64 or (ids < 0).any() or (ids >= end).any():
                raise self.refuse(f"its routing has {field} that are not int64 from 0 to {end - 1}")
        if (k := routing.listed_k) is not None:
            every_token_N = (
                [token for token in range(num_tokens) for _ in range(k)] if type(k) is int else None
            )
            if routing.token_ids_N.tolist() != every_token_N:
                raise self.refuse(
                    f"its routing has listed_k {_show(k)}, but token_ids_N are not every token so many times"
                )

    def require_blind_to_future(
        self, module: nn.Module, call: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        """Refuse a part of a causal model whose output changes with later tokens.

        The later half of the tokens is changed, then the last one.

        Args:
            call: x (B, S, D) and token ids (B, S) -> (B, S, ...).
        """
        length = min(self.config.data.seq_len, _MAX_LENGTH)
        if not self.config.model.causal or length == 1:
            return
        _move_off_zero(module)
        x = self.random(_BATCH, length, self.d_model)
        ids = torch.zeros(_BATCH, length, dtype=torch.int64, device=self.device)
        for training in (False, True):
            module.train(training)
            torch.manual_seed(0)
            once = call(x, ids)
            if not torch.equal(once, call(x, ids)):
                continue  # dropout or noise: two outputs cannot be compared
            for first in (length // 2, length - 1):
                later_x, later_ids = x.clone(), ids.clone()
                later_x[:, first:] = 10 - 10 * x[:, first:]
                later_ids[:, first:] = 1
                before = once[:, :first]
                moved = (call(later_x, later_ids)[:, :first] - before).abs()
                if moved.max() <= 1e-3 * before.abs().max() + 1e-6:
                    continue
                at = int(moved.flatten(2).amax(dim=(0, 2)).argmax())
                raise self.refuse(
                    f"its output at position {at} changes when tokens from position {first} on do"
                    f"{' (in training)' if training else ''}, so a causal model would see what it has to "
                    "guess; look at earlier tokens alone, or set model.causal: false"
                )

    def require_same_alone(self, claim: str, whole: Tensor, alone: Tensor) -> None:
        """Refuse a part that says under a name that tokens may be computed alone, and makes others of them.

        Args:
            whole: (B, S, ...), of whole sequences.
            alone: (1, S, ...), each token of the first one alone.
        """
        moved_S = (alone - whole[:1]).abs().flatten(2).amax(dim=(0, 2))
        if moved_S.max() > 1e-3 * whole.abs().max() + 1e-6:
            raise self.refuse(
                f"it says {claim}, but the token at position {int(moved_S.argmax())} becomes something else "
                f"alone than in its sequence, and text would be written so; leave {claim} out"
            )

    def require_by_token(
        self,
        module: nn.Module,
        call: Callable[[Tensor, Tensor], Tensor],
        after: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        """`require_same_alone` of a block or a router in evaluation.

        Args:
            call: as above.
            after: as `call`, of a token after those that it was called with before, which are kept.
        """
        x, ids = self.x(), self.token_ids_BS()
        module.eval()
        whole = call(x, ids)
        if self.length > 1 and torch.equal(whole, call(x, ids)):  # otherwise noise
            tokens = zip(x[:1].split(1, 1), ids[:1].split(1, 1), strict=True)
            claim = "by_token" if after is None else "reads_history"
            alone = torch.cat([(after or call)(*token) for token in tokens], 1)
            self.require_same_alone(claim, whole, alone)

    # -- what is tried, by family

    def ffn(self, config: FFNConfig) -> None:
        self.experts(config)
        x, context = self.x(), TokenContext(token_ids=self.token_ids_BS())
        block = self.built(config.build(self.d_model), FFNBlock)
        for training in (False, True):
            output = block.train(training)(x, context)
            output = self.require(output, FFNOutput, "forward", ", as in FFNOutput(hidden)")
            self.require_like(output.hidden, x, "hidden")
            if not isinstance(output.routings, dict):
                raise self.refuse(
                    f"routings is {_show(output.routings)}, but has to be a dict, as in "
                    "FFNOutput(hidden, {'routing': routing})"
                )
            for routing in output.routings.values():
                self.require_routing(routing)
        found = sum(parameter.numel() for parameter in block.parameters())
        if found != (told := config.num_params(self.d_model)):  # here, before data are prepared
            layers = [n for n, ffn in enumerate(self.config.model.layer_ffns()) if ffn is config]
            name = f"{self.name} of layer {layers[0]}" if layers else self.name
            raise miscounted(name, told, found, config, self.d_model)
        config.num_active_params(self.d_model)
        config.flops_per_token(self.d_model, self.config.data.seq_len)
        config.describe()

        def hidden(x: Tensor, ids: Tensor) -> Tensor:
            return block(x, TokenContext(token_ids=ids)).hidden

        kept = LayerCache(capacity=1)

        def hidden_after(x: Tensor, ids: Tensor) -> Tensor:
            output = block(x, TokenContext(token_ids=ids, history=kept))
            kept.end([1])
            return output.hidden

        self.require_blind_to_future(block, hidden)
        if config.not_cached_because is None:
            self.require_by_token(block, hidden, hidden_after if config.reads_history else None)

    def router(self, config: RouterConfig) -> None:
        infos = self.config.model.routers().values()
        num_experts = next((info.num_experts for info in infos if info.router is config), None)
        if num_experts is None:  # the block around it does not say that it has a router
            return
        router = self.built(config.build(self.d_model, num_experts), Router)

        def weights(x: Tensor, ids: Tensor) -> Tensor:
            context = TokenContext(token_ids=ids.flatten(), sequence_length=ids.shape[1])
            routing = router(x.flatten(0, 1), context)
            if x.shape[1] == self.length:
                self.require_routing(routing, num_experts)
            if routing.is_listed != config.is_listed:
                raise self.refuse(
                    f"its routing has {'no' if routing.is_listed else 'a'} table scores_TE, but its config "
                    f"says is_listed {config.is_listed}; set is_listed: ClassVar[bool] = {routing.is_listed}"
                )
            weights_N = routing.weights_N.masked_fill(~routing.real_N, 0)
            weights_TE = weights_N.new_zeros(routing.num_tokens, routing.num_experts)
            weights_TE.index_put_((routing.token_ids_N, routing.expert_ids_N), weights_N, True)
            return weights_TE.unflatten(0, ids.shape)

        for training in (False, True):
            router.train(training)
            weights(self.x(), self.token_ids_BS())
        self.require_blind_to_future(router, weights)
        if config.not_cached_because is None:
            self.require_by_token(router, weights)

    def experts(self, config: FFNConfig) -> None:
        """Try the experts of a block that says how they are built."""
        stack = config.expert_stack
        if stack is None or not is_outside(type(stack.config)):
            return
        x_TD = self.random(self.x().shape[:-1].numel(), stack.width(self.d_model))
        ids_T1 = (torch.arange(len(x_TD), device=self.device) % stack.num_experts)[:, None]
        ones_TE = torch.ones(len(x_TD), stack.num_experts, device=self.device)
        pairs = routing_of_pairs(ones_TE[:, :1], ids_T1, ones_TE, ones_TE, TokenContext())
        experts = self.built(stack.build(self.d_model), Experts).eval()
        planned = plan_of_list if experts.by_row else make_plan
        plan = planned(pairs, stack.num_experts)
        _move_off_zero(experts)
        who = "what its experts return"
        made = self.require_like(experts(x_TD, plan), x_TD, who)
        if torch.equal(made, experts(x_TD, replace(plan, weights_N=2 * plan.weights_N))):
            raise self.refuse(
                f"{who} is the same whatever plan.weights_N is, by which the router learns; multiply each "
                "pair's result by its weight"
            )
        dropped = replace(pairs, dropped_N=torch.ones_like(pairs.dropped_N))
        nothing = experts(x_TD, planned(dropped, stack.num_experts))
        self.require_like(nothing, x_TD, f"{who} of a plan that drops every pair")

    def combine(self, config: CombineConfig) -> None:
        x = self.x()
        combine = self.built(config.build(self.d_model, 1.0), Combine)
        for part in self.require(combine(x, x, x), tuple, "forward"):
            self.require_like(part, x, "a part of what forward returns")

    def norm(self, config: NormConfig) -> None:
        norm = self.built(config.build(self.d_model), nn.Module)
        self.require_like(norm(self.x()), self.x(), "what forward returns")
        self.require_blind_to_future(norm, lambda x, ids: norm(x))

    def positions(self, config: PositionsConfig) -> None:
        model, x = self.config.model, self.x()
        x_BHSd = self.random(*x.shape[:2], model.attention.num_heads, model.head_dim).transpose(
            1, 2
        )
        built = config.build(self.d_model, model.head_dim, self.config.data.seq_len)
        positions = self.built(built, Positions)
        self.require_like(positions.embed(x), x, "what embed returns")
        self.require_like(positions.rotate(x_BHSd), x_BHSd, "what rotate returns")
        self.require_blind_to_future(positions, lambda x, ids: positions.embed(x))
        if config.not_cached_because is None:
            backwards_1S = torch.arange(self.length, device=self.device).flip(0)[None]
            alone = [positions.at(slice(place, place + 1)) for place in range(self.length)]
            embedded = [at.embed(x_1) for at, x_1 in zip(alone, x[:1].split(1, 1), strict=True)]
            turned = [at.rotate(x_1) for at, x_1 in zip(alone, x_BHSd[:1].split(1, 2), strict=True)]
            rows = positions.at(backwards_1S)
            for made in (torch.cat(embedded, 1), rows.embed(x[:1].flip(1)).flip(1)):
                self.require_same_alone("has_places", positions.embed(x), made)
            for made in (torch.cat(turned, 2), rows.rotate(x_BHSd[:1].flip(2)).flip(2)):
                whole = positions.rotate(x_BHSd).transpose(1, 2)
                self.require_same_alone("has_places", whole, made.transpose(1, 2))

    def optimizer(self, config: OptimizerConfig) -> None:
        one_layer = self.config.model.model_copy(update={"num_layers": 1, "ffn_at": {}})
        model = one_layer.build(vocab_size=_LENGTH, max_seq_len=_LENGTH).to(self.device)
        optimizer = self.require(config.build(model), Optimizer, "build")
        held = [id(p) for group in optimizer.param_groups for p in group["params"]]
        if sorted(held) != sorted(map(id, model.parameters())):
            raise self.refuse(
                f"its groups hold {len(held)} parameters of a model with {len(list(model.parameters()))}; "
                "each has to be in one group, and in one alone"
            )
        for parameter in model.parameters():
            parameter.grad = self.random(*parameter.shape)
        optimizer.step()
        config.build(model).load_state_dict(optimizer.state_dict())
        for name, parameter in model.named_parameters():
            if not parameter.isfinite().all():
                raise self.refuse(
                    f"its first step makes NaN or infinity of '{name}', though its gradient is random of "
                    "size 1"
                )

    def schedule(self, config: ScheduleConfig) -> None:
        max_steps = self.config.trainer.max_steps
        for step in (0, max_steps - 1, max_steps):
            rate = config.multiplier(step, max_steps)
            if not isinstance(rate, int | float) or not math.isfinite(rate):
                raise self.refuse(
                    f"the multiplier of step {step} is {_show(rate)}, but has to be a finite number"
                )

    def bias_rule(self, config: BiasRuleConfig) -> None:
        self.require(config.update(torch.zeros(4), torch.ones(4), 1), Tensor, "update")

    def corpus(self, config: CorpusConfig) -> None:
        for document in config.documents():
            self.require(document, Document, "documents")
            return


_CHECKS: dict[type[TaggedConfig], Callable[[_Trial, Any], None]] = {
    FFNConfig: _Trial.ffn,
    RouterConfig: _Trial.router,
    CombineConfig: _Trial.combine,
    NormConfig: _Trial.norm,
    PositionsConfig: _Trial.positions,
    OptimizerConfig: _Trial.optimizer,
    ScheduleConfig: _Trial.schedule,
    BiasRuleConfig: _Trial.bias_rule,
    CorpusConfig: _Trial.corpus,
}
"""Family -> how a part of it is tried. Experts are tried with the block that holds them."""


def _move_off_zero(module: nn.Module) -> None:
    """A gate that begins at zero would hide what is behind it."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.add_(0.03)


def _show(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return show(value) if isinstance(value, int | float | str) else _a(type(value))


def _a(kind: type) -> str:
    name = "None" if kind is type(None) else kind.__name__
    return name if name == "None" else f"{'an' if name[0] in 'AEFIO' else 'a'} {name}"
