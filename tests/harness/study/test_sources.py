from __future__ import annotations

import json
from typing import Any

import pytest

from harness import cli
from harness.records import Proposal, ProposalState, Role
from harness.report.page import page
from harness.report.sources import Source, sources
from harness.report.summary import Facts, gather
from harness.terms import CallBegun, CallEnded, Usage

Night = Any  # the fixture's class lives in conftest.py


@pytest.fixture
def facts(night: Night) -> Facts:
    """Return a study in which a model was asked thrice, and one of its two proposals was turned away."""
    night.seat_baseline()
    most = Usage(input_tokens=900, output_tokens=100)
    calls = [
        night.ledger.begin_call(CallBegun(provider="anthropic", model="m", purpose="proposals", most=most), 1.0)
        for _ in range(3)
    ]
    answered = CallEnded(usage=Usage(input_tokens=400, output_tokens=100), latency_seconds=1)
    night.ledger.end_call(calls[0], answered, 0.25)
    hung = CallEnded(usage=None, latency_seconds=9, trouble="timed_out", text="nothing came")
    night.ledger.end_call(calls[1], hung, None)
    night.keep(1e-3)
    for rate in (9.0, 2e-3):
        said = {"rationale": "why", "watch": "what", "call": calls[0]}
        night.ledger.queue(Proposal(diff={"optim.learning_rate": rate}, source="anthropic", model="m", **said))
    night.ledger.reject(2, ProposalState.REFUSED, "out of bounds")
    night.ledger.insight("higher rates help <b>here</b>")
    return gather(night.reader, driver_lives=False)


def test_who_proposed_and_what_it_cost(facts: Facts) -> None:
    """Calls count once, at their worst case where nobody said what they used; a win rate needs a decision."""
    human, model = sources(facts)
    assert (human.source, human.proposals, human.decided, human.kept, human.win_rate) == ("human", 1, 1, 1, 1.0)
    assert (human.calls, human.tokens, human.cost_usd) == (0, 0, 0.0)
    assert model == Source(
        source="anthropic",
        model="m",
        proposals=2,
        decided=0,
        kept=0,
        turned_away=1,
        failed_trials=0,
        calls=3,
        failed_calls=1,
        tokens=500 + 1000 + 1000,
        cost_usd=0.25 + 1.0 + 1.0,
    )
    assert model.win_rate is None


def test_the_readers_say_it(facts: Facts, night: Night, capsys: pytest.CaptureFixture[str]) -> None:
    """The terminal, its JSON and the page agree, and a model's notes are text in all of them."""
    path = str(night.study.paths.root)
    assert cli.main(["status", path]) == 0
    printed = capsys.readouterr().out
    assert "anthropic (m)" in printed
    assert "3 (1 failed)" in printed
    assert "$2.25, 2,500 tokens" in printed
    assert "higher rates help <b>here</b>" in printed
    assert cli.main(["status", path, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [(row["source"], row["win_rate"]) for row in document["sources"]] == [("human", 1.0), ("anthropic", None)]
    assert document["insights"] == ["higher rates help <b>here</b>"]
    shown = page(facts, night.study.paths)
    assert "$2.25, 2,500 tokens" in shown
    assert "higher rates help &lt;b&gt;here&lt;/b&gt;" in shown


def test_a_replay_is_no_failure_of_who_proposed(facts: Facts, night: Night) -> None:
    """What a full run does says nothing about the search."""
    before = sources(facts)
    night.run(night.study.baseline, 1000, Role.FINAL)
    assert sources(gather(night.reader, driver_lives=False)) == before
