"""What the reading commands print for people, in any width of terminal; 80 columns lose columns but no sense."""

from __future__ import annotations

import math
from collections.abc import Callable

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from harness.ablation import Step
from harness.conditions import meaningful
from harness.config import TrialConfig, told
from harness.memory import Held
from harness.records import Guard, Past, Role, Standing, Trial, TrialState, unit_of
from harness.report import sources, words
from harness.report.documents import Comparison
from harness.report.summary import (
    Facts,
    Level,
    ablated,
    failed,
    from_base,
    improvement,
    kept,
    level,
    state,
    stop_reason,
    utilization,
    warnings,
)
from harness.rows import Sensed, StudyRow

WITHOUT_NOTE = "without it: what the best config loses on fresh shared seeds; positive: the step still helps."
BASE_NOTE = "from base: a node's score minus that of the untouched base model; negative is better."
SCHEDULE_NOTE = (
    "Each node goes on from the checkpoint of the one before it, for one more budget, its learning rate annealing"
    " within it: the lineage is a schedule. difference: against the node before it, continued as long."
)
NEWEST_INSIGHTS = 3
"""Notes of a language model that `overnight status` shows; the report has all."""
WIDE = 110
"""Columns from which the ledger has room for reasons."""
STYLES = {
    "kept": "bold green",
    "inconclusive": "yellow",
    "discarded": "dim",
    "refused": "magenta",
    "duplicate": "magenta",
    "stale": "magenta",
    "running": "cyan",
    "queued": "cyan",
}


def _pairs() -> Table:
    """Return an empty two-column list of names and values."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _rows(*columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False, padding=(0, 1))
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", vertical="top", overflow="fold")
    return table


def _level_words(found: Level | None, metric: str) -> str:
    if found is None:
        return "not known yet"
    score = words.plus_minus(words.score(found.score), found.standard_error)
    beside = words.beside(found.perplexity, found.accuracy)
    return f"{score} {metric}{beside} (mean of {words.count(found.replicates, 'trial')})"


def reference(facts: Facts) -> str | None:
    """Return what the untouched base comes to; None where a fresh model is trained."""
    found = facts.reference
    if found is None:
        return None
    beside = words.beside(found.perplexity, found.accuracy)
    return f"{words.score(found.score)} {words.metric(facts.study)}{beside}{words.held(found)}"


def guard(facts: Facts) -> str | None:
    """Return how baseline and best stand on the guard set against the untouched base; None where there is no set."""
    if facts.guard is None:
        return None
    parts = [f"{name} {words.guarded(facts.guard, node.guard_score)}" for name, node in _named(facts)]
    limit = f"at most {facts.guard.max_regression:g} bits per byte worse than the untouched base's"
    return f"{limit} {facts.guard.reference:.4f}" + (f": {', '.join(parts)}" if parts else "")


def _named(facts: Facts) -> list[tuple[str, Standing]]:
    named = (("baseline", facts.baseline), ("best", facts.best))
    return [(name, node) for name, node in named if node is not None and node.guard_score is not None]


def headline(facts: Facts) -> str:
    """Return the answer of the study in one sentence."""
    before, gain = level(facts, facts.baseline), improvement(facts)
    if before is None:
        return "Nothing is known yet: the baseline has no score."
    tried = words.count(sum(past.verdict is not None for past in facts.past), "decided proposal")
    if not kept(facts):
        yet = " yet" if facts.driver_lives else ""
        return f"No improvement is proven{yet}: {tried}, none kept."
    if gain is None:
        return (
            f"{kept(facts)} of {tried} kept, each proven better than going on unchanged; how much better the best is"
            " than the baseline continued as often is not known: nobody has run that."
        )
    error = f" ± {gain.standard_error:.4f}" if gain.standard_error is not None else ""
    if facts.continues:
        return (
            f"The best config is {gain.amount:.4f}{error} {words.metric(facts.study)} better than the baseline"
            f" continued as long; {kept(facts)} of {tried} kept."
        )
    return (
        f"The best config is {gain.amount:.4f}{error} {words.metric(facts.study)} better than the baseline"
        f" ({gain.amount / before.score:.1%}); {kept(facts)} of {tried} kept."
    )


def to_beat(facts: Facts) -> str:
    """Return what candidates are compared with where trials go on from their parent's checkpoint."""
    best = facts.best
    if best is None or best.score_to_beat is None:
        return "not known yet: trials go on from the best checkpoint, and its own config has not"
    runs = words.count(len(best.to_beat), "trial")
    return (
        f"{words.score(best.score_to_beat)}, the best config continued from its own checkpoint (mean of {runs}):"
        " trials go on from their parent's"
    )


