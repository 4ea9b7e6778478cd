"""What must hold in every ledger: the part of `overnight verify` that needs nothing but the database.

The schema's own CHECKs and triggers refuse most contradictions on the way in; these checks find what was changed behind
their back, e.g. by another tool, a broken disk, or a program that wrote with the triggers dropped.
"""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
import tomllib
from collections.abc import Callable, Iterator, Mapping

from harness.ablation import without
from harness.config import Knob, TrialConfig, Value, difference, turned, unflatten
from harness.errors import OvernightError
from harness.migrations import migrate
from harness.rows import continues, unpack

RELATIVE_TOLERANCE = 1e-9
"""Of sums that were computed in the same float64 arithmetic, perhaps in another order."""


LARGEST_EXPONENT = 690
"""Of the nats per token that still have a perplexity, as in `harness.rows.Ending.of_scored`."""


def broken(connection: sqlite3.Connection) -> list[str]:
    """Return one sentence per contradiction; the connection's rows must be `sqlite3.Row`."""
    return damage(connection) or [sentence for check in CHECKS for sentence in check(connection)]


def damage(connection: sqlite3.Connection) -> list[str]:
    """Return one sentence per reason for which the rows cannot be read as a ledger's: a broken file, another schema."""
    damaged = [f"the file is damaged: {row[0]}" for row in connection.execute("PRAGMA integrity_check")]
    if damaged != ["the file is damaged: ok"]:
        return damaged
    return list(_schema(connection)) or [*_negative(connection), *_constraints(connection)]


def _negative(connection: sqlite3.Connection) -> Iterator[str]:
    """Name the trials with a number below zero: every column that counts or measures is one that cannot be."""
    for row in connection.execute("SELECT * FROM trials"):
        for name in row.keys():  # noqa: SIM118 - a row iterates over its values
            if isinstance(row[name], int | float) and row[name] < 0 and name != "device_celsius":
                yield f"trial {row['id']} has {row[name]!r} {name}, which is never below 0"


def _constraints(connection: sqlite3.Connection) -> Iterator[str]:
    """Check the schema's CHECKs, in a copy: SQLite does not even read those of a database that it opens read-only."""
    with contextlib.closing(sqlite3.connect(":memory:")) as copy:
        connection.backup(copy)
        for (found,) in copy.execute("PRAGMA integrity_check").fetchall():
            if found != "ok":
                yield f"a row is one that the schema refuses: {found}"


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
    """Check that every figure follows from nats, bytes, tokens and pairs, and the nats from the documents."""
    for row in connection.execute(
        "SELECT t.*, d.nats AS documents, (SELECT metric FROM study) AS metric"
        " FROM trials t LEFT JOIN document_nats d ON d.trial = t.id WHERE t.state = 'scored' OR d.nats IS NOT NULL"
    ):
        if row["state"] != "scored":
            yield f"trial {row['id']} has document scores but no score"
            continue
        of_pairs = row["metric"] == "bits_per_pair"
        if of_pairs != (row["scored_pairs"] is not None) or of_pairs != (row["accuracy"] is not None):
            found = f"{row['scored_pairs']!r} pairs and the accuracy {row['accuracy']!r}"
            yield f"trial {row['id']} has {found}, but the metric is {row['metric']}"
            continue
        units, named = (row["scored_pairs"], "pairs") if of_pairs else (row["scored_bytes"], "bytes")
        expected = row["nats"] / (math.log(2) * units)
        if not math.isclose(row["score"], expected, rel_tol=RELATIVE_TOLERANCE):
            yield f"trial {row['id']} has the score {row['score']!r}, but its nats and {named} give {expected!r}"
        if of_pairs and not _is_whole(row["accuracy"] * row["scored_pairs"]):
            found = f"the accuracy {row['accuracy']!r}"
            yield f"trial {row['id']} has {found}, which is no whole number of {row['scored_pairs']} pairs"
        ratio = row["nats"] / row["scored_tokens"]
        perplexity = None if of_pairs or ratio >= LARGEST_EXPONENT else math.exp(ratio)
        if not _same(row["perplexity"], perplexity):
            yield (
                f"trial {row['id']} has the perplexity {row['perplexity']!r},"
                f" but its nats and tokens give {perplexity!r}"
            )
        if row["documents"] is None:
            yield f"trial {row['id']} is scored with {row['nats']!r} nats, but has the nats of no document"
        else:
            total = math.fsum(unpack(row["documents"]))
            if not math.isclose(total, row["nats"], rel_tol=RELATIVE_TOLERANCE):
                yield f"the documents of trial {row['id']} sum to {total!r} nats, its row says {row['nats']!r}"


