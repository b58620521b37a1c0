"""`moe-ffn diff`: its numbers against plain arithmetic, planted differences, and input that is rejected."""

from __future__ import annotations

import json
import math
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import moe_ffn
from moe_ffn import ConfigError, DecoderConfig
from moe_ffn.data.tokenizer import BytesConfig
from moe_ffn.hf.to_transformers import export_transformers
from moe_ffn.interop import replay, watch
from tests.helpers import theirs
from tests.helpers.cases import python_with
from tests.helpers.tiny_runs import Finished, run_here

TEXT = "".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(12))
IDS_BS = torch.tensor(list(TEXT.encode()))[: len(TEXT.encode()) // 32 * 32].view(-1, 32)
FEW = {"max_position_embeddings": 32, "num_hidden_layers": 2}


def save_theirs(
    name: str, folder: Path, change: Callable[[Any], Any] = lambda model: None, **options: Any
) -> Path:
    return theirs.save_with_bytes(name, folder, change, **{**FEW, **options})


def save_ours(folder: Path, seed: int = 0, ffn: Any = None, **options: Any) -> Path:
    torch.manual_seed(seed)
    ffn = ffn or {"type": "moe", "num_experts": 4, "router": {"type": "top_k", "renormalize": True}}
    config = DecoderConfig.model_validate({"d_model": 16, "num_layers": 2, "ffn": ffn, **options})
    moe_ffn.save_pretrained(config.build(257, 32), folder, BytesConfig().build(()))
    return folder


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_theirs("qwen3_moe", tmp_path_factory.mktemp("models") / "qwen")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_ours(tmp_path_factory.mktemp("models") / "ours")


def scale_routers(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.gate.weight.add_(0.05 * layer.mlp.gate.weight.roll(1, 0))


# -- numbers


def test_its_numbers_are_those_of_plain_arithmetic(qwen: Path, tmp_path: Path) -> None:
    other = save_theirs("qwen3_moe", tmp_path / "other", scale_routers)
    found = moe_ffn.diff(qwen, other, TEXT)

    one, two = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (qwen, other))
    with torch.no_grad(), watch(one) as passes_a, watch(two) as passes_b:
        a_BSV, b_BSV = (model(input_ids=IDS_BS).logits.double() for model in (one, two))
    with torch.no_grad(), replay(two, passes_a[0]):
        c_BSV = two(input_ids=IDS_BS).logits.double()

    def kl(other: Tensor) -> Tensor:
        log_a, log_b = a_BSV.log_softmax(-1), other.log_softmax(-1)
        return (log_a.exp() * (log_a - log_b)).sum(-1)

    assert (found.num_tokens, found.window) == (IDS_BS.numel(), 32)
    assert found.kl == pytest.approx(kl(b_BSV).mean().item(), rel=1e-4)
    assert found.kl_replayed == pytest.approx(kl(c_BSV).mean().item(), rel=1e-4)
    assert found.largest_logit == pytest.approx((a_BSV - b_BSV).abs().max().item(), rel=1e-5)
    assert [(p.first, p.last) for p in found.positions] == [(0, 3), (4, 15), (16, 31)]
    for part in found.positions:
        columns = slice(part.first, part.last + 1)
        assert part.kl == pytest.approx(kl(b_BSV)[:, columns].mean().item(), rel=1e-4)
        assert part.num_tokens == len(IDS_BS) * (part.last + 1 - part.first)

    flipped = torch.zeros(IDS_BS.numel(), dtype=torch.bool)
    for name, share in found.flips.items():
        sets = [
            [set(token) for token in passes[0][name].expert_ids_N.view(-1, 3).tolist()]
            for passes in (passes_a, passes_b)
        ]
        changed = torch.tensor([ours != theirs for ours, theirs in zip(*sets, strict=True)])
        assert share == pytest.approx(changed.float().mean().item())
        flipped |= changed
    assert found.flipped == pytest.approx(flipped.float().mean().item())
    assert found.flipped
    assert found.first_flip == "layer_00"

    assert found.num_tensors == len(list(one.parameters()))
    assert {t.name for t in found.tensors} == {f"model.layers.{n}.mlp.gate.weight" for n in (0, 1)}
    worst = found.tensors[0]
    a, b = (model.get_parameter(worst.name) for model in (one, two))
    assert worst.largest == pytest.approx((a - b).abs().max().item())
    assert worst.relative == pytest.approx(((a - b).abs().max() / a.abs().max()).item())
    assert (worst.rows, worst.num_rows) == (6, 6)
    with pytest.raises(FrozenInstanceError):
        found.kl = 0.0  # pyright: ignore[reportAttributeAccessIssue]


def test_a_change_of_zeros_has_no_finite_relative_size(tmp_path: Path) -> None:
    def clear_router(model: Any) -> None:
        model.model.layers[0].mlp.gate.weight.zero_()

    def set_router(model: Any) -> None:
        model.model.layers[0].mlp.gate.weight.fill_(0.25)

    a = save_theirs("qwen3_moe", tmp_path / "a", clear_router)
    b = save_theirs("qwen3_moe", tmp_path / "b", set_router)
    (changed,) = moe_ffn.diff(a, b, TEXT).tensors
    assert (changed.largest, changed.relative) == (0.25, math.inf)


def test_a_difference_of_only_selection_is_all_routing(tmp_path: Path) -> None:
    def move_bias(model: Any) -> None:
        for layer in model.model.layers:
            layer.mlp.gate.e_score_correction_bias.zero_()

    a = save_theirs("deepseek_v3-no-groups", tmp_path / "a")
    b = save_theirs("deepseek_v3-no-groups", tmp_path / "b", move_bias)
    found = moe_ffn.diff(a, b, TEXT)
    assert found.kl > 1e-3
    assert found.routing_share == pytest.approx(1)
    assert "100% of the difference is routing" in found.verdict
    assert {t.name.rpartition(".")[2] for t in found.tensors} == {"e_score_correction_bias"}


def test_a_difference_after_the_last_router_is_not_routing(qwen: Path, tmp_path: Path) -> None:
    other = save_theirs("qwen3_moe", tmp_path / "b", lambda model: model.lm_head.weight.mul_(0.9))
    found = moe_ffn.diff(qwen, other, TEXT)
    assert 0 < found.kl == found.kl_replayed
    assert "No token changes its experts, so the difference is not routing." in found.verdict


def test_a_model_equals_itself_and_its_exported_folder(
    ours: Path, qwen: Path, tmp_path: Path
) -> None:
    decoder = moe_ffn.load_pretrained(ours)
    export_transformers(decoder, tmp_path / "theirs", moe_ffn.load_tokenizer(ours))
    for a, b in ((ours, tmp_path / "theirs"), (tmp_path / "theirs", ours)):
        found = moe_ffn.diff(a, b, TEXT)
        assert (found.num_tensors, found.tensors, found.only_a, found.only_b) == (20, (), (), ())
        assert found.kl < 1e-9
        assert found.flipped == 0
        assert "differ only by rounding" in found.verdict or found.largest_logit == 0
    same = moe_ffn.diff(qwen, qwen, TEXT)
    assert same.verdict == (
        f"25 tensors are equal, and so are the logits of all {IDS_BS.numel()} tokens. "
        "No token changes its experts."
    )


@pytest.mark.parametrize("model", ["qwen", "ours"])
def test_dtypes_and_implementations_are_chosen_on_each_side(
    model: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(model)
    rounded = moe_ffn.diff(folder, folder, TEXT, dtype_b="bfloat16")
    assert (rounded.tensors, rounded.rounding) == ((), "bfloat16")
    assert rounded.kl > 1e-7
    wide = moe_ffn.diff(folder, folder, TEXT, dtype_a="float64")
    assert (wide.tensors, wide.rounding) == ((), "float32")
    assert 0 < wide.kl < 1e-9
    names = ("eager", "moe_ffn") if model == "qwen" else ("loop", "cpu")
    other = moe_ffn.diff(folder, folder, TEXT, experts_a=names[0], experts_b=names[1])
    assert 0 < other.largest_logit < 1e-4


def test_positions_with_logits_that_are_not_finite_are_counted(qwen: Path, tmp_path: Path) -> None:
    def spoil(model: Any) -> None:
        model.model.embed_tokens.weight[ord("9")] = torch.nan

    found = moe_ffn.diff(qwen, save_theirs("qwen3_moe", tmp_path / "b", spoil), TEXT)
    assert 0 < found.not_finite < found.num_tokens
    first = TEXT.index("9") // 32 * 32  # attention multiplies values of later tokens by 0
    assert found.verdict == (
        "1 of 25 tensors differ, model.embed_tokens.weight the most (not finite), and the logits of B "
        f"are not finite in {found.not_finite} of {found.num_tokens} tokens, first at token {first}."
    )
    assert np.isfinite(found.kl)


# -- adapters


def adapt(model: Any, folder: Path, target: str) -> Path:
    peft: Any = pytest.importorskip("peft", reason="peft is not installed here")
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=[target])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model, config)
        torch.manual_seed(1)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        adapted.save_pretrained(str(folder))
    return folder