def _after(facts: Facts, budgets: int) -> str:
    return f", after {words.segments(budgets)}" if facts.continues else ""


def status(facts: Facts) -> RenderableType:
    """Return the state of a study on one screen."""
    table = _pairs()
    reason = stop_reason(facts)
    table.add_row("study", f"{facts.study.name} ({facts.study.task}, {facts.study.budget} a trial)")
    table.add_row("state", state(facts) + (f": {reason}" if reason else ""))
    metric, untouched, limit = words.metric(facts.study), reference(facts), guard(facts)
    if untouched is not None:
        table.add_row("untouched base", untouched)
    table.add_row("baseline", _level_words(level(facts, facts.baseline), metric) + _after(facts, 1))
    best = level(facts, facts.best)
    name = f" [{words.node(best.node)}]" if best is not None and best.node else ""
    table.add_row("best", Text(_level_words(best, metric) + _after(facts, len(facts.best_lineage)) + name))
    if facts.continues:
        table.add_row("to beat", to_beat(facts))
    if limit is not None:
        table.add_row("guard", limit)
    if facts.noise is not None:
        freedom = facts.noise.degrees_of_freedom
        table.add_row("noise", f"{facts.noise.standard_deviation:.4f} between seeds ({freedom} degrees of freedom)")
    done, broken = sum(trial.score is not None for trial in facts.trials), len(failed(facts))
    table.add_row("trials", f"{done} scored, {broken} failed of {len(facts.trials)}")
    states = {decision: sum(words.outcome(past) == decision for past in facts.past) for decision in STYLES}
    table.add_row("proposals", ", ".join(f"{number} {name}" for name, number in states.items() if number) or "none")
    share = utilization(facts)
    if share is not None:
        table.add_row("utilization", f"{share:.0%} of the wall clock was budgeted training")
    parts: list[RenderableType] = [Text(headline(facts), style="bold")]
    parts += [Text(line, style="bold red") for line in warnings(facts)]
    parts += ["", table]
    if facts.past or facts.calls:
        parts += ["", _sources(facts)]
    if facts.insights:
        parts += ["", Text(f"Noted by the proposer, newest of {len(facts.insights)}:", style="bold")]
        parts += [Text(f"  {text}") for text in facts.insights[: -NEWEST_INSIGHTS - 1 : -1]]
    return Group(*parts)


def _sources(facts: Facts) -> Table:
    """Return who proposed, how often that was kept, and what it cost."""
    names = ("proposer", "proposals", "decided", "kept", "win rate", "turned away", "failed trials", "calls", "cost")
    table = _rows(*names, right=names[1:])
    for row in sources.sources(facts):
        rate = words.NOTHING if row.win_rate is None else f"{row.win_rate:.0%}"
        numbers = (row.proposals, row.decided, row.kept, rate, row.turned_away, row.failed_trials)
        calls = f"{row.calls} ({row.failed_calls} failed)" if row.failed_calls else str(row.calls or words.NOTHING)
        table.add_row(words.source(row.source, row.model), *map(str, numbers), calls, words.cost(row))
    return table


def ledger(facts: Facts, width: int) -> RenderableType:
    """Return one row per proposal; the reasons join in from `WIDE` columns on."""
    wide = width >= WIDE
    columns = ["#", "change", "difference", "runs", "outcome"]
    if wide:
        columns[1:1] = ["parent", "source"]
        columns.append("why")
    if facts.guard is not None:
        columns.insert(columns.index("runs"), "guard")
    table = _rows(*columns, right=("#", "difference", "guard", "runs"))
    table.columns[columns.index("difference")].no_wrap = True
    table.columns[columns.index("outcome")].no_wrap = True
    configs = {standing.node: standing.config for standing in facts.lineage}
    for past in facts.past:
        name = words.outcome(past)
        cells = [str(past.number), "\n".join(words.change(past.proposal.diff, _parent(past, configs)))]
        cells.append(_difference(past))
        if facts.guard is not None:
            cells.append(words.guarded(facts.guard, guard_score(past)))
        cells += [str(len(past.trials)), name]
        if wide:
            cells[1:1] = [words.node(past.parent), past.proposal.source]
            cells.append(words.reason(past) or words.NOTHING)
        style = STYLES.get(name, "")
        table.add_row(
            *(Text(cell, style=style if at == columns.index("outcome") else "") for at, cell in enumerate(cells))
        )
    note = "difference: candidate minus incumbent on fresh shared seeds; negative is better."
    if facts.continues:
        note += " Both go on from the incumbent's checkpoint, for one more budget."
    if facts.guard is not None:
        note += f" guard: bits per byte worse than the untouched base, at most {facts.guard.max_regression:g}."
    if not wide:
        note += " Reasons: `overnight show pN`, or a wider terminal."
    untouched = reference(facts)
    above = [] if untouched is None else [Text(f"The untouched base scores {untouched}.", style="dim")]
    return Group(*above, table, Text(note, style="dim"))


