"""`moe-ffn audit` of runs, model folders and adapters: table, page, JSON, exit code, and bad input."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from moe_ffn.cli.demo import MODEL
from tests.helpers import theirs
from tests.helpers.tiny_runs import cli

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is:FutureWarning")

audit = cli("audit")


def save(folder: Path, **options: Any) -> Path:
    few: dict[str, Any] = {"max_position_embeddings": 64, "num_experts_per_tok": 2}
    return theirs.save_with_bytes("qwen3_moe-renormalised", folder, **few, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sparse model of transformers with random weights."""
    return save(tmp_path_factory.mktemp("models"))


def test_a_trained_model_is_checked_and_written_as_page_and_json(tmp_path: Path) -> None:
    text = Path(torch.__file__).parent / "include/cpuinfo.h"  # C, as the model was trained on
    files = ("--html", tmp_path / "a.html", "--json", tmp_path / "a.json")
    code, out, err = audit(MODEL, "--text", text, *files)

    assert (code, err) == (0, "")
    report = json.loads((tmp_path / "a.json").read_text())
    checks = {finding["check"]: finding["verdict"] for finding in report["findings"]}
    assert report["ok"]
    assert {check for check, verdict in checks.items() if verdict != "pass"} == {"balancing"}
    assert checks["balancing"] == "skip", "a folder does not say how it will be trained"
    assert list(checks) == [
        "structure", "left out", "learning", "balancing", "precision", "kernels", "causality",
        "determinism", "health", "order",
    ]  # fmt: skip
    assert report["facts"]["text"] == "cpuinfo.h"
    page = (tmp_path / "a.html").read_text()
    for text in (out, page):
        assert report["summary"] in text
        assert "all 4 sparse layers" in text


def test_a_run_is_judged_by_its_own_text_and_objective(
    short_run: Callable[..., Path], tmp_path: Path
) -> None:
    run = short_run("--model.ffn", "moe", "--objective.load_balance", "0")
    code, out, _ = audit(run, "--json", tmp_path / "a.json")

    assert code == 1
    assert "objective has neither a balancing loss nor a bias rule" in out
    assert "idle experts need 50 steps of training, this model has 1" in out
    facts = json.loads((tmp_path / "a.json").read_text())["facts"]
    assert facts["text"] == "validation split"


def test_weights_that_are_not_loaded_are_named(folder: Path, tmp_path: Path) -> None:
    spoilt = tmp_path / "spoilt"
    shutil.copytree(folder, spoilt)
    weights = load_file(spoilt / "model.safetensors")
    weights = {name.replace("layers.0.mlp.experts", "old"): weights[name] for name in weights}
    save_file(weights, spoilt / "model.safetensors", metadata={"format": "pt"})

    code, out, _ = audit(spoilt)

    assert code == 1
    assert "source of Python's statistics module" in " ".join(out.split())
    assert "are not in the files, and are random" in out
    assert "are in the files, but the model does not use them" in out


def test_weights_of_another_shape_are_named(folder: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "other", num_experts=8)
    shutil.copy(folder / "config.json", other)

    code, out, _ = audit(other)

    assert code == 1
    assert "have another shape in the files, and are random" in out
    assert "model.layers.0.mlp.gate.weight (8, 32), not (6, 32)" in " ".join(out.split())


def test_an_encoder_with_a_decoder_is_loaded(folder: Path, tmp_path: Path) -> None:
    config = AutoConfig.for_model(
        "switch_transformers", vocab_size=257, d_model=16, d_kv=8, d_ff=24, num_heads=2, num_layers=2,
        num_decoder_layers=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, num_experts=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path)
    shutil.copy(folder / "tokenizer.json", tmp_path)

    code, out, _ = audit(tmp_path, "--tokens", "64")

    assert code == 0
    assert "SwitchTransformersForConditionalGeneration; sparse layers: 2 (experts in a list)" in out
    assert "transformers " in out  # its version


