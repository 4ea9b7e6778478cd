from __future__ import annotations

from typing import Any

import pytest

from harness.expectations import expectations
from harness.limits import Limits
from harness.studyfile import Agent

Night = Any  # the fixture's class lives in conftest.py


def last_line(night: Night, asked: str | None, **agent: object) -> str:
    settings = Agent.model_validate(agent)
    return expectations(night.study, night.reader, "landlock", Limits(), settings, asked=asked)[-1]


def test_offline_nothing_leaves_and_a_model_that_nobody_asks_is_named(night: Night) -> None:
    """The owner must not believe in a model that the chosen proposer never asks."""
    assert last_line(night, None) == "Nothing leaves this machine and nothing is spent: the proposer works offline."
    said = last_line(night, None, proposer="rules", llm="claude-x")
    assert "Proposer rules asks no language model, so not claude-x" in said


@pytest.mark.parametrize(
    ("llm", "variable", "url", "place"),
    [
        ("claude-x", "ANTHROPIC_BASE_URL", "", "at anthropic is"),
        ("claude-x", "ANTHROPIC_BASE_URL", "http://127.0.0.1:99", "at 127.0.0.1:99 is"),
        ("local", "OPENAI_BASE_URL", "http://joe:hunter2@127.0.0.1:99/v1?tok=abc", "at 127.0.0.1:99 is"),
        ("local", "OPENAI_BASE_URL", "nonsense", "at an address that cannot be read is"),
    ],
)
def test_whom_the_model_is_asked_at(
    night: Night, monkeypatch: pytest.MonkeyPatch, llm: str, variable: str, url: str, place: str
) -> None:
    """The real destination, without the secrets that an address may hold."""
    monkeypatch.setenv(variable, url)
    said = last_line(night, llm, llm=llm, max_usd=2.5, max_tokens=10_000)
    assert place in said
    assert "at most $2.50 and 10,000 tokens in all" in said
    assert "hunter2" not in said
    assert "abc" not in said
    assert "without a cap" in last_line(night, llm, llm=llm)
