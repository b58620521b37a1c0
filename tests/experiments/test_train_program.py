"""The program from its command line to the files it promises."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from experiments.command_line import parse_config
from experiments.config import TrainConfig
from experiments.run_folder import make_run_folder
from moe_ffn.ffn.config import FFNConfig
from moe_ffn.training.module import LanguageModel

RunTrain = Callable[..., Any]
ROOT = Path(__file__).parents[2]
VOCAB_SIZE = 257
MOE = "{type: moe, num_experts: 4, capacity: {factor: 1.0, eval_factor: 1.0}}"


def config_of(args: list[str]) -> TrainConfig:
    return parse_config(args, TrainConfig, command="train")


@pytest.fixture(scope="module")
def moe_run(run_train: RunTrain, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Six steps of a Mixture of Experts with a capacity; validations at 4 and at the end."""
    return run_train(tmp_path_factory.mktemp("moe"), "--model.ffn", MOE)


@pytest.fixture(scope="module")
def dense_run(run_train: RunTrain, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_train(tmp_path_factory.mktemp("dense"), "--model.ffn", "dense")


# -- the files


def test_the_run_succeeds_and_writes_what_it_lists(moe_run: Any) -> None:
    assert moe_run.code == 0
    listed = re.findall(r"^  (\S+\.\w+) ", moe_run.stdout.partition("Results in")[2], re.MULTILINE)
    written = {str(p.relative_to(moe_run.folder)) for p in moe_run.folder.rglob("*") if p.is_file()}
    assert set(listed) == {
        "config.yaml",
        "facts.json",
        "metrics.csv",
        "summary.json",
        "sample.txt",
        "tokenizer.json",
        "checkpoints/best.ckpt",
        "checkpoints/last.ckpt",
    }
    assert written - {"hparams.yaml"} == set(listed)  # CSVLogger's own, and empty


def test_the_facts_tell_runs_apart(moe_run: Any) -> None:
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


def test_the_last_weights_are_kept_at_every_validation(run_train: RunTrain, tmp_path: Path) -> None:
    seen: list[int] = []

    class Spy(Callback):
        def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            path = Path(trainer.default_root_dir) / "checkpoints/last.ckpt"
            if path.exists():
                seen.append(torch.load(path, weights_only=True)["global_step"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.assemble.progress_display", lambda steps: Spy())
        run = run_train(
            tmp_path, "--trainer.max_steps", "6", "--trainer.validate_every_n_steps", "2"
        )

    assert run.code == 0, run.stderr
    assert seen == [2, 4, 6]
    last = torch.load(run.folder / "checkpoints/last.ckpt", weights_only=True)
    assert last["global_step"] == 6


# torch's tracer looks at `.grad` of what it traces and is warned by torch.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("ffn", ["moe", "swiglu"])
def test_compiled_training_is_the_same_training(
    run_train: RunTrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ffn: str
) -> None:
    # The eager backend traces as the real one does, and generates no code, which takes minutes.
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self: compile_module(self, backend="eager")
    )
    (tmp_path / "plain").mkdir()
    (tmp_path / "compiled").mkdir()
    options = ["--model.ffn", ffn, "--trainer.max_steps", "3"]

    plain = run_train(tmp_path / "plain", *options)
    compiled = run_train(tmp_path / "compiled", *options, "--trainer.compile", "true")

    assert compiled.code == 0, compiled.stderr
    assert float(compiled.rows[0]["train/loss"]) == pytest.approx(
        float(plain.rows[0]["train/loss"]), rel=1e-6
    )
    weights = torch.load(compiled.folder / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert not any("_orig_mod" in name for name in weights)


def test_nothing_is_written_outside_the_run(moe_run: Any) -> None:
    assert [path.name for path in moe_run.where.iterdir()] == ["runs"]


def test_config_yaml_resolves_to_the_same_config(moe_run: Any) -> None:
    assert config_of(["--config", str(moe_run.folder / "config.yaml")]) == config_of(moe_run.args)


def test_metrics_csv_has_a_row_every_other_step_and_one_per_validation(moe_run: Any) -> None:
    train = [row for row in moe_run.rows if "train/loss" in row]
    validation = [row for row in moe_run.rows if "validation/loss" in row]

    assert [int(row["step"]) for row in train] == [2, 4, 6]
    assert [int(row["step"]) for row in validation] == [4, 6]
    assert all(row["trainer/global_step"] == row["step"] for row in moe_run.rows)
    assert all(float(row["train/gradient_norm"]) > 0 for row in train)
    assert all(float(row["train/tokens_per_second"]) > 0 for row in train)


def test_metrics_csv_has_the_promised_columns(moe_run: Any) -> None:
    per_layer = {
        *(f"load/expert_{expert:02d}" for expert in range(4)),
        *("dropped_fraction", "entropy", "max_violation"),
        *("load_balance", "router_z", "capacity_used"),
    }

    assert moe_run.columns == {
        *("step", "trainer/global_step"),
        *("train/loss", "train/objective", "train/load_balance", "train/router_z"),
        *("train/tokens_per_second", "train/learning_rate", "train/gradient_norm"),
        *("validation/loss", "validation/bits_per_byte"),
        *(
            f"{split}routing/layer_{layer:02d}/{name}"
            for split in ("", "validation/")
            for layer in range(2)
            for name in per_layer
        ),
    }


def test_load_sums_to_one_and_agrees_with_the_other_measures(moe_run: Any) -> None:
    for row in moe_run.rows:
        split = "" if "train/loss" in row else "validation/"
        for layer in ("layer_00", "layer_01"):
            prefix = f"{split}routing/{layer}/"
            load = [float(row[f"{prefix}load/expert_{expert:02d}"]) for expert in range(4)]
            dropped = float(row[f"{prefix}dropped_fraction"])
            assert sum(load) == pytest.approx(1)
            # (max - mean) / mean, where the mean of four shares is 1/4.
            assert float(row[f"{prefix}max_violation"]) == pytest.approx(
                4 * max(load) - 1, abs=1e-5
            )
            # With factor 1 there are as many places as pairs: what is not dropped has one.
            assert float(row[f"{prefix}capacity_used"]) == pytest.approx(1 - dropped, abs=1e-6)
            assert 0 < float(row[f"{prefix}entropy"]) <= 1.3863 + 1e-4  # log 4


def test_objective_is_the_loss_and_the_weighted_balancing_losses(moe_run: Any) -> None:
    for row in (row for row in moe_run.rows if "train/loss" in row):
        value = {name: float(row[f"train/{name}"]) for name in ("loss", "load_balance", "router_z")}
        expected = value["loss"] + 0.01 * value["load_balance"] + 0.001 * value["router_z"]
        assert float(row["train/objective"]) == pytest.approx(expected, rel=1e-6)
        for name in ("load_balance", "router_z"):
            layers = [float(row[f"routing/layer_{layer:02d}/{name}"]) for layer in range(2)]
            assert value[name] == pytest.approx(sum(layers) / 2, rel=1e-5)


def test_learning_rate_is_the_one_the_step_was_made_with(moe_run: Any) -> None:
    # warmup_fraction 0.05 of 6 steps rounds to none. Step 6 of 6 is number 5, after 5/6 of the
    # cosine: 0.1 + 0.9 * (1 + cos(5/6 pi)) / 2 = 0.1 + 0.45 * (1 - 0.8660254) = 0.1602886
    rate = config_of(moe_run.args).optimizer.learning_rate
    last = [row for row in moe_run.rows if "train/loss" in row][-1]

    assert float(last["train/learning_rate"]) == pytest.approx(0.1602886 * rate, rel=1e-6)


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


def test_sample_txt_starts_with_the_prompt(moe_run: Any) -> None:
    assert (moe_run.folder / "sample.txt").read_text().startswith("def")


@pytest.mark.parametrize("name", ["best", "last"])
def test_checkpoints_load_with_weights_only_into_a_fresh_model(moe_run: Any, name: str) -> None:
    checkpoint = torch.load(moe_run.folder / f"checkpoints/{name}.ckpt", weights_only=True)
    config = config_of(moe_run.args)
    torch.manual_seed(99)
    module = LanguageModel(
        config.model,
        config.optimizer,
        config.objective,
        byte_lengths=torch.ones(VOCAB_SIZE),
        max_seq_len=config.data.seq_len,
        max_steps=6,
        seed=0,
    )

    module.load_state_dict(checkpoint["state_dict"], strict=True)

    hparams = checkpoint["hyper_parameters"]
    assert hparams["model"] == config.model.to_dict()
    assert hparams["vocab_size"] == VOCAB_SIZE
    assert checkpoint["global_step"] == 6, "the loss falls on this text, so the last is the best"


# -- the screen


def test_the_model_table_adds_up(moe_run: Any) -> None:
    config = config_of(moe_run.args)
    total = config.model.num_params(VOCAB_SIZE, 16)
    active = config.model.num_active_params(VOCAB_SIZE, 16)
    checkpoint = torch.load(moe_run.folder / "checkpoints/last.ckpt", weights_only=True)
    state = {k: v for k, v in checkpoint["state_dict"].items() if "unembedding" not in k}  # tied
    line = next(line for line in moe_run.stdout.splitlines() if line.startswith("total "))

    assert total == sum(value.numel() for value in state.values())
    assert f"{total / 1e3:.2f} k" in line
    assert f"{active / 1e3:.2f} k" in line
    assert "64 tokens per step" in line
    assert "moe, 4 experts (swiglu), top_k k=2" in moe_run.stdout


def test_the_screen_shows_losses_load_sample_and_where_the_results_are(moe_run: Any) -> None:
    summary = json.loads((moe_run.folder / "summary.json").read_text())

    assert (
        f"validation loss {summary['validation_loss']:.4f} nats per token, "
        f"{summary['validation_bits_per_byte']:.3f} bits per byte "
        f"(unigram model: {summary['unigram_loss']:.4f}); "
    ) in moe_run.stdout
    assert "Load of each expert on the validation split" in moe_run.stdout
    for layer, values in enumerate(summary["routing"].values()):
        load = " ".join(f"{100 * share:.1f}" for share in values["load"])
        assert re.search(rf"^ *{layer} +{load.replace(' ', ' +')} ", moe_run.stdout, re.MULTILINE)
    assert "Sample:\ndef " in moe_run.stdout
    assert f"Results in runs/{moe_run.folder.name}/" in moe_run.stdout
    assert "wandb: off" in moe_run.stdout


def test_the_screen_holds_no_control_characters(moe_run: Any) -> None:
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", moe_run.stdout)


def test_standard_error_holds_progress_and_nothing_else(moe_run: Any) -> None:
    other = [line for line in moe_run.stderr.splitlines() if not line.startswith("data: ")]

    assert len(other) == 1
    assert re.fullmatch(r"step 6/6  loss \d\.\d{3}  [\d,]+ tokens/s  0 s left", other[0])


# -- the variants


def test_a_dense_run_has_nothing_of_routing(dense_run: Any) -> None:
    assert dense_run.code == 0
    assert not [n for n in dense_run.columns if "rout" in n or "balance" in n or "expert" in n]
    assert json.loads((dense_run.folder / "summary.json").read_text())["routing"] == {}
    assert "expert" not in dense_run.stdout


def test_a_dropless_run_has_no_capacity_used(run_train: RunTrain, tmp_path: Path) -> None:
    run = run_train(tmp_path, "--trainer.max_steps", "1")

    assert not [name for name in run.columns if "capacity" in name]
    text = (run.folder / "summary.json").read_text()
    assert json.loads(text)["routing"]["layer_00"]["capacity_used"] is None
    assert "NaN" not in text


def test_balancing_losses_are_logged_also_at_weight_zero(
    run_train: RunTrain, tmp_path: Path
) -> None:
    run = run_train(
        tmp_path, "--objective", "{load_balance: 0.0, router_z: 0.0}", "--trainer.max_steps", "2"
    )

    row = next(row for row in run.rows if "train/loss" in row)
    assert float(row["train/load_balance"]) >= 1
    assert float(row["train/router_z"]) > 0
    assert float(row["train/objective"]) == float(row["train/loss"])


@pytest.mark.parametrize("block", sorted(FFNConfig.members))
def test_the_block_is_swapped_by_one_word(run_train: RunTrain, tmp_path: Path, block: str) -> None:
    run = run_train(tmp_path, "--model.ffn.type", block, "--trainer.max_steps", "2")

    assert run.code == 0, run.stderr
    assert run.folder.name.startswith(f"{block}-")
    losses = [float(row["train/loss"]) for row in run.rows if "train/loss" in row]
    assert 4 < losses[0] < 7  # log 257 = 5.55 at random
    is_sparse = FFNConfig.model_validate(block).is_sparse
    assert any("routing/" in name for name in run.columns) == is_sparse


def test_layers_may_differ(run_train: RunTrain, tmp_path: Path) -> None:
    run = run_train(tmp_path, "--model.ffn_at", "{0: swiglu}", "--trainer.max_steps", "2")

    layers = {found[0] for name in run.columns if (found := re.findall(r"layer_\d\d", name))}
    assert layers == {"layer_01"}
    assert re.search(r"^ffn 0 +swiglu ", run.stdout, re.MULTILINE)
    assert re.search(r"^ffn 1 +moe, 8 experts", run.stdout, re.MULTILINE)


def test_accumulation_counts_optimizer_steps(run_train: RunTrain, tmp_path: Path) -> None:
    run = run_train(tmp_path, "--trainer.accumulate_grad_batches", "3")

    assert [(row["step"], "train/loss" in row) for row in run.rows] == [
        ("2", True),
        ("4", True),
        ("4", False),
        ("6", True),
        ("6", False),
    ]
    # 4 sequences x 16 tokens x 3 batches.
    assert "192 tokens per step" in run.stdout


def test_early_stopping_stops_and_writes_the_steps_since_the_last_row(
    run_train: RunTrain, tmp_path: Path
) -> None:
    # No validation improves by 100 nats: the first is the best, and the second is one too many.
    run = run_train(
        tmp_path,
        "--trainer.early_stopping", "{patience: 1, min_delta: 100}",
        "--trainer.max_steps", "50",
        "--trainer.validate_every_n_steps", "3",
        "--logging.every_n_steps", "4",
    )  # fmt: skip

    assert run.code == 0
    assert [int(row["step"]) for row in run.rows if "validation/loss" in row] == [3, 6]
    assert [int(row["step"]) for row in run.rows if "train/loss" in row] == [4, 6]


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradient_norm_is_logged_however_gradients_are_clipped(
    run_train: RunTrain, tmp_path: Path, moe_run: Any, algorithm: str
) -> None:
    run = run_train(
        tmp_path,
        "--model.ffn", MOE,
        "--trainer.gradient_clip_algorithm", algorithm,
        "--trainer.gradient_clip_val", "1e-4",
        "--logging.every_n_steps", "1",
        "--trainer.max_steps", "1",
    )  # fmt: skip

    assert float(run.rows[0]["train/gradient_norm"]) > 0.1, "the norm before clipping"


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed", "bf16-true"])
def test_precisions_train(run_train: RunTrain, tmp_path: Path, precision: str) -> None:
    run = run_train(
        tmp_path, "--trainer.precision", precision, "--trainer.max_steps", "2", "--model.ffn", MOE
    )

    assert run.code == 0
    assert f"precision {precision}; " in run.stdout
    assert 4 < float(run.rows[0]["train/loss"]) < 7


def test_two_runs_of_one_seed_are_equal_and_two_seeds_are_not(
    run_train: RunTrain, tmp_path: Path
) -> None:
    runs = []
    for name, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        (tmp_path / name).mkdir()
        runs.append(
            run_train(tmp_path / name, "--seed", seed, "--model.dropout", "0.1", "--trainer.max_steps", "2")
        )  # fmt: skip
    rows = [
        [{k: v for k, v in row.items() if "second" not in k} for row in run.rows] for run in runs
    ]

    assert rows[0] == rows[1]
    assert rows[0] != rows[2]
    texts = [(run.folder / "sample.txt").read_text() for run in runs]
    assert texts[0] == texts[1]


def test_a_run_that_diverges_is_reported_and_not_a_crash(
    run_train: RunTrain, tmp_path: Path
) -> None:
    run = run_train(
        tmp_path,
        "--optimizer", "{learning_rate: 1e+9, schedule: {warmup_fraction: 0.0}}",
        "--trainer.gradient_clip_val", "0",
        "--model.norm_placement", "post",
    )  # fmt: skip

    assert run.code == 0, run.stderr
    assert "validation loss nan" in run.stdout
    assert "training has diverged: lower optimizer.learning_rate" in run.stdout
    summary = json.loads((run.folder / "summary.json").read_text(), parse_constant=pytest.fail)
    assert summary["validation_loss"] is None
    assert (run.folder / "checkpoints/last.ckpt").exists()


def test_automatic_names_never_collide(tmp_path: Path) -> None:
    config = TrainConfig.model_validate({"run": {"output_dir": str(tmp_path)}})

    folders = [make_run_folder(config) for _ in range(5)]

    assert len(set(folders)) == 5
    assert all(folder.is_dir() and folder.name.startswith("moe-") for folder in folders)


def test_an_own_block_names_its_run(run_train: RunTrain, tmp_path: Path) -> None:
    (tmp_path / "blocks").mkdir()
    (tmp_path / "blocks" / "own.py").write_text(
        "from moe_ffn.ffn.config import DenseConfig, FFNConfig\n"
        "class LowRank(FFNConfig, frozen=True):\n"
        "    rank: int = 4\n"
        "    def build(self, d_model): return DenseConfig(d_ff=self.rank).build(d_model)\n"
        "    def num_params(self, d_model): return DenseConfig(d_ff=self.rank).num_params(d_model)\n"
        "    def flops_per_token(self, d_model): return 2 * self.num_params(d_model)\n"
    )

    run = run_train(
        tmp_path,
        "--model.ffn.type", "blocks/own.py:LowRank",
        "--model.ffn.rank", "3",
        "--trainer.max_steps", "1",
    )  # fmt: skip

    assert run.code == 0, run.stderr
    assert run.folder.name.startswith("LowRank-")
    assert config_of(["--config", str(run.folder / "config.yaml")]).model.ffn.to_dict()["rank"] == 3


# -- wandb


def test_without_wandb_metrics_go_to_the_csv(
    run_train: RunTrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)

    run = run_train(tmp_path, "--logging.wandb.mode", "auto", "--trainer.max_steps", "2")

    assert run.code == 0
    assert "wandb: not installed, metrics are in metrics.csv (pip install wandb)" in run.stdout
    assert "train/loss" in run.columns
    assert not (run.folder / "wandb").exists()


def test_wandb_without_key_network_or_terminal_keeps_the_run_offline(
    tiny_yaml: Path, tmp_path: Path
) -> None:
    # The real client, in a process of its own: no key, no terminal, and WANDB_MODE="" counts as unset.
    home = tmp_path / "home of the client"  # which keeps its logs there
    home.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(home), "COLUMNS": "200"}
    done = subprocess.run(
        [
            sys.executable, "-m", "experiments.train",
            "--config", str(tiny_yaml),
            "--data.cache_dir", str(tmp_path / "cache"),
            "--logging.wandb", "{mode: auto, tags: [a test]}",
            "--model.ffn", MOE,
            "--trainer.max_steps", "3",
            "--run.name", "kept",
        ],
        cwd=tmp_path,
        env={**environment, "WANDB_MODE": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert not re.search(r"api key|enter your choice", done.stdout + done.stderr, re.IGNORECASE)
    (offline,) = (tmp_path / "runs" / "kept" / "wandb").glob("offline-run-*")
    assert f"wandb: offline; to upload: wandb sync runs/kept/wandb/{offline.name}" in done.stdout
    assert not (tmp_path / "wandb").exists()

    records = _wandb_records(offline, environment)
    (run,) = [record["run"] for record in records if record["type"] == "run"]
    assert run["display_name"] == "kept"
    assert run["tags"] == ["a test", "moe"]
    facts = run["config"]["update"]
    assert facts["model"]["ffn"]["num_experts"] == 4
    assert {"corpus_sha256", "git_revision", "num_params", "num_active_params"} <= facts.keys()
    rows = [record["history"]["item"] for record in records if record["type"] == "history"]
    assert [row["trainer/global_step"] for row in rows] == [2, 3, 3]
    assert rows[0].keys() >= {
        "train/loss",
        "train/tokens_per_second",
        "train/learning_rate",
        "train/gradient_norm",
        "routing/layer_01/load/expert_03",
        "routing/layer_00/dropped_fraction",
        "routing/layer_00/entropy",
        "routing/layer_00/max_violation",
        "routing/layer_00/load_balance",
        "routing/layer_00/router_z",
    }
    assert rows[2].keys() >= {
        "validation/loss",
        "validation/bits_per_byte",
        "validation/routing/layer_00/capacity_used",
    }
    # Charts run over optimizer steps, not over wandb's count of rows.
    assert "trainer/global_step" in str([r for r in records if r["type"] == "metric"])
    assert records[-1]["exit"]["exit_code"] == 0


def _wandb_records(run: Path, environment: dict[str, str]) -> list[Any]:
    inspected = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(run)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [json.loads(line) for line in inspected.stdout.splitlines()]


# -- several ranks


@pytest.mark.slow
@pytest.mark.parametrize("validation_tokens", [160, 64], ids=["3 batches", "1 batch"])
def test_two_processes_do_what_one_does(
    run_train: RunTrain, tiny_yaml: Path, tmp_path: Path, validation_tokens: int
) -> None:
    options = [
        "--data.validation_tokens", str(validation_tokens),
        "--logging.every_n_steps", "1",
        "--objective.load_balance", "0.0",
        "--optimizer.learning_rate", "1e-3",
    ]  # fmt: skip
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one = run_train(tmp_path / "one", *options)
    done = subprocess.run(
        [
            sys.executable, "-m", "experiments.train",
            "--config", str(tiny_yaml),
            "--data.cache_dir", str(tmp_path / "cache"),
            "--trainer.devices", "2",
            "--trainer.strategy", "ddp",
            *options,
        ],
        cwd=tmp_path / "two",
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    two = type(one)(0, done.stdout, done.stderr, one.args, tmp_path / "two")
    assert len(two.rows) == len(one.rows) == 8
    assert done.stdout.count("Results in ") == 1
    # The same global batch, whoever computes which part of it.
    assert float(two.rows[0]["train/loss"]) == pytest.approx(
        float(one.rows[0]["train/loss"]), abs=1e-5
    )
    for mine, theirs in zip(one.rows, two.rows, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine.keys() & {"train/loss", "validation/loss", "validation/bits_per_byte"}:
            assert float(theirs[name]) == pytest.approx(float(mine[name]), abs=1e-3), name
    assert "sync_dist" not in done.stderr
