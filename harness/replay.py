"""The winner as a full run, and the proof that it is one.

First `reproduce`: the incumbent's config with a seed that the search never used, at the search's own budget; it must
land within the noise. Then `full_run`: the baseline and the incumbent trained under a larger budget of the owner's.
Schedules are functions of budget progress, so they are derived anew and not stretched. Both are scored on val and,
once each, on the holdout that nothing has looked at before; every look is an event of the ledger. The full run writes
checkpoints at the probe points and goes on from the newest one after ``kill -9``.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from scipy import stats

from frozen.timer import Budget
from harness import checkpoints
from harness.card import model_card
from harness.errors import CheckFailed, WrongUse
from harness.files import link_tree, write_whole
from harness.launch import Launcher
from harness.ledger import Ledger
from harness.locks import device_lock, driver_lock
from harness.orders import score_order, train_order
from harness.paths import ReplayPaths
from harness.queries import Reader
from harness.records import BASELINE, Failed, Role, Scored, Standing, Trained, Trial
from harness.recovery import recover
from harness.rows import Ending
from harness.study import Study
from harness.view import View

FULL_RUN_REPLICATE = 1_000
"""Replicate number of full runs: a seed that no search reaches, the same after a restart."""
AGREEMENT = 0.99
"""Two-sided confidence at which a reproduction is said to differ."""
SECONDS_PER_DAY = 86_400.0
Who = Literal["best", "baseline"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reproduction:
    """One more seed of the incumbent at the search's budget, against what the ledger says."""

    trial: int
    score: float
    expected: float
    """Mean of the incumbent's replicates."""
    tolerance: float
    """Half width of the prediction interval for one more trial."""

    @property
    def agrees(self) -> bool:
        """Whether the score lies within the interval."""
        return abs(self.score - self.expected) <= self.tolerance


@dataclass(frozen=True, kw_only=True, slots=True)
class FullScores:
    """What a full run came to on the two splits."""

    trial: int
    val: float
    val_perplexity: float | None
    holdout: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FullRun:
    """The best lineage and the baseline under one budget."""

    budget: str
    node: int
    best: FullScores
    baseline: FullScores
    model: Path
    """Folder that ``from_pretrained`` loads."""


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
        """Run the incumbent with a fresh seed at the search's budget, in the ledger as one of its replicates."""
        incumbent = self._incumbent()
        noise = self.reader.noise()
        assert incumbent.score is not None
        assert noise is not None
        replicate = max(t.replicate for t in self.reader.trials() if t.replicate < FULL_RUN_REPLICATE) + 1
        budget = self.study.budget
        folder = self.study.paths.replay / "reproduce"
        shutil.rmtree(folder, ignore_errors=True)
        trial = self._trial(incumbent, Role.REPLICATE, budget, replicate, ReplayPaths(folder), resumable=False)
        assert trial.score is not None
        count = len(incumbent.scores)
        width = stats.t.ppf((1 + AGREEMENT) / 2, noise.degrees_of_freedom) * math.sqrt(1 + 1 / count)
        shutil.rmtree(folder)
        return Reproduction(
            trial=trial.id,
            score=trial.score,
            expected=incumbent.score,
            tolerance=float(width) * noise.standard_deviation,
        )

    # --- full run ---

    def full_run(self, budget: Budget) -> FullRun:
        """Train baseline and incumbent under ``budget``; go on where an earlier call with the same budget stopped."""
        incumbent, baseline = self._incumbent(), self.reader.baseline()
        assert baseline is not None
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
        write_whole(run.model / "README.md", card)
        return run

    def _full_scores(self, who: Who, standing: Standing, budget: Budget) -> FullScores:
        paths = self._paths(who, standing, budget)
        trial = self._finished(standing, budget)
        if trial is None or not paths.model.exists():
            if trial is not None:
                raise CheckFailed(f"trial {trial.id} was scored but its model is gone from {paths.model}")
            self.view.say(f"Full run of the {who}: node {standing.node}, budget {budget}.")
            trial = self._trial(standing, Role.FINAL, budget, FULL_RUN_REPLICATE, paths, resumable=True)
        assert trial.score is not None
        holdout = self._holdout(trial, paths)
        return FullScores(trial=trial.id, val=trial.score, val_perplexity=trial.perplexity, holdout=holdout)

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
        role: Role,
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
            role=role,
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
        job = train_order(
            self.study, standing.config, seed=seed, budget=budget, folder=paths.train, resumable=resumable
        )
        trained = self.launcher.run(
            job,
            log=paths.log,
            deadline_seconds=SECONDS_PER_DAY * 30,
            on_point=lambda point: self.view.point(number, point),
        )
        ending = self._score(standing, paths, trained)
        self.ledger.close_trial(number, ending)
        trial = self.reader.trial(number)
        self.view.trial_ended(trial)
        if trial.score is None:
            raise CheckFailed(f"trial {number} ended {trial.state.value}: {trial.error_text}; see {paths.log}")
        return trial

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
        shutil.rmtree(paths.train)
        return Ending.of_scored(trained=trained, scored=scored, checkpoint_digest=digest)

    # --- where and what ---

    def _incumbent(self) -> Standing:
        incumbent = self.reader.incumbent()
        if incumbent is None:
            raise WrongUse(f"study {self.study.paths.name} has no baseline yet: `overnight run` it first")
        return incumbent

    def _paths(self, who: Who, standing: Standing, budget: Budget) -> ReplayPaths:
        return ReplayPaths(self.study.paths.replay / f"{budget}-{who}-{standing.config.digest[:12]}")

    def _finished(self, standing: Standing, budget: Budget) -> Trial | None:
        for trial in self.reader.trials():
            same = trial.config == standing.config and trial.budget == str(budget)
            if same and trial.replicate == FULL_RUN_REPLICATE and trial.score is not None:
                return trial
        return None


def replay(study: Study, budget: Budget | None, view: View, *, cold: bool = False) -> Reproduction | FullRun:
    """Reproduce the incumbent (no budget), or train it as a full run; the driver's lock is held throughout."""
    with (
        driver_lock(study.paths),
        device_lock(study.device),
        Ledger.open(study.paths.ledger) as ledger,
        Reader(study.paths.ledger) as reader,
        Launcher(bytecode=study.paths.bytecode, mark=study.mark, cold=cold, threads=study.threads) as launcher,
    ):
        recover(study.mark, ledger, reader)
        runner = Replay(study, ledger, reader, launcher, view)
        return runner.reproduce() if budget is None else runner.full_run(budget)


def _reason(failed: Trained | Scored | Failed) -> str:
    return f"{failed.state.value}, {failed.error_text}" if isinstance(failed, Failed) else "a wrong answer"
