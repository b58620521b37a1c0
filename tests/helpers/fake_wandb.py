"""A server on this machine that stands in for wandb's, to be well or to fail in a chosen way.

It is no wandb: it stores nothing, checks no key, and answers no more than the client needs to start
a run online, to upload rows and files, and to end.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

Manners = Literal[
    "well",
    "silent",
    "refusing",
    "forbidding",
    "silent midway",
    "gone midway",
    "failing midway",
    "forbidding midway",
    "nonsense midway",
]
"""How it behaves: `midway` begins once the run has started; `silent` takes a request and never
answers; `refusing` does not listen; `forbidding` answers 401 as to a key that is nobody's; `gone`
hangs up; `failing` answers 500; `nonsense` is JSON with nothing in it, over which wandb's process dies."""


class FakeWandb:
    def __init__(self, manners: Manners) -> None:
        self.manners = manners
        self.asked: list[str] = []
        """GraphQL operations, and paths of what is no GraphQL, in order."""
        self.rows: list[dict[str, Any]] = []
        """What was uploaded as history."""
        self.started = False
        self.closing = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def serve(self) -> None:
        if self.manners == "refusing":
            self._server.server_close()
            return
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.closing.set()
        if self.manners != "refusing":
            self._server.shutdown()
            self._server.server_close()

    def reply(self, path: str, body: bytes) -> dict[str, Any]:
        if path.endswith("/file_stream"):
            files = json.loads(body).get("files") or {}
            for line in files.get("wandb-history.jsonl", {}).get("content", []):
                self.rows.append(json.loads(line))
            self.asked.append("file_stream")
            return {"exitcode": None, "limits": {}}
        if path != "/graphql":
            self.asked.append(path)
            return {}
        question = json.loads(body)
        found = re.search(r"(?:query|mutation)\s+(\w+)", question["query"])
        name = found[1] if found else "?"
        self.asked.append(name)
        if self.manners == "nonsense midway" and self.started:
            return {"data": {}}
        return {"data": self._data(name, question.get("variables") or {})}

    def _data(self, name: str, variables: dict[str, Any]) -> dict[str, Any]:
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
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if name == "CreateRunFiles":
            files = [{"name": n, "uploadUrl": f"{self.url}/up/{n}"} for n in variables["files"]]
            return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}
        if name == "NotifyScriptableRunAlert":
            return {"notifyScriptableRunAlert": {"success": True}}
        return {}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no error of the server."""


@contextmanager
def fake_wandb(manners: Manners) -> Iterator[FakeWandb]:
    server = FakeWandb(manners)
    server.serve()
    try:
        yield server
    finally:
        server.close()


def _handler(wandb: FakeWandb) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            manner, _, midway = wandb.manners.partition(" ")
            if midway and not wandb.started:
                manner = "well"
            if manner == "silent":
                wandb.closing.wait()
            elif manner == "gone":
                self.close_connection = True
            elif manner == "failing":
                self._send(500, b"{}")
            elif manner == "forbidding":
                self._send(401, b'{"errors": [{"message": "user is not logged in"}]}')
            else:
                self._send(200, json.dumps(wandb.reply(self.path, body)).encode())

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
