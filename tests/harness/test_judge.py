from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.judge import Evidence, Replicate, critical_value, judge, promising, smallest_provable
from harness.records import BREAKS_GUARD, Decision, Guard, JudgeRules, Noise, Verdict

RULES = JudgeRules()
NOISE = Noise(standard_deviation=0.01, degrees_of_freedom=10)
INCUMBENT = {0: 2.0, 1: 2.01, 2: 1.99}


def evidence(
    screen: float = 1.9,
    candidate: Mapping[int, float] | None = None,
    *,
    failures: int = 0,
    incumbent: Mapping[int, float] = INCUMBENT,
    noise: Noise = NOISE,
    incumbent_failed: frozenset[int] = frozenset(),
) -> Evidence:
    return Evidence(
        screen=screen,
        candidate=candidate or {},
        candidate_failures=failures,
        incumbent=incumbent,
        noise=noise,
        incumbent_failed=incumbent_failed,
    )


def verdict(answer: Verdict | Replicate) -> Verdict:
    assert isinstance(answer, Verdict), answer
    return answer


@pytest.mark.parametrize("screen", [2.5, 2.0, 1.995, 1.99])
def test_what_is_not_promising_costs_one_trial(screen: float) -> None:
    """A first run that is worse, or better by less than the noise, is discarded without another run."""
    found = verdict(judge(evidence(screen), RULES))
    assert found.decision is Decision.DISCARDED
    assert (found.difference, found.standard_error, found.probability, found.replicates) == (None, None, None, 0)
    assert "incumbent's mean" in found.reason


def test_what_is_promising_is_run_again() -> None:
    """A promising first run decides nothing: the candidate runs on a fresh seed."""
    assert judge(evidence(1.9), RULES) == Replicate(of="candidate", replicate=1)


def test_the_incumbent_runs_on_the_same_seeds() -> None:
    """Where the incumbent has no score on a candidate's seed, it runs there before anything is concluded."""
    incumbent = {0: 2.0, 1: 2.01}
    assert judge(evidence(1.9, {1: 1.9, 2: 1.9}, incumbent=incumbent), RULES) == Replicate(of="incumbent", replicate=2)


def test_a_seed_on_which_the_incumbent_fails_is_passed_over() -> None:
    """An incumbent that failed on a seed is not asked for it for ever."""
    incumbent = {0: 2.0, 1: 2.01}
    answer = judge(evidence(1.99, {1: 1.985, 2: 1.98}, incumbent=incumbent, incumbent_failed=frozenset({2})), RULES)
    assert answer == Replicate(of="candidate", replicate=3)


def test_a_clear_improvement_is_kept() -> None:
    """Confirmation runs far below the incumbent are kept, with the estimate of the fresh runs alone."""
    found = verdict(judge(evidence(1.5, {1: 1.9, 2: 1.9}), RULES))
    assert found.decision is Decision.KEPT
    assert found.difference == pytest.approx(-0.1)
    assert found.standard_error == pytest.approx(0.01 * math.sqrt(1 / 2 + 1 / 3))
    assert found.probability is not None
    assert found.probability < 1e-4
    assert found.replicates == 2
    assert "0.1000 better than the incumbent over 2 fresh seeds" in found.reason


def test_the_screening_run_is_no_part_of_the_estimate() -> None:
    """However lucky the first run was, the verdict on the same confirmation runs is the same."""
    runs = {1: 1.9, 2: 1.9}
    assert judge(evidence(1.9, runs), RULES) == judge(evidence(0.1, runs), RULES)


def test_a_lucky_first_run_is_found_out() -> None:
    """A candidate whose fresh run is no better is discarded, and says by how much it was not."""
    found = verdict(judge(evidence(1.9, {1: 2.01}), RULES))
    assert found.decision is Decision.DISCARDED
    assert found.difference == pytest.approx(0.01)
    assert "too little" in found.reason


def test_what_stays_unclear_is_inconclusive() -> None:
    """At the last allowed run an unproven improvement is said to be just that."""
    runs = dict.fromkeys(range(1, 9), 1.987)
    incumbent = dict.fromkeys(range(9), 2.0)
    found = verdict(
        judge(
            evidence(1.9, runs, incumbent=incumbent, noise=Noise(standard_deviation=0.012, degrees_of_freedom=20)),
            RULES,
        )
    )
    assert found.decision is Decision.INCONCLUSIVE
    assert "would be needed" in found.reason


def test_little_known_noise_is_trusted_less() -> None:
    """The same runs that prove an improvement with many degrees of freedom do not with two."""
    runs = {1: 1.94, 2: 1.94}
    assert verdict(judge(evidence(1.9, runs), RULES)).decision is Decision.KEPT
    unsure = Noise(standard_deviation=0.01, degrees_of_freedom=2)
    assert judge(evidence(1.9, runs, noise=unsure), RULES) == Replicate(of="candidate", replicate=3)


