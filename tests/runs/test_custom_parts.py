"""Custom parts are tried once before training; a broken contract is reported in one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ffn.config.errors import ConfigError
from moe_ffn.config.yaml_files import validate
from moe_ffn.runs import custom_parts
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.custom_parts import check_custom_parts, check_num_params
from tests.helpers.cases import python_with

Check = Callable[..., None]

BLOCKS = """
import sys
import torch
from torch import nn
from moe_ffn import FFNBlock, FFNConfig, FFNOutput, RouterConfig, Routing
from moe_ffn.config.errors import Unsupported

class Good(FFNConfig, frozen=True):
    rank: int = 3
    def build(self, d_model): return globals()[type(self).__name__ + "FFN"](d_model, self.rank)
    def num_params(self, d_model): return 2 * d_model * self.rank
    def flops_per_token(self, d_model, seq_len): return 4 * d_model * self.rank

class GoodFFN(FFNBlock):
    def __init__(self, d_model, rank):
        super().__init__()
        self.down = nn.Linear(d_model, rank, bias=False)
        self.up = nn.Linear(rank, d_model, bias=False)
    def y(self, x): return self.up(self.down(x))
    def forward(self, x, context=None): return FFNOutput(self.mixed(x))
    def mixed(self, x): return self.y(x)

class Bare(Good, frozen=True): pass
class BareFFN(GoodFFN):
    def forward(self, x, context=None): return self.y(x)

class NoContext(Good, frozen=True): pass
class NoContextFFN(GoodFFN):
    def forward(self, x): return FFNOutput(self.y(x))

class Wide(Good, frozen=True): pass
class WideFFN(GoodFFN):
    def mixed(self, x): return torch.cat([x, x], -1)

class Chunks(Good, frozen=True): pass
class ChunksFFN(GoodFFN):
    def mixed(self, x):
        size = min(16, x.shape[1])
        return self.y(x.unflatten(1, (-1, size)).mean(2).repeat_interleave(size, 1))

class NaN(Good, frozen=True): pass
class NaNFFN(GoodFFN):
    def mixed(self, x): return x.log()

class Mixer(Good, frozen=True): pass
class MixerFFN(GoodFFN):
    def mixed(self, x): return x.mean(1, keepdim=True).expand_as(x)

class Batch(Good, frozen=True): pass
class BatchFFN(GoodFFN):  # sees the other sequences' later tokens
    def mixed(self, x): return self.y(x) + x[:, -1:].flip(0)

class Closed(Good, frozen=True):
    def num_params(self, d_model): return super().num_params(d_model) + 1
class ClosedFFN(GoodFFN):
    def __init__(self, d_model, rank):
        super().__init__(d_model, rank)
        self.gate = nn.Parameter(torch.zeros(1))
    def mixed(self, x): return self.y(x) + self.gate * x.mean(1, keepdim=True)

class Past(Good, frozen=True):
    def unsupported(self, use_case): return None
class PastFFN(GoodFFN):  # a moving mean: causal, and not by token
    def mixed(self, x): return self.y(x.cumsum(1))

class Alone(Good, frozen=True):
    def unsupported(self, use_case): return None
class AloneFFN(GoodFFN): pass

class Last(Good, frozen=True):
    def unsupported(self, use_case):
        needs_more = use_case.cached and not use_case.history
        return Unsupported("it reads earlier tokens", "keep them") if needs_more else None
class LastFFN(GoodFFN):
    def forward(self, x, context=None):
        history = context and context.history
        before = history.window(self, x, 1) if history else nn.functional.pad(x, (0, 0, 1, 0))
        return FFNOutput(self.y(x - before[:, :-1]))

class Forgets(Last, frozen=True): pass
class ForgetsFFN(PastFFN): pass

