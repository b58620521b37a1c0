"""`moe-ffn evaluate`: the figures of a validation again, of any text, and bad input."""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import moe_ffn
from moe_ffn.cli.evaluate import with_progress
from moe_ffn.data.tokenizer import BytesTokenizer
from moe_ffn.training.evaluation import StridedBatches
from moe_ffn.training.evaluation import evaluate as evaluate_batches
from moe_ffn.training.monitoring.json_lines import Row, read_lines
from tests.helpers.tiny_runs import cli, run_here, trained

evaluate = cli("evaluate", "--device", "cpu", columns=80)
TEXT = "the cat sat on a mat.\ndef f(x):\n    return x\n" * 5


@pytest.fixture
def figures(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Contents of the file that `--json` writes."""

    def run(*argv: str | Path) -> dict[str, Any]:
        code, _, err = evaluate(*argv, "--json", tmp_path / "figures.json")
        assert (code, err) == (0, "")
        return json.loads((tmp_path / "figures.json").read_text())

    return run


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {"model__ffn": "{type: moe, num_experts: 4, capacity: {factor: 1.0, eval_factor: 1.0}}"},
        {"model__ffn": "swiglu", "data__tokenizer": "{type: bpe, vocab_size: 512}"},
        {"model__causal": "false", "trainer__precision": "bf16-true"},
        pytest.param({"trainer__precision": "bf16-mixed"}, marks=pytest.mark.slow),
    ],
    ids=["experts", "dense bpe", "masked bf16-true", "bf16-mixed"],
)
def test_the_loss_of_the_best_validation_is_reproduced_to_the_bit(
    figures: Callable[..., dict[str, Any]], changes: dict[str, str]
) -> None:
    run = trained(**changes)
    rows = [dict(row) for row in read_lines(run / "metrics.jsonl", Row)]
    best = min((r for r in rows if "validation/loss" in r), key=lambda r: r["validation/loss"])

    found = figures(run)

    assert found["loss"] == best["validation/loss"]
    assert found["bits_per_byte"] == best["validation/bits_per_byte"]
    assert found["perplexity"] == math.exp(found["loss"])
    for layer, values in found["routing"].items():
        for key in ("load", "max_violation", "dropped_fraction", "entropy"):
            assert values[key] == pytest.approx(best[f"validation/routing/{layer}/{key}"], rel=1e-6)


def test_it_prints_loss_perplexity_bits_and_routing(text: Path) -> None:
    code, out, err = evaluate(trained(), "--data", text)

    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"{text}, windows of 16 tokens, stride 16; 32-true on cpu"
    assert re.fullmatch(r"loss           \S+ nats per token", lines[1])
    assert lines[2].startswith("perplexity     ")
    assert lines[3].startswith("bits per byte  ")
    assert lines[4] == f"predicted      {len(TEXT) - 1} tokens, {len(TEXT) - 1} bytes of text"
    names = "layer experts load entropy MaxVio dropped entropy dead experts"
    assert lines[6].split() == names.split()
    assert [line.split()[:2] for line in lines[7:]] == [["0", "8"], ["1", "8"]]


def test_a_text_its_tokens_and_the_folder_of_the_model_give_the_same_figures(
    figures: Callable[..., dict[str, Any]], text: Path, tmp_path: Path
) -> None:
    np.save(tmp_path / "tokens.npy", np.frombuffer(TEXT.encode(), np.uint8).astype(np.int32))
    np.frombuffer(TEXT.encode(), np.uint8).astype(np.uint16).tofile(tmp_path / "tokens.bin")
    model = trained() / "model"

    expected = figures(trained(), "--data", text)

    assert expected["num_tokens"] == len(TEXT) - 1
    for argv in (
        (trained(), "--data", tmp_path / "tokens.npy"),
        (trained(), "--data", tmp_path / "tokens.bin"),
        (model, "--data", text, "--data.batch_size", "4"),
    ):
        found = figures(*argv)
        for key in ("loss", "bits_per_byte", "num_tokens", "num_bytes", "routing"):
            assert found[key] == expected[key], (argv, key)


def test_a_model_folder_is_evaluated_in_the_dtypes_of_its_weights(
    figures: Callable[..., dict[str, Any]], text: Path, tmp_path: Path
) -> None:
    """Routers may stay in float32, as an audit recommends."""
    decoder = moe_ffn.load_pretrained(trained() / "model")
    exact = copy.deepcopy(decoder.routers())
    decoder.to(torch.bfloat16)
    for name, router in decoder.routers().items():
        router.float().load_state_dict(exact[name].state_dict())
    tokenizer = moe_ffn.load_tokenizer(trained() / "model")
    moe_ffn.save_pretrained(decoder, tmp_path / "model", tokenizer)
    batches = StridedBatches(tokenizer.encode(TEXT).numpy(), 16, 16, 8)
    expected = evaluate_batches(decoder, batches, tokenizer.byte_lengths, precision="bf16-true")

    found = figures(tmp_path / "model", "--data", text, "--data.batch_size", "8")

    assert found["loss"] == expected.loss


def test_a_smaller_stride_predicts_each_token_behind_more_text(
    figures: Callable[..., dict[str, Any]], text: Path
) -> None:
    losses = {}
    for stride in ("16", "4", "1"):
        found = figures(trained(), "--data", text, "--stride", stride)
        losses[stride] = found["loss"]
        assert found["num_tokens"] == len(TEXT) - 1
    assert losses["16"] == figures(trained(), "--data", text)["loss"]
    assert len(set(losses.values())) == 3


def test_two_documents_have_the_end_of_one_between_them(
    figures: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "1.txt").write_text("the cat\n")
    (folder / "2.txt").write_text("sat on\n")
    for name in ("0.txt", "1b.txt", "3.txt"):
        (folder / name).touch()  # training leaves empty documents out
    both = [*b"the cat\n", BytesTokenizer().end_of_document, *b"sat on\n"]
    np.save(tmp_path / "tokens.npy", np.array(both))

    found = figures(trained(), "--data", folder)

    assert (found["num_tokens"], found["num_bytes"]) == (15, 14)
    assert found["loss"] == figures(trained(), "--data", tmp_path / "tokens.npy")["loss"]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_sees_how_many_batches_are_done(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with with_progress("evaluating", StridedBatches(np.arange(40), 8, 4, 3)) as batches:
        assert len(list(batches)) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert ("3/3" in captured.err) == bool(captured.err) == is_terminal


def test_a_text_of_two_tokens_has_one_to_predict(tmp_path: Path, figures: Any) -> None:
    (tmp_path / "two.txt").write_text("ab")
    assert figures(trained(), "--data", tmp_path / "two.txt")["num_tokens"] == 1


def test_the_corpus_of_a_config_or_of_options_is_validated_on(
    figures: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """The corpus is read with the tokenizer of the model and in the windows of training."""
    run, corpus = trained(), trained().parents[1] / "corpus"
    own, whole = figures(run), figures(run, "--stride", "16")
    other = trained(data__tokenizer="{type: bpe, vocab_size: 512}", model__ffn="swiglu")
    options = ("--data.corpus.type", "text", "--data.corpus.paths", str(corpus))

    assert figures(run, "--data", other / "config.yaml")["loss"] == own["loss"]
    assert figures(*options, run)["loss"] == own["loss"]
    assert whole["num_tokens"] > own["num_tokens"]
    cache = ("--data.cache_dir", tmp_path / "cache")
    of_model = figures(run / "model", *options, *cache, "--data.validation_tokens", "160")
    assert of_model["loss"] == pytest.approx(own["loss"], abs=1e-6)  # in other batches


def test_the_text_of_a_run_may_be_prepared_in_another_cache(
    figures: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    run = trained()
    code, out, _ = evaluate(run, "--data.cache_dir", tmp_path / "cache")

    assert code == 0
    assert f"{figures(run)['loss']:.4f} nats" in out
    assert any((tmp_path / "cache").iterdir())


# -- other k

ELASTIC = {"model__ffn": "{type: moe, num_experts: 4, router: {type: elastic_top_k, k_max: 4}}"}


def test_loss_and_cost_of_each_k_are_shown_written_and_drawn(
    figures: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    elastic, fixed = trained(**ELASTIC), trained()
    page, out = tmp_path / "k.html", tmp_path / "k.json"

    code, printed, err = evaluate(elastic, fixed, "--k", "1..3,2", "--html", page, "--json", out)

    assert (code, err) == (0, "")
    written = json.loads(out.read_text())["models"]
    assert list(written) == [str(elastic), str(fixed)]
    rows = [line.split() for line in printed.splitlines()]
    assert rows[1] == ["k", "loss", "perplexity", "FLOPs", "per", "token"]
    for number, run in enumerate((elastic, fixed)):
        points = written[str(run)]["k"]
        for row, point in zip(rows[5 * number + 2 :], points, strict=False):
            assert row[:2] == [str(point["k"]), f"{point['loss']:.4f}"]
            assert row[3] == f"{point['flops_per_token']:,}"
        assert [point["k"] for point in points] == [1, 2, 3]
        costs = [point["flops_per_token"] for point in points]
        assert costs[1] - costs[0] == costs[2] - costs[1] > 0
        assert len({point["loss"] for point in points}) == 3
        assert points[1]["loss"] == figures(run)["loss"]  # k = 2 is that of its config
    facts = json.loads((fixed / "facts.json").read_text())
    assert written[str(fixed)]["k"][1]["flops_per_token"] == facts["flops_per_token"]
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert "k = 3" in text


def test_a_layer_may_have_its_own_k(figures: Callable[..., dict[str, Any]]) -> None:
    def routed(*argv: str) -> list[float]:
        (model,) = figures(trained(), "--k", "3", *argv)["models"].values()
        return [layer["experts_per_token"] for layer in model["k"][0]["routing"].values()]

    assert routed() == [3, 3]
    assert routed("--k-at", "1=1") == [3, 1]
    assert routed("--k-at", ":=4", "--k-at", "0=2") == [2, 4]


def test_a_changed_corpus_is_an_error(tmp_path: Path) -> None:
    """The figures would be those of another text under the same name."""
    run = Path(shutil.copytree(trained(), tmp_path / "run"))
    documents = json.loads((run / "documents.json").read_text())
    documents["digests"][0][1] = documents["corpus_sha256"] = "0" * 64
    (run / "documents.json").write_text(json.dumps(documents))

    done = run_here(str(run), program="moe_ffn.cli.evaluate")

    assert done.code == 2
    assert "has changed" in done.stderr
    assert "restore it, or give a text with --data" in done.stderr


def test_a_missing_lm_eval_is_reported_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = run_here(str(trained()), "--tasks", "x", program="moe_ffn.cli.evaluate")
    assert done.code == 2
    assert done.own_lines == ["error: --tasks: lm-eval is not installed: pip install -e '.[eval]'"]


def test_tasks_of_a_folder_are_shown_and_written(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed here")
    from tests.helpers.tiny_runs import write_tasks

    write_tasks(tmp_path / "tasks")
    code, out, _ = evaluate(trained(), "--tasks", tmp_path / "tasks", "--json", "figures.json")

    assert code == 0
    table = [line.split() for line in out.splitlines()]
    assert table[0] == ["task", "metric", "value", "standard", "error"]
    shown = {tuple(row[:2]): float(row[2]) for row in table[1:-1]}
    written = json.loads(Path("figures.json").read_text())["tasks"]
    assert "loss" not in json.loads(Path("figures.json").read_text())
    assert {task for task, _ in shown} == set(written) == {"tiny_choice", "tiny_rolling"}
    for (task, key), value in shown.items():
        assert value == pytest.approx(written[task][key], abs=1e-4)
    assert (
        torch.tensor([v for values in written.values() for v in values.values()]).isfinite().all()
    )
