"""The frozen stream as trainers want it: batches of named tensors, without a length, and a count of what they cost."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from frozen.loader import Batches, Examples, Pairs
from frozen.tokens import EncodedSplit
from harness.jobs.job import TrainJob

Named = dict[str, torch.Tensor]


class Feed:
    """Endless batches of the job's task. No length, so Trainer counts steps; order and place are the loader's."""

    def __init__(self, job: TrainJob, split: EncodedSplit, *, skip: int, with_mask: bool) -> None:
        """``with_mask``: say which positions hold tokens also where all do; SFTTrainer insists."""
        self._batches = _batches(job, split, skip=skip)
        self._ahead: deque[tuple[int, Named]] = deque()
        self._with_mask = with_mask
        self._tokens = 0

    def coming_tokens(self, batches: int) -> int:
        """Return what the next batches will cost; they are drawn now and kept until they are asked for."""
        while len(self._ahead) < batches:
            self._ahead.append(next(self._batches))
        return sum(tokens for tokens, _ in itertools.islice(self._ahead, batches))

    def take_tokens(self) -> int:
        """Return the tokens of the batches since the last call."""
        tokens, self._tokens = self._tokens, 0
        return tokens

    def __iter__(self) -> Iterator[Named]:
        return self._named()

    def _named(self) -> Iterator[Named]:
        while True:
            tokens, batch = self._ahead.popleft() if self._ahead else next(self._batches)
            self._tokens += tokens
            if self._with_mask and not batch.keys() & {"attention_mask", "position_ids"}:
                batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            if "labels" in batch:
                # No position predicts the first one. Trainer leaves it out of the count that it divides by only for
                # models that name their loss; so nobody counts it.
                batch["labels"][:, 0] = -100
            yield batch


def _batches(job: TrainJob, split: EncodedSplit, *, skip: int) -> Iterator[tuple[int, Named]]:
    """Yield every batch with the tokens that it costs.

    Plain text that is packed is one stream, whose documents see each other; unpacked, its documents are rows as well.
    """
    config = job.config
    options: dict[str, Any] = {
        "seed": job.seed,
        "sequence_length": config.batch.sequence_length,
        "batch_sequences": config.batch.per_device,
        "fraction": config.sampling.fraction,
        "order": config.sampling.order,
        "weights": {weight.source: weight.weight for weight in config.sampling.weights},
        "temperature": config.sampling.temperature,
        "general_fraction": config.sampling.general_fraction,
    }
    # Padding is masked wherever it lies, so any token will do; the separator is in every vocabulary.
    match job.task:
        case "pretrain" | "continue" if config.batch.packing:
            stream = Batches(split, **options)
            stream.skip(skip)
            return ((x.numel(), {"input_ids": x, "labels": x.clone()}) for x in stream)
        case "pretrain" | "continue" | "sft":
            examples = Examples(split, packing=config.batch.packing, padding=split.separator, **options)
            examples.skip(skip)
            return ((batch.tokens, _present(batch)) for batch in examples)
        case "dpo":
            pairs = Pairs(split, padding=split.separator, **options)
            pairs.skip(skip)
            return ((batch.tokens, _present_pairs(batch)) for batch in pairs)


def _present(batch: Any) -> Named:
    named = {name: getattr(batch, name) for name in ("input_ids", "position_ids", "attention_mask")}
    return {name: tensor for name, tensor in named.items() if tensor is not None} | {"labels": batch.labels.clone()}


def _present_pairs(batch: Any) -> Named:
    return {name: getattr(batch, name) for name in ("input_ids", "attention_mask", "completion_mask")}
