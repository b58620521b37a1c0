"""Parametrizations and options of parts: formulas, an oracle with factors in the forward pass, errors."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from torch import nn

from moe_ffn import load_pretrained, load_transformers, save_pretrained
from moe_ffn.cli import coordinates
from moe_ffn.config.option_tree import nest_options
from moe_ffn.config.yaml_files import validate
from moe_ffn.ffn import IdentityConfig
from moe_ffn.hf import export_transformers
from moe_ffn.model.decoder import Decoder
from moe_ffn.model.parametrization import Part, parts_of
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.identity import fixed_options
from moe_ffn.runs.planner import DEVICES, plan_layouts
from moe_ffn.studies.coordinates import Coordinates, measure_coordinates
from moe_ffn.training.optimizer import Muon
from moe_ffn.weights.initialiser import with_blocks
from tests.helpers.cases import answers, cases, rejects

MOE = {
    "type": "moe",
    "num_experts": 4,
    "router": {"type": "top_k", "k": 2, "renormalize": True},
    # Narrower than the model, and finer than those of the base.
    "experts": {"type": "swiglu", "bias": True, "d_ff": 40},
    "shared_expert": "dense",
}
BASE = {"d_model": 16, "num_layers": 2, "ffn.experts.d_ff": 12}
COMPLETEP = {"type": "completep", "base": BASE}
VOCAB, LENGTH = 32, 8
EPS = 1e-11
"""Above the rounding of gradients that are zero, such as those of experts that no token chooses, and far
below all others."""

both = pytest.mark.parametrize("optimizer", ["adamw", "muon"])


def config(**options: Any) -> TrainConfig:
    """A model of width 64 and 4 layers, 4 and 2 times the base; options by path, with __ for a dot."""
    given = {
        "data.seq_len": LENGTH,
        "model.d_model": 64,
        "model.num_layers": 4,
        "model.ffn": MOE,
        **{path.replace("__", "."): value for path, value in options.items()},
    }
    return validate(TrainConfig, nest_options(given.items()))


def build(config: TrainConfig) -> Decoder:
    torch.manual_seed(0)
    return config.model.build(VOCAB, LENGTH).double()


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 4) -> list[float]:
    ids = torch.randint(VOCAB, (4, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    found: list[float] = []
    for _ in range(num_steps):
        logits = model(ids[:, :-1]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


# -- completep


@both
def test_at_the_sizes_of_the_base_it_is_standard_to_the_bit(optimizer: str) -> None:
    found: list[list[float]] = []
    for rule in ("standard", COMPLETEP):
        own = config(
            **{f"model.{option}": size for option, size in BASE.items()},
            model__parametrization=rule,
            optimizer__type=optimizer,
        )
        model = build(own)
        found.append(losses(model, own.optimizer.build(model)))
    assert found[0] == found[1]


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied and scaled": {"model.scale_embeddings": True},
    "untied": {"model.tie_embeddings": False, "model.scale_embeddings": True},
    "layer norm": {"model.norm": "layer_norm", "model.attention.bias": True},
    "normed queries": {"model.attention.norm_qk": "head"},
    "latent": {"model.attention.latent": {"kv_rank": 8, "rotated_dim": 4, "query_rank": 8}},
}


def explicit(own: TrainConfig, features: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same model with all factors in the forward pass, and with an optimizer for them.

    Width grows by 4, depth by 2, a head by 4 (plus its 4 rotated units, if latent).
    """
    model = build(config(**features))
    small = {f"model.{option}": size for option, size in BASE.items()} | {"model.num_layers": 4}
    base = dict(build(config(**small, **features)).named_parameters())
    is_muon, rate, decay = own.optimizer.type == "muon", 0.0625, 0.125
    groups: list[dict[str, Any]] = []
    for name, parameter in model.named_parameters():
        fused = 2 if "gate_up" in name else 1
        is_matrix = parameter.ndim > 1 and not name.endswith("bias") and "embedding" not in name
        group: dict[str, Any] = {"params": [parameter], "lr": rate, "weight_decay": 0.0}
        if is_matrix:
            (out, into), (out_0, into_0) = (
                (p.shape[-2] / fused, p.shape[-1]) for p in (parameter, base[name])
            )
            parameter.data *= min(1, out / into) ** 0.5 / min(1, out_0 / into_0) ** 0.5
            if is_muon:
                group["lr"] *= (out / into / max(out, into)) ** 0.5
                group["lr"] /= (out_0 / into_0 / max(out_0, into_0)) ** 0.5
                group |= {"num_fused": fused, "momentum": 0.95, "nesterov": True, "ns_steps": 5}
                group["adjust_lr_fn"] = "match_rms_adamw"
            else:
                group["lr"] /= into / into_0
            group["weight_decay"] = decay * rate / group["lr"]
        elif name == "unembedding.weight":
            group["weight_decay"] = decay
        groups.append(group)
    kind = Muon if is_muon else torch.optim.AdamW
    optimizer = kind(groups, lr=rate, betas=(0.9, 0.95), eps=EPS)

    def times(module: Any, factor: float) -> None:
        def scaled(_module: Any, _inputs: Any, output: Any) -> Any:
            if isinstance(output, torch.Tensor):
                return output * factor
            return replace(output, hidden=output.hidden * factor)

        module.register_forward_hook(scaled)

    if model.config.scale_embeddings:
        model.embedding_scale /= 2
    times(model.unembedding, 1 / 4)
    for layer in model.layers:
        times(layer.attention, 1 / 2)
        times(layer.ffn, 1 / 2)
        # Scores are divided by the width of a head, in the base by its square root.
        wide, narrow = (20, 8) if model.config.attention.latent else (16, 4)
        attention: Any = layer.attention
        normed = getattr(attention, "query_norm", None)
        times(normed or attention.query, math.sqrt(narrow / wide))
    return model, optimizer


