"""`RoutingCallback`: rows of `transformers.Trainer` are those of our metrics, and training stays the same."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from moe_ffn import ConfigError
from moe_ffn.interop import RoutingCallback, swap_ffn, watch
from moe_ffn.metrics import CoactivationMetrics, LoadMetrics, TokenMetrics
from moe_ffn.outputs import Routing
from moe_ffn.runs.rows import flat
from moe_ffn.training.monitoring.row_sums import LoggedRow, routing_row
from tests.helpers.transformers_models import SIZES, model_of

NUM_EXPERTS = 4
Example = dict[str, Tensor]
ByStep = list[list[dict[str, Routing]]]
"""Optimizer step -> batch -> layer -> routing."""


def examples(num: int, length: int = 12, padding: int = 0) -> list[Example]:
    """Sequences of random tokens, with padding at the end."""
    generator = torch.Generator().manual_seed(num)
    found: list[Example] = []
    for _ in range(num):
        ids = torch.randint(1, SIZES["vocab_size"], (length,), generator=generator)
        ids = torch.cat([ids, torch.zeros(padding, dtype=torch.long)])
        mask = (ids > 0).long()
        found.append({"input_ids": ids, "attention_mask": mask, "labels": ids.where(ids > 0, -100)})
    return found


def qwen(**options: Any) -> Any:
    return model_of("qwen3_moe", options)


class Observed(Trainer):
    """A Trainer that records the routings of each step with `watch`, next to the callback."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps: ByStep = []

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        if self.state.global_step == len(self.steps):
            self.steps.append([])
        with watch(self.model) as passes:  # pyright: ignore[reportArgumentType]
            loss = super().training_step(model, inputs, *args, **kwargs)
        self.steps[-1] += [{n: r.detach() for n, r in routings.items()} for routings in passes]
        return loss


def make_trainer(
    folder: Path,
    *callbacks: TrainerCallback,
    model: Any = None,
    kind: type[Trainer] = Trainer,
    data: Sequence[Example] = (),
    eval_dataset: Any = None,
    compute_loss_func: Any = None,
    **options: Any,
) -> Any:
    arguments: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return kind(
        model or qwen(),
        TrainingArguments(str(folder), **arguments | options),
        train_dataset=list(data or examples(64)),  # pyright: ignore[reportArgumentType]
        eval_dataset=eval_dataset,
        compute_loss_func=compute_loss_func,
        callbacks=list(callbacks),
    )


Make = Callable[..., Any]


@pytest.fixture
def trainer(tmp_path: Path) -> Make:
    return partial(make_trainer, tmp_path)


def rows_of(trainer: Any, prefix: str = "routing/") -> dict[int, dict[str, float]]:
    """Optimizer step -> the callback's row in the Trainer's history."""
    return {
        row["step"]: {key: value for key, value in row.items() if key not in ("step", "epoch")}
        for row in trainer.state.log_history
        if any(key.startswith(prefix) for key in row)
    }


def expected_row(every: Sequence[Routing], last: Sequence[Routing], *more: Any) -> LoggedRow:
    """Our metrics of one layer, as torchmetrics."""
    values: dict[str, Tensor] = {}
    for metric, batches in ((LoadMetrics, every), (TokenMetrics, last), *((m, last) for m in more)):
        found = metric(num_experts=NUM_EXPERTS)
        for routing in batches:
            found.update(routing)
        values |= found.compute()
    return routing_row({"": values})


def layer_of(row: dict[str, float], layer: str, prefix: str = "") -> dict[str, float]:
    start = f"{prefix}routing/{layer}/"
    return {key.removeprefix(start): v for key, v in row.items() if key.startswith(start)}


def lora() -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed here")
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
    return peft.get_peft_model(
        qwen(), peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=targets)
    )


def swapped() -> Any:
    sizes = {key: SIZES[key] for key in ("vocab_size", "hidden_size", "intermediate_size")}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4))
    swap_ffn(model, [1], {"type": "moe", "num_experts": NUM_EXPERTS})
    return model


