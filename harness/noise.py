"""How much a score moves when only the seed changes. Apart from the judge, so that readers need no scipy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from harness.records import JudgeRules, Noise

PROPOSALS_A_NIGHT = 100
"""The night that `JudgeRules.confidence` speaks of."""
POWER = 0.9


def pool_noise(groups: Iterable[Sequence[float]]) -> Noise | None:
    """Pool the spread within groups of replicates: root of (sum of squares about each group's mean / sum of (n - 1)).

    Every group holds the scores of one config. Groups of one say nothing. None: no group has two scores.
    """
    squares, freedom = 0.0, 0
    for group in groups:
        if len(group) < 2:
            continue
        mean = math.fsum(group) / len(group)
        squares += math.fsum((score - mean) ** 2 for score in group)
        freedom += len(group) - 1
    return Noise(standard_deviation=math.sqrt(squares / freedom), degrees_of_freedom=freedom) if freedom else None


def smallest_provable(noise: Noise, rules: JudgeRules) -> float:
    """Return about the smallest true improvement that is kept nine times in ten, in the study's metric.

    Normal approximation of the last look: ``max_replicates`` shared seeds against the incumbent, one-sided, the night's
    error spread evenly over its proposals.
    """
    from statistics import NormalDist  # two hundredths of a second that `overnight status` does not need

    normal = NormalDist()
    quantiles = normal.inv_cdf(1 - (1 - rules.confidence) / PROPOSALS_A_NIGHT) + normal.inv_cdf(POWER)
    return quantiles * noise.standard_deviation * math.sqrt(2 / rules.max_replicates)
