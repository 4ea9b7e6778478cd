"""The score at a probe point: in the study's metric, outside the budget, and without a trace."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from frozen.evaluate import Score
from frozen.tokens import EncodedSplit
from harness.jobs.job import TrainJob
from harness.jobs.measure import measure, preferred


class Probe:
    """Scores the model that is trained on the probe split.

    ``reference`` measures the base model, against which preferences are scored. It is asked once, before any budget is
    spent.
    """

    def __init__(self, job: TrainJob, device: torch.device, *, reference: Callable[[Probe], Score] | None) -> None:
        self._settings, self._device = job.evaluation, device
        self._split = EncodedSplit.load(job.probe)
        self.metric = "bits per byte" if reference is None else "bits per pair"
        self._reference = None if reference is None else reference(self)

    def measure(self, model: torch.nn.Module) -> Score:
        """Score a model; no dropout, so no random number is drawn, and it trains on afterwards as if nothing was."""
        was_training = model.training
        model.train(False)
        try:
            return measure(model, self._split, self._settings, self._device, probes=False)
        finally:
            model.train(was_training)

    def score(self, model: torch.nn.Module, as_it_is_used: AbstractContextManager[None]) -> float:
        """Return the model's score in the study's metric; `EvaluationRefused` if it predicts nothing."""
        with as_it_is_used:
            result = self.measure(model)
        if self._reference is None:
            return result.bits_per_byte
        return preferred(result, self._reference, self._settings).bits_per_pair
