from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from agent.asking import AskFailed, Trouble
from agent.mixed import (
    LEAD,
    LEAST_MODEL_SHARE,
    LEAST_SHARE,
    MOST_MODEL_SHARE,
    OPENING,
    WINDOW,
    MixedProposer,
    is_due,
    model_share,
    order,
    shares,
)
from agent.offline import OfflineProposer
from agent.sampler import SamplerFailed
from agent.space import queued
from harness.errors import WrongUse
from harness.policy import Policy
from harness.records import History, Proposal
from tests.agent.doubles import Actor, Drawn, Evening, Outcome, ideas, reply

DOWN = AskFailed(Trouble.UNREACHABLE, "connection refused")


class Broken(OfflineProposer):
    """A sampler whose process cannot be started."""

    name = "sampler"

    def propose(self, history: History, count: int) -> Sequence[Proposal]:
        raise SamplerFailed("no process")


def test_rules_open_and_then_both_have_their_share(make_night: Any) -> None:
    """The first few are the rules'; after that neither is starved, and the source says who it was."""
    night = make_night()
    sources = [proposal.source for proposal in night.search(MixedProposer(Drawn), 24)]
    assert sources[:OPENING] == ["rules"] * OPENING
    counts = Counter(sources[OPENING:])
    assert set(counts) == {"rules", "sampler"}
    assert min(counts.values()) >= LEAST_SHARE * 20 - 2


def test_who_wins_gets_more(make_night: Any) -> None:
    """Kept proposals raise a proposer's share, up to a limit."""
    night = make_night()
    night.search(MixedProposer(Drawn), 3)  # the rules' sweep: two of three are kept
    assert shares(night.history())["rules"] > 0.5
    assert shares(night.history())["rules"] <= 1 - LEAST_SHARE


def test_the_night_survives_a_broken_sampler(make_night: Any) -> None:
    """When the sampler's process fails the others go on, and the ledger says what happened."""
    night = make_night()
    made = night.search(MixedProposer(Broken), 15)
    assert len(made) == 15
    assert {proposal.source for proposal in made} == {"rules"}
    assert any("no process" in proposal.rationale for proposal in made)


def test_random_is_the_last_resort(make_night: Any) -> None:
    """Whatever the order of the two, random search stands behind them."""
    assert order(make_night().history())[-1] == "random"


# --- with a language model ---------------------------------------------------------------------------------------


def test_a_slow_model_keeps_near_its_share_and_nobody_waits(make_night: Any) -> None:
    """With a minute for each answer and trials of twenty seconds there is a proposal whenever one is wanted."""
    evening = Evening(make_night(score=lambda config: 2.0), ideas())
    sources = evening.search(90)
    assert evening.night.refused == []
    share = model_share(evening.night.history(), "anthropic")
    assert share == pytest.approx(1 / 3, abs=0.05)
    assert Counter(sources)["anthropic"] / 90 == pytest.approx(share, abs=0.06)
    assert {"rules", "sampler"} < set(sources)


def test_without_a_model_nothing_changes(make_night: Any) -> None:
    """Terms that name no model give the proposals of a proposer that was never told any."""
    one, other = make_night(), make_night()
    told = Evening(one, [], llm=None)
    assert one.search(told.proposer, 20) == other.search(MixedProposer(Drawn), 20)
    assert told.book.begun == []


def test_a_model_that_never_answers_changes_nothing(make_night: Any) -> None:
    """A first call that hangs all night leaves the night of the sampler and the rules, proposal for proposal."""
    one, other = make_night(), make_night()
    evening = Evening(one, [], call_seconds=1e9)
    assert one.search(evening.proposer, 20) == other.search(MixedProposer(Drawn), 20)


def test_an_outage_in_the_middle_and_a_comeback(make_night: Any) -> None:
    """The others go on; when the model is back it has its share again, and does not take over to catch up."""
    answers = ideas()
    outcomes: list[Outcome] = [*(next(answers) for _ in range(5)), *[DOWN] * 6, *(next(answers) for _ in range(100))]
    evening = Evening(make_night(score=lambda config: 2.0), outcomes)
    sources = evening.search(170)
    assert evening.book.kinds == ["model_trouble", "model_back"]
    positions = [position for position, source in enumerate(sources) if source == "anthropic"]
    gap, back = max((late - early, late) for early, late in itertools.pairwise(positions))
    assert gap > 50
    assert sources[back : back + WINDOW].count("anthropic") <= MOST_MODEL_SHARE * WINDOW + 1
    after = sources[back + WINDOW :]
    assert LEAST_MODEL_SHARE <= after.count("anthropic") / len(after) <= MOST_MODEL_SHARE


@pytest.mark.parametrize(
    "outcomes",
    [
        pytest.param([AskFailed(Trouble.NOT_ALLOWED, "HTTP 401")], id="wrong key"),
        pytest.param([AskFailed(Trouble.REFUSED, "frontier_llm")] * 3, id="refused"),
        pytest.param([DOWN] * 1000, id="down"),
        pytest.param(["<html>"] * 2000, id="garbage"),
    ],
)
def test_a_night_is_never_lost(make_night: Any, outcomes: list[Outcome]) -> None:
    """Whatever the model does, every slot has a proposal of somebody else."""
    evening = Evening(make_night(), outcomes)
    sources = evening.search(40)
    assert set(sources) <= {"rules", "sampler"}
    assert evening.book.events


def test_a_cap_ends_the_asking_and_not_the_night(make_night: Any) -> None:
    """Four calls are paid for; the rest of the night is the others'."""
    evening = Evening(make_night(score=lambda config: 2.0), ideas(), calls_allowed=4)
    sources = evening.search(90)
    assert Counter(sources)["anthropic"] == 12
    assert evening.book.kinds == ["model_off"]


