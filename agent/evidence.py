"""What the trials of a history say, in the terms of an engineer: effects of past changes, scores, failures.

Every number here is an observation; what to do about it is decided in `agent.rules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agent.curves import Signals, signals_of
from agent.space import searched, trials
from harness.config import TrialConfig, Value, difference
from harness.records import BREAKS_GUARD, FAILURES, Decision, History, Past, Trial, TrialState

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
    """Score minus its parent's: the judge's estimate where there is one, else the screening run's. None for a config
    that breaks the guard: what it gained is no direction to go on in."""
    pending: bool
    kept: bool
    breaks_guard: bool = False
    """Whether it was turned down for what it forgot, however good its score."""


def effects(history: History) -> list[Effect]:
    """Return the effects of all proposals that became a config, in their order."""
    parents = {standing.node: standing.score_to_beat for standing in history.lineage}
    return [_effect(past, past.config, parents) for past in history.past if past.config is not None]


def breaks_guard(past: Past) -> bool:
    """Tell whether a proposal was turned down for the guard set."""
    return past.verdict is not None and past.verdict.reason.startswith(BREAKS_GUARD)


def forgetful(history: History) -> dict[str, TrialConfig]:
    """Return the configs, by digest, that were turned down for the guard set: as worthless as those that failed."""
    return {past.config.digest: past.config for past in history.past if past.config is not None and breaks_guard(past)}


def scores(history: History) -> dict[str, list[float]]:
    """Return the scores of each config by its digest, one for every seed; only of the machine's current epoch.

    Those that break the guard are left out: their scores are bought with what the base model could do. Where trials go
    on from their parent's checkpoint, see `gains`.
    """
    if history.continues:
        return gains(history)
    epoch = max((trial.epoch for trial in trials(history)), default=0)
    found: dict[str, dict[int, float]] = {}
    for trial in trials(history):
        if trial.score is not None and trial.epoch == epoch:
            found.setdefault(trial.config.digest, {})[trial.replicate] = trial.score
    standings = [*history.lineage, *(s for s in (history.baseline, history.incumbent) if s is not None)]
    for standing in standings:
        found.setdefault(standing.config.digest, {}).update(standing.scores)
    worthless = forgetful(history)
    return {digest: list(values.values()) for digest, values in found.items() if values and digest not in worthless}


def gains(history: History) -> dict[str, list[float]]:
    """Return scores relative to the incumbent's config continued from the same checkpoint, by config digest.

    Where trials go on from their parent's checkpoint, later starts have had more training, so that scores from two
    starts say nothing about each other; what a config gained over going on unchanged does, as far as what is good early
    is good late. Of the machine's current epoch.
    """
    epoch = max((trial.epoch for trial in trials(history)), default=0)
    to_beat = {standing.node: standing.score_to_beat for standing in history.lineage}
    worthless, found = forgetful(history), dict[str, dict[tuple[int, int], float]]()
    for trial in trials(history):
        level = None if trial.start is None else to_beat.get(trial.start)
        if trial.score is not None and level is not None and trial.start is not None and trial.epoch == epoch:
            found.setdefault(trial.config.digest, {})[trial.start, trial.replicate] = trial.score - level
    for standing in history.lineage:
        level = standing.score_to_beat
        if level is None:
            continue
        for replicate, score in standing.to_beat.items():
            found.setdefault(standing.config.digest, {})[standing.node, replicate] = score - level
    return {digest: list(values.values()) for digest, values in found.items() if digest not in worthless}


def failures(history: History) -> dict[str, tuple[TrialConfig, TrialState]]:
    """Return the configs, by digest, that were never scored and failed of their own doing, with how they failed.

    With them those that break the guard: these are ``scored``, and still not worth trying again.
    """
    scored = {trial.config.digest for trial in trials(history) if trial.score is not None}
    return {
        trial.config.digest: (trial.config, trial.state)
        for trial in trials(history)
        if trial.state in FAILURES and trial.config.digest not in scored
    } | {digest: (config, TrialState.SCORED) for digest, config in forgetful(history).items()}


def plateaued(history: History) -> bool:
    """Tell whether none of the last `PLATEAU` decided proposals was kept, whoever made them."""
    verdicts = [past.verdict for past in history.past if past.verdict is not None]
    return len(verdicts) >= PLATEAU and all(verdict.decision is not Decision.KEPT for verdict in verdicts[-PLATEAU:])


def signals(history: History, config: TrialConfig) -> Signals:
    """Return what the newest scored trial of a config shows."""
    trial = telling(history).get(config)
    return Signals() if trial is None else signals_of(trial)


def telling(history: History) -> dict[TrialConfig, Trial]:
    """Return the scored trial of each config that tells most of it: the newest one with a curve."""
    found: dict[TrialConfig, Trial] = {}
    for trial in trials(history):
        if trial.score is None:
            continue
        before = found.get(trial.config)
        if before is None or (bool(trial.curve), trial.id) >= (bool(before.curve), before.id):
            found[trial.config] = trial
    return found


def _effect(past: Past, config: TrialConfig, parents: Mapping[int, float | None]) -> Effect:
    ended = [trial for trial in searched(past.trials) if trial.state in FAILURES or trial.score is not None]
    failed = bool(ended) and all(trial.score is None for trial in ended)
    return Effect(
        number=past.number,
        diff=past.proposal.diff,
        config=config,
        failure=ended[-1].state if failed else None,
        change=None if breaks_guard(past) else _change(past, parents),
        pending=past.verdict is None,
        kept=past.verdict is not None and past.verdict.decision is Decision.KEPT,
        breaks_guard=breaks_guard(past),
    )


def _change(past: Past, parents: Mapping[int, float | None]) -> float | None:
    if past.verdict is not None and past.verdict.difference is not None:
        return past.verdict.difference
    parent = None if past.parent is None else parents.get(past.parent)
    screened = [trial.score for trial in searched(past.trials) if trial.score is not None and trial.replicate == 0]
    return None if parent is None or not screened else screened[0] - parent


def differs_only_in(one: TrialConfig, other: TrialConfig, *names: str) -> bool:
    """Tell whether two configs are equal but for the named knobs."""
    return set(difference(one, other)) <= set(names)
