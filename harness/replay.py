"""The winner as a full run, and the proof that it is one.

First `reproduce`: the incumbent's config with a seed that the search never used, at the search's own budget; it must
land within the noise. On request `ablate`: the same with every kept step taken out in turn. Then `full_run`: the
baseline and the incumbent trained under a larger budget of the owner's.
Where trials go on from their parent's checkpoint, the incumbent is the end of a schedule. It is reproduced from its
parent's checkpoint, and its full run is the whole schedule under the budget (`harness.segments`). The baseline beside
it is trained in one piece, annealing once, because that is what its owner would do with the budget: a schedule of
restarts that does not beat it is worth nothing. How much of a difference is the restarts' doing, it does not say.
Schedules are functions of budget progress, so they are derived anew and not stretched. Both are scored on val and,
once each, on the holdout that nothing has looked at before; every look is an event of the ledger. The untouched base
model looks once per study: it does not change with the budget. An adapter can be merged into its base on request, which
must not move its score. The full run writes
checkpoints at the probe points and goes on from the newest one after ``kill -9``. A winner that does not reproduce is
not trained further.

After an upgrade of the tool a study can still be replayed. What differs is an event, rows carry the seal of what ran,
and only a reproduction by the new tool counts: it is the proof that the new tool gives the old numbers.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection
from dataclasses import asdict, fields
from pathlib import Path
from typing import Literal

from scipy import stats

from frozen.sampling import positions_per_epoch
from frozen.timer import Budget
from frozen.tokens import EncodedSplit
from harness import checkpoints
from harness.ablation import Step, ablation, steps
from harness.card import model_card
from harness.config import TrialConfig
from harness.errors import CheckFailed, WrongUse
from harness.files import write_whole
from harness.finals import CARD, SECONDS_PER_DAY, FinalRunner
from harness.fullrun import (
    FULL_RUN_REPLICATE,
    FullRun,
    FullScores,
    Merge,
    Replayed,
    Reproduction,
    is_full_run,
)
from harness.launch import Launcher
from harness.ledger import Ledger
from harness.locks import device_lock, driver_lock
from harness.orders import as_full, merge_order
from harness.paths import ReplayPaths
from harness.queries import Reader
from harness.records import (
    BASELINE,
    FAILURES,
    Failed,
    Merged,
    Role,
    Scored,
    Standing,
    Trained,
    Trial,
    TrialState,
)
from harness.recovery import recover
from harness.report import words
from harness.study import BYTES_PER_PARAMETER, Study
from harness.upgrade import Tool, tool_of
from harness.view import View

ABLATION_REPLICATES = 3
"""Fresh seeds on which the best config runs with and without each step, as many as the baseline had."""
CHECKPOINT_COPIES = 8
"""Sizes of the weights that a full run needs on the disk: two checkpoints with the optimizer's moments, two models."""
AGREEMENT = 0.99
"""Two-sided confidence at which a reproduction is said to differ."""
REPRODUCED = "reproduced"
"""Kind of the event that a reproduction leaves."""
MERGED = "merged"
"""Kind of the event that a merge leaves."""
Who = Literal["best", "baseline"]


