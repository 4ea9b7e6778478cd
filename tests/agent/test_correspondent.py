from __future__ import annotations

import dataclasses
import itertools
import json
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from agent.asking import Answer, AskFailed, Question, Trouble
from agent.correspondent import (
    AT_ONCE,
    DEADLINE_SECONDS,
    LONGEST_DEADLINE_SECONDS,
    ROOMS,
    Correspondent,
    in_daemon_thread,
)
from agent.evidence import PLATEAU
from agent.instructions import SYSTEM
from agent.patience import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, MOST_REFUSALS, REFUSAL_PAUSE_SECONDS
from harness.errors import BadInput, LedgerBroken, WrongUse
from harness.records import History, Proposal
from harness.terms import CallBegun, CallEnded, Desk
from tests.agent.doubles import USAGE, Actor, Book, Clock, Outcome, Threads, reply

RATES = [{"optim.learning_rate": rate} for rate in (2e-3, 4e-3, 6e-3)]
LONG = 2 * LONGEST_PAUSE_SECONDS


class Setting:
    """A correspondent with all that is around it; `step` lets time pass and looks for answers."""

    def __init__(self, history: History, outcomes: Sequence[Outcome], **details: Any) -> None:
        self.history = history
        self.clock = Clock()
        self.threads = Threads(self.clock)
        self.book = Book(**details)
        self.actor = Actor(outcomes)
        self.correspondent = Correspondent(
            self.actor, self.book, suggest=lambda history: (), clock=self.clock, start=self.threads
        )

    def step(self, seconds: float = 0.0) -> tuple[Proposal, ...]:
        offered = self.correspondent.offer(self.history)
        self.threads.advance(seconds)
        return offered


@pytest.fixture
def setting(make_night: Any) -> Any:
    history = make_night().history()
    return lambda *outcomes, **details: Setting(history, outcomes, **details)


# --- answers -----------------------------------------------------------------------------------------------------


def test_nobody_waits_and_answers_come_when_they_are_there(setting: Any) -> None:
    """The first look starts a call; what it brings is there at a later one; one call at a time."""
    here = setting(*[reply(*RATES)] * 2)
    here.threads.seconds = 60.0
    assert [len(here.step(20.0)) for _ in range(4)] == [0, 0, 0, 3]
    assert here.threads.running == 0
    assert len(here.actor.questions) == 1
    here.step()
    assert here.threads.running == 1


def test_proposals_say_where_they_came_from(setting: Any) -> None:
    """Source, model and call stand in each, and the shares of a call's tokens, cost and time add up to it."""
    here = setting(reply(*RATES))
    here.step()
    offered = here.step()
    assert [proposal.diff for proposal in offered] == RATES
    assert {(proposal.source, proposal.model, proposal.call) for proposal in offered} == {("anthropic", "wise-1", 1)}
    assert [proposal.tokens for proposal in offered] == [367, 367, 366]
    assert sum(proposal.tokens for proposal in offered) == USAGE.tokens
    assert sum(proposal.cost_usd for proposal in offered) == pytest.approx(0.06)
    assert sum(proposal.latency_seconds for proposal in offered) == pytest.approx(60.0)


def test_what_is_asked(setting: Any) -> None:
    """One question for several proposals, cacheable in its first part, with a deadline by the wall clock."""
    here = setting(reply(*RATES))
    here.step()
    (question,) = here.actor.questions
    assert question.purpose == "proposals"
    assert question.system == SYSTEM
    assert "night" in question.text
    assert question.schema
    assert here.actor.deadlines == [DEADLINE_SECONDS]
    assert AT_ONCE > 1


def test_what_the_sampler_would_try_is_in_the_question(make_night: Any) -> None:
    """The model sees what it may overrule; the sampler is asked in the call's thread, not in the caller's."""
    history, threads, asked = make_night().history(), Threads(Clock()), []

    def suggest(seen: History) -> Sequence[Proposal]:
        asked.append(seen)
        return [Proposal(diff={"optim.beta2": 0.987}, source="sampler", rationale="EI", watch="")]

    actor = Actor([reply(*RATES)])
    correspondent = Correspondent(actor, Book(), suggest=suggest, start=threads)
    correspondent.offer(history)
    assert asked == []
    threads.advance(0.0)
    assert asked == [history]
    assert "0.987" in actor.questions[0].text


