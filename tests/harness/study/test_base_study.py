"""Searches of a base model over made-up jobs: the untouched base, the guard set, preferences."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.briefing import brief
from agent.space import searched, trials
from frozen.splits import EncodedSplit
from harness import coarse
from harness.audit import audit
from harness.cli import main
from harness.config import TrialConfig
from harness.errors import SealBroken
from harness.expectations import expectations
from harness.history import history_of
from harness.jobs.job import Job, ScoreJob, TrainJob
from harness.limits import Limits, expected_seconds
from harness.paths import GUARD
from harness.queries import Reader
from harness.records import (
    BREAKS_GUARD,
    UNTRAINED,
    Decision,
    Failed,
    ProposalState,
    Role,
    TrialState,
)
from harness.report.page import page
from harness.report.summary import gather, summarise, warnings
from harness.sizes import RowLengths, usual_positions
from harness.study import Study, load
from harness.studyfile import Agent
from harness.verify import verify
from harness.view import Silent
from tests.basestudy import MAX_REGRESSION
from tests.drive import Drive, Script, death_at, facts

BETTER = {"optim.learning_rate": 3e-3}
WORSE = {"optim.learning_rate": 1e-4}
FORGETFUL = {"optim.learning_rate": 9e-3}
CRASHED = Failed(state=TrialState.CRASHED, error_class="ValueError", error_text="no")


@pytest.fixture
def drive(base_study: Callable[..., Study], launcher: Any) -> Callable[..., Drive]:
    """Return a maker of drives over a new study of a base model."""

    def make(*diffs: dict[str, Any], **asked: Any) -> Drive:
        return Drive(base_study(**asked).paths, launcher, Script(*diffs))

    return make


def guard_jobs(night: Drive) -> list[ScoreJob]:
    return [job for job in night.launcher.orders if isinstance(job, ScoreJob) and job.guard is not None]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words]) == 0
    return " ".join(capsys.readouterr().out.split())


# --- the untouched base ---


def test_the_untouched_base_is_scored_before_anything_is_trained(drive: Callable[..., Drive]) -> None:
    """One trial without training, weights or budget; then the baseline stands on its own first run."""
    night = drive(BETTER, WORSE)
    assert night.run().exit_code == 0
    first, *rest = night.launcher.orders
    assert isinstance(first, ScoreJob)
    assert (first.weights, first.task) == (None, "sft")
    assert first.base == night.paths.base.resolve()
    assert all(job.base == first.base for job in rest)
    assert {job.task for job in rest if isinstance(job, TrainJob)} == {"sft"}
    with Reader(night.paths.ledger) as reader:
        reference, *others = reader.trials()
        assert (reference.role, reference.budget, reference.replicate) == (Role.REFERENCE, UNTRAINED, 0)
        assert (reference.score, reference.guard_score) == (pytest.approx(3.0), pytest.approx(4.0))
        assert (reference.checkpoint_digest, reference.steps, reference.curve) == (None, None, ())
        assert Role.REFERENCE not in {trial.role for trial in others}
        baseline = reader.baseline()
        assert baseline is not None
        assert baseline.trial == others[0].id
        assert reader.noise() is not None
        assert 3.0 not in baseline.scores.values()
        assert len(baseline.scores) >= 3
    assert not (night.paths.trial(reference.id).train).exists()
    assert json.loads(night.paths.trial(reference.id).config_json.read_text())["budget"] == UNTRAINED
    kept, worse = night.past()
    assert kept.verdict is not None
    assert kept.verdict.decision is Decision.KEPT
    assert worse.verdict is not None
    assert worse.verdict.decision is Decision.DISCARDED


def test_a_base_that_cannot_be_scored_stops_the_search(drive: Callable[..., Drive]) -> None:
    """Nothing is trained on a base that has no score; the next run tries again."""
    night = drive(BETTER)
    night.launcher.spoil = lambda job: CRASHED if isinstance(job, ScoreJob) and job.weights is None else None
    stopped = night.run()
    assert stopped.exit_code == 3
    assert "the reference failed" in stopped.reason
    assert night.trials() == [(Role.REFERENCE, TrialState.CRASHED, 0)]
    night.launcher.spoil = lambda job: None
    assert night.run().exit_code == 0
    assert [state for role, state, _ in night.trials() if role is Role.REFERENCE] == [
        TrialState.CRASHED,
        TrialState.SCORED,
    ]
    night.past()


def test_the_untouched_base_teaches_nobody_and_sets_no_deadline(drive: Callable[..., Drive]) -> None:
    """Proposers get it apart, failures in a row are counted over it, and its short time is nobody's usual one."""
    night = drive(BETTER)
    night.run(Limits(trials=1))
    with Reader(night.paths.ledger) as reader:
        (reference,) = reader.trials()
        assert expected_seconds(reader.trials()) is None
        assert reader.noise() is None
        assert reader.lineage() == ()
        assert [row["config"] for row in reader._rows("SELECT * FROM leaderboard")] == []
    night.run()
    study = load(night.paths.root)
    with Reader(night.paths.ledger) as reader:
        history = history_of(study, reader)
        assert history.reference == reference
        assert reference.id not in {trial.id for trial in trials(history)}
        assert list(searched([reference])) == []
        assert [row["config"] for row in reader._rows("SELECT * FROM leaderboard")] == ["proposal 1", "baseline"]


