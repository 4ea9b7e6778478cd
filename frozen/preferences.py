"""How well preference pairs are told apart: bits per pair of a model against the base that it started from.

The loss of direct preference optimisation (Rafailov et al., arXiv 2305.18290, equation 7) under a beta of the study's:
for each pair -log sigmoid(beta × margin), where the margin is how much more likely the model has made the chosen answer
than the base held it, minus the same for the rejected one, in nats over the answers' tokens. The base itself has a
margin of 0 everywhere, and so ln 2 nats, one bit, per pair; lower is better. No torch here: scores come in, numbers go
out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # it imports torch, which whoever only adds up does not need
    from frozen.evaluate import Score


@dataclass(frozen=True, slots=True, eq=False)
class PreferenceScore:
    """How well a split of pairs was told apart."""

    nats: float
    """Sum over all pairs."""
    pairs: int
    right_pairs: int
    """Pairs with a margin above 0, and half of those, rounded down, with a margin of exactly 0."""
    pair_nats: npt.NDArray[np.float64]
    """[pairs], in the order of the split; sums to `nats`."""

    @property
    def bits_per_pair(self) -> float:
        """The study's metric; lower is better, 1 is what the base has."""
        return self.nats / (math.log(2) * self.pairs)

    @property
    def accuracy(self) -> float:
        """Share of the pairs that are told apart the right way; the base has about a half."""
        return self.right_pairs / self.pairs


def preference_score(policy: Score, reference: Score, *, beta: float) -> PreferenceScore:
    """Compare a model's score of a split of pairs with its base's score of the same split.

    ``document_nats`` of both are in the order of the split: documents 2 i and 2 i + 1 are the chosen and the rejected
    answer. `ValueError` if the two are not scores of one split of pairs, or ``beta`` is not positive and finite.
    """
    if not (math.isfinite(beta) and beta > 0):
        raise ValueError(f"the beta of the preference score must be positive and finite, got {beta}")
    shapes = policy.document_nats.shape, reference.document_nats.shape
    if shapes[0] != shapes[1] or (policy.tokens, policy.bytes) != (reference.tokens, reference.bytes):
        raise ValueError(
            f"the model was scored on {policy.document_nats.size} documents ({policy.tokens} tokens,"
            f" {policy.bytes} bytes), its base on {reference.document_nats.size} ({reference.tokens} tokens,"
            f" {reference.bytes} bytes): they are not scores of one split"
        )
    if len(shapes[0]) != 1 or not shapes[0][0] or shapes[0][0] % 2:
        raise ValueError(f"{policy.document_nats.size} scored documents are not chosen and rejected answers in pairs")
    gained = reference.document_nats - policy.document_nats  # log-probabilities are negative nats
    if not np.isfinite(gained).all():
        raise ValueError("a document's nats are not finite: such a score is no score")
    margin = gained[0::2] - gained[1::2]
    pair_nats: npt.NDArray[np.float64] = np.logaddexp(0.0, -beta * margin)  # softplus: no overflow at any margin
    return PreferenceScore(
        nats=math.fsum(pair_nats),
        pairs=len(margin),
        right_pairs=int((margin > 0).sum()) + int((margin == 0).sum()) // 2,
        pair_nats=pair_nats,
    )
