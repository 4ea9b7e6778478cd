"""How numbers, diffs and outcomes are written for people: once, so that terminal, live view and page agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from harness.ablation import Step
from harness.conditions import meaningful
from harness.config import TrialConfig, Value
from harness.fullrun import MERGE_TOLERANCE, Merge, is_full_run
from harness.records import (
    BASELINE,
    BREAKS_GUARD,
    AbortIf,
    Guard,
    Past,
    ProposalState,
    Role,
    Trial,
    TrialState,
    unit_of,
)

if TYPE_CHECKING:
    from harness.report.sources import Source
    from harness.rows import StudyRow

MINUS = "\u2212"
NOTHING = "–"
_PLAIN_SECTIONS = ("optim.", "schedule.", "batch.", "model.")
STATE_WORDS = {
    TrialState.RUNNING: "running",
    TrialState.SCORED: "scored",
    TrialState.STOPPED: "stopped early",
    TrialState.OUT_OF_MEMORY: "out of memory",
    TrialState.DIVERGED: "diverged",
    TrialState.CRASHED: "crashed",
    TrialState.TIMED_OUT: "timed out",
    TrialState.INTERRUPTED: "interrupted",
    TrialState.LOST: "lost",
    TrialState.INVALID: "invalid",
}


def short(knob: str) -> str:
    """Return a knob's name without its section where the rest says enough."""
    for section in _PLAIN_SECTIONS:
        if knob.startswith(section):
            return knob.removeprefix(section)
    return knob


def value(item: Value | None) -> str:
    """Return a knob's value, floats with at most four digits."""
    match item:
        case None:
            return NOTHING
        case bool():
            return str(item).lower()
        case float():
            return f"{item:.4g}"
        case _:
            return str(item)


def change(diff: Mapping[str, Value], parent: TrialConfig | None) -> list[str]:
    """Return one ``knob old → new`` per turned knob; without the old value where it is not known, or meant nothing."""
    before = meaningful(parent) if parent is not None else {}
    return [
        f"{short(knob)} {value(before[knob])} → {value(new)}" if knob in before else f"{short(knob)} = {value(new)}"
        for knob, new in sorted(diff.items())
    ]


def score(number: float | None) -> str:
    """Return a score with four decimals."""
    return NOTHING if number is None else f"{number:.4f}"


def signed(number: float | None) -> str:
    """Return a difference with its sign and four decimals."""
    if number is None:
        return NOTHING
    return f"{MINUS if number < 0 else '+'}{abs(number):.4f}"


def gap(gain: float) -> str:
    """Return how much better or worse something is, to be followed by ``than``."""
    return f"{abs(gain):.4f} {'better' if gain > 0 else 'worse'}" if abs(gain) >= 0.00005 else "no better"


def metric(study: StudyRow) -> str:
    """Return the study's metric as it stands behind a number, with the text that it is taken over if that is a part."""
    return f"{study.metric} of the answers" if study.task == "sft" else study.metric


def beside(perplexity: float | None, accuracy: float | None) -> str:
    """Return what stands beside a score, with a comma before it: a perplexity, or of preferences the accuracy."""
    shown = "" if perplexity is None else f", perplexity {perplexity:.2f}"
    return shown if accuracy is None else f"{shown}, {accuracy:.1%} of the pairs right"


def percent(share: float | None) -> str:
    """Return a share of one in percent, with one decimal."""
    return NOTHING if share is None else f"{share:.1%}"


def guarded(guard: Guard | None, found: float | None) -> str:
    """Return how much worse than the untouched base a config is on the guard set, and whether that is too much."""
    if guard is None or found is None:
        return NOTHING
    worse = signed(found - guard.reference)
    return f"{worse}, more than {guard.max_regression:g}" if guard.is_broken_by(found) else worse


def plus_minus(text: str, standard_error: float | None) -> str:
    """Return ``text ± standard error``, or the text alone where the error is not known."""
    return text if standard_error is None else f"{text} ± {standard_error:.4f}"


def duration(seconds: float) -> str:
    """Return a span in the two units that a person would use."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s" if whole < 600 else f"{round(whole / 60)} min"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def count(number: int, noun: str) -> str:
    """Return ``1 trial`` or ``2 trials``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def node(number: int | None) -> str:
    """Return the name of a lineage node."""
    if number is None:
        return NOTHING
    return "baseline" if number == BASELINE else f"p{number}"


def outcome(past: Past) -> str:
    """Return what became of a proposal in one word."""
    if past.verdict is not None:
        return past.verdict.decision.value
    return past.state.value


def reason(past: Past) -> str | None:
    """Return why a proposal ended as it did, in one sentence; None while it waits or runs."""
    if past.verdict is not None:
        return past.verdict.reason
    return past.reason


