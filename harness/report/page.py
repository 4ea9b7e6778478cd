"""The report: one HTML file that stands alone, without network, and answers in two minutes.

Order of the page is the order of a reader's questions: is anything better, and by how much; what was changed for it;
how did the night go; what is *not* proven; what was tried and why it was kept or not; what it cost and on what. Texts
that a proposer or a job wrote are data: they are escaped, wherever they stand.
"""

from __future__ import annotations

import importlib.resources
import json
import math
from collections import Counter
from collections.abc import Iterable
from html import escape
from pathlib import Path

from harness.files import write_whole
from harness.fullrun import is_full_run
from harness.limits import driver_seconds
from harness.paths import StudyPaths
from harness.queries import Reader
from harness.records import FAILURES, Past, Trial, TrialState
from harness.report import plot, sources, words
from harness.report.summary import (
    Facts,
    Level,
    ablated,
    gather,
    improvement,
    kept,
    level,
    state,
    stop_reason,
    utilization,
    warnings,
)
from harness.report.table import SCHEDULE_NOTE, WITHOUT_NOTE, guard, guard_score, headline, reference, total_changes
from harness.report.unproven import provable, unproven

REPAINT = """
function repaint() {
  const ink = getComputedStyle(document.body).getPropertyValue("--soft").trim();
  const paper = getComputedStyle(document.body).getPropertyValue("--raised").trim();
  for (const plot of document.querySelectorAll(".js-plotly-plot"))
    Plotly.relayout(plot, {"font.color": ink, "hoverlabel.bgcolor": paper, "hoverlabel.font.color": ink});
}
repaint();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
"""


def write_report(paths: StudyPaths, reader: Reader, target: Path, *, driver_lives: bool) -> None:
    """Write the report of a study to ``target``, whole or not at all."""
    facts = gather(reader, driver_lives=driver_lives, curves=True)
    write_whole(target, page(facts, paths))


def page(facts: Facts, paths: StudyPaths) -> str:
    """Return the report as one HTML document."""
    from plotly.offline import get_plotlyjs  # half a second that only this page needs

    css = importlib.resources.files("harness.report").joinpath("page.css").read_text(encoding="utf-8")
    body = "\n".join(
        (
            _header(facts),
            _tiles(facts),
            _section("What made the difference", _lineage(facts), SCHEDULE_NOTE if facts.continues else ""),
            _section(
                "The search",
                _plot("progress", plot.progress(facts).to_json()),
                PROGRESS_LEAD + (PROGRESS_OF_SCHEDULE if facts.continues else ""),
            ),
            _section(
                "Not proven",
                _list(unproven(facts)),
                "What this study does not show, however much one would like it to.",
            ),
            _section("Every proposal", _ledger(facts), LEDGER_LEAD + (GUARD_LEAD if facts.guard is not None else "")),
            _section("Learning curves", _plot("curves", plot.curves(facts).to_json()), CURVES_LEAD),
            _section("What it cost", _cost(facts)),
            *([_section("What the proposer noted", _list(facts.insights), INSIGHTS_LEAD)] if facts.insights else []),
            _section("The winner's config", _config(facts)),
            _footer(facts, paths),
        )
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(facts.study.name)} – overnight</title>\n<style>\n{css}</style>\n"
        f"<script>{get_plotlyjs()}</script>\n</head>\n<body>\n{body}\n<script>{REPAINT}</script>\n</body>\n</html>\n"
    )


PROGRESS_LEAD = (
    "Each mark is one training run. The line is the incumbent's mean, the band is what another seed alone would do to"
    " it. Hollow marks are screening runs: they select, so they never count for a config."
)
PROGRESS_OF_SCHEDULE = (
    " Trials go on from their parent's checkpoint: where the line steps down, a budget of training has come on top, and"
    " only marks between two steps can be compared."
)
GUARD_LEAD = (
    " Guard: bits per byte of the guard set above the untouched base's; what is beyond the limit is not kept, however"
    " good its score."
)
LEDGER_LEAD = (
    "The difference is candidate minus incumbent on fresh, shared seeds (negative is better), ± one standard error. In"
    " brackets: a single screening run, which proves nothing."
)
INSIGHTS_LEAD = "Notes of a language model to itself, oldest first: its beliefs, which nothing here has proven."
CURVES_LEAD = (
    "Score on the probe split while training. In colour the runs whose checkpoints stand for baseline and best."
)


def _section(title: str, content: str, lead: str = "") -> str:
    note = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return f"<section>\n<h2>{escape(title)}</h2>{note}\n{content}\n</section>"


def _list(sentences: Iterable[str]) -> str:
    return '<ul class="plain">' + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>"


