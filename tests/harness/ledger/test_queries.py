from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from harness.errors import BadInput
from harness.noise import pool_noise
from harness.queries import Reader
from harness.records import Decision, Proposal, ProposalState, Role, TrialState
from harness.rows import StudyRow, pack, unpack

Night = Any  # the driver of the fixture ``night``; conftest.py is not importable under importlib mode

SAME_FIXTURE = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
VALUES = st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
PROPOSALS = st.builds(
    Proposal,
    diff=st.dictionaries(TEXTS, VALUES, max_size=4),
    source=TEXTS,
    rationale=TEXTS,
    watch=TEXTS,
    parent=st.none() | st.integers(-(2**62), 2**62),
    model=st.none() | TEXTS,
    predicted_change=st.none() | st.floats(-1e6, 1e6),
    confidence=st.none() | st.floats(0, 1),
    tokens=st.none() | st.integers(0, 2**40),
    cost_usd=st.none() | st.floats(0, 1e6),
    latency_seconds=st.none() | st.floats(0, 1e6),
)


@SAME_FIXTURE
@given(proposal=PROPOSALS)
def test_a_proposal_comes_back_as_it_was(night: Night, proposal: Proposal) -> None:
    """Whatever a proposer says, the ledger returns exactly that, types included."""
    number = night.ledger.queue(proposal)
    with night.reader() as reader:
        found = reader.proposal(number).proposal
    assert found == proposal
    assert {name: type(value) for name, value in found.diff.items()} == {
        name: type(value) for name, value in proposal.diff.items()
    }


@SAME_FIXTURE
@given(
    number=st.floats() | st.sampled_from([1e300, -1e300, 1e305, 5e-324, 0.0, -0.0]),
    whole=st.integers() | st.sampled_from([2**63 - 1, 2**63, -(2**63)]),
    field=st.sampled_from(["predicted_change", "confidence", "cost_usd", "latency_seconds", "tokens", "parent"]),
)
def test_what_a_proposal_may_hold_the_ledger_can_hold(night: Night, number: float, whole: int, field: str) -> None:
    """A value that is no proposal's is refused where it is made, and never by the ledger in the middle of a night."""
    value = whole if field in ("tokens", "parent") else number
    with contextlib.suppress(ValidationError):
        proposal = Proposal.model_validate(
            {"diff": {"a": 1}, "source": "s", "rationale": "r", "watch": "w", field: value}
        )
        with night.reader() as reader:
            assert reader.proposal(night.ledger.queue(proposal)).proposal == proposal


def test_endings_are_in_the_order_of_their_ends_and_leave_out_replays(night: Night) -> None:
    """How many somebody has seen is a bookmark: what comes later is what is new."""
    night.baseline(2.0, 2.01, 2.02)
    number = night.screened(1.9)
    refused = night.ledger.queue(night.proposal())
    with night.reader() as reader:
        seen = reader.mark()
        assert [(end.kind, end.number) for end in reader.endings(0)] == [("trial", trial) for trial in (1, 2, 3, 4)]
        night.ledger.reject(refused, ProposalState.REFUSED, "no")
        night.kept(number, 1.91, 1.92)
        night.run(1.5, role=Role.FINAL, replicate=1000, budget="9000000tok")
        new = [(end.kind, end.number) for end in reader.endings(seen)]
        assert new == [("proposal", 2), ("trial", 5), ("trial", 6), ("proposal", 1)]
        assert reader.mark() == seen + 4
        assert reader.endings(99) == ()


def test_a_page_of_proposals_is_newest_first(night: Night) -> None:
    """Pages touch each other, and the last one is as long as what is left."""
    for _ in range(7):
        night.ledger.queue(night.proposal())
    with night.reader() as reader:
        pages = [[past.number for past in reader.page(3, offset)] for offset in (0, 3, 6, 9)]
        assert reader.proposals() == 7
    assert pages == [[7, 6, 5], [4, 3, 2], [1], []]


@given(st.lists(st.floats(allow_nan=False), max_size=50))
def test_document_scores_round_trip(nats: list[float]) -> None:
    """Packing loses no bit."""
    assert unpack(pack(nats)) == tuple(nats)


def test_a_trial_comes_back_as_it_was(night: Night) -> None:
    """A scored trial keeps score, perplexity, cost, curve and documents."""
    number = night.run(2.0)
    with night.reader() as reader:
        trial = reader.trial(number)
        assert reader.document_nats(number) == night.ending(2.0).scored.document_nats
        (without,) = reader.trials()
    assert trial.state is TrialState.SCORED
    assert trial.score == pytest.approx(2.0, rel=1e-12)
    assert trial.perplexity == pytest.approx(math.exp(2.0 * math.log(2) * 1000 / 300))
    assert (trial.steps, trial.tokens, trial.parameters, trial.train_seconds) == (10, 2000, 5000, 2.0)
    assert trial.curve == night.ending(2.0).curve
    assert trial.config == night.config
    assert (trial.seal, trial.device, trial.sandbox) == ("5" * 64, "cpu", "landlock")
    assert trial.started is not None
    assert trial.ended is not None
    assert trial.started < trial.ended
    assert without.curve == ()


