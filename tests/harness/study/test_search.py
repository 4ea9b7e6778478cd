"""The loop over made-up jobs: what it decides, how it ends, and that dying anywhere costs nothing."""

from __future__ import annotations

import contextlib
import shutil
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import inbox
from harness.config import TrialConfig
from harness.jobs.job import ScoreJob, TrainJob
from harness.limits import Limits
from harness.owner import Ended, Stopped
from harness.policy import Policy
from harness.proposers import load_proposer
from harness.queries import Reader
from harness.records import AbortIf, Decision, Failed, History, Proposal, ProposalState, Role, TrialState
from harness.rows import Sensed
from harness.sensors import NOTHING, Sensors
from tests.drive import Drive, Script, death_at, facts, fails

BETTER = {"optim.learning_rate": 3e-3}
WORSE = {"optim.learning_rate": 2e-4}
OUT_OF_MEMORY = Failed(state=TrialState.OUT_OF_MEMORY, error_class="OutOfMemoryError", error_text="too big")
CRASHED = Failed(state=TrialState.CRASHED, error_class="ValueError", error_text="no")


@pytest.fixture
def drive(night: Any) -> Callable[..., Drive]:
    """Return a maker of drives over an empty study."""
    night.ledger.close()
    return lambda *diffs: Drive(night.study.paths, night.launcher, Script(*diffs))


def test_a_night_from_baseline_to_verdicts(drive: Callable[..., Drive]) -> None:
    """Three baseline seeds, then each proposal once; what is better is kept, the rest is a row with its reason."""
    night = drive(BETTER, WORSE, BETTER, {"optim.learning_rate": 9.0}, {"optim.learning_rate": 3e-3, "model.depth": 3})
    stopped = night.run()
    assert stopped.exit_code == 0
    assert "nothing new to propose" in stopped.reason
    assert night.trials()[:4] == [(Role.BASELINE, TrialState.SCORED, r) for r in range(3)] + [
        (Role.SCREEN, TrialState.SCORED, 0)
    ]
    kept, worse, again, outside, same_score = night.past()
    assert kept.verdict is not None
    assert kept.verdict.decision is Decision.KEPT
    assert kept.verdict.difference == pytest.approx(-0.27, abs=0.01)
    assert worse.verdict is not None
    assert (worse.verdict.decision, len(worse.trials)) == (Decision.DISCARDED, 1)
    assert (again.state, outside.state) == (ProposalState.STALE, ProposalState.REFUSED)
    assert "outside" in str(outside.reason)
    assert same_score.verdict is not None
    assert same_score.verdict.decision is not Decision.KEPT


def test_sensors_are_booked_where_there_are_any(drive: Callable[..., Drive], monkeypatch: pytest.MonkeyPatch) -> None:
    """A row says how hot the device was, or None where nobody knows."""
    said = iter([Sensed(celsius=61.0, watts=250.0), NOTHING, Sensed(celsius=70.0, watts=None)])
    monkeypatch.setattr(Sensors, "read", lambda self: next(said))
    night = drive()
    night.run()
    with Reader(night.paths.ledger) as reader:
        found = [reader.sensors(trial.id) for trial in reader.trials()]
        assert [(sensed.celsius, sensed.watts) for sensed in found] == [(61.0, 250.0), (None, None), (70.0, None)]


def test_a_config_that_was_tried_is_a_duplicate(drive: Callable[..., Drive]) -> None:
    """A discarded config proposed again costs nothing."""
    night = drive(WORSE, WORSE)
    night.run()
    assert night.past()[1].state is ProposalState.DUPLICATE
    assert "proposal 1" in str(night.past()[1].reason)


def test_running_out_of_memory_is_repaired_and_part_of_what_is_kept(drive: Callable[..., Drive]) -> None:
    """The repaired config has a trial row of its own and stands in the lineage."""
    night = drive(BETTER)
    night.launcher.spoil = fails(
        lambda job: job.config.optim.learning_rate == 3e-3 and job.config.batch.per_device == 16, OUT_OF_MEMORY
    )
    night.run()
    roles = [role for role, _, _ in night.trials()]
    assert roles.count(Role.REPAIR) == 1
    with Reader(night.paths.ledger) as reader:
        best = reader.incumbent()
    assert best is not None
    assert dict(best.diff) == BETTER | {"batch.per_device": 8, "batch.accumulation": 2}


