"""A server on this machine that answers as wandb's does, or not at all; what it was sent is kept."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "0123456789" * 4
"""As long as a real one."""

VIEWER = {"id": "1", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}
SAVED_VIEW = {"id": "ID1", "name": "nw-abc-v"}


@dataclass
class WandbServer:
    url: str = ""
    refusal: str = ""
    """What saving is answered with, as an error."""
    speaks: threading.Event = field(default_factory=threading.Event)
    """Cleared: nothing is answered until it is set again."""
    upserts: list[dict[str, Any]] = field(default_factory=list)
    """The variables of every attempt to save."""

    @property
    def environment(self) -> dict[str, str]:
        """How a program is sent here."""
        return {"WANDB_BASE_URL": self.url, "WANDB_API_KEY": KEY}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        query = request["query"]
        if "upsertView" in query:
            self.upserts.append(request["variables"])
            if self.refusal:
                return {"errors": [{"message": self.refusal}], "data": {"upsertView": None}}
            return {"data": {"upsertView": {"view": SAVED_VIEW, "inserted": True}}}
        return {"data": {"viewer": VIEWER, "serverInfo": {}}}


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    server = WandbServer()
    server.speaks.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            server.speaks.wait()
            if self.path != "/graphql":  # what wandb tells of its own speed
                self.send_response(404)
                self.end_headers()
                return
            answer = json.dumps(server.answer(json.loads(body))).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_request(self, code: object = "-", size: object = "-") -> None:
            """Not on the screen."""

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{listening.server_port}"
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.speaks.set()
        listening.shutdown()
        listening.server_close()