class KeepsZeros(Last, frozen=True): pass
class KeepsZerosFFN(GoodFFN):
    def forward(self, x, context):
        ids, history = context.token_ids, context.history
        before = nn.functional.pad(ids, (1, 0))[:, :-1]
        if history: before = history.window(self, 0 * ids, 1)[:, :-1]
        return FFNOutput(self.y(x) + before[..., None])

class Noisy(Good, frozen=True): pass
class NoisyFFN(GoodFFN):
    def mixed(self, x): return self.y(nn.functional.dropout(x, 0.5, self.training))

class Linear(Good, frozen=True): pass
def LinearFFN(d_model, rank): return nn.Linear(d_model, d_model)

class Raises(Good, frozen=True): pass
class RaisesFFN(GoodFFN):
    def mixed(self, x): return x @ x

class Exits(Good, frozen=True): pass
class ExitsFFN(GoodFFN):
    def mixed(self, x): sys.exit(0)

class NotRouting(Good, frozen=True): pass
class NotRoutingFFN(GoodFFN):
    def forward(self, x, context=None): return FFNOutput(x, {"routing": [1]})

class NotRoutings(Good, frozen=True): pass
class NotRoutingsFFN(GoodFFN):
    def forward(self, x, context=None): return FFNOutput(x, [1])

class Sizeless(Good, frozen=True):
    def num_params(self, d_model): return {}["size"]
class SizelessFFN(GoodFFN): pass

class Fine(Good, frozen=True):
    def model_post_init(self, context): 1 // 0
"""

PARTS = """
from dataclasses import replace
import torch
from torch import nn
from moe_ffn import Router, RouterConfig, routing_of_pairs
from moe_ffn.outputs import PairsOnlyRouting
from moe_ffn.experts.base import Experts
from moe_ffn.experts import ExpertsConfig
from moe_ffn.ffn.shared_expert import Combine
from moe_ffn.ffn.shared_expert import CombineConfig
from moe_ffn.model.norm import NormConfig
from moe_ffn.model.positions import PositionsConfig
from moe_ffn.model.positions import Positions
from moe_ffn.data.corpus import CorpusConfig
from moe_ffn.training.optimizer import OptimizerConfig
from moe_ffn.training.schedule import ScheduleConfig

class Learns(RouterConfig, frozen=True):
    how: str = "well"
    learns = True
    def build(self, d_model, num_experts): return LearnsRouter(self.how, d_model, num_experts)
    def experts_per_token(self, num_experts): return 2
    def num_params(self, d_model, num_experts): return d_model * num_experts
    def flops_per_token(self, d_model, num_experts): return 2 * d_model * num_experts

class Fixed(Learns, frozen=True):
    learns = False

class LearnsRouter(Router):
    def __init__(self, how, d_model, num_experts):
        super().__init__()
        self.how, self.projection = how, nn.Linear(d_model, num_experts, bias=False)
    def forward(self, x_TD, context):
        logits_TE = self.projection(x_TD)
        scores_TE = logits_TE.softmax(-1)
        weights_TK, ids_TK = scores_TE.topk(1 if self.how == "constant" else 2)
        if self.how == "detached": weights_TK = weights_TK.detach()
        if self.how == "constant": weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        if self.how == "swapped": logits_TE, scores_TE = scores_TE, logits_TE
        return routing_of_pairs(weights_TK, ids_TK, logits_TE, scores_TE, context)

class NoContext(Learns, frozen=True):
    def build(self, d_model, num_experts): return NoContextRouter()

class NoContextRouter(Router):
    def forward(self, x_TD): return None

class Routes(RouterConfig, frozen=True):
    how: str = "well"
    def build(self, d_model, num_experts): return RoutesRouter(self.how, num_experts)
    def experts_per_token(self, num_experts): return 1
    def num_params(self, d_model, num_experts): return 0
    def flops_per_token(self, d_model, num_experts): return 0

class Lists(Routes, frozen=True):
    is_pairs_only = True

class RoutesAlone(Routes, frozen=True):
    is_tokenwise = True

