"""Sections of a briefing that say what came of the proposals: results, failures, records, and what was not tried."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from agent.evidence import breaks_guard
from agent.frontier import Load, frontier, other_failures
from agent.importance import Importance, importances
from agent.prose import NOTHING, Figures, changes, number, quoted, share, size, value, word
from agent.record import TURNED_AWAY, Prediction, calibration, name_of, records
from agent.space import from_unit, gauge_of, to_unit
from agent.view import View, meaningful, node_name
from harness.config import Knob, TrialConfig, Value
from harness.errors import BadValue
from harness.records import Past, Proposal, ProposalState, Trial, TrialState
from harness.sizes import packs, rows_each

NEAR, RECENT, STRONG = 8, 8, 4
"""Rows of what was tried: near misses, newest others, and the clearest losses."""
RESPONSES = 6
"""Values shown of each knob."""
AT_ONCE = 10
"""Rows of shorter lists."""
FAILURES_EACH = 3
SUGGESTED = 4
BANDS = 4
"""Parts of a knob's range in which an untried one is looked for."""
INSIGHT_CHARACTERS = 300


def tried(view: View) -> list[str]:
    """Return near misses, the newest results and the clearest losses; what was kept is the lineage."""
    scored = [
        past
        for past in reversed(view.history.past)
        if past.verdict is not None and (effect := view.effects.get(past.number)) and effect.change is not None
        if not effect.kept
    ]
    node = view.incumbent.node if view.incumbent else None
    margin = view.history.noise.standard_deviation if view.history.noise is not None else view.figures.step
    losses = {past.number: _change(view, past) for past in scored}
    near = [past for past in scored if losses[past.number] <= margin]
    near.sort(key=lambda past: (past.parent != node, losses[past.number]))
    worst = sorted(scored, key=lambda past: -losses[past.number])
    chosen: dict[int, tuple[str, Past]] = {}
    for label, some, most in (("near miss", near, NEAR), ("recent", scored, RECENT), ("clear loss", worst, STRONG)):
        further = (past for past in some if past.number not in chosen)
        chosen |= {past.number: (label, past) for past in itertools.islice(further, most)}
    if not chosen:
        return []
    return [
        "Not kept, each against the incumbent of its time (what was kept is the lineage). A near miss on an older node"
        " may be worth another try on the incumbent.",
        "| | proposal | on | turned | difference | runs | outcome | by |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *(_tried(view, label, past) for label, past in chosen.values()),
    ]


def responses(view: View) -> list[str]:
    """Return for each knob how much it mattered, and what single changes of it did."""
    ranked = importances(view.history, view.effects.values(), view.flats)
    found = {one.knob: one for one in sorted(ranked, key=lambda one: (-view.figures.rounded(one.effect), one.knob))}
    single: dict[str, list[Past]] = {}
    for past in reversed(view.history.past):
        if len(past.proposal.diff) == 1 and view.effects.get(past.number) and past.verdict is not None:
            single.setdefault(next(iter(past.proposal.diff)), []).append(past)
    names = [*found, *(name for name in view.history.knobs if name not in found and name in single)]
    lines = [_response(view, name, found.get(name), single.get(name, ())[:RESPONSES]) for name in names]
    turned = {name for effect in view.effects.values() for name in effect.diff}
    never = [word(name) for name in view.history.knobs if name not in turned]
    if never and view.effects:
        lines.insert(0, f"Never turned: {', '.join(never)}.")
    if not lines:
        return []
    explained = (
        "Effect: median size of the differences that turning the knob made; one that turned several knobs counts with"
        " its share for each. Alone: results of turning this knob only, against the incumbent of their time."
    )
    return [explained, *lines]


def failures(view: View) -> list[str]:
    """Return where the memory ends, which rates diverge, and what else went wrong."""
    gauge = None if view.history.base is None else gauge_of(view.history)
    edge = frontier(view.trials, view.vocabulary, gauge, view.history.lengths)
    lines: list[str] = []
    if edge.failures:
        lines.append(f"- Out of memory, {edge.failures}×; the smallest that failed: {_loads(edge.failed)}.")
        lines.append(f"- The largest that fit: {_loads(edge.fit) or 'none yet'}.")
    elif edge.fit:
        lines.append(f"- Nothing ran out of memory. The largest that fit: {_loads(edge.fit[:2])}.")
    pasts = {past.number: past for past in view.history.past}
    for state, failed in sorted(other_failures(view.trials).items()):
        where = _rates(view, failed) if state is TrialState.DIVERGED else ""
        lines.append(f"- {state.value.replace('_', ' ').capitalize()}, {len(failed)}×{where}. Newest:")
        for trial in failed[:FAILURES_EACH]:
            past = None if trial.proposal is None else pasts.get(trial.proposal)
            turned = "" if past is None else f" ({changes(past.proposal.diff, view.before(past))})"
            lines.append(f"  - {_whose(trial)}{turned}: {quoted(trial.error_text or 'no text')}")
    return [*lines, *_forgetful(view)]


