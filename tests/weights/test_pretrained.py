"""Model folders restore the saved model, or explain in one sentence why they cannot."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import moe_ffn
from moe_ffn import ConfigError, Decoder, DecoderConfig
from moe_ffn.data.tokenizer import BPETokenizer, BytesTokenizer, train_bpe
from moe_ffn.weights import pretrained
from tests.helpers.memory import peak_above
from tests.helpers.ranks import on_ranks

VOCAB_SIZE, LENGTH = 257, 16

MODELS: dict[str, dict[str, Any]] = {
    "dense": {"ffn": "dense"},
    "experts": {"ffn": {"type": "moe", "num_experts": 4, "shared_expert": "swiglu"}},
    "bias": {"ffn": {"type": "moe", "num_experts": 4, "router": {"type": "sigmoid_top_k", "k": 2}}},
    "hash": {"ffn": {"type": "moe", "num_experts": 4, "router": {"type": "hash"}}},
    "tied": {"ffn": "swiglu", "tie_embeddings": True},
    "encoder": {"ffn": "swiglu", "causal": False, "positions": {"type": "learned"}},
    "sinusoidal": {"ffn": "swiglu", "positions": {"type": "sinusoidal"}},
}


def decoder_of(name: str = "experts", d_model: int = 32, num_layers: int = 2) -> Decoder:
    sizes = {"d_model": d_model, "num_layers": num_layers, "attention": {"num_heads": 4}}
    config = DecoderConfig.model_validate({**sizes, **MODELS[name]})
    torch.manual_seed(7)
    return config.build(VOCAB_SIZE, LENGTH).eval()


def logits(decoder: Decoder) -> Tensor:
    ids_BS = torch.arange(2 * LENGTH).view(2, LENGTH)
    with torch.no_grad():
        return decoder(ids_BS).logits


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in MODELS),
        ("bias", torch.bfloat16),
        ("bias", torch.float64),
    ],
    ids=str,
)
def test_a_saved_model_is_loaded_unchanged(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    saved = decoder_of(name).to(dtype)
    moe_ffn.save_pretrained(saved, tmp_path / "model")

    loaded = moe_ffn.load_pretrained(tmp_path / "model")

    assert not loaded.training
    before, after = saved.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert after[key].dtype == value.dtype, key
        assert torch.equal(after[key], value), key
    # Not to the bit: products may be rounded by where in memory the weights begin.
    torch.testing.assert_close(logits(loaded), logits(saved))
    parameters = {n: p.requires_grad for n, p in loaded.named_parameters()}
    assert parameters == {n: p.requires_grad for n, p in saved.named_parameters()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_a_loaded_model_trains_and_leaves_its_files_alone(tmp_path: Path) -> None:
    moe_ffn.save_pretrained(decoder_of("tied"), tmp_path / "model")
    before = (tmp_path / "model/model.safetensors").read_bytes()
    loaded = moe_ffn.load_pretrained(tmp_path / "model").train()
    first = logits(loaded)
    optimizer = torch.optim.SGD(loaded.parameters(), lr=1.0)
    loaded(torch.arange(LENGTH)[None]).logits.square().mean().backward()
    optimizer.step()

    assert not torch.equal(logits(loaded), first)
    assert loaded.unembedding.weight is loaded.embedding.weight
    assert (tmp_path / "model/model.safetensors").read_bytes() == before


def test_large_weights_are_in_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained, "MIN_FILE_BYTES", 2**14)
    saved = decoder_of()
    moe_ffn.save_pretrained(saved, tmp_path / "model")

    files = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 4
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())
    weights = dict(saved.named_parameters())  # each once: embeddings are tied
    assert index["weight_map"].keys() == weights.keys()
    total = sum(value.nbytes for value in weights.values())
    assert index["metadata"]["total_size"] == total
    assert max(file.stat().st_size for file in files) < 0.4 * total
    assert torch.equal(logits(moe_ffn.load_pretrained(tmp_path / "model")), logits(saved))


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_the_tokenizer_goes_with_it(kind: str, tmp_path: Path) -> None:
    text = "für jede Zahl: 1,50 € \r\n\t".encode() + b"\xff\x00 <|endoftext|> the the the"
    tokenizer = BytesTokenizer() if kind == "bytes" else train_bpe([text] * 3, 600)
    moe_ffn.save_pretrained(decoder_of(), tmp_path / "model", tokenizer)

    loaded = moe_ffn.load_tokenizer(tmp_path / "model")

    assert isinstance(loaded, BPETokenizer)
    assert loaded.token_bytes == tokenizer.token_bytes
    assert loaded.end_of_document == tokenizer.end_of_document
    assert loaded.encode(text).tolist() == tokenizer.encode(text).tolist()


CODE = "from moe_ffn import DenseConfig\nclass Mine(DenseConfig, frozen=True):\n    type: str = 'mine'\n"


def test_code_goes_with_it_and_is_run_where_it_is_trusted(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    ffn = {"type": f"{tmp_path}/mine.py:Mine"}
    sizes = {"d_model": 16, "attention": {"num_heads": 2}}
    saved = DecoderConfig.model_validate({**sizes, "ffn": ffn}).build(VOCAB_SIZE, LENGTH).eval()
    folder = tmp_path / "model"
    moe_ffn.save_pretrained(saved, folder)
    (tmp_path / "mine.py").unlink()

    written = json.loads((folder / "config.json").read_text())["model"]
    assert written["ffn"]["type"] == "code/mine.py:Mine"
    loaded = moe_ffn.load_pretrained(folder, trust_code=True)
    assert torch.equal(logits(loaded), logits(saved))

    (folder / "theirs.py").write_text(f"{CODE}print('it ran')\n")
    change_model(folder, ffn={**written["ffn"], "type": "theirs.py:Mine"})
    with pytest.raises(
        ConfigError, match=r"names code that none of your runs started with: .*theirs.py"
    ):
        moe_ffn.load_pretrained(folder)
    assert moe_ffn.load_pretrained(folder, trust_code=True).config.ffn.type.endswith(":Mine")


# -- what is rejected


def change(folder: Path, **options: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **options}))


def change_model(folder: Path, **options: Any) -> None:
    model = json.loads((folder / "config.json").read_text())["model"]
    change(folder, model={**model, **options})


def rename_weight(file: Path) -> None:
    weights = load_file(file)
    weights["tok.weight"] = weights.pop("embedding.weight")
    save_file(dict(weights), file)


def round_weight(file: Path, dtype: torch.dtype) -> None:
    weights = load_file(file)
    save_file({**weights, "embedding.weight": weights["embedding.weight"].to(dtype)}, file)


WEIGHTS, CONFIG = "model.safetensors", "config.json"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut short": (
        lambda f: os.truncate(f / WEIGHTS, (f / WEIGHTS).stat().st_size - 100),
        "model.safetensors' cannot be read (Error while deserializing header: incomplete metadata",
    ),
    "a run": (
        lambda f: ((f / CONFIG).unlink(), (f / "model").mkdir()),
        "is not a model folder: its config.json is missing or damaged; the model of this run is in '",
    ),
    "of another library": (
        lambda f: change(f, model_type="mixtral"),
        "model_type is 'mixtral', not 'moe_ffn'; moe_ffn.hf.load_transformers reads models of "
        "transformers, and moe-ffn convert converts them",
    ),
    "another width": (
        lambda f: change_model(f, d_model=64),
        "has 'embedding.weight' as (257, 32), but its config.json requires (257, 64)",
    ),
    "another name": (
        lambda f: rename_weight(f / WEIGHTS),
        "lacks 'embedding.weight': its config.json belongs to another model",
    ),
    "int8": (
        lambda f: round_weight(f / WEIGHTS, torch.int8),
        "has quantised weights ('embedding.weight' is I8); give weights in a floating-point dtype",
    ),
    "fp8": (
        lambda f: round_weight(f / WEIGHTS, torch.float8_e4m3fn),
        "'embedding.weight' is F8_E4M3",
    ),
    "no weights": (
        lambda f: (f / WEIGHTS).unlink(),
        "has neither model.safetensors nor an intact model.safetensors.index.json",
    ),
    "a pickle": (
        lambda f: ((f / WEIGHTS).unlink(), (f / "pytorch_model.bin").touch()),
        "'pytorch_model.bin' is a pickle, which may run code; give weights as safetensors",
    ),
}


@pytest.mark.parametrize(("damage", "problem"), DAMAGES.values(), ids=DAMAGES)
def test_damaged_models_are_rejected(
    damage: Callable[[Path], Any], problem: str, tmp_path: Path
) -> None:
    moe_ffn.save_pretrained(decoder_of(), tmp_path / "model")
    damage(tmp_path / "model")
    with pytest.raises(ConfigError) as caught:
        moe_ffn.load_pretrained(tmp_path / "model")
    assert problem in str(caught.value)
    assert str(tmp_path / "model") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_index_must_match_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "MIN_FILE_BYTES", 2**14)
    folder = tmp_path / "model"
    moe_ffn.save_pretrained(decoder_of(), folder)
    index = folder / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    first = next(iter(whole["weight_map"].values()))

    def given(**places: Any) -> str:
        index.write_text(json.dumps({"weight_map": {**whole["weight_map"], **places}}))
        with pytest.raises(ConfigError) as caught:
            moe_ffn.load_pretrained(folder)
        return str(caught.value)

    assert "names '../x', which is not a file in this folder" in given(more="../x")
    assert "names ['x'], which is not a file in this folder" in given(more=["x"])
    (folder / first).unlink()
    assert f"lacks '{first}', which {index.name} names; copy it too" in given()


def test_a_folder_without_a_tokenizer_or_a_model_is_an_error(tmp_path: Path) -> None:
    moe_ffn.save_pretrained(decoder_of(), tmp_path / "model")
    with pytest.raises(ConfigError, match=r"has no tokenizer.json, which turns text into tokens"):
        moe_ffn.load_tokenizer(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"is not there; give the folder of a model"):
        moe_ffn.load_pretrained(tmp_path / "other")


def test_a_model_of_the_users_own_is_rejected_with_the_way_to_save_it(tmp_path: Path) -> None:
    model: Any = nn.Linear(2, 2)
    with pytest.raises(
        ConfigError,
        match=r"^save_pretrained writes a Decoder, but got a Linear; save your own model with torch.save: "
        r"its state_dict\(\), and the options of its blocks$",
    ):
        moe_ffn.save_pretrained(model, tmp_path / "model")
    assert not [*tmp_path.iterdir()]


def test_another_k_is_saved_unless_the_folder_could_not_be_read(tmp_path: Path) -> None:
    decoder, folder = decoder_of("bias"), tmp_path / "model"
    decoder.set_k({":": 3})
    moe_ffn.save_pretrained(decoder, folder)
    assert torch.equal(logits(moe_ffn.load_pretrained(folder)), logits(decoder))
    decoder.set_k({"1": 1})
    with pytest.raises(
        ConfigError,
        match=r"^layer 1: renormalize \(true\) with k \(1\) makes every weight a constant 1, so the router "
        r"would never learn, and no model folder may hold it; call set_k with a larger k before you save$",
    ):
        moe_ffn.save_pretrained(decoder, folder)
    assert moe_ffn.load_pretrained(folder).config.router_infos()["layer_01"].router.describe() == (
        "sigmoid_top_k k=3"
    )


@pytest.mark.parametrize("failing", ["config", "weights", "rename"])
def test_an_existing_model_stays_until_the_new_one_is_written(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    first = decoder_of("dense")
    moe_ffn.save_pretrained(first, folder)

    full = OSError(28, "No space left on device")
    rename = Path.rename

    def rename_but_once(path: Path, target: Path) -> Path:
        if target == folder and ".old" not in path.name:
            raise full
        return rename(path, target)

    with monkeypatch.context() as patch:
        if failing == "config":
            patch.setattr(pretrained, "write_file", Mock(side_effect=full))
        elif failing == "weights":
            error = SafetensorError("No space left on device")
            patch.setattr("safetensors.torch.save_file", Mock(side_effect=error))
        else:
            patch.setattr(Path, "rename", rename_but_once)
        with pytest.raises(ConfigError, match=r"cannot be written \(No space left on device\)"):
            moe_ffn.save_pretrained(decoder_of("tied"), folder)
    assert torch.equal(logits(moe_ffn.load_pretrained(folder)), logits(first))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]

    moe_ffn.save_pretrained(decoder_of("tied"), folder)
    assert moe_ffn.load_pretrained(folder).config.tie_embeddings


@pytest.mark.parametrize("first", ["thesis.tex", "config.json"])
def test_a_folder_of_something_else_is_left_alone(first: str, tmp_path: Path) -> None:
    (tmp_path / first).write_text("{}")
    with pytest.raises(ConfigError) as caught:
        moe_ffn.save_pretrained(decoder_of(), tmp_path)
    assert str(caught.value) == (
        f"'{tmp_path}' has '{first}', which is not part of a model folder and would be lost; move it, or "
        "give another folder"
    )
    assert [path.name for path in tmp_path.iterdir()] == [first]


# -- memory


def save_and_load(rank: int, folder: Path) -> tuple[int, int, int]:
    """Bytes of a folder; the most memory that saving takes in addition to the model, and loading."""

    def read() -> None:
        for parameter in moe_ffn.load_pretrained(folder / "model").parameters():
            parameter.sum()  # in case it is read only now

    torch.use_deterministic_algorithms(True)  # fills what is allocated
    decoder = decoder_of("experts", 256, num_layers=8)
    saving = peak_above(lambda: moe_ffn.save_pretrained(decoder, folder / "model"))
    decoder.to("meta")
    size = sum(file.stat().st_size for file in (folder / "model").iterdir())
    return size, saving, peak_above(read)


def test_no_more_memory_than_the_model_and_a_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained, "MIN_FILE_BYTES", 2**20)
    ((size, saving, loading),) = on_ranks(1, tmp_path / "ranks", save_and_load, tmp_path)
    assert size > 40e6
    assert saving < 0.3 * size
    assert loading < 1.3 * size