def _is_whole(number: float) -> bool:
    return math.isclose(number, round(number), rel_tol=RELATIVE_TOLERANCE, abs_tol=RELATIVE_TOLERANCE)


def _same(found: float | None, expected: float | None) -> bool:
    if found is None or expected is None:
        return found is expected
    return math.isclose(found, expected, rel_tol=RELATIVE_TOLERANCE)


def _diffs(connection: sqlite3.Connection) -> Iterator[str]:
    """Check that configs come from their parents' by the recorded diffs, and trials from their proposals."""
    for row in connection.execute(
        "SELECT child.node, child.diff, child.config, parent.node AS parent, parent.config AS parent_config"
        " FROM lineage child JOIN lineage parent ON parent.node = child.parent"
    ):
        config, parent = _config(row["config"]), _config(row["parent_config"])
        if config is None or parent is None:
            continue  # `_configs` says so
        expected = difference(parent, config)
        if json.loads(row["diff"]) != expected:
            yield (
                f"node {row['node']} has the diff {row['diff']}, but its config differs from that of its parent"
                f" {row['parent']} by {_text(expected)}"
            )
    conditional = _conditional(connection)
    for row in connection.execute(
        "SELECT p.number, p.diff, p.config, p.config_digest, p.parent, l.config AS parent_config FROM proposals p"
        " JOIN lineage l ON l.node = p.parent"
    ):
        yield from _proposal(connection, row, conditional)


def _conditional(connection: sqlite3.Connection) -> dict[str, Knob]:
    """Return the knobs of the study's policy that have a meaning only under conditions; a config has them settled."""
    row = connection.execute("SELECT policy FROM study").fetchone()
    try:
        knobs = tomllib.loads("" if row is None else row["policy"]).get("knobs", {})
        return {name: Knob.model_validate({**table, "name": name}) for name, table in knobs.items() if "when" in table}
    except (ValueError, TypeError, AttributeError, OvernightError):  # no policy: `overnight verify` says so elsewhere
        return {}


def _proposal(connection: sqlite3.Connection, row: sqlite3.Row, conditional: Mapping[str, Knob]) -> Iterator[str]:
    """Check one proposal that has started: its config, and those of its trials."""
    config, parent = _config(row["config"]), _config(row["parent_config"])
    if config is None or parent is None:
        return
    try:
        asked = turned(parent, json.loads(row["diff"]), conditional)
    except OvernightError as error:
        yield f"the diff {row['diff']} of proposal {row['number']} cannot be applied to node {row['parent']}: {error}"
        return
    trials = connection.execute(
        "SELECT id, role, state, replicate, config_digest FROM trials"
        " WHERE proposal = ? AND role <> 'final' ORDER BY id",
        (row["number"],),
    ).fetchall()
    grown = [t["id"] for t in trials if t["state"] == "out_of_memory" and t["config_digest"] == asked.digest]
    if asked != config and not (grown and _is_repair(asked, config)):
        yield (
            f"proposal {row['number']} has the diff {row['diff']}, but its config differs from that of its parent"
            f" {row['parent']} by {_text(difference(parent, config))}"
        )
        return
    for trial in trials:
        if trial["config_digest"] not in (asked.digest, config.digest):
            yield (
                f"trial {trial['id']} ran config {trial['config_digest'][:12]}, but proposal {row['number']} has"
                f" {config.digest[:12]}"
            )
        screens = trial["role"] in ("screen", "repair")
        role = "screen" if trial["config_digest"] == asked.digest else "repair"
        if screens and trial["role"] != role:
            yield f"trial {trial['id']} has the role {trial['role']}, but its config makes it a {role}"


def _finals(connection: sqlite3.Connection) -> Iterator[str]:
    """Check that replays ran what the lineage holds: a node's config, or that of a later node without its step."""
    nodes = {row["node"]: row for row in connection.execute("SELECT node, parent, config, config_digest FROM lineage")}
    allowed = {node: {row["config_digest"]} for node, row in nodes.items()}
    for row in connection.execute("SELECT id, proposal, config_digest FROM trials WHERE role = 'final' ORDER BY id"):
        node = row["proposal"]
        if node not in nodes or row["config_digest"] in allowed[node]:
            continue  # other checks speak of what is not in the lineage, and of the baseline
        allowed[node].update(_without(node, nodes))
        if row["config_digest"] not in allowed[node]:
            yield (
                f"trial {row['id']} has the role final, but its config is neither that of node {node} nor that of a"
                " later one with its step taken out"
            )


