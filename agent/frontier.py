"""Where configs fail: the edge of the memory, and what else went wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.memory import Gauge
from harness.records import FAILURES, Trial, TrialState
from harness.sizes import RowLengths, rows_each, widest_row

MOST_POINTS = 4
"""Configs shown on each side of the memory's edge."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a trial asks of the memory."""

    trial: Trial
    pass_tokens: int
    """Most positions of one forward pass: rows per device times the longest's width. What activations grow with."""
    parameters: int | None
    held_bytes: int | None = None
    """What the config holds by its estimate; asked for base models, where tokens and parameters do not tell (adapters,
    4 bits, checkpointing)."""

    def within(self, other: Load) -> bool:
        """Tell whether this asks for no more than the other in every respect that is known of both."""
        if self.held_bytes is not None and other.held_bytes is not None:
            return self.held_bytes <= other.held_bytes
        if self.parameters is None or other.parameters is None:
            return self.trial.config.model == other.trial.config.model and self.pass_tokens <= other.pass_tokens
        return self.pass_tokens <= other.pass_tokens and self.parameters <= other.parameters


@dataclass(frozen=True, slots=True)
class Frontier:
    """Both sides of the memory's edge, of the configs that nothing smaller or larger makes superfluous."""

    failed: tuple[Load, ...]
    """The smallest that ran out of memory."""
    fit: tuple[Load, ...]
    """The largest that did not."""
    failures: int


def frontier(
    trials: Sequence[Trial],
    vocabulary: int | None,
    gauge: Gauge | None = None,
    lengths: RowLengths | None = None,
) -> Frontier:
    """Return the edge of the memory; ``vocabulary`` gives the parameters of models that never finished.

    A ``gauge`` orders configs by what they hold, and then the edge is one config on each side, or a few where it errs.
    """
    failed = _loads(trials, vocabulary, gauge, lengths, lambda trial: trial.state is TrialState.OUT_OF_MEMORY)
    fit = _loads(trials, vocabulary, gauge, lengths, lambda trial: trial.score is not None)
    return Frontier(
        failed=_edge(sorted(failed, key=_weight), lambda one, other: other.within(one)),
        fit=_edge(sorted(fit, key=_weight, reverse=True), lambda one, other: one.within(other)),
        failures=sum(trial.state is TrialState.OUT_OF_MEMORY for trial in trials),
    )


def other_failures(trials: Sequence[Trial]) -> dict[TrialState, list[Trial]]:
    """Return the failed trials by state, memory aside, the newest first."""
    found: dict[TrialState, list[Trial]] = {}
    for trial in sorted(trials, key=lambda trial: -trial.id):
        if trial.state in FAILURES and trial.state is not TrialState.OUT_OF_MEMORY:
            found.setdefault(trial.state, []).append(trial)
    return found


def _loads(
    trials: Sequence[Trial],
    vocabulary: int | None,
    gauge: Gauge | None,
    lengths: RowLengths | None,
    chosen: Callable[[Trial], bool],
) -> list[Load]:
    """Return the load of each config once: that of its first trial."""
    found: dict[tuple[object, int], Load] = {}
    for trial in trials:
        if chosen(trial):
            config, model = trial.config, trial.config.model
            tokens = config.batch.per_device * rows_each(config) * widest_row(config, lengths)
            known = trial.parameters if vocabulary is None or model is None else model.parameters(vocabulary)
            held = None if gauge is None else gauge.estimate(trial.config).total_bytes
            found.setdefault((model if held is None else held, tokens), Load(trial, tokens, known, held))
    return list(found.values())


def _weight(load: Load) -> tuple[int, int, int]:
    size = (load.parameters or 0) * load.pass_tokens if load.held_bytes is None else load.held_bytes
    return (size, load.pass_tokens, load.trial.id)


def _edge(ordered: Sequence[Load], superfluous: Callable[[Load, Load], bool]) -> tuple[Load, ...]:
    """Return the loads that none chosen before makes superfluous; the order puts the telling ones first."""
    edge: list[Load] = []
    for load in ordered:
        if len(edge) < MOST_POINTS and not any(superfluous(load, other) for other in edge):
            edge.append(load)
    return tuple(edge)
