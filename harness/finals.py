"""Runs one trial of a replay: seal, row, training, scoring, row; like a search's trial, in the replay's own folder."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import ValidationError

from frozen.timer import Budget
from harness import checkpoints
from harness.config import TrialConfig
from harness.errors import SealBroken
from harness.files import link_tree
from harness.launch import Launcher
from harness.ledger import Ledger
from harness.orders import score_order, train_order
from harness.paths import ReplayPaths
from harness.queries import Reader
from harness.records import CurvePoint, Failed, Role, Scored, Standing, Trained, Trial, TrialState
from harness.rows import Ending
from harness.segments import Done, Segment, finish, finished, lay_out, together, within
from harness.sensors import NOTHING, Sensors
from harness.study import Study
from harness.upgrade import TOOL_CHANGED, Tool, tool_of
from harness.view import View

SECONDS_PER_DAY = 86_400.0
CARD = "README.md"
"""Written into the model folder after it was scored, so no part of its digest."""


class FinalRunner:
    """Turns a config into a closed row with the role ``final``."""

    def __init__(
        self, study: Study, tool: Tool, ledger: Ledger, reader: Reader, launcher: Launcher, view: View
    ) -> None:
        self.study = study
        self.tool = tool
        self.ledger = ledger
        self.reader = reader
        self.launcher = launcher
        self.view = view
        self._sensed = NOTHING

    def run(
        self,
        config: TrialConfig,
        node: int,
        budget: Budget,
        replicate: int,
        paths: ReplayPaths,
        *,
        resumable: bool,
        start: int | None = None,
        before: Sequence[Standing] = (),
    ) -> Trial:
        """Run to a closed row, scored or not. ``node`` is whose trial it is.

        It goes on from the checkpoint of the node ``start``; None: from the base, or a fresh model. With nodes
        ``before`` it is a schedule instead: their configs are trained first, beginning with the base, each with an
        equal share of the budget. A trial that is not scored leaves its folder as it is: to go on from, or to look for
        the reason.
        """
        self.check_tool()
        seed = self.study.seed_of(replicate, start)
        parts = [(each.config, self.study.seed_of(replicate, each.start)) for each in before] + [(config, seed)]
        segments = lay_out(parts, budget, paths)
        weights = None if start is None or before else self._checkpoint(start)
        number = self.ledger.begin(
            proposal=node or None,
            role=Role.FINAL,
            config=config,
            seed=seed,
            replicate=replicate,
            epoch=self.reader.epoch(),
            budget=str(budget),
            seal=self.tool.seal,
            device=self.study.device,
            sandbox=self.launcher.sandbox_tier,
            start=start,
        )
        paths.train.mkdir(parents=True, exist_ok=True)
        self.view.trial_began(self.reader.trial(number))
        try:
            ending = self._run(segments, weights, paths, number, resumable=resumable)
        except KeyboardInterrupt:
            stopped = Failed(state=TrialState.INTERRUPTED, error_class="Interrupted", error_text="ended by the owner")
            self.ledger.close_trial(number, Ending.of_failed(stopped))
            raise
        self.ledger.close_trial(number, ending)
        trial = self.reader.trial(number)
        self.view.trial_ended(trial)
        if trial.score is not None:
            shutil.rmtree(paths.train)  # only now: until the row is closed a restart goes on from the checkpoints in it
        return trial

    def check_tool(self) -> None:
        """See to it that what runs is what the rows say, and that an event says what that is."""
        if tool_of(self.study.seal, thorough=False).seal != self.tool.seal:
            raise SealBroken("the tool has changed since this replay began: start it again")
        booked = {event.data["seal"] for event in self.reader.events(TOOL_CHANGED)}
        if self.tool.upgrade is not None and self.tool.seal not in booked:
            self.ledger.event(TOOL_CHANGED, str(self.tool.upgrade), self.tool.facts())

    def _checkpoint(self, node: int) -> Path:
        """Return the folder of a lineage node's checkpoint; `CheckFailed` if it is not what was published."""
        digest = self.reader.checkpoints()[node]
        folder = checkpoints.folder_of(self.study.paths, node, digest)
        checkpoints.check(folder, digest)
        return folder

    def _run(
        self, segments: Sequence[Segment], weights: Path | None, paths: ReplayPaths, number: int, *, resumable: bool
    ) -> Ending:
        """Train the segments that are not done yet, then score what the last one leaves."""
        count = len(segments)
        done = finished(segments)
        curve = [within(point, done[:at], count) for at, each in enumerate(done) for point in each.points]
        for at in range(len(done), count):
            before = segments[at - 1] if at else None
            start = weights if before is None else before.model

            def shown(point: CurvePoint, so_far: Sequence[Done] = tuple(done)) -> None:
                self.view.point(number, within(point, so_far, count))

            trained, points = self._train(segments[at], start, paths.log, shown, resumable=resumable)
            curve += [within(point, done, count) for point in points]
            if isinstance(trained, Failed):
                return Ending.of_failed(_of_segment(trained, at, count)).observed(curve, self._sensed)
            done.append(finish(segments[at], trained, points, before))
        trained_together = together([each.trained for each in done])
        return self._score(segments[-1], paths, trained_together).observed(curve, self._sensed)

    def _train(
        self,
        segment: Segment,
        start: Path | None,
        log: Path,
        shown: Callable[[CurvePoint], None],
        *,
        resumable: bool,
    ) -> tuple[Trained | Failed, list[CurvePoint]]:
        """Train one segment, and return its curve with what earlier runs of it had seen."""
        points: list[CurvePoint] = []
        earlier = _points(segment.curve) if resumable else []
        sensors = Sensors(self.study.device)
        self._sensed = NOTHING
        segment.train.mkdir(parents=True, exist_ok=True)

        def on_point(point: CurvePoint) -> None:
            points.append(point)
            with segment.curve.open("a", encoding="utf-8") as lines:
                lines.write(point.model_dump_json() + "\n")
            shown(point)
            self._sensed = sensors.read()

        job = train_order(
            self.study,
            segment.config,
            seed=segment.seed,
            budget=segment.budget,
            folder=segment.train,
            start=start,
            resumable=resumable,
        )
        trained = self.launcher.run(job, log=log, deadline_seconds=SECONDS_PER_DAY * 30, on_point=on_point)
        assert isinstance(trained, Trained | Failed)
        return trained, _joined(earlier, points)

    def _score(self, segment: Segment, paths: ReplayPaths, trained: Trained) -> Ending:
        """Score what a segment leaves, under the name of the run's model."""
        config = segment.config
        shutil.rmtree(paths.model, ignore_errors=True)
        link_tree(segment.model, paths.model)
        (paths.model / CARD).unlink(missing_ok=True)  # PEFT leaves a template of a card
        digest = checkpoints.digest_of(paths.model)
        scored = self.score(config, paths.model, "val", paths.log, guarded=True)
        if isinstance(scored, Failed):
            return Ending.of_failed(scored, trained=trained)
        return Ending.of_scored(trained=trained, scored=scored, checkpoint_digest=digest)

    def score(
        self, config: TrialConfig, weights: Path | None, split: str, log: Path, *, guarded: bool = False
    ) -> Scored | Failed:
        """Score a model folder, or the untouched base, on one split, and on the guard set if that is wanted."""
        self.check_tool()
        job = score_order(self.study, config, weights=weights, split=split, guarded=guarded)
        scored = self.launcher.run(job, log=log, deadline_seconds=SECONDS_PER_DAY)
        assert isinstance(scored, Scored | Failed)
        return scored


def _joined(earlier: Sequence[CurvePoint], points: Sequence[CurvePoint]) -> list[CurvePoint]:
    """Return a curve of earlier runs of a job up to where its last one went on, and that one's."""
    resumed_at = points[0].step if points else 0
    before = {point.step: point for point in earlier if point.step < resumed_at}
    return [*(before[step] for step in sorted(before)), *points]


def _of_segment(failed: Failed, at: int, count: int) -> Failed:
    """Say in which segment a schedule failed."""
    if count == 1:
        return failed
    return failed.model_copy(update={"error_text": f"segment {at + 1} of {count}: {failed.error_text}"})


def _points(file: Path) -> list[CurvePoint]:
    """Return the points of earlier runs of the same job; a last line that a death cut off is none."""
    if not file.exists():
        return []
    points = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValidationError):
            points.append(CurvePoint.model_validate_json(line))
    return points
