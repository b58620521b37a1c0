"""wandb's run and wandb itself, as far as they are used, with what the world around them would say."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class StubRun:
    """Keeps what it was given; with `failing`, raises that at everything."""

    def __init__(
        self,
        folder: Path = Path("/somewhere else/wandb/run-1"),
        failing: Exception | None = None,
    ) -> None:
        self.dir = str(folder / "files")
        self.url = "https://wandb.example/run"
        self.failing = failing
        self.rows: list[dict[str, Any]] = []
        self.alerts: list[tuple[str, str]] = []
        self.exit_codes: list[int] = []

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        pass

    def log(self, row: dict[str, Any]) -> None:
        self._fail()
        self.rows.append(row)

    def alert(self, title: str, text: str) -> None:
        self._fail()
        self.alerts.append((title, text))

    def finish(self, exit_code: int) -> None:
        self._fail()
        self.exit_codes.append(exit_code)

    def _fail(self) -> None:
        if self.failing is not None:
            raise self.failing


class StubWandb:
    """The package; starting a run in one of the modes `failing` raises."""

    class Error(Exception):
        pass

    def __init__(self, failing: tuple[str, ...] = (), why: str = "no connection.") -> None:
        self.failing = failing
        self.why = why
        self.started: list[dict[str, Any]] = []

    @property
    def modes(self) -> list[str]:
        """Of the attempts, in order."""
        return [arguments["mode"] for arguments in self.started]

    def setup(self, settings: dict[str, Any]) -> None:
        assert not settings["show_info"], "it would ask for a key"

    def Settings(self, **values: Any) -> dict[str, Any]:
        return values

    def init(self, **arguments: Any) -> StubRun:
        self.started.append(arguments)
        if arguments["mode"] in self.failing:
            raise self.Error(f"{self.why}\nand more lines about it")
        return StubRun(Path(arguments["dir"]) / "wandb" / "offline-run-1")
