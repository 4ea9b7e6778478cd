"""What every proposer needs to know of a history: where it stands, what is known already, and what may be tried.

A proposer sees no policy and no ledger. What it would be refused for can nevertheless be told from the history, and a
proposal that is sure to be refused wastes a number; so the checks of the policy are repeated here, as far as the
history shows them, by the same knobs and the same config.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from harness.config import Diff, Knob, TrialConfig, Value, active_difference, flatten, idle, turned
from harness.errors import BadValue, UnknownKnob
from harness.memory import Gauge
from harness.records import History, Past, Proposal, ProposalState, Role, Trial
from harness.sizes import as_trained, flops_per_token, usual_positions

SIGNIFICANT_DIGITS = 3
"""Of a proposed number: people read them, and no training run tells 0.00123 from 0.0012345."""


class Step(NamedTuple):
    """A diff that may be tried, with the config that it makes of the incumbent's."""

    diff: dict[str, Value]
    config: TrialConfig


@dataclass(frozen=True, slots=True)
class Space:
    """A history, seen from the config that the next proposal starts from."""

    history: History
    base: TrialConfig
    """The incumbent's config."""
    base_score: float
    """What a proposal must beat."""
    known: frozenset[str]
    """Digests of every config that was tried, waits or was turned away, as `as_trained` spells it."""
    gauge: Gauge | None = None
    """What a config holds in memory; None where device or vocabulary are not known yet."""

    @classmethod
    def of(cls, history: History) -> Space | None:
        """Return the space around the incumbent, or None before the baseline has a score."""
        standing = history.incumbent or history.baseline
        if standing is None or standing.score is None:
            return None
        known = frozenset(as_trained(config, history.lengths).digest for config in _known(history, standing.config))
        to_beat = standing.score if standing.score_to_beat is None else standing.score_to_beat
        return cls(history, standing.config, to_beat, known, gauge_of(history))

    @property
    def knobs(self) -> Mapping[str, Knob]:
        """What the policy lets the search turn."""
        return self.history.knobs

    def step(self, values: Diff) -> Step | None:
        """Return what turning the incumbent's knobs to ``values`` amounts to, or None if that may not be tried.

        Knobs that have the value already, or no meaning in the resulting config, are left out of the diff.
        """
        try:
            wanted = {name: self.knobs[name].check(value) for name, value in values.items()}
            without_meaning = idle(flatten(self.base) | wanted, self.knobs)
            active = {name: value for name, value in wanted.items() if name not in without_meaning}
            config = turned(self.base, active, self.knobs)
        except (BadValue, UnknownKnob):  # knobs that do not go together, such as width and heads
            return None
        diff = active_difference(self.base, config, self.knobs)
        if not 1 <= len(diff) <= self.history.max_changes or self.is_known(config):
            return None
        if self.gauge is not None and self.gauge.misfit(config) is not None:
            return None
        steps = self.steps(config)
        return None if steps is not None and steps < self.history.minimum_steps else Step(diff, config)

    def is_known(self, config: TrialConfig) -> bool:
        """Tell whether a config, or one that trains just like it, was tried, waits or was turned away."""
        return as_trained(config, self.history.lengths).digest in self.known

    def steps(self, config: TrialConfig) -> float | None:
        """Return how many optimizer steps a config usually gets within the budget, or None where that is not known.

        Tokens follow from the budget's text, and from the documents' lengths where rows are padded; flops need the size
        of the vocabulary besides, which a finished trial's parameter count gives away; seconds are never known
        beforehand. A policy refuses only what is sure to get too few steps; what usually does is not worth a trial.
        """
        budget, positions = self.history.budget, usual_positions(config, self.history.lengths)
        if positions is None:
            return None
        if budget.endswith("tok"):
            return float(budget.removesuffix("tok")) / positions
        entries = vocabulary(self.history)
        if not budget.endswith("flop") or entries is None:
            return None
        per_token = flops_per_token(config, vocabulary=entries, base=self.history.base)
        return float(budget.removesuffix("flop")) / (per_token * positions)


def gauge_of(history: History) -> Gauge | None:
    """Return what estimates the memory of configs on the study's device, corrected by its trials."""
    entries = vocabulary(history)
    if history.device is None or entries is None:
        return None
    return Gauge.learned(
        trials(history),
        vocabulary=entries,
        base=history.base,
        device=history.device,
        memory_bytes=history.device_memory_bytes,
        lengths=history.lengths,
    )


def vocabulary(history: History) -> int | None:
    """Return the entries of the study's tokenizer, solved for from a trial's parameters; None before the first one."""
    if history.base is not None:
        return history.base.vocabulary
    for trial in trials(history):
        if trial.parameters is not None:
            model = trial.config.shape
            return (trial.parameters - model.parameters(0)) // model.width
    return None


