"""Decides whether a change is better, from scores alone.

Keeping whatever is lower keeps about four changes in a night of 100 proposals in which nothing helps. This judge works
in two stages. A proposal's first run *screens*: unless it is promising at the measured noise it is discarded after that
one trial. What is promising is *confirmed*: candidate and incumbent run on the same fresh seeds, one pair at a time,
until the mean difference of the pairs is beyond a critical value, is hopeless, or ``max_replicates`` is reached. The
screening run that selected a candidate is no part of its estimate.

The critical values are Student's, with the degrees of freedom of the pooled noise, so that a spread known from three
runs of the baseline is trusted no more than it deserves. The chance of a false keep that a night may have is divided
by the proposals of a night (`NIGHT`, Bonferroni: holds however the tests depend on each other, and they do, because
they share the incumbent's runs), then spent over the looks at one candidate by a power function of the share of
``max_replicates`` that is used (Kim and DeMets, Biometrika 74:149, 1987). A sequential probability ratio test (Wald,
1945) of "no effect" against an effect that would be proven well before ``max_replicates`` gives up early.

Where a study has a guard set, a candidate must also stay within its limit against the untouched base model. One run
that is beyond the limit by more than the guard set's own noise ends it, as hopeless; else the limit is held against the
mean over the same fresh runs that prove the gain, at the moment when it would be kept.
``tests/harness/ledger/test_judge_nights.py`` simulates whole nights and holds the promises.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from scipy import special

from harness.noise import pool_noise as pool_noise
from harness.records import Decision, Guard, JudgeRules, Noise, Verdict

NIGHT = 100
"""Proposals over which `JudgeRules.confidence` holds."""
SCREENING_DEVIATIONS = 1.1
"""A first run is promising if it is below the incumbent's mean by this many standard deviations of one trial."""
SCREENING_DOUBT = 0.5
"""Part of that threshold, divided by the degrees of freedom, which is waived while the noise is hardly known: an
overestimated noise would turn real improvements away all night, a needless confirmation makes it better known."""
PROMISING_SHARE = 0.12
"""Share of changes without effect that pass the screening, about; see `error_per_candidate`."""
SPENDING_POWER = 1.5
"""Exponent of the spending function: later looks, with more runs, get more of the allowed error."""
DECISIVE_SHARE = 2 / 3
"""The futility rule looks for effects that this share of ``max_replicates`` would prove."""
MISS = 0.1
"""Chance with which the futility rule may give up such an effect."""
LEAST_RUNS = 2
"""Fresh runs of a candidate before it is kept: one run says nothing of its own spread, only the others' is known."""
TOLERATED_FAILURES = 1
"""Confirmation runs of a candidate that may fail; a config that fails more often is no improvement."""
GUARD_DEVIATIONS = 2.0
"""A first run beyond the guard set's limit by this many standard deviations of one run there is not worth another: one
config in forty that is just within the limit is lost to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """What is known about one candidate; scores of one epoch, at the study's budget."""

    screen: float
    """The candidate's first run, replicate 0."""
    candidate: Mapping[int, float]
    """Replicate number (1, 2, …) to score of the candidate's confirmation runs."""
    candidate_failures: int
    """Confirmation runs of the candidate that failed; lost and interrupted ones run again and do not count."""
    incumbent: Mapping[int, float]
    """Replicate number to score of every run that counts for the incumbent."""
    noise: Noise
    """Pooled over everything scored so far, this candidate's confirmation runs included."""
    incumbent_failed: Collection[int] = field(default=frozenset())
    """Replicate numbers on which the incumbent failed: no pair is made of them."""
    guard: Guard | None = None
    """The limit on the guard set; None where the study has none."""
    guard_screen: float | None = None
    """The candidate's first run on the guard set."""
    guard_candidate: Mapping[int, float] = field(default_factory=dict)
    """Replicate number to score of its confirmation runs on the guard set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicate:
    """What the judge needs before it can decide: one more run."""

    of: Literal["candidate", "incumbent"]
    replicate: int


def judge(evidence: Evidence, rules: JudgeRules) -> Verdict | Replicate:
    """Return the verdict on a candidate, or the run that is needed next.

    The same evidence gives the same answer, so a search that was killed goes on where it was.
    """
    _check(evidence)
    if evidence.candidate_failures > TOLERATED_FAILURES:
        return _discard(f"failed in {evidence.candidate_failures} of its confirmation runs", evidence)
    if not evidence.candidate and not evidence.candidate_failures:
        guard, first = evidence.guard, evidence.guard_screen
        if guard is not None and first is not None and _clearly_breaks(guard, first):
            return _discard(guard.told(first, " in its first run"), evidence)
        better = evidence.screen - _mean(evidence.incumbent)
        threshold = promising(evidence.noise)
        if better >= 0 or better > -threshold:
            return _discard(
                f"its first run was {_than(better)} the incumbent's mean, not better by the noise"
                f" of {threshold:.4f} that makes a change promising",
                evidence,
            )
        return Replicate(of="candidate", replicate=1)
    for replicate in sorted(evidence.candidate):
        if replicate not in evidence.incumbent and replicate not in evidence.incumbent_failed:
            return Replicate(of="incumbent", replicate=replicate)
    return _confirm(evidence, rules)


def promising(noise: Noise) -> float:
    """Return by how much a first run must be below the incumbent's mean to be worth confirming."""
    doubt = SCREENING_DOUBT / noise.degrees_of_freedom
    return SCREENING_DEVIATIONS * (1 - doubt) * noise.standard_deviation


