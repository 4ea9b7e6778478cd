"""Saved weights to a score, in a process that has never run the training job.

Its number is the only one that counts: it belongs to the saved file, not to a live object, and costs no budget.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from frozen.evaluate import EvaluationRefused, Score
from frozen.tokens import EncodedSplit
from harness.jobs import adapters
from harness.jobs import device as devices
from harness.jobs.failures import ConfigRefused, WeightsRefused, state_of
from harness.jobs.job import ScoreJob
from harness.jobs.measure import measure, preferred
from harness.jobs.model import DTYPES, fill, freeze, load_base, load_weights
from harness.records import Failed, Scored
from harness.sizes import BaseFacts


def score(job: ScoreJob) -> Scored | Failed:
    """Score the weights on the splits; what is no prediction, or not the config's model, is ``invalid``."""
    began = time.perf_counter()
    device = devices.prepare(job.device, job.threads, repeatable=True)
    split = EncodedSplit.load(job.split)
    try:
        reference, model = _models(job, split, device)
        if job.weights is None and reference is not None:
            found = reference
        else:
            found = measure(model, split, job.evaluation, device)
        result = _scored(found, reference, job, began)
        if job.guard is None:
            return result
        began = time.perf_counter()
        beside = measure(model, EncodedSplit.load(job.guard), job.evaluation, device)
        return result.model_copy(update={"guard": _scored(beside, None, job, began)})
    except (EvaluationRefused, WeightsRefused, ConfigRefused) as error:
        return Failed(state=state_of(error), error_class=type(error).__name__, error_text=str(error))


def _scored(found: Score, reference: Score | None, job: ScoreJob, began: float) -> Scored:
    """Return a split's score; against ``reference`` where it is one of preferences."""
    pairs = None if reference is None else preferred(found, reference, job.evaluation)
    return Scored(
        nats=found.nats if pairs is None else pairs.nats,
        bytes=found.bytes,
        tokens=found.tokens,
        document_nats=tuple(found.document_nats.tolist()) if pairs is None else pairs.pair_nats,
        score_seconds=time.perf_counter() - began,
        pairs=None if pairs is None else pairs.pairs,
        right_pairs=None if pairs is None else pairs.right_pairs,
    )


def _models(job: ScoreJob, split: EncodedSplit, device: torch.device) -> tuple[Score | None, torch.nn.Module]:
    """Return the base's score, where preferences are scored, and the model that is to be scored."""
    dtype = DTYPES[job.evaluation.precision]
    if job.base is None:
        assert job.weights is not None
        fresh = load_weights(job.config, job.weights, split.vocabulary, split.separator)
        return None, fresh.to(device, dtype)  # type: ignore[arg-type]  # the stub of `to` knows fewer overloads than the method
    reference = _reference(job, job.base, split, device) if job.task == "dpo" else None
    model = load_base(job.base, job.config, device, dtype)
    freeze(model)
    if job.weights is None:
        return reference, model
    if job.config.method == "full":
        fill(model, job.weights)
        return reference, model
    adapted = adapters.load(model, job.config, BaseFacts.read(job.base), job.base, job.weights)
    return reference, adapters.held_in(adapted, dtype, device)


def _reference(job: ScoreJob, base: Path, split: EncodedSplit, device: torch.device) -> Score:
    """Return what the base scores as it is: no config moves what all are compared with, not by holding it in 4 bits."""
    plain = job.config.model_copy(update={"quantization": "none"})
    model = load_base(base, plain, device, DTYPES[job.evaluation.precision])
    freeze(model)
    return measure(model, split, job.evaluation, device)