QUICK = {f"{name} with adamw" for name in FEATURES} | {"tied and scaled with muon"}


@pytest.mark.parametrize(
    ("optimizer", "features"),
    cases(
        {
            f"{name} with {optimizer}": (optimizer, features)
            for name, features in FEATURES.items()
            for optimizer in ("adamw", "muon")
        },
        quick=QUICK,
    ),
)
def test_training_equals_factors_in_the_forward_pass(
    optimizer: str, features: dict[str, Any]
) -> None:
    options = {"type": optimizer, "learning_rate": 0.0625, "weight_decay": 0.125}
    options |= {"adamw_eps": EPS} if optimizer == "muon" else {"eps": EPS}
    own = config(**features, optimizer=options, model__parametrization=COMPLETEP)
    folded = build(own)
    found = losses(folded, own.optimizer.build(folded))
    # Muon rounds to bfloat16, where only factors that are powers of two leave the rest as it is.
    tolerance = 1e-6 if optimizer == "adamw" else 2e-3
    assert found == pytest.approx(losses(*explicit(own, features)), rel=tolerance)
    assert found[-1] < found[0] - 0.05


def mup_width(parameter: Any) -> float:
    return parameter.infshape.width_mult()


@pytest.mark.slow
def test_rates_and_initial_routers_are_those_of_mup() -> None:
    """Only the width grows, with the number of heads. `make clients` installs mup.

    Its readouts, the router and the output matrix, have a factor 1 / width in the forward pass.
    """
    mup = pytest.importorskip("mup")
    base = {**BASE, "attention.num_heads": 4}
    sizes = {"model.attention": {"num_heads": 16, "head_dim": 4}, "model.num_layers": 2}
    own = config(
        **sizes,
        optimizer={"type": "adamw", "learning_rate": 0.5},
        model__parametrization={"type": "completep", "base": base},
    )
    model, standard = build(own), build(config(**sizes))
    small = {f"model.{option}": size for option, size in base.items()}
    mup.set_base_shapes(standard, build(config(**{**sizes, **small})), do_assert=False)
    theirs = mup.MuAdamW(standard.parameters(), lr=0.5, weight_decay=0.1)
    wanted = {id(p): group for group in theirs.param_groups for p in group["params"]}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {
        names[id(p)]: group
        for group in own.optimizer.build(model).param_groups
        for p in group["params"]
    }
    for name, parameter in standard.named_parameters():
        width = mup_width(parameter)
        is_readout = name.endswith("router.projection.weight") or name == "final_norm.weight"
        rate = wanted[id(parameter)]["lr"] / (width if is_readout else 1)
        assert found[name]["lr"] == pytest.approx(rate), name
        if found[name]["weight_decay"]:  # theirs decays norms and embeddings too
            decay = wanted[id(parameter)]["weight_decay"] * (width if is_readout else 1)
            assert found[name]["weight_decay"] == pytest.approx(decay), name
    router = "layers.0.ffn.router.projection.weight"
    of_readout = standard.get_parameter(router) * 4**0.5 / 4
    torch.testing.assert_close(model.get_parameter(router), of_readout)


