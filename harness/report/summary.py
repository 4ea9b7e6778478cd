"""What a study amounts to: everything that readers need, read at one moment, and the numbers of `overnight status`.

A score here is always the mean of a config's replicates, never its luckiest run, and its standard error rests on the
noise that is pooled over the whole study: three replicates of their own would say little about their spread.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from harness.ablation import Step, ablation
from harness.limits import driver_seconds
from harness.queries import Reader
from harness.records import (
    BASELINE,
    FAILURES,
    UNCOUNTED,
    Guard,
    Noise,
    Past,
    ProposalState,
    Standing,
    Trial,
    TrialState,
    unit_of,
)
from harness.rows import Call, Event, StudyRow, continues

State = Literal["new", "running", "paused", "stopped", "killed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """A study's ledger as of one moment."""

    study: StudyRow
    trials: tuple[Trial, ...]
    past: tuple[Past, ...]
    lineage: tuple[Standing, ...]
    """Every kept node in the order of keeping, the baseline first."""
    best_lineage: tuple[Standing, ...]
    """From the baseline to the incumbent."""
    noise: Noise | None
    events: tuple[Event, ...]
    calls: tuple[Call, ...]
    """To language models."""
    insights: tuple[str, ...]
    """What proposers noted for themselves, oldest first."""
    driver_lives: bool
    reference: Trial | None = None
    """The untouched base model, scored; None where a fresh one is trained."""
    guard: Guard | None = None
    """The limit on the guard set, where the study has one."""

    @property
    def continues(self) -> bool:
        """Whether trials go on from their parent's checkpoint, so that every kept step is a budget of training too."""
        return continues(self.study.policy)

    @property
    def baseline(self) -> Standing | None:
        """The config that the owner began with."""
        return self.lineage[0] if self.lineage else None

    @property
    def best(self) -> Standing | None:
        """The incumbent."""
        return self.lineage[-1] if self.lineage else None

    def standing(self, node: int | None) -> Standing | None:
        """Return a lineage node."""
        return next((standing for standing in self.lineage if standing.node == node), None)

    def trials_of(self, standing: Standing) -> tuple[Trial, ...]:
        """Return the trials whose scores count for a config, in the order of their replicate numbers."""
        found = (
            trial
            for trial in self.trials
            if (trial.config, trial.start) == (standing.config, standing.start)
            if standing.scores.get(trial.replicate) == trial.score is not None
            if trial.role not in UNCOUNTED
        )
        return tuple(sorted(found, key=lambda trial: trial.replicate))


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """How good a config is, and how well that is known."""

    score: float
    """Mean of its replicates."""
    perplexity: float | None
    """Mean over the same trials; None for preferences."""
    accuracy: float | None
    """Share of preference pairs in which the chosen answer won, likewise; None where text is scored."""
    guard_score: float | None
    """Bits per byte of the guard set, mean over the same trials; None where the study has none."""
    standard_error: float | None
    """Of the mean, from the pooled noise; None before the noise is known."""
    replicates: int
    trial: int | None
    """Trial whose checkpoint stands for it."""
    node: int


def gather(reader: Reader, *, driver_lives: bool, curves: bool = False) -> Facts:
    """Read everything at one moment; the curves only where somebody will draw them."""
    with reader.snapshot():
        return Facts(
            study=reader.study(),
            trials=reader.trials(curves=curves),
            past=reader.past(curves=False),
            lineage=reader.lineage(),
            best_lineage=reader.best_lineage(),
            noise=reader.noise(),
            events=reader.events(),
            calls=reader.calls(),
            insights=reader.insights(),
            driver_lives=driver_lives,
            reference=reader.reference(),
            guard=reader.guard(),
        )


def level(facts: Facts, standing: Standing | None) -> Level | None:
    """Return how good a config is; None before its first counted score."""
    if standing is None or standing.score is None:
        return None
    trials = facts.trials_of(standing)
    count = len(standing.scores)
    return Level(
        score=standing.score,
        perplexity=_mean([trial.perplexity for trial in trials]),
        accuracy=_mean([trial.accuracy for trial in trials]),
        guard_score=standing.guard_score,
        standard_error=facts.noise.standard_deviation / math.sqrt(count) if facts.noise else None,
        replicates=count,
        trial=standing.trial,
        node=standing.node,
    )


def from_base(facts: Facts, found: Level | None) -> float | None:
    """Return a config's score minus the untouched base's, negative is better; None where one of them has none."""
    if found is None or facts.reference is None or facts.reference.score is None:
        return None
    return found.score - facts.reference.score