def test_failures_in_confirmation() -> None:
    """One failed confirmation run is passed over, a second one ends it: what often fails is no improvement."""
    assert judge(evidence(1.9, failures=1), RULES) == Replicate(of="candidate", replicate=2)
    found = verdict(judge(evidence(1.9, {3: 1.9}, failures=2), RULES))
    assert found.decision is Decision.DISCARDED
    assert "failed in 2" in found.reason


@pytest.mark.parametrize(
    ("scored", "failures", "following"),
    [([], 1, 2), ([1], 0, 2), ([1], 1, 3), ([2], 1, 3), ([1, 3], 1, 4), ([3], 0, 1), ([1, 3], 0, 2), ([2, 3], 0, 1)],
)
def test_the_next_replicate_is_a_new_one(scored: list[int], failures: int, following: int) -> None:
    """No seed is asked for twice: not after a failure, and not where a repair left earlier seeds open."""
    unsure = Noise(standard_deviation=0.05, degrees_of_freedom=2)
    incumbent = dict.fromkeys(range(9), 2.0)
    known = evidence(1.8, dict.fromkeys(scored, 1.9), failures=failures, incumbent=incumbent, noise=unsure)
    assert judge(known, RULES) == Replicate(of="candidate", replicate=following)


def test_failures_count_as_runs() -> None:
    """A failed confirmation run is one of ``max_replicates``."""
    rules = JudgeRules(max_replicates=2)
    unsure = Noise(standard_deviation=0.05, degrees_of_freedom=2)
    assert verdict(judge(evidence(1.8, {2: 1.8}, failures=1, noise=unsure), rules)).decision is Decision.INCONCLUSIVE


def test_bad_evidence_is_an_error() -> None:
    """NaN, no incumbent, or a screening run among the confirmations are mistakes of the caller, not verdicts."""
    with pytest.raises(ValueError, match="not finite"):
        judge(evidence(math.nan), RULES)
    with pytest.raises(ValueError, match="not finite"):
        judge(evidence(1.9, {1: math.inf}), RULES)
    with pytest.raises(ValueError, match="no score to compare"):
        judge(evidence(1.9, incumbent={}), RULES)
    with pytest.raises(ValueError, match="screening run"):
        judge(evidence(1.9, {0: 1.9}), RULES)


def test_no_noise_at_all_is_no_division_by_zero() -> None:
    """With a spread of zero any difference is proof, and none is not."""
    still = Noise(standard_deviation=0.0, degrees_of_freedom=2)
    flat = {0: 2.0, 1: 2.0, 2: 2.0}
    twice = {1: 1.9, 2: 1.9}
    assert verdict(judge(evidence(1.9, twice, incumbent=flat, noise=still), RULES)).decision is Decision.KEPT
    assert verdict(judge(evidence(2.0, incumbent=flat, noise=still), RULES)).decision is Decision.DISCARDED
    assert verdict(judge(evidence(1.9, {1: 2.0}, incumbent=flat, noise=still), RULES)).decision is Decision.DISCARDED


def test_one_fresh_run_is_never_enough() -> None:
    """However far away it is: a second seed must say the same."""
    assert judge(evidence(0.1, {1: 0.1}), RULES) == Replicate(of="candidate", replicate=2)
    assert verdict(judge(evidence(0.1, {1: 0.1, 2: 0.1}), RULES)).decision is Decision.KEPT


def test_what_can_be_proven_shrinks_with_runs_and_noise() -> None:
    """The smallest provable improvement is what the owner is told; it follows noise, runs and how well it is known."""
    now = smallest_provable(NOISE, RULES)
    assert 0.015 < now < 0.03
    assert smallest_provable(NOISE, JudgeRules(max_replicates=16)) < now
    assert smallest_provable(Noise(standard_deviation=0.02, degrees_of_freedom=10), RULES) == pytest.approx(2 * now)
    assert smallest_provable(Noise(standard_deviation=0.01, degrees_of_freedom=2), RULES) > 2 * now


SCORES = st.floats(0, 10)


@given(
    screen=SCORES,
    runs=st.lists(SCORES, max_size=8),
    others=st.lists(SCORES, min_size=9, max_size=9),
    deviation=st.floats(0, 2),
    freedom=st.integers(1, 200),
    failures=st.integers(0, 3),
    most=st.integers(2, 8),
)
def test_the_judge_always_answers_soundly(
    screen: float, runs: list[float], others: list[float], deviation: float, freedom: int, failures: int, most: int
) -> None:
    """Any evidence gets one run that is allowed or a verdict whose numbers belong together."""
    rules = JudgeRules(max_replicates=most)
    noise = Noise(standard_deviation=deviation, degrees_of_freedom=freedom)
    candidate = {failures + 1 + index: score for index, score in enumerate(runs)}
    known = evidence(screen, candidate, failures=failures, incumbent=dict(enumerate(others)), noise=noise)
    answer = judge(known, rules)
    assert answer == judge(known, rules)
    if isinstance(answer, Replicate):
        if answer.of == "candidate":
            assert answer.replicate == len(runs) + failures + 1 <= most
        else:
            assert answer.replicate in candidate
            assert answer.replicate not in known.incumbent
        return
    assert answer.replicates == len(runs)
    assert answer.reason
    if answer.difference is not None:
        assert answer.standard_error is not None
        assert answer.probability is not None
        assert 0 <= answer.probability <= 1
    if answer.decision is Decision.KEPT:
        assert answer.difference is not None
        assert answer.difference < 0
        assert answer.probability is not None
        assert answer.probability < 0.01