def test_a_new_epoch_scores_no_base_again(drive: Callable[..., Drive]) -> None:
    """What changed about the machine changes nothing about the base."""
    night = drive(WORSE)
    night.run()
    study = load(night.paths.root)
    from harness.ledger import Ledger

    with Ledger.open(night.paths.ledger) as ledger:
        number = ledger.begin(
            proposal=None,
            role=Role.BASELINE,
            config=study.baseline,
            seed=0,
            replicate=0,
            epoch=1,
            budget=str(study.budget),
            seal=study.seal.digest,
            device="cpu",
            sandbox="plain",
        )
    night.run()
    with Reader(night.paths.ledger) as reader:
        assert reader.trial(number).state is TrialState.LOST
        assert sum(trial.role is Role.REFERENCE for trial in reader.trials()) == 1
        again = [t.replicate for t in reader.trials() if t.epoch == 1 and t.score is not None]
    assert again == [0, 1, 2]


class Heard(Silent):
    """Remembers what was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        """Remember."""
        self.lines.append(text)


def test_training_that_harms_is_said_wherever_people_look(
    drive: Callable[..., Drive], capsys: pytest.CaptureFixture[str]
) -> None:
    """A baseline that is worse than the base it began with is the first thing to know."""
    night = drive()
    night.launcher.untouched = 2.5
    night.view = heard = Heard()
    night.run()
    place = str(night.paths.root)
    assert any("worse than the untouched base" in line for line in heard.lines)
    assert "WARNING: the trained baseline (2.9810 bits per byte of the answers) is worse than" in said(
        capsys, "status", place
    )
    document = json.loads(said(capsys, "status", place, "--json"))
    assert "learning rate is probably too high" in document["warnings"][0]
    with Reader(night.paths.ledger) as reader:
        assert "learning rate is probably too high" in page(gather(reader, driver_lives=False), night.paths)
        briefing = brief(history_of(load(night.paths.root), reader))
    assert "WARNING: the trained baseline is worse than the untouched base" in briefing
    night.launcher.untouched = 3.0


def test_base_baseline_and_best_stand_beside_each_other(
    drive: Callable[..., Drive], capsys: pytest.CaptureFixture[str]
) -> None:
    """Status, ledger, show, report and briefing name the untouched base, in the metric's own words."""
    night = drive(BETTER)
    night.run()
    place = str(night.paths.root)
    assert "untouched base 3.0000 bits_per_byte of the answers" in said(capsys, "status", place)
    assert "The untouched base scores 3.0000 bits_per_byte of the answers" in said(capsys, "ledger", place)
    shown = said(capsys, "show", place, "base")
    assert "1: the untouched base model outcome 3.0000 metric bits per byte of the answers" in shown
    assert "guard 4.0000 bits per byte" in shown
    for trained in ("Memory, estimated", "Config", "optim.learning_rate"):
        assert trained not in shown
    told = json.loads(said(capsys, "show", place, "1", "--json"))
    assert (told["guard_score"], told["memory"]) == (pytest.approx(4.0), None)
    with Reader(night.paths.ledger) as reader:
        found = gather(reader, driver_lives=False, curves=True)
        text = page(found, night.paths)
        briefing = brief(history_of(load(night.paths.root), reader))
    assert warnings(found) == []
    document = summarise(found)
    assert document["reference"]["score"] == pytest.approx(3.0)
    assert document["guard"] == {"max_regression": MAX_REGRESSION}
    assert "The untouched base: 3.0000" in text
    assert "the best: 2.7" in text
    assert "The untouched base model, before any training: 3.0" in briefing
    assert "bits_per_byte (the answers' total nats" in briefing
    compared = said(capsys, "compare", place, "base", "best")
    assert "guard, bits per byte" in compared
    assert "optim.learning_rate – " in compared


