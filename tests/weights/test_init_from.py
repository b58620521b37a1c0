"""Runs begin with all or some weights of a folder, or explain in one sentence why they cannot."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import moe_ffn
from moe_ffn import ConfigError, DecoderConfig
from moe_ffn.config.yaml_files import to_yaml
from moe_ffn.data.tokenizer import BytesTokenizer, Tokenizer, train_bpe
from moe_ffn.model.decoder import Decoder
from moe_ffn.runs.config import TrainConfig
from moe_ffn.weights.init_from import fit_weights
from moe_ffn.weights.initialiser import CalibrationConfig
from moe_ffn.weights.open_model import open_model, read_source
from tests.helpers.tiny_runs import trained

LENGTH = 16
TEXT = [b"the cat sat on a mat, and the dog did not " * 40]

MOE = {"type": "moe", "num_experts": 4, "experts": {"type": "swiglu", "d_ff": 8}}


def decoder_of(vocab_size: int = 257, max_seq_len: int = LENGTH, **options: Any) -> Decoder:
    torch.manual_seed(len(options))
    sizes = {"d_model": 16, "num_layers": 2, "attention": {"num_heads": 2}, "ffn": "swiglu"}
    return DecoderConfig.model_validate({**sizes, **options}).build(vocab_size, max_seq_len)


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., str]:
    def save(tokenizer: Tokenizer | None = None, **options: Any) -> str:
        moe_ffn.save_pretrained(decoder_of(**options), tmp_path / "saved", tokenizer)
        return str(tmp_path / "saved")

    return save


def gated(layers: str) -> list[str]:
    return [f"layers.{layers}.ffn.{name}.weight" for name in ("gate", "up", "down")]


LAYER_2 = [
    *(f"layers.2.attention.{name}.weight" for name in ("query", "key", "value", "output")),
    *("layers.2.attention_norm.weight", "layers.2.ffn_norm.weight"),
]
EXPERTS = [
    f"layers.1.ffn.{n}" for n in ("router.projection.weight", "experts.gate_up", "experts.down")
]
ROUTERS = [f"layers.0,1.ffn.router.{n}" for n in ("correction_bias_E", "projection.weight")]


@pytest.mark.parametrize(
    ("saved", "options", "new", "left"),
    [
        ({}, {}, [], []),
        ({"ffn": MOE}, {"ffn": MOE}, [], []),
        ({}, {"num_layers": 3}, [*LAYER_2, *gated("2")], []),
        ({"num_layers": 3}, {"ffn_at": {"1": MOE}}, EXPERTS, [*LAYER_2, *gated("1,2")]),
        ({"ffn": "geglu"}, {}, gated("0,1"), gated("0,1")),
        ({"ffn": {**MOE, "router": "sigmoid_top_k"}}, {"ffn": MOE}, ROUTERS[1:], ROUTERS),
        ({"tie_embeddings": False}, {}, [], ["unembedding.weight"]),
        ({}, {"tie_embeddings": False}, [], []),
    ],
    ids=["same", "same moe", "deeper", "sparse", "other gate", "other router", "tied", "untied"],
)  # fmt: skip
def test_taken_new_and_unused_weights_are_listed(
    saved: dict[str, Any],
    options: dict[str, Any],
    new: list[str],
    left: list[str],
    folder: Callable[..., str],
) -> None:
    source, target = read_source(folder(**saved), "init_from"), decoder_of(**options)
    fresh = {name: value.clone() for name, value in target.state_dict().items()}

    weights, lines = fit_weights(source, target)

    first, *lines = lines
    assert sorted(line.split()[1] for line in lines if line.startswith("  new:")) == sorted(new)
    assert sorted(line.split()[1] for line in lines if line.startswith("  left:")) == sorted(left)
    assert first.endswith(f"({sum(value.numel() for value in weights.values()):,} numbers)")
    own = source.decoder.state_dict()
    for name, value in weights.items():
        assert torch.equal(value, own[name])
        assert value.shape == fresh[name].shape
    differing = {key for key in {*saved, *options} if saved.get(key) != options.get(key)}
    for key in differing:
        assert any(line.startswith(f"  model.{key}") for line in lines), key


def test_differing_options_are_listed(folder: Callable[..., str]) -> None:
    source = read_source(folder(ffn=MOE), "init_from")
    ffn = {**MOE, "router": {"type": "top_k", "k": 1}}
    _, lines = fit_weights(source, decoder_of(ffn=ffn, max_seq_len=32))

    assert "  model.ffn.router.k is 1 (was 2)" in lines
    assert "  data.seq_len is 32 (was 16)" in lines
    assert lines[-1] == "  it has no tokenizer.json: its token ids may stand for other text"


@pytest.mark.parametrize(
    ("saved", "options", "message"),
    [
        (
            {"ffn": {"type": "swiglu", "d_ff": 24}},
            {"ffn": {"type": "swiglu", "d_ff": 40}},
            r"init_from: layers.0.ffn.gate.weight is \(24, 16\) in '.*saved' and \(40, 16\) in this model, "
            r"and 5 more do not fit: model.ffn.d_ff is 24 there and 40 here; give --model.ffn.d_ff 24$",
        ),
        (
            {"positions": {"type": "learned"}},
            {"positions": {"type": "learned"}, "max_seq_len": 8},
            r"positions\..* is \(16, 16\) .* \(8, 16\) in this model: data.seq_len is 16 there and 8 here; "
            r"give --data.seq_len 16$",
        ),
        (
            {"ffn": MOE, "attention": {"num_heads": 2, "num_kv_heads": 1}},
            {
                "ffn": {
                    "type": "moe",
                    "num_experts": 2,
                    "router": {"type": "top_k", "k": 1, "scale": 2.0},
                }
            },
            r"give --model.ffn.num_experts 4 --model.ffn.router.k 2 --model.ffn.router.scale 1.0 "
            r"--model.ffn.experts.d_ff 8 --model.attention.num_kv_heads 1$",
        ),
        (
            {"ffn": {"type": "swiglu", "d_ff": 24}, "positions": "learned"},
            {"ffn": MOE, "positions": "learned", "max_seq_len": 8},
            r"give --data.seq_len 16$",
        ),
    ],
    ids=["width", "length", "several", "beside another type"],
)
def test_shapes_that_differ_are_rejected(
    saved: dict[str, Any], options: dict[str, Any], message: str, folder: Callable[..., str]
) -> None:
    source = read_source(folder(**saved), "init_from")
    with pytest.raises(ConfigError, match=message):
        fit_weights(source, decoder_of(**options))


def test_tokens_that_mean_other_text_are_rejected(folder: Callable[..., str]) -> None:
    bpe = train_bpe(TEXT, 600)
    other = train_bpe([block.replace(b"the", b"oxo") for block in TEXT], 600)
    source = read_source(folder(bpe, vocab_size=bpe.vocab_size), "init_from")

    source.require_same_tokens(bpe)
    with pytest.raises(
        ConfigError,
        match=rf"'.*saved' has {bpe.vocab_size} tokens, but the tokenizer of this run has 257; use its "
        r"own: --data.tokenizer '\{type: file, path: .*saved/tokenizer.json\}'",
    ):
        source.require_same_tokens(BytesTokenizer())
    assert other.vocab_size == bpe.vocab_size
    with pytest.raises(
        ConfigError,
        match=r"token \d+ is b'.*' in the tokenizer of '.*' but b'.*' in the tokenizer of this run",
    ):
        source.require_same_tokens(other)


def test_unused_rows_of_a_vocabulary_are_no_obstacle_to_a_text_but_to_a_run(
    folder: Callable[..., str], tmp_path: Path
) -> None:
    bpe = train_bpe(TEXT, 300)
    source = read_source(folder(BytesTokenizer(), vocab_size=bpe.vocab_size), "init_from")
    (tmp_path / "text.txt").write_bytes(TEXT[0] * 10)
    data = {
        "corpus": {"type": "text", "paths": [str(tmp_path / "text.txt")]},
        "cache_dir": str(tmp_path / "cache"),
        "seq_len": LENGTH,
    }
    _, prepared = CalibrationConfig.model_validate({"data": data}).prepared(source)
    assert prepared.tokenizer.vocab_size == 257
    with pytest.raises(
        ConfigError, match="tokenizer of this run has 257; its own has 257, so no run"
    ):
        source.require_same_tokens(BytesTokenizer())
    with pytest.raises(ConfigError, match=r"token 0 is b'.*' in the tokenizer of"):
        source.require_same_tokens(bpe)


NO_MODELS: list[tuple[dict[str, str] | str | None, str]] = [
    (None, r"init_from: '.*saved' does not exist; give the folder of a model or of a run"),
    ("a file", r"init_from: '.*saved' is a file, .*; give the folder of a model or of a run"),
    ({}, r"'.*saved' is not a run: it has no config.yaml; give the folder of a model or of a run"),
    (
        {"config.json": '{"model_type": "mixtral"}'},
        r"not a run: .*; it is a model of transformers: .*convert .*saved NEW makes a model folder",
    ),
    (
        {"config.yaml": to_yaml(TrainConfig())},
        r"init_from: '.*saved' has no tokenizer.json, so no model to load",
    ),
]
"""Content of the path: nothing, a file, or a folder of files."""


@pytest.mark.parametrize(("given", "message"), NO_MODELS)
def test_a_folder_that_holds_no_model_is_rejected(
    given: dict[str, str] | str | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "saved"
    if isinstance(given, str):
        path.write_text(given)
    elif given is not None:
        path.mkdir()
        for name, content in given.items():
            (path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_source(str(path), "init_from")


def test_the_model_folder_of_a_run_replaces_its_checkpoints(tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained(), tmp_path / "run"))
    shutil.rmtree(run / "checkpoints")

    source, expected = read_source(str(run), "init_from"), open_model(trained()).decoder

    assert source.folder == run
    assert source.run is not None
    for name, value in expected.state_dict().items():
        assert torch.equal(source.decoder.state_dict()[name], value), name
