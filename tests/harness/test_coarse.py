"""What an agent is told is short, one line, and no finer than the noise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import coarse
from harness.errors import BadInput
from harness.records import CurvePoint, Noise, Role, Trial

POINT = CurvePoint(progress=1, seconds=2, step=10, train_loss=4, probe_score=2.5, learning_rate=1e-3, gradient_norm=1)
NOISES = st.builds(Noise, standard_deviation=st.floats(1e-6, 1.0), degrees_of_freedom=st.just(5))


@given(text=st.text(), most=st.integers(1, 50))
def test_a_quotation_cannot_be_left(text: str, most: int) -> None:
    """Whatever somebody wrote, it is one short line, and its only closing quote is ours."""
    shown = coarse.quote(text, most)
    assert shown is not None
    assert len(shown) <= most + 2
    assert shown[0] == coarse.OPENING
    assert shown.index(coarse.CLOSING) == len(shown) - 1
    assert len(shown.splitlines()) == 1
    assert shown.encode("utf-8")


@given(score=st.floats(0.01, 20), noise=NOISES)
def test_two_scores_in_one_step_are_told_alike(score: float, noise: Noise) -> None:
    """Rounding twice changes nothing, and the score itself cannot be had back from what is shown."""
    shown = coarse.rounded(score, noise)
    assert shown is not None
    assert shown == noise.rounded(shown)
    assert abs(shown - score) <= noise.step * 0.500001
    assert coarse.rounded(score, None) is None


def test_a_long_curve_is_thinned_out_and_its_probe_rounded(make_trial: Callable[..., Trial]) -> None:
    """Twelve points from first to last are enough to see a curve's shape."""
    curve = tuple(
        POINT.model_copy(update={"step": step, "probe_score": 3.14159, "train_loss": 4.123456})
        for step in range(1, 101)
    )
    shown = coarse.trial(make_trial(curve=curve), Noise(standard_deviation=0.02, degrees_of_freedom=4), None).curve
    assert [shown[0].step, shown[-1].step, len(shown)] == [1, 100, 12]
    assert {(point.probe, point.train_loss) for point in shown} == {(3.14, 4.123)}


def test_perplexity_tells_no_more_than_the_score() -> None:
    """Score and perplexity come from the same nats: two scores that round alike give the same perplexity."""
    noise = Noise(standard_deviation=0.01, degrees_of_freedom=5)
    tokens_per_byte = 0.3
    shown = {coarse._perplexity(2 ** (score / tokens_per_byte), score, noise) for score in (2.4961, 2.5, 2.5039)}
    assert len(shown) == 1
    assert shown == {float(f"{2 ** (2.5 / tokens_per_byte):.4g}")}


def test_a_replays_trial_is_not_told(make_trial: Callable[..., Trial]) -> None:
    """It belongs to the owner; the sentence says so and holds no number but the one that was asked for."""
    with pytest.raises(BadInput, match=r"^trial 5 belongs to a replay, which only the owner looks at$"):
        coarse.trial(make_trial(id=5, role=Role.FINAL, score=1.2345678), None, None)
