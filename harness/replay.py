"""The winner as a full run, and the proof that it is one.

First `reproduce`: the incumbent's config with a seed that the search never used, at the search's own budget; it must
land within the noise. Then `full_run`: the baseline and the incumbent trained under a larger budget of the owner's.
Schedules are functions of budget progress, so they are derived anew and not stretched. Both are scored on val and,
once each, on the holdout that nothing has looked at before; every look is an event of the ledger. The full run writes
checkpoints at the probe points and goes on from the newest one after ``kill -9``. A winner that does not reproduce is
not trained further.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import asdict, fields
from typing import Literal

from scipy import stats

from frozen.timer import Budget
from frozen.tokens import EncodedSplit
from harness import checkpoints
from harness.card import model_card
from harness.errors import CheckFailed, WrongUse
from harness.files import link_tree, write_whole
from harness.fullrun import FullRun, FullScores, Replayed, Reproduction
from harness.launch import Launcher
from harness.ledger import Ledger
from harness.locks import device_lock, driver_lock
from harness.orders import score_order, train_order
from harness.paths import ReplayPaths
from harness.queries import Reader
from harness.records import BASELINE, CurvePoint, Failed, Role, Scored, Standing, Trained, Trial, TrialState
from harness.recovery import recover
from harness.rows import Ending
from harness.sensors import NOTHING, Sensors
from harness.study import Study
from harness.view import View

FULL_RUN_REPLICATE = 1_000
"""Replicate number of full runs: a seed that no search reaches, the same after a restart. Reproductions follow it."""
CHECKPOINT_COPIES = 8
"""Sizes of the weights that a full run needs on the disk: two checkpoints with the optimizer's moments, two models."""
AGREEMENT = 0.99
"""Two-sided confidence at which a reproduction is said to differ."""
SECONDS_PER_DAY = 86_400.0
REPRODUCED = "reproduced"
"""Kind of the event that a reproduction leaves."""
CARD = "README.md"
"""Written into the model folder after it was scored, so no part of its digest."""
Who = Literal["best", "baseline"]