class RoutesRouter(Router):
    def __init__(self, how, num_experts):
        super().__init__()
        self.how, self.num_experts = how, num_experts
    def forward(self, x_TD, context):
        logits_TE = x_TD[:, : self.num_experts]
        if self.how == "bare": return logits_TE
        if self.how == "past":
            logits_TE = logits_TE.unflatten(0, (-1, context.sequence_length)).cumsum(1).flatten(0, 1)
        if self.how == "ahead": logits_TE = logits_TE.roll(-1, 0)
        if self.how == "few": logits_TE = logits_TE[:, :2]
        scores_TE = logits_TE.softmax(-1)
        weights_TK, ids_TK = scores_TE.topk(1)
        if self.how == "beyond": ids_TK = ids_TK + self.num_experts
        listed_TK = None
        if self.how == "no logits": logits_TE = None
        if self.how in ("list", "list twice"): listed_TK = logits_TE.gather(1, ids_TK)
        if self.how == "list of tokens": listed_TK = weights_TK[1:]
        more = {}
        if self.how.startswith("list"): logits_TE = scores_TE = None
        if listed_TK is not None:
            more = {"kind": PairsOnlyRouting, "logits_N": listed_TK.flatten(), "pairs_per_token": 1}
            if self.how == "list twice": more["pairs_per_token"] = 2
        return routing_of_pairs(weights_TK, ids_TK, logits_TE, scores_TE, context,
                                num_experts=self.num_experts, **more)

class Work(ExpertsConfig, frozen=True):
    how: str = "well"
    def build(self, d_model, num_experts, experts_per_token):
        return nn.Linear(3, 3) if self.how == "plain" else WorkExperts(self.how)
    def params_per_expert(self, d_model, experts_per_token): return 0
    def flops_per_pair(self, d_model, experts_per_token): return 0

class NoPlan(Work, frozen=True):
    def build(self, d_model, num_experts, experts_per_token): return NoPlanExperts()

class NoPlanExperts(Experts):
    def forward(self, x_TD): return x_TD

class WorkExperts(Experts):
    def __init__(self, how):
        super().__init__()
        self.how = how
    def forward(self, x_TD, plan):
        if self.how == "few": return x_TD[:3]
        ids_N = plan.token_indices_N[: plan.offsets_E[-1]]
        weights_N = 1 if self.how == "blind" else plan.weights_N[: len(ids_N), None]
        y_TD = torch.zeros_like(x_TD).index_add(0, ids_N, weights_N * x_TD[ids_N])
        return y_TD / len(ids_N) if self.how == "mean" else y_TD

class Join(CombineConfig, frozen=True):
    def build(self, d_model, experts_per_token): return JoinCombine()

class JoinCombine(Combine):
    def forward(self, routed, shared, x): return routed.roll(-1, 1), shared

class Shift(PositionsConfig, frozen=True):
    how: str = "well"
    def build(self, d_model, head_dim, max_seq_len): return ShiftPositions(self.how)

class ShiftPositions(Positions):
    def __init__(self, how):
        super().__init__()
        self.how = how
    def embed(self, x): return x.roll(-1, 1) if self.how == "ahead" else x
    def rotate(self, x_BHSd): return x_BHSd.flatten(2) if self.how == "flat" else x_BHSd

class Norm(NormConfig, frozen=True):
    how: str = "sequence"
    def build(self, d_model): return Sequence(self.how)
    def num_params(self, d_model): return 0

