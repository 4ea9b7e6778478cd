"""What proposers make of configs that were turned down for the guard set: best in score, and worth nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from agent.briefing import brief
from agent.evidence import effects, failures, scores
from agent.rules import RulesProposer
from agent.sampler import request
from agent.space import Space
from harness.config import TrialConfig
from harness.records import BREAKS_GUARD, Decision, Guard, Noise, Proposal, TrialState

RATE = "optim.learning_rate"
GUARD = Guard(reference=4.0, max_regression=0.05, noise=Noise(standard_deviation=0.004, degrees_of_freedom=2))


def higher_is_better(config: TrialConfig) -> float:
    """Return a score that falls with the rate: what forgets, wins."""
    return 2.0 - config.optim.learning_rate


def forget(night: Any, proposal: Proposal) -> Any:
    """Run a proposal and turn it down for the guard set."""
    lineage = list(night.lineage)
    past = night.run(proposal)
    verdict = dataclasses.replace(
        past.verdict,
        decision=Decision.DISCARDED,
        difference=None,
        replicates=0,
        reason=f"{BREAKS_GUARD}: 0.081 bits per byte worse than the untouched base on the guard set",
    )
    trials = tuple(dataclasses.replace(trial, guard_score=4.0812345) for trial in past.trials)
    night.past[-1] = dataclasses.replace(past, verdict=verdict, trials=trials)
    night.lineage[:] = lineage
    return night.past[-1]


def test_the_sweep_goes_no_further_up(make_night: Any) -> None:
    """A rate that forgets too much is a rate that is too high, whatever it scores."""
    night = make_night(higher_is_better)
    (first,) = RulesProposer().propose(night.history(), 1)
    assert first.diff[RATE] > 3e-4
    forget(night, first)
    (second,) = RulesProposer().propose(night.history(), 1)
    assert second.diff[RATE] < first.diff[RATE]


def test_another_idea_comes_back_with_half_the_rate(make_night: Any) -> None:
    """The idea may be right, only too rough."""
    night = make_night(higher_is_better)
    diff = {"batch.per_device": 8}
    forget(night, Proposal(diff=diff, source="human", rationale="", watch=""))
    (answer,) = RulesProposer().propose(night.history(), 1)
    assert answer.diff == {**diff, RATE: pytest.approx(night.incumbent.config.optim.learning_rate / 2)}
    assert "forgets too much" in answer.rationale


def test_the_sampler_is_told_that_it_is_worthless(make_night: Any) -> None:
    """Told with its score it would draw the sampler on, left out it would come back."""
    night = make_night(higher_is_better)
    past = forget(night, Proposal(diff={RATE: 9e-3}, source="human", rationale="", watch=""))
    history = night.history()
    assert past.config.digest not in scores(history)
    assert failures(history)[past.config.digest][1] is TrialState.SCORED
    (effect,) = effects(history)
    assert (effect.change, effect.failure, effect.breaks_guard, effect.pending) == (None, None, True, False)
    space = Space.of(history)
    assert space is not None
    observed = request(space, "tpe")["observed"]
    assert len(observed) == 2
    assert {point["score"] for point in observed} == {night.incumbent.score}


def test_the_briefing_tells_it_rounded_and_apart(make_night: Any) -> None:
    """No near miss, no effect of a knob: a line of its own among the failures."""
    night = make_night(higher_is_better)
    forget(night, Proposal(diff={RATE: 9e-3}, source="human", rationale="", watch=""))
    standing = dataclasses.replace(night.lineage[0], guard_scores={0: 4.0123456})
    base = dataclasses.replace(night.baseline_trials[0], score=1.5, guard_score=4.0)
    history = dataclasses.replace(
        night.history(), reference=base, guard=GUARD, baseline=standing, incumbent=standing, lineage=(standing,)
    )
    text = brief(history)
    assert "p1 (optim.learning_rate 0.0003→0.009): +0.082 bits per byte" in text
    assert "near miss" not in text
    assert "effect" not in text.partition("## What each knob did")[2].partition("Effect:")[2].partition("##")[0]
    assert "baseline +0.012." in text
    assert "4.08" not in text
    assert "WARNING: the trained baseline is worse than the untouched base" in text
    assert "So far 1 proposals (1 breaks the guard)" in text
