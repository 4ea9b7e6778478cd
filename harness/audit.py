"""Holds the ledger against what lies around it: the part of `overnight verify` that needs the study's folder.

`harness.invariants` finds rows that contradict each other. Whoever edits them all alike is found here: the val split
says how many bytes, tokens and documents a score counts, study.toml which seeds there are, the trial folders how many
trials there were. Everything that is compared with is sealed, or was written by the driver beside the row.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path

from frozen.tokens import ANSWER, EncodedSplit
from harness import checkpoints, evidence, invariants, journal
from harness.errors import CheckFailed
from harness.fullrun import FULL_RUN_REPLICATE
from harness.queries import GUARD_EVENT, Reader
from harness.seal import tool_version
from harness.study import Study
from harness.upgrade import TOOL_CHANGED, is_truthful

Check = Callable[[Study, sqlite3.Connection], Iterator[str]]
CARD = "README.md"
"""Written last: a full run whose model has its card has looked at the holdout."""


def audit(study: Study, reader: Reader) -> list[str]:
    """Return one sentence per contradiction between ledger and study, or within the ledger; none when it is sound.

    Works beside a running search.
    """
    # Before the rows are read: a trial's row is older than its folder.
    folders = {int(folder.name) for folder in study.paths.trials.glob("[0-9]*") if folder.name.isdecimal()}
    return reader.check(partial(_all, study, folders))


def judges_again(study: Study) -> bool:
    """Tell whether decisions can be held against the rules: only the version that made them knows these."""
    return study.seal.manifest.tool == tool_version()


def _all(study: Study, folders: Collection[int], connection: sqlite3.Connection) -> list[str]:
    found = invariants.broken(connection)
    if found and invariants.damage(connection):
        return found  # its rows are not what the checks below take them for
    allowed = None if study.file.eval.guard is None else study.file.eval.guard.max_regression
    found += evidence.contradicted(connection, study.policy.judge if judges_again(study) else None, allowed)
    found += journal.contradicted(connection, FULL_RUN_REPLICATE)
    for check in (_study, _seeds, _orders, _baseline, _reference, _guard, _scored, _full_runs, _tools):
        found += check(study, connection)
    return [*found, *_folders(connection, folders)]


def _study(study: Study, connection: sqlite3.Connection) -> Iterator[str]:
    """Check the row of the study against study.toml, policy.toml and the seal; its name may change, as its folder's."""
    asked, sealed = study.file.study, study.seal.manifest
    expected = {
        "task": asked.task,
        "model": asked.model,
        "metric": study.metric,
        "seed": asked.seed,
        "budget": str(study.budget),
        "seal": study.seal.digest,
    }
    try:
        policy = study.paths.policy_toml.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        policy = None  # the seal says so
    for row in connection.execute("SELECT * FROM study"):
        for name, value in expected.items():
            if row[name] != value:
                yield f"the ledger's study has the {name} {row[name]!r}, but its files say {value!r}"
        if policy is not None and row["policy"] != policy:
            line = next(_differing(row["policy"], policy))
            yield f"the ledger's study has the policy line {line[0]!r}, but policy.toml has {line[1]!r}"
        versions = json.loads(row["versions"])
        for package, version in sealed.versions.items():
            if versions.get(package) != version:
                yield f"the ledger's study has {package} {versions.get(package)!r}, but {version!r} is sealed"


def _differing(ours: str, theirs: str) -> Iterator[tuple[str | None, str | None]]:
    """Yield the lines in which two texts differ, None where one has ended."""
    for pair in zip_longest(ours.splitlines(keepends=True), theirs.splitlines(keepends=True)):
        if pair[0] != pair[1]:
            yield pair


