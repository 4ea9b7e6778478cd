"""What the owner sees while a search runs: a live view on a terminal, plain lines anywhere else.

Both are a `harness.view.View`. The live view redraws itself a few times a second from values that the driver's thread
hands over; it reads the ledger only when a row has changed. Between two points of a trial's curve the bar moves on at
the trial's own pace, but never past the next point: it must not promise what has not happened.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from harness.config import TrialConfig
from harness.limits import Limits, counted
from harness.paths import StudyPaths
from harness.queries import Reader
from harness.records import CurvePoint, Past, Trial
from harness.report import words
from harness.report.summary import Facts, gather, level, warnings
from harness.report.table import STYLES, reference, to_beat
from harness.view import View

VERDICTS = 6
"""Decided proposals that stay in view."""
POINT_SPACING = 0.1
"""Probe points come at every tenth of the budget."""


class Screen(View, Protocol):
    """A view that is entered before the search and left after it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def screen(console: Console, paths: StudyPaths, limits: Limits, *, plain: bool) -> Screen:
    """Return the view for this console: live on a terminal, plain lines otherwise or when asked for."""
    reader = Reader(paths.ledger)
    if plain or not console.is_terminal:
        return PlainView(console, reader)
    return LiveView(console, reader, limits)


class PlainView:
    """One line per event, with the time of day: for logs, pipes and slow connections."""

    def __init__(self, console: Console, reader: Reader, now: Callable[[], str] | None = None) -> None:
        self._console = console
        self._reader = reader
        self._now = now or (lambda: time.strftime("%H:%M:%S"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def say(self, text: str) -> None:
        """Print one sentence."""
        self._line(text)

    def trial_began(self, trial: Trial) -> None:
        """Say which trial begins."""
        self._line(f"trial {trial.id} begins: {words.purpose(trial)}")

    def point(self, trial: int, point: CurvePoint) -> None:
        """Say nothing: ten lines a trial would hide the rest."""

    def trial_ended(self, trial: Trial) -> None:
        """Say how a trial ended, and how the study stands."""
        took = f" in {words.duration(trial.train_seconds)} of training" if trial.train_seconds is not None else ""
        self._line(f"trial {trial.id} ended: {words.ended(trial)}{took}")

    def decided(self, past: Past) -> None:
        """Say what became of a proposal."""
        self._line(words.decided(past, _parent(self._reader, past)))

    def _line(self, text: str) -> None:
        self._console.print(f"{self._now()}  {text}", soft_wrap=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """The trial that runs, as far as the driver has heard of it."""

    trial: Trial
    began: float
    """On the monotonic clock, seconds."""
    point: CurvePoint | None = None
    point_at: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How far a trial is and how long it still takes, as far as that can be said."""

    progress: float | None
    seconds_left: float | None


def pace(running: Running, usual_seconds: float | None, now: float) -> Pace:
    """Estimate a trial's progress between its points: at its own speed, and never past the next point.

    ``usual_seconds`` is how long trials took from start to score; before the first point it is all that is known.
    """
    point = running.point
    if point is None or point.progress <= 0:
        if usual_seconds is None:
            return Pace(progress=None, seconds_left=None)
        elapsed = now - running.began
        share = min(elapsed / usual_seconds, POINT_SPACING) if usual_seconds > 0 else 0.0
        return Pace(progress=share, seconds_left=max(0.0, usual_seconds - elapsed))
    per_progress = (running.point_at - running.began) / point.progress
    since = (now - running.point_at) / per_progress if per_progress > 0 else 0.0
    progress = min(1.0, point.progress + min(since, POINT_SPACING))
    return Pace(progress=progress, seconds_left=max(0.0, (1 - progress) * per_progress))


class LiveView:
    """Redraws a small board under the lines that were said."""

    def __init__(
        self, console: Console, reader: Reader, limits: Limits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._reader = reader
        self._limits = limits
        self._clock = clock
        self._running: Running | None = None
        self._walls: deque[float] = deque(maxlen=20)
        self._verdicts: deque[tuple[str, str]] = deque(maxlen=VERDICTS)
        self._facts = gather(reader, driver_lives=True)
        for past in self._facts.past:
            if words.reason(past) is None:  # queued or running: no verdict yet
                continue
            self._verdicts.append((words.outcome(past), words.decided(past, _parent(reader, past))))
        self._console = console
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        self._reader.close()

    def say(self, text: str) -> None:
        """Print one sentence above the board."""
        self._console.print(text)

    def trial_began(self, trial: Trial) -> None:
        """Start the bar of a trial."""
        self._refresh()
        self._running = Running(trial=trial, began=self._clock())

    def point(self, trial: int, point: CurvePoint) -> None:
        """Move the bar."""
        running = self._running
        if running is not None and running.trial.id == trial:
            self._running = Running(trial=running.trial, began=running.began, point=point, point_at=self._clock())

    def trial_ended(self, trial: Trial) -> None:
        """Take the bar away and look at the scores again."""
        if self._running is not None and trial.score is not None:
            self._walls.append(self._clock() - self._running.began)
        self._running = None
        self._refresh()

    def decided(self, past: Past) -> None:
        """Add the verdict to those in view."""
        self._verdicts.append((words.outcome(past), words.decided(past, _parent(self._reader, past))))
        self._refresh()

    def _refresh(self) -> None:
        self._facts = gather(self._reader, driver_lives=True)

    def render(self) -> RenderableType:
        """Return the board as of now."""
        usual = statistics.median(self._walls) if self._walls else None
        done = sum(past.verdict is not None for past in self._facts.past)
        return board(
            self._facts,
            self._running,
            pace(self._running, usual, self._clock()) if self._running is not None else None,
            list(self._verdicts),
            totals(self._limits, self._facts, done, usual),
        )


def totals(limits: Limits, facts: Facts, decided: int, usual_seconds: float | None) -> str:
    """Return how far the whole search is, in one line."""
    count = counted(facts.trials)
    parts = [f"{count} of {limits.trials} trials" if limits.trials is not None else words.count(count, "trial")]
    parts.append(f"{words.count(decided, 'proposal')} decided")
    if limits.trials is not None and usual_seconds is not None:
        parts.append(f"about {words.duration(max(0, limits.trials - count) * usual_seconds)} left")
    if limits.until is not None:
        parts.append(f"until {limits.until:%H:%M}")
    return ", ".join(parts)


def board(
    facts: Facts, running: Running | None, at: Pace | None, verdicts: list[tuple[str, str]], total: str
) -> RenderableType:
    """Return the live view: scores with their spread, the running trial, the last verdicts in words."""
    scores = Table.grid(padding=(0, 2))
    scores.add_column(style="dim", no_wrap=True)
    untouched = reference(facts)
    if untouched is not None:
        scores.add_row("untouched base", untouched)
    for name, standing in (("baseline", facts.baseline), ("best", facts.best)):
        found = level(facts, standing)
        if found is None:
            scores.add_row(name, Text("not known yet", style="dim"))
            continue
        who = f", {words.node(found.node)}" if found.node else ""
        score = words.plus_minus(words.score(found.score), found.standard_error) + words.beside(None, found.accuracy)
        style = "bold green" if name == "best" and found.node else ""
        scores.add_row(name, Text(f"{score}  (mean of {words.count(found.replicates, 'trial')}{who})", style=style))
    if facts.continues:
        scores.add_row("to beat", to_beat(facts))
    if facts.noise is not None:
        scores.add_row("noise", f"{facts.noise.standard_deviation:.4f} {words.metric(facts.study)} between seeds")
    scores.add_row("so far", total)
    alarms = [Text(line, style="bold red") for line in warnings(facts)]
    parts: list[RenderableType] = [scores, *alarms, "", _bar(running, at)]
    if verdicts:
        parts += ["", Text("Last verdicts", style="dim")]
        for outcome, line in reversed(verdicts):
            text = Text(line, overflow="ellipsis", no_wrap=False)
            text.highlight_words([f" {outcome}"], style=STYLES.get(outcome, ""))
            parts.append(Padding(text, (0, 0, 0, 2)))
    return Padding(Group(*parts), (1, 0, 0, 0))


def _bar(running: Running | None, at: Pace | None) -> RenderableType:
    if running is None or at is None:
        return Text("Between trials …", style="dim")
    line = Table.grid(padding=(0, 2))
    for _ in range(4):
        line.add_column(no_wrap=True)
    point = running.point
    probe = "" if point is None or point.probe_score is None else f"probe {point.probe_score:.4f}"
    left = "starting" if at.seconds_left is None else f"{words.duration(at.seconds_left)} left"
    bar = ProgressBar(total=1.0, completed=at.progress or 0.0, width=24, pulse=at.progress is None)
    line.add_row(Text(f"trial {running.trial.id}: {words.purpose(running.trial)}", style="bold"), bar, left, probe)
    return line


def _parent(reader: Reader, past: Past) -> TrialConfig | None:
    return next((node.config for node in reader.lineage() if node.node == past.parent), None)