class Replay:
    """Runs replays of one study; a context that owns the study like a search does."""

    def __init__(self, study: Study, ledger: Ledger, reader: Reader, launcher: Launcher, view: View) -> None:
        self.study = study
        self.ledger = ledger
        self.reader = reader
        self.launcher = launcher
        self.view = view

    # --- reproduce ---

    def reproduce(self) -> Reproduction:
        """Run the incumbent with a fresh seed at the search's budget.

        Its row has the role ``final``: a check must not move the mean and the noise that it is checked against.
        """
        incumbent, noise = self._incumbent(), self.reader.noise()
        if noise is None or incumbent.score is None:
            raise WrongUse(
                f"study {self.study.name} has no measured noise yet: let `overnight run` finish the baseline"
            )
        replicate = max([FULL_RUN_REPLICATE, *(trial.replicate for trial in self.reader.trials())]) + 1
        paths = ReplayPaths(self.study.paths.replay / "reproduce")
        shutil.rmtree(paths.root, ignore_errors=True)
        trial = self._trial(incumbent, self.study.budget, replicate, paths, resumable=False)
        assert trial.score is not None
        quantile = float(stats.t.ppf((1 + AGREEMENT) / 2, noise.degrees_of_freedom))
        found = Reproduction(
            trial=trial.id,
            score=trial.score,
            expected=incumbent.score,
            tolerance=quantile * noise.standard_deviation * math.sqrt(1 + 1 / len(incumbent.scores)),
        )
        text = f"node {incumbent.node} {'reproduces' if found.agrees else 'does NOT reproduce'}: {found}"
        self.ledger.event(REPRODUCED, text, {"node": incumbent.node, "agrees": found.agrees} | asdict(found))
        self.view.say(text[0].upper() + text[1:] + ".")
        shutil.rmtree(paths.root)
        return found

    def reproduced(self) -> Reproduction:
        """Return the newest reproduction of the incumbent that agreed, or run one; `CheckFailed` if it does not."""
        node = self._incumbent().node
        names = [field.name for field in fields(Reproduction)]
        for event in reversed(self.reader.events(REPRODUCED)):
            if event.data["node"] == node and event.data["agrees"]:
                return Reproduction(**{name: event.data[name] for name in names})
        found = self.reproduce()
        if not found.agrees:
            raise CheckFailed(
                f"node {node} does not reproduce ({found}), so it is not trained further; replay again to draw"
                " another seed, or go on searching"
            )
        return found

    # --- full run ---

    def full_run(self, budget: Budget) -> FullRun:
        """Train baseline and incumbent under ``budget``; go on where an earlier call with the same budget stopped."""
        incumbent, baseline = self._incumbent(), self.reader.baseline()
        assert baseline is not None
        self._make_room(incumbent, baseline)
        best = self._full_scores("best", incumbent, budget)
        base = best if incumbent.node == BASELINE else self._full_scores("baseline", baseline, budget)
        run = FullRun(
            budget=str(budget),
            node=incumbent.node,
            best=best,
            baseline=base,
            model=self._paths("best", incumbent, budget).model,
        )
        card = model_card(self.study, self.reader, run)
        write_whole(run.model / CARD, card)
        return run

    def _full_scores(self, who: Who, standing: Standing, budget: Budget) -> FullScores:
        paths = self._paths(who, standing, budget)
        trial = self._finished(standing, budget)
        if trial is None or not paths.model.exists():
            if trial is not None:
                raise CheckFailed(f"trial {trial.id} was scored but its model is gone from {paths.model}")
            self.view.say(f"Full run of the {who}: node {standing.node}, budget {budget}.")
            trial = self._trial(standing, budget, FULL_RUN_REPLICATE, paths, resumable=True)
        assert trial.score is not None
        self._check_model(trial, paths)
        shutil.rmtree(paths.train, ignore_errors=True)  # left by a death between closing the row and cleaning up
        holdout = self._holdout(trial, paths)
        return FullScores(trial=trial.id, val=trial.score, val_perplexity=trial.perplexity, holdout=holdout)

    def _check_model(self, trial: Trial, paths: ReplayPaths) -> None:
        """Refuse a model folder whose files are not those that the trial's score belongs to; its card may change."""
        if checkpoints.digest_of(paths.model, besides=(CARD,)) != trial.checkpoint_digest:
            raise CheckFailed(f"the model in {paths.model} is not the one that trial {trial.id} scored")

    def _holdout(self, trial: Trial, paths: ReplayPaths) -> float:
        """Look at the holdout once; later calls get the number that the ledger has."""
        for event in self.reader.events("holdout_score"):
            if event.data["trial"] == trial.id:
                return float(event.data["score"])
        looks = sum(event.data["trial"] == trial.id for event in self.reader.events("holdout_look")) + 1
        self.ledger.event("holdout_look", f"trial {trial.id} looks at the holdout", {"trial": trial.id, "look": looks})
        job = score_order(self.study, trial.config, weights=paths.model, split="holdout")
        scored = self.launcher.run(job, log=paths.log, deadline_seconds=SECONDS_PER_DAY)
        if not isinstance(scored, Scored):
            raise CheckFailed(f"the holdout could not be scored: {_reason(scored)}; see {paths.log}")
        score = scored.nats / (math.log(2) * scored.bytes)
        self.ledger.event(
            "holdout_score", f"trial {trial.id}: {score:.4f} on the holdout", {"trial": trial.id, "score": score}
        )
        return score

    # --- one trial ---

    def _trial(
        self,
        standing: Standing,
        budget: Budget,
        replicate: int,
        paths: ReplayPaths,
        *,
        resumable: bool,
    ) -> Trial:
        """Seal, row, training, scoring, row; like a search's trial, in the replay's own folder."""
        seal = self.study.seal.verify(thorough=True)
        seed = self.study.seed_of(replicate)
        number = self.ledger.begin(
            proposal=standing.node or None,
            role=Role.FINAL,
            config=standing.config,
            seed=seed,
            replicate=replicate,
            epoch=self.reader.epoch(),
            budget=str(budget),
            seal=seal,
            device=self.study.device,
            sandbox=self.launcher.sandbox_tier,
        )
        paths.train.mkdir(parents=True, exist_ok=True)
        self.view.trial_began(self.reader.trial(number))
        try:
            ending = self._run(standing, seed, budget, paths, number, resumable=resumable)
        except KeyboardInterrupt:
            stopped = Failed(state=TrialState.INTERRUPTED, error_class="Interrupted", error_text="ended by the owner")
            self.ledger.close_trial(number, Ending.of_failed(stopped))
            raise
        self.ledger.close_trial(number, ending)
        trial = self.reader.trial(number)
        self.view.trial_ended(trial)
        if trial.score is None:
            raise CheckFailed(f"trial {number} ended {trial.state.value}: {trial.error_text}; see {paths.log}")
        shutil.rmtree(paths.train)  # only now: until the row is closed a restart goes on from the checkpoints in it
        return trial

    def _run(
        self, standing: Standing, seed: int, budget: Budget, paths: ReplayPaths, number: int, *, resumable: bool
    ) -> Ending:
        """Train and score."""
        points: list[CurvePoint] = []
        sensors, sensed = Sensors(self.study.device), NOTHING

        def on_point(point: CurvePoint) -> None:
            nonlocal sensed
            points.append(point)
            self.view.point(number, point)
            sensed = sensors.read()

        job = train_order(
            self.study, standing.config, seed=seed, budget=budget, folder=paths.train, resumable=resumable
        )
        trained = self.launcher.run(job, log=paths.log, deadline_seconds=SECONDS_PER_DAY * 30, on_point=on_point)
        return self._score(standing, paths, trained).observed(points, sensed)

    def _score(self, standing: Standing, paths: ReplayPaths, trained: Trained | Scored | Failed) -> Ending:
        if isinstance(trained, Failed):
            return Ending.of_failed(trained)
        assert isinstance(trained, Trained)
        shutil.rmtree(paths.model, ignore_errors=True)
        link_tree(paths.train / "model", paths.model)
        digest = checkpoints.digest_of(paths.model)
        job = score_order(self.study, standing.config, weights=paths.model, split="val")
        scored = self.launcher.run(job, log=paths.log, deadline_seconds=SECONDS_PER_DAY)
        if isinstance(scored, Failed):
            return Ending.of_failed(scored, trained=trained)
        assert isinstance(scored, Scored)
        return Ending.of_scored(trained=trained, scored=scored, checkpoint_digest=digest)

    def _make_room(self, *standings: Standing) -> None:
        """See to it that models and checkpoints fit: weights, and two moments of the optimizer beside them, twice."""
        running = {trial.id for past in self.reader.running() for trial in past.trials}
        need = sum(CHECKPOINT_COPIES * self.study.bytes_of(standing.config) for standing in standings)
        checkpoints.make_room(self.study.paths, running, need)

    # --- where and what ---

    def _incumbent(self) -> Standing:
        incumbent = self.reader.incumbent()
        if incumbent is None:
            raise WrongUse(f"study {self.study.name} has no baseline yet: `overnight run` it first")
        return incumbent

    def _paths(self, who: Who, standing: Standing, budget: Budget) -> ReplayPaths:
        return ReplayPaths(self.study.paths.replay / f"{budget}-{who}-{standing.config.digest[:12]}")

    def _finished(self, standing: Standing, budget: Budget) -> Trial | None:
        for trial in self.reader.trials():
            same = trial.config == standing.config and trial.budget == str(budget)
            if same and trial.replicate == FULL_RUN_REPLICATE and trial.score is not None:
                return trial
        return None


