"""Numbers of every config that must survive a rewrite of the code, frozen in `golden.json`.

The cases start programs and read the files they write, so they hold wherever the modules live.
`python -m tests.test_golden` freezes today's numbers again.
"""

from __future__ import annotations

import functools
import json
import re
import signal
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch.optim.optimizer import register_optimizer_step_post_hook

from moe_ffn import DecoderConfig
from tests.helpers.tiny_runs import Finished, lasting_folder, options, run_here

CONFIGS = Path(__file__).parents[1] / "configs"
GOLDEN = Path(__file__).with_name("golden.json")


def names(*patterns: str) -> list[str]:
    """The configs of some folders, by their paths inside `configs/` without the suffix."""
    found = [path for pattern in patterns for path in CONFIGS.glob(pattern)]
    return sorted(path.relative_to(CONFIGS).with_suffix("").as_posix() for path in found)


TRAINED = names("*.yaml", "blocks/*.yaml", "models/small/*.yaml")
PUBLISHED = names("models/*.yaml")
"""Models that are too large to train here; only their sizes are frozen."""
REPORTED = ["dense", "moe", "moe_capacity", "blocks/mixture_of_depths"]
RESUMED = [*REPORTED, "models/small/deepseek_v3", "vanilla_2017"]
"""The last two add a state: a correction bias, and the random numbers of dropout."""
EXPORTED = ["models/small/mixtral", "models/small/qwen2_moe", "moe", "swiglu"]
"""One config of each architecture of transformers that the export writes."""

TOLERANCES = {
    **dict.fromkeys(("train/loss", "train/objective", "validation/loss"), 1e-3),
    "train/gradient_norm": 2e-2,  # one token that another kernel rounds to another expert moves it
}
"""Logged names whose values are frozen -> the relative difference that another processor may make; of
it a tenth in the first step, where no rounding has moved a token yet."""
STEPS = 3
STEPS_ALIKE = {"blocks/balanced_assignment": 2}
"""Steps that are compared of a config if not all: rounding, which differs between processors, decides some
of the auction's choices, and the third step of this config depends on them by more than the tolerance."""
MOVED_AT_ONCE = ["blocks/kimi_k3"]
"""Configs whose first step has the tolerance of the others: another kernel of attention moves one of 256
(token, expert) pairs of the first validation, 1.5e-4 of its loss."""
ONE_PAIR = {"moe_capacity": 1.7}
"""Percent of a page's text that one (token, expert) pair is, where rounding decides its expert."""
SMALL = ["--model.d_model", "48", "--model.num_layers", "2"]
"""Width and depth of all models but `models/small`; 48 is divisible by every number of heads."""

# -- runs


@functools.cache
def shared_folder() -> Path:
    """Folder of the corpus, its cache and the unbroken runs."""
    return lasting_folder()


def start(program: str, *argv: str, code: int = 0) -> Finished:
    """Run a program of the project, which ends with `code`."""
    done = run_here(*argv, program=f"moe_ffn.cli.{program}")
    assert done.code == code, f"{program} {argv}: {done.code}, {done.stderr[-1000:]}"
    return done


def train(name: str, folder: Path, code: int = 0) -> Path:
    """Train a config for a few steps, with a row, a validation and a checkpoint at each."""
    words = options(
        shared_folder(),
        data__tokenizer="{type: bytes}",
        logging__every_n_steps="1",
        trainer__max_steps=str(STEPS),
        trainer__validate_every_n_steps="1",
        sample__num_tokens="1",
        run__output_dir=str(folder),
        run__name="run",
    )
    pairs = zip(words[::2], words[1::2], strict=True)
    kept = [part for pair in pairs if not pair[0].startswith("--model.") for part in pair]
    kept += [] if name.startswith("models/small/") else SMALL
    start("train", "--config", f"{CONFIGS / name}.yaml", *kept, code=code)
    return folder / "run"


@functools.cache
def trained(name: str) -> Path:
    """Folder of the unbroken run of a config."""
    return train(name, shared_folder() / "runs" / name.replace("/", "-"))


# -- what is frozen


