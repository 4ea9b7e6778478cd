from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.ledger import Ledger
from harness.queries import Reader
from harness.records import Decision, Role, TrialState

Night = Any  # the driver of the fixture ``night``; conftest.py is not importable under importlib mode


TAMPERINGS = {
    "trial 1 has the score": "UPDATE trials SET score = 1.0 WHERE id = 1",
    "sum to": "UPDATE document_nats SET nats = zeroblob(16) WHERE trial = 1",
    "not the one of its digest": "UPDATE trials SET config = json_set(config, '$.\"optim.beta1\"', 0.5) WHERE id = 1",
    "another seal": f"UPDATE trials SET seal = '{'6' * 64}' WHERE id = 2",
    "not the study's": "UPDATE trials SET budget = '1tok' WHERE id = 2",
    "seeds are shared": "UPDATE trials SET seed = 5 WHERE id = 4",
    "is kept but not in the lineage": "DELETE FROM lineage WHERE node = 1",
    "without a baseline": "DELETE FROM lineage WHERE node = 0",
    "is decided without a verdict": "DELETE FROM verdicts",
    "is discarded but in the lineage": "UPDATE verdicts SET decision = 'discarded'",
    "stands on trial": "UPDATE lineage SET trial = 1 WHERE node = 1",
    "another checkpoint": f"UPDATE lineage SET checkpoint_digest = '{'d' * 64}' WHERE node = 1",
    "trials are numbered": "DELETE FROM trials WHERE id = 2",
    "points to a row of": "UPDATE trials SET proposal = 9 WHERE id = 4",
    "nats, but has the nats of no document": "DELETE FROM document_nats WHERE trial = 3",
    "trial 3 has the perplexity 1.0, but": "UPDATE trials SET perplexity = 1.0 WHERE id = 3",
    "trial 3 has the perplexity None, but": "UPDATE trials SET perplexity = NULL WHERE id = 3",
    "trial 2 has the perplexity 106.": "UPDATE trials SET scored_tokens = 301 WHERE id = 2",
    "trial 3 has the role final but is replicate 0": "UPDATE trials SET role = 'final' WHERE id = 3",
    "trial 1 has the role screen but belongs to the baseline": "UPDATE trials SET role = 'screen' WHERE id = 1",
    "trial 4 has the role canary but belongs to proposal 1": "UPDATE trials SET role = 'canary' WHERE id = 4",
    "trial 4 has the role screen but is replicate 1": "UPDATE trials SET role = 'screen' WHERE id = 4",
    "trial 3 has the role repair, but its config makes it a screen": "UPDATE trials SET role = 'repair' WHERE id = 3",
    'proposal 1 has the diff {"optim.beta1":0.5}': "UPDATE proposals SET diff = '{\"optim.beta1\":0.5}'",
    'node 1 has the diff {"optim.beta1":0.5}': "UPDATE lineage SET diff = '{\"optim.beta1\":0.5}' WHERE node = 1",
    "cannot be applied to node 0: unknown knob": "UPDATE proposals SET diff = '{\"optim.none\":0.5}'",
    "trial 5 ran config": "UPDATE trials SET (config, config_digest) ="
    " (SELECT config, config_digest FROM lineage WHERE node = 0) WHERE id = 5",
    "but the baseline has": "UPDATE trials SET replicate = 9, seed = 1009, (config, config_digest) ="
    " (SELECT config, config_digest FROM lineage WHERE node = 1) WHERE id = 2",
    "proposal 1 asked for parent 3 but started from 0": "UPDATE proposals SET requested_parent = 3",
    "events are numbered to 2 but 1 are there": "DELETE FROM events WHERE id = 1",
    "the curve of trial 2 is numbered to 1 but has 1 points": "DELETE FROM curves WHERE trial = 2 AND point = 0",
    "event 2 (run_ended) has -5.0 seconds": "UPDATE events SET data = '{\"seconds\":-5.0}' WHERE id = 2",
    "speaks of trial 9, which is not there": "UPDATE events SET kind = 'reproduced',"
    " data = '{\"trial\":9}' WHERE id = 1",
    "says that trial 5 scored 1.5, its row says 1.92": "UPDATE events SET kind = 'reproduced',"
    ' data = \'{"trial":5,"score":1.5}\' WHERE id = 1',
    "CHECK constraint failed in curves": "UPDATE curves SET seconds = -1 WHERE trial = 1",
    "trial 1 has -1.0 train_seconds": "UPDATE trials SET train_seconds = -1 WHERE id = 1",
    "is queued but has trials": "UPDATE proposals SET state = 'queued', parent = NULL, config = NULL,"
    " config_digest = NULL, started = NULL, ended = NULL",
}


