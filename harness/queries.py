"""Reads a ledger: the only way in for everything that is not the driver's writing hand.

Opens the file read-only with the standard library, never migrates it and never holds a write lock, so that looking at
a running study cannot disturb it. A ledger of an older schema is copied into memory and migrated there. Imports
nothing slow: `overnight status` answers in a third of a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Self

from harness import invariants
from harness.config import Knob
from harness.errors import BadInput
from harness.migrations import migrate, migrations, version
from harness.noise import pool_noise
from harness.records import (
    BASELINE,
    CurvePoint,
    Guard,
    History,
    Noise,
    Past,
    ProposalState,
    Role,
    Standing,
    Trial,
    TrialState,
    Verdict,
)
from harness.rows import (
    Call,
    Configs,
    Ended,
    Event,
    Identity,
    Sensed,
    StudyRow,
    call_value,
    continues,
    event_value,
    point_value,
    proposal_value,
    study_value,
    trial_value,
    unpack,
    verdict_value,
)

BUSY_SECONDS = 30.0
SEARCHED = f"role <> '{Role.FINAL.value}'"
"""Which trials are the search's: what a replay runs, perhaps under another budget, decides nothing and is no lesson."""
OF_CANDIDATES = "start IS NOT proposal"
"""Of a proposal's trials, those that judged it: not its config continued from its own checkpoint after it was kept."""
GUARD_EVENT = "guard"
"""Kind of the event that says what the guard set allows."""
ENDINGS = (
    f"SELECT 'trial' AS kind, id AS number, ended FROM trials WHERE ended IS NOT NULL AND {SEARCHED}"
    " UNION ALL SELECT 'proposal', number, ended FROM proposals WHERE ended IS NOT NULL"
)


