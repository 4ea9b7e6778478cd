"""TRL's trainers, fed like `FrozenTrainer`: SFTTrainer for its fused output head, DPOTrainer for its losses.

Both would prepare data, cast weights, measure and report home; here they only compute losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from harness.jobs.feed import Feed
from harness.jobs.job import TrainJob
from harness.jobs.trainers import FrozenTrainer, common_arguments

LEAST_SMOOTHING_OF_EXO = 1e-3
"""``exo_pair`` compares with a distribution over the two answers that must not be certain; 1e-3 is what its paper uses
(Ji et al., arXiv 2402.00856)."""


class _Tuned(FrozenTrainer):
    """What both of TRL's trainers must be kept from."""

    def __init__(self, feed: Feed, **options: Any) -> None:
        # Both ask for a data set, to look at its columns and prepare it. What is read is the feed.
        with _adapter_untouched(options["model"]):
            super().__init__(feed, train_dataset=Dataset.from_dict({"input_ids": [[0]]}), **options)

    def _prepare_dataset(self, dataset: Any, *arguments: Any, **options: Any) -> Any:
        del arguments, options
        return dataset

    def _send_telemetry(self) -> None:
        """Tell nobody: a job has no network, and its owner was not asked."""


@contextmanager
def _adapter_untouched(model: torch.nn.Module) -> Iterator[None]:
    """Undo what TRL does to adapters on a 4-bit base: rounded to bf16, they would lose the smallest updates."""
    before = {name: parameter.data for name, parameter in model.named_parameters() if parameter.requires_grad}
    yield
    for name, parameter in model.named_parameters():
        if name in before:
            parameter.data = before[name]


class FrozenSFTTrainer(_Tuned, SFTTrainer):
    """SFTTrainer on the frozen stream: the same loss as `FrozenTrainer`, without ever holding all logits."""

    wants_mask = True

    @classmethod
    def of(cls, job: TrainJob, feed: Feed, **options: Any) -> FrozenTrainer:
        """Return the trainer with the job's arguments."""
        assert job.config.regularization.label_smoothing == 0, "label smoothing needs all logits: take FrozenTrainer"
        arguments = SFTConfig(**common_arguments(job), packing=False, max_length=None)
        tokenizer = AutoTokenizer.from_pretrained(job.tokenizer, local_files_only=True)
        return cls(feed, args=arguments, processing_class=tokenizer, data_collator=_no_collator, **options)


class FrozenDPOTrainer(_Tuned, DPOTrainer):
    """DPOTrainer on the frozen pairs. The reference is the base: the model with its adapter off, or a frozen copy."""

    @classmethod
    def of(cls, job: TrainJob, feed: Feed, **options: Any) -> FrozenTrainer:
        """Return the trainer with the job's arguments; ``ref_model`` is the frozen copy, None with an adapter."""
        preference, smoothing = job.config.preference, job.config.regularization.label_smoothing
        assert preference is not None
        if preference.loss == "exo_pair":
            smoothing = max(smoothing, LEAST_SMOOTHING_OF_EXO)
        arguments = DPOConfig(
            **common_arguments(job),
            beta=preference.beta,
            loss_type=[preference.loss],
            label_smoothing=smoothing,
            max_length=None,
            disable_dropout=False,  # the base's is off already; the adapter's is the config's
        )
        tokenizer = AutoTokenizer.from_pretrained(job.tokenizer, local_files_only=True)
        trainer = cls(feed, args=arguments, processing_class=tokenizer, data_collator=_no_collator, **options)
        if "ref" in getattr(options["model"], "peft_config", {}):
            # DPOTrainer takes an adapter that is there already for one to start from, and would hold the model to that
            # start; without the copy it switches the adapter off.
            options["model"].delete_adapter("ref")
        return trainer


def _no_collator(examples: list[Mapping[str, Any]]) -> Any:
    raise AssertionError("batches come from the feed, whole")
