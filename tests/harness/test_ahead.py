from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, cast

import pytest

from harness.ahead import Ahead
from harness.records import History, Proposal
from harness.terms import Proposer

LONG_SECONDS = 60.0
HISTORY = cast(History, object())
"""Never looked into: it is only handed on."""


class Thinker:
    """Answers when it is let."""

    def __init__(self, answer: Sequence[Proposal] | Exception) -> None:
        self.answer = answer
        self.may_answer = threading.Event()
        self.asked: list[Any] = []

    def propose(self, history: History, count: int) -> Sequence[Proposal]:
        self.asked.append((history, count))
        assert self.may_answer.wait(LONG_SECONDS)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def ahead(thinker: Thinker) -> Ahead:
    return Ahead(cast(Proposer, thinker))


def test_one_question_is_out_until_its_answer_is_taken() -> None:
    """Nobody waits for a slow answer, asking again meanwhile changes nothing, and an answer is taken once."""
    proposals = [Proposal(diff={"optim.learning_rate": 1e-3}, source="slow", rationale="why", watch="what")]
    thinker = Thinker(proposals)
    asked = ahead(thinker)
    assert asked.take(wait_seconds=0) is None
    asked.ask(HISTORY)
    asked.ask(HISTORY)
    assert asked.is_asked
    assert asked.take(wait_seconds=0.01) is None
    thinker.may_answer.set()
    assert asked.take(wait_seconds=LONG_SECONDS) == proposals
    assert not asked.is_asked
    assert asked.take(wait_seconds=0) is None
    assert thinker.asked == [(HISTORY, 1)]


@pytest.mark.parametrize("error", [ValueError("no"), TimeoutError("the proposer's own")])
def test_what_the_proposer_raises_reaches_the_driver(error: Exception) -> None:
    """An error in the thread is raised where the answer is taken, a time-out of the proposer's own included."""
    thinker = Thinker(error)
    asked = ahead(thinker)
    thinker.may_answer.set()
    asked.ask(HISTORY)
    with pytest.raises(type(error), match=str(error)):
        asked.take(wait_seconds=LONG_SECONDS)
    assert not asked.is_asked


def test_a_thinker_that_hangs_keeps_nobody() -> None:
    """The thread is a daemon: the driver ends when it is told to."""
    asked = ahead(Thinker([]))
    asked.ask(HISTORY)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "proposer")
