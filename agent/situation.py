"""Sections of a briefing that say where the study stands: task, owner, standing, knobs, lineage, learning curves."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterator

from agent.curves import LOOKS, Signals, signals_of
from agent.prose import NOTHING, Figures, changes, number, one_line, share, size, value, word
from agent.view import View, node_name
from harness.config import Knob, Value, told
from harness.records import BASELINE, History, Standing, Trial, unit_of
from harness.sizes import RowLengths, packs, padding_share, usual_positions

BUDGETS = {
    "tok": "all configs see as many tokens: a smaller batch gives more steps, a bigger model costs only time",
    "flop": "6 × parameters × tokens are counted: a bigger model sees fewer tokens, a smaller batch gives more steps",
    "s": "training time is counted: what runs faster on this device sees more tokens",
}
"""What a budget means for a config, by the unit at the end of its text."""
METRICS = {
    "bits per byte": "the text's total nats / (ln 2 × its UTF-8 bytes)",
    "bits per byte of the answers": "the answers' total nats / (ln 2 × their UTF-8 bytes); what is given is not scored",
    "bits per preference pair": "-log2 of the probability, under a fixed beta against the base model, that the chosen"
    " answer beats the rejected one; 1 is a coin toss",
}
"""What a metric is, by its unit."""
WATCH_CHARACTERS = 140
PROGRAM_LINES = 40
PROGRAM_CHARACTERS = 240
LINEAGE_ROWS = 12
LATELY = 4
"""Newest scored configs whose curves are shown beside the incumbent's and the baseline's."""
SPIKES_SHOWN = 3


def precision(view: View) -> str:
    """Return how finely scores are shown."""
    noise, step = view.history.noise, view.figures.step
    if noise is None or noise.step == 0:
        return f"Scores and differences are rounded to {step:g}: how noisy a run is, is not known yet."
    return f"Scores and differences are rounded to {step:g}, about the noise of one run: finer digits would be luck."


def task(view: View) -> list[str]:
    """Return what is searched, on what, and how far the search is."""
    history = view.history
    metric = (
        METRICS.get(unit_of(history.metric, history.task))
        if history.metric in ("bits_per_byte", "bits_per_pair")
        else None
    )
    kind = next((text for unit, text in BUDGETS.items() if history.budget.endswith(unit)), None)
    memory = history.device_memory_bytes
    lines = [
        f"- Study {word(history.study)}, task {word(history.task)}. Metric: {word(history.metric)}"
        + (f" ({metric})" if metric else "")
        + " on a validation split that no trial can read. Lower is better.",
        f"- Each trial trains one config with one seed under a budget of {word(history.budget)}"
        + (f"; {kind}." if kind else "."),
        f"- Device: {one_line(history.device or 'not known', 80)}, memory {size(memory) if memory else 'not known'}.",
        f"- A proposal turns 1 to {history.max_changes} knobs of its parent: the incumbent"
        + ("." if history.continues else ", unless it names another node of the lineage.")
        + f" A config needs {history.minimum_steps} optimizer steps. Seed, budget, data and evaluation are no knobs; a"
        " config that is known already is turned away.",
        "- A proposal runs once. Only if that run is clearly below the incumbent's mean does it run again, on fresh"
        " seeds shared with the incumbent, until the difference is proven, hopeless or the runs are used up.",
    ]
    if history.lengths is not None:
        lines.append(f"- {_rows(history.lengths, pairs=history.metric == 'bits_per_pair')}")
    if history.continues:
        lines.append(
            "- A trial goes on from its parent's checkpoint for one more budget, with a fresh optimizer and a learning"
            " rate that anneals within it: the lineage is a schedule of configs. What counts is how a config trains on"
            " from the incumbent's weights, compared with the incumbent's own config trained on from them. The same"
            " config may be right again later; no other node than the incumbent can be a parent."
        )
    past = Counter("waiting" if p.state == "queued" else view.outcome(p) for p in history.past)
    ran = Counter(trial.state.value.replace("_", " ") for trial in view.trials)
    spans = [trial.wall_seconds for trial in view.trials if trial.wall_seconds is not None]
    each = f", {number(statistics.median(spans), 2)} s each (median)" if spans else ""
    lines.append(
        f"- So far {len(history.past)} proposals{_counts(past)}; {ran.total()} trials{_counts(ran)}{each}."
        f" The next proposal is p{history.next_number}."
    )
    return lines


def program(view: View) -> list[str]:
    """Return the owner's program.md, line by line behind a mark, so that no line of it can pass for ours."""
    lines = [one_line(line, PROGRAM_CHARACTERS) for line in view.history.program.splitlines()[: 2 * PROGRAM_LINES]]
    said = [f"> {line}" for line in lines if line]
    return said[:PROGRAM_LINES]


