from __future__ import annotations

import threading
from typing import Any

import pytest

from harness.errors import LedgerBroken
from harness.records import AbortIf, Proposal
from harness.rows import Spent
from harness.terms import CallBegun, CallEnded, Usage

Night = Any  # the driver of the fixture ``night``; conftest.py is not importable under importlib mode

MOST = Usage(input_tokens=900, output_tokens=100)
ASKED = CallBegun(provider="anthropic", model="m", purpose="proposals", most=MOST)
ANSWERED = CallEnded(usage=Usage(input_tokens=300, cache_read_tokens=200, output_tokens=50), latency_seconds=2.5)


def test_a_call_counts_at_its_worst_case_until_it_has_ended(night: Night) -> None:
    """In flight it counts as 1,000 tokens and a dollar, ended as what the provider billed."""
    first = night.ledger.begin_call(ASKED, 1.0)
    second = night.ledger.begin_call(ASKED, 1.0)
    assert night.ledger.spent() == Spent(tokens=2000, usd=2.0, unpriced_calls=0)
    night.ledger.end_call(first, ANSWERED, 0.25)
    assert night.ledger.spent() == Spent(tokens=1550, usd=1.25, unpriced_calls=0)
    with night.reader() as reader:
        done, flying = reader.calls()
    assert (done.id, done.state, done.tokens, done.cost_usd, done.latency_seconds) == (
        first,
        "answered",
        550,
        0.25,
        2.5,
    )
    assert (flying.id, flying.state, flying.tokens, flying.cost_usd) == (second, "in_flight", 1000, 1.0)


def test_usage_that_nobody_told_counts_at_its_worst_case(night: Night) -> None:
    """Unless the request never reached anybody: then it cost nothing."""
    sent, unsent = night.ledger.begin_call(ASKED, 1.0), night.ledger.begin_call(ASKED, 1.0)
    hung = CallEnded(usage=None, latency_seconds=300, trouble="timed_out", text="no answer in 300 s")
    refused = CallEnded(usage=None, latency_seconds=0, trouble="unreachable", text="connection refused", sent=False)
    night.ledger.end_call(sent, hung, None)
    night.ledger.end_call(unsent, refused, None)
    assert night.ledger.spent() == Spent(tokens=1000, usd=1.0, unpriced_calls=0)
    with night.reader() as reader:
        assert [(call.state, call.trouble) for call in reader.calls()] == [
            ("failed", "timed_out"),
            ("failed", "unreachable"),
        ]


def test_a_call_without_a_price_is_counted_as_one(night: Night) -> None:
    """So that a cap on money can refuse to go on."""
    night.ledger.end_call(night.ledger.begin_call(ASKED, None), ANSWERED, None)
    night.ledger.begin_call(ASKED, None)
    assert night.ledger.spent() == Spent(tokens=1550, usd=0.0, unpriced_calls=2)


def test_what_a_dead_driver_had_in_flight_is_closed_at_its_worst_case(night: Night) -> None:
    """The money may be spent, so it counts."""
    night.ledger.end_call(night.ledger.begin_call(ASKED, 1.0), ANSWERED, 0.25)
    night.ledger.begin_call(ASKED, 1.0)
    assert night.ledger.lose_calls() == 1
    assert night.ledger.lose_calls() == 0
    assert night.ledger.spent() == Spent(tokens=1550, usd=1.25, unpriced_calls=0)
    with night.reader() as reader:
        assert [call.state for call in reader.calls()] == ["answered", "lost"]


def test_a_closed_call_never_changes(night: Night) -> None:
    """The database refuses a second end, another price and a deletion."""
    number = night.ledger.begin_call(ASKED, 1.0)
    night.ledger.end_call(number, ANSWERED, 0.25)
    with pytest.raises(LedgerBroken, match="closed rows never change"):
        night.ledger.end_call(number, ANSWERED, 0.5)
    with pytest.raises(LedgerBroken, match="never deleted"), night.ledger.atomic():
        night.ledger._db.conn.execute("DELETE FROM calls")
    night.ledger.begin_call(ASKED, 1.0)
    with pytest.raises(LedgerBroken, match="only how it ended"), night.ledger.atomic():
        night.ledger._db.conn.execute("UPDATE calls SET most_usd = 0 WHERE state = 'in_flight'")


def test_a_proposal_remembers_its_call_and_when_it_gives_up(night: Night) -> None:
    """Both come back as they were made, and cannot be changed afterwards."""
    number = night.ledger.begin_call(ASKED, 1.0)
    night.ledger.end_call(number, ANSWERED, 0.25)
    made = Proposal(
        diff={"optim.learning_rate": 1e-3},
        source="anthropic",
        model="m",
        rationale="why",
        watch="what",
        call=number,
        abort_if=AbortIf(probe_above=2.5, after=0.4),
    )
    queued = night.ledger.queue(made)
    with night.reader() as reader:
        assert reader.proposal(queued).proposal == made
    with pytest.raises(LedgerBroken, match="never changes"), night.ledger.atomic():
        night.ledger._db.conn.execute("UPDATE proposals SET abort_if = NULL")
    with pytest.raises(LedgerBroken, match="FOREIGN KEY"):
        night.ledger.queue(made.model_copy(update={"call": 99}))


def test_proposals_from_outside_go_first(night: Night) -> None:
    """A person's or an agent's waits behind nobody but its like."""
    own, hand, later = night.proposal(), night.proposal(optim__weight_decay=0.2), night.proposal(optim__beta1=0.8)
    night.ledger.queue(own)
    night.ledger.queue(hand, outside=True)
    night.ledger.queue(own)
    night.ledger.queue(later, outside=True)
    with night.reader() as reader:
        assert [past.number for past in reader.queued()] == [2, 4, 1, 3]


def test_threads_of_the_driver_share_the_ledger(night: Night) -> None:
    """A proposer books its calls while the driver writes rows: nothing is lost, mixed up or refused."""

    def book() -> None:
        for _ in range(50):
            night.ledger.end_call(night.ledger.begin_call(ASKED, 0.5), ANSWERED, 0.25)

    threads = [threading.Thread(target=book) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        with night.ledger.atomic():
            night.ledger.event("one", "first of two")
            night.ledger.event("two", "second of two")
    for thread in threads:
        thread.join()
    with night.reader() as reader:
        assert len(reader.calls()) == 200
        kinds = [event.kind for event in reader.events()]
    assert kinds == ["one", "two"] * 50
    assert night.ledger.spent() == Spent(tokens=200 * 550, usd=50.0, unpriced_calls=0)


def test_the_view_of_sources_counts_what_calls_cost(night: Night) -> None:
    """Calls are counted once per proposer, however many proposals they brought."""
    number = night.ledger.begin_call(ASKED, 1.0)
    night.ledger.end_call(number, ANSWERED, 0.25)
    for rate in (1e-3, 2e-3):
        proposal = night.proposal(optim__learning_rate=rate)
        night.ledger.queue(proposal.model_copy(update={"source": "anthropic", "model": "m", "call": number}))
    night.ledger.queue(night.proposal())
    with night.reader() as reader:
        rows = [
            (r["source"], r["proposals"], r["tokens"], r["cost_usd"]) for r in reader._rows("SELECT * FROM sources")
        ]
    assert rows == [("anthropic", 2, 550, 0.25), ("rules", 1, None, None)]
