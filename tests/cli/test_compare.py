"""The program that compares runs: its output, its files and its errors."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from moe_ffn.studies.gather import gather
from tests.helpers.synthetic_run import change, write_arm
from tests.helpers.tiny_runs import cli

program = cli("compare", columns=80)


def row(out: str, arm: str) -> list[str]:
    """The cells of an arm in the first table."""
    return next(line.split()[1:] for line in out.splitlines() if line.startswith(f"{arm} "))


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Three seeds of a dense block, and of an MoE that is better by 0.1 or so."""
    folder = tmp_path / "gating"
    write_arm(folder, "dense", [2.0, 2.1, 2.2])
    write_arm(folder, "moe", [1.9, 2.01, 2.09], experts=4)
    (folder / "study.yaml").write_text(
        "question: Does an MoE help?\nseeds: [0, 1, 2]\nbaseline: dense\n"
        "arms: {moe: {model.ffn.type: moe}, dense: {model.ffn.type: swiglu}}\n"
    )
    return folder


def test_a_study_is_compared_with_its_baseline(study: Path) -> None:
    code, out, err = program(str(study))

    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert row(out, "dense") == ["3", "2.1000", "±0.2484", "0.1000", "-", "-", "-"]
    *found, detectable = row(out, "moe")
    assert found == ["3", "2.0000", "±0.2370", "0.0954", "-0.1000", "±0.0248", "0.0033"]
    # By the tables of Cohen 1988: three pairs find 3.26 standard deviations of a pair, which is 0.01 here.
    assert 0.030 < float(detectable) < 0.036
    assert out.startswith("Does an MoE help?\n")
    text = " ".join(out.split())
    assert "moe is better than dense by 0.1000 [0.0752, 0.1248] nats per token (3 seeds, p" in text
    assert "What differs from dense moe: model.ffn: swiglu -> moe" in text
    assert "MaxVio" in text
    assert "600 MB" in text


def test_the_margin_of_equality_is_that_of_the_study_or_of_the_flag(study: Path) -> None:
    file = study / "study.yaml"
    file.write_text(f"{file.read_text()}equality_margin: 0.2\n")
    assert "they are equal within 0.2 nats per token" in " ".join(program(str(study))[1].split())
    assert "equal" not in program(str(study), "--margin", "0.1")[1]
    for wrong in ("0", "-1", "inf", "nan", "much"):
        code, out, err = program(str(study), f"--margin={wrong}")
        assert (code, out) == (2, "")
        assert err == f"error: --margin: must be a number of nats above 0, got '{wrong}'\n"


def test_a_note_names_the_baseline_when_studies_have_different_ones(study: Path) -> None:
    other = study.parent / "other"
    shutil.copytree(study, other)
    text = (other / "study.yaml").read_text().replace("baseline: dense", "baseline: moe")
    (other / "study.yaml").write_text(text)

    _, out, _ = program(str(study), str(other))
    _, chosen, _ = program(str(study), str(other), "--baseline", "moe")

    note = (
        "The studies have different baselines (dense, moe): here all arms are compared with dense;"
    )
    assert note in " ".join(out.split())
    assert "different baselines" not in chosen


def test_committed_results_and_runs_are_one_comparison(study: Path, tmp_path: Path) -> None:
    results = tmp_path / "results"
    gather([study]).write(results)
    assert program(str(results))[1] == program(str(study))[1], (
        "the results say the same without the study"
    )
    shutil.rmtree(study / "moe-seed0")

    code, out, _ = program(str(study), str(results))

    assert code == 0
    assert row(out, "moe")[:2] == ["3", "2.0000"], "one of the results, and each of the runs once"


def test_runs_of_no_study_are_arms_by_their_options_or_by_their_folders(tmp_path: Path) -> None:
    runs = []
    for arm, losses, options in (
        ("a", [2.0, 2.1], {}),
        ("b", [1.5, 1.7], {"model__attention__num_heads": 8}),
    ):
        write_arm(tmp_path, arm, losses)
        for seed in (0, 1):
            run = tmp_path / f"a_run_of_{arm}_and_{seed}"
            (tmp_path / f"{arm}-seed{seed}").rename(run)
            change(run / "config.yaml", **options)
            runs.append(str(run))

    code, out, err = program(*runs)

    assert (code, err) == (0, "")
    assert row(out, "num_heads=8")[:2] == ["2", "1.6000"]
    assert row(out, "swiglu")[:2] == ["2", "2.0500"]
    for name, loss in (("one", 2.2), ("two", 2.3)):  # of the same options and seed
        write_arm(tmp_path, name, [loss])
    code, out, err = program(*(str(tmp_path / f"{name}-seed0") for name in ("one", "two")))
    assert (code, err) == (0, "")
    assert row(out, "one")[:2] == ["1", "2.2000"]
    assert row(out, "two")[:2] == ["1", "2.3000"]


