from __future__ import annotations

from typing import Any

import pytest

from agent.rules import RulesProposer
from harness.config import TrialConfig
from harness.records import TrialState

RATE = "optim.learning_rate"


def test_the_learning_rate_is_swept_first(make_night: Any) -> None:
    """The sweep goes up by factors of three while that pays, then looks between the best and its better neighbour."""
    rates = [proposal.diff[RATE] for proposal in make_night().search(RulesProposer(), 4)]
    assert rates == pytest.approx([9e-4, 2.7e-3, 8.1e-3, 4.68e-3])


def test_the_sweep_turns_down_when_up_is_worse(make_night: Any) -> None:
    """A default that is too high is swept downwards."""

    def low_is_better(config: TrialConfig) -> float:
        return 2.0 + config.optim.learning_rate

    first, second = (proposal.diff[RATE] for proposal in make_night(low_is_better).search(RulesProposer(), 2))
    assert first > 3e-4 > second


def test_a_diverged_idea_comes_back_with_half_the_rate(make_night: Any) -> None:
    """Divergence blames the rate first, not the idea."""

    def score(config: TrialConfig) -> float | TrialState:
        if config.batch.per_device == 8 and config.optim.learning_rate > 2e-3:
            return TrialState.DIVERGED
        return 2.0 + abs(config.optim.learning_rate - 2.7e-3)

    night = make_night(score, margin=1e-6)
    made = night.search(RulesProposer(), 7)
    failed = next(i for i, past in enumerate(night.past) if past.trials[0].state is TrialState.DIVERGED)
    assert "batch.per_device" in made[failed].diff
    answer = made[failed + 1]
    assert answer.diff["batch.per_device"] == 8
    assert answer.diff[RATE] == pytest.approx(night.past[failed].config.optim.learning_rate / 2, rel=0.01)


def test_out_of_memory_keeps_the_batch_and_halves_what_is_held(make_night: Any) -> None:
    """What ran out of memory comes back with half the sequences at a time and twice the passes."""

    def score(config: TrialConfig) -> float | TrialState:
        if config.model.width > 128 and config.batch.per_device > 8:
            return TrialState.OUT_OF_MEMORY
        return 2.0 - config.model.width / 1000 + config.batch.per_device / 1e6

    night = make_night(score, margin=1e-5)
    from harness.records import Proposal

    night.run(Proposal(diff={"model.width": 192}, source="human", rationale="", watch=""))
    answer = RulesProposer().propose(night.history(), 1)[0]
    assert answer.diff == {"model.width": 192, "batch.per_device": 8, "batch.accumulation": 2}


def test_predictions_are_improvements_with_a_confidence(make_night: Any) -> None:
    """Every rule commits itself to a number, so that it can be scored."""
    for proposal in make_night().search(RulesProposer(), 12):
        assert proposal.predicted_change is not None
        assert proposal.predicted_change < 0
        assert proposal.confidence is not None


def test_a_long_night_does_not_run_out_of_ideas(make_night: Any) -> None:
    """After the framework come joins and nudges; fifty proposals are none too many."""
    night = make_night()
    assert len(night.search(RulesProposer(), 50)) == 50
    assert night.refused == []


def test_rules_beat_the_default_within_ten(make_night: Any) -> None:
    """On a plain bowl the framework finds most of what there is to find before the night is young no more."""
    night = make_night()
    night.search(RulesProposer(), 10)
    assert night.incumbent.score < night.lineage[0].score - 0.08