def _parent(past: Past, configs: dict[int, TrialConfig]) -> TrialConfig | None:
    return None if past.parent is None else configs.get(past.parent)


def _difference(past: Past) -> str:
    if past.verdict is not None and past.verdict.difference is not None:
        if past.verdict.replicates == 0:
            return f"({words.signed(past.verdict.difference)})"
        return words.plus_minus(words.signed(past.verdict.difference), past.verdict.standard_error)
    return next(iter(words.failures(past)), words.NOTHING)


def lineage(facts: Facts, width: int) -> RenderableType:
    """Return the chain from the baseline to the incumbent, then the config that it amounts to."""
    untouched = facts.reference
    if facts.baseline is None or facts.best is None:
        beside = "" if untouched is None else f" The untouched base scores {reference(facts)}."
        return Text(f"The baseline has no score yet, so there is no lineage.{beside}")
    taken_out = ablated(facts)
    columns = ["node", "change", "difference", "score"] + ([] if untouched is None else ["from base"])
    columns += (["without it"] if taken_out else []) + (["why it was kept"] if width >= WIDE else [])
    table = _rows(*columns, right=("difference", "score", "from base"))
    for name in {"node", "difference", "score", "from base"}.intersection(columns):
        table.columns[columns.index(name)].no_wrap = True
    configs = {standing.node: standing.config for standing in facts.lineage}
    by_number = {past.number: past for past in facts.past}
    if untouched is not None:
        first = ("untouched base", "nothing is trained", words.NOTHING, words.score(untouched.score), words.NOTHING)
        table.add_row(*first, *[words.NOTHING] * (len(columns) - len(first)))
    for standing in facts.best_lineage:
        found, past = level(facts, standing), by_number.get(standing.node)
        parent = None if standing.parent is None else configs[standing.parent]
        cells = [
            words.node(standing.node),
            "\n".join(words.change(standing.diff, parent)) or "the owner's config",
            words.NOTHING if past is None else _difference(past),
            words.NOTHING if found is None else words.plus_minus(words.score(found.score), found.standard_error),
        ]
        if untouched is not None:
            cells.append(words.signed(from_base(facts, found)))
        if taken_out:
            cells.append(words.without(taken_out.get(standing.node)))
        cells.append(words.NOTHING if past is None else words.reason(past) or words.NOTHING)
        table.add_row(*cells[: len(columns)])
    note = [Text(WITHOUT_NOTE, style="dim")] if taken_out else []
    if untouched is not None:
        note.insert(0, Text(BASE_NOTE, style="dim"))
    if facts.continues:
        note.append(Text(SCHEDULE_NOTE, style="dim"))
    return Group(
        table, *note, "", Text("Together, against the baseline:", style="bold"), Padding(_totals(facts), (0, 0, 0, 2))
    )


def _totals(facts: Facts) -> RenderableType:
    assert facts.baseline is not None
    assert facts.best is not None
    changes = total_changes(facts.baseline, facts.best)
    if not changes:
        return Text("nothing: the baseline is the best known config")
    table = _pairs()
    for knob, (before, after) in changes.items():
        table.add_row(knob, f"{before} → {after}")
    return table


def total_changes(baseline: Standing, best: Standing) -> dict[str, tuple[str, str]]:
    """Return every knob in which the best config differs from the baseline, as words for before and after.

    One that means nothing in a config has no value there.
    """
    before, after = meaningful(baseline.config), meaningful(best.config)
    return {
        knob: (words.value(before.get(knob)), words.value(after.get(knob)))
        for knob in sorted(before | after)
        if before.get(knob) != after.get(knob)
    }


