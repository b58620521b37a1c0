"""The program from its command line to the files it promises and what it shows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import moe_ffn
from moe_ffn.config.yaml_files import read_yaml
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.train import ending
from moe_ffn.training.module import LanguageModel
from tests.helpers.tiny_runs import PROGRESS

RunTrain = Callable[..., Any]
ConfigOf = Callable[[list[str]], TrainConfig]
VOCAB_SIZE = 257


# -- the files


def test_the_run_succeeds_and_writes_its_files(moe_run: Any, config_of: ConfigOf) -> None:
    assert moe_run.code == 0
    assert [path.name for path in moe_run.where.iterdir()] == ["runs"]
    assert config_of(["--config", str(moe_run.folder / "config.yaml")]) == config_of(moe_run.args)
    written = {str(p.relative_to(moe_run.folder)) for p in moe_run.folder.rglob("*") if p.is_file()}
    assert written == {
        ".lock",
        "report.html",
        "config.yaml",
        "facts.json",
        "metrics.jsonl",
        "summary.json",
        "sample.txt",
        "samples.jsonl",
        "tokenizer.json",
        "documents.json",
        "checkpoints/best.ckpt",
        "checkpoints/step_00000004.ckpt",
        "checkpoints/step_00000006.ckpt",
        "model/config.json",
        "model/model.safetensors",
        "model/tokenizer.json",
    }


def test_facts_distinguish_runs(moe_run: Any) -> None:
    facts = json.loads((moe_run.folder / "facts.json").read_text())
    config = TrainConfig.model_validate(
        yaml.safe_load((moe_run.folder / "config.yaml").read_text())
    )
    vocab_size, seq_len = VOCAB_SIZE, config.data.seq_len

    assert len(facts["corpus_sha256"]) == 64
    assert facts["num_params"] == config.model.num_params(vocab_size, seq_len)
    assert facts["num_active_params"] == config.model.num_active_params(vocab_size, seq_len)
    assert facts["precision"] in ("32-true", "bf16-mixed")
    assert facts["versions"]["torch"] == torch.__version__
    assert "git_revision" in facts
    assert facts["model"] == config.model.to_dict()


def test_metrics_jsonl_has_a_row_every_other_step_and_one_per_validation(moe_run: Any) -> None:
    train = [row for row in moe_run.rows if "train/loss" in row]
    validation = [row for row in moe_run.rows if "validation/loss" in row]
    assert [row["step"] for row in train] == [2, 4, 6]
    assert [row["step"] for row in validation] == [4, 6]
    assert all(row["train/gradient_norm"] > 0 for row in train)
    assert all(row["train/tokens_per_second"] > 0 for row in train)


def test_metrics_jsonl_has_the_promised_columns(moe_run: Any) -> None:
    per_layer = {
        *(f"load/expert_{expert:02d}" for expert in range(4)),
        *("dropped_fraction", "max_violation", "load_cv", "sequence_max_violation"),
        *("entropy", "entropy_of_mean", "top1_margin", "logit_max"),
        *("experts_per_token", "nonfinite_tokens"),
        *("load_balance", "router_z", "capacity_used"),
    }
    of_one_split = {"": "dead_experts", "validation/": "coactivation_max"}

    assert moe_run.columns == {
        "step",
        *("train/loss", "train/objective", "train/load_balance", "train/router_z"),
        *("train/tokens", "train/tokens_per_second", "train/learning_rate", "train/gradient_norm"),
        *("train/skipped_steps", "train/seconds", "train/step_seconds"),
        *("validation/loss", "validation/bits_per_byte"),
        *(
            f"{split}routing/layer_{layer:02d}/{name}"
            for split, name_there in of_one_split.items()
            for layer in range(2)
            for name in {*per_layer, name_there}
        ),
    }


def test_summary_json_holds_the_last_validation(moe_run: Any) -> None:
    summary = json.loads((moe_run.folder / "summary.json").read_text())
    last = [row for row in moe_run.rows if "validation/loss" in row][-1]

    assert summary["validation_loss"] == float(last["validation/loss"])
    assert summary["validation_bits_per_byte"] == float(last["validation/bits_per_byte"])
    # Bytes as tokens, of which some are the end of a document and stand for no byte: nats per token
    # over ln 2, or a little more.
    assert summary["validation_bits_per_byte"] >= summary["validation_loss"] / 0.6931472 - 1e-6
    assert summary["tokens_per_second"] > 0
    assert set(summary["routing"]) == {"layer_00", "layer_01"}
    assert len(summary["routing"]["layer_00"]["load"]) == 4


# -- the screen


def test_the_model_table_is_shown(moe_run: Any, config_of: ConfigOf) -> None:
    model = config_of(moe_run.args).model
    line = next(line for line in moe_run.stdout.splitlines() if line.startswith("total "))
    assert f"{model.num_params(VOCAB_SIZE, 16) / 1e3:.2f} k" in line
    assert f"{model.num_active_params(VOCAB_SIZE, 16) / 1e3:.2f} k" in line
    assert "64 tokens per step" in line
    assert "moe, 4 experts (swiglu), top_k k=2" in moe_run.stdout


def test_the_screen_shows_losses_load_sample_and_where_the_results_are(moe_run: Any) -> None:
    summary = json.loads((moe_run.folder / "summary.json").read_text())

    assert (
        f"validation loss {summary['validation_loss']:.4f} nats per token, "
        f"{summary['validation_bits_per_byte']:.3f} bits per byte\n"
        f"unigram model   {summary['unigram_loss']:.4f} nats per token\n"
        f"5-gram model    {summary['ngram_loss']:.4f} nats per token\n"
    ) in moe_run.stdout
    assert (
        "not judged yet: collapse, dropped pairs and dead experts need 50 steps, this run has 6\n"
        "not judged yet: loss spikes need 6 rows of metrics, this run has 3\n"
    ) in moe_run.stdout
    assert "Load of each expert on the validation split" in moe_run.stdout
    for layer, values in enumerate(summary["routing"].values()):
        load = " ".join(f"{100 * share:.1f}" for share in values["load"])
        assert re.search(rf"^ *{layer} +{load.replace(' ', ' +')} ", moe_run.stdout, re.MULTILINE)
    assert "Sample:\nsat on the cat" in moe_run.stdout
    assert f"Results in runs/{moe_run.folder.name}/" in moe_run.stdout
    assert "wandb: off" in moe_run.stdout


def test_standard_error_holds_progress_and_nothing_else(moe_run: Any) -> None:
    other = [line for line in moe_run.stderr.splitlines() if not line.startswith(PROGRESS)]
    losses = [float(row["validation/loss"]) for row in moe_run.rows if "validation/loss" in row]

    first, last_step, last = other
    assert first == f"validation at step 4: loss {losses[0]:.4f}"
    assert re.fullmatch(
        r"step 6/6  loss \d\.\d{3}  MaxVio \d\.\d\d \(layer [01]\)(  dropped [\d.]+%)?  [\d,]+ tokens/s",
        last_step,
    )
    assert last == f"validation at step 6: loss {losses[1]:.4f}"


# -- moe_ffn.train, from Python


@pytest.fixture
def options(tiny_yaml: Path, tmp_path: Path) -> dict[str, Any]:
    options = read_yaml(tiny_yaml, "")
    options["data"]["cache_dir"] = str(tmp_path / "cache")
    options["trainer"]["max_steps"] = 1
    return options


def test_a_mapping_or_a_file_trains_a_run(options: dict[str, Any]) -> None:
    options["model"]["ffn"] = {"num_experts": 2}  # the type is that of the default
    options["run"]["name"] = "mine"

    run = moe_ffn.train(options)

    assert run.name == "mine"
    assert run.state == "finished"
    assert (run.option("model.ffn.type"), run.option("model.ffn.num_experts")) == ("moe", 2)
    Path("mine.yaml").write_text((run.folder / "config.yaml").read_text().replace("name: mine", ""))
    again = moe_ffn.train("mine.yaml")
    assert again.folder != run.folder
    assert again.summary.validation_loss == run.summary.validation_loss


def test_a_mistake_is_the_usual_sentence(options: dict[str, Any]) -> None:
    options["model"]["ffn"] = {"num_expert": 2}
    with pytest.raises(moe_ffn.ConfigError) as rejected:
        moe_ffn.train(options)
    assert str(rejected.value) == ("model.ffn.num_expert: unknown; did you mean 'num_experts'?")
    with pytest.raises(moe_ffn.ConfigError, match=r"^'none.yaml': .*No such file"):
        moe_ffn.train("none.yaml")
    assert not Path("runs").exists()


def test_a_run_that_diverges_raises(options: dict[str, Any]) -> None:
    options["optimizer"] = {"learning_rate": 1e9, "schedule": {"warmup_fraction": 0.0}}
    options["trainer"] |= {
        "max_steps": 40,
        "guard": {"max_loss_ratio": 1.01, "max_skipped_in_a_row": 1},
    }
    options["run"]["name"] = "diverged"
    with pytest.raises(moe_ffn.TrainingError, match=r"^step \d+: 1 step was skipped"):
        moe_ffn.train(options)
    assert moe_ffn.load_run("runs/diverged").alarms[-1].kind == "skipped_step"


def test_only_the_first_of_several_processes_returns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("moe_ffn.runs.train.start", lambda config, resume: tmp_path)
    monkeypatch.setattr("moe_ffn.runs.train.is_first_rank", lambda: False)
    with pytest.raises(SystemExit) as ended:
        moe_ffn.train({})
    assert ended.value.code == 0


REPOSITORY = Path(__file__).parents[2]


def head_of_page(where: Path) -> str:
    """The text at the top of the page of the only run in `where`."""
    (page,) = where.glob("runs/*/report.html")
    html = page.read_text()
    head = html[html.index("<header>") : html.index("</header>")]
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", head)))


def test_the_page_of_a_finished_run(moe_run: Any) -> None:
    assert "finished , step 6 of 6" in head_of_page(moe_run.where)
    assert "report.html: " not in moe_run.stderr


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ArithmeticError("no such number")])
def test_the_page_of_a_failed_run_calls_it_interrupted(
    run_train: RunTrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    step = LanguageModel.training_step

    def fail(module: LanguageModel, *args: Any, **options: Any) -> Any:
        if module.global_step == 3:
            raise error
        return step(module, *args, **options)

    monkeypatch.setattr(LanguageModel, "training_step", fail)
    if isinstance(error, KeyboardInterrupt):
        assert run_train(tmp_path, has_page=True).code == 130
    else:
        with pytest.raises(ArithmeticError, match="no such number"):
            run_train(tmp_path, has_page=True)

    assert "interrupted , step 2 of 6" in head_of_page(tmp_path)


def test_a_finished_run_is_not_lost_to_a_page_that_cannot_be_made(
    run_train: RunTrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: Any, **_options: Any) -> None:
        raise ZeroDivisionError("in the page\nand more")

    monkeypatch.setattr(ending, "write_report", fail)
    run = run_train(tmp_path, "--trainer.max_steps", "2")

    assert run.code == 0
    assert "report.html: in the page" in run.stderr.splitlines()
    assert (run.folder / "summary.json").exists()
    assert "Results in" in run.stdout
