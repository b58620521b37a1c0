"""YAML files in configs/: each resolves, builds, and learns from two short sequences."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import moe_ffn
from moe_ffn.cli.command_line import parse_config
from moe_ffn.config.yaml_files import flag_value
from moe_ffn.ffn import FFNConfig, MixtureOfDepthsConfig, MoEConfig
from moe_ffn.ffn.base import layer_name
from moe_ffn.ffn.mixture_of_depths import by_sequence
from moe_ffn.kernels.native.build import unavailable_reason
from moe_ffn.model.decoder import DecoderConfig
from moe_ffn.outputs import Routing
from moe_ffn.runs.budget import Budget
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.custom_parts import check_num_params
from moe_ffn.studies.config import StudyConfig
from moe_ffn.training.module import LanguageModel, LoadedBatch, ModuleOptions

FOLDER = Path(__file__).parents[1] / "configs"
STUDIES = sorted(FOLDER.glob("studies/*.yaml"))
PUBLISHED = sorted(FOLDER.glob("models/*.yaml"))
"""Models that are far too large to be built here."""
CONFIGS = sorted({*FOLDER.glob("**/*.yaml")} - {*STUDIES} - {*PUBLISHED})
VOCAB, SEQ_LEN = 64, 16
WIDTHS = {
    "d_model": 32,
    "d_ff": 32,
    "head_dim": 16,
    "kv_rank": 8,
    "query_rank": 12,
    "rotated_dim": 8,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
}
"""Largest sizes of the models trained here; the full-sized model is built on the meta device."""
TRIED: set[str] = set()
"""Models that an arm of some study had, with their objectives: many studies have the same."""

pytestmark = pytest.mark.usefixtures("stay_in_tmp_path")


Result = TypeVar("Result")


def counting(call: Callable[[], Result]) -> tuple[int, Result]:
    """Return the FLOPs that torch counts of a call, and its result; attention is not fused, so it counts."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        result = call()
    return counter.get_total_flops(), result


def told(
    model: DecoderConfig, vocab_size: int, routings: Mapping[str, Routing], shape: tuple[int, int]
) -> int:
    """Return the FLOPs that the config gives for a batch, corrected for its own routing."""
    num_tokens, seq_len = shape[0] * shape[1], shape[1]
    seen, square = (
        model.attention.flops_per_token(model.d_model, seq_len, causal)
        for causal in (model.causal, False)
    )
    per_token = model.flops_per_token(vocab_size, seq_len) + model.num_layers * (square - seen)
    layers = enumerate(model.layer_ffns())
    return num_tokens * per_token + sum(
        beyond_the_mean(ffn, routings[layer_name(layer)], model.d_model)
        for layer, ffn in layers
        if layer_name(layer) in routings
    )


def beyond_the_mean(ffn: FFNConfig, routing: Routing, d_model: int) -> int:
    """FLOPs of the pairs there were less those of the mean; 0 where the data do not decide their number."""
    seq_len, num_tokens = routing.sequence_length, routing.num_tokens
    if isinstance(ffn, MixtureOfDepthsConfig) and ffn.router.type == "relu":
        # All sequences are filled up to the one of which most tokens pass.
        rows = by_sequence(routing)[1].sum(dim=1).max().item() * (num_tokens // seq_len)
        return round((rows - ffn.share * num_tokens) * ffn.ffn.flops_per_token(d_model, seq_len))
    if not isinstance(ffn, MoEConfig) or not (
        ffn.router.type in ("relu", "top_p", "elastic_top_k")
        or ffn.capacity.is_limited
        or ffn.zero_computation.total
    ):
        return 0
    pairs = (routing.computed_N & (routing.expert_ids_N < ffn.num_experts)).sum().item()
    pair = ffn.experts.flops_per_pair(d_model, ffn.experts_per_token)
    mean = (
        ffn.router.pairs_per_token(ffn.num_routable, seq_len) * ffn.num_experts / ffn.num_routable
    )
    return round((pairs - num_tokens * mean) * pair)


def resolve(path: Path) -> TrainConfig:
    return parse_config(["--config", str(path)], TrainConfig, command="train")


def test_the_options_that_differ_make_the_same_model_again() -> None:
    words: list[str] = []
    for path in [*CONFIGS, *PUBLISHED]:
        model = resolve(path).model
        flags = [f"--model.{key} {flag_value(v)}" for key, v in model.to_short_dict().items()]
        words = shlex.split(" ".join(flags))
        again = parse_config(words, TrainConfig, command="train").model
        assert again == model, f"{path}: {words}"
    assert len(words) < 40, "defaults are left out"


def narrowed(options: Any, limits: dict[str, int], key: str = "") -> Any:
    if isinstance(options, dict):
        return {key: narrowed(value, limits, key) for key, value in options.items()}
    limit = limits.get(key)
    return options if limit is None or options is None else min(options, limit)


def build(config: TrainConfig) -> LanguageModel:
    """Check the size of the model, and build a narrow one."""
    check_num_params(config.model.build_empty(VOCAB, SEQ_LEN))
    model = type(config.model).model_validate(narrowed(config.model.to_dict(), WIDTHS))
    torch.manual_seed(0)
    options = ModuleOptions(
        model,
        config.optimizer,
        config.objective,
        config.trainer.guard,
        SEQ_LEN,
        config.trainer.max_steps,
        config.seed,
    )
    return LanguageModel(options, torch.ones(VOCAB))


def random_batch() -> LoadedBatch:
    token_ids = torch.randint(VOCAB, (2, SEQ_LEN + 1))
    return LoadedBatch(index=0, input_ids=token_ids[:, :-1], target_ids=token_ids[:, 1:])


def step(module: LanguageModel) -> Any:
    """A forward and a backward pass, whose FLOPs are those of the config."""
    batch = random_batch()
    module.on_train_batch_start(batch, 0)
    flops, output = counting(lambda: module.training_step(batch, 0))
    assert flops == told(module.decoder.config, VOCAB, output["routings"], (2, SEQ_LEN))
    assert output["loss"].isfinite()
    output["loss"].backward()
    return output


FEW_NEW_ARMS = {
    *("balance", "base", "capacity", "elastic", "experts", "gating", "granularity", "isoflop"),
    "transfer",
}
"""Studies whose arms are those of other studies or of `configs/blocks`, in other sizes and numbers."""


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem in FEW_NEW_ARMS))
        for path in STUDIES
    ],
)
def test_every_arm_of_a_study_makes_a_training_step(path: Path) -> None:
    study = StudyConfig.read(path)
    runs = study.model_copy(update={"seeds": study.seeds[:1]}).planned_runs()
    assert {run.main_arm for run in runs} == set(study.arm_names)
    assert study.question
    for run in {run.main_arm: run for run in runs}.values():
        objective = run.config.objective.to_dict()
        if (whole := f"{run.config.model.to_dict()} {objective}") in TRIED:
            continue
        module = build(run.config)
        if (narrow := f"{module.decoder.config.to_dict()} {objective}") not in TRIED:
            step(module)
        TRIED.update((whole, narrow))