def test_a_fault_of_ours_costs_the_night_only_the_model(make_night: Any) -> None:
    """A provider that raises what it should not is not asked again; the others go on."""
    evening = Evening(make_night(), [ZeroDivisionError("bug")])
    sources = evening.search(12)
    assert len(sources) == 12
    assert "anthropic" not in sources
    assert evening.book.kinds == ["model_off"]
    assert "ZeroDivisionError" in evening.book.events[0][1]


def test_the_share_follows_the_win_rates_within_limits(make_night: Any) -> None:
    """Who wins gets more, who loses less, neither all nor nothing."""
    night = make_night()
    assert model_share(night.history(), "anthropic") == pytest.approx(1 / 3)

    def decided(source: str, count: int, beta2: float) -> None:
        for step in range(count):
            diff = {"optim.beta2": round(beta2 + step * 0.0005, 4)}
            night.run(Proposal(diff=diff, source=source, model=None, rationale="", watch=""))

    night.margin = -1.0  # everything is kept
    decided("anthropic", 10, 0.91)
    night.margin = 1.0  # nothing is
    decided("rules", 10, 0.93)
    decided("sampler", 10, 0.96)
    history = night.history()
    assert model_share(history, "anthropic") == MOST_MODEL_SHARE
    assert model_share(history, "openai") == pytest.approx(MOST_MODEL_SHARE)  # untried beside two that lose
    swapped = {"anthropic": "rules", "rules": "anthropic"}
    past = tuple(
        dataclasses.replace(
            item, proposal=item.proposal.model_copy(update={"source": swapped.get(item.proposal.source, "sampler")})
        )
        for item in history.past
    )
    assert model_share(dataclasses.replace(history, past=past), "anthropic") == LEAST_MODEL_SHARE


@pytest.mark.parametrize("share", [LEAST_MODEL_SHARE, 1 / 3, MOST_MODEL_SHARE])
def test_turns_add_up_to_the_share(make_night: Any, share: float) -> None:
    """Whoever lags is next: a model that always has something makes its share, from the first dozen on."""
    history = make_night().history()
    for _ in range(120):
        source = "anthropic" if is_due(history, "anthropic", share) else "rules"
        history = queued(history, Proposal(diff={}, source=source, rationale="", watch=""))
    sources = [past.proposal.source for past in history.past]
    assert sources.count("anthropic") / 120 == pytest.approx(share, abs=0.03)
    assert sources[:WINDOW].count("anthropic") / WINDOW == pytest.approx(share, abs=0.09)


# --- the start and the briefing ----------------------------------------------------------------------------------


def test_what_the_owner_must_mend_ends_the_start(make_night: Any) -> None:
    """A wrong key is told before any training."""
    with pytest.raises(WrongUse, match="key"):
        Evening(make_night(), [], actor=Actor([], at_check=WrongUse("the key is turned away")))


def test_a_provider_that_is_down_at_the_start(make_night: Any) -> None:
    """The night begins without it, and it is asked when its pause is over."""
    evening = Evening(make_night(score=lambda config: 2.0), [], actor=Actor(ideas(), at_check=DOWN))
    sources = evening.search(30)
    assert evening.book.kinds == ["model_trouble", "model_back"]
    assert "anthropic" in sources


def test_nothing_is_asked_before_the_baseline(make_night: Any) -> None:
    """There is nothing to reason about yet, and nothing to differ from."""
    evening = Evening(make_night(), ideas())
    history = dataclasses.replace(make_night().history(), baseline=None, incumbent=None, lineage=())
    assert list(evening.proposer.propose(history, 2)) == []
    assert evening.threads.running == 0


def test_the_briefing_shows_what_the_sampler_would_try(make_night: Any) -> None:
    """And what it shows is what the sampler then proposes: nothing is used up by looking."""
    night = make_night()
    shown: list[History] = []

    class Watched(Drawn):
        def propose(self, history: History, count: int) -> Any:
            shown.append(history)
            return super().propose(history, count)

    proposer = MixedProposer(Watched)
    first, second = proposer.briefing(night.history()), proposer.briefing(night.history())
    assert first == second
    assert len(shown) == 2


def test_a_model_is_heard_when_the_others_are_dry(make_night: Any, policy: Policy) -> None:
    """A search does not end while an answer waits, whoever's turn it is."""
    names = ("schedule.shape", "sampling.order")
    fixed = dict(policy.fixed) | {name: knob.default for name, knob in policy.knobs.items() if name not in names}
    small = policy.model_copy(update={"knobs": {name: policy.knobs[name] for name in names}, "fixed": fixed})
    again = reply(*[{"schedule.shape": "cosine"}] * 3)
    evening = Evening(make_night(policy=small), [again] * 9, call_seconds=0.0)
    made = evening.night.search(evening.proposer, 1)
    evening.threads.advance(0.0)
    made += evening.night.search(evening.proposer, 20)
    assert [proposal.source for proposal in made].count("anthropic") == 3


class Third(MixedProposer):
    """Gives a language model a third, whatever it wins."""

    def model_share(self, history: History, source: str) -> float:
        return 1 / 3


def test_a_model_is_asked_when_its_turn_is_near(make_night: Any) -> None:
    """With answers that come within a trial, none is asked for before what it should reason about is there."""
    evening = Evening(make_night(score=lambda config: 2.0), ideas(1), kind=Third, call_seconds=10.0)
    sources, asked = [], []
    for position in range(40):
        before = len(evening.actor.questions)
        sources += evening.search(1)
        asked += [position] * (len(evening.actor.questions) - before)
    taken = [position for position, source in enumerate(sources) if source == "anthropic"]
    assert len(taken) == 13
    assert taken == [position + LEAD for position in asked][: len(taken)]