# --- the guard set ---


def test_what_forgets_too_much_is_not_kept_after_its_first_run(drive: Callable[..., Drive]) -> None:
    """Clearly beyond the limit: one run, and the verdict says by how much."""
    night = drive(FORGETFUL, BETTER)
    night.run()
    forgetful, better = night.past()
    assert forgetful.verdict is not None
    assert forgetful.verdict.decision is Decision.DISCARDED
    assert forgetful.verdict.reason == (
        "breaks the guard: 0.09 bits per byte worse than the untouched base on the guard set in its first run,"
        " 0.05 are allowed"
    )
    assert len(forgetful.trials) == 1
    assert better.verdict is not None
    assert better.verdict.decision is Decision.KEPT
    scored = [job for job in night.launcher.orders if isinstance(job, ScoreJob)]
    assert guard_jobs(night) == scored  # one child for both sets: it loads the base once
    assert {(job.split.name, job.guard and job.guard.name) for job in scored} == {("val", GUARD)}


def noisy(limit: float) -> Callable[[TrialConfig, int], float]:
    """Return scores on the guard set that lie around a limit for high learning rates, with a wide spread."""

    def guard_of(config: TrialConfig, seed: int) -> float:
        worse = limit if config.optim.learning_rate > 1e-3 else 0.0
        return 4.0 + worse + 0.03 * (seed % 3 - 1)

    return guard_of


@pytest.mark.parametrize(("worse", "decision"), [(0.06, Decision.DISCARDED), (0.03, Decision.KEPT)])
def test_the_limit_is_held_against_the_mean_over_fresh_seeds(
    drive: Callable[..., Drive], worse: float, decision: Decision
) -> None:
    """A first run within the noise of the limit is confirmed; before it is kept its mean must be within."""
    night = drive(BETTER)
    night.launcher.guard_of = noisy(worse)
    night.run()
    (past,) = night.past()
    assert past.verdict is not None
    assert past.verdict.decision is decision
    assert past.verdict.replicates >= 2
    assert past.verdict.reason.startswith(BREAKS_GUARD) == (decision is Decision.DISCARDED)
    if decision is Decision.DISCARDED:
        assert "fresh seeds, 0.05 are allowed; its score alone would be kept" in past.verdict.reason
        assert past.verdict.difference == pytest.approx(-0.28, abs=0.01)


def test_a_broken_guard_is_shown(drive: Callable[..., Drive], capsys: pytest.CaptureFixture[str]) -> None:
    """Ledger, show, report, briefing and the tools of a coding agent say so; the last two rounded."""
    night = drive(FORGETFUL, BETTER)
    night.run()
    place = str(night.paths.root)
    table = said(capsys, "ledger", place)
    assert "+0.0900, more than 0.05" in table
    assert "breaks the guard" in said(capsys, "show", place, "p1")
    assert json.loads(said(capsys, "show", place, "p1", "--json"))["breaks_guard"] is True
    with Reader(night.paths.ledger) as reader:
        text = page(gather(reader, driver_lives=False, curves=True), night.paths)
        briefing = brief(history_of(load(night.paths.root), reader))
        guard = reader.guard()
    assert "+0.0900, more than 0.05" in text
    assert guard is not None
    assert guard.noise is not None
    assert "Beyond the guard set's limit of 0.05, 1×" in briefing
    assert "p1 (optim.learning_rate 0.0002→0.009): +0.090" in briefing
    assert "What is more than 0.05 worse is not kept" in briefing