def error_per_candidate(rules: JudgeRules) -> float:
    """Return the chance with which a promising change without effect may be kept.

    A night of `NIGHT` proposals may keep something false with 1 - confidence, and only promising candidates can be
    kept: hence the credit of `PROMISING_SHARE`. Screening and confirmation share the incumbent's luck, so this is no
    bound; that it holds is shown by simulation, not derived.
    """
    return (1 - rules.confidence) / (NIGHT * PROMISING_SHARE)


def critical_value(look: int, degrees_of_freedom: int, rules: JudgeRules) -> float:
    """Return how many standard errors better a candidate must be after ``look`` pairs to be kept."""
    used = [(pairs / rules.max_replicates) ** SPENDING_POWER for pairs in (look - 1, look)]
    return float(-special.stdtrit(degrees_of_freedom, error_per_candidate(rules) * (used[1] - used[0])))


def smallest_provable(noise: Noise, rules: JudgeRules) -> float:
    """Return the improvement that ``max_replicates`` pairs prove nine times in ten, in units of the metric."""
    critical = critical_value(rules.max_replicates, noise.degrees_of_freedom, rules)
    power = float(special.ndtri(0.9))
    return (critical + power) * noise.standard_deviation * math.sqrt(2 / rules.max_replicates)


def _confirm(evidence: Evidence, rules: JudgeRules) -> Verdict | Replicate:
    """Look at the confirmation runs so far: keep, give up, or ask for the next one."""
    used = len(evidence.candidate) + evidence.candidate_failures
    further = Replicate(of="candidate", replicate=_next_replicate(evidence)) if used < rules.max_replicates else None
    if not evidence.candidate:
        return further or _discard("none of its confirmation runs was scored", evidence)
    runs = len(evidence.candidate)
    difference = _mean(evidence.candidate) - _mean(evidence.incumbent)
    information = 1 / (1 / runs + 1 / len(evidence.incumbent))
    error = evidence.noise.standard_deviation / math.sqrt(information)
    freedom = evidence.noise.degrees_of_freedom
    deviations = -difference / error if error > 0 else math.copysign(math.inf, -difference)
    critical = critical_value(runs, freedom, rules)
    said = f"{_than(difference)} the incumbent over {runs} fresh seed{'s' if runs > 1 else ''}"
    if difference < 0 and deviations >= critical and runs >= LEAST_RUNS:
        decision, reason = Decision.KEPT, f"{said}: {deviations:.1f} standard errors, where {critical:.1f} prove it"
        if evidence.guard is not None and evidence.guard.is_broken_by(on_guard := _mean(evidence.guard_candidate)):
            decision = Decision.DISCARDED
            seeds = f" over {runs} fresh seed{'s' if runs > 1 else ''}"
            reason = f"{evidence.guard.told(on_guard, seeds)}; its score alone would be kept, {reason}"
    elif deviations < _hopeless(information, rules):
        decision, reason = Decision.DISCARDED, f"{said}: too little to be worth more runs"
    elif further is not None:
        return further
    else:
        decision = Decision.INCONCLUSIVE
        reason = f"{said}: {deviations:.1f} standard errors, and {critical:.1f} would be needed to prove it"
    return Verdict(
        decision=decision,
        difference=difference,
        standard_error=error,
        probability=float(special.stdtr(freedom, -deviations)),
        replicates=runs,
        reason=reason,
    )


def _clearly_breaks(guard: Guard, score: float) -> bool:
    """Tell whether one run is beyond the limit by more than chance."""
    return guard.noise is not None and guard.is_broken_by(score - GUARD_DEVIATIONS * guard.noise.standard_deviation)


def _next_replicate(evidence: Evidence) -> int:
    """Return the lowest number that neither has a score nor failed; a repair may leave gaps, which are filled first."""
    candidates = len(evidence.candidate) + evidence.candidate_failures + 1
    free = [number for number in range(1, candidates + 1) if number not in evidence.candidate]
    return free[evidence.candidate_failures]


def _hopeless(information: float, rules: JudgeRules) -> float:
    """Return the standard errors below which a candidate is given up: the lower boundary of Wald's test.

    In units of the noise, with an effect e against none and an observed improvement d of variance 1/information, the
    log likelihood ratio is information (e d - e²/2); below log(`MISS`) the effect is given up.
    """
    enough = DECISIVE_SHARE * rules.max_replicates
    effect = float(special.ndtri(1 - error_per_candidate(rules)) - special.ndtri(MISS)) * math.sqrt(2 / enough)
    return (effect / 2 + math.log(MISS) / (information * effect)) * math.sqrt(information)


def _check(evidence: Evidence) -> None:
    scores = [evidence.screen, *evidence.candidate.values(), *evidence.incumbent.values()]
    scores += evidence.guard_candidate.values()
    if not all(math.isfinite(score) for score in scores):
        raise ValueError("a score is not finite: failed runs have no score")
    if not evidence.incumbent:
        raise ValueError("the incumbent has no score to compare with")
    if 0 in evidence.candidate:
        raise ValueError("replicate 0 is the screening run, which is no part of the estimate")
    if evidence.guard is not None:
        missing = evidence.candidate.keys() - evidence.guard_candidate.keys()
        if evidence.guard_screen is None or missing:
            raise ValueError("a run of a study with a guard set was not scored on it")


def _discard(reason: str, evidence: Evidence) -> Verdict:
    return Verdict(
        decision=Decision.DISCARDED,
        difference=None,
        standard_error=None,
        probability=None,
        replicates=len(evidence.candidate),
        reason=reason,
    )


def _mean(scores: Mapping[int, float]) -> float:
    return math.fsum(scores.values()) / len(scores)


def _than(difference: float) -> str:
    return f"{abs(difference):.4f} {'better' if difference < 0 else 'worse'} than"
