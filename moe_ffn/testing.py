"""Checks that custom blocks, routers and experts satisfy the interfaces of their base classes.

    from moe_ffn.testing import check_ffn

    def test_my_block():
        check_ffn("my_blocks.py:LowRankConfig", d_model=64)

Training runs the same checks on every custom part before the first step. A check runs a copy of the part on a
few random tokens, and changes neither the part nor torch's random state.

B sequences, S positions, T = B*S tokens, D model width, E experts
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from moe_ffn.config.errors import ConfigError, UseCase, show
from moe_ffn.experts import Experts, ExpertsConfig
from moe_ffn.experts.matrices import MatrixExperts
from moe_ffn.ffn import FFNBlock, FFNConfig
from moe_ffn.ffn.base import inner_blocks
from moe_ffn.ffn.dispatch import make_plan, unsorted_plan
from moe_ffn.ffn.mixture_of_depths import MixtureOfDepthsFFN
from moe_ffn.outputs import (
    FFNOutput,
    PairsOnlyRouting,
    Plan,
    Routing,
    TokenContext,
    VariableKRouting,
)
from moe_ffn.routing import Router, RouterConfig, routing_of_pairs

Kind = TypeVar("Kind")

_BATCH, _LENGTH = 2, 8
_MAX_LENGTH = 512
"""Sequence length of the causality check, because some parts look far ahead, or in chunks."""


def check_ffn(
    ffn: FFNBlock | FFNConfig | Mapping[str, Any] | str,
    d_model: int | None = None,
    *,
    causal: bool = True,
    seq_len: int = _MAX_LENGTH,
) -> None:
    """Check a feed-forward block: its output and routings, the gradient of its routers, and its causality.

    Args:
        ffn: a built block, or an argument of `build_ffn`; then its config is checked too, such as
            `num_params` and `unsupported`.
        d_model: D; required unless `ffn` is a block with this attribute.
        causal: True if the block is for a causal model, so that outputs must not depend on later tokens.
        seq_len: maximum length of the test sequences.

    Raises:
        ConfigError: a check failed; the message gives the actual and the expected behaviour.
    """
    if isinstance(ffn, FFNBlock):
        d_model = getattr(ffn, "d_model", None) if d_model is None else d_model
    if d_model is None:
        raise ConfigError(
            f"check_ffn needs d_model, the width of the tokens of {type(ffn).__name__}"
        )
    if isinstance(ffn, FFNBlock):
        config, block = getattr(ffn, "config", None), copy.deepcopy(ffn)
        device = next(ffn.parameters(), torch.empty(0)).device
        checks = PartChecks(type(ffn).__name__, d_model, seq_len, causal, device=device)
        with isolated_rng(device):
            checks.block(block.float(), config if isinstance(config, FFNConfig) else None)
    else:
        config = FFNConfig.checked(ffn)
        checks = PartChecks(f"'{config.type}'", d_model, seq_len, causal)
        with isolated_rng(checks.device):
            checks.ffn(config)


def check_router(
    router: RouterConfig | Mapping[str, Any] | str,
    d_model: int,
    num_experts: int,
    *,
    causal: bool = True,
    seq_len: int = _MAX_LENGTH,
) -> None:
    """Check a router: its routings, the gradient of each parameter, its causality, and its config.

    An exception in the router's own code is raised unchanged.

    Args:
        router: config of the router, or its options, or its `type`.
        d_model: D.
        num_experts: E.
        causal: True if the router is for a causal model, so that choices must not depend on later tokens.
        seq_len: maximum length of the test sequences.

    Raises:
        ConfigError: a check failed; the message gives the actual and the expected behaviour.
    """
    config = RouterConfig.checked(router)
    checks = PartChecks(f"'{config.type}'", d_model, seq_len, causal)
    with isolated_rng(checks.device):
        checks.router(config, num_experts)


def check_experts(
    experts: ExpertsConfig | Mapping[str, Any] | str,
    d_model: int,
    num_experts: int,
    *,
    experts_per_token: float = 2,
) -> None:
    """Check experts: their output for a plan, and the gradient of its weights.

    Args:
        experts: config of the experts, or its options, or its `type`.
        d_model: D, width of the tokens.
        num_experts: E.
        experts_per_token: experts per token, which may determine the width of the experts.

    Raises:
        ConfigError: a check failed; the message gives the actual and the expected behaviour.
    """
    config = ExpertsConfig.checked(experts)
    checks = PartChecks(f"'{config.type}'", d_model)
    with isolated_rng(checks.device):
        built = config.build(d_model, num_experts, experts_per_token)
        checks.experts(built, d_model, num_experts)


@contextmanager
def isolated_rng(device: torch.device) -> Iterator[None]:
    """Disable gradients, and restore torch's random state at the end."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        yield