@pytest.mark.parametrize("said", TAMPERINGS)
def test_tampering_is_found(night: Night, said: str) -> None:
    """What another program changes with the triggers out of its way is named; putting them back hides nothing."""
    night.baseline(2.0, 2.02)
    night.kept(night.screened(1.9), 1.91, 1.92)
    night.ledger.event("run_began", "a driver began", {"pid": 1})
    night.ledger.event("run_ended", "the owner asked to stop", {"seconds": 60.0})
    night.ledger.close()
    with night.reader() as reader:
        assert reader.invariants() == []
    other = sqlite3.connect(night.path)
    triggers = other.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
    for name, _ in triggers:
        other.execute(f"DROP TRIGGER {name}")
    other.execute("PRAGMA ignore_check_constraints = ON")
    other.execute(TAMPERINGS[said])
    for _, sql in triggers:
        other.execute(sql)
    other.commit()
    other.close()
    with night.reader() as reader:
        found = reader.invariants()
    assert any(said in sentence for sentence in found), found


def test_a_dropped_trigger_is_found(night: Night) -> None:
    """A schema that is not ours any more is reported object by object."""
    night.ledger.close()
    other = sqlite3.connect(night.path)
    other.execute("DROP TRIGGER trials_closed_once")
    other.execute("CREATE TABLE mine (x)")
    other.commit()
    other.close()
    with night.reader() as reader:
        assert reader.invariants() == ["the table mine is none of ours", "the trigger trials_closed_once is missing"]


def test_every_moment_of_a_night_is_sound(night: Night, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the last statement before a crash was, the files as they lie make a sound ledger."""
    seen = 0
    for name in ("_insert", "_update"):
        original = getattr(Ledger, name)

        def crash(self: Ledger, *arguments: object, original: Any = original) -> object:
            nonlocal seen
            done = original(self, *arguments)
            copy = tmp_path / f"crash{seen}" / "ledger.db"
            copy.parent.mkdir()
            for file in night.path.parent.glob("ledger.db*"):
                shutil.copy(file, copy.parent / file.name)
            with Reader(copy) as reader:
                assert reader.invariants() == []
            seen += 1
            return done

        monkeypatch.setattr(Ledger, name, crash)
    night.baseline(2.0, 2.02)
    night.kept(night.screened(1.9), 1.91, 1.92)
    lost = night.ledger.queue(night.proposal(optim__beta1=0.5))
    config = night.apply({"optim.learning_rate": 1e-3, "optim.beta1": 0.5})
    night.ledger.start(lost, 1, config)
    trial = night.begin(config, proposal=lost, role=Role.SCREEN)
    night.ledger.close_trial(trial, night.failure(TrialState.LOST))
    night.ledger.decide(lost, night.verdict(0, Decision.DISCARDED), None)
    assert seen > 30


@pytest.mark.process
def test_a_kill_inside_a_change_leaves_nothing_of_it(night: Night) -> None:
    """A writer killed within an atomic block leaves the ledger as before, and the next one goes on."""
    trial = night.begin()
    night.ledger.close()
    code = (
        "import os, signal, sys, pathlib\n"
        "from harness.ledger import Ledger\n"
        "ledger = Ledger.open(pathlib.Path(sys.argv[1]))\n"
        "with ledger.atomic():\n"
        "    for number in range(2000):\n"
        "        ledger.event('note', 'x' * 1000)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(night.path)], check=False).returncode == -9
    with Ledger.open(night.path) as again, night.reader() as reader:
        assert reader.events() == ()
        assert reader.invariants() == []
        again.close_trial(trial, night.ending(2.0))