class Sequence(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how
    def forward(self, x): return x - x.mean(1, keepdim=True) if self.how == "sequence" else x[0]

class Moves(OptimizerConfig, frozen=True):
    learning_rate: float = 0.1
    how: str = "well"
    def build(self, model):
        if self.how == "by layer":
            groups = [{"params": layer.parameters()} for layer in model.layers]
            rest = [p for name, p in model.named_parameters() if "layers." not in name]
            return torch.optim.SGD([*groups, {"params": rest}], lr=self.learning_rate)
        kept = [p for p in model.parameters() if p.ndim > 1 or self.how != "matrices"]
        return torch.optim.SGD(kept, lr=self.learning_rate)

class Rate(ScheduleConfig, frozen=True):
    def after_warmup(self, step, warmup_steps, max_steps): return float("nan")

class Texts(CorpusConfig, frozen=True):
    def documents(self): yield "text"
"""


@pytest.fixture
def check(tmp_path: Path) -> Callable[..., None]:
    """`check("model.ffn", {"type": "Bare"})`: the check of a small model with this part."""

    def run(place: str, part: dict[str, Any], **more: Any) -> None:
        path = tmp_path / "own.py"
        path.write_text(BLOCKS if place == "model.ffn" else PARTS)
        options: dict[str, Any] = {"model": {"d_model": 16, "num_layers": 1, **more}}
        below = options
        *keys, last = place.split(".")
        for key in keys:
            below = below.setdefault(key, {})
        if keys and last in ("router", "experts", "combine"):
            below["type"] = "moe"
        if last == "combine":
            below["shared_expert"] = "swiglu"
        below[last] = {**part, "type": f"own.py:{part['type']}"}
        config = validate(TrainConfig, options)
        check_custom_parts(config, torch.device("cpu"))

    return run


AHEAD = "its output at position {p} changes when tokens from position 128 on do, so "
NOT_LEARNED = (
    "weights_N has no gradient with respect to the parameters of its router; weights_N must be computed "
    "from them without detach() or no_grad(), and not be a constant; for a fixed router set learns: "
    "ClassVar[bool] = False in its config"
)
NOT_CACHED = (
    "its config supports UseCase(cached=True), but the output of the token at position {p} changes if it "
    "is computed alone, so generated text would be wrong; return a reason from unsupported(use_case), "
    "or remove is_tokenwise"
)
BROKEN = {
    "Bare": (
        "forward returned a tensor of shape (2, 8, 16) and torch.float32, "
        "but must return an FFNOutput, as in FFNOutput(hidden)"
    ),
    "NoContext": (
        "NoContextFFN.forward must take x and context; write def forward(self, x, context=None)"
    ),
    "Wide": (
        "hidden is a tensor of shape (2, 8, 32) and torch.float32, "
        "but must be like x, a tensor of shape (2, 8, 16) and torch.float32"
    ),
    "NaN": "hidden contains NaN or infinity, although x is finite",
    "Mixer": AHEAD
    + "a causal model could see the tokens it must predict; use only earlier tokens, or set "
    "model.causal: false",
    "Chunks": "its output at position {p} changes when tokens from position 255 on do, so ",
    "Batch": AHEAD,
    "Closed": AHEAD,
    "Past": NOT_CACHED,
    "Forgets": NOT_CACHED,
    "KeepsZeros": NOT_CACHED,
    "Linear": "build returned a Linear, but must return an FFNBlock",
    "Raises": "failed: RuntimeError: {any} (own.py, line {p}, in mixed)",
    "Exits": "failed: SystemExit: 0 (own.py, line {p}, in mixed)",
    "NotRouting": (
        "forward returned a list, but must return a Routing; `moe_ffn.routing_of_pairs` makes one"
    ),
    "NotRoutings": (
        "routings is a list, but must be a dict, as in FFNOutput(hidden, {'routing': routing})"
    ),
    "Sizeless": "failed: KeyError: 'size' (own.py, line {p}, in num_params)",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_block_that_breaks_the_contract_is_rejected(check: Check, name: str) -> None:
    with pytest.raises(ConfigError) as rejected:
        check("model.ffn", {"type": name})
    expected = re.escape(f"model.ffn ('own.py:{name}')") + r":? " + as_pattern(BROKEN[name])
    assert re.match(expected, str(rejected.value)), str(rejected.value)
    assert "\n" not in str(rejected.value)


def as_pattern(text: str) -> str:
    return re.escape(text).replace(r"\{p\}", r"\d+").replace(r"\{any\}", ".*")


@pytest.mark.parametrize("name", ["Good", "Noisy", "Alone", "Last"])
def test_a_block_that_keeps_it_passes_without_a_word(
    check: Check, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    check("model.ffn", {"type": name})
    assert capsys.readouterr().err in ("", "importing 'own.py', which runs its code\n")


def test_mixing_is_fine_where_both_sides_are_seen_or_there_is_one_token(
    check: Check, tmp_path: Path
) -> None:
    check("model.ffn", {"type": "Mixer"}, causal=False)
    options = {
        "model": {"d_model": 16, "num_layers": 1, "ffn": "own.py:Mixer"},
        "data": {"seq_len": 1},
    }
    check_custom_parts(validate(TrainConfig, options), torch.device("cpu"))


PLACES = {
    ("model.ffn.router", "Routes", "bare"): (
        "forward returned a tensor of shape (16, 8) and torch.float32, but must return a "
        "Routing; `moe_ffn.routing_of_pairs` makes one"
    ),
    ("model.ffn.router", "Routes", "ahead"): (
        "its output at position 127 changes when tokens from position 128 on do, so "
    ),
    ("model.ffn.router", "Routes", "few"): (
        "its routing has logits_TE of shape (16, 2), expected (16, 8)"
    ),
    ("model.ffn.router", "Routes", "beyond"): (
        "its routing has expert_ids_N that are not int64 from 0 to 7"
    ),
    ("model.ffn.router", "Lists", "list twice"): (
        "its routing has pairs_per_token 2, but token_indices_N does not list every token this many "
        "times, in order"
    ),
    ("model.ffn.router", "Lists", "list without logits"): (
        "its routing has no PairsOnlyRouting.logits_N, expected of shape (16,)"
    ),
    ("model.ffn.router", "Routes", "no logits"): (
        "its routing has no logits_TE, its scores before any normalisation, expected of shape"
        " (16, 8)"
    ),
    ("model.ffn.router", "Lists", "list of tokens"): (
        "its routing has logits_N of shape (15,), expected (16,)"
    ),
    ("model.ffn.router", "Routes", "list"): (
        "its routing has no table scores_TE, but its config says is_pairs_only False; set "
        "is_pairs_only: ClassVar[bool] = True"
    ),
    ("model.ffn.router", "Lists", "table"): (
        "its routing has a table scores_TE, but its config says is_pairs_only True; set "
        "is_pairs_only: ClassVar[bool] = False"
    ),
    ("model.ffn.router", "Learns", "detached"): NOT_LEARNED,
    ("model.ffn.router", "Learns", "constant"): NOT_LEARNED,
    ("model.ffn.router", "Learns", "swapped"): (
        "its routing has scores_TE below 0, but they must be normalised logits_TE, such as their "
        "softmax; routing_of_pairs takes the logits first, then the scores"
    ),
    ("model.ffn.router", "NoContext", ""): (
        "NoContextRouter.forward must take x_TD and context; write def forward(self, x_TD, context)"
    ),
    ("model.ffn.experts", "NoPlan", ""): (
        "NoPlanExperts.forward must take x_TD and plan; write def forward(self, x_TD, plan)"
    ),
    ("model.ffn.experts", "Work", "few"): (
        "the output of its experts is a tensor of shape (3, 16) and torch.float32, but must "
        "be like x, a tensor of shape (16, 16)"
    ),
    ("model.ffn.experts", "Work", "blind"): (
        "the output of its experts has no gradient with respect to plan.weights_N, through which the router "
        "learns; multiply each pair's result by its weight"
    ),
    ("model.ffn.experts", "Work", "mean"): (
        "the output of its experts for a plan that drops every pair contains NaN or infinity, "
        "although x is finite"
    ),
    ("model.ffn.experts", "Work", "plain"): "build returned a Linear, but must return an Experts",
    ("model.ffn.router", "RoutesAlone", "past"): ("its config supports UseCase(cached=True), but "),
    ("model.ffn.combine", "Join", ""): AHEAD,
    ("model.norm", "Norm", "sequence"): AHEAD,
    ("model.norm", "Norm", "first"): (
        "what forward returns is a tensor of shape (8, 16) and torch.float32, but must be like x, "
        "a tensor of shape (2, 8, 16) and torch.float32"
    ),
    ("model.positions", "Shift", "ahead"): AHEAD,
    ("model.positions", "Shift", "flat"): "failed: {any}Error: ",
    (
        "optimizer.schedule",
        "Rate",
        "",
    ): "the multiplier of step 399 is nan, but has to be a finite number",
    ("data.corpus", "Texts", ""): "documents returned 'text', but must return a Document",
    ("optimizer", "Moves", "matrices"): (
        "its groups hold {p} parameters of a model with {p}; each has to be in exactly one group"
    ),
}
"""Place, type and `how` of a part -> what is wrong with it."""


@pytest.mark.parametrize(("place", "name", "how"), PLACES)
def test_other_parts_that_break_their_contract_are_rejected(
    check: Check, place: str, name: str, how: str
) -> None:
    with pytest.raises(ConfigError) as rejected:
        check(place, {"type": name} | ({"how": how} if how else {}))

    is_inside = place.endswith(("experts", "combine"))
    owner = f"model.ffn ('moe' with 'own.py:{name}')" if is_inside else f"{place} ('own.py:{name}')"
    expected = re.escape(owner) + ":? " + as_pattern(PLACES[place, name, how])
    assert re.match(expected, str(rejected.value)), str(rejected.value)


@pytest.mark.parametrize(
    ("place", "part"),
    [
        ("model.ffn.router", {"type": "Learns"}),
        ("model.ffn.router", {"type": "Fixed", "how": "detached"}),
        ("model.ffn.router", {"type": "Routes"}),
        ("model.ffn.router", {"type": "RoutesAlone"}),
        ("model.ffn.router", {"type": "Lists", "how": "list"}),
        ("model.positions", {"type": "Shift"}),
        ("model.ffn.experts", {"type": "Work"}),
        ("optimizer", {"type": "Moves"}),
        ("optimizer", {"type": "Moves", "how": "by layer"}),
    ],
)
def test_other_parts_that_keep_their_contract_pass(
    check: Check, place: str, part: dict[str, Any]
) -> None:
    check(place, part)


@pytest.mark.parametrize(
    ("file", "name", "place"),
    [
        ("docs/tutorials/custom_ffn.md", "LowRankConfig", "ffn"),
        ("docs/howto/custom_experts.md", "AdaptedConfig", "experts"),
        ("docs/howto/custom_router.md", "ThresholdConfig", "router"),
    ],
)
def test_the_parts_of_the_documents_keep_the_contract(
    tmp_path: Path, file: str, name: str, place: str
) -> None:
    (tmp_path / f"{name}.py").write_text(python_with(f"class {name}", file))
    ffn: Any = f"{name}.py:{name}"
    options = {"model": {"ffn": ffn if place == "ffn" else {"type": "moe", place: ffn}}}
    config = validate(TrainConfig, options)
    check_custom_parts(config, torch.device("cpu"))
    check_num_params(config.model.build(vocab_size=9, max_seq_len=8))


def test_parts_of_the_package_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_parts, "PartChecks", lambda *_: pytest.fail("was tried"))
    check_custom_parts(TrainConfig(), torch.device("cpu"))


def test_a_broken_block_is_rejected_before_anything_is_written(
    reject: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(BLOCKS)
    said = reject("--model.ffn.type", "own.py:Mixer")
    assert said.startswith("model.ffn ('own.py:Mixer'): its output at position ")
    said = reject("--model.ffn.type", "own.py:Fine")
    assert re.match(r"'own.py' failed: ZeroDivisionError: .* \(own.py, line \d+, in model", said)