@dataclass(frozen=True)
class PartChecks:
    """A part under test, and the properties of its model."""

    name: str
    """Name of the part, which begins every message."""

    d_model: int
    seq_len: int = _MAX_LENGTH
    causal: bool = True
    noncausal_advice: str = "pass causal=False"
    """Advice in messages for a model that is not causal."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def length(self) -> int:
        """S, at most the sequence length of the model."""
        return min(_LENGTH, self.seq_len)

    def random(self, *shape: int) -> Tensor:
        """Return the same normal numbers at each call."""
        generator = torch.Generator().manual_seed(0)
        return torch.randn(*shape, generator=generator).to(self.device)

    def x(self) -> Tensor:
        return self.random(_BATCH, self.length, self.d_model)

    def token_ids_BS(self) -> Tensor:
        """Return ids that alternate within a sequence, so that misplaced ids change the output."""
        ids_S = torch.arange(self.length, device=self.device) % 2
        return ids_S.expand(_BATCH, self.length)

    # -- requirements

    def error(self, message: str) -> ConfigError:
        return ConfigError(f"{self.name}: {message}")

    def require(self, value: Any, kind: type[Kind], function: str, hint: str = "") -> Kind:
        """Return `value`, the result of `function`, if it is of this kind; otherwise raise."""
        if isinstance(value, kind):
            return value
        raise self.error(
            f"{function} returned {describe_value(value)}, but must return {_a(kind)}{hint}"
        )

    def built(self, built: Any, kind: type[Kind]) -> Kind:
        """Return the result of `build`, on the device, if it is of this kind; otherwise raise."""
        module = self.require(built, kind, "build")
        return module.to(self.device) if isinstance(module, nn.Module) else module

    def require_like(self, value: Any, x: Tensor, name: str) -> Tensor:
        """Return `value` if it is a finite tensor with the shape and dtype of `x`; otherwise raise."""
        if not isinstance(value, Tensor) or (value.shape, value.dtype) != (x.shape, x.dtype):
            raise self.error(
                f"{name} is {describe_value(value)}, but must be like x, {describe_value(x)}"
            )
        if not value.isfinite().all():
            raise self.error(f"{name} contains NaN or infinity, although x is finite")
        return value

    def require_unchanged(self, x: Tensor, before: Tensor, name: str) -> None:
        """Raise if the argument `name` of `forward`, which was `before`, is now another `x`."""
        if not torch.equal(x, before):
            raise self.error(f"forward changes {name} in place, which belongs to the model")

    def require_arguments(self, module: nn.Module, *names: str, optional: bool = False) -> None:
        """Raise if `forward` cannot be called with these arguments."""
        try:
            inspect.signature(module.forward).bind(*names)
        except TypeError:
            arguments = ", ".join(["self", *names]) + ("=None" if optional else "")
            raise self.error(
                f"{type(module).__name__}.forward must take {' and '.join(names)}; write "
                f"def forward({arguments})"
            ) from None

    def require_gradient(
        self, output: Tensor, inputs: Sequence[Tensor], name: str, inputs_name: str, advice: str
    ) -> None:
        """Raise if `output`, named `name`, has no nonzero gradient with respect to any of the inputs."""
        grads: tuple[Tensor | None, ...] = (None,)
        if output.requires_grad:
            direction = self.random(*output.shape)
            grads = torch.autograd.grad(output, inputs, direction, allow_unused=True)
        minimum = 1e-6 * output.detach().abs().max()
        if not any(grad is not None and grad.abs().max() > minimum for grad in grads):
            raise self.error(f"{name} has no gradient with respect to {inputs_name}; {advice}")

    def require_routing(
        self, routing: Any, num_experts: int | None = None, *, is_inner: bool = False
    ) -> Routing:
        """Return `routing` if it is a Routing with correct shapes and ids; otherwise raise. A routing inside
        a mixture of depths has only some tokens of each sequence.
        """
        hint = "; `moe_ffn.routing_of_pairs` makes one"
        routing = self.require(routing, Routing, "forward", hint)
        length = routing.sequence_length if is_inner else self.length
        num_tokens, num_experts = _BATCH * length, num_experts or routing.num_experts
        N, TE = (len(routing.expert_ids_N),), (num_tokens, num_experts)
        shapes = {
            "token_indices_N": N,
            "weights_N": N,
            "dropped_N": N,
            "logits_TE": TE,
            "scores_TE": TE,
        }
        if isinstance(routing, PairsOnlyRouting):
            shapes["logits_N"] = N
        if isinstance(routing, VariableKRouting):
            shapes["selected_N"] = N
        for name, shape in shapes.items():
            value = getattr(routing, name)
            # Tables are None if there are too many experts for them.
            if value is not None and tuple(value.shape) != shape:
                raise self.error(
                    f"its routing has {name} of shape {tuple(value.shape)}, expected {shape}"
                )
        has_tables = routing.logits_TE is not None and routing.scores_TE is not None
        if not (has_tables or isinstance(routing, PairsOnlyRouting)):
            missing = f"PairsOnlyRouting.logits_N, expected of shape {N}"
            if routing.scores_TE is not None:
                missing = f"logits_TE, its scores before any normalisation, expected of shape {TE}"
            raise self.error(f"its routing has no {missing}")
        if routing.scores_TE is not None and (routing.scores_TE < 0).any():
            raise self.error(
                "its routing has scores_TE below 0, but they must be normalised logits_TE, such as their "
                "softmax; routing_of_pairs takes the logits first, then the scores"
            )
        for name in ("dropped_N", "selected_N"):
            value = getattr(routing, name, None)
            if value is not None and value.dtype != torch.bool:
                raise self.error(f"its routing has {name} of {value.dtype}, expected torch.bool")
        sizes = {
            "num_tokens": num_tokens,
            "num_experts": num_experts,
            "sequence_length": length,
        }
        for name, expected in sizes.items():
            if (value := getattr(routing, name)) != expected:
                raise self.error(
                    f"its routing has {name} {describe_value(value)}, expected {expected}"
                )
        for name, end in {"token_indices_N": num_tokens, "expert_ids_N": num_experts}.items():
            ids = getattr(routing, name)
            if ids.dtype != torch.int64 or (ids < 0).any() or (ids >= end).any():
                raise self.error(f"its routing has {name} that are not int64 from 0 to {end - 1}")
        if (routing.token_indices_N.diff() < 0).any():
            raise self.error(
                "its routing has token_indices_N that decrease, but the pairs of a token must follow those "
                "of earlier tokens; sort the pairs by token"
            )
        numbers = {
            "weights_N": routing.weights_N[routing.active_N],
            "scores_TE": routing.scores_TE,
        }
        for name, value in numbers.items():
            if value is not None and not value.isfinite().all():
                raise self.error(
                    f"its routing has {name} that are NaN or infinite, although x is finite"
                )
        if isinstance(routing, PairsOnlyRouting):
            k, ids = routing.pairs_per_token, routing.token_indices_N.tolist()
            if type(k) is not int or ids != [
                token for token in range(num_tokens) for _ in range(k)
            ]:
                raise self.error(
                    f"its routing has pairs_per_token {describe_value(k)}, but token_indices_N does not list "
                    "every token this many times, in order"
                )
        return routing

    def require_causal(self, config: FFNConfig | RouterConfig) -> None:
        """Raise if the model is causal but, according to its config, the part is not."""
        if self.causal and (unsupported := config.unsupported(UseCase(causal=True))):
            raise self.error(
                f"{unsupported.reason}, so a causal model could see the tokens it must predict; "
                f"{unsupported.advice}, or {self.noncausal_advice}"
            )

    def require_causal_outputs(
        self, module: nn.Module, call: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        """Raise if the model is causal and outputs (B, S, ...) of `call`, given x (B, S, D) and token ids (B,
        S), change with later tokens: with the second half, then with the last token.
        """
        length = min(self.seq_len, _MAX_LENGTH)
        if not self.causal or length == 1:
            return
        move_off_zero(module)
        turn_off_dropout_of_experts(module)
        x = self.random(_BATCH, length, self.d_model)
        ids = torch.zeros(_BATCH, length, dtype=torch.int64, device=self.device)
        for training in (False, True):
            module.train(training)

            def seeded(x: Tensor, ids: Tensor, seed: int = 0) -> Tensor:
                torch.manual_seed(seed)  # the same dropout and noise for every token
                return call(x, ids)

            outputs = seeded(x, ids)
            if not torch.equal(outputs, seeded(x, ids)):
                continue  # the part has a state, so outputs are not comparable
            skips = any(isinstance(part, MixtureOfDepthsFFN) for part in module.modules())
            if training and skips and not torch.equal(outputs, seeded(x, ids, seed=1)):
                continue  # with another number of chosen tokens, each gets other noise
            for first in (length // 2, length - 1):
                changed_x, changed_ids = x.clone(), ids.clone()
                changed_x[:, first:] = 10 - 10 * x[:, first:]
                changed_ids[:, first:] = 1
                before = outputs[:, :first]
                difference = (seeded(changed_x, changed_ids)[:, :first] - before).abs()
                if difference.max() <= 1e-3 * before.abs().max() + 1e-6:
                    continue
                position = int(difference.flatten(2).amax(dim=(0, 2)).argmax())
                raise self.error(
                    f"its output at position {position} changes when tokens from position {first} on do"
                    f"{' (in training)' if training else ''}, so a causal model could see the "
                    f"tokens it must predict; use only earlier tokens, or {self.noncausal_advice}"
                )

    def require_same_alone(
        self,
        module: nn.Module,
        call: Callable[[Tensor, Tensor], Tensor],
        alone: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """Raise if a part for cached decoding computes a token differently on its own. `call` maps x (B, S,
        D) and token ids (B, S) to outputs (B, S, ...), `alone` one token, after calls with the earlier ones.
        """
        x, ids = self.x(), self.token_ids_BS()
        module.eval()
        outputs = call(x, ids)
        if self.length == 1 or not torch.equal(outputs, call(x, ids)):  # or the part adds noise
            return
        tokens = zip(x[:1].split(1, 1), ids[:1].split(1, 1), strict=True)
        outputs_alone = torch.cat([alone(*token) for token in tokens], 1)
        difference_S = (outputs_alone - outputs[:1]).abs().flatten(2).amax(dim=(0, 2))
        if difference_S.max() > 1e-3 * outputs.abs().max() + 1e-6:
            raise self.error(
                "its config supports UseCase(cached=True), but the output of the token at position "
                f"{int(difference_S.argmax())} changes if it is computed alone, so generated text would be "
                "wrong; return a reason from unsupported(use_case), or remove is_tokenwise"
            )

    # -- checks of each kind of part

    def ffn(self, config: FFNConfig, where: str = "") -> None:
        """Check the block of a config, and the config; `where` names its layer in messages."""
        if (stack := config.expert_stack) is not None:
            self.experts(stack.build(self.d_model), self.d_model, stack.num_experts)
        block = self.built(config.build(self.d_model), FFNBlock)
        num_built = sum(parameter.numel() for parameter in block.parameters())
        self.block(block, config)
        if num_built != (counted := config.num_params(self.d_model)):
            raise miscounted(self.name + where, counted, num_built, config, self.d_model)
        config.num_active_params(self.d_model)
        config.flops_per_token(self.d_model, self.seq_len)
        config.describe()

    def block(self, block: FFNBlock, config: FFNConfig | None) -> None:
        """Check a built block, whose parameters it changes; `config` is None if unknown."""
        self.require_arguments(block, "x", "context", optional=True)
        x, context = self.x(), TokenContext(token_ids=self.token_ids_BS())
        for training in (False, True):
            output = block.train(training)(x, context)
            output = self.require(output, FFNOutput, "forward", ", as in FFNOutput(hidden)")
            self.require_unchanged(x, self.x(), "x")
            self.require_like(output.hidden, x, "hidden")
            if not isinstance(output.routings, dict):
                raise self.error(
                    f"routings is {describe_value(output.routings)}, but must be a dict, as in "
                    "FFNOutput(hidden, {'routing': routing})"
                )
            for name, routing in output.routings.items():
                self.require_routing(routing, is_inner=name.startswith("inner"))

        def hidden(x: Tensor, ids: Tensor) -> Tensor:
            return block(x, TokenContext(token_ids=ids)).hidden

        history = _History()

        def hidden_after(x: Tensor, ids: Tensor) -> Tensor:
            history.calls.clear()
            return block(x, TokenContext(token_ids=ids, history=history)).hidden

        if config is not None:
            self.require_causal(config)
        self.require_causal_outputs(block, hidden)
        cached = UseCase(cached=True)
        if config is not None and config.unsupported(cached) is None:
            alone = config.unsupported(replace(cached, history=False)) is None
            self.require_same_alone(block, hidden, hidden if alone else hidden_after)
        move_off_zero(block)
        infos = {} if config is None else config.router_infos()
        for name, router in block.train().routers().items():
            if name not in infos or infos[name].router.learns:
                self.require_router_to_learn(router, lambda: block(x, context).hidden, "hidden")

    def router(self, config: RouterConfig, num_experts: int) -> None:
        try:
            config.check_num_experts(num_experts)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        router = self.built(config.build(self.d_model, num_experts), Router)
        self.require_arguments(router, "x_TD", "context")

        def route(x: Tensor, ids: Tensor) -> Routing:
            context = TokenContext(token_ids=ids.flatten(), sequence_length=ids.shape[1])
            return router(x.flatten(0, 1), context)

        def weights(x: Tensor, ids: Tensor) -> Tensor:
            before = x.clone()
            routing = route(x, ids)
            self.require_unchanged(x, before, "x_TD")
            if x.shape[1] == self.length:
                self.require_routing(routing, num_experts)
            is_pairs_only = isinstance(routing, PairsOnlyRouting)
            if is_pairs_only != config.is_pairs_only:
                raise self.error(
                    f"its routing has {'no' if is_pairs_only else 'a'} table scores_TE, but its config says "
                    f"is_pairs_only {not is_pairs_only}; set is_pairs_only: ClassVar[bool] = {is_pairs_only}"
                )
            weights_N = routing.weights_N.masked_fill(~routing.active_N, 0)
            weights_TE = weights_N.new_zeros(routing.num_tokens, routing.num_experts)
            weights_TE.index_put_((routing.token_indices_N, routing.expert_ids_N), weights_N, True)
            return weights_TE.unflatten(0, ids.shape)

        for training in (False, True):
            router.train(training)
            weights(self.x(), self.token_ids_BS())
        self.require_mask(router)
        self.require_causal(config)
        self.require_causal_outputs(router, weights)
        if config.unsupported(UseCase(cached=True)) is None:
            self.require_same_alone(router, weights, weights)
        move_off_zero(router)
        router.train()
        if config.learns:
            self.require_router_to_learn(
                router, lambda: route(self.x(), self.token_ids_BS()).weights_N, "weights_N"
            )
            with torch.enable_grad():
                routing = route(self.x(), self.token_ids_BS())
            self.require_all_gradients(router, routing)
        num_built = sum(parameter.numel() for parameter in router.parameters())
        if num_built != (counted := config.num_params(self.d_model, num_experts)):
            raise miscounted(self.name, counted, num_built, None, self.d_model)

    def require_mask(self, router: nn.Module) -> None:
        """Raise if the routing of a router loses the padding mask."""
        ids_T = self.token_ids_BS().flatten()
        mask_T = ids_T == 0
        context = TokenContext(mask=mask_T, token_ids=ids_T, sequence_length=self.length)
        routing = router(self.x().flatten(0, 1), context)
        if routing.mask_T is None or not torch.equal(routing.mask_T, mask_T):
            raise self.error(
                "its routing has another mask_T than context.mask, so padding would reach experts and "
                "losses; pass context to routing_of_pairs"
            )

    def require_router_to_learn(
        self, router: nn.Module, call: Callable[[], Tensor], name: str
    ) -> None:
        """Raise if a router has parameters but `call`, whose output is `name`, has no gradient for them."""
        parameters = [p for p in router.parameters() if p.requires_grad]
        if not parameters:
            return
        own: Any = router
        if getattr(getattr(own, "config", None), "draws_k", False):
            # A draw of 1 with `renormalize` would make every weight a constant 1.
            own.config = own.config.with_k(own.config.k_max)
        with torch.enable_grad():
            output = call()
        self.require_gradient(
            output,
            parameters,
            name,
            "the parameters of its router",
            "weights_N must be computed from them without detach() or no_grad(), and not be a constant; for "
            "a fixed router set learns: ClassVar[bool] = False in its config",
        )

    def require_all_gradients(self, router: nn.Module, routing: Routing) -> None:
        """Raise if no tensor of a routing has a gradient with respect to one of the router's parameters."""
        tensors = [v for v in vars(routing).values() if isinstance(v, Tensor) and v.requires_grad]
        parameters = {name: p for name, p in router.named_parameters() if p.requires_grad}
        if not parameters:
            return
        directions = [torch.ones_like(tensor) for tensor in tensors]
        grads = torch.autograd.grad(
            tensors, list(parameters.values()), directions, allow_unused=True
        )
        for name, grad in zip(parameters, grads, strict=True):
            if grad is None:
                raise self.error(
                    f"its parameter {name} gets no gradient; compute the tensors of its routing from it, "
                    "without detach() or no_grad(), or set its requires_grad to False"
                )

    def experts(self, experts: Any, width: int, num_experts: int) -> None:
        """Check built experts; `width` is the width of their input and output."""
        experts = self.built(experts, Experts).eval()
        self.require_arguments(experts, "x_TD", "plan")
        x_TD = self.random(_BATCH * self.length, width)
        ids_T1 = (torch.arange(len(x_TD), device=self.device) % num_experts)[:, None]
        ones_TE = torch.ones(len(x_TD), num_experts, device=self.device)
        pairs = routing_of_pairs(ones_TE[:, :1], ids_T1, ones_TE, ones_TE, TokenContext())
        plan_function = unsorted_plan if experts.are_embeddings else make_plan
        plan = plan_function(pairs, num_experts)
        move_off_zero(experts)
        name = "the output of its experts"
        with torch.enable_grad():
            weights_N = plan.weights_N.clone().requires_grad_()
            y_TD = experts.run(x_TD, replace(plan, weights_N=weights_N))
        y_TD = self.require_like(y_TD, x_TD, name)
        self.require_unchanged(x_TD, self.random(*x_TD.shape), "x_TD")
        self.require_gradient(
            y_TD,
            [weights_N],
            name,
            "plan.weights_N, through which the router learns",
            "multiply each pair's result by its weight",
        )
        dropped = replace(pairs, dropped_N=torch.ones_like(pairs.dropped_N))
        y_TD = experts.run(x_TD, plan_function(dropped, num_experts))
        self.require_like(y_TD, x_TD, f"{name} for a plan that drops every pair")
        self.require_sum_over_pairs(experts, x_TD, pairs, plan_function)

    def require_sum_over_pairs(
        self,
        experts: Experts,
        x_TD: Tensor,
        pairs: Routing,
        plan_function: Callable[[Routing, int], Plan],
    ) -> None:
        """Raise if the output for two pairs of each token, those of `pairs` and those with the next expert,
        is not the sum of the outputs for one.
        """
        num_experts = pairs.num_experts
        next_pairs = replace(pairs, expert_ids_N=(pairs.expert_ids_N + 1) % num_experts)
        ids_TK = torch.stack([pairs.expert_ids_N, next_pairs.expert_ids_N], dim=-1)
        weights_TK = pairs.weights_N[:, None].expand_as(ids_TK)
        both = routing_of_pairs(
            weights_TK, ids_TK, pairs.logits_TE, pairs.scores_TE, TokenContext()
        )
        x_TD = experts.before_dispatch(x_TD)
        first_TD, next_TD, both_TD = (
            experts(x_TD, plan_function(routing, num_experts))
            for routing in (pairs, next_pairs, both)
        )
        self.require_like(both_TD, x_TD, "the output of its experts for two pairs of a token")
        difference = (both_TD - first_TD - next_TD).abs().max()
        if difference > 3e-2 * both_TD.abs().max() + 1e-6:  # experts may compute in bfloat16
            raise self.error(
                "the output of its experts for two pairs of a token is not the sum of those for one pair; "
                "return the sum over all pairs of the plan, as index_add does"
            )


