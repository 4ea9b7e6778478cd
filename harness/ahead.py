"""Asks the proposer while trials run, so that the device waits for no answer.

One question is out at a time, in a thread of its own. It is asked when a proposal starts, with the history of that
moment, so that the answer depends on the ledger and not on how quickly it comes; the search takes it when it is there.
The thread dies with the driver: an answer that nobody has taken yet is asked for again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

from harness.records import History, Proposal
from harness.terms import Proposer


class Ahead:
    """One proposer, asked ahead of time."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self._answer: Future[Sequence[Proposal]] | None = None

    @property
    def is_asked(self) -> bool:
        """Tell whether a question is out or its answer waits to be taken."""
        return self._answer is not None

    @property
    def is_answered(self) -> bool:
        """Tell whether proposals wait to be taken; what the proposer raised waits for who asks for its answer."""
        return self._answer is not None and self._answer.done() and self._answer.exception() is None

    def ask(self, history: History) -> None:
        """Ask for the next proposal, unless a question is out already."""
        if self._answer is None:
            self._answer = Future()
            # A daemon: a proposer that hangs must not keep a driver that was asked to end from ending.
            threading.Thread(target=self._work, args=(history, self._answer), name="proposer", daemon=True).start()

    def take(self, *, wait_seconds: float) -> Sequence[Proposal] | None:
        """Return the answer, or None if it has not come within the time; raises what the proposer raised."""
        if self._answer is None:
            return None
        try:
            proposals = self._answer.result(wait_seconds)
        except TimeoutError:
            if not self._answer.done():
                return None
            raise
        finally:
            if self._answer.done():
                self._answer = None
        return proposals

    def _work(self, history: History, answer: Future[Sequence[Proposal]]) -> None:
        try:
            answer.set_result(self._proposer.propose(history, 1))
        except BaseException as error:  # noqa: BLE001  # carried to the driver's thread, which raises it
            answer.set_exception(error)
