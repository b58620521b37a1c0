"""Commands and code blocks of the README and of the pages for users do what they promise."""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import moe_ffn
from moe_ffn.cli import which
from moe_ffn.cli.train import parse
from moe_ffn.config.option_tree import merge
from moe_ffn.studies.which import Question
from tests.helpers.cases import python_with
from tests.helpers.tiny_runs import ForkedTraining, no_page

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXCHANGE = "docs/howto/exchange.md"
RECIPE = "docs/howto/use_in_transformers.md"
GUIDES = [*(f"docs/howto/{name}.md" for name in ("custom_experts", "evaluate")), RECIPE]
PAGES = ("README.md", EXCHANGE, *GUIDES)


def blocks(language: str, page: str = "README.md") -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    lines = "".join(block for page in PAGES for block in blocks("bash", page))
    lines = lines.replace("\\\n", "").splitlines()
    found = [shlex.join(shlex.split(line, comments=True)) for line in lines if line.strip()]
    return [*dict.fromkeys(found)]


OUR_COMMANDS = [c for c in commands() if c.startswith(("python -m ", "moe-ffn "))]

# What another command tries of the same program, or begins with, and takes seconds.
SLOW = {
    "moe-ffn generate runs/my-run --prompt 'class '",
    "moe-ffn convert runs/my-run models/exported",
    "moe-ffn convert runs/my-run models/my.gguf",
}

# What programs print that train nothing.
SHOWN = {
    "moe_ffn.cli.evaluate": "bits per byte",
    "moe_ffn.cli.generate": "class ",
    "moe_ffn.cli.inspect": "inspect.html",
    "moe_ffn.cli.report": "report.html",
    "moe_ffn.cli.trace": "layer 0",
    "moe_ffn.cli.dashboard": "routing/load_heatmap",
    "moe_ffn.cli.plan": "parallel: {data: ",
    "experiments.benchmark": "moe_ffn auto",
    "experiments.overhead": "ratio",
}