def test_a_coding_agent_is_told_the_same_and_nothing_finer_than_the_noise(drive: Callable[..., Drive]) -> None:
    """The base, the guard and the warnings, rounded."""
    night = drive(FORGETFUL, baseline={"optim.learning_rate": 8e-3})
    night.launcher.untouched = 2.1
    night.run()
    with Reader(night.paths.ledger) as reader:
        found = gather(reader, driver_lives=False)
        guard, noise = reader.guard(), reader.noise()
        assert guard is not None
        assert noise is not None
        told = coarse.status(found, waiting=0, mark=0)
        row = coarse.row(reader.proposal(1), noise)
        base = coarse.trial(reader.trial(1), noise, guard)
    assert told.reference == noise.rounded(2.1)
    assert told.max_guard_regression == MAX_REGRESSION
    assert told.baseline is not None
    assert told.baseline.guard_regression == pytest.approx(0.08, abs=0.001)
    assert len(told.warnings) == 2
    assert not any(character.isdigit() for line in told.warnings for character in line)
    assert row.reason == "breaks the guard: worse on the guard set than the study allows"
    assert (base.role, base.guard_regression, base.steps) == ("reference", 0.0, None)


def test_a_baseline_that_breaks_the_guard_is_said_at_the_start(drive: Callable[..., Drive]) -> None:
    """The owner hears it as soon as the baseline is known, and at the start of every later run."""
    night = drive(baseline={"optim.learning_rate": 8e-3})
    night.view = heard = Heard()
    night.run()
    assert any(line.startswith("WARNING: the baseline breaks the guard: 0.08") for line in heard.lines)
    from harness.studyfile import Agent

    with Reader(night.paths.ledger) as reader:
        lines = expectations(load(night.paths.root), reader, "plain", Limits(), Agent(), asked=None)
    assert any("WARNING: the baseline breaks the guard" in line for line in lines)
    assert any("nothing is kept that is more than 0.05 bits per byte worse" in line for line in lines)


def test_a_study_without_a_guard_set_scores_none(drive: Callable[..., Drive]) -> None:
    """No second set, no column."""
    night = drive(FORGETFUL, guard=False)
    night.run()
    assert guard_jobs(night) == []
    (past,) = night.past()
    assert past.verdict is not None
    assert past.verdict.decision is Decision.KEPT
    with Reader(night.paths.ledger) as reader:
        assert reader.guard() is None
        assert {trial.guard_score for trial in reader.trials()} == {None}


def test_a_guard_set_that_cannot_be_scored_fails_the_trial(drive: Callable[..., Drive]) -> None:
    """A config without its score on the guard set is no scored config."""
    night = drive(BETTER)

    def spoil(job: Job) -> Failed | None:
        is_guard = isinstance(job, ScoreJob) and job.guard is not None
        return CRASHED if is_guard and job.config.optim.learning_rate == 3e-3 else None

    night.launcher.spoil = spoil
    night.run()
    (past,) = night.past()
    assert [trial.state for trial in past.trials] == [TrialState.CRASHED]
    assert past.trials[0].steps is not None
    assert past.state is ProposalState.DECIDED


# --- preferences ---


