from __future__ import annotations

from typing import Any

import pytest

from harness.desk import LONGEST_INSIGHT, StudyDesk
from harness.errors import BadInput, SpendingCapReached
from harness.studyfile import Agent
from harness.terms import CallBegun, CallEnded, Usage, provider_and_model

PRICED = """date = 2026-11-30
[models.m]
input = 1000
cache_read = 100
cache_write = 1250
output = 5000
"""
ASKED = CallBegun(
    provider="anthropic", model="m", purpose="proposals", most=Usage(input_tokens=1000, output_tokens=100)
)
ENDED = CallEnded(usage=Usage(input_tokens=100, output_tokens=20), latency_seconds=1)


@pytest.fixture
def make_desk(night: Any) -> Any:
    """Return a maker of desks over a study whose prices know the model ``m``."""
    night.study.paths.prices_toml.write_text(PRICED)
    return lambda **caps: StudyDesk(night.ledger, night.study.paths, Agent(**({"llm": "anthropic:m"} | caps)))


def test_calls_are_priced_and_capped_over_restarts(make_desk: Any) -> None:
    """The worst case of 1.50 fits into 1.75 twice only after the first call has ended for 0.20."""
    desk = make_desk(max_usd=1.75)
    call = desk.begin_call(ASKED)
    with pytest.raises(SpendingCapReached):
        desk.begin_call(ASKED)
    assert desk.end_call(call, ENDED) == pytest.approx(0.2)
    later = make_desk(max_usd=1.75)
    second = later.begin_call(ASKED)
    later.end_call(second, CallEnded(usage=None, latency_seconds=9, trouble="timed_out", text="nothing came"))
    with pytest.raises(SpendingCapReached, match=r"\$1\.70 of \$1\.75"):
        make_desk(max_usd=1.75).begin_call(ASKED)


def test_an_unknown_price_with_a_cap_on_money_is_told_at_the_start(make_desk: Any) -> None:
    """Without the cap, or with one on tokens, any model may be asked."""
    with pytest.raises(BadInput, match=r"price of other is not known.*prices\.toml"):
        make_desk(llm="anthropic:other", max_usd=1.0).check_price()
    make_desk(max_usd=1.0).check_price()
    make_desk(llm="other", max_tokens=10).check_price()
    make_desk(llm=None, max_usd=1.0).check_price()


def test_a_bad_file_of_prices_stops_the_start(make_desk: Any, night: Any) -> None:
    """Nobody guesses what a call costs; where no model is asked nobody needs to know."""
    night.study.paths.prices_toml.write_text("date = yesterday")
    with pytest.raises(BadInput, match=r"prices\.toml"):
        make_desk()
    make_desk(llm=None).check_price()


def test_prompts_and_replies_are_kept_whatever_is_in_them(make_desk: Any, night: Any) -> None:
    """Half a character that no file can hold is replaced, the rest stays."""
    desk = make_desk()
    desk.keep(3, "answer.txt", "so\ud800 on")
    assert (night.study.paths.call(3) / "answer.txt").read_text() == "so? on"


def test_what_cannot_be_kept_is_an_event(make_desk: Any, night: Any) -> None:
    """A file where the folder should be stands for a disk that refuses: the call goes on."""
    night.study.paths.call(1).parent.write_text("in the way")
    make_desk().keep(1, "question.md", "why")
    (event,) = night.reader.events("not_kept")
    assert "question.md could not be written" in event.text


def test_notes_are_bounded_and_news_are_told_once(make_desk: Any, night: Any) -> None:
    """An insight is cut, an empty one is none; an event is a row and a line for the screen."""
    desk = make_desk()
    desk.insight("x" * 5000)
    desk.insight("  \n ")
    desk.event("model_trouble", "anthropic is overloaded")
    assert list(desk.news()) == ["anthropic is overloaded"]
    assert list(desk.news()) == []
    assert [len(text) for text in night.reader.insights()] == [LONGEST_INSIGHT]
    assert [event.text for event in night.reader.events("model_trouble")] == ["anthropic is overloaded"]


@pytest.mark.parametrize(
    ("llm", "expected"),
    [
        ("claude-opus-5-5", ("anthropic", "claude-opus-5-5")),
        ("gpt-5.5", ("openai", "gpt-5.5")),
        ("openai:claude-like", ("openai", "claude-like")),
        ("llama3:8b", ("openai", "llama3:8b")),
        ("anthropic:llama3:8b", ("anthropic", "llama3:8b")),
        ("Qwen/Qwen3-8B", ("openai", "Qwen/Qwen3-8B")),
    ],
)
def test_who_is_asked(llm: str, expected: tuple[str, str]) -> None:
    """Only the two known prefixes are prefixes."""
    assert provider_and_model(llm) == expected
