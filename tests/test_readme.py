"""Commands and code blocks of the README and of the pages for users do what they promise."""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import moe_ffn
from moe_ffn.cli.train import parse
from moe_ffn.config.yaml_files import merge
from tests.helpers.documented import python_with
from tests.helpers.tiny_runs import ForkedTraining

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXCHANGE = "docs/howto/exchange.md"
GUIDES = [f"docs/howto/{name}.md" for name in ("custom_experts", "evaluate", "generate")]
PAGES = ("README.md", EXCHANGE, *GUIDES)


def blocks(language: str, page: str = "README.md") -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    lines = "".join(block for page in PAGES for block in blocks("bash", page)).splitlines()
    return [shlex.join(shlex.split(line, comments=True)) for line in lines if line.strip()]


OUR_COMMANDS = [c for c in commands() if c.startswith(("python -m ", "moe-ffn "))]

# What another command tries of the same program, or begins with, and takes seconds.
SLOW = {
    "moe-ffn generate runs/my-run --prompt 'class '",
    "moe-ffn convert runs/my-run models/exported",
}

# Programs that look at a finished run, and what they print of it.
OF_A_RUN = {
    "moe_ffn.cli.evaluate": "bits per byte",
    "moe_ffn.cli.generate": "class ",
    "moe_ffn.cli.inspect": "inspect.html",
    "moe_ffn.cli.report": "report.html",
    "moe_ffn.cli.trace": "layer 0",
}