class Replay:
    """Runs replays of one study; a context that owns the study like a search does."""

    def __init__(
        self, study: Study, tool: Tool, ledger: Ledger, reader: Reader, launcher: Launcher, view: View
    ) -> None:
        self.study = study
        self.tool = tool
        self.ledger = ledger
        self.reader = reader
        self.launcher = launcher
        self.view = view
        self.finals = FinalRunner(study, tool, ledger, reader, launcher, view)

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
        trial = self.finals.run(
            incumbent.config,
            incumbent.node,
            self.study.budget,
            replicate,
            paths,
            resumable=False,
            start=incumbent.start,
        )
        _must_be_scored(trial, paths)
        assert trial.score is not None
        quantile = float(stats.t.ppf((1 + AGREEMENT) / 2, noise.degrees_of_freedom))
        found = Reproduction(
            trial=trial.id,
            score=trial.score,
            expected=incumbent.score,
            tolerance=quantile * noise.standard_deviation * math.sqrt(1 + 1 / len(incumbent.scores)),
        )
        text = f"node {incumbent.node} {'reproduces' if found.agrees else 'does NOT reproduce'}: {found}"
        if self.tool.upgrade is not None:
            text += f" ({self.tool.upgrade.versions})"
        self.ledger.event(REPRODUCED, text, {"node": incumbent.node, "agrees": found.agrees} | asdict(found))
        self.view.say(text[0].upper() + text[1:] + ".")
        shutil.rmtree(paths.root)
        return found

    def reproduced(self) -> Reproduction:
        """Return the newest agreeing reproduction of the incumbent by this tool, or run one.

        `CheckFailed`: it does not agree.
        """
        node = self._incumbent().node
        names = [field.name for field in fields(Reproduction)]
        for event in reversed(self.reader.events(REPRODUCED)):
            ours = self.reader.trial(event.data["trial"]).seal == self.tool.seal
            if ours and event.data["node"] == node and event.data["agrees"]:
                return Reproduction(**{name: event.data[name] for name in names})
        found = self.reproduce()
        if not found.agrees:
            raise CheckFailed(
                f"node {node} does not reproduce ({found}), so it is not trained further; replay again to draw"
                " another seed, or go on searching"
            )
        return found

    # --- ablate ---

    def refuse_to_ablate(self) -> None:
        """Raise `WrongUse` where no step can be taken out alone."""
        if self.study.policy.continues:
            raise WrongUse(
                "no step can be taken out: trials of this study go on from their parent's checkpoint, so a step is a"
                " budget of training as well as a change, and every later one was trained on top of it; without"
                " --ablate the schedule is replayed whole"
            )

    def ablate(self) -> tuple[Step, ...]:
        """Run the best config without each step of its lineage, on the seeds of its reproductions.

        A failing run is a result: the step is what keeps training alive. Rows that are there are not run again.
        """
        chain = self.reader.best_lineage()
        if len(chain) < 2:
            raise WrongUse(f"study {self.study.name} has kept no change yet, so there is no step to take out")
        self.reproduced()
        while len(self._shared_replicates()) < ABLATION_REPLICATES:
            self.reproduce()
        for step in steps(chain):
            if step.without is None:
                continue
            done = self._replayed(step.without, unscored=FAILURES)
            for replicate in self._shared_replicates():
                if replicate not in done:
                    self._without(step.node, step.without, replicate)
        found = ablation(chain, self.reader.trials(), self.reader.noise(), str(self.study.budget))
        return found or steps(chain)

    def _shared_replicates(self) -> list[int]:
        """Return the incumbent's replicates that its steps are taken out on: the oldest, the same after a restart."""
        return sorted(self._replayed(self._incumbent().config) - {FULL_RUN_REPLICATE})[:ABLATION_REPLICATES]

    def _replayed(self, config: TrialConfig, unscored: Collection[TrialState] = ()) -> set[int]:
        """Return the replicates that this tool has run of a config at the search's budget, on the machine as it is."""
        wanted = (config, Role.FINAL, str(self.study.budget), self.tool.seal, self.reader.epoch())
        return {
            trial.replicate
            for trial in self.reader.trials()
            if (trial.config, trial.role, trial.budget, trial.seal, trial.epoch) == wanted
            and (trial.score is not None or trial.state in unscored)
        }

    def _without(self, node: int, config: TrialConfig, replicate: int) -> None:
        paths = ReplayPaths(self.study.paths.replay / f"without-{node}")
        shutil.rmtree(paths.root, ignore_errors=True)
        checkpoints.make_room(self.study.paths, self._running(), 2 * self.study.bytes_of(config))
        self.view.say(f"The best config without node {node}:")
        trial = self.finals.run(config, node, self.study.budget, replicate, paths, resumable=False)
        if trial.score is not None:
            shutil.rmtree(paths.root)

    # --- full run ---

    def full_run(self, budget: Budget, *, merge: bool = False) -> FullRun:
        """Train baseline and incumbent under ``budget``; go on where an earlier call with the same budget stopped.

        With ``merge`` an adapter is also made part of its base; `WrongUse` if the incumbent is none.
        """
        incumbent, baseline = self._incumbent(), self.reader.baseline()
        assert baseline is not None
        if merge:
            self.refuse_to_merge()
        self._refuse_other_tools("best", incumbent, budget)
        self._refuse_other_tools("baseline", baseline, budget)
        self._make_room(incumbent, baseline)
        best = self._full_scores("best", incumbent, budget)
        paths = self._paths("best", incumbent, budget)
        run = FullRun(
            budget=str(budget),
            node=incumbent.node,
            best=best,
            baseline=best if incumbent.node == BASELINE else self._full_scores("baseline", baseline, budget),
            model=paths.model,
            base=self._base_scores(),
            segments=len(self._before(incumbent)) + 1,
            merged=self._merged(self.reader.trial(best.trial), paths) if merge else None,
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
            before = self._before(standing)
            schedule = f" in {len(before) + 1} segments, one for each config of the lineage" if before else ""
            name = "baseline" if standing.node == BASELINE else who
            self.view.say(f"Full run of the {name}: node {standing.node}, budget {budget}{schedule}.")
            trial = self.finals.run(
                standing.config,
                standing.node,
                budget,
                FULL_RUN_REPLICATE,
                paths,
                resumable=True,
                start=standing.start,
                before=before,
            )
            _must_be_scored(trial, paths)
        assert trial.score is not None
        self._check_model(trial, paths)
        shutil.rmtree(paths.train, ignore_errors=True)  # left by a death between closing the row and cleaning up
        return self._with_holdout(trial, paths.model, paths.log)

    def _before(self, standing: Standing) -> tuple[Standing, ...]:
        """Return the nodes whose configs are trained before a node's own; none where trials start from the base."""
        if standing.start is None:
            return ()
        chain = self.reader.best_lineage()
        assert chain[-1].node == standing.node
        return chain[:-1]

    def _base_scores(self) -> FullScores | None:
        """Return what the untouched base comes to; None where a fresh model is trained."""
        reference = self.reader.reference()
        if reference is None:
            return None
        return self._with_holdout(reference, None, self.study.paths.trial(reference.id).log)

    def _with_holdout(self, trial: Trial, weights: Path | None, log: Path) -> FullScores:
        assert trial.score is not None
        holdout, accuracy = self._holdout(trial, weights, log)
        return FullScores(
            trial=trial.id,
            val=trial.score,
            val_perplexity=trial.perplexity,
            val_accuracy=trial.accuracy,
            holdout=holdout,
            holdout_accuracy=accuracy,
            guard=trial.guard_score,
        )

    def _refuse_other_tools(self, who: Who, standing: Standing, budget: Budget) -> None:
        """Refuse what another tool has trained to its end: one config, seed and budget has one score.

        Beside a baseline of another tool a difference would mean nothing.
        """
        trial = self._finished(standing, budget)
        if trial is not None and trial.seal != self.tool.seal:
            raise WrongUse(
                f"the {who} was trained for {budget} before the tool changed (trial {trial.id}, in"
                f" {self._paths(who, standing, budget, trial.seal).model}): give another budget to train with this one"
            )

    def _check_model(self, trial: Trial, paths: ReplayPaths) -> None:
        """Refuse a model folder whose files are not those that the trial's score belongs to; its card may change."""
        if checkpoints.digest_of(paths.model, besides=(CARD,)) != trial.checkpoint_digest:
            raise CheckFailed(f"the model in {paths.model} is not the one that trial {trial.id} scored")

    def _holdout(self, trial: Trial, weights: Path | None, log: Path) -> tuple[float, float | None]:
        """Look at the holdout once, and return score and accuracy; later calls get what the ledger has."""
        for event in self.reader.events("holdout_score"):
            if event.data["trial"] == trial.id:
                return float(event.data["score"]), event.data.get("accuracy")
        looks = sum(event.data["trial"] == trial.id for event in self.reader.events("holdout_look")) + 1
        self.ledger.event("holdout_look", f"trial {trial.id} looks at the holdout", {"trial": trial.id, "look": looks})
        scored = self.finals.score(trial.config, weights, "holdout", log)
        if not isinstance(scored, Scored):
            raise CheckFailed(f"the holdout could not be scored: {_reason(scored)}; see {log}")
        found = {"trial": trial.id, "score": scored.score}
        if scored.accuracy is not None:
            found["accuracy"] = scored.accuracy
        self.ledger.event("holdout_score", f"trial {trial.id}: {scored.score:.4f} on the holdout", found)
        return scored.score, scored.accuracy

    # --- merge ---

    def refuse_to_merge(self) -> None:
        """Raise `WrongUse` unless the incumbent is an adapter: only that can be merged into a base."""
        incumbent = self._incumbent()
        if self.study.base is None or incumbent.config.method != "lora":
            what = "a fresh model" if self.study.base is None else "all weights of its base"
            raise WrongUse(f"node {incumbent.node} trains {what}: its full run is a whole model, with nothing to merge")

    def _merged(self, trial: Trial, paths: ReplayPaths) -> Merge:
        """Merge a full run's adapter into its base, whole or not at all, and score the outcome on val."""
        for event in self.reader.events(MERGED):
            if event.data["trial"] == trial.id and paths.merged.exists():
                if checkpoints.digest_of(paths.merged, besides=(CARD,)) != event.data["digest"]:
                    raise CheckFailed(
                        f"the model in {paths.merged} is not the one that trial {trial.id} was merged into"
                    )
                return self._merge(trial, paths, event.data["score"])
        assert self.study.base is not None
        assert trial.score is not None
        checkpoints.make_room(self.study.paths, self._running(), 2 * BYTES_PER_PARAMETER * self.study.base.parameters)
        for left in (paths.merging, paths.merged):
            shutil.rmtree(left, ignore_errors=True)
        self.finals.check_tool()
        job = merge_order(self.study, trial.config, weights=paths.model, folder=paths.merging)
        merged = self.launcher.run(job, log=paths.log, deadline_seconds=SECONDS_PER_DAY)
        if not isinstance(merged, Merged):
            raise CheckFailed(f"the adapter could not be merged: {_reason(merged)}; see {paths.log}")
        model = paths.merging / "model"
        scored = self.finals.score(as_full(trial.config), model, "val", paths.log)
        if not isinstance(scored, Scored):
            raise CheckFailed(f"the merged model could not be scored: {_reason(scored)}; see {paths.log}")
        digest = checkpoints.digest_of(model, besides=(CARD,))
        model.rename(paths.merged)
        shutil.rmtree(paths.merging)
        found = self._merge(trial, paths, scored.score)
        facts = {"trial": trial.id, "score": found.val, "difference": found.difference, "digest": digest}
        self.ledger.event(MERGED, f"trial {trial.id}: {words.merged(found)}", facts)
        return found

    def _merge(self, trial: Trial, paths: ReplayPaths, score: float) -> Merge:
        assert trial.score is not None
        return Merge(
            folder=paths.merged,
            val=score,
            difference=score - trial.score,
            is_unquantized=trial.config.quantization != "none",
        )

    # --- where and what ---

    def _make_room(self, *standings: Standing) -> None:
        """See to it that models and checkpoints fit: weights, and two moments of the optimizer beside them, twice."""
        need = sum(CHECKPOINT_COPIES * self.study.bytes_of(standing.config) for standing in standings)
        checkpoints.make_room(self.study.paths, self._running(), need)

    def _running(self) -> set[int]:
        """Return the trials whose weights the search may still publish."""
        return {trial.id for past in self.reader.running() for trial in past.trials}

    def _incumbent(self) -> Standing:
        incumbent = self.reader.incumbent()
        if incumbent is None:
            raise WrongUse(f"study {self.study.name} has no baseline yet: `overnight run` it first")
        return incumbent

    def _paths(self, who: Who, standing: Standing, budget: Budget, seal: str | None = None) -> ReplayPaths:
        seal = seal or self.tool.seal
        other_seal = None if seal == self.study.seal.digest else seal
        return self.study.paths.full_run(who, str(budget), standing.config.digest, other_seal, standing.start)

    def _finished(self, standing: Standing, budget: Budget) -> Trial | None:
        for trial in self.reader.trials():
            same = (trial.config, trial.start, trial.budget) == (standing.config, standing.start, str(budget))
            if same and is_full_run(trial) and trial.score is not None:
                return trial
        return None


def replay(
    study: Study,
    budget: Budget | None,
    view: View,
    *,
    ablate: bool = False,
    merge: bool = False,
    cold: bool = False,
) -> Replayed:
    """Reproduce the incumbent; then, if asked, take out its steps in turn, and train it as a full run under ``budget``.

    With ``merge`` the full run's adapter is made part of its base as well. The driver's lock is held throughout.

    `CheckFailed`: the winner does not reproduce, or a run failed. `SealBroken`: something sealed has changed that no
    upgrade of the tool explains. `StoppedEarly`: the disk is too full. A `KeyboardInterrupt` (the command line makes
    every signal one) closes the trial's row, and its checkpoints stay.
    """
    with (
        driver_lock(study.paths),
        device_lock(study.device),
        Ledger.open(study.paths.ledger) as ledger,
        Reader(study.paths.ledger) as reader,
    ):
        tool = tool_of(study.seal, thorough=True)
        if tool.upgrade is not None:
            view.say(f"Not the tool that searched: {tool.upgrade}. Scores are compared within one tool only.")
        recover(study.mark, ledger, reader)  # before our own nursery carries the mark that is swept
        with Launcher(bytecode=study.paths.bytecode, mark=study.mark, cold=cold, threads=study.threads) as launcher:
            runner = Replay(study, tool, ledger, reader, launcher, view)
            if merge:
                runner.refuse_to_merge()  # before anything is run for it
            if ablate:
                runner.refuse_to_ablate()
            if budget is None and not ablate:
                return Replayed(reproduction=runner.reproduce(), ablation=None, full=None)
            return Replayed(
                reproduction=runner.reproduced(),
                ablation=runner.ablate() if ablate else None,
                full=runner.full_run(budget, merge=merge) if budget is not None else None,
            )


def budget_of_epochs(study: Study, epochs: float) -> Budget:
    """Return the token budget of ``epochs`` passes over the training split.

    It is the same for baseline and winner, whatever share of the documents their configs read. Rows are laid out as the
    winner's, because conversations and pairs are padded or packed, and padding is charged too.
    """
    with Reader(study.paths.ledger) as reader:
        incumbent = reader.incumbent()
    batch = (study.baseline if incumbent is None else incumbent.config).batch
    pass_positions = positions_per_epoch(
        EncodedSplit.load(study.paths.split("train")),
        sequence_length=batch.sequence_length,
        batch_sequences=batch.per_device,
        packing=batch.packing,
        fraction=1.0,
        order="shuffled",
        weights={},
        temperature=1.0,
        general_fraction=0.0,
    )
    return Budget("tokens", float(math.ceil(epochs * pass_positions)))


def _must_be_scored(trial: Trial, paths: ReplayPaths) -> None:
    if trial.score is None:
        raise CheckFailed(f"trial {trial.id} ended {trial.state.value}: {trial.error_text}; see {paths.log}")


def _reason(failed: Trained | Scored | Merged | Failed) -> str:
    return f"{failed.state.value}, {failed.error_text}" if isinstance(failed, Failed) else "a wrong answer"