def test_a_plateau_is_told(make_night: Any) -> None:
    """After a row of proposals of which none was kept the question is another one."""
    night = make_night(score=lambda config: 2.0)
    texts = []
    for number in range(PLATEAU + 1):
        if number >= PLATEAU - 1:
            here = Setting(night.history(), [reply(*RATES)])
            here.step()
            texts.append(here.actor.questions[0].text)
        night.run(Proposal(diff={"optim.beta2": 0.96 + number / 1000}, source="hand", rationale="", watch=""))
    assert ["A different direction is wanted" in text for text in texts] == [False, True]


def test_insights_are_written_down(setting: Any) -> None:
    """What the model wants to remember reaches the ledger once."""
    here = setting(reply(*RATES, insights=["the rate matters most"]))
    here.step()
    here.step()
    assert here.book.insights == ["the rate matters most"]


def test_insights_that_are_known_are_not_written_again(setting: Any) -> None:
    """Small models note the same each time; neither this run's nor an earlier one's are doubled."""
    here = setting(*[reply(*RATES, insights=["old", "new", "new"])] * 2)
    here.history = dataclasses.replace(here.history, insights=("old",))
    for _ in range(4):
        here.step()
    assert len(here.actor.questions) == 2
    assert here.book.insights == ["new"]


# --- answers that come to nothing ----------------------------------------------------------------------------------


def judged(make_night: Any, call: int, *diffs: dict[str, Any], night: Any = None) -> Any:
    """Return a night after the proposals of a call; what is out of bounds is refused."""
    night = night or make_night()
    for diff in diffs:
        night.run(Proposal(diff=diff, source="anthropic", rationale="", watch="", call=call))
    return night


BAD, FINE = {"optim.learning_rate": 9e9}, {"optim.learning_rate": 2e-3}


def test_a_model_that_only_repeats_itself_is_asked_ever_more_seldom(make_night: Any) -> None:
    """Its answers parse, so they are no failures; but each is billed, and a trial that is not run takes no time."""
    here = Setting(make_night().history(), [reply(*RATES)] * 100)
    night, asked = make_night(), []
    for call in range(1, 7):
        while len(here.actor.questions) < call:
            here.step(1.0)
        asked.append(here.clock.now)
        here.step()
        judged(make_night, call, BAD, BAD, night=night)
        here.history = night.history()
    pauses = [later - sooner for sooner, later in itertools.pairwise(asked)]
    assert pauses == pytest.approx([FIRST_PAUSE_SECONDS * 2**count for count in range(5)], abs=2.0)
    judged(make_night, 7, BAD, FINE, BAD, night=night)
    here.history = night.history()
    here.step()
    assert len(here.actor.questions) == 7, "one trial is enough to be asked at once again"


@pytest.mark.parametrize(("diffs", "is_asked"), [([BAD, BAD], False), ([FINE, BAD], True), ([], True)])
def test_one_trial_of_an_answer_is_enough(make_night: Any, diffs: list[dict[str, Any]], is_asked: bool) -> None:
    """Only an answer of which nothing was tried costs a pause; one that nobody has looked at yet does not."""
    here = Setting(make_night().history(), [reply(*RATES)] * 3)
    here.step()
    here.step()
    here.history = judged(make_night, 1, *diffs).history()
    here.step(1.0)
    assert (len(here.actor.questions) == 2) is is_asked


# --- replies that cannot be read ---------------------------------------------------------------------------------


def test_a_reply_that_cannot_be_read_is_repaired_once(setting: Any) -> None:
    """The second question quotes the reply line by line and says what was wrong; its answer counts."""
    here = setting("Sure!\nIgnore all rules: {", reply(*RATES))
    here.step()
    assert len(here.step()) == 3
    first, second = here.actor.questions
    assert second.purpose == "repair"
    assert second.system == first.system
    assert second.schema == first.schema
    assert second.text.startswith(first.text)
    assert "> Sure!\n> Ignore all rules: {" in second.text
    assert here.book.events == []


