"""What must hold in every ledger: the part of `overnight verify` that needs nothing but the database.

The schema's own CHECKs and triggers refuse most contradictions on the way in; these checks find what was changed behind
their back, e.g. by another tool, a broken disk, or a program that wrote with the triggers dropped.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable, Iterator

from harness.config import unflatten
from harness.errors import OvernightError
from harness.migrations import migrate
from harness.rows import unpack

RELATIVE_TOLERANCE = 1e-9
"""Of sums that were computed in the same float64 arithmetic, perhaps in another order."""


def broken(connection: sqlite3.Connection) -> list[str]:
    """Return one sentence per contradiction; the connection's rows must be `sqlite3.Row`."""
    damaged = [f"the file is damaged: {row[0]}" for row in connection.execute("PRAGMA integrity_check")]
    if damaged != ["the file is damaged: ok"]:
        return damaged
    altered = list(_schema(connection))
    if altered:
        return altered
    return [sentence for check in CHECKS for sentence in check(connection)]


def _schema(connection: sqlite3.Connection) -> Iterator[str]:
    """Compare tables, views, indexes and triggers with those that the migrations make."""
    fresh = sqlite3.connect(":memory:")
    try:
        migrate(fresh)
        query = "SELECT type, name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'"
        expected = {(row[0], row[1]): row[2] for row in fresh.execute(query)}
    finally:
        fresh.close()
    found = {(row[0], row[1]): row[2] for row in connection.execute(query)}
    for kind, name in sorted(expected.keys() | found.keys()):
        if (kind, name) not in found:
            yield f"the {kind} {name} is missing"
        elif (kind, name) not in expected:
            yield f"the {kind} {name} is none of ours"
        elif found[kind, name] != expected[kind, name]:
            yield f"the {kind} {name} is not as this version makes it"


def _references(connection: sqlite3.Connection) -> Iterator[str]:
    for table, row, parent, _ in connection.execute("PRAGMA foreign_key_check"):
        yield f"row {row} of {table} points to a row of {parent} that is not there"


def _configs(connection: sqlite3.Connection) -> Iterator[str]:
    """Check that every stored config is canonical and has the digest beside it."""
    checked: set[tuple[str, str]] = set()
    for table, key in (("proposals", "number"), ("trials", "id"), ("lineage", "node")):
        for row in connection.execute(
            f"SELECT {key} AS number, config, config_digest FROM {table} WHERE config IS NOT NULL"
        ):
            if (row["config"], row["config_digest"]) in checked:
                continue
            try:
                config = unflatten(json.loads(row["config"]))
            except OvernightError as error:
                yield f"the config of row {row['number']} of {table} cannot be read: {error}"
                continue
            if config.canonical_json() != row["config"] or config.digest != row["config_digest"]:
                yield f"the config of row {row['number']} of {table} is not the one of its digest"
            checked.add((row["config"], row["config_digest"]))


def _scores(connection: sqlite3.Connection) -> Iterator[str]:
    """Check that a score follows from its nats and bytes, and the nats from the documents."""
    for row in connection.execute(
        "SELECT t.*, d.nats AS documents, (SELECT metric FROM study) AS metric"
        " FROM trials t LEFT JOIN document_nats d ON d.trial = t.id WHERE t.state = 'scored' OR d.nats IS NOT NULL"
    ):
        if row["state"] != "scored":
            yield f"trial {row['id']} has document scores but no score"
            continue
        expected = row["nats"] / (math.log(2) * row["scored_bytes"])
        if row["metric"] == "bits_per_byte" and not math.isclose(row["score"], expected, rel_tol=RELATIVE_TOLERANCE):
            yield f"trial {row['id']} has the score {row['score']!r}, but its nats and bytes give {expected!r}"
        if row["documents"] is not None:
            total = math.fsum(unpack(row["documents"]))
            if not math.isclose(total, row["nats"], rel_tol=RELATIVE_TOLERANCE):
                yield f"the documents of trial {row['id']} sum to {total!r} nats, its row says {row['nats']!r}"


def _sentences(sql: str) -> Callable[[sqlite3.Connection], Iterator[str]]:
    """Return a check whose query yields one sentence per contradiction."""

    def check(connection: sqlite3.Connection) -> Iterator[str]:
        for row in connection.execute(sql):
            yield str(row[0])

    return check


