"""Proposers led by a language model of one provider: it proposes whatever it has ready, and others fill the gaps.

The machinery is that of `agent.mixed`, with all proposals as the model's share. A model alone would leave the device
idle while it thinks, and would lose the night with its first outage.
"""

from __future__ import annotations

from agent.correspondent import Correspondent
from agent.mixed import MixedProposer
from harness.errors import WrongUse
from harness.records import History
from harness.terms import Desk, Terms


class LedProposer(MixedProposer):
    """Base of the two; ``name`` is the provider's."""

    def begin(self, terms: Terms) -> None:
        """Take the owner's terms; `WrongUse` without a model, or with one of another provider."""
        if terms.llm is None:
            raise WrongUse(f"proposer {self.name} needs a model: --llm or [agent] llm")
        super().begin(terms)

    def correspondent(self, llm: str, desk: Desk) -> Correspondent:
        """Return who asks the model, before anything is sent to a provider that was not meant."""
        made = super().correspondent(llm, desk)
        if made.source != self.name:
            raise WrongUse(
                f"proposer {self.name} does not ask {llm!r}, a model of {made.source}:"
                f" take proposer {made.source} or mixed, or another --llm"
            )
        return made

    def model_share(self, history: History, source: str) -> float:
        """Return all: what the model has ready is always next."""
        return 1.0


class AnthropicProposer(LedProposer):
    """Led by a model behind Anthropic's API."""

    name = "anthropic"


class OpenAIProposer(LedProposer):
    """Led by a model behind OpenAI's API, or behind a server that speaks it."""

    name = "openai"
