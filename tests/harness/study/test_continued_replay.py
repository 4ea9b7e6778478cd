"""Replays of studies whose trials go on from their parent's checkpoint: the lineage is a schedule."""

from __future__ import annotations

import contextlib
import html
from collections.abc import Iterator
from typing import Any

import pytest

from frozen.timer import Budget
from harness import acting, cli, finals
from harness.audit import audit
from harness.errors import WrongUse
from harness.fullrun import FULL_RUN_REPLICATE
from harness.jobs.job import TrainJob
from harness.ledger import Ledger
from harness.queries import Reader
from harness.records import Failed, Role, Trial, TrialState
from harness.recovery import recover
from harness.replay import Replay, replay
from harness.report.page import page
from harness.report.summary import gather, summarise
from harness.report.unproven import unproven
from harness.segments import shares
from harness.study import load
from harness.upgrade import tool_of
from harness.verify import verify
from harness.view import Silent
from tests.drive import Drive, Script

LONG = Budget.parse("2Mtok")
BETTER = {"optim.learning_rate": 3e-3}
BEST = {"optim.learning_rate": 6e-3}


@pytest.fixture
def climbed(continued_night: Any) -> Drive:
    """Return a study with two kept steps: rates of 2e-4, 3e-3 and 6e-3, one after the other."""
    continued_night.ledger.close()
    night = Drive(continued_night.study.paths, continued_night.launcher, Script(BETTER, BEST))
    night.run()
    night.launcher.orders.clear()
    return night


@contextlib.contextmanager
def replay_of(night: Drive) -> Iterator[Replay]:
    study = load(night.paths.root)
    with Ledger.open(night.paths.ledger) as ledger, Reader(night.paths.ledger) as reader:
        recover(study.mark, ledger, reader)
        yield Replay(study, tool_of(study.seal, thorough=True), ledger, reader, night.launcher, Silent())


def trained(night: Drive) -> list[TrainJob]:
    return [order for order in night.launcher.orders if isinstance(order, TrainJob)]


def finals_of(night: Drive) -> list[Trial]:
    with Reader(night.paths.ledger) as reader:
        assert audit(load(night.paths.root), reader) == []
        return [trial for trial in reader.trials(curves=True) if trial.role is Role.FINAL and trial.score is not None]


def test_a_reproduction_goes_on_from_the_parents_checkpoint(climbed: Drive) -> None:
    """A fresh seed from where the incumbent's own trials began, within what they came to."""
    with replay_of(climbed) as runner:
        found = runner.reproduce()
    assert found.agrees
    (order,) = trained(climbed)
    assert order.start is not None
    assert order.start.name.startswith("00001-")
    (trial,) = finals_of(climbed)
    assert (trial.start, trial.proposal) == (1, 2)
    assert order.seed == load(climbed.paths.root).seed_of(trial.replicate, 1)


def test_a_full_run_is_the_schedule_beside_the_baseline_in_one_piece(climbed: Drive) -> None:
    """Every config of the lineage in turn, with an equal share, from the weights before it; both get the same."""
    with replay_of(climbed) as runner:
        runner.reproduce()
        climbed.launcher.orders.clear()
        run = runner.full_run(LONG)
        card = (run.model / "README.md").read_text()
    *segments, baseline = trained(climbed)
    assert [job.config.optim.learning_rate for job in segments] == [2e-4, 3e-3, 6e-3]
    assert [job.budget for job in segments] == ["666666tok", "666666tok", "666668tok"]
    assert segments[0].start is None
    assert [job.start for job in segments[1:]] == [job.folder / "model" for job in segments[:-1]]
    assert len({job.seed for job in segments}) == 3
    assert all(job.resumable for job in segments)
    assert (baseline.budget, baseline.start, baseline.seed) == ("2000000tok", None, FULL_RUN_REPLICATE)
    assert run.segments == 3
    assert run.best.val == pytest.approx(3 - 0.02 - 0.3 - 0.6, abs=0.01)
    assert "3 segments" in card
    assert "in one piece" in card
    assert any("in one\n  piece" in line or "one piece" in line for line in acting._full(run, "bits", None))
    with Reader(climbed.paths.ledger) as reader:
        best = reader.trial(run.best.trial)
    assert (best.steps, best.tokens, best.start) == (30, 6000, 1)
    assert [round(point.progress, 3) for point in best.curve] == [0.333, 0.667, 1.0]
    assert [point.step for point in best.curve] == [10, 20, 30]
    finals_of(climbed)
    assert [found.text for found in verify(load(climbed.paths.root), scorer=climbed.launcher) if not found.ok] == []


def test_a_second_call_runs_nothing(climbed: Drive) -> None:
    """What is scored stays scored."""
    with replay_of(climbed) as runner:
        runner.reproduce()
        first = runner.full_run(LONG)
        climbed.launcher.orders.clear()
        assert runner.full_run(LONG) == first
    assert climbed.launcher.orders == []


@pytest.mark.parametrize("turn", range(1, 9))
def test_a_schedule_goes_on_after_a_death_before_any_job(climbed: Drive, turn: int) -> None:
    """Whatever job the driver dies before, the next call trains only what is not done and comes to the same."""
    left = [turn]

    def die(job: Any) -> Failed | None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return None

    with replay_of(climbed) as runner:
        runner.reproduce()
    climbed.launcher.orders.clear()
    climbed.launcher.spoil = die
    with replay_of(climbed) as runner, contextlib.suppress(KeyboardInterrupt):
        runner.full_run(LONG)
    climbed.launcher.spoil = lambda job: None
    with replay_of(climbed) as runner:
        run = runner.full_run(LONG)
    assert run.best.val == pytest.approx(2.08, abs=0.01)
    rates = [(job.config.optim.learning_rate, job.budget) for job in trained(climbed)]
    assert len(rates) == 4 + (turn in (1, 2, 3, 6)), "what died while it was scored is not trained again"
    assert len(finals_of(climbed)) == 3


