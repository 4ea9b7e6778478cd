"""What every proposer promises, held by one suite over all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from agent.mixed import MixedProposer
from agent.random import RandomProposer
from agent.rules import RulesProposer
from agent.sampler import SamplerProposer
from harness.policy import Policy
from harness.terms import Proposer
from tests.agent.doubles import Drawn

MAKERS: dict[str, Any] = {
    "random": RandomProposer,
    "rules": RulesProposer,
    "sampler": SamplerProposer,
    "mixed": lambda: MixedProposer(Drawn),
}


PROCESS = {"sampler"}
EVERY = [pytest.param(name, marks=[pytest.mark.process] * (name in PROCESS)) for name in sorted(MAKERS)]


@pytest.fixture(scope="module", params=EVERY)
def proposer(request: pytest.FixtureRequest) -> Iterator[Proposer]:
    """One proposer for the whole module, so that a warm process is started once."""
    made: Proposer = MAKERS[request.param]()
    yield made
    made.close()
    made.close()


def test_every_proposal_is_admitted_and_new(proposer: Proposer, make_night: Any) -> None:
    """Over a whole night no proposal is refused and no config comes twice."""
    night = make_night()
    made = night.search(proposer, 10)
    assert len(made) == 10
    assert night.refused == []
    digests = [past.config.digest for past in night.past]
    assert len({*digests, night.lineage[0].config.digest}) == 11


def test_every_proposal_says_why_and_what_to_watch(proposer: Proposer, make_night: Any) -> None:
    """A proposal is never a bare diff."""
    for proposal in make_night().search(proposer, 8):
        assert proposal.rationale.strip()
        assert proposal.watch.strip()
        assert proposal.source
        assert proposal.parent is None


def test_a_fresh_proposer_says_what_a_running_one_says(proposer: Proposer, make_night: Any) -> None:
    """A restart changes nothing: all that a proposer knows is in the history."""
    night = make_night()
    night.search(proposer, 7)
    fresh = MAKERS[proposer.name]()
    try:
        assert fresh.propose(night.history(), 2) == proposer.propose(night.history(), 2)
    finally:
        fresh.close()


def test_asking_twice_gives_the_same_answer(proposer: Proposer, make_night: Any) -> None:
    """A proposal is a function of the history, not of how often one asks."""
    night = make_night()
    night.search(proposer, 6)
    assert proposer.propose(night.history(), 1) == proposer.propose(night.history(), 1)


def test_several_at_once_are_different(proposer: Proposer, make_night: Any) -> None:
    """A batch of proposals holds no config twice, as if each had been queued before the next was made."""
    night = make_night()
    night.search(proposer, 5)
    several = proposer.propose(night.history(), 3)
    assert len(several) == 3
    configs = [night.admit(proposal) for proposal in several]
    assert len({config.digest for config in configs}) == 3


def test_nothing_to_say_before_the_baseline(proposer: Proposer, make_night: Any) -> None:
    """Without a scored baseline there is nothing to differ from."""
    history = dataclasses.replace(make_night().history(), baseline=None, incumbent=None, lineage=())
    assert list(proposer.propose(history, 2)) == []


def test_other_studies_differ(make_night: Any) -> None:
    """The study's seed reaches the draws."""
    proposer = RandomProposer()
    one, two = (proposer.propose(make_night(seed=seed).history(), 1)[0].diff for seed in (1, 2))
    assert one != two


def test_conditional_knobs_stay_silent_where_they_mean_nothing(
    proposer: Proposer, make_night: Any, policy: Policy
) -> None:
    """A knob whose condition does not hold is never in a diff."""
    knobs = dict(policy.knobs)
    knobs["schedule.decay_fraction"] = knobs["schedule.decay_fraction"].model_copy(
        update={"when": {"schedule.shape": "linear"}}
    )
    night = make_night(policy=policy.model_copy(update={"knobs": knobs}))
    made = night.search(proposer, 8)
    assert len(made) == 8
    assert night.refused == []


def test_small_spaces_run_dry_quietly(proposer: Proposer, make_night: Any, policy: Policy) -> None:
    """When every config of a finite space is known, there is no proposal, no repeat and no error."""
    names = ("schedule.shape", "sampling.order")
    fixed = dict(policy.fixed) | {k: v.default for k, v in policy.knobs.items() if k not in names}
    small = policy.model_copy(update={"knobs": {k: policy.knobs[k] for k in names}, "fixed": fixed})
    night = make_night(policy=small)
    made = night.search(proposer, 12)
    assert len(made) <= 5
    assert night.refused == []
    assert list(proposer.propose(night.history(), 2)) == []
