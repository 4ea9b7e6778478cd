"""Studies whose trials go on from their parent's checkpoint: what is compared with what; dying costs nothing."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.briefing import brief
from agent.evidence import scores
from agent.space import Space
from harness import checkpoints
from harness.audit import audit
from harness.history import history_of
from harness.jobs.job import TrainJob
from harness.ledger import Ledger
from harness.limits import Limits
from harness.migrations import APPLICATION_ID, migrations
from harness.proposers import load_proposer
from harness.proposing import Wish, check
from harness.queries import Reader
from harness.records import Decision, Failed, ProposalState, Role, Trial, TrialState
from harness.report.summary import gather, improvement
from harness.study import load
from tests.drive import Drive, Script, death_at, facts, fails

BETTER = {"optim.learning_rate": 3e-3}
BEST = {"optim.learning_rate": 6e-3}
WORSE = {"optim.learning_rate": 1e-5}
BACK = {"optim.learning_rate": 3e-3}
DIVERGED = Failed(state=TrialState.DIVERGED, error_class="Diverged", error_text="loss is NaN")


@pytest.fixture
def drive(continued_night: Any) -> Callable[..., Drive]:
    """Return a maker of drives over an empty study whose trials continue."""
    continued_night.ledger.close()
    return lambda *diffs: Drive(continued_night.study.paths, continued_night.launcher, Script(*diffs))


def starts(night: Drive) -> list[tuple[Role, int | None, int | None, int]]:
    with Reader(night.paths.ledger) as reader:
        return [(t.role, t.proposal, t.start, t.replicate) for t in reader.trials()]


def test_candidates_and_what_they_are_compared_with_go_on_from_the_same_checkpoint(
    drive: Callable[..., Drive],
) -> None:
    """The baseline from scratch, then continued; every kept node continued before anything is judged against it."""
    night = drive(BETTER, WORSE)
    assert night.run().exit_code == 0
    kept, worse = night.past()
    assert kept.verdict is not None
    assert kept.verdict.decision is Decision.KEPT
    assert kept.verdict.difference == pytest.approx(-0.28, abs=0.01)
    assert worse.verdict is not None
    assert worse.verdict.decision is Decision.DISCARDED
    found = starts(night)
    assert found[:6] == [(Role.BASELINE, None, None, r) for r in range(3)] + [
        (Role.CONTROL, None, 0, r) for r in range(3)
    ]
    own = [row for row in found if row[1] == 1 and row[2] == 0]
    assert {row[0] for row in own} == {Role.SCREEN, Role.REPLICATE}
    later = found[found.index(own[-1]) + 1 :]
    assert later == [(Role.CONTROL, 1, 1, r) for r in range(3)] + [(Role.SCREEN, 2, 1, 0)]
    orders = [job for job in night.launcher.orders if isinstance(job, TrainJob)]
    with Reader(night.paths.ledger) as reader:
        digests = reader.checkpoints()
        for job, trial in zip(orders, reader.trials(), strict=True):
            folder = (
                None if trial.start is None else checkpoints.folder_of(night.paths, trial.start, digests[trial.start])
            )
            assert job.start == (None if folder is None else folder.resolve())
            assert job.seed == load(night.paths.root).seed_of(trial.replicate, trial.start)
        seeds = {trial.start: trial.seed for trial in reader.trials() if trial.replicate == 0}
    assert len(set(seeds.values())) == 3, "what goes on is not shown the same batches once more"


def test_a_kept_change_is_better_than_training_on_and_not_only_than_stopping(drive: Callable[..., Drive]) -> None:
    """Every continuation is better than the node that it goes on from; a change must beat the unchanged one."""
    night = drive({"schedule.warmup_fraction": 0.2}, {"schedule.warmup_fraction": 0.25})
    night.run()
    with Reader(night.paths.ledger) as reader:
        baseline = reader.incumbent()
        assert baseline is not None
        assert baseline.node == 0
        assert baseline.score is not None
        assert baseline.score_to_beat is not None
        assert baseline.score_to_beat < baseline.score
        for past in reader.past():
            assert past.verdict is not None
            assert past.verdict.decision is not Decision.KEPT
            assert all(t.score is not None and t.score < baseline.score for t in past.trials)


def test_the_lineage_may_come_back_to_a_config(drive: Callable[..., Drive]) -> None:
    """The same config from another start is another trial; unchanged on its parent it is stale, again a duplicate."""
    night = drive(BETTER, BEST, {"optim.learning_rate": 3e-3}, {"optim.learning_rate": 6e-3}, WORSE, WORSE)

    def spoil(job: Any) -> Failed | None:
        """Let the low rate be the better one once the high one was kept: its made-up scores fall from there."""
        night.launcher.shift = 0.0
        if isinstance(job, TrainJob) and job.start is not None and job.start.name.startswith("00002"):
            night.launcher.shift = 300 * (job.config.optim.learning_rate - 3e-3)
        return None

    night.launcher.spoil = spoil
    night.run()
    past = night.past()
    assert [p.state.value for p in past[:3]] == ["decided"] * 3
    with Reader(night.paths.ledger) as reader:
        nodes = reader.lineage()
    assert [(node.node, node.config.optim.learning_rate) for node in nodes[:4]] == [
        (0, 2e-4),
        (1, 3e-3),
        (2, 6e-3),
        (3, 3e-3),
    ]
    assert nodes[1].config == nodes[3].config
    assert nodes[1].score != nodes[3].score
    assert past[5].state is ProposalState.DUPLICATE


def test_a_proposal_on_an_older_node_is_turned_away_with_the_reason(drive: Callable[..., Drive]) -> None:
    """What went on from there would have had less training than what it is compared with."""
    night = drive(BETTER)
    night.run()
    study = load(night.paths.root)
    with pytest.raises(Exception, match="node 0 is not the incumbent"):
        check(study, Wish(diff=dict(WORSE), why="try", parent=0))
    named = night.script.propose

    def on_the_baseline(history: Any, count: int) -> Any:
        return [p.model_copy(update={"parent": 0}) for p in named(history, count)]

    night.script.diffs = (BETTER, WORSE)
    night.script.propose = on_the_baseline  # type: ignore[method-assign]
    night.run()
    assert night.past()[1].state is ProposalState.STALE
    assert "node 0 is not the incumbent" in str(night.past()[1].reason)


def test_an_incumbent_that_cannot_go_on_pauses_the_search(drive: Callable[..., Drive]) -> None:
    """A control that fails is passed over; after three the search stops and says so, however often it is started."""
    night = drive(BETTER, WORSE)
    night.launcher.spoil = fails(
        lambda job: job.start is not None and job.start.name.startswith("00001"),
        DIVERGED,
    )
    for _ in range(2):
        stopped = night.run()
        assert stopped.exit_code == 3
        assert "continued from its own checkpoint, failed on 3 seeds" in stopped.reason
    night.past()


def test_a_control_that_fails_once_is_passed_over(drive: Callable[..., Drive]) -> None:
    """Three scores are needed, of whatever seeds."""
    night = drive(BETTER, WORSE)
    failing = load(night.paths.root).seed_of(1, 1)
    night.launcher.spoil = fails(lambda job: job.seed == failing, DIVERGED)
    assert night.run().exit_code == 0
    with Reader(night.paths.ledger) as reader:
        incumbent = reader.incumbent()
    assert incumbent is not None
    assert incumbent.continued is not None
    assert set(incumbent.continued) == {0, 2, 3}
    night.past()


def test_a_checkpoint_that_has_changed_starts_nothing(drive: Callable[..., Drive]) -> None:
    """What every trial begins with is hashed before the first one does."""
    night = drive(BETTER)
    night.run(Limits(trials=4))
    with Reader(night.paths.ledger) as reader:
        folder = checkpoints.folder_of(night.paths, 0, reader.checkpoints()[0])
    file = folder / "model.safetensors"
    text = file.read_text()
    file.unlink()
    file.write_text(text + "0")
    stopped = night.run()
    assert stopped.exit_code == 1
    assert "has changed since it was published" in stopped.reason


def test_improvement_is_told_only_against_as_much_training(drive: Callable[..., Drive]) -> None:
    """After one step the baseline continued once is there to compare with; after two nobody has run it twice."""
    night = drive(BETTER, BEST)
    night.run(Limits(trials=12))
    seen = []
    for trials in (12, 60):
        night.run(Limits(trials=trials))
        with Reader(night.paths.ledger) as reader:
            found = gather(reader, driver_lives=False)
            seen.append((len(found.lineage), improvement(found)))
    (one, gain), (two, unknown) = seen
    assert (one, two) == (2, 3)
    assert gain is not None
    assert gain.amount == pytest.approx(0.28, abs=0.01)
    assert unknown is None


TAMPER = {
    "a start that is another node's": "UPDATE trials SET start = 0 WHERE role = 'screen' AND proposal = 2",
    "a baseline that went on": "UPDATE trials SET start = 1 WHERE id = 2",
    "a control from the base": "UPDATE trials SET start = NULL WHERE role = 'control' AND proposal = 1 AND id > 8",
}


@pytest.mark.parametrize("sql", TAMPER.values(), ids=TAMPER.keys())
def test_a_start_that_the_walk_would_not_have_used_is_found(drive: Callable[..., Drive], sql: str) -> None:
    """The rows alone say where each trial must have started."""
    night = drive(BETTER, WORSE)
    night.run()
    with contextlib.closing(sqlite3.connect(night.paths.ledger)) as connection:
        names = ("trials_closed_once", "trials_keep_start")
        asked = "SELECT sql FROM sqlite_master WHERE name = ?"
        guards = [connection.execute(asked, (name,)).fetchone()[0] for name in names]
        for name in names:
            connection.execute(f"DROP TRIGGER {name}")
        assert connection.execute(sql).rowcount >= 1
        for guard in guards:
            connection.execute(guard)
        connection.commit()
    with Reader(night.paths.ledger) as reader:
        found = audit(load(night.paths.root), reader)
    assert any("went on from" in sentence for sentence in found)


def test_the_rows_of_a_start_cannot_be_changed(drive: Callable[..., Drive]) -> None:
    """The database itself refuses it."""
    night = drive()
    night.run(Limits(trials=4))
    with Ledger.open(night.paths.ledger) as ledger, pytest.raises(Exception, match="never changes"):
        ledger._db.conn.execute("UPDATE trials SET start = NULL WHERE id = 4")


QUICK = [pytest.param(4, False)]
THOROUGH = [pytest.param(start, after, marks=pytest.mark.slow) for start in (1, 2, 3, 4) for after in (False, True)]


@pytest.mark.parametrize(("start", "after"), QUICK + THOROUGH)
def test_dying_at_any_change_of_the_ledger_costs_nothing(
    drive: Callable[..., Drive], tmp_path: Path, start: int, after: bool
) -> None:
    """Whatever the line, the next driver comes to the same trials, starts, verdicts and lineage."""
    night = drive(BETTER, WORSE, BEST)
    pristine = tmp_path / "pristine"
    shutil.copytree(night.paths.root, pristine)
    night.run()
    expected, begun = facts(night), sorted(starts_of_scored(night), key=str)
    countdown = start
    while death_at(night, pristine, countdown, after=after):
        assert facts(night) == expected, f"died at change {countdown}"
        assert sorted(starts_of_scored(night), key=str) == begun
        countdown += 4
    assert countdown > 20


def starts_of_scored(night: Drive) -> list[tuple[Any, ...]]:
    with Reader(night.paths.ledger) as reader:
        return [(t.config.digest, t.start, t.replicate, t.score) for t in reader.trials() if t.score is not None]


@pytest.mark.parametrize("name", ["rules", "random", pytest.param("sampler", marks=pytest.mark.process)])
def test_proposers_work_on_what_continues(drive: Callable[..., Drive], name: str) -> None:
    """None of them names an older parent or is confused by scores that fall with every start."""
    night = drive()
    proposer = load_proposer(name)
    with contextlib.closing(proposer):
        night.script = proposer  # type: ignore[assignment]
        night.run(Limits(trials=30))
    past = night.past()
    assert len([p for p in past if p.verdict is not None]) >= 3
    assert all(p.state in (ProposalState.DECIDED, ProposalState.RUNNING, ProposalState.QUEUED) for p in past)


def test_what_proposers_learn_from_is_relative_to_going_on_unchanged(drive: Callable[..., Drive]) -> None:
    """A config that lost against the incumbent continued is no success, although its score is below the baseline's."""
    night = drive(BETTER, WORSE)
    night.run()
    study = load(night.paths.root)
    with Reader(night.paths.ledger) as reader:
        history = history_of(study, reader)
    found = {digest: sum(values) / len(values) for digest, values in scores(history).items()}
    configs = {past.number: past.config for past in history.past if past.config is not None}
    assert found[study.baseline.digest] == pytest.approx(0, abs=1e-9)
    assert found[configs[2].digest] == pytest.approx(0.299, abs=0.01)
    assert found[configs[1].digest] == pytest.approx(-0.28 * 3 / 6, abs=0.05), "once as candidate, once to beat"
    space = Space.of(history)
    assert space is not None
    assert history.incumbent is not None
    assert space.base_score == history.incumbent.score_to_beat
    assert study.baseline.digest not in space.known, "from this start it is new"