def _starts(connection: sqlite3.Connection) -> Iterator[str]:
    """Check that every trial went on from the checkpoint that the policy asks for, and the lineage with it.

    Candidates start from their parent, what they are compared with from the node whose config it is; of a replay,
    everything starts where the trials of the node itself did.
    """
    study = connection.execute("SELECT policy FROM study").fetchone()
    goes_on = study is not None and continues(study["policy"])
    for row in connection.execute(
        "SELECT t.id, t.role, t.start, coalesce(t.proposal, 0) AS owner, p.parent, p.state FROM trials t"
        " LEFT JOIN proposals p ON p.number = t.proposal ORDER BY t.id"
    ):
        own = row["parent"] if goes_on else None
        allowed = {own} if row["role"] not in ("control", "replicate") or not goes_on else {row["owner"]}
        if goes_on and row["role"] == "replicate" and row["parent"] is not None:
            allowed.add(own)
        if row["start"] not in allowed:
            yield (
                f"trial {row['id']} ({row['role']}) went on from {_node(row['start'])}, but it belongs to"
                f" {' or '.join(_node(start) for start in sorted(allowed, key=lambda start: start or 0))}"
            )
    if goes_on:
        for row in connection.execute(
            "SELECT l.node, l.parent, before.node AS newest FROM lineage l"
            " JOIN lineage before ON before.position = l.position - 1 WHERE l.parent IS NOT before.node"
        ):
            yield (
                f"node {row['node']} has the parent {row['parent']}, but trials continue from the newest node, which"
                f" was {row['newest']}"
            )


def _node(start: int | None) -> str:
    return "the base" if start is None else f"node {start}"


def _without(node: int, nodes: Mapping[int, sqlite3.Row]) -> Iterator[str]:
    """Yield the digest of every later config with the step of ``node`` taken out."""
    for tip in nodes:
        chain = [tip]
        while (parent := nodes[chain[0]]["parent"]) in nodes and parent not in chain:
            chain.insert(0, parent)
        configs = [config for name in chain if (config := _config(nodes[name]["config"])) is not None]
        if node in chain[1:] and len(configs) == len(chain):
            config = without(configs, chain.index(node))
            if config is not None:
                yield config.digest


def _is_repair(asked: TrialConfig, config: TrialConfig) -> bool:
    """Tell whether a config is what the harness makes of one that ran out of memory: same batch in smaller parts."""
    return (
        difference(asked, config).keys() == {"batch.per_device", "batch.accumulation"}
        and config.batch.per_device < asked.batch.per_device
        and config.batch.per_step == asked.batch.per_step
    )


def _config(text: str) -> TrialConfig | None:
    try:
        return unflatten(json.loads(text))
    except OvernightError:
        return None