def test_preferences_are_scored_in_bits_per_pair(
    drive: Callable[..., Drive], capsys: pytest.CaptureFixture[str]
) -> None:
    """Accuracy stands beside the score, a perplexity nowhere."""
    night = drive(BETTER, task="dpo")
    night.run()
    place = str(night.paths.root)
    assert {job.task for job in night.launcher.orders} == {"dpo"}
    with Reader(night.paths.ledger) as reader:
        reference = reader.reference()
        assert reference is not None
        assert (reference.score, reference.accuracy, reference.perplexity) == (pytest.approx(1.0), 0.5, None)
        found = gather(reader, driver_lives=False, curves=True)
        texts = [page(found, night.paths), brief(history_of(load(night.paths.root), reader))]
    texts += [said(capsys, *words) for words in (["status", place], ["show", place, "base"], ["show", place, "best"])]
    for text in texts:
        assert "perplexity" not in text
        assert "bits per byte of the answers" not in text
    assert "1.0000 bits_per_pair, 50.0% of the pairs right" in texts[2]
    assert "probe bits/pair" in texts[4]
    assert "bits_per_pair (-log2 of the probability" in texts[1]
    assert "Probe: bits per preference pair on a split" in texts[1]
    assert main(["compare", place, "base", "best"]) == 0
    compared = capsys.readouterr().out
    assert "of 10 val preference pairs better" in compared
    assert "accuracy" in compared


# --- lineage ---


def test_the_lineage_begins_with_the_untouched_base(
    drive: Callable[..., Drive], capsys: pytest.CaptureFixture[str]
) -> None:
    """One row above the baseline, and what each node is against it, for people and as JSON."""
    night = drive(BETTER)
    root = str(night.paths.root)
    night.run(Limits(trials=1))
    assert "no lineage. The untouched base scores 3.0000 bits" in said(capsys, "lineage", root)
    (only,) = json.loads(said(capsys, "lineage", root, "--json"))
    assert (only["role"], only["score"]) == ("reference", pytest.approx(3.0))
    night.run()
    base, baseline, kept = json.loads(said(capsys, "lineage", root, "--json"))
    assert base.keys() == baseline.keys() == kept.keys()
    assert [step["role"] for step in (base, baseline, kept)] == ["reference", "baseline", "kept"]
    assert [step["node"] for step in (base, baseline, kept)] == [None, 0, 1]
    assert (base["score"], base["trial"], base["difference_from_base"]) == (pytest.approx(3.0), 1, 0.0)
    for step in (baseline, kept):
        assert step["difference_from_base"] == pytest.approx(step["score"] - 3.0)
        assert step["difference_from_base"] < -0.01
    shown = said(capsys, "lineage", root)
    assert "untouched base nothing is trained – 3.0000 –" in shown
    for step in (baseline, kept):
        assert f" \N{MINUS SIGN}{-step['difference_from_base']:.4f} " in shown
    assert shown.index("untouched base") < shown.index("the owner's config") < shown.index("p1")


# --- verify ---


def test_verify_says_what_is_scored_and_what_is_not(drive: Callable[..., Drive], launcher: Any) -> None:
    """Before the baseline has a score, the untouched base is measured again, and that nothing else is, is said."""
    night = drive(BETTER)
    texts = [finding.text for finding in verify(load(night.paths.root), scorer=launcher) if finding.what == "score"]
    assert texts == ["nothing that was trained is scored yet"]
    night.run(Limits(trials=1))
    findings = verify(load(night.paths.root), scorer=launcher)
    assert all(finding.ok for finding in findings)
    on_val, on_guard, rest = (finding.text for finding in findings if finding.what == "score")
    assert on_val.startswith("the untouched base (trial 1) scores 3.00000000 again")
    assert "on the guard set" in on_guard
    assert rest == (
        "nothing that was trained is scored yet: the untouched base is all that has a score, and the baseline has none"
    )
    next(night.paths.split("val").iterdir()).unlink()
    texts = [finding.text for finding in verify(load(night.paths.root), scorer=launcher) if finding.what == "score"]
    assert texts == ["the untouched base is not scored again: with what is broken above, the number would mean nothing"]