class Reader:
    """Reads one study's ledger; every method sees what is committed when it is called.

    Use `snapshot` to let several calls see the same moment. Not shared between threads: open one per thread.
    """

    def __init__(self, path: Path) -> None:
        """Open the ledger; `BadInput` if there is none, it is something else, or a newer version wrote it."""
        if not path.is_file():
            raise BadInput(f"there is no ledger at {path}")
        try:
            self._connection = _open(path)
        except sqlite3.DatabaseError as error:
            raise BadInput(f"{path} cannot be read as a ledger: {error}") from error
        self._configs = Configs()

    def close(self) -> None:
        """Let go of the file; calling it twice is harmless."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[Self]:
        """Let all reads inside see one and the same moment, whatever is written meanwhile. May be nested."""
        if self._connection.in_transaction:
            yield self
            return
        self._connection.execute("BEGIN")
        try:
            yield self
        finally:
            self._connection.rollback()

    def _rows(self, sql: str, *values: object) -> list[sqlite3.Row]:
        return self._connection.execute(sql, values).fetchall()

    # --- study and events ----------------------------------------------------------------------------------------

    def study(self) -> StudyRow:
        """Return what the study asks."""
        rows = self._rows("SELECT * FROM study")
        if not rows:
            raise BadInput("the ledger belongs to no study: its `overnight init` did not finish")
        return study_value(rows[0])

    def events(self, kind: str | None = None) -> tuple[Event, ...]:
        """Return all events, or those of one kind, oldest first."""
        rows = self._rows("SELECT * FROM events WHERE ? IS NULL OR kind = ? ORDER BY id", kind, kind)
        return tuple(event_value(row) for row in rows)

    def insights(self) -> tuple[str, ...]:
        """Return what proposers wrote down for themselves, oldest first."""
        return tuple(row["text"] for row in self._rows("SELECT text FROM insights ORDER BY id"))

    def calls(self) -> tuple[Call, ...]:
        """Return all calls to language models, oldest first."""
        return tuple(call_value(row) for row in self._rows("SELECT * FROM calls ORDER BY id"))

    def epoch(self) -> int:
        """Return the current epoch of the machine: that of the newest trials, 0 before the first."""
        return int(self._rows("SELECT coalesce(max(epoch), 0) AS epoch FROM trials")[0]["epoch"])

    # --- trials --------------------------------------------------------------------------------------------------

    def trials(self, *, curves: bool = False) -> tuple[Trial, ...]:
        """Return all trials in the order in which they began; without their curves unless asked for."""
        return self._trials("1", curves=curves)

    def trial(self, trial: int) -> Trial:
        """Return one trial with its curve; `BadInput` if there is none of that number."""
        found = self._trials("id = ?", trial, curves=True)
        if not found:
            raise BadInput(f"the study has no trial {trial}")
        return found[0]

    def reference(self) -> Trial | None:
        """Return the untouched base model's trial once it is scored; a fresh model has none.

        It does not change with the machine's epoch: what is compared with it is far above that.
        """
        scored = (Role.REFERENCE.value, TrialState.SCORED.value)
        return next(iter(self._trials("role = ? AND state = ?", *scored, curves=False)), None)

    def open_trials(self) -> tuple[Trial, ...]:
        """Return the trials whose rows are still running."""
        return self._trials("state = ?", TrialState.RUNNING.value, curves=False)

    def document_nats(self, trial: int) -> tuple[float, ...]:
        """Return a scored trial's nats per val document, in the order of the split; `BadInput` if it has none."""
        rows = self._rows("SELECT nats FROM document_nats WHERE trial = ?", trial)
        if not rows:
            raise BadInput(f"trial {trial} has no scored documents")
        return unpack(rows[0]["nats"])

    def sensors(self, trial: int) -> Sensed:
        """Return what the device's sensors said near the end of a trial's training."""
        rows = self._rows("SELECT device_celsius AS celsius, device_watts AS watts FROM trials WHERE id = ?", trial)
        return Sensed(celsius=rows[0]["celsius"], watts=rows[0]["watts"])

    def _trials(self, where: str, *values: object, curves: bool) -> tuple[Trial, ...]:
        with self.snapshot():
            rows = self._rows(f"SELECT * FROM trials WHERE {where} ORDER BY id", *values)
            points: dict[int, list[CurvePoint]] = defaultdict(list)
            if curves:
                chosen = f"trial IN (SELECT id FROM trials WHERE {where})"
                for row in self._rows(f"SELECT * FROM curves WHERE {chosen} ORDER BY trial, point", *values):
                    points[row["trial"]].append(point_value(row))
        return tuple(trial_value(row, self._configs, tuple(points[row["id"]])) for row in rows)

    # --- proposals -----------------------------------------------------------------------------------------------

    def past(self, *, curves: bool = True) -> tuple[Past, ...]:
        """Return all proposals in the order of their numbers, with their trials and verdicts."""
        return self._past("1", curves=curves)

    def proposal(self, number: int) -> Past:
        """Return one proposal; `BadInput` if there is none of that number."""
        found = self._past("number = ?", number, curves=True)
        if not found:
            raise BadInput(f"the study has no proposal {number}")
        return found[0]

    def page(self, newest: int, offset: int) -> tuple[Past, ...]:
        """Return ``newest`` proposals without curves, the newest first, after leaving out the ``offset`` newest."""
        last = self.proposals() - offset
        return tuple(reversed(self._past("number BETWEEN ? AND ?", last - newest + 1, last, curves=False)))

    def proposals(self) -> int:
        """Return how many proposals there are."""
        return int(self._rows("SELECT count(*) AS count FROM proposals")[0]["count"])

    def endings(self, after: int) -> tuple[Ended, ...]:
        """Return what ended, trials and proposals in the order of their ends, without the first ``after``.

        Rows are closed once, so the number of endings that somebody has seen is a bookmark. Replays are left out.
        """
        order = "ORDER BY ended, kind DESC, number LIMIT -1 OFFSET ?"
        rows = self._rows(f"SELECT kind, number FROM ({ENDINGS}) {order}", after)
        return tuple(Ended(kind=row["kind"], number=row["number"]) for row in rows)

    def mark(self) -> int:
        """Return how many `endings` there are."""
        return int(self._rows(f"SELECT count(*) AS count FROM ({ENDINGS})")[0]["count"])

    def queued(self) -> tuple[Past, ...]:
        """Return the proposals that wait in the order of their turn: those from outside first, then the oldest."""
        outside = {row["number"] for row in self._rows("SELECT number FROM proposals WHERE outside")}
        waiting = self._past("state = ?", ProposalState.QUEUED.value, curves=False)
        return tuple(sorted(waiting, key=lambda past: (past.number not in outside, past.number)))

    def running(self) -> tuple[Past, ...]:
        """Return the proposals that were started and not decided: after a crash, those to go on with."""
        return self._past("state = ?", ProposalState.RUNNING.value, curves=True)

    def continues(self) -> bool:
        """Tell whether the study's trials go on from their parent's checkpoint."""
        return continues(self._rows("SELECT policy FROM study")[0]["policy"])

    def known_configs(self) -> dict[str, int]:
        """Return the digest of every config that a search started, with its proposal's number (0: the baseline's).

        Where trials continue from their parent: that it started from the incumbent's checkpoint, and its own config.
        """
        if self.continues():
            start = "(SELECT node FROM lineage ORDER BY position DESC LIMIT 1)"
            rows = self._rows(
                f"SELECT config_digest, coalesce(proposal, ?) AS owner FROM trials WHERE {SEARCHED} AND start = {start}"
                " UNION SELECT config_digest, number FROM proposals"
                f" WHERE config_digest IS NOT NULL AND parent = {start}"
                f" UNION SELECT config_digest, node FROM lineage WHERE node = {start} ORDER BY owner DESC",
                BASELINE,
            )
        else:
            rows = self._rows(
                f"SELECT config_digest, coalesce(proposal, ?) AS owner FROM trials WHERE {SEARCHED}"
                " UNION SELECT config_digest, number FROM proposals WHERE config_digest IS NOT NULL"
                " UNION SELECT config_digest, node FROM lineage ORDER BY owner DESC",
                BASELINE,
            )
        return {row["config_digest"]: row["owner"] for row in rows}

    def _past(self, where: str, *values: object, curves: bool) -> tuple[Past, ...]:
        with self.snapshot():
            rows = self._rows(f"SELECT * FROM proposals WHERE {where} ORDER BY number", *values)
            goes_on = self.continues()
            chosen = f"proposal IN (SELECT number FROM proposals WHERE {where})"
            trials: dict[int | None, list[Trial]] = defaultdict(list)
            for trial in self._trials(f"{chosen} AND {SEARCHED} AND {OF_CANDIDATES}", *values, curves=curves):
                trials[trial.proposal].append(trial)
            verdicts: dict[int, Verdict] = {
                row["proposal"]: verdict_value(row)
                for row in self._rows(f"SELECT * FROM verdicts WHERE {chosen}", *values)
            }
        return tuple(
            Past(
                number=row["number"],
                proposal=proposal_value(row),
                state=ProposalState(row["state"]),
                reason=row["reason"],
                parent=row["parent"],
                config=None if row["config"] is None else self._configs.value(row["config"]),
                verdict=verdicts.get(row["number"]),
                trials=tuple(trials[row["number"]]),
                start=row["parent"] if goes_on else None,
            )
            for row in rows
        )

    # --- lineage and noise ---------------------------------------------------------------------------------------

    def lineage(self) -> tuple[Standing, ...]:
        """Return every kept node in the order of keeping: the baseline first, the incumbent last.

        Scores are those of the current epoch at the study's budget, without the screening run that selected a node.
        """
        with self.snapshot():
            goes_on = self.continues()
            scores: dict[Identity, dict[int, float]] = defaultdict(dict)
            guards: dict[Identity, dict[int, float]] = defaultdict(dict)
            for row in self._rows("SELECT * FROM counted_scores ORDER BY replicate"):
                identity = row["config_digest"], row["start"]
                scores[identity][row["replicate"]] = row["score"]
                if row["guard_score"] is not None:
                    guards[identity][row["replicate"]] = row["guard_score"]
            rows = self._rows("SELECT l.*, t.start FROM lineage l JOIN trials t ON t.id = l.trial ORDER BY l.position")
        return tuple(
            Standing(
                node=row["node"],
                parent=row["parent"],
                diff=json.loads(row["diff"]),
                config=self._configs.value(row["config"]),
                scores=scores[row["config_digest"], row["start"]],
                trial=row["trial"],
                guard_scores=guards[row["config_digest"], row["start"]],
                start=row["start"],
                continued=scores[row["config_digest"], row["node"]] if goes_on else None,
            )
            for row in rows
        )

    def best_lineage(self) -> tuple[Standing, ...]:
        """Return the chain of kept nodes from the baseline to the incumbent; empty before the baseline is seated."""
        nodes = self.lineage()
        by_node = {standing.node: standing for standing in nodes}
        chain: list[Standing] = []
        node = nodes[-1].node if nodes else None
        while node is not None:
            chain.append(by_node[node])
            node = chain[-1].parent
        return tuple(reversed(chain))

    def checkpoints(self) -> dict[int, str]:
        """Return the digest of the published checkpoint of every lineage node."""
        return {row["node"]: row["checkpoint_digest"] for row in self._rows("SELECT * FROM lineage ORDER BY position")}

    def incumbent(self) -> Standing | None:
        """Return the config to beat, or None before the baseline is seated."""
        nodes = self.lineage()
        return nodes[-1] if nodes else None

    def baseline(self) -> Standing | None:
        """Return the config that the owner began with, or None before it is seated."""
        nodes = self.lineage()
        return nodes[0] if nodes else None

    def noise(self) -> Noise | None:
        """Return the spread of one trial across seeds, pooled over the baseline and every confirmed config.

        Screening runs are left out: whoever was selected for a low one would look less noisy than it is.
        """
        return self._noise("score")

    def guard(self, max_regression: float | None = None) -> Guard | None:
        """Return the limit on the guard set; None before the untouched base is scored on it, or where there is none.

        A driver says what its study allows. Whoever has nothing but the ledger gets what the driver wrote down, which
        ``overnight verify`` holds against study.toml.
        """
        with self.snapshot():
            reference = self.reference()
            if max_regression is None:
                max_regression = next((event.data["max_regression"] for event in self.events(GUARD_EVENT)), None)
            if max_regression is None or reference is None or reference.guard_score is None:
                return None
            noise = self._noise("guard_score")
        return Guard(reference=reference.guard_score, max_regression=max_regression, noise=noise)

    def _noise(self, column: str) -> Noise | None:
        groups: dict[Identity, list[float]] = defaultdict(list)
        for row in self._rows(f"SELECT config_digest, start, {column} AS score FROM counted_scores ORDER BY trial"):
            if row["score"] is not None:
                groups[row["config_digest"], row["start"]].append(row["score"])
        return pool_noise(groups.values())

    # --- for proposers and for `verify` ----------------------------------------------------------------------------

    def history(
        self,
        *,
        knobs: Mapping[str, Knob],
        max_changes: int,
        minimum_steps: int,
        smallest_provable: float | None = None,
        program: str = "",
        device_memory_bytes: int | None = None,
    ) -> History:
        """Return all that a proposer may know, as of one moment: nothing of replays."""
        with self.snapshot():
            study, past, lineage = self.study(), self.past(), self.lineage()
            devices = self._rows("SELECT device FROM trials ORDER BY id DESC LIMIT 1")
            return History(
                study=study.name,
                task=study.task,
                metric=study.metric,
                budget=study.budget,
                seed=study.seed,
                next_number=len(past) + 1,
                knobs=knobs,
                max_changes=max_changes,
                minimum_steps=minimum_steps,
                baseline=lineage[0] if lineage else None,
                incumbent=lineage[-1] if lineage else None,
                lineage=lineage,
                noise=self.noise(),
                smallest_provable=smallest_provable,
                past=past,
                device=devices[0]["device"] if devices else study.device,
                device_memory_bytes=device_memory_bytes,
                program=program,
                continues=self.continues(),
                insights=self.insights(),
                baseline_trials=self._trials(
                    f"proposal IS NULL AND {SEARCHED} AND role <> ?", Role.REFERENCE.value, curves=True
                ),
                reference=self.reference(),
                guard=self.guard(),
            )

    def invariants(self) -> list[str]:
        """Return one sentence for every way in which the ledger contradicts itself; none when it is sound."""
        return self.check(invariants.broken)

    def check(self, check: Callable[[sqlite3.Connection], list[str]]) -> list[str]:
        """Let a check see the rows as they are stored, as of one moment; its rows are `sqlite3.Row`."""
        with self.snapshot():
            return check(self._connection)