@given(
    look=st.integers(1, 64),
    most=st.integers(2, 64),
    freedom=st.integers(1, 500),
    confidence=st.floats(0.51, 0.999),
)
def test_critical_values_are_finite_and_strict(look: int, most: int, freedom: int, confidence: float) -> None:
    """No look is ever decided by less than 1.9 standard errors, even by the most careless policy."""
    rules = JudgeRules(max_replicates=most, confidence=confidence)
    value = critical_value(min(look, most), freedom, rules)
    assert 1.9 < value < math.inf


def test_screening_doubts_little_known_noise() -> None:
    """While the noise is hardly known, less is asked of a first run."""
    assert promising(Noise(standard_deviation=1.0, degrees_of_freedom=2)) < promising(
        Noise(standard_deviation=1.0, degrees_of_freedom=50)
    )


# --- the guard set ---

QUIET = Noise(standard_deviation=0.001, degrees_of_freedom=4)
GUARD = Guard(reference=4.0, max_regression=0.05, noise=QUIET)


def guarded(first: float, fresh: Mapping[int, float], guard: Guard = GUARD, *, screen: float = 1.9) -> Evidence:
    """Return the evidence on a candidate that is far better on val, with these scores on the guard set."""
    candidate = dict.fromkeys(fresh, 1.9)
    return replace(evidence(screen, candidate), guard=guard, guard_screen=first, guard_candidate=fresh)


def test_a_first_run_far_beyond_the_guard_ends_it() -> None:
    """One trial, whatever its score on val; the sentence has the numbers."""
    found = verdict(judge(guarded(4.081, {}), RULES))
    assert (found.decision, found.replicates, found.difference) == (Decision.DISCARDED, 0, None)
    assert found.reason == (
        "breaks the guard: 0.081 bits per byte worse than the untouched base on the guard set in its first run,"
        " 0.05 are allowed"
    )


@pytest.mark.parametrize("noise", [Noise(standard_deviation=0.02, degrees_of_freedom=4), None])
def test_a_first_run_within_the_noise_of_the_guard_decides_nothing(noise: Noise | None) -> None:
    """It may be the seed."""
    guard = replace(GUARD, noise=noise)
    assert judge(guarded(4.081, {}, guard), RULES) == Replicate(of="candidate", replicate=1)


def test_the_mean_over_fresh_seeds_is_held_against_the_guard() -> None:
    """The screening run counts for nothing; the numbers of the gain stay in the verdict."""
    found = verdict(judge(guarded(4.0, {1: 4.04, 2: 4.07}), RULES))
    assert found.decision is Decision.DISCARDED
    assert "0.055 bits per byte worse" in found.reason
    assert "over 2 fresh seeds, 0.05 are allowed; its score alone would be kept" in found.reason
    assert found.difference == pytest.approx(-0.1)
    within = verdict(judge(guarded(4.0, {1: 4.04, 2: 4.059}), RULES))
    assert within.decision is Decision.KEPT


def test_a_run_without_its_score_on_the_guard_set_is_a_fault() -> None:
    """A study with a guard set has a score there for every scored trial."""
    for broken in (
        replace(guarded(4.0, {1: 4.0}), guard_candidate={}),
        replace(guarded(4.0, {1: 4.0}), guard_screen=None),
    ):
        with pytest.raises(ValueError, match="guard"):
            judge(broken, RULES)


near = st.floats(3.8, 4.3)


@given(
    st.floats(1.5, 2.5),
    st.lists(st.tuples(st.floats(1.5, 2.5), near), max_size=3),
    near,
    st.floats(0, 0.1),
    st.floats(0, 0.05),
)
def test_the_guard_only_ever_turns_down(
    screen: float, runs: list[tuple[float, float]], first: float, limit: float, spread: float
) -> None:
    """With a guard set the answer is the one without it, or a rejection; nothing beyond the limit is ever kept."""
    guard = Guard(reference=4.0, max_regression=limit, noise=Noise(standard_deviation=spread, degrees_of_freedom=4))
    fresh = {number: run[1] for number, run in enumerate(runs, 1)}
    bare = evidence(screen, {number: run[0] for number, run in enumerate(runs, 1)}, incumbent={**INCUMBENT, 3: 2.0})
    asked = replace(bare, guard=guard, guard_screen=first, guard_candidate=fresh)
    before, answer = judge(bare, RULES), judge(asked, RULES)
    if answer != before:
        assert verdict(answer).decision is Decision.DISCARDED
        assert verdict(answer).reason.startswith(BREAKS_GUARD)
    if isinstance(answer, Verdict) and answer.decision is Decision.KEPT:
        assert not guard.is_broken_by(math.fsum(fresh.values()) / len(fresh))
