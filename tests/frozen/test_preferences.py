import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frozen.evaluate import Score
from frozen.preferences import preference_score

NATS = st.floats(0, 1e6, allow_nan=False)


def scored(document_nats: list[float], **changes: Any) -> Score:
    """Return a score over documents of three tokens and seven bytes each."""
    count = len(document_nats)
    plain = {"nats": math.fsum(document_nats), "bytes": 7 * count, "tokens": 3 * count}
    return Score(**(plain | changes), document_nats=np.array(document_nats, dtype=np.float64))


@given(st.lists(st.tuples(NATS, NATS), min_size=1, max_size=50), st.floats(1e-3, 10))
def test_the_base_has_exactly_one_bit_per_pair(pairs: list[tuple[float, float]], beta: float) -> None:
    """What was not trained tells nothing apart: ln 2 nats per pair to the last bit, and half of the pairs right."""
    score = scored([nats for pair in pairs for nats in pair])
    result = preference_score(score, score, beta=beta)
    assert result.pair_nats.tolist() == [math.log(2)] * len(pairs)
    assert (result.bits_per_pair, result.pairs, result.right_pairs) == (1.0, len(pairs), len(pairs) // 2)


@given(st.lists(st.tuples(NATS, NATS, NATS, NATS), min_size=1, max_size=20), st.floats(1e-3, 1))
def test_each_pair_costs_minus_log_sigmoid_of_its_margin(
    pairs: list[tuple[float, float, float, float]], beta: float
) -> None:
    """Against the formula written out with the standard library, at margins of up to two million nats."""
    policy = scored([nats for chosen, rejected, _, _ in pairs for nats in (chosen, rejected)])
    reference = scored([nats for _, _, chosen, rejected in pairs for nats in (chosen, rejected)])
    result = preference_score(policy, reference, beta=beta)
    for (chosen, rejected, base_chosen, base_rejected), nats in zip(pairs, result.pair_nats, strict=True):
        x = beta * ((-chosen - -base_chosen) - (-rejected - -base_rejected))
        expected = math.log1p(math.exp(-x)) if x > 0 else -x + math.log1p(math.exp(x))
        assert nats == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert result.nats == math.fsum(result.pair_nats)
    assert result.pair_nats.dtype == np.float64


def test_right_pairs_and_ties() -> None:
    """Three won, one lost, three ties: four right, because half of the ties is rounded down."""
    reference = scored([10.0] * 14)
    policy = scored([9, 10, 10, 11, 9, 11, 11, 10, 8, 8, 10, 10, 12, 12])
    result = preference_score(policy, reference, beta=0.1)
    assert (result.pairs, result.right_pairs, result.accuracy) == (7, 4, 4 / 7)


def test_likelier_chosen_answers_lower_the_score() -> None:
    """A chosen answer that became likelier is below one bit, a rejected one above."""
    base = scored([5.0, 5.0])
    assert preference_score(scored([4.0, 5.0]), base, beta=0.1).bits_per_pair < 1
    assert preference_score(scored([5.0, 4.0]), base, beta=0.1).bits_per_pair > 1


@pytest.mark.parametrize(
    ("policy", "reference", "beta", "message"),
    [
        (scored([1.0] * 3), scored([1.0] * 3), 0.1, "in pairs"),
        (scored([]), scored([]), 0.1, "in pairs"),
        (scored([1.0] * 4), scored([1.0] * 2), 0.1, "not scores of one split"),
        (scored([1.0] * 2), scored([1.0] * 2, tokens=7), 0.1, "not scores of one split"),
        (scored([1.0] * 2), scored([1.0] * 2, bytes=7), 0.1, "not scores of one split"),
        (scored([1.0, math.nan]), scored([1.0] * 2), 0.1, "not finite"),
        (scored([1.0, 1.0]), scored([1.0, math.inf]), 0.1, "not finite"),
        (scored([1.0] * 2), scored([1.0] * 2), 0.0, "beta"),
        (scored([1.0] * 2), scored([1.0] * 2), -1.0, "beta"),
        (scored([1.0] * 2), scored([1.0] * 2), math.nan, "beta"),
        (scored([1.0] * 2), scored([1.0] * 2), math.inf, "beta"),
    ],
)
def test_what_does_not_fit_together_is_refused(policy: Score, reference: Score, beta: float, message: str) -> None:
    """Odd numbers, different splits, scores that are none, a beta that compares nothing."""
    with pytest.raises(ValueError, match=message):
        preference_score(policy, reference, beta=beta)


@pytest.mark.parametrize("module", ["frozen.preferences", "frozen.sampling"])
def test_no_torch_is_needed(module: str) -> None:
    """Whoever adds up preferences or counts an epoch's positions does not wait for torch."""
    script = f"import sys, {module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False"]