def _open(path: Path) -> sqlite3.Connection:
    """Open read-only; an older schema as a migrated copy in memory.

    In a folder that we cannot write SQLite cannot make its -shm file. A ledger that was closed cleanly is then opened
    as an immutable file; one whose driver died is read from a copy, because its last changes are still in the -wal.
    """
    address = path.absolute().as_uri() + "?mode=ro"
    connection = _connect(address)
    try:
        found = version(connection)
    except sqlite3.OperationalError:
        connection.close()
        if os.access(path.parent, os.W_OK):
            raise
        left = path.with_name(path.name + "-wal")
        connection = _copy(path, left) if left.exists() else _connect(address + "&immutable=1")
        found = version(connection)
    except BaseException:
        connection.close()
        raise
    if found < len(migrations()):
        copy = _connect(":memory:")
        connection.backup(copy)
        connection.close()
        migrate(copy)
        return copy
    connection.execute("PRAGMA query_only = ON")
    return connection


def _copy(ledger: Path, wal: Path) -> sqlite3.Connection:
    """Return what a ledger and its write-ahead log hold together, in memory."""
    with tempfile.TemporaryDirectory() as folder:
        for file in (ledger, wal):
            shutil.copyfile(file, Path(folder, file.name))
        both = _connect(Path(folder, ledger.name).as_uri())
        try:
            memory = _connect(":memory:")
            both.backup(memory)
        finally:
            both.close()
    return memory


def _connect(address: str) -> sqlite3.Connection:
    connection = sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, isolation_level=None)
    connection.row_factory = sqlite3.Row
    return connection
