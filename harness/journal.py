"""Holds the events against the rows that cannot have come about without them.

Events are written after one another and numbered without a gap, so a missing one in the middle shows by itself
(`harness.invariants`). Whoever deletes the newest ones leaves no gap; that is seen only where something else depends on
them: a trial, a start of a proposal or a verdict needs a driver that had begun and not ended; a full run a reproduction
that agreed; a score on the holdout a look at it. What depends on nothing can be cut off unseen, as long as it is the
newest: the end of the last run (it looks as if it had been killed then), a pause, a swept process, a repair, a failed
reproduction, a look at the holdout whose score is gone as well. No row holds a digest of the rows before it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

RUN_BEGAN, RUN_ENDED = "run_began", "run_ended"
_WORK = (
    "SELECT 'trial ' || id || ' began' AS what, started AS at FROM trials WHERE role <> 'final'"
    " UNION ALL SELECT 'proposal ' || number || ' was started', started FROM proposals WHERE started IS NOT NULL"
    " UNION ALL SELECT 'proposal ' || proposal || ' was decided', decided FROM verdicts ORDER BY at"
)
_STAMPS = {"trials": ("id", "started"), "events": ("id", "created"), "proposals": ("number", "created")}
"""Rows in the order of their numbers have stamps in order as well, unless the clock was set back."""


def contradicted(connection: sqlite3.Connection, full_run_replicate: int) -> Iterator[str]:
    """Yield one sentence per contradiction between events, or between events and rows; rows are `sqlite3.Row`."""
    yield from _runs(connection)
    yield from _replays(connection, full_run_replicate)


def _runs(connection: sqlite3.Connection) -> Iterator[str]:
    """Check that no run ends twice or before it began, and that all work lies within runs."""
    events = connection.execute(
        "SELECT id, kind, created FROM events WHERE kind IN (?, ?) ORDER BY id", (RUN_BEGAN, RUN_ENDED)
    ).fetchall()
    runs = False
    for event in events:
        if event["kind"] == RUN_ENDED and not runs:
            yield f"event {event['id']} says that a search ended, but none had begun"
        runs = event["kind"] == RUN_BEGAN
    first = connection.execute("SELECT id, role FROM trials WHERE role <> 'final' ORDER BY id LIMIT 1").fetchone()
    if first is not None and not any(event["kind"] == RUN_BEGAN for event in events):
        yield f"trial {first['id']} has the role {first['role']}, but no event says that a search began"
        return
    if _clock_was_set_back(connection):
        return  # then stamps tell no order
    for work in connection.execute(_WORK):
        before = [event for event in events if event["created"] <= work["at"]]
        if not before or before[-1]["kind"] == RUN_ENDED:
            yield f"{work['what']} at {work['at']}, when by the events no search was running"


def _clock_was_set_back(connection: sqlite3.Connection) -> bool:
    for table, (key, stamp) in _STAMPS.items():
        stamps = [row[0] for row in connection.execute(f"SELECT {stamp} FROM {table} ORDER BY {key}")]
        if stamps != sorted(stamps):
            return True
    return False


def _replays(connection: sqlite3.Connection, full_run_replicate: int) -> Iterator[str]:
    """Check that a full run was reproduced before, and that every score on the holdout follows a look at it."""
    reproduced = "SELECT 1 FROM events WHERE kind = 'reproduced' AND json_extract(data, '$.agrees')"
    for row in connection.execute(
        "SELECT id, proposal FROM trials WHERE role = 'final' AND replicate = ? ORDER BY id", (full_run_replicate,)
    ):
        node = "" if row["proposal"] is None else f" AND json_extract(data, '$.node') = {row['proposal']}"
        if connection.execute(reproduced + node).fetchone() is None:
            yield f"trial {row['id']} is a full run, but no event says that its config had been reproduced"
    for row in connection.execute(
        "SELECT id, json_extract(data, '$.trial') AS trial FROM events score WHERE kind = 'holdout_score'"
        " AND NOT EXISTS (SELECT 1 FROM events look WHERE look.kind = 'holdout_look' AND look.id < score.id"
        " AND json_extract(look.data, '$.trial') = json_extract(score.data, '$.trial')) ORDER BY id"
    ):
        yield f"event {row['id']} has a score of trial {row['trial']} on the holdout, but no event says that it looked"
