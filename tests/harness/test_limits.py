import datetime
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.limits import Limits, counted, driver_seconds, expected_seconds, reached
from harness.records import Trial, TrialState
from harness.rows import Event

NOON = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)


def at(seconds: float) -> datetime.datetime:
    return NOON + datetime.timedelta(seconds=seconds)


def event(kind: str, moment: float, **data: float) -> Event:
    return Event(id=1, kind=kind, text="", data=data, created=at(moment))


def asked(limits: Limits, trials: list[Trial] | None = None, *, decided: int = 0, driver: float = 0) -> str | None:
    return reached(limits, trials=trials or [], decided=decided, driver_seconds=driver, now=NOON, fallback_seconds=10.0)


def test_trials_are_a_total_that_leaves_out_what_runs_again(make_trial: Callable[..., Trial]) -> None:
    """Lost and interrupted trials are not charged to the owner."""
    trials = [make_trial(), make_trial(state=TrialState.LOST), make_trial(state=TrialState.CRASHED)]
    assert counted(trials) == 2
    assert asked(Limits(trials=3), trials) is None
    assert "2 of 2" in str(asked(Limits(trials=2), trials))


def test_no_trial_begins_that_cannot_end_in_time(make_trial: Callable[..., Trial]) -> None:
    """The median of what trials took decides, or the budget before the first one."""
    trials = [make_trial(started=at(0), ended=at(60)) for _ in range(3)]
    assert expected_seconds(trials) == 60
    assert asked(Limits(until=at(61)), trials) is None
    assert "60 s" in str(asked(Limits(until=at(59)), trials))
    assert asked(Limits(until=at(11))) is None
    assert asked(Limits(until=at(9))) is not None
    assert asked(Limits(hours=1), trials, driver=3600 - 61) is None
    assert asked(Limits(hours=1), trials, driver=3600 - 59) is not None


def test_without_limits_a_search_goes_on() -> None:
    """The owner stops it."""
    assert asked(Limits(), decided=10**6, driver=1e9) is None
    assert asked(Limits(proposals=3), decided=3) is not None


def test_the_time_of_a_killed_driver_counts_up_to_its_last_word() -> None:
    """A run without an end ends with the last stamp before the next one began."""
    events = [
        event("run_began", 0),
        event("run_ended", 100, seconds=99.5),
        event("run_began", 1000),
        event("note", 1030),
        event("run_began", 5000),
    ]
    assert driver_seconds(events, []) == pytest.approx(99.5 + 30)


@given(st.lists(st.tuples(st.sampled_from(["run_began", "note", "run_ended"]), st.floats(0, 1e5)), max_size=20))
def test_driver_time_is_never_negative_nor_longer_than_the_clock(rows: list[tuple[str, float]]) -> None:
    """Whatever was killed when, the total stays within the time that passed."""
    events, began = [], 0.0
    for kind, seconds in sorted(rows, key=lambda row: row[1]):
        began = seconds if kind == "run_began" else began
        events.append(event(kind, seconds, **({"seconds": seconds - began} if kind == "run_ended" else {})))
        began = seconds
    total = driver_seconds(events, [])
    assert 0 <= total <= 1e5 + 1e-6
