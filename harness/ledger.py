"""The one writer of the ledger.

Every change is one `atomic` block: a crash leaves a row either as it was or as it was meant to be. A row exists before
its job starts and is closed once; the database itself refuses the rest (``schema/0001_ledger.sql``). Only the driver
that holds the study's lock writes; everybody else reads through ``harness.queries``. Threads of the driver may share
one `Ledger`: a proposer books its calls while trials run.
"""

from __future__ import annotations

import contextlib
import datetime
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from sqlite_utils import Database

from harness.config import TrialConfig, difference
from harness.errors import BadInput, LedgerBroken
from harness.migrations import migrate, version
from harness.records import BASELINE, Decision, Proposal, ProposalState, Role, Verdict
from harness.rows import Configs, Ending, NewNode, Spent, StudyRow, dump, pack, stamp
from harness.terms import CallBegun, CallEnded

BUSY_SECONDS = 30.0
"""How long a write waits for a reader that holds the file, e.g. during a checkpoint of the write-ahead log."""
REJECTED = frozenset({ProposalState.REFUSED, ProposalState.DUPLICATE, ProposalState.STALE})


def utc_now() -> datetime.datetime:
    """Return the current moment; the seam where tests bring a clock of their own."""
    return datetime.datetime.now(datetime.UTC)