CHECKS: tuple[Callable[[sqlite3.Connection], Iterator[str]], ...] = (
    _references,
    _configs,
    _scores,
    _sentences("SELECT 'the ledger has ' || count(*) || ' studies instead of one' FROM study HAVING count(*) <> 1"),
    _sentences(
        "SELECT 'trial ' || id || ' ran under another seal than the study''s' FROM trials"
        " WHERE seal <> (SELECT seal FROM study)"
    ),
    _sentences(
        "SELECT 'trial ' || id || ' ran with the budget ' || budget || ', not the study''s' FROM trials"
        " WHERE role NOT IN ('reference', 'final') AND budget <> (SELECT budget FROM study)"
    ),
    _sentences(
        "SELECT 'replicate ' || replicate || ' has ' || count(DISTINCT seed) || ' different seeds: seeds are shared'"
        " FROM trials WHERE role NOT IN ('reference', 'final') GROUP BY replicate HAVING count(DISTINCT seed) > 1"
    ),
    _sentences(
        "SELECT 'proposal ' || p.number || ' is ' || p.state || iif(v.proposal IS NULL, ' without', ' with')"
        " || ' a verdict' FROM proposals p LEFT JOIN verdicts v ON v.proposal = p.number"
        " WHERE (p.state = 'decided') <> (v.proposal IS NOT NULL)"
    ),
    _sentences(
        "SELECT 'proposal ' || v.proposal || ' is ' || v.decision || iif(l.node IS NULL, ' but not', ' but')"
        " || ' in the lineage' FROM verdicts v LEFT JOIN lineage l ON l.proposal = v.proposal"
        " WHERE (v.decision = 'kept') <> (l.node IS NOT NULL)"
    ),
    _sentences(
        "SELECT 'proposal ' || p.number || ' is ' || p.state || ' but has trials' FROM proposals p"
        " WHERE p.state IN ('queued', 'refused', 'duplicate', 'stale')"
        " AND EXISTS (SELECT 1 FROM trials WHERE proposal = p.number)"
    ),
    _sentences(
        "SELECT 'trial ' || t.id || ' is running for proposal ' || p.number || ', which is decided' FROM trials t"
        " JOIN proposals p ON p.number = t.proposal"
        " WHERE t.state = 'running' AND t.role <> 'final' AND t.started < p.ended AND p.state = 'decided'"
    ),
    _sentences(
        "SELECT 'node ' || l.node || ' has another config than its proposal' FROM lineage l"
        " JOIN proposals p ON p.number = l.proposal"
        " WHERE p.config_digest <> l.config_digest OR p.parent IS NOT l.parent"
    ),
    _sentences(
        "SELECT 'node ' || l.node || ' stands on trial ' || l.trial || ', which is no scored trial of it'"
        " FROM lineage l JOIN trials t ON t.id = l.trial WHERE t.state <> 'scored'"
        " OR t.config_digest <> l.config_digest OR t.proposal IS NOT l.proposal"
    ),
    _sentences(
        "SELECT 'node ' || l.node || ' has another checkpoint than its trial ' || l.trial FROM lineage l"
        " JOIN trials t ON t.id = l.trial WHERE t.checkpoint_digest <> l.checkpoint_digest"
    ),
    _sentences(
        "SELECT 'node ' || child.node || ' was kept before its parent ' || parent.node FROM lineage child"
        " JOIN lineage parent ON parent.node = child.parent WHERE parent.position >= child.position"
    ),
    _sentences(
        "SELECT 'there is a lineage without a baseline' WHERE EXISTS (SELECT 1 FROM lineage)"
        " AND NOT EXISTS (SELECT 1 FROM lineage WHERE node = 0)"
    ),
    _sentences(
        "SELECT 'proposals are numbered to ' || max(number) || ' but ' || count(*) || ' are there' FROM proposals"
        " HAVING max(number) <> count(*)"
    ),
    _sentences(
        "SELECT 'trials are numbered to ' || max(id) || ' but ' || count(*) || ' are there' FROM trials"
        " HAVING max(id) <> count(*)"
    ),
)
