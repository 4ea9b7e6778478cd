"""What somebody changes in a ledger with the triggers out of the way, however consistently, `verify` names."""

from __future__ import annotations

import contextlib
import math
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from frozen.timer import Budget
from harness.audit import audit
from harness.config import TrialConfig, apply
from harness.queries import Reader
from harness.records import Decision, Failed, Proposal, Role, TrialState, Verdict
from harness.replay import Replay
from harness.rows import Ending
from harness.study import load
from harness.upgrade import tool_of
from harness.verify import verify
from harness.view import Silent

Night = Any  # the fixture's class lives in conftest.py

SQL = {
    # Consistent within the row: only the val split tells.
    "trial 1 was scored on 2000 bytes, but the val split has 1000": "UPDATE trials"
    " SET score = score / 2, scored_bytes = 2 * scored_bytes WHERE id = 1",
    "trial 10 was scored on 2000 bytes, but the val split has 1000": "UPDATE trials"
    " SET score = score / 2, scored_bytes = 2 * scored_bytes WHERE id = 10",
    "trial 2 was scored on 150 tokens, but the val split has 300": "UPDATE trials"
    " SET scored_tokens = 150, perplexity = exp(nats / 150) WHERE id = 2",
    "trial 2 was scored on 2 documents, but the val split has 1": "UPDATE document_nats"
    " SET nats = zeroblob(16) WHERE trial = 2",
    "nats, but has the nats of no document": "DELETE FROM document_nats WHERE trial = 3",
    "has the nats of no document": "UPDATE trials SET score = score / 2, nats = nats / 2,"
    " perplexity = exp(nats / 2 / scored_tokens) WHERE id = 3; DELETE FROM document_nats WHERE trial = 3",
    "trial 3 has the perplexity 1.0": "UPDATE trials SET perplexity = 1.0 WHERE id = 3",
    "the ledger's study has the seed 5, but its files say 0": "UPDATE study SET seed = 5",
    "the ledger's study has the metric 'accuracy', but its files say 'bits_per_byte'": "UPDATE study"
    " SET metric = 'accuracy'",
    "the ledger's study has the task 'sft'": "UPDATE study SET task = 'sft'",
    "the ledger's study has the model 'big'": "UPDATE study SET model = 'big'",
    "the ledger's study has the budget '1tok', but its files say '200000tok'": "UPDATE study SET budget = '1tok'",
    "the ledger's study has the seal '": f"UPDATE study SET seal = '{'6' * 64}'",
    "the ledger's study has the policy line 'max": "UPDATE study"
    " SET policy = replace(policy, 'max_changes =', 'max_changes  =')",
    "the ledger's study has torch '9.9', but '": "UPDATE study SET versions = json_set(versions, '$.torch', '9.9')",
    "the ledger has 0 studies": "DELETE FROM study",
    "trial 6 has the seed 7, but replicate 2 has 2": "UPDATE trials SET seed = 7 WHERE id = 6",
    "trial 6 has the role final, but full runs are replicates from 1000": "UPDATE trials SET role = 'final'"
    " WHERE id = 6",
    "trial 6 has the role final, but the folder": "UPDATE trials SET role = 'final' WHERE id = 6",
    "trial 10 has the role final, but its config is neither that of node 1 nor that of a later one": "UPDATE trials"
    " SET (config, config_digest) = (SELECT config, config_digest FROM proposals WHERE number = 2) WHERE id = 10",
    "trial 10 is scored with the role replicate, but has no folder": "UPDATE trials SET role = 'replicate'"
    " WHERE id = 10",
    "trial 4 has the role repair, but its config makes it a screen": "UPDATE trials SET role = 'repair' WHERE id = 4",
    'proposal 1 has the diff {"model.depth":1}': "UPDATE proposals SET diff = '{\"model.depth\":1}'",
    'node 1 has the diff {"model.depth":1}': "UPDATE lineage SET diff = '{\"model.depth\":1}' WHERE node = 1",
    "the verdict on proposal 1 says -0.5 ±": "UPDATE verdicts SET difference = -0.5",
    " ± 1e-05 (": "UPDATE verdicts SET standard_error = 1e-5",
    "(probability 0.5, 2 replicates), but its scores give": "UPDATE verdicts SET probability = 0.5",
    " 7 replicates), but its scores give": "UPDATE verdicts SET replicates = 7",
    "the verdict on proposal 1 is against node 1, but the incumbent was 0": "UPDATE verdicts SET against = 1",
    "the verdict on proposal 2 says None ± None (probability None, 3 replicates)": "UPDATE verdicts"
    " SET replicates = 3 WHERE proposal = 2",
    "proposal 1 was discarded, but by the rules and its trials it is kept": "DELETE FROM lineage WHERE node = 1;"
    " UPDATE verdicts SET decision = 'discarded', against = 0 WHERE proposal = 1",
    "proposal 2 was inconclusive, but by the rules and its trials it is discarded": "UPDATE verdicts"
    " SET decision = 'inconclusive' WHERE proposal = 2",
    "node 1 stands on trial 6, but the first that counts is trial 5": "UPDATE lineage SET trial = 6 WHERE node = 1",
    "node 0 stands on trial 2, but the first that counts is trial 1": "UPDATE lineage SET trial = 2 WHERE node = 0",
    "event 1 says that a search ended, but none had begun": "UPDATE events SET kind = 'run_ended' WHERE id = 1",
    "trial 1 began at 2": "UPDATE events SET created = (SELECT max(decided) FROM verdicts)",
    "proposal 3 was decided at 2": "UPDATE events SET (kind, created) = ('run_ended', (SELECT max(started) FROM trials"
    " WHERE role <> 'final')) WHERE id = 2",
    "trial 11 is a full run, but no event says that its config had been reproduced": "UPDATE events"
    " SET data = json_set(data, '$.agrees', json('false')) WHERE kind = 'reproduced'",
    "trial 12 is a full run, but no": "DELETE FROM events WHERE id > 1",
    "on the holdout, but no event says that it looked": "UPDATE events SET kind = 'note' WHERE kind = 'holdout_look'",
    "trial 2 has -1.0 train_seconds": "UPDATE trials SET train_seconds = -1 WHERE id = 2",
    "the folder of trial 9 is there, but the ledger ends with trial 8": "DELETE FROM trials WHERE id > 8;"
    " DELETE FROM document_nats WHERE trial > 8; DELETE FROM curves WHERE trial > 8; DELETE FROM events WHERE id > 1",
    "speaks of trial 12, which is not there": "DELETE FROM trials WHERE id = 12; DELETE FROM curves WHERE trial = 12;"
    " DELETE FROM document_nats WHERE trial = 12",
    "events are numbered to": "DELETE FROM events WHERE id = 1",
    "no event says that a search began": "DELETE FROM events",
    "but no event has its score on the holdout": "DELETE FROM events WHERE id > 2",
    'proposal 3 has the diff {"optim.learning_rate":0.0007}, but its config differs': "UPDATE trials"
    " SET state = 'crashed' WHERE id = 8",
    "node 0 has the baseline's config": "UPDATE lineage SET (config, config_digest) = (SELECT json_set(config,"
    " '$.\"optim.beta1\"', 0.5), hex(zeroblob(32)) FROM proposals WHERE number = 2) WHERE node = 0",
}


