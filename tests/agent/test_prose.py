"""Foreign text and numbers as a model is shown them."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.prose import LONGEST_QUOTE, Figures, changes, number, quoted, size, word
from harness.records import Noise


@given(st.text(max_size=2_000))
def test_a_quotation_is_one_short_line_that_nothing_inside_can_end(text: str) -> None:
    """Line breaks, control and format characters, fences, tags and our own marks lose their meaning."""
    said = quoted(text)
    inside = said[1:-1]
    assert said[0] == "«"
    assert said[-1] == "»"
    assert len(inside) <= LONGEST_QUOTE
    assert not set("«»`<>|#") & set(inside)
    assert all(unicodedata.category(c)[0] not in "CZ" or c == " " for c in inside)


@given(st.text(max_size=200))
def test_a_word_is_one_word(text: str) -> None:
    """A name that somebody else chose has no space in which a sentence could hide."""
    assert word(text).isascii()
    assert len(word(text).split()) == 1
    assert len(word(text)) <= 48


def test_what_is_harmless_stays() -> None:
    """Ordinary prose is not disfigured, and a cut is seen."""
    assert quoted("Half the batch: 2× the steps — über alles.") == "«Half the batch: 2× the steps — über alles.»"
    assert quoted("abcdef", 4) == "«abc…»"


@pytest.mark.parametrize(
    ("deviation", "score", "shown"),
    [
        (0.0057, 2.3771, "2.375"),
        (0.0057, 2.3779, "2.380"),
        (0.0031, 2.3771, "2.378"),
        (0.3, 2.3771, "2.4"),
        (3.0, 12.3, "12"),
        (0.0, 2.3771, "2.38"),
    ],
)
def test_scores_are_rounded_to_the_noise(deviation: float, score: float, shown: str) -> None:
    """To 1, 2 or 5 times a power of ten at most as large as the noise; to two decimals where no spread was seen."""
    assert Figures.of(Noise(standard_deviation=deviation, degrees_of_freedom=2)).score(score) == shown


@given(st.floats(1e-9, 10), st.floats(-100, 100))
def test_a_shown_difference_is_a_multiple_of_the_step(deviation: float, difference: float) -> None:
    """Nothing finer gets through, and zero has no sign."""
    figures = Figures.of(Noise(standard_deviation=deviation, degrees_of_freedom=2))
    shown = float(figures.difference(difference))
    assert abs(shown / figures.step - round(shown / figures.step)) < 1e-3
    assert abs(shown - difference) <= figures.step * 0.501
    assert (shown == 0) == (figures.difference(difference)[0] not in "+-")


def test_changes_are_short_whatever_is_in_them() -> None:
    """A diff of a hundred long names is cut and counted."""
    said = changes({f"{'k' * 90}{n}": "v" * 900 for n in range(100)}, None)
    assert len(said) < 330
    assert said.endswith("and 94 more")
    assert changes({"optim.beta1": 0.95, "new": 1}, {"optim.beta1": 0.9}) == "new = 1, optim.beta1 0.9→0.95"


def test_numbers_are_readable() -> None:
    """No exponents where people write none."""
    assert [number(x) for x in (None, float("nan"), 0.123456, 51_234.0, 1_066_112)] == [
        *("–", "–", "0.123", "51,200", "1,070,000"),
    ]
    assert [size(x) for x in (None, 5_000_000, 410_000_000, 25_769_803_776)] == ["–", "5 MB", "0.41 GB", "25.8 GB"]