def trial(
    found: Trial, sensors: Sensed, study: StudyRow, guard: Guard | None, held: Held | None = None
) -> RenderableType:
    """Return one trial: what ran, how it ended, its curve and, where something was trained, its config."""
    table = _pairs()
    seed = "" if found.role is Role.REFERENCE else f", seed {found.seed}, budget {found.budget}"
    table.add_row("trial", f"{found.id}: {words.purpose(found)}{seed}")
    if found.start is not None:
        table.add_row("began with", f"the checkpoint of {words.node(found.start)}")
    style = "bold" if found.score is not None else "" if found.state is TrialState.RUNNING else "red"
    table.add_row("outcome", Text(words.ended(found), style=style))
    if found.score is not None:
        table.add_row("metric", unit_of(study.metric, study.task))
    if found.perplexity is not None:
        table.add_row("perplexity", f"{found.perplexity:.2f} a token")
    if found.guard_score is not None:
        against = "" if found.role is Role.REFERENCE else f" ({words.guarded(guard, found.guard_score)})"
        table.add_row("guard", f"{words.score(found.guard_score)} bits per byte{against}")
    for name, item in _amounts(found).items():
        table.add_row(name, item)
    table.add_row("device", f"{found.device}, sandbox {found.sandbox}, epoch {found.epoch}")
    said = {"°C": sensors.celsius, "W": sensors.watts}
    if any(number is not None for number in said.values()):
        numbers = ", ".join(f"{number:.0f} {unit}" for unit, number in said.items() if number is not None)
        table.add_row("sensors", f"{numbers} near the end of training")
    parts: list[RenderableType] = [table]
    if held is not None:
        parts += ["", Text("Memory, estimated", style="bold"), _memory(found, held)]
    if found.curve:
        parts += ["", Text("Learning curve", style="bold"), _curve(found, study.metric)]
    if found.role is not Role.REFERENCE:
        parts += ["", Text("Config", style="bold"), _config(found.config)]
    return Group(*parts)


def _memory(found: Trial, held: Held) -> Table:
    """Return what the trial was expected to hold, in parts, beside what it held."""
    estimate, peak, expected = held.estimate, found.peak_memory_bytes, held.expected_peak_bytes
    table = _rows("part", "MiB", "counted", right=("MiB",))
    for part in sorted(estimate.parts, key=lambda part: -part.size_bytes):
        table.add_row(part.name, _mebibytes(part.size_bytes), part.what)
    table.add_row("together", _mebibytes(estimate.total_bytes), f"at its fullest, the {estimate.moment}")
    if estimate.host_bytes:
        table.add_row("on the host", _mebibytes(estimate.host_bytes), "paged states of the optimizer")
    learned = held.correction
    said = (
        f"× {learned.ratio:.2f}, the median of {words.count(learned.trials, 'other trial')}" if learned.trials else ""
    )
    table.add_row("expected peak", _mebibytes(expected), said or "of what a job itself can see")
    if peak is not None:
        error = round(expected / peak - 1, 2) + 0.0  # no negative zero
        table.add_row("observed peak", _mebibytes(peak), f"the estimate is off by {error:+.0%}")
    return table


def _mebibytes(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.0f}"


def _amounts(found: Trial) -> dict[str, str]:
    amounts: dict[str, str] = {}
    if found.steps is not None:
        tokens = f", {found.tokens:,} tokens" if found.tokens is not None else ""
        size = f", {found.parameters:,} parameters" if found.parameters is not None else ""
        amounts["work"] = f"{words.count(found.steps, 'step')}{tokens}{size}"
    spans = {"train": found.train_seconds, "warm-up": found.warmup_seconds, "score": found.score_seconds}
    times = [f"{name} {seconds:.1f} s" for name, seconds in spans.items() if seconds is not None]
    if times:
        amounts["time"] = ", ".join(times)
    if found.peak_memory_bytes is not None:
        amounts["peak memory"] = f"{found.peak_memory_bytes / 2**20:,.0f} MiB"
    return amounts


def _curve(found: Trial, metric: str) -> Table:
    probe = "probe bits/pair" if metric == "bits_per_pair" else "probe bits/byte"
    names = ("progress", "step", "train loss", probe, "learning rate", "gradient norm")
    table = _rows(*names, right=names)
    for point in found.curve:
        numbers = (point.train_loss, point.probe_score, point.learning_rate, point.gradient_norm)
        table.add_row(f"{point.progress:.0%}", str(point.step), *(words.value(number) for number in numbers))
    return table