def test_there_are_configs() -> None:
    assert {"gating.yaml", "noise.yaml"} <= {path.name for path in STUDIES}
    assert {"moe.yaml", "dense.yaml", "swiglu.yaml", "vanilla_2017.yaml"} <= {
        p.name for p in CONFIGS
    }


@pytest.mark.parametrize("path", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_config_makes_a_training_step(path: Path) -> None:
    module = build(resolve(path))
    configured = module.configure_optimizers()
    assert isinstance(configured, dict)
    before = module.decoder.embedding.weight.detach().clone()

    output = step(module)
    configured["optimizer"].step()

    # A fresh model knows nothing: log(vocabulary), more or less.
    assert output["objective"].cross_entropy.item() == pytest.approx(math.log(VOCAB), abs=1.5)
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.isfinite().all(), name
    assert not torch.equal(module.decoder.embedding.weight, before)
    ffns = enumerate(module.decoder.config.layer_ffns())
    sparse = [f"layer_{layer:02d}" for layer, ffn in ffns if bool(ffn.router_infos())]
    assert [name for name in output["routings"] if "/" not in name] == sparse


def test_moe_yaml_is_the_default_written_out() -> None:
    (path,) = [path for path in CONFIGS if path.name == "moe.yaml"]

    assert resolve(path) == TrainConfig()


# Billions of parameters, all and those of a token, as their authors give them; whether the latter hold the
# input embeddings. DeepSeek's are in README_WEIGHTS.md of its repository, OpenAI's in its model card.
SIZES = {
    "mixtral_8x7b": (46.7, 12.9, True),
    "olmoe_1b_7b": (6.92, 1.28, True),
    "qwen3_235b_a22b": (235, 22, True),
    "deepseek_v3": (671, 36.6, False),
    "gpt_oss_120b": (116.83, 5.13, False),
}


@pytest.mark.parametrize("path", PUBLISHED, ids=[path.stem for path in PUBLISHED])
def test_published_models_have_the_cost_of_their_configs(path: Path) -> None:
    model = resolve(path).model
    check_num_params(model.build_empty(9, 8))
    limits = WIDTHS | {"num_experts": 16}
    small = type(model).model_validate(narrowed(model.to_dict(), limits))
    decoder, ids = small.build(VOCAB, SEQ_LEN), torch.randint(VOCAB, (2, SEQ_LEN))
    with torch.no_grad():
        flops, output = counting(lambda: decoder(ids))
    assert flops == told(small, VOCAB, output.routings, (2, SEQ_LEN))


@pytest.mark.parametrize("path", PUBLISHED, ids=[path.stem for path in PUBLISHED])
def test_published_models_have_their_published_sizes(path: Path) -> None:
    config = resolve(path)
    size = Budget.of(config).model
    total, active, holds_embeddings = SIZES[path.stem]

    embeddings = config.data.tokenizer.max_vocab_size * config.model.d_model
    got = size.active_params - (0 if holds_embeddings else embeddings)
    print(
        f"{path.stem}: {size.params / 1e9:.2f} of {total} B, active {got / 1e9:.2f} of {active} B"
    )
    assert size.params / 1e9 == pytest.approx(total, rel=0.01)
    assert got / 1e9 == pytest.approx(active, rel=0.01)


def test_all_published_models_are_there() -> None:
    assert {path.stem for path in PUBLISHED} == {*SIZES}


def test_a_batch_passes_through_few_files_to_its_loss() -> None:
    module, package = build(TrainConfig()), Path(moe_ffn.__file__).parent
    batch, entered = random_batch(), set[str]()
    unavailable_reason()  # asked once in a process
    module.on_train_batch_start(batch, 0)

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(package):
            entered.add(file.relative_to(package).as_posix())

    sys.setprofile(note)
    try:
        module.training_step(batch, 0)
    finally:
        sys.setprofile(None)

    print(len(entered), *sorted(entered))
    assert {"routing/top_k.py", "ffn/moe.py", "training/objective.py"} <= entered
    assert len(entered) <= 20
