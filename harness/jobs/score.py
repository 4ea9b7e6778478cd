"""Saved weights to a score, in a process that has never run the training job.

Its number is the only one that counts: it belongs to the saved file, not to a live object, and costs no budget.
"""

from __future__ import annotations

import time

import torch
from transformers import LlamaForCausalLM

from frozen.evaluate import EvaluationRefused, Logits, evaluate
from frozen.tokens import EncodedSplit
from harness.jobs import device as devices
from harness.jobs.failures import WeightsRefused, state_of
from harness.jobs.job import ScoreJob
from harness.jobs.model import load_weights
from harness.records import Failed, Scored


def score(job: ScoreJob) -> Scored | Failed:
    """Score the weights on the split; what is no prediction, or not the config's model, is ``invalid``."""
    began = time.perf_counter()
    device = devices.prepare(job.device, job.threads, repeatable=True)
    split = EncodedSplit.load(job.split)
    try:
        assert job.weights is not None
        model = load_weights(job.config, job.weights, split.vocabulary, split.separator)
        model.to(device)  # type: ignore[arg-type]  # the stub of `to` knows fewer overloads than the method
        result = evaluate(
            logits_of(model),
            split,
            context=job.evaluation.context,
            stride=job.evaluation.stride,
            micro_batch=job.evaluation.micro_batch,
            device=device,
        )
    except (EvaluationRefused, WeightsRefused) as error:
        return Failed(state=state_of(error), error_class=type(error).__name__, error_text=str(error))
    return Scored(
        nats=result.nats,
        bytes=result.bytes,
        tokens=result.tokens,
        document_nats=tuple(result.document_nats.tolist()),
        score_seconds=time.perf_counter() - began,
    )


def logits_of(model: LlamaForCausalLM) -> Logits:
    """Return the model as a function from tokens [B, T] to logits [B, T, V]; all that an evaluation sees of it."""

    def logits(x_bt: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(input_ids=x_bt, use_cache=False).logits
        return result

    return logits
