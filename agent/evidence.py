"""What the trials of a history say, in the terms of an engineer: effects of past changes, and signals of a curve.

Every number here is an observation; what to do about it is decided in `agent.rules`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent.space import trials
from harness.config import TrialConfig, Value, difference
from harness.records import FAILURES, CurvePoint, Decision, History, Past, Trial, TrialState

STILL_FALLING = 0.12
"""Share of the whole fall of the probe loss that happens in the last third, from which on the run was short."""
REBOUND = 0.005
"""Relative rise of the probe loss over its minimum that counts as overfitting."""
SPIKE = 0.03
"""Relative rise of the train loss from one point to the next that counts as a spike."""
PLATEAU = 12
"""Decided proposals in a row without a kept one that count as a plateau. While one in five is kept, as early in a
night, that happens by chance seven times in a hundred."""


@dataclass(frozen=True, slots=True)
class Effect:
    """What one past proposal did to the score."""

    number: int
    diff: Mapping[str, Value]
    config: TrialConfig
    failure: TrialState | None
    """How all of its trials failed, the last one's state; None if one was scored or none has ended."""
    change: float | None
    """Score minus its parent's: the judge's estimate where there is one, else the screening run's."""
    pending: bool
    kept: bool


@dataclass(frozen=True, slots=True)
class Signals:
    """What the curve of a config shows; None where its trials do not tell."""

    steps: int | None
    tokens_per_parameter: float | None
    still_falling: bool | None
    overfitting: bool | None
    spikes: bool | None
    clipped_share: float | None


def effects(history: History) -> list[Effect]:
    """Return the effects of all proposals that became a config, in their order."""
    return [_effect(history, past, past.config) for past in history.past if past.config is not None]


def scores(history: History) -> dict[str, list[float]]:
    """Return the scores of each config by its digest, one for every seed; only of the machine's current epoch."""
    epoch = max((trial.epoch for trial in trials(history)), default=0)
    found: dict[str, dict[int, float]] = {}
    for trial in trials(history):
        if trial.score is not None and trial.epoch == epoch:
            found.setdefault(trial.config.digest, {})[trial.replicate] = trial.score
    standings = [*history.lineage, *(s for s in (history.baseline, history.incumbent) if s is not None)]
    for standing in standings:
        found.setdefault(standing.config.digest, {}).update(standing.scores)
    return {digest: list(values.values()) for digest, values in found.items() if values}


def failures(history: History) -> dict[str, tuple[TrialConfig, TrialState]]:
    """Return the configs, by digest, that were never scored and failed of their own doing, with how they failed."""
    scored = {trial.config.digest for trial in trials(history) if trial.score is not None}
    return {
        trial.config.digest: (trial.config, trial.state)
        for trial in trials(history)
        if trial.state in FAILURES and trial.config.digest not in scored
    }


def plateaued(history: History) -> bool:
    """Tell whether none of the last `PLATEAU` decided proposals was kept, whoever made them."""
    verdicts = [past.verdict for past in history.past if past.verdict is not None]
    return len(verdicts) >= PLATEAU and all(verdict.decision is not Decision.KEPT for verdict in verdicts[-PLATEAU:])


def signals(history: History, config: TrialConfig) -> Signals:
    """Return what the newest scored trial of a config shows."""
    mine = [trial for trial in trials(history) if trial.score is not None and trial.config.digest == config.digest]
    if not mine:
        return Signals(None, None, None, None, None, None)
    trial = max(mine, key=lambda trial: (bool(trial.curve), trial.id))
    probes = [point.probe_bits_per_byte for point in trial.curve if point.probe_bits_per_byte is not None]
    losses = [point.train_loss for point in trial.curve if point.train_loss is not None]
    return Signals(
        steps=trial.steps,
        tokens_per_parameter=_ratio(trial),
        still_falling=_still_falling(trial.curve),
        overfitting=_overfitting(probes, losses),
        spikes=None if len(losses) < 3 else any(b > a * (1 + SPIKE) for a, b in itertools.pairwise(losses)),
        clipped_share=_clipped_share(trial),
    )


def _effect(history: History, past: Past, config: TrialConfig) -> Effect:
    ended = [trial for trial in past.trials if trial.state in FAILURES or trial.score is not None]
    failed = bool(ended) and all(trial.score is None for trial in ended)
    return Effect(
        number=past.number,
        diff=past.proposal.diff,
        config=config,
        failure=ended[-1].state if failed else None,
        change=_change(history, past),
        pending=past.verdict is None,
        kept=past.verdict is not None and past.verdict.decision is Decision.KEPT,
    )


def _change(history: History, past: Past) -> float | None:
    if past.verdict is not None and past.verdict.difference is not None:
        return past.verdict.difference
    parents = {standing.node: standing.score for standing in history.lineage}
    parent = None if past.parent is None else parents.get(past.parent)
    screened = [trial.score for trial in past.trials if trial.score is not None and trial.replicate == 0]
    return None if parent is None or not screened else screened[0] - parent


def _ratio(trial: Trial) -> float | None:
    return None if trial.tokens is None or not trial.parameters else trial.tokens / trial.parameters


def _still_falling(curve: tuple[CurvePoint, ...]) -> bool | None:
    points = [(point.progress, point.probe_bits_per_byte) for point in curve if point.probe_bits_per_byte is not None]
    if len(points) < 4:
        return None
    late = [value for progress, value in points if progress <= 2 / 3]
    whole = points[0][1] - points[-1][1]
    if not late or whole <= 0:
        return False
    return (late[-1] - points[-1][1]) / whole > STILL_FALLING


def _overfitting(probes: Sequence[float], losses: Sequence[float]) -> bool | None:
    if len(probes) < 3 or len(losses) < 2:
        return None
    return probes[-1] > min(probes) * (1 + REBOUND) and losses[-1] < losses[-2]


def _clipped_share(trial: Trial) -> float | None:
    norms = [point.gradient_norm for point in trial.curve if point.gradient_norm is not None]
    norms = [norm for norm in norms if math.isfinite(norm)]
    if len(norms) < 3:
        return None
    return sum(norm > trial.config.optim.max_grad_norm for norm in norms) / len(norms)


def differs_only_in(one: TrialConfig, other: TrialConfig, *names: str) -> bool:
    """Tell whether two configs are equal but for the named knobs."""
    return set(difference(one, other)) <= set(names)
