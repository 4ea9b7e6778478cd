"""The connection of one call to a provider: a deadline that holds, and bodies that end.

The SDKs' time-outs are per read, so that a server that drips a byte per second holds a call for ever, and nothing
interrupts the look-up of a name: a call therefore runs in a thread of its own, and is cut off by shutting its sockets.
"""

from __future__ import annotations

import os
import socket
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import httpx2

from agent.asking import ENDED_IN_FLIGHT, AskFailed, Trouble
from agent.troubles import clean
from harness.errors import WrongUse

Result = TypeVar("Result")

CONNECT_SECONDS = 10.0
"""For TCP and TLS together; a host that takes longer is not there."""
LONGEST_BODY_BYTES = 4 * 2**20
"""Of an answer as it is sent; a hundred times what the most output tokens can need."""
LONGEST_PACKED_BYTES = 64 * 2**10
"""Of a compressed answer: gzip can blow up a thousandfold."""


class TooLong(Exception):
    """A body that goes on beyond any answer."""


class _Bounded(httpx2.SyncByteStream):
    """A response's raw bytes, up to a limit."""

    def __init__(self, stream: httpx2.SyncByteStream, most_bytes: int) -> None:
        self._stream = stream
        self._most_bytes = most_bytes

    def __iter__(self) -> Iterator[bytes]:
        seen_bytes = 0
        for chunk in self._stream:
            seen_bytes += len(chunk)
            if seen_bytes > self._most_bytes:
                raise TooLong(f"the answer is longer than {self._most_bytes:,} bytes")
            yield chunk

    def close(self) -> None:
        self._stream.close()


class Line:
    """The connection of one call, which can be cut from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._is_cut = False
        self._over = threading.Event()
        self.is_given_up = False
        """Whether nobody waits for the answer any more, so that whatever ends the call is no trouble."""
        self.is_sent = False
        """Whether anything of the request has left that could be billed."""

    @property
    def hooks(self) -> Mapping[str, list[Callable[..., None]]]:
        """What the SDK's HTTP client has to call."""
        return {"request": [self._watch], "response": [self._bound]}

    def run(self, work: Callable[[], Result], deadline_seconds: float) -> Result:
        """Return what ``work`` returns or raise what it raises, within the deadline; `AskFailed` past it."""
        if deadline_seconds <= 0:
            raise AskFailed(Trouble.TIMED_OUT, "no time was left for an answer")
        outcome: Future[Result] = Future()

        def carry() -> None:
            try:
                outcome.set_result(work())
            except BaseException as error:  # noqa: BLE001  # it is raised again in the thread that waits for it
                outcome.set_exception(error)
            self._over.set()

        threading.Thread(target=carry, name="call", daemon=True).start()
        self._over.wait(deadline_seconds)
        if outcome.done():
            return outcome.result()
        if self.is_given_up:
            raise AskFailed(Trouble.RUN_ENDED, ENDED_IN_FLIGHT)
        self.cut()
        raise AskFailed(Trouble.TIMED_OUT, f"no whole answer within {deadline_seconds:g} s")

    def give_up(self) -> None:
        """Cut the call because the run ends."""
        self.is_given_up = True
        self.cut()

    def cut(self) -> None:
        """Shut what is open and whatever may still be opened; whoever waits goes on at once."""
        with self._lock:
            self._is_cut = True
            for each in self._sockets:
                _shut(each)
        self._over.set()

    def _watch(self, request: httpx2.Request) -> None:
        request.extensions["trace"] = self._trace

    def _trace(self, event: str, info: Mapping[str, Any]) -> None:
        if event.endswith("send_request_headers.started"):
            self.is_sent |= info["request"].method != b"CONNECT"  # which only asks a proxy for a tunnel
        elif event.endswith("connect_tcp.started"):
            if self._is_cut:
                raise ConnectionAbortedError("the call was given up")
        elif event.endswith(("connect_tcp.complete", "start_tls.complete")):
            opened = info["return_value"].get_extra_info("socket")
            with self._lock:
                self._sockets.append(opened)
                if self._is_cut:
                    _shut(opened)

    def _bound(self, response: httpx2.Response) -> None:
        response.encoding = "utf-8"  # as JSON is; a charset of the server's choice may be a codec that is none of text
        packed = response.headers.get("content-encoding", "identity") != "identity"
        if isinstance(response.stream, httpx2.SyncByteStream):
            response.stream = _Bounded(response.stream, LONGEST_PACKED_BYTES if packed else LONGEST_BODY_BYTES)


def _shut(opened: socket.socket) -> None:
    try:
        # not the TLS socket's own method, which forgets the session under the thread that is reading from it
        socket.socket.shutdown(opened, socket.SHUT_RDWR)
    except OSError:
        return  # closed already, or never connected


def refuse_address(name: str) -> None:
    """Raise `WrongUse` for an address in the environment that no request can be sent to."""
    address = os.environ.get(name, "").strip()
    try:
        parts = urllib.parse.urlsplit(address)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, a bracket that is not closed
        is_whole = False
    if address and not is_whole:
        raise WrongUse(f"{name} is no address: {clean(address)!r}. Write it as http://HOST:PORT or https://HOST")


def timeout(deadline_seconds: float) -> httpx2.Timeout:
    """Return the SDK's own time-outs, which end what the line's thread still waits for after its deadline."""
    return httpx2.Timeout(deadline_seconds, connect=min(CONNECT_SECONDS, deadline_seconds))


def disconnected(cause: BaseException | None) -> AskFailed:
    """Return the trouble behind an SDK's connection error, which names its cause only by ``__cause__``."""
    said = clean(f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__)
    match cause:
        case TooLong() | httpx2.DecodingError():
            return AskFailed(Trouble.GARBAGE, said)
        case httpx2.ConnectTimeout():
            return AskFailed(Trouble.UNREACHABLE, f"no connection within {CONNECT_SECONDS:g} s")
        case httpx2.TimeoutException():
            return AskFailed(Trouble.TIMED_OUT, said)
        case _:
            return AskFailed(Trouble.UNREACHABLE, f"no connection, or it broke: {said}")