def standing(view: View) -> list[str]:
    """Return baseline, incumbent, noise, and what can be proven."""
    history = view.history
    baseline, incumbent = history.baseline, view.incumbent
    if baseline is None or incumbent is None:
        return [
            *_untouched(view),
            "- The baseline has no score yet. It runs with several seeds first; then proposals are tried.",
        ]
    lines = [*_untouched(view), f"- Baseline (node 0): {_level(view, baseline)}.", *_harm(view, baseline)]
    if incumbent.node == baseline.node:
        lines.append("- The baseline is still the incumbent: nothing was kept yet.")
    else:
        gain = "" if history.continues else f"; from the baseline {_gain(view, baseline, incumbent)}"
        lines.append(f"- Incumbent ({node_name(incumbent.node)}): {_level(view, incumbent)}{gain}.")
    if history.continues:
        runs = len(incumbent.to_beat)
        score = view.figures.score(incumbent.score_to_beat) + view.figures.error(view.error_of_mean(runs))
        lines.append(
            f"- To beat, the incumbent's config trained on from its checkpoint: {score} over {runs}"
            f" run{'' if runs == 1 else 's'}. Scores of other starts cannot be compared with it."
        )
    lines += _guard(view, baseline, incumbent)
    lines.append(f"- The incumbent {_size(view, incumbent)}.")
    noise = history.noise
    if noise is None:
        lines.append("- Noise of one run: not known yet.")
    else:
        lines.append(
            f"- Noise of one run (standard deviation over seeds): {noise.standard_deviation:.2g}, from"
            f" {noise.degrees_of_freedom} degrees of freedom."
        )
    if history.smallest_provable is not None:
        lines.append(
            f"- A true improvement of about {history.smallest_provable:.2g} is proven nine times in ten, a smaller one"
            " less often: aim for larger ones, or join small ones into one proposal."
        )
    since = view.since_kept()
    if since:
        lines.append(f"- Proposals decided since the last kept one: {since}.")
    return lines


def knobs(view: View) -> list[str]:
    """Return every knob: its value in the incumbent, its range, how often it was turned, and what to watch."""
    history, base = view.history, view.base
    turned = Counter(name for effect in view.effects.values() for name in effect.diff)
    began = view.flats.get(BASELINE, base)
    lines = ["| knob | incumbent | baseline | allowed | turned | watch |", "| --- | --- | --- | --- | --- | --- |"]
    for knob in history.knobs.values():
        now, first = base.get(knob.name), began.get(knob.name)
        quiet = " (no meaning now)" if base and knob.when and now is None else ""
        start = f"{value(knob.default)} by default" if first is None else "same" if now == first else value(first)
        lines.append(
            f"| {word(knob.name)} | {value(now)}{quiet} | {start} | {_allowed(knob)} | {turned[knob.name]}×"
            f" | {one_line(knob.watch, WATCH_CHARACTERS)} |"
        )
    standing = history.incumbent or history.baseline
    chosen = {} if standing is None else told(standing.config)
    fixed = {name: item for name, item in chosen.items() if name not in history.knobs}
    if fixed:
        lines.append("Fixed: " + ", ".join(f"{word(name)} = {value(item)}" for name, item in fixed.items()) + ".")
    return lines


