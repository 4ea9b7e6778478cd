from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from harness.errors import BadInput, LedgerBroken
from harness.ledger import Ledger
from harness.queries import Reader
from harness.records import Decision, Failed, ProposalState, Role, TrialState
from harness.rows import Ending, NewNode, StudyRow

Night = Any  # the driver of the fixture ``night``; conftest.py is not importable under importlib mode


def test_a_study_has_one_ledger(night: Night, study_row: StudyRow) -> None:
    """Creating a ledger where one lies is refused and leaves it as it was."""
    with pytest.raises(BadInput, match="there already"):
        Ledger.create(night.path, study=study_row)
    with night.reader() as reader:
        assert reader.study() == study_row


def test_opening_nothing_is_refused(tmp_path: Path) -> None:
    """Opening a ledger that is not there says so and makes no file."""
    with pytest.raises(BadInput, match="no ledger"):
        Ledger.open(tmp_path / "ledger.db")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"hello, I am text, not a database\n" * 200, b"SQLite format 3\0" + b"x" * 5000])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    """Something that is no database is refused with one sentence and not touched."""
    path = tmp_path / "ledger.db"
    path.write_bytes(content)
    with pytest.raises(BadInput):
        Ledger.open(path)
    assert path.read_bytes() == content


def test_another_database_is_refused(tmp_path: Path) -> None:
    """A SQLite file of another program is refused and gets no tables of ours."""
    path = tmp_path / "ledger.db"
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE mine (x)")
    other.close()
    before = path.read_bytes()
    with pytest.raises(BadInput, match="other SQLite file"):
        Ledger.open(path)
    assert path.read_bytes() == before