@pytest.fixture
def study(night: Night) -> Night:
    """Return a study with a winner, a loser, a repair, a failed trial and a full run."""
    night.seat_baseline()
    night.keep(1e-3)
    lose(night, {"optim.learning_rate": 8e-4})
    repaired(night, {"optim.learning_rate": 7e-4})
    replay = Replay(
        night.study, tool_of(night.study.seal, thorough=True), night.ledger, night.reader, night.launcher, Silent()
    )
    replay.reproduce()
    replay.full_run(Budget.parse("2Mtok"))
    return night


def start(night: Night, diff: dict[str, Any]) -> tuple[int, TrialConfig]:
    number = night.ledger.queue(Proposal(diff=diff, source="human", rationale="why", watch="what"))
    config = apply(night.reader.incumbent().config, diff)
    night.ledger.start(number, night.reader.incumbent().node, config)
    return number, config


def discard(night: Night, number: int) -> None:
    told = dict.fromkeys(("difference", "standard_error", "probability"))
    verdict = Verdict(decision=Decision.DISCARDED, replicates=0, reason="it is no better", **told)
    night.ledger.decide(number, verdict, None)


def lose(night: Night, diff: dict[str, Any]) -> None:
    """Screen a proposal and discard it."""
    number, config = start(night, diff)
    night.run(config, 0, Role.SCREEN, number)
    discard(night, number)