def test_an_adapter_is_compared_with_its_base(qwen: Path, ours: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(qwen)
    adapter = adapt(model, tmp_path / "adapter", "experts.down_proj")
    found = moe_ffn.diff(qwen, adapter, TEXT)
    names = {f"model.layers.{n}.mlp.experts.down_proj" for n in (0, 1)}
    assert {tensor.name for tensor in found.tensors} == names
    assert found.tensors[0].num_rows == 6
    assert found.flips["layer_00"] == 0 < found.flips["layer_01"]
    assert found.first_flip == "layer_01"

    mine = adapt(moe_ffn.load_pretrained(ours), tmp_path / "mine", "experts.gate_up")
    assert len(moe_ffn.diff(mine, ours, TEXT).tensors) == 2


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_an_adapter_is_merged_into_the_base_that_it_names(qwen: Path, tmp_path: Path) -> None:
    adapter = adapt(AutoModelForCausalLM.from_pretrained(qwen), tmp_path / "a", "experts.down_proj")
    peft: Any = pytest.importorskip("peft", reason="peft is not installed here")
    base = AutoModelForCausalLM.from_pretrained(qwen)
    merged = peft.PeftModel.from_pretrained(base, str(adapter)).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")

    found = moe_ffn.diff(adapter, tmp_path / "merged", TEXT)

    assert (found.tensors, found.kl, found.notes) == ((), 0, ())


# -- options


def test_options_that_differ_are_named(qwen: Path, tmp_path: Path) -> None:
    other = save_theirs("qwen3_moe", tmp_path / "b", norm_topk_prob=True)
    assert moe_ffn.diff(qwen, other, TEXT).notes == (
        "options differ: norm_topk_prob (False in A, True in B)",
    )
    ffn = {"type": "moe", "num_experts": 4}
    one, two = save_ours(tmp_path / "c"), save_ours(tmp_path / "d", ffn=ffn)
    assert moe_ffn.diff(one, two, TEXT).notes == (
        "options differ: ffn.router.renormalize (True in A, False in B)",
    )
    dense = save_ours(tmp_path / "e", ffn={"type": "swiglu"})
    assert moe_ffn.diff(one, dense, TEXT).notes[0] == (
        "options differ: ffn.type ('moe' in A, 'swiglu' in B)"
    ), "without the options that only a mixture has"


def test_another_number_of_experts_for_each_token_is_compared_without_replay(
    qwen: Path, tmp_path: Path
) -> None:
    other = save_theirs("qwen3_moe", tmp_path / "b", num_experts_per_tok=2)
    found = moe_ffn.diff(qwen, other, TEXT)
    assert "options differ: num_experts_per_tok (3 in A, 2 in B)" in found.notes[0]
    assert "the experts of A are not replayed: replay: layer_00 has 2 experts" in found.notes[1]
    assert (found.flipped, found.kl_replayed) == (1, None)


# -- models without routing, or with routers that choose again


def test_dense_models_are_compared_without_routing(tmp_path: Path) -> None:
    one, two = save_theirs("llama", tmp_path / "a"), save_theirs("llama", tmp_path / "b")
    found = moe_ffn.diff(one, two, TEXT, dtype_b="bfloat16")
    assert (found.flips, found.flipped, found.kl_replayed) == ({}, None, None)
    assert found.verdict.endswith("There is no routing to compare.")
    assert "routing is not compared: A and B have no sparse layers" in found.notes[0]
    mixed = moe_ffn.diff(save_ours(tmp_path / "c", ffn="swiglu"), save_ours(tmp_path / "d"), TEXT)
    assert "routing is not compared: A has no sparse layers" in mixed.notes[-1]
    assert any("router" in name for name in mixed.only_b)


def test_rounds_of_a_chain_are_compared_in_their_order(tmp_path: Path) -> None:
    chain = {"type": "chain_of_experts", "rounds": 5, "ffn": {"type": "moe", "num_experts": 4}}
    one, two = (save_ours(tmp_path / str(seed), seed, chain) for seed in range(2))
    found = moe_ffn.diff(one, two, TEXT)
    rounds = ["", *(f"/round_{number}" for number in range(2, 6))]
    assert [*found.flips] == [f"layer_0{n}{each}" for n in range(2) for each in rounds]
    assert found.flips["layer_00"]
    assert found.first_flip == "layer_00"


def test_routers_that_cannot_replay_choose_again(tmp_path: Path) -> None:
    ffn = {"type": "moe", "num_experts": 4, "router": {"type": "noisy_top_k"}}
    top_k = {"type": "moe", "num_experts": 4}
    one, two = (save_ours(tmp_path / str(n), n, ffn, ffn_at={"1": top_k}) for n in (0, 1))
    found = moe_ffn.diff(one, two, TEXT)
    assert found.notes == ("layers with routers that cannot replay choose again: 0",)
    assert found.kl_replayed is not None
    assert list(found.flips) == ["layer_00", "layer_01"]


# -- the program

Diff = Callable[..., Finished]


@pytest.fixture
def diff(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Diff:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "text.py").write_text(TEXT)

    def run(*argv: Any) -> Finished:
        return run_here(*map(str, argv), "--text", "text.py", program="moe_ffn.cli.diff")

    return run


def test_the_program_prints_the_verdict_first_and_writes_json(
    qwen: Path, tmp_path: Path, diff: Diff
) -> None:
    other = save_theirs("qwen3_moe", tmp_path / "other", scale_routers)
    code, out, err = diff(qwen, other, "--json", "out.json", "--tokens", "64", "--window", "16")

    assert (code, err) == (0, "")
    values = json.loads((tmp_path / "out.json").read_text())
    expected = moe_ffn.diff(qwen, other, TEXT, num_tokens=64, window=16)
    assert values["kl"] == expected.kl
    assert values["routing_share"] == expected.routing_share
    assert values["flips"] == expected.flips
    assert " ".join(out.split()).startswith(expected.verdict)
    assert all(len(line) <= 80 for line in out.splitlines() if not line.startswith(("A ", "B ")))
    assert "64 tokens of text in 4 windows of 16" in out
    assert re.search(r"^ +0-3 +16 +0\.\d+ +0\.\d+ +\d", out, re.MULTILINE)
    assert re.search(r"^model\.layers\.0\.mlp\.gate\.weight .* 6 of 6$", out, re.MULTILINE)
    assert re.search(rf"^ +1 +{expected.flips['layer_01']:.2%}$", out, re.MULTILINE)


def test_a_large_text_is_read_in_part(
    ours: Path, qwen: Path, tmp_path: Path, diff: Diff, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_ffn.cli.diff.BYTES_PER_TOKEN", 1)
    code, out, _ = diff(ours, ours, "--tokens", "32", "--window", "9")
    assert code == 0
    assert "27 tokens of text in 3 windows of 9" in out  # the 29 bytes of the first two lines
    (tmp_path / "text.py").write_text("é" * 20)
    assert "32 tokens of text in 1 window of 32" in diff(ours, ours, "--tokens", "32").stdout
    assert "30 tokens of text in 1 window of 30" in diff(qwen, qwen, "--tokens", "31").stdout


def test_recorded_experts_take_the_place_of_those_of_a(
    qwen: Path, tmp_path: Path, diff: Diff
) -> None:
    text = TEXT[:20]
    model = AutoModelForCausalLM.from_pretrained(qwen)
    with watch(model) as passes, torch.no_grad():
        model(input_ids=torch.tensor([list(text.encode())]))
    own = torch.stack([r.expert_ids_N.view(20, 3) for r in passes[0].values()], dim=1)
    other = own.clone()
    other[4, 1] = torch.tensor([n for n in range(6) if n not in own[4, 1]])
    np.savez(tmp_path / "own.npz", routed_experts=own.numpy())
    np.savez(tmp_path / "other.npz", routed_experts=other[:19].numpy().astype(np.uint8))

    same = moe_ffn.diff(qwen, qwen, text, recorded=tmp_path / "own.npz")
    assert (same.flipped, same.kl_replayed) == (0, 0)
    found = moe_ffn.diff(qwen, qwen, text, recorded=tmp_path / "other.npz")
    assert found.flips == {"layer_00": 0, "layer_01": pytest.approx(1 / 20)}
    assert (found.kl, found.routing_share) == (0, None)
    assert found.kl_replayed is not None
    assert found.kl_replayed > 1e-6
    assert f"with the experts of the record the KL is {found.kl_replayed:#.2g}." in found.verdict

    code, out, err = diff(qwen, qwen, "--recorded", "own.npz")
    assert (code, out) == (2, "")
    assert "has 1 sequences of [20] tokens, but the batch has 1 of [" in err


def test_runs_need_no_transformers(
    ours: Path, tmp_path: Path, diff: Diff, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("transformers", "peft"):
        monkeypatch.setitem(sys.modules, name, None)
    code, out, err = diff(ours, save_ours(tmp_path / "other", 1))
    assert (code, err) == (0, "")
    assert out.startswith("15 of 20 tensors differ, ")
    assert "change experts, first in layer 0; with" in " ".join(out.split())


def other_tokenizer(folder: Path) -> Path:
    path = save_theirs("qwen3_moe", folder)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["d"], vocabulary["e"] = vocabulary["e"], vocabulary["d"]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


def without_safetensors(folder: Path) -> Path:
    path = adapter_of()(folder)
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    return path


def adapter_of(**options: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        model = theirs.make("qwen3_moe", theirs.MODELS["qwen3_moe"][1] | FEW | options)
        model.name_or_path = "hub/another"
        return adapt(model, folder, "experts.down_proj")

    return make


def changed(**options: Any) -> Callable[[Path], Path]:
    return lambda folder: save_theirs("qwen3_moe", folder, **options)


def files_of(**options: Any) -> Callable[[Path], Path]:
    """Return a function that writes the config of the model, and files of another."""

    def make(folder: Path) -> Path:
        config = save_theirs("qwen3_moe", folder).joinpath("config.json").read_text()
        save_theirs("qwen3_moe", folder, **options).joinpath("config.json").write_text(config)
        return folder

    return make


DIFFERENT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "vocabulary": (changed(vocab_size=300), "A has a vocabulary of 257 tokens and B of 300"),
    "layers": (changed(num_hidden_layers=3), "A has 2 layers and B has 3"),
    "experts": (changed(num_experts=8), "layer 0 has 6 experts in A and 8 in B"),
    "dense layer": (changed(mlp_only_layers=[1]), "layer 1 is sparse in A and dense in B"),
    "size of a tensor": (
        files_of(num_experts=8), "down_proj' as (8, 32, 24), but its config.json requires (6, 32, 24); copy",
    ),
    "width": (changed(head_dim=20), "self_attn.q_proj.weight is (48, 32) in A and (80, 32) in B"),
    "tokenizer": (other_tokenizer, "their tokenizers split the text differently"),
    "adapter of more layers": (adapter_of(num_hidden_layers=3), "it was trained on 'hub/another'"),
    "adapter of fewer layers": (adapter_of(num_hidden_layers=1), "for which it lacks base_model.model"),
    "adapter of other widths": (adapter_of(moe_intermediate_size=20), "size mismatch for base_model"),
    "adapter as a pickle": (without_safetensors, "has no adapter_model.safetensors; save the adapter as"),
    "nothing": (lambda folder: folder / "x", "x' does not exist; give the folder of a run, a model or"),
    "no model": (lambda folder: folder.parent, "is not a run: it has no config.yaml; give the folder of a"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize(("make", "sentence"), DIFFERENT.values(), ids=DIFFERENT)
def test_what_is_no_version_of_the_model_is_rejected(
    make: Callable[[Path], Path], sentence: str, qwen: Path, diff: Diff, tmp_path: Path
) -> None:
    (tmp_path / "models").mkdir()
    code, out, err = diff(qwen, make(tmp_path / "models" / "b"), "--json", "out.json")
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out.json").exists()


OPTIONS: dict[str, tuple[list[str], str]] = {
    "dtype": (["--dtype-a", "float8"], "--dtype-a: 'float8' is unknown; did you mean 'float"),
    "experts": (
        ["--experts-b", "loop"],
        "--experts-b: 'loop' is unknown for this model; known: eager",
    ),
    "both": (
        ["--dtype-b", "float64", "--experts-b", "grouped_mm"],
        "cannot be computed with --dtype-b float64 and --experts-b grouped_mm (Expected mat_a to be",
    ),
    "window": (["--window", "99"], "--window (99) must not exceed the 32 tokens of the model"),
    "record": (["--recorded", "no.npz"], "'no.npz' cannot be read as a file of arrays"),
    "json": (["--json", "."], "--json: '.' cannot be written"),
    "device": (["--device", "tpu9"], "--device: 'tpu9' is not available"),
}


@pytest.mark.parametrize(("argv", "sentence"), OPTIONS.values(), ids=OPTIONS)
def test_bad_options_are_one_sentence(
    argv: list[str], sentence: str, qwen: Path, diff: Diff
) -> None:
    code, out, err = diff(qwen, qwen, *argv)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


def test_bad_texts_and_missing_libraries_are_one_sentence(
    qwen: Path, tmp_path: Path, diff: Diff, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = adapter_of()(tmp_path / "adapter")
    code, _, err = diff(adapter, adapter)
    assert (code, "are both adapters; give the base model of one of them" in err) == (2, True)
    monkeypatch.setitem(sys.modules, "peft", None)
    assert diff(qwen, adapter) == (2, "", "error: an adapter needs peft: pip install peft\n")
    monkeypatch.setitem(sys.modules, "transformers", None)
    missing = "error: transformers 5 or newer is not installed: pip install transformers\n"
    assert diff(qwen, qwen) == (2, "", missing)
    (tmp_path / "text.py").unlink()
    code, _, err = diff(qwen, qwen)
    assert (code, err) == (
        2,
        "error: --text: 'text.py' cannot be read (No such file or directory)\n",
    )


def test_a_text_without_tokens_is_rejected(ours: Path) -> None:
    with pytest.raises(ConfigError, match="--text: is empty; give some text"):
        moe_ffn.diff(ours, ours, "")


def test_the_code_of_the_guide_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_theirs("qwen3_moe", tmp_path / "models" / "mine")
    page, names = "docs/howto/diff.md", dict[str, Any]()
    exec(python_with("found.verdict", page), names)
    assert capsys.readouterr().out.startswith(
        "25 tensors are equal after rounding to bfloat16, and"
    )
    tokens = np.array([[1, 1, 0, 0], [1, 1, 1, 1]])  # without the last one of each sequence
    experts = np.arange(48).reshape(2, 4, 2, 3) % 3 + 1
    np.savez("rollouts.npz", routed_experts=experts, attention_mask=tokens)
    exec(python_with("read_experts", page), names)
    assert all(layer.mlp.gate.weight.grad.any() for layer in names["model"].model.layers)