TINY_DATA = ["--data.seq_len", "16", "--data.batch_size", "4", "--data.validation_tokens", "256"]
TINY = [
    *TINY_DATA,
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
    write_corpus(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def my_run(newcomer: Path, trained: Path) -> Path:
    """A copy of the trained run in the newcomer's folder."""
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
    assert {"make train", "make test"} <= set(commands())


@pytest.mark.parametrize("target", ["train", "test"])
def test_make_targets_exist(target: str):
    found = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=True
    )
    expected = {"train": "-m experiments.train", "test": "-m pytest"}[target]
    assert expected in found.stdout


@pytest.mark.parametrize(("target", "extras"), [("train", ["train"]), ("test", ["train", "dev"])])
def test_make_installs_what_a_target_needs(target: str, extras: list[str], tmp_path: Path):
    found = subprocess.run(
        ["make", "--dry-run", target, f"VENV={tmp_path / 'fresh'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
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
    module, *arguments = shlex.split(
        command.replace("moe-ffn ", "moe_ffn.cli.").removeprefix("python -m ")
    )
    if module in OF_A_RUN:
        assert run([module, *arguments]) == 0
        assert OF_A_RUN[module] in capsys.readouterr().out
        return
    if module == "moe_ffn.cli.convert":
        if arguments[0] == "models/exported":
            assert run([module, "runs/my-run", arguments[0]]) == 0
        assert run([module, *arguments]) == 0
        assert f"written: '{arguments[1]}', " in capsys.readouterr().out
        return
    if module == "moe_ffn.cli.dashboard":
        assert run([module, *arguments, "--json"]) == 0
        assert "routing/load_heatmap" in capsys.readouterr().out
        return
    if "--resume" in arguments:
        (Path("runs/my-run") / "summary.json").unlink()  # as if it had been killed at its end
        assert run([module, *arguments]) == 0
        assert "resuming runs/my-run after step 2" in capsys.readouterr().out
        return
    if module == "moe_ffn.cli.plan":
        assert run([module, *arguments]) == 0
        assert "parallel: {data: " in capsys.readouterr().out
        return
    if module == "experiments.benchmark":
        tiny = ["--shape", "64,16,8,4,2,fp32", "--rounds", "1"]
        asked = ["--shape"] if "--shape" in arguments else []
        assert arguments[:1] == asked
        assert run([f"{module}.__main__", *tiny]) == 0
        assert "moe_ffn auto" in capsys.readouterr().out
        return
    monkeypatch.setattr("moe_ffn.studies.sweep.Popen", ForkedTraining)
    if "configs/studies/noise.yaml" in arguments:
        sweep = ["--config", "configs/studies/noise.yaml", *TINY, "--seeds", "0", "1"]
        if module == "moe_ffn.cli.sweep":
            assert run([module, *arguments, *sweep[2:]]) == 0
            assert "swiglu-seed1" in capsys.readouterr().out
            return
        shutil.rmtree("docs/studies")  # whose runs read other text
        assert run(["moe_ffn.cli.sweep", *sweep]) == 0
        assert run([module, *arguments]) == 0
        assert "nats per token in 2 seeds;" in Path("docs/studies/noise.md").read_text(
            encoding="utf-8"
        )
        return
    if module == "moe_ffn.cli.sweep":  # one of the configs stands for all
        files = sorted(str(path) for path in Path().glob(arguments[0]))
        assert len(files) > 15
        kept = [path for path in files if Path(path).stem == "relu"]
        assert run([module, *kept, *arguments[1:], *TINY]) == 0
        assert "compare runs/every_router" in capsys.readouterr().out
        return
    if module == "moe_ffn.cli.compare":
        named = ["--run.output_dir", arguments[0], "--run.name", "top_k"]
        assert run(["experiments.train", *TINY, *named]) == 0
        assert run([module, *arguments]) == 0
        printed = capsys.readouterr().out
        assert "MaxVio" in printed
        assert "tokens/s" in printed
        return
    assert run([module, *arguments, *TINY]) == 0
    stopped_early = {"--help", "--print-config"} & set(arguments)
    assert stopped_early or "validation loss" in capsys.readouterr().out


@pytest.mark.usefixtures("newcomer")
def test_the_yaml_block_trains_the_model_it_describes(capsys: pytest.CaptureFixture[str]):
    Path("mine.yaml").write_text(blocks("yaml")[0], encoding="utf-8")
    corpus = TINY.index("--data.corpus")
    tiny = TINY[:corpus] + TINY[corpus + 2 :]
    assert run(["experiments.train", "--config", "mine.yaml", *tiny]) == 0
    printed = capsys.readouterr().out
    assert "swiglu" in printed
    assert "moe, 8 experts" in printed


@pytest.mark.usefixtures("newcomer")
def test_the_python_block_trains_a_run(capsys: pytest.CaptureFixture[str]):
    code = python_with("training_run", "docs/howto/train_from_python.md")
    names: dict[str, Any] = {}
    options, training = code.split("train(validate(", 1)
    exec(options, names)
    names["options"] = merge(parse(TINY).to_dict(), names["options"])
    exec(f"train(validate({training}", names)
    printed = capsys.readouterr().out
    assert "moe, 16 experts" in printed
    assert float(printed.splitlines()[-1]) > 0


def test_the_block_in_your_own_model_gives_hidden_and_a_loss_near_one():
    names: dict[str, object] = {}
    exec(
        compile(python_with("load_balancing_loss(output", "README.md"), "README.md", "exec"), names
    )
    hidden = names["output"].hidden  # pyright: ignore[reportAttributeAccessIssue]
    assert hidden.shape == (4, 16, 64)
    loss = names["loss"].item()  # pyright: ignore[reportAttributeAccessIssue]
    assert loss == pytest.approx(1, abs=0.3)


@pytest.mark.usefixtures("my_run")
def test_the_trained_model_is_loaded_and_saved():
    names: dict[str, Any] = {}
    exec(compile(python_with('"models/mine", tokenizer', EXCHANGE), EXCHANGE, "exec"), names)
    assert names["decoder"].config.ffn.type == "moe"
    assert names["tokenizer"].encode(b"import").tolist() == [*b"import"]
    written = {path.name for path in Path("models/mine").iterdir()}
    assert written == {"config.json", "model.safetensors", "tokenizer.json"}
    assert run(["moe_ffn.cli.convert", "models/mine", "models/exported"]) == 0
    names = {}  # each block has all that it needs
    exec(compile(python_with("load_ffn", EXCHANGE), EXCHANGE, "exec"), names)
    assert names["block"].routers()
    assert Path("models/exported-again/tokenizer_config.json").is_file()
    pytest.importorskip("transformers", reason="transformers is not installed here")
    names = {}
    exec(
        compile(python_with("swap_ffn", "docs/howto/kernels_in_transformers.md"), EXCHANGE, "exec"),
        names,
    )
    assert list(names["passes"][-1]) == ["layer_00", "layer_01"]
    swapped = [type(layer.mlp).__name__ == "SwappedFFN" for layer in names["dense"].model.layers]
    assert swapped == [False, True, False, True]
    pytest.importorskip("peft", reason="peft is not installed here")
    names = {}
    exec(compile(python_with("get_peft_model", "docs/howto/lora.md"), EXCHANGE, "exec"), names)
    trained = [p for name, p in names["model"].named_parameters() if "lora_" in name]
    assert all(p.grad is not None for p in trained)
    assert {path.name for path in Path("models/adapted").iterdir()} == written


def test_the_quoted_message_is_the_real_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from moe_ffn.cli.exit import exit_on_bad_input
    from moe_ffn.cli.train import main

    monkeypatch.setattr(sys, "argv", ["train", "--model.ffn.num_expert", "3"])
    assert exit_on_bad_input(main) == 2
    message = "model.ffn.num_expert: unknown; did you mean 'num_experts'?"
    assert message in README
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("newcomer")
def test_the_router_of_the_docs_trains(capsys: pytest.CaptureFixture[str]):
    Path("my_router.py").write_text(
        python_with("ThresholdConfig", "docs/howto/custom_router.md"), encoding="utf-8"
    )
    router = "{type: moe, router: {type: 'my_router.py:ThresholdConfig'}, capacity: {factor: 1.0}}"
    assert run(["experiments.train", *TINY, "--model.ffn", router]) == 0
    assert "validation loss" in capsys.readouterr().out


def test_the_rule_of_the_docs_moves_the_bias():
    block: Any = moe_ffn.build_ffn({"type": "moe", "router": "sigmoid_top_k"}, d_model=8)
    output = block(torch.randn(5, 8))
    names = {
        "moe_ffn": moe_ffn,
        "block": block,
        "output": output,
        "loss": output.hidden.sum(),
        "optimizer": torch.optim.SGD(block.parameters()),
    }
    exec(compile(python_with("rule.observe", "docs/howto/balance.md"), "balance.md", "exec"), names)
    assert block.router.correction_bias_E.abs().max().item() == pytest.approx(1e-3)
