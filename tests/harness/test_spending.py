from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import BadInput, SpendingCapReached
from harness.policy import packaged_prices
from harness.rows import Spent
from harness.spending import Caps, Price, Prices
from harness.terms import Usage

PRICE = Price(input=2.0, cache_read=0.5, cache_write=3.0, output=10.0)
USAGE = Usage(input_tokens=1_000_000, cache_read_tokens=2_000_000, cache_write_tokens=100_000, output_tokens=50_000)
NOTHING = Spent(tokens=0, usd=0.0, unpriced_calls=0)


def test_every_kind_of_token_has_its_price() -> None:
    """By hand: 2 + 2 × 0.5 + 0.1 × 3 + 0.05 × 10 dollars; reasoning is part of the output and not paid twice."""
    assert PRICE.cost_usd(USAGE) == pytest.approx(3.8)
    assert PRICE.cost_usd(USAGE.model_copy(update={"reasoning_tokens": 40_000})) == pytest.approx(3.8)
    assert USAGE.tokens == 3_150_000


def test_a_model_without_a_price_has_no_cost() -> None:
    """Unknown is None, never nothing."""
    prices = Prices(date=datetime.date(2026, 1, 1), models={"known": PRICE})
    assert prices.cost_usd("known", USAGE) == pytest.approx(3.8)
    assert prices.cost_usd("unknown", USAGE) is None


def test_the_file_of_prices_that_comes_with_us_is_sound() -> None:
    """It can be read, and says when somebody last looked."""
    assert Prices.read(packaged_prices()).date >= datetime.date(2026, 11, 30)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models = {}", "date"),
        ("date = 2026-01-01\nmodel = {}", "did you mean 'models'|models"),
        ("date = 2026-01-01\n[models.x]\ninput = -1\ncache_read = 0\ncache_write = 0\noutput = 0", "input"),
        ("date = 2026-01-01\n[models.x]\ninput = 1", "output"),
        ("date = 2026-01-01\n[models.x]\ninput = inf\ncache_read = 0\ncache_write = 0\noutput = 0", "input"),
        ("date = ", "TOML"),
    ],
)
def test_a_bad_file_of_prices_is_named(tmp_path: Path, text: str, said: str) -> None:
    """One sentence with the file and the key."""
    path = tmp_path / "prices.toml"
    path.write_text(text)
    with pytest.raises(BadInput, match=said) as caught:
        Prices.read(path)
    assert str(path) in str(caught.value)


amounts = st.integers(0, 10**7)


@given(spent=amounts, most=amounts, cap=amounts)
def test_a_token_cap_is_never_passed(spent: int, most: int, cap: int) -> None:
    """A call is let through exactly if its worst case still fits."""
    caps = Caps(max_tokens=cap)
    usage = Usage(input_tokens=most, output_tokens=0)
    told = Spent(tokens=spent, usd=0.0, unpriced_calls=0)
    if spent + most <= cap:
        caps.check(told, usage, None)
    else:
        with pytest.raises(SpendingCapReached, match="tokens"):
            caps.check(told, usage, None)


def test_a_money_cap_fails_closed() -> None:
    """It holds at the worst case, and a call whose price nobody knows is not let through, now or after one."""
    caps = Caps(max_usd=1.0)
    caps.check(Spent(tokens=5, usd=0.6, unpriced_calls=0), USAGE, 0.4)
    with pytest.raises(SpendingCapReached, match=r"\$0\.60 of \$1\.00"):
        caps.check(Spent(tokens=5, usd=0.6, unpriced_calls=0), USAGE, 0.41)
    with pytest.raises(SpendingCapReached, match="no price"):
        caps.check(NOTHING, USAGE, None)
    with pytest.raises(SpendingCapReached, match="no price"):
        caps.check(Spent(tokens=5, usd=0.0, unpriced_calls=1), USAGE, 0.1)
    Caps().check(Spent(tokens=5, usd=9.0, unpriced_calls=1), USAGE, None)
