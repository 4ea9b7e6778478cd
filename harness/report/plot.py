"""The two pictures of the report, as plotly figures: how the search went, and how the winner learns.

Colours are readable on white and on black, and never the only sign: shape and fill say the same. Axes, grid and text
take the page's colours when it is shown.
"""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from harness.records import FAILURES, UNCOUNTED, Role, Trial
from harness.report import words
from harness.report.summary import Facts, level

COLOURS = {
    "baseline": "#3b82d6",
    "kept": "#1f9d61",
    "inconclusive": "#d98e04",
    "discarded": "#8b93a1",
    "running": "#8b93a1",
    "failed": "#d64545",
}
NAMES = {
    "baseline": "baseline",
    "kept": "kept",
    "inconclusive": "inconclusive",
    "discarded": "discarded",
    "running": "undecided",
}
GRID = "rgba(128,128,128,0.22)"
BAND_DEVIATIONS = 2
"""Half width of the noise band: 19 of 20 single trials of the same config fall inside."""
OFF_SCALE = 1.35
"""Trials worse than this many times the span from the best to the baseline are drawn at the upper edge."""


def progress(facts: Facts) -> go.Figure:
    """Return score by trial: what every run scored, the incumbent's level, and the band that noise alone explains."""
    figure = _figure(height=400, x="trial", y=words.metric(facts.study))
    low, high = _range(facts)
    _incumbent(figure, facts)
    decisions = {past.number: words.outcome(past) for past in facts.past}
    groups: dict[str, list[Trial]] = {name: [] for name in NAMES}
    for trial in facts.trials:
        if trial.score is not None and trial.role not in UNCOUNTED:
            name = "baseline" if trial.proposal is None else decisions[trial.proposal]
            groups[name if name in NAMES else "running"].append(trial)
    for name, trials in groups.items():
        if trials:
            figure.add_trace(_points(name, trials, high))
    broken = [trial for trial in facts.trials if trial.state in FAILURES and trial.role is not Role.FINAL]
    if broken:
        figure.add_trace(
            go.Scatter(
                x=[trial.id for trial in broken],
                y=[high] * len(broken),
                mode="markers",
                name="failed",
                marker={"symbol": "x-thin", "size": 9, "line": {"width": 2.5, "color": COLOURS["failed"]}},
                text=[_hover(trial) for trial in broken],
                hovertemplate="%{text}<extra></extra>",
            )
        )
    untouched = None if facts.reference is None else facts.reference.score
    if untouched is not None and low <= untouched <= high:  # elsewhere it would hide what the search found
        figure.add_hline(
            y=untouched, line={"dash": "dot", "color": COLOURS["failed"]}, annotation_text="untouched base"
        )
    figure.update_yaxes(range=[low, high + 0.04 * (high - low)])
    figure.update_xaxes(tickformat="d", dtick=1 if len(facts.trials) < 16 else None)
    return figure


def _range(facts: Facts) -> tuple[float, float]:
    """Return the span worth seeing: one hopeless config must not flatten the rest."""
    scores = [trial.score for trial in facts.trials if trial.score is not None and trial.role not in UNCOUNTED]
    if not scores:
        return 0.0, 1.0
    spread = facts.noise.standard_deviation if facts.noise else 0.0
    low = min(scores)
    top = max([*(facts.baseline.scores.values() if facts.baseline else scores), low + 8 * spread])
    high = min(max(scores), low + OFF_SCALE * (top - low))
    margin = max(0.08 * (high - low), 3 * spread, 1e-6)
    return low - margin, high + margin


def _incumbent(figure: go.Figure, facts: Facts) -> None:
    """Draw the incumbent's mean as steps, with the noise band of a single trial around it."""
    if not facts.trials or not facts.lineage:
        return
    starts = [_reign(facts, standing.node) for standing in facts.lineage]
    edges = [*starts[1:], facts.trials[-1].id + 0.5]
    x: list[float] = []
    y: list[float] = []
    names: list[str] = []
    for standing, start, end in zip(facts.lineage, starts, edges, strict=True):
        found = level(facts, standing)
        if found is not None:
            x += [start, end]
            y += [found.score, found.score]
            names += [f"incumbent: {words.node(standing.node)}, mean {found.score:.4f}"] * 2
    if facts.noise is not None and x:
        half = BAND_DEVIATIONS * facts.noise.standard_deviation
        figure.add_trace(
            go.Scatter(
                x=[*x, *reversed(x)],
                y=[*(item + half for item in y), *(item - half for item in reversed(y))],
                mode="lines",
                fill="toself",
                fillcolor="rgba(31,157,97,0.16)",
                line={"width": 0},
                name=f"noise band, ± {BAND_DEVIATIONS} standard deviations of one trial",
                hoverinfo="skip",
            )
        )
    figure.add_trace(
        go.Scatter(
            x=x,
            y=y,
            mode="lines",
            name="incumbent's mean",
            line={"color": COLOURS["kept"], "width": 2},
            text=names,
            hovertemplate="%{text}<extra></extra>",
        )
    )


