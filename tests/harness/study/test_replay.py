from typing import Any

import pytest

from frozen.timer import Budget
from harness.audit import audit
from harness.errors import CheckFailed, WrongUse
from harness.jobs.job import ScoreJob, TrainJob
from harness.records import Failed, Role, TrialState
from harness.recovery import DRIVER_DIED
from harness.replay import FULL_RUN_REPLICATE, Replay
from harness.rows import Ending
from harness.view import Silent

Night = Any  # the fixture's class lives in conftest.py
LONG = Budget.parse("2Mtok")


@pytest.fixture
def won(night: Night) -> Night:
    """Return a study with a winner."""
    night.seat_baseline()
    night.keep(1e-3)
    return night


def replay_of(night: Night) -> Replay:
    return Replay(night.study, night.ledger, night.reader, night.launcher, Silent())


def trained(night: Night) -> list[TrainJob]:
    return [order for order in night.launcher.orders if isinstance(order, TrainJob)]


def looks(night: Night) -> list[ScoreJob]:
    holdout = night.study.paths.split("holdout").resolve()
    return [order for order in night.launcher.orders if isinstance(order, ScoreJob) and order.split == holdout]


def test_reproduction_is_a_fresh_seed_within_the_noise(won: Night) -> None:
    """The winner runs once more with a seed that nobody used, and does not move what it is checked against."""
    before = won.reader.incumbent().scores
    found = replay_of(won).reproduce()
    assert found.agrees
    assert found.expected == pytest.approx(sum(before.values()) / len(before))
    assert won.reader.incumbent().scores == before
    assert replay_of(won).reproduce().trial != found.trial
    assert len({order.seed for order in trained(won)} | set(before)) == 2 + len(before)
    assert trained(won)[0].budget == "200000tok"
    assert won.reader.trial(found.trial).curve
    assert looks(won) == []


def test_a_winner_that_does_not_reproduce_is_not_trained_further(won: Night) -> None:
    """Hours of training are not spent on a result that one fresh seed refutes."""
    won.launcher.shift = 0.5
    replay = replay_of(won)
    assert not replay.reproduce().agrees
    with pytest.raises(CheckFailed, match="does not reproduce"):
        replay.reproduced()
    assert len(trained(won)) == 2


def test_an_agreeing_reproduction_is_not_repeated(won: Night) -> None:
    """A resumed full run does not start with another reproduction."""
    replay = replay_of(won)
    found = replay.reproduce()
    assert replay_of(won).reproduced() == found
    assert len(trained(won)) == 1


def test_full_run_stands_beside_the_baseline(won: Night) -> None:
    """Both run under the same budget and seed, are scored on val, and look at the holdout once each."""
    replay_of(won).reproduce()
    won.launcher.orders.clear()
    run = replay_of(won).full_run(LONG)
    assert run.node == 1
    assert run.best.val < run.baseline.val
    orders = trained(won)
    assert {order.budget for order in orders} == {"2000000tok"}
    assert {order.seed for order in orders} == {FULL_RUN_REPLICATE}
    assert all(order.resumable for order in orders)
    assert len(looks(won)) == len(won.reader.events("holdout_look")) == 2
    assert sorted(path.name for path in run.model.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    card = (run.model / "README.md").read_text()
    for text in (f"{run.best.holdout:.4f}", won.study.seal.digest, "optim.learning_rate", "node 1 reproduces"):
        assert text in card
    finals = [trial for trial in won.reader.trials() if trial.role is Role.FINAL]
    assert [trial.proposal for trial in finals] == [1, 1, None]
    assert audit(won.study, won.reader) == []
    assert not list(won.study.paths.replay.glob("*/train"))


def test_a_second_call_looks_at_nothing_again(won: Night) -> None:
    """The same full run again gives the same numbers without training, scoring or a look at the holdout."""
    first = replay_of(won).full_run(LONG)
    won.launcher.orders.clear()
    assert replay_of(won).full_run(LONG) == first
    assert won.launcher.orders == []


def test_a_baseline_that_won_runs_once(night: Night) -> None:
    """Where nothing was kept there is one full run, and it is said to be the baseline."""
    night.seat_baseline()
    run = replay_of(night).full_run(LONG)
    assert run.best == run.baseline
    assert run.node == 0
    assert len(trained(night)) == 1


class Killed(BaseException):
    """The driver dies here."""


@pytest.mark.parametrize("turn", range(6))
def test_a_full_run_goes_on_after_a_death(won: Night, turn: int) -> None:
    """Dying before any job leaves checkpoints in place, repeats no finished part, and counts every look."""
    replay_of(won).reproduce()
    done = [0]

    def die(job: TrainJob | ScoreJob) -> Failed | None:
        done[0] += 1
        if done[0] == turn + 1:
            raise Killed
        return None

    won.launcher.spoil = die
    with pytest.raises(Killed):
        replay_of(won).full_run(LONG)
    for trial in won.reader.open_trials():
        assert next(won.study.paths.replay.glob("*/train")).exists()
        lost = Failed(state=TrialState.LOST, error_class=DRIVER_DIED, error_text="gone")
        won.ledger.close_trial(trial.id, Ending.of_failed(lost))
    run = replay_of(won).full_run(LONG)
    assert run.best.val < run.baseline.val
    finals = [trial for trial in won.reader.trials() if trial.role is Role.FINAL and trial.score is not None]
    assert len(finals) == 3
    assert len(won.reader.events("holdout_score")) == 2
    assert len(won.reader.events("holdout_look")) == 2 + (turn in (2, 5))
    assert audit(won.study, won.reader) == []


def test_an_interrupted_run_is_closed(won: Night) -> None:
    """Ctrl-C closes the row as interrupted and keeps what is needed to go on."""

    def interrupt(job: TrainJob | ScoreJob) -> Failed | None:
        raise KeyboardInterrupt

    won.launcher.spoil = interrupt
    with pytest.raises(KeyboardInterrupt):
        replay_of(won).full_run(LONG)
    assert won.reader.trials()[-1].state is TrialState.INTERRUPTED


def test_a_failed_run_says_why(won: Night) -> None:
    """A full run that diverges is an error with the trial and its log."""
    won.launcher.spoil = lambda job: Failed(state=TrialState.DIVERGED, error_class="Diverged", error_text="loss is NaN")
    with pytest.raises(CheckFailed, match=r"ended diverged: loss is NaN; see .*log\.txt"):
        replay_of(won).full_run(LONG)


def test_a_study_without_a_baseline_cannot_be_replayed(night: Night) -> None:
    """There is nothing to replay before the first trial."""
    with pytest.raises(WrongUse, match="no baseline yet"):
        replay_of(night).reproduce()


def test_a_model_that_was_swapped_does_not_look_at_the_holdout(won: Night) -> None:
    """The score of a row belongs to the files that were scored: other files are refused before the holdout is read."""
    run = replay_of(won).full_run(LONG)
    looks_before = len(looks(won))
    assert replay_of(won).full_run(LONG) == run
    (run.model / "model.safetensors").write_text("1.0")
    with pytest.raises(CheckFailed, match="is not the one that trial"):
        replay_of(won).full_run(LONG)
    assert len(looks(won)) == looks_before