def replay(study: Study, budget: Budget | None, view: View, *, cold: bool = False) -> Replayed:
    """Reproduce the incumbent; with a budget, train it as a full run then. The driver's lock is held throughout.

    `CheckFailed`: the winner does not reproduce, or a run failed. `StoppedEarly`: the disk is too full. A
    `KeyboardInterrupt` (the command line makes every signal one) closes the trial's row, and its checkpoints stay.
    """
    with (
        driver_lock(study.paths),
        device_lock(study.device),
        Ledger.open(study.paths.ledger) as ledger,
        Reader(study.paths.ledger) as reader,
    ):
        recover(study.mark, ledger, reader)  # before our own nursery carries the mark that is swept
        with Launcher(bytecode=study.paths.bytecode, mark=study.mark, cold=cold, threads=study.threads) as launcher:
            runner = Replay(study, ledger, reader, launcher, view)
            if budget is None:
                return Replayed(reproduction=runner.reproduce(), full=None)
            return Replayed(reproduction=runner.reproduced(), full=runner.full_run(budget))


def budget_of_epochs(study: Study, epochs: float) -> Budget:
    """Return the token budget of ``epochs`` passes over the training split, separators included.

    It is the same for baseline and winner, whatever share of the documents their configs read.
    """
    split = EncodedSplit.load(study.paths.split("train"))
    return Budget("tokens", float(math.ceil(epochs * (len(split.tokens) + split.documents))))


def _reason(failed: Trained | Scored | Failed) -> str:
    return f"{failed.state.value}, {failed.error_text}" if isinstance(failed, Failed) else "a wrong answer"
