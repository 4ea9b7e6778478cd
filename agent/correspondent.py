"""Keeps up a conversation with one language model in the background, so that nobody ever waits for an answer.

`Correspondent.offer` returns at once what has come in. What it starts is one thread per call: a daemon, because a
thread that hangs in a read cannot be ended from outside and must not keep the driver alive. Between two calls nothing
runs, so there is nothing to sleep in: a pause after a failure is a moment before which no call is started.

While a call is in flight its thread alone touches the correspondent's state; `offer` looks at nothing but whether the
call is done.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from agent.asking import Answer, AskFailed, Provider, Question, Trouble
from agent.briefing import FEWER_CHARACTERS, MOST_CHARACTERS, brief
from agent.desk import LeavableDesk
from agent.evidence import plateaued
from agent.instructions import SYSTEM
from agent.patience import Notice, Patience
from agent.record import TURNED_AWAY
from agent.reply import BadReply, Reply, read, schema
from agent.troubles import clean
from harness.errors import OvernightError, SpendingCapReached
from harness.records import History, Proposal, ProposalState
from harness.terms import Desk

AT_ONCE = 3
"""Proposals asked for with one call. The briefing is most of what a call costs, so one is too few; all of them are made
without seeing how the others fare, so many are too many."""
DEADLINE_SECONDS = 300.0
"""For one call, by the wall clock: reasoning models think for minutes, and the device does not wait for them."""
LONGEST_DEADLINE_SECONDS = 1_200.0
"""After time-outs, each of which doubles what the next call has: a model on a slow CPU reads a briefing for minutes,
and would else never be heard."""


class Room(NamedTuple):
    """What a question and its answer may take of a model's context."""

    output_tokens: int
    briefing_characters: int = MOST_CHARACTERS


ROOMS = (
    Room(output_tokens=16_000),
    Room(output_tokens=4_000),
    Room(output_tokens=1_500),
    Room(output_tokens=1_500, briefing_characters=FEWER_CHARACTERS),
)
"""The most first. Three proposals take about 1,000 tokens; the rest is room to reason, and counts against the caps in
advance. Servers count what may be written with what is read, and local models have little room beside a briefing."""
CLOSING_SECONDS = 1.0
"""For a call that is broken off to say what it used. A row closed without that counts at its worst case."""
QUOTED_CHARACTERS = 6_000
"""Of a reply that is shown back to be repaired."""

Suggest = Callable[[History], Sequence[Proposal]]
Start = Callable[[Callable[[], None]], None]


def in_daemon_thread(job: Callable[[], None]) -> None:
    """Run ``job`` beside whatever else happens; it does not keep the process alive."""
    threading.Thread(target=job, name="correspondent", daemon=True).start()