class Died(BaseException):
    """The driver dies here, without a word."""


@pytest.mark.parametrize("at", range(1, 4))
@pytest.mark.parametrize("after", [False, True])
def test_a_schedule_goes_on_after_a_death_around_a_record(
    climbed: Drive, monkeypatch: pytest.MonkeyPatch, at: int, after: bool
) -> None:
    """Between a segment's weights and its record it runs again; after the record it does not."""
    with replay_of(climbed) as runner:
        runner.reproduce()
    climbed.launcher.orders.clear()
    finish, calls = finals.finish, []

    def dying(*args: Any) -> Any:
        calls.append(args)
        done = finish(*args) if len(calls) != at or after else None
        if len(calls) == at:
            raise Died
        return done

    monkeypatch.setattr(finals, "finish", dying)
    with replay_of(climbed) as runner, contextlib.suppress(Died):
        runner.full_run(LONG)
    monkeypatch.setattr(finals, "finish", finish)
    with replay_of(climbed) as runner:
        run = runner.full_run(LONG)
    assert run.best.val == pytest.approx(2.08, abs=0.01)
    assert len(trained(climbed)) == 4 + (not after)
    best = next(trial for trial in finals_of(climbed) if trial.id == run.best.trial)
    assert [point.step for point in best.curve] == [10, 20, 30]
    assert best.steps == 30


def test_weights_that_are_not_what_a_segment_left_are_not_gone_on_from(climbed: Drive) -> None:
    """Their segment, and what led to it where that is gone, runs again."""
    with replay_of(climbed) as runner:
        runner.reproduce()
    climbed.launcher.orders.clear()

    def die(job: Any) -> Failed | None:
        if isinstance(job, TrainJob) and job.config.optim.learning_rate == 6e-3:
            raise KeyboardInterrupt
        return None

    climbed.launcher.spoil = die
    with replay_of(climbed) as runner, contextlib.suppress(KeyboardInterrupt):
        runner.full_run(LONG)
    (weights,) = climbed.paths.replay.glob("*/train/segment-2/model/model.safetensors")
    weights.write_text("1.0")
    climbed.launcher.spoil = lambda job: None
    with replay_of(climbed) as runner:
        run = runner.full_run(LONG)
    assert run.best.val == pytest.approx(2.08, abs=0.01)


def test_a_segment_that_fails_is_named(climbed: Drive) -> None:
    """The row says which part of the schedule it was."""
    failed = Failed(state=TrialState.DIVERGED, error_class="Diverged", error_text="loss is NaN")
    with replay_of(climbed) as runner:
        runner.reproduce()
        climbed.launcher.spoil = lambda job: failed if getattr(job, "budget", "") == "666668tok" else None
        with pytest.raises(Exception, match="segment 3 of 3: loss is NaN"):
            runner.full_run(LONG)


def test_a_step_of_a_schedule_cannot_be_taken_out(climbed: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused with the reason before anything runs."""
    monkeypatch.setattr("harness.replay.Launcher", lambda **_: contextlib.nullcontext(climbed.launcher))
    with pytest.raises(WrongUse, match="no step can be taken out"):
        replay(load(climbed.paths.root), None, Silent(), ablate=True)
    assert climbed.launcher.orders == []


def test_a_budget_that_the_segments_cannot_share_is_refused(climbed: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    """Five steps of the whole are too few for each of three parts."""
    for tokens in ("2", "12000"):
        assert cli.main(["replay", str(climbed.paths.root), "--tokens", tokens]) == 2
        assert "too short" in capsys.readouterr().err
    assert climbed.launcher.orders == []


def test_readers_say_what_is_not_known(climbed: Drive, capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps away from a baseline that was continued once, no improvement is told, on screen, page or in JSON."""
    assert cli.main(["status", str(climbed.paths.root)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "how much better the best is than the baseline continued as often is not known" in said
    assert "after 3 budgets of training" in said
    for command in ("ledger", "lineage"):
        assert cli.main([command, str(climbed.paths.root)]) == 0
    assert "the lineage is a schedule" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["show", str(climbed.paths.root), "4"]) == 0
    assert "the checkpoint of baseline" in " ".join(capsys.readouterr().out.split())
    with Reader(climbed.paths.ledger) as reader:
        found = gather(reader, driver_lives=False, curves=True)
    document = summarise(found)
    assert (document["improvement"], document["start_from"]) == (None, "parent")
    assert any("continued as often, 2 times" in line for line in unproven(found))
    assert not any("--ablate" in line for line in unproven(found))
    text = html.unescape(page(found, climbed.paths))
    assert "not measured" in text
    assert "only marks between two steps can be compared" in text


@pytest.mark.parametrize(("text", "count"), [("10tok", 3), ("100s", 3), ("5e12flop", 7), ("7tok", 7)])
def test_shares_are_equal_and_come_to_the_whole(text: str, count: int) -> None:
    """Of whole tokens the last takes the rest; every text is read back."""
    whole = Budget.parse(text)
    parts = shares(whole, count)
    assert sum(part.amount for part in parts) == pytest.approx(whole.amount)
    assert len({part.amount for part in parts[:-1]}) == 1
    assert all(Budget.parse(str(part)) == part for part in parts)