TINY = [
    *["--data.seq_len", "16", "--data.batch_size", "4", "--data.validation_tokens", "256"],
    *["--data.corpus", "{type: text, paths: [corpus]}"],
    *["--data.cache_dir", "cache", "--logging.wandb.mode", "disabled"],
    *["--model.d_model", "16", "--model.num_layers", "2"],
    *["--trainer.max_steps", "2", "--sample.num_tokens", "4"],
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that the commands of the documents call runs/my-run."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_corpus(folder)
        assert run(["experiments.train", *TINY, "--run.name", "my-run"]) == 0
    return folder / "runs" / "my-run"


def write_corpus(folder: Path) -> None:
    corpus = folder / "corpus"
    corpus.mkdir()
    for number in range(40):
        text = "".join(f"def f{number}_{line}(x):\n    return x + {line}\n" for line in range(20))
        (corpus / f"module_{number}.py").write_text(text, encoding="utf-8")


@pytest.fixture
def newcomer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as after cloning, with a small corpus and the documented experts."""
    for name in ("configs", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "README.md").write_text(README[:4_000], encoding="utf-8")  # a text to evaluate
    experts = python_with("AdaptedConfig", "docs/howto/custom_experts.md")
    (tmp_path / "my_experts.py").write_text(experts, encoding="utf-8")
    (tmp_path / "my.yaml").write_text(blocks("yaml")[0], encoding="utf-8")
    write_corpus(tmp_path)
    shutil.copytree(tmp_path / "corpus", tmp_path / "my_texts")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def my_run(newcomer: Path, trained: Path) -> Path:
    return Path(shutil.copytree(trained, newcomer / "runs" / "my-run"))


def run(arguments: list[str]) -> int:
    """Run a program by its module in this process; a new process would import torch for seconds."""
    module = importlib.import_module(arguments[0])
    try:
        return module.main(arguments[1:])
    except SystemExit as stop:
        return int(stop.code or 0)


def test_the_commands_are_found():
    assert len(OUR_COMMANDS) >= 9
    assert set(OUR_COMMANDS) >= SLOW
    assert "make train" in commands()
    assert "`make test`" in README
    # tests/cli/test_main.py has the program print it.
    assert "model.ffn.num_expert: unknown; did you mean 'num_experts'?" in README


@pytest.mark.parametrize(
    ("target", "program", "extras"),
    [("train", "experiments.train", ["train"]), ("test", "pytest", ["train", "dev"])],
)
def test_make_installs_what_a_target_needs_and_runs_it(
    target: str, program: str, extras: list[str], tmp_path: Path
):
    found = subprocess.run(
        ["make", "--dry-run", target, f"VENV={tmp_path / 'fresh'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"-m {program}" in found.stdout
    assert re.findall(r'--editable "\.\[(\w+)\]"', found.stdout) == extras
    torch_first = found.stdout.index("requirements.lock torch\n")
    assert torch_first < found.stdout.index("--editable")


@pytest.mark.usefixtures("newcomer")
@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=[pytest.mark.slow] if c in SLOW else []) for c in OUR_COMMANDS],
)
def test_every_command_succeeds(
    command: str,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    if "runs/my-run" in command or "models/exported" in command:
        request.getfixturevalue("my_run")
    monkeypatch.setattr("moe_ffn.studies.sweep.Popen", ForkedTraining)
    module, *arguments = shlex.split(
        command.replace("moe-ffn ", "moe_ffn.cli.").removeprefix("python -m ")
    )
    if module != "moe_ffn.cli.report":
        monkeypatch.setattr("moe_ffn.runs.train.ending.report_html", no_page)
    first: list[str] = []  # a command without which this one has nothing to work on
    shown = SHOWN.get(module, "validation loss")
    if module == "moe_ffn.cli.convert":
        if arguments[0] == "models/exported":
            first = [module, "runs/my-run", arguments[0]]
        elif "--packed" in arguments:
            rounded = ["--model.ffn.experts", "{type: fake_quantized, experts: {type: swiglu}}"]
            first = ["experiments.train", *TINY, *rounded, "--run.name", "rounded"]
        shown = f"written: '{arguments[1]}', "
    elif module == "moe_ffn.cli.dashboard":
        arguments += ["--json"]
    elif "--resume" in arguments:
        (Path("runs/my-run") / "summary.json").unlink()  # as if it had been killed at its end
        arguments, shown = arguments[:2] + TINY[-4:-2], "resuming runs/my-run after step 2"
    elif module == "experiments.overhead":
        arguments += [*TINY, "--rounds", "1", "--steps", "2"]
    elif module == "experiments.benchmark":
        module = f"{module}.__main__"
        arguments = ["--shape", "64,16,8,4,2,fp32", "--rounds", "1", "--backends", "loop"]
    elif module == "moe_ffn.cli.study_page":
        shutil.rmtree("docs/studies")  # whose runs read other text
        first = ["moe_ffn.cli.sweep", "--config", arguments[0], *TINY, "--seeds", "0", "1"]
        shown = ""
    elif module == "moe_ffn.cli.sweep":
        for seed in ("1", "2"):  # one seed stands for three
            arguments.remove(seed)
        arguments, shown = [*arguments, *TINY], "moe-seed0"
    elif module == "moe_ffn.cli.compare":
        configs = ["configs/swiglu.yaml", "configs/moe.yaml"]
        first, shown = ["moe_ffn.cli.sweep", *configs, "--name", "first", *TINY], "MaxVio"
    elif module == "moe_ffn.cli.which":  # tests/studies/test_which.py trains such a search
        question = Question(
            data=[arguments[1]], minutes=60, jobs=1, width=32, step_seconds={}, max_steps=1
        )
        monkeypatch.setattr(Question, "measured", lambda *_: question)
        monkeypatch.setattr(which, "Search", Mock())
        monkeypatch.setattr(which, "print_answer", Mock())
        shown = "runs of width 32"
    elif module == "moe_ffn.cli.demo":
        shown = "page: demo.html"
    elif module not in SHOWN:
        arguments += TINY
        if "--trainer.devices" in arguments:  # tests/cli/test_train_options.py trains on two ranks
            arguments += ["--print-config"]
        if {"--help", "--print-config"} & set(arguments):
            shown = ""

    assert not first or run(first) == 0
    # Of a model this small the overhead means nothing; 1 says that it fell short of the promise.
    assert run([module, *arguments]) in ((0, 1) if module == "experiments.overhead" else (0,))

    assert shown in capsys.readouterr().out
    if module == "moe_ffn.cli.study_page":
        page = Path("docs/studies/noise.md").read_text(encoding="utf-8")
        assert "nats per token in 2 seeds;" in page


@pytest.mark.usefixtures("newcomer")
def test_the_yaml_block_trains_the_model_it_describes(capsys: pytest.CaptureFixture[str]):
    assert run(["experiments.train", "--config", "my.yaml", *TINY, "--run.name", "mine"]) == 0
    assert "moe, 8 experts (swiglu)" in capsys.readouterr().out
    assert run(["moe_ffn.cli.convert", "runs/mine", "models/mine.gguf"]) == 0


@pytest.mark.usefixtures("newcomer")
def test_the_python_block_trains_a_run(monkeypatch: pytest.MonkeyPatch):
    tiny = parse(TINY).to_dict()
    real = moe_ffn.train
    monkeypatch.setattr(moe_ffn, "train", lambda given: real(merge(tiny, given)))
    names = executed("moe_ffn.train({", "docs/howto/train_from_python.md")
    assert names["run"].name == "from-python"
    assert names["run"].option("model.ffn.num_experts") == 16


def executed(text: str, page: str, **names: Any) -> dict[str, Any]:
    """Run the block of Python in a page that holds `text`; return all names that it has."""
    exec(compile(python_with(text, page), page, "exec"), names)
    return names


def test_the_block_in_your_own_model_gives_hidden_and_a_loss_near_one():
    names = executed("load_balancing_loss(output", "README.md")
    assert names["output"].hidden.shape == (4, 16, 64)
    assert names["balance"].item() == pytest.approx(1, abs=0.3)


@pytest.mark.usefixtures("my_run")
def test_the_trained_model_is_loaded_and_saved():
    names = executed('"models/mine", tokenizer', EXCHANGE)
    assert names["decoder"].config.ffn.type == "moe"
    assert names["tokenizer"].encode(b"import").tolist() == [*b"import"]
    written = {path.name for path in Path("models/mine").iterdir()}
    assert written == {"config.json", "model.safetensors", "tokenizer.json"}
    assert run(["moe_ffn.cli.convert", "models/mine", "models/exported"]) == 0
    assert executed("load_ffn", EXCHANGE)["block"].routers()
    assert Path("models/exported-again/tokenizer_config.json").is_file()
    pytest.importorskip("transformers", reason="transformers is not installed here")
    names = executed("batch_size=2", RECIPE)
    assert [answer["generated_text"][:7] for (answer,) in names["answers"]] == [
        "import ",
        "def f(x",
    ]
    torch.testing.assert_close(
        names["model"](names["ids"]).logits, names["ours"], atol=1e-4, rtol=0
    )
    names = executed("swap_ffn", "docs/howto/kernels_in_transformers.md")
    assert list(names["passes"][-1]) == ["layer_00", "layer_01"]
    swapped = [type(layer.mlp).__name__ == "SwappedFFN" for layer in names["dense"].model.layers]
    assert swapped == [False, True, False, True]
    pytest.importorskip("peft", reason="peft is not installed here")
    model = executed("get_peft_model", "docs/howto/lora.md")["model"]
    trained = [p for name, p in model.named_parameters() if "lora_" in name]
    assert all(p.grad is not None for p in trained)
    assert {path.name for path in Path("models/adapted").iterdir()} == written


@pytest.mark.usefixtures("my_run")
@pytest.mark.filterwarnings("ignore")  # of TRL's own
def test_the_trained_model_is_fine_tuned_with_trl():
    pytest.importorskip("trl", reason="TRL is not installed here")
    assert run(["moe_ffn.cli.convert", "runs/my-run", "models/exported"]) == 0
    names = executed("SFTTrainer(", "docs/howto/lora.md")
    losses = [row["loss"] for row in names["trainer"].state.log_history if "loss" in row]
    assert losses[-1] < losses[0]
    assert run(["moe_ffn.cli.convert", "models/merged", "models/ours"]) == 0


@pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")  # on a CPU
def test_the_callback_of_the_docs_logs_rows_and_raises_the_quoted_alarms(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    pytest.importorskip("accelerate", reason="accelerate is not installed here")
    monkeypatch.chdir(tmp_path)
    page = "docs/howto/trainer.md"
    trainer = executed("RoutingCallback(", page)["trainer"]

    def without_numbers(text: str) -> set[str]:
        sentences = re.findall(r"alarm: .*?balancing loss", text.replace("\n", " "))
        return {re.sub(r"[\d.]+", "N", sentence) for sentence in sentences}

    shown = without_numbers("\n".join(blocks("text", page)))
    assert shown
    assert without_numbers(caplog.text) == shown
    keys = {key for row in trainer.state.log_history for key in row}
    assert {"routing/layer_01/max_violation", "routing/layer_01/load/expert_06"} < keys


def test_the_cost_of_the_swap_is_that_of_the_configs():
    rows = re.findall(r"^\| `--model.ffn.type (\w+)` \| (.*) \|$", README, re.MULTILINE)
    assert [name for name, _ in rows] == ["dense", "swiglu", "moe"]
    for name, cells in rows:
        config = parse(["--model.ffn.type", name])
        sizes = config.data.text_sizes
        counts = (
            config.model.num_params(*sizes),
            config.model.num_active_params(*sizes),
            config.model.flops_per_token(*sizes),
        )
        assert cells == " | ".join(f"{count / 1e6:.2f} M" for count in counts)


def test_the_rows_about_other_libraries_are_those_of_the_page():
    rows = (
        README.partition("## Compared with other libraries\n\n")[2]
        .partition("\n\n")[0]
        .splitlines()
    )
    page = (ROOT / "docs" / "reference" / "libraries.md").read_text(encoding="utf-8").splitlines()
    assert len(rows) == 9
    assert set(rows) <= set(page)


def test_the_rule_of_the_docs_moves_the_bias():
    torch.manual_seed(0)
    block = executed("rule.observe", "docs/howto/balance.md")["block"]
    assert 2e-3 < block.router.correction_bias_E.abs().max().item() < 1.01e-2  # ten steps of 1e-3