def test_a_briefing_says_that_trials_continue(drive: Callable[..., Drive]) -> None:
    """What is compared with what, and no improvement over a baseline that had less training."""
    night = drive(BETTER)
    night.run()
    with Reader(night.paths.ledger) as reader:
        text = brief(history_of(load(night.paths.root), reader))
    assert "A trial goes on from its parent's checkpoint" in text
    assert "To beat, the incumbent's config trained on from its checkpoint" in text
    assert "from the baseline" not in text
    assert "unless it names another node" not in text


OLDER = 5
"""Migrations of the schema before trials could continue."""


def test_a_ledger_from_before_trials_could_continue_is_migrated(night: Any, tmp_path: Path) -> None:
    """Its rows stay what they were, and nothing in it contradicts anything; a reader leaves the file alone."""
    night.seat_baseline()
    night.keep(1e-3)
    night.keep(3e-3)
    night.ledger.close()
    older = tmp_path / "older.db"
    downgrade(night.study.paths.ledger, older)
    before = older.read_bytes()
    with Reader(older) as reader, Reader(night.study.paths.ledger) as now:
        assert audit(night.study, reader) == []
        assert (reader.trials(), reader.lineage(), reader.noise()) == (now.trials(), now.lineage(), now.noise())
        assert {trial.start for trial in reader.trials()} == {None}
    assert older.read_bytes() == before
    with Ledger.open(older) as ledger:
        assert ledger._db.execute("PRAGMA foreign_keys").fetchone() == (1,)
        assert ledger._db.execute("PRAGMA foreign_key_check").fetchall() == []
    with Reader(older) as reader:
        assert audit(night.study, reader) == []
        assert len(reader.lineage()) == 3
    night.reader.close()
    for left in night.study.paths.root.glob("ledger.db*"):
        left.unlink()
    shutil.copy(older, night.study.paths.ledger)
    on = Drive(night.study.paths, night.launcher, Script({}, {}, {"optim.learning_rate": 6e-3}))
    on.run()
    assert len(on.past()) == 3
    assert {trial.start for trial in trials_of(on)} == {None}


def trials_of(night: Drive) -> list[Trial]:
    with Reader(night.paths.ledger) as reader:
        return list(reader.trials())


def downgrade(newer: Path, older: Path) -> None:
    """Copy the rows of a ledger into one of the schema before, without waking its triggers."""
    with contextlib.closing(sqlite3.connect(older)) as connection:
        for migration in migrations()[:OLDER]:
            connection.executescript(migration.sql)
        connection.execute("PRAGMA journal_mode = WAL")
        guards = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in guards:
            connection.execute(f"DROP TRIGGER {name}")
        connection.execute("ATTACH ? AS newer", (str(newer),))
        names = connection.execute("SELECT name FROM main.sqlite_master WHERE type = 'table'").fetchall()
        for (table,) in names:
            rows = connection.execute(f"SELECT name FROM pragma_table_info('{table}')").fetchall()
            columns = ", ".join(f'"{row[0]}"' for row in rows)
            condition = f" WHERE number <= {OLDER}" if table == "migrations" else ""
            connection.execute(f"INSERT INTO {table} ({columns}) SELECT {columns} FROM newer.{table}{condition}")
        for _, sql in guards:
            connection.execute(sql)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {OLDER}")
        connection.commit()
