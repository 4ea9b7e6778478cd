"""A server on the loopback that speaks both providers' wire formats, as well or as badly as a script says."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import struct
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from harness.errors import SpendingCapReached
from harness.terms import CallBegun, CallEnded

KEY = "sk-ant-api03-Zq9-secret_0123456789abcdef"
"""What no text may hold."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Say:
    """One answer, and how it goes wrong on the way."""

    body: bytes | str | Mapping[str, Any] = b""
    status: int = 200
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    hangs: bool = False
    """Nothing comes at all until the server is closed."""
    drips_seconds: float | None = None
    """Pause after each byte; the head counts as well if `drips_head`."""
    drips_head: bool = False
    resets_after_bytes: int | None = None
    """The connection breaks within the body."""

    @property
    def raw(self) -> bytes:
        if isinstance(self.body, bytes):
            return self.body
        return (self.body if isinstance(self.body, str) else json.dumps(self.body)).encode()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """One request as it came."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Any


class Wire:
    """``with Wire(Say(...), Say(...)) as wire``: POSTs take the script in turn, the last one again and again.

    ``models`` answers GETs; None: there is no list of models, as at many local servers.
    """

    def __init__(self, *script: Say, models: Say | None = None) -> None:
        self.script = list(script)
        self.models = models
        self.seen: list[Seen] = []
        self.connections_open = 0
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that hangs up is the point

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def posts(self) -> list[Seen]:
        return [seen for seen in self.seen if seen.method == "POST"]

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._stop.set()
        self._server.shutdown()
        self._server.server_close()

    def next(self, method: str) -> Say:
        with self._lock:
            if method == "GET":
                return self.models or Say(status=404, body="404 page not found")
            return self.script.pop(0) if len(self.script) > 1 else self.script[0]

    def _handler(wire) -> type[BaseHTTPRequestHandler]:  # noqa: N805  # two selves below
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle(self) -> None:
                with wire._lock:
                    wire.connections_open += 1
                try:
                    with contextlib.suppress(OSError):
                        super().handle()
                finally:
                    with wire._lock:
                        wire.connections_open -= 1

            def do_GET(self) -> None:
                self.answer()

            def do_POST(self) -> None:
                self.answer()

            def answer(self) -> None:
                raw = self.rfile.read(int(self.headers.get("content-length", 0)))
                headers = {name.lower(): value for name, value in self.headers.items()}
                body = json.loads(raw) if raw else None
                wire.seen.append(Seen(method=self.command, path=self.path, headers=headers, body=body))
                say = wire.next(self.command)
                if say.hangs:
                    wire._stop.wait()
                    self.close_connection = True
                    return
                head = {"content-type": "application/json", "content-length": str(len(say.raw))} | dict(say.headers)
                lines = [f"HTTP/1.1 {say.status} Some", *(f"{name}: {value}" for name, value in head.items()), "", ""]
                start = "\r\n".join(lines).encode()
                if say.drips_seconds is None:
                    self.wfile.write(start)
                    self.wfile.write(say.raw[: say.resets_after_bytes])
                    self.wfile.flush()
                    if say.resets_after_bytes is not None:
                        linger = struct.pack("ii", 1, 0)
                        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                        self.connection.close()
                        self.close_connection = True
                    return
                dripped = start + say.raw if say.drips_head else say.raw
                if not say.drips_head:
                    self.wfile.write(start)
                for byte in dripped:
                    self.wfile.write(bytes([byte]))
                    self.wfile.flush()
                    if wire._stop.wait(say.drips_seconds):
                        break
                self.close_connection = True

            def log_message(self, *_: object) -> None:
                pass

        return Handler


def closed_port() -> int:
    """Return a port at which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


# --- what Anthropic says -----------------------------------------------------------------------------------------


def message(text: str | None, *, stop_reason: str = "end_turn", usage: Any = ..., **others: Any) -> dict[str, Any]:
    """Return a message; ``text`` None: without content."""
    counts = {
        "input_tokens": 11,
        "cache_creation_input_tokens": 7,
        "cache_read_input_tokens": 5,
        "output_tokens": 13,
        "output_tokens_details": {"thinking_tokens": 3},
    }
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude-test-1",
        "content": [] if text is None else [{"type": "thinking", "thinking": ""}, {"type": "text", "text": text}],
        "stop_reason": stop_reason,
        "stop_sequence": None,
        "usage": counts if usage is ... else usage,
    } | others


