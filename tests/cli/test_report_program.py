"""`moe-ffn report`: its files, its messages and `--watch`."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_ffn.report import page
from moe_ffn.report.page import follow_runs
from moe_ffn.report.plots import share_script
from moe_ffn.report.studies.comparison_page import html_of_runs
from tests.helpers.synthetic_run import age, write_run
from tests.helpers.tiny_runs import cli

program = cli("report")


@pytest.fixture(autouse=True)
def _no_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script of plotly is megabytes, and no matter here."""
    monkeypatch.setattr("moe_ffn.report.plots.get_plotlyjs", lambda: "")


def dense(folder: Path, *, is_finished: bool = True) -> Path:
    return write_run(folder, experts=0, rows=20, is_finished=is_finished)


@pytest.mark.parametrize(
    ("argv", "written", "title"),
    [
        (("runs/a",), "runs/a/report.html", "a"),
        (("runs/a", "more/b"), "{}/runs/report.html", "a, b"),
        (("runs/a", "--output", "page.html"), "page.html", "a"),
    ],
    ids=["in its folder", "beside several runs", "elsewhere"],
)
def test_the_path_and_title_of_the_page(
    tmp_path: Path, argv: tuple[str, ...], written: str, title: str
) -> None:
    dense(Path("runs/a"))
    dense(Path("more/b"))
    written = written.format(tmp_path)
    assert program(*argv) == (0, f"{written}\n", "")
    assert f"<title>{title}</title>" in Path(written).read_text()
    assert [*tmp_path.rglob("*.html")] == [tmp_path / written]


def test_pages_of_a_folder_share_plotly_s_script(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("moe_ffn.report.plots.get_plotlyjs", lambda: "plotly's own")
    dense(Path("runs/a"))
    dense(Path("runs/b"))

    program("runs/a")
    assert "plotly's own" in Path("runs/a/report.html").read_text(), "a single page is one file"
    share_script(Path("runs"))
    assert Path("runs/plotly.min.js").read_text() == "plotly's own"
    for argv, written, address in (
        (["runs/a"], "runs/a/report.html", "../plotly.min.js"),
        (["runs/b"], "runs/b/report.html", "../plotly.min.js"),
        (["runs/a", "runs/b"], "runs/report.html", "plotly.min.js"),
    ):
        assert program(*argv)[0] == 0
        html = Path(written).read_text()
        assert f'<script src="{address}"></script>' in html
        assert "plotly's own" not in html
    Path("runs/plotly.min.js").write_text("of another version")
    program("runs/a")
    assert "plotly's own" in Path("runs/a/report.html").read_text()


def reloads(path: Path) -> bool:
    return 'id="reload"' in path.read_text()


def test_a_page_follows_its_run_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run advances with each look of the watcher."""
    run = Path("run")
    run.mkdir()
    (run / "config.yaml").write_text("trainer: {max_steps: 20}\n")
    output, said, seen = run / "report.html", [], []

    def go_on(_seconds: float) -> None:
        text = output.read_text()
        seen.append((reloads(output), "waiting for" in text, "step 10 of 20" in text))
        if len(seen) == 1:
            (run / "metrics.jsonl").write_text('{"step": 10, "train/loss": 2.5}\n')
        if len(seen) == 3:
            (run / "summary.json").write_text('{"validation_loss": 2.0}')

    monkeypatch.setattr("time.sleep", go_on)
    follow_runs(html_of_runs, [run], output, 7, said.append)

    assert seen == [(True, True, False), (True, False, True), (True, False, True)]
    assert said == [
        "run/report.html is kept current; press Ctrl-C to stop",
        "finished: run/report.html",
    ]
    assert not reloads(output)
    assert "2.0000" in output.read_text()


def test_watch_waits_for_a_run_that_has_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    run, said, looks = Path("runs/x"), [], []

    def begin(_seconds: float) -> None:
        looks.append(run.exists())
        if len(looks) == 2:
            run.mkdir(parents=True)
        if len(looks) == 4:
            write_run(Path("made"), experts=0, rows=20)
            Path("made").rename(run)

    monkeypatch.setattr("time.sleep", begin)
    follow_runs(html_of_runs, [run], Path("page.html"), 7, said.append)

    assert looks == [False, False, True, True]
    assert said == [
        "waiting for runs/x",
        "page.html is kept current; press Ctrl-C to stop",
        "finished: page.html",
    ]


def test_ctrl_c_stops_waiting_for_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupt)

    said = "waiting for x\nstopped waiting; x/report.html was not written\n"
    assert program("--watch", "x") == (0, said, "")


def test_watch_reports_an_interrupted_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run, said = dense(Path("run"), is_finished=False), []

    def fall_silent(_seconds: float) -> None:
        age(run, 5000)

    monkeypatch.setattr("time.sleep", fall_silent)
    follow_runs(html_of_runs, [run], Path("page.html"), 7, said.append)
    assert said[-1] == "run was interrupted: page.html"
    assert not reloads(Path("page.html"))

    runs = [run, dense(Path("whole"))]
    follow_runs(html_of_runs, runs, Path("page.html"), 7, said.append)
    assert said[-1] == "run was interrupted: page.html"


def test_ctrl_c_leaves_a_page_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    dense(Path("run"), is_finished=False)

    def interrupt(_seconds: float) -> None:
        assert reloads(Path("run/report.html"))
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupt)

    said = "run/report.html is kept current; press Ctrl-C to stop\nstopped: run/report.html\n"
    assert program("--watch", "run") == (0, said, "")
    assert not reloads(Path("run/report.html"))


def test_has_ended_marks_a_silent_run_interrupted_at_once() -> None:
    run = dense(Path("run"), is_finished=False)
    (shown,) = page.write_report(
        html_of_runs, [run], run / "report.html", reload_every=5, has_ended=True
    )
    assert shown.state == "interrupted"
    assert not reloads(run / "report.html")
    whole = dense(Path("whole"))
    (shown,) = page.write_report(html_of_runs, [whole], whole / "report.html", has_ended=True)
    assert shown.state == "finished"
