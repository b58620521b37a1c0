"""Mistakes in options: exit code 2 and a line that names the fix."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REJECTED: dict[str, str | re.Pattern[str]] = {
    # Keys.
    "--model.dmodel 3": ("model.dmodel: unknown; did you mean 'd_model'?"),
    "--model.ffn.type dense --model.ffn.num_experts 4": (
        "model.ffn.num_experts: unknown with model.ffn.type 'dense'; it belongs to type 'moe' or "
        "'soft_moe': leave it out, or add --model.ffn.type moe"
    ),
    "--model.ffn {type:&dense,&router:&top_k}": (
        "model.ffn.router: unknown with model.ffn.type 'dense'; it belongs to type 'moe' or "
        "'mixture_of_depths': leave it out, or add --model.ffn.type moe"
    ),
    "--model.ffn_at {0:&{type:&dense,&dff:&3}}": (
        "model.ffn_at.0.dff: unknown; did you mean 'd_ff'?"
    ),
    "--trainer.fast_dev_run true": (
        "trainer.fast_dev_run: unknown; did you mean 'trainer.max_steps'?"
    ),
    "--trainer.enable_checkpointing false": (
        "trainer.enable_checkpointing: is set by the program itself; the best and the last weights are "
        "always kept"
    ),
    **dict.fromkeys(
        ("--resum 3", "--resum"),
        "--resum: unknown; did you mean '--resume'?",
    ),
    **{
        f"--{typed} 3": f"{typed.partition('.')[0]}: unknown; did you mean '{meant}'?"
        for typed, meant in {
            "max_steps": "trainer.max_steps",
            "lr": "optimizer.learning_rate",
            "batchsize": "data.batch_size",
            "k": "model.ffn.router.k",
            "ffn": "model.ffn",
            "ffn.num_experts": "model.ffn",
        }.items()
    },
    "--trainer.learning_rate 3": (
        "trainer.learning_rate: unknown; did you mean 'optimizer.learning_rate'?"
    ),
    "--dropout 0.1": (
        "dropout: unknown; did you mean 'model.dropout' or 'model.attention.dropout' or "
        "'model.ffn.experts.dropout'?"
    ),
    "--data.corpus stdlib --data.corpus.paths books": (
        "data.corpus.paths: unknown with data.corpus.type 'stdlib'; it belongs to type 'text': "
        "leave it out, or add --data.corpus.type text"
    ),
    "--lr --seed 3": "--lr: unknown; did you mean 'optimizer.learning_rate'?",
    # Types.
    "--model.ffn.experts.latent 16": (
        "model.ffn.experts.latent: unknown; 'latent' is a type: --model.ffn.experts '{type: latent, "
        "experts: {...}, width: 16}'"
    ),
    "--model.ffn.swiglu {d_ff:&3}": (
        "model.ffn.swiglu: unknown; 'swiglu' is a type: --model.ffn '{type: swiglu}'"
    ),
    "--model.ffn.type swiglo": (
        "model.ffn.type: unknown 'swiglo'; did you mean 'swiglu'?; known: biased, bilinear, "
        "chain_of_experts, clamped_swiglu, conv, dense, geglu, geglu_tanh, glu, identity, jittered, "
        "mixture_of_depths, moe, ngram_memory, normed, reglu, soft_capped_swiglu, soft_moe, swiglu"
    ),
    "--model.ffn.type no_such_module:Block": (
        "model.ffn.type: importing 'no_such_module' failed: ModuleNotFoundError: "
        "No module named 'no_such_module'"
    ),
    "--model.ffn.type nowhere/block.py:Block": re.compile(
        r"model\.ffn\.type: .*'?nowhere/block\.py'? .*No such file"
    ),
    "--model.ffn.type moe_ffn.ffn:MoEConfg": (
        "model.ffn.type: 'moe_ffn.ffn' has no 'MoEConfg'; did you mean 'MoEConfig'?"
    ),
    "--model.ffn.type moe_ffn.routing:TopKRouterConfig": (
        "model.ffn.type: 'moe_ffn.routing:TopKRouterConfig' must be a subclass of FFNConfig, "
        "got <class 'moe_ffn.routing.top_k.TopKRouterConfig'>"
    ),
    # Budgets.
    "--model.ffn.experts.d_ff.match total_params --model.ffn.experts.d_ff.of {type:&dense,&d_ff:&8}": (
        "model.ffn.experts.d_ff: no width gives about 256 parameters: the nearest, 1, gives 512 "
        "(+100.0%, at most 2% is accepted); match a larger block in model.ffn.experts.d_ff.of, or give this "
        "one fewer experts or a smaller shared expert"
    ),
    "--model.ffn_at {0:&{type:&dense,&d_ff:&{match:&flops_per_token,&of:&identity}}}": (
        "model.ffn_at.0.d_ff.of: 'identity' has no FLOPs per token to match; give another block"
    ),
    "--model.ffn.experts.d_ff.match total_params": (
        "model.ffn.experts.d_ff.of: missing; this option has no default"
    ),
    # Values.
    "--seed '3'": ("seed: must be a whole number, got '3'"),
    "--trainer.max_steps 1.5": ("trainer.max_steps: must be a whole number, got 1.5"),
    "--optimizer.learning_rate .nan": ("optimizer.learning_rate: must be a finite number, got nan"),
    "--model 3": ("model: must be a mapping of options, got 3"),
    "--data.corpus my_texts": (
        "data.corpus.type: unknown 'my_texts'; did you mean 'text'?; known: hf_dataset, stdlib, text, "
        "tokens; for your own text files use data.corpus: {type: text, paths: [PATH]}"
    ),
    "--run.name 12": ("run.name: must be text (in YAML, put quotes around it), got 12"),
    "--trainer.max_steps 0": ("trainer.max_steps: must be at least 1, got 0"),
    "--trainer.precision bf16": (
        "trainer.precision: must be one of 'auto', '64-true', '32-true', 'bf16-mixed', "
        "'bf16-true' or '16-mixed', got 'bf16'"
    ),
    "--optimizer lbfgs": "optimizer.type: unknown 'lbfgs'; known: adafactor, adam, adamw, muon, sgd",
    "--optimizer.type adamw --optimizer.momentum 0.9": (
        "optimizer.momentum: unknown with optimizer.type 'adamw'; it belongs to type 'sgd' or 'muon': "
        "leave it out, or add --optimizer.type sgd"
    ),
    "--optimizer.type sgd --optimizer.momentum 0 --optimizer.nesterov true": (
        "optimizer: nesterov (true) needs a momentum above 0, got momentum 0; give one, such as 0.9"
    ),
    "--optimizer.schedule.type constant --optimizer.schedule.final_fraction 0": (
        "optimizer.schedule.final_fraction: unknown with optimizer.schedule.type 'constant'; it belongs to "
        "type 'linear' or 'cosine' or 'wsd': leave it out, or add --optimizer.schedule.type linear"
    ),
    "--run.name a/b": ("run.name: must be the name of one folder, up to 200 bytes, got 'a/b'"),
    # Combinations.
    "--model.attention.num_heads 3": (
        "model: attention.num_heads (3) must divide d_model (16), or set attention.head_dim"
    ),
    "--model.ffn.router.type expert_choice": (
        "model: layer 0 ('moe') is not causal: router.type 'expert_choice' ranks "
        "tokens against later ones; use 'top_k', or set model.causal: false"
    ),
    "--objective.load_cv2 0.1": (
        "objective.load_cv2 (0.1) counts over a router's noise, but the router of layer 0 is 'top_k'; "
        "use router.type 'noisy_top_k' or objective.load_balance"
    ),
    "--objective.load_cv2 0.1 --model.causal false --model.ffn {type:&mixture_of_depths,&ffn:&moe}": (
        "objective.load_cv2 (0.1) counts over a router's noise, but the router of layer 0 is "
        "'expert_choice'; use router.type 'noisy_top_k' or objective.load_balance"
    ),
    "--objective.bias_rule global_quantile --model.ffn.router {type:&sigmoid_top_k,&groups:&"
    "{num_groups:&4,&keep:&2}}": (
        "objective.bias_rule.type ('global_quantile') assumes that a token chooses its k largest scores + "
        "bias, with scores between 0 and 1, but the router of layer 0 has groups; remove it, or use "
        "bias_rule.type 'sign'"
    ),
    "--objective.bias_rule quantile --model.ffn.router {type:&elastic_top_k,&correction_bias:&true}": (
        "objective.bias_rule.type ('quantile') assumes one k, but the router of layer 0 draws it (k_min, "
        "k_max); use bias_rule.type 'sign'"
    ),
    "--objective.coupling {} --model.ffn swiglu": (
        "objective.coupling couples routers with experts, but no layer has both; use model.ffn.type 'moe'"
    ),
    "--objective.coupling {} --model.ffn.router hash": (
        "objective.coupling needs rows that are tokens, from a router without mlp and input_norm, but the "
        "router of layer 0 is 'hash k=1'; use router.type 'top_k'"
    ),
    "--objective.coupling {} --model.ffn {type:&chain_of_experts}": (
        "objective.coupling needs experts with one router, but those of layer 0 round_2 have several; use "
        "type 'moe'"
    ),
    "--objective.load_balance_pooled 0.1 --model.ffn_at {0:&{type:&moe,&num_experts:&4}}": (
        "objective.load_balance_pooled (0.1) needs equally many experts in every layer, got 4, 8; use "
        "objective.load_balance"
    ),
    "--model.ffn {type:&conv,&causal:&false}": (
        "model: layer 0 ('conv') is not causal: causal (false) with "
        "kernel_size (3) looks ahead; set it to true, or set model.causal: false"
    ),
    "--model.ffn_at {5:&dense}": ("model: ffn_at '5' names none of the 2 layers (0 to 1)"),
    "--model.ffn_at {first:&dense}": (
        "model: ffn_at 'first' must be a layer or a Python slice, such as '0' or '1::2'"
    ),
    # The command line itself.
    "--seed 1 swiglu": (
        "'swiglu': expected an option such as --model.ffn.type swiglu; write a list as one value: "
        "--data.corpus.paths '[README.md, docs]'"
    ),
    "--model {d_model:&16,&ffn.type:&dense}": (
        "model.ffn.type: is one key with a dot; nest it: ffn: {type: ...}"
    ),
    "-seed 1": ("'-seed': expected an option such as --model.ffn.type swiglu"),
    "--run.name --seed 3": ("--run.name: needs a value: --run.name VALUE"),
    "--config": ("--config: expected at least one argument"),
    "--optimizer.adamw_betas [0.9,": re.compile(
        r"--optimizer\.adamw_betas: is not valid YAML \(line 1\): .+"
    ),
    # The machine.
    "--trainer.accelerator abacus": re.compile(
        r"trainer: lightning\.Trainer rejects accelerator: abacus: .*Available names are: .*cpu"
    ),
    "--trainer.max_time few": re.compile(
        r"trainer: lightning\.Trainer rejects .*max_time: few: .+"
    ),
    "--trainer.accelerator cpu --trainer.precision 16-mixed": (
        "trainer.precision (16-mixed) needs a GPU; on a CPU use bf16-mixed"
    ),
    "--trainer.accelerator cpu --model.ffn.experts.backend triton": (
        "model.ffn.experts.backend (triton) runs on cuda, but this run is on cpu; use auto"
    ),
    "--trainer.accelerator cpu --model.ffn.type mixture_of_depths --model.ffn.router.type relu "
    "--model.ffn.router.k 0.5 --model.ffn.ffn.type moe --model.ffn.ffn.experts.type swiglu "
    "--model.ffn.ffn.experts.backend triton": (
        "model.ffn.ffn.experts.backend (triton) runs on cuda, but this run is on cpu; use auto"
    ),
    "configs/moe.yaml": ("'configs/moe.yaml': expected --config configs/moe.yaml"),
    "--model.d_model 1000000000": re.compile(
        r"model: [\d,]+ parameters and their gradients take [\d,]+ GB, .*; this process may have "
        r"[\d.,]+ GB of memory"
    ),
    "--data.batch_size 1000000000 --data.seq_len 1000000": re.compile(
        r"data: .* the token ids of a batch 8,000,000 GB; .* lower data\.batch_size"
    ),
    "--data.cache_dir ~nobodyx/c": re.compile(r"data\.cache_dir: '~nobodyx/c': .+"),
    "--trainer.devices 3": (
        "data.batch_size (4) must be divisible by the number of ranks (3): it counts the sequences of "
        "all ranks together; give 6, or change the number of ranks"
    ),
    "--trainer.num_nodes 2": re.compile(
        r"trainer\.num_nodes \(2\): .* would wait for the other machines forever; start it .* "
        r"torchrun --nnodes 2 "
    ),
    "--trainer.strategy ddp_spawn --trainer.devices 2": (
        "trainer.strategy: must be one of 'auto', 'ddp' or 'ddp_find_unused_parameters_true', "
        "got 'ddp_spawn'"
    ),
    # Data.
    "--data.corpus.paths [no/such.txt]": re.compile(
        r"data\.corpus\.paths: 'no/such\.txt' does not exist.*; check the spelling"
    ),
}
"""Command line, with `&` for a space within a word -> answer."""


@pytest.mark.parametrize("typed", REJECTED)
def test_bad_options_are_rejected_by_path(reject: Callable[..., str], typed: str) -> None:
    answer = REJECTED[typed]
    said = reject(*(word.replace("&", " ") for word in typed.split()))
    if isinstance(answer, str):
        assert said == answer
    else:
        assert answer.match(said), said


def test_three_mistakes_are_all_named(reject: Callable[..., str]) -> None:
    said = reject("--seed", "x", "--model.d_modl", "3", "--sample.top_k", "0", lines=3)
    assert said.splitlines() == [
        "seed: must be a whole number, got 'x'",
        "model.d_modl: unknown; did you mean 'd_model'?",
        "sample.top_k: must be at least 1, got 0",
    ]


def test_a_misplaced_option_in_a_file_is_explained(
    reject: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text("arms: {a: swiglu}")
    assert reject("--config", str(tmp_path / "mine.yaml")) == (
        f"--config {tmp_path / 'mine.yaml'}: is a study; its runs are trained by moe-ffn sweep --config "
        f"{tmp_path / 'mine.yaml'}"
    )
    (tmp_path / "mine.yaml").write_text("trainer: {learning_rate: 1e-3}")

    assert reject("--config", str(tmp_path / "mine.yaml")) == (
        "trainer.learning_rate: unknown; did you mean 'optimizer.learning_rate'?"
    )