def _reign(facts: Facts, node: int) -> float:
    """Return where a node's time as incumbent begins on the axis of trials: when the next proposal starts."""
    if node == 0:
        return 0.5
    later = [t.id for t in facts.trials if t.proposal is not None and t.proposal > node and t.role is Role.SCREEN]
    return min(later) - 0.5 if later else facts.trials[-1].id + 0.4


def _points(name: str, trials: Sequence[Trial], high: float) -> go.Scatter:
    """Return the trials of one decision: hollow where a run only screened, a triangle where it lies off the scale."""
    symbols = []
    for trial in trials:
        assert trial.score is not None
        plain = "circle" if trial.role is not Role.SCREEN else "circle-open"
        symbols.append("triangle-up-open" if trial.score > high else plain)
    return go.Scatter(
        x=[trial.id for trial in trials],
        y=[min(trial.score, high) for trial in trials if trial.score is not None],
        mode="markers",
        name=NAMES[name],
        marker={"symbol": symbols, "size": 8, "color": COLOURS[name], "line": {"width": 1.5, "color": COLOURS[name]}},
        text=[_hover(trial) for trial in trials],
        hovertemplate="%{text}<extra></extra>",
    )


def _hover(trial: Trial) -> str:
    text = f"trial {trial.id}: {words.purpose(trial)}<br>{words.ended(trial).replace('<', '&lt;')}"
    return text if len(text) < 200 else text[:200] + "…"


def curves(facts: Facts) -> go.Figure:
    """Return the probe score over the budget: baseline and best in colour, every other trial in the background."""
    figure = _figure(height=340, x="share of the budget", y=f"probe {facts.study.metric}")
    marked = {facts.best.trial: ("best", COLOURS["kept"])} if facts.best is not None else {}
    if facts.baseline is not None:
        marked[facts.baseline.trial] = ("baseline", COLOURS["baseline"])
    drawn = [trial for trial in facts.trials if trial.curve and trial.role is not Role.FINAL]
    drawn.sort(key=lambda trial: trial.id in marked)
    for trial in drawn:
        name, colour = marked.get(trial.id, (words.purpose(trial), "rgba(128,128,128,0.28)"))
        points = [(p.progress, p.probe_score) for p in trial.curve if p.probe_score is not None]
        figure.add_trace(
            go.Scatter(
                x=[progress for progress, _ in points],
                y=[probe for _, probe in points],
                mode="lines",
                name=f"{name} (trial {trial.id})",
                line={"color": colour, "width": 2.5 if trial.id in marked else 1},
                showlegend=trial.id in marked,
                hovertemplate=f"{name}, trial {trial.id}: %{{y:.4f}}<extra></extra>" if trial.id in marked else None,
                hoverinfo=None if trial.id in marked else "skip",
            )
        )
    probes_of = {t.id: [p.probe_score for p in t.curve if p.probe_score is not None] for t in drawn}
    seen = [probes for trial, probes in probes_of.items() if probes and trial in marked]
    if seen:  # the first tenth falls so steeply that it would hide where the curves part
        low = min(min(probes) for probes in probes_of.values() if probes)
        high = max(probes[min(1, len(probes) - 1)] for probes in seen)
        figure.update_yaxes(range=[low - 0.08 * (high - low), high + 0.04 * (high - low)])
    figure.update_xaxes(tickformat=".0%", range=[0, 1.02], dtick=0.2)
    return figure


def _figure(*, height: int, x: str, y: str) -> go.Figure:
    axis = {"gridcolor": GRID, "zeroline": False, "linecolor": GRID, "ticks": "outside", "tickcolor": GRID}
    return go.Figure(
        layout={
            "height": height,
            "margin": {"l": 60, "r": 12, "t": 8, "b": 44},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#6b7280"},
            "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "font": {"size": 12}},
            "hoverlabel": {"align": "left"},
            "xaxis": axis | {"title": {"text": x, "font": {"size": 13}}},
            "yaxis": axis | {"title": {"text": y, "font": {"size": 13}}},
        }
    )