MODELS = {"plain": (qwen, 2), "adapters": (lora, 2), "our block": (swapped, 1)}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", MODELS)
def test_rows_are_our_metrics_of_whole_steps(kind: str, trainer: Make) -> None:
    build, num_layers = MODELS[kind]
    run = trainer(
        RoutingCallback(),
        model=build(),
        kind=Observed,
        data=examples(64, padding=3),
        gradient_accumulation_steps=2,
    )
    run.train()

    rows = rows_of(run)
    assert list(rows) == [2, 4]
    assert [len(batches) for batches in run.steps] == [2, 2, 2, 2]
    layers = list(run.steps[0][0])
    assert len(layers) == num_layers
    for (step, row), (before, last) in zip(
        rows.items(), (run.steps[:2], run.steps[2:]), strict=True
    ):
        for layer in layers:
            ends, all_steps = [b[layer] for b in last], [b[layer] for b in before + last]
            expected = {k[len("routing//") :]: v for k, v in expected_row(all_steps, ends).items()}
            found = layer_of(row, layer)
            assert found.pop("dead_experts") == 0, step
            assert found == flat(expected)  # pyright: ignore[reportArgumentType]


def test_training_is_to_the_bit_the_same(trainer: Make) -> None:
    def trained(*callbacks: TrainerCallback) -> tuple[list[Any], dict[str, Tensor]]:
        run = trainer(
            *callbacks,
            model=qwen(attention_dropout=0.2),
            eval_dataset=examples(6),
            eval_strategy="steps",
            eval_steps=2,
            logging_steps=1,
        )
        run.train()
        losses = [
            (row["step"], key, row[key])
            for row in run.state.log_history
            for key in ("loss", "grad_norm", "eval_loss")
            if key in row
        ]
        return losses, run.model.state_dict()

    (losses, weights), (plain_losses, plain_weights) = trained(RoutingCallback()), trained()
    assert losses == plain_losses
    assert len(losses) == 10
    assert all(torch.equal(weights[name], value) for name, value in plain_weights.items())


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_are_computed_again_count_once(reentrant: bool, trainer: Make) -> None:
    def row(**options: Any) -> dict[str, float]:
        run = trainer(RoutingCallback(), max_steps=2, **options)
        run.train()
        return rows_of(run)[2]

    found = row(
        activation_checkpointing=True,
        activation_checkpointing_kwargs={"use_reentrant": reentrant},
    )
    assert found == row()


def test_padding_does_not_count_and_tokens_without_a_label_do(trainer: Make) -> None:
    def row(data: list[Example]) -> dict[str, float]:
        run = trainer(RoutingCallback(), data=data, max_steps=1)
        run.train()
        return rows_of(run)[1]

    plain = row(examples(8))
    assert row(examples(8, padding=5)) == pytest.approx(plain, rel=1e-5)
    prompts = examples(8)
    for example in prompts:
        example["labels"][:-2] = -100
    assert row(prompts) == plain


def test_evaluations_have_rows_of_their_own(trainer: Make) -> None:
    def run_with(**options: Any) -> Any:
        run = trainer(RoutingCallback(), **options)
        run.train()
        return run

    sets = {"code": examples(6, padding=2), "text": examples(10)}
    run = run_with(eval_dataset=sets, eval_strategy="steps", eval_steps=2)
    assert rows_of(run) == rows_of(run_with())
    for name, data in sets.items():
        prefix = f"eval_{name}_"
        rows = rows_of(run, f"{prefix}routing/")
        assert list(rows) == [2, 4]
        batch = {key: torch.stack([example[key] for example in data]) for key in data[0]}
        with watch(run.model) as passes, torch.no_grad():
            run.model(**{key: value[:8] for key, value in batch.items()})
            if len(data) > 8:
                run.model(**{key: value[8:] for key, value in batch.items()})
        for layer in passes[0]:
            batches = [routings[layer] for routings in passes]
            expected = expected_row(batches, batches, CoactivationMetrics)
            found = {f"routing//{key}": v for key, v in layer_of(rows[4], layer, prefix).items()}
            assert found == flat(expected)  # pyright: ignore[reportArgumentType]