@pytest.mark.parametrize("task", ["continue", "sft", "dpo"])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_verify_scores_best_and_base_again_on_both_sets(
    drive: Callable[..., Drive], launcher: Any, task: str, method: str
) -> None:
    """Adapter or full model, every task: four numbers are measured again, and one that does not come out is named."""
    night = drive(BETTER, task=task, method=method)
    night.run()
    study = load(night.paths.root)
    findings = verify(study, scorer=launcher)
    assert [finding.text for finding in findings if not finding.ok] == []
    texts = [finding.text for finding in findings if finding.what == "score"]
    assert [("guard set" in text, "untouched base" in text) for text in texts] == [
        (False, False),
        (True, False),
        (False, True),
        (True, True),
    ]
    assert not any("nothing" in text for text in texts)
    launcher.untouched += 1e-3
    wrong = [finding.text for finding in verify(study, scorer=launcher) if not finding.ok]
    assert len(wrong) == 1
    assert wrong[0].startswith("the untouched base (trial 1) scores")
    assert ("accuracy" in wrong[0]) == (task == "dpo")


EDITS = {
    "only the untouched base is untrained": "UPDATE trials SET role = 'baseline', replicate = 7, seed = 7 WHERE id = 1",
    "trial 1 has the role reference with the budget 1tok": "UPDATE trials SET budget = '1tok' WHERE id = 1",
    "trial 1 is the untouched base, but has steps": "UPDATE trials SET steps = 3 WHERE id = 1",
    "trial 2 was trained before the untouched base was scored": "UPDATE trials SET role = 'final',"
    " replicate = 1001, seed = 1001, budget = '1tok' WHERE id = 1",
    "trial 3 has no score on the guard set": "UPDATE trials SET guard_score = NULL WHERE id = 3",
    "proposal 1 was discarded, but by the rules and its trials it needs another run": "UPDATE trials"
    " SET guard_score = 4.0 WHERE proposal = 1",
    "proposal 2 was kept, but by the rules and its trials it is discarded": "UPDATE trials SET guard_score = 4.2"
    " WHERE proposal = 2",
    "proposal 1 was discarded, but by the rules and its trials it needs another": "UPDATE trials SET guard_score = 5"
    " WHERE role = 'reference'",
    "the guard set's max_regression is 0.5, but it is 0.05": "UPDATE events SET"
    " data = json_set(data, '$.max_regression', 0.5) WHERE kind = 'guard'",
    "the guard set's reference is 4.0, but it is 3.5": "UPDATE trials SET guard_score = 3.5 WHERE id = 1",
    "trial 1 ran config": "UPDATE trials SET (config, config_digest) = (SELECT config, config_digest FROM proposals"
    " WHERE number = 1) WHERE id = 1",
    "trial 1 is scored with the role reference, but has no folder": "",
    "but its nats and bytes give": "UPDATE trials SET score = 2.5 WHERE id = 1",
}


@pytest.mark.parametrize("sentence", EDITS)
def test_edited_rows_are_named(drive: Callable[..., Drive], sentence: str) -> None:
    """References and guard scores are held against rules, study.toml, folders and each other."""
    night = drive(FORGETFUL, BETTER)
    night.run()
    night.past()
    tamper(night.paths.ledger, EDITS[sentence])
    if not EDITS[sentence]:
        shutil.rmtree(night.paths.trial(1).root)
    with Reader(night.paths.ledger) as reader:
        found = audit(load(night.paths.root), reader)
    assert any(sentence in line for line in found), found


@pytest.mark.parametrize(
    ("sentence", "edit"),
    [
        ("which is no whole number of 10 pairs", "UPDATE trials SET accuracy = 0.55 WHERE id = 1"),
        ("but its nats and pairs give", "UPDATE trials SET score = 0.5 WHERE id = 2"),
        (
            "None pairs and the accuracy None, but the metric is",
            "UPDATE trials SET scored_pairs = NULL, accuracy = NULL",
        ),
        ("but its nats and tokens give None", "UPDATE trials SET perplexity = 2.0 WHERE id = 2"),
        ("was scored on 5 pairs, but the val split has 10", "UPDATE trials SET scored_pairs = 5 WHERE id = 1"),
    ],
)
def test_edited_scores_of_preferences_are_named(drive: Callable[..., Drive], sentence: str, edit: str) -> None:
    """Score, accuracy and pairs follow from each other and from val."""
    night = drive(task="dpo")
    night.run()
    night.past()
    tamper(night.paths.ledger, edit)
    with Reader(night.paths.ledger) as reader:
        found = audit(load(night.paths.root), reader)
    assert any(sentence in line for line in found), found


