"""The JSON documents of the reading commands: plain dictionaries, full precision, names as in the ledger."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.ablation import Step
from harness.conditions import meaningful
from harness.config import Value, difference, flatten
from harness.errors import BadInput
from harness.memory import Held
from harness.records import BASELINE, CurvePoint, Past, Standing, Trial
from harness.report import words
from harness.report.summary import Facts, ablated, from_base, level


def ledger(facts: Facts) -> list[dict[str, Any]]:
    """Return one document per proposal, in the order of their numbers."""
    return [proposal(past) for past in facts.past]


def proposal(past: Past) -> dict[str, Any]:
    """Return what was proposed, what became of it and why."""
    said, verdict = past.proposal, past.verdict
    screen = next((trial.score for trial in past.trials if trial.replicate == 0 and trial.score is not None), None)
    return {
        "proposal": past.number,
        "parent": past.parent,
        "diff": dict(said.diff),
        "source": said.source,
        "model": said.model,
        "rationale": said.rationale,
        "watch": said.watch,
        "predicted_change": said.predicted_change,
        "confidence": said.confidence,
        "abort_if": None if said.abort_if is None else said.abort_if.model_dump(),
        "call": said.call,
        "state": past.state.value,
        "decision": None if verdict is None else verdict.decision.value,
        "difference": None if verdict is None else verdict.difference,
        "standard_error": None if verdict is None else verdict.standard_error,
        "probability": None if verdict is None else verdict.probability,
        "replicates": 0 if verdict is None else verdict.replicates,
        "reason": words.reason(past),
        "screening_score": screen,
        "breaks_guard": words.breaks_guard(past),
        "trials": [trial.id for trial in past.trials],
        "failures": words.failures(past),
    }


def trial(found: Trial) -> dict[str, Any]:
    """Return everything that the ledger knows of a trial, its config flat and its curve as a list.

    ``config_idle`` names what changes nothing in that config.
    """
    document: dict[str, Any] = {}
    for field in dataclasses.fields(found):
        item = getattr(found, field.name)
        if field.name == "config":
            document["config"] = flatten(found.config)
            document["config_idle"] = sorted(flatten(found.config).keys() - meaningful(found.config).keys())
            document["config_digest"] = found.config.digest
        elif field.name == "curve":
            document["curve"] = [point.model_dump() for point in found.curve]
        elif isinstance(item, datetime.datetime):
            document[field.name] = item.isoformat()
        else:
            document[field.name] = item
    return document


def memory(found: Trial, held: Held | None) -> dict[str, Any]:
    """Return what the trial was expected to hold in memory, in parts, and how far off that was."""
    if held is None:
        return {"memory": None}
    estimate, peak, expected = held.estimate, found.peak_memory_bytes, held.expected_peak_bytes
    return {
        "memory": {
            "estimated_bytes": estimate.total_bytes,
            "moment": estimate.moment,
            "parts": [part._asdict() for part in estimate.parts],
            "host_bytes": estimate.host_bytes,
            "correction": held.correction.ratio,
            "correction_trials": held.correction.trials,
            "expected_peak_bytes": expected,
            "observed_peak_bytes": peak,
            "relative_error": None if peak is None else expected / peak - 1,
        }
    }


def lineage(facts: Facts) -> list[dict[str, Any]]:
    """Return the chain from the baseline to the incumbent, each step with its diff and how it was proven.

    Where there is an untouched base model that is scored, it comes first, with the role ``reference`` and no node.
    """
    by_number = {past.number: past for past in facts.past}
    taken_out = ablated(facts)
    steps = [
        _step(facts, standing, by_number.get(standing.node)) | without(taken_out.get(standing.node))
        for standing in facts.best_lineage
    ]
    return steps if facts.reference is None else [_reference(facts.reference), *steps]


def without(step: Step | None) -> dict[str, Any]:
    """Return what the best config loses without a step; all None if it was not taken out."""
    return {
        "loss_without": None if step is None else step.loss,
        "loss_without_standard_error": None if step is None else step.standard_error,
        "loss_without_pairs": None if step is None else step.pairs,
        "loss_without_proven": None if step is None or not (step.pairs or step.failed) else step.is_proven,
        "failed_without": None if step is None else step.failed,
    }


def _reference(found: Trial) -> dict[str, Any]:
    """Return the untouched base model as a step of its own; there is no seed in its score, so it has no error."""
    return {
        "role": found.role.value,
        "node": None,
        "parent": None,
        "diff": {},
        "score": found.score,
        "standard_error": None,
        "difference_from_base": 0.0,
        "replicates": 1,
        "start": None,
        "score_continued": None,
        "trial": found.id,
        "difference": None,
        "difference_standard_error": None,
        "rationale": None,
        "reason": None,
        "config": None,
    } | without(None)


def _step(facts: Facts, standing: Standing, past: Past | None) -> dict[str, Any]:
    found = level(facts, standing)
    verdict = past.verdict if past is not None else None
    return {
        "role": "baseline" if standing.node == BASELINE else "kept",
        "node": standing.node,
        "parent": standing.parent,
        "diff": dict(standing.diff),
        "score": None if found is None else found.score,
        "standard_error": None if found is None else found.standard_error,
        "difference_from_base": from_base(facts, found),
        "replicates": len(standing.scores),
        "start": standing.start,
        "score_continued": None if standing.continued is None else standing.score_to_beat,
        "trial": standing.trial,
        "difference": None if verdict is None else verdict.difference,
        "difference_standard_error": None if verdict is None else verdict.standard_error,
        "rationale": None if past is None else past.proposal.rationale,
        "reason": None if verdict is None else verdict.reason,
        "config": flatten(standing.config),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Two scored trials side by side. The difference is B minus A: negative means that B is better."""

    a: Trial
    b: Trial
    diff: dict[str, Value]
    """Knobs of B that differ from A's."""
    difference: float
    document_standard_error: float | None
    """Of the difference over the val documents: how far it depends on which text was scored. The spread over seeds is
    another matter, see `seed_standard_error`."""
    seed_standard_error: float | None
    """Of the difference of two single trials, from the study's noise."""
    documents: int
    documents_better: int
    """Documents that B predicts better than A."""


