"""What the database refuses of the untouched base, of pairs and of the guard set, and what a reader makes of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from harness.errors import LedgerBroken
from harness.records import UNTRAINED, Role, Scored, TrialState
from harness.rows import Ending

Night = Any  # the driver of the fixture ``night``; conftest.py is not importable under importlib mode


def reference(night: Night, score: float = 2.5, guard: float | None = None) -> int:
    """Begin and close a reference."""
    trial = night.begin(role=Role.REFERENCE, budget=UNTRAINED)
    night.ledger.close_trial(trial, untrained(night, score, guard))
    return int(trial)


def untrained(night: Night, score: float, guard: float | None = None) -> Ending:
    ending = night.ending(score)
    assert ending.scored is not None
    told = None if guard is None else night.ending(guard).scored
    scored = ending.scored.model_copy(update={"guard": told})
    return Ending.of_scored(trained=None, scored=scored, checkpoint_digest=None)


def test_the_reference_counts_for_nothing(night: Night) -> None:
    """It is there to compare with: no noise, no lineage, no leaderboard, no known score of the baseline."""
    trial = reference(night, 1.0, 3.0)
    night.baseline(2.0, 2.1, 2.2)
    with night.reader() as reader:
        assert reader.invariants() == []
        found = reader.reference()
        assert (found.id, found.score, found.guard_score) == (trial, pytest.approx(1.0), pytest.approx(3.0))
        assert sorted(reader.baseline().scores.values()) == pytest.approx([2.0, 2.1, 2.2])
        assert reader.noise().degrees_of_freedom == 2
        assert [row["score"] for row in reader._rows("SELECT score FROM leaderboard")] == pytest.approx([2.1])


def test_a_guard_without_an_event_or_a_reference_is_none(night: Night) -> None:
    """A reader tells the limit only where the driver wrote it down."""
    with night.reader() as reader:
        assert reader.guard(0.1) is None
        reference(night, 2.5, 3.0)
        assert reader.guard() is None
        asked = reader.guard(0.1)
        assert (asked.reference, asked.max_regression, asked.noise) == (pytest.approx(3.0), 0.1, None)
        night.ledger.event("guard", "a limit", {"reference": 3.0, "max_regression": 0.2})
        assert reader.guard().max_regression == 0.2


@pytest.mark.parametrize(
    "changes",
    [
        {"role": Role.REFERENCE},
        {"role": Role.BASELINE, "budget": UNTRAINED},
        {"role": Role.REFERENCE, "budget": UNTRAINED, "replicate": 1},
    ],
)
def test_what_is_no_reference_is_refused(night: Night, changes: dict[str, Any]) -> None:
    """Untrained is the untouched base, and the untouched base is untrained."""
    with pytest.raises(LedgerBroken, match="untouched base"):
        night.begin(**changes)


def test_a_trained_reference_is_refused(night: Night) -> None:
    """Steps or weights are those of another trial."""
    trial = night.begin(role=Role.REFERENCE, budget=UNTRAINED)
    with pytest.raises(LedgerBroken, match="is not trained"):
        night.ledger.close_trial(trial, night.ending(2.0))
    weights = dataclasses.replace(untrained(night, 2.0), checkpoint_digest="c" * 64)
    with pytest.raises(LedgerBroken, match="is not trained"):
        night.ledger.close_trial(trial, weights)
    with night.reader() as reader:
        assert reader.trial(trial).state is TrialState.RUNNING


def test_the_lineage_stands_on_no_reference(night: Night) -> None:
    """Its config is the baseline's, its weights are nobody's."""
    trial = reference(night)
    with pytest.raises(LedgerBroken, match="a trial of the search"):
        night.ledger.seat_baseline(night.config, trial, "c" * 64)


def test_pairs_and_accuracy_go_together(night: Night) -> None:
    """One without the other is a contradiction."""
    scored = Scored(
        nats=6.0, bytes=1000, tokens=300, document_nats=(2.0, 4.0), score_seconds=0.5, pairs=2, right_pairs=1
    )
    trial = night.begin()
    half = scored.model_copy(update={"right_pairs": None})
    with pytest.raises(LedgerBroken, match="accuracy"):
        night.ledger.close_trial(
            trial, Ending.of_scored(trained=night.ending(2.0).trained, scored=half, checkpoint_digest="c" * 64)
        )
    night.ledger.close_trial(
        trial, Ending.of_scored(trained=night.ending(2.0).trained, scored=scored, checkpoint_digest="c" * 64)
    )
    with night.reader() as reader:
        found = reader.trial(trial)
    assert (found.accuracy, found.perplexity, found.score) == (0.5, None, pytest.approx(4.328085))


def test_seconds_of_both_sets_are_booked(night: Night) -> None:
    """What a guard set costs is part of what scoring costs."""
    with night.reader() as reader:
        assert reader.trial(reference(night, 2.5, 3.0)).score_seconds == pytest.approx(1.0)
