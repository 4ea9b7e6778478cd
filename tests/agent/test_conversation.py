"""A proposer, the unmodified SDK and a real HTTP server on the loopback: nothing of ours is replaced."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from agent.instructions import SYSTEM
from agent.led import OpenAIProposer
from harness.terms import Terms
from tests.agent.doubles import Book, Drawn, reply

RATES = [{"optim.learning_rate": rate} for rate in (2e-3, 4e-3, 6e-3)]
PATIENCE_SECONDS = 60.0


class Server(ThreadingHTTPServer):
    """Speaks chat completions; it answers a form with a form and everything else with proposals."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(request)
        is_form = "colour" in request["messages"][-1]["content"]
        content = '{"colour": "green", "count": 3}' if is_form else reply(*RATES, insights=["rates first"])
        message = {"role": "assistant", "content": content}
        answer = {
            "id": "chat-1",
            "object": "chat.completion",
            "created": 0,
            "model": request["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 9000, "completion_tokens": 301, "total_tokens": 9301},
        }
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    with Server() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        monkeypatch.setenv("OPENAI_BASE_URL", f"http://127.0.0.1:{running.server_port}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", "sk-the-owners-own")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield running
        running.shutdown()


def test_proposals_of_a_model_behind_a_server(make_night: Any, server: Server) -> None:
    """The form is probed at the start; the rules propose while the model thinks; its answer is taken and booked."""
    night, book = make_night(), Book()
    proposer = OpenAIProposer(Drawn)
    proposer.begin(Terms(llm="openai:local-1", desk=book))
    assert book.open_calls == set()
    (proposal,) = proposer.propose(night.history(), 1)
    assert proposal.source == "rules"
    until = time.monotonic() + PATIENCE_SECONDS
    while proposal.source != "openai" and time.monotonic() < until:
        time.sleep(0.01)
        (proposal,) = proposer.propose(night.history(), 1)
    proposer.close()
    assert (proposal.source, proposal.model, proposal.diff) == ("openai", "local-1", RATES[0])
    assert proposal.call is not None
    assert book.begun[proposal.call - 1].purpose == "proposals"
    assert book.ended[proposal.call].trouble is None
    assert proposal.tokens == 3101
    assert book.insights == ["rates first"]
    asked = next(request for request in server.asked if "colour" not in request["messages"][-1]["content"])
    assert asked["messages"][0]["content"].startswith(SYSTEM)
    assert "## The sampler" in asked["messages"][-1]["content"]
    assert "sk-the-owners-own" not in json.dumps([*book.kept.values(), *book.events])
