"""How much each knob has mattered so far, and which way: closed-form measures over what turning it did.

A search is a walk: its configs differ above all by how good the incumbent was when they were tried. The spread of the
*scores* by a knob's value (fANOVA and its relatives) therefore says more about when a value was tried than about what
it does. What is comparable are the *differences*, each against the incumbent of its time. So a knob's effect is the
median size of the differences that turning it made, and its trend their rank correlation (Spearman) with how far it was
turned. A proposal that turned several knobs counts for each of them with its share, because nobody knows whose it was.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from agent.evidence import Effect
from agent.space import to_unit
from harness.config import Knob, Value
from harness.errors import BadValue
from harness.records import History

NEWEST = 40
"""Turns of a knob that are looked at: what came before was around an incumbent that is long gone."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a proposal that turned a knob did, as far as it is this knob's."""

    move: float | None
    """How far along its range, between -1 and 1; None for a choice without an order."""
    change: float
    """Its share of the difference."""


@dataclass(frozen=True, slots=True)
class Importance:
    """How much one knob mattered."""

    knob: str
    effect: float
    """Median size of its changes."""
    turns: int
    trend: float | None
    """Rank correlation of move and change, negative if turning it up was better; None if nothing can be said."""


def importances(
    history: History, effects: Iterable[Effect], flats: Mapping[int, Mapping[str, Value]]
) -> list[Importance]:
    """Return what can be said of each knob that was turned and led to a result.

    ``flats`` holds the flattened config of each lineage node.
    """
    parents = {past.number: past.parent for past in history.past}
    turns: dict[str, list[Turn]] = {}
    for effect in sorted(effects, key=lambda effect: -effect.number):
        parent = parents[effect.number]
        before = {} if parent is None else flats.get(parent, {})
        for name, new in effect.diff.items():
            known = turns.setdefault(name, [])
            if effect.change is not None and name in history.knobs and len(known) < NEWEST:
                known.append(Turn(_move(history.knobs[name], before.get(name), new), effect.change / len(effect.diff)))
    return [_importance(name, some) for name, some in sorted(turns.items()) if some]


def _importance(name: str, turns: Sequence[Turn]) -> Importance:
    return Importance(name, statistics.median(abs(turn.change) for turn in turns), len(turns), _trend(turns))


def _move(knob: Knob, before: Value | None, after: Value) -> float | None:
    """Return how far a knob was turned, or None: no order, no value before, or beyond the bounds after a repair."""
    if before is None or any(isinstance(choice, str | bool) for choice in knob.choices):
        return None
    try:
        return to_unit(knob, knob.check(after)) - to_unit(knob, knob.check(before))
    except BadValue:
        return None


def _trend(turns: Sequence[Turn]) -> float | None:
    """Return the rank correlation of moves and changes where it is beyond twice its standard error under no trend."""
    pairs = [(turn.move, turn.change) for turn in turns if turn.move is not None]
    if len(pairs) < 3:
        return None
    moves, changes = (_ranks(column) for column in zip(*pairs, strict=True))
    mean = (len(pairs) + 1) / 2
    spread = [math.fsum((rank - mean) ** 2 for rank in ranks) for ranks in (moves, changes)]
    if not all(spread):
        return None
    together = math.fsum((a - mean) * (b - mean) for a, b in zip(moves, changes, strict=True))
    correlation = together / math.sqrt(spread[0] * spread[1])
    return correlation if abs(correlation) * math.sqrt(len(pairs) - 1) > 2 else None


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