def measured(rule: Any, optimizer: str) -> Coordinates:
    own = config(
        data__batch_size=4,
        data__seq_len=64,
        data__tokenizer={"type": "bpe", "vocab_size": 512},
        data__corpus={"type": "text", "paths": ["LICENSE"]},  # a text that never changes
        model__d_model=32,
        model__num_layers=2,
        model__scale_embeddings=True,
        model__ffn={**MOE, "shared_expert": None, "experts": "swiglu"},
        model__parametrization=rule,
        optimizer__type=optimizer,
    )
    return measure_coordinates(own, "model.d_model", [32, 64, 128], num_steps=5)


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_changes_of_activations_keep_their_sizes_over_widths(optimizer: str) -> None:
    rule = {"type": "completep", "base": {"d_model": 32}}
    standard, own = measured("standard", optimizer), measured(rule, optimizer)
    slopes = {row: own.slope(values) for row, values in own.updates.items()}
    # At first a router's logits change with its input, through initial weights that are smaller in a wider
    # model; its own updates take over later.
    assert slopes.pop("router logits") == pytest.approx(-0.5, abs=0.3)
    assert all(abs(slope) < 0.25 for slope in slopes.values()), slopes
    assert standard.slope(standard.updates["logits"]) > 0.5


def test_slopes_are_exponents() -> None:
    sizes = (2.0, 4.0, 8.0)
    rows = {"up": (3.0, 6.0, 12.0), "none": (1.0, 0.0, 1.0)}
    found = Coordinates("model.d_model", sizes, rows, rows)
    assert found.slope(rows["up"]) == pytest.approx(1.0)
    assert math.isnan(found.slope(rows["none"]))


SMALL = [
    *("--data.seq_len=16", "--data.batch_size=2", "--data.corpus.type=text"),
    *("--data.corpus.paths=[README.md]", "--model.d_model=8", "--model.num_layers=1"),
]