def test_failures_in_a_row_bring_the_canary_and_a_good_one_goes_on(drive: Callable[..., Drive]) -> None:
    """Three failed proposals in a row: the baseline runs again; it works, so the search goes on."""
    rates = [{"optim.learning_rate": rate} for rate in (5e-3, 6e-3, 7e-3, 4e-4)]
    night = drive(*rates)
    night.launcher.spoil = fails(lambda job: job.config.optim.learning_rate >= 5e-3, CRASHED)
    assert night.run().exit_code == 0
    assert (Role.CANARY, TrialState.SCORED, 3) in night.trials()
    assert [past.state for past in night.past()] == [ProposalState.DECIDED] * 4


def test_a_dead_canary_pauses_the_search_with_the_reason(drive: Callable[..., Drive]) -> None:
    """If the baseline fails as well, the machine is at fault: exit 3, and the next run starts with the canary."""
    night = drive(*[{"optim.learning_rate": rate} for rate in (5e-3, 6e-3, 7e-3, 4e-4)])
    broken = [True]
    seen = []

    def spoil(job: TrainJob | ScoreJob) -> Failed | None:
        seen.append(job)
        return CRASHED if broken[0] and len(seen) > 6 and isinstance(job, TrainJob) else None

    night.launcher.spoil = spoil
    stopped = night.run()
    assert stopped.exit_code == 3
    assert "canary failed" in stopped.reason
    broken[0] = False
    assert night.run().exit_code == 0
    assert (Role.CANARY, TrialState.SCORED, 3) in night.trials()


def test_the_incumbent_runs_again_as_a_control(drive: Callable[..., Drive]) -> None:
    """After every second decided proposal the incumbent runs with a seed of its own, also after a restart."""
    night = drive(*[{"optim.learning_rate": rate} for rate in (2e-4, 2.5e-4, 1.5e-4, 1.2e-4)], BETTER)
    text = night.paths.policy_toml.read_text().replace("control_every = 0", "control_every = 2")
    with_controls = Policy.parse(tomllib.loads(text), ["text"])
    night.policy = with_controls
    night.run(Limits(trials=6))
    night.run()
    with Reader(night.paths.ledger) as reader:
        assert reader.invariants() == []
        controls = [(t.replicate, t.proposal) for t in reader.trials() if t.role is Role.CONTROL]
    assert controls == [(3, None), (4, None)]


def test_limits_are_totals_over_restarts(drive: Callable[..., Drive]) -> None:
    """`--trials 4` twice is four trials; the proposal that was running goes on with the next allowance."""
    night = drive(BETTER)
    assert "4 of 4" in night.run(Limits(trials=4)).reason
    assert len(night.trials()) == 4
    night.run(Limits(trials=4))
    assert len(night.trials()) == 4
    assert night.past()[0].state is ProposalState.RUNNING
    night.run()
    assert night.past()[0].state is ProposalState.DECIDED


def test_the_owner_stops_queues_and_goes_on(drive: Callable[..., Drive]) -> None:
    """A stop from outside ends the run with exit 0, a hand proposal goes before what the proposer says."""
    night = drive(WORSE)
    inbox.post(night.paths, inbox.Stop())
    assert night.run() == Stopped(reason="the owner asked to stop", exit_code=0)
    inbox.post(
        night.paths, inbox.Propose(proposal=Proposal(diff=BETTER, source="human", rationale="mine", watch="loss"))
    )
    night.run()
    assert [past.proposal.source for past in night.past()] == ["human"]
    assert not list(night.paths.inbox.glob("*.json"))


class Slow(Script):
    """Does not answer before a trial of the proposal before has begun, and notes what it was shown."""

    def __init__(self, *diffs: dict[str, Any]) -> None:
        super().__init__(*diffs)
        self.trial_began = threading.Event()
        self.shown: list[History] = []

    def propose(self, history: History, count: int) -> list[Proposal]:
        """Wait for the trial, where there is one to wait for."""
        self.shown.append(history)
        if any(past.state is ProposalState.RUNNING for past in history.past):
            assert self.trial_began.wait(60)
        return super().propose(history, count)


