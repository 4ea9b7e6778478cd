"""How well each source has done: its wins, and its predictions against the results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from agent.evidence import Effect
from agent.prose import Figures
from harness.records import History, Past, ProposalState

TURNED_AWAY = (ProposalState.REFUSED, ProposalState.DUPLICATE, ProposalState.STALE)
CONFIDENCES = ((0.0, 0.35), (0.35, 0.65), (0.65, 1.01))
"""Bands in which stated confidence is compared with what came of it: low, even, high."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What was predicted of a proposal, and what came of it."""

    past: Past
    predicted: float
    measured: float | None
    """As finely as it may be shown; None: it failed, so that there is nothing to measure."""

    @property
    def came_true(self) -> bool:
        """Tell whether the change went the way that was predicted; a failure, or one within the noise, did not."""
        return self.measured is not None and self.measured * self.predicted > 0


@dataclass(frozen=True, slots=True)
class Band:
    """How often predictions of about the same confidence came true."""

    stated: float
    """Mean of the confidences."""
    came_true: float
    count: int


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """What one source has achieved."""

    source: str
    made: int
    decided: int
    kept: int
    failed: int
    turned_away: int
    predictions: tuple[Prediction, ...]

    @property
    def came_true(self) -> float | None:
        """Share of the predictions that got the sign right."""
        return _share(one.came_true for one in self.predictions)


def records(history: History, past_effects: Mapping[int, Effect], figures: Figures) -> list[SourceRecord]:
    """Return the record of every source, those with most proposals first."""
    by_source: dict[str, list[Past]] = {}
    for past in history.past:
        by_source.setdefault(name_of(past), []).append(past)
    found = [_record(source, own, past_effects, figures) for source, own in by_source.items()]
    return sorted(found, key=lambda record: (-record.made, record.source))


def name_of(past: Past) -> str:
    """Return who made a proposal: its source, and the language model if one was asked."""
    proposal = past.proposal
    return proposal.source if proposal.model is None else f"{proposal.source}:{proposal.model}"


def calibration(predictions: Sequence[Prediction]) -> list[Band]:
    """Return how stated confidence compares with results, for each band in which something was stated."""
    bands = []
    for low, high in CONFIDENCES:
        stated = [
            (one.past.proposal.confidence, one.came_true)
            for one in predictions
            if one.past.proposal.confidence is not None and low <= one.past.proposal.confidence < high
        ]
        if stated:
            mean = sum(confidence for confidence, _ in stated) / len(stated)
            bands.append(Band(mean, sum(true for _, true in stated) / len(stated), len(stated)))
    return bands


def _record(source: str, own: Sequence[Past], past_effects: Mapping[int, Effect], figures: Figures) -> SourceRecord:
    decided = [past_effects[past.number] for past in own if past.verdict is not None and past.number in past_effects]
    predictions = []
    for past in own:
        predicted, effect = past.proposal.predicted_change, past_effects.get(past.number)
        if past.verdict is not None and predicted is not None and effect is not None:
            measured = None if effect.change is None else figures.rounded(effect.change)
            predictions.append(Prediction(past, predicted, measured))
    return SourceRecord(
        source=source,
        made=len(own),
        decided=len(decided),
        kept=sum(effect.kept for effect in decided),
        failed=sum(effect.failure is not None for effect in decided),
        turned_away=sum(past.state in TURNED_AWAY for past in own),
        predictions=tuple(predictions),
    )


def _share(truths: Iterable[bool]) -> float | None:
    found = list(truths)
    return sum(found) / len(found) if found else None
