"""Saved weights to a score, in a process that has never run the training job.

Its number is the only one that counts: it belongs to the saved file, not to a live object, and costs no budget.
"""

from __future__ import annotations

import time

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
    """Score the weights on the split; what is no prediction, or not the config's model, is ``invalid``."""
    began = time.perf_counter()
    device = devices.prepare(job.device, job.threads, repeatable=True)
    split = EncodedSplit.load(job.split)
    try:
        reference, result = _score(job, split, device)
    except (EvaluationRefused, WeightsRefused, ConfigRefused) as error:
        return Failed(state=state_of(error), error_class=type(error).__name__, error_text=str(error))
    found = None if reference is None else preferred(result, reference, job.evaluation)
    return Scored(
        nats=result.nats if found is None else found.nats,
        bytes=result.bytes,
        tokens=result.tokens,
        document_nats=tuple(result.document_nats.tolist()) if found is None else found.pair_nats,
        score_seconds=time.perf_counter() - began,
        pairs=None if found is None else found.pairs,
        right_pairs=None if found is None else found.right_pairs,
    )


def _score(job: ScoreJob, split: EncodedSplit, device: torch.device) -> tuple[Score | None, Score]:
    """Return the scores of the base, where preferences are scored, and of the weights."""
    dtype = DTYPES[job.evaluation.precision]
    if job.base is None:
        assert job.weights is not None
        fresh = load_weights(job.config, job.weights, split.vocabulary, split.separator)
        return None, measure(fresh.to(device, dtype), split, job.evaluation, device)  # type: ignore[arg-type]
    model = load_base(job.base, job.config, device, dtype)
    freeze(model)
    if job.weights is None:
        untouched = measure(model, split, job.evaluation, device)
        return (untouched if job.task == "dpo" else None), untouched
    reference = measure(model, split, job.evaluation, device) if job.task == "dpo" else None
    if job.config.method == "full":
        fill(model, job.weights)
        return reference, measure(model, split, job.evaluation, device)
    adapted = adapters.load(model, job.config, BaseFacts.read(job.base), job.base, job.weights)
    return reference, measure(adapters.held_in(adapted, dtype, device), split, job.evaluation, device)