class Reporter(TrainerCallback):
    """Keeps what wandb or TensorBoard would get; like them, it comes before the callbacks of a user."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
        self.logged.append(dict(logs))


def test_reporters_get_rows_and_the_terminal_does_not(
    trainer: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter = Reporter()
    run = trainer(reporter, RoutingCallback(every=1, per_expert=False), max_steps=2)
    run.train()

    routing = [logs for logs in reporter.logged if "routing/layer_00/max_violation" in logs]
    assert [len(rows_of(run)), len(routing)] == [2, 2]
    assert all(isinstance(value, float) for logs in routing for value in logs.values())
    assert "routing/layer_00/load/expert_00" not in routing[0]
    assert [logs["loss"] for logs in reporter.logged if "loss" in logs]
    printed = capsys.readouterr().out
    assert "loss" in printed
    assert "routing" not in printed


def collapsed() -> Any:
    """A model whose last router gives every token to the same two of equal experts."""
    model = qwen()
    with torch.no_grad():
        model.model.layers[1].mlp.gate.weight.zero_()
    return model


def test_a_collapsed_router_and_a_spike_raise_alarms(
    trainer: Make, caplog: pytest.LogCaptureFixture
) -> None:
    losses = iter([4.0] * 8 + [8.0, 4.0])

    def loss_of(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
        return outputs.logits.mean() * 0 + next(losses)

    callback = RoutingCallback(alarms={"after_steps": 4})
    run = trainer(
        callback, model=collapsed(), compute_loss_func=loss_of, max_steps=10, logging_steps=1
    )
    with caplog.at_level(logging.WARNING, logger="moe_ffn"):
        run.train()

    balance = (
        "set output_router_logits to True in the model's config, which adds its balancing loss"
    )
    logged = [record.getMessage() for record in caplog.records]
    assert [re.sub(r"expert \d", "expert E", sentence) for sentence in logged] == [
        "alarm: step 4: layer_01: expert E takes 50% of the pairs, MaxVio 1.00 (limit 0.50), for 4 "
        f"steps; {balance}",
        "alarm: step 4: layer_01: 2 of 4 experts had no token in 4 steps; "
        f"{balance}, or take fewer experts or a larger batch",
        "alarm: step 9: train/loss 8.000 is 2.00 times the median of the rows before, 4.000 (limit "
        "1.3); lower learning_rate (now 0.001) or lower max_grad_norm (now 1), or raise warmup_steps",
    ]
    assert [alarm.step for alarm in callback.alarms] == [4, 4, 9]


def test_a_resumed_run_has_the_rows_and_alarms_of_an_uninterrupted_one(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "max_steps": 8,
        "save_strategy": "steps",
        "save_steps": 3,
        "learning_rate": 0.0,
    }

    def run_with(folder: str, start: str | None = None, *callbacks: TrainerCallback) -> Any:
        run = make_trainer(tmp_path / folder, *callbacks, model=collapsed(), **options)
        run.train(resume_from_checkpoint=start)
        return run

    def callback() -> RoutingCallback:
        return RoutingCallback(alarms={"after_steps": 6})

    whole, resumed = callback(), callback()
    run = run_with("whole", None, whole)
    again = run_with("resumed", str(tmp_path / "whole/checkpoint-3"), resumed)  # between two rows
    assert rows_of(again) == rows_of(run)
    assert resumed.alarms == whole.alarms
    assert [alarm.step for alarm in whole.alarms] == [6, 6]
    assert {alarm.kind for alarm in whole.alarms} == {"collapse", "dead_experts"}

    run_with("plain")
    started_without = run_with("joined", str(tmp_path / "plain/checkpoint-6"), callback())
    assert list(rows_of(started_without)) == [8]


def test_a_checkpoint_that_was_not_foreseen_begins_a_new_row(tmp_path: Path) -> None:
    class SaveAtThree(TrainerCallback):
        """Asks for a checkpoint after `RoutingCallback` has seen the step."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = state.global_step == 3

    callbacks = (RoutingCallback(), SaveAtThree())
    run = make_trainer(tmp_path, *callbacks, max_steps=8, learning_rate=0.0)
    run.train()
    again = make_trainer(tmp_path, RoutingCallback(), max_steps=8, learning_rate=0.0)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))

    whole, resumed = rows_of(run), rows_of(again)
    assert list(resumed) == [2, 4, 6, 8]
    assert {step for step in whole if whole[step] != resumed[step]} == {4}


