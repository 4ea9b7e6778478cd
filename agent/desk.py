"""A desk that can be left while a call hangs, so that ending a run waits for no provider and leaves no row open."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from agent.asking import ENDED_IN_FLIGHT, AskFailed, Trouble
from agent.troubles import clean
from harness.terms import CallBegun, CallEnded, Desk

LONGEST_EVENT = 1_000
"""Characters; what a provider says in one is cut much sooner."""


class LeavableDesk:
    """Hands everything on to the study's desk until it is left; a `harness.terms.Desk`.

    A thread that waits for a provider cannot be ended from outside, and the ledger behind the desk is closed at the
    end of a run. So whoever leaves closes what is open, and what the thread says afterwards is dropped.
    """

    def __init__(self, desk: Desk, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` counts seconds and is for the latency of calls that are left."""
        self._desk = desk
        self._clock = clock
        self._lock = threading.Lock()  # between the thread that asks and the one that leaves
        self._begun: dict[int, float] = {}
        self._is_left = False

    @property
    def has_open_calls(self) -> bool:
        """Tell whether a call was begun and not ended."""
        with self._lock:
            return bool(self._begun)

    def begin_call(self, call: CallBegun) -> int:
        """Return the number of a call that may be sent now; `AskFailed` once the desk is left."""
        with self._lock:
            if self._is_left:
                raise AskFailed(Trouble.RUN_ENDED, "the run has ended, and nothing is asked any more")
            number = self._desk.begin_call(call)
            self._begun[number] = self._clock()
            return number

    def end_call(self, call: int, ended: CallEnded) -> float | None:
        """Close a call's row, unless leaving did."""
        with self._lock:
            if self._is_left:
                return None
            del self._begun[call]
            return self._desk.end_call(call, ended)

    def keep(self, call: int, name: str, text: str) -> None:
        """Write down a prompt or a reply for the reader."""
        with self._lock:
            if not self._is_left:
                self._desk.keep(call, name, text)

    def event(self, kind: str, text: str) -> None:
        """Write down an outage, a refusal or a recovery, in words that hold no key and no half of a character."""
        with self._lock:
            if not self._is_left:
                self._desk.event(kind, clean(text, most=LONGEST_EVENT))

    def insight(self, text: str) -> None:
        """Write down what the model wants to remember."""
        with self._lock:
            if not self._is_left:
                self._desk.insight(text)

    def leave(self) -> None:
        """Close what is open at its worst case and take nothing more; leaving twice is harmless."""
        with self._lock:
            self._is_left = True
            for call, begun in self._begun.items():
                ended = CallEnded(
                    usage=None,
                    latency_seconds=max(0.0, self._clock() - begun),
                    trouble=Trouble.RUN_ENDED,
                    text=ENDED_IN_FLIGHT,
                )
                self._desk.end_call(call, ended)
            self._begun.clear()