def lineage(view: View) -> list[str]:
    """Return the way from the incumbent back to the baseline, the newest steps if it is long, and what branches off."""
    nodes = {standing.node: standing for standing in view.history.lineage}
    chain = _chain(view.history)
    if len(chain) < 2:
        return []
    past = {past.number: past for past in view.history.past}
    lines = ["| node | on | turned | score | runs | difference | by |", "| --- | --- | --- | --- | --- | --- | --- |"]
    shown = chain if len(chain) <= LINEAGE_ROWS else [*chain[: LINEAGE_ROWS - 1], chain[-1]]
    for node in shown:
        step, made = nodes[node], past.get(node)
        before = None if step.parent is None else view.flats.get(step.parent)
        lines.append(
            f"| {node_name(node)} | {node_name(step.parent)} | {changes(step.diff, before) or NOTHING}"
            f" | {view.figures.score(step.score)} | {len(step.scores)}"
            f" | {NOTHING if made is None else view.measured(made)}"
            f" | {'the owner' if made is None else word(made.proposal.source)} |"
        )
    if len(chain) > len(shown):
        lines.append(f"({len(chain) - len(shown)} nodes between the baseline and those above it are left out.)")
    aside = [node_name(node) for node in sorted(set(nodes) - set(chain))]
    if aside:
        lines.append(f"Kept once, but not on the way to the incumbent: {', '.join(aside[-LINEAGE_ROWS:])}.")
    return lines


def curves(view: View) -> list[str]:
    """Return what the curves of the incumbent, the baseline and the newest other configs show."""
    chosen: list[tuple[str, Trial]] = []
    for name, node in (("incumbent", view.incumbent), ("baseline", view.history.baseline)):
        trial = None if node is None else view.telling.get(node.config)
        if trial is not None and trial not in [known for _, known in chosen]:
            chosen.append((name, trial))
    known = {trial.id for _, trial in chosen}
    newest = sorted(view.telling.values(), key=lambda trial: -trial.id)
    others = (trial for trial in newest if trial.id not in known and trial.proposal is not None)
    chosen += [(node_name(trial.proposal), trial) for trial in itertools.islice(others, LATELY)]
    if not chosen:
        return []
    at = "/".join(f"{look:.0%}".removesuffix("%") for look in LOOKS)
    return [
        f"| config | steps | tokens per parameter | tokens/s | peak memory | probe at {at} % of the budget"
        " | last third | probe - train | gradient norm, median→last | clipped | signs |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(_curve(view, name, signals_of(trial)) for name, trial in chosen),
        f"Probe: {unit_of(view.history.metric, view.history.task)} on a split of its own, seen while training. Last"
        " third: its share of the probe's whole"
        " fall. Clipped: share of the points with a gradient norm above the limit.",
    ]


def _rows(lengths: RowLengths, *, pairs: bool) -> str:
    """Say what rows of single documents cost, which follows from data that no proposer sees."""
    what = "pair, by its longer answer," if pairs else "document"
    usual = f"{number(lengths.mean(lengths.longest))} on average"
    return (
        f"A training {what} takes {lengths.shortest:,} to {lengths.longest:,} tokens, {usual}. Rows that are not packed"
        " are padded to the longest of their pass, padding counts as tokens, and a batch.sequence_length beyond the"
        " longest changes nothing."
    )


def _counts(counter: Counter[str]) -> str:
    found = ", ".join(f"{count} {name}" for name, count in counter.most_common())
    return f" ({found})" if found else ""


def _level(view: View, node: Standing) -> str:
    runs = len(node.scores)
    error = view.figures.error(view.error_of_mean(runs))
    return f"{view.figures.score(node.score)}{error} over {runs} run{'' if runs == 1 else 's'}"


def _untouched(view: View) -> Iterator[str]:
    """Yield what the base model comes to before any training; nothing where a fresh one is trained."""
    reference = view.history.reference
    if reference is not None:
        right = "" if reference.accuracy is None else f", {share(reference.accuracy)} of the pairs right"
        yield f"- The untouched base model, before any training: {view.figures.score(reference.score)}{right}."


def _harm(view: View, baseline: Standing) -> Iterator[str]:
    """Yield a warning where training makes the base model worse, as far as the rounded scores show it."""
    reference = view.history.reference
    if reference is None or reference.score is None or baseline.score is None:
        return
    if view.figures.rounded(baseline.score) > view.figures.rounded(reference.score):
        yield (
            "- WARNING: the trained baseline is worse than the untouched base: training harms. Its learning rate is"
            " probably too high; go down by factors before anything else."
        )