def tamper(path: Path, sql: str) -> None:
    """Change rows behind the schema's back, and leave the schema as it was."""
    with contextlib.closing(sqlite3.connect(path)) as other:
        triggers = other.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in triggers:
            other.execute(f"DROP TRIGGER {name}")
        other.execute("PRAGMA ignore_check_constraints = ON")
        other.executescript(sql)
        for _, trigger in triggers:
            other.execute(trigger)
        other.commit()


# --- dying anywhere ---

QUICK = [pytest.param(2, False)]
THOROUGH = [pytest.param(start, after, marks=pytest.mark.slow) for start in (1, 2, 3) for after in (False, True)]


@pytest.mark.parametrize(("start", "after"), QUICK + THOROUGH)
def test_dying_at_any_change_of_the_ledger_costs_nothing(
    drive: Callable[..., Drive], tmp_path: Path, start: int, after: bool
) -> None:
    """Whatever the line, the next driver scores the base at most once more and comes to the same verdicts."""
    night = drive(FORGETFUL, BETTER, WORSE)
    night.launcher.guard_of = mixed_guard
    pristine = tmp_path / "pristine"
    shutil.copytree(night.paths.root, pristine)
    night.run()
    expected = facts(night)
    countdown = start
    while death_at(night, pristine, countdown, after=after):
        assert facts(night) == expected, f"died at change {countdown}"
        with Reader(night.paths.ledger) as reader:
            assert len(reader.events("guard")) == 1
            assert sum(t.role is Role.REFERENCE and t.score is not None for t in reader.trials()) == 1
        countdown += 3
    assert countdown > 20


def mixed_guard(config: TrialConfig, seed: int) -> float:
    """Return scores of which some break the limit only after confirmation."""
    return noisy(0.06)(config, seed) if config.optim.learning_rate < 5e-3 else 4.5


# --- rows ---


@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_what_padded_rows_cost_is_known_to_all(base_study: Callable[..., Study], task: str) -> None:
    """The driver's gate, the memory's estimate, a proposer's history and the owner get one count of the documents."""
    study = base_study(task=task, packing=task == "dpo")
    split = EncodedSplit.load(study.paths.split("train"))
    assert study.lengths == RowLengths.of(split)
    with Reader(study.paths.ledger) as reader:
        history = history_of(study, reader)
        lines = expectations(study, reader, "plain", Limits(), Agent(), asked=None)
    assert history.lengths == study.lengths
    assert study.gauge(()).lengths == study.lengths
    (said,) = [line for line in lines if line.startswith("Rows: ")]
    positions = usual_positions(study.baseline, study.lengths)
    assert positions is not None
    assert f"about {study.budget.amount / positions:,.0f} steps within {study.budget}" in said
    assert not any(line.startswith("WARNING: the policy asks") for line in lines)


def test_a_baseline_of_usually_too_few_steps_is_said(base_study: Callable[..., Study]) -> None:
    """It may be enough, so it is not refused; the owner decides before the night."""
    study = base_study(packing=False, budget="2200tok")
    with Reader(study.paths.ledger) as reader:
        lines = expectations(study, reader, "plain", Limits(), Agent(), asked=None)
    assert any(line.startswith("WARNING: the policy asks for 5 steps, and the baseline usually gets") for line in lines)


def test_damaged_documents_are_left_to_the_seal(base_study: Callable[..., Study]) -> None:
    """A study whose train split is cut off can still be read and verified: the seal names the file."""
    study = base_study()
    offsets = study.paths.split("train") / "offsets.npy"
    offsets.write_bytes(offsets.read_bytes()[:-8])
    damaged = load(study.paths.root)
    assert damaged.lengths is None
    with pytest.raises(SealBroken, match=r"train/offsets\.npy"):
        damaged.seal.verify(thorough=True)
