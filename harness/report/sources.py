"""Who proposed what, what came of it, and what it cost: one row per proposer and model, sorted by first appearance."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from harness.records import FAILURES, Decision, ProposalState, Role
from harness.report.summary import Facts

TURNED_AWAY = frozenset({ProposalState.REFUSED, ProposalState.DUPLICATE, ProposalState.STALE})


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One proposer, with the language model that it asks, if it asks one."""

    source: str
    model: str | None
    proposals: int
    decided: int
    kept: int
    turned_away: int
    """Refused, duplicate or stale."""
    failed_trials: int
    calls: int
    failed_calls: int
    tokens: int
    """Billed for all its calls, answered or not; calls in flight at their worst case."""
    cost_usd: float | None
    """Likewise; None if a call has no price."""

    @property
    def win_rate(self) -> float | None:
        """Share of the decided proposals that were kept; None before the first decision."""
        return self.kept / self.decided if self.decided else None


def sources(facts: Facts) -> list[Source]:
    """Return a row for everybody who proposed or was asked."""
    asked = dict.fromkeys((call.provider, call.model) for call in facts.calls)
    made = dict.fromkeys((past.proposal.source, past.proposal.model) for past in facts.past)
    return [_source(facts, source, model) for source, model in made | asked]


def document(found: Source) -> dict[str, Any]:
    """Return a row as a document of `overnight status --json`."""
    return asdict(found) | {"win_rate": found.win_rate}


def _source(facts: Facts, source: str, model: str | None) -> Source:
    past = [item for item in facts.past if (item.proposal.source, item.proposal.model) == (source, model)]
    calls = [call for call in facts.calls if (call.provider, call.model) == (source, model)]
    verdicts = [item.verdict for item in past if item.verdict is not None]
    costs = [call.cost_usd for call in calls]
    return Source(
        source=source,
        model=model,
        proposals=len(past),
        decided=len(verdicts),
        kept=sum(verdict.decision is Decision.KEPT for verdict in verdicts),
        turned_away=sum(item.state in TURNED_AWAY for item in past),
        failed_trials=sum(
            trial.state in FAILURES and trial.role is not Role.FINAL for item in past for trial in item.trials
        ),
        calls=len(calls),
        failed_calls=sum(call.trouble is not None for call in calls),
        tokens=sum(call.tokens for call in calls),
        cost_usd=None if any(cost is None for cost in costs) else math.fsum(cost or 0.0 for cost in costs),
    )