def test_arms_of_one_block_that_differ_in_its_options_have_names_of_their_own(
    tmp_path: Path,
) -> None:
    runs = []
    for arm, losses, options in (
        ("dense", [2.0, 2.1], {}),
        ("few", [1.9, 2.0], {}),
        ("many", [1.8, 1.9], {"model__ffn__num_experts": 8}),
    ):
        write_arm(tmp_path, arm, losses, experts=0 if arm == "dense" else 4)
        for seed in (0, 1):
            run = tmp_path / f"moe-2026112{seed}-{arm}"  # as a run without a name
            (tmp_path / f"{arm}-seed{seed}").rename(run)
            change(run / "config.yaml", **options)
            runs.append(str(run))

    code, out, err = program(*runs)

    assert (code, err) == (0, "")
    assert row(out, "swiglu")[:2] == ["2", "2.0500"]
    assert row(out, "moe")[:2] == ["2", "1.9500"]
    assert row(out, "moe,num_experts=8")[:2] == ["2", "1.8500"]


def test_a_baseline_that_is_left_out_is_missed_with_the_reason(study: Path) -> None:
    for seed in range(3):
        change(study / f"dense-seed{seed}" / "summary.json", validation_loss=None)

    code, _, err = program(str(study))

    assert code == 2
    assert err == (
        "error: baseline: there is no finished run of an arm 'dense'; the arms are moe; 3 runs are left out, "
        f"the first since '{study}/dense-seed0' has no finite validation loss\n"
    )


def test_unfinished_runs_are_left_out_by_name(study: Path) -> None:
    (study / "moe-seed1" / "summary.json").unlink()
    change(study / "moe-seed2" / "summary.json", validation_loss=None)
    write_arm(study, "hurt", [2.0, 2.1, 2.2, 2.3])
    damages = {
        "summary.json": '{"validation_loss": 1.2',
        "facts.json": "",
        "config.yaml": "model: {",
    }
    for seed, (name, content) in enumerate(damages.items()):
        (study / f"hurt-seed{seed}" / name).write_text(content)

    code, out, err = program(str(study))

    assert code == 1
    assert sorted(err.splitlines()) == [
        f"left out: '{study}/hurt-seed0' has no results: its summary.json is damaged",
        f"left out: '{study}/hurt-seed1' has no model sizes: its facts.json is damaged",
        f"left out: '{study}/hurt-seed2' has no seed: its config.yaml is damaged",
        f"left out: '{study}/moe-seed1' is not finished: it is at step 200 of 200",
        f"left out: '{study}/moe-seed2' has no finite validation loss",
    ]
    assert row(out, "moe")[:2] == ["1", "1.9000"]
    assert row(out, "hurt")[:2] == ["1", "2.3000"]


def test_a_run_is_named_by_its_folder(study: Path, tmp_path: Path) -> None:
    (study / "study.yaml").unlink()
    folders = [tmp_path / "dense", study / "moe", tmp_path / "again" / "dense"]
    for name, folder in zip(("dense-seed0", "moe-seed0", "dense-seed1"), folders, strict=True):
        folder.parent.mkdir(exist_ok=True)
        (study / name).rename(folder)
    change(folders[1] / "config.yaml", data__seq_len=128)
    said = "the runs use different validation windows, so their losses cannot be compared: data.seq_len is "

    code, _, err = program(str(folders[0]), str(folders[1]))
    assert (code, err) == (2, f"error: {said}256 in dense, 128 in moe\n")
    _, _, err = program(*map(str, folders))
    assert err == f"error: {said}256 in {folders[0]} and 1 more, 128 in moe\n"

    code, _, _ = program(str(folders[0]), str(folders[2]), "--html", str(tmp_path / "c.html"))
    assert code == 0
    page = (tmp_path / "c.html").read_text()
    assert all(f"</svg> {folder}</th>" in page for folder in folders[::2])


def test_two_runs_of_one_arm_and_seed_are_rejected(study: Path) -> None:
    shutil.copytree(study / "dense-seed0", study / "x" / "dense-seed0")
    change(study / "x" / "dense-seed0" / "summary.json", validation_loss=1.0)
    code, _, err = program(str(study), str(study / "x" / "dense-seed0"))
    assert code == 2
    assert "are two runs of arm 'dense' with seed 0; give one of them" in err
