"""Runs one trial of the search: seal, row, training, scoring, row. The row exists before the job starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from harness import checkpoints
from harness.config import TrialConfig, flatten
from harness.errors import CheckFailed
from harness.files import write_whole
from harness.launch import Launcher
from harness.ledger import Ledger
from harness.limits import expected_seconds
from harness.orders import score_order, train_order
from harness.owner import Owner
from harness.paths import TrialPaths
from harness.queries import Reader
from harness.records import UNTRAINED, CurvePoint, Failed, Role, Scored, Trained, Trial, TrialState
from harness.rows import Ending
from harness.sensors import NOTHING, Sensors
from harness.study import Study
from harness.view import View
from harness.walk import Run, vanished_for_good

SLOWER_THAN_USUAL = 6
"""A job that takes this many times the usual wall time hangs, or something else is eating the machine."""


class TrialRunner:
    """Turns a step of a walk into a closed row."""

    def __init__(
        self, study: Study, ledger: Ledger, reader: Reader, launcher: Launcher, owner: Owner, view: View
    ) -> None:
        self._study = study
        self._ledger = ledger
        self._reader = reader
        self._launcher = launcher
        self._owner = owner
        self._view = view
        self._sensors = Sensors(study.device)
        self._sensed = NOTHING
        self._checked: set[int] = set()

    def run(self, step: Run, meanwhile: Callable[[], None] = lambda: None) -> Trial:
        """Run one trial to its closed row; raises `Ended` afterwards if the owner asked to stop meanwhile.

        ``meanwhile`` is called several times a second while its jobs run. The untouched base is only scored.
        """
        self._owner.obey()
        study, trains = self._study, step.role is not Role.REFERENCE
        budget = str(study.budget) if trains else UNTRAINED
        seal = study.seal.verify(thorough=False)
        if trains:
            checkpoints.make_room(study.paths, self.needed_trials(), 2 * study.bytes_of(step.config))
        seed = study.seed_of(step.replicate, step.start)
        start = None if step.start is None else self._checkpoint(step.start)
        number = self._ledger.begin(
            proposal=step.proposal,
            role=step.role,
            config=step.config,
            seed=seed,
            replicate=step.replicate,
            epoch=self._reader.epoch(),
            budget=budget,
            seal=seal,
            device=study.device,
            sandbox=self._launcher.sandbox_tier,
            start=step.start,
        )
        paths = study.paths.trial(number)
        (paths.train if trains else paths.root).mkdir(parents=True)
        _write_order(paths, step.config, seed, budget, step.start)
        self._view.trial_began(self._reader.trial(number))
        points: list[CurvePoint] = []
        self._sensed = NOTHING

        def should_stop() -> bool:
            meanwhile()
            return self._owner.wants_stop()

        if trains:
            ending = self._train_and_score(step, start, seed, paths, number, points, should_stop)
        else:
            ending = self._score(step, None, paths, should_stop)
        self._ledger.close_trial(number, ending.observed(points, self._sensed))
        trial = self._reader.trial(number)
        self._view.trial_ended(trial)
        self._owner.obey()
        return trial

    def gave_up(self, trial: Trial) -> bool:
        """Tell whether a trial without a score is final: a failure, or one that vanished too often."""
        if trial.state is not TrialState.LOST:
            return trial.score is None
        identity = (trial.config, trial.start, trial.budget)
        same = [t for t in self._reader.trials() if (t.config, t.start, t.budget) == identity]
        return vanished_for_good(same, trial.replicate)

    def needed_trials(self) -> set[int]:
        """Return the trials whose weights a running proposal may still publish."""
        return {trial.id for past in self._reader.running() for trial in past.trials}

    def _checkpoint(self, node: int) -> Path:
        """Return the folder of a lineage node's checkpoint; `CheckFailed` if it is not what was published.

        Hashed once per driver: no job may write there, and `overnight verify` hashes it again.
        """
        digest = self._reader.checkpoints()[node]
        folder = checkpoints.folder_of(self._study.paths, node, digest)
        if node not in self._checked:
            checkpoints.check(folder, digest)
            self._checked.add(node)
        return folder

    def _train_and_score(
        self,
        step: Run,
        start: Path | None,
        seed: int,
        paths: TrialPaths,
        number: int,
        points: list[CurvePoint],
        should_stop: Callable[[], bool],
    ) -> Ending:
        def on_point(point: CurvePoint) -> None:
            points.append(point)
            with paths.curve_jsonl.open("a", encoding="utf-8") as lines:
                lines.write(point.model_dump_json() + "\n")
            self._view.point(number, point)
            self._sensed = self._sensors.read()

        trained = self._launcher.run(
            train_order(
                self._study,
                step.config,
                seed=seed,
                budget=self._study.budget,
                folder=paths.train,
                start=start,
                abort_if=step.abort_if,
            ),
            log=paths.log,
            deadline_seconds=self._deadline_seconds(),
            on_point=on_point,
            should_stop=should_stop,
        )
        if not isinstance(trained, Trained):
            assert isinstance(trained, Failed)
            return Ending.of_failed(trained)
        try:
            checkpoint = checkpoints.digest_of(paths.weights)
        except CheckFailed as error:  # links or nothing where a model should be
            return Ending.of_failed(_invalid(str(error)), trained=trained)
        self._study.seal.verify(thorough=False)
        ending = self._score(step, trained, paths, should_stop)
        if ending.failed is not None:
            return ending
        if checkpoints.digest_of(paths.weights) != checkpoint:
            changed = _invalid("the weights changed while they were being scored")
            return Ending.of_failed(changed, trained=trained)
        return replace(ending, checkpoint_digest=checkpoint)

    def _score(self, step: Run, trained: Trained | None, paths: TrialPaths, should_stop: Callable[[], bool]) -> Ending:
        """Score what was trained, or the untouched base, on val and on the guard set where the study has one."""
        weights = None if trained is None else paths.weights
        scored = self._launcher.run(
            score_order(self._study, step.config, weights=weights, split="val", guarded=True),
            log=paths.log,
            deadline_seconds=self._deadline_seconds(),
            should_stop=should_stop,
        )
        if not isinstance(scored, Scored):
            assert isinstance(scored, Failed)
            return Ending.of_failed(scored, trained=trained)
        return Ending.of_scored(trained=trained, scored=scored, checkpoint_digest=None)

    def _deadline_seconds(self) -> float:
        """Return how long a job may take by the wall clock: generous for the first, then a multiple of the usual."""
        usual = expected_seconds(self._reader.trials())
        least = self._study.least_deadline_seconds
        return least if usual is None else max(least / 4, SLOWER_THAN_USUAL * usual)


def _invalid(reason: str) -> Failed:
    return Failed(state=TrialState.INVALID, error_class="BadCheckpoint", error_text=reason)


def _write_order(paths: TrialPaths, config: TrialConfig, seed: int, budget: str, start: int | None) -> None:
    order = {"seed": seed, "budget": budget, "start": start, "digest": config.digest, "config": flatten(config)}
    write_whole(paths.config_json, json.dumps(order, indent=2) + "\n")
