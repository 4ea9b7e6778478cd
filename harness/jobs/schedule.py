"""The learning rate as a function of budget progress. No torch: the driver draws it, too."""

from __future__ import annotations

import math
from collections.abc import Callable

from harness.config import Schedule

_DECAYS: dict[str, Callable[[float], float]] = {
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "linear": lambda x: 1 - x,
    "sqrt": lambda x: 1 - math.sqrt(x),
}
"""From 1 to 0 as x goes from 0 to 1."""


def rate_factor(schedule: Schedule, progress: float) -> float:
    """Return the rate at ``progress`` in [0, 1] of the budget, as a share of the peak.

    A linear ramp over the warm-up, a plateau, then the decay to ``final_rate_fraction``: half a cosine (Loshchilov and
    Hutter, arXiv 1608.03983), a line, or 1 - sqrt(x) (Hägele et al., arXiv 2405.18392).
    """
    if progress < schedule.warmup_fraction:
        return progress / schedule.warmup_fraction
    decaying = (1 - schedule.warmup_fraction) * schedule.decay_fraction
    into = progress - (1 - decaying)
    if decaying == 0 or into <= 0:
        return 1.0
    x = min(1.0, into / decaying)
    final = schedule.final_rate_fraction
    return final + (1 - final) * _DECAYS[schedule.shape](x)