def test_a_failure_comes_back_with_its_reason(night: Night) -> None:
    """A failed trial has no score, and says why."""
    number = night.begin()
    with night.reader() as reader:
        assert [trial.id for trial in reader.open_trials()] == [number]
        night.ledger.close_trial(number, night.failure())
        trial = reader.trial(number)
        assert reader.open_trials() == ()
    assert (trial.state, trial.score, trial.perplexity) == (TrialState.DIVERGED, None, None)
    assert (trial.error_class, trial.error_text, trial.steps) == ("Diverged", "loss is NaN at step 3", 3)


def test_a_perplexity_beyond_floats_is_none(night: Night) -> None:
    """A hopeless but finite score is kept even where its perplexity overflows."""
    number = night.run(5000.0)
    with night.reader() as reader:
        assert reader.trial(number).score == pytest.approx(5000.0)
        assert reader.trial(number).perplexity is None


def test_what_is_not_there_is_said(night: Night, tmp_path: Path) -> None:
    """Asking for a missing trial, proposal or file names it."""
    with night.reader() as reader:
        with pytest.raises(BadInput, match="no trial 7"):
            reader.trial(7)
        with pytest.raises(BadInput, match="no proposal 7"):
            reader.proposal(7)
    with pytest.raises(BadInput, match="no ledger"):
        Reader(tmp_path / "nothing.db")
    (tmp_path / "text.db").write_text("hello")
    with pytest.raises(BadInput, match="cannot be read"):
        Reader(tmp_path / "text.db")


def test_standings_leave_out_the_screening_run(night: Night) -> None:
    """The baseline counts all its runs; a kept proposal only those after the one that selected it."""
    night.baseline(2.0, 2.02, 2.04)
    night.run(2.06, role=Role.CANARY, replicate=3)
    number = night.screened(1.8)
    night.kept(number, 1.9, 1.92)
    night.run(1.94, night.apply({"optim.learning_rate": 1e-3}), proposal=number, role=Role.CONTROL, replicate=3)
    with night.reader() as reader:
        baseline, best = reader.lineage()
        assert (reader.baseline(), reader.incumbent()) == (baseline, best)
    assert baseline.scores == pytest.approx({0: 2.0, 1: 2.02, 2: 2.04, 3: 2.06})
    assert best.scores == pytest.approx({1: 1.9, 2: 1.92, 3: 1.94})
    assert (best.node, best.parent, best.diff) == (number, 0, {"optim.learning_rate": 1e-3})
    assert best.score == pytest.approx(1.92)


def test_only_the_current_epoch_counts(night: Night) -> None:
    """After a change of the machine, scores of before are no part of anybody's standing or of the noise."""
    night.baseline(2.0, 2.02)
    night.run(2.5, epoch=1)
    with night.reader() as reader:
        standing = reader.baseline()
        assert standing is not None
        assert standing.scores == pytest.approx({0: 2.5})
        assert reader.epoch() == 1
        assert reader.noise() is None


def test_other_budgets_do_not_count(night: Night) -> None:
    """A full run of the baseline's config says nothing about its score at the search's budget."""
    night.baseline(2.0)
    night.run(1.0, role=Role.FINAL, replicate=1, budget="9000000tok")
    with night.reader() as reader:
        standing = reader.baseline()
        assert standing is not None
        assert standing.scores == pytest.approx({0: 2.0})


def test_what_a_replay_ran_is_no_result_of_the_search(night: Night) -> None:
    """Neither a full run nor a config that only a replay tried is shown to proposers, counted, or taken for tried."""
    night.baseline(2.0)
    number = night.screened(1.9)
    night.kept(number, 1.8, 1.81)
    with night.reader() as reader:
        known = reader.known_configs()
        row = dict(reader._rows("SELECT * FROM ledger")[0])
        board = [dict(row) for row in reader._rows("SELECT * FROM leaderboard")]
    final = {"role": Role.FINAL, "replicate": 1001}
    night.run(0.5, night.apply({"optim.learning_rate": 1e-3}), proposal=number, budget="9000000tok", **final)
    night.run(2.1, night.apply({"optim.beta1": 0.7}), proposal=number, **final)
    night.run(2.2, proposal=number, **final)
    night.run(0.4, budget="9000000tok", **final)
    with night.reader() as reader:
        history = reader.history(knobs={}, max_changes=2, minimum_steps=20)
        assert [trial.role for trial in history.past[0].trials] == [Role.SCREEN, Role.REPLICATE, Role.REPLICATE]
        assert [trial.role for trial in history.baseline_trials] == [Role.BASELINE]
        assert reader.known_configs() == known
        assert dict(reader._rows("SELECT * FROM ledger")[0]) == row
        assert [dict(row) for row in reader._rows("SELECT * FROM leaderboard")] == board
        assert len(reader.trials()) == 8