def failures(past: Past) -> list[str]:
    """Return how trials of a proposal failed, each way once."""
    return list(
        dict.fromkeys(
            STATE_WORDS[trial.state]
            for trial in past.trials
            if trial.state not in (TrialState.SCORED, TrialState.RUNNING)
        )
    )


def segments(number: int) -> str:
    """Return how much training a node of a schedule has had."""
    return f"{count(number, 'budget')} of training"


def without(step: Step | None) -> str:
    """Return what the best config loses without a step, and whether that is proven."""
    if step is None:
        return NOTHING
    if step.without is None:
        return "cannot be taken out alone" if step.back else "turned again by later steps"
    failures = f"fails without it ({count(step.failed, 'run')})" if step.failed else ""
    if step.loss is None:
        return failures or NOTHING
    said = plus_minus(signed(step.loss), step.standard_error)
    return ", ".join(part for part in (said, "" if step.is_proven else "not proven", failures) if part)


def sentence(text: str | None) -> str:
    """Return a text as a sentence, with a capital and a full stop."""
    text = (text or "").strip()
    if not text:
        return ""
    first = text.split(maxsplit=1)[0]
    start = text if "." in first or "_" in first else text[:1].upper() + text[1:]  # a knob keeps its spelling
    return start + ("" if text[-1] in ".!?…" else ".")


def decided(past: Past, parent: TrialConfig | None) -> str:
    """Return the line that tells what became of a proposal."""
    changes = ", ".join(change(past.proposal.diff, parent))
    said = reason(past)
    if past.state is ProposalState.RUNNING or said is None:
        return f"p{past.number} {outcome(past)}: {changes}"
    return f"p{past.number} {outcome(past)}: {changes}. {sentence(said)}"


def source(name: str, model: str | None) -> str:
    """Return who proposed, with the model that was asked."""
    return f"{name} ({model})" if model else name


def cost(row: Source) -> str:
    """Return what a proposer's calls cost, in dollars and tokens."""
    if not row.calls:
        return NOTHING
    dollars = "price unknown" if row.cost_usd is None else f"${row.cost_usd:.2f}"
    return f"{dollars}, {row.tokens:,} tokens"


def merged(found: Merge) -> str:
    """Return what merging an adapter did to its score, and whether that is rounding."""
    moved = f"{signed_small(found.difference)} from" if found.difference else "exactly"
    said = f"merged into its base it scores {found.val:.6f} on val, {moved} the adapter's"
    if found.is_unquantized:
        return f"{said}, which was trained beside a base in 4 bits that this model holds in full"
    return said if found.agrees else f"{said}: more than {MERGE_TOLERANCE:g}, which rounding in fp32 does not explain"


def signed_small(number: float) -> str:
    """Return a difference that is hardly one."""
    return f"{MINUS if number < 0 else '+'}{abs(number):.1e}"


def breaks_guard(past: Past) -> bool:
    """Tell whether a proposal was turned down for the guard set."""
    return past.verdict is not None and past.verdict.reason.startswith(BREAKS_GUARD)


def abort(condition: AbortIf, study: StudyRow) -> str:
    """Return when a proposal gives up on its screening run."""
    unit = unit_of(study.metric, study.task)
    return f"the probe is above {condition.probe_above:g} {unit} from {condition.after:.0%} of the budget on"


def purpose(trial: Trial) -> str:
    """Return whose trial it is and why it runs, e.g. ``p7, replicate 2`` or ``baseline, seed 1 of it``."""
    owner = "baseline" if trial.proposal is None else f"p{trial.proposal}"
    match trial.role:
        case Role.REFERENCE:
            return f"the untouched base model{held(trial)}"
        case Role.BASELINE:
            return f"baseline, replicate {trial.replicate}"
        case Role.SCREEN:
            return f"{owner}, screening"
        case Role.CONTROL | Role.REPLICATE if trial.start is not None and trial.start == (trial.proposal or BASELINE):
            return f"{owner} continued from its checkpoint, replicate {trial.replicate}"
        case Role.FINAL:
            return f"{owner}, full run" if is_full_run(trial) else f"{owner}, replayed as replicate {trial.replicate}"
        case _:
            return f"{owner}, {trial.role.value} {trial.replicate}"


def held(trial: Trial) -> str:
    """Return, with a comma before it, how a base model's weights are held that are not held in full."""
    quantization = trial.config.quantization
    return "" if quantization == "none" else f", its weights held as {quantization}"


def ended(trial: Trial) -> str:
    """Return how a trial ended, with its score or the reason why it has none."""
    if trial.score is not None:
        return score(trial.score) + beside(None, trial.accuracy)
    text = STATE_WORDS[trial.state]
    return f"{text}: {trial.error_text}" if trial.error_text else text
