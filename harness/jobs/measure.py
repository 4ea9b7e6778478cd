"""What a model is worth on a split: seen as nothing but a function from tokens to logits."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from frozen.evaluate import Logits, Score, evaluate
from frozen.tokens import EncodedSplit
from harness.jobs.job import EvalSettings


class Preferred(NamedTuple):
    """How well a model tells the better of two answers, against the base it came from."""

    nats: float
    """Sum over all pairs."""
    pairs: int
    right_pairs: int
    pair_nats: tuple[float, ...]

    @property
    def bits_per_pair(self) -> float:
        """The metric of preferences; lower is better, and the base itself has 1."""
        return self.nats / (math.log(2) * self.pairs)


def measure(
    model: torch.nn.Module, split: EncodedSplit, settings: EvalSettings, device: torch.device, *, probes: bool = True
) -> Score:
    """Score a model in evaluation mode under the study's settings; `EvaluationRefused` if it predicts nothing."""
    return evaluate(
        logits_of(model),
        split,
        context=settings.context,
        stride=settings.stride,
        micro_batch=settings.micro_batch,
        device=device,
        probes=probes,
    )


def preferred(policy: Score, reference: Score, settings: EvalSettings) -> Preferred:
    """Return what a policy's scores are worth against those of the base, under the study's own beta."""
    from frozen.preferences import preference_score

    found = preference_score(policy, reference, beta=settings.preference_beta)
    return Preferred(float(found.nats), int(found.pairs), int(found.right_pairs), tuple(map(float, found.pair_nats)))


def logits_of(model: torch.nn.Module) -> Logits:
    """Return the model as a function from tokens [B, T] to logits [B, T, V]; all that an evaluation sees of it."""

    def logits(x_bt: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(input_ids=x_bt, use_cache=False).logits
        return result

    return logits
