"""Config, frozen loader and frozen timer to weights, through ``transformers.Trainer``.

Trainer does the steps (accumulation, precision, clipping, the optimizer), the frozen parts decide what it is fed, when
it stops and how the rate falls. Its own schedules, samplers, logging, evaluation and saving stay off: they count steps
and epochs, and this trial counts budget.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from frozen.evaluate import EvaluationRefused, evaluate
from frozen.loader import Batches
from frozen.timer import Budget, Timer
from frozen.tokens import EncodedSplit
from harness.config import TrialConfig
from harness.jobs import device as devices
from harness.jobs import resume
from harness.jobs.failures import Aborted, Diverged, state_of
from harness.jobs.job import TrainJob
from harness.jobs.model import build_model
from harness.jobs.schedule import rate_factor
from harness.jobs.score import logits_of
from harness.records import CurvePoint, Failed, Trained, TrialState
from harness.sizes import flops_per_token

EXPLODED = 2.0
"""A step's loss above this many times that of guessing, ln(vocabulary), is divergence. A fresh model starts at about
1.0; a spike that recovers was not seen to come near 2."""
_NO_LIMIT = 2**31
_WARMUP_PASSES = {"cpu": 1, "cuda": 3}

OnPoint = Callable[[CurvePoint], None]


def train(job: TrainJob, on_point: OnPoint) -> Trained | Failed:
    """Train one config for its budget and save the model; what the config is to blame for is a `Failed`."""
    began = time.perf_counter()
    budget = Budget.parse(job.budget)
    device = devices.prepare(job.device, job.threads, repeatable=budget.kind != "seconds")
    split = EncodedSplit.load(job.train)
    timer = Timer(
        budget,
        synchronize=devices.synchronizer(device),
        flops_per_token=flops_per_token(job.config, vocabulary=split.vocabulary, base=None),
        tokens_per_step=job.config.batch.tokens_per_step,
    )
    try:
        training = _Training(job, split, timer, device, on_point)
        training.run()
    except (RuntimeError, MemoryError) as error:
        state = state_of(error)
        if state is TrialState.CRASHED:
            raise
        return Failed(
            state=state,
            error_class=type(error).__name__,
            error_text=str(error),
            steps=timer.steps,
            train_seconds=timer.train_seconds,
            wall_seconds=time.perf_counter() - began,
            peak_memory_bytes=devices.peak_memory_bytes(device),
        )
    return Trained(
        steps=timer.steps,
        tokens=timer.tokens,
        parameters=training.model.num_parameters(),
        train_seconds=timer.train_seconds,
        warmup_seconds=training.warmup_seconds,
        wall_seconds=time.perf_counter() - began,
        peak_memory_bytes=devices.peak_memory_bytes(device),
        device=devices.describe(device),
    )


class _Training:
    """One training run: the pieces, in the order in which they are made."""

    def __init__(
        self, job: TrainJob, split: EncodedSplit, timer: Timer, device: torch.device, on_point: OnPoint
    ) -> None:
        self.job, self.timer, self.device, self.on_point = job, timer, device, on_point
        self.guessing = math.log(split.vocabulary)
        self.probe = EncodedSplit.load(job.probe) if job.probe_points else None
        torch.manual_seed(job.seed)
        self.model = build_model(job.config, split.vocabulary, split.separator)
        self.model.to(device)  # type: ignore[arg-type]  # the stub of `to` knows fewer overloads than the method
        self.optimizer = _optimizer(job.config, self.model)
        self.resumed = resume.load(job) if job.resumable else None
        if self.resumed is not None:
            self._go_on_from(self.resumed)
        self.warmup_seconds = self._warm_up(split.vocabulary)
        self.batches = _batches(job, split, skip=timer.steps * job.config.batch.accumulation)

    def _go_on_from(self, state: resume.Resume) -> None:
        self.model.load_state_dict(state.model)
        self.optimizer.load_state_dict(state.optimizer)
        for group in self.optimizer.param_groups:
            group["lr"] = self.job.config.optim.learning_rate  # what the schedule multiplies, not where it had got to
        self.timer.restore(state.timer)

    def _warm_up(self, vocabulary: int) -> float:
        """Run passes that change nothing, so that compiling and allocating cost no budget; return their seconds.

        Beyond the cap they do cost budget: else a config could buy time by compiling.
        """
        batch = self.job.config.batch
        began = time.perf_counter()
        seconds = 0.0
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            tokens = torch.randint(vocabulary, (batch.per_device, batch.sequence_length)).to(self.device)
            for _ in range(_WARMUP_PASSES[self.device.type]):
                if seconds > self.job.warmup_cap_seconds:
                    break
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.job.config.precision == "bf16"):
                    loss = self.model.train()(input_ids=tokens, labels=tokens).loss
                loss.backward()
                devices.synchronizer(self.device)()
                seconds = time.perf_counter() - began
        self.model.zero_grad(set_to_none=True)
        if self.resumed is None:
            self.timer.charge(max(0.0, seconds - self.job.warmup_cap_seconds))
        return seconds

    def run(self) -> None:
        """Train until the budget is spent, then save the model."""
        schedule, timer = self.job.config.schedule, self.timer
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: rate_factor(schedule, timer.midpoint)
        )
        trainer = _FrozenTrainer(self.batches, self.model, _arguments(self.job), self.optimizer, scheduler)
        trainer.add_callback(_Conductor(self, trainer))
        trainer.train()
        _save(self.model, self.job.tokenizer, self.job.folder / "model")
        resume.clear(self.job)


def _optimizer(config: TrialConfig, model: LlamaForCausalLM) -> torch.optim.Optimizer:
    """Return AdamW that decays matrices (the embedding is one) and leaves norms alone."""
    optim = config.optim
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": optim.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=optim.learning_rate, betas=(optim.beta1, optim.beta2), eps=optim.epsilon)


def _batches(job: TrainJob, split: EncodedSplit, *, skip: int) -> Batches:
    config = job.config
    batches = Batches(
        split,
        seed=job.seed,
        sequence_length=config.batch.sequence_length,
        batch_sequences=config.batch.per_device,
        fraction=config.sampling.fraction,
        order=config.sampling.order,
        weights={weight.source: weight.weight for weight in config.sampling.weights},
        temperature=config.sampling.temperature,
        general_fraction=config.sampling.general_fraction,
    )
    batches.skip(skip)
    return batches


def _arguments(job: TrainJob) -> TrainingArguments:
    config = job.config
    return TrainingArguments(
        output_dir=str(job.folder / "tmp"),
        per_device_train_batch_size=config.batch.per_device,
        gradient_accumulation_steps=config.batch.accumulation,
        max_steps=_NO_LIMIT,
        learning_rate=config.optim.learning_rate,
        max_grad_norm=config.optim.max_grad_norm,
        seed=job.seed,
        use_cpu=job.device == "cpu",
        bf16=config.precision == "bf16",
        report_to="none",
        save_strategy="no",
        eval_strategy="no",
        logging_strategy="no",
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        remove_unused_columns=False,
    )


class _Feed:
    """The frozen stream as Trainer wants it. No length, so Trainer counts steps; order and place are the loader's."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for tokens in self._batches:
            yield {"input_ids": tokens, "labels": tokens}