def adapter_for(folder: Path, target: Path, *parameters: str) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed here")
    base = AutoModelForCausalLM.from_pretrained(folder)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=list(parameters))
    peft.get_peft_model(base, config).save_pretrained(target)


def test_an_adapter_is_checked_on_its_base(folder: Path, tmp_path: Path) -> None:
    adapter_for(folder, tmp_path / "adapter")
    code, out, _ = audit(tmp_path / "adapter")
    assert code == 0
    assert "every tensor of the adapter has its place" in out
    assert "was trained on" not in out
    assert "expert tensors" in out
    assert "are not adapted" in out

    path = tmp_path / "adapter" / "adapter_model.safetensors"
    weights = {name.replace("q_proj", "query"): value for name, value in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    code, out, _ = audit(tmp_path / "adapter")
    assert code == 1
    assert "match nothing in the model and have no effect" in out


def test_another_base_of_equal_shapes_is_noticed(folder: Path, tmp_path: Path) -> None:
    adapter_for(folder, tmp_path / "adapter")
    code, out, _ = audit(tmp_path / "adapter", "--base", save(tmp_path / "other"))
    assert code == 0
    assert f"the adapter was trained on '{folder}', and is audited on" in " ".join(out.split())


def with_expert(
    change: Callable[[dict[str, Any], str], Any],
) -> Callable[[Path, Path], tuple[Path]]:
    """Return a function that changes a tensor of an expert in the files of a model."""

    def make(folder: Path, tmp_path: Path) -> tuple[Path]:
        shutil.copytree(folder, tmp_path / "changed")
        path = tmp_path / "changed" / "model.safetensors"
        weights = load_file(path)
        change(weights, "model.layers.0.mlp.experts.1.")
        save_file(weights, path, metadata={"format": "pt"})
        return (tmp_path / "changed",)

    return make


def lose_all(weights: dict[str, Any], expert: str) -> None:
    for name in [name for name in weights if name.startswith(expert)]:
        del weights[name]


def lengthen(weights: dict[str, Any], expert: str) -> None:
    name = f"{expert}down_proj.weight"
    weights[name] = torch.cat([weights[name], weights[name][:1]])


def wider(folder: Path, tmp_path: Path) -> tuple[Path, ...]:
    other = save(tmp_path / "wider", hidden_size=64)
    adapter_for(folder, tmp_path / "adapter")
    return tmp_path / "adapter", Path("--base"), other


def another_tokenizer(folder: Path, tmp_path: Path) -> tuple[Path, ...]:
    return (save(tmp_path / "small", vocab_size=64),)


def dense(folder: Path, tmp_path: Path) -> tuple[Path, ...]:
    sizes = {"vocab_size": 257, "max_position_embeddings": 64}
    theirs.make("llama", sizes).save_pretrained(tmp_path / "dense")
    shutil.copy(folder / "tokenizer.json", tmp_path / "dense")
    return (tmp_path / "dense",)


def far_base(folder: Path, tmp_path: Path) -> tuple[Path, ...]:
    adapter_for(folder, tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace(str(folder), "some/model"))
    return (tmp_path / "adapter",)


ROUTER = "model.layers.0.mlp.gate.weight"


def no_base(folder: Path, tmp_path: Path) -> tuple[Path, ...]:
    """As peft saves an adapter of our models, or of a model that was not read from a folder."""
    adapter_for(folder, tmp_path / "adapter")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(config.read_text().replace(f'"{folder}"', "null"))
    return (tmp_path / "adapter",)


def with_three_heads(folder: Path, tmp_path: Path) -> tuple[Path, ...]:
    shutil.copytree(folder, tmp_path / "changed")
    config = tmp_path / "changed" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_attention_heads": 3}))
    return (tmp_path / "changed",)


def rounded_weight(folder: Path, tmp_path: Path) -> tuple[Path, ...]:
    shutil.copytree(folder, tmp_path / "changed")
    file = tmp_path / "changed" / "model.safetensors"
    tensors = load_file(file)
    tensors[ROUTER] = tensors[ROUTER].to(torch.int8)
    save_file(tensors, file)
    return (tmp_path / "changed",)


def cut_adapter(folder: Path, tmp_path: Path) -> tuple[Path, ...]:
    adapter_for(folder, tmp_path / "adapter")
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    return (tmp_path / "adapter",)


def short_text(folder: Path, tmp_path: Path) -> tuple[Path, ...]:
    (tmp_path / "text").write_text("a")
    return folder, Path("--text"), tmp_path / "text"


BAD: dict[str, tuple[Callable[[Path, Path], tuple[Path, ...]], str]] = {
    "dense": (
        dense,
        "LlamaForCausalLM has no sparse layer: none of our blocks, and no module of experts",
    ),
    "another tokenizer": (
        another_tokenizer,
        "but the vocabulary has 64 tokens; copy the tokenizer of",
    ),
    "another base": (wider, "is not an adapter for"),
    "a tensor of one expert": (
        with_expert(lambda weights, expert: weights.pop(f"{expert}up_proj.weight")),
        "lacks 'model.layers.0.mlp.experts.1.up_proj.weight', which its other experts have; copy the",
    ),
    "a part of all but one matrix": (
        with_expert(lambda weights, expert: weights.pop(f"{expert}down_proj.weight")),
        "lacks 'model.layers.0.mlp.experts.1.down_proj.weight', which its other experts have; copy the",
    ),
    "one expert": (
        with_expert(lose_all),
        "lacks 'model.layers.0.mlp.experts.1.down_proj.weight', ",
    ),
    "a longer tensor of one expert": (
        with_expert(lengthen),
        "has 'model.layers.0.mlp.experts.1.down_proj.weight' as (33, 24), but other experts have (32, 24)",
    ),
    "base is elsewhere": (far_base, "is an adapter for 'some/model', which is not a folder here"),
    "base is unknown": (no_base, "names no base model; give the folder of that model with --base"),
    "base of a model": (
        lambda folder, tmp_path: (folder, Path("--base"), folder),
        "is not an adapter of peft, which has adapter_config.json; leave it out",
    ),
    "a config that cannot be computed": (
        with_three_heads,
        "have another shape in the files, and are random: model.layers.0.self_attn.o_proj.weight",
    ),
    "a rounded weight": (
        rounded_weight,
        f"has quantised weights ('{ROUTER}' is I8); give weights in a floating-point dtype",
    ),
    "a cut adapter": (
        cut_adapter,
        "adapter_model.safetensors' cannot be read (Error while deserializing",
    ),
    "short text": (short_text, "--text: 'text' has 1 tokens; give a text of four or more"),
    "no text": (
        lambda folder, tmp_path: (folder, Path("--text"), tmp_path / "absent"),
        "cannot be read (No such file or directory)",
    ),
    "no folder": (lambda folder, tmp_path: (tmp_path / "absent",), "does not exist"),
}


@pytest.mark.parametrize(("argv", "sentence"), BAD.values(), ids=BAD)
def test_bad_input_is_one_sentence(
    argv: Callable[[Path, Path], tuple[Path, ...]],
    sentence: str,
    folder: Path,
    tmp_path: Path,
) -> None:
    code, out, err = audit(*argv(folder, tmp_path), "--html", tmp_path / "page.html")
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1
    assert not (tmp_path / "page.html").exists()


def test_the_batch_has_to_be_token_ids() -> None:
    from moe_ffn import ConfigError
    from moe_ffn import audit as audit_model

    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"batch must be token ids .* but is of type list"):
        audit_model(model, [1, 2])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"but are float32\[2, 8\]"):
        audit_model(model, torch.zeros(2, 8))
    with pytest.raises(ConfigError, match="accumulation must be 1 or more, but is 0"):
        audit_model(model, torch.zeros(2, 8, dtype=torch.long), accumulation=0)
