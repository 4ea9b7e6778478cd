"""What the owner sees while a search runs."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from harness.limits import Limits
from harness.live import LiveView, Pace, PlainView, Running, pace, screen
from harness.paths import StudyPaths
from harness.queries import Reader
from harness.records import CurvePoint, Trial

HALF = CurvePoint(
    progress=0.5, seconds=5, step=50, train_loss=4.0, probe_score=2.6, learning_rate=1e-3, gradient_norm=1.0
)


@pytest.fixture
def trial(played: StudyPaths) -> Trial:
    with Reader(played.ledger) as reader:
        return reader.trial(31)


def console(*, terminal: bool, width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, markup=False, highlight=False)


def said(target: Console) -> str:
    assert isinstance(target.file, io.StringIO)
    return target.file.getvalue()


def test_without_a_terminal_there_are_plain_lines(played: StudyPaths, trial: Trial) -> None:
    """Logs get one line per event, and no control characters."""
    target = console(terminal=False)
    with Reader(played.ledger) as reader:
        past = reader.proposal(11)
    with screen(target, played, Limits(), plain=False) as view:
        assert isinstance(view, PlainView)
        view.say("Sandbox: landlock.")
        view.trial_began(trial)
        view.point(trial.id, HALF)
        view.trial_ended(trial)
        view.decided(past)
    lines = said(target).splitlines()
    assert len(lines) == 4
    assert "p11, replicate 1" in lines[1]
    assert "sequence_length 256 → 128" in lines[3]
    assert "\x1b" not in said(target)


@pytest.mark.parametrize("width", [80, 120])
def test_the_board_shows_scores_bar_and_verdicts(played: StudyPaths, trial: Trial, width: int) -> None:
    """Best and baseline with their spread, the running trial with what is left, the last verdicts in words."""
    clock = iter(range(0, 1000, 5))
    target = console(terminal=True, width=width)
    with Reader(played.ledger) as reader:
        view = LiveView(target, reader, Limits(trials=60), clock=lambda: float(next(clock)))
        view.trial_began(trial)
        view.point(trial.id, HALF)
        page = console(terminal=False, width=width)
        page.print(view.render())
    text = said(page)
    for part in (
        "baseline",
        "2.7537 ± 0.0033",
        "best",
        "p11",
        "trial 31: p11, replicate 1",
        "left",
        "probe 2.6000",
        "53 of 60",
    ):
        assert part in text
    assert "p19 duplicate" in text
    assert "p20" not in text  # it only waits
    assert max(map(len, text.splitlines())) <= width


def test_the_bar_never_passes_the_next_point(trial: Trial) -> None:
    """Between points the bar moves at the trial's own pace and waits where the next point is due."""
    running = Running(trial=trial, began=0.0, point=HALF, point_at=10.0)
    assert pace(running, None, 10.0) == Pace(progress=0.5, seconds_left=10.0)
    assert pace(running, None, 11.0) == Pace(progress=0.55, seconds_left=pytest.approx(9.0))
    assert pace(running, None, 99.0) == Pace(progress=0.6, seconds_left=pytest.approx(8.0))


def test_before_the_first_point_the_usual_length_counts(trial: Trial) -> None:
    """Without any earlier trial nothing is promised."""
    running = Running(trial=trial, began=0.0)
    assert pace(running, None, 5.0) == Pace(progress=None, seconds_left=None)
    assert pace(running, 100.0, 5.0) == Pace(progress=0.05, seconds_left=95.0)
