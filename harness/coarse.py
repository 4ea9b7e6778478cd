"""Rows of the ledger as a coding agent is told of them: bounded, rounded to the noise, and nothing of a replay.

Digits below the noise would let it climb the validation split's luck (DESIGN section 7), so every number that comes
from val goes through `Noise.rounded` here, verdicts get a sentence anew because the judge's own has four decimals, and
before the noise is known there is no score at all. Replays do not exist for an agent: they and the holdout are what the
owner checks the search with. Texts by proposers, people and jobs are data: in one line, cut and in quotes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harness.answers import End, KnobAnswer, Node, Point, ProposalAnswer, Row, Status, TrialAnswer
from harness.conditions import meaningful
from harness.config import Diff, Knob, TrialConfig, Value, difference, flatten, idle
from harness.errors import BadInput
from harness.records import CurvePoint, Decision, Guard, Noise, Past, Role, Standing, Trial, without_control
from harness.report import summary, words
from harness.rows import Ended

OPENING, CLOSING = "\N{LEFT DOUBLE QUOTATION MARK}", "\N{RIGHT DOUBLE QUOTATION MARK}"
PLAIN_QUOTES = str.maketrans({OPENING: '"', CLOSING: '"'})
LONGEST_QUOTE = 300
"""Characters of a text by somebody else."""
LONGEST_WORD = 80
"""Characters of a knob's name or value that somebody else wrote."""
MOST_CHANGES = 32
ACCURACY_DIGITS = 2
"""Of an accuracy: it is beside the score, and finer digits would tell the score's own."""
CURVE_POINTS = 12
"""Most points of a learning curve, evenly spaced, the last one included."""


def quote(text: str | None, most: int = LONGEST_QUOTE) -> str | None:
    """Return a text by somebody else in one line, cut, between typographic quotes that it cannot close itself."""
    if text is None:
        return None
    line = " ".join(without_control(text).translate(PLAIN_QUOTES).split())
    cut = line if len(line) <= most else line[: most - 1] + "…"
    return f"{OPENING}{cut}{CLOSING}"


def rounded(number: float | None, noise: Noise | None) -> float | None:
    """Return a number that comes from val to the noise; None while the noise is not known."""
    return None if number is None or noise is None else noise.rounded(number)


def _significant(number: float | None, digits: int) -> float | None:
    return None if number is None else float(f"{number:.{digits}g}")


def _perplexity(perplexity: float | None, score: float | None, noise: Noise | None) -> float | None:
    """Return the perplexity that belongs to the rounded score: both come from the same nats, so log ppl ~ score."""
    coarse = rounded(score, noise)
    if perplexity is None or not score or coarse is None:
        return None
    return _significant(perplexity ** (coarse / score), 4)


def status(facts: summary.Facts, *, waiting: int, mark: int) -> Status:
    """Return how a study stands."""
    noise = facts.noise
    searched = [trial for trial in facts.trials if trial.role is not Role.FINAL]
    untouched = None if facts.reference is None else facts.reference.score
    gain = summary.improvement(facts)
    return Status(
        study=facts.study.name,
        task=facts.study.task,
        metric=facts.study.metric,
        budget=facts.study.budget,
        state=summary.state(facts),
        stop_reason=quote(summary.stop_reason(facts)),
        trials=_counts([trial.state.value for trial in searched]),
        proposals=_counts([past.state.value for past in facts.past]),
        waiting=waiting,
        kept=summary.kept(facts),
        reference=rounded(untouched, noise),
        max_guard_regression=None if facts.guard is None else facts.guard.max_regression,
        warnings=list(_warnings(facts)),
        baseline=_node(facts, facts.baseline),
        best=_node(facts, facts.best),
        improvement=None if gain is None else rounded(gain.amount, noise),
        start_from="parent" if facts.continues else "base",
        to_beat=None if facts.best is None else rounded(facts.best.score_to_beat, noise),
        noise=None if noise is None else _significant(noise.standard_deviation, 2),
        rounded_to=None if noise is None else noise.step,
        mark=mark,
    )


def _warnings(facts: summary.Facts) -> Iterator[str]:
    """Yield what `summary.warnings` says, without a number that is finer than the noise."""
    reference, baseline = facts.reference, facts.baseline
    if reference is not None and baseline is not None:
        before, after = rounded(reference.score, facts.noise), rounded(baseline.score, facts.noise)
        if before is not None and after is not None and after > before:
            yield "the trained baseline is worse than the untouched base: its learning rate is probably too high"
    on_guard = None if baseline is None else baseline.guard_score
    if facts.guard is not None and on_guard is not None and facts.guard.is_broken_by(on_guard):
        yield "the baseline itself breaks the guard: it is worse on the guard set than the study allows"


def _regression(found: float | None, guard: Guard | None) -> float | None:
    """Return how much worse than the untouched base a score on the guard set is, rounded to the noise there."""
    if found is None or guard is None:
        return None
    return rounded(found - guard.reference, guard.noise)


def _counts(states: Sequence[str]) -> dict[str, int]:
    return {state: states.count(state) for state in sorted(set(states))}


def _node(facts: summary.Facts, standing: Standing | None) -> Node | None:
    level = summary.level(facts, standing)
    if level is None or standing is None or facts.baseline is None:
        return None
    return Node(
        node=level.node,
        score=rounded(level.score, facts.noise),
        perplexity=_perplexity(level.perplexity, level.score, facts.noise),
        accuracy=_significant(level.accuracy, ACCURACY_DIGITS),
        guard_regression=_regression(level.guard_score, facts.guard),
        standard_error=_significant(level.standard_error, 2),
        replicates=level.replicates,
        changes=difference(facts.baseline.config, standing.config),
    )