def _forgetful(view: View) -> Iterator[str]:
    """Yield the proposals that were turned down for the guard set, the newest first, with how far they went."""
    guard = view.history.guard
    broken = [past for past in reversed(view.history.past) if breaks_guard(past)]
    if guard is None or not broken:
        return
    figures = Figures.of(guard.noise)
    yield f"- Beyond the guard set's limit of {guard.max_regression:g}, {len(broken)}×. Newest:"
    for past in broken[:FAILURES_EACH]:
        runs = [trial for trial in past.trials if trial.guard_score is not None and trial.config == past.config]
        fresh = [trial for trial in runs if trial.replicate > 0] or runs
        scores = [trial.guard_score for trial in fresh if trial.guard_score is not None]
        worse = figures.difference(sum(scores) / len(scores) - guard.reference) if scores else NOTHING
        yield f"  - p{past.number} ({changes(past.proposal.diff, view.before(past))}): {worse} bits per byte"


def _rates(view: View, diverged: Iterable[Trial]) -> str:
    """Return the learning rates that diverged beside the highest that did not."""
    rates = sorted({trial.config.optim.learning_rate for trial in diverged})
    fine = [trial.config.optim.learning_rate for trial in view.trials if trial.score is not None]
    span = value(rates[0]) if len(rates) == 1 else f"{value(rates[0])} to {value(rates[-1])}"
    return f" at learning rate {span}" + (f", while rates up to {value(max(fine))} trained" if fine else "")


def waiting(view: View) -> list[str]:
    """Return what is queued or runs: proposing it again would be wasted."""
    out = [past for past in view.history.past if past.state in (ProposalState.QUEUED, ProposalState.RUNNING)]
    return [
        f"- p{past.number} {past.state.value}, by {word(name_of(past))}:"
        f" {changes(past.proposal.diff, view.before(past))}"
        for past in reversed(out[-AT_ONCE:])
    ]


def turned_away(view: View) -> list[str]:
    """Return the newest proposals that did not run, with the reason."""
    away = [past for past in view.history.past if past.state in TURNED_AWAY]
    return [
        f"- p{past.number} {past.state.value}, by {word(name_of(past))}: {changes(past.proposal.diff, None)}"
        f" {quoted(past.reason or 'no reason')}"
        for past in reversed(away[-AT_ONCE:])
    ]


def sampler(view: View, suggestions: Sequence[Proposal]) -> list[str]:
    """Return what the classical sampler learns from, and what it would try next."""
    scored = len(view.telling)
    failed = {effect.config for effect in view.effects.values() if effect.failure is not None}
    lines = [f"It has seen {scored} scored and {len(failed)} failed configs."] if scored else []
    lines += [f"- Would try {changes(one.diff, view.base)}: {quoted(one.rationale)}" for one in suggestions[:SUGGESTED]]
    return lines


