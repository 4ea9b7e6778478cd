from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.asking import PERMANENT, AskFailed, Trouble
from agent.patience import (
    DECLINED,
    FIRST_PAUSE_SECONDS,
    JITTER,
    LONGEST_PAUSE_SECONDS,
    LONGEST_TEXT,
    MOST_REFUSALS,
    REFUSAL_PAUSE_SECONDS,
    Patience,
)

TRANSIENT = sorted(set(Trouble) - PERMANENT - DECLINED)
WHO = "anthropic wise-1"


def failure(trouble: Trouble = Trouble.OVERLOADED, **details: float) -> AskFailed:
    return AskFailed(trouble, "HTTP 529: too many at once", **details)


def pause_seconds(patience: Patience, now: float) -> float:
    """Return how long from now the model is left alone, by halving."""
    low, high = 0.0, 1e6
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if patience.allows(now + middle) else (middle, high)
    return high


def test_pauses_double_up_to_a_quarter_of_an_hour() -> None:
    """Each failure in a row is followed by about twice the pause, within the jitter, up to the longest."""
    patience, now = Patience(WHO), 0.0
    for failures in range(12):
        patience.failed(failure(), now, seed=3)
        expected = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2**failures)
        pause = pause_seconds(patience, now)
        assert expected * (1 - JITTER) <= pause <= expected * (1 + JITTER)
        now += pause


def test_an_answer_starts_afresh() -> None:
    """After an answer the next failure is a first one again."""
    patience = Patience(WHO)
    for _ in range(6):
        patience.failed(failure(), 0.0, seed=3)
    patience.answered(100.0)
    assert patience.allows(100.0)
    patience.failed(failure(), 100.0, seed=3)
    assert pause_seconds(patience, 100.0) < 2 * FIRST_PAUSE_SECONDS


@given(seed=st.integers(0, 2**40), failures=st.integers(1, 2000), trouble=st.sampled_from(TRANSIENT))
def test_pauses_are_a_function_of_seed_and_count(seed: int, failures: int, trouble: Trouble) -> None:
    """The same study in the same outage is asked again at the same moments, whatever the count."""
    one, other = Patience(WHO), Patience(WHO)
    for patience in (one, other):
        for _ in range(failures):
            patience.failed(failure(trouble), 0.0, seed)
    assert pause_seconds(one, 0.0) == pause_seconds(other, 0.0) <= LONGEST_PAUSE_SECONDS * (1 + JITTER)


def test_studies_do_not_come_back_together() -> None:
    """Another seed has other pauses."""
    pauses = set()
    for seed in range(20):
        patience = Patience(WHO)
        patience.failed(failure(), 0.0, seed)
        pauses.add(round(pause_seconds(patience, 0.0), 3))
    assert len(pauses) == 20


@pytest.mark.parametrize("seconds", [30.0, 8 * 3600.0])
def test_retry_after_is_honoured_however_long(seconds: float) -> None:
    """What the provider asks for is waited for, since nobody waits."""
    patience = Patience(WHO)
    notice = patience.failed(failure(Trouble.RATE_LIMITED, retry_after_seconds=seconds), 0.0, seed=3)
    assert not patience.allows(seconds - 1)
    assert patience.allows(seconds)
    assert notice is not None
    assert ("8 h" if seconds > 100 else "30 s") in notice.text


def test_a_long_outage_is_two_lines() -> None:
    """A thousand equal failures are told once, and their end once."""
    patience = Patience(WHO)
    told = [patience.failed(failure(), float(minute), seed=3) for minute in range(1000)]
    assert [notice.kind for notice in told if notice] == ["model_trouble"]
    assert told[0] is not None
    for word in (WHO, "overloaded", "HTTP 529"):
        assert word in told[0].text
    back = patience.answered(60_000.0)
    assert back is not None
    assert back.kind == "model_back"
    assert "1000 failures" in back.text
    assert "16.7 h" in back.text
    assert patience.answered(60_001.0) is None


def test_another_class_in_the_same_series_is_told() -> None:
    """Overloaded, then unreachable, then both in turns: two lines."""
    patience = Patience(WHO)
    troubles = [Trouble.OVERLOADED, Trouble.UNREACHABLE] * 5
    assert sum(patience.failed(failure(trouble), 0.0, seed=3) is not None for trouble in troubles) == 2


@pytest.mark.parametrize("trouble", sorted(PERMANENT))
def test_what_asking_again_does_not_cure_ends_it(trouble: Trouble) -> None:
    """A permanent failure switches the model off with one line."""
    patience = Patience(WHO)
    notice = patience.failed(failure(trouble), 0.0, seed=3)
    assert notice is not None
    assert notice.kind == "model_off"
    assert trouble in notice.text
    assert not patience.allows(1e9)


@pytest.mark.parametrize("trouble", sorted(DECLINED))
def test_refusals_are_outcomes(trouble: Trouble) -> None:
    """Each refusal is told with its category, is followed by a long pause, and the third in a row is the last."""
    patience, now = Patience(WHO), 0.0
    for _ in range(MOST_REFUSALS - 1):
        notice = patience.failed(AskFailed(trouble, "category frontier_llm"), now, seed=3)
        assert notice is not None
        assert notice.kind == "model_trouble"
        assert "frontier_llm" in notice.text
        assert pause_seconds(patience, now) >= REFUSAL_PAUSE_SECONDS * (1 - JITTER)
        now += pause_seconds(patience, now)
    last = patience.failed(AskFailed(trouble, "category frontier_llm"), now, seed=3)
    assert last is not None
    assert last.kind == "model_off"
    assert "3 times in a row" in last.text
    assert not patience.allows(1e9)


def test_an_answer_between_refusals_counts() -> None:
    """Only refusals in a row end the asking."""
    patience = Patience(WHO)
    for _ in range(10):
        patience.failed(failure(Trouble.REFUSED), 0.0, seed=3)
        patience.answered(1.0)
    assert patience.allows(2.0)


def test_a_providers_words_are_one_short_line() -> None:
    """A page of HTML does not become a page in the ledger."""
    notice = Patience(WHO).failed(AskFailed(Trouble.GARBAGE, "<html>\n" + "x" * 10_000), 0.0, seed=3)
    assert notice is not None
    assert "\n" not in notice.text
    assert len(notice.text) < LONGEST_TEXT + 200