def test_a_newer_ledger_is_refused(night: Night) -> None:
    """A ledger that a newer version wrote is refused with what to do."""
    night.ledger.close()
    connection = sqlite3.connect(night.path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(BadInput, match="newer version of overnight"):
        Ledger.open(night.path)
    with pytest.raises(BadInput, match="newer version of overnight"):
        night.reader()


def test_weird_folders(tmp_path: Path, study_row: StudyRow) -> None:
    """A folder whose name holds what addresses and shells dislike is no trouble."""
    folder = tmp_path / "a?b#c%20 'd\"\n"
    folder.mkdir()
    Ledger.create(folder / "ledger.db", study=study_row).close()
    Ledger.open(folder / "ledger.db").close()
    assert [path.name for path in folder.iterdir()] == ["ledger.db"]


def test_proposals_are_numbered_from_one(night: Night) -> None:
    """Numbers run without a gap, so that a restarted search draws what an uninterrupted one would."""
    assert [night.ledger.queue(night.proposal()) for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("state", [ProposalState.REFUSED, ProposalState.DUPLICATE, ProposalState.STALE])
def test_rejections_are_rows_with_a_reason(night: Night, state: ProposalState) -> None:
    """A proposal that does not run stays in the ledger and says why; it never runs afterwards."""
    number = night.ledger.queue(night.proposal())
    night.ledger.reject(number, state, "because")
    with night.reader() as reader:
        past = reader.proposal(number)
    assert (past.state, past.reason, past.config) == (state, "because", None)
    with pytest.raises(LedgerBroken, match="closed"):
        night.ledger.start(number, 0, night.config)


def test_only_rejections_reject(night: Night) -> None:
    """`reject` cannot decide or start a proposal."""
    number = night.ledger.queue(night.proposal())
    with pytest.raises(ValueError, match="refused, duplicate or stale"):
        night.ledger.reject(number, ProposalState.DECIDED, "because")


def test_a_running_proposal_cannot_be_rejected(night: Night) -> None:
    """Once a proposal runs, only a verdict ends it."""
    night.baseline(2.0)
    number = night.screened(2.0)
    with pytest.raises(LedgerBroken, match="from queued to running"):
        night.ledger.reject(number, ProposalState.REFUSED, "because")


def test_a_closed_trial_never_changes(night: Night) -> None:
    """Closing a trial twice is refused, and the first ending stays, curve and documents included."""
    trial = night.run(2.0)
    for ending in (night.ending(1.0), night.failure()):
        with pytest.raises(LedgerBroken, match="closed"):
            night.ledger.close_trial(trial, ending)
    with night.reader() as reader:
        found = reader.trial(trial)
        assert found.score == pytest.approx(2.0)
        assert len(found.curve) == 2


STATEMENTS = [
    "UPDATE trials SET score = 0.1 WHERE id = 1",
    "UPDATE OR REPLACE trials SET state = 'running' WHERE id = 1",
    "DELETE FROM trials",
    "UPDATE curves SET train_loss = 0",
    "DELETE FROM curves",
    "INSERT INTO curves (trial, point, progress, seconds, step) VALUES (1, 9, 1, 1, 1)",
    "UPDATE document_nats SET nats = x'0000000000000000'",
    "DELETE FROM document_nats",
    "UPDATE verdicts SET decision = 'discarded'",
    "DELETE FROM verdicts",
    "UPDATE lineage SET trial = 2",
    "DELETE FROM lineage WHERE node = 1",
    "UPDATE proposals SET rationale = 'hindsight'",
    "UPDATE proposals SET state = 'queued'",
    "DELETE FROM proposals",
    "UPDATE study SET seed = 8",
    "DELETE FROM study",
    "UPDATE events SET text = 'nothing happened'",
    "DELETE FROM events",
    "UPDATE insights SET text = 'nothing learned'",
    "DELETE FROM insights",
    "DELETE FROM migrations",
    "INSERT INTO trials (role, state, epoch, config, config_digest, seed, replicate, budget, seal, device, sandbox,"
    " started, ended, error_class, error_text) SELECT role, 'lost', epoch, config, config_digest, 99, 99, budget, seal,"
    " device, sandbox, started, ended, 'x', 'y' FROM trials WHERE id = 1",
    "INSERT INTO study SELECT 2, name, task, model, metric, seed, budget, seal, policy, versions, git_commit,"
    " git_dirty, device, created FROM study",
]


@pytest.mark.parametrize("statement", STATEMENTS)
def test_the_database_defends_itself(night: Night, statement: str) -> None:
    """What is written stays written, whichever program tries: the rules are in the file, not in ours."""
    night.baseline(2.0, 2.01)
    night.kept(night.screened(1.9), 1.91, 1.92)
    night.ledger.event("note", "something happened")
    night.ledger.insight("something learned")
    other = sqlite3.connect(night.path)
    other.execute("PRAGMA foreign_keys = ON")
    with pytest.raises(sqlite3.IntegrityError):
        other.execute(statement)
    other.close()
    with night.reader() as reader:
        assert reader.invariants() == []


BAD_CLOSINGS = [
    {"state": "scored"},
    {"state": "scored", "score": float("nan"), "nats": 1.0, "scored_bytes": 1, "scored_tokens": 1},
    {"state": "scored", "score": float("inf"), "nats": 1.0, "scored_bytes": 1, "scored_tokens": 1},
    {"state": "scored", "score": -1.0, "nats": 1.0, "scored_bytes": 1, "scored_tokens": 1},
    {"state": "scored", "score": "good", "nats": 1.0, "scored_bytes": 1, "scored_tokens": 1},
    {"state": "scored", "score": 1.0, "nats": 1.0, "scored_bytes": 1, "scored_tokens": 1, "error_class": "x"},
    {"state": "crashed"},
    {"state": "crashed", "error_class": "x"},
    {"state": "crashed", "error_class": "x", "error_text": "y", "score": 1.0},
    {"state": "crashed", "error_class": "x", "error_text": "y", "checkpoint_digest": "c" * 64},
    {"state": "good", "error_class": "x", "error_text": "y"},
    {"state": "crashed", "error_class": "x", "error_text": "y", "seed": 5},
]


@pytest.mark.parametrize("columns", BAD_CLOSINGS)
def test_a_score_is_finite_and_only_for_the_scored(night: Night, columns: dict[str, object]) -> None:
    """A row has a finite score exactly if it is scored, and a failed one has a reason instead."""
    trial = night.begin()
    other = sqlite3.connect(night.path)
    settings = ", ".join(f"{name} = ?" for name in columns)
    with pytest.raises(sqlite3.IntegrityError):
        other.execute(
            f"UPDATE trials SET {settings}, ended = '2026-01-01T00:00:00+00:00' WHERE id = ?",
            (*columns.values(), trial),
        )
    other.close()


def test_an_ending_is_scored_or_failed(night: Night) -> None:
    """An ending that is neither, or that claims to be running or scored without a score, cannot be made."""
    with pytest.raises(ValueError, match="either scored or failed"):
        Ending()
    for state in (TrialState.RUNNING, TrialState.SCORED):
        with pytest.raises(ValueError, match="cannot end as"):
            Ending.of_failed(Failed(state=state, error_class="x", error_text="y"))
    scored = night.ending(2.0).scored
    assert scored is not None
    with pytest.raises(ValueError, match="finite"):
        Ending(scored=scored, score=float("inf"))


def test_one_score_per_config_seed_budget_and_epoch(night: Night) -> None:
    """A second score of the same run is refused; after a failure or in another epoch it is welcome."""
    night.ledger.close_trial(night.begin(), night.failure(TrialState.LOST))
    night.run(2.0)
    again = night.begin()
    with pytest.raises(LedgerBroken, match="UNIQUE"):
        night.ledger.close_trial(again, night.ending(2.0))
    night.ledger.close_trial(again, night.failure(TrialState.INTERRUPTED))
    night.run(2.1, epoch=1)


def test_a_failed_closing_leaves_the_row_running(night: Night) -> None:
    """When closing is refused, neither curve nor documents are left behind."""
    night.run(2.0)
    again = night.begin()
    with pytest.raises(LedgerBroken):
        night.ledger.close_trial(again, night.ending(2.0))
    with night.reader() as reader:
        assert reader.trial(again).curve == ()
        assert reader.trial(again).state is TrialState.RUNNING
        with pytest.raises(BadInput, match="no scored documents"):
            reader.document_nats(again)


def test_atomic_is_all_or_nothing(night: Night) -> None:
    """An error inside an atomic block undoes every change in it, nested ones included."""
    with pytest.raises(ZeroDivisionError), night.ledger.atomic():  # noqa: PT012
        night.ledger.event("note", "one")
        with night.ledger.atomic():
            night.ledger.queue(night.proposal())
        raise ZeroDivisionError
    with night.reader() as reader:
        assert reader.events() == ()
        assert reader.past() == ()


def test_a_verdict_needs_its_trials_closed(night: Night) -> None:
    """A proposal is not decided while one of its trials is running, and nothing of the attempt remains."""
    night.baseline(2.0)
    number = night.screened(1.9)
    night.begin(night.apply({"optim.learning_rate": 1e-3}), proposal=number, replicate=1, role=Role.REPLICATE)
    with pytest.raises(LedgerBroken, match="none of its trials is running"):
        night.ledger.decide(number, night.verdict(decision=Decision.DISCARDED), None)
    with night.reader() as reader:
        assert reader.proposal(number).verdict is None


def test_kept_means_a_node(night: Night) -> None:
    """Keeping without a checkpoint, or discarding with one, is an error before anything is written."""
    night.baseline(2.0)
    number = night.screened(1.9)
    with pytest.raises(ValueError, match="needs its checkpoint"):
        night.ledger.decide(number, night.verdict(), None)
    with pytest.raises(ValueError, match="needs its checkpoint"):
        night.ledger.decide(number, night.verdict(decision=Decision.DISCARDED), NewNode(trial=2, checkpoint_digest=""))


def test_a_node_stands_on_its_own_trial(night: Night) -> None:
    """A kept proposal cannot stand on the checkpoint of another config."""
    night.baseline(2.0)
    number = night.screened(1.9)
    with pytest.raises(LedgerBroken, match="its own config"):
        night.ledger.decide(number, night.verdict(), NewNode(trial=1, checkpoint_digest="c" * 64))
    with night.reader() as reader:
        assert [past.number for past in reader.running()] == [number]
        assert len(reader.lineage()) == 1


def test_nothing_is_decided_before_the_baseline(night: Night) -> None:
    """Without a baseline there is nothing to compare with: starting a proposal is refused."""
    number = night.ledger.queue(night.proposal())
    with pytest.raises(LedgerBroken, match="FOREIGN KEY"):
        night.ledger.start(number, 0, night.config)


def test_a_repair_is_part_of_the_lineage(night: Night) -> None:
    """An amended config, not the one that ran out of memory, joins the lineage with the whole diff."""
    night.baseline(2.0)
    number = night.ledger.queue(night.proposal())
    big = night.apply({"optim.learning_rate": 1e-3})
    night.ledger.start(number, 0, big)
    night.ledger.close_trial(
        night.begin(big, proposal=number, role=Role.SCREEN), night.failure(TrialState.OUT_OF_MEMORY)
    )
    repaired = night.apply({"optim.learning_rate": 1e-3, "batch.per_device": 8, "batch.accumulation": 2})
    night.ledger.amend(number, repaired)
    night.run(1.9, repaired, proposal=number, role=Role.REPAIR)
    night.kept(number, 1.91)
    with night.reader() as reader:
        node = reader.incumbent()
        assert node is not None
        assert node.config == repaired
        assert node.diff == {"optim.learning_rate": 1e-3, "batch.per_device": 8, "batch.accumulation": 2}
        assert node.scores == {1: pytest.approx(1.91)}
        assert reader.known_configs() == {night.config.digest: 0, big.digest: number, repaired.digest: number}
        assert reader.invariants() == []


def test_amending_needs_a_running_proposal(night: Night) -> None:
    """A queued proposal has no config to repair."""
    number = night.ledger.queue(night.proposal())
    with pytest.raises(LedgerBroken):
        night.ledger.amend(number, night.config)


def test_reopening_goes_on(night: Night) -> None:
    """A ledger opened again takes up the numbers where they were."""
    night.ledger.queue(night.proposal())
    night.ledger.close()
    with Ledger.open(night.path) as again:
        assert again.queue(night.proposal()) == 2


def test_a_closed_ledger_is_one_whole_file(night: Night, tmp_path: Path) -> None:
    """Whoever copies ledger.db alone has everything, also while somebody was reading when the driver closed it."""
    night.run(2.0)
    with night.reader() as reader:
        assert len(reader.trials()) == 1
        night.ledger.close()
    copy = tmp_path / "copy.db"
    shutil.copy(night.path, copy)
    with Reader(copy) as reader:
        assert [trial.score for trial in reader.trials()] == [pytest.approx(2.0)]
    night.ledger.close()