def _plot(name: str, figure: str) -> str:
    safe = figure.replace("</", "<\\/")
    options = json.dumps({"displayModeBar": False, "responsive": True})
    return (
        f'<div class="plot" id="{name}"></div>\n<script>{{const figure = {safe};'
        f' Plotly.newPlot("{name}", figure.data, figure.layout, {options});}}</script>'
    )


# --- head --------------------------------------------------------------------------------------------------------


def _header(facts: Facts) -> str:
    study, reason = facts.study, stop_reason(facts)
    ended = f"{state(facts)}: {reason}" if reason else state(facts)
    about = f"Study {study.name} · {study.task} · {study.budget} a trial · {study.device or 'no device yet'} · {ended}"
    alarms = "".join(f'<p class="alarm">{escape(line)}</p>' for line in warnings(facts))
    return f"<header>\n<p>{escape(about)}</p>\n<h1>{escape(headline(facts))}</h1>\n{_three(facts)}{alarms}</header>"


def _three(facts: Facts) -> str:
    """Return the untouched base, the baseline and the best in one sentence; nothing where a fresh model is trained."""
    untouched, limit = reference(facts), guard(facts)
    if untouched is None:
        return ""
    named = (("the baseline", level(facts, facts.baseline)), ("the best", level(facts, facts.best)))
    parts = [f"the untouched base: {untouched}"]
    parts += [
        f"{name}: {found.score:.4f}{words.beside(found.perplexity, found.accuracy)}"
        for name, found in named
        if found is not None
    ]
    said = f"<p>{escape(words.sentence('; '.join(parts)))}</p>\n"
    return said if limit is None else f"{said}<p>{escape(words.sentence(f'guard set: {limit}'))}</p>\n"


def _tiles(facts: Facts) -> str:
    gain, metric = improvement(facts), words.metric(facts.study)
    noise, smallest, share = facts.noise, provable(facts), utilization(facts)
    failed = sum(trial.state in FAILURES for trial in facts.trials)
    tiles = [
        *([_reference_tile(facts.reference, metric)] if facts.reference is not None else []),
        _level_tile("Baseline", level(facts, facts.baseline), metric),
        _level_tile("Best", level(facts, facts.best), metric),
        _tile(
            "Improvement",
            words.NOTHING if gain is None or not gain.amount else f"{gain.amount:.4f}",
            _gain_error(facts),
            _gain_note(facts),
            kind="gain" if kept(facts) else "",
        ),
        _tile(
            "Noise",
            words.NOTHING if noise is None else f"{noise.standard_deviation:.4f}",
            "",
            "not known yet" if smallest is None else f"of one run; gains from about {smallest:.4f} on can be proven",
        ),
        _tile(
            "Trials",
            str(len(facts.trials)),
            f"{failed} failed",
            f"{kept(facts)} of {words.count(len(facts.past), 'proposal')} kept",
        ),
        _tile(
            "Training",
            words.NOTHING if share is None else f"{share:.0%}",
            "",
            "of the wall clock since the first trial",
        ),
    ]
    return '<dl class="tiles">\n' + "\n".join(tiles) + "\n</dl>"


def _gain_error(facts: Facts) -> str:
    gain = improvement(facts)
    if gain is None and kept(facts):
        return "not measured"
    return "none proven" if gain is None or gain.standard_error is None else f"± {gain.standard_error:.4f}"


def _gain_note(facts: Facts) -> str:
    if not kept(facts):
        return "the baseline is the best known config"
    return "baseline continued as long, minus best" if facts.continues else "baseline minus best"


def _tile(name: str, number: str, small: str, note: str, kind: str = "") -> str:
    aside = f" <small>{escape(small)}</small>" if small else ""
    return (
        f'<div class="tile {kind}"><dt>{escape(name)}</dt><dd>{escape(number)}{aside}</dd><p>{escape(note)}</p></div>'
    )


def _level_tile(name: str, found: Level | None, metric: str) -> str:
    if found is None:
        return _tile(name, words.NOTHING, "", "no score yet")
    error = "" if found.standard_error is None else f"± {found.standard_error:.4f}"
    perplexity = "" if found.perplexity is None else f", perplexity {found.perplexity:.1f}"
    perplexity += words.beside(None, found.accuracy)
    return _tile(
        name, f"{found.score:.4f}", error, f"{metric}, mean of {words.count(found.replicates, 'run')}{perplexity}"
    )


def _reference_tile(found: Trial, metric: str) -> str:
    perplexity = "" if found.perplexity is None else f", perplexity {found.perplexity:.1f}"
    note = f"{metric}, before any training{perplexity}{words.beside(None, found.accuracy)}"
    return _tile("Untouched base", words.score(found.score), "", note)