def knob(turned: Knob, knobs: Mapping[str, Knob], baseline: TrialConfig, best: TrialConfig) -> KnobAnswer:
    """Return one of the knobs with its values in the baseline and the incumbent, where it means something there."""
    before, now = (
        None if turned.name in idle(flat, knobs) else flat.get(turned.name) for flat in map(flatten, (baseline, best))
    )
    return KnobAnswer(
        name=turned.name,
        type=turned.type,
        low=turned.low,
        high=turned.high,
        scale=turned.scale,
        choices=list(turned.choices),
        when={gate: list(wanted) if isinstance(wanted, tuple) else wanted for gate, wanted in turned.when.items()},
        watch=turned.watch,
        default=turned.default,
        baseline=before,
        best=now,
    )


def row(past: Past, noise: Noise | None) -> Row:
    """Return a proposal as a row of the ledger."""
    verdict = past.verdict
    return Row(
        proposal=past.number,
        source=past.proposal.source[:40],
        parent=past.parent,
        changes=_changes(past.proposal.diff),
        outcome=words.outcome(past),
        difference=None if verdict is None else rounded(verdict.difference, noise),
        standard_error=None if verdict is None else _significant(verdict.standard_error, 2),
        replicates=0 if verdict is None else verdict.replicates,
        reason=_reason(past),
        failures=words.failures(past),
        rationale=quote(past.proposal.rationale) or "",
    )


def _changes(diff: Diff) -> dict[str, Value]:
    """Return a diff as it was proposed; a refused one may hold anything, so it is cut."""
    cut = {name[:LONGEST_WORD]: item[:LONGEST_WORD] if isinstance(item, str) else item for name, item in diff.items()}
    return dict(list(cut.items())[:MOST_CHANGES])


def _reason(past: Past) -> str | None:
    """Return why a proposal ended as it did, without a number that is finer than the noise."""
    verdict = past.verdict
    if verdict is None:
        return quote(past.reason)
    if words.breaks_guard(past):
        return "breaks the guard: worse on the guard set than the study allows"
    over = f"over {words.count(verdict.replicates, 'fresh seed')}"
    match verdict.decision:
        case Decision.KEPT:
            return f"proven better than the incumbent {over}"
        case Decision.INCONCLUSIVE:
            return f"neither better nor worse is proven {over}"
        case Decision.DISCARDED if verdict.replicates:
            return f"too little {over} to be worth more runs"
        case Decision.DISCARDED:
            scored = any(trial.score is not None for trial in past.trials)
            return "not promising after its first run" if scored else "none of its runs was scored"


def proposal(past: Past, noise: Noise | None, guard: Guard | None) -> ProposalAnswer:
    """Return a proposal in full."""
    return ProposalAnswer(
        **row(past, noise).model_dump(),
        watch=quote(past.proposal.watch) or "",
        predicted_change=rounded(past.proposal.predicted_change, noise),
        confidence=past.proposal.confidence,
        trials=[trial(one, noise, guard) for one in past.trials],
    )


def trial(found: Trial, noise: Noise | None, guard: Guard | None) -> TrialAnswer:
    """Return a trial of the search; `BadInput` for one of a replay."""
    if found.role is Role.FINAL:
        raise BadInput(f"trial {found.id} belongs to a replay, which only the owner looks at")
    speed = found.tokens / found.train_seconds if found.tokens and found.train_seconds else None
    return TrialAnswer(
        trial=found.id,
        proposal=found.proposal,
        role=found.role.value,
        state=found.state.value,
        replicate=found.replicate,
        start=found.start,
        config=meaningful(found.config),
        score=rounded(found.score, noise),
        perplexity=_perplexity(found.perplexity, found.score, noise),
        accuracy=_significant(None if noise is None else found.accuracy, ACCURACY_DIGITS),
        guard_regression=_regression(found.guard_score, guard),
        steps=found.steps,
        tokens=found.tokens,
        tokens_per_second=_significant(speed, 4),
        parameters=found.parameters,
        train_seconds=_significant(found.train_seconds, 4),
        peak_memory_bytes=found.peak_memory_bytes,
        error_class=None if found.error_class is None else found.error_class[:80],
        error_text=quote(found.error_text),
        curve=[_point(point, noise) for point in _spread(found.curve)],
    )


def _spread(curve: Sequence[CurvePoint]) -> list[CurvePoint]:
    if len(curve) <= CURVE_POINTS:
        return list(curve)
    return [curve[round(at * (len(curve) - 1) / (CURVE_POINTS - 1))] for at in range(CURVE_POINTS)]


def _point(point: CurvePoint, noise: Noise | None) -> Point:
    return Point(
        progress=round(point.progress, 3),
        step=point.step,
        train_loss=_significant(point.train_loss, 4),
        probe=rounded(point.probe_score, noise),
        learning_rate=_significant(point.learning_rate, 4),
        gradient_norm=_significant(point.gradient_norm, 4),
    )


def end(ended: Ended, outcome: str) -> End:
    """Return something that ended under the name by which `show` finds it."""
    return End(what=f"p{ended.number}" if ended.kind == "proposal" else str(ended.number), outcome=outcome)