def trials(history: History) -> Iterator[Trial]:
    """Yield all trials of the search, the baseline's own first."""
    yield from searched(history.baseline_trials)
    for past in history.past:
        yield from searched(past.trials)


def searched(some: Iterable[Trial]) -> Iterator[Trial]:
    """Leave out what must not be learned from: full runs, whose budget is another, and the untrained reference."""
    return (trial for trial in some if trial.role not in (Role.FINAL, Role.REFERENCE))


def propose_each(history: History, count: int, make: Callable[[History], Proposal | None]) -> Sequence[Proposal]:
    """Return up to ``count`` proposals, each made as if those before it were queued already."""
    proposals: list[Proposal] = []
    while len(proposals) < count:
        proposal = make(history)
        if proposal is None:
            break
        proposals.append(proposal)
        history = queued(history, proposal)
    return proposals


def queued(history: History, proposal: Proposal) -> History:
    """Return the history as it stands once a proposal waits in the queue."""
    past = Past(
        number=history.next_number,
        proposal=proposal,
        state=ProposalState.QUEUED,
        reason=None,
        parent=None,
        config=None,
        verdict=None,
        trials=(),
    )
    return replace(history, past=(*history.past, past), next_number=history.next_number + 1)


def config_of(past: Past, history: History, base: TrialConfig) -> TrialConfig | None:
    """Return the config of a proposal; for one that never became one, what it would be if it started now."""
    if past.config is not None:
        return past.config
    parents = {standing.node: standing.config for standing in history.lineage}
    parent = base if past.proposal.parent is None else parents.get(past.proposal.parent)
    if parent is None:
        return None
    try:
        return turned(parent, past.proposal.diff, history.knobs)
    except (BadValue, UnknownKnob):  # refused for just that
        return None


def seed(history: History, purpose: str) -> int:
    """Return 32 bits that are a function of study, proposal number and purpose, so that a restart repeats them."""
    text = f"{history.seed}/{history.next_number}/{purpose}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def to_unit(knob: Knob, value: Value) -> float:
    """Return where a value lies within its knob's range, in [0, 1] on the knob's scale; a choice by its position."""
    if knob.type == "choice":
        return knob.choices.index(knob.check(value)) / (len(knob.choices) - 1)
    low, high, number = _bounds(knob, value)
    return 0.0 if high == low else min(1.0, max(0.0, (number - low) / (high - low)))


def from_unit(knob: Knob, position: float) -> Value:
    """Return the value at a position of [0, 1] on the knob's scale, rounded to what people read; within bounds."""
    position = min(1.0, max(0.0, position))
    if knob.type == "choice":
        return knob.choices[min(len(knob.choices) - 1, int(position * len(knob.choices)))]
    low, high, _ = _bounds(knob, knob.default)
    number = low + position * (high - low)
    return tidy(knob, math.exp(number) if knob.scale == "log" else number)


def tidy(knob: Knob, number: float) -> Value:
    """Return a number as a value of the knob: whole or with few digits, and within bounds."""
    assert knob.low is not None
    assert knob.high is not None
    if knob.type == "int":
        return int(min(math.floor(knob.high), max(math.ceil(knob.low), round(number))))
    return min(float(knob.high), max(float(knob.low), float(f"{number:.{SIGNIFICANT_DIGITS}g}")))


def show(value: Value) -> str:
    """Return a value as people write it."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _bounds(knob: Knob, value: Value) -> tuple[float, float, float]:
    assert knob.low is not None
    assert knob.high is not None
    if knob.scale == "log":
        return math.log(knob.low), math.log(knob.high), math.log(float(value))
    return float(knob.low), float(knob.high), float(value)


def of_this_start(past: Past, history: History) -> bool:
    """Tell whether a proposal's runs began where the next one's will: always, unless trials go on from their parent."""
    if not history.continues:
        return True
    if past.parent is None:  # what an earlier start knew already may be new to this one
        return past.state not in (ProposalState.DUPLICATE, ProposalState.STALE)
    return history.incumbent is not None and past.parent == history.incumbent.node


def _known(history: History, base: TrialConfig) -> Iterator[TrialConfig]:
    yield base
    if history.continues:  # the same config from another start is another trial
        yield from (
            config
            for past in history.past
            if of_this_start(past, history) and (config := config_of(past, history, base)) is not None
        )
        return
    for standing in history.lineage:
        yield standing.config
    if history.baseline is not None:
        yield history.baseline.config
    for trial in trials(history):
        yield trial.config
    for past in history.past:
        config = config_of(past, history, base)
        if config is not None:
            yield config
