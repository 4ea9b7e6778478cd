"""The gate that people and coding agents pass: `overnight propose` and the MCP server ask the same questions here.

What can be told at once is told at once, to whoever asked; what passes becomes a letter in the study's inbox. The
search asks again when the proposal's turn comes, because by then the incumbent may be another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import ValidationError

from harness.config import Diff, TrialConfig, explain
from harness.errors import BadInput, BadValue
from harness.inbox import Propose, peek, post
from harness.locks import driver_lives
from harness.policy import Refusal
from harness.proposers import HUMAN, outsider
from harness.queries import Reader
from harness.records import BASELINE, AbortIf, Proposal
from harness.study import Study

LONGEST_WORDS = 2_000
"""Characters of a reason: it is shown whole, to people and to language models."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What somebody from outside wants tried, unchecked."""

    diff: Diff
    why: str
    source: str = HUMAN
    watch: str | None = None
    """None: what the policy says of the turned knobs."""
    parent: int | None = None
    predicted_change: float | None = None
    confidence: float | None = None
    abort_above: float | None = None
    """Score of the probe, in the study's metric, above which the screening run ends, from ``abort_after`` of its budget
    on."""
    abort_after: float | None = None


def not_continued(node: int, incumbent: int) -> str:
    """Say why a proposal cannot start from any node but the incumbent where trials continue from their parent."""
    return (
        f"trials go on from their parent's checkpoint, and node {node} is not the incumbent (node {incumbent}): it has"
        " had less training, so what goes on from it cannot be compared with what goes on from the incumbent"
    )


def check(study: Study, wish: Wish) -> Proposal:
    """Return the proposal that a wish amounts to; `WrongUse` says in one sentence why it could not run now."""
    proposal = _proposal(study, wish)
    with Reader(study.paths.ledger) as reader, reader.snapshot():
        nodes = {standing.node: standing.config for standing in reader.lineage()}
        incumbent = reader.incumbent()
        tried = reader.known_configs()
        queued = reader.queued()
        trials = reader.trials(curves=False)
    best = study.baseline if incumbent is None else incumbent.config
    if proposal.parent is not None and proposal.parent not in nodes:
        kept = ", ".join(map(str, nodes)) or "none yet"
        raise BadInput(f"node {proposal.parent} is not in the lineage (nodes: {kept})")
    if study.policy.continues and proposal.parent is not None and proposal.parent != next(reversed(nodes)):
        raise BadInput(not_continued(proposal.parent, next(reversed(nodes))))
    config = _resolve(study, proposal, nodes, best)
    if isinstance(config, Refusal):
        raise BadValue(config.reason)
    misfit = study.gauge(trials).misfit(config)
    if misfit is not None:
        raise BadValue(misfit)
    if config.digest in tried:
        owner = f"proposal {tried[config.digest]}" if tried[config.digest] != BASELINE else "the baseline"
        raise BadInput(f"this config was tried already: it is that of {owner}")
    waiting = [(f"as proposal {past.number}", past.proposal) for past in queued]
    waiting += [("in the inbox", other) for other in _letters(study)]
    for where, other in waiting:
        if _resolve(study, other, nodes, best) == config:
            raise BadInput(f"this config waits already: {other.source} queued it, {where}")
    return proposal


def send(study: Study, proposal: Proposal) -> str:
    """Put a checked proposal into the inbox and say when it is taken."""
    post(study.paths, Propose(proposal=proposal))
    return "Queued; " + taken(study)


def taken(study: Study) -> str:
    """Say when what lies in the inbox is taken."""
    if driver_lives(study.paths):
        return "the running search takes it next."
    return "no search is running: the next `overnight run` takes it first."


def _proposal(study: Study, wish: Wish) -> Proposal:
    source = outsider(wish.source)
    if not wish.why.strip():
        raise BadValue("the reason is empty: the ledger keeps one for every proposal")
    watch = wish.watch or "; ".join(study.policy.knobs[name].watch for name in wish.diff if name in study.policy.knobs)
    for what, text in (("the reason", wish.why), ("what to watch", watch)):
        if len(text) > LONGEST_WORDS:
            raise BadValue(f"{what} has {len(text)} characters: say it in at most {LONGEST_WORDS}")
    if (wish.abort_above is None) != (wish.abort_after is None):
        raise BadValue(
            "to end a hopeless run early takes both: a probe score, and the share of the budget from which it counts"
        )
    try:
        abort_if = None
        if wish.abort_above is not None and wish.abort_after is not None:
            abort_if = AbortIf(probe_above=wish.abort_above, after=wish.abort_after)
        return Proposal(
            diff=dict(wish.diff),
            source=source,
            rationale=wish.why,
            watch=watch,
            parent=wish.parent,
            predicted_change=wish.predicted_change,
            confidence=wish.confidence,
            abort_if=abort_if,
        )
    except ValidationError as error:
        raise BadValue(explain(error)) from error


def _resolve(
    study: Study, proposal: Proposal, nodes: dict[int, TrialConfig], best: TrialConfig
) -> TrialConfig | Refusal:
    """Return the config that a proposal would become if its turn came now."""
    if proposal.parent is not None and proposal.parent not in nodes:
        return Refusal(f"node {proposal.parent} is not in the lineage")
    parent = best if proposal.parent is None else nodes[proposal.parent]
    return study.policy.admit(
        proposal,
        parent,
        budget=study.budget,
        vocabulary=study.vocabulary,
        base=study.base,
        lengths=study.lengths,
    )


def _letters(study: Study) -> Iterator[Proposal]:
    for message in peek(study.paths):
        if isinstance(message, Propose):
            yield message.proposal