def curves_of(run: Path) -> dict[str, list[float]]:
    """The value of each step for every logged name, in the order of the steps."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    return {key: [row[key] for row in rows if key in row] for key in TOLERANCES}


def losses(name: str) -> dict[str, list[float]]:
    facts = json.loads((trained(name) / "facts.json").read_text("utf-8"))
    size = [facts[key] for key in ("num_params", "num_active_params", "flops_per_token")]
    return {"size": size, **curves_of(trained(name))}


def size(name: str) -> list[int]:
    """Parameters, active parameters and forward FLOPs per token of a model that is not built."""
    done = start("train", "--config", f"{CONFIGS / name}.yaml", "--print-config")
    config = yaml.safe_load(done.stdout)
    model = DecoderConfig.model_validate(config["model"])
    sizes = config["data"]["tokenizer"]["vocab_size"], config["data"]["seq_len"]
    counts = model.num_params, model.num_active_params, model.flops_per_token
    return [count(*sizes) for count in counts]


def weights(folder: Path) -> list[list[Any]]:
    """Shape and sum of squares of every tensor, sorted, so that names may change."""
    tensors = load_file(folder / "model.safetensors").values()
    return sorted([[*t.shape], t.double().square().sum().item()] for t in tensors)


def exported(name: str) -> list[list[Any]]:
    """The weights that the export to transformers writes."""
    target = lasting_folder() / "exported"
    start("convert", str(trained(name)), str(target))
    return weights(target)


NO_TEXT = re.compile(r"<(script|style|pre)\b.*?</\1>|<[^>]*>", re.DOTALL)
"""Everything that is not prose: tags, scripts, styles, and quoted files and samples."""
NOT_REPEATED = re.compile(
    r"[\d.,]+ (?:[kMGT] )?(?:tokens per second|tokens/s|FLOP/s|s|ms|min|h|[kMGT]?B|[MG]Hz)\b"
    r"|\d{4}-\d\d-\d\d(?: [\d:]+)?|@ [\d.]+GHz"
)
"""Times, rates, memory and dates."""


def report(name: str) -> str:
    """The decimal numbers of the page of a run, as they are written."""
    page = lasting_folder() / "report.html"
    start("report", str(trained(name)), "--output", str(page))
    text = re.sub(r"\s+", " ", unescape(NO_TEXT.sub(" ", page.read_text("utf-8"))))
    return " ".join(re.findall(r"(?<![\w.])-?\d+\.\d+(?![\w.])", NOT_REPEATED.sub("", text)))


FROZEN = {
    "losses": (losses, TRAINED),
    "published": (size, PUBLISHED),
    "model": (lambda name: weights(trained(name) / "model"), REPORTED),
    "exported": (exported, EXPORTED),
    "report": (report, REPORTED),
}
"""Section of the file -> what computes an entry, and the configs that have one."""

# -- the file


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def write() -> None:
    """Freeze everything again, one line for each entry."""
    torch.set_num_threads(1)
    sections = []
    for section, (compute, configs) in FROZEN.items():
        lines = [f'  "{name}": {json.dumps(rounded(compute(name)))}' for name in configs]
        sections.append(f' "{section}": {{\n' + ",\n".join(lines) + "\n }")
    GOLDEN.write_text("{\n" + ",\n".join(sections) + "\n}\n", "utf-8")


@functools.cache
def golden() -> dict[str, dict[str, Any]]:
    return json.loads(GOLDEN.read_text("utf-8"))


# -- tests


def test_every_config_has_a_frozen_entry_and_every_entry_a_config() -> None:
    frozen = {section: [*entries] for section, entries in golden().items()}
    assert frozen == {section: configs for section, (_, configs) in FROZEN.items()}
    assert {*names("**/*.yaml")} == {*TRAINED, *PUBLISHED, *names("studies/*.yaml")}


def test_published_models_have_their_frozen_sizes() -> None:
    assert {name: size(name) for name in PUBLISHED} == golden()["published"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_config_trains_to_the_frozen_losses(name: str) -> None:
    got, frozen = losses(name), golden()["losses"][name]
    assert got["size"] == frozen["size"], "parameters, active parameters, FLOPs per token"
    steps = STEPS_ALIKE.get(name, STEPS)
    for key, tolerance in TOLERANCES.items():
        assert len(got[key]) == STEPS
        assert got[key][:steps] == pytest.approx(frozen[key][:steps], rel=tolerance), key
        first = tolerance if name in MOVED_AT_ONCE else tolerance / 10
        assert got[key][0] == pytest.approx(frozen[key][0], rel=first), key


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_run_cut_after_a_step_resumes_to_the_losses_of_the_unbroken_run(
    tmp_path: Path, name: str
) -> None:
    hook = register_optimizer_step_post_hook(lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        run = train(name, tmp_path, code=128 + signal.SIGTERM)
    finally:
        hook.remove()
    unbroken = curves_of(trained(name))
    assert curves_of(run) == {key: values[:1] for key, values in unbroken.items()}

    start("train", "--resume", str(run))

    assert curves_of(run) == unbroken


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "name"), [(key, name) for key in ("model", "exported") for name in FROZEN[key][1]]
)
def test_folder_of_a_model_has_the_frozen_weights(section: str, name: str) -> None:
    got, frozen = FROZEN[section][0](name), golden()[section][name]
    assert [shape for shape, _ in got] == [shape for shape, _ in frozen]
    assert [s for _, s in got] == pytest.approx([s for _, s in frozen], rel=1e-3, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", REPORTED)
def test_page_of_a_run_shows_the_frozen_numbers(name: str) -> None:
    got, frozen = report(name).split(), golden()["report"][name].split()
    assert len(got) == len(frozen), f"{got}\n{frozen}"
    for place, (new, old) in enumerate(zip(got, frozen, strict=True)):
        decimals = len(old.partition(".")[2])
        either_side = 1.01 * 10.0**-decimals  # of a rounding
        if decimals == 1:  # as percentages have
            either_side = max(either_side, ONE_PAIR.get(name, 0))
        assert float(new) == pytest.approx(float(old), rel=5e-2, abs=either_side), f"number {place}"


if __name__ == "__main__":
    write()
