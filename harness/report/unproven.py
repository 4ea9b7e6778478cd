"""What a study does not prove, in sentences: the part of a report that everybody else's leaves out."""

from __future__ import annotations

import tomllib

from harness.fullrun import is_full_run
from harness.noise import smallest_provable
from harness.records import JudgeRules
from harness.report import words
from harness.report.summary import Facts, ablated, kept

FEW_DEGREES = 10
"""Below this many degrees of freedom the noise itself is known to no better than about a quarter."""


def unproven(facts: Facts) -> list[str]:
    """Return one sentence for everything that a hasty reader could take for proven and that is not."""
    return [*_gains(facts), *_reach(facts), *_conditions(facts)]


def provable(facts: Facts) -> float | None:
    """Return the smallest improvement that this study would have kept nine times in ten; None before the noise."""
    if facts.noise is None:
        return None
    rules = JudgeRules.model_validate(tomllib.loads(facts.study.policy).get("judge", {}))
    return smallest_provable(facts.noise, rules)


def _gains(facts: Facts) -> list[str]:
    sentences = []
    smallest = provable(facts)
    if smallest is not None:
        sentences.append(
            f"Improvements below about {smallest:.4f} {words.metric(facts.study)}: at this noise the judge would have"
            " missed them more often than one time in ten."
        )
    open_ended = [past for past in facts.past if words.outcome(past) == "inconclusive"]
    if open_ended:
        names = ", ".join(f"p{past.number}" for past in open_ended)
        sentences.append(f"Whether {names} would help: neither better nor worse after all their replicates.")
    screened = [
        past
        for past in facts.past
        if words.outcome(past) == "discarded"
        and past.verdict is not None
        and past.verdict.replicates == 0
        and past.verdict.difference is not None
    ]
    if screened:
        sentences.append(
            f"That the {words.count(len(screened), 'proposal')} discarded after screening are worse: one run each,"
            " enough to say that they are not clearly better."
        )
    return sentences + _steps(facts)


def _steps(facts: Facts) -> list[str]:
    """Say of which kept changes nobody knows whether the best config still needs them."""
    taken_out = ablated(facts)
    if facts.continues:
        return _schedule(facts)
    if len(facts.best_lineage) > 2 and not taken_out:
        return [
            "That every kept change still matters: each was proven on top of those before it, none was taken out again;"
            f" `overnight replay {facts.study.name} --ablate` does."
        ]
    sentences = []
    weak = [step.node for step in taken_out.values() if step.pairs and not (step.is_proven or step.failed)]
    if weak:
        names = ", ".join(words.node(node) for node in weak)
        sentences.append(f"That {names} still matters: the best config is not worse without it beyond chance.")
    open_ended = [step.node for step in taken_out.values() if step.back and not (step.pairs or step.failed)]
    if open_ended:
        names = ", ".join(words.node(node) for node in open_ended)
        sentences.append(f"Whether {names} still matters: it was not taken out.")
    return sentences


def _schedule(facts: Facts) -> list[str]:
    """Say what a chain of continuations, each proven on top of the last, leaves open."""
    sentences = []
    steps = len(facts.best_lineage) - 1
    if steps > 1:
        sentences.append(
            f"How much better the best is than the baseline continued as often, {steps} times: only once was it run."
        )
        sentences.append(
            "That every kept change still matters: each came with a budget of training that cannot be undone."
        )
    if steps:
        sentences.append(
            f"That {words.count(steps + 1, 'segment')} with a restart between them beat one run over the same"
            f" {words.segments(steps + 1)}: `overnight replay {facts.study.name} --tokens N` trains the schedule beside"
            " the baseline in one piece."
        )
    return sentences


def _reach(facts: Facts) -> list[str]:
    sentences = []
    finals = [trial for trial in facts.trials if is_full_run(trial) and trial.score is not None]
    base = None if facts.reference is None else facts.reference.id
    looks = sum(event.kind == "holdout_look" and event.data["trial"] != base for event in facts.events)
    if kept(facts) and not finals:
        sentences.append(
            f"That the best config is still better with a longer budget than {facts.study.budget}:"
            f" `overnight replay {facts.study.name} --tokens N` trains it beside the baseline."
        )
    if kept(facts) and not looks:
        sentences.append(
            "That the gain holds on text that nothing selected on: the holdout has not been looked at. Replay does."
        )
    if looks > 2:
        sentences.append(f"The holdout is no longer untouched: it was looked at {looks} times.")
    return sentences


def _conditions(facts: Facts) -> list[str]:
    sentences = []
    if facts.noise is not None and facts.noise.degrees_of_freedom < FEW_DEGREES:
        sentences.append(
            f"The noise itself: it rests on {words.count(facts.noise.degrees_of_freedom, 'degree')} of freedom."
        )
    epochs = {trial.epoch for trial in facts.trials}
    if len(epochs) > 1:
        sentences.append(
            f"Comparisons across the {len(epochs)} epochs of the machine: only the newest one counts here."
        )
    if any(trial.sandbox == "plain" for trial in facts.trials):
        sentences.append("That training could not reach what it must not see: some trials ran without a sandbox.")
    return sentences