# --- lineage and ledger --------------------------------------------------------------------------------------------


def _lineage(facts: Facts) -> str:
    if not kept(facts):
        return "<p>Nothing: no change was proven better than the baseline, which stays the config to use.</p>"
    by_number, taken_out = {past.number: past for past in facts.past}, ablated(facts)
    rows = []
    for standing in facts.best_lineage[1:]:
        past, found, parent = by_number[standing.node], level(facts, standing), facts.standing(standing.parent)
        changes = words.change(standing.diff, None if parent is None else parent.config)
        score = words.NOTHING if found is None else words.plus_minus(words.score(found.score), found.standard_error)
        why = (
            f"{escape(past.proposal.rationale)}<br><span class=soft>{escape(words.sentence(words.reason(past)))}</span>"
        )
        alone = f'<td class="number">{escape(words.without(taken_out.get(standing.node)))}</td>' if taken_out else ""
        rows.append(
            f'<tr class="kept"><td class="fixed">p{standing.node}</td><td>{_knobs(changes)}</td>'
            f'<td class="number">{escape(_difference(past))}</td><td class="number">{escape(score)}</td>'
            f"{alone}<td>{why}</td></tr>"
        )
    names = ("step", "change", "difference", "score after it", *(("without it",) if taken_out else ()))
    head = _head(*names, "why, and why it was kept")
    note = f'<p class="soft">{escape(words.sentence(WITHOUT_NOTE))}</p>' if taken_out else ""
    return f'<div class="scroll"><table>{head}{"".join(rows)}</table></div>{note}'


def _head(*names: str) -> str:
    numbers = (
        *(
            "difference",
            "score after it",
            "without it",
            "guard",
            "runs",
            "proposals",
            "decided",
            "kept",
            "win rate",
            "turned away",
        ),
        *("failed trials", "calls", "failed calls", "cost"),
    )
    cells = (f'<th class="number">{name}</th>' if name in numbers else f"<th>{name}</th>" for name in names)
    return f"<tr>{''.join(cells)}</tr>"


def _knobs(changes: Iterable[str]) -> str:
    return "".join(f'<span class="knob">{escape(line)}</span>' for line in changes)


def _difference(past: Past) -> str:
    verdict = past.verdict
    if verdict is None or verdict.difference is None:
        return words.NOTHING
    text = words.plus_minus(words.signed(verdict.difference), verdict.standard_error)
    return text if verdict.replicates else f"({words.signed(verdict.difference)})"


def _ledger(facts: Facts) -> str:
    configs = {standing.node: standing.config for standing in facts.lineage}
    rows = "".join(
        _ledger_row(
            facts,
            past,
            words.change(past.proposal.diff, configs.get(past.parent) if past.parent is not None else None),
        )
        for past in facts.past
    )
    guarded = ("guard",) if facts.guard is not None else ()
    head = _head("", "change", "by", "difference", *guarded, "runs", "outcome", "why")
    return (
        f'<div class="scroll"><table>{head}{rows}</table></div>' if facts.past else "<p>Nothing was proposed yet.</p>"
    )


def _ledger_row(facts: Facts, past: Past, changes: list[str]) -> str:
    outcome, said = words.outcome(past), past.proposal
    mark = f'<span class="mark {outcome}">{outcome}</span>'
    mark += "".join(f'<br><span class="mark failed">{escape(way)}</span>' for way in words.failures(past))
    predicted = f" Predicted: {words.signed(said.predicted_change)}." if said.predicted_change is not None else ""
    trials = f" Trials {', '.join(str(trial.id) for trial in past.trials)}." if past.trials else ""
    errors = "".join(f"<p>Trial {t.id}: {escape(t.error_text)}</p>" for t in past.trials if t.error_text)
    more = (
        f"<details><summary>{escape(words.sentence(words.reason(past)) or _undecided(past))}</summary>"
        f"<p>Idea: {escape(words.sentence(said.rationale))} Watch: {escape(words.sentence(said.watch))}"
        f"{escape(predicted)}{trials}</p>{errors}</details>"
    )
    on_guard = words.guarded(facts.guard, guard_score(past))
    guarded = f'<td class="number">{escape(on_guard)}</td>' if facts.guard is not None else ""
    by = escape(said.source) + (f"<br><span class=soft>{escape(said.model)}</span>" if said.model else "")
    return (
        f'<tr class="{outcome}" id="p{past.number}"><td class="fixed">p{past.number}</td><td>{_knobs(changes)}</td>'
        f'<td class="fixed">{by}</td><td class="number">{escape(_difference(past))}</td>'
        f'{guarded}<td class="number">{len(past.trials)}</td><td class="fixed">{mark}</td>'
        f"<td>{more}</td></tr>"
    )