@dataclass(frozen=True)
class _History:
    """A `TokenHistory` for one sequence, computed one token at a time."""

    calls: list[nn.Module] = field(default_factory=list)
    """The owner of each call in this pass."""
    last: dict[tuple[nn.Module, int], Tensor] = field(default_factory=dict)
    """(owner, number of its earlier calls in a pass) -> values of the previous tokens."""

    def window(self, owner: nn.Module, new: Tensor, reach: int) -> Tensor:
        call = (owner, self.calls.count(owner))
        self.calls.append(owner)
        last = self.last.get(call, new.new_zeros(len(new), reach, *new.shape[2:]))
        window = torch.cat([last, new], dim=1)
        self.last[call] = window[:, new.shape[1] :]
        return window


def miscounted(
    name: str, counted: int, num_built: int, ffn: FFNConfig | None, d_model: int
) -> ConfigError:
    """Return the error for a part with `num_built` parameters, not `counted` as `num_params` returns. It
    names the miscounted experts of `ffn`, the config of a feed-forward block.
    """
    cause = "" if ffn is None else _miscounted_experts(ffn, d_model)
    return ConfigError(
        f"{name}: num_params returns {counted:,}, but the module has {num_built:,} parameters{cause}; "
        "correct num_params, which the model table, facts.json and matched widths rely on"
    )


