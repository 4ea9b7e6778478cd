"""What happens between a trainer's steps: the budget, divergence, the curve, giving up, saving the place."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from frozen.evaluate import EvaluationRefused
from harness.config import Preference
from harness.jobs import resume
from harness.jobs.failures import Aborted, Diverged
from harness.jobs.optimizers import averaged
from harness.records import CurvePoint

if TYPE_CHECKING:
    from harness.jobs.train import Training
    from harness.jobs.trainers import FrozenTrainer

EXPLODED = 2.0
"""A step's loss above this many times that of guessing, ln(vocabulary), is divergence. A fresh model starts at about
1.0; a spike that recovers was not seen to come near 2."""
EXPLODED_PREFERENCE = 20.0
"""The same against the loss that an unchanged model has. Batches of few pairs vary widely, and a model may be surely
wrong about one: wide enough for that."""


def highest_loss(vocabulary: int, preference: Preference | None) -> float:
    """Return the loss of one step above which training has diverged."""
    if preference is None:
        return EXPLODED * math.log(vocabulary)
    # Of a model that equals its reference, all margins being 0. Most losses are sums of ln 2 or of 1/2 there.
    unchanged = 1 / (4 * preference.beta**2) if preference.loss == "ipo" else 1.0
    return EXPLODED_PREFERENCE * unchanged


class Conductor(TrainerCallback):
    """Keeps the budget, stops what diverges, and reports the curve."""

    def __init__(self, training: Training, trainer: FrozenTrainer) -> None:
        self._training, self._trainer = training, trainer
        self._timer, self._job = training.timer, training.job
        self._points = 0 if training.resumed is None else training.resumed.points
        self._last_step_with_point = self._timer.steps
        self._losses: list[float] = []
        self._gradient_norm = 0.0
        self._rate = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        """Put the random generators where the interrupted run had them; Trainer has just seeded them anew."""
        resumed = self._training.resumed
        if resumed is not None:
            torch.set_rng_state(resumed.random)
            if resumed.random_of_device is not None:
                torch.cuda.set_rng_state(resumed.random_of_device)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any) -> None:
        """Start the clock."""
        self._trainer.step_loss.zero_()
        self._timer.begin_step()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        """Stop before a step that diverges reaches the weights."""
        loss, norm = float(self._trainer.step_loss), float(self._trainer.gradient_norm)
        at = f"at step {self._timer.steps + 1}, {self._timer.progress:.0%} of the budget"
        if not math.isfinite(loss):
            raise Diverged(f"the loss is {loss} {at}")
        if loss > self._training.highest_loss:
            raise Diverged(f"the loss is {loss:.4g} {at}; above {self._training.highest_loss:.4g} nothing is learnt")
        if not math.isfinite(norm):
            raise Diverged(f"the gradient norm is {norm} {at}")
        self._losses.append(loss)
        self._gradient_norm = norm

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        """Stop the clock before Trainer asks the schedule for the next step's rate: it reads the timer."""
        self._rate = self._training.optimizer.param_groups[0]["lr"]
        self._timer.end_step(self._trainer.take_tokens())
        self._timer.expect(self._trainer.coming_tokens())

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any) -> None:
        """Report a point at every share of the budget, and end when no further step fits."""
        reached = min(self._job.probe_points, math.floor(self._timer.progress * self._job.probe_points + 1e-9))
        ends = not self._timer.may_begin_step()
        if reached > self._points or (
            ends and self._job.probe_points and self._last_step_with_point < self._timer.steps
        ):
            self._points = max(reached, self._points)
            probe_score = self._report()
            if not ends:
                self._give_up_if(probe_score)
                if self._job.resumable:
                    self._save_place()
        control.should_training_stop = ends

    def _report(self) -> float:
        """Send a point of the curve, and return its probe score."""
        self._last_step_with_point = self._timer.steps
        probe_score = self._probe()
        self._training.on_point(
            CurvePoint(
                progress=self._timer.progress,
                seconds=self._timer.train_seconds,
                step=self._timer.steps,
                train_loss=sum(self._losses) / len(self._losses),
                probe_score=probe_score,
                learning_rate=self._rate,
                gradient_norm=self._gradient_norm,
            )
        )
        self._losses.clear()
        return probe_score

    def _give_up_if(self, probe_score: float) -> None:
        """Hold the proposal to its own condition."""
        wanted, progress = self._job.abort_if, self._timer.progress
        if wanted is not None and progress >= wanted.after and probe_score > wanted.probe_above:
            assert self._training.probe is not None
            raise Aborted(
                f"the probe is at {probe_score:.4f} {self._training.probe.metric} after {progress:.0%} of the budget,"
                f" above the {wanted.probe_above:g} at which the proposal gives up (from {wanted.after:.0%} on)"
            )

    def _probe(self) -> float:
        training = self._training
        assert training.probe is not None
        try:
            return training.probe.score(training.model, averaged(training.optimizer))
        except EvaluationRefused as error:
            raise Diverged(f"the probe cannot be scored after step {self._timer.steps}: {error}") from error

    def _save_place(self) -> None:
        training = self._training
        resume.save(
            self._job,
            model=training.model,
            optimizer=training.optimizer,
            timer=self._timer,
            points=self._points,
            on_gpu=training.device.type == "cuda",
        )