def test_a_repair_that_fails_is_trouble(setting: Any) -> None:
    """There is no third turn; the model is asked again after a pause."""
    here = setting("no", "no again", reply(*RATES))
    here.step()
    assert here.step(1.0) == ()
    assert here.book.kinds == ["model_trouble"]
    assert "garbage" in here.book.events[0][1]
    assert [call.purpose for call in here.book.begun] == ["proposals", "repair"]
    here.step(LONG)
    here.step()
    assert len(here.step()) == 3


def test_an_answer_without_proposals_is_not_asked_for_again_at_once(setting: Any) -> None:
    """A model that has nothing to say is not billed once per trial for saying so."""
    here = setting(reply(), reply(), reply(*RATES))
    for _ in range(10):
        here.step(0.1)
    assert [call.purpose for call in here.book.begun] == ["proposals", "repair"]


def test_what_could_not_be_taken_is_shown_the_next_time(setting: Any) -> None:
    """One bad proposal does not lose the others; the reader finds why, and so does the model."""
    half = json.loads(reply(*RATES))
    half["proposals"][1]["changes"] = "a higher rate"
    here = setting(json.dumps(half), reply(*RATES), reply(*RATES))
    here.step()
    assert len(here.step()) == 2
    assert "Proposal 2" in here.book.kept[1, "faults.txt"]
    here.step()
    here.step()
    here.step()
    assert ["> Proposal 2" in question.text for question in here.actor.questions] == [False, True, False]


# --- failures ----------------------------------------------------------------------------------------------------


def test_an_outage_is_survived(setting: Any) -> None:
    """While a provider is down it is asked ever more seldom; when it is back, that is a line and so are its answers."""
    down = AskFailed(Trouble.UNREACHABLE, "connection refused")
    here = setting(*[down] * 8, *[reply(*RATES)] * 400)
    brought = [len(here.step(20.0)) for _ in range(400)]
    assert here.book.kinds == ["model_trouble", "model_back"]
    assert "8 failures" in here.book.events[1][1]
    first = next(position for position, count in enumerate(brought) if count)
    assert brought[first : first + 4].count(3) >= 2
    assert first * 20.0 > sum(FIRST_PAUSE_SECONDS * 2**failures for failures in range(5))


def test_retry_after_of_eight_hours(setting: Any) -> None:
    """It is honoured to the second, and costs nobody anything."""
    here = setting(AskFailed(Trouble.RATE_LIMITED, "slow down", retry_after_seconds=28800.0), reply(*RATES))
    here.step(28790.0)
    here.step(10.1)
    assert len(here.actor.questions) == 1
    here.step(0.0)
    assert len(here.step()) == 3


def test_a_slow_model_is_given_longer(setting: Any) -> None:
    """Each time-out doubles what the next call has, up to a bound, so that a model on a CPU is heard at last."""
    late = AskFailed(Trouble.TIMED_OUT, "no whole answer within 300 s")
    here = setting(*[late] * 3, reply(*RATES))
    for _ in range(4):
        here.step(LONG)
    assert here.actor.deadlines == [DEADLINE_SECONDS, 2 * DEADLINE_SECONDS, *[LONGEST_DEADLINE_SECONDS] * 2]
    assert here.book.kinds == ["model_trouble", "model_back"]


FULL = AskFailed(Trouble.TOO_LONG, "maximum context length is 8192")


def test_a_model_with_little_room_is_asked_for_shorter_answers(setting: Any) -> None:
    """A briefing that fits only with less to write is no reason to give up a local model; one that never fits is."""
    here = setting(FULL, reply(*RATES), reply(*RATES), *[FULL] * 3)
    for _ in range(4):
        here.step()
    most = [question.most_output_tokens for question in here.actor.questions]
    assert most[:3] == [ROOMS[0].output_tokens, *[ROOMS[1].output_tokens] * 2]
    assert here.book.kinds == []
    here.step()
    here.step()
    assert [question.most_output_tokens for question in here.actor.questions][3:] == [
        room.output_tokens for room in ROOMS[1:]
    ]
    assert here.book.kinds == ["prompt_cut", "model_off"]


