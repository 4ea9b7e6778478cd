from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from agent.led import AnthropicProposer, OpenAIProposer
from agent.mixed import MOST_FRUITLESS, MixedProposer
from harness.errors import WrongUse
from harness.proposers import load_proposer
from harness.records import ProposalState
from tests.agent.doubles import Actor, Evening, ideas, reply


def test_a_led_night_is_the_models_where_it_keeps_up(make_night: Any) -> None:
    """With answers faster than trials every proposal but those before the first answer is the model's."""
    evening = Evening(make_night(), ideas(), kind=AnthropicProposer, call_seconds=10.0)
    sources = evening.search(30)
    assert sources[0] == "rules"
    assert set(sources[1:]) == {"anthropic"}


def test_gaps_of_a_led_night_are_filled(make_night: Any) -> None:
    """A model that is slower than the trials makes what it can; the device never waits."""
    evening = Evening(make_night(), ideas(), kind=AnthropicProposer)
    counts = Counter(evening.search(60))
    assert 0.5 <= counts["anthropic"] / 60 <= 0.65
    assert counts["rules"] + counts["sampler"] + counts["anthropic"] == 60


@pytest.mark.parametrize("kind", [AnthropicProposer, OpenAIProposer])
def test_a_led_night_needs_a_model(make_night: Any, kind: type[MixedProposer]) -> None:
    """The message says how to name one."""
    with pytest.raises(WrongUse, match=rf"proposer {kind.name} needs a model: --llm or \[agent\] llm"):
        Evening(make_night(), [], kind=kind, llm=None)


def test_a_model_of_another_provider_is_refused_unasked(make_night: Any) -> None:
    """Nothing is sent to a provider that the owner did not mean."""
    actor = Actor([], at_check=AssertionError("asked"))
    with pytest.raises(WrongUse, match="openai does not ask 'claude-x', a model of anthropic"):
        Evening(make_night(), [], kind=OpenAIProposer, actor=actor, llm="claude-x")


@pytest.mark.parametrize("name", ["anthropic", "openai", "mixed"])
def test_they_are_installed(name: str) -> None:
    """The command line finds them by name, without importing an SDK."""
    assert load_proposer(name).name == name


def test_proposals_that_never_run_do_not_keep_the_device_idle(make_night: Any) -> None:
    """A model that answers at once with what is always refused gets no more than a few turns in a row."""
    refused = reply(*[{"optim.learning_rate": 1e6}] * 3)
    evening = Evening(make_night(), [refused] * 300, kind=AnthropicProposer, call_seconds=0.0)
    sources = evening.search(60)
    states = [past.state for past in evening.night.past]
    assert Counter(sources)["anthropic"] > 20
    longest = run = 0
    for state in states:
        run = run + 1 if state is ProposalState.REFUSED else 0
        longest = max(longest, run)
    assert longest == MOST_FRUITLESS
