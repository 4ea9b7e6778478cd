"""What a learning curve shows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

from agent.curves import Signals, signals_of
from harness.records import CurvePoint, Trial


@pytest.fixture
def with_curve(make_night: Any) -> Callable[..., Trial]:
    """Return a builder of scored trials whose curve has ten points, given as functions of the progress."""

    def build(
        probe: Callable[[float], float | None],
        loss: Callable[[float], float | None] = lambda at: 4 - at,
        norm: Callable[[float], float | None] = lambda at: 0.5,
    ) -> Trial:
        points = [
            CurvePoint(
                progress=tenth / 10,
                seconds=tenth,
                step=tenth,
                train_loss=loss(tenth / 10),
                probe_score=probe(tenth / 10),
                learning_rate=1e-3,
                gradient_norm=norm(tenth / 10),
            )
            for tenth in range(1, 11)
        ]
        trial: Trial = make_night().baseline_trials[0]
        return dataclasses.replace(trial, curve=tuple(points), score=2.0, perplexity=2.0**6)

    return build


def test_a_straight_fall_is_a_short_run(with_curve: Callable[..., Trial]) -> None:
    """A third and more of the fall in the last third: the budget ended it, not the model."""
    found = signals_of(with_curve(lambda at: 4 - at))
    assert found.still_falling
    assert found.late_share == pytest.approx(4 / 9)
    assert not found.flat


def test_a_plateau_is_flat(with_curve: Callable[..., Trial]) -> None:
    """Nothing more came of the last third."""
    found = signals_of(with_curve(lambda at: max(3.0, 4 - 4 * at)))
    assert found.flat
    assert not found.still_falling
    assert not found.overfitting


def test_a_rising_probe_under_a_falling_loss_is_overfitting(with_curve: Callable[..., Trial]) -> None:
    """The train loss alone would call it progress."""
    assert signals_of(with_curve(lambda at: 3 + abs(at - 0.6))).overfitting


def test_spikes_are_dated(with_curve: Callable[..., Trial]) -> None:
    """The progress at which the train loss jumped tells a ramp's spike from a late one."""
    found = signals_of(with_curve(lambda at: 4 - at, loss=lambda at: 5.0 if at == 0.3 else 4 - at))
    assert found.spikes_at == (0.3,)
    assert found.spikes


def test_the_gap_is_in_bits_per_byte(with_curve: Callable[..., Trial]) -> None:
    """2 bits per byte at a perplexity of 64 are 3 bytes a token: a loss of 6 ln 2 nats is 2 bits per byte."""
    found = signals_of(with_curve(lambda at: 2.25, loss=lambda at: 6 * math.log(2)))
    assert found.gap_bits_per_byte == pytest.approx(0.25)


def test_clipping_is_a_share_of_the_points(with_curve: Callable[..., Trial]) -> None:
    """The limit is the config's own; norms that are not known are left out."""
    found = signals_of(with_curve(lambda at: 4 - at, norm=lambda at: None if at < 0.25 else 2.0 if at < 0.55 else 0.5))
    assert found.clipped_share == pytest.approx(3 / 8)
    assert (found.median_gradient_norm, found.last_gradient_norm) == (0.5, 0.5)


def test_looks_are_at_points_not_beyond(with_curve: Callable[..., Trial]) -> None:
    """An ``abort_if`` at half of the budget is compared with what was known then."""
    assert signals_of(with_curve(lambda at: 4 - at)).probes == pytest.approx((3.9, 3.8, 3.5, 3.3, 3.0))
    late = signals_of(with_curve(lambda at: None if at < 0.4 else 4 - at))
    assert late.probes[:2] == (None, None)


def test_an_empty_curve_says_nothing(with_curve: Callable[..., Trial]) -> None:
    """None, not False: what was not seen is not known."""
    bare = dataclasses.replace(with_curve(lambda at: 1.0), curve=(), steps=None, tokens=None, peak_memory_bytes=None)
    assert signals_of(bare) == Signals()
