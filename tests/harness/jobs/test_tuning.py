"""Training of base models, by task, method, quantization and kind of model, on stand-ins."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from harness.config import Value
from harness.jobs.job import TrainJob
from harness.jobs.score import score
from harness.jobs.train import train
from harness.records import CurvePoint, Failed, Scored, Trained, TrialState
from tests.harness.jobs.conftest import score_of

Tune = Callable[..., TrainJob]
ALL = [
    ("continue", "full", "none"),
    ("continue", "lora", "none"),
    ("continue", "lora", "nf4"),
    ("sft", "full", "none"),
    ("sft", "lora", "none"),
    ("sft", "lora", "nf4_double"),
    ("dpo", "full", "none"),
    ("dpo", "lora", "none"),
    ("dpo", "lora", "nf4"),
]


def done(job: TrainJob, points: list[CurvePoint] | None = None) -> Trained:
    result = train(job, [].append if points is None else points.append)
    assert isinstance(result, Trained), result
    return result


def scored(job: TrainJob, *, untouched: bool = False) -> Scored:
    result = score(score_of(job, untouched=untouched))
    assert isinstance(result, Scored), result
    return result


def saved(job: TrainJob) -> dict[str, torch.Tensor]:
    (file,) = (job.folder / "model").glob("*.safetensors")
    tensors: dict[str, torch.Tensor] = load_file(file)
    return tensors


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize(("task", "method", "quantization"), ALL)
def test_training_is_repeatable_and_better_than_nothing(
    tune: Tune, task: str, method: str, quantization: str, kind: str
) -> None:
    """Some steps beat the untouched base on text nobody trained on; the same order again gives the same bits."""
    diff = {"quantization": quantization}
    jobs = [tune(task, method, diff, kind=kind, name=name) for name in ("one", "two")]
    points: list[CurvePoint] = []
    first = done(jobs[0], points)
    second = done(jobs[1])
    assert (first.steps, first.tokens, first.parameters) == (second.steps, second.tokens, second.parameters)
    assert first.steps > 2
    one, two = map(saved, jobs)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert all(tensor.dtype == torch.float32 for tensor in one.values())
    after, before = scored(jobs[0]), scored(jobs[0], untouched=True)
    assert after.score < before.score
    assert [point.progress > 0.4 for point in points] == [True, True]
    assert points[-1].probe_score is not None
    if task == "dpo":
        assert before.score == pytest.approx(1.0)
        assert (after.pairs, len(after.document_nats)) == (6, 6)
        assert points[-1].probe_score < 1.0
