"""What turning the knobs did, as a measure."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.evidence import effects
from agent.importance import Importance, importances, ranks
from harness.config import TrialConfig, Value, flatten
from harness.records import Proposal

RATE, BETA = "optim.learning_rate", "optim.beta2"


def measured(night: Any) -> dict[str, Importance]:
    history = night.history()
    flats = {standing.node: flatten(standing.config) for standing in history.lineage}
    return {one.knob: one for one in importances(history, effects(history), flats)}


def propose(night: Any, *diffs: dict[str, Value]) -> None:
    for diff in diffs:
        night.run(Proposal(diff=diff, source="hand", rationale="why", watch="probe"))


def by_rate(config: TrialConfig) -> float:
    """Score by the rate alone: higher is worse."""
    return 2.0 + config.optim.learning_rate


def test_a_knob_that_matters_comes_out_and_one_that_does_not_is_zero(make_night: Any) -> None:
    """The effect is the median size of the differences, the trend says which way is better."""
    night = make_night(by_rate, margin=9.0)
    rates: list[dict[str, Value]] = [{RATE: rate} for rate in (1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 6e-3, 8e-3)]
    propose(night, *rates, {BETA: 0.95}, {BETA: 0.96})
    found = measured(night)
    assert set(found) == {RATE, BETA}
    assert found[RATE].effect == pytest.approx(4e-3 - 3e-4)
    assert (found[RATE].turns, found[BETA].turns) == (7, 2)
    assert found[RATE].trend == pytest.approx(1.0)
    assert found[BETA].effect == 0
    assert found[BETA].trend is None


def test_an_effect_survives_the_walk(make_night: Any) -> None:
    """Every kept step moves all later scores; the knob that did it is credited, a later bystander is not."""
    night = make_night(lambda config: 2.0 - 50 * min(config.optim.learning_rate, 4e-3))
    propose(night, {RATE: 1e-3}, {RATE: 4e-3}, {BETA: 0.95}, {BETA: 0.96})
    found = measured(night)
    assert len(night.lineage) == 3
    assert found[RATE].effect > 0.03
    assert found[BETA].effect == 0


def test_knobs_turned_together_share_the_credit(make_night: Any) -> None:
    """Nobody knows whose it was."""
    night = make_night(by_rate, margin=9.0)
    propose(night, {RATE: 8.3e-3, BETA: 0.95})
    assert {name: one.effect for name, one in measured(night).items()} == pytest.approx({RATE: 4e-3, BETA: 4e-3})


def test_failures_have_no_effect_to_measure(make_night: Any) -> None:
    """A run that diverged has no difference; it is told among the failures."""
    night = make_night()
    propose(night, {RATE: 1.5e-2})
    assert measured(night) == {}


@given(st.lists(st.integers(-5, 5) | st.floats(-5, 5), min_size=1, max_size=40))
def test_ranks_add_up(numbers: list[float]) -> None:
    """Ties share the mean of their places, so that the sum is that of 1 to n and equal numbers are equal."""
    found = ranks(numbers)
    assert sum(found) == pytest.approx(len(numbers) * (len(numbers) + 1) / 2)
    assert all(
        (a < b) == (x < y) for a, x in zip(numbers, found, strict=True) for b, y in zip(numbers, found, strict=True)
    )