class Ledger:
    """Writes a study's ledger. `create` makes a new file, `open` an existing one; neither works on the other's."""

    def __init__(self, connection: sqlite3.Connection, now: Callable[[], datetime.datetime] = utc_now) -> None:
        self._db = Database(connection)
        self._now = now
        self._turn = threading.RLock()

    @classmethod
    def create(cls, path: Path, *, study: StudyRow, now: Callable[[], datetime.datetime] = utc_now) -> Self:
        """Make the ledger of a new study; `BadInput` if the file is there already or cannot be written."""
        if path.exists():
            raise BadInput(f"{path} is there already: a study has one ledger")
        ledger = cls(_connect(path, "rwc"), now)
        row = {
            "id": 1,
            "name": study.name,
            "task": study.task,
            "model": study.model,
            "metric": study.metric,
            "seed": study.seed,
            "budget": study.budget,
            "seal": study.seal,
            "policy": study.policy,
            "versions": dump(study.versions),
            "git_commit": study.git_commit,
            "git_dirty": study.git_dirty,
            "device": study.device,
            "created": stamp(study.created),
        }
        try:
            ledger._insert("study", row)
        except BaseException:
            ledger.close()
            raise
        return ledger

    @classmethod
    def open(cls, path: Path, *, now: Callable[[], datetime.datetime] = utc_now) -> Self:
        """Open a study's ledger for writing and bring its schema up to date.

        `BadInput`: there is no such file, it is no ledger, cannot be written, or a newer version wrote it.
        """
        if not path.is_file():
            raise BadInput(f"there is no ledger at {path}")
        return cls(_connect(path, "rw"), now)

    def close(self) -> None:
        """Let go of the file, with everything in it and nothing left in the write-ahead log beside it.

        SQLite does that only for the last one who closes it, and not if that is a reader; then whoever copied the one
        file would miss the night. Calling it twice is harmless.
        """
        with contextlib.suppress(sqlite3.Error):  # closed already, or a reader is in the way: the log stays, sound
            self._db.conn.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def atomic(self) -> Iterator[None]:
        """Make every change inside one change: all of it, or on any error nothing. May be nested.

        `LedgerBroken`: the database refused a contradiction. `BadInput`: the disk is full or cannot be written.
        """
        try:
            with self._turn, self._db.atomic():
                yield
        except sqlite3.IntegrityError as error:
            raise LedgerBroken(f"the ledger refused a contradiction: {error}") from error
        except sqlite3.OperationalError as error:
            raise BadInput(f"the ledger cannot be written: {error}") from error

    # --- proposals -----------------------------------------------------------------------------------------------

    def queue(self, proposal: Proposal, *, outside: bool = False) -> int:
        """Write down a proposal as it was made and return its number, from 1 upwards without a gap.

        One from ``outside``, by a person or another agent, goes before those of the study's own proposer.
        """
        return self._insert(
            "proposals",
            {
                "source": proposal.source,
                "model": proposal.model,
                "diff": dump(proposal.diff),
                "rationale": proposal.rationale,
                "watch": proposal.watch,
                "requested_parent": proposal.parent,
                "predicted_change": proposal.predicted_change,
                "confidence": proposal.confidence,
                "tokens": proposal.tokens,
                "cost_usd": proposal.cost_usd,
                "latency_seconds": proposal.latency_seconds,
                "call": proposal.call,
                "abort_if": None if proposal.abort_if is None else dump(proposal.abort_if.model_dump()),
                "outside": int(outside),
                "state": ProposalState.QUEUED.value,
                "created": self._stamp(),
            },
        )

    def reject(self, number: int, state: ProposalState, reason: str) -> None:
        """Close a queued proposal that will not run: refused, a duplicate or stale, and why."""
        if state not in REJECTED:
            raise ValueError(f"a rejected proposal is refused, duplicate or stale, not {state.value}")
        self._update("proposals", "number", number, {"state": state.value, "reason": reason, "ended": self._stamp()})

    def start(self, number: int, parent: int, config: TrialConfig) -> None:
        """Let a queued proposal run: against this lineage node, as this resolved config."""
        changes = {"state": ProposalState.RUNNING.value, "parent": parent, "started": self._stamp()}
        self._update("proposals", "number", number, changes | _config_columns(config))

    def amend(self, number: int, config: TrialConfig) -> None:
        """Replace the config of a running proposal by its repaired form, which is what is kept in the end."""
        self._update("proposals", "number", number, {"state": ProposalState.RUNNING.value} | _config_columns(config))

    def decide(self, number: int, verdict: Verdict, node: NewNode | None) -> None:
        """Close a running proposal with its verdict, and let it join the lineage if it was kept.

        Its checkpoint must be published already. `LedgerBroken`: it is not running, a trial of it still is, there is
        no baseline yet, or the node's trial is not a scored trial of the proposal's config.
        """
        if (verdict.decision is Decision.KEPT) != (node is not None):
            raise ValueError("a kept proposal needs its checkpoint, and only a kept one has one")
        with self.atomic():
            self._insert(
                "verdicts",
                {
                    "proposal": number,
                    "decision": verdict.decision.value,
                    "difference": verdict.difference,
                    "standard_error": verdict.standard_error,
                    "probability": verdict.probability,
                    "replicates": verdict.replicates,
                    "reason": verdict.reason,
                    "against": self._one("SELECT node FROM lineage ORDER BY position DESC LIMIT 1")[0],
                    "decided": self._stamp(),
                },
            )
            if node is not None:
                self._seat(number, node)
            decided = {"state": ProposalState.DECIDED.value, "ended": self._stamp()}
            self._update("proposals", "number", number, decided)

    # --- trials --------------------------------------------------------------------------------------------------

    def begin(
        self,
        *,
        proposal: int | None,
        role: Role,
        config: TrialConfig,
        seed: int,
        replicate: int,
        epoch: int,
        budget: str,
        seal: str,
        device: str,
        sandbox: str,
        start: int | None = None,
    ) -> int:
        """Write the row of a trial whose job is about to start, and return its id.

        ``proposal`` is the one that owns the config (for a replicate of the incumbent: the incumbent's), None for
        the baseline's. ``replicate`` names the seed: the same number has the same seed in every config. ``start`` is
        the lineage node whose checkpoint it goes on from, None for the base itself or a fresh model.
        """
        row = {"proposal": proposal, "role": role.value, "state": "running", "epoch": epoch, "seed": seed}
        row |= {"replicate": replicate, "budget": budget, "seal": seal, "device": device, "sandbox": sandbox}
        row |= {"start": start}
        return self._insert("trials", row | _config_columns(config) | {"started": self._stamp()})

    def close_trial(self, trial: int, ending: Ending) -> None:
        """Close a running trial's row, with its curve and the score of every document, in one change.

        `LedgerBroken`: it is closed already, or the same config, start, seed, budget and epoch has a score already.
        """
        with self.atomic():
            for point, value in enumerate(ending.curve):
                self._insert("curves", {"trial": trial, "point": point} | value.model_dump())
            if ending.scored is not None and ending.scored.document_nats:
                self._insert("document_nats", {"trial": trial, "nats": pack(ending.scored.document_nats)})
            self._update("trials", "id", trial, _ending_columns(ending) | {"ended": self._stamp()})

    def seat_baseline(self, config: TrialConfig, trial: int, checkpoint_digest: str) -> None:
        """Make the baseline node 0 of the lineage, standing on one of its scored trials."""
        row = {"node": BASELINE, "position": 0, "parent": None, "proposal": None, "trial": trial, "diff": "{}"}
        row |= {"checkpoint_digest": checkpoint_digest, "created": self._stamp()}
        self._insert("lineage", row | _config_columns(config))

    def _seat(self, number: int, node: NewNode) -> None:
        parent, config, digest, parent_config = self._one(
            "SELECT p.parent, p.config, p.config_digest, l.config FROM proposals p JOIN lineage l ON l.node = p.parent"
            " WHERE p.number = ?",
            number,
        )
        (last,) = self._one("SELECT max(position) FROM lineage")
        configs = Configs()
        row = {"node": number, "position": last + 1, "parent": parent, "proposal": number, "trial": node.trial}
        row |= {"config": config, "config_digest": digest, "checkpoint_digest": node.checkpoint_digest}
        row |= {"diff": dump(difference(configs.value(parent_config), configs.value(config)))}
        self._insert("lineage", row | {"created": self._stamp()})

    # --- calls to a language model ---------------------------------------------------------------------------------

    def begin_call(self, call: CallBegun, most_usd: float | None) -> int:
        """Write the row of a call that is about to be sent, with the most that it can cost, and return its number."""
        row: dict[str, Any] = {"provider": call.provider, "model": call.model, "purpose": call.purpose}
        row |= {"state": "in_flight", "most_tokens": call.most.tokens, "most_usd": most_usd, "begun": self._stamp()}
        return self._insert("calls", row)

    def end_call(self, number: int, ended: CallEnded, cost_usd: float | None) -> None:
        """Close a call's row. One that was sent and whose usage nobody told counts at its worst case."""
        usage = ended.usage
        with self.atomic():
            most_tokens, most_usd = self._one("SELECT most_tokens, most_usd FROM calls WHERE id = ?", number)
            if usage is not None:
                billed = usage.tokens
            else:
                billed, cost_usd = (most_tokens, most_usd) if ended.sent else (0, 0.0)
            columns = {} if usage is None else usage.model_dump()
            columns |= {"state": "answered" if ended.trouble is None else "failed", "trouble": ended.trouble}
            columns |= {"billed_tokens": billed, "cost_usd": cost_usd, "error_text": ended.text}
            columns |= {"latency_seconds": ended.latency_seconds, "ended": self._stamp()}
            self._update("calls", "id", number, columns)

    def lose_calls(self) -> int:
        """Close what a dead driver had in flight, at its worst case, and return how many there were."""
        with self.atomic():
            lost = self._db.conn.execute(
                "UPDATE calls SET state = 'lost', billed_tokens = most_tokens, cost_usd = most_usd, ended = ?,"
                " trouble = 'driver_died', error_text = 'the driver ended before the answer came'"
                " WHERE state = 'in_flight'",
                (self._stamp(),),
            )
        return lost.rowcount

    def spent(self) -> Spent:
        """Return what all calls of the study have cost, those in flight at their worst case."""
        tokens, usd, unpriced = self._one(
            "SELECT coalesce(sum(coalesce(billed_tokens, most_tokens)), 0),"
            " coalesce(sum(CASE WHEN ended IS NULL THEN most_usd ELSE cost_usd END), 0.0),"
            " count(*) FILTER (WHERE (CASE WHEN ended IS NULL THEN most_usd ELSE cost_usd END) IS NULL) FROM calls"
        )
        return Spent(tokens=tokens, usd=usd, unpriced_calls=unpriced)

    # --- everything else -----------------------------------------------------------------------------------------

    def event(self, kind: str, text: str, data: Mapping[str, Any] | None = None) -> int:
        """Write down something else that is worth a line: ``kind`` for programs, ``text`` for people."""
        row = {"kind": kind, "text": text, "data": None if data is None else dump(data), "created": self._stamp()}
        return self._insert("events", row)

    def insight(self, text: str, proposal: int | None = None) -> int:
        """Write down what a proposer learned, for itself."""
        return self._insert("insights", {"proposal": proposal, "text": text, "created": self._stamp()})

    # --- the three statements everything above is made of ----------------------------------------------------------

    def _stamp(self) -> str:
        return stamp(self._now())

    def _one(self, sql: str, *values: object) -> tuple[Any, ...]:
        with self._turn:
            row = self._db.conn.execute(sql, values).fetchone()
        if row is None:
            raise LedgerBroken("the ledger has no baseline yet, or no such proposal")
        return tuple(row)

    def _insert(self, table: str, row: Mapping[str, Any]) -> int:
        with self.atomic():
            number = self._db.table(table).insert(dict(row)).last_rowid
        assert number is not None
        return number

    def _update(self, table: str, key: str, number: int, changes: Mapping[str, Any]) -> None:
        settings = ", ".join(f"{name} = ?" for name in changes)
        with self.atomic():
            done = self._db.conn.execute(f"UPDATE {table} SET {settings} WHERE {key} = ?", (*changes.values(), number))
            if done.rowcount != 1:
                raise LedgerBroken(f"{table} has no row {number}")


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    """Open the file durably (write-ahead log, synced at every commit) and migrate it."""
    try:
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=BUSY_SECONDS, check_same_thread=False
        )
    except sqlite3.OperationalError as error:
        raise BadInput(f"{path} cannot be written: {error}") from error
    try:
        version(connection)
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA journal_mode = WAL")
        migrate(connection)
    except sqlite3.OperationalError as error:
        connection.close()
        raise BadInput(f"{path} cannot be written: {error}") from error
    except sqlite3.DatabaseError as error:
        connection.close()
        raise BadInput(f"{path} is no ledger: {error}") from error
    except BaseException:
        connection.close()
        raise
    return connection


def _config_columns(config: TrialConfig) -> dict[str, str]:
    return {"config": config.canonical_json(), "config_digest": config.digest}


def _ending_columns(ending: Ending) -> dict[str, Any]:
    """Return the columns that close a trial's row."""
    columns: dict[str, Any] = {"state": ending.state.value}
    if ending.trained is not None:
        trained = ending.trained.model_dump(exclude={"device"})
        columns |= trained
    if ending.failed is not None:
        failed = ending.failed.model_dump(exclude={"state"})
        columns |= {name: value for name, value in failed.items() if value is not None}
    if ending.scored is not None:
        columns |= {
            "nats": ending.scored.nats,
            "scored_bytes": ending.scored.bytes,
            "scored_tokens": ending.scored.tokens,
            "score_seconds": ending.scored.score_seconds,
            "score": ending.score,
            "perplexity": ending.perplexity,
            "accuracy": ending.accuracy,
            "scored_pairs": ending.scored.pairs,
            "guard_score": ending.guard_score,
            "checkpoint_digest": ending.checkpoint_digest,
        }
    return columns | {"device_celsius": ending.device_celsius, "device_watts": ending.device_watts}
