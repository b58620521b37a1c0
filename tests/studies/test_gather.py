"""The results that folders hold: which are read, of which study, in which order, and what is absent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moe_ffn.studies.gather import gather
from moe_ffn.studies.result import RunResult, add_results
from tests.helpers.results import make_result


def write_study(folder: Path, text: str, *results: RunResult) -> Path:
    folder.mkdir()
    (folder / "study.yaml").write_text(text)
    add_results(folder, list(results))
    return folder


def test_results_come_by_their_numbers_and_not_by_their_digits(tmp_path: Path) -> None:
    for width in (128, 64):
        for seed in (10, 9):
            options = {"model.d_model": width}
            add_results(tmp_path, [make_result(f"d_model={width}", seed, options=options)])

    assert [result.name for result in gather([tmp_path]).results] == [
        f"d_model={width}-seed{seed}" for width in (64, 128) for seed in (9, 10)
    ]


def test_results_of_a_table_are_shown_by_their_names_and_by_their_places_where_two_are_alike(
    tmp_path: Path,
) -> None:
    for folder, seed in (("one", 0), ("one", 1), ("two", 1)):
        (tmp_path / folder).mkdir(exist_ok=True)
        options = {"model.d_model": 32 if folder == "one" else 64}
        add_results(tmp_path / folder, [make_result("moe", seed, options=options)])

    assert [r.shown_name for r in gather([tmp_path / "one"]).results] == ["moe-seed0", "moe-seed1"]
    assert [r.shown_name for r in gather([tmp_path / "one", tmp_path / "two"]).results] == [
        "moe-seed0",
        f"{tmp_path}/one/results.jsonl:2",
        f"{tmp_path}/two/results.jsonl:1",
    ]


def test_what_the_study_plans_and_is_not_there_is_counted_and_the_first_are_named(
    tmp_path: Path,
) -> None:
    text = "arms: {a: {}, b: {model.ffn: dense}}\nseeds: [0, 1, 2]\n"
    found = [make_result("a", 0), make_result("a", 1, is_finished=False)]
    note = gather([write_study(tmp_path / "s", text, *found)]).compare().notes[-1]
    # Of the two of six that are there one is left out, which is said elsewhere.
    assert note == (
        "4 of the 6 runs of the study are missing here: a-seed2, b-seed0, b-seed1 and 1 more."
    )


def test_parts_of_one_study_are_one_study_with_the_seeds_of_all(tmp_path: Path) -> None:
    folders = [
        write_study(
            tmp_path / str(seed),
            f"name: s\narms: {{a: {{}}}}\nseeds: {seeds}\n",
            make_result("a", seed),
        )
        for seed, seeds in ((0, [0, 1]), (5, [1, 5]))
    ]
    study = gather(folders).study
    assert study is not None
    assert study.seeds == [0, 1, 5]


def test_runs_of_tuning_stay_with_the_arm_that_they_tune(tmp_path: Path) -> None:
    tuning = {"optimizer.learning_rate": 0.5}
    own: Any = {"tuning": tuning, "main_arm": "moe"}
    folders = [
        write_study(
            tmp_path / name,
            "arms: {moe: {}}\n",
            make_result("moe", 0, options=(options := {"model.d_model": width})),
            make_result("moe,learning_rate=0.5", 0, options=options | tuning, **own),
        )
        for width, name in ((64, "few"), (128, "many"))
    ]

    found = gather(folders)

    assert [*found.arms.values()] == ["few/moe", "few/moe", "many/moe", "many/moe"]
    assert [r.arm for r in found.results if r.tuning] == [
        f"{name}/moe,learning_rate=0.5" for name in ("few", "many")
    ]
    assert [[*table.losses] for table in found.compare().tuning] == [["few/moe", "many/moe"]]


def test_an_arm_may_be_called_as_a_run_of_tuning_of_another_study(tmp_path: Path) -> None:
    name, tuning = "moe,learning_rate=0.5", {"optimizer.learning_rate": 0.5}
    tuned, grid = tmp_path / "tuned", tmp_path / "grid"
    of_tuning = make_result(name, 0, 2.5, main_arm="moe", tuning=tuning, options=tuning)
    write_study(tuned, "arms: {moe: {}}\n", make_result("moe", 0), of_tuning)
    wide = make_result(name, 0, 1.9, options=tuning | {"model.d_model": 256})
    write_study(grid, f"arms: {{'{name}': {{}}}}\n", wide)

    found = gather([tuned, grid])

    assert [*found.arms.values()] == ["moe", "moe", f"grid/{name}"]
    assert [arm.name for arm in found.compare().arms] == ["moe", f"grid/{name}"]


def test_arms_of_one_name_in_two_studies_keep_their_own_times(tmp_path: Path) -> None:
    for number, name in enumerate(("few", "many"), 1):
        result = make_result("moe", 0, options={"model.ffn.num_experts": 4 * number})
        folder = write_study(tmp_path / name, "arms: {moe: {}}\nseeds: [0]\n", result)
        timing = {"arms": {"moe": {"seconds_per_step": 0.1 * number}}}
        (folder / "timing.json").write_text(json.dumps(timing))

    found = gather([tmp_path / "few", tmp_path / "many"])

    assert not found.left_out, "the times are no result"
    assert found.step_seconds == {"few/moe": 0.1, "many/moe": 0.2}
    assert [arm.step_seconds for arm in found.compare().arms] == [0.1, 0.2]