def _config(config: TrialConfig) -> Table:
    table, meant = _pairs(), meaningful(config)
    for knob, item in meant.items():
        table.add_row(knob, words.value(item))
    quiet = [knob for knob in told(config) if knob not in meant]
    if quiet:
        table.add_row("no meaning here", Text(", ".join(quiet), style="dim"))
    return table


def guard_score(past: Past) -> float | None:
    """Return a proposal's mean on the guard set over its fresh runs, or its first run's where there is no other."""
    runs = [t for t in past.trials if t.guard_score is not None and t.config == past.config]
    counted = [t.guard_score for t in runs if t.replicate > 0] or [t.guard_score for t in runs]
    known = [score for score in counted if score is not None]
    return math.fsum(known) / len(known) if known else None


def proposal(
    past: Past, parent: TrialConfig | None, taken_out: Step | None, study: StudyRow, guard: Guard | None
) -> RenderableType:
    """Return one proposal: what, why, what was expected, what became of it, and its trials."""
    said = past.proposal
    table = _pairs()
    made_by = words.source(said.source, said.model)
    table.add_row("proposal", f"p{past.number} by {made_by}, on {words.node(past.parent)}")
    table.add_row("change", "\n".join(words.change(said.diff, parent)))
    table.add_row("why", Text(said.rationale))
    table.add_row("watch", Text(said.watch))
    if said.predicted_change is not None:
        sure = "" if said.confidence is None else f", {said.confidence:.0%} sure"
        table.add_row("predicted", words.signed(said.predicted_change) + sure)
    if said.abort_if is not None:
        table.add_row("gives up if", words.abort(said.abort_if, study))
    table.add_row("outcome", Text(words.outcome(past), style=STYLES.get(words.outcome(past), "")))
    table.add_row("difference", _difference(past))
    if guard is not None:
        table.add_row("guard", f"{words.guarded(guard, guard_score(past))}, bits per byte against the untouched base")
    table.add_row("reason", Text(words.reason(past) or words.NOTHING))
    if taken_out is not None:
        table.add_row("without it", Text(words.without(taken_out)))
    if not past.trials:
        return table
    trials = _rows("trial", "role", "replicate", "ended", right=("trial", "replicate"))
    for found in past.trials:
        trials.add_row(str(found.id), found.role.value, str(found.replicate), Text(words.ended(found)))
    return Group(table, "", trials)


def comparison(found: Comparison, study: StudyRow) -> RenderableType:
    """Return two trials side by side, and how much of their difference is more than chance."""
    table = _rows("", f"A: trial {found.a.id}", f"B: trial {found.b.id}")
    for name, of in (
        ("what", words.purpose),
        (words.metric(study), lambda trial: words.score(trial.score)),
        *_beside(found),
        ("seed", lambda trial: str(trial.seed)),
        ("steps", lambda trial: words.value(trial.steps)),
        ("parameters", lambda trial: words.value(trial.parameters)),
    ):
        table.add_row(name, of(found.a), of(found.b))
    before, after = ({} if one.role is Role.REFERENCE else meaningful(one.config) for one in (found.a, found.b))
    for knob in found.diff:
        table.add_row(knob, words.value(before.get(knob)), words.value(after.get(knob)), style="bold")
    better = "better" if found.difference < 0 else "worse"
    lines = [f"B is {abs(found.difference):.4f} {better} than A."]
    if found.seed_standard_error is not None:
        lines.append(f"Two seeds of one config differ by about {found.seed_standard_error:.4f} (the study's noise).")
    what = "preference pairs" if study.metric == "bits_per_pair" else "documents"
    lines.append(f"B predicts {found.documents_better} of {found.documents} val {what} better.")
    if found.document_standard_error is not None:
        lines.append(f"Over {what} the difference has a standard error of {found.document_standard_error:.4f}.")
    return Group(table, "", Text("\n".join(lines)))


def _beside(found: Comparison) -> list[tuple[str, Callable[[Trial], str]]]:
    """Return the figures that stand beside a score: a perplexity, or of preferences the accuracy, and the guard's."""
    rows: list[tuple[str, Callable[[Trial], str]]] = [("perplexity", lambda trial: words.value(trial.perplexity))]
    if found.a.accuracy is not None:
        rows = [("accuracy", lambda trial: words.value(trial.accuracy))]
    if found.a.guard_score is not None:
        rows.append(("guard, bits per byte", lambda trial: words.score(trial.guard_score)))
    return rows