# --- the rest ------------------------------------------------------------------------------------------------------


def _undecided(past: Past) -> str:
    return f"Undecided after {len(past.trials)} runs." if past.trials else "Not run yet."


def _cost(facts: Facts) -> str:
    trained = math.fsum(t.train_seconds for t in facts.trials if t.train_seconds is not None)
    driver = driver_seconds(facts.events, facts.trials)
    sentences = [
        f"{words.duration(trained)} of budgeted training in {words.count(len(facts.trials), 'trial')},"
        f" {words.duration(driver)} of the driver's time in all.",
        *([] if facts.calls else ["No language model was asked."]),
        _failure_sentence(facts.trials),
    ]
    sentences += [f"{event.kind.replace('_', ' ')}: {event.text}" for event in facts.events if event.kind in NOTABLE]
    return _sources(facts) + _list(sentence for sentence in sentences if sentence)


def _sources(facts: Facts) -> str:
    names = ("proposer", "proposals", "decided", "kept", "win rate", "turned away", "failed trials")
    rows = "".join(_source_row(row) for row in sources.sources(facts))
    head = _head(*names, "calls", "failed calls", "cost")
    return f'<div class="scroll"><table>{head}{rows}</table></div>' if rows else ""


def _source_row(row: sources.Source) -> str:
    rate = words.NOTHING if row.win_rate is None else f"{row.win_rate:.0%}"
    calls = (row.calls, row.failed_calls) if row.calls else (words.NOTHING, words.NOTHING)
    cells = (row.proposals, row.decided, row.kept, rate, row.turned_away, row.failed_trials, *calls, words.cost(row))
    numbers = "".join(f'<td class="number">{escape(str(cell))}</td>' for cell in cells)
    return f"<tr><td>{escape(words.source(row.source, row.model))}</td>{numbers}</tr>"


NOTABLE = (
    *("repair", "paused", "drift", "model_trouble", "model_off", "model_back", "calls_lost", "swept", "tool_changed"),
    *("holdout_look", "holdout_score", "guard", "merged", "unreadable"),
)
"""Kinds of events that belong into the report."""


def _failure_sentence(trials: Iterable[Trial]) -> str:
    counts = Counter(trial.state for trial in trials if trial.state not in (TrialState.SCORED, TrialState.RUNNING))
    if not counts:
        return "No trial failed."
    return (
        "Without a score: " + ", ".join(f"{number} {words.STATE_WORDS[name]}" for name, number in counts.items()) + "."
    )


def _config(facts: Facts) -> str:
    if facts.baseline is None or facts.best is None:
        return "<p>Not known yet.</p>"
    changes = total_changes(facts.baseline, facts.best)
    rows = "".join(
        f"<tr><td><code>{escape(knob)}</code></td><td>{escape(before)}</td><td>{escape(after)}</td></tr>"
        for knob, (before, after) in changes.items()
    )
    table = f"<table>{_head('knob', 'baseline', 'best')}{rows}</table>" if rows else "<p>It is the baseline's.</p>"
    command = escape(f"overnight replay {facts.study.name}                # again, with a fresh seed\n")
    command += escape(f"overnight replay {facts.study.name} --tokens N     # the full run, beside the baseline")
    finals = [trial for trial in facts.trials if is_full_run(trial) and trial.score is not None]
    full = _list(
        f"Full run, trial {t.id}: {words.purpose(t)}, budget {t.budget}: {words.ended(t)} on val." for t in finals
    )
    return f'<div class="columns"><div>{table}</div><div>{full if finals else ""}<pre>{command}</pre></div></div>'


def _footer(facts: Facts, paths: StudyPaths) -> str:
    study = facts.study
    versions = ", ".join(f"{name} {version}" for name, version in study.versions.items())
    commit = (
        ""
        if study.git_commit is None
        else f" Commit {study.git_commit}{' with local changes' if study.git_dirty else ''}."
    )
    sandbox = ", ".join(sorted({trial.sandbox for trial in facts.trials if trial.sandbox})) or "none yet"
    text = (
        f"Ledger {paths.name}/{paths.ledger.name}. Seal {study.seal[:16]}…, checked by `overnight verify {study.name}`."
        f" Sandbox: {sandbox}. Created {study.created:%Y-%m-%d %H:%M} UTC. {versions}.{commit}"
    )
    return f"<footer>{escape(text)}</footer>"