def record(view: View) -> list[str]:
    """Return what each source achieved, and the newest predictions of language models beside the results."""
    found = records(view.history, view.effects, view.figures)
    if not found:
        return []
    lines = [
        "| by | proposed | decided | kept | share kept | failed | turned away | predictions with the right sign |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in found[:AT_ONCE]:
        right = f"{share(one.came_true)} of {len(one.predictions)}" if one.predictions else "–"
        won = share(one.kept / one.decided if one.decided else None)
        lines.append(
            f"| {word(one.source)} | {one.made} | {one.decided} | {one.kept} | {won} | {one.failed}"
            f" | {one.turned_away} | {right} |"
        )
    asked = [prediction for one in found for prediction in one.predictions if prediction.past.proposal.model]
    asked.sort(key=lambda prediction: prediction.past.number)
    bands = [
        f"{share(band.stated)} stated, {share(band.came_true)} came true ({band.count})" for band in calibration(asked)
    ]
    if bands:
        lines.append(f"Confidence of the language models' predictions: {'; '.join(bands)}.")
    if any(one.measured is not None for one in asked):
        lines.append(f"On average they predicted {_means(view, asked)}. The newest:")
    return [*lines, *(_prediction(view, one) for one in reversed(asked[-AT_ONCE:]))]


def insights(view: View) -> list[str]:
    """Return the model's own notes, the newest first."""
    return [f"- {quoted(text, INSIGHT_CHARACTERS)}" for text in reversed(view.history.insights[-AT_ONCE:])]


def direction(view: View) -> list[str]:
    """Ask for something else, and name what was never tried."""
    since = view.since_kept()
    lines = [
        f"The last {since} decided proposals kept nothing. Small steps around the incumbent are covered by the sampler:"
        " propose a change of another kind, such as knobs that were seldom turned, values far from those tried,"
        " several coupled knobs at once (model and learning rate, batch and learning rate), a near miss of an older"
        " node joined with another, or a branch from an older node. Say what would show that it works.",
        "What no config has had yet:",
    ]
    flats = [meaningful(config, view.history) for config in dict.fromkeys(_configs(view))]
    for knob in view.history.knobs.values():
        untried = _untried(knob, [flat[knob.name] for flat in flats if knob.name in flat])
        if untried:
            lines.append(f"- {word(knob.name)}: {', '.join(untried)}")
    return lines


def _change(view: View, past: Past) -> float:
    """Return a measured difference as it is shown: what is finer than the noise must not show in an order either."""
    change = view.effects[past.number].change
    assert change is not None
    return view.figures.rounded(change)


def _tried(view: View, label: str, past: Past) -> str:
    return (
        f"| {label} | p{past.number} | {node_name(past.parent)} | {changes(past.proposal.diff, view.before(past))}"
        f" | {view.measured(past)} | {view.runs(past)} | {view.outcome(past)} | {word(past.proposal.source)} |"
    )


def _response(view: View, name: str, importance: Importance | None, alone: Sequence[Past]) -> str:
    said = []
    if importance is not None:
        said.append(_importance(view, importance))
    if alone:
        knob = view.history.knobs.get(name)
        ordered = sorted(alone, key=lambda past: (_place(knob, past), past.number))
        said.append("alone: " + ", ".join(_alone(view, name, past) for past in ordered))
    return f"- {word(name)}: {'; '.join(said)}"


def _importance(view: View, one: Importance) -> str:
    times = f"{one.turns} result{'' if one.turns == 1 else 's'}"
    typical = view.figures.score(one.effect) if view.figures.rounded(one.effect) else "within the noise"
    said = f"effect {typical} ({times})"
    if one.trend is None:
        return said
    return f"{said}, the higher the {'better' if one.trend < 0 else 'worse'} (rank correlation {one.trend:+.2f})"


def _place(knob: Knob | None, past: Past) -> float:
    """Return where a single change went on its knob's scale; repairs can lead outside."""
    if knob is None:
        return 0.0
    try:
        return to_unit(knob, knob.check(past.proposal.diff[knob.name]))
    except BadValue:
        return 1.0


def _alone(view: View, name: str, past: Past) -> str:
    before = (view.before(past) or {}).get(name)
    turn = f"{value(before)}→{value(past.proposal.diff[name])}"
    effect = view.effects[past.number]
    result = "" if effect.change is None else f" {view.figures.difference(effect.change)}"
    return f"{turn}{result} {view.outcome(past)} (p{past.number})"


def _loads(some: Iterable[Load]) -> str:
    return "; ".join(_load(load) for load in some)


def _load(load: Load) -> str:
    config, model = load.trial.config, load.trial.config.model
    batch = config.batch
    parameters = "" if load.parameters is None else f", {load.parameters:,} parameters"
    shape = "" if model is None else f", depth {model.depth}, width {model.width}"
    peak = load.trial.peak_memory_bytes
    memory = "" if load.held_bytes is None else f", about {size(load.held_bytes)} by estimate"
    memory += "" if peak is None else f", peak {size(peak)}"
    rows = batch.per_device * rows_each(config)
    most = "" if packs(config) else "up to "
    per_step = load.pass_tokens * batch.accumulation
    return (
        f"{rows} × {most}{load.pass_tokens // rows} = {load.pass_tokens:,} tokens per pass"
        f" ({most}{per_step:,} per step){shape}{parameters}{memory}"
        f" ({_whose(load.trial)})"
    )


def _whose(trial: Trial) -> str:
    return node_name(trial.proposal) if trial.proposal is not None else "baseline"


def _prediction(view: View, one: Prediction) -> str:
    past, confidence = one.past, one.past.proposal.confidence
    sure = "" if confidence is None else f" ({share(confidence)} sure)"
    return (
        f"- p{past.number}: {changes(past.proposal.diff, view.before(past))}: predicted"
        f" {number(one.predicted, 2)}{sure}, measured {view.measured(past)}, {view.outcome(past)}."
        f" Said: {quoted(past.proposal.rationale)}"
    )


def _means(view: View, asked: Iterable[Prediction]) -> str:
    pairs = [(one.predicted, one.measured) for one in asked if one.measured is not None]
    predicted, measured = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    return f"{number(predicted, 2)} where {view.figures.difference(measured)} was measured ({len(pairs)} results)"


def _configs(view: View) -> Iterator[TrialConfig]:
    """Yield every config that was started."""
    for standing in view.history.lineage:
        yield standing.config
    for trial in view.trials:
        yield trial.config


def _untried(knob: Knob, seen: Iterable[Value]) -> list[str]:
    """Return the choices, or the parts of a range, that no config had."""
    if knob.type == "choice":
        known = set(seen)
        return [value(choice) for choice in knob.choices if choice not in known]
    assert knob.low is not None
    assert knob.high is not None
    bands = {min(BANDS - 1, int(BANDS * to_unit(knob, item))) for item in seen if knob.low <= float(item) <= knob.high}
    spans: list[list[int]] = []
    for band in sorted(set(range(BANDS)) - bands):
        if spans and spans[-1][1] == band:
            spans[-1][1] = band + 1
        else:
            spans.append([band, band + 1])
    return [f"{value(from_unit(knob, low / BANDS))} to {value(from_unit(knob, high / BANDS))}" for low, high in spans]