def _text(diff: dict[str, Value]) -> str:
    return json.dumps(diff, sort_keys=True, separators=(",", ":"))


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
    _diffs,
    _finals,
    _starts,
    _sentences("SELECT 'the ledger has ' || count(*) || ' studies instead of one' FROM study HAVING count(*) <> 1"),
    _sentences(
        "SELECT 'trial ' || id || ' ran under another seal than the study''s' FROM trials"
        " WHERE seal <> (SELECT seal FROM study) AND role <> 'final'"
    ),
    _sentences(
        "SELECT 'trial ' || id || ' ran under a seal that neither the study nor an event names' FROM trials t"
        " WHERE role = 'final' AND seal <> (SELECT seal FROM study) AND NOT EXISTS (SELECT 1 FROM events e"
        " WHERE e.kind = 'tool_changed' AND json_extract(e.data, '$.seal') = t.seal)"
    ),
    _sentences(
        "SELECT 'trial ' || id || ' ran with the budget ' || budget || ', not the study''s' FROM trials"
        " WHERE role NOT IN ('reference', 'final') AND budget <> (SELECT budget FROM study)"
    ),
    _sentences(
        "SELECT 'trial ' || id || ' has the role ' || role || ' with the budget ' || budget ||"
        " ': only the untouched base is untrained' FROM trials WHERE (role = 'reference') <> (budget = 'untrained')"
    ),
    _sentences(
        "SELECT 'trial ' || id || ' is the untouched base, but has steps, weights or the replicate ' || replicate"
        " FROM trials WHERE role = 'reference'"
        " AND (steps IS NOT NULL OR checkpoint_digest IS NOT NULL OR replicate <> 0)"
    ),
    _sentences(
        "SELECT 'the untouched base was scored ' || count(*) || ' times, which is once too often' FROM trials"
        " WHERE role = 'reference' AND state = 'scored' HAVING count(*) > 1"
    ),
    _sentences(
        "SELECT 'node ' || l.node || ' stands on trial ' || t.id || ', which has the role ' || t.role FROM lineage l"
        " JOIN trials t ON t.id = l.trial WHERE t.role IN ('reference', 'final')"
    ),
    _sentences(
        "SELECT 'replicate ' || replicate || ' has ' || count(DISTINCT seed) || ' different seeds: seeds are shared'"
        " FROM trials WHERE role NOT IN ('reference', 'final') GROUP BY replicate, start"
        " HAVING count(DISTINCT seed) > 1"
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
    _sentences(
        "SELECT 'events are numbered to ' || max(id) || ' but ' || count(*) || ' are there' FROM events"
        " HAVING max(id) <> count(*)"
    ),
    _sentences(
        "SELECT 'insights are numbered to ' || max(id) || ' but ' || count(*) || ' are there' FROM insights"
        " HAVING max(id) <> count(*)"
    ),
    _sentences(
        "SELECT 'the curve of trial ' || trial || ' is numbered to ' || max(point) || ' but has ' || count(*)"
        " || ' points' FROM curves GROUP BY trial HAVING max(point) + 1 <> count(*)"
    ),
    _sentences(
        "SELECT 'trial ' || id || ' has the role ' || role || ' but belongs to '"
        " || coalesce('proposal ' || proposal, 'the baseline') FROM trials"
        " WHERE (role IN ('reference', 'baseline', 'canary') AND proposal IS NOT NULL)"
        " OR (role IN ('screen', 'repair') AND proposal IS NULL)"
        " OR (role = 'final' AND proposal IS NOT NULL AND proposal NOT IN (SELECT node FROM lineage))"
    ),
    _sentences(
        "SELECT 'trial ' || id || ' has the role ' || role || ' but is replicate ' || replicate FROM trials"
        " WHERE (role IN ('screen', 'repair') AND replicate <> 0) OR (role IN ('replicate', 'final') AND replicate = 0)"
    ),
    _sentences(
        "SELECT 'trial ' || t.id || ' ran config ' || substr(t.config_digest, 1, 12) || ', but the baseline has '"
        " || substr(l.config_digest, 1, 12) FROM trials t JOIN lineage l ON l.node = 0"
        " WHERE t.proposal IS NULL AND t.config_digest <> l.config_digest"
    ),
    _sentences(
        "SELECT 'proposal ' || number || ' asked for parent ' || requested_parent || ' but started from ' || parent"
        " FROM proposals WHERE requested_parent <> parent"
    ),
    _sentences(
        "SELECT 'event ' || id || ' (' || kind || ') has ' || json_extract(data, '$.seconds') || ' seconds'"
        " FROM events WHERE json_extract(data, '$.seconds') < 0"
    ),
    _sentences(
        "SELECT 'event ' || e.id || ' (' || e.kind || ') speaks of trial ' || json_extract(e.data, '$.trial') ||"
        " iif(t.id IS NULL, ', which is not there', ', which is ' || t.state || ' with the role ' || t.role)"
        " FROM events e LEFT JOIN trials t ON t.id = json_extract(e.data, '$.trial')"
        " WHERE e.kind IN ('reproduced', 'holdout_look', 'holdout_score', 'merged')"
        " AND (t.id IS NULL OR t.state <> 'scored'"
        " OR (t.role <> 'final' AND (t.role <> 'reference' OR e.kind IN ('reproduced', 'merged'))))"
    ),
    _sentences(
        "SELECT 'event ' || e.id || ' says that trial ' || t.id || ' scored ' || json_extract(e.data, '$.score')"
        " || ', its row says ' || coalesce(t.score, 'nothing') FROM events e"
        " JOIN trials t ON t.id = json_extract(e.data, '$.trial')"
        " WHERE e.kind = 'reproduced' AND abs(coalesce(t.score, 1e9) - json_extract(e.data, '$.score')) > 1e-9"
    ),
)
