"""`moe_ffn.train`: a run from options in Python or from a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import moe_ffn
from moe_ffn.config.yaml_files import read_yaml


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
    with pytest.raises(moe_ffn.ConfigError) as refused:
        moe_ffn.train(options)
    assert str(refused.value) == ("model.ffn.num_expert: unknown; did you mean 'num_experts'?")
    with pytest.raises(moe_ffn.ConfigError, match=r"^'none.yaml': .*No such file"):
        moe_ffn.train("none.yaml")
    assert not Path("runs").exists()


def test_only_the_first_of_several_processes_returns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("moe_ffn.cli.train._train", lambda config, resume: tmp_path)
    monkeypatch.setattr("moe_ffn.cli.train.is_first_rank", lambda: False)
    with pytest.raises(SystemExit) as ended:
        moe_ffn.train({})
    assert ended.value.code == 0