def repaired(night: Night, diff: dict[str, Any]) -> None:
    """Let a proposal run out of memory, and screen it with half the batch."""
    number, config = start(night, diff)
    study = night.study
    row = {"proposal": number, "role": Role.SCREEN, "config": config, "seed": 0, "replicate": 0, "epoch": 0}
    row |= {"budget": str(study.budget), "seal": study.seal.digest, "device": "cpu", "sandbox": "plain"}
    trial = night.ledger.begin(**row)
    failed = Failed(state=TrialState.OUT_OF_MEMORY, error_class="OutOfMemoryError", error_text="too big")
    night.ledger.close_trial(trial, Ending.of_failed(failed))
    batch = config.batch
    half = {"batch.per_device": batch.per_device // 2, "batch.accumulation": 2 * batch.accumulation}
    night.ledger.amend(number, apply(config, half))
    night.run(apply(config, half), 0, Role.REPAIR, number)
    discard(night, number)


def tamper(path: Path, sql: str) -> None:
    """Change rows behind the schema's back, and leave the schema as it was."""
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.create_function("exp", 1, math.exp)
        triggers = other.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in triggers:
            other.execute(f"DROP TRIGGER {name}")
        other.execute("PRAGMA ignore_check_constraints = ON")
        other.executescript(sql)
        for _, trigger in triggers:
            other.execute(trigger)
        other.commit()


@pytest.mark.parametrize("said", SQL)
def test_edited_rows_are_named(study: Night, said: str) -> None:
    """Every edit is a sentence with the row and both values, and nothing is scored after it."""
    assert audit(study.study, study.reader) == []
    tamper(study.study.paths.ledger, SQL[said])
    found = audit(study.study, study.reader)
    assert any(said in sentence for sentence in found), found


def test_a_decision_before_its_time_is_named(study: Night) -> None:
    """A promising proposal that was discarded after its screening lacks the runs that the rules ask for."""
    lose(study, {"optim.learning_rate": 5e-3})
    assert audit(study.study, study.reader) == [
        "proposal 4 was discarded, but by the rules and its trials it needs another run first, its own replicate 1"
    ]


def test_decisions_of_another_version_are_not_judged_again(study: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an upgrade the rules may be stricter; what is checked then are the numbers."""
    tamper(study.study.paths.ledger, "UPDATE verdicts SET decision = 'inconclusive' WHERE proposal = 2")
    assert len(audit(study.study, study.reader)) == 1
    monkeypatch.setattr("harness.audit.tool_version", lambda: "99.0")
    assert audit(study.study, study.reader) == []


def test_a_control_after_a_verdict_changes_nothing(study: Night) -> None:
    """A control of the incumbent runs between two walks, and counts for the next verdict only."""
    study.run(study.reader.incumbent().config, 9, Role.CONTROL, 1)
    lose(study, {"optim.learning_rate": 6e-4})
    assert audit(study.study, study.reader) == []


def test_verify_reports_them_and_scores_nothing(study: Night) -> None:
    """What is found makes `verify` fail."""
    study.launcher.orders.clear()
    tamper(study.study.paths.ledger, "UPDATE trials SET seed = 7 WHERE id = 6")
    found = [finding for finding in verify(study.study, scorer=study.launcher) if not finding.ok]
    assert [(finding.what, finding.text[:7]) for finding in found] == [
        ("ledger", "replica"),
        ("ledger", "trial 6"),
        ("score", "the bes"),
    ]
    assert study.launcher.orders == []


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("DELETE FROM events WHERE kind = 'tool_changed'", "under a seal that neither the study nor an event names"),
        (
            "UPDATE trials SET seal = (SELECT seal FROM trials ORDER BY id DESC LIMIT 1) WHERE role = 'screen'",
            "under another seal than the study's",
        ),
        (
            "UPDATE events SET data = json_set(data, '$.versions.torch', '9') WHERE kind = 'tool_changed'",
            "its files and versions do not give the seal it names",
        ),
        (
            "UPDATE trials SET seal = printf('%064d', 0) WHERE id = (SELECT max(id) FROM trials);"
            " UPDATE events SET data = json_set(data, '$.seal', printf('%064d', 0)) WHERE kind = 'tool_changed'",
            "its files and versions do not give the seal it names",
        ),
    ],
)
def test_the_seal_of_another_tool_must_be_proven(
    study: Night, upgrade: Callable[[Night], None], sql: str, said: str
) -> None:
    """A replay's row may have a seal of its own only if an event lists the files and versions that give it."""
    upgrade(study)
    tool = tool_of(study.study.seal, thorough=True)
    Replay(study.study, tool, study.ledger, study.reader, study.launcher, Silent()).reproduce()
    assert audit(study.study, study.reader) == []
    tamper(study.study.paths.ledger, sql)
    found = audit(study.study, study.reader)
    assert any(said in sentence for sentence in found), found


def test_a_trial_without_its_folder_is_named(study: Night) -> None:
    """A scored row that no driver ran has no folder."""
    shutil.rmtree(study.study.paths.trial(7).root)
    assert audit(study.study, study.reader) == ["trial 7 is scored with the role screen, but has no folder"]


def test_the_order_in_a_folder_speaks_against_its_row(study: Night) -> None:
    """Seed and replicate that were changed together are still not what the driver wrote beside the row."""
    order = study.study.paths.trial(6).config_json
    order.write_text('{"seed": 2}')
    assert audit(study.study, study.reader) == []
    tamper(study.study.paths.ledger, "UPDATE trials SET seed = 9, replicate = 9 WHERE id = 6")
    judged = (
        "proposal 1 was kept, but by the rules and its trials it needs another run first, the incumbent's replicate 9"
    )
    assert audit(study.study, study.reader) == [judged, "trial 6 has the seed 9, but its folder says 2"]
    order.write_text("{")
    assert audit(study.study, study.reader) == [judged]


def test_an_unreadable_val_split_is_named(study: Night) -> None:
    """Without the split there is nothing to hold a score against, which is no crash."""
    (study.study.paths.split("val") / "bytes.npy").unlink()
    assert "the val split cannot be read" in audit(study.study, study.reader)[0]


def test_another_clock_changes_nothing(study: Night) -> None:
    """Verdicts are held against the rows before them by number: a clock that was set back breaks nothing."""
    tamper(study.study.paths.ledger, "UPDATE trials SET started = '2001-01-01', ended = '2000-01-01' WHERE id > 3")
    assert audit(study.study, study.reader) == []


def test_a_canary_after_a_verdict_changes_nothing(study: Night) -> None:
    """A canary moves the noise of later verdicts, not of those before it."""
    study.run(study.study.baseline, 3, Role.CANARY)
    assert audit(study.study, study.reader) == []


def test_the_clock_may_have_been_set_back(study: Night) -> None:
    """Where stamps are out of order they say nothing about when a driver was running."""
    tamper(study.study.paths.ledger, "UPDATE events SET created = '1999-01-01' WHERE id = 2")
    assert audit(study.study, study.reader) == []
    tamper(study.study.paths.ledger, "UPDATE trials SET started = '2001-01-01' WHERE role <> 'final'")
    assert audit(study.study, study.reader) == []


def test_a_renamed_study_is_the_same(study: Night) -> None:
    """The owner may move the folder."""
    study.ledger.close()
    root = study.study.paths.root
    moved = load(root.rename(root.with_name("other")))
    with Reader(moved.paths.ledger) as reader:
        assert audit(moved, reader) == []