def test_the_last_kept_is_the_incumbent(night: Night) -> None:
    """The order of keeping, not the number of the proposal, decides who is to be beaten; the chain follows parents."""
    night.baseline(2.0)
    first, second = night.screened(1.9), night.screened(1.8, optim__beta1=0.8)
    night.kept(second, 1.81)
    night.kept(first, 1.7)
    with night.reader() as reader:
        assert [standing.node for standing in reader.lineage()] == [0, second, first]
        assert [standing.node for standing in reader.best_lineage()] == [0, first]
        incumbent = reader.incumbent()
        assert incumbent is not None
        assert incumbent.node == first
        assert reader.checkpoints() == {0: "c" * 64, second: "c" * 64, first: "c" * 64}


def test_noise_is_pooled_within_configs(night: Night) -> None:
    """The spread is that about each config's own mean, over everything run more than once, screening left out."""
    night.baseline(2.0, 2.02, 2.04)
    night.kept(night.screened(1.0), 1.9, 1.92)
    with night.reader() as reader:
        noise = reader.noise()
    assert noise is not None
    assert noise.degrees_of_freedom == 3
    assert noise.standard_deviation == pytest.approx(math.sqrt((2 * 0.02**2 + 2 * 0.01**2) / 3))


@given(st.lists(st.lists(st.floats(-100, 100), max_size=5), max_size=6), st.floats(-50, 50))
def test_noise_does_not_see_levels(groups: list[list[float]], shift: float) -> None:
    """Moving every score of a config by the same amount changes no spread; groups of one change nothing."""
    pooled = pool_noise(groups)
    moved = pool_noise([*([score + shift * index for score in group] for index, group in enumerate(groups)), [7.0]])
    if pooled is None:
        assert moved is None
    else:
        assert moved is not None
        assert moved.degrees_of_freedom == pooled.degrees_of_freedom
        assert moved.standard_deviation == pytest.approx(pooled.standard_deviation, abs=1e-9)


def test_history_is_everything_a_proposer_may_know(night: Night, study_row: StudyRow) -> None:
    """The history holds every proposal with its fate, the standings, and the next number."""
    night.baseline(2.0, 2.02)
    kept = night.screened(1.9)
    night.kept(kept, 1.9, 1.91)
    discarded = night.screened(2.1, optim__beta1=0.8)
    night.ledger.decide(discarded, night.verdict(decision=Decision.DISCARDED), None)
    refused = night.ledger.queue(night.proposal())
    night.ledger.reject(refused, ProposalState.REFUSED, "out of bounds")
    queued = night.ledger.queue(night.proposal())
    night.ledger.insight("the batch is what matters", kept)
    with night.reader() as reader:
        history = reader.history(knobs={}, max_changes=2, minimum_steps=20)
        assert [past.number for past in reader.queued()] == [queued]
        assert reader.running() == ()
    assert (history.study, history.seed, history.next_number) == (study_row.name, study_row.seed, queued + 1)
    assert [past.state.value for past in history.past] == ["decided", "decided", "refused", "queued"]
    assert history.past[0].verdict is not None
    assert history.past[0].verdict.decision is Decision.KEPT
    assert [trial.role for trial in history.past[0].trials] == [Role.SCREEN, Role.REPLICATE, Role.REPLICATE]
    assert history.past[0].trials[0].curve == night.ending(1.9).curve
    assert history.incumbent == history.lineage[-1]
    assert history.baseline == history.lineage[0]
    assert history.insights == ("the batch is what matters",)


def test_before_the_baseline_history_is_empty(night: Night) -> None:
    """A study without a result has no standing, no noise and no known config."""
    with night.reader() as reader:
        history = reader.history(knobs={}, max_changes=2, minimum_steps=20)
        assert reader.known_configs() == {}
        assert reader.best_lineage() == ()
    assert (history.baseline, history.incumbent, history.lineage, history.noise) == (None, None, (), None)
    assert (history.next_number, history.device) == (1, "cpu")


def test_known_configs_name_their_owner(night: Night) -> None:
    """Every config that was ever started is known by its digest, the baseline's as 0."""
    night.run(2.0)
    with night.reader() as reader:
        assert reader.known_configs() == {night.config.digest: 0}


