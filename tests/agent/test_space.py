from __future__ import annotations

from typing import Any

from agent.space import Space, from_unit, seed, tidy, to_unit, vocabulary
from harness.config import Knob
from harness.records import Proposal


def test_the_vocabulary_follows_from_a_trial(make_night: Any) -> None:
    """The parameter count of a finished trial gives the vocabulary away, and with it the steps of a flop budget."""
    night = make_night()
    space = Space.of(night.history())
    assert space is not None
    assert vocabulary(space.history) == 1024
    steps = space.steps(night.lineage[0].config)
    assert steps is not None
    assert int(steps) == night.baseline_trials[0].steps


def test_refused_and_queued_proposals_are_known(make_night: Any) -> None:
    """What was turned away or waits is not proposed again."""
    night = make_night()
    diff = {"batch.per_device": 32, "batch.accumulation": 4, "batch.sequence_length": 256, "model.depth": 8}
    night.run(Proposal(diff=diff, source="hand", rationale="", watch=""))
    space = Space.of(night.history())
    assert space is not None
    assert space.step(diff) is None


def test_numbers_are_rounded_within_bounds() -> None:
    """Three digits are enough for people, and never leave the range."""
    knob = Knob(name="x", type="float", low=1.23456, high=9.87654, default=2.0, watch="x")
    assert tidy(knob, 5.55555) == 5.56
    assert tidy(knob, 0.0) == 1.23456
    assert from_unit(knob, 1.0) == 9.87654
    assert to_unit(knob, from_unit(knob, 0.5)) - 0.5 < 1e-3


def test_seeds_follow_the_number(make_night: Any) -> None:
    """Another proposal, another purpose or another study is another seed; the same is the same."""
    history = make_night().history()
    assert seed(history, "a") == seed(history, "a") != seed(history, "b")
