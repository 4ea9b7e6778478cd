"""When a search has done enough: totals of the study that survive restarts, and the moment the owner named.

No trial begins that cannot end before the moment; how long a trial takes is the median of those that ended.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass

from harness.records import UNCOUNTED as NOT_OF_THE_SEARCH
from harness.records import Trial, TrialState
from harness.rows import Event

UNCOUNTED = frozenset({TrialState.LOST, TrialState.INTERRUPTED})
"""These run again: counting them would charge the owner for a power cut."""
RECENT = 20
"""Trials whose wall time says how long the next one takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What ends a search. None: no such limit."""

    trials: int | None = None
    """Total of the study's trials, of every role."""
    hours: float | None = None
    """Total of the driver's time over all its runs."""
    until: datetime.datetime | None = None
    """Aware; no trial begins that would end later."""
    proposals: int | None = None
    """Proposals decided in this run."""


def counted(trials: Sequence[Trial]) -> int:
    """Return how many trials count towards the total."""
    return sum(trial.state not in UNCOUNTED for trial in trials)


def expected_seconds(trials: Sequence[Trial]) -> float | None:
    """Return how long the next trial will probably take, start to score; None before the first one ended.

    The untouched base, which is only scored, and what a replay trains say nothing of that: a deadline that followed
    from the one would kill the baseline, one that followed from the others none that hangs.
    """
    walls = [
        (trial.ended - trial.started).total_seconds()
        for trial in trials
        if trial.started is not None and trial.ended is not None and trial.state not in UNCOUNTED
        if trial.role not in NOT_OF_THE_SEARCH
    ]
    recent = sorted(walls[-RECENT:])
    return (recent[(len(recent) - 1) // 2] + recent[len(recent) // 2]) / 2 if recent else None


def reached(
    limits: Limits,
    *,
    trials: Sequence[Trial],
    decided: int,
    driver_seconds: float,
    now: datetime.datetime,
    fallback_seconds: float,
) -> str | None:
    """Say which limit forbids another trial, or None.

    ``decided`` counts proposals of this run, ``driver_seconds`` the time of all runs; ``fallback_seconds`` stands for
    the length of a trial before one has ended.
    """
    next_seconds = expected_seconds(trials)
    if next_seconds is None:
        next_seconds = fallback_seconds
    if limits.trials is not None and counted(trials) >= limits.trials:
        return f"trials: {counted(trials)} of {limits.trials} done"
    if limits.proposals is not None and decided >= limits.proposals:
        return f"proposals: {decided} decided in this run"
    if limits.hours is not None and driver_seconds + next_seconds > limits.hours * 3600:
        return f"hours: {driver_seconds / 3600:.2f} of {limits.hours:g} used, another trial takes {next_seconds:.0f} s"
    if limits.until is not None and now + datetime.timedelta(seconds=next_seconds) > limits.until:
        return f"until: another trial takes {next_seconds:.0f} s and would end after {limits.until:%H:%M}"
    return None


def driver_seconds(events: Sequence[Event], trials: Sequence[Trial]) -> float:
    """Return how long drivers of this study ran, all runs together, in seconds.

    A run that ended by itself booked its time. One that was killed left no end: it counts up to the last thing that
    it wrote before the next one began.
    """
    total = 0.0
    began: datetime.datetime | None = None
    stamps = sorted(
        [event.created for event in events]
        + [stamp for trial in trials for stamp in (trial.started, trial.ended) if stamp]
    )
    for event in events:
        if event.kind == "run_began":
            if began is not None:
                total += _until_last(began, event.created, stamps)
            began = event.created
        elif event.kind == "run_ended":
            total += float(event.data["seconds"])
            began = None
    if began is not None:
        total += _until_last(began, None, stamps)
    return total


def _until_last(
    began: datetime.datetime, next_began: datetime.datetime | None, stamps: Sequence[datetime.datetime]
) -> float:
    own = [stamp for stamp in stamps if stamp >= began and (next_began is None or stamp < next_began)]
    return (own[-1] - began).total_seconds() if own else 0.0