def test_events_keep_their_data(night: Night) -> None:
    """Events come back in order, whole or by kind."""
    night.ledger.event("seal", "sealed", {"digest": "abc", "files": [1, 2]})
    night.ledger.event("stop", "200 trials done")
    with night.reader() as reader:
        assert [(event.kind, event.text, event.data) for event in reader.events()] == [
            ("seal", "sealed", {"digest": "abc", "files": [1, 2]}),
            ("stop", "200 trials done", {}),
        ]
        assert [event.text for event in reader.events("stop")] == ["200 trials done"]


def test_a_snapshot_sees_one_moment(night: Night) -> None:
    """What is written during a snapshot is not seen by its later reads, and does not wait for it."""
    with night.reader() as reader:
        with reader.snapshot():
            assert reader.past() == ()
            night.ledger.queue(night.proposal())
            assert reader.past() == ()
        assert len(reader.past()) == 1


def test_readers_cannot_write(night: Night) -> None:
    """A reader's connection refuses to change anything."""
    with night.reader() as reader, pytest.raises(sqlite3.OperationalError):
        reader._connection.execute("INSERT INTO events (kind, text, created) VALUES ('x', 'y', 'z')")


def test_a_closed_study_reads_without_leaving_files(night: Night, tmp_path: Path) -> None:
    """A copy of a cleanly closed ledger is one file, and can be read."""
    night.run(2.0)
    night.ledger.close()
    copy = tmp_path / "elsewhere" / "ledger.db"
    copy.parent.mkdir()
    shutil.copy(night.path, copy)
    with Reader(copy) as reader:
        assert len(reader.trials()) == 1
        assert reader.invariants() == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.process
def test_what_a_dead_driver_left_is_read_from_a_read_only_folder(night: Night, tmp_path: Path, read_only: Any) -> None:
    """The last changes of a driver that was killed are still in the write-ahead log; no reader may miss them."""
    dead = tmp_path / "dead"
    dead.mkdir()
    night.ledger.event("last", "the last thing that it wrote")
    for name in ("ledger.db", "ledger.db-wal"):
        shutil.copyfile(night.path.with_name(name), dead / name)
    program = (
        "import pathlib, sys\nfrom harness.queries import Reader\n"
        "with Reader(pathlib.Path(sys.argv[1])) as reader:\n    print(reader.events('last')[0].text)"
    )
    done = read_only(dead, sys.executable, "-c", program, str(dead / "ledger.db"))
    assert (done.stdout, done.stderr) == ("the last thing that it wrote\n", "")
    assert sorted(path.name for path in dead.iterdir()) == ["ledger.db", "ledger.db-wal"]


def test_a_read_only_folder_is_readable(night: Night) -> None:
    """A study on a read-only disk can be looked at."""
    night.ledger.close()
    night.path.parent.chmod(0o555)
    try:
        with night.reader() as reader:
            assert reader.trials() == ()
    finally:
        night.path.parent.chmod(0o755)


def test_views_read_well(night: Night) -> None:
    """The three views tell the story of a night in plain SQL."""
    night.baseline(2.0, 2.02)
    kept = night.screened(1.85)
    night.kept(kept, 1.9, 1.92)
    failed = night.ledger.queue(night.proposal(optim__beta1=0.5))
    night.ledger.start(failed, kept, night.apply({"optim.beta1": 0.5}))
    trial = night.begin(night.apply({"optim.beta1": 0.5}), proposal=failed, role=Role.SCREEN)
    night.ledger.close_trial(trial, night.failure())
    night.ledger.decide(failed, night.verdict(0, Decision.DISCARDED), None)
    connection = sqlite3.connect(night.path)
    connection.row_factory = sqlite3.Row
    rows = [dict(row) for row in connection.execute("SELECT * FROM ledger")]
    best = [dict(row) for row in connection.execute("SELECT * FROM leaderboard")]
    chain = [dict(row) for row in connection.execute("SELECT * FROM best_lineage")]
    connection.close()
    assert [(row["proposal"], row["outcome"], row["failures"]) for row in rows] == [
        (kept, "kept", None),
        (failed, "discarded", "diverged"),
    ]
    assert rows[0]["screening_score"] == pytest.approx(1.85)
    assert [(row["config"], row["basis"], row["replicates"]) for row in best] == [
        ("proposal 1", "mean of replicates", 2),
        ("baseline", "mean of replicates", 2),
    ]
    assert best[0]["score"] == pytest.approx(1.91)
    assert [(row["step"], row["config"], json.loads(row["diff"])) for row in chain] == [
        (0, "baseline", {}),
        (1, "proposal 1", {"optim.learning_rate": 1e-3}),
    ]


def test_readers_import_nothing_slow() -> None:
    """Looking at a study needs neither sqlite-utils, numpy, scipy nor torch."""
    code = "import sys, harness.queries; print(*{'sqlite_utils', 'numpy', 'scipy', 'torch'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