def _seeds(study: Study, connection: sqlite3.Connection) -> Iterator[str]:
    """Check that every seed is that of its replicate, and that full runs have replicates of their own."""
    for row in connection.execute("SELECT id, role, seed, replicate, start FROM trials ORDER BY id"):
        expected = study.seed_of(row["replicate"], row["start"])
        if row["seed"] != expected:
            yield f"trial {row['id']} has the seed {row['seed']}, but replicate {row['replicate']} has {expected}"
        if row["role"] == "final" and row["replicate"] < FULL_RUN_REPLICATE:
            yield (
                f"trial {row['id']} has the role final, but full runs are replicates from {FULL_RUN_REPLICATE} and it"
                f" is {row['replicate']}"
            )


def _orders(study: Study, connection: sqlite3.Connection) -> Iterator[str]:
    """Check rows against the order that the driver wrote into the trial's folder; there may be none after a kill."""
    for row in connection.execute("SELECT id, seed, budget, start, config_digest AS digest FROM trials ORDER BY id"):
        try:
            order = json.loads(study.paths.trial(row["id"]).config_json.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        for name in ("seed", "budget", "start", "digest"):
            if isinstance(order, dict) and name in order and order[name] != row[name]:
                yield f"trial {row['id']} has the {name} {row[name]!r}, but its folder says {order[name]!r}"


def _baseline(study: Study, connection: sqlite3.Connection) -> Iterator[str]:
    """Check that the baseline is the policy's and study.toml's."""
    for row in connection.execute(
        "SELECT 'node ' || node AS name, config_digest FROM lineage WHERE node = 0 UNION ALL"
        " SELECT 'trial ' || id, config_digest FROM trials WHERE proposal IS NULL"
    ):
        if row["config_digest"] != study.baseline.digest:
            yield (
                f"{row['name']} has the baseline's config {row['config_digest'][:12]}, but policy and study.toml make"
                f" {study.baseline.digest[:12]}"
            )


def _reference(study: Study, connection: sqlite3.Connection) -> Iterator[str]:
    """Check that the untouched base was scored before anything of it was trained, where there is one."""
    scored = "SELECT min(id) AS id FROM trials WHERE state = 'scored' AND role "
    first = connection.execute(f"{scored} = 'reference'").fetchone()["id"]
    trained = connection.execute(f"{scored} NOT IN ('reference', 'final')").fetchone()["id"]
    if study.base is None and first is not None:
        yield f"trial {first} is of an untouched base, but the study trains a fresh model"
    elif study.base is not None and trained is not None and (first is None or first > trained):
        yield f"trial {trained} was trained before the untouched base was scored, which comes first in every search"


def _guard(study: Study, connection: sqlite3.Connection) -> Iterator[str]:
    """Check that trials were scored on the guard set if there is one, and what readers are told of its limit."""
    guard = study.file.eval.guard
    for row in connection.execute("SELECT id, guard_score FROM trials WHERE state = 'scored' ORDER BY id"):
        if (row["guard_score"] is None) != (guard is None):
            there = (
                "no score on the guard set, and the study has one"
                if guard
                else "a score on a guard set, and the study has none"
            )
            yield f"trial {row['id']} has {there}"
    reference = connection.execute(
        "SELECT guard_score FROM trials WHERE role = 'reference' AND state = 'scored' ORDER BY id LIMIT 1"
    ).fetchone()
    expected = {
        "max_regression": None if guard is None else guard.max_regression,
        "reference": None if reference is None else reference["guard_score"],
    }
    for row in connection.execute("SELECT id, data FROM events WHERE kind = ? ORDER BY id", (GUARD_EVENT,)):
        said = json.loads(row["data"] or "{}")
        for name, value in expected.items():
            if said.get(name) != value:
                yield f"event {row['id']} says that the guard set's {name} is {said.get(name)!r}, but it is {value!r}"


def _scored(study: Study, connection: sqlite3.Connection) -> Iterator[str]:
    """Check that every score counts the bytes, tokens and documents (or preference pairs) of the val split."""
    try:
        split = EncodedSplit.load(study.paths.split("val"))
    except (OSError, ValueError) as error:
        yield f"the val split cannot be read, so that no score can be held against it: {error}"
        return
    tokens = len(split.tokens) if split.marks is None else int((split.marks == ANSWER).sum())
    expected = {"bytes": int(split.bytes.sum()), "tokens": tokens, "documents": split.documents}
    if split.pairs:
        expected |= {"documents": split.documents // 2, "pairs": split.documents // 2}
    for row in connection.execute(
        "SELECT t.id, t.scored_bytes AS bytes, t.scored_tokens AS tokens, length(d.nats) / 8 AS documents,"
        " t.scored_pairs AS pairs"
        " FROM trials t LEFT JOIN document_nats d ON d.trial = t.id WHERE t.state = 'scored' ORDER BY t.id"
    ):
        for name, count in expected.items():
            if row[name] is not None and row[name] != count:
                yield f"trial {row['id']} was scored on {row[name]} {name}, but the val split has {count}"


def _full_runs(study: Study, connection: sqlite3.Connection) -> Iterator[str]:
    """Check that a full run's model is the one that was scored, and its look at the holdout on record."""
    for row in connection.execute(
        "SELECT id, budget, config_digest, seal, start, checkpoint_digest, (SELECT count(*) FROM events"
        " WHERE kind = 'holdout_score' AND json_extract(data, '$.trial') = trials.id) AS looks"
        " FROM trials WHERE state = 'scored' AND role = 'final' AND replicate = ? ORDER BY id",
        (FULL_RUN_REPLICATE,),
    ):
        other_seal = None if row["seal"] == study.seal.digest else row["seal"]
        for who in ("best", "baseline"):
            model = study.paths.full_run(who, row["budget"], row["config_digest"], other_seal, row["start"]).model
            if model.exists() and not _is_model(model, row["checkpoint_digest"]):
                yield f"the model in {model} is not the one that trial {row['id']} scored"
        paths = study.paths.full_run("best", row["budget"], row["config_digest"], other_seal, row["start"])
        for merged in connection.execute(
            "SELECT json_extract(data, '$.digest') AS digest FROM events WHERE kind = 'merged'"
            " AND json_extract(data, '$.trial') = ? ORDER BY id DESC LIMIT 1",
            (row["id"],),
        ):
            if paths.merged.exists() and not _is_model(paths.merged, merged["digest"]):
                yield f"the model in {paths.merged} is not the one that trial {row['id']} was merged into"
        if (paths.model / CARD).exists() and not row["looks"]:
            yield f"trial {row['id']} has a model card in {paths.root.name}, but no event has its score on the holdout"


def _is_model(folder: Path, digest: str) -> bool:
    try:
        return checkpoints.digest_of(folder, besides=(CARD,)) == digest
    except (CheckFailed, OSError):  # links, nothing, or what cannot be read
        return False


def _tools(study: Study, connection: sqlite3.Connection) -> Iterator[str]:
    """Check that the seal of every other tool is that of the study's question under the files that its event lists."""
    for row in connection.execute("SELECT id, data FROM events WHERE kind = ? ORDER BY id", (TOOL_CHANGED,)):
        if not is_truthful(study.seal.manifest, json.loads(row["data"] or "{}")):
            yield f"event {row['id']} speaks of another tool, but its files and versions do not give the seal it names"


def _folders(connection: sqlite3.Connection, folders: Collection[int]) -> Iterator[str]:
    """Check that search trials have the folder that their driver made, and that no other folder is there."""
    rows = {row["id"]: row for row in connection.execute("SELECT id, role, state FROM trials ORDER BY id")}
    for number in sorted(folders - rows.keys()):
        yield f"the folder of trial {number} is there, but the ledger ends with trial {max(rows, default=0)}"
    for number, row in rows.items():
        if row["role"] == "final" and number in folders:
            yield f"trial {number} has the role final, but the folder of a search's trial"
        elif row["role"] != "final" and row["state"] == "scored" and number not in folders:
            yield f"trial {number} is scored with the role {row['role']}, but has no folder"
