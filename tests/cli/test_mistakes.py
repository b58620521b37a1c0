"""Mistakes at every program: exit code 2, one line that names the fix, and nothing is written."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import moe_ffn
from moe_ffn.data.tokenizer import BytesTokenizer
from tests.helpers import theirs
from tests.helpers.same_run import snapshot
from tests.helpers.synthetic_run import write_arm
from tests.helpers.tiny_runs import run_here

NO_NAME = (
    "must be a name as in https://wandb.ai/ENTITY/PROJECT: not empty, without spaces at its ends, and "
    r"without / \ # ? % :"
)
LAYERS = "--layers: must be layer numbers separated by commas, such as 0,3, got"
NOT_MADE_HERE = "exists and was not made by this program; choose another file, or remove it"
NO_RUN = "is not a run: it has no config.yaml; it holds runs; give one of them, such as runs/a"
OVERALL = "--help, --version, --verbose, --quiet"

SHAPE = (
    "must be T,D,F,E,K,dtype, five whole numbers from 1 to 1000000000 and one of fp32, bf16, fp16, as in "
    "--shape 2048,512,512,8,2,fp32"
)

MISTAKES = {
    # python -m experiments.benchmark
    "benchmark --device gpu": "--device: invalid choice: 'gpu' (choose from 'auto', ...",
    "benchmark --device cuda --shape 64,16,8,4,2,fp32": (
        "--device (cuda) needs a GPU, but torch ... finds none; use --device cpu"
    ),
    "benchmark --rounds 0": "--rounds: must be a whole number from 1 to 1000000000, got '0'",
    "benchmark --shape 1,2,3": f"--shape 1,2,3: {SHAPE}",
    "benchmark --shape 64,16,8,4,2,fp64": f"--shape 64,16,8,4,2,fp64: {SHAPE}",
    "benchmark --shape 64,16,8,4,9,fp32": (
        "--shape 64,16,8,4,9,fp32: K (9) must not exceed E (4); lower K or raise E"
    ),
    # compare
    "compare none": "'none' does not exist; give the folder of a run, or a folder with runs",
    "compare empty": (
        "'empty' has no runs and no results.jsonl; give the folder of a run, such as runs/my-run, or a "
        "folder with runs"
    ),
    "compare study --baseline dens": (
        "baseline: there is no finished run of an arm 'dens'; did you mean 'dense'?"
    ),
    "compare unfinished": (
        "'unfinished/dense-seed0' is not finished: it is at step 200 of 200; 1 more cannot be compared either"
    ),
    "compare study --html mine.txt": f"--html: 'mine.txt' {NOT_MADE_HERE}",
    "compare run --baselin a": "--baselin: unknown; did you mean '--baseline'?",
    # convert
    "convert none new": "'none' is not there; give the folder of a model",
    "convert bert new": "'bert/config.json': model_type 'bert' is not supported; known: ...",
    "convert dense new": 'model.ffn.type ("dense") has no counterpart in transformers: ...',
    "convert dense new --trust_code": "--trust_code: unknown; did you mean '--trust-code'?",
    # dashboard
    "dashboard --project p": "the following arguments are required: --entity",
    "dashboard --entity '' --project p": f"--entity ('') {NO_NAME}",
    "dashboard --entity e --project e/p": f"--project ('e/p') {NO_NAME}",
    "dashboard --entity 'e\n' --project p": f"--entity ('e\\n') {NO_NAME}",
    "dashboard --entity e --project p --colour": (
        f"--colour: unknown; known: {OVERALL}, --entity, --project, --json"
    ),
    # demo
    "demo --text ''": "--text: is empty; give some text...",
    "demo --text '  \n '": "--text: ...",
    "demo --output mine.txt": f"--output: 'mine.txt' {NOT_MADE_HERE}",
    "demo --output /proc/demo.html": "--output: '/proc/demo.html' cannot be written...",  # not even by root
    # evaluate
    "evaluate run --k 9": (
        "'run': --k: layer 0: router.k (9) must not exceed num_experts (4); lower k"
    ),
    "evaluate run --k 1 --k-at 1=9": (
        "'run': --k-at: layer 1: router.k (9) must not exceed num_experts (4); lower k"
    ),
    "evaluate run --k 1 --k-at 2=1": "'run': --k-at '2' names none of the 2 layers (0 to 1)",
    "evaluate run --k 1 --k-at 2": "--k-at: must be LAYERS=K, such as 0=4 or 1::2=1, got '2'",
    **{
        f"evaluate run --k {bad}": (
            f"--k: must be numbers from 1 or ascending ranges, such as 1..8 or 1,2,4, got '{bad}'"
        )
        for bad in ("0", "3..1", "1..", "2,", "x", "1..99999")
    },
    "evaluate run --html k.html": (
        "--html: needs --k; add --k, such as --k 1..8, or leave --html out"
    ),
    "evaluate run --k-at 0=1": "--k-at: needs --k; add --k, such as --k 1..8, or leave --k-at out",
    "evaluate run other": (
        "'other' is a second folder, which needs --k; evaluate one at a time, or give --k"
    ),
    "evaluate run --k 1 --tasks x": "--tasks: cannot be used with --k; leave one of them out",
    "evaluate run/model": (
        "'run/model' is a model folder, which does not name a text; give one with --data"
    ),
    "evaluate run/model --store-answers a.safetensors": (
        "'run/model' is a model folder, which does not name a text; give one with --data.corpus or --data "
        "config.yaml"
    ),
    "evaluate untold --data text.txt": (
        "'untold' has no tokenizer.json, which turns text into tokens; put one there"
    ),
    "evaluate untold --data.corpus.type stdlib": (
        "'untold' has no tokenizer.json, which turns text into tokens; put one there"
    ),
    "evaluate theirs --data text.txt": (
        "'theirs' is not a run: it has no config.yaml; it is a model of transformers: moe-ffn convert theirs "
        "NEW makes a model folder of it"
    ),
    "evaluate masked --data text.txt": (
        "'masked' has model.causal (false), but no masked fraction (objective.masked_fraction)..."
    ),
    "evaluate run --data absent.txt": "--data: 'absent.txt' does not exist...",
    "evaluate run --data one.txt --json figures.json": (
        "--data: 'one.txt' has 1 token; give a text of two or more"
    ),
    "evaluate run --data tokens.npy": (
        "--data: 'tokens.npy' holds the token 300, but the model's tokenizer has a vocabulary of 257..."
    ),
    "evaluate run --data text.txt --data.corpus.type stdlib": (
        "--data and --data.corpus name two texts; give only one of them"
    ),
    "evaluate run --data.tokenizer bpe": "--data.tokenizer: comes from the model; leave it out",
    "evaluate run --data.seq_len 17": (
        "data.seq_len (17) must not exceed the model's 16 tokens; lower it"
    ),
    "evaluate run --stride 17": "--stride (17) must not exceed data.seq_len (16)",
    "evaluate run --device tpu9": "--device: 'tpu9' is not available; give cpu...",
    "evaluate run --device meta": "--device: 'meta' is not available...",
    "evaluate small --data text.txt": (
        "'small/tokenizer.json' does not fit this model: it has token id 256, but the vocabulary has 200 "
        "tokens; copy the tokenizer of this model"
    ),
    "evaluate run --tasks empty": (
        "--tasks: 'empty' has no task file of lm-eval (.yaml); give another folder..."
    ),
    # generate
    "generate run --prompt aaaaaaaaaaaaaaaaa": (
        "--prompt: has 17 tokens, but the model takes sequences of 16 (data.seq_len); give a shorter text"
    ),
    "generate small --prompt a": (
        "'small/tokenizer.json' does not fit this model: it has token id 256, but the vocabulary has 200 "
        "tokens; copy the tokenizer of this model"
    ),
    "generate run --prompt ''": "prompt: must not be empty...",
    "generate run --prompt a --stop ''": "stop.0: must not be empty...",
    "generate run --prompt a --top-p 1.5": "top_p: must be at most 1.0, got 1.5",
    "generate --prompt -3 -- --promt": "'--promt' does not exist; give the folder of a model or of a run",
    "generate run --prompt \udcff": r"prompt: must be UTF-8 text, got '\udcff'",
    "generate run --num-tokens -1": "num_tokens: must be at least 0, got -1",
    "generate run --temperature .nan": "temperature: must be a finite number, got nan",
    f"generate run --seed {5_000 * '9'}": (
        "--seed: must be a whole number from 0 to 9223372036854775807, got '999...999'"
    ),
    # initialise
    "initialise": (
        "--source FOLDER and --output FOLDER are required: a model or a run to read, and the folder to write"
    ),
    "initialise --source a b --output new": (
        "--source: names 2 folders, but method.type 'upcycle' reads one; give one, or use mix"
    ),
    "initialise --source sparse --output sparse": (
        "--output: 'sparse' is also a source; choose another folder"
    ),
    "initialise --source sparse --output study": "...which is not part of a model folder...",
    "initialise --source sparse --output new --method.type mix": (
        "...--source: names 1 folder, but method.type 'mix' takes two or more..."
    ),
    "initialise --source none --output new": (
        "--source: 'none' does not exist; give the folder of a model or of a run"
    ),
    "initialise --source sparse --output new --method.type prune": (
        "data: 'sparse' does not name its training text; give a text, such as ..."
    ),
    "initialise --source sparse --output new": "...layer 0 is of type 'moe', which no type of...",
    "initialise --source sparse --output new --method.type up": "method.type: unknown 'up'...",
    # inspect
    "inspect run --layers 9": "--layers: the model has no layer 9; it has 0 to 1",
    "inspect run --text none": "--text: 'none' cannot be read (No such file or directory)",
    "inspect run --text 'a\nb'": (
        r"--text: 'a\nb' is a text of several lines; give a file with this text"
    ),
    "inspect run --text one.txt": "--text: 'one.txt' has 1 tokens; give a text of two or more",
    "inspect run --text seven.txt": (
        "--text: the text has 6 tokens, but a unit is judged by its 10 strongest inputs; give more text"
    ),
    "inspect run --output mine.txt": f"--output: 'mine.txt' {NOT_MADE_HERE}",
    # plan
    "plan --gpu h10": "--gpu: unknown 'h10'; did you mean 'h100'?",
    "plan --efficiency 2": "--efficiency: must be a number above 0 and up to 1, got '2'",
    "plan --memory-gb x": "--memory-gb: must be a number above 0 and up to 1e+09, got 'x'",
    # report
    "report none": "'none' does not exist; give the folder of a run, such as runs/my-run",
    f"report {5_000 * 'x'}": "'xxx...xxx' cannot be read (File name too long); fix its permissions",
    "report runs": f"'runs' {NO_RUN}",
    "report mine.txt": (
        "'mine.txt' is a file, not the folder of a run; give the folder of a run, such as runs/my-run"
    ),
    "report empty": (
        "'empty' is not a run: it has no config.yaml; give the folder of a run, such as runs/my-run"
    ),
    "report sparse": (
        "'sparse' is not a run: it has no config.yaml; it is the folder of a model, which "
        "moe_ffn.load_pretrained reads"
    ),
    "report run --output mine.txt": f"--output: 'mine.txt' {NOT_MADE_HERE}",
    "report run --output absent/page.html": (
        "--output: 'absent/page.html' cannot be written (No such file or directory); choose another file"
    ),
    "report run --output runs": (
        "--output: 'runs' cannot be written (Is a directory); choose another file"
    ),
    "report --watch runs": f"'runs' {NO_RUN}",
    "report run --every 5": "--every: needs --watch; add it, or leave --every out",
    "report run --watch --every 0": "--every: must be from 0.1 to 86400 seconds, got 0.0",
    "report run --watch --every inf": "--every: must be from 0.1 to 86400 seconds, got inf",
    "report run --watch --every soon": "--every: invalid float value: 'soon'",
    # sweep
    "sweep --trainer.max_steps 3": (
        "give one study, moe-ffn sweep --config study.yaml, or the config files of its arms, moe-ffn "
        "sweep dense.yaml moe.yaml; --help shows a study"
    ),
    "sweep tiny.yaml --name": "--name: expected one argument",
    "sweep tiny.yaml b/tiny.yaml": (
        "two config files are called 'tiny'; an arm is named after its file; rename one"
    ),
    "sweep --config none.yaml": "'none.yaml': No such file or directory",
    "sweep gating.yaml": "'gating.yaml' is a study; give it as --config gating.yaml",
    "sweep --config gating.yaml --jobs 0": "--jobs: must be a whole number from 1 to 1000, got '0'",
    "sweep --config gating.yaml --seeds a": (
        "--seeds: must be a whole number from 0 to 9223372036854775807, got 'a'"
    ),
    "sweep --config gating.yaml --seeds 1 1": "--seeds: 1 is given twice",
    "sweep --config gating.yaml --seed 1": (
        "--seed: a study lists its seeds under `seeds`, or in --seeds 0 1 2"
    ),
    **{
        f"sweep --config gating.yaml --name '{name}'": (
            f"name: must be the name of one folder, up to 200 bytes, got '{name}'"
        )
        for name in ("a/b", "..", "")
    },
    "sweep tiny.yaml --resume x": "--resume: unknown; known: seed, run, ...",
    "sweep --config gating.yaml --trainer.max_step 3": (
        "--trainer.max_step: unknown; did you mean 'max_steps'?"
    ),
    "sweep --config tiny.yaml": (
        "'tiny.yaml' is not a study: it has neither arms nor a grid; give one of them, or, to compare "
        "config files as arms, name them without --config"
    ),
    "sweep --config gating.yaml --slurm": "--slurm: unknown; --help lists the options",
    "sweep --config gating.yaml --jbs 2": "--jbs: unknown; did you mean '--jobs'?",
    "sweep --config arm.yaml": "arm: unknown; did you mean 'arms'?",
    "sweep --config gating.yaml --data.corpus '{type: text, paths: none.txt}'": (
        "data.corpus.paths: 'none.txt' does not exist..."
    ),
    "sweep --config empty.yaml": "'empty.yaml': arms is empty: give arms, a grid, or both",
    # trace
    "trace run --text aaaaaaaaaaaaaaaaa": (
        "--text: has 17 tokens, but the model takes sequences of 16 (data.seq_len); give a shorter text"
    ),
    "trace run --text ''": "--text: is empty; give some text: --text 'import os'",
    "trace run --text a --layers 1,7": (
        "--layers: 'run' routes nothing in layer 7; it routes in 0, 1"
    ),
    "trace run --text a --layers '1;2'": f"{LAYERS} '1;2'",
    "trace run --text a --layers ''": f"{LAYERS} ''",
    "trace run --text a --html mine.txt": f"--html: 'mine.txt' {NOT_MADE_HERE}",
    "trace run --text a --html no/way.html": (
        "--html: 'no/way.html' cannot be written (No such file or directory); choose another file"
    ),
}
"""Command line -> its one line, with `...` in place of the rest."""


@pytest.fixture(scope="module")
def place(moe_run: Any, tiny_yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs, models, texts and studies, which no mistake changes."""
    place = tmp_path_factory.mktemp("place")
    shutil.copytree(moe_run.folder, place / "run")
    for text, content in {"text": 30 * "the cat\n", "one": "a", "seven": "a cat m"}.items():
        (place / f"{text}.txt").write_text(content)
    (place / "mine.txt").write_text("my thesis")
    np.save(place / "tokens.npy", np.array([1, 300, 2]))
    (place / "empty").mkdir()
    (place / "runs/a").mkdir(parents=True)
    (place / "runs/a/config.yaml").touch()

    write_arm(place / "study", "dense", [2.0, 2.1])
    write_arm(place / "study", "moe", [1.9, 2.0], experts=4)
    write_arm(place / "unfinished", "dense", [2.0, 2.1])
    for summary in (place / "unfinished").glob("*/summary.json"):
        summary.unlink()

    sizes = {"d_model": 16, "num_layers": 1, "attention": {"num_heads": 2}}
    for name, options, vocab_size, tokenizer in (
        ("untold", {"ffn": "swiglu"}, 257, None),
        ("small", {"ffn": "swiglu"}, 200, BytesTokenizer()),
        ("masked", {"ffn": "swiglu", "causal": False}, 257, BytesTokenizer()),
        ("dense", {"ffn": "dense"}, 257, BytesTokenizer()),
        ("sparse", {"ffn": {"type": "moe", "num_experts": 4}}, 257, BytesTokenizer()),
    ):
        config = moe_ffn.DecoderConfig.model_validate({**sizes, **options})
        moe_ffn.save_pretrained(config.build(vocab_size, 16), place / name, tokenizer)
    (place / "theirs").mkdir()
    (place / "theirs/config.json").write_text(json.dumps({"model_type": "mixtral"}))
    theirs.save("llama", place / "bert")
    theirs.change(place / "bert", model_type="bert")

    (place / "tiny.yaml").write_text(tiny_yaml.read_text())
    config = tiny_yaml.read_text().replace("\n", "\n  ")
    (place / "gating.yaml").write_text(f"config:\n  {config}\narms: {{a: {{model.ffn: dense}}}}")
    (place / "empty.yaml").write_text("arms: {}\nseeds: [0]\n")
    (place / "arm.yaml").write_text("arm: {a: swiglu}\nseeds: [0]\n")
    return place


@pytest.fixture(scope="module")
def before(place: Path) -> dict[str, Any]:
    return snapshot(place)


@pytest.mark.parametrize("line", MISTAKES, ids=lambda line: line[:70])
def test_a_mistake_is_one_sentence(
    place: Path, before: dict[str, Any], monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.chdir(place)
    program, *words = shlex.split(line)
    room = "experiments" if program == "benchmark" else "moe_ffn.cli"
    if "--tasks" in words:
        pytest.importorskip("lm_eval", reason="lm-eval is not installed here")
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU")

    done = run_here(*words, program=f"{room}.{program}")

    assert done.code == 2
    assert done.stdout == "" or program == "convert", "which names what it has read"
    (said,) = done.own_lines
    expected = ".*".join(map(re.escape, f"error: {MISTAKES[line]}".split("...")))
    assert re.fullmatch(expected, said), said
    assert said.isprintable()
    assert len(said) < 700
    assert snapshot(place) == before, "something was written"
