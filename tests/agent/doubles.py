"""Stands for what is around a language model: a provider, a desk, a clock, threads and a night, none of which waits."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from agent.asking import Answer, AskFailed, Question
from agent.correspondent import Correspondent, Suggest
from agent.mixed import MixedProposer
from agent.random import RandomProposer
from harness.errors import SpendingCapReached
from harness.terms import CallBegun, CallEnded, Desk, Terms, Usage

TRIAL_SECONDS = 20.0
CALL_SECONDS = 60.0
USAGE = Usage(input_tokens=1000, output_tokens=100)
Outcome = str | BaseException


class Clock:
    """A monotonic clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Threads:
    """Starts jobs that are done some seconds of the clock later, when somebody looks."""

    def __init__(self, clock: Clock, seconds: float = 0.0) -> None:
        self._clock = clock
        self.seconds = seconds
        self._jobs: list[tuple[float, Callable[[], None]]] = []

    def __call__(self, job: Callable[[], None]) -> None:
        self._jobs.append((self._clock.now + self.seconds, job))

    def advance(self, seconds: float) -> None:
        """Let time pass, and finish what is due on the way at the moment that it is due."""
        until = self._clock.now + seconds
        for due, job in sorted(self._jobs, key=lambda pair: pair[0]):
            if due <= until:
                self._jobs.remove((due, job))
                self._clock.now = max(self._clock.now, due)
                job()
        self._clock.now = until

    @property
    def running(self) -> int:
        return len(self._jobs)


class Book:
    """A desk that writes into lists; it lets ``calls_allowed`` calls through."""

    def __init__(self, calls_allowed: int = 10**6) -> None:
        self.calls_allowed = calls_allowed
        self.begun: list[CallBegun] = []
        self.ended: dict[int, CallEnded] = {}
        self.kept: dict[tuple[int, str], str] = {}
        self.events: list[tuple[str, str]] = []
        self.insights: list[str] = []

    def begin_call(self, call: CallBegun) -> int:
        if len(self.begun) >= self.calls_allowed:
            raise SpendingCapReached("$4.90 of $5.00 are spent or reserved, and a call could cost $0.40 more")
        self.begun.append(call)
        return len(self.begun)

    def end_call(self, call: int, ended: CallEnded) -> float | None:
        assert call not in self.ended, "a call's row is closed once"
        self.ended[call] = ended
        return None if ended.usage is None else 0.06

    def keep(self, call: int, name: str, text: str) -> None:
        self.kept[call, name] = text

    def event(self, kind: str, text: str) -> None:
        self.events.append((kind, text))

    def insight(self, text: str) -> None:
        self.insights.append(text)

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]

    @property
    def open_calls(self) -> set[int]:
        return set(range(1, len(self.begun) + 1)) - set(self.ended)


class Actor:
    """A provider that plays outcomes in turn: a text is answered, an exception is raised."""

    def __init__(
        self, outcomes: Iterable[Outcome], *, name: str = "anthropic", at_check: Exception | None = None
    ) -> None:
        self.name = name
        self.model = "wise-1"
        self.questions: list[Question] = []
        self.deadlines: list[float] = []
        self.closed = 0
        self._outcomes: Iterator[Outcome] = iter(outcomes)
        self._at_check = at_check

    def check(self, desk: Desk) -> None:
        if self._at_check is not None:
            raise self._at_check

    def ask(self, question: Question, desk: Desk, *, deadline_seconds: float) -> Answer:
        self.questions.append(question)
        self.deadlines.append(deadline_seconds)
        begun = CallBegun(provider=self.name, model=self.model, purpose=question.purpose, most=USAGE)
        call = desk.begin_call(begun)
        outcome = next(self._outcomes)
        if isinstance(outcome, str):
            cost_usd = desk.end_call(call, CallEnded(usage=USAGE, latency_seconds=60.0))
            return Answer(call=call, text=outcome, usage=USAGE, cost_usd=cost_usd, latency_seconds=60.0)
        trouble = outcome.trouble if isinstance(outcome, AskFailed) else type(outcome).__name__
        desk.end_call(call, CallEnded(usage=None, latency_seconds=1.0, trouble=trouble, text=str(outcome)))
        raise outcome

    def close(self) -> None:
        self.closed += 1


def reply(*diffs: Mapping[str, Any], insights: Iterable[str] = ()) -> str:
    """Return what a model answers to propose these diffs."""
    proposals = [
        {
            "changes": [{"knob": knob, "value": value} for knob, value in diff.items()],
            "rationale": "because",
            "watch": "the curve",
        }
        for diff in diffs
    ]
    return json.dumps({"proposals": proposals, "insights": list(insights)})


def ideas(count: int = 3) -> Iterator[str]:
    """Yield replies without end, none of whose proposals is like another."""
    draws = random.Random(11)
    while True:
        yield reply(
            *(
                {
                    "optim.beta2": round(draws.uniform(0.9, 0.99), 4),
                    "optim.weight_decay": round(draws.uniform(0, 0.1), 4),
                }
                for _ in range(count)
            )
        )


class Drawn(RandomProposer):
    """Stands for Optuna: random draws under its name."""

    name = "sampler"


class Evening:
    """A night with a language model on a clock that trials and calls let go on; what is asked of it never waits."""

    def __init__(
        self,
        night: Any,
        outcomes: Iterable[Outcome],
        *,
        kind: type[MixedProposer] = MixedProposer,
        actor: Actor | None = None,
        call_seconds: float = CALL_SECONDS,
        llm: str | None = "wise-1",
        **details: Any,
    ) -> None:
        self.night = night
        self.clock = Clock()
        self.threads = Threads(self.clock, call_seconds)
        self.book = Book(**details)
        self.actor = actor or Actor(outcomes)
        self.proposer = kind(Drawn, self.correspond)
        self.proposer.begin(Terms(llm=llm, desk=self.book))

    def correspond(self, llm: str, desk: Desk, suggest: Suggest) -> Correspondent:
        return Correspondent(self.actor, desk, suggest=suggest, clock=self.clock, start=self.threads)

    def search(self, proposals: int) -> list[str]:
        """Return the sources of so many proposals, each made at once while the clock stands still, then run."""
        sources = []
        for _ in range(proposals):
            before = self.clock.now
            (proposal,) = self.proposer.propose(self.night.history(), 1)
            assert self.clock.now == before
            sources.append(proposal.source)
            self.night.run(proposal)
            self.threads.advance(TRIAL_SECONDS)
        return sources
