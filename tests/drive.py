"""Drives a study folder with made-up jobs, as often as wanted, and lets the driver die around any change it makes."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness.audit import audit
from harness.desk import StudyDesk
from harness.jobs.job import Job, TrainJob
from harness.ledger import Ledger
from harness.limits import Limits
from harness.owner import Owner, Stopped
from harness.paths import StudyPaths
from harness.policy import Policy
from harness.queries import Reader
from harness.records import Failed, History, Past, Proposal, Role, TrialState
from harness.recovery import recover
from harness.search import Loop
from harness.study import Study, load
from harness.terms import Terms
from harness.trials import TrialRunner
from harness.view import Silent, View

LIMIT = Limits(trials=60)


class Script:
    """Proposes given diffs in order, as far as the history says; stateless, like every proposer."""

    name = "script"
    model = None

    def __init__(self, *diffs: dict[str, Any]) -> None:
        self.diffs = diffs

    def propose(self, history: History, count: int) -> list[Proposal]:
        """Return the next diff."""
        left = self.diffs[history.next_number - 1 :][:count]
        return [Proposal(diff=diff, source=self.name, rationale="why", watch="what") for diff in left]

    def begin(self, terms: Terms) -> None:
        """Take any terms."""

    def briefing(self, history: History) -> str:
        """Ask nobody."""
        return ""

    def close(self) -> None:
        """Hold nothing."""


class Drive:
    """Drives one study folder with made-up jobs, as often as wanted."""

    def __init__(self, paths: StudyPaths, launcher: Any, script: Script) -> None:
        self.paths, self.launcher, self.script = paths, launcher, script
        self.policy: Policy | None = None
        """In the place of the study's own; the seal knows nothing of it."""
        self.view: View = Silent()

    def run(self, limits: Limits = LIMIT, ledger_class: Callable[[Path], Any] = Ledger.open) -> Stopped:
        """Run a driver to its end, or to the exception that kills it."""
        study = load(self.paths.root)
        if self.policy is not None:
            study = dataclasses.replace(study, policy=self.policy)
        with ledger_class(study.paths.ledger) as ledger, Reader(study.paths.ledger) as reader:
            recover(study.mark, ledger, reader)
            return self.loop(study, limits, ledger, reader).run()

    def loop(self, study: Study, limits: Limits, ledger: Ledger, reader: Reader) -> Loop:
        owner = Owner(study.paths, ledger, self.view)
        trials = TrialRunner(study, ledger, reader, self.launcher, owner, self.view)
        desk = StudyDesk(ledger, study.paths, study.file.agent)
        return Loop(study, limits, ledger, reader, self.script, trials, owner, self.view, desk)

    def past(self) -> tuple[Past, ...]:
        with Reader(self.paths.ledger) as reader:
            assert audit(load(self.paths.root), reader) == []
            return reader.past()

    def trials(self) -> list[tuple[Role, TrialState, int]]:
        with Reader(self.paths.ledger) as reader:
            return [(trial.role, trial.state, trial.replicate) for trial in reader.trials()]


def fails(when: Callable[[TrainJob], bool], failed: Failed) -> Callable[[Job], Failed | None]:
    return lambda job: failed if isinstance(job, TrainJob) and when(job) else None


class Killed(BaseException):
    """The driver dies here."""


class Brittle(Ledger):
    """Dies around its n-th outermost change: just before it is made, or just after."""

    countdown = 0
    after = False
    depth = 0

    @contextlib.contextmanager
    def atomic(self) -> Iterator[None]:
        """Make the change, or die."""
        outermost = self.depth == 0
        type(self).countdown -= outermost
        dies = outermost and type(self).countdown == 0
        if dies and not self.after:
            raise Killed
        self.depth += 1
        try:
            with super().atomic():
                yield
        finally:
            self.depth -= 1
        if dies:
            raise Killed


def facts(drive: Drive) -> tuple[object, ...]:
    """Return what must be the same however often the driver died."""
    with Reader(drive.paths.ledger) as reader:
        assert audit(load(drive.paths.root), reader) == []
        scored = [(t.config.digest, t.seed, t.score) for t in reader.trials() if t.score is not None]
        assert len(scored) == len(set(scored))
        decisions = [
            (past.number, past.state, past.config and past.config.digest, past.verdict and past.verdict.decision)
            for past in reader.past()
        ]
        lineage = [(standing.node, standing.config.digest) for standing in reader.lineage()]
    return sorted(scored), decisions, lineage


def death_at(drive: Drive, pristine: Path, countdown: int, *, after: bool) -> bool:
    """Let a driver die around its n-th change and another one finish; tell whether the first died at all."""
    shutil.rmtree(drive.paths.root)
    shutil.copytree(pristine, drive.paths.root)
    Brittle.countdown, Brittle.after = countdown, after
    try:
        drive.run(ledger_class=Brittle.open)
    except Killed:
        drive.run()
        return True
    return False