def test_the_next_proposal_is_asked_for_while_trials_run(drive: Callable[..., Drive]) -> None:
    """A proposer that answers only while a trial runs does not hang the search: it is asked ahead, as of the start."""
    night = drive()
    slow = Slow(WORSE, BETTER)
    night.script = slow

    def on_job(job: TrainJob | ScoreJob) -> None:
        if isinstance(job, TrainJob) and len(slow.shown) > 1:
            slow.trial_began.set()

    night.launcher.spoil = on_job
    night.run(Limits(proposals=2))
    assert [past.state for past in night.past()] == [ProposalState.DECIDED] * 2
    first, second, _ = slow.shown
    assert (first.next_number, first.past) == (1, ())
    assert second.next_number == 2
    assert [(past.state, past.trials) for past in second.past] == [(ProposalState.RUNNING, ())]


def test_what_may_not_run_is_turned_away_while_the_trial_still_runs(drive: Callable[..., Drive]) -> None:
    """So that another one waits when it ends: the proposer is asked again at once, and not after the trial."""
    night = drive()
    night.script = slow = Slow(WORSE, {"optim.learning_rate": 9.0}, BETTER)
    slow.trial_began.set()
    states: list[list[ProposalState]] = []

    def on_job(job: TrainJob | ScoreJob) -> None:
        if isinstance(job, ScoreJob) and job.config.optim.learning_rate == WORSE["optim.learning_rate"]:
            with Reader(night.paths.ledger) as reader:
                states.append([past.state for past in reader.past()])

    night.launcher.spoil = on_job
    night.launcher.polls_until = lambda: not slow.shown or len(slow.shown) >= 3
    night.run(Limits(proposals=2))
    assert states[0][:2] == [ProposalState.RUNNING, ProposalState.REFUSED]
    decided, refused = ProposalState.DECIDED, ProposalState.REFUSED
    assert [past.state for past in night.past()][:3] == [decided, refused, decided]


