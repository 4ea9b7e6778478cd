"""Config, frozen loader and frozen timer to weights, through a standard trainer."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from frozen.evaluate import EvaluationRefused, Score
from frozen.timer import Budget, Timer
from frozen.tokens import EncodedSplit
from harness.jobs import adapters, resume
from harness.jobs import device as devices
from harness.jobs.adapters import Adapted
from harness.jobs.conductor import Conductor, highest_loss
from harness.jobs.failures import ConfigRefused, WeightsRefused, state_of
from harness.jobs.feed import Feed
from harness.jobs.job import TrainJob
from harness.jobs.model import DTYPES, build_model, fill, freeze, load_base, save_full, without_dropout
from harness.jobs.optimizers import averaged, make_optimizer
from harness.jobs.packing import refuse_unless_kept_apart
from harness.jobs.probe import Probe
from harness.jobs.schedule import rate_factor
from harness.jobs.trainers import FrozenTrainer
from harness.jobs.weights import write_whole
from harness.records import CurvePoint, Failed, Trained, TrialState
from harness.sizes import BaseFacts, RowLengths, flops_per_token, packs, parameters, rows_each, widest_row

_WARMUP_PASSES = {"cpu": 1, "cuda": 3}

OnPoint = Callable[[CurvePoint], None]


def train(job: TrainJob, on_point: OnPoint) -> Trained | Failed:
    """Train one config for its budget and save the model; what the config is to blame for is a `Failed`."""
    began = time.perf_counter()
    budget = Budget.parse(job.budget)
    device = devices.prepare(job.device, job.threads, repeatable=budget.kind != "seconds")
    split = EncodedSplit.load(job.train)
    facts = None if job.base is None else BaseFacts.read(job.base)
    timer = Timer(
        budget,
        synchronize=devices.synchronizer(device),
        flops_per_token=flops_per_token(job.config, vocabulary=split.vocabulary, base=facts),
    )
    try:
        training = Training(job, split, timer, device, on_point)
        training.run()
    except (RuntimeError, MemoryError, ConfigRefused, WeightsRefused, EvaluationRefused) as error:
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
        parameters=parameters(job.config, vocabulary=split.vocabulary, base=facts),
        train_seconds=timer.train_seconds,
        warmup_seconds=training.warmup_seconds,
        wall_seconds=time.perf_counter() - began,
        peak_memory_bytes=devices.peak_memory_bytes(device),
        device=devices.describe(device),
    )


class Training:
    """One training run: the pieces, in the order in which they are made."""

    def __init__(
        self, job: TrainJob, split: EncodedSplit, timer: Timer, device: torch.device, on_point: OnPoint
    ) -> None:
        self.job, self.timer, self.device, self.on_point = job, timer, device, on_point
        self._split = split
        self.highest_loss = highest_loss(split.vocabulary, job.config.preference if job.task == "dpo" else None)
        _check(job)
        torch.manual_seed(job.seed)
        self.adapted: Adapted | None = None
        self.model = self._base() if job.base is not None else self._fresh(split)
        if job.task == "sft" and packs(job.config):  # packed text is one stream, whose documents do see each other
            refuse_unless_kept_apart(
                self.model,
                rows=job.config.batch.per_device,
                vocabulary=split.vocabulary,
                separator=split.separator,
                device=device,
            )
        self.reference = self._reference()
        self.probe = self._probe() if job.probe_points else None
        self.optimizer = make_optimizer(job.config, self.model, device)
        self.resumed = resume.load(job) if job.resumable else None
        if self.resumed is not None:
            self._go_on_from(self.resumed)
        self.warmup_seconds = self._warm_up()

    def _fresh(self, split: EncodedSplit) -> torch.nn.Module:
        model = build_model(self.job.config, split.vocabulary, split.separator)
        if self.job.start is not None:
            fill(model, self.job.start)
        if self.job.config.gradient_checkpointing:
            model.activation_checkpointing_enable()
        model.to(self.device)  # type: ignore[arg-type]  # the stub of `to` knows fewer overloads than the method
        return model

    def _base(self) -> torch.nn.Module:
        """Return the base model, or what another trial made of it, ready to be trained."""
        job, config = self.job, self.job.config
        assert job.base is not None
        frozen = config.method == "lora"
        model = load_base(job.base, config, self.device, DTYPES[config.precision if frozen else "fp32"])
        if job.task == "dpo":
            without_dropout(model)  # the reference has none, and both must give the same where nothing was learnt
        if config.gradient_checkpointing:
            model.activation_checkpointing_enable()
            if frozen:
                model.enable_input_require_grads()  # type: ignore[no-untyped-call]  # else nothing before the first adapter asks for a gradient
        if not frozen:
            if job.start is not None:
                fill(model, job.start)
            return model
        facts = BaseFacts.read(job.base)
        self.adapted = (
            adapters.attach(model, config, facts, job.base)
            if job.start is None
            else adapters.go_on(model, config, facts, job.base, job.start)
        )
        self.adapted.model.to(self.device)
        return self.adapted.model

    def _reference(self) -> torch.nn.Module | None:
        """Return the frozen copy of the base that preferences are trained against, None if the adapter has an off."""
        job = self.job
        if job.task != "dpo" or self.adapted is not None:
            return None
        assert job.base is not None
        model = load_base(job.base, job.config, self.device, DTYPES[job.config.precision])
        freeze(model)
        return model

    def _probe(self) -> Probe:
        return Probe(self.job, self.device, reference=self._measure_reference if self.job.task == "dpo" else None)

    def _measure_reference(self, probe: Probe) -> Score:
        if self.reference is not None:
            return probe.measure(self.reference)
        assert self.adapted is not None
        with self.adapted.model.disable_adapter():
            return probe.measure(self.adapted.model)

    def _go_on_from(self, state: resume.Resume) -> None:
        resume.restore(self.model, state.model)
        self.optimizer.load_state_dict(state.optimizer)
        for group in self.optimizer.param_groups:
            group["lr"] = self.job.config.optim.learning_rate  # what the schedule multiplies, not where it had got to
        self.timer.restore(state.timer)

    def _warm_up(self) -> float:
        """Run passes that change nothing, so that compiling and allocating cost no budget; return their seconds.

        Rows are as wide as the widest that will come: a longer one would need memory that training does not. Beyond the
        cap they do cost budget: else a config could buy time by compiling.
        """
        config, split = self.job.config, self._split
        lengths = None if packs(config) else RowLengths.of(split)
        shape = (config.batch.per_device * rows_each(config), widest_row(config, lengths))
        began = time.perf_counter()
        seconds = 0.0
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            tokens = torch.randint(split.vocabulary, shape).to(self.device)
            for _ in range(_WARMUP_PASSES[self.device.type]):
                if seconds > self.job.warmup_cap_seconds:
                    break
                with torch.autocast(self.device.type, torch.bfloat16, enabled=config.precision == "bf16"):
                    loss = self.model.train()(input_ids=tokens, labels=tokens, use_cache=False).loss
                loss.backward()
                devices.synchronizer(self.device)()
                seconds = time.perf_counter() - began
        self.model.zero_grad(set_to_none=True)
        if self.resumed is None:
            self.timer.charge(max(0.0, seconds - self.job.warmup_cap_seconds))
        return seconds

    def trainer(self, kind: type[FrozenTrainer] | None = None) -> FrozenTrainer:
        """Return the trainer of this task on this device, or one of another kind that should do the same."""
        job, schedule, timer = self.job, self.job.config.schedule, self.timer
        kind = kind or trainer_kind(job, self.device)
        accumulation = job.config.batch.accumulation
        feed = Feed(job, self._split, skip=timer.steps * accumulation, with_mask=kind.wants_mask)
        timer.expect(feed.coming_tokens(accumulation))  # the scheduler asks for the first step's rate at once
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: rate_factor(schedule, timer.midpoint)
        )
        options = {"ref_model": self.reference} if job.task == "dpo" else {}
        trainer = kind.of(job, feed, model=self.model, optimizers=(self.optimizer, scheduler), **options)
        trainer.add_callback(Conductor(self, trainer))
        return trainer

    def run(self) -> None:
        """Train until the budget is spent, then save the model."""
        self.trainer().train()
        with averaged(self.optimizer):
            self._save()
        resume.clear(self.job)

    def _save(self) -> None:
        model, adapted = self.model, self.adapted

        def write(folder: Path) -> None:
            if adapted is not None:
                adapted.save(folder)
            else:
                save_full(model, folder)  # type: ignore[arg-type]

        write_whole(self.job.folder / "model", self.job.tokenizer, write)


def trainer_kind(job: TrainJob, device: torch.device) -> type[FrozenTrainer]:
    """Return the trainer that a job gets.

    SFTTrainer never holds all logits at once, which pays on a GPU and costs time on a CPU (1.6 times a step of a small
    model). Label smoothing needs them all, and a fresh model's vocabulary is small.
    """
    if job.task == "dpo":
        from harness.jobs.tuning import FrozenDPOTrainer

        return FrozenDPOTrainer
    if device.type == "cuda" and job.task != "pretrain" and job.config.regularization.label_smoothing == 0:
        from harness.jobs.tuning import FrozenSFTTrainer

        return FrozenSFTTrainer
    return FrozenTrainer


def _check(job: TrainJob) -> None:
    """Refuse what the task and the config do not agree about."""
    config = job.config
    if (job.base is None) != (job.task == "pretrain") or (config.model is None) == (job.base is None):
        raise ConfigRefused(
            f"task {job.task!r} {'with' if job.base else 'without'} a base model and"
            f" {'with' if config.model else 'without'} the shape of a fresh one: pretraining has a shape and no base,"
            " every other task a base and no shape"
        )
    if job.task != "dpo":
        return
    if config.preference is None:
        raise ConfigRefused("task 'dpo' needs preference.beta and preference.loss")
