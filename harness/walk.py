"""What comes next for a proposal: another trial, a repair, or the verdict. Pure: ledger values in, one value out.

The walk keeps no state of its own. It is read off the rows that exist, so that a search killed at any line goes on
where it was: the same rows give the same next step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from harness.config import TrialConfig, apply
from harness.judge import Evidence, Replicate, judge
from harness.records import (
    FAILURES,
    UNCOUNTED,
    AbortIf,
    Decision,
    Guard,
    JudgeRules,
    Noise,
    Past,
    Role,
    Standing,
    Trial,
    TrialState,
    Verdict,
)

DRIVER_DIED = "DriverDied"
"""Error class of a trial that was lost with its driver: that says nothing about the config, however often."""
VANISHED_LIMIT = 3
"""A job that vanishes this often under a live driver says something about its config."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Run this config with this replicate's seed."""

    role: Role
    config: TrialConfig
    replicate: int
    proposal: int | None
    """Whose trial it is; None for the baseline's."""
    start: int | None = None
    """Lineage node whose checkpoint it goes on from; None: from the base, or a fresh model."""
    abort_if: AbortIf | None = None
    """The proposal's own condition, of its screening run only: replicates that judge must all run to their end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Repair:
    """Go on with this config in the place of the one that ran out of memory."""

    config: TrialConfig


def next_step(
    past: Past,
    incumbent: Standing,
    noise: Noise,
    rules: JudgeRules,
    *,
    epoch: int,
    known: Collection[str],
    incumbent_failed: Collection[int] = (),
    guard: Guard | None = None,
) -> Run | Repair | Verdict:
    """Return what a running proposal needs next.

    Only trials of the current ``epoch`` of the machine count. ``known`` holds the digests of all configs of the study
    (where trials continue from their parent: of those from this start); ``incumbent_failed`` the replicates on which
    what it is compared with failed, so that no pair can be made of them. ``guard`` is the limit on the guard set, where
    the study has one: then every scored trial has a score on it.
    """
    config = past.config
    assert config is not None
    assert past.start == incumbent.children_start, "what is compared has had as much training"
    identity = (config, past.start, epoch)
    trials = [trial for trial in past.trials if (trial.config, trial.start, trial.epoch) == identity]
    screens = [trial for trial in trials if trial.replicate == 0]
    repaired = any(trial.role is Role.REPAIR for trial in past.trials)
    screen = next((trial for trial in screens if trial.score is not None), None)
    if screen is None:
        failure = _failure(screens)
        if failure is None:
            role = Role.REPAIR if _was_amended(past) else Role.SCREEN
            return Run(
                role=role,
                config=config,
                replicate=0,
                proposal=past.number,
                start=past.start,
                abort_if=past.proposal.abort_if,
            )
        if failure.state is TrialState.OUT_OF_MEMORY and not repaired:
            smaller = _half_batch(config)
            if smaller is not None and smaller.digest not in known:
                return Repair(config=smaller)
        return _discarded(f"its trial {failure.id} ended {failure.state.value}: {failure.error_text}")
    assert screen.score is not None
    confirmed = {t.replicate: t.score for t in trials if t.replicate > 0 and t.score is not None}
    guarded = {t.replicate: t.guard_score for t in trials if t.replicate > 0 and t.guard_score is not None}
    evidence = Evidence(
        screen=screen.score,
        candidate=confirmed,
        candidate_failures=len(failed_replicates(trials) - {0}),
        incumbent=incumbent.to_beat,
        noise=noise,
        incumbent_failed=incumbent_failed,
        guard=guard,
        guard_screen=screen.guard_score,
        guard_candidate=guarded,
    )
    answer = judge(evidence, rules)
    match answer:
        case Verdict():
            return answer
        case Replicate(of="candidate"):
            return Run(
                role=Role.REPLICATE,
                config=config,
                replicate=answer.replicate,
                proposal=past.number,
                start=past.start,
            )
        case Replicate():
            return Run(
                role=Role.REPLICATE,
                config=incumbent.config,
                replicate=answer.replicate,
                proposal=incumbent.node or None,
                start=incumbent.children_start,
            )


def failed_replicates(trials: Sequence[Trial]) -> set[int]:
    """Return the replicates of one config that have no score and will not get one."""
    scored = {trial.replicate for trial in trials if trial.score is not None}
    failed = {trial.replicate for trial in trials if trial.state in FAILURES}
    gone = {trial.replicate for trial in trials if vanished_for_good(trials, trial.replicate)}
    return (failed | gone) - scored


def consecutive_failures(trials: Sequence[Trial]) -> int:
    """Return how many trials in a row failed at the end of the search, repairs and canaries put aside.

    Trials that ended with their driver say nothing and are passed over, and so are those of a replay and the untouched
    base, which trains nothing.
    """
    count = 0
    for trial in reversed(trials):
        if trial.role in UNCOUNTED:
            continue
        if trial.state in FAILURES:
            count += 1
        elif trial.state is TrialState.SCORED:
            break
    return count


def _was_amended(past: Past) -> bool:
    return any(trial.config != past.config and trial.replicate == 0 for trial in past.trials)


def vanished_for_good(trials: Sequence[Trial], replicate: int) -> bool:
    """Tell whether a config's trials of one replicate were lost under a live driver too often to be tried again."""
    lost = [t for t in trials if t.replicate == replicate and t.state is TrialState.LOST]
    return sum(trial.error_class != DRIVER_DIED for trial in lost) >= VANISHED_LIMIT


def _failure(screens: list[Trial]) -> Trial | None:
    """Return the trial that ends a screening badly: a failure, one given up, or the last of those that vanished."""
    failed = [trial for trial in screens if trial.state in FAILURES or trial.state is TrialState.STOPPED]
    if failed:
        return failed[-1]
    return screens[-1] if vanished_for_good(screens, 0) else None


def _half_batch(config: TrialConfig) -> TrialConfig | None:
    """Split the per-device batch by its smallest prime factor: half of it wherever it is even, same effective batch."""
    size = config.batch.per_device
    factor = next((f for f in range(2, size + 1) if size % f == 0), None)
    if factor is None or config.batch.accumulation * factor > 4096:
        return None
    return apply(
        config,
        {"batch.per_device": size // factor, "batch.accumulation": config.batch.accumulation * factor},
    )


def _discarded(reason: str) -> Verdict:
    return Verdict(
        decision=Decision.DISCARDED,
        difference=None,
        standard_error=None,
        probability=None,
        replicates=0,
        reason=reason,
    )