def test_what_cannot_fit_is_refused_without_a_trial(
    drive: Callable[..., Drive], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config far beyond the device's memory costs a row and no run."""
    night = drive(BETTER)
    night.run(Limits(trials=3))
    monkeypatch.setattr("harness.origin.device_memory_bytes", lambda device: 1_000_000)
    night.run(Limits(proposals=1))
    (past,) = night.past()
    assert past.state is ProposalState.REFUSED
    assert past.reason is not None
    assert past.reason.startswith("it needs about")
    assert past.trials == ()


def test_a_search_in_pieces_proposes_what_one_in_one_piece_would(drive: Callable[..., Drive], tmp_path: Path) -> None:
    """The last proposal of a run has its successor asked for as of the same moment as if the run had gone on."""
    night = drive()
    night.script = load_proposer("rules")
    pristine = tmp_path / "pristine"
    shutil.copytree(night.paths.root, pristine)
    night.run(Limits(proposals=4))
    whole = [past.proposal.diff for past in night.past()]
    shutil.rmtree(night.paths.root)
    shutil.copytree(pristine, night.paths.root)
    for _ in range(4):
        night.run(Limits(proposals=1))
    assert [past.proposal.diff for past in night.past()] == whole
    assert len(whole) == 5  # the one that was asked for ahead waits for the next run


def test_a_hand_proposal_goes_before_one_that_was_made_ahead(drive: Callable[..., Drive]) -> None:
    """The proposer's next one waits already when the owner's comes; it is taken second, and nothing is lost."""
    night = drive(WORSE, {"optim.beta1": 0.8})
    mine = Proposal(diff=BETTER, source="human", rationale="mine", watch="loss")

    def on_job(job: TrainJob | ScoreJob) -> None:
        if job.config.optim.learning_rate == WORSE["optim.learning_rate"] and isinstance(job, ScoreJob):
            inbox.post(night.paths, inbox.Propose(proposal=mine))

    night.launcher.spoil = on_job
    night.run()
    order = sorted(night.past(), key=lambda past: min(trial.id for trial in past.trials))
    assert [past.proposal.diff for past in order] == [WORSE, BETTER, {"optim.beta1": 0.8}]


@pytest.mark.parametrize("kind", ["night", "continued_night"])
def test_a_verdict_is_held_against_the_incumbent_of_its_turn(kind: str, request: pytest.FixtureRequest) -> None:
    """An outside proposal that overtook a waiting one and was kept is what the latter is judged against."""
    made = request.getfixturevalue(kind)
    for diff, outside in ((WORSE | {"batch.per_device": 8}, False), (BETTER, True)):
        made.ledger.queue(Proposal(diff=diff, source="script", rationale="why", watch="what"), outside=outside)
    made.ledger.close()
    night = Drive(made.study.paths, made.launcher, Script({}, {}))
    night.run()
    first, second = night.past()
    assert second.verdict is not None
    assert second.verdict.decision is Decision.KEPT
    assert first.trials[0].id > second.trials[-1].id
    assert first.parent == second.number


def test_a_condition_to_give_up_reaches_the_screening_run_only(drive: Callable[..., Drive]) -> None:
    """The order of the first trial carries it, those of the replicates do not; what it ends is a row with a reason."""
    night = drive()
    wanted = AbortIf(probe_above=2.9, after=0.5)
    given_up = Failed(state=TrialState.STOPPED, error_class="Aborted", error_text="the probe is at 3.0")
    for diff in (BETTER, WORSE):
        proposal = Proposal(diff=diff, source="human", rationale="mine", watch="loss", abort_if=wanted)
        inbox.post(night.paths, inbox.Propose(proposal=proposal))
    night.launcher.spoil = fails(lambda job: job.config.optim.learning_rate == WORSE["optim.learning_rate"], given_up)
    night.run()
    better, worse = night.past()
    assert better.verdict is not None
    assert better.verdict.decision is Decision.KEPT
    conditions = [
        job.abort_if
        for job in night.launcher.orders
        if isinstance(job, TrainJob) and job.config.optim.learning_rate == BETTER["optim.learning_rate"]
    ]
    assert conditions[0] == wanted
    assert set(conditions[1:]) == {None}
    assert [trial.state for trial in worse.trials] == [TrialState.STOPPED]
    assert worse.verdict is not None
    assert worse.verdict.decision is Decision.DISCARDED
    assert "the probe is at 3.0" in worse.verdict.reason


def test_an_interrupted_trial_runs_again(drive: Callable[..., Drive]) -> None:
    """The same config and seed, once more, and the interrupted row stays."""
    night = drive()
    stop = Failed(state=TrialState.INTERRUPTED, error_class="Stopped", error_text="by its driver")
    seen = []

    def spoil(job: TrainJob | ScoreJob) -> Failed | None:
        seen.append(job)
        if len(seen) == 3:
            inbox.post(night.paths, inbox.Stop())
            return stop
        return None

    night.launcher.spoil = spoil
    with contextlib.suppress(Ended):
        night.run()
    night.run()
    assert night.trials() == [
        (Role.BASELINE, TrialState.SCORED, 0),
        (Role.BASELINE, TrialState.INTERRUPTED, 1),
        (Role.BASELINE, TrialState.SCORED, 1),
        (Role.BASELINE, TrialState.SCORED, 2),
    ]


def test_a_changed_policy_stops_the_search_and_is_named(drive: Callable[..., Drive]) -> None:
    """The seal is looked at before each trial, not only at the start."""
    night = drive(BETTER)

    def tamper(job: TrainJob | ScoreJob) -> None:
        if isinstance(job, ScoreJob):
            night.paths.policy_toml.write_text(night.paths.policy_toml.read_text() + "# more\n")

    night.launcher.spoil = tamper
    stopped = night.run()
    assert stopped.exit_code == 1
    assert "policy.toml" in stopped.reason


# --- dying anywhere ----------------------------------------------------------------------------------------------


def spoiled(config: TrialConfig) -> bool:
    return config.optim.learning_rate == 3e-3 and config.batch.per_device == 16


QUICK = [pytest.param(3, False)]
THOROUGH = [pytest.param(start, after, marks=pytest.mark.slow) for start in (1, 2, 3) for after in (False, True)]


@pytest.mark.parametrize(("start", "after"), QUICK + THOROUGH)
def test_dying_at_any_change_of_the_ledger_costs_nothing(
    drive: Callable[..., Drive], tmp_path: Path, start: int, after: bool
) -> None:
    """Whatever the line, the next driver comes to the same trials, verdicts and lineage as one that lived."""
    night = drive(WORSE, BETTER, BETTER)
    night.launcher.spoil = fails(lambda job: spoiled(job.config), OUT_OF_MEMORY)
    pristine = tmp_path / "pristine"
    shutil.copytree(night.paths.root, pristine)
    night.run()
    expected = facts(night)
    countdown = start
    while death_at(night, pristine, countdown, after=after):
        assert facts(night) == expected, f"died at change {countdown}"
        countdown += 3
    assert countdown > 20
