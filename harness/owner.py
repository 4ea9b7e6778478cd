"""What the owner asks of a running driver: by signals, or from another shell through the inbox.

The first signal ends the running trial, the second ends the driver at once; neither loses a row, because the rows are
there before anything happens.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import assert_never

from harness import inbox
from harness.interrupts import INTERRUPTED, leave, listened_to, sentence
from harness.ledger import Ledger
from harness.paths import StudyPaths
from harness.view import View

PAUSE_POLL_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopped:
    """How a search ended."""

    reason: str
    exit_code: int


class Ended(Exception):
    """Control flow: the owner ended the search."""

    def __init__(self, stopped: Stopped) -> None:
        super().__init__(stopped.reason)
        self.stopped = stopped


class Owner:
    """Collects the owner's wishes; the loop asks between trials, the launcher while one runs."""

    def __init__(self, paths: StudyPaths, ledger: Ledger, view: View) -> None:
        self._paths = paths
        self._ledger = ledger
        self._view = view
        self._paused = False
        self._end: Stopped | None = None

    def wants_stop(self) -> bool:
        """Tell whether the running trial must end; takes the inbox in passing."""
        self.take_inbox()
        return self._end is not None

    def obey(self) -> None:
        """Wait while the search is paused; raise `Ended` once the owner asked to stop."""
        self.take_inbox()
        if self._paused and self._end is None:
            self._view.say(f"Paused by the owner; `overnight resume {self._paths.name}` goes on.")
        while self._paused and self._end is None:
            time.sleep(PAUSE_POLL_SECONDS)
            self.take_inbox()
        if self._end is not None:
            raise Ended(self._end)

    def take_inbox(self) -> None:
        """Book what came from outside since the last look."""
        for message in inbox.take(self._paths):
            match message:
                case inbox.Propose():
                    number = self._ledger.queue(message.proposal, outside=True)
                    self._view.say(f"Proposal {number} from {message.proposal.source} is queued.")
                case inbox.Insight():
                    self._ledger.insight(f"{message.source} notes: {message.text}")
                case inbox.Pause():
                    self._paused = True
                    self._ledger.event("pause", "the owner asked to pause")
                case inbox.Resume():
                    self._paused = False
                    self._ledger.event("resume", "the owner asked to go on")
                case inbox.Stop():
                    self._end = self._end or Stopped(reason="the owner asked to stop", exit_code=0)
                    self._ledger.event("stop", "the owner asked to stop")
                case inbox.Unreadable():
                    self._ledger.event("unreadable", f"{message.file} in the inbox is no message: {message.reason}")
                case _:
                    assert_never(message)

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Listen to signals inside; the handlers of before come back afterwards."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self._end is not None:
                leave(number)
            self._end = Stopped(reason=sentence(number), exit_code=INTERRUPTED)

        before = [(number, signal.signal(number, handle)) for number in listened_to()]
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)