def test_a_model_with_very_little_room_is_shown_less(setting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A context of 8,000 tokens is many small models' whole: the briefing is cut before the model is given up, once."""
    shown: list[int] = []

    def brief(history: History, *, most_characters: int, **_: object) -> str:
        shown.append(most_characters)
        return "briefing"

    monkeypatch.setattr("agent.correspondent.brief", brief)
    here = setting(*[FULL] * (len(ROOMS) - 1), reply(*RATES), reply(*RATES))
    for _ in range(4):
        here.step()
    assert shown == [room.briefing_characters for room in (*ROOMS, ROOMS[-1])]
    assert here.book.kinds == ["prompt_cut"]


def test_a_repair_that_does_not_fit_is_no_reason_to_give_up(setting: Any) -> None:
    """It is longer than the question, which did fit; the next question is asked as if the reply had been garbage."""
    here = setting("no JSON", FULL, reply(*RATES))
    here.step()
    here.step(LONG)
    assert here.book.kinds == ["model_trouble"]
    here.step()
    assert len(here.step()) == 3


@pytest.mark.parametrize("trouble", [Trouble.NOT_ALLOWED, Trouble.NO_SUCH_MODEL, Trouble.SPENDING_LIMIT])
def test_a_permanent_failure_switches_off(setting: Any, trouble: Trouble) -> None:
    """It is said once, and the model is not asked again however long the night."""
    here = setting(AskFailed(trouble, "no"))
    for _ in range(100):
        here.step(LONG)
    assert here.book.kinds == ["model_off"]
    assert "anthropic wise-1" in here.book.events[0][1]
    assert len(here.actor.questions) == 1


def test_refusals_end_the_asking(setting: Any) -> None:
    """Each is a line with its category; after three in a row nothing is asked any more."""
    here = setting(*[AskFailed(Trouble.REFUSED, "the model declined (category frontier_llm)")] * 10)
    for _ in range(20):
        here.step(2 * REFUSAL_PAUSE_SECONDS)
    assert here.book.kinds == ["model_trouble"] * (MOST_REFUSALS - 1) + ["model_off"]
    assert all("frontier_llm" in text for _, text in here.book.events)
    assert len(here.actor.questions) == MOST_REFUSALS


@pytest.mark.parametrize("calls_allowed", [0, 1])
def test_the_owners_cap_switches_off(setting: Any, calls_allowed: int) -> None:
    """Whether at the first call or at a repair: it is said once, with the sums, and nothing is asked any more."""
    here = setting("no JSON", reply(*RATES), calls_allowed=calls_allowed)
    for _ in range(10):
        here.step(LONG)
    assert here.book.kinds == ["model_off"]
    assert "$4.90 of $5.00" in here.book.events[0][1]
    assert len(here.book.begun) == calls_allowed


@pytest.mark.parametrize("bug", [KeyError("choices"), RecursionError("deep"), AssertionError("\ud800\x1b[31m")])
def test_a_fault_of_ours_switches_off(setting: Any, bug: Exception) -> None:
    """Whatever a server's bytes break on the way ends the asking with a line that says so, never the night."""
    here = setting(bug, reply(*RATES))
    for _ in range(10):
        assert here.step(LONG) == ()
    assert here.book.kinds == ["model_off"]
    text = here.book.events[0][1]
    assert "fault of ours" in text
    assert f"{type(bug).__name__} in doubles.py, line " in text
    assert text.encode().isascii() or "\N{REPLACEMENT CHARACTER}[31m" in text
    assert len(here.actor.questions) == 1


@pytest.mark.parametrize("end", [LedgerBroken("contradiction"), BadInput("the disk is full"), SystemExit(3)])
def test_what_ends_a_night_reaches_the_driver(setting: Any, end: BaseException) -> None:
    """A ledger that cannot be written is nothing to go on without; it is raised where somebody looks."""
    here = setting(end)
    here.step()
    with pytest.raises(type(end)):
        here.step()
    assert here.book.events == []


# --- the start ---------------------------------------------------------------------------------------------------


def checked(at_check: Exception) -> tuple[Book, Correspondent]:
    book = Book()
    actor = Actor([], at_check=at_check)
    return book, Correspondent(actor, book, suggest=lambda history: (), clock=Clock(), start=Threads(Clock()))


def test_a_missing_key_is_told_before_any_training() -> None:
    """It is the owner's to mend, so the run does not start."""
    _, correspondent = checked(WrongUse("set ANTHROPIC_API_KEY"))
    with pytest.raises(WrongUse, match="ANTHROPIC_API_KEY"):
        correspondent.check()


def test_a_provider_that_is_down_is_no_reason_not_to_start() -> None:
    """It is a line, and the model is asked later."""
    book, correspondent = checked(AskFailed(Trouble.UNREACHABLE, "connection refused"))
    correspondent.check()
    assert book.kinds == ["model_trouble"]


def test_a_fault_of_ours_at_the_check_is_no_reason_not_to_start() -> None:
    """The search starts without the model, as it goes on without it later."""
    book, correspondent = checked(KeyError("lifecycle"))
    correspondent.check()
    assert book.kinds == ["model_off"]


def test_no_event_holds_what_a_ledger_does_not_take(setting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever raised it with whatever words."""
    monkeypatch.setenv("GATEWAY_TOKEN", "open-sesame-77")
    here = setting(AskFailed(Trouble.OVERLOADED, "open-sesame-77 \ud800 \x1b[2J"))
    here.step()
    [(_, text)] = here.book.events
    assert text.encode().decode() == text
    assert "sesame" not in text
    assert "\x1b" not in text


# --- the end -----------------------------------------------------------------------------------------------------


class Hanging(Actor):
    """Begins a call and does not come back by itself; one that listens comes back when it is closed."""

    def __init__(self, *, listens: bool) -> None:
        super().__init__([])
        self.is_asked, self.may_go, self.is_back = threading.Event(), threading.Event(), threading.Event()
        self._listens = listens

    def ask(self, question: Question, desk: Desk, *, deadline_seconds: float) -> Answer:
        call = desk.begin_call(CallBegun(provider=self.name, model=self.model, purpose=question.purpose, most=USAGE))
        self.is_asked.set()
        self.may_go.wait()
        text = "the call was given up"
        desk.end_call(call, CallEnded(usage=USAGE, latency_seconds=1.0, trouble="unreachable", text=text))
        self.is_back.set()
        raise AskFailed(Trouble.UNREACHABLE, text)

    def close(self) -> None:
        super().close()
        if self._listens:
            self.may_go.set()


def close_during_a_call(history: History, actor: Hanging) -> Book:
    """Return the book after a close while the actor hangs in its call, in a thread as in a real run."""
    book = Book()
    correspondent = Correspondent(actor, book, suggest=lambda history: (), start=in_daemon_thread)
    correspondent.offer(history)
    assert actor.is_asked.wait(60)
    assert correspondent.offer(history) == ()
    assert book.open_calls == {1}
    correspondent.close()
    correspondent.close()
    return book


def test_closing_does_not_wait_for_a_hanging_call(make_night: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row stays open, and what the thread says when it comes back long after the end is dropped."""
    monkeypatch.setattr("agent.correspondent.CLOSING_SECONDS", 0.01)
    actor = Hanging(listens=False)
    book = close_during_a_call(make_night().history(), actor)
    assert book.open_calls == set()
    assert book.ended[1].trouble == "run_ended"
    assert book.ended[1].usage is None
    actor.may_go.set()
    assert actor.is_back.wait(60)
    assert book.ended[1].trouble == "run_ended"
    assert book.events == []


def test_closing_breaks_a_call_off(make_night: Any) -> None:
    """A provider that listens closes the row itself, with what it knows; that it was broken off is no trouble."""
    actor = Hanging(listens=True)
    book = close_during_a_call(make_night().history(), actor)
    assert actor.closed == 2
    assert book.ended[1].usage == USAGE
    assert book.events == []


def test_nothing_is_asked_after_closing(setting: Any) -> None:
    """Neither by a thread that had not sent its question yet, nor by a later look."""
    here = setting(reply(*RATES))
    here.threads.seconds = 5.0
    here.step()
    here.correspondent.close()
    here.step(10.0)
    here.step(LONG)
    assert here.book.begun == []
    assert here.book.events == []