def compare(facts: Facts, a: Trial, b: Trial, nats_a: Sequence[float], nats_b: Sequence[float]) -> Comparison:
    """Compare two scored trials, paired by val document; `BadInput` if one of them has no score."""
    for found in (a, b):
        if found.score is None:
            raise BadInput(f"trial {found.id} has no score to compare: {words.ended(found)}")
    assert a.score is not None
    assert b.score is not None
    if len(nats_a) != len(nats_b):
        raise BadInput(f"trials {a.id} and {b.id} were scored on different documents and cannot be compared")
    gaps = [after - before for before, after in zip(nats_a, nats_b, strict=True)]
    nats_per_unit = math.fsum(nats_a) / a.score if a.score else 0.0
    spread = None
    if len(gaps) > 1 and nats_per_unit:
        mean = math.fsum(gaps) / len(gaps)
        variance = math.fsum((gap - mean) ** 2 for gap in gaps) / (len(gaps) - 1)
        spread = math.sqrt(variance * len(gaps)) / nats_per_unit
    told = meaningful(a.config).keys() | meaningful(b.config).keys()
    return Comparison(
        a=a,
        b=b,
        diff={name: value for name, value in difference(a.config, b.config).items() if name in told},
        difference=b.score - a.score,
        document_standard_error=spread,
        seed_standard_error=None if facts.noise is None else facts.noise.standard_deviation * math.sqrt(2),
        documents=len(gaps),
        documents_better=sum(gap < 0 for gap in gaps),
    )


def comparison(found: Comparison) -> dict[str, Any]:
    """Return a comparison as a document."""
    before, after = meaningful(found.a.config), meaningful(found.b.config)
    return {
        "a": _side(found.a),
        "b": _side(found.b),
        "diff": {knob: {"a": before.get(knob), "b": after.get(knob)} for knob in found.diff},
        "difference": found.difference,
        "document_standard_error": found.document_standard_error,
        "seed_standard_error": found.seed_standard_error,
        "documents": found.documents,
        "documents_better": found.documents_better,
    }


def _side(found: Trial) -> dict[str, Any]:
    last = found.curve[-1] if found.curve else None
    return {
        "trial": found.id,
        "proposal": found.proposal,
        "role": found.role.value,
        "seed": found.seed,
        "score": found.score,
        "perplexity": found.perplexity,
        "accuracy": found.accuracy,
        "guard_score": found.guard_score,
        "steps": found.steps,
        "tokens": found.tokens,
        "parameters": found.parameters,
        "probe_score": last.probe_score if isinstance(last, CurvePoint) else None,
    }
