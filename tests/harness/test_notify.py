from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from harness import notify
from harness.errors import BadInput, CannotStart


class Mailbox(BaseHTTPRequestHandler):
    """Takes what is posted, and refuses what is posted to ``/full``."""

    received: list[dict[str, Any]]

    def do_POST(self) -> None:
        self.received.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(507 if self.path == "/full" else 200)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Stay silent."""


@pytest.fixture
def mailbox() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Return the address of a real server on the loopback, and what it received."""
    handler = type("Handler", (Mailbox,), {"received": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"json://127.0.0.1:{server.server_port}", handler.received
    server.shutdown()
    server.server_close()
    thread.join()


def test_every_address_is_told(mailbox: tuple[str, list[dict[str, Any]]]) -> None:
    """Title and text arrive as they are; one that refuses makes it False, and the others are told all the same."""
    url, received = mailbox
    assert notify.tell([url + "/a"], title="demo: done", text="0.5 better")
    assert [(message["title"], message["message"]) for message in received] == [("demo: done", "0.5 better")]
    assert not notify.tell([url + "/full", url + "/b"], title="demo: done", text="0.5 better")
    assert len(received) == 3


def test_nobody_is_told_where_nobody_wants_to_be() -> None:
    """No address, no message, no package needed."""
    notify.check([])
    assert notify.tell([], title="demo: done", text="0.5 better")


def test_a_bad_address_is_told_before_the_night_without_its_secret(caplog: pytest.LogCaptureFixture) -> None:
    """By its place in the list: an address holds passwords."""
    with caplog.at_level(logging.DEBUG), pytest.raises(BadInput, match="address 2 of") as caught:
        notify.check(["json://localhost/x", "nonsense://user:hunter2@host"])
    assert "hunter2" not in str(caught.value) + caplog.text


def test_a_missing_package_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, before anything runs."""
    monkeypatch.setitem(__import__("sys").modules, "apprise", None)
    with pytest.raises(CannotStart, match=r"apprise>=2\.2"):
        notify.check(["json://localhost/x"])
