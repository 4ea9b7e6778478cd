from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.config import Schedule
from harness.jobs.schedule import rate_factor

fractions = st.floats(0, 1)
schedules = st.builds(
    Schedule,
    shape=st.sampled_from(["cosine", "linear", "sqrt"]),
    warmup_fraction=st.floats(0, 0.9),
    decay_fraction=fractions,
    final_rate_fraction=fractions,
)


def schedule(shape: str = "linear", warmup: float = 0.2, decay: float = 0.5, final: float = 0.1) -> Schedule:
    return Schedule.model_validate(
        {"shape": shape, "warmup_fraction": warmup, "decay_fraction": decay, "final_rate_fraction": final}
    )


@given(schedules, fractions)
def test_stays_between_zero_and_peak(given_schedule: Schedule, progress: float) -> None:
    """The rate is never negative and never above its peak."""
    assert 0 <= rate_factor(given_schedule, progress) <= 1


@given(schedules, fractions, fractions)
def test_never_rises_after_warmup(given_schedule: Schedule, one: float, other: float) -> None:
    """After the warm-up the rate only falls."""
    early, late = sorted((max(given_schedule.warmup_fraction, one), max(given_schedule.warmup_fraction, other)))
    assert rate_factor(given_schedule, late) <= rate_factor(given_schedule, early) + 1e-12


def test_by_hand() -> None:
    """Ramp, plateau and decay lie where the fractions say: warm-up to 0.2, hold to 0.6, decay to the end."""
    found = [rate_factor(schedule(), progress) for progress in (0, 0.1, 0.2, 0.5, 0.6, 0.8, 1.0)]
    assert found == pytest.approx([0, 0.5, 1, 1, 1, 0.55, 0.1])


@pytest.mark.parametrize(("shape", "middle"), [("cosine", 0.5), ("linear", 0.5), ("sqrt", 1 - math.sqrt(0.5))])
def test_shapes(shape: str, middle: float) -> None:
    """Half-way through the decay each shape has the value of its formula, and ends at the final rate."""
    classic = schedule(shape, warmup=0, decay=1, final=0)
    assert rate_factor(classic, 0.5) == pytest.approx(middle)
    assert rate_factor(classic, 1.0) == pytest.approx(0, abs=1e-12)


def test_no_decay_holds() -> None:
    """A decay fraction of zero holds the peak to the end."""
    assert rate_factor(schedule(decay=0), 1.0) == 1