def _mean(figures: Sequence[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return math.fsum(known) / len(known) if known else None


def warnings(facts: Facts) -> list[str]:
    """Return what the owner must know before anything else: training that harms, and a limit that is broken already."""
    found = []
    before, unit = level(facts, facts.baseline), unit_of(facts.study.metric, facts.study.task)
    reference, guard = facts.reference, facts.guard
    if before is not None and reference is not None and reference.score is not None and before.score > reference.score:
        found.append(
            f"WARNING: the trained baseline ({before.score:.4f} {unit}) is worse than the untouched base"
            f" ({reference.score:.4f}): training harms. Its learning rate is probably too high."
        )
    for name, standing in (("baseline", facts.baseline), ("best config", facts.best)):
        on_guard = None if standing is None else standing.guard_score
        if guard is None or on_guard is None or not guard.is_broken_by(on_guard):
            continue
        if name == "best config" and standing == facts.baseline:
            continue
        found.append(f"WARNING: the {name} {guard.told(on_guard)}.")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Improvement:
    """Baseline minus best: positive is better. Where trials continue, the baseline continued as often."""

    amount: float
    standard_error: float | None


def improvement(facts: Facts) -> Improvement | None:
    """Return how much better the incumbent is than the baseline; zero while the baseline is the incumbent.

    Where trials continue from their parent, the incumbent has had a budget of training more for every kept step, and
    the baseline it is held against must have had as many. The search runs the baseline twice in a row at most: what is
    farther from it than one step has an improvement that nobody has measured, None.
    """
    before, after = level(facts, facts.baseline), level(facts, facts.best)
    if before is None or after is None:
        return None
    if before.node == after.node:
        return Improvement(amount=0.0, standard_error=None)
    if facts.continues:
        return _continued_improvement(facts, after)
    if before.standard_error is None or after.standard_error is None:
        return Improvement(amount=before.score - after.score, standard_error=None)
    error = math.hypot(before.standard_error, after.standard_error)
    return Improvement(amount=before.score - after.score, standard_error=error)


def _continued_improvement(facts: Facts, after: Level) -> Improvement | None:
    baseline = facts.baseline
    if baseline is None or after.node == BASELINE or len(facts.best_lineage) != 2:
        return None
    scores, noise = baseline.to_beat, facts.noise
    if baseline.score_to_beat is None:
        return None
    amount = baseline.score_to_beat - after.score
    if noise is None:
        return Improvement(amount=amount, standard_error=None)
    error = noise.standard_deviation * math.sqrt(1 / len(scores) + 1 / after.replicates)
    return Improvement(amount=amount, standard_error=error)


def ablated(facts: Facts) -> dict[int, Step]:
    """Return what each step of the best lineage is still worth, by node; empty if nobody took one out."""
    if not facts.best_lineage:
        return {}
    found = ablation(facts.best_lineage, facts.trials, facts.noise, facts.study.budget)
    return {step.node: step for step in found or ()}


def utilization(facts: Facts) -> float | None:
    """Return the share of the wall clock, first trial's start to the newest trial's, that was budgeted training."""
    starts = [trial.started for trial in facts.trials if trial.started is not None]
    ends = [trial.ended for trial in facts.trials if trial.ended is not None]
    if not starts or not ends:
        return None
    wall = (max(starts + ends) - min(starts)).total_seconds()
    trained = math.fsum(trial.train_seconds for trial in facts.trials if trial.train_seconds is not None)
    return trained / wall if wall > 0 else None


def state(facts: Facts) -> State:
    """Return whether the search runs, waits, has ended, died or was never begun."""
    last = {event.kind: event.id for event in facts.events}
    began = last.get("run_began", 0)
    if facts.driver_lives:
        return "paused" if last.get("pause", 0) > max(began, last.get("resume", 0)) else "running"
    if not began:
        return "new"
    return "stopped" if last.get("run_ended", 0) > began else "killed"


def stop_reason(facts: Facts) -> str | None:
    """Return why the last run ended; None before the first one and while one is running."""
    match state(facts):
        case "stopped":
            return next(event.text for event in reversed(facts.events) if event.kind == "run_ended")
        case "killed":
            return "the driver was killed or the machine went down; `overnight run` goes on where it was"
        case _:
            return None


def kept(facts: Facts) -> int:
    """Return how many proposals were kept."""
    return len(facts.lineage[1:])


def failed(facts: Facts) -> tuple[Trial, ...]:
    """Return the trials that failed, in the order in which they began."""
    return tuple(trial for trial in facts.trials if trial.state in FAILURES)


def summarise(facts: Facts) -> dict[str, Any]:
    """Return the document of `overnight status --json`."""
    gain = improvement(facts)
    noise = facts.noise
    return {
        "study": facts.study.name,
        "task": facts.study.task,
        "metric": facts.study.metric,
        "budget": facts.study.budget,
        "state": state(facts),
        "stop_reason": stop_reason(facts),
        "trials": _counts(TrialState, Counter(trial.state for trial in facts.trials)),
        "proposals": _counts(ProposalState, Counter(past.state for past in facts.past)),
        "kept": kept(facts),
        "baseline": _level_document(level(facts, facts.baseline)),
        "best": _level_document(level(facts, facts.best)),
        "reference": _reference_document(facts.reference),
        "guard": None if facts.guard is None else {"max_regression": facts.guard.max_regression},
        "warnings": warnings(facts),
        "improvement": None if gain is None else gain.amount,
        "improvement_standard_error": None if gain is None else gain.standard_error,
        "start_from": "parent" if facts.continues else "base",
        "noise": None if noise is None else noise.standard_deviation,
        "noise_degrees_of_freedom": None if noise is None else noise.degrees_of_freedom,
        "utilization": utilization(facts),
        "train_seconds": math.fsum(t.train_seconds for t in facts.trials if t.train_seconds is not None),
        "driver_seconds": driver_seconds(facts.events, facts.trials),
        "sandbox": sorted({trial.sandbox for trial in facts.trials if trial.sandbox}),
        "seal": facts.study.seal,
    }


def _counts(states: type[TrialState] | type[ProposalState], seen: Counter[Any]) -> dict[str, int]:
    """Return the count of every state that occurred, in the order in which the states are defined."""
    return {item.value: seen[item] for item in states if seen[item]}


def _reference_document(found: Trial | None) -> dict[str, Any] | None:
    if found is None:
        return None
    names = ("score", "perplexity", "accuracy", "guard_score")
    return {name: getattr(found, name) for name in names} | {"trial": found.id}


def _level_document(found: Level | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "score": found.score,
        "perplexity": found.perplexity,
        "accuracy": found.accuracy,
        "guard_score": found.guard_score,
        "standard_error": found.standard_error,
        "replicates": found.replicates,
        "trial": found.trial,
        "node": found.node,
    }