def model_info(model: str, *, lifecycle: str = "active", structured: bool = True) -> dict[str, Any]:
    """Return what the list of models says about one."""
    return {
        "id": model,
        "type": "model",
        "display_name": model,
        "created_at": "2026-09-01T00:00:00Z",
        "lifecycle": lifecycle,
        "retires_at": None if lifecycle == "active" else "2026-12-24T00:00:00Z",
        "capabilities": {"structured_outputs": {"supported": structured}},
    }


def failure(kind: str, text: str, *, code: str | None = None) -> dict[str, Any]:
    """Return Anthropic's error body."""
    details = {} if code is None else {"details": {"error_code": code}}
    return {"type": "error", "error": {"type": kind, "message": text} | details, "request_id": "req_1"}


# --- what OpenAI and its likes say ---------------------------------------------------------------------------------


def completion(text: str | None, *, finish_reason: str = "stop", usage: Any = ..., **others: Any) -> dict[str, Any]:
    """Return a chat completion; ``others`` go into its message."""
    counts = {
        "prompt_tokens": 100,
        "completion_tokens": 20,
        "total_tokens": 120,
        "prompt_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 10},
        "completion_tokens_details": {"reasoning_tokens": 8},
    }
    choice = {"index": 0, "finish_reason": finish_reason, "message": {"role": "assistant", "content": text} | others}
    return {
        "id": "c_1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [choice],
        "usage": counts if usage is ... else usage,
    }


def called(arguments: str) -> dict[str, Any]:
    """Return a chat completion whose message is a tool call."""
    function = {"name": "answer", "arguments": arguments}
    calls = [{"id": "t_1", "type": "function", "function": function}]
    return completion(None, finish_reason="tool_calls", tool_calls=calls)


def response(*parts: Mapping[str, Any], status: str = "completed", **others: Any) -> dict[str, Any]:
    """Return an answer of the Responses API."""
    return {
        "id": "r_1",
        "object": "response",
        "created_at": 1,
        "model": "m",
        "status": status,
        "output": [
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"type": "message", "id": "m_1", "role": "assistant", "status": "completed", "content": list(parts)},
        ],
        "usage": {
            "input_tokens": 100,
            "input_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 0},
            "output_tokens": 20,
            "output_tokens_details": {"reasoning_tokens": 8},
            "total_tokens": 120,
        },
    } | others


def wrong(text: str, *, code: str | None = None, kind: str = "invalid_request_error") -> dict[str, Any]:
    """Return OpenAI's error body."""
    return {"error": {"message": text, "type": kind, "param": None, "code": code}}


# --- the study's side ----------------------------------------------------------------------------------------------


class BookedDesk:
    """A desk that remembers, and that fails where a row is closed twice."""

    def __init__(self, *, is_capped: bool = False) -> None:
        self.is_capped = is_capped
        self.begun: dict[int, CallBegun] = {}
        self.ended: dict[int, CallEnded] = {}
        self.kept: dict[tuple[int, str], str] = {}
        self.events: list[tuple[str, str]] = []
        self.insights: list[str] = []

    @property
    def last(self) -> CallEnded:
        """How the latest call ended; every one that was begun has."""
        assert set(self.begun) == set(self.ended)
        return self.ended[max(self.ended)]

    @property
    def texts(self) -> str:
        """Everything that a study would hold of it."""
        ended = "".join(str(each) for each in self.ended.values())
        return f"{ended}{self.begun}{self.kept}{self.events}{self.insights}"

    def begin_call(self, call: CallBegun) -> int:
        if self.is_capped:
            raise SpendingCapReached("the cap is reached")
        number = len(self.begun) + 1
        self.begun[number] = call
        return number

    def end_call(self, call: int, ended: CallEnded) -> float | None:
        assert call in self.begun
        assert call not in self.ended, "closed twice"
        assert (ended.trouble is None) == (ended.text is None), "the ledger refuses such a row"
        self.ended[call] = ended
        return None if ended.usage is None else ended.usage.tokens / 1e6

    def keep(self, call: int, name: str, text: str) -> None:
        self.kept[call, name] = text

    def event(self, kind: str, text: str) -> None:
        self.events.append((kind, text))

    def insight(self, text: str) -> None:
        self.insights.append(text)