def test_hooks_and_graphs_do_not_outlive_training(trainer: Make) -> None:
    logits: list[weakref.ref[Any]] = []
    left: list[bool] = []

    class Probe(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            left.extend(reference() is not None for reference in logits)

    def hooks(model: Any) -> list[Any]:
        return [
            hook
            for module in model.modules()
            for found in (module._forward_hooks, module._forward_pre_hooks)
            for hook in found.values()
        ]

    model = qwen()
    trainer(model=model, max_steps=1).train()  # transformers sets hooks of its own
    before = hooks(model)
    gate = model.model.layers[1].mlp.gate
    handle = gate.register_forward_hook(
        lambda module, inputs, output: logits.append(weakref.ref(output[0]))
    )
    trainer(RoutingCallback(), Probe(), model=model).train()
    assert len(left) == 10
    assert not any(left)
    handle.remove()
    assert hooks(model) == before

    steps = count()

    def fail(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
        if next(steps) == 2:
            raise RuntimeError("out of memory")
        return outputs.logits.mean()

    with pytest.raises(RuntimeError, match="out of memory"):
        trainer(RoutingCallback(), model=model, compute_loss_func=fail).train()
    assert hooks(model) == before


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of TRL's own
def test_rows_are_separate_from_the_metrics_of_trl(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed here")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed here")
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(SIZES["vocab_size"])}, "w0"))
    tokenizer.pre_tokenizer = Whitespace()
    arguments = {"max_steps": 2, "logging_steps": 1, "save_strategy": "no", "report_to": []}
    run = trl.SFTTrainer(
        qwen(),
        trl.SFTConfig(str(tmp_path), use_cpu=True, bf16=False, disable_tqdm=True, **arguments),
        train_dataset=datasets.Dataset.from_list([{"text": "w5 w9 w12 w7"}] * 16),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="w0", eos_token="w2"
        ),
        callbacks=[RoutingCallback()],
    )
    run.train()

    assert list(rows_of(run)) == [1, 2]
    rows = [row for row in run.state.log_history if "loss" in row]
    assert all("mean_token_accuracy" in row for row in rows)
    assert not any("mean_token_accuracy" in row for row in rows_of(run).values())


RANKS = """
import json, sys
from pathlib import Path
from tests.interop.test_trainer import make_trainer, rows_of
from moe_ffn.interop import RoutingCallback

run = make_trainer(Path(sys.argv[1]), RoutingCallback(), ddp_backend="gloo")
run.train()
if run.args.process_index == 0:
    Path(sys.argv[1], "rows.json").write_text(json.dumps(rows_of(run)))
"""


@pytest.mark.slow
def test_rows_cover_the_batches_of_all_ranks(trainer: Make, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(RANKS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([*torchrun, str(script), str(tmp_path)], check=True, env=environment)
    rows = json.loads((tmp_path / "rows.json").read_text())

    alone = trainer(RoutingCallback(), gradient_accumulation_steps=2)
    alone.train()
    for step, row in rows_of(alone).items():
        by_two = rows[str(step)]
        over_ranks = {key: by_two.pop(key) for key in list(by_two) if "rank_max_violation" in key}
        assert len(over_ranks) == 2
        assert by_two == pytest.approx(row, rel=1e-4)


def test_a_loss_that_goes_around_the_model_is_named(
    trainer: Make, caplog: pytest.LogCaptureFixture
) -> None:
    class Around(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
            return model.model(inputs["input_ids"]).last_hidden_state.mean()

    trainer(RoutingCallback(), kind=Around, max_steps=2).train()
    assert caplog.messages == ["no routing in 2 steps: the loss does not call the model itself"]


def test_mistakes_are_named(trainer: Make) -> None:
    dense = model_of("llama", {})
    with pytest.raises(
        ConfigError, match=r"no routing of LlamaForCausalLM can be .*; remove RoutingCallback to"
    ):
        trainer(RoutingCallback(), model=dense).train()
    several = trainer(RoutingCallback())
    several.args._n_gpu = 2
    with pytest.raises(
        ConfigError, match=r"cannot watch a model in torch\.nn\.DataParallel; start"
    ):
        several.train()
    late = trainer()
    late.add_callback(RoutingCallback())
    with pytest.raises(ConfigError, match=r"too late; pass callbacks=\[RoutingCallback\(\)\] when"):
        late.train()
    with pytest.raises(ConfigError, match="every must be at least 1, got 0"):
        RoutingCallback(every=0)
    with pytest.raises(
        ConfigError, match="alarms: after_step: unknown; did you mean 'after_steps'"
    ):
        RoutingCallback(alarms={"after_step": 3})
