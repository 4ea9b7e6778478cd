"""How much each knob has mattered so far: a closed-form measure over the configs that were scored.

Epsilon squared of Kruskal and Wallis (JASA 47:583, 1952): the share of the spread of the scores' *ranks* that lies
between the knob's values, less what chance would give. Ranks, because a few failed ideas with huge scores would
otherwise be all that there is to see. It looks at one knob at a time: knobs that were always turned together share the
credit, and what a search has not varied cannot matter here. It is a hint where to look, not a proof.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from agent.space import to_unit, trials
from harness.config import Knob, TrialConfig, Value, flatten
from harness.errors import BadValue
from harness.records import History

NEWEST = 1000
"""Configs that are looked at: an older one was tried around an incumbent that is long gone."""
GROUPS = 4
"""Quantile groups of a knob with more values than that."""
LEAST_PER_GROUP = 2
"""Configs per group, on average, below which nothing is said."""


@dataclass(frozen=True, slots=True)
class Importance:
    """How much one knob mattered."""

    knob: str
    share: float
    """Of the spread of the scores' ranks, between 0 and 1."""
    trend: float | None
    """Rank correlation of value and score, negative if more is better; None for a choice without an order."""
    configs: int


@dataclass(frozen=True, slots=True)
class Observation:
    """A config with the mean of its scores."""

    values: Mapping[str, Value]
    score: float


def observations(history: History) -> list[Observation]:
    """Return the newest scored configs of the current epoch of the machine, each once."""
    scored = [trial for trial in trials(history) if trial.score is not None]
    epoch = max((trial.epoch for trial in scored), default=0)
    found: dict[TrialConfig, list[float]] = {}
    for trial in sorted((t for t in scored if t.epoch == epoch), key=lambda trial: -trial.id):
        if trial.config in found or len(found) < NEWEST:
            assert trial.score is not None
            found.setdefault(trial.config, []).append(trial.score)
    return [Observation(flatten(config), math.fsum(values) / len(values)) for config, values in found.items()]


def importances(seen: Sequence[Observation], knobs: Mapping[str, Knob]) -> list[Importance]:
    """Return what can be said of each knob, the most important first; knobs without enough variety are left out."""
    found = (_importance(seen, knob) for knob in knobs.values())
    return sorted((one for one in found if one is not None), key=lambda one: (-one.share, one.knob))


def _importance(seen: Sequence[Observation], knob: Knob) -> Importance | None:
    points = [(position, one.score) for one in seen if (position := _position(knob, one.values)) is not None]
    labels = _groups([position for position, _ in points])
    count, groups = len(points), len(set(labels))
    if groups < 2 or count < LEAST_PER_GROUP * groups:
        return None
    ranks = _ranks([score for _, score in points])
    mean = (count + 1) / 2
    spread = math.fsum((rank - mean) ** 2 for rank in ranks)
    if spread == 0:
        return None
    sums: dict[float, list[float]] = {}
    for label, rank in zip(labels, ranks, strict=True):
        sums.setdefault(label, []).append(rank - mean)
    between = math.fsum(math.fsum(group) ** 2 / len(group) for group in sums.values())
    statistic = (count - 1) * between / spread
    share = max(0.0, (statistic - groups + 1) / (count - groups))
    ordered = not any(isinstance(choice, str | bool) for choice in knob.choices)
    trend = _correlation(_ranks([position for position, _ in points]), ranks) if ordered else None
    return Importance(knob.name, share, trend, count)


def _position(knob: Knob, values: Mapping[str, Value]) -> float | None:
    """Return where a config has the knob, or None where it has no meaning or lies beyond its bounds after a repair."""
    if knob.name not in values or not knob.is_active(values):
        return None
    try:
        return to_unit(knob, knob.check(values[knob.name]))
    except BadValue:
        return None


def _groups(positions: Sequence[float]) -> list[float]:
    """Return each position's group: itself where there are few, else its quantile; equal ones are never parted."""
    if len(set(positions)) <= GROUPS:
        return list(positions)
    ranks = _ranks(positions)
    return [math.floor((rank - 0.5) * GROUPS / len(ranks)) for rank in ranks]


def _ranks(numbers: Iterable[float]) -> list[float]:
    """Return ranks from 1 on, equal numbers sharing the mean of theirs."""
    ordered = sorted(enumerate(numbers), key=lambda pair: pair[1])
    ranks = [0.0] * len(ordered)
    begin = 0
    for _, run in itertools.groupby(ordered, key=lambda pair: pair[1]):
        places = [place for place, _ in run]
        for place in places:
            ranks[place] = begin + (len(places) + 1) / 2
        begin += len(places)
    return ranks


def _correlation(one: Sequence[float], two: Sequence[float]) -> float | None:
    """Return the correlation of two series of ranks; None if one does not vary."""
    mean = (len(one) + 1) / 2
    spread = [math.fsum((rank - mean) ** 2 for rank in ranks) for ranks in (one, two)]
    if not all(spread):
        return None
    together = math.fsum((a - mean) * (b - mean) for a, b in zip(one, two, strict=True))
    return together / math.sqrt(spread[0] * spread[1])