class Correspondent:
    """Asks one model for proposals, one call at a time, and has them ready when somebody looks."""

    def __init__(
        self,
        provider: Provider,
        desk: Desk,
        *,
        suggest: Suggest,
        clock: Callable[[], float] = time.monotonic,
        start: Start = in_daemon_thread,
    ) -> None:
        """Ask nothing yet. ``suggest`` is called in the call's thread, for what the sampler would try next.

        ``clock`` counts seconds; ``start`` runs a job beside the caller. Both are here for tests, which do not wait.
        """
        self._provider = provider
        self._desk = LeavableDesk(desk, clock)
        self._suggest = suggest
        self._clock = clock
        self._start = start
        self._patience = Patience(f"{provider.name} {provider.model}")
        self._rooms = deque(ROOMS)
        """Those that are not yet known to be too large."""
        self._deadline_seconds = DEADLINE_SECONDS
        self._faults: tuple[str, ...] = ()
        """What could not be taken of the last answer."""
        self._noted: set[str] = set()
        """What the model wrote to itself in this run; said again, it is no news."""
        self._call: Future[tuple[Proposal, ...]] | None = None
        self._is_closed = False

    @property
    def source(self) -> str:
        """Name under which its proposals stand in the ledger: the provider's."""
        return self._provider.name

    def check(self) -> None:
        """Look whether key and model are there, before any training; `WrongUse` says which is missing.

        A provider that cannot be reached now may be back in an hour: that is a line in the ledger, and the run starts.
        """
        self._shielded(self._check, seed=0)  # no study is known yet

    def offer(self, history: History) -> tuple[Proposal, ...]:
        """Return what has come in since the last time; if nothing has, start a call unless one is in flight.

        What a thread met that the driver has to know, a ledger that cannot be written above all, is raised here.
        """
        if self._call is not None:
            if not self._call.done():
                return ()
            call, self._call = self._call, None
            if proposals := call.result():
                return proposals
        fruitless = _fruitless(history, self.source)
        if not self._is_closed and self._patience.allows(self._clock(), fruitless):
            self._call = Future()
            ask = partial(self._shielded, partial(self._ask, history), history.seed)
            self._start(partial(_fulfil, self._call, ask))
        return ()

    def close(self) -> None:
        """Break off the call in flight; its row is closed by whoever was sending it, or else here."""
        self._is_closed = True
        self._provider.close()
        call = self._call
        if call is not None and self._desk.has_open_calls:
            wait([call], timeout=CLOSING_SECONDS)
        self._desk.leave()

    # --- in the call's thread --------------------------------------------------------------------------------------

    def _shielded(self, job: Callable[[], tuple[Proposal, ...]], seed: int) -> tuple[Proposal, ...]:
        """Return what a job with the provider brings; nothing, and a line in the ledger, if it failed in any way."""
        try:
            return job()
        except SpendingCapReached as error:
            self._say(self._patience.switch_off(str(error)))
        except AskFailed as error:
            self._say(self._patience.failed(error, self._clock(), seed))
        except OvernightError:  # the owner's to mend, or a ledger that is broken or full: the driver's to end on
            raise
        except Exception as error:  # noqa: BLE001
            # The one broad except. What comes from outside passes two SDKs, their HTTP client and our reader, any of
            # which may fail at bytes that nobody thought of, and a night must not be lost to a proposer that it can
            # do without. It is not hidden: the line names the class and the place, and nothing more is asked.
            self._say(self._patience.switch_off(_fault_of_ours(error)))
        return ()

    def _check(self) -> tuple[Proposal, ...]:
        self._provider.check(self._desk)
        return ()

    def _ask(self, history: History) -> tuple[Proposal, ...]:
        """Return the proposals of one call, and write down what the model notes."""
        answer, reply = self._converse(history)
        self._say(self._patience.answered(self._clock()))
        self._faults = reply.faults
        if reply.faults:
            self._desk.keep(answer.call, "faults.txt", "\n".join(reply.faults) + "\n")
        for insight in reply.insights:
            if insight not in self._noted and insight not in history.insights:
                self._noted.add(insight)
                self._desk.insight(insight)
        return _shared(reply.proposals, answer)

    def _converse(self, history: History) -> tuple[Answer, Reply]:
        """Ask, and once more if the reply cannot be read; `AskFailed` if there is still no proposal in it."""
        question, answer = self._put(history)
        try:
            return answer, self._read(answer, history)
        except BadReply as error:
            fault = str(error)
        try:
            answer = self._send(_repair(question, answer, fault))
            return answer, self._read(answer, history)
        except BadReply as error:
            raise AskFailed(Trouble.GARBAGE, f"neither the reply nor its repair could be read: {error}") from error
        except AskFailed as error:
            if error.trouble is not Trouble.TOO_LONG:
                raise
            # the question itself did fit: no reason to switch the model off
            raise AskFailed(
                Trouble.GARBAGE, f"the reply could not be read, and its repair does not fit: {fault}"
            ) from error

    def _put(self, history: History) -> tuple[Question, Answer]:
        """Return the question with its answer; what does not fit the context is put shorter, from now on."""
        suggestions = self._suggest(history)
        while True:
            room = self._rooms[0]
            text = brief(
                history,
                suggestions=suggestions,
                plateau=plateaued(history),
                most_characters=room.briefing_characters,
            )
            question = Question(
                purpose="proposals",
                system=SYSTEM,
                text=text + _rest(self._faults),
                name="proposals",
                schema=schema(history.knobs, history.max_changes, AT_ONCE),
                most_output_tokens=room.output_tokens,
            )
            try:
                return question, self._send(question)
            except AskFailed as error:
                if error.trouble is not Trouble.TOO_LONG or len(self._rooms) == 1:
                    raise
                self._leave_room(str(error))

    def _leave_room(self, why: str) -> None:
        """Take the next smaller room from now on, and say so where the model is shown less for it."""
        left = self._rooms.popleft()
        most = self._rooms[0].briefing_characters
        if most < left.briefing_characters:
            text = f"{self._provider.model} is shown a shorter briefing, of up to {most:,} characters: {why}"
            self._say(Notice("prompt_cut", text))

    def _send(self, question: Question) -> Answer:
        try:
            return self._provider.ask(question, self._desk, deadline_seconds=self._deadline_seconds)
        except AskFailed as error:
            if error.trouble is Trouble.TIMED_OUT:
                self._deadline_seconds = min(LONGEST_DEADLINE_SECONDS, 2 * self._deadline_seconds)
            raise

    def _read(self, answer: Answer, history: History) -> Reply:
        reply = read(answer.text, history, source=self._provider.name, model=self._provider.model, most=AT_ONCE)
        if not reply.proposals:  # taken for an answer, it would be asked for again at once, and billed again
            raise BadReply("; ".join(["it holds no proposal", *reply.faults]))
        return reply

    def _say(self, notice: Notice | None) -> None:
        if notice is not None and not self._is_closed:  # a call that closing broke off is no trouble
            self._desk.event(notice.kind, notice.text)


