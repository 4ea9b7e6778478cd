"""The trainer of a job: a standard one, fed by the frozen loader and silent.

Trainer does the steps (accumulation, precision, clipping, the optimizer), the frozen parts decide what it is fed, when
it stops and how the rate falls. Its own schedules, samplers, logging, evaluation and saving stay off: they count steps
and epochs, and a trial counts budget.

`FrozenTrainer` is ``transformers.Trainer`` with what is ours; `harness.jobs.tuning` puts the same before TRL's two.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PrinterCallback, Trainer, TrainingArguments

from harness.jobs.failures import ConfigRefused
from harness.jobs.feed import Feed
from harness.jobs.job import TrainJob

_NO_LIMIT = 2**31


def common_arguments(job: TrainJob) -> dict[str, Any]:
    """Return what all three trainers are told; each has defaults of its own, so nothing is left to them."""
    config = job.config
    return {
        "output_dir": str(job.folder / "tmp"),
        "per_device_train_batch_size": config.batch.per_device,
        "gradient_accumulation_steps": config.batch.accumulation,
        "max_steps": _NO_LIMIT,
        "learning_rate": config.optim.learning_rate,
        "max_grad_norm": config.optim.max_grad_norm,
        "seed": job.seed,
        "use_cpu": job.device == "cpu",
        "bf16": config.precision == "bf16",
        "activation_checkpointing": config.gradient_checkpointing,
        "neftune_noise_alpha": config.regularization.neftune_alpha or None,
        "report_to": "none",
        "save_strategy": "no",
        "eval_strategy": "no",
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }


class FrozenTrainer(Trainer):
    """Trainer that reads the frozen stream and remembers each step's loss and gradient norm."""

    wants_mask = False
    """Whether a batch without padding must say so."""

    def __init__(self, feed: Feed, **options: Any) -> None:
        super().__init__(**options)
        self.remove_callback(PrinterCallback)
        self._feed = feed
        self.step_loss = torch.zeros((), device=self.args.device)
        """Mean loss of the running step so far: Trainer divides each part by the tokens, or passes, of the step."""
        self.gradient_norm = torch.zeros((), device=self.args.device)
        """Global norm before clipping."""

    @classmethod
    def of(cls, job: TrainJob, feed: Feed, **options: Any) -> FrozenTrainer:
        """Return the trainer with the job's arguments."""
        smoothing = job.config.regularization.label_smoothing
        arguments = TrainingArguments(**common_arguments(job), label_smoothing_factor=smoothing)
        trainer = cls(feed, args=arguments, **options)
        if job.config.batch.accumulation > 1 and not trainer.model_accepts_loss_kwargs:
            # Trainer would then give every pass the same weight, however few trained tokens it holds.
            raise ConfigRefused(
                f"{type(options['model']).__name__} does not take the number of tokens that its loss is to be divided"
                " by, so accumulated passes would be weighted wrongly: set batch.accumulation = 1"
            )
        return trainer

    def get_train_dataloader(self) -> Any:
        """Return the frozen stream."""
        return self._feed

    def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
        """Run one forward and backward pass, and add its share of the step's loss."""
        loss: torch.Tensor = super().training_step(*arguments, **options)
        self.step_loss += loss
        return loss

    def take_tokens(self) -> int:
        """Return what the running step trains on; Trainer draws all batches of a step before it begins."""
        return self._feed.take_tokens()

    def coming_tokens(self) -> int:
        """Return what the next step will train on."""
        return self._feed.coming_tokens(self.args.gradient_accumulation_steps)

    def _clip_grad_norm(self, model: Any) -> Any:
        self.gradient_norm = super()._clip_grad_norm(model)  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        return self.gradient_norm

    def floating_point_ops(self, inputs: Any) -> int:
        """Count nothing: Trainer's own count walks over all parameters in every pass, inside the budget."""
        del inputs
        return 0