def test_the_program_prints_slopes_and_draws_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    typed = ["--option", "model.num_layers", "--sizes", "1", "2", "--steps", "1"]
    assert coordinates.main([*SMALL, *typed, "--html", str(page)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"residual stream, change +\d\S* +\d\S* +[+-]\d\.\d\d\n", printed)
    assert "Change as a power of model.num_layers: residual stream " in printed
    assert "Change of the activations in the first steps" in page.read_text(encoding="utf-8")


MISTAKES = """
--sizes 8
    --sizes (8): a slope needs two different sizes; give another
--option model.num_layers
    --option (model.num_layers): give its values with --sizes, such as --sizes 2 4 8
--option model.widht --sizes 1 2
    model.widht: unknown
--option seed --sizes 1 2
    --option (seed): must be a size of the model; give one, such as model.num_layers
--sizes 8 16 --init_from runs/mine
    init_from (runs/mine): each size begins with weights of its own; leave it out
--sizes 8 9
    model: attention.num_heads (4) must divide d_model (9), or set attention.head_dim
"""


@pytest.mark.parametrize(("typed", "message"), answers(MISTAKES))
def test_a_wrong_size_is_rejected(typed: str, message: str) -> None:
    rejects(lambda: coordinates.main([*SMALL, *typed.split()]), message)


HEADS: list[tuple[dict[str, Any], dict[str, Any], float]] = [
    ({"num_heads": 16}, {"attention.num_heads": 4}, 1.0),
    ({"head_dim": 8}, {"attention.head_dim": 2}, 0.5),
    ({"head_dim": 8}, {}, 1.0),
    ({}, {}, 0.5),
]


@pytest.mark.parametrize(("attention", "base", "factor"), HEADS)
def test_scores_follow_the_width_of_a_head(
    attention: dict[str, Any], base: dict[str, Any], factor: float
) -> None:
    rule = {"type": "completep", "base": {**BASE, **base}}
    model = build(config(model__attention=attention, model__parametrization=rule))
    assert model.scales["layers.0.attention.query.weight"].multiplier == factor


@both
@pytest.mark.parametrize(
    ("router_type", "name"),
    [("top_k", "projection"), ("noisy_top_k", "noise"), ("neuron_top_k", "gate")],
)
def test_a_row_of_the_router_does_not_depend_on_the_number_of_experts(
    optimizer: str, router_type: str, name: str
) -> None:
    found: list[tuple[float, float]] = []
    for num_experts in (4, 8, 128):
        own = config(
            model__parametrization=COMPLETEP,
            model__ffn={**MOE, "num_experts": num_experts, "router": router_type},
            optimizer={"type": optimizer, "learning_rate": 1.0},
        )
        model = build(own)
        router = model.get_parameter(f"layers.0.ffn.router.{name}.weight")
        (rate,) = (
            group["lr"]
            for group in own.optimizer.build(model).param_groups
            if any(parameter is router for parameter in group["params"])
        )
        longest = max(router.shape)  # Muon's own factor; its rows have norm 1, or sqrt(64 / E)
        scaled = 0.2 * longest**0.5 * min(1, (64 / num_experts) ** 0.5)
        found.append((router.std().item(), rate * (scaled if optimizer == "muon" else 1)))
    for std, rate in found:
        assert std == pytest.approx(found[0][0], rel=0.1)
        assert rate == pytest.approx(found[0][1], rel=1e-6)


def test_a_resumed_optimizer_keeps_the_order_of_its_parameters() -> None:
    """Options that change the rate decide whether two shapes share a factor."""
    model = build(config(model__parametrization=COMPLETEP))
    orders = [
        [[id(parameter) for parameter in group["params"]] for group in built.param_groups]
        for options in ({}, {"adjust_lr_fn": "original"}, {"momentum": 0.5, "weight_decay": 0.0})
        for built in [config(optimizer=options).optimizer.build(model)]
    ]
    assert orders[0] == orders[1] == orders[2]
    sizes = [[parameter.shape for parameter in model.parameters()]]
    assert sum(map(len, orders[0])) == len(sizes[0])


def test_an_exported_model_computes_the_same(tmp_path: Path) -> None:
    ffn = {**MOE, "shared_expert": None, "experts": {"type": "swiglu", "d_ff": 40}}
    model = build(config(model__ffn=ffn, model__parametrization=COMPLETEP)).float()
    ids = torch.arange(LENGTH).unsqueeze(0)
    with torch.no_grad():
        export_transformers(model, tmp_path / "exported")
        read = load_transformers(tmp_path / "exported")
        torch.testing.assert_close(read(ids).logits, model(ids).logits)
        save_pretrained(model, tmp_path / "own")
        assert torch.equal(load_pretrained(tmp_path / "own")(ids).logits, model(ids).logits)


def test_blocks_that_the_base_lacks_can_be_planned_and_initialised() -> None:
    base = {"d_model": 16, "ffn.num_experts": 2}
    own = config(
        model__ffn={**MOE, "experts": "swiglu"},
        model__ffn_at={"0": "swiglu"},
        model__parametrization={"type": "completep", "base": base},
    )
    (plan,) = plan_layouts(own, 1, DEVICES["h100"])
    assert plan.fits
    dense = IdentityConfig()
    changed = with_blocks(build(own), {0: (dense, dense.build(64))})
    assert changed.config.parametrization.type == "standard"


# -- options of parts


def test_every_parameter_belongs_to_a_part() -> None:
    model = build(config(model__tie_embeddings=False, model__positions="learned"))
    found = parts_of(model)
    expected = {
        "embedding.weight": "embeddings",
        "positions.table.weight": "embeddings",
        "unembedding.weight": "output",
        "final_norm.weight": "norms",
        "layers.0.attention.query.weight": "attention",
        "layers.0.attention_norm.weight": "norms",
        "layers.0.ffn.router.projection.weight": "router",
        "layers.0.ffn.experts.gate_up": "ffn_up",
        "layers.0.ffn.experts.gate_up_bias": "ffn_up",
        "layers.0.ffn.experts.down": "ffn_down",
        "layers.0.ffn.shared_expert.up.weight": "ffn_up",
        "layers.0.ffn.shared_expert.down.weight": "ffn_down",
    }
    assert {name: found[name] for name in expected} == expected
    assert set(found.values()) <= set(get_args(Part))
    assert len(found) == len(list(model.parameters()))


def test_all_routers_of_a_chain_are_routers_and_a_gate_of_outputs_is_no_hidden_unit() -> None:
    ffn = {"type": "moe", "num_experts": 4, "shared_expert": "swiglu", "combine": "sigmoid_gate"}
    chain = {"type": "chain_of_experts", "rounds": 3, "ffn": ffn}
    found = parts_of(build(config(model__ffn=chain)))
    for router in ("ffn.router", "later_routers.0", "later_routers.1"):
        assert found[f"layers.0.ffn.{router}.projection.weight"] == "router"
    assert found["layers.0.ffn.ffn.combine.gate.weight"] == "other"
    assert found["layers.0.ffn.ffn.shared_expert.gate.weight"] == "ffn_up"


GROUPS = {"router": {"learning_rate_factor": 0.5}, "norms": {"weight_decay": 0.25}}


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd", "adafactor", "muon"])
def test_a_part_has_its_own_rate_and_decay(optimizer: str) -> None:
    plain, own = (
        config(optimizer={"type": optimizer, "learning_rate": 0.5, "groups": groups})
        for groups in ({}, GROUPS)
    )
    model = build(own)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    before, after = (
        {
            names[id(parameter)]: (group["lr"], group["weight_decay"])
            for group in each.optimizer.build(model).param_groups
            for parameter in group["params"]
        }
        for each in (plain, own)
    )
    for name, part in parts_of(model).items():
        rate, decay = before[name]
        expected = {"router": (rate / 2, decay), "norms": (rate, 0.25)}.get(part, (rate, decay))
        assert after[name] == expected, name


def test_a_resumed_run_may_change_the_options_of_its_parts_but_not_which() -> None:
    one, other = (
        fixed_options(config(optimizer__groups={"router": {"learning_rate_factor": factor}}))
        for factor in (0.5, 2.0)
    )
    assert one == other
    assert one["optimizer"] == {"type": "muon", "groups": ["router"]}
    assert fixed_options(config())["optimizer"] == {"type": "muon"}


REJECTED = """
{optimizer.type: sgd}
    model.parametrization.type ('completep') has no rule for optimizer.type ('sgd'); use adamw or muon, or
    parametrization standard
{model.norm_placement: post}
    model: parametrization.type ('completep') needs norm_placement pre, got post; use standard
{model.parametrization.base.d_model: 18}
    model: parametrization.type ('completep') needs another base: attention.num_heads (4) must divide d_model
    (18), or set attention.head_dim
{model.parametrization.base.width: 8}
    model: parametrization.type ('completep') needs another base: width: unknown
{model.parametrization.base.num_layers: 0}
    model: parametrization.type ('completep') needs another base: num_layers must be at least 1, got 0
{model.parametrization.base.num_layers: four}
    model: parametrization.type ('completep') needs another base: num_layers must be a whole number, got
    'four'
{model.parametrization.base.parametrization: standard}
    model: parametrization.type ('completep') needs another base: parametrization: cannot be in a base, which
    lists sizes; leave it out
{model.parametrization: {type: completep, base: {d_model: 16}}}
    model: parametrization.type ('completep') needs d_ff in its base: this model has d_ff 40, which would be
    that of a base of d_model 16 too; add its own
{model.parametrization.base.ffn.shared_expert: null}
    model: parametrization.type ('completep') needs a base of other sizes only, but its model has other
    parameters (layers.0.ffn.shared_expert.down.weight, layers.0.ffn.shared_expert.up.weight); list only
    sizes
{model.parametrization: completep}
    model.parametrization.base: missing; this option has no default
{model.ffn: {type: conv}}
    model: parametrization.type ('completep') has no rule for type 'conv' in layer 0; use standard
{model.ffn.router: {type: product_key, d_query: 8}}
    model: parametrization.type ('completep') has no rule for router.type 'product_key' in layer 0; use
    standard
{model.ffn.experts: {type: normed, output: {}}}
    model: parametrization.type ('completep') has no rule for experts.type 'normed' in layer 0; use standard
{model.ffn.zero_computation.num_copy: 1}
    model: parametrization.type ('completep') has no rule for zero_computation in layer 0; use standard
{model.ffn.shared_expert: conv}
    model: parametrization.type ('completep') has no rule for shared_expert.type 'conv' in layer 0; use
    standard
{optimizer.groups.routers: {}}
    optimizer.groups.routers: must be one of 'embeddings', 'attention', 'router', 'ffn_up', 'ffn_down',
    'norms', 'output' or 'other', got 'routers'
{optimizer.groups.router.learning_rate_factor: 0}
    optimizer.groups.router.learning_rate_factor: must be greater than 0.0, got 0
"""


@pytest.mark.parametrize(("options", "message"), answers(REJECTED))
def test_options_without_a_scaling_rule_are_rejected_by_path(options: str, message: str) -> None:
    given = {"model.parametrization": COMPLETEP, **yaml.safe_load(options)}
    rejects(lambda: config(**given), message)
