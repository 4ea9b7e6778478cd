"""Predictions against results."""

from __future__ import annotations

from typing import Any

import pytest

from agent.evidence import effects
from agent.prose import Figures
from agent.record import SourceRecord, calibration, records
from harness.config import TrialConfig, Value
from harness.records import Proposal


def by_rate(config: TrialConfig) -> float:
    return 2.0 + 10 * config.optim.learning_rate + 0.0001 * config.optim.beta2


def played(make_night: Any, *cases: tuple[dict[str, Value], float | None, float | None]) -> SourceRecord:
    night = make_night(by_rate, margin=0.001)
    for diff, predicted, confidence in cases:
        proposal = Proposal(
            diff=diff,
            source="llm",
            model="model-5",
            rationale="why",
            watch="probe",
            predicted_change=predicted,
            confidence=confidence,
        )
        night.run(proposal)
    history = night.history()
    by_number = {effect.number: effect for effect in effects(history)}
    (found,) = records(history, by_number, Figures.of(history.noise))
    return found


def test_a_record_counts_what_became_of_each(make_night: Any) -> None:
    """Kept, decided and turned away, and how often the sign was right."""
    found = played(
        make_night,
        ({"optim.learning_rate": 1e-4}, -0.01, 0.9),
        ({"optim.learning_rate": 5e-3}, -0.01, 0.8),
        ({"optim.learning_rate": 7.0}, -0.01, 0.8),
        ({"optim.beta1": 0.8}, None, None),
    )
    assert (found.source, found.made, found.decided, found.kept, found.turned_away) == ("llm:model-5", 4, 3, 1, 1)
    assert found.came_true == pytest.approx(1 / 2)


def test_a_result_within_the_noise_is_not_right(make_night: Any) -> None:
    """A sign that cannot be seen must not be told by a hit rate either."""
    found = played(make_night, ({"optim.beta2": 0.9}, -0.01, 0.9))
    assert found.predictions[0].measured == 0
    assert not found.predictions[0].came_true


def test_calibration_compares_what_was_stated_with_what_came(make_night: Any) -> None:
    """By bands of confidence; bands without a prediction are left out."""
    found = played(
        make_night,
        ({"optim.learning_rate": 1e-4}, -0.01, 1.0),
        ({"optim.learning_rate": 5e-3}, -0.01, 0.8),
        ({"optim.learning_rate": 6e-3}, 0.01, 0.2),
    )
    bands = calibration(found.predictions)
    assert [(band.stated, band.came_true, band.count) for band in bands] == [
        pytest.approx((0.2, 1.0, 1)),
        pytest.approx((0.9, 0.5, 2)),
    ]
