"""Every sparse block of the installed transformers: its output and every gradient by ours, or why not."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import published_blocks
from experiments.published_blocks import (
    SMALL,
    build_empty,
    build_theirs,
    compare,
    config_of,
    shown_config,
)
from moe_ffn.cli.command_line import parse_config
from moe_ffn.config.errors import ConfigError, show
from moe_ffn.ffn import FFNConfig
from moe_ffn.hf import block_config, convert_block
from moe_ffn.hf.block_parts import BlockEntry
from moe_ffn.hf.block_table import BLOCKS, NO_BLOCK
from moe_ffn.hf.blocks import config_width
from moe_ffn.runs.config import TrainConfig

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "models.md"
COMPARED = {model: entry for model, entry in BLOCKS.items() if isinstance(entry, BlockEntry)}
TRAINED = [model for model, entry in COMPARED.items() if entry.in_training is not None]

# Of kernels that are not installed.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers")


def their_block(model: str) -> tuple[Any, Any]:
    entry = COMPARED[model]
    config = config_of(model, entry, SMALL | dict(entry.small))
    return build_theirs(model, entry, config), config


# A file that defines one of these has a sparse block, as far as names tell.
CLASSES = re.compile(r"^class \w*(?:Expert|Router|TopK|MoE|Moe|SparseMLP)\w*\(nn\.", re.MULTILINE)
CLASS = re.compile(r"^class (\w+)", re.MULTILINE)
HOLDS_EXPERTS = re.compile(r"\bself\.experts\s*=\s*\w+\(")
OPTIONS = re.compile(r"\b(?:num_experts|num_local_experts|n_routed_experts|moe_num_experts)\b")


@cache
def sparse_models() -> dict[str, list[str]]:
    """The models of the installed transformers whose files speak of experts, without importing them.

    Returns:
        By model, the classes that hold experts: none where they are called something else.
    """
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    found: dict[str, list[str]] = {}
    for path in sorted(Path(spec.origin).parent.glob("models/*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        if CLASSES.search(text) or OPTIONS.search(text):
            _, *parts = CLASS.split(text)
            bodies = dict(zip(parts[::2], parts[1::2], strict=True))
            holders = [name for name, body in bodies.items() if HOLDS_EXPERTS.search(body)]
            found.setdefault(path.parent.name, []).extend(holders)
    return found


def test_every_model_that_mentions_experts_is_in_the_table() -> None:
    assert {model.split()[0] for model in BLOCKS} | {*NO_BLOCK} == {*sparse_models()}


NO_ROW = {
    "Ernie4_5_VLMoeSparseMoeBlock": "one of the two pools of Ernie4_5_VLMoeMoeBlock",
    "GraniteMoeHybridMoE": "GraniteMoeHybridDecoderLayer without its shared expert",
    "GraniteMoeSWAMoE": "GraniteMoeSWADecoderLayer without its shared expert",
    "GraniteMoeSharedMoE": "GraniteMoeSharedDecoderLayer without its shared expert",
    "JetMoeAttention": "a mixture of attention heads",
}
"""Classes that hold experts, of models that are in the table, and why they have no row of their own."""


def test_every_class_that_holds_experts_has_a_row() -> None:
    no_block = {model for model, entry in BLOCKS.items() if isinstance(entry, str)}
    holders = {
        name for model, names in sparse_models().items() for name in names if model not in no_block
    }
    rows = {entry.class_name for entry in COMPARED.values()}
    assert holders - rows == {*NO_ROW}


def test_at_least_95_percent_of_the_models_are_exact() -> None:
    all_models = {model.split()[0] for model in BLOCKS}
    missing = {model for model, entry in BLOCKS.items() if isinstance(entry, str)}
    assert missing <= all_models
    assert len(missing) <= 0.05 * len(all_models)


@pytest.mark.parametrize(
    ("model", "training"),
    [*((model, False) for model in COMPARED), *((model, True) for model in TRAINED)],
    ids=[*COMPARED, *(f"{model}-training" for model in TRAINED)],
)
def test_output_and_every_gradient_are_theirs(model: str, training: bool) -> None:
    errors = compare(model, training=training)

    assert max(errors.values()) < 3e-6, errors


OTHER_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("axk1", {"norm_topk_prob": False}),
    ("axk2", {"n_group": None, "topk_group": None}),
    ("beam", {"hidden_act": "gelu"}),
    ("cohere2_moe", {"expert_selection_fn": "softmax", "num_shared_experts": 0}),
    ("cohere2_moe", {"shared_expert_combination_strategy": "sum"}),
    ("deepseek_v2", {"topk_method": "greedy"}),
    ("deepseek_v3", {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    ("deepseek_v4", {"scoring_func": "sigmoid"}),
    ("doge", {"hidden_act": "gelu"}),
    ("ernie4_5_moe", {"moe_num_shared_experts": 0}),
    ("inkling2", {"scoring_func": "sqrtsoftplus"}),
    ("kolibri1", {"norm_topk_prob": True}),
    ("laguna", {"moe_router_logit_softcapping": 0.0}),
    ("lfm2_moe", {"norm_topk_prob": False, "use_expert_bias": False}),
    ("longcat_flash", {"zero_expert_num": 0}),
    ("mistral4", {"norm_topk_prob": False}),
    ("nemotron_h", {"moe_latent_size": None}),
    ("nllb_moe", {"normalize_router_prob_before_dropping": True}),
    ("qwen2_moe", {"norm_topk_prob": True}),
    ("step3p7", {"swiglu_limits": [0, 0]}),
]
"""Other values of the options that a row reads, beside those of its small block."""


@pytest.mark.parametrize(
    ("model", "options"), OTHER_OPTIONS, ids=[f"{m}-{'-'.join(o)}" for m, o in OTHER_OPTIONS]
)
def test_other_options_of_theirs_are_read_too(
    model: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = COMPARED[model]
    changed = entry.with_changes(small={**entry.small, **options})
    monkeypatch.setattr(published_blocks, "BLOCKS", {model: changed})
    for training in (False, True) if model in TRAINED else (False,):
        errors = compare(model, training=training)
        assert max(errors.values()) < 3e-6, errors


class Changed:
    """A config with other values of some options, of which its own class might allow none."""

    def __init__(self, config: Any, values: dict[str, Any]) -> None:
        self._config = config
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


SERVED = [
    (model, option, values)
    for model, entry in COMPARED.items()
    for option, values in entry.supported.items()
]


@pytest.mark.parametrize(
    ("model", "option", "values"), SERVED, ids=[f"{m}-{option}" for m, option, _ in SERVED]
)
def test_what_no_row_computes_is_rejected(model: str, option: str, values: tuple[Any, ...]) -> None:
    entry = COMPARED[model]
    config = config_of(model, entry, SMALL | dict(entry.small))
    block_config(model, config)
    with pytest.raises(ConfigError) as rejected:
        block_config(model, Changed(config, {option: "another"}))
    assert str(rejected.value) == (
        f"{entry.class_name}: {option} is 'another', which our model does not support; supported: "
        + " or ".join(map(show, values))
    )


@pytest.mark.parametrize("model", [model for model in COMPARED if model not in TRAINED])
def test_a_block_that_is_compared_only_in_evaluation_is_the_same_in_training(model: str) -> None:
    theirs, config = their_block(model)
    x_BSD = torch.randn(2, 6, config_width(config), generator=torch.Generator().manual_seed(0))
    ids_BS = torch.arange(12).view(2, 6)

    def output(training: bool) -> torch.Tensor:
        with published_blocks.same_noise(), torch.no_grad():
            return published_blocks.call_theirs(theirs.train(training), x_BSD * 1, ids_BS)

    assert torch.equal(output(training=True), output(training=False))


@pytest.mark.parametrize("model", COMPARED)
def test_the_config_that_the_page_shows_can_be_built(model: str) -> None:
    build_empty(shown_config(model, COMPARED[model]))


def test_the_page_is_what_the_command_writes() -> None:
    zero = {"output": 0.0, "x": 0.0}
    numbers = re.compile(r"(?<=\| )\d+e[+-]\d+(?= \|)")
    written = numbers.sub("", published_blocks.page(dict.fromkeys(COMPARED, zero)))

    found = PAGE.read_text(encoding="utf-8")

    assert numbers.sub("", found) == written, "python -m experiments.published_blocks"
    assert max(map(float, numbers.findall(found))) <= 3e-6


# -- blocks of live models


def test_a_live_block_becomes_one_of_ours() -> None:
    theirs, config = their_block("qwen2_moe")
    theirs = theirs.bfloat16().eval()

    ours = convert_block("qwen2_moe", theirs, config)

    assert not ours.training
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    x_BSD = torch.randn(2, 6, 16).bfloat16()
    torch.testing.assert_close(ours(x_BSD).hidden, theirs(x_BSD), rtol=0.05, atol=0.05)
    assert block_config("qwen2_moe", config)["router"] == {
        "type": "top_k",
        "k": 2,
        "renormalize": False,
    }


REJECTED = {
    "vitpose_backbone": "moe_ffn has no block that matches the sparse block of vitpose_backbone: "
    "it has no router: the data "
    "set of an image chooses its expert, which computes a part of the output's units",
    "qwen4_moe": "'qwen4_moe' is not a known model of transformers with a sparse block; did you "
    "mean 'qwen3_moe'?",
}


@pytest.mark.parametrize("model", REJECTED)
def test_a_model_without_a_block_of_ours_is_named_with_the_reason(model: str) -> None:
    with pytest.raises(ConfigError) as caught:
        block_config(model, None)
    assert str(caught.value) == REJECTED[model]


def test_a_weight_that_ours_lacks_is_named() -> None:
    theirs, config = their_block("mixtral")
    theirs.gate.extra = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ConfigError, match=r"no tensor for gate\.extra of MixtralSparseMoeBlock"):
        convert_block("mixtral", theirs, config)
    del theirs.gate.extra, theirs.experts.down_proj
    with pytest.raises(
        ConfigError, match=r"has no mlp\.|has no experts\.down_proj|has no experts\.0"
    ):
        convert_block("mixtral", theirs, config)


# -- configs/models/small

SMALL_CONFIGS = sorted((ROOT / "configs/models/small").glob("*.yaml"))
PUBLISHED = {"qwen3_moe": {"norm_topk_prob": True}, "nemotron_h": {"moe_latent_size": 1024}}
"""Options of published models that are not the defaults of their config."""
SIZES = {
    *("num_experts", "d_ff", "k", "width", "num_groups", "keep", "scale", "logit_scale"),
    *("eps", "vocab_size", "limit"),
}


def without_sizes(options: Any) -> Any:
    if not isinstance(options, dict):
        return options
    return {key: without_sizes(value) for key, value in options.items() if key not in SIZES}


@pytest.mark.parametrize("path", SMALL_CONFIGS, ids=[path.stem for path in SMALL_CONFIGS])
def test_a_small_config_has_the_options_of_the_table(path: Path) -> None:
    entry, given = COMPARED[path.stem], PUBLISHED.get(path.stem, {})
    if path.stem == "gemma4":
        given = {**SMALL, **entry.small}
    options = block_config(path.stem, config_of(path.stem, entry, given))

    config = parse_config(["--config", str(path)], TrainConfig, command="train")

    theirs = FFNConfig.model_validate(options).to_dict()
    assert without_sizes(config.model.layer_ffns()[-1].to_dict()) == without_sizes(theirs)
