"""Runs one trial of a replay: seal, row, training, scoring, row; like a search's trial, in the replay's own folder."""

from __future__ import annotations

import contextlib
import shutil
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
from harness.records import CurvePoint, Failed, Merged, Role, Scored, Trained, Trial, TrialState
from harness.rows import Ending
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

    def run(
        self,
        config: TrialConfig,
        node: int,
        budget: Budget,
        replicate: int,
        paths: ReplayPaths,
        *,
        resumable: bool,
    ) -> Trial:
        """Run to a closed row, scored or not. ``node`` is whose trial it is.

        A trial that is not scored leaves its folder as it is: to go on from, or to look for the reason.
        """
        self.check_tool()
        seed = self.study.seed_of(replicate)
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
        )
        paths.train.mkdir(parents=True, exist_ok=True)
        self.view.trial_began(self.reader.trial(number))
        try:
            ending = self._run(config, seed, budget, paths, number, resumable=resumable)
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

    def _run(
        self, config: TrialConfig, seed: int, budget: Budget, paths: ReplayPaths, number: int, *, resumable: bool
    ) -> Ending:
        """Train and score."""
        points: list[CurvePoint] = []
        earlier = _points(paths.curve_jsonl) if resumable else []
        sensors, sensed = Sensors(self.study.device), NOTHING

        def on_point(point: CurvePoint) -> None:
            nonlocal sensed
            points.append(point)
            with paths.curve_jsonl.open("a", encoding="utf-8") as lines:
                lines.write(point.model_dump_json() + "\n")
            self.view.point(number, point)
            sensed = sensors.read()

        job = train_order(self.study, config, seed=seed, budget=budget, folder=paths.train, resumable=resumable)
        trained = self.launcher.run(job, log=paths.log, deadline_seconds=SECONDS_PER_DAY * 30, on_point=on_point)
        resumed_at = points[0].step if points else 0
        before = {point.step: point for point in earlier if point.step < resumed_at}
        curve = [*(before[step] for step in sorted(before)), *points]
        return self._score(config, paths, trained).observed(curve, sensed)

    def _score(self, config: TrialConfig, paths: ReplayPaths, trained: Trained | Scored | Merged | Failed) -> Ending:
        if isinstance(trained, Failed):
            return Ending.of_failed(trained)
        assert isinstance(trained, Trained)
        shutil.rmtree(paths.model, ignore_errors=True)
        link_tree(paths.train / "model", paths.model)
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


def _points(file: Path) -> list[CurvePoint]:
    """Return the points of earlier runs of the same job; a last line that a death cut off is none."""
    if not file.exists():
        return []
    points = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValidationError):
            points.append(CurvePoint.model_validate_json(line))
    return points
