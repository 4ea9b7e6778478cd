"""What a learning curve shows, in the terms of an engineer; what to do about it is decided in `agent.rules`.

Train loss is counted in nats per token and the probe in bits per byte. A scored trial gives the exchange rate away, its
score in bits per byte and its perplexity per token being the same nats: so the gap between the two can be told. Of
preference pairs it cannot: a training loss under another beta is no other unit of the score.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.records import CurvePoint, Trial

STILL_FALLING = 0.12
"""Share of the whole fall of the probe loss that happens in the last third, from which on the run was short."""
FLAT = 0.02
"""Share up to which the last third brought nothing."""
REBOUND = 0.005
"""Relative rise of the probe loss over its minimum that counts as overfitting."""
SPIKE = 0.03
"""Relative rise of the train loss from one point to the next that counts as a spike."""
LOOKS = (0.1, 0.25, 0.5, 0.75, 1.0)
"""Shares of the budget at which the probe is shown: an ``abort_if`` needs something to compare with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Signals:
    """What a trial and its curve show; None where they do not tell."""

    steps: int | None = None
    tokens_per_parameter: float | None = None
    tokens_per_second: float | None = None
    peak_memory_bytes: int | None = None
    still_falling: bool | None = None
    late_share: float | None = None
    """Share of the probe's whole fall that happened in the last third; negative if it rose there."""
    overfitting: bool | None = None
    spikes: bool | None = None
    spikes_at: tuple[float, ...] = ()
    """Progress at which the train loss jumped."""
    gap_bits_per_byte: float | None = None
    """Probe minus train loss at the end; the train loss is a mean since the last point, so this is a little small."""
    median_gradient_norm: float | None = None
    last_gradient_norm: float | None = None
    clipped_share: float | None = None
    """Share of the points at which the gradient was above the clip."""
    probes: tuple[float | None, ...] = field(default=(None,) * len(LOOKS))
    """Score of the probe at the last point up to each of `LOOKS`."""

    @property
    def flat(self) -> bool | None:
        """Tell whether the last third brought hardly anything."""
        return None if self.late_share is None else abs(self.late_share) <= FLAT


def signals_of(trial: Trial) -> Signals:
    """Return what one trial shows."""
    probes = [(p.progress, p.probe_score) for p in trial.curve if p.probe_score is not None]
    losses = [(p.progress, p.train_loss) for p in trial.curve if p.train_loss is not None]
    norms = [p.gradient_norm for p in trial.curve if p.gradient_norm is not None and math.isfinite(p.gradient_norm)]
    late = _late_share(probes)
    jumps = tuple(b for (_, one), (b, two) in itertools.pairwise(losses) if two > one * (1 + SPIKE))
    enough = len(norms) >= 3
    return Signals(
        steps=trial.steps,
        tokens_per_parameter=_ratio(trial.tokens, trial.parameters),
        tokens_per_second=_ratio(trial.tokens, trial.train_seconds),
        peak_memory_bytes=trial.peak_memory_bytes,
        still_falling=None if len(probes) < 4 else late is not None and late > STILL_FALLING,
        late_share=late,
        overfitting=_overfitting([value for _, value in probes], [value for _, value in losses]),
        spikes=None if len(losses) < 3 else bool(jumps),
        spikes_at=jumps,
        gap_bits_per_byte=_gap(trial, probes, losses),
        median_gradient_norm=statistics.median(norms) if enough else None,
        last_gradient_norm=norms[-1] if enough else None,
        clipped_share=sum(n > trial.config.optim.max_grad_norm for n in norms) / len(norms) if enough else None,
        probes=tuple(_probe_at(trial.curve, look) for look in LOOKS),
    )


def _ratio(amount: float | None, of: float | None) -> float | None:
    return None if amount is None or not of else amount / of


def _late_share(probes: Sequence[tuple[float, float]]) -> float | None:
    late = [value for progress, value in probes if progress <= 2 / 3]
    if len(probes) < 4 or not late:
        return None
    whole = probes[0][1] - probes[-1][1]
    return (late[-1] - probes[-1][1]) / whole if whole > 0 else None


def _overfitting(probes: Sequence[float], losses: Sequence[float]) -> bool | None:
    if len(probes) < 3 or len(losses) < 2:
        return None
    return probes[-1] > min(probes) * (1 + REBOUND) and losses[-1] < losses[-2]


def _gap(trial: Trial, probes: Sequence[tuple[float, float]], losses: Sequence[tuple[float, float]]) -> float | None:
    if not (probes and losses and trial.score and trial.perplexity and trial.perplexity > 1):
        return None
    return probes[-1][1] - losses[-1][1] * trial.score / math.log(trial.perplexity)


def _probe_at(curve: Sequence[CurvePoint], look: float) -> float | None:
    """Return the probe at the last point up to ``look`` of the budget; the end may fall short of it by half a step."""
    upto = [p for p in curve if p.probe_score is not None and (p.progress <= look + 0.005 or look == 1)]
    return upto[-1].probe_score if upto else None
