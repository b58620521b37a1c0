"""Stand-ins for wandb: its package, its server, and its tool that reads a run.

The server stores nothing and checks no key. It answers as much as the client needs to start a run online,
to upload rows, to end, and to save a view.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

KEY = "0123456789" * 4
"""A well-formed API key of no account."""

# -- the package


class StubRun:
    """A run that keeps what it was given; with `failing`, every call raises that."""

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
    """The package; starting a run in one of the modes in `failing` raises its error."""

    class Error(Exception):
        pass

    def __init__(self, failing: tuple[str, ...] = (), why: str = "no connection.") -> None:
        self.failing = failing
        self.why = why
        self.started: list[dict[str, Any]] = []

    @property
    def modes(self) -> list[str]:
        """Modes of the attempts, in order."""
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


# -- the server

Manners = Literal["well", "silent", "refusing", "forbidding", "silent midway", "gone midway"]
"""Behaviour of a server; `midway` begins once a run has started.

`silent` never answers a request, `refusing` does not listen, `forbidding` answers 401 to any key, and `gone`
hangs up.
"""
VIEWER = {"id": "1", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}


class WandbServer:
    """A server on this machine."""

    def __init__(self, manners: Manners) -> None:
        self.manners = manners
        self.started = False
        self.speaks = threading.Event()
        self.speaks.set()
        self.unsupported = ""
        """Error in the answer to an attempt to save a view."""
        self.upserts: list[dict[str, Any]] = []
        """Variables of every attempt to save a view."""
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.environment = {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": KEY}

    def serve(self) -> None:
        if self.manners == "refusing":
            self._server.server_close()
        else:
            threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.manners = "well"
        self.speaks.set()
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        query, variables = request["query"], request.get("variables") or {}
        found = re.search(r"(?:query|mutation)\s+(\w+)", query)
        name = found[1] if found else ""
        if "upsertView" in query:
            self.upserts.append(variables)
            if self.unsupported:
                return {"errors": [{"message": self.unsupported}], "data": {"upsertView": None}}
            view = {"id": "ID1", "name": "nw-abc-v"}
            return {"data": {"upsertView": {"view": view, "inserted": True}}}
        if name == "UpsertBucket":
            self.started = True
            project = {"id": "1", "name": variables["project"], "entity": {"id": "1", "name": "me"}}
            bucket = {
                "id": "1",
                "name": variables["name"],
                "displayName": variables.get("displayName"),
                "config": "{}",
                "historyLineCount": 0,
                "project": project,
            }
            return {"data": {"upsertBucket": {"bucket": bucket, "inserted": True}}}
        if name == "CreateRunFiles":
            files = [{"name": n, "uploadUrl": f"{self.url}/up/{n}"} for n in variables["files"]]
            created = {"runID": "1", "uploadHeaders": [], "files": files}
            return {"data": {"createRunFiles": created}}
        if name == "NotifyScriptableRunAlert":
            return {"data": {"notifyScriptableRunAlert": {"success": True}}}
        return {"data": {"viewer": VIEWER, "serverInfo": {}} if "viewer" in query else {}}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that hang up."""


@contextmanager
def wandb_server(manners: Manners = "well") -> Iterator[WandbServer]:
    server = WandbServer(manners)
    server.serve()
    try:
        yield server
    finally:
        if manners != "refusing":
            server.close()


def _handler(server: WandbServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            manner, _, midway = server.manners.partition(" ")
            if midway and not server.started:
                manner = "well"
            if manner == "silent":
                server.speaks.clear()
            server.speaks.wait()
            if manner == "gone":
                self.close_connection = True
            elif manner == "forbidding":
                self._send(401, b'{"errors": [{"message": "user is not logged in"}]}')
            elif self.path == "/graphql":
                self._send(200, json.dumps(server.answer(json.loads(body))).encode())
            else:
                self._send(200, b'{"exitcode": null, "limits": {}}')

        do_PUT = do_POST
        do_GET = do_POST

        def _send(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
            pass

    return Handler


# -- wandb's own tool


def inspect(folder: Path, environment: dict[str, str]) -> list[dict[str, Any]]:
    """Return the records that wandb's own tool reads from a run's folder, in order."""
    inspected = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [json.loads(line) for line in inspected.stdout.splitlines()]


def history(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows that were logged, without wandb's own keys.

    The tool prints `load._type` and `load.values` for a histogram, which become one mapping `load`.
    """
    rows = []
    for record in records:
        if record["type"] != "history":
            continue
        row: dict[str, Any] = {}
        for key, value in record["history"]["item"].items():
            name, _, part = key.partition(".")
            if part:
                row.setdefault(name, {})[part] = value
            elif not key.startswith("_"):
                row[key] = value
        rows.append(row)
    return rows
