"""Mistakes in options: exit code 2 and a line that names the fix."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REJECTED: dict[str, str | re.Pattern[str]] = {
    # Keys.
    "--model.num_expert 3": "model.num_expert: unknown; did you mean 'model.ffn.num_experts'?",
    "--model.dmodel 3": ("model.dmodel: unknown; did you mean 'd_model'?"),
    "--model.ffn.type dense --model.ffn.num_experts 4": (
        "model.ffn.num_experts: unknown with model.ffn.type 'dense'; it belongs to type 'moe' or "
        "'soft_moe': leave it out, or add --model.ffn.type moe"
    ),
    "--data.corpus.type text --data.corpus.path my_texts": (
        "data.corpus.path: unknown with data.corpus.type 'text'; it belongs to type 'hf_dataset': leave it "
        "out, or add --data.corpus.type hf_dataset; did you mean 'paths'?"
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
    "--dropout 0.1": (
        "dropout: unknown; did you mean 'model.dropout' or 'model.attention.dropout' or "
        "'model.ffn.experts.dropout'?"
    ),
    "--model.ffn.dropout 0.1": (  # not model.dropout, of another section
        "model.ffn.dropout: unknown; did you mean 'model.ffn.experts.dropout'?"
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
    # Budgets.
    "--model.ffn.experts.d_ff.match total_params": (
        "model.ffn.experts.d_ff.of: missing; this option has no default"
    ),
    # Values.
    "--trainer.max_steps 1.5": ("trainer.max_steps: must be a whole number, got 1.5"),
    "--data.corpus my_texts": (
        "data.corpus.type: unknown 'my_texts'; did you mean 'text'?; known: hf_dataset, stdlib, text, "
        "tokens; for your own text files use data.corpus: {type: text, paths: [PATH]}"
    ),
    "--trainer.precision bf16": (
        "trainer.precision: must be one of 'auto', '64-true', '32-true', 'bf16-mixed', "
        "'bf16-true' or '16-mixed', got 'bf16'"
    ),
    "--optimizer lbfgs": "optimizer.type: unknown 'lbfgs'; known: adafactor, adam, adamw, muon, sgd",
    "--optimizer.type sgd --optimizer.momentum 0 --optimizer.nesterov true": (
        "optimizer: nesterov (true) needs a momentum above 0, got momentum 0; give one, such as 0.9"
    ),
    **{
        f"--run.name {name}": f"run.name: must be the name of one folder, up to 200 bytes, got {name!r}"
        for name in ("a/b", ".", "a\udcff")
    },
    # Combinations.
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
    # The command line itself.
    "--seed 1 swiglu": (
        "'swiglu': expected an option such as --model.ffn.type swiglu; write a list as one value: "
        "--data.corpus.paths '[README.md, docs]'"
    ),
    "--model {d_model:&16,&ffn.type:&dense}": (
        "model.ffn.type: is one key with a dot; nest it: ffn: {type: ...}"
    ),
    **{
        f"{typed} 1": f"'{typed}': expected an option such as --model.ffn.type swiglu"
        for typed in ("-seed", "--.seed", "--model..d_model")
    },
    "--=3": "'--=3': expected an option such as --model.ffn.type swiglu",
    "\u2014seed 1": re.compile(
        r"'\u2014seed': expected an option such as .*; write a list as one value"
    ),
    "--SEED 1": re.compile("SEED: unknown; known: seed, .*"),
    "--\x1b[31mseed 1": r"\x1b[31mseed: unknown; did you mean 'seed'?",
    f"--{5_000 * 'x'} 1": re.compile(r"x{28}\.\.\.x{28}: unknown; known: "),
    "--seed=": "seed: must be a whole number, got None",
    "--run.name --seed 3": ("--run.name: needs a value: --run.name VALUE"),
    "--print-config=yes": "--print-config: ignored explicit argument 'yes'",
    "--config": ("--config: expected at least one argument"),
    "--config=": "--config : Is a directory",
    "--config /dev/zero": (
        "--config /dev/zero: is longer than 100000 bytes, so it is not a config"
    ),
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
    "configs/moe.yaml": ("'configs/moe.yaml': expected --config configs/moe.yaml"),
    "--model.d_model 1000000000": re.compile(
        r"model: [\d,]+ parameters and their gradients take [\d,]+ GB, .*; this process may have "
        r"[\d.,]+ GB of memory"
    ),
    "--data.batch_size 9223372036854775808": re.compile("data.batch_size: must be at most "),
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
}
"""Command line, with `&` for a space within a word -> answer."""


@pytest.mark.parametrize("typed", REJECTED, ids=lambda typed: typed[:70])
def test_bad_options_are_rejected_by_path(reject: Callable[..., str], typed: str) -> None:
    answer = REJECTED[typed]
    said = reject(*(word.replace("&", " ") for word in typed.split()))
    if isinstance(answer, str):
        assert said == answer
    else:
        assert answer.match(said), said


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