class _FrozenTrainer(Trainer):
    """Trainer that reads the frozen stream and remembers each step's loss and gradient norm."""

    def __init__(
        self,
        batches: Batches,
        model: LlamaForCausalLM,
        arguments: TrainingArguments,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LambdaLR,
    ) -> None:
        super().__init__(model=model, args=arguments, optimizers=(optimizer, scheduler))
        self.remove_callback(PrinterCallback)
        self._feed = _Feed(batches)
        self.step_loss = torch.zeros((), device=arguments.device)
        """Mean loss of the running step so far, nats per token: Trainer divides each part by the step's tokens."""
        self.gradient_norm = torch.zeros((), device=arguments.device)
        """Global norm before clipping."""

    def get_train_dataloader(self) -> Any:
        """Return the frozen stream."""
        return self._feed

    def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """Run one forward and backward pass, and add its share of the step's loss."""
        loss: torch.Tensor = super().training_step(*arguments, **options)
        self.step_loss += loss
        return loss

    def _clip_grad_norm(self, model: Any) -> Any:
        self.gradient_norm = super()._clip_grad_norm(model)  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        return self.gradient_norm

    def floating_point_ops(self, inputs: Any) -> int:
        """Count nothing: Trainer's own count walks over all parameters in every pass, inside the budget."""
        del inputs
        return 0


class _Conductor(TrainerCallback):
    """Keeps the budget, stops what diverges, and reports the curve."""

    def __init__(self, training: _Training, trainer: _FrozenTrainer) -> None:
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
        if loss > EXPLODED * self._training.guessing:
            raise Diverged(f"the loss is {loss:.4g} nats per token {at}; guessing gives {self._training.guessing:.4g}")
        if not math.isfinite(norm):
            raise Diverged(f"the gradient norm is {norm} {at}")
        self._losses.append(loss)
        self._gradient_norm = norm

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> None:
        """Stop the clock before Trainer asks the schedule for the next step's rate: it reads the timer."""
        self._rate = self._training.optimizer.param_groups[0]["lr"]
        self._timer.end_step(self._job.config.batch.tokens_per_step)

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
        """Send a point of the curve, and return its probe score in bits per byte."""
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
            raise Aborted(
                f"the probe is at {probe_score:.4f} bits per byte after {progress:.0%} of the budget,"
                f" above the {wanted.probe_above:g} at which the proposal gives up (from {wanted.after:.0%} on)"
            )

    def _probe(self) -> float:
        """Score the probe split, outside the budget and without a trace: no dropout, so no random number is drawn."""
        training, settings = self._training, self._job.evaluation
        assert training.probe is not None
        training.model.train(False)
        try:
            result = evaluate(
                logits_of(training.model),
                training.probe,
                context=settings.context,
                stride=settings.stride,
                micro_batch=settings.micro_batch,
                device=training.device,
                probes=False,
            )
        except EvaluationRefused as error:
            raise Diverged(f"the probe cannot be scored after step {self._timer.steps}: {error}") from error
        finally:
            training.model.train()
        return result.bits_per_byte

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


def _save(model: LlamaForCausalLM, tokenizer: Path, folder: Path) -> None:
    """Write weights, model config and tokenizer in the standard layout, whole or not at all."""
    aside = folder.with_name(f"{folder.name}.new")
    for leftover in (aside, folder):
        if leftover.exists():
            shutil.rmtree(leftover)
    model.config.use_cache = True  # Trainer turns it off; whoever generates with the model wants it
    model.save_pretrained(aside, max_shard_size="1000GB")
    shutil.copytree(tokenizer, aside, dirs_exist_ok=True)
    aside.replace(folder)