def _fulfil(call: Future[tuple[Proposal, ...]], job: Callable[[], tuple[Proposal, ...]]) -> None:
    try:
        call.set_result(job())
    except BaseException as error:  # noqa: BLE001 - a thread has nobody to tell; `offer` raises it
        call.set_exception(error)


def _fruitless(history: History, source: str) -> int:
    """Return how many of the newest calls to a model in a row brought nothing but proposals that were turned away."""
    calls: dict[int, list[ProposalState]] = {}
    for past in reversed(history.past):
        if past.proposal.source == source and past.proposal.call is not None and past.state is not ProposalState.QUEUED:
            calls.setdefault(past.proposal.call, []).append(past.state)
    return sum(1 for _ in takewhile(lambda states: all(state in TURNED_AWAY for state in states), calls.values()))


def _fault_of_ours(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(place.filename).name}, line {place.lineno}"
    return f"a fault of ours, please report it: {type(error).__name__} in {where}: {clean(str(error))}"


def _repair(question: Question, answer: Answer, fault: str) -> Question:
    """Return the same question with the reply that could not be read, quoted, and what was wrong with it."""
    text = (
        f"{question.text}\n\n"
        "## Your last reply could not be read\n\n"
        f"What was wrong with it:\n\n{_quoted(fault)}\n\n"
        f"It was:\n\n{_quoted(answer.text)}\n\n"
        "Answer again, with one JSON document that fits the schema and nothing else.\n"
    )
    return dataclasses.replace(question, purpose="repair", text=text)


def _rest(faults: Sequence[str]) -> str:
    """Return what the briefing cannot know: parts of the last answer that never became a row."""
    if not faults:
        return ""
    return f"\n\n## Of your last answer, this could not be taken\n\n{_quoted(chr(10).join(faults))}\n"


def _quoted(text: str) -> str:
    """Return a text of the model line by line behind ``>``, so that nothing in it can end the quotation."""
    lines = "\n".join(f"> {line}" for line in text[:QUOTED_CHARACTERS].splitlines())
    return lines + ("\n> … (cut)" if len(text) > QUOTED_CHARACTERS else "")


def _shared(proposals: Sequence[Proposal], answer: Answer) -> tuple[Proposal, ...]:
    """Return the proposals with the call that they came from and their shares of what it took: they add up to it."""
    count = len(proposals)
    tokens = None if answer.usage is None else answer.usage.tokens
    cost_usd = None if answer.cost_usd is None else answer.cost_usd / count
    return tuple(
        proposal.model_copy(
            update={
                "call": answer.call,
                "tokens": None if tokens is None else tokens // count + (position < tokens % count),
                "cost_usd": cost_usd,
                "latency_seconds": answer.latency_seconds / count,
            }
        )
        for position, proposal in enumerate(proposals)
    )