def _miscounted_experts(ffn: FFNConfig, d_model: int) -> str:
    """Return a clause on the miscounted experts of a block; empty if there are none."""
    for inner in inner_blocks(ffn).values():
        if cause := _miscounted_experts(inner, d_model):
            return cause
    if (stack := ffn.expert_stack) is None:
        return ""
    counted = stack.num_params(d_model)
    num_built = sum(parameter.numel() for parameter in stack.build(d_model).parameters())
    if num_built == counted:
        return ""
    return (
        f", because params_per_expert and shared_params of its experts ('{stack.config.type}') give "
        f"{counted:,}, but they have {num_built:,}"
    )


def move_off_zero(module: nn.Module) -> None:
    """Add a small number to every parameter, because a zero gate would hide the layers behind it."""
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.add_(0.03)


def turn_off_dropout_of_experts(module: nn.Module) -> None:
    """Turn off dropout of pairs: they are sorted by expert, so a later token changes the random numbers of
    earlier ones.
    """
    for experts in (part for part in module.modules() if isinstance(part, Experts)):
        for part in experts.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
            elif isinstance(part, MatrixExperts):
                part.config = part.config.model_copy(update={"dropout": 0.0})


def describe_value(value: Any) -> str:
    """Describe a value for a message: `a tensor of shape (2, 8) and torch.float32`, `a Linear`."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return show(value) if isinstance(value, int | float | str) else _a(type(value))


def _a(kind: type) -> str:
    if kind is type(None):
        return "None"
    return f"{'an' if kind.__name__[0] in 'AEFIO' else 'a'} {kind.__name__}"