def _guard(view: View, baseline: Standing, incumbent: Standing) -> Iterator[str]:
    """Yield how the guard set limits what is kept, and how close baseline and incumbent are to that."""
    guard = view.history.guard
    if guard is None:
        return
    figures = Figures.of(guard.noise)
    said = []
    for name, node in {"baseline": baseline, "incumbent": incumbent}.items():
        if node.guard_score is not None and (name == "baseline" or node.node != baseline.node):
            broken = " (breaks it)" if guard.is_broken_by(node.guard_score) else ""
            said.append(f"{name} {figures.difference(node.guard_score - guard.reference)}{broken}")
    yield (
        f"- Guard set of general text, bits per byte against the untouched base: {', '.join(said) or 'not known yet'}."
        f" What is more than {guard.max_regression:g} worse is not kept, whatever its score."
    )


def _gain(view: View, baseline: Standing, incumbent: Standing) -> str:
    if baseline.score is None or incumbent.score is None:
        return NOTHING
    errors = [view.error_of_mean(len(node.scores)) for node in (baseline, incumbent)]
    known = [error for error in errors if error is not None]
    error = math.hypot(*known) if len(known) == len(errors) else None
    return view.figures.difference(incumbent.score - baseline.score) + view.figures.error(error)


def _size(view: View, node: Standing) -> str:
    """Return what follows from a config: size of the model, tokens and steps."""
    trial, lengths = view.telling.get(node.config), view.history.lengths
    positions = usual_positions(node.config, lengths)
    parts = []
    if packs(node.config):
        parts.append(f"takes {positions:,.0f} tokens per step")
    elif positions is not None and lengths is not None:
        padding = share(padding_share(node.config, lengths))
        parts.append(f"takes about {number(positions)} tokens per step, {padding} of them padding")
    if trial is not None and trial.parameters is not None:
        parts.insert(0, f"has {trial.parameters:,} parameters")
    if trial is not None and trial.steps is not None:
        parts.append(f"gets {trial.steps:,} steps within the budget")
    return ", ".join(parts)


def _allowed(knob: Knob) -> str:
    text = (
        "/".join(value(choice) for choice in knob.choices)
        if knob.type == "choice"
        else f"{knob.low:g} to {knob.high:g}{', whole' if knob.type == 'int' else ''}"
        + (", log scale" if knob.scale == "log" else "")
    )
    needs = " and ".join(f"{word(name)} = {_any_of(wanted)}" for name, wanted in knob.when.items())
    return text + (f"; only with {needs}" if needs else "")


def _any_of(wanted: Value | tuple[Value, ...]) -> str:
    return " or ".join(map(value, wanted)) if isinstance(wanted, tuple) else value(wanted)


def _chain(history: History) -> list[int]:
    """Return the nodes from the incumbent back to the baseline."""
    parents = {standing.node: standing.parent for standing in history.lineage}
    node = history.incumbent.node if history.incumbent is not None else None
    chain: list[int] = []
    while node is not None and node in parents:
        chain.append(node)
        node = parents.pop(node)
    return chain


def _curve(view: View, name: str, seen: Signals) -> str:
    probes = "/".join(view.figures.score(probe) for probe in seen.probes)
    norms = f"{number(seen.median_gradient_norm, 2)}→{number(seen.last_gradient_norm, 2)}"
    return (
        f"| {name} | {NOTHING if seen.steps is None else f'{seen.steps:,}'} | {number(seen.tokens_per_parameter, 2)}"
        f" | {number(seen.tokens_per_second)} | {size(seen.peak_memory_bytes)} | {probes} | {share(seen.late_share)}"
        f" | {view.figures.difference(seen.gap_bits_per_byte)} | {norms} | {share(seen.clipped_share)}"
        f" | {', '.join(_signs(seen)) or NOTHING} |"
    )


def _signs(seen: Signals) -> Iterator[str]:
    """Yield what an engineer would remark on."""
    if seen.still_falling:
        yield "still falling at the end"
    if seen.flat:
        yield "flat in the last third"
    if seen.overfitting:
        yield "probe rises while train falls"
    if seen.spikes_at:
        at = ", ".join(f"{progress:.0%}" for progress in itertools.islice(seen.spikes_at, SPIKES_SHOWN))
        yield f"train loss jumps at {at}" + (" and later" if len(seen.spikes_at) > SPIKES_SHOWN else "")
