from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from agent.mixed import LEAST_SHARE, OPENING, MixedProposer, order, shares
from agent.offline import OfflineProposer
from agent.random import RandomProposer
from agent.sampler import SamplerFailed
from harness.records import History, Proposal


class Stub(RandomProposer):
    """Stands for Optuna: random draws under its name."""

    name = "sampler"


class Broken(OfflineProposer):
    """A sampler whose process cannot be started."""

    name = "sampler"

    def propose(self, history: History, count: int) -> Sequence[Proposal]:
        raise SamplerFailed("no process")


def test_rules_open_and_then_both_have_their_share(make_night: Any) -> None:
    """The first few are the rules'; after that neither is starved, and the source says who it was."""
    night = make_night()
    sources = [proposal.source for proposal in night.search(MixedProposer(Stub), 24)]
    assert sources[:OPENING] == ["rules"] * OPENING
    counts = Counter(sources[OPENING:])
    assert set(counts) == {"rules", "sampler"}
    assert min(counts.values()) >= LEAST_SHARE * 20 - 2


def test_who_wins_gets_more(make_night: Any) -> None:
    """Kept proposals raise a proposer's share, up to a limit."""
    night = make_night()
    night.search(MixedProposer(Stub), 3)  # the rules' sweep: two of three are kept
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
